"""verify: what its exit code says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.model import Outcome
from tests.cli.conftest import Place
from tests.cli.support import BLOCK, run


def segment_file(place: Place) -> Path:
    return sorted((place.path / "segments").glob("*.seg"))[0]


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_an_intact_vault_is_0(place: Place) -> None:
    result = run("verify", *place.flags, "--json")
    assert result.code == 0
    assert result.document["ok"] is True
    assert result.document["blocks"] == 12
    assert run("verify", *place.flags).err == ""  # no bar where there is no terminal


def test_an_altered_block_is_1(place: Place) -> None:
    flip(segment_file(place), 3 * BLOCK + 17)
    result = run("verify", *place.flags, "--json")
    assert result.code == 1
    document = result.document
    assert (document["ok"], document["tampered"], document["lost"]) == (False, 1, 0)
    assert document["damaged_segments"] == [segment_file(place).stem]
    text = run("verify", *place.flags)
    assert text.code == 1
    assert "1 altered" in text.out
    assert f"damaged segment {segment_file(place).stem[:8]}" in text.out


def test_a_lost_block_is_1(place: Place) -> None:
    segment_file(place).write_bytes(segment_file(place).read_bytes()[: 5 * BLOCK])
    result = run("verify", *place.flags, "--json")
    assert result.code == 1
    assert (result.document["tampered"], result.document["lost"]) == (0, 1)


def test_a_lost_file_is_1(place: Place) -> None:
    segment_file(place).unlink()
    result = run("verify", *place.flags, "--json")
    assert result.code == 1
    assert result.document["lost"] == 6


@pytest.mark.parametrize("altered", [False, True])
def test_what_cannot_be_checked_is_3_unless_something_is_altered_too(
    place: Place, monkeypatch: pytest.MonkeyPatch, altered: bool
) -> None:
    from kvvault.checking import Checker

    def no_answer(_checker: object, _row: object) -> Iterator[Outcome]:
        yield Outcome.KEY_UNAVAILABLE
        yield Outcome.IO_FAILED
        yield Outcome.TAMPERED if altered else Outcome.HIT

    monkeypatch.setattr(Checker, "check", no_answer)
    result = run("verify", *place.flags, "--json")
    assert result.code == (1 if altered else 3)
    assert result.document["unreadable"] == 4
    assert "check the key provider" in run("verify", *place.flags).err or altered
