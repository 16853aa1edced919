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
from kvvault.catalog.space import NoSpaceError, below_floor, counted, used_by_rule
from kvvault.counters import Counters
from kvvault.deleting import Eraser, Trigger
from kvvault.errors import KvvaultError, VaultLockedError
from kvvault.governing import Governor
from kvvault.lifecycle.value import SegmentUse, choose_victims
from kvvault.model import SegmentFacts, SegmentState
from kvvault.policy.document import VaultLimits
from kvvault.rewriting import Rewriter
from kvvault.space import Space
from kvvault.timekeeping import VaultTime
from kvvault.view import View

log = logging.getLogger(__name__)

_Whose = tuple[str | None, bytes | None]
"""Of what something has to go: a rule and a tenant, or the whole vault."""

_VAULT: _Whose = (None, None)

_LEAST_SHARE = 0.02
"""At least this share of what has reached its limit goes at once, so that eviction is rare."""

_PATIENCE_S = 0.25
"""How long a store that needs room waits for those who copy blocks."""

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

    def __add__(self, other: EvictionReport) -> EvictionReport:
        return EvictionReport(
            self.segments + other.segments,
            self.freed_bytes + other.freed_bytes,
            self.readmitted_bytes + other.readmitted_bytes,
            self.missing_bytes + other.missing_bytes,
        )


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
        self._rest_until: dict[_Whose, float] = {}

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
    def _alone(self, patience_s: float | None = None) -> Iterator[bool]:
        """Nobody else evicts meanwhile; whether blocks may be written again, because nobody else
        does that, in any process. If somebody does for longer than that, or this thread copies
        blocks itself, what goes is lost: an erasure may copy for minutes."""
        with contextlib.ExitStack() as stack:
            readmit = not self._rewriter.busy
            if readmit:
                try:
                    stack.enter_context(self._rewriter.alone(patience_s))
                except VaultLockedError:
                    readmit = False
            stack.enter_context(self._lock)
            yield readmit

    def _make_room(self, shortage: NoSpaceError, seen: int) -> bool:
        with self._alone(_PATIENCE_S) as readmit:
            if self._rounds != seen:
                return True  # somebody else has just made some
            now = self._time.steady()
            whose = shortage.rule, shortage.tenant_id
            if now < self._rest_until.get(whose, 0.0):
                return False
            nbytes = max(shortage.short, int(_LEAST_SHARE * shortage.used))
            report = EvictionReport()
            try:
                report, failed = self._evict(nbytes, whose, "stores wait", readmit)
                if failed is not None:
                    raise failed
            except KvvaultError as exc:
                log.warning("not all the room is made: %s", exc)
            if not report.freed_bytes:
                self._rest_until[whose] = now + _REST_S
                return False
            self._rounds += 1
            return True

    def relieve(self) -> EvictionReport:
        """Bring the vault below its low watermark when it is above the high one, the file system
        above its free-space floor, and what a rule governs of a tenant below its `max_bytes`.

        Raises:
            StorageError, CatalogError: as deletions; what else there was to do is done.
        """
        with self._alone() as readmit:
            total, failures = EvictionReport(), list[KvvaultError]()

            def evict(nbytes: int, whose: _Whose) -> None:
                nonlocal total
                if nbytes > 0:
                    report, failed = self._evict(nbytes, whose, "watermark", readmit)
                    total += report
                    failures.extend([failed] if failed is not None else [])

            _, policy = self._governor.current()
            most = {rule.name: rule.max_bytes for rule in policy.rules}
            for (rule, tenant_id), used in self._catalog.read(used_by_rule).items():
                evict(used - (most.get(rule) or used), (rule, tenant_id))
            evict(self._too_much(policy.vault), _VAULT)  # what went of rules counts
            self._rounds += total.segments > 0
            if failures:
                raise failures[0]
            return total

    def _too_much(self, policy: VaultLimits) -> int:
        """By how many bytes the vault is above its low watermark, if it is above the high one, or
        the file system below its free-space floor."""
        around = self._space.around()
        limits = self._space.limits(around)
        usage = self._space.usage()
        cap = limits.cap_bytes or 0
        used = counted(usage, around, cap)
        above = int(used - policy.low_watermark * cap) if cap else 0
        if used <= policy.high_watermark * cap:
            above = 0
        return max(above, below_floor(usage, limits, around))

    def _evict(
        self, nbytes: int, whose: _Whose, reason: str, readmit: bool
    ) -> tuple[EvictionReport, KvvaultError | None]:
        """What was evicted, and what the first of those ended with that could not be. Caller holds
        the lock."""
        self._evicting = threading.get_ident()
        try:
            return self._evict_chosen(nbytes, whose, reason, readmit)
        finally:
            self._evicting = None

    def _evict_chosen(
        self, nbytes: int, whose: _Whose, reason: str, readmit: bool
    ) -> tuple[EvictionReport, KvvaultError | None]:
        now = self._time.steady()
        rows = {
            row.facts.segment_id: row
            for row in self._catalog.read(operations.list_segments)
            if row.facts.state is SegmentState.SEALED
            and row.well_formed
            and whose in (_VAULT, (row.facts.rule, row.facts.tenant_id))
        }
        held = self._catalog.read(partial(protecting.held_segments, reach=Reach.NOTED))
        chosen = choose_victims(self._uses(list(rows.values()), held, now), nbytes, now)
        report = EvictionReport(missing_bytes=chosen.missing_bytes)
        failed: KvvaultError | None = None
        for victim in chosen.victims:
            slots = victim.readmit if readmit else ()
            try:
                report += self._evict_one(rows[victim.segment_id], slots, reason)
            except KvvaultError as exc:  # the others may go all the same
                failed = failed or exc
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
        return report, failed

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

    def _evict_one(self, row: SegmentRow, readmit: Sequence[int], reason: str) -> EvictionReport:
        most = max(1, _READMIT_BYTES // row.facts.block_bytes)
        saved = self._rewriter.save(row, readmit[:most]) if readmit else None
        segment_id = row.facts.segment_id
        plan = self._eraser.plan_segments([segment_id], Trigger.EVICT)
        revoked: set[bytes] = set()

        def spared(connection: Connection) -> bool:
            """The last look, in the transaction: what was erased meanwhile is not written again,
            and what a policy has given a floor meanwhile stays."""
            revoked.update(revoking.revoked_of(connection, segment_id).values())
            now = operations.get_segment(connection, segment_id)
            return now is not None and _has_to_stay(now.facts, self._time.steady())

        # Should this raise, nobody knows whose deletion it was that took the key, and what somebody
        # else has deleted must not come back: the blocks are lost.
        done = self._eraser.execute(plan, actor="kvvault", reason=reason, unless=spared)
        if not done.segments:
            return EvictionReport()
        written = 0
        if saved is not None:
            into: set[bytes] = set()
            blocks = self._rewriter.write(row, saved.without(revoked), into=into)
            written = blocks * row.facts.block_bytes
            try:
                # Nothing more comes to them, and what is open cannot be evicted.
                self._eraser.seal(list(into))
            except KvvaultError as exc:
                log.warning("what was written again is not sealed yet: %s", exc)
        # What its file took, erased blocks too: not what the deletion says went.
        return EvictionReport(1, row.facts.data_bytes - written, written)


def _has_to_stay(facts: SegmentFacts, now: float) -> bool:
    """A deadline that has passed beats a floor."""
    return facts.deadline > now and facts.keep_until is not None and facts.keep_until > now
