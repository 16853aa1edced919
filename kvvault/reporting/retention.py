"""Are the periods set, and kept? GDPR 5(1)(e) and 30, PCI DSS 3.2.1.

Two numbers must be 0: segments whose key is still there although their deadline has passed, and
deletions that have waited for a purge for longer than the policy allows. What a hold keeps is past
its deadline on purpose, and counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from kvvault.catalog import reporting as rows
from kvvault.catalog import retention as deadlines
from kvvault.catalog.jobs import RunRow
from kvvault.catalog.retention import Candidate
from kvvault.health import LATE_S, job_statuses
from kvvault.model import SegmentFacts
from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table
from kvvault.reporting.sources import Source, conditions, lifetime, recorded

__all__ = ["Overdue", "overdue", "report"]


@dataclass(frozen=True, slots=True)
class Overdue:
    """What is later than it may be."""

    segments: int
    """Past their deadline by more than a second, not held, and their key is there."""
    unclear: int
    """The same, only if the machine's clock is right, which is implausibly far ahead."""
    purges: int
    """Deletions that have waited for a purge for longer than the policy allows."""
    held: tuple[SegmentFacts, ...]
    """Past their deadline, and kept by a hold."""
    by_s: float
    """How long the first of `segments` is past it."""


def overdue(source: Source) -> Overdue:
    """Count.

    Raises:
        StorageError, CatalogError.
    """
    vault = source.vault
    # By the time that can be vouched for: by a clock that has jumped nothing may be destroyed.
    now = vault.time.steady()
    longest = vault.policy().vault.purge_interval_s

    def look(connection: Connection) -> tuple[list[Candidate], int]:
        late = deadlines.expired(connection, vault.time.now())
        return late, rows.count_unpurged(connection, source.now - longest)

    late, purges = vault.catalog.read(look)
    lateness = [now - one.facts.deadline for one in late if not one.held]
    return Overdue(
        segments=sum(one > LATE_S for one in lateness),
        unclear=sum(one < 0 for one in lateness) if vault.time.suspect else 0,
        purges=purges,
        held=tuple(one.facts for one in late if one.held and one.facts.deadline <= now),
        by_s=max([0.0, *lateness]),
    )


def report(source: Source, *, tenant: str | None = None) -> Report:
    """The report.

    :param tenant: whose ages to list; None: everybody's. The overdue numbers are the vault's.

    Raises:
        StorageError, CatalogError, VaultKeyError.
    """
    vault = source.vault
    late = overdue(source)
    applied = vault.applied_policy()
    statuses = job_statuses(vault, source.clock)
    runs = vault.catalog.read(lambda c: rows.list_runs(c, source.period))
    live = [facts for facts in vault.segments() if facts.state.live]
    names = source.names()
    oldest = min((facts.created_at for facts in live), default=None)
    failed = sum(run.outcome in ("failed", "refused", "abandoned") for run in runs)
    interval = applied.policy.vault.purge_interval_s
    answers = (
        Answer(
            "overdue_segments",
            "segments past their deadline whose key still exists (must be 0)",
            late.segments,
            "kvvault expire --dry-run",
            Kind.COUNT,
            late.segments == 0,
        ),
        Answer(
            "overdue_purges",
            "deletions that wait for a purge for longer than the policy allows (must be 0)",
            late.purges,
            "kvvault keys ls",
            Kind.COUNT,
            late.purges == 0,
        ),
        Answer(
            "unclear_segments",
            "unclear: past their deadline only if the machine's clock is right (must be 0)",
            late.unclear,
            "kvvault expire --dry-run",
            Kind.COUNT,
            late.unclear == 0,
        ),
        Answer("overdue_by", "how long the first of the segments past their deadline is late",
               late.by_s, "kvvault doctor", Kind.SPAN),
        Answer("held_segments", "segments past their deadline that a hold keeps (not served)",
               len(late.held), "kvvault expire --dry-run", Kind.COUNT),
        Answer("policy", "policy in force", applied.policy.name, "kvvault policy show"),
        Answer("policy_digest", "SHA-256 of its text", applied.policy.digest.hex(),
               "kvvault policy show"),
        Answer("policy_applied_at", "in force since", applied.applied_at, "kvvault status",
               Kind.TIME),
        Answer("policy_applied_by", "put in force by", applied.actor, "kvvault status"),
        Answer("purge_every", "a purge follows a deletion within (worth: see `encryption`)",
               interval, "kvvault policy show", Kind.SPAN),
        Answer("oldest_age", "age of the oldest block",
               None if oldest is None else source.now - oldest,
               "kvvault ls segments --sort created_at --limit 1", Kind.SPAN),
        Answer("clock_plausible", "the machine's clock is plausible", not vault.time.suspect,
               "kvvault clock show", Kind.FLAG, not vault.time.suspect),
        Answer("jobs_overdue", "jobs that are overdue", sum(s.overdue for s in statuses),
               "kvvault jobs ls", Kind.COUNT, not any(s.overdue for s in statuses)),
        Answer("failed_runs", "runs of jobs in the period that did not succeed", failed, "",
               Kind.COUNT),
    )  # fmt: skip
    shown = [facts for facts in live if tenant is None or names.get(facts.tenant_id) == tenant]
    return source.report(
        ReportKind.RETENTION,
        "Retention: are the periods set and kept",
        ("GDPR Art. 5(1)(e), 30", "PCI DSS 3.2.1", "SOC 2 C1.2"),
        answers,
        (
            _ages(source, shown, names),
            _rules(source),
            _policies(source),
            _held(source, late, names),
            _jobs(source, runs),
        ),
        {
            "How it is counted": (
                "By the vault's own time, which a clock that is set back does not set back. A "
                "deadline belongs to a segment, and every block of it dies with it, at or before "
                f"its own. A deadline is noticed within {LATE_S:.0f} second while jobs run; what "
                "is past its deadline is not served in any case."
            )
        },
    )


