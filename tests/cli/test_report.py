"""`kvvault report`: exit codes, options and where it is written. What it says: tests/reporting."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.cli.support import TENANTS, run
from tests.cli.test_keys import catalog


@pytest.fixture
def place(place: Place, tmp_path: Path) -> Place:
    """With a key file of its own: purges change it."""
    own = tmp_path / "own.key"
    own.write_bytes(Path(place.key.removeprefix("file:")).read_bytes())
    own.chmod(0o600)
    return Place(place.path, f"file:{own}")


REPORTS = ("retention", "disposals", "encryption", "ropa")


@pytest.mark.parametrize("which", REPORTS)
def test_every_report_in_every_form(place: Place, which: str) -> None:
    markdown = run("report", which, *place.flags)
    assert markdown.code == 0
    assert markdown.out.startswith("# ")
    assert markdown.err == ""
    page = run("report", which, *place.flags, "--format", "html")
    assert page.out.startswith("<!doctype html>")
    assert page.out.rstrip().endswith("</html>")
    document = run("report", which, *place.flags, "--json").document
    assert document["report"] == which
    assert document == run("report", which, *place.flags, "--format", "json").document | {
        key: document[key] for key in ("made_at", "answers", "tables")
    }
    table = run("report", which, *place.flags, "--format", "csv")
    assert table.out.startswith("report\nfield,value\n")


def test_json_fields(place: Place) -> None:
    document = run("report", "retention", *place.flags, "--json").document
    assert set(document) == {
        "report",
        "title",
        "asked",
        "vault",
        "vault_id",
        "made_at",
        "since",
        "until",
        "version",
        "good",
        "answers",
        "tables",
        "statements",
    }
    assert set(document["answers"][0]) == {
        "name",
        "what",
        "value",
        "unit",
        "good",
        "must",
        "command",
    }
    assert set(document["tables"][0]) == {"name", "title", "note", "command", "rows"}


def late(place: Place) -> tuple[int, int, int]:
    """Exit code of the retention report, and the first and the last of its three numbers."""
    result = run("report", "retention", *place.flags, "--json")
    answers = {one["name"]: one["value"] for one in result.document["answers"]}
    return result.code, answers["overdue_segments"], answers["overdue_purges"]


def test_the_exit_code_tells_whether_anything_is_overdue(place: Place) -> None:
    assert late(place) == (0, 0, 0)
    with catalog(place) as connection:
        connection.execute("UPDATE segments SET delete_by = created_at - 100")
    code, segments, purges = late(place)
    assert (code, purges) == (1, 0)
    assert segments == 2
    assert run("report", "disposals", *place.flags).code == 0
    assert run("expire", "--yes", *place.flags).code == 0
    assert late(place) == (0, 0, 0)
    with catalog(place) as connection:
        connection.execute("UPDATE deletions SET revoked_at = revoked_at - 2 * 86400")
    code, segments, purges = late(place)
    assert (code, segments) == (1, 0)
    assert purges >= 1
    assert run("purge", *place.flags).code == 0
    assert late(place) == (0, 0, 0)


def test_a_vault_that_was_closed_for_weeks_is_no_success(place: Place) -> None:
    """What was due meanwhile is not served, but its keys wait for a word about the clock."""
    back = 30 * 86400
    with catalog(place) as connection:
        connection.execute(
            "UPDATE segments SET delete_by = delete_by - ?, created_at = created_at - ?",
            (back, back),
        )
        connection.execute(
            "UPDATE counters SET value = value - ? WHERE name = 'time_mark_ms'", (1000 * back,)
        )
    assert late(place) == (1, 0, 0)
    assert run("clock", "accept", "--yes", *place.flags).code == 0
    assert run("expire", "--yes", *place.flags).code == 0
    assert late(place) == (0, 0, 0)


def test_what_a_hold_keeps_is_no_failure(place: Place) -> None:
    for tenant in TENANTS:
        assert run("hold", "set", "--tenant", tenant, "--reason", "x", *place.flags).code == 0
    with catalog(place) as connection:
        connection.execute("UPDATE segments SET delete_by = created_at - 100")
    assert late(place) == (0, 0, 0)
    with catalog(place) as connection:
        connection.execute("DELETE FROM holds WHERE hold_no = 1")
    assert late(place) == (1, 1, 0)


def test_a_report_is_written_whole_and_for_its_owner_only(place: Place, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    target.chmod(0o644)
    result = run("report", "encryption", *place.flags, "--format", "html", "-o", target)
    assert (result.code, result.out) == (0, "")
    assert target.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]
    document = run("report", "ropa", *place.flags, "--json", "-o", target).document
    assert set(document) == {"report", "format", "file", "good"}
    assert json.loads(target.read_text())["report"] == "ropa"
    for nowhere in (tmp_path / "no" / "where.md", tmp_path, ".", "/", ".."):
        refused = run("report", "ropa", *place.flags, "-o", nowhere)
        assert refused.code == 1, nowhere
        refused.assert_two_lines()
        assert "cannot be written" in refused.err


def test_the_exit_code_is_1_exactly_when_a_row_says_no(place: Place) -> None:
    for which in REPORTS:
        result = run("report", which, *place.flags)
        assert (result.code, "| NO |" in result.out) == (0, False), which
    beside = place.path.parent / "beside.key"
    beside.write_bytes(Path(place.key.removeprefix("file:")).read_bytes())
    beside.chmod(0o600)
    advised = run("report", "encryption", *Place(place.path, f"file:{beside}").flags)
    assert (advised.code, "no (advised only)" in advised.out) == (0, True)
    os.utime(place.path / "VAULT", (0, 0))
    late = run("report", "retention", *place.flags)
    assert (late.code, "jobs that are overdue | 6 | NO" in late.out) == (1, True)
    with catalog(place) as connection:
        connection.execute("UPDATE segments SET commitment = zeroblob(32)")
    broken = run("report", "encryption", *place.flags)
    assert (broken.code, "| NO |" in broken.out) == (1, True)


def test_the_overdue_exit_code_comes_with_a_file_too(place: Place, tmp_path: Path) -> None:
    with catalog(place) as connection:
        connection.execute("UPDATE segments SET delete_by = created_at - 100")
    target = tmp_path / "late.md"
    assert run("report", "retention", *place.flags, "-o", target).code == 1
    assert "| 2 | NO |" in target.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("ropa", "--since", "2026-01-01"),
        ("disposals", "--tenant", "acme-canary"),
        ("retention", "--subject", "x"),
        ("subject",),
        ("subject", "--tenant", "acme-canary"),
        ("disposals", "--since", "yesterday"),
        ("disposals", "--since", "2026-02-01", "--until", "2026-01-01"),
        ("retention", "--tenant", "nobody-canary"),
        ("subject", "--tenant", "nobody-canary", "--subject", "x"),
        ("everything",),
    ],
    ids=" ".join,
)
def test_usage_errors(place: Place, words: tuple[str, ...]) -> None:
    result = run("report", *words, *place.flags)
    assert result.code == 2
    result.assert_two_lines()
    assert "canary" not in result.err


def test_a_period_of_days(place: Place) -> None:
    segments = run("ls", "segments", *place.flags, "--json").document["segments"]
    assert run("rm", "--yes", segments[0]["id"], *place.flags).code == 0
    words = ("report", "disposals", *place.flags, "--json")

    def count(*period: str) -> int:
        answers = run(*words, *period).document["answers"]
        return int(next(one["value"] for one in answers if one["name"] == "deletions"))

    assert count() == 1
    assert count("--since", "2020-01-01") == 1
    assert count("--until", "2020-01-01") == 0
    assert count("--since", "2020-01-01", "--until", "2020-02-01T12:00:00Z") == 0


def test_that_there_is_no_such_tenant_is_an_answer_too(place: Place) -> None:
    words = ("report", "subject", "--tenant", "nobody-canary", "--subject", "x", *place.flags)
    assert run(*words).code == 2
    with catalog(place) as connection:
        bodies = [row[0] for row in connection.execute("SELECT body FROM log_entries")]
    [asked] = [said for body in bodies if (said := json.loads(body))["kind"] == "question"]
    assert (asked["command"], asked["rows"], asked["tenant"]) == ("report subject", 0, None)


def test_the_subject_report_writes_down_that_it_was_asked_for(place: Place) -> None:
    words = ("report", "subject", "--tenant", TENANTS[0], "--subject", "someone", *place.flags)
    document = run(*words, "--json").document
    answers = {one["name"]: one["value"] for one in document["answers"]}
    assert (answers["prompts"], answers["questions"]) == (0, 1)
    assert run(*words).code == 0
    with catalog(place) as connection:
        bodies = [row[0] for row in connection.execute("SELECT body FROM log_entries")]
    assert len([body for body in bodies if json.loads(body)["kind"] == "question"]) == 2
    assert "someone" not in "".join(bodies)
