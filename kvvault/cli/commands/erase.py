"""erase: prompts go, with a plan, a confirmation and a receipt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvvault.cli.commands.deleting import (
    ACTOR,
    DRY_RUN,
    REASON,
    YES,
    actor_name,
    claim,
    forget_tenant,
    open_to_change,
    open_to_plan,
)
from kvvault.cli.commands.finding import (
    SUBJECT_FILE,
    Found,
    TextQuestion,
    find_text,
    question_of,
    refusals_noted,
    subject_of,
)
from kvvault.cli.commands.limits import (
    MORE_THAN_HALF,
    PARTIAL,
    AskingEngine,
    copies_document,
    is_more_than_half,
    live_bytes,
    missed,
    refuse_mass_deletion,
    told,
)
from kvvault.cli.formats import human_bytes, iso_time, parse_duration, path_text, plural
from kvvault.cli.run import Run, command
from kvvault.errors import HeldError, UsageError

if TYPE_CHECKING:
    from kvvault.audit.receipts import EngineCopy
    from kvvault.crypto.providers.base import ProviderInfo
    from kvvault.deleting import DeletionReport
    from kvvault.prompterasing import ErasurePlan
    from kvvault.promptfacts import Condition
    from kvvault.vault import Vault

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "erase")(erase)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which prompts are meant. All of it has to be so of a prompt."""

    tenant: str | None
    prompts: Sequence[str]
    conditions: Sequence[Condition]
    text: TextQuestion | None

    def plan(
        self, vault: Vault, *, include_shared: bool, only: Collection[int] | None = None
    ) -> ErasurePlan:
        """`only`: no others than these."""
        if only is not None:
            return vault.plan_erasure(
                self.conditions, tenant=self.tenant, numbers=only, include_shared=include_shared
            )
        numbers: set[int] | None = None
        if self.prompts:
            numbers = vault.prompts.numbers_of(self.prompts)
        if self.text is not None:
            having = self._having(find_text(vault, self.text))
            numbers = having if numbers is None else numbers & having
        return vault.plan_erasure(
            self.conditions, tenant=self.tenant, numbers=numbers, include_shared=include_shared
        )

    @staticmethod
    def _having(answers: Sequence[Found]) -> set[int]:
        """The prompts that begin with the whole text.

        :raises UsageError: a namespace of the model cannot be asked; or only a part of the text
            persists: what others have of it may be a system prompt, and they are not meant.
        """
        having: set[int] = set()
        for found in answers:
            if found.chain is None:
                raise UsageError(
                    f"namespace {found.namespace.digest.hex()[:8]} cannot be asked: {found.why}",
                    hint="choose by --prompt, --request or --subject",
                )
            if 0 < found.chain.blocks < found.of_blocks:
                raise UsageError(
                    f"only {found.chain.blocks} of the {found.of_blocks} blocks of this text "
                    "persist, which others may have, too",
                    hint="see which prompts have them: kvvault prompts find; then --prompt",
                )
            having |= {
                facts.number
                for facts, tokens in found.chain.prompts
                if tokens >= found.chain.tokens > 0
            }
        return having


