"""A purge that ends at any step, by an error or by a kill, and one beside a process that works."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from kvvault.crypto.keys import tenant_key_aad
from kvvault.crypto.providers import EphemeralProvider, FileProvider, KeyProvider, open_provider
from kvvault.errors import KeyDestroyedError, KeyUnavailableError, StorageError
from kvvault.vault import Vault
from tests.core.purges import StepProvider, Steps, judge, populate, purge_in_steps
from tests.core.support import SMALL, Home, keys, namespace, put, sqlite
from tests.crypto.bao import running_bao, uri

ROOT = Path(__file__).parents[2]
PURGES = 20


def old_wraps(catalog: Path) -> list[tuple[bytes, str, bytes]]:
    """Tenant id, epoch and wrapped key of every tenant."""
    with sqlite.connect(str(catalog)) as connection:
        return list(connection.execute("SELECT tenant_id, root_epoch, wrapped_key FROM tenants"))


def judge_after(vault: Vault, provider: KeyProvider, wraps: list[tuple[bytes, str, bytes]]) -> None:
    """The interrupted purge was resumed and another one done: all is well, and nothing of before
    opens any more."""
    judge(vault)
    check = vault.check_keys()
    assert check.sound
    assert not check.unchecked
    report = vault.keys()
    assert report.unfinished is None
    assert report.waiting == 0
    assert [epoch.current for epoch in report.epochs] == [True]
    for tenant_id, epoch, wrapped in wraps:
        with pytest.raises(KeyDestroyedError):
            provider.unwrap(epoch, wrapped, tenant_key_aad(vault._vault_id, tenant_id))
    # Of an epoch that was made and never put in force nothing is wrapped.
    current = report.epochs[0].epoch
    assert current in provider.epochs()
    assert len(provider.epochs()) <= 2


def names_of_steps(place: Path) -> list[str]:
    home = Home(place, StepProvider(EphemeralProvider()))
    with home.create() as vault:
        populate(vault)
        assert isinstance(home.provider, StepProvider)
        purge_in_steps(vault, home.provider, steps := Steps())
    return steps.passed


@pytest.fixture
def place(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


def test_the_steps_are_those_of_a_purge(place: Path) -> None:
    names = names_of_steps(place / "vault")
    for name in ("create_epoch", "wrap", "unwrap", "destroy", "write"):
        assert f"before {name}" in names
        assert f"after {name}" in names
    assert len(names) > 30


def fail(name: str) -> None:
    if name == "write":
        raise StorageError("the disk is full", hint="make room")
    raise KeyUnavailableError("no answer", hint="wait")


@pytest.mark.parametrize("every", range(4))
def test_an_error_at_any_step_loses_nothing_and_is_made_up_for(place: Path, every: int) -> None:
    names = names_of_steps(place / "vault")
    for number in range(every, len(names), 4):
        provider = StepProvider(EphemeralProvider())
        home = Home(place / str(number), provider)
        vault = home.create()
        populate(vault)
        wraps = old_wraps(home.catalog)
        steps = Steps(number, partial(fail, names[number].split()[1]))
        with pytest.raises((StorageError, KeyUnavailableError)):
            purge_in_steps(vault, provider, steps)
        judge(vault)
        put(vault, vault.scope("dave", namespace()), keys(3), "dave")
        vault.close()
        with home.open() as again:
            judge(again)
            again.purge()
            judge_after(again, provider, wraps)
        shutil.rmtree(home.path)


def test_attempts_that_fail_do_not_fill_the_provider(place: Path) -> None:
    """At whatever step up to the commit that puts the new root key in force, or right after it; a
    process that goes on has made one that is not needed, however often it tries."""
    names = names_of_steps(place / "vault")
    first = names.index("after create_epoch") + 1  # before, nobody knows its name
    last = names.index("after write", first) + 1
    assert names[first - 4 : first - 2] == ["before write", "after write"]
    for number in range(first, last):
        provider = StepProvider(EphemeralProvider())
        home = Home(place / str(number), provider)
        with home.create() as vault:
            populate(vault)
            wraps = old_wraps(home.catalog)
            begun = names[number] == "after write"
            for at in [number] if begun else [number, number - 2, number - 2]:  # the key is there
                steps = Steps(at, partial(fail, names[number].split()[1]))
                with pytest.raises((StorageError, KeyUnavailableError)):
                    purge_in_steps(vault, provider, steps)
                assert steps.passed[-1] == names[number]
                assert len(provider.epochs()) == 2
            assert (vault.keys().unfinished is not None) == begun
            vault.purge()
            assert len(provider.epochs()) == 1
            judge_after(vault, provider, wraps)
        shutil.rmtree(home.path)


def test_the_root_key_of_an_attempt_that_failed_may_be_gone(place: Path) -> None:
    provider = StepProvider(EphemeralProvider())
    home = Home(place / "vault", provider)
    with home.create() as vault:
        populate(vault)
        [kept] = provider.epochs()
        number = names_of_steps(place / "other").index("after create_epoch") + 1
        with pytest.raises(KeyUnavailableError):
            purge_in_steps(vault, provider, Steps(number, partial(fail, "wrap")))
        [made] = set(provider.epochs()) - {kept}
        provider.destroy(made)
        vault.purge()
        assert made != vault.keys().epochs[0].epoch
        judge(vault)


@pytest.mark.parametrize("when", ["create_epoch", "wrap", "destroy"])
def test_req_k9_a_real_key_server_sealed_in_the_middle(
    place: Path, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed before or after what a purge asks of OpenBao: what lives is served all the while, and
    the next purge makes up for it."""
    with running_bao(tmp_path / "bao") as server:
        monkeypatch.setenv("BAO_TOKEN", server.token())
        names = names_of_steps(place / "vault")
        for moment in ("before", "after"):
            number = len(names) - 1 - names[::-1].index(f"{moment} {when}")
            provider = StepProvider(open_provider(uri(server), create=True))
            home = Home(place / moment, provider)
            with home.create() as vault:
                populate(vault)
                wraps = old_wraps(home.catalog)
                with pytest.raises(KeyUnavailableError):  # after it is destroyed, that is checked
                    purge_in_steps(vault, provider, Steps(number, server.seal))
                judge(vault)
                server.unseal()
            with home.open() as again:
                judge(again)
                again.purge()
                judge_after(again, provider, wraps)


