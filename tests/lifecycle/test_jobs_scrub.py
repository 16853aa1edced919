"""Scrubbing: a part each time, every segment once per period, damage said loudly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.errors import KeyUnavailableError, OperationCancelledError, PartialError
from kvvault.lifecycle.jobs import JobContext, find_job, sampling_scrub_job
from kvvault.model import SegmentFacts, SegmentState, VerifyReport
from kvvault.testing import ManualClock
from kvvault.upkeep import jobs_of
from tests.core.support import Home, flip, keys, namespace, put

PERIOD = 700.0
HOUR = 100.0
DAY = 86_400.0


def facts(segment_id: bytes, state: SegmentState = SegmentState.SEALED) -> SegmentFacts:
    return SegmentFacts(
        segment_id=segment_id,
        tenant_id=bytes(16),
        namespace_digest=bytes(32),
        state=state,
        block_bytes=4096,
        blocks=1,
        created_at=0.0,
    )


def report(segments: int, *, tampered: int = 0, unreadable: int = 0) -> VerifyReport:
    return VerifyReport(segments, segments, segments * 4096, tampered, 0, unreadable, ())


class Part:
    """A sampling scrub that notes what it was asked to check."""

    def __init__(self, ids: Sequence[bytes], result: Callable[[int], VerifyReport] = report):
        self.result = result
        self.asked: list[bytes] = []
        self.job = sampling_scrub_job(
            lambda: [facts(i) for i in ids], self.check, interval_s=HOUR, period_s=PERIOD
        )

    def check(self, ids: Sequence[bytes], pause: Callable[[], None]) -> VerifyReport:
        self.asked += ids
        pause()
        return self.result(len(ids))

    def run(self, now: float, last: float | None) -> str:
        return self.job.run(context(now, last))


def context(now: float, last: float | None, going_on: bool = True) -> JobContext:
    return JobContext(ManualClock(now), last, lambda: going_on)


@given(
    ids=st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=30, unique=True),
    begin=st.floats(0, 2e9),
    gaps=st.lists(st.floats(0.01, PERIOD - 1), min_size=1, max_size=20),
)
def test_whenever_it_runs_nothing_waits_longer_than_a_period(
    ids: list[bytes], begin: float, gaps: list[float]
) -> None:
    """Each segment is checked once in any period's time, however irregular the runs and in
    whichever process."""
    times = list(itertools.accumulate(gaps, initial=begin))
    checked: dict[bytes, list[float]] = {i: [begin] for i in ids}
    for last, now in itertools.pairwise(times):
        part = Part(ids)  # a new process each time
        part.run(now, last)
        for i in part.asked:
            checked[i].append(now)
    span = max(gaps)
    for i in ids:
        seen = [*checked[i], times[-1]]
        waits = [b - a for a, b in itertools.pairwise(seen)]
        assert max(waits) <= PERIOD + span + 1e-3
        rounds = (times[-1] - begin) / PERIOD
        assert rounds - 1 <= len(checked[i]) - 1 <= rounds + 1


def test_a_run_takes_its_share() -> None:
    ids = [bytes([n]) + bytes(15) for n in range(0, 256, 2)]
    part = Part(ids)
    part.run(10 * PERIOD, None)
    assert 16 <= len(part.asked) <= 20  # of 128, a seventh
    late = Part(ids)
    late.run(10 * PERIOD, 8 * PERIOD)
    assert late.asked == ids


def test_only_what_lives_is_checked() -> None:
    asked: list[bytes] = []
    every = [facts(bytes([n]) * 16, state) for n, state in enumerate(SegmentState)]

    def check(ids: Sequence[bytes], pause: Callable[[], None]) -> VerifyReport:
        asked.extend(ids)
        return report(len(ids))

    job = sampling_scrub_job(lambda: every, check, interval_s=HOUR, period_s=PERIOD)
    job.run(context(5e5, 0.0))
    assert asked == [bytes(16), bytes([1]) * 16]  # open and sealed


def test_damage_fails_the_run_and_is_not_looked_for_again() -> None:
    ids = [bytes([n]) + bytes(15) for n in range(256)]
    part = Part(ids, lambda n: report(n, tampered=2))
    now = 10 * PERIOD
    with pytest.raises(PartialError, match="2 altered"):
        part.run(now, now - HOUR)
    first = set(part.asked)
    part.asked.clear()
    part.result = report
    assert "all authentic" in part.run(now + HOUR, now - HOUR)  # the last success, by the history
    assert first
    assert not first & set(part.asked)


def test_what_could_not_be_checked_is_checked_again() -> None:
    ids = [bytes([n]) + bytes(15) for n in range(256)]
    part = Part(ids, lambda n: report(n, unreadable=n))
    now = 10 * PERIOD
    with pytest.raises(KeyUnavailableError):
        part.run(now, now - HOUR)
    first = set(part.asked)
    part.asked.clear()
    part.result = report
    part.run(now + HOUR, now - HOUR)
    assert first < set(part.asked)


def test_a_clock_that_was_set_back_checks_nothing_twice() -> None:
    part = Part([bytes([n]) + bytes(15) for n in range(256)])
    part.run(10 * PERIOD, 10 * PERIOD + 50.0)
    assert part.asked == []


def test_it_stops_when_it_is_told_to() -> None:
    part = Part([bytes(16)])
    with pytest.raises(OperationCancelledError):
        part.job.run(context(1.0, None, going_on=False))
    with pytest.raises(ValueError, match="period"):
        sampling_scrub_job(list, part.check, interval_s=2.0, period_s=1.0)


def test_a_vault_is_scrubbed(memory: Path) -> None:
    home = Home(memory / "vault")
    now, long_ago = 100 * DAY, 90 * DAY  # longer than a week: everything is due
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(8))
        job = find_job(jobs_of(vault), "scrub")
        assert job is not None
        with pytest.raises(OperationCancelledError):
            job.run(context(now, long_ago, going_on=False))
        assert job.run(context(now, long_ago)) == "8 blocks in 2 segments checked: all authentic"
        assert job.run(context(now, now)) == "nothing was checked: no blocks were due"
    [file, _] = home.segment_files()
    file.write_bytes(flip(file.read_bytes(), 8 * 5000))
    with home.open() as vault:
        job = find_job(jobs_of(vault), "scrub")
        assert job is not None
        with pytest.raises(PartialError, match="1 altered"):
            job.run(context(now, long_ago))
