"""What the engine's tests share: caches on small vaults, tensors whose right content is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from kvvault.model import Clock
from kvvault.tiering.engine import TieredCache
from kvvault.tiering.transfers import PoolOptions
from kvvault.vault import Vault
from tests.core.support import BLOCK, content, namespace
from tests.tiering.parts import PATIENCE_S

DIRT = 0xA5


def cache_on(
    vault: Vault,
    slots: int = 8,
    tenant: str = "alice",
    options: PoolOptions | None = None,
    clock: Clock | None = None,
) -> TieredCache:
    return TieredCache.open(
        vault, tenant, namespace(), dram_bytes=slots * BLOCK, options=options, clock=clock
    )


def tensor(key: bytes, owner: str = "alice") -> torch.Tensor:
    """The one right tensor of a block: (16, 128) bfloat16."""
    raw = torch.frombuffer(bytearray(content(owner, key)), dtype=torch.uint8)
    return raw.view(torch.bfloat16).view(16, 128)


def tensors(keys: Sequence[bytes], owner: str = "alice") -> list[torch.Tensor]:
    return [tensor(key, owner) for key in keys]


def dirty(count: int) -> list[torch.Tensor]:
    return [torch.full((BLOCK,), DIRT, dtype=torch.uint8) for _ in range(count)]


def raw(block: torch.Tensor) -> bytes:
    return bytes(block.reshape(-1).view(torch.uint8).numpy())


def check_load(
    cache: TieredCache,
    keys: Sequence[bytes],
    owner: str = "alice",
    timeout_s: float = PATIENCE_S,
) -> int:
    """Load; whatever comes is right, whatever does not is untouched. Returns how many came."""
    blocks = dirty(len(keys))
    loaded = cache.load(keys, blocks, timeout_s=timeout_s)
    for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
        if i < loaded:
            assert raw(block) == content(owner, key)
        else:
            assert raw(block) == bytes([DIRT]) * BLOCK
    return loaded


@contextmanager
def gated(
    patch: pytest.MonkeyPatch, vault: Vault, method: str
) -> Iterator[tuple[threading.Semaphore, Callable[[], None]]]:
    """Inside, `vault.put` or `vault.get` hangs as if in the disk; gives a semaphore that counts the
    calls that hang, and what lets them all go on."""
    began = threading.Semaphore(0)
    answer = threading.Event()
    real = getattr(vault, method)

    def hang(*args: object, **kwargs: object) -> object:
        began.release()
        assert answer.wait(2 * PATIENCE_S)
        return real(*args, **kwargs)

    patch.setattr(vault, method, hang)
    try:
        yield began, answer.set
    finally:
        answer.set()
        patch.setattr(vault, method, real)
