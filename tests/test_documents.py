"""The documents say what is: commands, tests, settings and links that they name exist."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import typer.core
import typer.main

from kvvault.cli import app
from kvvault.policy.document import Policy

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


# ------------------------------------------------------ tests and requirements that are named

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REQUIREMENTS = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
CODE = sorted(
    path
    for folder in ("examples", "kvvault", "migrations", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


def _tests(path: Path) -> dict[str, str]:
    """Tests and test classes of a file, with their decorators."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[:4].lower() == "test":
            found[node.name] = " ".join(ast.unparse(mark) for mark in node.decorator_list)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_test_that_is_named_exists_and_runs_in_ci(path: Path) -> None:
    for file, name in NAMED_TEST.findall(path.read_text(encoding="utf-8")):
        tests = _tests(ROOT / file) if (ROOT / file).exists() else {}
        assert name in tests, f"{file}::{name}"
        assert "soak" not in tests[name], f"{file}::{name}"


def test_every_guarantee_names_its_tests() -> None:
    guarantees = SECURITY.partition("## Guarantees")[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*(G\d)\.", guarantees, flags=re.MULTILINE)[1:]
    assert parts[::2] == [f"G{number}" for number in range(1, 10)]
    assert all(NAMED_TEST.findall(text) for text in parts[1::2])


def _mentioned(text: str) -> tuple[set[str], set[str]]:
    """Requirements and promises that a text names, also as `test_req_c1_c6` or `promises 2, 6`."""
    requirements: set[str] = set()
    for run in re.findall(r"REQ-([A-Z]\d+(?:, (?:REQ-)?[A-Z]\d+)*)", text):
        requirements |= set(re.findall(r"[A-Z]\d+", run))
    for run in re.findall(r"test_req((?:_[a-z]\d+)+)", text):
        requirements |= set(run.upper().strip("_").split("_"))
    promises: set[str] = set()
    for run in re.findall(r"[Pp]romises? (\d+(?:(?:,| and|, and) \d+)*)", text):
        promises |= set(re.findall(r"\d+", run))
    promises |= set(re.findall(r"test_promise_(\d+)", text))
    return requirements, promises


def test_every_requirement_and_promise_that_is_named_is_listed() -> None:
    listed = re.findall(r"^\| REQ-([A-Z]\d+) \|", REQUIREMENTS, flags=re.MULTILINE)
    promised = re.findall(r"^\| (\d+) \|", REQUIREMENTS, flags=re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert promised == [str(number) for number in range(1, 13)]
    for path in [*CODE, *DOCUMENTS]:
        requirements, promises = _mentioned(path.read_text(encoding="utf-8"))
        assert requirements <= set(listed), path
        assert promises <= set(promised), path


def test_every_requirement_says_what_tests_it_or_that_it_is_to_come() -> None:
    for line in REQUIREMENTS.splitlines():
        if re.match(r"\| (REQ-|\d)", line):
            assert NAMED_TEST.search(line) or "later" in line, line


def test_the_search_for_mentions_finds_them() -> None:
    text = (
        "REQ-C1, REQ-K4 and REQ-F1, F2; def test_req_c6_k8_x; promises 2, 3 and 5; test_promise_9_x"
    )
    assert _mentioned(text) == (
        {"C1", "K4", "F1", "F2", "C6", "K8"},
        {"2", "3", "5", "9"},
    )


# -------------------------------------------------------------------- settings and metrics

VLLM = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
INTEGRATION = ROOT / "kvvault" / "integrations" / "vllm"


def test_every_setting_of_the_tier_is_documented_with_its_default() -> None:
    # Read, not imported: the documents are checked where there is no vLLM, too.
    tree = ast.parse((INTEGRATION / "tier.py").read_text(encoding="utf-8"))
    (settings,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "TierSettings"
    )
    defaults: dict[str, object] = {}
    for node in settings.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value: ast.expr | None = node.value
            if isinstance(value, ast.Call):  # Field(default=...)
                value = next(word.value for word in value.keywords if word.arg == "default")
            defaults[node.target.id] = ... if value is None else ast.literal_eval(value)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", VLLM, flags=re.MULTILINE)
    documented = {name: cell.strip("`") for name, cell in rows if name in defaults}
    assert documented.keys() == defaults.keys()
    for name, default in defaults.items():
        if default is ...:
            assert documented[name] == "required"
        else:
            assert json.loads(documented[name]) == json.loads(json.dumps(default)), name


def test_every_metric_is_documented() -> None:
    source = (INTEGRATION / "metrics.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"(kvvault_tier_\w+)"', source))
    assert names
    assert set(re.findall(r"^\| `(kvvault_tier_\w+)`", VLLM, flags=re.MULTILINE)) == names


def test_examples_of_configuration_are_json() -> None:
    examples = re.findall(r"^```json\n(.*?)^```", VLLM, flags=re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        assert json.loads(example)


# ---------------------------------------------------------------------------- architecture

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_layers_are_those_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [
        {module for module in re.split(r" *: *", layer) if not module.startswith("(")}
        for layer in layers
    ]
    (block,) = re.findall(r"^```\n(.*?)^```", ARCHITECTURE, flags=re.MULTILINE | re.DOTALL)
    # Modules stand before the first gap, what they do after it.
    described = [set(re.split(r" {2,}", line)[0].split()) for line in block.splitlines()]
    assert described == [layer for layer in checked if layer]


def test_every_thread_is_listed() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in CODE if path.is_relative_to(ROOT / "kvvault")
    )
    names = set(re.findall(r'name(?:_prefix)?(?:: str)? ?= ?"(kvvault-[a-z-]+)"', source))
    listed = set(re.findall(r"^\| `(kvvault-[a-z-]+?)-?\*?` \|", ARCHITECTURE, flags=re.MULTILINE))
    assert names == listed


def test_the_readmes_policy_is_one() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    policy = Policy.parse(example, name="README.md")
    assert [rule.name for rule in policy.rules] == ["research", "default"]
