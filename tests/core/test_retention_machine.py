"""Retention against a model: any history of stores, use, clocks, holds, policies and restarts.

Two clocks disagree in general: the one that a vault believes and the one that really passes. The
promise is about the real one. A clock that jumps ahead by less than the policy's threshold is
believed, and by that blocks die early; so the model knows for each block the earliest moment, by
the time the vaults believe, and the latest, by the time that really passed.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvvault.errors import HeldError
from kvvault.model import Outcome, SegmentFacts
from kvvault.vault import Scope, Vault
from kvvault.watching import mark_time
from tests.core.support import BLOCK, ZERO, content, get, key, namespace, segment_of
from tests.core.timed import TimedHome, clear_hold, hold, policy, put_in_force, report

SHM = Path("/dev/shm")
JUMP = 600.0
WINDOW = 30.0
POLICIES = (
    policy(
        "match: {tenant: carol}, persist: false",
        "class: brief, delete_by: 5m",
        "match: {tenant: bob}, delete_by: 1h, idle: 10m",
        "delete_by: 30m",
        window="30s",
        clock_jump="10m",
    ),
    policy(
        "match: {tenant: carol}, delete_by: 2h",
        "class: brief, delete_by: 5m",
        "delete_by: 20m",
        window="30s",
        clock_jump="10m",
    ),
)
TENANTS = ("alice", "bob", "carol")
CLASSES = (None, "brief")
HANDLES = st.sampled_from((0, 1))
PICKS = st.lists(st.integers(0, 7), min_size=1, max_size=5)
SCOPES = st.tuples(st.sampled_from(TENANTS), st.sampled_from(CLASSES))
REPORT_S = 2.0
"""Use is told to others once a second; the model allows twice that."""


def lives(policy_at: int, tenant: str, retention_class: str | None) -> tuple[float, float] | None:
    """What the policies above say: ceiling and sliding deadline in seconds, None: not stored."""
    brief = 300.0 if retention_class else math.inf
    if policy_at == 0:
        if tenant == "carol":
            return None
        ceiling, idle = (3600.0, 600.0) if tenant == "bob" else (1800.0, math.inf)
    else:
        ceiling, idle = (7200.0 if tenant == "carol" else 1200.0), math.inf
    return min(ceiling, brief), idle


@dataclass
class Copy:
    """One stored block, as the model knows it."""

    segment_id: bytes
    stored_real: float
    stored_told: float
    ceiling: float
    idle: float
    used_real: float
    used_told: float

    def must_be_gone(self, real: float) -> bool:
        """By the time that has really passed since it was stored and last used."""
        return real >= min(self.stored_real + self.ceiling, self.used_real + self.idle)

    def must_be_here(self, told: float) -> bool:
        """By the time the vaults believe, a window early at most."""
        window = min(WINDOW, self.ceiling / 8, self.idle / 8)
        early = min(
            self.stored_told + self.ceiling - window, self.used_told + self.idle - window - REPORT_S
        )
        return told < early - 0.01


class RetentionMachine(RuleBasedStateMachine):
    """`real` is what has really passed. Handles share one clock, as processes of one machine do."""

    def __init__(self) -> None:
        super().__init__()
        base = tempfile.mkdtemp(prefix="kvvault-retention-", dir=SHM if SHM.is_dir() else None)
        self.base = Path(base)
        self.home = TimedHome(self.base / "vault", first=POLICIES[0])
        self.handles: list[Vault] = []
        self.copies: dict[tuple[str, int], list[Copy]] = {}
        self.holds: dict[int, tuple[str, bytes]] = {}
        self.policy_at = 0
        self.real = 0.0
        self.killed = 0

    @initialize()
    def create(self) -> None:
        self.handles = [self.home.create(), self.home.open()]
        self.real = self.home.clock.monotonic()

    def teardown(self) -> None:
        for vault in self.handles:
            vault.close()
        shutil.rmtree(self.base)

    # Helpers.

    def scope(self, handle: int, of: tuple[str, str | None]) -> Scope:
        return self.handles[handle].scope(of[0], namespace(), retention_class=of[1])

    def told(self) -> float:
        """The latest that any handle believes it to be."""
        return max(vault.time.now() for vault in self.handles)

    def live(self) -> dict[bytes, SegmentFacts]:
        return {f.segment_id: f for f in self.handles[0].segments() if f.state.live}

    def held(self, facts: SegmentFacts) -> bool:
        targets = list(self.holds.values())
        return ("tenant", facts.tenant_id) in targets or ("segment", facts.segment_id) in targets

    def report(self) -> None:
        """A second has passed: use is told, clocks are compared."""
        for vault in self.handles:
            report(vault)
        for vault in self.handles:
            vault.refresh()

    def forget_dead(self) -> None:
        live = self.live()
        for name, copies in self.copies.items():
            self.copies[name] = [one for one in copies if one.segment_id in live]

    # What is done.

    @rule(handle=HANDLES, of=SCOPES, picks=PICKS)
    def put(self, handle: int, of: tuple[str, str | None], picks: list[int]) -> None:
        vault, scope = self.handles[handle], self.scope(handle, of)
        before = {pick: segment_of(vault, scope, key(pick)) for pick in picks}
        report_ = vault.put(scope, [key(p) for p in picks], [content(of[0], key(p)) for p in picks])
        life = lives(self.policy_at, *of)
        if life is None:
            assert (report_.stored, report_.declined) == (0, len(picks))
            return
        assert report_.declined == 0
        if vault.time.suspect:
            return  # stored or refused, nobody vouches for it; what it may not do is live too long
        assert report_.refused == 0
        assert report_.stored + report_.present == len(picks)
        for pick in set(picks):
            segment_id = segment_of(vault, scope, key(pick))
            assert segment_id is not None
            if segment_id != before[pick]:
                copies = self.copies.setdefault((of[0], pick), [])
                if segment_id not in {one.segment_id for one in copies}:
                    now, told = self.home.clock.monotonic(), vault.time.steady()
                    copies.append(Copy(segment_id, now, told, *life, now, told))

    @rule(handle=HANDLES, tenant=st.sampled_from(TENANTS), picks=PICKS)
    def use(self, handle: int, tenant: str, picks: list[int]) -> None:
        vault, scope = self.handles[handle], self.scope(handle, (tenant, None))
        vault.refresh()
        said = vault.contains(scope, [key(p) for p in picks])
        at = [segment_of(vault, scope, key(p)) for p in picks]
        outcomes, found = get(vault, scope, [key(p) for p in picks])
        real, told = self.home.clock.monotonic(), self.told()
        for pick, here, where, outcome, data in zip(picks, said, at, outcomes, found, strict=True):
            assert outcome in (Outcome.HIT, Outcome.MISS)
            assert here == (outcome is Outcome.HIT)
            assert data == (content(tenant, key(pick)) if here else ZERO)
            copies = self.copies.get((tenant, pick), [])
            if here:
                served = [one for one in copies if one.segment_id == where]
                assert served, "served from nowhere"
                assert not served[0].must_be_gone(real), "served past its deadline"
            elif not self.handles[handle].time.suspect:
                newest = copies[-1:]
                assert len(copies) > 1 or not newest or not newest[0].must_be_here(told), (
                    "gone before its deadline"
                )
        # A segment is used as a whole.
        used = {where for where, here in zip(at, said, strict=True) if here}
        for copies in self.copies.values():
            for one in copies:
                if one.segment_id in used:
                    one.used_real, one.used_told = real, vault.time.steady()
        self.report()

    @rule(seconds=st.sampled_from((1.0, 20.0, 100.0, 290.0, 590.0, 1100.0, 1790.0, 3600.0)))
    def time_passes(self, seconds: float) -> None:
        self.report()
        self.home.clock.advance(seconds)
        self.report()

    @rule(seconds=st.sampled_from((1.0, 1000.0, 86400.0)))
    def the_clock_is_set_back(self, seconds: float) -> None:
        before = [vault.time.steady() for vault in self.handles]
        self.home.clock.set_wall(self.home.clock.now() - seconds)
        assert [vault.time.steady() for vault in self.handles] == before

    @rule(seconds=st.sampled_from((5.0, 100.0, JUMP)))
    def the_clock_is_set_ahead(self, seconds: float) -> None:
        """So little that it is believed; by all, because they look every second."""
        self.home.clock.set_wall(self.told() + seconds)
        self.report()

    @rule()
    def the_clock_runs_away(self) -> None:
        live = self.live()
        self.home.clock.set_wall(self.told() + 10 * 86400.0)
        for vault in self.handles:
            assert vault.time.suspect
            # By a clock that nobody vouches for nothing goes that would not have gone anyway.
            due = {f.segment_id for f in live.values() if f.deadline <= vault.time.steady()}
            assert {f.segment_id for f in vault.plan_expired().segments} <= due
        assert self.live().keys() == live.keys()

    @rule(handle=HANDLES)
    @precondition(lambda self: self.handles[0].time.suspect)
    def the_clock_is_accepted(self, handle: int) -> None:
        self.handles[handle].accept_clock()
        self.report()
        assert not any(vault.time.suspect for vault in self.handles)

    @rule()
    @precondition(lambda self: self.handles[0].time.suspect)
    def the_clock_comes_back(self) -> None:
        self.home.clock.set_wall(self.handles[0].time.steady())

    @rule(handle=HANDLES)
    def expire(self, handle: int) -> None:
        vault = self.handles[handle]
        due = {f.segment_id for f in self.live().values() if f.deadline <= vault.time.steady()}
        held = {i for i in due if self.held(self.live()[i])}
        done = vault.expire()
        assert done.held_segments == len(held)
        assert done.segments == len(due - held)
        assert not (due - held) & self.live().keys()
        self.forget_dead()

    @rule(handle=HANDLES, choice=st.integers(0, 1000))
    def delete(self, handle: int, choice: int) -> None:
        live = sorted(self.live().values(), key=lambda f: f.segment_id)
        if not live:
            return
        chosen = live[choice % len(live)]
        assert self.handles[handle].delete_segments([chosen.segment_id]) == (
            0 if self.held(chosen) else 1
        )
        self.forget_dead()

    @rule(handle=HANDLES, tenant=st.sampled_from(TENANTS))
    def forget(self, handle: int, tenant: str) -> None:
        vault = self.handles[handle]
        scope = self.scope(handle, (tenant, None))
        mine = [f for f in self.live().values() if f.tenant_id == scope.tenant_id]
        protected = ("tenant", scope.tenant_id) in self.holds.values()
        if protected or any(self.held(f) for f in mine):
            with pytest.raises(HeldError):
                vault.forget(tenant)
        else:
            vault.forget(tenant)
        self.forget_dead()

    @rule(handle=HANDLES, tenant=st.sampled_from(TENANTS))
    def hold_tenant(self, handle: int, tenant: str) -> None:
        scope = self.scope(handle, (tenant, None))
        number = hold(self.handles[handle], "tenant", scope.tenant_id)
        self.holds[number] = ("tenant", scope.tenant_id)

    @rule(handle=HANDLES, choice=st.integers(0, 1000))
    def hold_segment(self, handle: int, choice: int) -> None:
        live = sorted(self.live())
        if live:
            chosen = live[choice % len(live)]
            number = hold(self.handles[handle], "segment", chosen)
            self.holds[number] = ("segment", chosen)

    @rule(handle=HANDLES)
    @precondition(lambda self: self.holds)
    def clear(self, handle: int) -> None:
        number = min(self.holds)
        clear_hold(self.handles[handle], number)
        del self.holds[number]

    @rule(handle=HANDLES)
    def another_policy(self, handle: int) -> None:
        """Governs what is stored from now on."""
        self.policy_at = 1 - self.policy_at
        put_in_force(self.handles[handle], POLICIES[self.policy_at])

    @rule(handle=HANDLES)
    def reopen(self, handle: int) -> None:
        due = {
            f.segment_id
            for f in self.live().values()
            if f.deadline <= self.handles[handle].time.steady() and not self.held(f)
        }
        self.handles[handle].close()
        self.handles[handle] = self.home.open()
        assert not due & self.live().keys(), "opening expires"
        self.report()
        self.forget_dead()

    @rule()
    @precondition(lambda self: self.killed < 2)
    def crash(self) -> None:
        """Go on with what would lie on the disk had both processes been killed now."""
        self.report()
        for vault in self.handles:
            mark_time(vault._catalog, vault.time)
            vault._catalog.write(lambda _connection: None)
        self.killed += 1
        copy = self.base / f"copy {self.killed}"
        shutil.copytree(self.home.path, copy)
        for vault in self.handles:
            vault.close()
        self.home.path = copy
        self.handles = [self.home.open(), self.home.open()]
        assert self.handles[0].recovery.lost_blocks == 0
        self.forget_dead()

    # What always holds.

    @invariant()
    def nothing_is_findable_past_its_deadline(self) -> None:
        if not self.handles:
            return
        real = self.home.clock.monotonic()
        for handle, vault in enumerate(self.handles):
            vault.refresh()  # lookups may be a moment behind what another process deleted
            for tenant in TENANTS:
                scope = self.scope(handle, (tenant, None))
                for pick in range(8):
                    if vault.contains(scope, [key(pick)])[0]:
                        where = segment_of(vault, scope, key(pick))
                        served = [
                            one
                            for one in self.copies.get((tenant, pick), [])
                            if one.segment_id == where
                        ]
                        assert served, "findable, and nobody stored it"
                        assert not served[0].must_be_gone(real), "findable past its deadline"

    @invariant()
    def what_is_held_is_on_the_disk(self) -> None:
        if not self.handles or not self.holds:
            return
        sizes = {path.stem: path.stat().st_size for path in self.home.segment_files()}
        for facts in self.live().values():
            if self.held(facts):
                assert sizes[facts.segment_id.hex()] >= facts.blocks * BLOCK
        for kind, target in self.holds.values():
            if kind == "segment":
                assert target in self.live(), "a held segment is gone"


RetentionMachine.TestCase.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)
TestRetention = RetentionMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_for_longer() -> None:
    run_state_machine_as_test(
        RetentionMachine, settings=settings(max_examples=30, stateful_step_count=50, deadline=None)
    )
