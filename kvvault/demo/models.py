"""Small language models with random weights, made on the spot: nothing is downloaded.

A demo and the engine tests need a model that a real vLLM loads, that tokenizes real text and that
computes for a noticeable time; what it says does not matter. That it says *different things for
different contexts* does: a random transformer with the usual initialisation attends to everything
almost equally, so its output hardly depends on the KV cache and a wrong cache would go unnoticed.
Here queries and keys are scaled so that attention is sharp (score standard deviation about 4),
which makes logits depend strongly on far-away tokens.

Everything is a function of the recipe and the tokenizer's training text, weights included, so a
model directory is cached under a digest of both. torch, transformers and tokenizers are imported
when a model is built, not when this module is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

__all__ = ["DEMO_LLAMA", "HYBRID_GEMMA3", "ModelRecipe", "build_model", "model_digest"]

_BUILD_VERSION = 2
"""Enters the digest: raise it whenever the same recipe would give other files."""

_UNKNOWN, _BEGIN, _END, _PAD = "<unk>", "<s>", "</s>", "<pad>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)

_ATTENTION_SHARPNESS = 2.0
"""Factor on queries and on keys; attention scores get its square as standard deviation."""
_LOGIT_SPREAD = 3.0
"""Standard deviation of the logits: clear winners, few exact ties."""
_GEMMA_LAYER_GAIN = 8.0
"""Scale of what a Gemma layer adds to the residual stream. Input and output embeddings are the same
tensor there, so with a gain of one the strongest logit would always be the last token's own."""


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Shape and seed of a model. Equal recipes and texts give equal files."""

    family: Literal["llama", "gemma3"]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    """A multiple of the tensor-parallel degree that the model is to run at."""
    head_dim: int
    max_positions: int = 16384
    vocab: int = 4096
    """Upper bound; a short training text gives a smaller one."""
    sliding_window: int | None = None
    """Tokens; gemma3 only, where five layers of six slide."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 is the faster one on CPUs without AVX-512 or AMX."""
    seed: int = 20


DEMO_LLAMA = ModelRecipe(
    family="llama", layers=6, hidden=512, intermediate=1408, heads=8, kv_heads=4, head_dim=64
)
"""About 22 M parameters, 12 KiB of KV a token in float32; TP=2 and TP=4 work."""

HYBRID_GEMMA3 = ModelRecipe(
    family="gemma3",
    layers=6,
    hidden=256,
    intermediate=512,
    heads=4,
    kv_heads=2,
    head_dim=64,
    sliding_window=256,
)
"""Five sliding-window layers and one with full attention: several KV cache groups in vLLM."""


def model_digest(recipe: ModelRecipe, text: str) -> str:
    """Hex digest (16 characters) that names what `build_model` makes of this recipe and text."""
    described = json.dumps(
        {"build": _BUILD_VERSION, **dataclasses.asdict(recipe)}, sort_keys=True
    ).encode()
    return hashlib.sha256(described + b"\0" + text.encode()).hexdigest()[:16]


def build_model(recipe: ModelRecipe, text: str, cache: Path) -> Path:
    """Make the model, or find it in the cache.

    Args:
        recipe: what to make.
        text: what the tokenizer is trained on; some kilobytes at least.
        cache: directory of model directories; created when missing.

    Returns:
        A directory in Hugging Face format (config, safetensors, tokenizer with a chat template).

    Raises:
        ValueError: `text` is empty, or the recipe contradicts itself.
    """
    if not text.strip():
        raise ValueError("a tokenizer cannot be trained on no text")
    if (recipe.family == "gemma3") != (recipe.sliding_window is not None):
        raise ValueError("sliding_window belongs to gemma3, and gemma3 needs it")
    target = cache / f"{recipe.family}-{model_digest(recipe, text)}"
    if (target / "config.json").is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        tokenizer = _train_tokenizer(text, recipe)
        tokenizer.save_pretrained(building)
        _write_weights(recipe, len(tokenizer), building)
        os.rename(building, target)
    except OSError:
        # Another process finished the same model first: its files are the same.
        if not (target / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _train_tokenizer(text: str, recipe: ModelRecipe) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab,
        special_tokens=[_UNKNOWN, _BEGIN, _END, _PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=_UNKNOWN,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=recipe.max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _config(recipe: ModelRecipe, vocab: int) -> PretrainedConfig:
    from transformers import Gemma3TextConfig, LlamaConfig

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    if recipe.family == "llama":
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            head_dim=recipe.head_dim,
            max_position_embeddings=recipe.max_positions,
            tie_word_embeddings=False,
            **ids,
        )
    return Gemma3TextConfig(
        vocab_size=vocab,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        query_pre_attn_scalar=recipe.head_dim,
        sliding_window=recipe.sliding_window,
        max_position_embeddings=recipe.max_positions,
        **ids,
    )


def _write_weights(recipe: ModelRecipe, vocab: int, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = _config(recipe, vocab)
    # The vocabulary is padded to a multiple of 64 so that it can be split between workers.
    config.vocab_size = math.ceil(vocab / 64) * 64
    dtype = getattr(torch, recipe.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(recipe.seed)
    # named_parameters() names a tied tensor once, which is what a reader of the file expects.
    weights = {
        name: _initial(name, parameter.shape, recipe, generator).to(dtype)
        for name, parameter in sorted(model.named_parameters())
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = recipe.dtype
    config.save_pretrained(directory)


def _initial(
    name: str, shape: torch.Size, recipe: ModelRecipe, generator: torch.Generator
) -> torch.Tensor:
    """Weights that keep the variance of activations near one (fan-in scaling), with the two
    exceptions that the module's docstring and constants explain."""
    import torch

    gemma = recipe.family == "gemma3"
    if len(shape) == 1:
        # Gemma norms multiply by (1 + weight), Llama norms by the weight.
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return torch.full(shape, _ATTENTION_SHARPNESS - 1.0)
        if gemma and name.endswith(
            ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
        ):
            return torch.full(shape, _GEMMA_LAYER_GAIN - 1.0)
        return torch.zeros(shape) if gemma else torch.ones(shape)
    noise = torch.randn(shape, generator=generator)
    fan_in = shape[-1]
    if name.endswith("embed_tokens.weight"):
        # Gemma ties input and output embeddings and multiplies the input by sqrt(hidden).
        return noise * (_LOGIT_SPREAD / math.sqrt(fan_in)) if gemma else noise
    if name.endswith("lm_head.weight"):
        return noise * (_LOGIT_SPREAD / math.sqrt(fan_in))
    scale = 1.0 / math.sqrt(fan_in)
    if name.endswith(("q_proj.weight", "k_proj.weight")) and not gemma:
        scale *= _ATTENTION_SHARPNESS
    return noise * scale
