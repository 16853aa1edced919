"""status, df, ls, show: what they say, and that saying it changes nothing."""

from __future__ import annotations

import hashlib
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from kvvault.model import SegmentState
from kvvault.policy import shipped
from kvvault.vault import Vault
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, NAMESPACE, ROOT, TENANTS, fill, run

READING = [("status",), ("df",), ("ls", "segments"), ("ls", "tenants"), ("verify",), ("doctor",)]


def contents(path: Path) -> dict[str, tuple[int, str]]:
    """Mode and digest of everything in a vault but what SQLite keeps beside the catalog."""
    return {
        str(file.relative_to(path)): (
            file.stat().st_mode,
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
        )
        for file in sorted(path.rglob("*"))
        if not file.name.endswith(("-wal", "-shm"))
    }


def test_status_counts_what_is_there(place: Place) -> None:
    document = run("status", *place.flags, "--json").document
    assert document["tenants"] == 2
    assert document["namespaces"] == 1
    assert document["blocks"] == 12
    assert document["bytes"] == 12 * BLOCK
    assert document["segments"] == 2
    assert document["recovery_needed"] is False
    assert document["warnings"] == []
    assert str(document["oldest_segment_at"]) <= str(document["newest_segment_at"])


def test_status_for_people_names_the_key_and_its_assurance(place: Place) -> None:
    result = run("status", *place.flags)
    assert result.code == 0
    assert result.err == ""
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert lines["blocks"] == "12"
    assert place.key in lines["key"]
    assert "logical" in lines["key"]
    assert lines["recovery"] == "not needed"


def test_status_of_an_empty_vault(tmp_path: Path, memory: Path) -> None:
    key = f"file:{tmp_path}/new.key"
    path = memory / "empty"
    assert run("init", "--vault", path, "--key-provider", key).code == 0
    document = run("status", "--vault", path, "--json").document
    assert document["blocks"] == 0
    assert document["oldest_segment_at"] is None


def test_init_with_a_policy(tmp_path: Path, memory: Path) -> None:
    path, key = memory / "governed", f"file:{tmp_path}/governed.key"
    words = ("init", "--vault", path, "--key-provider", key, "--json")
    bad = tmp_path / "bad.yaml"
    bad.write_text("kvvault: 1\nname: bad\n")
    for policy in (bad, tmp_path / "missing.yaml"):
        refused = run(*words, "--policy", policy)
        assert refused.code == 2
        # Before anything is made.
        assert not path.exists()
        assert not (tmp_path / "governed.key").exists()
    own = tmp_path / "own.yaml"
    own.write_text(shipped.load("gdpr-30d").source)
    made = run(*words, "--policy", own)
    assert made.code == 0
    status = run("status", "--vault", path, "--json").document["policy"]
    assert (status["name"], status["number"]) == ("gdpr-30d", 1)
    assert status["applied_by"] == pwd.getpwuid(os.getuid()).pw_name
    assert made.document["policy"] == {"name": "gdpr-30d", "digest": status["digest"]}


def test_init_with_a_policy_that_comes_with_kvvault(tmp_path: Path, memory: Path) -> None:
    words = ("init", "--key-provider", f"file:{tmp_path}/k", "--vault")
    made = run(*words, memory / "shipped", "--policy", "regulated")
    assert "policy     regulated" in made.out
    other = run("init", "--key-provider", f"file:{tmp_path}/k2", "--vault", memory / "plain")
    assert "policy     default" in other.out


def test_status_warns_when_key_and_disk_are_together(memory: Path) -> None:
    path, key = memory / "together", f"file:{memory}/together.key"
    made = run("init", "--vault", path, "--key-provider", key)
    assert made.code == 0
    assert "same file system" in made.err
    [warning] = run("status", "--vault", path, "--json").document["warnings"]
    assert "same file system" in warning


def test_df_adds_up(place: Place) -> None:
    document = run("df", *place.flags, "--json").document
    total = document["total"]
    for part in ("tenants", "namespaces", "states"):
        rows = document[part]
        assert isinstance(rows, list)
        for field in ("segments", "blocks", "bytes"):
            assert sum(row[field] for row in rows) == total[field], (part, field)
    assert document["catalog_bytes"] > 0
    assert document["segment_file_bytes"] >= 12 * BLOCK


