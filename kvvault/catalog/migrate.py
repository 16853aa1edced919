"""Create and upgrade a catalog with Alembic.

Alembic is imported only when there is something to do: an up-to-date catalog is recognised by one
SELECT, so opening a vault does not pay for it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from kvvault.catalog.database import translated_errors
from kvvault.catalog.schema import HEAD
from kvvault.errors import CatalogCorruptError, UnsupportedVersionError


def migrations_dir() -> Path:
    """Where the migration scripts are: in the installed package, or at the top of a checkout."""
    package = Path(str(resources.files("kvvault")))
    installed = package / "_migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def revision(connection: Connection) -> str | None:
    """The catalog's revision; None for an empty database.

    Raises:
        CatalogCorruptError: there are tables, but none that says which revision they are.
    """
    names = inspect(connection).get_table_names()
    if not names:
        return None
    if "alembic_version" not in names:
        raise CatalogCorruptError(
            "the catalog is not one of kvvault's",
            hint="check the path; kvvault does not touch databases of others",
        )
    foreign = "SELECT count(*) FROM sqlite_master WHERE type IN ('trigger', 'view')"
    if connection.execute(text(foreign)).scalar_one():
        # A trigger could make a deletion do nothing and report success.
        raise CatalogCorruptError(
            "the catalog has triggers or views, which kvvault never makes",
            hint="somebody else wrote to it; move catalog.sqlite3* away to start empty",
        )
    row = connection.execute(text("SELECT version_num FROM alembic_version")).first()
    return None if row is None else str(row[0])


def refuse_others(connection: Connection) -> None:
    """See that a catalog can be read as it is, by somebody who may not upgrade it.

    Raises:
        UnsupportedVersionError: it is of another revision than this kvvault reads.
        CatalogCorruptError: it is no catalog.
    """
    found = revision(connection)
    if found is None or found == HEAD:
        return
    older = found.isdecimal() and found < HEAD
    raise UnsupportedVersionError(
        f"the catalog has revision {found}, this kvvault reads {HEAD}",
        hint="upgrade it by opening the vault for writing once: kvvault jobs run reconcile"
        if older
        else "install the newer kvvault that wrote it",
    )


def upgrade(engine: Engine, target: str = HEAD) -> None:
    """Bring a catalog to `target`, in one transaction; does nothing when it is there already.

    Raises:
        UnsupportedVersionError: a newer kvvault wrote it.
        CatalogCorruptError: it is no catalog.
    """
    with translated_errors("read the catalog's version"), engine.connect() as connection:
        current = revision(connection)
    if current == target:
        return

    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    if current is not None:
        try:
            ScriptDirectory.from_config(config).get_revision(current)
        except CommandError as exc:
            raise UnsupportedVersionError(
                f"the catalog has revision {current}, which this kvvault does not know",
                hint="install the newer kvvault that wrote it",
            ) from exc
    with translated_errors("upgrade the catalog"), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, target)
