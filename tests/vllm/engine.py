"""Real vLLM engines for tests, each in a process of its own.

Importing vLLM takes longer than starting a small engine, so one process imports it and forks for
each engine. The forked process starts from nothing else: its scheduler, its connector, its tiers
and its workers are new, which is what a restart means to a vault. `Engines` is the handle in the
test process; the other half of this file runs in the forking process.

What bit-identical output takes, found by trying (on CPU, vLLM 0.32): float32; the same number of
OpenMP threads (vLLM takes away one more core when a KV connector is configured, unless threads are
bound explicitly); requests one after another; and prefill chunks that end where a cache hit ends.
With `max_num_batched_tokens=512` and blocks of 32, a prompt of 512 k + r tokens, 1 <= r <= 32, is
computed in chunks of 512 with a tail of r, and after a hit the same tail of r is computed on its
own. Other prompts differ in the last bits, hit or not, because kernels sum in another order for
another shape; so they do between a run with and one without a hit in vLLM's own prefix cache.
Different tensor-parallel degrees always differ in the last bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

BLOCK_TOKENS = 32
CHUNK_TOKENS = 512

ENGINE: Mapping[str, object] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "block_size": BLOCK_TOKENS,
    "max_num_batched_tokens": CHUNK_TOKENS,
}
"""Arguments of `vllm.LLM` that every engine gets; see above for why."""


@dataclass(frozen=True)
class Prompt:
    """One request."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    salt: str | None = None
    kv_transfer_params: Mapping[str, object] | None = None
    wait_s: float = 0.0
    """Seconds to let pass before, with the engine idle."""
    forget_first: bool = False
    """Empty the engine's own prefix cache before; the CPU tier and those below keep theirs."""


@dataclass(frozen=True)
class Job:
    """One engine and what it is asked."""

    model: str
    prompts: tuple[Prompt, ...]
    kv_transfer_config: Mapping[str, object] | None = None
    tensor_parallel: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    """More arguments of `vllm.LLM`."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """Per position the five likeliest (token, logprob), likeliest first."""
    cached: int
    """Prompt tokens that were not computed."""

    def distance(self, other: Answer) -> float:
        """Largest difference between logprobs of the same token at the same position."""
        return max(
            abs(dict(mine).get(token, -1e9) - value)
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
            for token, value in theirs[:1]
        )


@dataclass(frozen=True)
class Report:
    version: str
    answers: tuple[Answer, ...]

    @property
    def cached(self) -> tuple[int, ...]:
        return tuple(answer.cached for answer in self.answers)

    @property
    def output(self) -> tuple[tuple[object, ...], ...]:
        """Tokens and logprobs, to compare bit by bit."""
        return tuple((answer.tokens, answer.logprobs) for answer in self.answers)


def transfer_config(tiers: Sequence[Mapping[str, object]], **extra: object) -> dict[str, object]:
    """vLLM's `kv_transfer_config` with our spec and these secondary tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KvvaultOffloadingSpec",
            "spec_module_path": "kvvault.integrations.vllm.spec",
            "cpu_bytes_to_use": 128 << 20,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **extra,
        },
    }


def full_blocks(prompt: Prompt) -> int:
    """Tokens of a prompt that a cache can supply: its full blocks, the last token excepted."""
    return (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class EngineFailedError(AssertionError):
    """An engine did not answer; carries the end of its log."""


class Engines:
    """Runs engines one after another. Use as a context manager."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._answers: IO[str] | None = None

    def __enter__(self) -> Self:
        cores = sorted(os.sched_getaffinity(0))[:2]
        reader, writer = os.pipe()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine", str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=Path(__file__).parents[2],
                pass_fds=(writer,),
                start_new_session=True,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": str(len(cores)),
                    "TORCHDYNAMO_DISABLE": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_LOGGING_LEVEL": "WARNING",
                    "VLLM_NO_USAGE_STATS": "1",
                },
            )
        os.close(writer)
        self._answers = os.fdopen(reader)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process, answers = self._process, self._answers
        assert process is not None
        assert process.stdin is not None
        assert answers is not None
        process.stdin.close()
        answers.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own session: engine and workers
            process.wait()

    def run(self, job: Job, *, timeout: float = 400) -> Report:
        """Start an engine, ask, wait until everything is stored, shut it down.

        Raises:
            EngineFailedError: it raised, died or took longer than `timeout` seconds.
        """
        process, answers = self._process, self._answers
        assert process is not None
        assert process.stdin is not None
        assert answers is not None
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.flush()
        readable, _, _ = select.select([answers], [], [], timeout)
        line = answers.readline() if readable else ""
        if not line.strip():
            raise EngineFailedError(f"no answer; its log ends:\n{self._log.read_text()[-6000:]}")
        document = json.loads(line)
        return Report(
            version=document["version"],
            answers=tuple(
                Answer(
                    tokens=tuple(answer["tokens"]),
                    logprobs=tuple(
                        tuple((token, value) for token, value in position)
                        for position in answer["logprobs"]
                    ),
                    cached=answer["cached"],
                )
                for answer in document["answers"]
            ),
        )


# ------------------------------------------------------------------- the forking process


def _serve(answers: int) -> None:
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401  # imported once, here, for all engines

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                document = _answer(json.loads(line))
                os.write(answers, (document + "\n").encode())
                status = 0
            except BaseException:  # noqa: BLE001  # whatever it was, the parent reports the log
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status != 0:
            os.write(answers, b"\n")
    os._exit(0)  # nothing here needs the interpreter's slow way out


def _answer(job: Mapping[str, object]) -> str:
    from vllm.version import __version__

    from vllm import LLM, SamplingParams

    options = {**ENGINE, **_mapping(job["options"])}
    if job["kv_transfer_config"] is not None:
        options["kv_transfer_config"] = job["kv_transfer_config"]
    llm = LLM(model=job["model"], tensor_parallel_size=job["tensor_parallel"], **options)
    core: EngineCore = llm.llm_engine.engine_core.engine_core
    answers = []
    prompts = job["prompts"]
    assert isinstance(prompts, list)
    for prompt in prompts:
        until = time.monotonic() + prompt["wait_s"]
        while time.monotonic() < until:
            _drain(core)
            time.sleep(0.05)
        if prompt["forget_first"]:
            _drain(core)
            assert llm.reset_prefix_cache()
        extra = prompt["kv_transfer_params"]
        (result,) = llm.generate(
            [
                {"prompt_token_ids": prompt["tokens"]}
                | ({} if prompt["salt"] is None else {"cache_salt": prompt["salt"]})
            ],
            SamplingParams(
                temperature=0,
                max_tokens=prompt["max_tokens"],
                logprobs=5,
                ignore_eos=True,
                extra_args=None if extra is None else {"kv_transfer_params": extra},
            ),
            use_tqdm=False,
        )
        answers.append(
            {
                "tokens": list(result.outputs[0].token_ids),
                "logprobs": [
                    sorted(
                        ((token, entry.logprob) for token, entry in position.items()),
                        key=lambda pair: (-pair[1], pair[0]),
                    )
                    for position in result.outputs[0].logprobs
                ],
                "cached": result.num_cached_tokens,
            }
        )
    _drain(core)
    core.shutdown()
    return json.dumps({"version": __version__, "answers": answers})


def _drain(core: EngineCore) -> None:
    """Step until every transfer is finished, as an engine core's own loop does when idle."""
    while core.scheduler.has_requests():
        core.step_fn()
        time.sleep(0.001)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, dict)
    return value


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
