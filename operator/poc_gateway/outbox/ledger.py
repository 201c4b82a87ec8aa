# SPDX-License-Identifier: Apache-2.0
"""The ledger of artifacts: what arrives, what is to be sent, what became of it, in the transaction of whoever tells.

`poc_gateway.outbox.states` has the states, `poc_gateway.outbox.endings` what ends before it was delivered, and
`poc_gateway.outbox.callback_ledger` the other items. Nothing here takes longer because more artifacts are stored.

Several processes may write to one PostgreSQL. Whoever changes what a slot has, or what became of it, locks the slot's
row first, and the rows of several slots in the order of their ids. So what one transaction stores for a slot is seen as
a whole, and before everything that a later one stores: whoever reads up to a nonce or a number misses nothing below it.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    bindparam,
    delete,
    exists,
    insert,
    select,
    text,
    union,
    update,
)

from poc_gateway.outbox.states import Event, State, sources, target
from poc_gateway.store.rounds import RoundTerms, terms_of
from poc_gateway.store.schema import ROUND_IS_KEPT, artifacts, late_arrivals, late_items, rounds, slots

Value = TypeVar("Value")

#: Values that one query names; SQLite takes 32 766 of them.
MOST_VALUES = 1_000

IS_BEHIND = slots.c.last_nonce > slots.c.forwarded_nonce
IS_LATE = late_items.c.state == State.WAITING


def now() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000


# What arrives.


@dataclass
class SlotArrivals:
    """A slot before a transaction, and what the transaction adds.

    ``before`` is the largest nonce that was stored, ``last`` the largest now, ``missing`` the first one that is not
    stored; ``late`` are new nonces up to ``before``: who forwards or exports the slot may have passed them.
    ``conflicts_before`` and ``late_before`` count the conflicts and the late arrivals that there were. ``forwards`` if
    the round has a receiver.
    """

    before: int
    last: int
    missing: int
    conflicts_before: int = 0
    late_before: int = 0
    forwards: bool = False
    stored: int = 0
    duplicates: int = 0
    conflicts: int = 0
    late: list[int] = field(default_factory=list)


#: Nobody else stores anything for the slots meanwhile, nor begins to delete their rounds. Keys do not change, so that
#: rows may be made that refer to these.
_LOCK_ARRIVALS = "FOR NO KEY UPDATE OF slots FOR SHARE OF rounds"


def slots_of(connection: Connection, ids: Collection[int]) -> dict[int, SlotArrivals]:
    """Return those of the slots whose round is not deleted and not being deleted; they are locked."""
    columns = select(slots.c.id, slots.c.last_nonce, slots.c.missing_nonce, slots.c.conflicts, slots.c.late)
    kept = columns.join(rounds).where(ROUND_IS_KEPT)
    if connection.dialect.name == "postgresql":
        kept = kept.order_by(slots.c.id).suffix_with(text(_LOCK_ARRIVALS))
    found = dict[int, SlotArrivals]()
    for some in in_parts(sorted(ids)):
        rows = connection.execute(kept.where(slots.c.id.in_(some)))
        found.update(
            {id_: SlotArrivals(last, last, missing, *before) for id_, last, missing, *before in rows},
        )
    return found


def keep_round(connection: Connection, round_id: int) -> bool:
    """Let nobody begin to delete the round until the transaction ends; False if somebody has begun."""
    kept = select(rounds.c.id).where(rounds.c.id == round_id, ROUND_IS_KEPT).with_for_update(read=True)
    return connection.scalar(kept) is not None


def lock_slots(connection: Connection, of: ColumnElement[bool]) -> None:
    """Let nobody else change the slots that ``of`` is true for, until the transaction ends."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer
        locked = select(slots.c.id).where(of).order_by(slots.c.id).with_for_update(key_share=True)
        connection.execute(locked).all()


_ARRIVED = (
    update(slots)
    .where(slots.c.id == bindparam("of"))
    .values(
        stored=slots.c.stored + bindparam("more_stored"),
        last_nonce=bindparam("last"),
        missing_nonce=bindparam("missing"),
        heard_at=bindparam("moment"),
        late=slots.c.late + bindparam("more_late"),
        duplicates=slots.c.duplicates + bindparam("more_duplicates"),
        conflicts=slots.c.conflicts + bindparam("more_conflicts"),
    )
)


