"""The on-disk format, held against what its docstring says."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.catalog.rows import SegmentRow
from kvvault.model import Namespace, RecoveryReport, SegmentFacts, SegmentState
from kvvault.segments import format as spec
from kvvault.segments.format import (
    MAX_BLOCK_BYTES,
    MAX_SLOTS,
    RECORD_BYTES,
    Extent,
    block_aad,
    parse_segment_name,
    segment_name,
)
from kvvault.segments.store import Records, batches, block_ids_of

IDS = st.binary(min_size=16, max_size=16)
DIGESTS = st.binary(min_size=32, max_size=32)
SLOTS = st.integers(0, MAX_SLOTS - 1)
LENGTHS = st.integers(1, MAX_BLOCK_BYTES)


class TestAssociatedData:
    """REQ-C3."""

    @given(IDS, IDS, DIGESTS, IDS, IDS, SLOTS, LENGTHS)
    def test_the_table_in_the_docstring(
        self, vault: bytes, tenant: bytes, digest: bytes, segment: bytes, block: bytes,
        slot: int, length: int,
    ) -> None:  # fmt: skip
        aad = block_aad(vault, tenant, digest, segment, block, slot, length)
        assert len(aad) == 112
        assert aad[:8] == b"kvvault\x01"
        assert (aad[8:24], aad[24:40], aad[40:72]) == (vault, tenant, digest)
        assert (aad[72:88], aad[88:104]) == (segment, block)
        assert struct.unpack(">II", aad[104:]) == (slot, length)

    @given(st.data())
    def test_any_other_field_is_other_data(self, data: st.DataObject) -> None:
        strategies = (IDS, IDS, DIGESTS, IDS, IDS, SLOTS, LENGTHS)
        fields: list[Any] = [data.draw(s) for s in strategies]
        which = data.draw(st.integers(0, 6))
        other = list(fields)
        other[which] = data.draw(strategies[which].filter(lambda v: v != fields[which]))
        assert block_aad(*fields) != block_aad(*other)


class TestNames:
    @given(IDS)
    def test_round_trip(self, segment_id: bytes) -> None:
        name = segment_name(segment_id)
        assert parse_segment_name(name) == segment_id
        assert len(name) == 36

    @pytest.mark.parametrize(
        "name",
        [
            "", ".", "..", ".seg", "0" * 32, "0" * 31 + ".seg", "0" * 33 + ".seg",
            "A" * 32 + ".seg", "g" * 32 + ".seg", "0" * 32 + ".SEG", "0" * 32 + ".seg.seg",
            "../" + "0" * 29 + ".seg", " " + "0" * 31 + ".seg", "0" * 30 + " 0.seg",
            "0" * 32 + ".seg\n", "\u0660" * 32 + ".seg",
        ],
    )  # fmt: skip
    def test_names_that_kvvault_never_makes(self, name: str) -> None:
        assert parse_segment_name(name) is None

    @given(st.text(max_size=40))
    def test_parsing_never_raises(self, text: str) -> None:
        parsed = parse_segment_name(text)
        assert parsed is None or segment_name(parsed) == text


def extent(count: int = 3, first: int = 0, **fields: Any) -> Extent:
    made: dict[str, Any] = {
        "segment_id": bytes(16),
        "first_slot": first,
        "block_ids": bytes(range(16)) * count,
        "nonces": b"n" * 12 * count,
        "tags": b"t" * 16 * count,
    }
    return Extent(**(made | fields))


class TestExtents:
    def test_well_formed(self) -> None:
        for good in (extent(), extent(1), extent(MAX_SLOTS), extent(2, first=MAX_SLOTS - 2)):
            assert good.well_formed
        for bad in (
            extent(0),
            extent(first=-1),
            extent(2, first=MAX_SLOTS - 1),
            extent(MAX_SLOTS + 1),
            extent(block_ids=bytes(16)),
            extent(block_ids=bytes(49)),
            extent(nonces=b""),
            extent(nonces=b"n" * 35),
            extent(tags=b"t" * 49),
        ):
            assert not bad.well_formed

    def test_ids(self) -> None:
        assert block_ids_of(extent(2)) == [bytes(range(16))] * 2

    @given(
        st.lists(
            st.tuples(st.integers(0, 50), st.integers(1, 10), st.integers(0, 255)), max_size=12
        )
    )
    def test_records_against_a_dictionary(self, adds: list[tuple[int, int, int]]) -> None:
        records, expected = Records(), dict[int, bytes]()
        for first, count, fill in adds:
            nonces = b"".join(bytes([fill, i] * 6) for i in range(count))
            tags = b"".join(bytes([i, fill] * 8) for i in range(count))
            records.add(extent(count, first, nonces=nonces, tags=tags))
            for i in range(count):
                expected[first + i] = bytes([fill, i] * 6) + bytes([i, fill] * 8)
        for slot in range(70):
            assert records[slot] == expected.get(slot, bytes(RECORD_BYTES))
        assert len(records) == max(expected, default=-1) + 1
        assert records.nbytes == RECORD_BYTES * len(records)

    @given(st.integers(0, 500), st.integers(1, 20), st.integers(1, 100))
    def test_batches(self, count: int, pages: int, limit: int) -> None:
        made = batches(count, pages * 4096, limit * 4096)
        assert [i for batch in made for i in batch] == list(range(count))
        assert all(len(b) == 1 or len(b) * pages <= limit for b in made)


def row(**changes: Any) -> SegmentRow:
    facts: dict[str, Any] = {
        "segment_id": bytes(16),
        "tenant_id": bytes(16),
        "namespace_digest": bytes(32),
        "state": SegmentState.SEALED,
        "block_bytes": 4096,
        "blocks": 4,
        "created_at": 0.0,
    }
    secret = changes.pop("wrapped_secret", b"w" * 60)
    return SegmentRow(SegmentFacts(**(facts | changes)), secret, b"c" * 32, "", True, 1)


def test_segment_rows_are_checked_before_use() -> None:
    for good in (
        row(),
        row(tenant_id=None),
        row(blocks=0),
        row(blocks=MAX_SLOTS),
        row(block_bytes=MAX_BLOCK_BYTES),
        row(state=SegmentState.DESTROYED, wrapped_secret=None),
        row(state=SegmentState.REVOKED),
    ):
        assert good.well_formed
    for bad in (
        row(segment_id=b""),
        row(segment_id=bytes(17)),
        row(tenant_id=bytes(15)),
        row(namespace_digest=bytes(31)),
        row(blocks=-1),
        row(blocks=MAX_SLOTS + 1),
        row(block_bytes=0),
        row(block_bytes=-4096),
        row(block_bytes=4097),
        row(block_bytes=MAX_BLOCK_BYTES + 4096),
        row(wrapped_secret=None),
        row(state=SegmentState.OPEN, wrapped_secret=None),
    ):
        assert not bad.well_formed


class TestNamespaces:
    def test_the_digest_is_what_the_docstring_says(self) -> None:
        facts = {"b": "zwei", "a": "ä"}
        canonical = '{"block_bytes":8192,"facts":{"a":"\\u00e4","b":"zwei"}}'
        made = Namespace.of(8192, facts)
        assert made.digest == hashlib.sha256(canonical.encode()).digest()
        assert made.facts == (("a", "ä"), ("b", "zwei"))
        assert made.fact("b") == "zwei"
        assert made.fact("c") is None

    @given(
        st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
        st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
    )
    def test_equal_exactly_when_all_facts_are(
        self, one: dict[str, str], two: dict[str, str]
    ) -> None:
        assert (Namespace.of(4096, one).digest == Namespace.of(4096, two).digest) is (one == two)

    @given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
    def test_what_the_catalog_keeps_gives_the_same_namespace(self, facts: dict[str, str]) -> None:
        made = Namespace.of(4096, facts)
        kept = json.dumps(dict(made.facts), sort_keys=True)
        assert Namespace.of(4096, json.loads(kept)) == made

    def test_facts_are_strings(self) -> None:
        bad: Any
        for bad in ({"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}):
            with pytest.raises(ValueError, match="strings"):
                Namespace.of(4096, bad)


def test_reports() -> None:
    assert RecoveryReport().clean
    assert not RecoveryReport(cut_bytes=1).clean


def test_the_specification_names_every_constant() -> None:
    assert spec.__doc__ is not None
    for word in (spec.DESCRIPTOR_NAME, spec.CATALOG_NAME, spec.SEGMENT_SUFFIX, "112 bytes"):
        assert word in spec.__doc__
    assert b"kvvault" + bytes([spec.FORMAT_VERSION]) == spec.MAGIC
