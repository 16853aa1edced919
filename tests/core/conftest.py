"""Fixtures of the core's tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.vault import Scope, Vault
from tests.core.support import Home, namespace

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory in memory, where waiting for the disk costs nothing; what needs a real disk uses
    `tmp_path`."""
    with tempfile.TemporaryDirectory(
        prefix="kvvault-test-", dir=SHM if os.access(SHM, os.W_OK) else None
    ) as directory:
        yield Path(directory)


@pytest.fixture
def home(memory: Path) -> Home:
    """Where a vault can be made."""
    return Home(Path(tempfile.mkdtemp(dir=memory)) / "vault")


@pytest.fixture
def vault(home: Home) -> Iterator[Vault]:
    """An empty vault of four-block segments."""
    with home.create() as made:
        yield made


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())
