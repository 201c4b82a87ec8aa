# SPDX-License-Identifier: Apache-2.0
"""The ledger: every change of slots, late items and callbacks, in the transaction of whoever makes it.

`poc_gateway.outbox.states` has the states. Nothing here takes longer because more artifacts are stored.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
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

from poc_gateway.outbox.states import Event, State, sources, target
from poc_gateway.store.rounds import RoundTerms, terms_of
from poc_gateway.store.schema import (
    ROUND_IS_KEPT,
    artifacts,
    callbacks,
    ended_ranges,
    late_arrivals,
    late_items,
    rounds,
    slots,
)

Value = TypeVar("Value")

#: Values that one query names; SQLite takes 32 766 of them.
MOST_VALUES = 1_000
#: Artifacts that one transaction ends: deliveries wait for it.
CHUNK_ARTIFACTS = 10_000
#: A callback that was written within this time goes out before those that have waited for longer.
NEW_MS = 60_000

_IS_BEHIND = slots.c.last_nonce > slots.c.forwarded_nonce
_IS_LATE = late_items.c.state == State.WAITING
_IS_WAITING = callbacks.c.state == State.WAITING


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


def slots_of(connection: Connection, ids: Collection[int]) -> dict[int, SlotArrivals]:
    """Return those of the slots whose round is not deleted and not being deleted."""
    columns = select(slots.c.id, slots.c.last_nonce, slots.c.missing_nonce, slots.c.conflicts, slots.c.late)
    kept = columns.join(rounds).where(ROUND_IS_KEPT)
    found = dict[int, SlotArrivals]()
    for some in in_parts(sorted(ids)):
        rows = connection.execute(kept.where(slots.c.id.in_(some)))
        found.update(
            {id_: SlotArrivals(last, last, missing, *before) for id_, last, missing, *before in rows},
        )
    return found


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
    query = _items(slot).where(_in_order(slot)).limit(limit)
    return Part(slot.slot_id, slot.node_id, late=False, items=_read(connection, query))


def _in_order(slot: SlotWork) -> ColumnElement[bool]:
    is_late = exists().where(late_items.c.slot_id == artifacts.c.slot_id, late_items.c.nonce == artifacts.c.nonce)
    return (artifacts.c.nonce > _done(slot)) & ~is_late


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
    values = {"state": target(Event.REFUSED), "reason": reason, "since": now()}
    key = {"slot_id": part.slot_id, "nonce": item.nonce}
    if part.late:
        is_refused = (late_items.c.slot_id == part.slot_id) & (late_items.c.nonce == item.nonce)
        connection.execute(update(late_items).where(is_refused).values(values))
    else:
        connection.execute(insert(late_items).values(key | values))
        connection.execute(update(slots).where(slots.c.id == part.slot_id).values(forwarded_nonce=item.nonce))


def replay(connection: Connection, round_id: int, nonces: Sequence[int] | None) -> int:
    """Let dead letters wait to be sent again, all of the round or those of ``nonces``; return how many."""
    changed = update(late_items).where(_late_may(Event.REPLAYED), late_items.c.slot_id.in_(_slots_of(round_id)))
    if nonces is not None:
        changed = changed.where(late_items.c.nonce.in_(nonces))
    return connection.execute(changed.values(state=target(Event.REPLAYED), since=now())).rowcount


# What ends before it was delivered: it expires, or a person gives it up. Nobody may forward the round meanwhile.


def end_some(connection: Connection, round_id: int, event: Event, reason: str, *, since: int | None = None) -> int:
    """End some artifacts of a round by ``event``; return how many, 0 if none is left.

    With ``since``, only those that wait since before that moment: of a round that was heard of later, none.
    """
    if since is not None and _heard_at(connection, round_id) >= since:
        return 0
    ending = {"state": target(event), "reason": reason, "since": now()}
    return _end_late(connection, round_id, event, ending, since) or _end_in_order(connection, round_id, ending)


def _heard_at(connection: Connection, round_id: int) -> int:
    last = select(func.max(slots.c.heard_at)).where(slots.c.round_id == round_id).scalar_subquery()
    begun = connection.execute(select(rounds.c.created_at, last).where(rounds.c.id == round_id)).first()
    return max(begun[0], begun[1] or 0) if begun is not None else now()


def _end_late(
    connection: Connection, round_id: int, event: Event, ending: Mapping[str, object], since: int | None
) -> int:
    may = _late_may(event) & late_items.c.slot_id.in_(_slots_of(round_id))
    if since is not None:
        may &= late_items.c.since < since
    found = connection.execute(select(late_items.c.slot_id, late_items.c.nonce).where(may).limit(CHUNK_ARTIFACTS)).all()
    one = (late_items.c.slot_id == bindparam("of")) & (late_items.c.nonce == bindparam("ended"))
    if found:
        rows = [{"of": slot_id, "ended": nonce} for slot_id, nonce in found]
        connection.execute(update(late_items).where(one).values(**ending), rows)
    return len(found)


def _end_in_order(connection: Connection, round_id: int, ending: Mapping[str, object]) -> int:
    """Pass over what the first slot that is behind has to send, as one row."""
    behind = select(slots.c.id, slots.c.slot, slots.c.node_id).where(slots.c.round_id == round_id, _IS_BEHIND)
    found = connection.execute(behind.order_by(slots.c.slot).limit(1)).first()
    if found is None:
        return 0
    slot = SlotWork(*found, is_behind=True, has_late=False)
    nonces = select(artifacts.c.nonce).where(artifacts.c.slot_id == slot.slot_id, _in_order(slot))
    ended = connection.scalars(nonces.order_by(artifacts.c.nonce).limit(CHUNK_ARTIFACTS)).all()
    if not ended:  # late items alone: the slot has passed them
        values = {"forwarded_nonce": slots.c.last_nonce}
        connection.execute(update(slots).where(slots.c.id == slot.slot_id).values(values))
        return _end_in_order(connection, round_id, ending)
    key = {"slot_id": slot.slot_id, "first_nonce": ended[0], "last_nonce": ended[-1], "artifacts": len(ended)}
    connection.execute(insert(ended_ranges).values(**key, **ending))
    connection.execute(update(slots).where(slots.c.id == slot.slot_id).values(forwarded_nonce=ended[-1]))
    return len(ended)


def rounds_overdue(connection: Connection, since: int) -> Sequence[int]:
    """Return the ids of rounds that `end_some` would end something of with the same ``since``."""
    last = select(func.max(slots.c.heard_at)).where(slots.c.round_id == rounds.c.id).correlate(rounds).scalar_subquery()
    late = select(slots.c.round_id).join(late_items).where(_IS_LATE, late_items.c.since < since)
    behind = select(slots.c.round_id).where(_IS_BEHIND)
    quiet = select(rounds.c.id).where(rounds.c.receiver.is_not(None), rounds.c.created_at < since, last < since)
    return connection.scalars(quiet.where(rounds.c.id.in_(union(behind, late)))).all()


def _slots_of(round_id: int) -> Select[int]:
    return select(slots.c.id).where(slots.c.round_id == round_id)


def _late_may(event: Event) -> ColumnElement[bool]:
    return late_items.c.state.in_(sources(event))


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
        "state": State.KEPT if receiver is None else State.WAITING,
        "created_at": now(),
    }
    connection.execute(insert(callbacks).values(values))
    return True


def add_job_callbacks(connection: Connection, job_id: str, contents: Sequence[tuple[str, str]]) -> None:
    """Add the callbacks of a job, each a URL and a body (JSON)."""
    common = {"job_id": job_id, "state": State.WAITING, "created_at": now()}
    if contents:
        connection.execute(insert(callbacks), [common | {"url": url, "body": body} for url, body in contents])


def addresses_with_callbacks(connection: Connection) -> Sequence[str]:
    """Return the addresses that callbacks wait for."""
    query = select(callbacks.c.url).where(_IS_WAITING, callbacks.c.url.is_not(None)).distinct()
    return [url for url in connection.scalars(query) if url is not None]


def has_callbacks(connection: Connection, url: str) -> bool:
    """Return whether a callback waits for an address."""
    return connection.scalar(select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url).limit(1)) is not None


def new_callback(connection: Connection, url: str) -> int | None:
    """Return the id of the next callback for an address that was never tried.

    They go out in the order they were written. After an outage the ones that are new come first, since the others may
    be too late already.
    """
    untried = select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url, callbacks.c.attempts == 0)
    is_old = callbacks.c.created_at < now() - NEW_MS
    return connection.scalar(untried.order_by(is_old, callbacks.c.id).limit(1))


def callback_to_retry(connection: Connection, url: str, longest_ms: int) -> int | None:
    """Return the id of the callback for an address that failed, and whose pause has been over for longest.

    No pause is longer than ``longest_ms``: one that seems to be was begun before the clock was set back.
    """
    failed = select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url, callbacks.c.attempts > 0)
    moment = now()
    due = (callbacks.c.next_try_at <= moment) | (callbacks.c.next_try_at > moment + longest_ms)
    return connection.scalar(failed.where(due).order_by(callbacks.c.next_try_at).limit(1))


class CallbackWork(NamedTuple):
    """A callback that is to be sent: its JSON, how often it has failed, and the Secret of its round's receiver."""

    body: str
    attempts: int
    namespace: str | None
    receiver_secret: str | None


