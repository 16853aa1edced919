"""Checks of one vault. None changes anything."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvvault import layout
from kvvault.catalog import database, migrate
from kvvault.catalog.schema import HEAD
from kvvault.crypto.providers.base import ProviderInfo
from kvvault.doctor.findings import Finding, fail, ok, warn
from kvvault.doctor.pending import PendingRepair
from kvvault.errors import KvvaultError
from kvvault.model import PAGE_BYTES, NamespaceFacts, SegmentFacts, TenantFacts
from kvvault.segments.format import (
    CATALOG_NAME,
    DESCRIPTOR_NAME,
    FORMAT_VERSION,
    LOCKS_NAME,
    SEGMENTS_NAME,
    parse_segment_name,
)

__all__ = [
    "Tree",
    "check_catalog",
    "check_clock",
    "check_descriptor",
    "check_direct",
    "check_key_file",
    "check_key_location",
    "check_pending",
    "check_sqlite",
    "check_tree",
    "read_tree",
]

_TOP: Final = frozenset(
    {
        DESCRIPTOR_NAME,
        f".{DESCRIPTOR_NAME}.new",
        CATALOG_NAME,
        f"{CATALOG_NAME}-wal",
        f"{CATALOG_NAME}-shm",
        f"{CATALOG_NAME}-journal",
        LOCKS_NAME,
        SEGMENTS_NAME,
    }
)
_DIRECTORIES: Final = frozenset({LOCKS_NAME, SEGMENTS_NAME})
_PROBE: Final = ".probe-"
_SAFE_YEAR: Final = 1_735_689_600.0
"""2025-01-01 UTC, before the first release: a clock that says less was never set."""
_SKEW_S: Final = 5.0


# -- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a vault, links not followed."""

    name: str
    """Relative to the vault; the vault itself is ``.``."""
    mode: int
    owner: int
    links: int


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything in a vault's directory, as it was before anything opened it."""

    path: Path
    entries: tuple[Entry, ...]


def read_tree(path: Path) -> Tree:
    """List a vault.

    :raises OSError: it cannot be listed.
    """
    return Tree(path, tuple(_walk(path)))


def _walk(path: Path) -> Iterator[Entry]:
    yield _entry(".", os.stat(path))
    for name in sorted(os.listdir(path)):
        info = os.lstat(path / name)
        yield _entry(name, info)
        if name in _DIRECTORIES and stat.S_ISDIR(info.st_mode):
            with os.scandir(path / name) as children:
                for child in children:
                    try:
                        yield _entry(f"{name}/{child.name}", child.stat(follow_symlinks=False))
                    except FileNotFoundError:
                        continue  # a segment that was deleted meanwhile


def _entry(name: str, info: os.stat_result) -> Entry:
    return Entry(name, info.st_mode, info.st_uid, info.st_nlink)


def check_tree(tree: Tree, uid: int) -> list[Finding]:
    """Modes, owner, links, and files that are not kvvault's (REQ-F1, REQ-F2)."""
    return [
        _check_owner(tree, uid),
        _check_modes(tree),
        _check_links(tree),
        _check_foreign(tree),
    ]


def _check_owner(tree: Tree, uid: int) -> Finding:
    others = [entry for entry in tree.entries if entry.owner != uid]
    if not others:
        return ok("owner", f"everything belongs to user {uid}")
    return fail(
        "owner",
        f"{_counted(others, 'belong')} to another user than the one running kvvault ({uid})",
        "run kvvault as the vault's owner, or change the owner of what is in it",
    )


def _check_modes(tree: Tree) -> Finding:
    wide = [entry for entry in tree.entries if not stat.S_ISLNK(entry.mode) and entry.mode & 0o077]
    if not wide:
        return ok("modes", "nobody else may read or enter anything")
    return fail(
        "modes", f"{_counted(wide, 'are')} open to other users", f"chmod -R go= {tree.path}"
    )


def _check_links(tree: Tree) -> Finding:
    linked = [
        entry
        for entry in tree.entries
        if stat.S_ISLNK(entry.mode) or (stat.S_ISREG(entry.mode) and entry.links != 1)
    ]
    if not linked:
        return ok("links", "no links")
    return fail(
        "links",
        f"{_counted(linked, 'are')} symbolic links or have a second name",
        "remove the links: what has another name can be changed or kept from elsewhere",
    )


