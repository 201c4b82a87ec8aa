# SPDX-License-Identifier: Apache-2.0
"""What to do next about a fleet: which of its objects are to be applied, which pods leave, and what its status says.

Which pods of an old revision leave, and when, is in `poc_operator.fleets.update`. The StatefulSet never replaces one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from poc_operator.apis.v1alpha1.conditions import merge_conditions
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import Download, FleetPod, UpdateStrategy
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, GROUPS_KIND
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.checked_pods import CheckAnswer, CheckedPods, CheckPod, check_pods, finding
from poc_operator.fleets.conditions import PodCounts, Verdict, unmonitored
from poc_operator.fleets.download import DownloadSeen, download, holds_back, is_abandoned, is_held, job_name
from poc_operator.fleets.forecast import Eviction, WorkOnPods
from poc_operator.fleets.groups import HELD, partition_in, partition_of, with_partition
from poc_operator.fleets.healing import Healed, Sight, beside, faulty_gpus, heal
from poc_operator.fleets.history import Known, fleet_before, recorded, rescaled, serves_the_same
from poc_operator.fleets.merge import PatchError, covers
from poc_operator.fleets.progress import Watched
from poc_operator.fleets.render import Object, claim_of, render, render_beside, signed
from poc_operator.fleets.resolve import Refusal, Resolved, Surroundings, resolve, resolved_before
from poc_operator.fleets.rollback import (
    differences,
    digest_of,
    failed_as,
    follows,
    good_one,
    server_template_of,
    template_of,
)
from poc_operator.fleets.stages import GpuErrors, Nodes, with_stages
from poc_operator.fleets.strangers import foreign, is_own, strangers, strangers_came
from poc_operator.fleets.update import UpdateSeen, UpdateStep, plan_update
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent, in_order, ordinal_of

#: Kind and name of an object of the fleet's namespace.
Key = tuple[str, str]


def key_of(body: Mapping[str, Any]) -> Key:
    """Return kind and name of an object."""
    return str(body["kind"]), str(body["metadata"]["name"])


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """What one plan of a fleet sees.

    ``objects`` and ``pods`` are those with the fleet's label. ``settled`` has the versions of objects that were applied
    and do not look like what was wanted, since the API server writes some values in another way. ``refused`` is what
    became of the last objects that could not be applied, and ``left`` of those that could not be deleted.

    ``health`` is what was seen of the pods' engines, ``gpu_errors`` what their GPUs tell of errors, and ``answers``
    are those to self-checks, each by the pods' uids. ``download`` is what is seen of the download that is under way.
    ``work`` are the objects that select the fleet's pods. ``busy``, ``unevicted`` and ``evicted`` are of `UpdateSeen`,
    and ``evicted_names`` tells of the last for which revision pods of such names were evicted. ``nodes`` are Kubernetes
    nodes of pods that are not ready.
    ``good_template`` is the template of the last good revision, if an update has failed; None if that is gone.
    ``known`` is what this process has last known the fleet to serve.
    """

    fleet: PoCFleet
    around: Surroundings
    now: datetime
    objects: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    pods: Sequence[PodView] = ()
    settled: Mapping[Key, str] = field(default_factory=dict)
    refused: Refusal | None = None
    left: Refusal | None = None
    health: Mapping[str, Watched] = field(default_factory=dict)
    gpu_errors: Mapping[str, GpuErrors] = field(default_factory=dict)
    answers: Mapping[str, CheckAnswer] = field(default_factory=dict)
    download: DownloadSeen = field(default_factory=DownloadSeen)
    work: Sequence[WorkOnPods] = ()
    busy: Mapping[str, str] = field(default_factory=dict)
    unevicted: Mapping[str, str] = field(default_factory=dict)
    evicted: frozenset[str] = frozenset()
    evicted_names: Mapping[str, str] = field(default_factory=dict)
    good_template: Mapping[str, Any] | None = None
    nodes: Nodes = field(default_factory=dict)
    known: Known | None = None

    @cached_property
    def own(self) -> Sequence[PodView]:
        """The pods that are the fleet's own, by their numbers. All others with its label are left alone."""
        if self.stateful_set is None and self.refused is not None and self.refused.reason is Reason.OBJECT_CONFLICT:
            return []  # another StatefulSet may have the fleet's name, and not its label
        own = (pod for pod in self.pods if is_own(self.fleet, pod, self.stateful_set, self.groups))
        return sorted(own, key=in_order)

    @property
    def staying(self) -> Sequence[PodView]:
        """The fleet's pods that are not on their way out."""
        return [pod for pod in self.own if pod.stays]

    @property
    def stateful_set(self) -> Mapping[str, Any] | None:
        """The StatefulSet of the pods that serve, as the API server has it."""
        return self.objects.get(("StatefulSet", self.fleet.metadata.name))

    @property
    def groups(self) -> Mapping[str, Any] | None:
        """The LeaderWorkerSet as the API server has it, for replicas that span several Kubernetes nodes."""
        return self.objects.get((GROUPS_KIND, self.fleet.metadata.name))

    @property
    def workload(self) -> Mapping[str, Any] | None:
        """The one of both that the fleet keeps."""
        return self.stateful_set if self.fleet.spec.kubernetes_nodes == 1 else self.groups

    @property
    def newest(self) -> str:
        """The revision of the pods that are created from now on; empty before Kubernetes has told of one."""
        return str(((self.stateful_set or {}).get("status") or {}).get("updateRevision") or "")

    @property
    def is_observed(self) -> bool:
        """Whether the StatefulSet's status is about its present spec, and that about the LeaderWorkerSet's."""
        found, groups = self.stateful_set, self.groups
        is_up_to_date = self.fleet.spec.kubernetes_nodes == 1 or (_is_observed(groups) and follows(found, groups))
        return is_up_to_date and _is_observed(found) and bool(self.newest)


