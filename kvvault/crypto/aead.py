"""Every cryptographic primitive that kvvault uses, each choice with its reason.

This is the only module that calls AES-GCM, HKDF or HMAC, or that draws random bytes for keys and
nonces; signatures are its sibling's, `kvvault.crypto.signing`. Everything above speaks of tenants
and segments (`kvvault.crypto.keys`); nothing above can pick a nonce, a key size or a tag length, so
no caller can get one wrong.

What is used, and nothing else (REQ-C1):

==================  ==================================  ==========================================
purpose             primitive                           source
==================  ==================================  ==========================================
blocks, wraps,      AES-256-GCM, random 96-bit nonce,   NIST SP 800-38D
small texts         128-bit tag
key and commitment  HKDF-Expand-SHA256, fixed labels    RFC 5869 (Expand only, section 3.3: the
of a segment                                            secret is uniform already)
keyed ids           HMAC-SHA256, truncated              RFC 2104, truncation in section 5
signatures          Ed25519                             RFC 8032 (`kvvault.crypto.signing`)
random bytes        the kernel (``getrandom``)          Python ``secrets``
==================  ==================================  ==========================================

AES-GCM does not commit to its key: a ciphertext can be made that opens under two keys. So each
segment carries a 32-byte commitment derived beside its AES key, compared in constant time before
any block is opened (REQ-C4; two HKDF outputs of one secret under different labels, as in the AWS
Encryption SDK and C2SP).

Threads: everything here may be called from any thread at once. ``encrypt_into`` and
``decrypt_into`` release the GIL while they work, and an ``AESGCM`` object uses a context of its own
for every call, so one object per segment serves all transfer threads.
"""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvvault.errors import ClosedError, CryptoSelfTestError, FormatError, WrongKeyError

__all__ = [
    "COMMITMENT_BYTES",
    "ID_BYTES",
    "KEY_BYTES",
    "MAX_SEALS_PER_KEY",
    "MAX_TEXT_BYTES",
    "NONCE_BYTES",
    "TAG_BYTES",
    "TEXT_PAD_BYTES",
    "WRAPPED_KEY_BYTES",
    "KeyedHasher",
    "ReadBuffer",
    "SegmentCipher",
    "WriteBuffer",
    "encode_parts",
    "keyed_id",
    "open_text",
    "random_id",
    "random_key",
    "seal_text",
    "self_test",
    "unwrap_key",
    "wipe",
    "wrap_key",
]

ReadBuffer: TypeAlias = bytes | bytearray | memoryview
"""C-contiguous bytes that are only read."""

WriteBuffer: TypeAlias = bytearray | memoryview
"""C-contiguous bytes that are written; a read-only memoryview is refused at run time."""

KEY_BYTES: Final = 32
"""AES-256 and HMAC-SHA256 keys. The larger AES also keeps a margin against multi-key attacks: with
2^30 segments, somebody hunting for any one of their keys gains 30 bits."""

NONCE_BYTES: Final = 12
"""96 bits: the one length that GCM uses as it is instead of hashing it first (SP 800-38D, 5.2.1.1),
so two nonces never collide inside GCM unless they are equal."""

TAG_BYTES: Final = 16
"""128 bits, never shortened: short GCM tags leak the hash key after few forgeries (SP 800-38D,
appendix C; its revision drops them)."""

COMMITMENT_BYTES: Final = 32
"""A commitment must resist collisions: as long as the whole SHA-256 output (2^128 work)."""

ID_BYTES: Final = 16
"""Random and keyed ids. 128 bits: a collision stays improbable beyond 2^60 ids."""

WRAPPED_KEY_BYTES: Final = NONCE_BYTES + KEY_BYTES + TAG_BYTES
"""60 bytes: nonce || encrypted key || tag. No other length parses."""

MAX_SEALS_PER_KEY: Final = 1 << 20
"""Blocks that one segment key may encrypt: as many as a segment can have slots. With random 96-bit
nonces SP 800-38D (8.3) allows 2^32 per key for a collision chance of 2^-32; at 2^20 the chance of
a repeated nonce is below 2^-56."""

TEXT_PAD_BYTES: Final = 32
"""Encrypted texts are padded to a multiple of this, so that the length does not tell the name."""

