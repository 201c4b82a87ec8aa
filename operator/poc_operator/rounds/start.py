# SPDX-License-Identifier: Apache-2.0
"""Starts of the slots that are recorded for a pod and not confirmed by it, and where they begin.

A lost slot begins where the gateway's results end, once the gateway was asked after the loss or has had its time. On
a pod that cannot resume a slot begins anew, whatever ``spec.retry.policy`` says.
"""

from collections.abc import Container
from datetime import datetime

from pydantic import AnyHttpUrl

from poc_operator.apis.v1alpha1.round import Assignment, RetryPolicy
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.basic_auth import BasicAuth
from poc_operator.credentials import Grant
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import StartPod
from poc_operator.rounds.counters import PATIENCE, counted
from poc_operator.rounds.ownership import is_stray
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from poc_operator.rounds.stop import computed_slots, is_of_slot
from vllm_poc.wire.answers import PowState, StatusResponse
from vllm_poc.wire.messages import InitGenerateRequest, Protocol


def catch_up(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Let lost slots begin where the gateway's results end, once it was asked after the loss or has had its time."""
    return step.extended(assignments=[_caught_up(snapshot, slot) for slot in step.status.assignments])


def _caught_up(snapshot: RoundSnapshot, slot: Assignment) -> Assignment:
    if slot.lost is None or slot.state is not SlotState.STARTING or not _knows(snapshot, slot.lost):
        return slot
    if _computes_on(snapshot, slot):
        return slot
    found: dict[str, object] = {"lost": None}
    if snapshot.round.spec.retry.policy is RetryPolicy.RESUME:
        found |= {
            "start": slot.delivered,
            "next": slot.delivered,
            "valid_before": slot.valid,
            "rejected_before": slot.rejected,
        }
        if snapshot.is_whole(slot):
            found["state"] = SlotState.DONE
    return slot.model_copy(update=found)


def _computes_on(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the pod still computes what was lost, and began where it is to begin now: it is told to stop first."""
    status = snapshot.report_of(slot).status
    return (
        status is not None
        and (status.state, status.round_id) == (PowState.GENERATING, snapshot.round.id)
        and is_of_slot(status, slot)
    )


def _knows(snapshot: RoundSnapshot, lost: datetime) -> bool:
    gateway = snapshot.gateway
    if gateway is None or snapshot.now - lost >= PATIENCE:
        return True
    return gateway.asked is not None and gateway.asked > lost


_COUNTERS = ("start", "next", "delivered", "valid", "valid_before", "rejected", "rejected_before")
_BEGINNING = {**dict.fromkeys(_COUNTERS, 0), "end": None}


def rewind(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Let the slots that wait for such a pod's start begin at index 0, and displace nothing once the pod is idle."""
    return step.extended(assignments=[_rewound(snapshot, slot) for slot in step.status.assignments])


def _rewound(snapshot: RoundSnapshot, slot: Assignment) -> Assignment:
    report = snapshot.report_of(slot)
    if slot.state is not SlotState.STARTING or report.resumes:
        return slot
    displaces = slot.displaces and (report.status is None or is_stray(report))
    return counted(snapshot, slot.model_copy(update={**_BEGINNING, "displaces": displaces}))


def start_pods(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Tell every pod whose slot is recorded and unconfirmed, once it is ready and idle and no other computes it."""
    if step.status.stop_time or snapshot.blocked:
        return step
    computed = computed_slots(snapshot)
    starts = [
        _start(snapshot, step.status.groups, slot, pod, slot.start)
        for slot in step.status.assignments
        if slot.state is SlotState.STARTING
        and slot.lost is None
        and (pod := snapshot.pod_of(slot)) is not None
        and pod.ready
        and _may_start(snapshot, slot, computed)
    ]
    return step.extended(actions=starts)


def _start(snapshot: RoundSnapshot, groups: int, slot: Assignment, pod: PodView, reached: int) -> StartPod:
    request = start_request(snapshot, groups, slot)
    if snapshot.gateway is None:
        auth = snapshot.callback_auth
        return StartPod(pod=pod, request=request, auth=auth if isinstance(auth, BasicAuth) else None)
    grant = Grant(
        round=snapshot.round.id,
        slot=request.slot.offset,
        pod=pod.name,
        pod_uid=pod.uid,
        start=reached,
        since=int(snapshot.now.timestamp()),
        rate=snapshot.rate_limit,
    )
    return StartPod(pod=pod, request=request, grant=grant)


def renew_credentials(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Tell the pods again whose credential the gateway does not take, as after its keys were changed, or in a week.

    So are those that have another user or password for the receiver than its Secret has, or may have: a new operator
    does not know. A pod that is told what it computes takes the new address, and computes on.
    """
    if step.status.stop_time or snapshot.blocked:
        return step
    starts = [
        # What the pod says of itself is not believed beyond what it can have computed.
        _start(snapshot, step.status.groups, slot, pod, min(slot.next, snapshot.reach))
        for slot in step.status.assignments
        if slot.state is SlotState.RUNNING
        and (pod := snapshot.pod_of(slot)) is not None
        and (_is_unauthorized(snapshot, slot) or _has_other_auth(snapshot, slot))
    ]
    return step.extended(actions=starts)


def _is_unauthorized(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    status = snapshot.report_of(slot).status
    return status is not None and _computes(slot, status) and status.callback_unauthorized


def _has_other_auth(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether one of our pods was not told what the Secret has now. Others take no repeated start."""
    report, auth = snapshot.report_of(slot), snapshot.callback_auth
    if auth is None or report.told_auth == auth or not report.resumes:
        return False
    return report.status is not None and _computes(slot, report.status)


def _computes(slot: Assignment, status: StatusResponse) -> bool:
    return status.state is PowState.GENERATING and status.session_id == slot.session


def _may_start(snapshot: RoundSnapshot, slot: Assignment, computed: Container[tuple[int, int]]) -> bool:
    status = snapshot.report_of(slot).status
    idle = status is not None and status.state is not PowState.GENERATING
    return idle and (slot.node, slot.group) not in computed


def start_request(snapshot: RoundSnapshot, groups: int, slot: Assignment) -> InitGenerateRequest:
    """Return the pod's order for a slot. The round id makes a repetition harmless."""
    spec = snapshot.round.spec
    callback = snapshot.gateway.callback if snapshot.gateway is not None else spec.callback_url
    return InitGenerateRequest(
        block_hash=spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        batch_size=spec.batch_size,
        node_id=slot.node,
        node_count=spec.nodes.count,
        group_id=slot.group,
        n_groups=groups,
        start_index=slot.start,
        end_index=slot.end,
        round_id=snapshot.round.id,
        lease_seconds=snapshot.lease_seconds,
        url=AnyHttpUrl(callback) if callback else None,
        poc_stronger_rng=spec.model.strong_rng,
        r_target=float(spec.r_target) if spec.r_target is not None else None,
        seq_len=spec.model.seq_len if spec.protocol is Protocol.DISTANCE else None,
        params=spec.artifact_params,
    )
