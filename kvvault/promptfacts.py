"""What is asked and answered about the inventory, and how names in it are decrypted; see
`kvvault.prompts`."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.holds import HoldRow
from kvvault.catalog.membership import Snapshot, TextRow
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import KvvaultError
from kvvault.keyring import KeyRing
from kvvault.model import SegmentFacts
from kvvault.prompting import PROMPT, PROMPT_ID_BYTES
from kvvault.sharing import Blocks, Figures, Links, Segments, Sharing, copies_of

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NUMBERS: Final[Mapping[str, str]] = {
    "age": "duration",
    "idle": "duration",
    "blocks": "count",
    "bytes": "size",
    "alone": "size",
    "shared": "size",
    "tokens": "count",
    "deadline": "time",
    "first_used": "time",
    "last_used": "time",
}
"""Fields of a prompt that are numbers, and of which kind: seconds, bytes, seconds since the
epoch."""

TEXTS: Final = ("id", "tenant", "subject", "request", "model", "namespace", "rule", "class")
"""Fields that are compared as a whole (ids and namespaces: by how they begin); ``label.NAME`` is
another."""

LABEL = "label."

COMPARE: Final[Mapping[str, Callable[[F64, float], Mask]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
AGES: Final = (
    ("under 1h", 3600.0),
    ("under 1d", 86400.0),
    ("under 7d", 604800.0),
    ("under 30d", 2592000.0),
    ("30d and older", math.inf),
)


@dataclass(frozen=True, slots=True)
class Condition:
    """What prompts must be: a field, an operator, a value in the field's unit."""

    name: str
    op: str
    value: float | str = field(repr=False)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """One prompt. Times are seconds since the epoch, by the vault's time; names are None where the
    tenant's key cannot be had, or there is none."""

    number: int
    prompt_id: bytes
    tenant_id: bytes
    tenant: str | None = field(repr=False)
    subject: str | None = field(repr=False)
    labels: Mapping[str, str] = field(repr=False)
    request_id: str | None = field(repr=False)
    fingerprint: str | None = field(repr=False)
    preview: str | None = field(repr=False)
    namespace: bytes
    model: str | None
    first_used: float
    last_used: float
    tokens: int
    """At which its last live block ends."""
    blocks: int
    data_bytes: int
    alone_blocks: int
    alone_bytes: int
    """What no other prompt has."""
    first_deadline: float | None
    """When the first of its blocks is destroyed; None: none has a deadline."""
    last_deadline: float | None
    """When the last is; None: some have no deadline."""
    rules: tuple[str, ...]
    classes: tuple[str, ...]
    holds: tuple[int, ...]
    """Numbers of the holds that keep any of it."""

    @property
    def shared_bytes(self) -> int:
        return self.data_bytes - self.alone_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """What a prompt has in one segment."""

    segment: SegmentFacts
    own: int
    """Blocks that it had stored."""
    reused: int
    tokens: int
    """At which the last of them ends."""


@dataclass(frozen=True, slots=True)
class Detail:
    """Everything about one prompt."""

    facts: PromptFacts
    parts: tuple[Part, ...]
    """Oldest first: when what of it was stored, and until when it is kept."""
    shared_with: int
    """Other prompts that have blocks in common with it."""


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """One subject of one tenant."""

    text_id: bytes
    tenant_id: bytes
    tenant: str | None = field(repr=False)
    subject: str | None = field(repr=False)
    prompts: int
    alone_bytes: int
    """Of its prompts, each by itself."""
    first_used: float
    last_used: float
    last_deadline: float | None
    holds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Together:
    """What several prompts have, each block counted once."""

    alone_bytes: int
    """What no prompt besides them has."""
    shared_bytes: int
    """What others have, too."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one group takes."""

    group: str | None = field(repr=False)
    prompts: int
    blocks: int
    data_bytes: int
    nobodys_blocks: int
    """Of these, blocks that are no prompt's."""
    nobodys_bytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """What persists of a text. `blocks`: how many of its leading blocks."""

    blocks: int
    of_blocks: int
    tokens: int
    since: float | None
    """When the oldest segment with any of them was opened."""
    until: float | None
    """When the first of them is destroyed; None: no deadline, or there is nothing."""
    prompts: tuple[tuple[PromptFacts, int], ...]
    """Who has them, and up to which token."""


