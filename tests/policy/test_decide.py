"""Decisions: the first rule that matches, and that a class only ever shortens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvvault.errors import PolicyError
from kvvault.policy.decide import Facts, Verdict, decide, explain, verdict_of
from kvvault.policy.document import Policy, Record
from kvvault.policy.patterns import matches_any
from tests.policy.support import REST, policy, source

INFINITE = float("inf")

# ------------------------------------------------------------------------------ properties

WORDS = st.sampled_from(["a", "b", "ab", "ba"])
PATTERNS = st.sampled_from(["*", "a", "b", "a*", "*b", "?", "ab"])
HOURS = st.integers(min_value=1, max_value=48)


@st.composite
def rules(draw: st.DrawFn) -> str:
    """The lines of a rule; not every one makes sense."""
    lines = [f"name: r{draw(st.integers(0, 10**6))}"]
    conditions = [
        f"  {key}: '{draw(PATTERNS)}'" for key in ("tenant", "model") if draw(st.booleans())
    ]
    if draw(st.booleans()):
        conditions.append(f"  labels: {{kind: '{draw(PATTERNS)}'}}")
    if conditions:
        lines += ["match:", *conditions]
    if draw(st.booleans()):
        lines.append(f"class: {draw(st.sampled_from(['x', 'y']))}")
    if draw(st.integers(0, 4)) == 0:
        return "\n".join([*lines, "persist: false"])
    ceiling = draw(HOURS)
    lines.append(f"delete_by: {ceiling}h" if draw(st.booleans()) else "delete_by: never")
    for key in ("idle", "keep_at_least"):
        if draw(st.booleans()):
            lines.append(f"{key}: {draw(st.integers(1, ceiling))}h")
    if draw(st.booleans()):
        lines.append(f"max_bytes: {draw(st.integers(1, 9))}GiB")
    lines.append(f"record: {draw(st.sampled_from(['none', 'fingerprint', 'preview']))}")
    return "\n".join(lines)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Sensible policies: rules that are refused beside those before them are left out."""
    last = "name: rest\ndelete_by: " + draw(st.sampled_from(["never", "48h", "6h"]))
    if draw(st.integers(0, 4)) == 0:
        last = "name: rest\npersist: false"
    kept: list[str] = []
    for rule in draw(st.lists(rules(), max_size=6)):
        try:
            Policy.parse(source(*kept, rule, last))
        except PolicyError:
            continue
        kept.append(rule)
    return Policy.parse(source(*kept, last))


FACTS = st.builds(
    Facts,
    tenant=WORDS,
    facts=st.one_of(st.just({}), st.builds(lambda word: {"model": word}, WORDS)),
    labels=st.one_of(st.just({}), st.builds(lambda word: {"kind": word}, WORDS)),
    retention_class=st.sampled_from([None, "x", "y", "z", "\x00 anything"]),
)


def ends(verdict: Verdict) -> tuple[float, float, float, float, int, bool]:
    """The more, the longer or the fuller something is kept, in six ways."""
    if not verdict.persist:
        return (0, 0, 0, 0, 0, False)
    ceiling = INFINITE if verdict.delete_by_s is None else verdict.delete_by_s
    return (
        ceiling,
        min(ceiling, INFINITE if verdict.idle_s is None else verdict.idle_s),
        verdict.keep_at_least_s,
        INFINITE if verdict.max_bytes is None else verdict.max_bytes,
        verdict.record.extent,
        True,
    )


@settings(max_examples=200, deadline=None)
@given(policies(), FACTS)
def test_what_a_request_asks_for_only_ever_shortens(sample: Policy, facts: Facts) -> None:
    asked = ends(decide(sample, facts))
    unasked = ends(decide(sample, Facts(facts.tenant, facts.facts, facts.labels)))
    assert all(got <= most for got, most in zip(asked, unasked, strict=True))


@settings(max_examples=200, deadline=None)
@given(policies(), FACTS)
def test_every_request_has_a_verdict_that_keeps_its_own_limits(
    sample: Policy, facts: Facts
) -> None:
    verdict = decide(sample, facts)
    assert decide(sample, facts) == verdict
    assert verdict.rule in {rule.name for rule in sample.rules}
    assert verdict.reason.endswith(".")
    assert verdict.reason.isprintable()
    ceiling = INFINITE if verdict.delete_by_s is None else verdict.delete_by_s
    assert verdict.keep_at_least_s <= ceiling
    assert verdict.idle_s is None or verdict.idle_s <= ceiling
    if not verdict.persist:
        assert ceiling == INFINITE
        assert (verdict.idle_s, verdict.keep_at_least_s, verdict.max_bytes) == (None, 0, None)
        assert verdict.record is Record.NONE
    if verdict.persist and verdict.delete_by_s is not None:
        assert sample.vault.window_s <= verdict.delete_by_s / 2


