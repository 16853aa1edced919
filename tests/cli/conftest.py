"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvvault.doctor import Machine
from kvvault.vault import Vault
from tests.cli.support import BLOCK, NAMESPACE, TENANTS, fill

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Place:
    """A closed vault, and the URI of its key."""

    path: Path
    key: str

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--vault", str(self.path), "--key-provider", self.key)


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A directory in memory: nothing here is about the disk."""
    with tempfile.TemporaryDirectory(
        prefix="kvvault-cli-", dir=SHM if os.access(SHM, os.W_OK) else None
    ) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def template(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Made once, copied for each test. The key is on another file system, as it should be."""
    key = f"file:{tmp_path_factory.mktemp('keys') / 'template.key'}"
    path = memory / "template"
    with Vault.create(path, provider=key) as vault:
        fill(vault)
    return Place(path, key)


@pytest.fixture
def place(template: Place, memory: Path) -> Iterator[Place]:
    """A vault of one's own: two tenants with six blocks each, one namespace."""
    path = Path(tempfile.mkdtemp(dir=memory)) / "vault"
    shutil.copytree(template.path, path)
    os.utime(path / "VAULT")  # made just now: no job is overdue
    yield Place(path, template.key)
    shutil.rmtree(path.parent, ignore_errors=True)


@pytest.fixture
def surroundings(tmp_path: Path) -> Machine:
    """A machine where all is well: its own /proc, /sys and /dev/shm, and a vLLM."""
    proc = tmp_path / "proc"
    (proc / "sys/kernel").mkdir(parents=True)
    (proc / "swaps").write_text("Filename Type Size Used Priority\n")
    (proc / "sys/kernel/core_pattern").write_text("core\n")
    process = proc / "1"
    (process / "fd").mkdir(parents=True)
    (process / "maps").write_text("7f00-7f01 r--p 00000000 00:00 0 \n")
    (process / "status").write_text(f"Name: x\nUid:\t{os.geteuid()} 0 0 0\n")
    (tmp_path / "sys").mkdir()
    (tmp_path / "shm").mkdir()
    vllm = tmp_path / "vllm"
    (vllm / "config").mkdir(parents=True)
    (vllm / "config/cache.py").write_text('class C:\n    prefix_caching_hash_algo: A = "sha256"\n')
    return Machine(
        proc, tmp_path / "sys", tmp_path / "shm", environ={}, vllm=lambda: vllm, core_limit=0
    )


@pytest.fixture
def filled(place: Place) -> Place:
    """Three prompts: two of the first tenant, which share two blocks, one of the second."""
    with Vault.open(place.path, provider=place.key) as vault:
        for tenant, name, subject, own in (
            (TENANTS[0], "r1", "jane", 1),
            (TENANTS[0], "r2", "joe", 2),
            (TENANTS[1], "r3", None, 1),
        ):
            scope = vault.scope(tenant, NAMESPACE)
            names = [b"shared 0", b"shared 1", *(f"{name} {n}".encode() for n in range(own))]
            chain = {k: 16 * (i + 1) for i, k in enumerate(names)}
            prompt = vault.prompt(scope, request_id=name, subject=subject, labels={"team": "x"})
            buffers = [bytes(BLOCK)] * len(names)
            vault.put(scope, names, buffers, prompt=prompt, ends=list(chain.values()))
            vault.record(prompt, chain)
            vault.settle_prompts()
    return place
