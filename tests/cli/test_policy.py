"""kvvault policy show, check, test, explain, schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvvault.policy import form, shipped
from tests.cli.support import run
from tests.policy.support import REST, source

VERDICT = {
    "persist",
    "delete_by_s",
    "idle_s",
    "keep_at_least_s",
    "max_bytes",
    "record",
    "class",
    "rule",
    "reason",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        source("name: clinics\nmatch: {tenant: clinic-*}\ndelete_by: 1h", REST), encoding="utf-8"
    )
    return path


def test_show(file: Path) -> None:
    default = run("policy", "show")
    assert default.code == 0
    assert "24h" in default.out
    assert "80% of the file system" in default.out
    mine = run("policy", "show", "--file", file)
    assert "tenant clinic-*" in mine.out
    assert run("policy", "show", "--file", file, "--source").out == file.read_text()


def test_show_json(file: Path) -> None:
    document = run("policy", "show", "--file", file, "--json").document
    assert set(document) == {"policy", "digest", "description", "vault", "rules", "source"}
    assert set(document["vault"]) == {
        "cap_bytes",
        "cap_fraction",
        "free_floor_bytes",
        "high_watermark",
        "low_watermark",
        "purge_interval_s",
        "segment_bytes",
        "window_s",
        "clock_jump_s",
    }
    clinics, rest = document["rules"]
    assert set(clinics) == {
        "name",
        "line",
        "class",
        "match",
        "persist",
        "delete_by_s",
        "idle_s",
        "keep_at_least_s",
        "max_bytes",
        "record",
        "owner",
        "justification",
    }
    assert clinics["match"] == {"tenant": ["clinic-*"], "namespace": {}, "labels": {}}
    assert rest["delete_by_s"] == 86400
    assert document["source"] == file.read_text()


def test_check(file: Path) -> None:
    good = run("policy", "check", file)
    assert good.code == 0
    assert "ok, 2 rules" in good.out
    assert set(run("policy", "check", file, "--json").document) == {
        "policy",
        "digest",
        "ok",
        "rules",
    }
    file.write_text(file.read_text().replace("delete_by: 1h", "delete_by: 1h\n    idle: 2h"))
    bad = run("policy", "check", file)
    assert bad.code == 2
    bad.assert_two_lines()
    assert f"{file}:8: 'idle' of rule 'clinics' is 2h" in bad.err
    error = run("policy", "check", file, "--json").error
    assert error["kind"] == "PolicyError"
    assert error["exit_code"] == 2


def test_every_shipped_policy_can_be_shown_and_checked() -> None:
    for name in shipped.names():
        assert run("policy", "check", name).code == 0
        assert run("policy", "show", "--file", name).code == 0


def test_test(file: Path) -> None:
    tests = file.with_name("mine.test.yaml")
    tests.write_text(
        "cases:\n  - name: clinics\n    tenant: clinic-1\n    expect: {rule: clinics}\n"
    )
    good = run("policy", "test", file.parent)
    assert good.code == 0
    assert "1 of 1 passed" in good.out
    assert "no test reaches: rest" in good.out
    tests.write_text(tests.read_text().replace("{rule: clinics}", "{rule: rest, delete_by: 24h}"))
    bad = run("policy", "test", tests)
    assert bad.code == 1
    assert "0 of 1 passed" in bad.out
    assert "delete_by is 1h, not 24h" in bad.out
    document = run("policy", "test", file.parent, "--json").document
    assert document["ok"] is False
    (suite,) = document["files"]
    assert set(suite) == {"file", "policy", "ok", "cases", "untested_rules"}
    (case,) = suite["cases"]
    assert set(case) == {"name", "line", "ok", "differences", "verdict"}
    assert set(case["verdict"]) == VERDICT


def test_test_of_what_is_shipped() -> None:
    result = run("policy", "test")
    assert result.code == 0
    assert len(result.out.splitlines()) == len(shipped.names())


def test_test_where_there_is_nothing(tmp_path: Path) -> None:
    result = run("policy", "test", tmp_path)
    assert result.code == 2
    result.assert_two_lines()


def test_explain(file: Path) -> None:
    said = run("policy", "explain", "--file", file, "--tenant", "clinic-1").out
    assert "rule 'clinics' is the first that matches" in said
    document = run("policy", "explain", "--file", file, "--tenant", "ward", "--json").document
    assert set(document) == {
        "policy",
        "digest",
        "verdict",
        "owner",
        "justification",
        "tried",
    }
    assert set(document["verdict"]) == VERDICT
    assert document["verdict"]["rule"] == "rest"
    assert document["tried"] == [
        {
            "rule": "clinics",
            "line": 5,
            "class": None,
            "matched": False,
            "why_not": "the tenant does not match",
        },
        {"rule": "rest", "line": 10, "class": None, "matched": True, "why_not": None},
    ]


def test_what_is_never_written_is_not_kept_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "kvvault: 1\nname: p\ndescription: d\nvault: {cap: 1GiB}\nrules:\n"
        "  - {name: no, persist: false, owner: officer, justification: No purpose needs it.}\n"
    )
    said = run("policy", "explain", "--file", file, "--tenant", "a")
    assert said.code == 0
    assert "never" not in said.out.replace("never written", "")
    shown = run("policy", "show", "--file", file).out
    assert "officer" in shown
    assert "No purpose needs it." in shown


def test_explain_takes_labels_facts_and_a_class() -> None:
    def rule(*arguments: str) -> str:
        result = run("policy", "explain", "--tenant", "a", "--json", *arguments)
        name = result.document["verdict"]["rule"]
        assert isinstance(name, str)
        return name

    assert rule("--file", "gdpr-30d", "--label", "data=special") == "special-categories"
    assert rule("--file", "gdpr-30d", "--class", "brief", "--fact", "kv.dtype=x") == "brief"
    assert rule("--file", "gdpr-30d", "--model", "m") == "personal"


@pytest.mark.parametrize("label", ["canary", "=canary", "a=canary"])
def test_labels_that_are_none_are_refused_and_not_repeated(label: str) -> None:
    result = run("policy", "explain", "--tenant", "a", "--label", label, "--label", "a=canary")
    assert result.code == 2
    result.assert_two_lines()
    assert "canary" not in result.err


def test_schema() -> None:
    assert json.loads(run("policy", "schema").out) == form.schema()
