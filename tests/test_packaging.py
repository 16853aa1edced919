"""What is built, what is in it, and that it works where neither torch nor vLLM is."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvvault

ROOT = Path(__file__).resolve().parent.parent


def test_no_vault_and_no_key_is_kept_in_the_repository() -> None:
    """One made by hand in the work tree is easily added with everything else. Those of earlier
    versions, made for tests, have a place of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = [Path(name) for name in listed.stdout.split("\0") if name]
    assert Path("README.md") in names
    assert Path("tests/golden/0002/vault/catalog.sqlite3") in names
    kinds = {"VAULT", "catalog.sqlite3", "catalog.sqlite3-wal", "catalog.sqlite3-shm"}
    golden = Path("tests/golden")
    names = [name for name in names if not name.is_relative_to(golden)]
    assert not [name for name in names if name.name in kinds or name.suffix == ".seg"]
    hidden = {name.parts[0] for name in names if name.parts[0].startswith(".")}
    assert hidden <= {".ci", ".gitignore", ".gitattributes", ".editorconfig", ".python-version"}


def _build(target: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def members(wheel: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel) as archive:
        yield archive


def test_the_wheel_holds_every_module_and_nothing_else(members: zipfile.ZipFile) -> None:
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kvvault").rglob("*.py")}
    packed = set(members.namelist())
    assert modules <= packed
    assert "kvvault/py.typed" in packed
    tops = {name.split("/")[0] for name in packed}
    assert tops == {"kvvault", f"kvvault-{kvvault.__version__}.dist-info"}


@pytest.mark.parametrize("directory", ["migrations", "policies"])
def test_top_level_directories_travel_in_the_wheel(
    members: zipfile.ZipFile, directory: str
) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", directory], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert tracked
    for name in tracked:
        inside = f"kvvault/_{directory}/{Path(name).relative_to(directory).as_posix()}"
        assert members.read(inside) == (ROOT / name).read_bytes()


def test_entry_points(members: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    text = members.read(f"kvvault-{kvvault.__version__}.dist-info/entry_points.txt")
    parser.read_string(text.decode())
    assert parser["console_scripts"]["kvvault"] == "kvvault.cli:main"
    plugin = parser["vllm.general_plugins"]["kvvault"]
    assert plugin == "kvvault.integrations.vllm.plugin:register"


def test_torch_and_vllm_are_extras(members: zipfile.ZipFile) -> None:
    metadata = members.read(f"kvvault-{kvvault.__version__}.dist-info/METADATA").decode()
    asked = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    engines = [line for line in asked if line.split()[1].startswith(("torch", "vllm"))]
    assert engines
    assert all("extra ==" in line for line in engines)


def test_the_source_archive_can_be_built_from(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "policies/README.md", "Makefile", ".ci/run"}
    assert wanted | {"requirements/constraints.txt", "examples/prefix_cache.py"} <= names
    assert any(name.startswith("migrations/versions/") for name in names)
    assert not [name for name in names if name.startswith((".venv", "requirements/.", ".git/"))]


_USE = """
import importlib.util, sys
from pathlib import Path
import kvvault
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("vllm") is None
assert (Path(kvvault.__file__).parent / "_policies" / "README.md").is_file()
from kvvault.vault import Vault
with Vault.create(Path(sys.argv[1]), provider="ephemeral:") as vault:
    print(kvvault.__version__, vault.stats() is not None)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_package_works_without_torch_and_vllm(wheel: Path, tmp_path: Path) -> None:
    """Also proves that every runtime dependency is declared, and that the schema travels."""
    venv.create(tmp_path / "venv", with_pip=True)
    bin_ = tmp_path / "venv" / "bin"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    constraints = str(ROOT / "requirements" / "constraints.txt")
    run(str(bin_ / "python"), "-m", "pip", "install", "-c", constraints, str(wheel))
    assert kvvault.__version__ in run(str(bin_ / "kvvault"), "--version")
    printed = run(str(bin_ / "python"), "-c", _USE, str(tmp_path / "vault"))
    assert printed.split() == [kvvault.__version__, "True"]


def test_importing_the_package_loads_no_heavy_module() -> None:
    probe = "import sys, kvvault; print(*sorted(m.split('.')[0] for m in sys.modules))"
    command = [sys.executable, "-c", probe]
    loaded = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    heavy = {"torch", "vllm", "numpy", "sqlalchemy", "cryptography", "typer", "pydantic"}
    assert "kvvault" in loaded.split()
    assert not heavy & set(loaded.split())
