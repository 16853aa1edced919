"""REQ-T6: key bytes appear in no repr, text, log line or exception of this layer."""

from __future__ import annotations

import base64
import io
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from kvvault.crypto import aead, keys
from kvvault.crypto.keys import TenantKeys
from kvvault.crypto.providers import open_provider
from kvvault.errors import KvvaultError

VAULT, TENANT, SEGMENT = b"v" * 16, b"t" * 16, b"s" * 16
NAMESPACE = b"n" * 32
NAME = "Canary Client GmbH"
HASH = b"canary-block-hash-of-the-engine!"


def spellings(secret: bytes) -> set[str]:
    """The ways in which Python code usually prints bytes."""
    return {
        secret.hex(),
        secret.hex(" "),
        repr(secret)[2:-1],
        str(list(secret))[1:-1],
        base64.b64encode(secret).decode().rstrip("="),
        base64.urlsafe_b64encode(secret).decode().rstrip("="),
        secret.decode("latin-1"),
        str(int.from_bytes(secret, "big")),
    }


def leaks(text: str, secrets: dict[str, bytes]) -> list[str]:
    return [
        name
        for name, secret in secrets.items()
        if any(spelling in text for spelling in spellings(secret))
    ]


def test_the_search_finds_what_it_looks_for() -> None:
    """Positive control."""
    secret = bytes(range(100, 132))
    for text in (f"{secret!r}", f"{bytearray(secret)!r}", secret.hex(), f"x={list(secret)}"):
        assert leaks(f"... {text} ...", {"secret": secret}) == ["secret"]
    assert leaks("nothing here", {"secret": secret}) == []


@pytest.mark.parametrize("kind", ["file", "ephemeral"])
def test_req_t6_no_key_bytes_in_any_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets: dict[str, bytes] = {"block hash": HASH, "tenant name": NAME.encode()}
    real = aead.random_key

    def recorded() -> bytearray:
        key = real()
        secrets[f"key {len(secrets)}"] = bytes(key)
        return key

    monkeypatch.setattr(aead, "random_key", recorded)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(0)
    try:
        texts = run(f"file:{tmp_path}/root.key" if kind == "file" else "ephemeral:")
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    # Root key, lookup key, tenant and index keys of two tenants, two segments at least.
    assert len(secrets) >= 10
    assert len(texts) >= 30
    assert leaks("\n".join([*texts, log.getvalue()]), secrets) == []


def run(uri: str) -> list[str]:
    """Use everything, rightly and wrongly; the texts that came of it."""
    texts: list[str] = []
    provider = open_provider(uri, create=True)
    epoch, doomed = provider.create_epoch(), provider.create_epoch()
    wrapped_lookup, lookup = keys.new_lookup(provider, epoch, VAULT)
    wrapped_tenant, tenant = keys.new_tenant(provider, epoch, VAULT, TENANT)
    wrapped_doomed, other = keys.new_tenant(provider, doomed, VAULT, SEGMENT)
    wrapped_segment, cipher = keys.new_segment(tenant, SEGMENT, NAMESPACE)
    _, other_cipher = keys.new_segment(other, SEGMENT, NAMESPACE)
    sealed_name = tenant.seal_text("name", NAME)
    row, block_id = lookup.name_id(NAME), tenant.block_id(NAMESPACE, HASH)
    things: list[object] = [provider, provider.describe(), wrapped_lookup, lookup, cipher]
    things += [wrapped_tenant, tenant, wrapped_segment, tenant._hashers, row, block_id]
    things += [provider.epochs(), sealed_name, cipher.commitment, other_cipher]
    for thing in things:
        texts += [repr(thing), str(thing)]
    provider.destroy(doomed)
    cipher.close()
    closed = TenantKeys(VAULT, TENANT, aead.random_key(), aead.random_key())
    closed.close()
    wrong: list[Callable[[], object]] = [
        lambda: keys.open_tenant(provider, wrapped_tenant, VAULT, SEGMENT),
        lambda: keys.open_tenant(provider, wrapped_doomed, VAULT, SEGMENT),
        lambda: keys.open_segment(other, wrapped_segment, SEGMENT, NAMESPACE),
        lambda: keys.open_segment(tenant, wrapped_segment, TENANT, NAMESPACE),
        lambda: other.open_text("name", sealed_name),
        lambda: tenant.open_text("name", sealed_name[:40]),
        lambda: closed.block_id(NAMESPACE, HASH),
        lambda: closed.seal_text("name", NAME),
        lambda: cipher.seal_into(b"x", b"", bytearray(17)),
        lambda: provider.wrap("0" * 32, HASH, b""),
        lambda: provider.wrap(epoch, HASH[:31], b""),
        lambda: provider.unwrap(epoch, wrapped_tenant.tenant_key[:59], b""),
        lambda: provider.destroy(NAME),
    ]
    for call in wrong:
        with pytest.raises((KvvaultError, ValueError)) as caught:
            call()
        error = caught.value
        texts += [str(error), repr(error), repr(vars(error))]
        texts += [line for line in traceback.format_exception(error) if "\n    " not in line]
    return texts
