"""Fixtures of the lifecycle's tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.catalog.catalog import Catalog

SHM = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: nothing here is about the disk."""
    with tempfile.TemporaryDirectory(
        prefix="kvvault-lifecycle-", dir=SHM if os.access(SHM, os.W_OK) else None
    ) as directory:
        yield Path(directory)


@pytest.fixture
def catalog(memory: Path) -> Iterator[Catalog]:
    """A new catalog."""
    opened = Catalog.open(memory / "catalog.sqlite3", create=True)
    yield opened
    opened.close()
