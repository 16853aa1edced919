#!/usr/bin/env python3
"""A long prefix is computed once; the next process loads its KV cache from an encrypted vault.

    python examples/prefix_cache.py              # both processes, one after the other
    python examples/prefix_cache.py --json       # the same, as one JSON document
    python examples/prefix_cache.py --process --vault DIR     # one process

Needs ``pip install 'kvvault[torch]'``; no model, no GPU, no network. The "language model" is a few
lines of attention with random weights: it says nothing sensible, but it has a KV cache, and that is
what this is about. What to look at is `answer`: three calls, `lookup`, `load`, `offload`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from kvvault.model import Namespace
from kvvault.tiering.engine import TieredCache
from kvvault.vault import Vault

SEED, VOCABULARY = 7, 1024
LAYERS, HEADS, WIDTH = 6, 4, 256
BLOCK_TOKENS = 128
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 2048, 32, 16


class TinyModel:
    """Decoder-only attention with random weights.

    `cache` is its KV cache, float32 of shape (blocks, layers, 2, BLOCK_TOKENS, WIDTH): the first
    index comes first so that the keys and values of one block of tokens lie together in memory and
    can be kept as one piece.
    """

    def __init__(self, tokens: int) -> None:
        draw = torch.Generator().manual_seed(SEED)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) * rows**-0.5

        self.embedding = matrix(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.layers = [
            (matrix(WIDTH, 3 * WIDTH), matrix(WIDTH, WIDTH), matrix(WIDTH, 4 * WIDTH),
             matrix(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        ]  # fmt: skip
        blocks = -(-tokens // BLOCK_TOKENS)
        self.cache = torch.zeros(blocks, LAYERS, 2, BLOCK_TOKENS, WIDTH)

    def step(self, tokens: Sequence[int], start: int) -> Tensor:
        """Logits, shape (tokens, VOCABULARY), of tokens at positions `start`...; all in one block,
        and the cache holds everything before them. Enters their keys and values in the cache."""
        block, offset = divmod(start, BLOCK_TOKENS)
        inside = slice(offset, offset + len(tokens))
        x = self.embedding[torch.tensor(tokens)] + self._positions(start, len(tokens))
        end = start + len(tokens)
        visible = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]
        for i, (qkv, out, up, down) in enumerate(self.layers):
            query, key, value = (_norm(x) @ qkv).chunk(3, dim=-1)
            self.cache[block, i, 0, inside], self.cache[block, i, 1, inside] = key, value
            past = self.cache[: block + 1, i].transpose(0, 1).reshape(2, -1, WIDTH)[:, :end]
            heads = [t.reshape(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for t in (query, *past)]
            seen = scaled_dot_product_attention(*heads, attn_mask=visible)
            x = x + seen.transpose(0, 1).reshape(-1, WIDTH) @ out
            x = x + gelu(_norm(x) @ up) @ down
        return _norm(x) @ self.embedding.T

    @staticmethod
    def _positions(start: int, count: int) -> Tensor:
        angle = torch.arange(start, start + count)[:, None] / 10_000 ** torch.linspace(
            0, 1, WIDTH // 2
        )
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


def _norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def block_keys(tokens: Sequence[int]) -> list[bytes]:
    """One key per full block: a hash of its tokens and, through the block before, of everything in
    front of them. Two prompts share keys exactly as far as they share a beginning."""
    keys, chain = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chain = hashlib.sha256(
            chain + b"".join(t.to_bytes(4, "little") for t in tokens[start : start + BLOCK_TOKENS])
        ).digest()
        keys.append(chain)
    return keys


def namespace(model: TinyModel) -> Namespace:
    """What must agree for the bytes to mean the same. Another model never sees them."""
    return Namespace.of(
        model.cache[0].nbytes,
        {
            "model": f"tiny {LAYERS}x{WIDTH}, {HEADS} heads",
            "weights": f"torch generator, seed {SEED}",
            "dtype": str(model.cache.dtype),
            "layout": "layer, key or value, token, width",
            "block_tokens": str(BLOCK_TOKENS),
        },
    )


def answer(
    model: TinyModel, cache: TieredCache, prefix: list[int], question: list[int]
) -> dict[str, Any]:
    """Greedy answer to a question about a prefix, computing no block that the cache has."""
    started = time.perf_counter()
    keys = block_keys(prefix)
    hoped = cache.lookup(keys)
    loaded = cache.load(keys[:hoped], model.cache[:hoped])
    for block in range(loaded, len(keys)):
        start = block * BLOCK_TOKENS
        model.step(prefix[start : start + BLOCK_TOKENS], start)
    ready = time.perf_counter() - started
    cache.offload(keys[loaded:], model.cache[loaded : len(keys)])

    logits = model.step(question, len(prefix))
    said: list[int] = []
    digest = hashlib.sha256()
    for i in range(ANSWER_TOKENS):
        digest.update(logits[-1].numpy().tobytes())
        said.append(int(logits[-1].argmax()))
        logits = model.step(said[-1:], len(prefix) + len(question) + i)
    return {
        "loaded_blocks": loaded,
        "computed_blocks": len(keys) - loaded,
        "prefix_ready_s": round(ready, 4),
        "answer": said,
        "logits_sha256": digest.hexdigest(),
    }


def process(directory: Path) -> dict[str, Any]:
    """What one process does: open the vault, answer, close."""
    torch.set_num_threads(1)  # so that the figures mean the same on a busy machine
    draw = torch.Generator().manual_seed(1)
    prefix = torch.randint(VOCABULARY, (PREFIX_TOKENS,), generator=draw).tolist()
    question = torch.randint(VOCABULARY, (QUESTION_TOKENS,), generator=draw).tolist()
    model = TinyModel(PREFIX_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS)
    # Here the key lies beside the vault, which protects nothing; kvvault warns about it. Without
    # `provider` it goes to your data directory, and there are better places still.
    path, provider = directory / "vault", f"file:{directory.absolute() / 'root.key'}"
    opened = (Vault.open if path.exists() else Vault.create)(path, provider=provider)
    budget = 2 * model.cache.nbytes
    with (
        opened as vault,
        TieredCache.open(vault, "alice", namespace(model), dram_bytes=budget) as cache,
        torch.inference_mode(),
    ):
        return answer(model, cache, prefix, question)


def both(directory: Path) -> dict[str, Any]:
    """Two processes: the first one computes, the second one finds what the first one left."""
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "--process", "--vault", str(directory)],
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
        )
        for _ in range(2)
    ]
    first, second = runs
    return {
        "prefix_tokens": PREFIX_TOKENS,
        "bytes_on_disk": sum(f.stat().st_size for f in directory.glob("vault/segments/*")),
        "first": first,
        "second": second,
        "identical": all(first[k] == second[k] for k in ("answer", "logits_sha256")),
        "speedup": round(first["prefix_ready_s"] / second["prefix_ready_s"], 1),
    }


def story(result: dict[str, Any]) -> str:
    first, second = result["first"], result["second"]
    return (
        f"first process:  {first['computed_blocks']} blocks of {BLOCK_TOKENS} tokens computed in "
        f"{first['prefix_ready_s']:.2f} s; "
        f"{result['bytes_on_disk'] / 1e6:.0f} MB of ciphertext on disk\n"
        f"second process: {second['loaded_blocks']} blocks loaded in "
        f"{second['prefix_ready_s']:.2f} s, {result['speedup']:.0f} times faster\n"
        f"answers and logits: {'identical' if result['identical'] else 'DIFFERENT'}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vault", type=Path, metavar="DIR", help="default: a temporary directory")
    parser.add_argument("--process", action="store_true", help="be one process, not both")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvvault-example-") as temporary:
        directory = args.vault or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        result = process(directory) if args.process else both(directory)
    plain = args.process or args.json
    sys.stdout.write(json.dumps(result) + "\n" if plain else story(result))
    return 0 if result.get("identical", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
