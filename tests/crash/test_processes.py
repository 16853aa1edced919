"""Several processes on one vault: the catalog is the truth, and an acknowledged deletion holds
everywhere (promise 5, REQ-F7)."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import ColumnElement, Connection, select

from kvvault.catalog import operations, schema
from kvvault.catalog.rows import SegmentRow
from kvvault.model import Outcome
from kvvault.segments.io import SegmentFile
from kvvault.vault import Vault
from tests.crash.blocks import (
    NAMESPACES,
    OPTIONS,
    Ledger,
    check_at_rest,
    check_blocks,
    get,
    key_of,
    plaintext_in,
    put,
)
from tests.crash.processes import Nursery, Remote

HIT, MISS = ["hit"], ["miss"]


class Crew:
    """Processes with the vault open."""

    def __init__(self, nursery: Nursery, path: Path, undo: ExitStack) -> None:
        self._nursery = nursery
        self._undo = undo
        self.path = path

    def join(self) -> Remote:
        remote = self._nursery.remote(self.path.parent, vault=str(self.path))
        self._undo.callback(remote.child.kill)
        return remote


@pytest.fixture
def crew(nursery: Nursery, path: Path) -> Iterator[Crew]:
    with ExitStack() as undo:
        yield Crew(nursery, path, undo)


def until_revoked(path: Path, ids: list[str]) -> None:
    """Wait until a deletion under way elsewhere is committed: from then on it waits for loads."""
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite3")) as catalog:
        for ident in ids:
            patience = time.monotonic() + 30
            while catalog.execute(
                "SELECT 1 FROM segments WHERE segment_id = ? AND wrapped_secret IS NOT NULL",
                (bytes.fromhex(ident),),
            ).fetchall():
                assert time.monotonic() < patience
                time.sleep(0.01)


def test_a_reader_elsewhere_sees_new_blocks_by_itself(crew: Crew) -> None:
    writer, reader = crew.join(), crew.join()
    place = {"tenant": "alpha", "i": 0}
    for first in range(0, 30, 3):
        numbers = list(range(first, first + 3))
        assert reader.call("get", **place, numbers=numbers) == MISS * 3
        assert writer.call("put", **place, numbers=numbers) == 3
        reader.call("until_known", **place, numbers=numbers)
        assert reader.call("get", **place, numbers=numbers) == HIT * 3
    for remote in (writer, reader):
        remote.close()


def test_no_stale_hit_after_a_deletion_returned(crew: Crew) -> None:
    """The reader's index may still know the block: it must not serve it all the same."""
    writer, reader, eraser = crew.join(), crew.join(), crew.join()
    place = {"tenant": "gamma", "i": 1}
    numbers = list(range(10))
    for turn in range(12):
        assert writer.call("put", **place, numbers=numbers) == len(numbers)
        reader.call("until_known", **place, numbers=numbers)
        assert reader.call("get", **place, numbers=numbers) == HIT * 10  # positive control
        if turn % 3:
            ids = eraser.call("segments", tenant="gamma")
            assert eraser.call("delete", ids=ids)[0] == len(ids)
        else:
            assert eraser.call("forget", tenant="gamma")[0] > 0
        assert reader.call("get", **place, numbers=numbers) == MISS * 10
        if not turn % 3:
            for remote in (writer, reader):
                remote.call("scope", **place)
    for remote in (writer, reader, eraser):
        remote.close()


def test_nothing_is_published_after_a_deletion_returned(crew: Crew) -> None:
    """Loads under way all the time: whatever hits was handed over before the eraser came back."""
    writer, reader, eraser = crew.join(), crew.join(), crew.join()
    place = {"tenant": "gamma", "i": 1}
    numbers = list(range(6))
    hits = 0
    for _ in range(15):
        assert writer.call("put", **place, numbers=numbers) == len(numbers)
        reader.call("until_known", **place, numbers=numbers)
        for _ in range(3):
            reader.call("start_loading", **place, numbers=numbers)
        reader.call("until_loaded", since=0)
        _, returned = eraser.call("delete", ids=eraser.call("segments", tenant="gamma"))
        reader.call("until_loaded", since=returned)
        report = reader.call("stop")
        assert not report["failed"], report["failed"]
        for begun, left, outcome in report["seen"]:
            assert outcome in ("hit", "miss")
            if outcome == "hit":
                assert begun < returned
                assert left < returned, "handed over after the deletion returned"
                hits += 1
    assert hits  # else the loads were never in the eraser's way
    for remote in (writer, reader, eraser):
        remote.close()


