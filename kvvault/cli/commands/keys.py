"""purge, keys ls, keys rotate, keys verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvvault.cli.commands.deleting import open_to_change
from kvvault.cli.formats import (
    Cell,
    human_bytes,
    human_duration,
    iso_time,
    path_text,
    plural,
    short_ids,
)
from kvvault.cli.run import Run, command

if TYPE_CHECKING:
    from kvvault.catalog.purging import PurgeRow, Use
    from kvvault.crypto.providers.base import ProviderInfo
    from kvvault.keylooking import EpochFacts, KeysReport, TenantKeyFacts
    from kvvault.purging import PurgeReport

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "purge")(purge)
    keys = typer.Typer(name="keys", help="Look at the vault's keys, replace them, check them.")
    command(keys, "ls")(keys_ls)
    command(keys, "rotate")(keys_rotate)
    command(keys, "verify")(keys_verify)
    app.add_typer(keys)


# -- purge, keys rotate --------------------------------------------------------------------------


def purge(run: Run) -> int | None:
    """Make what was deleted unrecoverable: new keys for all that lives, the old root key destroyed.

    Engines go on meanwhile. What it is worth depends on where the keys are: "purge" when nobody can
    have the old root key any more, "logical" when an old copy of a key file would do.
    """
    with open_to_change(run) as vault:
        report = vault.purge()
        info = vault.provider_info()
    if run.output.json:
        run.output.document(_report_json(report, info))
        return None
    run.output.pairs(
        [
            ("purge", f"{report.purge_no}, in {report.seconds:.1f} s"),
            ("deletions", _ended(report)),
            ("rewrapped", f"{report.segments} segments of {report.tenants} tenants"),
            ("old key", f"{report.old_epoch}: destroyed, and refused when it was tried"),
            ("new key", report.new_epoch),
            ("assurance", f"{report.assurance}: {info.reason}"),
        ]
    )
    if report.given_up:
        run.output.warning(f"{report.given_up} tenants had a key that did not open; they are gone")
    return None


def _ended(report: PurgeReport) -> str:
    from kvvault.crypto.providers.base import Assurance

    count = str(report.deletions - report.technical)
    if report.technical:
        count += f", and {plural(report.technical, 'technical one')} (compact),"
    if report.assurance == Assurance.PURGE:
        return f"{count} unrecoverable from now on"
    return f"{count} closed to the keys of now, not to old copies of vault and keys"


def keys_rotate(run: Run) -> int | None:
    """Replace the root key and every tenant's key: the same as `kvvault purge`.

    There is no rotation that keeps the old root key: it would go on opening what was deleted.
    """
    return purge(run)


def _report_json(report: PurgeReport, info: ProviderInfo) -> dict[str, object]:
    return {
        "purge_no": report.purge_no,
        "old_epoch": report.old_epoch,
        "new_epoch": report.new_epoch,
        "assurance": report.assurance,
        "reason": info.reason,
        "deletions": report.deletions,
        "technical_deletions": report.technical,
        "tenants": report.tenants,
        "segments": report.segments,
        "tenants_given_up": report.given_up,
        "destroyed_at": iso_time(report.destroyed_at),
        "verified_at": iso_time(report.verified_at),
        "seconds": round(report.seconds, 6),
    }


# -- keys ls -------------------------------------------------------------------------------------


def keys_ls(run: Run) -> int | None:
    """Show every root key and tenant key: what each opens, its age, and when the last purge was.

    Exit code 3 when a purge is overdue: something deleted has waited for longer than the policy's
    purge_every.
    """
    with run.open_vault() as vault:
        report = vault.keys()
    code = 3 if report.overdue else None
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(run.vault_path().absolute()),
                "epochs": [_epoch_json(one, report.now) for one in report.epochs],
                "tenants": [_tenant_json(one, report.now) for one in report.tenants],
                "last_purge": _purge_json(report.last_purge),
                "unfinished_purge": _purge_json(report.unfinished),
                "deletions_waiting": report.waiting,
                "waiting_since": iso_time(report.waiting_since),
                "purge_every_s": report.interval_s,
                "overdue": report.overdue,
            }
        )
        return code
    short = short_ids([one.tenant_id for one in report.tenants])
    rows = [
        ("root", one.epoch[:16], "in force" if one.current else "old", one.created_at, one.use)
        for one in report.epochs
    ]
    rows += [
        ("tenant", short[one.tenant_id], one.name or "-", one.created_at, one.use)
        for one in report.tenants
    ]
    run.output.table(
        ["KEY OF", "ID", "NAME", "AGE", "SEGMENTS", "BLOCKS", "BYTES"],
        [
            [
                Cell(kind),
                Cell(ident),
                Cell(name),
                Cell("-" if made is None else human_duration(report.now - made), right=True),
                Cell(str(use.segments), right=True),
                Cell(str(use.blocks), right=True),
                Cell(human_bytes(use.data_bytes), right=True),
            ]
            for kind, ident, name, made, use in rows
        ],
    )
    run.output.lines("", *_state(report))
    return code


def _state(report: KeysReport) -> list[str]:
    last = report.last_purge
    lines = ["last purge: never"]
    if last is not None and last.verified_at is not None:
        ago = human_duration(report.now - last.verified_at)
        lines = [f"last purge: {ago} ago, {last.assurance}"]
    if report.unfinished is not None:
        lines.append(
            f"purge {report.unfinished.purge_no} is not finished; the next one finishes it"
        )
    if report.waiting_since is not None:
        ago = human_duration(report.now - report.waiting_since)
        late = ", OVERDUE" if report.overdue else ""
        lines.append(
            f"{report.waiting} deletions wait for a purge, the oldest for {ago} "
            f"(allowed: {human_duration(report.interval_s)}{late})"
        )
    return lines


def _use_json(use: Use) -> dict[str, object]:
    return {"segments": use.segments, "blocks": use.blocks, "bytes": use.data_bytes}


def _age_s(made: float | None, now: float) -> float | None:
    return None if made is None else round(max(0.0, now - made), 3)


def _epoch_json(one: EpochFacts, now: float) -> dict[str, object]:
    return {
        "epoch": one.epoch,
        "current": one.current,
        "created_at": iso_time(one.created_at),
        "age_s": _age_s(one.created_at, now),
        "tenants": one.tenants,
        **_use_json(one.use),
    }


def _tenant_json(one: TenantKeyFacts, now: float) -> dict[str, object]:
    return {
        "id": one.tenant_id.hex(),
        "name": one.name,
        "key_no": one.key_no,
        "epoch": one.epoch,
        "created_at": iso_time(one.created_at),
        "age_s": _age_s(one.created_at, now),
        **_use_json(one.use),
    }


def _purge_json(row: PurgeRow | None) -> dict[str, object] | None:
    if row is None:
        return None
    return {
        "purge_no": row.purge_no,
        "started_at": iso_time(row.started_at),
        "old_epoch": row.old_epoch,
        "new_epoch": row.new_epoch,
        "assurance": row.assurance,
        "destroyed_at": iso_time(row.destroyed_at),
        "verified_at": iso_time(row.verified_at),
    }


# -- keys verify ---------------------------------------------------------------------------------


def keys_verify(run: Run) -> int | None:
    """Open every key that should open, and see that none hangs on a destroyed one. Reads no blocks.

    Exit code 1 when something is wrong, 3 when the key provider did not say.
    """
    with run.open_vault() as vault:
        found = vault.check_keys()
    code = 1 if not found.sound else 3 if found.unchecked else 0
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(run.vault_path().absolute()),
                "ok": code == 0,
                "tenants": found.tenants,
                "segments": found.segments,
                "broken_tenants": found.broken_tenants,
                "broken_segments": found.broken_segments,
                "not_current": found.not_current,
                "destroyed": found.destroyed,
                "unchecked": found.unchecked,
            }
        )
        return code
    run.output.lines(
        f"{found.tenants} tenant keys, {found.segments} segment keys: "
        f"{found.broken_tenants} and {found.broken_segments} do not open, "
        f"{found.not_current} are under an old root key, {found.destroyed} under a destroyed one, "
        f"{found.unchecked} tenants not checkable"
    )
    if found.not_current:
        run.output.note("a purge was interrupted: kvvault purge finishes it")
    elif found.broken_tenants or found.broken_segments or found.destroyed:
        run.output.note("what does not open is unreadable; a purge gives up such tenants")
    elif found.unchecked:
        run.output.note("check the key provider, then run it again")
    return code
