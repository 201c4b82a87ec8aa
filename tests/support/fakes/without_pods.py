# SPDX-License-Identifier: Apache-2.0
"""A store that lists no pods, for tests in which the watch has told of all there are."""

from poc_operator.observed import PodView


class WithoutPods:
    """A store's list of pods."""

    async def list_pods(self, namespace: str, selector: object) -> list[PodView]:
        """Return no pods."""
        return []
