# SPDX-License-Identifier: Apache-2.0
"""The objects that fleets consist of, as the API server has them.

One list of all objects serves all fleets, since a hundred fleets that each list theirs would be most of what the API
server does.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.clients.kube.fleet_objects import FleetObjects
from poc_operator.fleets.plan import Key, key_of

Body = Mapping[str, Any]


class FleetChildren:
    """The objects of all fleets. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, objects: FleetObjects, namespaces: Collection[str], clock: Callable[[], float]) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._clock = clock
        self._listed = float("-inf")
        self._listing = asyncio.Lock()
        self._found: dict[tuple[str, str], dict[Key, Body]] = {}

    async def of(self, namespace: str, fleet: str, age: float) -> Mapping[Key, Body]:
        """Return the objects of a fleet, from a list that is no older than ``age`` seconds."""
        async with self._listing:
            if self._clock() - self._listed >= age:
                began = self._clock()
                found: dict[tuple[str, str], dict[Key, Body]] = {}
                for body in await self._objects.list_all(self._namespaces):
                    found.setdefault(_fleet_of(body), {})[key_of(body)] = body
                self._found, self._listed = found, began
        return self._found.get((namespace, fleet), {})

    def put(self, body: Body) -> None:
        """Remember an object as it was applied."""
        self._found.setdefault(_fleet_of(body), {})[key_of(body)] = body


def _fleet_of(body: Body) -> tuple[str, str]:
    metadata = body["metadata"]
    return str(metadata["namespace"]), str(metadata["labels"].get(FLEET_LABEL))
