"""What a plan says that a hold keeps is what is then kept, also of blocks that were stored or
reused after the hold was placed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvvault.applying import Change
from kvvault.health import health_of
from kvvault.upkeep import jobs_of
from kvvault.vault import Scope, Vault
from tests.core.support import Home, assert_hits, assert_missing, namespace
from tests.core.test_prompt_erasing import path, query, send
from tests.core.test_prompting import chain_of, store
from tests.core.timed import TimedHome, policy

HOUR = 3600.0
HELD = path(1, 2, 3, 4)  # a whole segment
FREE = path(11, 12, 13, 14)


@pytest.fixture
def timed(home: Home) -> TimedHome:
    return TimedHome(home.path, first=policy("delete_by: 24h"))


@pytest.fixture
def vault(timed: TimedHome) -> Iterator[Vault]:
    with timed.create() as made:
        yield made


@pytest.fixture(params=["subject", "reused", "prompt"])
def scope(request: pytest.FixtureRequest, vault: Vault) -> Scope:
    """Two segments, `HELD` and `FREE`. The hold was placed before there was anything in them that
    it is on, so it was not noted with it what it keeps."""
    scope = vault.scope("alice", namespace())
    prompt = None
    if request.param == "prompt":
        prompt = vault.prompt(scope, request_id="r", subject="anna")
        store(vault, scope, prompt, chain_of(path(30, 31, 32, 33)))
        vault.record(prompt, chain_of(path(30, 31, 32, 33)))
        vault.settle_prompts()
        vault.place_hold(prompt_id=prompt.prompt_id, reason="r", actor="c")
    else:
        vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c")
    if prompt is not None:
        store(vault, scope, prompt, chain_of(HELD))
        vault.record(prompt, chain_of(HELD))
        vault.settle_prompts()
    elif request.param == "reused":
        send(vault, scope, [1, 2, 3, 4], "bert")
        send(vault, scope, [1, 2, 3, 4], "anna")
    else:
        send(vault, scope, [1, 2, 3, 4], "anna")
    send(vault, scope, [11, 12, 13, 14], "bert")
    return scope


def live(vault: Vault) -> list[bytes]:
    return [facts.segment_id for facts in vault.segments() if facts.state.live]


class TestForeseen:
    def test_of_a_removal(self, vault: Vault, scope: Scope) -> None:
        plan = vault.plan_segments(live(vault))
        done = vault.execute(plan, actor="o", reason="r")
        assert (len(plan.segments), plan.blocks) == (done.segments, done.blocks)
        assert len(plan.held) == done.held_segments > 0
        assert_hits(vault, scope, HELD)
        assert_missing(vault, scope, FREE)

    @pytest.mark.parametrize("rule", ["persist: false", "delete_by: 1h"])
    def test_of_a_policy(self, vault: Vault, timed: TimedHome, scope: Scope, rule: str) -> None:
        timed.clock.advance(2 * HOUR)
        new = policy(rule)
        diff = vault.diff_policy(new)
        said, done = vault.apply_policy(new, actor="o")
        for one in (diff, said):
            assert one.sum(Change.DELETE).segments == done.segments > 0
            assert one.held.segments == done.held_segments > 0
        assert {f.segment_id for f in vault.segments() if f.state.live} == {
            one.facts.segment_id for one in diff.changes if one.held
        }

    def test_of_what_is_past_its_deadline(
        self, vault: Vault, timed: TimedHome, scope: Scope
    ) -> None:
        timed.clock.advance(25 * HOUR)
        vault.refresh()
        plan = vault.plan_expired()
        health = health_of(vault, timed.clock)
        assert health.deadlines.overdue == len(plan.segments)
        done = vault.expire()
        assert (done.segments, done.held_segments) == (len(plan.segments), len(plan.held))
        assert min(done.segments, done.held_segments) > 0
        assert not health_of(vault, timed.clock).deadlines.overdue
        assert not vault.has_expired()

    def test_and_of_the_next_deadline(self, vault: Vault, timed: TimedHome, scope: Scope) -> None:
        vault.delete_segments(live(vault))  # what is left is held
        assert health_of(vault, timed.clock).deadlines.following is None
        vault.clear_hold(1, reason="over", actor="c")  # the control
        assert health_of(vault, timed.clock).deadlines.following == timed.clock.now() + 24 * HOUR

    def test_of_a_tenant(self, vault: Vault, scope: Scope) -> None:
        plan = vault.plan_tenant("alice")
        assert plan is not None
        assert {f.segment_id for f in plan.held} == set().union(
            *(hold.segment_ids for hold in vault.holds())
        )
        assert plan.segments


def test_what_only_a_plan_found_held_is_not_found_due_for_ever(
    vault: Vault, timed: TimedHome
) -> None:
    scope = vault.scope("alice", namespace())
    vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c")
    send(vault, scope, [1, 2, 3, 4], "anna")
    timed.clock.advance(25 * HOUR)
    vault.refresh()
    [expire] = [job for job in jobs_of(vault) if job.name == "expire"]
    assert expire.due is not None
    assert expire.due()  # nobody has looked yet
    assert vault.expire().held_segments == 1
    assert not expire.due()
    vault.clear_hold(1, reason="over", actor="c")
    assert not live(vault)


def test_where_nothing_is_held_everything_goes(vault: Vault) -> None:
    scope = vault.scope("alice", namespace())
    send(vault, scope, [1, 2, 3, 4], "anna")
    vault.clear_hold(
        vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c").number,
        reason="over",
        actor="c",
    )
    assert not vault.plan_segments(live(vault)).held
    assert not vault.diff_policy(policy("persist: false")).held.segments
    assert vault.delete_segments(live(vault)) == 1
    assert query(vault, "SELECT count(*) FROM hold_segments") == [(0,)]
