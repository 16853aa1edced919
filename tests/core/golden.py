"""A small vault with every byte known, and a working copy of it to damage."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.core.support import (
    Home,
    content,
    keys,
    namespace,
    put,
    sqlite,
)

TENANTS = [f"tenant {n}" for n in range(6)]
CONTROL = TENANTS[0]
"""Never touched: its blocks must hit whatever happens to the others."""
MODELS = {"one": 12, "two": 4}
"""Blocks of each tenant by model: three full segments, and one."""
FIELDS = {"block_ids": 16, "nonces": 12, "tags": 16}

Row = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """One block, and where the intact vault keeps it."""

    tenant: str
    model: str
    key: bytes
    block_id: bytes
    segment: bytes
    extent: int
    slot: int
    record: bytes
    """Nonce and tag."""

    @property
    def data(self) -> bytes:
        return content(self.tenant + self.model, self.key)


@dataclass
class Rows:
    """A catalog's rows."""

    tenants: dict[bytes, Row]
    """By lookup id."""
    segments: dict[bytes, Row]
    extents: list[Row]

    @classmethod
    def read(cls, path: Path) -> Rows:
        with closing(sqlite.connect(str(path))) as connection:
            connection.row_factory = lambda cursor, row: {
                column[0]: value for column, value in zip(cursor.description, row, strict=True)
            }
            query = "SELECT * FROM {} ORDER BY rowid"
            tenants, segments, extents = (
                connection.execute(query.format(table)).fetchall()
                for table in ("tenants", "segments", "extents")
            )
        return cls(
            {row["lookup_id"]: row for row in tenants},
            {row["segment_id"]: row for row in segments},
            sorted(extents, key=lambda row: int(row["extent_no"])),
        )


