"""Receipts for people: plain text, Markdown, and one HTML page that prints and loads nothing from
elsewhere.

What a receipt says is text of others (a reason, a name): everything is escaped, and the page has no
script, no link and no form.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvvault.audit.receipts import ERASE, PURGED, Receipt, result_of
from kvvault.crypto.providers.base import Assurance

__all__ = ["as_html", "as_markdown", "as_text", "inert", "sections"]

Section: TypeAlias = tuple[str, Sequence[tuple[str, str]]]

_SHOWN_IDS: Final = 20
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()#+!|~-])")
_PARTS: Final = re.compile(r"([\s`|\\\[\](){}<>&*_~#]+)")
_LIVE: Final = re.compile(r"[@$]|://|www\.", re.IGNORECASE)
_STYLE: Final = (
    "body{font:12pt/1.4 serif;max-width:48em;margin:2em auto;padding:0 1em}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin:1.2em 0 .3em}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;vertical-align:top;padding:.2em .6em .2em 0;overflow-wrap:anywhere}"
    "th{font-weight:normal;color:#555;width:14em}"
    "@media print{body{margin:0;max-width:none}}"
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def as_text(receipt: Receipt) -> str:
    """The receipt for a terminal, ending with a line end; nothing in it that a terminal acts on."""
    lines = [_title(receipt), ""]
    for title, rows in sections(receipt):
        width = max(len(name) for name, _ in rows)
        lines += [
            title,
            *(f"  {_plain(name):<{width}}  {_plain(value)}" for name, value in rows),
            "",
        ]
    return "\n".join(lines)


def as_markdown(receipt: Receipt) -> str:
    """The receipt as Markdown, ending with a line end."""
    lines = [f"# {_title(receipt)}", ""]
    for title, rows in sections(receipt):
        lines += [f"## {title}", "", "| | |", "|---|---|"]
        lines += [f"| {_in_markdown(name)} | {_in_markdown(value)} |" for name, value in rows]
        lines.append("")
    return "\n".join(lines)


def as_html(receipt: Receipt) -> str:
    """The receipt as a page of HTML."""
    title = html.escape(_title(receipt))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
    ]
    for heading, rows in sections(receipt):
        parts.append(f"<h2>{html.escape(heading)}</h2><table>")
        parts += [
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(_plain(value))}</td></tr>"
            for name, value in rows
        ]
        parts.append("</table>")
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def sections(receipt: Receipt) -> list[Section]:
    """What the receipt says, in the order in which people read it. Whatever is missing is left
    out."""
    said = receipt.content
    found: list[Section] = [
        ("What was deleted", _deletion(_map(said.get("deletion")), receipt.phase)),
        ("What stayed, and why", _kept(said)),
        ("How", _how(said)),
        ("What that is worth", _worth(receipt)),
        ("How to check it", _proof(receipt)),
    ]
    return [(title, rows) for title, rows in found if rows]


def _title(receipt: Receipt) -> str:
    phase = "revoked"
    if receipt.phase == PURGED:
        final = _level(receipt) == Assurance.PURGE
        phase = "made unrecoverable" if final else "purged, which is logical"
    return f"Receipt {receipt.receipt_id}: {phase}"


def _deletion(said: Mapping[str, Any], phase: str) -> list[tuple[str, str]]:
    # Single blocks: in the first receipt the keys of their segments are yet to go.
    yet = said.get("trigger") == ERASE and phase != PURGED
    keys = _map(said.get("keys"))
    ids = [str(one) for one in keys.get("ids", [])]
    shown = ", ".join(ids[:_SHOWN_IDS])
    if len(ids) > _SHOWN_IDS:
        shown += f", and {len(ids) - _SHOWN_IDS} more (in the file)"
    numbers = said.get("numbers")
    return _rows(
        ("Deletion", said.get("number")),
        ("Deletions", None if numbers is None else f"{numbers[0]} to {numbers[-1]}"),
        ("How many", said.get("count")),
        ("Asked for by", said.get("trigger")),
        ("Reason", said.get("reason")),
        *((f"Scope: {name}", value) for name, value in _map(said.get("scope")).items()),
        ("Prompts", said.get("prompts")),
        ("Blocks", said.get("blocks")),
        ("Bytes", said.get("bytes")),
        ("Segments", said.get("segments")),
        ("Segments concerned" if yet else "Keys destroyed", keys.get("count")),
        ("Ids of the segments" if yet else "Ids of the keys", shown or keys.get("sha256")),
        ("Policy in force (SHA-256)", said.get("policy_sha256")),
        ("Revoked at", said.get("revoked_at")),
        ("The last of them at", said.get("revoked_until")),
    )


_KEPT: Final = {
    "shared_prompts": "Prompts that share blocks with it and keep them",
    "shared_blocks": "Blocks that stay for them",
    "shared_bytes": "Bytes that stay for them",
    "held_segments": "Segments kept by legal holds",
    "held_prompts": "Prompts kept by legal holds",
    "held_blocks": "Blocks kept by legal holds",
    "held_bytes": "Bytes kept by legal holds",
}


def _kept(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    kept = _map(said.get("kept"))
    rows = [(label, str(kept[name])) for name, label in _KEPT.items() if kept.get(name)]
    if kept and not rows:
        rows = [("Of what was asked for", "nothing stayed")]
    for one in said.get("engine_copies") or []:
        copy = _map(one)
        reached = "dropped" if copy.get("reached") else "not reached"
        detail = f" ({copy['detail']})" if copy.get("detail") else ""
        rows.append((f"Copy in an engine: {copy.get('what')}", f"{reached}{detail}"))
    return rows


def _how(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    media, tool = _map(said.get("media")), _map(said.get("tool"))
    performed, purge = _map(said.get("performed")), _map(said.get("purge"))
    return _rows(
        ("Media", media.get("type")),
        ("Vault", said.get("vault")),
        ("Method", said.get("method")),
        ("Tool", f"{tool.get('name')} {tool.get('version')}" if tool else None),
        ("By", performed.get("by")),
        ("At", performed.get("at")),
        ("Where", performed.get("where")),
        ("Purge", purge.get("number")),
        ("Root key destroyed", purge.get("root_key")),
        ("Call to the key provider", purge.get("provider_call")),
        ("Its result", purge.get("result")),
        ("Destroyed at", purge.get("destroyed_at")),
        ("Verified at", purge.get("verified_at")),
    )


def _level(receipt: Receipt) -> object:
    return _map(receipt.content.get("assurance")).get("level")


def _worth(receipt: Receipt) -> list[tuple[str, str]]:
    said = receipt.content
    assurance, check = _map(said.get("assurance")), _map(said.get("verification"))
    return _rows(
        ("Assurance", assurance.get("level")),
        ("Because", assurance.get("reason")),
        ("Key provider", assurance.get("key_provider")),
        ("Verified by", check.get("method")),
        # Receipts of older versions claimed more than their assurance.
        ("Result", result_of(receipt.phase, _level(receipt)) or check.get("result")),
        ("Backups", said.get("backups")),
    )


def _proof(receipt: Receipt) -> list[tuple[str, str]]:
    first = _map(receipt.content.get("revoked_receipt"))
    log = _map(receipt.content.get("log"))
    proof = receipt.proof
    return _rows(
        ("First receipt", first.get("id")),
        ("Its SHA-256", first.get("sha256")),
        ("SHA-256 of this one", receipt.digest),
        ("Log", log.get("origin")),
        ("Entry", log.get("entry")),
        ("Proven in a log of", None if proof is None else f"{proof.size} entries"),
        ("Public key", receipt.public_key.hex()),
        ("Signature", receipt.signature.hex()),
        ("Check the file with", "kvvault receipt verify FILE --key KEY"),
    )


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rows(*pairs: tuple[str, object]) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in pairs if value not in (None, "")]


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(text: str) -> str:
    """On one line, without what a terminal or a browser could act on."""
    return "".join(char if char.isprintable() else " " for char in text)


def _in_markdown(text: str) -> str:
    return inert(_plain(text), _escaped)


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", html.escape(text, quote=False))


def inert(text: str, escape: Callable[[str], str]) -> str:
    """Text as Markdown in which nothing becomes a link, a mention or a formula. Readers find these
    after they have taken escapes away, so words that could be one are set as code.

    :param escape: for everything else, and for every character that is markup.
    """
    return "".join(
        f"`{part}`" if _LIVE.search(part) else escape(part) for part in _PARTS.split(text)
    )
