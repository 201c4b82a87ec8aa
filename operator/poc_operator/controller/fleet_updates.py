# SPDX-License-Identifier: Apache-2.0
"""What an update of a fleet asks and does: it knows the work on the fleet's pods, looks once more, and evicts.

A plan has seen no work before it lets a pod go. Rounds may be created meanwhile, and the watch may tell of them late.
So the API server is asked once more, and the pod too: it may compute for somebody else. What is found then is
remembered for some seconds, and the next plan says it. What the API server has refused is said also while it is asked
again.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.clients.errors import EvictionRefused, PodError, StaleObject, StoreError, StoreForbidden
from poc_operator.clients.kube.objects import ObjectStore, is_gone
from poc_operator.clients.pods.client import ClientOf, base_url
from poc_operator.controller.logs import ObjectLogger
from poc_operator.fleets.forecast import Eviction, Spares, WorkOnPods
from poc_operator.observed import PodView
from vllm_poc.wire.answers import PowState

#: Seconds for which it is believed why a pod could not be evicted. Kubernetes counts the pods of a budget anew within
#: a second, and rounds wake their fleet when they end.
BUSY_SECONDS = 3.0
#: Seconds for which an evicted pod counts as away, whatever the watch tells.
EVICTED_SECONDS = 30.0
#: Seconds for which a refusal by the API server is told: it is asked again much sooner.
REFUSED_SECONDS = 30.0

Labels = Sequence[Mapping[str, str]]

_WORK = (PoCRound, PoCValidation, PoCCalibration)


class WorkOnFleets:
    """The objects that ask pods to work, as the watches tell of them."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, WorkOnPods]] = {}

    def put(self, kind: str, body: Mapping[str, Any]) -> bool:
        """Remember an object as it is now; return whether it is new, was begun or ended, or needs other pods now."""
        work = WorkOnPods.parse(kind, body)
        known = self._by_namespace.setdefault(work.record.namespace, {})
        before = known.get(work.record.uid)
        known[work.record.uid] = work
        return before is None or (before.live, before.started, before.unfit) != (work.live, work.started, work.unfit)

    def forget(self, uid: str) -> str | None:
        """Forget an object that is gone; return the namespace in which it was."""
        for namespace, known in self._by_namespace.items():
            if known.pop(uid, None) is not None:
                return namespace
        return None

    def on(self, fleet: PoCFleet, labels: Labels) -> Sequence[WorkOnPods]:
        """Return the objects that select pods of the fleet, which have these sets of labels."""
        known = self._by_namespace.get(fleet.metadata.namespace, {})
        return [one for one in known.values() if one.concerns(fleet, labels)]


def labels_of(fleet: PoCFleet, stateful_set: Mapping[str, Any] | None, pods: Iterable[PodView]) -> Labels:
    """Return the sets of labels of a fleet's pods, first those that the next one will have."""
    template = stateful_set["spec"]["template"]["metadata"].get("labels") if stateful_set is not None else None
    return [template or {FLEET_LABEL: fleet.metadata.name}, *(pod.labels for pod in pods)]


