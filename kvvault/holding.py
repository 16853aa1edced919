"""Holds: what stops expiry, eviction and erasure of a tenant's data, a subject's, a prompt's, or of
one segment.

A hold only keeps: what is past its deadline is not served, held or not. It takes effect with the
transaction that places it, and every deletion asks in the transaction that takes the keys away, so
nobody has to be told of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from kvvault import inventory
from kvvault.catalog import holds, operations, protecting
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.holds import HoldRow
from kvvault.catalog.rows import TenantRow
from kvvault.errors import KvvaultError, UsageError
from kvvault.keyring import KeyRing
from kvvault.model import SegmentFacts
from kvvault.naming import subject_key
from kvvault.scope import check_name
from kvvault.tenants import find_tenant, unknown_tenant

log = logging.getLogger(__name__)

_MAX_TEXT = 500

_MOST = (1 << 63) - 1
"""The largest number SQLite keeps as such."""


class HoldKind(StrEnum):
    """What a hold is on."""

    TENANT = holds.TENANT
    """All that a tenant has and will have; the tenant cannot be forgotten either."""
    SEGMENT = holds.SEGMENT
    SUBJECT = holds.SUBJECT
    """All prompts that a subject has and will have, and every segment with blocks of them."""
    PROMPT = holds.PROMPT


@dataclass(frozen=True, slots=True)
class Hold:
    """One hold, and what it keeps now. Times are seconds since the epoch, by the vault's time."""

    number: int
    kind: HoldKind | None
    """None: its row in the catalog is damaged. It keeps all of its tenant, or all there is."""
    target: bytes
    """Id of the tenant, segment or prompt; a subject's keyed id; empty when that is not known."""
    tenant_id: bytes | None
    """Whose data it is; None when that tenant is gone, or not known."""
    tenant: str | None = field(repr=False)
    """Name of that tenant; None when its keys cannot be had, or it is gone."""
    reason: str = field(repr=False)
    actor: str = field(repr=False)
    placed_at: float | None
    cleared_at: float | None
    cleared_by: str | None = field(repr=False)
    cleared_reason: str | None = field(repr=False)
    segment_ids: frozenset[bytes] = field(repr=False)
    """Live segments that it keeps, or would keep were it in force still."""
    blocks: int
    data_bytes: int

    @property
    def segments(self) -> int:
        """How many these are."""
        return len(self.segment_ids)

    @property
    def in_force(self) -> bool:
        return self.cleared_at is None

    @property
    def on(self) -> str:
        """What people are told that it is on."""
        return "damaged" if self.kind is None else self.kind.value

    def spares(self, tenant_id: bytes) -> bool:
        """Whether that tenant is not forgotten while it is in force, whatever there is of it."""
        if self.kind is None:
            return self.tenant_id in (None, tenant_id)
        return self.kind is not HoldKind.SEGMENT and self.tenant_id == tenant_id


