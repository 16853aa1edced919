"""What must not be found: on the disk without keys, and in logs, errors and reprs at all."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import kvvault.crypto.aead
from kvvault.crypto.providers import EphemeralProvider, FileProvider
from kvvault.errors import KeyUnavailableError, KvvaultError
from kvvault.model import Namespace
from kvvault.testing import FaultyProvider
from kvvault.vault import Vault
from tests.core.support import (
    BLOCK,
    Home,
    content,
    contents,
    dirty,
    flip,
    get,
    key,
    keys,
    namespace,
    put,
)

TENANT = "Canary-Tenant Dr. Änne Mustermann"
TOKENS = [31_415, 92_653, 58_979, 32_384, 62_643, 38_327]


def spellings(secret: bytes) -> list[bytes]:
    """The ways in which bytes come to stand in files and texts."""
    return [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
        repr(secret)[2:-1].encode(),
        str(list(secret))[1:-1].encode(),
    ]


def token_spellings() -> list[bytes]:
    return [
        b"".join(t.to_bytes(4, "little") for t in TOKENS),
        b"".join(t.to_bytes(8, "little") for t in TOKENS),
        b"".join(t.to_bytes(4, "big") for t in TOKENS),
        ",".join(map(str, TOKENS)).encode(),
        ", ".join(map(str, TOKENS)).encode(),
        " ".join(map(str, TOKENS)).encode(),
    ]


def everything_on_disk(*roots: Path) -> dict[str, bytes]:
    """Each name, and what is behind it."""
    found = {}
    for root in roots:
        for directory, _, names in os.walk(root):
            for name in names:
                path = os.path.join(directory, name)
                found[path] = path.encode() + b"\n" + Path(path).read_bytes()
    return found


def hits(haystacks: Iterable[bytes], needles: Iterable[bytes]) -> int:
    needles = list(needles)
    return sum(needle in hay for hay in haystacks for needle in needles)


class TestOnDisk:
    """Promises 1 and 9, REQ-T2: the disk is not an oracle."""

    def test_req_t2_no_name_no_key_no_token_no_plaintext(self, home: Home) -> None:
        block_keys = keys(9)
        # A block whose content holds token ids, as an engine's KV never would, but to find them.
        plain = contents("a", block_keys[:-1])
        plain.append((b"".join(t.to_bytes(8, "little") for t in TOKENS) * 80).ljust(BLOCK, b"."))
        fact = "a fact that stands in clear"
        with home.create() as vault:
            scope = vault.scope(TENANT, Namespace.of(BLOCK, {"model": fact}))
            vault.put(scope, block_keys, plain)
            other = vault.scope("bob", namespace())
            put(vault, other, block_keys, "bob")
            get(vault, scope, block_keys)
            vault.delete_segments([vault.segments()[0].segment_id])
            kept = scope.block_id(next(k for k in block_keys if vault.contains(scope, [k])[0]))
            for moment in ("open", "closed"):
                files = everything_on_disk(home.path)
                haystacks = list(files.values())
                assert any(name.endswith("-wal") for name in files) is (moment == "open")
                # The control: the same search finds what does stand there.
                assert hits(haystacks, [fact.encode()]) > 0
                assert hits(haystacks, spellings(kept)) > 0
                # And nothing of what must not.
                for block_key in block_keys:
                    assert hits(haystacks, spellings(block_key)) == 0
                    assert hits(haystacks, spellings(block_key[:16])) == 0
                for name in (TENANT, TENANT.lower(), "Mustermann", "Canary"):
                    assert hits(haystacks, spellings(name.encode())) == 0
                    assert hits(haystacks, spellings(name.encode("utf-16-le"))) == 0
                assert hits(haystacks, token_spellings()) == 0
                for data in plain:
                    windows = [data[i : i + 64] for i in range(0, BLOCK, 64)]
                    assert hits(haystacks, windows) == 0
                if moment == "open":
                    vault.close()

    def test_the_search_would_find_a_plain_store(self, tmp_path: Path) -> None:
        data = content("a", key(0))
        (tmp_path / key(0).hex()).write_bytes(data)
        haystacks = list(everything_on_disk(tmp_path).values())
        assert hits(haystacks, spellings(key(0))) > 0
        assert hits(haystacks, [data[64:128]]) > 0

    def test_promise_9_a_guess_cannot_be_confirmed(self, home: Home) -> None:
        # Somebody with the disk of one vault, and a vault of their own with the same prompt.
        mine = Home(home.path.with_name("mine"))
        seen: list[set[bytes]] = []
        for one in (home, mine):
            with one.create() as vault:
                put(vault, vault.scope(TENANT, namespace()), keys(8))
            with one.sql() as connection:
                ids = {
                    row[0][i : i + 16]
                    for row in connection.execute("SELECT block_ids FROM extents")
                    for i in range(0, len(row[0]), 16)
                }
                lookups = {row[0] for row in connection.execute("SELECT lookup_id FROM tenants")}
            seen.append(ids | lookups | {p.read_bytes() for p in one.segment_files()})
        assert len(seen[0]) == 8 + 1 + 2
        assert not seen[0] & seen[1]

    def test_the_same_block_is_never_encrypted_to_the_same_bytes(self, home: Home) -> None:
        data = content("a", key(0))
        seen = set()
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            vault.put(scope, keys(12), [data] * 12)
            vault.close()
        for path in home.segment_files():
            raw = path.read_bytes()
            seen |= {raw[i : i + BLOCK] for i in range(0, len(raw), BLOCK)}
        assert len(seen) == 12

    def test_promise_3_no_nonce_twice(self, home: Home) -> None:
        for _ in range(3):
            with home.open() if home.path.exists() else home.create() as vault:
                for tenant in ("alice", "bob"):
                    scope = vault.scope(tenant, namespace())
                    put(vault, scope, keys(200), tenant)
                vault.delete_segments([s.segment_id for s in vault.segments()[:5]])
        with home.sql() as connection:
            nonces = [
                row[0][i : i + 12]
                for row in connection.execute("SELECT nonces FROM extents")
                for i in range(0, len(row[0]), 12)
            ]
            commitments = connection.execute("SELECT commitment FROM segments").fetchall()
        assert len(nonces) > 300
        assert len(set(nonces)) == len(nonces)
        assert len(set(commitments)) == len(commitments)

    def test_promise_1_nothing_is_written_elsewhere(
        self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Nor into the temporary directory, the home directory or the working directory.
        for name in ("TMPDIR", "HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
            (tmp_path / name).mkdir()
            monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.chdir(tmp_path)
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(20))
            get(vault, scope, keys(20))
            vault.verify()
        assert everything_on_disk(tmp_path) == {}


class Secrets:
    """Every key, as it was when it was made: drawn keys and their HKDF outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[bytes] = []
        self._wrap(monkeypatch, "random_key")
        self._wrap(monkeypatch, "_expand")
        self._wrap(monkeypatch, "unwrap_key")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real: Callable[..., bytearray] = getattr(kvvault.crypto.aead, name)

        def remember(*args: Any, **kwargs: Any) -> bytearray:
            made = real(*args, **kwargs)
            # Commitments are public by design.
            if not (name == "_expand" and args[1] == kvvault.crypto.aead._LABEL_COMMITMENT):
                self.drawn.append(bytes(made))
            return made

        monkeypatch.setattr(kvvault.crypto.aead, name, remember)


