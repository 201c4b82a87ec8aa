# SPDX-License-Identifier: Apache-2.0
"""What to do next about a fleet: which of its objects are to be applied, and what its status says.

Which pods of an old revision leave, and when, is in `poc_operator.fleets.update`. The StatefulSet never replaces one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType, merge_conditions
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.forecast import WorkOnPods
from poc_operator.fleets.merge import PatchError, covers
from poc_operator.fleets.render import Object, render
from poc_operator.fleets.resolve import Refusal, Resolved, Surroundings, resolve
from poc_operator.fleets.rollback import differences, digest_of, with_template
from poc_operator.fleets.update import (
    REVISION_LABEL,
    Eviction,
    UpdateSeen,
    UpdateStep,
    failed_as,
    ordinal_of,
    plan_update,
    revision_of,
)
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent

#: Kind and name of an object of the fleet's namespace.
Key = tuple[str, str]

#: So many pods are named in a message.
_NAMED = 3
#: What pods wait for that passes by itself.
_PASSING = {"", "ContainersNotReady", "ContainerCreating", "PodInitializing", "Pending", "PodReadyToStartContainers"}


def key_of(body: Mapping[str, Any]) -> Key:
    """Return kind and name of an object."""
    return str(body["kind"]), str(body["metadata"]["name"])


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """What one plan of a fleet sees.

    ``objects`` are those with the fleet's label. ``settled`` has the versions of objects that were applied and do not
    look like what was wanted, since the API server writes some values in another way. ``refused`` is what became of
    the last objects that could not be applied.

    ``work`` are the objects that select the fleet's pods. ``busy`` and ``evicted`` are of `UpdateSeen`.
    ``good_template`` is the template of the last good revision, if an update has failed and it could be read.
    """

    fleet: PoCFleet
    around: Surroundings
    now: datetime
    objects: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    pods: Sequence[PodView] = ()
    settled: Mapping[Key, str] = field(default_factory=dict)
    refused: Refusal | None = None
    work: Sequence[WorkOnPods] = ()
    busy: Mapping[str, str] = field(default_factory=dict)
    evicted: frozenset[str] = frozenset()
    good_template: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class FleetStep:
    """What to apply, in this order, and the status to record. ``needs_token`` says that the pods' Secret must exist.

    ``evict`` are pods to evict once the status is recorded, ``events`` what to tell then. ``moves`` says that the next
    turn must not wait.
    """

    status: FleetStatus
    apply: Sequence[Object] = ()
    needs_token: bool = False
    evict: Sequence[Eviction] = ()
    events: Sequence[WorkEvent] = ()
    moves: bool = False


def plan(seen: FleetSnapshot) -> FleetStep:
    """Return the fleet's next step."""
    fleet = seen.fleet
    resolved = resolve(fleet.spec, seen.around, chosen=fleet.status.gpu_product)
    wanted = resolved if isinstance(resolved, Refusal) else _wanted(seen, resolved)
    if isinstance(wanted, Refusal):
        return FleetStep(status=_status(seen, None if isinstance(resolved, Refusal) else resolved, wanted))
    assert not isinstance(resolved, Refusal)  # noqa: S101 - for the type checker
    asked = _stateful_set(wanted)
    apply = [body for body in _with_good_template(seen, wanted) if _differs(seen, body)]
    update = plan_update(_update_seen(seen, asked, settled=_is_observed(seen) and _stateful_set(apply) is None))
    return FleetStep(
        status=_status(seen, resolved, seen.refused, _told(seen, asked, update)),
        apply=apply,
        needs_token=not fleet.spec.auth.open,
        evict=update.evict if seen.refused is None else (),
        events=update.events,
        moves=update.moves or bool(update.evict),
    )


def _stateful_set(bodies: Sequence[Object]) -> Object | None:
    return next((body for body in bodies if body["kind"] == "StatefulSet"), None)


def _with_good_template(seen: FleetSnapshot, wanted: Sequence[Object]) -> Sequence[Object]:
    """Return what is to be applied: if the template has failed, the last good one stands in the StatefulSet.

    While that cannot be read, the StatefulSet stays as it is.
    """
    asked, old = _stateful_set(wanted), seen.fleet.status.update
    if asked is None or not old.good_revision or failed_as(old, digest_of(asked)) is None:
        return wanted
    others = [body for body in wanted if body is not asked]
    return [*others, with_template(asked, seen.good_template)] if seen.good_template is not None else others


