"""Checks of what a vault promises about time and space. None changes anything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from kvvault.doctor.findings import Finding, fail, ok, warn
from kvvault.health import Health

__all__ = ["check_promises"]

_RUN_THEM: Final = (
    "start `kvvault daemon`, or run it with `kvvault jobs run`; see `kvvault jobs ls`"
)


def check_promises(health: Health) -> list[Finding]:
    """Policy, space, deadlines, jobs, the vault's time, and holds."""
    return [
        _policy(health),
        _space(health),
        _deadlines(health),
        _jobs(health),
        _vault_time(health),
        _holds(health),
    ]


def _policy(health: Health) -> Finding:
    applied = health.policy
    return ok(
        "policy",
        f"{applied.number}: {applied.policy.name} {applied.policy.digest.hex()[:12]}, applied "
        f"{_time(applied.applied_at)}",
    )


def _space(health: Health) -> Finding:
    space = health.space
    cap = "no cap" if space.limits.cap_bytes is None else f"a cap of {space.limits.cap_bytes} bytes"
    what = (
        f"{space.used_bytes} bytes used ({space.usage.pending} of it set aside) of {cap}; "
        f"{space.around.free_bytes} free, floor {space.limits.free_floor_bytes}"
    )
    if space.above_cap:
        return warn(
            "cap and floor",
            f"above the cap: {what}",
            "nothing is stored until eviction has made room; see `kvvault jobs ls`",
        )
    if space.below_floor:
        return warn(
            "cap and floor",
            f"below the floor: {what}",
            "nothing is stored until there is space; free some, or apply a lower free_floor",
        )
    return ok("cap and floor", what)


def _deadlines(health: Health) -> Finding:
    deadlines = health.deadlines
    if not deadlines.kept:
        return fail(
            "deadlines",
            f"{deadlines.overdue} segments are past theirs by up to {deadlines.late_s:.0f} s (not "
            "served)",
            "opening the vault for writing destroys them: start `kvvault daemon`, or run "
            "`kvvault expire`",
        )
    following = "none to come" if deadlines.following is None else _time(deadlines.following)
    return ok("deadlines", f"nothing is past its own; next: {following}")


def _jobs(health: Health) -> Finding:
    failing = [status for status in health.jobs if status.failing]
    overdue = [status.name for status in health.jobs if status.overdue]
    if failing:
        first = failing[0]
        return fail(
            "jobs",
            f"{first.name} {first.outcome}: {first.detail}",
            "it runs again at its next time; see `kvvault jobs ls`",
        )
    if overdue:
        return fail("jobs", f"overdue: {', '.join(overdue)}", _RUN_THEM)
    return ok("jobs", health.jobs_well("run"))


def _vault_time(health: Health) -> Finding:
    if health.clock_suspect:
        return fail(
            "vault time",
            f"the clock is {health.clock_ahead_s:.0f} s ahead of it: nothing is destroyed by it",
            "set the clock, or say that it is right: kvvault clock accept",
        )
    return ok("vault time", "the clock is not suspect")


def _holds(health: Health) -> Finding:
    holds = health.holds
    if holds.damaged:
        return fail(
            "holds",
            f"{holds.holds} in force, {holds.damaged} of them damaged: what they were on is not "
            "known, so each keeps all of its tenant, or everything",
            "see `kvvault hold ls`; place anew what is still needed, then `kvvault hold clear`",
        )
    return ok("holds", f"{holds.holds} in force")


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return "at no time that can be"
