"""Entries of the audit log, one function per transaction step; see `kvvault.catalog.operations`.

An entry is added in the transaction of the act it tells of: there is no act without its entry, and
no entry of something that did not happen.

An entry is one line of canonical JSON (RFC 8785): ``kind``, ``at`` (seconds since the epoch),
``prev`` (see `link_of`; none in the first) and whatever else its kind has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import rfc8785
from sqlalchemy import Connection, Float, LargeBinary, cast, func, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert

from kvvault.catalog import schema as t

Fact: TypeAlias = str | int | float | bool | list[str] | None
"""What an entry may hold besides its kind and time. No personal data: keyed ids only (REQ-A4)."""

_MOST: Final = (1 << 53) - 1
"""The largest whole number of JSON."""


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


_NEWEST = (
    # An index that nobody can have come to must not keep what happens from being written down.
    select(t.log_entries.c.entry_no, cast(t.log_entries.c.body, LargeBinary))
    .where(t.log_entries.c.entry_no.between(0, _MOST))
    .order_by(t.log_entries.c.entry_no.desc())
    .limit(1)
)
_INSERT = insert(t.log_entries)
# Made once: building a statement costs as much as running it.


def append(connection: Connection, kind: str, at: float, facts: Mapping[str, Fact]) -> int:
    """Add an entry; its index. `at`: seconds since the epoch, by the vault's own time, kept to the
    millisecond. Costs about half a millisecond."""
    newest = connection.execute(_NEWEST).first()
    index = 0 if newest is None else int(newest[0]) + 1
    link = {} if newest is None else {"prev": link_of(text(newest[1]))}
    body = canonical({**facts, "kind": kind, "at": round(at, 3), **link})
    connection.execute(_INSERT, {"entry_no": index, "body": body})
    return index


def next_index(connection: Connection) -> int:
    """Which index the next entry gets."""
    entry = t.log_entries.c
    newest = connection.execute(
        select(func.max(entry.entry_no)).where(entry.entry_no.between(0, _MOST))
    ).scalar()
    return 0 if newest is None else int(newest) + 1


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
