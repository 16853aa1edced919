"""The progress bar, for terminals only; apart, because rich's progress costs start-up time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvvault.cli.output import Bar

_INTERVAL_S = 0.1
"""Progress is reported per block, tens of thousands of times a second; drawn less often."""


class TerminalBar(Bar):
    """Bytes done, of how many, how fast, how long still."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)
        self._drawn = 0.0

    @classmethod
    @contextlib.contextmanager
    def show(cls, what: str) -> Iterator[TerminalBar]:
        """A bar on stderr for as long as the context lasts; it leaves no trace."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        with progress:
            yield cls(progress, what)

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._drawn < _INTERVAL_S:
            return
        self._drawn = now
        self._progress.update(self._task, completed=done, total=total)
