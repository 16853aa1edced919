"""Who runs a vault's jobs: a lease in the catalog that one process at a time holds.

It runs out by itself, so a holder that is killed needs nobody to clean up after it. Time is
CLOCK_BOOTTIME: it is the same for all processes of a boot, goes on while the machine sleeps, and
nobody can set it, so a change of the wall clock neither ends a lease nor lengthens it. A lease of
another boot has run out.

The lease keeps work from being done twice; it does not make the work safe. A process that is
stopped between asking and acting may act after another has taken over, so whatever a job does to
the vault is still a transaction of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from sqlalchemy import Connection

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.errors import KvvaultError, StorageError
from kvvault.model import Clock

__all__ = ["LEASE_S", "BootClock", "Lease", "LeaseKeeper", "boottime"]

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""How long a lease runs; renewed three times as often."""

_LOOK_S = 1.0
"""How often a process that waits for the lease looks whether it was given up."""


def boottime() -> float:
    """Seconds since the machine was started, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class BootClock:
    """Time that cannot be set, and the boot in which it counts."""

    boot_id: str
    seconds: Callable[[], float] = boottime


class Lease:
    """One candidate for the lease. Any thread; `acquire` may wait for the catalog."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        boot: BootClock,
        *,
        name: str = "jobs",
        length_s: float = LEASE_S,
    ) -> None:
        """
        Raises:
            ValueError: not a length that a lease can have.
        """
        if not 0 < length_s <= rows.LONGEST_LEASE_S:
            raise ValueError("a lease runs for up to an hour")
        self.boot = boot
        self.holder = os.urandom(16)
        """Tells this candidate from all others; says nothing about the process."""
        self.length_s = length_s
        self._name = name
        self._catalog = catalog
        self._clock = clock
        self._lock = threading.Lock()  # orders changes of the two below
        self._until: float | None = None
        self._term = 0
        self._look_s = _LOOK_S

    @property
    def held(self) -> bool:
        """Whether the lease is this candidate's and has not run out. Memory only."""
        until = self._until
        return until is not None and self.boot.seconds() < until

    @property
    def term(self) -> int:
        """Grows whenever the lease is got anew: others may have had it in between."""
        return self._term

    @property
    def look_again_s(self) -> float:
        """How long to wait before the next `acquire`."""
        return self._look_s

    def acquire(self) -> bool:
        """Take the lease or renew it; whether it is held now. Whoever gets it anew says of runs
        that the last holder did not end that they are abandoned.

        On a full disk a holder stays one as long as nobody else has taken the lease: the jobs are
        what makes room.

        Raises:
            StorageError, CatalogError, VaultLockedError, ClosedError: the catalog cannot be asked.
        """
        boot_id = self.boot.boot_id
        now = self.boot.seconds()  # before the wait for the catalog: a late commit is a short lease
        fresh = not self.held
        if fresh:
            found = self._catalog.read(lambda c: rows.get_lease(c, self._name, boot_id, now))
            if found is not None and found.holder != self.holder:
                self._look_s = min(_LOOK_S, max(found.until - now, 0.01))
                self._set(None)
                return False
        until = now + self.length_s

        def take(connection: Connection) -> bool:
            if not rows.take_lease(connection, self._name, self.holder, boot_id, now, until):
                return False
            if fresh:
                rows.abandon_runs(connection, self._clock.now())
            return True

        try:
            taken = self._catalog.write(take, durable=False)
        except StorageError as exc:
            if self._until is None or not exc.full or not self.confirmed():
                raise
            taken = True
        self._look_s = self.length_s / 3 if taken else min(_LOOK_S, self.length_s / 3)
        self._set(until if taken else None, anew=fresh)
        return self.held

    def confirmed(self) -> bool:
        """Whether nobody has taken the lease away, by the catalog.

        Raises: as `acquire`.
        """
        return self._catalog.read(self.is_holder)

    def is_holder(self, connection: Connection) -> bool:
        """The same, inside the caller's transaction."""
        return rows.is_holder(connection, self._name, self.holder, self.boot.boot_id)

    def lose(self) -> None:
        """Forget that it was held, because somebody else has it."""
        self._set(None)

    def release(self) -> None:
        """Give it up, so that another takes it at once. Where that cannot be written, it runs out
        by itself."""
        if self._until is None:
            return
        self._set(None)
        try:
            self._catalog.write(
                lambda c: rows.release_lease(c, self._name, self.holder), durable=False
            )
        except KvvaultError as exc:
            log.info("the lease of the jobs was not given up and runs out: %s", exc)

    def _set(self, until: float | None, *, anew: bool = False) -> None:
        with self._lock:
            self._until = until
            self._term += until is not None and anew


class LeaseKeeper:
    """Takes and renews a lease in a thread of its own, so that a long job does not lose it.

    ``after`` is called by that thread after each attempt, whatever became of it.
    """

    def __init__(self, lease: Lease, after: Callable[[], None] = lambda: None) -> None:
        self._lease = lease
        self._after = after
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="kvvault-lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread; a catalog that hangs is not waited for longer. The lease stays held."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            problem = self._attempt(self._lease.acquire)
            problem = self._attempt(self._after) or problem
            if problem is not None and not self._failed:  # once, until all is well again
                what = str(problem) if isinstance(problem, KvvaultError) else type(problem).__name__
                log.warning("the lease of the vault's jobs cannot be kept: %s", what)
            self._failed = problem is not None
            self._stop.wait(self._lease.look_again_s)

    @staticmethod
    def _attempt(step: Callable[[], object]) -> Exception | None:
        try:
            step()
        except Exception as exc:  # noqa: BLE001 - this thread goes on: the next time may be better
            return exc
        return None
