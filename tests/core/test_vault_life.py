"""Deleting, damage, and several handles on one vault."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvvault.errors import (
    ClosedError,
    StorageError,
    UsageError,
    VaultLockedError,
)
from kvvault.model import Outcome, PutReport, SegmentState
from kvvault.segments.io import SegmentDir, SegmentFile
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    SMALL,
    ZERO,
    Home,
    assert_hits,
    assert_missing,
    content,
    flip,
    get,
    key,
    keys,
    namespace,
    put,
    segment_of,
)


class TestDeletion:
    def test_segments(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(8))
        doomed = segment_of(vault, scope, key(0))
        assert doomed is not None
        gone = [k for k in keys(8) if segment_of(vault, scope, k) == doomed]
        kept = [k for k in keys(8) if k not in gone]
        assert gone
        assert kept
        assert vault.delete_segments([doomed]) == 1
        assert vault.contains(scope, gone) == [False] * len(gone)
        assert_missing(vault, scope, gone)
        assert_hits(vault, scope, kept)
        assert doomed.hex() + ".seg" not in {p.name for p in (vault.path / "segments").iterdir()}
        states = {s.segment_id: s.state for s in vault.segments()}
        assert states[doomed] is SegmentState.DESTROYED
        assert put(vault, scope, keys(8)) == PutReport(stored=len(gone), present=len(kept))
        assert_hits(vault, scope, keys(8))

    def test_unknown_and_repeated_ids(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(4))
        doomed = vault.segments()[0].segment_id
        assert vault.delete_segments([]) == 0
        assert vault.delete_segments([bytes(16), b"", b"x" * 40]) == 0
        assert_hits(vault, scope, keys(4))
        assert vault.delete_segments([doomed, doomed]) == 1
        assert vault.delete_segments([doomed]) == 0

    def test_more_segments_than_one_statement_takes(self, home: Home) -> None:
        home.options = dataclasses.replace(SMALL, segment_bytes=BLOCK)
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(60))
            ids = [s.segment_id for s in vault.segments()]
            assert len(ids) == 60
            padding = [n.to_bytes(16, "big") for n in range(1000)]
            assert vault.delete_segments(padding + ids[:59]) == 59
            assert sum(vault.contains(scope, keys(60))) == 1

    def test_an_open_segment_takes_no_more_blocks(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(1))
        (only,) = vault.segments()
        assert only.state is SegmentState.OPEN
        vault.delete_segments([only.segment_id])
        assert put(vault, scope, keys(3)).stored == 3
        assert_hits(vault, scope, keys(3))
        assert all(s.segment_id != only.segment_id for s in vault.segments() if s.state.live)

    def test_reopened_it_stays_gone(self, home: Home) -> None:
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(8))
            doomed = segment_of(vault, scope, key(0))
            assert doomed is not None
            gone = [k for k in keys(8) if segment_of(vault, scope, k) == doomed]
            vault.delete_segments([doomed])
        with home.open() as vault:
            assert vault.recovery.clean
            scope = vault.scope("alice", namespace())
            assert_missing(vault, scope, gone)
            assert_hits(vault, scope, [k for k in keys(8) if k not in gone])

    def test_req_k1_forgetting_a_tenant_leaves_the_others(self, vault: Vault) -> None:
        alice, bob = vault.scope("alice", namespace()), vault.scope("bob", namespace())
        put(vault, alice, keys(6), "alice")
        put(vault, bob, keys(6), "bob")
        assert vault.forget("alice") == 2
        assert vault.contains(alice, keys(6)) == [False] * 6
        assert_missing(vault, alice, keys(6))
        assert put(vault, alice, keys(1)) == PutReport(refused=1)
        assert_hits(vault, bob, keys(6), "bob")
        assert [facts.name for facts in vault.tenants()] == ["bob"]
        assert vault.forget("alice") == 0
        # The same name is a new tenant, which finds nothing and may begin again.
        again = vault.scope("alice", namespace())
        assert again.tenant_id != alice.tenant_id
        assert_missing(vault, again, keys(6))
        put(vault, again, keys(6), "alice again")
        assert_hits(vault, again, keys(6), "alice again")

    def test_forgetting_that_could_not_be_written_changes_nothing(
        self, vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(vault, scope, keys(3))

        def full(*_args: object, **_named: object) -> None:
            raise StorageError("cannot write", hint="free some space")

        with monkeypatch.context() as patch:
            patch.setattr("kvvault.catalog.retention.forget_tenant", full)
            with pytest.raises(StorageError):
                vault.forget("alice")
        assert_hits(vault, scope, keys(3))
        assert put(vault, scope, keys(4)) == PutReport(stored=1, present=3)

    def test_deleting_does_not_wait_for_a_hung_disk(
        self, vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(vault, scope, keys(4))
        reading, go_on = threading.Event(), threading.Event()
        real = vault._reader.__class__._load.__globals__["read_ciphertext"]

        def hang(*args: Any) -> Any:
            result = real(*args)
            reading.set()
            assert go_on.wait(60)
            return result

        monkeypatch.setattr("kvvault.reading.read_ciphertext", hang)
        results: list[tuple[list[Outcome], list[bytes]]] = []
        loader = threading.Thread(target=lambda: results.append(get(vault, scope, keys(4))))
        loader.start()
        assert reading.wait(60)
        assert vault.delete_segments([s.segment_id for s in vault.segments()]) == 1
        # It returned although a load still hangs, and that load serves nothing any more.
        go_on.set()
        loader.join(60)
        ((outcomes, found),) = results
        assert set(outcomes) == {Outcome.MISS}
        assert found == [ZERO] * 4

    def test_promise_5_deleting_waits_for_who_is_publishing(
        self, vault: Vault, scope: Scope
    ) -> None:
        put(vault, scope, keys(4))
        inside, go_on = threading.Event(), threading.Event()

        class Slow:
            def enter(self) -> bool:
                inside.set()
                assert go_on.wait(60)
                return True

            def leave(self) -> None:
                return None

        results: list[tuple[list[Outcome], list[bytes]]] = []
        loader = threading.Thread(target=lambda: results.append(get(vault, scope, keys(2), Slow())))
        loader.start()
        assert inside.wait(60)
        doomed = [s.segment_id for s in vault.segments()]
        eraser = threading.Thread(target=vault.delete_segments, args=(doomed,))
        eraser.start()
        eraser.join(0.3)
        assert eraser.is_alive()  # the load may still hand over what it looked up before
        assert vault.contains(scope, keys(4)) == [False] * 4
        go_on.set()
        eraser.join(60)
        loader.join(60)
        assert not eraser.is_alive()
        # It came too late in any case: the keys went with the segment.
        assert results == [([Outcome.MISS] * 2, [ZERO] * 2)]
        assert_missing(vault, scope, keys(4))

    def test_a_reader_that_does_not_leave_is_an_error_and_the_blocks_are_gone(
        self, home: Home
    ) -> None:
        home.options = dataclasses.replace(SMALL, lock_timeout_s=0.2)
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(2))
            with vault._fence.shared(), pytest.raises(VaultLockedError):
                vault.delete_segments([s.segment_id for s in vault.segments()])
            assert_missing(vault, scope, keys(2))
        with home.open() as vault:
            assert vault.recovery.finished_deletions == 1
            assert home.segment_files() == []


class TestDamage:
    """Briefly; the rest is in `test_mutations`."""

    def test_what_failed_is_not_asked_for_again(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(4))
        (path,) = (vault.path / "segments").iterdir()
        path.write_bytes(flip(path.read_bytes(), 8 * BLOCK + 3))
        found, _ = get(vault, scope, keys(4))
        assert sorted(found) == ["hit", "hit", "hit", "tampered"]
        bad = keys(4)[found.index(Outcome.TAMPERED)]
        assert vault.contains(scope, [bad]) == [False]
        assert_missing(vault, scope, [bad])
        assert vault.stats().tampered == 1
        # The engine computes it again; then it is stored and served again.
        assert put(vault, scope, keys(4)) == PutReport(stored=1, present=3)
        assert_hits(vault, scope, keys(4))
        assert vault.verify().tampered == 1

    def test_what_is_missing_is_not_asked_for_again(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(8))
        one, two = sorted((vault.path / "segments").iterdir())
        one.unlink()
        os.truncate(two, 3 * BLOCK)
        outcomes, _ = get(vault, scope, keys(8))
        assert outcomes.count(Outcome.HIT) == 3
        assert vault.stats().lost == 5
        assert vault.contains(scope, keys(8)) == [o is Outcome.HIT for o in outcomes]
        assert put(vault, scope, keys(8)) == PutReport(stored=5, present=3)
        assert_hits(vault, scope, keys(8))


class TestSealing:
    @pytest.mark.parametrize(
        ("where", "error"),
        [
            ("fstat", OSError(5, "EIO")),
            ("fstat", MemoryError()),
            ("sync", MemoryError()),
            ("discard", MemoryError()),
        ],
    )
    def test_whatever_is_raised_meanwhile_others_are_sealed(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
    ) -> None:
        raised = threading.Event()
        options = dataclasses.replace(SMALL, sync_interval_s=0.02)
        first, second = keys(4), keys(4, start=4)
        home.create().close()
        with home.open(options=options) as vault:
            scope = vault.scope("alice", namespace())
            with monkeypatch.context() as patch:
                if where == "fstat":
                    failing_in_seal(patch, os, "fstat", error, raised)
                elif where == "sync":
                    failing_in_seal(patch, SegmentFile, "sync", error, raised)
                else:  # of a segment that cannot be synced
                    failing_in_seal(patch, SegmentFile, "sync", error, threading.Event())
                    failing_in_seal(patch, SegmentDir, "discard", error, raised)
                put(vault, scope, first)
                assert raised.wait(30)
            put(vault, scope, second)
            segment = segment_of(vault, scope, second[0])
            limit = time.monotonic() + 30
            while not any(
                one.segment_id == segment and one.state is SegmentState.SEALED
                for one in vault.segments()
            ):
                assert time.monotonic() < limit
                time.sleep(0.005)
            assert_hits(vault, scope, second)


def failing_in_seal(
    patch: pytest.MonkeyPatch, owner: object, name: str, error: Exception, raised: threading.Event
) -> None:
    """Have a function raise `error`, in the thread that seals."""
    real = getattr(owner, name)

    def fail(*args: Any) -> Any:
        if threading.current_thread().name == "kvvault-seal":
            raised.set()
            raise error
        return real(*args)

    patch.setattr(owner, name, fail)


class TestSeveralHandles:
    def test_what_one_writes_the_other_reads(self, home: Home) -> None:
        with home.create() as one, home.open() as two:
            here, there = one.scope("alice", namespace()), two.scope("alice", namespace())
            assert here.tenant_id == there.tenant_id
            put(one, here, keys(5))
            two.refresh()
            assert_hits(two, there, keys(5))
            put(two, there, keys(10))
            one.refresh()
            assert_hits(one, here, keys(10))
            assert one.stats().blocks == 10

    def test_the_other_follows_by_itself(self, home: Home) -> None:
        with home.create() as one, home.open() as two:
            scope, there = one.scope("alice", namespace()), two.scope("alice", namespace())
            put(one, scope, keys(3))
            waited = threading.Event()
            for _ in range(600):
                if two.contains(there, keys(3)) == [True] * 3:
                    break
                waited.wait(0.05)
            assert_hits(two, there, keys(3))

    def test_promise_5_no_stale_hit_elsewhere_after_a_deletion(self, home: Home) -> None:
        slow = dataclasses.replace(SMALL, poll_interval_s=60.0)
        with home.create() as one, home.open(options=slow) as two:
            here, there = one.scope("alice", namespace()), two.scope("alice", namespace())
            put(one, here, keys(5))
            assert_missing(two, there, keys(1, start=50))  # also a look, which finds nothing new
            two.refresh()
            assert_hits(two, there, keys(5))
            one.delete_segments([s.segment_id for s in one.segments()])
            # `contains` may lag behind; a load never does.
            assert two.contains(there, keys(5)) == [True] * 5
            assert_missing(two, there, keys(5))
            assert two.contains(there, keys(5)) == [False] * 5
            assert two.stats().lost == 0  # it was deleted, not lost

    def test_promise_5_also_while_the_file_is_still_there(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The catalog decides, not whether the bytes can still be read.
        slow = dataclasses.replace(SMALL, poll_interval_s=60.0)
        with home.create() as one, home.open(options=slow) as two:
            here, there = one.scope("alice", namespace()), two.scope("alice", namespace())
            put(one, here, keys(4))
            two.refresh()
            assert_hits(two, there, keys(4))
            # Once sealed, nobody but the deletion has anything to do with its file.
            until = time.monotonic() + 60
            while one.segments()[0].state is not SegmentState.SEALED:
                assert time.monotonic() < until
                time.sleep(0.005)
            with monkeypatch.context() as patch:
                for name in ("unlink", "discard"):
                    patch.setattr(f"kvvault.segments.io.SegmentDir.{name}", lambda *_: True)
                one.delete_segments([s.segment_id for s in one.segments()])
            assert [p.stat().st_size for p in home.segment_files()] == [4 * BLOCK]
            assert_missing(two, there, keys(4))
            stats = two.stats()
            assert (stats.lost, stats.tampered, stats.misses) == (0, 0, 4)

    def test_forgotten_elsewhere(self, home: Home) -> None:
        with home.create() as one, home.open() as two:
            here, there = one.scope("alice", namespace()), two.scope("alice", namespace())
            put(one, here, keys(5))
            two.refresh()
            one.forget("alice")
            assert_missing(two, there, keys(5))
            assert put(two, there, keys(2)).stored == 0
            again = two.scope("alice", namespace())
            assert put(two, again, keys(2)).stored == 2
            assert_hits(two, again, keys(2))

    def test_forgotten_elsewhere_with_nothing_of_it_known_here(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = dataclasses.replace(SMALL, poll_interval_s=60.0)
        with home.create() as one, home.open(options=slow) as two:
            there, bobs = two.scope("alice", namespace()), two.scope("bob", namespace())
            two.refresh()
            assert there.block_id(key(0)) != bobs.block_id(key(0))
            one.forget("alice")

            def fail(_operation: object) -> None:
                raise StorageError("no", hint="no", errno=5)

            with monkeypatch.context() as patch:
                patch.setattr(two.catalog, "read", fail)
                with pytest.raises(StorageError):
                    two.refresh()
            two.refresh()  # what could not be asked is asked again
            with pytest.raises(ClosedError):
                there.block_id(key(0))
            bobs.block_id(key(0))

    def test_forgotten_elsewhere_is_noticed_by_itself(self, home: Home) -> None:
        with home.create() as one, home.open() as two:
            there = two.scope("alice", namespace())
            one.forget("alice")
            limit = time.monotonic() + 30.0
            while there.tenant_id in two._ring.tenant_ids and time.monotonic() < limit:
                time.sleep(0.01)
            with pytest.raises(ClosedError):
                there.block_id(key(0))

    def test_opening_leaves_a_living_writer_alone(self, home: Home) -> None:
        with home.create() as one:
            scope = one.scope("alice", namespace())
            put(one, scope, keys(1))
            with home.open() as two:
                assert two.recovery.clean
                put(one, scope, keys(3))
                (facts,) = one.segments()
                assert facts.state is SegmentState.OPEN
                assert facts.blocks == 3
                two.refresh()
                assert_hits(two, two.scope("alice", namespace()), keys(3))

    def test_many_threads_and_handles(self, home: Home) -> None:
        errors: list[BaseException] = []
        with home.create() as one, home.open() as two:

            def work(number: int) -> None:
                vault = (one, two)[number % 2]
                try:
                    scope = vault.scope(f"tenant {number % 3}", namespace())
                    owner = f"tenant {number % 3}"
                    for turn in range(12):
                        mine = keys(6, start=3 * turn)
                        put(vault, scope, mine, owner)
                        outcomes, found = get(vault, scope, mine)
                        for k, outcome, data in zip(mine, outcomes, found, strict=True):
                            # Another thread may be storing it: then it is not findable yet.
                            assert outcome in (Outcome.HIT, Outcome.MISS)
                            expected = content(owner, k) if outcome is Outcome.HIT else ZERO
                            assert data == expected
                except BaseException as exc:
                    errors.append(exc)
                    raise

            threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert errors == []
            one.refresh()
            for number in range(3):
                owner = f"tenant {number}"
                assert_hits(one, one.scope(owner, namespace()), keys(39), owner)
            assert one.verify().ok


def test_whoever_finds_nothing_left_to_delete_waits_for_loads_all_the_same(
    vault: Vault, scope: Scope
) -> None:
    """Somebody else may be in the middle of the same deletion."""
    put(vault, scope, keys(4))
    segment = vault.segments()[0].segment_id
    assert vault.delete_segments([segment]) == 1
    again: list[Callable[[], object]] = [
        lambda: vault.delete_segments([segment]),
        lambda: vault.forget("nobody"),
        vault.expire,
    ]
    for deletion in again:
        with ThreadPoolExecutor(1) as thread:
            with vault._fence.shared():
                done = thread.submit(deletion)
                time.sleep(0.2)
                assert not done.done()
            done.result(60)


@pytest.mark.parametrize("name", ["\ud800", "a\nb"])
def test_names_that_none_can_have(vault: Vault, name: str) -> None:
    assert vault.forget(name) == 0
    with pytest.raises(UsageError):
        vault.place_hold(tenant=name, reason="a test", actor="tests")
    with pytest.raises(UsageError):
        vault.scope("alice", namespace(), labels={"matter": name})


def test_one_row_that_claims_absurd_space_keeps_no_other_from_going(home: Home) -> None:
    with home.create() as vault:
        for tenant in ("alice", "bob"):
            put(vault, vault.scope(tenant, namespace()), keys(4), tenant)
    with home.sql() as connection:
        connection.execute(
            "UPDATE segments SET block_bytes = ? WHERE rowid = (SELECT min(rowid) FROM segments)",
            (2**62,),
        )
    with home.open() as vault:
        live = [facts.segment_id for facts in vault.segments() if facts.state.live]
        assert vault.delete_segments(live) == len(live)
