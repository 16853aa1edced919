"""Which prompts the tier hands to the inventory, when, and with what; no engine."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

from kvvault.integrations.vllm.tier import KvvaultTier
from kvvault.prompting import Prompt
from kvvault.vault import Vault
from tests.vllm.test_tier import ROWS, Scheduler, Start, make_keys, start, tenant, vault

pytestmark = pytest.mark.vllm

__all__ = ["start", "vault"]  # fixtures

TOKENS = 16
"""Of a block."""


@dataclass
class Handed:
    """What the vault was given for the inventory."""

    prompts: list[tuple[Prompt, dict[bytes, int]]] = field(default_factory=list)

    @property
    def ids(self) -> list[str | None]:
        return [prompt.request_id for prompt, _ in self.prompts]

    def chain(self, request_id: str) -> dict[bytes, int]:
        (chain,) = [chain for prompt, chain in self.prompts if prompt.request_id == request_id]
        return chain


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    seen, original = Handed(), Vault.record

    def record(self: Vault, prompt: Prompt, chain: Mapping[bytes, int]) -> None:
        seen.prompts.append((prompt, dict(chain)))
        original(self, prompt, chain)

    monkeypatch.setattr(Vault, "record", record)
    return seen


def name(context: ReqContext, keys: Sequence[OffloadKey], first: int = 0) -> dict[bytes, int]:
    """As vLLM's scheduler tells a request which blocks it has."""
    ends = {key: (first + i + 1) * TOKENS for i, key in enumerate(keys)}
    for key, end in ends.items():
        context.set_offload_key_position(key, end)
    return {bytes(key): end for key, end in ends.items()}


def schedule(scheduler: Scheduler, *contexts: ReqContext) -> None:
    names = [context.req_id for context in contexts]
    scheduler.tier.on_schedule_end(ScheduleEndContext(names, ()))


def ask(scheduler: Scheduler, name: str, params: object = None) -> ReqContext:
    """A new request, by the engine's name for what the client calls `name`."""
    return scheduler.request(f"cmpl-{name}-0-0123abcd", params)


