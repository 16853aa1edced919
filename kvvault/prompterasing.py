"""Erasing prompts: what would go and what stays because others share it, then doing it.

Blocks go that the chosen prompts have and no other prompt has; with `include_shared` the others
lose them, too, but for prompts that a hold keeps. A held prompt is not erased at all, nor is one
whose own blocks are in a segment that is held: what stays, stays known. Executing it works all of
this out again, in the transaction that revokes the blocks (`kvvault.erasing`), takes the prompts
out of the inventory and issues the receipt: at a tenth of a second of everybody's commits for a
hundred thousand blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from sqlalchemy import Connection

from kvvault.audit.receipts import Kept
from kvvault.catalog import membership, operations, protecting, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.catalog.protecting import Reach
from kvvault.deleting import Chosen, DeletionPlan, DeletionReport, Particulars, Targets, Trigger
from kvvault.erasing import AskEngine, BlockEraser, Decision
from kvvault.errors import HeldError, KvvaultError
from kvvault.keyring import KeyRing
from kvvault.promptfacts import Condition, Mask, State
from kvvault.prompts import Prompts

_MAX_NAMED = 1000
"""Prompts and subjects whose keyed ids stand in the log and the receipt; of more, a digest."""


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """What erasing prompts would do. Nothing has happened yet."""

    numbers: tuple[int, ...]
    """The prompts that would go."""
    prompt_ids: tuple[bytes, ...]
    """What people see of them, in the same order."""
    deletion: DeletionPlan
    """Their blocks."""
    shared_blocks: int
    """Blocks of theirs that others share: they stay, or with `include_shared` go, but for what a
    hold keeps."""
    shared_bytes: int
    shared_prompts: int
    """How many others these are."""
    taken_blocks: int
    """Of the shared ones, what goes."""
    taken_bytes: int
    taken_prompts: int
    """How many others lose something."""
    held_prompts: int
    """What was meant, too, but a hold keeps it."""
    include_shared: bool
    tenant_id: bytes | None
    """Whose prompts were asked about; None: everybody's."""
    scope: Mapping[str, Fact] = field(repr=False)
    """What log and receipt say was asked for, in keyed ids."""

    @property
    def blocks(self) -> int:
        """Blocks that would go."""
        return self.deletion.blocks

    @property
    def data_bytes(self) -> int:
        return self.deletion.data_bytes

    @property
    def held_blocks(self) -> int:
        """Shared blocks that would go, too, but that a prompt has which a hold keeps."""
        return self.shared_blocks - self.taken_blocks if self.include_shared else 0

    @property
    def kept(self) -> Kept:
        """As the receipt says it; what whole segments holds keep is added there."""
        if self.include_shared:
            return Kept(
                held_prompts=self.held_prompts,
                held_blocks=self.held_blocks,
                held_bytes=self.shared_bytes - self.taken_bytes,
            )
        return Kept(
            shared_prompts=self.shared_prompts,
            shared_blocks=self.shared_blocks,
            shared_bytes=self.shared_bytes,
            held_prompts=self.held_prompts,
        )


