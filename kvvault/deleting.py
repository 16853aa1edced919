"""Deletion: one path for everything that takes blocks away, whoever asks (promises 4, 5 and 11).

A plan says what would go and what a hold keeps; executing it asks the catalog again, in the same
transaction that takes the keys away, because a hold may have been placed or a deadline moved since.

The order: the wrapped keys leave the catalog (from then on nothing new opens) → this process's view
follows → the fence is passed, so every load that had looked before is over → files are emptied and
unlinked → the rows become tombstones → SQLite's log is emptied. What is left for somebody with the
raw disk and the current root key ends with the next purge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from sqlalchemy import Connection

from kvvault.audit.receipts import (
    AUTOMATIC,
    TECHNICAL,
    DeletionFacts,
    EngineCopy,
    Issuer,
    Kept,
)
from kvvault.catalog import operations, protecting, retention, revoking
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.catalog.protecting import Reach
from kvvault.errors import ClosedError, HeldError, StorageError
from kvvault.keyring import KeyRing
from kvvault.model import SegmentFacts
from kvvault.options import VaultOptions
from kvvault.segments.fence import Fence
from kvvault.segments.format import segment_name
from kvvault.segments.io import SegmentDir
from kvvault.timekeeping import VaultTime
from kvvault.view import View

log = logging.getLogger(__name__)

HOLDS_LOCK = "holds"
"""Held while a hold is placed, and while a full disk has files removed before that is written."""


class Trigger(StrEnum):
    """Why something is deleted."""

    EXPIRE = "expire"
    """Its deadline has come."""
    EVICT = "evict"
    """Space is needed."""
    REMOVE = "rm"
    """Somebody asked for it."""
    FORGET = "forget"
    """Somebody asked for everything of a tenant."""
    POLICY = "policy"
    """The policy in force says that it is not kept at all."""
    ERASE = "erase"
    """Somebody asked for prompts, or single blocks, to go."""
    COMPACT = "compact"
    """Single blocks of it are revoked, and what else was in it is in other segments."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Single blocks of one segment."""

    segment_id: bytes
    slots: tuple[int, ...]
    block_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Targets:
    """Single blocks, wherever they are by the time."""

    tenant_id: bytes
    namespace_digest: bytes
    block_ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """What a deletion would do. Nothing has happened yet."""

    trigger: Trigger
    segments: tuple[SegmentFacts, ...]
    """What would go."""
    held: tuple[SegmentFacts, ...] = ()
    """What a hold keeps."""
    tenant_id: bytes | None = None
    """The tenant that would be forgotten."""
    targets: tuple[Targets, ...] = ()
    """What single blocks are meant, if any: looked for again when the plan is executed."""
    chosen: tuple[Chosen, ...] = ()
    """Where these are, of `segments`: what else is in those stays."""

    @property
    def blocks(self) -> int:
        """How many would go."""
        if self.targets:
            return sum(len(one.slots) for one in self.chosen)
        return sum(facts.live_blocks for facts in self.segments)

    @property
    def data_bytes(self) -> int:
        if self.targets:
            sizes = {facts.segment_id: facts.block_bytes for facts in self.segments}
            return sum(len(one.slots) * sizes[one.segment_id] for one in self.chosen)
        return sum(facts.live_bytes for facts in self.segments)


