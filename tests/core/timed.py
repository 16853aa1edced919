"""Vaults whose clock a test moves, under policies a test writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import insert, update

from kvvault.catalog import schema as t
from kvvault.options import VaultOptions
from kvvault.policy.document import Policy
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.core.support import Home

PLENTY = "64GiB"


def policy(*rules: str, **vault: str) -> Policy:
    """A policy of these rules, each without its name and owner: ``"delete_by: 1h, idle: 5m"``. The
    last one has to be for everything."""
    settings = {"cap": PLENTY, "free_floor": "1B", **vault}
    lines = ["kvvault: 1", "name: test", "description: a test's", "vault:"]
    lines += [f"  {name}: {value}" for name, value in settings.items()]
    lines.append("rules:")
    lines += [
        f"  - {{name: rule-{i}, owner: tests, justification: a test, {rule}}}"
        for i, rule in enumerate(rules)
    ]
    return Policy.parse("\n".join(lines) + "\n")


@dataclass
class TimedHome(Home):
    """A home whose vaults go by `clock`. One clock for all handles, as on one machine."""

    clock: ManualClock = field(default_factory=ManualClock)
    first: Policy = field(default_factory=lambda: policy("delete_by: 1h"))

    def create(self) -> Vault:
        return Vault.create(
            self.path,
            provider=self.provider,
            options=self.options,
            clock=self.clock,
            policy=self.first,
        )

    def open(self, *, read_only: bool = False, options: VaultOptions | None = None) -> Vault:
        return Vault.open(
            self.path,
            provider=self.provider,
            options=options or self.options,
            clock=self.clock,
            read_only=read_only,
        )


def report(vault: Vault) -> None:
    """What the vault's own thread does every second: say what was used, follow the clock."""
    vault._watcher.report()
    vault._catalog.write(lambda _connection: None)  # what was submitted before it is committed
    vault.refresh()


def put_in_force(vault: Vault, new: Policy) -> None:
    """Add a policy's row, as another process that applies it does; nothing of old blocks moves."""
    vault._catalog.write(
        lambda c: vault._governor.put_in_force(c, new, now=vault.time.steady(), actor="test")
    )


def hold(vault: Vault, kind: str, target: bytes) -> int:
    """Place a hold, as a row; its number."""
    values = {"kind": kind, "target": target, "reason": "test", "actor": "test", "placed_at": 0.0}
    statement = insert(t.holds).values(**values).returning(t.holds.c.hold_no)
    return int(vault._catalog.write(lambda c: c.execute(statement).scalar_one()))


def clear_hold(vault: Vault, number: int) -> None:
    """Clear a hold."""
    statement = update(t.holds).where(t.holds.c.hold_no == number).values(cleared_at=1.0)
    vault._catalog.write(lambda c: c.execute(statement).rowcount)
