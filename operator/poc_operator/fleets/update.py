# SPDX-License-Identifier: Apache-2.0
"""Which pods of an old revision are to be replaced now, and how far an update is. Pure.

::

    Complete ── pods have an old revision ──> Canary ── the canary has passed ──> Rolling ── no old pod ──> Complete
                                                │
                                                └── the canary has failed ──> Failed ── another template ──> Canary

    Rolling ── another new pod has failed ──> Stopped ── it works ──> Rolling

A pod leaves by an eviction; what makes it anew is its StatefulSet, or its LeaderWorkerSet. The canary is the first pod
that has the new revision, whoever replaced it. It has passed when it is ready and its self-check has passed. It has
failed when its self-check has failed, it crashes, its image cannot be had, or it is not ready within
``startupSeconds``. So has one that is ready, and could not be checked for as long, and one that the scheduler leaves
out for its template: `poc_operator.fleets.rollback`. Then the StatefulSet gets the template of the last good revision
back, the canary is replaced once more, and the failed template is not tried again. Without a good revision it stays,
and the update goes on once it works. One that no Kubernetes node has room for, or whose node is not well, has not
failed: it waits, as `poc_operator.fleets.stages` says. If it gets no node, or cannot end, another pod is the canary.

A pod that is missing comes with the newest revision, so it is the canary. One that Kubernetes does not create within
``startupSeconds`` has failed too, since its template may be refused. Another template has that time anew.

Later pods do not fail an update, since the canary has shown that the template can work: as with ``kubectl rollout``
nothing goes back by itself. One that fails like a canary stops the update until it works, unless its template was good.

Pods without a slot wait for no round if they cannot run, have failed their self-check, or have no Kubernetes node. Nor
do those that are not ready if their template has failed, or ``startupSeconds`` are over. What others wait for is in
`poc_operator.fleets.forecast`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from itertools import takewhile

from poc_operator.apis.v1alpha1.fleet_update import MAX_FAILED, FailedUpdate, UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, FleetPod, Update, UpdateStrategy
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.forecast import (
    Eviction,
    Spares,
    WorkOnPods,
    blocker,
    remembered,
    replacement_seconds,
    startup_seconds,
)
from poc_operator.fleets.rollback import Trial, failed_as, is_newer
from poc_operator.fleets.stages import Nodes, is_homeless, is_hopeless, is_late, node_fault, why_not_ready
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import WorkEvent, in_order, ordinal_of

#: So many pods are named in a message.
_NAMED = 3
_UNDER_WAY = (UpdatePhase.CANARY, UpdatePhase.ROLLING, UpdatePhase.STOPPED)
_IF_MEANT = "; if the change is meant, set selfCheck.enabled to false until all pods have it"
_OVERRIDE = " (update.strategy Immediate does not wait)"


@dataclass(frozen=True, kw_only=True)
class UpdateSeen:
    """What one plan of an update sees.

    ``name`` is the fleet's, and ``newest`` the StatefulSet's newest revision. ``settled`` says that Kubernetes has
    seen the StatefulSet as it is wanted. ``digest`` is that of the template that the spec asks for. ``checks`` are by
    the pods' uids. ``busy`` says why pods could not be evicted a moment ago, by their uids, and ``unevicted`` for
    longer why the API server did not evict them. ``evicted`` are those that were, and may still look as before.
    ``by_number`` says that a pod can get the newest revision only after all with higher numbers, and that Kubernetes
    replaces a pod that crashes. ``startup_limit`` and ``grace`` are seconds: for the start of a pod, and for its end.
    ``nodes`` are the Kubernetes nodes that are known, by name.
    """

    spec: Update
    checks_pods: bool
    name: str
    replicas: int
    port: int
    old: UpdateStatus
    now: datetime
    pods: Sequence[PodView]
    newest: str
    settled: bool
    digest: str
    startup_limit: int
    grace: int
    checks: Mapping[str, FleetPod] = field(default_factory=dict)
    work: Sequence[WorkOnPods] = ()
    busy: Mapping[str, str] = field(default_factory=dict)
    unevicted: Mapping[str, str] = field(default_factory=dict)
    evicted: frozenset[str] = frozenset()
    by_number: bool = False
    nodes: Nodes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """The update's status, which pods to evict once it is recorded, and what to tell.

    ``moves`` says that something is under way that no watch of pods tells of.
    """

    status: UpdateStatus
    evict: Sequence[Eviction] = ()
    events: Sequence[WorkEvent] = ()
    moves: bool = False


def _on_its_way(seen: UpdateSeen, old: UpdateStatus) -> UpdateStatus:
    """Return the status while Kubernetes has yet to see what is wanted: another template is no complete update."""
    is_over = bool(seen.newest) and old.phase in (UpdatePhase.COMPLETE, UpdatePhase.FAILED, UpdatePhase.STOPPED)
    if not is_over or old.digest in ("", seen.digest) or failed_as(old, seen.digest, checks_pods=seen.checks_pods):
        return old
    return old.model_copy(update={"phase": UpdatePhase.WAITING, "message": "the new template is being applied"})


def plan_update(seen: UpdateSeen) -> UpdateStep:
    """Return the update's next step."""
    # A pod without a revision was made by hand, and its StatefulSet has adopted it.
    pods = [pod for pod in seen.pods if pod.stays and pod.revision and pod.uid not in seen.evicted]
    updated = [pod for pod in pods if pod.revision == seen.newest]
    limit = seen.startup_limit
    old = seen.old.model_copy(
        update={
            "rounds": remembered(seen.old.rounds, seen.work, seen.now),
            "startup_seconds": startup_seconds(updated, 0, limit)
            or startup_seconds(pods, min(seen.old.startup_seconds, limit), limit),
        }
    )
    view = _View(seen, old, pods)
    if not seen.newest or not seen.settled:
        return UpdateStep(status=_on_its_way(seen, old), moves=True)
    if view.failed is not None and not view.works_after_all:
        return _after_failure(view, view.failed)
    if view.failed is not None:
        view = _View(seen, view.forgiven, pods)
    return _begun(view) if view.outdated else _without_old_pods(view)


