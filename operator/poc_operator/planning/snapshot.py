# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from and what it consists of, with the parts of orders to pods that several kinds have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fields import SeededModel
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import Share, WorkStatus
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.apis.v1alpha1.work import ProtocolSpec, WorkSpec
from poc_operator.basic_auth import BasicAuth
from poc_operator.credentials import Grant
from poc_operator.observed import Decision, PodReport, PodView
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ExtendRequest, InitGenerateRequest

#: An object that asks pods to work.
Work = PoCRound | PoCValidation | PoCCalibration
WorkT_co = TypeVar("WorkT_co", bound=Work, covariant=True)
StatusT = TypeVar("StatusT", bound=WorkStatus)


def ordinal_of(name: str) -> int:
    """Return the number of a StatefulSet's pod by its name; -1 for a pod of another name."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def by_number(name: str) -> tuple[str, int, str]:
    """Return what names of pods are sorted by: demo-2 comes before demo-10, and after chat-10."""
    number = ordinal_of(name)
    return name.rpartition("-")[0] if number >= 0 else name, number, name


def in_order(pod: PodView) -> tuple[str, int, str]:
    """Return what pods are sorted by: the StatefulSets' names, and the numbers in each."""
    return by_number(pod.name)


#: Where a round stands in the queue for pods; the least goes first.
Place = tuple[int, int, int, datetime, str]


@dataclass(frozen=True, kw_only=True)
class OtherRound:
    """Another round of the namespace, as its own last plan left it.

    ``name`` has the namespace, ``id`` is the round's on the wire, ``replaces`` says whether it stops other work, and
    ``block`` is hash, height and public key. ``held`` are the uids of the pods that have a slot of it, ``wanted`` those
    of which it could use ``needs`` more. One that is not ``current`` keeps no pods from others: the operator fails on
    it, or has not planned it lately.
    """

    id: str
    name: str
    place: Place
    priority: int
    replaces: bool
    block: tuple[str, int, str]
    held: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    needs: int = 0
    current: bool = True


@dataclass(frozen=True, kw_only=True)
class Snapshot(Generic[WorkT_co]):
    """The world as one plan sees it. ``pods`` are those that the object's selector matches.

    ``others`` are pods that it does not match, or not any more, although they were given a slot or sample.
    ``find_other_rounds`` returns the other rounds of the namespace; None if not all of them are known yet, as in a new
    process. Most plans do not ask for them. ``missing_fleet`` says that the fleet of ``spec.fleetRef`` does not exist.
    """

    work: WorkT_co
    pods: Sequence[PodView]
    reports: Mapping[str, PodReport]  # by pod uid
    now: datetime
    find_other_rounds: Callable[[], Sequence[OtherRound] | None]
    others: Sequence[PodView] = ()
    missing_fleet: str | None = None

    @cached_property
    def known_rounds(self) -> Sequence[OtherRound] | None:
        """The other rounds of the namespace, also those that are not current."""
        return self.find_other_rounds()

    @cached_property
    def other_rounds(self) -> Sequence[OtherRound] | None:
        """The other rounds of the namespace that are current."""
        known = self.known_rounds
        return known if known is None else [other for other in known if other.current]

    @cached_property
    def live_pods(self) -> Sequence[PodView]:
        """Pods that are not on their way out, in a stable order."""
        return sorted((pod for pod in self.pods if pod.stays), key=in_order)

    @cached_property
    def existing_pods(self) -> Sequence[PodView]:
        """Pods that may compute, those on their way out and those that are not selected too, in a stable order."""
        return sorted((pod for pod in [*self.pods, *self.others] if not pod.gone), key=in_order)

    @cached_property
    def answering(self) -> Sequence[tuple[PodView, PodReport]]:
        """Live pods that are ready and answered the poll, with their answers."""
        polled = ((pod, self.reports.get(pod.uid)) for pod in self.live_pods if pod.ready)
        return [(pod, report) for pod, report in polled if report is not None and report.status is not None]

    @cached_property
    def _live_by_uid(self) -> Mapping[str | None, PodView]:
        return {pod.uid: pod for pod in self.live_pods}

    @cached_property
    def _existing_by_uid(self) -> Mapping[str | None, PodView]:
        return {pod.uid: pod for pod in self.existing_pods}

    def existing_pod_of(self, share: Share) -> PodView | None:
        """Return the pod that the slot or sample is bound to, also if it is on its way out or not selected."""
        return self._existing_by_uid.get(share.uid)

    def pod_of(self, share: Share) -> PodView | None:
        """Return the live pod that the slot or sample is bound to."""
        return self._live_by_uid.get(share.uid)

    def report_of(self, share: Share) -> PodReport:
        """Return the report of the slot's or sample's pod; an empty one if it was not polled."""
        return self.reports.get(share.uid or "", PodReport())

    def seconds_since(self, moment: datetime | None) -> float:
        """Return the seconds that have passed; 0 if the moment has not come yet."""
        return (self.now - moment).total_seconds() if moment is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class StartPod:
    """Tell a pod to compute a slot. Harmless to repeat: the pod compares the round id.

    ``grant`` is what the pod may deliver to the gateway, if it is to deliver there; ``auth`` is for a receiver of the
    round's own that asks for a user. Neither stands in the request of a plan.
    """

    pod: PodView
    request: InitGenerateRequest
    grant: Grant | None = None
    auth: BasicAuth | None = None


