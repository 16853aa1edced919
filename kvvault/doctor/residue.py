"""Shared-memory regions that vLLM left behind: plaintext in ``/dev/shm``.

vLLM keeps its CPU tier (and its encoder cache) in a file below ``/dev/shm`` while its workers
start, or for as long as they run, depending on version and device. Another file is the queue by
which its scheduler tells its workers what to compute: tokens of prompts, and what requests say of
themselves. A process that is killed leaves the file, with plaintext in it, until somebody removes
it or the machine restarts.

A region is *stale* when no process maps it or has it open. Only what ``/proc`` shows can be judged:

- another user's process hides its maps from us, but vLLM makes its regions with mode 0600, so only
  processes of their owner (and root's) can have opened them; one of *our* processes that hides its
  maps makes the answer a guess, and a guess removes nothing;
- processes of another PID namespace that shares ``/dev/shm`` (containers with host IPC) are
  invisible; removing a name takes nothing from a process that has mapped the file already.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvvault.doctor.findings import Finding, fail, ok, warn

__all__ = ["Region", "check_residue", "find_regions", "removable", "remove_region"]

_NAME: Final = re.compile(r"vllm_(?:offload|ec)_.*\.mmap|(?P<python>psm_[0-9a-f]{8})", re.DOTALL)
"""The latter is Python's for any shared memory: vLLM's queues are told by their size."""

_CHUNKS: Final = 10
_MIB: Final = 1 << 20
_MOST_READERS: Final = 1024
_NAME_OF_CHECK: Final = "plaintext residue"


@dataclass(frozen=True, slots=True)
class Region:
    """One file below ``/dev/shm`` whose name is that of a vLLM region."""

    name: str
    size: int
    """Bytes."""
    device: int
    inode: int
    ours: bool
    """A regular file of this user: only such a one is ever removed."""
    used: bool
    certain: bool
    """Whether every process could be looked at; False makes "not used" a guess."""


def find_regions(shm: Path, proc: Path) -> list[Region]:
    """All regions, by name. An unreadable or absent `shm` has none."""
    found: list[tuple[str, os.stat_result]] = []
    try:
        with os.scandir(shm) as entries:
            for entry in entries:
                if name := _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        if not name["python"] or _is_queue(info.st_size):
                            found.append((entry.name, info))
    except OSError:
        return []
    if not found:
        return []
    look = _look_at_processes(proc, {(info.st_dev, info.st_ino) for _, info in found})
    return sorted((_region(name, info, look) for name, info in found), key=lambda r: r.name)


def _is_queue(size: int) -> bool:
    """Whether a region is as large as a queue of vLLM's: ten chunks of whole MiB, and for each of
    them a byte and one more for each reader (vLLM 0.32, `ShmRingBuffer`)."""
    chunk, rest = divmod(size, _CHUNKS * _MIB)
    return chunk > 0 and rest % _CHUNKS == 0 and 2 <= rest // _CHUNKS <= 1 + _MOST_READERS


def _region(name: str, info: os.stat_result, look: _Look) -> Region:
    private = not stat.S_IMODE(info.st_mode) & 0o077
    return Region(
        name=name,
        size=info.st_size,
        device=info.st_dev,
        inode=info.st_ino,
        ours=stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid(),
        used=(info.st_dev, info.st_ino) in look.used,
        certain=look.saw_ours if private else look.saw_all,
    )


def removable(regions: Sequence[Region]) -> list[Region]:
    """Those that `remove_region` may take: ours, and certainly used by nobody."""
    return [region for region in regions if region.ours and region.certain and not region.used]


def remove_region(region: Region, shm: Path, proc: Path) -> bool:
    """Remove a region, if it is still the same file and still nobody uses it.

    :returns: whether it was removed.
    :raises OSError: the system refuses.
    """
    for now in removable(find_regions(shm, proc)):
        if (now.name, now.device, now.inode) == (region.name, region.device, region.inode):
            directory = os.open(shm, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.unlink(region.name, dir_fd=directory)
            except FileNotFoundError:
                return False
            finally:
                os.close(directory)
            return True
    return False


def check_residue(regions: Sequence[Region]) -> list[Finding]:
    """One finding for all regions: stale ones are plaintext that outlived its engine."""
    stale = [region for region in regions if not region.used]
    if not stale:
        count = len(regions)
        what = f"{count} shared-memory regions, all in use" if count else "no shared-memory regions"
        return [ok(_NAME_OF_CHECK, what)]
    size = sum(region.size for region in stale)
    what = f"{len(stale)} shared-memory regions of vLLM, {size} bytes of plaintext, are left over"
    if removable(stale):
        return [fail(_NAME_OF_CHECK, what, "remove them: kvvault doctor --fix")]
    if all(region.ours for region in stale):
        hint = "run doctor as root, which can see what every process maps"
        return [warn(_NAME_OF_CHECK, f"{what}, or used by a process that hides its maps", hint)]
    return [
        fail(_NAME_OF_CHECK, what, "they belong to another user: run doctor --fix as that user")
    ]


@dataclass(slots=True)
class _Look:
    """What the processes showed."""

    used: set[tuple[int, int]] = field(default_factory=set)
    """(device, inode) of the wanted files that somebody maps or has open."""
    saw_ours: bool = False
    """Whether each of this user's processes could be looked at."""
    saw_all: bool = False


def _look_at_processes(proc: Path, wanted: set[tuple[int, int]]) -> _Look:
    look = _Look()
    for number, process in enumerate(_processes(proc)):
        if number == 0:
            look.saw_ours = look.saw_all = True  # without any process, this is no /proc
        try:
            look.used |= _mapped(process) & wanted
            look.used |= _opened(process) & wanted
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except OSError:
            look.saw_all = False
            look.saw_ours = look.saw_ours and not _is_ours(process)
    return look


def _is_ours(process: Path) -> bool:
    """Whether a process runs as this user. From its status, which everybody may read: a process
    that forbids core dumps looks like root's in the owner of its directory."""
    try:
        for line in (process / "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return str(os.geteuid()).encode() in line.split()[1:]
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _processes(proc: Path) -> Iterator[Path]:
    try:
        names = os.listdir(proc)
    except OSError:
        return
    for name in names:
        if name.isdigit():
            yield proc / name


def _mapped(process: Path) -> set[tuple[int, int]]:
    files: set[tuple[int, int]] = set()
    with open(process / "maps", "rb") as lines:
        for line in lines:
            # address perms offset major:minor inode path
            fields = line.split(maxsplit=5)
            if len(fields) >= 5 and fields[4] != b"0":
                major, _, minor = fields[3].partition(b":")
                files.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return files


def _opened(process: Path) -> set[tuple[int, int]]:
    files: set[tuple[int, int]] = set()
    for fd in os.listdir(process / "fd"):
        link = process / "fd" / fd
        try:
            # The name first: a stat could hang, on somebody's dead network mount.
            target = os.path.basename(os.readlink(link)).removesuffix(" (deleted)")
            if _NAME.fullmatch(target):
                info = os.stat(link)
                files.add((info.st_dev, info.st_ino))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return files