class _View:
    """What is seen, in the words of an update. ``pods`` are those that stay."""

    def __init__(self, seen: UpdateSeen, old: UpdateStatus, pods: Sequence[PodView]) -> None:
        self.seen = seen
        self.old = old
        self.pods = sorted(pods, key=in_order)
        self.failed = failed_as(old, seen.digest, checks_pods=seen.checks_pods)
        # Going back may give the good template a new name.
        kept = {seen.newest, old.good_revision} if self.failed is not None else {seen.newest}
        self.updated = [pod for pod in self.pods if pod.revision in kept]
        self.outdated = [pod for pod in self.pods if pod.revision not in kept]

    @property
    def trial(self) -> Trial:
        """What is known of the pods that have the newest revision."""
        seen = self.seen
        return Trial(seen.checks, seen.nodes, seen.now, seen.startup_limit, seen.port, seen.checks_pods, self.old)

    @cached_property
    def proving(self) -> Sequence[PodView]:
        """The pods that are to show whether the newest revision works."""
        return [pod for pod in self.updated if self.trial.proves(pod)]

    @property
    def works_after_all(self) -> bool:
        """Whether a template that has failed works now, as with a Secret made meanwhile, and nothing else is good."""
        return not self.old.good_revision and bool(self.updated) and all(map(self.available, self.updated))

    @property
    def forgiven(self) -> UpdateStatus:
        """The status of an update whose canary is watched again."""
        change = {"failed": self.other_failures, "phase": UpdatePhase.CANARY, "digest": self.seen.digest}
        return self.old.model_copy(update=change)

    @property
    def other_failures(self) -> list[FailedUpdate]:
        """How other templates have failed."""
        return [one for one in self.old.failed if one.digest != self.seen.digest]

    def available(self, pod: PodView) -> bool:
        """Whether the pod is ready, and has proven itself if it has the newest revision."""
        if not pod.ready or self.trial.failed_check(pod):
            return False
        return pod in self.outdated or not self.seen.checks_pods or self.trial.result(pod) is CheckResult.PASSED

    @cached_property
    def away(self) -> int:
        """How many pods are missing or not available, for whatever reason."""
        return max(0, self.seen.replicas - sum(map(self.available, self.pods)))

    @cached_property
    def not_ready(self) -> int:
        """How many pods are missing or not ready, for whatever reason."""
        return max(0, self.seen.replicas - sum(pod.ready for pod in self.pods))

    @cached_property
    def blocker(self) -> str | None:
        """What pods that could work wait for before they may be replaced."""
        if self.seen.spec.strategy is UpdateStrategy.IMMEDIATE:
            return None
        need = replacement_seconds(self.old.startup_seconds, limit=self.seen.startup_limit, grace=self.seen.grace)
        return blocker(self.old.rounds, self.seen.work, self.outdated, self.seen.now, need)

    @cached_property
    def slots(self) -> frozenset[str]:
        """The uids of the pods that have a slot of a round under way."""
        return frozenset[str]().union(*(one.record.holders for one in self.seen.work if one.live))

    def is_lost(self, pod: PodView) -> bool:
        """Whether a pod cannot work, and has no slot: nothing is lost with it.

        One that never becomes ready may show no more than that: a long startup probe hides that its container restarts.
        """
        seen = self.seen
        if pod.uid in self.slots:
            return False
        if pod.ready:
            return self.trial.failed_check(pod)
        has_failed = any(one.revision == pod.revision for one in self.old.failed)
        late = is_homeless(pod, seen.now) or is_late(pod, seen.nodes, seen.now, seen.startup_limit)
        return has_failed or late or is_hopeless(pod, seen.nodes, seen.now) or self.trial.failed_check(pod)

    def is_about_a_check(self, why: str) -> bool:
        """Whether this is why a pod has failed, and its self-check says so."""
        return any(self.trial.is_by_check(pod) for pod in self.updated if self.trial.why_failed(pod) == why)

    def why_any_failed(self) -> str | None:
        """Say why one of the pods with the newest revision has failed; None if none has."""
        return next((why for pod in self.updated if (why := self.trial.why_failed(pod)) is not None), None)

    def note_canary(self) -> None:
        """Remember since when the first pod with the newest revision is waited for, or, ready, cannot be checked."""
        if self._missing and not (self.seen.by_number or self.proving or self.awaits_canary or self._is_stranded):
            self.old = self.begun.model_copy(update={"canary": self._missing[-1]})
        awaited = self.awaits_canary or (self.seen.by_number and self.updated)
        since = self.old.canary_time
        refused = [pod for pod in self.updated if self.trial.is_refused(pod)]
        if self._is_held_up:
            self.old = self.old.model_copy(update={"canary_time": None})
        elif (awaited and since is None) or (refused and (since is None or any(is_newer(p, since) for p in refused))):
            self.old = self.old.model_copy(update={"canary_time": self.seen.now})

    @property
    def _missing(self) -> Sequence[str]:
        """The names of pods that are to be created, and come with the newest revision."""
        there = {pod.name for pod in self.seen.pods}
        return [name for number in range(self.seen.replicas) if (name := f"{self.seen.name}-{number}") not in there]

    @property
    def begun(self) -> UpdateStatus:
        """The status of an update that begins with a canary: what one before it has waited for does not count."""
        return self.old.model_copy(update={"canary": "", "canary_node": "", "canary_time": None})

    def canary_of(self, pod: PodView) -> UpdateStatus:
        """The status of an update whose canary takes the place of this pod."""
        is_well = pod.ready or (pod.node in self.seen.nodes and not node_fault(pod, self.seen.nodes))
        found = {"canary": pod.name, "canary_node": pod.node if is_well else "", "canary_time": self.seen.now}
        return self.old.model_copy(update=found)

    @property
    def _is_held_up(self) -> bool:
        """Whether the canary's time does not count: an old pod has yet to end, or a group has no node that is well."""
        if not self.seen.by_number:
            return self.awaits_canary and bool(self._named)
        ends = any(pod.terminating and pod.revision != self.seen.newest for pod in self._named)
        return ends or any(map(self.trial.has_no_node, (*self._named, *self.updated)))

    @property
    def _named(self) -> Sequence[PodView]:
        return [pod for pod in self.seen.pods if pod.name == self.old.canary]

    @property
    def awaits_canary(self) -> bool:
        """Whether a pod was evicted for the canary, and none with the newest revision is there yet."""
        name = self.old.canary
        is_there = self._is_stranded or any(pod.name == name for pod in self.pods)
        return bool(name) and not self.proving and not is_there and ordinal_of(name) < self.seen.replicas

    @property
    def _is_stranded(self) -> bool:
        """Whether the pod that has the canary's name cannot end, since its Kubernetes node is not well."""
        return any(pod.terminating and node_fault(pod, self.seen.nodes) for pod in self._named)

    def why_late(self) -> str | None:
        """Say why no pod with the newest revision has come up: it is not created, or its group is made anew again."""
        since, limit = self.old.canary_time, self.seen.startup_limit + self.seen.grace
        if since is None or any(pod.ready for pod in self.updated) or self.seen.now - since <= timedelta(seconds=limit):
            return None
        canary, nodes = self.old.canary, self.seen.nodes
        if self.proving:
            crashes = self.seen.by_number and all(pod.node and not node_fault(pod, nodes) for pod in self.proving)
            return f"pod {canary or 'with it'} was not ready within {limit} s: its group may crash" if crashes else None
        if not self.awaits_canary or self._named:
            return None
        maker = "LeaderWorkerSet" if self.seen.by_number else "StatefulSet"
        return f"pod {canary} was not created within {limit} s: the events of its {maker} say why"

    def evictions(self, limit: int) -> tuple[Sequence[Eviction], str]:
        """Return up to ``limit`` pods to evict, and what the update does or waits for."""
        spec, chosen = self.seen.spec, list[Eviction]()
        paused = "paused: set update.paused to false to go on"
        if spec.paused and self.failed is None:
            return [], paused
        spares = Spares.NOTHING if spec.strategy is UpdateStrategy.IMMEDIATE else Spares.WORK
        left, left_ready = spec.max_unavailable - self.away, spec.max_unavailable - self.not_ready
        free = self._free
        for pod in free:
            if len(chosen) >= limit:
                break
            lost = self.is_lost(pod)
            fits = (not self.available(pod) or left > 0) and (not pod.ready or left_ready > 0)
            # On the way back a pod that cannot work goes nevertheless: somebody has paused to keep what works.
            if not fits or ((self.blocker is not None or spec.paused) and not lost):
                if self.seen.by_number:
                    break
                continue
            chosen.append(Eviction(pod, Spares.SLOTS if lost and spares is Spares.WORK else spares, self.seen.newest))
            left -= self.available(pod)
            left_ready -= pod.ready
        return chosen, self._doing(chosen, free) if chosen or not spec.paused else paused

    @property
    def _free(self) -> Sequence[PodView]:
        """The pods to replace that could be evicted a moment ago."""
        if self.seen.by_number:
            highest_first = sorted(self.outdated, key=lambda pod: -ordinal_of(pod.name))
            return list(takewhile(lambda pod: pod.uid not in self.seen.busy, highest_first))
        return [pod for pod in self._candidates if pod.uid not in self.seen.busy]

    @property
    def _candidates(self) -> Sequence[PodView]:
        """The pods to replace: those that cannot work, those that are not ready, and then the others by their numbers.

        Those without a Kubernetes node that is well come last of all: what replaces them may show nothing.
        """
        return sorted(
            self.outdated,
            key=lambda pod: (
                not pod.node or bool(node_fault(pod, self.seen.nodes)),
                not self.is_lost(pod),
                pod.ready,
                -ordinal_of(pod.name),
                pod.name,
            ),
        )

    def _doing(self, chosen: Sequence[Eviction], free: Sequence[PodView]) -> str:
        if why := next((why for one in chosen if (why := self.seen.unevicted.get(one.pod.uid))), None):
            return why
        if chosen:
            return f"replacing {', '.join(one.pod.name for one in chosen[:_NAMED])}"
        if self.blocker is not None:
            return f"waiting for {self.blocker}{'' if self.blocker.startswith('the end') else _OVERRIDE}"
        if self.outdated and not free:
            return next(self.seen.busy[pod.uid] for pod in self.outdated if pod.uid in self.seen.busy)
        return self.waiting_for_pods()

    def waiting_for_pods(self) -> str:
        """Say which pods are waited for."""
        absent = [pod for pod in self.pods if not self.available(pod)]
        named = ", ".join(f"{pod.name} ({self._state(pod)})" for pod in absent[:_NAMED])
        missing = max(0, self.seen.replicas - len(self.pods))
        texts = [named] if named else []
        texts += [f"{missing} {'pod that is' if missing == 1 else 'pods that are'} to be created"] if missing else []
        return f"waiting for {' and '.join(texts) or 'pods'}"

    def _state(self, pod: PodView) -> str:
        if pod.ready:
            return "self-check failed" if self.trial.failed_check(pod) else "self-check"
        return why_not_ready(pod, self.seen.nodes, self.seen.now)

    def progress(self, doing: str) -> str:
        """Say how far the update is, and what it does."""
        return f"{len(self.updated)} of {self.seen.replicas} pods are updated; {doing}"

    def status(self, phase: UpdatePhase, message: str, canary: str = "") -> UpdateStatus:
        """Return the status of an update that goes on."""
        node = self.old.canary_node if canary == self.old.canary else ""
        change = {"phase": phase, "message": message, "canary": canary, "canary_node": node, "digest": self.seen.digest}
        return self.old.model_copy(update=change)


