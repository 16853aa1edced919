"""Stores: open segments, batches, group commit, sealing.

A segment is written by one thread at a time: a thread checks an open segment of its scope out,
encrypts and writes one batch, queues the commit, and gives it back. So the commits of one segment
queue up in slot order, committed slots are a prefix of the file, and threads that store for the
same scope at the same time get segments of their own instead of a lock.

A key has to be durable before the first byte under it, and a flush of a busy disk takes as long as
a hundred batches. So whoever fills a segment beyond its half has others made in the background, for
the same scope (`_make_spares`); scopes that store little never have any.

Locks: `_lock` guards the idle segments and the ids in flight; nothing slow happens under it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection

from kvvault import layout
from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.operations import SegmentGoneError
from kvvault.catalog.space import NoSpaceError
from kvvault.counters import Counters
from kvvault.crypto import keys
from kvvault.crypto.aead import SegmentCipher, random_id
from kvvault.crypto.keys import TenantKeys, WrappedSegment
from kvvault.errors import ClosedError, KvvaultError, StorageError, WrongKeyError
from kvvault.governing import LABELS, Governed, Inherited
from kvvault.model import Guard, Namespace, PutReport
from kvvault.options import VaultOptions
from kvvault.origins import Origins, Part
from kvvault.sealing import Sealer
from kvvault.segments.format import MAX_SLOTS, segment_name
from kvvault.segments.io import SegmentDir, SegmentFile
from kvvault.segments.store import OpenSegment, Place, Staging, batches, cipher_turns
from kvvault.space import Space
from kvvault.timekeeping import VaultTime
from kvvault.view import View

log = logging.getLogger(__name__)

_RULE_SEGMENTS = 8
"""What a rule's `max_bytes` allows is at least so many segments: else all of it went at once."""

_NEW_FILE_ATTEMPTS = 5
"""Recovery elsewhere can only take a new file in the microsecond before it is locked."""

_OTHER_SEGMENTS = 5
"""How often a store takes another segment because the one it had was sealed or deleted."""

_ScopeKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where blocks go: whose, of which namespace, and under what."""

    tenant: TenantKeys
    namespace: Namespace
    under: Governed | Inherited

    @property
    def key(self) -> _ScopeKey:
        """Blocks with equal keys share segments."""
        return self.tenant.tenant_id, self.namespace.digest, *self.under.key


@dataclass(slots=True)
class _Growing:
    """Threads of one scope that wait for new segments; `waiting` is guarded by `Writer._lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: int = 0


class Writer:
    """Stores blocks. Any number of threads; each has staging memory of its own."""

    def __init__(
        self,
        vault_id: bytes,
        catalog: Catalog,
        directory: SegmentDir,
        view: View,
        counters: Counters,
        options: VaultOptions,
        time: VaultTime,
        space: Space,
    ) -> None:
        self._vault_id = vault_id
        self._catalog = catalog
        self._directory = directory
        self._view = view
        self._counters = counters
        self._options = options
        self._time = time
        self._space = space
        self._boot_id = layout.boot_id()
        self._lock = threading.Lock()
        self._closed = False
        self._working = 0
        self._none_works = threading.Condition(self._lock)
        # Open segments by id: idle ones, least recently used first, and those a thread writes to.
        self._idle: OrderedDict[bytes, OpenSegment] = OrderedDict()
        self._busy: dict[bytes, OpenSegment] = {}
        self._keys: dict[bytes, _ScopeKey] = {}
        self._in_flight: set[bytes] = set()
        self._local = threading.local()
        self._turns = cipher_turns()
        self._growing: dict[_ScopeKey, _Growing] = {}
        self.sealer = Sealer(catalog, directory, options, time)
        self._wanted: queue.SimpleQueue[Destination | None] = queue.SimpleQueue()
        self._spares_coming: set[_ScopeKey] = set()
        self._spare_maker = threading.Thread(
            target=self._make_spares, name="kvvault-spare", daemon=True
        )
        self._spare_maker.start()

    # -- storing ----------------------------------------------------------------------------------

    def put(
        self,
        to: Destination,
        block_ids: Sequence[bytes],
        buffers: Sequence[memoryview],
        guard: Guard,
        *,
        again: bool = False,
        origins: Origins | None = None,
        into: set[bytes] | None = None,
    ) -> PutReport:
        """Store what is not yet there (`again`: also what is). Returns when everything stored is
        committed and findable. `origins`: whose blocks they are; None: nobody's. `into`: takes the
        ids of the segments that were written to."""
        # What another process deleted a moment ago is not "present", and its segment not writable.
        # Microseconds when nothing happened.
        self._refresh()
        fresh, ours = self._claim(block_ids, again)
        try:
            report = PutReport(present=len(block_ids) - len(fresh))
            if fresh and origins is not None:
                origins.prepare()
            commits: list[tuple[OpenSegment, int, Future[None]]] = []
            block_bytes = to.namespace.block_bytes
            for batch in batches(len(fresh), block_bytes, self._options.batch_bytes):
                chosen = [fresh[i] for i in batch]
                report += self._put_batch(
                    to,
                    [block_ids[i] for i in chosen],
                    [buffers[i] for i in chosen],
                    guard,
                    commits,
                    None if origins is None else Part(origins, chosen),
                )
            for segment, count, commit in commits:
                try:
                    commit.result()
                except KvvaultError as exc:
                    self._retire(segment, exc)
                    report += PutReport(refused=count)
                else:
                    report += PutReport(stored=count)
                    if into is not None:
                        into.add(segment.place.segment_id)
            if commits:
                self._refresh()
        finally:
            with self._lock:
                self._in_flight -= ours
        self._counters.put(report, to.namespace.block_bytes)
        return report

    def _refresh(self) -> None:
        try:
            self._view.refresh()
        except KvvaultError as exc:
            log.warning("the catalog cannot be read: %s", exc)

    def _claim(self, block_ids: Sequence[bytes], again: bool) -> tuple[list[int], set[bytes]]:
        """The positions of blocks that are neither live (`again`: or are) nor being stored by
        anybody here."""
        fresh: list[int] = []
        known: list[bytes] = []
        ours: set[bytes] = set()
        now = self._time.now()
        with self._lock:
            for i, block_id in enumerate(block_ids):
                if block_id in self._in_flight:
                    continue
                if not again and self._view.find(block_id, now) is not None:
                    known.append(block_id)
                else:
                    fresh.append(i)
                    ours.add(block_id)
                    self._in_flight.add(block_id)
        self._view.touch(
            known, self._time.steady()
        )  # somebody computed them again: they are in use
        return fresh, ours

    def _put_batch(
        self,
        to: Destination,
        block_ids: Sequence[bytes],
        buffers: Sequence[memoryview],
        guard: Guard,
        commits: list[tuple[OpenSegment, int, Future[None]]],
        part: Part | None,
    ) -> PutReport:
        """Encrypt and write one batch, in pieces where a segment ends; queues the commits."""
        with self._lock:
            self._working += 1
        try:
            return self._put_pieces(to, block_ids, buffers, guard, commits, part)
        finally:
            with self._lock:
                self._working -= 1
                self._none_works.notify_all()

    def _put_pieces(
        self,
        to: Destination,
        block_ids: Sequence[bytes],
        buffers: Sequence[memoryview],
        guard: Guard,
        commits: list[tuple[OpenSegment, int, Future[None]]],
        part: Part | None,
    ) -> PutReport:
        done = 0
        turns = _OTHER_SEGMENTS
        while done < len(block_ids):
            try:
                segment = self._check_out(to)
            except KvvaultError as exc:
                log.warning("blocks are not stored: %s", exc)
                return PutReport(refused=len(block_ids) - done)
            try:
                self._claim_space(segment, to, len(block_ids) - done)
            except KvvaultError as exc:
                gone = isinstance(exc, SegmentGoneError)
                segment.retired = segment.retired or gone
                self._check_in(segment)
                if gone and turns:  # somebody else has just sealed or deleted it: another one
                    turns -= 1
                    continue
                if not isinstance(exc, NoSpaceError):  # those are counted, and come in storms
                    log.warning("blocks are not stored: %s", exc)
                return PutReport(refused=len(block_ids) - done)
            piece = slice(done, done + min(segment.room, len(block_ids) - done))
            count = piece.stop - piece.start
            try:
                with self._turns:
                    if not guard.enter():
                        return PutReport(refused=len(block_ids) - done)
                    try:
                        extent, ciphertext = segment.seal_batch(
                            block_ids[piece], buffers[piece], self._staging()
                        )
                    finally:
                        guard.leave()
                segment.write(extent, ciphertext)
                add = partial(operations.add_extent, extent=extent)
                commit = self._catalog.submit(add if part is None else part.adding(extent, piece))
            except KvvaultError as exc:
                self._retire(segment, exc)
                return PutReport(refused=len(block_ids) - done)
            finally:
                self._check_in(segment)
            if (
                self._options.spare_segments
                and isinstance(to.under, Governed)
                and segment.next_slot * 2 > segment.capacity
            ):
                self._want_spares(to)
            commits.append((segment, count, commit))
            done = piece.stop
        return PutReport()

    def _claim_space(self, segment: OpenSegment, to: Destination, wanted: int) -> None:
        if segment.room >= min(wanted, segment.capacity - segment.next_slot):
            return
        least = min(wanted, segment.capacity - segment.next_slot) - segment.room
        segment.granted = self._space.claim(
            segment.place.segment_id,
            segment.granted,
            segment.capacity,
            segment.place.block_bytes,
            to.under.max_bytes,
            least=least,
            ahead=isinstance(to.under, Governed),  # to what is copied nothing more comes
            whose=(to.under.rule, to.tenant.tenant_id),
        )

    # -- open segments ----------------------------------------------------------------------------

    def _check_out(self, to: Destination) -> OpenSegment:
        """An open segment with room that no other thread uses; new ones when there is none.

        Raises:
            KvvaultError: new ones cannot be made.
        """
        scope = to.key
        segment = self._take_idle(scope)
        if segment is not None:
            return segment
        with self._lock:
            growing = self._growing.setdefault(scope, _Growing())
            growing.waiting += 1
        try:
            # One thread makes segments for all that wait: a durable commit flushes the device.
            with growing.lock:
                segment = self._take_idle(scope)
                if segment is None:
                    made = self._new_segments(to, growing.waiting)
                    segment = made.pop()
                    with self._lock:
                        self._busy[segment.place.segment_id] = segment
                        self._idle.update((new.place.segment_id, new) for new in made)
                return segment
        finally:
            with self._lock:
                growing.waiting -= 1
                if not growing.waiting:
                    self._growing.pop(scope, None)

    def _want_spares(self, to: Destination) -> None:
        with self._lock:
            if to.key in self._spares_coming or self._closed:
                return
            if any(
                not segment.next_slot and self._keys.get(segment_id) == to.key
                for segment_id, segment in self._idle.items()
            ):
                return
            self._spares_coming.add(to.key)
        self._wanted.put(to)

    def _make_spares(self) -> None:
        while self._make_spares_once():
            pass

    def _make_spares_once(self) -> bool:
        """One round of the spare thread; a frame of its own, so that while it waits it keeps no
        tenant's keys."""
        wanted = self._wanted.get()
        if wanted is None:
            return False
        made: list[OpenSegment] = []
        try:
            made = self._new_segments(wanted, self._options.spare_segments)
            self._view.refresh()
        except KvvaultError as exc:
            log.debug("no segments are made in advance: %s", exc)
        with self._lock:
            self._spares_coming.discard(wanted.key)
            # At the old end: what is in use already comes first, and these are sealed first when
            # too many are open.
            # One that somebody has deleted meanwhile is not taken in: of its death `segment_died`
            # told before it was here.
            dead = [s for s in made if self._view.segment_by_id(s.place.segment_id) is None]
            for segment in made:
                if segment not in dead:
                    self._idle[segment.place.segment_id] = segment
                    self._idle.move_to_end(segment.place.segment_id, last=False)
            closed = self._closed
            finished = [*dead, *self._idle.values()] if closed else dead
            while not closed and len(self._idle) > self._options.max_open_segments:
                finished.append(self._idle.popitem(last=False)[1])
            if closed:
                self._idle.clear()
        self._seal(finished)
        return True

    def _take_idle(self, scope: _ScopeKey) -> OpenSegment | None:
        with self._lock:
            if self._closed:
                raise ClosedError("the vault is closed", hint="open it again")
            now = self._time.steady()
            for segment_id, segment in reversed(self._idle.items()):
                if self._keys.get(segment_id) == scope and now < segment.closes_at:
                    del self._idle[segment_id]
                    self._busy[segment_id] = segment
                    return segment
        return None

    def _check_in(self, segment: OpenSegment) -> None:
        finished: list[OpenSegment] = []
        with self._lock:
            self._busy.pop(segment.place.segment_id, None)
            if segment.full or segment.retired or self._closed:
                finished.append(segment)
            else:
                self._idle[segment.place.segment_id] = segment
                while len(self._idle) > self._options.max_open_segments:
                    finished.append(self._idle.popitem(last=False)[1])
        self._seal(finished)

    def _seal(self, segments: Sequence[OpenSegment]) -> None:
        for segment in segments:
            self._keys.pop(segment.place.segment_id, None)
            self.sealer.seal(segment)

    def close_windows(self) -> None:
        """Seal the segments that take no more blocks because their time for it is over."""
        now = self._time.steady()
        with self._lock:
            over = [segment for segment in self._idle.values() if segment.closes_at <= now]
            for segment in over:
                del self._idle[segment.place.segment_id]
        self._seal(over)

    def _new_segments(self, to: Destination, count: int) -> list[OpenSegment]:
        while True:
            key_no = to.tenant.key_no  # first: all that follows is under this key or a newer one
            try:
                return self._make_segments(to, count, key_no)
            except (SegmentGoneError, WrongKeyError):
                self._view.renew(to.tenant)  # unless a purge has replaced it, nothing changes
                if to.tenant.key_no == key_no:
                    raise

    def _make_segments(self, to: Destination, count: int, key_no: int) -> list[OpenSegment]:
        """Make `count` segments with one durable commit. Each has a key and a place of its own.

        Their files come first, empty and locked, so that recovery in another process sees an owner
        from the start; the rows are durable before a file gets its first byte (REQ-C5).
        """
        made: list[tuple[bytes, SegmentFile, WrappedSegment, SegmentCipher]] = []
        tenant, namespace = to.tenant, to.namespace
        now = to.under.opened_at(self._time.steady())
        terms = to.under.terms(now, tenant)
        if terms.sealed_labels is not None:
            tenant.open_text(LABELS, terms.sealed_labels)  # inherited ones may be older

        def add(connection: Connection) -> None:
            for segment_id, _file, wrapped, _cipher in made:
                operations.add_segment(
                    connection,
                    segment_id=segment_id,
                    tenant_id=tenant.tenant_id,
                    namespace=namespace,
                    wrapped_secret=wrapped.key,
                    commitment=wrapped.commitment,
                    boot_id=self._boot_id,
                    now=now,
                    terms=terms,
                    key_no=key_no,
                )

        try:
            for _ in range(count):
                segment_id, file = self._new_file()
                made.append(
                    (segment_id, file, *keys.new_segment(tenant, segment_id, namespace.digest))
                )
            self._catalog.write(add)
        except BaseException:
            for _segment_id, file, _wrapped, _cipher in made:
                with contextlib.suppress(KvvaultError):
                    self._directory.unlink(file.name)
            raise
        size = to.under.segment_bytes or self._options.segment_bytes
        if to.under.max_bytes is not None:
            size = min(size, to.under.max_bytes // _RULE_SEGMENTS)
        capacity = max(1, min(size // namespace.block_bytes, MAX_SLOTS))
        for segment_id, _file, _wrapped, _cipher in made:
            self._keys[segment_id] = to.key
        return [
            OpenSegment(
                Place(
                    self._vault_id,
                    tenant.tenant_id,
                    namespace.digest,
                    segment_id,
                    namespace.block_bytes,
                ),
                cipher,
                file,
                capacity,
                closes_at=to.under.closes_at(now),
            )
            for segment_id, file, _wrapped, cipher in made
        ]

    def _new_file(self) -> tuple[bytes, SegmentFile]:
        for _ in range(_NEW_FILE_ATTEMPTS):
            segment_id = random_id()
            file = self._directory.create(segment_name(segment_id))
            if file is not None:
                return segment_id, file
        raise StorageError(
            "new segment files disappear", hint="find out what else removes files in the vault"
        )

    def _retire(self, segment: OpenSegment, reason: KvvaultError) -> None:
        """Something went wrong with a segment: keep what is committed, write no more to it."""
        if not isinstance(reason, SegmentGoneError):
            log.warning("a segment takes no more blocks: %s", reason)
        with self._lock:
            segment.retired = True
            idle = self._idle.pop(segment.place.segment_id, None)
        if idle is not None:
            self._seal([idle])
        # Otherwise the thread that has it checked out seals it when it gives it back.

    def segment_died(self, segment_id: bytes) -> None:
        """A segment was revoked, perhaps by another process: write no more to it. Called under the
        view's lock."""
        with self._lock:
            segment = self._idle.pop(segment_id, None) or self._busy.get(segment_id)
            if segment is not None:
                segment.retired = True
                segment.cipher.stop_sealing()

    def segment_sealed(self, segment_id: bytes) -> None:
        """A segment takes no more blocks, perhaps because another process compacts it: what would
        be written to it now would be refused. Called under the view's lock."""
        with self._lock:
            idle = self._idle.pop(segment_id, None)
            busy = self._busy.get(segment_id)
            if busy is not None:
                busy.retired = True
        if idle is not None:
            self._seal([idle])

    def _staging(self) -> Staging:
        staging = getattr(self._local, "staging", None)
        if not isinstance(staging, Staging):
            staging = self._local.staging = Staging()
        return staging

    def close(self) -> None:
        """Seal every open segment. Stores that are under way finish their batch, and are waited for
        as long as `VaultOptions.lock_timeout_s`: what hangs on a dead disk for longer is left to
        whoever opens the vault next. Idempotent."""
        with self._lock:
            self._closed = True
        self._wanted.put(None)
        self._spare_maker.join(self._options.lock_timeout_s)
        with self._lock:
            self._none_works.wait_for(lambda: not self._working, self._options.lock_timeout_s)
            idle = list(self._idle.values())
            self._idle.clear()
        self.sealer.close(idle)
