"""What a policy may say, and that whatever makes no sense is refused with file and line."""

from __future__ import annotations

import hashlib

import pytest

from kvvault.errors import ConfigError, PolicyError
from kvvault.policy.document import Policy, Record
from tests.policy.support import HEAD, REST, policy, source


def refusal(text: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text, name="p.yaml")
    return caught.value


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def test_everything_that_can_be_written_is_read() -> None:
    text = source(
        "name: clinics\nmatch:\n  tenant: [clinic-*, ward-?]\n  model: llama*\n"
        "  namespace: {kv.dtype: bfloat16}\n  labels: {kind: [chat, mail]}\n"
        "class: brief\ndelete_by: 1.5h\nidle: 10m\nkeep_at_least: 90s\nmax_bytes: 20GiB\n"
        "record: preview",
        "name: nothing\nmatch: {tenant: no}\npersist: false",
        REST,
        vault="cap: 2TB\nfree_floor: 5GiB\nhigh_watermark: 90%\nlow_watermark: 80%\n"
        "purge_every: 2h\nsegment: 64MiB\nwindow: 30s\nclock_jump: 1w",
    )
    read = Policy.parse(text)
    clinics, nothing, rest = read.rules
    assert clinics.match.tenant == ("clinic-*", "ward-?")
    assert clinics.match.facts == (("kv.dtype", ("bfloat16",)), ("model", ("llama*",)))
    assert clinics.match.labels == (("kind", ("chat", "mail")),)
    assert clinics.retention_class == "brief"
    assert (clinics.delete_by_s, clinics.idle_s, clinics.keep_at_least_s) == (5400, 600, 90)
    assert (clinics.max_bytes, clinics.record) == (20 << 30, Record.PREVIEW)
    assert not nothing.persist
    assert nothing.match.tenant == ("no",)  # not False
    assert (rest.persist, rest.idle_s, rest.keep_at_least_s, rest.max_bytes) == (
        True,
        None,
        0,
        None,
    )
    assert rest.record is Record.NONE
    assert read.vault.cap_bytes == 2 * 10**12
    assert read.vault.cap_fraction is None
    assert read.vault.cap(1) == 2 * 10**12
    assert (read.vault.free_floor_bytes, read.vault.segment_bytes) == (5 << 30, 64 << 20)
    assert (read.vault.high_watermark, read.vault.low_watermark) == (0.9, 0.8)
    assert (read.vault.purge_interval_s, read.vault.window_s) == (7200, 30)
    assert read.vault.clock_jump_s == 7 * 86400
    assert read.source == text
    assert read.digest == hashlib.sha256(text.encode()).digest()
    assert read.classes == ("brief",)
    assert [rule.line for rule in read.rules] == [
        line_of(text, f"name: {name}") for name in ("clinics", "nothing", "rest")
    ]


def test_limits_have_defaults() -> None:
    limits = policy(REST).vault
    assert limits.cap_bytes is None
    assert limits.cap(1000) == 800
    assert limits.clock_jump_s == 7 * 86400
    assert limits.segment_bytes is None


@pytest.mark.parametrize(("ceiling", "window"), [("24h", 300), ("20s", 2), ("never", 300)])
def test_a_window_that_is_not_written_is_short_beside_the_ceiling(
    ceiling: str, window: float
) -> None:
    assert policy(f"name: rest\ndelete_by: {ceiling}").vault.window_s == window


def test_never_is_said_and_not_left_out() -> None:
    assert policy("name: rest\ndelete_by: never").rules[0].delete_by_s is None


