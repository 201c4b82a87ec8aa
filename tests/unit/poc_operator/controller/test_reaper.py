# SPDX-License-Identifier: Apache-2.0
"""The reaper stops what nobody needs any more, on pods that no round asks, and leaves everything else alone."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import pytest

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.errors import PodBusy, PodTimeout, StoreUnavailable
from poc_operator.clients.kube.events import EventPoster
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.clients.pods.client import PodClient
from poc_operator.clients.pods.reference_pods import ReferenceConfig, ReferenceStatus
from poc_operator.controller import reaper
from poc_operator.controller.metrics import Metrics
from poc_operator.controller.observing import PodCache
from poc_operator.controller.reaper import LATE_SECONDS, MEMORY_SECONDS, Reaper
from poc_operator.observed import Container
from tests.support.builders.forwarding import until
from tests.unit.poc_operator.build import LABELS, UID, a_pod, a_round, a_slot, a_status, says
from vllm_poc.wire.answers import PowState

OWNER = "cluster-uid"
CUSTOM = {"my": "pod"}


def a_body(uid: str = UID, *slots: Any, state: State = State.RUNNING, **spec: Any) -> dict[str, Any]:  # noqa: ANN401
    """A round as the API server has it."""
    round_ = a_round(a_status(*slots, state=state), **spec)
    told: dict[str, Any] = round_.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {**told, "metadata": {**told["metadata"], "uid": uid}, "status": round_.status.stored()}


@dataclass
class World:
    """Rounds in the API server, pods by address, and what was done to them."""

    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    computing: dict[str, object] = field(default_factory=dict)  # host: an answer, or an error
    asked: list[str] = field(default_factory=list)
    stopped: list[tuple[str, str]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    driven: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)  # those that were asked without a token
    may_act: bool = True
    now: float = 1000.0
    stop_error: Exception | None = None
    list_error: Exception | None = None

    async def list_bodies(self, kind: type, namespaces: list[str]) -> list[Mapping[str, Any]]:
        """Return the rounds of a namespace."""
        assert kind is PoCRound
        if self.list_error is not None:
            raise self.list_error
        return [body for body in self.bodies if body["metadata"]["namespace"] in namespaces]

    async def of(self, _: str) -> Self:
        """Be the client for all namespaces."""
        return self

    async def status(self, base: str) -> object:
        """Answer as the pod of this address does."""
        host = base.removeprefix("http://").removesuffix("/api/v1/pow")
        self.asked.append(host)
        answer = self.computing.get(host, says().status)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stop(self, base: str, round_id: str) -> None:
        """Stop the pod."""
        if self.stop_error is not None:
            raise self.stop_error
        self.stopped.append((base.removeprefix("http://").removesuffix("/api/v1/pow"), round_id))

    async def post_on_pod(self, pod: Any, reason: str, message: str) -> None:  # noqa: ANN401
        """Note the Event."""
        self.events.append((f"pod {pod.name}", message))

    async def post_on_object(
        self, kind: object, namespace: str, name: str, uid: str, reason: str, message: str
    ) -> None:
        """Note the Event."""
        self.events.append((f"round {uid}", message))

    def reaper(self, *pods: Any) -> tuple[Reaper, Metrics]:  # noqa: ANN401
        """A new operator's reaper, whose watch has told of these pods."""
        cache, metrics = PodCache(lambda: self.now), Metrics()
        for pod in pods:
            cache.put(pod)
        made = Reaper(
            store=cast(ObjectStore, self),
            clients=cast(PodClient, self),
            strangers=cast(PodClient, Strangers(self)),
            events=cast(EventPoster, self),
            pods=cache,
            metrics=metrics,
            driven=lambda: self.driven,
            may_act=lambda: self.may_act,
            clock=lambda: self.now,
        )
        made.owners = (OWNER,)
        return made, metrics


@dataclass
class Strangers:
    """The client without a token."""

    world: World

    async def of(self, _: str) -> Self:
        """Be the client for all namespaces."""
        return self

    async def status(self, base: str) -> object:
        """Answer as the pod does."""
        self.world.unknown.append(base.removeprefix("http://").removesuffix("/api/v1/pow"))
        return await self.world.status(base)

    async def stop(self, base: str, round_id: str) -> None:
        """Stop the pod."""
        self.world.unknown.append("stop")
        await self.world.stop(base, round_id)


