"""Both local providers, and the way `open_provider` hands them out, keep the contract."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvvault.crypto.providers import (
    Assurance,
    EphemeralProvider,
    FileProvider,
    KeyProvider,
    TimeLimited,
    open_provider,
)
from kvvault.testing import FaultyProvider, KeyProviderConformance


class TestEphemeral(KeyProviderConformance):
    assurance = Assurance.PURGE

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        return EphemeralProvider()

    def root_keys(self, provider: KeyProvider) -> list[bytes]:
        assert isinstance(provider, EphemeralProvider)
        return [bytes(key) for key in provider._keys.values()]

    def test_req_k8_destroy_overwrites_the_key(self) -> None:
        provider = EphemeralProvider()
        doomed, kept = provider.create_epoch(), provider.create_epoch()
        doomed_key, kept_key = provider._keys[doomed], provider._keys[kept]
        provider.destroy(doomed)
        assert not any(doomed_key)
        assert any(kept_key)


class TestFile(KeyProviderConformance):
    assurance = Assurance.LOGICAL

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        return FileProvider.create(tmp_path / "root.key")

    def reopen(self, provider: KeyProvider) -> KeyProvider | None:
        location = provider.describe().location
        assert location is not None
        return FileProvider.open(location)

    def root_keys(self, provider: KeyProvider) -> list[bytes]:
        location = provider.describe().location
        assert location is not None
        document = json.loads(location.read_text())
        return [bytes.fromhex(entry["key"]) for entry in document["epochs"]]


class TestFileByUri(TestFile):
    """As everybody gets it: behind the time limit."""

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        return open_provider(f"file:{tmp_path}/root.key", create=True)

    def reopen(self, provider: KeyProvider) -> KeyProvider | None:
        return open_provider(provider.describe().uri)


class TestHungPlace(TestFile):
    """A file system that stops answering."""

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        return TimeLimited(FaultyProvider(super().make_provider(tmp_path)))

    def hanging(self, provider: KeyProvider) -> AbstractContextManager[None] | None:
        assert isinstance(provider, TimeLimited)
        assert isinstance(provider._inner, FaultyProvider)
        return provider._inner.hanging()


class TestTheSuiteItself:
    """A provider that breaks the contract does not pass."""

    def test_a_provider_that_only_pretends_to_destroy(self, tmp_path: Path) -> None:
        class Pretender(EphemeralProvider):
            def destroy(self, epoch: str, *, timeout: float = 1.0) -> None:
                pass

        suite = TestEphemeral()
        with pytest.raises(pytest.fail.Exception):
            suite.test_req_k1_k4_destroyed_epoch_refuses_and_others_still_open(Pretender())

    def test_a_provider_that_ignores_associated_data(self, tmp_path: Path) -> None:
        class Careless(EphemeralProvider):
            def wrap(
                self, epoch: str, key: bytes | bytearray, aad: bytes, *, timeout: float = 1.0
            ) -> bytes:
                return super().wrap(epoch, key, b"", timeout=timeout)

            def unwrap(
                self, epoch: str, wrapped: bytes, aad: bytes, *, timeout: float = 1.0
            ) -> bytearray:
                return super().unwrap(epoch, wrapped, b"", timeout=timeout)

        suite = TestEphemeral()
        with pytest.raises(pytest.fail.Exception):
            suite.test_req_c3_wrong_aad_is_refused(Careless())
        suite.test_req_c3_wrong_aad_is_refused(EphemeralProvider())