def _without_old_pods(view: _View) -> UpdateStep:
    """Note that all pods have the newest revision, once they are all available."""
    seen, old = view.seen, view.old
    told: Sequence[WorkEvent] = ()
    if begins := _begins_without_pods(view):
        view.old = view.begun
    if begins or (old.phase is UpdatePhase.CANARY and old.digest == seen.digest):
        step = _canary(view, ())  # it may be the only pod
        if step.status.phase is not UpdatePhase.ROLLING:
            return step
        told = step.events
    running = old.phase in _UNDER_WAY
    complete = len(view.pods) == seen.replicas and not view.away
    if running and not complete:
        message = view.progress(view.waiting_for_pods())
        return UpdateStep(status=view.status(UpdatePhase.ROLLING, message), events=told)
    status = view.status(UpdatePhase.COMPLETE, f"all pods have revision {seen.newest}")
    if complete and seen.replicas:
        # What has failed once, and works, has not failed.
        status = status.model_copy(update={"good_revision": seen.newest, "failed": view.other_failures})
    elif not seen.replicas and old.good_revision not in ("", seen.newest):
        status = status.model_copy(update={"digest": old.digest})  # it is to prove itself once there are pods
    done = WorkEvent(reason=Reason.UPDATE_COMPLETE, message=f"all pods have revision {seen.newest}")
    return UpdateStep(status=status, events=[*told, done] if running else [])


