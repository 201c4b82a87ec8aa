# SPDX-License-Identifier: Apache-2.0
"""The conditions of a fleet: what holds of its pods, of its objects, and of what the operator does about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import Download, DownloadState
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.fleets.download import PORT as DOWNLOAD_PORT
from poc_operator.fleets.download import waits_for
from poc_operator.fleets.healing import Finding
from poc_operator.fleets.resolve import Refusal, Surroundings
from poc_operator.fleets.stages import Nodes, cannot_run, is_stuck, stages_of
from poc_operator.observed import PodView

_Told = tuple[bool, Reason, str]

#: What is told of updates that wait for somebody.
_UPDATES = {UpdatePhase.FAILED: Reason.UPDATE_FAILED, UpdatePhase.STOPPED: Reason.UPDATE_STOPPED}


@dataclass(frozen=True, kw_only=True)
class PodCounts:
    """The pods that stay, and what there should be. ``observed``: the StatefulSet's status is about its present spec.

    ``outdated`` are those of an old revision, which the operator replaces if it ``replaces`` any. ``port`` is that of
    the pods' server. ``nodes`` are the Kubernetes nodes that are known.
    """

    replicas: int
    port: int
    pods: Sequence[PodView]
    outdated: Sequence[PodView]
    observed: bool
    replaces: bool
    nodes: Nodes
    now: datetime

    def is_stuck(self, pod: PodView) -> bool:
        """Whether a pod waits for a person. One that is replaced waits for nobody."""
        return not (self.replaces and pod in self.outdated) and is_stuck(pod, self.nodes, self.now)

    @property
    def waits(self) -> bool:
        """Whether all that is not as it should be waits for a person."""
        stuck = [self.is_stuck(pod) for pod in self.pods if not pod.ready]
        return len(self.pods) == self.replicas and not (self.replaces and self.outdated) and all(stuck)

    @property
    def ready(self) -> int:
        """How many are ready."""
        return sum(pod.ready for pod in self.pods)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The fleet's conditions, each with status, reason and message."""

    ready: _Told
    progressing: _Told
    degraded: _Told
    stalled: _Told

    @classmethod
    def of_refusal(cls, refusal: Refusal) -> Self:
        """Return what holds of a fleet that cannot be as its spec wants it."""
        told = (refusal.reason, refusal.message)
        return cls(ready=(False, *told), progressing=(False, *told), degraded=(True, *told), stalled=(True, *told))

    @classmethod
    def of_pods(cls, seen: PodCounts, update: UpdateStatus) -> Self:
        """Return what holds of the fleet's pods."""
        empty = "spec.replicas is 0: raise it to have pods"
        every = "the replica is ready" if seen.replicas == 1 else f"all {seen.replicas} replicas are ready"
        fine = (Reason.ALL_REPLICAS_READY, every if seen.replicas else empty)
        waits = _waits_for(seen)
        if waits is not None:
            failing = [pod for pod in seen.pods if cannot_run(pod)]
            told = _why_failing(failing, seen.port) if failing else (Reason.REPLICAS_NOT_READY, waits)
            stuck = any(map(seen.is_stuck, failing))
            return cls(
                ready=(False, *told),
                progressing=(not (stuck and seen.waits), *told),
                degraded=(bool(failing), *told),
                stalled=(stuck, *told),
            )
        outdated = (Reason.PODS_OUTDATED, update.message) if seen.outdated else fine
        return cls(
            ready=(True, *outdated),
            progressing=(bool(seen.outdated), *outdated),
            degraded=(False, *fine),
            stalled=(False, *fine),
        )

    def with_checks(self, found: Finding | None) -> Self:
        """Return the verdict with what self-checks have found, or wait for, unless more is wrong."""
        if found is None:
            return self
        failed = found[0] is Reason.SELF_CHECK_FAILED
        degraded = (True, *found) if failed and not self.degraded[0] else self.degraded
        if not self.ready[0]:
            return replace(self, degraded=degraded)
        return replace(self, ready=(False, *found), progressing=(True, *found), degraded=degraded)

    def with_update(self, update: UpdateStatus) -> Self:
        """Return the verdict with an update that has failed, or stopped at a pod that has."""
        reason = _UPDATES.get(update.phase)
        if reason is None:
            return self
        told = (reason, update.message)
        return replace(self, ready=(self.ready[0], *told), degraded=(True, *told), stalled=(True, *told))

    def with_download(self, ahead: Download | None, pods: Sequence[PodView], seen: PodCounts, *, exists: bool) -> Self:
        """Return the verdict while the StatefulSet, which may exist, waits for a model that ``pods`` download."""
        if ahead is None or ahead.state is DownloadState.DOWNLOADED:
            return self
        failing = [pod for pod in pods if pod.stays and cannot_run(pod)]
        failed = ahead.state is DownloadState.FAILED or bool(failing)
        stuck = any(is_stuck(pod, seen.nodes, seen.now) for pod in failing)
        if ahead.state is DownloadState.FAILED:
            told = (Reason.DOWNLOAD_FAILED, f"the download of {ahead.model} has failed: {ahead.message}")
        elif failing:
            reason, why = _why_failing(failing, DOWNLOAD_PORT)
            told = (reason, f"{ahead.model} is not downloaded: {why}")
        else:
            told = (Reason.DOWNLOADING, waits_for(ahead, pods))
        return replace(
            self,
            ready=(self.ready[0] and exists, *told),
            progressing=(not stuck, *told),
            degraded=(True, *told) if failed else self.degraded,
            stalled=(stuck, *told),
        )

    def with_findings(self, findings: Sequence[Finding]) -> Self:
        """Return the verdict with what was found of pods that are ready, beside what is said already."""
        if not findings:
            return self
        reason = self.degraded[1] if self.degraded[0] else findings[0][0]
        texts = ([self.degraded[2]] if self.degraded[0] else []) + [text for _, text in findings]
        return replace(self, degraded=(True, reason, "; ".join(texts)))

    def with_strangers(self, told: str) -> Self:
        """Return the verdict whose message also tells of pods of others: they make the fleet no worse."""
        if not told:
            return self
        holds, reason, message = self.ready
        return replace(self, ready=(holds, reason, f"{message}; {told}"))

    @property
    def shown(self) -> tuple[Reason, str]:
        """The word and the sentence that people see first: those of Ready, unless all are ready and something is wrong.

        What is wrong comes first then, and what goes on beside it after that.
        """
        (is_ready, reason, message), (is_degraded, worse, why) = self.ready, self.degraded
        if not (is_ready and is_degraded) or worse is reason:
            return reason, message
        return worse, f"{why}; {message}"

    def conditions(self, now: datetime, generation: int) -> list[Condition]:
        """Return the conditions as they are stored."""
        told = {
            ConditionType.READY: self.ready,
            ConditionType.PROGRESSING: self.progressing,
            ConditionType.DEGRADED: self.degraded,
            ConditionType.STALLED: self.stalled,
        }
        return [
            Condition(
                type=kind,
                status="True" if holds else "False",
                reason=reason,
                message=message,
                observed_generation=generation,
                last_transition_time=now,
            )
            for kind, (holds, reason, message) in told.items()
        ]


