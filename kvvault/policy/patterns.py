"""Patterns of names: ``*`` is any run of characters, ``?`` any one, everything else itself.

Nothing else is special, and case matters: tenants and models are names, not paths. So whether one
set of patterns contains another can be decided exactly (`covers`), which is how a policy finds
rules that can never be reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["covers", "matches", "matches_any"]

_MOST_STATES: Final = 2_000
"""How much `covers` looks at before it gives up. Patterns that people write need a few dozen."""
_OTHER: Final = ""
"""Stands for a character that occurs in none of the patterns."""

_UNLIKELY: Final = "\x7f"
"""A character that no pattern of a policy has."""

_State = frozenset[tuple[int, int]]
"""(pattern, position) pairs: everywhere that reading some text may have led."""


def matches(pattern: str, text: str) -> bool:
    """Whether all of `text` fits. Time at most their lengths' product, whatever the pattern: no
    text that a client chooses makes it slow."""
    at, here = 0, 0
    star, retry = -1, 0
    while here < len(text):
        if at < len(pattern) and pattern[at] == "*":
            star, retry = at, here
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", text[here]):
            at += 1
            here += 1
        elif star >= 0:
            retry += 1  # let the last star take one more character
            at, here = star + 1, retry
        else:
            return False
    return all(char == "*" for char in pattern[at:])


def matches_any(patterns: Sequence[str], text: str) -> bool:
    """Whether one of the patterns fits."""
    return any(matches(pattern, text) for pattern in patterns)


def covers(wide: Sequence[str], narrow: Sequence[str]) -> bool:
    """Whether every text that fits one of `narrow` fits one of `wide`.

    Both are read as automata side by side; a text that leads only one of them to its end is a
    counterexample. In doubt (more than `_MOST_STATES` states) the answer is no.
    """
    for text in _samples(narrow):  # most pairs have nothing in common, and this is cheap
        if not matches_any(wide, text):
            return False
    letters = {char for pattern in (*wide, *narrow) for char in pattern} - {"*", "?"}
    alphabet = [*sorted(letters), _OTHER]
    first = (_start(wide), _start(narrow))
    seen = {first}
    todo = deque([first])
    while todo:
        outer, inner = todo.popleft()
        if _ended(narrow, inner) and not _ended(wide, outer):
            return False
        for char in alphabet:
            after = (_step(wide, outer, char), _step(narrow, inner, char))
            if after[1] and after not in seen:
                if len(seen) >= _MOST_STATES:
                    return False
                seen.add(after)
                todo.append(after)
    return True


def _samples(patterns: Sequence[str]) -> Iterator[str]:
    """Some texts that fit."""
    for pattern in patterns:
        yield pattern.replace("*", "").replace("?", _UNLIKELY)
        yield pattern.replace("*", _UNLIKELY).replace("?", _UNLIKELY)


def _start(patterns: Sequence[str]) -> _State:
    return _closed(patterns, {(index, 0) for index in range(len(patterns))})


def _closed(patterns: Sequence[str], state: set[tuple[int, int]]) -> _State:
    """A star may also stand for nothing."""
    closed = set(state)
    for index, position in state:
        pattern = patterns[index]
        at = position
        while at < len(pattern) and pattern[at] == "*":
            at += 1
            closed.add((index, at))
    return frozenset(closed)


def _step(patterns: Sequence[str], state: _State, char: str) -> _State:
    after: set[tuple[int, int]] = set()
    for index, position in state:
        pattern = patterns[index]
        if position == len(pattern):
            continue
        wanted = pattern[position]
        if wanted == "*":
            after.add((index, position))
        elif wanted in ("?", char):
            after.add((index, position + 1))
    return _closed(patterns, after)


def _ended(patterns: Sequence[str], state: _State) -> bool:
    return any(position == len(patterns[index]) for index, position in state)