MAX_TEXT_BYTES: Final = 4096
"""Encrypted texts are names and labels; something longer is a mistake upstream."""

_LABEL_BLOCK_KEY: Final = b"kvvault/1/segment/aes-256-gcm"
_LABEL_COMMITMENT: Final = b"kvvault/1/segment/commitment"
# Wraps and texts may share a key: these prefixes keep one from being opened as the other.
_LABEL_WRAP: Final = b"kvvault/1/wrap\0"
_LABEL_TEXT: Final = b"kvvault/1/text\0"

_SHA256: Final = SHA256()
_ZEROS: Final = bytes(64 * 1024)


def wipe(buffer: WriteBuffer) -> None:
    """Overwrite ``buffer`` with zeros in place.

    Best effort for keys (Python and OpenSSL may hold copies), exact for block buffers.

    :raises TypeError: the buffer is read-only or not C-contiguous.
    """
    with memoryview(buffer) as view, view.cast("B") as flat:
        # In steps of 64 KiB: one zero block serves all sizes and no 16 MiB of zeros is allocated.
        for start in range(0, len(flat), len(_ZEROS)):
            part = flat[start : start + len(_ZEROS)]
            part[:] = _ZEROS[: len(part)]


def random_key() -> bytearray:
    """A fresh uniformly random 256-bit key, mutable so that the owner can `wipe` it (REQ-K8)."""
    return bytearray(secrets.token_bytes(KEY_BYTES))


def random_id() -> bytes:
    """A fresh random 128-bit identifier. Not a secret."""
    return secrets.token_bytes(ID_BYTES)


def encode_parts(*parts: ReadBuffer) -> bytes:
    """Join byte strings unambiguously: each is preceded by its length (4 bytes, big endian).

    Different lists give different results, so ("ab", "c") cannot pass for ("a", "bc").
    """
    return b"".join([_nbytes(part).to_bytes(4, "big") + part for part in parts])


class KeyedHasher:
    """Keyed ids under one key: HMAC-SHA256 over `encode_parts`, truncated to ``size`` bytes.

    ``prefix`` parts come before those of every id: ``KeyedHasher(k, a).id(b)`` is
    ``keyed_id(k, a, b)``. Key schedule and prefix are absorbed once and copied for each id, which
    makes an id two to four times cheaper than a one-shot HMAC; that counts on the scheduler thread.
    The state lives in OpenSSL's memory, which cleanses it when the object is dropped. Any thread
    may call `id`.

    :raises ValueError: the key is not 32 bytes.
    """

    __slots__ = ("_state",)

    def __init__(self, key: ReadBuffer, *prefix: ReadBuffer) -> None:
        _check_key(key)
        self._state = HMAC(key, _SHA256)
        self._state.update(encode_parts(*prefix))

    def __repr__(self) -> str:
        return "<KeyedHasher>"

    def id(self, *parts: ReadBuffer, size: int = ID_BYTES) -> bytes:
        """The id of ``parts``: ``size`` bytes, 16 to 32.

        :raises ValueError: ``size`` is out of range.
        """
        if not ID_BYTES <= size <= _SHA256.digest_size:
            raise ValueError("a keyed id has 16 to 32 bytes")
        state = self._state.copy()
        for part in parts:
            state.update(_nbytes(part).to_bytes(4, "big") + part)
        return state.finalize()[:size]


def keyed_id(index_key: ReadBuffer, *parts: ReadBuffer, size: int = ID_BYTES) -> bytes:
    """One keyed id; see `KeyedHasher`, which is cheaper for many ids under one key.

    :raises ValueError: the key is not 32 bytes or ``size`` is not 16 to 32.
    """
    return KeyedHasher(index_key).id(*parts, size=size)


def wrap_key(kek: ReadBuffer, plaintext_key: ReadBuffer, aad: ReadBuffer) -> bytes:
    """Encrypt a 32-byte key under another one: nonce || ciphertext || tag, 60 bytes.

    :param kek: the wrapping key, 32 bytes. It may wrap up to 2^32 keys (SP 800-38D, 8.3).
    :param aad: what the wrap is bound to; it opens only with the same.
    :raises ValueError: one of the keys is not 32 bytes.
    """
    _check_key(plaintext_key)
    return _seal(kek, plaintext_key, _LABEL_WRAP, aad)


