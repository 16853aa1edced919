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
from kvvault.catalog.operations import TenantRow
from kvvault.errors import CatalogCorruptError, KvvaultError, UsageError
from kvvault.keyring import KeyRing, another_tenants_row
from kvvault.model import SegmentFacts

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
    kind: HoldKind
    target: bytes
    """Id of the tenant, segment or prompt; a subject's keyed id."""
    tenant_id: bytes | None
    """Whose data it is; None when that tenant is gone."""
    tenant: str | None = field(repr=False)
    """Name of that tenant; None when its keys cannot be had, or it is gone."""
    reason: str = field(repr=False)
    actor: str = field(repr=False)
    placed_at: float
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


class Holder:
    """Places, clears and lists holds. Any thread; may wait for catalog and key provider."""

    def __init__(self, catalog: Catalog, ring: KeyRing) -> None:
        self._catalog = catalog
        self._ring = ring

    def place_on_tenant(self, name: str, *, reason: str, actor: str, now: float) -> Hold:
        """Keep all that a tenant has, and what it stores from now on.

        Raises:
            UsageError: the vault has no such tenant; reason or actor is empty or unprintable.
            WrongKeyError: the catalog was altered: it leads from this name to another tenant.
            StorageError, CatalogError.
        """
        row = find_tenant(self._catalog, self._ring, name)
        if row is None:
            raise _unknown_tenant()
        return self._place(HoldKind.TENANT, row.tenant_id, reason, actor, now)

    def place_on_segment(self, segment_id: bytes, *, reason: str, actor: str, now: float) -> Hold:
        """Keep one live segment.

        Raises:
            UsageError: the vault has no such segment, or no more; or as `place_on_tenant`.
            StorageError, CatalogError.
        """
        return self._place(HoldKind.SEGMENT, segment_id, reason, actor, now)

    def place_on_subject(
        self, tenant: str, subject: str, *, reason: str, actor: str, now: float
    ) -> Hold:
        """Keep all prompts of a subject, now and from now on. There need not be any yet.

        Raises: as `place_on_tenant`; KeyUnavailableError: the tenant's key cannot be had;
            UsageError: the subject is no text.
        """
        row = find_tenant(self._catalog, self._ring, tenant)
        if row is None:
            raise _unknown_tenant()
        keys = self._ring.tenant(row)
        text_id = keys.keyed_id("subject", encoded("subject", subject))
        known_as = keys.keyed_id("log", b"subject" + text_id).hex()
        return self._place(
            HoldKind.SUBJECT, text_id, reason, actor, now, known_as, tenant_id=row.tenant_id
        )

    def place_on_prompt(self, prompt_id: bytes, *, reason: str, actor: str, now: float) -> Hold:
        """Keep one prompt.

        Raises:
            UsageError: it is not in the inventory; or as `place_on_tenant`.
            StorageError, CatalogError.
        """
        tenant_id = self._catalog.read(
            partial(protecting.tenant_of, kind=holds.PROMPT, target=prompt_id)
        )
        keys = None if tenant_id is None else self._ring.known(tenant_id)
        known_as = None if keys is None else keys.keyed_id("log", b"prompt" + prompt_id).hex()
        return self._place(HoldKind.PROMPT, prompt_id, reason, actor, now, known_as)

    def _place(
        self,
        kind: HoldKind,
        target: bytes,
        reason: str,
        actor: str,
        now: float,
        known_as: str | None = None,
        *,
        tenant_id: bytes | None = None,
    ) -> Hold:
        check_text("reason", reason)
        check_text("actor", actor)
        keys = self._ring.known(target) if kind is HoldKind.TENANT else None
        if kind is HoldKind.SEGMENT:
            known_as = target.hex()
        if keys is not None:
            known_as = keys.keyed_id("log", b"tenant").hex()
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
            raise _unknown_tenant()
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
        try:
            kind = HoldKind(row.kind)
        except ValueError:
            raise CatalogCorruptError(
                "a hold in the catalog is on something that this release does not know",
                hint="use the release that placed it",
            ) from None
        if kind is HoldKind.TENANT:
            kept = [facts for facts in live if facts.tenant_id == row.target]
            tenant_id: bytes | None = row.target or None
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
            blocks=sum(facts.blocks for facts in kept),
            data_bytes=sum(facts.data_bytes for facts in kept),
        )

    def _name(self, tenant_id: bytes) -> str | None:
        row = self._catalog.read(lambda c: operations.get_tenant(c, tenant_id))
        try:
            return None if row is None else self._ring.name(row)
        except KvvaultError:
            return None


def find_tenant(catalog: Catalog, ring: KeyRing, name: str) -> TenantRow | None:
    """The row of the tenant of that name; None when there is none. Keys that cannot be had are no
    reason not to find it.

    Raises:
        WrongKeyError: the catalog was altered: it leads from this name to another tenant.
        StorageError, CatalogError.
    """
    if not name.isprintable():
        return None  # none can have such a name
    name_id = ring.name_id(name)
    row = catalog.read(lambda c: operations.find_tenant(c, name_id))
    if row is None:
        return None
    try:
        found = ring.name(row)
    except KvvaultError:
        return row
    if found != name:
        raise another_tenants_row()
    return row


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


def encoded(what: str, text: str) -> bytes:
    """A name as it is looked up.

    Raises:
        UsageError: it has bytes that are no text (a command line may), so nothing is called so.
            Does not repeat it.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"that {what} is no text in UTF-8", hint="write it as it was given to the engine"
        ) from None


def _check_number(number: int) -> None:
    """
    Raises:
        UsageError: no hold can have such a number.
    """
    if not 0 < number <= _MOST:
        raise _no_such_hold()


def _no_such_hold() -> UsageError:
    return UsageError("there is no hold of that number", hint="see `kvvault hold ls --all`")


def _unknown_tenant() -> UsageError:
    return UsageError("the vault has no such tenant", hint="see `kvvault ls tenants`")


def _cleared_before(number: int) -> UsageError:
    return UsageError(
        f"hold {number} was cleared before", hint="see `kvvault hold ls --all` for when and by whom"
    )
