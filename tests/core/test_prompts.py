"""Questions about the inventory, against what was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvvault.catalog.database import direct
from kvvault.crypto.providers.ephemeral import EphemeralProvider
from kvvault.errors import UsageError
from kvvault.policy.document import Policy
from kvvault.promptfacts import Condition, PromptFacts
from kvvault.prompting import Prompt
from kvvault.testing import ManualClock
from kvvault.vault import Scope, Vault
from tests.core.support import BLOCK, SMALL, contents, key, keys, namespace, segment_of
from tests.core.test_prompting import TOKENS, chain_of, query, send, store

POLICY = Policy.parse(
    """
kvvault: 1
name: test
description: Two rules, one class.
rules:
  - name: brief
    class: brief
    delete_by: 1h
    owner: tests
    justification: tests
  - name: usual
    delete_by: 24h
    record: preview
    owner: tests
    justification: tests
"""
)
SHARED = keys(4)


class World:
    """Two tenants, three subjects, a shared system prompt; a minute between requests."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.provider = EphemeralProvider()
        self.path = path
        self.vault = Vault.create(
            path, provider=self.provider, options=SMALL, policy=POLICY, clock=self.clock
        )
        self.sent: dict[str, Prompt] = {}
        for n in range(6):
            self.send(
                "alice", f"r{n}", ["jane", "joe", None][n % 3], n, {"team": "ads"} if n < 2 else {}
            )
        self.send("bob", "r9", "jane", 0, {})
        self.send("alice", "brief", "jane", 50, {}, retention_class="brief")

    def send(
        self,
        tenant: str,
        name: str,
        subject: str | None,
        n: int,
        labels: dict[str, str],
        retention_class: str | None = None,
    ) -> None:
        self.clock.advance(60.0)
        scope = self.vault.scope(tenant, namespace(), retention_class=retention_class)
        own = keys(n + 1, 1000 * (n + 1))
        chain = chain_of(own if retention_class else [*SHARED, *own])
        prompt = self.vault.prompt(
            scope, request_id=name, subject=subject, labels=labels, preview=f"Dear {name}"
        )
        store(self.vault, scope, prompt, chain)
        self.vault.record(prompt, chain)
        self.vault.settle_prompts()
        self.sent[f"{tenant}/{name}"] = prompt

    def ask(self, *conditions: tuple[str, str, float | str]) -> set[str]:
        rows, total = self.vault.prompts.listing([Condition(*one) for one in conditions])
        assert len(rows) == total
        return {f"{row.tenant}/{row.request_id}" for row in rows}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "vault")
    yield made
    made.vault.close()


ALL = {*(f"alice/r{n}" for n in range(6)), "bob/r9", "alice/brief"}


def by_name(world: World) -> dict[str, PromptFacts]:
    return {f"{p.tenant}/{p.request_id}": p for p in world.vault.prompts.listing()[0]}


def test_everything_that_was_sent_is_listed_as_it_was_sent(world: World) -> None:
    found = by_name(world)
    assert set(found) == ALL
    for name, prompt in world.sent.items():
        facts = found[name]
        assert facts.prompt_id == prompt.prompt_id
        assert facts.first_used == prompt.started_at == facts.last_used
        assert facts.preview == f"Dear {facts.request_id}" or name == "alice/brief"
        assert facts.model == "tiny-llama"
    for n in range(6):
        facts = found[f"alice/r{n}"]
        assert facts.subject == ["jane", "joe", None][n % 3]
        assert facts.labels == ({"team": "ads"} if n < 2 else {})
        assert (facts.blocks, facts.alone_blocks) == (4 + n + 1, n + 1)
        assert facts.data_bytes == (4 + n + 1) * BLOCK
        assert facts.shared_bytes == 4 * BLOCK
        assert facts.tokens == (4 + n + 1) * TOKENS
        assert facts.rules == ("usual",)
    assert found["bob/r9"].alone_blocks == 5  # tenants share nothing
    brief = found["alice/brief"]
    assert (brief.rules, brief.classes, brief.preview) == (("brief",), ("brief",), None)
    assert brief.last_deadline is not None
    assert brief.last_deadline - brief.first_used <= 3600.0
    assert found["alice/r5"].first_deadline == min(
        s.delete_by for s in world.vault.segments() if s.delete_by and s.rule == "usual"
    )


