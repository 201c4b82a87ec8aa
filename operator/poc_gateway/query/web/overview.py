# SPDX-License-Identifier: Apache-2.0
"""What the page shows, made of one look: a pure function of what was seen. All of it is JSON, in named sections.

A section that has not changed is not sent again (`feed`). Moments are milliseconds since 1970.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

from poc_gateway.query.web.attention import items
from poc_gateway.query.web.seen import Stored, StoredRound
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import State

#: Rounds that are shown, and slots of all of them together: a message with these has a few hundred KiB.
MOST_ROUNDS, MOST_SLOTS = 40, 4_000
#: How a round that only the database has is shown: its PoCRound was deleted, or cannot be listed.
NO_OBJECT = "NotInCluster"

Sections = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen. ``problems`` say what could not be seen; then the rest is of the look before."""

    now: datetime
    fleets: Sequence[PoCFleet] = ()
    rounds: Sequence[PoCRound] = ()
    stored: Stored | None = None
    disk_full: bool = False
    problems: Sequence[str] = ()


def sections(look: Look, about: Mapping[str, Any]) -> Sections:
    """Return all sections; ``about`` is what is told of the gateway itself."""
    stored = {one.terms.uid: one for one in look.stored.rounds} if look.stored is not None else {}
    objects = {one.metadata.uid: one for one in look.rounds}
    pairs = [(objects.get(uid), stored.get(uid)) for uid in dict.fromkeys((*objects, *stored))]
    pairs.sort(key=lambda pair: (_is_over(pair[0]), -_created(*pair)))
    shown = pairs[:MOST_ROUNDS]
    database = look.stored.bytes if look.stored is not None else None
    told: Sections = {
        "gateway": {
            **about,
            "database_bytes": database,
            "disk_full": look.disk_full,
            "problems": list(look.problems),
            "rounds_left_out": len(pairs) - len(shown),
        },
        "attention": items(
            look.fleets, (one for one, _ in shown if one is not None), look.stored, disk_full=look.disk_full
        ),
        "fleets": [_fleet(one, look.rounds) for one in sorted(look.fleets, key=_place)],
        "rounds": [_round(object_, found, look.now) for object_, found in shown],
    }
    left = MOST_SLOTS
    for object_, found in shown:
        rows = _slots(object_, found)
        if len(rows) <= left:
            left -= len(rows)
            told[f"slots/{_uid(object_, found)}"] = rows
    return told


def _is_over(found: PoCRound | None) -> bool:
    return found is None or found.status.state.finished


def _created(object_: PoCRound | None, found: StoredRound | None) -> float:
    if object_ is not None:
        return object_.metadata.creation_timestamp.timestamp()
    return found.created_at / 1000 if found is not None else 0.0


def _uid(object_: PoCRound | None, found: StoredRound | None) -> str:
    if object_ is not None:
        return object_.metadata.uid
    return found.terms.uid if found is not None else ""


def _place(fleet: PoCFleet) -> tuple[str, str]:
    return fleet.metadata.namespace, fleet.metadata.name


def _fleet(fleet: PoCFleet, rounds: Iterable[PoCRound]) -> dict[str, Any]:
    meta, status, spec = fleet.metadata, fleet.status, fleet.spec
    in_namespace = (one for one in rounds if one.metadata.namespace == meta.namespace)
    shares = chain.from_iterable(((one, slot) for slot in one.status.assignments) for one in in_namespace)
    work = {slot.uid: f"{one.metadata.name} {slot.node}/{slot.group}" for one, slot in shares if slot.state.active}
    return {
        "namespace": meta.namespace,
        "name": meta.name,
        "model": status.model or spec.model.path or spec.model.preset or "",
        "gpu": f"{status.gpu_count} × {status.gpu_product}" if status.gpu_product else "",  # noqa: RUF001 - times
        "ready": status.ready_replicas,
        "replicas": spec.replicas,
        "updated": status.updated_replicas,
        "update": "Paused" if spec.update.paused else str(status.update.phase),
        "reason": status.reason or "Pending",
        "message": status.message,
        "pods": [_pod(one, work.get(one.uid, "")) for one in status.pods],
    }


def _pod(pod: FleetPod, work: str) -> list[str]:
    return [pod.name, str(pod.stage), str(pod.result), pod.node, work, pod.message]


