# SPDX-License-Identifier: Apache-2.0
"""The pods of the watched namespaces, as the watch tells of them.

A plain dictionary instead of a kopf index: an index over many pods delays every handler at start.
"""

import dataclasses
from collections.abc import Callable

from poc_operator.model.pods import PodView
from poc_operator.model.round import Round

#: Seconds for which a deleted pod is remembered that the cluster took away: often it says so and deletes the pod in
#: one breath, and the rounds must learn of both. Less than the time between two checks of the watches.
MEMORY_SECONDS = 30.0


class PodCache:
    """Pods by uid. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[str, PodView] = {}
        self._forget_at: dict[str, float] = {}  # of deleted pods, by uid

    def put(self, pod: PodView) -> bool:
        """Remember the pod; return whether anything that matters to a round changed."""
        changed = self._pods.get(pod.uid) != pod
        self._pods[pod.uid] = pod
        return changed

    def remove(self, pod: PodView) -> bool:
        """Forget a deleted pod, though not at once if the cluster took it away; return whether it was known."""
        known = pod.uid in self._pods
        if known and pod.disrupted:
            self._pods[pod.uid] = dataclasses.replace(pod, gone=True)
            self._forget_at[pod.uid] = self._clock() + MEMORY_SECONDS
        else:
            self._pods.pop(pod.uid, None)
        return known

    def matching(self, round_: Round) -> list[PodView]:
        """Return the pods of the round's namespace that its selector matches."""
        for uid in [uid for uid, moment in self._forget_at.items() if moment <= self._clock()]:
            del self._pods[uid], self._forget_at[uid]
        return [pod for pod in self._pods.values() if round_.selects(pod)]
