"""Where blocks are put and looked for, and whether what callers hand in for it can be used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvvault.crypto.aead import MAX_TEXT_BYTES
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import UsageError
from kvvault.governing import Governed, Governor
from kvvault.model import Buffer, Namespace
from kvvault.policy.decide import Verdict
from kvvault.writing import Destination

_MAX_NAME = 256
_MAX_LABELS = 2048


class Scope:
    """Whose blocks, of which namespace, and by what the policy decides: where blocks are put and
    looked for. Made by `Vault.scope`. What is found depends on tenant and namespace alone."""

    __slots__ = ("_governed", "_keys", "labels", "namespace", "retention_class", "tenant")

    def __init__(
        self,
        tenant: str,
        keys: TenantKeys,
        namespace: Namespace,
        labels: Mapping[str, str],
        retention_class: str | None,
    ) -> None:
        self.tenant = tenant
        self.namespace = namespace
        self.labels = dict(labels)
        self.retention_class = retention_class
        self._keys = keys
        self._governed: Governed | None = None

    def __repr__(self) -> str:
        return "<Scope>"

    @property
    def tenant_id(self) -> bytes:
        return self._keys.tenant_id

    @property
    def lives(self) -> bool:
        """False once the tenant was forgotten, as far as this process knows, or the vault closed.
        Memory only."""
        return not self._keys.closed

    def block_id(self, key: bytes) -> bytes:
        """The id under which the engine's block `key` is kept: 16 bytes. No I/O.

        Raises:
            ClosedError: the tenant was forgotten or the vault closed.
        """
        return self._keys.block_id(self.namespace.digest, key)

    def asking(self, retention_class: str | None, labels: Mapping[str, str] | None = None) -> Scope:
        """The same place, for a request that asks for a retention class and bears labels (the
        scope's own win over them; such as `Vault.scope` takes). No I/O."""
        both = {**(labels or {}), **self.labels}
        return Scope(self.tenant, self._keys, self.namespace, both, retention_class)

    @property
    def keys(self) -> TenantKeys:
        """The tenant's keys; for the core."""
        return self._keys

    def verdict(self, governor: Governor) -> Verdict:
        """What the policy in force says of its blocks. Errors as `destination`."""
        return self._govern(governor).verdict

    def destination(self, governor: Governor) -> Destination:
        """Where its blocks go under the policy in force. Asks the policy again when it changed.

        Raises:
            CatalogError, StorageError: the policy cannot be read.
        """
        return Destination(self._keys, self.namespace, self._govern(governor))

    def _govern(self, governor: Governor) -> Governed:
        governed = self._governed
        if governed is None or governed.policy_no < governor.newest:
            governed = governor.govern(
                self.tenant, self.namespace, self.labels, self.retention_class
            )
            self._governed = governed
        return governed


def check_name(name: str, what: str) -> None:
    """Of tenants and subjects.

    Raises:
        UsageError: it is empty, too long, or has control characters. Does not repeat it.
    """
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise UsageError(
            f"that is not a usable {what}", hint=f"use 1 to {_MAX_NAME} printable characters"
        )


def check_labels(labels: Mapping[str, str]) -> None:
    """
    Raises:
        UsageError: they are too many, or have control characters. Does not repeat them.
    """
    texts = [text for pair in labels.items() for text in pair]
    long = sum(map(len, texts)) > _MAX_LABELS or len(json.dumps(dict(labels))) > MAX_TEXT_BYTES
    if long or not all(text.isprintable() for text in texts):
        raise UsageError(
            "those are not usable labels",
            hint=f"use printable text, {_MAX_LABELS} characters in all",
        )


def block_views(
    scope: Scope, keys: Sequence[bytes], buffers: Sequence[Buffer], *, writable: bool
) -> list[memoryview]:
    """Byte views of the caller's buffers, zero-copy.

    Raises:
        ValueError: a buffer is not what a block of that scope needs, or there are not as many as
            keys.
    """
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ValueError("a block's buffer must be C-contiguous")
        if view.nbytes != scope.namespace.block_bytes:
            raise ValueError(
                f"a block has {scope.namespace.block_bytes} bytes, a buffer has {view.nbytes}"
            )
        if writable and view.readonly:
            raise ValueError("a block cannot be loaded into a read-only buffer")
        views.append(view.cast("B"))
    return views
