"""The inventory as it is written: which blocks are whose, exactly, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvvault.catalog import operations
from kvvault.catalog import prompts as rows
from kvvault.catalog.database import direct
from kvvault.crypto.providers.ephemeral import EphemeralProvider
from kvvault.errors import UsageError
from kvvault.naming import clean, request_key
from kvvault.policy.document import Policy
from kvvault.prompting import PROMPT, Prompt
from kvvault.vault import Scope, Vault
from tests.core.support import (
    SMALL,
    Home,
    assert_hits,
    contents,
    key,
    keys,
    namespace,
    segment_of,
)

TOKENS = 16
"""Tokens of a block."""

Row = tuple[object, ...]


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())


def chain_of(block_keys: Sequence[bytes]) -> dict[bytes, int]:
    """A prompt of these blocks, one behind the other."""
    return {k: (i + 1) * TOKENS for i, k in enumerate(block_keys)}


def store(
    vault: Vault,
    scope: Scope,
    prompt: Prompt | None,
    chain: Mapping[bytes, int],
    only: Sequence[bytes] | None = None,
) -> int:
    """Store blocks of a chain (all of it, or `only` these); how many were written."""
    names = list(chain if only is None else only)
    ends = None if prompt is None else [chain[k] for k in names]
    return vault.put(scope, names, contents("a", names), prompt=prompt, ends=ends).stored


def send(vault: Vault, scope: Scope, block_keys: Sequence[bytes], name: str = "r") -> Prompt:
    """One request from its start to its end, its blocks stored as far as they are not there."""
    chain = chain_of(block_keys)
    prompt = vault.prompt(scope, request_id=name, subject=None, labels={})
    store(vault, scope, prompt, chain)
    vault.record(prompt, chain)
    vault.settle_prompts()
    return prompt


def query(vault: Vault, text: str, *parameters: object) -> list[Row]:
    return vault.catalog.read(lambda c: direct(c, text, parameters)[0])


def number(vault: Vault, prompt: Prompt) -> int | None:
    found = query(vault, "SELECT prompt_no FROM prompts WHERE prompt_id = ?", prompt.prompt_id)
    return int(str(found[0][0])) if found else None


def owned(vault: Vault) -> dict[int, set[tuple[bytes, int]]]:
    """Straight from the catalog: of each prompt, ids and ends of the live blocks it had stored."""
    result: dict[int, set[tuple[bytes, int]]] = {}
    for ids, whose in query(
        vault,
        """
        SELECT e.block_ids, e.origins FROM extents e JOIN segments s USING (segment_id)
        WHERE s.state IN ('open', 'sealed')
        """,
    ):
        assert isinstance(ids, bytes)
        count = len(ids) // 16
        blob = whose if isinstance(whose, bytes) else bytes(8 * count)
        assert len(blob) == 8 * count
        for i in range(count):
            owner = int.from_bytes(blob[8 * i : 8 * i + 4], "big")
            end = int.from_bytes(blob[8 * i + 4 : 8 * i + 8], "big")
            result.setdefault(owner, set()).add((ids[16 * i : 16 * i + 16], end))
    return result


def members(vault: Vault, prompt: Prompt) -> set[bytes]:
    """The ids of a prompt's live blocks by the definition, in the most simple-minded way."""
    by_owner = owned(vault)
    links: dict[int, list[tuple[int, int]]] = {}
    for user, via, upto in query(vault, "SELECT prompt_no, via_no, upto FROM prompt_links"):
        links.setdefault(int(str(user)), []).append((int(str(via)), int(str(upto))))
    found: set[bytes] = set()
    seen: set[tuple[int, int]] = set()

    def walk(no: int, limit: int) -> None:
        if (no, limit) in seen:
            return
        seen.add((no, limit))
        found.update(block for block, end in by_owner.get(no, set()) if end <= limit)
        for via, upto in links.get(no, []):
            walk(via, min(upto, limit))

    own = number(vault, prompt)
    if own is not None:
        walk(own, 1 << 40)
    return found


def ids(scope: Scope, block_keys: Sequence[bytes]) -> set[bytes]:
    return {scope.block_id(k) for k in block_keys}


