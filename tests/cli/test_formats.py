"""Values as they are typed and shown."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.cli import formats
from kvvault.cli.columns import Column, Kind, Query, as_cell, as_json, select
from kvvault.cli.output import printable
from kvvault.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KB", 1000),
        ("1KiB", 1024),
        (" 64 kib ", 65536),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("1PB", 10**15),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert formats.parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "1XB", "-1", "1e9", "KB", "1 2", "\u0661KB", "1.5.5", "9" * 31]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        formats.parse_size(text)


@given(st.integers(0, 1 << 62))
def test_human_bytes_are_close(count: int) -> None:
    shown = formats.human_bytes(count)
    back = formats.parse_size(shown)
    assert abs(back - count) <= 0.06 * 1024 ** max(0, (count.bit_length() - 1) // 10) + 1


def test_durations_and_times() -> None:
    assert formats.parse_duration("1.5h") == 5400
    assert formats.parse_duration("2w") == 1_209_600
    assert formats.parse_time("1970-01-02") == 86400
    assert formats.parse_time("1970-01-01T01:00:00+01:00") == 0
    assert formats.iso_time(0.5) == "1970-01-01T00:00:00.500Z"
    assert formats.human_duration(90061) == "1 d"
    assert formats.human_duration(61) == "1 m"
    assert formats.human_duration(-3) == "0 s"


@given(st.floats())
def test_any_time_is_shown_or_none(seconds: float) -> None:
    shown = formats.iso_time(seconds)
    assert shown is None or abs(formats.parse_time(shown) - seconds) <= 0.001


@given(st.sets(st.binary(min_size=16, max_size=16), max_size=50))
def test_short_ids_are_unique(ids: set[bytes]) -> None:
    close = ids | {ident[:-1] + b"\0" for ident in ids}
    short = formats.short_ids(close)
    for ident, prefix in short.items():
        assert len(prefix) >= 8
        assert [other for other in close if other.hex().startswith(prefix)] == [ident]


@given(st.text())
def test_nothing_printed_can_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    shown.encode()


@dataclass(frozen=True)
class Row:
    ident: bytes | None
    name: str | None
    size: int
    at: float


COLUMNS: list[Column[Row]] = [
    Column("id", Kind.ID, lambda row: row.ident),
    Column("name", Kind.TEXT, lambda row: row.name),
    Column("bytes", Kind.SIZE, lambda row: row.size),
    Column("created_at", Kind.TIME, lambda row: row.at),
]
ROWS = [
    Row(b"\xab" * 16, "beta", 10, 3.0),
    Row(None, None, 30, 1.0),
    Row(b"\x0b" * 16, "alpha", 20, 2.0),
]


def chosen(*filters: str, sort: str | None = None, limit: int | None = None) -> list[int]:
    rows, _ = select(ROWS, COLUMNS, Query(filters, sort, limit))
    return [row.size for row in rows]


def test_missing_values() -> None:
    assert chosen("name=alpha") == [20]
    assert chosen("name!=alpha") == [10, 30]
    assert chosen("name~") == [10, 20]
    assert chosen("id=AB") == [10]
    assert chosen("id!=ab") == [30, 20]
    assert chosen(sort="name") == [20, 10, 30]
    assert chosen(sort="name:desc") == [10, 20, 30]
    assert chosen(sort="id") == [20, 10, 30]
    assert chosen(sort="bytes:desc", limit=2) == [30, 20]
    assert chosen("bytes>5", "bytes<=20", sort="created_at:asc") == [20, 10]
    assert chosen("bytes != 10") == [30, 20]


@given(st.text(max_size=40))
def test_any_filter_is_understood_or_refused(text: str) -> None:
    for prefix in ("", "id", "name=", "bytes>", "created_at<", "bytes~"):
        with contextlib.suppress(UsageError):
            rows, total = select(ROWS, COLUMNS, Query((prefix + text,), None, None))
            assert len(rows) == total <= len(ROWS)


@given(st.text(max_size=20))
def test_any_sort_is_understood_or_refused(text: str) -> None:
    try:
        rows, _ = select(ROWS, COLUMNS, Query((), text, None))
    except UsageError:
        return
    assert sorted(row.size for row in rows) == [10, 20, 30]


def test_cells_and_json() -> None:
    assert as_cell(Kind.ID, b"\xab" * 16, {b"\xab" * 16: "ab"}).text == "ab"
    assert as_cell(Kind.COUNT, None, {}).text == "-"
    assert as_cell(Kind.DURATION, 7200.0, {}).text == "2 h"
    assert as_cell(Kind.TIME, 1e300, {}).text == "-"
    assert as_json(Kind.ID, b"\xab") == "ab"
    assert as_json(Kind.TIME, 1e300) is None
    assert as_json(Kind.SIZE, 7) == 7
