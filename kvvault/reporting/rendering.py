"""A report as Markdown, as one HTML page, as JSON, as CSV. Pure: from a `Report` to text.

Every text of a report may come from outside (a tenant's name, a reason that somebody typed), so
each form defends its reader: Markdown and HTML escape what would be markup, CSV what a spreadsheet
would run as a formula (OWASP, "CSV Injection"), and all of them what a terminal or a bidirectional
text could act on. JSON is ASCII, with everything as it is.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from kvvault.audit.rendering import inert
from kvvault.reporting.document import Answer, Kind, Report, Table, Value

__all__ = ["Format", "render"]


class Format(StrEnum):
    MARKDOWN = "md"
    HTML = "html"
    JSON = "json"
    CSV = "csv"


def render(report: Report, form: Format) -> str:
    """The whole document, ending with a newline."""
    return _RENDERERS[form](report)


# -- values --------------------------------------------------------------------------------------


def _iso(seconds: Value) -> str | None:
    """ISO 8601 in UTC to the second; None for a time that is none."""
    if isinstance(seconds, str) or seconds is None or not math.isfinite(seconds):
        return None
    try:
        moment = datetime.fromtimestamp(math.floor(seconds), UTC)
    except (OverflowError, OSError, ValueError):
        return None
    return moment.isoformat().replace("+00:00", "Z")


def _span(seconds: float) -> str:
    """``1 d 2 h``: the two largest units."""
    left = max(0, round(seconds))
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
        if len(parts) == 2 or (parts and unit == "min"):
            break
    return " ".join(parts) or "0 s"


def _size(count: int) -> str:
    """Exact, and in words where it is long: ``1,610,612,736 B (1.5 GiB)``."""
    size, unit = float(count), ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            break
        size /= 1024
    return f"{count:,} B" if unit == "B" else f"{count:,} B ({size:.1f} {unit})"


def _words(value: Value, kind: Kind) -> str:
    """For people."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if kind is Kind.TIME:
        return _iso(value) or "-"
    if kind is Kind.SPAN:
        return _span(value) if math.isfinite(value) else "-"
    if kind is Kind.BYTES:
        return _size(int(value))
    return f"{value:,}"


