"""Single blocks that go while their segments live, one function per transaction step; see
`kvvault.catalog.operations`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np
from sqlalchemy import Connection, func, select

from kvvault.catalog import operations, retention
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.catalog.log import Fact
from kvvault.catalog.protecting import Reach
from kvvault.catalog.retention import Revoked
from kvvault.catalog.rows import blob, corrupt
from kvvault.model import ID_BYTES
from kvvault.segments.format import MAX_SLOTS, ORIGIN_BYTES

_EXTENTS_OF = """
    SELECT e.segment_id, e.first_slot, e.block_ids, e.origins
    FROM segments s JOIN extents e ON e.segment_id = s.segment_id
    WHERE s.tenant_id = ? AND s.namespace = ? AND s.state IN ('open', 'sealed')
    ORDER BY e.segment_id, e.first_slot
"""
_ADD = """
    INSERT INTO revoked_blocks (segment_id, slot, block_id, deletion_no) VALUES (?, ?, ?, ?)
"""

Places = dict[bytes, list[tuple[int, bytes]]]
"""Slots and block ids by segment."""


def find_blocks(
    connection: Connection,
    tenant_id: bytes,
    namespace: bytes,
    block_ids: Collection[bytes],
    owners: Mapping[bytes, int] | None = None,
) -> Places:
    """Where these blocks are, wherever they are more than once; without what is revoked already.
    `owners`: only where a block is of this prompt (by block id).

    Looks at every block of the tenant in that namespace: a million take about 0.3 s.
    """
    rows, _ = direct(connection, _EXTENTS_OF, (tenant_id, namespace))
    whole: list[tuple[bytes, int, bytes, object]] = []
    for segment_id, first_slot, ids, origins in rows:
        if (
            isinstance(segment_id, bytes)
            and isinstance(ids, bytes)
            and isinstance(first_slot, int)
            and 0 <= first_slot < MAX_SLOTS
            and len(ids) % ID_BYTES == 0
        ):  # of damaged rows nothing is served either
            whole.append((segment_id, first_slot, ids, origins))
    if not whole or not block_ids:
        return {}
    ends = np.fromiter(accumulate(len(one[2]) // ID_BYTES for one in whole), np.int64)
    lows = np.frombuffer(b"".join(one[2] for one in whole), "<u8")[::2]
    sought = np.frombuffer(b"".join(sorted(block_ids)), "<u8")[::2]
    found: Places = {}
    done = revoked_slots(connection)
    for at in np.flatnonzero(np.isin(lows, sought)).tolist():
        row = int(np.searchsorted(ends, at, side="right"))
        segment_id, first_slot, ids, origins = whole[row]
        i = at - (int(ends[row]) - len(ids) // ID_BYTES)
        block_id = ids[i * ID_BYTES : (i + 1) * ID_BYTES]
        slot = first_slot + i
        if owners is not None and owners.get(block_id) != _owner(origins, i, len(ids)):
            continue
        if block_id in block_ids and slot not in done.get(segment_id, ()):
            found.setdefault(segment_id, []).append((slot, block_id))
    return found


def apart_from(places: Places, block_ids: Collection[bytes]) -> Places:
    """Places of all other blocks."""
    found = {
        segment_id: [member for member in members if member[1] not in block_ids]
        for segment_id, members in places.items()
    }
    return {segment_id: members for segment_id, members in found.items() if members}


def counts(places: Places, block_ids: Collection[bytes]) -> dict[bytes, int]:
    """How many places of these blocks there are, by segment; segments with none left out."""
    found = {
        segment_id: sum(block_id in block_ids for _, block_id in members)
        for segment_id, members in places.items()
    }
    return {segment_id: count for segment_id, count in found.items() if count}


def _owner(origins: object, index: int, size: int) -> int:
    """The prompt whose a block of an extent is; 0: nobody's."""
    if not isinstance(origins, bytes) or len(origins) * ID_BYTES != size * ORIGIN_BYTES:
        return 0
    return int.from_bytes(origins[index * ORIGIN_BYTES : index * ORIGIN_BYTES + 4], "big")


def owners_in(connection: Connection, segment_id: bytes) -> dict[int, tuple[bytes, int]]:
    """What is in a segment: block id and owner, by slot; damaged rows left out."""
    found: dict[int, tuple[bytes, int]] = {}
    for extent in operations.list_extents(connection, segment_id):
        if extent.well_formed:
            for i in range(extent.count):
                block_id = extent.block_ids[i * ID_BYTES : (i + 1) * ID_BYTES]
                whose = _owner(extent.origins, i, len(extent.block_ids))
                found[extent.first_slot + i] = (block_id, whose)
    return found


def revoked_slots(connection: Connection) -> dict[bytes, set[int]]:
    """Slots that are revoked, by segment."""
    r = t.revoked_blocks.c
    found: dict[bytes, set[int]] = {}
    for segment_id, slot in connection.execute(select(r.segment_id, r.slot)):
        found.setdefault(blob(segment_id, "a revoked block"), set()).add(int(slot))
    return found


def revoked_of(connection: Connection, segment_id: bytes) -> dict[int, bytes]:
    """Slots of one segment that are revoked, and which blocks these are."""
    r = t.revoked_blocks.c
    rows = connection.execute(select(r.slot, r.block_id).where(r.segment_id == segment_id))
    return {int(slot): blob(block_id, "a revoked block") for slot, block_id in rows}


def revoke_blocks(
    connection: Connection,
    places: Mapping[bytes, Sequence[tuple[int, bytes]]],
    *,
    trigger: str,
    now: float,
    actor: str,
    reason: str,
    about: Mapping[str, Fact],
    always: bool = False,
) -> Revoked:
    """Have single blocks not be served any more, but for those of segments that a hold keeps.
    Writes it down, in the audit log as well (`about`: what else that says; keyed ids only); with
    `always` also when nothing was left to revoke."""
    free = [
        one.facts
        for one in retention.live_among(connection, list(places), Reach.WHOLE)
        if not one.held
    ]
    done = revoked_slots(connection)
    fresh = {
        facts.segment_id: [
            one for one in places[facts.segment_id] if one[0] not in done.get(facts.segment_id, ())
        ]
        for facts in free
    }
    blocks = sum(map(len, fresh.values()))
    held = len(places) - len(free)
    if not blocks and not always:
        return Revoked(held=held)
    data_bytes = sum(len(fresh[facts.segment_id]) * facts.block_bytes for facts in free)
    number = retention.add_deletion(
        connection,
        trigger=trigger,
        actor=actor,
        reason=reason,
        segments=0,
        blocks=blocks,
        data_bytes=data_bytes,
        now=now,
        about={**about, "held": held},
    )
    for segment_id, members in fresh.items():
        for slot, block_id in members:
            direct(connection, _ADD, (segment_id, slot, block_id, number))
    return Revoked(tuple(fresh), blocks, data_bytes, held, deletion_no=number)


def oldest_waiting(connection: Connection) -> int | None:
    """Number of the oldest deletion of which something is still under a key; None: of none."""
    found = connection.execute(select(func.min(t.revoked_blocks.c.deletion_no))).scalar()
    if not isinstance(found, int | None):
        raise corrupt("a revoked block")
    return found
