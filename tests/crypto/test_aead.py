"""The primitives: known answers, and what the promises about them say."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvvault.crypto import aead
from kvvault.crypto.aead import SegmentCipher
from kvvault.errors import ClosedError, CryptoSelfTestError, FormatError, WrongKeyError
from tests.crypto import vectors

SECRET = bytes(range(32))
SEGMENT = bytes(range(16))
KEK = bytes(range(32, 64))
KEY = bytes(range(64, 96))


def cipher() -> SegmentCipher:
    return SegmentCipher(SECRET, SEGMENT, may_seal=True)


def seal(made: SegmentCipher, plain: bytes, aad: bytes) -> tuple[bytes, bytearray]:
    out = bytearray(len(plain) + aead.TAG_BYTES)
    return made.seal_into(plain, aad, out), out


def with_key(key: bytes) -> SegmentCipher:
    """A cipher whose AES key is a vector's instead of a derived one."""
    made = cipher()
    made._aead = AESGCM(key)
    return made


def expand(secret: bytes, *info: bytes) -> bytes:
    """HKDF-Expand-SHA256 of one block, written out from RFC 5869 (section 2.3)."""
    joined = b"".join(len(part).to_bytes(4, "big") + part for part in info)
    return hmac.digest(secret, joined + b"\x01", "sha256")


# ------------------------------------------------------------------------ known answers


def test_req_c1_sizes() -> None:
    assert (aead.KEY_BYTES, aead.NONCE_BYTES, aead.TAG_BYTES) == (32, 12, 16)
    assert aead.WRAPPED_KEY_BYTES == 60


def test_req_c2_nist_encryption_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    for vector in vectors.load("gcmEncryptExtIV256.rsp"):
        assert vector.plain is not None
        monkeypatch.setattr(secrets, "token_bytes", lambda _size, nonce=vector.nonce: nonce)
        nonce, sealed = seal(with_key(vector.key), vector.plain, vector.aad)
        assert nonce == vector.nonce
        assert sealed == vector.sealed
        count += 1
    assert count >= 375


def test_req_c2_c6_nist_decryption_vectors_with_false_tags() -> None:
    opened = refused = 0
    for vector in vectors.load("gcmDecrypt256.rsp"):
        size = len(vector.sealed) - aead.TAG_BYTES
        out = bytearray(b"\xaa" * size)
        authentic = with_key(vector.key).open_into(vector.nonce, vector.sealed, vector.aad, out)
        if vector.plain is None:
            assert not authentic
            assert out == bytes(size)
            refused += 1
        else:
            assert authentic
            assert out == vector.plain
            opened += 1
    assert opened + refused >= 375
    assert opened > 100
    assert refused > 100


def test_derivation_is_hkdf_expand_with_the_documented_labels() -> None:
    made = cipher()
    assert made.commitment == expand(SECRET, b"kvvault/1/segment/commitment", SEGMENT)
    nonce, sealed = seal(made, b"block", b"aad")
    key = expand(SECRET, b"kvvault/1/segment/aes-256-gcm", SEGMENT)
    assert AESGCM(key).decrypt(nonce, bytes(sealed), b"aad") == b"block"


def test_format_does_not_change_between_releases() -> None:
    """Golden values: a vault written by one release opens under the next."""
    assert cipher().commitment.hex() == (
        "0e62d615bd0793e0f1f08a03923ea52725d5f2e15b34370763902ce55ad8d141"
    )
    assert aead.keyed_id(KEK, b"a", b"bc").hex() == "daba4fb386bb332da02d33eb21d9d73a"
    nonce = bytes(range(12))
    wrapped = nonce + AESGCM(KEK).encrypt(nonce, KEY, b"kvvault/1/wrap\0place")
    assert aead.unwrap_key(KEK, wrapped, b"place") == KEY
    padded = b"\0\0\0\x02hi" + bytes(26)
    text = nonce + AESGCM(KEK).encrypt(nonce, padded, b"kvvault/1/text\0place")
    assert aead.open_text(KEK, text, b"place") == "hi"


def test_req_c2_self_test_passes() -> None:
    aead.self_test()


