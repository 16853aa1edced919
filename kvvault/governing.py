"""The policy in force, as this process knows it, and what it says of a scope.

The catalog is the truth: whoever applies a policy adds a row, every process notices the number with
its next refresh, and asks the new policy before the next block is stored. Nothing here is on a
scheduler thread's way.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from kvvault.catalog import reporting, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import Terms
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import CatalogCorruptError, ConfigError, FormatError, WrongKeyError
from kvvault.keyring import KeyRing
from kvvault.model import Namespace
from kvvault.policy.decide import Facts, Verdict, decide
from kvvault.policy.document import Policy

LABELS = "segment labels"
"""What a segment's labels are encrypted as."""


@dataclass(frozen=True, slots=True)
class Governed:
    """What the policy in force says of the blocks of one scope."""

    policy_no: int
    verdict: Verdict
    window_s: float
    """For how long a segment takes blocks."""
    labels: tuple[tuple[str, str], ...]
    segment_bytes: int | None
    """At which size a segment is full; None: whatever the process was told."""

    @property
    def key(self) -> tuple[object, ...]:
        """Blocks with equal keys may share a segment."""
        return self.policy_no, self.verdict.rule, self.verdict.retention_class, self.labels

    @property
    def rule(self) -> str:
        return self.verdict.rule

    @property
    def max_bytes(self) -> int | None:
        """What all segments of this rule and tenant may take together."""
        return self.verdict.max_bytes

    def opened_at(self, now: float) -> float:
        """From when on a segment that is made now counts its age."""
        return now

    @property
    def _life_s(self) -> float:
        lives = (self.verdict.delete_by_s, self.verdict.idle_s)
        return min((s for s in lives if s is not None), default=math.inf)

    @property
    def served_s(self) -> float:
        """For how long every block is served, if nothing else takes it: also the last one to get
        into its segment."""
        return self._life_s - self.closes_at(0.0)

    def closes_at(self, opened_at: float) -> float:
        """When a segment opened then takes no more blocks. Short beside the deadlines, because all
        of its blocks go with the oldest."""
        return opened_at + min(self.window_s, self._life_s / _WINDOWS)

    def terms(self, opened_at: float, tenant: TenantKeys) -> Terms:
        """For a segment that is opened then. Counted from its opening, so that every block dies at
        or before its own deadline; the floor from its closing, so that every block has it."""
        verdict = self.verdict
        keep = verdict.keep_at_least_s
        labels = json.dumps(dict(self.labels), sort_keys=True)
        delete_by = None if verdict.delete_by_s is None else opened_at + verdict.delete_by_s
        return Terms(
            policy_no=self.policy_no,
            rule=verdict.rule,
            retention_class=verdict.retention_class or "",
            sealed_labels=tenant.seal_text(LABELS, labels) if self.labels else None,
            delete_by=delete_by,
            idle_s=verdict.idle_s,
            idle_until=None
            if verdict.idle_s is None
            else min(opened_at + verdict.idle_s, math.inf if delete_by is None else delete_by),
            keep_until=self.closes_at(opened_at) + keep if keep else None,
        )


@dataclass(frozen=True, slots=True)
class Inherited:
    """What was decided of blocks before, when they are written again: nothing of it changes, and
    they are as old as they were."""

    segment_id: bytes
    """Where they were."""
    kept: Terms
    since: float
    """When that was opened."""
    until: float
    """How long the new one takes blocks."""

    @property
    def key(self) -> tuple[object, ...]:
        """Blocks of one segment go to one segment."""
        return "again", self.segment_id

    @property
    def rule(self) -> str:
        return self.kept.rule

    @property
    def segment_bytes(self) -> int | None:
        return None

    @property
    def max_bytes(self) -> int | None:
        return None

    def opened_at(self, _now: float) -> float:
        return self.since

    def closes_at(self, _opened_at: float) -> float:
        return self.until

    def terms(self, _opened_at: float, _tenant: TenantKeys) -> Terms:
        return self.kept


