"""What holds keep, one function per transaction step; see `kvvault.catalog.operations`.

A hold on a tenant or segment is asked about in SQL. One on a subject or prompt is on blocks, and
what expires or is evicted is a segment: all segments with any of these blocks are kept. Which they
are changes with every block that is stored or reused, so it is worked out where it matters: in the
transaction that would take keys away, and for every plan that says what it would do (`Reach.NOW`).
While there is no such hold, that is one query; else it reads the whole inventory, and what was
found is noted in `hold_segments` for those who cannot wait for that (`Reach.NOTED`).

Holds fail closed. One whose row cannot be what it says, because it is damaged, keeps all of its
tenant until it is cleared; where it does not say whose it is, everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    exists,
    insert,
    or_,
    select,
    text,
)

from kvvault.catalog import membership
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.catalog.membership import PromptTable, Snapshot
from kvvault.catalog.operations import LIVE
from kvvault.catalog.rows import blob
from kvvault.model import ID_BYTES
from kvvault.sharing import I64, Blocks, Links, Mask, Segments, Sharing

IN_FORCE = "typeof(holds.cleared_at) NOT IN ('real', 'integer')"
"""Of a row of `holds`: nobody has cleared it."""

OWNER = """
    CASE WHEN typeof(holds.tenant_id) = 'blob' AND length(holds.tenant_id) = 16
    THEN holds.tenant_id END
"""
"""Of a row of `holds`: whose it is on; NULL when it does not say."""

DAMAGED = f"""
    NOT coalesce(
        holds.kind IN ('tenant', 'segment', 'subject', 'prompt')
        AND typeof(holds.target) = 'blob'
        AND (holds.tenant_id IS NULL OR {OWNER} IS NOT NULL)
        AND typeof(holds.reason) = 'text' AND typeof(holds.actor) = 'text'
        AND typeof(holds.placed_at) IN ('real', 'integer')
        AND typeof(holds.cleared_at) IN ('real', 'integer', 'null')
        AND CASE
            WHEN length(holds.target) = 0 THEN holds.tenant_id IS NULL
                AND (holds.kind = 'segment' OR holds.cleared_at IS NOT NULL)
            WHEN holds.kind = 'prompt'
                THEN length(holds.target) = 8 AND holds.tenant_id IS NOT NULL
            WHEN holds.kind = 'subject'
                THEN length(holds.target) = 16 AND holds.tenant_id IS NOT NULL
            ELSE length(holds.target) = 16 END, 0)
"""
"""Of a row of `holds`: it cannot be what it says, so nobody knows what it keeps. (When a tenant is
forgotten, target and owner are emptied; what is in force then is on a segment that was lost.)"""

SOUND_KIND = f"CASE WHEN {DAMAGED} THEN '' ELSE holds.kind END"
"""Of a row of `holds`: on what it is; empty when it is damaged. Whatever that has for a kind, the
driver need not be able to read."""


class Reach(Enum):
    """Which holds are asked about, and how."""

    NOW = "now"
    """All, as it is now. May read the whole inventory."""
    NOTED = "noted"
    """All; what those on subjects and prompts keep, as of when somebody last looked. For who only
    chooses, in a hurry, what is asked about again."""
    WHOLE = "whole"
    """Those on tenants and segments: single blocks may be written to another segment."""


_OF_PARTS = f"SELECT 1 FROM holds WHERE {IN_FORCE} AND kind IN ('subject', 'prompt')"  # noqa: S608


def held(*, whole: bool = False) -> ColumnElement[bool]:
    """Segments that a hold protects, or may protect; those with blocks of subjects or prompts as
    of the last `protect`. `whole`: not because of single blocks in them."""
    s, h, p = t.segments.c, t.holds.c, t.hold_segments.c
    of_all = exists(
        select(h.hold_no).where(
            text(IN_FORCE),
            or_(
                and_(h.kind == "tenant", h.target == s.tenant_id),
                and_(h.kind == "segment", h.target == s.segment_id),
                _unclear(s.tenant_id),
            ),
        )
    )
    if whole:
        return of_all
    return or_(of_all, exists(select(p.segment_id).where(p.segment_id == s.segment_id)))


def _unclear(tenant_id: ColumnElement[bytes] | bytes) -> ColumnElement[bool]:
    """Damaged holds that may be on something of a tenant."""
    return and_(text(DAMAGED), or_(text(f"{OWNER} IS NULL"), t.holds.c.tenant_id == tenant_id))


def held_among(
    connection: Connection, wheres: Iterable[ColumnElement[bool]], reach: Reach
) -> set[bytes]:
    """Ids of segments that a hold protects: all of those that meet one of these conditions."""
    found = set(kept(connection)) if reach is Reach.NOW else set()
    for where in wheres:
        asked = held(whole=reach is not Reach.NOTED)
        rows = connection.execute(select(t.segments.c.segment_id).where(where, asked))
        found.update(blob(row[0], "a segment") for row in rows)
    return found


def held_segments(connection: Connection, reach: Reach = Reach.NOW) -> set[bytes]:
    """Ids of the live segments that a hold protects."""
    return held_among(connection, [t.segments.c.state.in_(LIVE)], reach)


@dataclass(frozen=True, slots=True)
class InForce:
    """How many holds are in force."""

    holds: int
    damaged: int
    """Of these, with rows that cannot be what they say: each keeps all of its tenant, or all."""


def in_force(connection: Connection) -> InForce:
    """Count. Whatever is in the rows."""
    [[holds, damaged]], _ = direct(
        connection,
        f"SELECT count(*), coalesce(sum({DAMAGED}), 0) FROM holds WHERE {IN_FORCE}",  # noqa: S608
    )
    return InForce(int(str(holds)), int(str(damaged)))


def unnoted(connection: Connection, segment_ids: Iterable[bytes]) -> bool:
    """Whether `held` does not know yet that all of these are held."""
    return not held_segments(connection, Reach.NOTED).issuperset(segment_ids)


def tenant_held(connection: Connection, tenant_id: bytes) -> bool:
    """Whether a hold on the tenant as such is in force, or on a subject or prompt of it, of which
    nothing need be there."""
    h = t.holds.c
    statement = select(h.hold_no).where(
        text(IN_FORCE),
        or_(
            and_(h.kind == "tenant", h.target == tenant_id),
            and_(h.kind.in_(("subject", "prompt")), h.tenant_id == tenant_id),
            _unclear(tenant_id),
        ),
    )
    return connection.execute(statement).first() is not None


# -- subjects and prompts ------------------------------------------------------------------------


def protect(connection: Connection) -> None:
    """Bring `hold_segments` up to date. Writes only what has changed."""
    h = t.hold_segments
    found = kept(connection)
    # As they are: a damaged row is one more reason to write them anew.
    known = {row[0] for row in direct(connection, "SELECT segment_id FROM hold_segments")[0]}
    if known != set(found):
        connection.execute(delete(h))
        for segment_id in found:
            connection.execute(insert(h).values(segment_id=segment_id))


def kept(connection: Connection) -> list[bytes]:
    """Segments with blocks of subjects or prompts that are held now."""
    if not direct(connection, _OF_PARTS)[0]:
        return []
    state = membership.snapshot(connection)
    return _segments(state, held_prompts(connection, state, parts=True))


def held_blocks(connection: Connection, tenant_id: bytes) -> frozenset[bytes]:
    """Ids of a tenant's blocks of subjects or prompts that are held now. While there is such a
    hold, it reads the tenant's whole inventory."""
    if not direct(connection, _OF_PARTS)[0]:
        return frozenset()
    state = membership.snapshot(connection, tenant_id=tenant_id, with_ids=True)
    used = _used(state, held_prompts(connection, state, parts=True))
    ids = state.blocks.ids[used].tobytes()
    return frozenset(ids[i : i + ID_BYTES] for i in range(0, len(ids), ID_BYTES))


