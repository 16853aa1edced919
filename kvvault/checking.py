"""Authenticating whole segments from catalog and disk alone, trusting nothing in memory.

For `Vault.verify`, and for recovery after a power loss. Plaintext exists only in a scratch buffer,
which is overwritten by the next block and wiped at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from functools import partial

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import SegmentRow
from kvvault.crypto.aead import SegmentCipher, wipe
from kvvault.errors import (
    FormatError,
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    StorageError,
    UnsafeFileError,
    WrongKeyError,
)
from kvvault.keyring import KeyRing
from kvvault.model import Outcome, VerifyReport
from kvvault.segments.format import MAX_SLOTS, segment_name
from kvvault.segments.io import AlignedBuffer, SegmentDir, SegmentFile, ShortReadError
from kvvault.segments.store import (
    Place,
    Progress,
    Records,
    Staging,
    Wanted,
    batches,
    block_ids_of,
    open_block,
    read_ciphertext,
)


class Checker:
    """Checks segments one after the other. Not thread-safe."""

    def __init__(
        self,
        vault_id: bytes,
        catalog: Catalog,
        directory: SegmentDir,
        ring: KeyRing,
        batch_bytes: int,
    ) -> None:
        self._vault_id = vault_id
        self._catalog = catalog
        self._directory = directory
        self._ring = ring
        self._batch_bytes = batch_bytes
        self._staging = Staging()

    def check(self, row: SegmentRow, file: SegmentFile | None = None) -> Iterator[Outcome]:
        """The outcome of every slot of a live segment, in order: HIT (authentic), TAMPERED, MISS
        (bytes or row missing), KEY_UNAVAILABLE or IO_FAILED."""
        blocks = row.facts.blocks
        if not row.well_formed:
            yield from [Outcome.TAMPERED] * max(1, min(blocks, MAX_SLOTS))
            return
        opened = self._open(row, file)
        if isinstance(opened, Outcome):
            yield from [opened] * blocks
        else:
            yield from self._check_slots(row, *opened)

    def _open(
        self, row: SegmentRow, file: SegmentFile | None
    ) -> tuple[SegmentCipher, SegmentFile] | Outcome:
        """Key and file of a segment, or what is the matter with all of its blocks."""
        try:
            # Key and wrap of one moment: a purge may have replaced both since the row was read.
            cipher = self._ring.open_segment(
                self._catalog, row.facts.segment_id, row.facts.namespace_digest
            )
        except (KeyUnavailableError, UnsafeFileError, FormatError):
            return Outcome.KEY_UNAVAILABLE  # also when the provider's own files need repair
        except WrongKeyError:
            return Outcome.TAMPERED
        except KeyDestroyedError:
            return Outcome.MISS
        except KvvaultError:
            return Outcome.IO_FAILED
        try:
            return cipher, file or self._directory.open(segment_name(row.facts.segment_id))
        except UnsafeFileError:
            return Outcome.TAMPERED
        except FileNotFoundError:
            return Outcome.MISS
        except KvvaultError:
            return Outcome.IO_FAILED

    def check_all(
        self, progress: Progress | None = None, *, only: Container[bytes] | None = None
    ) -> VerifyReport:
        """Check every live segment, or `only` some. One that is deleted meanwhile is no damage.

        Raises:
            StorageError, CatalogError: the catalog cannot be read.
        """
        rows = [
            row
            for row in self._catalog.read(operations.list_segments)
            if row.facts.state.live and (only is None or row.facts.segment_id in only)
        ]
        total = sum(row.facts.data_bytes for row in rows)
        found: Counter[Outcome] = Counter()
        damaged: list[bytes] = []
        checked = done = 0
        for row in rows:
            outcomes: Counter[Outcome] = Counter()
            for outcome in self.check(row):
                outcomes[outcome] += 1
                done += row.facts.block_bytes
                if progress is not None:
                    progress(done, total)
            if outcomes.total() > outcomes[Outcome.HIT]:
                segment_id = row.facts.segment_id
                now = self._catalog.read(partial(operations.get_segment, segment_id=segment_id))
                if now is None or not now.facts.state.live:
                    continue
                damaged.append(segment_id)
            found += outcomes
            checked += 1
        return VerifyReport(
            segments=checked,
            blocks=found.total(),
            data_bytes=total,
            tampered=found[Outcome.TAMPERED],
            lost=found[Outcome.MISS],
            unreadable=found[Outcome.KEY_UNAVAILABLE] + found[Outcome.IO_FAILED],
            damaged_segments=tuple(damaged),
        )

    def count_intact(self, row: SegmentRow, file: SegmentFile) -> int:
        """How many leading blocks are authentic; all when that cannot be found out now."""
        intact = 0
        for outcome in self.check(row, file):
            if outcome in (Outcome.KEY_UNAVAILABLE, Outcome.IO_FAILED):
                return row.facts.blocks  # nothing is lost by keeping them: every load authenticates
            if outcome is not Outcome.HIT:
                break
            intact += 1
        return intact

    def _check_slots(
        self, row: SegmentRow, cipher: SegmentCipher, file: SegmentFile
    ) -> Iterator[Outcome]:
        facts = row.facts
        place = Place(
            self._vault_id,
            facts.tenant_id or bytes(16),
            facts.namespace_digest,
            facts.segment_id,
            facts.block_bytes,
        )
        records = Records()
        ids: dict[int, bytes] = {}
        for extent in self._catalog.read(lambda c: operations.list_extents(c, facts.segment_id)):
            if extent.well_formed:
                records.add(extent)
                ids.update(enumerate(block_ids_of(extent), extent.first_slot))
        scratch = AlignedBuffer(facts.block_bytes).view[: facts.block_bytes]
        try:
            for batch in batches(facts.blocks, facts.block_bytes, self._batch_bytes):
                wanted = [
                    Wanted(slot, ids.get(slot, bytes(16)), records[slot], scratch) for slot in batch
                ]
                sealed = read_ciphertext(file, facts.block_bytes, wanted, self._staging)
                for item, data in zip(wanted, sealed, strict=True):
                    if isinstance(data, ShortReadError) or item.slot not in ids:
                        yield Outcome.MISS
                    elif isinstance(data, StorageError):
                        yield Outcome.IO_FAILED
                    elif open_block(place, cipher, item, data):
                        yield Outcome.HIT
                    else:
                        yield Outcome.TAMPERED
        finally:
            wipe(scratch)
