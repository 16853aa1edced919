"""clock show, clock accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kvvault.cli.commands.deleting import DRY_RUN, YES, counted, open_to_change, open_to_plan
from kvvault.cli.formats import human_bytes, human_duration, iso_time, path_text
from kvvault.cli.run import Run, command
from kvvault.model import SegmentFacts, SystemClock

if TYPE_CHECKING:
    from kvvault.vault import Vault

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        name="clock", help="Compare the vault's own time with the machine's clock, or accept that."
    )
    command(group, "show")(show)
    command(group, "accept")(accept)
    app.add_typer(group)


@dataclass(frozen=True, slots=True)
class _Clocks:
    """Both times at one moment, and what depends on which is right."""

    wall: float
    ahead_s: float
    """By how much the wall clock is ahead of the vault's time: 0 when that follows it."""
    behind_s: float
    suspect: bool
    threshold_s: float
    vault_time: float
    waiting: Sequence[SegmentFacts]
    """What is destroyed once the clock is accepted."""

    @classmethod
    def of(cls, vault: Vault) -> _Clocks:
        time = vault.time
        vault_time = time.steady()
        suspect, ahead = time.suspect, time.ahead_s
        wall = SystemClock().now()
        held = frozenset[bytes]().union(*(hold.segment_ids for hold in vault.holds()))
        waiting = [
            facts
            for facts in vault.segments()
            if facts.state.live
            and vault_time < facts.deadline <= wall
            and facts.segment_id not in held
        ]
        return cls(
            wall,
            ahead,
            max(0.0, vault_time - wall),
            suspect,
            vault.policy().vault.clock_jump_s,
            vault_time,
            waiting if suspect else [],
        )

    def document(self, run: Run) -> dict[str, object]:
        return {
            "vault": path_text(run.vault_path().absolute()),
            "vault_time": iso_time(self.vault_time),
            "wall_clock": iso_time(self.wall),
            "ahead_s": round(self.ahead_s, 3),
            "behind_s": round(self.behind_s, 3),
            "suspect": self.suspect,
            "threshold_s": self.threshold_s,
            "waiting_segments": len(self.waiting),
            "waiting_bytes": sum(facts.live_bytes for facts in self.waiting),
        }


def show(run: Run) -> int | None:
    """Show the vault's own time beside the machine's clock. Exit code 3 when that is suspect.

    The vault's time never goes back, and follows the clock ahead up to the policy's clock_jump.
    """
    with run.open_vault() as vault:
        clocks = _Clocks.of(vault)
    if run.output.json:
        run.output.document(clocks.document(run))
    else:
        run.output.pairs(
            [
                ("vault time", iso_time(clocks.vault_time) or "-"),
                ("wall clock", iso_time(clocks.wall) or "-"),
                ("ahead", human_duration(clocks.ahead_s)),
                ("behind", human_duration(clocks.behind_s)),
                ("believed", f"up to {human_duration(clocks.threshold_s)} ahead"),
                ("suspect", "yes" if clocks.suspect else "no"),
            ]
        )
        if clocks.suspect:
            run.output.lines(
                f"not served, and not destroyed: {counted(clocks.waiting)}, past their "
                "deadline only if the clock is right",
                "-> is the clock right? kvvault clock accept; if not, set it",
            )
    return 3 if clocks.suspect else None


def accept(run: Run, dry_run: DRY_RUN = False, yes: YES = False) -> int | None:
    """Say that the machine's clock is right although it is far ahead.

    What is past its deadline by it, and kept by no hold, is destroyed at once. There is no way
    back: the vault's time never goes back. Does nothing where the clock is not suspect.
    """
    with open_to_plan(run) as vault:
        clocks = _Clocks.of(vault)
    segments = size = 0
    accepting = clocks.suspect and not dry_run
    if accepting:
        run.output.confirm(
            f"The clock is {human_duration(clocks.ahead_s)} ahead and says "
            f"{iso_time(clocks.wall)}. Accept it, and destroy {counted(clocks.waiting)}?",
            yes=yes,
        )
        with open_to_change(run) as vault:
            vault.accept_clock()
            report = vault.expire()
        segments, size = report.segments, report.data_bytes
    if run.output.json:
        run.output.document(
            {
                **clocks.document(run),
                "dry_run": dry_run,
                "accepted": accepting,
                "expired_segments": segments,
                "expired_bytes": size,
            }
        )
    elif not clocks.suspect:
        run.output.lines("the clock is not suspect: there is nothing to accept")
    elif dry_run:
        run.output.lines(f"would accept the clock and destroy {counted(clocks.waiting)}")
    else:
        run.output.lines(
            f"the clock is accepted; segments destroyed: {segments} ({human_bytes(size)})"
        )
    return None
