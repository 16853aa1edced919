"""Holds: what they keep, against what, and until when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvvault.crypto.providers import EphemeralProvider
from kvvault.deleting import Trigger
from kvvault.errors import (
    ClosedError,
    HeldError,
    KeyUnavailableError,
    UsageError,
    WrongKeyError,
)
from kvvault.holding import HoldKind
from kvvault.testing import FaultyProvider, ManualClock
from kvvault.vault import Scope, Vault
from tests.core.support import (
    SMALL,
    Home,
    assert_hits,
    assert_missing,
    key,
    keys,
    namespace,
    put,
    segment_of,
)

DAY = 86_400.0
"""The default policy's ceiling."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def vault(home: Home, clock: ManualClock) -> Iterator[Vault]:
    with Vault.create(home.path, provider=home.provider, options=SMALL, clock=clock) as made:
        yield made


def reopen(home: Home, clock: ManualClock) -> Vault:
    return Vault.open(home.path, provider=home.provider, options=SMALL, clock=clock)


@pytest.fixture
def alice(vault: Vault) -> Scope:
    scope = vault.scope("alice", namespace())
    put(vault, scope, keys(4))
    return scope


@pytest.fixture
def bob(vault: Vault) -> Scope:
    scope = vault.scope("bob", namespace())
    put(vault, scope, keys(4), "b")
    return scope


def hold(vault: Vault, tenant: str | None = None, segment: bytes | None = None) -> int:
    return vault.place_hold(
        tenant=tenant, segment_id=segment, reason="case 4", actor="counsel"
    ).number


def clear(vault: Vault, number: int) -> int:
    """Returns how many segments went with it."""
    return vault.clear_hold(number, reason="case closed", actor="counsel").segments


def only_segment(vault: Vault, scope: Scope) -> bytes:
    [facts] = [f for f in vault.segments() if f.state.live and f.tenant_id == scope.tenant_id]
    return facts.segment_id


def living(vault: Vault, scope: Scope) -> int:
    return sum(f.state.live and f.tenant_id == scope.tenant_id for f in vault.segments())


class TestExpiry:
    @pytest.mark.parametrize("kind", HoldKind)
    def test_kept_but_not_served_past_the_deadline(
        self, vault: Vault, clock: ManualClock, alice: Scope, bob: Scope, kind: HoldKind
    ) -> None:
        if kind is HoldKind.TENANT:
            number = hold(vault, tenant="alice")
        else:
            number = hold(vault, segment=only_segment(vault, alice))
        assert_hits(vault, alice, keys(4))  # held and in time: served
        clock.advance(DAY + 1)
        done = vault.expire()
        assert (done.segments, done.held_segments) == (1, 1)
        assert (living(vault, alice), living(vault, bob)) == (1, 0)
        assert_missing(vault, alice, keys(4))
        assert vault.contains(alice, keys(4)) == [False] * 4
        # It resumes the moment the hold is cleared: nobody has to ask for it.
        assert clear(vault, number) == 1
        assert living(vault, alice) == 0
        assert_missing(vault, alice, keys(4))

    def test_cleared_in_time_nothing_goes(self, vault: Vault, alice: Scope) -> None:
        assert clear(vault, hold(vault, tenant="alice")) == 0
        assert_hits(vault, alice, keys(4))

    def test_what_another_hold_keeps_stays(
        self, vault: Vault, clock: ManualClock, alice: Scope
    ) -> None:
        first, second = hold(vault, tenant="alice"), hold(vault, tenant="alice")
        third = hold(vault, segment=only_segment(vault, alice))
        clock.advance(DAY + 1)
        assert clear(vault, second) == 0
        assert clear(vault, first) == 0
        assert living(vault, alice) == 1
        assert clear(vault, third) == 1

    def test_a_restart_does_not_end_a_hold(
        self, home: Home, vault: Vault, clock: ManualClock, alice: Scope, bob: Scope
    ) -> None:
        number = hold(vault, tenant="alice")
        vault.close()
        clock.advance(DAY + 1)
        with reopen(home, clock) as again:  # opening expires by itself
            assert living(again, bob) == 0
            assert living(again, alice) == 1
            clear(again, number)
            assert living(again, alice) == 0

    def test_what_is_stored_under_a_tenants_hold_is_held(
        self, vault: Vault, clock: ManualClock, alice: Scope
    ) -> None:
        segment = only_segment(vault, alice)
        hold(vault, tenant="alice")
        clock.advance(DAY / 2)
        put(vault, alice, keys(4, start=10))
        later = segment_of(vault, alice, key(10))
        assert later != segment
        clock.advance(DAY)
        assert vault.expire().held_segments == 2

    def test_a_segments_hold_is_for_that_one(
        self, vault: Vault, clock: ManualClock, alice: Scope
    ) -> None:
        put(vault, alice, keys(4, start=10))
        held, free = (segment_of(vault, alice, key(n)) for n in (0, 10))
        assert held is not None
        assert held != free
        hold(vault, segment=held)
        clock.advance(DAY + 1)
        assert vault.expire().segments == 1
        assert only_segment(vault, alice) == held


