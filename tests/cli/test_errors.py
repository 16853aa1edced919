"""What goes wrong is two lines on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvvault import errors
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import TENANTS, another_user, run

USAGE = [
    (),
    ("nope",),
    ("--vault", "x", "status"),
    ("--nope",),
    ("status", "--nope"),
    ("status", "extra"),
    ("status", "--vault"),
    ("status", "--vault", ""),
    ("ls",),
    ("ls", "things"),
    ("ls", "segments", "--limit", "-1"),
    ("ls", "segments", "--limit", "many"),
    ("ls", "segments", "--limit", "9" * 5000),
    ("show",),
    ("serve",),
    ("bench",),
    ("bench", "nope"),
    ("bench", "tier", "--sizes", "big"),
    ("bench", "tier", "--sizes", "1000"),
    ("bench", "tier", "--repeat", "0"),
    ("bench", "tier", "--dir", "/nonexistent"),
    ("doctor", "--yes"),
    ("doctor", "--dry-run"),
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 2
    result.assert_two_lines()
    assert "Traceback" not in result.err


@pytest.mark.parametrize("arguments", [case for case in USAGE if len(case) > 1], ids=" ".join)
def test_usage_errors_in_json(arguments: tuple[str, ...]) -> None:
    result = run(arguments[0], "--json", *arguments[1:])
    assert result.code == 2
    assert result.out == ""
    error = result.error
    assert error["exit_code"] == 2
    assert error["message"]
    assert error["hint"]


def test_without_a_vault() -> None:
    result = run("status")
    assert result.code == 2
    result.assert_two_lines()
    assert "--vault" in result.err


READING = ["status", "df", "verify", "ls segments", "show 00"]


@pytest.mark.parametrize("command", READING)
def test_no_vault_there_is_10(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "missing", Path(__file__), Path("/dev/null")):
        result = run(*command.split(), "--vault", path)
        assert result.code == 10, path
        result.assert_two_lines()
        assert run(*command.split(), "--vault", path, "--json").error["exit_code"] == 10


@pytest.mark.parametrize("command", READING)
def test_missing_or_wrong_key_is_12(place: Place, tmp_path: Path, command: str) -> None:
    other = f"file:{tmp_path}/other.key"
    assert run("init", "--vault", tmp_path / "other", "--key-provider", other).code == 0
    for uri in (f"file:{tmp_path}/missing.key", other):
        result = run(*command.split(), "--vault", place.path, "--key-provider", uri)
        assert result.code == 12, uri
        result.assert_two_lines()
        assert result.out == ""


@pytest.mark.parametrize(
    "uri", ["nope:", "file:relative", "file:", "http://x", "file://host/x", "ephemeral:x", "file"]
)
def test_bad_provider_uris_exit_2(place: Place, tmp_path: Path, uri: str) -> None:
    for arguments in (
        ("status", "--vault", place.path, "--key-provider", uri),
        ("init", "--vault", tmp_path / "v", "--key-provider", uri),
    ):
        result = run(*arguments)
        assert result.code == 2
        result.assert_two_lines()
    assert not (tmp_path / "v").exists()


def test_init_says_where_the_key_is(tmp_path: Path) -> None:
    result = run("init", "--vault", tmp_path / "v", "--json")
    assert result.code == 0
    provider = result.document["key_provider"]
    location = Path(provider["location"])
    assert location.is_file()
    assert location.stat().st_mode & 0o777 == 0o600
    assert tmp_path / "v" not in location.parents
    assert run("status", "--vault", tmp_path / "v").code == 0


def test_init_leaves_alone_what_is_there(place: Place, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "data").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (place.path, tmp_path / "full", tmp_path / "file", tmp_path / "link"):
        key = tmp_path / "unused.key"
        result = run("init", "--vault", path, "--key-provider", f"file:{key}")
        assert result.code == 2, path
        result.assert_two_lines()
        assert not key.exists()
    assert (tmp_path / "full" / "data").read_text() == "mine"


def test_init_never_overwrites_a_key(place: Place, tmp_path: Path) -> None:
    key = Path(place.key.removeprefix("file:"))
    before = key.read_bytes()
    result = run("init", "--vault", tmp_path / "v", "--key-provider", place.key)
    assert result.code == 2
    result.assert_two_lines()
    assert key.read_bytes() == before


def test_an_ephemeral_vault_says_that_its_keys_are_gone(tmp_path: Path) -> None:
    made = run("init", "--vault", tmp_path / "v", "--key-provider", "ephemeral:")
    assert made.code == 0
    assert "warning: the keys were in the memory" in made.err
    assert run("status", "--vault", tmp_path / "v").code == 10


@pytest.mark.parametrize("command", [*READING, "init"])
def test_permission_denied(memory: Path, command: str) -> None:
    closed = memory / f"closed-{command.replace(' ', '-')}"
    closed.mkdir()
    closed.chmod(0o000)
    try:
        with another_user():
            result = run(*command.split(), "--vault", closed / "vault")
    finally:
        closed.chmod(0o700)
    assert result.code == 1
    result.assert_two_lines()
    assert "permission denied" in result.err


def damage_descriptor(path: Path) -> None:
    (path / "VAULT").write_bytes(b"\xff\x00{")


def replace_catalog(path: Path) -> None:
    (path / "catalog.sqlite3").write_bytes(b"not a database" * 1000)


def link_catalog(path: Path) -> None:
    shutil.move(path / "catalog.sqlite3", path.parent / "elsewhere")
    (path / "catalog.sqlite3").symlink_to(path.parent / "elsewhere")


def open_catalog_to_all(path: Path) -> None:
    (path / "catalog.sqlite3").chmod(0o644)


def remove_segments(path: Path) -> None:
    shutil.rmtree(path / "segments")


def make_fifo(path: Path) -> None:
    (path / "VAULT").unlink()
    os.mkfifo(path / "VAULT", 0o600)


@pytest.mark.parametrize(
    "damage",
    [
        damage_descriptor,
        replace_catalog,
        link_catalog,
        open_catalog_to_all,
        remove_segments,
        make_fifo,
    ],
)
@pytest.mark.parametrize("command", READING)
def test_damaged_vaults(place: Place, damage: Callable[[Path], None], command: str) -> None:
    damage(place.path)
    result = run(*command.split(), *place.flags)
    assert result.code == 1, result
    result.assert_two_lines()
    assert run("doctor", *place.flags).code == 1


def test_a_vault_without_its_catalog_is_not_emptied_by_looking(place: Place) -> None:
    (place.path / "catalog.sqlite3").unlink()
    files = sorted(os.listdir(place.path / "segments"))
    for command in READING:
        assert run(*command.split(), *place.flags).code == 10
    assert run("doctor", *place.flags).code == 1
    assert sorted(os.listdir(place.path / "segments")) == files


def test_a_vault_of_a_newer_kvvault(place: Place) -> None:
    descriptor = place.path / "VAULT"
    descriptor.write_text(descriptor.read_text().replace('"format": 1', '"format": 99'))
    result = run("status", *place.flags)
    assert result.code == 1
    result.assert_two_lines()
    assert "format 99" in result.err


@pytest.mark.parametrize(
    "text",
    [
        "byts>1",
        "bytes>1XB",
        "bytes>",
        "bytes>-1",
        "bytes~1",
        "blocks>1.5",
        "state>sealed",
        "id>00",
        "id~00",
        "id=xyz",
        "created_at>yesterday",
        "created_at>0000-00-00",
        "age>1",
        "age>1y",
        "nonsense",
        "",
        "=",
        "bytes" + "9" * 100_000,
        "bytes>" + "9" * 100_000,
    ],
)
def test_bad_filters(place: Place, text: str) -> None:
    result = run("ls", "segments", *place.flags, "--filter", text)
    assert result.code == 2
    result.assert_two_lines()
    assert len(result.err) < 500


@pytest.mark.parametrize("text", ["nope", "bytes:down", "", ":desc", "-bytes"])
def test_bad_sorts(place: Place, text: str) -> None:
    result = run("ls", "segments", *place.flags, "--sort", text)
    assert result.code == 2
    result.assert_two_lines()


def test_no_error_repeats_a_tenant(place: Place) -> None:
    for arguments in (
        ("ls", "tenants", "--filter", f"name>{TENANTS[0]}"),
        ("ls", "tenants", "--filter", f"id={TENANTS[0]}"),
        ("ls", "tenants", "--filter", TENANTS[0]),
        ("show", TENANTS[0]),
    ):
        result = run(*arguments, *place.flags)
        assert result.code == 2
        assert TENANTS[0] not in result.err
    assert TENANTS[0] in run("ls", "tenants", *place.flags).out  # the name is known


def test_debug_adds_the_traceback(tmp_path: Path) -> None:
    plain = run("status", "--vault", tmp_path)
    assert "Traceback" not in plain.err
    debug = run("status", "--vault", tmp_path, "--debug")
    assert "Traceback" in debug.err
    assert debug.err.endswith(plain.err)


def test_a_bug_is_shown_without_its_text(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_vault: Vault) -> None:
        raise RuntimeError("canary: what the bug was holding")

    monkeypatch.setattr(Vault, "segments", broken)
    result = run("status", *place.flags)
    assert result.code == 1
    result.assert_two_lines()
    assert "canary" not in result.err
    assert "canary" in run("status", *place.flags, "--debug").err


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_the_same_form(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: type[errors.KvvaultError] = getattr(errors, name)

    def fail(_vault: Vault) -> None:
        raise kind("what\nhappened", hint="what\tto do")

    monkeypatch.setattr(Vault, "segments", fail)
    result = run("status", *place.flags)
    assert result.code == kind.exit_code
    assert result.err == "error: what happened\nhint: what to do\n"
    assert run("status", *place.flags, "--json").error == {
        "kind": name,
        "message": "what happened",
        "hint": "what to do",
        "exit_code": kind.exit_code,
    }
