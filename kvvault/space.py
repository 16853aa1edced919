"""Space for stores: asks the catalog to set it aside, and has room made where there is none.

Threads that store call `Space.claim` before they write; it costs a transaction for every 16 MiB.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvvault.catalog import space as rows
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.database import log_bytes
from kvvault.catalog.space import NoSpaceError, SpaceLimits, Surroundings, Usage
from kvvault.errors import StorageError
from kvvault.governing import Governor
from kvvault.layout import catalog_path
from kvvault.policy.document import VaultLimits

log = logging.getLogger(__name__)

_VAULT = (None, None)
"""Of which limit it was said that it is reached: the vault's own."""

_STEP_BYTES = 16 << 20
"""What is granted at once. Cuts the transactions down to nothing that shows, and is small beside
any cap that makes sense."""

MakeRoom = Callable[[NoSpaceError], bool]
"""Evict something; whether trying again makes sense. May take as long as a deletion does."""


class Space:
    """Any thread. `make_room` is set once, before the first claim."""

    def __init__(self, path: Path, catalog: Catalog, governor: Governor) -> None:
        self._path = path
        self._catalog = catalog
        self._governor = governor
        self.make_room: MakeRoom = lambda _exc: False
        self._said: set[tuple[str | None, bytes | None] | None] = set()

    def claim(
        self,
        segment_id: bytes,
        granted: int,
        capacity: int,
        block_bytes: int,
        max_bytes: int | None,
        *,
        least: int = 1,
        ahead: bool = True,
        whose: tuple[str, bytes] | None = None,
    ) -> int:
        """Have more slots of a segment granted; how many it has then. At least `least` more.

        `ahead`: some MiB more, as long as there is room. `whose`: of which rule and tenant.

        Raises:
            NoSpaceError: the policy's limits forbid it, and no room could be made.
            StorageError, CatalogError: the catalog or the file system cannot be asked.
        """
        fewest = min(capacity, granted + least)
        step = _STEP_BYTES // block_bytes if ahead else 0
        most = min(capacity, granted + max(least, step))
        try:
            try:
                slots = self._as_many(segment_id, fewest, most, block_bytes, max_bytes)
            except NoSpaceError as exc:
                if not self.make_room(exc):
                    raise
                slots = self._as_many(segment_id, fewest, most, block_bytes, max_bytes)
        except NoSpaceError as exc:
            self._say(exc)
            raise
        self._said -= {_VAULT, whose}
        return slots

    def _as_many(
        self, segment_id: bytes, fewest: int, most: int, block_bytes: int, max_bytes: int | None
    ) -> int:
        """Grant up to `most` slots: nothing has to go for what is only convenient.

        Raises:
            NoSpaceError: not even the fewest; it says how much is missing for these.
        """
        slots = most
        while True:
            try:
                self._grant(segment_id, slots, max_bytes)
            except NoSpaceError as exc:
                if slots <= fewest:
                    raise
                slots = max(fewest, slots - -(-exc.short // block_bytes))
            else:
                return slots

    def _say(self, exc: NoSpaceError) -> None:
        """Once: it comes with every store until something goes."""
        whose = (exc.rule, exc.tenant_id)
        if whose not in self._said:
            self._said.add(whose)
            log.warning("blocks are not stored: %s", exc)

    def _grant(self, segment_id: bytes, slots: int, max_bytes: int | None) -> None:
        limits = self.limits(self.around())
        # The file system is asked inside the transaction: what others have written since would
        # neither be missing from what is free nor count as still to be written.
        self._catalog.write(
            lambda c: rows.grant(c, segment_id, slots, limits, self.around(), max_bytes),
            durable=False,
        )

    def around(self) -> Surroundings:
        """What the file system says.

        Raises:
            StorageError: it does not.
        """
        return surroundings(self._path)

    def limits(self, around: Surroundings) -> SpaceLimits:
        """The policy's limits, in bytes."""
        _, policy = self._governor.current()
        return limits_of(policy.vault, around)

    def usage(self) -> Usage:
        """What is used now, grants included."""
        return self._catalog.read(rows.usage)


def surroundings(vault: Path) -> Surroundings:
    """What the file system says of a vault's directory.

    Raises:
        StorageError: it cannot be asked.
    """
    try:
        file_system = os.statvfs(vault)
    except OSError as exc:
        raise StorageError(
            f"the file system does not say how much space it has: {os.strerror(exc.errno or 0)}",
            hint="check the disk under the vault",
            errno=exc.errno,
        ) from exc
    path = catalog_path(vault)
    catalog = 0
    for suffix in ("", "-shm", "-journal"):
        try:
            catalog += path.with_name(path.name + suffix).stat().st_size
        except OSError:
            continue
    return Surroundings(
        catalog,
        file_system.f_bavail * file_system.f_frsize,
        file_system.f_blocks * file_system.f_frsize,
        log_bytes(path),
    )


def limits_of(vault: VaultLimits, around: Surroundings) -> SpaceLimits:
    """A policy's limits in bytes."""
    return SpaceLimits(vault.cap(around.total_bytes), vault.free_floor_bytes)
