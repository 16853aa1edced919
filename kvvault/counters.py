"""Counters of one open vault."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvvault.model import Outcome, PutReport

OTHERS = b""
"""Segments beyond those that are remembered one by one."""

_MAX_DAMAGED = 16


@dataclass(frozen=True, slots=True)
class Damage:
    """Blocks that were not what was stored."""

    altered: int = 0
    missing: int = 0


class Counters:
    """Thread-safe sums. Causes are kept apart (REQ-C8): a key store that does not answer must not
    look like tampering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._damage: dict[bytes, Damage] = {}

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

    def damage(self, segment_id: bytes, *, altered: int = 0, missing: int = 0) -> None:
        """Remember, for the audit log, that blocks of a segment were not what was stored. Memory
        only."""
        with self._lock:
            if segment_id not in self._damage and len(self._damage) >= _MAX_DAMAGED:
                segment_id = OTHERS
            known = self._damage.get(segment_id, Damage())
            self._damage[segment_id] = Damage(known.altered + altered, known.missing + missing)

    def take_damage(self) -> dict[bytes, Damage]:
        """What `damage` was told since this was last asked, by segment."""
        with self._lock:
            found, self._damage = self._damage, {}
        return found

    def __getitem__(self, name: str) -> int:
        return self._sums[name]

    def snapshot(self) -> dict[str, int]:
        """All counters that are not zero."""
        with self._lock:
            return dict(self._sums)
