"""An open vault as far as it can be looked at: also when it is open for reading only, and without
changing what is stored.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from kvvault import inventory, keylooking, layout, tenants
from kvvault.applying import PolicyDiff
from kvvault.audit.log import AuditLog
from kvvault.audit.receipts import EngineCopy
from kvvault.catalog import log as audit_log
from kvvault.catalog import operations, purging, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.crypto.keys import TenantKeys
from kvvault.crypto.providers.base import ProviderInfo
from kvvault.errors import ClosedError
from kvvault.governing import AppliedPolicy, PastPolicy
from kvvault.holding import Hold
from kvvault.keylooking import KeyCheck, KeysReport
from kvvault.model import NamespaceFacts, SegmentFacts, TenantFacts, VaultStats, VerifyReport
from kvvault.opening import Parts
from kvvault.policy.document import Policy
from kvvault.prompts import Prompts
from kvvault.segments.store import Progress
from kvvault.timekeeping import VaultTime

_PURGE_AT = 0.9
"""A purge is due at this share of the policy's interval: it takes a while, and may have to be
repeated."""


class OpenVault:
    """What `kvvault.vault.Vault` says of itself, and how it is closed. Any thread."""

    def __init__(self, parts: Parts) -> None:
        """Not for callers: see `kvvault.vault.Vault`."""
        self.path = parts.path
        self.read_only = parts.read_only
        self.options = parts.options
        self.recovery = parts.recovery
        self._parts = parts
        self._vault_id = parts.vault_id
        self._provider = parts.provider
        self._counters = parts.counters
        self._catalog = parts.catalog
        self._ring = parts.ring
        self._governor = parts.governor
        self._time = parts.time
        self._view = parts.view
        self._holder = parts.holder
        self._applier = parts.applier
        self._watcher = parts.watcher
        self._closed = False
        self._pid = os.getpid()

    # -- policy, holds and keys --------------------------------------------------------------------

    @property
    def time(self) -> VaultTime:
        """The vault's own time."""
        return self._time

    @property
    def audit(self) -> AuditLog:
        """The audit log, its checkpoints and receipts."""
        self._check_open()
        return AuditLog(self._catalog, self._vault_id, lambda: self._ring.signer, self._time.steady)

    @property
    def catalog(self) -> Catalog:
        """For the jobs' lease and history, and for `kvvault.health`; nobody else."""
        self._check_open()
        return self._catalog

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

    def diff_policy(self, policy: Policy) -> PolicyDiff:
        """What applying `policy` now would delete, keep, shorten or lengthen.

        Raises: as `kvvault.applying.Applier.diff`.
        """
        self._check_open()
        return self._applier.diff(policy)

    def holds(self, *, cleared: bool = False) -> list[Hold]:
        """Holds in force, oldest first; with `cleared`, those that were as well."""
        self._check_open()
        return self._holder.list_holds(cleared=cleared)

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

    def purge_is_due(self) -> bool:
        """Whether a deletion has waited for a purge for nearly as long as the policy allows.

        Raises:
            StorageError, CatalogError.
        """
        self._check_open()
        _, since = self._catalog.read(purging.waiting)
        limit = _PURGE_AT * self.policy().vault.purge_interval_s
        return since is not None and self._time.steady() - since >= limit

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

    # -- the inventory -----------------------------------------------------------------------------

    @property
    def prompts(self) -> Prompts:
        """The inventory: which prompts persist."""
        self._check_open()
        return Prompts(
            self._catalog,
            self._ring,
            self._view,
            self._time,
            self._parts.recorder,
            self._parts.rewriter.alone,
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
        whose = None
        if tenant_id is not None:
            whose = tenants.log_id(self._catalog, self._ring, tenant_id)
        facts: dict[str, Fact] = {
            **(about or {}),
            "command": command,
            "rows": rows,
            "tenant": whose,
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

    def note_engine(self, deletion_no: int | None, copies: Sequence[EngineCopy]) -> None:
        """Write down what became of an engine's copies after a deletion whose receipt cannot say
        it: an entry of the audit log. Not of a vault that is open for reading.

        Raises:
            StorageError, CatalogError.
        """
        self._check_open()
        facts: dict[str, Fact] = {
            "deletion": deletion_no,
            "copies": [f"{one.what}: {one.detail}" for one in copies],
        }
        at = self._time.steady()
        self._catalog.write(partial(audit_log.append, kind="engine-asked", at=at, facts=facts))

    # -- what is there -----------------------------------------------------------------------------

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

    def tenant_keys(self, tenant: str) -> TenantKeys | None:
        """A tenant's keys, to make keyed ids with; None when there is no tenant of that name. They
        are this vault's: not for closing.

        Raises:
            VaultKeyError: they cannot be had; WrongKeyError: also when the catalog was altered.
            StorageError, CatalogError.
        """
        self._check_open()
        return tenants.tenant_keys(self._catalog, self._ring, tenant)

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
        report = self._parts.checker().check_all(progress)
        self._watcher.note_check(report)
        return report

    def verify_segments(
        self, segment_ids: Container[bytes], progress: Progress | None = None
    ) -> VerifyReport:
        """The same, of these segments.

        Raises: as `verify`.
        """
        self._check_open()
        report = self._parts.checker().check_all(progress, only=segment_ids)
        self._watcher.note_check(report)
        return report

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
        return self._parts.directory.direct

    # -- open and closed ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look now for what other processes committed. The keys of tenants that they forgot are
        gone afterwards.

        Raises:
            CatalogError, StorageError, VaultLockedError: it is done the next time.
            ClosedError: the vault is closed.
        """
        self._check_open()
        self._view.refresh()
        self._view.drop_forgotten_tenants()

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
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
