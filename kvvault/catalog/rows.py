"""What rows of the catalog say, as values. They come from disk, so none is believed before its
fields have been looked at: what cannot be is an error (`corrupt`) or, of blocks, a miss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, RowMapping

from kvvault.errors import CatalogCorruptError
from kvvault.model import ID_BYTES, PAGE_BYTES, SegmentFacts, SegmentState
from kvvault.segments.format import MAX_BLOCK_BYTES, MAX_SLOTS, Extent

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class TenantRow:
    tenant_id: bytes
    lookup_id: bytes
    root_epoch: str
    wrapped_key: bytes
    wrapped_index_key: bytes
    sealed_name: bytes
    created_at: float
    key_no: int = 1


@dataclass(frozen=True, slots=True)
class SegmentRow:
    facts: SegmentFacts
    wrapped_secret: bytes | None
    commitment: bytes
    boot_id: str
    synced: bool
    change: int
    idle_s: float | None = None
    sealed_labels: bytes | None = None

    @property
    def well_formed(self) -> bool:
        """Whether such a segment can exist. Rows come from disk: check before use."""
        facts = self.facts
        return (
            len(facts.segment_id) == ID_BYTES
            and (facts.tenant_id is None or len(facts.tenant_id) == ID_BYTES)
            and len(facts.namespace_digest) == _DIGEST_BYTES
            and 0 < facts.block_bytes <= MAX_BLOCK_BYTES
            and facts.block_bytes % PAGE_BYTES == 0
            and 0 <= facts.blocks <= MAX_SLOTS
            and (self.wrapped_secret is not None or not facts.state.live)
        )


@dataclass(frozen=True, slots=True)
class RevokedBlock:
    """A single block that is not served any more although its segment lives."""

    segment_id: bytes
    slot: int
    block_id: bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed since the caller last looked, and where to look from next time."""

    segments: Sequence[SegmentRow]
    extents: Sequence[Extent]
    change: int
    extent_no: int
    policy_no: int
    """Number of the policy in force; 0 when there is none."""
    revoked: Sequence[RevokedBlock] = ()
    revoked_seq: int = -1


@dataclass(frozen=True, slots=True)
class Terms:
    """Under what a segment is written. Times are absolute."""

    policy_no: int | None = None
    rule: str = ""
    retention_class: str = ""
    sealed_labels: bytes | None = None
    delete_by: float | None = None
    idle_s: float | None = None
    idle_until: float | None = None
    keep_until: float | None = None


def tenant_of(row: Row[tuple[object, ...]]) -> TenantRow:
    """The row's tenant.

    Raises:
        CatalogCorruptError: a field has not the type it should.
    """
    m = row._mapping
    try:
        return TenantRow(
            _blob(m["tenant_id"]),
            _blob(m["lookup_id"]),
            str(m["root_epoch"]),
            _blob(m["wrapped_key"]),
            _blob(m["wrapped_index_key"]),
            _blob(m["sealed_name"]),
            float(m["created_at"]),
            int(m["key_no"]),
        )
    except (TypeError, ValueError) as exc:
        raise corrupt("a tenant") from exc


def segment_of(m: Mapping[str, Any] | RowMapping) -> SegmentRow:
    """The row's segment; it may still be one that cannot exist (`SegmentRow.well_formed`).

    Raises:
        CatalogCorruptError: a field has not the type it should.
    """
    try:
        return SegmentRow(
            SegmentFacts(
                segment_id=_blob(m["segment_id"]),
                tenant_id=None if m["tenant_id"] is None else _blob(m["tenant_id"]),
                namespace_digest=_blob(m["namespace"]),
                state=SegmentState(m["state"]),
                block_bytes=int(m["block_bytes"]),
                blocks=int(m["blocks"]),
                created_at=float(m["created_at"]),
                policy_no=_optional_int(m["policy_no"]),
                rule=str(m["rule"]),
                retention_class=str(m["retention_class"]),
                delete_by=_optional_time(m["delete_by"]),
                idle_until=_optional_time(m["idle_until"]),
                keep_until=_optional_time(m["keep_until"]),
                hits=int(m["hits"]),
                last_used=_optional_time(m["last_used"]),
                revoked=int(m.get("revoked", 0)),
            ),
            wrapped_secret=None if m["wrapped_secret"] is None else _blob(m["wrapped_secret"]),
            commitment=_blob(m["commitment"]),
            boot_id=str(m["boot_id"]),
            synced=bool(m["synced"]),
            change=int(m["change"]),
            idle_s=_optional_time(m["idle_s"]),
            sealed_labels=None if m["sealed_labels"] is None else _blob(m["sealed_labels"]),
        )
    except (TypeError, ValueError, OverflowError) as exc:
        raise corrupt("a segment") from exc


def extent_of(fields: Sequence[object]) -> list[Extent]:
    """The row's extent, or nothing when a field has not the type it should (its blocks miss)."""
    segment_id, first_slot, block_ids, nonces, tags, *origins = fields
    try:
        if not isinstance(first_slot, int | float):
            return []
        slot = int(first_slot)
        # Whose a block is does not matter to who reads it: damage there makes it nobody's.
        whose = [o for o in origins if isinstance(o, bytes) and len(o) * 2 == len(_blob(block_ids))]
        return [
            Extent(_blob(segment_id), slot, _blob(block_ids), _blob(nonces), _blob(tags), *whose)
        ]
    except (TypeError, ValueError, OverflowError):
        return []


def revoked_of(fields: Sequence[object]) -> list[RevokedBlock]:
    """
    Raises:
        CatalogCorruptError: the row cannot be what it says; somebody might be served what was
            erased.
    """
    segment_id, slot, block_id = fields
    if not isinstance(slot, int) or not 0 <= slot < MAX_SLOTS:
        raise corrupt("a revoked block")
    found = blob(block_id, "a revoked block")
    if len(found) != ID_BYTES:
        raise corrupt("a revoked block")
    return [RevokedBlock(blob(segment_id, "a revoked block"), slot, found)]


def blob(value: object, what: str) -> bytes:
    """A column's bytes.

    Raises:
        CatalogCorruptError: it holds something else; `what` it is a part of.
    """
    if not isinstance(value, bytes):
        raise corrupt(what)
    return value


def corrupt(what: str) -> CatalogCorruptError:
    """What to raise for a row that cannot be what it says."""
    return CatalogCorruptError(
        f"{what} in the catalog cannot be what its row says",
        hint="move catalog.sqlite3* away; the vault then starts empty",
    )


def _blob(value: object) -> bytes:
    """A column's bytes. Not ``bytes(value)``: of a damaged row's integer that makes as many zeros.

    Raises:
        TypeError: it holds something else.
    """
    if not isinstance(value, bytes):
        raise TypeError("not a blob")
    return value


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))


def _optional_time(value: object) -> float | None:
    """
    Raises:
        ValueError: no finite number: a deadline that is none would never come.
    """
    if value is None:
        return None
    number = float(str(value))
    if not math.isfinite(number):
        raise ValueError("not a time")
    return number
