"""Whose blocks a request's are, and whether they may be kept.

For now the client names its tenant in ``kv_transfer_params["kvvault"]``, and only names on a
configured list count. Signed assertions from a gateway will replace `claim` and nothing else: the
tier asks `Tenancy.decide` once per request and knows no more about tenants.

What a client sends is hostile until proven otherwise (REQ-F5): only a small dictionary of known
keys with short values is looked at, nothing of it is walked, copied, logged or shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvvault.vault import Scope

PARAMS_KEY = "kvvault"
_KNOWN = frozenset({"tenant", "persist", "class"})
_MAX_NAME = 256
_MAX_CLASSES = 64
"""Retention classes that are remembered; a client that keeps inventing names gets the default."""


class Verdict(StrEnum):
    """Why a request is treated as it is; counted."""

    ACCEPTED = "accepted"
    DEFAULT_TENANT = "default_tenant"
    NO_TENANT = "no_tenant"
    MALFORMED = "malformed"


@dataclass(slots=True, eq=False)
class RequestState:
    """What the tier keeps for one request, in vLLM's per-request storage. Scheduler thread only.

    `failed` holds keys whose load failed for this request: they are misses from then on, or the
    scheduler would try the same load for ever.
    """

    scope: Scope | None
    persist: bool
    verdict: Verdict
    failed: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says about itself."""

    tenant: str | None = None
    persist: bool = True
    retention_class: str | None = None
    """Which it asks for. The policy decides whether there is one; it can only shorten a life."""


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
    tenant, persist = mine.get("tenant"), mine.get("persist", True)
    if not isinstance(persist, bool):
        return None
    if tenant is not None and not (isinstance(tenant, str) and 0 < len(tenant) <= _MAX_NAME):
        return None
    retention_class = mine.get("class")
    if retention_class is not None and not (
        isinstance(retention_class, str) and 0 < len(retention_class) <= _MAX_NAME
    ):
        return None
    return Claim(tenant, persist, retention_class)


class Tenancy:
    """Decides for each request. No I/O: all scopes were opened when the engine started."""

    def __init__(self, scopes: Mapping[str, Scope], default: str | None) -> None:
        """`scopes`: the tenants that may be named, and the default one."""
        self._scopes = dict(scopes)
        self._default = None if default is None else self._scopes[default]
        self._asking: dict[tuple[bytes, str], Scope] = {}

    def decide(self, params: object) -> RequestState:
        """The state of a new request. Never raises.

        Malformed parameters: not stored, not served. No name, or one that is not on the list: the
        default tenant, or, where none is configured, not stored and not served.
        """
        asked = claim(params)
        if asked is None:
            return RequestState(None, False, Verdict.MALFORMED)
        if asked.tenant is not None:
            scope = self._scopes.get(asked.tenant)
            if scope is not None:
                return RequestState(self._ask(scope, asked), asked.persist, Verdict.ACCEPTED)
        if self._default is None:
            return RequestState(None, False, Verdict.NO_TENANT)
        scope = self._ask(self._default, asked)
        return RequestState(scope, asked.persist, Verdict.DEFAULT_TENANT)

    def _ask(self, scope: Scope, asked: Claim) -> Scope:
        if asked.retention_class is None:
            return scope
        key = (scope.tenant_id, asked.retention_class)
        if key not in self._asking:
            if len(self._asking) >= _MAX_CLASSES:
                return scope
            self._asking[key] = scope.asking(asked.retention_class)
        return self._asking[key]
