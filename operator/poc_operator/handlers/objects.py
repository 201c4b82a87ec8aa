# SPDX-License-Identifier: Apache-2.0
"""Objects of all kinds: one daemon for each that is not finished, and the clean-up of a deleted one; and the pods.

Pods are watched read-only; nothing is ever written to them.
"""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

import kopf

from poc_operator.apis.v1alpha1.meta import GROUP, VERSION
from poc_operator.apis.v1alpha1.status import is_finished
from poc_operator.controller.actions import Emit
from poc_operator.controller.failing_objects import RELEASE_SECONDS
from poc_operator.controller.kinds import PLANNERS, Planner
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.manager import Manager
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent
from vllm_poc.logs import bound

#: Seconds for a daemon to end by itself, as when its object is finished, before it is cancelled.
_BACKOFF_SECONDS = 2.0
_CANCEL_SECONDS = 10.0
#: Seconds after which kopf releases a deleted object on which its handler keeps failing.
_DELETE_SECONDS = RELEASE_SECONDS + 30.0


def _needs_reconciling(spec: kopf.Spec, status: kopf.Status, meta: kopf.Meta, **_: object) -> bool:
    unseen = status.get("observedGeneration") != meta.get("generation")
    return unseen or not is_finished(status) or spec.get("ttlSecondsAfterFinished") is not None


def _needs_stopping(status: kopf.Status, **_: object) -> bool:
    return not is_finished(status)


def _emitter(body: kopf.Body) -> Emit:
    def emit(event: WorkEvent) -> None:
        kind = "Warning" if event.warning else "Normal"
        kopf.event(body, type=kind, reason=event.reason, message=event.message)

    return emit


def _register(kind: type[Planner[Any]]) -> None:
    """Register the handlers of one kind with kopf."""
    plural = kind.resource.KIND.plural

    @kopf.daemon(
        GROUP,
        VERSION,
        plural,
        id=f"reconcile-{plural}",
        when=_needs_reconciling,
        cancellation_backoff=_BACKOFF_SECONDS,
        cancellation_timeout=_CANCEL_SECONDS,
    )
    async def reconcile(
        *,
        namespace: str | None,
        name: str,
        uid: str,
        body: kopf.Body,
        memo: kopf.Memo,
        stopped: kopf.DaemonStopped,
        **_: object,
    ) -> None:
        """Reconcile the object until kopf stops the daemon. When the operator ends, the pods go on.

        The daemon of a finished object is stopped as well, since it needs none. It must not end by itself: then kopf
        would not start another one for a changed spec.
        """
        manager: Manager = memo.manager
        ref = ObjectRef(namespace or "", name, uid)
        with bound(round=uid):
            loop = asyncio.create_task(manager.run(uid, manager.reconciler(kind, ref, _emitter(body))))
        stop = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait({loop, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop

    @kopf.on.event(GROUP, VERSION, plural, id=f"event-{plural}")
    async def changed(uid: str, meta: kopf.Meta, memo: kopf.Memo, **_: object) -> None:
        """React to a changed spec at once, as to ``suspend``."""
        manager: Manager = memo.manager
        manager.work_changed(uid, meta["generation"])

    @kopf.on.delete(GROUP, VERSION, plural, id=f"stop-{plural}", when=_needs_stopping, timeout=_DELETE_SECONDS)
    async def stop_deleted(
        *,
        namespace: str | None,
        name: str,
        uid: str,
        body: kopf.Body,
        memo: kopf.Memo,
        runtime: timedelta,
        **_: object,
    ) -> None:
        """Stop the pods of a deleted object; the finalizer holds it until they have, or time is up."""
        manager: Manager = memo.manager
        ref = ObjectRef(namespace or "", name, uid)
        with bound(round=uid):
            left = await manager.reconciler(kind, ref, _emitter(body)).stop_deleted(runtime.total_seconds())
        if left:
            raise kopf.TemporaryError(f"{left} pods still compute for the deleted object", delay=2)


for _kind in PLANNERS:
    _register(_kind)


@kopf.on.event("v1", "pods")
async def pod_event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: object) -> None:  # noqa: A002 - kopf's name
    """Pass every change of a pod on to the objects."""
    manager: Manager = memo.manager
    pod = PodView.parse(body)
    if type == "DELETED":
        manager.pod_deleted(pod)
    else:
        manager.pod_changed(pod)
