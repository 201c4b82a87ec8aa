# SPDX-License-Identifier: Apache-2.0
"""Small builders: a test names only what it is about."""

from datetime import UTC, datetime, timedelta
from typing import Any

from poc_operator.model.round import Metadata, Round
from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import Assignment, RoundStatus, SlotState
from poc_operator.observed.gateway import CollectedRound, CollectedSlot, GatewayReport
from poc_operator.observed.pods import PodReport, PodView
from poc_operator.rounds.snapshot import Snapshot
from vllm_poc.wire.messages import ModelLimits, PowState, StatusResponse

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
UID = "round-uid"
CALLBACK = "http://pod:secret@gateway:8080/callbacks/ns/r/round-uid"
LABELS = {"poc.gonka.ai/worker": "true"}


def a_round(status: RoundStatus | None = None, *, age: int = 10, **spec: Any) -> Round:  # noqa: ANN401
    """A distance round of one node that stops after 100 nonces, changed by ``spec`` (camelCase)."""
    fields = {
        "blockHash": "ab" * 32,
        "blockHeight": 7,
        "publicKey": "key",
        "nodes": {"first": 0, "last": 0, "count": 1},
        "rTarget": "1.4",
        "model": {"name": "demo", "seqLen": 64},
        "selector": {"matchLabels": LABELS},
        "stop": {"afterNonces": 100},
        **spec,
    }
    return Round(
        metadata=Metadata(
            name="r",
            namespace="ns",
            uid=UID,
            generation=1,
            resource_version="1",
            creation_timestamp=NOW - timedelta(seconds=age),
        ),
        spec=RoundSpec.model_validate({name: value for name, value in fields.items() if value is not None}),
        status=status or RoundStatus(),
    )


def a_pod(name: str, **fields: Any) -> PodView:  # noqa: ANN401
    """A ready pod whose uid is its name."""
    defaults: dict[str, Any] = {
        "uid": name,
        "namespace": "ns",
        "labels": LABELS,
        "ip": "10.0.0.1",
        "ready": True,
    }
    return PodView(name=name, **{**defaults, **fields})


def says(state: PowState = PowState.IDLE, *, session: str = "s1", **fields: Any) -> PodReport:  # noqa: ANN401
    """A report of a pod that serves the model "demo"."""
    computing = state is PowState.GENERATING
    defaults: dict[str, Any] = {
        "status": state,
        "state": state,
        "session_id": session,
        "round_id": UID if computing else None,
        "model": ModelLimits(names=["demo"], max_seq_len=1024, hidden_size=128),
    }
    return PodReport(status=StatusResponse(**{**defaults, **fields}))


def a_slot(pod: str | None = "a", state: SlotState = SlotState.RUNNING, **fields: Any) -> Assignment:  # noqa: ANN401
    """A slot that its pod computes in session s1."""
    defaults: dict[str, Any] = {"node": 0, "group": 0, "attempts": 1, "uid": pod}
    if state is SlotState.RUNNING:
        defaults["session"] = "s1"
    return Assignment(pod=pod, state=state, **{**defaults, **fields})


def a_status(*slots: Assignment, **fields: Any) -> RoundStatus:  # noqa: ANN401
    """The status of a round that started 5 s ago with these slots."""
    defaults: dict[str, Any] = {
        "slots": len(slots),
        "groups": len(slots),
        "assignments": list(slots),
        "start_time": NOW - timedelta(seconds=5),
    }
    return RoundStatus(**{**defaults, **fields})


def has(*slots: tuple[int, int], asked: float = 0, **fields: Any) -> GatewayReport:  # noqa: ANN401
    """A gateway that has so many results of each slot, up to an index; asked so many seconds after now."""
    collected = [
        CollectedSlot(
            slot=slot,
            stored=stored,
            last_nonce=index - 1,
            delivered_index=index,
            duplicates=0,
            conflicts=fields.pop("conflicts", 0),
            forwarded=0,
        )
        for slot, (stored, index) in enumerate(slots)
    ]
    answer = CollectedRound(uid=UID, stored=0, duplicates=0, conflicts=0, forwarded=0, slots=collected)
    return GatewayReport(callback=CALLBACK, collected=answer, asked=NOW + timedelta(seconds=asked), **fields)


def look(
    round_: Round,
    *pods: tuple[PodView, PodReport | None],
    after: float = 0,
    gateway: GatewayReport | None = None,
) -> Snapshot:
    """What the operator sees ``after`` seconds; a pod without a report was not polled."""
    return Snapshot(
        round=round_,
        pods=[pod for pod, _ in pods],
        reports={pod.uid: report for pod, report in pods if report is not None},
        now=NOW + timedelta(seconds=after),
        gateway=gateway,
    )