A = "name: a\nmatch: {tenant: a*}\ndelete_by: 1h"
HOSTILE = {
    "no 'delete_by'": (["name: rest"], "", "name: rest"),
    "unknown key 'delte_by'": (["name: rest\ndelete_by: 1h\ndelte_by: 2h"], "", "delte_by"),
    "unknown key 'cup'": ([REST], "cup: 80%", "cup"),
    "unknown key 'tenants'": ([A.replace("tenant", "tenants"), REST], "", "tenants"),
    "is 25h, longer than its 'delete_by' of 24h": (
        [REST + "\nkeep_at_least: 25h"],
        "",
        "keep_at_least",
    ),
    "'idle' of rule 'rest' is 2d": ([REST + "\nidle: 2d"], "", "idle"),
    "no time at all": (["name: rest\ndelete_by: 0s"], "", "delete_by"),
    "'-5m' is not a duration": (["name: rest\ndelete_by: -5m"], "", "delete_by"),
    "'5' is not a duration": (["name: rest\ndelete_by: 5"], "", "delete_by"),
    "more than a hundred years": (["name: rest\ndelete_by: 36526d"], "", "delete_by"),
    "'max_bytes': '20 apples' is not a size": (
        [REST + "\nmax_bytes: 20 apples"],
        "",
        "max_bytes",
    ),
    "'cap': '0%' is not between": ([REST], "cap: 0%", "cap"),
    "'cap': '101%' is not between": ([REST], "cap: 101%", "cap"),
    "'0' is nothing": ([REST], "cap: 0", "cap"),
    "'low_watermark' is 95%": ([REST], "low_watermark: 95%", "low_watermark"),
    "'window' is 13h, more than half": ([REST], "window: 13h", "window"),
    "a segment is larger than the cap": ([REST], "cap: 1GiB\nsegment: 2GiB", "segment"),
    "write one of: none, fingerprint, preview": ([REST + "\nrecord: all"], "", "record"),
    "write true or false": ([REST + "\npersist: maybe"], "", "persist"),
    "'idle' makes no sense in rule 'rest'": (
        ["name: rest\npersist: false\nidle: 5m"],
        "",
        "idle",
    ),
    "a name is 1 to 64": (["name: a b\ndelete_by: 1h"], "", "name: a b"),
    "no value stands here": (["name: a\nmatch: {tenant: }\ndelete_by: 1h", REST], "", "tenant"),
    "an empty list matches nothing": (
        ["name: a\nmatch: {tenant: []}\ndelete_by: 1h", REST],
        "",
        "tenant",
    ),
    "the model is matched here and under 'namespace'": (
        ["name: a\nmatch:\n  model: x\n  namespace: {model: x}\ndelete_by: 1h", REST],
        "",
        "model: x",
    ),
    "a rule named 'rest' stands in line 5 already": (
        [REST.replace("24h", "1h\nmatch: {tenant: a}"), REST],
        "",
        "delete_by: 24h",
    ),
    "rule 'b' matches exactly what rule 'a' in line 5": (
        [A, A.replace("name: a", "name: b"), REST],
        "",
        "name: b",
    ),
    "rule 'b' is never reached": (
        [A, "name: b\nmatch: {tenant: [ab, ac*], model: x}\ndelete_by: 1h", REST],
        "",
        "name: b",
    ),
    "rule 'late' is never reached": ([REST, "name: late\nmatch: {tenant: x}\npersist: false"], "",
                                     "name: late"),
    "no rule is for all that the others leave": ([A], "", "name: a"),
    "class 'long' lasts longer than every rule without a class: these end after 24h": (
        ["name: long\nclass: long\ndelete_by: 25h", REST],
        "",
        "delete_by: 25h",
    ),
    "class 'keep' persists, and no rule without a class does": (
        ["name: keep\nclass: keep\ndelete_by: 1h", "name: rest\npersist: false"],
        "",
        "class: keep",
    ),
    "rule 'two' matches exactly what": (
        ["name: one\nclass: c\ndelete_by: 1h", "name: two\nclass: c\ndelete_by: 2h", REST],
        "",
        "name: two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", HOSTILE)
def test_what_makes_no_sense_is_refused_with_its_line(problem: str) -> None:
    rules, vault, where = HOSTILE[problem]
    text = source(*rules, vault=vault)
    error = refusal(text)
    assert problem in str(error)
    line = line_of(text, where) if not problem.startswith("a rule named") else 10
    assert str(error).startswith(f"p.yaml:{line}: ")
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert error.hint


@pytest.mark.parametrize("missing", ["owner", "justification"])
def test_req_a3_owner_and_justification_are_required(missing: str) -> None:
    text = source(REST)
    kept = "".join(f"{line}\n" for line in text.splitlines() if missing not in line)
    error = refusal(kept)
    assert str(error) == f"p.yaml:5: {missing!r} is missing"
    blank = text.replace(f"{missing}: ", f"{missing}: ' ' #")
    assert f"{missing!r}: say something here" in str(refusal(blank))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "p.yaml:1: there is nothing"),
        ("# a comment\n", "p.yaml:1: there is nothing"),
        ("- a\n- b\n", "p.yaml:1: this is no mapping"),
        ("kvvault: 2\nname: a\ndescription: b\nrules: []\n", "p.yaml:1: 'kvvault': write one of"),
        (HEAD + "rules: []\n", "p.yaml:4: 'rules' is empty"),
        (HEAD + "rules: 5\n", "p.yaml:4: 'rules' is not what belongs here"),
        (HEAD + "rules: {a: b}\n", "p.yaml:4: 'rules' is not what belongs here"),
        (HEAD + "rules:\n  - 5\n", "p.yaml:5: '0' is not what belongs here"),
        (HEAD, "p.yaml:1: 'rules' is missing"),
        ("a: 1\nb: [\n", "this is not YAML"),
        ("a: 1\na: 2\n", "p.yaml:2: the key 'a' stands here a second time, first in line 1"),
        ("a: &x 1\nb: *x\n", "p.yaml:1: anchors and aliases"),
        ("b: *x\n", "p.yaml:1: anchors and aliases"),
        ("a: 1\nb: !!python/object:os.system x\n", "p.yaml:2: tags"),
        ("a: 1\n? [b]\n: c\n", "p.yaml:2: a key is text"),
        ("a: 1\n---\nb: 2\n", "a second document begins here"),
        ("a: 1\nb: ~\n", "p.yaml:2: no value stands here"),
        ("a: " + "[" * 40 + "]" * 40, "p.yaml:1: this is nested too deeply"),
        ("a: \x07\n", "this is not YAML"),
        ("a: \udc80\n", "p.yaml:1: this is not Unicode"),
        ("#" * (1 << 20) + "\n", "p.yaml:1: the file is larger than 1 MiB"),
    ],
)
def test_only_plain_yaml_is_read(text: str, problem: str) -> None:
    assert problem in str(refusal(text))


