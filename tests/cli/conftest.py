"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvvault.vault import Vault
from tests.cli.support import fill

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
    yield Place(path, template.key)
    shutil.rmtree(path.parent, ignore_errors=True)
