"""The key hierarchy: what opens where, and what goes with what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.crypto import aead, keys
from kvvault.crypto.keys import TenantKeys, WrappedLookup, WrappedSegment, WrappedTenant
from kvvault.crypto.providers import EphemeralProvider, TimeLimited
from kvvault.errors import (
    ClosedError,
    KeyDestroyedError,
    KeyUnavailableError,
    VaultKeyError,
    WrongKeyError,
)
from kvvault.testing import FaultyProvider

VAULT = b"vault".ljust(16, b".")
TENANT = b"tenant".ljust(16, b".")
OTHER = b"another".ljust(16, b".")
SEGMENT = b"segment".ljust(16, b".")
NAMESPACE = b"namespace".ljust(32, b".")
OTHER_NAMESPACE = b"other namespace".ljust(32, b".")
HASH = b"engine's block hash".ljust(32, b".")


class World(NamedTuple):
    provider: EphemeralProvider
    epoch: str
    wrapped_lookup: WrappedLookup
    wrapped_tenant: WrappedTenant
    tenant: TenantKeys
    wrapped_segment: WrappedSegment


@pytest.fixture
def world() -> Iterator[World]:
    provider = EphemeralProvider()
    epoch = provider.create_epoch()
    wrapped_lookup, _ = keys.new_lookup(provider, epoch, VAULT)
    wrapped_tenant, tenant = keys.new_tenant(provider, epoch, VAULT, TENANT)
    wrapped_segment, _ = keys.new_segment(tenant, SEGMENT, NAMESPACE)
    yield World(provider, epoch, wrapped_lookup, wrapped_tenant, tenant, wrapped_segment)
    tenant.close()


def test_everything_opens_again(world: World) -> None:
    _, made = keys.new_lookup(world.provider, world.epoch, VAULT)
    lookup = keys.open_lookup(world.provider, world.wrapped_lookup, VAULT)
    assert lookup.name_id("acme") == lookup.name_id("acme")
    assert lookup.name_id("acme") != made.name_id("acme")
    with keys.open_tenant(world.provider, world.wrapped_tenant, VAULT, TENANT) as again:
        assert again.block_id(NAMESPACE, HASH) == world.tenant.block_id(NAMESPACE, HASH)
        assert again.open_text("name", world.tenant.seal_text("name", "acme")) == "acme"
        wrapped, writer = keys.new_segment(world.tenant, SEGMENT, NAMESPACE)
        reader = keys.open_segment(again, wrapped, SEGMENT, NAMESPACE)
    sealed = bytearray(21)
    nonce = writer.seal_into(b"block", b"aad", sealed)
    out = bytearray(5)
    # The reader outlives the tenant's keys: loads in progress finish.
    assert reader.open_into(nonce, sealed, b"aad", out)
    assert out == b"block"
    with pytest.raises(ClosedError):
        reader.seal_into(b"block", b"aad", sealed)


# ------------------------------------------------------ REQ-C3: each wrap only in its place


def test_req_c3_lookup_key_is_bound_to_its_vault(world: World) -> None:
    with pytest.raises(WrongKeyError):
        keys.open_lookup(world.provider, world.wrapped_lookup, OTHER)
    keys.open_lookup(world.provider, world.wrapped_lookup, VAULT)


@pytest.mark.parametrize(("vault", "tenant"), [(OTHER, TENANT), (VAULT, OTHER), (TENANT, VAULT)])
def test_req_c3_tenant_key_is_bound_to_vault_and_tenant(
    world: World, vault: bytes, tenant: bytes
) -> None:
    with pytest.raises(WrongKeyError):
        keys.open_tenant(world.provider, world.wrapped_tenant, vault, tenant)
    keys.open_tenant(world.provider, world.wrapped_tenant, VAULT, TENANT).close()


def test_req_c3_index_key_of_another_tenant_is_refused(world: World) -> None:
    other, other_keys = keys.new_tenant(world.provider, world.epoch, VAULT, OTHER)
    other_keys.close()
    mixed = replace(world.wrapped_tenant, index_key=other.index_key)
    with pytest.raises(WrongKeyError):
        keys.open_tenant(world.provider, mixed, VAULT, TENANT)


@pytest.mark.parametrize(
    ("segment", "namespace"),
    [(OTHER, NAMESPACE), (SEGMENT, OTHER_NAMESPACE), (TENANT, NAMESPACE)],
)
def test_req_c3_segment_key_is_bound_to_segment_and_namespace(
    world: World, segment: bytes, namespace: bytes
) -> None:
    with pytest.raises(WrongKeyError):
        keys.open_segment(world.tenant, world.wrapped_segment, segment, namespace)
    keys.open_segment(world.tenant, world.wrapped_segment, SEGMENT, NAMESPACE)


@pytest.mark.parametrize(("vault", "tenant"), [(OTHER, TENANT), (VAULT, OTHER)])
def test_req_c3_segment_key_is_bound_to_vault_and_tenant(
    world: World, vault: bytes, tenant: bytes
) -> None:
    """Even under the same tenant key: the ids alone make the difference."""
    kek, index = bytearray(b"k" * 32), bytearray(b"i" * 32)
    right = TenantKeys(VAULT, TENANT, bytearray(kek), bytearray(index))
    wrong = TenantKeys(vault, tenant, kek, index)
    wrapped, _ = keys.new_segment(right, SEGMENT, NAMESPACE)
    with pytest.raises(WrongKeyError):
        keys.open_segment(wrong, wrapped, SEGMENT, NAMESPACE)
    keys.open_segment(right, wrapped, SEGMENT, NAMESPACE)


def test_req_c3_format_version_is_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEY_FORMAT_VERSION", 2)
    with pytest.raises(WrongKeyError):
        keys.open_lookup(world.provider, world.wrapped_lookup, VAULT)
    with pytest.raises(WrongKeyError):
        keys.open_tenant(world.provider, world.wrapped_tenant, VAULT, TENANT)
    with pytest.raises(WrongKeyError):
        keys.open_segment(world.tenant, world.wrapped_segment, SEGMENT, NAMESPACE)


def test_req_c3_texts_are_bound_to_tenant_and_label() -> None:
    kek, index = bytearray(b"k" * 32), bytearray(b"i" * 32)
    tenant = TenantKeys(VAULT, TENANT, kek, index)
    sealed = tenant.seal_text("tenant-name", "acme")
    with pytest.raises(WrongKeyError):
        tenant.open_text("subject", sealed)
    for vault, other in [(OTHER, TENANT), (VAULT, OTHER)]:
        with pytest.raises(WrongKeyError):
            TenantKeys(vault, other, kek, index).open_text("tenant-name", sealed)
    assert tenant.open_text("tenant-name", sealed) == "acme"


def test_req_c3_no_two_kinds_share_associated_data() -> None:
    made = [
        keys.lookup_key_aad(VAULT),
        keys.tenant_key_aad(VAULT, TENANT),
        keys.index_key_aad(VAULT, TENANT),
        keys.segment_key_aad(VAULT, TENANT, SEGMENT, NAMESPACE),
        keys.text_aad(VAULT, TENANT, "name"),
    ]
    assert len(set(made)) == len(made)


def test_associated_data_does_not_change_between_releases() -> None:
    assert keys.segment_key_aad(VAULT, TENANT, SEGMENT, NAMESPACE) == b"".join(
        len(part).to_bytes(4, "big") + part
        for part in (b"kvvault", b"\0\x01", b"segment-key", VAULT, TENANT, SEGMENT, NAMESPACE)
    )


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_ids_of_another_length_are_misuse(world: World, size: int) -> None:
    wrong = bytes(size)
    calls: list[Callable[[], object]] = [
        lambda: keys.lookup_key_aad(wrong),
        lambda: keys.tenant_key_aad(wrong, TENANT),
        lambda: keys.index_key_aad(VAULT, wrong),
        lambda: keys.segment_key_aad(VAULT, TENANT, wrong, NAMESPACE),
        lambda: keys.segment_key_aad(VAULT, TENANT, SEGMENT, wrong[:31]),
        lambda: keys.new_segment(world.tenant, wrong, NAMESPACE),
        lambda: keys.new_tenant(world.provider, world.epoch, VAULT, wrong),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="bytes"):
            call()


# ------------------------------------------------------------------------- alterations


@given(data=st.data())
def test_altered_catalog_fields_never_open(data: st.DataObject) -> None:
    provider = EphemeralProvider()
    wrapped, tenant = keys.new_tenant(provider, provider.create_epoch(), VAULT, TENANT)
    segment, _ = keys.new_segment(tenant, SEGMENT, NAMESPACE)
    name = data.draw(st.sampled_from(["tenant_key", "index_key", "key", "commitment"]))
    fields = {
        "tenant_key": wrapped.tenant_key,
        "index_key": wrapped.index_key,
        "key": segment.key,
        "commitment": segment.commitment,
    }
    bad = bytearray(fields[name])
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(bad) - 1))
        bad[bit // 8] ^= 1 << bit % 8
    else:
        del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    fields[name] = bytes(bad)
    altered_tenant = WrappedTenant(wrapped.epoch, fields["tenant_key"], fields["index_key"])
    altered_segment = WrappedSegment(fields["key"], fields["commitment"])

    def open_altered() -> None:
        if name.endswith("_key"):
            keys.open_tenant(provider, altered_tenant, VAULT, TENANT)
        else:
            keys.open_segment(tenant, altered_segment, SEGMENT, NAMESPACE)

    with pytest.raises(WrongKeyError):
        open_altered()
    keys.open_tenant(provider, wrapped, VAULT, TENANT).close()
    keys.open_segment(tenant, segment, SEGMENT, NAMESPACE)


def test_req_c4_a_wrap_without_its_commitment_is_not_read(world: World) -> None:
    """A true wrap with another segment's commitment: nothing is decrypted under it."""
    other, _ = keys.new_segment(world.tenant, SEGMENT, NAMESPACE)
    mixed = replace(world.wrapped_segment, commitment=other.commitment)
    with pytest.raises(WrongKeyError, match="commitment"):
        keys.open_segment(world.tenant, mixed, SEGMENT, NAMESPACE)