@dataclass(frozen=True, slots=True)
class Particulars:
    """What log and receipt say of a deletion besides what it did. Nothing personal."""

    scope: Mapping[str, Fact] = field(default_factory=dict)
    """What was asked for, in keyed ids."""
    prompts: int | None = None
    """How many went; None when it was not by prompt."""
    kept: Kept = field(default_factory=Kept)
    engine: tuple[EngineCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class DeletionReport:
    """What was done."""

    trigger: Trigger
    segments: int
    blocks: int
    data_bytes: int
    held_segments: int
    """What would have gone, but for a hold."""
    revoked_at: float
    """When it became unreadable through kvvault."""
    waiting_segments: int = 0
    """Of single blocks: segments whose keys are not destroyed yet, because what else is in them
    could not be written to others. Nothing that was revoked is served; a job tries again."""
    deletion_no: int | None = None
    """Its number in the catalog; None when nothing went."""
    held_blocks: int = 0
    """Of single blocks: what would have gone, but for a hold on a prompt that has them, too."""

    def __add__(self, later: DeletionReport) -> DeletionReport:
        return DeletionReport(
            self.trigger,
            self.segments + later.segments,
            self.blocks + later.blocks,
            self.data_bytes + later.data_bytes,
            max(self.held_segments, later.held_segments),
            later.revoked_at,
            later.waiting_segments,
            later.deletion_no if self.deletion_no is None else self.deletion_no,
            max(self.held_blocks, later.held_blocks),
        )


class Eraser:
    """Plans and executes. Any thread; `execute` may take as long as a load that is being published,
    and a flush of the disk."""

    def __init__(
        self,
        catalog: Catalog,
        directory: SegmentDir,
        view: View,
        fence: Fence,
        ring: KeyRing,
        time: VaultTime,
        options: VaultOptions,
        issuer: Issuer,
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._view = view
        self._fence = fence
        self._ring = ring
        self._time = time
        self._options = options
        self._issuer = issuer

    # -- plans ------------------------------------------------------------------------------------

    def plan_expired(self) -> DeletionPlan:
        """Everything whose deadline has come."""
        now = self._time.steady()
        return self._plan(Trigger.EXPIRE, partial(retention.expired, now=now))

    def plan_segments(
        self, segment_ids: Sequence[bytes], trigger: Trigger = Trigger.REMOVE
    ) -> DeletionPlan:
        """These, as far as they live. Of what holds keep some triggers do not ask all (`Reach`)."""
        reach = {Trigger.COMPACT: Reach.WHOLE, Trigger.EVICT: Reach.NOTED}.get(trigger, Reach.NOW)
        find = partial(retention.live_among, segment_ids=segment_ids, reach=reach)
        return self._plan(trigger, find)

    def plan_tenant(self, tenant_id: bytes) -> DeletionPlan:
        """A tenant and everything it has."""
        return self._plan(
            Trigger.FORGET, partial(retention.live_of_tenant, tenant_id=tenant_id), tenant_id
        )

    def _plan(
        self,
        trigger: Trigger,
        find: Callable[[Connection], list[retention.Candidate]],
        tenant_id: bytes | None = None,
    ) -> DeletionPlan:
        found = self._catalog.read(find)
        return DeletionPlan(
            trigger,
            tuple(one.facts for one in found if not one.held),
            tuple(one.facts for one in found if one.held),
            tenant_id,
        )

    def plan_blocks(
        self, targets: Sequence[Targets], trigger: Trigger = Trigger.ERASE
    ) -> DeletionPlan:
        """Single blocks; what else is in their segments stays. `kvvault.erasing` executes it."""
        return self._catalog.read(partial(self.find_blocks, targets=targets, trigger=trigger))

    def find_blocks(
        self, connection: Connection, targets: Sequence[Targets], trigger: Trigger
    ) -> DeletionPlan:
        """As `plan_blocks`, in a transaction of the caller. Blocks of subjects and prompts that are
        held stay; of their segments the plan says so, with no more than these blocks."""
        places: revoking.Places = {}
        kept: dict[bytes, int] = {}
        for one in targets:
            held = protecting.held_blocks(connection, one.tenant_id)
            found = revoking.find_blocks(
                connection, one.tenant_id, one.namespace_digest, one.block_ids
            )
            places |= revoking.apart_from(found, held)
            kept |= revoking.counts(found, held)
        plan = self.plan_places(connection, places, targets, trigger)
        parts = retention.live_among(
            connection, list(kept.keys() - {facts.segment_id for facts in plan.held}), Reach.WHOLE
        )
        some = (replace(one.facts, blocks=kept[one.facts.segment_id], revoked=0) for one in parts)
        return replace(plan, held=(*plan.held, *some))

    def plan_places(
        self,
        connection: Connection,
        places: revoking.Places,
        targets: Sequence[Targets],
        trigger: Trigger,
    ) -> DeletionPlan:
        """A plan for single blocks of which it is known where they are."""
        found = retention.live_among(connection, list(places), Reach.WHOLE)
        chosen = [
            Chosen(
                one.facts.segment_id,
                tuple(slot for slot, _ in places[one.facts.segment_id]),
                tuple(block_id for _, block_id in places[one.facts.segment_id]),
            )
            for one in found
            if not one.held
        ]
        return DeletionPlan(
            trigger,
            tuple(one.facts for one in found if not one.held),
            tuple(one.facts for one in found if one.held),
            targets=tuple(targets),
            chosen=tuple(chosen),
        )

    def seal(self, segment_ids: Sequence[bytes]) -> None:
        """Have segments take no more blocks, whoever writes to them."""

        def write(connection: Connection) -> None:
            for segment_id in segment_ids:
                operations.seal_segment(connection, segment_id)

        self._catalog.write(write, durable=False)
        self._view.refresh()

    # -- execution --------------------------------------------------------------------------------

    def execute(
        self,
        plan: DeletionPlan,
        *,
        actor: str,
        reason: str,
        unless: Callable[[Connection], bool] | None = None,
    ) -> DeletionReport:
        """Do what a plan for whole segments says, as far as it is still so. When it returns, no
        process serves what went, and its keys are gone from the catalog. `actor` and `reason` are
        recorded as they are: nothing personal. `unless` is asked in the transaction that takes the
        keys: when it says yes, nothing is done.

        Raises:
            HeldError: a tenant is to be forgotten of which a hold keeps something; nothing is done.
            VaultLockedError: a stopped process is in the middle of publishing a load; everything is
                revoked all the same.
            StorageError, CatalogError.
        """
        ids = [facts.segment_id for facts in plan.segments]
        now, scope = self._time.steady(), self.scope(plan)

        def revoke(connection: Connection) -> retention.Revoked:
            if unless is not None and unless(connection):
                return retention.Revoked()
            if plan.tenant_id is not None:
                done = retention.forget_tenant(
                    connection, plan.tenant_id, now=now, actor=actor, reason=reason, about=scope
                )
            else:
                done = retention.revoke(
                    connection,
                    ids,
                    trigger=plan.trigger.value,
                    now=now,
                    actor=actor,
                    reason=reason,
                    expired_by=now if plan.trigger is Trigger.EXPIRE else None,
                    compacting=plan.trigger is Trigger.COMPACT,
                    about=scope,
                )
            said = Particulars(scope)
            self.certify(connection, plan, done, said, now=now, actor=actor, reason=reason)
            return done

        if not ids and plan.tenant_id is None:
            if plan.trigger is not Trigger.EVICT:
                self.settle()
            held = {facts.segment_id for facts in plan.held}
            if plan.trigger is Trigger.EXPIRE and self._catalog.read(
                lambda connection: protecting.unnoted(connection, held)
            ):  # or the jobs would go on finding it due
                self._catalog.write(protecting.protect, durable=False)
            return DeletionReport(plan.trigger, 0, 0, 0, len(plan.held), now)
        if plan.tenant_id is not None and plan.held:
            raise _held(len(plan.held))
        try:
            done = self._catalog.write(revoke)
        except StorageError as exc:
            if not exc.full:
                raise
            # A full disk must not keep what is to be erased: it makes the room to write it down.
            # If that fails again, the blocks are gone and the next to open the vault notes it.
            self.make_room(plan)
            done = self._catalog.write(revoke)
        if done.refused:
            raise _held(done.held)
        if plan.tenant_id is not None:  # only now: had the write failed, the tenant would live on
            self._ring.drop(plan.tenant_id)
        self._finish(done.segment_ids)
        return DeletionReport(
            plan.trigger,
            len(done.segment_ids),
            done.blocks,
            done.data_bytes,
            done.held + len(plan.held),
            now,
            deletion_no=done.deletion_no,
        )

    def scope(self, plan: DeletionPlan) -> dict[str, Fact]:
        """What was asked for, as log and receipt may say it: keyed ids. No I/O; of a tenant whose
        keys are not open nothing can be said."""
        tenant_id = plan.targets[0].tenant_id if plan.targets else plan.tenant_id
        if tenant_id is None:
            return {}
        keys = self._ring.known(tenant_id)
        try:
            return {"tenant": None if keys is None else keys.log_id("tenant")}
        except ClosedError:  # forgotten a moment ago
            return {"tenant": None}

    def certify(
        self,
        connection: Connection,
        plan: DeletionPlan,
        done: retention.Revoked,
        particulars: Particulars,
        *,
        now: float,
        actor: str,
        reason: str,
    ) -> None:
        """Issue the first receipt of what was just revoked, in the transaction that did it."""
        if done.deletion_no is None or plan.trigger.value in {*AUTOMATIC, TECHNICAL}:
            return
        self._issuer.revoked(
            connection,
            DeletionFacts(
                deletion_no=done.deletion_no,
                trigger=plan.trigger.value,
                actor=actor,
                reason=reason,
                revoked_at=now,
                segment_ids=done.segment_ids,
                blocks=done.blocks,
                data_bytes=done.data_bytes,
                scope=particulars.scope,
                prompts=particulars.prompts,
                engine=particulars.engine,
                kept=replace(
                    kept := particulars.kept,
                    held_segments=done.held + len(plan.held),
                    held_blocks=kept.held_blocks + sum(one.live_blocks for one in plan.held),
                    held_bytes=kept.held_bytes + sum(one.live_bytes for one in plan.held),
                ),
            ),
        )

    def make_room(self, plan: DeletionPlan) -> None:
        """On a disk too full to write a deletion down: empty and remove the files of the segments
        that a plan is about, as far as no hold keeps anything in them. What else is in them is
        lost, to what is to go.

        Raises:
            StorageError, CatalogError, VaultLockedError.
        """
        with self._fence.exclusive(HOLDS_LOCK, self._options.lock_timeout_s):
            self._discard(self._still_doomed(plan, self._time.steady()))

    def settle(self) -> None:
        """Wait until no load is under way that began before what is revoked now was. Also for who
        finds nothing left to delete: somebody else may be in the middle of it.

        Raises:
            VaultLockedError: a stopped process is in the middle of publishing a load.
            StorageError, CatalogError.
        """
        self._view.refresh()
        self._fence.drain(self._options.lock_timeout_s)

    def _still_doomed(self, plan: DeletionPlan, now: float) -> list[bytes]:
        """What of a plan may be destroyed now: the plan may be older than a hold, or than the use
        that moved a deadline.

        Raises:
            HeldError: the plan is for all or nothing, and something is held.
        """
        ids = [facts.segment_id for facts in plan.segments]
        tenant_id = plan.tenant_id

        found, tenant_held = self._catalog.read(
            lambda connection: (
                retention.live_among(connection, ids),
                tenant_id is not None and protecting.tenant_held(connection, tenant_id),
            )
        )
        kept = sum(one.held for one in found)
        if tenant_id is not None and (kept or tenant_held):
            raise _held(kept)
        return [
            one.facts.segment_id
            for one in found
            if not one.held and (plan.trigger is not Trigger.EXPIRE or one.facts.deadline <= now)
        ]

    def _finish(self, ids: Sequence[bytes]) -> None:
        self._view.drop(ids)  # memory only: also when the catalog cannot be read now
        self._view.refresh()
        self._fence.drain(self._options.lock_timeout_s)
        kept = self._discard(ids)
        self._catalog.write(
            lambda c: operations.finish_deletion(c, [i for i in ids if i not in kept])
        )
        self._catalog.empty_log()
        if kept:
            raise StorageError(
                f"{len(kept)} files of deleted segments cannot be removed (they are unreadable)",
                hint="look at the vault's segments directory; opening the vault tries again",
            )

    def _discard(self, segment_ids: Sequence[bytes]) -> set[bytes]:
        """Remove the files of segments; returns those whose files are still there."""
        kept = set()
        for segment_id in segment_ids:
            try:
                self._directory.discard(segment_name(segment_id))
            except StorageError as exc:
                log.error("the file of a deleted segment stays: %s", exc)
                kept.add(segment_id)
        return kept


def _held(segments: int) -> HeldError:
    return HeldError(
        f"a hold keeps {segments} of these segments",
        hint="see `kvvault hold ls`; clear the hold first, if that is right",
    )
