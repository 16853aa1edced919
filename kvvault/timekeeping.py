"""The vault's own time: it never goes back, and it does not believe every jump forward.

A deadline that can be moved with ``date -s`` is none. So a vault keeps the highest time it has seen
(`counters.time_mark` in the catalog), and every process counts on from there with a clock that
nobody sets (REQ-F6):

- a wall clock *behind* that is ignored: time goes on at its real pace from the mark;
- a wall clock *ahead* by no more than the policy's `clock_jump` is followed (the machine was off);
- one further ahead is *suspect*. What would be past its deadline by then is not served, to be on
  the safe side, but nothing is destroyed and no deadline is computed from it until somebody says
  that it is right (``kvvault clock accept``) or the clock comes back.
"""

from __future__ import annotations

import threading

from kvvault.model import Clock


class VaultTime:
    """Seconds since the epoch. All methods from any thread; none does I/O or waits for more than
    another of them."""

    def __init__(self, clock: Clock, mark: float | None, jump_s: float) -> None:
        """`mark`: the highest time any process has seen, None for a new vault."""
        self._clock = clock
        self._lock = threading.Lock()
        self._jump_s = jump_s
        # Time, and what the monotonic clock said then. One object: readers take it without the
        # lock, and half of an old pair with half of a new one would be a jump.
        self._base = (clock.now() if mark is None else mark, clock.monotonic())

    def now(self) -> float:
        """The latest that it may be. What is past its deadline by this time is not served."""
        # `steady` first: what was once told must not become earlier when the clock is set back.
        steady = self.steady()
        return max(self._clock.now(), steady)

    def steady(self) -> float:
        """The time that can be vouched for: deadlines are computed from it, and destruction goes
        by it."""
        with self._lock:
            counted = self._counted()
            wall = self._clock.now()
            if not counted < wall <= counted + self._jump_s:
                return counted
            self._base = wall, self._clock.monotonic()
            return wall

    @property
    def suspect(self) -> bool:
        """Whether the wall clock is implausibly far ahead."""
        return self.ahead_s > self._jump_s

    @property
    def ahead_s(self) -> float:
        """By how much the wall clock is ahead of the time that can be vouched for; 0 if behind."""
        return max(0.0, self._clock.now() - self._counted())

    def set_jump(self, jump_s: float) -> None:
        """Follow another policy's threshold."""
        with self._lock:
            self._jump_s = jump_s

    def adopt(self, mark: float) -> None:
        """Take over a mark that another process has set, when it is ahead."""
        with self._lock:
            if mark > self._counted():
                self._base = mark, self._clock.monotonic()

    def _counted(self) -> float:
        time, monotonic = self._base
        return time + (self._clock.monotonic() - monotonic)
