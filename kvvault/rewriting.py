"""Writing blocks again that are on the disk already: under another key, on the terms they had.

Two callers. Eviction saves what is hot of a segment before it deletes it, and writes it after.
`kvvault.erasing` copies what stays of a segment to another one before it deletes that. Nothing
written again lives longer than before, and it counts as used as often and as lately as it was.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import SegmentRow, Terms
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import KvvaultError, StorageError
from kvvault.governing import Inherited
from kvvault.keyring import KeyRing
from kvvault.model import Namespace, Outcome
from kvvault.origins import Operation
from kvvault.reading import ALWAYS, Reader
from kvvault.segments.fence import Fence
from kvvault.segments.format import Extent
from kvvault.segments.io import AlignedBuffer
from kvvault.segments.store import Wanted, batches, block_ids_of, origins_of, records_of
from kvvault.timekeeping import VaultTime
from kvvault.view import View
from kvvault.writing import Destination, Writer

log = logging.getLogger(__name__)

_WINDOW_S = 5.0
"""How long a segment of blocks that are written again takes more of them."""

_TOLD = frozenset({Outcome.HIT, Outcome.TAMPERED, Outcome.MISS})
"""Outcomes of `Reader.read_slots` after which nothing is to be had by trying again."""

_COPY_BYTES = 32 << 20
"""How much is in memory at once when a segment is copied."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Blocks in memory that are to be written again."""

    block_ids: tuple[bytes, ...]
    blocks: tuple[memoryview, ...]
    uses: tuple[tuple[int, float], ...]
    """How often each was used, and when last."""
    origins: tuple[bytes, ...]
    """Whose each was."""
    unreadable: int
    """Blocks that could not be read now, which says nothing of them."""

    def without(self, block_ids: Collection[bytes]) -> Saved:
        """All but these."""
        stay = [i for i, one in enumerate(self.block_ids) if one not in block_ids]
        return Saved(
            tuple(self.block_ids[i] for i in stay),
            tuple(self.blocks[i] for i in stay),
            tuple(self.uses[i] for i in stay),
            tuple(self.origins[i] for i in stay),
            self.unreadable,
        )


class _Carried:
    """Blocks that are written again stay whose they were."""

    def __init__(self, origins: Sequence[bytes]) -> None:
        self._origins = origins

    def prepare(self) -> None:
        """Nothing to do: their prompts have rows."""

    def adding(self, extent: Extent, positions: Sequence[int]) -> Operation:
        """As they were."""
        whose = b"".join(self._origins[i] for i in positions)
        return partial(operations.add_extent, extent=replace(extent, origins=whose))


