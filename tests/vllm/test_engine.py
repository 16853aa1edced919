"""Real engines: KV written by one and read by another, and what must keep them apart.

`fs` is vLLM's own plaintext tier: the control that shows that a test would notice.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from functools import cached_property
from pathlib import Path

import pytest

from kvvault.demo.models import DEMO_LLAMA, HYBRID_GEMMA3, build_model
from kvvault.vault import Vault
from tests.vllm.conftest import TEXT
from tests.vllm.engine import (
    CHUNK_TOKENS,
    Engines,
    Job,
    Prompt,
    Report,
    full_blocks,
    transfer_config,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

CLOSE = 1e-3
"""Logprobs computed at different tensor-parallel degrees agree to some 5e-5 here; with wrong KV
they are units apart."""

SMALL = dataclasses.replace(DEMO_LLAMA, layers=3, hidden=256, intermediate=512, max_positions=4096)


def prompts(seed: int, *lengths: int) -> tuple[Prompt, ...]:
    """Random prompts. Lengths are a multiple of the prefill chunk and a rest of at most a block, so
    that a cache hit leaves the same computation over as there was; see `tests.vllm.engine`."""
    rng = random.Random(seed)
    for length in lengths:
        assert 0 < length % CHUNK_TOKENS <= 32
    return tuple(
        Prompt((1, *(rng.randrange(4, 400) for _ in range(length - 1)))) for length in lengths
    )


FIRST = prompts(1, CHUNK_TOKENS + 10, 3 * CHUNK_TOKENS + 25)
SECOND = prompts(2, 2 * CHUNK_TOKENS + 1)


class Setup:
    """Builds models and jobs, and knows where vaults are."""

    def __init__(self, engines: Engines, models: Path, home: Path) -> None:
        self.engines, self.models, self.home = engines, models, home

    def model(self, recipe: object = SMALL) -> str:
        return str(build_model(recipe, TEXT.read_text(), self.models))  # type: ignore[arg-type]

    def vault(self, name: str) -> dict[str, object]:
        """A kvvault tier on a vault of that name, which is created at first."""
        path = self.home / name
        provider = f"file:{self.home / 'keys' / name}"
        if not path.exists():
            Vault.create(path, provider=provider).close()
        return {"type": "kvvault", "vault": str(path), "key_provider": provider}

    def fs(self, name: str) -> dict[str, object]:
        return {
            "type": "fs",
            "root_dir": str(self.home / name),
            "n_read_threads": 2,
            "n_write_threads": 2,
        }

    def open(self, name: str) -> Vault:
        tier = self.vault(name)
        return Vault.open(Path(str(tier["vault"])), provider=str(tier["key_provider"]))

    def run(
        self,
        asked: tuple[Prompt, ...],
        tiers: list[dict[str, object]] | None = None,
        *,
        model: str | None = None,
        tp: int = 1,
        **extra: object,
    ) -> Report:
        return self.engines.run(
            Job(
                model=model or self.model(),
                prompts=asked,
                kv_transfer_config=None if tiers is None else transfer_config(tiers, **extra),
                tensor_parallel=tp,
            )
        )


@pytest.fixture(scope="module")
def setup(engines: Engines, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(engines, models, tmp_path_factory.mktemp("vaults"))


def hits(asked: tuple[Prompt, ...]) -> tuple[int, ...]:
    """Cached tokens when every full block is found."""
    return tuple(full_blocks(prompt) for prompt in asked)


def same_words(report: Report, other: Report, first: int = 0) -> None:
    """The same tokens, and logprobs that differ in the last bits at most."""
    for mine, theirs in zip(report.answers[first:], other.answers[first:], strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.distance(theirs) < CLOSE


# ------------------------------------------------------------------ one and two workers


class Llama:
    """Engines at tensor-parallel degree 1 and 2; each runs once, when a test first asks."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @cached_property
    def plain1(self) -> Report:
        return self.setup.run((*FIRST, *SECOND))

    @cached_property
    def plain2(self) -> Report:
        return self.setup.run((*FIRST, *SECOND), tp=2)

    def canonical(self, asked: tuple[Prompt, ...], tp: int) -> Report:
        tier = self.setup.vault("canonical")
        return self.setup.run(asked, [tier], tp=tp, canonical_layout=True)

    @cached_property
    def written1(self) -> Report:
        return self.canonical(FIRST, 1)

    @cached_property
    def read2(self) -> Report:
        assert self.written1.answers
        return self.canonical((*FIRST, *SECOND), 2)

    @cached_property
    def read1(self) -> Report:
        assert self.read2.answers
        return self.canonical((*FIRST, *SECOND), 1)

    def direct(self, asked: tuple[Prompt, ...], tp: int, *, fs: bool = False) -> Report:
        tiers = [self.setup.vault("direct")] + ([self.setup.fs("direct-fs")] if fs else [])
        return self.setup.run(asked, tiers, tp=tp)

    @cached_property
    def direct_written1(self) -> Report:
        return self.direct(FIRST, 1, fs=True)

    @cached_property
    def direct_read2(self) -> Report:
        assert self.direct_written1.answers
        return self.direct((*FIRST, *SECOND), 2)

    @cached_property
    def direct_read1(self) -> Report:
        assert self.direct_read2.answers
        return self.direct((*FIRST, *SECOND), 1)

    @cached_property
    def fs_read2(self) -> Report:
        assert self.direct_written1.answers
        return self.setup.run((*FIRST, *SECOND), [self.setup.fs("direct-fs")], tp=2)


