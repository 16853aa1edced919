"""The time limit: it holds whatever the provider does, and nothing leaks late."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from kvvault.crypto.providers import EphemeralProvider, Scheme, TimeLimited, open_provider
from kvvault.crypto.providers.base import KeyProvider
from kvvault.crypto.providers.timelimit import call_with_limit
from kvvault.errors import KeyUnavailableError, WrongKeyError
from kvvault.testing import FaultyProvider

KEY = bytes(range(32))
AAD = b"place"


class Probe(EphemeralProvider):
    """Keeps what went through it, to see whether it is wiped, and tells when a call ended."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[bytearray] = []
        self.wrapped: list[bytes] = []
        self.ended = threading.Semaphore(0)

    def wrap(
        self, epoch: str, key: bytes | bytearray, aad: bytes, *, timeout: float = 1.0
    ) -> bytes:
        assert isinstance(key, bytearray)
        self.keys.append(key)
        wrapped = super().wrap(epoch, key, aad, timeout=timeout)
        self.wrapped.append(wrapped)
        self.ended.release()
        return wrapped

    def unwrap(self, epoch: str, wrapped: bytes, aad: bytes, *, timeout: float = 1.0) -> bytearray:
        key = super().unwrap(epoch, wrapped, aad, timeout=timeout)
        self.keys.append(key)
        self.ended.release()
        return key


def stack() -> tuple[Probe, FaultyProvider, TimeLimited]:
    probe = Probe()
    faulty = FaultyProvider(probe)
    return probe, faulty, TimeLimited(faulty, max_calls=2)


def eventually(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    assert condition()


def test_answers_pass_through() -> None:
    _, _, limited = stack()
    epoch = limited.create_epoch()
    wrapped = limited.wrap(epoch, KEY, AAD)
    assert limited.unwrap(epoch, wrapped, AAD) == KEY
    with pytest.raises(WrongKeyError):
        limited.unwrap(epoch, wrapped, b"other")


def test_req_k8_a_key_that_comes_too_late_is_wiped() -> None:
    probe, faulty, limited = stack()
    epoch = limited.create_epoch()
    wrapped = limited.wrap(epoch, KEY, AAD)
    probe.keys.clear()
    with faulty.hanging(), pytest.raises(KeyUnavailableError):
        limited.unwrap(epoch, wrapped, AAD, timeout=0.05)
    eventually(lambda: len(probe.keys) == 1 and not any(probe.keys[0]))
    # In time, it is the caller's.
    assert limited.unwrap(epoch, wrapped, AAD) == KEY


def test_a_late_wrap_wraps_the_key_that_was_given() -> None:
    """Not the zeros that the caller left in its buffer after giving up."""
    probe, faulty, limited = stack()
    epoch = limited.create_epoch()
    mine = bytearray(KEY)
    with faulty.hanging():
        with pytest.raises(KeyUnavailableError):
            limited.wrap(epoch, mine, AAD, timeout=0.05)
        mine[:] = bytes(32)
    assert probe.ended.acquire(timeout=30)
    assert probe.unwrap(epoch, probe.wrapped[0], AAD) == KEY
    eventually(lambda: not any(probe.keys[0]))


def test_a_key_given_to_wrap_is_wiped_even_when_no_thread_took_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleaned: list[str] = []
    slots = threading.BoundedSemaphore(1)
    slots.acquire()
    with pytest.raises(KeyUnavailableError):
        call_with_limit(
            "x", lambda: None, 0.01, slots=slots, cleanup=lambda: cleaned.append("no slot")
        )
    slots.release()

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(KeyUnavailableError, match="thread"):
            call_with_limit(
                "x", lambda: None, 1.0, slots=slots, cleanup=lambda: cleaned.append("no thread")
            )
    call_with_limit("x", lambda: None, 1.0, slots=slots, cleanup=lambda: cleaned.append("ran"))
    eventually(lambda: len(cleaned) == 3)
    assert cleaned == ["no slot", "no thread", "ran"]
    # No slot was lost on the way.
    assert slots.acquire(timeout=30)


def test_hung_calls_do_not_pile_up_threads() -> None:
    _, faulty, limited = stack()
    epoch = limited.create_epoch()
    faulty.calls.clear()
    with faulty.hanging():
        for _ in range(6):
            with pytest.raises(KeyUnavailableError):
                limited.epochs(timeout=0.02)
        assert faulty.calls == ["epochs"] * 2
    # Let go, the slots come back.
    assert limited.epochs() == [epoch]


def test_req_k9_trouble_of_the_system_is_unavailable_and_quotes_nothing() -> None:
    _, faulty, limited = stack()
    for error in (OSError("token=s3cr3t"), ConnectionResetError("s3cr3t"), TimeoutError("s3cr3t")):
        faulty.fail(error)
        with pytest.raises(KeyUnavailableError) as caught:
            limited.create_epoch()
        assert "s3cr3t" not in f"{caught.value}{caught.value.hint}{caught.value.__cause__}"
    faulty.heal()
    limited.create_epoch()


def test_a_bug_in_a_provider_stays_visible() -> None:
    _, faulty, limited = stack()
    bug = AttributeError("a bug")
    faulty.fail(bug)
    with pytest.raises(AttributeError) as caught:
        limited.create_epoch()
    assert caught.value is bug


def test_an_interrupted_wait_discards_the_key() -> None:
    probe, faulty, limited = stack()
    epoch = limited.create_epoch()
    wrapped = limited.wrap(epoch, KEY, AAD)
    probe.keys.clear()

    class StopNowError(Exception):
        pass

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise StopNowError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with faulty.hanging(), pytest.raises(StopNowError):
            limited.unwrap(epoch, wrapped, AAD, timeout=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    eventually(lambda: len(probe.keys) == 1 and not any(probe.keys[0]))


def test_a_hung_provider_does_not_keep_the_process_from_ending() -> None:
    code = """
import threading
from kvvault.crypto.providers import EphemeralProvider, TimeLimited
from kvvault.errors import KeyUnavailableError
class Hung(EphemeralProvider):
    def epochs(self, *, timeout=1.0):
        threading.Event().wait()
try:
    TimeLimited(Hung()).epochs(timeout=0.05)
except KeyUnavailableError:
    print("gave up")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout == "gave up\n"


def test_opening_has_a_time_limit_too() -> None:
    gate = threading.Event()

    def slow(_rest: str, _create: bool, _timeout: float) -> KeyProvider:
        gate.wait()
        return EphemeralProvider()

    schemes = {"slow": Scheme("slow: never", slow, does_io=True)}
    with pytest.raises(KeyUnavailableError):
        open_provider("slow:", timeout=0.05, schemes=schemes)
    gate.set()
    assert isinstance(open_provider("slow:", schemes=schemes), TimeLimited)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_opening_refuses_a_limit_that_is_none(limit: float) -> None:
    with pytest.raises(ValueError, match="time limit"):
        open_provider("file:/nowhere", timeout=limit)