class PromptEraser:
    """Any thread; reads the whole inventory of a tenant, or of all."""

    def __init__(
        self, catalog: Catalog, ring: KeyRing, prompts: Prompts, blocks: BlockEraser
    ) -> None:
        self._catalog = catalog
        self._ring = ring
        self._prompts = prompts
        self._blocks = blocks

    def plan(
        self,
        conditions: Sequence[Condition],
        *,
        tenant: str | None = None,
        numbers: Iterable[int] | None = None,
        include_shared: bool = False,
    ) -> ErasurePlan:
        """What erasing all prompts would do that meet every condition; `numbers`: only of these.

        Raises: as `kvvault.prompts.Prompts.matching`; UsageError: the vault has no such tenant.
        """
        state = self._prompts.load(tenant=tenant, with_ids=True)
        meant = self._prompts.matching(state, conditions, everything=True)
        if numbers is not None:
            meant = meant & np.isin(state.snapshot.prompts.number, np.array([*numbers], np.int64))
        tenants = {tenant_id for tenant_id, _ in state.snapshot.scopes.values()}
        self._open_keys(tenants)
        return self._catalog.read(
            partial(
                self._plan,
                state=state,
                meant=meant,
                include_shared=include_shared,
                # The name of a label may name somebody: log and receipt say only "label".
                asked=sorted({condition.name.partition(".")[0] for condition in conditions}),
                tenant_id=next(iter(tenants)) if tenant is not None and tenants else None,
            )
        )

    def _open_keys(self, tenants: Iterable[bytes]) -> None:
        """Log and receipt name prompts by ids that take their tenants' keys, and a transaction must
        not wait for the key provider. Of keys that cannot be had nothing is named."""
        for row in self._catalog.read(operations.list_tenants):
            if row.tenant_id in tenants:
                with suppress(KvvaultError):
                    self._ring.tenant(row)

    def execute(
        self,
        plan: ErasurePlan,
        *,
        actor: str,
        reason: str,
        engine: AskEngine | None = None,
    ) -> DeletionReport:
        """Erase the prompts of a plan. When it returns, no process serves a block that went, and
        nothing about the prompts is in the inventory. `engine` has an engine's own copies dropped.

        Raises:
            HeldError: a hold was placed on one of the prompts since the plan; nothing is done.
            VaultLockedError, StorageError, CatalogError: as `kvvault.erasing.BlockEraser.erase`.
        """
        done: list[ErasurePlan] = []

        def decide(connection: Connection) -> Decision:
            state = State(membership.snapshot(connection, tenant_id=plan.tenant_id, with_ids=True))
            if done and not _among(state, plan.numbers).any():
                # They are erased. What of theirs has come back since goes as well.
                left = _left_over(state, plan.numbers)
                whole = _held_whole(connection, state)
                return Decision(self._deletion(state, left, whole), Particulars(done[-1].scope))
            now = self._plan(
                connection,
                state,
                _among(state, plan.numbers),
                include_shared=plan.include_shared,
                asked=_listed(plan.scope.get("by")),
                tenant_id=plan.tenant_id,
            )
            if now.held_prompts:
                raise HeldError(
                    f"a hold keeps {now.held_prompts} of these prompts by now",
                    hint="make the plan again",
                )
            done.append(now)
            return Decision(
                now.deletion,
                # What was meant, too, but is held: of that only the plan knows.
                Particulars(
                    now.scope,
                    len(now.numbers),
                    replace(now.kept, held_prompts=plan.held_prompts),
                ),
                partial(membership.erase, numbers=now.numbers),
            )

        return self._blocks.erase(decide, actor=actor, reason=reason, engine=engine)

    def sweep(self) -> int:
        """Revoke blocks of prompts that are gone and that no other prompt has: what an erasure
        that died in the middle, or somebody who had blocks in his hands, has left. How many.

        Raises:
            VaultLockedError, StorageError, CatalogError.
        """
        if not _left_over(self._prompts.load(), None).any():  # as a rule; block ids not needed
            return 0

        def decide(connection: Connection) -> Decision:
            state = State(membership.snapshot(connection, with_ids=True))
            whole = _held_whole(connection, state)
            return Decision(self._deletion(state, _left_over(state, None), whole), Particulars())

        reason = "left of prompts that were erased"
        return self._blocks.erase(decide, actor="kvvault", reason=reason).blocks

    # -- deciding ---------------------------------------------------------------------------------

    def _plan(
        self,
        connection: Connection,
        state: State,
        meant: Mask,
        *,
        include_shared: bool,
        asked: Sequence[str],
        tenant_id: bytes | None,
    ) -> ErasurePlan:
        table, blocks = state.snapshot.prompts, state.snapshot.blocks
        held = protecting.held_prompts(connection, state.snapshot)
        whole = _held_whole(connection, state)
        chosen = meant & ~held
        while True:
            goes, shared = _fate(state, chosen, held, include_shared=include_shared)
            # What would stay because its segment is held would belong to nobody afterwards.
            stuck = chosen & state.having(goes & whole[blocks.segment])[0]
            if not stuck.any():
                break
            chosen = chosen & ~stuck
        others, taken = state.present & ~chosen, shared & goes
        sizes = state.segments.block_bytes[blocks.segment]
        return ErasurePlan(
            numbers=tuple(int(number) for number in table.number[chosen]),
            prompt_ids=tuple(table.ids_of(np.flatnonzero(chosen))),
            deletion=self._deletion(state, goes, whole),
            shared_blocks=int(np.count_nonzero(shared)),
            shared_bytes=int(sizes[shared].sum()),
            shared_prompts=int(np.count_nonzero(others & state.having(shared)[0])),
            taken_blocks=int(np.count_nonzero(taken)),
            taken_bytes=int(sizes[taken].sum()),
            taken_prompts=int(np.count_nonzero(others & state.having(taken)[0])),
            held_prompts=int(np.count_nonzero(meant & ~chosen)),
            include_shared=include_shared,
            tenant_id=tenant_id,
            scope=self._scope(connection, state, chosen, asked, include_shared=include_shared),
        )

    @staticmethod
    def _deletion(state: State, goes: Mask, whole: Mask) -> DeletionPlan:
        """`whole`: segments that a hold keeps as such."""
        blocks, segments = state.snapshot.blocks, state.snapshot.segments
        rows = np.flatnonzero(goes)
        by_segment: dict[int, list[int]] = {}
        for row, segment in zip(rows.tolist(), blocks.segment[rows].tolist(), strict=True):
            by_segment.setdefault(segment, []).append(row)
        chosen: list[Chosen] = []
        ids: dict[tuple[bytes, bytes], set[bytes]] = {}
        for segment, members in by_segment.items():
            facts = segments[segment]
            names = blocks.ids[members].tobytes()
            each = [names[16 * i : 16 * i + 16] for i in range(len(members))]
            if facts.tenant_id is not None:
                ids.setdefault((facts.tenant_id, facts.namespace_digest), set()).update(each)
            if not whole[segment]:
                slots = tuple(int(slot) for slot in blocks.slot[members])
                chosen.append(Chosen(facts.segment_id, slots, tuple(each)))
        return DeletionPlan(
            Trigger.ERASE,
            tuple(segments[segment] for segment in by_segment if not whole[segment]),
            tuple(segments[segment] for segment in by_segment if whole[segment]),
            targets=tuple(
                Targets(tenant_id, namespace, frozenset(members))
                for (tenant_id, namespace), members in ids.items()
            ),
            chosen=tuple(chosen),
        )

    def _scope(
        self,
        connection: Connection,
        state: State,
        chosen: Mask,
        asked: Sequence[str],
        *,
        include_shared: bool,
    ) -> dict[str, Fact]:
        """What was asked for, in keyed ids; of tenants whose keys are not open nothing."""
        table, scopes = state.snapshot.prompts, state.snapshot.scopes
        rows = np.flatnonzero(chosen).tolist()
        tenants = {scopes[int(table.scope[row])][0] for row in rows}
        scope: dict[str, Fact] = {"by": list(asked), "prompts": len(rows)}
        if include_shared:
            scope["include_shared"] = True
        keys = {tenant_id: self._ring.known(tenant_id) for tenant_id in tenants}
        if len(tenants) == 1:
            [only] = keys.values()
            scope["tenant"] = None if only is None else only.log_id("tenant")
        subjects = {int(table.subject[row]) for row in rows}
        named = []
        for text in membership.texts(connection, numbers=subjects - {0}):
            opened = keys.get(text.tenant_id)
            if opened is not None:
                named.append(opened.log_id("subject", text.text_id))
        if len(named) == len(subjects) == len(tenants) == 1 and 0 not in subjects:
            scope["subject"] = named[0]
        elif 0 < len(named) <= _MAX_NAMED:
            scope["subjects"] = sorted(named)  # each is told of it: `kvvault report subject`
        known = []
        for row, prompt_id in zip(rows, table.ids_of(np.flatnonzero(chosen)), strict=True):
            opened = keys[scopes[int(table.scope[row])][0]]
            if opened is not None:
                known.append(opened.log_id("prompt", prompt_id))
        if len(known) <= _MAX_NAMED:
            scope["prompt_ids"] = sorted(known)
        else:
            joined = "".join(sorted(known)).encode()
            scope["prompt_ids_sha256"] = hashlib.sha256(joined).hexdigest()
        return scope


