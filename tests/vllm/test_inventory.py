"""A real server, and what its vault's inventory says of what it was asked.

Everything that is expected follows from the prompts' tokens, as the server returns them, and from
the order of requests; nothing of it from kvvault.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvvault.cli.app import app
from kvvault.cli.commands.finding import Found, TextQuestion, find_text
from kvvault.integrations.vllm.rendering import Renderer
from kvvault.promptfacts import Chain, Condition, PromptFacts
from kvvault.vault import Vault
from tests.vllm.conftest import TEXT
from tests.vllm.served import BLOCK_TOKENS, Said, Served, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TENANTS = ("clinic", "shop", "school")
TEXTS = "texts"
"""Tenant of the random texts."""


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("inventory"), models, *TENANTS, TEXTS) as running:
        yield running


@pytest.fixture(scope="module")
def renderer(served: Served) -> Renderer:
    return Renderer(str(served.model))


WORDS = sorted({word for word in TEXT.read_text().split() if word.isalpha()})


def prose(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


Name = tuple[str, tuple[int, ...]]
"""What makes a block: the tenant, and all tokens up to its end. (Each tenant has one salt.)"""


@dataclass
class Request:
    """One request of the round."""

    tenant: str
    subject: str
    text: object
    chat: bool
    labels: dict[str, str]
    header: str
    answers: list[Said] = field(default_factory=list)

    def send(self, served: Served, header: str) -> Said:
        said: dict[str, object] = {"tenant": self.tenant, "subject": self.subject}
        if self.labels:
            said["labels"] = self.labels
        self.answers.append(
            served.send(
                self.text,
                said,
                chat=self.chat,
                salt=f"salt of {self.tenant}",
                headers={"X-Request-Id": header},
            )
        )
        return self.answers[-1]

    @property
    def blocks(self) -> list[Name]:
        tokens = self.answers[0].prompt_tokens
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        return [(self.tenant, tokens[:end]) for end in ends]

    def cached(self, live: set[Name]) -> int:
        """Tokens that an engine with an empty cache of its own finds."""
        found = takewhile(live.__contains__, self.blocks)
        return sum(1 for _ in found) * BLOCK_TOKENS


ERASED = ("clinic", "patient 7")


def round_of_requests() -> list[Request]:
    """40 of three tenants and five subjects: system prompts that many share, conversations that
    grow, the same question asked twice, completions and chats."""
    rng = random.Random(7)
    subjects = [ERASED, ("clinic", "patient 8"), ("shop", "customer 1"), ("shop", "patient 7")]
    subjects.append(("school", "pupil 3"))
    system = {tenant: prose(i, 90) for i, tenant in enumerate(TENANTS)}
    found: list[Request] = []
    talks: dict[tuple[str, str], list[dict[str, str]]] = {}
    for i in range(40):
        tenant, subject = subjects[i % len(subjects)]
        chat = i % 2 == 0
        labels = {"kind": "chat"} if chat and tenant == "clinic" else {}
        question = prose(100 + i, rng.randrange(10, 70))
        if i in (25, 26):
            question = prose(100 + i - 10, 60)  # once more, by the same subject
        text: object
        if chat:
            talk = talks.setdefault(
                (tenant, subject), [{"role": "system", "content": system[tenant]}]
            )
            talk.append({"role": "user", "content": question})
            text = [dict(message) for message in talk]
            talk.append({"role": "assistant", "content": prose(1000 + i, 30)})
            if len(talk) > 7:
                del talk[1:]
        else:
            text = f"{system[tenant]}\n\n{question}"
        found.append(Request(tenant, subject, text, chat, labels, f"round-{i}"))
    return found


@pytest.fixture(scope="module")
def asked(served: Served) -> list[Request]:
    """The round, asked, and everything of it stored and noted."""
    requests = round_of_requests()
    for request in requests:
        request.send(served, request.header)
    served.forget()
    assert served.wait(lambda vault: len(listing(vault)) >= len(requests))
    return requests


def listing(vault: Vault, tenants: Sequence[str] = TENANTS) -> list[PromptFacts]:
    found, _ = vault.prompts.listing(limit=None)
    return [one for one in found if one.tenant in tenants]


def test_the_round_is_what_it_should_be(asked: list[Request]) -> None:
    """Otherwise a test that finds nothing wrong says nothing."""
    assert len(asked) == 40
    assert len({request.tenant for request in asked}) == 3
    assert len({(request.tenant, request.subject) for request in asked}) == 5
    gone = {b for r in asked if (r.tenant, r.subject) == ERASED for b in r.blocks}
    kept = {b for r in asked if (r.tenant, r.subject) != ERASED for b in r.blocks}
    assert gone & kept
    assert len(gone - kept) > 10
    assert any(len(r.answers[0].prompt_tokens) % BLOCK_TOKENS >= 28 for r in asked)  # see the tier
    assert any(r.answers[0].cached for r in asked)


def test_the_inventory_is_what_was_sent(served: Served, asked: list[Request]) -> None:
    with served.open() as vault:
        found = {facts.request_id: facts for facts in listing(vault)}
    assert len(found) == len(asked)
    users: dict[Name, int] = {}
    for request in asked:
        for block in request.blocks:
            users[block] = users.get(block, 0) + 1
    for request in asked:
        facts = found[request.answers[0].id]
        blocks = request.blocks
        assert facts.tenant == request.tenant
        assert facts.subject == request.subject
        assert dict(facts.labels) == request.labels
        assert facts.model == served.model.name
        assert (facts.blocks, facts.tokens) == (len(blocks), len(blocks) * BLOCK_TOKENS)
        alone = [block for block in blocks if users[block] == 1]
        assert facts.alone_blocks == len(alone)
        assert facts.alone_bytes * len(blocks) == facts.data_bytes * len(alone)


def test_a_request_is_found_by_both_of_its_names(served: Served, asked: list[Request]) -> None:
    for request in asked[:4]:
        answer = request.answers[0]
        prefix = "chatcmpl-" if request.chat else "cmpl-"
        assert answer.id == prefix + request.header
        with served.open() as vault:
            for name in (answer.id, request.header):
                found, _ = vault.prompts.listing([Condition("request", "=", name)])
                assert [facts.request_id for facts in found] == [answer.id]


def test_erasing_a_subject_takes_its_private_parts_and_nothing_else(
    served: Served, asked: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same requests again, each from the vault: what only the erased subject had is computed
    anew, all else comes from the disk, and the answers are the same."""
    erased = [r for r in asked if (r.tenant, r.subject) == ERASED]
    kept = [r for r in asked if (r.tenant, r.subject) != ERASED]
    live = {block for request in kept for block in request.blocks}
    private = {block for request in erased for block in request.blocks} - live
    command = ["erase", "--subject", ERASED[1], "--tenant", ERASED[0], "--reason", "asked for"]
    with pytest.raises(SystemExit) as ended:
        app([*command, "--vault", str(served.vault), "--yes", "--json", "--engine", served.url])
    assert ended.value.code in (0, 3)  # 3: the engine is still writing to a segment of theirs
    document = json.loads(capsys.readouterr().out)
    assert len(document["prompts"]) == len(erased)
    assert document["erased"]["blocks"] == len(private)
    reached = {copy["what"]: copy["reached"] for copy in document["engine_copies"]}
    assert reached == {"device": True, "cpu": True, "region": False}
    with served.open() as vault:
        assert {facts.request_id for facts in listing(vault)} == {r.answers[0].id for r in kept}
    missed = 0
    for number, request in enumerate(asked):
        again = request.send(served, f"again-{number}")
        assert again.prompt_tokens == request.answers[0].prompt_tokens
        assert again.cached == request.cached(live)
        assert again.words == request.answers[0].words
        missed += again.cached < len(request.blocks) * BLOCK_TOKENS
        live.update(request.blocks)
        served.forget()
    assert 0 < missed <= len(erased)
    ids = {request.answers[1].id for request in asked}
    assert served.wait(lambda vault: ids <= {facts.request_id for facts in listing(vault)})