def test_a_misspelled_key_is_answered_with_what_was_meant() -> None:
    error = refusal(source(REST.replace("delete_by", "delete_bye")))
    assert error.hint == "did you mean 'delete_by'?"


def test_errors_and_reprs_name_nobody() -> None:
    canary = "tenant-canary"
    matched = f"match: {{tenant: {canary}, labels: {{{canary}: {canary}}}}}\ndelete_by: 1h"
    error = refusal(source(f"name: a\n{matched}", f"name: b\n{matched}", REST))
    assert "matches exactly" in str(error)
    assert canary not in f"{error} {error.hint}"
    read = policy(f"name: a\n{matched}", REST)
    assert canary in read.source
    assert canary not in repr(read) + repr(read.rules)


def test_rules_that_only_overlap_are_allowed() -> None:
    read = policy(A, "name: b\nmatch: {model: x}\npersist: false", REST)
    assert [rule.name for rule in read.rules] == ["a", "b", "rest"]


def test_the_largest_policy_is_read() -> None:
    rules = [
        f"name: r{n}\nmatch: {{tenant: ['*a{n}-*b*c*', 'x{n}-?*']}}\npersist: false"
        for n in range(255)
    ]
    assert len(policy(*rules, REST).rules) == 256
    assert "'rules' has too many entries" in str(refusal(source(*rules, A, REST)))
