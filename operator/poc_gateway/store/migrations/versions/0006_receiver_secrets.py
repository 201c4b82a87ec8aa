# SPDX-License-Identifier: Apache-2.0
"""The name of the Secret that has the user and the password for a round's receiver."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column; rounds that are there have none."""
    op.add_column("rounds", sa.Column("receiver_secret", sa.Text(), nullable=True))


def downgrade() -> None:
    """Remove it. Receivers that ask for a user refuse what an older gateway sends, and it waits."""
    op.drop_column("rounds", "receiver_secret")
