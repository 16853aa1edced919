"""The key provider down, slow or broken: misses and refusals, never plaintext (REQ-K9)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.crypto.providers import EphemeralProvider, FileProvider, KeyProvider, TimeLimited
from kvvault.errors import (
    FormatError,
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    UnsafeFileError,
    VaultKeyError,
    WrongKeyError,
)
from kvvault.model import Outcome, PutReport
from kvvault.testing import FaultyProvider, ManualClock
from kvvault.vault import Scope, Vault
from tests.core.support import (
    SMALL,
    Home,
    assert_hits,
    assert_missing,
    contents,
    get,
    keys,
    namespace,
    put,
)

DOWN = KeyUnavailableError("no answer", hint="wait")
CAUSES = [
    DOWN,
    UnsafeFileError("the key file is open to others", hint="chmod"),
    FormatError("the key file is damaged", hint="restore"),
]


@pytest.fixture
def provider() -> FaultyProvider:
    return FaultyProvider(EphemeralProvider())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now=time.time())  # the vault is made by the machine's clock


@pytest.fixture
def faulty(home: Home, provider: FaultyProvider) -> Home:
    """A vault with four blocks of two tenants, whose provider can be broken."""
    home.provider = provider
    with home.create() as vault:
        for tenant in ("alice", "bob"):
            put(vault, vault.scope(tenant, namespace()), keys(4), tenant)
    return home


def open_with(home: Home, clock: ManualClock) -> Vault:
    return Vault.open(home.path, provider=home.provider, options=SMALL, clock=clock)


@pytest.fixture
def elsewhere(faulty: Home) -> Iterator[Scope]:
    """A scope whose keys another handle holds, so that a vault's own key ring is still empty."""
    with faulty.open() as vault:
        yield vault.scope("alice", namespace())


