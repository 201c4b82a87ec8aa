# SPDX-License-Identifier: Apache-2.0
"""Pods that load their model, and pods that cannot work: what they wait for, and how long that is waited for.

A pod that loads is no pod that does not answer: its server has yet to begin. How long it may load says its own startup
probe, or ``spec.podStartupSeconds`` where it has none.
"""

from collections.abc import Callable, Sequence
from datetime import datetime

from poc_operator.observed import PodView
from poc_operator.planning.eligibility import computes_other_work, holder, incompatibility
from poc_operator.planning.snapshot import Snapshot, Work

#: So many pods are named in a message; more would not be read.
NAMED_PODS = 3


def named(pods: Sequence[PodView], detail: Callable[[PodView], str]) -> str:
    """Name the first pods, each with a detail."""
    texts = ", ".join(f"{pod.name} ({detail(pod)})" for pod in pods[:NAMED_PODS])
    return texts if len(pods) <= NAMED_PODS else f"{texts} and {len(pods) - NAMED_PODS} more"


def loads_until(snapshot: Snapshot[Work], pod: PodView) -> datetime | None:
    """Return until when the pod may load its model; None if it does not load, or has had its time."""
    spec = snapshot.work.spec
    until = pod.loads_until(spec.port, spec.pod_startup_seconds)
    return until if until is not None and until > snapshot.now else None


def loads(snapshot: Snapshot[Work], pod: PodView | None) -> bool:
    """Whether the pod loads its model, and has not had its time."""
    return pod is not None and loads_until(snapshot, pod) is not None


def loading_seconds(snapshot: Snapshot[Work], since: datetime) -> float:
    """Return the longest time that a pod may take to load which loads now, or has begun to since; 0 without one."""
    spec = snapshot.work.spec
    servers = [(pod, pod.container(spec.port)) for pod in snapshot.live_pods]
    seconds = [
        spec.pod_startup_seconds if server.startup_seconds is None else server.startup_seconds
        for pod, server in servers
        if server.running_since is not None and (server.running_since >= since or loads(snapshot, pod))
    ]
    return max(seconds, default=0.0)


def why_not_ready(snapshot: Snapshot[Work], pod: PodView) -> str:
    """Say what a pod that is not ready waits for."""
    until = loads_until(snapshot, pod)
    if until is None:
        return pod.waiting_for or "not ready"
    server = pod.container(snapshot.work.spec.port)
    left = (until - snapshot.now).total_seconds()
    so_far = snapshot.seconds_since(server.running_since)
    return f"loading for {so_far:.0f} s of at most {so_far + left:.0f} s"


def why_unusable(snapshot: Snapshot[Work], pod: PodView) -> str | None:
    """Say why a live pod cannot work on the object now; None if it can."""
    if not pod.ready:
        return why_not_ready(snapshot, pod)
    report = snapshot.reports.get(pod.uid)
    if report is None or report.status is None:
        return (report.error if report is not None else None) or "not polled yet"
    finding = incompatibility(snapshot.work.spec, report)
    if finding is not None:
        return finding[1]
    return f"computes {holder(snapshot, report)}" if computes_other_work(snapshot, report) else None


def unusable_pods(snapshot: Snapshot[Work], *, beside: frozenset[str | None]) -> str:
    """Name the live pods that cannot work now, and why; ``beside`` are the uids of those that work. Empty if none."""
    found = {
        pod.uid: why for pod in snapshot.live_pods if pod.uid not in beside and (why := why_unusable(snapshot, pod))
    }
    return named([pod for pod in snapshot.live_pods if pod.uid in found], lambda pod: found[pod.uid])