def _raw(value: Value, kind: Kind) -> Value:
    """For programs: numbers as such, times in ISO 8601."""
    if kind is Kind.TIME:
        return _iso(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _clean(text: str) -> str:
    """On one line, and nothing in it that is not shown: control characters and what turns the
    direction of a text around are written as escapes."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def _verdict(one: Answer) -> str:
    if one.good is False and not one.must:
        return "no (advised only)"
    return {True: "yes", False: "NO", None: ""}[one.good]


_ONLY_HERE: Final = "this report"
"""Where a command would stand, if one showed the same."""


def _period(report: Report) -> str:
    since, until = _iso(report.since), _iso(report.until)
    if since is None and until is None:
        return "everything that the vault knows"
    return f"from {since or 'the beginning'} until {until or 'now'}"


def _head(report: Report) -> list[tuple[str, str]]:
    return [
        ("Vault", f"{_clean(report.vault)} (id {report.vault_id})"),
        ("Made at", f"{_iso(report.made_at)} (the vault's own time)"),
        ("Period", _period(report)),
        ("Asked by", "; ".join(report.asked)),
        ("Made with", f"kvvault {report.version}"),
    ]


# -- Markdown ------------------------------------------------------------------------------------

_MARKUP: Final = str.maketrans(
    {char: f"\\{char}" for char in "\\`*_[]|~#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)


def _md(text: str) -> str:
    return inert(text, lambda part: part.translate(_MARKUP))


def _md_code(text: str) -> str:
    """Commands: of ours, with nothing in it that needs an escape but a pipe."""
    return f"`{_clean(text).replace('`', '').replace('|', '&#124;')}`" if text else _ONLY_HERE


def _md_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md_table(table: Table) -> list[str]:
    lines = ["", f"## {_md(table.title)}", ""]
    if table.note:
        lines += [_md(_clean(table.note)), ""]
    if not table.rows:
        return [*lines, "None.", "", f"Shown by {_md_code(table.command)}."]
    right = [column.kind in (Kind.COUNT, Kind.BYTES) for column in table.columns]
    lines += [
        _md_row([_md(column.title) for column in table.columns]),
        "|" + "".join("---:|" if one else "---|" for one in right),
    ]
    for row in table.rows:
        pairs = zip(row, table.columns, strict=True)
        lines.append(_md_row([_md(_words(value, column.kind)) for value, column in pairs]))
    return [*lines, "", f"Shown by {_md_code(table.command)}."]


def _markdown(report: Report) -> str:
    lines = [f"# {_md(report.title)}", ""]
    lines += [f"- {name}: {_md(text)}" for name, text in _head(report)]
    lines += ["", "## Answers", "", "| asked | answer | as it must be | shown by |"]
    lines.append("|---|---|---|---|")
    lines += [
        _md_row(
            [
                _md(one.what),
                _md(_words(one.value, one.kind)),
                _verdict(one),
                _md_code(one.command),
            ]
        )
        for one in report.answers
    ]
    for table in report.tables:
        lines += _md_table(table)
    for title, text in report.statements:
        lines += ["", f"## {_md(title)}", "", _md(_clean(text))]
    return "\n".join(lines) + "\n"


# -- HTML ----------------------------------------------------------------------------------------

_STYLE: Final = """\
body { font: 10.5pt/1.45 system-ui, sans-serif; color: #111; background: #fff; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2em 1em; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { border: 1px solid #999; padding: .25em .5em; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { background: #eee; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { font-weight: 700; color: #a00; } .by { color: #444; font-size: .9em; }
@media print { body { margin: 0; max-width: none; } tr { break-inside: avoid; }
  thead { display: table-header-group; } h2 { break-after: avoid; } }
@page { margin: 15mm; }
"""


_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded or run, whatever got into the page."""


def _esc(text: str) -> str:
    return html.escape(text, quote=True)


def _code(text: str) -> str:
    return f"<code>{_esc(_clean(text))}</code>" if text else _ONLY_HERE


def _html_answer(one: Answer) -> str:
    verdict = "<td></td>"
    if one.good is not None:
        bad = not one.good and one.must
        verdict = f'<td class="{"bad" if bad else ""}">{_verdict(one)}</td>'
    number = ' class="n"' if one.kind in (Kind.COUNT, Kind.BYTES) else ""
    return (
        f"<tr><td>{_esc(one.what)}</td><td{number}>{_esc(_words(one.value, one.kind))}</td>"
        f"{verdict}<td>{_code(one.command)}</td></tr>"
    )


def _html_table(table: Table) -> list[str]:
    lines = [f"<h2>{_esc(table.title)}</h2>"]
    if table.note:
        lines.append(f"<p>{_esc(_clean(table.note))}</p>")
    if table.rows:
        heads = "".join(f'<th scope="col">{_esc(column.title)}</th>' for column in table.columns)
        lines.append(f"<table><thead><tr>{heads}</tr></thead><tbody>")
        for row in table.rows:
            cells = ""
            for value, column in zip(row, table.columns, strict=True):
                number = ' class="n"' if column.kind in (Kind.COUNT, Kind.BYTES) else ""
                cells += f"<td{number}>{_esc(_words(value, column.kind))}</td>"
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</tbody></table>")
    else:
        lines.append("<p>None.</p>")
    lines.append(f'<p class="by">Shown by {_code(table.command)}.</p>')
    return lines


def _html(report: Report) -> str:
    """One page with all it needs in it: no script, nothing from elsewhere, fit for printing."""
    title = _esc(report.title)
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{title}</title><style>\n{_STYLE}</style></head><body>",
        f"<h1>{title}</h1><dl>",
    ]
    lines += [f"<dt>{name}</dt><dd>{_esc(text)}</dd>" for name, text in _head(report)]
    lines.append("</dl><h2>Answers</h2>")
    lines.append(
        '<table><thead><tr><th scope="col">asked</th><th scope="col">answer</th>'
        '<th scope="col">as it must be</th><th scope="col">shown by</th></tr></thead><tbody>'
    )
    lines += [_html_answer(one) for one in report.answers]
    lines.append("</tbody></table>")
    for table in report.tables:
        lines += _html_table(table)
    for heading, text in report.statements:
        lines.append(f"<h2>{_esc(heading)}</h2><p>{_esc(_clean(text))}</p>")
    lines.append("</body></html>")
    return "\n".join(lines) + "\n"


# -- JSON ----------------------------------------------------------------------------------------


def as_document(report: Report) -> dict[str, object]:
    """What the JSON form holds."""
    return {
        "report": report.kind.value,
        "title": report.title,
        "asked": list(report.asked),
        "vault": report.vault,
        "vault_id": report.vault_id,
        "made_at": _iso(report.made_at),
        "since": _iso(report.since),
        "until": _iso(report.until),
        "version": report.version,
        "good": report.good,
        "answers": [
            {
                "name": one.name,
                "what": one.what,
                "value": _raw(one.value, one.kind),
                "unit": one.kind.value,
                "good": one.good,
                "must": one.must,
                "command": one.command,
            }
            for one in report.answers
        ],
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "note": table.note,
                "command": table.command,
                "rows": [
                    {
                        column.name: _raw(value, column.kind)
                        for value, column in zip(row, table.columns, strict=True)
                    }
                    for row in table.rows
                ],
            }
            for table in report.tables
        ],
        "statements": [{"title": title, "text": text} for title, text in report.statements],
    }