def _ages(source: Source, live: list[SegmentFacts], names: dict[bytes | None, str]) -> Table:
    groups: dict[tuple[str, str, str], list[SegmentFacts]] = {}
    for facts in live:
        whose = names.get(facts.tenant_id, "-")
        groups.setdefault((whose, facts.retention_class, facts.rule), []).append(facts)
    now = source.now
    return Table(
        "ages",
        "Oldest blocks by tenant and class",
        "kvvault ls segments --sort created_at",
        (
            Column("tenant", "tenant"),
            Column("class", "class"),
            Column("rule", "rule"),
            Column("blocks", "blocks", Kind.COUNT),
            Column("bytes", "bytes", Kind.BYTES),
            Column("oldest_at", "oldest, stored", Kind.TIME),
            Column("oldest_age_s", "its age", Kind.SPAN),
            Column("last_deadline_at", "last deadline of all", Kind.TIME),
            Column("without_deadline", "segments without one", Kind.COUNT),
        ),
        tuple(
            (
                tenant,
                retention_class or "(none)",
                rule,
                sum(f.blocks for f in found),
                sum(f.data_bytes for f in found),
                min(f.created_at for f in found),
                now - min(f.created_at for f in found),
                max((f.deadline for f in found if f.deadline < float("inf")), default=None),
                sum(f.deadline == float("inf") for f in found),
            )
            for (tenant, retention_class, rule), found in sorted(groups.items())
        ),
    )


def _rules(source: Source) -> Table:
    return Table(
        "rules",
        "Rules in force, tried in this order",
        "kvvault policy show",
        (
            Column("rule", "rule"),
            Column("class", "class"),
            Column("applies_to", "applies to"),
            Column("kept", "kept"),
            Column("delete_by_s", "ceiling", Kind.SPAN),
            Column("idle_s", "after last use", Kind.SPAN),
            Column("record", "fingerprint or preview"),
            Column("recorded", "recorded besides"),
            Column("owner", "owner"),
            Column("justification", "justification"),
        ),
        tuple(
            (
                rule.name,
                rule.retention_class or "(none)",
                conditions(rule.match),
                lifetime(rule),
                rule.delete_by_s,
                rule.idle_s,
                rule.record.value,
                recorded(rule),
                rule.owner,
                rule.justification,
            )
            for rule in source.vault.policy().rules
        ),
    )


def _policies(source: Source) -> Table:
    past = source.vault.policies()
    ends = [*(one.applied_at for one in past[1:]), None]
    return Table(
        "policies",
        "Policies that were in force",
        "",
        (
            Column("number", "number", Kind.COUNT),
            Column("name", "name"),
            Column("digest", "SHA-256"),
            Column("from_at", "from", Kind.TIME),
            Column("until_at", "until", Kind.TIME),
            Column("applied_by", "by"),
            Column("owners", "owners of its rules"),
        ),
        tuple(
            (
                one.number,
                one.policy.name if one.policy else "(its text does not open)",
                one.digest.hex(),
                one.applied_at,
                end,
                one.actor,
                "; ".join(sorted({rule.owner for rule in one.policy.rules})) if one.policy else "-",
            )
            for one, end in zip(past, ends, strict=True)
        ),
    )


def _held(source: Source, late: Overdue, names: dict[bytes | None, str]) -> Table:
    held = source.vault.holds()
    by_segment = {facts.segment_id: facts for facts in late.held}
    found = []
    for hold in held:
        mine = [facts for facts in by_segment.values() if facts.segment_id in hold.segment_ids]
        found.append(
            (
                hold.number,
                hold.on,
                hold.tenant or names.get(hold.target, "-"),
                hold.reason,
                hold.actor,
                hold.placed_at,
                hold.segments,
                len(mine),
                max((source.now - facts.deadline for facts in mine), default=None),
            )
        )
    return Table(
        "holds",
        "Holds in force",
        "kvvault hold ls",
        (
            Column("number", "number", Kind.COUNT),
            Column("kind", "on a"),
            Column("tenant", "tenant"),
            Column("reason", "reason"),
            Column("actor", "by"),
            Column("placed_at", "since", Kind.TIME),
            Column("segments", "segments that it keeps", Kind.COUNT),
            Column("past_deadline", "of these past their deadline", Kind.COUNT),
            Column("past_deadline_s", "longest", Kind.SPAN),
        ),
        tuple(found),
    )


def _jobs(source: Source, runs: list[RunRow]) -> Table:
    statuses = job_statuses(source.vault, source.clock)
    return Table(
        "jobs",
        "Jobs",
        "kvvault jobs ls",
        (
            Column("job", "job"),
            Column("interval_s", "every", Kind.SPAN),
            Column("last_success_at", "last success", Kind.TIME),
            Column("outcome", "last outcome"),
            Column("detail", "what it said"),
            Column("overdue", "overdue", Kind.FLAG),
            Column("runs", "runs in the period", Kind.COUNT),
            Column("failed", "failed", Kind.COUNT),
            Column("refused", "refused", Kind.COUNT),
            Column("abandoned", "interrupted", Kind.COUNT),
        ),
        tuple(
            (
                status.name,
                status.interval_s,
                status.last_success,
                status.outcome or "never ran",
                status.detail,
                status.overdue,
                *(
                    sum(run.job == status.name and run.outcome in outcomes for run in runs)
                    for outcomes in (
                        ("ok", "failed", "refused", "abandoned"),
                        ("failed",),
                        ("refused",),
                        ("abandoned",),
                    )
                ),
            )
            for status in statuses
        ),
        "The history keeps the newest 1000 runs of each job.",
    )
