"""doctor: every check finds what it is for, and is quiet without it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvvault import doctor
from kvvault.crypto.providers.base import Assurance, ProviderInfo
from kvvault.doctor import Machine, Status, diagnose, worst
from kvvault.doctor import vault as checks
from kvvault.doctor.findings import Finding
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import fill, make_region, run

QUIET = {"key location"}
"""Depends on the machine that runs the tests."""


def status_of(findings: list[Finding], name: str) -> Status:
    [finding] = [finding for finding in findings if finding.name == name]
    return finding.status


def look(place: Place, clock: ManualClock | None = None) -> list[Finding]:
    return doctor.diagnose_vault(place.path, place.key, clock or ManualClock(4e9))


# -- the vault -----------------------------------------------------------------------------------


def test_all_is_well(place: Place, surroundings: Machine) -> None:
    findings = diagnose(place.path, provider=place.key, surroundings=surroundings)
    assert worst(f for f in findings if f.name not in QUIET) is Status.OK, findings
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))


def test_a_finding_has_a_hint_exactly_when_something_is_to_be_done() -> None:
    with pytest.raises(ValueError, match="hint"):
        Finding("x", Status.FAIL, "what", "")
    with pytest.raises(ValueError, match="hint"):
        Finding("x", Status.OK, "what", "hint")


def widen_directory(path: Path) -> None:
    (path / "segments").chmod(0o755)


def widen_vault(path: Path) -> None:
    path.chmod(0o755)


def widen_segment(path: Path) -> None:
    next((path / "segments").glob("*.seg")).chmod(0o640)


def link_segment(path: Path) -> None:
    file = next((path / "segments").glob("*.seg"))
    os.link(file, path.parent / "copy")


def symlink_segment(path: Path) -> None:
    file = next((path / "segments").glob("*.seg"))
    shutil.move(file, path.parent / "moved")
    file.symlink_to(path.parent / "moved")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (widen_directory, "modes"),
        (widen_vault, "modes"),
        (widen_segment, "modes"),
        (link_segment, "links"),
        (symlink_segment, "links"),
    ],
)
def test_unsafe_files_fail_and_are_left_as_they_are(
    place: Place, damage: Callable[[Path], None], name: str
) -> None:
    damage(place.path)
    before = stat.S_IMODE(place.path.stat().st_mode)
    findings = look(place)
    assert status_of(findings, name) is Status.FAIL
    assert status_of(findings, "contents") is Status.WARN
    assert stat.S_IMODE(place.path.stat().st_mode) == before
    assert run("doctor", *place.flags).code == 1


def test_somebody_elses_files(place: Place) -> None:
    tree = checks.read_tree(place.path)
    uid = os.geteuid()
    assert worst(checks.check_tree(tree, uid)) is Status.OK
    findings = checks.check_tree(tree, uid + 1)
    assert status_of(findings, "owner") is Status.FAIL
    one = replace(tree, entries=(replace(tree.entries[0], owner=uid + 1), *tree.entries[1:]))
    assert status_of(checks.check_tree(one, uid), "owner") is Status.FAIL


@pytest.mark.parametrize("name", ["notes.txt", "segments/x.seg", "segments/.hidden", "segments/d/"])
def test_foreign_files(place: Place, name: str) -> None:
    assert status_of(look(place), "foreign files") is Status.OK
    if name.endswith("/"):
        (place.path / name).mkdir(mode=0o700)
    else:
        (place.path / name).touch(mode=0o600)
    assert status_of(look(place), "foreign files") is Status.WARN


def test_files_that_cannot_be_listed(place: Place) -> None:
    shutil.rmtree(place.path / "segments")
    (place.path / "segments").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(_path: Path) -> checks.Tree:
            raise PermissionError(13, "denied")

        patch.setattr(checks, "read_tree", refuse)
        assert status_of(look(place), "files") is Status.FAIL


def test_no_vault(tmp_path: Path) -> None:
    findings = doctor.diagnose_vault(tmp_path / "none", None, ManualClock())
    assert [f.status for f in findings] == [Status.FAIL]
    result = run("doctor", "--vault", tmp_path / "none")
    assert result.code == 1
    assert "there is no vault" in result.out


def test_catalog_missing_new_and_damaged(place: Place, tmp_path: Path) -> None:
    assert status_of(look(place), "catalog") is Status.OK
    catalog = place.path / "catalog.sqlite3"
    whole = catalog.read_bytes()
    catalog.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    assert status_of(look(place), "catalog") is Status.FAIL
    catalog.write_bytes(b"something else entirely, not SQLite" * 200)
    assert status_of(look(place), "catalog") is Status.FAIL
    catalog.unlink()
    assert status_of(look(place), "catalog") is Status.FAIL
    for segment in (place.path / "segments").iterdir():
        segment.unlink()
    assert status_of(look(place), "catalog") is Status.WARN


def test_a_catalog_of_another_revision(place: Place) -> None:
    import sqlite3

    with sqlite3.connect(place.path / "catalog.sqlite3") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    findings = checks.check_catalog(place.path)
    assert status_of(findings, "catalog") is Status.WARN
    assert "9999" in findings[0].what


def test_sqlite_is_safe_and_old_ones_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(checks.check_sqlite()) is Status.OK
    monkeypatch.setattr("kvvault.catalog.database.sqlite_version", lambda: (3, 40, 1))
    assert status_of(checks.check_sqlite(), "sqlite") is Status.WARN
    monkeypatch.setattr("kvvault.catalog.database.pragma", lambda *_: 0)
    assert status_of(checks.check_sqlite(), "secure delete") is Status.FAIL


def test_keys(place: Place, tmp_path: Path) -> None:
    assert status_of(look(place), "keys") is Status.OK
    missing = replace(place, key=f"file:{tmp_path}/missing.key")
    assert status_of(look(missing), "keys") is Status.FAIL


def test_key_location(tmp_path: Path, memory: Path) -> None:
    def info(location: Path | None) -> ProviderInfo:
        return ProviderInfo("x:", Assurance.LOGICAL, "because", location)

    (tmp_path / "vault").mkdir()
    assert worst(checks.check_key_location(info(None), tmp_path)) is Status.OK
    same = checks.check_key_location(info(tmp_path / "key"), tmp_path / "vault")
    assert worst(same) is Status.WARN
    if tmp_path.stat().st_dev != memory.stat().st_dev:
        other = checks.check_key_location(info(memory / "key"), tmp_path / "vault")
        assert worst(other) is Status.OK


def test_key_file(tmp_path: Path) -> None:
    uid = os.geteuid()
    key = tmp_path / "key"
    info = ProviderInfo("file:", Assurance.LOGICAL, "because", key)
    assert checks.check_key_file(replace(info, location=None), uid) == []
    assert worst(checks.check_key_file(info, uid)) is Status.FAIL  # not there
    key.touch(mode=0o600)
    assert worst(checks.check_key_file(info, uid)) is Status.OK
    assert worst(checks.check_key_file(info, uid + 1)) is Status.FAIL
    key.chmod(0o640)
    assert worst(checks.check_key_file(info, uid)) is Status.FAIL
    key.chmod(0o600)
    os.link(key, tmp_path / "second")
    assert worst(checks.check_key_file(info, uid)) is Status.FAIL


def test_a_tenant_whose_key_does_not_open(place: Place) -> None:
    import sqlite3

    with sqlite3.connect(place.path / "catalog.sqlite3") as connection:
        connection.execute("UPDATE tenants SET wrapped_key = zeroblob(60) WHERE rowid = 1")
    connection.close()
    findings = look(place)
    assert status_of(findings, "tenant keys") is Status.FAIL
    assert "canary" not in str(findings)


@pytest.mark.parametrize(("now", "expected"), [(4e9, "ok"), (1e9, "fail"), (1.75e9, "warn")])
def test_clock(place: Place, now: float, expected: str) -> None:
    assert status_of(look(place, ManualClock(now)), "clock") == expected


def test_recovery(place: Place) -> None:
    assert status_of(look(place), "recovery") is Status.OK
    (place.path / "segments" / ("ab" * 16 + ".seg")).touch(mode=0o600)
    assert status_of(look(place), "recovery") is Status.WARN


def test_missing_bytes_are_something_to_repair(place: Place) -> None:
    first, second = sorted((place.path / "segments").glob("*.seg"))
    first.unlink()
    second.write_bytes(second.read_bytes() + b"behind the last block")
    with Vault.open(place.path, provider=place.key, read_only=True) as vault:
        pending = doctor.pending_repair(place.path, vault.segments, 4e9)
    assert pending.missing_segments == 1
    assert pending.excess_bytes == len("behind the last block")
    assert "bytes missing" in pending.summary()


def test_space(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvvault.doctor import disk

    real = os.statvfs(place.path)
    for share, expected in ((0.5, Status.OK), (0.01, Status.WARN)):
        values = list(real)
        values[4] = int(real.f_blocks * share)  # f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _, v=values: os.statvfs_result(v))
        assert worst(disk.check_space(place.path)) is expected


def test_direct_io_is_tried_without_writing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir(place.path))
    [finding] = checks.check_direct(place.path)
    assert finding.status in (Status.OK, Status.WARN)
    assert sorted(os.listdir(place.path)) == before

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    assert worst(checks.check_direct(place.path)) is Status.WARN


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def here(surroundings: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`kvvault doctor` looks at the fake machine."""
    monkeypatch.setattr(doctor, "Machine", lambda: surroundings)
    return surroundings


