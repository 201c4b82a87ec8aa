# SPDX-License-Identifier: Apache-2.0
"""Pods that exist and that the watch has not told of yet: work waits for them, lest they count as lost.

Each object asks the API server for its own pods, as long as few objects ask. To find these, the API server looks at all
pods of the namespace. So a thousand rounds that start together, or that a new process adopts, share one list of all::

    asks ──few ask──> list of its own pods
      └────many ask─> the next list of the namespace, which begins after the question
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.observing import PodCache
from poc_operator.observed import PodView

#: Lists of one namespace at a time, each for one object; more objects share a list.
FEW = 8


@dataclass
class _SharedList:
    """The lists of one namespace that many share, by their numbers; ``found`` is what the last one had."""

    begun: int = 0
    ended: int = 0
    found: Sequence[PodView] = ()
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class UntoldPods:
    """One per process. Errors are those of the ``store``."""

    def __init__(self, store: ObjectStore, pods: PodCache) -> None:
        self._store = store
        self._pods = pods
        self._asking = Counter[str]()
        self._lists = defaultdict[str, _SharedList](_SharedList)

    async def exist(self, namespace: str, selector: LabelSelector) -> bool:
        """Whether a pod that is selected exists and is not told of."""
        with self._asked(namespace) as few:
            if few:
                return any(self._is_untold(pod) for pod in await self._store.list_pods(namespace, selector))
            return any(selector.matches(pod.labels) for pod in await self._shared(namespace))

    async def include(self, namespace: str, selector: LabelSelector, named: Mapping[str, str]) -> bool:
        """Whether one of these pods, names by uid, exists, be it selected or not. None of them was told of."""
        with self._asked(namespace) as few:
            if not few:
                return any(pod.uid in named for pod in await self._shared(namespace))
            if any(pod.uid in named for pod in await self._store.list_pods(namespace, selector)):
                return True
            for uid, name in named.items():
                pod = await self._store.pod(namespace, name)
                if pod is not None and pod.uid == uid:
                    return True
            return False

    @contextmanager
    def _asked(self, namespace: str) -> Iterator[bool]:
        """Whether few ask of this namespace meanwhile."""
        few = self._asking[namespace] < FEW
        self._asking[namespace] += few
        try:
            yield few
        finally:
            self._asking[namespace] -= few

    def _is_untold(self, pod: PodView) -> bool:
        return not self._pods.knows(pod.uid)

    async def _shared(self, namespace: str) -> Sequence[PodView]:
        """Return all pods of the namespace that the watch has not told of, by a list that begins after now."""
        shared = self._lists[namespace]
        asked = shared.begun
        async with shared.turn:
            if shared.ended <= asked:
                shared.begun = number = shared.begun + 1
                listed = await self._store.list_pods(namespace, LabelSelector())
                shared.found, shared.ended = [pod for pod in listed if self._is_untold(pod)], number
            return shared.found
