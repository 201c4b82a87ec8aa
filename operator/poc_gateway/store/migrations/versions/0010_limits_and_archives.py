# SPDX-License-Identifier: Apache-2.0
"""Which limit a round has reached, what of it is archived, and which results were replaced by a decision."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_NUMBERS = ("archived_version", "archived_at", "archiving_since")
_TEXTS = ("archive_error", "limit_reached")


def upgrade() -> None:
    """Add the columns; no round is archived yet. Who has read what was replaced before is not told."""
    for name in _NUMBERS:
        op.add_column("rounds", sa.Column(name, sa.BigInteger(), nullable=True))
    for name in _TEXTS:
        op.add_column("rounds", sa.Column(name, sa.Text(), nullable=True))
    op.create_index("ix_callbacks_job_id", "callbacks", ["job_id"])
    op.add_column("late_arrivals", sa.Column("replaced", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """Remove them. What was replaced has its number still, and an older gateway may export it twice."""
    op.drop_column("late_arrivals", "replaced")
    op.drop_index("ix_callbacks_job_id", "callbacks")
    for name in (*_TEXTS, *_NUMBERS):
        op.drop_column("rounds", name)