def _begins_without_pods(view: _View) -> bool:
    """Whether another template is to prove itself on pods that were missing, as after one that was refused."""
    seen, old = view.seen, view.old
    if old.digest == seen.digest or not seen.spec.canary or seen.newest == old.good_revision:
        return False
    was_good = bool(old.good_revision) and seen.spec.strategy is not UpdateStrategy.NEVER
    works = any(map(view.available, view.updated))  # as when the API server writes a value in another way
    return old.phase is UpdatePhase.CANARY or (was_good and seen.replicas > 0 and not works)


def _begun(view: _View) -> UpdateStep:
    """Go on with an update, or begin one."""
    seen, old = view.seen, view.old
    if seen.spec.strategy is UpdateStrategy.NEVER:
        count = f"{len(view.outdated)} of {len(view.pods)} pods have an old revision"
        told = view.status(UpdatePhase.ROLLING, f"{count}: delete them when no round runs")
        # Another strategy begins the update, with its canary.
        return UpdateStep(status=told.model_copy(update={"digest": ""}))
    goes_on = old.digest == seen.digest and old.phase in _UNDER_WAY
    events = () if goes_on else [_started(view)]
    first = seen.spec.canary and seen.newest != old.good_revision
    is_canary = old.phase is UpdatePhase.CANARY if goes_on else first
    if is_canary and seen.spec.canary:
        view.old = old if goes_on else view.begun
        return _canary(view, events)
    return _rolling(view, events)


