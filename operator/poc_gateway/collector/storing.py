# SPDX-License-Identifier: Apache-2.0
"""Storing deliveries: each nonce once, with its slot's counts in the same transaction."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, bindparam, select, update

from poc_gateway.collector.messages import Delivery, Found, Value
from poc_gateway.collector.rows import Row, insert_artifacts
from poc_gateway.store import schema

#: Values that one query names; SQLite takes 32 766 of them.
_MOST_VALUES = 1_000

Key = tuple[int, int]


@dataclass
class Outcome:
    """What became of a delivery: counts, and the nonces whose stored content is another."""

    stored: int = 0
    duplicates: int = 0
    conflicts: list[int] = field(default_factory=list)


@dataclass
class _Slot:
    """A slot before the transaction, and what the transaction adds."""

    before: int
    last: int
    stored: int = 0
    duplicates: int = 0
    conflicts: int = 0


def store(connection: Connection, deliveries: Sequence[Delivery], now: int) -> list[Outcome | None]:
    """Store the deliveries in their order; None for one whose round was deleted meanwhile, or is being deleted."""
    slots = _slots(connection, {found.slot_id for delivery in deliveries for found in delivery.found})
    alive = [all(found.slot_id in slots for found in delivery.found) for delivery in deliveries]
    late = {
        (found.slot_id, found.nonce)
        for delivery, lives in zip(deliveries, alive, strict=True)
        if lives
        for found in delivery.found
        if found.nonce <= slots[found.slot_id].before
    }
    transaction = _Transaction(slots, _values(connection, late), now)
    outcomes = [
        transaction.take(delivery) if lives else None for delivery, lives in zip(deliveries, alive, strict=True)
    ]
    transaction.write(connection)
    return outcomes


class _Transaction:
    def __init__(self, slots: Mapping[int, _Slot], known: dict[Key, Value], now: int) -> None:
        self._slots = slots
        self._known = known
        self._now = now
        self._artifacts: list[Row] = []
        self._conflicts: list[Row] = []
        self._letters: list[dict[str, object]] = []

    def take(self, delivery: Delivery) -> Outcome:
        outcome = Outcome()
        forwards = delivery.known.terms.receiver is not None
        for found in delivery.found:
            slot_id, nonce, value = found
            slot = self._slots[slot_id]
            if nonce > slot.last:
                slot.last = nonce
            elif (known := self._known.get((slot_id, nonce))) is not None:
                self._met_again(found, known, slot, outcome)
                continue
            elif forwards and nonce <= slot.before:
                # The outbox may have passed it; what is new in this transaction it has not seen.
                letter = {"slot_id": slot_id, "nonce": nonce, "state": "waiting", "reason": "late", "since": self._now}
                self._letters.append(letter)
            self._known[slot_id, nonce] = value
            self._artifacts.append(self._row(found))
            slot.stored += 1
            outcome.stored += 1
        return outcome

    def write(self, connection: Connection) -> None:
        if self._artifacts:
            insert_artifacts(connection, self._artifacts)
        if self._conflicts:
            columns = ("slot_id", "nonce", "vector", "distance", "received_at")
            rows = [dict(zip(columns, row, strict=True)) for row in self._conflicts]
            connection.execute(schema.conflicts.insert(), rows)
        if self._letters:
            connection.execute(schema.letters.insert(), self._letters)
        if self._slots:
            _update_slots(connection, self._slots)

    def _met_again(self, found: Found, known: Value, slot: _Slot, outcome: Outcome) -> None:
        if known == found.value:
            slot.duplicates += 1
            outcome.duplicates += 1
        else:
            slot.conflicts += 1
            outcome.conflicts.append(found.nonce)
            self._conflicts.append(self._row(found))

    def _row(self, found: Found) -> Row:
        slot_id, nonce, value = found
        if isinstance(value, bytes):
            return slot_id, nonce, value, None, self._now
        return slot_id, nonce, None, value, self._now


def _slots(connection: Connection, ids: Collection[int]) -> dict[int, _Slot]:
    columns = schema.slots.c
    kept = select(columns.id, columns.last_nonce).join(schema.rounds).where(schema.ROUND_IS_KEPT)
    slots = {}
    for some in _parts(sorted(ids)):
        rows = connection.execute(kept.where(columns.id.in_(some)))
        slots.update({id_: _Slot(last, last) for id_, last in rows})
    return slots


def _values(connection: Connection, keys: Collection[Key]) -> dict[Key, Value]:
    columns = schema.artifacts.c
    nonces = defaultdict[int, list[int]](list)
    for slot_id, nonce in sorted(keys):
        nonces[slot_id].append(nonce)
    values: dict[Key, Value] = {}
    query = select(columns.nonce, columns.vector, columns.distance)
    for slot_id, of_slot in nonces.items():
        for some in _parts(of_slot):
            rows = connection.execute(query.where(columns.slot_id == slot_id, columns.nonce.in_(some)))
            for nonce, vector, distance in rows:
                values[slot_id, nonce] = distance if vector is None else vector
    return values


_UPDATE = (
    update(schema.slots)
    .where(schema.slots.c.id == bindparam("of"))
    .values(
        stored=schema.slots.c.stored + bindparam("more_stored"),
        last_nonce=bindparam("last"),
        duplicates=schema.slots.c.duplicates + bindparam("more_duplicates"),
        conflicts=schema.slots.c.conflicts + bindparam("more_conflicts"),
    )
)


def _update_slots(connection: Connection, slots: Mapping[int, _Slot]) -> None:
    rows = [
        {
            "of": id_,
            "last": slot.last,
            "more_stored": slot.stored,
            "more_duplicates": slot.duplicates,
            "more_conflicts": slot.conflicts,
        }
        for id_, slot in slots.items()
    ]
    connection.execute(_UPDATE, rows)


def _parts(values: Sequence[int]) -> list[Sequence[int]]:
    return [values[start : start + _MOST_VALUES] for start in range(0, len(values), _MOST_VALUES)]
