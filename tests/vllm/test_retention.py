"""A real engine under a policy of seconds: what it wrote is used until its deadline, and not after.
The engine itself is not touched: the jobs run in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvvault.model import SegmentState
from kvvault.policy.document import Policy
from kvvault.vault import Vault
from tests.vllm.engine import Engines, Prompt
from tests.vllm.test_engine import CLOSE, Setup, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LIFE_S = 20

POLICY = f"""
kvvault: 1
name: seconds
description: For a test.
vault:
  cap: 80%
  free_floor: 1MiB
rules:
  - name: all
    delete_by: {LIFE_S}s
    owner: tests
    justification: tests
"""

CPU_BLOCKS = 40


def again(prompt: Prompt, wait_s: float = 0.0) -> Prompt:
    return dataclasses.replace(prompt, forget_first=True, wait_s=wait_s)


def test_hits_before_the_deadline_and_misses_after_it(
    engines: Engines, models: Path, tmp_path: Path
) -> None:
    setup = Setup(engines, models, tmp_path)
    path, provider = tmp_path / "vault", f"file:{tmp_path / 'key'}"
    Vault.create(path, provider=provider, policy=Policy.parse(POLICY)).close()
    tier: dict[str, object] = {
        "type": "kvvault",
        "vault": str(path),
        "key_provider": provider,
    }
    # The CPU tier holds two of these prompts at a time, so what comes back comes from the vault.
    asked, *others = prompts(7, *[512 + 10] * 9)
    row = 2 * 3 * 32 * 256 * 4
    sequence = (
        asked,
        *others[:4],
        again(asked),
        *others[4:],
        again(asked, wait_s=LIFE_S + 1.0),
        again(asked),
    )
    report = setup.run(sequence, [tier], cpu_bytes_to_use=CPU_BLOCKS * row)
    full = 512
    assert report.cached[0] == 0
    assert report.cached[5] == full
    assert report.cached[10] == 0
    # A control at the end: what was computed again was stored again, and is found.
    assert report.cached[11] == full
    first, before, after, last = (report.answers[at] for at in (0, 5, 10, 11))
    for other in (before, after, last):
        assert other.tokens == first.tokens
        assert other.distance(first) < CLOSE
    with Vault.open(path, provider=provider) as vault:
        gone = [f for f in vault.segments() if f.state is SegmentState.DESTROYED]
        assert gone
        assert not vault.plan_expired().segments
