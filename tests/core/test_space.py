"""Space: nothing is written that was not set aside first, and what is set aside stays in limits."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import Connection, select, update

from kvvault.catalog import operations, space
from kvvault.catalog import schema as t
from kvvault.catalog.database import log_bytes
from kvvault.catalog.operations import SegmentGoneError
from kvvault.catalog.space import NoSpaceError, SpaceLimits, Surroundings
from kvvault.catalog.writer import LOG_BYTES
from kvvault.evicting import EvictionReport, Evictor
from kvvault.model import PutReport
from kvvault.options import VaultOptions
from kvvault.vault import Scope, Vault
from tests.core.support import BLOCK, SMALL, Home, assert_hits, keys, namespace, put
from tests.core.timed import PLENTY, TimedHome, policy, put_in_force

MIB = 1 << 20
ROOMY = Surroundings(catalog_bytes=0, free_bytes=1 << 40, total_bytes=1 << 41)
NO_LIMITS = SpaceLimits()
WHOLE = VaultOptions(segment_bytes=64 * BLOCK, direct=False, spare_segments=0)
"""Segments of 64 blocks."""


@pytest.fixture
def timed(home: Home) -> TimedHome:
    return TimedHome(home.path, options=WHOLE)


def open_segment(vault: Vault, scope: Scope, first: int) -> bytes:
    """One with a block and no grant beyond what it uses."""
    put(vault, scope, keys(1, start=first))
    (segment_id,) = [f.segment_id for f in vault.segments() if f.tenant_id == scope.tenant_id]
    set_row(vault, segment_id, granted=1)
    return segment_id


def set_row(vault: Vault, segment_id: bytes, **values: object) -> None:
    s = t.segments.c
    statement = update(t.segments).where(s.segment_id == segment_id).values(**values)
    vault._catalog.write(lambda c: c.execute(statement).rowcount)


def granted(vault: Vault) -> int:
    """Bytes that are used or set aside."""
    return vault._catalog.read(space.usage).used


def grant(
    vault: Vault,
    segment_id: bytes,
    slots: int,
    limits: SpaceLimits = NO_LIMITS,
    around: Surroundings = ROOMY,
    max_bytes: int | None = None,
) -> None:
    vault._catalog.write(lambda c: space.grant(c, segment_id, slots, limits, around, max_bytes))


# -- granting ------------------------------------------------------------------------------------


def test_the_cap_counts_grants_and_the_catalog(timed: TimedHome) -> None:
    with timed.create() as vault:
        segment_id = open_segment(vault, vault.scope("alice", namespace()), 0)
        around = replace(ROOMY, catalog_bytes=10 * BLOCK, log_bytes=90 * BLOCK)
        cap = SpaceLimits(cap_bytes=107 * BLOCK)
        grant(vault, segment_id, 6, cap, around)
        with pytest.raises(NoSpaceError) as refused:
            grant(vault, segment_id, 64, cap, around)
        assert refused.value.short >= 57 * BLOCK
        assert granted(vault) == 6 * BLOCK
        grant(vault, segment_id, 3, cap, around)  # less than it has: nothing is taken away
        assert granted(vault) == 6 * BLOCK


def test_the_floor_counts_what_is_granted_and_not_written_yet(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        one = open_segment(vault, scope, 0)
        other = open_segment(vault, vault.scope("bob", namespace()), 0)
        limits = SpaceLimits(free_floor_bytes=100 * BLOCK)
        around = replace(ROOMY, free_bytes=110 * BLOCK)
        grant(vault, one, 8, limits, around)  # 7 of them are not written
        with pytest.raises(NoSpaceError, match="floor") as refused:
            grant(vault, other, 6, limits, around)
        assert refused.value.short == 2 * BLOCK
        grant(vault, other, 4, limits, around)
        with pytest.raises(NoSpaceError, match="floor"):
            grant(vault, one, 9, limits, around)
        grant(vault, one, 9, limits, replace(ROOMY, free_bytes=111 * BLOCK))


def test_max_bytes_is_for_one_tenant_and_one_rule(timed: TimedHome) -> None:
    with timed.create() as vault:
        alice = open_segment(vault, vault.scope("alice", namespace()), 0)
        bob = open_segment(vault, vault.scope("bob", namespace()), 0)
        grant(vault, alice, 4, max_bytes=4 * BLOCK)
        with pytest.raises(NoSpaceError) as refused:
            grant(vault, alice, 5, max_bytes=4 * BLOCK)
        assert refused.value.short == BLOCK
        assert refused.value.rule == "rule-0"
        assert refused.value.tenant_id == vault.scope("alice", namespace()).tenant_id
        grant(vault, bob, 4, max_bytes=4 * BLOCK)
        set_row(vault, alice, rule="another")
        with pytest.raises(NoSpaceError):
            grant(vault, bob, 5, max_bytes=4 * BLOCK)


def test_only_open_segments_get_more(timed: TimedHome) -> None:
    with timed.create() as vault:
        segment_id = open_segment(vault, vault.scope("alice", namespace()), 0)
        vault.delete_segments([segment_id])
        with pytest.raises(SegmentGoneError):
            grant(vault, segment_id, 5)
        with pytest.raises(SegmentGoneError):
            grant(vault, bytes(16), 5)


def test_sealing_gives_the_rest_back(timed: TimedHome) -> None:
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(5))
        assert granted(vault) == 64 * BLOCK
        (facts,) = vault.segments()
        vault._catalog.write(lambda c: operations.seal_segment(c, facts.segment_id))
        assert granted(vault) == 5 * BLOCK


def test_deleting_gives_it_back_only_when_the_file_is_gone(timed: TimedHome) -> None:
    """Whoever writes to it may have a batch under way, and learns of the deletion after it."""
    with timed.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(5))
        (facts,) = vault.segments()
        ids = [facts.segment_id]
        vault._catalog.write(lambda c: operations.revoke_segments(c, ids))
        assert granted(vault) == 64 * BLOCK
        vault._catalog.write(lambda c: operations.finish_deletion(c, ids))
        assert granted(vault) == 0


def test_opening_after_a_kill_gives_it_back(timed: TimedHome) -> None:
    with timed.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(5))
        copy = timed.path.with_name("killed")
        shutil.copytree(timed.path, copy)
    timed.path = copy
    with timed.open() as vault:
        assert vault.recovery.sealed_segments == 1
        assert granted(vault) == 5 * BLOCK
        assert_hits(vault, vault.scope("alice", namespace()), keys(5))


def test_a_store_writes_no_slot_that_was_not_granted(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvvault.segments.io import SegmentFile

    write = SegmentFile.write
    ends: list[tuple[str, int]] = []

    def seen(file: SegmentFile, offset: int, data: memoryview) -> None:
        s = t.segments.c
        row = vault._catalog.read(
            lambda c: c.execute(
                select(s.granted, s.block_bytes).where(
                    s.segment_id == bytes.fromhex(file.name.split(".")[0])
                )
            ).one()
        )
        assert offset + len(data) <= row[0] * row[1]
        ends.append((file.name, offset + len(data)))
        write(file, offset, data)

    monkeypatch.setattr(SegmentFile, "write", seen)
    monkeypatch.setattr("kvvault.space._STEP_BYTES", 3 * BLOCK)
    with timed.create() as made:
        vault = made
        for first in range(0, 150, 10):
            assert put(vault, vault.scope("alice", namespace()), keys(10, first)).stored == 10
    assert len(ends) > 10


# -- many at once --------------------------------------------------------------------------------


def at_once(work: Callable[[int], None], count: int = 4) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as exc:  # noqa: BLE001 - shown by the test
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_threads_of_two_handles_never_pass_the_cap_together(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked inside every transaction that grants, so at every moment."""
    cap = 12 * MIB
    timed.first = policy("delete_by: 1h, keep_at_least: 30m", cap=f"{cap}B")
    monkeypatch.setattr("kvvault.space._STEP_BYTES", 9 * BLOCK)
    seen: list[int] = []
    grants = space.grant

    def checked(connection: Connection, *arguments: object) -> None:
        try:
            grants(connection, *arguments)  # type: ignore[arg-type]
        finally:
            seen.append(space.usage(connection).used)

    monkeypatch.setattr("kvvault.catalog.space.grant", checked)
    with timed.create() as one, timed.open() as two:
        totals = PutReport()
        lock = threading.Lock()

        def work(number: int) -> None:
            nonlocal totals
            vault = (one, two)[number % 2]
            scope = vault.scope(f"tenant-{number}", namespace(32 * BLOCK))
            for first in range(0, 40, 4):
                report = put(vault, scope, keys(4, start=1000 * number + first))
                with lock:
                    totals += report

        at_once(work)
        assert totals.stored > 0
        assert totals.refused > 0  # under their floor, nothing may be evicted
        assert totals.stored + totals.refused == 160
        assert max(seen) <= cap
        files = sum(path.stat().st_size for path in timed.path.rglob("*") if path.is_file())
        assert files <= cap
        assert one.counters()["refused_blocks"] + two.counters()["refused_blocks"] == totals.refused


