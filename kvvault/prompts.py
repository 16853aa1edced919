"""Questions about the inventory: which prompts persist, whose, how much, until when.

Whoever asks needs the vault's keys: names, subjects and request ids are encrypted under the
tenants' keys, and are decrypted for what is shown only. What is asked for by name is looked up by
its keyed id. Figures are of what lives in the catalog when it is asked, so a prompt with nothing
left is in no answer, pruned or not.

Threads: any. Reads the catalog, may ask the key provider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt

from kvvault.catalog import holds, membership
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import TenantRow
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import UsageError, VaultLockedError
from kvvault.keyring import KeyRing
from kvvault.matching import Matcher
from kvvault.model import Namespace
from kvvault.promptfacts import (
    NUMBERS,
    Chain,
    Condition,
    Detail,
    Mask,
    Names,
    Part,
    PromptFacts,
    State,
    SubjectFacts,
    Together,
    Usage,
    age_group,
    having_prefix,
    keeps,
    time_or_none,
)
from kvvault.prompting import Recorder
from kvvault.tenants import find_tenant
from kvvault.timekeeping import VaultTime
from kvvault.view import View

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_LEAST_ID_DIGITS = 4
_WHENEVER = -math.inf
"""A time before every deadline."""
_GRACE_S = 600.0
"""Prompts that were used since are not pruned: their first blocks may be on their way, or their
requests still running, of which every process tells once a minute."""


class Prompts:
    """See the module. Made by `Vault.prompts`."""

    def __init__(
        self,
        catalog: Catalog,
        ring: KeyRing,
        view: View,
        time: VaultTime,
        recorder: Recorder,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`alone`: nobody else writes blocks again meanwhile, see `kvvault.rewriting.Rewriter`."""
        self._catalog = catalog
        self._ring = ring
        self._view = view
        self._time = time
        self._recorder = recorder
        self._alone = alone
        self._matcher = Matcher(catalog, ring, time)

    # -- reading ----------------------------------------------------------------------------------

    def load(self, *, tenant: str | None = None, with_ids: bool = False) -> State:
        """The inventory of a tenant, or of all. `with_ids`: with the blocks' ids, for
        `Sharing.erasure`, and so that copies of a block count as one where it matters who else has
        it. Sixteen bytes a block; finding the copies among a million takes less than a tenth of a
        second (measured).

        Raises:
            UsageError: the vault has no such tenant.
            WrongKeyError, StorageError, CatalogError.
        """
        tenant_id = None if tenant is None else self._tenant(tenant).tenant_id
        return State(
            self._catalog.read(partial(membership.snapshot, tenant_id=tenant_id, with_ids=with_ids))
        )

    def _tenant(self, name: str) -> TenantRow:
        row = find_tenant(self._catalog, self._ring, name)
        if row is None:
            raise UsageError("the vault has no such tenant", hint="see `kvvault ls tenants`")
        return row

    def matching(
        self, state: State, conditions: Iterable[Condition], *, everything: bool = False
    ) -> Mask:
        """Which prompts of a state's table are meant; see `kvvault.matching.Matcher`."""
        return self._matcher.matching(state, conditions, everything=everything)

    # -- answers ----------------------------------------------------------------------------------

    def listing(
        self,
        conditions: Iterable[Condition] = (),
        *,
        tenant: str | None = None,
        sort: str = "last_used",
        descending: bool = True,
        limit: int | None = None,
    ) -> tuple[list[PromptFacts], int]:
        """Prompts that meet all conditions, and how many there are without the limit.

        Raises: as `load` and `matching`; UsageError: `sort` is no field that is a number.
        """
        if sort not in NUMBERS:
            raise UsageError(
                f"prompts cannot be sorted by {sort[:40]!r}", hint=f"by: {', '.join(NUMBERS)}"
            )
        state = self.load(tenant=tenant, with_ids=True)
        rows = np.flatnonzero(self.matching(state, conditions))
        values = self._matcher.numbers(state, sort)[rows]
        rows = rows[np.argsort(-values if descending else values, kind="stable")]
        return self.facts(state, rows[:limit]), len(rows)

    def facts(self, state: State, rows: I64) -> list[PromptFacts]:
        """Prompts of these rows of the table, decrypted.

        Raises: StorageError, CatalogError.
        """
        table, figures = state.snapshot.prompts, state.figures
        where = state.at[rows]
        names = Names(self._catalog, self._ring)
        texts = {
            text.text_no: text
            for text in self._catalog.read(
                partial(
                    membership.texts,
                    numbers={int(n) for n in [*table.subject[rows], *table.labels[rows]] if n},
                )
            )
        }
        exact = self._catalog.read(
            partial(membership.exact, numbers=[int(n) for n in table.number[rows]])
        )
        inside = state.segments_of(where)
        in_force = self._catalog.read(holds.list_holds)
        models = self._matcher.models()
        found: list[PromptFacts] = []
        for row, at in zip(rows.tolist(), where.tolist(), strict=True):
            tenant_id, namespace = state.snapshot.scopes[int(table.scope[row])]
            number = int(table.number[row])
            said = exact.get(number)
            if said is None:
                continue  # gone since
            subject = texts.get(int(table.subject[row]))
            labels = texts.get(int(table.labels[row]))
            kept = names.prompt(tenant_id, said.sealed)
            mine = [state.snapshot.segments[i] for i in inside.get(at, ())]
            found.append(
                PromptFacts(
                    number=number,
                    prompt_id=said.prompt_id,
                    tenant_id=tenant_id,
                    tenant=names.tenant(tenant_id),
                    subject=None if subject is None else names.text(subject),
                    labels={} if labels is None else names.labels(labels),
                    request_id=kept.get("request"),
                    fingerprint=kept.get("fingerprint"),
                    preview=kept.get("preview"),
                    namespace=namespace,
                    model=models.get(namespace),
                    first_used=said.first_used,
                    last_used=said.last_used,
                    tokens=int(figures.tokens[at]),
                    blocks=int(figures.blocks[at]),
                    data_bytes=int(figures.bytes[at]),
                    alone_blocks=int(figures.alone_blocks[at]),
                    alone_bytes=int(figures.alone_bytes[at]),
                    first_deadline=time_or_none(figures.first_deadline[at]),
                    last_deadline=time_or_none(figures.last_deadline[at]),
                    rules=tuple(sorted({s.rule for s in mine if s.rule})),
                    classes=tuple(sorted({s.retention_class for s in mine if s.retention_class})),
                    holds=tuple(
                        hold.hold_no
                        for hold in in_force
                        if keeps(
                            hold,
                            tenant_id=tenant_id,
                            subject=subject,
                            prompt_id=said.prompt_id,
                            segments=mine,
                        )
                    ),
                )
            )
        return found

    def row_of(self, state: State, prefix: str, *, everything: bool = False) -> int:
        """The row of the table with the prompt whose id begins so. `everything`: as `matching`.

        Raises:
            UsageError: none does, or several do, or it has fewer than four hex digits.
        """
        prefix = prefix.lower()
        if len(prefix) < _LEAST_ID_DIGITS or not set(prefix) <= set("0123456789abcdef"):
            raise UsageError(
                "that is not a prompt's id",
                hint=f"give at least {_LEAST_ID_DIGITS} of its hex digits, see: kvvault prompts ls",
            )
        ids = state.snapshot.prompts.prompt_id
        among = state.known if everything else state.present
        found = np.flatnonzero(among & having_prefix(ids, prefix))
        if len(found) == 1:
            return int(found[0])
        if not len(found):
            raise _gone()
        raise UsageError(f"{len(found)} prompts begin so", hint="give more of its digits")

    def numbers_of(self, prefixes: Iterable[str]) -> set[int]:
        """Numbers of the prompts whose ids begin so, also of those that have no block now.

        Raises: as `load` and `row_of`.
        """
        state = self.load()
        rows = [self.row_of(state, one, everything=True) for one in prefixes]
        return {int(state.snapshot.prompts.number[row]) for row in rows}

    def show(self, prefix: str) -> Detail:
        """Everything about one prompt, by its id or how that begins.

        Raises: as `row_of` and `facts`.
        """
        state = self.load(with_ids=True)
        row = self.row_of(state, prefix)
        facts = next(iter(self.facts(state, np.array([row], np.int64))), None)
        if facts is None:
            raise _gone()
        at = state.at[[row]]
        pairs = state.sharing.pairs_of(at)
        which, block = state.sharing.rows(pairs)
        blocks = state.snapshot.blocks
        own = pairs.owner[which] == at[0]
        segment, end = blocks.segment[block], blocks.end[block]
        parts = [
            Part(
                state.snapshot.segments[i],
                int(np.count_nonzero(own & (segment == i))),
                int(np.count_nonzero(~own & (segment == i))),
                int(end[segment == i].max()),
            )
            for i in np.unique(segment).tolist()
        ]
        parts.sort(key=lambda part: part.segment.created_at)
        mine = np.zeros(len(blocks.owner), np.bool_)
        mine[block] = True
        sharing = int(np.count_nonzero(state.having(state.copies_of(mine))[0] & state.present)) - 1
        return Detail(facts, tuple(parts), sharing)

    def together(
        self, conditions: Iterable[Condition] = (), *, tenant: str | None = None
    ) -> Together:
        """What the prompts have that meet all conditions, and what of it others have.

        Raises: as `load` and `matching`.
        """
        state = self.load(tenant=tenant, with_ids=True)
        numbers = state.snapshot.prompts.number[self.matching(state, conditions)]
        fate = state.sharing.erasure(numbers, state.snapshot.blocks.ids)
        sizes = state.segments.block_bytes[state.snapshot.blocks.segment]
        return Together(int(sizes[fate.private].sum()), int(sizes[fate.shared].sum()))

    def subjects(self, *, tenant: str | None = None) -> list[SubjectFacts]:
        """Every subject with prompts in the inventory, by tenant and the keyed id.

        Raises: as `load`.
        """
        state = self.load(tenant=tenant, with_ids=True)
        table, figures = state.snapshot.prompts, state.figures
        rows = np.flatnonzero(state.present & (table.subject > 0))
        numbers, group = np.unique(table.subject[rows], return_inverse=True)
        texts = {
            text.text_no: text
            for text in self._catalog.read(
                partial(membership.texts, numbers=[int(n) for n in numbers])
            )
        }
        names = Names(self._catalog, self._ring)
        in_force = self._catalog.read(holds.list_holds)
        at = state.at[rows]
        count = np.bincount(group, minlength=len(numbers))
        alone = np.zeros(len(numbers), np.int64)
        np.add.at(alone, group, figures.alone_bytes[at])
        first = np.full(len(numbers), np.inf)
        last = np.full(len(numbers), -np.inf)
        until = np.full(len(numbers), -np.inf)
        np.minimum.at(first, group, table.first_used[rows])
        np.maximum.at(last, group, table.last_used[rows])
        np.maximum.at(until, group, figures.last_deadline[at])
        found = [
            SubjectFacts(
                text.text_id,
                text.tenant_id,
                names.tenant(text.tenant_id),
                names.text(text),
                int(count[i]),
                int(alone[i]),
                float(first[i]),
                float(last[i]),
                time_or_none(until[i]),
                tuple(
                    hold.hold_no
                    for hold in in_force
                    if keeps(hold, tenant_id=text.tenant_id, subject=text)
                ),
            )
            for i, number in enumerate(numbers.tolist())
            if (text := texts.get(number)) is not None
        ]
        return sorted(found, key=lambda one: (one.tenant or "", one.subject or "", one.text_id))

    def usage(self, by: str, *, tenant: str | None = None) -> list[Usage]:
        """What is stored, in groups: by ``tenant``, ``class``, ``model`` or ``age`` (of the
        segment). Every live block is in exactly one of them, also those of no prompt; a prompt is
        in each in which it has blocks.

        Raises: as `load`; UsageError: there is no such way to group.
        """
        state = self.load(tenant=tenant)
        groups = self._groups(state, by)
        result = []
        segment = state.snapshot.blocks.segment
        sizes = state.segments.block_bytes[segment]
        nobodys = state.snapshot.blocks.owner == 0
        for name in dict.fromkeys(groups):
            chosen = np.array([one == name for one in groups], np.bool_)
            mine = chosen[segment]
            result.append(
                Usage(
                    name,
                    int(np.count_nonzero(state.having_in(chosen) & state.present)),
                    int(np.count_nonzero(mine)),
                    int(sizes[mine].sum()),
                    int(np.count_nonzero(mine & nobodys)),
                    int(sizes[mine & nobodys].sum()),
                )
            )
        return [one for one in result if one.blocks]

    def _groups(self, state: State, by: str) -> Sequence[str | None]:
        segments = state.snapshot.segments
        if by == "tenant":
            names = Names(self._catalog, self._ring)
            return [None if s.tenant_id is None else names.tenant(s.tenant_id) for s in segments]
        if by == "class":
            return [s.retention_class or None for s in segments]
        if by == "model":
            models = self._matcher.models()
            return [models.get(s.namespace_digest) for s in segments]
        if by == "age":
            now = self._time.steady()
            return [age_group(now - s.created_at) for s in segments]
        raise UsageError(
            f"nothing is grouped by {by[:40]!r}", hint="by: tenant, class, model or age"
        )

    def persist(
        self, tenant: TenantKeys, namespace: Namespace, keys: Sequence[bytes]
    ) -> list[bool]:
        """Which blocks are on the disk, whatever their deadline: a hold may keep them beyond.

        Raises:
            ClosedError: the tenant was forgotten.
            StorageError, CatalogError.
        """
        self._view.refresh()
        ids = [tenant.block_id(namespace.digest, key) for key in keys]
        return [self._view.find(one, _WHENEVER) is not None for one in ids]

    def find_chain(
        self,
        tenant: TenantKeys,
        namespace: Namespace,
        keys: Sequence[bytes],
        ends: Sequence[int],
    ) -> Chain:
        """What persists of a text, also what is not served any more and only kept: `keys` are the
        engine's names of its blocks in order, `ends` the tokens at which they end.

        Raises:
            ValueError: as many keys as ends there are not.
            ClosedError: the tenant was forgotten.
            StorageError, CatalogError.
        """
        if len(keys) != len(ends):
            raise ValueError(f"{len(keys)} keys, but {len(ends)} ends")
        self._view.refresh()
        leading: dict[bytes, list[int]] = {}
        count = 0
        for key in keys:
            location = self._view.find(tenant.block_id(namespace.digest, key), _WHENEVER)
            segment = None if location is None else self._view.segment(location.number)
            if location is None or segment is None:
                break
            leading.setdefault(segment.place.segment_id, []).append(location.slot)
            count += 1
        state = State(
            self._catalog.read(
                partial(membership.snapshot, tenant_id=tenant.tenant_id, with_ids=True)
            )
        )
        segments = state.snapshot.segments
        mine = [s for s in segments if s.segment_id in leading]
        deadline = min((s.deadline for s in mine), default=math.inf)
        return Chain(
            blocks=count,
            of_blocks=len(keys),
            tokens=ends[count - 1] if count else 0,
            since=min((s.created_at for s in mine), default=None),
            until=None if math.isinf(deadline) else deadline,
            prompts=tuple(self._having(state, leading)),
        )

    def _having(
        self, state: State, leading: Mapping[bytes, Sequence[int]]
    ) -> Iterable[tuple[PromptFacts, int]]:
        """The prompts with any of these blocks (slots of segments), and up to which token."""
        blocks = state.snapshot.blocks
        index = {s.segment_id: i for i, s in enumerate(state.snapshot.segments)}
        wanted = [
            (index[segment_id] << 32) | slot
            for segment_id, slots in leading.items()
            if segment_id in index
            for slot in slots
        ]
        chosen = np.isin((blocks.segment << 32) | blocks.slot, np.array(wanted, np.int64))
        held, tokens = state.having(chosen)
        rows = np.flatnonzero(state.present & held)
        rows = rows[np.argsort(-tokens[rows], kind="stable")]
        return zip(self.facts(state, rows), tokens[rows].tolist(), strict=True)

    # -- upkeep -----------------------------------------------------------------------------------

    def prune(self) -> int:
        """Take prompts of which nothing is left out of the inventory; returns how many went. Those
        that were used in the last ten minutes stay: their blocks may be on their way. So do those
        whose requests are running: once pruned, they could store nothing more.

        The inventory is read outside of the transaction that writes: for a hundred thousand prompts
        that takes seconds on a busy machine, in which nobody could store. What was stored or used
        meanwhile is asked there. While blocks are being written again they live nowhere for a
        moment, so it waits for that; when that takes long, nothing is pruned this time.

        Raises:
            StorageError, CatalogError.
        """
        self._recorder.touch(always=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(self._alone())
            except VaultLockedError:
                return 0
            before = self._time.steady() - _GRACE_S
            state = self.load()
            table = state.snapshot.prompts
            empty = state.known & ~state.present & (table.last_used < before)
            # Also with none: once more what nobody leads to any more, as an erasure leaves it.
            step = partial(
                membership.prune,
                numbers=[int(number) for number in table.number[empty]],
                extent_no=state.snapshot.extent_no,
                before=before,
            )
            return self._catalog.write(step, durable=False)


def _gone() -> UsageError:
    return UsageError(
        "no prompt of that id persists", hint="see: kvvault prompts ls; it may be gone"
    )
