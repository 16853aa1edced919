"""The memory under a tiered cache."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvvault.tiering import device

pytestmark = pytest.mark.torch

PAGE = mmap.PAGESIZE


def test_slots_are_page_aligned_and_apart() -> None:
    memory = device.HostMemory(3, 2 * PAGE)
    for slot in range(3):
        assert memory.tensor(slot).data_ptr() % PAGE == 0
        assert memory.tensor(slot).shape == (2 * PAGE,)
        memory.tensor(slot).fill_(slot + 1)
    for slot in range(3):
        assert bytes(memory.view(slot)) == bytes([slot + 1]) * 2 * PAGE
    memory.view(1)[:] = bytes(2 * PAGE)  # the same memory, seen from the vault
    assert memory.tensor(1).sum() == 0
    assert memory.tensor(2).sum() == 3 * 2 * PAGE
    memory.close()


def test_it_is_in_no_file_and_in_no_core_dump() -> None:
    memory = device.HostMemory(64, 16 * PAGE)
    address = memory.tensor(0).data_ptr()
    maps = Path("/proc/self/smaps").read_text()
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", maps)[1:]:
        low, high = (int(x, 16) for x in part.split(" ", 1)[0].split("-"))
        if low <= address < high:
            header, flags = part.splitlines()[0], part.split("VmFlags:")[1].split()
            assert header.split()[1:5] == ["rw-p", "00000000", "00:00", "0"]  # private, anonymous
            assert "dd" in flags  # not dumped
            return
    pytest.fail("the memory is not mapped")


def test_it_outlives_close_while_somebody_holds_a_view() -> None:
    memory = device.HostMemory(1, PAGE)
    view = memory.view(0)
    memory.close()
    del memory
    view[:] = b"x" * PAGE


class FakeCudart:
    def __init__(self, error: int) -> None:
        self.error = error
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:  # noqa: N802
        if not self.error:
            self.registered.append((address, nbytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered = [entry for entry in self.registered if entry[0] != address]
        return 0


@pytest.mark.parametrize("error", [0, 2])
def test_pinned_where_cuda_is(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    cudart = FakeCudart(error)
    fake = SimpleNamespace(is_available=lambda: True, cudart=lambda: cudart)
    monkeypatch.setattr(torch, "cuda", fake)
    memory = device.HostMemory(2, PAGE)
    assert memory.pinned is (error == 0)
    assert cudart.registered == ([] if error else [(memory.tensor(0).data_ptr(), 2 * PAGE)])
    memory.close()
    memory.close()
    assert cudart.registered == []


def test_copies_to_a_device_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's meta device standing in: every device involved is waited for once, the host
    never."""
    waited: list[torch.device] = []

    def current_stream(where: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(where))

    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    host = [torch.zeros(PAGE, dtype=torch.uint8) for _ in range(3)]
    away = [torch.zeros(PAGE, dtype=torch.uint8, device="meta") for _ in range(3)]
    device.copy(zip(host[1:], host, strict=False))
    assert waited == []
    device.copy(zip(away, host, strict=True))
    assert waited == [torch.device("meta")]
