# SPDX-License-Identifier: Apache-2.0
"""The first schema: rounds, their artifacts, what is still to be forwarded, and jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "rounds",
        sa.Column("id", _ID, nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("block_hash", sa.Text(), nullable=False),
        sa.Column("block_height", sa.BigInteger(), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("k_dim", sa.Integer(), nullable=True),
        sa.Column("r_target", sa.Double(), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("seq_len", sa.Integer(), nullable=False),
        sa.Column("node_count", sa.Integer(), nullable=False),
        sa.Column("n_groups", sa.Integer(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("uid"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "callbacks",
        sa.Column("id", _ID, nullable=False),
        sa.Column("round_id", _ID, nullable=True),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_callbacks_state"), "callbacks", ["state"], unique=False)
    op.create_table(
        "slots",
        sa.Column("id", _ID, nullable=False),
        sa.Column("round_id", _ID, nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=False),
        sa.Column("group_id", sa.Integer(), nullable=False),
        sa.Column("stored", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_nonce", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("duplicates", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("conflicts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("forwarded", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("forwarded_nonce", sa.BigInteger(), server_default="-1", nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("round_id", "slot"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "artifacts",
        sa.Column("slot_id", _ID, nullable=False),
        sa.Column("nonce", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("vector", sa.LargeBinary(), nullable=True),
        sa.Column("distance", sa.Double(), nullable=True),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("slot_id", "nonce"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "conflicts",
        sa.Column("id", _ID, nullable=False),
        sa.Column("slot_id", _ID, nullable=False),
        sa.Column("nonce", sa.Integer(), nullable=False),
        sa.Column("vector", sa.LargeBinary(), nullable=True),
        sa.Column("distance", sa.Double(), nullable=True),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_conflicts_slot_id"), "conflicts", ["slot_id"], unique=False)
    op.create_table(
        "letters",
        sa.Column("slot_id", _ID, nullable=False),
        sa.Column("nonce", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("slot_id", "nonce"),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_letters_state"), "letters", ["state"], unique=False)


def downgrade() -> None:
    """Remove the tables, with everything in them."""
    for table in ("callbacks", "letters", "conflicts", "artifacts", "slots", "rounds", "jobs"):
        op.drop_table(table)
