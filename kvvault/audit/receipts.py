"""Receipts: what was deleted, by whom, how, and what that is worth; signed, for somebody else.

A deletion has two, and `revoked` once more when an engine was asked for its copies. `revoked` is
made in the transaction that takes the keys away, or revokes single blocks (then the keys go soon
after): from then on nothing of it is served. `purged` is made when
the purge that covers it is verified: from then on nobody opens any copy of it, as far as the key
provider's assurance goes. The second names the digest of the first. What goes by itself, expired or
evicted, has an entry in the log each time and one `purged` receipt per purge that sums it up: on a
busy vault it goes many times a minute, and nobody asks for a paper on each.

Fields are those of a certificate of sanitization (NIST SP 800-88, section 4.8) that apply, and
what makes them checkable. The file that holds it: `kvvault.audit.envelope`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection

from kvvault import __version__
from kvvault.audit import evidence
from kvvault.audit.checkpoint import origin_of
from kvvault.audit.envelope import Json, Proof, Receipt, parse
from kvvault.audit.evidence import REVOKED, Evidence, Said
from kvvault.catalog import log, receipts, retention
from kvvault.catalog.log import Fact, canonical, exactly
from kvvault.catalog.purging import PurgeRow
from kvvault.crypto.aead import random_id
from kvvault.crypto.providers.base import Assurance, ProviderInfo
from kvvault.crypto.signing import Signer

__all__ = [
    "AUTOMATIC",
    "ERASE",
    "PURGED",
    "TECHNICAL",
    "DeletionFacts",
    "EngineCopy",
    "Issuer",
    "Kept",
    "Proof",
    "Receipt",
    "parse",
    "result_of",
]

PURGED: Final = "purged"
AUTOMATIC: Final = frozenset({"expire", "evict"})
"""Triggers of deletions that nobody asked for: summed up, one receipt per purge."""
TECHNICAL: Final = "compact"
"""Trigger of what is a part of another deletion: its entry in the log is all there is."""

ERASE: Final = "erase"
"""Trigger of deletions of single blocks: the keys of their segments go after the blocks, when what
stays is in other segments."""

_MAX_KEY_IDS: Final = 1000
"""More are given as a digest of all of them."""
_METHOD: Final = (
    "cryptographic erase (NIST SP 800-88): AES-256-GCM keys of the data are destroyed, "
    "the files emptied and unlinked"
)
_MEDIA: Final = "files of a kvvault vault, never written in plaintext, on this machine's storage"
_REVOKED_CHECK: Final = (
    "the keys left the catalog in the transaction that issued this receipt; reads that had begun "
    "before are waited for"
)
_ERASED_CHECK: Final = (
    "the blocks were revoked in the catalog in the transaction that issued this receipt, and no "
    "process serves them; reads that had begun before are waited for. The key of a segment listed "
    "here is destroyed when what else is in the segment has been written to another one: at once "
    "as a rule, and in any case before the second receipt"
)
_PURGED_CHECK: Final = (
    "no row of the catalog was under the old root key; unwrapping with it was tried after its "
    "destruction, and refused"
)
_BACKUPS: Final = {
    "purge": "copies of the vault are ciphertext whose root key is destroyed; copies of data made "
    "outside the vault are not covered",
    "logical": "copies of the vault made before the purge can be opened by somebody who also has a "
    "copy of the key provider's medium; copies of data made outside the vault are not covered",
}


_RESULTS: Final = {
    (REVOKED, Assurance.PURGE): "revoked; unrecoverable only after the purge, see the second "
    "receipt",
    (REVOKED, Assurance.LOGICAL): "revoked; logical, also after the purge, see the second receipt: "
    "whoever has old copies of the vault and of its root key can open it",
    (PURGED, Assurance.PURGE): "nothing revoked before the purge began can be opened",
    (PURGED, Assurance.LOGICAL): "with the keys that the vault has now nothing revoked before the "
    "purge began can be opened; whoever has old copies of the vault and of its root key can",
}


def result_of(phase: str, level: object) -> str | None:
    """What a receipt may claim; None of an assurance that there is not."""
    return next(
        (text for (of, assurance), text in _RESULTS.items() if (of, assurance) == (phase, level)),
        None,
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """What would have gone, but stayed, and why."""

    shared_prompts: int = 0
    """Prompts that share blocks with what was erased, and keep them."""
    shared_blocks: int = 0
    shared_bytes: int = 0
    held_segments: int = 0
    """Kept by legal holds."""
    held_prompts: int = 0
    held_blocks: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """A copy outside the vault, in an engine's memory, and whether it could be dropped."""

    what: str
    """Which ("GPU prefix cache"); nothing personal."""
    reached: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeletionFacts:
    """What a receipt says of one deletion. Text is recorded as it is: nothing personal."""

    deletion_no: int
    """Its row in `deletions`, of the same transaction."""
    trigger: str
    actor: str
    reason: str
    revoked_at: float
    """Seconds since the epoch, by the vault's own time."""
    segment_ids: Sequence[bytes]
    """Segments whose keys were destroyed; with the trigger `erase`: that the blocks were in, whose
    keys are destroyed before the second receipt."""
    blocks: int
    data_bytes: int
    scope: Mapping[str, Fact] = field(default_factory=dict)
    """What was asked for: keyed ids ("log" ids of tenant, subject, prompts) and kinds only."""
    prompts: int | None = None
    """How many prompts went; None where it is not by prompt."""
    kept: Kept = Kept()
    engine: Sequence[EngineCopy] = ()