class TestOtherDeletions:
    @pytest.mark.parametrize("trigger", [Trigger.REMOVE, Trigger.EVICT])
    def test_neither_by_hand_nor_for_space(
        self, vault: Vault, alice: Scope, bob: Scope, trigger: Trigger
    ) -> None:
        hold(vault, segment=only_segment(vault, alice))
        ids = [only_segment(vault, alice), only_segment(vault, bob)]
        plan = vault._eraser.plan_segments(ids, trigger)
        assert [facts.segment_id for facts in plan.held] == ids[:1]
        done = vault.execute(plan)
        assert (done.segments, done.held_segments) == (1, 1)
        assert_hits(vault, alice, keys(4))
        assert_missing(vault, bob, keys(4))

    def test_a_hold_placed_after_the_plan_counts(
        self, vault: Vault, alice: Scope, bob: Scope
    ) -> None:
        plan = vault.plan_segments([only_segment(vault, alice), only_segment(vault, bob)])
        assert not plan.held
        hold(vault, tenant="alice")
        done = vault.execute(plan)
        assert (done.segments, done.held_segments) == (1, 1)
        assert_hits(vault, alice, keys(4))

    def test_a_hold_placed_by_another_process_counts(
        self, home: Home, vault: Vault, clock: ManualClock, alice: Scope
    ) -> None:
        with reopen(home, clock) as other:
            number = hold(other, tenant="alice")
            assert vault.delete_segments([only_segment(vault, alice)]) == 0
            assert_hits(vault, alice, keys(4))
            clear(other, number)
        assert vault.delete_segments([only_segment(vault, alice)]) == 1
        assert_missing(vault, alice, keys(4))

    @pytest.mark.parametrize("kind", HoldKind)
    def test_a_held_tenant_is_not_forgotten(
        self, vault: Vault, alice: Scope, kind: HoldKind
    ) -> None:
        put(vault, alice, keys(4, start=10))  # of which no hold is on the segment
        if kind is HoldKind.TENANT:
            number = hold(vault, tenant="alice")
        else:
            number = hold(vault, segment=segment_of(vault, alice, key(0)))
        with pytest.raises(HeldError):
            vault.forget("alice")
        assert_hits(vault, alice, [*keys(4), *keys(4, start=10)])
        clear(vault, number)
        assert vault.forget("alice") == 2
        assert_missing(vault, alice, keys(4))

    def test_a_held_tenant_without_blocks_is_not_forgotten(self, vault: Vault) -> None:
        vault.scope("carol", namespace())
        number = hold(vault, tenant="carol")
        with pytest.raises(HeldError):
            vault.forget("carol")
        assert [facts.name for facts in vault.tenants()] == ["carol"]
        clear(vault, number)
        vault.forget("carol")
        assert vault.tenants() == []


class TestPlacing:
    def test_what_is_not_there(self, vault: Vault, alice: Scope) -> None:
        with pytest.raises(UsageError, match="no such tenant"):
            hold(vault, tenant="nobody")
        with pytest.raises(UsageError, match="no such segment"):
            hold(vault, segment=bytes(16))
        dead = only_segment(vault, alice)
        vault.delete_segments([dead])
        with pytest.raises(UsageError, match="no such segment"):
            hold(vault, segment=dead)
        vault.forget("alice")
        with pytest.raises(UsageError, match="no such tenant"):
            hold(vault, tenant="alice")
        assert vault.holds(cleared=True) == []

    def test_on_one_thing(self, vault: Vault, alice: Scope) -> None:
        with pytest.raises(ValueError, match="a hold is on a tenant"):
            hold(vault)
        with pytest.raises(ValueError, match="a hold is on a tenant"):
            hold(vault, tenant="alice", segment=only_segment(vault, alice))

    @pytest.mark.parametrize("text", ["", "  ", "a\nb", "\x1b[2J", "x" * 501])
    def test_texts_that_cannot_be_used(self, vault: Vault, alice: Scope, text: str) -> None:
        number = hold(vault, tenant="alice")
        for reason, actor in ((text, "me"), ("why", text)):
            with pytest.raises(UsageError):
                vault.place_hold(tenant="alice", reason=reason, actor=actor)
            with pytest.raises(UsageError):
                vault.clear_hold(number, reason=reason, actor=actor)
        assert [one.number for one in vault.holds()] == [number]

    def test_needs_a_vault_open_for_writing(self, home: Home, vault: Vault, alice: Scope) -> None:
        number = hold(vault, tenant="alice")
        with home.open(read_only=True) as looking:
            assert [one.number for one in looking.holds()] == [number]
            with pytest.raises(ClosedError):
                hold(looking, tenant="alice")
            with pytest.raises(ClosedError):
                clear(looking, number)
        assert [one.number for one in vault.holds()] == [number]

    def test_only_on_the_tenant_that_was_named(
        self, home: Home, vault: Vault, clock: ManualClock, alice: Scope, bob: Scope
    ) -> None:
        vault.close()
        with home.sql() as sql:  # the names lead to each other's rows
            rows = sql.execute("SELECT tenant_id, lookup_id FROM tenants").fetchall()
            (a, of_a), (b, of_b) = rows
            for tenant, lookup in ((a, b"x"), (b, of_a), (a, of_b)):
                sql.execute("UPDATE tenants SET lookup_id=? WHERE tenant_id=?", (lookup, tenant))
        with reopen(home, clock) as again:
            with pytest.raises(WrongKeyError):
                hold(again, tenant="alice")
            assert again.holds() == []


