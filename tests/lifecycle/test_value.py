"""What is evicted: floors and holds, what is worth more, and that enough is freed."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.lifecycle.value import SegmentUse, Victim, block_values, choose_victims

NOW = 1_000_000.0
BLOCK = 4096


def segment(
    name: int = 0,
    *,
    ages: list[float],
    hits: list[int] | None = None,
    deadline: float | None = None,
    keep_until: float | None = None,
    held: bool = False,
    foreign: bool = False,
    block_bytes: int = BLOCK,
) -> SegmentUse:
    """A segment whose blocks were last used `ages` seconds ago."""
    return SegmentUse(
        segment_id=name.to_bytes(16),
        block_bytes=block_bytes,
        blocks=len(ages),
        opened_at=NOW - 10_000 + name,
        deadline=deadline,
        keep_until=keep_until,
        held=held,
        foreign=foreign,
        slot_hits=np.array(hits or [0] * len(ages), np.uint8),
        slot_used_at=NOW - np.array(ages, np.float64),
    )


def names(victims: tuple[Victim, ...]) -> list[int]:
    return [int.from_bytes(victim.segment_id) for victim in victims]


# -- value ---------------------------------------------------------------------------------------


def test_the_formula() -> None:
    values = block_values(segment(ages=[0, 99, 99], hits=[0, 0, 6]), NOW)
    assert values.tolist() == pytest.approx([1.0, 0.01, 0.03])


def test_a_deadline_that_is_near_takes_value_away() -> None:
    far = block_values(segment(ages=[99.0], deadline=NOW + 1000), NOW)
    near = block_values(segment(ages=[99.0], deadline=NOW + 50), NOW)
    over = block_values(segment(ages=[99.0], deadline=NOW), NOW)
    assert far.tolist() == pytest.approx([0.01])
    assert near.tolist() == pytest.approx([0.005])
    assert over.tolist() == [0.0]


def test_a_foreign_namespace_ages_out_whatever_its_hits_were() -> None:
    hot = block_values(segment(ages=[99.0], hits=[200]), NOW)
    foreign = block_values(segment(ages=[99.0], hits=[200], foreign=True), NOW)
    never = block_values(segment(ages=[99.0], hits=[0]), NOW)
    assert foreign.tolist() == never.tolist()
    assert hot[0] > never[0]
    later = block_values(segment(ages=[9999.0], hits=[200], foreign=True), NOW)
    assert later[0] < foreign[0] / 50


def test_without_figures_of_its_blocks_a_segments_own_are_spread() -> None:
    known = SegmentUse(b"a", BLOCK, 4, NOW - 500, last_used=NOW - 99, hits=8)
    assert block_values(known, NOW).tolist() == pytest.approx([0.02] * 4)
    never = SegmentUse(b"a", BLOCK, 2, NOW - 99)
    assert block_values(never, NOW).tolist() == pytest.approx([0.01] * 2)


def test_a_use_that_seems_to_lie_ahead_counts_as_now() -> None:
    assert block_values(segment(ages=[-50.0]), NOW).tolist() == [1.0]


def test_figures_of_the_wrong_number_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry"):
        SegmentUse(b"a", BLOCK, 2, NOW, slot_hits=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="positive size"):
        SegmentUse(b"a", 0, 2, NOW)


# -- victims -------------------------------------------------------------------------------------


def test_nothing_goes_when_nothing_is_needed() -> None:
    assert choose_victims([segment(ages=[5.0])], 0, NOW).victims == ()
    assert choose_victims([], 1, NOW).missing_bytes == 1
    empty = SegmentUse(b"a", BLOCK, 0, NOW)
    assert choose_victims([empty], 1, NOW).victims == ()


def test_unused_blocks_go_in_the_order_of_lru() -> None:
    segments = [segment(1, ages=[100.0] * 4), segment(2, ages=[300.0] * 4), segment(3, ages=[1.0])]
    found = choose_victims(segments, 5 * BLOCK, NOW, slack=1)
    assert names(found.victims) == [2, 1]
    assert found.victims[0].readmit == ()
    assert found.missing_bytes == 0


def test_blocks_that_were_used_stay_longer() -> None:
    cold = segment(1, ages=[100.0] * 4)
    used = segment(2, ages=[150.0] * 4, hits=[3] * 4)
    assert names(choose_victims([cold, used], 4 * BLOCK, NOW, slack=1).victims) == [1]
    never = segment(2, ages=[150.0] * 4)
    assert names(choose_victims([cold, never], 4 * BLOCK, NOW, slack=1).victims) == [2]


def test_hot_blocks_of_a_victim_are_readmitted() -> None:
    mixed = segment(1, ages=[900.0, 1.0, 900.0, 2.0], hits=[0, 9, 0, 9])
    warm = segment(2, ages=[50.0] * 4)
    found = choose_victims([mixed, warm], 2 * BLOCK, NOW, slack=1)
    assert found.victims == (
        Victim((1).to_bytes(16), readmit=(1, 3), freed_bytes=2 * BLOCK, readmitted_bytes=2 * BLOCK),
    )
    assert found.freed_bytes == 2 * BLOCK


def test_the_segment_with_the_larger_cold_share_goes_first() -> None:
    half = segment(1, ages=[9000.0, 1.0])
    whole = segment(2, ages=[900.0, 900.0])
    found = choose_victims([half, whole], BLOCK, NOW, slack=3)
    assert names(found.victims) == [2]
    assert names(choose_victims([half, whole], BLOCK, NOW, slack=1).victims) == [1]


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    prompt = segment(1, ages=[70.0] * 4)
    found = choose_victims([prompt], 2 * BLOCK, NOW, slack=1)
    assert found.victims[0].readmit == (0, 1)


def test_floor_and_hold_protect_and_what_is_missing_is_said() -> None:
    floored = segment(1, ages=[9000.0] * 2, keep_until=NOW + 1)
    held = segment(2, ages=[9000.0] * 2, held=True, deadline=NOW - 1)
    free = segment(3, ages=[1.0] * 2)
    found = choose_victims([floored, held, free], 3 * BLOCK, NOW)
    assert names(found.victims) == [3]
    assert found.freed_bytes == 2 * BLOCK
    assert found.missing_bytes == BLOCK
    # The same segments, once the floor has been reached and the hold been cleared.
    found = choose_victims([floored, replace(held, held=False)], 4 * BLOCK, NOW + 1)
    assert sorted(names(found.victims)) == [1, 2]
    assert found.missing_bytes == 0


def test_a_deadline_beats_a_floor() -> None:
    over = segment(1, ages=[1.0] * 2, keep_until=NOW + 99, deadline=NOW)
    ahead = segment(1, ages=[1.0] * 2, keep_until=NOW + 99, deadline=NOW + 1)
    assert names(choose_victims([over], BLOCK, NOW).victims) == [1]
    assert choose_victims([ahead], BLOCK, NOW).victims == ()


def test_nothing_past_its_deadline_is_readmitted() -> None:
    over = segment(1, ages=[0.0] * 4, hits=[9] * 4, deadline=NOW)
    assert choose_victims([over], BLOCK, NOW).victims[0].readmit == ()


def test_slack_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="slack"):
        choose_victims([segment(ages=[1.0])], 1, NOW, slack=0.5)


@st.composite
def vaults(draw: st.DrawFn) -> list[SegmentUse]:
    times = st.one_of(st.none(), st.floats(NOW - 100, NOW + 100))
    segments = []
    for name in range(draw(st.integers(0, 6))):
        blocks = draw(st.integers(0, 8))
        made = segment(
            name,
            ages=draw(st.lists(st.floats(0, 1e6), min_size=blocks, max_size=blocks)),
            hits=draw(st.lists(st.integers(0, 255), min_size=blocks, max_size=blocks)),
            deadline=draw(times),
            keep_until=draw(times),
            held=draw(st.booleans()),
            foreign=draw(st.booleans()),
            block_bytes=BLOCK * draw(st.integers(1, 3)),
        )
        if draw(st.booleans()):
            made = replace(made, slot_hits=None, slot_used_at=None, hits=draw(st.integers(0, 99)))
        segments.append(made)
    return segments


@given(vaults(), st.integers(0, 80 * BLOCK), st.floats(1, 5), st.randoms())
def test_any_vault(segments: list[SegmentUse], needed: int, slack: float, random: Random) -> None:
    found = choose_victims(segments, needed, NOW, slack=slack)
    by_id = {use.segment_id: use for use in segments}

    def may_go(use: SegmentUse) -> bool:
        over = use.deadline is not None and use.deadline <= NOW
        floor = -math.inf if use.keep_until is None else use.keep_until
        return not use.held and (over or floor <= NOW)

    for victim in found.victims:
        use = by_id[victim.segment_id]
        assert may_go(use)
        assert list(victim.readmit) == sorted(set(victim.readmit))
        assert all(0 <= slot < use.blocks for slot in victim.readmit)
        assert victim.readmitted_bytes == len(victim.readmit) * use.block_bytes
        assert victim.freed_bytes + victim.readmitted_bytes == use.data_bytes
        assert victim.freed_bytes > 0
        # Nothing that is lost is worth more than what is kept of the same segment.
        values = block_values(use, NOW)
        kept = values[list(victim.readmit)]
        lost = np.delete(values, list(victim.readmit))
        assert not len(kept) or lost.max() <= kept.min()
    assert len({victim.segment_id for victim in found.victims}) == len(found.victims)

    # As much is freed as is needed, or everything that may go, and not one victim too many.
    assert found.freed_bytes == sum(victim.freed_bytes for victim in found.victims)
    assert found.missing_bytes == max(0, needed - found.freed_bytes)
    if found.missing_bytes:
        assert found.freed_bytes == sum(use.data_bytes for use in segments if may_go(use))
    if found.victims:
        assert found.freed_bytes - found.victims[-1].freed_bytes < needed

    shuffled = list(segments)
    random.shuffle(shuffled)
    assert choose_victims(shuffled, needed, NOW, slack=slack) == found
