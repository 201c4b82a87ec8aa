# SPDX-License-Identifier: Apache-2.0
"""What the routes read from the database."""

from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, func, select

from poc_gateway.outbox.ledger import has_work
from poc_gateway.outbox.rivals import count_undecided, forgers
from poc_gateway.query.messages import (
    Conflict,
    ConflictPage,
    ConflictsQuery,
    RoundEntry,
    RoundPage,
    RoundsQuery,
    SlotArrivals,
    SlotEntry,
)
from poc_gateway.store.rounds import KnownRound, RoundTerms, terms_of
from poc_gateway.store.schema import ROUND_IS_KEPT, artifacts, authors, conflicts, late_items, rounds, slots
from poc_operator.observed import CollectedRound, CollectedSlot, RefusedPod, Rivals
from vllm_poc.wire.messages import Protocol, scheme_of

#: So many slots with rivals, pairs of rivals of a slot, and refused pods are told to the operator.
MOST_NAMED = 20
_ARCHIVE_MOMENTS = ("archived_at", "archiving_since")
_COUNTERS = (slots.c.stored, slots.c.duplicates, slots.c.conflicts, slots.c.forwarded)


def moment(milliseconds: int) -> datetime:
    """Return a moment of the database."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def base64_of(vector: bytes | None) -> str | None:
    """Return a stored vector as it is on the wire."""
    return b2a_base64(vector, newline=False).decode() if vector is not None else None


def value_name(terms: RoundTerms) -> str | None:
    """Return the name of the field with a round's vectors or chains in base64; None if it has distances."""
    names = {Protocol.ARTIFACT: "vector_b64", Protocol.DECODE: "chain_b64"}
    return names.get(terms.protocol)


def round_page(connection: Connection, query: RoundsQuery) -> RoundPage:
    """Return the newest rounds before ``query.after``."""
    select_ = select(rounds).where(ROUND_IS_KEPT).order_by(rounds.c.id.desc()).limit(query.limit + 1)
    if query.after is not None:
        select_ = select_.where(rounds.c.id < query.after)
    for column in (rounds.c.namespace, rounds.c.name, rounds.c.block_hash):
        wanted = getattr(query, column.name)
        if wanted is not None:
            select_ = select_.where(column == wanted)
    if query.undelivered:
        select_ = select_.where(has_work())
    found = connection.execute(select_).mappings().all()
    page = found[: query.limit]
    return RoundPage(rounds=_entries(connection, page), next=page[-1]["id"] if len(found) > len(page) else None)


def progress(
    connection: Connection, namespace: str, name: str, uid: str | None
) -> tuple[KnownRound, CollectedRound] | None:
    """Return the round and what is stored of it, without a ``uid`` the newest of its name; None if nothing ever was."""
    named = select(rounds).where(rounds.c.namespace == namespace, rounds.c.name == name, ROUND_IS_KEPT)
    if uid is not None:
        named = named.where(rounds.c.uid == uid)
    row = connection.execute(named.order_by(rounds.c.id.desc()).limit(1)).mappings().first()
    if row is None:
        return None
    query = select(slots).where(slots.c.round_id == row["id"]).order_by(slots.c.slot)
    terms = terms_of(row)
    rows = connection.execute(query).mappings().all()
    rivals = _rivals(connection, [slot["id"] for slot in rows if slot["conflicts"]])
    collected = [_collected_slot(terms, slot, rivals.get(slot["id"], [])) for slot in rows]
    found = _collected(terms.uid, collected, _refused_pods(connection, row["id"]), row["limit_reached"])
    known = KnownRound(row["id"], terms, {slot["slot"]: slot["id"] for slot in rows})
    if not found.conflicts:
        return known, found
    if terms.protocol is Protocol.DECODE:  # nothing is decided about chains: the first one counts
        return known, found
    undecided, lied = count_undecided(connection, row["id"]), forgers(connection, row["id"], MOST_NAMED)
    return known, found.model_copy(update={"undecided": undecided, "forgers": lied})


