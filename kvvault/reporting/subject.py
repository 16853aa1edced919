"""One person's data, and its erasure end to end. GDPR 15 and 17.

The log and receipts know a subject by a keyed id only, which is computed here from the name and the
tenant's key: who has not both finds nothing, and nor does anybody once the tenant is forgotten.

That somebody asks whether a person's prompts persist is itself an event of the audit log (REQ-T5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection

from kvvault.audit import receipts as papers
from kvvault.catalog import purging
from kvvault.catalog import receipts as issued
from kvvault.catalog import reporting as rows
from kvvault.catalog.purging import PurgeRow
from kvvault.catalog.receipts import DeletionRow
from kvvault.catalog.reporting import EntryRow, IssuedRow, facts_of
from kvvault.errors import FormatError, UsageError
from kvvault.holding import Hold, HoldKind
from kvvault.naming import subject_key
from kvvault.promptfacts import Condition, PromptFacts
from kvvault.reporting.disposals import deletions_table
from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table
from kvvault.reporting.sources import Source
from kvvault.reporting.statements import ENGINE, backups

__all__ = ["report"]

_QUESTION = "question"
"""Kind of the log's entries about what was asked."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What log, receipts and deletions say of a subject."""

    entries: list[EntryRow]
    receipts: list[IssuedRow]
    documents: dict[bytes, str]
    deletions: list[DeletionRow]
    purges: dict[int, PurgeRow]


def report(source: Source, *, tenant: str, subject: str) -> Report:
    """The report. Writes down in the log that it was asked for.

    Raises:
        UsageError: the vault has no tenant of that name (any more).
        StorageError, CatalogError: also when the question cannot be written down.
        VaultKeyError.
    """
    vault = source.vault
    keys = vault.tenant_keys(tenant)
    if keys is None:
        raise UsageError(
            "the vault has no such tenant, or has forgotten it with all that could be asked for",
            hint="see `kvvault ls tenants`",
        )
    text_id = subject_key(keys, subject)
    keyed = keys.log_id("subject", text_id)
    named = [Condition("subject", "=", subject)]
    prompts, _ = vault.prompts.listing(named, tenant=tenant, sort="first_used", descending=False)
    together = vault.prompts.together(named, tenant=tenant)
    found = vault.catalog.read(partial(_look, keyed=keyed))
    vault.note_question(
        "report subject", tenant_id=keys.tenant_id, rows=len(prompts), about={"subject": keyed}
    )
    questions = [entry for entry in found.entries if facts_of(entry).get("kind") == _QUESTION]
    acts = [entry for entry in found.entries if entry not in questions]
    holds = _holds(vault.holds(), prompts, keys.tenant_id, text_id)
    erased = [one for one in found.deletions if one.trigger == "erase"]
    unpurged = sum(one.purge_no is None for one in found.deletions)
    answers = (
        Answer("tenant", "tenant", tenant, "kvvault ls tenants"),
        Answer("subject", "subject", subject, "kvvault prompts subjects"),
        Answer("keyed_id", "the subject in log and receipts (keyed id)", keyed,
               "kvvault audit export"),
        Answer("prompts", "prompts of the subject that persist", len(prompts),
               "kvvault prompts ls", Kind.COUNT),
        Answer("alone_bytes", "bytes that only this person's prompts have",
               together.alone_bytes, "kvvault erase --dry-run", Kind.BYTES),
        Answer("shared_bytes", "bytes that they have in common with prompts of others",
               together.shared_bytes, "kvvault erase --dry-run", Kind.BYTES),
        Answer("last_used_at", "last use of any of them",
               max((one.last_used for one in prompts), default=None), "kvvault prompts ls",
               Kind.TIME),
        Answer("last_deadline_at", "all of them are gone by", _gone_by(prompts),
               "kvvault prompts subjects", Kind.TIME),
        Answer("holds", "holds that keep any of it", len(holds), "kvvault hold ls", Kind.COUNT),
        Answer("acts", "acts on the subject's data in the log", len(acts), "kvvault audit export",
               Kind.COUNT),
        Answer("questions", "questions about the subject in the log, this one included",
               len(questions) + 1, "kvvault audit export", Kind.COUNT),
        Answer("receipts", "receipts about the subject", len(found.receipts),
               "kvvault receipt ls", Kind.COUNT),
        Answer("erasures", "erasures that concerned the subject", len(erased),
               "kvvault receipt ls", Kind.COUNT),
        Answer("waiting", "of these deletions, waiting for a purge", unpurged, "kvvault keys ls",
               Kind.COUNT),
    )  # fmt: skip
    return source.report(
        ReportKind.SUBJECT,
        "One person's data and its erasure",
        ("GDPR Art. 15, 17", "GDPR Art. 5(2)"),
        answers,
        (
            _prompts(prompts),
            _kept_by(holds),
            deletions_table(found.deletions, found.purges, found.receipts),
            _receipts(found),
            _acts(acts),
        ),
        {
            "What stays after an erasure": (
                "Blocks that other prompts share hold only what these have in common with the "
                "erased ones, and stay unless shared blocks were asked to go as well; what a hold "
                "keeps stays until it is cleared. Each receipt says how much that was."
            ),
            "What this does not cover": ENGINE,
            "Copies": backups(vault.provider_info()),
        },
    )


