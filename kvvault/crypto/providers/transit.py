"""What `kvvault.crypto.providers.openbao` asks of a server, and where: the URI, the token, HTTP.

The only place that knows HTTP and hvac. No text of the server, of hvac or of requests leaves it,
because those contain addresses, bodies and headers.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from kvvault.crypto import aead
from kvvault.errors import (
    ConfigError,
    KeyUnavailableError,
    UnsafeFileError,
    UsageError,
    WrongKeyError,
)

__all__ = [
    "Answer",
    "Place",
    "Server",
    "connect",
    "denied",
    "does_not_open",
    "is_sound",
    "made_up",
    "pack",
    "parse",
    "strange",
    "token",
    "unbase64",
    "unknown_epoch",
]

_KEY_TYPE: Final = "aes256-gcm96"
_VERSION: Final = struct.Struct(">I")
_WRAPPED_BYTES: Final = _VERSION.size + aead.WRAPPED_KEY_BYTES
_EPOCH: Final = re.compile(r"[0-9a-f]{32}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOUNT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_TOKEN_VARIABLES: Final = ("BAO_TOKEN", "VAULT_TOKEN")
_MAX_TOKEN_BYTES: Final = 16 << 10
_FORM: Final = "Write openbao:https://HOST:PORT/MOUNT/NAME[?ca=FILE&token-file=FILE&namespace=NS]"


@dataclass(frozen=True, slots=True)
class Place:
    """What the URI says. Holds no secret."""

    address: str
    mount: str
    name: str
    ca: Path | None
    token_file: Path | None
    namespace: str | None

    @property
    def uri(self) -> str:
        options = {"ca": self.ca, "token-file": self.token_file, "namespace": self.namespace}
        query = urlencode({k: str(v) for k, v in options.items() if v is not None}, safe="/")
        return f"openbao:{self.address}/{self.mount}/{self.name}" + (f"?{query}" if query else "")

    def key(self, epoch: str) -> str:
        """The Transit key of an epoch.

        :raises WrongKeyError: no epoch of ours has this name, and it must not get into a path.
        """
        if not _EPOCH.fullmatch(epoch):
            raise unknown_epoch()
        return f"{self.name}-{epoch}"

    def tombstone(self, epoch: str) -> str:
        return f"{self.key(epoch)}-gone"


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's answer: 200 or 204, or a refusal (400, 403, 404) that it gave itself."""

    status: int
    data: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return self.status < 300


