"""What `kvvault doctor` finds, as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status", "fail", "ok", "warn", "worst"]


class Status(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"
    """A promise is weaker than it could be, or could not be checked."""
    FAIL = "fail"
    """A promise does not hold, or the vault cannot be used."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. Holds nothing secret or personal: paths, opaque ids and counts."""

    name: str
    """Which check; one of a fixed set of names."""
    status: Status
    what: str
    """One line: what was found."""
    hint: str
    """One line: what to do about it. Empty exactly where nothing is to be done."""

    def __post_init__(self) -> None:
        if bool(self.hint) == (self.status is Status.OK):
            raise ValueError("a finding has a hint exactly when it is not ok")


def ok(name: str, what: str) -> Finding:
    return Finding(name, Status.OK, what, "")


def warn(name: str, what: str, hint: str) -> Finding:
    return Finding(name, Status.WARN, what, hint)


def fail(name: str, what: str, hint: str) -> Finding:
    return Finding(name, Status.FAIL, what, hint)


def worst(findings: Iterable[Finding]) -> Status:
    """The most severe status; OK for none."""
    statuses = {finding.status for finding in findings}
    for status in (Status.FAIL, Status.WARN):
        if status in statuses:
            return status
    return Status.OK
