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

    def remove(self, uid: str) -> bool:
        """Forget the pod; return whether it was known."""
        return self._pods.pop(uid, None) is not None

    def matching(self, round_: Round) -> list[PodView]:
        """Return the pods of the round's namespace that its selector matches."""
        return [
            pod
            for pod in self._pods.values()
            if pod.namespace == round_.metadata.namespace and round_.spec.selector.matches(dict(pod.labels))
        ]
