"""What a purge does: new keys for all that lives, none for what is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvvault.catalog import operations, purging
from kvvault.catalog.rows import TenantRow
from kvvault.crypto import keys as crypto_keys
from kvvault.crypto.keys import tenant_key_aad
from kvvault.crypto.providers import Assurance, EphemeralProvider
from kvvault.errors import (
    CatalogCorruptError,
    CatalogError,
    HeldError,
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    UnsafeFileError,
    VaultLockedError,
    WrongKeyError,
)
from kvvault.keyring import KeyRing
from kvvault.model import Outcome, SegmentFacts
from kvvault.testing import FaultyProvider, ManualClock
from kvvault.vault import Vault
from tests.core.purges import DELETED, KEPT, LABELS, judge, populate
from tests.core.support import (
    Home,
    assert_hits,
    assert_missing,
    contents,
    get,
    keys,
    namespace,
    put,
    sqlite,
)


@pytest.fixture
def provider(home: Home) -> FaultyProvider:
    faulty = FaultyProvider(EphemeralProvider())
    home.provider = faulty
    return faulty


@pytest.fixture
def full(home: Home, provider: FaultyProvider) -> Iterator[Vault]:
    with home.create() as vault:
        populate(vault)
        yield vault


def deletions(vault: Vault) -> list[int | None]:
    """By which purge each became unrecoverable."""
    with sqlite.connect(str(vault.path / "catalog.sqlite3")) as connection:
        rows = connection.execute("SELECT purge_no FROM deletions ORDER BY deletion_no").fetchall()
    return [row[0] for row in rows]


def live(vault: Vault) -> list[bytes]:
    return [one.segment_id for one in vault.segments() if one.state.live]


def tenant_rows(vault: Vault) -> list[TenantRow]:
    return vault.catalog.read(operations.list_tenants)


def live_facts(vault: Vault) -> dict[bytes, SegmentFacts]:
    """But for their use, which another thread reports in its own time."""
    return {
        one.segment_id: replace(one, hits=0, last_used=None)
        for one in vault.segments()
        if one.state.live
    }


class TestPurge:
    def test_all_that_lives_goes_on_under_new_keys(
        self, home: Home, full: Vault, provider: FaultyProvider
    ) -> None:
        before = tenant_rows(full)
        ids = live_facts(full)
        secrets = {
            row.facts.segment_id: row.wrapped_secret
            for row in full.catalog.read(operations.list_segments)
        }
        report = full.purge()
        assert (report.tenants, report.segments, report.given_up) == (2, len(ids), 0)
        assert report.assurance == "purge"
        assert report.old_epoch != report.new_epoch
        assert report.destroyed_at <= report.verified_at
        judge(full)
        after = tenant_rows(full)
        assert [row.key_no for row in after] == [2, 2]
        assert {row.root_epoch for row in after} == {report.new_epoch}
        for old, new in zip(before, after, strict=True):
            assert old.tenant_id == new.tenant_id
            assert old.lookup_id == new.lookup_id
            assert old.wrapped_key != new.wrapped_key
            assert old.wrapped_index_key != new.wrapped_index_key
            assert old.sealed_name != new.sealed_name
        # Data and facts stay as they are, every wrap is another.
        assert live_facts(full) == ids
        for row in full.catalog.read(operations.list_segments):
            if row.facts.state.live:
                assert row.wrapped_secret != secrets[row.facts.segment_id]
        assert provider.epochs() == [report.new_epoch]
        full.close()
        with home.open() as again:
            judge(again)
            assert again.check_keys().sound

    def test_req_k4_what_was_wrapped_under_the_old_key_is_refused(
        self, full: Vault, provider: FaultyProvider
    ) -> None:
        row = tenant_rows(full)[0]
        aad = tenant_key_aad(full._vault_id, row.tenant_id)
        assert len(provider.unwrap(row.root_epoch, row.wrapped_key, aad)) == 32
        report = full.purge()
        assert report.old_epoch == row.root_epoch
        with pytest.raises(KeyDestroyedError):
            provider.unwrap(row.root_epoch, row.wrapped_key, aad)

    def test_req_k4_a_provider_that_only_says_so_is_found_out(
        self, full: Vault, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(provider.inner, "destroy", lambda epoch, *, timeout: None)
            with pytest.raises(KeyUnavailableError, match="does not refuse"):
                full.purge()
            assert deletions(full) == [None, None]
            assert full.keys().last_purge is None
        judge(full)
        full.purge()
        assert None not in deletions(full)

    def test_what_is_deleted_later_waits_for_the_next(self, full: Vault) -> None:
        assert deletions(full) == [None, None]
        assert full.keys().waiting == 2
        first = full.purge()
        assert first.deletions == 2
        full.delete_segments(live(full)[-1:])
        assert deletions(full) == [first.purge_no, first.purge_no, None]
        second = full.purge()
        assert deletions(full) == [first.purge_no, first.purge_no, second.purge_no]
        assert full.keys().waiting == 0

    def test_what_is_deleted_during_a_purge_is_not_covered_by_it(
        self, full: Vault, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = provider.inner.destroy
        doomed = live(full)[:1]

        def destroy(epoch: str, *, timeout: float) -> None:
            full.delete_segments(doomed)  # its secret is under the new key already
            real(epoch)

        monkeypatch.setattr(provider.inner, "destroy", destroy)
        report = full.purge()
        assert deletions(full) == [report.purge_no, report.purge_no, None]

    def test_req_k3_nothing_is_destroyed_while_a_row_needs_it(
        self, full: Vault, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(purging, "tenants_not_under", lambda connection, epoch: [])
        with pytest.raises(CatalogCorruptError, match="2 rows"):
            full.purge()
        assert "destroy" not in provider.calls
        judge(full)
        monkeypatch.undo()
        full.purge()
        judge(full)

    def test_labels_go_along(self, full: Vault) -> None:
        full.purge()
        full.purge()
        live = [r for r in full.catalog.read(operations.list_segments) if r.facts.state.live]
        sealed = [row.sealed_labels for row in live if row.sealed_labels is not None]
        assert sealed
        tenant = full.scope("alice", namespace())._keys
        assert {tenant.open_text("segment labels", one) for one in sealed} == {
            '{"team": "label canary"}'
        }
        dead = [r for r in full.catalog.read(operations.list_segments) if not r.facts.state.live]
        assert dead
        assert all(row.sealed_labels is None for row in dead)

    def test_an_empty_vault(self, vault: Vault) -> None:
        report = vault.purge()
        assert (report.tenants, report.segments, report.deletions) == (0, 0, 0)
        put(vault, vault.scope("alice", namespace()), keys(3))
        assert_hits(vault, vault.scope("alice", namespace()), keys(3))

    def test_read_only_does_not_purge(self, home: Home, full: Vault) -> None:
        with home.open(read_only=True) as looking, pytest.raises(KvvaultError):
            looking.purge()
        judge(full)


class TestBeside:
    """Other processes with the vault open; here a second `Vault` with the same provider."""

    def test_engines_go_on(self, home: Home, full: Vault) -> None:
        with home.open() as engine:
            alice = engine.scope("alice", namespace(), labels=LABELS)
            bob = engine.scope("bob", namespace())
            put(engine, alice, keys(2, 300))  # half a segment, open in the engine
            ids = [alice.block_id(k) for k in KEPT]
            for round_ in range(3):
                full.purge()
                # Nothing was open yet: keys and wraps are from before.
                assert_hits(engine, alice, KEPT)
                assert_hits(engine, bob, KEPT, "bob")
                assert_hits(engine, alice, keys(2, 300))
                assert [alice.block_id(k) for k in KEPT] == ids
                report = put(engine, alice, keys(9, 400 + 10 * round_))
                assert (report.stored, report.refused) == (9, 0)
                full.refresh()
                assert_hits(full, full.scope("alice", namespace()), keys(9, 400 + 10 * round_))
            assert engine.stats().tampered == 0
            assert engine.verify().ok

    def test_a_reader_that_opened_nothing_yet(self, home: Home, full: Vault) -> None:
        with home.open(read_only=True) as reader:
            scope = reader.scope("alice", namespace())
            full.purge()
            full.purge()
            assert_hits(reader, scope, KEPT)
            assert_hits(reader, reader.scope("bob", namespace()), KEPT, "bob")
            assert_missing(reader, scope, DELETED)

    def test_a_new_tenant_comes_under_the_new_key(
        self, home: Home, full: Vault, provider: FaultyProvider
    ) -> None:
        with home.open() as engine:
            full.purge()
            dave = engine.scope("dave", namespace())
            put(engine, dave, keys(4), "dave")
            [epoch] = provider.epochs()
            assert {row.root_epoch for row in tenant_rows(engine)} == {epoch}
            full.purge()
            assert_hits(engine, dave, keys(4), "dave")

    def test_a_new_tenant_that_comes_too_late_for_the_old_key_is_made_anew(
        self, home: Home, full: Vault, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The purge begins after the tenant's key was wrapped and before its row is there."""
        with home.open() as engine:
            ring = engine._ring
            real = ring.create_tenant
            made = []

            def create(name: str, epoch: str, now: float) -> Any:
                result = real(name, epoch, now)
                made.append(epoch)
                if len(made) == 1:
                    full.purge()
                return result

            monkeypatch.setattr(ring, "create_tenant", create)
            dave = engine.scope("dave", namespace())
            assert len(made) == 2
            assert made[0] != made[1]
            put(engine, dave, keys(4), "dave")
            assert_hits(engine, dave, keys(4), "dave")
            full.purge()
            assert_hits(engine, dave, keys(4), "dave")

    def test_a_segment_that_comes_too_late_is_made_anew(
        self, home: Home, full: Vault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The purge comes between a secret's wrap and its row."""
        with home.open() as engine:
            alice = engine.scope("alice", namespace(), labels=LABELS)
            real = crypto_keys.new_segment
            made = []

            def new_segment(*arguments: Any) -> Any:
                result = real(*arguments)
                made.append(result)
                if len(made) == 1:
                    full.purge()
                return result

            monkeypatch.setattr(crypto_keys, "new_segment", new_segment)
            report = put(engine, alice, keys(4, 500))
            assert (report.stored, report.refused) == (4, 0)
            assert len(made) == 2
            full.refresh()
            assert_hits(full, full.scope("alice", namespace()), keys(4, 500))
            files = {path.stem for path in home.segment_files()}
            assert files == {segment_id.hex() for segment_id in live(full)}

    def test_opening_while_the_root_key_changes(
        self, home: Home, full: Vault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The purge comes between reading the lookup key and unwrapping it."""
        real = KeyRing.open.__func__  # type: ignore[attr-defined]
        asked: list[str] = []

        def open_(cls: type[KeyRing], provider: Any, vault: bytes, epoch: str, *rest: Any) -> Any:
            asked.append(epoch)
            if len(asked) == 1:
                full.purge()
            return real(cls, provider, vault, epoch, *rest)

        monkeypatch.setattr(KeyRing, "open", classmethod(open_))
        # Ephemeral keys that are gone mean an empty vault; these are not gone.
        monkeypatch.setattr("kvvault.layout.keys_vanished", lambda *_: False)
        with home.open(read_only=True) as reader:
            assert len(asked) == 2
            assert_hits(reader, reader.scope("alice", namespace()), KEPT)

    def test_old_keys_leave_the_memory_of_others(self, home: Home, full: Vault) -> None:
        # It looks by itself, too, but not while this test takes.
        with home.open(options=replace(home.options, poll_interval_s=60.0)) as engine:
            tenant = engine.scope("alice", namespace())._keys
            old = tenant._tenant_key
            full.purge()
            assert any(old)  # the control: nobody has told it yet
            engine._ring.follow(engine.catalog)
            assert not any(old)
            assert tenant.key_no == 2
            engine._ring.follow(engine.catalog)
            assert_hits(engine, engine.scope("alice", namespace()), KEPT)

    def test_two_at_once_take_turns(self, home: Home, full: Vault) -> None:
        reports: list[int] = []
        with home.open() as other:
            threads = [
                threading.Thread(target=lambda v=v: reports.append(v.purge().purge_no))
                for v in (full, other)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(reports) == [1, 2]
            judge(other)

    def test_another_one_under_way_is_said_so(self, home: Home, full: Vault) -> None:
        options = replace(home.options, lock_timeout_s=0.05)
        with (
            home.open(options=options) as other,
            full._fence.exclusive("purge", 1.0),
            pytest.raises(VaultLockedError, match="purging"),
        ):
            other.purge()


class TestTrouble:
    def test_req_k9_a_provider_that_is_down_is_asked_again(
        self, full: Vault, provider: FaultyProvider
    ) -> None:
        provider.fail(KeyUnavailableError("no answer", hint="wait"))
        for _ in range(2):
            with pytest.raises(KeyUnavailableError):
                full.purge()
        assert deletions(full) == [None, None]
        provider.heal()
        judge(full)
        full.purge()
        assert None not in deletions(full)

    @pytest.mark.parametrize("method", ["create_epoch", "wrap", "unwrap", "destroy", "describe"])
    @pytest.mark.parametrize("afterwards", [False, True])
    def test_req_k9_whatever_fails_nothing_is_lost(
        self, full: Vault, provider: FaultyProvider, method: str, afterwards: bool
    ) -> None:
        error = KeyUnavailableError("no answer", hint="wait")
        provider.fail(error, methods={method}, afterwards=afterwards)
        with pytest.raises(KeyUnavailableError):
            full.purge()
        provider.heal()
        judge(full)
        report = full.purge()
        judge(full)
        assert full.check_keys().sound
        assert full.keys().unfinished is None
        assert report.new_epoch in provider.epochs()
        assert report.old_epoch not in provider.epochs()

    def test_req_k2_overdue(self, home: Home, provider: FaultyProvider) -> None:
        clock = ManualClock()
        with Vault.create(home.path, provider=provider, options=home.options, clock=clock) as vault:
            interval = vault.policy().vault.purge_interval_s
            put(vault, vault.scope("alice", namespace()), keys(4))
            clock.advance(10 * interval)
            assert not vault.keys().overdue  # nothing was deleted
            vault.expire()
            vault.scope("alice", namespace())
            put(vault, vault.scope("alice", namespace()), keys(4, 10))
            vault.delete_segments(live(vault)[-1:])
            assert vault.keys().waiting >= 1
            assert not vault.purge_is_due()
            clock.advance(interval - 1)
            assert vault.purge_is_due()
            assert not vault.keys().overdue
            clock.advance(2)
            assert vault.keys().overdue
            vault.purge()
            assert not vault.keys().overdue
            assert not vault.purge_is_due()
            assert vault.keys().last_purge is not None

    def test_req_k6_a_log_in_use_holds_up_the_end_and_not_the_destruction(
        self, home: Home, full: Vault, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvvault.purging._LOG_PATIENCE_S", 0.01)
        reader = sqlite.connect(f"file:{home.catalog}?mode=ro", uri=True, isolation_level=None)
        try:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM segments").fetchone()
            with pytest.raises(VaultLockedError, match="log"):
                full.purge()
        finally:
            reader.close()
        unfinished = full.keys().unfinished
        assert unfinished is not None
        assert unfinished.destroyed_at is not None
        assert unfinished.old_epoch not in provider.epochs()
        assert deletions(full) == [None, None]
        judge(full)
        full.purge()
        assert deletions(full) == [1, 1]
        assert (home.catalog.with_name("catalog.sqlite3-wal")).stat().st_size == 0

    def test_a_tenant_whose_row_rotted_does_not_hold_up_the_others(
        self, home: Home, full: Vault
    ) -> None:
        full.close()
        with home.sql() as connection:
            connection.execute(
                "UPDATE tenants SET wrapped_key = zeroblob(60) WHERE rowid = "
                "(SELECT min(rowid) FROM tenants)"
            )
        with home.open() as vault:
            assert vault.check_keys().broken_tenants == 1
            report = vault.purge()
            assert (report.tenants, report.given_up) == (1, 1)
            assert_hits(vault, vault.scope("bob", namespace()), KEPT, "bob")
            assert_missing(vault, vault.scope("alice", namespace()), KEPT)
            assert vault.check_keys().sound

    def test_a_provider_that_opens_nothing_costs_no_tenant(
        self, full: Vault, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rows are good; it is the provider that says they are not."""
        real = provider.inner.unwrap
        vault_id = full._vault_id

        def unwrap(epoch: str, wrapped: bytes, aad: bytes, *, timeout: float) -> bytearray:
            if vault_id in aad and b"lookup-key" in aad:
                return real(epoch, wrapped, aad)
            raise WrongKeyError("it does not open", hint="check the provider")

        monkeypatch.setattr(provider.inner, "unwrap", unwrap)
        with pytest.raises(WrongKeyError):
            full.purge()
        monkeypatch.undo()
        judge(full)
        full.purge()
        judge(full)

    def test_a_held_tenant_is_not_given_up(self, home: Home, full: Vault) -> None:
        full.place_hold(tenant="alice", reason="a case", actor="tests")
        full.close()
        with home.sql() as connection:
            connection.execute("UPDATE tenants SET wrapped_key = zeroblob(60)")
        with home.open() as vault:
            with pytest.raises(HeldError):
                vault.purge()
            assert len([row for row in tenant_rows(vault) if row.key_no == 1]) >= 1
            assert vault.keys().unfinished is not None

    def test_a_segment_whose_wrap_rotted_is_counted_and_stays(
        self, home: Home, full: Vault
    ) -> None:
        full.close()
        with home.sql() as connection:
            connection.execute(
                "UPDATE segments SET wrapped_secret = zeroblob(60) WHERE rowid = "
                "(SELECT min(rowid) FROM segments WHERE wrapped_secret IS NOT NULL)"
            )
        with home.open() as vault:
            assert vault.check_keys().broken_segments == 1
            vault.purge()
            assert vault.check_keys().broken_segments == 1
            outcomes, found = get(vault, vault.scope("alice", namespace()), KEPT)
            assert Outcome.TAMPERED in outcomes
            assert Outcome.HIT in outcomes
            for outcome, data, right in zip(outcomes, found, contents("a", KEPT), strict=True):
                assert outcome is not Outcome.HIT or data == right

    def test_secure_delete_is_read_back(self, full: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> Any:
            raise CatalogError("secure_delete is off", hint="install pysqlite3")

        monkeypatch.setattr("kvvault.catalog.purging.make_engine", refuse)
        with pytest.raises(CatalogError):
            full.purge()
        assert deletions(full) == [None, None]

    def test_the_errors_name_nobody(self, full: Vault, provider: FaultyProvider) -> None:
        provider.fail(UnsafeFileError("others may read it", hint="chmod"), methods={"wrap"})
        with pytest.raises(UnsafeFileError) as caught:
            full.purge()
        assert "alice" not in str(caught.value) + caught.value.hint


def test_assurance_is_what_the_provider_claims(full: Vault, provider: FaultyProvider) -> None:
    assert provider.describe().assurance is Assurance.PURGE
    assert full.purge().assurance == Assurance.PURGE.value
