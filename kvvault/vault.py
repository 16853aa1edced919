"""The facade: everything outside the core goes through `Vault`.

A vault is one directory (see `kvvault.segments.format`) plus a key provider elsewhere. Several
processes may have it open at once: the catalog is the truth, and each process follows it.

Threads: any method from any thread. `Vault.contains` (and `Scope.block_id`) never block and never
raise; they are for scheduler threads. Everything else may wait for disk, catalog or key provider.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from sqlalchemy import Connection

from kvvault import inventory, keylooking, layout
from kvvault.applying import Applier, PolicyDiff
from kvvault.audit.checkpoint import VerifierKey, origin_of
from kvvault.audit.log import AuditLog
from kvvault.audit.receipts import Issuer
from kvvault.catalog import log as audit_log
from kvvault.catalog import operations, purging, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.catalog.operations import TenantRow
from kvvault.checking import Checker
from kvvault.counters import OTHERS, Counters
from kvvault.crypto.aead import MAX_TEXT_BYTES
from kvvault.crypto.keys import TenantKeys
from kvvault.crypto.providers import open_provider
from kvvault.crypto.providers.base import KeyProvider, ProviderInfo
from kvvault.deleting import HOLDS_LOCK, DeletionPlan, DeletionReport, Eraser, Targets
from kvvault.erasing import AskEngine, BlockEraser
from kvvault.errors import (
    CatalogCorruptError,
    ClosedError,
    KvvaultError,
    UnsafeFileError,
    UsageError,
    VaultLockedError,
    VaultNotFoundError,
)
from kvvault.evicting import EvictionReport, Evictor
from kvvault.governing import AppliedPolicy, Governed, Governor, PastPolicy
from kvvault.holding import Hold, Holder, find_tenant
from kvvault.keylooking import KeyCheck, KeysReport
from kvvault.keyring import KeyRing, another_tenants_row, with_current
from kvvault.model import (
    Buffer,
    Clock,
    Guard,
    Namespace,
    NamespaceFacts,
    Outcome,
    PutReport,
    RecoveryReport,
    SegmentFacts,
    SystemClock,
    TenantFacts,
    VaultStats,
    VerifyReport,
)
from kvvault.options import VaultOptions
from kvvault.origins import OfPrompt
from kvvault.policy import shipped
from kvvault.policy.decide import Verdict
from kvvault.policy.document import Policy
from kvvault.prompterasing import ErasurePlan, PromptEraser
from kvvault.promptfacts import Condition
from kvvault.prompting import Prompt, Recorder
from kvvault.prompts import Prompts
from kvvault.purging import Purger, PurgeReport
from kvvault.reading import ALWAYS, NOWHERE, Reader
from kvvault.recovery import Recovery
from kvvault.rewriting import Rewriter
from kvvault.segments.fence import Fence
from kvvault.segments.format import MAX_BLOCK_BYTES
from kvvault.segments.io import SegmentDir
from kvvault.segments.store import Progress
from kvvault.space import Space
from kvvault.timekeeping import VaultTime
from kvvault.view import View
from kvvault.writing import Destination, Writer

log = logging.getLogger(__name__)

_MAX_NAME = 256
_MAX_LABELS = 2048

_IN_USE = "in-use"
"""Lock that every open vault holds, shared."""

_MAX_TOMBSTONES = 10_000

_MAX_DAMAGED = 16
"""Segments that one entry of the audit log names."""

_PURGE_AT = 0.9
"""A purge is due at this share of the policy's interval: it takes a while, and may have to be
repeated."""

_REPORT_S = 1.0
"""How often use is reported; sliding deadlines move that late."""

_MARK_S = 10.0
"""How often the time is noted: a clock that is set back during a restart gains as much."""


class Scope:
    """Whose blocks, of which namespace, and by what the policy decides: where blocks are put and
    looked for. Made by `Vault.scope`. What is found depends on tenant and namespace alone."""

    __slots__ = ("_governed", "_keys", "labels", "namespace", "retention_class", "tenant")

    def __init__(
        self,
        tenant: str,
        keys: TenantKeys,
        namespace: Namespace,
        labels: Mapping[str, str],
        retention_class: str | None,
    ) -> None:
        self.tenant = tenant
        self.namespace = namespace
        self.labels = dict(labels)
        self.retention_class = retention_class
        self._keys = keys
        self._governed: Governed | None = None

    def __repr__(self) -> str:
        return "<Scope>"

    @property
    def tenant_id(self) -> bytes:
        return self._keys.tenant_id

    def block_id(self, key: bytes) -> bytes:
        """The id under which the engine's block `key` is kept: 16 bytes. No I/O.

        Raises:
            ClosedError: the tenant was forgotten or the vault closed.
        """
        return self._keys.block_id(self.namespace.digest, key)

    def asking(self, retention_class: str | None, labels: Mapping[str, str] | None = None) -> Scope:
        """The same place, for a request that asks for a retention class and bears labels (the
        scope's own win over them; such as `Vault.scope` takes). No I/O."""
        both = {**(labels or {}), **self.labels}
        return Scope(self.tenant, self._keys, self.namespace, both, retention_class)

    @property
    def keys(self) -> TenantKeys:
        """The tenant's keys; for the core."""
        return self._keys

    def verdict(self, governor: Governor) -> Verdict:
        """What the policy in force says of its blocks. Errors as `destination`."""
        return self._govern(governor).verdict

    def destination(self, governor: Governor) -> Destination:
        """Where its blocks go under the policy in force. Asks the policy again when it changed.

        Raises:
            CatalogError, StorageError: the policy cannot be read.
        """
        return Destination(self._keys, self.namespace, self._govern(governor))

    def _govern(self, governor: Governor) -> Governed:
        governed = self._governed
        if governed is None or governed.policy_no < governor.newest:
            governed = governor.govern(
                self.tenant, self.namespace, self.labels, self.retention_class
            )
            self._governed = governed
        return governed


class Vault:
    """An open vault. Use `create` or `open`; close it, or use it as a context manager.

    After `close`, and in a process forked from the one that opened it, whatever needs the catalog,
    the segments or the keys raises ClosedError. `contains` and `touch` never raise; what is known
    without them (`counters`, `path`, `time`, `provider_info`) can still be asked.
    """

    def __init__(
        self,
        path: Path,
        descriptor: layout.Descriptor,
        provider: KeyProvider,
        options: VaultOptions,
        clock: Clock,
        *,
        policy: Policy | None = None,
        read_only: bool,
    ) -> None:
        """Not for callers: see `create` and `open`."""
        self.path = path
        self.read_only = read_only
        self.options = options
        self.recovery = RecoveryReport()
        self._vault_id = descriptor.vault_id
        self._provider = provider
        self._clock = clock
        self._counters = Counters()
        self._stop = threading.Event()
        self._closed = False
        self._pid = os.getpid()
        with ExitStack() as undo:
            self._directory = SegmentDir(layout.segments_path(path), repair=not read_only)
            undo.callback(self._directory.close)
            self._fence = Fence(
                layout.locks_path(path),
                repair=not read_only,
                patience_s=options.lock_timeout_s,
            )
            undo.callback(self._fence.close)
            if not read_only and options.direct is not False:
                self._directory.probe_direct()
            with self._exclusively():
                self._catalog, self._ring = self._open_catalog(descriptor)
                undo.callback(self._catalog.close)
                undo.callback(self._ring.close)
                self._governor = Governor(self._catalog, self._ring)
                inherited = False
                if not read_only:
                    self._ring.ensure_signer(self._catalog, self._note_signing_key)
                    self._prune_tombstones()
                    inherited = self._ensure_policy(policy)
                # Tells others that the catalog is in use: nobody may replace it or forget its dead.
                in_use = self._fence.hold(_IN_USE)
                undo.callback(self._fence.let_go, in_use)
                self._time = VaultTime(
                    clock,
                    self._catalog.read(retention.get_mark),
                    self.policy().vault.clock_jump_s,
                )
                self._view = View(self._vault_id, self._catalog, self._directory, self._ring)
                self._view.when_policy_changes(self._governor.noticed)
                self._reader = Reader(
                    self._view, self._fence, self._counters, self._time, options.batch_bytes
                )
                self._issuer = Issuer(
                    self._vault_id,
                    lambda: self._ring.signer,
                    provider.describe(),
                    socket.gethostname(),
                )
                self._holder = Holder(self._catalog, self._ring)
                self._eraser = Eraser(
                    self._catalog,
                    self._directory,
                    self._view,
                    self._fence,
                    self._ring,
                    self._time,
                    options,
                    self._issuer,
                )
                self._applier = Applier(
                    self._catalog, self._ring, self._eraser, self._time, self._governor
                )
                if not read_only:
                    self.recovery = Recovery(
                        self._catalog,
                        self._directory,
                        layout.boot_id(),
                        self._checker().count_intact,
                    ).run()
                    self._mark_time()
                    if inherited:
                        # Of an older kvvault: what is there gets the deadlines of the first policy.
                        self._applier.apply(self.policy(), actor="kvvault")
                    self._expire_at_opening()
            space = Space(path, self._catalog, self._governor)
            self._writer = Writer(
                self._vault_id,
                self._catalog,
                self._directory,
                self._view,
                self._counters,
                options,
                self._time,
                space,
            )
            self._recorder = Recorder(
                self._catalog,
                self._view,
                self._time,
                self._counters,
                clock.monotonic,
                options.lock_timeout_s,
            )
            self._rewriter = Rewriter(
                self._catalog,
                self._view,
                self._ring,
                self._reader,
                self._writer,
                self._time,
                self._fence,
                options.lock_timeout_s,
            )
            self._block_eraser = BlockEraser(
                self._catalog, self._eraser, self._rewriter, self._time
            )
            self._evictor = Evictor(
                self._catalog,
                self._view,
                self._rewriter,
                self._eraser,
                space,
                self._governor,
                self._time,
                self._counters,
            )
            space.make_room = self._evictor.make_room
            undo.callback(self._writer.close)
            self._view.when_segment_dies(self._writer.segment_died)
            self._view.when_segment_is_sealed(self._writer.segment_sealed)
            self._view.refresh()
            undo.pop_all()
        self._in_use = in_use
        self._marked_at = self._time.steady()
        self._watcher = threading.Thread(target=self._watch, name="kvvault-watch", daemon=True)
        self._watcher.start()

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
    ) -> Vault:
        """Make a vault in a new or empty directory and open it.

        `provider` is a key provider's URI; the default is a new key file below the user's data
        directory, outside the vault. `policy` is what governs it from the start; the default is
        the shipped one.

        Raises:
            VaultExistsError: there is something at `path` already.
            UnsafeFileError, StorageError: the directory cannot be made safely.
            VaultKeyError, UsageError: the provider does not work or is unknown.
        """
        path = Path(path)
        layout.refuse_occupied(path)
        vault_id = layout.new_vault_id()
        if provider is None:
            provider = layout.default_provider_uri(vault_id)
        keeper = open_provider(provider, create=True) if isinstance(provider, str) else provider
        descriptor = layout.Descriptor(vault_id, keeper.describe().uri)
        layout.build(path, descriptor)
        return cls._start(path, descriptor, keeper, options, clock, policy=policy, read_only=False)

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
        path = Path(path)
        descriptor = layout.read_descriptor(path, read_only=read_only)
        chosen = descriptor.provider if provider is None else provider
        keeper = open_provider(chosen) if isinstance(chosen, str) else chosen
        location = keeper.describe().location
        if provider is None and location is not None and layout.is_within(location, path):
            raise UnsafeFileError(
                "the vault names a key file inside itself, which kvvault never does",
                hint="somebody may have exchanged it: name the right one with --key-provider",
            )
        return cls._start(path, descriptor, keeper, options, clock, read_only=read_only)

    @classmethod
    def _start(
        cls,
        path: Path,
        descriptor: layout.Descriptor,
        provider: KeyProvider,
        options: VaultOptions | None,
        clock: Clock | None,
        *,
        policy: Policy | None = None,
        read_only: bool,
    ) -> Vault:
        layout.self_test()
        vault = cls(
            path,
            descriptor,
            provider,
            options or VaultOptions(),
            clock or SystemClock(),
            policy=policy,
            read_only=read_only,
        )
        warning = vault.key_warning()
        if warning:
            log.warning("%s", warning)  # at every start (REQ-K7)
        return vault

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One process at a time creates, upgrades and repairs."""
        if self.read_only:
            yield
        else:
            with self._fence.exclusive("recovery", self.options.lock_timeout_s):
                self._fence.prepare()
                yield

    def _open_catalog(self, descriptor: layout.Descriptor) -> tuple[Catalog, KeyRing]:
        """The catalog and the keys that fit it. A new pair when the catalog is missing, or when the
        only keys to it were in the memory of a process that is gone: nothing of what the segments
        hold can be read then, and recovery destroys it, saying so."""
        path = layout.catalog_path(self.path)
        if layout.catalog_exists(path):
            catalog = Catalog.open(path, read_only=self.read_only)
            try:
                ring = with_current(
                    lambda: catalog.read(purging.root),
                    lambda root: self._open_ring(descriptor, root),
                )
                if ring is not None:
                    return catalog, ring
                if catalog.read(purging.root) is not None:
                    log.warning("the keys of this vault were in memory only and are gone")
                elif not layout.is_new(self.path):
                    log.warning("the catalog is not complete; the vault starts empty")
            except BaseException:
                catalog.close()
                raise
            catalog.close()
        elif not layout.is_new(self.path):
            log.warning("the vault has no catalog; it starts empty, and what it held is destroyed")
        if self.read_only:
            raise VaultNotFoundError(
                "the vault has nothing that can be read", hint="open it for writing once"
            )
        return self._start_empty(path)

    def _open_ring(
        self, descriptor: layout.Descriptor, root: purging.Root | None
    ) -> KeyRing | None:
        if root is None or layout.keys_vanished(descriptor, self._provider, root.epoch):
            return None
        return KeyRing.open(self._provider, self._vault_id, root, self._clock)

    def _start_empty(self, path: Path) -> tuple[Catalog, KeyRing]:
        """
        Raises:
            VaultLockedError: another process has the vault open, with the catalog that was here. It
                would go on serving what nobody could delete any more.
        """
        with self._fence.exclusive(_IN_USE, timeout=0.0):
            layout.remove_catalog(path)
        ring, lookup = KeyRing.create(self._provider, self._vault_id, self._clock)
        catalog = Catalog.open(path, create=True)

        def write(connection: Connection) -> None:
            operations.put_meta(connection, "vault_id", self._vault_id)
            operations.put_meta(connection, "root_epoch", lookup.epoch.encode())
            operations.put_meta(connection, "lookup_key", lookup.key)
            audit_log.append(
                connection, "vault-created", self._clock.now(), {"root_key": lookup.epoch}
            )

        try:
            catalog.write(write)
        except BaseException:
            catalog.close()
            raise
        return catalog, ring

    def _note_signing_key(self, connection: Connection, public_key: bytes) -> None:
        facts = {"public_key": VerifierKey(origin_of(self._vault_id), public_key).text}
        audit_log.append(connection, "signing-key-made", self._clock.now(), facts)

    def _ensure_policy(self, policy: Policy | None) -> bool:
        """A vault is never without one: a new one starts with `policy` or the shipped default, one
        of an older kvvault gets the default. Whether it has segments that know of none."""
        if self._catalog.read(retention.current_policy) is not None:
            return False
        first = policy or shipped.load("default")
        now = self._clock.now()
        self._catalog.write(
            lambda c: self._governor.put_in_force(c, first, now=now, actor="kvvault")
        )
        return any(row.facts.state.live for row in self._catalog.read(operations.list_segments))

    def _prune_tombstones(self) -> None:
        try:
            with self._fence.exclusive(_IN_USE, timeout=0.0):
                self._catalog.write(
                    lambda c: operations.prune_tombstones(c, keep=_MAX_TOMBSTONES), durable=False
                )
        except VaultLockedError:
            pass  # somebody has the vault open; the next one to open it alone does it

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
        _check_name(tenant, "tenant name")
        _check_labels(labels or {})
        if namespace.block_bytes > MAX_BLOCK_BYTES:
            raise UsageError(
                "blocks of that size are not supported", hint=f"at most {MAX_BLOCK_BYTES} bytes"
            )
        name_id = self._ring.name_id(tenant)
        if not self.read_only:
            self._catalog.write(lambda c: operations.add_namespace(c, namespace, self._clock.now()))

        def find() -> TenantRow:
            row = self._catalog.read(lambda c: operations.find_tenant(c, name_id))
            if row is None and not self.read_only:
                row = self._add_tenant(tenant)
            if row is None:
                raise UsageError("the vault has no such tenant", hint="see `kvvault ls tenants`")
            return row

        keys = with_current(find, lambda row: self._ring.named(row, tenant))
        return Scope(tenant, keys, namespace, labels or {}, retention_class)

    def _add_tenant(self, name: str) -> TenantRow:
        def add(root: purging.Root | None) -> TenantRow:
            if root is None:
                raise CatalogCorruptError(
                    "the catalog is not complete", hint="close the vault and open it again"
                )
            made, opened = self._ring.create_tenant(name, root.epoch)

            def write(connection: Connection) -> TenantRow:
                kept = purging.add_tenant(connection, made)
                if kept is made:
                    facts = {"tenant": opened.keyed_id("log", b"tenant").hex()}
                    audit_log.append(connection, "tenant-key-made", made.created_at, facts)
                return kept

            try:
                kept = self._catalog.write(write)
            except BaseException:
                opened.close()
                raise
            if kept is made:
                self._ring.adopt(opened)
            else:
                opened.close()  # another process was faster: its keys count
            return kept

        return with_current(lambda: self._catalog.read(purging.root), add)

    def contains(self, scope: Scope, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are here, as this process knew when it last looked (at most
        `VaultOptions.poll_interval_s` ago). Memory only: never blocks, never raises."""
        now = self._time.now()
        try:
            return [self._view.find(scope.block_id(key), now) is not None for key in keys]
        except ClosedError:
            return [False] * len(keys)

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
        views = _flat(scope, keys, buffers, writable=False)
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
            _check_name(subject, "subject")
        if labels:
            _check_labels(labels)
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

    @property
    def prompts(self) -> Prompts:
        """The inventory: which prompts persist."""
        self._check_open()
        return Prompts(
            self._catalog,
            self._ring,
            self._view,
            self._time,
            self._recorder,
            self._rewriter.alone,
        )

    def note_question(
        self,
        command: str,
        *,
        tenant_id: bytes | None = None,
        rows: int,
        about: Mapping[str, Fact] | None = None,
    ) -> None:
        """Write down that somebody asked which prompts persist: an entry of the audit log, also of
        a vault that is open for reading. `rows`: how much the answer tells; `about`: what else of
        the question may be told (keyed ids).

        Raises:
            StorageError, CatalogError: it cannot be written, so the answer must not be given.
        """
        self._check_open()
        facts: dict[str, Fact] = {
            **(about or {}),
            "command": command,
            "rows": rows,
            "tenant": self._log_id(tenant_id),
        }
        note = partial(audit_log.append, kind="question", at=self._time.steady(), facts=facts)
        if not self.read_only:
            self._catalog.write(note)
            return
        catalog = Catalog.open(layout.catalog_path(self.path))
        try:
            catalog.write(note)
        finally:
            catalog.close()

    def _log_id(self, tenant_id: bytes | None) -> str | None:
        if tenant_id is None:
            return None
        row = self._catalog.read(partial(operations.get_tenant, tenant_id=tenant_id))
        return None if row is None else self._ring.tenant(row).keyed_id("log", b"tenant").hex()

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
        views = _flat(scope, keys, buffers, writable=True)
        try:
            ids = [scope.block_id(key) for key in keys]
        except ClosedError:
            ids = []  # the tenant was forgotten
        return self._reader.get(ids or [NOWHERE] * len(keys), views, guard or ALWAYS)

    # -- deletion ---------------------------------------------------------------------------------

    def plan_expired(self) -> DeletionPlan:
        """What is past its deadline. What this process has just used is reported first."""
        self._check_open()
        if not self.read_only:
            with suppress(KvvaultError):  # a full disk must not keep anything alive
                self._report_use()
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
        if not tenant.isprintable():
            return None  # none can have such a name
        name_id = self._ring.name_id(tenant)
        row = self._catalog.read(lambda c: operations.find_tenant(c, name_id))
        if row is None:
            return None
        try:
            name = self._ring.name(row)
        except KvvaultError:
            name = tenant  # keys that cannot be had are no reason not to destroy them
        if name != tenant:
            raise another_tenants_row()
        return self._eraser.plan_tenant(row.tenant_id)

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

    def has_expired(self) -> bool:
        """Whether something is past its deadline and not held. Memory only, unless something is.

        Raises:
            StorageError, CatalogError.
        """
        self._check_open()
        now = self._time.steady()
        if self._view.earliest_deadline() > now:
            return False
        first = self._catalog.read(retention.next_deadline)
        return first is not None and first <= now

    def reconcile(self) -> RecoveryReport:
        """Repair what processes that died since left behind, as opening the vault does, and finish
        deletions of single blocks.

        Raises:
            VaultLockedError: another process is at it.
            StorageError, CatalogError.
        """
        self._check_writable()
        with self._exclusively():
            report = Recovery(
                self._catalog, self._directory, layout.boot_id(), self._checker().count_intact
            ).run()
        self._view.refresh()
        self._block_eraser.compact()
        return report

    @property
    def catalog(self) -> Catalog:
        """For the jobs' lease and history, and for `kvvault.health`; nobody else."""
        self._check_open()
        return self._catalog

    def _expire_at_opening(self) -> None:
        plan = self._eraser.plan_expired()
        if plan.segments:
            log.info(
                "%d segments (%d blocks) are past their deadline and go now",
                len(plan.segments),
                plan.blocks,
            )
            try:
                self._eraser.execute(plan, actor="kvvault", reason="deadline, at opening")
            except KvvaultError as exc:
                # Not served in any case; no reason to keep shut what lives. Tried again by the job
                # and by the next to open it.
                log.error("what is past its deadline is not all gone yet: %s", exc)

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
            match (tenant, subject, prompt_id, segment_id):
                case (str(), None, None, None):
                    return self._holder.place_on_tenant(tenant, reason=reason, actor=actor, now=now)
                case (str(), str(), None, None):
                    return self._holder.place_on_subject(
                        tenant, subject, reason=reason, actor=actor, now=now
                    )
                case (None, None, bytes(), None):
                    return self._holder.place_on_prompt(
                        prompt_id, reason=reason, actor=actor, now=now
                    )
                case (None, None, None, bytes()):
                    return self._holder.place_on_segment(
                        segment_id, reason=reason, actor=actor, now=now
                    )
        raise ValueError("a hold is on a tenant, a subject, a prompt or a segment")

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

    def holds(self, *, cleared: bool = False) -> list[Hold]:
        """Holds in force, oldest first; with `cleared`, those that were as well."""
        self._check_open()
        return self._holder.list_holds(cleared=cleared)

    # -- purges -----------------------------------------------------------------------------------

    def purge(self) -> PurgeReport:
        """Make everything that was deleted unrecoverable. See `kvvault.purging.Purger.run`."""
        self._check_writable()
        self._block_eraser.compact()  # what is still under a live segment's key is not purged
        return Purger(
            layout.catalog_path(self.path),
            self._vault_id,
            self._catalog,
            self._fence,
            self._ring,
            self._provider,
            self._eraser,
            self._time,
            self._clock,
            self.options,
            self._issuer,
        ).run()

    def purge_is_due(self) -> bool:
        """Whether a deletion has waited for a purge for nearly as long as the policy allows.

        Raises:
            StorageError, CatalogError.
        """
        self._check_open()
        _, since = self._catalog.read(purging.waiting)
        limit = _PURGE_AT * self.policy().vault.purge_interval_s
        return since is not None and self._time.steady() - since >= limit

    def keys(self) -> KeysReport:
        """The vault's keys: what each opens, how old it is, and whether a purge is overdue.

        Raises:
            StorageError, CatalogError: the catalog cannot be read.
        """
        self._check_open()
        interval = self.policy().vault.purge_interval_s
        return keylooking.report(self._catalog, self._ring, self._time.now(), interval)

    def check_keys(self) -> KeyCheck:
        """Open every key that should open. Repairs nothing, reads no blocks.

        Raises:
            StorageError, CatalogError: the catalog cannot be read.
        """
        self._check_open()
        return keylooking.check(self._catalog, self._provider, self._vault_id)

    # -- policy and time --------------------------------------------------------------------------

    def diff_policy(self, policy: Policy) -> PolicyDiff:
        """What applying `policy` now would delete, keep, shorten or lengthen.

        Raises: as `kvvault.applying.Applier.diff`.
        """
        self._check_open()
        return self._applier.diff(policy)

    def apply_policy(self, policy: Policy, *, actor: str) -> tuple[PolicyDiff, DeletionReport]:
        """Put `policy` in force here and in every process that has the vault open.

        Raises: as `kvvault.applying.Applier.apply`; VaultLockedError: somebody else is at it.
        """
        self._check_writable()
        with self._fence.exclusive("policy", self.options.lock_timeout_s):
            result = self._applier.apply(policy, actor=actor)
        self._view.refresh()
        return result

    def policy(self) -> Policy:
        """The policy in force.

        Raises:
            CatalogError, StorageError: it cannot be read.
        """
        self._check_open()
        return self._governor.current()[1]

    def applied_policy(self) -> AppliedPolicy:
        """The policy in force, its number, and who applied it when.

        Raises: as `policy`.
        """
        self._check_open()
        return self._governor.applied()

    def policies(self) -> list[PastPolicy]:
        """Every policy that was ever in force, oldest first.

        Raises:
            StorageError, CatalogError.
        """
        self._check_open()
        return self._governor.history()

    @property
    def time(self) -> VaultTime:
        """The vault's own time."""
        return self._time

    def accept_clock(self) -> float:
        """Say that the machine's clock is right although it is far ahead; by how many seconds.

        Raises:
            StorageError, CatalogError.
        """
        self._check_writable()
        ahead, wall = self._time.ahead_s, self._clock.now()

        def write(connection: Connection) -> None:
            retention.raise_mark(connection, wall)
            audit_log.append(connection, "clock-accepted", wall, {"ahead_s": round(ahead, 3)})

        self._catalog.write(write)
        self._time.adopt(wall)
        return ahead

    @property
    def audit(self) -> AuditLog:
        """The audit log, its checkpoints and receipts."""
        self._check_open()
        return AuditLog(self._catalog, self._vault_id, lambda: self._ring.signer, self._time.steady)

    def _mark_time(self) -> None:
        now = self._time.steady()
        self._catalog.submit(lambda c: retention.raise_mark(c, now))

    # -- looking ----------------------------------------------------------------------------------

    def segments(self) -> list[SegmentFacts]:
        """Every segment the catalog knows, tombstones included, oldest first."""
        self._check_open()
        return [row.facts for row in self._catalog.read(operations.list_segments)]

    def namespaces(self) -> list[NamespaceFacts]:
        """Every namespace, oldest first."""
        self._check_open()
        return self._catalog.read(operations.list_namespaces)

    def tenants(self) -> list[TenantFacts]:
        """Every tenant, oldest first; names only where their keys can be had."""
        self._check_open()
        return inventory.tenants(self._catalog, self._ring)

    def stats(self) -> VaultStats:
        """Counters of this process and totals of the vault."""
        self._check_open()
        return inventory.stats(self._catalog, self._counters, self._view.index_bytes)

    def counters(self) -> dict[str, int]:
        """This process's counters alone: memory only, may be read on any thread."""
        return self._counters.snapshot()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read and authenticate every live block. Repairs nothing; notes in the audit log what was
        altered or is missing, unless the vault is open for reading only.

        Raises:
            StorageError, CatalogError: the catalog cannot be read.
        """
        self._check_open()
        return self._checked(self._checker().check_all(progress))

    def verify_segments(
        self, segment_ids: Container[bytes], progress: Progress | None = None
    ) -> VerifyReport:
        """The same, of these segments.

        Raises: as `verify`.
        """
        self._check_open()
        return self._checked(self._checker().check_all(progress, only=segment_ids))

    def tenant_keys(self, tenant: str) -> TenantKeys | None:
        """A tenant's keys, to make keyed ids with; None when there is no tenant of that name. They
        are this vault's: not for closing.

        Raises:
            VaultKeyError: they cannot be had; WrongKeyError: also when the catalog was altered.
            StorageError, CatalogError.
        """
        self._check_open()

        def find() -> TenantRow | None:
            return find_tenant(self._catalog, self._ring, tenant)

        return with_current(
            find, lambda row: None if row is None else self._ring.named(row, tenant)
        )

    def root_epochs(self) -> list[str]:
        """Root keys that the key provider has, oldest first: of this vault and, where it keeps
        those of several, of others.

        Raises:
            VaultKeyError: it does not say.
        """
        self._check_open()
        return self._provider.epochs()

    def provider_info(self) -> ProviderInfo:
        """Where the root keys are and what destroying one is worth."""
        return self._provider.describe()

    def key_warning(self) -> str | None:
        """What is wrong with where the keys are, in one sentence; None when nothing is (REQ-K7)."""
        location = self._provider.describe().location
        if location is None or not layout.same_file_system(location, self.path):
            return None
        return (
            f"the key file {location} is on the same file system as the vault: whoever copies the "
            "disk has both (move the key, or use another key provider)"
        )

    @property
    def direct_io(self) -> bool:
        """Whether segment files bypass the page cache."""
        return self._directory.direct

    # -- housekeeping -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look now for what other processes committed."""
        self._check_open()
        self._view.refresh()

    def _watch(self) -> None:
        """Follow other processes while nothing else does. A catalog that cannot be read now is read
        the next time; loads notice by themselves."""
        often = (
            self._view.refresh,
            self._view.drop_forgotten_tenants,
            self._writer.close_windows,
        )
        rarely = (self._report, lambda: self._ring.follow(self._catalog))
        next_report = self._clock.monotonic() + _REPORT_S
        while not self._stop.wait(self.options.poll_interval_s):
            steps: tuple[Callable[[], object], ...] = often
            if self._clock.monotonic() >= next_report:
                next_report = self._clock.monotonic() + _REPORT_S
                steps = often + rarely
            for step in steps:
                try:
                    step()
                except Exception as exc:  # noqa: BLE001 - neither the thread nor the other steps
                    log.debug("a look at the catalog failed: %s", type(exc).__name__)

    def _report(self) -> None:
        """Tell the catalog what was used and how late it is, follow what it says of the clock."""
        if self.read_only:
            return
        self._report_damage()
        self._report_use(wait=False)
        self._recorder.touch()
        self._time.set_jump(self.policy().vault.clock_jump_s)
        if self._time.suspect:
            mark = self._catalog.read(retention.get_mark)
            if mark is not None:
                self._time.adopt(mark)
        if self._marked_at + _MARK_S <= self._time.steady():
            self._marked_at = self._time.steady()
            self._mark_time()

    def _report_use(self, *, wait: bool = True) -> None:
        uses = self._view.take_uses()
        if uses:
            noted = self._catalog.submit(lambda c: retention.note_use(c, uses))
            if wait:
                noted.result()

    def _report_damage(self) -> None:
        """Have the audit log say what loads found altered or missing since it last said so: one
        entry, however much that is."""
        found = self._counters.take_damage()
        if not found:
            return
        now = self._time.steady()
        facts: dict[str, Fact] = {
            "by": "load",
            "segments": sorted(one.hex() for one in found if one != OTHERS),
            "more_segments": OTHERS in found,
            "altered": sum(one.altered for one in found.values()),
            "missing": sum(one.missing for one in found.values()),
        }
        self._catalog.submit(lambda c: audit_log.append(c, "damage-found", now, facts))

    def _checked(self, report: VerifyReport) -> VerifyReport:
        """The same of what a check found. Somebody who may only look writes nothing."""
        if (report.tampered or report.lost) and not self.read_only:
            damaged = sorted(report.damaged_segments)
            facts: dict[str, Fact] = {
                "by": "check",
                "segments": [one.hex() for one in damaged[:_MAX_DAMAGED]],
                "more_segments": len(damaged) > _MAX_DAMAGED,
                "altered": report.tampered,
                "missing": report.lost,
            }
            now = self._time.steady()
            self._catalog.write(lambda c: audit_log.append(c, "damage-found", now, facts))
        return report

    def _leave_word(self) -> None:
        """Report for the last time. Else a clock that is set back before the next opening gains
        what has passed since the time was noted, and what was just used counts as unused."""
        if self.read_only:
            return
        with suppress(KvvaultError):
            self._report_damage()
            self._report_use(wait=False)
            self._mark_time()

    def _checker(self) -> Checker:
        return Checker(
            self._vault_id, self._catalog, self._directory, self._ring, self.options.batch_bytes
        )

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise ClosedError("the vault is open for reading only", hint="open it for writing")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the vault is closed", hint="open it again")
        if os.getpid() != self._pid:
            # The threads stayed in the parent, and SQLite's connections must not cross a fork.
            raise ClosedError(
                "this process was forked from the one that opened the vault",
                hint="open the vault in the process that uses it",
            )

    def close(self) -> None:
        """Seal what is open, commit, overwrite keys in memory. Idempotent. In a forked child it
        does nothing: everything belongs to the parent."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._watcher.join(self.options.lock_timeout_s)
        with ExitStack() as last_first:  # everything is closed, whatever fails
            last_first.callback(self._fence.let_go, self._in_use)
            last_first.callback(self._directory.close)
            last_first.callback(self._fence.close)
            last_first.callback(self._catalog.close)
            last_first.callback(self._ring.close)
            last_first.callback(self._view.close)
            last_first.callback(self._recorder.close)
            last_first.callback(self._writer.close)
            last_first.callback(self._leave_word)

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_name(name: str, what: str) -> None:
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise UsageError(
            f"that is not a usable {what}", hint=f"use 1 to {_MAX_NAME} printable characters"
        )


def _check_labels(labels: Mapping[str, str]) -> None:
    texts = [text for pair in labels.items() for text in pair]
    long = sum(map(len, texts)) > _MAX_LABELS or len(json.dumps(dict(labels))) > MAX_TEXT_BYTES
    if long or not all(text.isprintable() for text in texts):
        raise UsageError(
            "those are not usable labels",
            hint=f"use printable text, {_MAX_LABELS} characters in all",
        )


def _flat(
    scope: Scope, keys: Sequence[bytes], buffers: Sequence[Buffer], *, writable: bool
) -> list[memoryview]:
    """Byte views of the caller's buffers, zero-copy, checked."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ValueError("a block's buffer must be C-contiguous")
        if view.nbytes != scope.namespace.block_bytes:
            raise ValueError(
                f"a block has {scope.namespace.block_bytes} bytes, a buffer has {view.nbytes}"
            )
        if writable and view.readonly:
            raise ValueError("a block cannot be loaded into a read-only buffer")
        views.append(view.cast("B"))
    return views
