"""Alembic environment: runs on the connection that kvvault hands over, never on one of its own.

Batch mode, because SQLite alters tables by copying them.
"""

from __future__ import annotations

from alembic import context

from kvvault.catalog.schema import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("run migrations through kvvault (it opens the catalog with the right pragmas)")

context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