async def swept(made: Reaper, **kwargs: Any) -> None:  # noqa: ANN401
    """Sweep once, and wait for what follows."""
    await made.sweep(**kwargs)
    await asyncio.gather(*made._stops.values())


def work(round_id: str | None = UID, owner: str | None = OWNER) -> object:
    """The answer of a pod that computes."""
    return says(PowState.GENERATING, round_id=round_id, owner=owner).status


POD = a_pod("a", ip="h")
HERE = "h:8000"
DONE = a_slot("a", state=SlotState.DONE)


@pytest.mark.parametrize(
    ("bodies", "cause", "why"),
    [
        ([], "Deleted", "which does not exist any more"),
        ([a_body("another", a_slot("a"))], "Deleted", "which does not exist any more"),
        ([a_body(UID, DONE, state=State.COMPLETE)], "Finished", "which is over"),
        ([a_body(UID, DONE, state=State.FAILED)], "Finished", "which is over"),
        ([a_body(UID, DONE, selector={"matchLabels": CUSTOM})], "NotAssigned", "which gives it no slot"),
    ],
)
async def test_what_nobody_needs_is_stopped_counted_and_told(
    bodies: list[Mapping[str, Any]], cause: str, why: str
) -> None:
    """By a process that knows nothing but what the API server and the pods say."""
    world = World(bodies=bodies, computing={HERE: work()})
    made, metrics = world.reaper(POD)
    await swept(made)
    assert world.stopped == [(HERE, UID)]
    assert f'poc_operator_orphans_stopped_total{{cause="{cause}"}} 1.0' in metrics.text().decode()
    message = f"pod a computed for round {UID}, {why}: it is stopped"
    about = [(f"round {UID}", message)] if cause != "Deleted" else []
    assert world.events == [("pod a", message), *about]


@pytest.mark.parametrize(
    "answer",
    [work(owner=None), work(owner="another cluster"), work(round_id=None), says().status, PodTimeout("no answer")],
    ids=["without an owner", "of others", "without an id", "idle", "silent"],
)
async def test_work_of_others_is_left_alone(answer: object) -> None:
    world = World(computing={HERE: answer})
    made, _ = world.reaper(POD)
    await swept(made)
    assert (world.asked, world.stopped) == ([HERE], [])


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown to this process"])
async def test_what_a_round_needs_is_left_alone(known: bool) -> None:
    needed = a_body(UID, a_slot("a", state=SlotState.STARTING))
    world = World(bodies=[needed], computing={HERE: work()}, driven={UID} if known else set())
    made, _ = world.reaper(POD)
    if known:
        made.object_changed(needed)
    await swept(made)
    assert (world.asked, world.stopped) == ([HERE], [])


async def test_nothing_is_stopped_unless_the_api_server_says_so() -> None:
    world = World(computing={HERE: work()}, list_error=StoreUnavailable("away"))
    made, _ = world.reaper(POD)
    with pytest.raises(StoreUnavailable):
        await made.sweep()
    assert world.stopped == []


async def test_the_watch_alone_is_not_believed() -> None:
    """It tells of a finished round; the API server has it under way."""
    world = World(bodies=[a_body(UID, a_slot("a"))], computing={HERE: work()})
    made, _ = world.reaper(POD)
    made.object_changed(a_body(UID, DONE, state=State.COMPLETE))
    await swept(made)
    assert world.stopped == []


async def test_a_deletion_that_the_watch_has_missed_is_found() -> None:
    """The round is still known, and has no loop any more: its last look has found it gone."""
    world = World(computing={HERE: work()})
    made, _ = world.reaper(POD)
    made.object_changed(a_body(UID, a_slot("a")))
    await swept(made)
    assert world.stopped == [(HERE, UID)]