def _is_observed(found: Mapping[str, Any] | None) -> bool:
    generation = found["metadata"].get("generation") if found is not None else None
    return found is not None and (found.get("status") or {}).get("observedGeneration") == generation


@dataclass(frozen=True, kw_only=True)
class FleetStep:
    """What to delete, what to apply, in this order, and the status to record.

    ``needs_token`` says that the pods' Secret must exist. What is to be deleted is as the API server has it.

    ``checks`` are the pods to ask for a self-check once the status is recorded, ``evict`` those to evict, and
    ``events`` what to tell then. ``moves`` says that the next turn must not wait. ``known`` is for the next
    snapshot.
    """

    status: FleetStatus
    known: Known | None = None
    delete: Sequence[Mapping[str, Any]] = ()
    apply: Sequence[Object] = ()
    needs_token: bool = False
    checks: Sequence[CheckPod] = ()
    evict: Sequence[Eviction] = ()
    events: Sequence[WorkEvent] = ()
    moves: bool = False


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The objects that there should be now, those to delete, and what to record of the download of the model.

    ``asked`` is the workload that the spec asks for, which is none of the objects while its model is downloaded.
    """

    objects: Sequence[Object]
    download: Download | None
    asked: Object
    limit: int
    delete: Sequence[Mapping[str, Any]] = ()


def plan(seen: FleetSnapshot) -> FleetStep:
    """Return the fleet's next step.

    While its spec cannot be used, the fleet goes on with the last one that could, but for what is about no template.
    """
    resolved = resolve(seen.fleet.spec, seen.around, chosen=seen.fleet.status.gpu_product)
    if isinstance(resolved, Refusal):
        return _unusable(seen, resolved)
    wanted = _wanted(seen, resolved)
    if isinstance(wanted, Refusal) and wanted.reason is Reason.POD_TEMPLATE_INVALID:
        return _unusable(seen, wanted, resolved)
    return _step(seen, wanted, resolved, Known(seen.fleet.spec, resolved))


def _unusable(seen: FleetSnapshot, refusal: Refusal, resolved: Resolved | None = None) -> FleetStep:
    """Return the next step of a fleet whose spec is refused; ``resolved`` is what it says nevertheless.

    A process that has known no other spec keeps the template that the workload has, and what the status tells.
    """
    known, fleet, workload = seen.known, seen.fleet, seen.workload
    if refusal.reason is Reason.LEADER_WORKER_SET_UNKNOWN:
        return _step(seen, refusal, known.resolved if known is not None else None, known)  # it cannot be applied
    if known is not None:
        now = _with_fleet(seen, known.fleet(fleet))
        return _step(now, _wanted(now, known.resolved), known.resolved, known, refusal)
    before = fleet_before(fleet, workload) if workload is not None else fleet
    if resolved is None or not serves_the_same(before.spec, fleet.spec):
        resolved = resolved_before(fleet.status) if fleet.status.stat_test is not None else None
    return _step(_with_fleet(seen, before), refusal, resolved, None, refusal)


def _with_fleet(seen: FleetSnapshot, fleet: PoCFleet) -> FleetSnapshot:
    """Return the snapshot with the fleet as it was. Nothing is known of a PVC that it had then."""
    claim = seen.download.claim if claim_of(fleet) == claim_of(seen.fleet) else None
    return replace(seen, fleet=fleet, download=replace(seen.download, claim=claim))


def _upkeep(seen: FleetSnapshot) -> Sequence[Object]:
    """Return what is to be applied of a fleet whose template is not known: there must be a workload that has it."""
    fleet, found = seen.fleet, seen.workload
    if found is None:
        return []
    wanted = list(render_beside(fleet, seen.around))
    there = [body for key in map(key_of, wanted) if (body := seen.objects.get(key)) is not None]
    if any(foreign(fleet, body) is not None for body in (*there, found)):
        return []
    if found["spec"].get("replicas") != fleet.spec.replicas and not is_held(fleet, seen.download):
        wanted.append(rescaled(fleet, found))
    return [body for body in _held(seen, wanted) if _differs(seen, body)]


def _step(
    seen: FleetSnapshot,
    wanted: _Wanted | Refusal,
    resolved: Resolved | None,
    known: Known | None,
    refusal: Refusal | None = None,
) -> FleetStep:
    """Return the next step towards what is wanted; ``refusal`` says why that is not what the spec asks for."""
    fleet, asked, apply, about = seen.fleet, None, list[Object](), None
    told = wanted if isinstance(wanted, Refusal) else None
    if not isinstance(wanted, Refusal):
        asked = _workload(wanted.objects)
        apply = [body for body in _held(seen, _with_good_template(seen, wanted), asked) if _differs(seen, body)]
        about = _update_seen(seen, wanted, asked, settled=seen.is_observed and _workload(apply) is None)
    healed = heal(fleet, seen.own, Sight(seen.health, {**seen.unevicted, **seen.busy}, about), seen.now)
    checked = check_pods(fleet, resolved, seen.staying, seen.answers, seen.now)
    parts = _Parts(seen, resolved or resolved_before(fleet.status), healed, checked)
    others = strangers_came(fleet, strangers(fleet, seen.pods))
    sick = [one for one in healed.evict if one.pod.uid not in seen.busy and one.pod.uid not in seen.evicted]
    if isinstance(wanted, Refusal) or about is None:
        status = parts.status(refusal or told, fleet.status.download, fleet.status.update)
        is_kept = wanted is refusal and seen.workload is not None
        return FleetStep(
            status=status,
            known=known,
            apply=_upkeep(seen) if is_kept else (),
            needs_token=is_kept and not fleet.spec.auth.open,
            checks=checked.asks,
            evict=sick,
            events=others,
        )
    update = _update(seen, wanted, asked, about)
    outdated = beside(sick, update.evict, seen.unevicted) if seen.refused is None else ()
    return FleetStep(
        status=parts.status(refusal or seen.refused, wanted.download, _told(seen, asked, update)),
        known=known,
        delete=wanted.delete,
        apply=apply,
        needs_token=not fleet.spec.auth.open,
        checks=checked.asks,
        evict=(*outdated, *sick),
        events=[*update.events, *others],
        # No watch tells when a budget allows an eviction again, or a pod has done the work of others.
        moves=update.moves or bool(update.evict) or bool(seen.busy) or healed.moves,
    )


def _update(seen: FleetSnapshot, wanted: _Wanted, asked: Object | None, about: UpdateSeen) -> UpdateStep:
    """Return the next step of the update, or of the one before while a new template waits for its model.

    The end of that one is not the end of the new one. Nobody leaves for a template that the spec does not ask for any
    more, but for the good one on the way back.
    """
    step, old = plan_update(about), seen.fleet.status.update
    if asked is not None or wanted.download is None:
        return step
    phase, told = step.status.phase, {"message": holds_back(wanted.download, seen.download.pods)}
    if step.evict and phase is not UpdatePhase.FAILED:
        canary = old.model_dump(include={"canary", "canary_node", "canary_time"})
        return replace(step, evict=(), status=step.status.model_copy(update={**canary, **told}))
    if phase in (UpdatePhase.CANARY, UpdatePhase.ROLLING):
        return replace(step, status=step.status.model_copy(update=told))
    over = phase in (UpdatePhase.COMPLETE, UpdatePhase.WAITING)
    if not over or step.status.digest in ("", digest_of(wanted.asked)):
        return step
    return replace(step, status=step.status.model_copy(update={"phase": UpdatePhase.WAITING, **told}))


def _workload(bodies: Sequence[Object]) -> Object | None:
    return next((body for body in bodies if _is_workload(body)), None)


def _is_workload(body: Object) -> bool:
    return body["kind"] in ("StatefulSet", GROUPS_KIND)


def _held(seen: FleetSnapshot, wanted: Sequence[Object], asked: Object | None = None) -> Sequence[Object]:
    """Return what is to be applied, a LeaderWorkerSet so that no leader is replaced that is not to be."""
    digest = digest_of(asked) if asked is not None else None
    return [_with_partition(seen, body, digest) if body["kind"] == GROUPS_KIND else body for body in wanted]


def _with_partition(seen: FleetSnapshot, body: Object, digest: str | None) -> Object:
    found = seen.groups
    moves = found is not None and covers(template_of(found), template_of(body))
    partition = partition_in(found) if found is not None and moves else HELD
    # Another template begins with all leaders as they are. Until the StatefulSet has seen it too, nothing moves: what
    # that tells of its revisions is about the template before.
    if moves and seen.is_observed:
        leaders, pods = seen.stateful_set, [(ordinal_of(pod.name), pod) for pod in seen.own]
        gone, names = seen.evicted, seen.evicted_names
        partition = partition_of(seen.fleet, leaders, partition, pods, evicted=gone, names=names, digest=digest)
    return signed(with_partition(body, partition))


def _with_good_template(seen: FleetSnapshot, wanted: _Wanted) -> Sequence[Object]:
    """Return what is to be applied: if the template has failed, the last good one stands in the workload.

    While that cannot be read, the workload stays as it is, unless there is nothing to go back to. While the workload
    waits for a download, what counts is the template of the update before: pods that are lost come back with it.
    """
    asked, old, checks_pods = _workload(wanted.objects), seen.fleet.status.update, seen.fleet.spec.self_check.enabled
    digest = digest_of(asked) if asked is not None else old.digest
    if not old.good_revision or failed_as(old, digest, checks_pods=checks_pods) is None:
        return wanted.objects
    if _is_good_one_lost(seen, wanted.asked):
        return wanted.objects
    good = good_one(wanted.asked, seen.good_template)
    return [*(body for body in wanted.objects if body is not asked), *([good] if good is not None else [])]


def _is_good_one_lost(seen: FleetSnapshot, asked: Object) -> bool:
    """Whether no template but the failed one is left, as when somebody has deleted the workload with its revisions."""
    found = seen.objects.get(key_of(asked))
    is_there = good_one(asked, seen.good_template) is not None
    return not is_there and (found is None or covers(template_of(found), template_of(asked)))


def _update_seen(seen: FleetSnapshot, wanted: _Wanted, asked: Object | None, *, settled: bool) -> UpdateSeen:
    fleet, old, update = seen.fleet, seen.fleet.status, seen.fleet.status.update
    # While the StatefulSet waits for a download, the update is that of before.
    # What strategy Never has left unnamed is no update that goes on.
    digest = digest_of(asked) if asked is not None else update.digest or seen.newest
    failed = failed_as(update, digest, checks_pods=fleet.spec.self_check.enabled)
    if failed is not None and asked is not None and _is_good_one_lost(seen, asked):
        update = update.model_copy(update={"good_revision": ""})
    pod = server_template_of(asked)["spec"] if asked is not None else {}
    grace = pod.get("terminationGracePeriodSeconds")
    return UpdateSeen(
        spec=fleet.spec.update,
        checks_pods=fleet.spec.self_check.enabled,
        name=fleet.metadata.name,
        replicas=fleet.spec.replicas,
        by_number=fleet.spec.kubernetes_nodes > 1,
        port=fleet.spec.port,
        old=update,
        now=seen.now,
        pods=seen.own,
        newest=seen.newest,
        # Until the good template is back, what comes anew would have the failed one.
        settled=settled and not (failed is not None and update.good_revision and seen.newest == failed.revision),
        digest=digest,
        startup_limit=wanted.limit,
        grace=grace if isinstance(grace, int) else fleet.spec.termination_grace_period_seconds,
        checks={pod.uid: pod for pod in old.pods},
        work=seen.work,
        busy=seen.busy,
        unevicted=seen.unevicted,
        evicted=seen.evicted,
        nodes=seen.nodes,
    )


def _told(seen: FleetSnapshot, asked: Object | None, update: UpdateStep) -> UpdateStatus:
    """Return the update's status; of one that has failed it says what differs."""
    status = update.status
    good = good_one(asked, seen.good_template) if asked is not None else None
    if status.phase is not UpdatePhase.FAILED or good is None or asked is None:
        return status
    differs = differences(template_of(good), template_of(asked))
    return status.model_copy(update={"message": f"{status.message}; {differs}" if differs else status.message})


