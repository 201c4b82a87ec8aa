# SPDX-License-Identifier: Apache-2.0
"""Where each pod of a fleet is on its way to serving, and the list of pods in the fleet's status.

A stage is what the kubelet and the scheduler tell, and no more: whether vLLM downloads weights, reads them or compiles
is not to be seen from outside, so all of that is Loading.
"""

from collections.abc import Mapping, Sequence

from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod, Stage
from poc_operator.fleets.update import in_order
from poc_operator.observed import PodView
from poc_operator.planning.eligibility import named

#: What pods wait for that passes by itself.
PASSING = frozenset(
    {"", "ContainersNotReady", "ContainerCreating", "PodInitializing", "Pending", "PodReadyToStartContainers"}
)


def stage_of(pod: PodView, port: int) -> Stage:
    """Return the stage of a pod whose server listens on ``port``."""
    if pod.ready:
        return Stage.READY
    server = pod.container(port)
    if server.running_since is not None and not server.ended:
        return Stage.NOT_READY if server.started else Stage.LOADING
    if not pod.node:
        return Stage.PENDING
    if cannot_run(pod):
        return Stage.FAILING
    return Stage.PULLING if pod.sandboxed and pod.waiting_for == "ContainerCreating" else Stage.CREATING


def cannot_run(pod: PodView) -> bool:
    """Whether the pod waits for something that does not pass by itself, as a Kubernetes node that has room."""
    return not pod.ready and pod.waiting_for not in PASSING


def stages_of(pods: Sequence[PodView], port: int) -> str:
    """Name the first pods, each with its stage and why it stays there."""
    return named(pods, lambda pod: _state(pod, port))


def _state(pod: PodView, port: int) -> str:
    stage = stage_of(pod, port)
    why = pod.waiting_for if cannot_run(pod) else ""
    last_end = pod.container(port).last_end
    ended = f"last ended with {last_end}" if last_end else ""
    return "; ".join(text for text in (why or stage.value, ended) if text)


def with_stages(
    entries: Sequence[FleetPod],
    old: Sequence[FleetPod],
    pods: Sequence[PodView],
    port: int,
    memory_errors: Mapping[str, int],
) -> list[FleetPod]:
    """Return the entries of these pods, in the order of their numbers, with their stages and what their GPUs tell.

    ``old`` are the entries of before, and ``memory_errors`` those of the GPUs, by the pod's uid, as far as they are
    known.
    """
    known, before = {entry.uid: entry for entry in entries}, {entry.uid: entry for entry in old}
    return [
        _entry(known[pod.uid], before.get(pod.uid), pod, port, memory_errors.get(pod.uid))
        for pod in sorted(pods, key=in_order)
    ]


def _entry(entry: FleetPod, before: FleetPod | None, pod: PodView, port: int, errors: int | None) -> FleetPod:
    last = before.memory_errors if before is not None else None
    first = before.memory_errors_before if before is not None else None
    return entry.model_copy(
        update={
            "stage": stage_of(pod, port),
            "node": pod.node,
            # Of the GPUs, whichever server runs on them.
            "memory_errors": last if errors is None else errors,
            "memory_errors_before": errors if first is None else first,
        }
    )
