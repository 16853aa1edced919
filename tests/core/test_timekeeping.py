"""The vault's own time: never back, not every jump forward, the same in every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.catalog import retention
from kvvault.testing import ManualClock
from kvvault.timekeeping import VaultTime
from kvvault.vault import Vault
from tests.core.support import Home, assert_hits, assert_missing, keys, namespace, put
from tests.core.timed import TimedHome, policy, report

START = 1_800_000_000.0
JUMP = 100.0
HOUR = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def time(clock: ManualClock) -> VaultTime:
    return VaultTime(clock, None, JUMP)


@pytest.fixture
def timed(home: Home) -> TimedHome:
    return TimedHome(home.path, first=policy("delete_by: 1h", clock_jump="10m"))


MAY_SHIFT = (
    subprocess.run(
        ["unshare", "--time", "--boottime", "5000", "true"], capture_output=True, check=False
    ).returncode
    == 0
)


# -- one process ---------------------------------------------------------------------------------


@pytest.mark.skipif(not MAY_SHIFT, reason="only who may make time namespaces can shift a clock")
def test_the_machines_clock_goes_on_while_the_machine_sleeps() -> None:
    """A machine that slept has the two clocks apart, as a namespace for times can have."""
    script = (
        "import time; from kvvault.model import SystemClock\n"
        "print(SystemClock().monotonic() - time.monotonic(), "
        "time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())"
    )
    done = subprocess.run(
        ["unshare", "--time", "--boottime", "5000", sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    ours, boottime = map(float, done.stdout.split())
    assert boottime > 4000  # the control: they are apart
    assert abs(ours - boottime) < 1


def test_a_new_vault_goes_by_the_wall_clock(clock: ManualClock, time: VaultTime) -> None:
    assert time.now() == time.steady() == START
    clock.advance(5)
    assert time.now() == time.steady() == START + 5
    assert not time.suspect
    assert time.ahead_s == 0


def test_a_clock_set_back_goes_on_at_its_real_pace(clock: ManualClock, time: VaultTime) -> None:
    clock.advance(7)
    clock.set_wall(START - 1000)
    assert time.now() == time.steady() == START + 7
    clock.advance(3)
    assert time.now() == time.steady() == START + 10
    clock.set_wall(START + 10 + JUMP)  # right again, and a little ahead
    assert time.now() == time.steady() == START + 10 + JUMP


def test_a_clock_set_back_before_the_first_look_gains_nothing(clock: ManualClock) -> None:
    """The mark was left by a process of before."""
    clock.set_wall(START - HOUR)
    time = VaultTime(clock, START, JUMP)
    assert time.now() == time.steady() == START


def test_what_now_has_said_is_not_taken_back(clock: ManualClock, time: VaultTime) -> None:
    """Lookups ask `now` alone; a block that they have missed must not be found again."""
    clock.set_wall(START + JUMP)
    assert time.now() == START + JUMP
    clock.set_wall(START)
    assert time.now() == START + JUMP


@pytest.mark.parametrize("ahead", [0.001, 1.0, JUMP])
def test_a_small_jump_is_followed(clock: ManualClock, time: VaultTime, ahead: float) -> None:
    clock.set_wall(START + ahead)
    assert not time.suspect
    assert time.steady() == time.now() == START + ahead
    clock.set_wall(START)  # and is not undone
    assert time.steady() == START + ahead


def test_a_large_jump_is_suspect(clock: ManualClock, time: VaultTime) -> None:
    clock.set_wall(START + JUMP + 1)
    assert time.suspect
    assert time.ahead_s == JUMP + 1
    assert time.now() == START + JUMP + 1  # to be on the safe side
    assert time.steady() == START  # nobody vouches for it
    clock.advance(2)
    assert time.now() == START + JUMP + 3
    assert time.steady() == START + 2
    clock.set_wall(START + 2)  # it comes back
    assert not time.suspect
    assert time.now() == time.steady() == START + 2


def test_an_accepted_jump_is_right(clock: ManualClock, time: VaultTime) -> None:
    clock.set_wall(START + HOUR)
    time.adopt(START + HOUR)
    assert not time.suspect
    assert time.steady() == time.now() == START + HOUR


def test_another_threshold_is_followed(clock: ManualClock, time: VaultTime) -> None:
    clock.set_wall(START + HOUR)
    assert time.steady() == START
    time.set_jump(HOUR)
    assert not time.suspect
    assert time.steady() == START + HOUR


def test_an_older_mark_is_not_adopted(clock: ManualClock, time: VaultTime) -> None:
    clock.advance(10)
    time.adopt(START + 9)
    assert time.steady() == START + 10
    time.adopt(START + 11)
    clock.advance(1)
    assert time.steady() == START + 12


EVENTS = st.one_of(
    st.tuples(st.just("advance"), st.integers(0, 1000)),
    st.tuples(st.just("set"), st.integers(-100_000, 100_000)),
    st.tuples(st.just("adopt"), st.integers(-100_000, 100_000)),
    st.tuples(st.just("look"), st.just(0)),
)


@given(st.lists(EVENTS, max_size=40))
def test_it_never_goes_back_and_never_stands_still(events: list[tuple[str, int]]) -> None:
    """`steady` grows by at least what really passed, and jumps by at most the threshold at a time
    or to a mark that somebody set; `now` is never behind it, nor behind the wall clock."""
    clock = ManualClock(START)
    time = VaultTime(clock, None, JUMP)
    last = time.steady()
    for what, amount in events:
        passed, allowed = 0.0, JUMP
        if what == "advance":
            clock.advance(amount)
            passed = float(amount)
        elif what == "set":
            clock.set_wall(START + amount)
        elif what == "adopt":
            time.adopt(START + amount)
            allowed = max(JUMP, START + amount - last + JUMP)
        now, steady = time.now(), time.steady()
        assert steady >= last + passed - 1e-6
        assert steady <= last + passed + allowed + 1e-6
        assert now >= steady
        assert now >= clock.now()
        assert time.suspect == (clock.now() > steady + JUMP)
        if not time.suspect:
            assert now == steady
        last = steady


# -- a vault -------------------------------------------------------------------------------------


def mark_of(vault: Vault) -> float:
    mark = vault._catalog.read(retention.get_mark)
    assert mark is not None
    return mark


def test_closing_leaves_the_time_behind(timed: TimedHome) -> None:
    """Else a clock that is set back before the next opening gains what passed since the last
    note."""
    with timed.create() as vault:
        timed.clock.advance(9)
        told = vault.time.now()
    timed.clock.set_wall(START - HOUR)
    with timed.open() as vault:
        assert vault.time.now() >= told
        assert vault.time.steady() >= told


def test_time_goes_on_from_where_it_was(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(3))
        timed.clock.advance(HOUR - 10)
        assert_hits(vault, scope, keys(3))
    timed.clock.set_wall(START)
    with timed.open() as vault:
        scope = vault.scope("alice", namespace())
        assert_hits(vault, scope, keys(3))  # ten seconds are left
        timed.clock.advance(10)
        assert_missing(vault, scope, keys(3))
        assert vault.expire().blocks == 3


def test_a_clock_set_back_revives_nothing(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(3))
        timed.clock.advance(HOUR)
        assert_missing(vault, scope, keys(3))
        timed.clock.set_wall(START)
        assert_missing(vault, scope, keys(3))
        assert vault.contains(scope, keys(3)) == [False] * 3
    with timed.open() as vault:
        assert not any(facts.state.live for facts in vault.segments())
        assert_missing(vault, vault.scope("alice", namespace()), keys(3))


def test_a_clock_set_back_after_a_kill_gains_no_more_than_the_interval(timed: TimedHome) -> None:
    """Killed: nothing is left behind but what was noted every ten seconds."""
    vault = timed.create()
    scope = vault.scope("alice", namespace())
    put(vault, scope, keys(3))
    for _ in range(100):
        timed.clock.advance(HOUR / 100)
        report(vault)
    noted = mark_of(vault)
    assert noted >= START + HOUR - HOUR / 100
    vault.close()


def test_a_suspect_clock_destroys_nothing_until_it_is_accepted(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(3))
        timed.clock.set_wall(START + 2 * HOUR)
        assert vault.time.suspect
        assert_missing(vault, scope, keys(3))
        assert vault.expire().segments == 0
    with timed.open() as vault:
        scope = vault.scope("alice", namespace())
        assert_missing(vault, scope, keys(3))
        assert vault.plan_expired().segments == ()
        assert [facts.blocks for facts in vault.segments() if facts.state.live] == [3]
        assert vault.accept_clock() == pytest.approx(2 * HOUR, abs=1)
        assert not vault.time.suspect
        assert vault.expire().blocks == 3
    assert timed.segment_files() == []


def test_a_suspect_clock_that_comes_back_has_cost_nothing(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(3))
        timed.clock.set_wall(START + 2 * HOUR)
        assert_missing(vault, scope, keys(3))
        timed.clock.set_wall(START)
        assert_hits(vault, scope, keys(3))


def test_what_could_not_be_served_is_not_stored_over_and_over(timed: TimedHome) -> None:
    """By a suspect clock a new block is past its deadline at once: storing it again and again would
    only fill the disk."""
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        timed.clock.set_wall(START + 2 * HOUR)
        for _ in range(5):
            report_ = put(vault, scope, keys(3))
            assert (report_.stored, report_.refused) == (0, 3)
        assert vault.segments() == []
        vault.accept_clock()
        assert put(vault, scope, keys(3)).stored == 3
        assert_hits(vault, scope, keys(3))


def test_what_has_no_deadline_is_stored_by_any_clock(home: Home) -> None:
    timed = TimedHome(home.path, first=policy("delete_by: never", clock_jump="10m"))
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        timed.clock.set_wall(START + 2 * HOUR)
        assert put(vault, scope, keys(3)).stored == 3
        assert_hits(vault, scope, keys(3))


def test_a_process_follows_a_clock_that_another_accepted(timed: TimedHome) -> None:
    with timed.create() as one, timed.open() as two:
        timed.clock.set_wall(START + 2 * HOUR)
        report(two)
        assert two.time.suspect
        one.accept_clock()
        report(two)
        assert not two.time.suspect
        assert two.time.steady() == START + 2 * HOUR


def test_an_accepted_clock_is_still_right_after_reopening(timed: TimedHome) -> None:
    with timed.create() as vault:
        timed.clock.set_wall(START + 2 * HOUR)
        vault.accept_clock()
    with timed.open() as vault:
        assert not vault.time.suspect
    timed.clock.set_wall(START)
    with timed.open() as vault:
        assert vault.time.now() >= START + 2 * HOUR


def test_a_policy_decides_what_is_a_jump(home: Home) -> None:
    timed = TimedHome(home.path, first=policy("delete_by: 1h", clock_jump="3h"))
    with timed.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(1))
        timed.clock.set_wall(START + 2 * HOUR)
        assert not vault.time.suspect
        assert vault.expire().blocks == 1


def test_all_that_is_written_down_is_by_the_vaults_own_time(home: Home, clock: ManualClock) -> None:
    """With a clock far ahead nothing is dated by it; also what is new."""
    with Vault.create(home.path, provider=home.provider, clock=clock) as vault:
        put(vault, vault.scope("alice", namespace()), keys(1))
        clock.advance(10)
        clock.set_wall(START + 365 * 24 * HOUR)
        assert vault.time.suspect
        other = namespace(model="another")
        put(vault, vault.scope("bob", other), keys(1))
        vault.place_hold(tenant="bob", reason="a case", actor="somebody")
        times = [entry.at for entry in vault.audit.tail(100)]
        assert times == sorted(times)
        assert times[-1] <= START + 20
        assert [facts.created_at <= START + 20 for facts in vault.tenants()] == [True] * 2
        assert [facts.created_at <= START + 20 for facts in vault.namespaces()] == [True] * 2
    with Vault.open(home.path, provider=home.provider, clock=clock) as again:
        put(again, again.scope("carol", namespace()), keys(1))
        times = [entry.at for entry in again.audit.tail(100)]
        assert times == sorted(times)
        assert times[-1] <= START + 40
