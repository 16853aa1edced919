"""A KV cache in two tiers for programs without vLLM: DRAM above, the encrypted vault below.

::

    vault = Vault.open("/srv/kv")
    namespace = Namespace.of(block_bytes, {"model": "...", "dtype": "bfloat16", ...})
    with TieredCache.open(vault, "alice", namespace, dram_bytes=8 << 30) as cache:
        n = cache.lookup(keys)                  # how many leading blocks need no computing
        n = cache.load(keys[:n], tensors[:n])   # ... and are in the tensors now
        ...                                     # compute the rest
        cache.offload(keys[n:], tensors[n:])    # for next time

A *key* names a block's content: a hash of everything that its bytes follow from, the tokens before
it included, so that the keys of a prompt form a chain and only *leading* hits are of use. What goes
without saying for all of them (model, dtype, layout) is in the namespace.

Every new block goes to DRAM at once and to the vault in the background (always-cascade), so DRAM
may evict it whenever it likes. What a load wants and DRAM lacks is promoted: read, authenticated
and kept in DRAM, from where it is copied to the tensors. So a tensor never sees a byte that was not
authenticated, and a block that fails is a miss.

Locks: `_lock` guards the slot table and the counters. Copies, and all I/O, happen outside it; the
pool's lock is taken below it.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from kvvault.errors import ClosedError, ConfigError, KvvaultError
from kvvault.model import Clock, Guard, Namespace, Outcome, SystemClock
from kvvault.tiering.slots import Entry, Residence, SlotTable
from kvvault.tiering.stats import TieringStats
from kvvault.tiering.transfers import Finished, PoolOptions, TransferPool
from kvvault.vault import Scope, Vault

if TYPE_CHECKING:
    import torch

_TRANSFER_BYTES = 4 << 20
"""Blocks move in transfers of about this size: large enough for few commits and large reads, small
enough that the first blocks of a prompt are ready while the last are still read."""

_POLL_S = 0.05
"""How often somebody who waits looks for passed time limits; what ends by itself wakes it."""


class _Moved(NamedTuple):
    """What became of the blocks of one transfer."""

    there: list[bool]
    """One per block: in DRAM now, or findable in the vault."""
    failed: int


class TieredCache:
    """One tenant's blocks of one namespace. Make it with `open`; close it before the vault.

    Any method from any thread. After `close`, every method but `close` and `stats` raises
    ClosedError.

    Tensors: one per block, contiguous, of exactly `namespace.block_bytes` bytes; any dtype, shape
    and device. A stacked tensor of shape (blocks, ...) will do. Raises ValueError otherwise, and
    when there are not as many tensors as keys.
    """

    def __init__(
        self, vault: Vault, scope: Scope, dram_bytes: int, options: PoolOptions, clock: Clock
    ) -> None:
        """Not for callers: see `open`."""
        try:
            from kvvault.tiering import device
        except ModuleNotFoundError as exc:
            if exc.name != "torch":
                raise
            raise ConfigError(
                "the tiering engine needs torch", hint="pip install 'kvvault[torch]'"
            ) from exc
        self._block_bytes = scope.namespace.block_bytes
        count = dram_bytes // self._block_bytes
        if count < 1:
            raise ConfigError(
                f"dram_bytes is smaller than one block of {self._block_bytes} bytes",
                hint="give the cache room for at least one prompt",
            )
        self._device = device
        self._vault = vault
        self._scope = scope
        self._clock = clock
        self._memory = device.HostMemory(count, self._block_bytes)
        self._table = SlotTable(count)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._moving: dict[int, list[Entry]] = {}  # under way between DRAM and vault, by transfer
        self._ids = itertools.count()
        self._closed = False
        self._pool: TransferPool[_Moved] = TransferPool(
            options, clock, on_end=self._collect, name="kvvault-tier"
        )

    @classmethod
    def open(
        cls,
        vault: Vault,
        tenant: str,
        namespace: Namespace,
        *,
        dram_bytes: int,
        options: PoolOptions | None = None,
        clock: Clock | None = None,
    ) -> TieredCache:
        """A cache on an open vault. It finds what earlier ones left there.

        `dram_bytes` is reserved at once, in whole blocks, and pinned where CUDA is there. `options`
        are those of the threads that move blocks to and from the vault.

        Raises:
            ConfigError: no room for one block, or torch is not installed.
            UsageError, VaultKeyError, StorageError, CatalogError: as `Vault.scope`.
        """
        return cls(
            vault,
            vault.scope(tenant, namespace),
            dram_bytes,
            options or PoolOptions(),
            clock or SystemClock(),
        )

    # -- putting in -------------------------------------------------------------------------------

    def offload(self, keys: Sequence[bytes], tensors: Sequence[torch.Tensor]) -> int:
        """Keep blocks: copy them to DRAM, queue them for the vault. Returns how many are in DRAM.

        Takes as long as the copy; the tensors may be changed afterwards. The others are dropped and
        counted: every slot was in use, by stores that wait for the disk above all. What is there
        already is not copied again, nor stored again if the vault has it.
        """
        blocks = self._blocks(keys, tensors)
        self._collect()
        held: list[Entry] = []
        fresh: list[tuple[Entry, torch.Tensor]] = []
        with self._lock:
            self._check_open()
            for key, block in zip(keys, blocks, strict=True):
                entry = self._table.find(key)
                if entry is not None:
                    self._table.hold(entry)
                else:
                    entry = self._table.reserve(key)
                    if entry is None:
                        self._counts["dropped"] += 1
                        continue
                    fresh.append((entry, block))
                held.append(entry)
        try:
            self._device.copy((self._memory.tensor(e.slot), block) for e, block in fresh)
        except BaseException:
            with self._changed:
                for entry, _ in fresh:
                    self._table.discard(entry)
                self._let_go(held)
            raise
        with self._changed:
            # Under the lock, some microseconds a block: a store that ends meanwhile is not undone.
            in_vault = self._vault.contains(self._scope, [entry.key for entry in held])
            for entry, _ in fresh:
                self._table.publish(entry)
            self._counts["offloaded"] += len(fresh)
            missing: dict[Entry, None] = {}
            for entry, there in zip(held, in_vault, strict=True):
                entry.stored = there  # one that was deleted there is, from now on, a new block
                if not there and not entry.storing and entry.residence is Residence.RESIDENT:
                    missing[entry] = None
            self._cascade(list(missing))
            self._let_go(held)
        return len(held)

    def _cascade(self, entries: Sequence[Entry]) -> None:
        """Queue blocks for the vault. Caller holds the lock."""
        removals = self._vault.removals
        for group in self._groups(entries):
            for entry in group:
                self._table.hold(entry)
                entry.storing = True
                entry.given_at = removals
            keys = [entry.key for entry in group]
            views = [self._memory.view(entry.slot) for entry in group]

            def store(
                guard: Guard, keys: list[bytes] = keys, views: list[memoryview] = views
            ) -> _Moved:
                report = self._vault.put(self._scope, keys, views, guard=guard)
                if report.stored + report.present == len(keys):
                    # What was deleted since, too: the vault has had it. What another thread is just
                    # storing is here in a moment; until then, at worst, it is a miss.
                    return _Moved([True] * len(keys), 0)
                left_out = report.refused + report.declined
                return _Moved(self._vault.contains(self._scope, keys), left_out)

            number = next(self._ids)
            self._moving[number] = group
            if not self._pool.submit_store(number, [store], len(group) * self._block_bytes):
                del self._moving[number]
                self._counts["dropped_stores"] += len(group)
                for entry in group:
                    entry.storing = False
                    entry.given_at = None
                self._let_go(group)

    # -- looking ----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are in DRAM or in the vault: what `load` may hope for.

        Memory only, and no promise: a block may turn out damaged or be deleted before it is loaded.
        """
        self._collect()
        with self._lock:
            self._check_open()
            entries = [self._table.find(key) for key in keys]
            known = [None if entry is None else entry.stored for entry in entries]
        stalled = self._pool.stalled
        for i, (key, stored) in enumerate(zip(keys, known, strict=True)):
            if stored is False:  # in DRAM alone
                there = self._scope.lives
            else:
                there = self._vault.contains(self._scope, (key,))[0] and (stored or not stalled)
            if not there:
                return i
        return len(keys)

    # -- getting out ------------------------------------------------------------------------------

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Begin to bring leading blocks from the vault to DRAM; returns at once, with the number of
        leading blocks that are in DRAM or on the way. It ends at the first block that is nowhere
        or finds every slot in use."""
        self._collect()
        with self._changed:
            self._check_open()
            held, _ = self._acquire(keys)
            there = sum(entry.residence is not Residence.GONE for entry in held)
            self._let_go(held)
        return there

    def load(
        self,
        keys: Sequence[bytes],
        tensors: Sequence[torch.Tensor],
        *,
        timeout_s: float = 10.0,
    ) -> int:
        """Copy leading blocks to `tensors`, promoting those that are not in DRAM. Returns how many
        were loaded; the call ends at the first block that cannot be had, or not within `timeout_s`
        (then what is on the way still comes to DRAM).

        The tensors of all other blocks are untouched, or zeroed where DRAM had a block but the
        vault has it no longer, or its catalog cannot be read. A deletion that has returned
        (`Vault.delete_segments`, `Vault.forget`, in any process) is honoured by every load that
        begins afterwards, also for blocks that DRAM still held.

        More blocks than DRAM has slots for can be loaded in one call.
        """
        blocks = self._blocks(keys, tensors)
        limit = self._clock.monotonic() + timeout_s
        served: list[tuple[Entry, bool, int | None]] = []
        window: deque[Entry] = deque()  # the next blocks, each held
        try:
            while ready := self._ready(keys, len(served), window, limit):
                targets = blocks[len(served) : len(served) + len(ready)]
                slots = [self._memory.tensor(entry.slot) for entry in ready]
                self._device.copy(zip(targets, slots, strict=True))
                with self._changed:
                    served += [(entry, entry.stored, entry.given_at) for entry in ready]
                    self._let_go([window.popleft() for _ in ready])
        finally:
            with self._changed:
                self._let_go(window)
        loaded = self._confirm(served, blocks)
        with self._lock:
            self._counts["loaded"] += loaded
            self._counts["missed"] += len(keys) - loaded
        return loaded

    def _ready(
        self, keys: Sequence[bytes], done: int, window: deque[Entry], limit: float
    ) -> list[Entry]:
        """Wait for the block behind the first `done`; returns it and those behind it that are ready
        too, empty when there is no hope. They stay in the window, which is filled as far as DRAM
        has room: without waiting for room while holding any, so that two loads cannot starve each
        other."""
        while True:
            self._collect()
            with self._changed:
                self._check_open()
                if window and window[0].residence is Residence.GONE:
                    return []
                more, full = self._acquire(keys[done + len(window) :])
                window.extend(more)
                ready = list(
                    itertools.takewhile(lambda e: e.residence is Residence.RESIDENT, window)
                )
                left = limit - self._clock.monotonic()
                if ready or left <= 0 or not (window or full):
                    return ready
                self._changed.wait(min(left, _POLL_S))

    def _acquire(self, keys: Sequence[bytes]) -> tuple[list[Entry], bool]:
        """Entries of leading blocks, each held once more; promotes those that are not in DRAM.
        True when it ended because every slot is in use. Caller holds the lock."""
        held: list[Entry] = []
        promote: list[Entry] = []
        full = False
        for key in keys:
            entry = self._table.find(key)
            if entry is None:
                # About 5 us under the lock, for a block that takes a read from disk.
                if self._pool.stalled or not self._vault.contains(self._scope, (key,))[0]:
                    break
                entry = self._table.reserve(key)
                if entry is None:
                    full = True
                    break
                promote.append(entry)
            self._table.hold(entry)
            held.append(entry)
        for group in self._groups(promote):
            keys_of = [entry.key for entry in group]
            views = [self._memory.view(entry.slot) for entry in group]

            def fetch(
                guard: Guard, keys: list[bytes] = keys_of, views: list[memoryview] = views
            ) -> _Moved:
                outcomes = self._vault.get(self._scope, keys, views, guard=guard)
                hits = [outcome is Outcome.HIT for outcome in outcomes]
                return _Moved(hits, hits.count(False))

            number = next(self._ids)
            self._moving[number] = group
            if not self._pool.submit_load(number, [fetch], len(group) * self._block_bytes):
                del self._moving[number]
                self._fill(group, [False] * len(group))
        return held, full

    def _confirm(
        self, served: Sequence[tuple[Entry, bool, int | None]], blocks: Sequence[torch.Tensor]
    ) -> int:
        """How many of the leading blocks may be handed out: none behind one that the vault has had
        and has no longer. Looked at after the copy, as a reader of the vault does under its fence,
        so a deletion that came in between is honoured too. Zeroes the rest."""
        keys = [entry.key for entry, _, _ in served]
        try:
            if served:
                self._vault.refresh()
            here = self._vault.contains(self._scope, keys)
        except KvvaultError:
            here = None  # the catalog does not answer: when in doubt, miss
        lives = self._scope.lives
        good = 0
        with self._changed:
            removals = self._vault.removals  # read last: those that `contains` saw are in it
            for i, (entry, had, given_at) in enumerate(served):
                if here is None:
                    continue
                # Not there: never was, or deleted. Of a store whose end is not known yet it is the
                # latter that is assumed, if anything was deleted since it began. By what was known
                # when it was copied, and by what is: a store may have ended in between, and another
                # offload may have begun one.
                given = {given_at, entry.given_at} <= {None, removals}
                never = given and not (had or entry.stored)
                if lives and (here[i] or never):
                    entry.stored = entry.stored or here[i]
                    good += good == i
                else:
                    self._table.discard(entry)
        self._device.zero(blocks[good : len(served)])
        return good

    # -- transfers that ended ---------------------------------------------------------------------

    def _collect(self) -> None:
        """Enter what came of transfers. Also on the pool's threads."""
        ended = self._pool.finished()
        if ended:
            with self._changed:
                for transfer in ended:
                    self._settle(transfer)
                self._changed.notify_all()

    def _settle(self, transfer: Finished[_Moved]) -> None:
        """Caller holds the lock."""
        group = self._moving.pop(transfer.transfer_id)
        count = len(group)
        moved = transfer.results[0] or _Moved([False] * count, count)
        if transfer.is_load:
            self._counts["promoted"] += count - moved.failed
            self._fill(group, moved.there)
            return
        self._counts["stored"] += count - moved.failed
        self._counts["failed_stores"] += moved.failed
        # One that raised or took too long may have come to its commit all the same; of one that
        # stored a part, what is not there may have been deleted since.
        refused = transfer.results[0] is not None and moved.failed == count
        for entry, there in zip(group, moved.there, strict=True):
            entry.storing = False
            entry.stored = entry.stored or there
            if there or refused:
                entry.given_at = None
        self._let_go(group)

    def _fill(self, group: Sequence[Entry], good: Sequence[bool]) -> None:
        """End a promotion. Caller holds the lock."""
        for entry, hit in zip(group, good, strict=True):
            if hit:
                entry.stored = True
                self._table.publish(entry)
            else:
                self._table.discard(entry)
                self._counts["failed_promotions"] += 1
        self._let_go(group)

    def _let_go(self, entries: Sequence[Entry]) -> None:
        """Caller holds the lock; slots may have become free."""
        for entry in entries:
            self._table.release(entry)
        self._changed.notify_all()

    def _groups(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        step = max(1, _TRANSFER_BYTES // self._block_bytes)
        return [list(entries[i : i + step]) for i in range(0, len(entries), step)]

    # -- the rest ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every block in DRAM that is not in use at the moment; the vault keeps its own."""
        with self._changed:
            self._check_open()
            self._table.drop_idle()

    def flush(self) -> None:
        """Wait until every block offloaded so far is in the vault, or was refused, or its time
        limit has passed."""
        with self._changed:
            waiting = set(self._moving)
        while True:
            self._collect()
            with self._changed:
                waiting &= self._moving.keys()
                if not waiting:
                    return
                self._changed.wait(_POLL_S)

    def stats(self) -> TieringStats:
        """Memory only."""
        with self._lock:
            count = self._counts
            return TieringStats(
                dram_bytes=self._table.count * self._block_bytes,
                dram_blocks=len(self._table),
                in_use_blocks=self._table.in_use,
                offloaded=count["offloaded"],
                dropped=count["dropped"],
                stored=count["stored"],
                dropped_stores=count["dropped_stores"],
                failed_stores=count["failed_stores"],
                promoted=count["promoted"],
                failed_promotions=count["failed_promotions"],
                loaded=count["loaded"],
                missed=count["missed"],
                evicted=self._table.evicted,
                lost=self._table.lost,
                pending_transfers=len(self._moving),
                stalled=self._pool.stalled,
            )

    def close(self) -> None:
        """Flush, end the threads, give the memory back. Takes at most the time limits of what is
        under way, also when the disk hangs. Idempotent. The vault stays open."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self.flush()
        self._pool.close()
        self._collect()
        with self._lock:
            self._table.drop_idle()
        self._memory.close()

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _blocks(self, keys: Sequence[bytes], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(keys) != len(tensors):
            raise ValueError(f"{len(keys)} keys, but {len(tensors)} tensors")
        blocks: list[torch.Tensor] = self._device.as_bytes(tensors, self._block_bytes)
        return blocks

    def _check_open(self) -> None:
        """Caller holds the lock."""
        if self._closed:
            raise ClosedError("the cache is closed", hint="open it again")