class TestCanary:
    """REQ-T6: one test that greps everything that is said."""

    def test_req_t6_nothing_secret_is_ever_said(
        self,
        home: Home,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        secrets = Secrets(monkeypatch)
        provider = FaultyProvider(FileProvider.create(tmp_path / "keys"))
        home.provider = provider
        said: list[str] = []
        objects: list[object] = []

        def fails(call: Callable[[], object]) -> None:
            try:
                objects.append(call())
            except (KvvaultError, ValueError, TypeError) as exc:
                said.extend(
                    [
                        str(exc),
                        repr(exc),
                        getattr(exc, "hint", ""),
                        "".join(traceback.format_exception(exc)),
                    ]
                )

        with home.create() as vault:
            scope = vault.scope(TENANT, namespace())
            put(vault, scope, keys(10))
            buffers = dirty(2)
            objects += [
                vault,
                scope,
                scope.destination(vault._governor).tenant,
                vault._ring,
                vault._writer,
            ]
            objects += [vault.get(scope, keys(2), buffers), vault.stats(), vault.counters()]
            objects += [vault.provider_info(), vault.key_warning(), vault.verify()]
            objects += [*vault.segments(), *vault.namespaces(), vault.recovery, vault.options]
            objects += [vault._view, vault._catalog]
            objects += [
                s.cipher(vault._catalog, vault._ring) for s in vault._view._by_number.values()
            ]
            fails(lambda: vault.scope(TENANT + "\n", namespace()))
            fails(lambda: vault.scope(TENANT * 50, namespace()))
            fails(lambda: put(vault, scope, [b""]))
            fails(lambda: vault.put(scope, keys(1), [b"short"]))
            fails(lambda: vault.get(scope, keys(2), dirty(1)))
            # Tampering, loss, deletion, a provider that is down.
            paths = home.segment_files()
            paths[0].write_bytes(flip(paths[0].read_bytes(), 9))
            paths[1].unlink()
            get(vault, scope, keys(10))
            provider.fail(KeyUnavailableError("no answer", hint="wait"), methods={"wrap"})
            fails(lambda: vault.scope(TENANT + " 2", namespace()))
            provider.heal()
            fails(lambda: vault.delete_segments([b"nonsense"]))
            with monkeypatch.context() as patch:
                patch.setattr("kvvault.catalog.schema.meta.name", "meta")
                fails(
                    lambda: vault._catalog.write(
                        lambda c: c.exec_driver_sql("INSERT INTO tenants VALUES (?)", (TENANT,))
                    )
                )
            fails(lambda: vault.forget(TENANT))
        fails(lambda: get(vault, scope, keys(1)))
        with home.open() as vault:
            objects += [vault.recovery, *vault.segments()]
        with home.sql() as connection:
            connection.execute("UPDATE meta SET value = x'00' WHERE name = 'lookup_key'")
        fails(home.open)
        fails(lambda: Vault.open(home.path, provider=EphemeralProvider()))
        home.catalog.write_bytes(b"garbage")
        fails(home.open)
        (home.path / "VAULT").write_text("nonsense")
        fails(home.open)

        for item in objects:
            said += [repr(item), str(item)]
            if dataclasses.is_dataclass(item) and not isinstance(item, type):
                said.append(repr(dataclasses.asdict(item)))
        said += [record.getMessage() for record in caplog.records]
        said += [caplog.text]
        everything = "\n".join(said).encode()
        assert len(secrets.drawn) > 10
        assert len(caplog.records) > 3
        # The control: what may be said is found.
        assert hits([everything], [home.path.name.encode(), b"tiny-llama"]) == 2
        for secret in {s for s in secrets.drawn if any(s)}:
            assert hits([everything], spellings(secret)) == 0
        for block_key in keys(10):
            assert hits([everything], spellings(block_key)) == 0
        for name in (TENANT, "Mustermann", "Canary-Tenant"):
            assert hits([everything], [*spellings(name.encode()), repr(name)[1:-1].encode()]) == 0
        plain = [d[i : i + 32] for d in contents("a", keys(10)) for i in range(0, BLOCK, 32)]
        assert hits([everything], [*plain, *(w.hex().encode() for w in plain[:200])]) == 0

    def test_req_c6_k8_staging_and_keys_are_overwritten(self, home: Home) -> None:
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(4))
            tenant_keys = scope.destination(vault._governor).tenant
            assert any(tenant_keys._tenant_key)
        assert not any(tenant_keys._tenant_key)
        assert not any(tenant_keys._index_key)

    def test_req_c6_only_ciphertext_waits_in_staging(self, home: Home) -> None:
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(4))
            get(vault, scope, keys(4))
            stagings = [vault._writer._staging(), vault._reader._staging()]
            for staging in stagings:
                memory = bytes(staging.view(1))
                assert any(memory)
                for data in contents("a", keys(4)):
                    assert data[:64] not in memory


def test_core_dumps_leave_staging_out() -> None:
    from kvvault.segments.io import AlignedBuffer

    buffer = AlignedBuffer(1 << 20)
    text = Path("/proc/self/smaps").read_text()
    flags = [line for line in text.splitlines() if line.startswith("VmFlags:")]
    assert any(" dd" in line for line in flags)  # "don't dump"
    assert len(buffer) >= 1 << 20
