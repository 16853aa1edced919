"""What commands that delete have in common: how much may go unasked, and what an engine kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import typer

from kvvault.cli.formats import human_bytes
from kvvault.errors import UsageError

if TYPE_CHECKING:
    from kvvault.audit.receipts import EngineCopy
    from kvvault.vault import Vault

__all__ = [
    "MORE_THAN_HALF",
    "PARTIAL",
    "AskingEngine",
    "copies_document",
    "is_more_than_half",
    "live_bytes",
    "missed",
    "refuse_mass_deletion",
    "told",
]

PARTIAL: Final = 3
"""The exit code of what was done, but not all of it."""

MORE_THAN_HALF = Annotated[
    bool,
    typer.Option(
        "--more-than-half", help="Go on although more than half of the vault's bytes would go."
    ),
]


class AskingEngine:
    """Asks an engine to drop its copies when it is called, and remembers what it said."""

    def __init__(self, url: str) -> None:
        self.copies: Sequence[EngineCopy] = ()
        self._url = url

    def __call__(self) -> Sequence[EngineCopy]:
        from kvvault.audit.receipts import EngineCopy
        from kvvault.integrations.reset import CopyState, reset_engine

        done = reset_engine(self._url)
        self.copies = [
            EngineCopy(copy.value, state is CopyState.REACHED, state.value)
            for copy, state in done.copies.items()
        ]
        return self.copies


def live_bytes(vault: Vault) -> int:
    """Of the whole vault."""
    return sum(facts.live_bytes for facts in vault.segments() if facts.state.live)


class Going(Protocol):
    """What would be deleted."""

    @property
    def data_bytes(self) -> int: ...


def is_more_than_half(plan: Going, of_bytes: int) -> bool:
    return 2 * plan.data_bytes > of_bytes


def refuse_mass_deletion(plan: Going, of_bytes: int, *, allowed: bool) -> None:
    """
    :raises UsageError: more than half of what lives would go, and nobody said that this is meant.
    """
    if is_more_than_half(plan, of_bytes) and not allowed:
        raise UsageError(
            f"this would delete {human_bytes(plan.data_bytes)} of the {human_bytes(of_bytes)} in "
            "the vault; nothing was done",
            hint="look with --dry-run; add --more-than-half if it is meant",
        )


def told(copies: Sequence[EngineCopy]) -> list[str]:
    """What became of an engine's copies, for people."""
    lines = [f"the engine's {one.what}: {one.detail}" for one in copies]
    if any(one.detail == "not offered" for one in copies if one.what != "region"):
        lines.append(
            "vLLM offers that when it was started with VLLM_SERVER_DEV_MODE=1; else restart it"
        )
    return lines


def copies_document(copies: Sequence[EngineCopy]) -> list[dict[str, object]]:
    """The same for programs."""
    return [{"what": one.what, "reached": one.reached, "detail": one.detail} for one in copies]


def missed(copies: Sequence[EngineCopy]) -> bool:
    """Whether an engine still finds what is gone from the vault. The bytes of its CPU tier
    (`region`) nothing can make it overwrite."""
    return any(not one.reached for one in copies if one.what != "region")
