"""The facade: everything outside the core goes through `Vault`.

A vault is one directory (see `kvvault.segments.format`) plus a key provider elsewhere. Several
processes may have it open at once: the catalog is the truth, and each process follows it.

What a vault says of itself is in the class below it (`kvvault.looking.OpenVault`), how it is put
together in `kvvault.opening`.

Threads: any method from any thread. `Vault.contains` (and `Scope.block_id`) never block and never
raise; they are for scheduler threads. Everything else may wait for disk, catalog or key provider.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvvault import opening, tenants
from kvvault.applying import PolicyDiff
from kvvault.catalog import operations
from kvvault.crypto.providers.base import KeyProvider
from kvvault.deleting import HOLDS_LOCK, DeletionPlan, DeletionReport, Targets
from kvvault.erasing import AskEngine
from kvvault.errors import ClosedError, KvvaultError, UsageError
from kvvault.evicting import EvictionReport
from kvvault.governing import Governed
from kvvault.holding import Hold
from kvvault.looking import OpenVault
from kvvault.model import Buffer, Clock, Guard, Namespace, Outcome, PutReport, RecoveryReport
from kvvault.opening import Parts
from kvvault.options import VaultOptions
from kvvault.origins import OfPrompt
from kvvault.policy.document import Policy
from kvvault.prompterasing import ErasurePlan, PromptEraser
from kvvault.promptfacts import Condition
from kvvault.prompting import Prompt
from kvvault.purging import PurgeReport
from kvvault.reading import ALWAYS, NOWHERE
from kvvault.scope import Scope, block_views, check_labels, check_name
from kvvault.segments.format import MAX_BLOCK_BYTES

__all__ = ["Scope", "Vault"]

log = logging.getLogger(__name__)


class Vault(OpenVault):
    """An open vault. Use `create` or `open`; close it, or use it as a context manager.

    After `close`, and in a process forked from the one that opened it, whatever needs the catalog,
    the segments or the keys raises ClosedError. `contains` and `touch` never raise; what is known
    without them (`counters`, `path`, `time`, `provider_info`) can still be asked.
    """

    def __init__(self, parts: Parts) -> None:
        """Not for callers: see `create` and `open`."""
        super().__init__(parts)
        self._fence = parts.fence
        self._reader = parts.reader
        self._writer = parts.writer
        self._recorder = parts.recorder
        self._rewriter = parts.rewriter
        self._issuer = parts.issuer
        self._eraser = parts.eraser
        self._block_eraser = parts.block_eraser
        self._evictor = parts.evictor
        warning = self.key_warning()
        if warning:
            log.warning("%s", warning)  # at every start (REQ-K7)

    # -- creating and opening ---------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        provider: str | KeyProvider | None = None,
        policy: Policy | None = None,
        options: VaultOptions | None = None,
        clock: Clock | None = None,
        actor: str = "kvvault",
    ) -> Vault:
        """Make a vault in a new or empty directory and open it.

        `provider` is a key provider's URI; the default is a new key file below the user's data
        directory, outside the vault. `policy` is what governs it from the start; the default is
        the shipped one; `actor`, who puts it in force, is recorded in clear.

        Raises:
            VaultExistsError: there is something at `path` already.
            UnsafeFileError, StorageError: the directory cannot be made safely.
            VaultKeyError, UsageError: the provider does not work or is unknown.
        """
        return cls(opening.create(Path(path), provider, policy, options, clock, actor))

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        provider: str | KeyProvider | None = None,
        options: VaultOptions | None = None,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> Vault:
        """Open a vault, repairing what a crash left (see `kvvault.recovery`).

        `provider` overrides the one named in the vault's descriptor (a moved key file). With
        `read_only` nothing is changed or repaired, and nothing can be put or deleted.

        Raises:
            VaultNotFoundError: there is no vault at `path`.
            WrongKeyError: the provider's key is missing or is not this vault's.
            KeyUnavailableError: the provider does not answer.
            UnsafeFileError, StorageError, CatalogCorruptError, UnsupportedVersionError,
            VaultLockedError.
        """
        return cls(opening.open_existing(Path(path), provider, options, clock, read_only=read_only))

    # -- blocks -----------------------------------------------------------------------------------

    def scope(
        self,
        tenant: str,
        namespace: Namespace,
        *,
        labels: Mapping[str, str] | None = None,
        retention_class: str | None = None,
    ) -> Scope:
        """The place of a tenant's blocks in a namespace; makes the tenant when it is new. `labels`
        and `retention_class` are what the policy decides by, besides, for blocks put through it.

        Raises:
            UsageError: not a usable tenant name (empty, longer than 256 characters, control
                characters).
            VaultKeyError: the key provider does not answer or refuses.
            StorageError, CatalogError: the catalog cannot be read or written.
        """
        self._check_open()
        check_name(tenant, "tenant name")
        check_labels(labels or {})
        if namespace.block_bytes > MAX_BLOCK_BYTES:
            raise UsageError(
                "blocks of that size are not supported", hint=f"at most {MAX_BLOCK_BYTES} bytes"
            )
        now, make = self._time.steady(), not self.read_only
        if make:
            self._catalog.write(lambda c: operations.add_namespace(c, namespace, now))
        keys = tenants.keys_to_store(self._catalog, self._ring, tenant, now, make=make)
        return Scope(tenant, keys, namespace, labels or {}, retention_class)

    def contains(self, scope: Scope, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are here, as this process knew when it last looked (at most
        `VaultOptions.poll_interval_s` ago). Memory only: never blocks, never raises."""
        now = self._time.now()
        try:
            return [self._view.find(scope.block_id(key), now) is not None for key in keys]
        except ClosedError:
            return [False] * len(keys)

    @property
    def removals(self) -> int:
        """Grows whenever this process notices deletions, also by others. As long as it stays the
        same, a block that `contains` does not find was never here since, rather than deleted."""
        return self._view.removals

    def touch(self, scope: Scope, keys: Sequence[bytes]) -> None:
        """Say that blocks are in use, without loading them: they are evicted later, and sliding
        deadlines move. Memory only; never raises."""
        try:
            self._view.touch([scope.block_id(key) for key in keys], self._time.steady())
        except ClosedError:
            return

    def put(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        *,
        guard: Guard | None = None,
        prompt: Prompt | None = None,
        ends: Sequence[int] | None = None,
    ) -> PutReport:
        """Encrypt and store blocks; returns when they are committed and findable.

        `keys` are the engine's names of the blocks (any bytes); `buffers` are read only, each
        C-contiguous and of exactly `namespace.block_bytes` bytes. Blocks that are here already are
        not written again. What cannot be stored (disk full, provider down, guard says no) is
        counted as refused: a cache that cannot store is no error. Committed blocks survive the
        death of any process; a power failure may take the newest ones, which then are misses.

        `prompt`: for which they are stored (see `prompt`), and `ends[i]`, the token of it at which
        the i-th block ends. Nothing is stored for a prompt that was erased.

        Raises:
            ValueError: a buffer of another size, or as many keys as buffers (or ends) there are
                not.
            ClosedError: the vault is closed or read-only.
        """
        self._check_writable()
        if prompt is not None and (ends is None or len(ends) != len(keys)):
            raise ValueError("a prompt's blocks need the token at which each of them ends")
        views = block_views(scope, keys, buffers, writable=False)
        with suppress(KvvaultError):
            self._view.refresh()  # a policy that another process applied governs this store
        try:
            ids = [scope.block_id(key) for key in keys]
            to = scope.destination(self._governor)
        except KvvaultError as exc:
            if not isinstance(exc, ClosedError):
                log.warning("blocks are not stored: %s", exc)
            self._counters.put(PutReport(refused=len(keys)), scope.namespace.block_bytes)
            return PutReport(refused=len(keys))
        if isinstance(to.under, Governed) and not to.under.verdict.persist:
            self._counters.put(PutReport(declined=len(keys)), scope.namespace.block_bytes)
            return PutReport(declined=len(keys))
        if isinstance(to.under, Governed) and self._would_be_past(to.under):
            self._counters.put(PutReport(refused=len(keys)), scope.namespace.block_bytes)
            return PutReport(refused=len(keys))
        if prompt is None:
            return self._writer.put(to, ids, views, guard or ALWAYS)
        origins = OfPrompt(prompt, ends or (), self._catalog, self._view)
        return self._writer.put(to, ids, views, guard or ALWAYS, origins=origins)

    def prompt(
        self,
        scope: Scope,
        *,
        request_id: str | None = None,
        subject: str | None = None,
        labels: Mapping[str, str] | None = None,
        preview: str | None = None,
    ) -> Prompt:
        """A request, for the inventory: what it says of itself goes there when something of it is
        stored or reused, encrypted under the tenant's key. `preview`: how it begins; kept only if
        the policy says so. Memory only.

        Raises:
            UsageError: the subject is no 1 to 256 printable characters, or the labels are not
                printable or too many.
        """
        if subject is not None:
            check_name(subject, "subject")
        if labels:
            check_labels(labels)
        made = Prompt(
            scope.keys,
            scope.namespace.digest,
            partial(scope.verdict, self._governor),
            request_id=request_id,
            subject=subject,
            labels=labels or {},
            preview=preview,
            steady=self._time.steady,
        )
        self._recorder.begin(made)
        return made

    def record(self, prompt: Prompt, chain: Mapping[bytes, int]) -> None:
        """A request is over, and so are its stores. `chain`: keys of all its blocks, also of those
        that were reused, each with the token at which it ends; read later, so it must not change.
        Memory only: never blocks, never raises."""
        if self._closed or self.read_only or os.getpid() != self._pid:
            return
        self._recorder.record(prompt, chain)

    def settle_prompts(self) -> None:
        """Wait until the inventory has what this process handed over."""
        self._recorder.settle()

    def _would_be_past(self, governed: Governed) -> bool:
        """Whether the clock is so far ahead, and not vouched for, that what is stored now would not
        be served: it would be stored again and again."""
        return self._time.steady() + governed.served_s <= self._time.now()

    def get(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        *,
        guard: Guard | None = None,
    ) -> list[Outcome]:
        """Load blocks into `buffers` (as for `put`, writable). A buffer holds its block's bytes,
        authenticated, where the outcome is HIT; everywhere else it is zeroed (ABANDONED: not
        touched). Never serves what a deletion that has returned took away.

        Raises:
            ValueError: as for `put`.
            ClosedError: the vault is closed.
        """
        self._check_open()
        views = block_views(scope, keys, buffers, writable=True)
        try:
            ids = [scope.block_id(key) for key in keys]
        except ClosedError:
            ids = []  # the tenant was forgotten
        return self._reader.get(ids or [NOWHERE] * len(keys), views, guard or ALWAYS)

    # -- deletion ---------------------------------------------------------------------------------

    def plan_expired(self) -> DeletionPlan:
        """What is past its deadline. What this process has just used is reported first."""
        self._check_open()
        with suppress(KvvaultError):  # a full disk must not keep anything alive
            self._watcher.report_use()
        return self._eraser.plan_expired()

    def plan_segments(self, segment_ids: Sequence[bytes]) -> DeletionPlan:
        """What deleting these segments would do."""
        self._check_open()
        return self._eraser.plan_segments(segment_ids)

    def plan_tenant(self, tenant: str) -> DeletionPlan | None:
        """What forgetting a tenant would do; None when there is none of that name.

        Raises:
            WrongKeyError: the catalog was altered: it leads from this name to another tenant.
        """
        self._check_open()
        row = tenants.find_tenant(self._catalog, self._ring, tenant)
        return None if row is None else self._eraser.plan_tenant(row.tenant_id)

    def execute(
        self, plan: DeletionPlan, *, actor: str = "kvvault", reason: str = ""
    ) -> DeletionReport:
        """See `kvvault.deleting.Eraser.execute` and, for single blocks,
        `kvvault.erasing.BlockEraser.execute`."""
        self._check_writable()
        if plan.targets:
            return self._block_eraser.execute(plan, actor=actor, reason=reason)
        return self._eraser.execute(plan, actor=actor, reason=reason)

    def plan_blocks(self, scope: Scope, keys: Sequence[bytes]) -> DeletionPlan:
        """What deleting single blocks would do: their segments go, after what else is in these is
        written to others.

        Raises:
            ClosedError: the tenant was forgotten or the vault is closed.
        """
        self._check_open()
        ids = frozenset(scope.block_id(key) for key in keys)
        targets = Targets(scope.tenant_id, scope.namespace.digest, ids)
        return self._eraser.plan_blocks([targets])

    def plan_erasure(
        self,
        conditions: Sequence[Condition],
        *,
        tenant: str | None = None,
        numbers: Iterable[int] | None = None,
        include_shared: bool = False,
    ) -> ErasurePlan:
        """What erasing prompts would do. See `kvvault.prompterasing.PromptEraser.plan`."""
        self._check_open()
        self._recorder.settle()  # what this process has just stored or reused is asked about, too
        return self._prompt_eraser().plan(
            conditions, tenant=tenant, numbers=numbers, include_shared=include_shared
        )

    def erase(
        self,
        plan: ErasurePlan,
        *,
        actor: str,
        reason: str,
        engine: AskEngine | None = None,
    ) -> DeletionReport:
        """Erase prompts. See `kvvault.prompterasing.PromptEraser.execute`."""
        self._check_writable()
        return self._prompt_eraser().execute(plan, actor=actor, reason=reason, engine=engine)

    def _prompt_eraser(self) -> PromptEraser:
        return PromptEraser(self._catalog, self._ring, self.prompts, self._block_eraser)

    def delete_segments(self, segment_ids: Sequence[bytes]) -> int:
        """Destroy segments, but for those that a hold keeps; returns how many went. When it
        returns, no process serves their blocks any more, and their keys are gone from the catalog.

        Raises: as `kvvault.deleting.Eraser.execute`.
        """
        return self.execute(self.plan_segments(segment_ids)).segments

    def forget(self, tenant: str) -> int:
        """Destroy a tenant's key and with it everything of the tenant; returns its live segments.

        Raises: as `delete_segments`, and HeldError, WrongKeyError.
        """
        plan = self.plan_tenant(tenant)
        if plan is None:
            self._eraser.settle()
            return 0
        return self.execute(plan).segments

    def expire(self) -> DeletionReport:
        """Destroy what is past its deadline.

        Raises: as `delete_segments`.
        """
        return self.execute(self.plan_expired(), reason="deadline")

    def evict(self) -> EvictionReport:
        """Bring the vault below its low watermark when it is above the high one.

        Raises: as `delete_segments`.
        """
        self._check_writable()
        return self._evictor.relieve()

    def reconcile(self) -> RecoveryReport:
        """Repair what processes that died since left behind, as opening the vault does, and finish
        deletions of single blocks.

        Raises:
            VaultLockedError: another process is at it.
            StorageError, CatalogError.
        """
        self._check_writable()
        report = self._parts.repair()
        self._view.refresh()
        self._prompt_eraser().sweep()
        self._block_eraser.compact()
        return report

    # -- holds ------------------------------------------------------------------------------------

    def place_hold(
        self,
        *,
        reason: str,
        actor: str,
        tenant: str | None = None,
        subject: str | None = None,
        prompt_id: bytes | None = None,
        segment_id: bytes | None = None,
    ) -> Hold:
        """Stop expiry, eviction and erasure of what a tenant, or a subject of it, has and will
        have, of one prompt, or of one segment. `reason` and `actor` are recorded as they are:
        nothing personal.

        Raises:
            ValueError: not exactly one of `tenant`, `tenant` with `subject`, `prompt_id` and
                `segment_id`.
            UsageError: the vault has no such thing; `reason` or `actor` is no usable text.
            WrongKeyError, StorageError, CatalogError.
        """
        self._check_writable()
        now = self._time.steady()
        with self._fence.exclusive(HOLDS_LOCK, self.options.lock_timeout_s):
            return self._holder.place(
                tenant=tenant,
                subject=subject,
                prompt_id=prompt_id,
                segment_id=segment_id,
                reason=reason,
                actor=actor,
                now=now,
            )

    def clear_hold(self, number: int, *, reason: str, actor: str) -> DeletionReport:
        """End a hold; what is past its deadline and no other hold keeps is destroyed now.

        Raises:
            UsageError: there is no hold of that number, or it was cleared before.
            StorageError, CatalogError, VaultLockedError: also when the hold is cleared, and what it
                kept could not be destroyed yet (the next expiry does it).
        """
        self._check_writable()
        self._holder.clear(number, reason=reason, actor=actor, now=self._time.steady())
        return self.expire()

    # -- purges -----------------------------------------------------------------------------------

    def purge(self) -> PurgeReport:
        """Make everything that was deleted unrecoverable. See `kvvault.purging.Purger.run`."""
        self._check_writable()
        # What is still under a live segment's key is not purged.
        self._prompt_eraser().sweep()
        self._block_eraser.compact()
        return self._parts.purger.run()

    # -- policy and time --------------------------------------------------------------------------

    def apply_policy(self, policy: Policy, *, actor: str) -> tuple[PolicyDiff, DeletionReport]:
        """Put `policy` in force here and in every process that has the vault open.

        Raises: as `kvvault.applying.Applier.apply`; VaultLockedError: somebody else is at it.
        """
        self._check_writable()
        with self._fence.exclusive("policy", self.options.lock_timeout_s):
            result = self._applier.apply(policy, actor=actor)
        self._view.refresh()
        return result

    def accept_clock(self) -> float:
        """Say that the machine's clock is right although it is far ahead; by how many seconds.

        Raises:
            StorageError, CatalogError.
        """
        self._check_writable()
        return self._watcher.accept_clock()

    # -- looking ----------------------------------------------------------------------------------

    # -- housekeeping -----------------------------------------------------------------------------

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise ClosedError("the vault is open for reading only", hint="open it for writing")
