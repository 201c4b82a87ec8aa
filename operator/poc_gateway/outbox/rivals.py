# SPDX-License-Identifier: Apache-2.0
"""Rivals: different results of pods for one nonce. All are kept; the operator lets another pod compute it, and decides.

What was not sent yet when its rival came waits for the decision. What was sent stays as it is: a receiver has no use
for a second result. So then the decision only tells who lied.
"""

from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, func, insert, select, update

from poc_gateway.outbox.ledger import in_parts, late_may, lock_slots, now, number_again
from poc_gateway.outbox.states import Event, State, target
from poc_gateway.store.rounds import KnownRound
from poc_gateway.store.schema import artifacts, authors, conflicts, late_items, one_line, slots
from poc_operator.observed import MOST_OTHERS, Decision, Forger, RivalNonce, RivalResult, Truth

#: Stands for the pod where the gateway asks for no credentials.
UNKNOWN = "(unknown)"

_IS_OPEN = conflicts.c.truth.is_(None)
_SAME_NONCE = and_(artifacts.c.slot_id == conflicts.c.slot_id, artifacts.c.nonce == conflicts.c.nonce)


def hold(connection: Connection, keys: Collection[tuple[int, int]]) -> None:
    """Let what has a rival now wait for the decision, by slot id and nonce, unless it was sent or has ended."""
    values = {"state": target(Event.DISPUTED), "reason": "pods differ", "since": now()}
    of_slots = defaultdict[int, set[int]](set)
    for slot_id, nonce in keys:
        of_slots[slot_id].add(nonce)
    for slot_id, nonces in of_slots.items():
        passed = connection.execute(select(slots.c.forwarded_nonce).where(slots.c.id == slot_id)).scalar_one()
        for some in in_parts(sorted(nonces)):
            here = (late_items.c.slot_id == slot_id) & late_items.c.nonce.in_(some)
            late = set(connection.scalars(select(late_items.c.nonce).where(here)))
            if late:
                connection.execute(update(late_items).where(here, late_may(Event.DISPUTED)).values(values))
            if unsent := [nonce for nonce in some if nonce > passed and nonce not in late]:
                rows = [{"slot_id": slot_id, "nonce": nonce, **values} for nonce in unsent]
                connection.execute(insert(late_items), rows)


def undecided(connection: Connection, known: KnownRound, limit: int) -> list[RivalNonce]:
    """Return the first nonces of a round that have rivals and no decision, with all results of each."""
    open_ = select(conflicts.c.nonce).where(_of_round(known), _IS_OPEN)
    first = open_.group_by(conflicts.c.nonce)
    nonces = connection.scalars(first.order_by(func.min(conflicts.c.id)).limit(limit)).all()
    found = dict[int, list[RowMapping]]()
    for row in connection.execute(_rows(known).where(conflicts.c.nonce.in_(nonces), _IS_OPEN)).mappings():
        found.setdefault(row["nonce"], []).append(row)
    return [
        RivalNonce(
            nonce=nonce,
            stored=_result(found[nonce][0], "stored_"),
            others=[_result(row, "", conflict=row["id"]) for row in found[nonce][:MOST_OTHERS]],
        )
        for nonce in nonces
    ]


def _rows(known: KnownRound) -> Select[*tuple[Any, ...]]:
    kept, other = authors.alias(), authors.alias()
    stored = [artifacts.c[name].label(f"stored_{name}") for name in ("vector", "distance")]
    columns = select(conflicts, *stored, kept.c.pod.label("stored_pod"), other.c.pod.label("pod"))
    joined = columns.join(artifacts, _SAME_NONCE).outerjoin(kept, kept.c.id == artifacts.c.author)
    return joined.outerjoin(other, other.c.id == conflicts.c.author).where(_of_round(known)).order_by(conflicts.c.id)


def _result(row: RowMapping, prefix: str, conflict: int | None = None) -> RivalResult:
    vector = row[f"{prefix}vector"]
    return RivalResult(
        conflict=conflict,
        pod=row[f"{prefix}pod"],
        vector_b64=b64encode(vector).decode() if vector is not None else None,
        distance=row[f"{prefix}distance"],
    )


def _of_round(known: KnownRound) -> ColumnElement[bool]:
    return conflicts.c.slot_id.in_(select(slots.c.id).where(slots.c.round_id == known.id))


def decide(connection: Connection, known: KnownRound, decisions: Sequence[Decision]) -> int:
    """Write decisions down; return how many were new. Nobody may forward the round meanwhile.

    An honest result that was not sent goes out. If it came second, it takes the place of the first, which is kept
    beside it. What is not honest is abandoned.
    """
    lock_slots(connection, slots.c.round_id == known.id)
    return sum(_decide(connection, known, one) for one in decisions)