def unwrap_key(kek: ReadBuffer, wrapped: ReadBuffer, aad: ReadBuffer) -> bytearray:
    """Open what `wrap_key` made. The caller owns the result and wipes it.

    :raises WrongKeyError: other key, other ``aad``, altered bytes, or not 60 bytes long.
    :raises ValueError: ``kek`` is not 32 bytes.
    """
    if len(wrapped) != WRAPPED_KEY_BYTES:
        raise WrongKeyError(
            f"a wrapped key has {WRAPPED_KEY_BYTES} bytes, this one has {len(wrapped)}",
            hint="The catalog row or the provider's answer is damaged; check both.",
        )
    return _open(kek, wrapped, _LABEL_WRAP, aad)


def seal_text(key: ReadBuffer, text: str, aad: ReadBuffer, *, most: int = MAX_TEXT_BYTES) -> bytes:
    """Encrypt a short text: nonce || ciphertext || tag.

    The plaintext is a 4-byte length, the UTF-8 text and zeros up to a multiple of 32 bytes.

    :raises ValueError: the text has more than ``most`` bytes, or the key is not 32 bytes.
    """
    raw = text.encode("utf-8")
    if len(raw) > most:
        raise ValueError(f"a text of {len(raw)} bytes is too long to seal")
    padded = len(raw).to_bytes(4, "big") + raw
    padded += bytes(-len(padded) % TEXT_PAD_BYTES)
    return _seal(key, padded, _LABEL_TEXT, aad)


def open_text(key: ReadBuffer, sealed: ReadBuffer, aad: ReadBuffer) -> str:
    """Open what `seal_text` made.

    :raises WrongKeyError: other key, other ``aad``, or altered bytes.
    :raises FormatError: authentic, but not laid out as `seal_text` does.
    :raises ValueError: the key is not 32 bytes.
    """
    if len(sealed) < NONCE_BYTES + TEXT_PAD_BYTES + TAG_BYTES:
        raise _does_not_open()
    padded = _open(key, sealed, _LABEL_TEXT, aad)
    length = int.from_bytes(padded[:4], "big")
    if len(padded) % TEXT_PAD_BYTES or length > len(padded) - 4 or any(padded[4 + length :]):
        raise FormatError(
            "an encrypted text has an unknown layout",
            hint="It was written by another release of kvvault; use that one.",
        )
    return padded[4 : 4 + length].decode("utf-8")


