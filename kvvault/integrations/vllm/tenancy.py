"""Whose blocks a request's are, and whether they may be kept.

For now the client says in ``kv_transfer_params["kvvault"]`` who it is and what the request is to be
listed under, and only tenants on a configured list count. Signed assertions from a gateway will
replace `claim` and nothing else: the tier asks `Tenancy.decide` once per request and knows no more
about tenants.

What a client sends is hostile until proven otherwise (REQ-F5): only a small dictionary of known
keys with short values is looked at; nothing is walked deeper than the labels, logged or shown.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from kvvault.errors import KvvaultError
from kvvault.prompting import Prompt
from kvvault.vault import Scope

log = logging.getLogger(__name__)

PARAMS_KEY = "kvvault"
_KNOWN = frozenset({"tenant", "persist", "class", "subject", "labels", "request_id", "preview"})
_MAX_NAME = 256
_MAX_PREVIEW = 256
_MAX_LABELS = 8
_MAX_LABEL_NAME = 64
_MAX_LABEL_VALUE = 128
_MAX_LABEL_BYTES = 2048
"""All of them, as ASCII JSON, which is what is encrypted of them."""
_MAX_SCOPES = 256
"""Places (tenant, class, labels) that are remembered, the least recently used one forgotten: a
client that keeps inventing some costs itself time, and others nothing but that."""


_RETRY_S = 5.0
"""After so long a tenant that could not be made anew is tried again."""


class Verdict(StrEnum):
    """Why a request is treated as it is; counted."""

    ACCEPTED = "accepted"
    DEFAULT_TENANT = "default_tenant"
    NO_TENANT = "no_tenant"
    MALFORMED = "malformed"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True, repr=False)
class Claim:
    """What a request says about itself. Personal: shown nowhere."""

    tenant: str | None = None
    persist: bool = True
    retention_class: str | None = None
    """Which it asks for. The policy decides whether there is one; it can only shorten a life."""
    subject: str | None = None
    """Whom it is about."""
    labels: tuple[tuple[str, str], ...] = ()
    """(name, value), sorted by name."""
    request_id: str | None = None
    """What the client calls the request, if not as the response does."""
    preview: str | None = None
    """What an inventory may show of the text, where the policy wants previews."""


@dataclass(slots=True, eq=False)
class RequestState:
    """What the tier keeps for one request, in vLLM's per-request storage. Scheduler thread only.

    `failed` holds keys whose load failed for this request: they are misses from then on, or the
    scheduler would try the same load for ever.
    """

    scope: Scope | None
    persist: bool
    verdict: Verdict
    said: Claim | None = field(default=None, repr=False)
    """What it says of itself, until `prompt` has it."""
    failed: set[bytes] = field(default_factory=set)
    prompt: Prompt | None = None
    """For the inventory, until it was handed over; None also for requests that keep nothing."""
    chain: Mapping[bytes, int] | None = field(default=None, repr=False)
    """Its blocks and the tokens at which they end: vLLM's own, see `shims.chain`."""
    noted: dict[bytes, int] = field(default_factory=dict, repr=False)
    """The same, where vLLM has none: those that the tier was asked for."""
    asked: int | None = None
    """How many of `chain` are the prompt's; the later ones are of what was generated."""
    used: bool = False
    """Whether it was scheduled, or something stored or loaded for it."""
    stores: int = 0
    """Store jobs under way."""
    finished: bool = False
    """No more jobs will come."""

    def reused_or_stored(self, *, prompts_only: bool) -> Mapping[bytes, int]:
        """What it may have in common with others: its chain, by reference."""
        if self.chain is None:
            return self.noted
        if not prompts_only or self.asked is None or self.asked == len(self.chain):
            return self.chain
        return _First(self.chain, self.asked)


class _First(Mapping[bytes, int]):
    """The first entries of a dictionary, without copying it."""

    __slots__ = ("_count", "_whole")

    def __init__(self, whole: Mapping[bytes, int], count: int) -> None:
        self._whole = whole
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return islice(self._whole, self._count)

    def __getitem__(self, key: bytes) -> int:
        return self._whole[key]


