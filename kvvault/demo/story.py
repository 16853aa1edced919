"""``kvvault demo``: two tenants' prompts survive the restart of a real vLLM, encrypted on disk.

Everything is real: vLLM's OpenAI server, started as ``kvvault serve`` starts it; HTTP requests; a
vault with a key file and SQLite in a local directory. Only the model is a toy, with random weights,
so that the demo needs no download and no GPU; KV cache is KV cache.

The course:

1. A vault is made and the server started. Each tenant sends two long prompts, which all begin with
   the same system part, and sends each once more, which vLLM answers from its own memory. Bob's
   first one must not profit from Alice's having computed the system part. Alice sends her first
   prompt once more under a second salt, for step 4.
2. When everything is stored, the plaintext is read from the engine's shared memory, and the vault
   is searched for it byte by byte, while the server runs and again after it was stopped.
3. The server is started again: its memory is empty.
4. Bob sends Alice's first prompt under her second salt: for vLLM these are her blocks, and only the
   vault knows better. (First of all, so that nothing in memory can answer.)
5. The same four prompts are sent again. They come from disk, and the answers must be the same.
6. Bob sends Alice's first prompt under his own salt: nothing but the system part, which he has
   computed himself, may be cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

import platformdirs

from kvvault.demo.client import Answer
from kvvault.demo.models import DEMO_LLAMA, build_model
from kvvault.demo.prompts import TENANTS, Conversation, conversations, project_text
from kvvault.demo.report import Exchange, PlaintextSearch, Report, Stranger
from kvvault.demo.search import SearchReport, Windows, search_directory
from kvvault.demo.server import HOST, Server, free_port
from kvvault.errors import KvvaultError, OperationCancelledError, UsageError
from kvvault.integrations.vllm.serve import ServeOptions, command, environment
from kvvault.model import VaultStats
from kvvault.vault import Vault

__all__ = ["ENGINE_BLOCK_TOKENS", "fitted", "run", "server_arguments", "server_environment"]

ENGINE_BLOCK_TOKENS: Final = 32
"""Tokens of an engine block; vLLM for CPUs wants a multiple of 32."""
_CPU_MIB: Final = 512
"""More than all KV of the demo: the primary tier still holds everything when it is read."""
_MAX_TOKENS: Final = 16
_MODEL_NAME: Final = "demo"
_SETTLED_S: Final = 3.0
_STORE_LIMIT_S: Final = 60.0
_PLANTED: Final = 200
_KEEP_MODELS_S: Final = 86400.0

Say = Callable[[str], None]


def server_arguments(port: int, *, dtype: str = "float32") -> list[str]:
    """vLLM options of the demo's server, besides the model and the tier.

    The small model runs in float32, which is the faster type on most CPUs.
    """
    return [
        *("--host", HOST, "--port", str(port)),
        *("--served-model-name", _MODEL_NAME),
        *("--dtype", dtype),
        *("--block-size", str(ENGINE_BLOCK_TOKENS)),
        *("--max-model-len", "8192"),
        *("--seed", "0"),
        *("--generation-config", "vllm"),
        *("--shutdown-timeout", "30"),
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]


def server_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: as `kvvault serve`, sized for a toy, and without network."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM would take half the machine
        "TORCHDYNAMO_DISABLE": "1",  # else it looks for a C++ compiler, and gains nothing here
        **environment(base),
        "HF_HUB_OFFLINE": "1",
    }


def run(*, model_dir: Path | None = None, keep: bool = False, say: Say) -> dict[str, object]:
    """Tell the story.

    Args:
        model_dir: a model in Hugging Face format to use; None makes a small one, once.
        keep: leave vault, key and server log in place, and say where.
        say: takes the story, line by line, as it happens.

    Returns:
        The JSON document (see docs/demo.md). Its ``ok`` says whether every promise was kept.

    Raises:
        KvvaultError: the server did not start, broke off, or could not be understood.
        OperationCancelledError: Ctrl-C, or SIGTERM.
    """
    with _interruptible(), _warned_once():
        work = Path(tempfile.mkdtemp(prefix="kvvault-demo-", dir=_disk()))
        try:
            document = _Story(work, model_dir, say).tell()
            return {**document, "directory": str(work) if keep else None}
        finally:
            if keep:
                say(f"kept {work}: vault, key and server log")
            else:
                shutil.rmtree(work, ignore_errors=True)


def _disk() -> Path:
    """A directory that is most likely on a disk: /tmp often is not."""
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK):  # noqa: S108
        return Path("/var/tmp")  # noqa: S108
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let signals end the demo in good order: the server is stopped and the files are removed.

    Only the first one counts; the next would disturb just that, and `timeout` sends two.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise OperationCancelledError("stopped on request", hint="run it again when you like")

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _warned_once() -> Iterator[None]:
    """Show each warning of the vault once, though the demo opens it several times."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in seen
        seen.add(message)
        return new

    logger = logging.getLogger("kvvault.vault")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


