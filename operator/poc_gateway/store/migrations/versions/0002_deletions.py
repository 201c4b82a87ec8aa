# SPDX-License-Identifier: Apache-2.0
"""When a round's deletion began."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column."""
    op.add_column("rounds", sa.Column("deleted_at", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("rounds", "deleted_at")