@pytest.mark.parametrize("name", ["_GCM_VECTORS", "_HKDF_VECTOR", "_HMAC_VECTOR"])
def test_req_c2_self_test_notices_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    good = getattr(aead, name)
    last = good[-1] if isinstance(good[-1], str) else good[-1][-1]
    wrong = last[:-1] + ("0" if last[-1] != "0" else "1")
    if isinstance(good[-1], str):
        bad = (*good[:-1], wrong)
    else:
        bad = (*good[:-1], (*good[-1][:-1], wrong))
    monkeypatch.setattr(aead, name, bad)
    with pytest.raises(CryptoSelfTestError):
        aead.self_test()


@pytest.mark.parametrize("broken", ["accepts", "garbles"])
def test_req_c2_self_test_notices_a_broken_library(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    class Broken:
        def __init__(self, key: bytes) -> None:
            self._real = AESGCM(key)

        def encrypt_into(self, nonce: bytes, data: bytes, aad: bytes, out: bytearray) -> None:
            self._real.encrypt_into(nonce, data, aad, out)

        def decrypt_into(self, nonce: bytes, data: bytes, aad: bytes, out: bytearray) -> None:
            plain = AESGCM(KEY).encrypt(nonce, data[:-16], None)[:-16]
            if broken == "accepts":
                try:
                    plain = self._real.decrypt(nonce, data, aad)
                except InvalidTag:
                    plain = bytes(len(out))
            out[:] = plain

    monkeypatch.setattr(aead, "AESGCM", Broken)
    with pytest.raises(CryptoSelfTestError):
        aead.self_test()


# ------------------------------------------------------------------------------- blocks


@given(plain=st.binary(max_size=5000), aad=st.binary(max_size=200))
def test_blocks_come_back(plain: bytes, aad: bytes) -> None:
    made = cipher()
    nonce, sealed = seal(made, plain, aad)
    assert len(nonce) == aead.NONCE_BYTES
    out = bytearray(len(plain))
    assert SegmentCipher(SECRET, SEGMENT).open_into(nonce, sealed, aad, out)
    assert out == plain


@given(data=st.data())
def test_req_c6_no_altered_block_opens_and_nothing_is_left_in_the_buffer(
    data: st.DataObject,
) -> None:
    plain = data.draw(st.binary(min_size=1, max_size=300).filter(any))
    aad = b"place"
    made = cipher()
    nonce, sealed = seal(made, plain, aad)
    kind = data.draw(st.sampled_from(["sealed", "nonce", "aad"]))
    original = {"sealed": bytes(sealed), "nonce": nonce, "aad": aad}
    bad = bytearray(original[kind])
    bit = data.draw(st.integers(0, 8 * len(bad) - 1))
    bad[bit // 8] ^= 1 << bit % 8
    given_ = {**original, kind: bytes(bad)}
    out = bytearray(b"\xaa" * len(plain))
    assert not made.open_into(given_["nonce"], given_["sealed"], given_["aad"], out)
    assert out == bytes(len(plain))
    # Positive control: unaltered, the same call opens.
    assert made.open_into(nonce, sealed, aad, out)
    assert out == plain


def test_req_c6_zeroing_is_needed() -> None:
    """The library leaves unverified plaintext behind; this is what open_into clears away."""
    plain = secrets.token_bytes(4096)
    made = cipher()
    nonce, sealed = seal(made, plain, b"")
    sealed[-1] ^= 1
    assert made._aead is not None
    raw = bytearray(4096)
    with pytest.raises(InvalidTag):
        made._aead.decrypt_into(nonce, bytes(sealed), b"", raw)
    assert raw == plain
    assert not made.open_into(nonce, sealed, b"", raw)
    assert raw == bytes(4096)


@pytest.mark.parametrize("change", [-17, -16, -1, 1, 16])
def test_req_c1_c6_cut_or_extended_blocks_do_not_open(change: int) -> None:
    made = cipher()
    nonce, sealed = seal(made, bytes(64), b"")
    wrong = bytes(sealed) + bytes(change) if change > 0 else bytes(sealed[:change])
    out = bytearray(b"\xaa" * 64)
    assert not made.open_into(nonce, wrong, b"", out)
    assert out == bytes(64)
    assert made.open_into(nonce, sealed, b"", out)


@pytest.mark.parametrize("size", [0, 8, 11, 13, 16])
def test_req_c1_only_96_bit_nonces(size: int) -> None:
    """GCM itself takes other lengths; a block written with one must not open."""
    made = cipher()
    assert made._aead is not None
    nonce = bytes(size)
    out = bytearray(b"\xaa" * 5)
    sealed = made._aead.encrypt(nonce, b"block", b"") if size >= 8 else bytes(21)
    assert not made.open_into(nonce, sealed, b"", out)
    assert out == bytes(5)


def test_req_c6_buffer_is_zeroed_when_the_library_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def decrypt_into(self, _nonce: bytes, _data: bytes, _aad: bytes, out: bytearray) -> None:
            out[:] = b"\xbb" * len(out)
            raise MemoryError

    made = cipher()
    monkeypatch.setattr(made, "_aead", Failing(), raising=True)
    out = bytearray(8)
    with pytest.raises(MemoryError):
        made.open_into(bytes(12), bytes(24), b"", out)
    assert out == bytes(8)


def test_another_segment_or_secret_does_not_open() -> None:
    nonce, sealed = seal(cipher(), b"block", b"")
    out = bytearray(5)
    assert not SegmentCipher(SECRET, bytes(16)).open_into(nonce, sealed, b"", out)
    assert not SegmentCipher(bytes(32), SEGMENT).open_into(nonce, sealed, b"", out)
    assert SegmentCipher(SECRET, SEGMENT).open_into(nonce, sealed, b"", out)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64])
