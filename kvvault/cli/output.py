"""How results, warnings and errors reach stdout and stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from kvvault.errors import KvvaultError, OperationCancelledError, StorageError, UsageError

if TYPE_CHECKING:
    from kvvault.cli.formats import Cell

__all__ = ["Bar", "Output", "printable"]

_WIDE = 1 << 40
"""Columns that a line may have: nothing is wrapped or cut off, on no terminal. Costs nothing."""


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal could act on, or that is no character (bytes
    of a file name that are not UTF-8)."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


@dataclass(slots=True)
class Output:
    """Where one command's results go. Streams are looked up for each write, so tests can replace
    them. Main thread only, except `warning`, which is one write."""

    json: bool = False
    """One JSON document on stdout, JSON lines on stderr."""
    debug: bool = False
    """Errors come with a traceback."""

    # -- stdout -----------------------------------------------------------------------------------

    def document(self, document: Mapping[str, object]) -> None:
        """The result, as JSON. ASCII only, so that no locale can damage it.

        :raises StorageError: stdout takes no more (a full disk); a closed pipe is no error.
        """
        self._write_stdout(json.dumps(document, indent=2, allow_nan=False) + "\n")

    def lines(self, *lines: str) -> None:
        """Text for people, one line each. Errors as `document`."""
        self._write_stdout("".join(f"{printable(line)}\n" for line in lines))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Aligned columns, in full whatever the terminal's width. Errors as `document`."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
        for index, name in enumerate(header):
            right = bool(rows) and all(row[index].right for row in rows)
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(printable(cell.text)) for cell in row))
        self._render(table)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        """ "name  value" lines, aligned. Errors as `document`."""
        width = max((len(name) for name, _ in pairs), default=0)
        self.lines(*(f"{name:<{width}}  {value}".rstrip() for name, value in pairs))

    def verdicts(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        """(status, name, what, hint) of findings, the status in colour on a terminal. Errors as
        `document`."""
        from rich.text import Text

        colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        width = max((len(name) for _, name, _, _ in rows), default=0)
        text = Text()
        for status, name, what, hint in rows:
            text.append(f"{status:<4}", style=colours.get(status, ""))
            text.append(f"  {name:<{width}}  {printable(what)}\n")
            if hint:
                text.append(f"{'':<{width + 6}}  -> {printable(hint)}\n", style="dim")
        text.rstrip()
        self._render(text)

    def _render(self, what: object) -> None:
        from rich.console import Console

        stream = sys.stdout
        console = Console(
            file=stream,
            width=_WIDE,
            markup=False,
            highlight=False,
            emoji=False,
        )
        with console.capture() as capture:
            console.print(what)
        lines = capture.get().splitlines()
        self._write_stdout("".join(f"{line.rstrip()}\n" for line in lines))

    def _write_stdout(self, text: str) -> None:
        stream = sys.stdout
        if stream is None:
            return  # started with stdout closed: nobody wants to know
        try:
            stream.write(_encodable(text, stream))
            stream.flush()
        except BrokenPipeError:
            _discard(stream)  # the reader has seen enough; the exit code still tells
        except (OSError, ValueError) as error:
            _discard(stream)
            reason = error.strerror if isinstance(error, OSError) else "it is closed"
            raise StorageError(
                f"cannot write the result: {(reason or 'the system refuses').lower()}",
                hint="check where stdout goes",
            ) from None

    # -- stderr -----------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Progress, for people."""
        self._write_stderr(f"{printable(text)}\n")

    def warning(self, text: str) -> None:
        """Something that is not as it should be, though the command goes on."""
        if self.json:
            self._write_stderr(json.dumps({"warning": {"message": text}}) + "\n")
        else:
            self._write_stderr(f"warning: {printable(text)}\n")

    def error(self, error: KvvaultError) -> None:
        """Two lines: what happened and what to do; or one JSON document of the same."""
        if self.debug:
            self._write_stderr("".join(traceback.format_exception(error)))
        if self.json:
            document = {
                "error": {
                    "kind": type(error).__name__,
                    "message": str(error),
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                }
            }
            self._write_stderr(json.dumps(document) + "\n")
        else:
            self._write_stderr(f"error: {printable(str(error))}\nhint: {printable(error.hint)}\n")

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something that cannot be undone; returns when the answer is yes.

        :param yes: the answer was given on the command line.
        :raises UsageError: there is nobody to ask (stdin is not a terminal).
        :raises OperationCancelledError: the answer is anything but yes.
        """
        if yes:
            return
        if sys.stdin is None or not _is_terminal(sys.stdin):
            raise UsageError(
                "this needs a confirmation, and there is no terminal to ask on",
                hint="add --yes to confirm, or --dry-run to see what would be done",
            )
        self._write_stderr(f"{printable(question)} [y/N] ")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise OperationCancelledError("cancelled, nothing was done", hint="answer y to go on")

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Bar]:
        """A progress bar on stderr; silent when that is not a terminal."""
        if sys.stderr is None or not _is_terminal(sys.stderr):
            yield Bar()
            return
        from kvvault.cli.bar import TerminalBar

        with TerminalBar.show(what) as bar:
            yield bar

    def _write_stderr(self, text: str) -> None:
        stream = sys.stderr
        if stream is None:
            return
        try:
            stream.write(_encodable(text, stream))
            stream.flush()
        except (OSError, ValueError):
            _discard(stream)  # nowhere left to say it


class Bar:
    """A progress bar that shows nothing."""

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes are done."""


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def _encodable(text: str, stream: IO[str]) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _discard(stream: IO[str]) -> None:
    """Send what is still buffered, and all that follows, nowhere: otherwise the interpreter
    complains about it at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