class Evictor:
    """Evicts pods of one fleet. ``clock`` returns seconds of any monotonic clock.

    ``gone`` is told of a pod that the watch still has, and that does not exist any more.
    """

    def __init__(
        self,
        store: ObjectStore,
        clients: ClientOf,
        log: ObjectLogger,
        gone: Callable[[PodView], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clients = clients
        self._log = log
        self._gone = gone
        self._clock = clock
        self._busy: dict[str, tuple[str, float]] = {}  # by the pods' uids: why, and until when
        self._refused: dict[str, tuple[str, float]] = {}  # by the pods' uids: why, and until when it is told
        # By the pods' uids: the name, the revision that is to come, and until when it counts.
        self._evicted: dict[str, tuple[str, str, float]] = {}

    @property
    def busy(self) -> Mapping[str, str]:
        """Why pods could not be evicted a moment ago, by their uids."""
        now = self._clock()
        self._busy = {uid: one for uid, one in self._busy.items() if now < one[1]}
        return {uid: why for uid, (why, _) in self._busy.items()}

    @property
    def refused(self) -> Mapping[str, str]:
        """Why the API server did not evict pods last time, by their uids: it may be asked again by now."""
        now = self._clock()
        self._refused = {uid: one for uid, one in self._refused.items() if now < one[1]}
        return {uid: why for uid, (why, _) in self._refused.items()}

    @property
    def evicted(self) -> frozenset[str]:
        """The uids of pods that were evicted a moment ago, and may still look as before."""
        self._forget_evicted()
        return frozenset(self._evicted)

    @property
    def evicted_names(self) -> Mapping[str, str]:
        """The names of those pods, which others may have by now, and for which revision they were evicted."""
        self._forget_evicted()
        return {name: revision for name, revision, _ in self._evicted.values()}

    def _forget_evicted(self) -> None:
        now = self._clock()
        self._evicted = {uid: one for uid, one in self._evicted.items() if now < one[2]}

    async def evict(self, fleet: PoCFleet, evictions: Sequence[Eviction], labels: Labels) -> None:
        """Evict pods, except those that are needed after all. StoreError if the API server cannot be asked.

        ``labels`` are those by which work may select the fleet's pods. An eviction that fails keeps no other pod. Of
        groups it does: they come with the new template by their numbers.
        """
        failed: StoreError | None = None
        for eviction in evictions:
            try:
                why = await self._unless_needed(fleet, eviction, labels)
            except StoreError as error:
                failed, why = failed or error, str(error)
            if why is not None and fleet.spec.kubernetes_nodes > 1:
                break
        if failed is not None:
            raise failed

    async def _unless_needed(self, fleet: PoCFleet, eviction: Eviction, labels: Labels) -> str | None:
        """Evict a pod, and say why not otherwise. It is asked each time anew: what came before took its time."""
        why = await self._needed(fleet, eviction, labels)
        if why is None:
            why = await self._evict(eviction)
            self._note(eviction.pod, why)
        if why is not None:
            self._busy[eviction.pod.uid] = (why, self._clock() + BUSY_SECONDS)
        return why

    def _note(self, pod: PodView, refusal: str | None) -> None:
        """Remember why the API server does not evict a pod, and log it once: a budget may refuse for minutes."""
        known = self.refused.get(pod.uid)
        self._refused.pop(pod.uid, None)
        if refusal is None:
            return
        self._refused[pod.uid] = (refusal, self._clock() + REFUSED_SECONDS)
        if refusal != known:
            self._log.log(logging.INFO, "%s", refusal)

    async def _needed(self, fleet: PoCFleet, eviction: Eviction, labels: Labels) -> str | None:
        """Say what needs the pod after all; None if nothing does."""
        pod, namespace = eviction.pod, fleet.metadata.namespace
        if eviction.spares is Spares.NOTHING:
            return None
        port = pod.serving_port(fleet.spec.port)
        if pod.ready and eviction.spares is Spares.WORK and await self._computes(pod, port):
            return f"waiting for pod {pod.name}, which computes work of others"
        found = [
            WorkOnPods.parse(kind.KIND.kind, body)
            for kind in _WORK
            for body in await self._store.list_bodies(kind, [namespace])
        ]
        needing = [one for one in found if one.needs(pod) and one.concerns(fleet, labels)]
        if eviction.spares is Spares.SLOTS:
            needing = [one for one in needing if pod.uid in one.record.holders]
        return f"waiting for the end of {needing[0]}" if needing else None

    async def _computes(self, pod: PodView, port: int) -> bool:
        """Whether the pod says that it computes a round. One that does not answer does not say so."""
        if pod.ip is None:
            return False
        try:
            client = await self._clients.of(pod.namespace)
            answer = await client.status(base_url(pod.ip, port))
        except PodError:
            return False
        return answer.status is PowState.GENERATING

    async def _evict(self, eviction: Eviction) -> str | None:
        """Evict the pod; return why that cannot be done."""
        pod = eviction.pod
        try:
            await self._store.evict_pod(pod)
        except EvictionRefused as error:
            return f"waiting to evict pod {pod.name}: {error}"
        except StoreForbidden as error:
            return f"pod {pod.name} cannot be evicted ({error}): install the chart with fleets.enabled=true"
        except StaleObject as error:
            if await is_gone(self._store, pod):  # a watch that has begun anew has no word of its end
                self._gone(pod)
                return None
            return f"waiting to evict pod {pod.name}: {error}"
        self._evicted[pod.uid] = (pod.name, eviction.revision, self._clock() + EVICTED_SECONDS)
        self._log.log(logging.INFO, "pod %s is evicted", pod.name)
        return None