def _update_seen(seen: FleetSnapshot, asked: Object | None, *, settled: bool) -> UpdateSeen:
    fleet, old = seen.fleet, seen.fleet.status
    told = seen.objects.get(("StatefulSet", fleet.metadata.name), {}).get("status") or {}
    newest = str(told.get("updateRevision") or "")
    digest = digest_of(asked) if asked is not None else ""
    failed = failed_as(old.update, digest)
    grace = asked["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") if asked is not None else None
    return UpdateSeen(
        spec=fleet.spec.update,
        checks_pods=fleet.spec.self_check.enabled,
        replicas=fleet.spec.replicas,
        port=fleet.spec.port,
        old=old.update,
        now=seen.now,
        pods=seen.pods,
        newest=newest,
        # Until the good template is back, what comes anew would have the failed one.
        settled=settled and not (failed is not None and old.update.good_revision and newest == failed.revision),
        digest=digest,
        startup_limit=fleet.spec.startup_seconds,
        grace=grace if isinstance(grace, int) else fleet.spec.termination_grace_period_seconds,
        checks={pod.uid: pod for pod in old.pods},
        work=seen.work,
        busy=seen.busy,
        evicted=seen.evicted,
    )


def _told(seen: FleetSnapshot, asked: Object | None, update: UpdateStep) -> UpdateStatus:
    """Return the update's status; of one that has failed it says what differs."""
    status = update.status
    if status.phase is not UpdatePhase.FAILED or seen.good_template is None or asked is None:
        return status
    differs = differences(seen.good_template, asked["spec"]["template"])
    return status.model_copy(update={"message": f"{status.message}; {differs}" if differs else status.message})


def _wanted(seen: FleetSnapshot, resolved: Resolved) -> Sequence[Object] | Refusal:
    try:
        wanted = render(seen.fleet, resolved, seen.around)
    except PatchError as error:
        return Refusal(Reason.POD_TEMPLATE_INVALID, str(error))
    strangers = (foreign(seen.fleet, seen.objects[key]) for body in wanted if (key := key_of(body)) in seen.objects)
    return next((stranger for stranger in strangers if stranger is not None), wanted)


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


def _differs(seen: FleetSnapshot, wanted: Object) -> bool:
    key = key_of(wanted)
    found = seen.objects.get(key)
    if found is None:
        return True
    if "deletionTimestamp" in found["metadata"]:
        return False  # it is created anew when it is gone
    return found["metadata"]["resourceVersion"] != seen.settled.get(key) and not covers(found, wanted)


def _status(
    seen: FleetSnapshot, resolved: Resolved | None, refusal: Refusal | None, update: UpdateStatus | None = None
) -> FleetStatus:
    fleet, old = seen.fleet, seen.fleet.status
    update = update or old.update
    found = seen.objects.get(("StatefulSet", fleet.metadata.name), {})
    told = found.get("status") or {}
    newest = str(told.get("updateRevision") or old.update_revision)
    pods = [pod for pod in seen.pods if pod.stays]
    outdated = [pod for pod in pods if newest and pod.labels.get(REVISION_LABEL, newest) != newest]
    ready = sum(pod.ready for pod in pods)
    verdict = _Verdict.of(seen, refusal, pods, outdated, ready, update)
    rate = resolved.nonces_per_minute if resolved is not None else None
    return old.model_copy(
        update={
            "observed_generation": fleet.metadata.generation,
            "replicas": len(pods),
            "ready_replicas": ready,
            "updated_replicas": len(pods) - len(outdated),
            "ready": f"{ready}/{fleet.spec.replicas}",
            "reason": verdict.ready[1],
            "message": verdict.ready[2],
            "current_revision": next((pod.labels[REVISION_LABEL] for pod in outdated), newest),
            "update_revision": newest,
            "selector": f"{FLEET_LABEL}={fleet.metadata.name}",
            "model": resolved.model if resolved is not None else fleet.spec.model.path or "",
            "gpu_product": (resolved.gpu_product or "") if resolved is not None else old.gpu_product,
            "gpu_count": resolved.gpu_count if resolved is not None else 0,
            "seq_len": resolved.seq_len if resolved is not None else None,
            "k_dim": resolved.k_dim if resolved is not None else None,
            "expected_nonces_per_minute": rate * fleet.spec.replicas if rate is not None else None,
            "pods": _entries(old.pods, pods, fleet.spec.port),
            "update": update,
            "conditions": merge_conditions(old.conditions, verdict.conditions(seen.now, fleet.metadata.generation)),
        }
    )


def _entries(known: Sequence[FleetPod], pods: Sequence[PodView], port: int) -> list[FleetPod]:
    """Return an entry for each pod, by their numbers. What is known of a server lasts as long as that does."""
    before = {(entry.uid, entry.server): entry for entry in known}
    found = []
    for pod in sorted(pods, key=lambda pod: (ordinal_of(pod), pod.name)):
        key = (pod.uid, pod.server(port))
        entry = before.get(key) or FleetPod(name=pod.name, uid=key[0], server=key[1])
        found.append(entry.model_copy(update={"revision": revision_of(pod)}))
    return found


