"""Reports as Markdown, HTML, JSON and CSV: what is in them, and that nothing in them acts."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table, Value
from kvvault.reporting.rendering import Format, render

HOSTILE = [
    "=cmd|' /C calc'!A0",
    "  @SUM(1+1)",
    "+1",
    "-2+3",
    "\uff1dHYPERLINK()",
    "\t=1",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a | b | c",
    "[click](javascript:alert(1)) **bold** `code`",
    "two\nlines\r\nand # a heading",
    "right \u202e to left",
    "nul \x00 and esc \x1b[31m",
    "\\",
    "&lt;",
]


def report(*texts: Value, kind: Kind = Kind.TEXT, note: str = "") -> Report:
    return Report(
        kind=ReportKind.RETENTION,
        title="A title",
        asked=("GDPR 30",),
        vault="/srv/kv",
        vault_id="00ff",
        made_at=1_800_000_000.5,
        answers=tuple(
            Answer(f"a{n}", "what it is", text, "kvvault status", kind)
            for n, text in enumerate(texts)
        ),
        tables=(
            Table(
                "things",
                "Things",
                "kvvault ls",
                (Column("thing", "the thing", kind),),
                tuple((text,) for text in texts),
                note,
            ),
            Table("nothing", "Nothing", "kvvault ls", (Column("x", "x"),), ()),
        ),
        statements=(("Note", note),),
    )


class Page(html.parser.HTMLParser):
    """What a browser would make of a page: elements, and the text of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag == "td":
            self._cell = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.cells[-1] += data


def blocks(text: str) -> dict[str, list[dict[str, str]]]:
    """A CSV report's blocks by title, each row by column name."""
    found: dict[str, list[dict[str, str]]] = {}
    rows = list(csv.reader(io.StringIO(text)))
    while rows:
        end = rows.index([]) if [] in rows else len(rows)
        (title,), names, *body = rows[:end]
        found[title] = [dict(zip(names, row, strict=True)) for row in body]
        rows = rows[end + 1 :]
    return found


VALUES = [
    (1_610_612_736, Kind.BYTES, "1,610,612,736 B (1.5 GiB)", 1_610_612_736),
    (512, Kind.BYTES, "512 B", 512),
    (1234567, Kind.COUNT, "1,234,567", 1234567),
    (1_800_000_000.9, Kind.TIME, "2027-01-15T08:00:00Z", "2027-01-15T08:00:00Z"),
    (93784.0, Kind.SPAN, "1 d 2 h", 93784.0),
    (59.4, Kind.SPAN, "59 s", 59.4),
    (0.0, Kind.SPAN, "0 s", 0.0),
    (math.inf, Kind.TIME, "-", None),
    (math.inf, Kind.SPAN, "-", None),
    (True, Kind.FLAG, "yes", True),
    (None, Kind.COUNT, "-", None),
    ("text", Kind.TEXT, "text", "text"),
]


@pytest.mark.parametrize(("value", "kind", "words", "raw"), VALUES)
def test_values_are_written_for_people_and_for_programs(
    value: Value, kind: Kind, words: str, raw: Value
) -> None:
    made = report(value, kind=kind)
    assert f"| {words} |" in render(made, Format.MARKDOWN)
    assert words in Page(render(made, Format.HTML)).cells
    document = json.loads(render(made, Format.JSON))
    assert document["answers"][0]["value"] == raw
    assert document["tables"][0]["rows"] == [{"thing": raw}]
    (row,) = blocks(render(made, Format.CSV))["things"]
    assert row["thing"] == ("yes" if raw is True else "" if raw is None else str(raw))


@pytest.mark.parametrize("form", Format)
def test_each_answer_comes_with_its_command(form: Format) -> None:
    made = report("one", "two")
    text = render(made, form)
    assert text.endswith("\n")
    assert text.count("kvvault status") == 2
    if form is Format.CSV:
        assert [row["command"] for row in blocks(text)["things"]] == ["kvvault ls"] * 2


def test_json_is_one_ascii_document_with_everything_as_it_is() -> None:
    text = render(report(*HOSTILE), Format.JSON)
    assert text.isascii()
    document = json.loads(text)
    assert [one["value"] for one in document["answers"]] == HOSTILE
    assert document["good"] is True
    assert document["made_at"] == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_becomes_markup_of_a_page(hostile: str) -> None:
    harmless = Page(render(report("x", note="y"), Format.HTML))
    made = report(hostile, note=hostile)
    page = Page(render(made, Format.HTML))
    assert page.elements == harmless.elements
    assert [name for name, _ in page.attributes] == [name for name, _ in harmless.attributes]
    assert "script" not in page.elements
    # ... and it is shown, control characters as escapes.
    shown = [cell for cell in page.cells if cell not in harmless.cells]
    expected = " ".join(hostile.split())
    assert {cell.replace("\\u202e", "\u202e").replace("\\x00", "\x00").replace("\\x1b", "\x1b")
            for cell in shown} == {expected}  # fmt: skip


