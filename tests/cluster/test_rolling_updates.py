# SPDX-License-Identifier: Apache-2.0
"""Updates of a fleet of simulated pods while rounds come and go, and canaries that compute wrong vectors.

The operator finds these by its own self-check: their engines compute something else. MINUTES (0: a short run) is for
how long rounds begin, PERIOD how many seconds lie between two starts, and TRIES how many wrong canaries there are. Pods
are the real server over a fake engine, and Kubernetes' controllers are real.
"""

import asyncio
import json
import logging
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes.aio import client, config

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.fleets.self_check import BLOCK_HASH
from tests.chaos.audit import audit
from tests.chaos.history import ended
from tests.cluster.test_fleet_controllers import cluster, events, operator, status_of, until
from tests.simulation.fleet_pods import FLEETS, becoming_ready, pods_of
from tests.simulation.fleet_pods import PODS as POD_OBJECTS
from tests.simulation.kubelet import Kubelet
from tests.simulation.manifests import round_manifest
from tests.simulation.receiver import CountingReceiver
from tests.simulation.rounds import Rounds
from tests.simulation.server import FleetServer
from tests.simulation.session import PodServer, Session
from tests.simulation.world import World
from tests.support.servers.api_server import ApiServer

MINUTES = float(os.environ.get("MINUTES", "0"))
PERIOD_SECONDS = float(os.environ.get("PERIOD", "60" if MINUTES else "12"))
TRIES = int(os.environ.get("TRIES", "2"))
#: A round computes for so long.
ROUND_SECONDS = max(2, int(PERIOD_SECONDS / 4))
#: A canary that computes wrong vectors stops the update within so many seconds of its first answer to a self-check.
STOP_SECONDS = 30.0
#: What is left of an update when the last round has ended takes so long: rounds are still expected for a while, and
#: pods are replaced one by one.
END_SECONDS = 60.0 if not MINUTES else 900.0
PODS = 10
GRACE_SECONDS = 1
NAME = "rolling"
#: A template with such a value is one whose pods compute wrongly: each nonce gets the vector of another one.
BAD = "bad-"
DRIFT = 50

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60 * MINUTES + 60 * TRIES + 1500, func_only=True)]
log = logging.getLogger(__name__)

__all__ = ["cluster", "operator"]

Body = dict[str, Any]


@dataclass
class Simulation:
    """A fleet whose pods serve."""

    api: ApiServer
    rounds: Rounds
    kubelet: Kubelet
    receiver: CountingReceiver
    #: The servers that compute wrongly, by the value of their template; each may have several.
    wrong: dict[str, list[Session]]
    #: The fewest pods that served at a moment.
    least: int = PODS
    finished: list[PoCRound] = field(default_factory=list)

    @property
    def update(self) -> Body:
        found: Body = status_of(self.api, NAME)["update"]
        return found

    def change(self, value: str) -> None:
        """Make a new template."""
        assert self.api.patch("PoCFleet", NAME, {"env": [{"name": "VALUE", "value": value}]})[0] == 200

    def audit(self, round_: PoCRound) -> None:
        """Check the books of a round."""
        nothing = SimpleNamespace(gaps=[], outages=[])
        world = SimpleNamespace(
            receiver=self.receiver, kubelet=self.kubelet, operator=nothing, api_server=nothing, gateway=None
        )
        audit(cast(World, world), round_)
        slots = round_.status.assignments
        assert len(slots) == PODS
        assert {slot.state for slot in slots} == {SlotState.DONE}
        assert [slot.attempts for slot in slots] == [1] * PODS, f"a slot of {round_.metadata.name} was lost"
        assert all(slot.delivered for slot in slots)


