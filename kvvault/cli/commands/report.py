"""report: what auditors are handed."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvvault.cli.commands.finding import SUBJECT_FILE, refusals_noted, subject_of
from kvvault.cli.files import write_private
from kvvault.cli.formats import parse_time, path_text
from kvvault.cli.run import Run, command
from kvvault.errors import UsageError
from kvvault.model import SystemClock

if TYPE_CHECKING:
    from kvvault.catalog.reporting import Period
    from kvvault.reporting.document import Report
    from kvvault.vault import Vault

__all__ = ["register"]


class _Which(StrEnum):
    RETENTION = "retention"
    DISPOSALS = "disposals"
    ENCRYPTION = "encryption"
    ROPA = "ropa"
    SUBJECT = "subject"


class _Form(StrEnum):
    MD = "md"
    HTML = "html"
    JSON = "json"
    CSV = "csv"


_OPTIONS: Final[dict[_Which, frozenset[str]]] = {
    _Which.RETENTION: frozenset({"--since", "--until", "--tenant"}),
    _Which.DISPOSALS: frozenset({"--since", "--until"}),
    _Which.ENCRYPTION: frozenset({"--since", "--until", "--tenant"}),
    _Which.ROPA: frozenset(),
    _Which.SUBJECT: frozenset({"--tenant", "--subject", "--subject-file"}),
}
"""Which options mean something for which report."""


def register(app: typer.Typer) -> None:
    command(app, "report")(report)


def report(
    run: Run,
    which: Annotated[
        _Which,
        typer.Argument(metavar="REPORT", help="retention, disposals, encryption, ropa or subject."),
    ],
    form: Annotated[
        _Form | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="md (Markdown), html (one printable page), json, or csv (for spreadsheets). md if "
            "not given, json with --json.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write it there, readable by its owner only."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DATE", help="From then on, as in 2026-01-31 (UTC)."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="DATE", help="Until then, not included.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="Whose; everybody's if not given."),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option("--subject", metavar="NAME", help="The person, as requests named them."),
    ] = None,
    subject_file: SUBJECT_FILE = None,
) -> int | None:
    """Print a report for auditors: every answer with the command that shows the same, if one does.

    retention (are the periods set and kept), disposals (what was deleted in a period), encryption
    (algorithms, keys, destructions), ropa (record of processing activities, GDPR Art. 30), subject
    (one person's data and its erasure; asking is itself written to the audit log).

    Exit code 1 when anything is not as it must be, which is when a row says NO: in `report
    retention` a segment past its deadline whose key still exists, a deletion that has waited too
    long for a purge, a job that is overdue. What is advised only does not count.
    """
    from kvvault.reporting.rendering import Format, render

    given = {
        "--since": since,
        "--until": until,
        "--tenant": tenant,
        "--subject": subject,
        "--subject-file": subject_file,
    }
    for name, value in given.items():
        if value is not None and name not in _OPTIONS[which]:
            raise UsageError(
                f"{name} means nothing for the {which} report",
                hint=f"leave it out; see docs/reports.md for what {which} covers",
            )
    subject = subject_of(subject, subject_file)
    period = _period(since, until)
    if form is None:
        form = _Form.JSON if run.output.json else _Form.MD
    made = _made(run, which, period, tenant, subject)
    text = render(made, Format(form.value))
    if output is not None:
        write_private(output, text.encode(), "the report")
        if run.output.json:
            run.output.document(
                {
                    "report": which.value,
                    "format": form.value,
                    "file": path_text(output.absolute()),
                    "good": made.good,
                }
            )
        else:
            run.output.note(f"written to {path_text(output.absolute())}")
    else:
        run.output.lines(*text.splitlines())
    return None if made.good else 1


def _period(since: str | None, until: str | None) -> Period:
    from kvvault.catalog.reporting import Period

    times = []
    for name, text, default in (("--since", since, -math.inf), ("--until", until, math.inf)):
        try:
            times.append(default if text is None else parse_time(text))
        except ValueError as error:
            raise UsageError(f"{name}: {error}", hint="as in --since 2026-01-01") from None
    if times[0] >= times[1]:
        raise UsageError("the period ends before it begins", hint="--since comes before --until")
    return Period(*times)


def _made(
    run: Run, which: _Which, period: Period, tenant: str | None, subject: str | None
) -> Report:
    from kvvault.reporting import disposals, encryption, processing, retention
    from kvvault.reporting import subject as subjects
    from kvvault.reporting.sources import Source

    if which is _Which.SUBJECT:
        if tenant is None or subject is None:
            raise UsageError(
                "the subject report needs to know who is meant",
                hint="add --tenant NAME, and --subject NAME or --subject-file FILE",
            )
        with run.open_vault() as vault:
            source = Source(vault, SystemClock(), period)
            with refusals_noted(vault, "report subject"):
                return subjects.report(source, tenant=tenant, subject=subject)
    with run.open_vault() as vault:
        source = Source(vault, SystemClock(), period)
        if tenant is not None:
            _check_tenant(vault, tenant)
        if which is _Which.RETENTION:
            return retention.report(source, tenant=tenant)
        if which is _Which.DISPOSALS:
            return disposals.report(source)
        if which is _Which.ENCRYPTION:
            return encryption.report(source, tenant=tenant)
        return processing.report(source)


def _check_tenant(vault: Vault, tenant: str) -> None:
    if not any(known.name == tenant for known in vault.tenants()):
        raise UsageError("the vault has no such tenant", hint="see `kvvault ls tenants`")
