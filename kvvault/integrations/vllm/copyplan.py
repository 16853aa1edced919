"""Which bytes go where between KV cache pages and the rows of the shared host region.

Words of this module (vLLM's own where it has one):

* *page*: one layer tensor's bytes for one device block.
* *row*: one offloaded chunk in host memory; it holds `blocks_per_chunk` pages of every tensor.
  A row belongs to one KV cache group at a time.
* *lane*: a strided correspondence between pages and rows that is the same for every block, so that
  copying many blocks is one numpy assignment per run of neighbours.

Two row layouts exist. **Direct**: each worker has a private slot per row and copies whole pages.
**Canonical**: all workers share the row, which holds the pages as a single worker without any
parallelism would hold them; a worker copies the fragments that vLLM's certified mapping names, and
where several hold the same bytes they take turns, block by block.

Bytes of a row that its group does not use (other groups' tensors, page padding, pages of a partly
filled chunk) still hold what the row's previous owner left. A tier that persists whole rows would
carry one tenant's KV into another tenant's block, so `GroupPlan.store` zeroes them. Which worker
does: in the direct layout each in its own slot, in the canonical layout the first one.

No vLLM import and no locks: plans are immutable and every call works on its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "Blocks",
    "GroupPlan",
    "Lane",
    "Mapping",
    "PageRef",
    "Run",
    "blocks_per_group",
    "plan_groups",
]

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class Run(Protocol):
    """vLLM's `CopyRun`: `num_fragments` fragments of `fragment_size` bytes, at a constant stride in
    the worker's page and at another in the canonical page."""

    @property
    def local_offset(self) -> int: ...
    @property
    def canonical_offset(self) -> int: ...
    @property
    def fragment_size(self) -> int: ...
    @property
    def num_fragments(self) -> int: ...
    @property
    def local_stride(self) -> int: ...
    @property
    def canonical_stride(self) -> int: ...


class Mapping(Protocol):
    """vLLM's `CanonicalPageMapping`."""

    @property
    def canonical_page_size_bytes(self) -> int: ...
    @property
    def runs(self) -> Sequence[Run]: ...
    @property
    def num_writers(self) -> int: ...
    @property
    def writer_index(self) -> int: ...


class PageRef(Protocol):
    """vLLM's `CanonicalKVCacheRef`: one layer's use of a tensor."""

    @property
    def tensor_idx(self) -> int: ...
    @property
    def page_size_bytes(self) -> int: ...
    @property
    def mapping(self) -> Mapping | None: ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one group in one job: entry i is device block `device[i]`, which lives in row
    `chunk[i]` at position `sub[i]` (0 <= sub < blocks_per_chunk)."""

    device: Ids
    chunk: Ids
    sub: Ids

    def __len__(self) -> int:
        return len(self.device)


@dataclass(frozen=True, slots=True)
class Lane:
    """One strided correspondence.

    `device[b]` and `host[c, s]` are (fragments, size) views of block b and of position s of row c.
    """

    device: Bytes
    """(device blocks, fragments, size)"""
    host: Bytes
    """(rows, blocks_per_chunk, fragments, size)"""
    num_writers: int
    writer_index: int

    @property
    def bytes_per_block(self) -> int:
        return int(self.device.shape[1] * self.device.shape[2])


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Everything needed to move blocks of one KV cache group."""

    blocks_per_chunk: int
    lanes: tuple[Lane, ...]
    gaps: tuple[Bytes, ...]
    """Bytes of a used page position that no worker writes, as (rows, blocks_per_chunk, size) views;
    empty on workers that do not clean."""
    pages: tuple[Bytes, ...]
    """Whole page positions, same shape; for positions that a partly filled chunk leaves unused.
    Empty on workers that do not clean."""

    def store(self, blocks: Blocks) -> int:
        """Copy device blocks into rows and clean the rest of the rows.

        Returns:
            Bytes copied (writer rotation leaves out blocks that other workers copy).

        Raises:
            ValueError: a block or a row does not exist; nothing was copied then.
        """
        self._check(blocks)
        self._clean(blocks)
        copied = 0
        for lane in self.lanes:
            mine = self._turn(blocks, lane)
            for device, chunk, sub, count in _neighbours(mine, self.blocks_per_chunk):
                _host(lane, chunk, sub, count)[...] = lane.device[device : device + count]
            copied += len(mine) * lane.bytes_per_block
        return copied

    def load(self, blocks: Blocks) -> int:
        """Copy rows into device blocks. Every worker reads all it needs; there are no turns.

        Returns:
            Bytes copied.

        Raises:
            ValueError: a block or a row does not exist; nothing was copied then.
        """
        self._check(blocks)
        for lane in self.lanes:
            for device, chunk, sub, count in _neighbours(blocks, self.blocks_per_chunk):
                lane.device[device : device + count] = _host(lane, chunk, sub, count)
        return len(blocks) * sum(lane.bytes_per_block for lane in self.lanes)

    def _check(self, blocks: Blocks) -> None:
        """Slices beyond an array's end are empty and would copy nothing without a word."""
        if len(blocks) == 0 or not self.lanes:
            return
        lane = self.lanes[0]
        for ids, limit in ((blocks.device, len(lane.device)), (blocks.chunk, len(lane.host))):
            if ids.min() < 0 or ids.max() >= limit:
                raise ValueError("a block or a row outside its tensor")

    def _turn(self, blocks: Blocks, lane: Lane) -> Blocks:
        """The blocks whose canonical page this worker writes. The page id counts positions in host
        memory, which all workers agree about."""
        if lane.num_writers == 1:
            return blocks
        page = blocks.chunk * self.blocks_per_chunk + blocks.sub
        mine = page % lane.num_writers == lane.writer_index
        return Blocks(blocks.device[mine], blocks.chunk[mine], blocks.sub[mine])

    def _clean(self, blocks: Blocks) -> None:
        if self.gaps:
            for gap in self.gaps:
                gap[blocks.chunk, blocks.sub] = 0
        if self.pages and self.blocks_per_chunk > 1:
            for chunk in np.unique(blocks.chunk):
                used = blocks.sub[blocks.chunk == chunk]
                if len(used) == self.blocks_per_chunk:
                    continue
                unused = np.setdiff1d(np.arange(self.blocks_per_chunk), used)
                for page in self.pages:
                    page[chunk, unused] = 0


