# SPDX-License-Identifier: Apache-2.0
"""Finding a round by the name that people use."""

from sqlalchemy import Connection, select

from poc_gateway.rounds.registry import KnownRound, load
from poc_gateway.store.schema import ROUND_IS_KEPT, rounds


def newest(connection: Connection, namespace: str, name: str) -> KnownRound | None:
    """Return the newest round of that name; None if none is written down that is not being deleted."""
    of_name = (rounds.c.namespace == namespace) & (rounds.c.name == name) & ROUND_IS_KEPT
    uid = connection.scalar(select(rounds.c.uid).where(of_name).order_by(rounds.c.id.desc()).limit(1))
    return load(connection, uid) if uid is not None else None
