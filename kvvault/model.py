"""Value types that every layer shares. No I/O, no clocks of their own, no keys.

All values are frozen. Identifiers are raw ``bytes`` of a fixed length; how they are made
(random, HMAC) is the business of `kvvault.crypto`. Times are seconds since the epoch (float, UTC).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from typing_extensions import Buffer  # in the standard library only from 3.12 on

__all__ = [
    "ID_BYTES",
    "PAGE_BYTES",
    "Buffer",
    "Clock",
    "Guard",
    "Namespace",
    "NamespaceFacts",
    "Outcome",
    "PutReport",
    "RecoveryReport",
    "SegmentFacts",
    "SegmentState",
    "SystemClock",
    "TenantFacts",
    "VaultStats",
    "VerifyReport",
]

ID_BYTES = 16
"""Length of tenant, segment and block ids. 128 bits: collisions stay improbable beyond 2^60 ids."""

PAGE_BYTES = 4096
"""Alignment that O_DIRECT needs of addresses, offsets and lengths on every file system we met."""


class Clock(Protocol):
    """Where time comes from, so that tests can move it."""

    def now(self) -> float:
        """Wall clock, seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """A clock that never goes back and does not stand still while the machine sleeps, seconds
        from an arbitrary origin."""
        ...


_UNSTOPPED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux has it; where it is missing, CLOCK_MONOTONIC is what there is."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        # CLOCK_MONOTONIC stands still in suspend: deadlines would be late by as long.
        return time.clock_gettime(_UNSTOPPED)


class Guard(Protocol):
    """Whether the caller's buffers may still be touched.

    `Vault.put` and `Vault.get` call `enter` right before they read from or write to the caller's
    buffers and `leave` right after; in between only memory and CPU are used, never a file. A guard
    whose `enter` returns False tells that the caller has given up (its time limit passed) and may
    have handed the buffers to somebody else: they are not touched any more and the block counts as
    `Outcome.ABANDONED`. So a hung disk never pins a caller's buffer.
    """

    def enter(self) -> bool: ...

    def leave(self) -> None: ...


class Outcome(StrEnum):
    """What became of one block of a `Vault.get`. Only HIT leaves bytes in the buffer."""

    HIT = "hit"
    MISS = "miss"
    TAMPERED = "tampered"
    KEY_UNAVAILABLE = "key_unavailable"
    IO_FAILED = "io_failed"
    ABANDONED = "abandoned"