# -- refused -------------------------------------------------------------------------------------


def test_what_is_refused_is_counted_and_said_once(
    timed: TimedHome, caplog: pytest.LogCaptureFixture
) -> None:
    timed.first = policy("delete_by: 1h", cap="1B")
    with timed.create() as vault, caplog.at_level(logging.WARNING, "kvvault"):
        scope = vault.scope("alice", namespace())
        for first in range(0, 60, 6):
            assert put(vault, scope, keys(6, start=first)) == PutReport(refused=6)
        assert vault.counters()["refused_blocks"] == 60
        assert len([r for r in caplog.records if "cap" in r.getMessage()]) == 1
        put_in_force(vault, policy("delete_by: 1h", cap=PLENTY))
        assert put(vault, scope, keys(6)).stored == 6
        put_in_force(vault, policy("delete_by: 1h", cap="1B"))
        for first in range(100, 300, 64):
            put(vault, scope, keys(64, start=first))
        assert len([r for r in caplog.records if "cap" in r.getMessage()]) == 2


def test_a_segment_for_which_there_is_no_space_is_not_made_again_and_again(
    timed: TimedHome,
) -> None:
    timed.first = policy("delete_by: 1h", cap="1B")
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        for first in range(0, 60, 6):
            put(vault, scope, keys(6, start=first))
        assert len(vault.segments()) <= 1


