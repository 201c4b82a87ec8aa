# SPDX-License-Identifier: Apache-2.0
"""The ledger: every change of slots, late items and callbacks, in the transaction of whoever makes it.

`poc_gateway.outbox` has the states. Nothing here takes longer because more artifacts are stored.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from sqlalchemy import (
    Connection,
    RowMapping,
    ScalarSelect,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    union,
    update,
)

from poc_gateway.store.rounds import RoundTerms, terms_of
from poc_gateway.store.schema import ROUND_IS_KEPT, artifacts, callbacks, late_items, rounds, slots

#: Values that one query names; SQLite takes 32 766 of them.
MOST_VALUES = 1_000

_IS_BEHIND = slots.c.last_nonce > slots.c.forwarded_nonce
_IS_LATE = late_items.c.state == "waiting"
_IS_DEAD = late_items.c.state == "dead"
_IS_WAITING = callbacks.c.state == "waiting"


def now() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000


# What arrives.


@dataclass
class SlotArrivals:
    """A slot before a transaction, and what the transaction adds.

    ``before`` is the largest nonce that was stored, ``last`` the largest now, ``missing`` the first one that is not
    stored; ``late`` are new nonces up to ``before`` that are to be forwarded: the slot may have passed them.
    ``conflicts_before`` counts the conflicts there were.
    """

    before: int
    last: int
    missing: int
    conflicts_before: int = 0
    stored: int = 0
    duplicates: int = 0
    conflicts: int = 0
    late: list[int] = field(default_factory=list)


def slots_of(connection: Connection, ids: Collection[int]) -> dict[int, SlotArrivals]:
    """Return those of the slots whose round is not deleted and not being deleted."""
    columns = select(slots.c.id, slots.c.last_nonce, slots.c.missing_nonce, slots.c.conflicts)
    kept = columns.join(rounds).where(ROUND_IS_KEPT)
    found = dict[int, SlotArrivals]()
    for some in in_parts(sorted(ids)):
        rows = connection.execute(kept.where(slots.c.id.in_(some)))
        found.update(
            {id_: SlotArrivals(last, last, missing, conflicts) for id_, last, missing, conflicts in rows},
        )
    return found


_ARRIVED = (
    update(slots)
    .where(slots.c.id == bindparam("of"))
    .values(
        stored=slots.c.stored + bindparam("more_stored"),
        last_nonce=bindparam("last"),
        missing_nonce=bindparam("missing"),
        duplicates=slots.c.duplicates + bindparam("more_duplicates"),
        conflicts=slots.c.conflicts + bindparam("more_conflicts"),
    )
)


def arrived(connection: Connection, arrivals: Mapping[int, SlotArrivals], moment: int) -> None:
    """Write down what has arrived for the slots with these ids, at this moment."""
    late = [
        {"slot_id": id_, "nonce": nonce, "state": "waiting", "reason": "late", "since": moment}
        for id_, slot in arrivals.items()
        for nonce in slot.late
    ]
    if late:
        connection.execute(insert(late_items), late)
    rows = [
        {
            "of": id_,
            "last": slot.last,
            "missing": slot.missing,
            "more_stored": slot.stored,
            "more_duplicates": slot.duplicates,
            "more_conflicts": slot.conflicts,
        }
        for id_, slot in arrivals.items()
    ]
    if rows:
        connection.execute(_ARRIVED, rows)


def in_parts(values: Sequence[int]) -> list[Sequence[int]]:
    """Return the values in parts that one query may name."""
    return [values[start : start + MOST_VALUES] for start in range(0, len(values), MOST_VALUES)]


# What is to be sent.


class Item(NamedTuple):
    """One artifact: a vector or a distance, as the round's protocol has it."""

    nonce: int
    vector: bytes | None
    distance: float | None


@dataclass(frozen=True)
class Part:
    """Artifacts of one slot in the order of their nonces; ``late`` if they are sent outside of the slot's order."""

    slot_id: int
    node_id: int
    late: bool
    items: Sequence[Item]

    def halves(self) -> tuple[Self, Self]:
        """Return the first and the second half."""
        middle = len(self.items) // 2
        return replace(self, items=self.items[:middle]), replace(self, items=self.items[middle:])


class SlotWork(NamedTuple):
    """What a slot has to send: artifacts in order, late items, or both. ``slot`` is its first nonce."""

    slot_id: int
    slot: int
    node_id: int
    is_behind: bool
    has_late: bool


