"""The spec without an engine: host memory, its file's name, and what is refused."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvvault.errors import ConfigError, KvvaultError, NamespaceError
from kvvault.integrations.vllm import shims
from kvvault.integrations.vllm.spec import KvvaultOffloadingSpec

pytestmark = pytest.mark.vllm

BLOCKS, PAGE, LAYERS = 8, 2048, 2


@pytest.fixture
def engine_id() -> Iterator[str]:
    made = f"kvvault-test-{uuid.uuid4()}"
    yield made
    shims.region_path(made).unlink(missing_ok=True)


def config(engine_id: str, *, canonical: bool = False, **extra: object) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("a", "b"), 0),),
        worker_kv_bytes_per_block=PAGE * LAYERS,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": 1 << 20, **extra},
        engine_id=engine_id,
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        canonical_layout=canonical,
        kv_cache_layout="LBHNC",
    )


def caches(page: int = PAGE, mapping: CanonicalPageMapping | None = None) -> CanonicalKVCaches:
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8), PAGE)
        for _ in range(LAYERS)
    ]
    refs = [CanonicalKVCacheRef(i, page, mapping) for i in range(LAYERS)]
    return CanonicalKVCaches(tensors, [refs])


def manager_of(spec: TieringOffloadingSpec) -> TieringOffloadingManager:
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    return manager


def test_the_region_is_where_vllm_says(engine_id: str) -> None:
    region = SharedOffloadRegion(engine_id, 1, None, 4096, 4096)
    assert Path(region.mmap_path) == shims.region_path(engine_id)
    region.cleanup()


def test_the_region_has_no_name_once_all_have_it(engine_id: str) -> None:
    """And yet the workers and the tiers share it. vLLM's own spec keeps the name: after a kill the
    file would stay, with the KV in it."""
    kv = caches()
    worker_side = KvvaultOffloadingSpec(config(engine_id))
    worker = worker_side.get_worker(kv)
    assert shims.region_path(engine_id).exists()
    scheduler_side = KvvaultOffloadingSpec(config(engine_id))
    manager = manager_of(scheduler_side)
    assert not shims.region_path(engine_id).exists()
    assert worker_side.get_worker(kv) is worker
    assert scheduler_side.get_manager() is manager

    worker.submit_store(1, GPULoadStoreSpec([5], [1], [0]), CPULoadStoreSpec([3]))
    row = np.asarray(manager.primary_tier.get_kv_memoryview())[3]
    expected = np.concatenate([t.tensor[5].numpy() for t in kv.tensors])
    np.testing.assert_array_equal(row[: expected.size].view(np.int8), expected)
    del row
    manager.shutdown()
    worker.shutdown()
    assert not shims.region_path(engine_id).exists()


def test_vllms_own_spec_keeps_the_name(engine_id: str) -> None:
    region = SharedOffloadRegion(engine_id, 256, 0, 4096, 4096)
    manager = manager_of(TieringOffloadingSpec(config(engine_id)))
    assert shims.region_path(engine_id).exists()
    manager.shutdown()
    region.cleanup()


def test_a_region_that_no_worker_made_keeps_its_name(engine_id: str) -> None:
    """Workers would come later and look for it."""
    manager = manager_of(KvvaultOffloadingSpec(config(engine_id)))
    assert shims.region_path(engine_id).exists()
    manager.shutdown()
    assert not shims.region_path(engine_id).exists()


def test_a_tier_that_cannot_start_leaves_no_file(engine_id: str, tmp_path: Path) -> None:
    tier = {
        "type": "KvvaultTier",
        "module_path": "kvvault.integrations.vllm.tier",
        "vault": str(tmp_path / "none"),
    }
    worker = KvvaultOffloadingSpec(config(engine_id)).get_worker(caches())
    with pytest.raises(KvvaultError):
        KvvaultOffloadingSpec(config(engine_id, secondary_tiers=[tier])).get_manager()
    assert not shims.region_path(engine_id).exists()
    worker.shutdown()


def test_a_primary_tier_without_room_for_a_chunk_is_refused(engine_id: str) -> None:
    assert KvvaultOffloadingSpec(config(engine_id)).num_chunks == 256
    with pytest.raises(ConfigError, match="smaller than one chunk"):
        KvvaultOffloadingSpec(config(engine_id, cpu_bytes_to_use=4095))


class Canonical(KvvaultOffloadingSpec):
    """In the canonical layout, outside of an engine."""

    def __init__(self, engine_id: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shims, "current_vllm_config", lambda: None)
            patch.setattr(shims, "total_kv_heads", lambda _config: 4)
            super().__init__(config(engine_id, canonical=True))


def whole_page(size: int, *, portable: bool = True) -> CanonicalPageMapping:
    return CanonicalPageMapping(size, PAGE, (CopyRun(0, 0, PAGE, 1, PAGE, PAGE),), 1, 0, portable)


def test_canonical_pages_that_would_not_be_persisted_whole_are_refused(engine_id: str) -> None:
    worker = Canonical(engine_id).get_worker(caches(mapping=whole_page(PAGE)))
    worker.shutdown()
    with pytest.raises(NamespaceError, match="canonical pages take"):
        Canonical(engine_id).get_worker(caches(mapping=whole_page(PAGE + 1)))


@pytest.mark.parametrize(
    "mapping", [None, whole_page(PAGE, portable=False)], ids=["uncertified", "not portable"]
)
def test_layers_that_vllm_cannot_certify_are_refused(
    engine_id: str, mapping: CanonicalPageMapping | None
) -> None:
    with pytest.raises(RuntimeError, match="canonical_layout"):
        Canonical(engine_id).get_worker(caches(mapping=mapping))
    assert not shims.region_path(engine_id).exists()


def test_the_canonical_layout_needs_the_engines_configuration(engine_id: str) -> None:
    with pytest.raises(NamespaceError, match="out of reach"):
        KvvaultOffloadingSpec(config(engine_id, canonical=True))