def _check_foreign(tree: Tree) -> Finding:
    foreign = [entry for entry in tree.entries if _is_foreign(entry)]
    if not foreign:
        return ok("foreign files", "nothing in the vault but kvvault's own files")
    return warn(
        "foreign files",
        f"{_counted(foreign, 'are')} not kvvault's",
        "move them away: kvvault neither protects nor deletes them",
    )


def _is_foreign(entry: Entry) -> bool:
    directory, slash, name = entry.name.partition("/")
    if entry.name == ".":
        return not stat.S_ISDIR(entry.mode)
    if not slash:
        expected = stat.S_ISDIR if entry.name in _DIRECTORIES else stat.S_ISREG
        return entry.name not in _TOP or not expected(entry.mode)
    if not stat.S_ISREG(entry.mode):
        return True
    if directory == LOCKS_NAME:
        return False
    return parse_segment_name(name) is None and not name.startswith(_PROBE)


def _counted(entries: Sequence[Entry], verb: str) -> str:
    """ "2 files (the first: segments/x) are"; names are opaque, so they may be shown."""
    noun = "entry" if len(entries) == 1 else "entries"
    verb = {"are": "is", "belong": "belongs"}[verb] if len(entries) == 1 else verb
    return f"{len(entries)} {noun} (first: {entries[0].name!r}) {verb}"


# -- descriptor and catalog ----------------------------------------------------------------------


def check_descriptor(path: Path) -> list[Finding]:
    """Whether there is a vault, of a version that this kvvault reads."""
    try:
        layout.read_descriptor(path)
    except KvvaultError as error:
        return [fail("descriptor", str(error), error.hint)]
    return [ok("descriptor", f"format version {FORMAT_VERSION}")]


def check_sqlite() -> list[Finding]:
    """Version, and whether deleted rows are overwritten (read back, REQ-K6)."""
    version = ".".join(map(str, database.sqlite_version()))
    findings = []
    if database.journal_mode() == "wal":
        findings.append(ok("sqlite", f"version {version}, write-ahead log"))
    else:
        wanted = ".".join(map(str, database.WAL_SAFE_SINCE))
        findings.append(
            warn(
                "sqlite",
                f"version {version} is older than {wanted}: a rollback journal is used, slower",
                "install the pysqlite3 package",
            )
        )
    try:
        with tempfile.TemporaryDirectory(prefix="kvvault-") as scratch:
            catalog = Path(scratch) / CATALOG_NAME
            database.create_file(catalog)
            engine = database.make_engine(catalog, write=True)  # refuses when it is not on
            with engine.connect() as connection:
                on = database.pragma(connection, "secure_delete") == 1
            engine.dispose()
    except (KvvaultError, OSError):
        on = False
    if on:
        findings.append(ok("secure delete", "deleted rows are overwritten"))
    else:
        findings.append(
            fail(
                "secure delete",
                "this SQLite does not overwrite deleted rows",
                "install the pysqlite3 package",
            )
        )
    return findings


def check_catalog(path: Path) -> list[Finding]:
    """Revision, journal mode and integrity of the catalog in the vault at `path`."""
    catalog = layout.catalog_path(path)
    if not layout.catalog_exists(catalog):
        if layout.is_new(path):
            return [warn("catalog", "there is none yet", "it is made when the vault is first used")]
        return [
            fail(
                "catalog",
                "it is missing: nothing that the segments hold can be read",
                "restore it, or open the vault for writing, which destroys the segments",
            )
        ]
    immutable = database.frozen_state(catalog) is not None
    engine = database.make_engine(catalog, write=False, immutable=immutable)
    try:
        with database.translated_errors("check the catalog"), engine.connect() as connection:
            revision = migrate.revision(connection)
            mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
            damage = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    except KvvaultError as error:
        return [fail("catalog", str(error), error.hint)]
    finally:
        engine.dispose()
    if damage != "ok":
        return [
            fail(
                "catalog",
                "SQLite finds damage in it",
                "move catalog.sqlite3* away; the vault then starts empty",
            )
        ]
    if revision != HEAD:
        return [
            warn(
                "catalog",
                f"revision {revision}, this kvvault writes {HEAD}",
                "it is upgraded when the vault is next opened for writing",
            )
        ]
    findings = [ok("catalog", f"revision {revision}, intact")]
    expected = database.journal_mode()
    if mode != expected and not immutable:  # SQLite names no mode it does not use
        findings.append(
            warn(
                "journal mode",
                f"{mode}, expected {expected}",
                "it is changed when the vault is next opened for writing",
            )
        )
    return findings


