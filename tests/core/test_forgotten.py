"""After a tenant is forgotten nothing in the vault names it, its subjects, requests or prompts; nor
do the ids that stood for them lead anywhere (REQ-T2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvvault.naming import request_key
from kvvault.policy.document import Policy
from kvvault.promptfacts import Condition
from kvvault.vault import Scope, Vault
from tests.core.support import Home, contents, keys, namespace
from tests.core.test_prompting import chain_of, query

POLICY = Policy.parse(
    """
kvvault: 1
name: a-test
description: For a test.
vault: {cap: 1GiB}
rules:
  - name: all
    delete_by: 24h
    record: preview
    owner: tests
    justification: a test
""",
    name="a test",
)

NAMES = {
    "tenant": "Kanzlei Gantenbein",
    "subject": "Svoboda, Theodora",
    "label": "Aktenzeichen",
    "value": "XII ZB 4711-25",
    "request": "cmpl-6e1f0c0ffee5",
    "preview": "Meine Mandantin bestreitet den Erhalt",
}


def send(vault: Vault, scope: Scope, start: int) -> None:
    chain = chain_of(keys(4, start))
    prompt = vault.prompt(
        scope,
        request_id=NAMES["request"],
        subject=NAMES["subject"],
        labels={NAMES["label"]: NAMES["value"]},
        preview=NAMES["preview"],
    )
    names = list(chain)
    vault.put(scope, names, contents("a", names), prompt=prompt, ends=list(chain.values()))
    vault.record(prompt, chain)
    vault.settle_prompts()


def files(home: Home) -> Iterator[tuple[Path, bytes]]:
    for file in sorted(home.path.rglob("*")):
        if file.is_file():
            yield file, file.read_bytes()


def found(home: Home, secrets: dict[str, bytes]) -> set[str]:
    """Which of these are in any file of the vault, as they are, or in hex."""
    hits = set()
    for _file, data in files(home):
        for name, secret in secrets.items():
            if secret in data or secret.hex().encode() in data:
                hits.add(name)
    return hits


def test_nothing_is_left_that_names_a_forgotten_tenant(home: Home) -> None:
    with home.create() as vault:
        vault.apply_policy(POLICY, actor="operator")
        scope = vault.scope(NAMES["tenant"], namespace())
        send(vault, scope, 0)
        send(vault, scope, 2)
        send(vault, vault.scope("somebody else", namespace()), 0)
        held = [
            vault.place_hold(tenant=NAMES["tenant"], reason="a case", actor="counsel"),
            vault.place_hold(
                tenant=NAMES["tenant"], subject=NAMES["subject"], reason="a case", actor="counsel"
            ),
            vault.place_hold(
                prompt_id=vault.prompts.listing()[0][-1].prompt_id, reason="r", actor="counsel"
            ),
        ]
        for hold in held:
            vault.clear_hold(hold.number, reason="over", actor="counsel")
        mine = [p for p in vault.prompts.listing()[0] if p.tenant == NAMES["tenant"]]
        assert {p.preview for p in mine} == {NAMES["preview"]}
        fingerprints = [p.fingerprint for p in mine if p.fingerprint]
        assert len(fingerprints) == 2
        keyring = vault.tenant_keys(NAMES["tenant"])
        assert keyring is not None
        said = {name: text.encode() for name, text in NAMES.items()}
        ids = {
            "tenant id": scope.tenant_id,
            "prompt id": mine[0].prompt_id,
            "other prompt id": mine[1].prompt_id,
            "subject id": keyring.keyed_id("subject", NAMES["subject"].encode()),
            "request id": request_key(keyring, NAMES["request"]),
            "block id": scope.block_id(keys(1)[0]),
        }
        hidden = {f"fingerprint {i}": bytes.fromhex(one) for i, one in enumerate(fingerprints)}
        vault.plan_erasure([], tenant=NAMES["tenant"])
        vault.note_question("prompts ls", tenant_id=scope.tenant_id, rows=2)
        # The controls: ids are found while the tenant lives, names and fingerprints never.
        vault.catalog.empty_log()
        assert found(home, ids) == set(ids)
        assert found(home, said | hidden) == set()
        # Nor does an erasure by label leave the label's name, which is for good.
        label = Condition(f"label.{NAMES['label']}", "=", NAMES["value"])
        plan = vault.plan_erasure([label], tenant=NAMES["tenant"], numbers=[mine[0].number])
        assert vault.erase(plan, actor="operator", reason="r").deletion_no is not None
        [erased] = [one for one in vault.audit.tail(9) if one.facts.get("trigger") == "erase"]
        assert erased.facts["by"] == ["label"]
        vault.catalog.empty_log()
        assert found(home, said | hidden) == set()
        vault.forget(NAMES["tenant"])
        assert found(home, ids | said | hidden) == set()
        assert query(vault, "SELECT count(*) FROM prompts") == [(1,)]
        [left] = vault.prompts.listing()[0]
        assert left.tenant == "somebody else"
        assert all(hold.tenant is None for hold in vault.holds(cleared=True))
    assert found(home, ids | said | hidden) == set()
