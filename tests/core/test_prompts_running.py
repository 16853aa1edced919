"""The inventory while requests run, others write blocks again, and rows are damaged: no block is
served that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import Connection

from kvvault.catalog import operations
from kvvault.catalog.database import direct
from kvvault.errors import UsageError
from kvvault.model import Outcome
from kvvault.origins import OfPrompt
from kvvault.promptfacts import Condition, State
from kvvault.prompts import Prompts
from kvvault.reading import ALWAYS
from kvvault.vault import Scope, Vault
from tests.core.support import assert_hits, contents, get, key, keys, namespace, segment_of
from tests.core.test_prompting import chain_of, members, number, owned, query, send, store
from tests.core.timed import TimedHome, report

HOUR = 3600.0
ANNA = Condition("subject", "=", "anna")


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


def expire(vault: Vault, timed: TimedHome) -> None:
    timed.clock.advance(HOUR + 100)
    vault.refresh()
    assert vault.expire().segments > 0


class TestPruning:
    def test_a_running_request_stores_on_after_its_first_blocks_expired(
        self, vault: Vault, scope: Scope, timed: TimedHome
    ) -> None:
        chain = chain_of(keys(4))
        prompt = vault.prompt(scope, subject="anna")
        over = send(vault, scope, keys(2, start=10))
        assert store(vault, scope, prompt, chain, keys(2)) == 2
        expire(vault, timed)
        assert vault.prompts.prune() == 1
        assert number(vault, over) is None  # positive control: what is over goes
        assert store(vault, scope, prompt, chain, keys(2, start=2)) == 2
        assert members(vault, prompt) == {scope.block_id(k) for k in keys(2, start=2)}
        assert [p.subject for p in vault.prompts.listing()[0]] == ["anna"]

    def test_another_process_does_not_prune_it_either(self, timed: TimedHome) -> None:
        with timed.create() as vault, timed.open() as other:
            scope = vault.scope("alice", namespace())
            chain = chain_of(keys(4))
            prompt = vault.prompt(scope, subject="anna")
            store(vault, scope, prompt, chain, keys(2))
            expire(vault, timed)
            report(vault)
            assert other.prompts.prune() == 0
            assert store(vault, scope, prompt, chain, keys(2, start=2)) == 2
            # Over now, and nothing left of it: it goes.
            vault.record(prompt, chain)
            vault.settle_prompts()
            expire(vault, timed)
            report(vault)
            assert other.prompts.prune() == 1

    def test_a_request_that_nobody_has_a_handle_of_any_more_is_over(
        self, vault: Vault, scope: Scope, timed: TimedHome
    ) -> None:
        prompt = vault.prompt(scope, subject="anna")
        store(vault, scope, prompt, chain_of(keys(2)))
        del prompt
        expire(vault, timed)
        assert vault.prompts.prune() == 1

    def test_a_row_made_late_is_not_pruned_before_its_blocks(self, timed: TimedHome) -> None:
        with timed.create() as vault, timed.open() as other:
            scope = vault.scope("alice", namespace())
            chain = chain_of(keys(2))
            prompt = vault.prompt(scope, subject="anna")
            timed.clock.advance(HOUR)  # a request that has waited, or thought, for long
            assert prompt.number(vault.catalog, vault._view) == 1
            assert other.prompts.prune() == 0
            assert store(vault, scope, prompt, chain) == 2

    def test_what_is_stored_between_its_look_and_its_transaction_stays_known(
        self, timed: TimedHome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with timed.create() as vault, timed.open() as other:
            scope = vault.scope("alice", namespace())
            first, second = (vault.prompt(scope, subject="anna") for _ in range(2))
            store(vault, scope, first, chain_of(keys(2)))
            store(vault, scope, second, chain_of(keys(2, start=10)))
            monkeypatch.setattr(vault._recorder, "touch", lambda **_: None)  # it was stopped
            expire(vault, timed)
            load = Prompts.load

            def slow(this: Prompts, **options: object) -> State:
                found = load(this, **options)  # type: ignore[arg-type]
                assert store(vault, scope, first, chain_of(keys(2))) == 2
                return found

            with monkeypatch.context() as patch:
                patch.setattr(Prompts, "load", slow)
                assert other.prompts.prune() == 1
            assert number(vault, second) is None
            assert_hits(vault, scope, keys(2))
            assert members(vault, first) == {scope.block_id(k) for k in keys(2)}

    def test_not_while_blocks_are_written_again(self, timed: TimedHome) -> None:
        """Between deleting a segment and writing what is worth it again, blocks live nowhere."""
        timed.options = replace(timed.options, lock_timeout_s=0.2)
        with timed.create() as vault, timed.open() as other:
            scope = vault.scope("alice", namespace())
            prompt = send(vault, scope, keys(2))
            timed.clock.advance(700)
            segment_id = segment_of(vault, scope, key(0))
            assert segment_id is not None
            row = vault.catalog.read(lambda c: operations.get_segment(c, segment_id))
            assert row is not None
            with other._rewriter.alone():
                other.refresh()
                saved = other._rewriter.save(row, [0, 1])
                assert saved is not None
                other.delete_segments([segment_id])
                assert vault.prompts.prune() == 0
                assert other._rewriter.write(row, saved) == 2
            assert members(vault, prompt) == {scope.block_id(k) for k in keys(2)}
            assert vault.prompts.prune() == 0
            other.delete_segments([f.segment_id for f in other.segments() if f.state.live])
            assert vault.prompts.prune() == 1


class TestKnown:
    def test_a_request_without_blocks_yet_is_meant_by_who_asks_for_everything(
        self, vault: Vault, scope: Scope
    ) -> None:
        prompt = vault.prompt(scope, subject="anna")
        prompt.number(vault.catalog, vault._view)
        bert = vault.prompt(scope, subject="bert")
        bert.number(vault.catalog, vault._view)
        state = vault.prompts.load()
        assert not vault.prompts.matching(state, [ANNA]).any()
        [row] = vault.prompts.matching(state, [ANNA], everything=True).nonzero()[0]
        assert state.snapshot.prompts.number[row] == number(vault, prompt)
        assert vault.prompts.numbers_of([prompt.prompt_id.hex()]) == {number(vault, prompt)}
        vault.catalog.write(partial(_set_gone, number=number(vault, prompt)))
        state = vault.prompts.load()
        assert not vault.prompts.matching(state, [ANNA], everything=True).any()
        assert vault.prompts.matching(state, [], everything=True).sum() == 1

    def test_a_copy_of_a_block_that_was_adopted_meanwhile_is_adopted_too(
        self, vault: Vault, scope: Scope
    ) -> None:
        """Read while it was nobody's, adopted, then written again as nobody's."""
        chain = chain_of(keys(2))
        store(vault, scope, None, chain)
        segment_id = segment_of(vault, scope, key(0))
        assert segment_id is not None
        row = vault.catalog.read(lambda c: operations.get_segment(c, segment_id))
        assert row is not None
        saved = vault._rewriter.save(row, [0, 1])
        assert saved is not None
        prompt = vault.prompt(scope, subject="anna")
        vault.record(prompt, chain)
        vault.settle_prompts()
        assert members(vault, prompt) == {scope.block_id(k) for k in keys(2)}
        vault.delete_segments([segment_id])
        assert vault._rewriter.write(row, saved) == 2
        assert set(owned(vault)) == {0}
        vault.settle_prompts()
        assert set(owned(vault)) == {number(vault, prompt)}
        written = query(vault, "SELECT count(*) FROM prompts WHERE last_used > first_used")
        vault.settle_prompts()  # nothing more to do
        assert query(vault, "SELECT count(*) FROM prompts WHERE last_used > first_used") == written


class TestCopies:
    def test_a_block_that_two_processes_stored_is_nobodys_alone(
        self, vault: Vault, scope: Scope
    ) -> None:
        chain = chain_of(keys(3))
        first = send(vault, scope, keys(3), "anna")
        second = vault.prompt(scope, subject="bert")
        # As a process stores that has not seen the first one's commit.
        vault._writer.put(
            scope.destination(vault._governor),
            [scope.block_id(k) for k in keys(2)],
            [memoryview(one) for one in contents("a", keys(2))],
            ALWAYS,
            again=True,
            origins=OfPrompt(second, [chain[k] for k in keys(2)], vault.catalog, vault._view),
        )
        vault.record(second, chain_of(keys(2)))
        vault.settle_prompts()
        found = {p.prompt_id: p for p in vault.prompts.listing()[0]}
        assert [found[p.prompt_id].blocks for p in (first, second)] == [3, 2]
        assert [found[p.prompt_id].alone_blocks for p in (first, second)] == [1, 0]
        assert found[first.prompt_id].alone_bytes == 4096
        for prompt in (first, second):
            shown = vault.prompts.show(prompt.prompt_id.hex())
            assert (shown.shared_with, shown.facts.alone_blocks) == (
                1,
                found[prompt.prompt_id].alone_blocks,
            )
        # What is said to be alone is what goes.
        assert vault.plan_erasure([], numbers=[number(vault, first) or 0]).blocks == 1
        assert vault.plan_erasure([], numbers=[number(vault, second) or 0]).blocks == 0
        outcomes, _ = get(vault, scope, keys(3))
        assert outcomes == [Outcome.HIT] * 3


@pytest.mark.parametrize("subject", ["\udcff", "anna\udc80"])
def test_what_is_no_text_is_nobodys_name(vault: Vault, scope: Scope, subject: str) -> None:
    send(vault, scope, keys(1))
    with pytest.raises(UsageError, match="UTF-8"):
        vault.prompts.listing([Condition("subject", "=", subject)])
    with pytest.raises(UsageError, match="UTF-8"):
        vault.place_hold(tenant="alice", subject=subject, reason="r", actor="a")


def _set_gone(connection: Connection, number: int | None) -> None:
    direct(connection, "UPDATE prompts SET gone = 1 WHERE prompt_no = ?", (number,))
