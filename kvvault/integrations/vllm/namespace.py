"""The namespace of a vLLM engine: everything that must agree for its KV bytes to be valid.

A block found under a namespace is handed to attention without another look, so a fact left out
here is a way to serve wrong bytes silently. The rule is: what can change the bytes is a fact; what
cannot be established is an error (`NamespaceError`), never a default; and where it is unclear
whether something matters, it is a fact, which costs a miss at worst.

What need not be here, because vLLM's block hash covers it request by request: the tokens, the cache
salt, multi-modal inputs (by a hash of the input), prompt embeddings, and a LoRA adapter's name and
path. The adapter's *content* is not covered: an adapter retrained in place would find the KV of its
predecessor. So engines with LoRA are refused unless the operator vouches for immutable adapters.

Parallelism. In the direct layout a row is the workers' pages one after another, so its bytes depend
on the topology, which is a fact. In the canonical layout, when vLLM certifies every layer as
independent of the parallelism, the topology is not a fact and the block is the canonical part of
the row; rows differ in size between topologies when more workers than KV heads hold copies.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

from kvvault.errors import NamespaceError
from kvvault.integrations.vllm import shims
from kvvault.integrations.vllm.facts import EngineFacts, GroupFacts, ModelFacts
from kvvault.integrations.vllm.weights import DigestCache, weights_identity
from kvvault.model import PAGE_BYTES, Namespace

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvvault.integrations.vllm.shims import EngineConfig

__all__ = [
    "NamespacePolicy",
    "block_bytes",
    "build_namespace",
    "canonical_block_bytes",
    "namespace_of",
]

CRYPTOGRAPHIC_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Prefix hashes that nobody can make collide; with others, a prompt could be made to find the KV of
another prompt. An allow-list: an algorithm that a later vLLM adds is refused until looked at."""

_LOADED_FROM_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read the files at the model's location."""

_ROPE_OF_ANY_LENGTH = frozenset({"default", "linear", "llama3", "yarn", "mrope", "proportional"})
"""Rotary embeddings that do not depend on the length the engine is started for. Others (longrope
chooses its factors by `max_model_len`) make that length a fact."""

_DEPENDS_ON_SHARDING = frozenset(
    {"num_kv_heads", "page_size_padded", "max_tp_shards", "num_head_slots", "state_content_bytes"}
)
"""Fields of a KV cache spec that describe one worker's part."""


@dataclass(frozen=True, slots=True)
class NamespacePolicy:
    """What the operator decides."""

    immutable_lora: bool = False
    """LoRA adapters are never changed under a name and path once used."""
    digest_cache: Path | None = None
    """Where digests of weight files are remembered."""


def build_namespace(
    offload: OffloadingConfig,
    engine: EngineConfig,
    row_bytes: int,
    *,
    immutable_lora: bool = False,
) -> Namespace:
    """Name what the KV bytes of this engine depend on.

    Reads the model's files (see `weights`), so it belongs into a constructor, not on a scheduler
    thread that serves requests.

    Args:
        offload: `OffloadingSpec.config`.
        engine: from `shims.current_vllm_config`.
        row_bytes: bytes of one row of the primary tier.
        immutable_lora: see `NamespacePolicy`.

    Digests of weight files are remembered in the user's cache directory.

    Raises:
        NamespaceError: a fact is unknown, or something is configured that no namespace can cover.
    """
    policy = NamespacePolicy(immutable_lora, user_cache_path("kvvault") / "weights.json")
    return namespace_of(shims.engine_facts(offload, engine, row_bytes), policy)


def namespace_of(facts: EngineFacts, policy: NamespacePolicy) -> Namespace:
    """`build_namespace` from facts alone; imports nothing of vLLM.

    Raises:
        NamespaceError: a fact is unknown, or something is configured that no namespace can cover.
    """
    _refuse(facts, policy)
    cache = DigestCache(policy.digest_cache)
    portable = facts.canonical_format is not None and facts.parallelism_agnostic
    named: dict[str, str] = {
        "engine": "vllm",
        "engine.version": facts.version,
        "engine.options": _json(dict(facts.options)),
        "device": facts.device,
        "attention": facts.attention,
        "kv.dtype": facts.kv_dtype,
        "kv.layout": facts.kv_layout or "",
        "kv.groups": _json([_group(group, facts, portable=portable) for group in facts.groups]),
        "kv.tokens_per_hash": str(facts.tokens_per_hash),
        "kv.blocks_per_chunk": str(facts.blocks_per_chunk),
        "hash.algorithm": facts.hash_algorithm,
        "hash.seed": hashlib.sha256(facts.hash_seed.encode()).hexdigest(),
        "topology": "canonical" if portable else _topology(facts),
        "layout": f"canonical {facts.canonical_format}" if facts.canonical_format else "direct",
        "lora": "by name and path" if facts.lora else "none",
        "multimodal": _digest(facts.multimodal) if facts.multimodal is not None else "none",
        **_model("model", facts.model, cache),
    }
    if facts.speculative is not None:
        named["speculative"] = facts.speculative
    if facts.draft is not None:
        named.update(_model("draft", facts.draft, cache))
    return Namespace.of(block_bytes(facts), named)


