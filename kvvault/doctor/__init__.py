"""What about a machine or a vault weakens the promises: the checks of `kvvault doctor`.

Each check is a function that looks at one thing and returns findings; none changes anything. The
one repair that doctor offers, removing stale shared-memory regions, is in `residue`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvvault.doctor import machine, residue
from kvvault.doctor import vault as checks
from kvvault.doctor.disk import check_space
from kvvault.doctor.findings import Finding, Status, fail, warn, worst
from kvvault.doctor.pending import PendingRepair, pending_repair
from kvvault.doctor.promises import check_promises
from kvvault.errors import KvvaultError, UnsupportedVersionError
from kvvault.health import health_of
from kvvault.model import Clock, SystemClock
from kvvault.vault import Vault

__all__ = [
    "Finding",
    "Machine",
    "PendingRepair",
    "Status",
    "diagnose",
    "diagnose_machine",
    "diagnose_vault",
    "pending_repair",
    "worst",
]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the checks look; tests put other places there."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")  # noqa: S108 - where vLLM puts its regions, no temporary file
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    vllm: Callable[[], Path | None] = machine.vllm_directory
    core_limit: int | None = None
    """See `machine.check_core_dumps`."""


def diagnose(
    vault: Path | None,
    *,
    provider: str | None = None,
    surroundings: Machine | None = None,
    clock: Clock | None = None,
) -> list[Finding]:
    """Run every check; the vault's only when there is one to look at. Raises nothing on purpose:
    what cannot be checked is a finding."""
    surroundings = surroundings or Machine()
    found = diagnose_machine(surroundings)
    if vault is not None:
        found = diagnose_vault(vault, provider, clock or SystemClock()) + found
    return found


def diagnose_machine(surroundings: Machine) -> list[Finding]:
    """Everything that does not depend on a vault."""
    return [
        *residue.check_residue(residue.find_regions(surroundings.shm, surroundings.proc)),
        *machine.check_swap(surroundings.proc, surroundings.sys),
        *machine.check_core_dumps(surroundings.proc, surroundings.core_limit),
        *machine.check_vllm(),
        *machine.check_prefix_hash(surroundings.vllm(), surroundings.environ),
    ]


def diagnose_vault(path: Path, provider: str | None, clock: Clock) -> list[Finding]:
    """Everything about one vault, from its files to its keys."""
    uid = os.geteuid()
    try:
        tree = checks.read_tree(path)
    except OSError as error:
        found = checks.check_descriptor(path)  # says it best when there is no vault at all
        if worst(found) is Status.OK:
            reason = os.strerror(error.errno or 0).lower()
            found.append(
                fail("files", f"they cannot be listed: {reason}", "run doctor as the vault's owner")
            )
        return found
    found = checks.check_tree(tree, uid)
    if any(finding.status is Status.FAIL for finding in found):
        # Opening it would repair some of that, or fail for it. Doctor only looks.
        found.append(
            warn("contents", "not looked at", "repair modes, owner and links, then run it again")
        )
        return found
    found += checks.check_descriptor(path)
    if found[-1].status is Status.FAIL:
        return found
    found += checks.check_sqlite()
    found += checks.check_catalog(path)
    found += checks.check_direct(path)
    found += check_space(path)
    try:
        with Vault.open(path, provider=provider, clock=clock, read_only=True) as vault:
            found += _diagnose_open(vault, path, uid, clock)
    except UnsupportedVersionError as error:
        found.append(warn("contents", f"not looked at: {error}", error.hint))
    except KvvaultError as error:
        found.append(fail("keys", str(error), error.hint))
    return found


def _diagnose_open(vault: Vault, path: Path, uid: int, clock: Clock) -> list[Finding]:
    info = vault.provider_info()
    found = [Finding("keys", Status.OK, "the provider has this vault's keys", "")]
    found += checks.check_key_location(info, path)
    found += checks.check_key_file(info, uid)
    segments, tenants, namespaces = vault.segments(), vault.tenants(), vault.namespaces()
    found += checks.check_clock(clock.now(), segments, tenants, namespaces)
    nameless = sum(tenant.name is None for tenant in tenants)
    if nameless:
        found.append(
            fail(
                "tenant keys",
                f"the keys of {nameless} of {len(tenants)} tenants do not open",
                "check the key provider; without their keys those tenants' blocks are lost",
            )
        )
    found += checks.check_pending(pending_repair(path, vault.segments, clock.now()))
    found += check_promises(health_of(vault, clock))
    return found
