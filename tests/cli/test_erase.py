"""`kvvault erase`: the plan, the question, what was done, and what the receipt says."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvvault.cli.output import Output
from kvvault.promptfacts import Condition
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, NAMESPACE, TENANTS, finish, run, start

WHY = ("--reason", "art. 17, request 4")


def left(place: Place) -> dict[str | None, int]:
    """Requests that persist, and how many blocks each has."""
    with Vault.open(place.path, provider=place.key, read_only=True) as vault:
        return {one.request_id: one.blocks for one in vault.prompts.listing()[0]}


def test_a_subject(filled: Place, tmp_path: Path) -> None:
    before = left(filled)
    assert before == {"r1": 3, "r2": 4, "r3": 3}
    chosen = ("--tenant", TENANTS[0], "--subject", "joe")
    plan = run("erase", *chosen, *WHY, "--dry-run", *filled.flags)
    assert plan.code == 0
    assert "would erase 1 prompt (2 blocks, 8.0 KiB)" in plan.out
    assert "stays, shared with 1 other prompt: 2 blocks" in plan.out
    assert left(filled) == before
    done = run("erase", *chosen, *WHY, "--yes", "--json", *filled.flags)
    assert done.code == 0
    document = done.document
    assert (document["erased"], document["waiting_segments"]) == (
        {"blocks": 2, "bytes": 2 * BLOCK},
        0,
    )
    assert document["shared"] == {"blocks": 2, "bytes": 2 * BLOCK, "prompts": 1}
    assert left(filled) == {"r1": 3, "r3": 3}
    receipt, key = tmp_path / "receipt.json", tmp_path / "key"
    assert (
        run(
            "receipt", "show", document["receipt"], "--format", "json", "-o", receipt, *filled.flags
        ).code
        == 0
    )
    key.write_text(run("audit", "key", *filled.flags).out)
    assert run("receipt", "verify", receipt, "--key", key).code == 0
    said = json.loads(receipt.read_text())["receipt"]
    assert said["deletion"]["prompts"] == 1
    assert said["kept"]["shared_prompts"] == 1
    assert "joe" not in receipt.read_text()
    again = run("erase", *chosen, *WHY, "--yes", *filled.flags)
    assert (again.code, "no such prompt persists" in again.out) == (0, True)


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        (("--request", "r1"), {"r2", "r3"}),
        (("--label", "team=x"), set()),
        (("--label", "team=y"), {"r1", "r2", "r3"}),
        (("--older-than", "1h"), {"r1", "r2", "r3"}),
        (("--older-than", "0s"), set()),
        (("--tenant", TENANTS[1]), {"r1", "r2"}),
        (("--subject", "jane", "--request", "r2"), {"r1", "r2", "r3"}),
        (("--subject", "jane", "--include-shared"), {"r2", "r3"}),
    ],
)
def test_choices(filled: Place, options: tuple[str, ...], stays: set[str]) -> None:
    assert run("erase", *options, *WHY, "--yes", *filled.flags).code == 0
    found = left(filled)
    assert set(found) == stays
    if "--include-shared" in options:
        assert found["r2"] == 2


def test_a_prompt_by_the_beginning_of_its_id(filled: Place) -> None:
    listed = run("prompts", "ls", "--json", *filled.flags).document["prompts"]
    [ident] = [one["id"] for one in listed if one["request"] == "r3"]
    assert run("erase", "--prompt", ident[:6], *WHY, "--yes", *filled.flags).code == 0
    assert set(left(filled)) == {"r1", "r2"}
    gone = run("erase", "--prompt", ident, *WHY, "--yes", *filled.flags)
    assert gone.code == 2
    gone.assert_two_lines()


def test_what_a_hold_keeps(filled: Place) -> None:
    held = ("--tenant", TENANTS[0], "--subject", "joe")
    assert run("hold", "set", *held, "--reason", "a case", *filled.flags).code == 0
    done = run("erase", "--tenant", TENANTS[0], "--label", "team=x", *WHY, "--yes", *filled.flags)
    assert (done.code, "because a hold keeps it: 1 prompt" in done.out) == (3, True)
    assert set(left(filled)) == {"r2", "r3"}
    nothing = run("erase", *held, *WHY, "--yes", *filled.flags)
    assert nothing.code == 3  # a script must not take it for done
    nothing.assert_two_lines()
    line = ("erase", "--tenant", TENANTS[0], *WHY, "--more-than-half", "--yes")
    assert run(*line, *filled.flags).code == 3
    assert set(left(filled)) == {"r2", "r3"}
    assert run("hold", "clear", "1", "--reason", "over", "--yes", *filled.flags).code == 0
    everything = run("erase", "--tenant", TENANTS[0], *WHY, "--yes", *filled.flags)
    assert (everything.code, "--more-than-half" in everything.err) == (2, True)
    assert run(*line, *filled.flags).code == 0
    assert set(left(filled)) == {"r3"}


def test_what_a_hold_keeps_of_the_shared_part(filled: Place) -> None:
    """`--include-shared` takes nothing from a prompt that is held: said, with the exit code."""
    joe = ("--tenant", TENANTS[0], "--subject", "joe")
    assert run("hold", "set", *joe, "--reason", "a case", *filled.flags).code == 0
    line = ("erase", "--subject", "jane", "--include-shared", *WHY, *filled.flags)
    plan = run(*line, "--dry-run")
    assert "taken from" not in plan.out
    assert "stays, because a hold keeps a prompt that shares it: 2 blocks" in plan.out
    done = run(*line, "--yes", "--json")
    assert done.code == 3
    document = done.document
    assert document["taken"] == {"blocks": 0, "bytes": 0, "prompts": 0}
    assert document["held"] == {"prompts": 0, "segments": 0, "blocks": 2}
    assert left(filled) == {"r2": 4, "r3": 3}
    shown = run("receipt", "show", document["receipt"], *filled.flags).out
    assert "nothing stayed" not in shown
    assert run("hold", "clear", "1", "--reason", "over", "--yes", *filled.flags).code == 0
    again = run("erase", *joe, "--include-shared", *WHY, "--yes", *filled.flags)
    assert (again.code, "stays" in again.out) == (0, False)


def test_from_whom_shared_blocks_are_taken(filled: Place) -> None:
    line = ("erase", "--subject", "jane", "--include-shared", *WHY, "--yes", *filled.flags)
    done = run(*line)
    assert (done.code, "taken from 1 other prompt, too: 2 blocks" in done.out) == (0, True)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--label", "team"),
        ("--older-than", "soon"),
        ("--prompt", "zz"),
        ("--subject", "joe", "--tenant", "nobody"),
        ("--subject", "joe", "--engine", "ftp://127.0.0.1/"),
        ("--subject", "joe", "--engine", "https://a..b"),
        ("--tenant", TENANTS[0], "--more-than-half", "--engine", "https://a..b"),
        ("--text-file", "/nowhere", "--tenant", TENANTS[0]),
        ("--subject", "jo\udcff"),
        ("--request", "jo\udcff"),
        ("--prompt", "jo\udcff"),
        ("--label", "team=x", "--label", "jo\udcff=x"),
        ("--tenant", "jo\udcff"),
        ("--subject", "joe", "--tenant", "jo\udcff"),
        ("--subject", "joe", "--actor", "jo\udcff"),
    ],
)
def test_bad_input(filled: Place, options: tuple[str, ...]) -> None:
    before = left(filled)
    result = run("erase", *options, *WHY, "--yes", *filled.flags)
    assert result.code == 2
    result.assert_two_lines()
    assert left(filled) == before


@pytest.mark.parametrize(
    "line",
    [
        ("prompts", "ls", "--subject", "jo\udcff"),
        ("prompts", "ls", "--tenant", "jo\udcff"),
        ("prompts", "show", "jo\udcff"),
        ("hold", "set", "--tenant", "jo\udcff", "--reason", "a case"),
        ("hold", "set", "--tenant", TENANTS[0], "--subject", "jo\udcff", "--reason", "a case"),
        ("forget", "jo\udcff", "--reason", "left", "--yes"),
    ],
)
def test_what_is_no_text_anywhere(filled: Place, line: tuple[str, ...]) -> None:
    result = run(*line, *filled.flags)
    assert result.code == 2
    result.assert_two_lines()


@pytest.mark.parametrize("options", [("--label", "team=x"), ("--tenant", TENANTS[0])])
def test_more_than_half_needs_to_be_said(filled: Place, options: tuple[str, ...]) -> None:
    with Vault.open(filled.path, provider=filled.key) as vault:
        for tenant in TENANTS:  # what persists is of prompts, then
            others = [f"{tenant}-{i}".encode() for i in range(6)]
            vault.execute(vault.plan_blocks(vault.scope(tenant, NAMESPACE), others))
    before = left(filled)
    looked = run("erase", *options, *WHY, "--dry-run", "--json", *filled.flags)
    assert (looked.code, looked.document["more_than_half"]) == (0, True)
    refused = run("erase", *options, *WHY, "--yes", *filled.flags)
    assert refused.code == 2
    refused.assert_two_lines()
    assert "--more-than-half" in refused.err
    assert left(filled) == before
    little = run("erase", "--request", "r1", *WHY, "--yes", "--json", *filled.flags)
    assert (little.code, little.document["more_than_half"]) == (0, False)
    done = run("erase", *options, *WHY, "--yes", "--more-than-half", *filled.flags)
    assert done.code == 0
    assert set(left(filled)) == ({"r3"} if "--tenant" in options else set())


def test_what_came_after_the_question_is_not_erased(
    filled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what went meanwhile is told."""
    asked: list[str] = []

    def confirm(_output: Output, question: str, *, yes: bool) -> None:
        asked.append(question)
        assert not yes
        with Vault.open(filled.path, provider=filled.key) as vault:
            scope = vault.scope(TENANTS[1], NAMESPACE)
            prompt = vault.prompt(scope, request_id="r4", subject="joe", labels={})
            vault.put(scope, [b"later"], [bytes(BLOCK)], prompt=prompt, ends=[16])
            vault.record(prompt, {b"later": 16})
            vault.settle_prompts()
            gone = vault.plan_erasure([Condition("request", "=", "r1")])
            vault.erase(gone, actor="somebody", reason="else")

    monkeypatch.setattr(Output, "confirm", confirm)
    line = ("erase", "--older-than", "0s", *WHY, "--more-than-half", "--json", *filled.flags)
    done = run(*line)
    assert done.code == 0
    assert asked[0].startswith("Erase 3 prompts")
    assert len(done.document["prompts"]) == 2
    assert done.document["later_prompts"] == 1
    assert "1 prompts and" in done.err
    assert "1 more prompts came after" in done.err
    assert left(filled) == {"r4": 1}


