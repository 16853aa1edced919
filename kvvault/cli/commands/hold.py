"""hold set, clear, ls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvvault.cli.commands.deleting import (
    ACTOR,
    DRY_RUN,
    REASON,
    YES,
    actor_name,
    counted,
    open_to_change,
    open_to_plan,
)
from kvvault.cli.commands.finding import SUBJECT_FILE, refusals_noted, subject_of
from kvvault.cli.formats import Cell, human_bytes, iso_time, plural
from kvvault.cli.inventory import Inventory
from kvvault.cli.run import Run, command
from kvvault.errors import UsageError
from kvvault.model import SegmentFacts

if TYPE_CHECKING:
    from kvvault.holding import Hold

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        name="hold", help="Keep data from expiry, eviction and erasure (legal holds)."
    )
    command(group, "set")(hold_set)
    command(group, "clear")(hold_clear)
    command(group, "ls")(hold_ls)
    app.add_typer(group)


def hold_set(
    run: Run,
    reason: REASON,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="All that this tenant has and will have."),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(
            "--subject",
            metavar="NAME",
            help="All prompts of a subject of the tenant's, now or later.",
        ),
    ] = None,
    subject_file: SUBJECT_FILE = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="ID", help="One prompt; its first digits do."),
    ] = None,
    segment: Annotated[
        str | None,
        typer.Option("--segment", metavar="ID", help="One segment; its first digits do."),
    ] = None,
    actor: ACTOR = None,
) -> int | None:
    """Place a hold on a tenant, a subject, a prompt or a segment. It is in force when the command
    returns.

    A hold on a subject or prompt keeps every segment with blocks of it. What is past its deadline
    is not served, held or not.
    """
    from kvvault.holding import check_text

    who = actor_name(actor)
    check_text("reason", reason)  # before anything is looked for: a refusal must not tell
    subject = subject_of(subject, subject_file)
    alone = subject is not None and tenant is None
    if sum(one is not None for one in (tenant, prompt, segment)) != 1 or alone:
        raise UsageError(
            "a hold is on a tenant, a subject of a tenant, a prompt or a segment",
            hint="give one of --tenant, --prompt and --segment; with --tenant perhaps --subject",
        )
    # Found while looking only: opening the vault to change it destroys what is past its deadline.
    target = None if segment is None else _segment_id(run, segment)
    prompt_id = None if prompt is None else _prompt_id(run, prompt)
    with open_to_change(run) as vault:
        hold = vault.place_hold(
            tenant=tenant,
            subject=subject,
            prompt_id=prompt_id,
            segment_id=target,
            reason=reason,
            actor=who,
        )
    if run.output.json:
        run.output.document({"hold": _json(hold)})
    else:
        run.output.lines(f"hold {hold.number} is in force, {_kept(hold)}")
    return None


def _prompt_id(run: Run, prefix: str) -> bytes:
    """Asks whether a prompt persists, which is an entry of its own: the hold may yet fail."""
    with open_to_plan(run) as vault:
        with refusals_noted(vault, "hold set"):
            facts = vault.prompts.show(prefix).facts
        vault.note_question("hold set", tenant_id=facts.tenant_id, rows=1)
        return facts.prompt_id


def _segment_id(run: Run, ident: str) -> bytes:
    with open_to_plan(run) as vault:
        thing, facts = Inventory.of(vault).find(ident)
    if not isinstance(facts, SegmentFacts):
        raise UsageError(
            f"{ident.lower()} is a {thing.one}, not a segment",
            hint="segments: kvvault ls segments; a tenant is held by its name: --tenant NAME",
        )
    return facts.segment_id


def hold_clear(
    run: Run,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", help="Number of a hold, see: kvvault hold ls.")
    ],
    reason: REASON,
    actor: ACTOR = None,
    dry_run: DRY_RUN = False,
    yes: YES = False,
) -> int | None:
    """End a hold. What is past its deadline, and kept by no other hold, is destroyed at once."""
    who = actor_name(actor)
    with open_to_plan(run) as vault:
        holds = vault.holds()
        hold = _in_force(holds, number)
        others = frozenset().union(*(one.segment_ids for one in holds if one.number != number))
        due = [
            facts
            for facts in vault.plan_expired().held
            if facts.segment_id in hold.segment_ids - others
        ]
    size = sum(facts.live_bytes for facts in due)
    if dry_run:
        _cleared(run, hold, len(due), size, dry_run=True)
        return None
    run.output.confirm(
        f"Clear hold {number}? Past the deadline, and destroyed at once: {counted(due)}.", yes=yes
    )
    with open_to_change(run) as vault:
        report = vault.clear_hold(number, reason=reason, actor=who)
        [hold] = [one for one in vault.holds(cleared=True) if one.number == number]
    _cleared(run, hold, report.segments, report.data_bytes, dry_run=False)
    return None


def _in_force(holds: list[Hold], number: int) -> Hold:
    for hold in holds:
        if hold.number == number:
            return hold
    raise UsageError(
        "no hold of that number is in force", hint="see: kvvault hold ls, with --all for cleared"
    )


def _cleared(run: Run, hold: Hold, segments: int, size: int, *, dry_run: bool) -> None:
    if run.output.json:
        run.output.document(
            {
                "dry_run": dry_run,
                "hold": _json(hold),
                "expired_segments": segments,
                "expired_bytes": size,
            }
        )
        return
    what = f"would clear hold {hold.number}" if dry_run else f"hold {hold.number} is cleared"
    run.output.lines(f"{what}; segments past their deadline: {segments} ({human_bytes(size)})")


def hold_ls(
    run: Run,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also holds that were cleared.")
    ] = False,
) -> int | None:
    """List holds: on what, why, by whom, and how much each keeps."""
    with run.open_vault() as vault:
        holds = vault.holds(cleared=everything)
    if run.output.json:
        run.output.document({"holds": [_json(hold) for hold in holds]})
        return None
    header = ["HOLD", "ON", "TARGET", "TENANT", "SEGMENTS", "BYTES", "PLACED", "BY", "REASON"]
    rows = [_row(hold) for hold in holds]
    if everything:
        header += ["CLEARED", "BY", "REASON"]
        for row, hold in zip(rows, holds, strict=True):
            row += [
                Cell(_moment(hold.cleared_at)),
                Cell(hold.cleared_by or "-"),
                Cell(hold.cleared_reason or "-"),
            ]
    run.output.table(header, rows)
    return None


def _row(hold: Hold) -> list[Cell]:
    return [
        Cell(str(hold.number), right=True),
        Cell(hold.on),
        Cell(hold.target.hex() or "-"),
        Cell(hold.tenant or "-"),
        Cell(str(hold.segments), right=True),
        Cell(human_bytes(hold.data_bytes), right=True),
        Cell(_moment(hold.placed_at)),
        Cell(hold.actor),
        Cell(hold.reason),
    ]


def _json(hold: Hold) -> dict[str, object]:
    return {
        "number": hold.number,
        "kind": hold.on,
        "target": hold.target.hex(),
        "tenant": hold.tenant,
        "reason": hold.reason,
        "actor": hold.actor,
        "placed_at": iso_time(hold.placed_at),
        "cleared_at": iso_time(hold.cleared_at),
        "cleared_by": hold.cleared_by,
        "cleared_reason": hold.cleared_reason,
        "segments": hold.segments,
        "blocks": hold.blocks,
        "bytes": hold.data_bytes,
    }


def _kept(hold: Hold) -> str:
    return f"keeping {plural(hold.blocks, 'block')} ({human_bytes(hold.data_bytes)}) now"


def _moment(seconds: float | None) -> str:
    stamp = iso_time(seconds)
    return "-" if stamp is None else f"{stamp[:19]}Z"
