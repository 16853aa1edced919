"""Settings of an open vault that do not change what is on disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvvault.errors import ConfigError
from kvvault.model import PAGE_BYTES

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class VaultOptions:
    """Checked when made.

    Raises:
        ConfigError: a value is out of range.
    """

    segment_bytes: int = 256 * _MIB
    """At which size a segment is sealed and a new one begun; at least one block fits in any case.
    A segment is also the unit of deletion, so smaller segments delete more precisely and cost more
    keys and files."""
    batch_bytes: int = 2 * _MIB
    """Size of one write or read. Staging of this size stays in the processor's cache."""
    spare_segments: int = 4
    """How many segments are made in advance, with one flush of the disk, for a tenant whose open
    segment is half full. 0: each is made when it is needed, and whoever stores waits for it."""
    sync_interval_s: float = 30.0
    """How often full segments are synced to the disk. A power failure costs at most the blocks of
    segments that were not, and those are found out when the vault is opened."""
    poll_interval_s: float = 0.05
    """How often an idle process looks for what others committed. Loads look every time."""
    max_open_segments: int = 64
    """Segments that may be open for writing at once; the one idle for longest is sealed."""
    lock_timeout_s: float = 30.0
    """How long to wait for another process that repairs the vault or publishes a load."""
    direct: bool | None = None
    """O_DIRECT: None uses it where the file system takes it, False never."""

    def __post_init__(self) -> None:
        checks = (
            (self.segment_bytes >= PAGE_BYTES, "segment_bytes"),
            (self.batch_bytes >= PAGE_BYTES, "batch_bytes"),
            (0 <= self.spare_segments <= 64, "spare_segments"),
            (0 < self.sync_interval_s <= 3600, "sync_interval_s"),
            (0 < self.poll_interval_s <= 60, "poll_interval_s"),
            (self.max_open_segments >= 1, "max_open_segments"),
            (self.lock_timeout_s > 0, "lock_timeout_s"),
        )
        for good, name in checks:
            if not good:
                raise ConfigError(f"{name} is out of range", hint="see kvvault.options")
