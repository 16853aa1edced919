"""What only a real process shows: exit codes, signals, pipes, terminals, start-up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.cli.support import ROOT, finish, start

pytestmark = pytest.mark.slow  # each of these processes takes a second of CPU to start

SLOW_VERIFY = """
import sys, time
import kvvault.vault
def verify(vault, progress=None):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
kvvault.vault.Vault.verify = verify
from kvvault.cli import main
main()
"""


def test_exit_codes(place: Place, tmp_path: Path) -> None:
    started = [
        (0, start("status", *place.flags)),
        (2, start("status", "--nope")),
        (10, start("status", "--vault", tmp_path)),
        (12, start("status", "--vault", place.path, "--key-provider", f"file:{tmp_path}/none")),
    ]
    for code, process in started:
        result = finish(process)
        assert result.code == code
        assert "Traceback" not in result.err


def test_the_console_script_and_the_module() -> None:
    script = Path(sys.executable).with_name("kvvault")
    commands: list[list[str]] = [[sys.executable, "-m", "kvvault.cli"]]
    if script.exists():
        commands.append([str(script)])
    for command in commands:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert done.returncode == 0
        assert done.stdout.startswith("kvvault ")
        assert done.stderr == ""


def test_help_starts_without_the_heavy_libraries() -> None:
    code = """
import sys
from kvvault.cli import main
try:
    main()
except SystemExit as exit_:
    assert not exit_.code
heavy = {"sqlalchemy", "alembic", "torch", "vllm", "cryptography", "numpy", "pydantic_settings"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for arguments in (("--help",), ("--version",), ("status", "--help"), ("serve", "--help")):
        result = finish(start(*arguments, code=code))
        assert result.code == 0
        assert result.err == "[]\n"
        assert result.out


@pytest.mark.parametrize("arguments", [("ls", "segments", "--json"), ("ls", "segments")])
def test_a_closed_pipe_is_quiet(place: Place, arguments: tuple[str, ...]) -> None:
    process = start(*arguments, *place.flags)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert err == ""


def test_a_closed_pipe_does_not_hide_what_verify_found(place: Place) -> None:
    segment = next((place.path / "segments").glob("*.seg"))
    segment.write_bytes(bytes(segment.stat().st_size))
    process = start("verify", *place.flags, "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 1


def test_a_full_disk_behind_stdout_is_an_error(place: Place) -> None:
    with open("/dev/full", "wb") as full:
        result = finish(start("status", *place.flags, stdout=full.fileno()))
    assert result.code == 1
    assert result.err.startswith("error: cannot write the result: no space left on device\nhint: ")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(place: Place, redirection: str) -> None:
    script = f'exec "$@" {redirection}'
    command = [sys.executable, "-m", "kvvault.cli", "status", *place.flags]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_ctrl_c_is_130(place: Place) -> None:
    process = start("verify", *place.flags, code=SLOW_VERIFY)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130
    assert result.err.startswith("error: cancelled\nhint: ")
    assert "Traceback" not in result.err
    assert result.out == ""


def test_ctrl_c_in_json(place: Place) -> None:
    process = start("verify", *place.flags, "--json", code=SLOW_VERIFY)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert finish(process).error["exit_code"] == 130


def read_all(fd: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # Linux: the other end of a terminal was closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode()


def test_verify_shows_a_bar_on_a_terminal_and_data_on_stdout(place: Place) -> None:
    ours, theirs = os.openpty()
    process = start("verify", *place.flags, "--json", stderr=theirs)
    os.close(theirs)
    shown = read_all(ours)
    os.close(ours)
    assert process.stdout is not None
    document = json.loads(process.stdout.read())
    process.stdout.close()
    assert process.wait(60) == 0
    assert document["ok"] is True
    assert "verifying" in shown


@pytest.mark.parametrize(("variable", "coloured"), [("NO_COLOR", False), ("UNUSED", True)])
def test_no_color(variable: str, coloured: bool) -> None:
    ours, theirs = os.openpty()
    process = start("doctor", stdout=theirs, environment={variable: "1", "TERM": "xterm"})
    os.close(theirs)
    shown = read_all(ours)
    os.close(ours)
    finish(process)
    assert "swap" in shown
    assert ("\x1b[32m" in shown) is coloured


def test_no_column_is_cut_off(place: Place) -> None:
    ours, theirs = os.openpty()
    process = start("ls", "segments", *place.flags, stdout=theirs, environment={"COLUMNS": "20"})
    os.close(theirs)
    shown = read_all(ours)
    os.close(ours)
    assert finish(process).code == 0
    assert "globex-canary" in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_a_locale_that_cannot_show_everything(tmp_path: Path) -> None:
    environment = {"PYTHONIOENCODING": "ascii"}
    path = tmp_path / "kv-\N{SNOWMAN}"
    flags = ("--vault", path)
    made = finish(start("init", *flags, environment=environment))
    assert made.code == 0, made.err
    assert "\\u2603" in made.out
    document = finish(start("status", *flags, "--json", environment=environment)).document
    assert document["vault"] == str(path)
    error = finish(start("status", "--vault", path / "x", environment=environment))
    assert error.code == 10
    assert "\\u2603" in error.err


def test_completion_answers() -> None:
    result = finish(start("--show-completion", "bash"))
    assert "Traceback" not in result.err
    answered = finish(
        start(
            environment={
                "_KVVAULT_COMPLETE": "complete_bash",
                "COMP_WORDS": "kvvault ver",
                "COMP_CWORD": "1",
            }
        )
    )
    assert set(answered.out.split()) == {"verify", "version"}
