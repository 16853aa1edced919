"""What a report is, before anybody has decided how it looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvvault import __version__

__all__ = ["Answer", "Column", "Kind", "Report", "ReportKind", "Table", "Value"]

Value = str | int | float | bool | None
"""One fact; None: there is none."""


class Kind(StrEnum):
    """How a value is written."""

    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    TIME = "time"
    """Seconds since the epoch; written in ISO 8601, UTC."""
    SPAN = "seconds"
    FLAG = "flag"


class ReportKind(StrEnum):
    """Which reports there are."""

    RETENTION = "retention"
    DISPOSALS = "disposals"
    ENCRYPTION = "encryption"
    ROPA = "ropa"
    SUBJECT = "subject"


@dataclass(frozen=True, slots=True)
class Answer:
    """One thing that was asked, and what the vault says."""

    name: str
    """For programs; names only get added."""
    what: str
    """For people: what this is."""
    value: Value
    command: str
    """Shows the same, or where it comes from; empty: no other command does."""
    kind: Kind = Kind.TEXT
    good: bool | None = None
    """Whether it is as it must be; None: it is as it is."""
    must: bool = True
    """False: that it is so is advised only."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """For programs; names only get added."""
    title: str
    kind: Kind = Kind.TEXT


@dataclass(frozen=True, slots=True)
class Table:
    """Many things of one sort, one a row."""

    name: str
    title: str
    command: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    """What a reader has to know of it, in a sentence or two."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of table {self.name} has not {len(self.columns)} fields")


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report. Times are seconds since the epoch, by the vault's own time."""

    kind: ReportKind
    title: str
    asked: tuple[str, ...]
    """Which articles and controls ask for it."""
    vault: str
    """The vault's directory."""
    vault_id: str
    """Hex."""
    made_at: float
    answers: tuple[Answer, ...]
    tables: tuple[Table, ...] = ()
    statements: tuple[tuple[str, str], ...] = ()
    """(title, text): what no figure says."""
    since: float | None = None
    """Beginning of the period that it covers; None: of everything there is."""
    until: float | None = None
    version: str = field(default=__version__)
    """Of kvvault."""

    @property
    def good(self) -> bool:
        """Whether nothing in it is as it must not be: no row says NO."""
        return all(answer.good is not False for answer in self.answers if answer.must)

    def answer(self, name: str) -> Answer:
        """
        Raises:
            KeyError: there is none of that name.
        """
        for answer in self.answers:
            if answer.name == name:
                return answer
        raise KeyError(name)