class _Story:
    """One demo, told once."""

    def __init__(self, work: Path, model_dir: Path | None, say: Say) -> None:
        self._vault = work / "vault"
        self._log = work / "server.log"
        self._key = f"file:{work / 'key.json'}"
        self._model_dir = model_dir
        self._say = say
        self._started = time.monotonic()
        self._start_s: list[float] = []
        self._clean = True

    def tell(self) -> dict[str, object]:
        say = self._say
        say("Two tenants, a real vLLM, one encrypted vault.")
        text = project_text()
        model = self._model(text)
        Vault.create(self._vault, provider=self._key).close()
        say(f"vault    {self._vault}, its key beside it")
        with self._server(model) as server:
            version = server.client.server_version()
            prompts = [fitted(server, prompt) for prompt in conversations(text)]
            salted = dataclasses.replace(prompts[0], salt=f"second {prompts[0].salt}")
            computed = [self._ask(server, prompt, "computed") for prompt in prompts]
            memory = [self._ask(server, prompt, "from memory") for prompt in prompts]
            self._ask(server, salted, "computed, under a second salt")
            stats, block_bytes = self._wait_stored()
            plaintext = server.memory()
            say(f"memory   {len(plaintext)} different pieces of 64 bytes, in plaintext")
            searches = [self._search(plaintext, "while the server runs")]
            self._stop(server)
        searches.append(self._search(plaintext, "after it stopped"))
        search = PlaintextSearch(
            windows_total=plaintext.total,
            windows_constant=plaintext.constant,
            windows_searched=len(plaintext),
            reports=tuple(searches),
            control_planted=min(_PLANTED, len(plaintext)),
            control_found=_control(plaintext),
        )
        del plaintext

        with self._server(model) as server:
            other = prompts[-1]
            stolen = dataclasses.replace(salted, tenant=other.tenant)
            with_her_salt = self._ask(server, stolen, f"with {salted.tenant}'s prompt and salt")
            disk = [self._ask(server, prompt, "from disk") for prompt in prompts]
            stolen = dataclasses.replace(prompts[0], tenant=other.tenant, salt=other.salt)
            with_own_salt = self._ask(server, stolen, f"with {salted.tenant}'s prompt")
            self._stop(server)

        # What a tenant's second prompt finds cached is the system part, computed for its first.
        system_tokens = computed[-1].cached_tokens
        first_of_other = next(i for i, p in enumerate(prompts) if p.tenant == other.tenant)
        strangers = (
            Stranger("the shared system part, first run", computed[first_of_other], 0),
            Stranger("another's prompt and salt, after the restart", with_her_salt, 0),
            Stranger("another's prompt, after the restart", with_own_salt, system_tokens),
        )
        report = Report(
            vllm_version=version,
            model=model.name,
            engine_block_tokens=ENGINE_BLOCK_TOKENS,
            exchanges=tuple(map(Exchange, prompts, computed, memory, disk)),
            strangers=strangers,
            blocks=stats.blocks,
            block_bytes=block_bytes,
            bytes_on_disk=searches[-1].bytes_searched,
            search=search,
            server_start_s=tuple(self._start_s),
            stopped_cleanly=self._clean,
            elapsed_s=time.monotonic() - self._started,
        )
        for line in report.summary():
            say(line)
        return report.document()

    # -- the parts --------------------------------------------------------------------------------

    def _model(self, text: str) -> Path:
        if self._model_dir is not None:
            if not (self._model_dir / "config.json").is_file():
                raise UsageError(
                    "there is no model in that directory (no config.json)",
                    hint="name a directory in Hugging Face format, or leave --model-dir out",
                )
            return self._model_dir.absolute()
        self._say("model    a small Llama with random weights (made once, then reused) ...")
        cache = platformdirs.user_cache_path("kvvault") / "models"
        model = build_model(DEMO_LLAMA, text, cache)
        _forget_old_models(cache, model)
        return model

    @contextlib.contextmanager
    def _server(self, model: Path) -> Iterator[Server]:
        """A running server. When something goes wrong with it, the end of its log is told."""
        engine_id = f"kvvault-demo-{uuid.uuid4().hex[:12]}"
        port = free_port()
        options = ServeOptions(
            vault=self._vault,
            default_tenant=None,
            tenants=TENANTS,
            cpu_mib=_CPU_MIB,
            engine_id=engine_id,
        )
        dtype = "float32" if self._model_dir is None else "auto"
        again = " again: its memory is empty" if self._start_s else ", as `kvvault serve` does"
        self._say(f"server   starting vLLM{again} ...")
        with Server(
            command(str(model), options, server_arguments(port, dtype=dtype)),
            server_environment(os.environ),
            log=self._log,
            port=port,
            engine_id=engine_id,
            model=_MODEL_NAME,
        ) as server:
            try:
                self._start_s.append(server.wait_ready())
                version = server.client.server_version()
                self._say(f"server   vLLM {version} is ready after {self._start_s[-1]:.0f} s")
                yield server
            except KvvaultError as error:
                if not isinstance(error, OperationCancelledError):
                    for line in server.last_lines():
                        self._say(f"log      {line}")
                raise

    def _stop(self, server: Server) -> None:
        clean = server.stop()
        self._clean = self._clean and clean
        self._say(f"server   stopped{'' if clean else ' (it had to be killed)'}")

    def _ask(self, server: Server, conversation: Conversation, how: str) -> Answer:
        answer = server.client.complete(conversation, max_tokens=_MAX_TOKENS)
        self._say(
            f"prompt   {conversation.tenant}, {conversation.title}: "
            f"{answer.prompt_tokens} tokens, {answer.cached_tokens} cached, "
            f"first token after {answer.first_token_s:.2f} s ({how})"
        )
        return answer

    def _wait_stored(self) -> tuple[VaultStats, int]:
        """Wait until nothing is added to the vault any more; what it holds, and its block size."""
        with Vault.open(self._vault, read_only=True) as vault:
            started = settled = time.monotonic()
            stats = vault.stats()
            while time.monotonic() - settled < _SETTLED_S or not stats.blocks:
                if time.monotonic() - started > _STORE_LIMIT_S:
                    break
                time.sleep(0.2)
                now = vault.stats()
                if now.blocks != stats.blocks:
                    settled = time.monotonic()
                stats = now
            sizes = [facts.namespace.block_bytes for facts in vault.namespaces()]
        self._say(
            f"stored   {stats.blocks} blocks, {stats.data_bytes / 1e6:.0f} MB of KV, "
            f"{stats.tenants} tenants, each with a key of its own"
        )
        return stats, max(sizes, default=0)

    def _search(self, memory: Windows, when: str) -> SearchReport:
        report = search_directory(memory, self._vault)
        self._say(
            f"search   each of them, at every byte of {report.files} files "
            f"({report.bytes_searched / 1e6:.0f} MB), {when}: found {report.hits}"
        )
        return report


