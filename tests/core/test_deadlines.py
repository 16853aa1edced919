"""Deadlines: never late, wherever somebody looks, and early by at most a window."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event

from kvvault.catalog import retention
from kvvault.errors import HeldError
from kvvault.model import Outcome, SegmentState
from kvvault.segments.store import read_ciphertext
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    DIRTY,
    SMALL,
    Home,
    assert_hits,
    assert_missing,
    contents,
    dirty,
    get,
    keys,
    namespace,
    put,
    segment_of,
)
from tests.core.timed import TimedHome, clear_hold, hold, policy, put_in_force, report

HOUR = 3600.0


@pytest.fixture
def timed(home: Home) -> TimedHome:
    return TimedHome(home.path)


def place(vault: Vault, tenant: str = "alice", **more: Any) -> Scope:
    return vault.scope(tenant, namespace(), **more)


# -- the four places -----------------------------------------------------------------------------


def test_at_lookup_and_at_load(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(6))
        timed.clock.advance(HOUR - 0.001)
        assert vault.contains(scope, keys(6)) == [True] * 6
        assert_hits(vault, scope, keys(6))
        timed.clock.advance(0.001)
        assert vault.contains(scope, keys(6)) == [False] * 6
        assert_missing(vault, scope, keys(6))


def test_when_it_comes_while_the_disk_is_read(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read is let through late: a disk that hung until the deadline had passed."""
    read, late = read_ciphertext, 0.0

    def slow(*arguments: Any) -> Any:
        result = read(*arguments)
        timed.clock.advance(late)
        return result

    monkeypatch.setattr("kvvault.reading.read_ciphertext", slow)
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(2))
        timed.clock.advance(HOUR - 5)
        late = 4.0
        assert_hits(vault, scope, keys(2))
        late = 2.0
        outcomes, found = get(vault, scope, keys(2))
        assert outcomes == [Outcome.MISS] * 2
        assert found == [bytes(BLOCK)] * 2  # zeros, and not what was in the buffers
        assert DIRTY not in found


def test_by_expiring(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(6))
        early = vault.expire()
        assert (early.segments, early.blocks) == (0, 0)
        timed.clock.advance(HOUR)
        plan = vault.plan_expired()
        assert plan.blocks == 6
        done = vault.expire()
        assert (done.segments, done.blocks, done.data_bytes) == (2, 6, 6 * BLOCK)
        assert {facts.state for facts in vault.segments()} == {SegmentState.DESTROYED}
        assert vault.expire().segments == 0
        assert timed.segment_files() == []


def test_at_opening_when_nobody_has_looked(timed: TimedHome) -> None:
    """CASES 21: the deadline passes in a cupboard."""
    with timed.create() as vault:
        put(vault, place(vault), keys(6))
        files = timed.segment_files()
        assert len(files) == 2
    with timed.sql() as sql:
        assert all(row[0] for row in sql.execute("SELECT wrapped_secret FROM segments"))
    timed.clock.advance(24 * HOUR)
    with timed.open():
        pass
    assert timed.segment_files() == []
    with timed.sql() as sql:
        assert {row[0] for row in sql.execute("SELECT wrapped_secret FROM segments")} == {None}
        assert sql.execute("SELECT count(*) FROM extents").fetchone() == (0,)
        assert sql.execute("SELECT trigger, segments, blocks FROM deletions").fetchall() == [
            ("expire", 2, 6)
        ]


def test_opening_early_takes_nothing(timed: TimedHome) -> None:
    with timed.create() as vault:
        put(vault, place(vault), keys(6))
    timed.clock.advance(HOUR - 1)
    with timed.open() as vault:
        assert_hits(vault, place(vault), keys(6))


def test_reading_only_serves_nothing_late_and_deletes_nothing(timed: TimedHome) -> None:
    with timed.create() as vault:
        put(vault, place(vault), keys(6))
    timed.clock.advance(HOUR - 1)
    with timed.open(read_only=True) as vault:
        scope = place(vault)
        assert_hits(vault, scope, keys(6))
        timed.clock.advance(1)
        assert_missing(vault, scope, keys(6))
    with timed.open(read_only=True) as vault:
        assert_missing(vault, place(vault), keys(6))
    assert len(timed.segment_files()) == 2