def erase(
    run: Run,
    reason: REASON,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="ID", help="A prompt's id; its first digits do."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="The request's id, as its client knows it."),
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", metavar="NAME", help="All prompts of a subject.")
    ] = None,
    subject_file: SUBJECT_FILE = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            metavar="NAME",
            help="Of this tenant only. Alone: everything of the tenant, as `kvvault forget`.",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Prompts with this label."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Prompts first used longer ago: 7d."),
    ] = None,
    text_file: Annotated[
        str | None,
        typer.Option(
            "--text-file",
            metavar="FILE",
            help="Prompts that begin with this text, which must persist as a whole; - for stdin. "
            "Takes --tenant and --model.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Of --text-file: see `kvvault prompts find`."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Of --text-file: it is a chat.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="DIR", help="Of --text-file: where the tokenizer is."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", metavar="FILE", help="Of --text-file: as the server's."),
    ] = None,
    lora: Annotated[
        str | None, typer.Option("--lora", metavar="NAME=PATH", help="Of --text-file: adapter.")
    ] = None,
    salt_file: Annotated[
        str | None,
        typer.Option("--salt-file", metavar="FILE", help="Of --text-file: the cache_salt."),
    ] = None,
    include_shared: Annotated[
        bool,
        typer.Option(
            "--include-shared",
            help="Also blocks that other prompts share (they hold only what is common to them), "
            "but for prompts that a hold keeps.",
        ),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="URL", help="Then ask this vLLM server to drop its own copies."
        ),
    ] = None,
    actor: ACTOR = None,
    more_than_half: MORE_THAN_HALF = False,
    dry_run: DRY_RUN = False,
    yes: YES = False,
) -> int | None:
    """Erase prompts: their blocks that no other prompt shares, and all that is known of them.

    When it returns, no process serves these blocks from the vault. What others share stays (it is
    only what is common to them), and so does what a hold keeps: then the exit code is 3. All of it
    is on the receipt: kvvault receipt show.
    """
    from kvvault.holding import check_text

    who = actor_name(actor)
    check_text("reason", reason)
    if engine is not None:
        from kvvault.integrations.reset import check_url

        check_url(engine)
    subject = subject_of(subject, subject_file, text_file, salt_file)
    conditions = _conditions(request, subject, labels, older_than)
    text = None
    if text_file is not None:
        if tenant is None or model is None:
            raise UsageError(
                "--text-file takes --tenant and --model",
                hint="a block's name comes from both, see: kvvault prompts find",
            )
        text = question_of(
            text_file,
            tenant,
            model,
            chat=chat,
            tokenizer=tokenizer,
            chat_template=chat_template,
            lora=lora,
            salt_file=salt_file,
        )
    elif chat or any(one is not None for one in (model, tokenizer, chat_template, lora, salt_file)):
        raise UsageError(
            "options of a text, but no text: --text-file is missing",
            hint="without it they would choose nothing; see: kvvault erase --help",
        )
    if not (prompts or conditions or text):
        if include_shared:
            raise UsageError(
                "--include-shared says nothing about a whole tenant",
                hint="leave it out: everything of the tenant goes in any case",
            )
        if tenant is None:
            raise UsageError(
                "nothing says which prompts are meant",
                hint="give --prompt, --request, --subject, --label, --older-than, --text-file or "
                "--tenant",
            )
        asking = None if engine is None else AskingEngine(engine)
        return forget_tenant(run, tenant, reason, who, more_than_half, dry_run, yes, asking)
    choice = _Choice(tenant, prompts or (), conditions, text)
    with open_to_plan(run) as vault:
        with refusals_noted(vault, "erase (plan)"):
            plan = choice.plan(vault, include_shared=include_shared)
        _note(vault, plan)
        shown = _Shown(run, plan, vault.provider_info(), live_bytes(vault))
    if dry_run:
        return shown.plan_only()
    if not plan.numbers:
        return shown.nothing()
    refuse_mass_deletion(plan.deletion, shown.live_bytes, allowed=more_than_half)
    run.output.confirm(f"Erase {_counted(plan)}? This cannot be undone.", yes=yes)
    with open_to_change(run) as vault:
        # What was confirmed, and no more: the same prompts, as far as they are still meant.
        now = choice.plan(vault, include_shared=include_shared)
        later = len(set(now.numbers) - set(plan.numbers))
        if later:
            only = set(now.numbers) & set(plan.numbers)
            now = choice.plan(vault, include_shared=include_shared, only=only)
        shown = _Shown(run, now, shown.info, live_bytes(vault), later, less=_less(plan, now))
        refuse_mass_deletion(now.deletion, shown.live_bytes, allowed=more_than_half)
        if not now.numbers:
            return shown.nothing()
        asking = None if engine is None else AskingEngine(engine)
        report = vault.erase(now, actor=who, reason=reason, engine=asking)
        # The newest: it is issued again with what an engine said.
        of_it = [one for one in vault.audit.receipts() if one.deletion_no == report.deletion_no]
        receipt = of_it[-1].receipt_id.hex() if of_it else None
    return shown.done(report, receipt, () if asking is None else asking.copies)


def _note(vault: Vault, plan: ErasurePlan) -> None:
    """A plan tells which prompts persist: the log has whose, as far as that was asked."""
    about = {name: value for name, value in plan.scope.items() if name in ("subject", "subjects")}
    vault.note_question(
        "erase (plan)", tenant_id=plan.tenant_id, rows=len(plan.numbers), about=about
    )


def _conditions(
    request: str | None,
    subject: str | None,
    labels: Sequence[str] | None,
    older_than: str | None,
) -> list[Condition]:
    from kvvault.promptfacts import LABEL, Condition
    from kvvault.scope import check_name

    found = []
    # An empty one is a variable that was not set, rather than nobody.
    if request is not None:
        check_name(request, "request id")
        found.append(Condition("request", "=", request))
    if subject is not None:
        check_name(subject, "subject")
        found.append(Condition("subject", "=", subject))
    for label in labels or ():
        name, equals, value = label.partition("=")
        if not (name and equals):
            raise UsageError("--label: that is not NAME=VALUE", hint="for instance case=4711")
        found.append(Condition(LABEL + name, "=", value))
    if older_than is not None:
        try:
            found.append(Condition("age", ">", parse_duration(older_than)))
        except ValueError as error:
            raise UsageError(
                f"--older-than: {str(error).partition(';')[0]}",
                hint=str(error).partition("; ")[2],
            ) from None
    return found


