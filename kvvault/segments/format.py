"""The on-disk format of a vault, version 1.

A vault is one directory, mode 0700::

    VAULT               descriptor, JSON: format version, vault id, key provider URI. No secret.
    catalog.sqlite3     the catalog (and SQLite's -wal, -shm or -journal beside it)
    locks/              files whose flocks order processes (see `kvvault.segments.fence`); no data
                        but one byte in the gate that asks readers to queue up
    segments/           one file per segment, mode 0600, nothing else

Segment file
------------
Name: the segment id in hex (32 digits) and ``.seg``. The id is random, so a name tells nothing.
There is no header and no trailer: the file is a plain array of ciphertexts and cannot be told from
random bytes. With ``B = block_bytes`` of the namespace (a multiple of 4096):

====================  ==========  =================================================================
offset                size        content
====================  ==========  =================================================================
``slot * B``          ``B``       AES-256-GCM ciphertext of the block in that slot, without its tag
====================  ==========  =================================================================

Only the first ``blocks`` slots count (column ``segments.blocks``); what lies behind them was never
committed and is cut off when the vault is opened.

Per block, in the catalog (table ``extents``, one row for each write of consecutive slots, the
fields of its blocks concatenated in slot order):

============  ====  ===============================================================================
field         size  what it is, what it binds
============  ====  ===============================================================================
block id      16    HMAC-SHA256(tenant index key, namespace digest, engine's block key), truncated.
                    Keyed, so somebody with the disk and a guessed prompt finds no match
nonce         12    random, drawn for this block
tag           16    the GCM tag; binds ciphertext, nonce, segment key and the associated data
origin        8     number of the prompt that had it written, and the token it ends at: u32 big
                    endian each; binds nothing, and may be missing for a whole write
============  ====  ===============================================================================

Associated data of a block (`block_aad`), 112 bytes, never stored, always rebuilt from where the
block was found and who asks for it:

======  ====  =====================================================================================
offset  size  field, and what a mismatch would mean
======  ====  =====================================================================================
0       8     ``kvvault`` and the format version: bytes of another format never parse as this one
8       16    vault id: a segment copied between vaults
24      16    tenant id: another tenant's file
40      32    namespace digest: another model, dtype, layout, topology, engine
72      16    segment id: a block moved to another file
88      16    block id: another block's row
104     4     slot, u32 big endian: two blocks swapped within a file
108     4     plaintext length, u32 big endian: a truncated or padded block
======  ====  =====================================================================================

Per segment, in the catalog (table ``segments``): the segment secret, 32 random bytes, wrapped with
AES-256-GCM under the tenant key (60 bytes: nonce, ciphertext, tag; see `kvvault.crypto.keys` for
what its associated data binds), and a 32-byte key commitment that is compared in constant time
before anything is decrypted, so that no ciphertext can be made to open under two keys.

Writers write version 1. Readers accept version 1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvvault.crypto.aead import ID_BYTES, NONCE_BYTES, TAG_BYTES

FORMAT_VERSION = 1

MAGIC = b"kvvault" + bytes([FORMAT_VERSION])

DESCRIPTOR_NAME = "VAULT"
CATALOG_NAME = "catalog.sqlite3"
LOCKS_NAME = "locks"
SEGMENTS_NAME = "segments"
SEGMENT_SUFFIX = ".seg"

RECORD_BYTES = NONCE_BYTES + TAG_BYTES
"""What memory holds per block besides the index: nonce and tag, in slot order."""

ORIGIN_BYTES = 8
"""What the catalog keeps per block of the prompt it came from."""

MAX_BLOCK_BYTES = 1 << 30
"""Upper bound of a block. Far above any KV chunk, far below the u32 and the GCM length limit
(2^36 - 32 bytes, SP 800-38D 5.2.1.1)."""

MAX_SLOTS = 1 << 20
"""Upper bound of the slots of a segment, so that a damaged row cannot claim absurd memory."""

_AAD = struct.Struct(">8s16s16s32s16s16sII")


def block_aad(
    vault_id: bytes,
    tenant_id: bytes,
    namespace_digest: bytes,
    segment_id: bytes,
    block_id: bytes,
    slot: int,
    length: int,
) -> bytes:
    """Associated data of one block: 112 bytes, laid out as the module docstring says."""
    return _AAD.pack(
        MAGIC, vault_id, tenant_id, namespace_digest, segment_id, block_id, slot, length
    )


def segment_name(segment_id: bytes) -> str:
    """File name of a segment."""
    return segment_id.hex() + SEGMENT_SUFFIX


def parse_segment_name(name: str) -> bytes | None:
    """The segment id of a file name, or None when kvvault would never have made that name."""
    stem = name.removesuffix(SEGMENT_SUFFIX)
    if stem == name or len(stem) != 2 * ID_BYTES:
        return None
    try:
        segment_id = bytes.fromhex(stem)
    except ValueError:
        return None
    return segment_id if segment_name(segment_id) == name else None


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive slots of one segment, as one write made them and one catalog row keeps them."""

    segment_id: bytes
    first_slot: int
    block_ids: bytes
    """``count * 16`` bytes."""
    nonces: bytes
    """``count * 12`` bytes."""
    tags: bytes
    """``count * 16`` bytes."""
    origins: bytes = b""
    """``count * 8`` bytes (see `kvvault.catalog.schema.extents`), or none: nobody's."""

    @property
    def count(self) -> int:
        return len(self.block_ids) // ID_BYTES

    @property
    def well_formed(self) -> bool:
        """Whether the fields agree in length. Rows come from disk: check before use."""
        n = self.count
        return (
            n > 0
            and 0 <= self.first_slot <= MAX_SLOTS - n
            and len(self.block_ids) == n * ID_BYTES
            and len(self.nonces) == n * NONCE_BYTES
            and len(self.tags) == n * TAG_BYTES
            and len(self.origins) in (0, n * ORIGIN_BYTES)
        )