def _wanted(seen: FleetSnapshot, resolved: Resolved) -> _Wanted | Refusal:
    fleet, name = seen.fleet, job_name(seen.fleet, resolved)
    jobs = {one: body for (kind, one), body in seen.objects.items() if kind == "Job"}
    job = jobs.get(name)
    try:
        wanted = [recorded(fleet, body) for body in render(fleet, resolved, seen.around)]
        ahead = download(fleet, resolved, seen.around, jobs, seen.download)
    except PatchError as error:
        return Refusal(Reason.POD_TEMPLATE_INVALID, str(error))
    there = [seen.objects[key] for body in wanted if (key := key_of(body)) in seen.objects]
    there += [job] if job is not None and ahead.holds else []
    conflict = next((found for body in there if (found := foreign(fleet, body)) is not None), None)
    if conflict is not None:
        return conflict
    kept = name if fleet.spec.cache.download else ""
    unwanted = [body for body in seen.objects.values() if is_abandoned(fleet, body, kept)]
    unwanted += [job] if job is not None and ahead.outdated else []
    (asked,) = filter(_is_workload, wanted)
    now = [body for body in wanted if not (ahead.holds and body is asked)]
    now += [ahead.job] if ahead.job is not None else []
    return _Wanted(objects=now, download=ahead.record, asked=asked, limit=resolved.startup_seconds, delete=unwanted)


