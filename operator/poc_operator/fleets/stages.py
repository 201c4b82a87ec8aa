# SPDX-License-Identifier: Apache-2.0
"""Where each pod of a fleet is on its way to serving, why one does not get there, and the list of pods in the status.

A stage is what the kubelet and the scheduler tell, and no more: whether vLLM downloads weights, reads them or compiles
is not to be seen from outside, so all of that is Loading. A pod that serves and has yet to be checked is Checking: it
takes part in chat alone.

What a pod with a new template meets decides whether the template is good. A Kubernetes node whose kubelet is away says
nothing of it, and neither do pods there: one that the kubelet has not taken, or whose containers ended with the node.
So time and restarts count from when the pod has a kubelet that is well. Of a pod that was ready before, they count
from when it stopped being ready: what it recovered from tells nothing of the template. Where the operator may not read
nodes, only what the pod itself tells counts. A node that cannot pull images looks like a template with a wrong one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, FleetPod, Stage
from poc_operator.observed import Container, PodView
from poc_operator.planning.eligibility import named, why_waiting
from poc_operator.planning.snapshot import in_order
from vllm_poc.wire.answers import Gpu

#: What pods wait for that passes by itself.
PASSING = frozenset(
    {"", "ContainersNotReady", "ContainerCreating", "PodInitializing", "Pending", "PodReadyToStartContainers"}
)
#: What keeps a pod from running and does not pass by itself, in the kubelet's words.
_HOPELESS = {
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
#: Those of them that a person has to end: a crash may be the last one, and a container runtime may recover.
_UNSTARTABLE = _HOPELESS - {"CrashLoopBackOff", "CreateContainerError", "RunContainerError"}
#: Seconds that a kubelet has had the pod from which on this counts: a registry may be away for a moment.
PATIENCE_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class GpuErrors:
    """Errors of a pod's GPUs; None is what they do not count.

    ``memory`` are double-bit errors over the GPUs' lives. ``xids`` are Xid errors that no program caused, since the
    pod's server was first asked, and ``last_xid`` is the number of one of the last.
    """

    memory: int | None = None
    xids: int | None = None
    last_xid: int | None = None

    @classmethod
    def of(cls, devices: Iterable[Gpu]) -> "GpuErrors":
        """Sum up the GPUs of a pod."""
        gpus = list(devices)
        numbers = [gpu.last_xid for gpu in gpus if gpu.last_xid is not None]
        return cls(
            memory=_sum(gpu.ecc_double_bit_errors for gpu in gpus),
            xids=_sum(gpu.xid_errors for gpu in gpus),
            last_xid=numbers[-1] if numbers else None,
        )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


@dataclass(frozen=True, kw_only=True)
class KubernetesNode:
    """Whether the kubelet of a Kubernetes node is well, since when that is so, and whether it takes no new pods."""

    ready: bool
    since: datetime | None = None
    cordoned: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read the API server's JSON. A node that says nothing yet is not ready."""
        status, cordoned = body.get("status") or {}, bool((body.get("spec") or {}).get("unschedulable"))
        found: Mapping[str, Any] = next((one for one in status.get("conditions") or [] if one["type"] == "Ready"), {})
        since = datetime.fromisoformat(told) if (told := found.get("lastTransitionTime")) else None
        return cls(ready=found.get("status") == "True", since=since, cordoned=cordoned)


#: Kubernetes nodes by name, as far as they are known.
Nodes = Mapping[str, KubernetesNode]


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
    why = why_waiting(pod) if cannot_run(pod) else ""
    last_end = pod.container(port).last_end
    ended = f"last ended with {last_end}" if last_end else ""
    return "; ".join(text for text in (why or stage.value, ended) if text)


def node_fault(pod: PodView, nodes: Nodes) -> str:
    """Say why a pod that is not ready waits for its Kubernetes node; empty if it does not, or has none yet."""
    if pod.ready or not pod.node:
        return ""
    if is_on_lost_node(pod, nodes):
        return f"Kubernetes node {pod.node} is not ready"
    return "" if pod.taken else f"the kubelet of {pod.node} has not taken it yet"


def is_on_lost_node(pod: PodView, nodes: Nodes) -> bool:
    """Whether a pod has a Kubernetes node that is not ready."""
    known = nodes.get(pod.node)
    return known is not None and not known.ready


def is_hopeless(pod: PodView, nodes: Nodes, now: datetime) -> bool:
    """Whether a pod that is not ready cannot run, and that does not pass by itself."""
    if pod.waiting_for == "CrashLoopBackOff":
        return True
    since = _begun(pod, nodes)
    return pod.waiting_for in _HOPELESS and since is not None and now - since >= timedelta(seconds=PATIENCE_SECONDS)


