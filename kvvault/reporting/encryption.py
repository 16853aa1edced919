"""What is encrypted, how, under which keys, and how old these are. GDPR 32, HIPAA 164.312, PCI DSS
3.7, ISO 27040, NIST SP 800-88."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import Connection

from kvvault.catalog import purging
from kvvault.catalog import reporting as rows
from kvvault.catalog.jobs import RunRow
from kvvault.catalog.purging import PurgeRow
from kvvault.crypto import aead
from kvvault.crypto.providers.base import Assurance, ProviderInfo
from kvvault.errors import KvvaultError
from kvvault.keylooking import KeysReport
from kvvault.reporting.disposals import purges_table
from kvvault.reporting.document import Answer, Column, Kind, Report, ReportKind, Table
from kvvault.reporting.sources import Source
from kvvault.reporting.statements import ENGINE, NEVER_PLAINTEXT, STRENGTH, backups

__all__ = ["report"]

_DAMAGE: Final = "damage-found"
_EVENTS: Final = {
    "signing-key-made": "the key that signs receipts and checkpoints was made",
    "tenant-key-made": "a tenant's keys were made",
    "purge-begun": "new root and tenant keys were put in force",
    "root-key-destroyed": "an old root key was destroyed",
    "purge-verified": "using a destroyed root key was tried, and refused",
    _DAMAGE: "blocks were altered or missing",
}
"""Kinds of entries of the log that are about keys, or tell that something is wrong."""


def report(source: Source, *, tenant: str | None = None) -> Report:
    """The report. Asks the key provider for every tenant's key.

    :param tenant: whose keys to list; None: everybody's.

    Raises:
        StorageError, CatalogError, VaultKeyError.
    """
    vault = source.vault
    period = source.period
    keys = vault.keys()
    checked = vault.check_keys()
    info = vault.provider_info()

    def look(
        connection: Connection,
    ) -> tuple[list[PurgeRow], list[RunRow], dict[str, tuple[int, float]]]:
        return (
            purging.list_purges(connection),
            rows.list_runs(connection, period),
            rows.events(connection, list(_EVENTS), period),
        )

    purges, runs, events = vault.catalog.read(look)
    damage = events.get(_DAMAGE, (0, 0.0))[0]
    within = [one for one in purges if period.has(one.started_at)]
    scrubs = [run for run in runs if run.job == "scrub"]
    last = keys.last_purge
    current = next((one for one in keys.epochs if one.current), None)
    made = None if current is None else current.created_at
    oldest = min((one.created_at for one in keys.tenants), default=None)
    answers = (
        Answer("algorithm", "algorithm of all blocks, wrapped keys and texts",
               f"AES-256-GCM, {aead.NONCE_BYTES * 8}-bit random nonces, {aead.TAG_BYTES * 8}-bit "
               "tags", ""),
        Answer("key_bits", "bits of each key", aead.KEY_BYTES * 8, "",
               Kind.COUNT),
        Answer("signatures", "signatures of receipts and checkpoints", "Ed25519", ""),
        Answer("keyed_ids", "ids on the disk",
               f"HMAC-SHA-256, {aead.ID_BYTES * 8} bits, under a key of each tenant", ""),
        Answer("live_bytes", "bytes that live, all of them encrypted",
               sum(one.use.data_bytes for one in keys.tenants), "kvvault df", Kind.BYTES),
        Answer("keys_open", "every key opens that should, and none hangs on a destroyed one",
               checked.sound, "kvvault keys verify", Kind.FLAG, checked.sound),
        Answer("keys_unchecked", "tenants of which the key provider said nothing",
               checked.unchecked, "kvvault keys verify", Kind.COUNT, checked.unchecked == 0),
        Answer("provider", "key provider", info.uri, "kvvault status"),
        Answer("assurance", "what the destruction of a root key is worth there",
               info.assurance.value, "kvvault status"),
        Answer("assurance_reason", "because", info.reason, "kvvault status --json"),
        Answer("keys_apart", "keys are on another file system than the vault, or in no file",
               vault.key_warning() is None, "kvvault doctor", Kind.FLAG,
               vault.key_warning() is None, must=False),
        Answer("root_age", "crypto-period of the root key so far",
               None if made is None else source.now - made, "kvvault keys ls", Kind.SPAN),
        Answer("tenant_key_age", "oldest tenant key",
               None if oldest is None else source.now - oldest, "kvvault keys ls", Kind.SPAN),
        Answer("rotate_every", "keys are replaced within, if anything was deleted",
               keys.interval_s, "kvvault policy show", Kind.SPAN),
        Answer("rotations", "rotations of all root and tenant keys in the period", len(within),
               "kvvault audit export", Kind.COUNT),
        Answer("destructions", "of these, old root keys destroyed",
               sum(one.destroyed_at is not None for one in within), "kvvault audit export",
               Kind.COUNT),
        Answer("last_purge_verified_at", "an old root key was last tried, and refused",
               None if last is None else last.verified_at, "kvvault keys ls", Kind.TIME),
        Answer("purge_overdue", "a purge is overdue", keys.overdue, "kvvault keys ls", Kind.FLAG,
               not keys.overdue),
        *_scrub_answers(scrubs),
        Answer("damage_found", "times that something was found altered or missing in the period",
               damage, "kvvault audit export", Kind.COUNT, damage == 0),
    )  # fmt: skip
    return source.report(
        ReportKind.ENCRYPTION,
        "Encryption: algorithms, keys, and how they end",
        (
            "GDPR Art. 32",
            "HIPAA 164.310(d)(2), 164.312",
            "PCI DSS 3.7",
            "ISO/IEC 27040",
            "NIST SP 800-88r2",
        ),
        answers,
        (
            _roots(source, keys),
            _tenants(source, keys, tenant),
            purges_table(within),
            _copies(source, keys, info),
            _scrubs(scrubs),
            _key_events(events),
            _media(source),
        ),
        {
            "Strength": STRENGTH,
            "Never in clear": NEVER_PLAINTEXT,
            "What this does not cover": ENGINE,
            "Copies": backups(info),
        },
    )


def _scrub_answers(scrubs: Sequence[RunRow]) -> tuple[Answer, ...]:
    last = scrubs[-1] if scrubs else None
    failed = sum(run.outcome == "failed" for run in scrubs)
    return (
        Answer("scrubs", "sampled verifications (scrubs) in the period", len(scrubs), "",
               Kind.COUNT),
        Answer("scrubs_failed", "of these, found damage or could not read", failed, "",
               Kind.COUNT, failed == 0),
        Answer("last_scrub_at", "last one", None if last is None else last.started_at,
               "kvvault jobs ls", Kind.TIME),
        Answer("last_scrub", "what it found", None if last is None else last.detail,
               "kvvault jobs ls --json"),
    )  # fmt: skip


def _roots(source: Source, keys: KeysReport) -> Table:
    return Table(
        "roots",
        "Root keys and what each opens",
        "kvvault keys ls",
        (
            Column("epoch", "root key"),
            Column("in_force", "in force", Kind.FLAG),
            Column("created_at", "made", Kind.TIME),
            Column("age_s", "age", Kind.SPAN),
            Column("tenants", "tenants", Kind.COUNT),
            Column("segments", "segments", Kind.COUNT),
            Column("blocks", "blocks", Kind.COUNT),
            Column("bytes", "live bytes", Kind.BYTES),
        ),
        tuple(
            (
                one.epoch,
                one.current,
                one.created_at,
                None if one.created_at is None else source.now - one.created_at,
                one.tenants,
                one.use.segments,
                one.use.blocks,
                one.use.data_bytes,
            )
            for one in keys.epochs
        ),
    )


def _tenants(source: Source, keys: KeysReport, tenant: str | None) -> Table:
    return Table(
        "tenant_keys",
        "Tenant keys and what each opens",
        "kvvault keys ls",
        (
            Column("tenant", "tenant"),
            Column("number", "key number", Kind.COUNT),
            Column("epoch", "under root key"),
            Column("created_at", "made", Kind.TIME),
            Column("age_s", "age", Kind.SPAN),
            Column("segments", "segments, each with a key", Kind.COUNT),
            Column("blocks", "blocks", Kind.COUNT),
            Column("bytes", "live bytes", Kind.BYTES),
        ),
        tuple(
            (
                one.name or f"(its key does not open) {one.tenant_id.hex()}",
                one.key_no,
                one.epoch,
                one.created_at,
                source.now - one.created_at,
                one.use.segments,
                one.use.blocks,
                one.use.data_bytes,
            )
            for one in keys.tenants
            if tenant is None or one.name == tenant
        ),
    )


def _copies(source: Source, keys: KeysReport, info: ProviderInfo) -> Table:
    """Where keys are, each of them."""
    where = info.uri if info.location is None else str(info.location)
    known = {one.epoch: one for one in keys.epochs}
    found: list[tuple[str, str, str, str]] = []
    try:
        epochs = source.vault.root_epochs()
    except KvvaultError:
        epochs = list(known)
    for epoch in epochs:
        if epoch not in known:
            use = "not of this vault's rows: another vault's, or left by a purge that failed"
        elif known[epoch].current:
            use = "in force: wraps the lookup key and tenant keys"
        else:
            use = "old: a purge has to be finished"
        found.append((f"root key {epoch}", where, "as the provider keeps it", use))
    found += [
        ("tenant keys, index keys", "the catalog", "wrapped under the root key", "AES-256-GCM"),
        ("segment secrets", "the catalog", "wrapped under a tenant key", "AES-256-GCM"),
        (
            "all of these",
            "memory of each process that has the vault open",
            "in clear, overwritten when dropped",
            "never in a file",
        ),
    ]
    logical = info.assurance is Assurance.LOGICAL
    return Table(
        "key_copies",
        "Register of key copies",
        "",
        (
            Column("key", "key"),
            Column("where", "where"),
            Column("how", "how"),
            Column("use", "use"),
        ),
        tuple(found),
        "Copies that somebody made of a key file or of the catalog are not known to kvvault"
        + (", and with this provider they matter: keep a register of them." if logical else "."),
    )


def _scrubs(scrubs: Sequence[RunRow]) -> Table:
    return Table(
        "scrubs",
        "Sampled verifications",
        "",
        (
            Column("started_at", "begun", Kind.TIME),
            Column("outcome", "outcome"),
            Column("detail", "what it found"),
        ),
        tuple((run.started_at, run.outcome, run.detail) for run in scrubs[-50:]),
        "Each authenticates a part of the segments, all of them within a week. The newest 50.",
    )


def _key_events(events: Mapping[str, tuple[int, float]]) -> Table:
    return Table(
        "events",
        "Events of keys and damage in the audit log",
        "kvvault audit export",
        (
            Column("event", "event"),
            Column("what", "what"),
            Column("count", "in the period", Kind.COUNT),
            Column("last_at", "last", Kind.TIME),
        ),
        tuple((kind, what, *events.get(kind, (0, None))) for kind, what in _EVENTS.items()),
    )


def _media(source: Source) -> Table:
    vault = source.vault
    live = [facts for facts in vault.segments() if facts.state.live]
    device = vault.path.stat().st_dev
    return Table(
        "media",
        "Media",
        "",
        (
            Column("what", "what"),
            Column("path", "path"),
            Column("device", "device (major:minor)"),
            Column("segments", "live segments", Kind.COUNT),
            Column("bytes", "live bytes", Kind.BYTES),
        ),
        (
            (
                "the vault",
                str(vault.path.absolute()),
                f"{os.major(device)}:{os.minor(device)}",
                len(live),
                sum(facts.data_bytes for facts in live),
            ),
        ),
    )
