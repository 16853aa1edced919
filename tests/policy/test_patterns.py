"""Patterns, against the definition and against each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.policy.patterns import covers, matches, matches_any

PATTERNS = st.text(alphabet="ab*?", min_size=1, max_size=6)
SETS = st.lists(PATTERNS, min_size=1, max_size=3)
TEXTS = ["".join(chars) for n in range(7) for chars in itertools.product("abz", repeat=n)]


def by_definition(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(by_definition(pattern[1:], text[cut:]) for cut in range(len(text) + 1))
    return bool(text) and pattern[0] in ("?", text[0]) and by_definition(pattern[1:], text[1:])


@given(PATTERNS, st.text(alphabet="abz*?", max_size=7))
def test_matching_is_what_it_is_defined_as(pattern: str, text: str) -> None:
    assert matches(pattern, text) == by_definition(pattern, text)


@given(SETS, SETS)
def test_covering_is_what_it_is_defined_as(wide: list[str], narrow: list[str]) -> None:
    """Six characters are enough for a counterexample to patterns of six that is not longer."""
    counterexample = any(matches_any(narrow, t) and not matches_any(wide, t) for t in TEXTS)
    if covers(wide, narrow):
        assert not counterexample
    if counterexample:
        assert not covers(wide, narrow)


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (["*"], ["anything-*"], True),
        (["team-*"], ["team-a", "team-b*"], True),
        (["team-*"], ["tea*"], False),
        (["?*"], ["*"], False),
        (["*", "x"], ["*"], True),
        (["a*", "*b"], ["a?b", "aab"], True),
        (["a*", "?", "??*"], ["?*"], True),
        (["[ab]"], ["a"], False),  # nothing but * and ? is special
        (["A*"], ["a1"], False),
    ],
)
def test_covering(wide: list[str], narrow: list[str], expected: bool) -> None:
    assert covers(wide, narrow) is expected


@pytest.mark.parametrize("pattern", ["*a*a*a*a*a*a*a*b", "*" * 200 + "b", "a" * 256])
def test_no_text_makes_matching_slow(pattern: str) -> None:
    assert not matches(pattern, "a" * 100_000)


def test_covering_gives_up_rather_than_taking_for_ever() -> None:
    hard = "*a" + "?" * 30
    assert not covers([hard + "b", "*b" + "?" * 25], [hard, "*"])
    assert not covers([hard], ["*a" + "?" * 30 + "*a" + "?" * 30])