def _started(view: _View) -> WorkEvent:
    message = f"{len(view.outdated)} of {len(view.pods)} pods are to get revision {view.seen.newest}"
    return WorkEvent(reason=Reason.UPDATE_STARTED, message=message)


def _canary(view: _View, events: Sequence[WorkEvent]) -> UpdateStep:
    """Replace one pod, and wait until it has passed or failed."""
    view.note_canary()
    if (why := view.why_any_failed() or view.why_late()) is not None:
        return _failing(view, why, events)
    if view.proving and all(map(view.available, view.proving)):
        passed = f"revision {view.seen.newest} works on {view.proving[0].name}"
        told = [*events, WorkEvent(reason=Reason.CANARY_PASSED, message=passed)]
        return _rolling(view, told)
    if view.proving or view.awaits_canary or (view.updated and not view.outdated):
        message = view.progress(f"canary: {view.waiting_for_pods()}")
        return UpdateStep(status=view.status(UpdatePhase.CANARY, message, view.old.canary), events=events, moves=True)
    chosen, doing = view.evictions(1)
    if chosen or (view.pods and all(pod.name != view.old.canary for pod in view.updated)):
        view.old = view.canary_of(chosen[0].pod) if chosen else view.begun
    status = view.status(UpdatePhase.CANARY, view.progress(f"canary: {doing}"), view.old.canary)
    return UpdateStep(status=status, evict=chosen, events=events)


