"""Entries of the audit log, one function per transaction step; see `kvvault.catalog.operations`.

An entry is added in the transaction of the act it tells of: there is no act without its entry, and
no entry of something that did not happen.

An entry is one line of canonical JSON (RFC 8785): ``kind``, ``at`` (seconds since the epoch),
``prev`` (see `link_of`; none in the first) and whatever else its kind has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import rfc8785
from sqlalchemy import (
    Connection,
    Float,
    LargeBinary,
    bindparam,
    cast,
    exists,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from kvvault.catalog import schema as t

Fact: TypeAlias = str | int | float | bool | list[str] | None
"""What an entry may hold besides its kind and time. No personal data: keyed ids only (REQ-A4)."""

_MOST: Final = (1 << 53) - 1
"""The largest whole number of JSON."""
LAST_INDEX: Final = (1 << 40) - 1
"""Nobody comes to more entries: with a thousand a second it takes 34 years."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A signed note about the log's first `size` entries, as it is stored."""

    size: int
    note: str
    made_at: float


def canonical(value: object) -> str:
    """Canonical JSON (RFC 8785) of text, numbers, lists and string-keyed mappings. What JSON cannot
    say exactly is said as nearly as it can: what a damaged row claims keeps nobody from deleting.
    """
    return exactly(_sayable(value))


def exactly(value: Any) -> str:
    """The same of what JSON can say.

    Raises:
        ValueError: it cannot say this.
    """
    return rfc8785.dumps(value).decode()


def _sayable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-_MOST, min(value, _MOST))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {_sayable(key): _sayable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(one) for one in value]
    return value


def raw(body: str) -> bytes:
    """The bytes of an entry, also of one that an edit left without being text."""
    return body.encode("utf-8", "surrogateescape")


def text(value: object) -> str:
    """The reverse, of a column that was read as a BLOB."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else ""


def link_of(body: str) -> str:
    """What the next entry says of this one: half of its SHA-256, in hex. It shows which entry was
    edited or taken out by somebody who did not write all later ones anew; against those there are
    checkpoints."""
    return hashlib.sha256(raw(body)).hexdigest()[:32]


_INDEX = t.log_entries.c.entry_no
_BEFORE = t.log_entries.alias()
_NEWEST = (
    select(_INDEX, cast(t.log_entries.c.body, LargeBinary))
    .where(_INDEX.between(0, bindparam("last")))
    .order_by(_INDEX.desc())
    .limit(1)
)
_FIRST_OF_LAST = (
    # The first of the unbroken row of indices that ends with the last one there can be.
    select(_INDEX)
    .where(
        _INDEX.between(0, LAST_INDEX),
        ~exists().where(_BEFORE.c.entry_no == _INDEX - 1),
    )
    .order_by(_INDEX.desc())
    .limit(1)
)
_INSERT = insert(t.log_entries)
# Made once: building a statement costs as much as running it.


def _newest(connection: Connection) -> tuple[int, str] | None:
    """Index and body of the entry after which the next one comes.

    Rows with an index that nobody can have come to are none of the log: whoever put them there must
    not keep what happens from being done and written down. `stray` finds them.
    """
    newest = connection.execute(_NEWEST, {"last": LAST_INDEX}).first()
    if newest is not None and newest[0] == LAST_INDEX:
        first = connection.execute(_FIRST_OF_LAST).scalar_one()
        newest = connection.execute(_NEWEST, {"last": first - 1}).first()
    return None if newest is None else (newest[0], text(newest[1]))


def append(connection: Connection, kind: str, at: float, facts: Mapping[str, Fact]) -> int:
    """Add an entry; its index. `at`: seconds since the epoch, by the vault's own time (of
    jobs: the wall clock's), kept to the millisecond. Costs about half a millisecond."""
    newest = _newest(connection)
    index = 0 if newest is None else newest[0] + 1
    link = {} if newest is None else {"prev": link_of(newest[1])}
    body = canonical({**facts, "kind": kind, "at": round(at, 3), **link})
    connection.execute(_INSERT, {"entry_no": index, "body": body})
    return index


def next_index(connection: Connection) -> int:
    """Which index the next entry gets."""
    newest = _newest(connection)
    return 0 if newest is None else newest[0] + 1


def stray(connection: Connection) -> Sequence[int]:
    """Indices below zero, which no entry has, the first thousand. Those that are too large are at
    the end of `entries`."""
    return list(connection.scalars(select(_INDEX).where(_INDEX < 0).order_by(_INDEX).limit(1000)))


def entries(connection: Connection, start: int = 0, limit: int = -1) -> Sequence[tuple[int, str]]:
    """Entries from `start` on, in order, at most `limit`: index and body. As the rows say."""
    entry = t.log_entries.c
    rows = connection.execute(
        select(entry.entry_no, cast(entry.body, LargeBinary))
        .where(entry.entry_no >= start)
        .order_by(entry.entry_no)
        .limit(limit)
    )
    return [(int(row[0]), text(row[1])) for row in rows]


def body(connection: Connection, index: int) -> str | None:
    """One entry; None where there is none of that index."""
    entry = t.log_entries.c
    column = cast(entry.body, LargeBinary)
    row = connection.execute(select(column).where(entry.entry_no == index)).first()
    return None if row is None else text(row[0])


def newest_first(connection: Connection, kinds: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Entries of these kinds, the newest first: index and body. Read as they are asked for; half a
    microsecond for each entry that is passed over."""
    entry = t.log_entries.c
    # As canonical JSON writes it; what stands inside a text has its quotation marks escaped.
    wanted = or_(*(func.instr(entry.body, f'"kind":"{kind}"') > 0 for kind in kinds))
    rows = connection.execute(
        select(entry.entry_no, cast(entry.body, LargeBinary))
        .where(entry.entry_no.between(0, LAST_INDEX), wanted)
        .order_by(entry.entry_no.desc())
    )
    with rows:
        for row in rows:
            yield int(row[0]), text(row[1])


def checkpoints(connection: Connection) -> Sequence[CheckpointRow]:
    """Those that are kept, smallest first."""
    c = t.checkpoints.c
    rows = connection.execute(
        select(c.size, cast(c.note, LargeBinary), cast(c.made_at, Float)).order_by(c.size)
    )
    return [CheckpointRow(int(row[0]), text(row[1]), float(row[2] or 0)) for row in rows]


def add_checkpoint(connection: Connection, size: int, note: str, now: float) -> None:
    """Keep a checkpoint; one of that size that is there already stays."""
    statement = upsert(t.checkpoints).values(size=size, note=note, made_at=now)
    connection.execute(statement.on_conflict_do_nothing())