def test_df_for_people_has_all_three_groupings(place: Place) -> None:
    out = run("df", *place.flags).out
    for word in (*TENANTS, "tiny", "sealed", "catalog", "free"):
        assert word in out


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ((), 2),
        (("bytes>1MB",), 0),
        (("bytes>=24KiB",), 2),
        (("state=sealed",), 2),
        (("state!=sealed",), 0),
        (("tenant~globex",), 1),
        (("tenant=globex",), 0),
        (("age<1h", "blocks=6"), 2),
        (("created_at>2000-01-01",), 2),
        (("created_at>2999-01-01T00:00:00Z",), 0),
    ],
)
def test_filters(place: Place, filters: tuple[str, ...], expected: int) -> None:
    flags = [part for text in filters for part in ("--filter", text)]
    document = run("ls", "segments", *place.flags, "--json", *flags).document
    assert document["total"] == expected
    assert len(document["segments"]) == expected


def test_sort_and_limit(place: Place) -> None:
    flags = (*place.flags, "--json", "--sort")
    up = run("ls", "tenants", *flags, "name").document
    down = run("ls", "tenants", *flags, "name:desc", "--limit", "1").document
    names = [row["name"] for row in up["tenants"]]
    assert names == sorted(TENANTS)
    assert [row["name"] for row in down["tenants"]] == names[::-1][:1]
    assert down["total"] == 2


@pytest.mark.parametrize("limit", ["0", "1000000000000000000000000000000"])
def test_any_limit(place: Place, limit: str) -> None:
    result = run("ls", "segments", *place.flags, "--json", "--limit", limit)
    assert len(result.document["segments"]) == (0 if limit == "0" else 2)


def test_short_ids_lead_back_to_their_rows(place: Place) -> None:
    for kind in ("segments", "tenants", "namespaces"):
        full = run("ls", kind, *place.flags, "--json").document[kind]
        shown = run("ls", kind, *place.flags).out.splitlines()[1:]
        assert len(shown) == len(full)
        for line, row in zip(shown, full, strict=True):
            short = line.split()[0]
            assert row["id"].startswith(short)
            found = run("show", short.upper(), *place.flags, "--json").document
            assert found["id"] == row["id"]
            assert found["kind"] == kind.removesuffix("s")


def test_show_a_namespace_with_its_facts(place: Place) -> None:
    document = run("show", NAMESPACE.digest.hex(), *place.flags, "--json").document
    assert document["facts"] == {"model": "tiny", "dtype": "bfloat16"}
    assert len(document["segment_ids"]) == 2
    assert "facts.dtype" in run("show", NAMESPACE.digest.hex(), *place.flags).out


def test_show_a_segment_with_its_file(place: Place) -> None:
    row = run("ls", "segments", *place.flags, "--json").document["segments"][0]
    file = run("show", row["id"], *place.flags, "--json").document["file"]
    assert file["exists"] is True
    assert Path(file["path"]).stat().st_size == file["bytes"]
    Path(file["path"]).unlink()
    file = run("show", row["id"], *place.flags, "--json").document["file"]
    assert file["exists"] is False


@pytest.mark.parametrize(
    "ident", ["zz", "", "not-an-id", "é", "0x1234", "0" * 65, "../..", "\x1b[31m", TENANTS[0]]
)
def test_what_is_no_id_is_refused_without_repeating_it(place: Place, ident: str) -> None:
    result = run("show", *place.flags, "--", ident)
    assert result.code == 2
    result.assert_two_lines()
    assert len(ident) < 3 or ident not in result.err


def test_an_id_that_nothing_has(place: Place) -> None:
    ids = {
        row["id"][:4]
        for kind in ("segments", "tenants", "namespaces")
        for row in run("ls", kind, *place.flags, "--json").document[kind]
    }
    free = next(f"{n:04x}" for n in range(65536) if f"{n:04x}" not in ids)
    result = run("show", free, *place.flags)
    assert result.code == 2
    result.assert_two_lines()


def test_an_ambiguous_prefix_names_the_candidates(memory: Path, tmp_path: Path) -> None:
    key = f"file:{tmp_path}/many.key"
    path = memory / "many"
    with Vault.create(path, provider=key) as vault:
        for n in range(17):  # more than there are hex digits
            vault.scope(f"tenant-{n}", NAMESPACE)
    ids = [row["id"] for row in run("ls", "tenants", "--vault", path, "--json").document["tenants"]]
    first = [ident[0] for ident in ids]
    shared = next(digit for digit in first if first.count(digit) > 1)
    result = run("show", shared, "--vault", path)
    assert result.code == 2
    result.assert_two_lines()
    assert "tenant " in result.err
    assert "tenant-" not in result.err


