"""The key hierarchy: root → tenant → segment, and what each wrap is bound to.

::

    root key of an epoch      in the key provider
     ├─ lookup key            one per vault: finds a tenant's row by the tenant's name
     │   └─ policy key        HMAC of a fixed text under it: encrypts policies (may name tenants)
     ├─ signing key           one per vault, an Ed25519 seed: receipts, checkpoints of the log
     └─ tenant key            one per tenant, random
         ├─ index key         one per tenant, random: block ids (HMAC)
         ├─ names and labels  encrypted texts of that tenant
         └─ segment secret    one per segment, random: block key and commitment (HKDF)

But for the policy key all are random and independent; none is derived from a path, a name or a
salt (REQ-C7). So
destroying one leaves every other readable, and destroying a tenant key takes the index key, every
segment and every name of that tenant with it (REQ-K1).

A wrap opens only in its place. Associated data of each, as `kvvault.crypto.aead.encode_parts` of:

============  ====================================================================================
kind          bound fields, after ``b"kvvault"``, the format version (2 bytes) and the kind
============  ====================================================================================
lookup-key    vault id
signing-key   vault id
tenant-key    vault id, tenant id
index-key     vault id, tenant id
segment-key   vault id, tenant id, segment id, namespace digest
text          vault id, tenant id, label
============  ====================================================================================

Ids have 16 bytes, a namespace digest 32. The blocks' own associated data stands in
`kvvault.segments.format`.
"""

from __future__ import annotations

import hmac
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal

from kvvault.crypto import aead
from kvvault.crypto.aead import KeyedHasher, ReadBuffer, SegmentCipher
from kvvault.crypto.providers.base import DEFAULT_TIMEOUT_S, KeyProvider
from kvvault.crypto.signing import Signer
from kvvault.errors import ClosedError, WrongKeyError

__all__ = [
    "KEY_FORMAT_VERSION",
    "LookupKey",
    "TenantKeys",
    "WrappedLookup",
    "WrappedSegment",
    "WrappedTenant",
    "index_key_aad",
    "lookup_key_aad",
    "new_lookup",
    "new_segment",
    "new_signing",
    "new_tenant",
    "open_lookup",
    "open_segment",
    "open_signing",
    "open_tenant",
    "renew_tenant",
    "segment_key_aad",
    "signing_key_aad",
    "tenant_key_aad",
    "text_aad",
]

KEY_FORMAT_VERSION: Final = 1
"""Bound into every wrap: a wrap of one version never opens as one of another."""

_DIGEST_BYTES: Final = 32


def lookup_key_aad(vault_id: bytes) -> bytes:
    """What the vault's lookup key is bound to."""
    return _aad(b"lookup-key", _id(vault_id))


def signing_key_aad(vault_id: bytes) -> bytes:
    """What the seed of the vault's signing key is bound to."""
    return _aad(b"signing-key", _id(vault_id))


def tenant_key_aad(vault_id: bytes, tenant_id: bytes) -> bytes:
    """What a tenant key is bound to."""
    return _aad(b"tenant-key", _id(vault_id), _id(tenant_id))


def index_key_aad(vault_id: bytes, tenant_id: bytes) -> bytes:
    """What a tenant's index key is bound to."""
    return _aad(b"index-key", _id(vault_id), _id(tenant_id))


def segment_key_aad(
    vault_id: bytes, tenant_id: bytes, segment_id: bytes, namespace_digest: bytes
) -> bytes:
    """What a segment secret is bound to."""
    if len(namespace_digest) != _DIGEST_BYTES:
        raise ValueError(f"a namespace digest has {_DIGEST_BYTES} bytes")
    return _aad(b"segment-key", _id(vault_id), _id(tenant_id), _id(segment_id), namespace_digest)


def text_aad(vault_id: bytes, tenant_id: bytes, label: str) -> bytes:
    """What a tenant's encrypted text is bound to; ``label`` names its column ("tenant-name")."""
    return _aad(b"text", _id(vault_id), _id(tenant_id), label.encode("utf-8"))


