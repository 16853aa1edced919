"""From a text to block names, against vLLM's own classes, without an engine. With one:
`test_inventory`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.request import Request

from kvvault.demo.models import DEMO_LLAMA, build_model
from kvvault.errors import ConfigError, NamespaceError, UsageError
from kvvault.integrations.vllm.hashing import Adapter, Hashing, chain, of_model
from kvvault.integrations.vllm.rendering import Renderer, default_seed
from kvvault.model import Namespace
from tests.vllm.conftest import TEXT

pytestmark = pytest.mark.vllm

TINY = dataclasses.replace(DEMO_LLAMA, layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1)


def namespace(
    groups: tuple[int, ...] = (16,),
    *,
    per_hash: int = 16,
    per_chunk: int = 1,
    algorithm: str = "sha256",
    seed: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> Namespace:
    """As `kvvault.integrations.vllm.namespace` writes it, as far as it matters here."""
    return Namespace.of(
        4096,
        {
            "engine": "vllm",
            "model": "m",
            "kv.groups": json.dumps(
                [{"id": i, "tokens_per_block": tokens} for i, tokens in enumerate(groups)]
            ),
            "kv.tokens_per_hash": str(per_hash),
            "kv.blocks_per_chunk": str(per_chunk),
            "hash.algorithm": algorithm,
            "hash.seed": hashlib.sha256((seed or default_seed()).encode()).hexdigest(),
            **(facts or {}),
        },
    )


def vllms(
    tokens: list[int],
    space: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: str | None,
    adapter: Adapter | None,
    salt: str | None,
) -> dict[bytes, int]:
    """What vLLM's scheduler calls the blocks of a request, and where they end."""
    facts = dict(space.facts)
    function = get_hash_fn_by_name(facts["hash.algorithm"])
    per_hash, per_chunk = int(facts["kv.tokens_per_hash"]), int(facts["kv.blocks_per_chunk"])
    with monkeypatch.context() as patched:
        if seed is None:
            patched.delenv("PYTHONHASHSEED", raising=False)
        else:
            patched.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(function)
    request = Request(
        "x",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        lora_request=adapter and LoRARequest(adapter.name, 7, adapter.path),
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(per_hash, function),
    )
    configs = tuple(
        GroupOffloadConfig(
            group_idx=group["id"],
            tokens_per_block=group["tokens_per_block"],
            tokens_per_chunk=group["tokens_per_block"] * per_chunk,
            hashes_per_chunk=group["tokens_per_block"] * per_chunk // per_hash,
            kv_event_group_spec=None,
            sliding_window_size_in_chunks=None,
            kv_cache_spec=None,
            manager_cls=None,
        )
        for group in json.loads(facts["kv.groups"])
    )
    config = SchedulerOffloadConfig(configs, per_chunk, per_hash, 1, True, False)
    context = ReqContext("x")
    state = RequestOffloadState(config, request, context, RequestOffloadingContext())
    state.update_offload_keys()
    return {bytes(key): end for key, end in context._offload_key_positions.items()}


words = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=300)
salts = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
adapters = st.none() | st.builds(Adapter, st.sampled_from(["a", "b"]), st.sampled_from(["/a", "x"]))
shapes = st.sampled_from(
    [((16,), 16, 1), ((16,), 16, 4), ((32, 16), 16, 1), ((16, 32, 16), 8, 2), ((1,), 1, 3)]
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 4095), max_size=200),
    shapes,
    st.sampled_from(["sha256", "sha256_cbor"]),
    st.sampled_from([None, "0", "a seed"]),
    adapters,
    salts,
)
def test_names_are_the_schedulers(
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[int],
    shape: tuple[tuple[int, ...], int, int],
    algorithm: str,
    seed: str | None,
    adapter: Adapter | None,
    salt: str | None,
) -> None:
    groups, per_hash, per_chunk = shape
    space = namespace(
        groups, per_hash=per_hash, per_chunk=per_chunk, algorithm=algorithm, seed=seed
    )
    how = Hashing.of(space, {} if seed is None else {"PYTHONHASHSEED": seed})
    ours = chain(tokens, how, adapter=adapter, salt=salt)
    theirs = vllms(tokens, space, monkeypatch, seed=seed, adapter=adapter, salt=salt)
    assert dict(ours) == theirs
    assert len(ours) == len(theirs)
    assert [link.end for link in ours] == sorted(link.end for link in ours)