class Rewriter:
    """Any thread."""

    def __init__(
        self,
        catalog: Catalog,
        view: View,
        ring: KeyRing,
        reader: Reader,
        writer: Writer,
        time: VaultTime,
        fence: Fence,
        timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._view = view
        self._ring = ring
        self._reader = reader
        self._writer = writer
        self._fence = fence
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._time = time

    @property
    def busy(self) -> bool:
        """Whether this thread is writing blocks again: it must not evict to do so."""
        return getattr(self._local, "busy", False)

    @contextlib.contextmanager
    def alone(self, patience_s: float | None = None) -> Iterator[None]:
        """Nobody else, in any process, writes blocks again meanwhile: what one deletes another
        could bring back.

        Raises:
            VaultLockedError: somebody does, for longer than that (None: `lock_timeout_s`).
        """
        with self._fence.exclusive(
            "rewrite", self._timeout_s if patience_s is None else patience_s
        ):
            self._local.busy = True
            try:
                yield
            finally:
                self._local.busy = False

    def copy(self, segment_id: bytes, slots: Sequence[int]) -> set[bytes]:
        """Write slots of a live segment to other ones, and say which. When it returns, whoever
        looks for these blocks finds the copies; a power failure may still take them (`sync`).

        What does not authenticate or has no bytes is no loss and is left behind.

        Raises:
            StorageError: not all of them could be read or written; those that were are there twice.
            CatalogError: the catalog cannot be read.
        """
        self._view.refresh()  # nonces and tags of what others have just committed
        row = self._catalog.read(partial(operations.get_segment, segment_id=segment_id))
        into: set[bytes] = set()
        if row is None or not row.facts.state.live:
            return into
        for batch in batches(len(slots), row.facts.block_bytes, _COPY_BYTES):
            wanted = [slots[i] for i in batch]
            saved = self.save(row, wanted)
            if saved is None and self._view.segment_by_id(segment_id) is not None:
                continue  # the rows that say what is there are damaged
            if saved is None or saved.unreadable:
                raise StorageError(
                    "the blocks that stay cannot be read now",
                    hint="check the disk, the files' permissions and the key provider, then open "
                    "the vault again",
                )
            if self.write(row, saved, again=True, into=into) < len(saved.block_ids):
                raise StorageError(
                    "the blocks that stay cannot be written to another segment",
                    hint="free some space, or delete the whole segment",
                )
        return into

    def sync(self, segment_ids: Collection[bytes]) -> None:
        """Make copies as durable as what they were made of will be gone.

        Raises:
            StorageError: they are not; those of which that is so are given up, and made anew by the
                next attempt.
        """
        if segment_ids:
            self._writer.sealer.sync(self._view.files(segment_ids))

    def save(self, row: SegmentRow, slots: Sequence[int]) -> Saved | None:
        """Read blocks into memory, as far as they are authentic; None when none is known."""
        segment = self._view.segment_by_id(row.facts.segment_id)
        if segment is None:
            return None
        extents = self._catalog.read(
            partial(operations.list_extents, segment_id=row.facts.segment_id)
        )
        sound = [extent for extent in extents if extent.well_formed]
        ids = {
            extent.first_slot + i: block_id
            for extent in sound
            for i, block_id in enumerate(block_ids_of(extent))
        }
        # Not those of the view: it may have the segment without its extents.
        records = {
            extent.first_slot + i: record
            for extent in sound
            for i, record in enumerate(records_of(extent))
        }
        whose = {
            extent.first_slot + i: origin
            for extent in sound
            for i, origin in enumerate(origins_of(extent))
        }
        size = row.facts.block_bytes
        wanted = sorted(slot for slot in slots if slot in ids)
        if not wanted:
            return None
        memory = AlignedBuffer(len(wanted) * size).view
        parts = [memory[i * size : (i + 1) * size] for i in range(len(wanted))]
        outcomes = self._reader.read_slots(
            segment,
            [
                Wanted(slot, ids[slot], records[slot], part)
                for slot, part in zip(wanted, parts, strict=True)
            ],
            ALWAYS,
        )
        good = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
        known = segment.uses(row.facts.blocks)
        return Saved(
            tuple(ids[wanted[i]] for i in good),
            tuple(parts[i] for i in good),
            tuple(
                (0, row.facts.created_at)
                if known is None
                else (int(known[0][wanted[i]]), float(known[1][wanted[i]]))
                for i in good
            ),
            tuple(whose[wanted[i]] for i in good),
            sum(outcome not in _TOLD for outcome in outcomes),
        )

    def write(
        self,
        row: SegmentRow,
        saved: Saved,
        *,
        again: bool = False,
        into: set[bytes] | None = None,
    ) -> int:
        """How many blocks were written. `again`: although they are there. `into`: takes the ids of
        the segments they are in."""
        facts = row.facts
        try:
            tenant = self._catalog.read(
                partial(operations.get_tenant, tenant_id=facts.tenant_id or b"")
            )
            namespace = next(
                (
                    known.namespace
                    for known in self._catalog.read(operations.list_namespaces)
                    if known.namespace.digest == facts.namespace_digest
                ),
                None,
            )
            if tenant is None or namespace is None:
                return 0
            to = _inheriting(row, self._ring.tenant(tenant), namespace, self._time.steady())
            report = self._writer.put(
                to,
                saved.block_ids,
                saved.blocks,
                ALWAYS,
                again=again,
                origins=_Carried(saved.origins),
                into=into,
            )
        except KvvaultError as exc:
            log.warning("blocks are not written again: %s", exc)
            return 0
        for block_id, (times, last) in zip(saved.block_ids, saved.uses, strict=True):
            self._carry_over(block_id, times, last)
        return report.stored

    def _carry_over(self, block_id: bytes, times: int, last: float) -> None:
        """What is known of a block's use goes where the block goes."""
        location = self._view.find(block_id, self._time.now())
        segment = None if location is None else self._view.segment(location.number)
        if location is not None and segment is not None and times:
            segment.use([location.slot], last, times=times)


def _inheriting(
    row: SegmentRow, tenant: TenantKeys, namespace: Namespace, now: float
) -> Destination:
    """Where blocks of a segment go that live on: under its own terms, as old as it is."""
    facts = row.facts
    kept = Terms(
        policy_no=facts.policy_no,
        rule=facts.rule,
        retention_class=facts.retention_class,
        sealed_labels=row.sealed_labels,
        delete_by=facts.delete_by,
        idle_s=row.idle_s,
        idle_until=facts.idle_until,
        keep_until=facts.keep_until,
    )
    under = Inherited(facts.segment_id, kept, facts.created_at, now + _WINDOW_S)
    return Destination(tenant, namespace, under)
