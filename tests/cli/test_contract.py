"""What scripts rely on: the reference, and the names of JSON fields (they only get added)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvvault.cli import app
from kvvault.cli.reference import reference
from tests.cli.conftest import Place
from tests.cli.support import NAMESPACE, ROOT, run

DOCUMENT = ROOT / "docs" / "cli.md"

SEGMENT = {
    "id",
    "tenant_id",
    "tenant",
    "namespace",
    "state",
    "blocks",
    "block_bytes",
    "bytes",
    "created_at",
}
TENANT = {"id", "name", "segments", "blocks", "bytes", "created_at"}
NAMESPACE_ROW = {"id", "model", "block_bytes", "segments", "blocks", "bytes", "created_at"}
PROVIDER = {"uri", "assurance", "reason", "location"}
COUNTS = {"segments", "blocks", "bytes"}
DELETION = {
    "vault",
    "trigger",
    "dry_run",
    "plan",
    "held_segments",
    "more_than_half",
    "refused",
    "revoked_at",
    "assurance",
    "claim",
    "receipt",
    *COUNTS,
}
PLANNED = {"id", "blocks", "bytes", "deadline", "held"}
HOLD = {
    "number",
    "kind",
    "target",
    "tenant",
    "reason",
    "actor",
    "placed_at",
    "cleared_at",
    "cleared_by",
    "cleared_reason",
    *COUNTS,
}
CLOCK = {
    "vault",
    "vault_time",
    "wall_clock",
    "ahead_s",
    "behind_s",
    "suspect",
    "threshold_s",
    "waiting_segments",
    "waiting_bytes",
}
STATES = {"open", "sealed", "revoked", "destroyed", "lost"}
DIFF = {
    "vault",
    "old",
    "new",
    "delete",
    "keep",
    "shorten",
    "lengthen",
    "held",
    "rules",
    "changes",
}
CHANGES = {
    "old": {"policy", "digest"},
    "delete": COUNTS,
    "held": COUNTS,
    "rules": {"rule", "delete", "keep", "shorten", "lengthen"},
    "changes": {
        "id",
        "change",
        "held",
        "rule",
        "deadline_before",
        "deadline",
        "blocks",
        "bytes",
    },
}

FIELDS: dict[str, dict[str, set[str]]] = {
    "status": {
        "": {
            "vault",
            "vault_id",
            "tenants",
            "namespaces",
            "segments",
            "segment_states",
            "blocks",
            "bytes",
            "oldest_segment_at",
            "newest_segment_at",
            "key_provider",
            "recovery_needed",
            "recovery",
            "policy",
            "space",
            "next_deadline_at",
            "overdue_segments",
            "jobs",
            "clock_suspect",
            "holds",
            "damaged_holds",
            "healthy",
            "warnings",
        },
        "key_provider": PROVIDER,
        "policy": {"number", "name", "digest", "applied_at", "applied_by"},
        "space": {
            "used_bytes",
            "pending_bytes",
            "cap_bytes",
            "free_bytes",
            "free_floor_bytes",
        },
        "jobs": {"healthy", "overdue", "failing", "not_yet"},
        "segment_states": STATES,
        "recovery": {
            "abandoned_segments",
            "unknown_files",
            "unknown_bytes",
            "missing_segments",
            "excess_bytes",
            "unfinished_deletions",
        },
    },
    "df": {
        "": {
            "vault",
            "tenants",
            "namespaces",
            "states",
            "total",
            "catalog_bytes",
            "segment_file_bytes",
            "file_system",
        },
        "tenants": {"id", "name", *COUNTS},
        "namespaces": {"id", "model", *COUNTS},
        "states": {"state", *COUNTS},
        "total": COUNTS,
        "file_system": {"total_bytes", "available_bytes"},
    },
    "ls segments": {"": {"segments", "total"}, "segments": SEGMENT},
    "ls tenants": {"": {"tenants", "total"}, "tenants": TENANT},
    "ls namespaces": {"": {"namespaces", "total"}, "namespaces": NAMESPACE_ROW},
    "show SEGMENT": {"": {"kind", *SEGMENT, "file"}, "file": {"path", "exists", "bytes"}},
    "show TENANT": {"": {"kind", *TENANT, "segment_ids"}},
    "show NAMESPACE": {"": {"kind", *NAMESPACE_ROW, "facts", "segment_ids"}},
    "rm SEGMENT --dry-run": {"": DELETION, "plan": PLANNED},
    "rm SEGMENT --yes": {"": DELETION, "plan": PLANNED},
    "forget acme-canary --reason left --dry-run": {"": DELETION, "plan": PLANNED},
    "forget acme-canary --reason left --yes": {"": DELETION, "plan": PLANNED},
    "expire": {"": {*DELETION, "clock_suspect", "waiting"}, "plan": PLANNED, "waiting": COUNTS},
    "hold set --tenant acme-canary --reason why": {"": {"hold"}, "hold": HOLD},
    "hold ls": {"": {"holds"}, "holds": HOLD},
    "clock show": {"": CLOCK},
    "clock accept": {"": {*CLOCK, "dry_run", "accepted", "expired_segments", "expired_bytes"}},
    "verify": {
        "": {
            "vault",
            "ok",
            "segments",
            "blocks",
            "bytes",
            "tampered",
            "lost",
            "unreadable",
            "damaged_segments",
        }
    },
    "policy diff gdpr-30d": {"": DIFF, "new": {"policy", "digest"}, **CHANGES},
    "policy apply gdpr-30d --yes": {
        "": {*DIFF, "applied", "number", "deleted"},
        "deleted": COUNTS,
        **CHANGES,
    },
    "doctor": {
        "": {"vault", "status", "findings", "removed"},
        "findings": {"name", "status", "what", "hint"},
    },
}


@pytest.mark.parametrize("command", FIELDS)
def test_json_fields(place: Place, command: str) -> None:
    line = command
    for word in ("SEGMENT", "TENANT"):
        if word in line:
            kind = f"{word.lower()}s"
            ident = run("ls", kind, *place.flags, "--json").document[kind][0]["id"]
            line = line.replace(word, ident)
    line = line.replace("NAMESPACE", NAMESPACE.digest.hex())
    result = run(*line.split(), *place.flags, "--json")
    assert result.code == 0
    assert result.err == ""
    assert result.out.isascii()
    document = result.document
    for path, names in FIELDS[command].items():
        part: Any = document[path] if path else document
        for item in part if isinstance(part, list) else [part]:
            assert set(item) == names, path


def test_json_fields_of_init(tmp_path: Path) -> None:
    document = run("init", "--vault", tmp_path / "v", "--json").document
    assert set(document) == {"vault", "vault_id", "key_provider", "policy", "warnings"}
    assert set(document["policy"]) == {"name", "digest"}
    assert set(document["key_provider"]) == PROVIDER


def test_json_fields_of_version() -> None:
    versions = {"kvvault", "python", "cryptography", "pysqlite3", "sqlalchemy", "torch", "vllm"}
    assert set(run("version", "--json").document) == versions


def test_the_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), (
        "run: python -m kvvault.cli.reference docs/cli.md"
    )


def commands(command: Any, path: str) -> dict[str, Any]:
    children = getattr(command, "commands", None)
    if children is None:
        return {path: command}
    found: dict[str, Any] = {}
    for name, child in children.items():
        found |= commands(child, f"{path} {name}")
    return found


def test_everything_is_documented() -> None:
    text = reference()
    found = commands(get_command(app), "kvvault")
    assert len(found) >= 11
    for path, command in found.items():
        assert f"## {path}\n" in text
        assert command.help, path
        for parameter in command.params:
            assert parameter.help, f"{path} {parameter.name}"
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in text


@pytest.mark.parametrize(
    "command", ["", *(path[8:] for path in commands(get_command(app), "kvvault"))]
)
def test_every_command_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.code == 0
    assert "Usage" in result.out
    assert result.err == ""


def test_every_error_code_is_in_the_reference() -> None:
    text = reference()
    for code in (0, 1, 2, 3, 10, 11, 12, 130):
        assert f"| {code} |" in text
