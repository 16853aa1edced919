"""Single blocks that go while their segments live, one function per transaction step; see
`kvvault.catalog.operations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from sqlalchemy import Connection, func, select

from kvvault.catalog import retention
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.catalog.log import Fact
from kvvault.catalog.retention import Revoked
from kvvault.catalog.rows import blob
from kvvault.model import ID_BYTES
from kvvault.segments.format import MAX_SLOTS

_EXTENTS_OF = """
    SELECT e.segment_id, e.first_slot, e.block_ids
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
    connection: Connection, tenant_id: bytes, namespace: bytes, block_ids: frozenset[bytes]
) -> Places:
    """Where these blocks are, wherever they are more than once; without what is revoked already.

    Looks at every block of the tenant in that namespace: a million take about 0.3 s.
    """
    rows, _ = direct(connection, _EXTENTS_OF, (tenant_id, namespace))
    whole: list[tuple[bytes, int, bytes]] = []
    for segment_id, first_slot, ids in rows:
        if (
            isinstance(segment_id, bytes)
            and isinstance(ids, bytes)
            and isinstance(first_slot, int)
            and 0 <= first_slot < MAX_SLOTS
            and len(ids) % ID_BYTES == 0
        ):  # of damaged rows nothing is served either
            whole.append((segment_id, first_slot, ids))
    if not whole or not block_ids:
        return {}
    ends = np.fromiter(accumulate(len(ids) // ID_BYTES for *_, ids in whole), np.int64)
    lows = np.frombuffer(b"".join(ids for *_, ids in whole), "<u8")[::2]
    sought = np.frombuffer(b"".join(sorted(block_ids)), "<u8")[::2]
    found: Places = {}
    done = revoked_slots(connection)
    for at in np.flatnonzero(np.isin(lows, sought)).tolist():
        row = int(np.searchsorted(ends, at, side="right"))
        segment_id, first_slot, ids = whole[row]
        i = at - (int(ends[row]) - len(ids) // ID_BYTES)
        block_id = ids[i * ID_BYTES : (i + 1) * ID_BYTES]
        slot = first_slot + i
        if block_id in block_ids and slot not in done.get(segment_id, ()):
            found.setdefault(segment_id, []).append((slot, block_id))
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
        for one in retention.live_among(connection, list(places), whole=True)
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
    return None if found is None else int(found)
