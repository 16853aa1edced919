"""The OpenBao provider against a real server, with the policy that the documentation gives."""

from __future__ import annotations

import base64
import http.server
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from uuid import uuid4

import pytest

from kvvault.crypto import aead
from kvvault.crypto.providers import (
    Assurance,
    KeyProvider,
    OpenBaoProvider,
    open_provider,
    transit,
)
from kvvault.errors import (
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    VaultExistsError,
    VaultKeyError,
    WrongKeyError,
)
from kvvault.testing import KeyProviderConformance

from .bao import MOUNT, Bao, documented_policy, key_path, running_bao, uri

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("token")]

KEY = bytes(range(32))
AAD = b"place"


class TestOpenBao(KeyProviderConformance):
    assurance = Assurance.PURGE
    server: Bao

    @pytest.fixture(autouse=True)
    def _server(self, bao: Bao) -> None:
        self.server = bao

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        return OpenBaoProvider.create(uri(self.server).partition(":")[2])

    def reopen(self, provider: KeyProvider) -> KeyProvider | None:
        return OpenBaoProvider.open(provider.describe().uri.partition(":")[2])

    def hanging(self, provider: KeyProvider) -> AbstractContextManager[None] | None:
        return self.server.paused()


class TestOpenBaoByUri(TestOpenBao):
    """As everybody gets it: behind the time limit."""

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        return open_provider(uri(self.server), create=True)

    def reopen(self, provider: KeyProvider) -> KeyProvider | None:
        return open_provider(provider.describe().uri)


# -------------------------------------------------------------------------- what is on the server


def test_req_k4_destruction_deletes_the_key_on_the_server(
    bao: Bao, place: str, provider: KeyProvider
) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    assert bao.status("GET", key_path(place, epoch)) == 200
    provider.destroy(epoch)
    assert bao.status("GET", key_path(place, epoch)) == 404
    with pytest.raises(KeyDestroyedError):
        provider.unwrap(epoch, wrapped, AAD)


def test_keys_can_neither_be_exported_nor_backed_up(
    bao: Bao, place: str, provider: KeyProvider
) -> None:
    path = key_path(place, provider.create_epoch())
    facts = bao.ask("GET", path)["data"]
    assert facts["type"] == "aes256-gcm96"
    assert not facts["exportable"]
    assert not facts["allow_plaintext_backup"]
    assert bao.status("GET", path.replace("/keys/", "/export/encryption-key/")) == 400
    assert bao.status("GET", path.replace("/keys/", "/backup/")) != 200


@pytest.mark.parametrize("flag", ["exportable", "allow_plaintext_backup"])
def test_a_key_that_was_made_exportable_is_worth_less(
    bao: Bao, place: str, provider: KeyProvider, flag: str
) -> None:
    path = key_path(place, provider.create_epoch())
    assert provider.describe().assurance is Assurance.PURGE
    bao.ask("POST", f"{path}/config", {flag: True})
    info = provider.describe()
    assert info.assurance is Assurance.LOGICAL
    assert "export" in info.reason