def test_a_deletion_that_cannot_be_finished_does_not_keep_the_vault_shut(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process in the middle of a load holds the fence; the keys are gone all the same."""
    from kvvault.errors import VaultLockedError
    from kvvault.segments.fence import Fence

    with timed.create() as vault:
        put(vault, place(vault), keys(6))
    timed.clock.advance(HOUR)

    def stuck(_self: Fence, _timeout: float) -> None:
        raise VaultLockedError("a process has stopped", hint="let it go on")

    with monkeypatch.context() as patch:
        patch.setattr(Fence, "drain", stuck)
        with timed.open() as vault:
            assert_missing(vault, place(vault), keys(6))
            assert not any(facts.state.live for facts in vault.segments())
    with timed.open() as vault:
        assert vault.recovery.finished_deletions == 2
    assert timed.segment_files() == []


# -- what has expired is gone, not forbidden -----------------------------------------------------


@pytest.mark.parametrize("expire", [False, True])
def test_expired_blocks_may_be_stored_again(timed: TimedHome, expire: bool) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(6))
        timed.clock.advance(HOUR)
        if expire:
            vault.expire()
        assert put(vault, scope, keys(6)).stored == 6
        assert_hits(vault, scope, keys(6))
        vault.expire()  # takes the old copies only
        assert_hits(vault, scope, keys(6))
    with timed.open() as vault:
        assert_hits(vault, place(vault), keys(6))
        timed.clock.advance(HOUR)
        assert_missing(vault, place(vault), keys(6))


def test_a_newer_copy_is_found_whatever_the_order_in_which_it_was_read(timed: TimedHome) -> None:
    """An expired copy that a hold keeps, and a good one: another process finds the good one."""
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(2))
        hold(vault, "tenant", scope.tenant_id)
        timed.clock.advance(HOUR)
        assert put(vault, scope, keys(2)).stored == 2
        with timed.open() as other:
            assert_hits(other, place(other), keys(2))
    with timed.open() as vault:
        assert_hits(vault, place(vault), keys(2))


# -- windows -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(memory: Any) -> TimedHome:
    """A vault to copy: making one takes longer than a hypothesis example should."""
    made = TimedHome(memory / "window-template", first=policy("delete_by: 1h", window="4m"))
    made.create().close()
    return made


@settings(max_examples=10)
@given(pauses=st.lists(st.floats(0, 1000), min_size=1, max_size=12), count=st.integers(1, 3))
def test_every_block_dies_at_or_before_its_own_deadline(
    template: TimedHome, pauses: list[float], count: int
) -> None:
    """... and by no more than a window before it."""
    window = 240.0
    path = template.path.with_name("window")
    shutil.copytree(template.path, path)
    timed = TimedHome(path, provider=template.provider)
    try:
        with timed.open() as vault:
            scope = place(vault)
            stored_at = {}
            for i, pause in enumerate(pauses):
                timed.clock.advance(pause)
                block_keys = keys(count, start=i * count)
                put(vault, scope, block_keys)
                stored_at.update(dict.fromkeys(block_keys, timed.clock.now()))
                for k in block_keys:
                    segment_id = segment_of(vault, scope, k)
                    (facts,) = [f for f in vault.segments() if f.segment_id == segment_id]
                    own = stored_at[k] + HOUR
                    assert facts.delete_by is not None
                    assert own - window - 1e-3 <= facts.delete_by <= own + 1e-3
            for k, at in stored_at.items():
                if timed.clock.now() < at + HOUR - window:
                    assert vault.contains(scope, [k]) == [True]
                if timed.clock.now() >= at + HOUR:
                    assert vault.contains(scope, [k]) == [False]
    finally:
        shutil.rmtree(path)


def test_a_window_that_is_over_is_sealed(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(1))
        put(vault, scope, keys(1, start=1))
        assert len(vault.segments()) == 1
        timed.clock.advance(HOUR / 2)
        vault._writer.close_windows()
        put(vault, scope, keys(1, start=2))
        states = [facts.blocks for facts in vault.segments()]
        assert states == [2, 1]


def test_blocks_of_other_terms_do_not_share_a_segment(home: Home) -> None:
    timed = TimedHome(
        home.path, first=policy("class: brief, delete_by: 5m", "delete_by: 1h", window="1m")
    )
    with timed.create() as vault:
        put(vault, place(vault), keys(1))
        put(vault, place(vault, retention_class="brief"), keys(1, start=1))
        put(vault, place(vault, labels={"matter": "7"}), keys(1, start=2))
        put(vault, place(vault, tenant="bob"), keys(1))
        assert sorted(facts.blocks for facts in vault.segments()) == [1, 1, 1, 1]


# -- sliding deadlines ---------------------------------------------------------------------------


@pytest.fixture
def sliding(home: Home) -> TimedHome:
    return TimedHome(home.path, first=policy("delete_by: 1h, idle: 10m"))


def test_use_moves_a_sliding_deadline(sliding: TimedHome) -> None:
    with sliding.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(1))
        put(vault, place(vault, tenant="bob"), keys(1))
        for _ in range(4):
            sliding.clock.advance(500)
            assert_hits(vault, scope, keys(1))
            report(vault)
        assert_missing(vault, place(vault, tenant="bob"), keys(1))  # nobody used it
        sliding.clock.advance(599)
        assert_hits(vault, scope, keys(1))
        sliding.clock.advance(1)
        # What was used a second ago and not reported yet: seen from elsewhere it is idle, and no
        # harm is done by asking again.
        report(vault)
        sliding.clock.advance(601)
        assert_missing(vault, scope, keys(1))
        assert vault.expire().blocks == 2


def test_and_never_beyond_the_ceiling(sliding: TimedHome) -> None:
    with sliding.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(1))
        begun = sliding.clock.now()
        (facts,) = vault.segments()
        assert facts.delete_by == begun + HOUR
        while sliding.clock.now() + 400 < begun + HOUR:
            sliding.clock.advance(400)
            assert_hits(vault, scope, keys(1))
            report(vault)
            (facts,) = vault.segments()
            assert facts.delete_by == begun + HOUR
            assert facts.idle_until is not None
            assert facts.idle_until <= begun + HOUR
        sliding.clock.advance(begun + HOUR - sliding.clock.now())
        assert_missing(vault, scope, keys(1))
        assert vault.expire().blocks == 1


def test_use_in_one_process_moves_it_in_another(sliding: TimedHome) -> None:
    with sliding.create() as one, sliding.open() as two:
        put(one, place(one), keys(1))
        two.refresh()
        sliding.clock.advance(400)
        assert_hits(one, place(one), keys(1))
        report(one)
        sliding.clock.advance(400)
        assert two.expire().segments == 0
        two.refresh()  # its own thread does that twenty times a second
        assert_hits(two, place(two), keys(1))
        report(two)
        sliding.clock.advance(400)
        assert one.expire().segments == 0
        one.refresh()
        assert_hits(one, place(one), keys(1))


def test_use_revives_nothing(sliding: TimedHome) -> None:
    """What was reported late: it had been used after its deadline, by a clock that was behind."""
    with sliding.create() as vault:
        put(vault, place(vault), keys(1))
        (facts,) = vault.segments()
        assert facts.idle_until is not None
        late = retention.Use(facts.segment_id, 1, facts.idle_until)
        vault._catalog.write(lambda c: retention.note_use(c, [late]))
        (after,) = vault.segments()
        assert after.idle_until == facts.idle_until
        in_time = retention.Use(facts.segment_id, 1, facts.idle_until - 1)
        vault._catalog.write(lambda c: retention.note_use(c, [in_time]))
        (after,) = vault.segments()
        assert after.idle_until == facts.idle_until - 1 + 600


def test_what_was_used_before_closing_counts(sliding: TimedHome) -> None:
    with sliding.create() as vault:
        put(vault, place(vault), keys(1))
        sliding.clock.advance(500)
        assert_hits(vault, place(vault), keys(1))
    sliding.clock.advance(500)
    with sliding.open() as vault:
        assert_hits(vault, place(vault), keys(1))
        assert vault.segments()[0].hits == 1


def test_expiring_asks_first_what_was_used(sliding: TimedHome) -> None:
    with sliding.create() as vault:
        put(vault, place(vault), keys(1))
        sliding.clock.advance(599.9)
        assert_hits(vault, place(vault), keys(1))  # and nobody has reported it
        sliding.clock.advance(0.2)
        assert vault.expire().segments == 0
        vault.refresh()
        assert_hits(vault, place(vault), keys(1))


# -- what the policy says ------------------------------------------------------------------------


def test_what_is_not_to_persist_is_declined(home: Home) -> None:
    timed = TimedHome(home.path, first=policy("match: {tenant: private}, persist: false",
                                              "delete_by: 1h"))  # fmt: skip
    with timed.create() as vault:
        scope = place(vault, tenant="private")
        done = put(vault, scope, keys(3))
        assert (done.stored, done.declined, done.refused, done.present) == (0, 3, 0, 0)
        assert_missing(vault, scope, keys(3))
        assert vault.counters()["declined_blocks"] == 3
        assert vault.segments() == []
        assert timed.segment_files() == []
        assert put(vault, place(vault), keys(3)).stored == 3  # others' are stored


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (("class: brief, delete_by: 5m", "delete_by: 1h"), 300.0),
        (("class: brief, delete_by: 2h", "match: {tenant: x}, delete_by: 3h", "delete_by: 1h"),
         HOUR),
        (("class: brief, delete_by: 30m, idle: 2m", "delete_by: 1h"), 120.0),
    ],
)  # fmt: skip
def test_a_class_only_shortens(home: Home, rules: tuple[str, ...], expected: float) -> None:
    timed = TimedHome(home.path, first=policy(*rules, window="1s"))
    with timed.create() as vault:
        scope = place(vault, retention_class="brief")
        put(vault, scope, keys(1))
        timed.clock.advance(expected - 0.01)
        assert vault.contains(scope, keys(1)) == [True]
        timed.clock.advance(0.01)
        assert vault.contains(scope, keys(1)) == [False]


def test_a_class_that_persists_nothing(home: Home) -> None:
    timed = TimedHome(home.path, first=policy("class: off, persist: false", "delete_by: 1h"))
    with timed.create() as vault:
        assert put(vault, place(vault, retention_class="off"), keys(2)).declined == 2
        assert timed.segment_files() == []


def test_a_policy_that_another_process_applied_governs_the_next_store(timed: TimedHome) -> None:
    options = SMALL.__class__(
        segment_bytes=4 * BLOCK, direct=False, spare_segments=0, poll_interval_s=60
    )
    with timed.create() as other, timed.open(options=options) as vault:
        scope = place(vault)
        assert put(vault, scope, keys(1)).stored == 1
        put_in_force(other, policy("persist: false"))
        # Nothing has told this process; its own thread looks once a minute.
        assert put(vault, scope, keys(1, start=1)).declined == 1
        put_in_force(other, policy("delete_by: 5m"))
        assert put(vault, scope, keys(1, start=2)).stored == 1
        (newest,) = [facts for facts in vault.segments() if facts.policy_no == 3]
        assert newest.delete_by == newest.created_at + 300


# -- holds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tenant", "segment"])
def test_a_hold_keeps_what_has_expired_and_serves_it_no_more(timed: TimedHome, kind: str) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(2))
        put(vault, place(vault, tenant="bob"), keys(2))
        segment_id = segment_of(vault, scope, keys(1)[0])
        assert segment_id is not None
        number = hold(vault, kind, scope.tenant_id if kind == "tenant" else segment_id)
        timed.clock.advance(HOUR)
        done = vault.expire()
        assert (done.segments, done.held_segments) == (1, 1)
        assert_missing(vault, scope, keys(2))
        assert len(timed.segment_files()) == 1
    with timed.open() as vault:  # opening respects it, too
        scope = place(vault)
        assert_missing(vault, scope, keys(2))
        assert [f.segment_id for f in vault.segments() if f.state.live] == [segment_id]
        assert vault.delete_segments([segment_id]) == 0
        with pytest.raises(HeldError):
            vault.forget("alice")
        clear_hold(vault, number)
        assert vault.expire().blocks == 2
        assert timed.segment_files() == []


def test_a_hold_placed_after_the_plan_counts(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = place(vault)
        put(vault, scope, keys(2))
        timed.clock.advance(HOUR)
        plan = vault.plan_expired()
        assert len(plan.segments) == 1
        hold(vault, "tenant", scope.tenant_id)
        done = vault.execute(plan)
        assert (done.segments, done.held_segments) == (0, 1)
        assert len(timed.segment_files()) == 1


def test_a_full_disk_does_not_undo_a_hold(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files go first when the disk is too full to write a deletion down; not those of which a hold
    was placed after the plan."""
    import errno

    from kvvault.errors import StorageError

    with timed.create() as vault:
        alice, bob = place(vault), place(vault, tenant="bob")
        put(vault, alice, keys(2))
        put(vault, bob, keys(2))
        timed.clock.advance(HOUR)
        plan = vault.plan_expired()
        assert len(plan.segments) == 2
        hold(vault, "tenant", alice.tenant_id)
        write, failures = vault._catalog.write, [1]

        def full(*arguments: Any, **options: Any) -> Any:
            if failures:
                failures.pop()
                raise StorageError("the disk is full", hint="make room", errno=errno.ENOSPC)
            return write(*arguments, **options)

        monkeypatch.setattr(vault._catalog, "write", full)
        done = vault.execute(plan)
        assert not failures
        assert (done.segments, done.held_segments) == (1, 1)
        held = segment_of(vault, alice, keys(1)[0])
        assert held is not None
        assert [path.stem for path in timed.segment_files()] == [held.hex()]
        assert timed.segment_files()[0].stat().st_size == 2 * BLOCK


# -- cost ----------------------------------------------------------------------------------------


class Statements:
    """Counts what is sent to SQLite."""

    def __init__(self) -> None:
        self.count = 0
        self.rows = 0

    def __call__(
        self, _connection: Any, cursor: Any, statement: str, *_: Any
    ) -> None:  # pragma: no cover - called by the driver's threads
        self.count += 1
        if not statement.lstrip().upper().startswith(("SELECT", "PRAGMA")):
            self.rows += max(cursor.rowcount, 0)


def revocation_costs(home: TimedHome, blocks: int) -> tuple[int, int]:
    """Statements and changed rows until a vault with one segment of `blocks` has revoked it."""
    home.options = SMALL.__class__(direct=False, spare_segments=0, poll_interval_s=60)
    with home.create() as vault:
        scope = place(vault)
        for first in range(0, blocks, 64):
            block_keys = keys(min(64, blocks - first), start=first)
            vault.put(scope, block_keys, contents("a", block_keys))
        (facts,) = vault.segments()
        assert facts.blocks == blocks
        home.clock.advance(HOUR)
        seen = Statements()
        event.listen(Engine, "after_cursor_execute", seen)
        try:
            vault._catalog.write(
                lambda c: retention.revoke(
                    c,
                    [facts.segment_id],
                    trigger="expire",
                    now=vault.time.steady(),
                    actor="test",
                    reason="",
                    expired_by=vault.time.steady(),
                )
            )
        finally:
            event.remove(Engine, "after_cursor_execute", seen)
        buffers = dirty(1)
        assert vault.get(scope, keys(1), buffers) == [Outcome.MISS]
        return seen.count, seen.rows


def test_until_unreadable_it_costs_the_same_for_many_blocks(home: Home) -> None:
    few = revocation_costs(TimedHome(home.path), 2)
    many = revocation_costs(TimedHome(home.path.with_name("many")), 2000)
    assert few == many
    assert few[0] > 0
    assert few[1] > 0
