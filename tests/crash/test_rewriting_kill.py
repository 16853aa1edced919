"""kill -9 at the steps of eviction, of deleting single blocks, and of erasing a person's prompts:
all of them write blocks again, and all delete. Nothing is lost that should stay, and nothing is
back that went.

In the vault: alpha's blocks may be evicted, some of them are in use; beta's are on hold; gamma's
have a floor; delta's are as alpha's, and nobody uses them. Each has ten blocks in three segments.
Alpha's are of two persons' prompts, which begin alike.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select

from kvvault.catalog import schema as t
from kvvault.crypto.providers import FileProvider
from kvvault.model import Outcome
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.crash.blocks import (
    NAMESPACES,
    OPTIONS,
    Ledger,
    block_of,
    check_at_rest,
    get,
    key_of,
    plaintext_in,
    put,
)
from tests.crash.processes import Nursery
from tests.crash.roles import DOOMED, HOT, full_at
from tests.crash.test_kill import steps_of

WHOSE = ("alpha", "beta", "gamma", "delta")
NUMBERS = range(10)
ANNA, BERT = (0, 1, 2, 3, 4, 5), (0, 1, 2, 6, 7, 8, 9)
PRIVATE = set(ANNA) - set(BERT)
EVERY = range(110)
"""All numbers that any block has."""


@pytest.fixture
def template(place: Path) -> Path:
    path = place / "template"
    provider = FileProvider.open(place / "key")
    with Vault.create(
        path, provider=provider, options=OPTIONS, clock=ManualClock(), policy=full_at(2 << 20)
    ) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        for subject, numbers in (("anna", ANNA), ("bert", BERT)):
            prompt = vault.prompt(scope, request_id=subject, subject=subject)
            chain = {key_of(n): 16 * (i + 1) for i, n in enumerate(numbers)}
            blocks = [block_of("alpha", scope.namespace, n) for n in numbers]
            vault.put(scope, list(chain), blocks, prompt=prompt, ends=list(chain.values()))
            vault.record(prompt, chain)
            vault.settle_prompts()
        for tenant in WHOSE[1:]:
            assert put(vault, vault.scope(tenant, NAMESPACES[0]), tenant, NUMBERS) == 10
        vault.place_hold(reason="test", actor="test", tenant="beta")
    return path


def open_late(path: Path) -> Vault:
    return Vault.open(path, options=OPTIONS, clock=ManualClock(ManualClock().now() + 120))


def hits(vault: Vault, tenant: str) -> set[int]:
    """Which blocks are served, to the byte; what is not must be a miss."""
    outcomes = get(vault, vault.scope(tenant, NAMESPACES[0]), tenant, EVERY)
    assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
    return {n for n, outcome in zip(EVERY, outcomes, strict=True) if outcome is Outcome.HIT}


def check(path: Path, lines: list[str], first: set[bytes]) -> dict[str, set[int]]:
    """What holds for both scenarios; which blocks are served.

    :param first: the segments that there were.
    """
    assert not plaintext_in(path)
    dead = {bytes.fromhex(i) for line in lines if line[0] == "X" for i in line[2:].split(",")}
    ledger = Ledger(dead=dead)
    with open_late(path) as vault:
        assert vault.recovery.lost_blocks == vault.recovery.lost_segments == 0
        check_at_rest(vault, ledger)
        served = {tenant: hits(vault, tenant) for tenant in WHOSE}
        # Each segment with blocks that has no key any more went by a deletion that is written down.
        live = {facts.segment_id for facts in vault.segments() if facts.state.live}
        assert vault.catalog.read(deleted_segments) >= len((first | dead) - live)
    with open_late(path) as vault:  # by opening it nothing comes back, and nothing goes
        assert vault.recovery.clean
        check_at_rest(vault, ledger)
        assert {tenant: hits(vault, tenant) for tenant in WHOSE} == served
    assert not plaintext_in(path)
    return served


def deleted_segments(connection: Connection) -> int:
    return int(connection.execute(select(func.sum(t.deletions.c.segments))).scalar() or 0)


def check_eviction(path: Path, lines: list[str], first: set[bytes], seen: Counter[str]) -> None:
    served = check(path, lines, first)
    said = dict(line.split(" ", 1) for line in lines)
    # On hold, or below its floor: untouched.
    assert served["beta"] == served["gamma"] == set(NUMBERS)
    # Nothing but what was stored, whole.
    assert served["alpha"] <= {*NUMBERS, *range(100, 104)}
    assert served["delta"] <= set(NUMBERS)
    if "evicted" in said:
        # All that was there when it returned, blocks that were written again among them.
        assert served["alpha"] == {int(n) for n in said["evicted"].split(",") if n}
    elif "stored" not in said:
        assert served["delta"] == set(NUMBERS)
        untouched = served["alpha"] >= set(NUMBERS)
        seen["before"] += untouched
        seen["between"] += not untouched
    seen["evicted"] += "evicted" in said
    seen["written again"] += int(said.get("again", 0)) > 0 and bool(served["alpha"] & set(HOT))
    seen["killed"] += "steps" not in said


def check_deletion(path: Path, lines: list[str], first: set[bytes], seen: Counter[str]) -> None:
    served = check(path, lines, first)
    said = [line for line in lines if line.startswith("delet")]
    assert served["beta"] == served["gamma"] == set(NUMBERS)
    for tenant in ("alpha", "delta"):
        # What is not meant is there at every instant: it is copied before its segment goes.
        assert served[tenant] >= set(NUMBERS) - set(DOOMED)
        if f"deleted {tenant}" in said:
            assert not served[tenant] & set(DOOMED)
        elif f"deleting {tenant}" not in said:
            assert served[tenant] == set(NUMBERS)
        else:
            seen["between"] += served[tenant] != set(NUMBERS)
        seen["deleted"] += f"deleted {tenant}" in said
    seen["killed"] += "steps" not in {line.split()[0] for line in lines}


def check_erasure(path: Path, lines: list[str], first: set[bytes], seen: Counter[str]) -> None:
    served = check(path, lines, first)
    assert served["beta"] == served["gamma"] == served["delta"] == set(NUMBERS)
    # What the other person has, too, is there at every instant.
    assert served["alpha"] >= set(BERT)
    # The person's own goes at once, with the prompt, a deletion that is written down, its receipt.
    gone = not served["alpha"] & PRIVATE
    assert gone or served["alpha"] >= PRIVATE
    assert gone or "erased" not in lines
    with open_late(path) as vault:
        subjects = [prompt.subject for prompt in vault.prompts.listing()[0]]
        assert sorted(map(str, subjects)) == (["bert"] if gone else ["anna", "bert"])
        assert vault.catalog.read(erasures) == (gone, gone)
        # Whoever comes next finishes what was begun, and changes nothing else.
        vault.reconcile()
        assert vault.catalog.read(revoked_blocks) == 0
        assert hits(vault, "alpha") == served["alpha"]
        assert vault.audit.verify().ok
    with open_late(path) as vault:
        check_at_rest(vault, Ledger())
        assert hits(vault, "alpha") == served["alpha"]
    assert not plaintext_in(path)
    seen["erased"] += "erased" in lines
    seen["between"] += gone and "erased" not in lines
    seen["killed"] += not any(line.startswith("steps") for line in lines)


def erasures(connection: Connection) -> tuple[int, int]:
    """How many there were, and how many first receipts of them."""
    erased = select(t.deletions.c.deletion_no).where(t.deletions.c.trigger == "erase")
    named = t.receipts.c.deletion_no.in_(erased) & (t.receipts.c.phase == "revoked")
    return len(connection.execute(erased).all()), int(
        connection.execute(select(func.count()).select_from(t.receipts).where(named)).scalar_one()
    )


def revoked_blocks(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(t.revoked_blocks)).scalar_one())


SCENARIOS = {"evict": check_eviction, "delete_blocks": check_deletion, "erase": check_erasure}
GOALS = {
    "evict": ("evicted", "written again"),
    "delete_blocks": ("deleted",),
    "erase": ("erased",),
}


def killed(nursery: Nursery, template: Path, scenario: str, tried: int) -> Counter[str]:
    seen = Counter[str]()
    with open_late(template) as vault:
        first = {facts.segment_id for facts in vault.segments() if facts.state.live}
    assert len(first) == 3 * len(WHOSE)
    for path, lines in steps_of(nursery, template.parent, scenario, template, tried):
        assert not [line for line in lines if line.startswith("!")], lines
        SCENARIOS[scenario](path, lines, first, seen)
    print(seen)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_steps_of_rewriting(nursery: Nursery, template: Path, scenario: str) -> None:
    seen = killed(nursery, template, scenario, 12)
    assert all(seen[goal] for goal in ("killed", *GOALS[scenario])), seen


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_each_step_of_rewriting(nursery: Nursery, template: Path, scenario: str) -> None:
    seen = killed(nursery, template, scenario, 0)
    assert all(seen[goal] for goal in ("killed", "between", *GOALS[scenario])), seen
