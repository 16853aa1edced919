"""doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvvault.cli.formats import human_bytes, path_text
from kvvault.cli.run import Run, command
from kvvault.errors import StorageError, UsageError

if TYPE_CHECKING:
    from kvvault.doctor import Machine

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    command(app, "doctor", shows_warnings=True)(doctor)


def doctor(
    run: Run,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Remove shared-memory regions that no process uses any more."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="With --fix: say what would be removed, only.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --fix: do not ask.")] = False,
) -> int | None:
    """Look for whatever about this machine and this vault weakens the promises.

    Without a vault only the machine is looked at. Looking changes nothing. Exit code 1 when a
    check fails; warnings alone give 0.
    """
    from kvvault.doctor import Machine, Status, diagnose, worst

    if (dry_run or yes) and not fix:
        raise UsageError("--dry-run and --yes belong to --fix", hint="add --fix, or leave them out")
    machine = Machine()
    removed = _fix(run, machine, dry_run=dry_run, yes=yes) if fix else []
    path = run.settings.vault
    findings = diagnose(path, provider=run.settings.key_provider, surroundings=machine)
    status = worst(findings)
    code = 1 if status is Status.FAIL else 0
    if run.output.json:
        run.output.document(
            {
                "vault": None if path is None else path_text(path.absolute()),
                "status": status.value,
                "findings": [
                    {"name": f.name, "status": f.status.value, "what": f.what, "hint": f.hint}
                    for f in findings
                ],
                "removed": removed,
            }
        )
        return code
    run.output.verdicts([(f.status.value, f.name, f.what, f.hint) for f in findings])
    if path is None:
        run.output.note("no vault was named (--vault DIR): only the machine was looked at")
    return code


def _fix(run: Run, machine: Machine, *, dry_run: bool, yes: bool) -> list[str]:
    """Plan, ask, remove; the names of the regions that were removed."""
    from kvvault.doctor.residue import find_regions, removable, remove_region

    regions = removable(find_regions(machine.shm, machine.proc))
    if not regions:
        run.output.note("no shared-memory region can be removed")
        return []
    for region in regions:
        place = path_text(machine.shm / region.name)
        run.output.note(f"to remove: {place} ({human_bytes(region.size)})")
    if dry_run:
        return []
    run.output.confirm(f"Remove {len(regions)} regions? Nothing maps them.", yes=yes)
    removed = []
    for region in regions:
        try:
            if remove_region(region, machine.shm, machine.proc):
                removed.append(path_text(machine.shm / region.name))
        except OSError as error:
            raise StorageError(
                f"a region could not be removed: {(error.strerror or 'refused').lower()}",
                hint="run doctor as its owner",
                errno=error.errno,
            ) from error
    run.output.note(f"removed {len(removed)} regions")
    return removed