async def test_pods_that_compute_a_round_under_way_are_asked_by_its_loop() -> None:
    world = World(driven={UID})
    made, _ = world.reaper(POD, a_pod("b", ip="i"), a_pod("c", ip="j"))
    made.object_changed(a_body(UID, a_slot("a"), a_slot("b", state=SlotState.STARTING, group=1)))
    await swept(made)
    assert sorted(world.asked) == ["i:8000", "j:8000"]


@pytest.mark.parametrize("gone", [False, True], ids=["finished", "deleted"])
@pytest.mark.parametrize("relabelled", [False, True])
async def test_every_pod_that_may_have_worked_for_us_is_asked(gone: bool, relabelled: bool) -> None:
    """Whatever its labels are by now, and at the port of its round."""
    made_for = a_body(UID, DONE, state=State.COMPLETE, selector={"matchLabels": CUSTOM}, port=9000)
    world = World(bodies=[] if gone else [made_for], computing={"h:9000": work()})
    labels = {"other": "labels"} if relabelled else CUSTOM
    made, _ = world.reaper(a_pod("a", ip="h", labels=labels), a_pod("z", ip="z", labels={}), a_pod("g", gone=True))
    made.object_changed(made_for)
    if gone:
        made.object_gone(UID)
    await swept(made)
    assert (world.asked, world.stopped) == (["h:9000"], [("h:9000", UID)])
    if gone:
        world.now += MEMORY_SECONDS
        world.asked.clear()
        await swept(made)
        assert world.asked == []


SELECTORS: list[dict[str, Any]] = [
    {"matchLabels": {"a": "1"}},
    {"matchLabels": {"a": "1", "b": "2"}},
    {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]},
    {"matchExpressions": [{"key": "b", "operator": "In", "values": ["2", "3"]}]},
    {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]},
    {"matchLabels": {"nobody": "has"}},
]


@pytest.mark.parametrize("selector", SELECTORS)
async def test_all_that_a_selector_matches_are_asked(selector: dict[str, Any]) -> None:
    labels: list[dict[str, str]] = [{}, {"a": "1"}, {"a": "1", "b": "2"}, {"b": "2"}, {"b": "3"}, {"a": "2", "b": "3"}]
    pods = [a_pod(f"p{number}", ip=f"h{number}", labels=found) for number, found in enumerate(labels)]
    world = World()
    made, _ = world.reaper(*pods, *(a_pod(f"x{pod.name}", namespace="x", labels=pod.labels) for pod in pods))
    made.object_changed(a_body(UID, selector=selector))
    await swept(made)
    wanted = LabelSelector.model_validate(selector)
    assert sorted(world.asked) == [f"{pod.ip}:8000" for pod in pods if wanted.matches(pod.labels)]


@pytest.mark.parametrize("known", [None, "selected", "named", "gone"])
async def test_a_pod_that_no_object_selects_or_names_does_not_get_the_token(known: str | None) -> None:
    """Whoever may make a pod could take the workers' label, and wait for the token."""
    labels = LABELS if known == "selected" else CUSTOM
    round_ = a_body(UID, DONE, state=State.COMPLETE, selector={"matchLabels": labels})
    world = World(bodies=[round_], computing={HERE: work()})
    made, _ = world.reaper(POD if known != "gone" else a_pod("a", ip="h"))
    if known is not None:
        made.object_changed(round_)
    if known == "gone":
        made.object_gone(UID)
        world.bodies.clear()
    await swept(made)
    assert world.stopped == [(HERE, UID)]
    assert world.unknown == ([HERE, "stop"] if known is None else [])


async def test_the_pod_that_had_a_slot_before_another_is_remembered() -> None:
    world = World(bodies=[], computing={HERE: work()})
    made, _ = world.reaper(a_pod("a", ip="h", labels={}))
    for pod in ("a", "b"):
        made.object_changed(a_body(UID, a_slot(pod)))
    made.object_gone(UID)
    await swept(made)
    assert world.stopped == [(HERE, UID)]


async def test_a_pod_that_computes_another_round_by_now_is_no_matter() -> None:
    world = World(computing={HERE: work()}, stop_error=PodBusy("RoundConflict", "another round runs"))
    made, metrics = world.reaper(POD)
    await swept(made)
    assert world.events == []
    assert 'cause="Deleted"' not in metrics.text().decode()


