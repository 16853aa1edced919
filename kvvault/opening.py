"""How a vault is made and opened: its parts, one after the other, and what a crash left repaired.

What needs the vault alone (making the catalog, upgrading it, repairing) is done under one lock, so
that of several processes that open a vault at once one does it. Whatever fails, what was opened
before it is closed again.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from kvvault import layout
from kvvault.applying import Applier
from kvvault.audit.checkpoint import VerifierKey, origin_of
from kvvault.audit.receipts import Issuer
from kvvault.catalog import log as audit_log
from kvvault.catalog import operations, purging, retention
from kvvault.catalog.catalog import Catalog
from kvvault.checking import Checker
from kvvault.counters import Counters
from kvvault.crypto.providers import open_provider
from kvvault.crypto.providers.base import KeyProvider
from kvvault.deleting import Eraser
from kvvault.erasing import BlockEraser
from kvvault.errors import KvvaultError, UnsafeFileError, VaultLockedError, VaultNotFoundError
from kvvault.evicting import Evictor
from kvvault.governing import Governor
from kvvault.holding import Holder
from kvvault.keyring import KeyRing, with_current
from kvvault.layout import Descriptor
from kvvault.model import Clock, RecoveryReport, SystemClock
from kvvault.options import VaultOptions
from kvvault.policy import shipped
from kvvault.policy.document import Policy
from kvvault.prompting import Recorder
from kvvault.purging import Purger
from kvvault.reading import Reader
from kvvault.recovery import Recovery
from kvvault.rewriting import Rewriter
from kvvault.segments.fence import Fence
from kvvault.segments.io import SegmentDir
from kvvault.space import Space
from kvvault.timekeeping import VaultTime
from kvvault.view import View
from kvvault.watching import Watcher, mark_time
from kvvault.writing import Writer

log = logging.getLogger(__name__)

_IN_USE = "in-use"
"""Lock that every open vault holds, shared."""

_MAX_TOMBSTONES = 10_000


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Parts:
    """What an open vault is made of. All threads of it run."""

    path: Path
    read_only: bool
    options: VaultOptions
    vault_id: bytes
    provider: KeyProvider
    clock: Clock
    recovery: RecoveryReport
    """What opening it repaired."""
    counters: Counters
    directory: SegmentDir
    fence: Fence
    in_use: int
    """The lock that says so to others."""
    catalog: Catalog
    ring: KeyRing
    governor: Governor
    time: VaultTime
    view: View
    reader: Reader
    writer: Writer
    recorder: Recorder
    rewriter: Rewriter
    holder: Holder
    issuer: Issuer
    eraser: Eraser
    block_eraser: BlockEraser
    evictor: Evictor
    applier: Applier
    purger: Purger
    watcher: Watcher

    def checker(self) -> Checker:
        """One check's own: it is not thread-safe."""
        return Checker(
            self.vault_id, self.catalog, self.directory, self.ring, self.options.batch_bytes
        )

    def repair(self) -> RecoveryReport:
        """Repair what processes that died since left behind.

        Raises:
            VaultLockedError: another process is at it.
            StorageError, CatalogError.
        """
        with _alone(self.fence, self.options.lock_timeout_s):
            return _recovery(self.catalog, self.directory, self.checker()).run()

    def close(self) -> None:
        """Seal what is open, commit, overwrite keys in memory. Once."""
        self.watcher.stop(self.options.lock_timeout_s)
        with ExitStack() as last_first:  # everything is closed, whatever fails
            last_first.callback(self.fence.let_go, self.in_use)
            last_first.callback(self.directory.close)
            last_first.callback(self.fence.close)
            last_first.callback(self.catalog.close)
            last_first.callback(self.ring.close)
            last_first.callback(self.view.close)
            last_first.callback(self.recorder.close)
            last_first.callback(self.writer.close)
            last_first.callback(self.watcher.report_last)


def create(
    path: Path,
    provider: str | KeyProvider | None,
    policy: Policy | None,
    options: VaultOptions | None,
    clock: Clock | None,
    actor: str,
) -> Parts:
    """See `kvvault.vault.Vault.create`."""
    layout.refuse_occupied(path)
    vault_id = layout.new_vault_id()
    if provider is None:
        provider = layout.default_provider_uri(vault_id)
    keeper = open_provider(provider, create=True) if isinstance(provider, str) else provider
    descriptor = Descriptor(vault_id, keeper.describe().uri)
    layout.build(path, descriptor)
    return _Opening.of(path, descriptor, keeper, options, clock, read_only=False).run(policy, actor)