def kept_by(connection: Connection, kind: str, target: bytes) -> list[bytes]:
    """Segments that a hold on a subject or prompt keeps, or would keep."""
    state = membership.snapshot(connection)
    table = state.prompts
    if kind == "subject":
        numbers = membership.text_numbers(connection, "subject", [target])
        chosen: Mask = np.isin(table.subject, np.array(numbers, np.int64))
    else:
        chosen = table.having([target])
    return _segments(state, chosen & ~table.gone)


def owner_of_prompt(connection: Connection, prompt_id: bytes) -> bytes | None:
    """The id of its tenant; None when nothing of it is there."""
    query = """
        SELECT s.tenant_id FROM prompts p JOIN scopes s ON s.scope_no = p.scope_no
        WHERE p.prompt_id = ? AND p.gone = 0
    """
    rows, _ = direct(connection, query, (prompt_id,))
    return blob(rows[0][0], "a scope") if rows else None


def held_prompts(connection: Connection, state: Snapshot, *, parts: bool = False) -> Mask:
    """Which prompts of a snapshot's table holds keep: on the prompt, on its subject and, unless
    only `parts` are meant, on its tenant. Damaged ones are asked about only with the latter."""
    rows, _ = direct(
        connection,
        f"""
        SELECT {SOUND_KIND}, CASE WHEN {DAMAGED} THEN x'' ELSE holds.target END, {OWNER}
        FROM holds WHERE {IN_FORCE}
        """,  # noqa: S608
    )
    kept: dict[str, set[bytes]] = {"tenant": set(), "subject": set(), "prompt": set()}
    table = state.prompts
    for kind, target, tenant_id in rows:
        if not kind and not parts:
            if tenant_id is None:
                return ~table.gone
            kept["tenant"].add(blob(tenant_id, "a hold"))
        elif kind in kept:
            kept[str(kind)].add(blob(target, "a hold"))
    subjects = membership.text_numbers(connection, "subject", kept["subject"])
    found: Mask = np.isin(table.subject, np.array(subjects, np.int64))
    found |= table.having(kept["prompt"])
    if not parts and kept["tenant"]:
        scopes = [no for no, (tenant_id, _) in state.scopes.items() if tenant_id in kept["tenant"]]
        found |= np.isin(table.scope, np.array(scopes, np.int64))
    return found & ~table.gone


def _segments(state: Snapshot, held: Mask) -> list[bytes]:
    chosen = np.unique(state.blocks.segment[_used(state, held)])
    return [state.segments[i].segment_id for i in chosen]


def _used(state: Snapshot, held: Mask) -> Mask:
    """Which blocks these prompts have."""
    sharing = sharing_of(state)
    sources = np.zeros(len(sharing.numbers), np.bool_)
    sources[sharing.position(state.prompts.number[held])] = True
    return sharing.used_by(sources)


def sharing_of(state: Snapshot) -> Sharing:
    """Who uses which blocks, as of a snapshot."""
    table: PromptTable = state.prompts
    zeros: I64 = np.zeros(len(state.segments), np.int64)
    return Sharing(
        table.number,
        table.gone,
        Links(state.user, state.via, state.upto),
        Blocks(state.blocks.owner, state.blocks.end, state.blocks.segment),
        Segments(zeros, zeros.astype(np.float64)),
    )
