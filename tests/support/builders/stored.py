# SPDX-License-Identifier: Apache-2.0
"""Rounds and artifacts that are written into a database without a pod that delivers them."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from sqlalchemy import Connection

from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, write_down
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.support.builders.deliveries import vector

#: When the artifact of nonce 0 arrived; every other one came a millisecond per nonce later.
BEGAN = 1_767_225_600_000
BEGAN_TEXT = "2026-01-01T00:00:00"


def distance(nonce: int) -> float:
    """A distance below 1.4 that few other nonces have."""
    return (nonce * 7919 % 1399) / 1000 + 1e-9


async def store(database: Database, round_: PoCRound, nonces: Iterable[int]) -> KnownRound:
    """Write the round down with an artifact for each of ``nonces``."""

    def write(connection: Connection) -> KnownRound:
        known = write_down(connection, round_)
        by_slot = dict[int, list[Mapping[str, Any]]]()
        for nonce in sorted(nonces):
            slot_id = known.slots[known.terms.offset_of(nonce)]
            by_slot.setdefault(slot_id, []).append(row(known, slot_id, nonce))
        for slot_id, rows in by_slot.items():
            connection.execute(schema.artifacts.insert(), rows)
            stride, known_nonces = known.terms.node_count * known.terms.n_groups, {one["nonce"] for one in rows}
            missing = next(
                nonce for nonce in count(known.terms.offset_of(rows[0]["nonce"]), stride) if nonce not in known_nonces
            )
            counts = {"stored": len(rows), "last_nonce": rows[-1]["nonce"], "missing_nonce": missing}
            connection.execute(schema.slots.update().where(schema.slots.c.id == slot_id).values(**counts))
        return known

    return await database.write(write)


def row(known: KnownRound, slot_id: int, nonce: int) -> Mapping[str, Any]:
    """A row of ``artifacts``."""
    value: Mapping[str, Any]
    if known.terms.k_dim is None:
        value = {"vector": None, "distance": distance(nonce)}
    else:
        value = {"vector": vector(nonce, known.terms.k_dim), "distance": None}
    return {"slot_id": slot_id, "nonce": nonce, "received_at": BEGAN + nonce, **value}
