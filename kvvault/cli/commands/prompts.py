"""prompts ls, show, subjects, df, find: which prompts persist.

Each of these questions is written down in the audit log before it is answered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvvault.cli.commands.finding import prompts_find, refusals_noted
from kvvault.cli.formats import (
    Cell,
    human_bytes,
    human_duration,
    iso_time,
    parse_duration,
    parse_size,
    parse_time,
    short_ids,
)
from kvvault.cli.run import Run, command
from kvvault.errors import UsageError

if TYPE_CHECKING:
    from kvvault.promptfacts import Condition, Detail, PromptFacts, SubjectFacts, Usage
    from kvvault.vault import Vault

__all__ = ["conditions_of", "register"]

_CONDITION: Final = re.compile(r"\s*([A-Za-z_]+(?:\.[^\s=!<>~]+)?)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*")
_DEFAULT_LIMIT: Final = 100

_FILTER = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="TEST",
        help="FIELD OPERATOR VALUE, such as 'age>7d', 'bytes>10MB', 'subject=jane', "
        "'label.team=ads'; may be given several times.",
    ),
]
_TENANT = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Of this tenant only.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        name="prompts", help="Which prompts persist. Every question is an entry of the audit log."
    )
    command(group, "ls")(prompts_ls)
    command(group, "show")(prompts_show)
    command(group, "subjects")(prompts_subjects)
    command(group, "df")(prompts_df)
    command(group, "find")(prompts_find)
    app.add_typer(group)


def conditions_of(texts: Sequence[str]) -> list[Condition]:
    """What ``--filter`` says, in the fields' units.

    :raises UsageError: not FIELD OPERATOR VALUE, or a value that is none of its field. Repeats no
        value of a text field: that could be a name.
    """
    from kvvault.promptfacts import NUMBERS, Condition

    found = []
    for text in texts:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UsageError(
                "--filter: that is not FIELD OPERATOR VALUE",
                hint='for instance "bytes>10MB"; operators are = != < <= > >=',
            )
        name, op, value = match.groups()
        kind = NUMBERS.get(name)
        found.append(Condition(name, op, value if kind is None else _number(kind, value)))
    return found


def _number(kind: str, text: str) -> float:
    parse = {"duration": parse_duration, "size": parse_size, "time": parse_time}.get(kind, _count)
    try:
        return float(parse(text))
    except ValueError as error:
        raise UsageError(
            f"--filter: {text[:40]!r} is {str(error).partition(';')[0]}",
            hint=str(error).partition("; ")[2] or "write a whole number",
        ) from None


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("not a count; write a whole number")
    return int(text)


def prompts_ls(
    run: Run,
    filters: _FILTER = None,
    tenant: _TENANT = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="FIELD or FIELD:desc; lately used ones first if not given."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="Show the first N only; 100 if not given.")
    ] = _DEFAULT_LIMIT,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Show all, however many.")
    ] = False,
) -> int | None:
    """List prompts that persist: whose, how much, until when.

    Of ALONE a prompt has the only use; the rest of BYTES it shares with others. Ids are shown as
    their shortest unique beginning, which `prompts show` takes; in full with --json.
    """
    name, _, direction = (sort or "last_used:desc").partition(":")
    if direction not in ("", "asc", "desc"):
        raise UsageError("--sort: the direction is asc or desc", hint=f"for instance {name}:desc")
    conditions = conditions_of(filters or ())
    with run.open_vault() as vault:
        with refusals_noted(vault, "prompts ls"):
            rows, total = vault.prompts.listing(
                conditions,
                tenant=tenant,
                sort=name,
                descending=direction == "desc",
                limit=None if everything else limit,
            )
        _note(vault, "prompts ls", tenant or _named(conditions), total)
        now = vault.time.steady()
    if run.output.json:
        run.output.document({"prompts": [_json(row) for row in rows], "total": total})
        return None
    short = short_ids(row.prompt_id for row in rows)
    header = ["PROMPT", "TENANT", "SUBJECT", "REQUEST", "MODEL", "TOKENS", "BYTES", "ALONE"]
    header += ["AGE", "USED", "UNTIL", "RULE", "HOLDS"]
    run.output.table(header, [_row(row, short, now) for row in rows])
    if len(rows) < total:
        run.output.note(f"{len(rows)} of {total} shown")
    return None


def _named(conditions: Sequence[Condition]) -> str | None:
    """The tenant that a filter names."""
    return next((str(c.value) for c in conditions if (c.name, c.op) == ("tenant", "=")), None)


def _note(vault: Vault, what: str, tenant: str | None, rows: int) -> None:
    tenant_id = None
    if tenant is not None:
        tenant_id = next((t.tenant_id for t in vault.tenants() if t.name == tenant), None)
    vault.note_question(what, tenant_id=tenant_id, rows=rows)


def _row(row: PromptFacts, short: Mapping[bytes, str], now: float) -> list[Cell]:
    return [
        Cell(short[row.prompt_id]),
        Cell(row.tenant or "-"),
        Cell(row.subject or "-"),
        Cell(row.request_id or "-"),
        Cell(row.model or "-"),
        Cell(str(row.tokens), right=True),
        Cell(human_bytes(row.data_bytes), right=True),
        Cell(human_bytes(row.alone_bytes), right=True),
        Cell(human_duration(now - row.first_used), right=True),
        Cell(human_duration(now - row.last_used), right=True),
        Cell(_moment(row.last_deadline)),
        Cell(", ".join(row.rules) or "-"),
        Cell(", ".join(map(str, row.holds)) or "-"),
    ]


def _json(row: PromptFacts) -> dict[str, object]:
    return {
        "id": row.prompt_id.hex(),
        "tenant_id": row.tenant_id.hex(),
        "tenant": row.tenant,
        "subject": row.subject,
        "labels": dict(row.labels),
        "request": row.request_id,
        "fingerprint": row.fingerprint,
        "preview": row.preview,
        "namespace": row.namespace.hex(),
        "model": row.model,
        "first_used": iso_time(row.first_used),
        "last_used": iso_time(row.last_used),
        "tokens": row.tokens,
        "blocks": row.blocks,
        "bytes": row.data_bytes,
        "alone_blocks": row.alone_blocks,
        "alone": row.alone_bytes,
        "shared": row.shared_bytes,
        "first_deadline": iso_time(row.first_deadline),
        "deadline": iso_time(row.last_deadline),
        "rules": list(row.rules),
        "classes": list(row.classes),
        "holds": list(row.holds),
    }


def prompts_show(
    run: Run,
    ident: Annotated[
        str,
        typer.Argument(metavar="ID", help="Id of a prompt; at least its first four digits."),
    ],
) -> int | None:
    """Show everything about one prompt: its blocks, with whom it shares, until when it is kept."""
    with run.open_vault() as vault:
        with refusals_noted(vault, "prompts show"):
            detail = vault.prompts.show(ident)
        vault.note_question("prompts show", tenant_id=detail.facts.tenant_id, rows=1)
    document = _detail(detail)
    if run.output.json:
        run.output.document(document)
        return None
    pairs: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            pairs += [(f"{name}.{key}", str(item)) for key, item in value.items()]
        elif name != "parts":
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            pairs.append((name, "-" if shown in (None, "") else str(shown)))
    run.output.pairs(pairs)
    run.output.table(
        ["SEGMENT", "STORED", "UNTIL", "RULE", "OWN", "REUSED", "TOKENS"],
        [
            [
                Cell(part.segment.segment_id.hex()[:8]),
                Cell(_moment(part.segment.created_at)),
                Cell(_moment(part.segment.deadline)),
                Cell(part.segment.rule or "-"),
                Cell(str(part.own), right=True),
                Cell(str(part.reused), right=True),
                Cell(str(part.tokens), right=True),
            ]
            for part in detail.parts
        ],
    )
    return None


def _detail(detail: Detail) -> dict[str, object]:
    return {
        **_json(detail.facts),
        "shared_with": detail.shared_with,
        "parts": [
            {
                "segment": part.segment.segment_id.hex(),
                "stored_at": iso_time(part.segment.created_at),
                "deadline": iso_time(part.segment.deadline),
                "rule": part.segment.rule,
                "class": part.segment.retention_class or None,
                "own_blocks": part.own,
                "reused_blocks": part.reused,
                "tokens": part.tokens,
            }
            for part in detail.parts
        ],
    }


def prompts_subjects(run: Run, tenant: _TENANT = None) -> int | None:
    """List subjects with prompts that persist. ALONE: what each of their prompts has alone."""
    with run.open_vault() as vault:
        with refusals_noted(vault, "prompts subjects"):
            rows = vault.prompts.subjects(tenant=tenant)
        _note(vault, "prompts subjects", tenant, len(rows))
    if run.output.json:
        run.output.document({"subjects": [_subject(row) for row in rows]})
        return None
    run.output.table(
        ["TENANT", "SUBJECT", "PROMPTS", "ALONE", "FIRST", "LAST", "UNTIL", "HOLDS"],
        [
            [
                Cell(row.tenant or "-"),
                Cell(row.subject or "-"),
                Cell(str(row.prompts), right=True),
                Cell(human_bytes(row.alone_bytes), right=True),
                Cell(_moment(row.first_used)),
                Cell(_moment(row.last_used)),
                Cell(_moment(row.last_deadline)),
                Cell(", ".join(map(str, row.holds)) or "-"),
            ]
            for row in rows
        ],
    )
    return None


def _subject(row: SubjectFacts) -> dict[str, object]:
    return {
        "id": row.text_id.hex(),
        "tenant_id": row.tenant_id.hex(),
        "tenant": row.tenant,
        "subject": row.subject,
        "prompts": row.prompts,
        "alone": row.alone_bytes,
        "first_used": iso_time(row.first_used),
        "last_used": iso_time(row.last_used),
        "deadline": iso_time(row.last_deadline),
        "holds": list(row.holds),
    }


def prompts_df(
    run: Run,
    by: Annotated[
        str, typer.Option("--by", metavar="GROUP", help="tenant, class, model or age.")
    ] = "tenant",
    tenant: _TENANT = None,
) -> int | None:
    """Show what is stored by tenant, retention class, model or age, and how much of it is no
    prompt's."""
    with run.open_vault() as vault:
        with refusals_noted(vault, "prompts df"):
            rows = vault.prompts.usage(by, tenant=tenant)
        _note(vault, "prompts df", tenant, len(rows))
    if run.output.json:
        run.output.document({"by": by, "groups": [_usage(row) for row in rows]})
        return None
    run.output.table(
        [by.upper(), "PROMPTS", "BLOCKS", "BYTES", "NOBODY'S"],
        [
            [
                Cell(row.group or "-"),
                Cell(str(row.prompts), right=True),
                Cell(str(row.blocks), right=True),
                Cell(human_bytes(row.data_bytes), right=True),
                Cell(human_bytes(row.nobodys_bytes), right=True),
            ]
            for row in rows
        ],
    )
    return None


def _usage(row: Usage) -> dict[str, object]:
    return {
        "group": row.group,
        "prompts": row.prompts,
        "blocks": row.blocks,
        "bytes": row.data_bytes,
        "nobodys_blocks": row.nobodys_blocks,
        "nobodys_bytes": row.nobodys_bytes,
    }


def _moment(seconds: float | None) -> str:
    stamp = iso_time(seconds)
    return "-" if stamp is None else f"{stamp[:19]}Z"
