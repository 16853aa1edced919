"""A tenant's keys while a purge replaces them under whoever uses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvvault.crypto import aead, keys, rewrap
from kvvault.crypto.keys import TenantKeys, WrappedLookup
from kvvault.crypto.providers import EphemeralProvider
from kvvault.errors import ClosedError, WrongKeyError

VAULT, TENANT, SEGMENT = b"v" * 16, b"t" * 16, b"s" * 16
NAMESPACE = b"n" * 32


@pytest.fixture
def provider() -> EphemeralProvider:
    return EphemeralProvider()


@pytest.fixture
def old(provider: EphemeralProvider) -> TenantKeys:
    return keys.new_tenant(provider, provider.create_epoch(), VAULT, TENANT)[1]


@pytest.fixture
def new(provider: EphemeralProvider, old: TenantKeys) -> TenantKeys:
    return keys.renew_tenant(provider, provider.create_epoch(), old)[1]


def copy(tenant: TenantKeys) -> TenantKeys:
    """The same keys in memory of their own."""
    return TenantKeys(
        VAULT,
        TENANT,
        bytearray(tenant._tenant_key),
        bytearray(tenant._index_key),
        tenant.key_no,
    )


def test_the_next_keys_open_what_the_catalog_gets(provider: EphemeralProvider) -> None:
    wrapped, tenant = keys.new_tenant(provider, provider.create_epoch(), VAULT, TENANT)
    assert (wrapped.key_no, tenant.key_no) == (1, 1)
    again, newer = keys.renew_tenant(provider, provider.create_epoch(), tenant)
    assert (again.key_no, newer.key_no) == (2, 2)
    assert newer._tenant_key != tenant._tenant_key
    opened = keys.open_tenant(provider, again, VAULT, TENANT)
    assert opened._tenant_key == newer._tenant_key
    assert opened.key_no == 2
    assert opened.block_id(NAMESPACE, b"x") == tenant.block_id(NAMESPACE, b"x")


def test_rewrapping_keeps_what_is_inside(
    provider: EphemeralProvider, old: TenantKeys, new: TenantKeys
) -> None:
    wrapped, cipher = keys.new_segment(old, SEGMENT, NAMESPACE)
    fresh = rewrap.rewrap_segment(old, new, wrapped.key, SEGMENT, NAMESPACE)
    assert len(fresh) == len(wrapped.key) == 60
    assert fresh != wrapped.key
    opened = keys.open_segment(
        new, keys.WrappedSegment(fresh, wrapped.commitment), SEGMENT, NAMESPACE
    )
    assert opened.commitment == cipher.commitment
    for bad in (wrapped.key, rewrap.rewrap_segment(old, old, wrapped.key, SEGMENT, NAMESPACE)):
        with pytest.raises(WrongKeyError):
            keys.open_segment(new, keys.WrappedSegment(bad, wrapped.commitment), SEGMENT, NAMESPACE)
    sealed = rewrap.rewrap_text(old, new, "label", old.seal_text("label", "text"))
    assert new.open_text("label", sealed) == "text"
    with pytest.raises(WrongKeyError):
        old.open_text("label", sealed)
    first = provider.create_epoch()
    lookup, hasher = keys.new_lookup(provider, first, VAULT)
    second = rewrap.rewrap_lookup(provider, lookup, provider.create_epoch(), VAULT)
    assert second.epoch != first
    assert keys.open_lookup(provider, second, VAULT).name_id("a") == hasher.name_id("a")
    with pytest.raises(WrongKeyError):
        keys.open_lookup(provider, WrappedLookup(second.epoch, lookup.key), VAULT)


def test_taking_over_wipes_the_old_key_and_keeps_ids(old: TenantKeys, new: TenantKeys) -> None:
    before, block_id = old._tenant_key, old.block_id(NAMESPACE, b"x")
    under_new = new.wrap(b"s" * 32, b"aad")
    taken, index = new._tenant_key, new._index_key
    assert any(before)
    assert any(index)
    old.take_over(new)
    assert not any(before)
    assert not any(index)
    assert old._tenant_key is taken
    assert old.key_no == 2
    assert old.block_id(NAMESPACE, b"x") == block_id
    assert old.unwrap(under_new, b"aad") == b"s" * 32


def test_an_older_key_is_not_taken_over(old: TenantKeys, new: TenantKeys) -> None:
    stale = copy(old)
    old.take_over(new)
    current = bytes(old._tenant_key)
    old.take_over(stale)
    assert bytes(old._tenant_key) == current
    assert old.key_no == 2
    assert stale.closed


def test_another_tenants_key_is_not_taken_over(old: TenantKeys, new: TenantKeys) -> None:
    other = TenantKeys(VAULT, TENANT, bytearray(b"k" * 32), bytearray(b"i" * 32), 9)
    with pytest.raises(WrongKeyError):
        old.take_over(other)
    assert other.closed
    assert old.key_no == 1


def test_closed_keys_take_nothing_over(old: TenantKeys, new: TenantKeys) -> None:
    old.close()
    old.take_over(new)
    assert new.closed
    with pytest.raises(ClosedError):
        old.wrap(b"s" * 32, b"aad")


@pytest.mark.parametrize("name", ["wrap_key", "unwrap_key", "seal_text", "open_text"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_purge_during_a_call_never_gives_a_result_under_a_wiped_key(
    old: TenantKeys, new: TenantKeys, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    """The key is replaced, and the old one wiped, right before or after it is used."""
    both = {"old": copy(old), "new": copy(new)}
    wrapped, sealed = new.wrap(b"s" * 32, b"aad"), new.seal_text("label", "text")
    real = getattr(aead, name)
    calls: list[int] = []

    def during(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1 and moment == "before":
            old.take_over(new)
        try:
            return real(*arguments)
        finally:
            if len(calls) == 1 and moment == "after":
                old.take_over(new)

    monkeypatch.setattr(aead, name, during)
    # What is opened is under the new key: with the old one it would not open.
    made: dict[str, Callable[[], object]] = {
        "wrap_key": lambda: old.wrap(b"s" * 32, b"aad"),
        "unwrap_key": lambda: bytes(old.unwrap(wrapped, b"aad")),
        "seal_text": lambda: old.seal_text("label", "text"),
        "open_text": lambda: old.open_text("label", sealed),
    }
    result = made[name]()
    assert len(calls) == 2
    monkeypatch.undo()
    if name == "wrap_key":
        assert isinstance(result, bytes)
        assert both["new"].unwrap(result, b"aad") == b"s" * 32
    elif name == "seal_text":
        assert isinstance(result, bytes)
        assert both["new"].open_text("label", result) == "text"
    else:
        assert result == (b"s" * 32 if name == "unwrap_key" else "text")