class Holder:
    """Places, clears and lists holds. Any thread; may wait for catalog and key provider."""

    def __init__(self, catalog: Catalog, ring: KeyRing) -> None:
        self._catalog = catalog
        self._ring = ring

    def place(
        self,
        *,
        tenant: str | None,
        subject: str | None,
        prompt_id: bytes | None,
        segment_id: bytes | None,
        reason: str,
        actor: str,
        now: float,
    ) -> Hold:
        """Keep all that a tenant has and what it stores from now on; the same of a subject of it,
        of which there need not be anything yet; one prompt; or one live segment.

        Raises:
            ValueError: not exactly one of `tenant`, `tenant` with `subject`, `prompt_id` and
                `segment_id`.
            UsageError: the vault has no such thing, or no more; reason or actor is empty or
                unprintable.
            WrongKeyError: the catalog was altered: it leads from this name to another tenant.
            KeyUnavailableError: the key of a subject's tenant cannot be had.
            StorageError, CatalogError.
        """
        known_as = whose = None
        match (tenant, subject, prompt_id, segment_id):
            case (str(), None, None, None):
                kind, target = HoldKind.TENANT, self._tenant(tenant).tenant_id
                keys = self._ring.known(target)
                if keys is not None:
                    known_as = keys.log_id("tenant")
            case (str(), str(), None, None):
                row = self._tenant(tenant)
                kind, keys, whose = HoldKind.SUBJECT, self._ring.tenant(row), row.tenant_id
                target = subject_key(keys, subject)
                check_name(subject, "subject")
                known_as = keys.log_id("subject", target)
            case (None, None, bytes(), None):
                kind, target = HoldKind.PROMPT, prompt_id
                tenant_id = self._catalog.read(
                    partial(protecting.owner_of_prompt, prompt_id=prompt_id)
                )
                known_as = self._log_id_of_prompt(tenant_id, prompt_id)
            case (None, None, None, bytes()):
                kind, target, known_as = HoldKind.SEGMENT, segment_id, segment_id.hex()
            case _:
                raise ValueError("a hold is on a tenant, a subject, a prompt or a segment")
        return self._place(kind, target, reason, actor, now, known_as, tenant_id=whose)

    def _log_id_of_prompt(self, tenant_id: bytes | None, prompt_id: bytes) -> str | None:
        """None when its tenant's keys cannot be had."""
        row = self._catalog.read(lambda c: operations.get_tenant(c, tenant_id or b""))
        try:
            return None if row is None else self._ring.tenant(row).log_id("prompt", prompt_id)
        except KvvaultError:
            return None

    def _tenant(self, name: str) -> TenantRow:
        row = find_tenant(self._catalog, self._ring, name)
        if row is None:
            raise unknown_tenant()
        return row

    def _place(
        self,
        kind: HoldKind,
        target: bytes,
        reason: str,
        actor: str,
        now: float,
        known_as: str | None,
        *,
        tenant_id: bytes | None = None,
    ) -> Hold:
        check_text("reason", reason)
        check_text("actor", actor)
        row = self._catalog.write(
            partial(
                holds.place,
                kind=kind.value,
                target=target,
                tenant_id=tenant_id,
                reason=reason,
                actor=actor,
                now=now,
                known_as=known_as,
            )
        )
        if row is None and kind in (HoldKind.TENANT, HoldKind.SUBJECT):
            raise unknown_tenant()
        if row is None and kind is HoldKind.PROMPT:
            raise UsageError("no prompt of that id persists", hint="see `kvvault prompts ls`")
        if row is None:
            raise UsageError(
                "the vault has no such segment, or no more", hint="see `kvvault ls segments`"
            )
        log.info("hold %d is placed on a %s", row.hold_no, kind.value)
        return self._complete([row])[0]

    def clear(self, number: int, *, reason: str, actor: str, now: float) -> Hold:
        """End a hold. Others on the same data stay in force.

        Raises:
            UsageError: there is no hold of that number, or it was cleared before; reason or actor
                is empty or unprintable.
            StorageError, CatalogError.
        """
        check_text("reason", reason)
        check_text("actor", actor)
        _check_number(number)
        row = self._catalog.write(
            lambda c: holds.clear(c, number, reason=reason, actor=actor, now=now)
        )
        if row is None:
            self.get(number)
            raise _cleared_before(number)
        log.info("hold %d is cleared", number)
        return self._complete([row])[0]

    def get(self, number: int) -> Hold:
        """A hold, in force or not.

        Raises:
            UsageError: there is none of that number.
            StorageError, CatalogError.
        """
        _check_number(number)
        row = self._catalog.read(lambda c: holds.get_hold(c, number))
        if row is None:
            raise _no_such_hold()
        return self._complete([row])[0]

    def list_holds(self, *, cleared: bool = False) -> list[Hold]:
        """Holds in force, oldest first; with `cleared`, those that were as well.

        Raises:
            StorageError, CatalogError.
        """
        return self._complete(self._catalog.read(lambda c: holds.list_holds(c, cleared=cleared)))

    def _complete(self, rows: Sequence[HoldRow]) -> list[Hold]:
        """With what they keep and whose it is. Asks the key provider for the names, once each."""
        live = inventory.live_segments(self._catalog) if rows else []
        names: dict[bytes, str | None] = {}
        return [self._one(row, live, names) for row in rows]

    def _one(
        self, row: HoldRow, live: Sequence[SegmentFacts], names: dict[bytes, str | None]
    ) -> Hold:
        kind = None if row.damaged else HoldKind(row.kind)
        if kind is None:
            kept = [facts for facts in live if row.tenant_id in (None, facts.tenant_id)]
            tenant_id = row.tenant_id
        elif kind is HoldKind.TENANT:
            kept = [facts for facts in live if facts.tenant_id == row.target]
            tenant_id = row.target or None
        elif kind in (HoldKind.SUBJECT, HoldKind.PROMPT):
            ask = partial(protecting.kept_by, kind=row.kind, target=row.target)
            ids = set(self._catalog.read(ask))
            kept = [facts for facts in live if facts.segment_id in ids]
            tenant_id = row.tenant_id
        else:
            kept = [facts for facts in live if facts.segment_id == row.target]
            tenant_id = kept[0].tenant_id if kept else row.tenant_id
        if tenant_id is not None and tenant_id not in names:
            names[tenant_id] = self._name(tenant_id)
        return Hold(
            number=row.hold_no,
            kind=kind,
            target=row.target,
            tenant_id=tenant_id,
            tenant=None if tenant_id is None else names[tenant_id],
            reason=row.reason,
            actor=row.actor,
            placed_at=row.placed_at,
            cleared_at=row.cleared_at,
            cleared_by=row.cleared_by,
            cleared_reason=row.cleared_reason,
            segment_ids=frozenset(facts.segment_id for facts in kept),
            blocks=sum(facts.live_blocks for facts in kept),
            data_bytes=sum(facts.live_bytes for facts in kept),
        )

    def _name(self, tenant_id: bytes) -> str | None:
        row = self._catalog.read(lambda c: operations.get_tenant(c, tenant_id))
        try:
            return None if row is None else self._ring.name(row)
        except KvvaultError:
            return None


def check_text(what: str, text: str) -> None:
    """Reasons and actors are kept for good and shown on terminals.

    Raises:
        UsageError: it is empty, too long, or has control characters. Does not repeat it.
    """
    if not text.strip() or len(text) > _MAX_TEXT or not text.isprintable():
        raise UsageError(
            f"that is not a usable {what}",
            hint=f"write 1 to {_MAX_TEXT} printable characters, on one line",
        )


def _check_number(number: int) -> None:
    """
    Raises:
        UsageError: no hold can have such a number.
    """
    if not 0 < number <= _MOST:
        raise _no_such_hold()


def _no_such_hold() -> UsageError:
    return UsageError("there is no hold of that number", hint="see `kvvault hold ls --all`")


def _cleared_before(number: int) -> UsageError:
    return UsageError(
        f"hold {number} was cleared before", hint="see `kvvault hold ls --all` for when and by whom"
    )
