"""Writes docs/cli.md from the commands themselves: ``python -m kvvault.cli.reference``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvvault import errors
from kvvault.cli.app import app
from kvvault.cli.columns import Column
from kvvault.cli.inventory import Inventory
from kvvault.promptfacts import NUMBERS, TEXTS

__all__ = ["reference"]

_HEAD = """\
# Command line

<!-- Generated: python -m kvvault.cli.reference > docs/cli.md -->

stdout is data, stderr is progress, warnings and errors. With `--json` a command prints exactly one
JSON document on stdout; field names are stable and only get added, sizes are bytes, times are
ISO 8601 in UTC. Errors are two lines on stderr (`error:` what happened, `hint:` what to do), or,
with `--json`, one JSON document per line.

Looking never repairs: `status`, `df`, `ls`, `show`, `verify` and `doctor` open the vault for
reading, beside running engines and on read-only file systems too.

## Settings

Flags come before environment variables, these before the config file, and that before defaults.

| flag | variable | in the config file | meaning |
|---|---|---|---|
| `--vault DIR` | `KVVAULT_VAULT` | `vault` | the vault's directory |
| `--key-provider URI` | `KVVAULT_KEY_PROVIDER` | `key_provider` | where the keys are, instead of \
where the vault says |
| `--json` | `KVVAULT_OUTPUT=json` | `output = "json"` | JSON instead of text |
| `--debug` | `KVVAULT_DEBUG=1` | `debug = true` | tracebacks with errors |
| `--config FILE` | `KVVAULT_CONFIG` | | the config file; otherwise `kvvault/config.toml` in the \
user's configuration directory |

The config file is TOML without sections. A name in it that is not a setting is an error.
`NO_COLOR` is respected.
"""

_SETTINGS: Final = frozenset({"--vault", "--key-provider", "--config", "--json", "--debug"})
"""Options that every command has; described once."""


def reference() -> str:
    """The whole document."""
    root = get_command(app)
    return "\n".join(
        [_HEAD, *_exit_codes(), *_commands(root, typer.Context(root, info_name="kvvault"))]
    )


def _exit_codes() -> list[str]:
    codes: dict[int, list[str]] = {0: ["ok"]}
    for name in errors.__all__:
        kind: type[errors.KvvaultError] = getattr(errors, name)
        codes.setdefault(kind.exit_code, []).append(f"`{name}`")
    lines = ["## Exit codes", "", "| code | errors |", "|---|---|"]
    lines += [f"| {code} | {', '.join(names)} |" for code, names in sorted(codes.items())]
    lines += [
        "",
        "`verify` and `doctor` also exit with 1 when what they check fails, `verify` with 3 when",
        "some of it could not be checked.",
        "",
    ]
    return lines


def _commands(command: Any, context: typer.Context) -> list[str]:
    """A section for each command below `command`. Its type is click's or typer's own, depending on
    typer's version."""
    if not isinstance(command, TyperGroup):
        return _section(command, context)
    lines: list[str] = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            lines += _commands(child, typer.Context(child, parent=context, info_name=name))
    return lines


def _section(command: Any, context: typer.Context) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = [context.command_path, "[OPTIONS]", *(_placeholder(a) for a in arguments)]
    lines = [f"## {context.command_path}", "", "```", " ".join(usage), "```", ""]
    lines += [inspect.cleandoc(command.help), ""]
    rows = [(argument.metavar, argument.help) for argument in arguments]
    rows += [
        record
        for record in (option.get_help_record(context) for option in options)
        if record is not None and record[0].split()[0] not in _SETTINGS
    ]
    if any(option.name == "sort" for option in options):
        lines += _prompt_fields() if "prompts" in context.command_path else _fields()
    if rows:
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{_escape(form)}` | {_escape(text)} |" for form, text in rows]
        lines.append("")
    settings = [o.opts[0] for o in options if o.opts[0] in _SETTINGS]
    return [*lines, f"[Settings](#settings): {', '.join(f'`{name}`' for name in settings)}.", ""]


def _fields() -> list[str]:
    """What `ls` can filter and sort by."""
    nothing = Inventory([], [], [], 0.0)
    kinds: dict[str, Sequence[Column[Any]]] = {
        "segments": nothing.segment_columns,
        "tenants": nothing.tenant_columns,
        "namespaces": nothing.namespace_columns,
    }
    lines = [
        "Fields for `--filter` and `--sort`:",
        "",
        "| of | fields and their types |",
        "|---|---|",
    ]
    for kind, columns in kinds.items():
        fields = ", ".join(f"`{column.name}` {column.kind.value}" for column in columns)
        lines.append(f"| {kind} | {fields} |")
    return [
        *lines,
        "",
        "Operators are `=` `!=` for all, `<` `<=` `>` `>=` for counts, sizes (`64KiB`, `1.5GB`),",
        "times (`2026-01-31T12:00:00Z`) and durations (`15m`, `7d`), `~` (contains) for text. `=`",
        "compares an id by its beginning.",
        "",
    ]


def _prompt_fields() -> list[str]:
    """What `prompts ls` can filter and sort by."""
    numbers = ", ".join(f"`{name}` {kind}" for name, kind in NUMBERS.items())
    texts = ", ".join(f"`{name}`" for name in TEXTS)
    return [
        "Fields for `--filter` and `--sort`:",
        "",
        f"{numbers}.",
        "",
        f"For `--filter` only, with `=` and `!=`: {texts},",
        "`label.NAME`. Names, subjects and request ids are encrypted, so they are compared as a",
        "whole; ids by their beginning. `bytes` is all that a prompt has, `alone` what no other",
        "prompt has, `shared` the rest, `idle` the time since it was last used, `deadline` when",
        "the last of it is destroyed.",
        "",
    ]


def _placeholder(argument: Any) -> str:
    name = argument.metavar + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _escape(text: str) -> str:
    """For a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())
