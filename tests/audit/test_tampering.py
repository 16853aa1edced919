"""Whatever is done to log, checkpoints and receipts on the disk is found, and where."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from kvvault.audit import merkle
from kvvault.audit.checkpoint import Checkpoint, sign_note
from kvvault.audit.log import Verification
from kvvault.audit.receipts import Proof, Receipt, parse
from kvvault.audit.verifying import Note, check_log, check_receipt
from kvvault.catalog import log, receipts
from kvvault.catalog.log import Fact, canonical, link_of
from kvvault.crypto.signing import Signer
from kvvault.errors import CatalogCorruptError, FormatError
from tests.audit.conftest import Past
from tests.core.support import Home, flip, keys, namespace, put


def verify(home: Home, *outside: str) -> Verification:
    with home.open(read_only=True) as vault:
        return vault.audit.verify([Note("kept elsewhere", note, True) for note in outside])


def places(found: Verification) -> set[str]:
    return {finding.where for finding in found.findings}


def alter(sql: Any, change: str, ident: str) -> None:
    """Change a receipt's row."""
    sql.execute(
        f"UPDATE receipts SET {change} WHERE receipt_id=?",  # noqa: S608 - of these tests
        (bytes.fromhex(ident),),
    )


def bodies(past: Past) -> list[str]:
    with past.home.open(read_only=True) as vault:
        return [body for _, body in vault.audit.bodies()]


# -- the control -----------------------------------------------------------------------------------


def test_an_untouched_log_verifies(past: Past, tampered: Home) -> None:
    found = verify(tampered, *past.notes)
    assert found.ok, found.findings
    assert found.size == past.sizes[-1]
    assert found.outside == len(past.notes)
    assert found.checkpoints == 2 * len(past.notes)
    assert found.receipts == len(past.receipts) == 5
    assert verify(tampered).ok


# -- entries ---------------------------------------------------------------------------------------


def test_an_edit_of_any_entry_is_found_and_where(past: Past, tmp_path: Path) -> None:
    for index in range(past.sizes[-1]):
        home = past.copy(tmp_path / str(index))
        with home.sql() as sql:
            (body,) = sql.execute(
                "SELECT body FROM log_entries WHERE entry_no=?", (index,)
            ).fetchone()
            edited = canonical({**json.loads(body), "at": 1.5})
            sql.execute("UPDATE log_entries SET body=? WHERE entry_no=?", (edited, index))
        found = verify(home)
        assert not found.ok
        if index + 1 < past.sizes[-1]:
            assert f"entry {index}" in places(found)
        first = next(size for size in past.sizes if size > index)
        before = max((size for size in past.sizes if size <= index), default=0)
        assert {f"entries {before} to {first - 1}", f"entry {before}"} & places(found)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bit_of_any_entry_can_be_changed(past: Past, data: st.DataObject) -> None:
    every = bodies(past)
    index = data.draw(st.integers(0, len(every) - 1))
    raw = every[index].encode()
    edited = flip(raw, data.draw(st.integers(0, len(raw) * 8 - 1)))
    every[index] = edited.decode("utf-8", "surrogateescape")
    found = check_log(enumerate(every), [Note("old", past.notes[-1])], past.key)
    assert f"entry {index}" in {finding.where for finding in found.findings} or (
        index == len(every) - 1 and found.findings
    )


@pytest.mark.parametrize("how", ["gap", "renumbered"])
def test_a_removed_entry_is_found_and_where(past: Past, tampered: Home, how: str) -> None:
    with tampered.sql() as sql:
        sql.execute("DELETE FROM log_entries WHERE entry_no=4")
        if how == "renumbered":
            sql.execute("UPDATE log_entries SET entry_no=entry_no-1 WHERE entry_no>4")
    found = places(verify(tampered))
    assert ("entry 4" if how == "gap" else "entry 3") in found


