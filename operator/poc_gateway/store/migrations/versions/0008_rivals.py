# SPDX-License-Identifier: Apache-2.0
"""Which of several results for a nonce is the honest one, and who has computed it again."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the columns; nothing that is there is decided."""
    op.add_column("conflicts", sa.Column("truth", sa.Text(), nullable=True))
    op.add_column("conflicts", sa.Column("decided_by", sa.Text(), nullable=True))
    op.add_column("conflicts", sa.Column("decided_at", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Remove them. What waits for a decision goes out, as an older gateway would have it."""
    op.execute("UPDATE late_items SET state = 'waiting' WHERE state = 'disputed'")
    for column in ("decided_at", "decided_by", "truth"):
        op.drop_column("conflicts", column)
