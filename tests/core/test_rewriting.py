"""Deleting single blocks: their segment's key goes, its other blocks live on elsewhere, as they
were."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from kvvault.audit.receipts import parse
from kvvault.catalog import revoking
from kvvault.catalog import schema as t
from kvvault.deleting import DeletionPlan, Eraser, Trigger
from kvvault.errors import KvvaultError, StorageError, VaultLockedError
from kvvault.model import Outcome, PutReport
from kvvault.rewriting import Rewriter
from kvvault.segments import store
from kvvault.segments.format import segment_name
from kvvault.segments.io import SegmentFile
from kvvault.vault import Scope, Vault
from kvvault.writing import Writer
from tests.core.support import (
    BLOCK,
    Home,
    assert_hits,
    assert_missing,
    get,
    keys,
    namespace,
    put,
    segment_of,
)


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())


def test_what_was_named_goes_and_the_rest_stays(home: Home) -> None:
    with home.create() as vault, home.open() as other:
        scope = vault.scope("alice", namespace())
        there = other.scope("alice", namespace())
        put(vault, scope, keys(12))
        put(vault, vault.scope("bob", namespace()), keys(12), "bob")
        before = {f.segment_id: f for f in vault.segments()}
        plan = vault.plan_blocks(scope, [keys(12)[1], keys(12)[6]])
        assert (plan.blocks, len(plan.segments)) == (2, 2)
        assert_hits(vault, scope, keys(12))  # a plan does nothing
        report = vault.execute(plan, reason="a test")
        assert (report.blocks, report.segments) == (2, 2)
        gone = {1, 6}
        for n in range(12):
            for handle, place in ((vault, scope), (other, there)):
                if n in gone:
                    assert_missing(handle, place, [keys(12)[n]])
                else:
                    assert_hits(handle, place, [keys(12)[n]])
        assert_hits(vault, vault.scope("bob", namespace()), keys(12), "bob")
        for facts in plan.segments:
            assert not next(
                f for f in vault.segments() if f.segment_id == facts.segment_id
            ).state.live
        fresh = [f for f in vault.segments() if f.segment_id not in before]
        deadlines = {f.deadline for f in plan.segments}
        assert {f.deadline for f in fresh if f.state.live} <= deadlines
    with home.open() as again:
        scope = again.scope("alice", namespace())
        assert again.contains(scope, keys(12)) == [n not in gone for n in range(12)]
        assert again.verify().ok


def test_when_the_rest_cannot_be_written_what_was_named_goes_all_the_same(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with home.create() as vault, home.open() as other:
        scope, there = (v.scope("alice", namespace()) for v in (vault, other))
        put(vault, scope, keys(4))
        plan = vault.plan_blocks(scope, keys(1))
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "put", lambda *_args, **_named: PutReport(refused=3))
            report = vault.execute(plan)
            assert (report.blocks, report.waiting_segments) == (1, 1)
        for handle, place in ((vault, scope), (other, there)):
            assert_missing(handle, place, keys(1))
            assert_hits(handle, place, keys(4)[1:])
        # Its key is still there, so nobody may call it purged.
        assert vault.purge_is_due() is False
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "put", lambda *_args, **_named: PutReport(refused=3))
            assert vault.purge().deletions == 0
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        assert_missing(vault, scope, keys(1))
        [old] = [f.segment_id for f in vault.segments() if f.state.live]
        vault.reconcile()
        assert_missing(vault, scope, keys(1))
        assert_hits(vault, scope, keys(4)[1:])
        assert old not in {f.segment_id for f in vault.segments() if f.state.live}
        assert vault.purge().deletions == 2  # the deletion, and the segment it was in


@pytest.mark.parametrize("how", ["rm", "expire", "forget", "policy"])
def test_what_was_erased_and_waits_is_not_counted_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Blocks are on one receipt, though their segment goes later: the sums are what existed."""
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(4))
        segments = [f.segment_id for f in vault.segments() if f.state.live]
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "put", lambda *_args, **_named: PutReport(refused=3))
            first = vault.execute(vault.plan_blocks(scope, keys(1)), actor="o", reason="r")
        assert (first.blocks, first.waiting_segments) == (1, 1)
        [facts] = [f for f in vault.segments() if f.state.live]
        assert facts.blocks == 4  # in its file
        match how:
            case "rm":
                plan = vault.plan_segments(segments)
            case "forget":
                plan = vault.plan_tenant("alice") or pytest.fail("no tenant")
            case "expire":
                vault._catalog.write(
                    lambda c: c.execute(t.segments.update().values(delete_by=1.0)).rowcount
                )
                plan = vault.plan_expired()
            case _:
                plan = vault._eraser.plan_segments(segments, Trigger.POLICY)
        assert (plan.blocks, plan.data_bytes) == (3, 3 * BLOCK)
        second = vault.execute(plan, actor="o", reason="r")
        assert (second.blocks, second.data_bytes) == (3, 3 * BLOCK)
        sums = vault.catalog.read(
            lambda c: c.execute(
                select(func.sum(t.deletions.c.blocks), func.sum(t.deletions.c.data_bytes))
            ).one()
        )
        assert tuple(sums) == (4, 4 * BLOCK)
        issued = [parse(one.document).content["deletion"] for one in vault.audit.receipts()]
        of_it = [(one["blocks"], one["bytes"]) for one in issued if one["number"] > 1]
        assert of_it in ([], [(3, 3 * BLOCK)])  # of what goes by itself there is none yet


