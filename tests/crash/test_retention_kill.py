"""kill -9 at the steps of expiry and deletion: what is dead stays dead, all else stays.

In the vault: tenant alpha's blocks die after an hour, beta's after a day, gamma's after an hour,
but a hold keeps them. The scenarios run by a clock of their own, so that hour passes at once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import insert

from kvvault.catalog import schema as t
from kvvault.crypto.providers import FileProvider
from kvvault.model import Outcome
from kvvault.policy.document import Policy
from kvvault.segments.format import segment_name
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.crash.blocks import NAMESPACES, OPTIONS, Ledger, check_at_rest, get, plaintext_in, put
from tests.crash.processes import Nursery
from tests.crash.roles import DEADLINE_S
from tests.crash.test_kill import steps_of

POLICY = Policy.parse(
    "kvvault: 1\nname: kill\ndescription: an hour and a day\nvault: {cap: 64GiB, free_floor: 1B}\n"
    "rules:\n"
    "  - {name: long, match: {tenant: beta}, delete_by: 24h, owner: tests, justification: a test}\n"
    "  - {name: short, delete_by: 1h, owner: tests, justification: a test}\n"
)
NUMBERS = range(10)


@pytest.fixture
def template(place: Path) -> Path:
    """A closed vault with blocks of all three, each in three segments."""
    path = place / "template"
    provider = FileProvider.open(place / "key")
    with Vault.create(
        path, provider=provider, options=OPTIONS, clock=ManualClock(), policy=POLICY
    ) as vault:
        for tenant in ("alpha", "beta", "gamma"):
            scope = vault.scope(tenant, NAMESPACES[0])
            assert put(vault, scope, tenant, NUMBERS) == len(NUMBERS)
        target = vault.scope("gamma", NAMESPACES[0]).tenant_id
        hold = {"kind": "tenant", "target": target, "reason": "-", "actor": "-", "placed_at": 0.0}
        vault._catalog.write(lambda c: c.execute(insert(t.holds).values(**hold)).rowcount)
    return path


def open_at(path: Path, seconds: float) -> Vault:
    return Vault.open(path, options=OPTIONS, clock=ManualClock(ManualClock().now() + seconds))


def hits(vault: Vault, tenant: str, numbers: range = NUMBERS) -> int:
    """How many are served; what is not must be a miss."""
    outcomes = get(vault, vault.scope(tenant, NAMESPACES[0]), tenant, numbers)
    assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
    return outcomes.count(Outcome.HIT)


def live_of(vault: Vault, tenant: str) -> list[bytes]:
    tenant_id = vault.scope(tenant, NAMESPACES[0]).tenant_id
    return [f.segment_id for f in vault.segments() if f.state.live and f.tenant_id == tenant_id]


def check(path: Path, lines: list[str]) -> Counter[str]:
    """Hold a vault that was left by a kill against what the dead process said."""
    said = {line.split()[0]: line.split()[1:] for line in lines}
    seen = Counter[str]()
    # By a clock that says that the hour is not over: what is not expired yet is all there.
    with open_at(path, 0.0) as vault:
        assert vault.recovery.lost_blocks == 0
        assert vault.recovery.lost_segments == 0
        seen["alive"] += hits(vault, "alpha") == len(NUMBERS)
        assert hits(vault, "alpha") in (0, len(NUMBERS))
        if "expired" in said:
            assert hits(vault, "alpha") == 0
        check_at_rest(vault, Ledger())
    with open_at(path, DEADLINE_S) as vault:
        assert vault.recovery.clean
        # Past its deadline: not served, no key, no file; not a block of it anywhere.
        assert hits(vault, "alpha") == 0
        stored_since = hits(vault, "alpha", range(100, 103))
        assert ("stored" not in said) or stored_since == 3
        dead = [f for f in vault.segments() if not f.state.live]
        assert len(dead) >= 3
        assert not any((path / "segments" / segment_name(f.segment_id)).exists() for f in dead)
        # Held: there to the byte, and not served.
        held = live_of(vault, "gamma")
        assert len(held) == 3
        assert hits(vault, "gamma") == 0
        # Neither: served, but for what was deleted.
        left = live_of(vault, "beta")
        if "deleted" in said:
            assert bytes.fromhex(said["deleted"][0]) not in left
        if "deleting" not in said:
            assert hits(vault, "beta") == len(NUMBERS)
        assert len(left) >= 2
        assert hits(vault, "beta") >= len(NUMBERS) - 4
        check_at_rest(vault, Ledger())
    assert not plaintext_in(path)
    seen["expired"] += "expired" in said
    seen["killed"] += "steps" not in said
    return seen


def killed(nursery: Nursery, template: Path, scenario: str, tried: int) -> Counter[str]:
    seen = Counter[str]()
    for path, lines in steps_of(nursery, template.parent, scenario, template, tried):
        seen += check(path, lines)
    print(seen)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["expire", "open_late"])
def test_killed_at_steps_of_expiry(nursery: Nursery, template: Path, scenario: str) -> None:
    seen = killed(nursery, template, scenario, 12)
    assert seen["killed"]
    assert seen["expired"]


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("scenario", ["expire", "open_late"])
def test_killed_at_each_step_of_expiry(nursery: Nursery, template: Path, scenario: str) -> None:
    seen = killed(nursery, template, scenario, 0)
    assert seen["killed"]
    assert seen["expired"]
    assert seen["alive"], "no kill came before the expiry"