def _rolling(view: _View, events: Sequence[WorkEvent]) -> UpdateStep:
    """Replace as many pods as may be away, unless one of the new ones has failed."""
    why = view.why_any_failed() if view.seen.newest != view.old.good_revision else None
    if why is not None:
        doing = f"stopped, since {why}; it goes on when the pod works, and kubectl poc fleet rollout undo goes back"
        return UpdateStep(status=view.status(UpdatePhase.STOPPED, view.progress(doing)), events=events)
    chosen, doing = view.evictions(len(view.outdated))
    return UpdateStep(status=view.status(UpdatePhase.ROLLING, view.progress(doing)), evict=chosen, events=events)


def _failing(view: _View, why: str, events: Sequence[WorkEvent]) -> UpdateStep:
    """Record that the template has failed; the next plan goes back to the last good revision."""
    seen, good = view.seen, view.old.good_revision
    back = f"going back to revision {good}" if good else "there is no earlier revision that was good: correct the spec"
    by_check = view.is_about_a_check(why)
    meant = _IF_MEANT if by_check else ""
    message = f"revision {seen.newest} failed: {why}; {back}{meant}"
    failure = FailedUpdate(digest=seen.digest, revision=seen.newest, message=why, time=seen.now, by_self_check=by_check)
    status = view.status(UpdatePhase.FAILED, message, view.old.canary)
    status = status.model_copy(update={"failed": [*view.other_failures, failure][-MAX_FAILED:]})
    told = WorkEvent(reason=Reason.UPDATE_FAILED, message=message, warning=True)
    return UpdateStep(status=status, events=[*events, told], moves=True)


def _after_failure(view: _View, failure: FailedUpdate) -> UpdateStep:
    """Replace what has the failed template, or another that is not the good one."""
    good = view.old.good_revision
    said = f"revision {failure.revision} failed: {failure.message}"
    if not good:
        message = f"{said}; there is no earlier revision that was good: correct the spec"
        return UpdateStep(status=view.status(UpdatePhase.FAILED, message, view.old.canary))
    chosen: Sequence[Eviction] = ()
    meant = _IF_MEANT if failure.by_self_check else ""
    doing = f"back at revision {good}{meant}"
    if view.outdated and view.seen.spec.strategy is not UpdateStrategy.NEVER:
        chosen, what = view.evictions(len(view.outdated))
        doing = f"going back to revision {good}: {what}"
    status = view.status(UpdatePhase.FAILED, f"{said}; {doing}", view.old.canary)
    return UpdateStep(status=status, evict=chosen, moves=bool(view.outdated))
