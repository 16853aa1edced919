"""Counters of one open vault."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from kvvault.model import Outcome, PutReport


class Counters:
    """Thread-safe sums. Causes are kept apart (REQ-C8): a key store that does not answer must not
    look like tampering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._sums.update(amounts)

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of one get."""
        with self._lock:
            self._sums.update(outcome.value for outcome in outcomes)

    def put(self, report: PutReport, block_bytes: int) -> None:
        """Count the result of one put."""
        self.add(
            stored_blocks=report.stored,
            stored_bytes=report.stored * block_bytes,
            present_blocks=report.present,
            refused_blocks=report.refused,
            declined_blocks=report.declined,
        )

    def __getitem__(self, name: str) -> int:
        return self._sums[name]

    def snapshot(self) -> dict[str, int]:
        """All counters that are not zero."""
        with self._lock:
            return dict(self._sums)
