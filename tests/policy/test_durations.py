"""Durations, sizes, shares: read, written, refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.policy.durations import (
    MAX_BYTES,
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)


@given(st.integers(min_value=1, max_value=36525 * 86400))
def test_durations_survive(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=1, max_value=MAX_BYTES))
def test_sizes_survive(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(min_value=1, max_value=10_000))
def test_shares_survive(hundredths: int) -> None:
    share = parse_share(f"{hundredths / 100}%")
    assert parse_share(format_share(share)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("24h", 86400),
        ("30d", 2592000),
        ("2w", 1209600),
        ("0.5s", 0.5),
        ("1.5 h", 5400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(86400, "24h"), (172800, "2d"), (90, "90s"), (0.5, "0.5s"), (0, "0s")]
)
def test_durations_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "text",
    ["", "5", "m", "5 m ", "5M", "-1s", "+1s", "1e3s", "0s", "0.0000001d", "\u0665m", "1y", True],
)
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match=r"duration|no time at all"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "-1", "1 XB", "0", "0.1", "2EiB", "80%", "1025PiB", None])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|nothing|EiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "80", "0%", "100.1%", "-1%", "1e1%", 80])
def test_what_is_no_share(text: object) -> None:
    with pytest.raises(ValueError, match=r"percentage|between"):
        parse_share(text)
