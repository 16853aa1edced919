"""init, status, df, verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kvvault.cli.commands.deleting import actor_name
from kvvault.cli.formats import Cell, human_bytes, iso_time, path_text
from kvvault.cli.inventory import Inventory
from kvvault.cli.run import Run, command
from kvvault.model import SegmentFacts, SegmentState, SystemClock

if TYPE_CHECKING:
    from kvvault.crypto.providers.base import ProviderInfo
    from kvvault.governing import AppliedPolicy
    from kvvault.health import Health

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "init", shows_warnings=True)(init)
    command(app, "status", shows_warnings=True)(status)
    command(app, "df")(df)
    command(app, "verify")(verify)


def _provider(info: ProviderInfo) -> dict[str, object]:
    return {
        "uri": info.uri,
        "assurance": info.assurance.value,
        "reason": info.reason,
        "location": None if info.location is None else path_text(info.location),
    }


# -- init ----------------------------------------------------------------------------------------


def init(
    run: Run,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="FILE",
            help="A policy file, or the name of a policy that comes with kvvault. If not given: "
            "the one named default.",
        ),
    ] = None,
) -> int | None:
    """Make a vault in a new or empty directory, and a key for it.

    The key goes to a new file below your data directory unless --key-provider names another place.
    """
    from kvvault import layout
    from kvvault.policy import shipped
    from kvvault.vault import Vault

    path = run.vault_path()
    governing = None if policy is None else shipped.find(policy)  # before anything is made
    with Vault.create(
        path, provider=run.settings.key_provider, policy=governing, actor=actor_name(None)
    ) as vault:
        info = vault.provider_info()
        applied = vault.policy()
    descriptor = layout.read_descriptor(path)
    warnings = list(run.warnings)
    if info.location is None and info.uri.startswith("ephemeral:"):
        warnings.append(
            "the keys were in the memory of this command and are gone with it: the vault begins "
            "with new ones whenever it is opened"
        )
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(path.absolute()),
                "vault_id": descriptor.vault_id.hex(),
                "key_provider": _provider(info),
                "policy": {"name": applied.name, "digest": applied.digest.hex()},
                "warnings": warnings,
            }
        )
        return None
    run.output.pairs(
        [
            ("vault", path_text(path.absolute())),
            ("policy", applied.name),
            ("key", info.uri),
            ("assurance", f"{info.assurance.value}: {info.reason}"),
        ]
    )
    for text in warnings:
        run.output.warning(text)
    return None


# -- status --------------------------------------------------------------------------------------


def status(run: Run) -> int | None:
    """Show in a few lines what is on the disk, and whether all is well.

    Exit code 3 when it is not: a job is overdue or its last run failed, something is past its
    deadline, or the clock is suspect.
    """
    from kvvault import layout
    from kvvault.doctor.pending import pending_repair
    from kvvault.health import health_of

    path = run.vault_path()
    descriptor = layout.read_descriptor(path)
    with run.open_vault() as vault:
        inventory = Inventory.of(vault)
        info = vault.provider_info()
        pending = pending_repair(path, vault.segments, SystemClock().now())
        health = health_of(vault, SystemClock())
    live = [facts for facts in inventory.segments if facts.state.live]
    states = Counter(facts.state for facts in inventory.segments)
    times = [facts.created_at for facts in live]
    oldest, newest = iso_time(min(times, default=None)), iso_time(max(times, default=None))
    blocks, size = sum(f.blocks for f in live), sum(f.data_bytes for f in live)
    warnings = list(run.warnings)
    if pending.needed:
        warnings.append(
            f"not closed cleanly, to repair: {pending.summary()} (done when an engine opens it)"
        )
    warnings += health.problems
    code = 3 if health.problems else None
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(path.absolute()),
                "vault_id": descriptor.vault_id.hex(),
                "tenants": len(inventory.tenants),
                "namespaces": len(inventory.namespaces),
                "segments": len(live),
                "segment_states": {state.value: states[state] for state in SegmentState},
                "blocks": blocks,
                "bytes": size,
                "oldest_segment_at": oldest,
                "newest_segment_at": newest,
                "key_provider": _provider(info),
                "recovery_needed": pending.needed,
                "recovery": {
                    "abandoned_segments": pending.abandoned_segments,
                    "unknown_files": pending.unknown_files,
                    "unknown_bytes": pending.unknown_bytes,
                    "missing_segments": pending.missing_segments,
                    "excess_bytes": pending.excess_bytes,
                    "unfinished_deletions": pending.unfinished_deletions,
                },
                **_health(health),
                "warnings": warnings,
            }
        )
        return code
    of_live, gone = (
        ", ".join(f"{states[s]} {s.value}" for s in SegmentState if states[s] and s.live is lives)
        for lives in (True, False)
    )
    counts = f"{len(live)} live ({of_live or 'none yet'}){gone and f'; {gone}'}"
    run.output.pairs(
        [
            ("vault", path_text(path.absolute())),
            ("tenants", str(len(inventory.tenants))),
            ("namespaces", str(len(inventory.namespaces))),
            ("segments", counts),
            ("blocks", str(blocks)),
            ("bytes", f"{size} ({human_bytes(size)})"),
            ("oldest", oldest or "-"),
            ("newest", newest or "-"),
            ("key", f"{info.uri} (destroying it is {info.assurance.value})"),
            ("recovery", "needed" if pending.needed else "not needed"),
            *_health_words(health),
        ]
    )
    for text in warnings:
        run.output.warning(text)
    return code


def _health(health: Health) -> dict[str, object]:
    policy, space, deadlines = health.policy, health.space, health.deadlines
    return {
        "policy": {
            "number": policy.number,
            "name": policy.policy.name,
            "digest": policy.policy.digest.hex(),
            "applied_at": iso_time(policy.applied_at),
            "applied_by": policy.actor,
        },
        "space": {
            "used_bytes": space.used_bytes,
            "pending_bytes": space.usage.pending,
            "cap_bytes": space.limits.cap_bytes,
            "free_bytes": space.around.free_bytes,
            "free_floor_bytes": space.limits.free_floor_bytes,
        },
        "next_deadline_at": iso_time(deadlines.following),
        "overdue_segments": deadlines.overdue,
        "jobs": {
            "healthy": all(status.healthy for status in health.jobs),
            "overdue": [status.name for status in health.jobs if status.overdue],
            "failing": [status.name for status in health.jobs if status.failing],
            "not_yet": [status.name for status in health.jobs if status.not_yet],
        },
        "clock_suspect": health.clock_suspect,
        "holds": health.holds.holds,
        "damaged_holds": health.holds.damaged,
        "healthy": not health.problems,
    }


def _health_words(health: Health) -> list[tuple[str, str]]:
    policy, space, deadlines = health.policy, health.space, health.deadlines
    cap = "no cap" if space.limits.cap_bytes is None else f"cap {_size(space.limits.cap_bytes)}"
    free = f"{_size(space.around.free_bytes)} free, floor {_size(space.limits.free_floor_bytes)}"
    sick = [status.name for status in health.jobs if not status.healthy]
    pending = space.usage.pending
    aside = f", of it {_size(pending)} set aside for open segments" if pending else ""
    damaged = f", {health.holds.damaged} DAMAGED" if health.holds.damaged else ""
    return [
        ("policy", f"{policy.number}: {_name(policy)}"),
        ("space", f"{_size(space.used_bytes)} used{aside}, {cap}; {free}"),
        ("deadline", f"next {iso_time(deadlines.following) or '-'}, overdue {deadlines.overdue}"),
        ("jobs", f"NOT WELL: {', '.join(sick)}" if sick else health.jobs_well("well")),
        ("clock", "SUSPECT" if health.clock_suspect else "not suspect"),
        ("holds", f"{health.holds.holds} in force{damaged}"),
    ]


def _name(applied: AppliedPolicy) -> str:
    policy = applied.policy
    when = iso_time(applied.applied_at) or "-"
    return f"{policy.name} {policy.digest.hex()[:12]}, applied {when} by {applied.actor}"


def _size(count: int) -> str:
    return f"{count} ({human_bytes(count)})" if count >= 1024 else human_bytes(count)


# -- df ------------------------------------------------------------------------------------------


def df(run: Run) -> int | None:
    """Show where the bytes are: by tenant, namespace and state, and what room is left."""
    from kvvault.doctor.disk import disk_usage

    path = run.vault_path()
    with run.open_vault() as vault:
        inventory = Inventory.of(vault)
    live = [facts for facts in inventory.segments if facts.state.live]
    disk = disk_usage(path)
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(path.absolute()),
                "tenants": [
                    {
                        "id": t.tenant_id.hex(),
                        "name": t.name,
                        "segments": t.segments,
                        "blocks": t.blocks,
                        "bytes": t.data_bytes,
                    }
                    for t in inventory.tenants
                ],
                "namespaces": [
                    {
                        "id": n.namespace.digest.hex(),
                        "model": n.namespace.fact("model"),
                        "segments": n.segments,
                        "blocks": n.blocks,
                        "bytes": n.data_bytes,
                    }
                    for n in inventory.namespaces
                ],
                "states": [
                    {"state": state.value, **_sum(_in_state(inventory.segments, state))}
                    for state in SegmentState
                ],
                "total": _sum(live),
                "catalog_bytes": disk.catalog_bytes,
                "segment_file_bytes": disk.segment_file_bytes,
                "file_system": {
                    "total_bytes": disk.total_bytes,
                    "available_bytes": disk.available_bytes,
                },
            }
        )
        return None
    short = inventory.short
    rows = [
        ("tenant", short[t.tenant_id], t.name or "-", t.segments, t.blocks, t.data_bytes)
        for t in inventory.tenants
    ]
    rows += [
        (
            "namespace",
            short[n.namespace.digest],
            n.namespace.fact("model") or "-",
            n.segments,
            n.blocks,
            n.data_bytes,
        )
        for n in inventory.namespaces
    ]
    for state in SegmentState:
        total = _sum(_in_state(inventory.segments, state))
        if total["segments"]:
            rows.append(
                ("state", "", state.value, total["segments"], total["blocks"], total["bytes"])
            )
    total = _sum(live)
    rows.append(("live in all", "", "", total["segments"], total["blocks"], total["bytes"]))
    run.output.table(
        ["BY", "ID", "NAME", "SEGMENTS", "BLOCKS", "BYTES"],
        [
            [
                Cell(by),
                Cell(ident),
                Cell(name),
                Cell(str(segments), right=True),
                Cell(str(blocks), right=True),
                Cell(human_bytes(size), right=True),
            ]
            for by, ident, name, segments, blocks, size in rows
        ],
    )
    run.output.lines(
        "",
        f"segment files {human_bytes(disk.segment_file_bytes)}, "
        f"catalog {human_bytes(disk.catalog_bytes)}, "
        f"free {human_bytes(disk.available_bytes)} of {human_bytes(disk.total_bytes)}",
    )
    return None


def _in_state(segments: Iterable[SegmentFacts], state: SegmentState) -> list[SegmentFacts]:
    return [facts for facts in segments if facts.state is state]


def _sum(segments: list[SegmentFacts]) -> dict[str, int]:
    return {
        "segments": len(segments),
        "blocks": sum(facts.blocks for facts in segments),
        "bytes": sum(facts.data_bytes for facts in segments),
    }


# -- verify --------------------------------------------------------------------------------------


def verify(run: Run) -> int | None:
    """Read and authenticate every block. Repairs nothing, and may run beside engines.

    Exit code 0 when every block is authentic, 1 when some were altered or lost, 3 when some could
    not be checked.
    """
    with run.open_vault() as vault:
        with run.output.progress("verifying") as bar:
            report = vault.verify(bar.update)
        short = Inventory.of(vault).short
    broken = report.tampered + report.lost
    code = 1 if broken else 3 if report.unreadable else 0
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(run.vault_path().absolute()),
                "ok": report.ok,
                "segments": report.segments,
                "blocks": report.blocks,
                "bytes": report.data_bytes,
                "tampered": report.tampered,
                "lost": report.lost,
                "unreadable": report.unreadable,
                "damaged_segments": [ident.hex() for ident in report.damaged_segments],
            }
        )
        return code
    run.output.lines(
        f"{report.blocks} blocks in {report.segments} segments ({human_bytes(report.data_bytes)}): "
        f"{report.tampered} altered, {report.lost} lost, {report.unreadable} not checkable",
        *(f"damaged segment {short.get(i, i.hex())}" for i in report.damaged_segments),
    )
    if broken:
        run.output.note("these blocks are misses; engines recompute them (see: kvvault show ID)")
    elif report.unreadable:
        run.output.note("check the key provider and the disk, then run it again")
    return code
