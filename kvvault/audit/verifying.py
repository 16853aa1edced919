"""Checking a log and receipts: pure, from texts and a public key, with or without a vault.

What is found says where. Two things carry it. Each entry names the hash of the one before: an edit,
a removal or an exchange shows at that entry, as long as whoever made it did not write all later
entries anew. And checkpoints say what the root was: against one that is kept where he cannot write,
rewriting everything does not help him either. Without one of those, somebody who has the catalog
*and* the signing key can make another history since the last checkpoint that left the machine, and
nothing here sees it; nor does anything see that the newest entries are gone together with all that
names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvvault.audit import merkle
from kvvault.audit.checkpoint import Checkpoint, VerifierKey, origin_of, parse_note
from kvvault.audit.envelope import Proof, Receipt, parse
from kvvault.catalog.log import exactly, link_of, raw
from kvvault.catalog.receipts import ReceiptRow
from kvvault.errors import FormatError

__all__ = [
    "Entry",
    "Finding",
    "LogCheck",
    "Note",
    "check_log",
    "check_receipt",
    "check_stored_receipts",
    "deletion_of",
    "is_entry_of",
    "read_entry",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as kvvault left it."""

    where: str
    """``entry 17``, ``entries 10 to 19``, ``receipt 0af3...``, ``checkpoint ...``, ``the log``."""
    what: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log."""

    index: int
    kind: str
    at: float
    """Seconds since the epoch, by the vault's own time."""
    facts: dict[str, Any]
    """What else it says."""
    prev: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A checkpoint to check the log against."""

    name: str
    """What to call it: a file's name, "of 120 entries, in the catalog"."""
    text: str
    outside: bool = False
    """It was kept elsewhere."""


@dataclass(frozen=True, slots=True)
class LogCheck:
    """What became of a check."""

    size: int
    """Entries."""
    root: bytes
    checkpoints: int
    """With how many it agrees."""
    outside: int
    """Of them, kept elsewhere."""
    findings: tuple[Finding, ...]
    receipts: tuple[tuple[Entry, str], ...]
    """Entries that name receipts, and what they name."""


def read_entry(index: int, body: str) -> Entry:
    """What an entry says.

    Raises:
        FormatError: no kvvault wrote it so.
    """
    try:
        found = json.loads(body)
        if not isinstance(found, dict) or exactly(found) != body:
            raise ValueError("not canonical")
        kind, at, prev = found.pop("kind"), found.pop("at"), found.pop("prev", None)
        if not isinstance(kind, str) or isinstance(at, bool) or not isinstance(at, int | float):
            raise TypeError("not an entry")
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise FormatError(
            f"entry {index} of the audit log is not what kvvault writes",
            hint="run: kvvault audit verify",
        ) from exc
    return Entry(index, kind, float(at), found, prev)


class _Walk:
    """One pass over the entries. Keeps a hash per power of two, not the entries."""

    def __init__(self, notes: Sequence[tuple[Note, Checkpoint]]) -> None:
        self.tree = merkle.Frontier()
        self.findings: list[Finding] = []
        self.receipts: list[tuple[Entry, str]] = []
        self.agreeing: list[Note] = []
        self.keys: list[tuple[int, str]] = []
        self._open = sorted(notes, key=lambda one: one[1].size)
        self._previous: str | None = None
        self._whole = True
        """Nothing is missing so far: positions in the tree are right."""
        self._agreed = 0
        """So many entries are those of a checkpoint."""
        self._differs = False
        self._compare()

    def step(self, index: int, body: str) -> None:
        expected = self.tree.size
        if index != expected and self._whole:
            self._whole = False
            gap = f"entry {expected}" if index == expected + 1 else f"entries from {expected} on"
            self.findings.append(Finding(gap, f"missing: the next one there is is number {index}"))
        try:
            entry = read_entry(index, body)
        except FormatError:
            self.findings.append(Finding(f"entry {index}", "altered: kvvault writes none like it"))
        else:
            self._link(entry)
            if entry.kind == "receipt":
                self.receipts.append((entry, str(entry.facts.get("receipt"))))
            elif entry.kind == "signing-key-made":
                self.keys.append((index, str(entry.facts.get("public_key"))))
        self._previous = body
        self.tree.push(merkle.leaf_hash(raw(body)))
        self._compare()

    def _link(self, entry: Entry) -> None:
        if self._previous is None and self._whole:
            if entry.prev is not None:
                self.findings.append(
                    Finding("entry 0", "it was not the first: those before it were removed")
                )
        elif self._previous is not None and entry.prev != link_of(self._previous):
            self.findings.append(
                Finding(
                    f"entry {entry.index - 1}",
                    f"not what entry {entry.index} was written after: one of the two was altered, "
                    "or entries were removed between them, moved or put in",
                )
            )

    def _compare(self) -> None:
        while self._open and self._open[0][1].size == self.tree.size:
            note, said = self._open.pop(0)
            if self._whole and said.root == self.tree.root():
                self._agreed = said.size
                self.agreeing.append(note)
            elif note.outside or not self._differs:
                self._differs = True
                where = f"entries {self._agreed} to {said.size - 1}"
                if said.size - 1 <= self._agreed:
                    where = f"entry {self._agreed}"
                what = f"not what they were at the checkpoint {note.name}"
                self.findings.append(Finding(where, what))

    def finish(self, key: VerifierKey) -> None:
        for note, said in self._open:
            self.findings.append(
                Finding(
                    "the log",
                    f"{self.tree.size} entries, but {said.size} at the checkpoint {note.name}: the "
                    "newest were removed, or an older copy of the catalog was put in place",
                )
            )
        for index, made in self.keys[1:]:
            self.findings.append(
                Finding(
                    f"entry {index}",
                    "another signing key was made here: the one before was taken out of the "
                    f"catalog ({made})",
                )
            )
        if not any(made == key.text for _, made in self.keys):
            self.findings.append(Finding("the log", "no entry says that this key was made"))


