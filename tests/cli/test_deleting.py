"""`kvvault rm`, `kvvault expire` and `kvvault forget`."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kvvault import layout
from kvvault.catalog import schema
from kvvault.catalog.catalog import Catalog
from kvvault.cli.commands.deleting import claim
from kvvault.crypto.providers import EphemeralProvider, open_provider
from kvvault.model import Outcome, SystemClock
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, NAMESPACE, ROOT, TENANTS, Result, fill, run

DAY = 86_400.0
"""The default policy's ceiling."""


def aged(memory: Path, tmp_path: Path, days: float, hold: str | None = None) -> Place:
    """A vault that was filled that long ago and not opened since; `hold` is a tenant with a hold on
    it. Its key is on another file system."""
    made = Place(memory / f"aged-{tmp_path.name}", f"file:{tmp_path / 'key'}")
    clock = ManualClock(SystemClock().now() - days * DAY)
    with Vault.create(made.path, provider=made.key, clock=clock) as vault:
        fill(vault)
        if hold is not None:
            vault.place_hold(tenant=hold, reason="case 4", actor="counsel")
    return made


def segments(place: Place) -> dict[str, str]:
    """Ids of the live segments by their tenant's name."""
    rows = run("ls", "segments", *place.flags, "--json").document["segments"]
    return {row["tenant"]: row["id"] for row in rows}


def deletions(place: Place) -> list[Any]:
    """What the catalog has written down: trigger, actor, reason, segments, blocks."""
    d = schema.deletions.c
    catalog = Catalog.open(layout.catalog_path(place.path), read_only=True)
    try:
        statement = select(d.trigger, d.actor, d.reason, d.segments, d.blocks)
        return [tuple(row) for row in catalog.read(lambda c: c.execute(statement).all())]
    finally:
        catalog.close()