_Told = tuple[bool, Reason, str]


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """The fleet's conditions, each with status, reason and message."""

    ready: _Told
    progressing: _Told
    degraded: _Told
    stalled: _Told

    @classmethod
    def of(
        cls,
        seen: FleetSnapshot,
        refusal: Refusal | None,
        pods: Sequence[PodView],
        outdated: Sequence[PodView],
        ready: int,
        update: UpdateStatus,
    ) -> "_Verdict":
        """Return what holds of the fleet: a refusal first, then a failed update, then what its pods do."""
        found = cls._of_pods(seen, refusal, pods, outdated, ready, update)
        if refusal is not None or update.phase is not UpdatePhase.FAILED:
            return found
        told = (Reason.UPDATE_FAILED, update.message)
        return cls(
            ready=(found.ready[0], *told),
            progressing=found.progressing,
            degraded=(True, *told),
            stalled=(True, *told),
        )

    @classmethod
    def _of_pods(
        cls,
        seen: FleetSnapshot,
        refusal: Refusal | None,
        pods: Sequence[PodView],
        outdated: Sequence[PodView],
        ready: int,
        update: UpdateStatus,
    ) -> "_Verdict":
        fine = (Reason.ALL_REPLICAS_READY, f"all {seen.fleet.spec.replicas} replicas are ready")
        if refusal is not None:
            told = (refusal.reason, refusal.message)
            return cls(ready=(False, *told), progressing=(False, *told), degraded=(True, *told), stalled=(True, *told))
        failing = [pod for pod in pods if not pod.ready and pod.waiting_for not in _PASSING]
        waits = _waits_for(seen, pods, ready)
        if waits is not None:
            told = (
                (Reason.PODS_FAILING, f"{_named(failing)} cannot run")
                if failing
                else (Reason.REPLICAS_NOT_READY, waits)
            )
            return cls(
                ready=(False, *told),
                progressing=(True, *told),
                degraded=(bool(failing), *told),
                stalled=(False, *told),
            )
        if outdated:
            told = (Reason.PODS_OUTDATED, update.message)
            return cls(ready=(True, *told), progressing=(True, *told), degraded=(False, *fine), stalled=(False, *fine))
        return cls(ready=(True, *fine), progressing=(False, *fine), degraded=(False, *fine), stalled=(False, *fine))

    def conditions(self, now: datetime, generation: int) -> list[Condition]:
        told = {
            ConditionType.READY: self.ready,
            ConditionType.PROGRESSING: self.progressing,
            ConditionType.DEGRADED: self.degraded,
            ConditionType.STALLED: self.stalled,
        }
        return [
            Condition(
                type=kind,
                status="True" if holds else "False",
                reason=reason,
                message=message,
                observed_generation=generation,
                last_transition_time=now,
            )
            for kind, (holds, reason, message) in told.items()
        ]


def _waits_for(seen: FleetSnapshot, pods: Sequence[PodView], ready: int) -> str | None:
    """Say what the fleet waits for until all of its replicas are ready; None if they are."""
    wanted = seen.fleet.spec.replicas
    if len(pods) > wanted:
        return f"{len(pods) - wanted} pods are to go"
    if ready == wanted:
        # Until then it is not known which revision is the newest.
        return None if _is_observed(seen) else "Kubernetes has yet to see the StatefulSet as it is"
    waiting = [pod for pod in pods if not pod.ready]
    missing = wanted - len(pods)
    texts = ([f"{missing} pods are to be created"] if missing else []) + ([_named(waiting)] if waiting else [])
    return f"{ready} of {wanted} replicas are ready: {', '.join(texts)}"


def _is_observed(seen: FleetSnapshot) -> bool:
    """Whether the StatefulSet's status is about its present spec."""
    found = seen.objects.get(("StatefulSet", seen.fleet.metadata.name))
    if found is None:
        return False
    told = found.get("status") or {}
    return bool(told.get("observedGeneration") == found["metadata"].get("generation") and told.get("updateRevision"))


def _named(pods: Sequence[PodView]) -> str:
    texts = ", ".join(f"{pod.name} ({_state(pod)})" for pod in pods[:_NAMED])
    return texts if len(pods) <= _NAMED else f"{texts} and {len(pods) - _NAMED} more"


def _state(pod: PodView) -> str:
    loading = any(container.running_since is not None and not container.ended for container in pod.containers)
    return "loading" if loading and pod.waiting_for in _PASSING else pod.waiting_for or "not ready"
