"""Fakes and conformance suites that projects on top of kvvault can reuse.

Needs pytest and hypothesis (the ``dev`` extra); nothing in kvvault itself imports this module.

*A key provider of your own* passes `KeyProviderConformance`::

    class TestMyProvider(KeyProviderConformance):
        assurance = Assurance.PURGE

        def make_provider(self, tmp_path: Path) -> KeyProvider:
            return MyProvider.create(...)

        def reopen(self, provider: KeyProvider) -> KeyProvider | None:
            return MyProvider.open(...)

*A program that uses a provider* is tested with `FaultyProvider`: the same keys, failing or hanging
on demand. *Code that takes a clock* is tested with `ManualClock`.
"""

# ruff: noqa: S101 - asserts are what a test suite is made of

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvvault.crypto.providers.base import (
    DEFAULT_TIMEOUT_S,
    Assurance,
    KeyProvider,
    ProviderInfo,
)
from kvvault.errors import (
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    VaultKeyError,
    WrongKeyError,
)

__all__ = ["FaultyProvider", "KeyProviderConformance", "ManualClock"]

_T = TypeVar("_T")


class ManualClock:
    """A `kvvault.model.Clock` that stands still until it is told to move.

    Wall clock and monotonic clock are separate, because a real wall clock can be set back. Any
    thread may read and move it.
    """

    def __init__(self, now: float = 1_800_000_000.0, monotonic: float = 1_000.0) -> None:
        self._lock = threading.Lock()
        self._now = now
        self._monotonic = monotonic

    def now(self) -> float:
        with self._lock:
            return self._now

    def monotonic(self) -> float:
        with self._lock:
            return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks.

        :raises ValueError: a negative number; use `set_wall` for a clock that is set back.
        """
        if seconds < 0:
            raise ValueError("time does not pass backwards")
        with self._lock:
            self._now += seconds
            self._monotonic += seconds

    def set_wall(self, now: float) -> None:
        """Set the wall clock, forwards or back, as an administrator or NTP does."""
        with self._lock:
            self._now = now


class FaultyProvider(KeyProvider):
    """Another provider's keys behind faults that a test switches on and off.

    ``calls`` lists the names of the methods that were called, oldest first.
    """

    METHODS: Final = frozenset({"create_epoch", "wrap", "unwrap", "destroy", "epochs", "describe"})

    def __init__(self, inner: KeyProvider) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self._error: Exception | None = None
        self._afterwards = False
        self._failing: frozenset[str] = frozenset()
        self._gate: threading.Event | None = None
        self._hanging: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<FaultyProvider {self.inner!r}>"

    def fail(
        self,
        error: Exception,
        *,
        methods: Collection[str] = METHODS,
        afterwards: bool = False,
    ) -> None:
        """From now on these methods raise ``error``.

        :param afterwards: do the work first, as when only the answer is lost on its way.
        """
        self._check(methods)
        self._error, self._failing, self._afterwards = error, frozenset(methods), afterwards

    def heal(self) -> None:
        """End what `fail` began."""
        self._error = None

    @contextmanager
    def hanging(self, methods: Collection[str] = METHODS) -> Iterator[None]:
        """Inside, these methods do not answer; calls that hang go on when it ends."""
        self._check(methods)
        gate = threading.Event()
        self._gate, self._hanging = gate, frozenset(methods)
        try:
            yield
        finally:
            self._gate = None
            gate.set()

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        return self._do("create_epoch", lambda: self.inner.create_epoch(timeout=timeout))

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        return self._do("wrap", lambda: self.inner.wrap(epoch, key, aad, timeout=timeout))

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        return self._do("unwrap", lambda: self.inner.unwrap(epoch, wrapped, aad, timeout=timeout))

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self._do("destroy", lambda: self.inner.destroy(epoch, timeout=timeout))

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        return self._do("epochs", lambda: self.inner.epochs(timeout=timeout))

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        return self._do("describe", lambda: self.inner.describe(timeout=timeout))

    def _check(self, methods: Collection[str]) -> None:
        unknown = set(methods) - self.METHODS
        if unknown:
            raise ValueError(f"a key provider has no {', '.join(sorted(unknown))}")

    def _do(self, name: str, work: Callable[[], _T]) -> _T:
        self.calls.append(name)
        gate, error = self._gate, self._error
        if gate is not None and name in self._hanging:
            gate.wait()
        if error is None or name not in self._failing:
            return work()
        if self._afterwards:
            work()
        raise error


class KeyProviderConformance:
    """What every key provider must do; the contract is in `kvvault.crypto.providers.base`.

    Subclass it, name the subclass ``Test…``, and give it `make_provider`; override the other hooks
    where they apply.
    """

    assurance: ClassVar[Assurance]
    """What the provider is expected to claim."""

    KEY: ClassVar[bytes] = bytes(range(100, 132))
    AAD: ClassVar[bytes] = b"vault 1, tenant 1"

    # ------------------------------------------------------------------------------ hooks

    def make_provider(self, tmp_path: Path) -> KeyProvider:
        """A new, empty provider."""
        raise NotImplementedError

    def reopen(self, provider: KeyProvider) -> KeyProvider | None:
        """The same keys as another process would open them; None if they do not outlive one."""
        return None

    def hanging(self, provider: KeyProvider) -> AbstractContextManager[None] | None:
        """A context in which the place of the keys does not answer; None if it always does."""
        return None

    def root_keys(self, provider: KeyProvider) -> list[bytes]:
        """The root keys, where a test can get at them, to look for them in texts."""
        return []

    # ------------------------------------------------------------------------------ tests

    @pytest.fixture
    def provider(self, tmp_path: Path) -> KeyProvider:
        return self.make_provider(tmp_path)

    def test_wrap_and_unwrap(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)
        key = provider.unwrap(epoch, wrapped, self.AAD)
        assert isinstance(key, bytearray)
        assert key == self.KEY
        assert len(wrapped) <= 1024

    def test_req_k8_unwrapped_key_belongs_to_the_caller(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)
        first = provider.unwrap(epoch, wrapped, self.AAD)
        first[:] = bytes(len(first))
        assert provider.unwrap(epoch, wrapped, self.AAD) == self.KEY

    def test_wrap_hides_the_key_and_never_repeats(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        wraps = {provider.wrap(epoch, self.KEY, self.AAD) for _ in range(20)}
        assert len(wraps) == 20
        assert not any(self.KEY in wrapped for wrapped in wraps)

    def test_epoch_names(self, provider: KeyProvider) -> None:
        made = [provider.create_epoch() for _ in range(5)]
        assert len(set(made)) == 5
        assert provider.epochs() == made
        for name in made:
            assert 0 < len(name) <= 64
            assert name.isascii()
            assert name.isprintable()
            assert " " not in name

    @pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
    def test_req_c1_only_32_byte_keys(self, provider: KeyProvider, size: int) -> None:
        epoch = provider.create_epoch()
        with pytest.raises(ValueError, match="32"):
            provider.wrap(epoch, bytes(size), self.AAD)

    def test_req_c3_wrong_aad_is_refused(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)
        for other in (b"", self.AAD + b"x", self.AAD[:-1], self.AAD.swapcase()):
            with pytest.raises(WrongKeyError):
                provider.unwrap(epoch, wrapped, other)
        assert provider.unwrap(epoch, wrapped, self.AAD) == self.KEY

    def test_req_k1_wrong_epoch_is_refused(self, provider: KeyProvider) -> None:
        one, two = provider.create_epoch(), provider.create_epoch()
        wrapped = provider.wrap(one, self.KEY, self.AAD)
        with pytest.raises(WrongKeyError):
            provider.unwrap(two, wrapped, self.AAD)
        assert provider.unwrap(one, wrapped, self.AAD) == self.KEY

    def test_unknown_epoch_is_refused(self, provider: KeyProvider) -> None:
        wrapped = provider.wrap(provider.create_epoch(), self.KEY, self.AAD)
        unknown = "0123456789abcdef0123456789abcdef"
        with pytest.raises(WrongKeyError):
            provider.unwrap(unknown, wrapped, self.AAD)
        with pytest.raises(WrongKeyError):
            provider.wrap(unknown, self.KEY, self.AAD)
        with pytest.raises(WrongKeyError):
            provider.destroy(unknown)

    def test_req_k1_k4_destroyed_epoch_refuses_and_others_still_open(
        self, provider: KeyProvider
    ) -> None:
        doomed, kept = provider.create_epoch(), provider.create_epoch()
        wrapped_doomed = provider.wrap(doomed, self.KEY, self.AAD)
        wrapped_kept = provider.wrap(kept, self.KEY, self.AAD)
        assert provider.unwrap(doomed, wrapped_doomed, self.AAD) == self.KEY

        provider.destroy(doomed)

        with pytest.raises(KeyDestroyedError):
            provider.unwrap(doomed, wrapped_doomed, self.AAD)
        with pytest.raises(KeyDestroyedError):
            provider.wrap(doomed, self.KEY, self.AAD)
        assert provider.unwrap(kept, wrapped_kept, self.AAD) == self.KEY
        assert provider.epochs() == [kept]

    def test_destroy_is_idempotent(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        provider.destroy(epoch)
        provider.destroy(epoch)
        assert provider.epochs() == []
        assert provider.create_epoch() != epoch

    def test_durable_across_reopen(self, provider: KeyProvider) -> None:
        doomed, kept = provider.create_epoch(), provider.create_epoch()
        wrapped_doomed = provider.wrap(doomed, self.KEY, self.AAD)
        wrapped_kept = provider.wrap(kept, self.KEY, self.AAD)
        other = self.reopen(provider)
        if other is None:
            # Not persistent: then a second instance must know nothing, and say so.
            assert provider.describe().location is None
            return
        assert other.epochs() == [doomed, kept]
        assert other.unwrap(kept, wrapped_kept, self.AAD) == self.KEY
        # Both instances stay open: what one destroys is gone for the other at once.
        other.destroy(doomed)
        for instance in (provider, other, self.reopen(provider)):
            assert instance is not None
            with pytest.raises(KeyDestroyedError):
                instance.unwrap(doomed, wrapped_doomed, self.AAD)
            assert instance.unwrap(kept, wrapped_kept, self.AAD) == self.KEY

    def test_req_c1_damaged_wraps_are_refused(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)

        @settings(max_examples=150, deadline=None)
        @given(st.data())
        def damage(data: st.DataObject) -> None:
            kind = data.draw(st.sampled_from(["flip", "cut", "extend", "other"]))
            bad = bytearray(wrapped)
            if kind == "flip":
                bit = data.draw(st.integers(0, 8 * len(wrapped) - 1))
                bad[bit // 8] ^= 1 << bit % 8
            elif kind == "cut":
                del bad[data.draw(st.integers(0, len(wrapped) - 1)) :]
            elif kind == "extend":
                bad += data.draw(st.binary(min_size=1, max_size=40))
            else:
                bad[:] = data.draw(st.binary(max_size=80))
            with pytest.raises(WrongKeyError):
                provider.unwrap(epoch, bytes(bad), self.AAD)

        damage()
        assert provider.unwrap(epoch, wrapped, self.AAD) == self.KEY

    def test_concurrent_use(self, provider: KeyProvider) -> None:
        shared = provider.create_epoch()
        start = threading.Barrier(6)

        def work(number: int) -> str:
            key = bytes([number]) * 32
            start.wait()
            own = provider.create_epoch()
            for turn in range(5):
                aad = b"%d/%d" % (number, turn)
                in_shared, in_own = provider.wrap(shared, key, aad), provider.wrap(own, key, aad)
                assert provider.unwrap(shared, in_shared, aad) == key
                assert provider.unwrap(own, in_own, aad) == key
            if number % 2:
                wrapped = provider.wrap(own, key, self.AAD)
                provider.destroy(own)
                with pytest.raises(KeyDestroyedError):
                    provider.unwrap(own, wrapped, self.AAD)
            return own

        with ThreadPoolExecutor(6) as pool:
            made = list(pool.map(work, range(6)))
        assert set(provider.epochs()) == {shared, *made[::2]}

    @pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
    def test_time_limit_must_be_one(self, provider: KeyProvider, limit: float) -> None:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)
        for call in self._every_call(provider, epoch, wrapped, limit):
            with pytest.raises(ValueError, match="time limit"):
                call()

    def test_req_k9_time_limit_is_honoured(self, provider: KeyProvider) -> None:
        epoch = provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)
        hanging = self.hanging(provider)
        if hanging is not None:
            with hanging:
                # That this returns at all is the test: the place never answers in here.
                for call in self._every_call(provider, epoch, wrapped, 0.05)[:-1]:
                    with pytest.raises(KeyUnavailableError):
                        call()
        # The destruction is not among the calls above: the contract lets it go through late.
        assert provider.unwrap(epoch, wrapped, self.AAD) == self.KEY

    def test_describe(self, provider: KeyProvider) -> None:
        info = provider.describe()
        assert info.assurance is self.assurance
        assert info.uri.partition(":")[1] == ":"
        assert info.reason.endswith(".")
        assert "\n" not in info.reason
        if info.location is not None:
            assert info.location.is_absolute()
            assert info.location.exists()

    def test_req_t6_no_key_bytes_in_any_text(
        self, provider: KeyProvider, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(0)
        epoch, doomed = provider.create_epoch(), provider.create_epoch()
        wrapped = provider.wrap(epoch, self.KEY, self.AAD)
        roots = self.root_keys(provider)
        provider.destroy(doomed)
        texts = [repr(provider), str(provider), repr(provider.describe())]
        refused: list[Callable[[], object]] = [
            lambda: provider.unwrap(epoch, wrapped, b"other"),
            lambda: provider.unwrap(epoch, wrapped[:-1], self.AAD),
            lambda: provider.unwrap(doomed, wrapped, self.AAD),
            lambda: provider.wrap("unknown", self.KEY, self.AAD),
        ]
        for call in refused:
            with pytest.raises(VaultKeyError) as caught:
                call()
            error: KvvaultError = caught.value
            texts += [str(error), repr(error), error.hint, str(error.__cause__)]
            assert error.exit_code == 12
            assert error.hint
        texts += [record.getMessage() for record in caplog.records]
        everything = "\n".join(texts).lower()
        for secret in [self.KEY, *roots]:
            assert secret.hex() not in everything
            assert repr(secret)[2:-1].lower() not in everything

    def _every_call(
        self, provider: KeyProvider, epoch: str, wrapped: bytes, limit: float
    ) -> list[Callable[[], object]]:
        return [
            lambda: provider.create_epoch(timeout=limit),
            lambda: provider.wrap(epoch, self.KEY, self.AAD, timeout=limit),
            lambda: provider.unwrap(epoch, wrapped, self.AAD, timeout=limit),
            lambda: provider.epochs(timeout=limit),
            lambda: provider.describe(timeout=limit),
            lambda: provider.destroy(epoch, timeout=limit),
        ]