async def test_a_pod_that_cannot_be_stopped_is_told_again() -> None:
    world = World(computing={HERE: work()}, stop_error=PodTimeout("no answer within 60 s"))
    made, _ = world.reaper(POD)
    await swept(made)
    world.stop_error = None
    await swept(made)
    assert world.stopped == [(HERE, UID)]


async def test_a_pod_that_has_got_the_slot_while_its_stop_waited_is_left_alone() -> None:
    """Many stops wait for each other. Meanwhile the round may give the pod a slot."""
    other = {"matchLabels": CUSTOM}
    before, after = a_body(UID, DONE, selector=other), a_body(UID, a_slot("a"), selector=other)
    world = World(bodies=[before], computing={HERE: work()}, driven={UID})
    made, _ = world.reaper(POD)
    made.object_changed(before)
    made._stopping = asyncio.Semaphore(0)
    await made.sweep()
    await asyncio.sleep(0)
    assert made._stops, "the stop waits"
    made.object_changed(after)
    made._stopping.release()
    await asyncio.gather(*made._stops.values())
    assert world.stopped == []


async def test_silent_pods_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(computing={HERE: work()})
    real = world.status

    async def status(base: str) -> object:
        if "silent" in base:
            world.asked.append(base)
            await asyncio.sleep(0.05)
            raise PodTimeout("no answer")
        return await real(base)

    monkeypatch.setattr(world, "status", status)
    made, _ = world.reaper(*(a_pod(f"s{number}", ip=f"silent-{number}") for number in range(100)), POD)
    made._clock = asyncio.get_running_loop().time
    await swept(made)
    world.asked.clear()
    monkeypatch.setattr(reaper, "PERIOD_SECONDS", 0.08)
    await swept(made)
    assert world.asked[0] == HERE, "who answered before comes first"
    assert len(world.asked) < 101, "and a sweep has an end"
    for _ in range(3):
        await swept(made)
    assert len(set(world.asked)) == 101, "each gets its turn"


async def test_the_pods_of_a_deleted_round_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "FIRST_SECONDS", 1000.0)
    world = World(computing={HERE: work()})
    made, _ = world.reaper(POD, a_pod("b", ip="i", labels=CUSTOM))
    running = asyncio.create_task(made.run())
    made.object_changed(a_body(UID, a_slot("a")))
    made.object_gone(UID)
    await until(lambda: bool(world.stopped))
    assert world.asked == [HERE]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await made.close()


