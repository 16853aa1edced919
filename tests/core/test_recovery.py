"""What opening a vault repairs: nothing untracked, nothing lost that is there (promises 2, 6)."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvvault import layout
from kvvault.crypto.providers import EphemeralProvider, FileProvider
from kvvault.errors import KeyUnavailableError, StorageError, WrongKeyError
from kvvault.model import Outcome, RecoveryReport, SegmentState
from kvvault.testing import FaultyProvider
from kvvault.vault import Vault
from tests.core.support import (
    BLOCK,
    SMALL,
    Home,
    assert_hits,
    assert_missing,
    get,
    key,
    keys,
    namespace,
    put,
)


def crashed(home: Home, blocks: int = 10) -> Home:
    """A vault as it lies on the disk when its process was killed: a copy of an open one."""
    copy = Home(home.path.with_name("crashed"), home.provider, home.options)
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(blocks))
        shutil.copytree(home.path, copy.path)
    return copy


def filled(home: Home, blocks: int = 8) -> Home:
    """A vault that was closed, one segment for every four blocks."""
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(blocks))
    return home


def by_segment(home: Home) -> dict[str, list[bytes]]:
    """Which of the usual blocks each segment file holds."""
    found: dict[str, list[bytes]] = {}
    with home.open(read_only=True) as vault:
        scope = vault.scope("alice", namespace())
        for n in range(40):
            location = vault._view.find(scope.block_id(key(n)), 0.0)
            if location is not None:
                segment = vault._view.segment(location.number)
                assert segment is not None
                name = segment.place.segment_id.hex() + ".seg"
                found.setdefault(name, []).append(key(n))
    return found


def check(home: Home, expected: RecoveryReport, hits: list[bytes], gone: list[bytes]) -> None:
    """Opening reports this, serves these, misses those; opening again finds nothing to do."""
    with home.open() as vault:
        assert vault.recovery == expected
        scope = vault.scope("alice", namespace())
        assert_hits(vault, scope, hits)
        assert_missing(vault, scope, gone)
        assert vault.contains(scope, hits + gone) == [True] * len(hits) + [False] * len(gone)
        assert vault.verify().ok
        # What is on the disk is what the catalog says, byte for byte.
        live = {s.segment_id.hex() + ".seg": s for s in vault.segments() if s.state.live}
        assert {p.name for p in home.segment_files()} == live.keys()
        for path in home.segment_files():
            assert path.stat().st_size == live[path.name].data_bytes
        put(vault, scope, keys(2, start=500))
        assert_hits(vault, scope, keys(2, start=500))
    with home.open() as vault:
        assert vault.recovery.clean
        assert_hits(vault, vault.scope("alice", namespace()), hits)


def test_after_a_kill_everything_committed_is_there(home: Home) -> None:
    # Two full segments were sealed in the background or not; the third was open in any case.
    copy = crashed(home)
    with copy.open() as vault:
        report = vault.recovery
        assert 1 <= report.sealed_segments <= 3
        assert dataclasses.replace(report, sealed_segments=0).clean
        assert {s.state for s in vault.segments()} == {SegmentState.SEALED}
        assert_hits(vault, vault.scope("alice", namespace()), keys(10))
    check(copy, RecoveryReport(), keys(10), [])


@pytest.mark.parametrize("extra", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_promise_2_bytes_beyond_the_last_commit_are_cut(home: Home, extra: int) -> None:
    filled(home)
    path = home.segment_files()[0]
    with path.open("ab") as file:
        file.write(os.urandom(extra))
    check(home, RecoveryReport(cut_bytes=extra), keys(8), [])


def test_promise_2_bytes_that_were_never_committed(home: Home) -> None:
    copy = crashed(home, blocks=1)
    (path,) = copy.segment_files()
    with path.open("ab") as file:
        file.write(os.urandom(2 * BLOCK + 5))
    expected = RecoveryReport(sealed_segments=1, cut_bytes=2 * BLOCK + 5)
    check(copy, expected, keys(1), [])


def test_promise_2_files_without_a_row_are_destroyed(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    filled(home)
    directory = home.path / "segments"
    for n, size in enumerate((0, 5, 10 * BLOCK)):
        (directory / f"{n:032x}.seg").write_bytes(bytes(size))
        (directory / f"{n:032x}.seg").chmod(0o600)
    (directory / f"{7:032x}.seg").symlink_to("/etc/hostname")
    (directory / ".probe-123").write_bytes(b"x")
    (directory / "notes.txt").write_text("not one of ours")
    size = len("/etc/hostname")
    expected = RecoveryReport(destroyed_files=4, destroyed_bytes=10 * BLOCK + 5 + size)
    with home.open() as vault:
        assert vault.recovery == expected
        assert_hits(vault, vault.scope("alice", namespace()), keys(8))
    assert "destroying" in caplog.text
    assert (directory / "notes.txt").exists()  # not ours: left alone
    assert not (directory / ".probe-123").exists()
    assert Path("/etc/hostname").exists()
    (directory / "notes.txt").unlink()
    check(home, RecoveryReport(), keys(8), [])


def test_rows_without_a_file_are_lost(home: Home) -> None:
    filled(home)
    where = by_segment(home)
    path = home.segment_files()[0]
    path.unlink()
    gone = where.pop(path.name)
    (kept,) = where.values()
    check(home, RecoveryReport(lost_segments=1, lost_blocks=4), kept, gone)
    with home.sql() as connection:
        states = connection.execute(
            "SELECT state, wrapped_secret IS NULL FROM segments WHERE hex(segment_id) = ?",
            (path.stem.upper(),),
        ).fetchall()
        assert states == [("lost", 1)]
        count = "SELECT count(*) FROM extents WHERE hex(segment_id) = ?"
        assert connection.execute(count, (path.stem.upper(),)).fetchone() == (0,)


@pytest.mark.parametrize(
    ("size", "left"),
    [(4 * BLOCK - 1, 2), (3 * BLOCK, 2), (2 * BLOCK, 2), (2 * BLOCK - 1, 0), (1, 0), (0, 0)],
)
def test_truncated_files_keep_their_whole_extents(home: Home, size: int, left: int) -> None:
    filled(home)
    where = by_segment(home)
    path = home.segment_files()[0]
    os.truncate(path, size)
    mine = where.pop(path.name)
    (others,) = where.values()
    if size < BLOCK:
        expected = RecoveryReport(lost_segments=1, lost_blocks=4)
    else:
        expected = RecoveryReport(lost_blocks=4 - left, cut_bytes=size - left * BLOCK)
    if BLOCK <= size < 2 * BLOCK:
        # A block without the rest of its extent: dropped, and the segment with it.
        expected = RecoveryReport(lost_blocks=4)
    check(home, expected, others + mine[:left], mine[left:])


def test_an_open_segment_without_a_single_block(home: Home) -> None:
    copy = crashed(home, blocks=1)
    with copy.sql() as connection:
        connection.execute("DELETE FROM extents")
        connection.execute("UPDATE segments SET blocks = 0")
    with copy.open() as vault:
        assert vault.recovery.sealed_segments == 0
        assert copy.segment_files() == []
    check(copy, RecoveryReport(), [], keys(1))


def test_an_interrupted_deletion_is_finished(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(home)
    where = by_segment(home)
    doomed = home.segment_files()[0].name

    def broken(*_args: object) -> bool:
        raise StorageError("cannot remove", hint="none")

    with home.open() as vault, monkeypatch.context() as patch:
        patch.setattr("kvvault.segments.io.SegmentDir.unlink", broken)
        with pytest.raises(StorageError):
            vault.delete_segments([bytes.fromhex(doomed[:32])])
        scope = vault.scope("alice", namespace())
        assert_missing(vault, scope, where[doomed])  # revoked all the same
    assert (home.path / "segments" / doomed).exists()
    gone = where.pop(doomed)
    (kept,) = where.values()
    check(home, RecoveryReport(finished_deletions=1), kept, gone)


class TestPowerLoss:
    """Another boot than the one that wrote: what was not synced may be anything."""

    def damage(self, home: Home, *, synced: int) -> list[Path]:
        with home.sql() as connection:
            connection.execute(
                "UPDATE segments SET boot_id = 'an earlier boot', synced = ?", (synced,)
            )
        paths = home.segment_files()
        data = bytearray(paths[0].read_bytes())
        data[2 * BLOCK :] = bytes(len(data) - 2 * BLOCK)  # as a journal replay leaves it
        paths[0].write_bytes(data)
        return paths

    def test_what_was_not_synced_is_authenticated_first(self, home: Home) -> None:
        filled(home)
        where = by_segment(home)
        paths = self.damage(home, synced=0)
        mine = where.pop(paths[0].name)
        (others,) = where.values()
        check(
            home,
            RecoveryReport(lost_blocks=2, cut_bytes=2 * BLOCK),
            others + mine[:2],
            mine[2:],
        )

    def test_what_was_synced_is_not(self, home: Home) -> None:
        filled(home)
        where = by_segment(home)
        paths = self.damage(home, synced=1)
        mine = where[paths[0].name]
        with home.open() as vault:
            assert vault.recovery.clean
            # Then it is not a power loss but tampering, and found out when it is read.
            outcomes, _ = get(vault, vault.scope("alice", namespace()), mine)
            assert outcomes == ["hit", "hit", "tampered", "tampered"]

    def test_it_is_done_once(self, home: Home) -> None:
        filled(home)
        self.damage(home, synced=0)
        home.open().close()
        with home.sql() as connection:
            assert connection.execute("SELECT min(synced) FROM segments").fetchone() == (1,)

    @pytest.mark.parametrize("problem", ["key", "disk"])
    def test_what_cannot_be_found_out_now_is_kept(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, problem: str
    ) -> None:
        faulty = FaultyProvider(home.provider)
        home.provider = faulty
        filled(home)
        self.damage(home, synced=0)

        with monkeypatch.context() as patch:
            if problem == "key":
                patch.setattr(
                    "kvvault.keyring.KeyRing.tenant",
                    raising(KeyUnavailableError("no answer", hint="wait")),
                )
            else:
                patch.setattr(os, "preadv", raising(OSError(5, "EIO")))
            with home.open() as vault:
                assert vault.recovery.clean
        with home.open() as vault:
            found, _ = get(vault, vault.scope("alice", namespace()), keys(8))
            assert found.count(Outcome.HIT) == 6


def raising(error: Exception) -> Callable[..., object]:
    def fail(*_args: object, **_kwargs: object) -> object:
        raise error

    return fail


class TestStrangers:
    """Files that somebody put in a segment's place keep nothing from opening (REQ-F2, REQ-F4)."""

    @pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "mode", "fifo"])
    @pytest.mark.parametrize("state", ["sealed", "open"])
    def test_in_place_of_a_segment(self, home: Home, tmp_path: Path, kind: str, state: str) -> None:
        filled(home)
        where = by_segment(home)
        path = home.segment_files()[0]
        moved = home.path.with_name("moved")
        if kind.endswith("link"):
            path.rename(moved)
            if kind == "hard link":
                path.hardlink_to(moved)
            else:
                path.symlink_to(moved if kind == "link" else tmp_path / "nothing")
        elif kind == "mode":
            path.chmod(0o644)
        else:
            path.unlink()
            os.mkfifo(path, 0o600)
        with home.sql() as connection:
            connection.execute(
                "UPDATE segments SET state = ? WHERE hex(segment_id) = ?",
                (state, path.stem.upper()),
            )
        mine = where.pop(path.name)
        (others,) = where.values()
        with home.open() as vault:
            scope = vault.scope("alice", namespace())
            assert_missing(vault, scope, mine, Outcome.TAMPERED)
            assert vault.stats().tampered == 4
            assert_hits(vault, scope, others)
            report = vault.verify()
            assert (report.tampered, report.damaged_segments) == (
                4,
                (bytes.fromhex(path.stem),),
            )
            # And it can be got rid of.
            assert vault.delete_segments([bytes.fromhex(path.stem)]) == 1
        assert not path.exists()
        check(home, RecoveryReport(), others, mine)


