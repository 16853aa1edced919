"""What is written into the log, when, and what never is."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection

from kvvault.catalog import jobs, log, purging
from kvvault.catalog.log import canonical, link_of
from kvvault.errors import FormatError
from kvvault.model import Outcome
from kvvault.policy import shipped
from kvvault.upkeep import jobs_of
from kvvault.vault import Vault
from tests.audit.conftest import SECRETS, Past
from tests.core.support import Home, flip, get, keys, namespace, put


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "vault")


def kinds(vault: Vault, start: int = 0) -> list[str]:
    return [json.loads(body)["kind"] for _, body in vault.audit.bodies(start)]


def test_a_new_vault_begins_its_log(home: Home) -> None:
    with home.create() as vault:
        assert kinds(vault) == ["vault-created", "signing-key-made", "policy-applied"]
        made = vault.audit.tail(2)[0]
        assert made.facts["public_key"] == vault.audit.key.text
    with home.open() as vault:
        assert vault.audit.size() == 3  # opening it is no act


def test_every_act_is_written_down(home: Home) -> None:
    with home.create() as vault:
        start = vault.audit.size()

        def new() -> list[str]:
            nonlocal start
            found = kinds(vault, start)
            start += len(found)
            return found

        scope = vault.scope("acme", namespace())
        assert new() == ["tenant-key-made"]
        vault.scope("acme", namespace(2 * 4096))
        put(vault, scope, keys(8))
        get(vault, scope, keys(8))
        assert new() == []
        hold = vault.place_hold(tenant="acme", reason="why", actor="counsel")
        vault.clear_hold(hold.number, reason="over", actor="counsel")
        assert new() == ["hold-placed", "hold-cleared"]
        vault.apply_policy(shipped.load("gdpr-30d"), actor="operator")
        assert new() == ["policy-applied"]
        vault.accept_clock()
        assert new() == ["clock-accepted"]
        vault.forget("acme")
        assert new() == ["deletion", "receipt"]
        vault.purge()
        assert new() == ["purge-begun", "root-key-destroyed", "receipt", "purge-verified"]


def test_the_log_says_who_applied_which_policy(home: Home) -> None:
    with home.create() as vault:
        policy = shipped.load("gdpr-30d")
        vault.apply_policy(policy, actor="operator")
        [entry] = vault.audit.tail(1)
        assert entry.facts == {"policy": 2, "sha256": policy.digest.hex(), "actor": "operator"}


def test_a_refused_act_is_not_written_down(home: Home) -> None:
    with home.create() as vault:
        vault.scope("acme", namespace())
        vault.place_hold(tenant="acme", reason="why", actor="counsel")
        size = vault.audit.size()
        with pytest.raises(Exception, match="hold"):
            vault.forget("acme")
        with pytest.raises(Exception, match="no hold"):
            vault.clear_hold(99, reason="why", actor="counsel")
        assert vault.audit.size() == size


def test_the_log_holds_nothing_personal(past: Past) -> None:
    """REQ-A4: neither names nor reasons, nor ids that lead to somebody without the tenant's key."""
    with past.home.open(read_only=True) as vault:
        bodies = [body for _, body in vault.audit.bodies()]
        tenants = [row.tenant_id.hex() for row in vault.tenants()]
    text = "\n".join(bodies)
    assert len(tenants) == 1
    for secret in [*SECRETS.values(), *tenants, "Jane", "acme"]:
        assert secret not in text
    assert "operator" in text  # the control: it is the right text


def test_a_tenant_goes_by_one_keyed_id(home: Home) -> None:
    with home.create() as vault:
        scope = vault.scope("acme", namespace())
        vault.place_hold(tenant="acme", reason="why", actor="counsel")
        entries = {entry.kind: entry for entry in vault.audit.tail(10)}
        known = scope._keys.keyed_id("log", b"tenant").hex()
    assert entries["tenant-key-made"].facts == {"tenant": known}
    assert entries["hold-placed"].facts["target"] == known


def test_a_job_that_fails_is_written_down_once_until_it_recovers(home: Home) -> None:
    with home.create() as vault:
        start = vault.audit.size()
        for outcome in ("ok", "failed", "failed", "refused", "ok", "ok", "failed"):
            vault.catalog.write(partial(_run, outcome=outcome))
        entries = vault.audit.tail(vault.audit.size() - start)
    assert [entry.kind for entry in entries] == ["job-failed", "job-recovered", "job-failed"]
    assert entries[0].facts == {"job": "expire", "outcome": "failed"}


