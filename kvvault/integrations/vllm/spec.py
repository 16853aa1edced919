"""The offloading spec: vLLM's multi-tier spec, which also works on CPU devices.

`TieringOffloadingSpec` refuses a CPU device at one point only, where it makes the worker. This spec
makes a `HostOffloadingWorker` there; on every other platform vLLM makes its own. Everything else
(sizes, primary tier, secondary tiers, metrics) is vLLM's, but for one thing: the primary tier's
file in /dev/shm, which holds KV in plaintext, loses its name as soon as every process has it
mapped. Then the kernel gives the memory back when the last of them ends, however it ends, and a
killed engine leaves nothing behind (vLLM's CPU-only spec does so; its multi-tier spec does not).

Use it by name, which the plugin registers, or by module path::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {
         "spec_name": "KvvaultOffloadingSpec",
         "spec_module_path": "kvvault.integrations.vllm.spec",
         "cpu_bytes_to_use": 4294967296,
         "canonical_layout": true,
         "secondary_tiers": [{"type": "kvvault", "vault": "/srv/kv"}]}}
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvvault.errors import ConfigError, NamespaceError
from kvvault.integrations.vllm import shims
from kvvault.integrations.vllm.namespace import canonical_block_bytes
from kvvault.integrations.vllm.worker import HostOffloadingWorker, canonical_page_sizes

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["KvvaultOffloadingSpec"]


class KvvaultOffloadingSpec(TieringOffloadingSpec):
    """Made once in the scheduler process and once in every worker process, while the connector is
    constructed there."""

    @override
    def __init__(self, config: OffloadingConfig) -> None:
        """
        Raises:
            ConfigError: a vLLM that is known not to fit, or a primary tier too small for one chunk.
        """
        shims.check_version()
        super().__init__(config)
        if self.num_chunks == 0:
            raise ConfigError(
                f"cpu_bytes_to_use is smaller than one chunk ({self.kv_bytes_per_chunk} bytes)",
                hint="give the primary tier room for at least a few hundred chunks",
            )
        self._total_kv_heads = (
            shims.total_kv_heads(shims.current_vllm_config()) if config.canonical_layout else 0
        )
        self._host_worker: HostOffloadingWorker | None = None

    @override
    def get_manager(self) -> OffloadingManager:
        """Also takes the name of the host region away: the engine makes its scheduler, which asks
        for the manager, when all workers have registered their KV caches and so opened the region.
        Workers do not take it away themselves; no KV is in the file before this."""
        if self._manager is not None:
            return self._manager
        failed = True
        try:
            manager = super().get_manager()
            failed = False
            return manager
        finally:
            # A region that no worker had made before would be joined by name later: keep it then.
            if failed or shims.created_by_worker(self._scheduler_mmap):
                with contextlib.suppress(FileNotFoundError):
                    shims.region_path(self._engine_id).unlink()

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """
        Raises:
            NamespaceError: canonical pages need more room than the block that will be persisted.
            RuntimeError: vLLM could not certify a layer for the canonical layout.
        """
        if self.config.canonical_layout:
            self._validate_canonical_refs(kv_caches)
            self._check_canonical_area(kv_caches)
        if not current_platform.is_cpu():
            worker = super().get_worker(kv_caches)
            shims.disown_region(worker)
            return worker
        if self._host_worker is None:
            self._host_worker = self._create_host_worker(kv_caches)
        return self._host_worker

    def _create_host_worker(self, kv_caches: CanonicalKVCaches) -> HostOffloadingWorker:
        rank = self.config.parallel.rank
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            # Identical pages of all ranks have one place in the row (MLA under tensor parallelism).
            rank=0 if self.replicated_layout else rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            worker = HostOffloadingWorker(
                kv_caches,
                self.blocks_per_chunk,
                region,
                canonical_layout=self.config.canonical_layout,
                cleans=rank == 0 or not self.config.canonical_layout,
            )
        except BaseException:
            region.cleanup()
            raise
        shims.disown_region(region)
        return worker

    def _check_canonical_area(self, kv_caches: CanonicalKVCaches) -> None:
        """A tier persists `canonical_block_bytes` of each row, computed in the scheduler process
        from sizes; here are the real pages, so here it is checked."""
        pages = canonical_page_sizes(kv_caches.group_data_refs, len(kv_caches.tensors))
        area = sum(pages) * self.blocks_per_chunk
        persisted = canonical_block_bytes(
            worker_block_bytes=self.config.worker_kv_bytes_per_block,
            shards=min(self.config.parallel.tp_size, self._total_kv_heads),
            blocks_per_chunk=self.blocks_per_chunk,
            row_bytes=self.kv_bytes_per_chunk,
        )
        if area > persisted:
            raise NamespaceError(
                f"canonical pages take {area} bytes of a row, {persisted} would be kept",
                hint="remove canonical_layout from kv_connector_extra_config",
            )