# --------------------------------------------------------------- independence, deletion


def test_req_c7_no_key_follows_from_names_or_ids(world: World) -> None:
    """The same ids twice give unrelated keys, so nothing about a key follows from them."""
    _, again = keys.new_tenant(world.provider, world.epoch, VAULT, TENANT)
    assert again.block_id(NAMESPACE, HASH) != world.tenant.block_id(NAMESPACE, HASH)
    one, _ = keys.new_segment(world.tenant, SEGMENT, NAMESPACE)
    two, _ = keys.new_segment(world.tenant, SEGMENT, NAMESPACE)
    assert one.commitment != two.commitment
    for function in (keys.new_tenant, keys.new_segment, keys.new_lookup):
        parameters = set(inspect.signature(function).parameters)
        assert parameters.isdisjoint({"path", "name", "password", "salt"})


def test_req_k1_destroying_one_epoch_leaves_the_other_tenants(world: World) -> None:
    epoch = world.provider.create_epoch()
    wrapped, other = keys.new_tenant(world.provider, epoch, VAULT, OTHER)
    world.provider.destroy(world.epoch)
    with pytest.raises(KeyDestroyedError):
        keys.open_tenant(world.provider, world.wrapped_tenant, VAULT, TENANT)
    with keys.open_tenant(world.provider, wrapped, VAULT, OTHER) as again:
        assert again.block_id(NAMESPACE, HASH) == other.block_id(NAMESPACE, HASH)