def link_count(vault: Vault) -> int:
    return int(str(query(vault, "SELECT count(*) FROM prompt_links")[0][0]))


# -- exact membership -----------------------------------------------------------------------------


def test_a_prompt_has_what_it_stored_and_what_it_reused(vault: Vault, scope: Scope) -> None:
    shared, mine, yours = keys(5), keys(4, 100), keys(3, 200)
    first = send(vault, scope, [*shared, *mine])
    second = send(vault, scope, [*shared, *yours])
    third = send(vault, scope, [*shared, *yours[:2]])
    other = send(vault, scope, keys(2, 300))
    assert members(vault, first) == ids(scope, [*shared, *mine])
    assert members(vault, second) == ids(scope, [*shared, *yours])
    assert members(vault, third) == ids(scope, [*shared, *yours[:2]])
    assert members(vault, other) == ids(scope, keys(2, 300))
    assert link_count(vault) == 2  # one each for those that reuse
    ends = {end for _, end in owned(vault)[number(vault, first) or 0]}
    assert ends == {(i + 1) * TOKENS for i in range(9)}


def test_a_long_shared_prefix_costs_one_link_through_any_number_of_owners(
    vault: Vault, scope: Scope
) -> None:
    turns = [send(vault, scope, keys(n)) for n in range(1, 12)]
    for n, prompt in enumerate(turns, 1):
        assert members(vault, prompt) == ids(scope, keys(n))
    assert link_count(vault) == len(turns) - 1


def test_two_that_store_in_turns_share_everything(vault: Vault, scope: Scope) -> None:
    """What leads in a circle: each owns what the other reuses."""
    chain = chain_of(keys(6))
    one = vault.prompt(scope, request_id="1", subject=None, labels={})
    two = vault.prompt(scope, request_id="2", subject=None, labels={})
    for n, block in enumerate(chain):
        store(vault, scope, one if n % 2 else two, chain, [block])
    vault.record(one, chain)
    vault.record(two, chain)
    vault.settle_prompts()
    assert members(vault, one) == members(vault, two) == ids(scope, keys(6))
    assert link_count(vault) == 2


def test_nothing_of_a_prompt_without_live_blocks_is_written(vault: Vault, scope: Scope) -> None:
    prompt = vault.prompt(scope, request_id="r", subject="s", labels={"a": "b"}, preview="p")
    vault.record(prompt, chain_of(keys(3)))
    vault.settle_prompts()
    for table in ("prompts", "texts", "scopes", "prompt_links"):
        assert query(vault, f"SELECT count(*) FROM {table}") == [(0,)]  # noqa: S608
    send(vault, scope, keys(3, 50))  # the control: then there is something
    assert query(vault, "SELECT count(*) FROM prompts") == [(1,)]


def test_what_another_is_still_storing_is_noted_when_it_lives(home: Home) -> None:
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        chain = chain_of(keys(6))
        slow = vault.prompt(scope, request_id="slow", subject=None, labels={})
        quick = vault.prompt(scope, request_id="quick", subject=None, labels={})
        store(vault, scope, slow, chain, keys(2))
        vault.record(quick, chain)
        vault.settle_prompts()
        assert members(vault, quick) == ids(scope, keys(2))
        store(vault, scope, slow, chain, keys(4))
        vault.settle_prompts()
        assert members(vault, quick) == ids(scope, keys(4))
        store(vault, scope, slow, chain, keys(6))
        vault.record(slow, chain)
        # ... and what is waiting when the vault is closed is noted then.
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        assert members(vault, quick) == members(vault, slow) == ids(scope, keys(6))


def test_it_looks_again_by_itself(vault: Vault, scope: Scope) -> None:
    chain = chain_of(keys(4))
    owner = vault.prompt(scope, request_id="o", subject=None, labels={})
    reuser = vault.prompt(scope, request_id="u", subject=None, labels={})
    store(vault, scope, owner, chain, keys(1))
    vault.record(reuser, chain)
    store(vault, scope, owner, chain)
    waited = threading.Event()
    for _ in range(200):
        if members(vault, reuser) == ids(scope, keys(4)):
            break
        waited.wait(0.05)
    assert members(vault, reuser) == ids(scope, keys(4))


