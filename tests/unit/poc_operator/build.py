# SPDX-License-Identifier: Apache-2.0
"""Small builders: a test names only what it is about."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from poc_operator.apis.v1alpha1.calibration import CalibrationSpec, CalibrationStatus, PoCCalibration
from poc_operator.apis.v1alpha1.meta import Metadata
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundSpec, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.apis.v1alpha1.validation import PoCValidation, ValidationSpec, ValidationStatus
from poc_operator.basic_auth import BasicAuth
from poc_operator.leases import LEASE_SECONDS
from poc_operator.observed import CollectedRound, CollectedSlot, GatewayReport, PodReport, PodView
from poc_operator.planning.snapshot import WorkEvent
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from vllm_poc.wire.answers import ModelLimits, PowState, RoundConfig, StatusResponse

WorkT = TypeVar("WorkT", PoCRound, PoCValidation, PoCCalibration)
#: Random histories for each property; `make histories` sets more.
HISTORIES = int(os.environ.get("HISTORIES", "100"))
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
UID = "round-uid"
CALLBACK = "http://pod:secret@gateway:8080/callbacks/ns/r/round-uid"
LABELS = {"poc.gonka.ai/worker": "true"}
_WORK: dict[str, Any] = {
    "blockHash": "ab" * 32,
    "blockHeight": 7,
    "publicKey": "key",
    "model": {"name": "demo", "seqLen": 64},
    "selector": {"matchLabels": LABELS},
}


def a_round(status: RoundStatus | None = None, *, age: int = 10, **spec: Any) -> PoCRound:  # noqa: ANN401
    """A distance round of one node that stops after 100 nonces, changed by ``spec`` (camelCase)."""
    fields = {
        **_WORK,
        "nodes": {"first": 0, "last": 0, "count": 1},
        "rTarget": "1.4",
        "stop": {"afterNonces": 100},
        **spec,
    }
    return PoCRound(
        metadata=metadata(age=age),
        spec=RoundSpec.model_validate({name: value for name, value in fields.items() if value is not None}),
        status=status or RoundStatus(),
    )


def a_validation(status: ValidationStatus | None = None, **spec: Any) -> PoCValidation:  # noqa: ANN401
    """A validation of artifacts whose proofs stand in a ConfigMap, changed by ``spec`` (camelCase)."""
    fields = {**_WORK, "artifact": {"kDim": 4}, "proofs": {"configMap": {"name": "claims"}}, **spec}
    return PoCValidation(
        metadata=metadata(),
        spec=ValidationSpec.model_validate({name: value for name, value in fields.items() if value is not None}),
        status=status or ValidationStatus(),
    )


def a_calibration(status: CalibrationStatus | None = None, **spec: Any) -> PoCCalibration:  # noqa: ANN401
    """A calibration for one valid nonce of ten, changed by ``spec`` (camelCase)."""
    return PoCCalibration(
        metadata=metadata(),
        spec=CalibrationSpec.model_validate({**_WORK, "validRate": "0.1", **spec}),
        status=status or CalibrationStatus(),
    )


def newborn(work: WorkT) -> WorkT:
    """The object as if it was created now: of its deadlines none has passed."""
    created = work.metadata.model_copy(update={"creation_timestamp": datetime.now(UTC)})
    born: WorkT = work.model_copy(update={"metadata": created})
    return born


def metadata(*, age: int = 10) -> Metadata:
    """What the API server says of an object that is so many seconds old."""
    return Metadata(
        name="r",
        namespace="ns",
        uid=UID,
        generation=1,
        resource_version="1",
        creation_timestamp=NOW - timedelta(seconds=age),
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


def a_config(**fields: Any) -> RoundConfig:  # noqa: ANN401
    """What a pod says that it computes: the only slot of `a_round`, changed by ``fields``."""
    defaults: dict[str, Any] = {
        "block_hash": _WORK["blockHash"],
        "block_height": _WORK["blockHeight"],
        "public_key": _WORK["publicKey"],
        "node_id": 0,
        "node_count": 1,
        "group_id": 0,
        "n_groups": 1,
        "seq_len": 64,
        "batch_size": 32,
        "protocol": "distance",
    }
    return RoundConfig.model_validate({**defaults, **fields})


def says(state: PowState = PowState.IDLE, *, session: str = "s1", **fields: Any) -> PodReport:  # noqa: ANN401
    """A report of a pod that serves the model "demo"."""
    computing = state is PowState.GENERATING
    defaults: dict[str, Any] = {
        "status": state,
        "state": state,
        "session_id": session,
        "round_id": UID if computing else None,
        "model": ModelLimits(names=["demo"], max_seq_len=1024, hidden_size=128),
        "leases": True,
        "lease_remaining_seconds": 3000 if computing else None,
    }
    return PodReport(status=StatusResponse(**{**defaults, **fields}))


def a_slot(pod: str | None = "a", state: SlotState = SlotState.RUNNING, **fields: Any) -> Assignment:  # noqa: ANN401
    """A slot that its pod computes in session s1."""
    defaults: dict[str, Any] = {"node": 0, "group": 0, "attempts": 1, "uid": pod, "restarts": 0}
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


def has(*slots: tuple[int, int], asked: float = 0, stride: int | None = None, **fields: Any) -> GatewayReport:  # noqa: ANN401
    """A gateway that has so many results of each slot, up to an index; asked so many seconds after now.

    The round has ``stride`` slots, these or more.
    """
    collected = [
        CollectedSlot(
            slot=slot,
            stored=stored,
            last_nonce=slot + (index - 1) * (stride or len(slots)) if index else -1,
            delivered_index=index,
            duplicates=0,
            conflicts=fields.pop("conflicts", 0),
            forwarded=0,
        )
        for slot, (stored, index) in enumerate(slots)
    ]
    answer = CollectedRound(uid=UID, stored=0, duplicates=0, conflicts=0, forwarded=0, slots=collected)
    return GatewayReport(callback=CALLBACK, collected=answer, asked=NOW + timedelta(seconds=asked), **fields)


def doubts(step: RoundStep) -> list[WorkEvent]:
    """The Events of a step that name a pod which is not believed."""
    return [event for event in step.events if event.reason == Reason.REPORT_CONTRADICTORY]


def look(
    round_: PoCRound,
    *pods: tuple[PodView, PodReport | None],
    after: float = 0,
    gateway: GatewayReport | None = None,
    callback_auth: BasicAuth | str | None = None,
    others: Sequence[tuple[PodView, PodReport]] = (),
    lease_seconds: int = LEASE_SECONDS,
) -> RoundSnapshot:
    """What the operator sees ``after`` seconds; a pod without a report was not polled.

    ``others`` are pods that are not selected and have a slot.
    """
    return RoundSnapshot(
        work=round_,
        pods=[pod for pod, _ in pods],
        reports={pod.uid: report for pod, report in [*pods, *others] if report is not None},
        others=[pod for pod, _ in others],
        find_other_rounds=tuple,
        lease_seconds=lease_seconds,
        now=NOW + timedelta(seconds=after),
        gateway=gateway,
        callback_auth=callback_auth,
    )