def test_views_of_arrays_are_bytes(dtype: type) -> None:
    plain: NDArray[Any] = np.arange(64).astype(dtype)
    back: NDArray[Any] = np.zeros(64, dtype)
    sealed = np.zeros(plain.nbytes + 16, np.uint8)
    made = cipher()
    nonce = made.seal_into(plain.data, b"", sealed.data)
    assert made.open_into(nonce, sealed.data, b"", back.data)
    assert np.array_equal(plain, back)
    sealed[0] ^= 1
    assert not made.open_into(nonce, sealed.data, b"", back.data)
    assert not back.any()


def test_a_block_opens_in_place() -> None:
    plain = secrets.token_bytes(8192)
    made = cipher()
    nonce, sealed = seal(made, plain, b"")
    view = memoryview(sealed)
    assert made.open_into(nonce, view, b"", view[:8192])
    assert sealed[:8192] == plain


def test_misuse_is_a_value_error() -> None:
    made = cipher()
    with pytest.raises(ValueError, match="buffer"):
        made.seal_into(bytes(10), b"", bytearray(10))
    with pytest.raises(ValueError, match="32 bytes"):
        SegmentCipher(bytes(16), SEGMENT)
    with pytest.raises(ValueError, match="16 bytes"):
        SegmentCipher(SECRET, bytes(32))


def test_one_cipher_serves_many_threads() -> None:
    made = cipher()

    def work(number: int) -> bool:
        plain = bytes([number]) * 70_000
        aad = number.to_bytes(4, "big")
        right = True
        for _ in range(20):
            nonce, sealed = seal(made, plain, aad)
            out = bytearray(len(plain))
            right &= made.open_into(nonce, sealed, aad, out) and out == plain
            right &= not made.open_into(nonce, sealed, b"other", out) and not any(out)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_nonces_do_not_repeat() -> None:
    made = cipher()
    assert len({seal(made, b"", b"")[0] for _ in range(5000)}) == 5000


# ---------------------------------------------------------------- commitment and REQ-C5


def test_req_c4_commitment() -> None:
    made = cipher()
    assert made.check_commitment(made.commitment)
    assert made.check_commitment(bytearray(made.commitment))
    for bit in range(256):
        wrong = bytearray(made.commitment)
        wrong[bit // 8] ^= 1 << bit % 8
        assert not made.check_commitment(wrong)
    assert not made.check_commitment(made.commitment[:-1])
    assert not made.check_commitment(b"")


def test_req_c4_commitment_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[object, object]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    made = cipher()
    assert not made.check_commitment(bytes(32))
    assert compared == [(made.commitment, bytes(32))]


@given(secret=st.binary(min_size=32, max_size=32), segment=st.binary(min_size=16, max_size=16))
def test_req_c4_commitments_differ(secret: bytes, segment: bytes) -> None:
    assume((secret, segment) != (SECRET, SEGMENT))
    assert SegmentCipher(secret, segment).commitment != cipher().commitment


def test_req_c5_a_cipher_for_reading_never_encrypts() -> None:
    nonce, sealed = seal(cipher(), b"block", b"")
    reader = SegmentCipher(SECRET, SEGMENT)
    with pytest.raises(ClosedError):
        seal(reader, b"block", b"")
    assert reader.open_into(nonce, sealed, b"", bytearray(5))


def test_req_c5_after_stop_sealing_a_cipher_only_opens() -> None:
    made = cipher()
    nonce, sealed = seal(made, b"block", b"")
    made.stop_sealing()
    with pytest.raises(ClosedError):
        seal(made, b"block", b"")
    assert made.open_into(nonce, sealed, b"", bytearray(5))


def test_req_c5_a_forked_child_never_encrypts() -> None:
    made = cipher()
    seal(made, b"block", b"")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            seal(made, b"block", b"")
        except ClosedError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    seal(made, b"block", b"")


def test_a_key_encrypts_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aead, "MAX_SEALS_PER_KEY", 3)
    made = cipher()
    sealed = [seal(made, b"block", b"") for _ in range(3)]
    for _ in range(2):
        with pytest.raises(ClosedError):
            seal(made, b"block", b"")
    for nonce, block in sealed:
        assert made.open_into(nonce, block, b"", bytearray(5))


