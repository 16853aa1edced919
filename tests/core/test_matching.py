"""Which prompts are meant: also when keys or texts do not open, and however a name is written."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from kvvault.crypto.providers import EphemeralProvider
from kvvault.errors import CatalogCorruptError, KeyUnavailableError
from kvvault.model import SystemClock
from kvvault.promptfacts import Condition
from kvvault.reporting import subject as subjects
from kvvault.reporting.sources import Source
from kvvault.testing import FaultyProvider
from kvvault.vault import Scope, Vault
from tests.core.support import Home, assert_hits, assert_missing, namespace
from tests.core.test_prompt_erasing import of, path, send

CASE = Condition("label.case", "=", "1")


@pytest.mark.parametrize(
    "condition",
    [
        CASE,
        Condition("label.case", "!=", "1"),
        Condition("subject", "=", "anna"),
        Condition("request", "!=", "request [1, 2]"),
    ],
)
def test_without_a_key_it_cannot_be_said_who_is_meant(tmp_path: Path, condition: Condition) -> None:
    """Neither nobody nor everybody: an error."""
    provider = FaultyProvider(EphemeralProvider())
    home = Home(tmp_path / "vault", provider)
    with home.create() as vault:
        send(vault, vault.scope("alice", namespace()), [1, 2], "anna", case="1")
        send(vault, vault.scope("alice", namespace()), [3, 4], "bert", case="2")
    with home.open() as vault:
        provider.fail(KeyUnavailableError("away", hint="later"))
        with pytest.raises(KeyUnavailableError):
            vault.plan_erasure([condition])
        with pytest.raises(KeyUnavailableError):
            vault.prompts.listing([condition])
    provider.heal()
    with home.open() as vault:
        assert len(vault.plan_erasure([condition]).numbers) == 1
        assert len(vault.prompts.listing([condition])[0]) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE texts SET sealed = x'00' WHERE text_no = ?",
        "UPDATE texts SET sealed = 1 WHERE text_no = ?",
        "UPDATE texts SET kind = 'x' WHERE text_no = ?",
        "DELETE FROM texts WHERE text_no = ?",
    ],
)
def test_labels_that_do_not_open(home: Home, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whether these prompts are meant nobody can say, so nothing is erased by label that could be
    about them; who only looks is told."""
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        send(vault, scope, [1, 2], "anna", case="1")
        send(vault, scope, [3, 4], "bert", case="1", team="x")
        send(vault, scope, [5, 6], None)
        assert len(vault.plan_erasure([CASE]).numbers) == 2
    with home.sql() as catalog:
        [(number,)] = catalog.execute(
            "SELECT labels_no FROM prompts WHERE subject_no IN "
            "(SELECT min(text_no) FROM texts WHERE kind = 'subject')"
        )
        catalog.execute(damage, (number,))
    with home.open() as vault:
        for condition in (CASE, Condition("label.case", "!=", "2")):
            with pytest.raises(CatalogCorruptError, match="labels of 1 prompts"):
                vault.plan_erasure([condition])
        assert not caplog.records
        [found] = vault.prompts.listing([CASE])[0]
        assert (found.subject, len(caplog.records)) == ("bert", 1)
        # Of others they say nothing.
        assert len(vault.plan_erasure([CASE, *of("bert")]).numbers) == 1
        assert len(vault.plan_erasure(of("anna")).numbers) == 1


@pytest.fixture
def scope(vault: Vault) -> Scope:
    return vault.scope("alice", namespace())


JOSE, COMPOSED = "Jos\u00e9", "Nguy\u1ec5n \u00c5"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)

MIXED = "Nguye\u0302\u0303n \u00c5"
"""Neither: one is composed, the other is not."""


@pytest.mark.parametrize("sent", [COMPOSED, DECOMPOSED, MIXED])
@pytest.mark.parametrize("asked", [COMPOSED, DECOMPOSED, MIXED])
def test_a_name_is_found_however_it_is_written(
    vault: Vault, scope: Scope, sent: str, asked: str
) -> None:
    """And what is shown is how it was sent."""
    send(vault, scope, [1, 2], sent, **{sent: sent})
    prompt = vault.prompt(scope, request_id=sent, subject=None, labels={})
    vault.put(scope, path(7), [bytes(4096)], prompt=prompt, ends=[16])
    send(vault, scope, [3, 4], "Nguyen A", **{"Nguyen A": "Nguyen A"})
    for name in ("subject", f"label.{asked}"):
        [found] = vault.prompts.listing([Condition(name, "=", asked)])[0]
        assert (found.subject, found.labels) == (sent, {sent: sent})
    [found] = vault.prompts.listing([Condition("request", "=", asked)])[0]
    assert found.request_id == sent
    report = subjects.report(Source(vault, SystemClock()), tenant="alice", subject=asked)
    assert report.answer("prompts").value == 1
    hold = vault.place_hold(tenant="alice", subject=asked, reason="a case", actor="counsel")
    assert vault.plan_erasure(of(sent), tenant="alice").held_prompts == 1
    vault.clear_hold(hold.number, reason="over", actor="counsel")
    vault.erase(vault.plan_erasure(of(asked), tenant="alice"), actor="operator", reason="art. 17")
    assert_missing(vault, scope, path(1, 2))
    assert_hits(vault, scope, path(3, 4))


def test_names_that_only_look_alike_are_different(vault: Vault, scope: Scope) -> None:
    send(vault, scope, [1, 2], JOSE)
    for other in ("Jose", "jos\u00e9", "\uff2aos\u00e9", "Jos\u00e9 "):
        assert vault.plan_erasure(of(other), tenant="alice").numbers == ()
    assert len(vault.plan_erasure(of(JOSE), tenant="alice").numbers) == 1
