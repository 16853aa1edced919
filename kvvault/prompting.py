"""The inventory as it is written: which prompt had which block stored, and which it reuses.

A `Prompt` stands for one request while it runs. Blocks that it has stored are committed together
with its number and the token at which each ends, so no crash leaves a block without its prompt.
What it shares with others is noted when it is over, by the `Recorder`: of the live blocks of its
chain, those that other prompts had stored. A block's name is a hash of everything before it, so the
owner of the deepest one shares all before it, and one link to it usually says everything.

Another request may still be storing blocks that both have when this one is over. So a prompt of
whose chain some blocks do not live yet is looked at again a few times, each time after twice as
long, for a minute at most. Nobody's blocks that it adopted are looked at again, too: somebody may
have read them before, and write them to another segment as nobody's.

A prompt whose request is running is not pruned, although nothing of it may live for a while: once a
minute its process says that it is in use. One whose process was stopped for ten minutes can be
pruned and then stores nothing more, as if it had been erased: nobody can tell these apart later.

Threads: `Prompt` and `Recorder.record` from any thread, memory only. Everything else that is
written comes from the thread `kvvault-inventory`, and, for a prompt's row, from whoever stores its
first block.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import rfc8785
from sqlalchemy import Connection

from kvvault.catalog import prompts
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.operations import PromptGoneError
from kvvault.catalog.prompts import KeyReplacedError, Membership, NewPrompt, Origin, Text
from kvvault.counters import Counters
from kvvault.crypto.aead import random_id
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import ClosedError, KvvaultError
from kvvault.naming import LABELS, SUBJECT, clean, request_key, subject_key
from kvvault.policy.decide import Verdict
from kvvault.policy.document import Record
from kvvault.timekeeping import VaultTime
from kvvault.view import View

log = logging.getLogger(__name__)

PROMPT = "prompt"
"""What a prompt's own texts are encrypted as."""

PROMPT_ID_BYTES = 8
PREVIEW_CHARACTERS = 256
_MAX_REQUEST_ID = 256
_ATTEMPTS = 5
"""How often something is tried that others can overtake."""

_MAX_QUEUED = 4096
_MAX_WAITING = 512
"""Prompts that are looked at again; beyond that the oldest is not."""
_BREATH = 32
"""Blocks between two breaths."""
_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 60.0
_TOUCH_S = 60.0
"""How often it is noted that requests are still running."""


class Row:
    """A prompt's row in the catalog, queued or committed. `in_transaction` is for the catalog's
    thread, everything else for any."""

    __slots__ = ("_new", "_number", "future")

    def __init__(self, new: NewPrompt, catalog: Catalog) -> None:
        self._new = new
        self._number: int | None = None
        self.future: Future[int] = catalog.submit(self._insert)

    def _insert(self, connection: Connection) -> int:
        self._number = prompts.add(connection, self._new)
        return self._number

    @property
    def failed(self) -> bool:
        """Whether it is known that there is none."""
        return self.future.done() and self.future.exception() is not None

    def in_transaction(self) -> int:
        """Its number, in a transaction that was queued behind its insertion: committed, or inserted
        in this same transaction, which then commits both or neither.

        Raises:
            PromptGoneError: it was not inserted.
        """
        if self.failed or self._number is None:
            raise PromptGoneError
        return self._number