def at_a_terminal(answer: str, *arguments: str) -> Result:
    """Run the program with a terminal as stdin, on which somebody answers."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvvault.cli", *arguments],
        cwd=ROOT,
        text=True,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    out, err = process.communicate(timeout=60)
    os.close(ours)
    return Result(process.returncode, out, err)


# -- rm ------------------------------------------------------------------------------------------


def test_rm(place: Place) -> None:
    mine = segments(place)
    done = run("rm", mine[TENANTS[0]][:10], *place.flags, "--yes", "--json", "--reason", "wrong")
    assert done.code == 0
    assert done.err == ""
    assert done.document["plan"][0]["id"] == mine[TENANTS[0]]
    assert [done.document[name] for name in ("segments", "blocks", "bytes")] == [1, 6, 6 * BLOCK]
    assert done.document["revoked_at"] is not None
    assert segments(place) == {TENANTS[1]: mine[TENANTS[1]]}
    me = pwd.getpwuid(os.getuid()).pw_name
    assert deletions(place) == [("rm", me, "wrong", 1, 6)]


def test_rm_for_people(place: Place) -> None:
    done = run("rm", segments(place)[TENANTS[0]], *place.flags, "--yes", "--actor", "ops")
    assert done.code == 0
    assert done.out.startswith("deleted 1 segment (6 blocks, 24.0 KiB)\n")
    assert deletions(place) == [("rm", "ops", "", 1, 6)]
    [receipt] = run("receipt", "ls", *place.flags, "--json").document["receipts"]
    assert f"receipt {receipt['id']}\n" in done.out
    assert "tenant's key" not in done.out
    gone = run("forget", TENANTS[0], "--reason", "left", *place.flags, "--yes")
    assert gone.code == 0
    assert gone.out.startswith("deleted 0 segments")
    assert "the tenant's key is destroyed\nunreadable through kvvault now; logical" in gone.out
    ids = {one["id"] for one in run("receipt", "ls", *place.flags, "--json").document["receipts"]}
    assert gone.out.splitlines()[-1].removeprefix("receipt ") in ids - {receipt["id"]}


def test_a_running_engine_serves_nothing_of_it(place: Place) -> None:
    mine = segments(place)
    with Vault.open(place.path, provider=place.key) as engine:
        scopes = [engine.scope(tenant, NAMESPACE) for tenant in TENANTS]
        assert run("rm", mine[TENANTS[0]], *place.flags, "--yes").code == 0
        outcomes = []
        for tenant, scope in zip(TENANTS, scopes, strict=True):
            buffer = bytearray(BLOCK)
            outcomes += engine.get(scope, [f"{tenant}-0".encode()], [buffer])
            assert any(buffer) is (tenant == TENANTS[1])
        assert outcomes == [Outcome.MISS, Outcome.HIT]


def test_rm_of_what_is_no_live_segment(place: Place) -> None:
    mine = segments(place)
    tenant = run("ls", "tenants", *place.flags, "--json").document["tenants"][0]["id"]
    assert run("rm", mine[TENANTS[0]], *place.flags, "--yes").code == 0
    for ident in (mine[TENANTS[0]], tenant, "0" * 32, TENANTS[1]):
        # Beside one that could be deleted: it is all or nothing.
        refused = run("rm", mine[TENANTS[1]], ident, *place.flags, "--yes", "--more-than-half")
        assert refused.code == 2
        refused.assert_two_lines()
        assert TENANTS[1] not in refused.err  # what is no id could be a name
    assert segments(place) == {TENANTS[1]: mine[TENANTS[1]]}


def test_more_than_half_needs_to_be_said(place: Place) -> None:
    mine = segments(place)
    refused = run("rm", *mine.values(), *place.flags, "--yes")
    assert refused.code == 2
    refused.assert_two_lines()
    assert "--more-than-half" in refused.err
    assert segments(place) == mine
    looked = run("rm", *mine.values(), *place.flags, "--dry-run", "--json")
    assert looked.document["more_than_half"] is True
    # The same one twice is one, and exactly half is not more than half.
    once = run("rm", mine[TENANTS[0]], mine[TENANTS[0]], *place.flags, "--yes", "--json")
    assert (once.code, once.document["segments"]) == (0, 1)
    assert once.document["more_than_half"] is False
    last = mine[TENANTS[1]]
    assert run("rm", last, *place.flags, "--yes").code == 2
    assert run("rm", last, *place.flags, "--yes", "--more-than-half").code == 0
    assert segments(place) == {}


def test_rm_leaves_what_a_hold_keeps(place: Place) -> None:
    mine = segments(place)
    placed = run("hold", "set", "--tenant", TENANTS[0], "--reason", "case 4", *place.flags)
    assert placed.code == 0
    refused = run("rm", mine[TENANTS[0]], *place.flags, "--yes")
    assert refused.code == 3
    refused.assert_two_lines()
    assert "kvvault hold ls" in refused.err
    assert segments(place) == mine
    partly = run("rm", *mine.values(), *place.flags, "--yes", "--more-than-half", "--json")
    assert partly.code == 3
    assert (partly.document["segments"], partly.document["held_segments"]) == (1, 1)
    assert [one["held"] for one in partly.document["plan"]] == [False, True]
    assert partly.error["kind"] == "HeldError"
    assert segments(place) == {TENANTS[0]: mine[TENANTS[0]]}


# -- forget --------------------------------------------------------------------------------------


def test_forget(place: Place) -> None:
    done = run("forget", TENANTS[0], "--reason", "left", *place.flags, "--yes", "--json")
    assert done.code == 0
    assert done.err == ""
    assert (done.document["segments"], done.document["blocks"]) == (1, 6)
    left = run("ls", "tenants", *place.flags, "--json").document["tenants"]
    assert [tenant["name"] for tenant in left] == [TENANTS[1]]
    me = pwd.getpwuid(os.getuid()).pw_name
    assert deletions(place) == [("forget", me, "left", 1, 6)]
    again = run("forget", TENANTS[0], "--reason", "left", *place.flags, "--yes")
    assert again.code == 2
    again.assert_two_lines()
    assert TENANTS[0] not in again.err


def test_forget_needs_a_reason_and_more_than_half_to_be_said(place: Place) -> None:
    mine = segments(place)
    for reason in ((), ("--reason", ""), ("--reason", "a\nb")):
        refused = run("forget", TENANTS[0], *reason, *place.flags, "--yes")
        assert refused.code == 2
        refused.assert_two_lines()
    assert run("rm", mine[TENANTS[1]], *place.flags, "--yes").code == 0
    refused = run("forget", TENANTS[0], "--reason", "left", *place.flags, "--yes")
    assert refused.code == 2
    assert "--more-than-half" in refused.err
    assert segments(place) == {TENANTS[0]: mine[TENANTS[0]]}
    arguments = ("--reason", "left", *place.flags, "--yes", "--more-than-half")
    assert run("forget", TENANTS[0], *arguments).code == 0
    assert segments(place) == {}


@pytest.mark.parametrize("on", ["tenant", "segment"])
def test_a_held_tenant_is_not_forgotten(place: Place, on: str) -> None:
    mine = segments(place)
    target = TENANTS[0] if on == "tenant" else mine[TENANTS[0]]
    assert run("hold", "set", f"--{on}", target, "--reason", "case 4", *place.flags).code == 0
    line = ("forget", TENANTS[0], "--reason", "left", *place.flags)
    assert run(*line, "--dry-run", "--json").document["refused"] is True
    refused = run(*line, "--yes")
    assert refused.code == 3
    refused.assert_two_lines()
    assert segments(place) == mine
    cleared = run("hold", "clear", "1", "--reason", "closed", *place.flags, "--yes")
    assert cleared.code == 0
    assert run(*line, "--dry-run", "--json").document["refused"] is False
    assert run(*line, "--yes").code == 0
    assert segments(place) == {TENANTS[1]: mine[TENANTS[1]]}


# -- expire --------------------------------------------------------------------------------------


def test_expire(memory: Path, tmp_path: Path) -> None:
    place = aged(memory, tmp_path, days=2)
    looked = run("expire", *place.flags, "--dry-run", "--json")
    assert looked.code == 0
    assert looked.document["segments"] == 2
    assert len(segments(place)) == 2
    done = run("expire", *place.flags, "--yes")
    assert done.code == 0
    assert done.err == ""
    assert done.out.startswith("deleted 2 segments (12 blocks, 48.0 KiB)\n")
    assert "more than half" in done.out  # it says so, and needs nothing
    assert segments(place) == {}
    assert [row[0] for row in deletions(place)] == ["expire"]


def test_nothing_expires_before_its_deadline(place: Place) -> None:
    done = run("expire", *place.flags, "--json")  # nothing to confirm either
    assert done.code == 0
    assert (done.document["segments"], done.document["plan"]) == (0, [])
    assert len(segments(place)) == 2


def test_expire_leaves_what_a_hold_keeps(memory: Path, tmp_path: Path) -> None:
    place = aged(memory, tmp_path, days=2, hold=TENANTS[0])
    done = run("expire", *place.flags, "--yes", "--json")
    assert done.code == 0  # a hold is no failure of what runs every night
    assert (done.document["segments"], done.document["held_segments"]) == (1, 1)
    assert "a hold keeps 1 segment" in done.err
    assert set(segments(place)) == {TENANTS[0]}


def test_expire_does_not_go_by_a_suspect_clock(memory: Path, tmp_path: Path) -> None:
    place = aged(memory, tmp_path, days=30)
    done = run("expire", *place.flags, "--yes", "--json")
    assert done.code == 3
    assert done.document["segments"] == 0
    assert done.document["clock_suspect"] is True
    assert done.document["waiting"] == {"segments": 2, "blocks": 12, "bytes": 12 * BLOCK}
    assert "kvvault clock accept" in done.err
    assert len(segments(place)) == 2


# -- all of them ---------------------------------------------------------------------------------


def lines(place: Place) -> list[tuple[str, ...]]:
    """Each way to delete something."""
    return [
        ("rm", segments(place)[TENANTS[0]]),
        ("forget", TENANTS[0], "--reason", "left"),
        ("expire",),
    ]


@pytest.mark.parametrize("index", range(3))
def test_dry_run_changes_nothing(memory: Path, tmp_path: Path, index: int) -> None:
    place = aged(memory, tmp_path, days=2)
    line = lines(place)[index]
    before = {file: file.read_bytes() for file in place.path.rglob("*") if file.is_file()}
    shown = run(*line, *place.flags, "--dry-run")
    assert shown.code == 0
    assert "would delete" in shown.out
    assert segments(place)[TENANTS[0]][:8] in shown.out
    for name in ("catalog.sqlite3", "segments"):
        for file, content in before.items():
            if name in str(file) and not file.name.endswith(("-shm", "-wal")):
                assert file.read_bytes() == content
    assert deletions(place) == []
    assert len(segments(place)) == 2


@pytest.mark.parametrize("index", range(3))
def test_without_a_terminal_it_needs_yes(memory: Path, tmp_path: Path, index: int) -> None:
    place = aged(memory, tmp_path, days=2)
    refused = run(*lines(place)[index], *place.flags)
    assert refused.code == 2
    refused.assert_two_lines()
    assert "--yes" in refused.err
    assert len(segments(place)) == 2


@pytest.mark.parametrize(("answer", "code"), [("n", 130), ("", 130), ("y", 0)])
def test_on_a_terminal_it_asks(place: Place, answer: str, code: int) -> None:
    mine = segments(place)
    asked = at_a_terminal(answer, "rm", mine[TENANTS[0]], *place.flags)
    assert "Delete 1 segment (6 blocks, 24.0 KiB)?" in asked.err
    assert asked.code == code
    assert (TENANTS[0] in segments(place)) is (code != 0)


def test_what_it_is_worth(place: Place) -> None:
    mine = segments(place)
    line: Sequence[str] = ("rm", mine[TENANTS[0]], *place.flags)
    document = run(*line, "--dry-run", "--json").document
    assert document["assurance"] == "logical"
    file = open_provider(place.key).describe()
    assert document["claim"] == claim(file)
    assert "logical" in claim(file)
    assert file.reason in claim(file)
    assert claim(file) in run(*line, "--yes").out
    memory = EphemeralProvider().describe()
    assert claim(memory).endswith("unrecoverable after the next purge")


@pytest.mark.parametrize(
    "line",
    [
        ("rm", "0123abcd", "--yes"),
        ("expire", "--yes"),
        ("expire", "--dry-run"),
        ("forget", TENANTS[0], "--reason", "left", "--yes"),
        ("hold", "set", "--tenant", TENANTS[0], "--reason", "case 4"),
        ("hold", "clear", "1", "--reason", "closed", "--yes"),
        ("clock", "accept", "--yes"),
    ],
)
def test_keys_in_memory_are_left_alone(memory: Path, tmp_path: Path, line: tuple[str, ...]) -> None:
    """Opening such a vault for writing would begin with new keys."""
    path = memory / f"ram-{tmp_path.name}"
    with Vault.create(path, provider="ephemeral:") as vault:
        fill(vault)
        refused = run(*line, "--vault", path)
        assert refused.code == 2
        refused.assert_two_lines()
        assert "in the memory of the process" in refused.err
        assert vault.verify().ok
        assert len(vault.segments()) == 2


@pytest.mark.parametrize(
    "line",
    [
        ("rm", "0123abcd"),
        ("expire",),
        ("forget", "acme", "--reason", "left"),
        ("hold", "set", "--tenant", "acme", "--reason", "case 4"),
        ("hold", "clear", "1", "--reason", "closed"),
        ("hold", "ls"),
        ("clock", "show"),
        ("clock", "accept"),
    ],
)
def test_they_need_a_vault(tmp_path: Path, line: tuple[str, ...]) -> None:
    refused = run(*line, "--vault", tmp_path / "none")
    assert refused.code == 10
    refused.assert_two_lines()