def arrived(connection: Connection, arrivals: Mapping[int, SlotArrivals], moment: int) -> None:
    """Write down what has arrived for the slots with these ids, at this moment."""
    late = [
        {"slot_id": id_, "nonce": nonce, "state": State.WAITING, "reason": "late", "since": moment}
        for id_, slot in arrivals.items()
        if slot.forwards
        for nonce in slot.late
    ]
    if late:
        connection.execute(insert(late_items), late)
    numbered = [
        {"slot_id": id_, "number": number, "nonce": nonce}
        for id_, slot in arrivals.items()
        for number, nonce in enumerate(slot.late, slot.late_before + 1)
    ]
    if numbered:
        connection.execute(insert(late_arrivals), numbered)
    rows = [
        {
            "of": id_,
            "last": slot.last,
            "missing": slot.missing,
            "moment": moment,
            "more_late": len(slot.late),
            "more_stored": slot.stored,
            "more_duplicates": slot.duplicates,
            "more_conflicts": slot.conflicts,
        }
        for id_, slot in arrivals.items()
    ]
    if rows:
        connection.execute(_ARRIVED, rows)


def number_again(connection: Connection, slot_id: int, nonce: int) -> None:
    """Give the nonce a number of its own, since its result is another now: who has read the slot reads it again."""
    counted = update(slots).where(slots.c.id == slot_id).values(late=slots.c.late + 1).returning(slots.c.late)
    number = connection.execute(counted).scalar_one()
    connection.execute(insert(late_arrivals).values(slot_id=slot_id, number=number, nonce=nonce, replaced=True))


def in_parts(values: Sequence[Value]) -> list[Sequence[Value]]:
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


class SlotWork(NamedTuple):
    """What a slot has to send: artifacts in order, late items, or both. ``slot`` is its first nonce."""

    slot_id: int
    slot: int
    node_id: int
    is_behind: bool
    has_late: bool


def has_work() -> ColumnElement[bool]:
    """Return the condition that a round has a receiver and something to send to it."""
    behind = select(slots.c.round_id).where(IS_BEHIND)
    late = select(slots.c.round_id).join(late_items).where(IS_LATE)
    return rounds.c.receiver.is_not(None) & rounds.c.id.in_(union(behind, late))


def rounds_with_work(connection: Connection) -> Sequence[int]:
    """Return the ids of rounds that have something to send."""
    return connection.scalars(select(rounds.c.id).where(has_work()).order_by(rounds.c.id)).all()


def terms(connection: Connection, round_id: int) -> RoundTerms | None:
    """Return the terms of a round; None if it was deleted."""
    row = connection.execute(select(rounds).where(rounds.c.id == round_id)).mappings().first()
    return terms_of(row) if row is not None else None


def slots_with_work(connection: Connection, round_id: int) -> Sequence[SlotWork]:
    """Return the slots that have something to send, in the order of their offsets."""
    late = exists().where(late_items.c.slot_id == slots.c.id, IS_LATE)
    query = select(slots.c.id, slots.c.slot, slots.c.node_id, IS_BEHIND, late).where(slots.c.round_id == round_id)
    found = connection.execute(query.where(IS_BEHIND | late).order_by(slots.c.slot))
    return [SlotWork(id_, slot, node_id, bool(behind), bool(has)) for id_, slot, node_id, behind, has in found]


def next_in_order(connection: Connection, slot: SlotWork, limit: int) -> Part:
    """Return the slot's first artifacts after its ``forwarded_nonce``, without those that are late items."""
    query = _items(slot).where(in_order(slot)).limit(limit)
    return Part(slot.slot_id, slot.node_id, late=False, items=_read(connection, query))


def in_order(slot: SlotWork) -> ColumnElement[bool]:
    """Return the condition that an artifact of the slot is to be sent in the order of its nonces."""
    is_late = exists().where(late_items.c.slot_id == artifacts.c.slot_id, late_items.c.nonce == artifacts.c.nonce)
    return (artifacts.c.nonce > _done(slot)) & ~is_late


def next_late(connection: Connection, slot: SlotWork, limit: int) -> Part:
    """Return the slot's first waiting late items up to its ``forwarded_nonce``.

    One above it waits until the slot has passed it: with its row gone before, it would be sent in order again.
    """
    of_artifact = (late_items.c.slot_id == artifacts.c.slot_id) & (late_items.c.nonce == artifacts.c.nonce)
    query = _items(slot).join(late_items, of_artifact).where(IS_LATE, artifacts.c.nonce <= _done(slot)).limit(limit)
    return Part(slot.slot_id, slot.node_id, late=True, items=_read(connection, query))


