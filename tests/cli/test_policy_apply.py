"""kvvault policy diff and apply, and what show and explain say of a vault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvvault.model import SystemClock
from kvvault.policy import shipped
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, NAMESPACE, TENANTS, run
from tests.cli.test_deleting import at_a_terminal
from tests.core.timed import policy

SIX = {"segments": 1, "blocks": 6, "bytes": 6 * BLOCK}
NONE = {"segments": 0, "blocks": 0, "bytes": 0}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Deletes all that one tenant has, and shortens what the other has."""
    path = tmp_path / "mine.yaml"
    rules = (f"match: {{tenant: {TENANTS[0]}}}, persist: false", "delete_by: 1h")
    path.write_text(policy(*rules).source, encoding="utf-8")
    return path


def described(place: Place) -> dict[str, Any]:
    """What lives, by id."""
    rows = run("ls", "segments", *place.flags, "--json").document["segments"]
    return {row["id"]: row for row in rows if row["state"] in ("open", "sealed")}


def hold(place: Place, tenant: str) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        vault.place_hold(tenant=tenant, reason="a case", actor="counsel")


def test_diff_changes_nothing_and_predicts_what_apply_does(place: Place, file: Path) -> None:
    before = described(place)
    predicted = run("policy", "diff", file, *place.flags, "--json")
    assert predicted.code == 0
    said = predicted.document
    assert (said["delete"], said["shorten"]) == (SIX, SIX)
    assert said["keep"] == said["lengthen"] == said["held"] == NONE
    assert [(rule["rule"], rule["delete"], rule["shorten"]) for rule in said["rules"]] == [
        ("rule-0", SIX, NONE),
        ("rule-1", NONE, SIX),
    ]
    assert described(place) == before
    applied = run("policy", "apply", file, *place.flags, "--yes", "--actor", "ops", "--json")
    assert applied.code == 0
    done = applied.document
    assert {name: done[name] for name in said} == said
    assert (done["applied"], done["number"], done["deleted"]) == (True, 2, SIX)
    left = described(place)
    assert set(left) == {one["id"] for one in said["changes"] if one["change"] != "delete"}
    assert set(before) - set(left) == {
        one["id"] for one in said["changes"] if one["change"] == "delete"
    }
    again = run("policy", "diff", file, *place.flags, "--json").document
    assert {one["change"] for one in again["changes"]} == {"keep"}
    assert [one["deadline"] for one in again["changes"]] == [
        one["deadline"] for one in said["changes"] if one["change"] == "shorten"
    ]
    status = run("status", *place.flags, "--json").document
    assert (status["policy"]["number"], status["policy"]["applied_by"]) == (2, "ops")
    assert status["policy"]["digest"] == said["new"]["digest"]


def test_what_a_hold_keeps_is_said_to_be_kept(place: Place, file: Path) -> None:
    hold(place, TENANTS[0])
    text = run("policy", "diff", file, *place.flags)
    assert text.code == 0
    assert "kept by holds, and deleted when these are cleared: 1 segment, 6 blocks" in text.out
    done = run("policy", "apply", file, *place.flags, "--yes", "--json").document
    assert (done["held"], done["keep"], done["delete"]) == (SIX, SIX, NONE)
    assert done["deleted"] == NONE
    assert len(described(place)) == 2


def test_text(place: Place, file: Path) -> None:
    shown = run("policy", "diff", file, *place.flags)
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["all", "delete", "1", "6", "24.0", "KiB"] in lines
    assert ["all", "lengthen", "0", "0", "0", "B"] in lines
    assert ["rule-0", "delete", "1", "6", "24.0", "KiB"] in lines
    assert ["rule-1", "shorten", "1", "6", "24.0", "KiB"] in lines
    dry = run("policy", "apply", file, *place.flags, "--dry-run")
    assert (dry.code, dry.out) == (0, shown.out)
    assert len(described(place)) == 2
    done = run("policy", "apply", file, *place.flags, "--yes")
    assert done.out.startswith(shown.out)
    assert "policy 2 is in force: test " in done.out
    assert "deleted 1 segment, 6 blocks (24.0 KiB)" in done.out
    assert "logical" in done.out  # the key is in a file


