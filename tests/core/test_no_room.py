"""No room for the catalog where SQLite does not call it a full disk: a quota, a limit on files.

The limit on the size of files (RLIMIT_FSIZE) is one that a test can have for real; a quota and it
take the same way. It holds for a whole process, so each test has one of its own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.errors import StorageError
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.testing import ManualClock
from tests.core.support import SMALL, Home, assert_hits, keys, namespace, put, segment_of

ROOT = Path(__file__).parents[2]


@contextmanager
def limited(bytes_: int) -> Iterator[None]:
    """No file can grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def alone(function: str, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.test_no_room", function, str(place)],
        cwd=ROOT,
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def deletes(place: Path) -> None:
    """A deletion that cannot be written down removes the files, but for what a hold keeps."""
    home = Home(place / "vault", options=SMALL)
    with home.create() as vault:
        scope, held = vault.scope("alice", namespace()), vault.scope("bob", namespace())
        put(vault, scope, keys(4))
        put(vault, held, keys(4), "b")
        vault.place_hold(tenant="bob", reason="a case", actor="somebody")
        gone, stays = segment_of(vault, scope, keys(1)[0]), segment_of(vault, held, keys(1)[0])
        assert gone is not None
        assert stays is not None
        plan = vault.plan_segments([gone, stays])
        assert vault.catalog.empty_log()
        with limited(4096):
            with pytest.raises(StorageError) as caught:
                vault.execute(plan)
            assert caught.value.full
            assert [path.stem for path in home.segment_files()] == [stays.hex()]
        assert vault.execute(plan).segments == 1  # with room again, it is written down
        assert_hits(vault, held, keys(4), "b")


def goes_on(place: Path) -> None:
    """Who holds the lease of the jobs keeps it: they are what makes room."""
    catalog = Catalog.open(place / "catalog.sqlite3", create=True)
    catalog.poll()  # as a vault does: its connection keeps the catalog's files
    clock = ManualClock()
    lease = Lease(catalog, clock, BootClock("boot", clock.monotonic), length_s=15.0)
    assert lease.acquire()
    assert catalog.empty_log()
    clock.advance(14.0)
    with limited(4096):
        assert lease.acquire()
        clock.advance(14.0)
        assert lease.held
    catalog.close()


def makes_no_keys(place: Path) -> None:
    """What cannot be written down makes no root keys: a provider's place may be small."""
    home = Home(place / "vault", options=SMALL)
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(4))
        assert vault.delete_segments([facts.segment_id for facts in vault.segments()]) == 1
        assert vault.catalog.empty_log()
        before = home.provider.epochs()
        with limited(4096):
            for _ in range(3):
                with pytest.raises(StorageError):
                    vault.purge()
            assert home.provider.epochs() == before
            other = Home(place / "other", options=SMALL)
            for _ in range(3):
                with pytest.raises(StorageError):
                    other.create() if not other.path.exists() else other.open()
            assert other.provider.epochs() == []
        assert vault.purge().deletions == 1
        assert len(home.provider.epochs()) == 1
        assert home.provider.epochs() != before


@pytest.mark.parametrize("what", [deletes, goes_on, makes_no_keys])
def test_a_catalog_at_a_limit_is_a_full_one(tmp_path: Path, what: object) -> None:
    alone(getattr(what, "__name__", ""), tmp_path)


def test_a_broken_catalog_is_no_full_one(tmp_path: Path) -> None:
    """What is deleted is written down first as long as that may still be possible."""
    path = tmp_path / "catalog.sqlite3"
    catalog = Catalog.open(path, create=True)
    another = Catalog(path, read_only=False)
    try:
        catalog.write(lambda c: operations.put_meta(c, "one", bytes(9000)))
        os.truncate(tmp_path / "catalog.sqlite3-wal", 0)
        with pytest.raises(StorageError, match="IOERR") as caught:
            another.write(lambda c: operations.put_meta(c, "two", b"2"))
        assert not caught.value.full
    finally:
        another.close()
        catalog.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