def _done(slot: SlotWork) -> ScalarSelect[int]:
    return select(slots.c.forwarded_nonce).where(slots.c.id == slot.slot_id).scalar_subquery()


def _items(slot: SlotWork) -> Select[int, bytes | None, float | None]:
    columns = select(artifacts.c.nonce, artifacts.c.vector, artifacts.c.distance)
    return columns.where(artifacts.c.slot_id == slot.slot_id).order_by(artifacts.c.nonce)


def _read(connection: Connection, query: Select[int, bytes | None, float | None]) -> list[Item]:
    return [Item(*row) for row in connection.execute(query)]


# What became of it.


def pass_over(connection: Connection, slot: SlotWork) -> None:
    """Let a slot be done that is behind, and has nothing left but late items."""
    lock_slots(connection, slots.c.id == slot.slot_id)
    left = select(artifacts.c.nonce).where(artifacts.c.slot_id == slot.slot_id, in_order(slot)).limit(1)
    if connection.scalar(left) is None:
        done = {"forwarded_nonce": slots.c.last_nonce}
        connection.execute(update(slots).where(slots.c.id == slot.slot_id).values(done))


def accepted(connection: Connection, part: Part) -> None:
    """Write down that the receiver has accepted the part. It counts once, also if a commit's answer is lost.

    The slot is locked first: a rival that comes now finds that it is too late.
    """
    of_slot = update(slots).where(slots.c.id == part.slot_id)
    if part.late:
        lock_slots(connection, slots.c.id == part.slot_id)
        deleted = _delete_late(connection, part)
        connection.execute(of_slot.values(forwarded=slots.c.forwarded + deleted))
        return
    last = part.items[-1].nonce
    passed = of_slot.where(slots.c.forwarded_nonce < last)
    more = {"forwarded": slots.c.forwarded + len(part.items), "forwarded_nonce": last}
    if connection.execute(passed.values(more)).rowcount:
        _delete_late(connection, part)  # of those whose rivals came while they were on their way


def _delete_late(connection: Connection, part: Part) -> int:
    """Delete the part's late items; return how many there were."""
    of_slot, nonces = late_items.c.slot_id == part.slot_id, [item.nonce for item in part.items]
    between = select(late_items.c.nonce).where(of_slot, late_items.c.nonce.between(nonces[0], nonces[-1]))
    found = [{"sent": nonce} for nonce in sorted(set(connection.scalars(between)).intersection(nonces))]
    if found:
        # One statement per nonce: SQLite limits the parameters of one.
        connection.execute(delete(late_items).where(of_slot, late_items.c.nonce == bindparam("sent")), found)
    return len(found)


def refused(connection: Connection, part: Part, reason: str) -> None:
    """Write down that the receiver refuses the part's one artifact for good: a dead letter."""
    (item,) = part.items
    lock_slots(connection, slots.c.id == part.slot_id)
    values = {"state": target(Event.REFUSED), "reason": reason, "since": now()}
    key = {"slot_id": part.slot_id, "nonce": item.nonce}
    if part.late:
        is_refused = (late_items.c.slot_id == part.slot_id) & (late_items.c.nonce == item.nonce)
        connection.execute(update(late_items).where(is_refused).values(values))
    else:
        _delete_late(connection, part)
        connection.execute(insert(late_items).values(key | values))
        connection.execute(update(slots).where(slots.c.id == part.slot_id).values(forwarded_nonce=item.nonce))


def replay(connection: Connection, round_id: int, nonces: Sequence[int] | None) -> int | None:
    """Let dead letters wait to be sent again, all of the round or those of ``nonces``; return how many.

    None if the round is deleted or being deleted.
    """
    if not keep_round(connection, round_id):
        return None
    lock_slots(connection, slots.c.round_id == round_id)
    is_dead = late_items.c.state == State.REFUSED
    changed = update(late_items).where(is_dead, late_items.c.slot_id.in_(slots_of_round(round_id)))
    if nonces is not None:
        changed = changed.where(late_items.c.nonce.in_(nonces))
    return connection.execute(changed.values(state=target(Event.REPLAYED), since=now())).rowcount


def slots_of_round(round_id: int) -> Select[int]:
    """Return the query of the ids of a round's slots."""
    return select(slots.c.id).where(slots.c.round_id == round_id)


def late_may(event: Event) -> ColumnElement[bool]:
    """Return the condition that ``event`` changes a late item."""
    return late_items.c.state.in_(sources(event))