class TestDown:
    @pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
    def test_req_k9_c8_loads_miss_and_say_why(
        self,
        faulty: Home,
        elsewhere: Scope,
        provider: FaultyProvider,
        clock: ManualClock,
        cause: KvvaultError,
    ) -> None:
        with open_with(faulty, clock) as vault:
            provider.fail(cause, methods={"unwrap"})
            assert_missing(vault, elsewhere, keys(4), Outcome.KEY_UNAVAILABLE)
            stats = vault.stats()
            assert (stats.key_unavailable, stats.tampered, stats.lost) == (4, 0, 0)
            assert (stats.misses, stats.io_failed, stats.hits) == (0, 0, 0)
            # What is not there at all is a plain miss also now.
            assert_missing(vault, elsewhere, keys(2, start=50))
            report = vault.verify()
            assert (report.unreadable, report.tampered, report.lost) == (8, 0, 0)
            assert [facts.name for facts in vault.tenants()] == [None, None]
            # It comes back: so do the blocks, without being opened again.
            provider.heal()
            clock.advance(2.0)
            assert_hits(vault, elsewhere, keys(4), "alice")
            assert vault.verify().ok

    def test_req_k9_it_is_asked_once_a_second_and_not_for_every_load(
        self, faulty: Home, elsewhere: Scope, provider: FaultyProvider, clock: ManualClock
    ) -> None:
        with open_with(faulty, clock) as vault:
            provider.fail(DOWN, methods={"unwrap"})
            before = provider.calls.count("unwrap")
            for _ in range(20):
                assert_missing(vault, elsewhere, keys(1), Outcome.KEY_UNAVAILABLE)
            assert provider.calls.count("unwrap") == before + 1
            clock.advance(1.5)
            get(vault, elsewhere, keys(1))
            get(vault, elsewhere, keys(1))
            assert provider.calls.count("unwrap") == before + 2

    def test_req_k9_what_is_open_already_goes_on(
        self, faulty: Home, provider: FaultyProvider
    ) -> None:
        with faulty.open() as vault:
            scope = vault.scope("alice", namespace())
            provider.fail(DOWN)
            assert_hits(vault, scope, keys(4), "alice")
            assert put(vault, scope, keys(8), "alice").stored == 4
            assert_hits(vault, scope, keys(8), "alice")

    def test_req_k9_new_tenants_are_refused_and_nothing_is_stored_for_them(
        self, faulty: Home, provider: FaultyProvider
    ) -> None:
        with faulty.open() as vault:
            provider.fail(DOWN)
            for tenant in ("alice", "carol"):
                with pytest.raises(KeyUnavailableError):
                    vault.scope(tenant, namespace())
            assert vault.stats().tenants == 2
            provider.heal()
        with faulty.open() as vault:
            assert put(vault, vault.scope("carol", namespace()), keys(2), "carol").stored == 2

    def test_req_k9_stores_are_refused_and_nothing_is_written_in_clear(
        self, faulty: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The tenant's key is in memory as a rule; here making a segment key fails all the same.
        def down(*_args: object) -> None:
            raise DOWN

        with faulty.open() as vault:
            scope = vault.scope("alice", namespace())
            with monkeypatch.context() as patch:
                patch.setattr("kvvault.crypto.keys.new_segment", down)
                new = keys(4, start=50)
                assert put(vault, scope, new, "alice") == PutReport(refused=4)
                assert vault.stats().refused_blocks == 4
                assert_missing(vault, scope, new)
                written = b"".join(p.read_bytes() for p in faulty.path.rglob("*") if p.is_file())
                for plain in contents("alice", new):
                    assert plain[:64] not in written
            assert put(vault, scope, new, "alice") == PutReport(stored=4)

    def test_opening_says_that_the_provider_is_down(
        self, faulty: Home, provider: FaultyProvider
    ) -> None:
        provider.fail(DOWN, methods={"unwrap"})
        files = faulty.segment_files()
        with pytest.raises(KeyUnavailableError) as caught:
            faulty.open()
        assert caught.value.exit_code == 12
        assert faulty.segment_files() == files
        provider.heal()
        with faulty.open() as vault:
            assert_hits(vault, vault.scope("bob", namespace()), keys(4), "bob")

    def test_a_provider_that_hangs_costs_its_time_limit(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hanging = FaultyProvider(EphemeralProvider())
        home.provider = TimeLimited(hanging)
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(4))
            monkeypatch.setattr("kvvault.crypto.keys.open_tenant.__kwdefaults__", {"timeout": 0.2})
            with home.open() as other:
                with hanging.hanging({"unwrap"}):
                    assert_missing(other, scope, keys(4), Outcome.KEY_UNAVAILABLE)
                    # Meanwhile whoever has the keys is not held up.
                    assert_hits(vault, scope, keys(4))
                other._ring._not_before = 0.0
                assert_hits(other, scope, keys(4))


class TestWrong:
    def test_a_destroyed_epoch_is_a_miss(
        self, faulty: Home, elsewhere: Scope, provider: FaultyProvider
    ) -> None:
        with faulty.open() as vault:
            (epoch,) = provider.epochs()
            provider.destroy(epoch)
            assert_missing(vault, elsewhere, keys(4))
            stats = vault.stats()
            assert (stats.misses, stats.tampered, stats.key_unavailable) == (4, 0, 0)
            with pytest.raises(KeyDestroyedError):
                vault.scope("bob", namespace())

    def test_another_key_in_the_same_place_is_counted_as_tampering(
        self, faulty: Home, elsewhere: Scope, provider: FaultyProvider
    ) -> None:
        with faulty.open() as vault:
            provider.fail(WrongKeyError("does not open", hint="none"), methods={"unwrap"})
            assert_missing(vault, elsewhere, keys(4), Outcome.TAMPERED)
            assert vault.stats().tampered == 4

    def test_a_tenant_whose_key_was_destroyed_can_still_be_forgotten(
        self, faulty: Home, provider: FaultyProvider
    ) -> None:
        with faulty.open() as vault:
            provider.fail(DOWN, methods={"unwrap"})
            assert vault.forget("alice") == 1
            provider.heal()
        with faulty.open() as vault:
            assert [facts.name for facts in vault.tenants()] == ["bob"]
            assert_hits(vault, vault.scope("bob", namespace()), keys(4), "bob")


class TestPlaces:
    def test_req_k7_the_same_file_system_is_said_at_every_start(
        self, tmp_path: Path, home: Home, caplog: pytest.LogCaptureFixture
    ) -> None:
        beside = Home(tmp_path / "vault", FileProvider.create(tmp_path / "keys"))
        for start in (beside.create, beside.open, beside.open):
            caplog.clear()
            with start() as vault:
                warning = vault.key_warning()
                assert warning is not None
                assert warning in caplog.text
        caplog.clear()
        with home.create() as vault:  # keys in memory are not on any file system
            assert vault.key_warning() is None
        assert "file system" not in caplog.text

    def test_on_another_file_system_nothing_is_said(self, tmp_path: Path, home: Home) -> None:
        home.provider = FileProvider.create(tmp_path / "keys")
        with home.create() as vault:
            same = tmp_path.stat().st_dev == home.path.stat().st_dev
            assert (vault.key_warning() is not None) is same

    def test_the_default_is_a_key_file_outside_the_vault(self, home: Home) -> None:
        with Vault.create(home.path, options=SMALL) as vault:
            put(vault, vault.scope("alice", namespace()), keys(3))
            location = vault.provider_info().location
            assert location is not None
            assert home.path not in location.parents
            assert location.stat().st_mode & 0o777 == 0o600
        with Vault.open(home.path) as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(3))

    def test_a_moved_key_file(self, home: Home, tmp_path: Path) -> None:
        with Vault.create(home.path, provider=f"file:{tmp_path}/one", options=SMALL) as vault:
            put(vault, vault.scope("alice", namespace()), keys(3))
        (tmp_path / "one").rename(tmp_path / "two")
        with pytest.raises(VaultKeyError):
            Vault.open(home.path)
        with Vault.open(home.path, provider=f"file:{tmp_path}/two") as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(3))

    def test_ephemeral_by_name(self, home: Home, caplog: pytest.LogCaptureFixture) -> None:
        with Vault.create(home.path, provider="ephemeral:", options=SMALL) as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(3))
            assert_hits(vault, scope, keys(3))
        caplog.clear()
        with Vault.open(home.path, options=SMALL) as vault:
            assert "gone" in caplog.text
            assert vault.recovery.destroyed_files == 1
            assert_missing(vault, vault.scope("alice", namespace()), keys(3))
            assert list((home.path / "segments").iterdir()) == []

    def test_a_provider_of_ones_own(self, home: Home) -> None:
        class Mine(EphemeralProvider):
            pass

        provider: KeyProvider = Mine()
        home.provider = provider
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(3))
        with home.open() as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(3))
