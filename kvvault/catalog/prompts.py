"""Rows of the inventory, one function per transaction step; see `kvvault.catalog.operations`.

What a membership is, and why so little says it, stands in `kvvault.catalog.schema` (`extents`,
`prompt_links`). Statements that every request runs go to the driver as they are.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from kvvault.catalog.database import direct
from kvvault.errors import CatalogError
from kvvault.model import ID_BYTES
from kvvault.segments.format import ORIGIN_BYTES

MAX_END = (1 << 32) - 1
"""A longer prompt is recorded as if it ended here."""

_ORIGIN = struct.Struct(">II")


class KeyReplacedError(CatalogError):
    """What was encrypted for a row is under a key that a purge has replaced meanwhile."""

    def __init__(self) -> None:
        super().__init__("a tenant's key was replaced", hint="encrypt again under the new one")


class TenantGoneError(CatalogError):
    """The tenant was forgotten."""

    def __init__(self) -> None:
        super().__init__("the tenant was forgotten", hint="nothing more of it is recorded")


@dataclass(frozen=True, slots=True)
class Text:
    """A subject, or a set of labels as canonical JSON."""

    kind: str
    text_id: bytes
    sealed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A row to be."""

    tenant_id: bytes
    key_no: int
    """Of the key that all of it is encrypted under."""
    namespace: bytes
    prompt_id: bytes
    subject: Text | None
    labels: Text | None
    request_id: bytes | None
    sealed: bytes | None = field(repr=False)
    started_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the catalog says whose a block is."""

    extent_no: int
    index: int
    """Of the block in its extent."""
    prompt_no: int
    """0: nobody's."""
    end: int


@dataclass(frozen=True, slots=True)
class Membership:
    """What is to be noted of a prompt: what it adopts and shares."""

    prompt_no: int
    adopted: Sequence[tuple[int, int, int]]
    """Extent, index in it, token at which the block ends."""
    links: Mapping[int, int]
    """Through which prompt, up to which token."""
    end_token: int
    last_used: float
    tenant_id: bytes
    key_no: int
    sealed: bytes | None = field(repr=False, default=None)
    """In place of what is there; None: that stays."""


def add(connection: Connection, new: NewPrompt) -> int:
    """Insert a prompt; its number.

    Raises:
        KeyReplacedError: encrypt again, then add it.
        TenantGoneError: the tenant was forgotten.
    """
    _check_key(connection, new.tenant_id, new.key_no)
    scope_no = _scope(connection, new.tenant_id, new.namespace)
    subject_no = _text(connection, new.tenant_id, new.subject)
    labels_no = _text(connection, new.tenant_id, new.labels)
    rows, _ = direct(
        connection,
        """
        INSERT INTO prompts (prompt_id, scope_no, subject_no, labels_no, request_id, sealed,
            first_used, last_used) VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING prompt_no
        """,
        (
            new.prompt_id,
            scope_no,
            subject_no,
            labels_no,
            new.request_id,
            new.sealed,
            new.started_at,
            new.used_at,
        ),
    )
    return _int(rows[0][0])


def _check_key(connection: Connection, tenant_id: bytes, key_no: int) -> None:
    rows, _ = direct(connection, "SELECT key_no FROM tenants WHERE tenant_id = ?", (tenant_id,))
    if not rows:
        raise TenantGoneError
    if rows[0][0] != key_no:
        raise KeyReplacedError


def _scope(connection: Connection, tenant_id: bytes, namespace: bytes) -> int:
    rows, _ = direct(
        connection,
        "SELECT scope_no FROM scopes WHERE tenant_id = ? AND namespace = ?",
        (tenant_id, namespace),
    )
    if not rows:
        rows, _ = direct(
            connection,
            "INSERT INTO scopes (tenant_id, namespace) VALUES (?, ?) RETURNING scope_no",
            (tenant_id, namespace),
        )
    return _int(rows[0][0])


def _text(connection: Connection, tenant_id: bytes, text: Text | None) -> int | None:
    if text is None:
        return None
    rows, _ = direct(
        connection,
        "SELECT text_no FROM texts WHERE tenant_id = ? AND kind = ? AND text_id = ?",
        (tenant_id, text.kind, text.text_id),
    )
    if not rows:
        rows, _ = direct(
            connection,
            """
            INSERT INTO texts (tenant_id, kind, text_id, sealed) VALUES (?, ?, ?, ?)
            RETURNING text_no
            """,
            (tenant_id, text.kind, text.text_id, text.sealed),
        )
    return _int(rows[0][0])


