"""Erasing prompts: exactly what nobody else has goes, against sets of keys as the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvvault.audit.receipts import EngineCopy, parse
from kvvault.errors import HeldError
from kvvault.model import Outcome
from kvvault.promptfacts import Condition
from kvvault.prompting import Prompt
from kvvault.vault import Scope, Vault
from tests.core.support import BLOCK, Home, assert_hits, assert_missing, get, key, namespace
from tests.core.test_prompting import chain_of, query, store


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())


def path(*turns: int) -> list[bytes]:
    """Block keys of a text: each is named by everything before it, as an engine does."""
    return [key(0, f"path {turns[: i + 1]}") for i in range(len(turns))]


def send(
    vault: Vault, scope: Scope, turns: Sequence[int], subject: str | None = None, **labels: str
) -> Prompt:
    chain = chain_of(path(*turns))
    prompt = vault.prompt(scope, request_id=f"request {turns}", subject=subject, labels=labels)
    store(vault, scope, prompt, chain)
    vault.record(prompt, chain)
    vault.settle_prompts()
    return prompt


def of(subject: str) -> list[Condition]:
    return [Condition("subject", "=", subject)]


def erase(vault: Vault, conditions: list[Condition], **options: Any) -> Any:
    plan = vault.plan_erasure(conditions, tenant="alice", **options)
    return vault.erase(plan, actor="operator", reason="art. 17")


class TestOneSubject:
    def test_its_private_part_goes_and_the_shared_one_stays(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2, 3, 10, 11], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        send(vault, scope, [5, 6], "anna")
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        assert (len(plan.numbers), plan.blocks) == (2, 4)
        assert (plan.shared_blocks, plan.shared_prompts) == (3, 1)
        assert_hits(vault, scope, path(1, 2, 3, 10, 11))  # a plan does nothing
        report = vault.erase(plan, actor="operator", reason="art. 17")
        assert (report.blocks, report.waiting_segments) == (4, 0)
        assert_missing(vault, scope, path(1, 2, 3, 10, 11)[3:])
        assert_missing(vault, scope, path(5, 6))
        assert_hits(vault, scope, path(1, 2, 3, 20))
        assert [p.subject for p in vault.prompts.listing()[0]] == ["bert"]
        assert not query(vault, "SELECT 1 FROM prompts WHERE gone = 1 AND sealed IS NOT NULL")

    def test_what_was_shared_goes_with_the_last_who_has_it(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        send(vault, scope, [1, 2, 30], "cleo")
        assert erase(vault, of("anna")).blocks == 1
        assert erase(vault, of("bert")).blocks == 2
        assert_hits(vault, scope, path(1, 2, 30))
        assert erase(vault, of("cleo")).blocks == 3
        assert vault.prompts.listing()[0] == []
        assert query(vault, "SELECT count(*) FROM prompts") == [(0,)]
        assert query(vault, "SELECT count(*) FROM prompt_links") == [(0,)]
        assert query(vault, "SELECT count(*) FROM texts") == [(0,)]

    def test_shared_blocks_go_too_when_that_is_asked_for(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        assert erase(vault, of("anna"), include_shared=True).blocks == 4
        assert_missing(vault, scope, path(1, 2, 3, 10))
        assert_hits(vault, scope, path(1, 2, 3, 20)[3:])
        [left] = vault.prompts.listing()[0]
        assert (left.subject, left.blocks) == ("bert", 1)

    def test_a_prompt_without_a_private_part(self, vault: Vault, scope: Scope) -> None:
        """Nothing goes but what is known of it, and that is written down, too."""
        send(vault, scope, [1, 2, 3], "anna")
        send(vault, scope, [1, 2], "bert")
        report = erase(vault, of("bert"))
        assert (report.blocks, report.deletion_no is not None) == (0, True)
        assert_hits(vault, scope, path(1, 2, 3))
        assert [p.subject for p in vault.prompts.listing()[0]] == ["anna"]

    def test_when_the_engine_cannot_be_asked_the_rest_is_done(
        self, vault: Vault, scope: Scope
    ) -> None:
        """Whatever that raises: keys that were to go are gone before it is told."""
        send(vault, scope, [1, 2], "anna")
        send(vault, scope, [7, 8], "bert")
        before = {f.segment_id for f in vault.segments() if f.state.live}

        def engine() -> Sequence[EngineCopy]:
            raise UnicodeError("label empty or too long")

        plan = vault.plan_erasure(of("anna"), tenant="alice")
        with pytest.raises(UnicodeError):
            vault.erase(plan, actor="operator", reason="art. 17", engine=engine)
        assert query(vault, "SELECT count(*) FROM revoked_blocks") == [(0,)]
        assert not before & {f.segment_id for f in vault.segments() if f.state.live}
        assert_missing(vault, scope, path(1, 2))
        assert_hits(vault, scope, path(7, 8))

    def test_nobody_of_that_name(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2, 3], "anna")
        plan = vault.plan_erasure(of("nobody"), tenant="alice")
        assert (plan.numbers, plan.blocks) == ((), 0)

    def test_what_an_erased_request_still_stores_is_refused(
        self, vault: Vault, scope: Scope
    ) -> None:
        chain = chain_of(path(1, 2, 3, 4))
        prompt = vault.prompt(scope, request_id="r", subject="anna", labels={})
        assert store(vault, scope, prompt, chain, list(chain)[:2]) == 2
        assert erase(vault, of("anna")).blocks == 2
        assert store(vault, scope, prompt, chain, list(chain)[2:]) == 0
        vault.record(prompt, chain)
        vault.settle_prompts()
        assert_missing(vault, scope, path(1, 2, 3, 4))
        assert vault.prompts.listing()[0] == []

    def test_other_processes_serve_nothing_either(self, home: Home) -> None:
        with home.create() as vault, home.open() as other:
            scope, there = (v.scope("alice", namespace()) for v in (vault, other))
            send(vault, scope, [1, 2, 3, 10], "anna")
            send(other, there, [1, 2, 3, 20], "bert")
            assert_hits(other, there, path(1, 2, 3, 10))
            erase(vault, of("anna"))
            outcomes, found = get(other, there, path(1, 2, 3, 10))
            assert outcomes == [Outcome.HIT] * 3 + [Outcome.MISS]
            assert not any(found[3])


class TestChoosing:
    def test_by_label_age_request_and_prompt(self, vault: Vault, scope: Scope) -> None:
        one = send(vault, scope, [1, 2], "anna", case="4711")
        send(vault, scope, [3, 4], "anna", case="4712")
        send(vault, scope, [5, 6], "bert")
        send(vault, scope, [7, 8], "bert")
        assert erase(vault, [Condition("label.case", "=", "4711")]).blocks == 2
        assert one.prompt_id.hex() not in {p.prompt_id.hex() for p in vault.prompts.listing()[0]}
        assert erase(vault, [Condition("request", "=", "request [3, 4]")]).blocks == 2
        [five] = [p for p in vault.prompts.listing()[0] if p.request_id == "request [5, 6]"]
        assert erase(vault, [Condition("id", "=", five.prompt_id.hex())]).blocks == 2
        assert erase(vault, [Condition("age", ">", 3600.0)]).blocks == 0
        assert erase(vault, [Condition("age", ">=", 0.0)]).blocks == 2


class TestHolds:
    @pytest.mark.parametrize("kind", ["subject", "prompt", "tenant"])
    def test_what_is_held_is_not_erased(self, vault: Vault, scope: Scope, kind: str) -> None:
        prompt = send(vault, scope, [1, 2, 3, 10], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        targets: dict[str, dict[str, Any]] = {
            "subject": {"tenant": "alice", "subject": "anna"},
            "prompt": {"prompt_id": prompt.prompt_id},
            "tenant": {"tenant": "alice"},
        }
        hold = vault.place_hold(reason="a case", actor="counsel", **targets[kind])
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        assert (plan.numbers, plan.held_prompts, plan.blocks) == ((), 1, 0)
        if kind != "tenant":  # the other one goes, though it shares segments with what is held
            assert erase(vault, of("bert"), include_shared=True).blocks == 1
            assert_hits(vault, scope, path(1, 2, 3, 10))
        vault.clear_hold(hold.number, reason="over", actor="counsel")
        assert erase(vault, of("anna")).blocks >= 1
        assert_missing(vault, scope, path(1, 2, 3, 10)[3:])

    def test_shared_blocks_of_a_held_prompt_stay_and_that_is_said(
        self, vault: Vault, scope: Scope
    ) -> None:
        """A third one, who shares with neither, loses nothing; who shares less, loses less."""
        send(vault, scope, [1, 2, 3, 10, 11], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        send(vault, scope, [1, 2, 3, 10, 30], "cleo")
        send(vault, scope, [1, 40], "dora")
        hold = vault.place_hold(tenant="alice", subject="bert", reason="a case", actor="counsel")
        plan = vault.plan_erasure(of("anna"), tenant="alice", include_shared=True)
        assert (plan.blocks, plan.shared_blocks, plan.shared_prompts) == (2, 4, 3)
        assert (plan.taken_blocks, plan.taken_prompts) == (1, 1)
        assert (plan.held_prompts, plan.held_blocks) == (0, 3)
        report = vault.erase(plan, actor="operator", reason="art. 17")
        assert (report.blocks, report.held_blocks) == (2, 3)
        kept = parse(vault.audit.receipts()[-1].document).content["kept"]
        assert (kept["held_blocks"], kept["held_bytes"]) == (3, 3 * BLOCK)
        assert_hits(vault, scope, path(1, 2, 3, 20))
        # Without the hold nothing stays, and nothing is said to.
        vault.clear_hold(hold.number, reason="over", actor="counsel")
        plan = vault.plan_erasure(of("bert"), tenant="alice", include_shared=True)
        assert (plan.taken_blocks, plan.taken_prompts, plan.held_blocks) == (3, 2, 0)
        assert vault.erase(plan, actor="operator", reason="art. 17").held_blocks == 0
        kept = parse(vault.audit.receipts()[-1].document).content["kept"]
        assert not any(kept.values())

    def test_a_hold_on_a_sharer_that_is_placed_after_the_plan(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna")
        send(vault, scope, [1, 2, 3, 20], "bert")
        plan = vault.plan_erasure(of("anna"), tenant="alice", include_shared=True)
        vault.place_hold(tenant="alice", subject="bert", reason="a case", actor="counsel")
        report = vault.erase(plan, actor="operator", reason="art. 17")
        assert (report.blocks, report.held_blocks) == (1, 3)
        assert_hits(vault, scope, path(1, 2, 3, 20))

    def test_a_hold_placed_after_the_plan(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2], "anna")
        plan = vault.plan_erasure(of("anna"), tenant="alice")
        vault.place_hold(tenant="alice", subject="anna", reason="a case", actor="counsel")
        with pytest.raises(HeldError):
            vault.erase(plan, actor="operator", reason="art. 17")
        assert_hits(vault, scope, path(1, 2))
        assert [p.subject for p in vault.prompts.listing()[0]] == ["anna"]

    def test_segments_with_held_blocks_are_not_deleted(self, vault: Vault, scope: Scope) -> None:
        """Also those with blocks that the held prompt only reuses, and those that come later."""
        send(vault, scope, [1, 2, 3, 4], "bert")
        send(vault, scope, [1, 2, 3, 4, 10, 11], "anna")
        send(vault, vault.scope("zoe", namespace()), [1, 2], "anna")  # another tenant's anna
        hold = vault.place_hold(tenant="alice", subject="anna", reason="a case", actor="counsel")
        send(vault, scope, [1, 2, 3, 4, 10, 11, 12, 13, 14, 15], "anna")
        everything = [f.segment_id for f in vault.segments() if f.state.live]
        report = vault.execute(vault.plan_segments(everything), actor="operator", reason="all")
        assert_hits(vault, scope, path(1, 2, 3, 4, 10, 11, 12, 13, 14, 15))
        assert report.held_segments >= 3
        assert_missing(vault, vault.scope("zoe", namespace()), path(1, 2))
        vault.clear_hold(hold.number, reason="over", actor="counsel")
        vault.execute(vault.plan_segments(everything), actor="operator", reason="all")
        assert_missing(vault, scope, path(1, 2, 3, 4, 10, 11, 12, 13, 14, 15))

    def test_a_tenant_with_a_held_subject_is_not_forgotten(
        self, vault: Vault, scope: Scope
    ) -> None:
        send(vault, scope, [1, 2], "anna")
        hold = vault.place_hold(tenant="alice", subject="anna", reason="a case", actor="counsel")
        with pytest.raises(HeldError):
            vault.forget("alice")
        assert_hits(vault, scope, path(1, 2))
        vault.clear_hold(hold.number, reason="over", actor="counsel")
        assert vault.forget("alice") >= 1


class TestPapers:
    def test_log_and_receipt_name_nobody(self, vault: Vault, scope: Scope) -> None:
        send(vault, scope, [1, 2, 3, 10], "anna", case="4711")
        send(vault, scope, [1, 2, 3, 20], "bert")
        report = erase(vault, of("anna"))
        [(document,)] = query(
            vault, "SELECT document FROM receipts WHERE deletion_no = ?", report.deletion_no
        )
        said = json.loads(str(document))["receipt"]
        assert said["deletion"]["prompts"] == 1
        assert said["deletion"]["blocks"] == 1
        assert said["kept"]["shared_blocks"] == 3
        assert said["kept"]["shared_prompts"] == 1
        assert len(said["deletion"]["scope"]["prompt_ids"]) == 1
        log = "".join(str(body) for (body,) in query(vault, "SELECT body FROM log_entries"))
        for text in (log, str(document)):
            for name in ("anna", "bert", "alice", "4711", "request"):
                assert name not in text.replace("requested", "")


Turns = tuple[int, ...]
_TURNS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), _TURNS, st.sampled_from(["anna", "bert", "cleo"])),
        st.tuples(st.just("erase"), st.sampled_from(["anna", "bert", "cleo"]), st.booleans()),
    ),
    min_size=3,
    max_size=14,
)


@pytest.mark.slow
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=_STEPS)
def test_against_sets(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    home = Home(tmp_path_factory.mktemp("sets") / "vault")
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        prompts: list[tuple[str, set[bytes]]] = []
        live: set[bytes] = set()
        every: set[bytes] = set()
        for kind, *rest in steps:
            if kind == "send":
                turns, subject = rest
                send(vault, scope, turns, subject)
                prompts.append((subject, set(path(*turns))))
                live |= set(path(*turns))
                every |= live
            else:
                subject, include_shared = rest
                gone = set().union(*(have for who, have in prompts if who == subject))
                prompts = [(who, have) for who, have in prompts if who != subject]
                stays = set().union(*(have for _, have in prompts))
                doomed = gone & live if include_shared else (gone - stays) & live
                report = erase(vault, of(subject), include_shared=include_shared)
                assert report.blocks == len(doomed)
                live -= doomed
                prompts = [(who, have & live) for who, have in prompts]
                prompts = [one for one in prompts if one[1]]
            names = sorted(every)
            outcomes, _ = get(vault, scope, names)
            hits = {n for n, o in zip(names, outcomes, strict=True) if o is Outcome.HIT}
            assert hits == live
            found = sorted((p.subject or "", p.blocks) for p in vault.prompts.listing()[0])
            assert found == sorted((who, len(have)) for who, have in prompts)
