# SPDX-License-Identifier: Apache-2.0
"""A cluster as the web page shows it: fleets and rounds of the API server, and what is stored of the rounds."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound
from poc_operator.apis.v1alpha1.meta import API_VERSION
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.support.builders.stored import store

MODEL = "org/model-of-tests"
BLOCK_HASH, HEIGHT, KEY = "5f" * 32, 1_834_072, "02a1b2c3d4e5f60718293a4b5c6d7e8f90"
#: What deliveries for these rounds say of their block.
BLOCK: dict[str, Any] = {"block_hash": BLOCK_HASH, "block_height": HEIGHT, "public_key": KEY, "r_target": 1.4}
_SECONDS_AGO = 1_260


def _began() -> datetime:
    return datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=_SECONDS_AGO)


def _metadata(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "poc",
        "uid": f"{name}-uid",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": _began().isoformat(),
    }


def condition(type_: str, status: str, reason: str, message: str) -> dict[str, Any]:
    """A condition of the operator."""
    told = {"type": type_, "status": status, "reason": reason, "message": message}
    return {**told, "observedGeneration": 1, "lastTransitionTime": _began().isoformat()}


def a_fleet(pods: int = 8, name: str = "glm") -> dict[str, Any]:
    """A fleet whose last pod is loading its model, and whose first has failed its self-check."""
    stages = ["Ready"] * (pods - 1) + ["Loading"]
    finding = "9 of 64 vectors differ from those of the fleet"
    told = [
        {
            "name": f"{name}-{index}",
            "uid": f"{name}-{index}-uid",
            "stage": stage,
            "node": f"gpu-node-{index // 4}",
            "result": "Failed" if index == 0 else "Passed" if stage == "Ready" else "Pending",
            "message": finding if index == 0 else "",
        }
        for index, stage in enumerate(stages)
    ]
    checks = condition("Degraded", "True", "SelfCheckFailed", f"{name}-0: {finding}")
    status = {
        "observedGeneration": 1,
        "replicas": pods,
        "readyReplicas": pods - 1,
        "updatedReplicas": pods,
        "ready": f"{pods - 1}/{pods}",
        "reason": "ReplicasNotReady",
        "message": f"1 of {pods} pods loads its model",
        "model": MODEL,
        "gpuProduct": "NVIDIA-H200",
        "gpuCount": 8,
        "pods": told,
        "conditions": [checks],
    }
    spec = {"model": {"path": MODEL}, "replicas": pods}
    return {
        "apiVersion": API_VERSION,
        "kind": "PoCFleet",
        "metadata": _metadata(name),
        "spec": spec,
        "status": status,
    }


def a_round(
    name: str = "round-41",
    *,
    slots: int = 7,
    delivered: int = 1_000,
    state: str = "Running",
    conditions: Any = (),  # noqa: ANN401 - JSON
    **status: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """A round of the distance protocol, each of whose slots has delivered so much."""
    active = state == "Running"
    assignments = [
        {
            "node": node,
            "state": "Running" if active else "Done",
            "pod": f"glm-{node}",
            "uid": f"glm-{node}-uid",
            "attempts": 1,
            "next": delivered + 16,
            "delivered": delivered,
        }
        for node in range(slots)
    ]
    total = delivered * slots
    told = {
        "observedGeneration": 1,
        "state": state,
        "message": f"{slots if active else 0} of {slots} slots compute",
        "desired": slots,
        "running": slots if active else 0,
        "slots": slots,
        "groups": 1,
        "startTime": _began().isoformat(),
        "totals": {"checked": total, "delivered": total, "valid": total // 9, "rate": f"{total / _SECONDS_AGO:.1f}"},
        "assignments": assignments,
        "conditions": list(conditions),
    }
    spec = {
        "fleetRef": {"name": "glm"},
        "blockHash": BLOCK_HASH,
        "blockHeight": HEIGHT,
        "publicKey": KEY,
        "nodes": {"first": 0, "last": slots - 1, "count": slots},
        "rTarget": "1.4",
        "model": {"name": MODEL, "seqLen": 1024},
        "stop": {"afterSeconds": 1_800},
        "callbackURL": "https://receiver.example",
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "PoCRound",
        "metadata": _metadata(name),
        "spec": spec,
        "status": {**told, **status},
    }


def write(file: Path, *bodies: dict[str, Any]) -> None:
    """Write what the simulated gateway lists; it reads the file whole at each look."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(bodies))
    unfinished.rename(file)


async def fill(database: Database, body: dict[str, Any], results: int) -> KnownRound:
    """Store so many results of a round."""
    return await store(database, PoCRound.parse(body), range(results))


async def trouble(database: Database, known: KnownRound) -> None:
    """Let some results of a round's first slot conflict, be refused and expire."""
    slot, stride = known.slots[0], known.terms.node_count
    now = time.time_ns() // 1_000_000
    late = [("refused", "HTTP 422: r_target is too large", 0), ("expired", "the receiver was away", 1)]
    refused = [
        {"slot_id": slot, "nonce": index * stride, "state": state, "reason": reason, "since": now}
        for state, reason, index in late
    ]
    rival = {"slot_id": slot, "nonce": 2 * stride, "vector": None, "distance": 0.7, "received_at": now}
    mark = schema.slots.update().where(schema.slots.c.id == slot)
    await database.write(
        lambda connection: (
            connection.execute(schema.late_items.insert(), refused),
            connection.execute(schema.conflicts.insert(), rival),
            connection.execute(mark.values(conflicts=1, forwarded=40, forwarded_nonce=42 * stride)),
        )
    )
