"""A catalog whose pages rotted: a clear error, or the right bytes, or misses. Never anything else.

`test_mutations` changes fields and knows what must come of it; here bytes of the file change, so
that SQLite itself meets what cannot be.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.errors import KvvaultError
from kvvault.model import Outcome
from tests.core.golden import MODELS, TENANTS, Damaged, Golden
from tests.core.support import ZERO, content, get, keys, namespace

PAGE = 4096


@pytest.fixture(scope="module")
def golden(memory: Path) -> Golden:
    return Golden(Path(tempfile.mkdtemp(dir=memory)))


@pytest.fixture(scope="module")
def damaged(golden: Golden, memory: Path) -> Damaged:
    return Damaged(golden, Path(tempfile.mkdtemp(dir=memory)))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("kvvault").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvvault").setLevel(logging.NOTSET)


def rot(data: bytearray, rng: random.Random) -> None:
    kind = rng.randrange(5)
    at = rng.randrange(len(data))
    page = at // PAGE * PAGE
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at : at + 50] = rng.randbytes(len(data[at : at + 50]))
    elif kind == 2:  # a page lost
        data[page : page + PAGE] = bytes(len(data[page : page + PAGE]))
    elif kind == 3:  # a page in another's place
        other = rng.randrange(len(data) // PAGE) * PAGE
        data[page : page + PAGE] = data[other : other + PAGE]
    else:  # cells point elsewhere
        for _ in range(4):
            data[page + rng.randrange(min(120, len(data) - page))] = rng.randrange(256)


def play(damaged: Damaged, seed: str) -> Counter[str]:
    rng = random.Random(seed)
    damaged.reset(rng)
    data = bytearray(damaged.golden.catalog)
    for _ in range(rng.choice((1, 1, 1, 3))):
        rot(data, rng)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    damaged.home.catalog.write_bytes(data)
    seen: Counter[str] = Counter()
    try:
        vault = damaged.home.open(read_only=rng.random() < 0.5)
    except KvvaultError:
        return Counter({"refused": 1})
    with vault:
        for tenant in TENANTS:
            for model, count in MODELS.items():
                try:
                    scope = vault.scope(tenant, namespace(model=model))
                    outcomes, found = get(vault, scope, keys(count))
                except KvvaultError:
                    seen["scope refused"] += 1
                    continue
                for k, outcome, data_found in zip(keys(count), outcomes, found, strict=True):
                    right = content(tenant + model, k) if outcome is Outcome.HIT else ZERO
                    assert data_found == right
                    seen[outcome] += 1
        for look in (vault.stats, vault.segments, vault.tenants, vault.namespaces, vault.verify):
            try:
                look()
            except KvvaultError:
                seen["look refused"] += 1
        try:
            vault.close()
        except KvvaultError:
            seen["close refused"] += 1
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_some_rot(damaged: Damaged, seed: int) -> None:
    for turn in range(4):
        play(damaged, f"{seed} {turn}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_rot(damaged: Damaged, capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[str] = Counter()
    for turn in range(600):
        seen += play(damaged, f"slow {turn}")
    assert seen["refused"] > 30
    assert seen["hit"] > 3000
    with capsys.disabled():
        print(f"\n600 rotten catalogs: {dict(seen)}")
