"""One OpenBao server for all tests of a run that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvvault.crypto.providers import KeyProvider, open_provider

from .bao import Bao, running_bao, uri


@pytest.fixture(scope="session")
def bao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bao]:
    with running_bao(tmp_path_factory.mktemp("bao")) as server:
        yield server


@pytest.fixture
def token(bao: Bao, monkeypatch: pytest.MonkeyPatch) -> str:
    """A token of the documented policy, which the environment then has."""
    made = bao.token()
    for name in ("BAO_TOKEN", "VAULT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BAO_TOKEN", made)
    return made


@pytest.fixture
def place(bao: Bao) -> str:
    """A name of its own on the server."""
    return uri(bao)


@pytest.fixture
def provider(place: str, token: str) -> KeyProvider:
    return open_provider(place, create=True)