@settings(max_examples=200, deadline=None)
@given(policies(), FACTS)
def test_the_first_rule_that_matches_decides(sample: Policy, facts: Facts) -> None:
    """Against the rules' own words, without a class."""
    plain = Facts(facts.tenant, facts.facts, facts.labels)

    def fits(named: tuple[tuple[str, tuple[str, ...]], ...], values: dict[str, str]) -> bool:
        return all(name in values and matches_any(pats, values[name]) for name, pats in named)

    first = next(
        rule
        for rule in sample.rules
        if rule.retention_class is None
        and matches_any(rule.match.tenant or ("*",), plain.tenant)
        and fits(rule.match.facts, dict(plain.facts))
        and fits(rule.match.labels, dict(plain.labels))
    )
    assert decide(sample, plain) == verdict_of(first)
    tried = explain(sample, plain)
    assert tried[-1].rule == first
    assert [bool(one.obstacle) for one in tried] == [True] * (len(tried) - 1) + [False]


# ------------------------------------------------------------------------------- examples


def test_tenants_models_and_labels_all_have_to_match() -> None:
    sample = policy(
        "name: a\nmatch: {tenant: clinic-*, model: [x, y], labels: {kind: chat}}\ndelete_by: 1h",
        REST,
    )

    def rule(tenant: str = "clinic-1", model: str = "x", **labels: str) -> str:
        return decide(sample, Facts(tenant, {"model": model}, labels)).rule

    assert rule(kind="chat") == "a"
    assert rule(kind="chat", more="of it") == "a"
    assert rule(model="y", kind="chat") == "a"
    assert rule("Clinic-1", kind="chat") == "rest"
    assert rule(model="z", kind="chat") == "rest"
    assert rule(kind="mail") == "rest"
    assert rule() == "rest"
    obstacles = [
        explain(sample, facts)[0].obstacle
        for facts in (
            Facts("ward"),
            Facts("clinic-1"),
            Facts("clinic-1", {"model": "z"}),
            Facts("clinic-1", {"model": "x"}),
            Facts("clinic-1", {"model": "x"}, {"kind": "mail"}),
        )
    ]
    assert obstacles == [
        "the tenant does not match",
        "the namespace has no 'model'",
        "'model' of the namespace does not match",
        "there is no label 'kind'",
        "the label 'kind' does not match",
    ]


BRIEF = (
    "name: brief\nclass: brief\nmatch: {tenant: a}\ndelete_by: 12h\nidle: 6h\n"
    "keep_at_least: 3h\nrecord: preview"
)
CLASSES = (
    BRIEF,
    "name: gone\nclass: gone\npersist: false",
    "name: strict\nmatch: {labels: {strict: 'yes'}}\npersist: false",
    "name: short\nmatch: {labels: {short: 'yes'}}\ndelete_by: 1h\nmax_bytes: 1GiB",
    REST + "\nrecord: fingerprint\nkeep_at_least: 2h",
)


def test_a_class_that_is_granted() -> None:
    verdict = decide(policy(*CLASSES), Facts("a", retention_class="brief"))
    assert (verdict.rule, verdict.retention_class) == ("brief", "brief")
    assert (verdict.delete_by_s, verdict.idle_s) == (12 * 3600, 6 * 3600)
    assert (verdict.keep_at_least_s, verdict.record) == (2 * 3600, Record.FINGERPRINT)
    assert verdict.reason == (
        "Deleted 12h after it was written, or 6h after it was last used: rule 'brief' is the first "
        "of class 'brief' that matches; limited by rule 'rest' in keep_at_least, record."
    )


def test_a_class_under_a_shorter_rule_is_shortened() -> None:
    facts = Facts("a", labels={"short": "yes"}, retention_class="brief")
    verdict = decide(policy(*CLASSES), facts)
    assert (verdict.rule, verdict.delete_by_s, verdict.idle_s) == ("brief", 3600, None)
    assert (verdict.keep_at_least_s, verdict.max_bytes) == (0, 1 << 30)


def test_a_class_cannot_make_anything_persist_and_can_keep_it_from_persisting() -> None:
    strict = Facts("a", labels={"strict": "yes"}, retention_class="brief")
    verdict = decide(policy(*CLASSES), strict)
    assert (verdict.persist, verdict.rule, verdict.retention_class) == (False, "strict", "")
    assert "no retention class changes that" in verdict.reason
    gone = decide(policy(*CLASSES), Facts("a", retention_class="gone"))
    assert (gone.persist, gone.rule, gone.retention_class) == (False, "gone", "gone")


@pytest.mark.parametrize(
    ("tenant", "asked", "why"),
    [
        ("a", "canary", "there is no such retention class as was asked for"),
        ("a", "", "there is no such retention class as was asked for"),
        ("b", "brief", "the retention class that was asked for is not for this request"),
    ],
)
def test_a_class_that_is_not_granted_is_the_default_treatment(
    tenant: str, asked: str, why: str
) -> None:
    verdict = decide(policy(*CLASSES), Facts(tenant, retention_class=asked))
    assert (verdict.rule, verdict.retention_class, verdict.delete_by_s) == ("rest", "", 86400)
    assert verdict.reason.endswith(f"{why}.")
    assert "canary" not in verdict.reason


def test_reasons_and_reprs_name_nobody() -> None:
    canary = "canary-7"
    sample = policy(
        f"name: a\nmatch: {{tenant: {canary}, labels: {{kind: {canary}}}}}\ndelete_by: 1h", REST
    )
    facts = Facts(canary, {"model": canary}, {"kind": canary}, canary)
    said = [decide(sample, facts).reason, repr(facts), repr(explain(sample, facts))]
    assert canary not in " ".join(said)
    assert decide(sample, facts).rule == "a"
