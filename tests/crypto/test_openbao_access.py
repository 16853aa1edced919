"""Who may use an OpenBao server and where it is: tokens, the policy, the URI, TLS."""

from __future__ import annotations

import datetime
import ipaddress
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvvault.crypto.providers import (
    KeyProvider,
    open_provider,
)
from kvvault.errors import (
    ConfigError,
    KeyUnavailableError,
    UnsafeFileError,
    UsageError,
    WrongKeyError,
)

from .bao import MOUNT, Bao, key_path, running_bao, uri

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("token")]

KEY = bytes(range(32))
AAD = b"place"


# ------------------------------------------------------------------------------------- tokens


def test_the_documented_policy_allows_nothing_else(
    bao: Bao, place: str, provider: KeyProvider, token: str
) -> None:
    path = key_path(place, provider.create_epoch())

    def status(method: str, path: str, body: Any = None) -> int:
        answer = bao.http.request(
            method, f"{bao.address}/v1/{path}", json=body, headers={"X-Vault-Token": token}
        )
        return answer.status_code

    assert status("GET", path) == 200
    for method, other, body in (
        ("POST", f"{path}/config", {"exportable": True}),
        ("POST", f"{path}/config", {"allow_plaintext_backup": True}),
        ("POST", f"{path}/config", {"min_decryption_version": 1}),
        ("POST", f"{path}x", {"type": "aes256-gcm96", "exportable": True}),
        ("POST", f"{path}x", {"type": "rsa-4096"}),
        ("POST", f"{path}/rotate", {}),
        ("POST", f"{path}/trim", {"min_available_version": 1}),
        ("DELETE", f"{path}/soft-delete", None),
        ("GET", path.replace("/keys/", "/export/encryption-key/"), None),
        ("GET", path.replace("/keys/", "/backup/"), None),
        ("POST", f"{MOUNT}/encrypt/new-{uuid4().hex}", {"plaintext": "AAAA"}),
        ("POST", f"{MOUNT}/config/keys", {"disable_upsert": False}),
        ("GET", "sys/mounts", None),
    ):
        assert status(method, other, body) == 403, (method, other, body)