class Golden:
    """An intact vault, closed."""

    def __init__(self, directory: Path) -> None:
        self.home = Home(directory / "golden")
        with self.home.create() as vault:
            for tenant in TENANTS:
                for model, count in MODELS.items():
                    put(
                        vault,
                        vault.scope(tenant, namespace(model=model)),
                        keys(count),
                        tenant + model,
                    )
        self.rows = Rows.read(self.home.catalog)
        self.catalog = self.home.catalog.read_bytes()
        self.files = {
            bytes.fromhex(path.stem): path.read_bytes() for path in self.home.segment_files()
        }
        at = {
            extent["block_ids"][16 * i : 16 * i + 16]: (extent, i)
            for extent in self.rows.extents
            for i in range(len(extent["block_ids"]) // 16)
        }
        self.blocks = []
        self.lookup_ids = {}
        with self.home.open(read_only=True) as vault:
            for tenant in TENANTS:
                self.lookup_ids[tenant] = vault._ring.name_id(tenant)
                for model, count in MODELS.items():
                    scope = vault.scope(tenant, namespace(model=model))
                    for key in keys(count):
                        block_id = scope.block_id(key)
                        extent, i = at[block_id]
                        nonce = extent["nonces"][12 * i : 12 * i + 12]
                        tag = extent["tags"][16 * i : 16 * i + 16]
                        self.blocks.append(
                            Block(
                                tenant,
                                model,
                                key,
                                block_id,
                                extent["segment_id"],
                                extent["extent_no"],
                                extent["first_slot"] + i,
                                nonce + tag,
                            )
                        )
        owners = {block.segment: block.tenant for block in self.blocks}
        self.mutable = [s for s in sorted(self.files) if owners[s] != CONTROL]
        self.owners = owners

    def extents_of(self, segment: bytes) -> list[int]:
        return sorted({b.extent for b in self.blocks if b.segment == segment})


class TakenError(Exception):
    """What a mutation would change, an earlier one of the round has taken away."""


class Damaged:
    """A working copy. Mutations take segments from `pool`, so that those of one round rarely meet;
    when the pool is empty, they take any."""

    def __init__(self, golden: Golden, directory: Path) -> None:
        self.golden = golden
        self.home = Home(directory / "damaged", golden.home.provider)
        shutil.copytree(golden.home.path, self.home.path)
        self._sql: Any = None
        self.reset(random.Random(0))

    def reset(self, rng: random.Random) -> None:
        """Make everything as in the golden vault."""
        self.close_sql()
        for name in os.listdir(self.home.path):
            if name.startswith("catalog.sqlite3-"):
                (self.home.path / name).unlink()
        self.home.catalog.write_bytes(self.golden.catalog)
        segments = self.home.path / "segments"
        for entry in list(os.scandir(segments)):
            os.unlink(entry.path)
        for segment, data in self.golden.files.items():
            path = self.path(segment)
            path.write_bytes(data)
            path.chmod(0o600)
        self.rng = rng
        self.pool = rng.sample(self.golden.mutable, len(self.golden.mutable))
        self.resized: set[bytes] = set()

    def path(self, segment: bytes) -> Path:
        return self.home.path / "segments" / f"{segment.hex()}.seg"

    @property
    def sql(self) -> Any:
        if self._sql is None:
            self._sql = sqlite.connect(str(self.home.catalog), isolation_level=None)
            self._sql.execute("PRAGMA foreign_keys=OFF")
            self._sql.execute("PRAGMA ignore_check_constraints=ON")
            self._sql.execute("PRAGMA synchronous=OFF")
            self._sql.execute("BEGIN")
        return self._sql

    def close_sql(self) -> None:
        if self._sql is not None:
            self._sql.execute("COMMIT")
            self._sql.close()
            self._sql = None

    # What mutations choose from.

    def take(self) -> bytes:
        """A segment that no other mutation of this round touches, while there are any."""
        return self.pool.pop() if self.pool else self.rng.choice(self.golden.mutable)

    def take_block(self) -> Block:
        segment = self.take()
        return self.rng.choice([b for b in self.golden.blocks if b.segment == segment])

    def take_tenant(self) -> str:
        free = sorted({self.golden.owners[s] for s in self.pool}) or TENANTS[1:]
        tenant = self.rng.choice(free)
        self.pool = [s for s in self.pool if self.golden.owners[s] != tenant]
        return tenant

    # How they change rows.

    def get_column(self, table: str, column: str, where: str, value: object) -> Any:
        row = self.sql.execute(
            f"SELECT {column} FROM {table} WHERE {where} = ?",  # noqa: S608 - our own words
            (value,),
        ).fetchone()
        return None if row is None else row[0]

    def set_column(self, table: str, column: str, new: object, where: str, value: object) -> None:
        self.sql.execute(
            f"UPDATE {table} SET {column} = ? WHERE {where} = ?",  # noqa: S608 - our own words
            (new, value),
        )

    def swap_columns(self, table: str, column: str, where: str, one: object, two: object) -> None:
        a = self.get_column(table, column, where, one)
        b = self.get_column(table, column, where, two)
        if column in ("lookup_id", "segment_id") and table != "extents":
            self.set_column(table, column, b"temporary", where, one)
        self.set_column(table, column, a, where, two)
        self.set_column(table, column, b, where, one)

    def change_field(self, block: Block, name: str, change: Callable[[bytes], bytes]) -> None:
        """Change one block's part of a concatenated field of its extent."""
        size = FIELDS[name]
        whole = self.get_column("extents", name, "extent_no", block.extent)
        if not isinstance(whole, bytes):
            raise TakenError
        first = block.slot - next(
            e["first_slot"] for e in self.golden.rows.extents if e["extent_no"] == block.extent
        )
        part = slice(first * size, (first + 1) * size)
        changed = whole[: part.start] + change(whole[part]) + whole[part.stop :]
        self.set_column("extents", name, changed, "extent_no", block.extent)

    def field(self, block: Block, name: str) -> bytes:
        found: list[bytes] = []

        def look(value: bytes) -> bytes:
            found.append(value)
            return value

        self.change_field(block, name, look)
        return found[0]
