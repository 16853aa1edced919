"""Tests of policies as operators write them, and the policies that come with kvvault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvvault.errors import PolicyError
from kvvault.policy import cases, form, shipped
from kvvault.policy.cases import Suite
from kvvault.policy.decide import Facts, decide
from kvvault.policy.durations import parse_duration
from kvvault.policy.patterns import covers
from tests.policy.support import REST, policy, source

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (
    "day-24h",
    "default",
    "ephemeral-5m",
    "gdpr-30d",
    "regulated",
    "session-1h",
    "zero-retention",
)

# --------------------------------------------------------------------------------- shipped


def test_these_are_shipped() -> None:
    assert shipped.names() == SHIPPED
    assert shipped.directory() == ROOT / "policies"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_passes_its_tests_and_every_rule_is_tested(name: str) -> None:
    outcome = cases.run_file(ROOT / "policies" / f"{name}.test.yaml")
    assert outcome.policy == name == shipped.load(name).name
    assert [(one.case.name, one.differences) for one in outcome.outcomes if not one.passed] == []
    assert outcome.untested == ()
    assert outcome.passed


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_explains_itself(name: str) -> None:
    read = shipped.load(name)
    comments = [line for line in read.source.splitlines() if line.lstrip().startswith("#")]
    assert len(comments) >= 5
    assert read.source.startswith("# ")


@pytest.mark.parametrize("name", [name for name in SHIPPED if any(c.isdigit() for c in name)])
def test_a_name_that_says_a_time_keeps_to_it(name: str) -> None:
    limit = parse_duration(name.rpartition("-")[2])
    for rule in shipped.load(name).rules:
        lives = [s for s in (rule.delete_by_s, rule.idle_s) if s is not None]
        assert not rule.persist or min(lives) <= limit


def test_without_configuration_there_is_a_ceiling_a_cap_and_a_floor() -> None:
    default = shipped.load()
    verdict = decide(default, Facts("anybody"))
    assert verdict.persist
    assert verdict.delete_by_s == 24 * 3600
    assert default.vault.cap(1000) == 800
    assert default.vault.free_floor_bytes > 0


def test_a_shipped_policy_is_found_by_name_and_a_file_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(source(REST))
    assert shipped.find("default") is shipped.load("default")
    assert shipped.find(str(file)).name == "sample"
    with pytest.raises(PolicyError, match="no policy named 'nope' comes with kvvault"):
        shipped.find("nope")
    with pytest.raises(PolicyError, match="cannot be read: no such file"):
        shipped.find(str(tmp_path / "nope.yaml"))


@pytest.mark.parametrize("kind", ["directory", "latin-1", "large", "nul"])
def test_what_is_no_policy_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "p.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "latin-1":
        path.write_bytes(b"name: \xe9\n")
    elif kind == "large":
        path.write_bytes(b"#" * ((1 << 20) + 1))
    else:
        path = tmp_path / "a\0b.yaml"
    with pytest.raises(PolicyError):
        shipped.read(path)


def test_the_schema_is_up_to_date() -> None:
    written = (ROOT / "policies" / "policy.schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == form.schema(), (
        "run: kvvault policy schema > policies/policy.schema.json"
    )


def test_the_schema_knows_every_key_and_refuses_others() -> None:
    schema = form.schema()
    assert set(schema["properties"]) == {"kvvault", "name", "description", "vault", "rules"}
    assert schema["additionalProperties"] is False
    rule = schema["$defs"]["RuleForm"]
    assert {"owner", "justification"} <= set(rule["required"])
    assert "class" in rule["properties"]
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
    assert "null" not in json.dumps(schema)


# ----------------------------------------------------------------------------- test files

CASE = """\
cases:
  - name: a chat
    tenant: a
    model: x
    namespace: {kv.dtype: bfloat16}
    labels: {kind: chat}
    class: brief
    expect:
