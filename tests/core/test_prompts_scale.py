"""A hundred thousand prompts, ten million memberships: what they cost, and how it grows. Times are
printed only; what is asserted is that ten times as much takes no more than some ten times as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Connection

from kvvault.catalog import operations
from kvvault.crypto import keys as hierarchy
from kvvault.crypto.aead import random_id
from kvvault.naming import SUBJECT
from kvvault.promptfacts import Condition
from kvvault.prompting import PROMPT
from kvvault.segments.format import Extent
from kvvault.vault import Vault
from tests.core.support import Home, namespace

SYSTEM = 90
"""Blocks of a system prompt."""
OWN = 10
"""Blocks that each prompt has stored itself."""
SHARERS = 1000
"""Prompts with the same system prompt."""
PER_SUBJECT = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def populate(vault: Vault, count: int) -> None:
    """`count` prompts, each with a shared system prompt and some blocks of its own; rows only, by
    the statements that stores use. The first prompt of each system prompt has it stored."""
    rng = random.Random(1)
    scope = vault.scope("alice", namespace())
    vault.scope("bob", namespace())
    tenant = scope.keys

    def origin(number: int, first: int, blocks: int) -> bytes:
        pairs = [v for i in range(blocks) for v in (number, 16 * (first + i + 1))]
        return np.array(pairs, ">u4").tobytes()

    prompts, links, extents = [], [], []
    segment_id, at, segments = b"", 0, []
    for number in range(1, count + 1):
        if number % SHARERS == 1:
            leader = number
            if segment_id:
                segments.append((segment_id, at))
            segment_id, at = random_id(), 0
        sealed = tenant.seal_text(PROMPT, f'{{"request": "chatcmpl-{number:032x}"}}')
        subject = 1 + (number - 1) // PER_SUBJECT
        prompts.append(
            (
                number,
                rng.randbytes(8),
                subject,
                tenant.keyed_id("request", f"chatcmpl-{number:032x}".encode()),
                sealed,
                1_800_000_000.125 + number,
                16 * (SYSTEM + OWN),
            )
        )
        first = 0 if number == leader else SYSTEM
        if number != leader:
            links.append((number, leader, 16 * SYSTEM))
        blocks = SYSTEM + OWN - first
        extents.append(
            Extent(
                segment_id,
                at,
                rng.randbytes(16 * blocks),
                rng.randbytes(12 * blocks),
                rng.randbytes(16 * blocks),
                origin(number, first, blocks),
            )
        )
        at += blocks
    segments.append((segment_id, at))
    subjects = [
        (
            no,
            tenant.tenant_id,
            tenant.keyed_id(SUBJECT, f"subject {no}".encode()),
            tenant.seal_text(SUBJECT, f"subject {no}"),
        )
        for no in range(1, 2 + (count - 1) // PER_SUBJECT)
    ]

    def write(connection: Connection) -> None:
        run = connection.exec_driver_sql
        run("INSERT INTO scopes VALUES (1, ?, ?)", (tenant.tenant_id, namespace().digest))
        run("INSERT INTO texts VALUES (?, ?, 'subject', ?, ?)", subjects)
        run(
            "INSERT INTO prompts (prompt_no, prompt_id, scope_no, subject_no, request_id, sealed, "
            "first_used, last_used, end_token) VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?)",
            [(*row[:6], row[5], row[6]) for row in prompts],
        )
        if links:
            run("INSERT INTO prompt_links VALUES (?, ?, ?)", links)
        for segment, blocks in segments:
            wrapped, _ = hierarchy.new_segment(tenant, segment, namespace().digest)
            operations.add_segment(
                connection,
                segment_id=segment,
                tenant_id=tenant.tenant_id,
                namespace=namespace(),
                wrapped_secret=wrapped.key,
                commitment=wrapped.commitment,
                boot_id="",
                now=0.0,
            )
            run("UPDATE segments SET blocks = ? WHERE segment_id = ?", (blocks, segment))
        run(
            "INSERT INTO extents (segment_id, first_slot, block_ids, nonces, tags, origins) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            [
                (e.segment_id, e.first_slot, e.block_ids, e.nonces, e.tags, e.origins)
                for e in extents
            ],
        )

    vault.catalog.write(write)


def made(path: Path, count: int) -> Vault:
    vault = Home(path).create()
    populate(vault, count)
    return vault


def timed(call: Callable[[], object]) -> float:
    """CPU seconds: the machine is shared."""
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def sizes(home: Home) -> tuple[int, int, int]:
    """What of a closed vault's catalog are origins, links, and what prompts say of themselves: by
    what it shrinks when these are taken out."""
    found = []
    with home.sql() as connection:
        for take in (
            "SELECT 1",
            "UPDATE extents SET origins = NULL",
            "DELETE FROM prompt_links",
            "DELETE FROM prompts",
            "DELETE FROM texts",
        ):
            connection.execute(take).fetchall()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            found.append(home.catalog.stat().st_size)
    return found[0] - found[1], found[1] - found[2], found[2] - found[4]


def questions(vault: Vault, count: int) -> dict[str, float]:
    ask = vault.prompts
    one = ask.listing(limit=1)[0][0]
    subject = f"subject {1 + count // 2 // PER_SUBJECT}"
    rows, total = ask.listing([Condition("subject", "=", subject)])
    assert total == PER_SUBJECT == len(rows)
    assert all(row.blocks == SYSTEM + OWN for row in rows)

    def erase() -> int:
        state = ask.load(tenant="alice", with_ids=True)
        chosen = ask.matching(state, [Condition("subject", "=", subject)])
        targets = state.snapshot.prompts.number[chosen]
        found = state.sharing.erasure(targets, state.snapshot.blocks.ids)
        return int(np.count_nonzero(found.private))

    assert erase() == PER_SUBJECT * OWN
    return {
        "ls": timed(lambda: ask.listing(limit=100)),
        "ls of one subject": timed(lambda: ask.listing([Condition("subject", "=", subject)])),
        "show": timed(lambda: ask.show(one.prompt_id.hex())),
        "subjects": timed(ask.subjects),
        "df": timed(lambda: ask.usage("tenant")),
        "plan of an erasure": timed(erase),
        "prune": timed(ask.prune),
    }


def test_issue_4_6_a_hundred_thousand_prompts(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with made(memory / "small", 10_000) as vault:
        small = questions(vault, 10_000)
    with made(memory / "large", 100_000) as vault:
        large = questions(vault, 100_000)
        state = vault.prompts.load()
        assert int(state.figures.blocks[state.at].sum()) == 100_000 * (SYSTEM + OWN)
        start = time.process_time()
        vault.purge()
        purge = time.process_time() - start
        assert vault.prompts.listing(limit=1)[0][0].subject is not None
    blocks = len(state.snapshot.blocks.owner)
    origins, links, metadata = sizes(Home(memory / "large"))
    a_prompt, a_block = links / 100_000, origins / blocks
    with capsys.disabled():
        print(
            f"\n100,000 prompts, {blocks} blocks, 10 million memberships, CPU: "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in large.items())
            + f"; {a_prompt:.1f} bytes a prompt and {a_block:.1f} a block; besides "
            f"{metadata / 100_000:.0f} bytes a prompt of what it says of itself; "
            f"a purge {purge:.1f} s"
        )
    assert a_prompt <= 64
    assert a_block <= 16
    for name, seconds in large.items():
        assert seconds < 40 * small[name] + 0.5, name
