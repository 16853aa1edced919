"""Vaults for the reports: two tenants, by a clock of the test's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvvault.catalog.reporting import Period
from kvvault.crypto.providers import EphemeralProvider
from kvvault.policy.document import Policy
from kvvault.reporting.sources import Source
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.core.support import SMALL, keys, namespace, put

POLICY = Policy.parse("""\
kvvault: 1
name: audited
description: What the tests of the reports keep.
vault: {cap: 64GiB, free_floor: 1B, purge_every: 6h, window: 1m}
rules:
  - {name: short, class: short, delete_by: 1h, owner: desk, justification: Asked for it.}
  - {name: special, match: {labels: {data: special}}, persist: false, owner: officer,
     justification: No purpose needs it.}
  - {name: all, delete_by: 24h, idle: 12h, record: fingerprint, owner: officer,
     justification: Cases take a day.}
""")
BEGAN = 1_800_000_000.0
HOUR = 3600.0
NORTH, SOUTH = "clinic north", "Kanzlei Süd | <b>"


@dataclass
class Audited:
    """A vault, its clock, and what the reports ask."""

    vault: Vault
    clock: ManualClock

    def source(self, since: float = float("-inf"), until: float = float("inf")) -> Source:
        return Source(self.vault, self.clock, Period(since, until))

    def store(
        self, tenant: str, count: int, *, start: int = 0, retention_class: str | None = None
    ) -> None:
        scope = self.vault.scope(tenant, namespace(), retention_class=retention_class)
        assert put(self.vault, scope, keys(count, start)).stored == count


@pytest.fixture
def audited() -> Iterator[Audited]:
    """Twelve blocks of one tenant, four of another, and four that live for an hour."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as directory:
        clock = ManualClock(BEGAN)
        with Vault.create(
            Path(directory) / "vault",
            provider=EphemeralProvider(),
            policy=POLICY,
            options=SMALL,
            clock=clock,
        ) as vault:
            os.utime(vault.path / "VAULT", (BEGAN, BEGAN))
            made = Audited(vault, clock)
            made.store(NORTH, 12)
            made.store(SOUTH, 4)
            made.store(SOUTH, 4, start=100, retention_class="short")
            yield made