def _among(state: State, numbers: Sequence[int]) -> Mask:
    """Which prompts of the table these are, as far as they are not gone."""
    table = state.snapshot.prompts
    return np.isin(table.number, np.array(numbers, np.int64)) & ~table.gone


def _listed(value: Fact) -> Sequence[str]:
    return value if isinstance(value, list) else ()


def _left_over(state: State, numbers: Sequence[int] | None) -> Mask:
    """Blocks whose prompts are gone (`numbers`: of these prompts) and that no other prompt has."""
    table, owner = state.snapshot.prompts, state.snapshot.blocks.owner
    lives = np.isin(owner, table.number[~table.gone])
    lost = (owner > 0) & ~lives
    if numbers is not None:
        lost &= np.isin(owner, np.array(numbers, np.int64))
    if not lost.any():
        return lost
    return lost & ~state.used


def _fate(state: State, chosen: Mask, held: Mask, *, include_shared: bool) -> tuple[Mask, Mask]:
    """Which blocks go, and which of the chosen prompts' others have, too."""
    table, ids = state.snapshot.prompts, state.snapshot.blocks.ids
    fate = state.sharing.erasure(table.number[chosen], ids)
    if not include_shared:
        return fate.private, fate.shared
    # A copy of what stays would go in vain.
    kept = state.copies_of(state.used_by(held))
    return (fate.private | fate.shared) & ~kept, fate.shared


def _held_whole(connection: Connection, state: State) -> Mask:
    """Which segments a hold keeps as such; a mask over them."""
    ids = [facts.segment_id for facts in state.snapshot.segments]
    held = {
        one.facts.segment_id
        for one in retention.live_among(connection, ids, Reach.WHOLE)
        if one.held
    }
    return np.array([one in held for one in ids], np.bool_)
