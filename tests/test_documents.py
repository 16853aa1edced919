"""The documents say what is: commands exist, links lead somewhere, no host is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.core
import typer.main

from kvvault.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.MULTILINE))
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("policies/*.md")]
    if path.is_file()
)

FENCED = re.compile(r"^```sh\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def _named(program: str, text: str) -> set[str]:
    """Subcommands of a program that a document names: in `code`, or in a block of commands."""
    commands = "".join(FENCED.findall(text))
    inline = re.findall(rf"`{program} ([a-z]+)", text)
    return set(inline) | set(re.findall(rf"^{program} ([a-z]+)", commands, flags=re.MULTILINE))


def _commands() -> set[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return {name for name, command in group.commands.items() if not command.hidden}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_make_target_that_is_named_exists(path: Path) -> None:
    named = _named("make", path.read_text(encoding="utf-8"))
    assert named <= TARGETS


def test_the_readme_names_the_two_commands_that_matter() -> None:
    assert {"demo", "test"} <= _named("make", README)


def test_every_make_target_explains_itself() -> None:
    explained = set(re.findall(r"^([a-z]+):.* ## ", MAKEFILE, flags=re.MULTILINE))
    assert TARGETS - explained == {"python"}  # a prerequisite, not for calling


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_that_is_named_exists(path: Path) -> None:
    assert _named("kvvault", path.read_text(encoding="utf-8")) <= _commands()


def test_every_command_is_in_the_readme() -> None:
    assert _named("kvvault", README) == _commands()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_decision_is_in_the_index_once() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\)", index, flags=re.MULTILINE)
    assert [name for _, name in listed] == sorted(p.name for p in folder.glob("[0-9]*.md"))
    assert all(name.startswith(number) for number, name in listed)
