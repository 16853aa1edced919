"""The tier under vLLM's own interface, without an engine: what a scheduler would do, and worse."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvvault.bench.tier import bench_spec
from kvvault.errors import ConfigError, VaultNotFoundError, WrongKeyError
from kvvault.integrations.vllm import plugin
from kvvault.integrations.vllm.tier import KvvaultTier
from kvvault.model import Namespace
from kvvault.segments.io import AlignedBuffer
from kvvault.vault import Vault

pytestmark = pytest.mark.vllm

ROW = 8192
ROWS = 64


class Tier(KvvaultTier):
    """The tier in a namespace of its own, since there is no model here."""

    def _namespace(self, spec: object, settings: object) -> Namespace:
        return Namespace.of(self._row_bytes, {"engine": "test"})


class Scheduler:
    """Drives a tier the way vLLM's tiering manager does, over a small primary tier."""

    def __init__(self, vault: Path, **config: object) -> None:
        self.memory = AlignedBuffer(ROW * ROWS).view
        self.tier: SecondaryTierManager = Tier(
            bench_spec(), self.memory.cast("b", (ROWS, ROW)), "kvvault", vault=vault, **config
        )
        self._next = 0

    def rows(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return np.frombuffer(self.memory, np.uint8).reshape(ROWS, ROW)

    def request(self, name: str, params: object = None) -> ReqContext:
        context = ReqContext(req_id=name, kv_transfer_params=params)
        self.tier.on_new_request(context)
        return context

    def job(
        self, keys: Sequence[OffloadKey], first_row: int, context: ReqContext, *, load: bool
    ) -> TransferJob:
        self._next += 1
        chosen = np.arange(first_row, first_row + len(keys), dtype=np.int32)
        return TransferJob(self._next, list(keys), chosen, load, context)

    def store(self, keys: Sequence[OffloadKey], first_row: int, context: ReqContext) -> JobResult:
        job = self.job(keys, first_row, context, load=False)
        self.tier.submit_store(job)
        return self.wait(job)

    def load(self, keys: Sequence[OffloadKey], first_row: int, context: ReqContext) -> JobResult:
        job = self.job(keys, first_row, context, load=True)
        self.tier.submit_load(job)
        return self.wait(job)

    def wait(self, job: TransferJob) -> JobResult:
        for result in self.results():
            assert result.job_id == job.job_id
            return result
        raise AssertionError("the job never finished")

    def results(self, seconds: float = 60.0) -> Iterable[JobResult]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield from self.tier.get_finished_jobs()
            time.sleep(0.001)

    def found(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bool]:
        return [self.tier.lookup(key, context) is LookupResult.HIT for key in keys]


def make_keys(count: int) -> list[OffloadKey]:
    return [OffloadKey(os.urandom(32) + bytes(4)) for _ in range(count)]


def tenant(name: object, **more: object) -> dict[str, object]:
    return {"kvvault": {"tenant": name, **more}}


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    path = tmp_path / "vault"
    Vault.create(path, provider=f"file:{tmp_path / 'key'}").close()
    return path


Start = Callable[..., Scheduler]


@pytest.fixture
def start(vault: Path) -> Iterator[Start]:
    """Makes schedulers over the vault, and shuts their tiers down."""
    made: list[Scheduler] = []

    def make(**config: object) -> Scheduler:
        made.append(Scheduler(vault, **config))
        made[-1].rows()[:] = np.random.default_rng(7).integers(0, 256, (ROWS, ROW), np.uint8)
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.tier.shutdown()


class TestWrongConfiguration:
    """At start everything that is wrong is an error that says what to do."""

    def test_unknown_key(self, vault: Path) -> None:
        with pytest.raises(ConfigError, match="encryption") as caught:
            Scheduler(vault, encryption=False)
        assert "default_tenant" in caught.value.hint

    @pytest.mark.parametrize(
        ("key", "value"),
        [("threads", 0), ("threads", "many"), ("load_timeout_s", -1), ("tenants", [1, 2])],
    )
    def test_value(self, vault: Path, key: str, value: object) -> None:
        with pytest.raises(ConfigError, match=key):
            Scheduler(vault, **{key: value})

    def test_no_vault(self, tmp_path: Path) -> None:
        with pytest.raises(VaultNotFoundError):
            Scheduler(tmp_path / "nowhere")

    def test_wrong_key(self, vault: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        Vault.create(other, provider=f"file:{tmp_path / 'other-key'}").close()
        with pytest.raises(WrongKeyError):
            Scheduler(vault, key_provider=f"file:{tmp_path / 'other-key'}")
        Scheduler(vault).tier.shutdown()  # and with its own it starts

    def test_both_ways_to_name_it(self) -> None:
        plugin.register()
        by_name = SecondaryTierFactory.get_tier_class({"type": "kvvault"})
        by_path = SecondaryTierFactory.get_tier_class(
            {"type": "KvvaultTier", "module_path": "kvvault.integrations.vllm.tier"}
        )
        assert by_name is by_path is KvvaultTier


class TestBlocks:
    def test_what_was_stored_is_found_and_loaded(self, start: Start) -> None:
        scheduler = start()
        context, keys = scheduler.request("a"), make_keys(8)
        assert scheduler.found(keys, context) == [False] * 8
        assert scheduler.store(keys, 0, context).success
        assert scheduler.found(keys, context) == [True] * 8
        before = scheduler.rows()[:8].copy()
        scheduler.rows()[8:16] = 0
        result = scheduler.load(keys, 8, context)
        assert result.success
        assert (scheduler.rows()[8:16] == before).all()

    def test_a_new_engine_finds_them(self, start: Start) -> None:
        first = start()
        keys = make_keys(4)
        assert first.store(keys, 0, first.request("a")).success
        first.tier.shutdown()
        second = start()
        context = second.request("b")
        assert second.found(keys, context) == [True] * 4
        second.rows()[:] = 0
        assert second.load(keys, 10, context).success
        assert (second.rows()[10:14] == first.rows()[:4]).all()

    def test_damaged_blocks_are_misses_and_the_others_hits(self, start: Start, vault: Path) -> None:
        first = start()
        keys = make_keys(6)
        first.store(keys, 0, first.request("a"))
        first.tier.shutdown()
        (segment,) = (vault / "segments").iterdir()
        with segment.open("r+b") as file:  # slot 2
            file.seek(2 * ROW + 100)
            byte = file.read(1)
            file.seek(2 * ROW + 100)
            file.write(bytes([byte[0] ^ 1]))
        second = start()
        context = second.request("b")
        second.rows()[:] = 255
        result = second.load(keys, 0, context)
        assert not result.success
        assert result.successful_keys is not None
        assert set(result.successful_keys) == set(keys) - {keys[2]}
        assert not second.rows()[2].any()
        good = [0, 1, 3, 4, 5]
        assert (second.rows()[good] == first.rows()[good]).all()
        assert second.found(keys, context) == [True, True, False, True, True, True]
        assert second.found(keys, second.request("c")) == [True, True, False, True, True, True]

    def test_a_failed_load_is_not_tried_again_for_the_request(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = start()
        keys = make_keys(3)
        scheduler.store(keys, 0, scheduler.request("a"))
        context = scheduler.request("b")

        def broken(*_args: object) -> int:
            raise OSError(5, "I/O error")

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", broken)
            result = scheduler.load(keys, 10, context)
        assert not result.success
        assert not result.successful_keys
        assert scheduler.found(keys, context) == [False] * 3
        assert scheduler.found(keys, scheduler.request("c")) == [True] * 3

    def test_events_name_what_was_stored(self, start: Start) -> None:
        scheduler = start()
        assert list(scheduler.tier.take_events()) == []
        scheduler.store(make_keys(2), 0, scheduler.request("a"))
        assert list(scheduler.tier.take_events()) == []  # not asked for


class TestTenants:
    def test_each_finds_its_own(self, start: Start) -> None:
        scheduler = start(tenants=["acme", "zeta"])
        keys = make_keys(3)
        acme = scheduler.request("1", tenant("acme"))
        assert scheduler.store(keys, 0, acme).success
        assert scheduler.found(keys, scheduler.request("2", tenant("acme"))) == [True] * 3
        for other in (tenant("zeta"), tenant("nobody"), None):
            assert scheduler.found(keys, scheduler.request("3", other)) == [False] * 3

    def test_unlisted_names_are_the_default_tenant(self, start: Start) -> None:
        scheduler = start(tenants=["acme"])
        keys = make_keys(1)
        scheduler.store(keys, 0, scheduler.request("1", tenant("nobody")))
        assert scheduler.found(keys, scheduler.request("2")) == [True]

    def test_no_tenant_no_persistence(self, start: Start) -> None:
        scheduler = start(tenants=["acme"], default_tenant=None)
        keys = make_keys(2)
        assert not scheduler.store(keys, 0, scheduler.request("1")).success
        assert not scheduler.store(keys, 0, scheduler.request("2", tenant("nobody"))).success
        assert scheduler.store(keys, 0, scheduler.request("3", tenant("acme"))).success
        assert scheduler.found(keys, scheduler.request("4")) == [False] * 2

    def test_do_not_write(self, start: Start) -> None:
        scheduler = start(tenants=["acme"])
        kept, asked_not_to = make_keys(1), make_keys(1)
        plain = scheduler.request("1", tenant("acme"))
        private = scheduler.request("2", tenant("acme", persist=False))
        assert scheduler.store(kept, 0, plain).success
        assert not scheduler.store(asked_not_to, 1, private).success
        assert scheduler.found(kept + asked_not_to, private) == [True, False]

    @pytest.mark.parametrize("params", [tenant("acme"), None], ids=["named", "by default"])
    def test_who_was_forgotten_comes_again_as_somebody_new(
        self, start: Start, vault: Path, params: object
    ) -> None:
        scheduler = start(tenants=["acme", "zeta"], default_tenant="acme")
        keys, of_zeta = make_keys(2), make_keys(2)
        old, zeta = scheduler.request("1", params), scheduler.request("2", tenant("zeta"))
        assert scheduler.store(keys, 0, old).success
        assert scheduler.store(of_zeta, 0, zeta).success
        with Vault.open(vault) as operator:
            operator.forget("acme")
        scheduler.tier._vault.refresh()
        # Requests that had begun end without; later ones begin anew, in a moment.
        assert not scheduler.store(keys, 0, old).success
        until = time.monotonic() + 60
        new = scheduler.request("3", params)
        while not scheduler.store(keys, 0, new).success and time.monotonic() < until:
            new = scheduler.request("3", params)
        assert scheduler.found(keys, scheduler.request("4", params)) == [True] * 2
        assert scheduler.found(keys, scheduler.request("5", tenant("zeta"))) == [False] * 2
        assert scheduler.found(of_zeta, zeta) == [True] * 2
        with Vault.open(vault) as operator:
            assert sorted(one.name or "" for one in operator.tenants()) == ["acme", "zeta"]
        counts = scheduler.tier._counts
        assert counts["requests_forgotten"] >= 1
        assert scheduler.found(keys, old) == [False] * 2


def nested(depth: int) -> dict[str, object]:
    params: dict[str, object] = {}
    for _ in range(depth):
        params = {"kvvault": params}
    return params


HOSTILE = {
    "a list": ["kvvault"],
    "a text": "kvvault",
    "a number": float("nan"),
    "text for ours": {"kvvault": "x" * 100_000_000},
    "a huge name": tenant("x" * 100_000_000),
    "an empty name": tenant(""),
    "NaN for a name": tenant(float("nan")),
    "bytes for a name": tenant(b"acme"),
    "a list for a name": tenant(["acme"]),
    "unknown keys": {"kvvault": {"tenant": "acme", "admin": True}},
    "keys that are no texts": {"kvvault": {1: "acme"}},
    "a million keys": {"kvvault": {str(i): i for i in range(1_000_000)}},
    "text for persist": tenant("acme", persist="no"),
    "deep": nested(10_000),
}


class TestHostileParameters:
    @pytest.mark.parametrize("params", HOSTILE.values(), ids=HOSTILE.keys())
    def test_neither_stored_nor_served(self, start: Start, params: object) -> None:
        scheduler = start(tenants=["acme"])
        mine, theirs = make_keys(2), make_keys(2)
        assert scheduler.store(mine, 0, scheduler.request("good", tenant("acme"))).success
        assert scheduler.store(mine, 0, scheduler.request("default")).success
        bad = scheduler.request("bad", params)
        assert scheduler.found(mine, bad) == [False] * 2
        assert not scheduler.store(theirs, 2, bad).success
        assert not scheduler.load(mine, 4, bad).success
        assert scheduler.found(theirs, scheduler.request("later", tenant("acme"))) == [False] * 2
        assert scheduler.found(mine, scheduler.request("after", tenant("acme"))) == [True] * 2


class TestTheSchedulerThread:
    def test_touches_no_file_and_no_catalog(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = start()
        keys = make_keys(4)
        mine = threading.get_ident()
        seen: list[str] = []

        def watched(name: str) -> Callable[..., object]:
            original = getattr(os, name)

            def call(*args: object, **kwargs: object) -> object:
                if threading.get_ident() == mine:
                    seen.append(name)
                return original(*args, **kwargs)

            return call

        for name in ("open", "pread", "preadv", "pwrite", "fsync", "fdatasync", "unlink"):
            monkeypatch.setattr(os, name, watched(name))
        for name in ("put", "get", "refresh"):
            method = getattr(Vault, name)

            def guarded(
                self: Vault,
                *args: object,
                _method: Callable[..., object] = method,
                _name: str = name,
                **kwargs: object,
            ) -> object:
                if threading.get_ident() == mine:
                    seen.append(_name)
                return _method(self, *args, **kwargs)

            monkeypatch.setattr(Vault, name, guarded)
        context = scheduler.request("a")
        scheduler.store(keys, 0, context)
        scheduler.found(keys, context)
        scheduler.load(keys, 8, context)
        scheduler.tier.has_pending_work()
        scheduler.tier.get_stats()
        assert seen == []

    def test_a_full_queue_drops_and_says_so(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = start(store_queue_mib=1)  # 128 rows
        release = threading.Event()
        original = Vault.put

        def slow(self: Vault, *args: object, **kwargs: object) -> object:
            release.wait(60)
            return original(self, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(Vault, "put", slow)
        context = scheduler.request("a")
        jobs = [scheduler.job(make_keys(ROWS), 0, context, load=False) for _ in range(4)]
        for job in jobs:
            scheduler.tier.submit_store(job)
        dropped = [result.job_id for result in scheduler.tier.get_finished_jobs()]
        assert dropped == [jobs[2].job_id, jobs[3].job_id]
        release.set()
        scheduler.tier.drain_jobs()
        assert {r.job_id for r in scheduler.tier.get_finished_jobs() if r.success} == {
            jobs[0].job_id,
            jobs[1].job_id,
        }

    def test_a_hanging_disk_costs_one_time_limit(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = start(load_timeout_s=0.3)
        keys = make_keys(2)
        context = scheduler.request("a")
        assert scheduler.store(keys, 0, context).success
        hang = threading.Event()
        original = os.preadv

        def stuck(*args: object) -> int:
            hang.wait(60)
            return original(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", stuck)
        scheduler.rows()[20:22] = 9
        result = scheduler.load(keys, 20, context)
        assert not result.success
        assert not result.successful_keys
        later = scheduler.request("b")
        assert scheduler.found(keys, later) == [False] * 2  # stalled: not even tried
        assert not scheduler.load(keys, 30, later).success
        hang.set()
        monkeypatch.undo()
        until = time.monotonic() + 60
        while not scheduler.found(keys, scheduler.request("c"))[0] and time.monotonic() < until:
            time.sleep(0.01)
        assert (scheduler.rows()[20:22] == 9).all()  # given up: never touched afterwards
        assert scheduler.load(keys, 40, scheduler.request("d")).success

    def test_shutdown_with_work_under_way(self, start: Start) -> None:
        scheduler = start()
        context = scheduler.request("a")
        for _ in range(5):
            scheduler.tier.submit_store(scheduler.job(make_keys(8), 0, context, load=False))
        scheduler.tier.shutdown()
        scheduler.tier.shutdown()
        assert scheduler.tier.lookup(make_keys(1)[0], context) is LookupResult.MISS
        assert not scheduler.store(make_keys(1), 0, context).success


def test_metrics_are_declared(start: Start) -> None:
    scheduler = start(tenants=["acme"])
    keys = make_keys(2)
    scheduler.store(keys, 0, scheduler.request("a", tenant("acme")))
    scheduler.load(keys, 4, scheduler.request("b", tenant("acme")))
    scheduler.request("c", ["hostile"])
    stats = scheduler.tier.get_stats()
    assert stats is not None
    declared = KvvaultTier.build_metric_definitions({})
    emitted = {name for name in stats.data if name.startswith("kvvault")}
    nested_names = {
        name
        for value in stats.data.values()
        if isinstance(value, dict)
        for name in value
        if isinstance(name, str) and name.startswith("kvvault")
    }
    assert emitted | nested_names
    assert emitted | nested_names <= set(declared)
    assert "acme" not in repr(stats.data)
