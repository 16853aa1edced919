"""REQ-K5 and REQ-K6: what somebody finds who has every byte of the disk after a purge."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from kvvault.crypto.providers import (
    EphemeralProvider,
    FileProvider,
    KeyProvider,
    KeyringProvider,
    keyctl,
    open_provider,
)
from kvvault.errors import KeyDestroyedError, KvvaultError
from kvvault.model import Outcome
from kvvault.vault import Vault
from tests.core.support import SMALL, assert_hits, contents, get, keys, namespace, put, sqlite
from tests.core.test_privacy import everything_on_disk, spellings
from tests.crypto.bao import Bao, running_bao, uri

NAME = "Canary-Tenant Dr. Änne Mustermann"
LABELS = {"matter": "canary matter 4711"}
DELETED = keys(4, 100)


@pytest.fixture(scope="module")
def bao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bao]:
    with running_bao(tmp_path_factory.mktemp("bao")) as server:
        yield server


@pytest.fixture
def place(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


def keyring_works() -> bool:
    try:
        keyctl.user_keyring()
    except OSError:
        return False
    return True


def make(path: Path, provider: KeyProvider) -> Vault:
    return Vault.create(path, provider=provider, options=SMALL)


def reopen(path: Path, provider: KeyProvider) -> Vault:
    return Vault.open(path, provider=provider, options=SMALL)


def opens_something(path: Path, provider: KeyProvider) -> int:
    """How many of the blocks that were deleted a vault serves, and of those that were not."""
    try:
        with reopen(path, provider) as vault:
            found = 0
            for tenant, owner in (("alice", "a"), ("bob", "bob")):
                block_keys = [*keys(6), *DELETED]
                outcomes, data = get(vault, vault.scope(tenant, namespace()), block_keys)
                for outcome, one, right in zip(
                    outcomes, data, contents(owner, block_keys), strict=True
                ):
                    if outcome is Outcome.HIT:
                        assert one == right
                        found += 1
            return found
    except KvvaultError:
        return 0


def unwraps_something(catalog: Path, provider: KeyProvider) -> int:
    """How many of a catalog's wrapped keys the provider opens, however kvvault would look at it."""
    from kvvault.crypto.keys import lookup_key_aad, tenant_key_aad

    with sqlite.connect(str(catalog)) as connection:
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        rows = list(connection.execute("SELECT tenant_id, root_epoch, wrapped_key FROM tenants"))
    vault_id = meta["vault_id"]
    wraps = [(meta["root_epoch"].decode(), meta["lookup_key"], lookup_key_aad(vault_id))]
    wraps += [(epoch, wrapped, tenant_key_aad(vault_id, ident)) for ident, epoch, wrapped in rows]
    opened = 0
    for epoch, wrapped, aad in wraps:
        try:
            provider.unwrap(epoch, wrapped, aad)
        except KeyDestroyedError:
            continue
        opened += 1
    return opened


def snapshot_delete_purge(place: Path, provider: KeyProvider, after: Callable[[], None]) -> str:
    """A snapshot of the whole vault, taken before a deletion; then deletion and purge. Returns the
    assurance that the purge reported. `after`: called with the snapshot."""
    path = place / "vault"
    with make(path, provider) as vault:
        alice, bob = vault.scope("alice", namespace()), vault.scope("bob", namespace())
        put(vault, alice, DELETED)
        doomed = vault.segments()[0].segment_id
        put(vault, alice, keys(6))
        put(vault, bob, keys(6), "bob")
    shutil.copytree(path, place / "snapshot")
    shutil.copytree(path, place / "control")
    after()
    # The control: as long as nothing is purged, the snapshot opens.
    assert opens_something(place / "control", provider) == 16
    with reopen(path, provider) as vault:
        vault.delete_segments([doomed])
        report = vault.purge()
        assert_hits(vault, vault.scope("alice", namespace()), keys(6))
    return report.assurance


