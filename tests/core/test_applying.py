"""Applying a policy: what `diff` says is what `apply` does, to what is there already."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvvault.applying import Change, PolicyDiff, SegmentChange, Sum
from kvvault.deleting import Trigger
from kvvault.errors import CatalogCorruptError, ClosedError
from kvvault.model import Outcome, SegmentFacts, SegmentState
from kvvault.policy.document import Policy
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    Home,
    assert_hits,
    assert_missing,
    dirty,
    flip,
    get,
    key,
    keys,
    namespace,
    put,
)
from tests.core.timed import TimedHome, clear_hold, hold, policy, report

HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture
def timed(home: Home) -> TimedHome:
    return TimedHome(home.path, first=policy("delete_by: 24h"))


def place(vault: Vault, tenant: str = "alice", **more: Any) -> Scope:
    return vault.scope(tenant, namespace(), **more)


def live(vault: Vault) -> dict[bytes, SegmentFacts]:
    return {facts.segment_id: facts for facts in vault.segments() if facts.state.live}


def settled(facts: SegmentFacts) -> SegmentFacts:
    """Whether a segment still takes blocks, and when its uses reach the catalog, is for other
    threads to decide, at their own time."""
    facts = replace(facts, hits=0, last_used=None)
    return replace(facts, state=SegmentState.SEALED) if facts.state.live else facts


def every(vault: Vault) -> dict[bytes, SegmentFacts]:
    return {facts.segment_id: settled(facts) for facts in vault.segments()}


def plain(diff: PolicyDiff) -> list[SegmentChange]:
    return [replace(one, facts=settled(one.facts)) for one in diff.changes]


def changes(diff: PolicyDiff) -> set[Change]:
    return {one.change for one in diff.changes}


# -- what a policy does to what is there ---------------------------------------------------------


def test_a_shorter_ceiling_moves_deadlines_and_deletes_what_is_past_them(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(4))
        timed.clock.advance(2 * HOUR)
        put(vault, scope, keys(4, 4))
        diff = vault.diff_policy(policy("delete_by: 1h"))
        assert diff.sum(Change.DELETE) == Sum(1, 4, 4 * BLOCK)
        assert diff.sum(Change.SHORTEN) == Sum(1, 4, 4 * BLOCK)
        assert diff.sum(Change.SHORTEN, "rule-0") == Sum(1, 4, 4 * BLOCK)
        assert (
            diff.sum(Change.SHORTEN, "another") == diff.sum(Change.LENGTHEN) == diff.held == Sum()
        )
        assert_hits(vault, scope, keys(8))  # nothing has happened yet
        done, gone = vault.apply_policy(policy("delete_by: 1h"), actor="test")
        assert plain(done) == plain(diff)
        assert (gone.trigger, gone.segments, gone.blocks) == (Trigger.POLICY, 1, 4)
        assert_missing(vault, scope, keys(4))
        assert_hits(vault, scope, keys(4, 4))
        timed.clock.advance(HOUR)
        assert_missing(vault, scope, keys(4, 4))


def test_a_longer_ceiling_lets_live_what_lives_and_revives_nothing(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(4))
        timed.clock.advance(HOUR)
        put(vault, scope, keys(4, 4))
        timed.clock.advance(DAY - HOUR)  # the first four are past their deadline, nobody looked
        diff, _ = vault.apply_policy(policy("delete_by: 48h"), actor="test")
        assert diff.sum(Change.DELETE) == diff.sum(Change.LENGTHEN) == Sum(1, 4, 4 * BLOCK)
        assert_missing(vault, scope, keys(4))
        timed.clock.advance(HOUR)
        assert_hits(vault, scope, keys(4, 4))


@pytest.mark.parametrize("rule", ["delete_by: 1h", "persist: false"])
def test_what_a_hold_keeps_stays_and_goes_when_it_is_cleared(timed: TimedHome, rule: str) -> None:
    with timed.create() as vault:
        mine, other = place(vault), place(vault, "bob")
        put(vault, mine, keys(4))
        put(vault, other, keys(4), "b")
        number = hold(vault, "tenant", mine.tenant_id)
        timed.clock.advance(2 * HOUR)
        diff, gone = vault.apply_policy(policy(rule), actor="test")
        assert diff.sum(Change.DELETE) == diff.sum(Change.KEEP) == diff.held == Sum(1, 4, 4 * BLOCK)
        assert (gone.segments, gone.held_segments) == (1, 1)
        assert [facts.tenant_id for facts in live(vault).values()] == [mine.tenant_id]
        assert_missing(vault, mine, keys(4))  # kept, and past its deadline
        vault.apply_policy(policy("delete_by: 48h"), actor="test")
        assert_missing(vault, mine, keys(4))  # nor does the next policy revive it
        assert len(live(vault)) == 1
        clear_hold(vault, number)
        vault.expire()
        assert not live(vault)


def test_another_process_follows_at_once(timed: TimedHome) -> None:
    with timed.create() as vault, timed.open() as other:
        scope, theirs = place(vault), place(other)
        put(vault, scope, keys(4))
        other.refresh()
        assert_hits(other, theirs, keys(4))
        timed.clock.advance(2 * HOUR)
        vault.apply_policy(policy("delete_by: 1h"), actor="test")
        assert_missing(other, theirs, keys(4))
        put(other, theirs, keys(1, 4))
        vault.refresh()
        assert_hits(vault, scope, keys(1, 4))
        [facts] = live(vault).values()
        assert facts.delete_by == timed.clock.now() + HOUR
        assert facts.policy_no == 2
        vault.apply_policy(policy("persist: false"), actor="test")
        assert put(other, theirs, keys(2, 5)).stored == 0


def test_labels_and_class_are_asked_about_again(timed: TimedHome) -> None:
    timed.first = policy("class: short, delete_by: 2h", "delete_by: 24h")
    with timed.create() as vault:
        put(vault, place(vault, labels={"kind": "chat"}), keys(2))
        put(vault, place(vault, retention_class="short"), keys(2, 2))
        put(vault, place(vault), keys(2, 4))
        new = policy(
            "match: {labels: {kind: chat}}, delete_by: 3h",
            "class: short, delete_by: 1h",
            "delete_by: 20h",
        )
        diff = vault.diff_policy(new)
        assert sorted((one.rule, one.delete_by) for one in diff.changes) == [
            ("rule-0", timed.clock.now() + 3 * HOUR),
            ("rule-1", timed.clock.now() + HOUR),
            ("rule-2", timed.clock.now() + 20 * HOUR),
        ]


def test_a_class_that_was_granted_is_remembered_and_one_asked_for_in_vain_is_not(
    timed: TimedHome,
) -> None:
    """What `docs/policies.md` says of it. Asked for in vain: there is none of that name, or it is
    for others."""
    timed.first = policy(
        "class: short, delete_by: 2h",
        "match: {tenant: bob}, class: others, delete_by: 2h",
        "delete_by: 24h",
    )
    with timed.create() as vault:
        for n, asked in enumerate((None, "brief", "others", "short")):
            put(vault, place(vault, retention_class=asked), keys(1, n))
        assert {facts.retention_class: facts.blocks for facts in live(vault).values()} == {
            "": 3,  # one segment of all that got the same
            "short": 1,
        }
        new = policy(
            "class: short, delete_by: 1h",
            "class: brief, delete_by: 1h",
            "class: others, delete_by: 1h",
            "delete_by: 20h",
        )
        without, given = policy("delete_by: 12h"), timed.clock.now()
        for applied, base, short in ((new, 20, 1), (without, 12, 12), (new, 20, 1)):
            vault.apply_policy(applied, actor="test")
            assert {facts.retention_class: facts.delete_by for facts in live(vault).values()} == {
                "": given + base * HOUR,
                "short": given + short * HOUR,
            }
        for n, asked in enumerate(
            ("brief", "others")
        ):  # the control: asked for now, they are given
            put(vault, place(vault, retention_class=asked), keys(1, 10 + n))
            [mine] = [f for f in live(vault).values() if f.retention_class == asked]
            assert mine.delete_by == given + HOUR


def test_use_that_only_the_sliding_deadline_shows_is_not_forgotten(timed: TimedHome) -> None:
    """Blocks that were written again carry the deadline they had, and no use of their own."""
    timed.first = policy("delete_by: 24h, idle: 1h")
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(4))
        timed.clock.advance(0.9 * HOUR)
        assert_hits(vault, scope, keys(4))
        report(vault)
        deadline = timed.clock.now() + HOUR
        with timed.sql() as sql:
            sql.execute("UPDATE segments SET last_used = NULL")
        assert changes(vault.diff_policy(vault.policy())) == {Change.KEEP}
        [one] = vault.diff_policy(policy("delete_by: 24h, idle: 2h")).changes
        assert one.change is Change.LENGTHEN
        assert one.deadline == pytest.approx(deadline + HOUR)


def test_a_vault_that_is_open_for_reading_shows_and_applies_nothing(timed: TimedHome) -> None:
    with timed.create() as vault:
        put(vault, place(vault), keys(4))
    with timed.open(read_only=True) as vault:
        diff = vault.diff_policy(policy("persist: false"))
        assert diff.sum(Change.DELETE).blocks == 4
        with pytest.raises(ClosedError):
            vault.apply_policy(policy("persist: false"), actor="test")
        assert_hits(vault, place(vault), keys(4))


def test_the_catalog_does_not_tell_whom_a_policy_names(timed: TimedHome) -> None:
    """Also of a policy that was replaced; and a long one is kept whole."""
    names = [f"clinic-canary-{n}" for n in range(250)]
    long = policy(f"match: {{tenant: [{', '.join(names)}]}}, delete_by: 1h", "delete_by: 2h")
    assert len(long.source) > 4096
    with timed.create() as vault:
        vault.apply_policy(long, actor="seen-canary")
        put(vault, place(vault, names[0]), keys(2))
    with timed.open() as vault:
        assert vault.policy() == Policy.parse(long.source, name="the policy in force")
        assert vault.diff_policy(long).changes[0].rule == "rule-0"
        vault.apply_policy(policy("delete_by: 3h"), actor="test")
        everything = b"".join(path.read_bytes() for path in timed.path.rglob("*") if path.is_file())
    assert b"seen-canary" in everything
    assert b"clinic-canary" not in everything


def test_a_policy_that_was_altered_on_the_disk_is_not_obeyed(timed: TimedHome) -> None:
    timed.create().close()
    with timed.sql() as sql:
        [(sealed,)] = sql.execute("SELECT sealed_source FROM policies").fetchall()
        sql.execute("UPDATE policies SET sealed_source = ?", (flip(sealed, 100),))
    with pytest.raises(CatalogCorruptError, match="policy"):
        timed.open()
    with timed.sql() as sql:
        sql.execute("UPDATE policies SET sealed_source = ?", (sealed,))
    timed.open().close()


# -- whatever the policy, whatever is there ------------------------------------------------------

RULES = [
    "persist: false",
    "delete_by: 30m",
    "delete_by: 4h",
    "delete_by: 30d",
    "delete_by: 8h, idle: 20m",
    "delete_by: 24h, idle: 3h",
    "delete_by: 24h, idle: 3h, keep_at_least: 1h",
]
TENANTS = ("alice", "bob")


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    mine = draw(st.sampled_from(RULES))
    return policy(f"match: {{tenant: alice}}, {mine}", draw(st.sampled_from(RULES)), window="2m")


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, str, float]:
    return (
        draw(st.sampled_from(["put", "put", "get", "hold", "apply"])),
        draw(st.sampled_from(TENANTS)),
        draw(st.sampled_from([0.0, 10.0, 400.0, HOUR, 5 * HOUR])),
    )


@pytest.fixture(scope="module")
def template(memory: Any) -> TimedHome:
    """A vault to copy: making one takes longer than a hypothesis example should."""
    made = TimedHome(memory / "applying-template", first=policy("delete_by: 24h, idle: 3h"))
    made.create().close()
    return made


# Not made smaller: that takes longer than a test may, and histories are short anyway.
@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    history=st.lists(steps(), min_size=2, max_size=8),
    between=policies(),
    last=policies(),
)
def test_diff_predicts_exactly_what_apply_does(
    template: TimedHome, history: list[tuple[str, str, float]], between: Policy, last: Policy
) -> None:
    path = template.path.with_name("applying")
    shutil.copytree(template.path, path)
    timed = TimedHome(path, provider=template.provider)
    try:
        with timed.open() as vault, timed.open() as other:
            scopes = {tenant: place(vault, tenant) for tenant in TENANTS}
            for number, (what, tenant, pause) in enumerate(history):
                if what == "put":
                    put(vault, scopes[tenant], [key(number)], tenant)
                elif what == "get":
                    vault.get(scopes[tenant], keys(number), dirty(number))
                    report(vault)
                elif what == "hold":
                    hold(vault, "tenant", scopes[tenant].tenant_id)
                else:
                    vault.apply_policy(between, actor="test")
                timed.clock.advance(pause)
            assert_predicted(vault, last)
            now, all_keys = timed.clock.now(), keys(len(history))
            for tenant, scope in scopes.items():
                mine = [f for f in live(vault).values() if f.tenant_id == scope.tenant_id]
                served = sum(facts.blocks for facts in mine if facts.deadline > now)
                assert vault.contains(scope, all_keys).count(True) <= served
                there = vault.contains(scope, all_keys)
                theirs = place(other, tenant)
                outcomes, _ = get(other, theirs, all_keys)  # before it looks: it knows at most less
                assert {i for i, one in enumerate(outcomes) if one is Outcome.HIT} <= {
                    i for i, hit in enumerate(there) if hit
                }
                other.refresh()
                assert other.contains(theirs, all_keys) == there
    finally:
        shutil.rmtree(path)


def assert_predicted(vault: Vault, new: Policy) -> None:
    """After applying `new` all is as the diff said, and nothing else has changed."""
    before = every(vault)
    diff = vault.diff_policy(new)
    assert every(vault) == before
    assert [one.facts.segment_id for one in diff.changes] == [
        facts.segment_id for facts in before.values() if facts.state.live
    ]
    done, gone = vault.apply_policy(new, actor="test")
    assert plain(done) == plain(diff)
    after = every(vault)
    assert vault.policy().digest == new.digest
    assert gone.segments == diff.sum(Change.DELETE).segments
    assert gone.blocks == diff.sum(Change.DELETE).blocks
    assert gone.data_bytes == diff.sum(Change.DELETE).data_bytes
    assert gone.held_segments == diff.held.segments
    for one in diff.changes:
        facts = after.pop(one.facts.segment_id)
        if one.outcome is Change.DELETE:
            assert facts.state is SegmentState.DESTROYED
            continue
        assert (facts.state.live, facts.blocks) == (True, one.facts.blocks)
        assert (facts.delete_by, facts.idle_until) == (one.delete_by, one.idle_until)
        assert (facts.rule, facts.keep_until) == (one.rule, one.keep_until)
        moved = {
            Change.KEEP: facts.deadline == one.facts.deadline or one.held,
            Change.SHORTEN: facts.deadline < one.facts.deadline,
            Change.LENGTHEN: facts.deadline > one.facts.deadline,
        }
        assert moved[one.outcome]
        assert facts.deadline == one.deadline < math.inf
    assert after == {
        ident: facts for ident, facts in before.items() if not facts.state.live
    }  # what was gone before
    again = vault.diff_policy(new)
    assert {one.outcome for one in again.changes} <= {Change.KEEP}
    assert [one.deadline for one in again.changes] == [one.facts.deadline for one in again.changes]
