"""What the reports say of a real vault, and that it changes when the vault does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import typer.main
from sqlalchemy import insert

from kvvault.catalog import log
from kvvault.catalog import schema as t
from kvvault.cli import app
from kvvault.errors import ClosedError, UsageError
from kvvault.lifecycle.jobs import Job, JobContext
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.lifecycle.runs import run_job
from kvvault.policy import shipped
from kvvault.reporting import disposals, encryption, processing, retention, subject
from kvvault.reporting.document import Report, Value
from kvvault.reporting.rendering import Format, render
from kvvault.reporting.sources import Source
from kvvault.upkeep import jobs_of
from kvvault.vault import Vault
from tests.core.support import keys, namespace
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
        audited.clock.set_wall(BEGAN + 400 * 24 * HOUR)
        report = retention.report(audited.source())
        assert value(report, "overdue_segments") == 0
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
        first = vault.segments()[0].segment_id
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
        assert value(report, "unrecoverable") == 2
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
        segments = [f.segment_id for f in vault.segments()]
        vault.delete_segments(segments[:1])
        vault.delete_segments(segments[1:2])
        add_receipt(vault, b"\x01" * 16, 2, "revoked", "{}")
        report = disposals.report(audited.source())
        assert [row["receipts"] for row in table(report, "deletions")] == [
            None,
            f"revoked {'01' * 16}",
        ]
        assert value(report, "receipts") == 1


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
        assert "all authentic" in str(value(report, "last_scrub"))
        path = next((audited.vault.path / "segments").iterdir())
        path.write_bytes(bytes(path.stat().st_size))
        audited.clock.advance(8 * 24 * HOUR)
        audited.vault.accept_clock()
        run(audited, "scrub")
        report = encryption.report(audited.source())
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
        assert value(report, "owners") == "desk; officer"
        assert value(report, "tenants") == 2
        # What a vault cannot know is not made up.
        assert "to be filled in" in str(value(report, "controller"))

    def test_it_follows_the_policy(self, audited: Audited) -> None:
        audited.vault.apply_policy(shipped.load("gdpr-30d"), actor="dpo")
        report = processing.report(audited.source())
        names = [row["rule"] for row in table(report, "activities")]
        assert names == [rule.name for rule in shipped.load("gdpr-30d").rules]
        assert "data protection officer" in str(value(report, "owners"))


# -- a subject -----------------------------------------------------------------------------------


def add_receipt(
    vault: Vault, receipt_id: bytes, deletion_no: int, phase: str, document: str, entry: int = 0
) -> None:
    values = {
        "receipt_id": receipt_id,
        "deletion_no": deletion_no,
        "phase": phase,
        "entry_no": entry,
        "document": document,
    }
    vault.catalog.write(lambda c: c.execute(insert(t.receipts).values(values)).rowcount)


def text_id_of(vault: Vault, tenant: str, name: str) -> bytes:
    found = vault.tenant_keys(tenant)
    assert found is not None
    return found.keyed_id("subject", name.encode())


def keyed(vault: Vault, tenant: str, name: str) -> str:
    found = vault.tenant_keys(tenant)
    assert found is not None
    return found.keyed_id("log", b"subject" + text_id_of(vault, tenant, name)).hex()


def add_prompts(vault: Vault, tenant: str, name: str, ids: list[bytes]) -> list[int]:
    """Prompts of a subject, the first of which the others share; their numbers."""
    known = vault.tenant_keys(tenant)
    assert known is not None
    sealed = known.seal_text("subject", name)
    text_id, digest = text_id_of(vault, tenant, name), namespace().digest

    def write(connection: Any) -> list[int]:
        scope = connection.execute(
            insert(t.scopes)
            .prefix_with("OR REPLACE")
            .values(tenant_id=known.tenant_id, namespace=digest)
            .returning(t.scopes.c.scope_no)
        ).scalar_one()
        text = connection.execute(
            insert(t.texts)
            .values(tenant_id=known.tenant_id, kind="subject", text_id=text_id, sealed=sealed)
            .returning(t.texts.c.text_no)
        ).scalar_one()
        numbers = [
            int(
                connection.execute(
                    insert(t.prompts)
                    .values(
                        prompt_id=prompt_id,
                        scope_no=scope,
                        subject_no=text,
                        first_used=BEGAN,
                        last_used=BEGAN + n,
                        end_token=100 * n,
                    )
                    .returning(t.prompts.c.prompt_no)
                ).scalar_one()
            )
            for n, prompt_id in enumerate(ids)
        ]
        for number in numbers[1:]:
            connection.execute(
                insert(t.prompt_links).values(prompt_no=number, via_no=numbers[0], upto=50)
            )
        return numbers

    return vault.catalog.write(write)


class TestSubject:
    def report(self, audited: Audited, name: str, tenant: str = NORTH) -> Report:
        return subject.report(audited.source(), tenant=tenant, subject=name)

    def test_prompts_that_persist(self, audited: Audited) -> None:
        vault = audited.vault
        ids = [bytes([n]) * 8 for n in range(1, 4)]
        numbers = add_prompts(vault, NORTH, "patient 7", ids)
        add_prompts(vault, SOUTH, "patient 7", [b"\x77" * 8])
        vault.catalog.write(
            lambda c: (
                c.execute(
                    t.prompts.update().where(t.prompts.c.prompt_no == numbers[2]).values(gone=1)
                ).rowcount
            )
        )
        report = self.report(audited, "patient 7")
        assert value(report, "prompts") == 2
        assert value(report, "last_used_at") == BEGAN + 1
        first, second = table(report, "prompts")
        assert (first["prompt"], first["shared_by"], first["shares_with"]) == ("01" * 8, 2, 0)
        assert (second["tokens"], second["shares_with"]) == (100, 1)
        assert value(self.report(audited, "patient 8"), "prompts") == 0
        assert value(self.report(audited, "patient 7", SOUTH), "prompts") == 1

    def test_an_erasure_end_to_end(self, audited: Audited) -> None:
        vault = audited.vault
        mine, other = keyed(vault, NORTH, "patient 7"), keyed(vault, NORTH, "patient 8")
        segments = [f.segment_id for f in vault.segments()]
        for n, name in enumerate((mine, other)):
            vault.delete_segments(segments[n : n + 1])
            facts: dict[str, log.Fact] = {
                "subject": name,
                "prompts": 3,
                "kept_blocks": 2,
                "kept": "shared",
            }
            vault.catalog.write(partial(log.append, kind="erase", at=BEGAN + n, facts=facts))
            add_receipt(
                vault, bytes([n]) * 16, n + 1, "revoked", json.dumps({"subject": name}), entry=n
            )
        vault.catalog.write(
            lambda c: c.execute(t.deletions.update().values(trigger="erase")).rowcount
        )
        purge = vault.purge()
        add_receipt(vault, b"\x09" * 16, 1, "purged", "{}", entry=9)
        report = self.report(audited, "patient 7")
        assert value(report, "keyed_id") == mine
        (act,) = [row for row in table(report, "acts") if row["kind"] == "erase"]
        assert (act["entry"], act["at"]) == (0, BEGAN)
        assert "kept shared; kept_blocks 2; prompts 3" in str(act["facts"])
        (deletion,) = table(report, "deletions")
        assert (deletion["number"], deletion["verified_at"]) == (1, purge.verified_at)
        assert deletion["receipts"] == f"revoked {'00' * 16}; purged {'09' * 16}"
        assert [row["phase"] for row in table(report, "receipts")] == ["revoked", "purged"]
        assert (value(report, "erasures"), value(report, "waiting")) == (1, 0)
        nothing = self.report(audited, "patient 9")
        assert value(nothing, "acts") == value(nothing, "receipts") == 0

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
        assert [body["kind"] for body in bodies] == ["question"] * 2
        assert bodies[0]["subject"] == keyed(vault, NORTH, "patient 7")
        everything = "".join(entry.body for entry in entries)
        known = vault.tenant_keys(NORTH)
        assert known is not None
        for secret in ("patient", NORTH, known.tenant_id.hex()):
            assert secret not in everything
        assert text_id_of(vault, NORTH, "patient 7").hex() not in everything

    def test_a_tenant_that_is_forgotten_cannot_be_asked_for(self, audited: Audited) -> None:
        add_prompts(audited.vault, NORTH, "patient 7", [b"\x01" * 8])
        assert value(self.report(audited, "patient 7"), "prompts") == 1
        audited.vault.forget(NORTH)
        with pytest.raises(UsageError, match="no such tenant"):
            self.report(audited, "patient 7")

    def test_a_question_that_cannot_be_written_down_is_not_answered(self, audited: Audited) -> None:
        with Vault.open(
            audited.vault.path,
            provider=audited.vault._provider,
            clock=audited.clock,
            read_only=True,
        ) as looking:
            source = Source(looking, audited.clock)
            with pytest.raises(ClosedError, match="reading only"):
                subject.report(source, tenant=NORTH, subject="patient 7")


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
    to_come = {"audit", "prompts", "receipt"}
    named = {answer.command for made in all_reports(audited) for answer in made.answers}
    named |= {one.command for made in all_reports(audited) for one in made.tables}
    for command in named:
        program, *words = command.split()
        assert program == "kvvault"
        if words[0] in to_come:
            continue
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
