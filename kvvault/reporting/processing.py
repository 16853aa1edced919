"""A record of processing activities (GDPR Article 30(1)), as far as a vault can know it: from the
policy in force, which names owner and justification of every rule.

What only the controller knows (who that is, whose data the prompts hold) is left to be filled in,
and says so.
"""

from __future__ import annotations

from typing import Final

from kvvault.model import SegmentFacts
from kvvault.policy.durations import format_duration
from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table
from kvvault.reporting.sources import Source, conditions, lifetime, recorded
from kvvault.reporting.statements import backups

__all__ = ["report"]

_TO_FILL_IN: Final = "(to be filled in by the controller)"

_CATEGORIES: Final = (
    "key-value cache of language model prompts: intermediate results from which a prompt's text "
    "could be computed, so to be treated as that text. Of each request: the tenant's name, the "
    "subject, labels and request id that it came with (encrypted), how many tokens, times of its "
    "first and last use. By policy, as each rule says below: a fingerprint or a preview of the "
    "prompt. In the audit log and in receipts: keyed ids of tenants, subjects and prompts; names "
    "of those who changed or deleted something, and the reasons that they typed, in clear"
)

_RECIPIENTS: Final = (
    "none: kvvault sends nothing anywhere. Inference engines on this machine load what their own "
    "tenant stored. A key provider on another machine gets wrapped keys and no prompt data"
)

_TRANSFERS: Final = "none by kvvault"

_MEASURES: Final = (
    "AES-256-GCM under keys of each tenant and segment; ids keyed, names and labels encrypted; "
    "deadlines enforced without anybody asking, cryptographic erase and purge; legal holds; files "
    "readable by their owner only; see `kvvault report encryption`"
)


def report(source: Source) -> Report:
    """The record.

    Raises:
        StorageError, CatalogError, VaultKeyError.
    """
    vault = source.vault
    applied = vault.applied_policy()
    policy = applied.policy
    live = [facts for facts in vault.segments() if facts.state.live]
    show = "kvvault policy show"
    interval = format_duration(policy.vault.purge_interval_s)
    answers = (
        Answer("controller", "Art. 30(1)(a): controller and contact", _TO_FILL_IN, ""),
        Answer("owners", "who answers for the rules in the controller's organisation",
               "; ".join(sorted({rule.owner for rule in policy.rules})), show),
        Answer("activity", "the processing", policy.description or policy.name, show),
        Answer("purposes", "Art. 30(1)(b): purposes", "as each rule says, below", show),
        Answer("data_subjects", "Art. 30(1)(c): categories of data subjects", _TO_FILL_IN, ""),
        Answer("categories", "Art. 30(1)(c): categories of personal data", _CATEGORIES, ""),
        Answer("recipients", "Art. 30(1)(d): recipients", _RECIPIENTS, ""),
        Answer("transfers", "Art. 30(1)(e): transfers to third countries", _TRANSFERS, ""),
        Answer("time_limits", "Art. 30(1)(f): time limits for erasure",
               f"as each rule says, below; within {interval} after that a purge, which is worth "
               "what the key provider is", show),
        Answer("measures", "Art. 30(1)(g): technical and organisational measures", _MEASURES,
               "kvvault report encryption"),
        Answer("policy_digest", "SHA-256 of the policy this is taken from", policy.digest.hex(),
               show),
        Answer("policy_applied_at", "in force since", applied.applied_at, "kvvault status",
               Kind.TIME),
        Answer("tenants", "parties whose data there is now", len({f.tenant_id for f in live}),
               "kvvault ls tenants", Kind.COUNT),
        Answer("bytes", "bytes of it", sum(f.data_bytes for f in live), "kvvault df", Kind.BYTES),
    )  # fmt: skip
    return source.report(
        ReportKind.ROPA,
        "Record of processing activities: stored KV cache",
        ("GDPR Art. 30(1)",),
        answers,
        (_activities(source, live),),
        {"Copies": backups(vault.provider_info())},
    )


def _activities(source: Source, live: list[SegmentFacts]) -> Table:
    policy = source.vault.policy()
    number = source.vault.applied_policy().number
    return Table(
        "activities",
        "Activities: the rules in force",
        "kvvault policy show",
        (
            Column("rule", "activity (rule)"),
            Column("class", "class that a request asks for"),
            Column("applies_to", "whose and what"),
            Column("purpose", "purpose"),
            Column("owner", "owner"),
            Column("stored", "stored", Kind.FLAG),
            Column("recorded", "recorded besides"),
            Column("time_limit", "time limit"),
            Column("delete_by_s", "ceiling", Kind.SPAN),
            Column("recipients", "recipients"),
            Column("segments", "segments now", Kind.COUNT),
            Column("bytes", "bytes now", Kind.BYTES),
        ),
        tuple(
            (
                rule.name,
                rule.retention_class or "(none)",
                conditions(rule.match),
                rule.justification,
                rule.owner,
                rule.persist,
                recorded(rule),
                lifetime(rule),
                rule.delete_by_s,
                "none",
                len(mine),
                sum(facts.data_bytes for facts in mine),
            )
            for rule in policy.rules
            for mine in [[f for f in live if f.rule == rule.name and f.policy_no == number]]
        ),
        "The first rule that applies decides.",
    )