@dataclass(frozen=True, kw_only=True)
class StopPod:
    """Tell a pod to stop the round of this id, or whatever it computes; it flushes its results first.

    ``preempted_by`` is the namespace and name of the round that the pod is for.
    """

    pod: PodView
    round_id: str | None
    preempted_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExtendPod:
    """Let a pod compute its slot up to another index."""

    pod: PodView
    request: ExtendRequest


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Evict a pod that cannot be helped otherwise; whatever made it makes a new one."""

    pod: PodView


@dataclass(frozen=True, kw_only=True)
class AskPod:
    """Ask a pod for named nonces. Its report has the answer, under this key; what is no longer asked is cancelled."""

    pod: PodView
    key: str
    request: GenerateRequest


@dataclass(frozen=True, kw_only=True)
class DecideRivals:
    """Tell the gateway which results are honest. Harmless to repeat: the first decision about a nonce stays."""

    decisions: Sequence[Decision]


@dataclass(frozen=True, kw_only=True)
class DeleteWork:
    """Delete the finished object; its time to live has passed."""


Action = StartPod | ExtendPod | StopPod | DeletePod | AskPod | DecideRivals | DeleteWork


class Loss(StrEnum):
    """Why a slot was given out again."""

    POD_GONE = "PodGone"
    DISRUPTED = "Disrupted"
    RESTARTED = "Restarted"
    FAILED = "Failed"
    STALLED = "Stalled"
    STOPPED = "Stopped"
    POD_LEFT = "PodLeft"
    LEASE_EXPIRED = "LeaseExpired"
    REFUSED = "Refused"
    PREEMPTED = "Preempted"
    RESULTS_LOST = "ResultsLost"


@dataclass(frozen=True, kw_only=True)
class WorkEvent:
    """A Kubernetes Event to post on the object; ``loss`` if it tells of a slot that was given out again.

    ``count`` is how many slots it tells of.
    """

    reason: str
    message: str
    warning: bool = False
    loss: Loss | None = None
    count: int = 1

    @classmethod
    def warn_of(cls, slot: Assignment, reason: Reason, message: str, loss: Loss | None = None) -> Self:
        """Return a warning about one slot, which the message names first."""
        text = f"node {slot.node} group {slot.group}: {message}"
        return cls(reason=reason, message=text, warning=True, loss=loss)


#: So many Events of one kind are posted by themselves; more become one that names the first.
MOST_ALIKE = 3


def condensed(events: Sequence[WorkEvent]) -> Sequence[WorkEvent]:
    """Return the Events with those of one reason and one kind of loss put together, where there are many.

    However many slots a plan tells of, the API server limits how many Events an operator may post.
    """
    alike: dict[object, list[WorkEvent]] = {}
    for event in events:
        alike.setdefault((event.reason, event.loss, event.warning), []).append(event)
    return [event for found in alike.values() for event in (found if len(found) <= MOST_ALIKE else [_joined(found)])]


def _joined(events: Sequence[WorkEvent]) -> WorkEvent:
    first = events[0]
    return replace(first, message=f"{len(events)} slots, the first: {first.message}", count=len(events))


@dataclass(frozen=True, kw_only=True)
class Step(Generic[StatusT]):
    """What one policy yields: the status so far, and what it adds to actions and events."""

    status: StatusT
    actions: Sequence[Action] = field(default_factory=tuple)
    events: Sequence[WorkEvent] = field(default_factory=tuple)

    def extended(
        self,
        *,
        actions: Iterable[Action] = (),
        events: Iterable[WorkEvent] = (),
        **status: Any,  # noqa: ANN401 - fields of the status
    ) -> Self:
        """Return the step with these fields of the status changed, and more actions and events."""
        return replace(
            self,
            status=self.status.model_copy(update=status),
            actions=[*self.actions, *actions],
            events=[*self.events, *events],
        )


#: Every distance lies below it.
LARGEST_DISTANCE = 2.0


def named_nonces(
    spec: WorkSpec, nonces: Sequence[int], *, block_hash: str | None = None, beside_round: bool = False
) -> GenerateRequest:
    """Ask for the artifacts or distances of these nonces, and wait for them."""
    artifact, told = (spec.artifact_params, spec.r_target) if isinstance(spec, ProtocolSpec) else (None, None)
    r_target = float(told) if told is not None else LARGEST_DISTANCE
    return GenerateRequest(
        block_hash=block_hash or spec.block_hash,
        block_height=spec.block_height,
        public_key=spec.public_key,
        batch_size=spec.batch_size,
        nonces=list(nonces),
        wait=True,
        beside_round=beside_round,
        poc_stronger_rng=isinstance(spec.model, SeededModel) and spec.model.strong_rng,
        params=artifact,
        r_target=None if artifact else r_target,
        seq_len=None if artifact else spec.model.seq_len,
    )