def test_req_k1_another_tenants_key_opens_no_segment_or_text(world: World) -> None:
    _, other = keys.new_tenant(world.provider, world.epoch, VAULT, OTHER)
    with pytest.raises(WrongKeyError):
        keys.open_segment(other, world.wrapped_segment, SEGMENT, NAMESPACE)
    with pytest.raises(WrongKeyError):
        other.open_text("name", world.tenant.seal_text("name", "acme"))


def test_req_k9_a_provider_that_is_down_is_no_wrong_key(world: World) -> None:
    faulty = FaultyProvider(world.provider)
    limited = TimeLimited(faulty)
    with faulty.hanging():
        with pytest.raises(KeyUnavailableError):
            keys.open_tenant(limited, world.wrapped_tenant, VAULT, TENANT, timeout=0.05)
        with pytest.raises(KeyUnavailableError):
            keys.new_tenant(limited, world.epoch, VAULT, OTHER, timeout=0.05)
        with pytest.raises(KeyUnavailableError):
            keys.open_lookup(limited, world.wrapped_lookup, VAULT, timeout=0.05)
    keys.open_tenant(limited, world.wrapped_tenant, VAULT, TENANT).close()


# ----------------------------------------------------------------------------- block ids


def test_req_t2_block_ids_are_keyed(world: World) -> None:
    _, other = keys.new_tenant(world.provider, world.epoch, VAULT, OTHER)
    ids = {
        world.tenant.block_id(NAMESPACE, HASH),
        world.tenant.block_id(OTHER_NAMESPACE, HASH),
        world.tenant.block_id(NAMESPACE, HASH[:-1]),
        other.block_id(NAMESPACE, HASH),
    }
    assert len(ids) == 4
    assert {len(id_) for id_ in ids} == {16}


def test_block_ids_do_not_change_between_releases() -> None:
    index = b"i" * 32
    tenant = TenantKeys(VAULT, TENANT, bytearray(b"k" * 32), bytearray(index))
    want = aead.keyed_id(index, b"block", NAMESPACE, HASH)
    assert tenant.block_id(NAMESPACE, HASH) == want
    assert tenant.block_id(NAMESPACE, HASH) == want


