"""rm, expire, forget: a plan, a confirmation, and what was done."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvvault.cli.commands.limits import (
    MORE_THAN_HALF,
    PARTIAL,
    copies_document,
    is_more_than_half,
    live_bytes,
    missed,
    refuse_mass_deletion,
    told,
)
from kvvault.cli.formats import (
    Cell,
    human_bytes,
    human_duration,
    iso_time,
    path_text,
    plural,
    short_ids,
)
from kvvault.cli.inventory import Inventory
from kvvault.cli.run import Run, command
from kvvault.errors import HeldError, UsageError
from kvvault.model import SegmentFacts

if TYPE_CHECKING:
    from kvvault.audit.receipts import EngineCopy
    from kvvault.crypto.providers.base import ProviderInfo
    from kvvault.deleting import DeletionPlan, DeletionReport
    from kvvault.erasing import AskEngine
    from kvvault.vault import Vault

__all__ = [
    "ACTOR",
    "DRY_RUN",
    "REASON",
    "YES",
    "actor_name",
    "claim",
    "counted",
    "forget_tenant",
    "open_to_change",
    "open_to_plan",
    "receipt_of",
    "register",
]

log = logging.getLogger(__name__)

_SHOWN: Final = 20
"""Segments of a plan that are listed one by one for people; JSON has them all."""

DRY_RUN = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would be done, and do nothing.")
]
YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
REASON = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in clear.")]
ACTOR = Annotated[
    str | None,
    typer.Option(
        "--actor",
        metavar="NAME",
        help="Who does it; recorded in clear. The name of the system's user if not given.",
    ),
]


def register(app: typer.Typer) -> None:
    command(app, "rm")(rm)
    command(app, "expire")(expire)
    command(app, "forget")(forget)


# -- what all that change a vault need -----------------------------------------------------------


@contextlib.contextmanager
def open_to_change(run: Run) -> Iterator[Vault]:
    """The vault, for writing. Errors as `Vault.open`.

    :raises UsageError: its keys are in another process's memory. Opening it here would begin with
        new ones and destroy what it holds.
    """
    from kvvault.vault import Vault

    _refuse_keys_in_memory(run)
    with Vault.open(run.vault_path(), provider=run.settings.key_provider) as vault:
        yield vault


@contextlib.contextmanager
def open_to_plan(run: Run) -> Iterator[Vault]:
    """The vault, for reading, to find out what a change would do. Errors as `open_to_change`, so
    that a dry run fails where the change would."""
    _refuse_keys_in_memory(run)
    with run.open_vault() as vault:
        yield vault


def _refuse_keys_in_memory(run: Run) -> None:
    from kvvault import layout

    provider = run.settings.key_provider or layout.read_descriptor(run.vault_path()).provider
    if provider.startswith("ephemeral:"):
        raise UsageError(
            "the keys of this vault are in the memory of the process that made it",
            hint="only that process can change it; its end destroys everything",
        )


def actor_name(given: str | None) -> str:
    """Who to write down: what was given, or the user that this process runs as. Not from the
    environment, which says whatever it was told.

    :raises UsageError: it is empty or unprintable.
    """
    from kvvault.holding import check_text

    if given is not None:
        check_text("actor", given)
        return given
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def claim(info: ProviderInfo) -> str:
    """What a deletion is worth with this key provider, for people."""
    from kvvault.crypto.providers.base import Assurance

    if info.assurance is Assurance.PURGE:
        return "unreadable through kvvault now; unrecoverable after the next purge"
    return f"unreadable through kvvault now; logical, also after the next purge: {info.reason}"


def receipt_of(vault: Vault, deletion_no: int | None) -> str | None:
    """Id of the newest receipt of a deletion; None: it has none yet."""
    if deletion_no is None:
        return None
    of_it = [one for one in vault.audit.receipts() if one.deletion_no == deletion_no]
    return of_it[-1].receipt_id.hex() if of_it else None


# -- commands ------------------------------------------------------------------------------------


def rm(
    run: Run,
    idents: Annotated[
        list[str],
        typer.Argument(metavar="SEGMENT", help="Id of a segment, or its first digits."),
    ],
    reason: REASON = "",
    actor: ACTOR = None,
    more_than_half: MORE_THAN_HALF = False,
    dry_run: DRY_RUN = False,
    yes: YES = False,
) -> int | None:
    """Delete segments. When it returns, no process serves their blocks from the vault.

    What a hold keeps stays, and the exit code is then 3.
    """
    who = actor_name(actor)
    if reason:
        _check_reason(reason)
    with open_to_plan(run) as vault:
        inventory = Inventory.of(vault)
        ids = list({_segment(inventory, ident).segment_id: None for ident in idents})
        job = _Deletion.of(run, vault, vault.plan_segments(ids))
    if dry_run:
        return job.show()
    if not job.plan.segments:
        raise _held(len(job.plan.held), 0)
    refuse_mass_deletion(job.plan, job.live_bytes, allowed=more_than_half)
    job.confirm(yes=yes)
    with open_to_change(run) as vault:
        job.execute(vault, vault.plan_segments(ids), who, reason)
    return job.done()


def expire(run: Run, dry_run: DRY_RUN = False, yes: YES = False) -> int | None:
    """Delete what is past its deadline, but for what a hold keeps.

    Engines and the daemon do this by themselves, and so does whoever opens the vault for writing.
    Where the clock is suspect, what only that clock calls past its deadline stays, and the exit
    code is 3; see: kvvault clock show. However much of the vault is due: no --more-than-half here.
    """
    with open_to_plan(run) as vault:
        job = _Deletion.of(run, vault, vault.plan_expired())
        job.waiting = _waiting(vault, job.plan)
    if dry_run:
        return job.show()
    if job.plan.segments:
        job.confirm(yes=yes)
        with open_to_change(run) as vault:  # this alone expires; the plan says what it was
            job.execute(vault, vault.plan_expired(), "kvvault", "deadline")
    return job.done()


def forget(
    run: Run,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")],
    reason: REASON,
    actor: ACTOR = None,
    more_than_half: MORE_THAN_HALF = False,
    dry_run: DRY_RUN = False,
    yes: YES = False,
) -> int | None:
    """Destroy a tenant's key, and with it everything of the tenant.

    Refused as a whole (exit code 3) while a hold keeps the tenant or any segment of it.
    """
    return forget_tenant(run, tenant, reason, actor_name(actor), more_than_half, dry_run, yes)


def forget_tenant(
    run: Run,
    tenant: str,
    reason: str,
    who: str,
    more_than_half: bool,
    dry_run: bool,
    yes: bool,
    engine: AskEngine | None = None,
) -> int | None:
    """What `forget` does. `engine`: asked when nothing is served any more, shown and logged."""
    _check_reason(reason)
    with open_to_plan(run) as vault:
        job = _Deletion.of(run, vault, _tenant_plan(vault, tenant))
        # A segment's is in the plan; one on a subject or prompt counts also without any data.
        holds = sum(
            job.plan.tenant_id is not None and hold.spares(job.plan.tenant_id)
            for hold in vault.holds()
        )
    job.refused = bool(holds or job.plan.held)
    if dry_run:
        return job.show()
    if job.refused:
        raise _tenant_held(holds, len(job.plan.held))
    refuse_mass_deletion(job.plan, job.live_bytes, allowed=more_than_half)
    job.confirm(yes=yes, also="the tenant's key, and ")
    with open_to_change(run) as vault:
        job.execute(vault, _tenant_plan(vault, tenant), who, reason)
        if engine is not None and job.report is not None:
            job.copies = engine()
            vault.note_engine(job.report.deletion_no, job.copies)
    return job.done() or (PARTIAL if missed(job.copies or ()) else 0)


def _segment(inventory: Inventory, ident: str) -> SegmentFacts:
    """
    :raises UsageError: nothing, several, something else, or a segment that is gone.
    """
    thing, facts = inventory.find(ident)
    if not isinstance(facts, SegmentFacts):
        raise UsageError(
            f"{ident.lower()} is a {thing.one}, not a segment",
            hint="segments: kvvault ls segments; everything of a tenant: kvvault forget TENANT",
        )
    if not facts.state.live:
        raise UsageError(
            f"segment {ident.lower()} is gone already ({facts.state.value})",
            hint="what is left: kvvault ls segments",
        )
    return facts


def _tenant_plan(vault: Vault, tenant: str) -> DeletionPlan:
    plan = vault.plan_tenant(tenant)
    if plan is None:
        raise UsageError("the vault has no such tenant", hint="see: kvvault ls tenants")
    return plan


def _check_reason(reason: str) -> None:
    from kvvault.holding import check_text

    check_text("reason", reason)


def _held(held: int, gone: int) -> HeldError:
    what = f"a hold keeps {held} of these segments"
    rest = f"the other {gone} are gone" if gone else "nothing was done"
    return HeldError(
        f"{what}; {rest}", hint="see: kvvault hold ls; clear the hold first, if that is right"
    )


def _tenant_held(holds: int, segments: int) -> HeldError:
    what = "this tenant or a part of it" if holds else f"{plural(segments, 'segment')} of it"
    return HeldError(
        f"a hold keeps {what}; nothing was done",
        hint="see: kvvault hold ls; clear the hold first, if that is right",
    )


# -- plan, confirmation, execution ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What would be past its deadline if a clock that is suspect were right."""

    segments: Sequence[SegmentFacts]
    ahead_s: float


