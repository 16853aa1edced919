"""Putting a policy in force: what it would change, and changing it.

A policy that is applied governs what is there, too: every live segment gets the deadlines that the
new policy gives it, counted from when it was opened. `diff` and `apply` are one computation, so
what the one predicted is what the other does; `apply` does it in one transaction with the policy's
row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection

from kvvault.catalog import operations, protecting, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import SegmentRow, TenantRow
from kvvault.deleting import DeletionReport, Eraser, Trigger
from kvvault.errors import FormatError, WrongKeyError
from kvvault.governing import LABELS, Governed, Governor
from kvvault.keyring import KeyRing
from kvvault.model import Namespace, SegmentFacts
from kvvault.policy.decide import Facts, decide
from kvvault.policy.document import Policy
from kvvault.timekeeping import VaultTime


class Change(StrEnum):
    """What a policy does to a segment."""

    DELETE = "delete"
    KEEP = "keep"
    SHORTEN = "shorten"
    LENGTHEN = "lengthen"


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """One segment under the new policy."""

    facts: SegmentFacts
    change: Change
    rule: str
    """The rule that governs it then."""
    delete_by: float | None
    idle_s: float | None
    idle_until: float | None
    keep_until: float | None
    held: bool
    """A hold keeps it: what would be deleted stays."""

    @property
    def deadline(self) -> float:
        """From when on it is not served; infinite when never."""
        return min(
            math.inf if self.delete_by is None else self.delete_by,
            math.inf if self.idle_until is None else self.idle_until,
        )

    @property
    def outcome(self) -> Change:
        """What becomes of it: what a hold keeps is kept."""
        return Change.KEEP if self.held and self.change is Change.DELETE else self.change


@dataclass(frozen=True, slots=True)
class Sum:
    """How much of the vault one kind of change concerns."""

    segments: int = 0
    blocks: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PolicyDiff:
    """What applying a policy changes, or has changed."""

    old: Policy
    new: Policy
    changes: tuple[SegmentChange, ...]

    def sum(self, change: Change, rule: str | None = None) -> Sum:
        """What is deleted, kept, shortened or lengthened, in all or of what one rule governs then.
        What a hold keeps counts as kept."""
        return _sum(
            one.facts for one in self.changes if one.outcome is change and rule in (None, one.rule)
        )

    @property
    def held(self) -> Sum:
        """What would be deleted, but for a hold."""
        return _sum(one.facts for one in self.changes if one.outcome is not one.change)


def _sum(segments: Iterable[SegmentFacts]) -> Sum:
    every = list(segments)
    return Sum(len(every), sum(f.live_blocks for f in every), sum(f.live_bytes for f in every))


class Applier:
    """Any thread, one at a time: the caller holds a lock against other processes."""

    def __init__(
        self,
        catalog: Catalog,
        ring: KeyRing,
        eraser: Eraser,
        time: VaultTime,
        governor: Governor,
    ) -> None:
        self._catalog = catalog
        self._ring = ring
        self._eraser = eraser
        self._time = time
        self._governor = governor

    def diff(self, policy: Policy) -> PolicyDiff:
        """What applying `policy` now would change.

        Raises:
            VaultKeyError: a tenant's name or labels cannot be read now.
            StorageError, CatalogError.
        """
        return self._catalog.read(lambda c: self._diff(c, policy, self._time.steady()))

    def apply(self, policy: Policy, *, actor: str) -> tuple[PolicyDiff, DeletionReport]:
        """Put `policy` in force, move deadlines, and delete what it does not allow.

        Raises: as `diff`, and as `kvvault.deleting.Eraser.execute` once it is in force.
        """
        # Opens every tenant's keys: within the transaction nobody waits for the key provider.
        self.diff(policy)
        now = self._time.steady()

        def write(connection: Connection) -> PolicyDiff:
            diff = self._diff(connection, policy, now)
            number = self._governor.put_in_force(connection, policy, now=now, actor=actor)
            change = operations.next_change(connection)
            for one in diff.changes:
                retention.set_terms(
                    connection,
                    one.facts.segment_id,
                    policy_no=number,
                    rule=one.rule,
                    delete_by=one.delete_by,
                    idle_s=one.idle_s,
                    idle_until=one.idle_until,
                    keep_until=one.keep_until,
                    change=change,
                )
            return diff

        diff = self._catalog.write(write)
        doomed = [o.facts.segment_id for o in diff.changes if o.change is Change.DELETE]
        plan = self._eraser.plan_segments(doomed, Trigger.POLICY)
        report = self._eraser.execute(plan, actor=actor, reason="policy applied")
        return diff, report

    def _diff(self, connection: Connection, policy: Policy, now: float) -> PolicyDiff:
        tenants = {row.tenant_id: row for row in operations.list_tenants(connection)}
        names: dict[bytes, str] = {}
        namespaces = {
            facts.namespace.digest: facts.namespace
            for facts in operations.list_namespaces(connection)
        }
        kept = protecting.held_segments(connection)
        changes = []
        for row in operations.list_segments(connection):
            tenant = tenants.get(row.facts.tenant_id or b"")
            namespace = namespaces.get(row.facts.namespace_digest)
            if not row.facts.state.live or tenant is None or namespace is None:
                continue
            if tenant.tenant_id not in names:
                names[tenant.tenant_id] = self._ring.name(tenant)
            governed = self._govern(policy, row, tenant, names[tenant.tenant_id], namespace)
            changes.append(_change(row, governed, now, row.facts.segment_id in kept))
        return PolicyDiff(self._governor.current()[1], policy, tuple(changes))

    def _govern(
        self, policy: Policy, row: SegmentRow, tenant: TenantRow, name: str, namespace: Namespace
    ) -> Governed:
        labels: dict[str, str] = {}
        if row.sealed_labels is not None:
            try:
                read = json.loads(self._ring.tenant(tenant).open_text(LABELS, row.sealed_labels))
                labels = {str(key): str(value) for key, value in read.items()}
            except (ValueError, AttributeError, FormatError) as exc:
                raise WrongKeyError(
                    "the labels of a segment cannot be read", hint="run `kvvault verify`"
                ) from exc
        facts = Facts(name, dict(namespace.facts), labels, row.facts.retention_class or None)
        return Governed(
            0,
            decide(policy, facts),
            policy.vault.window_s,
            tuple(sorted(labels.items())),
            policy.vault.segment_bytes,
        )


def _change(row: SegmentRow, governed: Governed, now: float, held: bool) -> SegmentChange:
    facts, verdict = row.facts, governed.verdict
    opened = facts.created_at
    delete_by = None if verdict.delete_by_s is None else opened + verdict.delete_by_s
    if not verdict.persist:
        delete_by = opened  # what a hold keeps is not served, and goes when the hold is cleared
    if facts.deadline <= now:  # no policy revives what is past its deadline
        delete_by = min(facts.deadline, math.inf if delete_by is None else delete_by)
    idle_until = None
    if verdict.idle_s is not None:
        idle_until = min(
            _idle_until(row, verdict.idle_s), math.inf if delete_by is None else delete_by
        )
    keep = verdict.keep_at_least_s
    deadline = min(
        math.inf if delete_by is None else delete_by,
        math.inf if idle_until is None else idle_until,
    )
    if deadline <= now:
        change = Change.DELETE
    elif deadline == facts.deadline:
        change = Change.KEEP
    else:
        change = Change.SHORTEN if deadline < facts.deadline else Change.LENGTHEN
    return SegmentChange(
        facts,
        change,
        verdict.rule,
        delete_by,
        verdict.idle_s,
        idle_until,
        governed.closes_at(opened) + keep if keep else None,
        held,
    )


def _idle_until(row: SegmentRow, idle_s: float) -> float:
    """The sliding deadline, from the last use. That of blocks that were written again shows only
    in the sliding deadline they had."""
    facts = row.facts
    used = max(facts.created_at, facts.last_used or facts.created_at)
    if row.idle_s is None or facts.idle_until is None:
        return used + idle_s
    if row.idle_s == idle_s:  # not by way of the last use, which would not give the same number
        return max(used + idle_s, facts.idle_until)
    return max(used, facts.idle_until - row.idle_s) + idle_s
