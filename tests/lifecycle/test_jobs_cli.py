"""`kvvault daemon`, `kvvault jobs ls` and `kvvault jobs run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvvault import layout
from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.lifecycle.runs import KEPT_RUNS
from kvvault.model import SystemClock
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import ROOT, Result, fill, finish, run, start
from tests.lifecycle.support import until

JOBS = ["expire", "evict", "purge", "scrub", "reconcile", "checkpoint"]
DAY_S = 86_400.0

FIELDS = {
    "name",
    "interval_s",
    "last_started_at",
    "last_success_at",
    "last_duration_s",
    "outcome",
    "detail",
    "running",
    "next_due_at",
    "overdue",
    "failing",
    "not_yet",
}


@pytest.fixture
def place(memory: Path, tmp_path: Path) -> Place:
    """A vault with something in it; its key is on another file system."""
    made = Place(memory / "vault", f"file:{tmp_path / 'key'}")
    with Vault.create(made.path, provider=made.key) as vault:
        fill(vault)
    return made


@pytest.fixture
def catalog(place: Place) -> Iterator[Catalog]:
    opened = Catalog.open(layout.catalog_path(place.path))
    yield opened
    opened.close()


def holder(catalog: Catalog) -> Lease:
    lease = Lease(catalog, SystemClock(), BootClock(layout.boot_id()))
    assert lease.acquire()
    return lease


def scrubbed(catalog: Catalog, days_ago: float) -> None:
    """Have the history say that all was authentic then; after a week all is checked again."""
    then = SystemClock().now() - days_ago * DAY_S
    catalog.write(
        lambda c: rows.add_run(c, "scrub", bytes(16), then, then + 1.0, "ok", "", KEPT_RUNS)
    )


def line_of(job: str, result: Result) -> str:
    """What `jobs ls` says of a job."""
    [line] = [line for line in result.out.splitlines() if line.split()[1:2] == [job]]
    return line


# -- jobs run, jobs ls ---------------------------------------------------------------------------


def test_a_job_is_run_and_then_listed(place: Place, catalog: Catalog) -> None:
    before = run("jobs", "ls", *place.flags, "--json")
    assert before.code == 0  # the vault was only just made: nothing is overdue yet
    assert set(before.document) == {"vault", "healthy", "jobs"}
    jobs = {job["name"]: job for job in before.document["jobs"]}
    assert list(jobs) == JOBS
    assert all(set(job) == FIELDS for job in jobs.values())
    assert jobs["scrub"]["last_started_at"] is None
    scrubbed(catalog, days_ago=8)
    done = run("jobs", "run", "scrub", *place.flags, "--json")
    assert done.code == 0
    assert set(done.document) == {"job", "started_at", "duration_s", "outcome", "detail"}
    assert done.document["outcome"] == "ok"
    assert "12 blocks" in done.document["detail"]
    after = run("jobs", "ls", *place.flags, "--json")
    assert after.code == 0
    jobs = {job["name"]: job for job in after.document["jobs"]}
    assert jobs["scrub"]["last_started_at"] == done.document["started_at"]
    assert [jobs["scrub"][name] for name in ("outcome", "overdue", "failing")] == [
        "ok",
        False,
        False,
    ]
    assert jobs["purge"]["last_started_at"] is None
    text = run("jobs", "ls", *place.flags)
    assert text.code == 0
    assert line_of("scrub", text).startswith("ok    scrub       last 2")
    assert line_of("purge", text).startswith("-     purge       last never")
    assert run("jobs", "run", "scrub", *place.flags).out.startswith("job scrub: ok in ")


@pytest.mark.parametrize("name", JOBS)
def test_every_job_can_be_run_by_itself(place: Place, name: str) -> None:
    done = run("jobs", "run", name, *place.flags, "--json")
    assert done.code == 0
    assert (done.document["job"], done.document["outcome"]) == (name, "ok")
    assert run("verify", *place.flags, "--json").document["blocks"] == 12  # all lives on


def test_a_failing_job_is_red(place: Place, catalog: Catalog) -> None:
    [file, *_] = sorted((place.path / "segments").glob("*.seg"))
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)
    scrubbed(catalog, days_ago=8)
    failed = run("jobs", "run", "scrub", *place.flags)
    assert failed.code == 1
    assert "1 altered" in failed.out
    listed = run("jobs", "ls", *place.flags)
    assert listed.code == 3
    assert line_of("scrub", listed).startswith("fail")
    assert line_of("expire", listed).startswith("-     expire")
    assert "1 altered" in listed.out
    assert run("jobs", "ls", *place.flags, "--json").document["healthy"] is False


def test_an_overdue_job_is_red(place: Place) -> None:
    long_ago = SystemClock().now() - 100 * DAY_S
    os.utime(place.path / "VAULT", (long_ago, long_ago))
    listed = run("jobs", "ls", *place.flags)
    assert listed.code == 3
    assert all("OVERDUE" in line_of(name, listed) for name in JOBS)
    assert "kvvault daemon" in listed.out
    assert run("jobs", "run", "scrub", *place.flags).code == 0
    listed = run("jobs", "ls", *place.flags)
    assert listed.code == 3
    assert "OVERDUE" not in line_of("scrub", listed)
    assert "OVERDUE" in line_of("purge", listed)


def test_while_another_process_runs_the_jobs(place: Place, catalog: Catalog) -> None:
    other = holder(catalog)
    refused = run("jobs", "run", "scrub", *place.flags)
    assert refused.code == 11
    refused.assert_two_lines()
    assert "--wait" in refused.err
    waiting = start("jobs", "run", "scrub", "--wait", *place.flags, "--json")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(2.0)
    other.release()
    assert finish(waiting).document["outcome"] == "ok"


def test_a_job_that_is_not_there(place: Place) -> None:
    result = run("jobs", "run", "nap", *place.flags)
    assert result.code == 2
    result.assert_two_lines()
    assert "scrub" in result.err


@pytest.mark.parametrize("command", [("daemon",), ("jobs", "run", "scrub")])
def test_keys_in_memory_are_left_alone(memory: Path, command: tuple[str, ...]) -> None:
    """Opening such a vault for writing would begin with new keys."""
    with Vault.create(memory / "v", provider="ephemeral:") as vault:
        fill(vault)
        result = finish(start(*command, "--vault", memory / "v"))
        assert result.code == 2
        result.assert_two_lines()
        assert vault.verify().ok


def test_daemon_and_jobs_need_a_vault(tmp_path: Path) -> None:
    for command in (("daemon",), ("jobs", "ls"), ("jobs", "run", "scrub")):
        result = finish(start(*command, "--vault", tmp_path / "none"))
        assert result.code == 10
        result.assert_two_lines()


# -- daemon --------------------------------------------------------------------------------------


@pytest.fixture
def daemon(place: Place, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def begin(*flags: str) -> Daemon:
        started.append(Daemon(place, tmp_path / f"log-{len(started)}", flags))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


class Daemon:
    """A daemon and what it has written to stderr so far."""

    def __init__(self, place: Place, log: Path, flags: tuple[str, ...]) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = start("daemon", *place.flags, *flags, stderr=stderr.fileno())

    def says(self, text: str) -> None:
        until(lambda: text in self.log.read_text() or self.process.poll() is not None)
        assert text in self.log.read_text()

    def end(self, number: int) -> Result:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=60)
        return Result(self.process.returncode, out, self.log.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_runs_the_jobs_until_it_is_told_to_stop(
    daemon: Callable[..., Daemon], catalog: Catalog, number: int
) -> None:
    one = daemon()
    for name in JOBS:
        one.says(f"job {name}: ok in ")
    result = one.end(number)
    assert result.code == 0
    assert result.out == ""
    assert result.err.splitlines()[-1] == "the daemon has stopped"
    assert len([line for line in result.err.splitlines() if line.startswith("job scrub:")]) == 1
    holder(catalog)  # it gave the lease up
    [written] = catalog.read(lambda c: rows.list_runs(c, "scrub"))
    assert written.outcome == "ok"


def test_a_daemon_speaks_json(daemon: Callable[..., Daemon]) -> None:
    one = daemon("--json")
    for name in JOBS:
        one.says(f'"job": "{name}"')
    result = one.end(signal.SIGTERM)
    first, second, *runs, last = [json.loads(line) for line in result.err.splitlines()]
    assert [event["event"] for event in (first, second, last)] == ["started", "leads", "stopped"]
    assert {event["event"] for event in runs} == {"run"}
    assert {event["job"] for event in runs} == set(JOBS)
    assert set(result.document) == {"vault", "runs", "not_ok"}
    assert (result.document["runs"], result.document["not_ok"]) == (len(runs), 0)


@pytest.mark.slow
def test_the_second_of_two_daemons_takes_over(
    daemon: Callable[..., Daemon], catalog: Catalog
) -> None:
    first = daemon()
    first.says("this process runs the jobs now")
    first.says("job scrub: ok")
    second = daemon()
    second.says("the daemon has started")
    first.process.kill()
    second.says("this process runs the jobs now")
    second.end(signal.SIGTERM)
    # The new leader knows from the history that the job is not due.
    assert len(catalog.read(lambda c: rows.list_runs(c, "scrub"))) == 1


def test_a_daemon_leaves_no_core(daemon: Callable[..., Daemon]) -> None:
    one = daemon()
    one.says("the daemon has started")
    limits = Path(f"/proc/{one.process.pid}/limits").read_text()
    [core] = [line for line in limits.splitlines() if line.startswith("Max core file size")]
    assert core.split()[4:6] == ["0", "0"]


def test_hardening_makes_a_process_undumpable() -> None:
    code = """
import ctypes, resource
from kvvault.lifecycle.daemon import harden_process
def state(): return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)
before = state()
harden_process()
print(before[0], *state()[:1], *state()[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "0", "0", "0"]
