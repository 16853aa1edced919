"""Erasing prompts: what would go and what stays because others share it, then doing it.

A plan is made of one look at the inventory. Blocks go that the chosen prompts have and no other
prompt has; with `include_shared` the others lose them, too, but for prompts that a hold keeps. A
held prompt is not erased at all. Executing it revokes the blocks (`kvvault.erasing`) and takes the
prompts out of the inventory in the same transaction, which asks about holds again, and issues the
receipt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from sqlalchemy import Connection

from kvvault.audit.receipts import Kept
from kvvault.catalog import membership, protecting, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.deleting import Chosen, DeletionPlan, DeletionReport, Particulars, Targets, Trigger
from kvvault.erasing import AskEngine, BlockEraser
from kvvault.errors import HeldError
from kvvault.keyring import KeyRing
from kvvault.promptfacts import Condition, Mask, State
from kvvault.prompts import Prompts

_MAX_NAMED = 1000
"""Prompts whose keyed ids stand in the log and the receipt; of more, a digest of all of them."""


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
    """Blocks of theirs that stay, because others share them."""
    shared_bytes: int
    shared_prompts: int
    """How many others these are; with `include_shared`: how many lose blocks."""
    held_prompts: int
    """What was meant, too, but a hold keeps it."""
    include_shared: bool
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
    def kept(self) -> Kept:
        """As the receipt says it; what whole segments holds keep is added there."""
        if self.include_shared:
            return Kept(held_prompts=self.held_prompts)
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
        meant = self._prompts.matching(state, conditions)
        table = state.snapshot.prompts
        if numbers is not None:
            meant = meant & np.isin(table.number, np.fromiter(numbers, np.int64))
        held = self._catalog.read(partial(protecting.held_prompts, state=state.snapshot))
        chosen = meant & ~held
        goes, shared = _fate(state, chosen, held, include_shared=include_shared)
        others = state.present & ~chosen & state.having(shared)[0]
        sizes = state.segments.block_bytes[state.snapshot.blocks.segment]
        asked = sorted({condition.name for condition in conditions})
        return ErasurePlan(
            numbers=tuple(int(number) for number in table.number[chosen]),
            prompt_ids=tuple(table.ids_of(np.flatnonzero(chosen))),
            deletion=self._deletion(state, goes),
            shared_blocks=int(np.count_nonzero(shared)),
            shared_bytes=int(sizes[shared].sum()),
            shared_prompts=int(np.count_nonzero(others)),
            held_prompts=int(np.count_nonzero(meant & held)),
            include_shared=include_shared,
            scope=self._scope(state, chosen, asked, include_shared=include_shared),
        )

    def execute(
        self,
        plan: ErasurePlan,
        *,
        actor: str,
        reason: str,
        engine: AskEngine | None = None,
    ) -> DeletionReport:
        """Do it. When it returns, no process serves a block that went, and nothing about the
        prompts is in the inventory. `engine` has an engine's own copies dropped.

        Raises:
            HeldError: a hold was placed on one of the prompts since the plan; nothing is done.
            VaultLockedError, StorageError, CatalogError: as `kvvault.erasing.BlockEraser.execute`.
        """

        def also(connection: Connection) -> None:
            held = protecting.any_held(connection, plan.numbers)
            if held:
                raise HeldError(
                    f"a hold keeps {held} of these prompts by now", hint="make the plan again"
                )
            membership.erase(connection, plan.numbers)

        return self._blocks.execute(
            plan.deletion,
            actor=actor,
            reason=reason,
            particulars=Particulars(plan.scope, len(plan.numbers), plan.kept),
            also=also,
            engine=engine,
        )

    def _deletion(self, state: State, goes: Mask) -> DeletionPlan:
        blocks, segments = state.snapshot.blocks, state.snapshot.segments
        rows = np.flatnonzero(goes)
        by_segment: dict[int, list[int]] = {}
        for row, segment in zip(rows.tolist(), blocks.segment[rows].tolist(), strict=True):
            by_segment.setdefault(segment, []).append(row)
        whole = set(self._catalog.read(partial(_held_whole, ids=[s.segment_id for s in segments])))
        chosen: list[Chosen] = []
        ids: dict[tuple[bytes, bytes], set[bytes]] = {}
        for segment, members in by_segment.items():
            facts = segments[segment]
            names = blocks.ids[members].tobytes()
            each = [names[16 * i : 16 * i + 16] for i in range(len(members))]
            if facts.tenant_id is not None:
                ids.setdefault((facts.tenant_id, facts.namespace_digest), set()).update(each)
            if facts.segment_id not in whole:
                slots = tuple(int(slot) for slot in blocks.slot[members])
                chosen.append(Chosen(facts.segment_id, slots, tuple(each)))
        touched = [segments[segment] for segment in by_segment]
        return DeletionPlan(
            Trigger.ERASE,
            tuple(facts for facts in touched if facts.segment_id not in whole),
            tuple(facts for facts in touched if facts.segment_id in whole),
            targets=tuple(
                Targets(tenant_id, namespace, frozenset(members))
                for (tenant_id, namespace), members in ids.items()
            ),
            chosen=tuple(chosen),
        )

    def _scope(
        self, state: State, chosen: Mask, asked: Sequence[str], *, include_shared: bool
    ) -> dict[str, Fact]:
        table, scopes = state.snapshot.prompts, state.snapshot.scopes
        rows = np.flatnonzero(chosen).tolist()
        tenants = {scopes[int(table.scope[row])][0] for row in rows}
        scope: dict[str, Fact] = {"by": list(asked), "prompts": len(rows)}
        if include_shared:
            scope["include_shared"] = True
        keys = {tenant_id: self._ring.known(tenant_id) for tenant_id in tenants}
        if len(tenants) == 1:
            [only] = keys.values()
            scope["tenant"] = None if only is None else only.keyed_id("log", b"tenant").hex()
        subjects = {int(table.subject[row]) for row in rows}
        named = []
        for text in self._catalog.read(partial(membership.texts, numbers=subjects - {0})):
            opened = keys.get(text.tenant_id)
            if opened is not None:
                named.append(opened.keyed_id("log", b"subject" + text.text_id).hex())
        if len(named) == len(subjects) == len(tenants) == 1 and 0 not in subjects:
            scope["subject"] = named[0]
        elif 0 < len(named) <= _MAX_NAMED:
            scope["subjects"] = sorted(named)  # each is told of it: `kvvault report subject`
        known = []
        for row, prompt_id in zip(rows, table.ids_of(np.flatnonzero(chosen)), strict=True):
            opened = keys[scopes[int(table.scope[row])][0]]
            if opened is not None:
                known.append(opened.keyed_id("log", b"prompt" + prompt_id).hex())
        if len(known) <= _MAX_NAMED:
            scope["prompt_ids"] = sorted(known)
        else:
            joined = "".join(sorted(known)).encode()
            scope["prompt_ids_sha256"] = hashlib.sha256(joined).hexdigest()
        return scope


def _fate(state: State, chosen: Mask, held: Mask, *, include_shared: bool) -> tuple[Mask, Mask]:
    """Which blocks go, and which of the chosen prompts' others have, too."""
    table, ids = state.snapshot.prompts, state.snapshot.blocks.ids
    fate = state.sharing.erasure(table.number[chosen], ids)
    if not include_shared:
        return fate.private, fate.shared
    kept = state.sharing.erasure(table.number[held], ids)
    everything = fate.private | fate.shared
    return everything & ~(kept.private | kept.shared), fate.shared


def _held_whole(connection: Connection, ids: Sequence[bytes]) -> list[bytes]:
    """Which of these segments a hold keeps as such."""
    return [
        one.facts.segment_id
        for one in retention.live_among(connection, ids, whole=True)
        if one.held
    ]
