# SPDX-License-Identifier: Apache-2.0
"""What work takes from fleets: from that of its ``fleetRef`` the port, and how many pods there are to be; and from
that of each pod, whether it may take part.

The spec that plans see has these put in; what is stored stays as the user wrote it.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, PoCRound
from poc_operator.clients.errors import UnreadableObject
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.fleets.checked_pods import with_bars
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import Work

#: Seconds for which it is believed that there is no such fleet.
MISSING_SECONDS = 10.0

WorkT = TypeVar("WorkT", bound=Work)


class FleetRefs:
    """Finds fleets by name. ``told`` returns what the watch has told of, ``clock`` seconds of any monotonic clock."""

    def __init__(
        self,
        store: ObjectStore,
        told: Callable[[str, str], PoCFleet | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._told = told
        self._clock = clock
        self._missing: dict[tuple[str, str], float] = {}

    async def find(self, namespace: str, name: str) -> PoCFleet | None:
        """Return the fleet; None if there is none. StoreError if it must be asked for, and cannot be.

        A new process may be asked before the watch has told of the fleet.
        """
        key = (namespace, name)
        found = self._told(*key)
        if found is None and self._clock() - self._missing.get(key, float("-inf")) >= MISSING_SECONDS:
            try:
                found = await self._store.get(PoCFleet, namespace, name)
            except UnreadableObject:
                found = None
            self._missing = {one: at for one, at in self._missing.items() if self._clock() - at < MISSING_SECONDS}
            if found is None:
                self._missing[key] = self._clock()
        return found

    async def with_bars(self, pods: Sequence[PodView]) -> Sequence[PodView]:
        """Return the pods, those that their fleets let take no new slot with the reason. StoreError as from `find`."""
        fleets: dict[tuple[str, str], list[PodView]] = {}
        for pod in pods:
            if (name := pod.labels.get(FLEET_LABEL)) is not None:
                fleets.setdefault((pod.namespace, name), []).append(pod)
        if not fleets:
            return pods
        told = {pod.uid: pod for key, own in fleets.items() for pod in with_bars(await self.find(*key), own)}
        return [told.get(pod.uid, pod) for pod in pods]


def with_fleet(work: WorkT, fleet: PoCFleet | None, pods: Sequence[PodView]) -> WorkT:
    """Return the work with the fleet's port and, for a round that leaves it open, the groups of its desired size.

    Pods serve on when the fleet's port changes, or the fleet is deleted and leaves them behind: their own port counts.
    """
    changes: dict[str, Any] = {"port": _port(work.spec.port if fleet is None else fleet.spec.port, pods)}
    if isinstance(work, PoCRound) and work.spec.nodes.groups is None and fleet is not None:
        ids = len(work.spec.nodes.ids)
        groups = work.status.groups or min(-(-fleet.spec.replicas // ids), MAX_SLOTS // ids)
        changes["nodes"] = work.spec.nodes.model_copy(update={"groups": groups or None})
    spec: Any = work.spec.model_copy(update=changes)
    changed: Any = work.model_copy(update={"spec": spec})
    found: WorkT = changed
    return found


def _port(told: int, pods: Sequence[PodView]) -> int:
    """Return the port of most pods, where none has the one that was told."""
    ports = Counter(pod.serving_port(told) for pod in pods if pod.stays)
    return told if not ports or told in ports else ports.most_common(1)[0][0]


def missing_fleet(work: Work, fleet: PoCFleet | None) -> str | None:
    """Return what to do about a fleet that does not exist; None if it does, or none is named."""
    if work.spec.fleet_ref is None or fleet is not None:
        return None
    name, namespace = work.spec.fleet_ref.name, work.metadata.namespace
    return f'there is no PoCFleet "{name}" in namespace "{namespace}" (spec.fleetRef): create it'
