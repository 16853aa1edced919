"""What was disposed of in a period, failures and retries included. SOC 2 CC6.5 and C1.2, HIPAA
164.310(d)(2), PCI DSS 3.2.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from kvvault.audit.receipts import TECHNICAL
from kvvault.catalog import purging
from kvvault.catalog import reporting as rows
from kvvault.catalog.jobs import RunRow
from kvvault.catalog.purging import PurgeRow
from kvvault.catalog.receipts import DeletionRow
from kvvault.catalog.reporting import IssuedRow
from kvvault.crypto.providers.base import Assurance
from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table
from kvvault.reporting.sources import Source
from kvvault.reporting.statements import backups

__all__ = ["deletions_table", "report"]

_COMMAND = "kvvault audit export"
"""Each deletion and each purge is an entry of the log."""
_DISPOSING = ("expire", "evict", "purge", "reconcile")
"""Jobs that make data go, or finish what was begun."""
_TRIGGERS = {
    "expire": "deadline passed",
    "evict": "space was needed",
    "rm": "somebody asked",
    "forget": "everything of a tenant",
    "erase": "erasure of prompts",
    "policy": "the policy does not keep it",
    TECHNICAL: "technical: ends an erasure of single blocks by destroying their segments' keys",
}


def report(source: Source) -> Report:
    """The report, for the source's period.

    Raises:
        StorageError, CatalogError, VaultKeyError.
    """
    vault = source.vault
    period = source.period

    def look(
        connection: Connection,
    ) -> tuple[list[DeletionRow], list[PurgeRow], list[IssuedRow], list[RunRow], int]:
        return (
            rows.list_deletions(connection, period),
            purging.list_purges(connection),
            rows.list_issued(connection),
            rows.list_runs(connection, period),
            rows.count_unpurged(connection, float("inf")),
        )

    deletions, purges, receipts, runs, waiting = vault.catalog.read(look)
    by_number = {purge.purge_no: purge for purge in purges}
    numbers = {one.deletion_no for one in deletions}
    mine = [one for one in receipts if one.deletion_no in numbers]
    troubled = [
        run for run in runs if run.job in _DISPOSING and run.outcome not in ("ok", "abandoned")
    ]
    info = vault.provider_info()
    by_trigger = tuple(
        Answer(
            f"deletions_{trigger}",
            f"of these, {_TRIGGERS.get(trigger, trigger)} ({trigger})",
            sum(one.trigger == trigger for one in deletions),
            _COMMAND,
            Kind.COUNT,
        )
        for trigger in sorted({one.trigger for one in deletions})
    )
    unpurged = sum(one.purge_no is None for one in deletions)
    technical = sum(one.trigger == TECHNICAL for one in deletions)
    final = sum(
        one.purge_no in by_number and by_number[one.purge_no].assurance == Assurance.PURGE
        for one in deletions
    )
    answers = (
        Answer("deletions", "deletions, technical ones included", len(deletions), _COMMAND,
               Kind.COUNT),
        Answer("deletions_proper", "of these, asked for or by policy", len(deletions) - technical,
               _COMMAND, Kind.COUNT),
        *by_trigger,
        Answer("segments", "segments whose keys were destroyed",
               sum(one.segments for one in deletions), _COMMAND, Kind.COUNT),
        Answer("blocks", "blocks deleted; what else these segments had is in others",
               sum(one.blocks for one in deletions), _COMMAND, Kind.COUNT),
        Answer("bytes", "bytes deleted",
               sum(one.data_bytes for one in deletions), _COMMAND, Kind.BYTES),
        Answer("purged", "of these deletions, covered by a purge", len(deletions) - unpurged,
               _COMMAND, Kind.COUNT),
        Answer("unrecoverable", "of these, beyond recovery (assurance of the purge: purge)", final,
               _COMMAND, Kind.COUNT),
        Answer("logical", "of these, closed to the vault's keys of now, but not to whoever has old "
               "copies of vault and root key (assurance: logical)",
               len(deletions) - unpurged - final, _COMMAND, Kind.COUNT),
        Answer("waiting", "of these deletions, waiting for the next purge", unpurged,
               "kvvault keys ls", Kind.COUNT),
        Answer("waiting_in_all", "deletions of any time that wait for a purge", waiting,
               "kvvault keys ls", Kind.COUNT),
        Answer("assurance", "what a purge is worth with the key provider of today",
               f"{info.assurance.value}: {info.reason}", "kvvault status --json"),
        Answer("receipts", "receipts of these deletions", len(mine), "kvvault receipt ls",
               Kind.COUNT),
        Answer("summaries", "receipts that sum up what went by itself, one a purge and kind, "
               "of any time", sum(one.deletion_no is None for one in receipts),
               "kvvault receipt ls", Kind.COUNT),
        Answer("failed_runs", "runs of disposing jobs that failed or were refused",
               len(troubled), "", Kind.COUNT),
        Answer("unretried", "of these jobs, those whose last run failed",
               len(_unretried(runs)), "", Kind.COUNT, not _unretried(runs)),
    )  # fmt: skip
    return source.report(
        ReportKind.DISPOSALS,
        "Disposals: what was deleted, when, and how finally",
        ("SOC 2 CC6.5, C1.2", "HIPAA 164.310(d)(2)", "PCI DSS 3.2.1", "NIST SP 800-88r2"),
        answers,
        (
            deletions_table(deletions, by_number, mine),
            purges_table([one for one in purges if period.has(one.started_at)]),
            _failures(troubled, runs),
        ),
        {
            "How disposal works": (
                "First the wrapped keys leave the catalog: revoked, and no process serves the "
                "blocks any more. Files are emptied and unlinked. The next purge destroys the root "
                "key that everything hung on and tries that it is refused: from then on remnants "
                "on the medium are ciphertext whose key is gone, as far as the assurance says "
                "(cryptographic erase). Single blocks go first; then what else is in their "
                "segments is written to others under new keys, and the old keys are destroyed "
                "(compact). No purge calls their deletion final before."
            ),
            "Copies": backups(info),
        },
    )


def deletions_table(
    deletions: Sequence[DeletionRow],
    purges: Mapping[int, PurgeRow],
    receipts: Sequence[IssuedRow],
) -> Table:
    """Every deletion with its times, and the receipts there are."""
    by_deletion: dict[int, list[str]] = {}
    for receipt in receipts:
        if receipt.deletion_no is not None:
            text = f"{receipt.phase} {receipt.receipt_id.hex()}"
            by_deletion.setdefault(receipt.deletion_no, []).append(text)
    found = []
    for one in deletions:
        purge = purges.get(one.purge_no or -1)
        found.append(
            (
                one.deletion_no,
                one.trigger,
                one.actor,
                one.reason,
                one.segments,
                one.blocks,
                one.data_bytes,
                one.revoked_at,
                "purged" if purge else "revoked",
                one.purge_no,
                purge.destroyed_at if purge else None,
                purge.verified_at if purge else None,
                purge.assurance if purge else None,
                "; ".join(by_deletion.get(one.deletion_no, [])) or None,
            )
        )
    return Table(
        "deletions",
        "Deletions",
        _COMMAND,
        (
            Column("number", "number", Kind.COUNT),
            Column("trigger", "trigger"),
            Column("actor", "by"),
            Column("reason", "reason"),
            Column("segments", "segments", Kind.COUNT),
            Column("blocks", "blocks", Kind.COUNT),
            Column("bytes", "bytes", Kind.BYTES),
            Column("revoked_at", "revoked", Kind.TIME),
            Column("state", "state"),
            Column("purge_no", "purge", Kind.COUNT),
            Column("destroyed_at", "root key destroyed", Kind.TIME),
            Column("verified_at", "refusal verified", Kind.TIME),
            Column("assurance", "assurance"),
            Column("receipts", "receipts"),
        ),
        tuple(found),
    )


def purges_table(purges: Sequence[PurgeRow]) -> Table:
    """Purges, which are rotations of the root key and its destruction."""
    return Table(
        "purges",
        "Purges: root keys replaced and destroyed",
        _COMMAND,
        (
            Column("number", "number", Kind.COUNT),
            Column("started_at", "begun", Kind.TIME),
            Column("old_epoch", "old root key"),
            Column("new_epoch", "new root key"),
            Column("destroyed_at", "old one destroyed", Kind.TIME),
            Column("verified_at", "refusal verified", Kind.TIME),
            Column("assurance", "assurance"),
            Column("state", "state"),
        ),
        tuple(
            (
                one.purge_no,
                one.started_at,
                one.old_epoch,
                one.new_epoch,
                one.destroyed_at,
                one.verified_at,
                one.assurance,
                "finished" if one.verified_at is not None else "to be finished by the next",
            )
            for one in purges
        ),
    )


def _unretried(runs: Sequence[RunRow]) -> list[str]:
    """Disposing jobs whose newest run in the period failed."""
    newest = {run.job: run for run in runs if run.job in _DISPOSING}
    return [job for job, run in newest.items() if run.outcome in ("failed", "refused")]


def _failures(troubled: Sequence[RunRow], runs: Sequence[RunRow]) -> Table:
    found = []
    for run in troubled:
        retry = next(
            (
                later
                for later in runs
                if later.job == run.job and later.run_no > run.run_no and later.outcome == "ok"
            ),
            None,
        )
        found.append(
            (
                run.job,
                run.started_at,
                run.outcome,
                run.detail,
                retry.started_at if retry else None,
            )
        )
    return Table(
        "failures",
        "Runs of disposing jobs that did not succeed, and what became of them",
        "",
        (
            Column("job", "job"),
            Column("started_at", "begun", Kind.TIME),
            Column("outcome", "outcome"),
            Column("detail", "what it said"),
            Column("succeeded_at", "succeeded at the retry of", Kind.TIME),
        ),
        tuple(found),
        "The history keeps the newest 1000 runs of each job. A retry counts within the period.",
    )
