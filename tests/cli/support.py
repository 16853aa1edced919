"""A vault with something in it, and ways to run the command line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvvault.cli import app
from kvvault.doctor import Machine
from kvvault.model import Namespace
from kvvault.vault import Vault

BLOCK = 4096
TENANTS = ("acme-canary", "globex-canary")
NAMESPACE = Namespace.of(BLOCK, {"model": "tiny", "dtype": "bfloat16"})
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What a run of the program left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The JSON error on stderr."""
        errors = [json.loads(line) for line in self.err.splitlines()]
        [error] = [line["error"] for line in errors if "error" in line]
        assert isinstance(error, dict)
        return error

    def assert_two_lines(self) -> None:
        """An error in the form that all errors have, and nothing else but warnings."""
        lines = [line for line in self.err.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 2, self.err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("hint: ")
        assert self.out == ""


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    """Run the program in this process, as the console script would."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def start(
    *arguments: str | Path,
    code: str = "from kvvault.cli import main; main()",
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start the program as a process of its own; `code` may prepare something first."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out or "", err or "")


def fill(vault: Vault, tenants: Sequence[str] = TENANTS, blocks: int = 6) -> None:
    """Store some blocks for each tenant."""
    noise = random.Random(0)
    for tenant in tenants:
        report = vault.put(
            vault.scope(tenant, NAMESPACE),
            [f"{tenant}-{i}".encode() for i in range(blocks)],
            [noise.randbytes(BLOCK) for _ in range(blocks)],
        )
        assert report.stored == blocks


def make_region(machine: Machine, name: str = "vllm_offload_abc.mmap", mode: int = 0o600) -> Path:
    """What a killed vLLM leaves in /dev/shm."""
    path = machine.shm / name
    path.write_bytes(bytes(8192))
    path.chmod(mode)
    return path


@contextmanager
def another_user() -> Iterator[None]:
    """Root may read everything; be somebody else where permissions are the point."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