class SegmentCipher:
    """Encrypts and decrypts the blocks of one segment.

    From the segment's random 32-byte secret and its id, HKDF-Expand-SHA256 with two fixed labels
    derives an AES-256-GCM key and a 32-byte commitment. The commitment stands in the catalog in
    clear and tells nothing about the key.

    Only the process that created a segment encrypts into it (REQ-C5): a cipher made with
    ``may_seal=True`` refuses to seal in a forked child, after `stop_sealing`, and beyond
    `MAX_SEALS_PER_KEY` blocks; any other cipher only opens.

    Any thread may call any method at any time. The caller may wipe ``secret`` after construction.

    :param secret: 32 bytes, random, of this segment only.
    :param segment_id: 16 bytes.
    :raises ValueError: a length is wrong.
    """

    __slots__ = ("_aead", "_commitment", "_pid", "_seals")

    def __init__(self, secret: ReadBuffer, segment_id: bytes, *, may_seal: bool = False) -> None:
        _check_key(secret)
        if len(segment_id) != ID_BYTES:
            raise ValueError(f"a segment id has {ID_BYTES} bytes")
        block_key = _expand(secret, _LABEL_BLOCK_KEY, segment_id)
        self._aead: AESGCM | None = AESGCM(block_key)
        wipe(block_key)
        self._commitment = bytes(_expand(secret, _LABEL_COMMITMENT, segment_id))
        self._pid: int | None = os.getpid() if may_seal else None
        # next() on a count is one bytecode-level step under the GIL: no lock needed.
        self._seals = itertools.count(1)

    def __repr__(self) -> str:
        return "<SegmentCipher>"

    @property
    def commitment(self) -> bytes:
        """32 bytes that only this segment's secret can have produced. Not a secret."""
        return self._commitment

    def check_commitment(self, expected: ReadBuffer) -> bool:
        """Whether ``expected`` is this key's commitment, in constant time (REQ-C4)."""
        return hmac.compare_digest(self._commitment, expected)

    def seal_into(self, plaintext: ReadBuffer, aad: ReadBuffer, out: WriteBuffer) -> bytes:
        """Encrypt one block into ``out`` and return its fresh random 12-byte nonce.

        ``out`` has the length of ``plaintext`` plus 16 and receives ciphertext || tag; it must not
        overlap ``plaintext``. Releases the GIL while encrypting.

        :raises ClosedError: this cipher may not encrypt, or not any more.
        :raises ValueError: ``out`` has another length.
        """
        aead, pid = self._aead, self._pid
        if aead is None or pid is None or pid != os.getpid():
            raise ClosedError(
                "this segment takes no more blocks",
                hint="Only the process that created a segment writes to it; open a new segment.",
            )
        if next(self._seals) > MAX_SEALS_PER_KEY:
            self.stop_sealing()
            raise ClosedError(
                "this segment's key has encrypted as many blocks as one key may",
                hint="Seal the segment and open a new one.",
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        aead.encrypt_into(nonce, _flat(plaintext), aad, _flat(out))
        return nonce

    def open_into(
        self, nonce: ReadBuffer, sealed: ReadBuffer, aad: ReadBuffer, out: WriteBuffer
    ) -> bool:
        """Decrypt one block into ``out``; False and ``out`` zeroed when it is not authentic.

        ``sealed`` is ciphertext || tag. ``out`` has the length of the block; it is either disjoint
        from ``sealed`` or exactly its ciphertext part (in place). Whatever came from the disk may
        be anything: a nonce or ``sealed`` of a wrong length is not authentic, no error. Releases
        the GIL while decrypting.

        :raises ClosedError: the cipher was closed; ``out`` is zeroed.
        """
        aead = self._aead
        authentic = False
        try:
            if aead is None:
                raise ClosedError(
                    "this segment's key was dropped", hint="Open the segment again, if it still is."
                )
            if len(nonce) == NONCE_BYTES and _nbytes(sealed) == _nbytes(out) + TAG_BYTES:
                aead.decrypt_into(nonce, _flat(sealed), aad, _flat(out))
                authentic = True
        except InvalidTag:
            pass
        finally:
            # OpenSSL decrypts before it knows the tag: on failure ``out`` holds unverified
            # plaintext, which must not survive, whatever was raised (REQ-C6).
            if not authentic:
                wipe(out)
        return authentic

    def stop_sealing(self) -> None:
        """From now on this cipher only opens. A `seal_into` that already began still finishes."""
        self._pid = None

    def close(self) -> None:
        """Drop the key. Calls in progress finish; later ones raise ClosedError. Idempotent."""
        self._aead = None


def self_test() -> None:
    """Check known answers of every primitive (REQ-C2); a few ms, called when a vault opens.

    :raises CryptoSelfTestError: one does not match: library or hardware is broken.
    """
    for key, nonce, plain, aad, sealed in _GCM_VECTORS:
        aead = AESGCM(bytes.fromhex(key))
        want = bytes.fromhex(sealed)
        made = bytearray(len(want))
        aead.encrypt_into(bytes.fromhex(nonce), bytes.fromhex(plain), bytes.fromhex(aad), made)
        back = bytearray(len(want) - TAG_BYTES)
        try:
            aead.decrypt_into(bytes.fromhex(nonce), want, bytes.fromhex(aad), back)
        except InvalidTag:
            raise _self_test_failed("AES-256-GCM open") from None
        if made != want or back != bytes.fromhex(plain):
            raise _self_test_failed("AES-256-GCM")
        made[-1] ^= 1
        try:
            aead.decrypt_into(bytes.fromhex(nonce), made, bytes.fromhex(aad), back)
        except InvalidTag:
            continue
        raise _self_test_failed("AES-256-GCM authentication")
    prk, info, okm = (bytes.fromhex(text) for text in _HKDF_VECTOR)
    if HKDFExpand(_SHA256, len(okm), info).derive(prk) != okm:
        raise _self_test_failed("HKDF-SHA256")
    mac_key, message, mac = (bytes.fromhex(text) for text in _HMAC_VECTOR)
    state = HMAC(mac_key, _SHA256)
    state.update(message)
    if state.copy().finalize() != mac:
        raise _self_test_failed("HMAC-SHA256")


def _check_key(key: ReadBuffer) -> None:
    if _nbytes(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes")


def _nbytes(buffer: ReadBuffer) -> int:
    # len() of a memoryview counts items, which are not bytes when it views, say, float16.
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _flat(buffer: ReadBuffer) -> ReadBuffer:
    # The library takes bytes only; a view of a float16 array is the same memory as bytes.
    if isinstance(buffer, memoryview) and buffer.format != "B":
        return buffer.cast("B")
    return buffer


def _expand(secret: ReadBuffer, label: bytes, segment_id: bytes) -> bytearray:
    out = bytearray(KEY_BYTES)
    HKDFExpand(_SHA256, KEY_BYTES, encode_parts(label, segment_id)).derive_into(secret, out)
    return out


def _seal(key: ReadBuffer, plain: ReadBuffer, label: bytes, aad: ReadBuffer) -> bytes:
    _check_key(key)
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plain, label + aad)


def _open(key: ReadBuffer, sealed: ReadBuffer, label: bytes, aad: ReadBuffer) -> bytearray:
    _check_key(key)
    out = bytearray(len(sealed) - NONCE_BYTES - TAG_BYTES)
    try:
        AESGCM(key).decrypt_into(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], label + aad, out)
    except InvalidTag:
        wipe(out)
        raise _does_not_open() from None
    return out


