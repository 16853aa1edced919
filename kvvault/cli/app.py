"""The program: the group of commands, and what becomes of whatever they raise.

Exit codes: 0 ok, 1 failure, 2 usage, 3 partial, 10 no vault, 11 locked, 12 wrong or missing key,
130 cancelled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from kvvault import __version__
from kvvault.cli.output import Output
from kvvault.cli.run import Session
from kvvault.errors import KvvaultError, OperationCancelledError, UsageError

__all__ = ["app", "main"]

_PROGRAM: Final = "kvvault"
_COMPLETION: Final = "_KVVAULT_COMPLETE"
_REJECTED: Final = typer.BadParameter.__mro__[2]
"""Base of everything that is wrong with the arguments (``ClickException``). typer exports only
BadParameter, and where the base comes from depends on typer's version."""


class _Program(TyperGroup):
    """The top of the command line. Every way in ends here: the console script, ``python -m``, and
    typer's test runner."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run a command line and exit."""
        if _COMPLETION in os.environ:
            super().main(args, _PROGRAM, _COMPLETION)
        sys.exit(self.run(list(sys.argv[1:] if args is None else args)))

    def run(self, arguments: list[str]) -> int:
        """Run a command line; the exit code. Nothing is raised."""
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        output = Output(json=_wants_json(own, os.environ), debug="--debug" in own)
        session = Session(output)
        with session.logging():
            try:
                return self._run(arguments, session)
            except KvvaultError as error:
                output.error(error)
                return error.exit_code
            except Exception as error:  # noqa: BLE001 - the last stop: a bug is shown as one
                return _report_bug(error, output)

    def _run(self, arguments: list[str], session: Session) -> int:
        try:
            with self.make_context(_PROGRAM, list(arguments), obj=session) as context:
                result = self.invoke(context)
        except typer.Exit as exit_:
            return exit_.exit_code
        except (KeyboardInterrupt, EOFError, typer.Abort) as error:
            raise OperationCancelledError("cancelled", hint="run it again when you like") from error
        except Exception as error:
            if not isinstance(error, _REJECTED):
                raise
            raise _usage_error(error) from error
        return result if isinstance(result, int) else 0


def _wants_json(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """A first guess, for errors that happen before the settings are known."""
    return "--json" in arguments or environ.get("KVVAULT_OUTPUT") == "json"


def _usage_error(error: Exception) -> UsageError:
    """What is wrong with the arguments, in our own form."""
    form = getattr(error, "format_message", None)
    message = str(form() if callable(form) else error).strip().rstrip(".")
    message = message.replace("Value error, ", "").replace("Input should be", "it should be")
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or _PROGRAM
    hint = f"see: {path} --help"
    if path == _PROGRAM and getattr(error, "option_name", None) is not None:
        hint = f"options follow the command, as in: {_PROGRAM} status --vault DIR"
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _report_bug(error: Exception, output: Output) -> int:
    """An error that nobody foresaw. Its text may hold anything, so only its kind is shown."""
    if isinstance(error, OSError) and error.errno is not None:
        what = f"the system refused: {os.strerror(error.errno).lower()}"
    elif isinstance(error, MemoryError):
        what = "out of memory"
    else:
        what = f"unexpected error ({type(error).__name__})"
    shown = KvvaultError(what, hint="run it again with --debug, and report what it prints")
    shown.__cause__ = error
    output.error(shown)
    return shown.exit_code


app = typer.Typer(
    name=_PROGRAM,
    cls=_Program,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> int | None:
    """Keeps LLM KV cache on disk without turning a cache into a liability.

    Every command shows its options with --help.
    """
    session: Session = context.obj
    if version:
        session.output.lines(f"{_PROGRAM} {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        raise UsageError("no command was given", hint=f"see: {_PROGRAM} --help")
    return None


def main() -> NoReturn:
    """The console script."""
    app()
    raise AssertionError("the program exits by itself")


def _register() -> None:
    from kvvault.cli.commands import register_all

    register_all(app)


_register()