_POLICY_AAD: Final = aead.encode_parts(b"kvvault", KEY_FORMAT_VERSION.to_bytes(2, "big"), b"policy")
_MAX_POLICY_BYTES: Final = 1 << 20
"""A larger policy file is refused when it is read."""


@dataclass(frozen=True, slots=True)
class WrappedLookup:
    """The vault's lookup key as the catalog holds it."""

    epoch: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WrappedTenant:
    """A tenant's keys as the catalog holds them. Without ``tenant_key`` all of it is worthless."""

    epoch: str
    tenant_key: bytes = field(repr=False)
    """Wrapped by the provider: opaque, at most 1024 bytes."""
    index_key: bytes = field(repr=False)
    """Wrapped under the tenant key: 60 bytes."""
    key_no: int = 1
    """How often the tenant key was replaced, from 1."""


@dataclass(frozen=True, slots=True)
class WrappedSegment:
    """A segment's secret as the catalog holds it, and its commitment."""

    key: bytes = field(repr=False)
    """Wrapped under the tenant key: 60 bytes."""
    commitment: bytes = field(repr=False)
    """32 bytes, in clear."""


class LookupKey:
    """What belongs to no tenant: finds a tenant's row by its name, without the catalog holding the
    name, and encrypts policies, which may name tenants.

    Any thread may call it.
    """

    __slots__ = ("_hasher", "_policy_key")

    def __init__(self, key: ReadBuffer) -> None:
        self._hasher = KeyedHasher(key, b"tenant-name")
        self._policy_key = bytearray(aead.keyed_id(key, b"policy-key", size=aead.KEY_BYTES))

    def __repr__(self) -> str:
        return "<LookupKey>"

    def name_id(self, name: str) -> bytes:
        """16 bytes that stand for the tenant name in the catalog. Names are compared as bytes."""
        return self._hasher.id(name.encode("utf-8"))

    def seal_policy(self, source: str) -> bytes:
        """Encrypt the text of a policy.

        :raises ValueError: it has more than 1 MiB.
        """
        return aead.seal_text(self._policy_key, source, _POLICY_AAD, most=_MAX_POLICY_BYTES)

    def open_policy(self, sealed: bytes) -> str:
        """Open what `seal_policy` made.

        :raises WrongKeyError: it does not open; also after `close`.
        """
        return aead.open_text(self._policy_key, sealed, _POLICY_AAD)

    def close(self) -> None:
        """Overwrite the policy key. Idempotent."""
        aead.wipe(self._policy_key)


