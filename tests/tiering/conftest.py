"""Fixtures of the tiering tests: vaults in memory, where waiting for the disk costs nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.vault import Vault
from tests.core.support import Home

SHM = Path("/dev/shm")


@pytest.fixture
def home() -> Iterator[Home]:
    """Where a vault can be made."""
    where = SHM if os.access(SHM, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvvault-test-", dir=where) as directory:
        yield Home(Path(directory) / "vault")


@pytest.fixture
def vault(home: Home) -> Iterator[Vault]:
    """An empty vault of four-block segments."""
    with home.create() as made:
        yield made