class State:
    """The inventory as of one moment, and what follows from it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        table, blocks = snapshot.prompts, snapshot.blocks
        self.segments = Segments(
            np.array([s.block_bytes for s in snapshot.segments], np.int64),
            np.array([s.deadline for s in snapshot.segments], np.float64),
        )
        self._links = Links(snapshot.user, snapshot.via, snapshot.upto)
        self._blocks = Blocks(blocks.owner, blocks.end, blocks.segment)
        self.sharing = Sharing(table.number, table.gone, self._links, self._blocks, self.segments)
        self.at = self.sharing.position(table.number)
        """Of each prompt of the table, its position in `sharing`."""

    @cached_property
    def figures(self) -> Figures:
        """What each prompt has, in the order of `sharing.numbers`."""
        ids = self.snapshot.blocks.ids
        return self.sharing.figures(ids if len(ids) else None)

    @cached_property
    def known(self) -> Mask:
        """Which prompts of the table are not gone: also those that have no block, or none yet."""
        return ~self.snapshot.prompts.gone

    @cached_property
    def present(self) -> Mask:
        """Which prompts of the table are in the inventory: not gone, and something is left."""
        return self.known & (self.figures.blocks[self.at] > 0)

    @property
    def used(self) -> Mask:
        """Which blocks a prompt has that is not gone."""
        return self.sharing.used_by(self.sharing.alive)

    def used_by(self, chosen: Mask) -> Mask:
        """Which blocks these prompts have (a mask over the table)."""
        sources = np.zeros(len(self.sharing.numbers), np.bool_)
        sources[self.at[chosen]] = True
        return self.sharing.used_by(sources)

    def segments_of(self, where: I64) -> dict[int, list[int]]:
        """In which segments prompts (positions in `sharing`) have blocks."""
        pairs = self.sharing.pairs_of(np.unique(where))
        which, row = self.sharing.rows(pairs)
        count = max(len(self.snapshot.segments), 1)
        both = np.unique(pairs.user[which] * count + self.snapshot.blocks.segment[row])
        found: dict[int, list[int]] = {}
        for user, segment in zip((both // count).tolist(), (both % count).tolist(), strict=True):
            found.setdefault(user, []).append(segment)
        return found

    def copies_of(self, chosen: Mask) -> Mask:
        """These blocks (a mask over all) and copies of them, as far as ids were read."""
        ids = self.snapshot.blocks.ids
        return copies_of(chosen, ids) if len(ids) else chosen

    def having_in(self, chosen: Mask) -> Mask:
        """Which prompts of the table have blocks in these segments (a mask over them)."""
        every = self._blocks.segment
        return self.having(chosen[every] if len(chosen) else np.zeros(0, np.bool_))[0]

    def having(self, chosen: Mask) -> tuple[Mask, I64]:
        """Which prompts of the table have any of these blocks (a mask over them), and the token at
        which the last of these ends."""
        some = Blocks(
            self._blocks.owner[chosen], self._blocks.end[chosen], self._blocks.segment[chosen]
        )
        table = self.snapshot.prompts
        sharing = Sharing(table.number, table.gone, self._links, some, self.segments)
        figures, at = sharing.figures(), sharing.position(table.number)
        return figures.blocks[at] > 0, figures.tokens[at]


class Names:
    """Decrypts; None where a key cannot be had or a text does not open."""

    def __init__(self, catalog: Catalog, ring: KeyRing) -> None:
        self._catalog = catalog
        self._ring = ring
        self._keys: dict[bytes, tuple[TenantKeys, str] | None] = {}

    def _of(self, tenant_id: bytes) -> tuple[TenantKeys, str] | None:
        if tenant_id not in self._keys:
            row = self._catalog.read(partial(operations.get_tenant, tenant_id=tenant_id))
            try:
                self._keys[tenant_id] = (
                    None if row is None else (self._ring.tenant(row), self._ring.name(row))
                )
            except KvvaultError:
                self._keys[tenant_id] = None
        return self._keys[tenant_id]

    def tenant(self, tenant_id: bytes) -> str | None:
        known = self._of(tenant_id)
        return None if known is None else known[1]

    def text(self, text: TextRow) -> str | None:
        return self._open(text.tenant_id, text.kind, text.sealed)

    def labels(self, text: TextRow) -> dict[str, str]:
        return _strings(self.text(text))

    def prompt(self, tenant_id: bytes, sealed: bytes | None) -> dict[str, str]:
        return _strings(None if sealed is None else self._open(tenant_id, PROMPT, sealed))

    def _open(self, tenant_id: bytes, kind: str, sealed: bytes) -> str | None:
        known = self._of(tenant_id)
        try:
            return None if known is None else known[0].open_text(kind, sealed)
        except KvvaultError:
            return None


def _strings(plain: str | None) -> dict[str, str]:
    try:
        found = json.loads(plain or "{}")
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def keeps(
    hold: HoldRow,
    *,
    tenant_id: bytes,
    subject: TextRow | None = None,
    prompt_id: bytes | None = None,
    segments: Sequence[SegmentFacts] = (),
) -> bool:
    """Whether a hold keeps something of these, or may: a damaged one does not say what it keeps."""
    if hold.damaged:
        return hold.tenant_id in (None, tenant_id)
    targets = {
        "tenant": (tenant_id,),
        "subject": () if subject is None else (subject.text_id,),
        "prompt": () if prompt_id is None else (prompt_id,),
        "segment": tuple(s.segment_id for s in segments),
    }
    return hold.target in targets.get(hold.kind, ())


def having_prefix(ids: npt.NDArray[np.uint64], prefix: str) -> Mask:
    """Which prompt ids begin with these hex digits; none when that is not what they are."""
    digits = 2 * PROMPT_ID_BYTES
    if not 0 < len(prefix) <= digits or not set(prefix) <= set("0123456789abcdef"):
        return np.zeros(len(ids), np.bool_)
    shift = np.uint64(4 * (digits - len(prefix)))
    found: Mask = (ids >> shift) == np.uint64(int(prefix, 16))
    return found & (ids > 0)


def age_group(seconds: float) -> str:
    return next(name for name, limit in AGES if seconds < limit)


def time_or_none(seconds: float) -> float | None:
    """None for what never comes."""
    return float(seconds) if math.isfinite(seconds) else None
