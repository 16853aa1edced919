"""What a purge may certify: what was deleted as the vault itself wrote it down, not as a row of the
catalog says, which whoever can write to the catalog can put there.

Two things count: a deletion's first receipt, which nobody makes without the signing key, if the log
names it as it is; and the entry of the log, if the row says the same. A deletion that has neither
gets no receipt. Entries have no signature of their own: somebody who can add rows can add entries
too, until a checkpoint fixes what the log is (docs/audit.md).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

from sqlalchemy import Connection

from kvvault.audit.envelope import Receipt, parse
from kvvault.audit.verifying import deletion_of, is_entry_of
from kvvault.catalog import log, purging, receipts
from kvvault.catalog.log import canonical
from kvvault.errors import FormatError

__all__ = ["REVOKED", "Evidence", "Said", "find"]

REVOKED: Final = "revoked"
"""Phase of first receipts."""


@dataclass(frozen=True, slots=True)
class Said:
    """What log and row say of a deletion. The log does not have the reason."""

    trigger: str
    actor: str
    segments: int
    blocks: int
    data_bytes: int
    revoked_at: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of the deletions that a purge covers, by their numbers."""

    firsts: Mapping[int, Receipt]
    """First receipts. Those of which there are two (what became of an engine's copies was not known
    at first): the last."""
    said: Mapping[int, Said]
    damaged: Sequence[int]
    """Those whose row, or whose first receipt, is not what the log says, or of which it says
    nothing."""


def find(connection: Connection, public_key: bytes, automatic: Collection[str]) -> Evidence:
    """What there is. Reads the log back to the oldest of these deletions: some microseconds an
    entry of a deletion, and half a microsecond any other.

    :param automatic: triggers of deletions that have no first receipt.
    """
    rows = dict(purging.uncovered(connection))
    entries, named, began = _told(connection, rows.keys())
    said = {}
    damaged = set()
    for number, row in rows.items():
        entry = entries.get(number)
        if entry is not None and _same(row, entry):
            said[number] = entry
        elif number in entries or not _before(row, began):
            damaged.add(number)
    asked = [number for number, row in rows.items() if row[0] not in automatic]
    firsts = _firsts(connection, asked, public_key)
    for number, index in named.items():
        first = firsts.get(number)
        if first is None or first.entry != index:
            firsts.pop(number, None)
            damaged.add(number)
    return Evidence(firsts, said, sorted(damaged))


def _told(
    connection: Connection, numbers: Collection[int]
) -> tuple[dict[int, Said | None], dict[int, int], float]:
    """What the log says of deletions (None: nothing that kvvault writes); which entry is of the
    newest first receipt of each; and when the log began."""
    told: dict[int, Said | None] = {}
    named: dict[int, int] = {}
    left = set(numbers)
    for index, body in log.newest_first(connection, ("deletion", "receipt")) if left else ():
        facts = _facts(body)
        number = facts.get("deletion")
        if type(number) is not int or number not in left:
            continue
        if facts.get("kind") == "receipt" and facts.get("phase") == REVOKED:
            named.setdefault(number, index)
        elif facts.get("kind") == "deletion":
            told[number] = _said(facts)
            left.remove(number)
            if not left:
                break
    began = 0.0
    for _, body in log.entries(connection, limit=1):
        at = _facts(body).get("at")
        began = at if isinstance(at, int | float) else 0.0
    return told, named, began


def _facts(body: str) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _said(facts: Mapping[str, Any]) -> Said | None:
    trigger, actor, at = facts.get("trigger"), facts.get("actor"), facts.get("at")
    segments, blocks, data_bytes = (facts.get(name) for name in ("segments", "blocks", "bytes"))
    if not (isinstance(trigger, str) and isinstance(actor, str) and isinstance(at, int | float)):
        return None
    if not (type(segments) is type(blocks) is type(data_bytes) is int):
        return None
    return Said(trigger, actor, segments, blocks, data_bytes, at)


def _same(row: tuple[Any, ...], said: Said) -> bool:
    *figures, at = row
    written, told = (*figures, round(at, 3)), astuple(said)
    # An entry has what JSON can say of the row.
    return written == told or canonical(written) == canonical(told)


def _before(row: tuple[Any, ...], began: float) -> bool:
    """Whether a deletion was made by an older kvvault, which kept no log: nothing says what it was,
    and nothing is wrong."""
    return bool(row[-1] < began)


def _firsts(
    connection: Connection, numbers: Sequence[int], public_key: bytes
) -> dict[int, Receipt]:
    """The first receipts of deletions, by number, as far as they are what the log says they were
    and belong where they are."""
    found: dict[int, Receipt] = {}
    for stored in receipts.of_deletions(connection, numbers, REVOKED):
        try:
            first = parse(stored.document)
        except FormatError:
            continue
        number = deletion_of(first)
        if (
            first.public_key != public_key
            or not first.authentic
            or (first.receipt_id, first.phase) != (stored.receipt_id.hex(), REVOKED)
            or number is None
            or number != stored.deletion_no
        ):
            continue
        if number in found and found[number].entry > first.entry:
            continue
        body = log.body(connection, first.entry)
        if body is not None and is_entry_of(first.entry, body, first):
            found[number] = first
    return found
