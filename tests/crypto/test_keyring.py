"""The kernel keyring: the real one where this process may use it, a clear error where not.

Which of the two is found out by asking the kernel, so something is tested everywhere; that a
forbidden keyring is a clear error is tested everywhere as well, with a real system call filter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from kvvault.crypto.providers import Assurance, KeyProvider, KeyringProvider, keyctl, open_provider
from kvvault.crypto.providers.keyring import from_another_boot
from kvvault.errors import (
    KeyDestroyedError,
    KeyUnavailableError,
    UnsafeFileError,
    UsageError,
    VaultExistsError,
    WrongKeyError,
)
from kvvault.testing import KeyProviderConformance

KEY = bytes(range(32))
AAD = b"place"
_PREFIX = f"test-{uuid4().hex[:8]}-"


def _allowed() -> bool:
    try:
        keyctl.user_keyring()
    except OSError:
        return False
    return True


def _new_name() -> str:
    return _PREFIX + uuid4().hex[:8]


def _ring(name: str) -> int:
    return keyctl.search(keyctl.user_keyring(), "keyring", f"kvvault:{name}")


def _key(name: str, epoch: str) -> int:
    return keyctl.search(_ring(name), "user", f"epoch:{epoch}")


def _python(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True, scope="module")
def nothing_stays() -> Iterator[None]:
    """The keyrings of these tests are taken out of the user's keyring again."""
    yield
    if _allowed():
        user = keyctl.user_keyring()
        for key in keyctl.members(user):
            if keyctl.description(key)[3].startswith(f"kvvault:{_PREFIX}"):
                keyctl.unlink(key, user)


_ASK = """
import sys
from kvvault.crypto.providers import open_provider
provider = open_provider("keyring:" + sys.argv[1])
"""

