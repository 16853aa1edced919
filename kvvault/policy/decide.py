"""Which rule governs a request, and what follows. Pure: no clock, no files, no state.

1. Rules without a class are tried in order; the first that matches is the *base*. There always is
   one.
2. If the request asks for a retention class, the rules of that class are tried in order. The first
   that matches governs, but in nothing does it give more than the base: not a later deadline, not
   a higher floor, not more space, not a fuller record, and nothing is persisted that would not be.
3. If no rule of that class matches, the base governs, as if nothing had been asked for.

So a client, who chooses the class, can shorten what the operator allows and never lengthen it;
tenant and labels, which come from the gateway, can do both.

Durations only: what they mean in time is settled when a segment is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvvault.policy.document import Match, Policy, Record, Rule
from kvvault.policy.durations import format_duration
from kvvault.policy.patterns import matches_any

__all__ = ["Facts", "Tried", "Verdict", "decide", "explain", "verdict_of"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a request when it is decided about."""

    tenant: str = field(repr=False)
    facts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of the namespace, by name; the model under ``model``."""
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    retention_class: str | None = field(default=None, repr=False)
    """What the request asks for; any text at all."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a request's blocks. Durations in seconds."""

    persist: bool
    delete_by_s: float | None
    """The ceiling, from when the block's segment is opened; None: there is none."""
    idle_s: float | None
    """Gone when unused for so long; at most `delete_by_s`. None: however long."""
    keep_at_least_s: float
    """The floor against eviction, at most `delete_by_s`."""
    max_bytes: int | None
    """Most that the tenant's blocks under `rule` may take; None: no such limit."""
    record: Record
    retention_class: str
    """The class that was granted; empty: none."""
    rule: str
    reason: str
    """One sentence. Names rules and conditions, never whom they matched."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One rule that was looked at, and what came of it."""

    rule: Rule
    obstacle: str
    """The first condition that did not hold; empty: it matched."""


def decide(policy: Policy, facts: Facts) -> Verdict:
    """The verdict on one request. Never raises: a policy has a rule for everything."""
    base = next(rule for rule in _of_class(policy, None) if not _obstacle(rule.match, facts))
    verdict = verdict_of(base)
    if facts.retention_class is None:
        return verdict
    asked = _of_class(policy, facts.retention_class)
    granted = next((rule for rule in asked if not _obstacle(rule.match, facts)), None)
    if granted is not None:
        return _lesser(granted, base)
    why = (
        "the retention class that was asked for is not for this request"
        if asked
        else "there is no such retention class as was asked for"
    )
    return _because(verdict, f"{_why(base)}; {why}")


def explain(policy: Policy, facts: Facts) -> tuple[Tried, ...]:
    """The rules that `decide` looks at, in its order: those of the class asked for, then those
    without one; each up to the first that matches."""
    tried: list[Tried] = []
    classes = [None] if facts.retention_class is None else [facts.retention_class, None]
    for retention_class in classes:
        for rule in _of_class(policy, retention_class):
            tried.append(Tried(rule, _obstacle(rule.match, facts)))
            if not tried[-1].obstacle:
                break
    return tuple(tried)


def _of_class(policy: Policy, retention_class: str | None) -> Sequence[Rule]:
    return [rule for rule in policy.rules if rule.retention_class == retention_class]


def _obstacle(match: Match, facts: Facts) -> str:
    """The first condition that does not hold; empty when all do."""
    if match.tenant and not matches_any(match.tenant, facts.tenant):
        return "the tenant does not match"
    for name, patterns in match.facts:
        value = facts.facts.get(name)
        if value is None:
            return f"the namespace has no {name!r}"
        if not matches_any(patterns, value):
            return f"{name!r} of the namespace does not match"
    for name, patterns in match.labels:
        value = facts.labels.get(name)
        if value is None:
            return f"there is no label {name!r}"
        if not matches_any(patterns, value):
            return f"the label {name!r} does not match"
    return ""


def verdict_of(rule: Rule) -> Verdict:
    """What a rule gives by itself, when nothing limits it."""
    return _because(
        Verdict(
            persist=rule.persist,
            delete_by_s=rule.delete_by_s,
            idle_s=rule.idle_s,
            keep_at_least_s=rule.keep_at_least_s,
            max_bytes=rule.max_bytes,
            record=rule.record,
            retention_class=rule.retention_class or "",
            rule=rule.name,
            reason="",
        ),
        _why(rule),
    )


def _lesser(granted: Rule, base: Rule) -> Verdict:
    """What a class gives: the lesser of its rule and the base, in everything."""
    if not base.persist:
        return _because(verdict_of(base), f"{_why(base)}; no retention class changes that")
    own = verdict_of(granted)
    if not granted.persist:
        return own
    ceiling = _least(granted.delete_by_s, base.delete_by_s)
    idle = _least(granted.idle_s, base.idle_s)
    if idle is not None and ceiling is not None and idle >= ceiling:
        idle = None  # the ceiling comes first
    room = [size for size in (granted.max_bytes, base.max_bytes) if size is not None]
    verdict = replace(
        own,
        delete_by_s=ceiling,
        idle_s=idle,
        keep_at_least_s=min(granted.keep_at_least_s, base.keep_at_least_s),
        max_bytes=min(room, default=None),
        record=min(granted.record, base.record, key=lambda kind: kind.extent),
    )
    limits = [
        name
        for name, got, wanted in (
            ("delete_by", ceiling, own.delete_by_s),
            ("idle", idle, own.idle_s),
            ("keep_at_least", verdict.keep_at_least_s, own.keep_at_least_s),
            ("max_bytes", verdict.max_bytes, own.max_bytes),
            ("record", verdict.record, own.record),
        )
        if got != wanted
    ]
    why = _why(granted)
    if limits:
        why += f"; limited by rule {base.name!r} in {', '.join(limits)}"
    return _because(verdict, why)


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _why(rule: Rule) -> str:
    if rule.retention_class:
        return f"rule {rule.name!r} is the first of class {rule.retention_class!r} that matches"
    if rule.match == Match():
        return f"rule {rule.name!r} is for all that no other rule matches"
    return f"rule {rule.name!r} is the first that matches"


def _because(verdict: Verdict, why: str) -> Verdict:
    if not verdict.persist:
        outcome = "never written"
    else:
        outcome = (
            "kept without a ceiling"
            if verdict.delete_by_s is None
            else f"deleted {format_duration(verdict.delete_by_s)} after it was written"
        )
        if verdict.idle_s is not None:
            outcome += f", or {format_duration(verdict.idle_s)} after it was last used"
    sentence = f"{outcome}: {why}"
    return replace(verdict, reason=f"{sentence[0].upper()}{sentence[1:]}.")
