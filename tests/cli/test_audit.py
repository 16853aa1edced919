"""audit and receipt: what they print, and what they exit with."""

from __future__ import annotations

import json
import sqlite3
import stat
from pathlib import Path

import pytest

from kvvault.catalog.log import canonical
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import TENANTS, Result, fill, run


@pytest.fixture
def deleted(place: Place) -> Place:
    """A vault of which something was deleted."""
    result = run(
        "forget", "acme-canary", "--reason", "they left", "--actor", "me", "-y", *place.flags
    )
    assert result.code == 0, result.err
    return place


def ids(place: Place) -> list[str]:
    rows = run("receipt", "ls", *place.flags, "--json").document["receipts"]
    return [row["id"] for row in rows]


def assert_error(result: Result, code: int, text: str) -> None:
    assert result.code == code
    result.assert_two_lines()
    assert text in result.err


def test_tail(deleted: Place) -> None:
    result = run("audit", "tail", "-n", "2", *deleted.flags)
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) == 3
    assert "deletion" in lines[1]
    assert "trigger=forget" in lines[1]
    assert "receipt" in lines[2]
    document = run("audit", "tail", *deleted.flags, "--json").document
    assert [entry["index"] for entry in document["entries"]] == list(range(document["size"]))
    assert set(document["entries"][0]) == {"index", "at", "kind", "facts"}


def test_the_log_is_checked_with_files_alone(deleted: Place, tmp_path: Path) -> None:
    log, key, note = tmp_path / "log", tmp_path / "key", tmp_path / "note"
    assert run("audit", "checkpoint", "-o", note, *deleted.flags).code == 0
    assert run("audit", "export", "-o", log, *deleted.flags).code == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in (note, log)} == {0o600}
    key.write_text(run("audit", "key", *deleted.flags).out)
    offline = ("audit", "verify", "--log", log, "--key", key, "--against", note)
    result = run(*offline)
    assert result.code == 0, result.out + result.err
    assert "agrees with 1 checkpoint, 1 of them given with --against" in result.out
    assert result.err == ""
    text = log.read_text()
    log.write_text(text.replace('"trigger":"forget"', '"trigger":"expire"'))
    result = run(*offline, "--json")
    assert result.code == 1
    assert not result.document["ok"]
    at = next(n for n, line in enumerate(text.splitlines()) if '"trigger":"forget"' in line)
    assert result.document["findings"][0]["where"] == f"entry {at}"
    log.write_text("".join(text.splitlines(keepends=True)[:-1]))
    result = run(*offline)
    assert result.code == 1
    assert "FAIL the log" in result.out


def test_a_vault_is_checked_against_what_was_kept_elsewhere(deleted: Place, tmp_path: Path) -> None:
    note = tmp_path / "note"
    result = run("audit", "verify", *deleted.flags)
    assert result.code == 0
    assert "no checkpoint that was kept elsewhere" in result.err
    assert run("audit", "checkpoint", "--output", note, *deleted.flags).code == 0
    result = run("audit", "verify", "--against", note, *deleted.flags)
    assert result.code == 0
    assert result.err == ""
    with sqlite3.connect(deleted.path / "catalog.sqlite3") as catalog:
        catalog.execute("DELETE FROM checkpoints")
        catalog.execute("DELETE FROM receipts")
        catalog.execute("DELETE FROM log_entries WHERE body LIKE '%receipt%'")
    assert run("audit", "verify", *deleted.flags).code == 0
    result = run("audit", "verify", "--against", note, *deleted.flags)
    assert result.code == 1
    assert "older copy of the catalog" in result.out


def test_a_checkpoint_on_stdout_is_the_note(deleted: Place, tmp_path: Path) -> None:
    note = tmp_path / "note"
    printed = run("audit", "checkpoint", *deleted.flags).out
    assert run("audit", "checkpoint", "-o", note, *deleted.flags).code == 0
    assert note.read_text() == printed  # nothing was added: the same one
    document = run("audit", "checkpoint", *deleted.flags, "--json").document
    assert set(document) == {"written", "checkpoint", "size", "root"}
    assert document["checkpoint"] == printed


