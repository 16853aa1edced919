"""bench trace: the trace's form, what counts as a prefix hit, and segments beside plain LRU."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvvault.bench.trace import Request, TraceResult, read, replay
from kvvault.errors import ConfigError, UsageError
from tests.cli.support import run


def write(path: Path, requests: list[tuple[int, list[int]]]) -> Path:
    """A file in the form of a published trace."""
    lines = [
        json.dumps(
            {"timestamp": at, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}
        )
        for at, ids in requests
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def conversations(count: int, seed: int = 1) -> list[tuple[int, list[int]]]:
    """Many conversations side by side under one system prompt; most end after their first turn."""
    chance = random.Random(seed)
    names = iter(range(2, 1_000_000))
    alive: list[list[int]] = []
    requests = []
    for number in range(count):
        if alive and chance.random() < 0.4:
            talk = alive.pop(chance.randrange(len(alive)))
        else:
            talk = [0, 1]
        talk = talk + [next(names) for _ in range(chance.randint(2, 12))]
        if chance.random() < (0.3 if len(talk) <= 14 else 0.8):
            alive.append(talk)
        requests.append((number * 1000, talk))
    return requests


def documents(count: int, seed: int = 1) -> list[Request]:
    """Questions about some documents, popular and less so, among prompts that never come back."""
    chance = random.Random(seed)
    names = iter(range(100_000, 10_000_000))
    requests = []
    for number in range(count):
        if chance.random() < 0.4:
            which = int(200 * chance.random() ** 2)
            prompt = [*range(which * 20, which * 20 + 10), next(names)]
        else:
            prompt = [next(names) for _ in range(10)]
        requests.append(Request(float(number), tuple(prompt)))
    numbers: dict[int, int] = {}
    return [
        replace(
            request,
            blocks=tuple(numbers.setdefault(name, len(numbers)) for name in request.blocks),
        )
        for request in requests
    ]


def results(
    requests: list[Request], *capacities: float, segment_blocks: int = 8, block_bytes: int = 1
) -> dict[tuple[float, str], TraceResult]:
    found = replay(requests, capacities, segment_blocks=segment_blocks, block_bytes=block_bytes)
    return {(result.capacity_fraction, result.policy): result for result in found}


# -- reading -------------------------------------------------------------------------------------


def test_reading(tmp_path: Path) -> None:
    requests = read(write(tmp_path / "trace", [(500, [77, 5]), (2000, []), (2500, [77, 9, 5])]))
    assert requests == [Request(0.0, (0, 1)), Request(1.5, ()), Request(2.0, (0, 2, 1))]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "3",
        "{}",
        '{"timestamp": 1}',
        '{"timestamp": "1", "hash_ids": [1]}',
        '{"timestamp": true, "hash_ids": [1]}',
        '{"timestamp": 1, "hash_ids": 1}',
        '{"timestamp": 1, "hash_ids": ["a"]}',
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "trace", [(1, [1])])
    read(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="trace:2: not a request"):
        read(path)


def test_time_does_not_go_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace:2: earlier"):
        read(write(tmp_path / "trace", [(2, [1]), (1, [1])]))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read(tmp_path / "missing")
    with pytest.raises(UsageError):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError):
        read(tmp_path / "binary")
    (tmp_path / "empty").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="no blocks"):
        read(tmp_path / "empty")


# -- replaying -----------------------------------------------------------------------------------


def test_blocks_beyond_the_first_miss_are_no_hits() -> None:
    requests = [Request(0, (0, 1, 2, 3)), Request(1, (0, 1, 4, 3)), Request(2, (5, 1, 2))]
    found = results(requests, 1.0, segment_blocks=1)
    # 2 of 4 + 4 + 3: block 3 of the second request and all of the third come after a miss.
    for policy in ("kvvault", "lru", "infinite"):
        assert found[1.0, policy].prefix_hit_ratio == 2 / 11
        assert found[1.0, policy].bytes_written == 6


def test_lru_evicts_what_was_used_longest_ago_and_a_prompts_end_first() -> None:
    requests = [Request(0, (0, 1)), Request(1, (2, 3)), Request(2, (0,)), Request(3, (4,))]
    kept = results([*requests, Request(4, (0, 1))], 0.8, segment_blocks=1)[0.8, "lru"]
    assert kept.prefix_hit_ratio == 2 / 8  # 0 twice; 1 made room for 4
    assert kept.bytes_written == 6  # and was stored again


def test_a_vault_as_large_as_the_working_set_is_as_good_as_an_infinite_one() -> None:
    requests = [Request(at / 1000, tuple(ids)) for at, ids in conversations(200)]
    found = results(requests, 1.0)
    assert found[1.0, "kvvault"].prefix_hit_ratio == found[1.0, "infinite"].prefix_hit_ratio
    assert found[1.0, "kvvault"].bytes_written == found[1.0, "infinite"].bytes_written


def test_where_most_prompts_never_come_back_frequency_beats_lru() -> None:
    found = results(documents(2000), 0.05, 0.10, block_bytes=10)
    for capacity in (0.05, 0.10):
        ours, lru = found[capacity, "kvvault"], found[capacity, "lru"]
        assert ours.prefix_hit_ratio > 1.05 * lru.prefix_hit_ratio
        assert ours.prefix_hit_ratio < found[1.0, "infinite"].prefix_hit_ratio
        # Re-admission writes, and is counted; it does not run away.
        assert found[1.0, "infinite"].bytes_written < ours.bytes_written
        assert ours.bytes_written < 2 * lru.bytes_written


def test_where_uses_in_the_past_say_nothing_little_is_lost_to_lru() -> None:
    requests = [Request(at / 1000, tuple(ids)) for at, ids in conversations(1500)]
    found = results(requests, 0.05, 0.25)
    for capacity in (0.05, 0.25):
        ours, lru = found[capacity, "kvvault"], found[capacity, "lru"]
        assert ours.prefix_hit_ratio > 0.95 * lru.prefix_hit_ratio


def test_a_replay_is_deterministic() -> None:
    requests = [Request(at / 1000, tuple(ids)) for at, ids in conversations(300)]
    assert results(requests, 0.1) == results(requests, 0.1)


def test_a_request_larger_than_the_vault_stores_its_beginning() -> None:
    requests = [Request(0, tuple(range(10))), Request(1, (0, 1, 2))]
    found = results(requests, 0.4, segment_blocks=2)[0.4, "kvvault"]
    assert found.bytes_written == 4
    assert found.prefix_hit_ratio == 3 / 13


# -- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", conversations(200))
    arguments = ("bench", "trace", path, "--segment-blocks", "8", "--block-size", "1MiB")
    shown = run(*arguments, "--capacity", "0.1", "--capacity", "0.5")
    assert shown.code == 0
    assert shown.err.splitlines() == [
        *("replayed: kvvault, 10%", "replayed: lru, 10%"),
        *("replayed: kvvault, 50%", "replayed: lru, 50%"),
        "replayed: infinite, 100%",
    ]
    assert [line.split()[1] for line in shown.out.splitlines()[1:]] == [
        *("kvvault", "lru") * 2,
        "infinite",
    ]
    document = run(*arguments, "--json").document
    assert [(row["capacity_fraction"], row["policy"]) for row in document["results"]] == [
        *((capacity, policy) for capacity in (0.05, 0.1, 0.25) for policy in ("kvvault", "lru")),
        (1.0, "infinite"),
    ]
    assert all(0 < row["prefix_hit_ratio"] < 1 for row in document["results"])
    assert all(row["bytes_written"] % (1 << 20) == 0 for row in document["results"])


@pytest.mark.parametrize(
    "options",
    [
        ("--capacity", "0"),
        ("--capacity", "1.5"),
        ("--capacity", "nan"),
        ("--capacity", "0.0001"),
        ("--block-size", "big"),
        ("--block-size", "0"),
        ("--segment-blocks", "0"),
    ],
    ids=" ".join,
)
def test_wrong_options(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = write(tmp_path / "trace", conversations(20))
    result = run("bench", "trace", path, *options)
    assert result.code == 2
    result.assert_two_lines()


def test_a_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("nonsense\n")
    result = run("bench", "trace", path)
    assert result.code == ConfigError.exit_code
    result.assert_two_lines()
    assert "trace:1" in result.err