def test_a_page_stands_alone() -> None:
    text = render(report("x"), Format.HTML)
    page = Page(text)
    assert "link" not in page.elements
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "@media print" in text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_breaks_a_markdown_table(hostile: str) -> None:
    def shape(text: str) -> list[tuple[str, int]]:
        # Kind of each line, and how many pipes of a table it has.
        return [(line[:1], line.replace("\\|", "").count("|")) for line in text.splitlines()]

    harmless = render(report("x", note="y"), Format.MARKDOWN)
    made = render(report(hostile, note="y"), Format.MARKDOWN)
    assert shape(made) == shape(harmless)
    assert "<" not in made
    assert "](" not in made.replace("\\](", "")
    assert all(char.isprintable() or char == "\n" for char in made)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_is_a_formula_for_a_spreadsheet(hostile: str) -> None:
    made = report(hostile, note=hostile)
    text = render(made, Format.CSV)
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            assert not cell.lstrip().startswith(tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")), cell
    # Control: the text is there, and numbers are left as numbers.
    assert " ".join(hostile.split())[:3] in text or "\\" in text
    negative = blocks(render(report(-5, kind=Kind.COUNT), Format.CSV))
    assert negative["things"][0]["thing"] == "-5"


@pytest.mark.parametrize("before", ["r1;", "r1; ", 'r1;"', "a;b;;", "r1;\t", "r1;'\" "])
@pytest.mark.parametrize("formula", ["=cmd|'/c calc'!A1", "@SUM(1)", "+1", "-2", "\uff1dX()"])
def test_no_part_of_a_text_is_a_formula_where_semicolons_separate(
    before: str, formula: str
) -> None:
    """As in the spreadsheets of half of Europe."""
    hostile = before + formula
    text = render(report(hostile, note=hostile), Format.CSV)
    for row in csv.reader(io.StringIO(text), delimiter=";"):
        for cell in row:
            assert not cell.lstrip("\"' ").startswith(tuple("=+-@\uff1d")) or cell.startswith("'")
    assert "r1; a-b; c" in render(report("r1; a-b; c"), Format.CSV)  # the control


LIVE = [
    "https://evil.example/x",
    "(HTTP://evil.example)",
    "WWW.evil.example",
    "somebody@evil.example",
    "@all",
    "$x^2$",
    "mailto:a@b.example|www.x.example\\|`ftp://c`",
]


@pytest.mark.parametrize("live", LIVE)
def test_no_text_comes_to_life_in_markdown(live: str) -> None:
    """As GitHub and others make links, mentions and formulas of words; in code they do not."""
    made = report(f"see {live} there", note=f"see {live} there")
    text = render(made, Format.MARKDOWN)
    outside = re.sub(r"(?<!\\)`[^`]*`", "", text)
    assert not re.search(r"[@$]|://|www\.", outside, re.IGNORECASE)
    assert live.split("|", maxsplit=1)[0].strip("()") in text  # the control: it is shown
    assert text.count("\n") == render(report("see", note="see"), Format.MARKDOWN).count("\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    harmless = render(report("see", note="see"), Format.MARKDOWN)
    expected = [line.count("|") for line in harmless.splitlines() if line.startswith("|")]
    assert [re.sub(r"\\.", "", row).count("|") for row in rows] == expected


@given(st.text())
def test_any_text_keeps_every_form_whole(text: str) -> None:
    made = report(text, note=f"note {text}")
    assert blocks(render(made, Format.CSV)).keys() == {
        "report",
        "answers",
        "things",
        "nothing",
        "statements",
    }
    assert json.loads(render(made, Format.JSON))["answers"][0]["value"] == text
    harmless = Page(render(report("x", note="y"), Format.HTML))
    assert Page(render(made, Format.HTML)).elements == harmless.elements
    lines = render(made, Format.MARKDOWN).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 6


def test_a_table_with_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 fields"):
        Table("t", "T", "c", (Column("a", "a"), Column("b", "b")), (("x",),))


def test_good_is_what_nothing_contradicts() -> None:
    def of(*verdicts: bool | None) -> Report:
        answers = tuple(Answer("n", "w", 0, "c", Kind.COUNT, good) for good in verdicts)
        return Report(ReportKind.ROPA, "t", (), "/", "00", 0.0, answers)

    assert of(None, True).good
    assert not of(None, True, False).good
    assert "| NO |" in render(of(False), Format.MARKDOWN)
    advice = Answer("n", "w", 0, "", Kind.COUNT, good=False, must=False)
    made = Report(ReportKind.ROPA, "t", (), "/", "00", 0.0, (advice,))
    assert made.good
    assert "| no (advised only) | this report |" in render(made, Format.MARKDOWN)
    assert "bad" not in render(made, Format.HTML).split("</style>")[1]
    assert "NO" not in render(of(True, None), Format.MARKDOWN).split("Answers")[1]
