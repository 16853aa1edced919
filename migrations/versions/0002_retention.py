"""Retention: policies, deadlines, holds, jobs, purges.

Segments of an older catalog get no deadline here; opening the vault gives them that of the policy
in force, counted from when they were made.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SEGMENT_COLUMNS: tuple[tuple[str, sa.types.TypeEngine[Any], str | None], ...] = (
    ("policy_no", sa.Integer(), None),
    ("rule", sa.Text(), ""),
    ("retention_class", sa.Text(), ""),
    ("sealed_labels", sa.LargeBinary(), None),
    ("delete_by", sa.Float(), None),
    ("idle_s", sa.Float(), None),
    ("idle_until", sa.Float(), None),
    ("keep_until", sa.Float(), None),
    ("granted", sa.Integer(), "0"),
    ("last_used", sa.Float(), None),
    ("hits", sa.Integer(), "0"),
)


def upgrade() -> None:
    op.create_table(
        "policies",
        sa.Column("policy_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("sealed_source", sa.LargeBinary(), nullable=False),
        sa.Column("applied_at", sa.Float(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("policy_no", name="pk_policies"),
        sqlite_autoincrement=True,
    )
    # Columns are added (and dropped) in place. Batch mode would copy the table and drop the old
    # one, and dropping `segments` deletes every extent, by its foreign key.
    op.add_column("tenants", sa.Column("key_no", sa.Integer(), nullable=False, server_default="1"))
    for name, kind, default in _SEGMENT_COLUMNS:
        op.add_column(
            "segments",
            sa.Column(name, kind, nullable=default is None, server_default=default),
        )
    op.execute("UPDATE segments SET granted = blocks")
    op.create_table(
        "holds",
        sa.Column("hold_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("target", sa.LargeBinary(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("placed_at", sa.Float(), nullable=False),
        sa.Column("cleared_at", sa.Float(), nullable=True),
        sa.Column("cleared_by", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "kind IN ('tenant','segment','subject','prompt')", name=op.f("ck_holds_hold_kind")
        ),
        sa.PrimaryKeyConstraint("hold_no", name="pk_holds"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.LargeBinary(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "job_runs",
        sa.Column("run_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("holder", sa.LargeBinary(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False, server_default=""),
        sa.CheckConstraint(
            "outcome IN ('ok','failed','abandoned','refused')",
            name=op.f("ck_job_runs_run_outcome"),
        ),
        sa.PrimaryKeyConstraint("run_no", name="pk_job_runs"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_runs_job", "job_runs", ["job"])
    op.create_table(
        "purges",
        sa.Column("purge_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("old_epoch", sa.Text(), nullable=False),
        sa.Column("new_epoch", sa.Text(), nullable=False),
        sa.Column("assurance", sa.Text(), nullable=False),
        sa.Column("destroyed_at", sa.Float(), nullable=True),
        sa.Column("verified_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("purge_no", name="pk_purges"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "deletions",
        sa.Column("deletion_no", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("segments", sa.Integer(), nullable=False),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("data_bytes", sa.Integer(), nullable=False),
        sa.Column("revoked_at", sa.Float(), nullable=False),
        sa.Column("purge_no", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["purge_no"], ["purges.purge_no"], name="fk_deletions_purge_no_purges"
        ),
        sa.PrimaryKeyConstraint("deletion_no", name="pk_deletions"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    for table in ("deletions", "purges", "job_runs", "leases", "holds"):
        op.drop_table(table)
    for name, _kind, _default in _SEGMENT_COLUMNS:
        op.execute(f"ALTER TABLE segments DROP COLUMN {name}")
    op.execute("ALTER TABLE tenants DROP COLUMN key_no")
    op.drop_table("policies")
