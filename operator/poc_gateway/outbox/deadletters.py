# SPDX-License-Identifier: Apache-2.0
"""What people ask of a round's forwarding: counts, dead letters, and to send them again."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel
from sqlalchemy import Connection, func, select, update

from poc_gateway.store.schema import letters, slots


class Counts(NamedTuple):
    """Artifacts of a round: to be sent, accepted, refused for good, and to be sent out of order."""

    backlog: int
    forwarded: int
    dead: int
    waiting: int


class DeadLetter(BaseModel):
    """``slot`` is the slot's first nonce, ``since`` milliseconds since 1970."""

    nonce: int
    slot: int
    reason: str
    since: int


def counts(connection: Connection, round_id: int) -> Counts:
    """Count what is sent and what is not."""
    sums = select(func.coalesce(func.sum(slots.c.stored), 0), func.coalesce(func.sum(slots.c.forwarded), 0))
    stored, forwarded = connection.execute(sums.where(slots.c.round_id == round_id)).one()
    by_state = select(letters.c.state, func.count()).join(slots).where(slots.c.round_id == round_id)
    found: dict[str, int] = dict(connection.execute(by_state.group_by(letters.c.state)).all())
    dead = found.get("dead", 0)
    # int, since PostgreSQL sums up to a Decimal.
    backlog = int(stored) - int(forwarded) - dead
    return Counts(backlog, int(forwarded), dead, found.get("waiting", 0))


def page(connection: Connection, round_id: int, *, after: int, limit: int) -> list[DeadLetter]:
    """Return up to ``limit`` dead letters whose nonces are above ``after``."""
    columns = select(letters.c.nonce, slots.c.slot, letters.c.reason, letters.c.since).join(slots)
    of_round = (slots.c.round_id == round_id) & (letters.c.state == "dead") & (letters.c.nonce > after)
    rows = connection.execute(columns.where(of_round).order_by(letters.c.nonce).limit(limit)).mappings()
    return [DeadLetter(**row) for row in rows]


def replay(connection: Connection, round_id: int, nonces: Sequence[int] | None) -> int:
    """Let dead letters wait to be sent again, all of the round or those of ``nonces``; return how many."""
    of_round = select(slots.c.id).where(slots.c.round_id == round_id)
    dead = update(letters).where(letters.c.state == "dead", letters.c.slot_id.in_(of_round))
    if nonces is not None:
        dead = dead.where(letters.c.nonce.in_(nonces))
    return connection.execute(dead.values(state="waiting", since=time.time_ns() // 1_000_000)).rowcount
