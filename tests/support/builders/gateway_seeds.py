# SPDX-License-Identifier: Apache-2.0
"""What is stored before the gateway's routes are fuzzed, and deliveries for it."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Insert, Row, Table, select

from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.support.builders.deliveries import R_TARGET, ROUND, a_round, artifacts, distances
from tests.support.builders.gateway_requests import Target
from tests.support.builders.stored import store

_RECEIVER = "http://receiver.example/batches"
#: No request names it.
_APART = a_round("uid-apart", callbackURL=_RECEIVER)
#: Requests are about these. Two are written down, the others only the API server knows.
ROUNDS = [
    a_round("uid-1", callbackURL=_RECEIVER),
    a_round("uid-2", rTarget=str(R_TARGET), nodes=2, of_nodes=3),
    *(a_round(f"uid-{number}", callbackURL=_RECEIVER) for number in range(3, 9)),
]
_DEAD = 3
_REPLAYS: list[Any] = [{}, {"nonces": [_DEAD]}, {"nonces": [1, 2, _DEAD]}, None]
_DECISIONS: list[Any] = [{"nonce": 7, "truth": "stored", "up_to": 1, "pod": "pod-2"}]
_VERDICT = json.dumps(ROUND | {"n_total": 3, "fraud_detected": False}).encode()
_VECTORS = [artifacts([7, 8, 9]), artifacts([30, 29, 31]), artifacts([1]), artifacts([])]
_DISTANCES = [distances([(0, 0.5), (3, 0.25), (31, 1.0)]), distances([(7, 0.1)], node_id=1)]

#: The rows of tables, by name.
Rows = Mapping[str, Sequence[Row[*tuple[Any, ...]]]]


async def read_round(namespace: str, name: str) -> PoCRound | None:
    """Return a PoCRound as the API server would."""
    return next((one for one in ROUNDS if (one.metadata.namespace, one.metadata.name) == (namespace, name)), None)


def targets() -> list[Target]:
    """Return the rounds that requests are about, with bodies for them."""
    return [
        Target(
            {"namespace": "ns", "name": round_.metadata.name, "uid": round_.metadata.uid},
            {
                "/replay": _REPLAYS,
                "/generated": [json.loads(body) for body in generated],
                "/validated": [json.loads(_VERDICT)],
                "/rivals": [{"uid": round_.metadata.uid, "decisions": _DECISIONS}],
            },
        )
        for round_, generated in zip(ROUNDS, (_VECTORS, _DISTANCES, *[_VECTORS] * 6), strict=True)
    ]


async def store_seeds(database: Database) -> None:
    """Store rounds with artifacts, and a dead letter of each that has a receiver."""
    for round_ in (_APART, *ROUNDS[:2]):
        nodes = round_.spec.nodes
        known = await store(database, round_, [nonce for nonce in range(20) if nonce % nodes.count in nodes.ids])
        if round_.spec.callback_url is not None:
            row = {"slot_id": known.slots[0], "nonce": _DEAD, "state": "refused", "reason": "HTTP 400", "since": 1}
            late_item = schema.late_items.insert().values(row)
            await database.write(partial(_insert, late_item=late_item))


def _insert(connection: Connection, late_item: Insert) -> None:
    connection.execute(late_item)


def rows(database: Database, tables: Sequence[Table] = schema.metadata.sorted_tables) -> Rows:
    """Return all rows of the tables."""
    with database.engine.connect() as connection:
        return {
            table.name: connection.execute(select(table).order_by(*table.primary_key.columns)).all() for table in tables
        }


def check_seeds(before: Rows, after: Rows) -> None:
    """Fail unless everything that was stored is still there; what was replayed may have another state."""
    for table in ("rounds", "artifacts"):
        assert set(before[table]) <= set(after[table])
    late_items = {(late_item.slot_id, late_item.nonce) for late_item in after["late_items"]}
    assert {(late_item.slot_id, late_item.nonce) for late_item in before["late_items"]} <= late_items
    # Of the round apart nothing may have changed.
    (apart,) = (round_.id for round_ in before["rounds"] if round_.uid == _APART.metadata.uid)
    (slot,) = (slot for slot in before["slots"] if slot.round_id == apart)
    assert slot in after["slots"]
    (late_item,) = (late_item for late_item in before["late_items"] if late_item.slot_id == slot.id)
    assert late_item in after["late_items"]
