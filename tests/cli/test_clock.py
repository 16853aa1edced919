"""`kvvault clock show` and `kvvault clock accept`."""

from __future__ import annotations

from pathlib import Path

import pysqlite3.dbapi2 as sqlite
import pytest

from tests.cli.conftest import Place
from tests.cli.support import BLOCK, TENANTS, run
from tests.cli.test_deleting import DAY, aged, at_a_terminal, segments

WEEK = 7 * DAY
"""The default policy's clock_jump."""


def test_a_clock_that_is_believed(place: Place) -> None:
    shown = run("clock", "show", *place.flags, "--json")
    assert shown.code == 0
    assert shown.document["suspect"] is False
    assert shown.document["threshold_s"] == WEEK
    assert (shown.document["behind_s"], shown.document["waiting_segments"]) == (0, 0)
    text = run("clock", "show", *place.flags)
    assert text.code == 0
    assert "suspect     no" in text.out


@pytest.mark.parametrize(("days", "suspect"), [(6, False), (8, True)])
def test_a_jump_forward(memory: Path, tmp_path: Path, days: int, suspect: bool) -> None:
    place = aged(memory, tmp_path, days=days)
    shown = run("clock", "show", *place.flags, "--json")
    assert shown.code == (3 if suspect else 0)
    document = shown.document
    assert document["suspect"] is suspect
    # One that is believed is followed, so the vault is no longer behind it.
    assert document["ahead_s"] == pytest.approx(days * DAY if suspect else 0, abs=600)
    assert (document["vault_time"] < document["wall_clock"]) is suspect
    assert document["waiting_segments"] == (2 if suspect else 0)
    assert document["waiting_bytes"] == (12 * BLOCK if suspect else 0)
    text = run("clock", "show", *place.flags)
    assert ("kvvault clock accept" in text.out) is suspect
    assert len(segments(place)) == 2  # looking destroys nothing
    run("expire", *place.flags, "--yes")
    assert len(segments(place)) == (2 if suspect else 0)


def test_a_clock_that_is_behind(memory: Path, tmp_path: Path) -> None:
    place = aged(memory, tmp_path, days=-2)
    shown = run("clock", "show", *place.flags, "--json")
    assert shown.code == 0
    assert shown.document["behind_s"] == pytest.approx(2 * DAY, abs=600)
    assert shown.document["ahead_s"] == 0
    assert shown.document["vault_time"] > shown.document["wall_clock"]


def test_accepting_destroys_what_is_due(memory: Path, tmp_path: Path) -> None:
    place = aged(memory, tmp_path, days=30, hold=TENANTS[0])
    line = ("clock", "accept", *place.flags, "--json")
    looked = run(*line, "--dry-run")
    assert looked.code == 0
    assert (looked.document["accepted"], looked.document["waiting_segments"]) == (False, 1)
    unasked = run(*line)
    assert unasked.code == 2
    assert "--yes" in unasked.error["hint"]
    assert run("clock", "show", *place.flags).code == 3
    assert len(segments(place)) == 2
    done = run(*line, "--yes")
    assert done.code == 0
    assert done.document["accepted"] is True
    assert (done.document["expired_segments"], done.document["expired_bytes"]) == (1, 6 * BLOCK)
    assert set(segments(place)) == {TENANTS[0]}  # held
    assert run("clock", "show", *place.flags).code == 0  # and it stays accepted


def test_there_is_nothing_to_accept(place: Place) -> None:
    done = run("clock", "accept", *place.flags, "--json")
    assert done.code == 0
    assert done.document["accepted"] is False
    assert "not suspect" in run("clock", "accept", *place.flags).out
    assert len(segments(place)) == 2


@pytest.mark.parametrize(("answer", "code"), [("n", 130), ("y", 0)])
def test_accepting_is_asked_about_on_a_terminal(
    memory: Path, tmp_path: Path, answer: str, code: int
) -> None:
    place = aged(memory, tmp_path, days=30)
    asked = at_a_terminal(answer, "clock", "accept", *place.flags)
    assert asked.code == code
    assert "destroy 2 segments" in asked.err
    assert len(segments(place)) == (2 if code else 0)
    if code == 0:
        assert "the clock is accepted" in asked.out


def test_what_a_hold_on_a_person_keeps_waits_for_no_clock(filled: Place) -> None:
    held = run("hold", "set", "--tenant", TENANTS[0], "--subject", "jane", "--reason", "x",
               *filled.flags, "--json").document["hold"]["segments"]  # fmt: skip
    live = len(run("ls", "segments", *filled.flags, "--json").document["segments"])
    assert 0 < held < live
    back = 30 * DAY
    with sqlite.connect(str(filled.path / "catalog.sqlite3")) as connection:
        connection.execute(
            "UPDATE segments SET delete_by = delete_by - ?, created_at = created_at - ?",
            (back, back),
        )
        connection.execute(
            "UPDATE counters SET value = value - ? WHERE name = 'time_mark_ms'", (1000 * back,)
        )
    connection.close()
    shown = run("clock", "show", *filled.flags, "--json").document
    assert (shown["suspect"], shown["waiting_segments"]) == (True, live - held)
    plan = run("expire", "--dry-run", *filled.flags, "--json").document
    assert plan["waiting"]["segments"] == live - held
