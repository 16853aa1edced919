"""One person's data, and its erasure end to end. GDPR 15 and 17.

The log and receipts know a subject by a keyed id only, which is computed here from the name and the
tenant's key: who has not both finds nothing, and nor does anybody once the tenant is forgotten.

That somebody asks whether a person's prompts persist is itself an event of the audit log (REQ-T5),
so the vault has to be open for writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from kvvault.catalog import log, purging
from kvvault.catalog import reporting as rows
from kvvault.catalog.purging import PurgeRow
from kvvault.catalog.reporting import DeletionRow, EntryRow, PromptRow, ReceiptRow
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import UsageError
from kvvault.reporting.disposals import deletions_table
from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table
from kvvault.reporting.sources import Source
from kvvault.reporting.statements import ENGINE, backups

__all__ = ["QUESTION", "report"]

QUESTION = "question"
"""Kind of the log's entry about this."""

_SHOW = "kvvault report subject"


@dataclass(frozen=True, slots=True)
class _Found:
    prompts: list[PromptRow]
    entries: list[EntryRow]
    receipts: list[ReceiptRow]
    deletions: list[DeletionRow]
    purges: dict[int, PurgeRow]


def report(source: Source, *, tenant: str, subject: str) -> Report:
    """The report. Writes down in the log that it was asked for.

    Raises:
        UsageError: the vault has no tenant of that name (any more).
        ClosedError: the vault is open for reading only.
        VaultKeyError, StorageError, CatalogError.
    """
    vault = source.vault
    keys = vault.tenant_keys(tenant)
    if keys is None:
        raise UsageError(
            "the vault has no such tenant, or has forgotten it with all that could be asked for",
            hint="see `kvvault ls tenants`",
        )
    text_id = keys.keyed_id("subject", subject.encode())
    keyed = keys.keyed_id("log", b"subject" + text_id).hex()
    facts = {
        "question": "report subject",
        "tenant": keys.keyed_id("log", b"tenant").hex(),
        "subject": keyed,
    }
    now = vault.time.steady()
    # First: a question that cannot be written down is not answered.
    vault.catalog.write(lambda c: log.append(c, QUESTION, now, facts))
    found = vault.catalog.read(lambda c: _look(c, keys, text_id, keyed))
    acts = [entry for entry in found.entries if _facts(entry).get("kind") != QUESTION]
    erased = [one for one in found.deletions if one.trigger == "erase"]
    unpurged = sum(one.purge_no is None for one in found.deletions)
    answers = (
        Answer("tenant", "tenant", tenant, "kvvault ls tenants"),
        Answer("subject", "subject", subject, "kvvault prompts subjects"),
        Answer("keyed_id", "the subject in log and receipts (keyed id)", keyed, "kvvault audit"),
        Answer("prompts", "prompts of the subject that persist", len(found.prompts),
               "kvvault prompts ls", Kind.COUNT),
        Answer("last_used_at", "last use of any of them",
               max((one.last_used for one in found.prompts), default=None), "kvvault prompts ls",
               Kind.TIME),
        Answer("acts", "acts on the subject's data in the log", len(acts), "kvvault audit",
               Kind.COUNT),
        Answer("questions", "questions about the subject in the log, this one included",
               len(found.entries) - len(acts), "kvvault audit", Kind.COUNT),
        Answer("receipts", "receipts that name the subject", len(found.receipts),
               "kvvault receipt", Kind.COUNT),
        Answer("erasures", "erasures that these are about", len(erased), "kvvault receipt",
               Kind.COUNT),
        Answer("waiting", "deletions of these that wait for a purge", unpurged, "kvvault keys ls",
               Kind.COUNT),
    )  # fmt: skip
    return source.report(
        ReportKind.SUBJECT,
        "One person's data and its erasure",
        ("GDPR Art. 15, 17", "GDPR Art. 5(2)"),
        answers,
        (
            _prompts(found.prompts),
            _acts(acts),
            deletions_table(found.deletions, found.purges, found.receipts),
            _receipts(found.receipts),
        ),
        {
            "What stays after an erasure": (
                "Blocks that other prompts share hold only what these have in common with the "
                "erased ones, and stay unless shared blocks were asked to go as well; what a hold "
                "keeps stays until it is cleared. The entries of the log say how much that was."
            ),
            "What this does not cover": ENGINE,
            "Copies": backups(vault.provider_info()),
        },
    )


def _look(connection: Connection, keys: TenantKeys, text_id: bytes, keyed: str) -> _Found:
    prompts = rows.prompts_of_subject(connection, keys.tenant_id, text_id)
    entries = rows.entries_naming(connection, [keyed])
    naming = rows.receipts_naming(connection, [keyed])
    numbered = {entry.entry_no for entry in entries}
    deletions = {one.deletion_no for one in naming if one.deletion_no is not None}
    # A receipt is the subject's when it names it, when the log says so, or when it is the second
    # one of the same deletion.
    receipts = [
        one
        for one in rows.list_receipts(connection)
        if one in naming or one.entry_no in numbered or one.deletion_no in deletions
    ]
    deletions |= {one.deletion_no for one in receipts if one.deletion_no is not None}
    return _Found(
        prompts,
        entries,
        receipts,
        rows.get_deletions(connection, sorted(deletions)),
        {purge.purge_no: purge for purge in purging.list_purges(connection)},
    )


def _facts(entry: EntryRow) -> Mapping[str, object]:
    try:
        facts = json.loads(entry.body)
    except ValueError:
        return {}  # damaged: `kvvault audit verify` says so
    return facts if isinstance(facts, dict) else {}


def _prompts(prompts: list[PromptRow]) -> Table:
    return Table(
        "prompts",
        "Prompts that persist",
        "kvvault prompts ls",
        (
            Column("prompt", "prompt"),
            Column("first_used_at", "first use", Kind.TIME),
            Column("last_used_at", "last use", Kind.TIME),
            Column("tokens", "tokens up to its last block", Kind.COUNT),
            Column("shares_with", "prompts whose blocks it shares", Kind.COUNT),
            Column("shared_by", "prompts that share its own", Kind.COUNT),
        ),
        tuple(
            (
                one.prompt_id.hex(),
                one.first_used,
                one.last_used,
                one.end_token,
                one.links,
                one.via,
            )
            for one in prompts
        ),
    )


def _acts(entries: list[EntryRow]) -> Table:
    return Table(
        "acts",
        "What the log says",
        "kvvault audit",
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
                    if name not in ("kind", "at")
                ),
            )
            for entry in entries
            for facts in [_facts(entry)]
        ),
    )


def _shown(value: object) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{len(value)} items"
    return value if isinstance(value, str) else json.dumps(value)


def _receipts(receipts: list[ReceiptRow]) -> Table:
    return Table(
        "receipts",
        "Receipts",
        "kvvault receipt",
        (
            Column("receipt", "receipt"),
            Column("phase", "phase"),
            Column("deletion", "deletion", Kind.COUNT),
            Column("entry", "entry of the log", Kind.COUNT),
        ),
        tuple((one.receipt_id.hex(), one.phase, one.deletion_no, one.entry_no) for one in receipts),
    )