def test_without_a_terminal_it_has_to_be_confirmed(place: Place, file: Path) -> None:
    refused = run("policy", "apply", file, *place.flags)
    assert refused.code == 2
    assert "--yes" in refused.err
    assert run("policy", "apply", file, *place.flags, "--json").error["exit_code"] == 2
    assert len(described(place)) == 2
    assert run("status", *place.flags, "--json").document["policy"]["number"] == 1


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 130, 2), ("y", 0, 1)])
def test_on_a_terminal_it_asks(place: Place, file: Path, answer: str, code: int, left: int) -> None:
    asked = at_a_terminal(answer, "policy", "apply", str(file), *place.flags)
    assert "Put test in force, and delete 1 segment, 6 blocks (24.0 KiB)? [y/N]" in asked.err
    assert asked.code == code
    assert len(described(place)) == left


def test_more_than_half_needs_to_be_said(place: Place, file: Path) -> None:
    file.write_text(file.read_text().replace("delete_by: 1h", "persist: false"))
    planned = run("policy", "apply", file, *place.flags, "--dry-run", "--json").document
    assert planned["delete"]["segments"] == 2
    for flags in (["--yes"], ["--yes", "--json"]):
        refused = run("policy", "apply", file, *place.flags, *flags)
        assert refused.code == 2
        assert "--more-than-half" in refused.err + refused.out
    assert len(described(place)) == 2
    assert run("status", *place.flags, "--json").document["policy"]["number"] == 1
    assert run("policy", "apply", file, *place.flags, "--yes", "--more-than-half").code == 0
    assert not described(place)


def test_what_would_live_longer_is_in_the_question(place: Place, file: Path) -> None:
    file.write_text(file.read_text().replace("delete_by: 1h", "delete_by: 40d"))
    asked = at_a_terminal("n", "policy", "apply", str(file), *place.flags)
    assert "and keep 1 segment, 6 blocks (24.0 KiB) longer than" in asked.err
    assert asked.code == 130
    assert len(described(place)) == 2


def test_an_engine_that_is_at_work_follows(place: Place, file: Path) -> None:
    with Vault.open(place.path, provider=place.key) as engine:
        scopes = [engine.scope(tenant, NAMESPACE) for tenant in TENANTS]
        keys = [[f"{tenant}-{i}".encode() for i in range(6)] for tenant in TENANTS]
        assert all(engine.contains(scopes[0], keys[0]))
        assert run("policy", "apply", file, *place.flags, "--yes").code == 0
        buffers = [bytearray(BLOCK) for _ in range(6)]
        assert {outcome.value for outcome in engine.get(scopes[0], keys[0], buffers)} == {"miss"}
        assert {outcome.value for outcome in engine.get(scopes[1], keys[1], buffers)} == {"hit"}
        assert engine.put(scopes[0], [b"new"], [bytes(BLOCK)]).stored == 0
        assert engine.put(scopes[1], [b"new"], [bytes(BLOCK)]).stored == 1
        deadlines = [f.delete_by for f in engine.segments() if f.policy_no == 2]
        assert max(d for d in deadlines if d is not None) <= SystemClock().now() + 3600


def test_keys_in_memory_are_left_alone(memory: Path, file: Path) -> None:
    with Vault.create(memory / "in-memory", provider="ephemeral:"):
        for command in ("diff", "apply"):
            result = run("policy", command, file, "--vault", memory / "in-memory")
            assert result.code == 2
            result.assert_two_lines()


def test_a_bad_policy_changes_nothing(place: Place, file: Path) -> None:
    file.write_text(file.read_text().replace("delete_by: 1h", "delete_by: 1x"))
    result = run("policy", "apply", file, *place.flags, "--yes")
    assert result.code == 2
    result.assert_two_lines()
    assert f"{file}:" in result.err
    assert run("policy", "apply", "no-such-policy", *place.flags, "--yes").code == 2
    assert run("status", *place.flags, "--json").document["policy"]["number"] == 1


def test_show_and_explain_go_by_the_vault(place: Place, file: Path) -> None:
    default = shipped.load().digest.hex()
    assert run("policy", "show", "--json").document["digest"] == default
    assert run("policy", "show", *place.flags, "--json").document["digest"] == default
    run("policy", "apply", file, *place.flags, "--yes")
    mine = run("policy", "show", *place.flags, "--json").document
    assert (mine["policy"], mine["source"]) == ("test", file.read_text())
    asked = ("policy", "explain", "--tenant", TENANTS[0], "--json")
    assert run(*asked, *place.flags).document["verdict"]["rule"] == "rule-0"
    assert run(*asked).document["digest"] == default
    named = run(*asked, *place.flags, "--file", "gdpr-30d").document  # what is named comes first
    assert named["policy"] == "gdpr-30d"
