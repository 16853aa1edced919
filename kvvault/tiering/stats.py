"""What a tiered cache counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TieringStats:
    """What a cache holds now, and counts of blocks since it was opened."""

    dram_bytes: int
    """Size of the memory, fixed."""
    dram_blocks: int
    """Blocks in it."""
    in_use_blocks: int
    """Slots that cannot be evicted at the moment: written, stored, or copied from."""
    offloaded: int
    """Taken by `TieredCache.offload` and new."""
    dropped: int
    """Not taken: every slot was in use."""
    stored: int
    """Cascaded to the vault (or found there)."""
    dropped_stores: int
    """Kept in DRAM but not queued for the vault: the queue was full or the disk hangs. The next
    offload of the same block tries again."""
    failed_stores: int
    """Queued, but refused by the vault, not to be kept by its policy, or given up at the time
    limit."""
    promoted: int
    """Brought from the vault to DRAM."""
    failed_promotions: int
    """Not there any more, not authentic, key unavailable, I/O error, time limit;
    `Vault.stats` tells which."""
    loaded: int
    """Copied to tensors by `TieredCache.load`."""
    missed: int
    """Asked of `TieredCache.load` in vain, blocks behind the first miss included."""
    evicted: int
    lost: int
    """Evicted before the vault had them."""
    pending_transfers: int
    stalled: bool
    """The disk hangs: only DRAM answers at the moment."""