def test_blocks_without_a_prompt_are_adopted_by_who_reuses_them(vault: Vault, scope: Scope) -> None:
    chain = chain_of(keys(5))
    store(vault, scope, None, chain)
    assert set(owned(vault)) == {0}
    first = send(vault, scope, keys(3))
    second = send(vault, scope, keys(5))
    assert members(vault, first) == ids(scope, keys(3))
    assert members(vault, second) == ids(scope, keys(5))
    assert set(owned(vault)) == {number(vault, first), number(vault, second)}
    with pytest.raises(ValueError, match="token"):
        vault.put(scope, keys(1), contents("a", keys(1)), prompt=first)


def test_two_processes_adopt_the_same_block_only_once(home: Home) -> None:
    with home.create() as vault, home.open() as other:
        scope, there = (v.scope("alice", namespace()) for v in (vault, other))
        chain = chain_of(keys(2))
        store(vault, scope, None, chain)
        other.refresh()
        prompts = [
            (v, v.prompt(s, request_id="r", subject=None, labels={}))
            for v, s in ((vault, scope), (other, there))
        ]
        for handle, prompt in prompts:
            handle.record(prompt, chain)
        for handle, _ in prompts:
            handle.settle_prompts()
        for _, prompt in prompts:
            assert members(vault, prompt) == ids(scope, keys(2))
        assert sum(len(blocks) for blocks in owned(vault).values()) == 2


def test_an_adoption_that_came_too_late_changes_nothing(vault: Vault, scope: Scope) -> None:
    store(vault, scope, None, chain_of(keys(2)))
    first = send(vault, scope, keys(1))
    taken = query(vault, "SELECT extent_no FROM extents")[0][0]
    second = vault.prompt(scope, request_id="2", subject=None, labels={})
    no = second.number(vault.catalog, vault._view)
    late = rows.Membership(
        no, [(int(str(taken)), 1, 32), (int(str(taken)), 0, 16)], {}, 32, 0.0, scope.tenant_id, 1
    )
    assert vault.catalog.write(lambda c: rows.note(c, late)) is False
    assert set(owned(vault)) == {0, number(vault, first)}


def test_two_processes_that_store_the_same_block(home: Home) -> None:
    """Neither sees the other's copy in time; each prompt has the block, wherever it is."""
    with home.create() as vault, home.open() as other:
        scope, there = (v.scope("alice", namespace()) for v in (vault, other))
        chain = chain_of(keys(2))
        one = vault.prompt(scope, request_id="1", subject=None, labels={})
        two = other.prompt(there, request_id="2", subject=None, labels={})

        class Meanwhile:
            """Between the claim of the second and its commit the first stores everything."""

            def enter(self) -> bool:
                done.append(store(vault, scope, one, chain))
                return True

            def leave(self) -> None:
                pass

        done: list[int] = []
        other.put(
            there,
            list(chain),
            contents("a", list(chain)),
            guard=Meanwhile(),
            prompt=two,
            ends=list(chain.values()),
        )
        assert done == [2]
        for handle, prompt in ((vault, one), (other, two)):
            handle.record(prompt, chain)
            handle.settle_prompts()
        assert query(vault, "SELECT count(*) FROM extents") == [(2,)]  # twice the same two blocks
        for prompt in (one, two):
            assert members(vault, prompt) == ids(scope, keys(2))


# -- what blocks go through -----------------------------------------------------------------------


def test_after_eviction_a_block_is_whose_it_is_stored_again(vault: Vault, scope: Scope) -> None:
    first = send(vault, scope, keys(8))
    second = send(vault, scope, keys(9))
    gone = segment_of(vault, scope, key(0))
    assert gone is not None
    vault.delete_segments([gone])
    assert members(vault, first) == ids(scope, keys(4, 4))
    third = send(vault, scope, keys(10))
    assert members(vault, first) == ids(scope, keys(4, 4))
    assert members(vault, second) == ids(scope, keys(5, 4))
    assert members(vault, third) == ids(scope, keys(10))
    fourth = send(vault, scope, keys(6))
    assert members(vault, fourth) == ids(scope, keys(6))
    own = number(vault, fourth)
    assert query(vault, "SELECT count(*) FROM prompt_links WHERE prompt_no = ?", own) == [(2,)]


