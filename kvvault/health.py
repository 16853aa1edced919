"""Whether a vault keeps its promises now: policy, space, deadlines, jobs, clock and holds.

Read only, from the catalog and the file system; any process can say it, also one that only reads.
What is said of space is computed by what grants it (`kvvault.space`, `kvvault.catalog.space`), and
what is said of deadlines by what destroys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from kvvault import layout
from kvvault.catalog import protecting, retention
from kvvault.catalog import space as rows
from kvvault.catalog.protecting import InForce
from kvvault.catalog.space import SpaceLimits, Surroundings, Usage
from kvvault.errors import StorageError
from kvvault.governing import AppliedPolicy
from kvvault.lifecycle.lease import BootClock
from kvvault.lifecycle.runs import JobStatus, job_health
from kvvault.model import Clock
from kvvault.segments.format import DESCRIPTOR_NAME
from kvvault.space import limits_of, surroundings
from kvvault.upkeep import jobs_of
from kvvault.vault import Vault

__all__ = ["Deadlines", "Health", "SpaceHealth", "health_of", "job_statuses"]

LATE_S: Final = 1.0
"""How late a deadline may be noticed before something is wrong."""


@dataclass(frozen=True, slots=True)
class SpaceHealth:
    """What is used and what may be. Bytes."""

    limits: SpaceLimits
    """As stores are held to."""
    usage: Usage
    around: Surroundings

    @property
    def used_bytes(self) -> int:
        """What is used now: segments, with what is set aside in them, and the catalog with its
        log."""
        return self.usage.used + self.around.catalog_bytes + self.around.log_bytes

    @property
    def below_floor(self) -> bool:
        """Less is free than has to stay free, once what is set aside is written."""
        return rows.below_floor(self.usage, self.limits, self.around) > 0

    @property
    def above_cap(self) -> bool:
        """More than the cap counts against it, as stores are held to it: also what the catalog may
        still take."""
        cap = self.limits.cap_bytes
        return cap is not None and rows.counted(self.usage, self.around, cap) > cap


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times are seconds since the epoch, by the vault's own time."""

    now: float
    following: float | None
    """The first that is still to come, of what no hold keeps; None: there is none."""
    overdue: int
    """Segments that live past their deadline although no hold keeps them. Not served; 0 wherever
    the jobs run."""
    late_s: float
    """How long the first of these is past it."""

    @property
    def kept(self) -> bool:
        return self.late_s <= LATE_S


@dataclass(frozen=True, slots=True)
class Health:
    """All of it at one time."""

    policy: AppliedPolicy
    space: SpaceHealth
    deadlines: Deadlines
    jobs: Sequence[JobStatus]
    clock_suspect: bool
    clock_ahead_s: float
    """By how much the machine's clock is ahead of the latest time the vault has noted."""
    holds: InForce

    def jobs_well(self, well: str) -> str:
        """How those are that neither fail nor are overdue. `well`: the word for it."""
        waiting = sum(status.not_yet for status in self.jobs)
        if not waiting:
            return f"all {len(self.jobs)} {well}"
        return f"{len(self.jobs) - waiting} {well}, {waiting} not yet (none is overdue)"

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, one line each; names jobs and counts only."""
        found = []
        if self.clock_suspect:
            found.append(
                f"the clock is {self.clock_ahead_s:.0f} s ahead of the vault's time: nothing is "
                "destroyed by it (kvvault clock show)"
            )
        if not self.deadlines.kept:
            found.append(
                f"{self.deadlines.overdue} segments are past their deadline (not served; destroyed "
                "by the expire job)"
            )
        for status in self.jobs:
            if status.failing:
                found.append(f"job {status.name} {status.outcome}: {status.detail}")
            elif status.overdue:
                found.append(f"job {status.name} is overdue: no process runs it (kvvault daemon)")
        if self.holds.damaged:
            found.append(
                f"damaged holds: {self.holds.damaged}; each keeps all of its tenant, or everything "
                "(kvvault hold ls, kvvault hold clear)"
            )
        return found


def health_of(vault: Vault, clock: Clock) -> Health:
    """Look at an open vault.

    Raises:
        StorageError, CatalogError, VaultKeyError.
    """
    policy = vault.applied_policy()
    suspect, ahead_s = vault.time.suspect, vault.time.ahead_s
    now = vault.time.steady()  # only now: it follows a clock that is plausibly ahead
    around = surroundings(vault.path)

    def look(connection: Connection) -> tuple[Usage, list[float], InForce]:
        free = [one.facts.deadline for one in retention.live(connection) if not one.held]
        return rows.usage(connection), free, protecting.in_force(connection)

    usage, free, holds = vault.catalog.read(look)
    late = [deadline for deadline in free if deadline <= now]
    following = min((deadline for deadline in free if now < deadline < math.inf), default=None)
    return Health(
        policy=policy,
        space=SpaceHealth(limits_of(policy.policy.vault, around), usage, around),
        deadlines=Deadlines(now, following, len(late), max((now - d for d in late), default=0.0)),
        jobs=job_statuses(vault, clock),
        clock_suspect=suspect,
        clock_ahead_s=ahead_s,
        holds=holds,
    )


def job_statuses(vault: Vault, clock: Clock) -> list[JobStatus]:
    """How the vault's jobs are doing.

    Raises:
        StorageError, CatalogError.
    """
    return job_health(
        vault.catalog,
        jobs_of(vault),
        clock.now(),
        since=_made_at(vault.path),
        boot=BootClock(layout.boot_id()),
    )


def _made_at(path: Path) -> float:
    """When the vault was made: its descriptor is never written again."""
    try:
        return (path / DESCRIPTOR_NAME).stat().st_mtime
    except OSError as exc:
        raise StorageError(
            "the vault's descriptor cannot be looked at", hint="check the vault's directory"
        ) from exc