class TestClearing:
    @pytest.mark.parametrize("number", [0, -1, 1 << 63, 1 << 64, -(1 << 70)])
    def test_a_number_that_no_hold_can_have_is_no_hold(
        self, vault: Vault, alice: Scope, number: int
    ) -> None:
        hold(vault, tenant="alice")
        with pytest.raises(UsageError, match="no hold of that number"):
            clear(vault, number)
        assert len(vault.holds()) == 1

    def test_only_what_is_in_force(self, vault: Vault, alice: Scope) -> None:
        number = hold(vault, tenant="alice")
        with pytest.raises(UsageError, match="no hold of that number"):
            clear(vault, number + 1)
        assert [one.number for one in vault.holds()] == [number]
        clear(vault, number)
        with pytest.raises(UsageError, match="cleared before"):
            clear(vault, number)
        assert hold(vault, tenant="alice") > number


class TestListing:
    def test_everything_is_recorded(
        self, vault: Vault, clock: ManualClock, alice: Scope, bob: Scope
    ) -> None:
        hold(vault, tenant="alice")
        hold(vault, segment=only_segment(vault, bob))
        first, second = vault.holds()
        assert (first.kind, first.target, first.tenant) == (
            HoldKind.TENANT,
            alice.tenant_id,
            "alice",
        )
        assert (second.kind, second.target, second.tenant) == (
            HoldKind.SEGMENT,
            only_segment(vault, bob),
            "bob",
        )
        for one in (first, second):
            assert one.in_force
            assert (one.reason, one.actor) == ("case 4", "counsel")
            assert (one.segments, one.blocks, one.data_bytes) == (1, 4, 4 * 4096)
            assert (one.cleared_at, one.cleared_by, one.cleared_reason) == (None, None, None)
        clock.advance(60)
        clear(vault, first.number)
        assert vault.holds() == [second]
        cleared, _ = vault.holds(cleared=True)
        assert not cleared.in_force
        assert (cleared.cleared_by, cleared.cleared_reason) == ("counsel", "case closed")
        assert first.placed_at is not None
        assert cleared.cleared_at == first.placed_at + 60

    def test_no_name_stands_in_the_catalog(self, home: Home, vault: Vault) -> None:
        put(vault, vault.scope("a-rare-name", namespace()), keys(2))
        vault.place_hold(tenant="a-rare-name", reason="a rare reason", actor="counsel")
        vault.close()
        catalog = home.catalog.read_bytes()
        assert b"a rare reason" in catalog
        assert b"a-rare-name" not in catalog

    def test_of_a_tenant_that_is_gone(self, vault: Vault, alice: Scope) -> None:
        clear(vault, hold(vault, tenant="alice"))
        vault.forget("alice")
        [one] = vault.holds(cleared=True)
        assert (one.tenant, one.segments) == (None, 0)

    def test_while_keys_cannot_be_had(self, home: Home, clock: ManualClock) -> None:
        faulty = FaultyProvider(EphemeralProvider())
        home.provider = faulty
        with Vault.create(home.path, provider=faulty, options=SMALL, clock=clock) as vault:
            put(vault, vault.scope("alice", namespace()), keys(2))
        with reopen(home, clock) as vault:
            faulty.fail(KeyUnavailableError("down", hint="wait"), methods={"unwrap"})
            number = hold(vault, tenant="alice")  # a hold is no reason to wait for keys
            [one] = vault.holds()
            assert (one.number, one.tenant, one.segments) == (number, None, 1)
            faulty.heal()
            clock.advance(2)
            [one] = vault.holds()
            assert one.tenant == "alice"

    @pytest.mark.parametrize(
        ("column", "value"), [("target", 7), ("kind", "planet"), ("placed_at", "noon")]
    )
    def test_a_damaged_row_is_listed_as_that(
        self, home: Home, vault: Vault, clock: ManualClock, alice: Scope, column: str, value: object
    ) -> None:
        hold(vault, tenant="alice")
        vault.close()
        with home.sql() as sql:
            sql.execute(f"UPDATE holds SET {column}=?", (value,))  # noqa: S608 - a name from above
        with reopen(home, clock) as again:
            assert [one.kind for one in again.holds()] == [None]