if _allowed():

    class TestKeyring(KeyProviderConformance):
        assurance = Assurance.PURGE

        def make_provider(self, tmp_path: Path) -> KeyProvider:
            return open_provider(f"keyring:{_new_name()}", create=True)

        def reopen(self, provider: KeyProvider) -> KeyProvider | None:
            return open_provider(provider.describe().uri)

        def root_keys(self, provider: KeyProvider) -> list[bytes]:
            name = provider.describe().uri.partition(":")[2]
            return [bytes(keyctl.payload(_key(name, epoch))) for epoch in provider.epochs()]

    class TestWhatIsInTheKernel:
        @pytest.fixture
        def name(self) -> str:
            return _new_name()

        @pytest.fixture
        def provider(self, name: str) -> KeyringProvider:
            return KeyringProvider.create(name)

        def test_req_k4_the_kernel_refuses_a_destroyed_key_wherever_it_is_linked(
            self, name: str, provider: KeyringProvider
        ) -> None:
            doomed, kept = provider.create_epoch(), provider.create_epoch()
            keys = {epoch: _key(name, epoch) for epoch in (doomed, kept)}
            elsewhere = keyctl.add_key("keyring", "elsewhere", None, keyctl.THREAD_KEYRING)
            for key in keys.values():
                keyctl.link(key, elsewhere)
                assert keyctl.payload_size(key) == 32
            provider.destroy(doomed)
            with pytest.raises(OSError, match=r"revoked|not available"):
                keyctl.payload(keys[doomed])
            with pytest.raises(OSError, match=r"revoked|not available"):
                keyctl.search(elsewhere, "user", f"epoch:{doomed}")
            assert keyctl.payload_size(keys[kept]) == 32
            assert keys[doomed] not in keyctl.members(_ring(name))

        def test_only_the_user_has_rights(self, name: str, provider: KeyringProvider) -> None:
            ring = _ring(name)
            for key in (ring, _key(name, provider.create_epoch()), *keyctl.members(ring)):
                _, owner, mask, _ = keyctl.description(key)
                assert owner == os.geteuid()
                assert mask & 0xFFFF == 0

        def test_a_keyring_that_others_may_use_is_refused(
            self, name: str, provider: KeyringProvider
        ) -> None:
            keyctl.set_permissions(_ring(name), 0x3F3F0003)
            with pytest.raises(UnsafeFileError):
                KeyringProvider.open(name)
            keyctl.set_permissions(_ring(name), keyctl.PRIVATE)
            KeyringProvider.open(name)

        def test_keys_outlive_the_process_that_made_them(self, name: str) -> None:
            script = _ASK.replace("])", "], create=True)") + (
                "epoch = provider.create_epoch()\n"
                "print(epoch, provider.wrap(epoch, bytes(range(32)), b'place').hex())"
            )
            epoch, wrapped = _python(script, name).split()
            provider = KeyringProvider.open(name)
            assert provider.unwrap(epoch, bytes.fromhex(wrapped), AAD) == KEY
            _python(_ASK + f"provider.destroy({epoch!r})", name)
            with pytest.raises(KeyDestroyedError):
                provider.unwrap(epoch, bytes.fromhex(wrapped), AAD)

        def test_a_name_that_is_taken_is_refused(
            self, name: str, provider: KeyringProvider
        ) -> None:
            epoch = provider.create_epoch()
            with pytest.raises(VaultExistsError):
                KeyringProvider.create(name)
            assert provider.epochs() == [epoch]
            KeyringProvider.create(_new_name())

        def test_of_many_that_make_the_same_keyring_at_once_one_wins_and_no_epoch_is_lost(
            self, name: str
        ) -> None:
            """Adding a keyring where one is would throw the other's keys away unnoticed."""

            def make(number: int) -> str:
                script = _ASK + "print(provider.create_epoch())"
                return _python(script, name)

            with ThreadPoolExecutor(6) as pool:
                made = list(pool.map(make, range(6)))
            provider = KeyringProvider.open(name)
            assert sorted(provider.epochs()) == sorted(made)
            for epoch in made:
                assert provider.unwrap(epoch, provider.wrap(epoch, KEY, AAD), AAD) == KEY

        def test_a_keyring_that_was_removed_is_missing_not_destroyed(
            self, name: str, provider: KeyringProvider
        ) -> None:
            epoch = provider.create_epoch()
            wrapped = provider.wrap(epoch, KEY, AAD)
            assert provider.unwrap(epoch, wrapped, AAD) == KEY
            keyctl.unlink(_ring(name), keyctl.user_keyring())
            assert provider.epochs() == []
            assert not from_another_boot(epoch)
            for call in (
                lambda: provider.unwrap(epoch, wrapped, AAD),
                lambda: provider.destroy(epoch),
            ):
                with pytest.raises(WrongKeyError):
                    call()
            # A new one in its place does not vouch for the old one's epochs.
            assert provider.create_epoch() != epoch
            with pytest.raises(WrongKeyError):
                provider.destroy(epoch)

        def test_an_altered_epoch_name_is_unknown_not_destroyed(
            self, provider: KeyringProvider
        ) -> None:
            epoch = provider.create_epoch()
            other = epoch[:-1] + ("0" if epoch[-1] != "0" else "1")
            with pytest.raises(WrongKeyError):
                provider.destroy(other)
            provider.destroy(epoch)
            provider.destroy(epoch)

        def test_keys_of_an_earlier_boot_are_known_to_be_gone(
            self, provider: KeyringProvider
        ) -> None:
            now = provider.create_epoch()
            digit = "0" if now[0] != "0" else "1"
            before = digit + now[1:]
            assert not from_another_boot(now)
            assert from_another_boot(before)
            for call in (
                lambda: provider.unwrap(before, bytes(60), AAD),
                lambda: provider.destroy(before),
            ):
                with pytest.raises(WrongKeyError, match="restarted"):
                    call()

        def test_a_destruction_that_was_cut_off_is_repeated(
            self, name: str, provider: KeyringProvider
        ) -> None:
            epoch = provider.create_epoch()
            wrapped = provider.wrap(epoch, KEY, AAD)
            keyctl.revoke(_key(name, epoch))  # and killed before it was taken out of the keyring
            assert provider.epochs() == []
            with pytest.raises(KeyDestroyedError):
                provider.unwrap(epoch, wrapped, AAD)
            provider.destroy(epoch)
            with pytest.raises(KeyDestroyedError):
                provider.unwrap(epoch, wrapped, AAD)

        def test_purging_for_ever_fills_no_quota(
            self, name: str, provider: KeyringProvider
        ) -> None:
            for _ in range(300):
                provider.destroy(provider.create_epoch())
            assert len(keyctl.members(_ring(name))) == 1

    if os.geteuid() == 0:

        def test_a_full_quota_is_a_clear_error() -> None:
            """A user of this test's own, whom nothing else belongs to."""
            script = """
import os, sys
from kvvault.crypto.providers import keyctl, keyring
from kvvault.errors import KeyUnavailableError
keyring.from_another_boot("")  # import everything before the files are out of reach
b"".decode("ascii")
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
provider = keyring.KeyringProvider.create(sys.argv[1])
keep = provider.create_epoch()
made = []
try:
    for _ in range(300):
        made.append(provider.create_epoch())
except KeyUnavailableError as error:
    print(error.hint)
for epoch in made:
    provider.destroy(epoch)
assert provider.unwrap(keep, provider.wrap(keep, bytes(32), b""), b"") == bytes(32)
keyctl.unlink(provider._ring(), keyctl.user_keyring())
"""
            assert "kernel.keys.maxkeys" in _python(script, _new_name())

