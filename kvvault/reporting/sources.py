"""What several reports need: the vault and its time, who is who, and how rules read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvvault.catalog.reporting import Period
from kvvault.layout import read_descriptor
from kvvault.model import Clock, Namespace
from kvvault.policy.document import Match, Record, Rule
from kvvault.policy.durations import format_duration
from kvvault.reporting.document import Answer, Report, ReportKind, Table
from kvvault.vault import Vault

__all__ = ["Source", "conditions", "lifetime", "recorded"]

_ALWAYS: Final = (
    "of each request: tenant, and as far as it names them subject, labels and request id "
    "(encrypted); tokens, first and last use"
)
_BY_POLICY: Final = {
    Record.NONE: "no fingerprint and no preview",
    Record.FINGERPRINT: "a keyed fingerprint of the prompt (encrypted)",
    Record.PREVIEW: "a keyed fingerprint and a preview of the prompt's text (encrypted)",
}


@dataclass(frozen=True, slots=True)
class Source:
    """An open vault, and of what time it is asked."""

    vault: Vault
    clock: Clock
    period: Period = Period()  # noqa: RUF009 - frozen

    @property
    def now(self) -> float:
        """The latest that it may be, by the vault's own time: what is late is late by it."""
        return self.vault.time.now()

    def names(self) -> dict[bytes | None, str]:
        """Names of tenants by id; of those whose key cannot be had, the id."""
        return {
            tenant.tenant_id: tenant.name or f"(its key does not open) {tenant.tenant_id.hex()}"
            for tenant in self.vault.tenants()
        }

    def models(self) -> dict[bytes, str]:
        """Names of models by namespace digest."""
        return {
            facts.namespace.digest: _model(facts.namespace) for facts in self.vault.namespaces()
        }

    def report(
        self,
        kind: ReportKind,
        title: str,
        asked: tuple[str, ...],
        answers: tuple[Answer, ...],
        tables: tuple[Table, ...],
        statements: Mapping[str, str],
    ) -> Report:
        """A report on this vault."""
        path = self.vault.path
        since, until = self.period.since, self.period.until
        return Report(
            kind=kind,
            title=title,
            asked=asked,
            vault=_text(path.absolute()),
            vault_id=read_descriptor(path, read_only=True).vault_id.hex(),
            made_at=self.now,
            answers=answers,
            tables=tables,
            statements=tuple(statements.items()),
            since=since if since > float("-inf") else None,
            until=until if until < float("inf") else None,
        )


def _text(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _model(namespace: Namespace) -> str:
    return namespace.fact("model") or namespace.digest.hex()[:16]


def conditions(match: Match) -> str:
    """What a rule applies to, in words."""
    parts = [
        *(("tenant", match.tenant),) * bool(match.tenant),
        *match.facts,
        *((f"label {name}", patterns) for name, patterns in match.labels),
    ]
    text = "; ".join(f"{name} {' or '.join(patterns)}" for name, patterns in parts)
    return text or "everything that no rule before it applies to"


def lifetime(rule: Rule) -> str:
    """How long a rule keeps what, in words."""
    if not rule.persist:
        return "never written"
    ceiling = rule.delete_by_s
    parts = [
        "no ceiling" if ceiling is None else f"deleted {format_duration(ceiling)} after storing"
    ]
    if rule.idle_s is not None:
        parts.append(f"or {format_duration(rule.idle_s)} after the last use")
    return " ".join(parts)


def recorded(rule: Rule) -> str:
    """What is written down of a request under a rule, besides its blocks, in words."""
    return f"{_ALWAYS}; {_BY_POLICY[rule.record]}" if rule.persist else "nothing: never written"