def _round(object_: PoCRound | None, found: StoredRound | None, now: datetime) -> dict[str, Any]:
    return {
        "uid": _uid(object_, found),
        "created": int(1000 * _created(object_, found)),
        **(_of_object(object_, now) if object_ is not None else _of_terms(found)),
        "stored": _of_stored(found) if found is not None else None,
    }


def _of_object(found: PoCRound, now: datetime) -> dict[str, Any]:
    meta, status, totals = found.metadata, found.status, found.status.totals
    share, goal, eta = _goal(found, now)
    return {
        "namespace": meta.namespace,
        "name": meta.name,
        "model": found.spec.model.name,
        "height": found.spec.block_height,
        "state": str(status.state) if meta.deletion_timestamp is None else "Deleting",
        "over": status.state.finished,
        "message": status.message,
        "degraded": status.degraded,
        "running": status.running,
        "desired": status.desired,
        "checked": totals.checked,
        "valid": totals.valid,
        "delivered": totals.delivered,
        "rate": _number(totals.rate),
        "share": share,
        "goal": goal,
        "eta_seconds": eta,
    }


def _of_terms(found: StoredRound | None) -> dict[str, Any]:
    assert found is not None  # noqa: S101 - one of the two is there
    terms = found.terms
    nothing = dict.fromkeys(("running", "desired", "checked", "valid", "delivered", "rate", "share", "eta_seconds"))
    known = {"namespace": terms.namespace, "name": terms.name, "model": terms.model, "height": terms.block_height}
    message = "Its results are here, and its PoCRound is not known."
    return {**nothing, **known, "state": NO_OBJECT, "over": True, "message": message, "degraded": "", "goal": ""}


def _of_stored(found: StoredRound) -> dict[str, Any]:
    heard = max((row["heard_at"] for row in found.slots), default=0)
    return {
        "results": found.sum("stored"),
        "duplicates": found.sum("duplicates"),
        "conflicts": found.sum("conflicts"),
        "undecided": found.undecided,
        "receiver": found.terms.receiver is not None,
        **found.sent._asdict(),
        "heard": heard or None,
    }


def _goal(found: PoCRound, now: datetime) -> tuple[float | None, str, int | None]:
    """Return how much of its goal a round has reached, the goal in words, and after how many seconds it will have."""
    status, stop = found.status, found.spec.stop
    if stop is None:
        return None, "until it is finished", None
    rate = _number(status.totals.rate)
    if stop.after_seconds is not None:
        wanted: float = stop.after_seconds
        got, words = _worked(found, now), f"{stop.after_seconds} s"
        rate = 1.0
    elif stop.after_nonces:
        wanted, got, words = stop.after_nonces, float(status.totals.delivered), f"{stop.after_nonces:,} nonces"
    else:
        wanted, got = stop.after_valid or 1, float(status.totals.valid)
        words = f"{wanted:,} valid nonces"
        rate *= got / max(1, status.totals.delivered)
    share = 1.0 if status.state is State.COMPLETE else min(1.0, got / wanted)
    left = int(max(0.0, wanted - got) / rate) if rate > 0 and status.state is State.RUNNING else None
    return round(share, 4), words, left


def _worked(found: PoCRound, now: datetime) -> float:
    status = found.status
    if status.start_time is None:
        return 0.0
    return ((status.stop_time or now) - status.start_time).total_seconds()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _slots(object_: PoCRound | None, found: StoredRound | None) -> list[list[Any]]:
    """Return the rows: slot, node, group, state, pod, delivered, stored, forwarded, conflicts, attempts, error.

    A number that nobody has told is null.
    """
    stored = {(row["node_id"], row["group_id"]): row for row in found.slots} if found is not None else {}
    told = {(one.node, one.group): one for one in object_.status.assignments} if object_ is not None else {}
    return [_slot(key, told.get(key), stored.get(key)) for key in sorted({*told, *stored})]


def _slot(key: tuple[int, int], told: Assignment | None, row: Mapping[Any, Any] | None) -> list[Any]:
    columns = ("stored", "forwarded", "conflicts")
    return [
        *key,
        str(told.state) if told is not None else "",
        (told.pod or "") if told is not None else "",
        told.delivered if told is not None else None,
        *(row[name] if row is not None else None for name in columns),
        told.attempts if told is not None else None,
        (told.error or "") if told is not None else "",
    ]
