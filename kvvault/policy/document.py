"""A policy: read, checked, frozen.

What is checked beyond the form of the file:

- every request has a verdict: a rule without a class matches everything, so it is the last of them;
- every rule can be reached, and no two apply to the same;
- a floor or a sliding deadline does not go beyond the ceiling, a window not beyond half of the
  shortest one;
- a class does not promise what it cannot give: it only ever shortens.

Errors name file and line, and quote no pattern: patterns can be tenants' names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvvault.policy.durations import format_duration, format_share
from kvvault.policy.form import MatchForm, PolicyForm, RuleForm, VaultForm, validated
from kvvault.policy.patterns import covers
from kvvault.policy.yamltext import Located, Path, read_yaml

__all__ = ["Match", "Policy", "Record", "Rule", "VaultLimits"]

_LONGEST_WINDOW_S: Final = 300.0
"""When none is written: more would save few segments and cost blocks their last minutes."""
_WINDOWS_PER_CEILING: Final = 10


class Record(StrEnum):
    """What is recorded of prompts, from the least to the most."""

    NONE = "none"
    FINGERPRINT = "fingerprint"
    PREVIEW = "preview"

    @property
    def extent(self) -> int:
        """0, 1, 2: for comparing."""
        return list(Record).index(self)


@dataclass(frozen=True, slots=True)
class VaultLimits:
    """What holds for the whole vault. Either `cap_bytes` or `cap_fraction` is set."""

    cap_bytes: int | None
    """Most that the vault may take."""
    cap_fraction: float | None
    """The same as a share of the file system's size, more than 0, at most 1."""
    free_floor_bytes: int
    """So much is left free on the file system."""
    high_watermark: float
    """Share of the cap at which eviction begins, more than `low_watermark`, at most 1."""
    low_watermark: float
    """Share of the cap at which it ends."""
    purge_interval_s: float
    segment_bytes: int | None
    """At which size a segment is sealed; None: as `VaultOptions` says."""
    window_s: float
    """How long a segment takes blocks; at most half of the shortest ceiling."""
    clock_jump_s: float
    """A clock that jumps ahead by more is asked about before anything expires by it."""

    def cap(self, file_system_bytes: int) -> int:
        """The cap in bytes, on a file system of that size."""
        if self.cap_bytes is not None:
            return self.cap_bytes
        return int((self.cap_fraction or 0.0) * file_system_bytes)


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule applies to: all that is set must hold. Patterns as in `patterns`; empty: any."""

    tenant: tuple[str, ...] = field(default=(), repr=False)
    facts: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)
    """(name of a namespace fact, patterns), sorted; the model is the fact ``model``."""
    labels: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)
    """(name of a label, patterns), sorted."""

    @property
    def everything(self) -> bool:
        """Whether it applies to whatever there can be."""
        return not self.facts and not self.labels and covers(self.tenant or ("*",), ("*",))

    def covers(self, other: Match) -> bool:
        """Whether it applies to everything that `other` applies to."""
        return (
            covers(self.tenant or ("*",), other.tenant or ("*",))
            and _named_cover(self.facts, other.facts)
            and _named_cover(self.labels, other.labels)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Durations in seconds, counted from when a block's segment was opened."""

    name: str
    match: Match
    retention_class: str | None
    """Only for requests that ask for this class."""
    persist: bool
    delete_by_s: float | None
    """The ceiling; None: there is none."""
    idle_s: float | None
    keep_at_least_s: float
    max_bytes: int | None
    """For one tenant's blocks under this rule."""
    record: Record
    owner: str
    justification: str
    line: int
    """Where it stands in the source, from 1."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy. Made by `parse` only, so whatever has one has a checked one."""

    name: str
    description: str = field(repr=False)
    source: str = field(repr=False)
    """The file, word for word."""
    digest: bytes = field(repr=False)
    """SHA-256 of `source` in UTF-8; 32 bytes."""
    rules: tuple[Rule, ...] = field(repr=False)
    vault: VaultLimits

    @classmethod
    def parse(cls, source: str, *, name: str = "policy") -> Policy:
        """Read a policy.

        :param name: what to call the file in errors.
        :raises PolicyError: it is not one, or it makes no sense; the message begins with
            ``name:line:``.
        """
        located = read_yaml(source, name=name)
        form = validated(PolicyForm, located)
        rules = tuple(_rule(index, rule, located) for index, rule in enumerate(form.rules))
        _check_names(rules, located)
        _check_order(rules, located)
        _check_classes(rules, located)
        return cls(
            name=form.name,
            description=form.description,
            source=source,
            digest=hashlib.sha256(source.encode()).digest(),
            rules=rules,
            vault=_limits(form.vault, rules, located),
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The retention classes that requests may ask for, sorted."""
        return tuple(sorted({rule.retention_class for rule in self.rules if rule.retention_class}))


# -- rules ---------------------------------------------------------------------------------------


def _rule(index: int, form: RuleForm, located: Located) -> Rule:
    path: Path = ("rules", index)
    if form.persist:
        ceiling = _check_times(path, form, located)
    else:
        ceiling = None
        for key in ("delete_by", "idle", "keep_at_least", "max_bytes", "record"):
            if getattr(form, key) not in (None, "none"):
                located.refuse(
                    (*path, key),
                    f"{key!r} makes no sense in rule {form.name!r}, which persists nothing",
                    hint="remove it, or persist: false",
                )
    return Rule(
        name=form.name,
        match=_match((*path, "match"), form.match, located),
        retention_class=form.retention_class,
        persist=form.persist,
        delete_by_s=ceiling,
        idle_s=form.idle,
        keep_at_least_s=form.keep_at_least or 0.0,
        max_bytes=form.max_bytes,
        record=Record(form.record or "none"),
        owner=form.owner,
        justification=form.justification,
        line=located.line(path),
    )


def _check_times(path: Path, form: RuleForm, located: Located) -> float | None:
    if form.delete_by is None:
        located.refuse(
            path,
            f"rule {form.name!r} has no 'delete_by'",
            hint="say how long, or write: delete_by: never",
        )
    if form.delete_by == "never":
        return None
    ceiling = form.delete_by
    for key, value in (("keep_at_least", form.keep_at_least), ("idle", form.idle)):
        if value is not None and value > ceiling:
            located.refuse(
                (*path, key),
                f"{key!r} of rule {form.name!r} is {format_duration(value)}, longer than its "
                f"'delete_by' of {format_duration(ceiling)}",
                hint="nothing outlives its ceiling; shorten it",
            )
    return ceiling


def _match(path: Path, form: MatchForm, located: Located) -> Match:
    facts = dict(form.namespace)
    if form.model is not None:
        if "model" in facts:
            located.refuse(
                (*path, "model"),
                "the model is matched here and under 'namespace'",
                hint="remove one of the two",
            )
        facts["model"] = form.model
    return Match(
        tenant=form.tenant or (),
        facts=tuple(sorted(facts.items())),
        labels=tuple(sorted(form.labels.items())),
    )


def _named_cover(
    wide: Sequence[tuple[str, tuple[str, ...]]], narrow: Sequence[tuple[str, tuple[str, ...]]]
) -> bool:
    inner = dict(narrow)
    return all(name in inner and covers(patterns, inner[name]) for name, patterns in wide)


def _check_names(rules: Sequence[Rule], located: Located) -> None:
    lines: dict[str, int] = {}
    for index, rule in enumerate(rules):
        if rule.name in lines:
            located.refuse(
                ("rules", index, "name"),
                f"a rule named {rule.name!r} stands in line {lines[rule.name]} already",
                hint="give each rule a name of its own",
            )
        lines[rule.name] = rule.line


def _check_order(rules: Sequence[Rule], located: Located) -> None:
    for index, rule in enumerate(rules):
        for earlier in rules[:index]:
            if earlier.retention_class != rule.retention_class:
                continue
            if not earlier.match.covers(rule.match):
                continue
            if rule.match.covers(earlier.match):
                problem = "matches exactly what"
                hint = "merge the two rules, or remove one"
            else:
                problem = "is never reached: it matches nothing that is not matched by"
                hint = "rules are tried in order; move it up, or remove it"
            located.refuse(
                ("rules", index),
                f"rule {rule.name!r} {problem} rule {earlier.name!r} in line {earlier.line}",
                hint=hint,
            )
    if not any(rule.match.everything for rule in _classless(rules)):
        located.refuse(
            ("rules", len(rules) - 1),
            "no rule is for all that the others leave",
            hint="add a last rule without 'match' and 'class'",
        )


def _classless(rules: Sequence[Rule]) -> Iterator[Rule]:
    return (rule for rule in rules if rule.retention_class is None)


def _check_classes(rules: Sequence[Rule], located: Located) -> None:
    """A class whose rule nobody can ever get the whole of would be a promise not kept."""
    kept = [rule for rule in _classless(rules) if rule.persist]
    longest = max((rule.delete_by_s or float("inf") for rule in kept), default=0.0)
    for index, rule in enumerate(rules):
        if rule.retention_class is None or not rule.persist:
            continue
        if not kept:
            located.refuse(
                ("rules", index, "class"),
                f"class {rule.retention_class!r} persists, and no rule without a class does",
                hint="a class only shortens; match on tenants or labels instead",
            )
        if (rule.delete_by_s or float("inf")) > longest:
            located.refuse(
                ("rules", index, "delete_by"),
                f"class {rule.retention_class!r} lasts longer than every rule without a class: "
                f"these end after {format_duration(longest)}",
                hint="a class only shortens; match on tenants or labels instead",
            )


# -- the vault -----------------------------------------------------------------------------------


def _limits(form: VaultForm, rules: Sequence[Rule], located: Located) -> VaultLimits:
    if form.low_watermark >= form.high_watermark:
        located.refuse(
            ("vault", "low_watermark" if "low_watermark" in form.model_fields_set
             else "high_watermark"),
            f"'low_watermark' is {format_share(form.low_watermark)} and 'high_watermark' "
            f"{format_share(form.high_watermark)}",
            hint="eviction begins at the high one and ends at the low one",
        )  # fmt: skip
    cap = form.cap
    if isinstance(cap, int) and form.segment is not None and form.segment > cap:
        located.refuse(
            ("vault", "segment"), "a segment is larger than the cap", hint="make it smaller"
        )
    ceilings = [rule.delete_by_s for rule in rules if rule.delete_by_s is not None]
    shortest = min(ceilings, default=None)
    window = form.window
    if window is None:
        window = _LONGEST_WINDOW_S
        if shortest is not None:
            window = min(window, shortest / _WINDOWS_PER_CEILING)
    elif shortest is not None and window > shortest / 2:
        located.refuse(
            ("vault", "window"),
            f"'window' is {format_duration(window)}, more than half of the shortest 'delete_by', "
            f"{format_duration(shortest)}",
            hint="blocks die up to a window early; shorten it, or leave it out",
        )
    return VaultLimits(
        cap_bytes=cap if isinstance(cap, int) else None,
        cap_fraction=None if isinstance(cap, int) else cap,
        free_floor_bytes=form.free_floor,
        high_watermark=form.high_watermark,
        low_watermark=form.low_watermark,
        purge_interval_s=form.purge_every,
        segment_bytes=form.segment,
        window_s=window,
        clock_jump_s=form.clock_jump,
    )
