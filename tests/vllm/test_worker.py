"""The worker with vLLM's own types: real regions and specs, and the mappings vLLM derives."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvvault.integrations.vllm.worker import HostOffloadingWorker

pytestmark = pytest.mark.vllm

BLOCKS, TOKENS, HEAD_SIZE, ROWS = 10, 16, 8, 6
HEAD_BYTES = 2 * HEAD_SIZE * 4  # keys and values in float32
MAX_TP = 4

Layers = dict[str, torch.Tensor]
"""Per layer, KV as (blocks, heads, tokens, 2 * head size)."""


@dataclass(frozen=True)
class Model:
    heads: int
    full: tuple[str, ...] = ("full.0", "full.1")
    sliding: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.full + self.sliding

    def kv(self, seed: int) -> Layers:
        generator = torch.Generator().manual_seed(seed)
        shape = (BLOCKS, self.heads, TOKENS, 2 * HEAD_SIZE)
        return {name: torch.randn(shape, generator=generator) for name in self.names}

    def empty(self) -> Layers:
        return {name: torch.zeros_like(tensor) for name, tensor in self.kv(0).items()}

    def shard(self, layers: Layers, tp: int, rank: int) -> Layers:
        copies = max(1, tp // self.heads)
        own = self.heads * copies // tp
        first = rank // copies * own
        return {name: t[:, first : first + own].contiguous() for name, t in layers.items()}


class Engine:
    """The workers of one engine, all in this process, around one host region."""

    def __init__(
        self,
        engine_id: str,
        model: Model,
        layers: Layers,
        tp: int,
        blocks_per_chunk: int,
        *,
        canonical: bool,
    ) -> None:
        self.model, self.tp = model, tp
        self.shards = [model.shard(layers, tp, rank) for rank in range(tp)]
        self.page = self.shards[0][model.full[0]][0].nbytes
        slot = self.page * len(model.names) * blocks_per_chunk
        most = max(model.heads, MAX_TP) * TOKENS * HEAD_BYTES * len(model.names) * blocks_per_chunk
        row = -(-most // 4096) * 4096

        def region(rank: int | None) -> SharedOffloadRegion:
            return SharedOffloadRegion(
                engine_id=engine_id,
                num_chunks=ROWS,
                rank=rank,
                kv_bytes_per_chunk=row,
                cpu_page_size=slot,
            )

        self.workers = [
            HostOffloadingWorker(
                self.caches(rank),
                blocks_per_chunk,
                region(rank),
                canonical_layout=canonical,
                cleans=rank == 0 or not canonical,
            )
            for rank in range(tp)
        ]
        self.region = region(None)
        self.rows = np.asarray(self.region.create_kv_memoryview()).view(np.uint8)

    def caches(self, rank: int) -> CanonicalKVCaches:
        shards, model = self.shards[rank], self.model
        common = {
            "block_size": TOKENS,
            "num_kv_heads": shards[model.full[0]].shape[1],
            "head_size": HEAD_SIZE,
            "dtype": torch.float32,
        }
        groups = [
            SimpleNamespace(layer_names=[*model.full], kv_cache_spec=FullAttentionSpec(**common)),
            SimpleNamespace(
                layer_names=[*model.sliding],
                kv_cache_spec=SlidingWindowSpec(**common, sliding_window=2 * TOKENS),
            ),
        ]
        parallel = SimpleNamespace(
            tensor_parallel_size=self.tp,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=self.tp,
            rank=rank,
        )
        config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: model.heads),
        )
        mappings = derive_canonical_mappings(
            config, SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups), shards
        )
        assert all(mapping.parallelism_agnostic for mapping in mappings.values())
        return CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(shards[name].view(torch.int8).view(BLOCKS, -1), self.page)
                for name in model.names
            ],
            group_data_refs=[
                [
                    CanonicalKVCacheRef(model.names.index(name), self.page, mappings[name])
                    for name in group.layer_names
                ]
                for group in groups
            ],
        )

    def store(self, device: GPULoadStoreSpec, rows: list[int]) -> None:
        # Workers run at the same time, so their order must not matter: the first goes last.
        for worker in reversed(self.workers):
            assert worker.submit_store(1, device, CPULoadStoreSpec(rows))

    def load(self, rows: list[int], device: GPULoadStoreSpec) -> None:
        for worker in self.workers:
            assert worker.submit_load(2, CPULoadStoreSpec(rows), device)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        del self.rows
        self.region.cleanup()


class Host:
    """Engines that share a host region, as if one had been replaced by the other."""

    def __init__(self) -> None:
        self.engine_id = f"kvvault-test-{uuid.uuid4()}"
        self.engines: list[Engine] = []

    def engine(
        self,
        model: Model,
        layers: Layers,
        tp: int = 1,
        blocks_per_chunk: int = 1,
        *,
        canonical: bool = True,
    ) -> Engine:
        made = Engine(self.engine_id, model, layers, tp, blocks_per_chunk, canonical=canonical)
        self.engines.append(made)
        return made


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for engine in reversed(made.engines):
        engine.close()
    assert not Path(f"/dev/shm/vllm_offload_{made.engine_id}.mmap").exists()


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize(
    ("heads", "writers", "readers"), [(4, 1, 2), (4, 2, 1), (4, 2, 4), (2, 4, 1), (1, 1, 4)]
)
def test_canonical_rows_pass_between_degrees(
    host: Host, heads: int, writers: int, readers: int, blocks_per_chunk: int
) -> None:
    """Also where several workers hold copies of one head and take turns in writing it."""
    model = Model(heads)
    kv = model.kv(1)
    source = host.engine(model, kv, writers, blocks_per_chunk)
    target = host.engine(model, model.empty(), readers, blocks_per_chunk)
    rows = [5, 0, 2] if blocks_per_chunk == 1 else [3]

    source.store(GPULoadStoreSpec([2, 3, 7], [3, 0], [1, 0]), rows)
    target.load(rows, GPULoadStoreSpec([9, 0, 1], [3, 0], [1, 0]))

    expected = model.empty()
    for name, tensor in expected.items():
        tensor[[9, 0, 1]] = kv[name][[2, 3, 7]]
    for rank in range(readers):
        for name, tensor in model.shard(expected, readers, rank).items():
            assert torch.equal(target.shards[rank][name], tensor), (rank, name)


def test_direct_rows_do_not_pass_between_degrees(host: Host) -> None:
    """The control: what the canonical layout is for."""
    model = Model(4)
    kv = model.kv(1)
    source = host.engine(model, kv, 2, canonical=False)
    same = host.engine(model, model.empty(), 2, canonical=False)
    other = host.engine(model, model.empty(), 1, canonical=False)
    spec = GPULoadStoreSpec([2, 3], [2, 0], [0, 0])
    source.store(spec, [4, 1])
    same.load([4, 1], spec)
    other.load([4, 1], spec)
    for rank in range(2):
        for name, tensor in model.shard(kv, 2, rank).items():
            assert torch.equal(same.shards[rank][name][[2, 3]], tensor[[2, 3]])
    assert any(not torch.equal(other.shards[0][n][[2, 3]], kv[n][[2, 3]]) for n in kv)


@pytest.mark.parametrize("canonical", [True, False], ids=["canonical", "direct"])
def test_a_row_keeps_nothing_of_its_previous_owner(host: Host, canonical: bool) -> None:
    """A hybrid model's groups use different parts of a row, and partly filled chunks leave page
    positions unused; the tier persists the whole row."""
    model = Model(4, sliding=("sliding.0",))
    engine = host.engine(model, model.kv(1), 2, 4, canonical=canonical)
    full = GPULoadStoreSpec([0, 1, 2, 3], [4, 0], [0, 0])
    engine.store(full, [2])
    before = engine.rows[2].copy()
    assert np.count_nonzero(before) > before.size // 4
    # The row is evicted and given to the other group, two blocks, the second and third position.
    engine.store(GPULoadStoreSpec([4, 5], [0, 2], [0, 1]), [2])
    left = engine.rows[2]
    used = 2 * model.heads * TOKENS * HEAD_BYTES
    assert 0 < np.count_nonzero(left) <= used
    same = (left == before) & (before != 0)
    # Random bytes agree here and there; a page that had been left would agree everywhere.
    assert np.count_nonzero(same) < used // 16


def test_jobs_are_reported_once_with_their_bytes(host: Host) -> None:
    model = Model(2)
    engine = host.engine(model, model.kv(1), 4)
    engine.store(GPULoadStoreSpec([0, 1], [2, 0], [0, 0]), [0, 1])
    engine.load([0, 1], GPULoadStoreSpec([3, 4], [2, 0], [0, 0]))
    stored = 0
    for worker in engine.workers:
        worker.wait({1, 2})
        results = worker.get_finished()
        assert [(r.job_id, r.success) for r in results] == [(1, True), (2, True)]
        assert all(r.transfer_time is not None and r.transfer_time >= 0 for r in results)
        assert results[1].transfer_size == 2 * len(model.names) * engine.page
        assert results[0].transfer_size is not None
        stored += results[0].transfer_size
        assert worker.get_finished() == []
    # Two workers hold copies of each head; together they write each page once.
    assert stored == 2 * len(model.names) * model.heads * TOKENS * HEAD_BYTES


def test_contradictions_are_refused(host: Host) -> None:
    model = Model(4)
    engine = host.engine(model, model.kv(1))
    worker = engine.workers[0]
    good = GPULoadStoreSpec([0, 1], [2, 0], [0, 0])
    assert worker.submit_store(1, good, CPULoadStoreSpec([0, 1]))
    with pytest.raises(ValueError, match="fewer rows"):
        worker.submit_store(2, good, CPULoadStoreSpec([0]))
    with pytest.raises(ValueError, match="outside its tensor"):
        worker.submit_store(3, good, CPULoadStoreSpec([0, ROWS]))
    with pytest.raises(TypeError, match="CPULoadStoreSpec"):
        worker.submit_store(4, good, good)
    assert [r.job_id for r in worker.get_finished()] == [1]


def test_memory_of_another_device_is_refused(host: Host) -> None:
    model = Model(4)
    engine = host.engine(model, model.kv(1))
    caches = engine.caches(0)
    caches.tensors[0].tensor = caches.tensors[0].tensor.to("meta")
    with pytest.raises(ValueError, match="meta"):
        HostOffloadingWorker(caches, 1, engine.region, canonical_layout=True, cleans=True)
