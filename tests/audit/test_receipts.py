"""What receipts say, when they are made, and that they stand on their own."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault import __version__
from kvvault.audit.receipts import AUTOMATIC, EngineCopy, Receipt, parse
from kvvault.audit.rendering import as_html, as_markdown, as_text
from kvvault.audit.verifying import check_receipt
from kvvault.crypto.providers import EphemeralProvider
from kvvault.crypto.providers.base import Assurance
from kvvault.crypto.signing import Signer
from kvvault.deleting import Trigger
from kvvault.errors import (
    CatalogCorruptError,
    FormatError,
    KeyDestroyedError,
    StorageError,
    UsageError,
)
from kvvault.vault import Vault
from tests.audit.conftest import SECRETS, Past
from tests.core.support import BLOCK, Home, keys, namespace, put
from tests.core.test_prompt_erasing import of, send


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "vault")


def receipts(vault: Vault) -> list[Receipt]:
    return [parse(row.document) for row in vault.audit.receipts()]


def segments(vault: Vault) -> list[bytes]:
    return [facts.segment_id for facts in vault.segments() if facts.state.live]


# -- the two phases --------------------------------------------------------------------------------


def test_a_deletion_has_two_receipts_and_the_second_names_the_first(home: Home) -> None:
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
        doomed = segments(vault)[:1]
        done = vault.execute(vault.plan_segments(doomed), actor="operator", reason="asked for")
        [first] = receipts(vault)
        assert (first.phase, done.blocks) == ("revoked", 4)
        vault.purge()
        [same, second] = receipts(vault)
        assert same == first
        assert second.phase == "purged"
        assert second.content["revoked_receipt"] == {"id": first.receipt_id, "sha256": first.digest}
        for name in ("deletion", "kept", "engine_copies"):
            assert second.content[name] == first.content[name]
        vault.purge()
        assert len(receipts(vault)) == 2
        assert vault.audit.verify().ok


def test_what_a_receipt_says(home: Home) -> None:
    """The fields of REQ-A2."""
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
        put(vault, vault.scope("other", namespace()), keys(4, 20), "other")
        vault.place_hold(segment_id=segments(vault)[0], reason="why", actor="counsel")
        doomed = segments(vault)[:2]
        vault.execute(vault.plan_segments(doomed), actor="operator", reason="asked for")
        vault.purge()
        first, second = receipts(vault)
        vault_id, policy = vault._vault_id.hex(), vault.applied_policy().policy.digest.hex()
        info = vault.provider_info()
        purge = vault.keys().last_purge
    said = first.content
    assert said["vault"] == vault_id
    assert "cryptographic erase" in said["method"]
    assert "plaintext" in said["media"]["type"]
    assert said["tool"] == {"name": "kvvault", "version": __version__}
    assert said["performed"]["by"] == "operator"
    assert said["performed"]["at"] == said["deletion"]["revoked_at"]
    assert said["performed"]["where"] == said["media"]["where"] != ""
    assert said["deletion"]["trigger"] == "rm"
    assert said["deletion"]["reason"] == "asked for"
    assert said["deletion"]["policy_sha256"] == policy
    assert said["deletion"]["blocks"] == 4
    assert said["deletion"]["bytes"] == 4 * BLOCK
    assert said["deletion"]["keys"] == {"count": 1, "ids": [doomed[1].hex()]}
    assert said["kept"]["held_segments"] == 1
    assert said["kept"]["held_blocks"] == 4
    assert said["assurance"]["level"] == info.assurance.value
    assert said["assurance"]["reason"] == info.reason
    assert "backups" in said
    assert "only after the purge" in said["verification"]["result"]
    assert purge is not None
    assert second.content["purge"]["root_key"] == purge.old_epoch
    assert second.content["purge"]["result"] == "destroyed, and refused when it was tried"
    for time in ("began_at", "destroyed_at", "verified_at"):
        assert second.content["purge"][time].endswith("Z")
    assert second.content["verification"]["method"] != said["verification"]["method"]


def test_single_blocks_count_as_what_went_and_not_their_neighbours(home: Home) -> None:
    with home.create() as vault:
        scope = vault.scope("acme", namespace())
        put(vault, scope, keys(4))
        vault.execute(vault.plan_blocks(scope, keys(1)), actor="operator", reason="one")
        [first] = receipts(vault)
        tenant = scope._keys.keyed_id("log", b"tenant").hex()
    assert first.content["deletion"]["blocks"] == 1
    assert first.content["deletion"]["bytes"] == BLOCK
    assert first.content["deletion"]["scope"] == {"tenant": tenant}


def test_a_tenant_of_which_nothing_is_left_is_forgotten_with_receipts(home: Home) -> None:
    with home.create() as vault:
        vault.scope("acme", namespace())
        vault.forget("acme")
        vault.purge()
        assert [one.phase for one in receipts(vault)] == ["revoked", "purged"]
        assert receipts(vault)[0].content["deletion"]["trigger"] == "forget"
        assert receipts(vault)[0].content["deletion"]["blocks"] == 0
        assert vault.audit.verify().ok


def test_nothing_to_delete_makes_no_receipt(home: Home) -> None:
    with home.create() as vault:
        vault.execute(vault.plan_segments([bytes(16)]), actor="operator", reason="none")
        vault.forget("nobody")
        vault.purge()
        assert receipts(vault) == []


def test_what_goes_by_itself_is_summed_up_once_per_purge(home: Home) -> None:
    assert {"evict", "expire"} == AUTOMATIC
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(12))
        for segment_id in segments(vault):
            plan = vault._eraser.plan_segments([segment_id], Trigger.EVICT)
            vault._eraser.execute(plan, actor="kvvault", reason="stores wait")
        entries = [entry for entry in vault.audit.tail(100) if entry.kind == "deletion"]
        assert [entry.facts["trigger"] for entry in entries] == ["evict"] * 3
        assert receipts(vault) == []
        vault.purge()
        [only] = receipts(vault)
        assert only.phase == "purged"
        assert only.content["deletion"]["count"] == 3
        assert only.content["deletion"]["blocks"] == 12
        vault.purge()
        assert receipts(vault) == [only]
        assert vault.audit.verify().ok


def test_more_deletions_than_one_transaction_takes_all_get_their_second(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvvault.purging._BATCH", 2)
    with home.create() as vault:
        for number in range(5):
            vault.scope(f"t{number}", namespace())
            vault.forget(f"t{number}")
        assert vault.purge().deletions == 5
        made = receipts(vault)
        assert [one.phase for one in made] == ["revoked"] * 5 + ["purged"] * 5
        firsts = [one.receipt_id for one in made[:5]]
        assert [one.content["revoked_receipt"]["id"] for one in made[5:]] == firsts
        assert vault.purge().deletions == 0
        assert len(receipts(vault)) == 10


def test_a_purge_that_dies_while_it_certifies_makes_each_receipt_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvvault.purging._BATCH", 2)
    with home.create() as vault:
        for number in range(5):
            vault.scope(f"t{number}", namespace())
            vault.forget(f"t{number}")
        second, calls = vault._issuer._second, 0

        def dies(*arguments: Any) -> Receipt:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise CatalogCorruptError("killed", hint="")
            return second(*arguments)

        monkeypatch.setattr(vault._issuer, "_second", dies)
        with pytest.raises(CatalogCorruptError):
            vault.purge()
        assert vault.keys().waiting == 3
        monkeypatch.setattr(vault._issuer, "_second", second)
        vault.purge()
        assert [one.phase for one in receipts(vault)] == ["revoked"] * 5 + ["purged"] * 5
        assert vault.audit.verify().ok


def test_a_deletion_without_a_first_receipt_gets_its_second(home: Home) -> None:
    """One whose first receipt was altered. The reason, which the log has not, is not signed."""
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(4))
        vault.execute(vault.plan_segments(segments(vault)), actor="operator", reason="why")
    with home.sql() as sql:
        sql.execute("UPDATE receipts SET document=replace(document, 'why', 'wherefore')")
        sql.execute("UPDATE deletions SET reason='request 17/2026'")
    with home.open() as vault:
        vault.purge()
        second = receipts(vault)[1]
        assert damaged(vault) == ["1"]
    assert second.content["revoked_receipt"] is None
    assert second.content["deletion"]["blocks"] == 4
    assert second.content["deletion"]["reason"] is None
    assert second.content["performed"]["by"] == "operator"
    assert second.authentic


def damaged(vault: Vault) -> list[str]:
    """Deletions that purges have called damaged."""
    found = [entry for entry in vault.audit.tail(1000) if entry.kind == "damage-found"]
    assert all(entry.facts["by"] == "purge" for entry in found)
    return [number for entry in found for number in entry.facts["deletions"]]


def two_deletions(home: Home) -> tuple[Receipt, Receipt]:
    """Their first receipts."""
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
        small, large = segments(vault)
        vault.execute(vault.plan_segments([small]), actor="one", reason="unimportant")
        vault.execute(vault.plan_segments([large]), actor="two", reason="request 17/2026")
        first, other = receipts(vault)
    return first, other


@pytest.mark.parametrize("taken_away", [False, True])
def test_a_first_receipt_of_another_deletion_is_not_certified(home: Home, taken_away: bool) -> None:
    """Nor by somebody who clears up behind himself."""
    _first, other = two_deletions(home)
    with home.sql() as sql:
        sql.execute(
            "INSERT INTO receipts (receipt_id, deletion_no, phase, entry_no, document) "
            "VALUES (?, 1, 'revoked', ?, ?)",
            (b"x" * 16, other.entry, other.document),
        )
        if taken_away:  # what is deleted in truth waits no more
            sql.execute("DELETE FROM receipts WHERE deletion_no=2")
            sql.execute("DELETE FROM deletions WHERE deletion_no=2")
    with home.open() as vault:
        vault.purge()
        seconds = [one for one in receipts(vault) if one.phase == "purged"]
        said = [one.content["deletion"] for one in seconds]
    assert [one["number"] for one in said] == ([1] if taken_away else [1, 2])
    assert said[0]["reason"] == "unimportant"


def test_a_first_receipt_whose_entry_is_gone_is_not_certified(home: Home) -> None:
    first, _other = two_deletions(home)
    with home.sql() as sql:
        sql.execute("UPDATE log_entries SET body='{}' WHERE entry_no=?", (first.entry,))
    with home.open() as vault:
        vault.purge()
        links = [one.content["revoked_receipt"] for one in receipts(vault)[2:]]
    assert links[0] is None
    assert links[1] is not None


def test_of_two_first_receipts_the_last_is_certified_or_none(home: Home) -> None:
    """The second of them says what became of an engine's copies: who takes it away for a while
    gets no receipt that leaves that out."""
    for hidden in (False, True):
        here = Home(home.path.with_name(f"v{hidden}"))
        with here.create() as vault:
            send(vault, vault.scope("acme", namespace()), [1, 2], "anna")
            vault.erase(
                vault.plan_erasure(of("anna"), tenant="acme"),
                actor="operator",
                reason="why",
                engine=lambda: [EngineCopy("GPU prefix cache", reached=False)],
            )
            early, late = receipts(vault)
        with here.sql() as sql:
            if hidden:
                sql.execute("DELETE FROM receipts WHERE entry_no=?", (late.entry,))
            else:  # the order of rows says nothing
                sql.execute("UPDATE receipts SET receipt_no=9 WHERE entry_no=?", (early.entry,))
        with here.open() as vault:
            vault.purge()
            [second] = [one for one in receipts(vault) if one.phase == "purged"]
            link = second.content["revoked_receipt"]
            assert damaged(vault) == (["1"] if hidden else [])
        if hidden:
            assert link is None
        else:
            assert link == {"id": late.receipt_id, "sha256": late.digest}
            assert not second.content["engine_copies"][0]["reached"]


INVENTED = (
    "INSERT INTO deletions (trigger, actor, reason, segments, blocks, data_bytes, revoked_at) "
    "VALUES (?, 'dpo', 'request 17/2026', 0, ?, 409600, 4e9)"
)


@pytest.mark.parametrize("trigger", ["erase", "expire", "evict", "rm", "something"])
@pytest.mark.parametrize("blocks", [100, "abc", b"\xff"])
def test_what_only_a_row_says_gets_no_receipt(home: Home, trigger: str, blocks: object) -> None:
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
        one, other = segments(vault)
        vault.execute(vault.plan_segments([one]), actor="operator", reason="why")
        plan = vault._eraser.plan_segments([other], Trigger.EVICT)
        vault._eraser.execute(plan, actor="kvvault", reason="stores wait")
    with home.sql() as sql:
        sql.execute(INVENTED, (trigger, blocks))
    with home.open() as vault:
        vault.purge()
        made = [one.content["deletion"] for one in receipts(vault) if one.phase == "purged"]
        assert damaged(vault) == ["3"]
        vault.purge()
        assert damaged(vault) == ["3"]  # once
    # The control: what the log has as well gets one.
    assert sorted((one["trigger"], one["blocks"]) for one in made) == [("evict", 4), ("rm", 4)]


@pytest.mark.parametrize(
    "change",
    ["blocks=100", "data_bytes=409600", "trigger='expire'", "actor='dpo'", "revoked_at=1.5"],
)
def test_a_row_that_says_something_else_than_the_log_gets_no_receipt(
    home: Home, change: str
) -> None:
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
        for segment_id in segments(vault):
            plan = vault._eraser.plan_segments([segment_id], Trigger.EVICT)
            vault._eraser.execute(plan, actor="kvvault", reason="stores wait")
    with home.sql() as sql:
        sql.execute(f"UPDATE deletions SET {change} WHERE deletion_no=1")  # noqa: S608
    with home.open() as vault:
        vault.purge()
        [only] = receipts(vault)
        assert damaged(vault) == ["1"]
    assert only.content["deletion"]["numbers"] == [2, 2]
    assert only.content["deletion"]["count"] == 1
    assert only.content["deletion"]["blocks"] == 4


def test_an_altered_row_does_not_change_what_the_first_receipt_says(home: Home) -> None:
    first, _other = two_deletions(home)
    with home.sql() as sql:
        sql.execute("UPDATE deletions SET blocks=100, actor='dpo' WHERE deletion_no=1")
    with home.open() as vault:
        vault.purge()
        second = receipts(vault)[2]
        assert damaged(vault) == ["1"]
    assert second.content["deletion"] == first.content["deletion"]
    assert second.content["performed"] == first.content["performed"]


def test_damage_that_a_purge_found_outlives_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    two_deletions(home)
    with home.sql() as sql:
        sql.execute(INVENTED, ("erase", 100))
    with home.open() as vault:
        with monkeypatch.context() as patch:
            patch.setattr(vault._issuer, "summaries", _full)
            with pytest.raises(StorageError):
                vault.purge()
        assert damaged(vault) == ["3"]
        vault.purge()
        assert [one.phase for one in receipts(vault)] == ["revoked"] * 2 + ["purged"] * 2


def test_a_deletion_of_before_the_log_gets_no_receipt_and_is_no_damage(home: Home) -> None:
    """Of an older kvvault: nothing says what it was."""
    with home.create() as vault:
        vault.scope("acme", namespace())
    with home.sql() as sql:
        sql.execute(INVENTED.replace("4e9", "1.5"), ("rm", 100))
    with home.open() as vault:
        assert vault.purge().deletions == 1
        assert receipts(vault) == []
        assert damaged(vault) == []


def test_many_keys_are_named_by_one_digest(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvvault.audit.receipts._MAX_KEY_IDS", 1)
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
        vault.forget("acme")
        named = receipts(vault)[0].content["deletion"]["keys"]
    assert set(named) == {"count", "sha256"}
    assert named["count"] == 2


def test_absurd_claims_of_a_row_keep_nothing_from_going(home: Home) -> None:
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(4))
    with home.sql() as sql:
        sql.execute("UPDATE segments SET blocks=4611686018427387904, synced=1")
    with home.open(read_only=True) as vault:
        ids = segments(vault)
    with home.open() as vault:
        vault.execute(vault.plan_segments(ids), actor="operator", reason="why")
        assert all(one.authentic for one in receipts(vault))
        assert vault.audit.verify().ok


def test_a_logical_deletion_says_so(tmp_path: Path) -> None:
    """A key file on this disk promises less than keys in memory."""
    logical = Vault.create(tmp_path / "v", provider=f"file:{tmp_path / 'keys'}")
    with logical as vault:
        vault.scope("acme", namespace())
        vault.forget("acme")
        [first] = receipts(vault)
    assert first.content["assurance"]["level"] == Assurance.LOGICAL.value
    assert first.content["assurance"]["key_provider"] == "file"
    assert "can be opened" in first.content["backups"]
    assert str(tmp_path) not in first.document


# -- the signing key -------------------------------------------------------------------------------


def test_a_purge_keeps_the_signing_key_and_wraps_it_anew(home: Home) -> None:
    with home.create() as vault:
        before = vault.audit.key
    with home.sql() as sql:
        (old,) = sql.execute("SELECT value FROM meta WHERE name='signing_key'").fetchone()
    with home.open() as vault:
        vault.purge()
        assert vault.audit.key == before
        epoch = vault.keys().last_purge
        assert epoch is not None
        assert vault.check_keys().sound
    with home.sql() as sql:
        (new,) = sql.execute("SELECT value FROM meta WHERE name='signing_key'").fetchone()
        (under,) = sql.execute("SELECT value FROM meta WHERE name='signing_epoch'").fetchone()
    assert new != old
    assert under.decode() == epoch.new_epoch
    with pytest.raises(KeyDestroyedError):
        home.provider.unwrap(epoch.old_epoch, old, b"")
    with home.open() as vault:
        assert vault.audit.key == before


def test_a_signing_key_left_behind_keeps_the_old_root_key(home: Home) -> None:
    """REQ-K3 counts it."""
    with home.create() as vault:
        vault.purge()
        vault._catalog.write(
            lambda c: c.exec_driver_sql(
                "CREATE TRIGGER stays AFTER UPDATE ON meta WHEN new.name='signing_epoch' "
                "BEGIN UPDATE meta SET value=old.value WHERE name='signing_epoch'; END"
            )
        )
        with pytest.raises(CatalogCorruptError, match="1 rows"):
            vault.purge()
        vault._catalog.write(lambda c: c.exec_driver_sql("DROP TRIGGER stays"))


def test_a_vault_of_an_older_kvvault_gets_a_key_when_it_is_opened_to_write(home: Home) -> None:
    with home.create() as vault:
        vault.scope("acme", namespace())
    with home.sql() as sql:
        sql.execute("DELETE FROM meta WHERE name IN ('signing_key', 'signing_epoch')")
        sql.execute("DELETE FROM log_entries")
    with home.open(read_only=True) as vault, pytest.raises(Exception, match="no signing key yet"):
        _ = vault.audit.key
    with home.open() as vault:
        key = vault.audit.key
        vault.forget("acme")
        assert vault.audit.verify().ok
    with home.open() as vault:
        assert vault.audit.key == key
        assert [entry.kind for entry in vault.audit.tail(100)].count("signing-key-made") == 1


def test_the_seed_is_not_in_the_catalog(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[bytes] = []

    def watched(seed: bytes) -> Signer:
        seeds.append(bytes(seed))
        return Signer(seed)

    monkeypatch.setattr("kvvault.crypto.keys.Signer", watched)
    with home.create():
        pass
    assert seeds
    files = [path.read_bytes() for path in home.path.rglob("*") if path.is_file()]
    assert not any(seeds[0] in raw or seeds[0].hex().encode() in raw for raw in files)


# -- on their own ----------------------------------------------------------------------------------


def test_a_receipt_is_checked_with_its_file_and_the_key_alone(past: Past) -> None:
    with past.home.open(read_only=True) as vault:
        texts = [vault.audit.prove(receipt).document for receipt in past.receipts]
    for text in [*texts, json.dumps(json.loads(texts[0]), indent=2)]:
        receipt = parse(text)
        assert receipt.proof is not None
        assert check_receipt(receipt, past.key) == []
        assert check_receipt(receipt, None) == []


def test_a_receipt_of_another_vault_is_not_proven(past: Past, home: Home) -> None:
    with home.create() as vault:
        assert check_receipt(past.receipts[0], vault.audit.key)
        with pytest.raises(FormatError):
            vault.audit.prove(past.receipts[0])


def test_a_receipt_is_found_by_the_beginning_of_its_id(past: Past) -> None:
    with past.home.open(read_only=True) as vault:
        audit = vault.audit
        for receipt in past.receipts:
            assert audit.receipt(receipt.receipt_id[:12]) == receipt
        for wrong in ("", "zz", "%"):
            with pytest.raises(UsageError):
                audit.receipt(wrong)


@given(st.text(max_size=200))
def test_what_is_no_receipt(text: str) -> None:
    with pytest.raises(FormatError):
        parse(text)


@pytest.mark.parametrize("number", ["9007199254740993", "1e400", "NaN", "-0.0"])
def test_a_number_that_could_be_another_is_no_receipt(past: Past, number: str) -> None:
    text = past.receipts[0].document
    changed = text.replace('"version":1', f'"version":{number}')
    assert changed != text
    with contextlib.suppress(FormatError):
        assert check_receipt(parse(changed), past.key)


@pytest.mark.parametrize("written", ["1.0", "10e-1", "1E0", "1e+0", "0.1e1", "true"])
def test_a_number_in_another_form_is_no_receipt(past: Past, written: str) -> None:
    """The signature is over the number; what is read by people and other programs is the form."""
    document = past.receipts[0].document
    changed = document.replace('"version":1', f'"version":{written}')
    assert changed != document
    with contextlib.suppress(FormatError):
        assert check_receipt(parse(changed), past.key)
    zero = document.replace('"held_blocks":0', '"held_blocks":-0')
    assert zero != document
    with pytest.raises(FormatError):
        parse(zero)
    proven = past.receipts[0].document.replace('"receipt"', ' "receipt" ').replace(":{", ":\n{")
    assert check_receipt(parse(proven), past.key) == []


@pytest.mark.parametrize("number", [1.5, 1e21, 5e-7, 0.1])
def test_a_fraction_is_read_as_it_was_written(past: Past, number: float) -> None:
    content = {**past.receipts[0].content, "number": number}
    receipt = replace(past.receipts[0], content=content)
    assert parse(receipt.document) == receipt


def test_a_name_that_is_there_twice_is_no_receipt(past: Past) -> None:
    text = past.receipts[0].document
    with pytest.raises(FormatError):
        parse(text.replace('{"', '{"signature":"AA==","', 1))


# -- for people ------------------------------------------------------------------------------------


def test_an_erasure_says_when_keys_go(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are revoked at once; the keys of their segments go when the rest is elsewhere."""
    with home.create() as vault:
        scope = vault.scope("acme", namespace())
        put(vault, scope, keys(4))
        with monkeypatch.context() as patch:
            patch.setattr(vault._rewriter, "copy", _full)
            plan = vault.plan_blocks(scope, keys(1))
            done = vault.execute(plan, actor="operator", reason="one")
        assert done.waiting_segments == 1
        [first] = receipts(vault)
        [ident] = first.content["deletion"]["keys"]["ids"]
        assert bytes.fromhex(ident) in segments(vault)  # its key is there
        assert "the keys left the catalog" not in first.content["verification"]["method"]
        assert "before the second receipt" in first.content["verification"]["method"]
        for text in (as_markdown(first), as_html(first)):
            assert "Keys destroyed" not in text
            assert "Segments concerned" in text
            assert ident in text
        vault.reconcile()
        assert bytes.fromhex(ident) not in segments(vault)
        vault.purge()
        second = receipts(vault)[-1]
        assert second.content["revoked_receipt"]["id"] == first.receipt_id
        assert "Keys destroyed" in as_html(second)
        assert "Segments concerned" not in as_html(second)
        removed = vault.plan_segments(segments(vault))
        vault.execute(removed, actor="operator", reason="all")
        third = receipts(vault)[-1]
        assert "the keys left the catalog" in third.content["verification"]["method"]
        assert "Keys destroyed" in as_html(third)