def unmonitored(fleet: PoCFleet, around: Surroundings) -> list[Finding]:
    """Tell of PodMonitors that the fleet asks for and the cluster does not know."""
    if not fleet.spec.metrics.pod_monitor or around.pod_monitors:
        return []
    text = (
        "the cluster does not know PodMonitors: install Prometheus Operator with its CRDs, or set metrics.podMonitor "
        "to false"
    )
    return [(Reason.POD_MONITOR_UNKNOWN, text)]


def _why_failing(pods: Sequence[PodView], port: int) -> tuple[Reason, str]:
    """Say why these pods cannot run, whose server listens on ``port``: for want of a node, or of something there."""
    if any(pod.node for pod in pods):
        return Reason.PODS_FAILING, f"{stages_of(pods, port)} cannot run"
    return Reason.PODS_UNSCHEDULABLE, f"no Kubernetes node can take {stages_of(pods, port)}"


def _waits_for(seen: PodCounts) -> str | None:
    """Say what the fleet waits for until all of its replicas are ready; None if they are."""
    pods, wanted, ready = seen.pods, seen.replicas, seen.ready
    if len(pods) > wanted:
        return number_of(len(pods) - wanted, "pod is to go", "pods are to go")
    if ready == wanted:
        # Until then it is not known which revision is the newest.
        return None if seen.observed else "Kubernetes has yet to see the StatefulSet as it is"
    waiting = [pod for pod in pods if not pod.ready]
    missing = wanted - len(pods)
    texts = [number_of(missing, "pod is to be created", "pods are to be created")] if missing else []
    texts += [stages_of(waiting, seen.port)] if waiting else []
    return f"{ready} of {wanted} replicas are ready: {', '.join(texts)}"