def test_without_a_terminal_it_needs_yes(filled: Place) -> None:
    result = run("erase", "--subject", "joe", *WHY, *filled.flags)
    assert result.code == 2
    assert set(left(filled)) == {"r1", "r2", "r3"}


@contextmanager
def engine(answer: int) -> Iterator[tuple[str, list[str]]]:
    """A server that is asked to drop its copies."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            body = b'{"success": true}'
            self.send_response(answer)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("answer", "reached"), [(200, True), (404, False)])
def test_the_engines_copies(filled: Place, answer: int, reached: bool) -> None:
    with engine(answer) as (url, asked):
        done = run(
            "erase", "--subject", "joe", "--engine", url, *WHY, "--yes", "--json", *filled.flags
        )
    assert done.code == (0 if reached else 3)  # it may still find them in its own memory
    assert any(path.startswith("/reset_prefix_cache") for path in asked)
    copies = {one["what"]: one["reached"] for one in done.document["engine_copies"]}
    assert copies["device"] is reached
    assert copies["region"] is False
    shown = run("receipt", "show", done.document["receipt"], "--format", "json", *filled.flags)
    said = json.loads(shown.out)["receipt"]["engine_copies"]
    assert {one["what"]: one["reached"] for one in said} == copies


@pytest.mark.parametrize(("answer", "code"), [(200, 0), (404, 3), (500, 3)])
def test_the_engines_copies_of_a_tenant(filled: Place, answer: int, code: int) -> None:
    """The receipt of forgetting is written with it; what the engine said stands in the log."""
    line = ("erase", "--tenant", TENANTS[0], *WHY, "--yes", "--more-than-half", *filled.flags)
    with engine(answer) as (url, asked):
        looked = run(*line, "--engine", url, "--dry-run")
        assert (looked.code, asked) == (0, [])
        done = run(*line, "--engine", url, "--json")
        assert asked
    assert done.code == code
    copies = {one["what"]: one["reached"] for one in done.document["engine_copies"]}
    assert copies["device"] is (answer == 200)
    with Vault.open(filled.path, provider=filled.key) as vault:
        [told] = [entry for entry in vault.audit.tail(2) if entry.kind == "engine-asked"]
        number = vault.audit.receipts()[-1].deletion_no
        assert vault.audit.verify().ok
    assert number is not None
    assert told.facts == {
        "deletion": number,
        "copies": [f"{one['what']}: {one['detail']}" for one in done.document["engine_copies"]],
    }
    assert set(left(filled)) == {"r3"}


def test_the_plan_is_a_question(filled: Place) -> None:
    run("erase", "--subject", "joe", *WHY, "--dry-run", *filled.flags)
    with Vault.open(filled.path, provider=filled.key) as vault:
        kinds = [entry.kind for entry in vault.audit.tail(3)]
    assert "question" in kinds


def test_tenants_do_not_mix(filled: Place) -> None:
    """A subject of that name in another tenant is somebody else."""
    with Vault.open(filled.path, provider=filled.key) as vault:
        scope = vault.scope(TENANTS[1], NAMESPACE)
        prompt = vault.prompt(scope, request_id="r4", subject="joe", labels={})
        vault.put(scope, [b"of another joe"], [bytes(BLOCK)], prompt=prompt, ends=[16])
        vault.record(prompt, {b"of another joe": 16})
    assert (
        run("erase", "--tenant", TENANTS[0], "--subject", "joe", *WHY, "--yes", *filled.flags).code
        == 0
    )
    assert set(left(filled)) == {"r1", "r3", "r4"}
    assert run("erase", "--subject", "joe", *WHY, "--yes", *filled.flags).code == 0
    assert set(left(filled)) == {"r1", "r3"}


@pytest.mark.parametrize(
    "line",
    [
        ("--model", "m"),
        ("--chat",),
        ("--lora", "a=b"),
        ("--tokenizer", "t"),
        ("--salt-file", "s"),
        ("--include-shared",),
        ("--subject", ""),
        ("--request", ""),
    ],
    ids=lambda line: line[0],
)
def test_what_a_script_left_out_does_not_erase_a_tenant(
    filled: Place, line: tuple[str, ...]
) -> None:
    before = left(filled)
    whole = ("--tenant", TENANTS[0], *WHY, "--yes", "--more-than-half", *filled.flags)
    result = run("erase", *line, *whole)
    assert result.code == 2
    result.assert_two_lines()
    assert left(filled) == before
    assert run("erase", *whole).code == 0  # the control: this is all of the tenant
    assert left(filled) == {"r3": 3}


def command_lines() -> str:
    """Of all processes there are now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(path.read_bytes().replace(b"\0", b" "))
    return b"\n".join(found).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("erase", *WHY, "--dry-run"), ("hold", "set", *WHY), ("report", "subject")]
)
def test_a_subject_from_a_file_stands_in_no_command_line(
    filled: Place, tmp_path: Path, command: tuple[str, ...]
) -> None:
    name = f"canary-{secrets.token_hex(8)}"
    file = tmp_path / "whose"
    file.write_text(f"{name}\n")
    for option, seen in ((("--subject-file", str(file)), False), (("--subject", name), True)):
        process = start(*command, "--tenant", TENANTS[0], *option, *filled.flags)
        lines = ""
        while process.poll() is None:
            lines += command_lines()
        assert finish(process).code == 0
        assert str(filled.path) in lines
        assert (name in lines) is seen


