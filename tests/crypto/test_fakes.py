"""The fakes of `kvvault.testing` do what their users' tests rely on."""

from __future__ import annotations

import threading

import pytest

from kvvault.crypto.providers import EphemeralProvider
from kvvault.errors import KeyDestroyedError, KeyUnavailableError
from kvvault.model import Clock
from kvvault.testing import FaultyProvider, ManualClock

KEY = bytes(range(32))


def test_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(now=100.0, monotonic=5.0)
    same: Clock = clock
    assert (same.now(), same.monotonic()) == (100.0, 5.0)
    assert (same.now(), same.monotonic()) == (100.0, 5.0)
    clock.advance(2.5)
    assert (same.now(), same.monotonic()) == (102.5, 7.5)


def test_manual_clock_set_back_moves_the_wall_clock_only() -> None:
    clock = ManualClock(now=100.0, monotonic=5.0)
    clock.set_wall(40.0)
    assert (clock.now(), clock.monotonic()) == (40.0, 5.0)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_faulty_provider_is_transparent_until_told() -> None:
    faulty = FaultyProvider(EphemeralProvider())
    epoch = faulty.create_epoch()
    wrapped = faulty.wrap(epoch, KEY, b"")
    assert faulty.unwrap(epoch, wrapped, b"") == KEY
    assert faulty.epochs() == [epoch]
    assert faulty.describe() == faulty.inner.describe()
    faulty.destroy(epoch)
    assert faulty.calls == ["create_epoch", "wrap", "unwrap", "epochs", "describe", "destroy"]


def test_faulty_provider_fails_the_named_methods_until_healed() -> None:
    faulty = FaultyProvider(EphemeralProvider())
    epoch = faulty.create_epoch()
    faulty.fail(KeyUnavailableError("down", hint="wait"), methods={"wrap"})
    for _ in range(2):
        with pytest.raises(KeyUnavailableError):
            faulty.wrap(epoch, KEY, b"")
    assert faulty.epochs() == [epoch]
    faulty.heal()
    faulty.wrap(epoch, KEY, b"")


def test_faulty_provider_can_lose_the_answer_only() -> None:
    """The work is done though the caller hears of a failure: a destruction to be repeated."""
    faulty = FaultyProvider(EphemeralProvider())
    epoch = faulty.create_epoch()
    wrapped = faulty.wrap(epoch, KEY, b"")
    faulty.fail(KeyUnavailableError("down", hint="wait"), methods={"destroy"}, afterwards=True)
    with pytest.raises(KeyUnavailableError):
        faulty.destroy(epoch)
    with pytest.raises(KeyDestroyedError):
        faulty.unwrap(epoch, wrapped, b"")
    faulty.heal()
    faulty.destroy(epoch)


def test_faulty_provider_hangs_only_inside() -> None:
    faulty = FaultyProvider(EphemeralProvider())
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(faulty.create_epoch()))
    with faulty.hanging({"create_epoch"}):
        thread.start()
        thread.join(0.1)
        assert answers == []
        assert faulty.epochs() == []
    thread.join(30)
    assert answers == faulty.epochs()


def test_faulty_provider_refuses_methods_that_do_not_exist() -> None:
    faulty = FaultyProvider(EphemeralProvider())
    with pytest.raises(ValueError, match="unwarp"):
        faulty.fail(OSError(), methods={"unwarp"})
    with pytest.raises(ValueError, match="unwarp"), faulty.hanging({"unwarp"}):
        pass