def origins(connection: Connection, segment_id: bytes, slots: Iterable[int]) -> dict[int, Origin]:
    """Whose the blocks in these slots of a segment are, as far as the catalog has them."""
    wanted = sorted(slots)
    found: dict[int, Origin] = {}
    if not wanted:
        return found
    rows, _ = direct(
        connection,
        """
        SELECT extent_no, first_slot, length(block_ids), origins FROM extents
        WHERE segment_id = ? AND first_slot <= ? ORDER BY first_slot
        """,
        (segment_id, wanted[-1]),
    )
    at = 0
    for extent_no, first_slot, size, blob in rows:
        try:
            first, count = _int(first_slot), _int(size) // ID_BYTES
        except ValueError:
            continue  # a damaged row: its blocks are not served either
        while at < len(wanted) and wanted[at] < first:
            at += 1
        whose = _whole(blob, count)
        while at < len(wanted) and wanted[at] < first + count:
            index = wanted[at] - first
            prompt_no, end = _ORIGIN.unpack_from(whose, index * ORIGIN_BYTES)
            found[wanted[at]] = Origin(_int(extent_no), index, prompt_no, end)
            at += 1
    return found


def _whole(blob: object, count: int) -> bytes:
    """An extent's origins; zeros for what is not there or cannot be."""
    size = count * ORIGIN_BYTES
    return blob if isinstance(blob, bytes) and len(blob) == size else bytes(size)


def links_of(connection: Connection, prompt_no: int) -> dict[int, int]:
    """Through which prompts a prompt shares, and up to which token."""
    rows, _ = direct(
        connection, "SELECT via_no, upto FROM prompt_links WHERE prompt_no = ?", (prompt_no,)
    )
    return {_int(via): _int(upto) for via, upto in rows}


def reach(links: Callable[[int], Mapping[int, int]], start: Mapping[int, int]) -> dict[int, int]:
    """What links lead to: of each prompt, up to which token. Each prompt is looked at once, the
    farthest way to it first; what leads in circles ends."""
    far: dict[int, int] = {}
    ahead = [(-upto, prompt_no) for prompt_no, upto in start.items()]
    heapq.heapify(ahead)
    while ahead:
        nearest, prompt_no = heapq.heappop(ahead)
        if prompt_no in far:
            continue
        far[prompt_no] = -nearest
        for via, upto in links(prompt_no).items():
            if via not in far:
                heapq.heappush(ahead, (max(nearest, -upto), via))
    return far


def touch(connection: Connection, numbers: Iterable[int], now: float) -> None:
    """Note that these requests are still running."""
    for number in numbers:
        direct(
            connection,
            "UPDATE prompts SET last_used = max(last_used, ?) WHERE prompt_no = ? AND gone = 0",
            (now, number),
        )


def note(connection: Connection, members: Membership) -> bool | None:
    """Enter what a prompt adopts and shares. True: done; False: somebody else has adopted one of
    the blocks meanwhile, so nothing was done; None: the prompt is not there any more.

    Raises:
        KeyReplacedError: encrypt `sealed` again.
        TenantGoneError: the tenant was forgotten.
    """
    if members.sealed is not None:
        _check_key(connection, members.tenant_id, members.key_no)
    patched = _adopt(connection, members)
    if patched is None:
        return False
    _, changed = direct(
        connection,
        """
        UPDATE prompts SET end_token = max(end_token, ?), last_used = max(last_used, ?),
            sealed = coalesce(?, sealed) WHERE prompt_no = ? AND gone = 0
        """,
        (
            min(members.end_token, MAX_END),
            members.last_used,
            members.sealed,
            members.prompt_no,
        ),
    )
    if not changed:
        return None
    for extent_no, blob in patched.items():
        direct(connection, "UPDATE extents SET origins = ? WHERE extent_no = ?", (blob, extent_no))
    for via, upto in members.links.items():
        direct(
            connection,
            """
            INSERT INTO prompt_links (prompt_no, via_no, upto) VALUES (?, ?, ?)
            ON CONFLICT (prompt_no, via_no) DO UPDATE SET upto = max(upto, excluded.upto)
            """,
            (members.prompt_no, via, upto),
        )
    return True


def _adopt(connection: Connection, members: Membership) -> dict[int, bytes] | None:
    """The origins of extents with adopted blocks; None when one of these has an owner by now."""
    patched: dict[int, bytearray] = {}
    for extent_no, index, end in members.adopted:
        blob = patched.get(extent_no)
        if blob is None:
            rows, _ = direct(
                connection,
                "SELECT length(block_ids), origins FROM extents WHERE extent_no = ?",
                (extent_no,),
            )
            if not rows:
                continue  # deleted meanwhile
            blob = bytearray(_whole(rows[0][1], _int(rows[0][0]) // ID_BYTES))
            patched[extent_no] = blob
        owner, _ = _ORIGIN.unpack_from(blob, index * ORIGIN_BYTES)
        if owner not in (0, members.prompt_no):
            return None
        _ORIGIN.pack_into(blob, index * ORIGIN_BYTES, members.prompt_no, min(end, MAX_END))
    return {extent_no: bytes(blob) for extent_no, blob in patched.items()}


def _int(value: object) -> int:
    """
    Raises:
        ValueError: a damaged row.
    """
    return int(str(value))