def test_an_eraser_waits_for_a_load_that_is_being_published(crew: Crew) -> None:
    writer, reader, eraser = crew.join(), crew.join(), crew.join()
    place = {"tenant": "gamma", "i": 0}
    assert writer.call("put", **place, numbers=[1, 2]) == 2
    reader.call("until_known", **place, numbers=[1, 2])
    ids = eraser.call("segments", tenant="gamma")
    reader.call("hold", **place, number=1)
    eraser.begin("delete", ids=ids)
    assert not eraser.answers_within(0.3)
    outcome, left = reader.call("let_go")
    count, returned = eraser.end()
    assert count == len(ids)
    assert outcome in ("hit", "miss")  # miss when its process heard of the revocation meanwhile
    assert left < returned
    assert reader.call("get", **place, numbers=[1, 2]) == MISS * 2
    for remote in (writer, reader, eraser):
        remote.close()


def test_a_writer_survives_the_deletion_of_its_open_segment(crew: Crew) -> None:
    writer, eraser = crew.join(), crew.join()
    place = {"tenant": "gamma", "i": 0}
    for turn in range(10):
        first = 3 * turn
        stored = writer.call("put", **place, numbers=[first])
        stored += writer.call("put", **place, numbers=[first + 1])
        # What meets the deletion may be refused; what comes after it may not.
        assert stored + writer.call("put", **place, numbers=[first, first + 1]) >= 2
        ids = eraser.call("segments", tenant="gamma")
        assert eraser.call("delete", ids=ids)[0] == len(ids) >= 1
        assert writer.call("get", **place, numbers=[first, first + 1]) == MISS * 2
    writer.close()
    eraser.close()
    with Vault.open(crew.path, options=OPTIONS) as vault:
        check_at_rest(vault, Ledger())


def test_opening_elsewhere_destroys_nothing_of_a_writer(crew: Crew, nursery: Nursery) -> None:
    """Recovery runs with each open, while another process has open segments and new ones come."""
    writer = crew.join()
    for k, tenant in enumerate(("alpha", "beta", "gamma")):
        writer.call("start_storing", tenant=tenant, i=k % 2, first=0, count=4000)
    for _ in range(8):
        child = nursery.start("reopen", crew.path.parent, vault=str(crew.path))
        assert child.wait() == 0
    report = writer.call("stop")
    assert not report["failed"], report["failed"]
    assert report["stored"] > 0
    assert report["refused"] == 0
    assert writer.call("counters").get("lost", 0) == 0
    with Vault.open(crew.path, options=OPTIONS) as vault:
        assert vault.stats().blocks == report["stored"]
        assert vault.recovery.clean
        assert vault.verify().ok
    writer.close()
    with Vault.open(crew.path, options=OPTIONS) as vault:
        assert vault.stats().blocks == report["stored"]
        check_at_rest(vault, Ledger())


@pytest.mark.slow
def test_writing_reading_and_deleting_at_once(crew: Crew, nursery: Nursery) -> None:
    """Every byte is looked at, and at the end catalog and files agree."""
    writers, readers, eraser = [crew.join(), crew.join()], [crew.join(), crew.join()], crew.join()
    for k, writer in enumerate(writers):
        for tenant in ("alpha", "gamma"):
            writer.call("start_storing", tenant=tenant, i=1, first=20 * k, count=40)
    for reader in readers:
        for tenant in ("alpha", "gamma"):
            reader.call("start_checking", tenant=tenant, i=1, numbers=list(range(60)))
    eraser.call("start_deleting", tenant="gamma")
    for _ in range(5):
        time.sleep(0.5)
        child = nursery.start("reopen", crew.path.parent, vault=str(crew.path))
        assert child.wait() == 0, child.lines()
    everybody = [*writers, *readers, eraser]
    stored = 0
    for remote in everybody:
        report = remote.call("stop")
        assert not report["failed"], report["failed"]
        stored += report["stored"]
        count = remote.call("counters")
        assert not any(count.get(name) for name in ("tampered", "lost", "key_unavailable")), count
    assert stored > 60, "nothing was ever deleted and stored again"
    assert not plaintext_in(crew.path)
    for remote in everybody:
        remote.close()
    with Vault.open(crew.path, options=OPTIONS) as vault:
        check_at_rest(vault, Ledger())
        there = check_blocks(vault, range(60))
        assert there["alpha", 1] == set(range(60))


def test_a_read_transaction_sees_one_state(path: Path) -> None:
    """Two queries of one poll must not see two states: an extent that came between them, of a
    segment that the first did not see yet, would be skipped for good."""
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])

        def between(connection: Connection) -> tuple[int, int]:
            before = len(connection.execute(select(schema.segments)).all())
            assert put(vault, scope, "alpha", [1]) == 1
            return before, len(connection.execute(select(schema.segments)).all())

        assert vault._catalog.read(between) == (0, 0)
        assert vault._catalog.read(lambda c: len(c.execute(select(schema.segments)).all())) == 1


