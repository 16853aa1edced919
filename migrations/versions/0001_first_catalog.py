"""The first catalog: tenants, namespaces, segments, extents.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_meta"),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.LargeBinary(), nullable=False),
        sa.Column("lookup_id", sa.LargeBinary(), nullable=False),
        sa.Column("root_epoch", sa.Text(), nullable=False),
        sa.Column("wrapped_key", sa.LargeBinary(), nullable=False),
        sa.Column("wrapped_index_key", sa.LargeBinary(), nullable=False),
        sa.Column("sealed_name", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenants"),
        sa.UniqueConstraint("lookup_id", name="uq_tenants_lookup_id"),
    )
    op.create_table(
        "namespaces",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("block_bytes", sa.Integer(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_namespaces"),
    )
    op.create_table(
        "segments",
        sa.Column("segment_id", sa.LargeBinary(), nullable=False),
        sa.Column("tenant_id", sa.LargeBinary(), nullable=True),
        sa.Column("namespace", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("wrapped_secret", sa.LargeBinary(), nullable=True),
        sa.Column("commitment", sa.LargeBinary(), nullable=False),
        sa.Column("block_bytes", sa.Integer(), nullable=False),
        sa.Column("blocks", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("synced", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("change", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "state IN ('open','sealed','revoked','destroyed','lost')",
            name=op.f("ck_segments_segment_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('open','sealed')) = (wrapped_secret IS NOT NULL)",
            name=op.f("ck_segments_key_iff_live"),
        ),
        sa.ForeignKeyConstraint(
            ["namespace"], ["namespaces.digest"], name="fk_segments_namespace_namespaces"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.tenant_id"],
            name="fk_segments_tenant_id_tenants",
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("segment_id", name="pk_segments"),
    )
    op.create_index("ix_segments_change", "segments", ["change"])
    op.create_index("ix_segments_tenant_id", "segments", ["tenant_id"])
    op.create_table(
        "extents",
        sa.Column("extent_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("segment_id", sa.LargeBinary(), nullable=False),
        sa.Column("first_slot", sa.Integer(), nullable=False),
        sa.Column("block_ids", sa.LargeBinary(), nullable=False),
        sa.Column("nonces", sa.LargeBinary(), nullable=False),
        sa.Column("tags", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["segment_id"],
            ["segments.segment_id"],
            name="fk_extents_segment_id_segments",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("extent_no", name="pk_extents"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_extents_segment_id", "extents", ["segment_id"])


def downgrade() -> None:
    for table in ("extents", "segments", "namespaces", "tenants", "counters", "meta"):
        op.drop_table(table)
