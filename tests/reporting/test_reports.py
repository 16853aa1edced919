"""What the reports say of a real vault, and that it changes when the vault does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvvault.catalog import schema as t
from kvvault.cli import app
from kvvault.errors import CatalogError, ClosedError, UsageError
from kvvault.lifecycle.jobs import Job, JobContext
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.lifecycle.runs import run_job
from kvvault.model import SystemClock
from kvvault.policy import shipped
from kvvault.promptfacts import Condition
from kvvault.reporting import disposals, encryption, processing, retention, subject
from kvvault.reporting.document import Report, Value
from kvvault.reporting.rendering import Format, render
from kvvault.reporting.sources import Source
from kvvault.upkeep import jobs_of
from kvvault.vault import Vault
from tests.core.support import SMALL, keys, namespace, sqlite
from tests.core.test_prompt_erasing import send
from tests.reporting.conftest import BEGAN, HOUR, NORTH, POLICY, SOUTH, Audited

Row = Mapping[str, Value]


def value(report: Report, name: str) -> Value:
    return report.answer(name).value


def table(report: Report, name: str) -> list[Row]:
    (found,) = [one for one in report.tables if one.name == name]
    names = [column.name for column in found.columns]
    return [dict(zip(names, row, strict=True)) for row in found.rows]


def run(audited: Audited, name: str, work: Any = None) -> None:
    """Run a job as the scheduler does, with other work if need be."""
    lease = Lease(audited.vault.catalog, audited.clock, BootClock("boot"))
    assert lease.acquire()
    job = next(job for job in jobs_of(audited.vault) if job.name == name)
    if work is not None:
        job = Job(job.name, job.interval_s, work)
    run_job(audited.vault.catalog, lease, job, audited.clock, lambda: True)
    lease.release()


class TestRetention:
    def test_a_vault_that_keeps_its_periods(self, audited: Audited) -> None:
        audited.clock.advance(HOUR / 2)
        report = retention.report(audited.source())
        assert value(report, "overdue_segments") == value(report, "overdue_purges") == 0
        assert value(report, "policy") == "audited"
        assert value(report, "policy_digest") == POLICY.digest.hex()
        assert value(report, "oldest_age") == HOUR / 2
        ages = {(row["tenant"], row["class"]): row for row in table(report, "ages")}
        assert ages[NORTH, "(none)"]["blocks"] == 12
        assert ages[NORTH, "(none)"]["last_deadline_at"] == BEGAN + 12 * HOUR  # unused: idle
        short = ages[SOUTH, "short"]
        assert (short["blocks"], short["oldest_at"], short["oldest_age_s"]) == (4, BEGAN, HOUR / 2)
        assert short["last_deadline_at"] == BEGAN + HOUR
        assert [row["rule"] for row in table(report, "rules")] == ["short", "special", "all"]
        assert table(report, "rules")[1]["kept"] == "never written"
        assert table(report, "rules")[2]["justification"] == "Cases take a day."

    def test_of_one_tenant_the_ages_only(self, audited: Audited) -> None:
        report = retention.report(audited.source(), tenant=SOUTH)
        assert {row["tenant"] for row in table(report, "ages")} == {SOUTH}
        assert value(report, "overdue_segments") == 0

    def test_what_is_past_its_deadline_is_counted_until_it_is_gone(self, audited: Audited) -> None:
        audited.clock.advance(HOUR + 0.5)
        assert value(retention.report(audited.source()), "overdue_segments") == 0  # noticed in 1 s
        audited.clock.advance(30)
        report = retention.report(audited.source())
        assert value(report, "overdue_segments") == 1
        assert value(report, "overdue_by") == 30.5
        assert report.answer("overdue_segments").good is False
        assert not report.good
        audited.vault.expire()
        assert value(retention.report(audited.source()), "overdue_segments") == 0

    def test_what_a_hold_keeps_is_listed_apart(self, audited: Audited) -> None:
        audited.vault.place_hold(reason="trial", actor="counsel", tenant=SOUTH)
        audited.clock.advance(2 * HOUR)
        audited.vault.expire()
        report = retention.report(audited.source())
        assert value(report, "overdue_segments") == 0
        assert value(report, "held_segments") == 1
        (hold,) = table(report, "holds")
        assert (hold["tenant"], hold["reason"], hold["past_deadline"]) == (SOUTH, "trial", 1)
        assert hold["past_deadline_s"] == HOUR
        audited.vault.clear_hold(1, reason="over", actor="counsel")
        report = retention.report(audited.source())
        assert value(report, "held_segments") == 0
        assert table(report, "holds") == []

    def test_a_purge_that_is_late_is_counted_by_deletion(self, audited: Audited) -> None:
        segments = [f.segment_id for f in audited.vault.segments()]
        audited.vault.delete_segments(segments[:1])
        audited.clock.advance(3 * HOUR)
        audited.vault.delete_segments(segments[1:2])
        assert value(retention.report(audited.source()), "overdue_purges") == 0
        audited.clock.advance(3 * HOUR + 1)
        report = retention.report(audited.source())
        assert value(report, "overdue_purges") == 1
        assert report.answer("overdue_purges").good is False
        audited.clock.advance(3 * HOUR)
        assert value(retention.report(audited.source()), "overdue_purges") == 2
        audited.vault.purge()
        assert value(retention.report(audited.source()), "overdue_purges") == 0

    def test_a_clock_that_jumped_is_said_and_makes_nothing_overdue(self, audited: Audited) -> None:
        assert value(retention.report(audited.source()), "unclear_segments") == 0
        live = sum(facts.state.live for facts in audited.vault.segments())
        audited.clock.set_wall(BEGAN + 400 * 24 * HOUR)
        report = retention.report(audited.source())
        assert value(report, "overdue_segments") == value(report, "overdue_by") == 0
        # Nor is it said that all is well: nobody knows.
        assert value(report, "unclear_segments") == live > 0
        assert report.answer("unclear_segments").good is False
        assert value(report, "clock_plausible") is False
        assert not report.good

    def test_every_policy_there_was_with_its_dates(self, audited: Audited) -> None:
        audited.clock.advance(HOUR / 4)
        audited.vault.apply_policy(shipped.load("gdpr-30d"), actor="dpo")
        report = retention.report(audited.source())
        first, second = table(report, "policies")
        assert (first["name"], first["from_at"], first["until_at"], first["applied_by"]) == (
            "audited",
            BEGAN,
            BEGAN + HOUR / 4,
            "kvvault",
        )
        assert (second["name"], second["until_at"], second["applied_by"]) == (
            "gdpr-30d",
            None,
            "dpo",
        )
        assert first["owners"] == "desk; officer"
        assert value(report, "policy_applied_by") == "dpo"

    def test_jobs_and_what_became_of_their_runs(self, audited: Audited) -> None:
        def fail(_context: JobContext) -> str:
            raise ClosedError("it did not work", hint="none")

        run(audited, "expire")
        run(audited, "scrub", fail)
        audited.clock.advance(60)
        run(audited, "scrub")
        report = retention.report(audited.source())
        jobs = {row["job"]: row for row in table(report, "jobs")}
        assert value(report, "failed_runs") == jobs["scrub"]["failed"] == 1
        assert (jobs["scrub"]["runs"], jobs["scrub"]["outcome"]) == (2, "ok")
        assert jobs["expire"]["last_success_at"] == BEGAN
        assert jobs["purge"]["outcome"] == "never ran"
        later = retention.report(audited.source(since=BEGAN + 30))
        assert value(later, "failed_runs") == 0
        audited.clock.advance(24 * HOUR)
        report = retention.report(audited.source())
        assert value(report, "jobs_overdue") == 6
        assert not report.good


class TestDisposals:
    def test_every_deletion_with_its_times(self, audited: Audited) -> None:
        vault = audited.vault
        audited.clock.advance(HOUR)
        run(audited, "expire")
        audited.clock.advance(60)
        first = next(f.segment_id for f in vault.segments() if f.state.live)
        vault.execute(vault.plan_segments([first]), actor="alice", reason="=asked")
        audited.clock.advance(60)
        purge = vault.purge()
        audited.clock.advance(60)
        vault.forget(NORTH)
        report = disposals.report(audited.source())
        assert value(report, "deletions") == 3
        assert [value(report, f"deletions_{name}") for name in ("expire", "rm", "forget")] == [
            1
        ] * 3
        assert (value(report, "unrecoverable"), value(report, "logical")) == (2, 0)
        assert value(report, "waiting") == value(report, "waiting_in_all") == 1
        expired, removed, forgotten = table(report, "deletions")
        assert (expired["trigger"], expired["blocks"]) == ("expire", 4)
        assert (removed["actor"], removed["reason"]) == ("alice", "=asked")
        assert removed["revoked_at"] == BEGAN + HOUR + 60
        assert removed["destroyed_at"] == purge.destroyed_at
        assert removed["verified_at"] == purge.verified_at
        assert removed["state"] == "purged"
        assert (forgotten["state"], forgotten["verified_at"]) == ("revoked", None)
        (row,) = table(report, "purges")
        assert (row["old_epoch"], row["state"]) == (purge.old_epoch, "finished")
        assert report.good
        # No tenant is named: a deletion does not know whose it was.
        assert NORTH not in render(report, Format.JSON)

    def test_a_purge_of_a_key_file_makes_nothing_unrecoverable(self, tmp_path: Path) -> None:
        with Vault.create(
            tmp_path / "vault", provider=f"file:{tmp_path / 'key'}", options=SMALL
        ) as vault:
            scope = vault.scope(NORTH, namespace())
            send(vault, scope, [1], "jane")
            send(vault, scope, [2], "john")
            plan = vault.plan_erasure([of("jane")], tenant=NORTH)
            vault.erase(plan, actor="dpo", reason="art. 17")
            purge = vault.purge()
            report = disposals.report(Source(vault, SystemClock()))
        names = ("deletions", "deletions_proper", "deletions_compact", "purged")
        assert [value(report, name) for name in names] == [2, 1, 1, 2]
        assert (value(report, "unrecoverable"), value(report, "logical")) == (0, 2)
        assert (purge.deletions, purge.technical) == (2, 1)
        assert "technical" in report.answer("deletions_compact").what
        text = render(report, Format.MARKDOWN)
        assert "blocks in them" not in text

    def test_a_period_is_half_open(self, audited: Audited) -> None:
        segments = [f.segment_id for f in audited.vault.segments()]
        for n in range(3):
            audited.vault.delete_segments(segments[n : n + 1])
            audited.clock.advance(100)
        report = disposals.report(audited.source(since=BEGAN + 100, until=BEGAN + 200))
        assert [row["number"] for row in table(report, "deletions")] == [2]
        assert value(report, "waiting_in_all") == 3
        assert (report.since, report.until) == (BEGAN + 100, BEGAN + 200)
        nothing = disposals.report(audited.source(since=BEGAN + 1000))
        assert value(nothing, "deletions") == 0
        assert table(nothing, "deletions") == []

    def test_failures_and_their_retries(self, audited: Audited) -> None:
        def fail(_context: JobContext) -> str:
            raise ClosedError("the disk was away", hint="none")

        run(audited, "expire", fail)
        report = disposals.report(audited.source())
        (failure,) = table(report, "failures")
        assert (failure["job"], failure["outcome"]) == ("expire", "failed")
        assert "the disk was away" in str(failure["detail"])
        assert failure["succeeded_at"] is None
        assert (value(report, "unretried"), report.good) == (1, False)
        audited.clock.advance(60)
        run(audited, "expire")
        report = disposals.report(audited.source())
        assert table(report, "failures")[0]["succeeded_at"] == BEGAN + 60
        assert (value(report, "unretried"), report.good) == (0, True)

    def test_receipts_stand_beside_their_deletions(self, audited: Audited) -> None:
        vault = audited.vault
        audited.clock.advance(HOUR)
        vault.expire()  # goes by itself: its receipt comes with the purge, for all of that kind
        first = next(f.segment_id for f in vault.segments() if f.state.live)
        vault.delete_segments([first])
        expired, removed = table(disposals.report(audited.source()), "deletions")
        assert expired["receipts"] is None
        assert str(removed["receipts"]).startswith("revoked ")
        vault.purge()
        report = disposals.report(audited.source())
        assert str(table(report, "deletions")[1]["receipts"]).count("purged ") == 1
        assert value(report, "receipts") == 2
        assert value(report, "summaries") == 1


class TestEncryption:
    def test_keys_bytes_and_periods(self, audited: Audited) -> None:
        vault = audited.vault
        report = encryption.report(audited.source())
        assert value(report, "live_bytes") == vault.stats().data_bytes == 20 * 4096
        assert value(report, "keys_open") is True
        assert (value(report, "rotations"), value(report, "last_purge_verified_at")) == (0, None)
        by_tenant = {row["tenant"]: row["bytes"] for row in table(report, "tenant_keys")}
        assert by_tenant == {NORTH: 12 * 4096, SOUTH: 8 * 4096}
        audited.clock.advance(HOUR / 2)
        purge = vault.purge()
        audited.clock.advance(60)
        report = encryption.report(audited.source())
        assert value(report, "root_age") == value(report, "tenant_key_age") == 60
        assert (value(report, "rotations"), value(report, "destructions")) == (1, 1)
        assert value(report, "last_purge_verified_at") == purge.verified_at
        (root,) = table(report, "roots")
        assert (root["epoch"], root["in_force"]) == (purge.new_epoch, True)
        assert root["bytes"] == 20 * 4096
        assert {row["number"] for row in table(report, "tenant_keys")} == {2}
        events = {row["event"]: row["count"] for row in table(report, "events")}
        assert (events["tenant-key-made"], events["root-key-destroyed"]) == (2, 1)
        assert (events["signing-key-made"], events["damage-found"]) == (1, 0)
        assert value(report, "assurance") == vault.provider_info().assurance.value
        only = encryption.report(audited.source(), tenant=SOUTH)
        assert [row["tenant"] for row in table(only, "tenant_keys")] == [SOUTH]

    def test_the_register_names_every_root_key_and_what_it_is_for(self, audited: Audited) -> None:
        current = audited.vault.root_epochs()
        stray = audited.vault._provider.create_epoch()
        report = encryption.report(audited.source())
        use = {row["key"]: row["use"] for row in table(report, "key_copies")}
        assert "in force" in str(use[f"root key {current[0]}"])
        assert "not of this vault's rows" in str(use[f"root key {stray}"])

    def test_what_does_not_open_is_said(self, audited: Audited) -> None:
        assert encryption.report(audited.source()).answer("keys_open").good
        audited.vault.catalog.write(
            lambda c: c.execute(t.segments.update().values(commitment=bytes(32))).rowcount
        )
        report = encryption.report(audited.source())
        assert report.answer("keys_open").good is False
        assert not report.good

    def test_scrubs_and_what_they_found(self, audited: Audited) -> None:
        assert value(encryption.report(audited.source()), "last_scrub") is None
        run(audited, "scrub")
        report = encryption.report(audited.source())
        assert value(report, "scrubs") == 1
        # Which segments are due when is random.
        said = str(value(report, "last_scrub"))
        assert ("nothing was checked" in said) is not ("all authentic" in said)
        audited.clock.advance(8 * 24 * HOUR)
        audited.vault.accept_clock()
        run(audited, "scrub")
        report = encryption.report(audited.source())
        assert "20 blocks in" in str(value(report, "last_scrub"))
        assert "all authentic" in str(value(report, "last_scrub"))
        path = next((audited.vault.path / "segments").iterdir())
        path.write_bytes(bytes(path.stat().st_size))
        audited.clock.advance(8 * 24 * HOUR)
        audited.vault.accept_clock()
        run(audited, "scrub")
        report = encryption.report(audited.source())
        assert value(report, "damage_found") == 1
        assert report.answer("damage_found").good is False
        assert value(encryption.report(audited.source(until=BEGAN + HOUR)), "damage_found") == 0
        assert value(report, "scrubs_failed") == 1
        assert report.answer("scrubs_failed").good is False
        assert table(report, "scrubs")[-1]["outcome"] == "failed"


class TestRecordOfProcessing:
    def test_every_rule_is_an_activity_with_owner_and_purpose(self, audited: Audited) -> None:
        report = processing.report(audited.source())
        short, special, rest = table(report, "activities")
        assert (short["class"], short["owner"], short["purpose"]) == (
            "short",
            "desk",
            "Asked for it.",
        )
        assert short["bytes"] == 4 * 4096
        assert (special["stored"], special["time_limit"]) == (False, "never written")
        assert special["applies_to"] == "label data special"
        assert rest["bytes"] == 16 * 4096
        assert "fingerprint" in str(rest["recorded"])
        assert special["recorded"] == "nothing: never written"
        assert value(report, "owners") == "desk; officer"
        assert value(report, "tenants") == 2
        # What a vault cannot know is not made up.
        assert "to be filled in" in str(value(report, "controller"))

    def test_no_personal_data_that_is_there_is_denied(self, audited: Audited) -> None:
        """`record` governs fingerprint and preview; the rest is written down of every request."""
        scope = audited.vault.scope(NORTH, namespace(), retention_class="short")
        send(audited.vault, scope, [7], subject="jane roe")
        assert [one.subject for one in audited.vault.prompts.listing()[0]] == ["jane roe"]
        report = processing.report(audited.source())
        said = [str(value(report, "categories")), str(table(report, "activities")[0]["recorded"])]
        said += [str(table(retention.report(audited.source()), "rules")[0]["recorded"])]
        for text in said:
            for what in ("tenant", "subject", "labels", "tokens", "first and last use"):
                assert what in text
            assert "nothing" not in text
        assert "no fingerprint and no preview" in said[1]

    def test_it_follows_the_policy(self, audited: Audited) -> None:
        audited.vault.apply_policy(shipped.load("gdpr-30d"), actor="dpo")
        report = processing.report(audited.source())
        names = [row["rule"] for row in table(report, "activities")]
        assert names == [rule.name for rule in shipped.load("gdpr-30d").rules]
        assert "data protection officer" in str(value(report, "owners"))


# -- a subject -----------------------------------------------------------------------------------


def keyed(vault: Vault, tenant: str, name: str) -> str:
    found = vault.tenant_keys(tenant)
    assert found is not None
    return found.keyed_id("log", b"subject" + found.keyed_id("subject", name.encode())).hex()


def sent(audited: Audited, tenant: str, turns: list[int], name: str | None) -> None:
    """A request of a subject is stored, and recorded."""
    send(audited.vault, audited.vault.scope(tenant, namespace()), turns, name)


def erase(audited: Audited, condition: Condition, tenant: str = NORTH) -> None:
    plan = audited.vault.plan_erasure([condition], tenant=tenant)
    audited.vault.erase(plan, actor="dpo", reason="art. 17")


def of(name: str) -> Condition:
    return Condition("subject", "=", name)


class TestSubject:
    def report(self, audited: Audited, name: str, tenant: str = NORTH) -> Report:
        return subject.report(audited.source(), tenant=tenant, subject=name)

    def test_prompts_that_persist(self, audited: Audited) -> None:
        sent(audited, NORTH, [1, 2, 3], "patient 7")
        audited.clock.advance(60)
        sent(audited, NORTH, [1, 2, 4, 5], "patient 7")
        sent(audited, NORTH, [1, 2, 6], "patient 8")
        sent(audited, SOUTH, [1], "patient 7")
        report = self.report(audited, "patient 7")
        assert value(report, "prompts") == 2
        assert value(report, "last_used_at") == BEGAN + 60
        first, second = table(report, "prompts")
        assert (first["first_used_at"], first["bytes"]) == (BEGAN, 3 * 4096)
        assert (second["bytes"], second["shared_bytes"]) == (4 * 4096, 2 * 4096)
        assert second["request"] == "request [1, 2, 4, 5]"
        assert first["rules"] == "all"
        assert value(report, "alone_bytes") == 3 * 4096
        assert value(report, "last_deadline_at") == BEGAN + 60 + 12 * HOUR
        assert value(self.report(audited, "patient 9"), "prompts") == 0
        assert value(self.report(audited, "patient 7", SOUTH), "prompts") == 1

    def test_what_one_persons_prompts_share_is_that_persons(self, audited: Audited) -> None:
        """A conversation: every prompt begins with the one before it. Nobody else has any of it,
        until somebody does."""
        sent(audited, NORTH, [1, 2, 3], "patient 7")
        sent(audited, NORTH, [1, 2, 3, 4], "patient 7")
        report = self.report(audited, "patient 7")
        assert value(report, "alone_bytes") == 4 * 4096
        assert value(report, "shared_bytes") == 0
        assert [row["shared_bytes"] for row in table(report, "prompts")] == [3 * 4096] * 2
        sent(audited, NORTH, [1, 2, 9], "patient 8")
        sent(audited, NORTH, [1, 8], None)  # nobody said whose
        sent(audited, SOUTH, [1, 2, 3, 4], "patient 7")  # another tenant's shares nothing
        report = self.report(audited, "patient 7")
        assert value(report, "alone_bytes") == 2 * 4096
        assert value(report, "shared_bytes") == 2 * 4096
        plan = audited.vault.plan_erasure([of("patient 7")], tenant=NORTH)
        assert (plan.data_bytes, plan.shared_bytes) == (2 * 4096, 2 * 4096)
        gone = self.report(audited, "patient 9")
        assert value(gone, "alone_bytes") == value(gone, "shared_bytes") == 0

    def test_an_erasure_end_to_end(self, audited: Audited) -> None:
        sent(audited, NORTH, [1, 2, 3, 4], "patient 7")
        sent(audited, NORTH, [1, 2, 5], "patient 8")
        before = self.report(audited, "patient 7")
        assert value(before, "erasures") == value(before, "receipts") == 0
        audited.clock.advance(60)
        erase(audited, of("patient 7"))
        report = self.report(audited, "patient 7")
        assert value(report, "prompts") == 0
        assert (value(report, "erasures"), value(report, "waiting")) == (1, 1)
        (deletion,) = table(report, "deletions")
        assert (deletion["trigger"], deletion["state"]) == ("erase", "revoked")
        assert (deletion["revoked_at"], deletion["blocks"]) == (BEGAN + 60, 2)
        (first,) = table(report, "receipts")
        assert (first["phase"], first["prompts"]) == ("revoked", 1)
        assert (first["kept_shared_blocks"], first["kept_shared_prompts"]) == (2, 1)
        (act,) = table(report, "acts")
        assert act["kind"] == "deletion"
        assert "trigger erase" in str(act["facts"])

        audited.clock.advance(60)
        purge = audited.vault.purge()
        report = self.report(audited, "patient 7")
        (deletion,) = table(report, "deletions")
        assert (deletion["state"], deletion["verified_at"]) == ("purged", purge.verified_at)
        assert str(deletion["receipts"]).count(";") == 1
        assert [row["phase"] for row in table(report, "receipts")] == ["revoked", "purged"]
        assert value(report, "waiting") == 0
        # Of the other there is nothing but that it was asked about.
        other = self.report(audited, "patient 8")
        assert value(other, "prompts") == 1
        assert value(other, "acts") == value(other, "receipts") == value(other, "erasures") == 0

    def test_an_erasure_of_several_concerns_each(self, audited: Audited) -> None:
        for n, name in enumerate(("patient 7", "patient 8", None)):
            sent(audited, NORTH, [n, n], name)
        sent(audited, SOUTH, [9], "patient 9")
        audited.clock.advance(60)
        erase(audited, Condition("age", ">", 30.0))
        for name in ("patient 7", "patient 8"):
            report = self.report(audited, name)
            assert (value(report, "erasures"), value(report, "receipts")) == (1, 1)
        assert value(self.report(audited, "patient 9", SOUTH), "erasures") == 0

    def test_what_holds_keep_and_why(self, audited: Audited) -> None:
        vault = audited.vault
        sent(audited, NORTH, [1, 2], "patient 7")
        sent(audited, NORTH, [3, 4], "patient 8")
        assert value(self.report(audited, "patient 7"), "holds") == 0
        vault.place_hold(reason="trial", actor="counsel", tenant=NORTH, subject="patient 7")
        report = self.report(audited, "patient 7")
        (hold,) = table(report, "holds")
        assert (hold["kind"], hold["reason"], hold["actor"]) == ("subject", "trial", "counsel")
        assert table(report, "prompts")[0]["holds"] == "1"
        erase(audited, Condition("age", ">=", 0.0))
        assert value(self.report(audited, "patient 7"), "prompts") == 1
        report = self.report(audited, "patient 8")
        assert value(report, "prompts") == value(report, "holds") == 0
        assert table(report, "receipts")[0]["kept_held_prompts"] == 1
        vault.place_hold(reason="audit", actor="counsel", tenant=NORTH)
        assert value(self.report(audited, "patient 8"), "holds") == 1

    def test_req_t5_a4_asking_is_written_down_with_keyed_ids_only(self, audited: Audited) -> None:
        vault = audited.vault
        self.report(audited, "patient 7")
        report = self.report(audited, "patient 7")
        assert value(report, "questions") == 2
        assert value(report, "acts") == 0
        entries = vault.catalog.read(
            lambda c: c.execute(t.log_entries.select().order_by(t.log_entries.c.entry_no)).all()
        )
        bodies = [json.loads(entry.body) for entry in entries]
        asked = [body for body in bodies if body["kind"] == "question"]
        assert [body["command"] for body in asked] == ["report subject"] * 2
        assert asked[0]["subject"] == keyed(vault, NORTH, "patient 7")
        everything = "".join(entry.body for entry in entries)
        known = vault.tenant_keys(NORTH)
        assert known is not None
        for secret in ("patient", NORTH, known.tenant_id.hex()):
            assert secret not in everything
        assert known.keyed_id("subject", b"patient 7").hex() not in everything

    def test_a_tenant_that_is_forgotten_cannot_be_asked_for(self, audited: Audited) -> None:
        sent(audited, NORTH, [1, 2], "patient 7")
        assert value(self.report(audited, "patient 7"), "prompts") == 1
        audited.vault.forget(NORTH)
        with pytest.raises(UsageError, match="no such tenant"):
            self.report(audited, "patient 7")

    def test_a_question_that_cannot_be_written_down_is_not_answered(self, audited: Audited) -> None:
        assert self.report(audited, "patient 7").good
        refuse = (
            "CREATE TRIGGER refuse BEFORE INSERT ON log_entries BEGIN SELECT RAISE(ABORT, ''); "
        )
        path = audited.vault.path / "catalog.sqlite3"
        with closing(sqlite.connect(str(path))) as connection:
            connection.execute(refuse + "END")
        with pytest.raises(CatalogError):
            self.report(audited, "patient 7")
        with closing(sqlite.connect(str(path))) as connection:
            connection.execute("DROP TRIGGER refuse")

    def test_who_only_reads_may_ask_too(self, audited: Audited) -> None:
        sent(audited, NORTH, [1, 2], "patient 7")
        with Vault.open(
            audited.vault.path,
            provider=audited.vault._provider,
            clock=audited.clock,
            read_only=True,
        ) as looking:
            source = Source(looking, audited.clock)
            report = subject.report(source, tenant=NORTH, subject="patient 7")
            assert (value(report, "prompts"), value(report, "questions")) == (1, 1)
            report = subject.report(source, tenant=NORTH, subject="patient 7")
            assert value(report, "questions") == 2


# -- all of them ---------------------------------------------------------------------------------


def all_reports(audited: Audited) -> list[Report]:
    source = audited.source()
    return [
        retention.report(source),
        disposals.report(source),
        encryption.report(source),
        processing.report(source),
        subject.report(source, tenant=NORTH, subject="patient 7"),
    ]


def test_every_command_that_a_report_names_exists(audited: Audited) -> None:
    audited.vault.delete_segments([audited.vault.segments()[0].segment_id])
    root: Any = typer.main.get_command(app)
    named = {answer.command for made in all_reports(audited) for answer in made.answers}
    named |= {one.command for made in all_reports(audited) for one in made.tables}
    assert "" in named  # what nothing else shows points nowhere, above all not to the report itself
    for command in named - {""}:
        assert "report" not in command or command == "kvvault report encryption"
        program, *words = command.split()
        assert program == "kvvault"
        node = root
        while words and words[0] in getattr(node, "commands", {}):
            node = node.commands[words.pop(0)]
        assert node is not root, command
        options = {option for one in node.params for option in one.opts}
        assert all(word in options for word in words if word.startswith("--")), command


def test_names_of_answers_and_columns_are_unique(audited: Audited) -> None:
    for made in all_reports(audited):
        names = [answer.name for answer in made.answers]
        assert len(names) == len(set(names))
        for one in made.tables:
            columns = [column.name for column in one.columns]
            assert len(columns) == len(set(columns))


@pytest.mark.parametrize("form", Format)
def test_req_t6_no_report_has_a_key_or_a_block_in_it(audited: Audited, form: Format) -> None:
    secrets = [key.hex() for key in keys(12)]
    known = audited.vault.tenant_keys(NORTH)
    assert known is not None
    secrets += [known._tenant_key.hex(), known._index_key.hex()]
    for made in all_reports(audited):
        text = render(made, form)
        assert not [secret for secret in secrets if secret in text]
