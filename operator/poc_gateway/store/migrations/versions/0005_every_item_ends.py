# SPDX-License-Identifier: Apache-2.0
"""How every item ends, when it is tried next, when a slot was last heard of, and who owns the database."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# A round without results was heard of when it was written down.
_HEARD = """
UPDATE slots SET heard_at = coalesce(
    (SELECT received_at FROM artifacts WHERE slot_id = slots.id AND nonce = slots.last_nonce),
    (SELECT created_at FROM rounds WHERE id = slots.round_id))
"""


def upgrade() -> None:
    """Add the columns and tables, and call what the receiver refused by its name."""
    op.add_column("slots", sa.Column("heard_at", sa.BigInteger(), server_default="0", nullable=False))
    op.execute(_HEARD)
    op.execute("UPDATE late_items SET state = 'refused' WHERE state = 'dead'")
    op.execute("UPDATE callbacks SET state = 'refused' WHERE state = 'dead'")
    op.add_column("callbacks", sa.Column("attempts", sa.Integer(), server_default="0", nullable=False))
    op.add_column("callbacks", sa.Column("next_try_at", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("callbacks", sa.Column("ended_at", sa.BigInteger(), nullable=True))
    op.drop_index("ix_callbacks_state", "callbacks")
    op.create_index("ix_callbacks_due", "callbacks", ["state", "url", "attempts", "next_try_at"])
    op.create_index("ix_callbacks_round_id", "callbacks", ["round_id"])
    _make_tables()
    op.execute("INSERT INTO fence (id, epoch) VALUES (1, 0)")
    # Nobody knows how evenly the clock ran that made the moments of these rows.
    seen = sa.text("INSERT INTO clock SELECT 1, :now, 0 WHERE EXISTS (SELECT 1 FROM rounds)")
    op.get_bind().execute(seen, {"now": int(time.time() * 1000)})


def _make_tables() -> None:
    op.create_table(
        "ended_ranges",
        sa.Column("slot_id", _ID, nullable=False),
        sa.Column("first_nonce", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last_nonce", sa.Integer(), nullable=False),
        sa.Column("artifacts", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("slot_id", "first_nonce"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "backoffs",
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("scope"),
    )
    op.create_table(
        "clock",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.Column("steady", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "fence",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )


def downgrade() -> None:
    """Remove them. What has expired or was abandoned counts as refused, since older gateways know no other end."""
    for table in ("fence", "clock", "backoffs", "ended_ranges"):
        op.drop_table(table)
    op.drop_index("ix_callbacks_round_id", "callbacks")
    op.drop_index("ix_callbacks_due", "callbacks")
    op.create_index("ix_callbacks_state", "callbacks", ["state"])
    for column in ("ended_at", "next_try_at", "attempts"):
        op.drop_column("callbacks", column)
    for table in ("late_items", "callbacks"):
        op.execute(f"UPDATE {table} SET state = 'dead' WHERE state IN ('refused', 'expired', 'abandoned')")  # noqa: S608
    op.drop_column("slots", "heard_at")