def test_a_closed_cipher_does_nothing_and_leaves_a_clean_buffer() -> None:
    made = cipher()
    nonce, sealed = seal(made, b"block", b"")
    made.close()
    made.close()
    out = bytearray(b"\xaa" * 5)
    with pytest.raises(ClosedError):
        made.open_into(nonce, sealed, b"", out)
    assert out == bytes(5)
    with pytest.raises(ClosedError):
        seal(made, b"block", b"")


def test_req_k8_the_secret_may_be_wiped_after_construction() -> None:
    secret = bytearray(SECRET)
    made = SegmentCipher(secret, SEGMENT, may_seal=True)
    nonce, sealed = seal(made, b"block", b"")
    aead.wipe(secret)
    assert not any(secret)
    assert made.open_into(nonce, sealed, b"", bytearray(5))
    assert cipher().open_into(nonce, sealed, b"", bytearray(5))


# ---------------------------------------------------------------------- wraps and texts


@given(key=st.binary(min_size=32, max_size=32), aad=st.binary(max_size=100))
def test_wraps_come_back(key: bytes, aad: bytes) -> None:
    wrapped = aead.wrap_key(KEK, key, aad)
    assert len(wrapped) == 60
    assert key not in wrapped
    back = aead.unwrap_key(KEK, wrapped, aad)
    assert isinstance(back, bytearray)
    assert back == key


@pytest.mark.parametrize("size", [0, 1, 12, 28, 59, 61, 92])
def test_req_c1_a_wrap_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(WrongKeyError):
        aead.unwrap_key(KEK, bytes(size), b"")


def test_req_c1_a_shorter_key_inside_a_true_wrap_is_refused() -> None:
    nonce = bytes(12)
    short = nonce + AESGCM(KEK).encrypt(nonce, bytes(16), b"kvvault/1/wrap\0")
    with pytest.raises(WrongKeyError):
        aead.unwrap_key(KEK, short, b"")


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_req_c1_keys_of_another_length_are_refused(size: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: aead.wrap_key(bytes(size), KEY, b""),
        lambda: aead.wrap_key(KEK, bytes(size), b""),
        lambda: aead.unwrap_key(bytes(size), bytes(60), b""),
        lambda: aead.seal_text(bytes(size), "x", b""),
        lambda: aead.keyed_id(bytes(size), b"x"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="32 bytes"):
            call()


@given(bit=st.integers(0, 8 * 60 - 1))
def test_an_altered_wrap_is_refused(bit: int) -> None:
    wrapped = bytearray(aead.wrap_key(KEK, KEY, b"place"))
    wrapped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WrongKeyError):
        aead.unwrap_key(KEK, wrapped, b"place")


def test_wraps_and_texts_are_not_interchangeable() -> None:
    text = aead.seal_text(KEK, "x" * 28, b"place")
    assert len(text) == 60
    with pytest.raises(WrongKeyError):
        aead.unwrap_key(KEK, text, b"place")
    with pytest.raises(WrongKeyError):
        aead.open_text(KEK, aead.wrap_key(KEK, KEY, b"place"), b"place")
    assert aead.open_text(KEK, text, b"place") == "x" * 28


@given(text=st.text(max_size=200), aad=st.binary(max_size=50))
def test_texts_come_back_padded(text: str, aad: bytes) -> None:
    sealed = aead.seal_text(KEK, text, aad)
    assert (len(sealed) - 28) % 32 == 0
    assert len(sealed) - 28 < len(text.encode()) + 4 + 32
    assert aead.open_text(KEK, sealed, aad) == text
    with pytest.raises(WrongKeyError):
        aead.open_text(KEK, sealed, aad + b"x")
    with pytest.raises(WrongKeyError):
        aead.open_text(KEY, sealed, aad)


