# SPDX-License-Identifier: Apache-2.0
"""What the forwarder reads and writes. Nothing here takes longer because more artifacts are stored."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from sqlalchemy import Connection, ScalarSelect, Select, bindparam, delete, exists, insert, select, union, update

from poc_gateway.store.rounds import RoundTerms, terms_of
from poc_gateway.store.schema import artifacts, letters, rounds, slots


class Item(NamedTuple):
    """One artifact: a vector or a distance, as the round's protocol has it."""

    nonce: int
    vector: bytes | None
    distance: float | None


@dataclass(frozen=True)
class Part:
    """Artifacts of one slot in the order of their nonces; ``letters`` if they are sent outside of the slot's order."""

    slot_id: int
    node_id: int
    letters: bool
    items: Sequence[Item]

    def halves(self) -> tuple[Self, Self]:
        """Return the first and the second half."""
        middle = len(self.items) // 2
        return replace(self, items=self.items[:middle]), replace(self, items=self.items[middle:])


class SlotWork(NamedTuple):
    """What a slot has to send: artifacts in order, letters, or both."""

    slot_id: int
    node_id: int
    is_behind: bool
    has_letters: bool


_IS_BEHIND = slots.c.last_nonce > slots.c.forwarded_nonce
_IS_WAITING = letters.c.state == "waiting"


def rounds_with_work(connection: Connection) -> Sequence[int]:
    """Return the ids of rounds that have a receiver and something to send to it."""
    behind = select(slots.c.round_id).where(_IS_BEHIND)
    waiting = select(slots.c.round_id).join(letters).where(_IS_WAITING)
    query = select(rounds.c.id).where(rounds.c.receiver.is_not(None), rounds.c.id.in_(union(behind, waiting)))
    return connection.scalars(query.order_by(rounds.c.id)).all()


def terms(connection: Connection, round_id: int) -> RoundTerms | None:
    """Return the terms of a round; None if it was deleted."""
    row = connection.execute(select(rounds).where(rounds.c.id == round_id)).mappings().first()
    return terms_of(row) if row is not None else None


def slots_with_work(connection: Connection, round_id: int) -> Sequence[SlotWork]:
    """Return the slots that have something to send, in the order of their offsets."""
    waiting = exists().where(letters.c.slot_id == slots.c.id, _IS_WAITING)
    query = select(slots.c.id, slots.c.node_id, _IS_BEHIND, waiting).where(slots.c.round_id == round_id)
    found = connection.execute(query.where(_IS_BEHIND | waiting).order_by(slots.c.slot))
    return [SlotWork(slot_id, node_id, bool(behind), bool(has)) for slot_id, node_id, behind, has in found]


def next_in_order(connection: Connection, slot: SlotWork, limit: int) -> Part:
    """Return the slot's first artifacts after its ``forwarded_nonce``, without those that are letters."""
    is_letter = exists().where(letters.c.slot_id == artifacts.c.slot_id, letters.c.nonce == artifacts.c.nonce)
    query = _items(slot).where(artifacts.c.nonce > _done(slot), ~is_letter).limit(limit)
    return Part(slot.slot_id, slot.node_id, letters=False, items=_read(connection, query))


def next_letters(connection: Connection, slot: SlotWork, limit: int) -> Part:
    """Return the slot's first waiting letters up to its ``forwarded_nonce``.

    One above it waits until the slot has passed it: with its letter gone before, it would be sent in order again.
    """
    of_artifact = (letters.c.slot_id == artifacts.c.slot_id) & (letters.c.nonce == artifacts.c.nonce)
    query = _items(slot).join(letters, of_artifact).where(_IS_WAITING, artifacts.c.nonce <= _done(slot)).limit(limit)
    return Part(slot.slot_id, slot.node_id, letters=True, items=_read(connection, query))


def accepted(connection: Connection, part: Part) -> None:
    """Write down that the receiver has accepted the part."""
    of_slot = update(slots).where(slots.c.id == part.slot_id)
    of_slot = of_slot.values(forwarded=slots.c.forwarded + len(part.items))
    if part.letters:
        # One statement per nonce: SQLite limits the parameters of one.
        sent = delete(letters).where(letters.c.slot_id == part.slot_id, letters.c.nonce == bindparam("sent"))
        connection.execute(sent, [{"sent": item.nonce} for item in part.items])
    else:
        of_slot = of_slot.values(forwarded_nonce=part.items[-1].nonce)
    connection.execute(of_slot)


def refused(connection: Connection, part: Part, reason: str) -> None:
    """Write down that the receiver refuses the part's one artifact for good."""
    (item,) = part.items
    values = {"state": "dead", "reason": reason, "since": time.time_ns() // 1_000_000}
    key = {"slot_id": part.slot_id, "nonce": item.nonce}
    if part.letters:
        is_refused = (letters.c.slot_id == part.slot_id) & (letters.c.nonce == item.nonce)
        connection.execute(update(letters).where(is_refused).values(values))
    else:
        connection.execute(insert(letters).values(key | values))
        connection.execute(update(slots).where(slots.c.id == part.slot_id).values(forwarded_nonce=item.nonce))


def _done(slot: SlotWork) -> ScalarSelect[int]:
    return select(slots.c.forwarded_nonce).where(slots.c.id == slot.slot_id).scalar_subquery()


def _items(slot: SlotWork) -> Select[int, bytes | None, float | None]:
    columns = select(artifacts.c.nonce, artifacts.c.vector, artifacts.c.distance)
    return columns.where(artifacts.c.slot_id == slot.slot_id).order_by(artifacts.c.nonce)


def _read(connection: Connection, query: Select[int, bytes | None, float | None]) -> list[Item]:
    return [Item(*row) for row in connection.execute(query)]
