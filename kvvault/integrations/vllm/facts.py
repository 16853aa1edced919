"""What a namespace is made of: plain values, read off vLLM's configuration by `shims`.

No vLLM import and no decisions here; `namespace` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineFacts", "GroupFacts", "ModelFacts"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model (the served one, or a draft model) as its configuration describes it."""

    location: str
    """A local directory or a Hugging Face repository id."""
    commit: str | None
    """Commit that Hugging Face resolved the repository's revision to."""
    weights_elsewhere: bool
    """Weights come from another place than `location` (object storage)."""
    load_format: str
    settings: str
    """Canonical JSON of everything in the model's configuration that changes what it computes."""
    max_model_len: int
    rope_types: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV cache group that is offloaded."""

    group_id: int
    tokens_per_block: int
    layers: tuple[str, ...]
    kind: str
    """Class of the group's KV cache spec."""
    fields: tuple[tuple[str, str], ...]
    """Fields of that spec, sorted by name."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a namespace is made of, read off vLLM's configuration; no decisions in it."""

    version: str
    model: ModelFacts
    draft: ModelFacts | None
    speculative: str | None
    """Speculative decoding method, or None."""
    kv_dtype: str
    """Effective dtype of the KV cache."""
    cache_dtype: str
    """As configured; may be "auto"."""
    kv_layout: str | None
    attention: str
    """Attention backend (configured or automatic) and what an automatic choice depends on."""
    device: str
    groups: tuple[GroupFacts, ...]
    tokens_per_hash: int
    blocks_per_chunk: int
    row_bytes: int
    """Bytes of one row of the primary tier."""
    worker_block_bytes: int
    """KV bytes of one worker for one device block."""
    total_kv_heads: int
    tensor_parallel: int
    pipeline_parallel: int
    prefill_context_parallel: int
    decode_context_parallel: int
    context_interleave: int
    canonical_format: str | None
    """Id of the canonical byte format if rows are in it."""
    parallelism_agnostic: bool
    """vLLM's own statement that the row's bytes do not depend on the parallelism."""
    hash_algorithm: str
    hash_seed: str
    lora: bool
    multimodal: str | None
    """Canonical JSON of the multi-modal settings, or None."""
    in_place_weight_updates: bool
    options: tuple[tuple[str, str], ...]
    """Remaining switches that change what is cached, sorted by name."""
