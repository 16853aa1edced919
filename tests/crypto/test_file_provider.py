"""What is particular to the key file: modes, links, durability, a hostile or damaged file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.crypto.providers import FileProvider, open_provider
from kvvault.errors import (
    FormatError,
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    StorageError,
    UnsafeFileError,
    UnsupportedVersionError,
    UsageError,
    VaultExistsError,
    WrongKeyError,
)

KEY = bytes(range(32))
AAD = b"place"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "root.key"


@pytest.fixture
def provider(path: Path) -> FileProvider:
    return FileProvider.create(path)


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def root_key(path: Path, epoch: str) -> str:
    document = json.loads(path.read_text())
    found: list[str] = [entry["key"] for entry in document["epochs"] if entry["epoch"] == epoch]
    return found[0]


def everything_beside(path: Path) -> str:
    return "".join(item.read_text() for item in path.parent.iterdir())


# ------------------------------------------------------------------- REQ-F1, F2: whose file


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_req_f1_modes_do_not_depend_on_the_umask(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "root.key"
    with umask(mask):
        provider = FileProvider.create(path)
        assert mode(path) == 0o600
        epoch = provider.create_epoch()
        assert mode(path) == 0o600
        provider.destroy(epoch)
    assert {mode(item) for item in tmp_path.iterdir()} == {0o600}


def test_req_f1_the_directory_is_made_private(tmp_path: Path) -> None:
    with umask(0):
        FileProvider.create(tmp_path / "keys" / "root.key")
    assert mode(tmp_path / "keys") == 0o700


@pytest.mark.parametrize("wide", [0o640, 0o604, 0o660, 0o666, 0o610, 0o601, 0o620, 0o602])
def test_req_f1_wider_modes_are_refused(path: Path, provider: FileProvider, wide: int) -> None:
    epoch = provider.create_epoch()
    path.chmod(wide)
    with pytest.raises(UnsafeFileError) as caught:
        FileProvider.open(path)
    assert "chmod 600" in caught.value.hint
    for call in (
        lambda: provider.wrap(epoch, KEY, AAD),
        provider.create_epoch,
        lambda: provider.destroy(epoch),
    ):
        with pytest.raises(UnsafeFileError):
            call()
    path.chmod(0o600)
    assert FileProvider.open(path).epochs() == [epoch]


def test_a_read_only_key_file_is_fine(path: Path, provider: FileProvider) -> None:
    epoch = provider.create_epoch()
    path.chmod(0o400)
    assert FileProvider.open(path).epochs() == [epoch]


def test_req_f2_a_symbolic_link_is_refused(path: Path, provider: FileProvider) -> None:
    link = path.with_name("link.key")
    link.symlink_to(path)
    with pytest.raises(UnsafeFileError, match="symbolic link"):
        FileProvider.open(link)
    FileProvider.open(path)


def test_req_f2_a_second_name_is_refused(path: Path, provider: FileProvider) -> None:
    other = path.with_name("copy.key")
    os.link(path, other)
    with pytest.raises(UnsafeFileError, match="second name"):
        FileProvider.open(path)
    other.unlink()
    FileProvider.open(path)


def test_req_f2_what_is_no_regular_file_is_refused_without_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "directory").mkdir(mode=0o700)
    for name in ("fifo", "directory"):
        with pytest.raises(UnsafeFileError, match="regular"):
            FileProvider.open(tmp_path / name)


def test_req_f1_a_foreign_owner_is_refused(
    path: Path, provider: FileProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    someone_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: someone_else)
    with pytest.raises(UnsafeFileError, match="another user"):
        FileProvider.open(path)


def test_req_f1_a_foreign_directory_is_refused(
    path: Path, provider: FileProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat

    def fstat(fd: int) -> Any:
        facts = real(fd)
        if not stat.S_ISDIR(facts.st_mode):
            return facts
        return os.stat_result((*facts[:4], os.geteuid() + 1, *facts[5:10]))

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(UnsafeFileError, match="directory"):
        FileProvider.open(path)


@pytest.mark.parametrize("wide", [0o770, 0o707, 0o777])
def test_req_f1_a_directory_where_others_may_swap_files_is_refused(
    path: Path, provider: FileProvider, wide: int
) -> None:
    path.parent.chmod(wide)
    with pytest.raises(UnsafeFileError, match="swap"):
        FileProvider.open(path)
    with pytest.raises(UnsafeFileError, match="swap"):
        FileProvider.create(path.with_name("new.key"))
    path.parent.chmod(0o1777)
    FileProvider.open(path)
    path.parent.chmod(0o755)
    FileProvider.open(path)


# --------------------------------------------------------------------- making and finding it


@pytest.mark.parametrize("taken", ["file", "directory", "dangling link"])
def test_create_never_overwrites(tmp_path: Path, taken: str) -> None:
    path = tmp_path / "root.key"
    if taken == "file":
        path.write_text("precious")
    elif taken == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(VaultExistsError):
        FileProvider.create(path)
    if taken == "file":
        assert path.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_missing_file_is_a_missing_key(path: Path, provider: FileProvider) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    hidden = path.rename(path.with_name("hidden"))
    for call in (
        lambda: FileProvider.open(path),
        lambda: FileProvider.open(path.parent / "no directory" / "x.key"),
        lambda: provider.unwrap(epoch, wrapped, AAD),
        lambda: provider.destroy(epoch),
    ):
        with pytest.raises(WrongKeyError, match="missing") as caught:
            call()
        assert caught.value.exit_code == 12
    hidden.rename(path)
    assert provider.unwrap(epoch, wrapped, AAD) == KEY


def test_another_vaults_key_file_is_a_wrong_key_not_a_destroyed_one(tmp_path: Path) -> None:
    mine, other = (FileProvider.create(tmp_path / f"{name}.key") for name in ("mine", "other"))
    epoch = mine.create_epoch()
    other.create_epoch()
    wrapped = mine.wrap(epoch, KEY, AAD)
    with pytest.raises(WrongKeyError):
        other.unwrap(epoch, wrapped, AAD)
    with pytest.raises(WrongKeyError):
        other.destroy(epoch)
    assert mine.unwrap(epoch, wrapped, AAD) == KEY


@pytest.mark.parametrize("bad", ["root.key", "./root.key", "/", "/tmp/.."])
def test_paths_that_name_no_file_are_refused(bad: str) -> None:
    for call in (FileProvider.open, FileProvider.create):
        with pytest.raises(UsageError, match="absolute"):
            call(Path(bad))


def test_a_full_or_failing_disk(
    path: Path, provider: FileProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = provider.create_epoch()
    before = path.read_bytes()

    def fail(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError) as caught:
            FileProvider.create(path.with_name("second.key"))
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(KeyUnavailableError, match="space"):
            provider.create_epoch()
        with pytest.raises(KeyUnavailableError, match="space"):
            provider.destroy(epoch)
    assert path.read_bytes() == before
    # The files given up are gone, keys and all.
    left = {item.name for item in path.parent.iterdir()}
    assert left == {"root.key", ".root.key.lock", ".second.key.lock"}
    provider.destroy(epoch)
    assert provider.epochs() == []


def test_no_permission(path: Path, provider: FileProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def deny(name: Any, flags: int, mode_: int = 0o777, *, dir_fd: int | None = None) -> int:
        if name == path.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags, mode_, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(UnsafeFileError, match="this user"):
        provider.epochs()


# -------------------------------------------------------------------------- what is inside

ID = "0123456789abcdef" * 2
ID2 = "fedcba9876543210" * 2
HEX = "a1" * 32
GOOD: dict[str, Any] = {
    "format": "kvvault-key-file",
    "version": 1,
    "epochs": [{"epoch": ID, "key": HEX}],
    "destroyed": [ID2],
}
BAD: dict[str, Any] = {
    "nothing": "",
    "not JSON": "hello",
    "not text": b"\xff\xfe\x00",
    "a list": [],
    "too deep": "[" * 200_000,
    "too large": json.dumps(GOOD) + " " * (5 << 20),
    "another format": {**GOOD, "format": "other"},
    "unknown name": {**GOOD, "extra": 1},
    "missing name": {key: value for key, value in GOOD.items() if key != "destroyed"},
    "name twice": json.dumps(GOOD)[:-1] + ', "version": 1}',
    "epochs no list": {**GOOD, "epochs": {}},
    "epoch no object": {**GOOD, "epochs": [ID]},
    "epoch with extra": {**GOOD, "epochs": [{"epoch": ID, "key": HEX, "x": 1}]},
    "epoch twice": {**GOOD, "epochs": [{"epoch": ID, "key": HEX}] * 2},
    "short key": {**GOOD, "epochs": [{"epoch": ID, "key": HEX[2:]}]},
    "long key": {**GOOD, "epochs": [{"epoch": ID, "key": HEX + "00"}]},
    "capitals": {**GOOD, "epochs": [{"epoch": ID, "key": HEX.upper()}]},
    "spaces in key": {**GOOD, "epochs": [{"epoch": ID, "key": HEX[:-2] + "  "}]},
    "number as key": {**GOOD, "epochs": [{"epoch": ID, "key": 5}]},
    "bad epoch": {**GOOD, "epochs": [{"epoch": "x" * 32, "key": HEX}]},
    "bad destroyed": {**GOOD, "destroyed": [7]},
    "both": {**GOOD, "destroyed": [ID]},
}


def put(path: Path, content: Any) -> None:
    if isinstance(content, str):
        content = content.encode()
    elif not isinstance(content, bytes):
        content = json.dumps(content).encode()
    path.write_bytes(content)
    path.chmod(0o600)


def test_the_format_does_not_change_between_releases(path: Path, provider: FileProvider) -> None:
    put(path, GOOD)
    opened = FileProvider.open(path)
    assert opened.epochs() == [ID]
    opened.destroy(ID2)
    with pytest.raises(KeyDestroyedError):
        opened.wrap(ID2, KEY, AAD)
    made = opened.create_epoch()
    document = json.loads(path.read_text())
    assert document.keys() == GOOD.keys()
    assert document["epochs"][0] == GOOD["epochs"][0]
    assert document["epochs"][1]["epoch"] == made
    assert document["destroyed"] == [ID2]


@pytest.mark.parametrize("name", BAD)
def test_req_f4_what_is_no_key_file_is_refused(
    path: Path, provider: FileProvider, name: str
) -> None:
    put(path, BAD[name])
    before = path.read_bytes()
    with pytest.raises(FormatError) as caught:
        FileProvider.open(path)
    assert HEX not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}".lower()
    with pytest.raises(FormatError):
        provider.create_epoch()
    # It is never "repaired" by being overwritten.
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_by_name(
    path: Path, provider: FileProvider, version: object
) -> None:
    put(path, {**GOOD, "version": version})
    with pytest.raises(UnsupportedVersionError):
        FileProvider.open(path)


def test_req_c8_damage_never_gives_a_wrong_key_and_never_crashes(tmp_path: Path) -> None:
    path = tmp_path / "root.key"
    provider = FileProvider.create(path)
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    whole = path.read_bytes()

    @given(data=st.data())
    def damage(data: st.DataObject) -> None:
        bad = bytearray(whole)
        if data.draw(st.booleans()):
            bit = data.draw(st.integers(0, 8 * len(bad) - 1))
            bad[bit // 8] ^= 1 << bit % 8
        else:
            del bad[data.draw(st.integers(0, len(bad) - 2)) :]
        put(path, bytes(bad))
        try:
            key = FileProvider.open(path).unwrap(epoch, wrapped, AAD)
        except (FormatError, WrongKeyError):
            return
        assert key == KEY

    damage()
    put(path, whole)
    assert provider.unwrap(epoch, wrapped, AAD) == KEY


# --------------------------------------------------------- several processes, dying writers


def test_another_process_destroys(path: Path, provider: FileProvider) -> None:
    doomed, kept = provider.create_epoch(), provider.create_epoch()
    wrapped = provider.wrap(doomed, KEY, AAD)
    code = (
        "import sys; from kvvault.crypto.providers import open_provider;"
        "open_provider(sys.argv[1]).destroy(sys.argv[2])"
    )
    uri = provider.describe().uri
    subprocess.run([sys.executable, "-c", code, uri, doomed], check=True, timeout=60)
    with pytest.raises(KeyDestroyedError):
        provider.unwrap(doomed, wrapped, AAD)
    assert provider.epochs() == [kept]


def test_writers_wait_for_each_other_no_longer_than_their_time(
    path: Path, provider: FileProvider
) -> None:
    epoch = provider.create_epoch()
    lock = os.open(path.with_name(".root.key.lock"), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(KeyUnavailableError, match="another process"):
        provider.create_epoch(timeout=0.05)
    with pytest.raises(KeyUnavailableError, match="another process"):
        provider.destroy(epoch, timeout=0.05)
    # Readers need no lock.
    assert provider.epochs(timeout=0.05) == [epoch]
    os.close(lock)
    provider.destroy(epoch)


def test_a_reader_that_meets_a_replacement_reads_the_new_file(
    path: Path, provider: FileProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    real = os.open
    turns: list[int] = []

    def replace_after_open(
        name: Any, flags: int, mode_: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        fd = real(name, flags, mode_, dir_fd=dir_fd)
        if name == path.name and not turns:
            turns.append(1)
            FileProvider(path).destroy(epoch)
        return fd

    monkeypatch.setattr(os, "open", replace_after_open)
    with pytest.raises(KeyDestroyedError):
        provider.unwrap(epoch, wrapped, AAD)
    assert turns


def test_req_k4_a_destroyed_key_is_in_no_file(path: Path, provider: FileProvider) -> None:
    doomed, kept = provider.create_epoch(), provider.create_epoch()
    secret = root_key(path, doomed)
    # What a writer leaves that was killed between its write and its rename.
    leftover = path.with_name(".root.key.new")
    leftover.write_bytes(path.read_bytes())
    assert everything_beside(path).count(secret) == 2
    provider.destroy(doomed)
    assert secret not in everything_beside(path)
    assert root_key(path, kept) in everything_beside(path)
    leftover.write_text(secret)
    provider.destroy(doomed)
    assert secret not in everything_beside(path)


CALLS = ["open", "fstat", "fchmod", "fsync", "rename", "unlink", "stat"]


def test_req_f3_a_fault_at_every_call_leaves_the_old_or_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error at the n-th call, for every n: old or new state, and trying again works."""
    failed = []
    for nth in count():
        path = tmp_path / f"{nth}" / "root.key"
        provider = FileProvider.create(path)
        doomed, kept = provider.create_epoch(), provider.create_epoch()
        wrapped_doomed = provider.wrap(doomed, KEY, AAD)
        wrapped_kept = provider.wrap(kept, KEY, AAD)
        secret = root_key(path, doomed)
        path.with_name(".root.key.new").write_text("left by a killed writer")
        calls = count()
        tripped: list[str] = []

        def faulty(
            name: str,
            real: Callable[..., Any],
            nth: int = nth,
            calls: Any = calls,
            t: Any = tripped,
        ) -> Callable[..., Any]:
            def call(*args: Any, **keywords: Any) -> Any:
                if next(calls) == nth:
                    t.append(name)
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args, **keywords)

            return call

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, faulty(name, getattr(os, name)))
            try:
                provider.destroy(doomed)
            except KeyUnavailableError:
                assert tripped
            else:
                assert not tripped
        opened = FileProvider.open(path)
        assert opened.epochs() in ([doomed, kept], [kept])
        assert opened.unwrap(kept, wrapped_kept, AAD) == KEY
        opened.destroy(doomed)
        with pytest.raises(KeyDestroyedError):
            opened.unwrap(doomed, wrapped_doomed, AAD)
        assert opened.unwrap(kept, wrapped_kept, AAD) == KEY
        assert secret not in everything_beside(path)
        if not tripped:
            break
        failed += tripped
    assert set(failed) == set(CALLS)


