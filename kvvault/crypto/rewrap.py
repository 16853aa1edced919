"""What a purge does to wraps: opens each under the old key and makes it anew under the next one.

Nothing of a block is touched; a segment's secret is 60 bytes. Associated data are those of
`kvvault.crypto.keys`.
"""

from __future__ import annotations

from kvvault.crypto import aead
from kvvault.crypto.keys import (
    TenantKeys,
    WrappedLookup,
    lookup_key_aad,
    segment_key_aad,
    signing_key_aad,
)
from kvvault.crypto.providers.base import DEFAULT_TIMEOUT_S, KeyProvider

__all__ = ["rewrap_lookup", "rewrap_segment", "rewrap_signing", "rewrap_text"]


def rewrap_lookup(
    provider: KeyProvider,
    wrapped: WrappedLookup,
    epoch: str,
    vault_id: bytes,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> WrappedLookup:
    """The vault's lookup key, wrapped under another epoch. Errors are those of `KeyProvider`."""
    aad = lookup_key_aad(vault_id)
    key = provider.unwrap(wrapped.epoch, wrapped.key, aad, timeout=timeout)
    try:
        return WrappedLookup(epoch, provider.wrap(epoch, key, aad, timeout=timeout))
    finally:
        aead.wipe(key)


def rewrap_signing(
    provider: KeyProvider,
    old_epoch: str,
    wrapped: bytes,
    epoch: str,
    vault_id: bytes,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> bytes:
    """The vault's signing key, wrapped under another epoch. Errors are those of `KeyProvider`."""
    aad = signing_key_aad(vault_id)
    seed = provider.unwrap(old_epoch, wrapped, aad, timeout=timeout)
    try:
        return provider.wrap(epoch, seed, aad, timeout=timeout)
    finally:
        aead.wipe(seed)


def rewrap_segment(
    old: TenantKeys, new: TenantKeys, wrapped: bytes, segment_id: bytes, namespace_digest: bytes
) -> bytes:
    """A segment's secret, wrapped under the tenant's next key.

    :raises WrongKeyError: it does not open under the old one.
    """
    aad = segment_key_aad(old.vault_id, old.tenant_id, segment_id, namespace_digest)
    secret = old.unwrap(wrapped, aad)
    try:
        return new.wrap(secret, aad)
    finally:
        aead.wipe(secret)


def rewrap_text(old: TenantKeys, new: TenantKeys, label: str, sealed: bytes) -> bytes:
    """A text of a tenant, encrypted under its next key.

    :raises WrongKeyError: it does not open under the old one.
    """
    return new.seal_text(label, old.open_text(label, sealed))