def test_what_asks_not_to_be_kept_is_not_listed(served: Served) -> None:
    params = {"tenant": TEXTS, "request_id": "mine"}
    served.send(prose(77, 120), {**params, "persist": False})
    served.send(prose(76, 120), {**params, "labels": ["malformed"]})
    kept = served.send(prose(75, 120), params)
    served.forget()
    assert served.wait(lambda vault: bool(listing(vault, [TEXTS])))
    with served.open() as vault:
        (facts,) = listing(vault, [TEXTS])
    assert facts.request_id == "mine"
    assert facts.tokens == len(kept.prompt_tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def test_an_engine_drops_its_own_copies(served: Served) -> None:
    """Asked without the vault, so what is found is in the engine."""
    text = prose(78, 120)
    private = {"tenant": TEXTS, "persist": False}
    first = served.send(text, private)
    again = served.send(text, private)
    whole = (len(first.prompt_tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert (first.cached, again.cached) == (0, whole)
    served.forget()
    assert served.send(text, private).cached == 0


# --------------------------------------------------------------------------- looking for texts

HEADS = ["", prose(1, 40), prose(2, 40), prose(1, 40) + prose(3, 40)]
pieces = st.sampled_from(WORDS) | st.text(st.characters(codec="utf-8"), max_size=12)
bodies = st.lists(pieces, min_size=15, max_size=60).map(" ".join)
texts = st.builds(lambda head, body: head + body, st.sampled_from(HEADS), bodies)
roles = st.sampled_from(["system", "user", "assistant"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=3
)
salts = st.none() | st.text(
    st.characters(codec="utf-8", exclude_characters="@/\\\0"), min_size=1, max_size=12
)
"""vLLM takes no others."""


def look(served: Served, vault: Vault, tokens: Sequence[int], salt: str | None) -> Chain:
    question = TextQuestion(tokens, TEXTS, served.model.name, None, salt)
    (found,) = find_text(vault, question)
    assert isinstance(found, Found)
    assert found.chain is not None
    assert found.of_blocks == len(tokens) // BLOCK_TOKENS
    return found.chain


def test_find_agrees_with_vllm_on_200_texts(served: Served, renderer: Renderer) -> None:
    sent: list[tuple[str, list[int], str | None]] = []

    @settings(
        max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(texts | messages, salts)
    def ask(text: object, salt: str | None) -> None:
        chat = isinstance(text, list)
        answer = served.send(text, {"tenant": TEXTS}, chat=chat, salt=salt, max_tokens=1)
        tokens = renderer.chat(json.dumps(text)) if chat else renderer.completion(str(text))
        assert tuple(tokens) == answer.prompt_tokens
        sent.append((answer.id, tokens, salt))

    ask()
    assert len(sent) >= 200
    served.forget()
    known = {(salt, tuple(tokens)) for _, tokens, salt in sent}
    heads = {
        (salt, tuple(tokens[:end]))
        for _, tokens, salt in sent
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    }
    ids = {one[0] for one in sent if len(one[1]) >= BLOCK_TOKENS}
    assert served.wait(lambda v: ids <= {facts.request_id for facts in listing(v, [TEXTS])})
    rng = random.Random(3)
    with served.open() as vault:
        for request_id, tokens, salt in rng.sample(sent, 40):
            whole = len(tokens) // BLOCK_TOKENS
            chain = look(served, vault, tokens, salt)
            assert (chain.blocks, chain.tokens) == (whole, whole * BLOCK_TOKENS)
            common = {facts.request_id: upto for facts, upto in chain.prompts}
            if whole:
                assert common[request_id] == whole * BLOCK_TOKENS
            # A text that parts from it somewhere, and one under another salt.
            at = rng.randrange(len(tokens))
            other = [*tokens[:at], (tokens[at] + 1) % 400, *tokens[at + 1 :]]
            assert (salt, tuple(other)) not in known
            ends = range(BLOCK_TOKENS, len(other) + 1, BLOCK_TOKENS)
            shared = [end for end in ends if (salt, tuple(other[:end])) in heads]
            chain = look(served, vault, other, salt)
            assert (chain.blocks, chain.tokens) == (len(shared), max(shared, default=0))
            assert look(served, vault, tokens, f"{salt}!").blocks == 0
        assert look(served, vault, renderer.completion(prose(999, 200)), None).blocks == 0


def test_find_from_the_command_line(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    salt, text = tmp_path / "salt", tmp_path / "text"
    salt.write_text("of the tenant's\n")
    talk = [{"role": "user", "content": prose(80, 150)}]
    answer = served.send(talk, {"tenant": TEXTS, "subject": "s"}, chat=True, salt="of the tenant's")
    served.forget()
    assert served.wait(lambda v: answer.id in {facts.request_id for facts in listing(v, [TEXTS])})
    text.write_text(json.dumps(talk))

    def find(*options: str, code: int = 0) -> dict[str, Any]:
        arguments = ["prompts", "find", "--json", "--vault", str(served.vault)]
        arguments += ["--text-file", str(text), "--tenant", TEXTS, *options]
        with pytest.raises(SystemExit) as ended:
            app(arguments)
        assert ended.value.code == code
        out = capsys.readouterr().out
        document: dict[str, Any] = json.loads(out) if out else {}
        return document

    model = ["--model", str(served.model)]
    before = questions(served)
    found = find("--chat", *model, "--salt-file", str(salt))
    (space,) = found["namespaces"]
    whole = len(answer.prompt_tokens) // BLOCK_TOKENS
    assert (found["found"], found["tokens"]) == (True, len(answer.prompt_tokens))
    assert (space["blocks"], space["of_blocks"]) == (whole, whole)
    assert space["until"] > space["since"]
    (prompt,) = space["prompts"]
    assert (prompt["request"], prompt["subject"]) == (answer.id, "s")
    assert find("--chat", *model)["found"] is False
    assert find(*model, "--salt-file", str(salt))["found"] is False
    by_name = ["--model", served.model.name, "--tokenizer", str(served.model)]
    assert find("--chat", *by_name, "--salt-file", str(salt))["found"] is True
    assert find("--model", "other", "--tokenizer", str(served.model), code=2) == {}
    entries = questions(served)[len(before) :]
    assert [(entry["command"], entry["rows"]) for entry in entries] == [
        ("prompts find", rows) for rows in (1, 0, 0, 1, 0)
    ]
    assert "of the tenant's" not in str(entries) + str(found)


def questions(served: Served) -> list[dict[str, object]]:
    import sqlite3

    with sqlite3.connect(f"file:{served.vault / 'catalog.sqlite3'}?mode=ro", uri=True) as opened:
        rows = opened.execute("SELECT body FROM log_entries ORDER BY entry_no").fetchall()
    entries = [json.loads(body) for (body,) in rows]
    return [entry for entry in entries if entry["kind"] == "question"]


# ------------------------------------------------------------------------------ what leaks

CANARY = "the quick canary, born 1970-01-01, sings of insulin"


def test_a_canary_is_found_nowhere(served: Served, renderer: Renderer) -> None:
    """Through success, errors and a crash: its text, its tokens and their hashes, its salt, what
    was said of it, and the vault's key are in no log, metric, catalog, log of that, or core file.
    The last test: the engine does not survive it."""
    text = f"{CANARY} {prose(5, 100)}"
    salt = "canary-salt-0c2f"
    said = {
        "tenant": TEXTS,
        "subject": "canary-subject-91",
        "labels": {"canary-label": "canary-value-17"},
        "request_id": "canary-request-44",
        "preview": CANARY,
    }
    answer = served.send(text, said, salt=salt)
    served.send([{"role": "user", "content": text}], said, chat=True, salt=salt)
    params = {"kv_transfer_params": {"kvvault": {**said, "unknown": CANARY}}}
    errors: list[dict[str, object]] = [
        {"model": "m", "prompt": text * 40, "cache_salt": salt, **params},  # too long
        {"model": "m", "prompt": text, "cache_salt": salt, "temperature": -1, **params},
        {"model": "m", "prompt": text, "cache_salt": "", **params},
        {"model": CANARY, "prompt": text, "cache_salt": salt},
        {"model": "m", "messages": [{"role": "user", "content": {"x": CANARY}}]},
    ]
    for body in errors:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert served.ask(path, body).status in (400, 404, 422)
    served.ask("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 1, **params})
    assert served.wait(
        lambda v: any(facts.subject == said["subject"] for facts in listing(v, [TEXTS]))
    )
    metrics = str(served.ask("/metrics").document).encode()
    assert b"kvvault_tier_blocks_total" in metrics
    engine = crash(served)
    files = {
        path: path.read_bytes() for path in [served.log, *served.vault.rglob("*")] if path.is_file()
    }
    names = {path.name for path in files}
    assert {"catalog.sqlite3", "catalog.sqlite3-wal", "log.txt"} <= names
    assert not list(Path.cwd().glob("core*")) + list(served.vault.parent.rglob("core*"))
    assert engine["Max core file size"].split()[0] == "0"

    tokens = renderer.completion(text)
    assert tuple(tokens) == answer.prompt_tokens
    key = served.key.read_bytes()
    with served.open() as vault:
        (space,) = {one.namespace.digest: one.namespace for one in vault.namespaces()}.values()
    from kvvault.integrations.vllm.hashing import Hashing, chain

    links = chain(tokens, Hashing.of(space), salt=salt)
    secrets = [
        *(secret.encode() for secret in (CANARY, salt, "canary-subject-91", "canary-label")),
        *(secret.encode() for secret in ("canary-value-17", "canary-request-44")),
        *(b"".join(t.to_bytes(n, "little") for t in tokens[:8]) for n in (4, 8)),
        str(tokens[:8])[1:-1].encode(),
        *(link.key[:32] for link in links),
        *(link.key[:32].hex().encode() for link in links),
        key,
        key.hex().encode(),
    ]
    # The controls: the search finds what is there, and the canary was there.
    assert TEXTS.encode() in files[served.log]
    assert len(links) == len(tokens) // BLOCK_TOKENS > 2
    found = [
        (place, secret[:24])
        for place, data in [("metrics", metrics), *files.items()]
        for secret in secrets
        if secret in data
    ]
    assert found == []


def crash(served: Served) -> dict[str, str]:
    """Make the engine process die of a signal that would leave a core file; its limits."""
    group = served.server._process.pid
    engines = [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and _is_engine(int(entry), group)
    ]
    assert engines
    limits = {
        line[:26].strip(): line[26:]
        for line in Path(f"/proc/{engines[0]}/limits").read_text().splitlines()
    }
    os.kill(engines[0], signal.SIGABRT)
    until = time.monotonic() + 60
    while Path(f"/proc/{engines[0]}/fd").exists() and time.monotonic() < until:
        if b"State:\tZ" in Path(f"/proc/{engines[0]}/status").read_bytes():
            break
        time.sleep(0.1)
    return limits


def _is_engine(process: int, group: int) -> bool:
    try:
        name = Path(f"/proc/{process}/cmdline").read_bytes()
        return os.getpgid(process) == group and b"EngineCore" in name
    except OSError:
        return False