@pytest.fixture(scope="module")
def llama(setup: Setup) -> Llama:
    return Llama(setup)


def test_the_model_says_different_things(llama: Llama) -> None:
    """Otherwise wrong KV could give right answers."""
    for answer in llama.plain1.answers:
        assert len(set(answer.tokens)) > 5
        assert answer.cached == 0
    assert llama.plain1.version.startswith("0.32.")


def test_writing_changes_no_bit_of_the_output(llama: Llama) -> None:
    assert llama.written1.cached == (0, 0)
    assert llama.written1.output == llama.plain1.output[:2]


def test_after_a_restart_every_full_block_comes_back_and_no_bit_differs(llama: Llama) -> None:
    assert llama.read1.cached[:2] == hits(FIRST)
    assert llama.read1.output[:2] == llama.plain1.output[:2]


def test_two_workers_read_what_one_wrote(llama: Llama) -> None:
    assert llama.read2.cached == (*hits(FIRST), 0)
    same_words(llama.read2, llama.plain2)


def test_one_worker_reads_what_two_wrote(llama: Llama) -> None:
    assert llama.read1.cached[2:] == hits(SECOND)
    same_words(llama.read1, llama.plain1)


def test_both_degrees_share_one_namespace(llama: Llama) -> None:
    assert llama.read1.answers
    with llama.setup.open("canonical") as vault:
        (namespace,) = vault.namespaces()
    assert namespace.namespace.fact("topology") == "canonical"
    assert namespace.namespace.fact("kv.dtype") == "float32"


def test_in_the_direct_layout_two_workers_miss_what_one_wrote(llama: Llama) -> None:
    assert llama.direct_read2.cached == (0, 0, 0)
    assert llama.direct_read2.output == llama.plain2.output


def test_in_the_direct_layout_one_worker_finds_its_own_and_misses_the_others(llama: Llama) -> None:
    assert llama.direct_read1.cached == (*hits(FIRST), 0)
    assert llama.direct_read1.output == llama.plain1.output


def test_vllms_own_tier_takes_the_direct_bytes_of_the_other_degree(llama: Llama) -> None:
    """The control: there is something to keep apart, and comparing output shows it."""
    assert llama.fs_read2.cached[:2] == hits(FIRST)
    for wrong, right in zip(llama.fs_read2.answers[:2], llama.plain2.answers, strict=False):
        assert wrong.tokens != right.tokens


# ------------------------------------------------------------------------ hybrid model


@pytest.mark.parametrize(
    ("blocks_per_chunk", "canonical"), [(1, False), (4, True)], ids=["direct", "canonical-4"]
)
def test_a_hybrid_model_survives_a_restart(
    setup: Setup, blocks_per_chunk: int, canonical: bool, plain_hybrid: Report
) -> None:
    """Full-attention and sliding-window groups; of the latter only the last window is kept."""
    model = setup.model(HYBRID_GEMMA3)
    tier = setup.vault(f"hybrid-{blocks_per_chunk}")

    def run() -> Report:
        return setup.run(
            FIRST,
            [tier],
            model=model,
            blocks_per_chunk=blocks_per_chunk,
            canonical_layout=canonical,
        )

    written, read = run(), run()
    assert written.cached == (0, 0)
    assert written.output == plain_hybrid.output
    assert read.cached == hits(FIRST)
    assert read.output == plain_hybrid.output


@pytest.fixture(scope="module")
def plain_hybrid(setup: Setup) -> Report:
    report = setup.run(FIRST, model=setup.model(HYBRID_GEMMA3))
    for answer in report.answers:
        assert len(set(answer.tokens)) > 3
    return report


# ----------------------------------------------------------------------- other weights


def test_weights_replaced_in_place_find_nothing(setup: Setup) -> None:
    """Same path, same configuration, same sizes, another checkpoint. vLLM's own tier serves the
    old weights' KV there."""
    place = setup.home / "replaced" / "model"
    vault, control = [setup.vault("replaced-vault")], [setup.fs("replaced-fs")]
    shutil.copytree(setup.model(), place)
    written = setup.run(FIRST[:1], vault + control, model=str(place))
    assert written.cached == (0,)
    other = dataclasses.replace(SMALL, seed=SMALL.seed + 1)
    weights = Path(setup.model(other)) / "model.safetensors"
    assert weights.stat().st_size == (place / "model.safetensors").stat().st_size
    shutil.copy(weights, place / "model.safetensors")

    assert setup.run(FIRST[:1], vault, model=str(place)).cached == (0,)
    assert setup.run(FIRST[:1], control, model=str(place)).cached == hits(FIRST[:1])
