"""What a vault holds, read once, and its columns for listing and showing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from kvvault.cli.columns import Column, Kind
from kvvault.cli.formats import short_ids
from kvvault.errors import UsageError
from kvvault.model import NamespaceFacts, SegmentFacts, SystemClock, TenantFacts

if TYPE_CHECKING:
    from kvvault.vault import Vault

__all__ = ["Found", "Inventory", "Thing"]

_T = TypeVar("_T")
_CANDIDATES = 5


class Thing(StrEnum):
    """What can be listed and shown."""

    SEGMENTS = "segments"
    TENANTS = "tenants"
    NAMESPACES = "namespaces"

    @property
    def one(self) -> str:
        return self.value.removesuffix("s")


Found = SegmentFacts | TenantFacts | NamespaceFacts


@dataclass(frozen=True)
class Inventory:
    """Everything the catalog says about one vault at one time."""

    segments: Sequence[SegmentFacts]
    tenants: Sequence[TenantFacts]
    namespaces: Sequence[NamespaceFacts]
    now: float

    @classmethod
    def of(cls, vault: Vault) -> Inventory:
        """Read it. Asks the key provider, for the tenants' names.

        :raises CatalogError, StorageError: the catalog cannot be read.
        """
        return cls(vault.segments(), vault.tenants(), vault.namespaces(), SystemClock().now())

    @cached_property
    def names(self) -> dict[bytes, str | None]:
        """Tenants' names by id; None where the key cannot be had."""
        return {tenant.tenant_id: tenant.name for tenant in self.tenants}

    @cached_property
    def short(self) -> dict[bytes, str]:
        """Unique prefixes of all ids in the vault, of whatever kind."""
        return short_ids(
            [facts.segment_id for facts in self.segments]
            + [facts.tenant_id for facts in self.tenants]
            + [facts.namespace.digest for facts in self.namespaces]
        )

    # -- columns ----------------------------------------------------------------------------------

    @cached_property
    def segment_columns(self) -> list[Column[SegmentFacts]]:
        names = self.names
        return [
            Column("id", Kind.ID, lambda s: s.segment_id),
            Column("tenant_id", Kind.ID, lambda s: s.tenant_id, in_table=False),
            Column(
                "tenant",
                Kind.TEXT,
                lambda s: None if s.tenant_id is None else names.get(s.tenant_id),
            ),
            Column("namespace", Kind.ID, lambda s: s.namespace_digest),
            Column("state", Kind.TEXT, lambda s: s.state.value),
            Column("blocks", Kind.COUNT, lambda s: s.blocks),
            Column("block_bytes", Kind.SIZE, lambda s: s.block_bytes),
            Column("bytes", Kind.SIZE, lambda s: s.data_bytes),
            Column("created_at", Kind.TIME, lambda s: s.created_at),
            self._age(lambda s: s.created_at),
        ]

    @cached_property
    def tenant_columns(self) -> list[Column[TenantFacts]]:
        return [
            Column("id", Kind.ID, lambda t: t.tenant_id),
            Column("name", Kind.TEXT, lambda t: t.name),
            Column("segments", Kind.COUNT, lambda t: t.segments),
            Column("blocks", Kind.COUNT, lambda t: t.blocks),
            Column("bytes", Kind.SIZE, lambda t: t.data_bytes),
            Column("created_at", Kind.TIME, lambda t: t.created_at),
            self._age(lambda t: t.created_at),
        ]

    @cached_property
    def namespace_columns(self) -> list[Column[NamespaceFacts]]:
        return [
            Column("id", Kind.ID, lambda n: n.namespace.digest),
            Column("model", Kind.TEXT, lambda n: n.namespace.fact("model")),
            Column("block_bytes", Kind.SIZE, lambda n: n.namespace.block_bytes),
            Column("segments", Kind.COUNT, lambda n: n.segments),
            Column("blocks", Kind.COUNT, lambda n: n.blocks),
            Column("bytes", Kind.SIZE, lambda n: n.data_bytes),
            Column("created_at", Kind.TIME, lambda n: n.created_at),
            self._age(lambda n: n.created_at),
        ]

    def _age(self, created_at: Callable[[_T], float]) -> Column[_T]:
        return Column(
            "age",
            Kind.DURATION,
            lambda row: self.now - created_at(row),
            in_json=False,
            in_table=False,
        )

    # -- finding ----------------------------------------------------------------------------------

    def find(self, prefix: str) -> tuple[Thing, Found]:
        """The one thing whose id begins with `prefix`; an id in full wins over longer ones.

        :raises UsageError: not hex digits, nothing, or several. Does not repeat what is no id: it
            could be a name.
        """
        prefix = prefix.lower()
        if not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
            raise UsageError(
                "that is not the beginning of an id",
                hint="ids are hex digits; list them: kvvault ls segments|tenants|namespaces",
            )
        found = [item for item in self._all() if item[0].hex().startswith(prefix)]
        exact = [item for item in found if item[0].hex() == prefix]
        if len(exact) == 1:
            found = exact
        if not found:
            raise UsageError(
                f"nothing in the vault has an id that begins with {prefix}",
                hint="list them: kvvault ls segments|tenants|namespaces",
            )
        if len(found) > 1:
            shown = [f"{thing.one} {self.short[value]}" for value, thing, _ in found[:_CANDIDATES]]
            more = ", …" if len(found) > _CANDIDATES else ""
            raise UsageError(
                f"{len(found)} ids begin with {prefix}: {', '.join(shown)}{more}",
                hint="give more digits",
            )
        _, thing, facts = found[0]
        return thing, facts

    def _all(self) -> list[tuple[bytes, Thing, Found]]:
        return [
            *((facts.segment_id, Thing.SEGMENTS, facts) for facts in self.segments),
            *((facts.tenant_id, Thing.TENANTS, facts) for facts in self.tenants),
            *((facts.namespace.digest, Thing.NAMESPACES, facts) for facts in self.namespaces),
        ]
