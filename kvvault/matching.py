"""Which prompts of the inventory are meant, by what they are asked to be.

Names are looked up by their keyed ids, labels by decrypting all that are in use. So the tenants'
keys are opened first: where one cannot be had that is an error, not "no such prompt". Labels that
do not open match nothing: who looks is warned, and who erases is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from kvvault.catalog import membership, operations
from kvvault.catalog.catalog import Catalog
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import CatalogCorruptError, UsageError
from kvvault.keyring import KeyRing
from kvvault.naming import (
    LABELS,
    SUBJECT,
    composed,
    request_key,
    request_names,
    subject_key,
)
from kvvault.promptfacts import (
    COMPARE,
    LABEL,
    NUMBERS,
    TEXTS,
    Condition,
    Mask,
    Names,
    State,
    having_prefix,
)
from kvvault.tenants import find_tenant
from kvvault.timekeeping import VaultTime

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

log = logging.getLogger(__name__)


class Matcher:
    """Any thread. Reads the catalog, may ask the key provider."""

    def __init__(self, catalog: Catalog, ring: KeyRing, time: VaultTime) -> None:
        self._catalog = catalog
        self._ring = ring
        self._time = time

    def matching(
        self, state: State, conditions: Iterable[Condition], *, everything: bool = False
    ) -> Mask:
        """Which prompts of a state's table are in the inventory and meet all conditions.
        `everything`: also those that have no block now. Their requests may still be running and
        about to store some, so who erases means these, too.

        Raises:
            UsageError: there is no such field, or it cannot be compared so.
            KeyUnavailableError: a tenant's key cannot be had, so what is asked for by name cannot
                be looked up.
            CatalogCorruptError: with `everything`: labels do not open, so it cannot be said whether
                their prompts are meant. Else a warning says so.
            WrongKeyError, StorageError, CatalogError.
        """
        chosen = state.known if everything else state.present
        labels: dict[int, dict[str, str]] | None = None
        # Labels last: in doubt are only those that do not open of what is left by then.
        for condition in sorted(conditions, key=lambda one: one.name.startswith(LABEL)):
            if condition.name.startswith(LABEL) and labels is None:
                labels = self._labels(state)
                self._doubt(state, chosen, labels, everything=everything)
            chosen = chosen & self._test(state, condition, labels or {})
        return chosen

    def _labels(self, state: State) -> dict[int, dict[str, str]]:
        """All sets of labels in use, by number, as far as they open. No set is empty.

        Raises: as `_keys`.
        """
        self._keys(state)  # first: what does not open then is damaged
        used = {int(number) for number in np.unique(state.snapshot.prompts.labels)} - {0}
        texts = self._catalog.read(partial(membership.texts, numbers=used, kind=LABELS))
        names = Names(self._catalog, self._ring)
        return {text.text_no: opened for text in texts if (opened := names.labels(text))}

    def _doubt(
        self, state: State, chosen: Mask, labels: Collection[int], *, everything: bool
    ) -> None:
        """What to do when labels of any of these prompts do not open. Errors as `matching`."""
        of_each = state.snapshot.prompts.labels
        unclear = chosen & (of_each > 0) & ~np.isin(of_each, np.array([*labels], np.int64))
        count = int(np.count_nonzero(unclear))
        if count and everything:
            raise CatalogCorruptError(
                f"the labels of {count} prompts do not open, so it cannot be said whether these "
                "are meant",
                hint="choose by --prompt, --subject or --request; the catalog is damaged",
            )
        if count:
            log.warning("the labels of %d prompts do not open and match nothing", count)

    def _test(
        self, state: State, condition: Condition, labels: Mapping[int, Mapping[str, str]]
    ) -> Mask:
        name, op, value = condition.name, condition.op, condition.value
        if name in NUMBERS:
            if op not in COMPARE or not isinstance(value, int | float):
                raise UsageError(
                    f"{name} is a number, which {op} cannot compare", hint="use = != < <= > or >="
                )
            return COMPARE[op](self.numbers(state, name), float(value))
        if name not in TEXTS and not (name.startswith(LABEL) and name != LABEL):
            raise UsageError(
                f"prompts have no field {name[:40]!r}",
                hint=f"fields are: {', '.join([*TEXTS, 'label.NAME', *NUMBERS])}",
            )
        if op not in ("=", "!="):
            raise UsageError(f"{name} is text, which {op} cannot compare", hint="use = or !=")
        if name.startswith(LABEL):
            found = _labelled(state, labels, name.removeprefix(LABEL), str(value))
        else:
            found = self._equal(state, name, str(value))
        return found if op == "=" else ~found

    def numbers(self, state: State, name: str) -> F64:
        """A field of `NUMBERS`, of every prompt of the table."""
        table, at = state.snapshot.prompts, state.at
        figures = state.figures
        now = self._time.steady()
        columns: dict[str, Callable[[], npt.NDArray[np.generic]]] = {
            "age": lambda: now - table.first_used,
            "idle": lambda: now - table.last_used,
            "blocks": lambda: figures.blocks[at],
            "bytes": lambda: figures.bytes[at],
            "alone": lambda: figures.alone_bytes[at],
            "shared": lambda: (figures.bytes - figures.alone_bytes)[at],
            "tokens": lambda: figures.tokens[at],
            "deadline": lambda: figures.last_deadline[at],
            "first_used": lambda: table.first_used,
            "last_used": lambda: table.last_used,
        }
        return columns[name]().astype(np.float64)

    def _equal(self, state: State, name: str, value: str) -> Mask:
        table = state.snapshot.prompts
        if name == "id":
            prefix = value.lower()
            return having_prefix(table.prompt_id, prefix)
        if name in ("rule", "class"):
            segments = state.snapshot.segments
            said = [s.rule if name == "rule" else s.retention_class for s in segments]
            return state.having_in(np.array([one == value for one in said], np.bool_))
        if name in ("tenant", "model", "namespace"):
            return np.isin(table.scope, self._scopes(state, name, value))
        if name == "request":
            called = request_names(value)
            ids = [request_key(keys, name) for keys in self._keys(state) for name in called]
            numbers = self._catalog.read(partial(membership.prompts_of_requests, request_ids=ids))
            return np.isin(table.number, np.array(numbers, np.int64))
        ids = [subject_key(keys, value) for keys in self._keys(state)]
        found = self._catalog.read(partial(membership.text_numbers, kind=SUBJECT, text_ids=ids))
        return np.isin(table.subject, np.array(found, np.int64))

    def _scopes(self, state: State, name: str, value: str) -> I64:
        scopes = state.snapshot.scopes
        if name == "tenant":
            row = find_tenant(self._catalog, self._ring, value)
            tenant_id = None if row is None else row.tenant_id
            found = [no for no, (tenant, _) in scopes.items() if tenant == tenant_id]
        elif name == "model":
            models = self.models()
            found = [no for no, (_, digest) in scopes.items() if models.get(digest) == value]
        else:
            found = [
                no for no, (_, digest) in scopes.items() if digest.hex().startswith(value.lower())
            ]
        return np.array(found, np.int64)

    def _keys(self, state: State) -> list[TenantKeys]:
        """Keys of all tenants that have prompts.

        Raises: as `KeyRing.tenant`.
        """
        wanted = {tenant for tenant, _ in state.snapshot.scopes.values()}
        rows = self._catalog.read(operations.list_tenants)
        return [self._ring.tenant(row) for row in rows if row.tenant_id in wanted]

    def models(self) -> dict[bytes, str | None]:
        """What namespaces say of their model, by digest."""
        return {
            one.namespace.digest: one.namespace.fact("model")
            for one in self._catalog.read(operations.list_namespaces)
        }


def _labelled(state: State, labels: Mapping[int, Mapping[str, str]], name: str, value: str) -> Mask:
    wanted = composed(name), composed(value)
    having = [
        number
        for number, pairs in labels.items()
        if wanted in ((composed(key), composed(text)) for key, text in pairs.items())
    ]
    return np.isin(state.snapshot.prompts.labels, np.array(having, np.int64))