def rounds_with_work(connection: Connection) -> Sequence[int]:
    """Return the ids of rounds that have a receiver and something to send to it."""
    behind = select(slots.c.round_id).where(_IS_BEHIND)
    late = select(slots.c.round_id).join(late_items).where(_IS_LATE)
    query = select(rounds.c.id).where(rounds.c.receiver.is_not(None), rounds.c.id.in_(union(behind, late)))
    return connection.scalars(query.order_by(rounds.c.id)).all()


def terms(connection: Connection, round_id: int) -> RoundTerms | None:
    """Return the terms of a round; None if it was deleted."""
    row = connection.execute(select(rounds).where(rounds.c.id == round_id)).mappings().first()
    return terms_of(row) if row is not None else None


def slots_with_work(connection: Connection, round_id: int) -> Sequence[SlotWork]:
    """Return the slots that have something to send, in the order of their offsets."""
    late = exists().where(late_items.c.slot_id == slots.c.id, _IS_LATE)
    query = select(slots.c.id, slots.c.slot, slots.c.node_id, _IS_BEHIND, late).where(slots.c.round_id == round_id)
    found = connection.execute(query.where(_IS_BEHIND | late).order_by(slots.c.slot))
    return [SlotWork(id_, slot, node_id, bool(behind), bool(has)) for id_, slot, node_id, behind, has in found]


def next_in_order(connection: Connection, slot: SlotWork, limit: int) -> Part:
    """Return the slot's first artifacts after its ``forwarded_nonce``, without those that are late items."""
    is_late = exists().where(late_items.c.slot_id == artifacts.c.slot_id, late_items.c.nonce == artifacts.c.nonce)
    query = _items(slot).where(artifacts.c.nonce > _done(slot), ~is_late).limit(limit)
    return Part(slot.slot_id, slot.node_id, late=False, items=_read(connection, query))


def next_late(connection: Connection, slot: SlotWork, limit: int) -> Part:
    """Return the slot's first waiting late items up to its ``forwarded_nonce``.

    One above it waits until the slot has passed it: with its row gone before, it would be sent in order again.
    """
    of_artifact = (late_items.c.slot_id == artifacts.c.slot_id) & (late_items.c.nonce == artifacts.c.nonce)
    query = _items(slot).join(late_items, of_artifact).where(_IS_LATE, artifacts.c.nonce <= _done(slot)).limit(limit)
    return Part(slot.slot_id, slot.node_id, late=True, items=_read(connection, query))


def _done(slot: SlotWork) -> ScalarSelect[int]:
    return select(slots.c.forwarded_nonce).where(slots.c.id == slot.slot_id).scalar_subquery()


def _items(slot: SlotWork) -> Select[int, bytes | None, float | None]:
    columns = select(artifacts.c.nonce, artifacts.c.vector, artifacts.c.distance)
    return columns.where(artifacts.c.slot_id == slot.slot_id).order_by(artifacts.c.nonce)


def _read(connection: Connection, query: Select[int, bytes | None, float | None]) -> list[Item]:
    return [Item(*row) for row in connection.execute(query)]


# What became of it.


def accepted(connection: Connection, part: Part) -> None:
    """Write down that the receiver has accepted the part."""
    of_slot = update(slots).where(slots.c.id == part.slot_id)
    of_slot = of_slot.values(forwarded=slots.c.forwarded + len(part.items))
    if part.late:
        # One statement per nonce: SQLite limits the parameters of one.
        sent = delete(late_items).where(late_items.c.slot_id == part.slot_id, late_items.c.nonce == bindparam("sent"))
        connection.execute(sent, [{"sent": item.nonce} for item in part.items])
    else:
        of_slot = of_slot.values(forwarded_nonce=part.items[-1].nonce)
    connection.execute(of_slot)


def refused(connection: Connection, part: Part, reason: str) -> None:
    """Write down that the receiver refuses the part's one artifact for good: a dead letter."""
    (item,) = part.items
    values = {"state": "dead", "reason": reason, "since": now()}
    key = {"slot_id": part.slot_id, "nonce": item.nonce}
    if part.late:
        is_refused = (late_items.c.slot_id == part.slot_id) & (late_items.c.nonce == item.nonce)
        connection.execute(update(late_items).where(is_refused).values(values))
    else:
        connection.execute(insert(late_items).values(key | values))
        connection.execute(update(slots).where(slots.c.id == part.slot_id).values(forwarded_nonce=item.nonce))