class Prompt:
    """One request, as the inventory will have it. Made by `Vault.prompt`. Any thread."""

    __slots__ = (
        "__weakref__",
        "_lock",
        "_row",
        "_steady",
        "_verdict",
        "labels",
        "namespace",
        "preview",
        "prompt_id",
        "request_id",
        "started_at",
        "subject",
        "tenant",
    )

    def __init__(
        self,
        tenant: TenantKeys,
        namespace: bytes,
        verdict: Callable[[], Verdict],
        *,
        request_id: str | None,
        subject: str | None,
        labels: Mapping[str, str],
        preview: str | None,
        steady: Callable[[], float],
    ) -> None:
        """`verdict`: what the policy in force says of it; may read the catalog. `steady`: the
        vault's time."""
        self.tenant = tenant
        self.namespace = namespace
        self.request_id = None if request_id is None else clean(request_id)
        self.subject = subject
        self.labels = labels
        self.preview = None if preview is None else clean(preview[:PREVIEW_CHARACTERS])
        self.started_at = steady()
        self._steady = steady
        self.prompt_id = random_id()[:PROMPT_ID_BYTES]
        self._verdict = verdict
        self._lock = threading.Lock()
        self._row: Row | None = None

    def __repr__(self) -> str:
        return "<Prompt>"

    @property
    def recorded(self) -> bool:
        """Whether it is to be in the inventory at all.

        Raises:
            CatalogError, StorageError: the policy cannot be read.
        """
        return self._verdict().persist

    def prepare(self, catalog: Catalog) -> Row:
        """Queue the insertion of its row, once.

        Raises:
            ClosedError: the tenant was forgotten or the catalog is closed.
            CatalogError, StorageError: the policy cannot be read.
        """
        with self._lock:
            if self._row is None:
                self._row = Row(self._new(), catalog)
            return self._row

    @property
    def committed(self) -> int | None:
        """Its number; None while it has no row that is committed. Memory only."""
        row = self._row
        if row is None or not row.future.done() or row.future.exception() is not None:
            return None
        return row.future.result()

    def number(self, catalog: Catalog, view: View) -> int:
        """Its number, once its row is committed.

        Raises:
            KvvaultError: it has no row; the next call tries again.
        """
        for attempt in range(_ATTEMPTS):
            row = self.prepare(catalog)
            try:
                return row.future.result()
            except KvvaultError as exc:
                with self._lock:
                    if self._row is row:
                        self._row = None
                if not isinstance(exc, KeyReplacedError) or attempt == _ATTEMPTS - 1:
                    raise
                view.renew(self.tenant)
        raise KeyReplacedError

    def sealed(self, deepest: bytes | None = None) -> bytes | None:
        """What is kept of it encrypted. `deepest`: id of the last block of its chain, for the
        fingerprint; None: not known yet.

        Raises: as `prepare`.
        """
        kept: dict[str, str] = {}
        record = self._verdict().record
        if self.request_id is not None:
            kept["request"] = self.request_id[:_MAX_REQUEST_ID]
        if deepest is not None and record is not Record.NONE:
            kept["fingerprint"] = self.tenant.keyed_id("fingerprint", deepest).hex()
        if self.preview is not None and record is Record.PREVIEW:
            kept["preview"] = self.preview
        return self.tenant.seal_text(PROMPT, json.dumps(kept, ensure_ascii=False)) if kept else None

    @property
    def fingerprinted(self) -> bool:
        """Whether the policy wants a fingerprint of it.

        Raises: as `prepare`.
        """
        return self._verdict().record is not Record.NONE

    def _new(self) -> NewPrompt:
        tenant = self.tenant
        key_no = tenant.key_no  # first: all that follows is under this key or a newer one
        request = self.request_id
        return NewPrompt(
            tenant.tenant_id,
            key_no,
            self.namespace,
            self.prompt_id,
            None if self.subject is None else _subject(tenant, self.subject),
            _labels(tenant, labels_text(self.labels)) if self.labels else None,
            None if request is None else request_key(tenant, request),
            self.sealed(),
            self.started_at,
            self._steady(),
        )


def labels_text(labels: Mapping[str, str]) -> str:
    """A set of labels as it is kept: canonical JSON (RFC 8785), so that equal sets are equal
    texts."""
    return rfc8785.dumps(dict(labels)).decode()


def _subject(tenant: TenantKeys, name: str) -> Text:
    return Text(SUBJECT, subject_key(tenant, name), tenant.seal_text(SUBJECT, name))


def _labels(tenant: TenantKeys, text: str) -> Text:
    return Text(LABELS, tenant.keyed_id(LABELS, text.encode()), tenant.seal_text(LABELS, text))


# -- what a prompt shares -------------------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    """A prompt of whose chain some blocks did not live yet."""

    prompt: Prompt
    missing: dict[bytes, int]
    """Block id → token at which it ends."""
    adopted: dict[bytes, int]
    """Blocks that were nobody's, likewise: they could become so again."""
    deepest: bytes
    used_at: float
    since: float
    """Monotonic, as `next_look`."""
    next_look: float
    extra: bool = True
    """Whether a fingerprint is still to be noted."""