class TestLosses:
    """Losing the catalog or the keys loses the cache, never correctness (promise 6)."""

    def test_promise_6_a_missing_catalog(
        self, home: Home, caplog: pytest.LogCaptureFixture
    ) -> None:
        filled(home)
        home.catalog.unlink()
        with home.open() as vault:
            assert "no catalog" in caplog.text
            assert vault.recovery.destroyed_files == 2
            assert vault.recovery.destroyed_bytes == 8 * BLOCK
            assert home.segment_files() == []
            scope = vault.scope("alice", namespace())
            assert_missing(vault, scope, keys(8))
            assert put(vault, scope, keys(8)).stored == 8
        check(home, RecoveryReport(), keys(8), [])

    def test_promise_6_a_catalog_that_a_crash_left_empty(self, home: Home) -> None:
        filled(home)
        home.catalog.write_bytes(b"")
        with home.open() as vault:
            assert vault.recovery.destroyed_files == 2

    @pytest.mark.parametrize("name", ["lookup_key", "root_epoch"])
    def test_promise_6_a_catalog_without_its_first_rows(
        self, home: Home, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        filled(home)
        with home.sql() as connection:
            connection.execute("DELETE FROM meta WHERE name = ?", (name,))
        with home.open() as vault:
            assert "starts empty" in caplog.text
            assert vault.recovery.destroyed_files == 2
            assert_missing(vault, vault.scope("alice", namespace()), keys(8))

    def test_promise_6_keys_in_memory_are_gone_with_their_process(
        self, home: Home, caplog: pytest.LogCaptureFixture
    ) -> None:
        filled(home)
        before = home.catalog.read_bytes()
        home.provider = EphemeralProvider()  # another process
        with home.open() as vault:
            assert "in memory only and are gone" in caplog.text
            assert vault.recovery.destroyed_files == 2
            assert home.segment_files() == []
            scope = vault.scope("alice", namespace())
            assert_missing(vault, scope, keys(8))
            put(vault, scope, keys(3))
            assert_hits(vault, scope, keys(3))
        assert home.catalog.read_bytes() != before

    def test_in_the_same_process_an_ephemeral_vault_can_be_reopened(self, home: Home) -> None:
        filled(home)
        check(home, RecoveryReport(), keys(8), [])

    def test_looking_only_destroys_nothing(self, home: Home) -> None:
        filled(home)
        files = home.segment_files()
        home.provider = EphemeralProvider()
        with pytest.raises(Exception, match="nothing that can be read"):
            home.open(read_only=True)
        assert home.segment_files() == files

    def test_the_wrong_kind_of_provider_destroys_nothing(self, home: Home, tmp_path: Path) -> None:
        home.provider = FileProvider.create(tmp_path / "keys")
        filled(home)
        files, catalog = home.segment_files(), home.catalog.read_bytes()
        for wrong in ("ephemeral:", EphemeralProvider()):
            with pytest.raises(WrongKeyError):
                Vault.open(home.path, provider=wrong)
        assert (home.segment_files(), home.catalog.read_bytes()) == (files, catalog)
        check(home, RecoveryReport(), keys(8), [])

    def test_a_missing_key_file_is_a_wrong_configuration_and_destroys_nothing(
        self, home: Home, tmp_path: Path
    ) -> None:
        home.provider = FileProvider.create(tmp_path / "keys")
        filled(home)
        (tmp_path / "keys").rename(tmp_path / "mislaid")
        files = home.segment_files()
        with pytest.raises(Exception, match="key"):
            Vault.open(home.path)
        assert home.segment_files() == files
        (tmp_path / "mislaid").rename(tmp_path / "keys")
        check(home, RecoveryReport(), keys(8), [])


def test_a_clean_vault_is_opened_without_a_word(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    filled(home)
    caplog.clear()
    caplog.set_level(logging.INFO, "kvvault")
    with home.open():
        pass
    assert caplog.text == ""


def test_recovery_resumes_after_a_failure(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = crashed(home)
    (copy.path / "segments" / f"{5:032x}.seg").write_bytes(b"orphan")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", raising(OSError(5, "EIO")))
        with pytest.raises(StorageError):
            copy.open()
    gc.collect()  # the traceback held the file, and with it the lock of a living owner
    with copy.open() as vault:
        assert vault.recovery.sealed_segments >= 1
    check(copy, RecoveryReport(), keys(10), [])


def test_boot_id_is_read_from_the_kernel() -> None:
    assert len(layout.boot_id()) == 36


def test_small_segments_are_what_these_tests_count_on() -> None:
    assert SMALL.segment_bytes == 4 * BLOCK