@dataclass(frozen=True, slots=True)
class AppliedPolicy:
    """A policy that is in force, and since when."""

    number: int
    policy: Policy
    applied_at: float
    """Seconds since the epoch, by the vault's own time."""
    actor: str


@dataclass(frozen=True, slots=True)
class PastPolicy:
    """A policy that was put in force once, and may be still."""

    number: int
    digest: bytes
    """SHA-256 of its text; 32 bytes."""
    policy: Policy | None
    """None: its text does not open any more, or is one that only an older kvvault took."""
    applied_at: float
    """Seconds since the epoch, by the vault's own time."""
    actor: str


_WINDOWS = 8
"""A segment takes blocks for at most this fraction of their life."""


class Governor:
    """Any thread. `current` and `govern` may read the catalog; `noticed` does nothing slow."""

    def __init__(self, catalog: Catalog, ring: KeyRing) -> None:
        self._catalog = catalog
        self._ring = ring
        self._lock = threading.Lock()
        self._policy: Policy | None = None
        self._policy_no = 0
        self._noticed = 0

    def noticed(self, policy_no: int) -> None:
        """The catalog has a policy of this number. One thread at a time: nobody else sets it."""
        self._noticed = max(self._noticed, policy_no)

    def current(self) -> tuple[int, Policy]:
        """The policy in force and its number.

        Raises:
            CatalogError, StorageError: the catalog cannot be read, or holds no valid policy.
        """
        with self._lock:
            if self._policy is None or self._policy_no < self._noticed:
                applied = self.applied()
                self._policy, self._policy_no = applied.policy, applied.number
            return self._policy_no, self._policy

    def put_in_force(
        self, connection: Connection, policy: Policy, *, now: float, actor: str
    ) -> int:
        """Add a policy's row, in a transaction of the caller; its number."""
        return retention.add_policy(
            connection,
            digest=policy.digest,
            sealed_source=self._ring.seal_policy(policy.source),
            now=now,
            actor=actor,
        )

    def applied(self) -> AppliedPolicy:
        """The policy in force, as the catalog has it now. Errors as `current`."""
        row = self._catalog.read(retention.current_policy)
        if row is None:
            raise CatalogCorruptError(
                "the catalog has no policy", hint="apply one: kvvault policy apply"
            )
        try:
            source = self._ring.open_policy(row.sealed_source)
            policy = Policy.parse(source, name="the policy in force")
        except (WrongKeyError, FormatError, ConfigError, UnicodeDecodeError) as exc:
            raise CatalogCorruptError(
                f"the policy in the catalog cannot be read ({type(exc).__name__})",
                hint="restore the catalog, or move catalog.sqlite3* away to start empty",
            ) from exc
        return AppliedPolicy(row.policy_no, policy, row.applied_at, row.actor)

    def history(self) -> list[PastPolicy]:
        """Every policy that was ever in force, oldest first.

        Raises:
            CatalogError, StorageError: the catalog cannot be read.
        """
        return [
            PastPolicy(row.policy_no, row.digest, self._readable(row), row.applied_at, row.actor)
            for row in self._catalog.read(reporting.list_policies)
        ]

    def _readable(self, row: retention.PolicyRow) -> Policy | None:
        try:
            return Policy.parse(self._ring.open_policy(row.sealed_source), name="a policy")
        except (WrongKeyError, FormatError, ConfigError, UnicodeDecodeError):
            return None

    def govern(
        self,
        tenant: str,
        namespace: Namespace,
        labels: Mapping[str, str],
        retention_class: str | None,
    ) -> Governed:
        """
        Raises: as `current`.
        """
        number, policy = self.current()
        facts = Facts(tenant, dict(namespace.facts), dict(labels), retention_class)
        return Governed(
            number,
            decide(policy, facts),
            policy.vault.window_s,
            tuple(sorted(labels.items())),
            policy.vault.segment_bytes,
        )

    @property
    def newest(self) -> int:
        """The highest number this process has heard of."""
        return max(self._noticed, self._policy_no)
