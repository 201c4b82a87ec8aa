# SPDX-License-Identifier: Apache-2.0
"""The area of rounds: start one, stop it, tell how it stands.

Twice: in the words of the network's node (``/api/v1/inference/pow``), and in those of a single pod (``/api/v1/pow``).
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter

from poc_gateway.errors import Refusal, documented
from poc_gateway.node_api.base_url import Service
from poc_gateway.node_api.cluster import ReadyPod
from poc_gateway.node_api.create_pocround import waits_for_operator
from poc_gateway.node_api.messages import (
    FIRST_PORT,
    Backend,
    BackendFailure,
    BackendStatus,
    FanOut,
    NetworkInit,
    NodeStatus,
    PodCommand,
    PodStatus,
    PowVersions,
)
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import PodView
from vllm_poc.wire.answers import PowState, RoundConfig, RoundStats
from vllm_poc.wire.messages import Protocol, scheme_of

Overall = Literal["GENERATING", "MIXED", "IDLE"]

#: What keeps a body from being taken on.
CHANGES = documented(409, 422)

node, pod = APIRouter(), APIRouter()


@node.post("/init/generate", responses=CHANGES, response_model_exclude_none=True)
async def node_init_generate(body: NetworkInit, service: Service) -> FanOut:
    """Let the cluster generate; a repeat with the same content changes nothing."""
    round_, pods = await service.init_generate(body)
    groups = round_.status.groups or round_.spec.nodes.groups or len(pods)
    return fan_out(pods, backends=len(pods), n_groups=groups, detail=note(round_, pods))


@node.post("/stop", response_model_exclude_none=True)
async def node_stop(service: Service) -> FanOut:
    """End the round and wait until its results are flushed. Queued work goes on."""
    return stopped(*await service.stop())


@node.get("/status", response_model_exclude_none=True)
async def get_node_status(service: Service) -> NodeStatus:
    """Tell what the pods do, and how fast each computes its slot."""
    return node_status(*await service.observe())


@node.get("/versions", responses=documented(503), response_model_exclude_none=True)
@pod.get("/versions", responses=documented(503), response_model_exclude_none=True)
async def get_versions(service: Service) -> PowVersions:
    """Tell what runs in the pods, and what all of them offer, as a pod does."""
    versions = await service.versions()
    if versions.vllm_version is None:
        detail = "no ready pod tells what runs in it: wait for one, or look at the pods"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NoBackends", detail, headers={"Retry-After": "10"})
    return PowVersions.model_validate(versions.model_dump(exclude={"version"}))


@pod.post("/init/generate", responses=CHANGES, response_model_exclude_none=True)
async def pod_init_generate(body: NetworkInit, service: Service) -> PodCommand:
    """Let the cluster generate; a repeat with the same content changes nothing."""
    return pod_command(PowState.GENERATING, note(*await service.init_generate(body)))


@pod.post("/stop", response_model_exclude_none=True)
async def pod_stop(service: Service) -> PodCommand:
    """End the round and wait until its results are flushed. Queued work goes on."""
    left, _ = await service.stop()
    return pod_command(PowState.STOPPED, unstopped(left))


@pod.get("/status")
async def get_pod_status(service: Service) -> PodStatus:
    """Tell what the cluster does, as if it was one pod."""
    return pod_status(await service.rounds.active(), await service.pods.ready())


def overall(round_: PoCRound | None) -> Overall:
    """GENERATING if every slot has a pod that computes it, MIXED if some have."""
    slots = round_.status.assignments if round_ is not None else []
    active = sum(slot.state.active for slot in slots)
    if not active:
        return "IDLE"
    return "GENERATING" if active == len(slots) else "MIXED"


def backends(pods: Sequence[PodView], status: str) -> list[Backend]:
    """Number the pods, which have one status."""
    return [Backend(port=FIRST_PORT + place, status=status) for place, _ in enumerate(pods)]


def node_status(round_: PoCRound | None, found: Sequence[ReadyPod]) -> NodeStatus:
    """Return the node's status. A pod that computes something else than the round is idle for the network."""
    slots = round_.status.assignments if round_ is not None else []
    generating = {slot.uid for slot in slots if slot.uid is not None and slot.state.active}
    return NodeStatus(
        status=overall(round_) if found else "NO_BACKENDS",
        backends=[
            _backend(FIRST_PORT + place, one, generates=one.pod.uid in generating) for place, one in enumerate(found)
        ],
        detail=note(round_, [one.pod for one in found]),
    )


def _backend(port: int, found: ReadyPod, *, generates: bool) -> BackendStatus:
    if not generates:
        return BackendStatus(port=port, status="IDLE")
    stats = (found.status.stats if found.status is not None else None) or RoundStats()
    return BackendStatus(port=port, status="GENERATING", nonces_per_second=stats.nonces_per_second, stats=stats)


def note(round_: PoCRound | None, pods: Sequence[PodView]) -> str | None:
    """Say what keeps the round from being computed, as far as the network can do nothing about it."""
    if round_ is None:
        return None
    if (unseen := waits_for_operator(round_)) is not None:
        return unseen
    return None if pods else f"round {round_.metadata.name} waits: no pod is ready"


def pod_status(round_: PoCRound | None, pods: Sequence[PodView]) -> PodStatus:
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


def _elapsed(round_: PoCRound) -> float:
    start = round_.status.start_time
    return max(0.0, (datetime.now(UTC) - start).total_seconds()) if start is not None else 0.0


def _config(round_: PoCRound) -> RoundConfig:
    spec, params = round_.spec, round_.spec.artifact_params
    return RoundConfig(
        block_hash=spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        node_id=spec.nodes.first,
        node_count=spec.nodes.count,
        group_id=0,
        n_groups=round_.status.groups,
        seq_len=spec.model.seq_len,
        k_dim=None if params is None else params.k_dim,
        protocol=spec.protocol,
        scheme=scheme_of(spec.protocol),
        max_tokens=params.max_tokens if params is not None and params.decodes else None,
        model=spec.model.name,
        batch_size=spec.batch_size,
        url=spec.callback_url,
        poc_stronger_rng=spec.model.strong_rng,
        use_layer_hooks=spec.protocol is not Protocol.DISTANCE,
        use_sign_flips=spec.protocol is Protocol.DISTANCE,
    )


def unstopped(round_: PoCRound | None) -> str | None:
    """Say why a stopped round has yet to end; None if there is none."""
    if round_ is None:
        return None
    name, status = round_.metadata.name, round_.status
    if status.observed_generation < round_.metadata.generation:
        return f"round {name} was told to end, but the operator has not picked that up yet: look whether it runs"
    return f"round {name} is {status.state} and will end by itself: {status.message or 'its results are flushed'}"


def fan_out(pods: Sequence[PodView], **fields: Any) -> FanOut:  # noqa: ANN401 - fields of FanOut
    """Return the node's answer to a call that changed the state of these pods."""
    return FanOut(results=backends(pods, "OK"), **fields)


def stopped(left: PoCRound | None, pods: Sequence[PodView]) -> FanOut:
    """Return the node's answer to a stop; what is left to be done is an error of the first pod."""
    detail = unstopped(left)
    errors = [BackendFailure(port=FIRST_PORT, error=detail)] if detail else []
    return fan_out(pods, errors=errors, detail=detail)


def pod_command(state: PowState, detail: str | None) -> PodCommand:
    """Return a pod's answer to a call that changed its state."""
    return PodCommand(pow_status={"status": state}, detail=detail)