def catalog(vault: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{vault / 'catalog.sqlite3'}?mode=ro", uri=True)


def test_a_request_that_stores_is_recorded_when_both_are_over(
    start: Start, handed: Handed, vault: Path
) -> None:
    scheduler = start()
    keys = make_keys(4)
    for turn, last in enumerate(("stores", "request")):
        mine = keys[2 * turn : 2 * turn + 2]
        context = ask(scheduler, last)
        ends = name(context, mine)
        schedule(scheduler, context)
        job = scheduler.job(mine, 2 * turn, context, load=False)
        scheduler.tier.submit_store(job)
        if last == "stores":
            scheduler.tier.on_request_finished(context)
            assert len(handed.prompts) == turn
            assert scheduler.wait(job).success
        else:
            assert scheduler.wait(job).success
            assert len(handed.prompts) == turn
            scheduler.tier.on_request_finished(context)
        assert handed.chain(f"cmpl-{last}") == ends
    scheduler.tier.shutdown()
    assert handed.ids == ["cmpl-stores", "cmpl-request"]
    with catalog(vault) as opened:
        (origins,) = zip(*opened.execute("SELECT origins FROM extents"), strict=True)
        rows = opened.execute("SELECT prompt_no, end_token, gone FROM prompts").fetchall()
    placed = b"".join(origins)
    ends_stored = [int.from_bytes(placed[i + 4 : i + 8], "big") for i in range(0, len(placed), 8)]
    assert sorted(ends_stored) == [16, 16, 32, 32]
    assert sorted((end, gone) for _, end, gone in rows) == [(32, 0), (32, 0)]


def test_a_request_that_only_reuses_is_recorded(start: Start, handed: Handed, vault: Path) -> None:
    """Also where the vault was not asked at all, because the device had everything."""
    scheduler = start()
    keys = make_keys(3)
    first = ask(scheduler, "first")
    name(first, keys)
    schedule(scheduler, first)
    assert scheduler.store(keys, 0, first).success
    scheduler.tier.on_request_finished(first)
    second = ask(scheduler, "second")
    ends = name(second, keys)
    schedule(scheduler, second)
    scheduler.tier.on_request_finished(second)
    assert handed.chain("cmpl-second") == ends
    scheduler.tier.shutdown()
    with catalog(vault) as opened:
        links = opened.execute("SELECT prompt_no, via_no, upto FROM prompt_links").fetchall()
    assert [upto for _, _, upto in links] == [48]


def test_loading_is_reusing(start: Start, handed: Handed) -> None:
    scheduler = start()
    keys = make_keys(2)
    first = ask(scheduler, "first")
    name(first, keys)
    assert scheduler.store(keys, 0, first).success
    aborted = ask(scheduler, "aborted")
    ends = name(aborted, keys)
    assert scheduler.load(keys, 8, aborted).success
    scheduler.tier.on_request_finished(aborted)
    assert handed.chain("cmpl-aborted") == ends


def test_a_request_that_never_ran_is_not_recorded(start: Start, handed: Handed) -> None:
    scheduler = start()
    context = ask(scheduler, "aborted")
    name(context, make_keys(2))
    scheduler.tier.on_request_finished(context)
    scheduler.tier.shutdown()
    assert handed.prompts == []


@pytest.mark.parametrize(
    "params",
    [tenant("acme", persist=False), tenant("nobody"), None, tenant("acme", labels=[])],
    ids=["persist", "nobody", "none", "malformed"],
)
def test_what_keeps_nothing_is_not_recorded(start: Start, handed: Handed, params: object) -> None:
    scheduler = start(tenants=["acme"], default_tenant=None)
    good = ask(scheduler, "good", tenant("acme"))
    bad = ask(scheduler, "bad", params)
    keys = make_keys(2)
    for context in (good, bad):
        name(context, keys)
        schedule(scheduler, context)
        scheduler.store(keys, 0, context)
        scheduler.tier.on_request_finished(context)
    scheduler.tier.shutdown()
    assert handed.ids == ["cmpl-good"]


def test_what_was_generated_is_not_the_prompts(start: Start, handed: Handed) -> None:
    scheduler = start()
    context = ask(scheduler, "x")
    prompt, generated = make_keys(3), make_keys(2)
    ends = name(context, prompt)
    schedule(scheduler, context)
    name(context, generated, first=3)
    schedule(scheduler)
    scheduler.tier.on_request_finished(context)
    assert handed.chain("cmpl-x") == ends


def test_what_a_request_says_of_itself(start: Start, handed: Handed) -> None:
    scheduler = start(tenants=["acme"])
    said = {"subject": "s", "labels": {"a": "b"}, "preview": "p"}
    for own in ({}, {"request_id": "ticket 7"}):
        context = ask(scheduler, "X", tenant("acme", **said, **own))
        schedule(scheduler, context)
        scheduler.tier.on_request_finished(context)
    assert handed.ids == ["cmpl-X", "ticket 7"]
    for prompt, _ in handed.prompts:
        assert (prompt.subject, prompt.labels, prompt.preview) == ("s", {"a": "b"}, "p")


def test_a_dropped_store_does_not_keep_a_request_waiting(
    start: Start, handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start(store_queue_mib=1)  # 128 rows
    release = threading.Event()
    original = Vault.put

    def slow(self: Vault, *args: object, **kwargs: object) -> object:
        release.wait(60)
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Vault, "put", slow)
    contexts = [ask(scheduler, str(i)) for i in range(4)]
    for context in contexts:
        keys = make_keys(ROWS)
        name(context, keys)
        scheduler.tier.submit_store(scheduler.job(keys, 0, context, load=False))
        scheduler.tier.on_request_finished(context)
    assert handed.ids == ["cmpl-2", "cmpl-3"]
    release.set()
    scheduler.tier.drain_jobs()
    list(scheduler.tier.get_finished_jobs())
    assert sorted(map(str, handed.ids)) == ["cmpl-0", "cmpl-1", "cmpl-2", "cmpl-3"]


def test_shutdown_records_what_waits(start: Start, handed: Handed, vault: Path) -> None:
    scheduler = start()
    running, storing = ask(scheduler, "running"), ask(scheduler, "storing")
    keys = make_keys(2)
    name(running, make_keys(1))
    schedule(scheduler, running)
    name(storing, keys)
    scheduler.tier.submit_store(scheduler.job(keys, 0, storing, load=False))
    scheduler.tier.on_request_finished(storing)
    scheduler.tier.drain_jobs()  # stored, and nobody has asked whether
    assert handed.ids == []
    scheduler.tier.shutdown()
    assert sorted(map(str, handed.ids)) == ["cmpl-running", "cmpl-storing"]
    with catalog(vault) as opened:
        (count,) = opened.execute("SELECT count(*) FROM prompts WHERE end_token = 32").fetchone()
    assert count == 1


class Later(ReqContext):  # type: ignore[misc]  # mypy does not follow vLLM
    """A context of a vLLM that keeps positions elsewhere."""

    def __init__(self, req_id: str) -> None:
        super().__init__(req_id)
        self._elsewhere = self.__dict__.pop("_offload_key_positions")

    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None:
        self._elsewhere[key] = end_token

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        end: int | None = self._elsewhere.get(key)
        return end


def test_without_the_schedulers_own_dictionary(start: Start, handed: Handed) -> None:
    scheduler = start()
    keys = make_keys(4)
    context = Later("cmpl-x-0-0123abcd")
    scheduler.tier.on_new_request(context)
    ends = name(context, keys)
    scheduler.found(keys[:2], context)
    schedule(scheduler, context)
    assert scheduler.store(keys[2:], 0, context).success
    scheduler.tier.on_request_finished(context)
    assert handed.chain("cmpl-x") == ends


def test_the_scheduler_thread_pays_the_same_for_long_prompts(start: Start) -> None:
    """Nothing of a chain is walked at a request's end: what it costs does not depend on it."""
    scheduler = start()

    def cost(blocks: int) -> float:
        best = float("inf")
        for i in range(20):
            context = ask(scheduler, f"{blocks}-{i}")
            name(context, make_keys(blocks))
            schedule(scheduler, context)
            name(context, make_keys(1), first=blocks)
            begun = time.perf_counter()
            scheduler.tier.on_request_finished(context)
            best = min(best, time.perf_counter() - begun)
        return best

    short, long = cost(1), cost(8192)
    assert long < 20 * short
    assert isinstance(scheduler.tier, KvvaultTier)
    assert not scheduler.tier._unrecorded
