# SPDX-License-Identifier: Apache-2.0
"""The cluster's state, in the words of the network's node and in those of a single pod."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from poc_gateway.network.cluster import Backend as ReadyPod
from poc_gateway.network.messages import FIRST_PORT, Backend, NodeStatus, PodStatus
from poc_gateway.network.rounds import waits_for_operator
from poc_operator.model.round import Round
from poc_operator.observed.pods import PodView
from vllm_poc.wire.messages import Protocol, RoundConfig, RoundStats

Overall = Literal["GENERATING", "MIXED", "IDLE"]


def overall(round_: Round | None) -> Overall:
    """GENERATING if every slot has a pod that computes it, MIXED if some have."""
    slots = round_.status.assignments if round_ is not None else []
    active = sum(slot.state.active for slot in slots)
    if not active:
        return "IDLE"
    return "GENERATING" if active == len(slots) else "MIXED"


def backends(pods: Sequence[PodView], status: dict[str, str] | str) -> list[Backend]:
    """Number the pods; their status is one for all, or by uid where it is not IDLE."""
    words = [status if isinstance(status, str) else status.get(pod.uid, "IDLE") for pod in pods]
    return [Backend(port=FIRST_PORT + place, status=word) for place, word in enumerate(words)]


def node_status(round_: Round | None, pods: Sequence[PodView]) -> NodeStatus:
    """Return the node's status."""
    slots = round_.status.assignments if round_ is not None else []
    generating = {slot.uid: "GENERATING" for slot in slots if slot.uid is not None and slot.state.active}
    return NodeStatus(
        status=overall(round_) if pods else "NO_BACKENDS",
        backends=backends(pods, generating),
        detail=note(round_, pods),
    )


def note(round_: Round | None, pods: Sequence[PodView]) -> str | None:
    """Say what keeps the round from being computed, as far as the network can do nothing about it."""
    if round_ is None:
        return None
    if (unseen := waits_for_operator(round_)) is not None:
        return unseen
    return None if pods else f"round {round_.metadata.name} waits: no pod is ready"


def pod_status(round_: Round | None, pods: Sequence[PodView]) -> PodStatus:
    """Return the status of the whole as a single pod's."""
    computing = overall(round_) != "IDLE"
    word: Literal["GENERATING", "IDLE"] = "GENERATING" if computing else "IDLE"
    if round_ is None:
        return PodStatus(status=word, stats=RoundStats(), state=word)
    totals, rate = round_.status.totals, float(round_.status.totals.rate)
    return PodStatus(
        status=word,
        config=_config(round_) if computing else None,
        stats=RoundStats(total_processed=totals.checked, nonces_per_second=rate),
        state=word,
        total_checked=totals.checked,
        total_valid=totals.valid,
        elapsed_seconds=_elapsed(round_),
        rate_per_second=rate,
        r_target=float(round_.spec.r_target) if round_.spec.r_target is not None else None,
        detail=note(round_, pods),
    )


def _elapsed(round_: Round) -> float:
    start = round_.status.start_time
    return max(0.0, (datetime.now(UTC) - start).total_seconds()) if start is not None else 0.0


def _config(round_: Round) -> RoundConfig:
    spec = round_.spec
    return RoundConfig(
        block_hash=spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        node_id=spec.nodes.first,
        node_count=spec.nodes.count,
        group_id=0,
        n_groups=round_.status.groups,
        seq_len=spec.model.seq_len,
        k_dim=spec.artifact.k_dim if spec.artifact is not None else None,
        protocol=spec.protocol,
        model=spec.model.name,
        batch_size=spec.batch_size,
        url=spec.callback_url,
        poc_stronger_rng=spec.model.strong_rng,
        use_layer_hooks=spec.protocol is Protocol.ARTIFACT,
        use_sign_flips=spec.protocol is Protocol.DISTANCE,
    )


def service_state(round_: Round | None, pods: Sequence[ReadyPod]) -> dict[str, Any]:
    """Return a node state's fields: POW while a pod computes a round, INFERENCE while pods answer, else STOPPED."""
    answering = any(pod.status is not None for pod in pods)
    status = node_status(round_, [pod.pod for pod in pods]).status
    serving = "INFERENCE" if answering else "STOPPED"
    state = "POW" if status in ("GENERATING", "MIXED") else serving
    return {"state": state, "poc_status": status, "inference_healthy": answering}


def unstopped(round_: Round) -> str:
    """Say why a stopped round has yet to end."""
    name, status = round_.metadata.name, round_.status
    if status.observed_generation < round_.metadata.generation:
        return f"round {name} was told to end, but the operator has not picked that up yet: look whether it runs"
    return f"round {name} is {status.state} and will end by itself: {status.message or 'its results are flushed'}"
