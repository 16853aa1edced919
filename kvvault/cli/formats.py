"""Values as people and programs read them, and as people type them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

__all__ = [
    "Cell",
    "human_bytes",
    "human_duration",
    "iso_time",
    "parse_duration",
    "parse_size",
    "parse_time",
    "path_text",
    "plural",
    "short_ids",
]

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGTP", 1)},
    **{f"{p}IB": 1024**n for n, p in enumerate("KMGTP", 1)},
}
_DURATIONS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})")
_SHORTEST_ID: Final = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a table."""

    text: str
    right: bool = False


def iso_time(seconds: float | None) -> str | None:
    """ISO 8601 in UTC, to the millisecond; None where a damaged catalog has a time that is none."""
    if seconds is None or not math.isfinite(seconds):
        return None
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def path_text(path: Path) -> str:
    """A path as text that every program can read; bytes that are not UTF-8 as ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def human_bytes(count: int) -> str:
    """``1.5 GiB``; bytes below 1 KiB in full."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def human_duration(seconds: float) -> str:
    """``3 d`` and the like: the largest unit that fits."""
    for unit in ("d", "h", "m"):
        if seconds >= _DURATIONS[unit]:
            return f"{seconds // _DURATIONS[unit]:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def parse_size(text: str) -> int:
    """Bytes from ``64KiB``, ``1.5 GB``, ``4096``. KB is 1000 bytes, KiB is 1024.

    :raises ValueError: not a size.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = None if match is None else _UNITS.get(match[2].upper())
    if match is None or factor is None:
        raise ValueError("not a size; write 4096, 64KiB, 1.5GB")
    if "." in match[1]:
        return round(float(match[1]) * factor)
    return int(match[1]) * factor


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``15m``, ``1.5h``, ``7d``, ``2w``.

    :raises ValueError: not a duration.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = None if match is None else _DURATIONS.get(match[2])
    if match is None or factor is None:
        raise ValueError("not a duration; write 90s, 15m, 1.5h, 7d, 2w")
    return float(match[1]) * factor


def parse_time(text: str) -> float:
    """Seconds since the epoch from an ISO 8601 date or time; UTC where no zone is given.

    :raises ValueError: not a time.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise ValueError("not a time; write 2026-01-31 or 2026-01-31T12:00:00Z") from None


def short_ids(ids: Iterable[bytes]) -> dict[bytes, str]:
    """The shortest hex prefix of each id that no other of them has, at least 8 digits."""
    ordered = sorted({value: value.hex() for value in ids}.items(), key=lambda item: item[1])
    short: dict[bytes, str] = {}
    for index, (value, digits) in enumerate(ordered):
        length = _SHORTEST_ID
        for neighbour in ordered[max(index - 1, 0) : index] + ordered[index + 1 : index + 2]:
            length = max(length, _common(digits, neighbour[1]) + 1)
        short[value] = digits[:length]
    return short


def _common(a: str, b: str) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))


def plural(count: int, word: str, many: str | None = None) -> str:
    """``1 segment``, ``2 segments``; ``2 entries`` with `many` ``entries``"""
    return f"{count} {word}" if count == 1 else f"{count} {many or f'{word}s'}"
