"""The tier's metrics, in vLLM's own /metrics.

vLLM takes counters, gauges and histograms by name; labels stay few (never a tenant, a request or a
block). Counters are reported as increments since the last collection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvvault.lifecycle.runs import RunReport
from kvvault.tiering.transfers import TransferPool

BLOCKS = "kvvault_tier_blocks"
BYTES = "kvvault_tier_bytes"
REQUESTS = "kvvault_tier_requests"
DROPPED = "kvvault_tier_dropped_transfers"
TIMEOUTS = "kvvault_tier_timeouts"
SECONDS = "kvvault_tier_transfer_seconds"
PENDING = "kvvault_tier_pending_transfers"
STALLED = "kvvault_tier_stalled"
JOB_RUNS = "kvvault_tier_job_runs"
JOBS_FAILING = "kvvault_tier_jobs_failing"

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

# Vault counter → (metric, labels).
_FROM_VAULT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "hit": (BLOCKS, ("load", "hit")),
    "miss": (BLOCKS, ("load", "miss")),
    "tampered": (BLOCKS, ("load", "tampered")),
    "key_unavailable": (BLOCKS, ("load", "key_unavailable")),
    "io_failed": (BLOCKS, ("load", "io_failed")),
    "abandoned": (BLOCKS, ("load", "abandoned")),
    "lost": (BLOCKS, ("load", "lost")),
    "stored_blocks": (BLOCKS, ("store", "stored")),
    "present_blocks": (BLOCKS, ("store", "present")),
    "refused_blocks": (BLOCKS, ("store", "refused")),
    "declined_blocks": (BLOCKS, ("store", "declined")),
    "evicted_bytes": (BYTES, ("evict",)),
    "readmitted_bytes": (BYTES, ("readmit",)),
}
_FROM_TIER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "not_persisted_blocks": (BLOCKS, ("store", "not_persisted")),
    "dropped_blocks": (BLOCKS, ("store", "dropped")),
    "dropped_loads": (DROPPED, ("load",)),
    "dropped_stores": (DROPPED, ("store",)),
    "timed_out": (TIMEOUTS, ()),
    "requests_accepted": (REQUESTS, ("accepted",)),
    "requests_default_tenant": (REQUESTS, ("default_tenant",)),
    "requests_no_tenant": (REQUESTS, ("no_tenant",)),
    "requests_malformed": (REQUESTS, ("malformed",)),
    "requests_forgotten": (REQUESTS, ("forgotten",)),
}


class TierMetrics:
    """Collects observations between two scrapes. Scheduler thread only."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()
        self._seen: Counter[str] = Counter()
        self._failing: set[str] = set()

    @staticmethod
    def definitions() -> dict[str, OffloadingMetricMetadata]:
        return {
            BLOCKS: OffloadingCounterMetadata(
                documentation="Blocks by operation and outcome.", labelnames=("op", "outcome")
            ),
            BYTES: OffloadingCounterMetadata(
                documentation="Bytes moved to and from the vault, and within it.",
                labelnames=("op",),
            ),
            REQUESTS: OffloadingCounterMetadata(
                documentation="Requests by how their tenant was decided.", labelnames=("verdict",)
            ),
            DROPPED: OffloadingCounterMetadata(
                documentation="Transfers not taken: queue full or disk stalled.",
                labelnames=("op",),
            ),
            TIMEOUTS: OffloadingCounterMetadata(
                documentation="Transfers that passed their time limit."
            ),
            SECONDS: OffloadingHistogramMetadata(
                documentation="Seconds from submission to the end of a transfer.",
                labelnames=("op",),
                buckets=_BUCKETS,
            ),
            PENDING: OffloadingGaugeMetadata(documentation="Transfers queued or under way."),
            STALLED: OffloadingGaugeMetadata(
                documentation="1 while a disk operation hangs beyond its time limit."
            ),
            JOB_RUNS: OffloadingCounterMetadata(
                documentation="Runs of the vault's jobs in this process.",
                labelnames=("job", "outcome"),
            ),
            JOBS_FAILING: OffloadingGaugeMetadata(
                documentation="Jobs whose last run in this process did not succeed."
            ),
        }

    def job(self, report: RunReport) -> None:
        """A job of the vault has run in this process."""
        self._stats.increase_counter(JOB_RUNS, 1, (report.job, report.outcome))
        if report.outcome == "ok":
            self._failing.discard(report.job)
        else:
            self._failing.add(report.job)

    def load(self, seconds: float, nbytes: int) -> None:
        self._transfer("load", seconds, nbytes)

    def store(self, seconds: float, nbytes: int) -> None:
        self._transfer("store", seconds, nbytes)

    def _transfer(self, op: str, seconds: float, nbytes: int) -> None:
        self._stats.observe_histogram(SECONDS, seconds, (op,))
        if nbytes:
            self._stats.increase_counter(BYTES, nbytes, (op,))

    def collect(
        self, tier: Mapping[str, int], vault: Mapping[str, int], pool: TransferPool[Any]
    ) -> OffloadingConnectorStats:
        """Everything since the last collection."""
        for table, values in ((_FROM_VAULT, vault), (_FROM_TIER, tier)):
            for name, (metric, labels) in table.items():
                now = values.get(name, 0)
                if now > self._seen[name]:
                    self._stats.increase_counter(metric, now - self._seen[name], labels)
                    self._seen[name] = now
        stats, self._stats = self._stats, OffloadingConnectorStats()
        stats.set_gauge(PENDING, pool.pending)
        stats.set_gauge(STALLED, float(pool.stalled))
        stats.set_gauge(JOBS_FAILING, len(self._failing))
        return stats
