# SPDX-License-Identifier: Apache-2.0
"""What fleets read of the cluster: the objects that they consist of, and what their specs are resolved by.

It is read for all fleets at once, since a hundred fleets that each list theirs would be most of what the API server
does.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, GROUPS_LABEL
from poc_operator.clients.errors import StoreForbidden
from poc_operator.clients.kube.fleet_objects import FleetObjects
from poc_operator.fleets.plan import Key, key_of
from poc_operator.fleets.render import claim_of
from poc_operator.fleets.resolve import TOKEN_SECRET, Invalid, Presets, Surroundings, packaged, with_config_maps
from poc_operator.fleets.stages import KubernetesNode, Nodes
from poc_operator.observed import PodView

log = logging.getLogger(__name__)

#: Seconds between two looks at presets, products, tokens, and at what the cluster knows.
SURROUNDINGS_SECONDS = 60.0
#: Seconds between two looks at a Kubernetes node.
NODE_SECONDS = 10.0
#: Seconds between two looks at a PVC that a fleet names.
CLAIM_SECONDS = 30.0
#: So many Kubernetes nodes are read for a fleet in one go: each is a request, and hundreds may be away at once.
MAX_NODES = 20

Body = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How the process keeps fleets: in which namespaces, without any in all; with which image, where a fleet names
    none; with which Secret's token, which it also sends to pods; and to which host pods deliver, with a gateway."""

    namespaces: Collection[str] = ()
    image: str | None = None
    token_secret: str = TOKEN_SECRET
    gateway_host: str | None = None