def _json(report: Report) -> str:
    return json.dumps(as_document(report), indent=2, allow_nan=False) + "\n"


# -- CSV -----------------------------------------------------------------------------------------

_FORMULA: Final = "=+-@\uff1d\uff0b\uff0d\uff20"
"""A cell that begins with one of them is run by some spreadsheet; the last four are full width."""


_AFTER_SEMICOLON: Final = re.compile(rf";(?=[\s\"']*[{re.escape(_FORMULA)}])")
"""Where semicolons separate columns a cell begins behind each; quotation marks around ours do not
keep that from happening."""


def _csv_cell(value: Value, kind: Kind = Kind.TEXT) -> Value:
    value = _raw(value, kind)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, str):
        return value
    text = _AFTER_SEMICOLON.sub(";'", _clean(value))
    return f"'{text}" if text.startswith(tuple(_FORMULA)) else text


def _csv(report: Report) -> str:
    """Blocks one below the other, an empty line between them: what the report is, the answers, each
    table. Each block has a title, a line of column names, and the command in every row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")

    def block(title: str, names: list[str], rows: list[list[Value]]) -> None:
        writer.writerow([title])
        writer.writerow(names)
        writer.writerows(rows)
        out.write("\n")

    block("report", ["field", "value"], [
        ["report", report.kind.value],
        *([name, _csv_cell(text)] for name, text in _head(report)),
        ["good", "yes" if report.good else "no"],
    ])  # fmt: skip
    block("answers", ["name", "what", "value", "unit", "good", "must", "command"], [
        [
            one.name,
            _csv_cell(one.what),
            _csv_cell(one.value, one.kind),
            one.kind.value,
            _csv_cell(one.good),
            _csv_cell(one.must),
            one.command,
        ]
        for one in report.answers
    ])  # fmt: skip
    for table in report.tables:
        block(table.name, [*(column.name for column in table.columns), "command"], [
            [
                *(
                    _csv_cell(value, column.kind)
                    for value, column in zip(row, table.columns, strict=True)
                ),
                table.command,
            ]
            for row in table.rows
        ])  # fmt: skip
    block("statements", ["title", "text"], [[a, _csv_cell(b)] for a, b in report.statements])
    return out.getvalue().rstrip("\n") + "\n"


_RENDERERS: Final[dict[Format, Callable[[Report], str]]] = {
    Format.MARKDOWN: _markdown,
    Format.HTML: _html,
    Format.JSON: _json,
    Format.CSV: _csv,
}