# Callbacks: verdicts, and results of jobs.


def add_verdict(connection: Connection, round_id: int, receiver: str | None, body: str) -> bool:
    """Add a verdict (JSON), to be sent if there is a receiver; False if the round is deleted or being deleted."""
    kept = select(rounds.c.id).where(rounds.c.id == round_id, ROUND_IS_KEPT)
    if connection.scalar(kept) is None:
        return False
    values: dict[str, Any] = {
        "round_id": round_id,
        "url": None if receiver is None else f"{receiver.rstrip('/')}/validated",
        "body": body,
        "state": "kept" if receiver is None else "waiting",
        "created_at": now(),
    }
    connection.execute(insert(callbacks).values(values))
    return True


def add_job_callbacks(connection: Connection, job_id: str, contents: Sequence[tuple[str, str]]) -> None:
    """Add the callbacks of a job, each a URL and a body (JSON)."""
    common = {"job_id": job_id, "state": "waiting", "created_at": now()}
    if contents:
        connection.execute(insert(callbacks), [common | {"url": url, "body": body} for url, body in contents])


def addresses_with_callbacks(connection: Connection) -> Sequence[str]:
    """Return the addresses that callbacks wait for."""
    query = select(callbacks.c.url).where(_IS_WAITING, callbacks.c.url.is_not(None)).distinct()
    return [url for url in connection.scalars(query) if url is not None]


def waiting_callbacks(connection: Connection, url: str) -> Sequence[int]:
    """Return the ids of the callbacks that wait for an address, in the order they were written."""
    query = select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url)
    return connection.scalars(query.order_by(callbacks.c.id)).all()


def callback_body(connection: Connection, id_: int) -> str | None:
    """Return the body of a callback; None if it was deleted with its round or job."""
    return connection.scalar(select(callbacks.c.body).where(callbacks.c.id == id_))


def callback_settled(connection: Connection, id_: int, *, refusal: str | None) -> None:
    """Write down that the receiver has accepted a callback, or refuses it for good."""
    values = {"state": "delivered" if refusal is None else "dead", "reason": refusal}
    connection.execute(update(callbacks).where(callbacks.c.id == id_).values(values))


# What people ask.


class Counts(NamedTuple):
    """Artifacts of a round: to be sent, accepted, refused for good, and to be sent out of order."""

    backlog: int
    forwarded: int
    dead: int
    waiting: int


def counts(connection: Connection, round_id: int) -> Counts:
    """Count what is sent and what is not."""
    sums = select(func.coalesce(func.sum(slots.c.stored), 0), func.coalesce(func.sum(slots.c.forwarded), 0))
    stored, forwarded = connection.execute(sums.where(slots.c.round_id == round_id)).one()
    by_state = select(late_items.c.state, func.count()).join(slots).where(slots.c.round_id == round_id)
    found: dict[str, int] = dict(connection.execute(by_state.group_by(late_items.c.state)).all())
    dead = found.get("dead", 0)
    # int, since PostgreSQL sums up to a Decimal.
    backlog = int(stored) - int(forwarded) - dead
    return Counts(backlog, int(forwarded), dead, found.get("waiting", 0))


def dead_letters(connection: Connection, round_id: int, *, after: int, limit: int) -> Sequence[RowMapping]:
    """Return up to ``limit`` dead letters whose nonces are above ``after``, as nonce, slot, reason and since."""
    columns = select(late_items.c.nonce, slots.c.slot, late_items.c.reason, late_items.c.since).join(slots)
    of_round = (slots.c.round_id == round_id) & _IS_DEAD & (late_items.c.nonce > after)
    return connection.execute(columns.where(of_round).order_by(late_items.c.nonce).limit(limit)).mappings().all()


def replay(connection: Connection, round_id: int, nonces: Sequence[int] | None) -> int:
    """Let dead letters wait to be sent again, all of the round or those of ``nonces``; return how many."""
    of_round = select(slots.c.id).where(slots.c.round_id == round_id)
    dead = update(late_items).where(_IS_DEAD, late_items.c.slot_id.in_(of_round))
    if nonces is not None:
        dead = dead.where(late_items.c.nonce.in_(nonces))
    return connection.execute(dead.values(state="waiting", since=now())).rowcount
