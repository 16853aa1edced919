"""What the tests of the jobs share. Run as a program, it is a process that runs jobs on a catalog:

``python -m tests.lifecycle.support CATALOG LEASE_S INTERVAL_S [SECONDS]``, the last being how long
each run takes. It prints its lease's holder and goes on until its standard input ends.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvvault.catalog.catalog import Catalog
from kvvault.lifecycle.jobs import Job, JobContext
from kvvault.lifecycle.lease import BootClock
from kvvault.lifecycle.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
BOOT = "this boot"

PATIENCE_S = 180.0
"""After this long something hangs. Never part of what a test asserts."""


def until(happened: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "this never happened"
        time.sleep(0.01)


def start_worker(
    catalog: Path, lease_s: float, interval_s: float, takes_s: float = 0.0
) -> subprocess.Popen[str]:
    """Start a process that runs jobs."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.lifecycle.support",
            *map(str, (catalog, lease_s, interval_s, takes_s)),
        ],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def holder_of(worker: subprocess.Popen[str]) -> bytes:
    assert worker.stdout is not None
    return bytes.fromhex(worker.stdout.readline())


def main(path: str, lease_s: str, interval_s: str, takes_s: str) -> None:
    catalog = Catalog.open(Path(path))

    def run(context: JobContext) -> str:
        end = time.monotonic() + float(takes_s)
        while time.monotonic() < end:
            context.check()
            time.sleep(0.01)
        return "done"

    jobs = [Job(name, float(interval_s), run) for name in ("first", "second")]
    scheduler = Scheduler(catalog, jobs, BootClock(BOOT), lease_s=float(lease_s))
    scheduler.start()
    print(scheduler.holder.hex(), flush=True)
    sys.stdin.read()
    scheduler.stop()
    catalog.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