def callback_work(connection: Connection, id_: int) -> CallbackWork | None:
    """Return a callback that waits; None if it has ended, or was deleted with its round or job."""
    columns = select(callbacks.c.body, callbacks.c.attempts, rounds.c.namespace, rounds.c.receiver_secret)
    query = columns.outerjoin(rounds, rounds.c.id == callbacks.c.round_id).where(callbacks.c.id == id_, _IS_WAITING)
    found = connection.execute(query).first()
    return CallbackWork(*found) if found is not None else None


def callback_failed(connection: Connection, id_: int, *, reason: str, next_try_at: int) -> None:
    """Write down that a callback failed, why, and when it is tried again."""
    values = {"attempts": callbacks.c.attempts + 1, "reason": reason, "next_try_at": next_try_at}
    connection.execute(update(callbacks).where(callbacks.c.id == id_, _IS_WAITING).values(values))


def callback_ended(connection: Connection, id_: int, event: Event, reason: str | None = None) -> bool:
    """Write down how a callback ended; False if it has ended already, or there is none."""
    changed = update(callbacks).where(callbacks.c.id == id_, callbacks.c.state.in_(sources(event)))
    ending = {"state": target(event), "reason": reason, "ended_at": now()}
    return connection.execute(changed.values(ending)).rowcount > 0


def abandon_callbacks(connection: Connection, round_id: int, reason: str) -> int:
    """Give up the callbacks of a round that were not delivered; return how many."""
    changed = update(callbacks).where(callbacks.c.round_id == round_id, _callback_may(Event.ABANDONED))
    ending = {"state": target(Event.ABANDONED), "reason": reason, "ended_at": now()}
    return connection.execute(changed.values(ending)).rowcount


def expire_callbacks(connection: Connection, since: int, reason: str) -> int:
    """End some callbacks that have waited since before a moment; return how many, 0 if none is left."""
    overdue = select(callbacks.c.id).where(_callback_may(Event.EXPIRED), callbacks.c.created_at < since)
    ids = connection.scalars(overdue.limit(MOST_VALUES)).all()
    ending = {"state": target(Event.EXPIRED), "reason": reason, "ended_at": now()}
    connection.execute(update(callbacks).where(callbacks.c.id.in_(ids)).values(ending))
    return len(ids)


def _callback_may(event: Event) -> ColumnElement[bool]:
    return callbacks.c.state.in_(sources(event))
