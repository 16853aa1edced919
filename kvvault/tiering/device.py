"""Tensors and the memory behind a tiered cache. The only module of `kvvault.tiering` that imports
torch (the ``torch`` extra)."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvvault.errors import ConfigError

log = logging.getLogger(__name__)


class HostMemory:
    """`count` slots of `block_bytes` bytes in one private, page-aligned mapping.

    The mapping is anonymous, so its plaintext is in no file, and excluded from core dumps. As one
    piece it is neither exceeded nor fragmented; pages cost nothing before their first use. Where
    CUDA is there, it is registered with the driver (pinned, hence all there at once), in place:
    torch's own pinned allocator would round the size up to a power of two.
    """

    def __init__(self, count: int, block_bytes: int) -> None:
        """
        Raises:
            ConfigError: the system does not give that much memory.
        """
        size = count * block_bytes
        try:
            self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as exc:
            raise ConfigError(
                f"{size} bytes of memory cannot be had", hint="lower dram_bytes"
            ) from exc
        for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(getattr(mmap, advice))
        self._bytes = memoryview(self._map)
        self._slots = torch.frombuffer(self._map, dtype=torch.uint8).view(count, block_bytes)
        self._block_bytes = block_bytes
        self.pinned = _register(self._slots)

    def view(self, slot: int) -> memoryview:
        """A slot for the vault; writable."""
        return self._bytes[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def tensor(self, slot: int) -> torch.Tensor:
        """A slot as uint8 of shape (block_bytes,)."""
        return self._slots[slot]

    def close(self) -> None:
        """Unpin. The memory goes when the last view of it does: a thread that hangs in the disk may
        hold one, though it will not touch it."""
        if self.pinned:
            self.pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())


def _register(slots: torch.Tensor) -> bool:
    if not torch.cuda.is_available():
        return False
    error = torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.numel(), 0)
    if int(error):
        log.warning("the cache's memory cannot be pinned (CUDA error %d): slower copies", error)
        return False
    return True


def as_bytes(tensors: Sequence[torch.Tensor], block_bytes: int) -> list[torch.Tensor]:
    """Each tensor as uint8 of shape (block_bytes,), sharing its memory. Any dtype, shape, device.

    Raises:
        ValueError: a tensor is not contiguous or has another size; names no content.
    """
    result = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("a block's tensor must be contiguous")
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes != block_bytes:
            raise ValueError(f"a block has {block_bytes} bytes, a tensor has {nbytes}")
        result.append(tensor.detach().reshape(-1).view(torch.uint8))
    return result


def copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (target, source) pairs of `as_bytes` tensors; returns when the bytes are there.

    Copies to and from a device run on its current stream, behind what the caller queued there, and
    are waited for once. Copies within the host go through numpy: torch would start its thread team
    for each, which on a busy machine waits for cores that the model computes on.
    """
    devices = set()
    # Inference mode: caches made by inference code may be changed in no other.
    with torch.inference_mode():
        for target, source in pairs:
            if target.is_cpu and source.is_cpu:
                np.copyto(target.numpy(), source.numpy())
            else:
                target.copy_(source, non_blocking=True)
                devices |= {t.device for t in (target, source) if not t.is_cpu}
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()


def zero(blocks: Iterable[torch.Tensor]) -> None:
    """Overwrite `as_bytes` tensors with zeros."""
    with torch.inference_mode():
        for block in blocks:
            block.zero_()