def is_stuck(pod: PodView, nodes: Nodes, now: datetime) -> bool:
    """Whether a pod does not come up before a person has changed something, as its image or a Secret that it names."""
    return pod.waiting_for in _UNSTARTABLE and not node_fault(pod, nodes) and is_hopeless(pod, nodes, now)


def is_late(pod: PodView, nodes: Nodes, now: datetime, limit: int) -> bool:
    """Whether a pod is not ready although it should have come up more than ``limit`` seconds ago."""
    since = _begun(pod, nodes)
    waits = pod.ready or node_fault(pod, nodes)
    return not waits and since is not None and now - since > timedelta(seconds=limit)


def is_homeless(pod: PodView, now: datetime) -> bool:
    """Whether a pod has had no Kubernetes node for so long that it may never get one."""
    return not pod.node and pod.created is not None and now - pod.created >= timedelta(seconds=PATIENCE_SECONDS)


def why_not_ready(pod: PodView, nodes: Nodes, now: datetime) -> str:
    """Say in a few words why a pod is not ready."""
    cannot = is_hopeless(pod, nodes, now) or (not pod.node and cannot_run(pod))
    return node_fault(pod, nodes) or (why_waiting(pod) if cannot else "not ready")


def why_not_running(pod: PodView, nodes: Nodes, now: datetime, limit: int) -> str | None:
    """Say why the template of a pod is not good, which is to be ready within ``limit`` seconds; None if it may be."""
    if pod.ready or node_fault(pod, nodes):
        return None
    if is_hopeless(pod, nodes, now) or _has_ended(pod, nodes):
        return f"pod {pod.name} cannot run ({why_waiting(pod) or 'its container has ended'})"
    # Without a Kubernetes node it waits for one.
    if pod.node and is_late(pod, nodes, now, limit):
        return f"pod {pod.name} was not ready within {limit} s ({why_waiting(pod) or 'not ready'})"
    return None


def _begun(pod: PodView, nodes: Nodes) -> datetime | None:
    """Return since when the pod should come up, as far as it is known.

    It should since it has a kubelet that is well. One that was ready should since it no longer is.
    """
    known = nodes.get(pod.node)
    well = known.since if known is not None else None
    times = (pod.created, pod.scheduled, pod.taken, well, pod.not_ready_since)
    return max((time for time in times if time is not None), default=None)


def _has_ended(pod: PodView, nodes: Nodes) -> bool:
    """Whether a container has ended by itself since the pod was last ready.

    A Kubernetes node that starts anew ends all of its containers.
    """
    known, taken = nodes.get(pod.node), pod.taken or pod.scheduled
    if known is not None and known.since is not None and taken is not None and known.since > taken:
        return False
    return any(container.restarts and not _was_ready(pod, container) for container in pod.containers)


def _was_ready(pod: PodView, container: Container) -> bool:
    """Whether the pod, which is not ready, was so after this container had last started."""
    started, since = container.running_since, pod.not_ready_since
    return started is not None and since is not None and started < since


def with_stages(
    entries: Sequence[FleetPod],
    old: Sequence[FleetPod],
    pods: Sequence[PodView],
    port: int,
    gpu_errors: Mapping[str, GpuErrors],
    *,
    checks_pods: bool = False,
) -> list[FleetPod]:
    """Return the entries of these pods, in the order of their numbers, with their stages and what their GPUs tell.

    ``old`` are the entries of before, and ``gpu_errors`` those of the GPUs, by the pod's uid, as far as they are known.
    """
    known, before = {entry.uid: entry for entry in entries}, {entry.uid: entry for entry in old}
    found = [
        _entry(known[pod.uid], before.get(pod.uid), pod, port, gpu_errors.get(pod.uid, GpuErrors()))
        for pod in sorted(pods, key=in_order)
    ]
    return [_in_check(entry) for entry in found] if checks_pods else found


def _in_check(entry: FleetPod) -> FleetPod:
    waits = entry.stage is Stage.READY and entry.result is CheckResult.PENDING
    return entry.model_copy(update={"stage": Stage.CHECKING}) if waits else entry


def _entry(entry: FleetPod, before: FleetPod | None, pod: PodView, port: int, errors: GpuErrors) -> FleetPod:
    before = before or entry
    last, first = before.memory_errors, before.memory_errors_before
    # A new server of the pod counts from nothing.
    has_more = errors.xids is not None and (before.xid_errors is None or errors.xids > before.xid_errors)
    xids, last_xid = (errors.xids, errors.last_xid) if has_more else (before.xid_errors, before.last_xid)
    return entry.model_copy(
        update={
            "stage": stage_of(pod, port),
            "node": pod.node,
            # Of the GPUs, whichever server runs on them.
            "memory_errors": last if errors.memory is None else errors.memory,
            "memory_errors_before": errors.memory if first is None else first,
            "xid_errors": xids,
            "last_xid": last_xid,
        }
    )
