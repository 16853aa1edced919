"""A receipt as it is handed over, and read again; what it says is made in `kvvault.audit.receipts`.

What is signed is the canonical JSON (RFC 8785) of the receipt; its SHA-256 stands in an entry of
the log. A file holds an *envelope*::

    {"receipt": {...}, "signature": base64, "public_key": base64,
     "log": {"entry": n, "body": ..., "size": m, "proof": [base64, ...], "checkpoint": note}}

`log`, which is only there when it was asked for, shows that the entry is in the log. Spaces, line
ends, the order of names and how characters are escaped do not matter; how numbers are written does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from kvvault.catalog.log import exactly
from kvvault.crypto.signing import is_signed
from kvvault.errors import FormatError

__all__ = ["Json", "Proof", "Receipt", "parse"]

Json: TypeAlias = Mapping[str, Any]
_Number = TypeVar("_Number", int, float)

_MAX_FILE: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Proof:
    """That an entry is in the log, as of a checkpoint."""

    entry: int
    body: str
    size: int
    proof: tuple[bytes, ...]
    checkpoint: str
    """Signed note."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt and its signature; not checked by itself (`kvvault.audit.verifying`)."""

    content: Json
    signature: bytes
    public_key: bytes
    proof: Proof | None = None

    @property
    def signed(self) -> bytes:
        """What the signature is over."""
        return exactly(self.content).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of that, in hex, as log and second receipt name it."""
        return hashlib.sha256(self.signed).hexdigest()

    @property
    def authentic(self) -> bool:
        """Whether the holder of `public_key` signed it."""
        return is_signed(self.public_key, self.signed, self.signature)

    @property
    def receipt_id(self) -> str:
        return str(self.content.get("id", ""))

    @property
    def phase(self) -> str:
        return str(self.content.get("phase", ""))

    @property
    def entry(self) -> int:
        """The entry of the log that names its digest; -1 where it does not say."""
        found = self.content.get("log")
        index = found.get("entry") if isinstance(found, Mapping) else None
        return index if isinstance(index, int) else -1

    @property
    def envelope(self) -> dict[str, object]:
        """As it is handed over."""
        whole: dict[str, object] = {
            "receipt": self.content,
            "signature": _encoded(self.signature),
            "public_key": _encoded(self.public_key),
        }
        if self.proof is not None:
            whole["log"] = {
                "entry": self.proof.entry,
                "body": self.proof.body,
                "size": self.proof.size,
                "proof": [_encoded(one) for one in self.proof.proof],
                "checkpoint": self.proof.checkpoint,
            }
        return whole

    @property
    def document(self) -> str:
        """The envelope as canonical JSON."""
        return exactly(self.envelope)


def parse(text: str) -> Receipt:
    """A receipt from its envelope. Says nothing about whether it is genuine.

    Raises:
        FormatError: it is no envelope of a receipt.
    """
    try:
        if len(text) > _MAX_FILE:
            raise ValueError("too long")
        found = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=lambda number: _as_written(float(number), number),
            parse_int=lambda number: _as_written(int(number), number),
        )
        if not isinstance(found, dict) or not isinstance(found["receipt"], dict):
            raise TypeError("not an object")
        if set(found) - {"receipt", "signature", "public_key", "log"}:
            raise ValueError("more than an envelope has")
        exactly(found)
        proof = found.get("log")
        return Receipt(
            found["receipt"],
            _decoded(found["signature"]),
            _decoded(found["public_key"]),
            None if proof is None else _proof(proof),
        )
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as exc:
        raise FormatError(
            "that is not a receipt of kvvault",
            hint="give the file that `kvvault receipt show ID --format json` wrote",
        ) from exc


def _proof(found: Any) -> Proof:
    if set(found) != {"entry", "body", "size", "proof", "checkpoint"}:
        raise ValueError("not a proof")
    entry, size, body, note = found["entry"], found["size"], found["body"], found["checkpoint"]
    if type(entry) is not int or type(size) is not int:
        raise TypeError("not a number")
    if not isinstance(body, str) or not isinstance(note, str):
        raise TypeError("not a text")
    return Proof(entry, body, size, tuple(_decoded(one) for one in found["proof"]), note)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(_text: str) -> None:
    raise ValueError("not a number of JSON")


def _as_written(number: _Number, text: str) -> _Number:
    """A number has one form only, the canonical one: 2 is not 2.0, which other readers may show as
    it stands there."""
    if exactly(number) != text:
        raise ValueError("not as kvvault writes it")
    return number


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _decoded(text: str) -> bytes:
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except binascii.Error as exc:
        raise ValueError("not base64") from exc
    if _encoded(raw) != text:
        raise ValueError("not as an encoder writes it")
    return raw