def test_what_names_depend_on() -> None:
    """The control: each of these changes every name, and a changed token those after it."""
    tokens = list(range(64))
    how = Hashing.of(namespace())
    plain = chain(tokens, how)
    assert [link.end for link in plain] == [16, 32, 48, 64]
    other_seed = Hashing.of(namespace(seed="x"), {"PYTHONHASHSEED": "x"})
    for other in (
        chain(tokens, how, salt="s"),
        chain(tokens, how, adapter=Adapter("a", "/a")),
        chain(tokens, how, adapter=Adapter("a", "/b")),
        chain(tokens, Hashing.of(namespace(algorithm="sha256_cbor"))),
        chain(tokens, other_seed),
    ):
        assert len(other) == 4
        assert not {link.key for link in other} & {link.key for link in plain}
    changed = chain([*tokens[:40], 99, *tokens[41:]], how)
    assert [mine == theirs for mine, theirs in zip(changed, plain, strict=True)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert chain(tokens, how, salt="") == plain
    assert chain(tokens[:15], how) == []


def test_a_seed_that_is_not_known() -> None:
    space = namespace(seed="secret seed")
    assert Hashing.of(space, {"PYTHONHASHSEED": "secret seed"}).seed == "secret seed"
    for environment in ({}, {"PYTHONHASHSEED": "0"}):
        with pytest.raises(NamespaceError, match="PYTHONHASHSEED"):
            Hashing.of(space, environment)
    # An environment that has another one does not hide vLLM's own.
    assert Hashing.of(namespace(), {"PYTHONHASHSEED": "0"}).seed == default_seed()


@pytest.mark.parametrize(
    "facts", [{"engine": "other"}, {"kv.groups": "{"}, {"kv.tokens_per_hash": ""}]
)
def test_namespaces_of_others(facts: dict[str, str]) -> None:
    with pytest.raises(NamespaceError):
        Hashing.of(namespace(facts=facts), {})


def test_which_namespaces_are_a_models(tmp_path: Path) -> None:
    mine = namespace(facts={"model": "llama"})
    hub = namespace(facts={"model": "org/llama", "model.weights": "hf:org/llama@abc"})
    snapshot = namespace(facts={"model": "abc", "model.weights": "hf:org/llama@abc"})
    both = [mine, hub, snapshot]
    assert of_model(both, "/srv/models/llama") == [mine]
    assert of_model(both, "llama") == [mine]
    assert of_model(both, "org/llama") == [mine, hub, snapshot]
    assert of_model(both, "other") == []
    (tmp_path / "llama").mkdir()
    (tmp_path / "current").symlink_to("llama")
    assert of_model(both, str(tmp_path / "current")) == [mine]


# ------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return build_model(TINY, TEXT.read_text(), models)


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return Renderer(str(model))


def test_a_completion_is_tokenised_as_it_is(renderer: Renderer, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "Licensed under\n the Apache  License\n"
    assert renderer.completion(text) == tokenizer(text).input_ids
    assert renderer.completion(text[:-1]) != renderer.completion(text)


def test_a_chat_goes_through_the_models_template(renderer: Renderer, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is Apache?"},
        {"role": "assistant", "content": "A license."},
        {"role": "user", "content": "And?"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert renderer.chat(json.dumps(messages)) == expected
    assert renderer.chat(json.dumps({"messages": messages, "max_tokens": 5})) == expected
    closed = {"messages": messages, "add_generation_prompt": False}
    assert renderer.chat(json.dumps(closed)) != expected


@pytest.mark.parametrize("text", ["What is Apache?", "[1, 2]", "{}", "[]", '"x"', "[" * 100_000])
def test_other_text_is_what_one_user_says(renderer: Renderer, text: str) -> None:
    assert renderer.chat(text) == renderer.chat(json.dumps([{"role": "user", "content": text}]))


def test_the_servers_own_template(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    own = Renderer(str(model), chat_template=template)
    assert own.chat("What is Apache?") == renderer.completion("What is Apache?")


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": 5}]',
        '[{"content": "CANARY"}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "CANARY"}}]}]',
    ],
)
def test_what_vllm_does_not_take_is_an_error_that_quotes_nothing(
    renderer: Renderer, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        renderer.chat(text)
    assert "CANARY" not in str(caught.value) + caught.value.hint
    assert caught.value.__suppress_context__
    assert "CANARY" not in "".join(capfd.readouterr())


def test_a_text_longer_than_the_model_takes_has_names_all_the_same(renderer: Renderer) -> None:
    assert len(renderer.completion("Apache License " * 30_000)) > TINY.max_positions


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_no_model_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no model"):
        Renderer(str(tmp_path / name))


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        Renderer(str(model))
    assert "pip install" in caught.value.hint
