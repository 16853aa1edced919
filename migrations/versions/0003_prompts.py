"""Prompts, erasure of single blocks, the audit log.

Blocks of an older catalog are nobody's until a request reuses them.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kvvault.errors import UnsupportedVersionError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # In place: see 0002.
    op.add_column("extents", sa.Column("origins", sa.LargeBinary(), nullable=True))
    op.create_table(
        "revoked_blocks",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("segment_id", sa.LargeBinary(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("block_id", sa.LargeBinary(), nullable=False),
        sa.Column("deletion_no", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["segment_id"],
            ["segments.segment_id"],
            name="fk_revoked_blocks_segment_id_segments",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("seq", name="pk_revoked_blocks"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_revoked_blocks_segment_id", "revoked_blocks", ["segment_id"])
    op.add_column("holds", sa.Column("tenant_id", sa.LargeBinary(), nullable=True))
    op.execute("UPDATE holds SET tenant_id = target WHERE kind = 'tenant' AND length(target) > 0")
    op.execute(
        "UPDATE holds SET tenant_id = (SELECT s.tenant_id FROM segments s "
        "WHERE s.segment_id = holds.target) WHERE kind = 'segment'"
    )
    op.create_table(
        "hold_segments",
        sa.Column("segment_id", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["segment_id"],
            ["segments.segment_id"],
            name="fk_hold_segments_segment_id_segments",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("segment_id", name="pk_hold_segments"),
    )
    op.create_table(
        "scopes",
        sa.Column("scope_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.LargeBinary(), nullable=False),
        sa.Column("namespace", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.tenant_id"],
            name="fk_scopes_tenant_id_tenants",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["namespace"], ["namespaces.digest"], name="fk_scopes_namespace_namespaces"
        ),
        sa.PrimaryKeyConstraint("scope_no", name="pk_scopes"),
        sa.UniqueConstraint("tenant_id", "namespace", name="uq_scopes_tenant_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "texts",
        sa.Column("text_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.LargeBinary(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text_id", sa.LargeBinary(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("kind IN ('subject','labels')", name=op.f("ck_texts_text_kind")),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.tenant_id"],
            name="fk_texts_tenant_id_tenants",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("text_no", name="pk_texts"),
        sa.UniqueConstraint("tenant_id", "kind", "text_id", name="uq_texts_tenant_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "prompts",
        sa.Column("prompt_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("prompt_id", sa.LargeBinary(), nullable=False),
        sa.Column("scope_no", sa.Integer(), nullable=False),
        sa.Column("subject_no", sa.Integer(), nullable=True),
        sa.Column("labels_no", sa.Integer(), nullable=True),
        sa.Column("request_id", sa.LargeBinary(), nullable=True),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("first_used", sa.Float(), nullable=False),
        sa.Column("last_used", sa.Float(), nullable=False),
        sa.Column("end_token", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("gone", sa.Integer(), nullable=False, server_default="0"),
        sa.ForeignKeyConstraint(
            ["scope_no"],
            ["scopes.scope_no"],
            name="fk_prompts_scope_no_scopes",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("prompt_no", name="pk_prompts"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "prompt_links",
        sa.Column("prompt_no", sa.Integer(), nullable=False),
        sa.Column("via_no", sa.Integer(), nullable=False),
        sa.Column("upto", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["prompt_no"],
            ["prompts.prompt_no"],
            name="fk_prompt_links_prompt_no_prompts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("prompt_no", "via_no", name="pk_prompt_links"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "log_entries",
        sa.Column("entry_no", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("entry_no", name="pk_log_entries"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("made_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("size", name="pk_checkpoints"),
    )
    op.create_table(
        "receipts",
        sa.Column("receipt_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("receipt_id", sa.LargeBinary(), nullable=False),
        sa.Column("deletion_no", sa.Integer(), nullable=True),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("entry_no", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.CheckConstraint("phase IN ('revoked','purged')", name=op.f("ck_receipts_receipt_phase")),
        sa.ForeignKeyConstraint(
            ["deletion_no"],
            ["deletions.deletion_no"],
            name="fk_receipts_deletion_no_deletions",
        ),
        sa.PrimaryKeyConstraint("receipt_no", name="pk_receipts"),
        sa.UniqueConstraint("receipt_id", name="uq_receipts_receipt_id"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    # An older kvvault knows neither: it would serve what was erased, and delete what is held.
    live = "SELECT segment_id FROM segments WHERE state IN ('open', 'sealed')"
    known = {
        "erased blocks in segments that live": f"revoked_blocks WHERE segment_id IN ({live})",
        "holds on subjects or prompts": (
            "holds WHERE kind IN ('subject', 'prompt') AND cleared_at IS NULL"
        ),
    }
    for what, where in known.items():
        query = f"SELECT count(*) FROM {where}"  # noqa: S608 - our own words
        found = op.get_bind().execute(sa.text(query)).scalar_one()
        if found:
            raise UnsupportedVersionError(
                f"the catalog has {found} {what}, which revision {down_revision} cannot express",
                hint="finish the erasure, clear the holds, then try again",
            )
    for table in (
        "receipts",
        "checkpoints",
        "log_entries",
        "prompt_links",
        "prompts",
        "texts",
        "scopes",
        "hold_segments",
        "revoked_blocks",
    ):
        op.drop_table(table)
    op.execute("ALTER TABLE holds DROP COLUMN tenant_id")
    op.execute("ALTER TABLE extents DROP COLUMN origins")