# -- issuing -------------------------------------------------------------------------------------


class Issuer:
    """Makes a vault's receipts, inside transactions of others. Waits for nothing, keeps no state;
    any thread."""

    def __init__(
        self, vault_id: bytes, signer: Callable[[], Signer], provider: ProviderInfo, place: str
    ) -> None:
        """
        :param signer: gives the vault's signing key; raises a VaultKeyError where it has none.
        :param place: where the vault is: a machine's name.
        """
        self._vault_id = vault_id
        self._signer = signer
        self._provider = provider
        self._place = place

    def revoked(self, connection: Connection, facts: DeletionFacts) -> Receipt:
        """The first receipt of a deletion, in the transaction that takes the keys away, after its
        row in `deletions` and its entry are written. Adds an entry and a row.

        Raises:
            VaultKeyError, ClosedError: there is no signing key.
        """
        policy = retention.current_policy(connection)
        ids = sorted(one.hex() for one in facts.segment_ids)
        keys: Json = {"count": len(ids), "ids": ids}
        if len(ids) > _MAX_KEY_IDS:
            keys = {"count": len(ids), "sha256": hashlib.sha256("".join(ids).encode()).hexdigest()}
        content = {
            **self._frame(),
            "performed": self._performed(facts.actor, facts.revoked_at),
            "phase": REVOKED,
            "deletion": {
                "number": facts.deletion_no,
                "trigger": facts.trigger,
                "reason": facts.reason,
                "scope": dict(facts.scope),
                "policy_sha256": None if policy is None else policy.digest.hex(),
                "prompts": facts.prompts,
                "blocks": facts.blocks,
                "bytes": facts.data_bytes,
                "keys": keys,
                "revoked_at": moment(facts.revoked_at),
            },
            "kept": asdict(facts.kept),
            "engine_copies": [
                {"what": one.what, "reached": one.reached, "detail": one.detail}
                for one in facts.engine
            ],
            "verification": {
                "method": _ERASED_CHECK if facts.trigger == ERASE else _REVOKED_CHECK,
                "result": result_of(REVOKED, self._provider.assurance),
                "at": moment(facts.revoked_at),
            },
        }
        return self._issue(connection, content, REVOKED, facts.deletion_no, facts.revoked_at)

    def evidence(self, connection: Connection) -> Evidence:
        """What the purge under way may certify; see `kvvault.audit.evidence`.

        Raises: as `revoked`.
        """
        return evidence.find(connection, self._signer().public_key, {*AUTOMATIC, TECHNICAL})

    def purged(
        self, connection: Connection, purge: PurgeRow, numbers: Sequence[int], known: Evidence
    ) -> list[Receipt]:
        """The second receipts of deletions that a purge made unrecoverable, in the transaction in
        which they say so; none of a deletion of which only its row is known.

        Raises: as `revoked`.
        """
        return [
            self._second(connection, purge, number, known)
            for number in numbers
            if number in known.firsts or number in known.said
        ]

    def summaries(self, connection: Connection, purge: PurgeRow, known: Evidence) -> list[Receipt]:
        """One receipt for each kind of what went by itself and a purge made unrecoverable, in the
        transaction that ends it.

        Raises: as `revoked`.
        """
        made = []
        for trigger in sorted(AUTOMATIC):
            went = {n: said for n, said in known.said.items() if said.trigger == trigger}
            if went:
                made.append(self._summary(connection, purge, trigger, went))
        return made

    def _second(
        self, connection: Connection, purge: PurgeRow, number: int, known: Evidence
    ) -> Receipt:
        first = known.firsts.get(number)
        if first is not None:
            content = {
                **self._purge_frame(purge),
                "performed": first.content["performed"],
                **{name: first.content[name] for name in ("deletion", "kept", "engine_copies")},
                "revoked_receipt": {"id": first.receipt_id, "sha256": first.digest},
            }
        else:
            said = known.said[number]
            content = {
                **self._purge_frame(purge),
                "performed": self._performed(said.actor, said.revoked_at),
                "deletion": _of_log(number, said),
                "kept": {},
                "engine_copies": [],
                "revoked_receipt": None,
            }
        return self._issue(connection, content, PURGED, number, _verified_at(purge))

    def _summary(
        self, connection: Connection, purge: PurgeRow, trigger: str, went: Mapping[int, Said]
    ) -> Receipt:
        times = [said.revoked_at for said in went.values()]
        content = {
            **self._purge_frame(purge),
            "performed": self._performed("kvvault", max(times)),
            "deletion": {
                "trigger": trigger,
                "numbers": [min(went), max(went)],
                "count": len(went),
                "segments": sum(said.segments for said in went.values()),
                "blocks": sum(said.blocks for said in went.values()),
                "bytes": sum(said.data_bytes for said in went.values()),
                "revoked_at": moment(min(times)),
                "revoked_until": moment(max(times)),
            },
            "revoked_receipt": None,
        }
        return self._issue(connection, content, PURGED, None, _verified_at(purge))

    def _performed(self, actor: str, at: float) -> Json:
        return {"by": actor, "at": moment(at), "where": self._place}

    def _frame(self) -> dict[str, object]:
        info = self._provider
        return {
            "kind": "kvvault receipt",
            "version": 1,
            "id": random_id().hex(),
            "vault": self._vault_id.hex(),
            "media": {"type": _MEDIA, "where": self._place},
            "method": _METHOD,
            "tool": {"name": "kvvault", "version": __version__},
            "assurance": {
                "level": info.assurance.value,
                "reason": info.reason,
                "key_provider": info.uri.partition(":")[0],
            },
            "backups": _BACKUPS[info.assurance.value],
        }

    def _purge_frame(self, purge: PurgeRow) -> dict[str, object]:
        frame = self._frame()
        # What the provider could claim when the purge began: that is what its destruction is worth.
        if purge.assurance != self._provider.assurance.value:
            frame["assurance"] = {"level": purge.assurance, "reason": "when the purge began"}
            frame["backups"] = _BACKUPS.get(purge.assurance, "nothing is claimed")
        return {
            **frame,
            "phase": PURGED,
            "purge": {
                "number": purge.purge_no,
                "began_at": moment(purge.started_at),
                "provider_call": "destroy root key",
                "root_key": purge.old_epoch,
                "result": "destroyed, and refused when it was tried",
                "destroyed_at": moment(purge.destroyed_at),
                "verified_at": moment(purge.verified_at),
            },
            "verification": {
                "method": _PURGED_CHECK,
                "result": result_of(PURGED, purge.assurance) or "nothing is claimed",
                "at": moment(purge.verified_at),
            },
        }

    def _issue(
        self,
        connection: Connection,
        content: dict[str, object],
        phase: str,
        deletion_no: int | None,
        at: float,
    ) -> Receipt:
        signer = self._signer()
        origin = origin_of(self._vault_id)
        content["log"] = {"origin": origin, "entry": log.next_index(connection)}
        # What is signed is what is kept: both are made of the same parsed text.
        kept: Json = json.loads(canonical(content))
        receipt = Receipt(kept, signer.sign(exactly(kept).encode()), signer.public_key)
        facts: dict[str, Fact] = {"receipt": receipt.receipt_id, "phase": phase}
        facts["sha256"] = receipt.digest
        if deletion_no is not None:
            facts["deletion"] = deletion_no
        entry = log.append(connection, "receipt", at, facts)
        receipts.add(
            connection,
            bytes.fromhex(receipt.receipt_id),
            deletion_no=deletion_no,
            phase=phase,
            entry_no=entry,
            document=receipt.document,
        )
        return receipt


def _of_log(number: int, said: Said) -> Json:
    """A deletion without its first receipt; its reason stands nowhere else that could be relied
    on."""
    return {
        "number": number,
        "trigger": said.trigger,
        "reason": None,
        "segments": said.segments,
        "blocks": said.blocks,
        "bytes": said.data_bytes,
        "revoked_at": moment(said.revoked_at),
    }


def _verified_at(purge: PurgeRow) -> float:
    return purge.started_at if purge.verified_at is None else purge.verified_at


def moment(seconds: float | None) -> str | None:
    """A time in ISO 8601, UTC, to the millisecond; None of what no calendar has."""
    if seconds is None:
        return None
    try:
        stamp = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")