def _decide(connection: Connection, known: KnownRound, decision: Decision) -> bool:
    slot_id = known.slots.get(decision.nonce % (known.terms.node_count * known.terms.n_groups))
    here = (conflicts.c.slot_id == slot_id) & (conflicts.c.nonce == decision.nonce)
    compared = select(conflicts).where(here, _IS_OPEN, conflicts.c.id <= decision.up_to).order_by(conflicts.c.id)
    rows = connection.execute(compared).mappings().all()
    if slot_id is None or not rows:
        return False
    chosen = next((row for row in rows if row["id"] == decision.conflict), None)
    if (chosen is not None) is not (decision.truth is Truth.OTHER):
        return False  # what is said to be honest is not known, or was decided before
    replaced = chosen is not None and not _is_delivered(connection, slot_id, decision.nonce)
    for row in rows:
        truth = Truth.STORED if replaced or chosen is None else Truth.NEITHER
        if decision.truth is Truth.NEITHER or row["id"] in decision.alike:
            truth = Truth.NEITHER if decision.truth is Truth.NEITHER else Truth.BOTH
        elif row is chosen and not replaced:
            truth = Truth.OTHER
        values = {"truth": truth, "decided_by": one_line(decision.pod), "decided_at": now()}
        connection.execute(update(conflicts).where(conflicts.c.id == row["id"]).values(values))
    if replaced and chosen is not None:
        _swap(connection, chosen)
    if connection.scalar(select(conflicts.c.id).where(here, _IS_OPEN).limit(1)) is None:
        _release(connection, slot_id, decision)
    return True


def _is_delivered(connection: Connection, slot_id: int, nonce: int) -> bool:
    late = select(late_items.c.nonce).where(late_items.c.slot_id == slot_id, late_items.c.nonce == nonce)
    passed = connection.scalar(select(slots.c.forwarded_nonce).where(slots.c.id == slot_id))
    return passed is not None and passed >= nonce and connection.scalar(late) is None


def _swap(connection: Connection, row: RowMapping) -> None:
    here = (artifacts.c.slot_id == row["slot_id"]) & (artifacts.c.nonce == row["nonce"])
    result = (artifacts.c.vector, artifacts.c.distance, artifacts.c.author)
    first = connection.execute(select(*result).where(here)).mappings().one()
    connection.execute(update(artifacts).where(here).values({column.name: row[column.name] for column in result}))
    connection.execute(update(conflicts).where(conflicts.c.id == row["id"]).values(**first))
    number_again(connection, row["slot_id"], row["nonce"])


def _release(connection: Connection, slot_id: int, decision: Decision) -> None:
    event = Event.ABANDONED if decision.truth is Truth.NEITHER else Event.SETTLED
    here = (late_items.c.slot_id == slot_id) & (late_items.c.nonce == decision.nonce)
    is_held = here & (late_items.c.state == State.DISPUTED)
    reason = f"pods differ, and pod {decision.pod} computes neither" if event is Event.ABANDONED else "late"
    values = {"state": target(event), "reason": one_line(reason), "since": now()}
    connection.execute(update(late_items).where(is_held).values(values))


def count_undecided(connection: Connection, round_id: int) -> int:
    """Return how many results of a round have a rival and no decision."""
    query = select(func.count()).select_from(conflicts).join(slots, slots.c.id == conflicts.c.slot_id)
    return connection.scalar(query.where(slots.c.round_id == round_id, _IS_OPEN)) or 0


def forgers(connection: Connection, round_id: int, limit: int) -> list[Forger]:
    """Return the pods whose results were found not to be honest, those with the most first."""
    lies = {
        conflicts.c.author: conflicts.c.truth.in_((Truth.STORED, Truth.NEITHER)),
        artifacts.c.author: conflicts.c.truth.in_((Truth.OTHER, Truth.NEITHER)),
    }
    found = Counter[str]()
    for author, lied in lies.items():
        pod = func.coalesce(authors.c.pod, UNKNOWN)
        query = select(pod, func.count()).select_from(conflicts).join(artifacts, _SAME_NONCE)
        query = query.join(slots, slots.c.id == conflicts.c.slot_id).outerjoin(authors, authors.c.id == author)
        for name, count in connection.execute(query.where(slots.c.round_id == round_id, lied).group_by(pod)):
            found[name] += count
    return [Forger(pod=name, count=count) for name, count in found.most_common(limit)]
