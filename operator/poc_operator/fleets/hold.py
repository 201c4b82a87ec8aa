# SPDX-License-Identifier: Apache-2.0
"""Whether a new template waits before the StatefulSet may have it. Pure.

With ``OnDelete`` a StatefulSet replaces no pod by itself, but each pod that comes anew has its template. While a round
runs, or one is expected, that is the template with which its pods have begun.
"""

from dataclasses import replace

from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import UpdateStrategy
from poc_operator.fleets.forecast import remembering
from poc_operator.fleets.update import UpdateSeen, UpdateStep, View, with_override, with_revision


def is_new(seen: UpdateSeen) -> bool:
    """Whether the spec asks for another template than the last one that an update was about.

    What the StatefulSet has tells less: the API server stores some fields otherwise, and somebody may have edited it.
    """
    return seen.old.digest not in ("", seen.digest)


def why_held(seen: UpdateSeen) -> str:
    """Say for which round the StatefulSet keeps its template; empty if it may have another one.

    A pod that is lost in a round comes back as the round has begun, and can go on with its slot. Where a pod cannot
    work, it may be the new template that mends it, and pods that are not ready and have no slot are no loss. A
    LeaderWorkerSet may have the template, since its leaders stay as they are until its partition moves.
    """
    if seen.by_number or not is_new(seen) or seen.spec.strategy is not UpdateStrategy.BETWEEN_ROUNDS:
        return ""
    pods = with_revision(seen)
    view = View(seen, remembering(seen.old, pods, seen.newest, seen.work, seen.now, seen.startup_limit), pods)
    working = [pod for pod in pods if pod.ready or pod.uid in view.slots]
    if view.failed is not None or not working or any(map(view.is_lost, pods)):
        return ""
    reason = view.wait_of(working)
    return "" if reason is None else with_override(reason)


def held(seen: UpdateSeen, reason: str) -> UpdateStep:
    """Return the step of an update that waits to begin: no pod leaves for the template of the one before."""
    old = remembering(seen.old, with_revision(seen), seen.newest, seen.work, seen.now, seen.startup_limit)
    return UpdateStep(status=_waiting(old, reason, seen.replicas))


def behind_download(seen: UpdateSeen, step: UpdateStep) -> UpdateStep:
    """Return the step of the update before, whose end is not that of the one that waits for its model."""
    if not is_new(seen) or step.status.phase not in (UpdatePhase.COMPLETE, UpdatePhase.WAITING):
        return step
    return replace(step, status=_waiting(step.status, "the download of its model", seen.replicas))


def _waiting(status: UpdateStatus, reason: str, replicas: int) -> UpdateStatus:
    message = f"0 of {replicas} pods are updated; waiting for {reason}"
    return status.model_copy(update={"phase": UpdatePhase.WAITING, "message": message})
