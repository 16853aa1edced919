"""Who uses which blocks, against the definition: sets of pairs, made in the most simple way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvvault.sharing import FAR, Blocks, Links, Segments, Sharing

SIZES = (4096, 8192, 4096)
DEADLINES = (100.0, math.inf, 50.0)


@dataclass(frozen=True)
class World:
    """A catalog's worth: prompts (number → gone), links, blocks (owner, end, segment, id)."""

    prompts: dict[int, bool]
    links: dict[tuple[int, int], int]
    blocks: list[tuple[int, int, int, int]]

    def sharing(self) -> Sharing:
        return Sharing(
            column(self.prompts),
            np.array(list(self.prompts.values()), np.bool_),
            Links(
                column(user for user, _ in self.links),
                column(via for _, via in self.links),
                column(self.links.values()),
            ),
            Blocks(*(column(b[i] for b in self.blocks) for i in range(3))),
            Segments(column(SIZES), np.array(DEADLINES)),
        )

    def ids(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        return np.array([(b[3] // 3, b[3] % 3) for b in self.blocks], np.uint64).reshape(-1, 2)

    def rows_of(self, prompt: int) -> set[int]:
        """Which blocks a prompt has, by the definition."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()

        def walk(number: int, limit: int) -> None:
            if (number, limit) in seen:
                return
            seen.add((number, limit))
            found.update(
                i
                for i, (owner, end, _, _) in enumerate(self.blocks)
                if owner == number and end <= limit
            )
            for (user, via), upto in self.links.items():
                if user == number:
                    walk(via, min(limit, upto))

        walk(prompt, FAR)
        return found

    @property
    def living(self) -> list[int]:
        return [number for number, gone in self.prompts.items() if not gone]


def column(values: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(list(values), np.int64)  # type: ignore[call-overload]


numbers = st.integers(1, 9)
ends = st.integers(0, 6)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    prompts = draw(st.dictionaries(numbers, st.booleans(), max_size=8))
    links = draw(st.dictionaries(st.tuples(numbers, numbers), ends, max_size=14))
    blocks = draw(
        st.lists(
            st.tuples(st.integers(0, 9), ends, st.integers(0, 2), st.integers(0, 20)), max_size=25
        )
    )
    return World(prompts, links, blocks)


def check_figures(world: World) -> None:
    sharing = world.sharing()
    figures, by_id = sharing.figures(), sharing.figures(world.ids())
    rows = {number: world.rows_of(number) for number in world.living}
    for number in world.living:
        at = int(sharing.position(column([number]))[0])
        mine = rows[number]
        others = set().union(*(rows[n] for n in rows if n != number)) if len(rows) > 1 else set()
        assert figures.blocks[at] == len(mine)
        assert figures.bytes[at] == sum(SIZES[world.blocks[i][2]] for i in mine)
        assert figures.alone_blocks[at] == len(mine - others)
        assert figures.alone_bytes[at] == sum(SIZES[world.blocks[i][2]] for i in mine - others)
        others_ids = {world.blocks[i][3] for i in others}
        apart = {i for i in mine - others if world.blocks[i][3] not in others_ids}
        assert by_id.alone_blocks[at] == len(apart)
        assert by_id.alone_bytes[at] == sum(SIZES[world.blocks[i][2]] for i in apart)
        assert figures.tokens[at] == max((world.blocks[i][1] for i in mine), default=0)
        deadlines = [DEADLINES[world.blocks[i][2]] for i in mine]
        assert figures.first_deadline[at] == min(deadlines, default=math.inf)
        assert figures.last_deadline[at] == max(deadlines, default=-math.inf)
        pairs = sharing.pairs_of(column([at]))
        assert set(sharing.rows(pairs)[1].tolist()) == mine
        assert len(sharing.rows(pairs)[1]) == len(mine)


def check_erasure(world: World, targets: Sequence[int]) -> None:
    found = world.sharing().erasure(column(targets), world.ids())
    survivors = set().union(*(world.rows_of(n) for n in world.living if n not in targets), set())
    wanted = set().union(*(world.rows_of(n) for n in targets), set())
    kept_ids = {world.blocks[i][3] for i in survivors}
    wanted_ids = {world.blocks[i][3] for i in wanted}
    goes = {i for i, b in enumerate(world.blocks) if b[3] in wanted_ids - kept_ids}
    assert set(np.flatnonzero(found.private).tolist()) == goes
    shared = set(np.flatnonzero(found.shared).tolist())
    assert not shared & goes
    assert wanted - goes <= shared
    assert {world.blocks[i][3] for i in shared} <= wanted_ids & kept_ids


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_figures_are_what_sets_say(world: World) -> None:
    check_figures(world)


@settings(max_examples=400, deadline=None)
@given(worlds(), st.lists(st.integers(1, 10), max_size=5, unique=True))
def test_what_goes_is_what_sets_say(world: World, targets: list[int]) -> None:
    check_erasure(world, [n for n in targets if n in world.prompts])


def conversation(turns: int) -> World:
    """Each turn has all before it, and two blocks of its own."""
    return World(
        dict.fromkeys(range(1, turns + 1), False),
        {(n, n - 1): 2 * (n - 1) for n in range(2, turns + 1)},
        [(n, 2 * n - 2 + e, 0, 10 * n + e) for n in range(1, turns + 1) for e in (1, 2)],
    )


def test_a_long_conversation() -> None:
    world = conversation(300)
    figures = world.sharing().figures()
    assert figures.blocks.tolist() == [2 * n for n in range(1, 301)]
    assert figures.alone_blocks.tolist() == [0] * 299 + [2]
    small = conversation(12)
    check_figures(small)
    check_erasure(small, [12])
    check_erasure(small, [3, 11, 12])


def test_two_copies_of_a_block_stay_when_a_survivor_has_one() -> None:
    """Stored by two processes at once: 1 and 2 each own one of id 7."""
    world = World({1: False, 2: False}, {}, [(1, 1, 0, 7), (2, 1, 1, 7), (1, 2, 0, 8)])
    found = world.sharing().erasure(column([1]), world.ids())
    assert found.private.tolist() == [False, False, True]
    assert found.shared.tolist()[0] is True
    both = world.sharing().erasure(column([1, 2]), world.ids())
    assert both.private.all()


def test_a_copy_that_is_nobodys_goes_too() -> None:
    world = World({1: False}, {}, [(1, 1, 0, 7), (0, 0, 1, 7), (0, 0, 1, 9)])
    found = world.sharing().erasure(column([1]), world.ids())
    assert found.private.tolist() == [True, True, False]


@pytest.mark.parametrize("size", [2, 3, 50])
def test_circles_end(size: int) -> None:
    world = World(
        {n: n % 3 == 0 for n in range(1, size + 1)},
        {(n, n % size + 1): 5 for n in range(1, size + 1)},
        [(n, e, 0, 10 * n + e) for n in range(1, size + 1) for e in (4, 6)],
    )
    check_figures(world)
    check_erasure(world, [1, 2])


def test_nothing_at_all() -> None:
    world = World({}, {}, [])
    assert len(world.sharing().figures().blocks) == 0
    assert not len(world.sharing().erasure(column([3]), world.ids()).private)