def _host(lane: Lane, chunk: int, sub: int, count: int) -> Bytes:
    """`count` page positions from (chunk, sub) on: neighbours along rows when a row holds one page
    position, along positions of one row otherwise (see `_neighbours`)."""
    if lane.host.shape[1] == 1:
        return lane.host[chunk : chunk + count, 0]
    return lane.host[chunk, sub : sub + count]


def _neighbours(blocks: Blocks, blocks_per_chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """Split into runs (device, chunk, sub, count) that are adjacent on both sides.

    With more than one page position in a row, a run stays inside its row: positions are a page
    apart there, and rows are not a multiple of pages apart.
    """
    if len(blocks) == 0:
        return
    next_device = np.diff(blocks.device) == 1
    if blocks_per_chunk == 1:
        next_host = np.diff(blocks.chunk) == 1
    else:
        next_host = (np.diff(blocks.chunk) == 0) & (np.diff(blocks.sub) == 1)
    starts = np.concatenate(([0], np.flatnonzero(~(next_device & next_host)) + 1))
    counts = np.diff(np.concatenate((starts, [len(blocks)])))
    yield from zip(
        blocks.device[starts].tolist(),
        blocks.chunk[starts].tolist(),
        blocks.sub[starts].tolist(),
        counts.tolist(),
        strict=True,
    )


def blocks_per_group(
    device_ids: Sequence[int] | npt.NDArray[np.integer],
    chunk_ids: Sequence[int] | npt.NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    blocks_per_chunk: int,
) -> list[Blocks]:
    """Pair device blocks with page positions in rows, group by group.

    Device ids come group after group, `group_sizes[g]` of group g; the group's first block is block
    number `block_indices[g]` of its request, so it sits at position `block_indices[g] %
    blocks_per_chunk` of the group's first row. Only the first and the last row of a group may be
    partly used.

    Raises:
        ValueError: the numbers do not add up; nothing may be copied then.
    """
    device = np.asarray(device_ids, dtype=np.int64)
    chunks = np.asarray(chunk_ids, dtype=np.int64)
    groups: list[Blocks] = []
    device_end = chunk_end = 0
    for size, index in zip(group_sizes, block_indices, strict=True):
        skip = index % blocks_per_chunk if size else 0
        rows = -(-(size + skip) // blocks_per_chunk)
        position = np.arange(skip, skip + size, dtype=np.int64)
        own = chunks[chunk_end : chunk_end + rows]
        if len(own) != rows:
            raise ValueError("fewer rows than the device blocks need")
        groups.append(
            Blocks(
                device[device_end : device_end + size],
                own[position // blocks_per_chunk],
                position % blocks_per_chunk,
            )
        )
        device_end += size
        chunk_end += rows
    if device_end != len(device) or chunk_end != len(chunks):
        raise ValueError("device blocks and rows left over")
    return groups


def plan_groups(
    device: Sequence[Bytes],
    host: Sequence[Bytes],
    group_refs: Sequence[Sequence[PageRef]],
    blocks_per_chunk: int,
    *,
    canonical: bool,
    cleans: bool,
) -> tuple[GroupPlan, ...]:
    """Make the plans of all groups.

    Args:
        device: per tensor, pages as (device blocks, page bytes).
        host: per tensor, its part of every row as (rows, blocks_per_chunk * page bytes); in the
            canonical layout pages are canonical pages.
        group_refs: per group, its layers' references; every one with a mapping if `canonical`.
        blocks_per_chunk: page positions in a row.
        canonical: whether rows are in the canonical layout.
        cleans: whether this worker zeroes what its group leaves unused.

    Raises:
        ValueError: shapes contradict each other, or a mapping is missing.
    """
    positions = [_positions(tensor, blocks_per_chunk) for tensor in host]
    plans = []
    for refs in group_refs:
        lanes: list[Lane] = []
        used = [0] * len(host)
        for ref in refs:
            pages, rows = device[ref.tensor_idx], positions[ref.tensor_idx]
            if canonical:
                if ref.mapping is None:
                    raise ValueError("a layer has no canonical mapping")
                lanes.extend(
                    _canonical_lane(pages, rows, run, ref.mapping) for run in ref.mapping.runs
                )
                size = ref.mapping.canonical_page_size_bytes
            else:
                size = ref.page_size_bytes
                lanes.append(_lane(pages, rows, (0, 0, size, 1, size, size), 1, 0))
            if size > rows.shape[2]:
                raise ValueError("a page is larger than its place in the row")
            used[ref.tensor_idx] = max(used[ref.tensor_idx], size)
        plans.append(
            GroupPlan(
                blocks_per_chunk=blocks_per_chunk,
                lanes=tuple(lanes),
                gaps=tuple(
                    rows[:, :, size:]
                    for rows, size in zip(positions, used, strict=True)
                    if cleans and size < rows.shape[2]
                ),
                pages=tuple(positions) if cleans else (),
            )
        )
    return tuple(plans)


def _positions(tensor: Bytes, blocks_per_chunk: int) -> Bytes:
    """(rows, bytes) as (rows, blocks_per_chunk, page bytes), sharing memory."""
    rows, size = tensor.shape
    if size % blocks_per_chunk:
        raise ValueError("a row is not a whole number of pages")
    page = size // blocks_per_chunk
    stride, inner = tensor.strides
    if inner != 1:
        raise ValueError("rows must be contiguous")
    return np.lib.stride_tricks.as_strided(
        tensor, (rows, blocks_per_chunk, page), (stride, page, 1)
    )


def _canonical_lane(pages: Bytes, rows: Bytes, run: Run, mapping: Mapping) -> Lane:
    return _lane(
        pages,
        rows,
        (
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        ),
        mapping.num_writers,
        mapping.writer_index,
    )


def _lane(
    pages: Bytes, rows: Bytes, run: tuple[int, int, int, int, int, int], writers: int, turn: int
) -> Lane:
    local, canonical, size, fragments, local_stride, canonical_stride = run
    # as_strided does not check bounds, and a view outside the tensor would be memory corruption.
    for offset, stride, limit in (
        (local, local_stride, pages.shape[1]),
        (canonical, canonical_stride, rows.shape[2]),
    ):
        if offset < 0 or stride < 0 or offset + stride * (fragments - 1) + size > limit:
            raise ValueError("a fragment lies outside its page")
    return Lane(
        device=np.lib.stride_tricks.as_strided(
            pages[:, local:],
            (pages.shape[0], fragments, size),
            (pages.strides[0], local_stride, 1),
        ),
        host=np.lib.stride_tricks.as_strided(
            rows[:, :, canonical:],
            (rows.shape[0], rows.shape[1], fragments, size),
            (rows.strides[0], rows.strides[1], canonical_stride, 1),
        ),
        num_writers=writers,
        writer_index=turn,
    )
