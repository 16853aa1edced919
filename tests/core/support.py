"""What the tests of the core share: small vaults, and blocks whose right content is known."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2 as _sqlite

from kvvault.crypto.providers import EphemeralProvider
from kvvault.crypto.providers.base import KeyProvider
from kvvault.model import Guard, Namespace, Outcome, PutReport
from kvvault.options import VaultOptions
from kvvault.vault import Scope, Vault

sqlite: Any = _sqlite

BLOCK = 4096
ZERO = bytes(BLOCK)
FACTS = {"model": "tiny-llama", "weights": "sha256:1", "dtype": "bfloat16", "layout": "NHD"}
SMALL = VaultOptions(segment_bytes=4 * BLOCK, batch_bytes=2 * BLOCK, direct=False, spare_segments=0)
"""Four blocks a segment, two an extent: small vaults already have many of both. No segments in
advance: tests count files."""


def namespace(block_bytes: int = BLOCK, **facts: str) -> Namespace:
    """The usual namespace, some facts replaced."""
    return Namespace.of(block_bytes, FACTS | facts)


def key(number: int, kind: str = "block") -> bytes:
    """An engine's name of a block: 32 bytes, like a SHA-256 prefix hash."""
    return hashlib.sha256(f"{kind} {number}".encode()).digest()


def keys(count: int, start: int = 0) -> list[bytes]:
    return [key(n) for n in range(start, start + count)]


def content(owner: str, block_key: bytes, size: int = BLOCK) -> bytes:
    """The one right content of a block: unlike that of any other block or owner."""
    return hashlib.shake_256(owner.encode() + b"/" + block_key).digest(size)


def contents(owner: str, block_keys: Iterable[bytes], size: int = BLOCK) -> list[bytes]:
    return [content(owner, k, size) for k in block_keys]


def dirty(count: int, size: int = BLOCK) -> list[bytearray]:
    """Buffers full of something that is neither zero nor any block."""
    return [bytearray(b"\xa5") * size for _ in range(count)]


DIRTY = bytes(dirty(1)[0])


def put(vault: Vault, scope: Scope, block_keys: Sequence[bytes], owner: str = "a") -> PutReport:
    size = scope.namespace.block_bytes
    return vault.put(scope, block_keys, contents(owner, block_keys, size))


def get(
    vault: Vault, scope: Scope, block_keys: Sequence[bytes], guard: Guard | None = None
) -> tuple[list[Outcome], list[bytes]]:
    """Outcomes, and what the buffers held afterwards."""
    buffers = dirty(len(block_keys), scope.namespace.block_bytes)
    outcomes = vault.get(scope, block_keys, buffers, guard=guard)
    return outcomes, [bytes(buffer) for buffer in buffers]


def assert_hits(vault: Vault, scope: Scope, block_keys: Sequence[bytes], owner: str = "a") -> None:
    outcomes, found = get(vault, scope, block_keys)
    assert outcomes == [Outcome.HIT] * len(block_keys), outcomes
    assert found == contents(owner, block_keys, scope.namespace.block_bytes)


def assert_missing(
    vault: Vault,
    scope: Scope,
    block_keys: Sequence[bytes],
    outcome: Outcome = Outcome.MISS,
) -> None:
    """Not served, and nothing left in the buffers."""
    outcomes, found = get(vault, scope, block_keys)
    assert outcomes == [outcome] * len(block_keys)
    assert found == [bytes(scope.namespace.block_bytes)] * len(block_keys)


@dataclass
class Home:
    """A directory for one vault, and the keys to it."""

    path: Path
    provider: KeyProvider = field(default_factory=EphemeralProvider)
    options: VaultOptions = SMALL

    def create(self) -> Vault:
        return Vault.create(self.path, provider=self.provider, options=self.options)

    def open(self, *, read_only: bool = False, options: VaultOptions | None = None) -> Vault:
        return Vault.open(
            self.path,
            provider=self.provider,
            options=options or self.options,
            read_only=read_only,
        )

    @property
    def catalog(self) -> Path:
        return self.path / "catalog.sqlite3"

    def segment_files(self) -> list[Path]:
        return sorted((self.path / "segments").glob("*.seg"))

    @contextmanager
    def sql(self) -> Iterator[Any]:
        """The catalog of a closed vault, every constraint off: what somebody with the disk does."""
        connection = sqlite.connect(str(self.catalog), isolation_level=None)
        try:
            connection.execute("PRAGMA foreign_keys=OFF")
            connection.execute("PRAGMA ignore_check_constraints=ON")
            yield connection
        finally:
            connection.close()


def segment_of(vault: Vault, scope: Scope, block_key: bytes) -> bytes | None:
    """Id of the segment in which a vault would look for a block."""
    location = vault._view.find(scope.block_id(block_key), 0.0)
    if location is None:
        return None
    segment = vault._view.segment(location.number)
    return None if segment is None else segment.place.segment_id


def flip(data: bytes | bytearray, bit: int) -> bytes:
    """`data` with one bit inverted."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def open_descriptors() -> int:
    """How many file descriptors this process has, garbage aside."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
