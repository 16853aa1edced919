"""Deleting single blocks: revoked at once, then their segments are compacted.

A key is the smallest thing that can be destroyed, and a segment has one. So first the blocks are
revoked in the catalog and the fence is passed: from then on nobody serves them, however much else
is in their segments. Then what stays is written to other segments (`kvvault.rewriting`), and the
keys of the old ones are destroyed. Whatever a crash or a full disk leaves of the second part is
done by the job `reconcile`, and no purge calls these deletions unrecoverable before.

While a segment is copied, somebody else may revoke blocks of it: then they are revoked in the copy
as well, before the segment goes. Who revokes looks again when nobody copies (`Rewriter.alone`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

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
from kvvault.errors import KvvaultError
from kvvault.model import SegmentFacts
from kvvault.rewriting import Rewriter
from kvvault.timekeeping import VaultTime

log = logging.getLogger(__name__)

_ROUNDS = 5
"""How often a deletion looks whether its blocks were stored again meanwhile, and a compaction
whether more of a segment was revoked."""

Also = Callable[[Connection], None]
"""What else belongs into the transaction that revokes."""


class BlockEraser:
    """Any thread."""

    def __init__(
        self, catalog: Catalog, eraser: Eraser, rewriter: Rewriter, time: VaultTime
    ) -> None:
        self._catalog = catalog
        self._eraser = eraser
        self._rewriter = rewriter
        self._time = time

    def execute(
        self,
        plan: DeletionPlan,
        *,
        actor: str,
        reason: str,
        particulars: Particulars | None = None,
        also: Also | None = None,
    ) -> DeletionReport:
        """Delete single blocks wherever they are now. When it returns, none of them that no hold
        keeps is served by any process. `also` belongs to it: it happens, and is written down, even
        when no block is left to go.

        Raises:
            VaultLockedError: a stopped process is in the middle of publishing a load, or of copying
                a segment; what was found is revoked all the same.
            StorageError, CatalogError: nothing, or not everything, is revoked.
        """
        said = particulars or Particulars(self._eraser.scope(plan))
        report = self._revoke(plan, actor, reason, said, also)
        with self._rewriter.alone():
            for _ in range(_ROUNDS):
                again = self._eraser.plan_blocks(plan.targets, plan.trigger)
                if not again.segments:
                    break
                report += self._revoke(again, actor, reason, said, None)
            return replace(report, waiting_segments=self._compact())

    def compact(self) -> int:
        """Destroy the keys of all segments that have revoked blocks, after what else is in them is
        somewhere else; how many segments are left of which that cannot be done now.

        Raises:
            VaultLockedError, StorageError, CatalogError.
        """
        if self._catalog.read(revoking.oldest_waiting) is None:
            return 0
        with self._rewriter.alone():
            return self._compact()

    def _revoke(
        self,
        plan: DeletionPlan,
        actor: str,
        reason: str,
        particulars: Particulars,
        also: Also | None,
    ) -> DeletionReport:
        now = self._time.steady()
        places = {
            one.segment_id: list(zip(one.slots, one.block_ids, strict=True)) for one in plan.chosen
        }

        def write(connection: Connection) -> retention.Revoked:
            done = revoking.revoke_blocks(
                connection,
                places,
                trigger=plan.trigger.value,
                now=now,
                actor=actor,
                reason=reason,
                about=particulars.scope,
                always=also is not None,
            )
            if also is not None:
                also(connection)
            self._eraser.certify(
                connection, plan, done, particulars, now=now, actor=actor, reason=reason
            )
            return done

        done = self._catalog.write(write)
        self._eraser.settle()
        return DeletionReport(
            plan.trigger,
            len(done.segment_ids),
            done.blocks,
            done.data_bytes,
            done.held + len(plan.held),
            now,
            deletion_no=done.deletion_no,
        )

    def _compact(self) -> int:
        """The caller is alone."""
        left = 0
        for segment_id in self._catalog.read(revoking.revoked_slots):
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
        copied: set[int] = set()
        for _ in range(_ROUNDS):
            row = self._catalog.read(partial(operations.get_segment, segment_id=segment_id))
            if row is None or not row.facts.state.live:
                return True
            revoked = self._catalog.read(partial(revoking.revoked_of, segment_id=segment_id))
            self._revoke_copies(row.facts, [revoked[slot] for slot in copied & revoked.keys()])
            stay = set(range(row.facts.blocks)) - revoked.keys() - copied
            self._rewriter.copy(segment_id, sorted(stay))
            copied |= stay
            plan = self._eraser.plan_segments([segment_id], Trigger.COMPACT)
            if not plan.segments:
                return False  # a hold keeps it
            if self._destroy(plan, segment_id, revoked):
                return True
        return False

    def _destroy(self, plan: DeletionPlan, segment_id: bytes, revoked: Mapping[int, bytes]) -> bool:
        """Destroy a segment's key, unless more of it has been revoked."""
        done = self._eraser.execute(
            plan,
            actor="kvvault",
            reason="single blocks of it were revoked",
            unless=lambda connection: revoking.revoked_of(connection, segment_id) != revoked,
        )
        return done.segments > 0

    def _revoke_copies(self, facts: SegmentFacts, block_ids: Sequence[bytes]) -> None:
        """Blocks were copied before they were revoked where they came from."""
        if block_ids and facts.tenant_id is not None:
            targets = Targets(facts.tenant_id, facts.namespace_digest, frozenset(block_ids))
            plan = self._eraser.plan_blocks([targets], Trigger.ERASE)
            said = Particulars(self._eraser.scope(plan))
            self._revoke(plan, "kvvault", "revoked while they were copied", said, None)
