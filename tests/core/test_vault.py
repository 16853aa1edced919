"""Blocks in and out of a vault: what is a hit, what is a miss, and whose."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvvault.errors import (
    UsageError,
)
from kvvault.model import Namespace, Outcome, PutReport, SegmentState
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    DIRTY,
    FACTS,
    SMALL,
    ZERO,
    Home,
    assert_hits,
    assert_missing,
    content,
    contents,
    dirty,
    get,
    key,
    keys,
    namespace,
    put,
    segment_of,
)


class TestBlocks:
    def test_put_and_get(self, vault: Vault, scope: Scope) -> None:
        assert_missing(vault, scope, keys(10))
        assert put(vault, scope, keys(10)) == PutReport(stored=10)
        assert_hits(vault, scope, keys(10))
        assert_hits(vault, scope, keys(10)[::-1])
        assert_missing(vault, scope, keys(10, start=10))

    def test_a_mixture_in_any_order(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(9))
        wanted = [key(20), key(8), key(0), key(21), key(3), key(22), key(2)]
        outcomes, found = get(vault, scope, wanted)
        assert [outcome is Outcome.HIT for outcome in outcomes] == [
            False, True, True, False, True, False, True,
        ]  # fmt: skip
        assert found == [
            content("a", k) if outcome is Outcome.HIT else ZERO
            for k, outcome in zip(wanted, outcomes, strict=True)
        ]

    def test_the_same_block_several_times_in_one_get(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(3))
        assert_hits(vault, scope, [key(1), key(0), key(1), key(1)])

    def test_nothing_at_all(self, vault: Vault, scope: Scope) -> None:
        assert vault.put(scope, [], []) == PutReport()
        assert vault.get(scope, [], []) == []
        assert vault.contains(scope, []) == []

    def test_what_is_there_is_not_written_again(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(4))
        before = vault.stats()
        assert put(vault, scope, keys(6)) == PutReport(stored=2, present=4)
        assert put(vault, scope, keys(6)) == PutReport(present=6)
        assert vault.stats().blocks == before.blocks + 2

    def test_the_same_new_block_twice_in_one_put(self, vault: Vault, scope: Scope) -> None:
        report = put(vault, scope, [key(1), key(1), key(2), key(1)])
        assert report == PutReport(stored=2, present=2)
        assert_hits(vault, scope, keys(2, start=1))

    def test_contains(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(3))
        assert vault.contains(scope, [key(9), *keys(3)]) == [False, True, True, True]

    @pytest.mark.parametrize("block_key", [b"", b"k", bytes(32), b"\xff" * 1000])
    def test_keys_are_any_bytes(self, vault: Vault, scope: Scope, block_key: bytes) -> None:
        put(vault, scope, [block_key])
        assert_hits(vault, scope, [block_key])
        assert_missing(vault, scope, [block_key + b"\0"])

    @pytest.mark.parametrize("pages", [1, 3, 16, 257])
    def test_block_sizes(self, vault: Vault, pages: int) -> None:
        # Larger and smaller than a batch and than a segment.
        scope = vault.scope("alice", namespace(pages * 4096))
        assert put(vault, scope, keys(5)).stored == 5
        assert_hits(vault, scope, keys(5))
        assert len([s for s in vault.segments() if s.block_bytes == pages * 4096]) == (
            2 if pages == 1 else 5
        )

    def test_a_full_segment_is_followed_by_another(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(11))
        facts = vault.segments()
        assert sorted(s.blocks for s in facts) == [3, 4, 4]
        assert len({s.segment_id for s in facts}) == 3
        vault.close()
        assert all(size % BLOCK == 0 for size in sizes(vault))

    def test_reopening(self, home: Home) -> None:
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(10))
        for _ in range(2):
            with home.open() as vault:
                assert vault.recovery.clean
                assert_hits(vault, vault.scope("alice", namespace()), keys(10))
                assert {s.state for s in vault.segments()} == {SegmentState.SEALED}
        with home.open() as vault:
            assert put(vault, vault.scope("alice", namespace()), keys(12)) == PutReport(
                stored=2, present=10
            )

    def test_promise_3_no_segment_is_written_by_two_processes(self, home: Home) -> None:
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(1))
            first = {s.segment_id for s in vault.segments()}
        with home.open() as vault:
            put(vault, vault.scope("alice", namespace()), keys(2))
            assert len({s.segment_id for s in vault.segments()} - first) == 1

    def test_real_disk_and_o_direct(self, tmp_path: Path) -> None:
        options = dataclasses.replace(SMALL, direct=None)
        home = Home(tmp_path / "vault", options=options)
        with home.create() as vault:
            direct = vault.direct_io
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(9))
            assert_hits(vault, scope, keys(9))
        with home.open() as vault:
            assert vault.direct_io == direct
            assert_hits(vault, vault.scope("alice", namespace()), keys(9))
        # And what one way wrote, the other reads.
        with home.open(options=SMALL) as vault:
            assert not vault.direct_io
            assert_hits(vault, vault.scope("alice", namespace()), keys(9))


def sizes(vault: Vault) -> list[int]:
    return [path.stat().st_size for path in (vault.path / "segments").iterdir()]


class TestBuffers:
    def test_kinds(self, vault: Vault, scope: Scope) -> None:
        raw = contents("a", keys(5))
        sources: list[Any] = [
            raw[0],
            bytearray(raw[1]),
            memoryview(raw[2]).cast("B", (64, 64)),
            np.frombuffer(raw[3], np.float16).reshape(2, 32, -1),
            np.frombuffer(raw[4], np.uint64),
        ]
        assert vault.put(scope, keys(5), sources).stored == 5
        targets: list[Any] = [
            bytearray(DIRTY),
            memoryview(bytearray(DIRTY)),
            np.full((32, 128), 7, np.uint8),
            np.full(2048, 7, np.float16),
            np.full((2, 256), 7, np.int64).data,
        ]
        assert vault.get(scope, keys(5), targets) == [Outcome.HIT] * 5
        assert [bytes(target) for target in targets] == raw

    def test_slices_of_one_array_are_filled_where_they_are(
        self, vault: Vault, scope: Scope
    ) -> None:
        put(vault, scope, keys(4))
        memory = np.full((6, BLOCK), 0xA5, np.uint8)
        rows: list[Any] = [memory[4], memory[1], memory[3]]
        assert vault.get(scope, [key(0), key(1), key(9)], rows) == ["hit", "hit", "miss"]
        assert memory[4].tobytes() == content("a", key(0))
        assert memory[1].tobytes() == content("a", key(1))
        assert memory[3].tobytes() == ZERO
        for untouched in (0, 2, 5):
            assert memory[untouched].tobytes() == DIRTY

    def test_storing_leaves_the_source_alone_and_does_not_keep_it(
        self, vault: Vault, scope: Scope
    ) -> None:
        source = bytearray(content("a", key(0)))
        vault.put(scope, [key(0)], [source])
        assert source == content("a", key(0))
        source[:] = ZERO  # the engine uses it again at once
        source.extend(b"x")  # and nobody holds a view of it, or this would raise
        assert_hits(vault, scope, [key(0)])

    @pytest.mark.torch
    def test_torch_tensors(self, vault: Vault, scope: Scope) -> None:
        torch = pytest.importorskip("torch")
        stored = torch.arange(BLOCK // 4, dtype=torch.float32)
        vault.put(scope, [key(0)], [stored.numpy()])
        pool = torch.zeros((3, BLOCK // 2), dtype=torch.float16)
        assert vault.get(scope, [key(0)], [pool[1].numpy()]) == [Outcome.HIT]
        assert torch.equal(pool[1].view(torch.float32), stored)
        assert not pool[0].any()
        assert not pool[2].any()

    @pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK + 1, 2 * BLOCK])
    def test_wrong_sizes(self, vault: Vault, scope: Scope, size: int) -> None:
        for call in (vault.put, vault.get):
            with pytest.raises(ValueError, match="bytes"):
                call(scope, keys(2), [bytearray(BLOCK), bytearray(size)])
        assert vault.contains(scope, keys(2)) == [False, False]

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_as_many_buffers_as_keys(self, vault: Vault, scope: Scope, count: int) -> None:
        for call in (vault.put, vault.get):
            with pytest.raises(ValueError, match="2 keys"):
                call(scope, keys(2), dirty(count))

    def test_read_only_buffers(self, vault: Vault, scope: Scope) -> None:
        frozen: Any = np.frombuffer(content("a", key(0)), np.uint8)
        assert vault.put(scope, [key(0)], [frozen]).stored == 1
        with pytest.raises(ValueError, match="read-only"):
            vault.get(scope, [key(0)], [frozen])

    def test_buffers_with_gaps(self, vault: Vault, scope: Scope) -> None:
        wide: Any = np.zeros((BLOCK, 2), np.uint8)
        for call in (vault.put, vault.get):
            with pytest.raises(ValueError, match="contiguous"):
                call(scope, [key(0)], [wide[:, 0]])

    def test_what_is_no_buffer(self, vault: Vault, scope: Scope) -> None:
        nothing: Any = "a string"
        for call in (vault.put, vault.get):
            with pytest.raises(TypeError):
                call(scope, [key(0)], [nothing])


class TestIsolation:
    """Always in pairs: the right one hits and the other one misses."""

    def test_promise_7_tenants(self, vault: Vault) -> None:
        alice, bob = vault.scope("alice", namespace()), vault.scope("bob", namespace())
        put(vault, alice, keys(4), "alice")
        assert_missing(vault, bob, keys(4))
        assert vault.contains(bob, keys(4)) == [False] * 4
        put(vault, bob, keys(2), "bob")
        assert_hits(vault, alice, keys(4), "alice")
        assert_hits(vault, bob, keys(2), "bob")
        assert_missing(vault, bob, keys(2, start=2))

    @pytest.mark.parametrize(
        "change",
        [
            {"model": "other"},
            {"weights": "sha256:2"},
            {"dtype": "float16"},
            {"layout": "HND"},
            {"topology": "tp=2"},
            {"dtype": "bfloat16 "},
            {"Model": "tiny-llama"},
        ],
    )
    def test_promise_12_namespaces(self, vault: Vault, change: dict[str, str]) -> None:
        one = vault.scope("alice", namespace())
        other = vault.scope("alice", Namespace.of(BLOCK, FACTS | change))
        put(vault, one, keys(4), "one")
        assert_missing(vault, other, keys(4))
        put(vault, other, keys(4), "other")
        assert_hits(vault, one, keys(4), "one")
        assert_hits(vault, other, keys(4), "other")
        same = vault.scope("alice", Namespace.of(BLOCK, dict(reversed(list(FACTS.items())))))
        assert_hits(vault, same, keys(4), "one")

    def test_promise_12_block_sizes(self, vault: Vault) -> None:
        one = vault.scope("alice", namespace())
        other = vault.scope("alice", namespace(2 * BLOCK))
        put(vault, one, keys(2))
        assert_missing(vault, other, keys(2))

    def test_promise_12_a_fact_cannot_be_moved_into_another(self, vault: Vault) -> None:
        one = Namespace.of(BLOCK, {"a": "b", "c": "d"})
        for facts in ({"a": 'b","c":"d'}, {"a": "b"}, {"a": "bc", "": "d"}, {"a": "d", "c": "b"}):
            assert Namespace.of(BLOCK, facts).digest != one.digest
        assert Namespace.of(BLOCK, {"c": "d", "a": "b"}).digest == one.digest

    def test_after_reopening_too(self, home: Home) -> None:
        with home.create() as vault:
            for owner in ("alice", "bob"):
                for model in ("one", "two"):
                    scope = vault.scope(owner, namespace(model=model))
                    put(vault, scope, keys(3), owner + model)
        with home.open() as vault:
            for owner in ("alice", "bob"):
                for model in ("one", "two"):
                    scope = vault.scope(owner, namespace(model=model))
                    assert_hits(vault, scope, keys(3), owner + model)
            assert_missing(vault, vault.scope("carol", namespace(model="one")), keys(3))
            assert_missing(vault, vault.scope("alice", namespace(model="three")), keys(3))

    def test_vaults_with_one_key_provider(self, memory: Path, home: Home) -> None:
        other = Home(home.path.with_name("other"), home.provider)
        with home.create() as one, other.create() as two:
            scope = one.scope("alice", namespace())
            put(one, scope, keys(4))
            assert_missing(two, two.scope("alice", namespace()), keys(4))
            assert segment_of(one, scope, key(0)) is not None
            # Ids differ as well, although name, namespace and keys are the same.
            assert scope.block_id(key(0)) != two.scope("alice", namespace()).block_id(key(0))

    @pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\0b", "\ud800", "\x7f"])
    def test_unusable_tenant_names(self, vault: Vault, name: str) -> None:
        with pytest.raises(UsageError):
            vault.scope(name, namespace())

    @pytest.mark.parametrize("name", ["x" * 256, "Ärztin & Co. 医院", "a/../b", "'; --", " "])
    def test_usable_tenant_names(self, vault: Vault, name: str) -> None:
        put(vault, vault.scope(name, namespace()), keys(1))
        assert_hits(vault, vault.scope(name, namespace()), keys(1))
        assert [facts.name for facts in vault.tenants()] == [name]

    def test_similar_names_are_different_tenants(self, vault: Vault) -> None:
        put(vault, vault.scope("alice", namespace()), keys(1))
        for name in ("Alice", "alice ", " alice", "alic", "alic\u0435"):  # a Cyrillic e
            assert_missing(vault, vault.scope(name, namespace()), keys(1))

    def test_absurd_block_size(self, vault: Vault) -> None:
        with pytest.raises(UsageError):
            vault.scope("alice", namespace((1 << 30) + 4096))
        for size in (0, -4096, 1000):
            with pytest.raises(ValueError, match="multiple"):
                namespace(size)