def test_what_is_asked_for_is_found(world: World) -> None:
    assert world.ask(("subject", "=", "jane")) == {"alice/r0", "alice/r3", "bob/r9", "alice/brief"}
    assert world.ask(("subject", "!=", "jane")) == ALL - world.ask(("subject", "=", "jane"))
    assert world.ask(("subject", "=", "jan")) == set()
    assert world.ask(("request", "=", "r4")) == {"alice/r4"}
    assert world.ask(("tenant", "=", "bob")) == {"bob/r9"}
    assert world.ask(("tenant", "=", "nobody")) == set()
    assert world.ask(("label.team", "=", "ads")) == {"alice/r0", "alice/r1"}
    assert world.ask(("model", "=", "tiny-llama"), ("subject", "=", "joe")) == {
        "alice/r1",
        "alice/r4",
    }
    assert (
        world.ask(("rule", "=", "brief")) == world.ask(("class", "=", "brief")) == {"alice/brief"}
    )
    assert world.ask(("rule", "!=", "brief")) == ALL - {"alice/brief"}
    assert world.ask(("blocks", ">", 8)) == {"alice/r4", "alice/r5", "alice/brief"}
    assert world.ask(("alone", "<=", BLOCK)) == {"alice/r0"}
    assert world.ask(("bytes", ">=", 10 * BLOCK), ("shared", ">", 0)) == {"alice/r5"}
    assert world.ask(("age", ">", 400.0)) == {"alice/r0"}
    assert world.ask(("tokens", "=", 6 * TOKENS)) == {"alice/r1"}
    one = world.sent["alice/r2"].prompt_id.hex()
    assert world.ask(("id", "=", one[:6])) == {"alice/r2"}
    rows, total = world.vault.prompts.listing(sort="bytes", limit=2)
    assert [f"{r.tenant}/{r.request_id}" for r in rows] == ["alice/brief", "alice/r5"]
    assert total == 8
    assert {r.tenant for r in world.vault.prompts.listing(tenant="bob")[0]} == {"bob"}


@pytest.mark.parametrize(
    "condition",
    [("colour", "=", "red"), ("label.", "=", "x"), ("subject", ">", "x"), ("bytes", "~", 3.0)],
)
def test_what_cannot_be_asked(world: World, condition: tuple[str, str, str | float]) -> None:
    with pytest.raises(UsageError):
        world.ask(condition)
    for call in (
        lambda: world.vault.prompts.listing(sort="subject"),
        lambda: world.vault.prompts.usage("colour"),
        lambda: world.vault.prompts.listing(tenant="nobody"),
        lambda: world.vault.prompts.show("123"),
        lambda: world.vault.prompts.show("zzzz"),
        lambda: world.vault.prompts.show("0000000000000000"),
    ):
        with pytest.raises(UsageError):
            call()


def test_one_prompt_in_full(world: World) -> None:
    prompt = world.sent["alice/r3"]
    for prefix in (prompt.prompt_id.hex(), prompt.prompt_id.hex()[:8].upper()):
        detail = world.vault.prompts.show(prefix)
        assert detail.facts == by_name(world)["alice/r3"]
        assert sum(part.own for part in detail.parts) == 4
        assert sum(part.reused for part in detail.parts) == 4
        assert detail.shared_with == 5
        opened = [part.segment.created_at for part in detail.parts]
        assert opened == sorted(opened)
    assert world.vault.prompts.show(world.sent["bob/r9"].prompt_id.hex()).shared_with == 0


def test_subjects(world: World) -> None:
    rows = world.vault.prompts.subjects()
    assert [(r.tenant, r.subject, r.prompts) for r in rows] == [
        ("alice", "jane", 3),
        ("alice", "joe", 2),
        ("bob", "jane", 1),
    ]
    assert rows[0].alone_bytes == (1 + 4 + 51) * BLOCK
    assert len(world.vault.prompts.subjects(tenant="bob")) == 1