class TenantKeys:
    """One tenant's keys in memory: tenant key and index key, overwritten by `close` (REQ-K8).

    Owns the two bytearrays given to it. Any thread may call any method; one that races with `close`
    either gives its right result or raises ClosedError, one that races with `take_over` gives a
    result under the old key or the new one, never under a half-wiped key.

    Whoever wraps something to put it into the catalog reads `key_no` first and has the catalog
    compare it: what a purge made worthless meanwhile is refused there.
    """

    __slots__ = (
        "_closed",
        "_hashers",
        "_index_key",
        "_lock",
        "_tenant_key",
        "key_no",
        "tenant_id",
        "vault_id",
    )

    def __init__(
        self,
        vault_id: bytes,
        tenant_id: bytes,
        tenant_key: bytearray,
        index_key: bytearray,
        key_no: int = 1,
    ) -> None:
        if len(tenant_key) != aead.KEY_BYTES or len(index_key) != aead.KEY_BYTES:
            raise ValueError(f"a key has {aead.KEY_BYTES} bytes")
        self.vault_id = _id(vault_id)
        self.tenant_id = _id(tenant_id)
        self._tenant_key = tenant_key
        self._index_key = index_key
        self._hashers: dict[bytes, KeyedHasher] = {}
        self._lock = threading.Lock()  # of `take_over` and `close` against each other
        self._closed = False
        self.key_no = key_no

    def __repr__(self) -> str:
        return "<TenantKeys>"

    def __enter__(self) -> TenantKeys:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def block_id(self, namespace_digest: bytes, block_hash: bytes) -> bytes:
        """The id of a block on disk: HMAC under the index key, 16 bytes (REQ-T2).

        Called for every block on the engine's scheduler thread: about 3 µs, no lock.

        :raises ClosedError: after `close`.
        """
        hasher = self._hashers.get(namespace_digest)
        if hasher is None:
            made = KeyedHasher(self._index_key, b"block", namespace_digest)
            # One hasher per namespace that this tenant uses in this process: a handful.
            hasher = self._hashers.setdefault(namespace_digest, made)
        block_id = hasher.id(block_hash)
        # Checked after the work: close() raises the flag before it wipes, so a result made while
        # the flag was down was made under the whole key.
        self._check_open()
        return block_id

    def keyed_id(self, kind: str, value: bytes) -> bytes:
        """What stands for something of this tenant that must not be found by who guesses it: HMAC
        under the index key, 16 bytes, another for each `kind` ("subject", "request", "log", ...).
        Gone with the tenant: nobody can make it again.

        :raises ClosedError: after `close`.
        """
        name = b"kind " + kind.encode()
        hasher = self._hashers.get(name)
        if hasher is None:
            made = KeyedHasher(self._index_key, b"text", kind.encode())
            hasher = self._hashers.setdefault(name, made)
        keyed = hasher.id(value)
        self._check_open()
        return keyed

    def log_id(self, kind: Literal["tenant", "subject", "prompt"], target: bytes = b"") -> str:
        """What the audit log and receipts call this tenant, a subject of it (`target`: its keyed
        id, 16 bytes) or one of its prompts (its id, 8 bytes): 32 hex digits. No id of the catalog,
        so that what is kept elsewhere leads to nothing in a copy of the vault once the tenant is
        forgotten.

        :raises ClosedError: after `close`.
        """
        return self.keyed_id("log", kind.encode() + target).hex()

    def wrap(self, key: ReadBuffer, aad: bytes) -> bytes:
        """Encrypt a 32-byte key under the tenant key: 60 bytes.

        :raises ClosedError: after `close`.
        """
        while True:
            tenant_key = self._tenant_key
            wrapped = aead.wrap_key(tenant_key, key, aad)
            self._check_open()
            if self._tenant_key is tenant_key:
                return wrapped

    def unwrap(self, wrapped: bytes, aad: bytes) -> bytearray:
        """Open what `wrap` made.

        :raises WrongKeyError: it does not open.
        :raises ClosedError: after `close`.
        """
        while True:
            self._check_open()
            tenant_key = self._tenant_key
            try:
                return aead.unwrap_key(tenant_key, wrapped, aad)
            except WrongKeyError:
                # Under a wiped key nothing opens; that must not be reported as a wrong key.
                self._check_open()
                if self._tenant_key is tenant_key:
                    raise

    def seal_text(self, label: str, text: str) -> bytes:
        """Encrypt a name or label of this tenant for the catalog column ``label``.

        :raises ValueError: longer than `kvvault.crypto.aead.MAX_TEXT_BYTES`.
        :raises ClosedError: after `close`.
        """
        aad = text_aad(self.vault_id, self.tenant_id, label)
        while True:
            tenant_key = self._tenant_key
            sealed = aead.seal_text(tenant_key, text, aad)
            self._check_open()
            if self._tenant_key is tenant_key:
                return sealed

    def open_text(self, label: str, sealed: bytes) -> str:
        """Open what `seal_text` made for the same ``label``.

        :raises WrongKeyError: it does not open.
        :raises ClosedError: after `close`.
        """
        aad = text_aad(self.vault_id, self.tenant_id, label)
        while True:
            self._check_open()
            tenant_key = self._tenant_key
            try:
                return aead.open_text(tenant_key, sealed, aad)
            except WrongKeyError:
                self._check_open()
                if self._tenant_key is tenant_key:
                    raise

    def take_over(self, newer: TenantKeys) -> None:
        """Go on with the tenant key of `newer`, which is used up, and overwrite the old one. So
        whoever holds these keys goes on after a purge. Block ids stay what they are.

        :raises WrongKeyError: `newer` has another index key: it is not this tenant's.
        """
        same = hmac.compare_digest(self._index_key, newer._index_key)
        with self._lock:
            if same and not self._closed and newer.key_no > self.key_no:
                old, self._tenant_key = self._tenant_key, newer._tenant_key
                self.key_no = newer.key_no
                aead.wipe(old)
                aead.wipe(newer._index_key)
                return
            altered = not same and not self._closed
        newer.close()
        if altered:
            raise WrongKeyError(
                "a tenant's index key is not what it was",
                hint="the catalog was altered; restore it or move catalog.sqlite3* away",
            )

    def close(self) -> None:
        """Overwrite the keys. Idempotent. Segment ciphers made before keep working."""
        with self._lock:
            self._closed = True
            self._hashers.clear()
            aead.wipe(self._tenant_key)
            aead.wipe(self._index_key)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "this tenant's keys were dropped",
                hint="The tenant was forgotten or the vault was closed; open it again.",
            )


