"""Holds of whom nothing is there, holds whose rows are damaged: they fail closed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvvault.catalog import membership
from kvvault.catalog.protecting import InForce, in_force
from kvvault.errors import HeldError, UsageError
from kvvault.health import health_of
from kvvault.holding import HoldKind
from kvvault.promptfacts import Condition
from kvvault.segments.format import segment_name
from kvvault.vault import Scope, Vault
from tests.core.support import assert_hits, assert_missing, namespace
from tests.core.test_prompt_erasing import erase, of, path, query, send
from tests.core.timed import TimedHome


@pytest.fixture
def timed(home: TimedHome) -> TimedHome:
    return TimedHome(home.path)


@pytest.fixture
def vault(timed: TimedHome) -> Iterator[Vault]:
    with timed.create() as made:
        yield made


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())


def counted(vault: Vault) -> InForce:
    return vault.catalog.read(in_force)


class TestOfNobodyYet:
    def test_the_tenant_is_not_forgotten_while_a_subjects_hold_is_in_force(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2], "bert")
        hold = vault.place_hold(tenant="alice", subject="anna", reason="case", actor="c")
        assert (hold.kind, hold.tenant, hold.segments) == (HoldKind.SUBJECT, "alice", 0)
        assert [one.tenant for one in vault.holds()] == ["alice"]
        with pytest.raises(HeldError):
            vault.forget("alice")
        assert_hits(vault, scope, path(1, 2))
        vault.scope("bob", namespace())
        vault.forget("bob")  # another tenant's
        vault.clear_hold(hold.number, reason="closed", actor="c")
        vault.forget("alice")
        assert [facts.name for facts in vault.tenants()] == []

    def test_another_tenants_hold_costs_one_look_at_the_inventory(
        self, vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send(vault, scope, [1, 2], "bert")
        send(vault, vault.scope("bob", namespace()), [1, 2], "anna")
        vault.place_hold(tenant="bob", subject="anna", reason="case", actor="c")
        plan = vault.plan_tenant("alice")
        assert plan is not None
        looks: list[object] = []
        real = membership.snapshot

        def snapshot(*args: Any, **named: Any) -> membership.Snapshot:
            looks.append(args)
            return real(*args, **named)

        monkeypatch.setattr(membership, "snapshot", snapshot)
        assert vault.execute(plan, actor="o", reason="r").segments == 1
        assert len(looks) == 1

    def test_nor_with_one_that_is_placed_after_the_plan(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2], "bert")
        plan = vault.plan_tenant("alice")
        assert plan is not None
        vault.place_hold(tenant="alice", subject="anna", reason="case", actor="c")
        with pytest.raises(HeldError):
            vault.execute(plan, actor="o", reason="r")
        assert_hits(vault, scope, path(1, 2))

    def test_no_id_of_a_forgotten_tenant_stays(self, vault: Vault, scope: Scope) -> None:
        prompt = send(vault, scope, [1, 2], "bert")
        bystander = vault.scope("bob", namespace())
        send(vault, bystander, [1], "bert")
        segment = next(f.segment_id for f in vault.segments() if f.tenant_id == scope.tenant_id)
        placed = [
            vault.place_hold(tenant="alice", reason="r", actor="c"),
            vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c"),
            vault.place_hold(prompt_id=prompt.prompt_id, reason="r", actor="c"),
            vault.place_hold(segment_id=segment, reason="r", actor="c"),
        ]
        other = vault.place_hold(tenant="bob", subject="bert", reason="r", actor="c")
        assert {one.tenant_id for one in placed} == {scope.tenant_id}
        for one in placed:
            vault.clear_hold(one.number, reason="x", actor="c")
        vault.forget("alice")
        assert (
            query(vault, "SELECT target, tenant_id FROM holds WHERE hold_no < 5")
            == [(b"", None)] * 4
        )
        left = [(one.number, one.tenant) for one in vault.holds(cleared=True)]
        assert left == [(1, None), (2, None), (3, None), (4, None), (other.number, "bob")]
        # That they do not say any more on whom they were is no damage.
        assert [one.kind for one in vault.holds(cleared=True)] == [one.kind for one in placed] + [
            HoldKind.SUBJECT
        ]

    def test_it_is_not_placed_on_a_tenant_that_is_gone_by_then(
        self, vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = vault._holder._place

        def late(*args: object, **options: object) -> object:
            vault.forget("alice")
            return place(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(vault._holder, "_place", late)
        with pytest.raises(UsageError, match="no such tenant"):
            vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c")
        assert query(vault, "SELECT count(*) FROM holds") == [(0,)]

    def test_nor_of_one_whose_held_segment_was_lost(self, timed: TimedHome) -> None:
        with timed.create() as vault:
            send(vault, vault.scope("alice", namespace()), [1, 2, 3, 4], "anna")
            [first] = vault.segments()
            send(vault, vault.scope("bob", namespace()), [1, 2, 3, 4], "anna")
            vault.place_hold(segment_id=first.segment_id, reason="r", actor="c")
        (timed.path / "segments" / segment_name(first.segment_id)).unlink()
        with timed.open() as vault:
            vault.forget("alice")
            assert query(vault, "SELECT target, tenant_id, cleared_at FROM holds") == [
                (b"", None, None)
            ]
            [one] = vault.holds()
            assert (one.kind, one.segments) == (HoldKind.SEGMENT, 0)
            assert counted(vault) == InForce(1, 0)
            vault.forget("bob")  # it keeps nothing of others'
            vault.clear_hold(one.number, reason="over", actor="c")


class TestDamagedRows:
    @pytest.mark.parametrize("value", ["x'00'", "'text'", "7"])
    def test_a_bad_row_of_what_holds_keep_is_written_anew(
        self, timed: TimedHome, value: str
    ) -> None:
        with timed.create() as vault:
            scope = vault.scope("alice", namespace())
            send(vault, scope, [1, 2, 3, 4], "anna")  # a whole segment
            send(vault, scope, [5, 6], "bert")
            vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c")
        with timed.sql() as sql:
            sql.execute(f"UPDATE hold_segments SET segment_id = {value}")  # noqa: S608
        with timed.open() as vault:
            scope = vault.scope("alice", namespace())
            segments = [f.segment_id for f in vault.segments() if f.state.live]
            assert len(segments) == 2
            report = vault.execute(vault.plan_segments(segments), actor="o", reason="r")
            assert (report.segments, report.held_segments) == (1, 1)
            assert_hits(vault, scope, path(1, 2, 3, 4))
            assert_missing(vault, scope, path(5, 6))
            assert vault.holds()[0].segment_ids == {
                row[0] for row in query(vault, "SELECT segment_id FROM hold_segments")
            }

    @pytest.mark.parametrize(
        "damage",
        [
            "kind = 'planet'",
            "kind = 'tenant', target = x'00'",
            "kind = CAST(x'ff' AS TEXT)",
            "kind = x'00'",
            "target = 7",
            "target = x'00'",
            "target = x''",
            "target = 'text'",
            "target = CAST(x'ff' AS TEXT)",
            "reason = x'ff'",
            "actor = x'ff'",
            "placed_at = 'noon'",
            "cleared_at = 'noon'",
            "kind = 'planet', cleared_at = 'noon'",
        ],
    )
    def test_what_a_bad_hold_may_keep_is_kept_and_nothing_else_until_it_is_cleared(
        self, timed: TimedHome, damage: str
    ) -> None:
        with timed.create() as vault:
            for tenant in ("alice", "bob"):
                scope = vault.scope(tenant, namespace())
                send(vault, scope, [1, 2], "anna")
            hold = vault.place_hold(tenant="alice", subject="anna", reason="r", actor="c")
        with timed.sql() as sql:
            sql.execute(f"UPDATE holds SET {damage}")  # noqa: S608 - from above
        with timed.open() as vault:
            here, there = (vault.scope(name, namespace()) for name in ("alice", "bob"))
            rows, _ = vault.prompts.listing()
            assert {(row.tenant, row.holds) for row in rows} == {
                ("alice", (hold.number,)),
                ("bob", ()),
            }
            assert [one.holds for one in vault.prompts.subjects()] == [(hold.number,), ()]
            [one] = vault.holds()
            assert (one.number, one.kind, one.on, one.target) == (hold.number, None, "damaged", b"")
            assert (one.tenant, one.in_force) == ("alice", True)
            mine = {f.segment_id for f in vault.segments() if f.tenant_id == here.tenant_id}
            assert one.segment_ids == mine
            assert counted(vault) == InForce(1, 1)
            assert health_of(vault, timed.clock).holds == InForce(1, 1)
            assert erase(vault, of("anna")).blocks == 0
            segments = [f.segment_id for f in vault.segments() if f.state.live]
            report = vault.execute(vault.plan_segments(segments), actor="o", reason="r")
            assert (report.segments, report.held_segments) == (1, 1)
            assert_hits(vault, here, path(1, 2))
            assert_missing(vault, there, path(1, 2))
            with pytest.raises(HeldError):
                vault.forget("alice")
            vault.forget("bob")
            timed.clock.advance(3700)
            vault.refresh()
            assert vault.expire().held_segments == 1
            done = vault.clear_hold(hold.number, reason="cannot be read", actor="c")
            assert (done.segments, vault.holds(), counted(vault)) == (1, [], InForce(0, 0))
            [cleared] = vault.holds(cleared=True)
            assert (cleared.cleared_by, cleared.cleared_reason) == ("c", "cannot be read")
            [(body,)] = query(
                vault, "SELECT body FROM log_entries WHERE body LIKE '%hold-cleared%'"
            )
            assert json.loads(str(body))["damaged"] is True
            vault.forget("alice")

    def test_one_that_does_not_say_whose_it_is_keeps_everything(self, timed: TimedHome) -> None:
        with timed.create() as vault:
            for tenant in ("alice", "bob"):
                send(vault, vault.scope(tenant, namespace()), [1, 2], "anna")
            vault.place_hold(tenant="alice", reason="r", actor="c")
        with timed.sql() as sql:
            sql.execute("UPDATE holds SET target = 7, tenant_id = 'text'")
        with timed.open() as vault:
            segments = [f.segment_id for f in vault.segments() if f.state.live]
            report = vault.execute(vault.plan_segments(segments), actor="o", reason="r")
            assert (report.segments, report.held_segments) == (0, 2)
            plan = vault.plan_erasure(of("anna"), tenant="bob")
            assert (plan.blocks, plan.held_prompts) == (0, 1)
            for tenant in ("alice", "bob"):
                with pytest.raises(HeldError):
                    vault.forget(tenant)
            [one] = vault.holds()
            assert (one.on, one.tenant_id) == ("damaged", None)
            assert one.segment_ids == set(segments)
            vault.clear_hold(one.number, reason="cannot be read", actor="c")
            assert vault.plan_erasure(of("anna"), tenant="bob").blocks == 2
            vault.forget("bob")


def test_nothing_personal_in_what_a_hold_prints(vault: Vault, scope: Scope) -> None:
    send(vault, scope, [1], "anna")
    hold = vault.place_hold(tenant="alice", subject="anna", reason="a reason", actor="counsel")
    hold = vault.holds()[0]
    vault.clear_hold(hold.number, reason="another reason", actor="counsel")
    for one in (hold, *vault.holds(cleared=True)):
        assert (one.tenant, one.reason) == ("alice", "a reason")
        assert not re.search("alice|anna|reason'|a reason|counsel", repr(one))
    assert vault.prompts.listing([Condition("subject", "=", "anna")])[1] == 1
