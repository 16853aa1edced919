"""NIST CAVP vectors for AES-256-GCM, cut down to the sizes that kvvault uses."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import cryptography_vectors

from kvvault.crypto.aead import NONCE_BYTES, TAG_BYTES


@dataclass(frozen=True)
class Vector:
    """One case; ``plain`` is None where the tag is false and the open must fail."""

    key: bytes
    nonce: bytes
    aad: bytes
    sealed: bytes
    plain: bytes | None


def load(name: str) -> Iterator[Vector]:
    """The vectors of ``ciphers/AES/GCM/<name>`` with a 96-bit IV and a 128-bit tag."""
    file = cryptography_vectors.open_vector_file(f"ciphers/AES/GCM/{name}", "r")
    with file:
        text = file.read()
    assert isinstance(text, str)
    case: dict[str, str] = {}
    for line in [*io.StringIO(text), ""]:
        name_, equals, value = line.strip().partition("=")
        if line.startswith("[") or not line.strip():
            if "Tag" in case:
                vector = _vector(case)
                if len(vector.nonce) == NONCE_BYTES and _tag(case) == TAG_BYTES:
                    yield vector
            case = {}
        elif equals:
            case[name_.strip()] = value.strip()
        elif line.strip() == "FAIL":
            case["FAIL"] = ""


def _tag(case: dict[str, str]) -> int:
    return len(case["Tag"]) // 2


def _vector(case: dict[str, str]) -> Vector:
    return Vector(
        key=bytes.fromhex(case["Key"]),
        nonce=bytes.fromhex(case["IV"]),
        aad=bytes.fromhex(case["AAD"]),
        sealed=bytes.fromhex(case["CT"] + case["Tag"]),
        plain=None if "FAIL" in case else bytes.fromhex(case["PT"]),
    )
