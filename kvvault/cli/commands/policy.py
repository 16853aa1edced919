"""policy show, check, test, explain, diff, apply, schema."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvvault.cli.commands import applying
from kvvault.cli.formats import Cell
from kvvault.cli.run import Run, command
from kvvault.errors import UsageError

if TYPE_CHECKING:
    from kvvault.policy.cases import Outcome, SuiteOutcome
    from kvvault.policy.decide import Facts, Verdict
    from kvvault.policy.document import Policy, Rule, VaultLimits

__all__ = ["register"]

_FILE = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="A policy file, or the name of a policy that comes with kvvault. If not given: the "
        "policy in force in the vault that is named, or else the one named default.",
    ),
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(name="policy", help="Look at policies, check, test and apply them.")
    command(group, "show")(show)
    command(group, "check", vault=False)(check)
    command(group, "test", vault=False)(run_tests)
    command(group, "explain")(explain)
    applying.register(group)
    command(group, "schema", vault=False)(schema)
    app.add_typer(group)


def show(
    run: Run,
    file: _FILE = None,
    source: Annotated[
        bool, typer.Option("--source", help="Print the file itself, with its comments.")
    ] = False,
) -> int | None:
    """Show a policy: its rules in the order in which they are tried, and its limits."""
    policy = _policy(run, file)
    if run.output.json:
        run.output.document(
            {
                **_head(policy),
                "description": policy.description,
                "vault": _limits(policy.vault),
                "rules": [_rule(rule) for rule in policy.rules],
                "source": policy.source,
            }
        )
    elif source:
        run.output.lines(*policy.source.splitlines())
    else:
        run.output.pairs(
            [
                ("policy", policy.name),
                ("digest", policy.digest.hex()),
                ("description", policy.description),
                *_limit_words(policy.vault),
            ]
        )
        run.output.lines("")
        columns = ("persist", "delete_by", "idle", "keep_at_least", "max_bytes", "record")
        run.output.table(
            ["RULE", "CLASS", "FOR", *(name.upper() for name in columns)],
            [_row(rule, columns) for rule in policy.rules],
        )
        run.output.lines("")
        run.output.table(
            ["RULE", "OWNER", "JUSTIFICATION"],
            [[Cell(one.name), Cell(one.owner), Cell(one.justification)] for one in policy.rules],
        )
    return None


def check(
    run: Run,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A policy file, or the name of one that comes with kvvault."
        ),
    ],
) -> int | None:
    """Check that a policy makes sense. What does not is named with file and line (exit code 2)."""
    from kvvault.policy import shipped

    policy = shipped.find(file)
    if run.output.json:
        run.output.document({**_head(policy), "ok": True, "rules": len(policy.rules)})
    else:
        count = len(policy.rules)
        run.output.lines(
            f"{policy.name}: ok, {count} rule{'s' if count > 1 else ''}, {policy.digest.hex()}"
        )
    return None


def run_tests(
    run: Run,
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Where *.test.yaml are, or one such file; the policies that come with kvvault if "
            "not given.",
        ),
    ] = None,
) -> int | None:
    """Test policies: ask them about the requests in *.test.yaml and compare the verdicts.

    The exit code is 1 when a verdict differs. Rules that no test reaches are reported.
    """
    from kvvault.policy import cases, shipped

    place = shipped.directory() if directory is None else Path(directory)
    suites = list(cases.run_directory(place))
    passed = all(suite.passed for suite in suites)
    if run.output.json:
        run.output.document({"ok": passed, "files": [_suite(suite) for suite in suites]})
    else:
        for suite in suites:
            run.output.lines(*_suite_lines(suite))
    return 0 if passed else 1


def explain(
    run: Run,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant's name.")],
    file: _FILE = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model's name.")
    ] = None,
    facts: Annotated[
        list[str] | None,
        typer.Option(
            "--fact",
            metavar="NAME=VALUE",
            help="A fact of the namespace, such as kv.dtype=bfloat16; several times for several.",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME=VALUE",
            help="A label of the request; several times for several.",
        ),
    ] = None,
    retention_class: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="The retention class that it asks for."),
    ] = None,
) -> int | None:
    """Say which rule governs a request, and why: what becomes of its blocks, and which rules were
    tried."""
    from kvvault.policy import decide

    policy = _policy(run, file)
    named = _pairs("--fact", facts)
    if model is not None:
        named["model"] = model
    asked = decide.Facts(tenant, named, _pairs("--label", labels), retention_class)
    _explained(run, policy, asked)
    return None


def schema(run: Run) -> int | None:
    """Print the JSON schema of policy files, for editors and other checkers."""
    from kvvault.policy import form

    run.output.document(form.schema())
    return None


def _policy(run: Run, file: str | None) -> Policy:
    """What was named, else what is in force in the vault, else the default. Errors as
    `shipped.find` and `Run.open_vault`."""
    from kvvault.policy import shipped

    if file is not None:
        return shipped.find(file)
    if run.settings.vault is None:
        return shipped.load()
    with run.open_vault() as vault:
        return vault.policy()


# -- in words and in JSON ------------------------------------------------------------------------


def _head(policy: Policy) -> dict[str, object]:
    return {"policy": policy.name, "digest": policy.digest.hex()}


def _limits(limits: VaultLimits) -> dict[str, int | float | None]:
    return {
        "cap_bytes": limits.cap_bytes,
        "cap_fraction": limits.cap_fraction,
        "free_floor_bytes": limits.free_floor_bytes,
        "high_watermark": limits.high_watermark,
        "low_watermark": limits.low_watermark,
        "purge_interval_s": limits.purge_interval_s,
        "segment_bytes": limits.segment_bytes,
        "window_s": limits.window_s,
        "clock_jump_s": limits.clock_jump_s,
    }


def _limit_words(limits: VaultLimits) -> list[tuple[str, str]]:
    """In the words of a policy file."""
    from kvvault.policy.durations import format_duration, format_share, format_size

    if limits.cap_bytes is not None:
        cap = format_size(limits.cap_bytes)
    else:
        cap = f"{format_share(limits.cap_fraction or 0.0)} of the file system"
    segment = limits.segment_bytes
    return [
        ("cap", cap),
        ("free_floor", format_size(limits.free_floor_bytes)),
        ("high_watermark", f"{format_share(limits.high_watermark)} of the cap"),
        ("low_watermark", f"{format_share(limits.low_watermark)} of the cap"),
        ("purge_every", format_duration(limits.purge_interval_s)),
        ("segment", "as kvvault is set" if segment is None else format_size(segment)),
        ("window", format_duration(limits.window_s)),
        ("clock_jump", format_duration(limits.clock_jump_s)),
    ]


def _rule(rule: Rule) -> dict[str, object]:
    return {
        "name": rule.name,
        "line": rule.line,
        "class": rule.retention_class,
        "match": {
            "tenant": list(rule.match.tenant),
            "namespace": {name: list(patterns) for name, patterns in rule.match.facts},
            "labels": {name: list(patterns) for name, patterns in rule.match.labels},
        },
        "persist": rule.persist,
        "delete_by_s": rule.delete_by_s,
        "idle_s": rule.idle_s,
        "keep_at_least_s": rule.keep_at_least_s,
        "max_bytes": rule.max_bytes,
        "record": rule.record.value,
        "owner": rule.owner,
        "justification": rule.justification,
    }


def _row(rule: Rule, columns: Iterable[str]) -> list[Cell]:
    from kvvault.policy.cases import worded
    from kvvault.policy.decide import verdict_of

    words = worded(verdict_of(rule))
    conditions = [
        *(("tenant", rule.match.tenant),) * bool(rule.match.tenant),
        *rule.match.facts,
        *((f"label {name}", patterns) for name, patterns in rule.match.labels),
    ]
    matched = "; ".join(f"{name} {' or '.join(patterns)}" for name, patterns in conditions)
    return [
        Cell(rule.name),
        Cell(rule.retention_class or "-"),
        Cell(matched or "everything"),
        *(Cell(words[name]) for name in columns),
    ]


def _verdict(verdict: Verdict) -> dict[str, object]:
    return {
        "persist": verdict.persist,
        "delete_by_s": verdict.delete_by_s,
        "idle_s": verdict.idle_s,
        "keep_at_least_s": verdict.keep_at_least_s,
        "max_bytes": verdict.max_bytes,
        "record": verdict.record.value,
        "class": verdict.retention_class or None,
        "rule": verdict.rule,
        "reason": verdict.reason,
    }


def _explained(run: Run, policy: Policy, facts: Facts) -> None:
    from kvvault.policy.cases import worded
    from kvvault.policy.decide import decide, explain

    verdict = decide(policy, facts)
    tried = explain(policy, facts)
    governing = next(rule for rule in policy.rules if rule.name == verdict.rule)
    if run.output.json:
        run.output.document(
            {
                **_head(policy),
                "verdict": _verdict(verdict),
                "owner": governing.owner,
                "justification": governing.justification,
                "tried": [
                    {
                        "rule": one.rule.name,
                        "line": one.rule.line,
                        "class": one.rule.retention_class,
                        "matched": not one.obstacle,
                        "why_not": one.obstacle or None,
                    }
                    for one in tried
                ],
            }
        )
        return
    run.output.lines(verdict.reason, "")
    run.output.pairs(
        [
            *((name.replace("retention_", ""), text) for name, text in worded(verdict).items()),
            ("owner", governing.owner),
            ("justification", governing.justification),
        ]
    )
    run.output.lines("")
    run.output.table(
        ["TRIED", "LINE", "CLASS", "OUTCOME"],
        [
            [
                Cell(one.rule.name),
                Cell(str(one.rule.line), right=True),
                Cell(one.rule.retention_class or "-"),
                Cell(one.obstacle or "matches"),
            ]
            for one in tried
        ],
    )


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """
    :raises UsageError: not NAME=VALUE, or a name twice. Repeats none of it: it could name somebody.
    """
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"{option}: that is not NAME=VALUE", hint=f"as in {option} kind=chat")
        if name in pairs:
            raise UsageError(f"{option}: a name is given twice", hint="give each name once")
        pairs[name] = value
    return pairs


def _suite(suite: SuiteOutcome) -> dict[str, Any]:
    return {
        "file": suite.file,
        "policy": suite.policy,
        "ok": suite.passed,
        "cases": [
            {
                "name": outcome.case.name,
                "line": outcome.case.line,
                "ok": outcome.passed,
                "differences": list(outcome.differences),
                "verdict": _verdict(outcome.verdict),
            }
            for outcome in suite.outcomes
        ],
        "untested_rules": list(suite.untested),
    }


def _suite_lines(suite: SuiteOutcome) -> Iterable[str]:
    failed = [outcome for outcome in suite.outcomes if not outcome.passed]
    count = len(suite.outcomes)
    yield f"{suite.file}: {count - len(failed)} of {count} passed"
    for outcome in failed:
        yield from _failure_lines(suite.file, outcome)
    if suite.untested:
        yield f"  no test reaches: {', '.join(suite.untested)}"


def _failure_lines(file: str, outcome: Outcome) -> Iterable[str]:
    yield f"  {file}:{outcome.case.line}: {outcome.case.name}"
    for difference in outcome.differences:
        yield f"    {difference}"