def test_eviction_counts_what_the_file_took(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(4))
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "put", lambda *_args, **_named: PutReport(refused=3))
            vault.execute(vault.plan_blocks(scope, keys(1)), actor="o", reason="r")
        done, failed = vault._evictor._evict(1, (None, None), "a test", readmit=False)
        assert failed is None
        assert (done.segments, done.freed_bytes) == (1, 4 * BLOCK)
        count = vault.catalog.read(
            lambda c: c.execute(select(func.sum(t.deletions.c.blocks))).one()
        )
        assert tuple(count) == (4,)


def test_what_is_revoked_while_it_is_copied_does_not_come_back(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever revokes it may die before it looks again."""
    with home.create() as vault, home.open() as other:
        scope, there = (v.scope("alice", namespace()) for v in (vault, other))
        put(vault, scope, keys(4))
        real = Rewriter.copy

        def copy(rewriter: Rewriter, segment_id: bytes, slots: Sequence[int]) -> set[bytes]:
            new = real(rewriter, segment_id, slots)
            monkeypatch.setattr(Rewriter, "copy", real)
            with contextlib.suppress(VaultLockedError):  # it waits for the one that copies
                other.execute(other.plan_blocks(there, keys(1, 1)))
            return new

        monkeypatch.setattr(other._fence, "exclusive", refuse_rewriting(other._fence.exclusive))
        monkeypatch.setattr(Rewriter, "copy", copy)
        vault.execute(vault.plan_blocks(scope, keys(1)))
        for handle, place in ((vault, scope), (other, there)):
            assert_missing(handle, place, keys(2))
            assert_hits(handle, place, keys(4)[2:])


def refuse_rewriting(real: Callable[..., Any]) -> Callable[..., Any]:
    def exclusive(name: str, *args: Any, **named: Any) -> Any:
        if name == "rewrite":
            raise VaultLockedError("a test", hint="a test")
        return real(name, *args, **named)

    return exclusive


def test_deletions_that_share_a_segment_bring_nothing_back(vault: Vault, scope: Scope) -> None:
    put(vault, scope, keys(4))
    plans = [vault.plan_blocks(scope, [one]) for one in keys(3)]
    reports = [vault.execute(plan) for plan in plans]
    assert [report.blocks for report in reports] == [1, 1, 1]
    assert_missing(vault, scope, keys(3))
    assert_hits(vault, scope, keys(4)[3:])


def test_from_two_processes_at_once(home: Home) -> None:
    with home.create() as one, home.open() as two:
        handles = [(v, v.scope("alice", namespace())) for v in (one, two)]
        put(one, handles[0][1], keys(8))
        threads = [
            threading.Thread(
                target=lambda v=v, s=s, n=n: [
                    v.execute(v.plan_blocks(s, [key])) for key in keys(3, 3 * n)
                ]
            )
            for n, (v, s) in enumerate(handles)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for v, s in handles:
            assert_missing(v, s, keys(6))
            assert_hits(v, s, keys(2, 6))


def test_what_another_process_has_just_stored_is_not_lost(home: Home) -> None:
    slow = dataclasses.replace(home.options, poll_interval_s=60.0)
    with home.create() as one, home.open(options=slow) as two:
        there = two.scope("alice", namespace())
        for n in range(5):
            mine = keys(4, 10 * n)
            put(one, one.scope("alice", namespace()), mine)
            assert two.execute(two.plan_blocks(there, mine[:1])).blocks == 1
            assert_missing(two, there, mine[:1])
            assert_hits(two, there, mine[1:])


def test_blocks_that_come_between_plan_and_deletion_stay(vault: Vault, scope: Scope) -> None:
    put(vault, scope, keys(2))
    plan = vault.plan_blocks(scope, keys(1))
    put(vault, scope, keys(1, 2))
    assert vault.execute(plan).blocks == 1
    assert_missing(vault, scope, keys(1))
    assert_hits(vault, scope, keys(2, 1))


def test_when_the_rest_cannot_be_read_it_stays(
    vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(vault, scope, keys(4))

    def failing(*args: Any) -> list[StorageError]:
        return [StorageError("the disk says no", hint="a test")] * len(args[2])

    with monkeypatch.context() as patch:
        patch.setattr("kvvault.reading.read_ciphertext", failing)
        assert vault.execute(vault.plan_blocks(scope, keys(1))).waiting_segments == 1
    assert_missing(vault, scope, keys(1))
    assert_hits(vault, scope, keys(4)[1:])


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_is_not_trusted_now_may_be_in_order_later(home: Home, linked: bool) -> None:
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(4))
    [file] = home.segment_files()
    second = file.with_suffix(".second")
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        if linked:
            os.link(file, second)
        else:
            file.chmod(0o644)
        assert vault.execute(vault.plan_blocks(scope, keys(1))).waiting_segments == 1
        if linked:
            second.unlink()
        else:
            file.chmod(0o600)
        vault.reconcile()
        assert not vault.catalog.read(revoking.revoked_slots)
        assert_missing(vault, scope, keys(1))
        assert_hits(vault, scope, keys(4)[1:])


def test_a_segment_that_was_given_up_is_not_taken_in_without_its_blocks(home: Home) -> None:
    """Compacting it changes its row, but its extents come no second time."""
    with home.create() as one, home.open() as two:
        mine, there = (v.scope("alice", namespace()) for v in (one, two))
        put(one, mine, keys(3))
        [file] = home.segment_files()
        two._view.refresh()
        file.chmod(0o644)
        assert_missing(two, there, keys(1), Outcome.TAMPERED)
        file.chmod(0o600)
        assert two.execute(two.plan_blocks(there, keys(1))).waiting_segments == 1
        assert_missing(two, there, keys(3))
        assert_hits(one, mine, keys(2, 1))
        one.reconcile()
        two._view.refresh()  # else it is told a moment later
        for handle, place in ((one, mine), (two, there)):
            assert_missing(handle, place, keys(1))
            assert_hits(handle, place, keys(2, 1))


def test_a_vault_that_is_closed_meanwhile_loses_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(4))
        plan = vault.plan_blocks(scope, keys(1))
        real = store.read_ciphertext

        def read(*args: Any) -> Any:
            vault._view.close()
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr("kvvault.reading.read_ciphertext", read)
            assert vault.execute(plan).waiting_segments == 1
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        vault.reconcile()
        assert_missing(vault, scope, keys(1))
        assert_hits(vault, scope, keys(4)[1:])


def test_what_is_not_there_does_not_keep_a_key(vault: Vault, scope: Scope, home: Home) -> None:
    """The control: what is lost for good is nothing to wait for, however many reads it takes."""
    put(vault, scope, keys(4))
    [file] = home.segment_files()
    file.unlink()
    assert vault.execute(vault.plan_blocks(scope, keys(1))).waiting_segments == 0
    assert not [f for f in vault.segments() if f.state.live]


def test_copies_are_on_the_disk_before_their_source_is_destroyed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also copies of an attempt that did not come to its end."""
    synced: set[str] = set()
    before: list[set[str]] = []
    sync, execute = SegmentFile.sync, Eraser.execute

    def failing(_file: SegmentFile) -> None:
        raise StorageError("the disk says no", hint="a test")

    def noting(file: SegmentFile) -> None:
        sync(file)
        synced.add(file.name)

    def destroy(eraser: Eraser, plan: DeletionPlan, **named: Any) -> Any:
        if plan.trigger is Trigger.COMPACT:
            before.append(set(synced))
        return execute(eraser, plan, **named)

    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(4))
        [source] = home.segment_files()
        monkeypatch.setattr(Eraser, "execute", destroy)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentFile, "sync", failing)
            assert vault.execute(vault.plan_blocks(scope, keys(1))).waiting_segments == 1
        assert source.exists()
        assert not before
        monkeypatch.setattr(SegmentFile, "sync", noting)
        vault.reconcile()
        copies = {segment_of(vault, scope, one) for one in keys(4)[1:]}
        names = {segment_name(one) for one in copies if one is not None}
        assert names
        assert [names <= each for each in before] == [True]
        assert not Path(source).exists()
        assert_hits(vault, scope, keys(4)[1:])


