# SPDX-License-Identifier: Apache-2.0
"""One look at what there is: objects of the API server, and rounds of the database with their slots.

A look costs as much with a thousand viewers as with one. It is bounded: the newest rounds, and so many slots.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from poc_gateway.outbox.listing import Counts, counts
from poc_gateway.outbox.rivals import count_undecided
from poc_gateway.outbox.states import State
from poc_gateway.store.reserve import size_bytes
from poc_gateway.store.rounds import RoundTerms, terms_of
from poc_gateway.store.schema import ROUND_IS_KEPT, callbacks, rounds, slots
from poc_operator.apis.v1alpha1.meta import Resource

#: Lists the objects of a kind as the API server has them. Raises StoreError.
ListObjects = Callable[[type[Resource]], Awaitable[Sequence[Mapping[str, Any]]]]

#: Rounds of the database that are looked at, the newest first.
MOST_ROUNDS = 20
#: How a callback that was not delivered has ended.
_LOST = (State.REFUSED, State.EXPIRED, State.ABANDONED)


@dataclass(frozen=True, kw_only=True)
class StoredRound:
    """What the database has of a round. ``undecided`` are results with a rival that nobody has decided about.

    ``slots`` are rows of the table of that name, in the order of their slots.
    """

    id: int
    terms: RoundTerms
    created_at: int
    limit_reached: str | None
    archive_error: str | None
    sent: Counts
    undecided: int
    slots: Sequence[RowMapping]

    def sum(self, column: str) -> int:
        """Return the sum of a column over the slots."""
        return sum(row[column] for row in self.slots)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the database has. ``lost_callbacks`` counts verdicts and results of requests that ended undelivered."""

    rounds: Sequence[StoredRound] = ()
    lost_callbacks: Mapping[str, int]
    bytes: int


def stored(connection: Connection) -> Stored:
    """Look at the newest rounds."""
    newest = select(rounds).where(ROUND_IS_KEPT).order_by(rounds.c.id.desc()).limit(MOST_ROUNDS)
    rows = connection.execute(newest).mappings().all()
    ids = [row["id"] for row in rows]
    of_round = defaultdict[int, list[RowMapping]](list)
    ordered = select(slots).where(slots.c.round_id.in_(ids)).order_by(slots.c.round_id, slots.c.slot)
    for slot in connection.execute(ordered).mappings():
        of_round[slot["round_id"]].append(slot)
    lost = select(callbacks.c.state, func.count()).where(callbacks.c.state.in_(_LOST)).group_by(callbacks.c.state)
    return Stored(
        rounds=[_round(connection, row, of_round[row["id"]]) for row in rows],
        lost_callbacks=dict(connection.execute(lost).all()),
        bytes=size_bytes(connection),
    )


def _round(connection: Connection, row: RowMapping, found: Sequence[RowMapping]) -> StoredRound:
    has_rivals = any(slot["conflicts"] for slot in found)
    sent = counts(connection, row["id"])
    return StoredRound(
        id=row["id"],
        terms=terms_of(row),
        created_at=row["created_at"],
        limit_reached=row["limit_reached"],
        archive_error=row["archive_error"],
        sent=sent if row["receiver"] is not None else sent._replace(backlog=0),  # nothing is to be forwarded
        undecided=count_undecided(connection, row["id"]) if has_rivals else 0,
        slots=found,
    )


def sums(connection: Connection) -> Mapping[str, int]:
    """Return how many results are stored of each of the newest rounds, by uid: all that a rate needs."""
    newest = select(rounds.c.id).where(ROUND_IS_KEPT).order_by(rounds.c.id.desc()).limit(MOST_ROUNDS).subquery()
    total = select(rounds.c.uid, func.sum(slots.c.stored)).join(slots, slots.c.round_id == rounds.c.id)
    found = connection.execute(total.where(rounds.c.id.in_(select(newest.c.id))).group_by(rounds.c.uid))
    # int, since PostgreSQL sums up to a Decimal.
    return {uid: int(count or 0) for uid, count in found}