def nothing(uid: str) -> CollectedRound:
    """Return what is told of a round that nothing was delivered for."""
    return _collected(uid, [], [], None)


def round_entry(connection: Connection, known: KnownRound) -> RoundEntry:
    """Return a round's terms and sums."""
    found = connection.execute(select(rounds).where(rounds.c.id == known.id)).mappings().all()
    return _entries(connection, found)[0]


def slot_entries(connection: Connection, known: KnownRound) -> list[SlotEntry]:
    """Return the slots of a round in their order."""
    dead = _dead(late_items.c.slot_id).where(slots.c.round_id == known.id)
    deaths = _by_key(connection, dead)
    found = connection.execute(select(slots).where(slots.c.round_id == known.id).order_by(slots.c.slot)).mappings()
    return [SlotEntry.model_validate({**row, "dead": deaths.get(row["id"], 0)}) for row in found]


def slot_arrivals(connection: Connection, known: KnownRound) -> list[SlotArrivals]:
    """Return the slots of a round with the arrivals of their first and last nonces, which take two look-ups each."""
    arrival = select(artifacts.c.received_at).where(artifacts.c.slot_id == slots.c.id).limit(1)
    query = (
        select(
            slots.c.slot,
            slots.c.node_id,
            slots.c.stored,
            arrival.order_by(artifacts.c.nonce).scalar_subquery().label("first"),
            arrival.order_by(artifacts.c.nonce.desc()).scalar_subquery().label("last"),
        )
        .where(slots.c.round_id == known.id)
        .order_by(slots.c.slot)
    )
    return [
        SlotArrivals(
            slot=row.slot,
            node_id=row.node_id,
            stored=row.stored,
            first_arrival=None if row.first is None else moment(row.first),
            last_arrival=None if row.last is None else moment(row.last),
        )
        for row in connection.execute(query)
    ]


def conflict_page(connection: Connection, known: KnownRound, query: ConflictsQuery) -> ConflictPage:
    """Return the conflicts of a round after ``query.after``, each with what is stored for its nonce."""
    same = and_(artifacts.c.slot_id == conflicts.c.slot_id, artifacts.c.nonce == conflicts.c.nonce)
    stored = (artifacts.c.vector.label("stored_vector"), artifacts.c.distance.label("stored_distance"))
    first, second = authors.alias(), authors.alias()
    pods = (second.c.pod.label("pod"), first.c.pod.label("stored_pod"))
    select_ = (
        select(conflicts, slots.c.slot, slots.c.node_id, *stored, *pods)
        .join(slots, slots.c.id == conflicts.c.slot_id)
        .outerjoin(artifacts, same)
        .outerjoin(first, first.c.id == artifacts.c.author)
        .outerjoin(second, second.c.id == conflicts.c.author)
        .where(slots.c.round_id == known.id, conflicts.c.id > (query.after or 0))
        .order_by(conflicts.c.id)
        .limit(query.limit + 1)
    )
    found = connection.execute(select_).mappings().all()
    page = found[: query.limit]
    entries = [_conflict(known.terms, row) for row in page]
    return ConflictPage(conflicts=entries, next=page[-1]["id"] if len(found) > len(page) else None)


def _collected_slot(terms: RoundTerms, row: RowMapping, rivals: list[Rivals]) -> CollectedSlot:
    return CollectedSlot(
        slot=row["slot"],
        stored=row["stored"],
        last_nonce=row["last_nonce"],
        delivered_index=_delivered_index(terms, row),
        duplicates=row["duplicates"],
        conflicts=row["conflicts"],
        forwarded=row["forwarded"],
        rivals=rivals,
    )


def _delivered_index(terms: RoundTerms, row: RowMapping) -> int:
    # Distances are delivered below the target alone: what is missing may have been computed. How far a pod can say
    # that it is, its credential bounds.
    is_distance = terms.protocol is Protocol.DISTANCE
    nonce = row["last_nonce"] if is_distance else row["missing_nonce"]
    return terms.slot(row["slot"]).index(nonce) + is_distance if nonce >= 0 else 0


