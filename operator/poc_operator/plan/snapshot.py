# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from and what it consists of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from poc_operator.model.conditions import Reason
from poc_operator.model.pods import PodReport, PodView
from poc_operator.model.round import Round
from poc_operator.model.status import Assignment, RoundStatus
from vllm_poc.wire.requests import InitGenerateRequest


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One look at the world. ``pods`` are those that match the round's selector."""

    round: Round
    pods: Sequence[PodView]
    reports: Mapping[str, PodReport]  # by pod uid
    now: datetime

    @property
    def live_pods(self) -> list[PodView]:
        """Pods that are not on their way out, in a stable order."""
        return sorted((pod for pod in self.pods if not pod.gone), key=lambda pod: pod.name)

    def pod_of(self, slot: Assignment) -> PodView | None:
        """Return the live pod that the slot is bound to."""
        return next((pod for pod in self.live_pods if pod.uid == slot.uid), None)

    def report_of(self, slot: Assignment) -> PodReport:
        """Return the report of the slot's pod; an empty one if it was not polled."""
        return self.reports.get(slot.uid or "", PodReport())


@dataclass(frozen=True, kw_only=True)
class StartPod:
    """Tell a pod to compute a slot. Harmless to repeat: the pod compares the round id."""

    pod: PodView
    request: InitGenerateRequest


@dataclass(frozen=True, kw_only=True)
class StopPod:
    """Tell a pod to stop the round, after it has flushed its results."""

    pod: PodView
    round_id: str


@dataclass(frozen=True, kw_only=True)
class DeleteRound:
    """Delete the finished round; its time to live has passed."""


Action = StartPod | StopPod | DeleteRound


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """A Kubernetes Event to post on the round."""

    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one policy yields: the status so far, and what it adds to actions and events."""

    status: RoundStatus
    actions: Sequence[Action] = field(default_factory=tuple)
    events: Sequence[RoundEvent] = field(default_factory=tuple)


Plan = Step
