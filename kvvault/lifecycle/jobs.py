"""What a job is, and the jobs that need nothing but what a vault offers.

A job is a name, an interval and a function. How often it runs, under which lease, and what is
written down about it is the business of `kvvault.lifecycle.scheduler` and `kvvault.lifecycle.runs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvvault.errors import (
    KeyUnavailableError,
    KvvaultError,
    OperationCancelledError,
    PartialError,
    VaultLockedError,
)
from kvvault.model import Clock, SegmentFacts, VerifyReport

__all__ = [
    "Job",
    "JobContext",
    "JobRefusedError",
    "checkpoint_job",
    "find_job",
    "sampling_scrub_job",
]

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_DAY_S = 86_400.0
_HOUR_S = 3_600.0
_IDS = 1 << 128
"""How many segment ids there are."""


class JobRefusedError(KvvaultError):
    """A job did not do its work on purpose: what it found forbids it (the clock has jumped). Its
    run is recorded as ``refused`` and not as a failure of the job; it counts as no success."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What a job is told when it runs."""

    clock: Clock
    last_success: float | None
    """When the newest run that succeeded began, by `clock`; None when none is known."""
    going_on: Callable[[], bool]
    """Whether to go on: False when the lease was lost or the process is being stopped. Memory
    only."""

    def check(self) -> None:
        """To be called between two pieces of work.

        Raises:
            OperationCancelledError: stop now; what was done so far stays done.
        """
        if not self.going_on():
            raise OperationCancelledError("the job was stopped", hint="it runs again next time")


@dataclass(frozen=True, slots=True)
class Job:
    """Work that is done again and again, by one process at a time."""

    name: str
    """``a-z``, ``0-9`` and ``-``."""
    interval_s: float
    """Seconds from one start to the next."""
    run: Callable[[JobContext], str]
    """Does the work and says in one line what it did: counts only, nothing secret or personal. May
    raise; then it runs again next time. Never runs twice at once."""
    due: Callable[[], bool] | None = None
    """Asked every `poll_s` seconds: whether to run now, before the interval has passed. Cheap, as
    nothing is written down about it (so a job can be a quarter of a second late at most without a
    history of four runs a second). Must turn False by running."""
    poll_s: float = 1.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError("a job's name is made of a-z, 0-9 and -")
        if not (self.interval_s > 0 and self.poll_s > 0):
            raise ValueError("a job's interval is positive")


def find_job(jobs: Sequence[Job], name: str) -> Job | None:
    return next((job for job in jobs if job.name == name), None)


# -- scrub ---------------------------------------------------------------------------------------


def sampling_scrub_job(
    live: Callable[[], Sequence[SegmentFacts]],
    check: Callable[[Sequence[bytes], Callable[[], None]], VerifyReport],
    *,
    interval_s: float = _HOUR_S,
    period_s: float = 7 * _DAY_S,
) -> Job:
    """Authenticate a part of the live segments each time, every one of them once per period.

    Segment ids are random, so a hand that goes round the ids once per period meets equally many in
    equal times. A run checks what the hand has passed since the last run that succeeded began. That
    needs no memory but the history of runs: restarts, missed runs and other processes leave no gap,
    and after more than a period everything is checked at once.

    :param live: the segments there are.
    :param check: authenticates the segments with these ids; calls the second argument between two
        of them, and lets it raise.
    """
    if not 0 < interval_s <= period_s:
        raise ValueError("a scrub's interval is no longer than its period")
    checked_until = -math.inf

    def run(context: JobContext) -> str:
        nonlocal checked_until
        now = context.clock.now()
        last = now - interval_s if context.last_success is None else context.last_success
        # Damage makes a run fail, but what it found need not be looked for again.
        since = max(last, checked_until)
        wanted = [
            facts.segment_id
            for facts in live()
            if facts.state.live and _passed(facts.segment_id, since, now, period_s)
        ]
        report = check(wanted, context.check)
        if not report.unreadable:
            checked_until = now
        return _judge(report)

    return Job("scrub", interval_s, run)


def _passed(segment_id: bytes, since: float, now: float, period_s: float) -> bool:
    """Whether the hand passes an id between two times. A clock that was set back passes none."""
    if now - since >= period_s:
        return True
    share = int.from_bytes(segment_id, "big") / _IDS
    # The hand's next visit at or after `since`: whole rounds so far, and the place in this one.
    rounds, place = divmod(since, period_s)
    visit = (rounds if share * period_s >= place else rounds + 1) * period_s + share * period_s
    return since <= visit < now


def _judge(report: VerifyReport) -> str:
    """
    Raises:
        PartialError: blocks were altered or lost.
        KeyUnavailableError: some could not be checked.
    """
    what = f"{report.blocks} blocks in {report.segments} segments checked"
    if report.tampered or report.lost:
        raise PartialError(
            f"{what}: {report.tampered} altered, {report.lost} lost, "
            f"{report.unreadable} not checkable",
            hint="run `kvvault verify`",
        )
    if report.unreadable:
        raise KeyUnavailableError(
            f"{what}: {report.unreadable} could not be checked",
            hint="check the key provider and the disk",
        )
    return f"{what}: all authentic" if report.blocks else "nothing was checked: no blocks were due"


# -- checkpoint ----------------------------------------------------------------------------------


def checkpoint_job(
    empty_log: Callable[[], bool],
    sign: Callable[[], object] | None = None,
    interval_s: float = _HOUR_S,
) -> Job:
    """Have a checkpoint of the audit log signed, and the catalog's write-ahead log emptied, so that
    deleted rows do not stay in it.

    :param empty_log: `Catalog.empty_log`.
    :param sign: `kvvault.audit.log.AuditLog.checkpoint`.
    """

    def run(context: JobContext) -> str:
        """
        Raises:
            VaultLockedError: it was not emptied.
            CatalogCorruptError: the audit log was altered since its newest checkpoint.
        """
        emptied = empty_log()  # whatever the audit log looks like
        if sign is not None:
            sign()
        if not emptied:
            raise VaultLockedError(
                "the catalog's log is in use and was not emptied", hint="it is tried again"
            )
        return "log emptied" if sign is None else "audit log signed, log emptied"

    return Job("checkpoint", interval_s, run)