def test_another_key_than_the_known_one_is_found(deleted: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run("init", "--vault", other, "--key-provider", f"file:{tmp_path / 'k'}").code == 0
    key = run("audit", "key", "--vault", other).out.strip()
    result = run("audit", "verify", "--key", key, *deleted.flags)
    assert result.code == 1
    assert "FAIL the signing key" in result.out
    own = run("audit", "key", *deleted.flags).out.strip()
    assert run("audit", "verify", "--key", own, *deleted.flags).code == 0
    assert set(run("audit", "key", *deleted.flags, "--json").document) == {
        "key",
        "name",
        "key_id",
        "public_key",
    }


def test_receipts_are_listed_and_shown(deleted: Place, tmp_path: Path) -> None:
    [first] = ids(deleted)
    row = run("receipt", "ls", *deleted.flags, "--json").document["receipts"][0]
    assert (row["phase"], row["trigger"], row["blocks"]) == ("revoked", "forget", 6)
    assert first in run("receipt", "ls", *deleted.flags).out
    shown = run("receipt", "show", first[:10], *deleted.flags)
    assert shown.code == 0
    assert shown.out.startswith(f"Receipt {first}: revoked\n\nWhat was deleted\n  Deletion")
    assert "they left" in shown.out
    assert "\\" not in shown.out
    assert "unrecoverable" not in shown.out  # the key is a file
    assert run("receipt", "show", first, "--format", "text", *deleted.flags).out == shown.out
    markdown = run("receipt", "show", first, "--format", "md", *deleted.flags).out
    assert markdown.startswith(f"# Receipt {first}: revoked")
    assert "\\-" in markdown
    file = tmp_path / "receipt.md"
    assert run("receipt", "show", first, "-o", file, *deleted.flags).code == 0
    assert file.read_text() == markdown
    page = tmp_path / "receipt.html"
    result = run("receipt", "show", first, "--format", "html", "-o", page, *deleted.flags)
    assert result.code == 0
    assert result.out == ""
    assert page.read_text().startswith("<!doctype html>")


def test_a_receipt_is_checked_with_its_file_alone(deleted: Place, tmp_path: Path) -> None:
    [first] = ids(deleted)
    file, key = tmp_path / "receipt.json", run("audit", "key", *deleted.flags).out.strip()
    run("receipt", "show", first, "--format", "json", "-o", file, *deleted.flags)
    proven = tmp_path / "proven.json"
    assert run("audit", "prove", first, "-o", proven, *deleted.flags).code == 0
    assert proven.read_bytes() == file.read_bytes()
    assert run("audit", "prove", file, *deleted.flags).out.encode() == file.read_bytes()
    result = run("receipt", "verify", file, "--key", key)
    assert result.code == 0
    assert "is genuine, with proof that it is in the log" in result.out
    result = run("receipt", "verify", file)
    assert result.code == 0
    assert "whose key that is was not checked" in result.out
    assert "--key" in result.err
    document = run("receipt", "verify", file, "--key", key, "--json").document
    assert document["ok"]
    assert document["key_given"]
    assert document["in_log"]
    file.write_text(file.read_text().replace("they left", "we think"))
    result = run("receipt", "verify", file, "--key", key)
    assert result.code == 1
    assert f"FAIL receipt {first}: altered" in result.out
    assert not run("receipt", "verify", file, "--json").document["ok"]


def test_json_of_a_receipt_is_what_verify_takes(deleted: Place, tmp_path: Path) -> None:
    [first] = ids(deleted)
    file = tmp_path / "receipt.json"
    document = run("receipt", "show", first, *deleted.flags, "--json").document
    file.write_text(json.dumps(document))
    assert run("receipt", "verify", file).code == 0


def test_a_purge_adds_the_second_receipt(tmp_path: Path) -> None:
    """In a vault of its own: a purge takes the root key that the others share."""
    path = tmp_path / "vault"
    with Vault.create(path, provider=f"file:{tmp_path / 'key'}") as vault:
        fill(vault)
        vault.forget(TENANTS[0])
    assert run("purge", "--vault", path).code == 0
    rows = run("receipt", "ls", "--vault", path, "--json").document["receipts"]
    assert [row["phase"] for row in rows] == ["revoked", "purged"]
    shown = run("receipt", "show", rows[1]["id"], "--vault", path).out
    assert "purged, which is logical" in shown
    assert "whoever has old copies of the vault and of its root key can" in shown
    assert "unrecoverable" not in shown
    assert run("audit", "verify", "--vault", path).code == 0


def test_what_makes_no_sense(deleted: Place, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"\xff{}")
    assert_error(run("receipt", "show", "00" * 16, *deleted.flags), 2, "no such receipt")
    assert_error(run("receipt", "verify", missing), 2, "cannot read a file")
    assert_error(run("receipt", "verify", nonsense), 1, "not a receipt")
    assert_error(run("audit", "prove", missing, *deleted.flags), 2, "cannot read a file")
    assert_error(run("audit", "verify", "--against", missing, *deleted.flags), 2, "cannot read")
    assert_error(run("audit", "verify", "--log", nonsense), 2, "public key")
    assert_error(
        run("audit", "verify", "--log", nonsense, "--key", nonsense), 2, "not a public key"
    )
    where = missing / "deep"
    assert_error(
        run("audit", "export", "-o", where, *deleted.flags), 1, "the file cannot be written"
    )
    assert run("audit", "verify", "--against", nonsense, *deleted.flags).code == 1


def test_a_file_that_is_no_text_is_a_finding(deleted: Place, tmp_path: Path) -> None:
    note, key, receipt = tmp_path / "note", tmp_path / "key", tmp_path / "receipt"
    [first] = ids(deleted)
    run("receipt", "show", first, "--format", "json", "-o", receipt, *deleted.flags)
    run("audit", "checkpoint", "-o", note, *deleted.flags)
    key.write_text(run("audit", "key", *deleted.flags).out)
    assert run("audit", "verify", "--against", note, *deleted.flags).code == 0  # the control
    assert run("receipt", "verify", receipt, "--key", key).code == 0
    note.write_bytes(note.read_bytes().replace(b"\n\n", b"\n\xff\n\n"))
    result = run("audit", "verify", "--against", note, *deleted.flags)
    assert result.code == 1
    assert f"FAIL checkpoint {note}" in result.out
    key.write_bytes(key.read_bytes().replace(b"kvvault/", b"kvvault/\xff"))
    assert_error(run("receipt", "verify", receipt, "--key", key), 2, "not a public key")


def test_tail_keeps_its_columns_whatever_an_entry_says(deleted: Place) -> None:
    """A long list is counted, and whole in JSON; one that no kvvault wrote is shown as well."""
    catalog = sqlite3.connect(deleted.path / "catalog.sqlite3")
    (size,) = catalog.execute("SELECT count(*) FROM log_entries").fetchone()
    many = [f"{n:032x}" for n in range(600)]
    entries = [
        {"at": 1.5, "kind": "short", "said": many[:2]},
        {"at": 1.5, "kind": "long", "said": many},
        {"at": 1.5, "kind": "numbers", "said": [1, 2]},
        {"at": 1.5, "kind": "text", "said": "x" * 40_000 + "end"},
        {"at": 1.5, "kind": "nested", "said": {"a": [None]}},
    ]
    with catalog:
        for n, entry in enumerate(entries):
            catalog.execute("INSERT INTO log_entries VALUES (?, ?)", (size + n, canonical(entry)))
    catalog.close()
    result = run("audit", "tail", "-n", "6", *deleted.flags)
    assert result.code == 0
    header, first, short, long, numbers, text, nested = result.out.splitlines()
    at = header.index("KIND")
    kinds = ["receipt", "short", "long", "numbers", "text", "nested"]
    lines = (first, short, long, numbers, text, nested)
    assert [line[at:].split()[0] for line in lines] == kinds
    facts = header.index("FACTS")
    assert short[facts:] == f"said={many[0]},{many[1]}"
    assert long[facts:] == "said=(600 items)"
    assert numbers[facts:] == "said=1,2"
    assert text[facts:] == f"said={'x' * 40_000}end"
    assert nested[facts:].startswith("said={")
    document = run("audit", "tail", *deleted.flags, "-n", "5", "--json").document
    assert document["entries"][1]["facts"]["said"] == many


def test_somebody_who_cannot_ask_for_the_key_cannot_verify(deleted: Place) -> None:
    """The log is read with the vault's key, and there is no way around it."""
    result = run("audit", "verify", "--vault", deleted.path, "--key-provider", "ephemeral:")
    assert result.code == 12
