"""A vault with a past: what the tests of the audit log look at, and copies of it to tamper with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvvault.audit.checkpoint import VerifierKey
from kvvault.audit.receipts import Receipt, parse
from kvvault.crypto.providers import EphemeralProvider
from kvvault.crypto.providers.base import KeyProvider
from tests.core.support import Home, keys, namespace, put, segment_of

SECRETS = {
    "tenant": "acme-canary-tenant",
    "reason": "the canary reason of Jane Doe",
    "hold": "the canary matter of a court",
}
"""What somebody might say that must not get into the log."""


@dataclass
class Past:
    """A closed vault, and what was kept elsewhere of it."""

    home: Home
    key: VerifierKey
    notes: list[str] = field(default_factory=list)
    """Checkpoints, oldest first; the last is of the whole log."""
    sizes: list[int] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    yesterday: Path = Path()
    """A copy of the whole vault, before the last third of it happened."""

    def copy(self, to: Path) -> Home:
        """The vault once more, to tamper with."""
        shutil.copytree(self.home.path, to)
        return replace(self.home, path=to)


def make_past(path: Path, provider: KeyProvider) -> Past:
    home = Home(path / "vault", provider)
    with home.create() as vault:
        past = Past(home, vault.audit.key)

        def mark() -> None:
            past.notes.append(vault.audit.checkpoint())
            past.sizes.append(vault.audit.size())

        mark()
        scope = vault.scope(SECRETS["tenant"], namespace())
        other = vault.scope("other", namespace())
        put(vault, scope, keys(8))
        put(vault, other, keys(4, 20), "other")
        hold = vault.place_hold(tenant="other", reason=SECRETS["hold"], actor="counsel")
        doomed = segment_of(vault, scope, keys(1)[0])
        assert doomed is not None
        vault.execute(vault.plan_segments([doomed]), actor="operator", reason=SECRETS["reason"])
        mark()
        vault.clear_hold(hold.number, reason=SECRETS["hold"], actor="counsel")
        vault.execute(
            vault.plan_blocks(other, keys(1, 20)), actor="operator", reason=SECRETS["reason"]
        )
        vault.purge()
        mark()
    past.yesterday = path / "yesterday"
    shutil.copytree(home.path, past.yesterday)
    with home.open() as vault:
        plan = vault.plan_tenant(SECRETS["tenant"])
        assert plan is not None
        vault.execute(plan, actor="operator", reason=SECRETS["reason"])
        past.notes.append(vault.audit.checkpoint())
        past.sizes.append(vault.audit.size())
        past.receipts = [parse(row.document) for row in vault.audit.receipts()]
    return past


@pytest.fixture(scope="session")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    return make_past(tmp_path_factory.mktemp("audit"), EphemeralProvider())


@pytest.fixture
def tampered(past: Past, tmp_path: Path) -> Home:
    """A copy of the vault."""
    return past.copy(tmp_path / "vault")
