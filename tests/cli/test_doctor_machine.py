"""doctor: what it finds about the machine, in one that the test made up."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvvault.doctor import Machine, Status, diagnose_machine, machine, residue, worst
from tests.cli.support import make_region

# -- the machine ---------------------------------------------------------------------------------


def test_a_good_machine(surroundings: Machine) -> None:
    findings = [f for f in diagnose_machine(surroundings) if f.name != "vllm"]
    assert worst(findings) is Status.OK, findings


@pytest.mark.parametrize(
    ("area", "files", "expected"),
    [
        ("/dev/sda2", {}, Status.WARN),
        ("/swapfile", {}, Status.WARN),
        ("/dev/dm-0", {"class/block/dm-0/dm/uuid": "LVM-xyz"}, Status.WARN),
        ("/dev/dm-0", {"class/block/dm-0/dm/uuid": "CRYPT-LUKS2-xyz"}, Status.OK),
        ("/dev/zram0", {"class/block/zram0/backing_dev": "none\n"}, Status.OK),
        ("/dev/zram0", {"class/block/zram0/backing_dev": "/dev/sda3\n"}, Status.WARN),
    ],
)
def test_swap(surroundings: Machine, area: str, files: dict[str, str], expected: Status) -> None:
    with (surroundings.proc / "swaps").open("a") as swaps:
        swaps.write(f"{area}  partition  8388604  0  -2\n")
    for name, text in files.items():
        (surroundings.sys / name).parent.mkdir(parents=True)
        (surroundings.sys / name).write_text(text)
    assert worst(machine.check_swap(surroundings.proc, surroundings.sys)) is expected


@pytest.mark.parametrize(
    ("pattern", "limit", "expected"),
    [
        ("core", 0, Status.OK),
        ("core", -1, Status.WARN),
        ("core", 1024, Status.WARN),
        ("", -1, Status.OK),
        ("|/lib/systemd/systemd-coredump %P", 0, Status.WARN),
    ],
)
def test_core_dumps(surroundings: Machine, pattern: str, limit: int, expected: Status) -> None:
    (surroundings.proc / "sys/kernel/core_pattern").write_text(pattern + "\n")
    assert worst(machine.check_core_dumps(surroundings.proc, limit)) is expected


def test_a_proc_that_cannot_be_read(tmp_path: Path) -> None:
    assert worst(machine.check_swap(tmp_path, tmp_path)) is Status.WARN
    assert worst(machine.check_core_dumps(tmp_path, 0)) is Status.WARN
    assert machine.check_core_dumps(Path("/proc"))  # this process's own limit


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('class C:\n    prefix_caching_hash_algo: A = "sha256_cbor"', Status.OK),
        ('class C:\n    prefix_caching_hash_algo: A = "xxhash"', Status.FAIL),
        ('class C:\n    prefix_caching_hash_algo: A = "builtin"', Status.FAIL),
        ("class C:\n    prefix_caching_hash_algo: A = other()", Status.WARN),
        ("class C:", Status.WARN),
        ("\0", Status.WARN),
        ("", Status.WARN),
    ],
)
def test_prefix_hash(surroundings: Machine, source: str, expected: Status) -> None:
    vllm = surroundings.vllm()
    assert vllm is not None
    (vllm / "config/cache.py").write_text(source)
    assert worst(machine.check_prefix_hash(vllm, {})) is expected


def test_prefix_hash_seed(surroundings: Machine) -> None:
    vllm = surroundings.vllm()
    assert worst(machine.check_prefix_hash(vllm, {"PYTHONHASHSEED": ""})) is Status.OK
    assert worst(machine.check_prefix_hash(vllm, {"PYTHONHASHSEED": "0"})) is Status.WARN
    assert machine.check_prefix_hash(None, {}) == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [(None, Status.OK), ("0.32.0", Status.OK), ("0.32.5", Status.OK), ("0.320", Status.WARN)],
)
def test_vllm_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, expected: Status
) -> None:
    monkeypatch.setattr(machine, "vllm_version", lambda: version)
    assert worst(machine.check_vllm()) is expected


def test_vllm_is_found_without_being_imported() -> None:
    code = (
        "import sys; from kvvault.doctor import machine; machine.check_vllm();"
        "machine.check_prefix_hash(machine.vllm_directory(), {});"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- plaintext residue ---------------------------------------------------------------------------


def regions(machine: Machine) -> list[residue.Region]:
    return residue.find_regions(machine.shm, machine.proc)


def test_stale_regions_are_plaintext(surroundings: Machine) -> None:
    assert worst(residue.check_residue(regions(surroundings))) is Status.OK
    make_region(surroundings)
    make_region(surroundings, "vllm_ec_abc.mmap")
    make_region(surroundings, "something_else.mmap")
    found = regions(surroundings)
    assert [region.name for region in found] == ["vllm_ec_abc.mmap", "vllm_offload_abc.mmap"]
    assert residue.removable(found) == found
    [finding] = residue.check_residue(found)
    assert finding.status is Status.FAIL
    assert "16384 bytes" in finding.what
    assert "--fix" in finding.hint


@pytest.mark.parametrize("chunk_mib", [16, 24])
@pytest.mark.parametrize("readers", [1, 8])
def test_a_queue_of_vllm_s_is_plaintext_too(
    surroundings: Machine, chunk_mib: int, readers: int
) -> None:
    """Its tokens, its tenants. What else Python programs share is left alone."""
    queue = make_region(surroundings, "psm_0a1b2c3d")
    os.truncate(queue, 10 * ((chunk_mib << 20) + 1 + readers))
    for i, size in enumerate((0, 4096, 160 << 20, (160 << 20) + 10, (160 << 20) + 21)):
        os.truncate(make_region(surroundings, f"psm_{i:08x}"), size)
    found = regions(surroundings)
    assert [region.name for region in found] == [queue.name]
    assert residue.removable(found) == found
    assert worst(residue.check_residue(found)) is Status.FAIL
    (surroundings.proc / "1/fd/3").symlink_to(queue)
    assert residue.removable(regions(surroundings)) == []


def map_line(path: Path) -> str:
    info = path.stat()
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    return f"7f00-7f01 rw-s 00000000 {device} {info.st_ino}   /dev/shm/{path.name}\n"


def test_a_mapped_region_is_not_stale(surroundings: Machine) -> None:
    path = make_region(surroundings)
    (surroundings.proc / "1/maps").write_text(map_line(path))
    assert worst(residue.check_residue(regions(surroundings))) is Status.OK
    assert residue.removable(regions(surroundings)) == []


def test_an_open_region_is_not_stale(surroundings: Machine) -> None:
    path = make_region(surroundings)
    (surroundings.proc / "1/fd/3").symlink_to(path)
    (surroundings.proc / "1/fd/4").symlink_to("/nonexistent")
    assert residue.removable(regions(surroundings)) == []


@pytest.mark.parametrize(
    ("uid", "mode", "expected"),
    [("ours", 0o600, False), ("other", 0o600, True), ("other", 0o666, False)],
)
def test_processes_that_hide_their_maps(
    surroundings: Machine, monkeypatch: pytest.MonkeyPatch, uid: str, mode: int, expected: bool
) -> None:
    make_region(surroundings, mode=mode)
    number = os.geteuid() if uid == "ours" else os.geteuid() + 1
    (surroundings.proc / "1/status").write_text(f"Uid:\t{number}\t{number}\t{number}\t{number}\n")

    def denied(_process: Path) -> set[tuple[int, int]]:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(residue, "_mapped", denied)
    assert bool(residue.removable(regions(surroundings))) is expected
    finding = residue.check_residue(regions(surroundings))
    assert worst(finding) is (Status.FAIL if expected else Status.WARN)


def test_without_a_proc_nothing_is_certain(surroundings: Machine) -> None:
    make_region(surroundings)
    empty = surroundings.shm / "no-proc"
    empty.mkdir()
    assert residue.removable(residue.find_regions(surroundings.shm, empty)) == []
    assert residue.removable(residue.find_regions(surroundings.shm, empty / "missing")) == []
    assert residue.find_regions(empty / "missing", surroundings.proc) == []


def test_links_are_never_removed(surroundings: Machine, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (surroundings.shm / "vllm_offload_x.mmap").symlink_to(tmp_path / "precious")
    assert residue.removable(regions(surroundings)) == []
    assert worst(residue.check_residue(regions(surroundings))) is Status.FAIL


def test_only_the_file_that_was_looked_at_is_removed(surroundings: Machine) -> None:
    path = make_region(surroundings)
    [region] = regions(surroundings)
    path.unlink()
    (surroundings.shm / "keeps the inode").touch()
    make_region(surroundings)
    assert not residue.remove_region(region, surroundings.shm, surroundings.proc)
    assert path.exists()
    (surroundings.proc / "1/maps").write_text(map_line(path))
    [region] = regions(surroundings)
    assert not residue.remove_region(region, surroundings.shm, surroundings.proc)
    (surroundings.proc / "1/maps").write_text("")
    assert residue.remove_region(region, surroundings.shm, surroundings.proc)
    assert not path.exists()
    assert not residue.remove_region(region, surroundings.shm, surroundings.proc)


def test_a_real_process_that_maps_it(memory: Path) -> None:
    shm = memory / "real-shm"
    shm.mkdir()
    path = shm / "vllm_offload_real.mmap"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    assert [r.used for r in residue.find_regions(shm, Path("/proc"))] == [True]
    mapped.close()
    assert [r.used for r in residue.find_regions(shm, Path("/proc"))] == [False]
