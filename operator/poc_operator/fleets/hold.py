# SPDX-License-Identifier: Apache-2.0
"""Whether a new template waits before the StatefulSet may have it. Pure.

With ``OnDelete`` a StatefulSet replaces no pod by itself, but each pod that comes anew has its template. While a round
runs, or one is expected, that is the template with which its pods have begun.
"""

from collections.abc import Mapping
from typing import Any

from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import UpdateStrategy
from poc_operator.fleets.forecast import remembering
from poc_operator.fleets.merge import covers
from poc_operator.fleets.render import Object
from poc_operator.fleets.rollback import template_of
from poc_operator.fleets.update import UNDER_WAY, UpdateSeen, View, with_override, with_revision


def what_waits_for(asked: Object, found: Mapping[str, Any] | None, seen: UpdateSeen, *, downloads: bool) -> str:
    """Say what another template of a workload waits for; empty if it need not wait, or is there already.

    ``asked`` is the workload as it is wanted, ``found`` as the API server has it. ``downloads`` says that the model is
    not there yet. A LeaderWorkerSet may have the template: its leaders stay as they are until its partition moves.
    """
    if found is None or covers(template_of(found), template_of(asked)):
        return ""
    if downloads:
        return "the download of its model"
    return _why_held(seen) or "" if not seen.by_number else ""


def _why_held(seen: UpdateSeen) -> str | None:
    """Say for which round the StatefulSet keeps its template; None if it may have another one.

    A pod that is lost in a round comes back as the round has begun, and can go on with its slot. Where a pod cannot
    work, it may be the new template that mends it. An update that is under way goes on.
    """
    pods = with_revision(seen)
    old = remembering(seen.old, pods, seen.newest, seen.work, seen.now, seen.startup_limit)
    view = View(seen, old, pods)
    goes_on = seen.old.digest == seen.digest and seen.old.phase in UNDER_WAY
    if seen.spec.strategy is not UpdateStrategy.BETWEEN_ROUNDS or goes_on or view.failed is not None:
        return None
    if not view.pods or any(map(view.is_lost, view.pods)):
        return None
    reason = view.wait_of(view.pods)
    return None if reason is None else with_override(reason)


def held(status: UpdateStatus, reason: str, replicas: int) -> UpdateStatus:
    """Return the status of an update whose template waits for something before the StatefulSet may have it."""
    phase = status.phase if status.phase in UNDER_WAY else UpdatePhase.ROLLING
    message = f"0 of {replicas} pods are updated; waiting for {reason}"
    return status.model_copy(update={"phase": phase, "message": message})
