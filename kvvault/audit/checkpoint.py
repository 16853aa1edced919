"""Checkpoints of the log: signed notes that say "at this size the log's root was this".

The form is C2SP's tlog-checkpoint (https://c2sp.org/tlog-checkpoint) in a signed note
(https://c2sp.org/signed-note), so that tools of transparency logs read it::

    kvvault/<vault id, hex>
    <size, decimal>
    <root, base64>

    — kvvault/<vault id, hex> <base64 of key id (4 bytes) and Ed25519 signature (64 bytes)>

The key id is the beginning of SHA-256 over key name, newline, 0x01 (Ed25519) and the public key.
The name of the key is the origin. A key travels as a *verifier key*: ``name+key id+base64``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from kvvault.audit.merkle import HASH_BYTES
from kvvault.crypto.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Signer, is_signed
from kvvault.errors import FormatError, UsageError

__all__ = ["Checkpoint", "VerifierKey", "origin_of", "parse_note", "sign_note"]

_ED25519: Final = b"\x01"
_ID_BYTES: Final = 4
_DASH: Final = "\N{EM DASH} "
_SIZE: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_NAME: Final = re.compile(r"[^\s+]+")
_MAX_NOTE: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a log was at some time."""

    origin: str
    size: int
    """Entries."""
    root: bytes
    """32 bytes."""

    @property
    def text(self) -> str:
        """What is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """Whose signatures count: a public key and its name."""

    name: str
    public_key: bytes
    """32 bytes."""

    @property
    def key_id(self) -> bytes:
        """4 bytes."""
        named = self.name.encode() + b"\n" + _ED25519 + self.public_key
        return hashlib.sha256(named).digest()[:_ID_BYTES]

    @property
    def text(self) -> str:
        """As it is handed over: one line, without its end."""
        key = base64.b64encode(_ED25519 + self.public_key).decode()
        return f"{self.name}+{self.key_id.hex()}+{key}"

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        """What `text` says.

        Raises:
            UsageError: it is no verifier key. Does not repeat it.
        """
        name, plus, rest = text.strip().partition("+") if _is_text(text) else ("", "", "")
        _key_id, _, encoded = rest.partition("+")
        raw = _base64(encoded)
        if plus and _NAME.fullmatch(name) and raw is not None:
            key = cls(name, raw[1:])
            if (
                raw[:1] == _ED25519
                and len(raw) == 1 + PUBLIC_KEY_BYTES
                and key.text == text.strip()
            ):
                return key
        raise UsageError(
            "that is not a public key as kvvault writes it",
            hint="give what `kvvault audit key` prints, or a file of it",
        )


def origin_of(vault_id: bytes) -> str:
    """What a vault's log and its key are called."""
    return f"kvvault/{vault_id.hex()}"


def sign_note(checkpoint: Checkpoint, signer: Signer) -> str:
    """The signed note of a checkpoint."""
    text = checkpoint.text
    key = VerifierKey(checkpoint.origin, signer.public_key)
    line = base64.b64encode(key.key_id + signer.sign(text.encode())).decode()
    return f"{text}\n{_DASH}{key.name} {line}\n"


def parse_note(note: str, key: VerifierKey) -> Checkpoint:
    """The checkpoint that `key` signed. Signatures of others are no concern of ours, nor are lines
    that a later release may add after the root.

    Raises:
        FormatError: it is no such note, or not signed by `key`, or by it under another origin.
    """
    text, _, signatures = note.rpartition("\n\n")
    lines = signatures.split("\n")
    if len(note) > _MAX_NOTE or not _is_text(note) or not text or lines.pop() or not lines:
        raise _no_note("is not a signed note")
    text += "\n"
    signed = False
    for line in lines:
        name, _, encoded = line.removeprefix(_DASH).partition(" ")
        raw = _base64(encoded)
        if not line.startswith(_DASH) or not _NAME.fullmatch(name) or raw is None:
            raise _no_note("has a malformed signature line")
        if name != key.name or raw[:_ID_BYTES] != key.key_id:
            continue
        signature = raw[_ID_BYTES:]
        if len(signature) != SIGNATURE_BYTES or not is_signed(
            key.public_key, text.encode(), signature
        ):
            raise _no_note("has a signature that does not verify")
        signed = True
    if not signed:
        raise _no_note("is not signed by the key that was given")
    checkpoint = _parse_text(text)
    if checkpoint.origin != key.name:
        raise _no_note("is about another log")
    return checkpoint


def _parse_text(text: str) -> Checkpoint:
    lines = text.split("\n")
    if len(lines) < 4 or not all(lines[:-1]):
        raise _no_note("is not a checkpoint")
    origin, size, encoded = lines[:3]
    tree_root = _base64(encoded)
    if not _SIZE.fullmatch(size) or tree_root is None or len(tree_root) != HASH_BYTES:
        raise _no_note("is not a checkpoint")
    return Checkpoint(origin, int(size), tree_root)


def _is_text(text: str) -> bool:
    """Whether it can be written: not where a file that was read as text is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(text: str) -> bytes | None:
    """What `text` encodes; None when it is not exactly what an encoder writes."""
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if base64.b64encode(raw).decode() == text else None


def _no_note(what: str) -> FormatError:
    return FormatError(
        f"the checkpoint {what}",
        hint="it was altered, or is of another vault: compare with a copy kept elsewhere",
    )
