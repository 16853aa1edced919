"""`kvvault demo` with a real vLLM, from the command line; and what its vault gives away.

The demo's own search says that no plaintext is in the vault. Its positive control is here: the
same engine with the same prompts over vLLM's own `fs` tier, where the same search must find
everything. That run also shows which block hashes the vault's engine had, because `fs` writes them
into its file names; the vault must not contain them.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvvault import layout
from kvvault.demo.models import DEMO_LLAMA, build_model
from kvvault.demo.prompts import TENANTS, Conversation, conversations, project_text
from kvvault.demo.search import search_directory
from kvvault.demo.server import HOST, Server, free_port
from kvvault.demo.story import fitted, server_arguments, server_environment
from kvvault.integrations.vllm.serve import ServeOptions, command, transfer_config
from kvvault.vault import Vault

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = [sys.executable, "-c", "import sys; from kvvault.cli import main; sys.exit(main())"]
KEYS = {
    "vllm_version",
    "requests",
    "prompt_tokens",
    "restart_cached_tokens",
    "output_identical",
    "cross_tenant_hits",
    "ttft_recompute_s",
    "ttft_disk_s",
    "blocks",
    "bytes_on_disk",
    "plaintext_hits",
    "elapsed_s",
}


def _demo(directory: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "demo", *options],
        env={**os.environ, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _regions() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvvault-demo" in name}


def _processes(directory: Path) -> list[int]:
    """Processes whose command line names something in a directory."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            line = Path("/proc", entry, "cmdline").read_bytes() if entry.isdigit() else b""
        except OSError:
            continue
        if os.fsencode(directory) in line:
            found.append(int(entry))
    return found


def _left(directory: Path) -> list[Path]:
    """What a demo left behind. (torch makes a cache of its own in every TMPDIR.)"""
    return list(directory.glob("kvvault-*"))


# -- the demo --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    code: int
    document: dict[str, object]
    story: str
    vault: Path


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    directory = tmp_path_factory.mktemp("demo")
    before = _regions()
    process = _demo(directory, "--json", "--keep")
    stdout, stderr = process.communicate()
    assert stdout, stderr
    document = json.loads(stdout)
    assert _regions() <= before
    assert _processes(directory) == []
    return Told(process.returncode, document, stderr, Path(document["directory"]) / "vault")


def test_every_promise_is_kept(told: Told) -> None:
    document = told.document
    assert document["problems"] == [], told.story
    assert (told.code, document["ok"]) == (0, True)
    assert document.keys() >= KEYS
    assert document["output_identical"] is True
    assert document["cross_tenant_hits"] == 0
    assert document["plaintext_hits"] == 0


def test_the_prompts_came_from_disk(told: Told) -> None:
    document = told.document
    assert document["requests"] == 4
    answers = document["answers"]
    assert isinstance(answers, list)
    size = 32
    for answer in answers:
        full = answer["prompt_tokens"] // size * size
        assert answer["prompt_tokens"] > 2000
        assert answer["disk"]["cached_tokens"] >= 0.95 * full
        assert answer["identical"] is True
    # Each tenant's first prompt was computed in full: nothing came from the other one's.
    assert [answers[i]["computed"]["cached_tokens"] for i in (0, 2)] == [0, 0]
    # The positive control of "no hits across tenants": each tenant's second prompt does share.
    assert all(answers[i]["computed"]["cached_tokens"] > 0 for i in (1, 3))
    assert document["cross_tenant_requests"] == 3


def test_the_search_had_something_to_find(told: Told) -> None:
    document = told.document
    total, constant = document["windows_total"], document["windows_constant"]
    blocks, block_bytes = document["blocks"], document["block_bytes"]
    assert isinstance(total, int)
    assert isinstance(constant, int)
    assert isinstance(blocks, int)
    assert isinstance(block_bytes, int)
    # Nothing that was stored was missing from the memory, and hardly any of it was constant.
    assert total - constant > 0.99 * blocks * block_bytes / 64
    assert document["control_windows_found"] == document["control_windows_planted"] == 200
    searches = document["searches"]
    assert isinstance(searches, list)
    assert [entry["bytes_searched"] >= blocks * block_bytes for entry in searches] == [True, True]


def test_the_story_is_told_on_stderr(told: Told) -> None:
    for word in (*TENANTS, "starting vLLM", "from disk", "every promise was kept"):
        assert word in told.story
    assert "Traceback" not in told.story


# -- what the vault gives away ---------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """The same prompts over vLLM's `fs` tier."""

    directory: Path
    windows: int
    windows_found: int
    prompts: tuple[Conversation, ...]
    tokens: tuple[tuple[int, ...], ...]

    def hashes(self) -> list[bytes]:
        return [bytes.fromhex(path.stem) for path in self.directory.rglob("*.bin")]


def _tokens(port: int, prompt: str) -> tuple[int, ...]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    body = json.dumps({"model": "demo", "prompt": prompt}).encode()
    connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return tuple(answer["tokens"])


