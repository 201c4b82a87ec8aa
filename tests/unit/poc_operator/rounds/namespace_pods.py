# SPDX-License-Identifier: Apache-2.0
"""Pods as the rounds of one namespace share them: what their vLLM does, and what the kubelet says about them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any

from poc_operator.observed import Container, PodReport, PodView
from tests.unit.poc_operator.build import LABELS, NOW, a_pod
from tests.unit.poc_operator.rounds.world import SimPod
from vllm_poc.wire.answers import PowState, StatusResponse, StopReason
from vllm_poc.wire.messages import ExtendRequest, InitGenerateRequest

#: The label by which rounds select some of the pods.
GROUP = "group"
#: Seconds for which a pod that is deleted in good order may go on.
GRACE_SECONDS = 30.0
#: How long the startup probes here let a pod load its model.
STARTUP_SECONDS = 60
#: The id of work that no round of the namespace has ordered.
FOREIGN = "foreign"


class Lie(StrEnum):
    """What a pod says that is not so."""

    IMPOSSIBLE = "its numbers contradict each other"
    UNDELIVERED = "what it has computed is delivered"


class Refused(Exception):  # noqa: N818 - reads as a state
    """The pod declines a start."""


@dataclass(kw_only=True)
class NamespacePod(SimPod):
    """A pod with a name, a uid and labels, whose container the kubelet restarts. ``end`` is its allowance.

    It loads its model until ``loaded_at``. Its startup probe allows ``startup_seconds`` for that; without them it has
    none. With ``grace_end`` it is killed then; one that is terminating without is on a Kubernetes node that is cut off.
    A start whose sender does not wait for it any more leads it ``astray``. It is an orphan since ``orphan_since``.
    """

    uid: str
    group: str | None = None
    is_worker: bool = True
    end: int | None = None
    running_since: float = 0.0
    loaded_at: float = 0.0
    startup_seconds: int | None = None
    crashes: bool = False
    probe_fails: bool = False
    refuses: bool = False
    disrupted: bool = False
    lie: Lie | None = None
    grace_end: float | None = None
    astray: bool = False
    orphan_since: float | None = None

    @property
    def session_id(self) -> str:
        """A restart makes a new one, and a new pod of the same name has another one too."""
        return f"{self.uid}-{self.session}"

    @property
    def round_id(self) -> str | None:
        """Which round it computes now."""
        return self.request.round_id if self.request is not None and self.slot is not None else None

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return {**(LABELS if self.is_worker else {}), **({GROUP: self.group} if self.group is not None else {})}

    def serves(self, now: float) -> bool:
        """Whether its server listens."""
        return not self.crashes and now >= self.loaded_at

    def view(self, now: float) -> PodView:
        """Return what the API server has of the pod."""
        serves, since = self.serves(now), NOW + timedelta(seconds=self.running_since)
        server = Container(
            id=f"{self.uid}#{self.session}",
            restarts=self.session,
            ended="CrashLoopBackOff" if self.crashes else "",
            running_since=None if self.crashes else since,
            startup_seconds=self.startup_seconds,
            started=serves or self.startup_seconds is None,
        )
        return a_pod(
            self.name,
            uid=self.uid,
            labels=self.labels,
            ready=serves and not self.probe_fails,
            terminating=self.terminating,
            disrupted=self.disrupted,
            containers=(server,),
        )

    def report(self, now: float, *, may_lie: bool = False) -> PodReport:
        """Answer a poll. A server that does not listen yet refuses the connection."""
        if self.hears and not self.serves(now):
            return PodReport(error="connection refused", listens=False)
        told = super().report(now)
        if told.status is None or self.slot is None:
            return told
        status = told.status.model_copy(update={"end_index": self.end})
        return replace(told, status=self._lied(status) if may_lie else status)

    def _lied(self, status: StatusResponse) -> StatusResponse:
        lies: dict[str, Any] = {}
        if self.lie is Lie.IMPOSSIBLE:
            lies = {"delivered_valid": self.delivered - status.start_index + 1}
        elif self.lie is Lie.UNDELIVERED and self.request is not None and self.request.params is not None:
            lies = {"delivered_index": self.next, "delivered_valid": self.next - status.start_index}
        return status.model_copy(update=lies)

    def start(self, request: InitGenerateRequest, now: float) -> str | None:
        """Return the session that accepted the start; None if other work is being computed. Raise Refused."""
        if self.refuses:
            raise Refused
        began = self.slot is None
        session = super().start(request, now)
        if session is not None and (began or (request.end_index or 0) > (self.end or 0)):
            self.end = request.end_index
        return session

    def extend(self, request: ExtendRequest) -> None:
        """Compute on, up to another index."""
        if self.round_id == request.round_id and self.end is not None:
            self.end = max(self.end, request.end_index)

    def compute(self, nonces: int) -> None:
        """Compute so many nonces, or as many as it may."""
        if self.slot is not None:
            most = self.next + nonces
            self.next = most if self.end is None else max(self.next, min(most, self.end))

    def idle(self, reason: StopReason) -> None:
        """Stop the work."""
        self.state, self.stop_reason, self.astray = PowState.STOPPED, reason, False

    def restart(self, now: float = 0.0, loads: float = 0.0) -> None:
        """Forget everything but the name, and load the model."""
        super().restart()
        self.running_since, self.loaded_at = now, now + loads
        self.astray, self.end, self.lie, self.crashes = False, None, None, False

    def heal(self, now: float) -> None:
        """Be as a pod should be."""
        self.hears = self.answers = True
        self.crashes = self.probe_fails = self.refuses = False
        self.loaded_at, self.lie = min(self.loaded_at, now), None