def _rivals(connection: Connection, slot_ids: Sequence[int]) -> Mapping[int, list[Rivals]]:
    first, second = authors.alias(), authors.alias()
    same = and_(artifacts.c.slot_id == conflicts.c.slot_id, artifacts.c.nonce == conflicts.c.nonce)
    query = (
        select(
            conflicts.c.slot_id,
            first.c.pod.label("kept"),
            second.c.pod.label("other"),
            func.min(conflicts.c.nonce).label("nonce"),
            func.count().label("count"),
        )
        .join(artifacts, same)
        .outerjoin(first, first.c.id == artifacts.c.author)
        .outerjoin(second, second.c.id == conflicts.c.author)
        .where(conflicts.c.slot_id.in_(slot_ids[:MOST_NAMED]))
        .group_by(conflicts.c.slot_id, first.c.pod, second.c.pod)
        .order_by(conflicts.c.slot_id)
    )
    found = dict[int, list[Rivals]]()
    for row in connection.execute(query).mappings() if slot_ids else ():
        of_slot = found.setdefault(row["slot_id"], [])
        if len(of_slot) < MOST_NAMED:
            of_slot.append(Rivals.model_validate(dict(row)))
    return found


def _refused_pods(connection: Connection, round_id: int) -> list[RefusedPod]:
    query = (
        select(slots.c.slot, authors.c.pod, authors.c.refused.label("count"), authors.c.refusal.label("why"))
        .join(slots, slots.c.id == authors.c.slot_id)
        .where(slots.c.round_id == round_id, authors.c.refused > 0)
        .order_by(authors.c.refused.desc())
        .limit(MOST_NAMED)
    )
    return [RefusedPod.model_validate(dict(row)) for row in connection.execute(query).mappings()]


def _collected(
    uid: str, collected: Sequence[CollectedSlot], refused: list[RefusedPod], limit_reached: str | None
) -> CollectedRound:
    return CollectedRound(
        uid=uid,
        stored=sum(slot.stored for slot in collected),
        duplicates=sum(slot.duplicates for slot in collected),
        conflicts=sum(slot.conflicts for slot in collected),
        forwarded=sum(slot.forwarded for slot in collected),
        slots=list(collected),
        refused=refused,
        limit_reached=limit_reached,
    )


def _conflict(terms: RoundTerms, row: RowMapping) -> Conflict:
    name = value_name(terms)
    fields: Mapping[str, Any] = {
        **row,
        "received_at": moment(row["received_at"]),
        **({name: base64_of(row["vector"]), f"stored_{name}": base64_of(row["stored_vector"])} if name else {}),
    }
    return Conflict.model_validate(fields)


def _entries(connection: Connection, found: Sequence[RowMapping]) -> list[RoundEntry]:
    ids = [row["id"] for row in found]
    columns = [func.sum(column).label(column.name) for column in _COUNTERS]
    sums = select(slots.c.round_id, func.count().label("slots"), *columns).group_by(slots.c.round_id)
    totals = {row["round_id"]: row for row in connection.execute(sums.where(slots.c.round_id.in_(ids))).mappings()}
    deaths = _by_key(connection, _dead(slots.c.round_id).where(slots.c.round_id.in_(ids)))
    return [
        RoundEntry.model_validate(
            {
                **row,
                **totals[row["id"]],
                "scheme": scheme_of(Protocol(row["protocol"])),
                "created_at": moment(row["created_at"]),
                **{name: moment(row[name]) for name in _ARCHIVE_MOMENTS if row[name] is not None},
                "dead": deaths.get(row["id"], 0),
            }
        )
        for row in found
    ]


def _by_key(connection: Connection, query: Select[int, int]) -> dict[int, int]:
    return {row[0]: row[1] for row in connection.execute(query)}


def _dead(key: Any) -> Select[int, int]:  # noqa: ANN401 - a column
    counts = select(key, func.count()).join(slots, slots.c.id == late_items.c.slot_id)
    return counts.where(late_items.c.state == "refused").group_by(key)
