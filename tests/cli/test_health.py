"""What status and doctor say of policy, space, deadlines, jobs, clock and holds."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvvault.catalog import jobs as rows
from kvvault.catalog import space
from kvvault.doctor import Machine, diagnose
from kvvault.health import health_of
from kvvault.lifecycle.runs import KEPT_RUNS
from kvvault.model import SystemClock
from kvvault.policy import shipped
from kvvault.space import limits_of, surroundings
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import TENANTS, fill, run
from tests.core.timed import policy

DAY = 86_400.0


def status(place: Place, code: int = 0) -> dict[str, Any]:
    result = run("status", *place.flags, "--json")
    assert result.code == code
    return result.document


def finding(place: Place, machine: Machine, name: str, clock: Any = None) -> tuple[str, str]:
    found = diagnose(place.path, provider=place.key, surroundings=machine, clock=clock)
    [one] = [f for f in found if f.name == name]
    return one.status.value, one.what


def test_policy_and_deadline(place: Place, surroundings: Machine) -> None:
    document = status(place)
    default = shipped.load()
    assert document["policy"]["name"] == default.name
    assert document["policy"]["digest"] == default.digest.hex()
    assert document["healthy"] is True
    assert document["overdue_segments"] == 0
    with Vault.open(place.path, provider=place.key, read_only=True) as vault:
        first = min(f.deadline for f in vault.segments())
        assert health_of(vault, SystemClock()).deadlines.following == first
    text = run("status", *place.flags)
    assert text.code == 0
    assert f"1: default {default.digest.hex()[:12]}, applied 2" in text.out
    assert "overdue 0" in text.out
    assert "jobs        0 well, 6 not yet (none is overdue)" in text.out
    assert document["jobs"]["not_yet"] == [
        "expire",
        "evict",
        "purge",
        "scrub",
        "reconcile",
        "checkpoint",
    ]
    ls = run("jobs", "ls", *place.flags)
    assert ls.code == 0
    assert [line[0] for line in ls.out.splitlines()] == ["-"] * 6
    assert ls.out.count("not yet") == 6
    assert finding(place, surroundings, "policy")[0] == "ok"
    assert default.digest.hex()[:12] in finding(place, surroundings, "policy")[1]
    assert finding(place, surroundings, "deadlines")[0] == "ok"


def test_limits_that_are_reported_are_those_that_are_enforced(place: Place) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        vault.apply_policy(policy("delete_by: 1h", cap="9MiB", free_floor="3MiB"), actor="test")
    reported = status(place)["space"]
    assert (reported["cap_bytes"], reported["free_floor_bytes"]) == (9 << 20, 3 << 20)
    with Vault.open(place.path, provider=place.key, read_only=True) as vault:
        around = surroundings_of(vault)
        assert limits_of(vault.policy().vault, around).cap_bytes == reported["cap_bytes"]
        usage = vault.catalog.read(space.usage)
        seen = health_of(vault, SystemClock()).space
        assert seen.usage == usage
        assert usage.used >= 12 * 4096
        assert seen.used_bytes == usage.used + seen.around.catalog_bytes + seen.around.log_bytes
        assert not seen.above_cap
        assert not seen.below_floor


def surroundings_of(vault: Vault) -> space.Surroundings:
    return surroundings(vault.path)


def test_above_the_cap_and_below_the_floor(place: Place, surroundings: Machine) -> None:
    assert finding(place, surroundings, "cap and floor")[0] == "ok"
    with Vault.open(place.path, provider=place.key) as vault:
        vault.apply_policy(policy("delete_by: 1h", cap="10KiB"), actor="test")
    state, what = finding(place, surroundings, "cap and floor")
    assert state == "warn"
    assert what.startswith("above the cap")
    with Vault.open(place.path, provider=place.key) as vault:
        vault.apply_policy(policy("delete_by: 1h", free_floor="900TiB"), actor="test")
    state, what = finding(place, surroundings, "cap and floor")
    assert state == "warn"
    assert what.startswith("below the floor")


def test_what_lives_past_its_deadline_is_red(place: Place, surroundings: Machine) -> None:
    later = ManualClock(SystemClock().now() + 2 * DAY)
    with Vault.open(place.path, provider=place.key, read_only=True, clock=later) as vault:
        health = health_of(vault, later)
    assert health.deadlines.overdue == 2
    assert health.deadlines.following is None
    assert any("past their deadline" in text for text in health.problems)
    state, what = finding(place, surroundings, "deadlines", later)
    assert state == "fail"
    assert what.startswith("2 segments are past theirs")
    with Vault.open(place.path, provider=place.key) as vault:
        for tenant in TENANTS:
            vault.place_hold(tenant=tenant, reason="a case", actor="counsel")
    assert finding(place, surroundings, "deadlines", later)[0] == "ok"  # held: not overdue
    assert status(place)["holds"] == 2
    assert finding(place, surroundings, "holds") == ("ok", "2 in force")


def test_a_damaged_hold_is_red_until_it_is_cleared(place: Place, surroundings: Machine) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        for tenant in TENANTS:
            vault.place_hold(tenant=tenant, reason="a case", actor="counsel")
    assert (status(place)["holds"], status(place)["damaged_holds"]) == (2, 0)
    with closing(sqlite3.connect(place.path / "catalog.sqlite3")) as sql, sql:
        sql.execute("UPDATE holds SET target = x'00' WHERE hold_no = 1")
    document = status(place, code=3)
    assert (document["holds"], document["damaged_holds"], document["healthy"]) == (2, 1, False)
    assert "2 in force, 1 DAMAGED" in run("status", *place.flags).out
    state, what = finding(place, surroundings, "holds")
    assert (state, what.startswith("2 in force, 1 of them damaged")) == ("fail", True)
    listed = run("hold", "ls", *place.flags, "--json").document["holds"]
    assert [(one["kind"], one["target"], one["tenant"]) for one in listed] == [
        ("damaged", "", TENANTS[0]),
        ("tenant", listed[1]["target"], TENANTS[1]),
    ]
    assert "damaged" in run("hold", "ls", *place.flags).out
    for line in (("forget", TENANTS[0]), ("erase", "--tenant", TENANTS[0])):
        more = ("--reason", "over", "--yes", "--more-than-half", *place.flags)
        assert run(*line, *more).code == 3
    assert run("report", "retention", *place.flags).code in (0, 3)
    cleared = run("hold", "clear", "1", "--reason", "cannot be read", "--yes", *place.flags)
    assert (cleared.code, status(place)["damaged_holds"]) == (0, 0)
    assert finding(place, surroundings, "holds") == ("ok", "1 in force")
    assert "damaged" in run("hold", "ls", "--all", *place.flags).out


def test_a_failing_job_is_red(place: Place, surroundings: Machine) -> None:
    assert finding(place, surroundings, "jobs") == ("ok", "0 run, 6 not yet (none is overdue)")
    with Vault.open(place.path, provider=place.key) as vault:
        now = SystemClock().now()
        vault.catalog.write(
            lambda c: rows.add_run(
                c, "purge", bytes(16), now, now, "failed", "KeyUnavailableError: x", KEPT_RUNS
            )
        )
    document = status(place, code=3)
    jobs = document["jobs"]
    assert (jobs["healthy"], jobs["overdue"], jobs["failing"]) == (False, [], ["purge"])
    assert len(jobs["not_yet"]) == 5
    assert document["healthy"] is False
    assert any("purge failed" in text for text in document["warnings"])
    text = run("status", *place.flags)
    assert text.code == 3
    assert "NOT WELL: purge" in text.out
    assert finding(place, surroundings, "jobs")[0] == "fail"
    assert run("doctor", *place.flags).code == 1


def test_an_overdue_job_is_red(place: Place, surroundings: Machine) -> None:
    long_ago = SystemClock().now() - 100 * DAY
    os.utime(place.path / "VAULT", (long_ago, long_ago))
    document = status(place, code=3)
    assert document["jobs"]["overdue"] == [
        "expire",
        "evict",
        "purge",
        "scrub",
        "reconcile",
        "checkpoint",
    ]
    state, what = finding(place, surroundings, "jobs")
    assert state == "fail"
    assert "expire" in what


@pytest.mark.parametrize(("days", "suspect"), [(1, False), (400, True)])
def test_a_suspect_clock_is_red(
    place: Place, surroundings: Machine, days: float, suspect: bool
) -> None:
    later = ManualClock(SystemClock().now() + days * DAY)
    with Vault.open(place.path, provider=place.key, read_only=True, clock=later) as vault:
        health = health_of(vault, later)
    assert health.clock_suspect is suspect
    assert any("the clock is" in text for text in health.problems) is suspect
    if suspect:
        assert health.deadlines.overdue == 0  # by the vault's own time nothing is
    expected = "fail" if suspect else "ok"
    assert finding(place, surroundings, "vault time", later)[0] == expected


def test_what_is_set_aside_and_what_is_destroyed_are_named(tmp_path: Path) -> None:
    """The control: without either, neither word."""
    flags = ("--vault", tmp_path / "vault")
    with Vault.create(tmp_path / "vault", provider=f"file:{tmp_path / 'key'}") as vault:
        assert "set aside" not in run("status", *flags).out
        fill(vault)
        aside = run("status", *flags, "--json").document["space"]["pending_bytes"]
        assert aside > 0
        assert f"used, of it {aside} (" in run("status", *flags).out
    before = run("status", *flags).out
    assert "destroyed" not in before
    first = run("ls", "segments", *flags, "--json").document["segments"][0]["id"]
    assert run("rm", first, "--yes", "--more-than-half", *flags).code == 0
    after = run("status", *flags).out
    line = next(line for line in after.splitlines() if line.startswith("segments"))
    assert line.endswith("; 1 destroyed")
    assert "destroyed" not in line.partition(";")[0]
