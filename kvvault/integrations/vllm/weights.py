"""Which weights a model has, so that KV computed with other weights is never taken for theirs.

Two sources are accepted, in this order, and nothing else:

* A Hugging Face snapshot: the commit that the revision resolved to. Commits are immutable.
* A local directory: SHA-256 over the whole content of the weight files and of every other file that
  can change what the model computes.

Headers and sizes alone would not do: fine-tuned checkpoints of one base model agree in both and in
`config.json`, and serving one with the KV of the other is the silent kind of wrong. Reading the
whole content costs seconds per ten gigabytes once, in the process that starts next to the one that
loaded the same files a moment ago. A `DigestCache` remembers a file's digest under its device,
inode, size and change times; the change time (ctime) moves whenever content does, so a remembered
digest is a known one.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvvault.errors import NamespaceError

__all__ = ["DigestCache", "directory_digest", "weights_identity"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""All of them count: which ones are read depends on the load format and on the loader's version."""

_IRRELEVANT = (
    "generation_config.json",  # sampling defaults
    "tokenizer*",  # block hashes are over token ids, so another tokenizer finds other blocks
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.md",
    "*.txt",
    "*.jinja",
    "LICENSE*",
    ".*",
)
"""Left out of the digest; whatever is not named here counts."""

_DESCRIPTIONS = ("*.json", "*.py", "*.yaml", "*.yml")
"""Configuration, quantization, processors, and code of models that bring their own."""


class DigestCache:
    """SHA-256 digests of files by what `stat` says of them, in one JSON file of mode 0600.

    Losing the file or not being able to write it costs time, never correctness; a damaged one is
    ignored. Concurrent writers overwrite each other's additions.
    """

    def __init__(self, path: Path | None) -> None:
        """
        Args:
            path: where to keep digests; None remembers nothing.
        """
        self._path = path
        self._known: dict[str, str] = self._read()
        self._added = False

    def get(self, facts: os.stat_result) -> str | None:
        return self._known.get(self._key(facts))

    def put(self, facts: os.stat_result, digest: str) -> None:
        self._known[self._key(facts)] = digest
        self._added = True

    def save(self) -> None:
        """Write additions, atomically. Failures are ignored: it is a cache."""
        if self._path is None or not self._added:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".weights-")
            with os.fdopen(descriptor, "w") as file:
                json.dump({"version": 1, "sha256": self._known}, file)
            os.replace(temporary, self._path)
        except OSError:
            return
        self._added = False

    @staticmethod
    def _key(facts: os.stat_result) -> str:
        return ":".join(
            str(part)
            for part in (
                facts.st_dev,
                facts.st_ino,
                facts.st_size,
                facts.st_mtime_ns,
                facts.st_ctime_ns,
            )
        )

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            if self._path.stat().st_uid != os.getuid():
                return {}
            document = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        known = document.get("sha256") if isinstance(document, dict) else None
        if not isinstance(known, dict) or document.get("version") != 1:
            return {}
        return {
            str(key): value
            for key, value in known.items()
            if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)
        }


def weights_identity(location: str, commit: str | None, cache: DigestCache) -> str:
    """Name the weights at a model's location.

    Args:
        location: what vLLM loaded from: a local directory or a repository id.
        commit: the commit that Hugging Face resolved, where it did.
        cache: known digests of local files; additions are saved.

    Returns:
        `hf:<repository>@<commit>` or `sha256:<hex>`.

    Raises:
        NamespaceError: neither can be had; for instance a single file, an object store, or a
            repository whose revision was not resolved.
    """
    path = Path(location)
    if path.is_dir():
        snapshot = _snapshot(path)
        if snapshot is not None:
            return snapshot
        return f"sha256:{directory_digest(path, cache)}"
    if commit is not None and _COMMIT.fullmatch(commit) and not path.exists():
        return f"hf:{location}@{commit}"
    raise NamespaceError(
        "it cannot be told which weights the model has, so its KV cannot be kept",
        hint="serve a local directory, or a Hugging Face repository that resolves to a commit",
    )


def _snapshot(path: Path) -> str | None:
    """A directory inside a Hugging Face cache is named after the commit it holds."""
    parts = path.resolve().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not _COMMIT.fullmatch(parts[-1]):
        return None
    repository = _REPOSITORY.fullmatch(parts[-3])
    if repository is None:
        return None
    return f"hf:{repository['owner']}/{repository['name']}@{parts[-1]}"


def directory_digest(path: Path, cache: DigestCache, *, threads: int = 4) -> str:
    """SHA-256, in hex, over names, sizes and contents of the files that make the model.

    Raises:
        NamespaceError: there are no weights, a file changes while it is read, or cannot be read.
    """
    files = _relevant(path)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvvault-weights") as pool:
            digests = list(pool.map(lambda name: _file_digest(path / name, cache), files))
    except OSError as error:
        raise NamespaceError(
            f"the model's files cannot be read: {error.strerror or type(error).__name__}",
            hint="let the serving user read every file of the model's directory",
        ) from error
    cache.save()
    whole = hashlib.sha256(b"kvvault weights 1")
    for name, digest in zip(files, digests, strict=True):
        whole.update(f"{len(name.encode())}:{name}:{digest.size}:{digest.sha256}\n".encode())
    return whole.hexdigest()


def _relevant(path: Path) -> Sequence[str]:
    names = sorted(
        entry.name
        for entry in os.scandir(path)
        if entry.is_file() and not any(fnmatch.fnmatchcase(entry.name, p) for p in _IRRELEVANT)
    )

    def matching(patterns: tuple[str, ...]) -> list[str]:
        return [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]

    weights = matching(_WEIGHTS)
    if not weights:
        raise NamespaceError(
            "the model's directory holds no weight files",
            hint="serve a directory with safetensors files",
        )
    return sorted({*weights, *matching(_DESCRIPTIONS)})


@dataclass(frozen=True, slots=True)
class _Digest:
    size: int
    sha256: str


def _file_digest(path: Path, cache: DigestCache) -> _Digest:
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise NamespaceError(
                "the model's directory holds something that is not a file among its weights",
                hint="replace it by a regular file",
            )
        known = cache.get(before)
        if known is not None:
            return _Digest(before.st_size, known)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    ):
        raise NamespaceError(
            "a file of the model changed while it was read",
            hint="start again when the model's directory is complete",
        )
    cache.put(before, digest)
    return _Digest(before.st_size, digest)
