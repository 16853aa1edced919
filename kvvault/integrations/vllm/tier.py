"""The secondary tier: vLLM's multi-tier KV offloading, stored in a vault.

Configured as one of the ``secondary_tiers`` of ``kv_connector_extra_config``::

    {"type": "kvvault", "vault": "/srv/kv", "default_tenant": "default"}

(``{"type": "KvvaultTier", "module_path": "kvvault.integrations.vllm.tier", ...}`` where plugins are
switched off). All settings: `TierSettings`.

Every method runs on vLLM's scheduler thread. None raises once the engine runs, and none waits for
disk, catalog or key provider, except `drain_jobs` and `shutdown`, from which vLLM expects it; what
goes wrong is a miss or a dropped store, and a counter. Blocks move on the threads of a
`TransferPool`. At start, on the contrary, everything that is wrong is an error: an engine that
silently does not cache, or caches somewhere else, helps nobody.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvvault.errors import ConfigError, KvvaultError
from kvvault.integrations.vllm import requestids, shims
from kvvault.integrations.vllm.metrics import TierMetrics
from kvvault.integrations.vllm.namespace import build_namespace
from kvvault.integrations.vllm.tenancy import Claim, RequestState, Tenancy
from kvvault.lifecycle.runs import RunReport
from kvvault.lifecycle.scheduler import log_run
from kvvault.model import Guard, Namespace, Outcome, SystemClock
from kvvault.tiering.transfers import Finished, Part, PoolOptions, TransferPool
from kvvault.upkeep import scheduler_of
from kvvault.vault import Scope, Vault

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec

log = logging.getLogger(__name__)

_MIB = 1 << 20


class TierSettings(BaseModel):
    """The tier's part of vLLM's configuration. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vault: Path
    """Directory of the vault; it must exist (``kvvault init``)."""
    key_provider: str | None = None
    """URI of the key provider, if not the one that the vault names."""
    default_tenant: str | None = "default"
    """Tenant of requests that name none (or one that is not listed). null: those are not kept."""
    tenants: tuple[str, ...] = ()
    """Tenants that a request may name."""
    threads: int = Field(default=16, ge=2, le=64)
    store_queue_mib: int = Field(default=256, ge=1)
    """Stores waiting or under way; they pin CPU-tier memory. Beyond that stores are dropped."""
    load_timeout_s: float = Field(default=10.0, gt=0)
    store_timeout_s: float = Field(default=30.0, gt=0)
    jobs: bool = True
    """Run the vault's jobs (expiry, eviction, purge, ...) in this process, unless another does."""
    immutable_lora: bool = False
    """The operator's word that a LoRA adapter never changes under a name once used. Without it an
    engine with LoRA is refused: vLLM's block hashes know an adapter by its name only."""
    enable_kv_events: bool = False
    """Emit an event for stored blocks, if vLLM's KV events are enabled. Those publish token ids."""
    locality: Locality | None = None

    @classmethod
    def parse(cls, config: dict[str, object]) -> TierSettings:
        """
        Raises:
            ConfigError: an unknown key, a missing one, or a value out of range; names the key.
        """
        try:
            return cls.model_validate(config)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "configuration"
            raise ConfigError(
                f"kvvault tier: {key}: {first['msg']}",
                hint="settings: " + ", ".join(sorted(cls.model_fields)),
            ) from None


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer that the framework waits for. `parts` are the keys of each part, in order."""

    job_id: int
    req_id: str
    is_load: bool
    parts: tuple[tuple[OffloadKey, ...], ...]
    state: RequestState


class KvvaultTier(SecondaryTierManager):
    """See the module's docstring."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **config: object,
    ) -> None:
        """
        Raises:
            ConfigError: a setting is wrong.
            NamespaceError: what decides whether KV bytes fit cannot be established.
            VaultNotFoundError, VaultKeyError, UnsafeFileError, StorageError, CatalogError: the
            vault cannot be opened.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.parse(config)
        shims.check_version()
        self.locality = settings.locality
        self._rows = primary_kv_view.cast("B")
        self._row_bytes = self._block_size_bytes
        namespace = self._namespace(offloading_spec, settings)
        self._block_bytes = namespace.block_bytes
        self._vault = Vault.open(settings.vault, provider=settings.key_provider)
        try:
            names = {*settings.tenants}
            if settings.default_tenant is not None:
                names.add(settings.default_tenant)
            scopes = {name: self._vault.scope(name, namespace) for name in sorted(names)}
        except BaseException:
            self._vault.close()
            raise
        self._tenancy = Tenancy(
            scopes, settings.default_tenant, lambda name: self._vault.scope(name, namespace)
        )
        self._runs: queue.SimpleQueue[RunReport] = queue.SimpleQueue()
        self._scheduler = scheduler_of(self._vault, report=self._job_ran) if settings.jobs else None
        if self._scheduler is not None:
            self._scheduler.start()
        self._threads = settings.threads
        self._pool: TransferPool[list[Outcome] | int] = TransferPool(
            PoolOptions(
                threads=settings.threads,
                store_queue_bytes=settings.store_queue_mib * _MIB,
                load_timeout_s=settings.load_timeout_s,
                store_timeout_s=settings.store_timeout_s,
            ),
            SystemClock(),
        )
        self._jobs: dict[int, _Job] = {}
        self._unrecorded: dict[str, RequestState] = {}
        self._prompts_only = shims.offloads_prompts_only(offloading_spec)
        self._randomised = shims.request_ids_are_randomised()
        self._refused: list[JobResult] = []
        self._counts: Counter[str] = Counter()
        self._metrics = TierMetrics()
        self._events: list[OffloadingEvent] | None = (
            []
            if settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
            else None
        )
        self._shut_down = False
        log.info(
            "kvvault: %d blocks in the vault, direct I/O %s",
            self._vault.stats().blocks,
            "on" if self._vault.direct_io else "off",
        )

    def _namespace(self, spec: OffloadingSpec, settings: TierSettings) -> Namespace:
        """What must agree for these KV bytes to be valid. A benchmark, which has no model, supplies
        one of its own."""
        return build_namespace(
            spec.config,
            shims.current_vllm_config(),
            self._row_bytes,
            immutable_lora=settings.immutable_lora,
        )

    # -- requests ---------------------------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._state(req_context)
        return RequestOffloadingContext()

    def _state(self, req_context: ReqContext) -> RequestState:
        state: RequestState | None = req_context.get_state(RequestState)
        if state is None:
            state = self._tenancy.decide(req_context.kv_transfer_params)
            req_context.set_state(state)
            self._counts[f"requests_{state.verdict}"] += 1
            if state.scope is not None and state.persist:
                self._open_prompt(state, state.scope, req_context)
        return state

    def _open_prompt(self, state: RequestState, scope: Scope, req_context: ReqContext) -> None:
        """Have the inventory know the request, when something of it is stored or reused."""
        said, state.said = state.said or Claim(), None
        state.prompt = self._vault.prompt(
            scope,
            request_id=said.request_id
            or requestids.client_id(req_context.req_id, randomised=self._randomised),
            subject=said.subject,
            labels=dict(said.labels),
            preview=said.preview,
        )
        state.chain = shims.chain(req_context)
        self._unrecorded[req_context.req_id] = state

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The one moment at which a request's chain is its prompt's: it is scheduled, and nothing
        was generated yet."""
        for req_id in context.new_req_ids:
            state = self._unrecorded.get(req_id)
            if state is not None:
                state.used = True
                if state.asked is None and state.chain is not None:
                    state.asked = len(state.chain)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Also after an abort. What it stored or reused is noted when its last store is over."""
        state = self._state(req_context)
        state.finished = True
        if not state.stores:
            self._record(req_context.req_id, state)

    def _record(self, req_id: str, state: RequestState) -> None:
        """Hand the request over to the inventory, once. Nothing is copied, whatever its length."""
        prompt, state.prompt = state.prompt, None
        if prompt is not None:
            self._unrecorded.pop(req_id, None)
            if state.used:
                chain = state.reused_or_stored(prompts_only=self._prompts_only)
                self._vault.record(prompt, chain)

    def _note(self, state: RequestState, keys: Iterable[OffloadKey], context: ReqContext) -> None:
        """Where vLLM does not keep a request's chain, remember what the tier is asked for."""
        if state.chain is None and state.prompt is not None:
            state.noted.update((key, shims.end_of(context, key)) for key in keys)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self._state(req_context)
        if state.scope is None or key in state.failed or self._pool.stalled:
            return LookupResult.MISS
        self._note(state, (key,), req_context)
        hit = self._vault.contains(state.scope, (key,))[0]
        return LookupResult.HIT if hit else LookupResult.MISS

    # -- stores -----------------------------------------------------------------------------------

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        state = self._state(job_metadata.req_context)
        keys = tuple(job_metadata.keys)
        if state.scope is None or not state.persist:
            self._counts["not_persisted_blocks"] += len(keys)
            self._refuse(job_metadata.job_id)
            return
        scope, prompt = state.scope, state.prompt
        rows = [int(row) for row in job_metadata.chunk_ids]
        context = job_metadata.req_context
        ends = [shims.end_of(context, key) for key in keys]
        self._note(state, keys, context)
        state.used = True

        def store(guard: Guard) -> int:
            report = self._vault.put(
                scope,
                keys,
                [self._row(row) for row in rows],
                guard=guard,
                prompt=prompt,
                ends=ends,
            )
            return report.stored + report.present

        nbytes = len(keys) * self._block_bytes
        self._jobs[job_metadata.job_id] = _Job(
            job_metadata.job_id, context.req_id, False, (keys,), state
        )
        state.stores += 1
        if not self._pool.submit_store(job_metadata.job_id, [store], nbytes):
            del self._jobs[job_metadata.job_id]
            state.stores -= 1
            self._counts["dropped_stores"] += 1
            self._counts["dropped_blocks"] += len(keys)
            self._refuse(job_metadata.job_id)

    # -- loads ------------------------------------------------------------------------------------

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        state = self._state(job_metadata.req_context)
        keys = tuple(job_metadata.keys)
        rows = [int(row) for row in job_metadata.chunk_ids]
        scope = state.scope
        if scope is None:
            self._refuse(job_metadata.job_id)
            return
        state.used = True
        # One part per thread, so that one long prompt uses all of them.
        step = max(1, -(-len(keys) // self._threads), _MIB // self._block_bytes)
        ranges = [range(i, min(i + step, len(keys))) for i in range(0, len(keys), step)]

        def part(chosen: range) -> Part[list[Outcome] | int]:
            mine = [keys[i] for i in chosen]
            buffers = [self._row(rows[i]) for i in chosen]
            return lambda guard: self._vault.get(scope, mine, buffers, guard=guard)

        job = _Job(
            job_metadata.job_id,
            job_metadata.req_context.req_id,
            True,
            tuple(tuple(keys[i] for i in chosen) for chosen in ranges),
            state,
        )
        self._jobs[job.job_id] = job
        nbytes = len(keys) * self._block_bytes
        if not self._pool.submit_load(job.job_id, [part(r) for r in ranges], nbytes):
            del self._jobs[job.job_id]
            state.failed.update(keys)
            self._counts["dropped_loads"] += 1
            self._refuse(job.job_id)

    def _row(self, row: int) -> memoryview:
        """The part of a primary-tier slot that belongs to the namespace."""
        start = row * self._row_bytes
        return self._rows[start : start + self._block_bytes]

    # -- results ----------------------------------------------------------------------------------

    def _refuse(self, job_id: int) -> None:
        """Report a job as failed at the next poll: nothing of it was or will be done."""
        self._refused.append(JobResult(job_id=job_id, success=False))

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._refused = self._refused, []
        for finished in self._pool.finished():
            job = self._jobs.pop(finished.transfer_id, None)
            if job is None:
                continue
            self._counts["timed_out"] += finished.timed_out
            results.append(
                self._loaded(job, finished) if job.is_load else self._stored(job, finished)
            )
        return results

    def _loaded(self, job: _Job, finished: Finished[list[Outcome] | int]) -> JobResult:
        good: list[OffloadKey] = []
        for keys, outcomes in zip(job.parts, finished.results, strict=True):
            hits = (
                [outcome is Outcome.HIT for outcome in outcomes]
                if isinstance(outcomes, list)
                else [False] * len(keys)
            )
            for key, hit in zip(keys, hits, strict=True):
                if hit:
                    good.append(key)
                else:
                    job.state.failed.add(key)
        total = sum(len(keys) for keys in job.parts)
        self._metrics.load(finished.seconds, len(good) * self._block_bytes)
        return JobResult(
            job_id=job.job_id,
            success=len(good) == total,
            successful_keys=tuple(good) if good else None,
            transfer_time=finished.seconds,
            transfer_bytes=len(good) * self._block_bytes,
        )

    def _stored(self, job: _Job, finished: Finished[list[Outcome] | int]) -> JobResult:
        keys = job.parts[0]
        kept = finished.results[0]
        job.state.stores -= 1
        if job.state.finished and not job.state.stores:
            self._record(job.req_id, job.state)
        success = kept == len(keys)
        self._metrics.store(finished.seconds, finished.nbytes if success else 0)
        if success and self._events is not None:
            self._events.append(
                OffloadingEvent(
                    keys=list(keys),
                    medium=self.medium,
                    removed=False,
                    locality=self.locality,
                    ownership=self.tier_type,
                )
            )
        return JobResult(
            job_id=job.job_id,
            success=success,
            transfer_time=finished.seconds,
            transfer_bytes=finished.nbytes if success else None,
        )

    @override
    def has_pending_work(self) -> bool:
        return bool(self._refused) or self._pool.pending > 0

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Stored blocks. Deletions are not announced: the vault knows blocks by keyed ids only and
        cannot name them to the engine."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """What is in use is evicted later, and its sliding deadline moves."""
        scope = self._state(req_context).scope
        if scope is not None:
            self._vault.touch(scope, tuple(keys))

    @override
    def drain_jobs(self) -> None:
        """Wait for every transfer under way, each at most its time limit."""
        self._pool.drain()

    @override
    def shutdown(self) -> None:
        """Finish or fail what is under way, note what requests shared, seal segments, drop keys.
        Never raises: the engine is going down, and what could not be closed is repaired when the
        vault is next opened."""
        if self._shut_down:
            return
        self._shut_down = True
        try:
            self._pool.close()
            self._tenancy.close()
            for req_id, state in tuple(self._unrecorded.items()):
                self._record(req_id, state)
            if self._scheduler is not None:
                self._scheduler.stop()
            self._vault.close()
        except KvvaultError as exc:
            log.warning("the vault was not closed cleanly: %s", exc)

    # -- metrics ----------------------------------------------------------------------------------

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        return TierMetrics.definitions()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        while not self._runs.empty():
            self._metrics.job(self._runs.get())
        return self._metrics.collect(self._counts, self._vault.counters(), self._pool)

    def _job_ran(self, report: RunReport) -> None:
        """Any thread."""
        log_run(report)
        self._runs.put(report)


__all__: Sequence[str] = ["KvvaultTier", "TierSettings"]