class TestSnapshot:
    """REQ-K5. "The current keys" are what the provider holds after the purge. With a key file there
    is one thing more on the disk: the file as it was, and that opens everything, which is why such
    a purge is reported as ``logical``."""

    def check_purged(self, place: Path, provider: KeyProvider) -> None:
        assert snapshot_delete_purge(place, provider, lambda: None) == "purge"
        assert unwraps_something(place / "vault" / "catalog.sqlite3", provider) == 3
        assert unwraps_something(place / "snapshot" / "catalog.sqlite3", provider) == 0
        assert opens_something(place / "snapshot", provider) == 0

    def test_req_k5_ephemeral(self, place: Path) -> None:
        self.check_purged(place, EphemeralProvider())

    def test_req_k5_kernel_keyring(self, place: Path) -> None:
        name = f"test-purge-{uuid4().hex[:8]}"
        if not keyring_works():  # then it is a clear error, see tests/crypto/test_keyring.py
            with pytest.raises(KvvaultError):
                KeyringProvider.create(name)
            return
        provider = KeyringProvider.create(name)
        try:
            self.check_purged(place, provider)
        finally:
            for epoch in provider.epochs():
                provider.destroy(epoch)

    def test_req_k5_openbao(self, place: Path, bao: Bao, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VAULT_TOKEN", raising=False)
        monkeypatch.setenv("BAO_TOKEN", bao.token())
        self.check_purged(place, open_provider(uri(bao), create=True))

    def test_req_k5_a_key_file_is_logical(self, place: Path) -> None:
        key = place / "keys" / "key"
        provider = FileProvider.create(key)
        old = place / "old"

        def keep() -> None:
            shutil.copytree(key.parent, old)

        assert snapshot_delete_purge(place, provider, keep) == "logical"
        # The file as it is now opens nothing of before …
        assert unwraps_something(place / "snapshot" / "catalog.sqlite3", provider) == 0
        shutil.copytree(place / "snapshot", place / "second")
        assert opens_something(place / "second", provider) == 0
        # … but the same disk still has the file as it was, and with that everything opens.
        assert opens_something(place / "snapshot", FileProvider.open(old / "key")) == 16


# -- REQ-K6 --------------------------------------------------------------------------------------


def wraps_in(catalog: Path) -> list[bytes]:
    """Everything in a catalog that is encrypted under a key that a purge replaces."""
    with sqlite.connect(str(catalog)) as connection:
        rows = [
            *connection.execute("SELECT wrapped_key, wrapped_index_key, sealed_name FROM tenants"),
            *connection.execute("SELECT wrapped_secret, sealed_labels FROM segments"),
            *connection.execute("SELECT value FROM meta WHERE name = 'lookup_key'"),
        ]
    return [bytes(value) for row in rows for value in row if value is not None]


def found_in(files: Iterable[bytes], needles: Iterable[bytes]) -> int:
    haystacks = list(files)
    return sum(any(needle in hay for hay in haystacks) for needle in needles)


class TestCanary:
    def test_req_k6_nothing_of_a_forgotten_tenant_is_left(
        self, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        path = place / "vault"
        provider = EphemeralProvider()
        with make(path, provider) as vault:
            gone = vault.scope(NAME, namespace(), labels=LABELS)
            put(vault, gone, keys(9), "gone")
            stays = vault.scope("bob", namespace(), labels=LABELS)
            put(vault, stays, keys(9), "bob")
            secrets = [
                bytes(key)
                for scope in (gone, stays)
                for key in (scope._keys._tenant_key, scope._keys._index_key)
            ]
            ids = [gone.block_id(key) for key in keys(9)]
            sealed = wraps_in(vault.path / "catalog.sqlite3")
            plain = [NAME, NAME.lower(), "Mustermann", *LABELS.values(), *LABELS]
            # The control: the same search finds what stands there, and a canary that is planted.
            files = everything_on_disk(path)
            assert any(name.endswith("-wal") for name in files)
            assert found_in(files.values(), sealed) == len(sealed) > 10
            assert found_in(files.values(), ids) == len(ids)
            (path / "planted").write_bytes(b"".join([NAME.encode(), *secrets]))
            planted = everything_on_disk(path).values()
            assert found_in(planted, [NAME.encode(), *secrets]) == 1 + len(secrets)
            (path / "planted").unlink()

            vault.forget(NAME)
            vault.purge()
            for moment in ("open", "closed"):
                left = everything_on_disk(path)
                hay = list(left.values())
                assert found_in(hay, sealed) == 0, moment
                assert found_in(hay, ids) == 0, moment
                for text in plain:
                    assert found_in(hay, spellings(text.encode())) == 0, (moment, text)
                for secret in secrets:
                    assert found_in(hay, spellings(secret)) == 0, moment
                for name in left:
                    assert not name.endswith("-journal")
                if moment == "open":
                    assert_hits(vault, stays, keys(9), "bob")
                    vault.close()
        logged = caplog.text.encode()
        assert logged
        assert found_in([logged], [NAME.encode(), *(s for k in secrets for s in spellings(k))]) == 0

    @pytest.mark.parametrize("seed", range(3))
    def test_req_k6_no_wrap_survives_whatever_the_pages_went_through(
        self, place: Path, seed: int
    ) -> None:
        """Many rows, so that pages of the catalog are split, merged and freed."""
        rng = random.Random(seed)
        path = place / "vault"
        with make(path, EphemeralProvider()) as vault:
            seen: set[bytes] = set()
            number = 0
            for _ in range(4):
                for _ in range(30):
                    scope = vault.scope(f"tenant {rng.randrange(12)}", namespace(), labels=LABELS)
                    count = rng.randint(1, 9)
                    put(vault, scope, keys(count, number))
                    number += count
                seen.update(wraps_in(path / "catalog.sqlite3"))
                live = [one.segment_id for one in vault.segments() if one.state.live]
                vault.delete_segments(rng.sample(live, len(live) // 3))
                vault.forget(f"tenant {rng.randrange(12)}")
                seen.update(wraps_in(path / "catalog.sqlite3"))
            files = everything_on_disk(path).values()
            assert found_in(files, seen) > 100
            vault.purge()
            assert found_in(everything_on_disk(path).values(), seen) == 0
            assert vault.verify().ok
