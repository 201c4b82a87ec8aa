# SPDX-License-Identifier: Apache-2.0
"""What ends before it was delivered: it expires, or a person gives it up. Nobody may forward the round meanwhile.

A person may also take that back.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, bindparam, delete, exists, func, insert, literal, or_, select, union, update

from poc_gateway.outbox.ledger import IS_BEHIND, SlotWork, in_order, late_may, lock_slots, now, slots_of_round
from poc_gateway.outbox.states import Event, State, target
from poc_gateway.store.schema import artifacts, conflicts, ended_ranges, late_items, rounds, slots
from poc_operator.observed import Truth

#: Late items that may not be honest: a pod has computed something else, or nobody has decided.
_IS_DOUBTED = exists().where(
    conflicts.c.slot_id == late_items.c.slot_id,
    conflicts.c.nonce == late_items.c.nonce,
    or_(conflicts.c.truth.is_(None), conflicts.c.truth == Truth.NEITHER),
)
#: Artifacts that one transaction ends: deliveries wait for it.
CHUNK_ARTIFACTS = 10_000


def end_some(connection: Connection, round_id: int, event: Event, reason: str, *, since: int | None = None) -> int:
    """End some artifacts of a round by ``event``; return how many, 0 if none is left.

    With ``since``, only those that wait since before that moment: of a round that was heard of later, none.
    """
    lock_slots(connection, slots.c.round_id == round_id)
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
    may = late_may(event) & late_items.c.slot_id.in_(slots_of_round(round_id))
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
    behind = select(slots.c.id, slots.c.slot, slots.c.node_id).where(slots.c.round_id == round_id, IS_BEHIND)
    found = connection.execute(behind.order_by(slots.c.slot).limit(1)).first()
    if found is None:
        return 0
    slot = SlotWork(*found, is_behind=True, has_late=False)
    nonces = select(artifacts.c.nonce).where(artifacts.c.slot_id == slot.slot_id, in_order(slot))
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
    late = select(slots.c.round_id).join(late_items).where(late_may(Event.EXPIRED), late_items.c.since < since)
    behind = select(slots.c.round_id).where(IS_BEHIND)
    quiet = select(rounds.c.id).where(rounds.c.receiver.is_not(None), rounds.c.created_at < since, last < since)
    return connection.scalars(quiet.where(rounds.c.id.in_(union(behind, late)))).all()


def replay_some(connection: Connection, round_id: int, state: State) -> int:
    """Let some artifacts that have ended in ``state`` wait to be sent again; return how many, 0 if none is left.

    Those that may not be honest stay as they are.
    """
    lock_slots(connection, slots.c.round_id == round_id)
    moment = now()
    here = late_items.c.slot_id.in_(slots_of_round(round_id)) & (late_items.c.state == state) & ~_IS_DOUBTED
    some = select(late_items.c.slot_id, late_items.c.nonce).where(here).limit(CHUNK_ARTIFACTS)
    found = connection.execute(some).all()
    if found:
        one = (late_items.c.slot_id == bindparam("of")) & (late_items.c.nonce == bindparam("replayed"))
        waits = {"state": target(Event.REPLAYED), "reason": "replayed", "since": moment}
        rows = [{"of": slot_id, "replayed": nonce} for slot_id, nonce in found]
        connection.execute(update(late_items).where(one).values(**waits), rows)
        return len(found)
    return _replay_range(connection, round_id, state, moment)


def _replay_range(connection: Connection, round_id: int, state: State, moment: int) -> int:
    """Give the artifacts of the first range, which are no more than one transaction may change, rows of their own."""
    ended = ended_ranges.c
    first = select(ended_ranges).where(ended.slot_id.in_(slots_of_round(round_id)), ended.state == state).limit(1)
    row = connection.execute(first).mappings().first()
    if row is None:
        return 0
    between = artifacts.c.nonce.between(row["first_nonce"], row["last_nonce"])
    of_range = (artifacts.c.slot_id == row["slot_id"]) & between
    is_late = exists().where(late_items.c.slot_id == artifacts.c.slot_id, late_items.c.nonce == artifacts.c.nonce)
    waits = (literal(str(target(Event.REPLAYED))), literal("replayed"), literal(moment))
    rows = select(artifacts.c.slot_id, artifacts.c.nonce, *waits).where(of_range, ~is_late)
    columns = ["slot_id", "nonce", "state", "reason", "since"]
    connection.execute(insert(late_items).from_select(columns, rows))
    is_range = (ended.slot_id == row["slot_id"]) & (ended.first_nonce == row["first_nonce"])
    connection.execute(delete(ended_ranges).where(is_range))
    return int(row["artifacts"])