@dataclass(frozen=True, slots=True)
class _Shown:
    """A plan, and what is shown of it before and after."""

    run: Run
    plan: ErasurePlan
    info: ProviderInfo
    live_bytes: int
    """Of the whole vault."""
    later: int = 0
    """Prompts that are meant, too, but came after the question."""
    less: str | None = None
    """What had been asked about and is not there any more."""

    def plan_only(self) -> int | None:
        """Nothing was done; the exit code."""
        if self.run.output.json:
            self.run.output.document({**self._document(), "dry_run": True})
            return None
        stays = _stays(self.plan, self.plan.held_blocks)
        self.run.output.lines(f"would erase {_counted(self.plan)}", *stays)
        if self.plan.numbers:
            self.run.output.lines(claim(self.info))
        if self._more_than_half:
            self.run.output.note("that is more than half of the vault: it needs --more-than-half")
        self._notes()
        return None

    def nothing(self) -> int | None:
        """Nothing was to be done; the exit code.

        :raises HeldError: because a hold keeps all that was meant.
        """
        held = self.plan.held_prompts
        if held:
            raise HeldError(
                f"a hold keeps all {held} of these prompts; nothing was done",
                hint="see: kvvault hold ls; clear the hold first, if that is right",
            )
        if self.run.output.json:
            self.run.output.document({**self._document(), "dry_run": False})
            return None
        self.run.output.lines("no such prompt persists; nothing was done")
        self._notes()
        return None

    def done(
        self, report: DeletionReport, receipt: str | None, copies: Sequence[EngineCopy]
    ) -> int | None:
        """What was done; the exit code."""
        plan = self.plan
        if self.run.output.json:
            self.run.output.document(
                {
                    **self._document(),
                    "dry_run": False,
                    "held": self._held(report.held_blocks),
                    "erased": {"blocks": report.blocks, "bytes": report.data_bytes},
                    "revoked_at": iso_time(report.revoked_at),
                    "waiting_segments": report.waiting_segments,
                    "engine_copies": copies_document(copies),
                    "receipt": receipt,
                }
            )
        else:
            self.run.output.lines(
                f"erased {plural(len(plan.numbers), 'prompt')}: {plural(report.blocks, 'block')}, "
                f"{human_bytes(report.data_bytes)}",
                *_stays(plan, report.held_blocks),
                *told(copies),
                claim(self.info),
            )
            if report.waiting_segments:
                self.run.output.lines(
                    f"{report.waiting_segments} segments wait to be compacted; their keys are "
                    "still there, and no purge covers them (job: reconcile)"
                )
            if receipt is not None:
                self.run.output.lines(f"receipt {receipt}")
        self._notes()
        held = plan.held_prompts or report.held_segments or report.held_blocks
        return PARTIAL if held or report.waiting_segments or missed(copies) else None

    @property
    def _more_than_half(self) -> bool:
        return is_more_than_half(self.plan.deletion, self.live_bytes)

    def _notes(self) -> None:
        if self.less is not None:
            self.run.output.note(self.less)
        if self.later:
            self.run.output.note(
                f"{self.later} more prompts came after the question and were left; run it again"
            )

    def _document(self) -> dict[str, object]:
        plan = self.plan
        return {
            "vault": path_text(Path(self.run.vault_path()).absolute()),
            "prompts": [one.hex() for one in plan.prompt_ids],
            "blocks": plan.blocks,
            "bytes": plan.data_bytes,
            "include_shared": plan.include_shared,
            "shared": {
                "blocks": plan.shared_blocks,
                "bytes": plan.shared_bytes,
                "prompts": plan.shared_prompts,
            },
            "taken": {
                "blocks": plan.taken_blocks,
                "bytes": plan.taken_bytes,
                "prompts": plan.taken_prompts,
            },
            "held": self._held(plan.held_blocks),
            "later_prompts": self.later,
            "more_than_half": self._more_than_half,
            "assurance": self.info.assurance.value,
            "claim": claim(self.info),
        }

    def _held(self, blocks: int) -> dict[str, int]:
        segments = len(self.plan.deletion.held)
        return {"prompts": self.plan.held_prompts, "segments": segments, "blocks": blocks}


def _less(asked: ErasurePlan, now: ErasurePlan) -> str | None:
    prompts = len(set(asked.numbers) - set(now.numbers))
    blocks = asked.blocks - now.blocks
    if prompts or blocks > 0:
        return (
            f"less than was asked about: {prompts} prompts and {max(0, blocks)} blocks have gone "
            "since, or stay"
        )
    return None


def _counted(plan: ErasurePlan) -> str:
    prompts, blocks = plural(len(plan.numbers), "prompt"), plural(plan.blocks, "block")
    return f"{prompts} ({blocks}, {human_bytes(plan.data_bytes)})"


def _stays(plan: ErasurePlan, held_blocks: int) -> list[str]:
    lines = []
    if plan.taken_blocks:
        lines.append(
            f"taken from {plural(plan.taken_prompts, 'other prompt')}, too: "
            f"{plural(plan.taken_blocks, 'block')} that they share"
        )
    elif plan.shared_blocks and not plan.include_shared:
        lines.append(
            f"stays, shared with {plural(plan.shared_prompts, 'other prompt')}: "
            f"{plural(plan.shared_blocks, 'block')}, {human_bytes(plan.shared_bytes)}"
        )
    if held_blocks:
        lines.append(
            f"stays, because a hold keeps a prompt that shares it: {plural(held_blocks, 'block')}"
        )
    if plan.held_prompts:
        lines.append(f"stays, because a hold keeps it: {plural(plan.held_prompts, 'prompt')}")
    if plan.deletion.held:
        lines.append(
            f"stays, because a hold keeps it: {plural(len(plan.deletion.held), 'segment')}"
        )
    return lines
