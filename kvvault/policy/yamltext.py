"""YAML as policies use it, with the line of everything.

A small part of YAML on purpose. There is one document of mappings, lists and scalars. A plain
scalar is text, except for ``true`` and ``false``: nobody's label ``no`` becomes false and nobody's
``12:30`` a number. Refused are keys without a value, keys that stand twice (one of them would be
ignored), anchors and aliases (a few lines of them make gigabytes), tags (they make objects), and
everything too long or too deep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NoReturn

import yaml

from kvvault.errors import PolicyError

__all__ = ["MAX_SOURCE_BYTES", "Located", "read_yaml"]

MAX_SOURCE_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 16

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same grammar, ten times as fast where PyYAML was built with libyaml."""
_WORDS: Final = {"true": True, "false": False}
_NOTHING: Final = frozenset({"", "~", "null"})

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
Value = str | bool | list["Value"] | dict[str, "Value"]


@dataclass(frozen=True, slots=True)
class Located:
    """A document, and where its parts stand."""

    name: str
    """What to call the file in errors."""
    value: dict[str, Value] = field(repr=False)
    lines: dict[Path, int] = field(repr=False)
    """Line of each key and list item, from 1."""

    def line(self, path: Path) -> int:
        """The line of a value, or of the nearest thing around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def refuse(self, path: Path, problem: str, *, hint: str) -> NoReturn:
        """
        :raises PolicyError: always, with file and line.
        """
        raise PolicyError(f"{self.name}:{self.line(path)}: {problem}", hint=hint)


def read_yaml(source: str, *, name: str) -> Located:
    """Read one document.

    :param name: what to call the file in errors.
    :raises PolicyError: not such a document; says where.
    """
    return _Reader(source, name).document()


class _Reader:
    def __init__(self, source: str, name: str) -> None:
        self._name = name
        self._lines: dict[Path, int] = {}
        try:
            size = len(source.encode())
        except UnicodeEncodeError:
            self._refuse(1, "this is not Unicode text", "save the file as UTF-8")
        if size > MAX_SOURCE_BYTES:
            self._refuse(1, "the file is larger than 1 MiB", "a policy is a page or two")
        self._events: Iterator[yaml.Event] = iter(yaml.parse(source, Loader=_LOADER))
        self._next: Callable[[], yaml.Event] = self._take

    def document(self) -> Located:
        self._expect(yaml.StreamStartEvent)
        event = self._next()
        if isinstance(event, yaml.StreamEndEvent):
            self._refuse(1, "there is nothing in this file", "see docs/policies.md")
        event = self._next()  # after the document's start
        if not isinstance(event, yaml.MappingStartEvent):
            self._refuse(
                _line(event), "this is no mapping of keys to values", "see docs/policies.md"
            )
        self._check(event)
        value = self._mapping((), 1)
        self._expect(yaml.DocumentEndEvent)
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(
                _line(event), "a second document begins here", "keep one document in a file"
            )
        return Located(self._name, value, self._lines)

    def _take(self) -> yaml.Event:
        try:
            return next(self._events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = 1 if mark is None else mark.line + 1
            self._refuse(line, f"this is not YAML: {error.problem or error.context}", "correct it")
        except (yaml.YAMLError, ValueError):
            self._refuse(
                1, "this is not YAML: a character that may not be in it", "save it as plain text"
            )

    def _expect(self, kind: type[yaml.Event]) -> None:
        event = self._next()
        if not isinstance(event, kind):
            self._refuse(_line(event), "this is not one YAML document", "see docs/policies.md")

    def _check(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(
                _line(event), "anchors and aliases (& and *) are not used here",
                "write the value out; quote text that begins with & or *",
            )  # fmt: skip
        if getattr(event, "tag", None) is not None:
            self._refuse(
                _line(event), "tags (!) are not used here", "quote text that begins with !"
            )

    def _value(self, event: yaml.Event, path: Path, depth: int) -> Value:
        self._check(event)
        if isinstance(event, yaml.ScalarEvent):
            plain = event.implicit[0]
            if plain and event.value in _NOTHING:
                # Taken as "not given", a forgotten pattern would make a rule match everything.
                self._refuse(_line(event), "no value stands here", "write one, or remove the key")
            return _WORDS.get(event.value, event.value) if plain else event.value
        if depth > _MAX_DEPTH:
            self._refuse(_line(event), "this is nested too deeply", "see docs/policies.md")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path, depth)
        return self._list(path, depth)

    def _list(self, path: Path, depth: int) -> list[Value]:
        items: list[Value] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            place = (*path, len(items))
            self._lines[place] = _line(event)
            items.append(self._value(event, place, depth + 1))
        return items

    def _mapping(self, path: Path, depth: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            self._check(event)
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(_line(event), "a key is text", "see docs/policies.md")
            key = event.value
            place = (*path, key)
            if key in values:
                self._refuse(
                    _line(event),
                    f"the key {key[:40]!r} stands here a second time, first in line "
                    f"{self._lines[place]}",
                    "remove one of the two",
                )
            self._lines[place] = _line(event)
            values[key] = self._value(self._next(), place, depth + 1)
        return values

    def _refuse(self, line: int, problem: str, hint: str) -> NoReturn:
        raise PolicyError(f"{self._name}:{line}: {problem}", hint=hint) from None


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 1 if mark is None else int(mark.line) + 1