class SegmentState(StrEnum):
    """Life of a segment. Only OPEN and SEALED segments have a key, so only they can be read."""

    OPEN = "open"
    """Accepts blocks from the process that created it, which holds a lock on the file."""
    SEALED = "sealed"
    """Complete; its key never encrypts again."""
    REVOKED = "revoked"
    """Its wrapped key is gone from the catalog; the file waits to be unlinked."""
    DESTROYED = "destroyed"
    """Key and file are gone. The row stays as a tombstone so that other processes notice."""
    LOST = "lost"
    """Its bytes were missing when the vault was opened; the key has been destroyed."""

    @property
    def live(self) -> bool:
        """Whether blocks of such a segment may be served."""
        return self in (SegmentState.OPEN, SegmentState.SEALED)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must agree for KV bytes to be valid, and the block size that follows from it.

    Two namespaces whose facts differ in any name or value have different digests; the digest enters
    every block id and is authenticated with every block, so bytes of another model, dtype, layout
    or topology are never found and would not open if they were.
    """

    block_bytes: int
    """Bytes of one block, a multiple of `PAGE_BYTES`."""
    facts: tuple[tuple[str, str], ...]
    """Sorted (name, value) pairs."""
    digest: bytes
    """SHA-256 over the canonical JSON of block size and facts; 32 bytes."""

    @classmethod
    def of(cls, block_bytes: int, facts: Mapping[str, str]) -> Namespace:
        """Build a namespace.

        Raises:
            ValueError: `block_bytes` is not a positive multiple of `PAGE_BYTES`, or a fact is not
                a pair of strings.
        """
        if block_bytes <= 0 or block_bytes % PAGE_BYTES:
            raise ValueError(f"block_bytes must be a positive multiple of {PAGE_BYTES}")
        parts: list[object] = [*facts.keys(), *facts.values()]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("namespace facts must be strings")
        pairs = tuple(sorted(facts.items()))
        canonical = json.dumps(
            {"block_bytes": block_bytes, "facts": dict(pairs)},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
        )
        return cls(block_bytes, pairs, hashlib.sha256(canonical.encode()).digest())

    def fact(self, name: str) -> str | None:
        """The value of one fact, or None."""
        return dict(self.facts).get(name)


@dataclass(frozen=True, slots=True)
class PutReport:
    """What became of the blocks of one `Vault.put`."""

    stored: int = 0
    """Written, committed and findable."""
    present: int = 0
    """Already live in the vault (or being stored by another thread); not written again."""
    refused: int = 0
    """Not stored: the disk, the key provider or the caller's time limit said no, or there is no
    space for them below the vault's cap."""
    declined: int = 0
    """Not stored because the policy says that these are not kept."""

    def __add__(self, other: PutReport) -> PutReport:
        return PutReport(
            self.stored + other.stored,
            self.present + other.present,
            self.refused + other.refused,
            self.declined + other.declined,
        )


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One segment as the catalog knows it."""

    segment_id: bytes
    tenant_id: bytes | None
    """None once the segment is a tombstone."""
    namespace_digest: bytes
    state: SegmentState
    block_bytes: int
    blocks: int
    created_at: float
    """When it was opened, by the vault's own time, as all times here."""
    policy_no: int | None = None
    """The policy that governs it, at first that under which it was written; None before there was
    one."""
    rule: str = ""
    retention_class: str = ""
    delete_by: float | None = None
    """The ceiling: at this instant its key is destroyed."""
    idle_until: float | None = None
    """The sliding deadline, moved by use; never beyond the ceiling."""
    keep_until: float | None = None
    """The floor against eviction."""
    hits: int = 0
    """Blocks of it that were loaded, as far as engines have reported it."""
    last_used: float | None = None
    revoked: int = 0
    """Blocks of it that an erasure revoked one by one: in the file until it is compacted, but gone,
    and counted then."""

    @property
    def data_bytes(self) -> int:
        """In its file."""
        return self.blocks * self.block_bytes

    @property
    def live_blocks(self) -> int:
        """What goes when the segment goes: without what went before."""
        return max(0, self.blocks - self.revoked)

    @property
    def live_bytes(self) -> int:
        return self.live_blocks * self.block_bytes

    @property
    def deadline(self) -> float:
        """From when on it is not served; infinite when never."""
        return min(
            math.inf if self.delete_by is None else self.delete_by,
            math.inf if self.idle_until is None else self.idle_until,
        )


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """One tenant. `name` is None when its key cannot be unwrapped at the moment."""

    tenant_id: bytes
    name: str | None
    created_at: float
    segments: int
    blocks: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """One namespace and how much of it is on disk."""

    namespace: Namespace
    created_at: float
    segments: int
    blocks: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class VaultStats:
    """Counters since this process opened the vault, and what the vault holds now."""

    segments: int
    blocks: int
    data_bytes: int
    tenants: int
    namespaces: int
    index_bytes: int
    hits: int
    misses: int
    tampered: int
    key_unavailable: int
    lost: int
    """Blocks whose bytes were missing."""
    io_failed: int
    abandoned: int
    stored_blocks: int
    stored_bytes: int
    present_blocks: int
    refused_blocks: int


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What opening a vault had to repair. All zero after a clean close."""

    sealed_segments: int = 0
    """Open segments of processes that are gone."""
    cut_bytes: int = 0
    """Bytes beyond the last committed block."""
    destroyed_files: int = 0
    """Files without a row."""
    destroyed_bytes: int = 0
    lost_segments: int = 0
    """Rows without bytes."""
    lost_blocks: int = 0
    """Blocks dropped because their bytes were missing or, after a power loss, do not open."""
    finished_deletions: int = 0
    """Revoked segments whose files were still there."""

    @property
    def clean(self) -> bool:
        return self == RecoveryReport()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of reading and authenticating every live block."""

    segments: int
    blocks: int
    data_bytes: int
    tampered: int
    lost: int
    unreadable: int
    """Blocks that could not be checked: key unavailable or I/O error."""
    damaged_segments: tuple[bytes, ...]

    @property
    def ok(self) -> bool:
        return not (self.tampered or self.lost or self.unreadable)
