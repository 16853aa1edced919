"""What this process knows of the vault: live segments, where each block is, keys to read them.

There is one way in: rows that were committed, by this process or another, come through `refresh`.
So a block is findable exactly when it is committed, whoever wrote it. (Committed outlives any
process; a power failure may take the newest blocks, see `kvvault.sealing`.)

Locks: `find` takes none (scheduler thread). `refresh` and everything that changes the view hold
`_lock`; `_tenants_lock` is taken before it. Ciphers and files are made on first use, by whoever
needs them, under the segment's own lock.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.retention import Use
from kvvault.catalog.rows import RevokedBlock, SegmentRow
from kvvault.crypto import keys
from kvvault.crypto.aead import SegmentCipher
from kvvault.crypto.keys import TenantKeys, WrappedSegment
from kvvault.errors import ClosedError, StorageError, WrongKeyError
from kvvault.keyring import KeyRing, gone
from kvvault.model import SegmentState
from kvvault.segments.format import Extent, segment_name
from kvvault.segments.index import Location, SegmentIndex
from kvvault.segments.io import SegmentDir, SegmentFile
from kvvault.segments.store import Place, Records

_MAX_OPEN_FILES = 256
_MAX_USES = 255


class LiveSegment:
    """One readable segment."""

    __slots__ = (
        "_cipher",
        "_dead",
        "_hits",
        "_last_used",
        "_lock",
        "_used_at",
        "_uses",
        "_wrapped",
        "deadline",
        "number",
        "opened_at",
        "place",
        "records",
        "revoked",
        "slides",
    )

    def __init__(self, number: int, place: Place, wrapped: WrappedSegment) -> None:
        self.number = number
        self.place = place
        self.records = Records()
        self.deadline = math.inf
        """Not served from then on. Written under the view's lock, read by anybody."""
        self.slides = False
        """Whether use moves its deadline."""
        self.revoked: frozenset[int] = frozenset()
        """Slots that are not served any more. Replaced under the view's lock, read by anybody."""
        self.opened_at = 0.0
        self._uses: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._used_at: npt.NDArray[np.float64] = np.zeros(0, np.float64)
        self._hits = 0
        self._last_used = 0.0
        self._wrapped = wrapped
        self._cipher: SegmentCipher | None = None
        self._dead = False
        self._lock = threading.Lock()

    def cipher(self, catalog: Catalog, ring: KeyRing) -> SegmentCipher:
        """The segment's key, unwrapped on first use, its commitment checked.

        Raises:
            KeyUnavailableError: the provider does not answer.
            WrongKeyError, KeyDestroyedError: it does not open: altered, or the tenant is gone.
        """
        cipher = self._cipher
        if cipher is not None:
            return cipher
        # No lock is held while the provider is asked: `close` is called under the view's lock.
        opened = self._open(catalog, ring)
        with self._lock:
            if self._dead:
                opened.close()
                raise gone()
            if self._cipher is None:
                self._cipher = opened
            return self._cipher

    def _open(self, catalog: Catalog, ring: KeyRing) -> SegmentCipher:
        place = self.place
        tenant = ring.known(place.tenant_id)
        if tenant is not None:
            with suppress(WrongKeyError):  # a purge has replaced one or the other: look again
                return keys.open_segment(
                    tenant, self._wrapped, place.segment_id, place.namespace_digest
                )
        return ring.open_segment(catalog, place.segment_id, place.namespace_digest)

    def follow(self, row: SegmentRow) -> None:
        """Take over what may change of a live segment. Called under the view's lock."""
        self.deadline = row.facts.deadline
        self.opened_at = row.facts.created_at
        self.slides = row.idle_s is not None
        if row.wrapped_secret is not None:
            self._wrapped = WrappedSegment(row.wrapped_secret, row.commitment)

    def use(self, slots: Sequence[int], now: float, *, times: int = 1) -> None:
        """Blocks of it were loaded, or would have been stored again. Kept per slot in this process,
        to decide what is evicted; counts saturate. Microseconds."""
        with self._lock:
            highest = max(slots) + 1
            if len(self._uses) < highest:
                more = highest - len(self._uses)
                self._uses = np.concatenate([self._uses, np.zeros(more, np.uint8)])
                self._used_at = np.concatenate(
                    [self._used_at, np.full(more, self.opened_at, np.float64)]
                )
            for slot in slots:
                self._uses[slot] = min(int(self._uses[slot]) + times, _MAX_USES)
                self._used_at[slot] = max(float(self._used_at[slot]), now)
            self._hits += len(slots) * times
            self._last_used = max(self._last_used, now)

    def take_use(self) -> Use | None:
        """What was used since the last call; None when nothing was."""
        with self._lock:
            if not self._hits:
                return None
            use = Use(self.place.segment_id, self._hits, self._last_used)
            self._hits = 0
            return use

    def uses(self, blocks: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]] | None:
        """How often this process used each of the first `blocks` slots, and when last (or stored):
        two arrays of that length. None when it used none."""
        with self._lock:
            if not len(self._uses):
                return None
            counts = np.zeros(blocks, np.uint8)
            times = np.full(blocks, self.opened_at, np.float64)
            known = min(blocks, len(self._uses))
            counts[:known] = self._uses[:known]
            times[:known] = self._used_at[:known]
            return counts, times

    def close(self) -> None:
        """Drop the key. Waits for nobody."""
        with self._lock:
            self._dead = True
            if self._cipher is not None:
                self._cipher.close()


