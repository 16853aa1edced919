"""Making room: which segments go when space runs out, and what of them is written again.

Called by threads that store and found no space (`Evictor.make_room`), and by the job
(`Evictor.relieve`), which keeps the vault below its high watermark so that the former is rare.
What goes is decided in `kvvault.lifecycle.value`; nothing that is held or below its floor goes, and
when only that is left, stores are refused.

Blocks that are worth keeping are read before their segment is deleted and written again after it,
because there is no space for both. They keep deadline, floor and rule; should writing fail they are
lost, which for a cache is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from kvvault.catalog import operations, protecting, revoking
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.protecting import Reach
from kvvault.catalog.rows import SegmentRow
from kvvault.catalog.space import NoSpaceError, catalog_reserve
from kvvault.counters import Counters
from kvvault.deleting import Eraser, Trigger
from kvvault.errors import KvvaultError
from kvvault.governing import Governor
from kvvault.lifecycle.value import SegmentUse, choose_victims
from kvvault.model import SegmentState
from kvvault.rewriting import Rewriter
from kvvault.space import Space
from kvvault.timekeeping import VaultTime
from kvvault.view import View

log = logging.getLogger(__name__)

_LEAST_SHARE = 0.02
"""At least this share of the cap goes at once, so that eviction is rare."""

_READMIT_BYTES = 64 << 20
"""At most so much of one segment is written again: it waits in memory meanwhile."""

_REST_S = 1.0
"""For how long nobody looks again after nothing could be freed."""

_FOREIGN_S = 86400.0
"""A namespace that nobody stored to or loaded from for so long is foreign: its engine is gone."""


@dataclass(frozen=True, slots=True)
class EvictionReport:
    """What one run did. Bytes."""

    segments: int = 0
    freed_bytes: int = 0
    readmitted_bytes: int = 0
    missing_bytes: int = 0
    """What could not be freed: all the rest is held or below its floor."""


class Evictor:
    """Any thread; one evicts, the others wait for it."""

    def __init__(
        self,
        catalog: Catalog,
        view: View,
        rewriter: Rewriter,
        eraser: Eraser,
        space: Space,
        governor: Governor,
        time: VaultTime,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._view = view
        self._rewriter = rewriter
        self._eraser = eraser
        self._space = space
        self._governor = governor
        self._time = time
        self._counters = counters
        self._lock = threading.Lock()
        self._evicting: int | None = None
        """The thread that evicts: its own stores must not wait for it."""
        self._rounds = 0
        self._rest_until: dict[tuple[str | None, bytes | None], float] = {}

    def make_room(self, shortage: NoSpaceError) -> bool:
        """Free what a store needs; whether trying again makes sense. Never raises."""
        if self._evicting == threading.get_ident():
            return False  # what is written again finds no room: others were faster; it is lost
        seen = self._rounds
        try:
            return self._make_room(shortage, seen)
        except KvvaultError as exc:
            log.warning("no room is made: %s", exc)
            return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Nobody else evicts or deletes single blocks meanwhile; whether blocks may be written
        again. Not while this thread copies blocks itself: then what goes is lost."""
        if self._rewriter.busy:
            with self._lock:
                yield False
        else:
            with self._rewriter.alone(), self._lock:
                yield True

    def _make_room(self, shortage: NoSpaceError, seen: int) -> bool:
        with self._alone() as readmit:
            if self._rounds != seen:
                return True  # somebody else has just made some
            now = self._time.steady()
            whose = shortage.rule, shortage.tenant_id
            if now < self._rest_until.get(whose, 0.0):
                return False
            report = EvictionReport()
            try:
                nbytes = max(shortage.short, self._least())
                report = self._evict(nbytes, shortage, "stores wait", readmit)
            except KvvaultError as exc:
                log.warning("no room is made: %s", exc)
            if not report.freed_bytes:
                self._rest_until[whose] = now + _REST_S
                return False
            self._rounds += 1
            return True

    def relieve(self) -> EvictionReport:
        """Bring the vault below its low watermark when it is above the high one, or the file system
        above its free-space floor.

        Raises:
            StorageError, CatalogError: as deletions.
        """
        with self._alone() as readmit:
            around = self._space.around()
            limits = self._space.limits(around)
            _, policy = self._governor.current()
            usage = self._space.usage()
            used = usage.used + catalog_reserve(around, limits.cap_bytes or 0)
            cap = limits.cap_bytes or 0
            above = int(used - policy.vault.low_watermark * cap) if cap else 0
            if used <= policy.vault.high_watermark * cap:
                above = 0
            short = limits.free_floor_bytes + usage.pending - around.free_bytes
            if max(above, short) <= 0:
                return EvictionReport()
            report = self._evict(max(above, short), None, "watermark", readmit)
            self._rounds += 1
            return report

    def _least(self) -> int:
        around = self._space.around()
        return int(_LEAST_SHARE * (self._space.limits(around).cap_bytes or 0))

    def _evict(
        self, nbytes: int, shortage: NoSpaceError | None, reason: str, readmit: bool
    ) -> EvictionReport:
        """Caller holds the lock."""
        self._evicting = threading.get_ident()
        try:
            return self._evict_chosen(nbytes, shortage, reason, readmit)
        finally:
            self._evicting = None

    def _evict_chosen(
        self, nbytes: int, shortage: NoSpaceError | None, reason: str, readmit: bool
    ) -> EvictionReport:
        now = self._time.steady()
        rows = {
            row.facts.segment_id: row
            for row in self._catalog.read(operations.list_segments)
            if row.facts.state is SegmentState.SEALED
            and row.well_formed
            and (
                shortage is None
                or shortage.rule is None
                or (row.facts.rule, row.facts.tenant_id) == (shortage.rule, shortage.tenant_id)
            )
        }
        held = self._catalog.read(partial(protecting.held_segments, reach=Reach.NOTED))
        chosen = choose_victims(self._uses(list(rows.values()), held, now), nbytes, now)
        report = EvictionReport(missing_bytes=chosen.missing_bytes)
        for victim in chosen.victims:
            slots = victim.readmit if readmit else ()
            report = self._evict_one(rows[victim.segment_id], slots, reason, report)
        self._counters.add(
            evicted_segments=report.segments,
            evicted_bytes=report.freed_bytes,
            readmitted_bytes=report.readmitted_bytes,
        )
        if report.segments:
            log.info(
                "evicted %d segments (%d bytes freed, %d written again): %s",
                report.segments,
                report.freed_bytes,
                report.readmitted_bytes,
                reason,
            )
        return report

    def _uses(self, rows: Sequence[SegmentRow], held: set[bytes], now: float) -> list[SegmentUse]:
        latest: dict[bytes, float] = {}
        for row in rows:
            facts = row.facts
            seen = max(facts.created_at, facts.last_used or 0.0)
            digest = facts.namespace_digest
            latest[digest] = max(seen, latest.get(digest, 0.0))
        uses = []
        for row in rows:
            facts = row.facts
            segment = self._view.segment_by_id(facts.segment_id)
            known = None if segment is None else segment.uses(facts.blocks)
            uses.append(
                SegmentUse(
                    facts.segment_id,
                    facts.block_bytes,
                    facts.blocks,
                    facts.created_at,
                    facts.last_used,
                    facts.hits,
                    None if facts.deadline == float("inf") else facts.deadline,
                    facts.keep_until,
                    facts.segment_id in held,
                    latest[facts.namespace_digest] + _FOREIGN_S < now,
                    None if known is None else known[0],
                    None if known is None else known[1],
                )
            )
        return uses

    def _evict_one(
        self, row: SegmentRow, readmit: Sequence[int], reason: str, report: EvictionReport
    ) -> EvictionReport:
        most = max(1, _READMIT_BYTES // row.facts.block_bytes)
        saved = self._rewriter.save(row, readmit[:most]) if readmit else None
        segment_id = row.facts.segment_id
        plan = self._eraser.plan_segments([segment_id], Trigger.EVICT)
        revoked: set[bytes] = set()

        def note(connection: Connection) -> bool:
            revoked.update(revoking.revoked_of(connection, segment_id).values())
            return False

        done = self._eraser.execute(plan, actor="kvvault", reason=reason, unless=note)
        again = 0
        if done.segments and saved is not None:
            saved = saved.without(revoked)  # erased since they were read
            again = self._rewriter.write(row, saved) * row.facts.block_bytes
        return EvictionReport(
            report.segments + done.segments,
            report.freed_bytes + done.data_bytes - again,
            report.readmitted_bytes + again,
            report.missing_bytes,
        )