def test_blocks_written_again_stay_whose_they_were(vault: Vault, scope: Scope) -> None:
    first = send(vault, scope, keys(6))
    second = send(vault, scope, [*keys(6), *keys(3, 100)])
    before = owned(vault)
    store(vault, scope, None, chain_of(keys(2, 200)))
    plan = vault.plan_blocks(scope, [key(2), key(101), key(201)])
    vault.execute(plan, reason="a test")
    rest = ids(scope, [key(2), key(101)])
    after = owned(vault)
    assert {
        no: {pair for pair in pairs if pair[0] not in rest} for no, pairs in before.items()
    } == {no: pairs for no, pairs in after.items() if no}
    assert after[0] == {(scope.block_id(key(200)), 0)}
    assert members(vault, first) == ids(scope, keys(6)) - rest
    assert members(vault, second) == ids(scope, [*keys(6), *keys(3, 100)]) - rest
    left = [k for k in keys(6) if k != key(2)]
    assert_hits(vault, scope, left)


def test_re_admitted_blocks_stay_whose_they_were(vault: Vault, scope: Scope) -> None:
    """As eviction does it: saved, deleted, written again."""
    hot = send(vault, scope, keys(2))
    store(vault, scope, None, chain_of(keys(1, 50)))
    segment_id = segment_of(vault, scope, key(0))
    assert segment_id is not None
    assert segment_of(vault, scope, key(50)) == segment_id
    row = vault.catalog.read(lambda c: operations.get_segment(c, segment_id))
    assert row is not None
    saved = vault._rewriter.save(row, [0, 1, 2])
    assert saved is not None
    vault.delete_segments([segment_id])
    assert members(vault, hot) == set()
    assert vault._rewriter.write(row, saved) == 3
    assert segment_of(vault, scope, key(0)) not in (None, segment_id)
    assert members(vault, hot) == ids(scope, keys(2))
    assert owned(vault)[0] == {(scope.block_id(key(50)), 0)}


def test_a_crash_leaves_no_block_without_its_prompt(tmp_path: Path) -> None:
    """Killed between put and record."""
    script = """
import os, signal, sys
from pathlib import Path
from kvvault.vault import Vault
from tests.core.support import SMALL, contents, keys, namespace
vault = Vault.open(Path(sys.argv[1]), options=SMALL)
scope = vault.scope("alice", namespace())
prompt = vault.prompt(scope, request_id="the request", subject="the subject", labels={"a": "b"})
vault.put(scope, keys(5), contents("a", keys(5)), prompt=prompt, ends=[1, 2, 3, 4, 5])
print(prompt.prompt_id.hex(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "vault"
    key_file = tmp_path / "key"
    Vault.create(path, provider=f"file:{key_file}", options=SMALL).close()
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Vault.open(path, options=SMALL) as vault:
        scope = vault.scope("alice", namespace())
        assert vault.contains(scope, keys(5)) == [True] * 5
        found = query(vault, "SELECT prompt_no, prompt_id FROM prompts")
        assert [bytes(r[1]).hex() for r in found] == [done.stdout.strip()]  # type: ignore[call-overload]
        assert owned(vault) == {
            int(str(found[0][0])): {(scope.block_id(k), n + 1) for n, k in enumerate(keys(5))}
        }
        assert query(vault, "SELECT count(*) FROM texts") == [(2,)]


def test_nothing_more_is_stored_for_a_prompt_that_was_erased(vault: Vault, scope: Scope) -> None:
    chain = chain_of(keys(6))
    prompt = vault.prompt(scope, request_id="r", subject=None, labels={})
    assert store(vault, scope, prompt, chain, keys(2)) == 2
    vault.catalog.write(lambda c: direct(c, "UPDATE prompts SET gone = 1"))
    assert store(vault, scope, prompt, chain, keys(4)) == 0
    vault.record(prompt, chain)
    vault.settle_prompts()
    assert query(vault, "SELECT end_token FROM prompts") == [(0,)]
    assert vault.contains(scope, keys(4)) == [True, True, False, False]
    assert send(vault, scope, keys(4)).prompt_id != prompt.prompt_id  # others go on
    assert vault.contains(scope, keys(4)) == [True] * 4
    assert vault.verify().ok


# -- what is kept of a request --------------------------------------------------------------------


def kept(vault: Vault, scope: Scope) -> dict[str, str]:
    sealed = query(vault, "SELECT sealed FROM prompts")[0][0]
    if sealed is None:
        return {}
    assert isinstance(sealed, bytes)
    found: dict[str, str] = json.loads(scope.keys.open_text(PROMPT, sealed))
    return found


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ("none", {"request"}),
        ("fingerprint", {"request", "fingerprint"}),
        ("preview", {"request", "fingerprint", "preview"}),
    ],
)
def test_the_policy_says_what_is_kept(tmp_path: Path, record: str, names: set[str]) -> None:
    policy = Policy.parse(
        f"""