def test_without_a_vault_only_the_machine_is_looked_at(here: Machine) -> None:
    result = run("doctor")
    assert result.code == 0, result
    assert "only the machine" in result.err
    document = run("doctor", "--json").document
    assert document["vault"] is None
    assert document["status"] in ("ok", "warn")


def test_warnings_alone_are_0(here: Machine, place: Place) -> None:
    (here.proc / "sys/kernel/core_pattern").write_text("|handler")
    result = run("doctor", *place.flags, "--json")
    assert result.code == 0
    assert result.document["status"] == "warn"
    assert "ulimit" not in result.err
    text = run("doctor", *place.flags)
    assert "warn  core dumps" in text.out
    assert "-> " in text.out


def test_fix_needs_a_yes(here: Machine) -> None:
    path = make_region(here)
    assert run("doctor").code == 1
    refused = run("doctor", "--fix")  # no terminal
    assert refused.code == 2
    assert "error: this needs a confirmation" in refused.err
    assert path.exists()
    planned = run("doctor", "--fix", "--dry-run")
    assert planned.code == 1
    assert f"to remove: {path} (8.0 KiB)" in planned.err
    assert path.exists()
    fixed = run("doctor", "--fix", "--yes", "--json")
    assert fixed.code == 0
    assert fixed.document["removed"] == [str(path)]
    assert not path.exists()
    assert "no shared-memory region can be removed" in run("doctor", "--fix", "-y").err


@pytest.mark.parametrize(
    ("answer", "code", "kept"),
    [
        ("y\n", 0, False),
        ("yes\n", 0, False),
        ("n\n", 130, True),
        ("\n", 130, True),
        ("", 130, True),
    ],
)
def test_fix_asks_on_a_terminal(
    here: Machine, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, kept: bool
) -> None:
    path = make_region(here)
    monkeypatch.setattr("kvvault.cli.output._is_terminal", lambda stream: stream is sys.stdin)
    result = run("doctor", "--fix", stdin=answer)
    assert result.code == code
    assert "[y/N]" in result.err
    assert path.exists() is kept


def test_a_region_that_cannot_be_removed(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    make_region(here)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    result = run("doctor", "--fix", "--yes")
    assert result.code == 1
    assert "error: a region could not be removed: operation not permitted" in result.err


def test_doctor_beside_an_engine(here: Machine, place: Place) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        fill(vault, ("busy-canary",))
        result = run("doctor", *place.flags, "--json")
        assert result.code == 0
        assert "canary" not in result.out + result.err
