# SPDX-License-Identifier: Apache-2.0
"""The table of what is sent out of order gets the name of what it holds."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Rename the table and its index."""
    op.drop_index("ix_letters_state", "letters")
    op.rename_table("letters", "late_items")
    op.create_index("ix_late_items_state", "late_items", ["state"])


def downgrade() -> None:
    """Give both their old names back."""
    op.drop_index("ix_late_items_state", "late_items")
    op.rename_table("late_items", "letters")
    op.create_index("ix_letters_state", "letters", ["state"])