kvvault: 1
name: test
description: What is recorded.
rules:
  - name: never
    match: {{tenant: nobody}}
    persist: false
    owner: tests
    justification: tests
  - name: all
    delete_by: 24h
    record: {record}
    owner: tests
    justification: tests
"""
    )
    with Vault.create(
        tmp_path / "v", provider=EphemeralProvider(), options=SMALL, policy=policy
    ) as vault:
        scope = vault.scope("alice", namespace())
        chain = chain_of(keys(3))
        prompt = vault.prompt(
            scope, request_id="chatcmpl-1", subject="s", labels={}, preview="once " * 100
        )
        store(vault, scope, prompt, chain)
        vault.record(prompt, chain)
        vault.settle_prompts()
        found = kept(vault, scope)
        assert set(found) == names
        assert found["request"] == "chatcmpl-1"
        if "preview" in names:
            assert found["preview"] == ("once " * 100)[:256]
        if "fingerprint" in names:
            deepest = scope.block_id(key(2))
            assert found["fingerprint"] == scope.keys.keyed_id("fingerprint", deepest).hex()
        unkept = vault.scope("nobody", namespace())
        ghost = vault.prompt(unkept, request_id="r", subject="s", labels={})
        assert store(vault, unkept, ghost, chain) == 0
        vault.record(ghost, chain)
        vault.settle_prompts()
        assert query(vault, "SELECT count(*) FROM prompts") == [(1,)]


def test_a_purge_meanwhile_does_not_leave_what_nobody_can_read(home: Home) -> None:
    """Encrypted under the old key, committed under the new one: done again."""
    with home.create() as vault, home.open() as other:
        scope = vault.scope("alice", namespace())
        chain = chain_of(keys(2))
        prompt = vault.prompt(scope, request_id="r", subject="who", labels={"a": "b"})
        stale = prompt._new()
        other.scope("alice", namespace())
        other.purge()
        with pytest.raises(rows.KeyReplacedError):
            vault.catalog.write(lambda c: rows.add(c, stale))
        assert store(vault, scope, prompt, chain) == 2
        vault.record(prompt, chain)
        vault.settle_prompts()
        assert kept(vault, scope)["request"] == "r"
        for sealed, kind in query(vault, "SELECT sealed, kind FROM texts"):
            assert isinstance(sealed, bytes)
            assert scope.keys.open_text(str(kind), sealed) in ("who", '{"a":"b"}')


@pytest.mark.parametrize("subject", ["", "s" * 257, "a\nb", "\ud800"])
def test_a_subject_is_a_name(vault: Vault, scope: Scope, subject: str) -> None:
    with pytest.raises(UsageError):
        vault.prompt(scope, subject=subject)
    vault.prompt(scope, subject="s" * 256)


def test_labels_are_as_a_scopes(vault: Vault, scope: Scope) -> None:
    for bad in ({"a": "\x00"}, {"a": "b" * 3000}, {"a": "\U0001f512" * 400}):
        with pytest.raises(UsageError):
            vault.prompt(scope, labels=bad)
        with pytest.raises(UsageError):
            vault.scope("alice", namespace(), labels=bad)


@pytest.mark.parametrize("text", ["\ud800", "\x00" * 400, "\U0001f512" * 400, ""])
def test_a_request_is_kept_whatever_its_client_calls_it(tmp_path: Path, text: str) -> None:
    policy = Policy.parse(
        """