def test_a_server_that_makes_exportable_keys_is_refused(
    bao: Bao, place: str, provider: KeyProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the server had other defaults: the name that is drawn is taken, by such a key."""
    monkeypatch.setattr(aead, "random_id", lambda: bytes(16))
    monkeypatch.setattr(transit.Server, "names", lambda self: ([], []))
    bao.ask("POST", key_path(place, "00000001" + "0" * 24), {"exportable": True})
    with pytest.raises(KeyUnavailableError, match="exported"):
        provider.create_epoch()


def test_a_name_that_is_taken_is_refused(place: str, provider: KeyProvider) -> None:
    open_provider(place, create=True)  # nothing there yet
    epoch = provider.create_epoch()
    with pytest.raises(VaultExistsError):
        open_provider(place, create=True)
    provider.destroy(epoch)
    with pytest.raises(VaultExistsError):
        open_provider(place, create=True)
    assert open_provider(place).epochs() == []


def test_a_rotated_key_still_opens_what_was_wrapped_before(
    bao: Bao, place: str, provider: KeyProvider
) -> None:
    epoch = provider.create_epoch()
    before = provider.wrap(epoch, KEY, AAD)
    bao.ask("POST", f"{key_path(place, epoch)}/rotate")
    after = provider.wrap(epoch, KEY, AAD)
    assert before[:4] != after[:4]
    for wrapped in (before, after):
        assert provider.unwrap(epoch, wrapped, AAD) == KEY
    provider.destroy(epoch)
    for wrapped in (before, after):
        with pytest.raises(KeyDestroyedError):
            provider.unwrap(epoch, wrapped, AAD)


def test_req_c1_no_bit_of_a_wrap_can_be_changed(provider: KeyProvider) -> None:
    """Every one: Transit takes version 0 for version 1, and base64 has spare bits."""
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    for bit in range(8 * len(wrapped)):
        bad = bytearray(wrapped)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WrongKeyError):
            provider.unwrap(epoch, bytes(bad), AAD)
    assert provider.unwrap(epoch, wrapped, AAD) == KEY


# ------------------------------------------------------------ what does not count as destroyed


def test_req_k4_a_soft_deleted_key_is_not_destroyed(
    bao: Bao, place: str, provider: KeyProvider
) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    bao.ask("DELETE", f"{key_path(place, epoch)}/soft-delete")
    with pytest.raises(KeyUnavailableError, match="soft-deleted"):
        provider.unwrap(epoch, wrapped, AAD)
    with pytest.raises(KeyUnavailableError, match="soft-deleted"):
        provider.wrap(epoch, KEY, AAD)
    bao.ask("POST", f"{key_path(place, epoch)}/soft-delete-restore")
    assert provider.unwrap(epoch, wrapped, AAD) == KEY
    bao.ask("DELETE", f"{key_path(place, epoch)}/soft-delete")
    provider.destroy(epoch)
    assert bao.status("GET", key_path(place, epoch)) == 404
    with pytest.raises(KeyDestroyedError):
        provider.unwrap(epoch, wrapped, AAD)


def test_req_k4_a_disabled_engine_proves_nothing(bao: Bao, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = f"m{uuid4().hex[:8]}"
    bao.ask("POST", f"sys/mounts/{mount}", {"type": "transit"})
    bao.ask("POST", f"{mount}/config/keys", {"disable_upsert": True})
    monkeypatch.setenv("BAO_TOKEN", bao.root_token)
    provider = open_provider(uri(bao, mount=mount), create=True)
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    assert provider.unwrap(epoch, wrapped, AAD) == KEY
    bao.ask("DELETE", f"sys/mounts/{mount}")
    for call in (
        lambda: provider.unwrap(epoch, wrapped, AAD),
        lambda: provider.destroy(epoch),
        provider.epochs,
    ):
        with pytest.raises(KeyUnavailableError):
            call()


def test_req_k4_a_token_that_may_not_delete_destroys_nothing(
    bao: Bao, provider: KeyProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    reader = f"""
    path "{MOUNT}/keys" {{ capabilities = ["list"] }}
    path "{MOUNT}/keys/+" {{ capabilities = ["read", "update"] }}
    path "{MOUNT}/keys/+/config" {{ capabilities = ["update"] }}
    path "{MOUNT}/encrypt/+" {{ capabilities = ["update"] }}
    path "{MOUNT}/decrypt/+" {{ capabilities = ["update"] }}
    path "sys/capabilities-self" {{ capabilities = ["update"] }}
    """
    bao.ask("PUT", "sys/policies/acl/reader", {"policy": reader})
    with monkeypatch.context() as patch:
        patch.setenv("BAO_TOKEN", bao.token("reader"))
        with pytest.raises(KeyUnavailableError):
            provider.destroy(epoch)
        assert provider.epochs() == [epoch]
        assert provider.unwrap(epoch, wrapped, AAD) == KEY
    # The marker is there now, and means nothing while the key is.
    provider.destroy(epoch)
    with pytest.raises(KeyDestroyedError):
        provider.unwrap(epoch, wrapped, AAD)


@pytest.mark.parametrize("step", ["make_key", "delete_key"])
def test_req_k4_a_step_that_only_seems_to_succeed_is_noticed(
    provider: KeyProvider, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    with monkeypatch.context() as patch:
        patch.setattr(transit.Server, step, lambda self, name: None)
        with pytest.raises(KeyUnavailableError, match="did not delete"):
            provider.destroy(epoch)
    if step == "delete_key":
        assert provider.unwrap(epoch, wrapped, AAD) == KEY
        provider.destroy(epoch)
        with pytest.raises(KeyDestroyedError):
            provider.unwrap(epoch, wrapped, AAD)


def test_req_k4_a_decryption_refused_for_the_tokens_sake_proves_nothing(
    bao: Bao, provider: KeyProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = documented_policy().replace(f'"{MOUNT}/decrypt/+"', '"elsewhere"')
    bao.ask("PUT", "sys/policies/acl/blind", {"policy": blind})
    epoch = provider.create_epoch()
    with monkeypatch.context() as patch:
        patch.setenv("BAO_TOKEN", bao.token("blind"))
        with pytest.raises(KeyUnavailableError, match="refuses the token"):
            provider.destroy(epoch)
    provider.destroy(epoch)


def test_req_k4_an_engine_made_anew_does_not_claim_that_it_destroyed(
    bao: Bao, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = f"m{uuid4().hex[:8]}"
    monkeypatch.setenv("BAO_TOKEN", bao.root_token)

    def enable() -> None:
        bao.ask("POST", f"sys/mounts/{mount}", {"type": "transit"})
        bao.ask("POST", f"{mount}/config/keys", {"disable_upsert": True})

    enable()
    provider = open_provider(uri(bao, mount=mount), create=True)
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    bao.ask("DELETE", f"sys/mounts/{mount}")
    enable()
    with pytest.raises(WrongKeyError):
        provider.unwrap(epoch, wrapped, AAD)
    with pytest.raises(WrongKeyError):
        provider.destroy(epoch)


# ------------------------------------------------------------------------------------ failures


def test_req_k9_restart_and_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys survive a restart of the server; sealed or down, it is unavailable and nothing else."""
    with running_bao(tmp_path / "bao") as own:
        monkeypatch.setenv("BAO_TOKEN", own.token())
        provider = open_provider(uri(own, "x"), create=True)
        doomed, kept = provider.create_epoch(), provider.create_epoch()
        wrapped = provider.wrap(kept, KEY, AAD)
        wrapped_doomed = provider.wrap(doomed, KEY, AAD)
        provider.destroy(doomed)

        def all_unavailable() -> None:
            for call in (
                lambda: provider.unwrap(kept, wrapped, AAD),
                lambda: provider.unwrap(doomed, wrapped_doomed, AAD),
                lambda: provider.wrap(kept, KEY, AAD),
                lambda: provider.destroy(kept),
                provider.create_epoch,
                provider.epochs,
                provider.describe,
                lambda: open_provider(uri(own, "x")),
            ):
                with pytest.raises(KeyUnavailableError):
                    call()

        own.seal()
        all_unavailable()
        own.unseal()
        assert provider.unwrap(kept, wrapped, AAD) == KEY

        own.stop()
        all_unavailable()
        own.start()
        all_unavailable()  # sealed after a start
        own.unseal()
        assert provider.unwrap(kept, wrapped, AAD) == KEY
        assert provider.epochs() == [kept]
        with pytest.raises(KeyDestroyedError):
            provider.unwrap(doomed, wrapped_doomed, AAD)


def test_req_k9_a_server_that_vanishes_in_the_middle_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_bao(tmp_path / "bao") as own:
        monkeypatch.setenv("BAO_TOKEN", own.token())
        provider = open_provider(uri(own, "x"), create=True)
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, KEY, AAD)
        assert provider.unwrap(epoch, wrapped, AAD) == KEY
        own.pause()  # the request is sent, no answer comes
        results: list[BaseException] = []

        def ask() -> None:
            try:
                provider.unwrap(epoch, wrapped, AAD, timeout=60)
            except VaultKeyError as error:
                results.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)
        own.stop()
        thread.join(60)
        assert [type(error) for error in results] == [KeyUnavailableError]


