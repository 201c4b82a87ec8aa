# SPDX-License-Identifier: Apache-2.0
"""Taking the faults of a schedule to a simulation."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import monotonic

from kubernetes.aio.client.exceptions import ApiException

from poc_operator.observed import PodView
from tests.chaos.faults import OUTAGES, Fault, Kind
from tests.simulation.manifests import LABEL, Manifest, round_manifest
from tests.simulation.rounds import TROUBLE
from tests.simulation.world import World

log = logging.getLogger(__name__)

#: The fleet of pods that were taken out of theirs.
AWAY = "away"
#: Rounds that trouble an operator: what differs in the spec, and what is written over the status.
POISON: Sequence[tuple[Manifest, Manifest]] = (
    ({}, {"state": "Sideways", "slots": -1, "groups": 0, "totals": {"delivered": -1}}),
    ({}, {"state": "Running", "slots": 1, "groups": 1, "assignments": [{"node": -1, "state": "Levitating"}]}),
    ({"ttlSecondsAfterFinished": 31_536_000, "stop": {"afterNonces": 1}}, {}),
    ({"nodes": {"first": 0, "last": 2999, "count": 3000}}, {}),
    ({"selector": {"matchLabels": {LABEL: "first"}}, "callbackURL": "http://localhost:1/nobody"}, {}),
)


class Chaos:
    """Inflicts faults on a world; ``suspendable`` are the names of the rounds that may be suspended."""

    def __init__(self, world: World, suspendable: Sequence[str]) -> None:
        self._world = world
        self._suspendable = suspendable
        # One fault of a kind at a time: what strikes a thing that is away already waits.
        self._turns: dict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._deeds: dict[Kind, Callable[[Fault], Awaitable[None]]] = {
            Kind.OPERATOR_KILLED: lambda fault: world.operator.kill(fault.seconds),
            Kind.POD_DELETED: self._delete,
            Kind.ENGINE_KILLED: self._kill_engine,
            Kind.API_SERVER_FROZEN: lambda fault: world.api_server.freeze(fault.seconds),
            Kind.API_SERVER_KILLED: lambda fault: world.api_server.kill(fault.seconds),
            Kind.GATEWAY_KILLED: self._kill_gateway,
            Kind.RECEIVER_AWAY: self._send_receiver_away,
            Kind.RECEIVER_FAILING: self._let_receiver_fail,
            Kind.ROUND_SUSPENDED: self._suspend,
            Kind.POD_RELABELLED: self._relabel,
            Kind.POISON: self._poison,
        }

    async def run(self, faults: Iterable[Fault]) -> None:
        """Inflict the faults, each at its time; returns when the last one is over."""
        began = monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, began + fault.at - monotonic()))
                # What a round does after an outage must be explained by one outage and no chain of them.
                if fault.kind in OUTAGES and self._world.api_server.away:
                    continue
                log.info("%s", fault)
                tasks.create_task(self._inflict(fault))

    async def _inflict(self, fault: Fault) -> None:
        async with self._turns[fault.kind]:
            await self._deeds[fault.kind](fault)

    def _victim(self, fault: Fault) -> PodView | None:
        pods = self._world.kubelet.pods
        return pods[fault.victim % len(pods)] if pods else None

    async def _kill_gateway(self, fault: Fault) -> None:
        assert self._world.gateway is not None
        await self._world.gateway.kill(fault.seconds)

    async def _kill_engine(self, fault: Fault) -> None:
        if (pod := self._victim(fault)) is not None:
            await self._world.kubelet.restart(pod.uid, fault.seconds)

    async def _delete(self, fault: Fault) -> None:
        """Delete a pod with some seconds of grace, or none."""
        if (pod := self._victim(fault)) is not None:
            await _insist(lambda: self._world.delete_pod(pod.name, int(fault.seconds)))

    async def _relabel(self, fault: Fault) -> None:
        """Take a pod out of its round and Deployment, which makes another; every second one comes back."""
        if (pod := self._victim(fault)) is None:
            return
        await _insist(lambda: self._world.relabel_pod(pod.name, AWAY))
        await asyncio.sleep(fault.seconds)
        fleet = pod.labels[LABEL]
        if fault.victim % 2 and fleet != AWAY:
            await _insist(lambda: self._world.relabel_pod(pod.name, fleet))

    async def _poison(self, fault: Fault) -> None:
        """Add a round that the operator cannot read, whose end is far beyond time, or that wants others' pods."""
        name, rounds = f"poison-{int(10 * fault.at)}", self._world.rounds
        spec, status = POISON[fault.victim % len(POISON)]
        manifest = round_manifest(name, int(10 * fault.at) + 1000, port=self._world.server.port, **spec)
        await _insist(lambda: rounds.create(manifest))
        if status:
            await _insist(lambda: rounds.write_status(name, status))
        await asyncio.sleep(fault.seconds)
        await _insist(lambda: rounds.delete(name))

    async def _send_receiver_away(self, fault: Fault) -> None:
        await self._world.receiver.close()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await self._world.receiver.open()

    async def _let_receiver_fail(self, fault: Fault) -> None:
        self._world.receiver.fails = True
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._world.receiver.fails = False

    async def _suspend(self, fault: Fault) -> None:
        name = self._suspendable[fault.victim % len(self._suspendable)]
        await self._world.rounds.suspend(name, True)
        await asyncio.sleep(fault.seconds)
        await self._world.rounds.suspend(name, False)


async def _insist(order: Callable[[], Awaitable[None]]) -> None:
    """Give the API server an order until it has taken it, or the object is gone or there already."""
    while True:
        try:
            await order()
            return
        except ApiException as error:
            if error.status in (404, 409):
                return
            if error.status in (400, 422):
                raise
        except TROUBLE:
            pass
        await asyncio.sleep(0.5)
