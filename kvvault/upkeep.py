"""The jobs of a vault: what keeps its promises while nobody asks.

`kvvault.lifecycle` knows how jobs run; this is which there are, what they do, and how often.

============  ==============================  ===================================================
job           runs                            does
============  ==============================  ===================================================
expire        when a deadline has come        destroys what is past its deadline
evict         every minute                    keeps the vault below its high watermark
purge         every `purge_every`             makes what was deleted unrecoverable
scrub         every hour                      authenticates a part, all of it once a week
reconcile     every ten minutes               repairs what processes left that died; finishes
                                              erasures; prompts with nothing left leave the
                                              inventory
checkpoint    every hour                      signs the audit log if it grew, empties
                                              the catalog's
============  ==============================  ===================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvvault import layout
from kvvault.lifecycle.jobs import (
    Job,
    JobContext,
    JobRefusedError,
    checkpoint_job,
    sampling_scrub_job,
)
from kvvault.lifecycle.lease import BootClock
from kvvault.lifecycle.runs import RunReport
from kvvault.lifecycle.scheduler import Scheduler, log_run
from kvvault.model import VerifyReport
from kvvault.vault import Vault

__all__ = ["jobs_of", "scheduler_of"]

_MINUTE_S: Final = 60.0
_EXPIRE_POLL_S: Final = 0.25
"""How often it is looked whether a deadline has come."""


def jobs_of(vault: Vault) -> tuple[Job, ...]:
    """The jobs of a vault, with their intervals. A purge runs sooner when a policy that was applied
    since asks for it."""
    return (
        Job("expire", _MINUTE_S, _expire(vault), due=vault.has_expired, poll_s=_EXPIRE_POLL_S),
        Job("evict", _MINUTE_S, _evict(vault)),
        Job(
            "purge",
            vault.policy().vault.purge_interval_s,
            _purge(vault),
            due=vault.purge_is_due,
            poll_s=_MINUTE_S,
        ),
        sampling_scrub_job(vault.segments, _check(vault)),
        Job("reconcile", 10 * _MINUTE_S, _reconcile(vault)),
        checkpoint_job(vault.catalog.empty_log, vault.audit.checkpoint),
    )


def scheduler_of(
    vault: Vault,
    *,
    report: Callable[[RunReport], None] = log_run,
    leading: Callable[[bool], None] | None = None,
) -> Scheduler:
    """A scheduler of a vault's jobs, to be started, and stopped before the vault is closed."""
    return Scheduler(
        vault.catalog,
        jobs_of(vault),
        BootClock(layout.boot_id()),
        report=report,
        leading=leading,
    )


def _expire(vault: Vault) -> Callable[[JobContext], str]:
    def run(_context: JobContext) -> str:
        done = vault.expire()
        if vault.time.suspect:
            raise JobRefusedError(
                f"the clock is {vault.time.ahead_s:.0f} seconds ahead of the time that can be "
                "vouched for: nothing expires by it",
                hint="set the clock, or say that it is right: kvvault clock accept",
            )
        return (
            f"{done.segments} segments ({done.blocks} blocks) expired, "
            f"{done.held_segments} kept by holds"
        )

    return run


def _evict(vault: Vault) -> Callable[[JobContext], str]:
    def run(_context: JobContext) -> str:
        done = vault.evict()
        return (
            f"{done.segments} segments evicted, {done.freed_bytes} bytes freed, "
            f"{done.readmitted_bytes} written again, {done.missing_bytes} could not be freed"
        )

    return run


def _purge(vault: Vault) -> Callable[[JobContext], str]:
    def run(_context: JobContext) -> str:
        done = vault.purge()
        return f"{done.tenants} tenants and {done.segments} segments under a new root key"

    return run


def _reconcile(vault: Vault) -> Callable[[JobContext], str]:
    def run(_context: JobContext) -> str:
        done = vault.reconcile()
        pruned = vault.prompts.prune()
        return (
            f"sealed {done.sealed_segments} segments, destroyed {done.destroyed_files} files, "
            f"lost {done.lost_segments} segments, finished {done.finished_deletions} deletions, "
            f"{pruned} prompts left the inventory"
        )

    return run


def _check(vault: Vault) -> Callable[[Sequence[bytes], Callable[[], None]], VerifyReport]:
    def check(segment_ids: Sequence[bytes], between: Callable[[], None]) -> VerifyReport:
        return vault.verify_segments(frozenset(segment_ids), lambda _done, _total: between())

    return check
