"""Copy plans against a byte-by-byte reference, and what the canonical layout is for: pages written
by workers of one parallelism, read by workers of another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.integrations.vllm.copyplan import (
    Bytes,
    GroupPlan,
    blocks_per_group,
    plan_groups,
)


@dataclass(frozen=True)
class Fragments:
    """Stands for vLLM's CopyRun."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class PageMapping:
    """Stands for vLLM's CanonicalPageMapping."""

    canonical_page_size_bytes: int
    runs: Sequence[Fragments]
    num_writers: int = 1
    writer_index: int = 0


@dataclass(frozen=True)
class Ref:
    """Stands for vLLM's CanonicalKVCacheRef."""

    tensor_idx: int
    page_size_bytes: int
    mapping: PageMapping | None = None


def noise(shape: tuple[int, ...], seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ------------------------------------------------------------------- the direct layout


@dataclass(frozen=True)
class Job:
    blocks_per_chunk: int
    page_bytes: tuple[int, ...]
    """Per tensor."""
    refs: tuple[tuple[Ref, ...], ...]
    """Per group."""
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]
    device_ids: tuple[int, ...]
    chunk_ids: tuple[int, ...]

    DEVICE_BLOCKS = 24
    ROWS = 24


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    blocks_per_chunk = draw(st.sampled_from([1, 2, 4]))
    page_bytes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    groups = draw(st.integers(1, 3))
    refs = tuple(
        tuple(
            Ref(tensor, draw(st.integers(1, page_bytes[tensor])))
            for tensor in draw(
                st.lists(st.sampled_from(range(len(page_bytes))), min_size=1, unique=True)
            )
        )
        for _ in range(groups)
    )
    sizes = tuple(draw(st.integers(0, 5)) for _ in range(groups))
    indices = tuple(draw(st.integers(0, 9)) for _ in range(groups))
    rows = sum(
        -(-(size + index % blocks_per_chunk) // blocks_per_chunk) if size else 0
        for size, index in zip(sizes, indices, strict=True)
    )
    # Mostly neighbours, as an allocator gives them out, sometimes shuffled.
    device = draw(st.permutations(range(Job.DEVICE_BLOCKS)) | st.just(range(Job.DEVICE_BLOCKS)))
    chunks = draw(st.permutations(range(Job.ROWS)) | st.just(range(Job.ROWS)))
    return Job(
        blocks_per_chunk=blocks_per_chunk,
        page_bytes=page_bytes,
        refs=refs,
        group_sizes=sizes,
        block_indices=indices,
        device_ids=tuple(device[: sum(sizes)]),
        chunk_ids=tuple(chunks[:rows]),
    )


@dataclass
class Memory:
    """Device tensors, and rows with a neighbour's bytes and padding around this worker's slot."""

    device: list[Bytes]
    rows: Bytes
    host: list[Bytes]

    BEFORE, AFTER = 7, 5

    @classmethod
    def of(cls, job: Job, seed: int) -> Memory:
        slot = sum(job.page_bytes) * job.blocks_per_chunk
        rows = noise((Job.ROWS, cls.BEFORE + slot + cls.AFTER), seed)
        host, offset = [], cls.BEFORE
        for page in job.page_bytes:
            size = page * job.blocks_per_chunk
            host.append(rows[:, offset : offset + size])
            offset += size
        device = [
            noise((Job.DEVICE_BLOCKS, page), seed + 1 + i) for i, page in enumerate(job.page_bytes)
        ]
        return cls(device, rows, host)

    def plans(self, job: Job, *, cleans: bool = True) -> tuple[GroupPlan, ...]:
        return plan_groups(
            self.device, self.host, job.refs, job.blocks_per_chunk, canonical=False, cleans=cleans
        )

    def snapshot(self) -> tuple[Bytes, list[Bytes]]:
        return self.rows.copy(), [tensor.copy() for tensor in self.device]


def pairs(job: Job) -> list[tuple[int, int, int, int]]:
    """(group, device block, row, position), worked out one block at a time."""
    found = []
    device, chunks = iter(job.device_ids), iter(job.chunk_ids)
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        row = None
        for number in range(index, index + size):
            position = number % job.blocks_per_chunk
            if row is None or position == 0:
                row = next(chunks)
            found.append((group, next(device), row, position))
    assert next(device, None) is None
    assert next(chunks, None) is None
    return found


@given(jobs(), st.integers(0, 999))
def test_direct_store_equals_copying_byte_by_byte(job: Job, seed: int) -> None:
    memory = Memory.of(job, seed)
    rows, device = memory.snapshot()
    used: dict[int, set[int]] = {}
    for group, block, row, position in pairs(job):
        offset = Memory.BEFORE
        for tensor, page in enumerate(job.page_bytes):
            for byte in range(page):
                at = offset + position * page + byte
                sizes = [r.page_size_bytes for r in job.refs[group] if r.tensor_idx == tensor]
                inside = bool(sizes) and byte < max(sizes)
                rows[row, at] = device[tensor][block, byte] if inside else 0
                used.setdefault(row, set()).add(at)
            offset += page * job.blocks_per_chunk
    slot = range(Memory.BEFORE, Memory.BEFORE + sum(job.page_bytes) * job.blocks_per_chunk)
    for row, bytes_used in used.items():
        for at in slot:
            if at not in bytes_used:  # a page position that the chunk leaves empty
                rows[row, at] = 0

    copied = run(memory.plans(job), job, store=True)

    np.testing.assert_array_equal(memory.rows, rows)
    for after, before in zip(memory.device, device, strict=True):
        np.testing.assert_array_equal(after, before)
    assert copied == sum(ref.page_size_bytes for group, *_ in pairs(job) for ref in job.refs[group])


@given(jobs(), st.integers(0, 999))
def test_direct_load_equals_copying_byte_by_byte(job: Job, seed: int) -> None:
    memory = Memory.of(job, seed)
    rows, device = memory.snapshot()
    for group, block, row, position in pairs(job):
        for ref in job.refs[group]:
            page = job.page_bytes[ref.tensor_idx]
            offset = Memory.BEFORE + sum(job.page_bytes[: ref.tensor_idx]) * job.blocks_per_chunk
            for byte in range(ref.page_size_bytes):
                device[ref.tensor_idx][block, byte] = rows[row, offset + position * page + byte]

    run(memory.plans(job), job, store=False)

    np.testing.assert_array_equal(memory.rows, rows)
    for after, expected in zip(memory.device, device, strict=True):
        np.testing.assert_array_equal(after, expected)


@given(jobs(), st.integers(0, 999))
def test_a_worker_that_does_not_clean_touches_no_other_byte(job: Job, seed: int) -> None:
    """The first worker cleans a shared row; the others must leave its bytes alone."""
    memory, cleaning = Memory.of(job, seed), Memory.of(job, seed)
    before, _ = memory.snapshot()
    run(memory.plans(job, cleans=False), job, store=True)
    run(cleaning.plans(job), job, store=True)
    cleaned = memory.rows != cleaning.rows
    assert np.all(cleaning.rows[cleaned] == 0)
    assert np.all(memory.rows[cleaned] == before[cleaned])


def run(plans: Sequence[GroupPlan], job: Job, *, store: bool) -> int:
    groups = blocks_per_group(
        job.device_ids, job.chunk_ids, job.group_sizes, job.block_indices, job.blocks_per_chunk
    )
    return sum(
        plan.store(blocks) if store else plan.load(blocks)
        for plan, blocks in zip(plans, groups, strict=True)
    )


def test_numbers_that_do_not_add_up_are_refused() -> None:
    assert [len(b) for b in blocks_per_group([4, 5, 6], [0, 1], [3], [1], 2)] == [3]
    with pytest.raises(ValueError, match="fewer rows"):
        blocks_per_group([4, 5, 6], [0], [3], [1], 2)
    with pytest.raises(ValueError, match="left over"):
        blocks_per_group([4, 5, 6], [0, 1, 2], [3], [1], 2)
    with pytest.raises(ValueError, match="left over"):
        blocks_per_group([4, 5, 6, 7], [0, 1], [3], [1], 2)


def test_a_block_outside_the_tensors_is_refused_not_wrapped() -> None:
    device, host = noise((4, 8), 0), noise((4, 8), 1)
    (plan,) = plan_groups([device], [host], [[Ref(0, 8)]], 1, canonical=False, cleans=True)
    before = host.copy()
    (inside,) = blocks_per_group([3], [3], [1], [0], 1)
    plan.store(inside)
    assert np.array_equal(host[3], device[3])
    host[:] = before
    for block, row in ((4, 0), (0, 4), (-1, 0)):
        (outside,) = blocks_per_group([block], [row], [1], [0], 1)
        for move in (plan.store, plan.load):
            with pytest.raises(ValueError, match="outside its tensor"):
                move(outside)
    np.testing.assert_array_equal(host, before)


@pytest.mark.parametrize(
    "fragments",
    [
        Fragments(0, 0, 9, 1, 9, 9),
        Fragments(1, 0, 8, 1, 8, 8),
        Fragments(0, 8, 8, 1, 8, 8),
        Fragments(0, 0, 4, 3, 4, 4),
        Fragments(-1, 0, 4, 1, 4, 4),
        Fragments(4, 0, 4, 2, -4, 4),
    ],
)
def test_fragments_outside_a_page_are_refused(fragments: Fragments) -> None:
    device, host = [noise((4, 8), 0)], [noise((4, 8), 1)]

    def plan(run_of_fragments: Fragments) -> None:
        refs = [[Ref(0, 8, PageMapping(8, [run_of_fragments]))]]
        plan_groups(device, host, refs, 1, canonical=True, cleans=True)

    plan(Fragments(0, 0, 8, 1, 8, 8))
    with pytest.raises(ValueError, match="outside its page"):
        plan(fragments)


def test_a_layer_without_mapping_is_refused_in_the_canonical_layout() -> None:
    device, host = [noise((4, 8), 0)], [noise((4, 8), 1)]
    plan_groups(device, host, [[Ref(0, 8)]], 1, canonical=False, cleans=True)
    with pytest.raises(ValueError, match="no canonical mapping"):
        plan_groups(device, host, [[Ref(0, 8)]], 1, canonical=True, cleans=True)


# ---------------------------------------------------------------- the canonical layout

BLOCKS, TOKENS, HEADS, HEAD_BYTES = 12, 4, 4, 6

Logical = npt.NDArray[np.uint8]
"""(blocks, heads, tokens, bytes): KV as no worker ever holds it, for one layer."""


def shard(logical: Logical, tp: int, rank: int, *, tokens_first: bool) -> Bytes:
    """The pages of one worker: its heads, in one of the two orders that engines use."""
    heads = logical.shape[1]
    copies = max(1, tp // heads)
    own = heads * copies // tp
    first = rank // copies * own
    part = logical[:, first : first + own]
    if tokens_first:
        part = part.transpose(0, 2, 1, 3)
    return np.ascontiguousarray(part).reshape(len(logical), -1)


def mapping(heads: int, tp: int, rank: int, *, tokens_first: bool) -> PageMapping:
    copies = max(1, tp // heads)
    own = heads * copies // tp
    first = rank // copies * own
    page = heads * TOKENS * HEAD_BYTES
    part = own * HEAD_BYTES
    if tokens_first:
        fragments = Fragments(0, first * HEAD_BYTES, part, TOKENS, part, heads * HEAD_BYTES)
    else:
        size = own * TOKENS * HEAD_BYTES
        fragments = Fragments(0, first * TOKENS * HEAD_BYTES, size, 1, size, size)
    return PageMapping(page, [fragments], copies, rank % copies)


@dataclass
class Workers:
    """All workers of one engine around one set of rows."""

    device: list[list[Bytes]]
    """[rank][tensor]"""
    plans: list[tuple[GroupPlan, ...]]

    @classmethod
    def of(
        cls,
        layers: Sequence[Logical],
        host: Sequence[Bytes],
        groups: Sequence[Sequence[int]],
        tp: int,
        blocks_per_chunk: int,
        *,
        tokens_first: bool,
    ) -> Workers:
        device = [
            [shard(layer, tp, rank, tokens_first=tokens_first) for layer in layers]
            for rank in range(tp)
        ]
        plans = [
            plan_groups(
                device[rank],
                host,
                [
                    [
                        Ref(
                            layer,
                            device[rank][layer].shape[1],
                            mapping(layers[layer].shape[1], tp, rank, tokens_first=tokens_first),
                        )
                        for layer in group
                    ]
                    for group in groups
                ],
                blocks_per_chunk,
                canonical=True,
                cleans=rank == 0,
            )
            for rank in range(tp)
        ]
        return cls(device, plans)


@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-first", "tokens-first"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(
    ("writers", "readers"),
    [pytest.param(w, r, id=f"tp{w}-tp{r}") for w, r in itertools.product([1, 2, 4], repeat=2)],
)
def test_rows_written_at_one_degree_are_read_at_another(
    heads: int, writers: int, readers: int, blocks_per_chunk: int, tokens_first: bool
) -> None:
    """Two layers, and more workers than heads where heads are few: those hold copies and take
    turns in writing."""
    layers = [noise((BLOCKS, heads, TOKENS, HEAD_BYTES), seed) for seed in (1, 2)]
    page = heads * TOKENS * HEAD_BYTES
    rows = noise((9, 2 * page * blocks_per_chunk + 3), 3)
    host = [
        rows[:, : page * blocks_per_chunk],
        rows[:, page * blocks_per_chunk : 2 * page * blocks_per_chunk],
    ]
    groups = [[0, 1]]
    size, index = 6, 3
    chunk_ids = [7, 2, 3, 0, 8, 5] if blocks_per_chunk == 1 else [7, 2, 4]
    source, target = [1, 2, 3, 9, 5, 0], [4, 5, 6, 11, 10, 2]

    stored = Workers.of(layers, host, groups, writers, blocks_per_chunk, tokens_first=tokens_first)
    blocks = blocks_per_group(source, chunk_ids, [size], [index], blocks_per_chunk)
    # Workers run at the same time; the order must not matter.
    for rank in reversed(range(writers)):
        stored.plans[rank][0].store(blocks[0])

    empty = [np.zeros_like(layer) for layer in layers]
    loaded = Workers.of(empty, host, groups, readers, blocks_per_chunk, tokens_first=tokens_first)
    blocks = blocks_per_group(target, chunk_ids, [size], [index], blocks_per_chunk)
    expected = [layer.copy() for layer in empty]
    for layer, full in zip(expected, layers, strict=True):
        layer[target] = full[source]
    for rank in range(readers):
        loaded.plans[rank][0].load(blocks[0])
        for tensor, layer in enumerate(expected):
            np.testing.assert_array_equal(
                loaded.device[rank][tensor], shard(layer, readers, rank, tokens_first=tokens_first)
            )


def test_the_canonical_row_is_the_page_of_a_single_worker() -> None:
    layer = noise((BLOCKS, HEADS, TOKENS, HEAD_BYTES), 1)
    host = [np.zeros((4, HEADS * TOKENS * HEAD_BYTES), np.uint8)]
    workers = Workers.of([layer], host, [[0]], 2, 1, tokens_first=True)
    (blocks,) = blocks_per_group([5, 6], [1, 2], [2], [0], 1)
    for plans in workers.plans:
        plans[0].store(blocks)
    single = shard(layer, 1, 0, tokens_first=True)
    np.testing.assert_array_equal(host[0][1:3], single[5:7])
    assert not host[0][[0, 3]].any()


def test_one_groups_row_keeps_nothing_of_another_groups() -> None:
    """Groups of a hybrid model use different tensors of a row. What a row held for one group, and
    for one tenant, must not stay in it when it is written for another."""
    layers = [noise((BLOCKS, HEADS, TOKENS, HEAD_BYTES), seed) for seed in (1, 2)]
    page = HEADS * TOKENS * HEAD_BYTES
    bpc = 4
    rows = np.full((2, 2 * page * bpc), 0xAA, np.uint8)
    host = [rows[:, : page * bpc], rows[:, page * bpc :]]
    workers = Workers.of(layers, host, [[0], [1]], 2, bpc, tokens_first=False)
    # Group 1 stores three blocks, the first one in the middle of its row.
    blocks = blocks_per_group([5, 6, 7], [1], [0, 3], [0, 1], bpc)
    for plans in reversed(workers.plans):
        for plan, own in zip(plans, blocks, strict=True):
            plan.store(own)
    assert (rows[0] == 0xAA).all()
    assert not host[0][1].any()
    kept = host[1][1].reshape(bpc, page)
    assert not kept[0].any()
    np.testing.assert_array_equal(kept[1:], shard(layers[1], 1, 0, tokens_first=False)[5:8])
