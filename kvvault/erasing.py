"""Deleting single blocks: revoked at once, then their segments are compacted.

A key is the smallest thing that can be destroyed, and a segment has one. So first the blocks are
revoked in the catalog and the fence is passed: from then on nobody serves them, however much else
is in their segments. Then what stays is written to other segments (`kvvault.rewriting`), and the
keys of the old ones are destroyed. Whatever a crash or a full disk leaves of the second part is
done by the job `reconcile`, and no purge calls these deletions unrecoverable before.

Which blocks go is decided in the transaction that revokes them: a plan may be older than a hold, or
than somebody's reuse of a block. It is decided again when nobody writes blocks again any more
(`Rewriter.alone`), because what somebody had in his hands may have come back meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import Connection

from kvvault.audit.receipts import EngineCopy
from kvvault.catalog import operations, retention, revoking
from kvvault.catalog.catalog import Catalog
from kvvault.deleting import (
    DeletionPlan,
    DeletionReport,
    Eraser,
    Particulars,
    Targets,
    Trigger,
)
from kvvault.errors import KvvaultError, StorageError
from kvvault.model import SegmentFacts
from kvvault.rewriting import Rewriter
from kvvault.timekeeping import VaultTime

log = logging.getLogger(__name__)

_ROUNDS = 5
"""How often a deletion looks whether its blocks are back, and a compaction whether more of a
segment was revoked."""

AskEngine = Callable[[], Sequence[EngineCopy]]
"""Asks an engine to drop its own copies; says what became of them. May take half a minute."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What goes, decided inside a transaction."""

    plan: DeletionPlan
    particulars: Particulars
    also: Callable[[Connection], None] | None = None
    """What else belongs into that transaction. Then it is written down even when no block goes."""


Decide = Callable[[Connection], Decision]