def check_pending(pending: PendingRepair) -> list[Finding]:
    """Whether a crash left something to repair."""
    if not pending.needed:
        return [ok("recovery", "nothing to repair")]
    return [
        warn(
            "recovery",
            f"to repair: {pending.summary()}",
            "it is done when the vault is next opened for writing (an engine's start)",
        )
    ]


# -- keys ----------------------------------------------------------------------------------------


def check_key_location(info: ProviderInfo, path: Path) -> list[Finding]:
    """Whether the keys are somewhere else than what they protect (REQ-K7)."""
    if info.location is None:
        return [ok("key location", f"not in a file: {info.reason}")]
    try:
        same = layout.same_file_system(info.location, path)
    except OSError:
        return [
            warn("key location", "it could not be looked at", "check the directory of the key file")
        ]
    if not same:
        return [ok("key location", "on another file system than the vault")]
    return [
        warn(
            "key location",
            "on the same file system as the vault: whoever copies the disk has both",
            "move the key file elsewhere and name it with --key-provider",
        )
    ]


def check_key_file(info: ProviderInfo, uid: int) -> list[Finding]:
    """Mode, owner and links of the key file, where there is one."""
    if info.location is None:
        return []
    name = "key file"
    try:
        entry = os.lstat(info.location)
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        return [fail(name, f"it cannot be looked at: {reason}", f"check {info.location}")]
    mode = stat.S_IMODE(entry.st_mode)
    if not stat.S_ISREG(entry.st_mode) or entry.st_nlink != 1:
        return [
            fail(name, "it is a link or has a second name", "replace it by one plain file of yours")
        ]
    if entry.st_uid != uid:
        return [fail(name, "it belongs to another user", "run kvvault as its owner")]
    if mode & 0o077:
        return [
            fail(
                name,
                f"others may read it (mode {mode:04o})",
                f"chmod 600 {info.location}; if others had access, make a new vault",
            )
        ]
    return [ok(name, f"mode {mode:04o}, yours alone")]


# -- direct i/o and clock --------------------------------------------------------------------------


def check_direct(path: Path) -> list[Finding]:
    """Whether the file system takes O_DIRECT, found out by reading the descriptor that way."""
    name = "direct i/o"
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return [warn(name, "this system has none", "KV traffic goes through the page cache")]
    try:
        fd = os.open(path / DESCRIPTOR_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return [
                warn(
                    name,
                    "the file system refuses O_DIRECT: KV traffic goes through the page cache",
                    "put the vault on ext4 or XFS",
                )
            ]
        return [warn(name, "it could not be tried", "check the vault's descriptor")]
    os.close(fd)
    return [ok(name, f"the file system takes O_DIRECT (pages of {PAGE_BYTES} bytes)")]


def check_clock(
    now: float,
    segments: Sequence[SegmentFacts],
    tenants: Sequence[TenantFacts],
    namespaces: Sequence[NamespaceFacts],
) -> list[Finding]:
    """Whether the clock can be right: set at all, and not behind what the catalog has seen."""
    if now < _SAFE_YEAR:
        return [fail("clock", "the clock was never set", "set it, and keep it set (NTP)")]
    seen = [fact.created_at for facts in (segments, tenants, namespaces) for fact in facts]
    ahead = max(seen, default=now) - now
    if ahead > _SKEW_S:
        return [
            warn(
                "clock",
                f"the catalog has seen a time {ahead:.0f} s ahead of the clock",
                "set the clock: it was, or is, wrong",
            )
        ]
    return [ok("clock", "not behind what the catalog has seen")]