def _full(*_: object) -> int:
    raise StorageError("no space", hint="make some")


def test_both_renderings_say_what_counts(past: Past) -> None:
    first = past.receipts[0]
    for text in (as_markdown(first), as_html(first)):
        assert first.receipt_id in text
        assert first.digest in text
        assert "operator" in text
        assert SECRETS["reason"] in text
        assert str(first.content["deletion"]["blocks"]) in text
        for ident in first.content["deletion"]["keys"]["ids"]:
            assert ident in text
    purged = next(one for one in past.receipts if one.phase == "purged")
    assert "made unrecoverable" in as_html(purged)
    assert purged.content["revoked_receipt"]["id"] in as_markdown(purged)


@pytest.mark.parametrize("level", ["purge", "logical"])
def test_a_receipt_claims_what_its_assurance_is(past: Past, level: str) -> None:
    """Also one that an older version signed, which claimed more."""
    purged = next(one for one in past.receipts if one.phase == "purged")
    for receipt in (past.receipts[0], purged):
        content = {**receipt.content, "assurance": {"level": level}}
        for render in (as_text, as_markdown, as_html):
            text = render(replace(receipt, content=content))
            assert ("unrecoverable" in text) == (level == "purge"), text
            assert ("old copies of the vault" in text) == (level == "logical")


