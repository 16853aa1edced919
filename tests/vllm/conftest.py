"""Fixtures of the vLLM tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engine import Engines

TEXT = Path(__file__).parents[2] / "LICENSE"
"""What the tokenizers are trained on: long enough, and it does not change."""


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("engines") / "log.txt") as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where small models are built, once per test session."""
    return tmp_path_factory.mktemp("models")
