# SPDX-License-Identifier: Apache-2.0
"""Finding a round by the name that people know it by."""

from sqlalchemy import Connection, select

from poc_gateway.rounds.registry import KnownRound, load
from poc_gateway.store import schema


def newest(connection: Connection, namespace: str, name: str) -> KnownRound | None:
    """Return the round of this name; the one written down last, where a name was used again."""
    rounds = schema.rounds.c
    query = (
        select(rounds.uid)
        .where(rounds.namespace == namespace, rounds.name == name)
        .order_by(rounds.created_at.desc(), rounds.id.desc())
        .limit(1)
    )
    uid = connection.execute(query).scalar()
    return load(connection, uid) if uid is not None else None