class Server:
    """The requests of one call, which end when its time does."""

    def __init__(self, place: Place, session: Any, token: str, end: float) -> None:
        self._place = place
        self._session = session
        self._token = token
        self._end = end

    def names(self) -> tuple[list[str], list[str]]:
        """Epochs with a key, oldest first, and epochs with a tombstone."""
        answer = self._transit(lambda t, mount: t.list_keys(mount_point=mount))
        if answer.status not in {200, 404}:
            raise strange()
        pattern = re.compile(rf"{re.escape(self._place.name)}-([0-9a-f]{{32}})(-gone)?")
        listed = answer.data.get("keys", [])
        if not isinstance(listed, list):
            raise strange()
        found = [pattern.fullmatch(str(name)) for name in listed]
        matches = [match for match in found if match is not None]
        held = sorted(match[1] for match in matches if match[2] is None)
        return held, [match[1] for match in matches if match[2] is not None]

    def read(self, name: str) -> Mapping[str, Any] | None:
        """What the server says about a key, or None when it holds none by this name."""
        answer = self._transit(lambda t, mount: t.read_key(name, mount_point=mount))
        if answer.status not in {200, 404}:
            raise strange()
        if answer.ok and answer.data.get("name") != name:
            raise strange()
        return answer.data if answer.ok else None

    def make_key(self, name: str) -> None:
        # Only the type: not exportable and no plaintext backup are the defaults, are checked
        # afterwards, and a policy can then forbid every other parameter.
        answer = self._transit(
            lambda t, mount: t.create_key(name, key_type=_KEY_TYPE, mount_point=mount)
        )
        if not answer.ok:
            raise strange()

    def delete_key(self, name: str) -> None:
        """Ask for the deletion. Refusals are not errors here: the caller looks at what is left,
        and another process may be doing the same."""
        self._transit(
            lambda t, mount: t.update_key_configuration(
                name, deletion_allowed=True, mount_point=mount
            )
        )
        self._transit(lambda t, mount: t.delete_key(name, mount_point=mount))

    def encrypt(self, name: str, plain: bytes | bytearray, aad: bytes) -> Answer:
        text, extra = _base64(plain), _base64(aad)
        return self._transit(
            lambda t, mount: t.encrypt_data(
                name, plaintext=text, associated_data=extra, mount_point=mount
            ),
            may_deny=True,
        )

    def decrypt(self, name: str, wrapped: bytes, aad: bytes) -> Answer:
        version = _VERSION.unpack_from(wrapped)[0] if len(wrapped) == _WRAPPED_BYTES else 0
        if version == 0:  # which Transit would take for 1: a changed wrap must not open
            return Answer(400, {})
        text = f"vault:v{version}:{_base64(wrapped[_VERSION.size :])}"
        extra = _base64(aad)
        return self._transit(
            lambda t, mount: t.decrypt_data(
                name, ciphertext=text, associated_data=extra, mount_point=mount
            ),
            may_deny=True,
        )

    def check_rights(self) -> None:
        """Transit makes a missing key when it is asked to encrypt under it, if the token may
        ``create`` there: a destroyed epoch would come back with another key. So that right is
        refused, unless the engine's ``disable_upsert`` takes the danger away.

        :raises KeyUnavailableError: the token may do that, or may not ask what it may do.
        """
        path = f"{self._place.mount}/encrypt/{self._place.name}-{'0' * 32}"
        answer = self._ask(
            lambda adapter: adapter.post("/v1/sys/capabilities-self", json={"paths": [path]})
        )
        allowed = answer.data.get(path)
        if not isinstance(allowed, list):
            raise strange()
        if {"create", "root", "sudo"}.isdisjoint(allowed):
            return
        try:
            engine = self._ask(lambda adapter: adapter.get(f"/v1/{self._place.mount}/config/keys"))
        except KeyUnavailableError:
            engine = Answer(403, {})
        if engine.data.get("disable_upsert") is not True:
            raise KeyUnavailableError(
                "the token may do too much: encrypting under a destroyed key would make a new one",
                hint="Use a token with the policy of docs/keys.md, or run: "
                f"bao write {self._place.mount}/config/keys disable_upsert=true",
            )

    def _transit(self, request: Callable[[Any, str], Any], *, may_deny: bool = False) -> Answer:
        from hvac.api.secrets_engines import Transit

        return self._ask(
            lambda adapter: request(Transit(adapter), self._place.mount), may_deny=may_deny
        )

    def _ask(self, request: Callable[[Any], Any], *, may_deny: bool = False) -> Answer:
        """One request.

        :param may_deny: hand a 403 to the caller: encrypting under a missing key is one.
        :raises KeyUnavailableError: no answer, or none that says anything about a key.
        """
        from hvac.adapters import RawAdapter

        left = self._end - time.monotonic()
        if left <= 0:
            raise _silent()
        # As cheap as a dictionary; the connection is the session's.
        adapter = RawAdapter(
            base_uri=self._place.address,
            token=self._token,
            timeout=left,
            session=self._session,
            namespace=self._place.namespace,
            allow_redirects=False,  # the token would go to wherever the answer points
            ignore_exceptions=True,  # hvac's exceptions carry addresses and bodies
        )
        try:
            response = request(adapter)
            status = int(response.status_code)
            body = response.json() if response.content else {}
        except (OSError, ValueError):
            # Everything that requests raises is an OSError, bad JSON and a bad header included.
            raise _silent() from None
        if not isinstance(body, dict) or status not in {200, 204, 400, 403, 404}:
            raise _not_now(status)
        errors = body.get("errors")
        if status >= 400 and not isinstance(errors, list):
            raise _not_now(status)  # something in between answered, not OpenBao
        if status == 403 and not may_deny:
            raise denied()
        if status == 404 and errors:
            # Of a key that is not there OpenBao says nothing more than 404; this is the engine.
            raise KeyUnavailableError(
                "the server has no secrets engine at the URI's mount",
                hint=f"Run: bao secrets enable -path={self._place.mount} transit",
            )
        data = body.get("data")
        if status == 200 and not isinstance(data, dict):
            raise strange()
        return Answer(status, data if isinstance(data, dict) else {})


def connect(place: Place) -> Any:
    """A connection (a ``requests.Session``) that belongs to this process.

    :raises ConfigError: the extra ``openbao`` is not installed.
    :raises KeyUnavailableError: the certificate file cannot be read.
    """
    try:
        import hvac  # noqa: F401 - tells whether the extra is there, and brings requests
        import requests
    except ModuleNotFoundError:
        raise ConfigError(
            "keys in OpenBao need the extra 'openbao', which is not installed",
            hint="Run: pip install 'kvvault[openbao]'",
        ) from None
    if place.ca is not None and not os.access(place.ca, os.R_OK):
        raise KeyUnavailableError(
            f"the certificate file {place.ca} cannot be read",
            hint="Name the file of the authority that signed the server's certificate (?ca=).",
        )
    session = requests.Session()
    session.trust_env = False  # no proxy, no .netrc, no other authority from the environment
    session.verify = True if place.ca is None else str(place.ca)
    return session


def is_sound(facts: Mapping[str, Any]) -> bool:
    """Whether nobody has, or can get, a copy of this key from outside the engine."""
    leaks = ("exportable", "allow_plaintext_backup", "imported_key")
    return facts.get("type") == _KEY_TYPE and not any(facts.get(flag) for flag in leaks)