def check_log(
    entries: Iterable[tuple[int, str]], notes: Iterable[Note], key: VerifierKey
) -> LogCheck:
    """Check a whole log, in one pass.

    :param entries: index and body of each, in order.
    :param notes: checkpoints, of any size and in any order.
    """
    findings = []
    readable: list[tuple[Note, Checkpoint]] = []
    for note in notes:
        try:
            readable.append((note, parse_note(note.text, key)))
        except FormatError as exc:
            findings.append(Finding(f"checkpoint {note.name}", str(exc)))
    walk = _Walk(readable)
    for index, body in entries:
        walk.step(index, body)
    walk.finish(key)
    return LogCheck(
        walk.tree.size,
        walk.tree.root(),
        len(walk.agreeing),
        sum(note.outside for note in walk.agreeing),
        (*findings, *walk.findings),
        tuple(walk.receipts),
    )


# -- receipts ------------------------------------------------------------------------------------


def check_receipt(receipt: Receipt, key: VerifierKey | None) -> list[Finding]:
    """Check a receipt by itself: who signed it, and the proof that it is in the log, if it has one.

    :param key: the vault's, from elsewhere; without it only whether the file agrees with itself.
    """
    name = f"receipt {receipt.receipt_id}"
    findings = []
    if not receipt.authentic:
        findings.append(Finding(name, "altered: its signature does not verify"))
    if key is not None and receipt.public_key != key.public_key:
        findings.append(Finding(name, "not signed by the key that was given"))
    origin = _origin(receipt)
    if origin is None or (key is not None and origin != key.name):
        findings.append(Finding(name, "of another vault than the key that was given"))
    if receipt.proof is not None and origin is not None:
        signer = key or VerifierKey(origin, receipt.public_key)
        findings += _check_proof(receipt, receipt.proof, signer, name)
    return findings


def _origin(receipt: Receipt) -> str | None:
    """Which vault's it says it is; None where it contradicts itself."""
    found = receipt.content.get("log")
    try:
        origin = origin_of(bytes.fromhex(str(receipt.content.get("vault"))))
    except ValueError:
        return None
    return origin if isinstance(found, dict) and found.get("origin") == origin else None


def _check_proof(receipt: Receipt, proof: Proof, key: VerifierKey, name: str) -> list[Finding]:
    findings = []
    if proof.entry != receipt.entry or not is_entry_of(proof.entry, proof.body, receipt):
        findings.append(Finding(name, f"the entry {proof.entry} that came with it is not its own"))
    try:
        said = parse_note(proof.checkpoint, key)
    except FormatError as exc:
        return [*findings, Finding(name, str(exc))]
    leaf = merkle.leaf_hash(raw(proof.body))
    if proof.size != said.size or not merkle.is_included(
        leaf, proof.entry, said.size, proof.proof, said.root
    ):
        findings.append(Finding(name, "the proof does not show that it is in the log"))
    return findings


def is_entry_of(index: int, body: str, receipt: Receipt) -> bool:
    """Whether an entry is the one of this receipt."""
    try:
        return _is_of(read_entry(index, body), receipt)
    except FormatError:
        return False


def deletion_of(receipt: Receipt) -> int | None:
    """The number of the deletion it says it is of; None of one that sums up."""
    deletion = receipt.content.get("deletion")
    number = deletion.get("number") if isinstance(deletion, dict) else None
    return number if isinstance(number, int) else None


def check_stored_receipts(
    rows: Sequence[ReceiptRow], named: Iterable[tuple[Entry, str]], key: VerifierKey
) -> list[Finding]:
    """Check the receipts that a catalog keeps against the entries that name them.

    :param named: entries that name receipts, and the receipts' ids.
    """
    entries = {entry.index: entry for entry, _ in named}
    findings = []
    for row in rows:
        name = f"receipt {row.receipt_id.hex()}"
        try:
            receipt: Receipt | None = parse(row.document)
        except FormatError:
            receipt = None
        if receipt is None or receipt.document != row.document or receipt.proof is not None:
            findings.append(Finding(name, "altered: kvvault keeps none like it"))
            continue
        findings += check_receipt(receipt, key)
        told = (receipt.receipt_id, receipt.phase, receipt.entry, deletion_of(receipt))
        if told != (row.receipt_id.hex(), row.phase, row.entry_no, row.deletion_no):
            findings.append(Finding(name, "its row says something else than it does"))
        entry = entries.get(receipt.entry)
        if entry is None or not _is_of(entry, receipt):
            findings.append(Finding(name, f"not what entry {receipt.entry} of the log says it was"))
    known = {row.receipt_id.hex() for row in rows}
    for index, entry in entries.items():
        named_id = str(entry.facts.get("receipt"))
        if named_id not in known:
            findings.append(Finding(f"receipt {named_id}", f"removed; entry {index} is of it"))
    return findings


def _is_of(entry: Entry, receipt: Receipt) -> bool:
    facts = entry.facts
    return (
        entry.kind == "receipt"
        and facts.get("receipt") == receipt.receipt_id
        and facts.get("phase") == receipt.phase
        and facts.get("deletion") == deletion_of(receipt)
        and facts.get("sha256") == receipt.digest
    )
