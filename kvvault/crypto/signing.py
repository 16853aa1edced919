"""Signatures: Ed25519 (RFC 8032), and nothing else.

The sibling of `kvvault.crypto.aead` for what anybody may check: receipts and checkpoints of the
audit log. Ed25519 because it has no parameter to get wrong, needs no random bytes to sign, has keys
of 32 and signatures of 64 bytes, and is what signed notes (C2SP) are made with.

This is the only module that calls Ed25519. Threads: any function and method, at any time.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvvault.crypto.aead import ReadBuffer
from kvvault.errors import ClosedError, CryptoSelfTestError

__all__ = ["PUBLIC_KEY_BYTES", "SIGNATURE_BYTES", "Signer", "is_signed", "self_test"]

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

# RFC 8032, section 7.1, test 2: seed, message, signature.
_VECTOR: Final = (
    "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
    "72",
    (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    ),
)


class Signer:
    """Signs with one key. The key is in OpenSSL's memory, which cleanses it when the object goes.

    :param seed: the private key (RFC 8032, 5.1.5): 32 random bytes, which the caller wipes.
    :raises ValueError: it has another length.
    """

    __slots__ = ("_key", "public_key")

    def __init__(self, seed: ReadBuffer) -> None:
        key = Ed25519PrivateKey.from_private_bytes(seed)
        self._key: Ed25519PrivateKey | None = key
        self.public_key: Final = key.public_key().public_bytes_raw()
        """32 bytes, for everybody."""

    def __repr__(self) -> str:
        return "<Signer>"

    def sign(self, message: bytes) -> bytes:
        """The signature of `message`: 64 bytes, the same each time.

        :raises ClosedError: after `close`.
        """
        key = self._key
        if key is None:
            raise ClosedError("the signing key was dropped", hint="open the vault again")
        return key.sign(message)

    def close(self) -> None:
        """Drop the key. Idempotent."""
        self._key = None


def is_signed(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the holder of that key signed that message. Whatever is no key or no signature
    signed nothing."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def self_test() -> None:
    """Check a known answer (REQ-C2), and that a changed one is none.

    :raises CryptoSelfTestError: it does not match: library or hardware is broken.
    """
    seed, message, signature = (bytes.fromhex(text) for text in _VECTOR)
    signer = Signer(seed)
    right = signer.sign(message) == signature and is_signed(signer.public_key, message, signature)
    if not right or is_signed(signer.public_key, message + b"x", signature):
        raise CryptoSelfTestError(
            "Ed25519 gave a wrong known answer",
            hint="Reinstall the cryptography package; if it persists, distrust this machine.",
        )
