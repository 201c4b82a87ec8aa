# SPDX-License-Identifier: Apache-2.0
"""Why what was asked of the outbox was given up, and the conflicts of a nonce without those of its whole slot."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add the columns and the index; nothing has failed yet."""
    op.add_column("commands", sa.Column("failures", sa.Integer(), server_default="0", nullable=False))
    op.add_column("commands", sa.Column("error", sa.Text(), nullable=True))
    op.create_index("ix_conflicts_nonce", "conflicts", ["slot_id", "nonce"])


def downgrade() -> None:
    """Remove them. What was given up has ended all the same."""
    op.drop_index("ix_conflicts_nonce", "conflicts")
    for name in ("error", "failures"):
        op.drop_column("commands", name)