def _does_not_open() -> WrongKeyError:
    return WrongKeyError(
        "a wrapped key or encrypted text does not open under this key",
        hint="Use the key this vault was made with; if it is, the catalog row was altered.",
    )


def _self_test_failed(what: str) -> CryptoSelfTestError:
    return CryptoSelfTestError(
        f"{what} gave a wrong known answer",
        hint="Reinstall the cryptography package; if it persists, distrust this machine.",
    )


# NIST CAVP gcmEncryptExtIV256: key, IV, plaintext, associated data, ciphertext || tag.
_GCM_VECTORS: Final = (
    (
        "b52c505a37d78eda5dd34f20c22540ea1b58963cf8e5bf8ffa85f9f2492505b4",
        "516c33929df5a3284ff463d7",
        "",
        "",
        "bdc1ac884d332457a1d2664f168c76f0",
    ),
    (
        "92e11dcdaa866f5ce790fd24501f92509aacf4cb8b1339d50c9c1240935dd08b",
        "ac93a1a6145299bde902f21a",
        "2d71bcfa914e4ac045b2aa60955fad24",
        "1e0889016f67601c8ebea4943bc23ad6",
        "8995ae2e6df3dbf96fac7b7137bae67feca5aa77d51d4a0a14d9c51e1da474ab",
    ),
    (
        "24501ad384e473963d476edcfe08205237acfd49b5b8f33857f8114e863fec7f",
        "9ff18563b978ec281b3f2794",
        (
            "27f348f9cdc0c5bd5e66b1ccb63ad920ff2219d14e8d631b3872265cf117ee86"
            "757accb158bd9abb3868fdc0d0b074b5f01b2c"
        ),
        "adb5ec720ccf9898500028bf34afccbcaca126ef",
        (
            "eb7cb754c824e8d96f7c6d9b76c7d26fb874ffbf1d65c6f64a698d839b0b0614"
            "5dae82057ad55994cf59ad7f67c0fa5e85fab8bc95c532fecc594c36d1550286a7a3f0"
        ),
    ),
)

# RFC 5869, test case 1, the Expand step: PRK, info, OKM.
_HKDF_VECTOR: Final = (
    "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
    "f0f1f2f3f4f5f6f7f8f9",
    "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
)

# RFC 4231, test case 2: key "Jefe", data, HMAC-SHA256.
_HMAC_VECTOR: Final = (
    "4a656665",
    "7768617420646f2079612077616e7420666f72206e6f7468696e673f",
    "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
)
