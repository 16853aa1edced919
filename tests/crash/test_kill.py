"""kill -9 at random moments under load (promises 2, 3 and 5; the soak run does more of the same).

A kill takes the process, not the machine: what put() acknowledged must be there afterwards, what a
deletion acknowledged must not, and between catalog and files not one byte may be unexplained.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvvault.crypto.providers import FileProvider
from kvvault.errors import VaultExistsError, VaultNotFoundError
from kvvault.vault import Vault
from tests.crash.blocks import (
    NAMESPACES,
    OPTIONS,
    TENANTS,
    Ledger,
    check_at_rest,
    check_blocks,
    known_blocks,
    modes_ok,
    plaintext_in,
    put,
    segments_of,
)
from tests.crash.processes import Nursery
from tests.crash.roles import FLEETING, KEPT

NUMBERS = 64

Known = dict[tuple[str, int], set[int]]


def nothing() -> Known:
    return {(tenant, i): set() for tenant in TENANTS for i in range(len(NAMESPACES))}


@dataclass
class Expected:
    """What reports say about the vault: blocks that must be there, and that must not."""

    there: Known = field(default_factory=nothing)
    gone: Known = field(default_factory=nothing)
    dead: set[bytes] = field(default_factory=set)

    def read(self, lines: list[str]) -> None:
        for line in lines:
            what, *words = line.split()
            match what:
                case "P":
                    self._move(words[0], int(words[1]), words[2], self.there, self.gone)
                case "p" if len(words) == 2:
                    self._move(FLEETING, int(words[0]), words[1], None, self.gone)
                case "d":
                    for i, numbers in enumerate(words):
                        self._move(FLEETING, i, numbers, None, self.there)
                case "D":
                    for i, numbers in enumerate(words):
                        self._move(FLEETING, i, numbers, self.gone, self.there)
                case "f" | "F":
                    for i in range(len(NAMESPACES)):
                        self.there[FLEETING, i].clear()
                        if what == "F":
                            self.gone[FLEETING, i] = set(range(NUMBERS))
                case "X" if words:
                    self.dead |= {bytes.fromhex(word) for word in words[0].split(",")}
                case "!":
                    raise AssertionError("in the child:\n" + "\n".join(lines[-40:]))

    def _move(self, tenant: str, i: int, numbers: str, to: Known | None, from_: Known) -> None:
        moved = set() if numbers == "-" else {int(n) for n in numbers.split(",")}
        from_[tenant, i] -= moved
        if to is not None:
            to[tenant, i] |= moved


class Rounds:
    """Load, kill, perhaps kill the repair too, look at everything, thin out, and again."""

    def __init__(self, nursery: Nursery, path: Path, seed: int) -> None:
        self.nursery = nursery
        self.path = path
        self.rng = random.Random(seed)
        self.expected = Expected()
        self.ledger = Ledger()
        self.seen: Counter[str] = Counter()
        self.opening_s = 0.1

    def round(self) -> None:
        self._load_and_kill()
        while self.rng.random() < 0.35:
            self._open_and_kill()
        assert not plaintext_in(self.path)
        assert modes_ok(self.path)
        self._check()

    def _load_and_kill(self) -> None:
        stop_after = self.rng.uniform(0.02, 0.2) if self.rng.random() < 0.2 else None
        child = self.nursery.start(
            "load",
            self.path.parent,
            vault=str(self.path),
            seed=self.rng.getrandbits(32),
            numbers=NUMBERS,
            stop_after=stop_after,
        )
        child.wait_for("opened")
        if stop_after is not None:
            child.wait_for("closing")
            time.sleep(self.rng.uniform(0, 0.01))
        else:
            time.sleep(self.rng.uniform(0, 0.3))
        status = child.kill()
        assert status in (0, -signal.SIGKILL)
        lines = child.lines()
        self.expected.read(lines)
        self.seen["killed in close" if "closing" in lines else "killed in load"] += status != 0
        self.seen["acknowledged"] += sum(line[0] in "PDF" for line in lines)
        child.log.unlink(missing_ok=True)

    def _open_and_kill(self) -> None:
        begun = time.monotonic()
        child = self.nursery.start("reopen", self.path.parent, vault=str(self.path))
        time.sleep(self.rng.uniform(0, 1.3 * self.opening_s))
        child.kill()
        lines = child.lines()
        self.expected.read(lines)
        if lines:
            self.opening_s = (self.opening_s + time.monotonic() - begun) / 2
        else:
            self.opening_s *= 1.1
            self.seen["killed in open"] += 1
        child.log.unlink(missing_ok=True)

    def _check(self) -> None:
        with Vault.open(self.path, options=OPTIONS) as vault:
            report = vault.recovery
            for name in (
                "sealed_segments",
                "cut_bytes",
                "destroyed_files",
                "lost_segments",
                "finished_deletions",
            ):
                self.seen[name] += getattr(report, name)
            assert report.lost_blocks == 0, "committed blocks were lost"
            self.ledger.dead |= self.expected.dead
            check_at_rest(vault, self.ledger)
            there = check_blocks(vault, range(NUMBERS))
            for scope, blocks in there.items():
                assert self.expected.there[scope] <= blocks, "an acknowledged block is gone"
                assert not self.expected.gone[scope] & blocks, "a deleted block is back"
            self.seen["blocks"] += sum(map(len, there.values()))
            kept = segments_of(vault, KEPT)
            vault.delete_segments(self.rng.sample(kept, len(kept) // 3))
            self.expected.there = known_blocks(vault, range(NUMBERS))
            # What was announced for the kept tenants is not reported: it may be there next time.
            self.expected.gone = nothing()
            for i in range(len(NAMESPACES)):
                scope = FLEETING, i
                self.expected.gone[scope] = set(range(NUMBERS)) - self.expected.there[scope]
        assert not plaintext_in(self.path)


def run(nursery: Nursery, path: Path, rounds: int, seed: int) -> Counter[str]:
    """Run rounds; returns how often the kill met what."""
    print(f"seed {seed}")
    work = Rounds(nursery, path, seed)
    for _ in range(rounds):
        work.round()
    print(dict(work.seen))
    return work.seen


def met_everything(seen: Counter[str]) -> bool:
    """Whether the kills interrupted all that they should: else the rounds prove nothing."""
    return all(
        seen[name]
        for name in (
            "killed in load",
            "killed in close",
            "killed in open",
            "acknowledged",
            "blocks",
            "sealed_segments",
            "cut_bytes",
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundred_kills(nursery: Nursery, path: Path) -> None:
    seen = run(nursery, path, 100, int(os.environ.get("KVVAULT_SEED", time.time_ns())))
    assert met_everything(seen), seen


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_kills(nursery: Nursery, path: Path) -> None:
    rounds = int(os.environ.get("KVVAULT_SOAK_ROUNDS", "500"))
    seen = run(nursery, path, rounds, int(os.environ.get("KVVAULT_SEED", time.time_ns())))
    assert met_everything(seen), seen


def steps_of(
    nursery: Nursery, place: Path, scenario: str, template: Path | None, tried: int
) -> Iterator[tuple[Path, list[str]]]:
    """Run a scenario on copies of a vault, killed at `tried` of its steps (0: at each of them);
    yields each copy, and what the dead process had reported."""
    first = run_steps(nursery, place, scenario, template, 0)
    total = int(first[1][-1].split()[1])
    assert total > 10
    yield first
    steps = range(1, total + 1)
    if tried:
        # Others each time: the runs together come past all of them.
        steps_tried = sorted(random.sample(steps, min(tried, total)))
        print("steps", steps_tried)
    else:
        steps_tried = list(steps)
    for at in steps_tried:
        yield run_steps(nursery, place, scenario, template, at)
        if (place / scenario).exists():
            shutil.rmtree(place / scenario)


def run_steps(
    nursery: Nursery, place: Path, scenario: str, template: Path | None, at: int
) -> tuple[Path, list[str]]:
    """Run a scenario up to its step `at` (there is no step 0: to its end)."""
    vault = place / scenario
    if vault.exists():
        shutil.rmtree(vault)
    if template is not None:
        shutil.copytree(template, vault)
    child = nursery.start(
        "step", place, scenario=scenario, vault=str(vault), at=at, torn=bool(at % 2)
    )
    status = child.wait()
    lines = child.lines()
    if status == 0:
        # Threads may take a step more or less each time: the last ones may not be reached.
        assert int(lines[-1].split()[1]) < at or not at, "it should have died"
    else:
        assert status == -signal.SIGKILL, lines
    return vault, lines


def making(nursery: Nursery, place: Path, tried: int) -> None:
    for path, _ in steps_of(nursery, place, "create", None, tried):
        # There is a vault or there is none; both can be gone on with.
        try:
            vault = Vault.open(path, options=OPTIONS)
        except VaultNotFoundError:
            provider = FileProvider.open(place / "key")
            vault = Vault.create(path, provider=provider, options=OPTIONS)
        with vault:
            scope = vault.scope("alpha", NAMESPACES[0])
            assert put(vault, scope, "alpha", range(6)) == 6
        with Vault.open(path, options=OPTIONS) as vault:
            assert vault.recovery.clean
            check_at_rest(vault, Ledger())
            assert check_blocks(vault, range(6))["alpha", 0] == set(range(6))
        assert modes_ok(path)


def working(nursery: Nursery, path: Path, tried: int) -> None:
    found = Counter[str]()
    for vault, lines in steps_of(nursery, path.parent, "work", path, tried):
        found += check_after(vault, lines)
    assert found["blocks"], found
    assert found["repaired"], found


def repairing(nursery: Nursery, path: Path, tried: int) -> None:
    dirty = path.parent / "dirty"
    lines = make_dirty(nursery, path, dirty)
    found = Counter[str]()
    for vault, _ in steps_of(nursery, path.parent, "reopen", dirty, tried):
        found += check_after(vault, lines)
    assert found["blocks"], found
    assert found["repaired"], found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_steps_of_making_a_vault(nursery: Nursery, place: Path) -> None:
    making(nursery, place, 15)


def test_what_a_killed_init_left_does_not_keep_the_next_out(place: Path) -> None:
    provider = FileProvider.open(place / "key")
    path = place / "vault"
    (path / "segments").mkdir(parents=True)
    (path / ".VAULT.new").write_text('{"kvv')
    with pytest.raises(VaultNotFoundError):
        Vault.open(path, options=OPTIONS)
    (path / "segments" / "something").write_text("of somebody's")
    with pytest.raises(VaultExistsError):
        Vault.create(path, provider=provider, options=OPTIONS)
    (path / "segments" / "something").unlink()
    Vault.create(path, provider=provider, options=OPTIONS).close()
    assert modes_ok(path)
    with pytest.raises(VaultExistsError):
        Vault.create(path, provider=provider, options=OPTIONS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_steps_of_work(nursery: Nursery, path: Path) -> None:
    working(nursery, path, 25)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_steps_of_repairing(nursery: Nursery, path: Path) -> None:
    """What a repair that was killed leaves, the next one repairs."""
    repairing(nursery, path, 25)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_killed_at_each_step(nursery: Nursery, path: Path) -> None:
    making(nursery, path.parent, 0)
    working(nursery, path, 0)
    repairing(nursery, path, 0)


def check_after(path: Path, lines: list[str]) -> Counter[str]:
    """Open a vault that was left by a kill, and hold it against what the dead process said."""
    expected = Expected()
    expected.read(lines)
    assert not plaintext_in(path)
    assert modes_ok(path)
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.lost_blocks == 0
        check_at_rest(vault, Ledger(dead=expected.dead))
        there = check_blocks(vault, range(NUMBERS))
        for scope, blocks in there.items():
            assert expected.there[scope] <= blocks, "an acknowledged block is gone"
            assert not expected.gone[scope] & blocks, "a deleted block is back"
        repaired = not vault.recovery.clean
    if repaired:
        with Vault.open(path, options=OPTIONS) as vault:
            assert vault.recovery.clean, "a repair leaves nothing to repair"
    return Counter(blocks=sum(map(len, there.values())), repaired=int(repaired))


def make_dirty(nursery: Nursery, path: Path, dirty: Path) -> list[str]:
    """A vault with every kind of damage that a kill can leave; returns what was reported."""
    child = nursery.start("step", path.parent, scenario="work", vault=str(path), at=0)
    assert child.wait() == 0
    lines = child.lines()
    child = nursery.start("load", path.parent, vault=str(path), seed=1, numbers=NUMBERS)
    child.wait_until(lambda lines: sum(line[0] == "P" for line in lines) >= 20)
    child.kill()
    lines += child.lines()
    shutil.copytree(path, dirty)
    segments = dirty / "segments"
    names = sorted(p.name for p in segments.iterdir())
    with (segments / names[0]).open("ab") as tail:  # never committed
        tail.write(os.urandom(5000))
    orphan = segments / f"{os.urandom(16).hex()}.seg"
    orphan.write_bytes(os.urandom(8192))
    orphan.chmod(0o600)
    return lines


def test_the_search_finds_plaintext(path: Path) -> None:
    """Positive control of `plaintext_in`: a file with one line of a block is found."""
    from tests.crash.blocks import block_of

    assert plaintext_in(path) == []
    leak = path / "segments" / "leak"
    leak.write_bytes(bytes(1000) + block_of("alpha", NAMESPACES[0], 1)[640:704] + bytes(1000))
    assert plaintext_in(path) == [leak]