class View:
    """Index and live segments of one process."""

    def __init__(
        self, vault_id: bytes, catalog: Catalog, directory: SegmentDir, ring: KeyRing
    ) -> None:
        self._vault_id = vault_id
        self._catalog = catalog
        self._directory = directory
        self._ring = ring
        self._lock = threading.Lock()
        self._index = SegmentIndex()
        self._by_number: dict[int, LiveSegment] = {}
        self._by_id: dict[bytes, LiveSegment] = {}
        self._next_number = 0
        self._files: OrderedDict[int, SegmentFile] = OrderedDict()
        self._files_lock = threading.Lock()
        self._on_death: Callable[[bytes], None] = lambda _segment_id: None
        self._on_seal: Callable[[bytes], None] = lambda _segment_id: None
        self._on_policy: Callable[[int], None] = lambda _policy_no: None
        self._closed = False
        self._outside: set[bytes] = set()
        """Live segments that are not taken in, whatever changes of their rows: extents come only
        once, so they would be there without them."""
        self._tenants_lock = threading.Lock()
        self._unasked = False
        self._removals = 0

    def when_segment_dies(self, callback: Callable[[bytes], None]) -> None:
        """Have `callback` called, under the view's lock, with each segment that ceases to live."""
        self._on_death = callback

    def when_segment_is_sealed(self, callback: Callable[[bytes], None]) -> None:
        """Have `callback` called, under the view's lock, with each segment that takes no more
        blocks."""
        self._on_seal = callback

    def when_policy_changes(self, callback: Callable[[int], None]) -> None:
        """Have `callback` called, under the view's lock, with the number of the policy in force."""
        self._on_policy = callback

    # -- reading ----------------------------------------------------------------------------------

    def find(self, block_id: bytes, now: float) -> Location | None:
        """Where a block is that may be served at `now`, as of the last refresh. Lock-free;
        scheduler thread."""
        location = self._index.find(block_id)
        if location is None:
            return None
        segment = self._by_number.get(location.number)
        return None if segment is None or segment.deadline <= now else location

    def earliest_deadline(self) -> float:
        """Of all live segments, as of the last refresh; infinite when there is none."""
        with self._lock:
            return min((s.deadline for s in self._by_number.values()), default=math.inf)

    def touch(self, block_ids: Sequence[bytes], now: float) -> None:
        """Blocks are in use although nobody loads them. Memory and short locks only."""
        for block_id in block_ids:
            location = self.find(block_id, now)
            segment = None if location is None else self._by_number.get(location.number)
            if location is not None and segment is not None:
                segment.use([location.slot], now)

    def take_uses(self) -> list[Use]:
        """What of live segments was used since the last call."""
        with self._lock:
            segments = list(self._by_number.values())
        return [use for segment in segments if (use := segment.take_use()) is not None]

    def segment_by_id(self, segment_id: bytes) -> LiveSegment | None:
        """A live segment, as of the last refresh."""
        return self._by_id.get(segment_id)

    def segment(self, number: int) -> LiveSegment | None:
        """A live segment by its number, as of the last refresh."""
        return self._by_number.get(number)

    def cipher(self, segment: LiveSegment) -> SegmentCipher:
        """See `LiveSegment.cipher`."""
        return segment.cipher(self._catalog, self._ring)

    def renew(self, tenant: TenantKeys) -> None:
        """Have a tenant's keys follow the catalog, after a purge elsewhere. See `KeyRing.renew`."""
        self._ring.renew(self._catalog, tenant)

    def file(self, segment: LiveSegment) -> SegmentFile:
        """The segment's file, opened for reading and kept for the next time.

        Raises:
            FileNotFoundError, UnsafeFileError, StorageError.
        """
        with self._files_lock:
            file = self._files.get(segment.number)
            if file is not None:
                self._files.move_to_end(segment.number)
                return file
        file = self._directory.open(segment_name(segment.place.segment_id))
        with self._files_lock:
            # Not when it died meanwhile: an unlinked file that is kept open keeps its space.
            if segment.number in self._by_number:
                self._files[segment.number] = file
            # A dropped file is closed when its last reader is done with it.
            while len(self._files) > _MAX_OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def files(self, segment_ids: Iterable[bytes]) -> dict[bytes, SegmentFile]:
        """The files of live segments.

        Raises:
            StorageError: one is gone, or cannot be opened.
        """
        found: dict[bytes, SegmentFile] = {}
        for segment_id in segment_ids:
            segment = self.segment_by_id(segment_id)
            try:
                if segment is None:
                    raise FileNotFoundError
                found[segment_id] = self.file(segment)
            except FileNotFoundError:
                raise StorageError(
                    "a segment is gone that was just written to", hint="try again"
                ) from None
        return found

    def discard(self, block_id: bytes, location: Location) -> None:
        """Forget a block that did not authenticate or whose bytes are missing."""
        self._index.discard(block_id, location)

    def discard_segment(self, segment: LiveSegment) -> None:
        """Forget a segment whose key does not open or whose file is gone. Rows and file stay for
        `verify` and recovery: what fails is counted, not silently deleted (REQ-F4). It stays
        outside until the vault is opened again."""
        with self._lock:
            self._forget(segment)
            self._outside.add(segment.place.segment_id)
            self._on_death(segment.place.segment_id)

    def drop(self, segment_ids: Sequence[bytes]) -> None:
        """Forget segments that this process has just deleted, whatever the catalog says of them."""
        with self._lock:
            self._removals += 1
            for segment_id in segment_ids:
                known = self._by_id.get(segment_id)
                if known is not None:
                    self._forget(known)
                    self._on_death(segment_id)

    def drop_forgotten_tenants(self) -> None:
        """Overwrite the keys of tenants that another process forgot, as of the last refresh. One
        small query when something was committed since the last time, nothing otherwise.

        Raises:
            StorageError, CatalogError, VaultLockedError: it is done the next time.
        """
        with self._tenants_lock:  # held while the catalog is read: nobody goes on before it is done
            with self._lock:
                unasked, self._unasked = self._unasked, False
            if not unasked:
                return
            # Listed before the catalog is read: keys are opened only of tenants that are in it.
            opened = self._ring.tenant_ids
            try:
                living = self._catalog.read(partial(operations.living_tenants, tenant_ids=opened))
            except BaseException:
                with self._lock:
                    self._unasked = True
                raise
            for tenant_id in opened:
                if tenant_id not in living:
                    self._ring.drop(tenant_id)

    @property
    def blocks(self) -> int:
        return len(self._index)

    @property
    def removals(self) -> int:
        """Grows whenever deletions were noticed. Lock-free."""
        return self._removals

    @property
    def index_bytes(self) -> int:
        """Memory of the index and of all nonces and tags."""
        with self._lock:
            records = sum(segment.records.nbytes for segment in self._by_number.values())
        return self._index.nbytes + records

    # -- following the catalog --------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what was committed since the last time. Microseconds when nothing was.

        Raises:
            CatalogError, StorageError, VaultLockedError: the view stays as it was.
            ClosedError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the vault is closed", hint="open it again")
            delta = self._catalog.poll()
            if delta is None:
                return
            self._unasked = True
            # First: who finds nothing and sees the number unchanged must not have missed one. Rows
            # that were never known here count, too: written and deleted between two refreshes.
            self._removals += bool(delta.revoked) or any(
                not row.facts.state.live for row in delta.segments
            )
            died: dict[bytes, LiveSegment] = {}
            for row in delta.segments:
                known = self._by_id.get(row.facts.segment_id)
                if row.facts.state.live:
                    if known is None:
                        self._enter(row)
                    else:
                        known.follow(row)
                    if row.facts.state is SegmentState.SEALED:
                        self._on_seal(row.facts.segment_id)
                else:
                    self._outside.discard(row.facts.segment_id)
                    if known is not None:
                        died[row.facts.segment_id] = known
            # Before the dead go: who looks meanwhile, without the lock, finds what was written to
            # another segment either there or where it was.
            self._add_extents(one for one in delta.extents if one.segment_id not in died)
            for segment_id, segment in died.items():
                self._forget(segment)
                self._on_death(segment_id)
            self._revoke(delta.revoked)
            self._on_policy(delta.policy_no)

    def _enter(self, row: SegmentRow) -> None:
        if row.facts.segment_id in self._outside:
            return
        if row.wrapped_secret is None or row.facts.tenant_id is None or not row.well_formed:
            # The schema forbids it, a damaged catalog does not: misses.
            self._outside.add(row.facts.segment_id)
            return
        place = Place(
            self._vault_id,
            row.facts.tenant_id,
            row.facts.namespace_digest,
            row.facts.segment_id,
            row.facts.block_bytes,
        )
        wrapped = WrappedSegment(row.wrapped_secret, row.commitment)
        segment = LiveSegment(self._next_number, place, wrapped)
        segment.follow(row)
        self._next_number += 1
        self._by_number[segment.number] = segment
        self._by_id[place.segment_id] = segment
        self._index.add_segment(segment.number)

    def _forget(self, segment: LiveSegment) -> None:
        self._index.drop_segment(segment.number)
        self._by_number.pop(segment.number, None)
        self._by_id.pop(segment.place.segment_id, None)
        with self._files_lock:
            self._files.pop(segment.number, None)
        segment.close()

    def _add_extents(self, extents: Iterable[Extent]) -> None:
        placed: list[tuple[int, int, bytes]] = []
        for extent in extents:
            segment = self._by_id.get(extent.segment_id)
            if segment is None or not extent.well_formed:
                continue  # dead already, or a damaged row: misses
            segment.records.add(extent)
            placed.append((segment.number, extent.first_slot, extent.block_ids))
        if len(placed) > 256:
            self._index.add_many(placed)
        else:
            for number, first_slot, block_ids in placed:
                self._index.add(number, first_slot, block_ids)

    def _revoke(self, revoked: Sequence[RevokedBlock]) -> None:
        """Single blocks are not served any more. After their extents: also in a vault that is just
        opened."""
        slots: dict[bytes, list[int]] = {}
        for one in revoked:
            segment = self._by_id.get(one.segment_id)
            if segment is not None:
                self._index.discard(one.block_id, Location(segment.number, one.slot))
                slots.setdefault(one.segment_id, []).append(one.slot)
        for segment_id, dead in slots.items():
            segment = self._by_id[segment_id]
            segment.revoked = segment.revoked.union(dead)

    def close(self) -> None:
        """Forget everything. Nobody polls the catalog through this view afterwards, so the catalog
        may be closed while loads are still under way; they miss."""
        with self._lock:
            self._closed = True
            for segment in list(self._by_number.values()):
                self._forget(segment)
