"""The audit log of a vault: reading it, signing what it is now, checking that it is what it was.

Entries are added in the transactions of the acts they tell of (`kvvault.catalog.log.append`); here
nothing is added but checkpoints. What checking finds, and what only a checkpoint kept elsewhere
lets it find, stands in `kvvault.audit.verifying`.

Making a checkpoint, proving and checking read the whole log: some microseconds an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import Connection

from kvvault.audit import merkle
from kvvault.audit.checkpoint import Checkpoint, VerifierKey, origin_of, parse_note, sign_note
from kvvault.audit.receipts import Proof, Receipt, parse
from kvvault.audit.verifying import (
    Entry,
    Finding,
    LogCheck,
    Note,
    check_log,
    check_receipt,
    check_stored_receipts,
    read_entry,
)
from kvvault.catalog import log, receipts
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import CheckpointRow
from kvvault.catalog.receipts import ReceiptRow
from kvvault.crypto.signing import Signer
from kvvault.errors import CatalogCorruptError, FormatError, UsageError

__all__ = ["AuditLog", "Verification"]

_CHUNK = 10_000
"""Entries that are read at once."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of log, checkpoints and receipts found."""

    size: int
    """Entries."""
    root: bytes
    checkpoints: int
    """With how many the log agrees."""
    outside: int
    """Of them, kept elsewhere."""
    receipts: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


