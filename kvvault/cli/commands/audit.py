"""audit tail, export, verify, checkpoint, prove, key; receipt ls, show, verify."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvvault.cli.commands.deleting import open_to_change
from kvvault.cli.files import write_private
from kvvault.cli.formats import Cell, human_bytes, iso_time, path_text, plural
from kvvault.cli.run import Run, command
from kvvault.errors import FormatError, UsageError

if TYPE_CHECKING:
    from kvvault.audit.checkpoint import VerifierKey
    from kvvault.audit.receipts import Receipt
    from kvvault.audit.verifying import Entry, Finding, LogCheck, Note
    from kvvault.catalog.receipts import ReceiptRow

__all__ = ["register"]

_MAX_FILE: Final = 16 << 20
_MAX_LOG: Final = 4 << 30
_LONG: Final = 4
"""So many items of a list stand in a table."""

_OUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Where to; stdout if not given."),
]
_AGAINST = Annotated[
    list[Path] | None,
    typer.Option(
        "--against",
        metavar="FILE",
        help="A checkpoint that was kept elsewhere. May be given several times.",
    ),
]
_KEY = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", help="What `kvvault audit key` printed, or a file of it."),
]


class Format(StrEnum):
    """How a receipt is shown."""

    TEXT = "text"
    MARKDOWN = "md"
    HTML = "html"
    JSON = "json"


def register(app: typer.Typer) -> None:
    audit = typer.Typer(name="audit", help="The audit log: look at it, sign it, check it.")
    command(audit, "tail")(tail)
    command(audit, "export")(export)
    command(audit, "verify")(verify)
    command(audit, "checkpoint")(checkpoint)
    command(audit, "prove")(prove)
    command(audit, "key")(key)
    app.add_typer(audit)
    receipt = typer.Typer(name="receipt", help="Signed receipts of deletions.")
    command(receipt, "ls")(receipt_ls)
    command(receipt, "show")(receipt_show)
    command(receipt, "verify", vault=False)(receipt_verify)
    app.add_typer(receipt)


# -- the log -------------------------------------------------------------------------------------


def tail(
    run: Run,
    count: Annotated[
        int, typer.Option("--lines", "-n", min=1, metavar="N", help="How many entries.")
    ] = 20,
) -> int | None:
    """Show the newest entries of the audit log."""
    with run.open_vault() as vault:
        entries = vault.audit.tail(count)
        size = vault.audit.size()
    if run.output.json:
        run.output.document({"size": size, "entries": [_entry(entry) for entry in entries]})
        return None
    rows = [
        [
            Cell(str(entry.index), right=True),
            Cell(iso_time(entry.at) or "-"),
            Cell(entry.kind),
            Cell(
                " ".join(
                    f"{name}={_fact(value)}"
                    for name, value in sorted(entry.facts.items())
                    if value is not None
                )
            ),
        ]
        for entry in entries
    ]
    run.output.table(["ENTRY", "AT", "KIND", "FACTS"], rows)
    return None


def _fact(value: object) -> str:
    """On a line; `--json` has long lists in full."""
    if isinstance(value, list):
        many = len(value) > _LONG
        return f"({len(value)} items)" if many else ",".join(map(str, value))
    return str(value)


def _entry(entry: Entry) -> dict[str, object]:
    return {
        "index": entry.index,
        "at": iso_time(entry.at),
        "kind": entry.kind,
        "facts": entry.facts,
    }


def export(run: Run, output: _OUT = None) -> int | None:
    """Write the whole log, one entry a line: canonical JSON, each line a leaf of the Merkle tree.

    `audit verify --log` checks such a file without the vault.
    """
    with run.open_vault() as vault:
        bodies = [body for _, body in vault.audit.bodies()]
    if run.output.json and output is None:
        run.output.document({"entries": bodies})
        return None
    _hand_over(run, "".join(f"{body}\n" for body in bodies), output)
    if run.output.json:
        run.output.document({"written": _where(output), "entries": len(bodies)})
    return None


def checkpoint(run: Run, output: _OUT = None) -> int | None:
    """Sign what the log is now. Keep the note where nobody who can write to the vault can: against
    it, `audit verify` finds whatever was changed before, also by somebody with every key.
    """
    from kvvault.audit.checkpoint import parse_note

    with open_to_change(run) as vault:
        note = vault.audit.checkpoint()
        said = parse_note(note, vault.audit.key)
    if output is not None:
        _hand_over(run, note, output)
    if run.output.json:
        run.output.document(
            {
                "written": _where(output),
                "checkpoint": note,
                "size": said.size,
                "root": said.root.hex(),
            }
        )
    elif output is None:
        _hand_over(run, note, None)
    return None


def key(run: Run) -> int | None:
    """Print the public key that checks what the vault signs. Give it to whoever gets receipts, and
    by another way than these.
    """
    with run.open_vault() as vault:
        ours = vault.audit.key
    if run.output.json:
        run.output.document(
            {
                "key": ours.text,
                "name": ours.name,
                "key_id": ours.key_id.hex(),
                "public_key": ours.public_key.hex(),
            }
        )
    else:
        run.output.lines(ours.text)
    return None


def prove(
    run: Run,
    receipt: Annotated[
        str, typer.Argument(metavar="RECEIPT", help="A receipt's id, or a file of it.")
    ],
    output: _OUT = None,
) -> int | None:
    """Write a receipt together with the proof that it is in the log."""
    given = None
    if not _is_id(receipt):
        given = _parse_receipt(Path(receipt))
    with run.open_vault() as vault:
        proven = vault.audit.prove(given or vault.audit.receipt(receipt))
    return _give(run, proven, proven.document + "\n", output)


def verify(
    run: Run,
    against: _AGAINST = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Check this file, from `audit export`, instead of a vault. Needs --key.",
        ),
    ] = None,
    key: _KEY = None,
) -> int | None:
    """Check that nobody changed the log: entries, checkpoints, receipts.

    Exits with 1 when anything is not as it was, and says where. Without a checkpoint that was kept
    elsewhere, somebody who has the vault and its signing key can have written it anew.
    """
    from kvvault.audit.verifying import Finding, check_log

    notes = [_note(path) for path in against or []]
    expected = None if key is None else _read_key(key)
    if log is None:
        with run.open_vault() as vault:
            ours = vault.audit.key
            found = vault.audit.verify(notes)
        findings: Sequence[Finding] = found.findings
        if expected is not None and expected != ours:
            other = Finding("the signing key", "it is not the one that was given")
            findings = [other, *findings]
        return _judge(run, found, findings, found.receipts)
    if expected is None:
        raise UsageError(
            "a file of the log is checked with the vault's public key",
            hint="add --key, with what `kvvault audit key` printed",
        )
    lines = _read(log, _MAX_LOG).split("\n")
    checked: LogCheck = check_log(
        enumerate(lines[:-1] if lines[-1] == "" else lines), notes, expected
    )
    return _judge(run, checked, checked.findings, None)


def _judge(run: Run, found: Any, findings: Sequence[Finding], receipts: int | None) -> int | None:
    if run.output.json:
        run.output.document(
            {
                "ok": not findings,
                "entries": found.size,
                "root": found.root.hex(),
                "checkpoints": found.checkpoints,
                "checkpoints_kept_elsewhere": found.outside,
                "receipts": receipts,
                "findings": [_finding(one) for one in findings],
            }
        )
        return 1 if findings else None
    kept = "" if receipts is None else f", {plural(receipts, 'receipt')}"
    run.output.lines(
        f"{plural(found.size, 'entry', 'entries')}{kept}; the log agrees with "
        f"{plural(found.checkpoints, 'checkpoint')}, {found.outside} of them given with --against"
    )
    if findings:
        run.output.lines(*(f"FAIL {one.where}: {one.what}" for one in findings))
        return 1
    if not found.outside:
        run.output.note(
            "no checkpoint that was kept elsewhere was given: somebody with the vault and its "
            "signing key could have written the log anew (see: kvvault audit checkpoint)"
        )
    return None


def _finding(finding: Finding) -> dict[str, str]:
    return {"where": finding.where, "what": finding.what}


# -- receipts ------------------------------------------------------------------------------------


def receipt_ls(run: Run) -> int | None:
    """List receipts: `revoked` when nothing is served any more, `purged` when a purge has destroyed
    the root key; ASSURANCE says what that is worth."""
    with run.open_vault() as vault:
        rows = vault.audit.receipts()
    documents = [_summary(row) for row in rows]
    if run.output.json:
        run.output.document({"receipts": documents})
        return None
    header = ["RECEIPT", "PHASE", "AT", "DELETION", "TRIGGER", "BLOCKS", "BYTES", "ASSURANCE"]
    run.output.table(header, [_cells(one) for one in documents])
    return None


def _summary(row: ReceiptRow) -> dict[str, object]:
    from kvvault.audit.receipts import parse

    try:
        said = parse(row.document).content
    except FormatError:
        said = {}  # `audit verify` says which

    def part(name: str) -> Any:
        found = said.get(name)
        return found if isinstance(found, dict) else {}

    return {
        "id": row.receipt_id.hex(),
        "phase": row.phase,
        "deletion": row.deletion_no,
        "entry": row.entry_no,
        "at": part("verification").get("at"),
        "trigger": part("deletion").get("trigger"),
        "blocks": part("deletion").get("blocks"),
        "bytes": part("deletion").get("bytes"),
        "assurance": part("assurance").get("level"),
    }


def _cells(one: dict[str, object]) -> list[Cell]:
    size = one["bytes"]
    return [
        Cell(str(one["id"])),
        Cell(str(one["phase"])),
        Cell(_text(one["at"])),
        Cell(_text(one["deletion"]), right=True),
        Cell(_text(one["trigger"])),
        Cell(_text(one["blocks"]), right=True),
        Cell(human_bytes(size) if isinstance(size, int) else "-", right=True),
        Cell(_text(one["assurance"])),
    ]


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def receipt_show(
    run: Run,
    ident: Annotated[
        str, typer.Argument(metavar="ID", help="A receipt's id; its first digits do.")
    ],
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="text, md or html for people; json to hand over, with the proof that it is in the "
            "log. If not given: text, and md into a file.",
            show_default=False,
        ),
    ] = None,
    output: _OUT = None,
) -> int | None:
    """Show a receipt."""
    from kvvault.audit.rendering import as_html, as_markdown, as_text

    with run.open_vault() as vault:
        receipt = vault.audit.prove(vault.audit.receipt(ident))
    if form is Format.JSON or run.output.json:
        return _give(run, receipt, receipt.document + "\n", output)
    if form is None:
        form = Format.TEXT if output is None else Format.MARKDOWN
    rendered = {Format.TEXT: as_text, Format.MARKDOWN: as_markdown, Format.HTML: as_html}[form]
    return _give(run, receipt, rendered(receipt), output)


def receipt_verify(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="From `kvvault receipt show ID --format json`.")
    ],
    key: _KEY = None,
) -> int | None:
    """Check a receipt. Needs nothing but the file and the vault's public key; no vault.

    Exits with 1 when it is not genuine. Without a key it only says whether the file agrees with
    itself, which anybody's file can.
    """
    from kvvault.audit.verifying import check_receipt

    receipt = _parse_receipt(file)
    expected = None if key is None else _read_key(key)
    findings = check_receipt(receipt, expected)
    if run.output.json:
        run.output.document(
            {
                "ok": not findings,
                "id": receipt.receipt_id,
                "phase": receipt.phase,
                "key_given": expected is not None,
                "in_log": None if receipt.proof is None else not findings,
                "findings": [_finding(one) for one in findings],
            }
        )
        return 1 if findings else None
    if findings:
        run.output.lines(*(f"FAIL {one.where}: {one.what}" for one in findings))
        return 1
    logged = "without" if receipt.proof is None else "with"
    run.output.lines(
        f"receipt {receipt.receipt_id} ({receipt.phase}) is genuine, {logged} proof that it is in "
        "the log"
        if expected is not None
        else f"receipt {receipt.receipt_id} ({receipt.phase}) agrees with the key that is in the "
        "file; whose key that is was not checked"
    )
    if expected is None:
        run.output.note("give the vault's public key, which you got by another way, with --key")
    return None


# -- files ---------------------------------------------------------------------------------------


def _give(run: Run, receipt: Receipt, text: str, output: Path | None) -> int | None:
    if output is not None:
        _hand_over(run, text, output)
        if run.output.json:
            run.output.document({"written": _where(output), "id": receipt.receipt_id})
    elif run.output.json:
        run.output.document(receipt.envelope)
    else:
        _hand_over(run, text, None)
    return None


def _hand_over(run: Run, text: str, output: Path | None) -> None:
    """To a file, or to stdout: byte for byte, as these texts are signed or hashed."""
    if output is None:
        run.output.lines(*text.removesuffix("\n").split("\n"))
        return
    write_private(output, text.encode("utf-8", "surrogateescape"), "the file")


def _where(output: Path | None) -> str | None:
    return None if output is None else path_text(output)


def _read(path: Path, most: int = _MAX_FILE) -> str:
    """
    :raises UsageError: there is no such file, or it is too large.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read a file: {(error.strerror or 'the system refuses').lower()}",
            hint="check the names of the files",
        ) from None
    if len(raw) > most:
        raise UsageError("a file is too large to be that", hint="check the names of the files")
    return raw.decode("utf-8", "surrogateescape")


def _note(path: Path) -> Note:
    from kvvault.audit.verifying import Note

    return Note(path_text(path), _read(path), outside=True)


def _read_key(given: str) -> VerifierKey:
    from kvvault.audit.checkpoint import VerifierKey

    if "+" in given and not Path(given).exists():
        return VerifierKey.parse(given)
    return VerifierKey.parse(_read(Path(given)))


def _parse_receipt(path: Path) -> Receipt:
    from kvvault.audit.receipts import parse

    return parse(_read(path))


def _is_id(text: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in text) and not Path(text).exists()
