"""What can be listed of segments, tenants and namespaces: columns with a type, and what is built
on them: JSON, tables, ``--filter`` and ``--sort``.

A column's name is its name in JSON, so it never changes its meaning; columns are only added.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from kvvault.cli.formats import (
    Cell,
    human_bytes,
    human_duration,
    iso_time,
    parse_duration,
    parse_size,
    parse_time,
)
from kvvault.errors import UsageError

__all__ = ["Column", "Kind", "Query", "as_cell", "as_json", "record", "select"]

_T = TypeVar("_T")
Value = bytes | str | int | float | None

_CONDITION: Final = re.compile(r"\s*([A-Za-z_]+)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_ORDERED: Final = frozenset({"<", "<=", ">", ">="})
_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Kind(StrEnum):
    """Type of a column; says how a value is shown, typed and compared."""

    ID = "id"
    """bytes; hex. ``=`` matches a prefix."""
    TEXT = "text"
    COUNT = "count"
    SIZE = "size"
    """Bytes; typed as 64KiB, 1.5GB."""
    TIME = "time"
    """Seconds since the epoch; typed and shown as ISO 8601."""
    DURATION = "duration"
    """Seconds; typed as 15m, 7d."""

    @property
    def numeric(self) -> bool:
        return self not in (Kind.ID, Kind.TEXT)


@dataclass(frozen=True, slots=True)
class Column(Generic[_T]):
    """One field of what is listed."""

    name: str
    kind: Kind
    get: Callable[[_T], Value]
    in_json: bool = True
    in_table: bool = True


@dataclass(frozen=True, slots=True)
class Query:
    """Which rows, in which order, how many."""

    filters: Sequence[str] = ()
    """``FIELD OP VALUE``; all must hold."""
    sort: str | None = None
    """``FIELD`` or ``FIELD:desc``."""
    limit: int | None = None


def select(rows: Iterable[_T], columns: Sequence[Column[_T]], query: Query) -> tuple[list[_T], int]:
    """The chosen rows, and how many there would be without the limit.

    :raises UsageError: unknown field, an operator or a value that does not fit its type. Says
        which, but repeats no value of a text field: that could be a tenant's name.
    """
    tests = [_test(text, columns) for text in query.filters]
    order = _order(query.sort, columns)
    chosen = [row for row in rows if all(test(row) for test in tests)]
    if order is not None:
        chosen = order(chosen)
    return chosen[: query.limit], len(chosen)


def _find(name: str, columns: Sequence[Column[_T]], option: str) -> Column[_T]:
    for column in columns:
        if column.name == name:
            return column
    raise UsageError(
        f"{option}: there is no field {name[:40]!r}",
        hint=f"fields are: {', '.join(column.name for column in columns)}",
    )


def _test(text: str, columns: Sequence[Column[_T]]) -> Callable[[_T], bool]:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(
            "--filter: that is not FIELD OPERATOR VALUE",
            hint='for instance "bytes>1MB"; operators are = != < <= > >= and ~ (contains)',
        )
    name, op, wanted = match.groups()
    column = _find(name, columns, "--filter")
    if column.kind.numeric:
        return _number_test(column, op, wanted)
    if op in _ORDERED:
        raise UsageError(
            f"--filter: {name} is {_article(column.kind)}, which {op} cannot compare",
            hint="use = or !=" + (" or ~ (contains)" if column.kind is Kind.TEXT else ""),
        )
    if column.kind is Kind.ID:
        return _id_test(column, op, wanted)
    return _text_test(column, op, wanted)


def _number_test(column: Column[_T], op: str, wanted: str) -> Callable[[_T], bool]:
    if op == "~":
        raise UsageError(
            f"--filter: {column.name} is {_article(column.kind)}, ~ is for text",
            hint="use = != < <= > or >=",
        )
    try:
        limit = _number(column.kind, wanted)
    except ValueError as error:
        raise UsageError(
            f"--filter: {wanted[:40]!r} is {str(error).partition(';')[0]}",
            hint=str(error).partition("; ")[2] or "write a whole number",
        ) from None
    compare = _COMPARE[op]

    def test(row: _T) -> bool:
        value = column.get(row)
        return isinstance(value, int | float) and compare(value, limit)

    return test


def _number(kind: Kind, text: str) -> float:
    if kind is Kind.SIZE:
        return parse_size(text)
    if kind is Kind.TIME:
        return parse_time(text)
    if kind is Kind.DURATION:
        return parse_duration(text)
    if not re.fullmatch(r"[0-9]{1,30}", text):
        raise ValueError("not a count; write a whole number")
    return int(text)


def _id_test(column: Column[_T], op: str, wanted: str) -> Callable[[_T], bool]:
    prefix = wanted.lower()
    if op == "~" or not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
        raise UsageError(
            f"--filter: {column.name} is compared with the beginning of an id",
            hint=f"for instance {column.name}=0a1b2c3d, in hex digits",
        )

    def test(row: _T) -> bool:
        value = column.get(row)
        matches = isinstance(value, bytes) and value.hex().startswith(prefix)
        return matches == (op == "=")

    return test


def _text_test(column: Column[_T], op: str, wanted: str) -> Callable[[_T], bool]:
    def test(row: _T) -> bool:
        value = column.get(row)
        if op == "~":
            return isinstance(value, str) and wanted in value
        return (value == wanted) == (op == "=")

    return test


def _order(
    text: str | None, columns: Sequence[Column[_T]]
) -> Callable[[Iterable[_T]], list[_T]] | None:
    if text is None:
        return None
    name, _, direction = text.partition(":")
    column = _find(name, columns, "--sort")
    if direction not in ("", "asc", "desc"):
        raise UsageError(
            "--sort: the direction is asc or desc", hint=f"for instance {column.name}:desc"
        )
    return lambda rows: _sorted(rows, column, descending=direction == "desc")


def _sorted(rows: Iterable[_T], column: Column[_T], *, descending: bool) -> list[_T]:
    """Rows without a value last, whatever the direction; stable."""
    numbers: list[tuple[float, _T]] = []
    texts: list[tuple[str, _T]] = []
    rest: list[_T] = []
    for row in rows:
        value = column.get(row)
        if isinstance(value, int | float):
            numbers.append((value, row))
        elif value is not None:
            texts.append((value.hex() if isinstance(value, bytes) else value, row))
        else:
            rest.append(row)
    numbers.sort(key=lambda pair: pair[0], reverse=descending)
    texts.sort(key=lambda pair: pair[0], reverse=descending)
    return [row for _, row in numbers] + [row for _, row in texts] + rest


def _article(kind: Kind) -> str:
    return {Kind.ID: "an id", Kind.TEXT: "text"}.get(kind, f"a {kind.value}")


# -- showing -------------------------------------------------------------------------------------


def record(row: _T, columns: Sequence[Column[_T]]) -> dict[str, object]:
    """A row as a JSON object: ids in full, sizes in bytes, times in ISO 8601."""
    return {
        column.name: as_json(column.kind, column.get(row)) for column in columns if column.in_json
    }


def as_json(kind: Kind, value: Value) -> str | int | float | None:
    if isinstance(value, bytes):
        return value.hex()
    if kind is Kind.TIME and not isinstance(value, str):
        return iso_time(value)
    return value


def as_cell(kind: Kind, value: Value, short: Mapping[bytes, str]) -> Cell:
    """A value in a table; `short` has the ids' unique prefixes."""
    if value is None:
        return Cell("-", right=kind.numeric)
    if isinstance(value, bytes):
        return Cell(short.get(value, value.hex()))
    if isinstance(value, str):
        return Cell(value)
    if kind is Kind.SIZE:
        return Cell(human_bytes(int(value)), right=True)
    if kind is Kind.TIME:
        stamp = iso_time(value)
        return Cell("-" if stamp is None else f"{stamp[:19]}Z")
    if kind is Kind.DURATION:
        return Cell(human_duration(value), right=True)
    return Cell(str(value), right=True)