class AuditLog:
    """Any thread."""

    def __init__(
        self,
        catalog: Catalog,
        vault_id: bytes,
        signer: Callable[[], Signer],
        now: Callable[[], float],
    ) -> None:
        """
        :param signer: gives the vault's signing key; raises a VaultKeyError where it has none.
        :param now: the vault's own time.
        """
        self._catalog = catalog
        self._origin = origin_of(vault_id)
        self._signer = signer
        self._now = now

    @property
    def key(self) -> VerifierKey:
        """The key that checks what this vault signs.

        Raises:
            VaultKeyError: the vault has none yet.
        """
        return VerifierKey(self._origin, self._signer().public_key)

    def size(self) -> int:
        """How many entries there are."""
        return self._catalog.read(log.next_index)

    def bodies(self, start: int = 0) -> Iterator[tuple[int, str]]:
        """Index and canonical JSON of every entry from `start` on, in order; each body is a leaf of
        the tree.

        Raises:
            StorageError, CatalogError: while it is read.
        """
        while True:
            found = self._catalog.read(partial(log.entries, start=start, limit=_CHUNK))
            yield from found
            if len(found) < _CHUNK:
                return
            start = found[-1][0] + 1

    def tail(self, count: int) -> list[Entry]:
        """The newest `count` entries, oldest first.

        Raises:
            FormatError: one is not what kvvault writes.
            StorageError, CatalogError.
        """
        start = max(0, self.size() - count)
        return [read_entry(index, body) for index, body in self.bodies(start)]

    # -- checkpoints ------------------------------------------------------------------------------

    def checkpoint(self) -> str:
        """Sign what the log is now, and keep the note; the newest one when nothing was added since.
        All it speaks of is on the disk when this returns, so no power failure makes it look as if
        something had been removed.

        Raises:
            CatalogCorruptError: the log is not what it was at the newest checkpoint; none is made.
            VaultKeyError, ClosedError, StorageError, CatalogError.
        """
        newest = self._newest()
        tree = merkle.Frontier()
        for index, body in self.bodies():
            if index != tree.size:
                raise _altered()
            if newest is not None and tree.size == newest[1].size:
                _compare(tree, newest[1])
            tree.push(merkle.leaf_hash(log.raw(body)))
        if newest is not None:
            if tree.size < newest[1].size:
                raise _altered()
            if tree.size == newest[1].size:
                _compare(tree, newest[1])
                return newest[0].note
        note = sign_note(Checkpoint(self._origin, tree.size, tree.root()), self._signer())
        self._catalog.write(partial(log.add_checkpoint, size=tree.size, note=note, now=self._now()))
        return note

    def _newest(self) -> tuple[CheckpointRow, Checkpoint] | None:
        rows = self._catalog.read(log.checkpoints)
        if not rows:
            return None
        try:
            said = parse_note(rows[-1].note, self.key)
        except FormatError as exc:
            raise _altered() from exc
        if said.size != rows[-1].size:
            raise _altered()
        return rows[-1], said

    # -- receipts ---------------------------------------------------------------------------------

    def receipts(self) -> Sequence[ReceiptRow]:
        """All that are kept, oldest first."""
        return self._catalog.read(receipts.list_receipts)

    def receipt(self, beginning: str) -> Receipt:
        """The receipt whose id begins with these digits.

        Raises:
            UsageError: there is none, or more than one.
            FormatError: it was altered beyond being read.
            StorageError, CatalogError.
        """
        found = self._catalog.read(partial(receipts.find, beginning=beginning.lower()))
        if len(found) != 1 or not beginning:
            raise UsageError(
                "the vault has no such receipt" if not found else "that is more than one receipt",
                hint="see: kvvault receipt ls",
            )
        return parse(found[0].document)

    def prove(self, receipt: Receipt) -> Receipt:
        """The receipt with the proof that its entry is in the log. The proof is of the log up to
        that entry, which was on the disk before anybody had the receipt.

        Raises:
            FormatError: the receipt is not genuine, or not in this log.
            CatalogCorruptError: the log is not what it was at the newest checkpoint; nothing is
                signed.
            VaultKeyError, StorageError, CatalogError.
        """
        entry = receipt.entry
        newest = self._newest()
        signed = 0 if newest is None else newest[1].size
        leaves: list[bytes] = []
        body = ""
        for index, one in self.bodies():
            if index != len(leaves):
                raise _altered()
            leaves.append(merkle.leaf_hash(log.raw(one)))
            if index == entry:
                body = one
            if len(leaves) > entry and len(leaves) >= signed:
                break
        if newest is not None and (
            len(leaves) < signed or merkle.root(leaves[:signed]) != newest[1].root
        ):
            raise _altered()
        del leaves[max(entry, 0) + 1 :]
        checkpoint = Checkpoint(self._origin, len(leaves), merkle.root(leaves))
        if not 0 <= entry < len(leaves):
            raise FormatError(
                "the receipt is not in this vault's log", hint="run: kvvault audit verify"
            )
        proven = replace(
            receipt,
            proof=Proof(
                entry,
                body,
                len(leaves),
                tuple(merkle.inclusion_proof(leaves, entry)),
                sign_note(checkpoint, self._signer()),
            ),
        )
        findings = check_receipt(proven, self.key)
        if findings:
            raise FormatError(
                f"{findings[0].where}: {findings[0].what}", hint="run: kvvault audit verify"
            )
        return proven

    # -- checking ---------------------------------------------------------------------------------

    def verify(self, against: Sequence[Note] = ()) -> Verification:
        """Check every entry, checkpoint and receipt, and the log against checkpoints that were kept
        elsewhere. Changes nothing.

        Raises:
            VaultKeyError: the vault has no signing key, or it does not open.
            StorageError, CatalogError: the catalog cannot be read.
        """
        key = self.key

        def look(
            connection: Connection,
        ) -> tuple[int, Sequence[int], Sequence[CheckpointRow], Sequence[ReceiptRow]]:
            return (
                log.next_index(connection),
                log.stray(connection),
                log.checkpoints(connection),
                receipts.list_receipts(connection),
            )

        size, stray, stored, kept = self._catalog.read(look)
        findings = [
            Finding(f"entry {index}", "put in: no entry has that number") for index in stray
        ]
        notes = list(against)
        for row in stored:
            name = f"of {row.size} entries, in the catalog"
            try:
                if parse_note(row.note, key).size != row.size:
                    findings.append(Finding(f"checkpoint {name}", "its row says another size"))
            except FormatError:
                pass  # found again below
            notes.append(Note(name, row.note))
        checked: LogCheck = check_log(self.bodies(), notes, key)
        # What was added since `look` has receipts that it did not see.
        named = [one for one in checked.receipts if one[0].index < size]
        findings += check_stored_receipts(kept, named, key)
        return Verification(
            checked.size,
            checked.root,
            checked.checkpoints,
            checked.outside,
            len(kept),
            (*checked.findings, *findings),
        )


def _compare(tree: merkle.Frontier, said: Checkpoint) -> None:
    if tree.root() != said.root:
        raise _altered()


def _altered() -> CatalogCorruptError:
    return CatalogCorruptError(
        "the audit log is not what it was at its newest checkpoint; it is not signed",
        hint="run: kvvault audit verify",
    )
