"""One run of the program: settings, output, the vault that was named; and how every command gets
the options that all of them have."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvvault.cli.output import Output
from kvvault.errors import UsageError

if TYPE_CHECKING:
    from kvvault.config import Settings
    from kvvault.vault import Vault

__all__ = ["Run", "Session", "command"]

_VAULT: Final = Annotated[
    str | None,
    typer.Option("--vault", metavar="DIR", help="The vault's directory (or KVVAULT_VAULT)."),
]
_KEY_PROVIDER: Final = Annotated[
    str | None,
    typer.Option(
        "--key-provider",
        metavar="URI",
        help="Where the keys are, instead of where the vault says: file:/path or ephemeral: "
        "(or KVVAULT_KEY_PROVIDER).",
    ),
]
_CONFIG: Final = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Config file (or KVVAULT_CONFIG)."),
]
_JSON: Final = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout (or KVVAULT_OUTPUT=json).")
]
_DEBUG: Final = Annotated[
    bool, typer.Option("--debug", help="Show a traceback with an error (or KVVAULT_DEBUG=1).")
]


@dataclass(slots=True)
class Session:
    """What outlives the parsing of arguments: also errors in them are shown as they ask for."""

    output: Output
    warnings: list[str] | None = None
    """Where warnings of the core are collected, for a command that shows them itself."""

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Show the core's warnings for as long as the context lasts."""
        logger = logging.getLogger("kvvault")
        handler = _Warnings(self)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


class _Warnings(logging.Handler):
    """Any thread: `Handler.handle` holds the handler's lock."""

    def __init__(self, session: Session) -> None:
        super().__init__(logging.WARNING)
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if self._session.warnings is None:
            self._session.output.warning(text)
        else:
            self._session.warnings.append(text)


@dataclass(frozen=True, slots=True)
class Run:
    """What a command works with."""

    settings: Settings
    output: Output
    warnings: list[str] = field(default_factory=list)
    """What the core has warned about, where the command shows that itself; else always empty."""

    def vault_path(self) -> Path:
        """
        :raises UsageError: no vault was named.
        """
        if self.settings.vault is None:
            raise UsageError(
                "no vault was named",
                hint="add --vault DIR, set KVVAULT_VAULT, or write it into the config file",
            )
        return self.settings.vault

    @contextlib.contextmanager
    def open_vault(self) -> Iterator[Vault]:
        """The vault, for looking at. Errors as `Vault.open`."""
        from kvvault.vault import Vault

        vault = Vault.open(self.vault_path(), provider=self.settings.key_provider, read_only=True)
        with vault:
            yield vault


def command(
    app: typer.Typer,
    name: str,
    *,
    vault: bool = True,
    shows_warnings: bool = False,
    cls: type[typer.core.TyperCommand] | None = None,
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a command: a function whose first parameter is a `Run`, and whose result is the exit
    code (None for 0). It gets the options that every command has.

    :param vault: whether it takes ``--vault`` and ``--key-provider``.
    :param shows_warnings: whether it shows `Run.warnings` itself.
    """

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        common = {"config": _CONFIG, "as_json": _JSON, "debug": _DEBUG}
        if vault:
            common = {"vault": _VAULT, "key_provider": _KEY_PROVIDER, **common}

        def callback(context: typer.Context, **values: object) -> int | None:
            shared = {option: values.pop(option) for option in common}
            session: Session = context.obj
            _check_text(context.command.params, values)
            if shows_warnings:
                session.warnings = []
            run = _start(session, shared)
            return function(run, **values)

        parameters = [
            inspect.Parameter("context", _KEYWORD, annotation=typer.Context),
            *(parameter.replace(kind=_KEYWORD) for parameter in own),
            *(
                inspect.Parameter(
                    option,
                    _KEYWORD,
                    annotation=annotation,
                    default=False if option in ("as_json", "debug") else None,
                )
                for option, annotation in common.items()
            ),
        ]
        # What typer reads instead of the real signature.
        vars(callback)["__signature__"] = inspect.Signature(parameters)
        callback.__annotations__ = {p.name: p.annotation for p in parameters}
        callback.__doc__ = function.__doc__
        app.command(name, cls=cls)(callback)
        return function

    return register


_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


_FILES: Final = ("FILE", "DIR", "PATH", "MODEL", "RECEIPT", "KEY")
"""In the metavar of what may be the name of a file, which is whatever bytes the system has."""


def _check_text(parameters: Sequence[Any], values: Mapping[str, object]) -> None:
    """
    :param parameters: click's own description of them.
    :raises UsageError: what is kept or looked for as text is none. Does not repeat it.
    """
    for parameter in parameters:
        given = values.get(parameter.name or "")
        texts = given if isinstance(given, list) else [given]
        metavar = str(parameter.metavar or "")
        if any(word in metavar for word in _FILES):
            continue
        if not all(_is_text(text) for text in texts if isinstance(text, str)):
            name = parameter.opts[0] if parameter.param_type_name == "option" else metavar
            raise UsageError(f"{name}: that is not text", hint="write it in UTF-8")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _start(session: Session, shared: Mapping[str, object]) -> Run:
    from kvvault.config import load_settings

    flags = {
        name: shared[name] for name in ("vault", "key_provider") if shared.get(name) is not None
    }
    if shared["as_json"]:
        flags["output"] = "json"
    if shared["debug"]:
        flags["debug"] = True
    config = shared["config"]
    settings = load_settings(flags, config=Path(config) if isinstance(config, str) else None)
    session.output.json = settings.output == "json"
    session.output.debug = settings.debug
    return Run(settings, session.output, [] if session.warnings is None else session.warnings)
