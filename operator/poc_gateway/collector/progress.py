# SPDX-License-Identifier: Apache-2.0
"""What is stored of a round, for the operator."""

from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, select

from poc_gateway.rounds.registry import terms_of
from poc_gateway.rounds.terms import RoundTerms
from poc_gateway.store import schema
from poc_operator.observed.gateway import CollectedRound, CollectedSlot


def progress(connection: Connection, namespace: str, name: str, uid: str | None) -> CollectedRound | None:
    """Return what is stored of the round, without a ``uid`` of the newest of its name; None if nothing ever was."""
    rounds = schema.rounds.c
    named = select(schema.rounds).where(rounds.namespace == namespace, rounds.name == name, schema.ROUND_IS_KEPT)
    if uid is not None:
        named = named.where(rounds.uid == uid)
    row = connection.execute(named.order_by(rounds.id.desc()).limit(1)).mappings().first()
    if row is None:
        return None
    query = select(schema.slots).where(schema.slots.c.round_id == row["id"]).order_by(schema.slots.c.slot)
    terms = terms_of(row)
    return _sum(terms.uid, [_slot(terms, slot) for slot in connection.execute(query).mappings()])


def _slot(terms: RoundTerms, row: RowMapping) -> CollectedSlot:
    last = row["last_nonce"]
    return CollectedSlot(
        slot=row["slot"],
        stored=row["stored"],
        last_nonce=last,
        delivered_index=terms.slot(row["slot"]).index(last) + 1 if last >= 0 else 0,
        duplicates=row["duplicates"],
        conflicts=row["conflicts"],
        forwarded=row["forwarded"],
    )


def _sum(uid: str, slots: Sequence[CollectedSlot]) -> CollectedRound:
    return CollectedRound(
        uid=uid,
        stored=sum(slot.stored for slot in slots),
        duplicates=sum(slot.duplicates for slot in slots),
        conflicts=sum(slot.conflicts for slot in slots),
        forwarded=sum(slot.forwarded for slot in slots),
        slots=list(slots),
    )
