"""Promise 7 and the sixth thing that the core must show: a vault that somebody changed.

Always: no wrong byte is ever served, the buffer of what is not served is zeroed, the counters tell
tampering, loss and miss apart, the vault can be used, and what was not touched still hits.
"""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvvault.errors import KvvaultError, UsageError, WrongKeyError
from kvvault.model import Outcome
from tests.core.golden import MODELS, TENANTS, Damaged, Golden
from tests.core.mutations import (
    FILE_KINDS,
    ROW_KINDS,
    Kind,
    flip_field,
    flip_in_file,
    flip_segment,
    flip_tenant,
    swap_a_column_of_two_tenants,
)
from tests.core.oracle import Tally, play
from tests.core.support import Home, assert_hits, assert_missing, flip, keys, namespace, put

ALL_KINDS = FILE_KINDS + ROW_KINDS


@pytest.fixture(scope="module")
def golden(memory: Path) -> Golden:
    return Golden(Path(tempfile.mkdtemp(dir=memory)))


@pytest.fixture(scope="module")
def damaged(golden: Golden, memory: Path) -> Damaged:
    return Damaged(golden, Path(tempfile.mkdtemp(dir=memory)))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every mutation is logged, as it must be; ten thousand of them are not worth keeping."""
    logging.getLogger("kvvault").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvvault").setLevel(logging.NOTSET)


def random_round(damaged: Damaged, seed: str, tally: Tally, first: list[Kind]) -> None:
    """Some mutations at once, beginning with `first`; a third of the rounds on an open vault."""
    rng = random.Random(seed)
    live = all(kind in FILE_KINDS for kind in first) and rng.random() < 0.5
    kinds = FILE_KINDS if live else ALL_KINDS
    play(
        damaged,
        first + [rng.choice(kinds) for _ in range(14 - len(first))],
        rng,
        tally,
        live=live,
        read_only=rng.random() < 0.6,
    )


def test_nothing_changed(damaged: Damaged) -> None:
    # The positive control of everything below.
    tally = Tally()
    for read_only in (True, False):
        for live in (True, False):
            play(damaged, [], random.Random(0), tally, read_only=read_only, live=live)
    assert tally.outcomes == {Outcome.HIT: 4 * len(damaged.golden.blocks)}


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
def test_req_f4_each_kind_of_damage_alone(damaged: Damaged, kind: Kind) -> None:
    tally = Tally()
    for live, read_only in ((kind in FILE_KINDS, True), (False, False)):
        seed = random.Random(f"{kind.__name__} {live} {read_only}")
        play(damaged, [kind], seed, tally, live=live, read_only=read_only)
    assert tally.outcomes[Outcome.HIT] > 0


@pytest.mark.parametrize("seed", range(6))
def test_much_damage_at_once(damaged: Damaged, seed: int) -> None:
    random_round(damaged, f"fast {seed}", Tally(), [])


class TestEachWay:
    """Which counter goes up, and that the damage is done at all."""

    def count(self, damaged: Damaged, kind: Kind, *, live: bool = False) -> dict[Outcome, int]:
        tally = Tally()
        play(damaged, [kind], random.Random(1), tally, live=live)
        total = len(damaged.golden.blocks)
        return {o: n for o, n in tally.outcomes.items() if o is not Outcome.HIT or n != total}

    def test_a_flipped_bit_of_a_file_costs_one_block(self, damaged: Damaged) -> None:
        total = len(damaged.golden.blocks)
        for live in (False, True):
            found = self.count(damaged, lambda d: flip_in_file(d, d.take(), 12345), live=live)
            assert found == {Outcome.HIT: total - 1, Outcome.TAMPERED: 1}

    @pytest.mark.parametrize(
        ("change", "tampered", "missed"),
        [
            (partial(flip_field, name="nonces", bit=0), 1, 0),
            (partial(flip_field, name="tags", bit=127), 1, 0),
            (partial(flip_field, name="block_ids", bit=64), 0, 1),
            (partial(flip_segment, column="wrapped_secret", bit=479), 4, 0),
            (partial(flip_segment, column="commitment", bit=0), 4, 0),
        ],
    )
    def test_a_flipped_bit_of_a_row(
        self, damaged: Damaged, change: Kind, tampered: int, missed: int
    ) -> None:
        found = self.count(damaged, change)
        assert found.get(Outcome.TAMPERED, 0) == tampered
        assert found.get(Outcome.MISS, 0) == missed
        assert found[Outcome.HIT] == len(damaged.golden.blocks) - tampered - missed

    @pytest.mark.parametrize("column", ["wrapped_key", "wrapped_index_key", "sealed_name"])
    def test_a_flipped_bit_of_a_tenant_costs_that_tenant(
        self, damaged: Damaged, column: str
    ) -> None:
        tally = Tally()
        play(damaged, [partial(flip_tenant, column=column, bit=100)], random.Random(1), tally)
        assert tally.refused_scopes == 1
        assert tally.outcomes == {Outcome.HIT: (len(TENANTS) - 1) * sum(MODELS.values())}

    def test_two_tenants_exchanged(self, damaged: Damaged) -> None:
        # Each column in turn, the one that only finds the row among them: nobody is served, or
        # stores, under another's key.
        refused = set()
        for seed in range(12):
            tally = Tally()
            play(damaged, [swap_a_column_of_two_tenants], random.Random(seed), tally)
            refused.add(tally.refused_scopes)
        assert refused <= {0, 2}
        assert 2 in refused


class TestLookupKeyAndEpoch:
    """The rows without which nothing can be opened."""

    @pytest.fixture
    def small(self, home: Home, tmp_path: Path) -> Home:
        from kvvault.crypto.providers import FileProvider

        home.provider = FileProvider.create(tmp_path / "keys")
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(4))
        return home

    def change(self, home: Home, name: str, how: Callable[[bytes], object]) -> None:
        with home.sql() as connection:
            (old,) = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
            connection.execute("UPDATE meta SET value = ? WHERE name = ?", (how(old), name))

    def bits(self, home: Home, name: str, bits: Iterator[int] | range) -> int:
        files = home.segment_files()
        for bit in bits:
            self.change(home, name, lambda old, bit=bit: flip(old, bit))  # type: ignore[misc]
            with pytest.raises(WrongKeyError):
                home.open()
            self.change(home, name, lambda old, bit=bit: flip(old, bit))  # type: ignore[misc]
        assert home.segment_files() == files
        with home.open() as vault:
            assert vault.recovery.clean
            assert_hits(vault, vault.scope("alice", namespace()), keys(4))
        return len(bits) if isinstance(bits, range) else 0

    @pytest.mark.parametrize("name", ["lookup_key", "root_epoch"])
    def test_some_bits(self, small: Home, name: str) -> None:
        self.bits(small, name, range(0, 256, 37))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "bits"), [("lookup_key", 480), ("root_epoch", 256)])
    def test_every_bit(self, small: Home, name: str, bits: int) -> None:
        assert self.bits(small, name, range(bits)) == bits

    @pytest.mark.parametrize("name", ["lookup_key", "root_epoch"])
    @pytest.mark.parametrize("value", [b"", b"x", 7, "text"])
    def test_something_else(self, small: Home, name: str, value: object) -> None:
        files = small.segment_files()
        self.change(small, name, lambda _: value)
        with pytest.raises(KvvaultError):
            small.open()
        assert small.segment_files() == files

    def test_the_key_file_itself(self, small: Home, tmp_path: Path) -> None:
        from kvvault.crypto.providers import FileProvider
        from kvvault.vault import Vault

        path = tmp_path / "keys"
        text = path.read_bytes()
        for position in range(0, len(text), 5):
            path.write_bytes(text[:position] + b"0" + text[position + 1 :])
            if path.read_bytes() == text:
                continue
            try:
                Vault.open(small.path, provider=FileProvider.open(path)).close()
            except KvvaultError:
                pass
            else:
                pytest.fail(f"opened with byte {position} of the key file changed")
        path.write_bytes(text)
        with small.open() as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(4))


PLAN = st.lists(
    st.tuples(st.sampled_from(range(len(ALL_KINDS))), st.integers(0, 1 << 30)),
    min_size=1,
    max_size=10,
)


def play_plan(damaged: Damaged, plan: list[tuple[int, int]], live: bool, read_only: bool) -> int:
    """A plan that hypothesis drew: each mutation chooses with a generator of its own, so that a
    failing plan shrinks to the mutations that matter."""

    def step(index: int, seed: int) -> Kind:
        def run(damaged: Damaged) -> None:
            damaged.rng = random.Random(seed)
            ALL_KINDS[index](damaged)

        return run

    live = live and all(index < len(FILE_KINDS) for index, _ in plan)
    tally = Tally()
    play(
        damaged,
        [step(index, seed) for index, seed in plan],
        random.Random(0),
        tally,
        live=live,
        read_only=read_only,
    )
    return tally.mutations


@settings(max_examples=15, deadline=None)
@given(plan=PLAN, live=st.booleans(), read_only=st.booleans())
def test_any_combination(
    damaged: Damaged, plan: list[tuple[int, int]], live: bool, read_only: bool
) -> None:
    play_plan(damaged, plan, live, read_only)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestTenThousand:
    """1088 + 2 * 480 + 8 * 1000, besides the 736 of the rows above and what hypothesis tries."""

    def test_any_combination(self, damaged: Damaged) -> None:
        @settings(max_examples=120, deadline=None)
        @given(plan=PLAN, live=st.booleans(), read_only=st.booleans())
        def search(plan: list[tuple[int, int]], live: bool, read_only: bool) -> None:
            play_plan(damaged, plan, live, read_only)

        search()

    def test_every_bit_of_what_the_catalog_keeps_of_blocks_and_segments(
        self, damaged: Damaged
    ) -> None:
        bits: list[Kind] = []
        for name, size in (("block_ids", 16), ("nonces", 12), ("tags", 16)):
            bits += [partial(flip_field, name=name, bit=bit) for bit in range(8 * size)]
        for column, size in (("wrapped_secret", 60), ("commitment", 32)):
            bits += [partial(flip_segment, column=column, bit=bit) for bit in range(8 * size)]
        assert self.play_all(damaged, bits, len(damaged.golden.mutable)) == 1088

    @pytest.mark.parametrize("column", ["wrapped_key", "wrapped_index_key"])
    def test_every_bit_of_tenants_keys(self, damaged: Damaged, column: str) -> None:
        bits: list[Kind] = [partial(flip_tenant, column=column, bit=bit) for bit in range(480)]
        assert self.play_all(damaged, bits, len(TENANTS) - 1) == 480

    def play_all(self, damaged: Damaged, queue: list[Kind], at_once: int) -> int:
        """Every mutation of `queue`, some at once, none on what another one changed."""
        tally = Tally()
        for start in range(0, len(queue), at_once):
            play(damaged, queue[start : start + at_once], random.Random(start), tally)
        return tally.mutations

    @pytest.mark.parametrize("part", range(8))
    def test_one_thousand_of_any_kind(
        self, damaged: Damaged, part: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tally = Tally()
        for turn in itertools.count():
            kind = ALL_KINDS[(5 * part + turn) % len(ALL_KINDS)]
            random_round(damaged, f"slow {part} {turn}", tally, [kind])
            if tally.mutations >= 1000:
                break
        assert min(tally.outcomes[o] for o in (Outcome.HIT, Outcome.TAMPERED, Outcome.MISS)) > 500
        with capsys.disabled():
            print(f"\n{tally.mutations} mutations in {tally.rounds} rounds: {dict(tally.outcomes)}")


def test_with_o_direct(golden: Golden, tmp_path: Path) -> None:
    """A real disk, where a truncation within a page cannot be read up to."""
    damaged = Damaged(golden, tmp_path)
    tally = Tally()
    for seed, kind in enumerate(FILE_KINDS):
        play(damaged, [kind] * 3, random.Random(seed), tally, live=bool(seed % 2), direct=True)
    assert tally.outcomes[Outcome.TAMPERED] > 20


def test_unknown_tenants_and_refused_ones_differ(home: Home) -> None:
    # What the oracle calls unknown and unreachable are two different errors.
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(2))
    with home.open(read_only=True) as vault, pytest.raises(UsageError):
        vault.scope("bob", namespace())
    with home.open() as vault:
        assert_missing(vault, vault.scope("bob", namespace()), keys(2))
