# SPDX-License-Identifier: Apache-2.0
"""Starts of the slots that are recorded for a pod but not confirmed by it."""

from collections.abc import Container

from pydantic import AnyHttpUrl

from poc_operator.model.status import Assignment, SlotState
from poc_operator.plan.requests import artifact_params
from poc_operator.plan.snapshot import Snapshot, StartPod, Step
from poc_operator.plan.strays import computed_slots
from vllm_poc.wire.messages import InitGenerateRequest, PowState


def start_pods(snapshot: Snapshot, step: Step) -> Step:
    """Tell every pod whose slot is recorded and unconfirmed, once it is ready and idle and no other computes it."""
    if step.status.stop_time:
        return step
    computed = computed_slots(snapshot)
    starts = [
        StartPod(pod=pod, request=start_request(snapshot, step.status.groups, slot))
        for slot in step.status.assignments
        if slot.state is SlotState.STARTING
        and slot.lost is None
        and (pod := snapshot.pod_of(slot)) is not None
        and pod.ready
        and _may_start(snapshot, slot, computed)
    ]
    return step.extended(actions=starts)


def _may_start(snapshot: Snapshot, slot: Assignment, computed: Container[tuple[int, int]]) -> bool:
    status = snapshot.report_of(slot).status
    idle = status is not None and status.state is not PowState.GENERATING
    return idle and (slot.node, slot.group) not in computed


def start_request(snapshot: Snapshot, groups: int, slot: Assignment) -> InitGenerateRequest:
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
        url=AnyHttpUrl(callback) if callback else None,
        poc_stronger_rng=spec.model.strong_rng,
        r_target=float(spec.r_target) if spec.r_target is not None else None,
        seq_len=spec.model.seq_len if spec.artifact is None else None,
        params=artifact_params(spec),
    )
