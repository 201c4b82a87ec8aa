# SPDX-License-Identifier: Apache-2.0
"""The pods of the watched namespaces, as the watch tells of them.

A plain dictionary instead of a kopf index: an index over many pods delays every handler at start.
"""

from poc_operator.model.pods import PodView
from poc_operator.model.round import Round


class PodCache:
    """Pods by uid."""

    def __init__(self) -> None:
        self._pods: dict[str, PodView] = {}

    def put(self, pod: PodView) -> bool:
        """Remember the pod; return whether anything that matters to a round changed."""
        changed = self._pods.get(pod.uid) != pod
        self._pods[pod.uid] = pod
        return changed

    def remove(self, uid: str) -> PodView | None:
        """Forget the pod and return it; None if it was not known."""
        return self._pods.pop(uid, None)

    def matching(self, round_: Round) -> list[PodView]:
        """Return the pods of the round's namespace that its selector matches."""
        return [pod for pod in self._pods.values() if round_.selects(pod)]
