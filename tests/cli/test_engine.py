"""serve, demo, bench: what is handed to the modules that do the work, and what comes back."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvvault.errors import OperationCancelledError
from kvvault.integrations.vllm import serve as serving
from tests.cli.conftest import Place
from tests.cli.support import run


@dataclass
class Started:
    """What `serve` was called with."""

    model: str = ""
    options: serving.ServeOptions | None = None
    extra: Sequence[str] = ()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    seen = Started()

    def start(model: str, options: serving.ServeOptions, extra_args: Sequence[str]) -> None:
        seen.model, seen.options, seen.extra = model, options, extra_args

    monkeypatch.setattr(serving, "run", start)
    return seen


CASES: list[tuple[list[str], str, list[str]]] = [
    (["MODEL"], "MODEL", []),
    (["MODEL", "--max-model-len", "512"], "MODEL", ["--max-model-len", "512"]),
    (["MODEL", "--a", "--b=c", "-O3", "-tp", "2"], "MODEL", ["--a", "--b=c", "-O3", "-tp", "2"]),
    (["MODEL", "--config", "v.yaml", "--json"], "MODEL", ["--config", "v.yaml", "--json"]),
    (["MODEL", "--help"], "MODEL", ["--help"]),
    (["MODEL", "--debug"], "MODEL", ["--debug"]),
    (["MODEL", "--", "--vault", "theirs"], "MODEL", ["--vault", "theirs"]),
    (["MODEL", "--x", "--", "--y", "--", "z"], "MODEL", ["--x", "--y", "--", "z"]),
    (["--", "-model", "--x"], "-model", ["--x"]),
    (["--debug", "MODEL", "--x"], "MODEL", ["--x"]),
    (["MODEL", ""], "MODEL", [""]),
]


@pytest.mark.parametrize(("arguments", "model", "extra"), CASES)
@pytest.mark.parametrize("flags_first", [True, False])
def test_what_is_ours_and_what_is_vllms(
    started: Started,
    tmp_path: Path,
    arguments: list[str],
    model: str,
    extra: list[str],
    flags_first: bool,
) -> None:
    flags = ["--vault", str(tmp_path), "--tenant=a", "--tenant", "b", "--cpu-mib", "7"]
    if flags_first:
        line = [*flags, *arguments]
    else:
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        line = [*arguments[:cut], *flags, *arguments[cut:]]
    result = run("serve", *line)
    assert result.code == 0, result
    assert (started.model, list(started.extra)) == (model, extra)
    assert started.options is not None
    assert started.options.vault == tmp_path
    assert started.options.tenants == ("a", "b")
    assert started.options.cpu_mib == 7


def test_the_options_of_serve(started: Started, tmp_path: Path) -> None:
    run("serve", "M", "--vault", tmp_path)
    assert started.options == serving.ServeOptions(tmp_path)
    run(
        "serve",
        "M",
        *("--vault", tmp_path, "--key-provider", "file:/k", "--default-tenant", "t"),
        *("--canonical-layout", "--blocks-per-chunk", "4"),
    )
    assert started.options == serving.ServeOptions(
        tmp_path, "file:/k", "t", canonical_layout=True, blocks_per_chunk=4
    )
    run("serve", "M", "--vault", tmp_path, "--no-default-tenant")
    assert started.options is not None
    assert started.options.default_tenant is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nope", "MODEL"],
        ["MODEL", "--cpu-mib", "0"],
        ["MODEL", "--cpu-mib", "many"],
        ["MODEL", "--vault"],
        ["--vault"],
        [],
        ["--"],
    ],
)
def test_bad_serve_lines(started: Started, tmp_path: Path, arguments: list[str]) -> None:
    result = run("serve", *arguments)
    assert result.code == 2
    result.assert_two_lines()
    assert started.model == ""


def test_serve_without_vllm_says_what_to_install(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    result = run("serve", "MODEL", *place.flags)
    assert result.code == 2
    result.assert_two_lines()
    assert "kvvault[vllm]" in result.err


@pytest.mark.parametrize("command", ["demo", "bench tier"])
def test_nor_do_demo_and_bench_work_without_vllm(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    result = run(*command.split())
    assert result.code == 1
    result.assert_two_lines()
    assert "kvvault[vllm]" in result.err


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed: these tests are about the command line."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())


def fake(monkeypatch: pytest.MonkeyPatch, name: str, run_: Callable[..., Any]) -> None:
    module = ModuleType(name)
    vars(module)["run"] = run_
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("good", [True, False])
def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: bool) -> None:
    seen: dict[str, object] = {}

    def story(
        *, model_dir: Path | None, keep: bool, say: Callable[[str], None]
    ) -> Mapping[str, object]:
        seen.update(model_dir=model_dir, keep=keep)
        say("Once upon a time")
        return {"ok": good, "plaintext_hits": 0}

    fake(monkeypatch, "kvvault.demo.story", story)
    result = run("demo")
    assert result.code == (0 if good else 1)
    assert result.out == "Once upon a time\n"
    assert seen == {"model_dir": None, "keep": False}
    result = run("demo", "--json", "--keep", "--model-dir", tmp_path)
    assert result.code == (0 if good else 1)
    assert result.document == {"ok": good, "plaintext_hits": 0}
    assert "Once upon a time" in result.err
    assert seen == {"model_dir": tmp_path, "keep": True}


@pytest.mark.usefixtures("with_vllm")
def test_a_demo_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(**_: object) -> Mapping[str, object]:
        raise KeyboardInterrupt

    fake(monkeypatch, "kvvault.demo.story", story)
    result = run("demo")
    assert result.code == OperationCancelledError.exit_code
    result.assert_two_lines()


@dataclass(frozen=True)
class Figures:
    """As `kvvault.bench.tier.TierResult`."""

    block_bytes: int
    op: str
    kvvault_gbps: float = 2.0
    fs_gbps: float = 1.0
    ratio: float = 2.0
    cpu_s_per_gb: float = 0.25
    fs_cpu_s_per_gb: float = 0.5
    ratio_low: float = 1.5
    ratio_high: float = 2.5


@pytest.mark.usefixtures("with_vllm")
def test_bench_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stdout")

    def measure(
        *,
        directory: Path | None,
        sizes: Sequence[int],
        repeat: int,
        progress: Callable[[str], None],
    ) -> list[Figures]:
        assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
        logging.getLogger("kvvault.vault").warning("keys and disk of a throw-away vault")
        seen.update(directory=directory, sizes=list(sizes), repeat=repeat)
        progress("round 1")
        return [Figures(size, op) for size in sizes for op in ("store", "load")]

    fake(monkeypatch, "kvvault.bench.tier", measure)
    result = run("bench", "tier")
    assert result.code == 0
    assert result.err == "round 1\n"
    assert seen == {"directory": None, "sizes": [65536, 262144, 2 << 20, 16 << 20], "repeat": 5}
    assert "16.0 MiB" in result.out
    result = run(
        "bench", "tier", "--json", "--sizes", "64KiB, 1MiB", "--repeat", "1", "--dir", tmp_path
    )
    assert seen == {"directory": tmp_path, "sizes": [65536, 1 << 20], "repeat": 1}
    rows = result.document["results"]
    assert [row["block_bytes"] for row in rows] == [65536, 65536, 1 << 20, 1 << 20]
    assert rows[0]["op"] == "store"
    assert rows[0]["ratio"] == 2.0


def test_version() -> None:
    document = run("version", "--json").document
    assert document["kvvault"]
    assert document["cryptography"]
    assert run("version").out.startswith("kvvault ")


def test_bench_inventory(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    result = run("bench", "inventory", "--requests", "3", "--dir", here, "--json")
    assert result.code == 0
    figures = result.document
    assert (figures["requests"], figures["not_recorded"]) == (3, 0)
    assert figures["recorded"] >= 3
    assert 0 < figures["prompt_us_p50"] <= figures["prompt_us_p99"]
    assert 0 < figures["record_us_p50"] <= figures["record_us_p99"]
    assert list(here.iterdir()) == []
    assert "record_us_p99" in run("bench", "inventory", "--requests", "1", "--dir", here).out
    assert run("bench", "inventory", "--dir", tmp_path / "none").code == 2