def _look(connection: Connection, keyed: str) -> _Found:
    entries = rows.entries_naming(connection, [keyed])
    naming = rows.receipts_naming(connection, [keyed])
    numbered = {entry.entry_no for entry in entries}
    deletions = {one.deletion_no for one in naming if one.deletion_no is not None}
    # A deletion is the subject's when its entry or its receipt names it, and then its second
    # receipt is as well.
    deletions |= {
        number for entry in entries if isinstance(number := facts_of(entry).get("deletion"), int)
    }
    receipts = [
        one
        for one in rows.list_issued(connection)
        if one in naming or one.entry_no in numbered or one.deletion_no in deletions
    ]
    deletions |= {one.deletion_no for one in receipts if one.deletion_no is not None}
    return _Found(
        entries,
        receipts,
        {one.receipt_id: rows.receipt_document(connection, one.receipt_id) for one in receipts},
        issued.deletions(connection, sorted(deletions)),
        {purge.purge_no: purge for purge in purging.list_purges(connection)},
    )


def _gone_by(prompts: Sequence[PromptFacts]) -> float | None:
    """None: there are none, or some have no deadline."""
    ends = [one.last_deadline for one in prompts]
    return None if None in ends else max((end for end in ends if end is not None), default=None)


def _holds(
    in_force: Sequence[Hold], prompts: Sequence[PromptFacts], tenant_id: bytes, text_id: bytes
) -> list[Hold]:
    """Those on the subject, on its tenant, and on anything that its prompts have."""
    inside = {number for one in prompts for number in one.holds}
    on_it = (HoldKind.TENANT, tenant_id), (HoldKind.SUBJECT, text_id)
    return [
        hold
        for hold in in_force
        if hold.number in inside
        or (hold.kind, hold.target) in on_it
        or (hold.kind is None and hold.spares(tenant_id))
    ]


def _prompts(prompts: Sequence[PromptFacts]) -> Table:
    return Table(
        "prompts",
        "Prompts that persist",
        "kvvault prompts ls",
        (
            Column("prompt", "prompt"),
            Column("request", "request"),
            Column("model", "model"),
            Column("first_used_at", "first use", Kind.TIME),
            Column("last_used_at", "last use", Kind.TIME),
            Column("tokens", "tokens", Kind.COUNT),
            Column("bytes", "bytes", Kind.BYTES),
            Column("shared_bytes", "of these shared with other prompts", Kind.BYTES),
            Column("last_deadline_at", "gone by", Kind.TIME),
            Column("rules", "kept by rule"),
            Column("holds", "holds"),
        ),
        tuple(
            (
                one.prompt_id.hex(),
                one.request_id,
                one.model,
                one.first_used,
                one.last_used,
                one.tokens,
                one.data_bytes,
                one.shared_bytes,
                one.last_deadline,
                ", ".join(one.rules) or None,
                ", ".join(map(str, one.holds)) or None,
            )
            for one in prompts
        ),
    )