def test_what_little_there_is_is_used(timed: TimedHome) -> None:
    """A whole step does not fit, what is stored now does."""
    timed.first = policy("delete_by: 1h, keep_at_least: 30m, max_bytes: 10KiB")
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        assert put(vault, scope, keys(2)).stored == 2
        assert put(vault, scope, keys(1, start=2)).stored == 0
        assert put(vault, vault.scope("bob", namespace()), keys(2)).stored == 2


def test_above_the_cap_nothing_grows(timed: TimedHome) -> None:
    with timed.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(64))
    with timed.open() as vault:
        put_in_force(vault, policy("delete_by: 1h, keep_at_least: 30m", cap="4KiB"))
        before = granted(vault)
        report = put(vault, vault.scope("alice", namespace()), keys(64, start=64))
        assert report.stored == 0
        assert granted(vault) <= before
        assert sum(path.stat().st_size for path in timed.segment_files()) <= 64 * BLOCK


def test_expiring_makes_room(timed: TimedHome) -> None:
    timed.options = SMALL
    timed.first = policy("delete_by: 1h, keep_at_least: 1h, max_bytes: 40KiB")
    with timed.create() as vault:
        scope = vault.scope("alice", namespace())
        assert put(vault, scope, keys(12)).stored == 10
        timed.clock.advance(3600)
        vault.expire()
        assert put(vault, scope, keys(12)).stored == 10


def test_the_catalog_s_log_has_its_place_reserved(timed: TimedHome) -> None:
    """It grows between two grants; of a tiny cap no more than a quarter is kept for it."""
    around = replace(ROOMY, catalog_bytes=5)
    assert space.catalog_reserve(around, 1 << 40) == 5 + 2 * LOG_BYTES
    assert space.catalog_reserve(around, 4000) == 5 + 1000
    larger = replace(around, log_bytes=3 * LOG_BYTES)
    assert space.catalog_reserve(larger, 1 << 40) == 5 + 3 * LOG_BYTES


def test_the_log_is_bounded_while_commits_go_on(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvvault.catalog.writer.LOG_BYTES", 1 << 18)
    with timed.create() as vault:
        highest = 0
        for number in range(400):
            value = bytes([number % 256]) * 2000
            vault._catalog.write(
                partial(operations.put_meta, name=f"filler-{number % 9}", value=value),
                durable=False,
            )
            highest = max(highest, log_bytes(timed.catalog))
        assert highest > 1 << 17  # it did grow
        assert highest <= 1 << 19


def test_a_reader_that_takes_long_does_not_hold_up_every_commit(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log cannot be emptied under it; that is tried once for so much of it, not each time."""
    monkeypatch.setattr("kvvault.catalog.writer.LOG_BYTES", 1 << 16)
    monkeypatch.setattr("kvvault.catalog.writer._LOG_PATIENCE_MS", 10)
    with timed.create() as vault, timed.sql() as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM segments").fetchall()
        for number in range(40):
            vault._catalog.write(
                partial(operations.put_meta, name="filler", value=bytes([number]) * 2000),
                durable=False,
            )
        assert log_bytes(timed.catalog) > 1 << 16
        reader.execute("COMMIT")
        for number in range(60):
            vault._catalog.write(
                partial(operations.put_meta, name="filler", value=bytes([number]) * 2000),
                durable=False,
            )
        assert log_bytes(timed.catalog) <= 1 << 17


def test_what_is_written_again_and_finds_no_room_waits_for_nobody(
    timed: TimedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was faster: the thread that makes room asks for room itself."""
    asked: list[bool] = []

    def crowded(evictor: Evictor, *_: object) -> tuple[EvictionReport, None]:
        asked.append(evictor.make_room(NoSpaceError("others were faster", 1, 1)))
        return EvictionReport(segments=1, freed_bytes=1), None

    monkeypatch.setattr(Evictor, "_evict_chosen", crowded)
    with timed.create() as vault:
        made: list[bool] = []
        shortage = NoSpaceError("the vault is full", 1, 1)
        thread = threading.Thread(
            target=lambda: made.append(vault._evictor.make_room(shortage)), daemon=True
        )
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert made == [True]
        assert asked == [False]