def test_usage_counts_every_block_once(world: World) -> None:
    scope = world.vault.scope("bob", namespace())
    store(world.vault, scope, None, chain_of(keys(3, 90_000)))
    total = world.vault.stats().data_bytes
    for by in ("tenant", "class", "model", "age"):
        rows = world.vault.prompts.usage(by)
        assert sum(r.data_bytes for r in rows) == total
        assert sum(r.nobodys_blocks for r in rows) == 3
        assert sum(r.nobodys_bytes for r in rows) == 3 * BLOCK
    by_tenant = {r.group: r for r in world.vault.prompts.usage("tenant")}
    assert (by_tenant["alice"].prompts, by_tenant["bob"].prompts) == (7, 1)
    by_class = {r.group: r.prompts for r in world.vault.prompts.usage("class")}
    assert by_class == {"brief": 1, None: 7}
    world.clock.advance(7200.0)
    assert "under 1d" in {r.group for r in world.vault.prompts.usage("age")}


def test_holds_are_shown(world: World) -> None:
    vault = world.vault
    held = vault.place_hold(tenant="bob", reason="case", actor="me")
    scope = vault.scope("alice", namespace())
    segment = segment_of(vault, scope, keys(6, 6000)[5])
    assert segment is not None
    other = vault.place_hold(segment_id=segment, reason="case", actor="me")
    joes = world.sent["alice/r4"]
    hers = vault.place_hold(tenant="alice", subject="jane", reason="case", actor="me").number
    one = vault.place_hold(prompt_id=joes.prompt_id, reason="case", actor="me").number
    found = {name: facts.holds for name, facts in by_name(world).items()}
    assert found["bob/r9"] == (held.number,)
    assert found["alice/r5"] == (other.number,)
    assert found["alice/r4"][-1:] == (one,)
    assert found["alice/r0"] == found["alice/r3"] == (hers,)
    assert found["alice/r2"] == ()
    assert {(r.tenant, r.subject): r.holds for r in vault.prompts.subjects()} == {
        ("alice", "jane"): (hers,),
        ("alice", "joe"): (),
        ("bob", "jane"): (held.number,),
    }


def test_a_text_is_found_as_far_as_it_persists(world: World) -> None:
    scope = world.vault.scope("alice", namespace())

    def find(names: list[bytes]) -> tuple[int, int, dict[str | None, int]]:
        chain = world.vault.prompts.find_chain(
            scope.keys, scope.namespace, names, list(chain_of(names).values())
        )
        assert chain.of_blocks == len(names)
        assert (chain.since is None) == (chain.blocks == 0)
        assert (chain.until is None) == (chain.blocks == 0)
        return chain.blocks, chain.tokens, {p.request_id: end for p, end in chain.prompts}

    everybody = {f"r{n}": 4 * TOKENS for n in range(6)}
    assert find([*SHARED, *keys(2, 2000)]) == (6, 6 * TOKENS, everybody | {"r1": 6 * TOKENS})
    assert find([*SHARED, key(77), *keys(2, 2000)]) == (4, 4 * TOKENS, everybody)
    assert find(SHARED[:2]) == (2, 2 * TOKENS, {f"r{n}": 2 * TOKENS for n in range(6)})
    assert find(keys(3, 555_000)) == (0, 0, {})
    assert find([]) == (0, 0, {})
    with pytest.raises(ValueError, match="ends"):
        world.vault.prompts.find_chain(scope.keys, scope.namespace, SHARED, [1])


