"""What holds for every test: its surroundings, hypothesis profiles, optional packages."""

from __future__ import annotations

import ast
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadline: the machines that run this are slow and shared, and a test that asserts a
# time belongs to the benchmarks. "dev" is for the loop at the keyboard.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", _COMMON, max_examples=50)
settings.register_profile("ci", _COMMON, max_examples=300, database=None, print_blob=True)
settings.register_profile("soak", _COMMON, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.getenv("CI") else "dev"))

# Packages that only some environments have, and the marker that says a test needs them.
OPTIONAL = ("torch", "vllm")


def _module_marks(path: Path) -> set[str]:
    """Names of the marks in a module's ``pytestmark``, read without importing it."""
    marks: set[str] = set()
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark"
            for target in statement.targets
        ):
            marks |= {
                node.attr for node in ast.walk(statement.value) if isinstance(node, ast.Attribute)
            }
    return marks


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave alone what could not even be imported, if and only if it was deselected.

    A module that imports torch or vLLM at its top says so in ``pytestmark``. Where the
    package is missing and the run deselects the mark, the module is not imported; a run
    that selects it fails loudly.
    """
    if collection_path.suffix != ".py":
        return None
    expression = str(config.getoption("markexpr"))
    absent = {
        name
        for name in OPTIONAL
        if f"not {name}" in expression and importlib.util.find_spec(name) is None
    }
    return True if absent and absent & _module_marks(collection_path) else None


@pytest.fixture(autouse=True, scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home of its own, no setting from outside, and a vLLM that phones nobody.

    Keys and configuration have default places below the home directory: no test may
    find, or leave, anything in the real one.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("KVVAULT_", "XDG_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # else vLLM wants a C++ compiler at run time
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:  # GiB; vLLM would take half the machine
            patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A vault that a test leaves open works on beside whichever test comes next."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    left = {thread for thread in left if thread.name.startswith("kvvault")}
    end = time.monotonic() + 5.0
    for thread in left:
        thread.join(max(0.0, end - time.monotonic()))
    assert not {thread.name for thread in left if thread.is_alive()}