@asynccontextmanager
async def simulation(api: ApiServer, folder: Path, **spec: Any) -> AsyncIterator[Simulation]:  # noqa: ANN401
    """A fleet of ready pods, and what rounds need."""
    for noisy in ("vllm", "httpx"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    file = folder / "admin"
    file.write_text(json.dumps(api.kubeconfig()))
    async with AsyncExitStack() as stack:
        await config.load_kube_config(str(file))  # type: ignore[no-untyped-call]
        connection = await stack.enter_async_context(client.ApiClient())
        server, receiver, wrong = FleetServer(), CountingReceiver(), dict[str, list[Session]]()
        pod_server = partial(started, api, wrong)
        kubelet = Kubelet(client.CoreV1Api(connection), "default", server, 0.2, pod_server)
        made = Simulation(api, Rounds(connection, "default"), kubelet, receiver, wrong)
        await stack.enter_async_context(receiver.receiving())
        await stack.enter_async_context(server.serving())
        following = asyncio.create_task(kubelet.run())
        stack.push_async_callback(kubelet.end)
        stack.callback(following.cancel)
        fleet = {
            "model": {"path": "tiny"},
            "image": "registry.example.org/worker:1",
            "replicas": PODS,
            "port": server.port,
            "auth": {"open": True},
            "callbackAllow": ["*"],
            "podTemplate": {"spec": {"terminationGracePeriodSeconds": GRACE_SECONDS}},
            **spec,
        }
        assert api.create("PoCFleet", NAME, fleet)[0] == 201
        stack.callback(api.request, "DELETE", f"{FLEETS}/{NAME}", propagationPolicy="Background")
        await stack.enter_async_context(becoming_ready(api, NAME))
        yield made


def started(api: ApiServer, wrong: dict[str, list[Session]], pod: str, seconds_per_batch: float) -> PodServer:
    """What a pod's container runs. By a bad template it computes wrongly, and is remembered."""
    session = Session(pod, seconds_per_batch)
    value = value_of(api.request("GET", f"{POD_OBJECTS}/{pod}")[1])
    if value.startswith(BAD):
        session.engine.drift = DRIFT
        wrong.setdefault(value, []).append(session)
    return session


def value_of(pod: Body) -> str:
    """The value by which templates differ; empty for the first one."""
    env = pod["spec"]["containers"][0]["env"]
    return next((str(item["value"]) for item in env if item["name"] == "VALUE"), "")


async def run_rounds(made: Simulation, moment: float) -> None:
    """Begin a round each period until a moment, and audit each when it is over."""
    number, due = 0, monotonic()
    watching = set[asyncio.Task[None]]()
    while monotonic() < moment:
        number += 1
        spec = {"fleetRef": {"name": NAME}, "callbackURL": made.receiver.url, "stop": {"afterSeconds": ROUND_SECONDS}}
        manifest = round_manifest(f"round-{number}", number, **spec)
        del manifest["spec"]["selector"]
        await made.rounds.create(manifest)
        watching.add(asyncio.create_task(finished(made, f"round-{number}")))
        due += PERIOD_SECONDS
        await asyncio.sleep(max(0.0, due - monotonic()))
    await asyncio.gather(*watching)


async def finished(made: Simulation, name: str) -> None:
    round_ = await made.rounds.wait_until(name, lambda one: one.status.state.finished, 90)
    assert round_.status.state is State.COMPLETE, round_.status.message
    await ended(round_, made.kubelet.sessions)
    made.audit(round_)
    made.finished.append(round_)


async def count_serving(made: Simulation) -> None:
    while True:
        made.least = min(made.least, len(made.kubelet.pods))
        await asyncio.sleep(0.05)


async def test_no_round_loses_a_slot_or_nonce_while_pods_are_replaced(
    cluster: ApiServer, operator: Process, tmp_path: Path
) -> None:
    """An update of all pods begins when there have been two rounds; a long run begins another one when it is over."""
    most = 1 if MINUTES else 2
    update = {"maxUnavailable": most}
    async with simulation(cluster, tmp_path, selfCheck={"enabled": False}, update=update) as made:
        await until(lambda: status_of(cluster, NAME), lambda found: found.get("update", {}).get("goodRevision"))
        # Pods are ready for the API server a moment before the last of them serves.
        await until(lambda: len(made.kubelet.pods), lambda serving: serving == PODS)
        first = {session.pod for session in made.kubelet.sessions}
        counting = asyncio.create_task(count_serving(made))
        began, updates = monotonic(), 0
        rounds = asyncio.create_task(run_rounds(made, began + (60 * MINUTES or 9 * PERIOD_SECONDS)))
        await asyncio.sleep(1.5 * PERIOD_SECONDS)
        while not rounds.done():
            if not updates or (MINUTES and made.update["phase"] == "Complete"):
                updates += 1
                made.change(f"v{updates}")
                await until(lambda: made.update["phase"], lambda phase: phase != "Complete")
            await asyncio.sleep(0.5)
        await rounds
        counting.cancel()
        await until(lambda: made.update, lambda found: found["phase"] == "Complete", END_SECONDS)
    replaced = len(made.kubelet.sessions) - len(first)
    rounds_done, starts = len(made.finished), made.finished
    log.info(
        "%d updates replaced %d pods in %.0f s beside %d rounds; at least %d of %d pods served; %d nonces",
        *(updates, replaced, monotonic() - began, rounds_done, made.least, PODS),
        sum(one.status.totals.delivered for one in starts),
    )
    assert replaced >= PODS
    assert made.least >= PODS - most
    assert not any(reason == "UpdateFailed" for reason in events(cluster, NAME))


@pytest.mark.long
async def test_a_canary_that_computes_wrong_vectors_stops_the_update(
    cluster: ApiServer, operator: Process, tmp_path: Path
) -> None:
    took = list[float]()
    strategy = {"strategy": "Immediate"}
    async with simulation(cluster, tmp_path, selfCheck={"enabled": True}, update=strategy) as made:
        good = await until(lambda: made_good(cluster), bool)
        for value in (f"{BAD}{number}" for number in range(TRIES)):
            made.change(value)
            answered = await until(lambda value=value: first_answer(made, value), bool)  # type: ignore[misc]
            failed = await until(lambda: made.update, lambda found: found["phase"] == "Failed", STOP_SECONDS)
            took.append(monotonic() - answered)
            assert "32 of 32 nonces differ" in failed["message"]
            await until(lambda: pods_of(cluster, NAME), are_right)
            await until(lambda: made.update["message"], lambda text: f"back at revision {good}" in text)
    summary = f"{len(took)} of {TRIES} canaries stopped the update, {max(took):.1f} s after their first answer at most"
    log.info(summary)
    # One pod alone ever had each of these templates.
    assert [len(made.wrong[f"{BAD}{number}"]) for number in range(TRIES)] == [1] * TRIES
    assert max(took) < STOP_SECONDS, summary


def first_answer(made: Simulation, value: str) -> float | None:
    """When a pod by this template first had the nonces of a self-check; None if none has so far."""
    work = (one for session in made.wrong.get(value, ()) for one in session.work if one.block_hash == BLOCK_HASH)
    return min((one.ended for one in work if one.done and one.ended is not None), default=None)


def are_right(pods: list[Body]) -> bool:
    return len(pods) == PODS and not any(value_of(pod).startswith(BAD) for pod in pods)


def made_good(api: ApiServer) -> str:
    """The last good revision of the fleet; empty while there is none."""
    return str(status_of(api, NAME).get("update", {}).get("goodRevision", ""))
