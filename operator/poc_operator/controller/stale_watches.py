# SPDX-License-Identifier: Apache-2.0
"""Whether the watches still tell what happens, found out by listing now and then.

A watch can break without an error. What a list shows and the watch has not told by the next list, a
minute later, was missed: the watch is stale. docs/develop/decisions has the page on it.
"""

from collections.abc import Callable, Collection, Hashable, Iterable

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.observing import PodCache
from poc_operator.planning.snapshot import Work

#: Seconds between two lists; a missed change is found after one to two of them.
CHECK_SECONDS = 60.0


class StaleWatchCheck:
    """Compares lists with what the watches told. ``reconciled`` returns the uids of the objects that have a loop."""

    def __init__(
        self,
        store: ObjectStore,
        kinds: Iterable[type[Work]],
        pods: PodCache,
        reconciled: Callable[[], Collection[str]],
    ) -> None:
        self._store = store
        self._kinds = tuple(kinds)
        self._pods = pods
        self._reconciled = reconciled
        self._differences: set[Hashable] = set()
        #: What the watches have missed; empty while they work.
        self.missed: list[str] = []

    async def check(self, namespaces: Collection[str]) -> None:
        """List and compare; without ``namespaces`` everywhere. StoreError if the API server does not answer."""
        found, selected = dict[Hashable, str](), dict[tuple[str, str], LabelSelector]()
        for kind in self._kinds:
            for work in await self._store.list_objects(kind, namespaces):
                if not work.status.state.finished and work.metadata.deletion_timestamp is None:
                    found |= self._loop_of(work)
                    selected[work.metadata.namespace, str(work.spec.selector)] = work.spec.selector
        for (namespace, _), selector in selected.items():  # many rounds may select the same pods
            found |= await self._pods_of(namespace, selector)
        self.missed = [text for difference, text in found.items() if difference in self._differences]
        self._differences = set(found)

    def _loop_of(self, work: Work) -> dict[Hashable, str]:
        uid, metadata = work.metadata.uid, work.metadata
        text = f"{work.KIND.kind} {metadata.namespace}/{metadata.name} is not reconciled"
        return {} if uid in self._reconciled() else {uid: text}

    async def _pods_of(self, namespace: str, selector: LabelSelector) -> dict[Hashable, str]:
        listed = {pod.uid: pod for pod in await self._store.list_pods(namespace, selector)}
        told = {pod.uid: pod for pod in self._pods.selected(namespace, selector)}
        names = {uid: pod.name for uid, pod in (told | listed).items()}
        # A pod that was told of anew since the last check is no missed one: the difference is another.
        return {
            (uid, repr(told.get(uid))): f"pod {namespace}/{name} is not what the watch told"
            for uid, name in names.items()
            if listed.get(uid) != told.get(uid)
        }