def test_a_subject_from_a_file(filled: Place, tmp_path: Path) -> None:
    """The whole file less the end of its line, here as on the command line."""
    file = tmp_path / "whose"
    whose: tuple[str | Path, ...] = ("--tenant", TENANTS[0], "--subject-file")
    for text in ("joe", "joe\n"):
        file.write_text(text)
        plan = run("erase", *whose, file, *WHY, "--dry-run", "--json", *filled.flags)
        assert (plan.code, len(plan.document["prompts"])) == (0, 1)
    read = run("report", "subject", *whose, "-", "--json", *filled.flags, stdin="joe\n")
    answers = {one["name"]: one["value"] for one in read.document["answers"]}
    assert (answers["subject"], answers["prompts"]) == ("joe", 1)
    assert run("hold", "set", *whose, "-", *WHY, *filled.flags, stdin="joe").code == 0
    line: tuple[str | Path, ...] = ("erase", "--subject-file", file, *WHY, "--yes", *filled.flags)
    assert run(*line).code == 3  # held
    assert run("hold", "clear", "1", *WHY, "--yes", *filled.flags).code == 0
    assert run(*line).code == 0
    assert set(left(filled)) == {"r1", "r3"}


@pytest.mark.parametrize(
    ("text", "more", "code"),
    [
        (b"", (), 2),
        (b"\n", (), 2),
        (b"joe\njane\n", (), 2),
        (b"joe\r\n", (), 2),
        (b"jo\xff", (), 2),
        (b"joe" * 2000, (), 2),
        (b"joe", ("--subject", "joe"), 2),
        (None, (), 1),
    ],
)
def test_a_file_that_is_no_subject(
    filled: Place, tmp_path: Path, text: bytes | None, more: tuple[str, ...], code: int
) -> None:
    """Nothing is done, and nobody is named."""
    file = tmp_path / "whose"
    if text is not None:
        file.write_bytes(text)
    whose: tuple[str | Path, ...] = ("--tenant", TENANTS[0], "--subject-file", file, *more)
    lines = (("erase", *WHY, "--yes", "--more-than-half"), ("hold", "set", *WHY))
    for command in (*lines, ("report", "subject")):
        result = run(*command, *whose, *filled.flags)
        assert result.code == code, command
        result.assert_two_lines()
        assert "joe" not in result.err
        assert "unexpected" not in result.err
    assert set(left(filled)) == {"r1", "r2", "r3"}
    assert run("hold", "ls", "--json", *filled.flags).document == {"holds": []}


def test_stdin_is_read_once(filled: Place) -> None:
    two = ("--text-file", "-", "--subject-file", "-", "--tenant", TENANTS[0], "--model", "tiny")
    result = run("erase", *two, *WHY, "--yes", *filled.flags, stdin="joe")
    assert result.code == 2
    assert "stdin" in result.err