def _waiting(vault: Vault, plan: DeletionPlan) -> _Waiting | None:
    """None when the clock is not suspect."""
    if not vault.time.suspect:
        return None
    latest = vault.time.now()
    due = {facts.segment_id for facts in (*plan.segments, *plan.held)}
    kept = due.union(*(hold.segment_ids for hold in vault.holds()))
    return _Waiting(
        [
            facts
            for facts in vault.segments()
            if facts.state.live and facts.deadline <= latest and facts.segment_id not in kept
        ],
        vault.time.ahead_s,
    )


@dataclass(slots=True)
class _Deletion:
    """One deletion by this command line, from its plan to its report."""

    run: Run
    plan: DeletionPlan
    info: ProviderInfo
    live_bytes: int
    """Of the whole vault."""
    held: int
    """Segments that would go, or would have gone, but for a hold."""
    refused: bool = False
    """A hold forbids it as a whole."""
    waiting: _Waiting | None = None
    gone: Sequence[SegmentFacts] = ()
    copies: Sequence[EngineCopy] | None = None
    """What became of an engine's own; None when none was to be asked."""
    report: DeletionReport | None = None
    receipt: str | None = None

    @classmethod
    def of(cls, run: Run, vault: Vault, plan: DeletionPlan) -> _Deletion:
        return cls(run, plan, vault.provider_info(), live_bytes(vault), len(plan.held))

    @property
    def _expiring(self) -> bool:
        return self.plan.trigger.value == "expire"

    @property
    def more_than_half(self) -> bool:
        return is_more_than_half(self.plan, self.live_bytes)

    def confirm(self, *, yes: bool, also: str = "") -> None:
        """Errors as `Output.confirm`."""
        what = counted(self.plan.segments)
        self.run.output.confirm(f"Delete {also}{what}? This cannot be undone.", yes=yes)

    def execute(self, vault: Vault, plan: DeletionPlan, actor: str, reason: str) -> None:
        """Do it, as far as it is not done: opening the vault has expired what was due. Errors as
        `Vault.execute`."""
        log.info(
            "%s: %s to go; held: %d",
            plan.trigger.value,
            counted(self.plan.segments),
            self.held,
        )
        self.report = vault.execute(plan, actor=actor, reason=reason)
        self.held = self.report.held_segments
        self.receipt = receipt_of(vault, self.report.deletion_no)
        live = {facts.segment_id for facts in vault.segments() if facts.state.live}
        planned = {f.segment_id: f for f in (*self.plan.segments, *plan.segments)}
        self.gone = [facts for ident, facts in planned.items() if ident not in live]

    # -- what is shown ----------------------------------------------------------------------------

    def show(self) -> int:
        """The plan; the exit code."""
        if self.run.output.json:
            self.run.output.document({**self._head(dry_run=True), **_sums(self.plan.segments)})
            return 0
        self._table()
        self.run.output.lines(f"would delete {counted(self.plan.segments)}")
        self._notes()
        if self.refused:
            self.run.output.note("a hold keeps some of it, so all of it would be refused")
        elif self.more_than_half and not self._expiring:
            self.run.output.note("that is more than half of the vault: it needs --more-than-half")
        return 0

    def done(self) -> int:
        """What was done; the exit code.

        :raises HeldError: a hold kept some of what somebody asked for. Shown is what went.
        """
        if self.run.output.json:
            self.run.output.document({**self._head(dry_run=False), **_sums(self.gone)})
        else:
            self.run.output.lines(f"deleted {counted(self.gone)}", *told(self.copies or ()))
            self._notes()
        if self.held and not self._expiring:
            raise _held(self.held, len(self.gone))
        if self.held:
            log.warning("a hold keeps %s past the deadline", plural(self.held, "segment"))
        if self.waiting is None:
            return 0
        log.warning(
            "the clock is %s ahead of the vault's time: nothing is destroyed by it until "
            "`kvvault clock accept`",
            human_duration(self.waiting.ahead_s),
        )
        return 3 if self.waiting.segments else 0

    def _head(self, *, dry_run: bool) -> dict[str, object]:
        document: dict[str, object] = {
            "vault": path_text(self.run.vault_path().absolute()),
            "trigger": self.plan.trigger.value,
            "dry_run": dry_run,
            "plan": [
                {
                    "id": facts.segment_id.hex(),
                    **_size(facts),
                    "deadline": iso_time(facts.deadline),
                    "held": held,
                }
                for facts, held in self._rows()
            ],
            "held_segments": self.held,
            "more_than_half": self.more_than_half,
            "refused": self.refused,
            "revoked_at": None if self.report is None else iso_time(self.report.revoked_at),
            "assurance": self.info.assurance.value,
            "claim": claim(self.info),
            "receipt": self.receipt,
        }
        if self.copies is not None:
            document["engine_copies"] = copies_document(self.copies)
        if self._expiring:
            waiting = None if self.waiting is None else self.waiting.segments
            document |= {
                "clock_suspect": self.waiting is not None,
                "waiting": _sums(waiting or ()),
            }
        return document

    def _rows(self) -> list[tuple[SegmentFacts, bool]]:
        return [
            *((facts, False) for facts in self.plan.segments),
            *((facts, True) for facts in self.plan.held),
        ]

    def _table(self) -> None:
        rows = self._rows()
        if not rows:
            return
        short = short_ids(facts.segment_id for facts, _ in rows)
        self.run.output.table(
            ["SEGMENT", "BLOCKS", "BYTES", "DEADLINE", "HELD"],
            [
                [
                    Cell(short[facts.segment_id]),
                    Cell(str(facts.live_blocks), right=True),
                    Cell(human_bytes(facts.live_bytes), right=True),
                    Cell(iso_time(facts.deadline) or "-"),
                    Cell("held" if held else "-"),
                ]
                for facts, held in rows[:_SHOWN]
            ],
        )
        if len(rows) > _SHOWN:
            self.run.output.note(f"{_SHOWN} of {len(rows)} shown")

    def _notes(self) -> None:
        """What else there is to know, on stdout as well: it belongs to the result."""
        lines = [f"held, so it stays: {plural(self.held, 'segment')}"] if self.held else []
        if self.waiting is not None:
            lines.append(
                f"waiting for `kvvault clock accept`: {counted(self.waiting.segments)}, which are "
                "past their deadline only if the clock is right"
            )
        if self._expiring and self.more_than_half:
            lines.append("that is more than half of the vault; deadlines need no --more-than-half")
        if self.plan.tenant_id is not None and self.report is not None:
            lines.append("the tenant's key is destroyed")
        if self.plan.segments or self.gone or self.plan.tenant_id is not None:
            lines.append(claim(self.info))
        if self.receipt is not None:
            lines.append(f"receipt {self.receipt}")
        self.run.output.lines(*lines)


def _size(facts: SegmentFacts) -> dict[str, int]:
    return {"blocks": facts.live_blocks, "bytes": facts.live_bytes}


def _sums(segments: Sequence[SegmentFacts]) -> dict[str, object]:
    return {
        "segments": len(segments),
        "blocks": sum(facts.live_blocks for facts in segments),
        "bytes": sum(facts.live_bytes for facts in segments),
    }


def counted(segments: Sequence[SegmentFacts]) -> str:
    """``2 segments (12 blocks, 48.0 KiB)``"""
    size = sum(facts.live_bytes for facts in segments)
    blocks = sum(facts.live_blocks for facts in segments)
    return f"{plural(len(segments), 'segment')} ({plural(blocks, 'block')}, {human_bytes(size)})"
