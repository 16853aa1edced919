"""Tables of the catalog. The migrations in ``migrations/`` build exactly this (a test compares).

What is not here matters as much: no tenant name, prompt, token id or engine block hash in clear.
Names are encrypted under the tenant's own key, ids are HMACs or random.

Blocks are not rows. One row of `extents` holds what one write committed, its blocks' fields
concatenated: a row per block would cost more than encrypting the block (a 64 KiB block takes about
30 microseconds to encrypt, a row insert through SQLAlchemy about as much), and opening a vault of a
million blocks would read a million rows instead of sixty thousand.
"""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

HEAD = "0001"
"""Alembic revision that this code reads and writes."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""`vault_id` (16 bytes), `lookup_key` (wrapped under the root), `root_epoch` (UTF-8)."""

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Integer, nullable=False),
)
"""`change`: grows with every change of a segment's state, so that other processes find what is new
since they last looked."""

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", LargeBinary, primary_key=True),
    Column("lookup_id", LargeBinary, nullable=False, unique=True),
    Column("root_epoch", Text, nullable=False),
    Column("wrapped_key", LargeBinary, nullable=False),
    Column("wrapped_index_key", LargeBinary, nullable=False),
    Column("sealed_name", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
)
"""`lookup_id` is an HMAC of the name under the vault's lookup key: it finds the row of a tenant
that somebody names, and lists nobody."""

namespaces = Table(
    "namespaces",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("block_bytes", Integer, nullable=False),
    Column("facts", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

segments = Table(
    "segments",
    metadata,
    Column("segment_id", LargeBinary, primary_key=True),
    Column("tenant_id", LargeBinary, ForeignKey("tenants.tenant_id", ondelete="SET NULL")),
    Column("namespace", LargeBinary, ForeignKey("namespaces.digest"), nullable=False),
    Column("state", Text, nullable=False),
    Column("wrapped_secret", LargeBinary),
    Column("commitment", LargeBinary, nullable=False),
    Column("block_bytes", Integer, nullable=False),
    Column("blocks", Integer, nullable=False, server_default="0"),
    Column("boot_id", Text, nullable=False),
    Column("synced", Integer, nullable=False, server_default="0"),
    Column("created_at", Float, nullable=False),
    Column("change", Integer, nullable=False),
    CheckConstraint(
        "state IN ('open','sealed','revoked','destroyed','lost')", name="segment_state"
    ),
    CheckConstraint(
        "(state IN ('open','sealed')) = (wrapped_secret IS NOT NULL)", name="key_iff_live"
    ),
    Index("ix_segments_change", "change"),
    Index("ix_segments_tenant_id", "tenant_id"),
)
"""`boot_id`: the kernel's boot in which the segment was written; after another boot, what was not
`synced` is authenticated before it is trusted, because a power loss may have taken its bytes."""

extents = Table(
    "extents",
    metadata,
    Column("extent_no", Integer, primary_key=True, autoincrement=True),
    Column(
        "segment_id",
        LargeBinary,
        ForeignKey("segments.segment_id", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("first_slot", Integer, nullable=False),
    Column("block_ids", LargeBinary, nullable=False),
    Column("nonces", LargeBinary, nullable=False),
    Column("tags", LargeBinary, nullable=False),
    Index("ix_extents_segment_id", "segment_id"),
    sqlite_autoincrement=True,
)
"""AUTOINCREMENT: numbers are never used twice, so "everything after N" misses nothing."""