def test_entries_in_another_order_are_found_and_where(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("UPDATE log_entries SET entry_no=-1 WHERE entry_no=3")
        sql.execute("UPDATE log_entries SET entry_no=3 WHERE entry_no=4")
        sql.execute("UPDATE log_entries SET entry_no=4 WHERE entry_no=-1")
    assert {"entry 2", "entry 3", "entry 4"} <= places(verify(tampered))


def test_an_entry_put_in_between_is_found_and_where(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("UPDATE log_entries SET entry_no=-entry_no-1 WHERE entry_no>=4")
        sql.execute("UPDATE log_entries SET entry_no=-entry_no WHERE entry_no<0")
        (before,) = sql.execute("SELECT body FROM log_entries WHERE entry_no=3").fetchone()
        made = canonical({"kind": "hold-placed", "at": 1.5, "prev": link_of(before)})
        sql.execute("INSERT INTO log_entries VALUES (4, ?)", (made,))
    assert "entry 4" in places(verify(tampered))


def test_what_is_no_entry_is_found_and_where(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("UPDATE log_entries SET body=CAST(x'ff00' AS TEXT) WHERE entry_no=2")
        sql.execute("UPDATE log_entries SET body=x'00' WHERE entry_no=5")
        sql.execute("UPDATE log_entries SET body=7 WHERE entry_no=7")
    assert {"entry 2", "entry 5", "entry 7"} <= places(verify(tampered))


def test_a_truncated_log_is_found(past: Past, tampered: Home) -> None:
    """Also by the checkpoints in the catalog, as long as these are not cut as well."""
    with tampered.sql() as sql:
        sql.execute("DELETE FROM log_entries WHERE entry_no>=?", (past.sizes[2],))
    assert "the log" in places(verify(tampered))
    with tampered.sql() as sql:
        sql.execute("DELETE FROM checkpoints WHERE size>?", (past.sizes[2],))
        sql.execute("DELETE FROM receipts WHERE entry_no>=?", (past.sizes[2],))
    assert verify(tampered).ok  # all traces are gone; hence the checkpoint elsewhere:
    assert "the log" in places(verify(tampered, past.notes[-1]))
    assert verify(tampered, *past.notes[:-1]).ok


def test_a_catalog_of_yesterday_is_found(past: Past, tmp_path: Path) -> None:
    yesterday = Home(tmp_path / "vault", past.home.provider)
    shutil.copytree(past.yesterday, yesterday.path)
    assert verify(yesterday).ok  # nothing in it is wrong
    found = verify(yesterday, past.notes[-1])
    assert places(found) == {"the log"}
    assert "older copy" in found.findings[0].what
    with yesterday.open() as vault:  # and it goes on, to the same size
        while vault.audit.size() < past.sizes[-1]:
            vault.accept_clock()
    assert {
        finding.what
        for finding in verify(yesterday, past.notes[-1]).findings
        if finding.where.startswith("entr")
    } == {"not what they were at the checkpoint kept elsewhere"}


def test_a_log_that_was_written_anew_needs_a_checkpoint_elsewhere(
    past: Past, tampered: Home
) -> None:
    """Somebody with the catalog alone cannot sign: he has to remove every checkpoint and receipt
    since. Somebody with the key as well is found only by what was kept elsewhere."""
    every = bodies(past)
    changed: list[str] = []
    for index, body in enumerate(every):
        said = json.loads(body)
        said.pop("prev", None)
        if index == 4:
            said["at"] = 1.5
        link = {"prev": link_of(changed[-1])} if changed else {}
        changed.append(canonical({**said, **link}))
    with tampered.sql() as sql:
        for index, body in enumerate(changed):
            sql.execute("UPDATE log_entries SET body=? WHERE entry_no=?", (body, index))
    assert any(where.startswith("entries") for where in places(verify(tampered)))
    with tampered.open(read_only=True) as vault:
        signer = vault._ring.signer
        root = merkle.root([merkle.leaf_hash(body.encode()) for body in changed])
        note = sign_note(Checkpoint(past.key.name, len(changed), root), signer)
    with tampered.sql() as sql:
        sql.execute("DELETE FROM checkpoints")
        sql.execute("INSERT INTO checkpoints VALUES (?, ?, 1.0)", (len(changed), note))
    assert verify(tampered).ok
    assert any(w.startswith("entries") for w in places(verify(tampered, past.notes[-1])))


def test_a_log_that_was_altered_is_not_signed(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("UPDATE log_entries SET body='{}' WHERE entry_no=2")
    with tampered.open() as vault:
        vault.accept_clock()
        with pytest.raises(CatalogCorruptError, match="not what it was"):
            vault.audit.checkpoint()


@pytest.mark.parametrize(
    ("strays", "body"),
    [
        ([(1 << 63) - 1], "'x'"),
        ([(1 << 53) - 1], "'{}'"),
        ([(1 << 53) - 1 - n for n in range(3)], "7"),
        ([1 << 40], "1e999"),
        ([(1 << 40) - 1], "x'ff00'"),
        ([*((1 << 40) - 1 - n for n in range(3)), 1 << 41], "'x'"),
        ([1 << 30], "CAST(x'ff' AS TEXT)"),
        ([-7, -(1 << 63)], "'{}'"),
    ],
)
def test_an_index_that_nobody_came_to_stops_nothing(
    past: Past, tampered: Home, strays: list[int], body: str
) -> None:
    """Deletions above all; and it is found."""
    with tampered.sql() as sql:
        (before,) = sql.execute("SELECT count(*) FROM log_entries").fetchone()
        for index in strays:
            sql.execute(f"INSERT INTO log_entries VALUES ({index}, {body})")  # noqa: S608
    with tampered.open() as vault:
        scope = vault.scope("another", namespace())
        put(vault, scope, keys(2))
        plan = vault.plan_blocks(scope, keys(1))
        assert vault.execute(plan, actor="operator", reason="why").blocks == 1
        if strays != [1 << 30]:  # whose number somebody may have come to
            receipt = parse(vault.audit.receipts()[-1].document)
            assert receipt.entry >= before
            assert vault.audit.prove(receipt).proof is not None
            added = [entry for entry in vault.audit.bodies(before) if entry[0] not in strays]
            assert [index for index, _ in added] == list(range(before, vault.audit.size()))
    found = places(verify(tampered))
    if strays[0] < 0:
        assert {f"entry {index}" for index in strays} <= found
    else:
        assert any(place.startswith("entries from ") for place in found)


def test_rows_that_fill_the_log_are_found(past: Past, tampered: Home) -> None:
    """An index that the next entry would have had is taken as one: what follows names another."""
    with tampered.sql() as sql:
        (size,) = sql.execute("SELECT count(*) FROM log_entries").fetchone()
        sql.execute(f"INSERT INTO log_entries VALUES ({size}, 'x')")  # noqa: S608
    with tampered.open() as vault:
        vault.accept_clock()
        assert vault.audit.size() == size + 2
    assert f"entry {size}" in places(verify(tampered))


# -- checkpoints -----------------------------------------------------------------------------------


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bit_of_a_checkpoint_can_be_changed(past: Past, data: st.DataObject) -> None:
    raw = past.notes[1].encode()
    edited = flip(raw, data.draw(st.integers(0, len(raw) * 8 - 1))).decode("utf-8", "replace")
    found = check_log(enumerate(bodies(past)), [Note("mine", edited, True)], past.key)
    assert [finding.where for finding in found.findings] == ["checkpoint mine"]


def test_an_edited_checkpoint_in_the_catalog_is_found(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("UPDATE checkpoints SET note=replace(note, 'kv', 'vk')")
    assert len([w for w in places(verify(tampered)) if w.startswith("checkpoint")]) == 4
    with tampered.open() as vault, pytest.raises(CatalogCorruptError):
        vault.audit.checkpoint()


@pytest.mark.parametrize("where", ["newest", "another"])
def test_a_checkpoint_that_is_no_text_is_found(past: Past, tampered: Home, where: str) -> None:
    """One that otherwise looks like one; in the catalog and kept elsewhere."""
    no_text = past.notes[-1].encode().replace(b"\n\n", b"\n\xff\n\n", 1)
    with tampered.sql() as sql:
        if where == "newest":
            newest = past.sizes[-1]
            sql.execute(
                "UPDATE checkpoints SET note=CAST(? AS TEXT) WHERE size=?", (no_text, newest)
            )
        else:
            sql.execute("INSERT INTO checkpoints VALUES (1, CAST(? AS TEXT), 1.0)", (no_text,))
    name = f"of {past.sizes[-1] if where == 'newest' else 1} entries, in the catalog"
    assert places(verify(tampered)) == {f"checkpoint {name}"}
    outside = no_text.decode("utf-8", "surrogateescape")
    assert "checkpoint kept elsewhere" in places(verify(tampered, outside))
    with tampered.open() as vault:
        vault.accept_clock()
        if where == "newest":
            with pytest.raises(CatalogCorruptError):
                vault.audit.checkpoint()
            with pytest.raises(CatalogCorruptError):
                vault.audit.prove(past.receipts[0])


def test_a_checkpoint_under_another_size_is_found(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("UPDATE checkpoints SET size=size+100")
    assert any(where.startswith("checkpoint") for where in places(verify(tampered)))


# -- receipts --------------------------------------------------------------------------------------


def test_no_byte_of_a_receipt_can_be_changed(past: Past) -> None:
    """Of a proven one, as it is handed over: every byte, one bit of each."""
    with past.home.open(read_only=True) as vault:
        document = vault.audit.prove(past.receipts[0]).document
    assert not check_receipt(parse(document), past.key)
    raw = document.encode()
    for at in range(len(raw)):
        edited = flip(raw, at * 8 + at % 8)
        try:
            assert check_receipt(parse(edited.decode("utf-8", "surrogateescape")), past.key)
        except FormatError:
            continue


def test_a_proof_is_of_the_size_that_it_says(past: Past) -> None:
    with past.home.open(read_only=True) as vault:
        receipt = vault.audit.prove(past.receipts[0])
    assert receipt.proof is not None
    larger = replace(receipt, proof=replace(receipt.proof, size=receipt.proof.size + 1))
    assert check_receipt(receipt, past.key) == []
    assert check_receipt(larger, past.key)


@pytest.mark.parametrize("change", ["document=replace(document, 'operator', 'somebody')"])
@pytest.mark.parametrize("which", range(5))
def test_an_edited_receipt_is_found_and_which(
    past: Past, tampered: Home, change: str, which: int
) -> None:
    ident = past.receipts[which].receipt_id
    with tampered.sql() as sql:
        alter(sql, change, ident)
    assert places(verify(tampered)) == {f"receipt {ident}"}


@pytest.mark.parametrize(
    "change",
    [
        "document=document || ' '",
        "document=x'ff'",
        "document=CAST(x'ff' AS TEXT)",
        "phase=CASE phase WHEN 'purged' THEN 'revoked' ELSE 'purged' END",
        "entry_no=0",
        "deletion_no=NULL",
        "document=(SELECT document FROM receipts ORDER BY receipt_no DESC LIMIT 1)",
    ],
)
def test_an_altered_row_of_a_receipt_is_found(past: Past, tampered: Home, change: str) -> None:
    ident = past.receipts[0].receipt_id
    with tampered.sql() as sql:
        alter(sql, change, ident)
    assert f"receipt {ident}" in places(verify(tampered))


def signed(like: Receipt, entry: int, signer: Signer) -> Receipt:
    """A receipt as the vault itself makes them."""
    content = {**like.content, "id": "ab" * 16, "log": {**like.content["log"], "entry": entry}}
    return Receipt(content, signer.sign(canonical(content).encode()), signer.public_key)


def facts_of(receipt: Receipt, deletion: int) -> dict[str, Fact]:
    said = {"receipt": receipt.receipt_id, "phase": receipt.phase, "sha256": receipt.digest}
    return {**said, "deletion": deletion}


@pytest.mark.parametrize("off", [0, 1])
def test_a_receipt_of_another_deletion_than_its_entry_says_is_found(
    past: Past, tampered: Home, off: int
) -> None:
    """In the vault and by its file alone. Such ones were signed once, when the vault took for a
    deletion's first receipt what somebody had put in its place."""
    number = past.receipts[0].content["deletion"]["number"]
    with tampered.open() as vault:
        signer = vault._ring.signer
        stored = signed(past.receipts[0], vault.audit.size(), signer)

        def issue(connection: Connection) -> None:
            entry = log.append(connection, "receipt", 1.5, facts_of(stored, number + off))
            receipts.add(
                connection,
                bytes.fromhex(stored.receipt_id),
                deletion_no=number,
                phase=stored.phase,
                entry_no=entry,
                document=stored.document,
            )

        vault.catalog.write(issue)
        found = vault.audit.verify(())
        alone = signed(past.receipts[0], 0, signer)
        body = canonical({**facts_of(alone, number + off), "kind": "receipt", "at": 1.5})
        root = merkle.root([merkle.leaf_hash(body.encode())])
        note = sign_note(Checkpoint(past.key.name, 1, root), signer)
    assert places(found) == ({f"receipt {stored.receipt_id}"} if off else set())
    told = check_receipt(replace(alone, proof=Proof(0, body, 1, (), note)), past.key)
    assert bool(told) == bool(off)


def test_a_removed_receipt_is_found_and_which(past: Past, tampered: Home) -> None:
    ident = past.receipts[1].receipt_id
    with tampered.sql() as sql:
        sql.execute("DELETE FROM receipts WHERE receipt_id=?", (bytes.fromhex(ident),))
    assert places(verify(tampered)) == {f"receipt {ident}"}


def test_a_receipt_signed_by_somebody_else_is_found(past: Past, tampered: Home) -> None:
    forger = Signer(bytes(32))
    receipt = past.receipts[0]
    forged = type(receipt)(receipt.content, forger.sign(receipt.signed), forger.public_key)
    assert not check_receipt(forged, None)  # without a key from elsewhere nobody can know
    assert check_receipt(forged, past.key)
    with tampered.sql() as sql:
        sql.execute(
            "UPDATE receipts SET document=? WHERE receipt_id=?",
            (forged.document, bytes.fromhex(receipt.receipt_id)),
        )
    assert places(verify(tampered)) == {f"receipt {receipt.receipt_id}"}


# -- the signing key -------------------------------------------------------------------------------


def test_a_signing_key_that_was_taken_out_is_found(past: Past, tampered: Home) -> None:
    with tampered.sql() as sql:
        sql.execute("DELETE FROM meta WHERE name='signing_key'")
    with tampered.open():
        pass  # it is made anew, and that is written down
    found = places(verify(tampered))
    assert f"entry {past.sizes[-1]}" in found
    assert len([where for where in found if where.startswith("checkpoint")]) == 4
    assert len([where for where in found if where.startswith("receipt")]) == 5
