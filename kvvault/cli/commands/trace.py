"""bench trace: what the eviction policy is worth, on anybody's requests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvvault.cli.formats import Cell, human_bytes, parse_size
from kvvault.cli.run import Run
from kvvault.errors import UsageError

__all__ = ["bench_trace"]


def bench_trace(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Requests: JSON lines, see docs/eviction.md.")
    ],
    capacity: Annotated[
        list[float] | None,
        typer.Option(
            metavar="FRACTION",
            help="Size of the vault as a fraction of all different blocks; may be repeated. "
            "0.05, 0.1 and 0.25 if not given.",
            show_default=False,
        ),
    ] = None,
    segment_blocks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Blocks in one segment.")
    ] = 32,
    block_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of one block, for the bytes written.")
    ] = "8MiB",
) -> int | None:
    """Replay requests against kvvault's eviction, plain LRU and a cache that never evicts.

    Shows which part of all prompt blocks each would have found. Needs neither a vault nor vLLM.
    """
    from kvvault.bench.trace import CAPACITIES, TraceResult, read, replay

    capacities = capacity or list(CAPACITIES)
    if not all(0 < fraction <= 1 for fraction in capacities):
        raise UsageError("--capacity is above 0 and at most 1", hint="write --capacity 0.05")
    try:
        block_bytes = parse_size(block_size)
    except ValueError as error:
        what = str(error).partition(";")[0]
        raise UsageError(f"--block-size is {what}", hint="write --block-size 8MiB") from None
    if block_bytes <= 0:
        raise UsageError("--block-size is nothing", hint="write --block-size 8MiB")
    requests = read(file)
    results: list[TraceResult] = []
    try:
        for result in replay(
            requests, capacities, segment_blocks=segment_blocks, block_bytes=block_bytes
        ):
            results.append(result)
            run.output.note(f"replayed: {result.policy}, {100 * result.capacity_fraction:g}%")
    except ValueError as error:
        raise UsageError(
            str(error), hint="name a larger --capacity, or fewer --segment-blocks"
        ) from error
    if run.output.json:
        run.output.document({"results": [asdict(result) for result in results]})
        return None
    run.output.table(
        ["CAPACITY", "POLICY", "PREFIX HITS", "WRITTEN"],
        [
            [
                Cell(f"{100 * result.capacity_fraction:g}%", right=True),
                Cell(result.policy),
                Cell(f"{result.prefix_hit_ratio:.4f}", right=True),
                Cell(human_bytes(result.bytes_written), right=True),
            ]
            for result in results
        ],
    )
    return None
