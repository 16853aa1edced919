"""The whole inventory read at once, as arrays; and what has nothing left, pruned.

A million blocks are some sixty thousand rows of `extents`. Read here row by row in Python, and
everything else is numpy's: a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection

from kvvault.catalog import operations
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.model import ID_BYTES, SegmentFacts
from kvvault.segments.format import ORIGIN_BYTES

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


_FORGET = """
    UPDATE prompts SET gone = 1, subject_no = NULL, labels_no = NULL, request_id = NULL,
        sealed = NULL, prompt_id = x'', first_used = 0, last_used = 0, end_token = 0
    WHERE prompt_no IN ({some}) AND gone = 0
"""

_DROP_GONE = """
    DELETE FROM prompts WHERE gone = 1 AND prompt_no NOT IN (SELECT via_no FROM prompt_links)
"""

_MANY = 500
"""Numbers in one statement."""


@dataclass(frozen=True, slots=True)
class PromptTable:
    """All prompts, gone ones too; arrays of one length, ascending by number."""

    number: I64
    prompt_id: tuple[bytes, ...]
    scope: I64
    subject: I64
    """Number of a text; 0: none. Likewise `labels`."""
    labels: I64
    first_used: F64
    last_used: F64
    end_token: I64
    gone: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Live blocks, arrays of one length."""

    owner: I64
    end: I64
    segment: I64
    """Index into the segments read with it."""
    slot: I64
    ids: npt.NDArray[np.uint64]
    """n x 2, little endian; 0 x 2 when they were not asked for."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The inventory as of one moment."""

    scopes: Mapping[int, tuple[bytes, bytes]]
    """Tenant's id and namespace's digest, by number."""
    prompts: PromptTable
    user: I64
    """Links, with `via` and `upto`; arrays of one length."""
    via: I64
    upto: I64
    segments: Sequence[SegmentFacts]
    blocks: BlockTable


def snapshot(
    connection: Connection, *, tenant_id: bytes | None = None, with_ids: bool = False
) -> Snapshot:
    """Read the inventory, of one tenant or of all. `with_ids`: block ids, too (16 bytes each)."""
    rows, _ = direct(connection, "SELECT scope_no, tenant_id, namespace FROM scopes")
    scopes = {
        _int(number): (bytes(tenant), bytes(namespace))
        for number, tenant, namespace in rows
        if isinstance(tenant, bytes)
        and isinstance(namespace, bytes)
        and tenant_id in (None, tenant)
    }
    prompts = _prompts(connection, None if tenant_id is None else scopes)
    segments = _segments(connection, tenant_id)
    rows, _ = direct(connection, "SELECT prompt_no, via_no, upto FROM prompt_links")
    links = np.array(rows, np.int64).reshape(-1, 3)
    if tenant_id is not None:
        links = links[np.isin(links[:, 0], prompts.number)]
    return Snapshot(
        scopes,
        prompts,
        links[:, 0],
        links[:, 1],
        links[:, 2],
        segments,
        _blocks(connection, segments, all_of_them=tenant_id is None, with_ids=with_ids),
    )


def _prompts(connection: Connection, scopes: Collection[int] | None) -> PromptTable:
    # Numbers of our own making: safe to write into the statement, however many there are.
    where = "" if scopes is None else f"WHERE scope_no IN ({','.join(map(str, scopes))})"
    rows, _ = direct(
        connection,
        f"""
        SELECT prompt_no, prompt_id, scope_no, coalesce(subject_no, 0), coalesce(labels_no, 0),
            first_used, last_used, end_token, gone FROM prompts {where} ORDER BY prompt_no
        """,  # noqa: S608
    )
    columns = list(zip(*rows, strict=True)) if rows else [()] * 9
    return PromptTable(
        np.array(columns[0], np.int64),
        tuple(value if isinstance(value, bytes) else b"" for value in columns[1]),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        np.array(columns[4], np.int64),
        np.array(columns[5], np.float64),
        np.array(columns[6], np.float64),
        np.array(columns[7], np.int64),
        np.array(columns[8], np.int64) != 0,
    )


def _segments(connection: Connection, tenant_id: bytes | None) -> list[SegmentFacts]:
    s = t.segments.c
    live = s.state.in_(operations.LIVE)
    where = live if tenant_id is None else live & (s.tenant_id == tenant_id)
    return [row.facts for row in operations.list_segments(connection, where)]


def _blocks(
    connection: Connection, segments: Sequence[SegmentFacts], *, all_of_them: bool, with_ids: bool
) -> BlockTable:
    index = {facts.segment_id: i for i, facts in enumerate(segments)}
    columns = "segment_id, first_slot, length(block_ids), origins" + (
        ", block_ids" if with_ids else ""
    )
    if all_of_them:
        rows, _ = direct(connection, f"SELECT {columns} FROM extents")  # noqa: S608
    else:
        rows = [
            row
            for segment_id in index
            for row in direct(
                connection,
                f"SELECT {columns} FROM extents WHERE segment_id = ?",  # noqa: S608
                (segment_id,),
            )[0]
        ]
    where: list[int] = []
    first: list[int] = []
    counts: list[int] = []
    origins: list[bytes] = []
    ids: list[bytes] = []
    for row in rows:
        segment, slot, size, whose = row[:4]
        at = index.get(segment) if isinstance(segment, bytes) else None
        if at is None or not isinstance(size, int) or not isinstance(slot, int):
            continue  # dead, or damaged
        count = size // ID_BYTES
        where.append(at)
        first.append(slot)
        counts.append(count)
        known = isinstance(whose, bytes) and len(whose) == count * ORIGIN_BYTES
        origins.append(whose if known else bytes(count * ORIGIN_BYTES))  # type: ignore[arg-type]
        if with_ids:
            name = row[4]
            ids.append(name[: count * ID_BYTES] if isinstance(name, bytes) else bytes(size))
    sizes = np.array(counts, np.int64)
    pairs = np.frombuffer(b"".join(origins), ">u4").reshape(-1, 2).astype(np.int64)
    offset = np.arange(len(pairs)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    table = BlockTable(
        pairs[:, 0],
        pairs[:, 1],
        np.repeat(np.array(where, np.int64), sizes),
        np.repeat(np.array(first, np.int64), sizes) + offset,
        np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2).astype(np.uint64),
    )
    return _without_revoked(connection, table, index)


