"""Ways to damage a vault: bits, exchanged files and rows, truncations, columns, deletions.

Each takes what it needs from the working copy's pool, so that those of one round rarely meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from kvvault.segments.format import MAX_BLOCK_BYTES, MAX_SLOTS
from tests.core.golden import FIELDS, Damaged
from tests.core.support import (
    BLOCK,
    flip,
)

Kind = Callable[[Damaged], None]

FILE_KINDS: list[Kind] = []
"""Need no catalog: they can also happen while the vault is open."""
ROW_KINDS: list[Kind] = []


def file_kind(kind: Kind) -> Kind:
    FILE_KINDS.append(kind)
    return kind


def row_kind(kind: Kind) -> Kind:
    ROW_KINDS.append(kind)
    return kind


def replace(new: bytes, _old: bytes) -> bytes:
    return new


# -- segment files -------------------------------------------------------------------------------


def flip_in_file(damaged: Damaged, segment: bytes, bit: int) -> None:
    with damaged.path(segment).open("r+b") as file:
        file.seek(bit // 8)
        old = file.read(1)
        file.seek(bit // 8)
        file.write(flip(old, bit % 8))


@file_kind
def flip_any_bit(damaged: Damaged) -> None:
    segment = damaged.take()
    flip_in_file(damaged, segment, damaged.rng.randrange(8 * len(damaged.golden.files[segment])))


@file_kind
def flip_a_bit_at_an_edge(damaged: Damaged) -> None:
    segment = damaged.take()
    slots = len(damaged.golden.files[segment]) // BLOCK
    byte = damaged.rng.randrange(slots) * BLOCK + damaged.rng.choice((0, 15, 16, BLOCK - 1))
    flip_in_file(damaged, segment, 8 * byte + damaged.rng.randrange(8))


@file_kind
def overwrite_a_range(damaged: Damaged) -> None:
    segment = damaged.take()
    size = len(damaged.golden.files[segment])
    start = damaged.rng.randrange(size)
    length = damaged.rng.randint(1, min(2 * BLOCK, size - start))
    with damaged.path(segment).open("r+b") as file:
        file.seek(start)
        file.write(damaged.rng.randbytes(length))


@file_kind
def swap_two_blocks(damaged: Damaged) -> None:
    segment = damaged.take()
    data = damaged.golden.files[segment]
    one, two = damaged.rng.sample(range(len(data) // BLOCK), 2)
    with damaged.path(segment).open("r+b") as file:
        for to, source in ((one, two), (two, one)):
            file.seek(to * BLOCK)
            file.write(data[source * BLOCK : (source + 1) * BLOCK])


@file_kind
def truncate(damaged: Damaged) -> None:
    segment = damaged.take()
    size = damaged.rng.randrange(len(damaged.golden.files[segment]))
    os.truncate(damaged.path(segment), size)
    damaged.resized.add(segment)


@file_kind
def truncate_to_whole_blocks(damaged: Damaged) -> None:
    segment = damaged.take()
    slots = len(damaged.golden.files[segment]) // BLOCK
    os.truncate(damaged.path(segment), damaged.rng.randrange(slots) * BLOCK)
    damaged.resized.add(segment)


@file_kind
def extend(damaged: Damaged) -> None:
    segment = damaged.take()
    with damaged.path(segment).open("ab") as file:
        file.write(damaged.rng.randbytes(damaged.rng.choice((1, 100, BLOCK, 2 * BLOCK + 1))))
    damaged.resized.add(segment)


@file_kind
def remove(damaged: Damaged) -> None:
    segment = damaged.take()
    damaged.path(segment).unlink(missing_ok=True)
    damaged.resized.add(segment)


@file_kind
def swap_two_files(damaged: Damaged) -> None:
    exchange(damaged, damaged.take(), damaged.take())


@file_kind
def swap_two_tenants_files(damaged: Damaged) -> None:
    one = damaged.take()
    others = [
        s for s in damaged.golden.mutable if damaged.golden.owners[s] != damaged.golden.owners[one]
    ]
    two = next((s for s in damaged.pool if s in others), others[0])
    damaged.pool = [s for s in damaged.pool if s != two]
    exchange(damaged, one, two)


def exchange(damaged: Damaged, one: bytes, two: bytes) -> None:
    paths = damaged.path(one), damaged.path(two)
    if one == two or not all(path.exists() for path in paths):
        return
    aside = paths[0].with_suffix(".aside")
    paths[0].rename(aside)
    paths[1].rename(paths[0])
    aside.rename(paths[1])
    damaged.resized |= {one, two}


@file_kind
def copy_over_another(damaged: Damaged) -> None:
    one, two = damaged.take(), damaged.take()
    damaged.path(two).write_bytes(damaged.golden.files[one])
    damaged.path(two).chmod(0o600)
    damaged.resized.add(two)


@file_kind
def replace_by_a_link(damaged: Damaged) -> None:
    segment = damaged.take()
    path = damaged.path(segment)
    path.unlink(missing_ok=True)
    path.symlink_to(damaged.golden.home.path / "segments" / path.name)


@file_kind
def open_to_others(damaged: Damaged) -> None:
    segment = damaged.take()
    if damaged.path(segment).exists():
        damaged.path(segment).chmod(damaged.rng.choice((0o640, 0o604, 0o666, 0o601)))


# -- rows of blocks ------------------------------------------------------------------------------


@row_kind
def flip_block_id(damaged: Damaged) -> None:
    flip_field(damaged, "block_ids", damaged.rng.randrange(128))


@row_kind
def flip_nonce(damaged: Damaged) -> None:
    flip_field(damaged, "nonces", damaged.rng.randrange(96))


@row_kind
def flip_tag(damaged: Damaged) -> None:
    flip_field(damaged, "tags", damaged.rng.randrange(128))


def flip_field(damaged: Damaged, name: str, bit: int) -> None:
    block = damaged.take_block()
    damaged.change_field(block, name, lambda value: flip(value, bit) if value else value)


@row_kind
def swap_a_field_of_two_blocks(damaged: Damaged) -> None:
    name = damaged.rng.choice(sorted(FIELDS))
    one, two = damaged.take_block(), damaged.take_block()
    a, b = damaged.field(one, name), damaged.field(two, name)
    damaged.change_field(one, name, partial(replace, b))
    damaged.change_field(two, name, partial(replace, a))


@row_kind
def swap_a_field_within_a_segment(damaged: Damaged) -> None:
    name = damaged.rng.choice(sorted(FIELDS))
    segment = damaged.take()
    one, two = damaged.rng.sample([b for b in damaged.golden.blocks if b.segment == segment], 2)
    a, b = damaged.field(one, name), damaged.field(two, name)
    damaged.change_field(one, name, partial(replace, b))
    damaged.change_field(two, name, partial(replace, a))


@row_kind
def swap_whole_records(damaged: Damaged) -> None:
    # Everything the catalog has of two blocks: each id then leads to the other's ciphertext.
    segment = damaged.take()
    one, two = damaged.rng.sample([b for b in damaged.golden.blocks if b.segment == segment], 2)
    for name in FIELDS:
        a, b = damaged.field(one, name), damaged.field(two, name)
        damaged.change_field(one, name, partial(replace, b))
        damaged.change_field(two, name, partial(replace, a))


@row_kind
def move_two_blocks_wholly(damaged: Damaged) -> None:
    # Ciphertext, id, nonce and tag all agree, in the other's slot: only the slot is wrong.
    segment = damaged.take()
    one, two = damaged.rng.sample([b for b in damaged.golden.blocks if b.segment == segment], 2)
    for name in FIELDS:
        a, b = damaged.field(one, name), damaged.field(two, name)
        damaged.change_field(one, name, partial(replace, b))
        damaged.change_field(two, name, partial(replace, a))
    data = damaged.golden.files[segment]
    with damaged.path(segment).open("r+b") as file:
        for to, source in ((one.slot, two.slot), (two.slot, one.slot)):
            file.seek(to * BLOCK)
            file.write(data[source * BLOCK : (source + 1) * BLOCK])


@row_kind
def move_two_segments_wholly(damaged: Damaged) -> None:
    # File, key, commitment and extents of one tenant and model, under the other's id.
    one = damaged.take()
    kin = [
        segment
        for segment, row in damaged.golden.rows.segments.items()
        if segment != one
        and all(row[c] == damaged.golden.rows.segments[one][c] for c in ("tenant_id", "namespace"))
    ]
    if not kin:
        return
    two = damaged.rng.choice(kin)
    damaged.pool = [segment for segment in damaged.pool if segment != two]
    exchange(damaged, one, two)
    for column in ("wrapped_secret", "commitment"):
        damaged.swap_columns("segments", column, "segment_id", one, two)
    for to, source in ((two, one), (one, two)):
        for extent in damaged.golden.extents_of(source):
            damaged.set_column("extents", "segment_id", to, "extent_no", extent)


@row_kind
def claim_another_blocks_id(damaged: Damaged) -> None:
    one, two = damaged.take_block(), damaged.take_block()
    damaged.change_field(one, "block_ids", partial(replace, two.block_id))


@row_kind
def cut_or_extend_a_field(damaged: Damaged) -> None:
    name = damaged.rng.choice(sorted(FIELDS))
    extent = damaged.take_block().extent
    value = damaged.get_column("extents", name, "extent_no", extent)
    if not isinstance(value, bytes):
        return
    change = damaged.rng.choice((value[:-1], value + b"x", b"", value[: FIELDS[name]], value * 2))
    damaged.set_column("extents", name, change, "extent_no", extent)


@row_kind
def put_another_type_into_an_extent(damaged: Damaged) -> None:
    column = damaged.rng.choice(("segment_id", "first_slot", *FIELDS))
    value = damaged.rng.choice((7, -1, 1 << 60, 2.5, "text", b"blob"))
    damaged.set_column("extents", column, value, "extent_no", damaged.take_block().extent)


@row_kind
def move_an_extent_within_its_segment(damaged: Damaged) -> None:
    slot = damaged.rng.choice(
        (0, 1, 2, 3, 4, 100, MAX_SLOTS - 2, MAX_SLOTS - 1, 1 << 40, -1, -(1 << 40))
    )
    damaged.set_column("extents", "first_slot", slot, "extent_no", damaged.take_block().extent)


@row_kind
def swap_two_extents_slots(damaged: Damaged) -> None:
    one, two = damaged.golden.extents_of(damaged.take())
    damaged.swap_columns("extents", "first_slot", "extent_no", one, two)


@row_kind
def swap_two_extents_segments(damaged: Damaged) -> None:
    one, two = damaged.take_block(), damaged.take_block()
    damaged.swap_columns("extents", "segment_id", "extent_no", one.extent, two.extent)


@row_kind
def move_an_extent_to_another_segment(damaged: Damaged) -> None:
    damaged.set_column(
        "extents", "segment_id", damaged.take(), "extent_no", damaged.take_block().extent
    )


@row_kind
def delete_an_extent(damaged: Damaged) -> None:
    damaged.sql.execute("DELETE FROM extents WHERE extent_no = ?", (damaged.take_block().extent,))


@row_kind
def repeat_an_extent(damaged: Damaged) -> None:
    extent = damaged.take_block().extent
    damaged.sql.execute(
        "INSERT INTO extents (segment_id, first_slot, block_ids, nonces, tags) "
        "SELECT segment_id, first_slot + ?, block_ids, nonces, tags FROM extents "
        "WHERE extent_no = ?",
        (damaged.rng.choice((0, 1, 2, 4)), extent),
    )


# -- rows of segments ----------------------------------------------------------------------------


@row_kind
def flip_wrapped_secret(damaged: Damaged) -> None:
    flip_segment(damaged, "wrapped_secret", damaged.rng.randrange(8 * 60))


@row_kind
def flip_commitment(damaged: Damaged) -> None:
    flip_segment(damaged, "commitment", damaged.rng.randrange(8 * 32))


def flip_segment(damaged: Damaged, column: str, bit: int) -> None:
    segment = damaged.take()
    value = damaged.get_column("segments", column, "segment_id", segment)
    if isinstance(value, bytes) and len(value) > bit // 8:
        damaged.set_column("segments", column, flip(value, bit), "segment_id", segment)


@row_kind
def change_the_length_of_a_key_or_commitment(damaged: Damaged) -> None:
    column = damaged.rng.choice(("wrapped_secret", "commitment"))
    segment = damaged.take()
    value = damaged.rng.choice((b"", b"x", damaged.rng.randbytes(59), damaged.rng.randbytes(61)))
    damaged.set_column("segments", column, value, "segment_id", segment)


@row_kind
def swap_a_column_of_two_segments(damaged: Damaged) -> None:
    column = damaged.rng.choice(
        ("wrapped_secret", "commitment", "tenant_id", "namespace", "segment_id", "blocks")
    )
    one, two = damaged.take(), damaged.take()
    damaged.swap_columns("segments", column, "segment_id", one, two)


@row_kind
def give_a_segment_to_another_tenant(damaged: Damaged) -> None:
    segment = damaged.take()
    tenants = [row["tenant_id"] for row in damaged.golden.rows.tenants.values()]
    new = damaged.rng.choice((*tenants, None, damaged.rng.randbytes(16), b"", b"x" * 17))
    damaged.set_column("segments", "tenant_id", new, "segment_id", segment)


@row_kind
def give_a_segment_another_namespace(damaged: Damaged) -> None:
    segment = damaged.take()
    digests = sorted({row["namespace"] for row in damaged.golden.rows.segments.values()})
    new = damaged.rng.choice((*digests, damaged.rng.randbytes(32), b"", b"x" * 33))
    damaged.set_column("segments", "namespace", new, "segment_id", segment)


@row_kind
def change_the_number_of_blocks(damaged: Damaged) -> None:
    segment = damaged.take()
    new = damaged.rng.choice(
        (0, 1, 2, 3, 5, 1000, MAX_SLOTS, MAX_SLOTS + 1, -1, 1 << 60, -(1 << 60))
    )
    damaged.set_column("segments", "blocks", new, "segment_id", segment)
    damaged.resized.add(segment)


@row_kind
def change_the_block_size(damaged: Damaged) -> None:
    segment = damaged.take()
    new = damaged.rng.choice((0, 1, 4095, 2 * BLOCK, 1 << 20, -BLOCK, 1 << 40, MAX_BLOCK_BYTES))
    damaged.set_column("segments", "block_bytes", new, "segment_id", segment)
    damaged.resized.add(segment)


@row_kind
def change_the_state(damaged: Damaged) -> None:
    segment = damaged.take()
    new = damaged.rng.choice(("open", "sealed", "revoked", "destroyed", "lost"))
    damaged.set_column("segments", "state", new, "segment_id", segment)
    if new not in ("open", "sealed") and damaged.rng.random() < 0.5:
        damaged.set_column("segments", "wrapped_secret", None, "segment_id", segment)
    damaged.resized.add(segment)


@row_kind
def pretend_another_boot(damaged: Damaged) -> None:
    segment = damaged.take()
    damaged.set_column("segments", "boot_id", "another", "segment_id", segment)
    damaged.set_column("segments", "synced", 0, "segment_id", segment)
    damaged.resized.add(segment)  # then recovery authenticates, and cuts what fails


@row_kind
def change_the_change_number(damaged: Damaged) -> None:
    segment = damaged.take()
    new = damaged.rng.choice((0, 1, -5, 1 << 40))
    damaged.set_column("segments", "change", new, "segment_id", segment)


@row_kind
def delete_a_segment(damaged: Damaged) -> None:
    segment = damaged.take()
    damaged.sql.execute("DELETE FROM segments WHERE segment_id = ?", (segment,))
    damaged.resized.add(segment)


# -- rows of tenants and namespaces --------------------------------------------------------------

TENANT_COLUMNS = ("tenant_id", "lookup_id", "wrapped_key", "wrapped_index_key", "sealed_name")


@row_kind
def flip_a_tenant(damaged: Damaged) -> None:
    column = damaged.rng.choice(TENANT_COLUMNS)
    flip_tenant(damaged, column, damaged.rng.randrange(128))


def flip_tenant(damaged: Damaged, column: str, bit: int) -> None:
    tenant_row(damaged, column, lambda value: flip(value, bit))


def tenant_row(damaged: Damaged, column: str, change: Callable[[bytes], object]) -> None:
    lookup_id = damaged.golden.lookup_ids[damaged.take_tenant()]
    value = damaged.get_column("tenants", column, "lookup_id", lookup_id)
    if isinstance(value, bytes) and value:
        damaged.set_column("tenants", column, change(value), "lookup_id", lookup_id)


@row_kind
def change_the_length_of_a_tenants_column(damaged: Damaged) -> None:
    column = damaged.rng.choice(TENANT_COLUMNS[2:])
    how = damaged.rng.choice((lambda v: v[:-1], lambda v: v + b"x", lambda _: b"", lambda _: 7))
    tenant_row(damaged, column, how)


@row_kind
def change_the_epoch_of_a_tenant(damaged: Damaged) -> None:
    lookup_id = damaged.golden.lookup_ids[damaged.take_tenant()]
    damaged.set_column("tenants", "root_epoch", "f" * 32, "lookup_id", lookup_id)


@row_kind
def swap_a_column_of_two_tenants(damaged: Damaged) -> None:
    column = damaged.rng.choice(TENANT_COLUMNS)
    one, two = (damaged.golden.lookup_ids[damaged.take_tenant()] for _ in range(2))
    if one == two:
        return
    ids = [damaged.get_column("tenants", "rowid", "lookup_id", x) for x in (one, two)]
    if None not in ids and column != "tenant_id":
        damaged.swap_columns("tenants", column, "rowid", *ids)


@row_kind
def delete_a_tenant(damaged: Damaged) -> None:
    lookup_id = damaged.golden.lookup_ids[damaged.take_tenant()]
    damaged.sql.execute("DELETE FROM tenants WHERE lookup_id = ?", (lookup_id,))


@row_kind
def damage_the_namespaces(damaged: Damaged) -> None:
    # What they say is printed; what counts is the digest in the segments' rows.
    damaged.sql.execute(
        damaged.rng.choice(
            (
                "DELETE FROM namespaces",
                "UPDATE namespaces SET facts = '{}'",
                "UPDATE namespaces SET facts = 'x'",
                "UPDATE namespaces SET block_bytes = 7",
            )
        )
    )


@row_kind
def lose_the_counter(damaged: Damaged) -> None:
    damaged.sql.execute(
        damaged.rng.choice(("DELETE FROM counters", "UPDATE counters SET value = -1"))
    )
