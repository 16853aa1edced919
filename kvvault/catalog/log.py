"""Entries of the audit log, one function per transaction step; see `kvvault.catalog.operations`.

An entry is added in the transaction of the act it tells of: there is no act without its entry, and
no entry of something that did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping

import rfc8785
from sqlalchemy import Connection, func, insert, select

from kvvault.catalog import schema as t

Fact = str | int | float | bool | None | list[str]
"""What an entry may hold besides its kind and time. No personal data: keyed ids only (REQ-A4)."""


def append(connection: Connection, kind: str, at: float, facts: Mapping[str, Fact]) -> int:
    """Add an entry; its index. `at`: seconds since the epoch, by the vault's own time, kept to the
    millisecond."""
    body = rfc8785.dumps({"kind": kind, "at": round(at, 3), **facts})
    newest = connection.execute(select(func.max(t.log_entries.c.entry_no))).scalar()
    index = 0 if newest is None else int(newest) + 1
    connection.execute(insert(t.log_entries).values(entry_no=index, body=body.decode()))
    return index
