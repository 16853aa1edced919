"""The demo's verdict: what is measured decides, and one broken promise is enough."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvvault.demo.client import Answer
from kvvault.demo.prompts import Conversation
from kvvault.demo.report import Exchange, PlaintextSearch, Report, Stranger
from kvvault.demo.search import FileHit, SearchReport

CLEAN = SearchReport(files=5, bytes_searched=1000, hits=0, windows_found=0, examples=())
DIRTY = SearchReport(5, 1000, 2, 1, (FileHit("segments/x", 7),))


def _answer(cached: int, seconds: float, logprobs: tuple[float, ...] = (-1.0, -0.25)) -> Answer:
    return Answer("hm", (7, 8), logprobs, 100, cached, seconds)


def _exchange(seconds: float = 2.0) -> Exchange:
    return Exchange(
        Conversation("alice", "SALT", "matter", "PROMPT"),
        computed=_answer(0, seconds, (-1.0, -0.2501)),
        memory=_answer(96, 0.1),
        disk=_answer(96, seconds / 10),
    )


GOOD = Report(
    vllm_version="0.32.0",
    model="toy",
    engine_block_tokens=32,
    exchanges=(_exchange(2.0), _exchange(4.0), _exchange(3.0)),
    strangers=(
        Stranger("hers", _answer(0, 1.0), 0),
        Stranger("his own part", _answer(32, 1.0), 32),
    ),
    blocks=9,
    block_bytes=4096,
    bytes_on_disk=1000,
    search=PlaintextSearch(
        windows_total=500,
        windows_constant=100,
        windows_searched=390,
        reports=(CLEAN, CLEAN),
        control_planted=5,
        control_found=5,
    ),
    server_start_s=(20.0, 19.0),
    stopped_cleanly=True,
    elapsed_s=60.0,
)


def test_figures_are_what_they_say() -> None:
    document = json.loads(json.dumps(GOOD.document(), allow_nan=False))
    assert document["ok"] is True
    assert document["problems"] == []
    assert document["requests"] == 3
    assert document["prompt_tokens"] == 300
    assert document["restart_full_block_tokens"] == 3 * 96
    assert document["restart_cached_tokens"] == 3 * 96
    assert document["restart_cached_ratio"] == 1.0
    assert document["output_identical"] is True
    assert document["logprob_max_difference"] == pytest.approx(0.0001)
    assert document["cross_tenant_hits"] == 0
    assert document["ttft_recompute_s"] == 3.0
    assert document["ttft_disk_s"] == pytest.approx(0.3)
    assert document["plaintext_hits"] == 0
    assert document["windows_searched"] == 390
    assert document["bytes_on_disk"] == 1000
    assert document["elapsed_s"] == 60.0


def test_nothing_of_prompts_and_answers_is_told() -> None:
    told = json.dumps(GOOD.document()) + "\n".join(GOOD.summary())
    for secret in ("PROMPT", "SALT", "hm"):
        assert secret not in told


def _with_exchange(exchange: Exchange) -> Report:
    return replace(GOOD, exchanges=(*GOOD.exchanges[1:], exchange))


BROKEN = {
    "stored": replace(GOOD, blocks=0),
    "from disk": replace(
        GOOD, exchanges=tuple(replace(x, disk=_answer(64, 1.0)) for x in GOOD.exchanges)
    ),
    "differed": _with_exchange(replace(_exchange(), disk=_answer(96, 0.1, (-1.0, -0.2500001)))),
    "another's": replace(GOOD, strangers=(Stranger("x", _answer(64, 1.0), 32),)),
    "plaintext was found": replace(GOOD, search=replace(GOOD.search, reports=(CLEAN, DIRTY))),
    "memory was empty": replace(
        GOOD, search=replace(GOOD.search, windows_searched=0, control_planted=0, control_found=0)
    ),
    "overlooked": replace(GOOD, search=replace(GOOD.search, control_found=4)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_broken_promise_alone_is_told(what: str) -> None:
    broken = BROKEN[what]
    document = broken.document()
    assert document["ok"] is False
    (problem,) = broken.problems()
    assert what in problem
    assert document["problems"] == [problem]
    assert any(problem in line for line in broken.summary())
    assert any("NOT as promised" in line for line in broken.summary())


def test_other_words_are_no_identical_answer() -> None:
    assert _exchange().identical
    other = replace(_answer(96, 0.1), text="hmm")
    assert not replace(_exchange(), disk=other).identical
    other = replace(_answer(96, 0.1), token_ids=(7, 9))
    assert not replace(_exchange(), disk=other).identical


def test_a_kept_promise_is_told_as_such() -> None:
    assert any("every promise was kept" in line for line in GOOD.summary())


def test_every_figure_is_documented() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "demo.md").read_text(encoding="utf-8")
    # Who made it, of what, and for whom explain themselves.
    plain = {"kvvault_version", "vllm_version", "model", "tenants"}
    named = set(re.findall(r"`(\w+)`", manual))
    assert GOOD.document().keys() - plain <= named
