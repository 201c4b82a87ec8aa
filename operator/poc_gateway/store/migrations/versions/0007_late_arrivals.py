# SPDX-License-Identifier: Apache-2.0
"""What arrives below the largest nonce of its slot is numbered, so that an export can continue where one ended."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table and its counter. Nobody has a cursor yet, so earlier arrivals need no number."""
    op.add_column("slots", sa.Column("late", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "late_arrivals",
        sa.Column("slot_id", _ID, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("nonce", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("slot_id", "number"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Remove both; cursors of that time are of no use to an older gateway."""
    op.drop_table("late_arrivals")
    op.drop_column("slots", "late")