def test_req_k4_a_destruction_that_was_cut_off_is_repeated(
    bao: Bao, place: str, provider: KeyProvider
) -> None:
    """Killed at each request of a destruction: the key is there and listed, or gone and known."""
    script = """
import os, signal, sys
from kvvault.crypto.providers import OpenBaoProvider, transit
left = int(sys.argv[3])
inner = transit.Server._ask
def ask(self, *args, **kwargs):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return inner(self, *args, **kwargs)
provider = OpenBaoProvider.open(sys.argv[1])
transit.Server._ask = ask
provider.destroy(sys.argv[2])
"""
    rest, steps = place.partition(":")[2], 0
    while True:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, KEY, AAD)
        done = subprocess.run([sys.executable, "-c", script, rest, epoch, str(steps)], timeout=60)
        if epoch in provider.epochs():
            assert provider.unwrap(epoch, wrapped, AAD) == KEY
        else:
            with pytest.raises(KeyDestroyedError):
                provider.unwrap(epoch, wrapped, AAD)
        provider.destroy(epoch)
        with pytest.raises(KeyDestroyedError):
            provider.unwrap(epoch, wrapped, AAD)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        steps += 1
    assert steps >= 6


def test_what_is_no_bao_is_unavailable(token: str) -> None:
    """A proxy's page, a redirect to somewhere else, a server that says nothing sensible."""
    asked: list[str] = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        reply: tuple[int, bytes] = (200, b"")

        def answer(self) -> None:
            asked.append(self.path)
            status, body = type(self).reply
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"http://127.0.0.1:{port}/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_LIST = do_DELETE = answer  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for reply in (
                (200, b""),
                (200, b"<html>sign in</html>"),
                (200, b"[]"),
                (200, b'{"data": {"keys": 3}}'),
                (200, b'{"data": {"name": "x", "plaintext": "==", "ciphertext": "x"}}'),
                (204, b""),
                (302, b""),
                (307, b""),
                (400, b"Client sent an HTTP request to an HTTPS server.\n"),
                (403, b"forbidden by the proxy"),
                (404, b"not found"),
                (429, b'{"errors": []}'),
                (500, b'{"errors": ["internal"]}'),
                (503, b'{"errors": ["sealed"]}'),
            ):
                Stranger.reply = reply
                rest = f"http://127.0.0.1:{port}/kvvault/x"
                unopened = OpenBaoProvider(transit.parse(rest))
                for call in (
                    lambda rest=rest: OpenBaoProvider.open(rest),
                    lambda unopened=unopened: unopened.unwrap("0" * 32, transit.made_up(), AAD),
                    lambda unopened=unopened: unopened.wrap("0" * 32, KEY, AAD),
                    lambda unopened=unopened: unopened.destroy("0" * 32),
                    unopened.create_epoch,
                ):
                    with pytest.raises(KeyUnavailableError):
                        call()
        finally:
            server.shutdown()
            thread.join()
    assert asked
    assert not [path for path in asked if "elsewhere" in path]


def test_req_t6_nothing_secret_in_errors_and_logs(
    bao: Bao, place: str, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.NOTSET)
    provider = open_provider(place, create=True)
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    texts = [repr(provider), repr(provider.describe())]
    with bao.paused():
        for call in (
            lambda: provider.wrap(epoch, KEY, AAD, timeout=0.2),
            lambda: provider.unwrap(epoch, wrapped, AAD, timeout=0.2),
        ):
            with pytest.raises(KeyUnavailableError) as caught:
                call()
            error: KvvaultError = caught.value
            texts += [str(error), repr(error), error.hint, str(error.__cause__)]
    texts += [record.getMessage() for record in caplog.records]
    everything = "\n".join(texts)
    for secret in (token, KEY.hex(), base64.b64encode(KEY).decode()):
        assert secret not in everything


def test_a_child_of_a_fork_does_not_use_its_parents_connections(provider: KeyProvider) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        status = 1
        try:
            for _ in range(20):
                assert provider.unwrap(epoch, wrapped, AAD) == KEY
            status = 0
        finally:
            os._exit(status)
    for _ in range(20):
        assert provider.unwrap(epoch, wrapped, AAD) == KEY
    assert os.waitpid(child, 0)[1] == 0
