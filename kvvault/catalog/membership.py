"""The whole inventory read at once, as arrays; and what has nothing left, pruned.

A hundred thousand prompts and their links are two hundred thousand rows, and making Python objects
of them takes longer than all else that a question needs. So SQLite makes one text of all of them,
in hex digits of fixed width, and numpy reads that: a tenth of the time (measured).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection

from kvvault.catalog import operations
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.model import ID_BYTES, SegmentFacts

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
    prompt_id: npt.NDArray[np.uint64]
    """Its 8 bytes as a number, big endian; 0 of those that are gone."""
    scope: I64
    subject: I64
    """Number of a text; 0: none. Likewise `labels`."""
    labels: I64
    first_used: F64
    """To the millisecond; `exact` has what the row says. Likewise `last_used`."""
    last_used: F64
    gone: npt.NDArray[np.bool_]

    def ids_of(self, rows: I64) -> list[bytes]:
        """Prompt ids of these rows, 8 bytes each."""
        return [number.to_bytes(8, "big") for number in self.prompt_id[rows].tolist()]

    def having(self, prompt_ids: Collection[bytes]) -> npt.NDArray[np.bool_]:
        """Which rows have one of these ids."""
        wanted = [int.from_bytes(one, "big") for one in prompt_ids if len(one) == 8]
        return np.isin(self.prompt_id, np.array(wanted, np.uint64)) & (self.prompt_id > 0)


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
    extent_no: int = 0
    """The highest number of an extent by then."""


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
    links = _packed(connection, ("prompt_no", "via_no", "upto"), "FROM prompt_links")
    if tenant_id is not None:
        links = links[np.isin(links[:, 0], prompts.number)]
    return Snapshot(
        scopes,
        prompts,
        links[:, 0],
        links[:, 1],
        links[:, 2],
        segments,
        _blocks(connection, segments, with_ids=with_ids),
        _int(direct(connection, "SELECT coalesce(max(extent_no), 0) FROM extents")[0][0][0]),
    )


def _prompts(connection: Connection, scopes: Collection[int] | None) -> PromptTable:
    # Numbers of our own making: safe to write into the statement, however many there are.
    where = "" if scopes is None else f"WHERE scope_no IN ({','.join(map(str, scopes))})"
    table = _packed(
        connection,
        (
            "prompt_no",
            "scope_no",
            "subject_no",
            "labels_no",
            "gone",
            *(f"first_used * 1000 {part}" for part in _HALVES),
            *(f"last_used * 1000 {part}" for part in _HALVES),
        ),
        f"FROM prompts {where}",
    )
    rows, _ = direct(
        connection,
        f"""
        SELECT group_concat(substr(hex(prompt_id) || '0000000000000000', 1, 16), '')
        FROM prompts {where}
        """,  # noqa: S608
    )
    ids = bytes.fromhex(str(rows[0][0] or ""))
    return PromptTable(
        table[:, 0],
        np.frombuffer(ids, ">u8").astype(np.uint64),
        table[:, 1],
        table[:, 2],
        table[:, 3],
        (table[:, 5] << 32 | table[:, 6]) / 1000,
        (table[:, 7] << 32 | table[:, 8]) / 1000,
        table[:, 4] != 0,
    )


_HALVES = ("/ 4294967296", "% 4294967296")


def _packed(
    connection: Connection, columns: Sequence[str], rest: str, parameters: Sequence[object] = ()
) -> I64:
    """Columns of whole numbers below 2^32, one row of the result for each of the table; 0 for what
    is none."""
    values = ", ".join(f"CAST(coalesce({one}, 0) AS INTEGER) & 4294967295" for one in columns)
    rows, _ = direct(
        connection,
        f"SELECT group_concat(printf('{'%08x' * len(columns)}', {values}), '') {rest}",
        parameters,
    )
    found = np.frombuffer(bytes.fromhex(str(rows[0][0] or "")), ">u4")
    return found.reshape(-1, len(columns)).astype(np.int64)


def _segments(connection: Connection, tenant_id: bytes | None) -> list[SegmentFacts]:
    s = t.segments.c
    live = s.state.in_(operations.LIVE)
    where = live if tenant_id is None else live & (s.tenant_id == tenant_id)
    return [row.facts for row in operations.list_segments(connection, where)]


_EXTENTS = """
    SELECT first_slot, {what},
        CASE WHEN typeof(origins) = 'blob' AND length(origins) * 2 = length(block_ids)
        THEN origins ELSE zeroblob(length(block_ids) / 2) END
    FROM extents WHERE segment_id = ? AND typeof(first_slot) = 'integer'
        AND typeof(block_ids) = 'blob' AND length(block_ids) % 16 = 0
