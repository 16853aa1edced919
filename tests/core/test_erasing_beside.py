"""Erasing beside what others do, keep, or have in their hands: what stays is not lost, what went
does not come back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvvault.audit.receipts import EngineCopy
from kvvault.catalog import membership, operations
from kvvault.deleting import Eraser
from kvvault.errors import HeldError, StorageError
from kvvault.model import Outcome
from kvvault.promptfacts import Condition
from kvvault.rewriting import Rewriter
from kvvault.testing import ManualClock
from kvvault.vault import Scope, Vault
from tests.core.support import (
    SMALL,
    Home,
    assert_hits,
    assert_missing,
    get,
    keys,
    namespace,
    put,
)
from tests.core.test_prompt_erasing import erase, of, path, send
from tests.core.test_prompting import query

START = 1_800_000_000.0


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())


def listed(vault: Vault) -> dict[str | None, int]:
    return {p.subject: p.blocks for p in vault.prompts.listing()[0]}


def hold(vault: Vault, subject: str) -> int:
    placed = vault.place_hold(tenant="alice", subject=subject, reason="a case", actor="counsel")
    return placed.number


class TestBesideHolds:
    def test_a_neighbour_of_what_is_held_goes_once_and_for_all(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2], "anna")
        send(vault, scope, [7, 8], "bert")
        hold(vault, "anna")
        report = erase(vault, of("bert"))
        assert (report.blocks, report.waiting_segments) == (2, 0)
        for _ in range(3):
            vault.reconcile()
        assert listed(vault) == {"anna": 2}
        assert vault.stats().blocks == 2
        assert_hits(vault, scope, path(1, 2))
        assert vault.purge().deletions >= 1
        assert not vault.purge_is_due()

    @pytest.mark.parametrize("kind", ["subject", "prompt"])
    def test_single_blocks_of_what_is_held_stay(
        self, vault: Vault, scope: Scope, kind: str
    ) -> None:
        send(vault, scope, [1, 2], "anna")
        send(vault, scope, [7, 8], "bert")
        named = [*path(1, 2), *path(7)]
        early = vault.plan_blocks(scope, named)
        if kind == "subject":
            number = hold(vault, "anna")
        else:
            [prompt_id] = vault.plan_erasure(of("anna"), tenant="alice").prompt_ids
            placed = vault.place_hold(prompt_id=prompt_id, reason="a case", actor="counsel")
            number = placed.number
        assert (early.blocks, len(early.held)) == (3, 0)
        plan = vault.plan_blocks(scope, named)
        assert (plan.blocks, sum(facts.blocks for facts in plan.held)) == (1, 2)
        report = vault.execute(early)
        assert (report.blocks, report.held_segments, report.waiting_segments) == (1, 1, 0)
        assert_hits(vault, scope, path(1, 2))
        assert_missing(vault, scope, path(7))
        vault.clear_hold(number, reason="over", actor="counsel")
        report = vault.execute(early)  # the control
        assert (report.blocks, report.held_segments) == (2, 0)
        assert_missing(vault, scope, path(1, 2))

    def test_what_waits_is_not_copied_again_and_again(
        self, vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send(vault, scope, [1, 2], "anna")
        send(vault, scope, [7, 8], "bert")
        real = Eraser.execute

        def execute(eraser: Eraser, plan: Any, **named: Any) -> Any:
            if plan.trigger.value == "compact":
                raise StorageError("a test", hint="a test")
            return real(eraser, plan, **named)

        monkeypatch.setattr(Eraser, "execute", execute)
        assert erase(vault, of("bert")).waiting_segments == 1
        after_one = vault.stats().blocks
        for _ in range(3):
            vault.reconcile()
        assert vault.stats().blocks == after_one
        monkeypatch.undo()
        vault.reconcile()
        assert (listed(vault), vault.stats().blocks) == ({"anna": 2}, 2)

    def test_what_is_held_past_its_deadline_is_kept_all_the_same(self, home: Home) -> None:
        clock = ManualClock(START)
        with Vault.create(home.path, provider=home.provider, options=SMALL, clock=clock) as vault:
            scope = vault.scope("alice", namespace())
            send(vault, scope, [1, 2], "anna")
            send(vault, scope, [7, 8], "bert")
            number = hold(vault, "anna")
            clock.advance(25 * 3600)
            vault.expire()
            assert vault.holds()[0].blocks >= 2
            erase(vault, of("bert"))
            assert vault.holds()[0].blocks >= 2
            assert_missing(vault, scope, path(1, 2))  # kept is not served
            vault.clear_hold(number, reason="over", actor="counsel")
            assert vault.stats().blocks == 0

    def test_what_is_kept_and_not_served_is_still_found(self, home: Home) -> None:
        clock = ManualClock(START)
        with Vault.create(home.path, provider=home.provider, options=SMALL, clock=clock) as vault:
            scope = vault.scope("alice", namespace())
            send(vault, scope, [1, 2], "anna")
            hold(vault, "anna")
            clock.advance(25 * 3600)
            vault.expire()
            names = path(1, 2)
            assert vault.contains(scope, names) == [False, False]
            assert vault.prompts.persist(scope.keys, scope.namespace, names) == [True, True]
            found = vault.prompts.find_chain(scope.keys, scope.namespace, names, [16, 32])
            assert (found.blocks, [p.subject for p, _ in found.prompts]) == (2, ["anna"])

    def test_a_clock_that_is_not_believed_costs_the_neighbour_nothing(self, home: Home) -> None:
        clock = ManualClock(START)
        with Vault.create(home.path, provider=home.provider, options=SMALL, clock=clock) as vault:
            scope = vault.scope("alice", namespace())
            send(vault, scope, [1, 2], "anna")
            send(vault, scope, [7, 8], "bert")
        ahead = ManualClock(START + 30 * 86400)
        with Vault.open(home.path, provider=home.provider, options=SMALL, clock=ahead) as vault:
            assert vault.time.suspect
            assert erase(vault, of("bert")).blocks == 2
        right = ManualClock(START + 60)
        with Vault.open(home.path, provider=home.provider, options=SMALL, clock=right) as vault:
            assert_hits(vault, vault.scope("alice", namespace()), path(1, 2))

    def test_prompts_in_a_held_segment_stay_known(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2], "anna")
        [segment] = [f.segment_id for f in vault.segments()]
        placed = vault.place_hold(segment_id=segment, reason="a case", actor="counsel")
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        assert (plan.numbers, plan.held_prompts) == ((), 1)
        assert erase(vault, of("anna")).blocks == 0
        assert listed(vault) == {"anna": 2}
        vault.clear_hold(placed.number, reason="over", actor="counsel")
        assert erase(vault, of("anna")).blocks == 2
        assert_missing(vault, scope, path(1, 2))


class TestBetweenPlanAndDeed:
    def test_a_hold_on_somebody_who_shares(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        plan = vault.plan_erasure(of("anna"), tenant="alice", include_shared=True)
        assert plan.blocks == 4
        hold(vault, "bert")
        assert vault.erase(plan, actor="operator", reason="r").blocks == 1
        assert_hits(vault, scope, path(1, 2, 3, 20))

    def test_somebody_begins_to_share(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna")
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        assert plan.blocks == 4
        send(vault, scope, [1, 2, 3, 20], "bert")
        assert vault.erase(plan, actor="operator", reason="r").blocks == 1
        assert listed(vault) == {"bert": 4}
        assert_hits(vault, scope, path(1, 2, 3, 20))

    def test_somebody_stores_the_same_while_an_engine_is_asked(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna")
        plan = vault.plan_erasure(of("anna"), tenant="alice")

        def ask() -> list[EngineCopy]:
            send(vault, scope, [1, 2, 3, 10], "bert")
            return [EngineCopy("device", True, "reached")]

        assert vault.erase(plan, actor="operator", reason="r", engine=ask).blocks == 4
        assert listed(vault) == {"bert": 4}
        assert_hits(vault, scope, path(1, 2, 3, 10))

    def test_whoever_dies_while_an_engine_is_asked_has_left_a_receipt(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2], "anna")
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        with pytest.raises(KeyboardInterrupt):
            vault.erase(plan, actor="operator", reason="r", engine=die)
        assert query(vault, "SELECT phase FROM receipts") == [("revoked",)]
        assert_missing(vault, scope, path(1, 2))

    def test_a_hold_on_a_prompt_of_the_plan(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2], "anna")
        send(vault, scope, [1, 3], "anna")
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        vault.place_hold(prompt_id=plan.prompt_ids[0], reason="a case", actor="counsel")
        with pytest.raises(HeldError):
            vault.erase(plan, actor="operator", reason="r")
        assert_hits(vault, scope, [*path(1, 2), *path(1, 3)])


def die() -> list[EngineCopy]:
    raise KeyboardInterrupt


class TestInSomebodysHands:
    def test_what_is_being_evicted_does_not_come_back(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks in memory, to be written again, are erased meanwhile; and whoever erased them
        dies before it looks again."""
        with home.create() as one, home.open() as two:
            scope, there = (v.scope("alice", namespace()) for v in (one, two))
            send(one, scope, [1, 2], "anna")
            send(one, scope, [7, 8], "bert")
            rows = [f for f in one.segments() if f.blocks]
            real = Rewriter.save

            def save(rewriter: Rewriter, row: Any, slots: Any) -> Any:
                saved = real(rewriter, row, slots)
                monkeypatch.setattr(Rewriter, "save", real)
                plan = one.plan_erasure(of("anna"), tenant="alice")
                with pytest.raises(KeyboardInterrupt):
                    one.erase(plan, actor="operator", reason="r", engine=die)
                return saved

            two.refresh()
            monkeypatch.setattr(Rewriter, "save", save)
            for facts in rows:
                row = two.catalog.read(partial(operations.get_segment, segment_id=facts.segment_id))
                assert row is not None
                two._evictor._evict_one(row, range(facts.blocks), "a test")
            assert_missing(two, there, path(1, 2))
            assert_hits(two, there, path(7, 8))
            one.refresh()
            assert_missing(one, scope, path(1, 2))

    def test_what_an_erasure_left_is_swept(self, vault: Vault, scope: Scope) -> None:
        """However blocks of an erased prompt came back: nobody has them, so they go."""
        send(vault, scope, [1, 2, 3, 10], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        [(number,)] = query(vault, "SELECT prompt_no FROM prompts ORDER BY prompt_no LIMIT 1")
        vault.catalog.write(lambda c: membership.erase(c, [int(str(number))]))
        assert_hits(vault, scope, path(1, 2, 3, 10))
        vault.reconcile()
        outcomes, _ = get(vault, scope, path(1, 2, 3, 10))
        assert outcomes == [Outcome.HIT] * 3 + [Outcome.MISS]
        assert_hits(vault, scope, path(1, 2, 3, 20))
        assert listed(vault) == {"bert": 4}

    def test_nothing_of_nobody_is_swept(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(3))
        send(vault, scope, [1, 2], "anna")
        vault.reconcile()
        assert_hits(vault, scope, keys(3))
        assert vault.plan_erasure([Condition("age", ">=", 0.0)]).blocks == 2
