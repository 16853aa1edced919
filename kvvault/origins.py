"""Whose blocks are that are being written: what goes into `extents.origins` of the catalog.

A prompt's row and its first extent are queued one behind the other and mostly committed together:
waiting for the number first would cost a commit more for each request. So an extent's origins are
made in the transaction that adds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection

from kvvault.catalog import operations, prompts
from kvvault.catalog.catalog import Catalog
from kvvault.errors import KvvaultError
from kvvault.prompting import Prompt, Row
from kvvault.segments.format import Extent
from kvvault.view import View

log = logging.getLogger(__name__)

Operation = Callable[[Connection], None]


class Origins(Protocol):
    """Whose blocks are that are put, see `kvvault.catalog.schema.extents`."""

    def prepare(self) -> None:
        """Something of it will be written soon. Waits for no disk but for the policy's."""

    def adding(self, extent: Extent, positions: Sequence[int]) -> Operation:
        """What commits an extent that has the blocks at these positions of the put.

        Raises:
            KvvaultError: they cannot be written.
        """


class Part:
    """Whose the blocks of one batch are, and which of the put's blocks these are."""

    __slots__ = ("_origins", "_positions")

    def __init__(self, origins: Origins, positions: Sequence[int]) -> None:
        self._origins = origins
        self._positions = positions

    def adding(self, extent: Extent, piece: slice) -> Operation:
        """What commits an extent with these blocks of the batch. Errors as `Origins.adding`."""
        return self._origins.adding(extent, self._positions[piece])


class OfPrompt:
    """The blocks of one prompt; `ends[i]`: the token at which the i-th block of the put ends."""

    def __init__(self, prompt: Prompt, ends: Sequence[int], catalog: Catalog, view: View) -> None:
        self._prompt = prompt
        self._ends = ends
        self._catalog = catalog
        self._view = view

    def prepare(self) -> None:
        """Queue the prompt's row. Whether that is possible turns out in `adding`."""
        try:
            self._prompt.prepare(self._catalog)
        except KvvaultError as exc:
            log.debug("a prompt has no row yet: %s", exc)

    def adding(self, extent: Extent, positions: Sequence[int]) -> Operation:
        """
        Raises:
            KvvaultError: the prompt has no row, so nothing is stored of it.
        """
        row = self._prompt.prepare(self._catalog)
        if row.failed:
            self._prompt.number(self._catalog, self._view)
            row = self._prompt.prepare(self._catalog)
        ends = np.array([self._ends[i] for i in positions], np.int64).clip(0, prompts.MAX_END)
        return partial(_add, extent=extent, ends=ends, row=row)


def _add(connection: Connection, extent: Extent, ends: npt.NDArray[np.int64], row: Row) -> None:
    number = row.in_transaction()
    pairs = np.empty((len(ends), 2), ">u4")
    pairs[:, 0] = number
    pairs[:, 1] = ends
    operations.add_extent(connection, replace(extent, origins=pairs.tobytes()), number)