def _without_revoked(
    connection: Connection, table: BlockTable, index: Mapping[bytes, int]
) -> BlockTable:
    rows, _ = direct(connection, "SELECT segment_id, slot FROM revoked_blocks")
    gone = [
        (index[segment] << 32) | _int(slot)
        for segment, slot in rows
        if isinstance(segment, bytes) and segment in index
    ]
    if not gone:
        return table
    keep = ~np.isin((table.segment << 32) | table.slot, np.array(gone, np.int64))
    return BlockTable(
        table.owner[keep],
        table.end[keep],
        table.segment[keep],
        table.slot[keep],
        table.ids[keep] if len(table.ids) else table.ids,
    )


# -- texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextRow:
    """A subject or a set of labels."""

    text_no: int
    tenant_id: bytes
    kind: str
    text_id: bytes
    sealed: bytes


def texts(
    connection: Connection, numbers: Collection[int] | None = None, kind: str | None = None
) -> list[TextRow]:
    """Texts, all or those of these numbers, of one kind or of both; damaged rows left out."""
    if numbers is None:
        found, _ = direct(connection, "SELECT text_no, tenant_id, kind, text_id, sealed FROM texts")
    else:
        found = [
            row
            for some in _some(numbers)
            for row in direct(
                connection,
                f"""
                SELECT text_no, tenant_id, kind, text_id, sealed FROM texts
                WHERE text_no IN ({some})
                """,  # noqa: S608
            )[0]
        ]
    return [
        TextRow(_int(number), tenant, str(what), text_id, sealed)
        for number, tenant, what, text_id, sealed in found
        if isinstance(tenant, bytes)
        and isinstance(text_id, bytes)
        and isinstance(sealed, bytes)
        and kind in (None, what)
    ]


def text_numbers(connection: Connection, kind: str, text_ids: Collection[bytes]) -> list[int]:
    """Numbers of the texts with these keyed ids."""
    return [
        _int(row[0])
        for text_id in text_ids
        for row in direct(
            connection, "SELECT text_no FROM texts WHERE kind = ? AND text_id = ?", (kind, text_id)
        )[0]
    ]


def prompts_of_requests(connection: Connection, request_ids: Collection[bytes]) -> list[int]:
    """Numbers of the prompts with these keyed request ids."""
    return [
        _int(row[0])
        for request_id in request_ids
        for row in direct(
            connection, "SELECT prompt_no FROM prompts WHERE request_id = ?", (request_id,)
        )[0]
    ]


def sealed_of(connection: Connection, numbers: Collection[int]) -> dict[int, bytes]:
    """What prompts have encrypted, by number."""
    return {
        _int(number): sealed
        for some in _some(numbers)
        for number, sealed in direct(
            connection,
            f"SELECT prompt_no, sealed FROM prompts WHERE prompt_no IN ({some})",  # noqa: S608
        )[0]
        if isinstance(sealed, bytes)
    }


# -- pruning --------------------------------------------------------------------------------------


def prune(connection: Connection, numbers: Collection[int]) -> int:
    """Take prompts of which nothing is left out of the inventory; returns how many went. A prompt
    through which others still share stays, without anything about it, until these are gone, too.

    The caller has found out that nothing is left of them. What they share through their links is
    nothing either, so their links go in any case.
    """
    went = 0
    for some in _some(numbers):
        direct(connection, f"DELETE FROM prompt_links WHERE prompt_no IN ({some})")  # noqa: S608
        _, changed = direct(connection, _FORGET.format(some=some))
        went += changed
    drop_unneeded(connection)
    return went


def erase(connection: Connection, numbers: Collection[int]) -> None:
    """Take prompts out of the inventory whose blocks may stay, because others share them: what
    leads through them to these stays, without anything about them."""
    for some in _some(numbers):
        direct(connection, _FORGET.format(some=some))
    drop_unneeded(connection)


def drop_unneeded(connection: Connection) -> None:
    """Delete prompts that are gone and that no link leads through, and texts of no prompt."""
    while direct(connection, _DROP_GONE)[1]:
        # Each that goes takes its own links along, through which others may have been needed.
        direct(
            connection,
            "DELETE FROM prompt_links WHERE prompt_no NOT IN (SELECT prompt_no FROM prompts)",
        )
    direct(
        connection,
        """
        DELETE FROM texts WHERE text_no NOT IN (
            SELECT subject_no FROM prompts WHERE subject_no IS NOT NULL
            UNION SELECT labels_no FROM prompts WHERE labels_no IS NOT NULL)
        """,
    )


def _some(numbers: Collection[int]) -> list[str]:
    """Lists for IN (...), of numbers of our own making."""
    every = sorted(int(number) for number in numbers)
    return [",".join(map(str, every[i : i + _MANY])) for i in range(0, len(every), _MANY)]


def _int(value: object) -> int:
    """
    Raises:
        ValueError: a damaged row.
    """
    return int(str(value))