"""
SAMPLE = policy(
    "name: chats\nclass: brief\nmatch: {model: x, labels: {kind: chat}}\ndelete_by: 1h",
    REST + "\nidle: 12h\nkeep_at_least: 1h\nmax_bytes: 1GiB\nrecord: preview",
)


def run(expect: str) -> tuple[str, ...]:
    text = CASE + "".join(f"      {line}\n" for line in expect.splitlines())
    return Suite.parse(text, name="t").run(SAMPLE).outcomes[0].differences


def test_what_is_expected_is_compared() -> None:
    good = (
        "rule: chats\npersist: true\ndelete_by: 60m\nidle: never\nkeep_at_least: none\n"
        "max_bytes: 1024MiB\nrecord: none\nclass: brief\nreason: first of class"
    )
    assert run(good) == ()
    bad = (
        "rule: rest\npersist: false\ndelete_by: never\nidle: 1h\nkeep_at_least: 5m\n"
        "max_bytes: none\nrecord: preview\nclass: none\nreason: moon"
    )
    differences = run(bad)
    assert differences[:-1] == (
        "delete_by is 1h, not never",
        "idle is never, not 1h",
        "keep_at_least is none, not 5m",
        "max_bytes is 1GiB, not none",
        "persist is true, not false",
        "record is none, not preview",
        "class is brief, not none",
        "rule is chats, not rest",
    )
    assert "without 'moon'" in differences[-1]


def test_what_is_not_expected_is_not_looked_at() -> None:
    assert run("rule: chats") == ()


def test_rules_that_no_case_reaches_are_told() -> None:
    suite = Suite.parse(CASE + "      rule: chats\n", name="t").run(SAMPLE)
    assert suite.passed
    assert suite.untested == ("rest",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cases: []\n", "t:1: 'cases' is empty"),
        (CASE, "t:8: no value stands here"),
        (CASE + "      persist: true\n", "t:8: 'rule' is missing"),
        (CASE + "      rule: chats\n      idel: 5m\n", "t:10: unknown key 'idel'"),
        (CASE + "      rule: chats\n      idle: soon\n", "t:10: 'idle': 'soon' is not a duration"),
        (CASE.replace("tenant: a", "tenant: true") + "      rule: chats\n", "t:3: 'tenant': write"),
        (CASE.replace("    tenant: a\n", "") + "      rule: chats\n", "t:2: 'tenant' is missing"),
    ],
)
def test_a_test_file_that_makes_no_sense(text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Suite.parse(text, name="t")
    assert str(caught.value).startswith(problem)


def test_a_test_file_may_name_its_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(source(REST))
    case = "cases:\n  - name: all\n    tenant: a\n    expect: {rule: rest}\n"
    (tmp_path / "mine.test.yaml").write_text(case)
    (tmp_path / "other.test.yaml").write_text(f"policy: mine.yaml\n{case}")
    outcomes = list(cases.run_directory(tmp_path))
    assert [(o.policy, o.passed) for o in outcomes] == [("sample", True), ("sample", True)]
    (tmp_path / "lost.test.yaml").write_text(case)
    with pytest.raises(PolicyError, match=r"lost\.yaml cannot be read"):
        list(cases.run_directory(tmp_path))


def test_a_directory_without_tests_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there are no tests"):
        list(cases.run_directory(tmp_path))


def test_a_policy_is_no_file_of_its_tests(tmp_path: Path) -> None:
    policy, tests = tmp_path / "mine.yaml", tmp_path / "mine.test.yaml"
    policy.write_text(source(REST))
    tests.write_text("cases:\n  - name: all\n    tenant: a\n    expect: {rule: rest}\n")
    with pytest.raises(PolicyError, match=r"names end in \.test\.yaml") as caught:
        list(cases.run_directory(policy))
    assert "NAME.test.yaml" in str(caught.value.hint)
    assert [outcome.passed for outcome in cases.run_directory(tests)] == [True]


def test_the_last_shipped_rule_is_for_everything() -> None:
    for name in SHIPPED:
        last = shipped.load(name).rules[-1]
        assert last.match.everything
        assert covers(last.match.tenant or ("*",), ("*",))
