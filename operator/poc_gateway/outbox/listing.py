# SPDX-License-Identifier: Apache-2.0
"""What people ask of the ledger: how much is in which state, and what. Nothing is changed here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    ScalarSelect,
    Select,
    exists,
    func,
    literal,
    null,
    select,
    union_all,
)

from poc_gateway.outbox.ledger import in_parts
from poc_gateway.outbox.states import State
from poc_gateway.store.schema import artifacts, callbacks, ended_ranges, late_items, rounds, slots


class Counts(NamedTuple):
    """Artifacts of a round: to be sent, accepted, refused for good, expired and abandoned.

    The backlog is what is waiting or disputed. ``late`` is the part of it that waits, and is sent out of order.
    """

    backlog: int
    forwarded: int
    dead: int
    expired: int
    abandoned: int
    late: int


def counts(connection: Connection, round_id: int) -> Counts:
    """Count what is sent and what is not."""
    sums = select(func.coalesce(func.sum(slots.c.stored), 0), func.coalesce(func.sum(slots.c.forwarded), 0))
    stored, forwarded = connection.execute(sums.where(slots.c.round_id == round_id)).one()
    of_round = slots.c.round_id == round_id
    late = select(late_items.c.state, func.count()).join(slots).where(of_round).group_by(late_items.c.state)
    found: dict[str, int] = dict(connection.execute(late).all())
    ranges = select(ended_ranges.c.state, func.sum(ended_ranges.c.artifacts)).join(slots).where(of_round)
    for state, count in connection.execute(ranges.group_by(ended_ranges.c.state)):
        # int, since PostgreSQL sums up to a Decimal.
        found[state] = found.get(state, 0) + int(count)
    dead, expired, abandoned = (found.get(state, 0) for state in (State.REFUSED, State.EXPIRED, State.ABANDONED))
    backlog = int(stored) - int(forwarded) - dead - expired - abandoned
    return Counts(backlog, int(forwarded), dead, expired, abandoned, found.get(State.WAITING, 0))


def dead_letters(connection: Connection, round_id: int, *, after: int, limit: int) -> Sequence[RowMapping]:
    """Return up to ``limit`` dead letters whose nonces are above ``after``, as nonce, slot, reason and since."""
    columns = select(late_items.c.nonce, slots.c.slot, late_items.c.reason, late_items.c.since).join(slots)
    is_dead = late_items.c.state == State.REFUSED
    of_round = (slots.c.round_id == round_id) & is_dead & (late_items.c.nonce > after)
    return connection.execute(columns.where(of_round).order_by(late_items.c.nonce).limit(limit)).mappings().all()


def entries(connection: Connection, round_id: int, state: State, *, after: int, limit: int) -> Sequence[RowMapping]:
    """Return up to ``limit`` ranges of a round's artifacts in ``state`` whose first nonce is above ``after``.

    Each has slot, first_nonce, last_nonce, artifacts, reason and since; the last two are null where they differ.
    """
    every = union_all(_late(round_id, state), _together(round_id, state)).subquery()
    page = select(every).where(every.c.first_nonce > after).order_by(every.c.first_nonce).limit(limit)
    return connection.execute(page).mappings().all()


def _late(round_id: int, state: State) -> Select[int, int, int, int, str | None, int | None]:
    late = late_items.c
    columns = select(
        slots.c.slot,
        late.nonce.label("first_nonce"),
        late.nonce.label("last_nonce"),
        literal(1).label("artifacts"),
        late.reason,
        late.since,
    )
    return columns.join(slots).where(slots.c.round_id == round_id, late.state == state)


def _together(round_id: int, state: State) -> Select[int, int, int, int, str | None, int | None]:
    """Return the query of what is in ``state`` by its place in a slot, or as a row of ``ended_ranges``."""
    slot, of_round = slots.c, slots.c.round_id == round_id
    if state is State.DELIVERED:
        placed = select(slot.slot, slot.slot, slot.forwarded_nonce, slot.forwarded, null(), null())
        return placed.where(of_round, slot.forwarded > 0)
    if state is State.WAITING:
        waiting = select(slot.slot, _first_waiting(), slot.last_nonce, _count_waiting(), null(), null())
        return waiting.where(of_round, slot.last_nonce > slot.forwarded_nonce)
    ended = ended_ranges.c
    ranges = select(slot.slot, ended.first_nonce, ended.last_nonce, ended.artifacts, ended.reason, ended.since)
    return ranges.join(slots).where(of_round, ended.state == state)


def _first_waiting() -> ScalarSelect[int]:
    is_late = exists().where(late_items.c.slot_id == slots.c.id, late_items.c.nonce == artifacts.c.nonce)
    behind = (artifacts.c.slot_id == slots.c.id) & (artifacts.c.nonce > slots.c.forwarded_nonce) & ~is_late
    # In their order, since PostgreSQL looks through the whole slot for the smallest of all.
    first = select(artifacts.c.nonce).where(behind).order_by(artifacts.c.nonce).limit(1)
    return first.correlate(slots).scalar_subquery()


def _count_waiting() -> ColumnElement[int]:
    late = select(func.count()).where(late_items.c.slot_id == slots.c.id).scalar_subquery()
    total = func.coalesce(func.sum(ended_ranges.c.artifacts), 0)
    ended = select(total).where(ended_ranges.c.slot_id == slots.c.id).scalar_subquery()
    return slots.c.stored - slots.c.forwarded - late - ended


def unsent(connection: Connection, slot_id: int, nonces: Sequence[int]) -> State | None:
    """Return why some of a slot's stored ``nonces`` are not sent: they are disputed, or have ended undelivered."""
    late, ended = late_items.c, ended_ranges.c
    for some in in_parts(nonces):
        apart = select(late.state).where(late.slot_id == slot_id, late.nonce.in_(some), late.state != State.WAITING)
        if (state := connection.scalar(apart.limit(1))) is not None:
            return State(state)
    overlaps = (ended.first_nonce <= max(nonces)) & (ended.last_nonce >= min(nonces))
    for first, last, state in connection.execute(
        select(ended.first_nonce, ended.last_nonce, ended.state).where(ended.slot_id == slot_id, overlaps)
    ):
        if any(first <= nonce <= last for nonce in nonces):
            return State(state)
    return None


def callback_page(
    connection: Connection, *, state: State | None, uid: str | None, after: int, limit: int
) -> Sequence[RowMapping]:
    """Return up to ``limit`` callbacks with ids above ``after``, without their bodies; of the round ``uid``."""
    query = _callbacks(callbacks.c.id > after)
    if state is not None:
        query = query.where(callbacks.c.state == state)
    if uid is not None:
        query = query.where(rounds.c.uid == uid)
    return connection.execute(query.order_by(callbacks.c.id).limit(limit)).mappings().all()


def callback(connection: Connection, id_: int) -> RowMapping | None:
    """Return a callback with its body; None if there is none."""
    query = _callbacks(callbacks.c.id == id_).add_columns(callbacks.c.body)
    return connection.execute(query).mappings().first()


def _callbacks(condition: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    columns = (
        callbacks.c.id,
        rounds.c.uid.label("round"),
        callbacks.c.job_id.label("request_id"),
        callbacks.c.url,
        callbacks.c.state,
        callbacks.c.reason,
        callbacks.c.created_at,
        callbacks.c.attempts,
        callbacks.c.next_try_at,
        callbacks.c.ended_at,
    )
    return select(*columns).outerjoin(rounds, rounds.c.id == callbacks.c.round_id).where(condition)