def block_bytes(facts: EngineFacts) -> int:
    """Bytes of a row that belong to the block, from the row's start on.

    The whole row, but in the portable canonical layout the canonical pages only; what lies behind
    them is unused, and how much that is depends on the number of workers. Always a multiple of the
    page size, and never more than the row.

    Raises:
        NamespaceError: the engine states no size.
    """
    if facts.row_bytes <= 0 or facts.row_bytes % PAGE_BYTES:
        raise NamespaceError(
            "the engine does not say how large an offloaded chunk is",
            hint="use TieringOffloadingSpec or KvvaultOffloadingSpec",
        )
    if facts.canonical_format is None or not facts.parallelism_agnostic:
        return facts.row_bytes
    return canonical_block_bytes(
        worker_block_bytes=facts.worker_block_bytes,
        shards=min(facts.tensor_parallel, facts.total_kv_heads),
        blocks_per_chunk=facts.blocks_per_chunk,
        row_bytes=facts.row_bytes,
    )


def canonical_block_bytes(
    *, worker_block_bytes: int, shards: int, blocks_per_chunk: int, row_bytes: int
) -> int:
    """Bytes of the canonical pages of one row, rounded up to the page size.

    One canonical page holds `shards` workers' pages (as many as the KV heads are spread over, the
    others hold copies), so this is the same number under any tensor parallelism.
    """
    canonical = worker_block_bytes * shards * blocks_per_chunk
    return min(row_bytes, -(-canonical // PAGE_BYTES) * PAGE_BYTES)


def _refuse(facts: EngineFacts, policy: NamespacePolicy) -> None:
    if facts.hash_algorithm not in CRYPTOGRAPHIC_HASHES:
        raise NamespaceError(
            f"prefix hash {facts.hash_algorithm} is not collision resistant: prompts could be made "
            "to find each other's KV",
            hint="start vLLM with --prefix-caching-hash-algo sha256",
        )
    if not facts.kv_dtype or facts.kv_dtype == "auto":
        raise NamespaceError(
            "the effective dtype of the KV cache is unknown",
            hint="set --kv-cache-dtype",
        )
    if facts.lora and not policy.immutable_lora:
        raise NamespaceError(
            "LoRA is enabled, and block hashes name adapters but not their content",
            hint="state that adapters never change in place (immutable_lora), or disable LoRA",
        )
    if facts.in_place_weight_updates:
        raise NamespaceError(
            "weights can be replaced while the engine runs, and KV of the old ones would stay",
            hint="do not combine kvvault with weight_transfer_config",
        )
    if facts.kv_layout is None:
        raise NamespaceError(
            "the KV cache layout is unknown", hint="use vLLM's OffloadingConnector"
        )


def _model(prefix: str, model: ModelFacts, cache: DigestCache) -> dict[str, str]:
    if model.load_format.lower() not in _LOADED_FROM_FILES or model.weights_elsewhere:
        raise NamespaceError(
            f"with load format {model.load_format} the weights do not come from the model's files",
            hint="load the model from a local directory or a Hugging Face repository",
        )
    lengths = model.rope_types - _ROPE_OF_ANY_LENGTH
    path = Path(model.location)
    return {
        prefix: path.name if path.is_dir() else model.location,
        f"{prefix}.weights": weights_identity(model.location, model.commit, cache),
        f"{prefix}.load_format": model.load_format.lower(),
        f"{prefix}.settings": _digest(model.settings),
        f"{prefix}.length": str(model.max_model_len) if lengths else "any",
    }


def _topology(facts: EngineFacts) -> str:
    return (
        f"tp={facts.tensor_parallel} pp={facts.pipeline_parallel} "
        f"pcp={facts.prefill_context_parallel} dcp={facts.decode_context_parallel} "
        f"interleave={facts.context_interleave}"
    )


def _group(group: GroupFacts, facts: EngineFacts, *, portable: bool) -> dict[str, object]:
    fields = dict(group.fields)
    if portable:
        fields = {k: v for k, v in fields.items() if k not in _DEPENDS_ON_SHARDING}
        fields["total_kv_heads"] = str(facts.total_kv_heads)
    return {
        "id": group.group_id,
        "tokens_per_block": group.tokens_per_block,
        "layers": list(group.layers),
        "kind": group.kind,
        "spec": fields,
    }


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
