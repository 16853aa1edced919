"""`kvvault hold set`, `clear` and `ls`."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from kvvault.model import Outcome
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, NAMESPACE, TENANTS, Result, run
from tests.cli.test_deleting import aged, at_a_terminal, segments


def place_hold(place: Place, *on: str) -> Result:
    return run("hold", "set", *on, "--reason", "case 4", *place.flags, "--json")


def clear_hold(place: Place, number: int, *more: str) -> Result:
    return run("hold", "clear", str(number), "--reason", "closed", *place.flags, "--json", *more)


def test_a_hold_is_placed_listed_and_cleared(place: Place) -> None:
    placed = place_hold(place, "--tenant", TENANTS[0])
    assert placed.code == 0
    hold = placed.document["hold"]
    assert (hold["kind"], hold["tenant"], hold["segments"]) == ("tenant", TENANTS[0], 1)
    me = pwd.getpwuid(os.getuid()).pw_name
    assert (hold["reason"], hold["actor"], hold["cleared_at"]) == ("case 4", me, None)
    assert run("hold", "ls", *place.flags, "--json").document == {"holds": [hold]}
    cleared = clear_hold(place, hold["number"], "--yes", "--actor", "counsel")
    assert cleared.code == 0
    assert set(cleared.document) == {"dry_run", "hold", "expired_segments", "expired_bytes"}
    assert cleared.document["expired_segments"] == 0
    assert run("hold", "ls", *place.flags, "--json").document == {"holds": []}
    [gone] = run("hold", "ls", "--all", *place.flags, "--json").document["holds"]
    assert (gone["cleared_by"], gone["cleared_reason"]) == ("counsel", "closed")
    assert gone["cleared_at"] is not None
    assert gone == cleared.document["hold"]
    assert len(segments(place)) == 2


def test_for_people(place: Place) -> None:
    mine = segments(place)[TENANTS[0]]
    on = ("--segment", mine[:10], "--reason", "case 4", "--actor", "counsel")
    placed = run("hold", "set", *on, *place.flags)
    assert placed.code == 0
    assert placed.out == "hold 1 is in force, keeping 6 blocks (24.0 KiB) now\n"
    listed = run("hold", "ls", *place.flags)
    assert listed.code == 0
    [row] = listed.out.splitlines()[1:]
    for text in ("segment", mine, TENANTS[0], "counsel", "case 4"):
        assert text in row
    line = ("hold", "clear", "1", "--reason", "closed", *place.flags)
    assert run(*line, "--dry-run").out.startswith("would clear hold 1; ")
    assert run(*line, "--yes").out.startswith("hold 1 is cleared; ")
    assert "closed" in run("hold", "ls", "--all", *place.flags).out


def test_held_past_the_deadline_it_is_kept_but_not_served(memory: Path, tmp_path: Path) -> None:
    place = aged(memory, tmp_path, days=2, hold=TENANTS[0])
    with Vault.open(place.path, provider=place.key) as engine:
        scope = engine.scope(TENANTS[0], NAMESPACE)
        buffer = bytearray(BLOCK)
        keys = [f"{TENANTS[0]}-0".encode()]
        assert engine.get(scope, keys, [buffer]) == [Outcome.MISS]
        assert not any(buffer)
        assert engine.put(scope, [b"new"], [bytes(BLOCK)]).stored == 1
        assert engine.get(scope, [b"new"], [buffer]) == [Outcome.HIT]  # held and in time
    before = segments(place)
    assert set(before) == {TENANTS[0]}  # opening has expired the other tenant's
    looked = clear_hold(place, 1, "--dry-run")
    assert looked.document["expired_segments"] == 1
    # What another hold keeps stays when this one is cleared.
    old = run("hold", "ls", *place.flags, "--json").document["holds"][0]
    assert old["segments"] == 2
    assert place_hold(place, "--tenant", TENANTS[0]).code == 0
    assert clear_hold(place, 1, "--dry-run").document["expired_segments"] == 0
    assert clear_hold(place, 1, "--yes").document["expired_segments"] == 0
    done = clear_hold(place, 2, "--yes")
    assert done.document["expired_segments"] == 1
    assert done.document["expired_bytes"] == 6 * BLOCK
    left = run("ls", "segments", *place.flags, "--json").document["segments"]
    assert [segment["blocks"] for segment in left] == [1]


def test_a_hold_is_on_one_thing_that_exists(place: Place) -> None:
    tenant = run("ls", "tenants", *place.flags, "--json").document["tenants"][0]["id"]
    mine = segments(place)[TENANTS[0]]
    for on in (
        (),
        ("--tenant", TENANTS[0], "--segment", mine),
        ("--tenant", "nobody"),
        ("--segment", "0" * 32),
        ("--segment", tenant),
        ("--segment", TENANTS[0]),
        ("--subject", "x"),  # to come
        ("--prompt", "x"),
    ):
        refused = place_hold(place, *on)
        assert refused.code == 2, on
        assert refused.out == ""
        assert TENANTS[0] not in refused.error["message"]
    assert run("rm", mine, *place.flags, "--yes").code == 0
    assert place_hold(place, "--segment", mine).code == 2
    assert run("hold", "ls", "--all", *place.flags, "--json").document == {"holds": []}


@pytest.mark.parametrize("text", [(), ("--reason", ""), ("--reason", "a\nb")])
def test_reasons_are_required(place: Place, text: tuple[str, ...]) -> None:
    assert place_hold(place, "--tenant", TENANTS[0]).code == 0
    for line in (("set", "--tenant", TENANTS[0]), ("clear", "1", "--yes")):
        refused = run("hold", *line, *text, *place.flags)
        assert refused.code == 2
        refused.assert_two_lines()
    assert len(run("hold", "ls", *place.flags, "--json").document["holds"]) == 1


@pytest.mark.parametrize("reason", ["\x01", "   ", "x" * 501])
def test_a_refusal_does_not_tell_whether_a_prompt_persists(filled: Place, reason: str) -> None:
    """Every answer to that is in the audit log; one that is not told needs none."""
    ident = run("prompts", "ls", "--json", *filled.flags).document["prompts"][0]["id"]
    before = log_size(filled)
    said = [
        run("hold", "set", "--prompt", one, "--reason", reason, *filled.flags)
        for one in (ident, "0" * 16)
    ]
    assert [one.code for one in said] == [2, 2]
    assert said[0].err == said[1].err
    assert log_size(filled) == before


def test_looking_for_a_prompt_to_hold_is_a_question(filled: Place) -> None:
    ident = run("prompts", "ls", "--json", *filled.flags).document["prompts"][0]["id"]
    for one, code in ((ident[:6], 0), ("0" * 16, 2)):
        assert run("hold", "set", "--prompt", one, "--reason", "x", *filled.flags).code == code
    with Vault.open(filled.path, provider=filled.key, read_only=True) as vault:
        told = [(e.kind, e.facts.get("command"), e.facts.get("rows")) for e in vault.audit.tail(3)]
    assert told == [
        ("question", "hold set", 1),
        ("hold-placed", None, None),
        ("question", "hold set", 0),
    ]


def log_size(place: Place) -> int:
    with Vault.open(place.path, provider=place.key, read_only=True) as vault:
        return len(vault.audit.tail(1000))


def test_clearing_what_is_not_in_force(place: Place) -> None:
    assert place_hold(place, "--tenant", TENANTS[0]).code == 0
    assert clear_hold(place, 2, "--yes").code == 2
    assert clear_hold(place, 1 << 64, "--yes").code == 2
    assert clear_hold(place, 1 << 64, "--dry-run").code == 2
    unasked = clear_hold(place, 1)
    assert unasked.code == 2
    assert "--yes" in unasked.error["hint"]
    assert len(run("hold", "ls", *place.flags, "--json").document["holds"]) == 1
    assert clear_hold(place, 1, "--yes").code == 0
    assert clear_hold(place, 1, "--yes").code == 2


@pytest.mark.parametrize(("answer", "code"), [("n", 130), ("y", 0)])
def test_clearing_is_asked_about_on_a_terminal(place: Place, answer: str, code: int) -> None:
    assert place_hold(place, "--tenant", TENANTS[0]).code == 0
    asked = at_a_terminal(answer, "hold", "clear", "1", "--reason", "closed", *place.flags)
    assert asked.code == code
    assert "Clear hold 1?" in asked.err
    left = run("hold", "ls", *place.flags, "--json").document["holds"]
    assert len(left) == (0 if code == 0 else 1)


@pytest.mark.parametrize("on", [("--tenant", "acme-canary"), ("--segment", "0000"), ()])
def test_a_subject_that_nobody_can_have(place: Place, on: tuple[str, ...]) -> None:
    """A variable that was not set: nothing would be held, and it would look as if."""
    result = run("hold", "set", *on, "--subject", "", "--reason", "x", *place.flags)
    assert result.code == 2
    result.assert_two_lines()
    assert run("hold", "ls", *place.flags, "--json").document["holds"] == []
