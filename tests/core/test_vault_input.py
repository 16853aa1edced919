"""What is no vault, or not one to be trusted: a clear error of our own, at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvvault.crypto.providers import EphemeralProvider, FileProvider
from kvvault.errors import (
    CatalogCorruptError,
    ConfigError,
    FormatError,
    KvvaultError,
    UnsafeFileError,
    UnsupportedVersionError,
    VaultExistsError,
    VaultNotFoundError,
    WrongKeyError,
)
from kvvault.options import VaultOptions
from kvvault.vault import Vault
from tests.core.support import (
    Home,
    assert_hits,
    assert_missing,
    keys,
    namespace,
    put,
)


class TestBadInput:
    """A clear error of our own, at once."""

    def test_no_vault(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        (tmp_path / "empty").mkdir()
        for name in ("nothing", "file", "empty", "file/below"):
            with pytest.raises(VaultNotFoundError) as caught:
                Vault.open(tmp_path / name)
            assert caught.value.exit_code == 10

    def test_something_is_there_already(self, home: Home, tmp_path: Path) -> None:
        home.create().close()
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "something").write_text("x")
        (tmp_path / "file").write_text("x")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for path in (home.path, tmp_path / "full", tmp_path / "file", tmp_path / "link"):
            with pytest.raises(VaultExistsError):
                Vault.create(path, provider=EphemeralProvider())
        assert (tmp_path / "full" / "something").read_text() == "x"
        assert not (tmp_path / "nowhere").exists()

    def test_wrong_key(self, home: Home, tmp_path: Path) -> None:
        home.provider = FileProvider.create(tmp_path / "right")
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(3))
        other = FileProvider.create(tmp_path / "wrong")
        before = {p.name for p in home.segment_files()}
        for provider in (other, f"file:{tmp_path}/wrong", f"file:{tmp_path}/none"):
            with pytest.raises(WrongKeyError) as caught:
                Vault.open(home.path, provider=provider)
            assert caught.value.exit_code == 12
        # A wrong configuration destroys nothing.
        assert {p.name for p in home.segment_files()} == before
        with home.open() as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(3))

    def test_the_right_key_of_another_vault(self, home: Home, tmp_path: Path) -> None:
        other = Home(home.path.with_name("other"), home.provider)
        for one in (home, other):
            with one.create() as vault:
                put(vault, vault.scope("alice", namespace()), keys(3))
        other.catalog.write_bytes(home.catalog.read_bytes())
        with pytest.raises(WrongKeyError):
            other.open()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "nonsense",
            "[]",
            "null",
            '{"kvvault": "vault"}',
            '{"kvvault": "vault", "format": 1}',
            '{"kvvault": "vault", "format": "1", "vault_id": "00", "provider": "x"}',
            '{"kvvault": "vault", "format": 1, "vault_id": "00", "provider": "ephemeral:"}',
            '{"kvvault": "vault", "format": 1, "vault_id": "zz", "provider": "ephemeral:"}',
            '{"kvvault": "other", "format": 1, "vault_id": "00", "provider": "ephemeral:"}',
            '{"kvvault": "vault", "format": 1, "vault_id": "' + "0" * 32 + '", "provider": 7}',
            '{"kvvault": "vault", "format": 1, "vault_id": "' + "0" * 32
            + '", "provider": "ephemeral:", "more": 1}',
            "[" * 100_000,
        ],
    )  # fmt: skip
    def test_damaged_descriptor(self, home: Home, text: str) -> None:
        home.create().close()
        (home.path / "VAULT").write_text(text)
        with pytest.raises(FormatError) as caught:
            home.open()
        assert not isinstance(caught.value, UnsupportedVersionError)

    def test_descriptor_that_is_not_text(self, home: Home) -> None:
        home.create().close()
        (home.path / "VAULT").write_bytes(b"\xff\xfe\0" * 50)
        with pytest.raises(FormatError):
            home.open()

    @pytest.mark.parametrize("more", ["", ', "cipher": "new"'])
    def test_newer_format(self, home: Home, more: str) -> None:
        home.create().close()
        (home.path / "VAULT").write_text(
            '{"kvvault": "vault", "format": 2, "vault_id": "' + "0" * 32
            + '", "provider": "ephemeral:"' + more + "}"
        )  # fmt: skip
        with pytest.raises(UnsupportedVersionError, match="format 2"):
            home.open()

    def test_garbage_for_a_catalog(self, home: Home) -> None:
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(3))
        home.catalog.write_bytes(b"garbage " * 2000)
        files = home.segment_files()
        with pytest.raises(CatalogCorruptError) as caught:
            home.open()
        assert "catalog.sqlite3" in caught.value.hint
        assert home.segment_files() == files
        # What the hint says works: the vault starts empty.
        home.catalog.unlink()
        with home.open() as vault:
            assert_missing(vault, vault.scope("alice", namespace()), keys(3))
            assert home.segment_files() == []

    @pytest.mark.parametrize("name", [".", "segments", "locks"])
    def test_req_f1_wider_modes_are_fixed(self, home: Home, name: str) -> None:
        home.create().close()
        (home.path / name).chmod(0o755)
        home.open().close()
        assert (home.path / name).stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("name", ["VAULT", "catalog.sqlite3"])
    def test_req_f1_f2_files_that_others_can_reach(self, home: Home, name: str) -> None:
        home.create().close()
        path = home.path / name
        path.chmod(0o644)
        with pytest.raises(UnsafeFileError):
            home.open()
        path.chmod(0o600)
        other = home.path.with_name("other")
        other.hardlink_to(path)
        with pytest.raises(UnsafeFileError):
            home.open()
        path.unlink()
        path.symlink_to(other)
        with pytest.raises(UnsafeFileError):
            home.open()
        path.unlink()
        other.rename(path)
        home.open().close()

    @pytest.mark.parametrize("name", ["segments", "locks"])
    def test_req_f2_directories_that_are_links_or_missing(self, home: Home, name: str) -> None:
        home.create().close()
        moved = home.path.with_name("moved")
        (home.path / name).rename(moved)
        with pytest.raises(UnsafeFileError):
            home.open()
        (home.path / name).symlink_to(moved)
        with pytest.raises(UnsafeFileError):
            home.open()

    def test_req_f2_the_vault_itself_a_link(self, home: Home, tmp_path: Path) -> None:
        home.create().close()
        (tmp_path / "link").symlink_to(home.path)
        with pytest.raises(UnsafeFileError):
            Vault.open(tmp_path / "link", provider=home.provider)

    @pytest.mark.parametrize("name", [".", "segments", "locks", "VAULT", "catalog.sqlite3"])
    def test_req_f1_somebody_elses(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        import os

        home.create().close()
        home.open().close()
        theirs = (home.path / name).stat().st_ino
        for function in ("fstat", "lstat"):
            real = getattr(os, function)

            def pretend(target: Any, *args: Any, _real: Any = real, **more: Any) -> Any:
                info = _real(target, *args, **more)
                if info.st_ino != theirs:
                    return info
                fields = list(info)
                fields[4] = info.st_uid + 1
                return os.stat_result(fields)

            monkeypatch.setattr(os, function, pretend)
        with pytest.raises(UnsafeFileError, match="belongs to"):
            home.open()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"segment_bytes": 0},
            {"batch_bytes": 100},
            {"poll_interval_s": 0},
            {"poll_interval_s": float("nan")},
            {"max_open_segments": 0},
            {"lock_timeout_s": -1},
        ],
    )
    def test_options(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            VaultOptions(**wrong)

    def test_every_error_is_one_of_ours_with_a_hint(self, tmp_path: Path) -> None:
        tries: Sequence[Any] = [
            lambda: Vault.open(tmp_path / "none"),
            lambda: Vault.create(tmp_path / "x", provider="carrier-pigeon:"),
            lambda: Vault.create(tmp_path / "x", provider="ephemeral:more"),
            lambda: Vault.create(tmp_path / "x" / "\0"),
        ]
        for attempt in tries:
            with pytest.raises((KvvaultError, ValueError)) as caught:
                attempt()
            if isinstance(caught.value, KvvaultError):
                assert caught.value.hint