else:

    def test_where_the_kernel_refuses_the_error_says_so() -> None:
        for create in (True, False):
            with pytest.raises(KeyUnavailableError, match="may not use") as caught:
                open_provider(f"keyring:{_new_name()}", create=create)
            assert "container" in caught.value.hint.lower()


def test_a_container_that_forbids_the_system_calls() -> None:
    """As container run-times do it: a filter that answers EPERM (Docker) or ENOSYS (gVisor)."""
    script = """
import ctypes, platform, struct, sys
from kvvault.crypto.providers import keyctl, open_provider
from kvvault.errors import KeyUnavailableError

add_key, keyctl_number = keyctl._NUMBERS[platform.machine()]
refuse = 0x00050000 | int(sys.argv[2])  # SECCOMP_RET_ERRNO
code = [
    (0x20, 0, 0, 0),  # load the number of the system call
    (0x15, 1, 0, add_key),
    (0x15, 0, 1, keyctl_number),
    (0x06, 0, 0, refuse),
    (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
]
raw = b"".join(struct.pack("HBBI", *line) for line in code)
held = ctypes.create_string_buffer(raw, len(raw))
program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(held)))
libc = ctypes.CDLL(None, use_errno=True)
zero = ctypes.c_ulong(0)
assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, ctypes.c_ulong(2), program) == 0  # PR_SET_SECCOMP, a filter
for create in (True, False):
    try:
        open_provider("keyring:" + sys.argv[1], create=create)
    except KeyUnavailableError as error:
        print(error, "|", error.hint)
"""
    for number in ("1", "38"):  # EPERM, ENOSYS
        lines = _python(script, _new_name(), number).splitlines()
        assert len(lines) == 2
        assert all("may not use" in line and "seccomp" in line for line in lines)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "a:b", "a" * 65, "\u00e9", "a\n"])
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        open_provider(f"keyring:{name}")


@pytest.mark.parametrize("epoch", ["", "0" * 32, "x" * 64, "0" * 65])
def test_what_is_no_epoch_of_a_keyring_is_not_gone_with_a_boot(epoch: str) -> None:
    assert not from_another_boot(epoch)


def test_an_unknown_boot_is_never_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kvvault.crypto.providers.keyring as module

    assert from_another_boot("0" * 64)
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "missing")
    assert not from_another_boot("0" * 64)
    with pytest.raises(KeyUnavailableError, match="which boot"):
        KeyringProvider("x").unwrap("0" * 64, bytes(60), AAD)


def test_no_secret_in_the_uri_and_the_text() -> None:
    provider = KeyringProvider("x")
    assert re.fullmatch(r"<KeyringProvider 'x'>", repr(provider))
    assert provider.describe().uri == "keyring:x"