@pytest.mark.parametrize("trouble", [StoreUnavailable("away"), RuntimeError("a defect")])
async def test_it_goes_on_whatever_fails(trouble: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(reaper, "PERIOD_SECONDS", 0.01)
    world = World(computing={HERE: work()}, list_error=trouble)
    made, _ = world.reaper(POD)
    made._clock = asyncio.get_running_loop().time
    running = asyncio.create_task(made.run())
    await until(lambda: len(world.asked) > 2)
    world.list_error = None
    await until(lambda: bool(world.stopped))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await made.close()


async def test_without_the_lease_it_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(reaper, "PERIOD_SECONDS", 0.01)
    world = World(computing={HERE: work()}, may_act=False)
    made, _ = world.reaper(POD)
    made._clock = asyncio.get_running_loop().time
    running = asyncio.create_task(made.run())
    await asyncio.sleep(0.1)
    assert world.asked == []
    world.may_act = True
    await until(lambda: bool(world.stopped))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await made.close()


REFERENCE = ReferenceStatus(
    status=PowState.GENERATING,
    config=ReferenceConfig(
        block_hash="ab" * 32,
        block_height=7,
        public_key="key",
        node_id=0,
        node_count=1,
        group_id=0,
        n_groups=1,
        seq_len=64,
        k_dim=4,
    ),
)
UNREADABLE = {"metadata": {"namespace": "ns", "uid": "x", "name": "x", "generation": 1}}
ARTIFACT: dict[str, Any] = {"rTarget": None, "artifact": {"kDim": 4}}


@pytest.mark.parametrize(
    ("bodies", "stopped"),
    [
        ([], False),
        ([a_body(UID, DONE, state=State.COMPLETE, **ARTIFACT)], True),
        ([a_body(UID, a_slot("b", state=SlotState.DONE), state=State.COMPLETE, **ARTIFACT)], False),
        ([a_body(UID, DONE, state=State.COMPLETE)], False),
        ([a_body(UID, DONE, state=State.COMPLETE, **ARTIFACT), a_body("new", a_slot("a"), **ARTIFACT)], False),
        ([a_body(UID, DONE, state=State.COMPLETE, **ARTIFACT), UNREADABLE], False),
    ],
    ids=["nothing known", "its slot", "another pod's slot", "another protocol", "the same again", "one is unreadable"],
)
async def test_reference_pods_are_left_alone_unless_a_status_proves_it(
    bodies: list[Mapping[str, Any]], stopped: bool
) -> None:
    world = World(bodies=bodies, computing={HERE: REFERENCE})
    made, _ = world.reaper(POD)
    await swept(made)
    assert bool(world.stopped) is stopped
    assert LABELS.items() <= POD.labels.items(), "it is asked in any case"
    assert world.asked == [HERE]


def a_server(**fields: Any) -> Any:  # noqa: ANN401
    """The reference pod, with the container that it has now."""
    return a_pod("a", ip="h", containers=(Container(id="c#0"),), **fields)


@pytest.mark.parametrize(
    ("slot", "other", "stopped"),
    [
        (a_slot("a", session="c#0"), None, True),
        (a_slot("a", state=SlotState.STARTING), None, True),
        (a_slot("a", session="before#0"), None, False),
        (a_slot("a", session="c#0", group=1), None, False),
        (a_slot("b", session="c#0"), None, False),
        (a_slot("a", session="s1"), None, False),
        (a_slot("a", session="c#0"), a_body("new", a_slot("a"), **ARTIFACT), False),
    ],
    ids=["its slot", "unconfirmed", "earlier container", "another slot", "another pod", "our pod", "the same again"],
)
async def test_a_reference_pod_is_stopped_when_its_round_is_deleted(slot: Any, other: Any, stopped: bool) -> None:  # noqa: ANN401
    """As without a finalizer: the loop has yet to see that the round is gone, and the pod computes on."""
    world = World(bodies=[other] if other else [], computing={HERE: REFERENCE}, driven={UID})
    made, _ = world.reaper(a_server())
    made.object_changed(a_body(UID, slot, **ARTIFACT))
    made.object_gone(UID)
    await swept(made)
    assert world.stopped == ([(HERE, UID)] if stopped else [])


async def test_a_silent_reference_pod_is_remembered_until_it_has_stopped() -> None:
    """Its slot is another pod's by then, and days have passed."""
    world = World(computing={HERE: PodTimeout("no answer")})
    made, _ = world.reaper(a_server(labels={}))
    for slot in (a_slot("a", session="c#0"), a_slot("b", session="s1")):
        made.object_changed(a_body(UID, slot, **ARTIFACT))
    made.object_gone(UID)
    await swept(made)
    world.now += 2 * MEMORY_SECONDS
    world.computing[HERE] = REFERENCE
    await swept(made)
    assert world.stopped == [(HERE, UID)]
    await swept(made)
    assert world.stopped == [(HERE, UID)], "what it computes now is another's"


@pytest.mark.parametrize(("seconds", "ours"), [(0.0, True), (LATE_SECONDS, False)])
async def test_what_an_idle_reference_pod_computes_later_is_of_others(seconds: float, ours: bool) -> None:
    """Unless the order may have been on its way when the round was deleted."""
    world = World(computing={HERE: ReferenceStatus(status=PowState.IDLE)})
    made, _ = world.reaper(a_server())
    made.object_changed(a_body(UID, a_slot("a", session="c#0"), **ARTIFACT))
    made.object_gone(UID)
    world.now += seconds
    await swept(made)
    world.computing[HERE] = REFERENCE
    await swept(made)
    assert bool(world.stopped) is ours
