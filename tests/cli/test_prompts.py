"""`kvvault prompts ls`, `show`, `subjects` and `df`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvvault.catalog.database import direct
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, TENANTS, run

PROMPT = {
    "id",
    "tenant_id",
    "tenant",
    "subject",
    "labels",
    "request",
    "fingerprint",
    "preview",
    "namespace",
    "model",
    "first_used",
    "last_used",
    "tokens",
    "blocks",
    "bytes",
    "alone_blocks",
    "alone",
    "shared",
    "first_deadline",
    "deadline",
    "rules",
    "classes",
    "holds",
}
PART = {
    "segment",
    "stored_at",
    "deadline",
    "rule",
    "class",
    "own_blocks",
    "reused_blocks",
    "tokens",
}
SUBJECT = {
    "id",
    "tenant_id",
    "tenant",
    "subject",
    "prompts",
    "alone",
    "first_used",
    "last_used",
    "deadline",
    "holds",
}
GROUP = {"group", "prompts", "blocks", "bytes", "nobodys_blocks", "nobodys_bytes"}


def asked(place: Place) -> list[dict[str, object]]:
    with Vault.open(place.path, provider=place.key, read_only=True) as vault:
        rows = vault.catalog.read(lambda c: direct(c, "SELECT body FROM log_entries")[0])
    entries = [json.loads(str(row[0])) for row in rows]
    return [entry for entry in entries if entry["kind"] == "question"]


def test_prompts_are_listed(filled: Place) -> None:
    result = run("prompts", "ls", *filled.flags, "--json")
    assert result.code == 0
    document = result.document
    assert set(document) == {"prompts", "total"}
    assert document["total"] == 3
    assert all(set(row) == PROMPT for row in document["prompts"])
    found = {row["request"]: row for row in document["prompts"]}
    assert found["r2"]["subject"] == "joe"
    assert found["r2"]["labels"] == {"team": "x"}
    assert (found["r2"]["bytes"], found["r2"]["alone"], found["r2"]["shared"]) == (
        4 * BLOCK,
        2 * BLOCK,
        2 * BLOCK,
    )
    assert found["r3"]["tenant"] == TENANTS[1]


def requests(*arguments: str) -> set[str]:
    return {
        row["request"] for row in run("prompts", "ls", *arguments, "--json").document["prompts"]
    }


def test_filters_sort_and_limit(filled: Place) -> None:
    flags = filled.flags
    assert requests("--filter", "subject=jane", *flags) == {"r1"}
    assert requests("--filter", "bytes>13KB", *flags) == {"r2"}
    assert requests("--filter", f"tenant={TENANTS[0]}", "--filter", "tokens<=48", *flags) == {"r1"}
    assert requests("--filter", "label.team=x", "--filter", "age<1h", *flags) == {"r1", "r2", "r3"}
    assert requests("--filter", "age>1h", *flags) == set()
    assert requests("--tenant", TENANTS[1], *flags) == {"r3"}
    assert requests("--sort", "bytes:desc", "--limit", "1", *flags) == {"r2"}
    assert requests("--limit", "1", "--all", *flags) == {"r1", "r2", "r3"}
    for wrong in ("colour=red", "bytes>many", "subject>x", "nonsense", "age=soon", "blocks=-1"):
        result = run("prompts", "ls", "--filter", wrong, *flags)
        assert result.code == 2
        result.assert_two_lines()
    assert run("prompts", "ls", "--sort", "bytes:up", *flags).code == 2
    secret = run("prompts", "ls", "--filter", "tenant>secret", *flags)
    assert "secret" not in secret.err


def test_for_people(filled: Place) -> None:
    listed = run("prompts", "ls", *filled.flags, "--limit", "2")
    assert listed.code == 0
    head, *rows = listed.out.splitlines()
    assert head.split()[:4] == ["PROMPT", "TENANT", "SUBJECT", "REQUEST"]
    assert len(rows) == 2
    assert "2 of 3 shown" in listed.err
    short = rows[0].split()[0]
    shown = run("prompts", "show", short, *filled.flags)
    assert shown.code == 0
    assert "shared_with" in shown.out
    assert "SEGMENT" in shown.out
    subjects = run("prompts", "subjects", *filled.flags)
    assert [line.split()[:2] for line in subjects.out.splitlines()[1:]] == [
        [TENANTS[0], "jane"],
        [TENANTS[0], "joe"],
    ]
    usage = run("prompts", "df", "--by", "model", *filled.flags)
    assert usage.out.splitlines()[1].split()[0] == "tiny"


def test_one_prompt_in_full(filled: Place) -> None:
    rows = run("prompts", "ls", *filled.flags, "--json").document["prompts"]
    [row] = [row for row in rows if row["request"] == "r2"]
    document = run("prompts", "show", row["id"][:8], *filled.flags, "--json").document
    assert set(document) == {*PROMPT, "shared_with", "parts"}
    assert {name: document[name] for name in PROMPT} == row
    assert document["shared_with"] == 1
    assert all(set(part) == PART for part in document["parts"])
    assert sum(part["own_blocks"] for part in document["parts"]) == 2
    assert run("prompts", "show", "0" * 16, *filled.flags).code == 2
    assert run("prompts", "show", "12", *filled.flags).code == 2


def test_subjects_and_usage(filled: Place) -> None:
    subjects = run("prompts", "subjects", "--tenant", TENANTS[0], *filled.flags, "--json").document
    assert all(set(row) == SUBJECT for row in subjects["subjects"])
    assert [row["subject"] for row in subjects["subjects"]] == ["jane", "joe"]
    usage = run("prompts", "df", *filled.flags, "--json").document
    assert usage["by"] == "tenant"
    assert all(set(row) == GROUP for row in usage["groups"])
    by_name = {row["group"]: row for row in usage["groups"]}
    assert by_name[TENANTS[0]]["prompts"] == 2
    assert by_name[TENANTS[0]]["nobodys_blocks"] == 6  # what the vault had before
    assert run("prompts", "df", "--by", "colour", *filled.flags).code == 2


def test_every_question_is_an_entry_of_the_log(filled: Place) -> None:
    flags = filled.flags
    before = len(asked(filled))
    run("prompts", "ls", *flags)
    run("prompts", "ls", "--tenant", TENANTS[0], *flags)
    run("prompts", "ls", "--filter", f"tenant={TENANTS[0]}", *flags)
    run("prompts", "subjects", *flags)
    run("prompts", "df", *flags)
    ident = run("prompts", "ls", *flags, "--json").document["prompts"][0]["id"]
    run("prompts", "show", ident, *flags)
    entries = asked(filled)[before:]
    assert [(e["command"], e["rows"]) for e in entries] == [
        ("prompts ls", 3),
        ("prompts ls", 2),
        ("prompts ls", 2),
        ("prompts subjects", 2),
        ("prompts df", 2),
        ("prompts ls", 3),
        ("prompts show", 1),
    ]
    assert entries[0]["tenant"] is None
    assert entries[1]["tenant"] == entries[2]["tenant"] is not None
    text = json.dumps(entries)
    for secret in (*TENANTS, "jane", "joe", "r1", ident):
        assert secret not in text


def test_that_there_is_none_is_an_answer_too(filled: Place) -> None:
    """Whether a tenant exists is what a guesser wants to know."""
    before = len(asked(filled))
    guess = ("--tenant", "a-guess")
    for question in (
        ("prompts", "ls", *guess),
        ("prompts", "subjects", *guess),
        ("prompts", "df", *guess),
        ("prompts", "show", "00" * 8),
        ("hold", "set", "--prompt", "00" * 8, "--reason", "x"),
        ("erase", "--prompt", "00" * 8, "--reason", "x", "-n"),
        ("erase", "--subject", "jane", *guess, "--reason", "x", "-n"),
    ):
        assert run(*question, *filled.flags).code == 2, question
    entries = asked(filled)[before:]
    assert [(e["command"], e["rows"], e["tenant"]) for e in entries] == [
        ("prompts ls", 0, None),
        ("prompts subjects", 0, None),
        ("prompts df", 0, None),
        ("prompts show", 0, None),
        ("hold set", 0, None),
        ("erase (plan)", 0, None),
        ("erase (plan)", 0, None),
    ]


@pytest.fixture
def unwritable(filled: Place) -> Iterator[Place]:
    """A catalog that somebody else keeps locked for writing."""
    import pysqlite3.dbapi2 as sqlite

    connection = sqlite.connect(str(filled.path / "catalog.sqlite3"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield filled
    connection.execute("ROLLBACK")
    connection.close()


def test_a_question_that_cannot_be_written_down_is_not_answered(
    unwritable: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvvault.catalog.database.BUSY_TIMEOUT_S", 0.2)
    result = run("prompts", "ls", *unwritable.flags)
    assert result.code == 11
    result.assert_two_lines()
    assert "r1" not in result.out