def test_tombstones_are_listed_only_on_request(place: Place) -> None:
    with Vault.open(place.path, provider=place.key) as vault:
        vault.delete_segments([vault.segments()[0].segment_id])
    assert run("ls", "segments", *place.flags, "--json").document["total"] == 1
    everything = run("ls", "segments", *place.flags, "--json", "--all").document
    states = {row["state"] for row in everything["segments"]}
    assert states == {"sealed", "destroyed"}


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_looking_changes_nothing(place: Place, command: tuple[str, ...]) -> None:
    (place.path / "segments" / ("ab" * 16 + ".seg")).write_bytes(b"unknown")
    (place.path / "segments" / ("ab" * 16 + ".seg")).chmod(0o600)
    before = contents(place.path)
    run(*command, *place.flags)
    assert contents(place.path) == before


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_looking_while_an_engine_works(
    place: Place, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvvault.doctor.pending._YOUNG_S", -1.0)
    with Vault.open(place.path, provider=place.key) as vault:
        fill(vault, ("working-canary",))
        assert any(facts.state is SegmentState.OPEN for facts in vault.segments())
        result = run(*command, *place.flags)
        assert result.code == 0, result
        document = run("status", *place.flags, "--json").document
        assert document["blocks"] == 18
        assert document["recovery_needed"] is False
        fill(vault, ("still-working",))


def test_a_crash_is_noticed_and_gone_after_the_repair(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvvault.doctor.pending._YOUNG_S", -1.0)
    crash = (
        "import os, sys; from tests.cli.support import fill; from kvvault.vault import Vault;"
        "fill(Vault.open(sys.argv[1], provider=sys.argv[2]), ['crashed']); os._exit(9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", crash, place.path, place.key], cwd=ROOT, timeout=60
    )
    assert done.returncode == 9
    stranger = place.path / "segments" / ("ab" * 16 + ".seg")
    stranger.write_bytes(b"no row knows me")
    stranger.chmod(0o600)
    document = run("status", *place.flags, "--json").document
    assert document["recovery_needed"] is True
    recovery = document["recovery"]
    assert recovery["abandoned_segments"] == 1
    assert recovery["unknown_files"] == 1
    assert recovery["unknown_bytes"] == len("no row knows me")
    text = run("status", *place.flags)
    assert "needed" in text.out
    assert "warning: not closed cleanly" in text.err
    Vault.open(place.path, provider=place.key).close()
    assert run("status", *place.flags, "--json").document["recovery_needed"] is False
    assert not stranger.exists()


def test_names_that_cannot_be_had_are_blank_and_nothing_else_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvvault.errors import KeyUnavailableError
    from kvvault.keyring import KeyRing

    def unavailable(*_: object) -> str:
        raise KeyUnavailableError("no answer", hint="wait")

    monkeypatch.setattr(KeyRing, "name", unavailable)
    rows = run("ls", "tenants", *place.flags, "--json").document["tenants"]
    assert [row["name"] for row in rows] == [None, None]
    assert run("ls", "tenants", *place.flags).code == 0
    assert run("df", *place.flags).code == 0


def test_a_time_that_is_none_is_shown_as_none(place: Place) -> None:
    import sqlite3

    with sqlite3.connect(place.path / "catalog.sqlite3") as catalog:
        catalog.execute("UPDATE segments SET created_at = 1e300")
    catalog.close()
    for command in READING:
        assert run(*command, *place.flags).code in (0, 1)
    document = run("status", *place.flags, "--json").document
    assert document["newest_segment_at"] is None


@pytest.mark.parametrize("name", ["-ünï cödé\n", "q?#%41;'"])
def test_weird_paths(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    key = f"file:{tmp_path}/{name}.key"
    made = run("init", "--vault", path, "--key-provider", key, "--json")
    assert made.code == 0, made.err
    assert made.document["vault"] == str(path)
    with Vault.open(path) as vault:
        fill(vault)
    for command in READING:
        assert run(*command, "--vault", path).code == 0, command
    assert run("status", "--vault", path, "--json").document["vault"] == str(path)


def test_a_path_that_is_not_text(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe\x1b[31m")
    assert run("init", "--vault", path, "--key-provider", f"file:{tmp_path}/k").code == 0
    result = run("status", "--vault", path)
    assert result.code == 0
    assert "\x1b" not in result.out
    document = run("status", "--vault", path, "--json").document
    assert "\\xff\\xfe" in str(document["vault"])
