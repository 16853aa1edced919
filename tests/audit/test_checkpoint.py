"""Signed notes: the specification's own, ours, and everything that is none."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.audit import merkle
from kvvault.audit.checkpoint import Checkpoint, VerifierKey, origin_of, parse_note, sign_note
from kvvault.crypto import signing
from kvvault.crypto.signing import Signer, is_signed
from kvvault.errors import ClosedError, CryptoSelfTestError, FormatError, UsageError

SEED = bytes(range(32))
SIGNER = Signer(SEED)
ORIGIN = origin_of(bytes(range(16)))
KEY = VerifierKey(ORIGIN, SIGNER.public_key)
HERE = Checkpoint(ORIGIN, 7, merkle.leaf_hash(b"root"))
NOTE = sign_note(HERE, SIGNER)

# Published with Go's golang.org/x/mod/sumdb/note, after which C2SP's signed-note is made.
GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngot"
    "pRZb6KE6RyyBwJnAM=\n"
)


def test_rfc_8032() -> None:
    """Test 2 of section 7.1."""
    seed = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    signer = Signer(seed)
    assert signer.public_key.hex() == (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    )
    assert signer.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert is_signed(signer.public_key, b"\x72", signer.sign(b"\x72"))


def test_a_library_that_answers_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-C2."""
    signing.self_test()
    monkeypatch.setattr(signing, "is_signed", lambda *_: True)
    with pytest.raises(CryptoSelfTestError, match="Ed25519"):
        signing.self_test()
    monkeypatch.setattr(signing, "is_signed", lambda *_: False)
    with pytest.raises(CryptoSelfTestError, match="Ed25519"):
        signing.self_test()


def test_a_closed_signer_signs_nothing() -> None:
    signer = Signer(SEED)
    signer.close()
    signer.close()
    assert repr(signer) == "<Signer>"
    with pytest.raises(ClosedError):
        signer.sign(b"x")


def test_what_is_no_key_or_signature_signed_nothing() -> None:
    signature = SIGNER.sign(b"x")
    assert is_signed(SIGNER.public_key, b"x", signature)
    assert not is_signed(SIGNER.public_key, b"y", signature)
    assert not is_signed(SIGNER.public_key, b"x", signature[:-1])
    assert not is_signed(b"", b"x", signature)
    assert not is_signed(b"\xff" * 32, b"x", signature)


def test_the_key_of_another_implementation() -> None:
    assert VerifierKey.parse(GO_KEY).key_id.hex() == "c74f20a3"
    assert VerifierKey.parse(GO_KEY).text == GO_KEY


def test_the_signature_of_another_implementation_is_read() -> None:
    """Its text is no checkpoint, and that is what is said of it; a changed one has no signature."""
    with pytest.raises(FormatError, match="is not a checkpoint"):
        parse_note(GO_NOTE, VerifierKey.parse(GO_KEY))
    with pytest.raises(FormatError, match="does not verify"):
        parse_note(GO_NOTE.replace("answer", "Answer"), VerifierKey.parse(GO_KEY))


def test_a_note_is_what_the_specification_says() -> None:
    text, signatures = NOTE.split("\n\n")
    assert text == f"{ORIGIN}\n7\n{base64.b64encode(HERE.root).decode()}"
    assert signatures.startswith(f"\u2014 {ORIGIN} ")
    assert signatures.endswith("\n")
    raw = base64.b64decode(signatures.split(" ")[2])
    named = ORIGIN.encode() + b"\n\x01" + SIGNER.public_key
    assert raw[:4] == hashlib.sha256(named).digest()[:4]
    assert is_signed(SIGNER.public_key, (text + "\n").encode(), raw[4:])


def test_it_comes_back() -> None:
    assert parse_note(NOTE, KEY) == HERE


def test_other_signatures_and_later_lines_do_no_harm() -> None:
    other = f"\u2014 somebody/else {base64.b64encode(bytes(40)).decode()}\n"
    assert parse_note(NOTE + other, KEY) == HERE
    longer = HERE.text + "extension\n"
    line = base64.b64encode(KEY.key_id + SIGNER.sign(longer.encode())).decode()
    assert parse_note(f"{longer}\n\u2014 {ORIGIN} {line}\n", KEY) == HERE


@given(st.integers(0, len(NOTE.encode()) - 1), st.integers(0, 7))
def test_no_bit_of_a_note_can_be_changed(at: int, bit: int) -> None:
    raw = bytearray(NOTE.encode())
    raw[at] ^= 1 << bit
    with pytest.raises(FormatError):
        parse_note(raw.decode("utf-8", "replace"), KEY)


@pytest.mark.parametrize(
    "note",
    [
        "",
        "\n\n",
        NOTE[:-1],
        NOTE + "\n",
        NOTE.split("\n\n", maxsplit=1)[0],
        NOTE.replace("\u2014 ", "- "),
        NOTE * 1000,
    ],
)
def test_what_is_no_note(note: str) -> None:
    with pytest.raises(FormatError):
        parse_note(note, KEY)


@pytest.mark.parametrize("size", ["07", "-1", "", "1e3", " 7", "99999999999999999999"])
def test_sizes_are_written_in_one_way(size: str) -> None:
    text = HERE.text.replace("\n7\n", f"\n{size}\n")
    line = base64.b64encode(KEY.key_id + SIGNER.sign(text.encode())).decode()
    with pytest.raises(FormatError, match="is not a checkpoint"):
        parse_note(f"{text}\n\u2014 {ORIGIN} {line}\n", KEY)


def test_another_key_or_another_log() -> None:
    with pytest.raises(FormatError, match="not signed by the key"):
        parse_note(NOTE, VerifierKey(ORIGIN, Signer(bytes(32)).public_key))
    elsewhere = Checkpoint(origin_of(bytes(16)), 7, HERE.root)
    line = base64.b64encode(KEY.key_id + SIGNER.sign(elsewhere.text.encode())).decode()
    with pytest.raises(FormatError, match="about another log"):
        parse_note(f"{elsewhere.text}\n\u2014 {ORIGIN} {line}\n", KEY)


def test_a_verifier_key_comes_back() -> None:
    assert VerifierKey.parse(KEY.text + "\n") == KEY


@pytest.mark.parametrize(
    "text",
    ["", "+", "a+b+c", KEY.text[:-1], KEY.text.replace("+", " "), KEY.text.replace("kv", "vk")],
)
def test_what_is_no_verifier_key(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        VerifierKey.parse(text)
    assert not text or text not in str(caught.value)