def claim(params: object) -> Claim | None:
    """Read the client's parameters; None when they are malformed. Constant time and memory."""
    if params is None:
        return Claim()
    if not isinstance(params, Mapping):
        return None
    mine = params.get(PARAMS_KEY)
    if mine is None:
        return Claim()
    if not isinstance(mine, dict) or len(mine) > len(_KNOWN) or not mine.keys() <= _KNOWN:
        return None
    tenant, persist, labels = mine.get("tenant"), mine.get("persist", True), mine.get("labels")
    preview = mine.get("preview")
    if not isinstance(persist, bool):
        return None
    if tenant is not None and not (isinstance(tenant, str) and 0 < len(tenant) <= _MAX_NAME):
        return None
    for name in ("class", "subject", "request_id"):
        if not (mine.get(name) is None or _is_name(mine[name], _MAX_NAME)):
            return None
    if preview is not None and not _is_text(preview, _MAX_PREVIEW):
        return None
    if labels is not None and not _are_labels(labels):
        return None
    return Claim(
        tenant,
        persist,
        mine.get("class"),
        mine.get("subject"),
        tuple(sorted(labels.items())) if labels else (),
        mine.get("request_id"),
        preview,
    )


def _is_name(value: object, longest: int) -> bool:
    """Printable text of 1 to `longest` characters."""
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _is_text(value: object, longest: int) -> bool:
    """Text of at most `longest` characters, lines and all, that UTF-8 can hold: JSON can smuggle in
    halves of surrogate pairs, which it cannot."""
    if not isinstance(value, str) or len(value) > longest:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _are_labels(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MAX_LABELS
        and all(
            _is_name(name, _MAX_LABEL_NAME) and _is_name(text, _MAX_LABEL_VALUE)
            for name, text in value.items()
        )
        and len(json.dumps(value)) <= _MAX_LABEL_BYTES
    )


class Tenancy:
    """Decides for each request. No I/O: all scopes were opened when the engine started, and those
    of tenants that were forgotten are made anew by a thread."""

    def __init__(
        self, scopes: Mapping[str, Scope], default: str | None, reopen: Callable[[str], Scope]
    ) -> None:
        """`scopes`: the tenants that may be named, and the default one. `reopen` makes the scope of
        a tenant that was forgotten; it may block, and raise KvvaultError."""
        self._scopes = dict(scopes)  # whole entries are replaced, by the thread of `_reopen`
        self._default = default
        self._reopen = reopen
        self._reopening: dict[str, threading.Thread] = {}
        self._closed = threading.Event()
        self._asking: OrderedDict[_Asked, Scope] = OrderedDict()

    def decide(self, params: object) -> RequestState:
        """The state of a new request. Never raises.

        Malformed parameters: not stored, not served. No name, or one that is not on the list: the
        default tenant, or, where none is configured, not stored and not served.
        """
        asked = claim(params)
        if asked is None:
            return RequestState(None, False, Verdict.MALFORMED)
        name, verdict = asked.tenant, Verdict.ACCEPTED
        if name is None or name not in self._scopes:
            name, verdict = self._default, Verdict.DEFAULT_TENANT
        if name is None:
            return RequestState(None, False, Verdict.NO_TENANT)
        scope = self._scopes[name]
        if not scope.lives:
            self._begin_anew(name)
            return RequestState(None, False, Verdict.FORGOTTEN)
        return RequestState(self._ask(scope, asked), asked.persist, verdict, asked)

    def close(self) -> None:
        """Wait for tenants that are being made. Before the vault is closed."""
        self._closed.set()
        for thread in tuple(self._reopening.values()):
            thread.join()

    def _begin_anew(self, name: str) -> None:
        """A tenant that was forgotten is, for requests that come later, a new one: with new keys,
        under which nothing of the old one is found. Scheduler thread."""
        under_way = self._reopening.get(name)
        if self._closed.is_set() or (under_way is not None and under_way.is_alive()):
            return
        thread = threading.Thread(
            target=self._make, args=(name,), name="kvvault-tenant", daemon=True
        )
        self._reopening[name] = thread
        thread.start()

    def _make(self, name: str) -> None:
        try:
            self._scopes[name] = self._reopen(name)
        except KvvaultError as exc:
            log.warning("a tenant that was forgotten cannot be made anew: %s", exc)
            self._closed.wait(_RETRY_S)  # the next request tries again, not each of them

    def _ask(self, scope: Scope, asked: Claim) -> Scope:
        if asked.retention_class is None and not asked.labels:
            return scope
        key = (scope.tenant_id, asked.retention_class, asked.labels)
        found = self._asking.get(key)
        if found is None:
            found = scope.asking(asked.retention_class, dict(asked.labels))
            self._asking[key] = found
            if len(self._asking) > _MAX_SCOPES:
                self._asking.popitem(last=False)
        else:
            self._asking.move_to_end(key)
        return found


_Asked = tuple[bytes, str | None, tuple[tuple[str, str], ...]]
"""Tenant, retention class, labels."""