def test_what_is_gone_is_not_listed_and_is_pruned(world: World) -> None:
    vault = world.vault
    jane = by_name(world)["alice/r0"]
    vault.forget("bob")
    assert "bob/r9" not in by_name(world)
    vault.delete_segments(
        [s.segment_id for s in vault.segments() if s.state.live and s.rule == "brief"]
    )
    assert set(by_name(world)) == ALL - {"bob/r9", "alice/brief"}
    assert query(vault, "SELECT count(*) FROM prompts") == [(7,)]
    assert vault.prompts.prune() == 0  # its blocks may be on their way
    world.clock.advance(601.0)
    assert vault.prompts.prune() == 1
    assert query(vault, "SELECT count(*) FROM prompts") == [(6,)]
    assert by_name(world)["alice/r0"] == jane
    # What others share through stays as long as they do, without anything about it.
    vault.delete_segments([s.segment_id for s in vault.segments() if s.state.live])
    assert by_name(world) == {}
    assert vault.prompts.prune() == 6
    for table in ("prompts", "texts", "prompt_links"):
        assert query(vault, f"SELECT count(*) FROM {table}") == [(0,)]  # noqa: S608


def test_a_prompt_that_others_share_through_stays_without_anything_about_it(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    with Vault.create(
        tmp_path / "v", provider=EphemeralProvider(), options=SMALL, policy=POLICY, clock=clock
    ) as vault:
        scope = vault.scope("alice", namespace())
        send(vault, scope, keys(4), "first")
        second = send(vault, scope, [*keys(4), *keys(4, 100)], "second")
        # An erasure leaves what others share, and marks the prompt.
        vault.catalog.write(lambda c: direct(c, "UPDATE prompts SET gone = 1 WHERE prompt_no = 1"))
        clock.advance(1000.0)
        vault.prompts.prune()
        [facts] = vault.prompts.listing()[0]
        assert (facts.prompt_id, facts.blocks, facts.alone_blocks) == (second.prompt_id, 8, 8)
        assert query(vault, "SELECT prompt_no, gone FROM prompts") == [(1, 1), (2, 0)]
        vault.delete_segments([s.segment_id for s in vault.segments() if s.state.live])
        assert vault.prompts.prune() == 1
        assert query(vault, "SELECT count(*) FROM prompts") == [(0,)]


def test_names_survive_a_purge(world: World) -> None:
    before = by_name(world)
    world.vault.purge()
    assert by_name(world) == before
    world.vault.close()
    world.vault = Vault.open(world.path, provider=world.provider, options=SMALL, clock=world.clock)
    assert by_name(world) == before
    world.vault.purge()
    assert {one.subject for one in world.vault.prompts.subjects()} == {"jane", "joe"}
    old = next(iter(world.vault.catalog.read(lambda c: direct(c, "SELECT sealed FROM prompts")[0])))
    assert isinstance(old[0], bytes)


def test_a_question_is_written_down_also_when_the_vault_is_only_read(world: World) -> None:
    scope = world.vault.scope("alice", namespace())
    world.vault.note_question("prompts ls", tenant_id=scope.tenant_id, rows=3)
    world.vault.close()
    with Vault.open(
        world.path,
        provider=world.provider,
        options=replace(SMALL),
        clock=world.clock,
        read_only=True,
    ) as looking:
        looking.note_question("find", rows=0)
        entries = [json.loads(str(r[0])) for r in query(looking, "SELECT body FROM log_entries")]
    mine = [e for e in entries if e["kind"] == "question"]
    assert [(e["command"], e["rows"]) for e in mine] == [("prompts ls", 3), ("find", 0)]
    assert mine[1]["tenant"] is None
    assert len(mine[0]["tenant"]) == 32
    assert mine[0]["tenant"] != scope.tenant_id.hex()


def test_of_a_vault_without_prompts(tmp_path: Path) -> None:
    with Vault.create(tmp_path / "v", provider=EphemeralProvider(), options=SMALL) as vault:
        assert vault.prompts.listing() == ([], 0)
        assert vault.prompts.listing([Condition("rule", "=", "x")]) == ([], 0)
        assert vault.prompts.subjects() == []
        assert vault.prompts.usage("tenant") == []
        assert vault.prompts.prune() == 0
        scope: Scope = vault.scope("alice", namespace())
        vault.put(scope, keys(2), contents("a", keys(2)))
        assert vault.prompts.listing() == ([], 0)
        assert vault.prompts.usage("model")[0].nobodys_blocks == 2