class BlockEraser:
    """Any thread."""

    def __init__(
        self, catalog: Catalog, eraser: Eraser, rewriter: Rewriter, time: VaultTime
    ) -> None:
        self._catalog = catalog
        self._eraser = eraser
        self._rewriter = rewriter
        self._time = time

    def execute(self, plan: DeletionPlan, *, actor: str, reason: str) -> DeletionReport:
        """Delete blocks of a plan, by their ids, wherever they are by then.

        Raises: as `erase`.
        """
        said = Particulars(self._eraser.scope(plan))

        def decide(connection: Connection) -> Decision:
            return Decision(self._eraser.find_blocks(connection, plan.targets, plan.trigger), said)

        return self.erase(decide, actor=actor, reason=reason)

    def erase(
        self, decide: Decide, *, actor: str, reason: str, engine: AskEngine | None = None
    ) -> DeletionReport:
        """Delete single blocks. When it returns, none of them that no hold keeps is served by any
        process. `engine` is called when nothing is served any more, and the receipt is issued once
        more with what it says. Whatever it raises comes when the rest is done.

        Raises:
            VaultLockedError: a stopped process is in the middle of publishing a load, or of copying
                a segment; what was found is revoked all the same.
            StorageError, CatalogError: nothing, or not everything, is revoked.
            KvvaultError: whatever `decide` raises; then nothing happened.
        """
        first, report = self._revoke(decide, actor, reason)
        try:
            if engine is not None:
                self._ask(engine, first, report, actor, reason)
        finally:
            report = self._finish(decide, first, report, actor, reason)
        return report

    def _finish(
        self, decide: Decide, first: Decision, report: DeletionReport, actor: str, reason: str
    ) -> DeletionReport:
        """After the first revocation: revoke what has come back, and compact."""
        touched = {facts.segment_id for facts in first.plan.segments}
        with self._rewriter.alone():
            for _ in range(_ROUNDS):
                # Looked at outside of the writing thread: as a rule nothing has come back.
                if not self._catalog.read(decide).plan.chosen:
                    break
                more, again = self._revoke(decide, actor, reason, first=False)
                report += again
                if not again.blocks:
                    break
                touched.update(facts.segment_id for facts in more.plan.segments)
            # What others left is the job's: an erasure takes as long as it takes by itself.
            return replace(report, waiting_segments=self._compact(touched))

    def compact(self) -> int:
        """Destroy the keys of all segments that have revoked blocks, after what else is in them is
        somewhere else; how many segments are left of which that cannot be done now.

        Raises:
            VaultLockedError, StorageError, CatalogError.
        """
        if self._catalog.read(revoking.oldest_waiting) is None:
            return 0
        with self._rewriter.alone():
            return self._compact(self._catalog.read(revoking.revoked_slots))

    # -- revoking ---------------------------------------------------------------------------------

    def _revoke(
        self, decide: Decide, actor: str, reason: str, *, first: bool = True
    ) -> tuple[Decision, DeletionReport]:
        """Decide and revoke in one transaction, then wait for loads that had looked before. Only
        the first time something is written down when nothing goes."""
        now = self._time.steady()

        def write(connection: Connection) -> tuple[Decision, retention.Revoked]:
            decision = decide(connection)
            plan = decision.plan
            places = {
                one.segment_id: list(zip(one.slots, one.block_ids, strict=True))
                for one in plan.chosen
            }
            done = revoking.revoke_blocks(
                connection,
                places,
                trigger=plan.trigger.value,
                now=now,
                actor=actor,
                reason=reason,
                about=decision.particulars.scope,
                always=first and decision.also is not None,
            )
            if first and decision.also is not None:
                decision.also(connection)
            self._eraser.certify(
                connection, plan, done, decision.particulars, now=now, actor=actor, reason=reason
            )
            return decision, done

        try:
            decision, done = self._catalog.write(write)
        except StorageError as exc:
            if not exc.full:
                raise
            # A full disk must not keep what is to be erased: it makes the room to write it down.
            self._eraser.make_room(self._catalog.read(decide).plan)
            decision, done = self._catalog.write(write)
        self._eraser.settle()
        return decision, DeletionReport(
            decision.plan.trigger,
            len(done.segment_ids),
            done.blocks,
            done.data_bytes,
            done.held + len(decision.plan.held),
            now,
            deletion_no=done.deletion_no,
            held_blocks=decision.particulars.kept.held_blocks,
        )

    def _ask(
        self, engine: AskEngine, first: Decision, report: DeletionReport, actor: str, reason: str
    ) -> None:
        """Have an engine's copies dropped, and issue the receipt again with what became of them:
        the first one stands, should this process die meanwhile."""
        copies = tuple(engine())
        done = retention.Revoked(
            tuple(facts.segment_id for facts in first.plan.segments),
            report.blocks,
            report.data_bytes,
            report.held_segments - len(first.plan.held),
            deletion_no=report.deletion_no,
        )
        self._catalog.write(
            lambda connection: self._eraser.certify(
                connection,
                first.plan,
                done,
                replace(first.particulars, engine=copies),
                now=report.revoked_at,
                actor=actor,
                reason=reason,
            )
        )

    # -- compacting -------------------------------------------------------------------------------

    def _compact(self, segment_ids: Collection[bytes]) -> int:
        """The caller is alone."""
        left = 0
        for segment_id in segment_ids:
            try:
                done = self._compact_one(segment_id)
            except KvvaultError as exc:
                log.warning("a segment with revoked blocks cannot be compacted now: %s", exc)
                done = False
            left += not done
        return left

    def _compact_one(self, segment_id: bytes) -> bool:
        """Whether the segment is gone."""
        # No more blocks come to it: those that stay are known from here on.
        self._eraser.seal([segment_id])
        for _ in range(_ROUNDS):
            row = self._catalog.read(partial(operations.get_segment, segment_id=segment_id))
            if row is None or not row.facts.state.live:
                return True
            plan = self._eraser.plan_segments([segment_id], Trigger.COMPACT)
            if not plan.segments:
                return False  # a hold keeps it as it is
            revoked = self._catalog.read(partial(revoking.revoked_of, segment_id=segment_id))
            if not revoked:
                return True  # nothing of it was erased, after all
            inside = self._catalog.read(partial(revoking.owners_in, segment_id=segment_id))
            copies = self._copies(row.facts, inside)
            self._revoke_copies(copies, {slot: inside[slot] for slot in inside if slot in revoked})
            stay = {slot: one for slot, one in inside.items() if slot not in revoked}
            there = {one for members in copies.values() for one in members}
            into = self._rewriter.copy(
                segment_id, sorted(slot for slot, one in stay.items() if one not in there)
            )
            # The key goes for good, so what was copied must be there for good: now, or by an
            # attempt that died before it got here.
            wanted = set(stay.values())
            into.update(one for one, members in copies.items() if members.keys() & wanted)
            self._rewriter.sync(into)
            if self._destroy(plan, segment_id, revoked, into):
                return True
        return False

    def _copies(
        self, facts: SegmentFacts, inside: Mapping[int, tuple[bytes, int]]
    ) -> dict[bytes, dict[tuple[bytes, int], int]]:
        """Where blocks of a segment are already, of the same owner: in which segments, which, in
        which slot. Left by an attempt that did not come to its end."""
        owners = dict(inside.values())
        found = self._catalog.read(
            partial(
                revoking.find_blocks,
                tenant_id=facts.tenant_id or b"",
                namespace=facts.namespace_digest,
                block_ids=owners,
                owners=owners,
            )
        )
        return {
            segment_id: {(block_id, owners[block_id]): slot for slot, block_id in members}
            for segment_id, members in found.items()
            if segment_id != facts.segment_id
        }

    def _revoke_copies(
        self,
        copies: Mapping[bytes, Mapping[tuple[bytes, int], int]],
        revoked: Mapping[int, tuple[bytes, int]],
    ) -> None:
        """Blocks were copied before they were revoked where they came from."""
        gone = set(revoked.values())
        places = {
            segment_id: [(slot, one[0]) for one, slot in members.items() if one in gone]
            for segment_id, members in copies.items()
        }
        places = {segment_id: members for segment_id, members in places.items() if members}
        if places:

            def decide(connection: Connection) -> Decision:
                none: tuple[Targets, ...] = ()
                plan = self._eraser.plan_places(connection, places, none, Trigger.ERASE)
                return Decision(plan, Particulars())

            self._revoke(decide, "kvvault", "revoked while they were copied")

    def _destroy(
        self,
        plan: DeletionPlan,
        segment_id: bytes,
        revoked: Mapping[int, bytes],
        into: Collection[bytes],
    ) -> bool:
        """Destroy a segment's key, unless more of it has been revoked, or what was copied is gone
        (its next sync may fail, and that takes it)."""

        def stays(connection: Connection) -> bool:
            if revoking.revoked_of(connection, segment_id) != revoked:
                return True
            return len(retention.live_among(connection, list(into))) < len(into)

        done = self._eraser.execute(
            plan, actor="kvvault", reason="single blocks of it were revoked", unless=stays
        )
        return done.segments > 0