def new_lookup(
    provider: KeyProvider, epoch: str, vault_id: bytes, *, timeout: float = DEFAULT_TIMEOUT_S
) -> tuple[WrappedLookup, LookupKey]:
    """Make a vault's lookup key. Errors are those of `KeyProvider.wrap`."""
    key = aead.random_key()
    try:
        wrapped = provider.wrap(epoch, key, lookup_key_aad(vault_id), timeout=timeout)
        return WrappedLookup(epoch, wrapped), LookupKey(key)
    finally:
        aead.wipe(key)


def open_lookup(
    provider: KeyProvider,
    wrapped: WrappedLookup,
    vault_id: bytes,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> LookupKey:
    """Open a vault's lookup key. Errors are those of `KeyProvider.unwrap`."""
    key = provider.unwrap(wrapped.epoch, wrapped.key, lookup_key_aad(vault_id), timeout=timeout)
    try:
        return LookupKey(key)
    finally:
        aead.wipe(key)


def new_signing(
    provider: KeyProvider, epoch: str, vault_id: bytes, *, timeout: float = DEFAULT_TIMEOUT_S
) -> tuple[bytes, Signer]:
    """Make a vault's signing key; commit the wrapped one before it signs anything. Errors are those
    of `KeyProvider.wrap`."""
    seed = aead.random_key()
    try:
        return provider.wrap(epoch, seed, signing_key_aad(vault_id), timeout=timeout), Signer(seed)
    finally:
        aead.wipe(seed)


def open_signing(
    provider: KeyProvider,
    epoch: str,
    wrapped: bytes,
    vault_id: bytes,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Signer:
    """Open a vault's signing key. Errors are those of `KeyProvider.unwrap`."""
    seed = provider.unwrap(epoch, wrapped, signing_key_aad(vault_id), timeout=timeout)
    try:
        return Signer(seed)
    finally:
        aead.wipe(seed)


def new_tenant(
    provider: KeyProvider,
    epoch: str,
    vault_id: bytes,
    tenant_id: bytes,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> tuple[WrappedTenant, TenantKeys]:
    """Make a tenant's keys; commit the wrapped ones before the others are used.

    Errors are those of `KeyProvider.wrap`.
    """
    tenant = TenantKeys(vault_id, tenant_id, aead.random_key(), aead.random_key())
    try:
        # The provider gets the key itself, so this module alone sees both it and its wrap.
        tenant_key = provider.wrap(
            epoch, tenant._tenant_key, tenant_key_aad(vault_id, tenant_id), timeout=timeout
        )
        index_key = tenant.wrap(tenant._index_key, index_key_aad(vault_id, tenant_id))
    except BaseException:
        tenant.close()
        raise
    return WrappedTenant(epoch, tenant_key, index_key), tenant


def open_tenant(
    provider: KeyProvider,
    wrapped: WrappedTenant,
    vault_id: bytes,
    tenant_id: bytes,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> TenantKeys:
    """Open a tenant's keys. Errors are those of `KeyProvider.unwrap`.

    :raises WrongKeyError: also when the index key was altered or belongs to another tenant.
    """
    tenant_key = provider.unwrap(
        wrapped.epoch, wrapped.tenant_key, tenant_key_aad(vault_id, tenant_id), timeout=timeout
    )
    try:
        index_key = aead.unwrap_key(
            tenant_key, wrapped.index_key, index_key_aad(vault_id, tenant_id)
        )
    except WrongKeyError:
        aead.wipe(tenant_key)
        raise
    return TenantKeys(vault_id, tenant_id, tenant_key, index_key, wrapped.key_no)


def renew_tenant(
    provider: KeyProvider, epoch: str, old: TenantKeys, *, timeout: float = DEFAULT_TIMEOUT_S
) -> tuple[WrappedTenant, TenantKeys]:
    """Make the next keys of a tenant: another tenant key, the same index key, `key_no` one higher.

    Errors are those of `KeyProvider.wrap`.
    """
    new = TenantKeys(
        old.vault_id, old.tenant_id, aead.random_key(), bytearray(old._index_key), old.key_no + 1
    )
    try:
        tenant_key = provider.wrap(
            epoch, new._tenant_key, tenant_key_aad(new.vault_id, new.tenant_id), timeout=timeout
        )
        index_key = new.wrap(new._index_key, index_key_aad(new.vault_id, new.tenant_id))
    except BaseException:
        new.close()
        raise
    return WrappedTenant(epoch, tenant_key, index_key, new.key_no), new


def new_segment(
    tenant: TenantKeys, segment_id: bytes, namespace_digest: bytes
) -> tuple[WrappedSegment, SegmentCipher]:
    """Make a segment's key. The cipher may encrypt, in this process only.

    The wrapped key is durable in the catalog before the first byte is written (REQ-C5).

    :raises ClosedError: the tenant's keys were dropped.
    """
    secret = aead.random_key()
    try:
        cipher = SegmentCipher(secret, segment_id, may_seal=True)
        aad = segment_key_aad(tenant.vault_id, tenant.tenant_id, segment_id, namespace_digest)
        return WrappedSegment(tenant.wrap(secret, aad), cipher.commitment), cipher
    finally:
        aead.wipe(secret)


def open_segment(
    tenant: TenantKeys, wrapped: WrappedSegment, segment_id: bytes, namespace_digest: bytes
) -> SegmentCipher:
    """Open a segment's key for reading; its commitment is checked first (REQ-C4).

    :raises WrongKeyError: the wrap belongs elsewhere or was altered, or the commitment differs.
    :raises ClosedError: the tenant's keys were dropped.
    """
    aad = segment_key_aad(tenant.vault_id, tenant.tenant_id, segment_id, namespace_digest)
    secret = tenant.unwrap(wrapped.key, aad)
    try:
        cipher = SegmentCipher(secret, segment_id)
    finally:
        aead.wipe(secret)
    if not cipher.check_commitment(wrapped.commitment):
        cipher.close()
        raise WrongKeyError(
            "a segment's key does not match its commitment",
            hint="The catalog row was altered; the segment cannot be trusted and is not read.",
        )
    return cipher


def _id(value: bytes) -> bytes:
    if len(value) != aead.ID_BYTES:
        raise ValueError(f"an id has {aead.ID_BYTES} bytes")
    return value


def _aad(kind: bytes, *parts: bytes) -> bytes:
    version = KEY_FORMAT_VERSION.to_bytes(2, "big")
    return aead.encode_parts(b"kvvault", version, kind, *parts)