def _run(connection: Connection, outcome: str) -> None:
    jobs.add_run(connection, "expire", b"h", 1.0, 2.0, outcome, "detail of /a/path", keep=3)


def test_the_checkpoint_job_signs_when_the_log_grew(home: Home) -> None:
    with home.create() as vault:
        [job] = [job for job in jobs_of(vault) if job.name == "checkpoint"]
        for size in (3, 3, 4):
            while vault.audit.size() < size:
                vault.accept_clock()
            job.run(None)  # type: ignore[arg-type]
        stored = vault.catalog.read(log.checkpoints)
        assert [row.size for row in stored] == [3, 4]
        assert vault.audit.verify().checkpoints == 2


def test_damage_is_written_down_once_however_often_it_is_met(home: Home) -> None:
    with home.create() as vault:
        put(vault, vault.scope("acme", namespace()), keys(8))
    [one, other] = home.segment_files()
    one.write_bytes(flip(flip(one.read_bytes(), 5), 8 * 4096 + 5))
    with home.open() as vault:
        scope = vault.scope("acme", namespace())
        size = vault.audit.size()
        for _ in range(3):
            outcomes, _ = get(vault, scope, keys(8))
        assert outcomes.count(Outcome.MISS) == 2
        vault._watcher.report()
        vault._watcher.report()
        vault.catalog.write(lambda _: None)  # what was submitted before is committed
        found = [e for e in vault.audit.tail(20) if e.kind == "damage-found"]
        assert vault.audit.size() == size + 1
    assert [entry.facts["altered"] for entry in found] == [2]
    assert found[0].facts["segments"] == [one.stem]
    with home.open() as vault:
        report = vault.verify()
        assert report.tampered == 2
        [entry] = vault.audit.tail(1)
        assert (entry.kind, entry.facts["by"]) == ("damage-found", "check")
        assert entry.facts["segments"] == [one.stem]
    with home.open(read_only=True) as vault:
        vault.verify()
    assert other.exists()


def test_more_damaged_segments_than_are_named_are_counted() -> None:
    from kvvault.counters import OTHERS, Counters, Damage

    counters = Counters()
    for number in range(40):
        counters.damage(number.to_bytes(16, "big"), altered=1)
    found = counters.take_damage()
    assert len(found) == 17
    assert found[OTHERS] == Damage(altered=24)
    assert counters.take_damage() == {}


# -- one entry -------------------------------------------------------------------------------------


def test_entries_are_chained(home: Home) -> None:
    with home.create() as vault:
        bodies = [body for _, body in vault.audit.bodies()]
    assert "prev" not in json.loads(bodies[0])
    for before, after in itertools.pairwise(bodies):
        assert json.loads(after)["prev"] == link_of(before)


def test_facts_cannot_pass_for_what_every_entry_has(home: Home) -> None:
    with home.create() as vault:
        facts: dict[str, log.Fact] = {
            "kind": "other",
            "at": "never",
            "prev": "x",
            "n": 2**60,
            "t": "\ud800",
        }
        vault.catalog.write(lambda c: log.append(c, "real", 1.0, facts))
        [entry] = vault.audit.tail(1)
    assert (entry.kind, entry.at) == ("real", 1.0)
    assert entry.facts == {"n": 2**53 - 1, "t": "\\ud800"}


def test_what_cannot_be_said_exactly_is_said_nearly() -> None:
    assert canonical({"a": [float("nan"), -(2**70), True, None, (1,)]}) == (
        '{"a":[null,-9007199254740991,true,null,[1]]}'
    )


def test_a_tail_of_a_damaged_log_is_an_error(home: Home) -> None:
    with home.create():
        pass
    with home.sql() as sql:
        sql.execute("UPDATE log_entries SET body='{}' WHERE entry_no=1")
    with home.open(read_only=True) as vault, pytest.raises(FormatError, match="entry 1"):
        vault.audit.tail(5)


def test_a_signing_key_is_made_once(home: Home) -> None:
    """Whoever is slower than another process, or than a purge, is refused and looks again."""
    with home.create() as vault:
        root = vault.catalog.read(purging.root)
        assert root is not None
        with pytest.raises(purging.EpochReplacedError):
            vault.catalog.write(lambda c: purging.put_signing_key(c, root.epoch, b"other"))
        assert vault.catalog.read(purging.root) == root
