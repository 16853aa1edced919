"""A time limit that holds even when the provider hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Generic, TypeVar

from kvvault.crypto import aead
from kvvault.crypto.providers.base import (
    DEFAULT_TIMEOUT_S,
    KeyProvider,
    ProviderInfo,
    check_timeout,
)
from kvvault.errors import KeyUnavailableError

__all__ = ["TimeLimited", "call_with_limit"]

_T = TypeVar("_T")

MAX_CALLS: Final = 8
"""Helper threads per provider. A hung mount keeps its thread for ever; more calls than this then
fail at once after their time limit instead of piling up threads."""


class _Call(Generic[_T]):
    """One call on a helper thread and the hand-over of its result.

    ``_lock`` decides between "finished" and "given up", so that a result that comes too late is
    discarded (a late key is wiped) and never leaks to anybody.
    """

    def __init__(self, function: Callable[[], _T], discard: Callable[[_T], None] | None) -> None:
        self._function = function
        self._discard = discard
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._results: list[_T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the helper thread."""
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread as it is
            self._error = error
        else:
            with self._lock:
                if not self._given_up:
                    self._results.append(result)
                elif self._discard is not None:
                    self._discard(result)
        finally:
            self._done.set()

    def wait(self, timeout: float) -> bool:
        """On the caller's thread: whether it finished within ``timeout`` seconds."""
        try:
            self._done.wait(timeout)
        finally:
            # Also when the wait was interrupted (Ctrl-C): nobody will take the result.
            with self._lock:
                finished = self._done.is_set() or bool(self._results)
                self._given_up = not finished
        return finished

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def call_with_limit(
    what: str,
    function: Callable[[], _T],
    timeout: float,
    *,
    slots: threading.Semaphore | None = None,
    discard: Callable[[_T], None] | None = None,
    cleanup: Callable[[], None] | None = None,
) -> _T:
    """Run ``function`` on a helper thread and wait ``timeout`` seconds for it.

    The thread is a daemon: one that hangs for ever does not keep the process from ending. A thread
    is started for each call (about 0.1 ms), which is nothing beside an unwrap from a disk or a
    network, and these calls are rare: a tenant's first use, a purge.

    :param what: a verb phrase for the message ("unwrap a key").
    :param slots: bounds how many helper threads exist at once; waiting for one counts as time.
    :param discard: what to do with a result that comes too late.
    :param cleanup: runs once: after the function, however late, or when it will never run.
    :raises KeyUnavailableError: not finished in time, or the function raised ``OSError``.
    """
    check_timeout(timeout)
    end = time.monotonic() + timeout
    call = _Call(function, discard)
    with ExitStack() as undo:
        if cleanup is not None:
            undo.callback(cleanup)
        if slots is not None:
            if not slots.acquire(timeout=timeout):
                raise _too_slow(what, timeout)
            undo.callback(slots.release)
        later = undo.pop_all()

        def body() -> None:
            with later:
                call.run()

        try:
            threading.Thread(target=body, name="kvvault-key-provider", daemon=True).start()
        except RuntimeError:
            later.close()
            raise KeyUnavailableError(
                f"no thread could be started to {what}",
                hint="Raise the limit of threads (ulimit -u, TasksMax) and try again.",
            ) from None
    if not call.wait(max(0.0, end - time.monotonic())):
        raise _too_slow(what, timeout)
    try:
        return call.result()
    except OSError as error:
        raise KeyUnavailableError(
            f"the key provider failed to {what}: {type(error).__name__}",
            hint="Check that the place where the keys live is reachable, then try again.",
        ) from None


class TimeLimited(KeyProvider):
    """Puts any provider behind a time limit that it cannot overrun.

    A call that overruns goes on in its thread; what it does later is harmless by the provider's
    contract (an unused epoch, a repeated destruction), and a key that it returns is wiped.
    """

    def __init__(self, inner: KeyProvider, *, max_calls: int = MAX_CALLS) -> None:
        self._inner = inner
        self._slots = threading.BoundedSemaphore(max_calls)

    def __repr__(self) -> str:
        return f"<TimeLimited {self._inner!r}>"

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        return self._call(
            "create a root key", lambda: self._inner.create_epoch(timeout=timeout), timeout
        )

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        # A copy: the caller may wipe its key when we give up, and a late wrap of a half-wiped key
        # would be a valid wrap of a known key.
        own = bytearray(key)
        return call_with_limit(
            "wrap a key",
            lambda: self._inner.wrap(epoch, own, aad, timeout=timeout),
            timeout,
            slots=self._slots,
            cleanup=lambda: aead.wipe(own),
        )

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        return call_with_limit(
            "unwrap a key",
            lambda: self._inner.unwrap(epoch, wrapped, aad, timeout=timeout),
            timeout,
            slots=self._slots,
            discard=aead.wipe,
        )

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self._call(
            "destroy a root key", lambda: self._inner.destroy(epoch, timeout=timeout), timeout
        )

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        return self._call("list epochs", lambda: self._inner.epochs(timeout=timeout), timeout)

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        return self._call("describe itself", lambda: self._inner.describe(timeout=timeout), timeout)

    def _call(self, what: str, function: Callable[[], _T], timeout: float) -> _T:
        return call_with_limit(what, function, timeout, slots=self._slots)


def _too_slow(what: str, timeout: float) -> KeyUnavailableError:
    return KeyUnavailableError(
        f"the key provider did not {what} within {timeout:g} s",
        hint="Check that the place where the keys live is reachable, then try again.",
    )
