# SPDX-License-Identifier: Apache-2.0
"""Several processes may use one PostgreSQL: what they ask of the one that owns it, and how the owner before ended."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table and the columns. A gateway of before, which knows no other beside it, owns the database no more."""
    op.create_table(
        "commands",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("round_id", _ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("done", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], ondelete="CASCADE"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_commands_ended_at", "commands", ["ended_at"])
    op.create_index("ix_commands_round_id", "commands", ["round_id"])
    op.add_column("fence", sa.Column("given_up", sa.Integer(), server_default="1", nullable=False))
    op.execute("UPDATE fence SET epoch = epoch + 1")
    op.add_column("jobs", sa.Column("nonces", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    """Remove them. What was asked for and is not done yet is forgotten."""
    op.drop_column("jobs", "nonces")
    op.drop_column("fence", "given_up")
    op.drop_table("commands")
