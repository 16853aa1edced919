"""Settings of the command line: flags > ``KVVAULT_*`` variables > config file > defaults.

The config file is TOML, one table without sections, with the names of `Settings`::

    vault = "/srv/kv"
    key_provider = "file:/etc/kvvault/kv.key"

It is ``config.toml`` in the user's configuration directory (``~/.config/kvvault`` as a rule), or
what ``--config`` or ``KVVAULT_CONFIG`` names. A name that is not a setting is an error: a
misspelled setting that is silently ignored is found out when it is too late.

The file decides which keys a vault is opened with, so one that others may change is refused.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import platformdirs
from pydantic import ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvvault.errors import ConfigError, UnsafeFileError

__all__ = ["CONFIG_VARIABLE", "ENV_PREFIX", "Settings", "default_config_path", "load_settings"]

ENV_PREFIX: Final = "KVVAULT_"
CONFIG_VARIABLE: Final = "KVVAULT_CONFIG"

_MAX_FILE_BYTES: Final = 1 << 20
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang


class Settings(BaseSettings):
    """What a command runs with. Frozen; made by `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    vault: Path | None = None
    """The vault's directory. In the config file, ``~`` is the home directory and a relative path
    is relative to that file."""
    key_provider: str | None = None
    """URI of the key provider, instead of the one that the vault names."""
    output: Literal["text", "json"] = "text"
    """Form of what is printed; ``--json`` is short for ``json``."""
    debug: bool = False
    """Whether errors come with a traceback."""

    @field_validator("vault", "key_provider", mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        # `--vault "$KV"` with KV unset must not mean the current directory.
        if value == "":
            raise ValueError("it is empty")
        return value


def default_config_path() -> Path:
    """Where the config file is looked for when nobody names one."""
    return platformdirs.user_config_path("kvvault") / "config.toml"


def load_settings(
    flags: Mapping[str, object],
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Combine the sources.

    :param flags: settings that were given on the command line.
    :param config: the config file that was named there; it must exist, as must one named by
        ``KVVAULT_CONFIG``. The default one need not.
    :param environ: to find ``KVVAULT_CONFIG`` in; ``os.environ`` when None.
    :raises ConfigError: unknown name, wrong type, unreadable file or not TOML. The message names
        the setting and where it stands, never its value.
    :raises UnsafeFileError: others may change the config file.
    """
    environ = os.environ if environ is None else environ
    named = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    path = default_config_path() if named is None else named
    from_file = _read_file(path, required=named is not None)

    class Combined(Settings):
        """The same settings, with this call's file as the last source."""

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file_settings = InitSettingsSource(settings_cls, init_kwargs=dict(from_file))
            return init_settings, env_settings, file_settings

    try:
        combined = Combined.model_validate(dict(flags))
    except ValidationError as error:
        raise _refused(error, flags, environ, path) from None
    return Settings.model_construct(**combined.model_dump())


def _refused(
    error: ValidationError, flags: Mapping[str, object], environ: Mapping[str, str], path: Path
) -> ConfigError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "?"
    if name in flags:
        where = f"--{name.replace('_', '-')}"
    elif environ.get(ENV_PREFIX + name.upper()):
        where = ENV_PREFIX + name.upper()
    else:
        where = f"{name!r} in {path}"
    problem = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{where} is not usable: {problem}", hint="correct it, or see docs/cli.md")


def _read_file(path: Path, *, required: bool) -> dict[str, object]:
    raw = _read_bytes(path, required=required)
    if raw is None:
        return {}
    try:
        values: dict[str, object] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        # tomllib says line and column, and quotes at most one character; others may quote more.
        detail = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "not well-formed"
        raise ConfigError(
            f"the config file {path} is not TOML: {detail}", hint="correct or remove it"
        ) from None
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown[0]!r} in the config file {path}",
            hint=f"settings are: {', '.join(sorted(Settings.model_fields))}",
        )
    vault = values.get("vault")
    if isinstance(vault, str):
        values["vault"] = path.absolute().parent / os.path.expanduser(vault)
    return values


def _visible(path: Path) -> bool:
    """Whether one may at least know that there is a file."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _read_bytes(path: Path, *, required: bool) -> bytes | None:
    """The file's bytes; None when there is none and there need not be one."""
    try:
        fd = os.open(path, _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        if not required:
            return None
        raise ConfigError(
            f"there is no config file {path}", hint=f"check --config and {CONFIG_VARIABLE}"
        ) from None
    except (OSError, ValueError) as error:
        if not required and isinstance(error, PermissionError) and not _visible(path):
            return None  # a service whose home directory is not its own
        reason = (error.strerror or "").lower() if isinstance(error, OSError) else "not a path"
        raise ConfigError(
            f"the config file {path} cannot be read: {reason}",
            hint=f"make it readable, or name another with --config or {CONFIG_VARIABLE}",
        ) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(
                f"the config file {path} is not a regular file", hint="name a regular file"
            )
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & stat.S_IWOTH:
            raise UnsafeFileError(
                f"others may change the config file {path}",
                hint=f"it decides which keys are used; make it yours: chmod o-w {path}",
            )
        with open(fd, "rb", closefd=False) as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"the config file {path} is too large", hint="at most 1 MiB")
    return raw