def _kept_by(holds: Sequence[Hold]) -> Table:
    return Table(
        "holds",
        "Holds that keep any of it",
        "kvvault hold ls",
        (
            Column("number", "number", Kind.COUNT),
            Column("kind", "on a"),
            Column("reason", "reason"),
            Column("actor", "by"),
            Column("placed_at", "since", Kind.TIME),
        ),
        tuple((one.number, one.on, one.reason, one.actor, one.placed_at) for one in holds),
    )


def _receipts(found: _Found) -> Table:
    return Table(
        "receipts",
        "Receipts, and what stayed",
        "kvvault receipt show",
        (
            Column("receipt", "receipt"),
            Column("phase", "phase"),
            Column("deletion", "deletion", Kind.COUNT),
            Column("prompts", "prompts that went", Kind.COUNT),
            Column("kept_shared_blocks", "blocks kept: shared", Kind.COUNT),
            Column("kept_shared_prompts", "with prompts", Kind.COUNT),
            Column("kept_held_prompts", "prompts kept by holds", Kind.COUNT),
            Column("kept_held_segments", "segments kept by holds", Kind.COUNT),
            Column("kept_held_blocks", "blocks kept by holds", Kind.COUNT),
            Column("engine_copies", "copies in an engine"),
            Column("entry", "entry of the log", Kind.COUNT),
        ),
        tuple(
            (
                one.receipt_id.hex(),
                one.phase,
                one.deletion_no,
                _whole(_part(content, "deletion").get("prompts")),
                _whole(kept.get("shared_blocks")),
                _whole(kept.get("shared_prompts")),
                _whole(kept.get("held_prompts")),
                _whole(kept.get("held_segments")),
                _whole(kept.get("held_blocks")),
                _engine(content),
                one.entry_no,
            )
            for one in found.receipts
            for content in [_content(found.documents[one.receipt_id])]
            for kept in [_part(content, "kept")]
        ),
    )


def _content(document: str) -> Mapping[str, Any]:
    try:
        return papers.parse(document).content
    except FormatError:
        return {}  # damaged: `kvvault audit verify` says so


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = content.get(name)
    return part if isinstance(part, Mapping) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _engine(content: Mapping[str, Any]) -> str | None:
    copies = content.get("engine_copies")
    if not isinstance(copies, list):
        return None
    told = [
        f"{one.get('what')}: {'dropped' if one.get('reached') else 'not reached'}"
        for one in copies
        if isinstance(one, Mapping)
    ]
    return "; ".join(told) or None


def _acts(entries: Sequence[EntryRow]) -> Table:
    return Table(
        "acts",
        "What the log says",
        "kvvault audit export",
        (
            Column("entry", "entry", Kind.COUNT),
            Column("at", "at", Kind.TIME),
            Column("kind", "what"),
            Column("facts", "facts (ids are keyed)"),
        ),
        tuple(
            (
                entry.entry_no,
                at if isinstance(at := facts.get("at"), int | float) else None,
                str(facts.get("kind", "(damaged)")),
                "; ".join(
                    f"{name} {_shown(value)}"
                    for name, value in facts.items()
                    if name not in ("kind", "at", "prev")
                ),
            )
            for entry in entries
            for facts in [facts_of(entry)]
        ),
    )


def _shown(value: object) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{len(value)} items"
    return value if isinstance(value, str) else json.dumps(value)
