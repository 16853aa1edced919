"""policy diff, policy apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvvault.cli.commands.deleting import (
    ACTOR,
    DRY_RUN,
    YES,
    actor_name,
    claim,
    open_to_change,
    open_to_plan,
    receipt_of,
)
from kvvault.cli.commands.limits import MORE_THAN_HALF, live_bytes, refuse_mass_deletion
from kvvault.cli.formats import Cell, human_bytes, iso_time, path_text, plural
from kvvault.cli.run import Run, command

if TYPE_CHECKING:
    from kvvault.applying import PolicyDiff, SegmentChange, Sum
    from kvvault.deleting import DeletionReport
    from kvvault.policy.document import Policy

__all__ = ["register"]

_FILE = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A policy file, or the name of a policy that comes with kvvault."
    ),
]
_CHANGES: Final = ("delete", "keep", "shorten", "lengthen")


def register(group: typer.Typer) -> None:
    """Add them to the group of the policy commands."""
    command(group, "diff")(diff)
    command(group, "apply")(apply)


def diff(run: Run, file: _FILE) -> int | None:
    """Show what applying a policy now would delete, keep, shorten and lengthen. Changes nothing."""
    from kvvault.policy import shipped

    policy = shipped.find(file)
    with open_to_plan(run) as vault:
        found = vault.diff_policy(policy)
    if run.output.json:
        run.output.document(_document(run, found))
    else:
        _show(run, found)
    return None


def apply(
    run: Run,
    file: _FILE,
    actor: ACTOR = None,
    more_than_half: MORE_THAN_HALF = False,
    dry_run: DRY_RUN = False,
    yes: YES = False,
) -> int | None:
    """Put a policy in force, for what is in the vault already and for what comes.

    Deadlines move at once, and what the policy does not allow is deleted, but for what a hold
    keeps. Every process that has the vault open goes by it from its next store and load on.
    """
    from kvvault.applying import Change
    from kvvault.policy import shipped

    policy = shipped.find(file)
    who = actor_name(actor)
    with open_to_plan(run) as vault:
        planned = vault.diff_policy(policy)
        lives = live_bytes(vault)
    if dry_run:
        if run.output.json:
            run.output.document({**_document(run, planned), **_done(None)})
        else:
            _show(run, planned)
        return None
    if not run.output.json:
        _show(run, planned)
    refuse_mass_deletion(planned.sum(Change.DELETE), lives, allowed=more_than_half)
    run.output.confirm(_question(planned), yes=yes)
    with open_to_change(run) as vault:
        done, report = vault.apply_policy(policy, actor=who)
        number = vault.applied_policy().number
        worth = claim(vault.provider_info())
        receipt = receipt_of(vault, report.deletion_no)
    if run.output.json:
        run.output.document({**_document(run, done), **_done(report, number)})
        return None
    run.output.lines(
        "",
        f"policy {number} is in force: {policy.name} {policy.digest.hex()[:12]}",
        f"deleted {_words(report.segments, report.blocks, report.data_bytes)}",
    )
    if report.segments:
        run.output.lines(worth, *([f"receipt {receipt}"] if receipt else ()))
    return None


# -- in words and in JSON ------------------------------------------------------------------------


def _question(diff: PolicyDiff) -> str:
    from kvvault.applying import Change

    gone, longer = diff.sum(Change.DELETE), diff.sum(Change.LENGTHEN)
    what = f"delete {_words(gone.segments, gone.blocks, gone.data_bytes)}"
    if longer.segments:
        kept = _words(longer.segments, longer.blocks, longer.data_bytes)
        what += f", and keep {kept} longer than was said when they were stored"
    return f"Put {diff.new.name} in force, and {what}?"


def _words(segments: int, blocks: int, data_bytes: int) -> str:
    return f"{plural(segments, 'segment')}, {plural(blocks, 'block')} ({human_bytes(data_bytes)})"


def _show(run: Run, diff: PolicyDiff) -> None:
    from kvvault.applying import Change

    run.output.pairs([("in force", _name(diff.old)), ("new", _name(diff.new))])
    run.output.lines("")
    rows = [("all", change, diff.sum(Change(change))) for change in _CHANGES]
    rows += [
        (rule.name, change, found)
        for rule in diff.new.rules
        for change in _CHANGES
        if (found := diff.sum(Change(change), rule.name)).segments
    ]
    run.output.table(
        ["RULE", "CHANGE", "SEGMENTS", "BLOCKS", "BYTES"],
        [
            [
                Cell(rule),
                Cell(change),
                Cell(str(found.segments), right=True),
                Cell(str(found.blocks), right=True),
                Cell(human_bytes(found.data_bytes), right=True),
            ]
            for rule, change, found in rows
        ],
    )
    held = diff.held
    if held.segments:
        run.output.lines(
            "",
            "kept by holds, and deleted when these are cleared: "
            f"{_words(held.segments, held.blocks, held.data_bytes)}",
        )


def _name(policy: Policy) -> str:
    return f"{policy.name} {policy.digest.hex()[:12]}"


def _document(run: Run, diff: PolicyDiff) -> dict[str, object]:
    from kvvault.applying import Change

    return {
        "vault": path_text(run.vault_path().absolute()),
        "old": {"policy": diff.old.name, "digest": diff.old.digest.hex()},
        "new": {"policy": diff.new.name, "digest": diff.new.digest.hex()},
        **{change: _sum(diff.sum(Change(change))) for change in _CHANGES},
        "held": _sum(diff.held),
        "rules": [
            {
                "rule": rule.name,
                **{change: _sum(diff.sum(Change(change), rule.name)) for change in _CHANGES},
            }
            for rule in diff.new.rules
        ],
        "changes": [_change(one) for one in diff.changes],
    }


def _sum(found: Sum) -> dict[str, int]:
    return {"segments": found.segments, "blocks": found.blocks, "bytes": found.data_bytes}


def _change(one: SegmentChange) -> dict[str, object]:
    return {
        "id": one.facts.segment_id.hex(),
        "change": one.outcome.value,
        "held": one.held,
        "rule": one.rule,
        "deadline_before": iso_time(one.facts.deadline),
        "deadline": iso_time(one.deadline),
        "blocks": one.facts.live_blocks,
        "bytes": one.facts.live_bytes,
    }


def _done(report: DeletionReport | None, number: int | None = None) -> dict[str, object]:
    return {
        "applied": report is not None,
        "number": number,
        "deleted": None
        if report is None
        else {
            "segments": report.segments,
            "blocks": report.blocks,
            "bytes": report.data_bytes,
        },
    }
