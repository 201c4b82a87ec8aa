# SPDX-License-Identifier: Apache-2.0
"""A fleet's self-checks, from its loop to pods over HTTP and back into its status; the API server is a stand-in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, cast

import pytest
from fastapi import FastAPI

from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller import fleets, self_checks
from poc_operator.controller.fleet_refs import FleetRefs
from poc_operator.controller.fleet_surroundings import FleetOptions
from poc_operator.controller.fleets import Fleets
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache
from poc_operator.observed import Container, PodView
from tests.support.fakes.reference_pod import ReferencePod
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import ARTIFACT, SLOT, Pod, running_pod
from tests.unit.poc_operator.controller.test_fleets import Cluster, body_of, until

Body = dict[str, Any]


@dataclass
class World:
    """A fleet, kept by its loop, and pods on addresses of their own."""

    stack: AsyncExitStack
    kept: Fleets
    cluster: Cluster
    cache: PodCache
    port: int
    judged: list[str] = field(default_factory=list)
    views: dict[str, PodView] = field(default_factory=dict)
    acts: bool = True

    async def begin(self, **self_check: Any) -> None:  # noqa: ANN401
        """Create the fleet."""
        self.kept.changed(body_of("demo", port=self.port, selfCheck=self_check))
        await until(lambda: self.cluster.reason("demo"))

    async def add(self, number: int, *, drift: int = 0) -> Pod:
        """Run another pod, ready at once; with ``drift`` its engine computes something else."""
        pod = await self.stack.enter_async_context(running_pod())
        pod.engine.drift = drift
        await self.serve(number, pod.app)
        return pod

    async def serve(self, number: int, app: Any) -> None:  # noqa: ANN401 - any ASGI app
        """Let another pod be something else."""
        await self.stack.enter_async_context(serve(app, f"127.0.0.{number + 1}", self.port))
        self.tell(number)

    def tell(self, number: int, starts: int = 0) -> None:
        """Let the watch tell of a ready pod."""
        name, server = f"demo-{number}", Container(id=f"c{number}#{starts}", ports=frozenset({self.port}))
        pod = PodView(name=name, namespace="ns", uid=f"u{number}", labels={FLEET_LABEL: "demo"})
        pod = replace(pod, ip=f"127.0.0.{number + 1}", ready=True, containers=(server,))
        self.views[name] = pod
        self.cache.put(pod)
        self.kept.pod_changed(pod)

    @property
    def pods(self) -> Mapping[str, Body]:
        """What the status says of pods, by their names."""
        return {pod["name"]: pod for pod in self.cluster.statuses.get("demo", {}).get("pods", ())}

    def results(self) -> dict[str, str]:
        """What was found of each pod."""
        return {name: pod["result"] for name, pod in self.pods.items()}

    async def find(self, **results: str) -> None:
        """Wait until the status says so."""
        wanted = {name.replace("_", "-"): result for name, result in results.items()}
        await until(lambda: self.results() == wanted)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "GATHER_SECONDS", 0.02)
    monkeypatch.setattr(self_checks, "FIRST_PAUSE_SECONDS", 0.05)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        cluster, cache = Cluster(), PodCache(lambda: 0.0)
        store = cast(Any, cluster)
        client = await stack.enter_async_context(PodClient())
        kept = Fleets(
            store,
            store,
            options=FleetOptions(),
            pods=cache,
            metrics=Metrics(),
            may_act=lambda: found.acts,
            clients=client,
            judged=lambda pod: found.judged.append(pod.name),
            gone=lambda _: None,
        )
        found = World(stack, kept, cluster, cache, free_port())
        stack.push_async_callback(kept.stop)
        yield found


def hanging() -> FastAPI:
    """A server that takes requests and answers none."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def hang(path: str) -> None:
        await asyncio.Event().wait()

    return app


async def bars(world: World) -> Mapping[str, str]:
    """Why pods may not take part, by their names."""
    refs = FleetRefs(cast(Any, world.cluster), world.kept.find)
    return {pod.name: pod.barred for pod in await refs.with_bars(list(world.views.values()))}


async def test_a_pod_that_computes_wrongly_fails_and_one_that_hangs_holds_up_no_other(world: World) -> None:
    await world.begin(nonces=8)
    await world.serve(3, hanging())
    right = [await world.add(number) for number in (0, 1)]
    wrong = await world.add(2, drift=40)
    await world.find(demo_0="Passed", demo_1="Passed", demo_2="Failed", demo_3="Pending")
    assert world.cluster.reason("demo") in ("ReplicasNotReady", "SelfCheckFailed")
    assert [len(pod.engine.computed) for pod in [*right, wrong]] == [8, 8, 8]
    assert "8 of 8 nonces differ from those of pod demo-" in world.pods["demo-2"]["message"]
    assert world.pods["demo-0"]["fingerprint"] == {
        "gpu": "",
        "driver": "",
        "vllm": world.pods["demo-0"]["fingerprint"]["vllm"],
        "attention": "FakeAttention",
        "experts": "",
        "flags": "--enforce-eager",
        "batch": "8 nonces",
        "details": "dtype float32, KV cache auto, vLLM's forward pass",
    }
    found = await bars(world)
    assert (found["demo-0"], found["demo-1"]) == ("", "")
    assert found["demo-2"].startswith("self-check failed: 8 of 8 nonces differ")
    assert found["demo-3"] == "self-check: the pod computes its nonces"
    # Work that waits for pods is told at once of each that may take part.
    assert set(world.judged) == {"demo-0", "demo-1", "demo-2", "demo-3"}
    await until(lambda: "no answer within 5 s" in world.pods["demo-3"]["message"])