def open_existing(
    path: Path,
    provider: str | KeyProvider | None,
    options: VaultOptions | None,
    clock: Clock | None,
    *,
    read_only: bool,
) -> Parts:
    """See `kvvault.vault.Vault.open`."""
    descriptor = layout.read_descriptor(path, read_only=read_only)
    chosen = descriptor.provider if provider is None else provider
    keeper = open_provider(chosen) if isinstance(chosen, str) else chosen
    location = keeper.describe().location
    if provider is None and location is not None and layout.is_within(location, path):
        raise UnsafeFileError(
            "the vault names a key file inside itself, which kvvault never does",
            hint="somebody may have exchanged it: name the right one with --key-provider",
        )
    return _Opening.of(path, descriptor, keeper, options, clock, read_only=read_only).run(None)


@contextmanager
def _alone(fence: Fence, timeout_s: float) -> Iterator[None]:
    """One process at a time creates, upgrades and repairs."""
    with fence.exclusive("recovery", timeout_s):
        fence.prepare()
        yield


def _recovery(catalog: Catalog, directory: SegmentDir, checker: Checker) -> Recovery:
    return Recovery(catalog, directory, layout.boot_id(), checker.count_intact)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Opening:
    """One vault being opened."""

    path: Path
    descriptor: Descriptor
    provider: KeyProvider
    options: VaultOptions
    clock: Clock
    read_only: bool

    @classmethod
    def of(
        cls,
        path: Path,
        descriptor: Descriptor,
        provider: KeyProvider,
        options: VaultOptions | None,
        clock: Clock | None,
        *,
        read_only: bool,
    ) -> _Opening:
        return cls(
            path,
            descriptor,
            provider,
            options or VaultOptions(),
            clock or SystemClock(),
            read_only,
        )

    def run(self, policy: Policy | None, actor: str = "kvvault") -> Parts:
        """Open it. A vault without a policy gets this one, or the shipped one, put in force by
        `actor`."""
        layout.self_test()
        vault_id, options, read_only = self.descriptor.vault_id, self.options, self.read_only
        counters = Counters()
        recovery = RecoveryReport()
        with ExitStack() as undo:
            directory = SegmentDir(layout.segments_path(self.path), repair=not read_only)
            undo.callback(directory.close)
            fence = Fence(
                layout.locks_path(self.path),
                repair=not read_only,
                patience_s=options.lock_timeout_s,
            )
            undo.callback(fence.close)
            if not read_only and options.direct is not False:
                directory.probe_direct()
            with ExitStack() as alone:
                if not read_only:
                    alone.enter_context(_alone(fence, options.lock_timeout_s))
                catalog, ring = self._open_catalog(fence)
                undo.callback(catalog.close)
                undo.callback(ring.close)
                governor = Governor(catalog, ring)
                inherited = False
                if not read_only:
                    ring.ensure_signer(catalog, self._note_signing_key)
                    _prune_tombstones(catalog, fence)
                    inherited = self._ensure_policy(catalog, governor, policy, actor)
                # Tells others that the catalog is in use: nobody may replace it or forget its dead.
                in_use = fence.hold(_IN_USE)
                undo.callback(fence.let_go, in_use)
                time = VaultTime(
                    self.clock,
                    catalog.read(retention.get_mark),
                    governor.current()[1].vault.clock_jump_s,
                )
                view = View(vault_id, catalog, directory, ring)
                view.when_policy_changes(governor.noticed)
                issuer = Issuer(
                    vault_id,
                    lambda: ring.signer,
                    self.provider.describe(),
                    socket.gethostname(),
                )
                eraser = Eraser(catalog, directory, view, fence, ring, time, options, issuer)
                applier = Applier(catalog, ring, eraser, time, governor)
                if not read_only:
                    checker = Checker(vault_id, catalog, directory, ring, options.batch_bytes)
                    recovery = _recovery(catalog, directory, checker).run()
                    mark_time(catalog, time)
                    if inherited:
                        # Of an older kvvault: what is there gets the deadlines of the first policy.
                        applier.apply(governor.current()[1], actor="kvvault")
                    _expire(eraser)
            reader = Reader(view, fence, counters, time, options.batch_bytes)
            space = Space(self.path, catalog, governor)
            writer = Writer(vault_id, catalog, directory, view, counters, options, time, space)
            recorder = Recorder(
                catalog, view, time, counters, self.clock.monotonic, options.lock_timeout_s
            )
            rewriter = Rewriter(
                catalog, view, ring, reader, writer, time, fence, options.lock_timeout_s
            )
            evictor = Evictor(catalog, view, rewriter, eraser, space, governor, time, counters)
            space.make_room = evictor.make_room
            undo.callback(writer.close)
            view.when_segment_dies(writer.segment_died)
            view.when_segment_is_sealed(writer.segment_sealed)
            view.refresh()
            watcher = Watcher(
                catalog,
                ring,
                view,
                writer,
                recorder,
                governor,
                counters,
                time,
                self.clock,
                options.poll_interval_s,
                read_only=read_only,
            )
            parts = Parts(
                path=self.path,
                read_only=read_only,
                options=options,
                vault_id=vault_id,
                provider=self.provider,
                clock=self.clock,
                recovery=recovery,
                counters=counters,
                directory=directory,
                fence=fence,
                in_use=in_use,
                catalog=catalog,
                ring=ring,
                governor=governor,
                time=time,
                view=view,
                reader=reader,
                writer=writer,
                recorder=recorder,
                rewriter=rewriter,
                holder=Holder(catalog, ring),
                issuer=issuer,
                eraser=eraser,
                block_eraser=BlockEraser(catalog, eraser, rewriter, time),
                evictor=evictor,
                applier=applier,
                purger=Purger(
                    layout.catalog_path(self.path),
                    vault_id,
                    catalog,
                    fence,
                    ring,
                    self.provider,
                    eraser,
                    time,
                    self.clock,
                    options,
                    issuer,
                ),
                watcher=watcher,
            )
            undo.pop_all()
        watcher.start()
        return parts

    def _open_catalog(self, fence: Fence) -> tuple[Catalog, KeyRing]:
        """The catalog and the keys that fit it. A new pair when the catalog is missing, or when the
        only keys to it were in the memory of a process that is gone: nothing of what the segments
        hold can be read then, and recovery destroys it, saying so."""
        path = layout.catalog_path(self.path)
        if layout.catalog_exists(path):
            catalog = Catalog.open(path, read_only=self.read_only)
            try:
                ring = with_current(lambda: catalog.read(purging.root), self._open_ring)
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
        return self._start_empty(path, fence)

    def _open_ring(self, root: purging.Root | None) -> KeyRing | None:
        if root is None or layout.keys_vanished(self.descriptor, self.provider, root.epoch):
            return None
        return KeyRing.open(self.provider, self.descriptor.vault_id, root, self.clock)

    def _start_empty(self, path: Path, fence: Fence) -> tuple[Catalog, KeyRing]:
        """
        Raises:
            VaultLockedError: another process has the vault open, with the catalog that was here. It
                would go on serving what nobody could delete any more.
        """
        with fence.exclusive(_IN_USE, timeout=0.0):
            layout.remove_catalog(path)
        vault_id = self.descriptor.vault_id
        catalog = Catalog.open(path, create=True)  # first: where it finds no room, no key is made

        def write(connection: Connection) -> None:
            operations.put_meta(connection, "vault_id", vault_id)
            operations.put_meta(connection, "root_epoch", lookup.epoch.encode())
            operations.put_meta(connection, "lookup_key", lookup.key)
            now = self._time_in(connection)
            audit_log.append(connection, "vault-created", now, {"root_key": lookup.epoch})

        try:
            ring, lookup = KeyRing.create(self.provider, vault_id, self.clock)
            catalog.write(write)
        except BaseException:
            catalog.close()
            raise
        return catalog, ring

    def _note_signing_key(self, connection: Connection, public_key: bytes) -> None:
        origin = origin_of(self.descriptor.vault_id)
        facts = {"public_key": VerifierKey(origin, public_key).text}
        audit_log.append(connection, "signing-key-made", self._time_in(connection), facts)

    def _time_in(self, connection: Connection) -> float:
        """The vault's own time where there is no policy yet that says which jump is plausible: none
        is. In a new vault, the clock's."""
        return VaultTime(self.clock, retention.get_mark(connection), 0.0).steady()

    def _ensure_policy(
        self, catalog: Catalog, governor: Governor, policy: Policy | None, actor: str
    ) -> bool:
        """A vault is never without one: a new one starts with `policy` or the shipped default, one
        of an older kvvault gets the default. Whether it has segments that know of none."""
        if catalog.read(retention.current_policy) is not None:
            return False
        first = policy or shipped.load("default")
        catalog.write(lambda c: governor.put_in_force(c, first, now=self._time_in(c), actor=actor))
        return any(row.facts.state.live for row in catalog.read(operations.list_segments))


def _prune_tombstones(catalog: Catalog, fence: Fence) -> None:
    try:
        with fence.exclusive(_IN_USE, timeout=0.0):
            catalog.write(
                lambda c: operations.prune_tombstones(c, keep=_MAX_TOMBSTONES), durable=False
            )
    except VaultLockedError:
        pass  # somebody has the vault open; the next one to open it alone does it


def _expire(eraser: Eraser) -> None:
    plan = eraser.plan_expired()
    if plan.segments:
        log.info(
            "%d segments (%d blocks) are past their deadline and go now",
            len(plan.segments),
            plan.blocks,
        )
        try:
            eraser.execute(plan, actor="kvvault", reason="deadline, at opening")
        except KvvaultError as exc:
            # Not served in any case; no reason to keep shut what lives. Tried again by the job
            # and by the next to open it.
            log.error("what is past its deadline is not all gone yet: %s", exc)
