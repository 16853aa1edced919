"""Durations, sizes and shares as a policy writes them: ``5m``, ``24h``; ``20GiB``; ``80%``.

All functions are pure. They raise ValueError with a text that needs no more context than the name
of the setting, and that quotes nothing but the value itself.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "DURATION_PATTERN",
    "MAX_BYTES",
    "MAX_DURATION_S",
    "SHARE_PATTERN",
    "SIZE_PATTERN",
    "format_duration",
    "format_share",
    "format_size",
    "parse_duration",
    "parse_share",
    "parse_size",
]

MAX_DURATION_S: Final = 36525 * 86400.0
"""A hundred years. Whoever writes more has mistaken a unit; ``never`` says it plainly."""
MAX_BYTES: Final = 1 << 60

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}

_NUMBER: Final = r"[0-9]{1,19}(?:\.[0-9]{1,6})?"
DURATION_PATTERN: Final = rf"^{_NUMBER} ?[smhdw]$"
SIZE_PATTERN: Final = rf"^{_NUMBER} ?(?:B|[KMGTP]i?B)?$"
SHARE_PATTERN: Final = r"^[0-9]{1,3}(?:\.[0-9]{1,6})?%$"
"""Patterns for the JSON schema; parsing is stricter (zero, too much)."""

_DURATION: Final = re.compile(rf"({_NUMBER}) ?([smhdw])")
_SIZE: Final = re.compile(rf"({_NUMBER}) ?([A-Za-z]{{0,3}})")
_SHARE: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


def parse_duration(text: object) -> float:
    """Seconds from ``90s``, ``5m``, ``1.5h``, ``30d``, ``2w``.

    :raises ValueError: not a duration, zero, negative, or more than a hundred years.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{_shown(text)} is not a duration; write 90s, 5m, 24h, 30d, 2w")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds <= 0:
        raise ValueError(f"{_shown(text)} is no time at all; a duration is more than zero")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{_shown(text)} is more than a hundred years")
    return seconds


def parse_size(text: object) -> int:
    """Bytes from ``20GiB``, ``1.5GB``, ``4096``. KB is 1000 bytes, KiB is 1024.

    :raises ValueError: not a size, zero, or more than an exbibyte.
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = None if match is None else _BYTES.get(match[2])
    if match is None or factor is None:
        raise ValueError(f"{_shown(text)} is not a size; write 4096, 512MiB, 20GiB, 1.5TB")
    size = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size <= 0:
        raise ValueError(f"{_shown(text)} is nothing; a size is more than zero")
    if size > MAX_BYTES:
        raise ValueError(f"{_shown(text)} is more than 1 EiB")
    return size


def parse_share(text: object) -> float:
    """A fraction from ``80%``: more than 0, at most 1.

    :raises ValueError: not a percentage, or out of range.
    """
    match = _SHARE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{_shown(text)} is not a percentage; write 80%")
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{_shown(text)} is not between 0% and 100%")
    return share


def format_duration(seconds: float) -> str:
    """The largest unit that divides it: ``24h``, ``90s``, ``30d``; `parse_duration` reads it."""
    if seconds >= 1 and seconds == int(seconds):
        whole = int(seconds)
        unit = next(unit for unit in ("d", "h", "m", "s") if whole % _SECONDS[unit] == 0)
        # People say 24h, and mean the same as 1d.
        if unit == "d" and whole == _SECONDS["d"]:
            unit = "h"
        return f"{whole // _SECONDS[unit]}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def format_size(size: int) -> str:
    """The largest binary unit that divides it: ``20GiB``, ``4096``; `parse_size` reads it."""
    for power in range(5, 0, -1):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{'KMGTP'[power - 1]}iB"
    return str(size)


def format_share(share: float) -> str:
    """``80%``; `parse_share` reads it."""
    return f"{share * 100:.6f}".rstrip("0").rstrip(".") + "%"


def _shown(value: object) -> str:
    """What was written, shortened: a file can hold anything."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 24 else f"{value[:24]!r}..."
    return "that"