def _settle(directory: Path) -> None:
    """Wait until no file is added any more."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 3 or count <= 0:
        now = sum(1 for _ in directory.rglob("*.bin"))
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def control(told: Told, tmp_path_factory: pytest.TempPathFactory) -> Control:
    directory = tmp_path_factory.mktemp("control")
    text = project_text()
    model = build_model(DEMO_LLAMA, text, Path.home() / ".cache" / "kvvault" / "models")
    port, engine_id = free_port(), f"kvvault-demo-{uuid.uuid4().hex[:12]}"
    options = ServeOptions(vault=told.vault, cpu_mib=512, engine_id=engine_id)
    config = transfer_config(options)
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(directory / "fs")}]
    arguments = [*command(str(model), options, server_arguments(port))[:-1], json.dumps(config)]
    with Server(
        arguments,
        server_environment(os.environ),
        log=directory / "log",
        port=port,
        engine_id=engine_id,
        model="demo",
    ) as server:
        server.wait_ready()
        prompts = [fitted(server, prompt) for prompt in conversations(text)]
        prompts.append(dataclasses.replace(prompts[0], salt=f"second {prompts[0].salt}"))
        for prompt in prompts:
            server.client.complete(prompt, max_tokens=16)
        _settle(directory / "fs")
        memory = server.memory()
        tokens = tuple(_tokens(port, prompt.prompt) for prompt in prompts)
        server.stop()
    report = search_directory(memory, directory / "fs")
    return Control(directory / "fs", len(memory), report.windows_found, tuple(prompts), tokens)


def test_the_same_search_finds_everything_in_the_fs_tier(control: Control, told: Told) -> None:
    assert control.windows > 100_000
    assert control.windows_found == control.windows
    # It is the same plaintext that was looked for in the vault, as far as can be told from outside.
    assert control.windows == told.document["windows_searched"]


def _names(vault: Path) -> bytes:
    paths = [path.relative_to(vault) for path in sorted(vault.rglob("*"))]
    return "\n".join(str(path) for path in paths).encode()


def _visible(vault: Path) -> dict[str, bytes]:
    """What somebody sees who has the disk, besides ciphertext: names, and the catalog's files."""
    files = {
        path.name: path.read_bytes()
        for path in vault.iterdir()
        if path.is_file()  # the catalog, what SQLite keeps beside it, the descriptor
    }
    assert any(len(data) > 10_000 for data in files.values())
    return {"names": _names(vault), **files}


def _forms(data: bytes) -> list[bytes]:
    """How bytes could be written down."""
    import base64

    hexadecimal = data.hex().encode()
    return [data, hexadecimal, hexadecimal.upper(), base64.b64encode(data).rstrip(b"=")[:-1]]


def test_block_hashes_do_not_appear(control: Control, told: Told) -> None:
    hashes = control.hashes()
    # The positive control: these are the hashes of the vault's blocks. Who has the key finds all.
    from vllm.v1.kv_offload.base import make_offload_key

    keys = [make_offload_key(value, 0) for value in hashes]
    with Vault.open(told.vault, read_only=True) as vault:
        (namespace,) = [facts.namespace for facts in vault.namespaces()]
        found = [vault.contains(vault.scope(name, namespace), keys) for name in TENANTS]
    assert all(any(pair) for pair in zip(*found, strict=True))
    assert not all(found[0])
    assert not all(found[1])

    seen = _visible(told.vault)
    for value in hashes:
        # A part of a hash would confirm a guess as well as all of it.
        for part in (value, value[:8], value[-8:]):
            for form in _forms(part):
                assert not any(form in data for data in seen.values())
    fs_names = _names(control.directory)
    assert all(value.hex().encode() in fs_names for value in hashes)


@pytest.mark.parametrize("tenant", TENANTS)
def test_tenant_names_do_not_appear(told: Told, tenant: str) -> None:
    with Vault.open(told.vault, read_only=True) as vault:
        assert tenant in {facts.name for facts in vault.tenants()}  # who has the key reads them
    seen = _visible(told.vault)
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        form = tenant.encode(encoding)
        assert not any(form in data.lower() for data in seen.values())


def test_tokens_and_prompts_do_not_appear(control: Control, told: Told) -> None:
    seen = _visible(told.vault)
    for prompt, tokens in zip(control.prompts, control.tokens, strict=True):
        assert len(tokens) > 2000
        for start in range(0, len(tokens) - 8, 8):
            run = tokens[start : start + 8]
            forms = [b"".join(t.to_bytes(size, "little") for t in run) for size in (2, 4, 8)]
            forms += [separator.join(map(str, run)).encode() for separator in (",", ", ", " ")]
            assert not any(form in data for form in forms for data in seen.values())
        text = prompt.prompt.encode()
        for start in range(0, len(text) - 24, 24):
            assert not any(text[start : start + 24] in data for data in seen.values())


def test_the_key_is_not_in_the_vault(told: Told) -> None:
    provider = layout.read_descriptor(told.vault).provider
    assert provider.startswith("file:")
    key = Path(provider.removeprefix("file:"))
    assert key.is_file()
    assert told.vault not in key.parents


# -- endings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGTERM, signal.SIGTERM, signal.SIGHUP],  # nor when it is hurried
    ],
)
def test_a_demo_that_is_interrupted_leaves_nothing(
    tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    before = _regions()
    process = _demo(tmp_path, "--json")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("starting vLLM" in line for line in lines)
    while not _processes(tmp_path):  # the server's configuration names the vault
        assert process.poll() is None
        time.sleep(0.1)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.01)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    assert _processes(tmp_path) == []
    assert _regions() <= before
    assert _left(tmp_path) == []


def test_a_server_that_does_not_start_is_explained(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    directory = tmp_path / "tmp"
    directory.mkdir()
    process = _demo(directory, "--model-dir", str(model))
    stdout, stderr = process.communicate()
    assert process.returncode == 1
    assert re.search(r"^log ", stdout, flags=re.MULTILINE)
    assert re.search(r"^error: the server ended while starting", stderr, flags=re.MULTILINE)
    assert re.search(r"^hint: ", stderr, flags=re.MULTILINE)
    assert _left(directory) == []


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    process = _demo(tmp_path, "--model-dir", str(tmp_path))
    _, stderr = process.communicate()
    assert process.returncode == 2
    assert "no model" in stderr
    assert _left(tmp_path) == []