def pack(ciphertext: object) -> bytes:
    """Transit's text as the bytes that are stored.

    :raises KeyUnavailableError: it has another form.
    """
    version, _, text = str(ciphertext).removeprefix("vault:v").partition(":")
    if not version.isdecimal() or not 0 < int(version) < 1 << 32:
        raise strange()
    wrapped = _VERSION.pack(int(version)) + unbase64(text)
    if len(wrapped) != _WRAPPED_BYTES:
        raise strange()
    return wrapped


def made_up() -> bytes:
    """A wrap that nobody made."""
    filler = aead.random_key() + aead.random_key()
    return _VERSION.pack(1) + bytes(filler[: aead.WRAPPED_KEY_BYTES])


def parse(rest: str) -> Place:
    """Nothing of a malformed URI is repeated: somebody may have put a token into it."""

    def bad(what: str) -> UsageError:
        return UsageError(f"the URI of an OpenBao key provider {what}", hint=_FORM)

    try:
        parts = urlsplit(rest)
        host, port = parts.hostname, parts.port
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise bad("cannot be read") from None
    if parts.scheme not in {"https", "http"} or not host:
        raise bad("has no https address")
    if "@" in parts.netloc:
        raise bad("may not contain a user or password")
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise bad("must be https: keys would cross the network in the clear")
    mount, _, name = parts.path.strip("/").rpartition("/")
    if not _MOUNT.fullmatch(mount) or not _NAME.fullmatch(name) or parts.fragment:
        raise bad("must end in MOUNT/NAME")
    known = dict(options)
    if len(known) != len(options) or not set(known) <= {"ca", "token-file", "namespace"}:
        raise bad("has an option that does not exist; the token never stands in it")
    namespace = known.get("namespace")
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise bad("has a malformed namespace")
    paths = {option: Path(known[option]) for option in ("ca", "token-file") if option in known}
    if not all(path.is_absolute() for path in paths.values()):
        raise bad("needs absolute paths for ca and token-file")
    shown = f"[{host}]" if ":" in host else quote(host)
    return Place(
        address=f"{parts.scheme}://{shown}:{port or 8200}",
        mount=mount,
        name=name,
        ca=paths.get("ca"),
        token_file=paths.get("token-file"),
        namespace=namespace,
    )


def token(place: Place) -> str:
    """The token, read anew for each call: an agent that renews it only has to write the file."""
    if place.token_file is None:
        found = [os.environ[name] for name in _TOKEN_VARIABLES if os.environ.get(name)]
        token, where = (found[0] if found else ""), "environment variable"
    else:
        token, where = _token_from(place.token_file), "token file"
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise KeyUnavailableError(
            f"the {where} holds no token for OpenBao",
            hint="Set BAO_TOKEN, or name a file that holds the token with ?token-file=/path",
        )
    return token


def _token_from(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o027:
                raise UnsafeFileError(
                    f"the token file {path} is open to other users, or no regular file",
                    hint=f"Run: chmod 600 {path}",
                )
            return file.read(_MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError:
        raise KeyUnavailableError(
            f"the token file {path} cannot be read",
            hint="Check that the agent that writes it runs, and who owns the file.",
        ) from None


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def unbase64(text: object) -> bytearray:
    """
    :raises KeyUnavailableError: not base64: no answer of Transit's.
    """
    if not isinstance(text, str):
        raise strange()
    try:
        return bytearray(base64.b64decode(text, validate=True))
    except binascii.Error:
        raise strange() from None


def unknown_epoch() -> WrongKeyError:
    return WrongKeyError(
        "the server has no root key for this epoch under this name",
        hint="Name the server, mount and name that the vault was made with.",
    )


def does_not_open() -> WrongKeyError:
    return WrongKeyError(
        "a wrapped key does not open under this root key",
        hint="Use the key this vault was made with; if it is, the catalog row was altered.",
    )


def _silent() -> KeyUnavailableError:
    return KeyUnavailableError(
        "the OpenBao server does not answer, or not in time",
        hint="Check the address, the network and the server's certificate (?ca=), then try again.",
    )


def denied() -> KeyUnavailableError:
    return KeyUnavailableError(
        "the OpenBao server refuses the token",
        hint="Renew the token, and compare its policy with docs/keys.md.",
    )


def _not_now(status: int) -> KeyUnavailableError:
    return KeyUnavailableError(
        f"the OpenBao server cannot answer now (HTTP status {status})",
        hint="Unseal it if it is sealed, name the active node, or wait; then try again.",
    )


def strange() -> KeyUnavailableError:
    return KeyUnavailableError(
        "the OpenBao server gave an answer that kvvault does not understand",
        hint="Check that the mount is a Transit engine, and of which version the server is.",
    )