def test_a_row_committed_while_recovery_looks_is_seen(
    nursery: Nursery, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are listed, then rows. A writer that commits in between and dies leaves a file that
    looks like nobody's, with blocks that it had acknowledged."""
    child = nursery.start("fork_and_wait", path.parent, vault=str(path), fork=False)
    child.wait_for("stored")
    child.kill()
    real = operations.list_segments
    calls = 0

    def too_early(
        connection: Connection, where: ColumnElement[bool] | None = None
    ) -> list[SegmentRow]:
        nonlocal calls
        calls += 1
        return [] if calls == 1 else real(connection, where)

    monkeypatch.setattr(operations, "list_segments", too_early)
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.destroyed_files == 0
        assert vault.recovery.sealed_segments > 0
        check_at_rest(vault, Ledger())
        assert check_blocks(vault, range(8))["alpha", 0] == set(range(5))


def test_a_file_taken_before_it_was_locked_is_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a file and its lock lies a moment in which it looks like nobody's."""
    real = SegmentFile.try_lock
    taken: list[str] = []

    def try_lock(file: SegmentFile) -> bool:
        if not taken and file.size == 0:
            taken.append(file.name)
            with Vault.open(path, options=OPTIONS) as other:
                assert other.recovery.destroyed_files == 1
        return real(file)

    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        monkeypatch.setattr(SegmentFile, "try_lock", try_lock)
        assert put(vault, scope, "alpha", range(3)) == 3
        assert taken
        assert not (path / "segments" / taken[0]).exists()
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean
        check_at_rest(vault, Ledger())
        assert check_blocks(vault, range(8))["alpha", 0] == set(range(3))


def test_a_stopped_eraser_holds_readers_up_for_a_limited_time(crew: Crew) -> None:
    """It holds the gate, and will when it goes on. Loads miss meanwhile, and hit nothing revoked
    when it has passed."""
    holder, eraser = crew.join(), crew.join()
    place = {"tenant": "gamma", "i": 0}
    assert holder.call("put", **place, numbers=[1, 2]) == 2
    with Vault.open(crew.path, options=replace(OPTIONS, lock_timeout_s=0.3)) as reader:
        kept = reader.scope("alpha", NAMESPACES[0])
        assert put(reader, kept, "alpha", [1]) == 1
        ids = eraser.call("segments", tenant="gamma")
        holder.call("hold", **place, number=1)
        eraser.begin("delete", ids=ids)
        until_revoked(crew.path, ids)
        assert not eraser.answers_within(0.3)
        os.kill(eraser.child.pid, signal.SIGSTOP)
        try:
            holder.call("let_go")
            assert get(reader, kept, "alpha", [1]) == [Outcome.IO_FAILED]
            assert reader.contains(kept, [key_of(1)]) == [True]  # never waits
        finally:
            os.kill(eraser.child.pid, signal.SIGCONT)
        assert eraser.end()[0] == len(ids)
        assert get(reader, kept, "alpha", [1]) == [Outcome.HIT]
        gone = reader.scope("gamma", NAMESPACES[0])
        assert get(reader, gone, "gamma", [1, 2]) == [Outcome.MISS] * 2


def test_a_killed_eraser_holds_nobody_up(crew: Crew) -> None:
    """Its locks went with it; what it had revoked stays revoked."""
    holder, eraser = crew.join(), crew.join()
    place = {"tenant": "gamma", "i": 0}
    assert holder.call("put", **place, numbers=[1, 2]) == 2
    with Vault.open(crew.path, options=OPTIONS) as reader:
        kept = reader.scope("alpha", NAMESPACES[0])
        gone = reader.scope("gamma", NAMESPACES[0])
        assert put(reader, kept, "alpha", [1]) == 1
        holder.call("hold", **place, number=1)
        ids = eraser.call("segments", tenant="gamma")
        eraser.begin("delete", ids=ids)
        until_revoked(crew.path, ids)
        assert not eraser.answers_within(0.3)
        eraser.child.kill()
        holder.call("let_go")
        assert get(reader, kept, "alpha", [1]) == [Outcome.HIT]
        assert get(reader, gone, "gamma", [1, 2]) == [Outcome.MISS] * 2
        holder.close()
    with Vault.open(crew.path, options=OPTIONS) as vault:
        assert vault.recovery.finished_deletions == 1
        check_at_rest(vault, Ledger())
