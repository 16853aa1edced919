"""ls and show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvvault.cli.columns import Column, Query, as_cell, record, select
from kvvault.cli.formats import path_text
from kvvault.cli.inventory import Found, Inventory, Thing
from kvvault.cli.output import Output
from kvvault.cli.run import Run, command
from kvvault.model import NamespaceFacts, SegmentFacts, SegmentState, TenantFacts

__all__ = ["register"]

_T = TypeVar("_T")


def register(app: typer.Typer) -> None:
    command(app, "ls")(ls)
    command(app, "show")(show)


def ls(
    run: Run,
    what: Annotated[Thing, typer.Argument(metavar="KIND", help="segments, tenants or namespaces.")],
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="TEST",
            help="FIELD OPERATOR VALUE, such as 'bytes>1MB', 'age<2d', 'state=sealed'; "
            "may be given several times.",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="FIELD or FIELD:desc; oldest first if not given."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show the first N only.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also segments that are gone (tombstones).")
    ] = False,
) -> int | None:
    """List segments, tenants or namespaces.

    Ids are shown as their shortest unique beginning, which `show` takes; in full with --json.
    """
    with run.open_vault() as vault:
        inventory = Inventory.of(vault)
    query = Query(tuple(filters or ()), sort, limit)
    short = inventory.short
    if what is Thing.SEGMENTS:
        segments = [
            facts
            for facts in inventory.segments
            if everything or facts.state.live or facts.state is SegmentState.REVOKED
        ]
        _list(run.output, what, segments, inventory.segment_columns, query, short)
    elif what is Thing.TENANTS:
        _list(run.output, what, inventory.tenants, inventory.tenant_columns, query, short)
    else:
        _list(run.output, what, inventory.namespaces, inventory.namespace_columns, query, short)
    return None


def _list(
    output: Output,
    what: Thing,
    rows: Sequence[_T],
    columns: Sequence[Column[_T]],
    query: Query,
    short: Mapping[bytes, str],
) -> None:
    chosen, total = select(rows, columns, query)
    if output.json:
        output.document({what.value: [record(row, columns) for row in chosen], "total": total})
        return
    shown = [column for column in columns if column.in_table]
    output.table(
        [column.name.upper() for column in shown],
        [[as_cell(column.kind, column.get(row), short) for column in shown] for row in chosen],
    )
    if len(chosen) < total:
        output.note(f"{len(chosen)} of {total} shown")


def show(
    run: Run,
    ident: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Id of a segment, tenant or namespace; its first digits do, if they are unique.",
        ),
    ],
) -> int | None:
    """Show everything about one segment, tenant or namespace."""
    path = run.vault_path()
    with run.open_vault() as vault:
        inventory = Inventory.of(vault)
    thing, facts = inventory.find(ident)
    document = {"kind": thing.one, **_details(inventory, facts, path)}
    if run.output.json:
        run.output.document(document)
        return None
    pairs: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            pairs += [(f"{name}.{key}", str(item)) for key, item in value.items()]
        elif isinstance(value, list):
            pairs += [(name, str(item)) for item in value] or [(name, "-")]
        else:
            pairs.append((name, "-" if value is None else str(value)))
    run.output.pairs(pairs)
    return None


def _details(inventory: Inventory, facts: Found, vault: Path) -> dict[str, object]:
    if isinstance(facts, SegmentFacts):
        return {**record(facts, inventory.segment_columns), "file": _file(facts, vault)}
    if isinstance(facts, TenantFacts):
        mine = [s.segment_id for s in inventory.segments if s.tenant_id == facts.tenant_id]
        return {
            **record(facts, inventory.tenant_columns),
            "segment_ids": [ident.hex() for ident in mine],
        }
    return _namespace(inventory, facts)


def _namespace(inventory: Inventory, facts: NamespaceFacts) -> dict[str, object]:
    inside = [
        s.segment_id
        for s in inventory.segments
        if s.state.live and s.namespace_digest == facts.namespace.digest
    ]
    return {
        **record(facts, inventory.namespace_columns),
        "facts": dict(facts.namespace.facts),
        "segment_ids": [ident.hex() for ident in inside],
    }


def _file(facts: SegmentFacts, vault: Path) -> dict[str, object]:
    """The file behind a segment, as it is now."""
    from kvvault import layout
    from kvvault.segments.format import segment_name

    file = layout.segments_path(vault) / segment_name(facts.segment_id)
    try:
        size: int | None = file.lstat().st_size
    except OSError:
        size = None
    return {"path": path_text(file.absolute()), "exists": size is not None, "bytes": size}