def fitted(server: Server, conversation: Conversation) -> Conversation:
    """The conversation, in a length that makes memory and disk comparable to the last bit.

    Of a prompt that ends with its last block, vLLM computes that whole block when it finds the
    others in its memory, and one token when it finds all of them on disk: the same sums, in another
    order. Any other length leaves the same rest to be computed in both cases.
    """
    while server.client.count_tokens(conversation.prompt) % ENGINE_BLOCK_TOKENS == 0:
        conversation = dataclasses.replace(conversation, prompt=conversation.prompt + "Please.\n")
    return conversation


def _control(memory: Windows) -> int:
    """How many of `_PLANTED` windows the search finds where they are certain to be."""
    planted = memory.sample(_PLANTED)
    hidden = b"".join(os.urandom(1 + number % 97) + window for number, window in enumerate(planted))
    return len({int(n) for _, numbers in memory.find(io.BytesIO(hidden)) for n in numbers})


def _forget_old_models(cache: Path, current: Path) -> None:
    """Every release's documentation makes another model; those of others go after a day."""
    family = current.name.partition("-")[0]
    for path in cache.glob(f"{family}-*"):
        with contextlib.suppress(OSError):
            if path != current and time.time() - path.stat().st_mtime > _KEEP_MODELS_S:
                shutil.rmtree(path)