async def test_a_check_begins_at_once_and_its_answer_is_known_soon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next of the loop's turns, which are 15 s apart."""
    monkeypatch.setattr(fleets, "GATHER_SECONDS", 0.2)
    await world.begin(replicas=1)
    pod = await world.add(0)
    began = monotonic()
    await world.find(demo_0="Passed")
    assert monotonic() - began < 10
    assert len(pod.engine.computed) == 32


async def test_a_server_that_has_restarted_is_checked_anew(world: World) -> None:
    await world.begin(nonces=8)
    pod = await world.add(0)
    await world.find(demo_0="Passed")
    assert (await bars(world))["demo-0"] == ""
    pod.engine.drift = 40
    world.tell(0, starts=1)
    # It is barred before its fleet has had a turn.
    assert (await bars(world))["demo-0"] == "self-check: it has yet to be asked"
    await world.find(demo_0="Failed")
    # It was all there was: with other weights that are meant, the user lets the vectors be forgotten.
    assert world.pods["demo-0"]["pValue"] == "1e-08"
    off = body_of("demo", port=world.port, selfCheck={"nonces": 8, "enabled": False})
    off["metadata"] |= {"generation": 2, "resourceVersion": "1000"}
    off["status"] = world.cluster.statuses["demo"]
    world.kept.changed(off)
    await world.find(demo_0="Pending")
    assert (await bars(world))["demo-0"] == ""
    on = body_of("demo", port=world.port, selfCheck={"nonces": 8})
    on["metadata"] |= {"generation": 3, "resourceVersion": "2000"}
    on["status"] = world.cluster.statuses["demo"]
    world.kept.changed(on)
    await world.find(demo_0="Passed")


async def test_a_pod_that_generates_is_asked_beside_its_round(world: World) -> None:
    await world.begin(nonces=8)
    pod = await world.stack.enter_async_context(running_pod())
    pod.engine.seconds_per_batch = 0.01
    await pod.start({**ARTIFACT, **SLOT, "batch_size": 4})
    await pod.reach(lambda status: status.next_index > 0)
    await world.serve(0, pod.app)
    await world.find(demo_0="Passed")
    assert (await pod.status()).state == "GENERATING"


@pytest.mark.parametrize(
    ("app", "says"),
    [
        (ReferencePod().app, "the pod cannot be checked: its server is not that of this project"),
        (FastAPI(), "the pod cannot be checked: HTTP 404: the server has no PoC routes"),
    ],
    ids=["reference", "no PoC"],
)
async def test_other_servers_stay_pending_and_say_why(world: World, app: FastAPI, says: str) -> None:
    await world.begin(nonces=8)
    await world.serve(0, app)
    await until(lambda: says in world.pods.get("demo-0", {}).get("message", ""))
    assert world.results() == {"demo-0": "Pending"}


async def test_what_a_pod_refuses_is_told_and_asked_again(world: World) -> None:
    await world.begin(nonces=8, seqLen=4096)
    pod = await world.add(0)
    await until(lambda: "4096" in world.pods.get("demo-0", {}).get("message", ""))
    assert world.results() == {"demo-0": "Pending"}
    assert pod.engine.computed == []


async def test_a_pod_whose_model_cannot_compute_says_so(world: World) -> None:
    await world.begin(nonces=8)
    pod = await world.stack.enter_async_context(running_pod())
    pod.engine.facts["refusal"] = "PoC does not run on this model"
    await world.serve(0, pod.app)
    await until(lambda: "PoC does not run on this model" in world.pods.get("demo-0", {}).get("message", ""))


async def test_a_pod_that_could_not_be_asked_is_asked_again(world: World) -> None:
    await world.begin(nonces=8)
    world.tell(0)
    await until(lambda: "cannot be checked" in world.pods.get("demo-0", {}).get("message", ""))
    pod = await world.stack.enter_async_context(running_pod())
    await world.stack.enter_async_context(serve(pod.app, "127.0.0.1", world.port))
    await world.find(demo_0="Passed")


async def test_a_process_that_may_not_act_asks_nobody(world: World) -> None:
    await world.begin(nonces=8)
    world.acts = False
    pod = await world.add(0)
    await asyncio.sleep(0.5)
    assert pod.engine.computed == []
    world.acts = True
    world.tell(0, starts=1)
    await world.find(demo_0="Passed")


async def test_a_defect_in_one_check_ends_no_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    real: Callable[..., Any] = self_checks._fingerprint
    monkeypatch.setattr(self_checks, "_fingerprint", broken)
    await world.begin(nonces=8)
    await world.add(0)
    await until(lambda: "RuntimeError: a defect" in world.pods.get("demo-0", {}).get("message", ""))
    monkeypatch.setattr(self_checks, "_fingerprint", real)
    await world.find(demo_0="Passed")


async def test_checks_of_a_fleet_that_is_gone_end(world: World) -> None:
    await world.begin(nonces=8)
    await world.serve(0, hanging())
    await until(lambda: world.results() == {"demo-0": "Pending"})
    world.kept.deleted("uid-demo")
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("the self-check of")])


async def test_a_pod_that_has_yet_to_learn_the_token_fails_no_check(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_POC_TOKEN", "other")
    await world.begin(nonces=8)
    await world.add(0)
    await until(lambda: "send the token of VLLM_POC_TOKEN" in world.pods.get("demo-0", {}).get("message", ""))
    assert world.results() == {"demo-0": "Pending"}
