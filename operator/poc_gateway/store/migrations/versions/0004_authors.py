# SPDX-License-Identifier: Apache-2.0
"""Who delivered each result, the first result that each slot lacks, and which verdicts were taken."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# The nonce after the longest run of stored ones that begins at the slot's first nonce.
_FILL = """
UPDATE slots SET missing_nonce = CASE
  WHEN stored = 0 THEN slot
  WHEN stored = (last_nonce - slot) / :stride + 1 THEN last_nonce + :stride
  WHEN NOT EXISTS (SELECT 1 FROM artifacts a WHERE a.slot_id = slots.id AND a.nonce = slots.slot) THEN slot
  ELSE :stride + (
    SELECT a.nonce FROM artifacts a
    WHERE a.slot_id = slots.id AND NOT EXISTS (
      SELECT 1 FROM artifacts b WHERE b.slot_id = a.slot_id AND b.nonce = a.nonce + :stride
    )
    ORDER BY a.nonce LIMIT 1
  )
END
WHERE round_id = :round
"""


def upgrade() -> None:
    """Add tables and columns; results that are there have no author."""
    op.create_table(
        "authors",
        sa.Column("id", _ID, nullable=False),
        sa.Column("slot_id", _ID, nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=False),
        sa.Column("pod", sa.Text(), nullable=False),
        sa.Column("refused", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("refusal", sa.Text(), nullable=True),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["slot_id"], ["slots.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("slot_id", "pod_uid"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "verdicts",
        sa.Column("round_id", _ID, nullable=False),
        sa.Column("author", sa.BigInteger(), nullable=False),
        sa.Column("batch", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("round_id", "author", "batch"),
        sqlite_with_rowid=False,
    )
    op.add_column("artifacts", sa.Column("author", sa.BigInteger(), nullable=True))
    op.add_column("conflicts", sa.Column("author", sa.BigInteger(), nullable=True))
    op.add_column("slots", sa.Column("missing_nonce", sa.BigInteger(), server_default="0", nullable=False))
    connection = op.get_bind()
    rounds = connection.execute(sa.text("SELECT id, node_count * n_groups FROM rounds")).all()
    for round_id, stride in rounds:
        connection.execute(sa.text(_FILL), {"round": round_id, "stride": stride})


def downgrade() -> None:
    """Remove them."""
    for table, column in (("slots", "missing_nonce"), ("conflicts", "author"), ("artifacts", "author")):
        op.drop_column(table, column)
    op.drop_table("verdicts")
    op.drop_table("authors")
