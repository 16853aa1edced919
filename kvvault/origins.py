"""Whose blocks are that are being written: what goes into `extents.origins` of the catalog."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvvault.catalog import prompts
from kvvault.catalog.catalog import Catalog
from kvvault.errors import KvvaultError
from kvvault.prompting import Prompt
from kvvault.segments.format import Extent
from kvvault.view import View

log = logging.getLogger(__name__)


class Origins(Protocol):
    """Whose blocks are that are put, see `kvvault.catalog.schema.extents`."""

    def prepare(self) -> None:
        """Something of it will be written soon. Waits for no disk but for the policy's."""

    def of(self, positions: Sequence[int]) -> bytes:
        """What the catalog keeps of the blocks at these positions of the put, 8 bytes each.

        Raises:
            KvvaultError: they cannot be written.
        """

    @property
    def prompt_no(self) -> int | None:
        """The prompt whose blocks they are, once `of` was called; None: of several, or nobody's."""


class Part:
    """Whose the blocks of one batch are, and which of the put's blocks these are."""

    __slots__ = ("_origins", "_positions")

    def __init__(self, origins: Origins, positions: Sequence[int]) -> None:
        self._origins = origins
        self._positions = positions

    def enter(self, extent: Extent, piece: slice) -> tuple[Extent, int | None]:
        """The extent of these blocks of the batch with their origins, and whose they are. Waits for
        the prompt's row, which was queued before the first block was encrypted.

        Raises:
            KvvaultError: it has no row.
        """
        extent = replace(extent, origins=self._origins.of(self._positions[piece]))
        return extent, self._origins.prompt_no


class OfPrompt:
    """The blocks of one prompt; `ends[i]`: the token at which the i-th block of the put ends."""

    def __init__(self, prompt: Prompt, ends: Sequence[int], catalog: Catalog, view: View) -> None:
        self._prompt = prompt
        self._ends = ends
        self._catalog = catalog
        self._view = view
        self.prompt_no: int | None = None

    def prepare(self) -> None:
        """Queue the prompt's row. Whether that is possible turns out in `of`."""
        try:
            self._prompt.prepare(self._catalog)
        except KvvaultError as exc:
            log.debug("a prompt has no row yet: %s", exc)

    def of(self, positions: Sequence[int]) -> bytes:
        """
        Raises:
            KvvaultError: the prompt has no row, so nothing is stored of it.
        """
        number = self._prompt.number(self._catalog, self._view)
        self.prompt_no = number
        ends = [min(max(self._ends[i], 0), prompts.MAX_END) for i in positions]
        flat = [value for end in ends for value in (number, end)]
        return struct.pack(f">{len(flat)}I", *flat)
