"""Making policies for tests."""

from __future__ import annotations

from kvvault.policy.document import Policy

HEAD = """\
kvvault: 1
name: sample
description: For a test.
"""


def source(*rules: str, vault: str = "") -> str:
    """A policy of these rules, each the lines of a rule without owner and justification, as
    ``name: x\\ndelete_by: 1h``; and of these lines below `vault`."""
    text = HEAD
    if vault:
        text += "vault:\n" + "".join(f"  {line}\n" for line in vault.splitlines())
    text += "rules:\n"
    for rule in rules:
        lines = [*rule.splitlines(), "owner: me", "justification: because"]
        text += "".join(f"  {'- ' if not at else '  '}{line}\n" for at, line in enumerate(lines))
    return text


def policy(*rules: str, vault: str = "") -> Policy:
    return Policy.parse(source(*rules, vault=vault))


REST = "name: rest\ndelete_by: 24h"
"""A last rule."""
