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
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

HEAD = "0003"
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
"""`vault_id` (16 bytes), `lookup_key` and `signing_key` (wrapped under the root), `root_epoch` and
`signing_epoch` (UTF-8): under which root they are."""

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
    Column("key_no", Integer, nullable=False, server_default="1"),
)
"""`key_no` grows when a purge replaces the tenant's key: a segment is only added by whoever wrapped
its secret under the current one.

`lookup_id` is an HMAC of the name under the vault's lookup key: it finds the row of a tenant
that somebody names, and lists nobody."""

namespaces = Table(
    "namespaces",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("block_bytes", Integer, nullable=False),
    Column("facts", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

policies = Table(
    "policies",
    metadata,
    Column("policy_no", Integer, primary_key=True, autoincrement=True),
    Column("digest", LargeBinary, nullable=False),
    Column("sealed_source", LargeBinary, nullable=False),
    Column("applied_at", Float, nullable=False),
    Column("actor", Text, nullable=False),
    sqlite_autoincrement=True,
)
"""Every policy that was ever applied, word for word, under the vault's policy key; the one with the
highest number governs. `digest` is the SHA-256 of the text."""

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
    Column("policy_no", Integer),
    Column("rule", Text, nullable=False, server_default=""),
    Column("retention_class", Text, nullable=False, server_default=""),
    Column("sealed_labels", LargeBinary),
    Column("delete_by", Float),
    Column("idle_s", Float),
    Column("idle_until", Float),
    Column("keep_until", Float),
    Column("granted", Integer, nullable=False, server_default="0"),
    Column("last_used", Float),
    Column("hits", Integer, nullable=False, server_default="0"),
    CheckConstraint(
        "state IN ('open','sealed','revoked','destroyed','lost')", name="segment_state"
    ),
    CheckConstraint(
        "(state IN ('open','sealed')) = (wrapped_secret IS NOT NULL)", name="key_iff_live"
    ),
    Index("ix_segments_change", "change"),
    Index("ix_segments_tenant_id", "tenant_id"),
)
"""Times are seconds since the epoch, by the vault's own time (`kvvault.timekeeping`).

`policy_no`, `rule`, `retention_class` (as granted): what governs it, first that under which it was
written. `sealed_labels`: the labels it was decided by, JSON under the tenant's key, so that another
policy can be asked about it. `delete_by`: the ceiling; `idle_until`: the sliding deadline, moved by
use and never beyond the ceiling; NULL: none.
`keep_until`: the floor against eviction. `granted`: slots for which space was set aside, checked
against the cap in the transaction that raised it; once sealed, what `blocks` says. `hits` and
`last_used`: what engines have reported, seconds late.

`boot_id`: the kernel's boot in which the segment was written; after another boot, what was not
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
    Column("origins", LargeBinary),
    Index("ix_extents_segment_id", "segment_id"),
    sqlite_autoincrement=True,
)
"""AUTOINCREMENT: numbers are never used twice, so "everything after N" misses nothing.

`origins`: 8 bytes per block in slot order, two u32 big endian: number of the prompt that had the
block written (0: nobody's), and the prompt's token at which the block ends. NULL: all nobody's."""

revoked_blocks = Table(
    "revoked_blocks",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column(
        "segment_id",
        LargeBinary,
        ForeignKey("segments.segment_id", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("slot", Integer, nullable=False),
    Column("block_id", LargeBinary, nullable=False),
    Column("deletion_no", Integer, nullable=False),
    Index("ix_revoked_blocks_segment_id", "segment_id"),
    sqlite_autoincrement=True,
)
"""Single blocks that are not served any more, of segments that still live: until what else is in
these is written to others, and their keys are destroyed. No purge covers `deletion_no` before."""

holds = Table(
    "holds",
    metadata,
    Column("hold_no", Integer, primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("target", LargeBinary, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("placed_at", Float, nullable=False),
    Column("cleared_at", Float),
    Column("cleared_by", Text),
    Column("tenant_id", LargeBinary),
    CheckConstraint("kind IN ('tenant','segment','subject','prompt')", name="hold_kind"),
    sqlite_autoincrement=True,
)
"""Legal holds. `target`: a tenant's or segment's id, or a keyed id of a subject or prompt.
`tenant_id`: whose that is, also of a subject of whom nothing is there yet; both are emptied when
the tenant is forgotten."""

hold_segments = Table(
    "hold_segments",
    metadata,
    Column(
        "segment_id",
        LargeBinary,
        ForeignKey("segments.segment_id", ondelete="CASCADE"),
        primary_key=True,
    ),
)
"""Segments with blocks of subjects or prompts that are held, as of when somebody last looked: a
hold is placed, or keys are about to be destroyed. Only to choose by; what is told or done is worked
out anew (`kvvault.catalog.protecting`)."""

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", LargeBinary, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("until", Float, nullable=False),
)
"""Who runs the jobs. `until`: seconds of CLOCK_BOOTTIME in that boot, which no change of the wall
clock moves; a lease of another boot has run out."""

job_runs = Table(
    "job_runs",
    metadata,
    Column("run_no", Integer, primary_key=True, autoincrement=True),
    Column("job", Text, nullable=False),
    Column("holder", LargeBinary, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("outcome", Text),
    Column("detail", Text, nullable=False, server_default=""),
    CheckConstraint("outcome IN ('ok','failed','abandoned','refused')", name="run_outcome"),
    Index("ix_job_runs_job", "job"),
    sqlite_autoincrement=True,
)
"""`abandoned`: its process died; whoever took the lease over says so. No personal data in
`detail`."""

deletions = Table(
    "deletions",
    metadata,
    Column("deletion_no", Integer, primary_key=True, autoincrement=True),
    Column("trigger", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("segments", Integer, nullable=False),
    Column("blocks", Integer, nullable=False),
    Column("data_bytes", Integer, nullable=False),
    Column("revoked_at", Float, nullable=False),
    Column("purge_no", Integer, ForeignKey("purges.purge_no")),
    sqlite_autoincrement=True,
)
"""What was revoked, when, by what (`expire`, `evict`, `rm`, `forget`, `erase`, ...), and by which
purge it became unrecoverable (NULL: not yet)."""

purges = Table(
    "purges",
    metadata,
    Column("purge_no", Integer, primary_key=True, autoincrement=True),
    Column("started_at", Float, nullable=False),
    Column("old_epoch", Text, nullable=False),
    Column("new_epoch", Text, nullable=False),
    Column("assurance", Text, nullable=False),
    Column("destroyed_at", Float),
    Column("verified_at", Float),
    sqlite_autoincrement=True,
)
"""`destroyed_at` NULL: everything is under the new epoch already, and the old one is still to be
destroyed. `verified_at`: when opening something under it was tried and refused."""

scopes = Table(
    "scopes",
    metadata,
    Column("scope_no", Integer, primary_key=True, autoincrement=True),
    Column(
        "tenant_id",
        LargeBinary,
        ForeignKey("tenants.tenant_id", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("namespace", LargeBinary, ForeignKey("namespaces.digest"), nullable=False),
    UniqueConstraint("tenant_id", "namespace", name="uq_scopes_tenant_id"),
    sqlite_autoincrement=True,
)
"""Tenants and namespaces that have prompts: two bytes in each prompt's row instead of 48."""

texts = Table(
    "texts",
    metadata,
    Column("text_no", Integer, primary_key=True, autoincrement=True),
    Column(
        "tenant_id",
        LargeBinary,
        ForeignKey("tenants.tenant_id", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("kind", Text, nullable=False),
    Column("text_id", LargeBinary, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    CheckConstraint("kind IN ('subject','labels')", name="text_kind"),
    UniqueConstraint("tenant_id", "kind", "text_id", name="uq_texts_tenant_id"),
    sqlite_autoincrement=True,
)
"""What many prompts say of themselves, once: subjects, and label sets as canonical JSON. `text_id`:
keyed id under the tenant's index key, to find it by; `sealed`: encrypted under the tenant's key."""

prompts = Table(
    "prompts",
    metadata,
    Column("prompt_no", Integer, primary_key=True, autoincrement=True),
    Column("prompt_id", LargeBinary, nullable=False),
    Column(
        "scope_no",
        Integer,
        ForeignKey("scopes.scope_no", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("subject_no", Integer),
    Column("labels_no", Integer),
    Column("request_id", LargeBinary),
    Column("sealed", LargeBinary),
    Column("first_used", Float, nullable=False),
    Column("last_used", Float, nullable=False),
    Column("end_token", Integer, nullable=False, server_default="0"),
    Column("gone", Integer, nullable=False, server_default="0"),
    sqlite_autoincrement=True,
)
"""One request whose KV was stored or reused. Its blocks are those whose origin it is, and what its
links name.

`prompt_id`: 8 random bytes, what people see. `request_id`: keyed id of the client's name of the
request; `sealed`: that name and, if the policy says so, a fingerprint or preview (JSON, encrypted
under the tenant's key). `end_token`: the token at which its last block ends. `gone`: erased, or
nothing of it is left; kept without anything about it while another prompt's link leads through it.
No index but the key: looking at every row of 100,000 costs ten milliseconds, an index would cost
each of them as many bytes as the row."""

prompt_links = Table(
    "prompt_links",
    metadata,
    Column(
        "prompt_no",
        Integer,
        ForeignKey("prompts.prompt_no", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("via_no", Integer, nullable=False),
    Column("upto", Integer, nullable=False),
    PrimaryKeyConstraint("prompt_no", "via_no", name="pk_prompt_links"),
    sqlite_with_rowid=False,
)
"""What a prompt shares: all blocks of prompt `via_no`, its own and those its links name, that end
at token `upto` or before. A block's engine key is a hash of everything before it, so who has one
block in common has all before it in common, and one link says so, however many they are."""

log_entries = Table(
    "log_entries",
    metadata,
    Column("entry_no", Integer, primary_key=True),
    Column("body", Text, nullable=False),
)
"""The audit log, from 0 without a gap: each entry's bytes (canonical JSON, RFC 8785) are one leaf
of a Merkle tree (RFC 6962). No personal data: keyed ids only. Rows are only ever added."""

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("size", Integer, primary_key=True),
    Column("note", Text, nullable=False),
    Column("made_at", Float, nullable=False),
)
"""Signed notes (C2SP tlog-checkpoint) about the log's first `size` entries."""

receipts = Table(
    "receipts",
    metadata,
    Column("receipt_no", Integer, primary_key=True, autoincrement=True),
    Column("receipt_id", LargeBinary, nullable=False, unique=True),
    Column("deletion_no", Integer, ForeignKey("deletions.deletion_no")),
    Column("phase", Text, nullable=False),
    Column("entry_no", Integer, nullable=False),
    Column("document", Text, nullable=False),
    CheckConstraint("phase IN ('revoked','purged')", name="receipt_phase"),
    sqlite_autoincrement=True,
)
"""Signed records of deletions. `document`: the receipt as it is handed over; `entry_no`: the entry
of the log that has its digest. A deletion has one when it was revoked, one more when an engine was
asked for its copies, and one when it was purged."""
