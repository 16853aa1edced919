"""Namespaces from facts: every fact separates, what no namespace can cover is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from kvvault.errors import NamespaceError
from kvvault.integrations.vllm.facts import EngineFacts, GroupFacts, ModelFacts
from kvvault.integrations.vllm.namespace import (
    NamespacePolicy,
    block_bytes,
    canonical_block_bytes,
    namespace_of,
)
from kvvault.model import Namespace

FULL = GroupFacts(
    group_id=0,
    tokens_per_block=32,
    layers=("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"),
    kind="FullAttentionSpec",
    fields=(("block_size", "32"), ("head_size", "64"), ("num_kv_heads", "4")),
)
SLIDING = dataclasses.replace(
    FULL, group_id=1, layers=("model.layers.2.self_attn.attn",), kind="SlidingWindowSpec"
)


@pytest.fixture
def model(tmp_path: Path) -> ModelFacts:
    directory = tmp_path / "a-model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    return ModelFacts(
        location=str(directory),
        commit=None,
        weights_elsewhere=False,
        load_format="auto",
        settings='{"dtype":"torch.float32"}',
        max_model_len=8192,
        rope_types=frozenset({"default"}),
    )


@pytest.fixture
def facts(model: ModelFacts) -> EngineFacts:
    return EngineFacts(
        version="0.32.0",
        model=model,
        draft=None,
        speculative=None,
        kv_dtype="float32",
        cache_dtype="auto",
        kv_layout="LBHNC",
        attention='{"backend":"auto","isa":["vec"]}',
        device="cpu x86_64 avx2",
        groups=(FULL, SLIDING),
        tokens_per_hash=32,
        blocks_per_chunk=1,
        row_bytes=393216,
        worker_block_bytes=393216,
        total_kv_heads=4,
        tensor_parallel=1,
        pipeline_parallel=1,
        prefill_context_parallel=1,
        decode_context_parallel=1,
        context_interleave=1,
        canonical_format=None,
        parallelism_agnostic=True,
        hash_algorithm="sha256",
        hash_seed="vllm-none-hash",
        lora=False,
        multimodal=None,
        in_place_weight_updates=False,
        options=(("model_runner", '"v1"'),),
    )


def named(facts: EngineFacts, *, immutable_lora: bool = False) -> Namespace:
    return namespace_of(facts, NamespacePolicy(immutable_lora=immutable_lora))


def test_the_same_engine_has_the_same_namespace(facts: EngineFacts) -> None:
    first = named(facts)
    assert named(dataclasses.replace(facts)) == first
    assert first.block_bytes == 393216
    assert first.fact("engine") == "vllm"
    assert first.fact("model") == "a-model"


def test_no_path_of_this_machine_and_no_seed_is_in_it(facts: EngineFacts) -> None:
    text = repr(named(dataclasses.replace(facts, hash_seed="a-private-seed")))
    assert str(Path(facts.model.location).parent) not in text
    assert "a-private-seed" not in text


Change = Callable[[EngineFacts], EngineFacts]


def of_engine(**changes: object) -> Change:
    return lambda facts: dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def of_model(**changes: object) -> Change:
    return lambda facts: dataclasses.replace(
        facts,
        model=dataclasses.replace(facts.model, **changes),  # type: ignore[arg-type]
    )


def of_group(**changes: object) -> Change:
    return lambda facts: dataclasses.replace(
        facts,
        groups=(dataclasses.replace(FULL, **changes), SLIDING),  # type: ignore[arg-type]
    )


def retrained(facts: EngineFacts) -> EngineFacts:
    (Path(facts.model.location) / "model.safetensors").write_bytes(b"w3ights")
    return facts


def with_draft(facts: EngineFacts) -> EngineFacts:
    return dataclasses.replace(facts, speculative="eagle", draft=facts.model)


CHANGES: dict[str, Change] = {
    "vllm version": of_engine(version="0.32.1"),
    "kv dtype": of_engine(kv_dtype="fp8_e4m3"),
    "kv layout": of_engine(kv_layout="LBNHC"),
    "attention backend": of_engine(attention='{"backend":"auto","isa":["amx"]}'),
    "device": of_engine(device="cpu aarch64"),
    "tokens per hash": of_engine(tokens_per_hash=16),
    "blocks per chunk": of_engine(blocks_per_chunk=2),
    "block size": of_engine(row_bytes=397312),
    "tensor parallel": of_engine(tensor_parallel=2),
    "pipeline parallel": of_engine(pipeline_parallel=2),
    "prefill context parallel": of_engine(prefill_context_parallel=2),
    "decode context parallel": of_engine(decode_context_parallel=2),
    "context interleave": of_engine(context_interleave=4),
    "canonical layout": of_engine(canonical_format="v1-hnd"),
    "hash algorithm": of_engine(hash_algorithm="sha256_cbor"),
    "hash seed": of_engine(hash_seed="another"),
    "multimodal": of_engine(multimodal="{}"),
    "options": of_engine(options=(("model_runner", '"v2"'),)),
    "speculative": of_engine(speculative="ngram"),
    "draft model": with_draft,
    "weights": retrained,
    "load format": of_model(load_format="pt"),
    "model settings": of_model(settings='{"dtype":"torch.bfloat16"}'),
    "groups": of_engine(groups=(FULL,)),
    "order of groups": of_engine(groups=(SLIDING, FULL)),
    "layers": of_group(layers=("model.layers.0.self_attn.attn",)),
    "tokens per block": of_group(tokens_per_block=64),
    "kind of cache": of_group(kind="MLAAttentionSpec"),
    "head size": of_group(fields=(("block_size", "32"), ("head_size", "32"))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_fact_separates(facts: EngineFacts, name: str) -> None:
    before = named(facts)
    after = named(CHANGES[name](facts))
    assert after.digest != before.digest


def test_what_is_only_padding_of_the_configuration_does_not_separate(facts: EngineFacts) -> None:
    """The length an engine is started for matters with some rotary embeddings only, and `auto` is
    another word for the effective dtype."""
    before = named(facts)
    assert named(of_model(max_model_len=4096)(facts)) == before
    assert named(of_engine(cache_dtype="float32")(facts)) == before


def test_the_length_separates_where_rotary_factors_depend_on_it(facts: EngineFacts) -> None:
    long = of_model(rope_types=frozenset({"longrope"}))(facts)
    assert named(of_model(max_model_len=4096)(long)) != named(long)


# ------------------------------------------------------------------ parallelism


def at_degree(facts: EngineFacts, tp: int, *, heads: int, page: int = 393216) -> EngineFacts:
    """The same model at another tensor-parallel degree, as vLLM's configuration states it."""
    copies = max(1, tp // heads)
    own = heads * copies // tp
    worker = page * own // heads
    group = dataclasses.replace(
        FULL, fields=(("block_size", "32"), ("head_size", "64"), ("num_kv_heads", str(own)))
    )
    row = -(-worker * tp // 4096) * 4096
    return dataclasses.replace(
        facts,
        tensor_parallel=tp,
        total_kv_heads=heads,
        worker_block_bytes=worker,
        row_bytes=row,
        groups=(group,),
    )


@pytest.mark.parametrize("heads", [8, 4, 2, 1])
@pytest.mark.parametrize("page", [393216, 8 * 4100], ids=["pages", "odd"])
def test_degrees_share_the_portable_canonical_namespace(
    facts: EngineFacts, heads: int, page: int
) -> None:
    """Also where rows are longer because more workers than heads hold copies."""
    canonical = dataclasses.replace(facts, canonical_format="v1-hnd")
    named_at = {tp: named(at_degree(canonical, tp, heads=heads, page=page)) for tp in (1, 2, 4, 8)}
    assert len({n.digest for n in named_at.values()}) == 1
    assert named_at[1].block_bytes == -(-page // 4096) * 4096
    rows = {at_degree(canonical, tp, heads=heads, page=page).row_bytes for tp in (1, 2, 4, 8)}
    assert max(rows) >= named_at[1].block_bytes


def test_degrees_are_separate_in_the_direct_layout(facts: EngineFacts) -> None:
    """vLLM calls these bytes independent of the parallelism; they are not."""
    direct = dataclasses.replace(facts, parallelism_agnostic=True, canonical_format=None)
    found = {named(at_degree(direct, tp, heads=8)).digest for tp in (1, 2, 4)}
    assert len(found) == 3


def test_degrees_are_separate_where_a_layer_is_not_portable(facts: EngineFacts) -> None:
    opaque = dataclasses.replace(facts, parallelism_agnostic=False, canonical_format="v1-hnd")
    found = {named(at_degree(opaque, tp, heads=8)).digest for tp in (1, 2, 4)}
    assert len(found) == 3
    assert block_bytes(opaque) == opaque.row_bytes


def test_the_canonical_part_never_exceeds_the_row() -> None:
    def part(row: int) -> int:
        return canonical_block_bytes(
            worker_block_bytes=5000, shards=2, blocks_per_chunk=3, row_bytes=row
        )

    assert part(65536) == 32768
    assert part(28672) == 28672


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "md5", ""])
def test_prefix_hashes_that_can_be_made_to_collide_are_refused(
    facts: EngineFacts, algorithm: str
) -> None:
    assert named(dataclasses.replace(facts, hash_algorithm="sha256_cbor")).digest
    with pytest.raises(NamespaceError, match="collision resistant") as caught:
        named(dataclasses.replace(facts, hash_algorithm=algorithm))
    assert "sha256" in caught.value.hint


@pytest.mark.parametrize("dtype", ["auto", ""])
def test_an_unknown_dtype_is_refused(facts: EngineFacts, dtype: str) -> None:
    with pytest.raises(NamespaceError, match="dtype"):
        named(dataclasses.replace(facts, kv_dtype=dtype))


def test_lora_is_refused_unless_adapters_never_change(facts: EngineFacts) -> None:
    lora = dataclasses.replace(facts, lora=True)
    with pytest.raises(NamespaceError, match="LoRA"):
        named(lora)
    assert named(lora, immutable_lora=True) != named(facts, immutable_lora=True)


def test_weights_that_can_change_while_the_engine_runs_are_refused(facts: EngineFacts) -> None:
    with pytest.raises(NamespaceError, match="replaced"):
        named(dataclasses.replace(facts, in_place_weight_updates=True))


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "something-new"])
def test_weights_from_nowhere_known_are_refused(facts: EngineFacts, load_format: str) -> None:
    assert named(of_model(load_format="safetensors")(facts)).digest
    with pytest.raises(NamespaceError, match="load format"):
        named(of_model(load_format=load_format)(facts))


def test_weights_from_an_object_store_are_refused(facts: EngineFacts) -> None:
    with pytest.raises(NamespaceError, match="do not come from"):
        named(of_model(weights_elsewhere=True)(facts))


def test_a_draft_model_without_identity_is_refused(facts: EngineFacts) -> None:
    draft = dataclasses.replace(facts.model, location="org/draft", commit=None)
    with pytest.raises(NamespaceError, match="which weights"):
        named(dataclasses.replace(facts, speculative="eagle", draft=draft))


def test_an_unknown_layout_is_refused(facts: EngineFacts) -> None:
    with pytest.raises(NamespaceError, match="layout"):
        named(dataclasses.replace(facts, kv_layout=None))


@pytest.mark.parametrize("row", [0, -4096, 4097])
def test_a_row_that_is_no_number_of_pages_is_refused(facts: EngineFacts, row: int) -> None:
    with pytest.raises(NamespaceError, match="how large"):
        named(dataclasses.replace(facts, row_bytes=row))
