# SPDX-License-Identifier: Apache-2.0
"""Which work in pods nobody needs any more: that of rounds which are finished or gone, or that gave the slot away.

It is left over when a pod is silent while its round ends, or is relabelled, or when nobody could wait for it. Only work
that this cluster's operator has ordered is judged: its owner says so. A round under way stops the orphans among the
pods that its selector matches itself (`poc_operator.rounds.stop`), since it alone knows what it orders next.

A pod of the reference implementation tells neither owner nor round. Its work is ours only if a status says that this
pod had just this slot of just these parameters: the stored one of a finished round, or that of a deleted one as it was
seen last.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from pydantic import ValidationError

from poc_operator.apis.v1alpha1.meta import WORKER_LABELS, LabelSelector, fleet_selector
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State, is_finished
from poc_operator.apis.v1alpha1.work import DEFAULT_PORT
from poc_operator.observed import PodView, is_container_session
from vllm_poc.wire.answers import PowState, StatusResponse

#: The states of a slot that no pod has; any other word, also of another version, may mean that one has it.
_FREE = (SlotState.WAITING, SlotState.DONE, SlotState.FAILED)


class Cause(StrEnum):
    """Why work is not needed any more."""

    DELETED = "Deleted"
    FINISHED = "Finished"
    NOT_ASSIGNED = "NotAssigned"


#: What is said of the round whose work was stopped.
EXPLAINED = {
    Cause.DELETED: "which does not exist any more",
    Cause.FINISHED: "which is over",
    Cause.NOT_ASSIGNED: "which gives it no slot",
}


#: What of an object's metadata names it.
_NAMES = ("name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp")


@dataclass(frozen=True)
class NamelessSlot:
    """A slot that a status gives to a pod which tells no round, or may be such a one: it has not confirmed yet.

    ``pod`` is the pod's uid, ``session`` its container's id.
    """

    pod: str
    node: int
    group: int
    session: str | None

    @classmethod
    def found(cls, slots: Iterable[Mapping[str, Any]]) -> "Iterator[NamelessSlot]":
        """Yield those among the slots of a status."""
        for slot in slots:
            pod, session, place = slot.get("uid"), slot.get("session"), (slot.get("node", 0), slot.get("group", 0))
            if pod and (session is None or is_container_session(str(session))) and all(type(n) is int for n in place):
                yield cls(str(pod), *place, session)


@dataclass(frozen=True, kw_only=True)
class WorkRecord:
    """An object that asks pods to work, as far as it matters here: taken from its JSON, whatever else that says.

    ``port`` is None for the pods of a fleet, which declare theirs.

    ``pods`` are the uids of all pods that a round's status names, ``holders`` of those that have a slot, and
    ``running`` of those that have confirmed it. Other kinds have none: pods drop named nonces by themselves.
    ``nameless`` are its slots on pods that tell no round, ``order`` is what such pods were told: names, spec, groups.
    """

    uid: str
    namespace: str
    name: str
    selector: LabelSelector
    port: int | None
    finished: bool
    pods: frozenset[str]
    holders: frozenset[str]
    running: frozenset[str]
    nameless: frozenset[NamelessSlot]
    order: Mapping[str, Any] = field(compare=False)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read an object of any kind. What of it cannot be read has its default."""
        metadata, spec, status = body["metadata"], _mapping(body.get("spec")), _mapping(body.get("status"))
        listed = status.get(RoundStatus.SHARES)
        slots = [_mapping(slot) for slot in listed] if isinstance(listed, list) else []
        port = spec.get("port")
        return cls(
            uid=str(metadata["uid"]),
            namespace=str(metadata.get("namespace", "")),
            name=str(metadata["name"]),
            selector=_selector(spec),
            port=None if "fleetRef" in spec else port if isinstance(port, int) and 0 < port < 2**16 else DEFAULT_PORT,
            finished=is_finished(status),
            pods=_uids(slots),
            holders=_uids(slot for slot in slots if slot.get("state") not in _FREE),
            running=_uids(slot for slot in slots if slot.get("state") == SlotState.RUNNING),
            nameless=frozenset(NamelessSlot.found(slots)),
            order={
                "metadata": {name: metadata[name] for name in _NAMES if name in metadata},
                "spec": spec,
                "groups": status.get("groups"),
            },
        )

    def as_over(self, pod: str, session: str) -> Mapping[str, Any] | None:
        """Return the JSON of a finished round with the slots that this pod may have computed in this session.

        None if it had none.
        """
        slots = [slot for slot in self.nameless if slot.pod == pod and slot.session in (None, session)]
        if not slots:
            return None
        listed = [{"state": SlotState.DONE, "uid": pod, "node": slot.node, "group": slot.group} for slot in slots]
        status = {"state": State.COMPLETE, "groups": self.order["groups"], RoundStatus.SHARES: listed}
        return {"metadata": self.order["metadata"], "spec": self.order["spec"], "status": status}

    def port_of(self, pod: PodView) -> int:
        """Return the port of the pod's server."""
        return self.port if self.port is not None else pod.serving_port(pod.http_port or DEFAULT_PORT)

    def selects(self, pod: PodView) -> bool:
        """Whether the pod is one of the object's."""
        return pod.namespace == self.namespace and self.selector.matches(pod.labels)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _selector(spec: Mapping[str, Any]) -> LabelSelector:
    fleet = _mapping(spec.get("fleetRef")).get("name")
    try:
        return LabelSelector.model_validate(spec.get("selector")) if fleet is None else fleet_selector(str(fleet))
    except ValidationError:
        return LabelSelector(match_labels=dict(WORKER_LABELS))


def _uids(slots: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(slot["uid"]) for slot in slots if slot.get("uid"))


def is_ours(status: StatusResponse, owners: Collection[str]) -> bool:
    """Whether the pod generates a round that one of these owners has ordered."""
    return status.state is PowState.GENERATING and bool(status.round_id) and status.owner in owners


def cause_to_stop(round_: WorkRecord | None, pod: PodView) -> Cause | None:
    """Return why a pod that computes our round need not; None if it must, or if the round itself decides about it.

    ``round_`` is as the API server has it after the pod was asked; None if it has none of this uid.
    """
    if round_ is None:
        return Cause.DELETED
    if round_.finished:
        return Cause.FINISHED
    if pod.uid in round_.holders or round_.selects(pod):
        return None
    return Cause.NOT_ASSIGNED


def proven_over(pod: PodView, told: Iterable[tuple[PoCRound, StatusResponse]]) -> PoCRound | None:
    """Return the finished round whose slot a reference pod computes, if the stored status proves that it had it.

    ``told`` is what the pod says, put for each round. None if the work may be of a round that is not over.
    """
    same = [(round_, status) for round_, status in told if status.round_id == round_.id]
    if any(not round_.status.state.finished for round_, _ in same):
        return None
    return next((round_ for round_, status in same if _had(round_, pod, status)), None)


def _had(round_: PoCRound, pod: PodView, status: StatusResponse) -> bool:
    config = status.config
    return config is not None and any(
        (slot.uid, slot.node, slot.group) == (pod.uid, config.node_id, config.group_id)
        for slot in round_.status.assignments
    )