"""
_Columns = tuple[tuple[int, ...], tuple[int, ...] | tuple[bytes, ...], tuple[bytes, ...]]
_SIZES, _IDS = _EXTENTS.format(what="length(block_ids)"), _EXTENTS.format(what="block_ids")


def _blocks(
    connection: Connection, segments: Sequence[SegmentFacts], *, with_ids: bool
) -> BlockTable:
    # Few rows, each with many blocks, so here the rows themselves are fetched: once, because
    # finding them costs as much as what is in them.
    pairs: list[I64] = [np.zeros((0, 2), np.int64)]
    slots: list[I64] = [np.zeros(0, np.int64)]
    ids: list[bytes] = []
    counts: list[int] = []
    for facts in segments:
        rows, _ = direct(connection, _IDS if with_ids else _SIZES, (facts.segment_id,))
        if not rows:
            counts.append(0)
            continue
        # The types are the statement's doing: asking each row again would take as long as reading.
        start, what, whose = cast("_Columns", tuple(zip(*rows, strict=True)))
        if with_ids:
            named = cast("tuple[bytes, ...]", what)
            ids += named
            what = tuple(map(len, named))
        first, sizes = np.array(start, np.int64), np.array(what, np.int64) // ID_BYTES
        offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        slots.append(np.repeat(first, sizes) + offset)
        pairs.append(np.frombuffer(b"".join(whose), ">u4").reshape(-1, 2).astype(np.int64))
        counts.append(len(offset))
    every = np.concatenate(pairs)
    table = BlockTable(
        every[:, 0],
        every[:, 1],
        np.repeat(np.arange(len(segments)), np.array(counts, np.int64)),
        np.concatenate(slots),
        np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2).astype(np.uint64),
    )
    return _without_revoked(connection, table, segments)


def _without_revoked(
    connection: Connection, table: BlockTable, segments: Sequence[SegmentFacts]
) -> BlockTable:
    index = {facts.segment_id: i for i, facts in enumerate(segments)}
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


@dataclass(frozen=True, slots=True)
class Exact:
    """What a prompt's row says of it, besides numbers."""

    prompt_id: bytes
    first_used: float
    last_used: float
    sealed: bytes | None


def exact(connection: Connection, numbers: Collection[int]) -> dict[int, Exact]:
    """The rows of these prompts, by number; damaged ones left out."""
    return {
        _int(number): Exact(
            prompt_id,
            float(str(first)),
            float(str(last)),
            sealed if isinstance(sealed, bytes) else None,
        )
        for some in _some(numbers)
        for number, prompt_id, first, last, sealed in direct(
            connection,
            f"""
            SELECT prompt_no, prompt_id, first_used, last_used, sealed FROM prompts
            WHERE prompt_no IN ({some})
            """,  # noqa: S608
        )[0]
        if isinstance(prompt_id, bytes)
    }


# -- pruning --------------------------------------------------------------------------------------


def prune(
    connection: Connection, numbers: Collection[int], *, extent_no: int, before: float
) -> int:
    """Take prompts of which nothing is left out of the inventory; returns how many went. A prompt
    through which others still share stays, without anything about it, until these are gone, too.

    The caller has found out that nothing was left of them, from a snapshot. Who has stored, adopted
    or used anything since stays, and that is asked here: of the extents after `extent_no`, the last
    of the snapshot, and of prompts that were used since `before` (seconds). What the others share
    through their links is nothing either, so their links go in any case.
    """
    stored = _owners_since(connection, extent_no) if numbers else set()
    went = 0
    for some in _some(_unused(connection, set(numbers) - stored, before)):
        direct(connection, f"DELETE FROM prompt_links WHERE prompt_no IN ({some})")  # noqa: S608
        _, changed = direct(connection, _FORGET.format(some=some))
        went += changed
    drop_unneeded(connection)
    return went


def _owners_since(connection: Connection, extent_no: int) -> set[int]:
    """Whose blocks are in extents after that one: seconds' worth of stores."""
    rows, _ = direct(connection, "SELECT origins FROM extents WHERE extent_no > ?", (extent_no,))
    blobs = [row[0] for row in rows if isinstance(row[0], bytes) and len(row[0]) % 8 == 0]
    return set(np.frombuffer(b"".join(blobs), ">u4")[::2].tolist())


def _unused(connection: Connection, numbers: Collection[int], before: float) -> list[int]:
    """Those of these prompts that nobody has used since."""
    return [
        _int(row[0])
        for some in _some(numbers)
        for row in direct(
            connection,
            f"SELECT prompt_no FROM prompts WHERE prompt_no IN ({some}) AND last_used < ?",  # noqa: S608
            (before,),
        )[0]
    ]


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
