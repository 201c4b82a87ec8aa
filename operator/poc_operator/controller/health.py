# SPDX-License-Identifier: Apache-2.0
"""Whether the watches still tell what happens, found out by listing now and then.

A watch can break without an error. What a list shows and the watch has not told by the next list, a
minute later, was missed: the watch is stale. docs/develop/decisions has the page on it.
"""

from collections.abc import Callable, Collection, Hashable

from poc_operator.clients.kube.rounds import RoundStore
from poc_operator.controller.observing import PodCache
from poc_operator.model.round import Round

#: Seconds between two lists; a missed change is found after one to two of them.
CHECK_SECONDS = 60.0


class StaleWatchCheck:
    """Compares lists with what the watches told. ``driven`` returns the uids of the rounds that are driven."""

    def __init__(self, store: RoundStore, pods: PodCache, reconciled: Callable[[], Collection[str]]) -> None:
        self._store = store
        self._pods = pods
        self._reconciled = reconciled
        self._differences: set[Hashable] = set()
        #: What the watches have missed; empty while they work.
        self.missed: list[str] = []

    async def check(self, namespaces: Collection[str]) -> None:
        """List and compare; without ``namespaces`` everywhere. StoreError if the API server does not answer."""
        found = dict[Hashable, str]()
        for round_ in await self._store.list_rounds(namespaces):
            if not round_.status.state.finished and round_.metadata.deletion_timestamp is None:
                found |= self._round(round_) | await self._pods_of(round_)
        self.missed = [text for difference, text in found.items() if difference in self._differences]
        self._differences = set(found)

    def _round(self, round_: Round) -> dict[Hashable, str]:
        uid, name = round_.metadata.uid, f"{round_.metadata.namespace}/{round_.metadata.name}"
        return {} if uid in self._reconciled() else {uid: f"round {name} is not reconciled"}

    async def _pods_of(self, round_: Round) -> dict[Hashable, str]:
        listed = {pod.uid: pod for pod in await self._store.list_pods(round_)}
        told = {pod.uid: pod for pod in self._pods.matching(round_)}
        names = {uid: pod.name for uid, pod in (told | listed).items()}
        # A pod that was told of anew since the last check is no missed one: the difference is another.
        return {
            (uid, repr(told.get(uid))): f"pod {round_.metadata.namespace}/{name} is not what the watch told"
            for uid, name in names.items()
            if listed.get(uid) != told.get(uid)
        }