def test_a_kill_at_any_step_loses_nothing_and_is_made_up_for(place: Path) -> None:
    count = len(names_of_steps(place / "vault"))
    template = place / "template"
    template.mkdir(mode=0o700)
    with Vault.create(
        template / "vault", provider=FileProvider.create(template / "key"), options=SMALL
    ) as vault:
        populate(vault)
    wraps = old_wraps(template / "vault" / "catalog.sqlite3")
    for number in range(count):
        shutil.copytree(template, place / str(number))
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.purges", "kill", str(place), str(count)],
        cwd=ROOT,
        timeout=240,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    interrupted = 0
    for number in range(count):
        provider = FileProvider.open(place / str(number) / "key")
        with Vault.open(place / str(number) / "vault", provider=provider, options=SMALL) as vault:
            judge(vault)
            interrupted += vault.keys().unfinished is not None
            vault.purge()
            judge_after(vault, provider, wraps)
    assert interrupted > count // 2  # the control: most kills come in the middle


def test_a_process_that_works_notices_nothing(tmp_path: Path) -> None:
    provider = FileProvider.create(tmp_path / "key")
    with Vault.create(tmp_path / "vault", provider=provider, options=SMALL) as vault:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.core.purges", "work", str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            for _ in range(PURGES):
                vault.purge()
            out, _ = worker.communicate("\n", timeout=60)
        finally:
            worker.kill()
        counts = json.loads(out)
        assert counts["wrong"] == counts["lost"] == counts["refused"] == 0, counts
        assert counts["stored"] > 100, counts
        assert counts["loaded"] > 100, counts
        assert counts["purges"] >= PURGES, counts
        assert vault.verify().ok
        assert vault.check_keys().sound
        assert provider.epochs() == [vault.keys().epochs[0].epoch]