def test_all_of_a_segment_needs_no_copy(vault: Vault, scope: Scope) -> None:
    put(vault, scope, keys(4))
    plan = vault.plan_blocks(scope, keys(4))
    assert vault.execute(plan).blocks == 4
    assert_missing(vault, scope, keys(4))


def test_of_others_and_of_what_is_not_there_nothing(vault: Vault, scope: Scope) -> None:
    put(vault, scope, keys(4))
    bob = vault.scope("bob", namespace())
    put(vault, bob, keys(4), "bob")
    assert vault.execute(vault.plan_blocks(scope, keys(3, 100))).blocks == 0
    assert vault.execute(vault.plan_blocks(bob, keys(1))).blocks == 1
    assert_hits(vault, scope, keys(4))
    assert_missing(vault, bob, keys(1))
    assert_hits(vault, bob, keys(4)[1:], "bob")


def test_damaged_blocks_are_not_carried_along(home: Home) -> None:
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(4))
    [file] = home.segment_files()
    body = bytearray(file.read_bytes())
    body[3 * len(body) // 4 + 7] ^= 1
    file.write_bytes(body)
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        vault.execute(vault.plan_blocks(scope, keys(1)))
        outcomes, _ = get(vault, scope, keys(4))
        assert outcomes == [Outcome.MISS, Outcome.HIT, Outcome.HIT, Outcome.MISS]


@pytest.mark.parametrize("step", range(6))
def test_stopped_at_any_step_nothing_that_stays_is_lost(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Every write to the catalog fails from the given one on; then the vault is opened anew."""
    from kvvault.catalog.catalog import Catalog

    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(8))
        plan = vault.plan_blocks(scope, keys(1))
        assert segment_of(vault, scope, keys(1)[0]) is not None
        left = [step]
        real = Catalog.submit

        def submit(catalog: Catalog, *args: object, **named: object) -> object:
            if left[0] <= 0:
                raise StorageError("no more", hint="a test")
            left[0] -= 1
            return real(catalog, *args, **named)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "submit", submit)
            try:
                vault.execute(plan)
                done = True
            except KvvaultError:
                done = False
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        assert_hits(vault, scope, keys(8)[1:])
        if done:
            assert_missing(vault, scope, keys(1))
        was_there = vault.contains(scope, keys(1))
        vault.reconcile()
        assert vault.contains(scope, keys(1)) == was_there
        assert_hits(vault, scope, keys(8)[1:])
        assert not vault.catalog.read(revoking.revoked_slots)
        assert vault.verify().ok