# ---------------------------------------------------------------- closing and REQ-K8


def test_req_k8_close_overwrites_the_keys() -> None:
    kek, index = bytearray(b"k" * 32), bytearray(b"i" * 32)
    tenant = TenantKeys(VAULT, TENANT, kek, index)
    wrapped, _ = keys.new_segment(tenant, SEGMENT, NAMESPACE)
    sealed = tenant.seal_text("name", "acme")
    states = [tenant.closed]
    for _ in range(2):
        tenant.close()
        states.append(tenant.closed)
    assert states == [False, True, True]
    assert kek == index == bytes(32)
    calls: list[Callable[[], object]] = [
        lambda: tenant.block_id(NAMESPACE, HASH),
        lambda: tenant.block_id(OTHER_NAMESPACE, HASH),
        lambda: keys.new_segment(tenant, SEGMENT, NAMESPACE),
        lambda: keys.open_segment(tenant, wrapped, SEGMENT, NAMESPACE),
        lambda: tenant.seal_text("name", "acme"),
        lambda: tenant.open_text("name", sealed),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_req_k8_a_failed_open_wipes_what_it_had(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wiped: list[int] = []
    real = aead.wipe

    def wipe(buffer: aead.WriteBuffer) -> None:
        wiped.append(len(buffer))
        real(buffer)

    monkeypatch.setattr(aead, "wipe", wipe)
    bad = replace(world.wrapped_tenant, index_key=bytes(60))
    with pytest.raises(WrongKeyError):
        keys.open_tenant(world.provider, bad, VAULT, TENANT)
    # The half-made index key (in aead) and the tenant key that was open already.
    assert wiped == [32, 32]
    wiped.clear()
    with pytest.raises(VaultKeyError):
        keys.new_tenant(world.provider, "no such epoch", VAULT, OTHER)
    assert wiped == [32, 32]


def test_calls_during_close_never_give_a_result_under_a_wiped_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids under a zero key would be an oracle on the disk, a wrap under it an open door."""
    tenant = TenantKeys(VAULT, TENANT, bytearray(b"k" * 32), bytearray(b"i" * 32))
    tenant.block_id(NAMESPACE, HASH)
    wrapped = tenant.wrap(b"s" * 32, b"aad")
    during: list[Callable[[], object]] = [
        lambda: tenant.block_id(NAMESPACE, HASH),
        lambda: tenant.block_id(OTHER_NAMESPACE, HASH),
        lambda: tenant.wrap(b"s" * 32, b"aad"),
        lambda: tenant.unwrap(wrapped, b"aad"),
        lambda: tenant.seal_text("name", "acme"),
    ]
    real = aead.wipe
    refused: list[int] = []

    def wipe(buffer: aead.WriteBuffer) -> None:
        """Another thread gets in right before and right after each key is wiped."""
        for moment in ("before", "after"):
            if moment == "after":
                real(buffer)
            for call in during:
                with pytest.raises(ClosedError):
                    call()
                refused.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(aead, "wipe", wipe)
        tenant.close()
    assert len(refused) == 2 * 2 * len(during)


@pytest.mark.parametrize("name", ["wrap", "seal_text", "block_id"])
def test_a_close_during_a_call_takes_its_result_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The other way round: close() comes between the first look at the key and the result."""
    tenant = TenantKeys(VAULT, TENANT, bytearray(b"k" * 32), bytearray(b"i" * 32))
    calls: dict[str, Callable[[], object]] = {
        "wrap": lambda: tenant.wrap(b"s" * 32, b"aad"),
        "seal_text": lambda: tenant.seal_text("name", "acme"),
        "block_id": lambda: tenant.block_id(NAMESPACE, HASH),
    }
    assert calls[name]()
    for target in ("wrap_key", "seal_text", "KeyedHasher"):
        real = getattr(aead, target)

        def closing(*args: object, real: Callable[..., object] = real) -> object:
            tenant.close()
            return real(*args)

        monkeypatch.setattr(aead, target, closing)
        monkeypatch.setattr(keys, target, closing, raising=False)
    tenant._hashers.clear()
    with pytest.raises(ClosedError):
        calls[name]()


def test_keys_of_another_length_are_misuse() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        TenantKeys(VAULT, TENANT, bytearray(16), bytearray(32))
    with pytest.raises(ValueError, match="32 bytes"):
        TenantKeys(VAULT, TENANT, bytearray(32), bytearray(33))