def _differs(seen: FleetSnapshot, wanted: Object) -> bool:
    key = key_of(wanted)
    found = seen.objects.get(key)
    if found is None:
        return True
    if "deletionTimestamp" in found["metadata"]:
        return False  # it is created anew when it is gone
    if covers(found, wanted):
        return False
    # Its digest tells whether the same was wanted then.
    settled = found["metadata"]["resourceVersion"] == seen.settled.get(key)
    return not settled or not covers(found["metadata"], wanted["metadata"])


@dataclass(frozen=True)
class _Parts:
    """What a status is made of, whatever becomes of the objects."""

    seen: FleetSnapshot
    resolved: Resolved | None
    healed: Healed
    checked: CheckedPods

    def status(self, refusal: Refusal | None, ahead: Download | None, update: UpdateStatus) -> FleetStatus:
        """Return the status to record; ``refusal`` says why the fleet cannot be as its spec wants it."""
        seen, resolved, fleet, old = self.seen, self.resolved, self.seen.fleet, self.seen.fleet.status
        newest, pods = seen.newest or old.update_revision, seen.staying
        waits = update.phase is UpdatePhase.WAITING  # nothing has the template yet that the spec asks for
        outdated = [pod for pod in pods if waits or (newest and pod.revision not in ("", newest))]
        port, checks = fleet.spec.port, fleet.spec.self_check.enabled
        counts = PodCounts(
            replicas=fleet.spec.replicas,
            port=port,
            pods=pods,
            outdated=outdated,
            observed=seen.is_observed,
            replaces=not fleet.spec.update.paused and fleet.spec.update.strategy is not UpdateStrategy.NEVER,
            nodes=seen.nodes,
            now=seen.now,
        )
        entries = with_stages(self.checked.pods, old.pods, pods, port, seen.gpu_errors, checks_pods=checks)
        verdict = self._verdict(counts, refusal, ahead, update, entries)
        reason, message = verdict.shown
        rate = resolved.nonces_per_minute if resolved is not None else None
        changes = {
            "observed_generation": fleet.metadata.generation,
            "replicas": len(pods),
            "ready_replicas": counts.ready,
            "updated_replicas": len(pods) - len(outdated),
            "ready": f"{counts.ready}/{fleet.spec.replicas}",
            "reason": reason,
            "message": message,
            "current_revision": next((pod.revision for pod in outdated), newest),
            "update_revision": newest,
            "selector": f"{FLEET_LABEL}={fleet.metadata.name}",
            "model": resolved.model if resolved is not None else fleet.spec.model.path or "",
            "gpu_product": (resolved.gpu_product or "") if resolved is not None else old.gpu_product,
            "gpu_count": resolved.gpu_count if resolved is not None else 0,
            "seq_len": resolved.seq_len if resolved is not None else None,
            "k_dim": resolved.k_dim if resolved is not None else None,
            "stat_test": resolved.stat_test if resolved is not None and not resolved.remembered else old.stat_test,
            "expected_nonces_per_minute": rate * fleet.spec.replicas if rate is not None else None,
            "pods": entries,
            "self_check_references": list(self.checked.references),
            "restarts": list(self.healed.restarts),
            "download": ahead,
            "update": update,
            "conditions": merge_conditions(old.conditions, verdict.conditions(seen.now, fleet.metadata.generation)),
        }
        return old.model_copy(update=changes)

    def _verdict(
        self,
        counts: PodCounts,
        refusal: Refusal | None,
        ahead: Download | None,
        update: UpdateStatus,
        entries: Sequence[FleetPod],
    ) -> Verdict:
        findings = [*self.healed.findings, *faulty_gpus(entries, self.healed)]
        findings += unmonitored(self.seen.fleet, self.seen.around)
        findings += [(self.seen.left.reason, self.seen.left.message)] if self.seen.left is not None else []
        others = strangers(self.seen.fleet, self.seen.pods)
        if refusal is not None:
            return Verdict.of_refusal(refusal).with_findings(findings).with_strangers(others)
        checks = finding(self.checked) if self.seen.fleet.spec.self_check.enabled else None
        found = Verdict.of_pods(counts, update).with_checks(checks).with_update(update)
        found = found.with_download(ahead, self.seen.download.pods, counts, exists=self.seen.stateful_set is not None)
        return found.with_findings(findings).with_strangers(others)
