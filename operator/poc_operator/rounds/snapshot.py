# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from and what it consists of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

from poc_operator.model.checks import Proof
from poc_operator.model.conditions import Reason
from poc_operator.model.round import Round
from poc_operator.model.status import Assignment, RoundStatus, Share
from poc_operator.observed.gateway import CollectedSlot, GatewayReport
from poc_operator.observed.pods import PodReport, PodView
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ExtendRequest, InitGenerateRequest
from vllm_poc.wire.partition import NonceSlot


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One look at the world. ``pods`` are those that match the round's selector.

    ``proofs`` are those of a round that validates, or why they cannot be had. ``gateway`` is None if pods deliver to
    the round's own callback address.
    """

    round: Round
    pods: Sequence[PodView]
    reports: Mapping[str, PodReport]  # by pod uid
    now: datetime
    proofs: Sequence[Proof] | str = ()
    gateway: GatewayReport | None = None

    @cached_property
    def live_pods(self) -> Sequence[PodView]:
        """Pods that are not on their way out, in a stable order."""
        return sorted((pod for pod in self.pods if not pod.gone), key=lambda pod: pod.name)

    @cached_property
    def answering(self) -> Sequence[tuple[PodView, PodReport]]:
        """Live pods that are ready and answered the poll, with their answers."""
        polled = ((pod, self.reports.get(pod.uid)) for pod in self.live_pods if pod.ready)
        return [(pod, report) for pod, report in polled if report is not None and report.status is not None]

    @cached_property
    def _live_by_uid(self) -> Mapping[str | None, PodView]:
        return {pod.uid: pod for pod in self.live_pods}

    @cached_property
    def _collected(self) -> Mapping[int, CollectedSlot]:
        collected = self.gateway.collected if self.gateway is not None else None
        return {found.slot: found for found in collected.slots} if collected is not None else {}

    @property
    def gateway_answered(self) -> bool:
        """Whether the gateway has said what it has, be it nothing."""
        return self.gateway is not None and self.gateway.asked is not None

    def collected_of(self, slot: Assignment) -> CollectedSlot | None:
        """Return what the gateway has of the slot; None if it has not told of it."""
        return self._collected.get(slot.node + slot.group * self.round.spec.nodes.count)

    def pod_of(self, slot: Share) -> PodView | None:
        """Return the live pod that the slot is bound to."""
        return self._live_by_uid.get(slot.uid)

    def disrupted(self, slot: Assignment) -> bool:
        """Whether the cluster's infrastructure ended the slot's pod."""
        return any(pod.disrupted for pod in self.pods if pod.uid == slot.uid)

    def partition_of(self, slot: Assignment) -> NonceSlot:
        """Return the nonces of the slot."""
        return NonceSlot(
            node_id=slot.node,
            node_count=self.round.spec.nodes.count,
            group_id=slot.group,
            n_groups=self.round.status.groups,
        )

    def is_whole(self, slot: Assignment) -> bool:
        """Whether every nonce of the slot is computed and delivered: there is none left to start with."""
        return slot.delivered >= self.partition_of(slot).capacity

    def report_of(self, slot: Share) -> PodReport:
        """Return the report of the slot's pod; an empty one if it was not polled."""
        return self.reports.get(slot.uid or "", PodReport())


@dataclass(frozen=True, kw_only=True)
class StartPod:
    """Tell a pod to compute a slot. Harmless to repeat: the pod compares the round id."""

    pod: PodView
    request: InitGenerateRequest


@dataclass(frozen=True, kw_only=True)
class StopPod:
    """Tell a pod to stop the round of this id, or whatever it computes; it flushes its results first."""

    pod: PodView
    round_id: str | None


@dataclass(frozen=True, kw_only=True)
class ExtendPod:
    """Let a pod compute its slot up to another index."""

    pod: PodView
    request: ExtendRequest


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Delete a pod that cannot be helped otherwise; whatever made it makes a new one."""

    pod: PodView


@dataclass(frozen=True, kw_only=True)
class AskPod:
    """Ask a pod for named nonces. Its report has the answer, under this key; what is no longer asked is cancelled."""

    pod: PodView
    key: str
    request: GenerateRequest


@dataclass(frozen=True, kw_only=True)
class DeleteRound:
    """Delete the finished round; its time to live has passed."""


Action = StartPod | ExtendPod | StopPod | DeletePod | AskPod | DeleteRound


class Loss(StrEnum):
    """Why a slot was given out again."""

    POD_GONE = "PodGone"
    DISRUPTED = "Disrupted"
    RESTARTED = "Restarted"
    FAILED = "Failed"
    STALLED = "Stalled"
    STOPPED = "Stopped"


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """A Kubernetes Event to post on the round; ``loss`` if it tells of a slot that was given out again."""

    reason: Reason
    message: str
    warning: bool = False
    loss: Loss | None = None

    @classmethod
    def warn_of(cls, slot: Assignment, reason: Reason, message: str, loss: Loss | None = None) -> Self:
        """Return a warning about one slot, which the message names first."""
        text = f"node {slot.node} group {slot.group}: {message}"
        return cls(reason=reason, message=text, warning=True, loss=loss)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one policy yields: the status so far, and what it adds to actions and events."""

    status: RoundStatus
    actions: Sequence[Action] = field(default_factory=tuple)
    events: Sequence[RoundEvent] = field(default_factory=tuple)

    def extended(
        self,
        *,
        actions: Iterable[Action] = (),
        events: Iterable[RoundEvent] = (),
        **status: Any,  # noqa: ANN401 - fields of RoundStatus
    ) -> Self:
        """Return the step with these fields of the status changed, and more actions and events."""
        return replace(
            self,
            status=self.status.model_copy(update=status),
            actions=[*self.actions, *actions],
            events=[*self.events, *events],
        )


Plan = Step
