"""Following other processes, and telling the catalog what this one has noticed: what was used, what
was damaged, how late it is.

The thread `kvvault-watch` looks every `VaultOptions.poll_interval_s`; whoever needs it sooner calls
the same methods, from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection

from kvvault.catalog import log as audit_log
from kvvault.catalog import retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.counters import OTHERS, Counters
from kvvault.errors import KvvaultError
from kvvault.governing import Governor
from kvvault.keyring import KeyRing
from kvvault.model import Clock, VerifyReport
from kvvault.prompting import Recorder
from kvvault.timekeeping import VaultTime
from kvvault.view import View
from kvvault.writing import Writer

log = logging.getLogger(__name__)

_MAX_DAMAGED = 16
"""Segments that one entry of the audit log names."""

_REPORT_S = 1.0
"""How often use is reported; sliding deadlines move that late."""

_MARK_S = 10.0
"""How often the time is noted: a clock that is set back during a restart gains as much."""


class Watcher:
    """Any thread; may wait for the catalog. Where a vault is open for reading only it follows, and
    tells nothing."""

    def __init__(
        self,
        catalog: Catalog,
        ring: KeyRing,
        view: View,
        writer: Writer,
        recorder: Recorder,
        governor: Governor,
        counters: Counters,
        time: VaultTime,
        clock: Clock,
        poll_interval_s: float,
        *,
        read_only: bool,
    ) -> None:
        self._catalog = catalog
        self._ring = ring
        self._view = view
        self._writer = writer
        self._recorder = recorder
        self._governor = governor
        self._counters = counters
        self._time = time
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._read_only = read_only
        self._marked_at = time.steady()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvvault-watch", daemon=True)

    def start(self) -> None:
        """Watch until `stop`; once."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Watch no more. A look that is under way is waited for, at most so long."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        """Follow other processes while nothing else does. A catalog that cannot be read now is read
        the next time; loads notice by themselves."""
        often = (
            self._view.refresh,
            self._view.drop_forgotten_tenants,
            self._writer.close_windows,
        )
        rarely = (self.report, lambda: self._ring.follow(self._catalog))
        next_report = self._clock.monotonic() + _REPORT_S
        while not self._stop.wait(self._poll_interval_s):
            steps: tuple[Callable[[], object], ...] = often
            if self._clock.monotonic() >= next_report:
                next_report = self._clock.monotonic() + _REPORT_S
                steps = often + rarely
            for step in steps:
                try:
                    step()
                except Exception as exc:  # noqa: BLE001 - neither the thread nor the other steps
                    log.debug("a look at the catalog failed: %s", type(exc).__name__)

    def report(self) -> None:
        """Tell the catalog what was used and how late it is, follow what it says of the clock.

        Raises:
            StorageError, CatalogError.
        """
        if self._read_only:
            return
        self._report_damage()
        self.report_use(wait=False)
        self._recorder.touch()
        self._time.set_jump(self._governor.current()[1].vault.clock_jump_s)
        if self._time.suspect:
            mark = self._catalog.read(retention.get_mark)
            if mark is not None:
                self._time.adopt(mark)
        if self._marked_at + _MARK_S <= self._time.steady():
            self._marked_at = self._time.steady()
            mark_time(self._catalog, self._time)

    def report_last(self) -> None:
        """Report for the last time. Else a clock that is set back before the next opening gains
        what has passed since the time was noted, and what was just used counts as unused."""
        if self._read_only:
            return
        with suppress(KvvaultError):
            self._report_damage()
            self.report_use(wait=False)
            mark_time(self._catalog, self._time)

    def report_use(self, *, wait: bool = True) -> None:
        """Have the catalog note what was used since this was last asked; `wait` until it has.

        Raises:
            StorageError, CatalogError.
        """
        if self._read_only:
            return
        uses = self._view.take_uses()
        if uses:
            noted = self._catalog.submit(lambda c: retention.note_use(c, uses))
            if wait:
                noted.result()

    def accept_clock(self) -> float:
        """Believe the machine's clock, however far ahead it is; by how many seconds it was.

        Raises:
            StorageError, CatalogError.
        """
        ahead, wall = self._time.ahead_s, self._clock.now()

        def write(connection: Connection) -> None:
            retention.raise_mark(connection, wall)
            audit_log.append(connection, "clock-accepted", wall, {"ahead_s": round(ahead, 3)})

        self._catalog.write(write)
        self._time.adopt(wall)
        return ahead

    def _report_damage(self) -> None:
        """Have the audit log say what loads found altered or missing since it last said so: one
        entry, however much that is."""
        found = self._counters.take_damage()
        if not found:
            return
        now = self._time.steady()
        facts: dict[str, Fact] = {
            "by": "load",
            "segments": sorted(one.hex() for one in found if one != OTHERS),
            "more_segments": OTHERS in found,
            "altered": sum(one.altered for one in found.values()),
            "missing": sum(one.missing for one in found.values()),
        }
        self._catalog.submit(lambda c: audit_log.append(c, "damage-found", now, facts))

    def note_check(self, report: VerifyReport) -> None:
        """Have the audit log say what a check found altered or missing, if anything.

        Raises:
            StorageError, CatalogError.
        """
        if self._read_only or not (report.tampered or report.lost):
            return  # somebody who may only look writes nothing
        damaged = sorted(report.damaged_segments)
        facts: dict[str, Fact] = {
            "by": "check",
            "segments": [one.hex() for one in damaged[:_MAX_DAMAGED]],
            "more_segments": len(damaged) > _MAX_DAMAGED,
            "altered": report.tampered,
            "missing": report.lost,
        }
        now = self._time.steady()
        self._catalog.write(lambda c: audit_log.append(c, "damage-found", now, facts))


def mark_time(catalog: Catalog, time: VaultTime) -> None:
    """Have the catalog note the time: nobody goes back behind it. Does not wait."""
    now = time.steady()
    catalog.submit(lambda c: retention.raise_mark(c, now))