kvvault: 1
name: test
description: All is recorded.
rules: [{name: all, delete_by: 24h, record: preview, owner: tests, justification: tests}]
"""
    )
    with Vault.create(
        tmp_path / "v", provider=EphemeralProvider(), options=SMALL, policy=policy
    ) as vault:
        scope = vault.scope("alice", namespace())
        prompt = vault.prompt(scope, request_id=text, preview=text)
        assert store(vault, scope, prompt, chain_of(keys(1))) == 1
        found = kept(vault, scope)
        assert found["request"] == found["preview"] == clean(text)[:256]
        assert query(vault, "SELECT request_id FROM prompts") == [(request_key(scope.keys, text),)]


def test_subjects_and_labels_are_there_once(vault: Vault, scope: Scope) -> None:
    for n in range(4):
        prompt = vault.prompt(
            scope, request_id=str(n), subject="s", labels={"x": "1", "y": "2"} if n else {"y": "2"}
        )
        chain = chain_of(keys(1, 10 * n))
        store(vault, scope, prompt, chain)
    assert query(vault, "SELECT count(*) FROM prompts") == [(4,)]
    assert query(vault, "SELECT kind, count(*) FROM texts GROUP BY kind ORDER BY kind") == [
        ("labels", 2),
        ("subject", 1),
    ]
    assert query(vault, "SELECT count(DISTINCT request_id) FROM prompts") == [(4,)]


def test_a_forgotten_tenant_has_no_prompts(vault: Vault, scope: Scope) -> None:
    prompt = vault.prompt(scope, request_id="r", subject="s", labels={"a": "b"})
    chain = chain_of(keys(3))
    store(vault, scope, prompt, chain)
    vault.record(prompt, chain_of(keys(4)))
    vault.settle_prompts()
    assert query(vault, "SELECT count(*) FROM prompts") == [(1,)]
    vault.forget("alice")
    vault.record(prompt, chain)
    vault.settle_prompts()
    for table in ("prompts", "texts", "scopes", "prompt_links", "extents"):
        assert query(vault, f"SELECT count(*) FROM {table}") == [(0,)]  # noqa: S608


def test_what_is_too_much_is_dropped_and_counted(
    vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller never waits: not for a catalog that hangs, not for a full queue."""
    chain = chain_of(keys(1))
    store(vault, scope, None, chain)
    entered, release = threading.Event(), threading.Event()
    origins = rows.origins

    def hanging(*arguments: object) -> object:
        entered.set()
        release.wait(30.0)
        return origins(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rows, "origins", hanging)
    prompts = [vault.prompt(scope, request_id=str(n), subject=None, labels={}) for n in range(4200)]
    vault.record(prompts[0], chain)
    assert entered.wait(10.0)
    for prompt in prompts:
        vault.record(prompt, chain)
    assert vault.counters()["prompts_not_recorded"] == 4200 - 4096
    monkeypatch.setattr(rows, "origins", origins)
    vault._recorder._queue.queue.clear()
    release.set()
    vault.settle_prompts()
    assert vault.counters()["prompts_recorded"] == 1


def test_after_the_vault_is_closed_nothing_is_recorded(home: Home) -> None:
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        prompt = vault.prompt(scope, request_id="r", subject=None, labels={})
    vault.record(prompt, chain_of(keys(1)))
    with home.open(read_only=True) as looking:
        there = looking.scope("alice", namespace())
        looking.record(looking.prompt(there), chain_of(keys(1)))
        looking.settle_prompts()
    assert "secret" not in repr(
        Prompt(
            scope.keys,
            b"",
            lambda: scope.verdict(vault._governor),
            request_id="secret",
            subject="secret",
            labels={},
            preview="secret",
            steady=lambda: 0.0,
        )
    )
