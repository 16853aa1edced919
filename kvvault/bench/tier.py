"""Store and load throughput of the kvvault tier beside vLLM's own ``fs`` tier.

Both are driven through the interface that vLLM's tiering manager uses (`SecondaryTierManager`:
submit, poll), with the defaults of each, over the same primary memory and in the same directory.
One round stores `ROUND_BYTES` of distinct random blocks in jobs of about `JOB_BYTES`, then loads
them all back; rounds of the two tiers alternate, and the published ratio is the median of the
rounds' ratios, because the machine's speed drifts more than the tiers differ. Loaded bytes are
compared with what was stored. CPU seconds are those of the whole process, kernel time included.

Neither tier syncs its data during a store: ``fs`` never does, kvvault every 30 seconds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import numpy as np
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, OffloadKey, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvvault.errors import KvvaultError
from kvvault.integrations.vllm.tier import KvvaultTier, TierSettings
from kvvault.model import Namespace
from kvvault.segments.io import AlignedBuffer
from kvvault.vault import Vault

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

ROUND_BYTES = 192 << 20
JOB_BYTES = 4 << 20
SIZES = (64 << 10, 256 << 10, 2 << 20, 16 << 20)

Op = Literal["store", "load"]


@dataclass(frozen=True, slots=True)
class TierResult:
    """Medians over the rounds of one block size and operation. GB are 10^9 bytes."""

    block_bytes: int
    op: Op
    kvvault_gbps: float
    fs_gbps: float
    ratio: float
    """Median of the rounds' kvvault/fs throughput: above 1 kvvault is faster."""
    cpu_s_per_gb: float
    fs_cpu_s_per_gb: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True, slots=True)
class _Run:
    gbps: float
    cpu_s_per_gb: float


class _BenchTier(KvvaultTier):
    """The tier as it is, in a namespace of its own, since there is no model."""

    def _namespace(self, spec: OffloadingSpec, settings: TierSettings) -> Namespace:
        return Namespace.of(self._row_bytes, {"engine": "bench"})


def run(
    *,
    directory: Path | None = None,
    sizes: Sequence[int] = SIZES,
    repeat: int = 5,
    progress: Callable[[str], None] = lambda _line: None,
) -> list[TierResult]:
    """Measure. Needs about 400 MB of memory and disk below `directory` (default: the current one).

    Raises:
        KvvaultError: a tier lost or damaged a block, or the disk cannot be used.
        ValueError: a size is not a multiple of 4096, or `repeat` is below 1.
    """
    if repeat < 1 or any(size <= 0 or size % 4096 for size in sizes):
        raise ValueError("sizes are multiples of 4096, repeat is at least 1")
    base = Path(tempfile.mkdtemp(prefix="kvvault-bench-", dir=directory or Path.cwd()))
    results: list[TierResult] = []
    try:
        memory = AlignedBuffer(ROUND_BYTES).view
        whole = np.frombuffer(memory, np.uint8)
        original = np.random.default_rng(0).integers(0, 256, ROUND_BYTES, dtype=np.uint8)
        for size in sizes:
            runs: dict[tuple[str, Op], list[_Run]] = {}
            for round_no in range(repeat + 1):
                # The first round warms up both; the order alternates.
                names = ("kvvault", "fs") if round_no % 2 else ("fs", "kvvault")
                for name in names:
                    whole[:] = original
                    stored, loaded = _round(name, base / f"{size}-{round_no}", memory, size)
                    if not np.array_equal(whole, original):
                        raise KvvaultError(
                            f"the {name} tier returned other bytes than it was given",
                            hint="report this: it must never happen",
                        )
                    if round_no:
                        runs.setdefault((name, "store"), []).append(stored)
                        runs.setdefault((name, "load"), []).append(loaded)
                        progress(
                            f"{size >> 10} KiB, round {round_no}/{repeat}, {name}: "
                            f"store {stored.gbps:.2f} GB/s, load {loaded.gbps:.2f} GB/s"
                        )
            ops: tuple[Op, ...] = ("store", "load")
            results += [_summary(size, op, runs["kvvault", op], runs["fs", op]) for op in ops]
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return results


def _summary(size: int, op: Op, ours: list[_Run], theirs: list[_Run]) -> TierResult:
    ratios = [a.gbps / b.gbps for a, b in zip(ours, theirs, strict=True)]
    return TierResult(
        block_bytes=size,
        op=op,
        kvvault_gbps=statistics.median(r.gbps for r in ours),
        fs_gbps=statistics.median(r.gbps for r in theirs),
        ratio=statistics.median(ratios),
        cpu_s_per_gb=statistics.median(r.cpu_s_per_gb for r in ours),
        fs_cpu_s_per_gb=statistics.median(r.cpu_s_per_gb for r in theirs),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


def _round(name: str, directory: Path, memory: memoryview, size: int) -> tuple[_Run, _Run]:
    """One tier, once: store everything, wipe the memory, load everything."""
    count = ROUND_BYTES // size
    view = memory[: count * size].cast("b", (count, size))
    tier = _make(name, directory, view)
    try:
        keys = [OffloadKey(os.urandom(32) + bytes(4)) for _ in range(count)]
        context = ReqContext(req_id="bench")
        tier.on_new_request(context)
        stored = _drive(tier, tier.submit_store, keys, size, context, promote=False)
        np.frombuffer(memory, np.uint8)[: count * size] = 0
        loaded = _drive(tier, tier.submit_load, keys, size, context, promote=True)
        tier.on_request_finished(context)
    finally:
        tier.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()  # the next round starts with an idle disk
    return stored, loaded


def _drive(
    tier: SecondaryTierManager,
    submit: Callable[[TransferJob], None],
    keys: list[OffloadKey],
    size: int,
    context: ReqContext,
    *,
    promote: bool,
) -> _Run:
    step = max(1, JOB_BYTES // size)
    jobs = [
        TransferJob(
            job_id=i,
            keys=keys[i : i + step],
            chunk_ids=np.arange(i, min(i + step, len(keys)), dtype=np.int32),
            is_promotion=promote,
            req_context=context,
        )
        for i in range(0, len(keys), step)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    for job in jobs:
        submit(job)
    left = len(jobs)
    while left:
        for result in tier.get_finished_jobs():
            if not result.success:
                raise KvvaultError("a transfer failed", hint="check space and errors of the disk")
            left -= 1
        time.sleep(0.0005)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    gigabytes = len(keys) * size / 1e9
    return _Run(gigabytes / seconds, cpu / gigabytes)


def _make(name: str, directory: Path, view: memoryview) -> SecondaryTierManager:
    directory.mkdir()
    spec = bench_spec()
    if name == "fs":
        return FileSystemTierManager(spec, view, "fs", root_dir=str(directory / "fs"))
    path = directory / "vault"
    Vault.create(path, provider=f"file:{directory / 'key.json'}").close()
    return _BenchTier(spec, view, "kvvault", vault=path, store_queue_mib=ROUND_BYTES >> 20)


def bench_spec() -> OffloadingSpec:
    """What the tiers read of an offloading spec, for one full-attention group."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("0",), group_id=0),),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )
    spec: OffloadingSpec = SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        ),
    )
    return spec
