# SPDX-License-Identifier: Apache-2.0
"""Which objects and pods are a fleet's own. Pure.

A fleet finds both by its label, which anybody may give to something else. It changes an object, or lets a pod go, only
if it is its own. Of pods the label alone says that Services and rounds take them. A fleet's own pods are kept by
the StatefulSet of its name: that which it has made, or which its LeaderWorkerSet has made of the leaders. Whoever keeps
another pod decides about it, and a pod that nobody keeps would not come back.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, GROUPS_KIND
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.resolve import Refusal
from poc_operator.observed import Owner, PodView
from poc_operator.planning.eligibility import named
from poc_operator.planning.snapshot import WorkEvent, in_order

Object = Mapping[str, Any]

_KEEPER = "StatefulSet"
#: By these words a message that tells of pods of others is known.
_TOLD = "pods of others have the label"


def foreign(fleet: PoCFleet, found: Mapping[str, Any]) -> Refusal | None:
    """Return why an object that has the name of one of the fleet's is not to be touched; None if it is the fleet's.

    One without an owner is adopted if it has the fleet's label: it was left behind with ``--cascade=orphan``.
    """
    metadata = found["metadata"]
    kind, name = found.get("kind", "object"), metadata["name"]
    owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("controller")]
    if any(owner["uid"] != fleet.metadata.uid for owner in owners):
        owner = owners[0]
        why = f"belongs to {owner['kind']} {owner['name']} (uid {owner['uid']}): delete that, or wait until it is gone"
    elif (metadata.get("labels") or {}).get(FLEET_LABEL) != fleet.metadata.name and not owners:
        why = "exists and belongs to no fleet: delete it, or give the fleet another name"
    else:
        return None
    return Refusal(Reason.OBJECT_CONFLICT, f'{kind} "{name}" {why}')


def is_own(fleet: PoCFleet, pod: PodView, stateful_set: Object | None, groups: Object | None) -> bool:
    """Whether a pod with the fleet's label is its own.

    ``stateful_set`` is that of the fleet's name, and ``groups`` its LeaderWorkerSet, as the API server has them. Where
    they are not seen, as without the right to list them, names tell.
    """
    if is_stranger(fleet.metadata.name, pod):
        return False
    if stateful_set is None:
        return True
    is_theirs = pod.owner is None or pod.owner.uid == stateful_set["metadata"].get("uid")
    return is_theirs and _is_kept(fleet, stateful_set, groups)


def is_stranger(fleet: str, pod: PodView) -> bool:
    """Whether somebody else keeps a pod with the label of the fleet of this name, or nobody does.

    A pod that has lost its StatefulSet is no stranger: the next one adopts those of its names.
    """
    if pod.owner is None:
        prefix, _, number = pod.name.rpartition("-")
        return prefix != fleet or not number.isdecimal()
    return (pod.owner.kind, pod.owner.name) != (_KEEPER, fleet)


def _is_kept(fleet: PoCFleet, stateful_set: Object, groups: Object | None) -> bool:
    """Whether a StatefulSet of the fleet's name is the fleet's, or its LeaderWorkerSet's."""
    if fleet.spec.kubernetes_nodes == 1:
        return foreign(fleet, stateful_set) is None
    owner = Owner.parse(stateful_set["metadata"])
    if owner is None or (owner.kind, owner.name) != (GROUPS_KIND, fleet.metadata.name):
        return False
    return groups is None or (owner.uid == groups["metadata"].get("uid") and foreign(fleet, groups) is None)


def strangers(fleet: PoCFleet, pods: Iterable[PodView]) -> str:
    """Tell of pods that have the fleet's label and are not its own; empty without any.

    It is no fault of the fleet: its own pods serve and compute as they should.
    """
    theirs = (one for one in pods if one.stays and is_stranger(fleet.metadata.name, one))
    found = sorted(theirs, key=in_order)
    if not found:
        return ""
    label = f"{FLEET_LABEL}={fleet.metadata.name}"
    return f"{_TOLD} {label}: {named(found, keeper_of)}; the fleet leaves them alone: take the label from them"


def strangers_came(fleet: PoCFleet, told: str) -> list[WorkEvent]:
    """Return the Event about pods of others, unless the status has told of some before."""
    ready = fleet.status.own_conditions.get(ConditionType.READY)
    if not told or (ready is not None and _TOLD in ready.message):
        return []
    return [WorkEvent(reason=Reason.PODS_OF_OTHERS, message=told, warning=True)]


def keeper_of(pod: PodView) -> str:
    """Name what keeps a pod."""
    return f"{pod.owner.kind} {pod.owner.name}" if pod.owner is not None else "nobody keeps it"