class Recorder:
    """Notes what prompts share."""

    def __init__(
        self,
        catalog: Catalog,
        view: View,
        time: VaultTime,
        counters: Counters,
        monotonic: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._view = view
        self._time = time
        self._counters = counters
        self._monotonic = monotonic
        self._timeout_s = timeout_s
        self._queue: queue.Queue[
            tuple[Prompt, Mapping[bytes, int], float] | threading.Event | None
        ] = queue.Queue(_MAX_QUEUED)
        self._waiting: deque[_Waiting] = deque()
        self._running: weakref.WeakSet[Prompt] = weakref.WeakSet()
        self._touched_at = time.steady()
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, prompt: Prompt) -> None:
        """A request is running, until `record` or until nobody has the handle any more. Memory
        only."""
        with self._lock:
            self._running.add(prompt)

    def touch(self, *, always: bool = False) -> None:
        """Note once a minute (`always`: now, and wait for it) which requests are still running.

        Raises:
            StorageError, CatalogError.
        """
        now = self._time.steady()
        with self._lock:
            if not always and 0 <= now - self._touched_at < _TOUCH_S:
                return
            self._touched_at = now
            numbers = [no for one in self._running if (no := one.committed) is not None]
        if numbers:
            noted = self._catalog.submit(partial(prompts.touch, numbers=numbers, now=now))
            if always:
                noted.result()

    def record(
        self,
        prompt: Prompt,
        chain: Mapping[bytes, int],
    ) -> None:
        """Have it noted which live blocks of `chain` (the engine's keys → token at which each
        ends) belong to `prompt`. The chain is read later, on the recorder's thread, and must not
        change. Memory only: never blocks, never raises; what is too much is dropped and counted.
        """
        with self._lock:
            self._running.discard(prompt)
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvvault-inventory", daemon=True
                )
                self._thread.start()
        try:
            self._queue.put_nowait((prompt, chain, self._time.steady()))
        except queue.Full:
            self._counters.add(prompts_not_recorded=1)

    def settle(self) -> None:
        """Have noted what can be noted now: everything that was handed over, and of prompts that
        wait for blocks of others, those that live by now."""
        done = threading.Event()
        with self._lock:
            if self._closed or self._thread is None:
                return
        self._queue.put(done)
        done.wait(self._timeout_s)

    def close(self) -> None:
        """Note what is waiting, then stop. Idempotent. A catalog that hangs is given up after the
        time limit."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            try:
                self._queue.put(None, timeout=self._timeout_s)
            except queue.Full:
                log.warning("the inventory is not complete: the catalog does not answer")
                return
            thread.join(self._timeout_s)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """One round; a frame of its own, so that while it waits it keeps no tenant's keys."""
        try:
            item = self._queue.get(timeout=self._pause())
        except queue.Empty:
            self._look_again(self._monotonic())
            return True
        if item is None or isinstance(item, threading.Event):
            with contextlib.suppress(KvvaultError):
                self._view.refresh()  # also what others have just committed
            self._look_again(None)
            if item is not None:
                item.set()
            return item is not None
        prompt, chain, used_at = item
        try:
            ends: dict[bytes, int] = {}
            for key, end in chain.items():
                ends[prompt.tenant.block_id(prompt.namespace, key)] = end
                _let_others(len(ends))
            if not ends or not prompt.recorded:
                return True
        except ClosedError:
            return True  # forgotten
        except Exception as exc:  # noqa: BLE001 - the thread goes on with the others
            self._give_up(exc)
            return True
        now = self._monotonic()
        deepest = max(ends, key=lambda one: ends[one])
        waiting = _Waiting(prompt, ends, {}, deepest, used_at, now, now + _FIRST_LOOK_S)
        if self._look(waiting):
            self._waiting.append(waiting)
            if len(self._waiting) > _MAX_WAITING and self._look(self._waiting.popleft()):
                self._counters.add(prompts_not_recorded=1)
        self._look_again(now)
        return True

    def _pause(self) -> float | None:
        """Seconds until the next look; None: nothing waits."""
        if not self._waiting:
            return None
        soonest = min(one.next_look for one in self._waiting)
        return max(0.01, soonest - self._monotonic())

    def _look_again(self, now: float | None) -> None:
        """Look at those whose time has come (None: at all)."""
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            due = now is None or now >= one.next_look
            if due:
                if not self._look(one):
                    continue
                if now is not None:
                    if one.next_look - one.since >= _LAST_LOOK_S:
                        continue
                    one.next_look = one.since + 2 * (one.next_look - one.since)
            self._waiting.append(one)

    def _look(self, one: _Waiting) -> bool:
        """Note what lives of a prompt's chain; whether it is to be looked at again."""
        try:
            return self._note(one)
        except ClosedError:
            return False
        except Exception as exc:  # noqa: BLE001 - the thread goes on with the others
            self._give_up(exc)
            return False

    def _give_up(self, exc: Exception) -> None:
        self._counters.add(prompts_not_recorded=1)
        log.warning(
            "what a prompt shares is not recorded: %s",
            exc if isinstance(exc, KvvaultError) else type(exc).__name__,
        )

    def _note(self, one: _Waiting) -> bool:
        for _ in range(_ATTEMPTS):
            found = self._catalog.read(partial(self._origins, one=one))
            if not found:
                return bool(one.missing or one.adopted)
            number = one.prompt.number(self._catalog, self._view)
            members = self._catalog.read(
                partial(self._membership, one=one, number=number, found=found)
            )
            try:
                noted = self._catalog.write(partial(prompts.note, members=members), durable=False)
            except KeyReplacedError:
                self._view.renew(one.prompt.tenant)
                continue
            if noted is None:
                return False  # erased meanwhile
            if noted:
                one.extra = False
                for block_id, origin in found.items():
                    end = one.missing.pop(block_id, None)
                    if end is not None and not origin.prompt_no:
                        one.adopted[block_id] = end
                self._counters.add(prompts_recorded=1)
                return bool(one.missing or one.adopted)
        raise KeyReplacedError

    def _origins(self, connection: Connection, one: _Waiting) -> dict[bytes, Origin]:
        """Whose those blocks are that live of what is still missing, and what is nobody's again of
        what it adopted."""
        now = self._time.now()
        by_segment: dict[bytes, dict[int, bytes]] = {}
        for n, block_id in enumerate([*one.missing, *one.adopted]):
            _let_others(n)
            location = self._view.find(block_id, now)
            segment = None if location is None else self._view.segment(location.number)
            if location is not None and segment is not None:
                slots = by_segment.setdefault(segment.place.segment_id, {})
                slots[location.slot] = block_id
        return {
            slots[slot]: origin
            for segment_id, slots in by_segment.items()
            for slot, origin in prompts.origins(connection, segment_id, slots).items()
            if slots[slot] in one.missing or not origin.prompt_no
        }

    def _membership(
        self, connection: Connection, one: _Waiting, number: int, found: Mapping[bytes, Origin]
    ) -> Membership:
        links_of = partial(prompts.links_of, connection)
        far = prompts.reach(links_of, links_of(number))
        links: dict[int, int] = {}
        adopted: list[tuple[int, int, int]] = []
        end_token = 0
        ends = one.missing | one.adopted
        # The deepest first: who owns it usually leads to all that is before it.
        for block_id in sorted(found, key=lambda b: ends[b], reverse=True):
            origin, end = found[block_id], ends[block_id]
            end_token = max(end_token, end)
            owner = origin.prompt_no
            if not owner:
                adopted.append((origin.extent_no, origin.index, end))
            elif owner != number and far.get(owner, -1) < origin.end:
                links[owner] = max(links.get(owner, 0), origin.end)
                for via, upto in prompts.reach(links_of, {owner: origin.end}).items():
                    far[via] = max(far.get(via, -1), upto)
        key_no = one.prompt.tenant.key_no
        sealed = None
        if one.extra and one.prompt.fingerprinted:
            sealed = one.prompt.sealed(one.deepest)
        return Membership(
            number,
            adopted,
            links,
            end_token,
            one.used_at,
            one.prompt.tenant.tenant_id,
            key_no,
            sealed,
        )


def _let_others(step: int) -> None:
    """Let go of the interpreter now and then: an engine's scheduler that wants it would wait for
    five milliseconds else."""
    if step % _BREATH == 0:
        time.sleep(0)
