"""Fixtures of the crash tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.crypto.providers import FileProvider
from kvvault.vault import Vault
from tests.crash.blocks import OPTIONS
from tests.crash.processes import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Recoveries are the rule here; their warnings would fill the screen."""
    caplog.set_level(logging.CRITICAL, "kvvault")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a key file, in which vaults can be made."""
    FileProvider.create(tmp_path / "key")
    return tmp_path


@pytest.fixture
def path(place: Path) -> Path:
    """A new, empty, closed vault."""
    Vault.create(
        place / "vault", provider=FileProvider.open(place / "key"), options=OPTIONS
    ).close()
    return place / "vault"