class FleetChildren:
    """The objects of all fleets. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, objects: FleetObjects, namespaces: Collection[str], clock: Callable[[], float]) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._clock = clock
        self._listed = float("-inf")
        self._kinds = frozenset[str]()
        self._listing = asyncio.Lock()
        self._found: dict[tuple[str, str], dict[Key, Body]] = {}

    async def of(self, namespace: str, fleet: str, age: float) -> Mapping[Key, Body]:
        """Return the objects of a fleet, from a list that is no older than ``age`` seconds, and lacks no kind that the
        cluster is known to have by now."""
        async with self._listing:
            kinds = self._objects.kinds
            if self._clock() - self._listed >= age or kinds - self._kinds:
                began = self._clock()
                found: dict[tuple[str, str], dict[Key, Body]] = {}
                for body in await self._objects.list_all(self._namespaces):
                    found.setdefault(_fleet_of(body), {})[key_of(body)] = body
                self._found, self._listed, self._kinds = found, began, kinds
        return self._found.get((namespace, fleet), {})

    def put(self, body: Body) -> None:
        """Remember an object as it was applied."""
        self._found.setdefault(_fleet_of(body), {})[key_of(body)] = body


def _fleet_of(body: Body) -> tuple[str, str]:
    metadata = body["metadata"]
    labels = metadata["labels"]
    return str(metadata["namespace"]), str(labels.get(FLEET_LABEL) or labels.get(GROUPS_LABEL))


class FleetSurroundings:
    """What specs are resolved by. ``clock`` returns seconds of any monotonic clock."""

    def __init__(
        self, objects: FleetObjects, options: FleetOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._objects = objects
        self._options = options
        self._clock = clock
        self._presets: tuple[float, Presets] = (float("-inf"), packaged())
        #: Whether ConfigMaps with presets were ever read, and why they cannot be now.
        self._presets_read = False
        self._presets_refused = ""
        self._products: tuple[float, list[str] | None] = (float("-inf"), None)
        self._pod_monitors: tuple[float, bool] = (float("-inf"), False)
        self._groups: tuple[float, bool] = (float("-inf"), False)
        self._tokens: dict[str, float] = {}
        self._nodes: dict[str, tuple[float, KubernetesNode | None]] = {}
        self._nodes_refused = float("-inf")
        self._claims: dict[tuple[str, str], tuple[float, str | None]] = {}

    async def of(self, fleet: PoCFleet) -> Surroundings:
        """Return what a fleet is resolved by, as far as its spec needs it. StoreError if it cannot be read."""
        now = self._clock()
        has_preset = fleet.spec.model.preset is not None
        if has_preset and now - self._presets[0] >= SURROUNDINGS_SECONDS:
            self._presets = (now, await self._read_presets())
        # Also with a product in the spec, which may be a part of one: whether it is must not depend on other fleets.
        if has_preset and now - self._products[0] >= SURROUNDINGS_SECONDS:
            found = await self._objects.products()
            self._products = (now, list(found) if found is not None else None)
        if fleet.spec.metrics.pod_monitor and now - self._pod_monitors[0] >= SURROUNDINGS_SECONDS:
            self._pod_monitors = (now, await self._objects.pod_monitors())
        if fleet.spec.kubernetes_nodes > 1 and now - self._groups[0] >= SURROUNDINGS_SECONDS:
            self._groups = (now, await self._objects.leader_worker_sets())
        return Surroundings(
            presets=self._presets_for(fleet),
            products=self._products[1],
            image=self._options.image,
            token_secret=self._options.token_secret,
            gateway_host=self._options.gateway_host,
            pod_monitors=self._pod_monitors[1],
            leader_worker_sets=self._groups[1],
        )

    async def _read_presets(self) -> Presets:
        """Return all presets: without the right to read ConfigMaps they stay as they were, since those of the package
        may be others. StoreError if they cannot be read."""
        try:
            found = with_config_maps(await self._objects.presets())
        except StoreForbidden as error:
            if not self._presets_refused:
                stay = "presets stay as they were read last" if self._presets_read else "no fleet that runs is changed"
                log.warning("ConfigMaps with presets cannot be read (%s): %s", error, stay)
            self._presets_refused = str(error)
            return self._presets[1]
        self._presets_read, self._presets_refused = True, ""
        return found

    def _presets_for(self, fleet: PoCFleet) -> Presets:
        """Return the presets that a fleet may use. What pods run by may come from a ConfigMap that was never read."""
        name, presets = fleet.spec.model.preset, self._presets[1]
        if self._presets_read or not self._presets_refused or name is None or not fleet.status.update_revision:
            return presets
        why = (
            f"the operator may not read ConfigMaps, which may have another one ({self._presets_refused}): install the "
            "chart with fleets.enabled=true"
        )
        return {**presets, name: Invalid(why)}

    async def nodes(self, fleet: PoCFleet, pods: Collection[PodView]) -> Nodes:
        """Return the Kubernetes nodes of pods that are not ready, and the canary's, while pods have several templates.

        Only then they tell something of a template. Of many nodes, those that were read longest ago are read first, and
        the others are as they were. StoreError if they cannot be read.
        """
        staying = [pod for pod in pods if pod.stays]
        if fleet.status.update.phase is UpdatePhase.COMPLETE and len({pod.revision for pod in staying}) <= 1:
            return {}
        now = self._clock()
        self._nodes = {name: one for name, one in self._nodes.items() if now - one[0] < SURROUNDINGS_SECONDS}
        canary, before = fleet.status.update.canary, fleet.status.update.canary_node
        unready = {pod.node for pod in pods if not pod.ready and (pod.stays or pod.name == canary)}
        names = {name for name in (*unready, before) if name}
        # Other fleets read and forget nodes while this one waits for the API server.
        known = {name: self._nodes[name] for name in names & self._nodes.keys()}
        for name in self._due(names, known, now):
            try:
                body = await self._objects.node(name)
            except StoreForbidden:
                self._nodes_refused = self._clock()
                break
            node = KubernetesNode.parse(body) if body is not None else None
            known[name] = self._nodes[name] = (self._clock(), node)
        gone = {before: KubernetesNode(ready=False)} if before in known else {}
        return gone | {name: node for name, (_, node) in known.items() if node is not None}

    async def claim(self, fleet: PoCFleet, objects: Mapping[Key, Body]) -> str | None:
        """Return the uid of the PVC with a fleet's weights: empty if there is none, None if that is not known.

        ``objects`` are those of the fleet. StoreError if a PVC of the user's cannot be read.
        """
        namespace, name = fleet.metadata.namespace, claim_of(fleet)
        if fleet.spec.cache.existing_claim is None:
            own = objects.get(("PersistentVolumeClaim", name or ""))  # if it is not there, it is made in this turn
            return own["metadata"].get("uid") if own is not None else None
        now, key = self._clock(), (namespace, str(name))
        self._claims = {one: told for one, told in self._claims.items() if now - told[0] < CLAIM_SECONDS}
        if key not in self._claims:
            try:
                found = await self._objects.get("PersistentVolumeClaim", *key)
            except StoreForbidden:
                uid = None
            else:
                uid = str(found["metadata"].get("uid") or "") or None if found is not None else ""
            self._claims[key] = (self._clock(), uid)
        return self._claims[key][1]

    def _due(self, names: Collection[str], known: Mapping[str, tuple[float, object]], now: float) -> Sequence[str]:
        """Return which of these Kubernetes nodes to read now."""
        if now - self._nodes_refused < SURROUNDINGS_SECONDS:
            return []
        read = {name: known[name][0] if name in known else float("-inf") for name in names}
        due = [name for name in names if now - read[name] >= NODE_SECONDS]
        return sorted(due, key=lambda name: (read[name], name))[:MAX_NODES]

    async def ensure_token(self, fleet: PoCFleet) -> None:
        """Make the Secret with the token of a fleet's pods, unless there is one. StoreError if that fails."""
        now, namespace, name = self._clock(), fleet.metadata.namespace, self._options.token_secret
        if now - self._tokens.get(namespace, float("-inf")) < SURROUNDINGS_SECONDS:
            return
        made = await self._objects.ensure_token(namespace, name)
        if made and (fleet.status.pods or namespace in self._tokens):
            log.warning(
                'namespace "%s": the Secret "%s" with the token of its pods was gone, and is made anew; pods refuse '
                "requests until they have the new token",
                namespace,
                name,
            )
        self._tokens[namespace] = now