def test_req_c5_kill_9_at_any_moment(tmp_path: Path) -> None:
    """What a killed process had been told is true: made epochs are there, destroyed ones gone."""
    path = tmp_path / "root.key"
    FileProvider.create(path)
    chance = random.Random(7)
    expected: set[str] = set()
    for _ in range(25):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(read_end)
                own = FileProvider.open(path)
                while True:
                    epoch = own.create_epoch()
                    os.write(write_end, f"+{epoch}\n".encode())
                    if len(own.epochs()) > 6:
                        oldest = own.epochs()[0]
                        os.write(write_end, f"?{oldest}\n".encode())
                        own.destroy(oldest)
                        os.write(write_end, f"-{oldest}\n".encode())
            finally:
                os._exit(1)
        os.close(write_end)
        time.sleep(chance.uniform(0.0, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(read_end) as pipe:
            told = pipe.read().splitlines()
        unsure: set[str] = set()
        for line in told:
            {"+": expected.add, "?": unsure.add, "-": expected.discard}[line[0]](line[1:])
        actual = set(FileProvider.open(path).epochs())
        gone = {line[1:] for line in told if line[0] == "-"}
        assert not gone & actual
        assert expected - unsure <= actual
        # At most one epoch was made and not announced.
        assert len(actual - expected) <= 1
        expected = actual
    assert expected


# ------------------------------------------------------------------------------------- URIs


def test_uris(path: Path, provider: FileProvider) -> None:
    epoch = provider.create_epoch()
    for uri in (f"file:{path}", f"file://{path}"):
        assert open_provider(uri).epochs() == [epoch]
        assert open_provider(uri).describe().uri == f"file:{path}"


@pytest.mark.parametrize(
    "uri",
    [
        *("", "file", "file:", "file:relative", "file://host/path", "FILE:/x"),
        *("nosuch:/x", "/path", "ephemeral", "ephemeral:x", "ephemeral:/"),
    ],
)
def test_bad_uris_are_usage_errors(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_provider(uri, create=True)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_an_unknown_scheme_names_the_known_ones_and_does_not_repeat_the_uri() -> None:
    with pytest.raises(UsageError) as caught:
        open_provider("vault-token-s3cr3t:x")
    assert "file:/path" in caught.value.hint
    assert "ephemeral:" in caught.value.hint
    assert "s3cr3t" not in f"{caught.value}{caught.value.hint}"


def test_every_error_of_a_provider_is_in_the_tree(path: Path) -> None:
    for uri in ("file:/proc/1/mem", "file:/dev/null", f"file:{path}/x"):
        with pytest.raises(KvvaultError):
            open_provider(uri)