def test_a_token_that_may_bring_keys_back_is_refused(
    bao: Bao, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = f"m{uuid4().hex[:8]}"
    bao.ask("POST", f"sys/mounts/{mount}", {"type": "transit"})
    monkeypatch.setenv("BAO_TOKEN", bao.root_token)
    with pytest.raises(KeyUnavailableError, match="too much") as caught:
        open_provider(uri(bao, mount=mount), create=True)
    assert "disable_upsert=true" in caught.value.hint
    bao.ask("POST", f"{mount}/config/keys", {"disable_upsert": True})
    assert open_provider(uri(bao, mount=mount), create=True).epochs() == []


def test_a_token_without_rights_is_unavailable_not_wrong(
    bao: Bao, place: str, provider: KeyProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = provider.create_epoch()
    wrapped = provider.wrap(epoch, KEY, AAD)
    bao.ask("PUT", "sys/policies/acl/nothing", {"policy": 'path "x" { capabilities = ["deny"] }'})
    for bad in (bao.token("nothing"), "s.unknown"):
        with monkeypatch.context() as patch:
            patch.setenv("BAO_TOKEN", bad)
            for call in (
                lambda: open_provider(place),
                provider.create_epoch,
                lambda: provider.wrap(epoch, KEY, AAD),
                lambda: provider.unwrap(epoch, wrapped, AAD),
                lambda: provider.destroy(epoch),
                provider.epochs,
                provider.describe,
            ):
                with pytest.raises(KeyUnavailableError) as caught:
                    call()
                assert bad not in str(caught.value) + caught.value.hint
    assert provider.unwrap(epoch, wrapped, AAD) == KEY


def test_without_a_token_the_error_says_where_to_put_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BAO_TOKEN")
    with pytest.raises(KeyUnavailableError) as caught:
        open_provider(place)
    assert "BAO_TOKEN" in caught.value.hint


def test_the_other_variable_and_a_file_serve_as_well(
    place: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BAO_TOKEN")
    with monkeypatch.context() as patch:
        patch.setenv("VAULT_TOKEN", token)
        assert open_provider(place).epochs() == []
    file = tmp_path / "token"
    file.write_text(token + "\n")
    file.chmod(0o600)
    provider = open_provider(f"{place}?token-file={file}")
    epoch = provider.create_epoch()
    assert provider.describe().uri == f"{place}?token-file={file}"
    file.write_text("s.expired\n")
    with pytest.raises(KeyUnavailableError, match="refuses the token"):
        provider.epochs()
    file.write_text(token)  # an agent renewed it
    assert provider.epochs() == [epoch]


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o666])
def test_a_token_file_that_others_may_read_is_refused(
    place: str, token: str, tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(mode)
    with pytest.raises(UnsafeFileError):
        open_provider(f"{place}?token-file={file}")
    file.chmod(0o640)
    assert open_provider(f"{place}?token-file={file}").epochs() == []


@pytest.mark.parametrize("content", ["", "two words", "line\nbreak", "caf\u00e9"])
def test_a_token_that_cannot_be_one_is_refused_unseen(
    place: str, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(KeyUnavailableError, match="holds no token"):
        open_provider(f"{place}?token-file={file}")


# -------------------------------------------------------------------------------------- the URI


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "bao.example",
        "https://",
        "https://h:8200",
        "https://h:8200/kvvault",
        "https://h:8200/kvvault/../x",
        "https://h:8200/kvvault/a b",
        "https://h:99999/kvvault/a",
        "https://[::1/kvvault/a",
        "https://root:s.secret@h:8200/kvvault/a",
        "https://h:8200/kvvault/a?token=s.secret",
        "https://h:8200/kvvault/a?ca=relative.pem",
        "https://h:8200/kvvault/a?ca=/a&ca=/b",
        "https://h:8200/kvvault/a?namespace=a//b",
        "https://h:8200/kvvault/a#s.secret",
        "ftp://h:8200/kvvault/a",
        "http://bao.example:8200/kvvault/a",
    ],
)
def test_malformed_uris_are_refused_unseen(rest: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_provider(f"openbao:{rest}")
    assert "s.secret" not in str(caught.value) + caught.value.hint


def test_the_uri_is_written_one_way(bao: Bao, place: str) -> None:
    port = bao.address.rpartition(":")[2]
    other = place.replace("127.0.0.1", "LOCALHOST").replace(f":{port}/", f":{port}//")
    assert open_provider(f"{other}/").describe().uri == place.replace("127.0.0.1", "localhost")


def test_two_names_on_one_mount_do_not_see_each_other(bao: Bao) -> None:
    name = f"n{uuid4().hex[:8]}"
    one, two = (open_provider(uri(bao, n), create=True) for n in (name, f"{name}-a"))
    first, second = one.create_epoch(), two.create_epoch()
    assert one.epochs() == [first]
    assert two.epochs() == [second]
    two.destroy(second)
    assert one.epochs() == [first]
    with pytest.raises(WrongKeyError):
        two.destroy(first)
    assert one.epochs() == [first]


def test_a_proxy_of_the_environment_is_not_used(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "")
    provider = open_provider(place, create=True)
    epoch = provider.create_epoch()
    assert provider.unwrap(epoch, provider.wrap(epoch, KEY, AAD), AAD) == KEY


def test_epoch_names_do_not_lead_elsewhere(provider: KeyProvider, bao: Bao) -> None:
    for name in ("../../sys/seal", "", "A" * 32, "0" * 31, "0" * 32 + "/rotate", "0" * 32 + "\n"):
        for call in (
            lambda name=name: provider.destroy(name),
            lambda name=name: provider.wrap(name, KEY, AAD),
            lambda name=name: provider.unwrap(name, bytes(64), AAD),
        ):
            with pytest.raises(WrongKeyError):
                call()
    assert bao.ask("GET", "sys/seal-status")["sealed"] is False


def test_without_the_extra_the_error_names_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hvac", None)
    with pytest.raises(ConfigError) as caught:
        open_provider(place)
    assert "kvvault[openbao]" in caught.value.hint


# ----------------------------------------------------------------------------------------- TLS


def test_tls_with_an_authority_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = _certificate(tmp_path / "right.pem"), _certificate(tmp_path / "wrong.pem")
    with running_bao(tmp_path / "bao", certificate=right) as own:
        monkeypatch.setenv("BAO_TOKEN", own.token())
        place = uri(own, "x")
        assert place.startswith("openbao:https:")
        for options in ("", f"?ca={wrong}", f"?ca={tmp_path / 'missing.pem'}"):
            with pytest.raises(KeyUnavailableError, match=r"certificate|answer"):
                open_provider(place + options)
        # Another authority named by the environment changes nothing.
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(wrong))
        provider = open_provider(f"{place}?ca={right}", create=True)
        epoch = provider.create_epoch()
        assert provider.unwrap(epoch, provider.wrap(epoch, KEY, AAD), AAD) == KEY
        assert open_provider(provider.describe().uri).epochs() == [epoch]


def _certificate(path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, and its key beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, path.stem)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = path.with_suffix(".key")
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    private.chmod(0o600)
    return path
