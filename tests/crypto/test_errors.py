"""The error tree: what a command line and an operator can rely on."""

from __future__ import annotations

import inspect

import pytest

from kvvault import errors
from kvvault.errors import KvvaultError

CLASSES = [
    item
    for _, item in inspect.getmembers(errors, inspect.isclass)
    if issubclass(item, KvvaultError)
]

EXIT_CODES = {
    "UsageError": 2,
    "ConfigError": 2,
    "NamespaceError": 2,
    "VaultExistsError": 2,
    "VaultNotFoundError": 10,
    "VaultLockedError": 11,
    "VaultKeyError": 12,
    "WrongKeyError": 12,
    "KeyUnavailableError": 12,
    "KeyDestroyedError": 12,
    "PartialError": 3,
    "HeldError": 3,
    "PolicyError": 2,
    "OperationCancelledError": 130,
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code_and_is_documented(kind: type[KvvaultError]) -> None:
    assert kind.exit_code == EXIT_CODES.get(kind.__name__, 1)
    assert kind.__doc__
    assert kind.__name__ in errors.__all__
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_texts_are_one_line(kind: type[KvvaultError]) -> None:
    error = kind("first\n  second\tthird ", hint="do\nthis")
    assert str(error) == "first second third"
    assert error.hint == "do this"


def test_a_hint_is_required() -> None:
    with pytest.raises(TypeError):
        KvvaultError("what happened")  # type: ignore[call-arg]  # the mistake under test


def test_storage_error_carries_the_errno() -> None:
    assert errors.StorageError("disk full", hint="free some", errno=28).errno == 28
    assert errors.StorageError("failed", hint="look").errno is None


def test_req_c8_the_three_key_problems_are_told_apart() -> None:
    kinds = [errors.WrongKeyError, errors.KeyUnavailableError, errors.KeyDestroyedError]
    for kind in kinds:
        assert issubclass(kind, errors.VaultKeyError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)
