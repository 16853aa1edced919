"""Tests of a policy: requests, and what shall become of them.

A file ``NAME.test.yaml`` stands beside the policy ``NAME.yaml`` (or names another)::

    cases:
      - name: a clinic's chats
        tenant: clinic-7
        labels: {kind: chat}
        class: session
        expect: {rule: clinics, delete_by: 1h}

What `expect` does not mention is not looked at. A rule that no case reaches is reported: what is
not tested is what changes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from kvvault.errors import PolicyError
from kvvault.policy import shipped
from kvvault.policy.decide import Facts, Verdict, decide
from kvvault.policy.document import Policy, Record
from kvvault.policy.durations import format_duration, format_size, parse_duration, parse_size
from kvvault.policy.form import Form, Name, RecordWord, Switch, Text, validated
from kvvault.policy.yamltext import read_yaml

__all__ = ["Case", "Outcome", "Suite", "SuiteOutcome", "run_directory", "run_file", "worded"]

_SUFFIX: Final = ".test.yaml"
_MAX_CASES: Final = 10_000


def _or(word: str, parse: Callable[[object], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value == word else parse(value))


def _string(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("write text, in quotes if it is true, false or null")


_String = Annotated[str, BeforeValidator(_string)]


class _ExpectForm(Form):
    rule: Name
    persist: Switch = True
    delete_by: Annotated[float | None, _or("never", parse_duration)] = None
    idle: Annotated[float | None, _or("never", parse_duration)] = None
    keep_at_least: Annotated[float | None, _or("none", parse_duration)] = None
    max_bytes: Annotated[int | None, _or("none", parse_size)] = None
    record: RecordWord = "none"
    retention_class: Annotated[str | None, _or("none", _string)] = Field(None, alias="class")
    reason: Text | None = None


class _CaseForm(Form):
    name: Text
    tenant: _String
    model: _String | None = None
    namespace: dict[str, _String] = Field(default_factory=dict)
    labels: dict[str, _String] = Field(default_factory=dict)
    retention_class: _String | None = Field(None, alias="class")
    expect: _ExpectForm


class _SuiteForm(Form):
    policy: _String | None = None
    cases: tuple[_CaseForm, ...] = Field(min_length=1, max_length=_MAX_CASES)


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what is expected of it."""

    name: str
    line: int
    facts: Facts = field(repr=False)
    expected: Mapping[str, object] = field(repr=False)
    """By the names of `worded`; `reason`: a part of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case."""

    case: Case
    verdict: Verdict
    differences: tuple[str, ...]
    """``delete_by is 24h, not 1h``; empty: it passed."""

    @property
    def passed(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True)
class SuiteOutcome:
    """What became of one file of tests."""

    file: str
    policy: str
    outcomes: tuple[Outcome, ...]
    untested: tuple[str, ...]
    """Rules of the policy that governed no case."""

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Suite:
    """A file of tests."""

    file: str
    policy_file: str | None
    """The policy that is tested; None: the one that has its name."""
    cases: tuple[Case, ...]

    @classmethod
    def parse(cls, source: str, *, name: str) -> Suite:
        """Read a file of tests.

        :param name: what to call it in errors and results.
        :raises PolicyError: it is not one; the message begins with ``name:line:``.
        """
        located = read_yaml(source, name=name)
        form = validated(_SuiteForm, located)
        cases = []
        for index, case in enumerate(form.cases):
            facts = dict(case.namespace)
            if case.model is not None:
                facts["model"] = case.model
            expect = case.expect
            wanted = {key: getattr(expect, key) for key in expect.model_fields_set}
            if wanted.get("keep_at_least", 0.0) is None:
                wanted["keep_at_least"] = 0.0
            cases.append(
                Case(
                    case.name,
                    located.line(("cases", index)),
                    Facts(case.tenant, facts, dict(case.labels), case.retention_class),
                    wanted,
                )
            )
        return cls(name, form.policy, tuple(cases))

    def run(self, policy: Policy) -> SuiteOutcome:
        """Ask the policy about every case. Pure."""
        outcomes = tuple(_run(policy, case) for case in self.cases)
        reached = {outcome.verdict.rule for outcome in outcomes}
        untested = tuple(rule.name for rule in policy.rules if rule.name not in reached)
        return SuiteOutcome(self.file, policy.name, outcomes, untested)


def run_file(path: Path) -> SuiteOutcome:
    """Run the tests of one file.

    :raises PolicyError: it, or the policy that it tests, cannot be read or is refused.
    """
    suite = Suite.parse(shipped.read_text(path), name=str(path))
    if suite.policy_file is not None:
        policy = path.parent / suite.policy_file
    else:
        policy = path.with_name(f"{path.name.removesuffix(_SUFFIX)}.yaml")
    return suite.run(shipped.read(policy))


def run_directory(path: Path) -> Iterator[SuiteOutcome]:
    """Run the tests of a directory's ``*.test.yaml``, in the order of their names; or of one file.

    :raises PolicyError: there are none, the file is none (by its name), or as `run_file`.
    """
    if not path.is_dir() and not path.name.endswith(_SUFFIX):
        raise PolicyError(
            f"{path} is no file of tests: their names end in {_SUFFIX}",
            hint=f"tests of NAME.yaml stand in NAME{_SUFFIX}; for a policy: kvvault policy check",
        )
    files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise PolicyError(
            f"there are no tests in {path}", hint=f"tests of NAME.yaml stand in NAME{_SUFFIX}"
        )
    return map(run_file, files)


def worded(verdict: Verdict) -> dict[str, str]:
    """A verdict in the words of a policy file; without the reason. What is never written has no
    deadline, which is not one that never comes."""
    words = {key: _word(key, value) for key, value in _values(verdict).items()}
    return words if verdict.persist else words | dict.fromkeys(_OF_WHAT_IS_KEPT, "-")


def _run(policy: Policy, case: Case) -> Outcome:
    verdict = decide(policy, case.facts)
    got = _values(verdict)
    differences = [
        f"{key.replace('retention_class', 'class')} is {_word(key, got[key])}, "
        f"not {_word(key, wanted)}"
        for key, wanted in sorted(case.expected.items())
        if key != "reason" and got[key] != wanted
    ]
    reason = case.expected.get("reason")
    if isinstance(reason, str) and reason not in verdict.reason:
        differences.append(f"the reason is {verdict.reason!r}, without {reason!r}")
    return Outcome(case, verdict, tuple(differences))


def _values(verdict: Verdict) -> dict[str, object]:
    return {
        "rule": verdict.rule,
        "persist": verdict.persist,
        "delete_by": verdict.delete_by_s,
        "idle": verdict.idle_s,
        "keep_at_least": verdict.keep_at_least_s,
        "max_bytes": verdict.max_bytes,
        "record": verdict.record.value,
        "retention_class": verdict.retention_class or None,
    }


_OF_WHAT_IS_KEPT: Final = ("delete_by", "idle", "keep_at_least", "max_bytes", "record")
_ABSENT: Final[Mapping[str, Literal["never", "none"]]] = {"delete_by": "never", "idle": "never"}


def _word(key: str, value: object) -> str:
    if value is None or (key == "keep_at_least" and value == 0.0):
        return _ABSENT.get(key, "none")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return format_duration(value)
    if isinstance(value, int):
        return format_size(value)
    return value.value if isinstance(value, Record) else str(value)
