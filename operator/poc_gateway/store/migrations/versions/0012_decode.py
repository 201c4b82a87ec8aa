# SPDX-License-Identifier: Apache-2.0
"""The number of decode steps of a round of the decode scheme."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column; rounds that are there are of other protocols."""
    op.add_column("rounds", sa.Column("max_tokens", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Remove it, and first the rounds of the decode scheme, which an older gateway cannot read."""
    op.execute("DELETE FROM rounds WHERE protocol = 'decode'")
    op.drop_column("rounds", "max_tokens")
