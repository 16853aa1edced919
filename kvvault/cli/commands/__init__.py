"""The commands, in the order in which the help shows them."""

from __future__ import annotations

import typer

from kvvault.cli.commands import (
    audit,
    clock,
    deleting,
    doctor,
    engine,
    erase,
    hold,
    jobs,
    keys,
    listing,
    policy,
    prompts,
    report,
    vault,
)

__all__ = ["register_all"]


def register_all(app: typer.Typer) -> None:
    """Add every command to `app`."""
    vault.register(app)
    listing.register(app)
    prompts.register(app)
    deleting.register(app)
    erase.register(app)
    hold.register(app)
    keys.register(app)
    policy.register(app)
    audit.register(app)
    report.register(app)
    doctor.register(app)
    jobs.register(app)
    clock.register(app)
    engine.register(app)
