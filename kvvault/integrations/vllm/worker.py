"""The offloading worker for CPU devices: KV cache pages to and from the shared host region.

vLLM 0.32 has such a worker for GPUs only. On a CPU device the KV cache tensors are host memory
already, and a transfer is a copy between two places in RAM; what makes it worth having is
everything above it: the scheduler, connector, tiering manager and secondary tiers of a GPU machine.

Why copies are synchronous
--------------------------
vLLM needs three orders. (1) A store reads its blocks after the forward pass that filled them: it is
submitted at the start of the next step, when that forward pass is over, because CPU kernels return
when they are done. (2) It reads them before anybody overwrites them: blocks can be zeroed, reused
or moved from the very step on in which the store is submitted. (3) A load writes its blocks after
they were zeroed and before they are used: it is submitted after zeroing, and the request waits for
its completion. A copy that is finished when `submit_store` or `submit_load` returns keeps all three
whatever the scheduler does. A copy on a thread would depend on every fence in the scheduler
(`jobs_to_flush`) being right for CPU devices too, and it would compete with the forward pass for
the cores that vLLM pins and the memory bandwidth that bounds it. The cost is known: at some GB/s
per core, copying a step's KV takes a small fraction of the time that computing it took on the same
cores, and a load lets its request run one step sooner.

Failed jobs do not exist for vLLM (it asserts success), so contradictions raise here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvvault.integrations.vllm.copyplan import (
    Blocks,
    Bytes,
    GroupPlan,
    blocks_per_group,
    plan_groups,
)

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

__all__ = ["HostOffloadingWorker"]


class HostOffloadingWorker(OffloadingWorker):
    """Copies on the caller's thread; `get_finished` reports what was copied since its last call.

    Owns `region` once constructed and releases it in `shutdown`. Used by one thread (the worker's).
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        *,
        canonical_layout: bool,
        cleans: bool,
    ) -> None:
        """
        Args:
            kv_caches: this worker's tensors and each group's references into them.
            blocks_per_chunk: device blocks in one offloaded chunk.
            region: this worker's view of the host region.
            canonical_layout: whether rows hold canonical pages; then every reference has a mapping.
            cleans: whether this worker zeroes bytes of a stored row that its group does not use;
                in the canonical layout exactly one worker does.

        Raises:
            ValueError: a KV cache tensor is not on the CPU, or sizes contradict each other.
        """
        device = [_pages(t.tensor, t.page_size_bytes) for t in kv_caches.tensors]
        sizes = (
            canonical_page_sizes(kv_caches.group_data_refs, len(kv_caches.tensors))
            if canonical_layout
            else [t.page_size_bytes for t in kv_caches.tensors]
        )
        view = (
            region.create_next_canonical_view
            if canonical_layout
            else region.create_next_worker_view
        )
        host = [_bytes(view(size * blocks_per_chunk)) for size in sizes]
        self._blocks_per_chunk = blocks_per_chunk
        self._plans: tuple[GroupPlan, ...] = plan_groups(
            device,
            host,
            kv_caches.group_data_refs,
            blocks_per_chunk,
            canonical=canonical_layout,
            cleans=cleans,
        )
        self._region: SharedOffloadRegion | None = region
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        started = time.perf_counter()
        copied = sum(plan.store(blocks) for plan, blocks in self._work(src_spec, dst_spec))
        self._finish(job_id, copied, started)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        started = time.perf_counter()
        copied = sum(plan.load(blocks) for plan, blocks in self._work(dst_spec, src_spec))
        self._finish(job_id, copied, started)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: every submitted job is finished."""

    def shutdown(self) -> None:
        """Release the region. Views go first, they keep its memory mapped."""
        self._plans = ()
        self._finished.clear()
        region, self._region = self._region, None
        if region is not None:
            region.cleanup()

    def _work(
        self, device: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> list[tuple[GroupPlan, Blocks]]:
        if not isinstance(host, CPULoadStoreSpec):
            raise TypeError(f"rows are named by CPULoadStoreSpec, not {type(host).__name__}")
        groups = blocks_per_group(
            device.block_ids,
            host.chunk_ids,
            device.group_sizes,
            device.block_indices,
            self._blocks_per_chunk,
        )
        return [
            (plan, blocks) for plan, blocks in zip(self._plans, groups, strict=True) if len(blocks)
        ]

    def _finish(self, job_id: int, copied: int, started: float) -> None:
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=copied,
                transfer_time=time.perf_counter() - started,
            )
        )


def canonical_page_sizes(
    group_refs: Sequence[Sequence[CanonicalKVCacheRef]], tensors: int
) -> list[int]:
    """Bytes of each tensor's canonical page: the largest among the layers that share the tensor.

    Raises:
        ValueError: a reference has no mapping, or no layer refers to a tensor.
    """
    sizes = [0] * tensors
    for refs in group_refs:
        for ref in refs:
            if ref.mapping is None:
                raise ValueError("a layer has no canonical mapping")
            sizes[ref.tensor_idx] = max(
                sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes
            )
    if not all(sizes):
        raise ValueError("a KV cache tensor belongs to no layer")
    return sizes


def _bytes(tensor: torch.Tensor) -> Bytes:
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor is on {tensor.device.type}, this worker copies host memory")
    array: Bytes = tensor.view(torch.uint8).numpy()
    return array


def _pages(tensor: torch.Tensor, page_bytes: int) -> Bytes:
    """(device blocks, page bytes), sharing the tensor's memory."""
    pages = _bytes(tensor)
    if pages.ndim != 2 or pages.shape[1] != page_bytes:
        pages = pages.reshape(-1, page_bytes)
        if not np.shares_memory(pages, _bytes(tensor)):
            raise ValueError("a KV cache tensor is not made of contiguous pages")
    return pages