def test_nothing_of_a_receipt_is_markup(home: Home) -> None:
    hostile = "<script>alert(1)</script><img src=x>|`[x](http://x)`\u202e"
    with home.create() as vault:
        vault.scope("acme", namespace())
        plan = vault.plan_tenant("acme")
        assert plan is not None
        vault.execute(plan, actor=hostile, reason=hostile)
        [first] = receipts(vault)
    page = as_html(first)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "default-src" in page
    assert "\u202e" not in page
    assert "\u202e" not in as_text(first)
    assert "](http" not in as_markdown(first)
    assert "<script" not in as_markdown(first)
    assert "\\|" in as_markdown(first)


@pytest.mark.parametrize(
    "live", ["https://evil.example", "www.evil.example", "a@evil.example", "@all", "$x$"]
)
def test_no_text_of_a_receipt_comes_to_life(past: Past, live: str) -> None:
    said = past.receipts[0].content
    content = {**said, "deletion": {**said["deletion"], "reason": f"see {live} there"}}
    text = as_markdown(replace(past.receipts[0], content=content))
    assert f"see `{live}` there" in text


def test_a_provider_that_is_closed_does_not_matter(home: Home) -> None:
    """The signing key was opened with the vault: no deletion waits for the provider."""
    provider = EphemeralProvider()
    home.provider = provider
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(4))
        provider.unwrap = None  # type: ignore[method-assign,assignment]
        provider.wrap = None  # type: ignore[method-assign,assignment]
        vault.execute(vault.plan_segments(segments(vault)), actor="operator", reason="why")
        assert len(receipts(vault)) == 1
