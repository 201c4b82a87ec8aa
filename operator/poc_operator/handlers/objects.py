# SPDX-License-Identifier: Apache-2.0
"""Objects: one daemon per round that is not finished, the clean-up of a deleted one, and the pods.

Pods are watched read-only; nothing is ever written to them.
"""

from collections.abc import Mapping
from typing import Any

import kopf

from poc_operator.controller.actions import Emit
from poc_operator.controller.logs import RoundRef
from poc_operator.controller.manager import Manager
from poc_operator.model import names
from poc_operator.model.status import RoundState
from poc_operator.observed.pods import PodView
from poc_operator.rounds.snapshot import RoundEvent

#: Seconds for a daemon to end by itself, as when its round is finished, before it is cancelled.
_BACKOFF_SECONDS = 2.0

_CANCEL_SECONDS = 10.0

#: Seconds for which a deleted round waits for its pods to stop; a pod flushes for 30 s at most.
_DELETE_SECONDS = 120.0


def _finished(status: Mapping[str, Any]) -> bool:
    return status.get("state") in (RoundState.COMPLETE, RoundState.FAILED)


def _needs_reconciling(spec: kopf.Spec, status: kopf.Status, **_: object) -> bool:
    return not _finished(status) or spec.get("ttlSecondsAfterFinished") is not None


def _needs_stopping(status: kopf.Status, **_: object) -> bool:
    return not _finished(status)


def _emitter(body: kopf.Body) -> Emit:
    def emit(event: RoundEvent) -> None:
        kind = "Warning" if event.warning else "Normal"
        kopf.event(body, type=kind, reason=event.reason, message=event.message)

    return emit


@kopf.daemon(
    names.GROUP,
    names.VERSION,
    names.PLURAL,
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
    **_: object,
) -> None:
    """Reconcile the round until it is finished. When the operator ends, the pods go on."""
    manager: Manager = memo.manager
    await manager.run(uid, manager.reconciler(RoundRef(namespace or "", name, uid), _emitter(body)))


@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL)
async def round_event(uid: str, meta: kopf.Meta, memo: kopf.Memo, **_: object) -> None:
    """React to a changed spec at once, as to ``suspend``."""
    manager: Manager = memo.manager
    manager.round_changed(uid, meta["generation"])


@kopf.on.delete(names.GROUP, names.VERSION, names.PLURAL, when=_needs_stopping, timeout=_DELETE_SECONDS)
async def stop_deleted(
    *, namespace: str | None, name: str, uid: str, body: kopf.Body, memo: kopf.Memo, **_: object
) -> None:
    """Stop the pods of a deleted round; the finalizer holds the object until they have, or time is up."""
    manager: Manager = memo.manager
    left = await manager.reconciler(RoundRef(namespace or "", name, uid), _emitter(body)).stop_all()
    if left:
        raise kopf.TemporaryError(f"{left} pods still compute the deleted round", delay=2)


@kopf.on.event("v1", "pods")
async def pod_event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: object) -> None:  # noqa: A002 - kopf's name
    """Pass every change of a pod on to the rounds."""
    manager: Manager = memo.manager
    pod = PodView.parse(body)
    if type == "DELETED":
        manager.pod_deleted(pod)
    else:
        manager.pod_changed(pod)
