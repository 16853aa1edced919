"""`kvvault purge`, `keys ls`, `keys rotate` and `keys verify`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import NAMESPACE, TENANTS, run
from tests.core.support import sqlite


@contextmanager
def catalog(place: Place) -> Iterator[Any]:
    connection = sqlite.connect(str(place.path / "catalog.sqlite3"), isolation_level=None)
    try:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        yield connection
    finally:
        connection.close()


@pytest.fixture
def place(place: Place) -> Place:
    """With a key file of its own: purges change it."""
    own = place.path.with_name("key")
    own.write_bytes(Path(place.key.removeprefix("file:")).read_bytes())
    own.chmod(0o600)
    return Place(place.path, f"file:{own}")


def test_purge_says_what_it_did_and_what_it_is_worth(place: Place) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        vault.forget(TENANTS[1])
    done = run("purge", *place.flags, "--json")
    assert done.code == 0
    report = done.document
    assert set(report) == {
        "purge_no",
        "old_epoch",
        "new_epoch",
        "assurance",
        "reason",
        "deletions",
        "technical_deletions",
        "tenants",
        "segments",
        "tenants_given_up",
        "destroyed_at",
        "verified_at",
        "seconds",
    }
    assert (report["tenants"], report["segments"], report["deletions"]) == (1, 1, 1)
    assert report["assurance"] == "logical"
    assert report["old_epoch"] != report["new_epoch"]
    assert run("verify", *place.flags).code == 0
    again = run("purge", *place.flags)
    assert again.code == 0
    assert report["new_epoch"] in again.out
    assert "logical: " in again.out
    assert "deletions  0 closed to the keys of now, not to old copies" in again.out
    assert "unrecoverable" not in again.out


def test_rotate_is_a_purge(place: Place) -> None:
    before = run("keys", "ls", *place.flags, "--json").document["epochs"]
    report = run("keys", "rotate", *place.flags, "--json").document
    after = run("keys", "ls", *place.flags, "--json").document["epochs"]
    assert [one["epoch"] for one in before] == [report["old_epoch"]]
    assert [one["epoch"] for one in after] == [report["new_epoch"]]
    with Vault.open(place.path, provider=place.key) as vault:
        assert all(vault.contains(vault.scope(TENANTS[0], NAMESPACE), [b"acme-canary-0"]))


def test_ls(place: Place) -> None:
    before = run("keys", "ls", *place.flags, "--json")
    assert before.code == 0
    document = before.document
    assert set(document) == {
        "vault",
        "epochs",
        "tenants",
        "last_purge",
        "unfinished_purge",
        "deletions_waiting",
        "waiting_since",
        "purge_every_s",
        "overdue",
    }
    [epoch] = document["epochs"]
    assert epoch["current"]
    assert (epoch["tenants"], epoch["segments"], epoch["blocks"]) == (2, 2, 12)
    assert sorted(one["name"] for one in document["tenants"]) == sorted(TENANTS)
    assert {one["blocks"] for one in document["tenants"]} == {6}
    assert {one["key_no"] for one in document["tenants"]} == {1}
    assert document["last_purge"] is document["unfinished_purge"] is None
    assert (document["deletions_waiting"], document["overdue"]) == (0, False)
    run("purge", *place.flags)
    after = run("keys", "ls", *place.flags, "--json").document
    assert after["last_purge"]["new_epoch"] == after["epochs"][0]["epoch"]
    assert {one["key_no"] for one in after["tenants"]} == {2}
    text = run("keys", "ls", *place.flags)
    assert text.code == 0
    for part in (*TENANTS, "in force", "last purge: ", " ago, logical"):
        assert part in text.out


def test_req_k2_an_overdue_purge_is_an_alarm(place: Place) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        vault.forget(TENANTS[1])
    assert run("keys", "ls", *place.flags).code == 0
    with catalog(place) as connection:
        connection.execute("UPDATE deletions SET revoked_at = revoked_at - 30 * 86400")
    late = run("keys", "ls", *place.flags)
    assert late.code == 3
    assert "OVERDUE" in late.out
    assert run("keys", "ls", *place.flags, "--json").document["overdue"] is True
    assert run("purge", *place.flags).code == 0
    assert run("keys", "ls", *place.flags).code == 0


def test_verify(place: Place) -> None:
    good = run("keys", "verify", *place.flags, "--json")
    assert good.code == 0
    assert good.document["ok"] is True
    assert (good.document["tenants"], good.document["segments"]) == (2, 2)
    assert run("keys", "verify", *place.flags).code == 0


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ("UPDATE segments SET wrapped_secret = zeroblob(60)", "broken_segments"),
        ("UPDATE segments SET commitment = zeroblob(32)", "broken_segments"),
        ("UPDATE tenants SET wrapped_key = zeroblob(60)", "broken_tenants"),
        ("UPDATE tenants SET root_epoch = '{old}'", "destroyed"),
        ("UPDATE tenants SET root_epoch = '{old}'", "not_current"),
    ],
)
def test_verify_finds(place: Place, damage: str, field: str) -> None:
    old = run("purge", *place.flags, "--json").document["old_epoch"]
    assert run("keys", "verify", *place.flags).code == 0
    with catalog(place) as connection:
        connection.execute(damage.format(old=old))
    bad = run("keys", "verify", *place.flags, "--json")
    assert bad.code == 1
    assert bad.document[field] == 2
    text = run("keys", "verify", *place.flags)
    assert text.code == 1
    assert text.err


def test_keys_in_the_memory_of_another_process_are_not_purged(place: Place) -> None:
    for words in (("purge",), ("keys", "rotate")):
        refused = run(*words, "--vault", place.path, "--key-provider", "ephemeral:")
        assert refused.code == 2
        refused.assert_two_lines()
