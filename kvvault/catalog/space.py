"""Space: what is used, what may be used, and setting it aside before it is written.

Every segment has a number of slots *granted* to it, raised in a transaction that adds up everything
there is; writers write no slot that was not granted. So the sum of all files never passes the cap,
whoever writes, and at no instant (CASES 1 and 6). One transaction grants some 16 MiB, so this costs
nothing that shows.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, func, select, update

from kvvault.catalog import schema as t
from kvvault.catalog.operations import LIVE, SegmentGoneError
from kvvault.catalog.rows import blob
from kvvault.catalog.writer import LOG_BYTES
from kvvault.errors import StorageError
from kvvault.model import SegmentState
from kvvault.segments.format import MAX_BLOCK_BYTES, MAX_SLOTS

_ROW_BYTES = 128
"""What the catalog takes for a block, when each is written alone."""


class NoSpaceError(StorageError):
    """A limit of the policy is reached.

    :param short: how many bytes would have to go.
    :param used: how many there are of what the limit is for.
    :param rule: the rule whose `max_bytes` it is, and `tenant_id` the tenant for whom; None for the
        vault's cap or floor.
    """

    def __init__(
        self,
        message: str,
        short: int,
        used: int,
        *,
        rule: str | None = None,
        tenant_id: bytes | None = None,
    ) -> None:
        super().__init__(
            message, hint="blocks are not stored until something goes", errno=errno.ENOSPC
        )
        self.short = short
        self.used = used
        self.rule = rule
        self.tenant_id = tenant_id


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """What may be used. Bytes."""

    cap_bytes: int | None = None
    """Of everything in the vault's directory."""
    free_floor_bytes: int = 0
    """What has to stay free on the file system, whoever uses it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the catalog does not know of itself. Bytes."""

    catalog_bytes: int
    """Of the catalog's own files, but for its log."""
    free_bytes: int
    """What the file system has left for us."""
    total_bytes: int
    log_bytes: int = 0
    """Of the catalog's log."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What is used. Bytes."""

    used: int
    """Segment files, with what is granted and not written yet."""
    pending: int
    """Granted and not written yet."""
    pending_blocks: int = 0
    """The same in blocks."""

    def with_more(self, blocks: int, block_bytes: int) -> Usage:
        """What it would be if so many more blocks were granted."""
        more = blocks * block_bytes
        return Usage(self.used + more, self.pending + more, self.pending_blocks + blocks)


def usage(
    connection: Connection, *, rule: str | None = None, tenant_id: bytes | None = None
) -> Usage:
    """What is used by all segments, or by those that one rule governs of one tenant."""
    s = t.segments.c
    statement = select(*_SUMS).where(*_COUNTED)
    if rule is not None:
        statement = statement.where(s.rule == rule, s.tenant_id == tenant_id)
    row = connection.execute(statement).one()
    return Usage(int(row[0]), int(row[1]), int(row[2]))


def used_by_rule(connection: Connection) -> dict[tuple[str, bytes], int]:
    """Bytes used of what each rule governs of each tenant."""
    s = t.segments.c
    statement = select(s.rule, s.tenant_id, _SUMS[0]).where(*_COUNTED).group_by(s.rule, s.tenant_id)
    return {
        (rule, tenant_id): int(used)
        for rule, tenant_id, used in connection.execute(statement)
        if isinstance(rule, str) and isinstance(tenant_id, bytes)
    }


def _sums() -> tuple[ColumnElement[int], ...]:
    s = t.segments.c
    # Whoever writes to a revoked segment may not know it yet, and have a batch under way: its grant
    # counts until its file is gone.
    is_sealed = s.state == SegmentState.SEALED.value
    slots = case((is_sealed, s.blocks), else_=func.max(s.granted, s.blocks))
    pending = case((is_sealed, 0), else_=func.max(s.granted - s.blocks, 0))
    return (
        func.coalesce(func.sum(slots * s.block_bytes), 0),
        func.coalesce(func.sum(pending * s.block_bytes), 0),
        func.coalesce(func.sum(pending), 0),
    )


_SUMS = _sums()
_COUNTED = (
    t.segments.c.state.in_((*LIVE, SegmentState.REVOKED.value)),
    # A damaged row that claims what cannot be must not keep everybody from storing.
    t.segments.c.blocks.between(0, MAX_SLOTS),
    t.segments.c.granted.between(0, MAX_SLOTS),
    t.segments.c.block_bytes.between(1, MAX_BLOCK_BYTES),
)


def catalog_reserve(around: Surroundings, cap_bytes: int) -> int:
    """What the catalog may take before anybody asks again, of a vault with that cap: its log grows
    up to its limit, and a transaction beyond it. Of a tiny cap no more than a quarter."""
    log = max(around.log_bytes, min(2 * LOG_BYTES, cap_bytes // 4))
    return around.catalog_bytes + log


def counted(of: Usage, around: Surroundings, cap_bytes: int) -> int:
    """What counts against a cap: segment files with what is granted, and the catalog with what it
    may take before anybody asks again."""
    return of.used + catalog_reserve(around, cap_bytes) + of.pending_blocks * _ROW_BYTES


def below_floor(of: Usage, limits: SpaceLimits, around: Surroundings) -> int:
    """How much less is free than has to stay free once all that is granted is written; 0 or less
    when there is enough."""
    return limits.free_floor_bytes + of.pending - around.free_bytes


def grant(
    connection: Connection,
    segment_id: bytes,
    slots: int,
    limits: SpaceLimits,
    around: Surroundings,
    max_bytes: int | None = None,
) -> None:
    """Set space aside for an open segment, `slots` in all, if the limits and its rule's `max_bytes`
    allow it.

    Raises:
        SegmentGoneError: it is not open any more.
        NoSpaceError: a limit forbids it.
    """
    s = t.segments.c
    row = connection.execute(
        select(s.granted, s.block_bytes, s.rule, s.tenant_id).where(
            s.segment_id == segment_id, s.state == SegmentState.OPEN.value
        )
    ).first()
    if row is None:
        raise SegmentGoneError
    blocks = slots - int(row[0])
    more = blocks * int(row[1])
    if more <= 0:
        return
    everything = usage(connection)
    then = everything.with_more(blocks, int(row[1]))
    if limits.cap_bytes is not None:
        short = counted(then, around, limits.cap_bytes) - limits.cap_bytes
        if short > 0:
            raise NoSpaceError("the vault's cap is reached", short, everything.used)
    short = below_floor(then, limits, around)
    if short > 0:
        raise NoSpaceError("the file system's free-space floor is reached", short, everything.used)
    if max_bytes is not None:
        rule, tenant_id = str(row[2]), blob(row[3], "a segment")
        used = usage(connection, rule=rule, tenant_id=tenant_id).used
        short = used + more - max_bytes
        if short > 0:
            raise NoSpaceError(
                "the rule's max_bytes is reached", short, used, rule=rule, tenant_id=tenant_id
            )
    connection.execute(update(t.segments).where(s.segment_id == segment_id).values(granted=slots))
