"""What a request may say of itself, and what is made of anything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.integrations.vllm.requestids import MAX_ID, client_id
from kvvault.integrations.vllm.tenancy import _MAX_SCOPES, Claim, Tenancy, Verdict, claim
from kvvault.model import Namespace
from kvvault.naming import request_names
from kvvault.vault import Scope, Vault


def ours(**params: object) -> dict[str, object]:
    return {"kvvault": params}


def test_everything_that_may_be_said() -> None:
    said = claim(
        ours(
            tenant="acme",
            persist=False,
            **{"class": "short"},
            subject="user-4711@example.org",
            labels={"kind": "chat", "case": "2026/12"},
            request_id="ticket 12",
            preview="Hello,\nI am ...",
        )
    )
    assert said == Claim(
        "acme",
        False,
        "short",
        "user-4711@example.org",
        (("case", "2026/12"), ("kind", "chat")),
        "ticket 12",
        "Hello,\nI am ...",
    )
    assert "user-4711" not in repr(said)


@pytest.mark.parametrize("params", [None, {}, {"other": {}}, {"kvvault": None}, {"kvvault": {}}])
def test_nothing_said(params: object) -> None:
    assert claim(params) == Claim()


LONGEST = ours(
    tenant="t" * 256,
    subject="s" * 256,
    request_id="r" * 256,
    preview="p" * 256,
    labels={f"{i}{'n' * 63}": "v" * 128 for i in range(8)},
)


def test_the_longest_that_may_be_said() -> None:
    assert claim(LONGEST) is not None


HOSTILE: dict[str, object] = {
    "empty": "",
    "long": "x" * 257,
    "huge": "x" * 10_000_000,
    "number": 1,
    "bool": True,
    "bytes": b"x",
    "list": ["x"],
    "object": {"x": "y"},
    "line": "a\nb",
    "zero": "a\x00",
    "escape": "a\x1b[2J",
    "surrogate": "\ud800",
    "override": "\u202e",
    "NaN": float("nan"),
}


@pytest.mark.parametrize("name", ["subject", "request_id", "class"])
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_names_that_are_none(name: str, value: object) -> None:
    assert claim(ours(**{name: value})) is None
    assert claim(ours(**{name: "x"})) is not None


@pytest.mark.parametrize("value", ["x" * 257, 1, b"x", ["x"], "a\ud83d", {}], ids=range(6))
def test_previews_that_are_none(value: object) -> None:
    assert claim(ours(preview=value)) is None


def nested(depth: int) -> dict[str, object]:
    labels: dict[str, object] = {}
    for _ in range(depth):
        labels = {"a": labels}
    return labels


@pytest.mark.parametrize(
    "labels",
    [
        [],
        "kind=chat",
        {"": "x"},
        {"x": ""},
        {"x": 1},
        {"x": None},
        {1: "x"},
        {"x" * 65: "x"},
        {"x": "x" * 129},
        {"x\n": "x"},
        {"x": "\ud800"},
        {str(i): "x" for i in range(9)},
        {str(i): "\U0001f600" * 128 for i in range(2)},
        {str(i): "x" for i in range(1_000_000)},
        nested(10_000),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_labels_that_are_none(labels: object) -> None:
    assert claim(ours(labels=labels)) is None
    assert claim(ours(labels={"x": "x"})) is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
names = st.sampled_from(
    ["tenant", "persist", "class", "subject", "labels", "request_id", "preview"]
)


@given(st.dictionaries(names | st.text(), json_values))
def test_anything_is_understood_or_malformed(mine: dict[str, object]) -> None:
    said = claim({"kvvault": mine})
    if said is not None:
        for text in (said.subject, said.request_id, said.preview, *sum(said.labels, ())):
            assert text is None or len(text.encode()) <= 4 * 256


@pytest.fixture
def scope(tmp_path: Path) -> Iterator[Scope]:
    with Vault.create(tmp_path / "vault", provider=f"file:{tmp_path / 'key'}") as vault:
        yield vault.scope("acme", Namespace.of(4096, {"a": "b"}))


def never(_name: str) -> Scope:
    raise AssertionError("nobody was forgotten")


def test_labels_reach_the_place_that_the_policy_looks_at(scope: Scope) -> None:
    tenancy = Tenancy({"acme": scope}, None, never)
    state = tenancy.decide(ours(tenant="acme", labels={"kind": "chat"}))
    assert state.scope is not None
    assert state.scope.labels == {"kind": "chat"}
    assert state.scope.block_id(b"x") == scope.block_id(b"x")
    again = tenancy.decide(ours(tenant="acme", labels={"kind": "chat"}))
    assert again.scope is state.scope
    other = tenancy.decide(ours(tenant="acme", labels={"kind": "chat"}, **{"class": "short"}))
    assert other.scope is not None
    assert other.scope.retention_class == "short"
    assert tenancy.decide(ours(tenant="acme")).scope is scope


def test_invented_labels_cost_a_bounded_amount_and_take_nobodys_own(scope: Scope) -> None:
    tenancy = Tenancy({"acme": scope}, None, never)
    for i in range(3 * _MAX_SCOPES):
        invented = tenancy.decide(ours(tenant="acme", labels={"x": str(i)}))
        assert invented.scope is not None
        assert invented.scope.labels == {"x": str(i)}
    assert len(tenancy._asking) == _MAX_SCOPES
    mine = tenancy.decide(ours(tenant="acme", labels={"kind": "chat"})).scope
    assert mine is not None
    assert mine.labels == {"kind": "chat"}


def test_malformed_parameters_are_neither_stored_nor_served(scope: Scope) -> None:
    tenancy = Tenancy({"acme": scope}, "acme", never)
    state = tenancy.decide(ours(tenant="acme", labels={"x": 1}))
    assert (state.scope, state.persist, state.verdict) == (None, False, Verdict.MALFORMED)
    assert state.said is None


@pytest.mark.parametrize(
    ("engines", "clients"),
    [
        ("cmpl-X-0-0123abcd", "cmpl-X"),
        ("cmpl-X-11-0123abcd", "cmpl-X"),
        ("2_cmpl-X-0-0123abcd", "cmpl-X"),
        ("cmpl-a-b-1-0-0123abcd", "cmpl-a-b-1"),
        ("cmpl-cmpl-a-0-0123abcd", "cmpl-cmpl-a"),
        ("chatcmpl-X-0123abcd", "chatcmpl-X"),
        ("1_chatcmpl-X-0123abcd", "chatcmpl-X"),
        ("chatcmpl-a_1-0123abcd", "chatcmpl-a_1"),
        ("chatcmpl-3_cmpl-0123abcd", "chatcmpl-3_cmpl"),
        ("resp_abc_0-0123abcd", "resp_abc"),
        ("generate-tokens-X-0123abcd", "generate-tokens-X"),
        ("17-0123abcd", "17"),
        ("17", "17"),
    ],
)
def test_ids_of_clients(engines: str, clients: str) -> None:
    assert client_id(engines) == clients


def test_ids_without_a_random_part() -> None:
    assert client_id("cmpl-X-0", randomised=False) == "cmpl-X"
    assert client_id("chatcmpl-X-0123abcd", randomised=False) == "chatcmpl-X-0123abcd"


@pytest.mark.parametrize("header", ["x" * 1000, "a\x1b[2J", "\ud800"], ids=range(3))
def test_ids_that_are_not_kept(header: str) -> None:
    assert client_id("cmpl-x-0-0123abcd") is not None
    assert client_id(f"cmpl-{header}-0-0123abcd") is None
    assert client_id("") is None


@given(st.text(min_size=1, max_size=64).filter(str.isprintable), st.integers(0, 99))
def test_a_request_is_found_by_both_of_its_names(header: str, index: int) -> None:
    for engines, response in (
        (f"cmpl-{header}-{index}-0123abcd", f"cmpl-{header}"),
        (f"chatcmpl-{header}-0123abcd", f"chatcmpl-{header}"),
    ):
        kept = client_id(engines)
        assert kept == response
        assert kept in request_names(header)
        assert kept in request_names(response)
    assert len(response) <= MAX_ID
