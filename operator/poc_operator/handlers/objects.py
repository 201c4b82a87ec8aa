# SPDX-License-Identifier: Apache-2.0
"""Objects of all kinds, and the pods: what the watches tell is passed on, and a deleted object is held.

The manager has one loop for each object that needs one, which also takes a deleted object to its end. Pods are watched
read-only; nothing is ever written to them.
"""

from typing import Any

import kopf

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import GROUP, VERSION
from poc_operator.apis.v1alpha1.status import is_over
from poc_operator.controller.actions import Emit
from poc_operator.controller.failing_objects import RELEASE_SECONDS
from poc_operator.controller.kinds import PLANNERS, Planner
from poc_operator.controller.manager import Manager
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent

#: Seconds after which kopf releases a deleted object on which everything else fails.
_DELETE_SECONDS = RELEASE_SECONDS + 30.0
#: Seconds for which one call waits for the end of a deleted object's loop.
_WAIT_SECONDS = 10.0


def _is_held(status: kopf.Status, memo: kopf.Memo, **_: object) -> bool:
    """Whether the object needs the finalizer. What is finished or suspended has no pods to stop."""
    manager: Manager = memo.manager
    return manager.holds_deleted and not is_over(status)


def _emitter(body: kopf.Body) -> Emit:
    def emit(event: WorkEvent) -> None:
        kind = "Warning" if event.warning else "Normal"
        kopf.event(body, type=kind, reason=event.reason, message=event.message)

    return emit


def _register(kind: type[Planner[Any]]) -> None:
    """Register the handlers of one kind with kopf."""
    plural = kind.resource.KIND.plural

    @kopf.on.event(GROUP, VERSION, plural, id=f"event-{plural}")
    async def changed(type: str | None, uid: str, body: kopf.Body, memo: kopf.Memo, **_: object) -> None:  # noqa: A002
        """Let the object's loop begin, or see what changed. When the operator ends, the pods go on."""
        manager: Manager = memo.manager
        if type == "DELETED":
            manager.work_deleted(uid)
        else:
            manager.work_changed(kind, body, _emitter(body))

    @kopf.on.delete(GROUP, VERSION, plural, id=f"hold-{plural}", when=_is_held, timeout=_DELETE_SECONDS)
    async def hold(uid: str, memo: kopf.Memo, **_: object) -> None:
        """Hold a deleted object with the finalizer until its loop has stopped the pods, or gives up waiting."""
        manager: Manager = memo.manager
        if not await manager.released(uid, _WAIT_SECONDS):
            raise kopf.TemporaryError("pods still compute for the deleted object", delay=1)


for _kind in PLANNERS:
    _register(_kind)


@kopf.on.event(GROUP, VERSION, PoCFleet.KIND.plural, id=f"event-{PoCFleet.KIND.plural}")
async def fleet_event(type: str | None, uid: str, body: kopf.Body, memo: kopf.Memo, **_: object) -> None:  # noqa: A002
    """Let the fleet's loop begin, or see what changed. Nothing holds a deleted fleet: its objects go with it."""
    manager: Manager = memo.manager
    if manager.fleets is None:
        return
    if type == "DELETED":
        manager.fleets.deleted(uid)
    else:
        manager.fleets.changed(dict(body))


@kopf.on.event("v1", "pods")
async def pod_event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: object) -> None:  # noqa: A002 - kopf's name
    """Pass every change of a pod on to the objects."""
    manager: Manager = memo.manager
    pod = PodView.parse(body)
    if type == "DELETED":
        manager.pod_deleted(pod)
    else:
        manager.pod_changed(pod)