def test_names_of_different_length_look_alike() -> None:
    sizes = {len(aead.seal_text(KEK, "n" * length, b"")) for length in range(29)}
    assert sizes == {60}


def test_text_limits() -> None:
    longest = "ü" * (aead.MAX_TEXT_BYTES // 2)
    assert aead.open_text(KEK, aead.seal_text(KEK, longest, b""), b"") == longest
    with pytest.raises(ValueError, match="too long"):
        aead.seal_text(KEK, longest + "x", b"")


@pytest.mark.parametrize("size", [0, 11, 28, 59])
def test_a_cut_text_is_refused(size: int) -> None:
    with pytest.raises(WrongKeyError):
        aead.open_text(KEK, aead.seal_text(KEK, "name", b"")[:size], b"")


@pytest.mark.parametrize(
    "padded",
    [b"\0\0\0\x1d" + bytes(28), b"\0\0\0\x02hix" + bytes(25), b"\0\0\0\x02hi" + bytes(27)],
    ids=["length beyond the end", "padding not zero", "not a multiple of 32"],
)
def test_an_authentic_text_of_another_layout_is_a_format_error(padded: bytes) -> None:
    nonce = bytes(12)
    sealed = nonce + AESGCM(KEK).encrypt(nonce, padded, b"kvvault/1/text\0")
    with pytest.raises(FormatError):
        aead.open_text(KEK, sealed, b"")


# ------------------------------------------------------------------ ids, random, wiping


PARTS = st.lists(st.binary(max_size=20), max_size=5)


@given(one=PARTS, two=PARTS)
def test_encode_parts_is_injective(one: list[bytes], two: list[bytes]) -> None:
    assert (aead.encode_parts(*one) == aead.encode_parts(*two)) == (one == two)


@given(parts=PARTS, size=st.integers(16, 32), split=st.integers(0, 5))
def test_keyed_ids_are_truncated_hmacs(parts: list[bytes], size: int, split: int) -> None:
    whole = hmac.new(KEK, aead.encode_parts(*parts), hashlib.sha256).digest()
    assert aead.keyed_id(KEK, *parts, size=size) == whole[:size]
    # However many of the parts are absorbed ahead.
    assert aead.KeyedHasher(KEK, *parts[:split]).id(*parts[split:], size=size) == whole[:size]


def test_keyed_ids_depend_on_the_key() -> None:
    assert aead.keyed_id(KEK, b"x") == aead.keyed_id(KEK, b"x")
    assert aead.keyed_id(KEK, b"x") != aead.keyed_id(KEY, b"x")


@pytest.mark.parametrize("size", [0, 8, 15, 33])
def test_keyed_ids_are_never_short(size: int) -> None:
    with pytest.raises(ValueError, match="16 to 32"):
        aead.keyed_id(KEK, b"x", size=size)


def test_a_hasher_serves_many_threads() -> None:
    hasher = aead.KeyedHasher(KEK, b"prefix")
    wanted = [aead.keyed_id(KEK, b"prefix", b"%d" % number) for number in range(500)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            made = list(pool.map(lambda number: hasher.id(b"%d" % number), range(500)))
            assert made == wanted


def test_random_keys_and_ids() -> None:
    keys = [aead.random_key() for _ in range(100)]
    assert {(type(key), len(key)) for key in keys} == {(bytearray, 32)}
    assert len({bytes(key) for key in keys}) == 100
    ids = {aead.random_id() for _ in range(100)}
    assert len(ids) == 100
    assert {len(id_) for id_ in ids} == {16}


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_wipe(size: int) -> None:
    buffer = bytearray(b"\xaa" * (size + 2))
    aead.wipe(memoryview(buffer)[1:-1])
    assert buffer == b"\xaa" + bytes(size) + b"\xaa"


def test_wipe_takes_arrays_and_refuses_what_it_cannot_overwrite() -> None:
    array = np.ones((3, 5), np.float32)
    aead.wipe(array.data)
    assert not array.any()
    with pytest.raises(TypeError):
        aead.wipe(memoryview(b"read-only"))
    with pytest.raises(TypeError):
        aead.wipe(memoryview(bytearray(10))[::2])
