"""What a process does about itself before it holds keys for long (REQ-K8)."""

from __future__ import annotations

import ctypes
import os
import resource

from kvvault.errors import StorageError

__all__ = ["harden_process"]

_PR_SET_DUMPABLE = 4


def harden_process() -> None:
    """Never to leave memory in a core file, and not to be read by a debugger of the same user.

    The kernel writes no core of a process that is not dumpable, also where ``core_pattern`` is a
    pipe, for which the limit on the size does not count; other processes of the same user can
    neither attach to it nor read its ``/proc/PID/mem``.

    Raises:
        StorageError: the system refuses.
    """
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    except (OSError, ValueError, AttributeError) as exc:
        raise StorageError(
            "this process cannot be kept from being dumped",
            hint="look at what confines it (seccomp, container)",
            errno=exc.errno if isinstance(exc, OSError) else None,
        ) from exc
