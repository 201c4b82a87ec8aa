# SPDX-License-Identifier: Apache-2.0
"""Random histories of an update: pods and Kubernetes nodes that break, rounds that come and go, templates that fail.

Meanwhile somebody scales the fleet, and pauses the update. Whatever happens, an update takes no more than
``maxUnavailable`` pods away, and none that a live round may need. It never spreads a template whose canary failed,
blames no template for a node, and ends when nothing holds it up.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.forecast import WorkOnPods
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.observed import REVISION_LABEL, Container, KubernetesNode, PodView
from tests.unit.poc_operator.build import HISTORIES, NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

SET: Key = ("StatefulSet", "demo")
#: Seconds of one turn, and turns of a history before it is let go its way, and after.
TURN = 5
TURNS = 40
CALM = 300
#: Seconds from a pod's creation until it is ready, if it ever is.
STARTUP = 15
#: Seconds that it may take; nodes are away for longer.
LIMIT = 60
REPLICAS = 4
MOST = 6
NO_ROOM = "0/4 nodes are available: 1 node(s) were unschedulable, 3 Insufficient nvidia.com/gpu."


@dataclass
class Pod:
    """A pod of the StatefulSet."""

    uid: str
    revision: str
    created: datetime
    started: datetime  # its container; anew when its Kubernetes node is back
    taken: datetime | None  # by the kubelet
    broken: bool = False  # a new one works
    hangs: bool = False  # while it loads; a new one works
    homeless: bool = False
    restarts: int = 0
    ends: bool = False


@dataclass
class World:
    """A fleet, its StatefulSet as Kubernetes keeps it, pods, and rounds."""

    update: dict[str, Any]
    bad: dict[str, str]  # how a template fails, by its value
    now: datetime = NOW
    value: str = "v0"
    status: dict[str, Any] = field(default_factory=dict)
    objects: dict[Key, Any] = field(default_factory=dict)
    revisions: list[Any] = field(default_factory=list)  # templates; the index is the revision's name
    pods: dict[int, Pod] = field(default_factory=dict)
    rounds: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[int, KubernetesNode] = field(default_factory=dict)  # one for each number of a pod
    cordoned: set[int] = field(default_factory=set)  # numbers whose Kubernetes nodes take no new pods, nor any other
    replicas: int = REPLICAS
    made: int = 0
    broke: bool = False
    phases: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)

    @property
    def spec(self) -> dict[str, Any]:
        env = [{"name": "VALUE", "value": self.value}]
        return {"update": self.update, "selfCheck": {"enabled": True}, "env": env, "startupSeconds": LIMIT}

    @property
    def fleet(self) -> PoCFleet:
        return a_fleet(replicas=self.replicas, status=self.status, **self.spec)

    @property
    def download(self) -> DownloadSeen:
        return DownloadSeen()

    def value_of(self, revision: str) -> str:
        env = self.revisions[int(revision)]["spec"]["containers"][0]["env"]
        return str(next(item["value"] for item in env if item["name"] == "VALUE"))

    def fault_of(self, pod: Pod) -> str:
        return self.bad.get(self.value_of(pod.revision), "")

    def node_of(self, number: int) -> KubernetesNode:
        return self.nodes.get(number, KubernetesNode(ready=True, since=NOW, cordoned=number in self.cordoned))

    def ready(self, number: int) -> bool:
        pod = self.pods[number]
        old = self.now - pod.started >= timedelta(seconds=STARTUP)
        works = not pod.broken and not pod.hangs and self.fault_of(pod) != "crashes"
        return old and works and pod.taken is not None and self.node_of(number).ready

    def view(self, number: int, pod: Pod) -> PodView:
        ready = self.ready(number)
        crashes = pod.taken is not None and (pod.broken or self.fault_of(pod) == "crashes")
        return PodView(
            name=f"demo-{number}",
            namespace="ns",
            uid=pod.uid,
            labels={FLEET_LABEL: "demo", REVISION_LABEL: pod.revision},
            ready=ready,
            waiting_for=""
            if ready
            else "CrashLoopBackOff"
            if crashes
            else NO_ROOM
            if pod.homeless
            else "ContainersNotReady",
            containers=[Container(id=f"{pod.uid}#{pod.restarts}", restarts=pod.restarts)],
            node="" if pod.homeless else f"node-{number}",
            terminating=pod.ends,
            created=pod.created,
            scheduled=None if pod.homeless else pod.created,
            taken=pod.taken,
            ready_since=pod.started + timedelta(seconds=STARTUP) if ready else None,
        )

    def work(self) -> list[WorkOnPods]:
        return [WorkOnPods.parse("PoCRound", body) for body in self.rounds.values()]

    def check_pods(self) -> None:
        """Record what self-checks would find: the plan keeps it, since it hears no answer of pods."""
        pods = {pod.uid: pod for number, pod in self.pods.items() if self.ready(number)}
        for entry in self.status.get("pods", []):
            if entry["uid"] in pods:
                failed = self.fault_of(pods[entry["uid"]]) == "computes wrong vectors"
                entry["result"] = "Failed" if failed else "Passed"

    def kubernetes(self) -> None:
        """Make missing pods, with the newest revision, and end those that are too many."""
        if SET not in self.objects:
            return
        newest, replicas = self.objects[SET]["status"]["updateRevision"], self.objects[SET]["spec"]["replicas"]
        for number in [number for number in self.pods if number >= replicas]:
            self.end(number)
        for number in range(replicas):
            # The StatefulSet tries for ever, and again with another template.
            if number not in self.pods and self.bad.get(self.value_of(newest)) != "is refused":
                self.made += 1
                homeless = number in self.cordoned
                taken = self.now if self.node_of(number).ready and not homeless else None
                self.pods[number] = Pod(f"u{self.made}", newest, self.now, self.now, taken, homeless=homeless)

    def end(self, number: int) -> None:
        """Delete a pod. One whose kubelet is away ends when that is back."""
        if self.node_of(number).ready:
            del self.pods[number]
        else:
            self.pods[number].ends = True

    def turn_node(self, number: int) -> None:
        """Let a Kubernetes node go away, or come back: its kubelet takes pods, and starts their containers anew."""
        self.nodes[number] = KubernetesNode(ready=not self.node_of(number).ready, since=self.now)
        pod = self.pods.get(number)
        if pod is None or not self.nodes[number].ready:
            return
        pod.restarts += pod.taken is not None
        pod.taken, pod.started = pod.taken or self.now, self.now
        if pod.ends:
            del self.pods[number]

    def apply(self, body: Any) -> None:  # noqa: ANN401
        stored = copy.deepcopy(body)
        stored["metadata"] |= {"resourceVersion": str(self.made), "generation": 1}
        if key_of(body) == SET:
            template = stored["spec"]["template"]
            if template not in self.revisions:
                self.revisions.append(template)
            revision = str(self.revisions.index(template))
            stored["status"] = {"observedGeneration": 1, "updateRevision": revision}
        self.objects[key_of(body)] = stored

    def turn(self) -> FleetStep:
        self.now += timedelta(seconds=TURN)
        self.check_pods()
        good = FleetStatus.model_validate(self.status).update.good_revision
        step = plan(
            FleetSnapshot(
                fleet=self.fleet,
                around=AROUND,
                now=self.now,
                objects=self.objects,
                pods=[self.view(number, pod) for number, pod in self.pods.items()],
                work=self.work(),
                good_template=self.revisions[int(good)] if good else None,
                nodes={f"node-{number}": self.node_of(number) for number in self.pods},
                download=self.download,
            )
        )
        self.status = step.status.stored()
        self.phases.add(step.status.update.phase)
        self.told += [event.reason for event in step.events]
        self.check(step)
        for body in step.apply:
            self.apply(body)
        for eviction in step.evict:
            self.end(int(eviction.pod.name.rpartition("-")[2]))
        self.kubernetes()
        return step

    def rests(self, step: FleetStep) -> bool:
        """Whether the update is over and all pods work."""
        over = step.status.update.phase in (UpdatePhase.COMPLETE, UpdatePhase.FAILED)
        return over and not step.apply and not step.moves and all(map(self.ready, self.pods))

    def check(self, step: FleetStep) -> None:
        """What must hold of every step."""
        evicted = [eviction.pod for eviction in step.evict]
        ready = [pod for number, pod in self.pods.items() if self.view(number, pod).ready]
        taken = [pod for pod in evicted if pod.ready]
        limit = self.update["maxUnavailable"]
        assert not taken or self.replicas - len(ready) + len(taken) <= limit, (taken, len(ready))
        works = [pod for pod in taken if self.fault_by(pod.uid) != "computes wrong vectors"]
        if self.update["strategy"] == "BetweenRounds":
            live = [one for one in self.work() if one.live]
            assert not {pod.uid for pod in evicted} & {uid for one in live for uid in one.record.holders}
            assert not [pod.name for pod in works if any(one.needs(pod) for one in live)]
        if self.update["paused"]:
            assert not works
        if self.update["strategy"] == "Never":
            assert not evicted
        if step.status.update.phase is UpdatePhase.CANARY:
            assert len(evicted) <= 1
        if step.status.update.phase is UpdatePhase.FAILED and self.update["canary"]:
            for pod in evicted:
                assert pod.labels[REVISION_LABEL] != step.status.update.good_revision
        if not self.broke:
            assert all(self.value_of(one.revision) in self.bad for one in step.status.update.failed)

    def fault_by(self, uid: str) -> str:
        return self.fault_of(next(one for one in self.pods.values() if one.uid == uid))

    def begin_round(self, holders: list[str], *, unfit: Sequence[str] = ()) -> None:
        uid = f"r{len(self.rounds)}"
        metadata = {"uid": uid, "name": uid, "namespace": "ns", "creationTimestamp": self.now.isoformat()}
        slots = [{"uid": one, "state": "Running"} for one in holders]
        status = {"state": "Running", "assignments": slots, "unfitRevisions": list(unfit)}
        self.rounds[uid] = {"metadata": metadata, "spec": {"fleetRef": {"name": "demo"}}, "status": status}

    def end_rounds(self) -> None:
        for body in self.rounds.values():
            if body["status"]["state"] == "Running":
                body["status"] = {"state": "Complete", "completionTime": self.now.isoformat()}


def prepared(update: dict[str, Any], bad: dict[str, str]) -> World:
    """A fleet all of whose pods are ready."""
    world = World({"paused": False, **update}, bad)
    for _ in range(8):
        world.turn()
    assert world.status["update"]["goodRevision"] == "0"
    return world


UPDATES = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["BetweenRounds", "BetweenRounds", "Immediate", "Never"]),
        "maxUnavailable": st.integers(1, 3),
        "canary": st.booleans(),
    }
)
BAD = st.sampled_from(["", "", "crashes", "computes wrong vectors", "is refused"])
ASKED, BROKEN = ("change", "round", "end", "scale", "pause"), ("node", "break", "lose")


@given(data=st.data(), update=UPDATES, bad=st.lists(BAD, min_size=3, max_size=3))
@settings(max_examples=HISTORIES // 2, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_history_takes_more_than_it_may(data: st.DataObject, update: dict[str, Any], bad: list[str]) -> None:
    world = prepared(update, {f"v{n}": how for n, how in enumerate(bad, start=1) if how})
    for _ in range(data.draw(st.integers(1, TURNS))):
        action = data.draw(st.sampled_from([*ASKED, *BROKEN, *["nothing"] * 4]))
        if action in ASKED:
            ask(world, action, data)
        elif action in BROKEN:
            harm(world, action, data.draw(st.integers(0, MOST - 1)))
        world.turn()
    finish(world)


def ask(world: World, action: str, data: st.DataObject) -> None:
    """Do what users and the network do."""
    if action == "change":
        world.value = data.draw(st.sampled_from([f"v{n}" for n in range(4)]))
    elif action == "round":
        begin_any_round(world, data)
    elif action == "end":
        world.end_rounds()
    elif action == "scale":
        world.replicas = data.draw(st.integers(0, MOST))
    else:
        world.update["paused"] = not world.update["paused"]


def harm(world: World, action: str, number: int) -> None:
    """Let a Kubernetes node go away or come back, a pod break, or somebody delete one."""
    if action == "node":
        world.turn_node(number)
    elif number in world.pods:
        if action == "break":
            world.pods[number].broken = world.broke = True
        else:
            world.end(number)
            world.kubernetes()


def begin_any_round(world: World, data: st.DataObject) -> None:
    """Begin a round on all ready pods, or on one; or one that only pods with the newest revision can do."""
    ready = {pod.uid: pod.revision for number, pod in world.pods.items() if world.ready(number)}
    newest = world.objects[SET]["status"]["updateRevision"]
    unfit = {*ready.values()} - {newest} if data.draw(st.booleans()) else set()
    able = [uid for uid, revision in ready.items() if revision not in unfit]
    world.begin_round(able if data.draw(st.booleans()) else able[:1], unfit=sorted(unfit))


def finish(world: World) -> None:
    """Let all rounds end, resume, and mend what is broken: the update ends, and says so."""
    world.end_rounds()
    world.update["paused"], world.replicas = False, max(world.replicas, 1)
    for number in [number for number, node in world.nodes.items() if not node.ready]:
        world.turn_node(number)
    for pod in world.pods.values():
        pod.broken = False
    for _ in range(CALM):
        step = world.turn()
        if world.rests(step):
            break
    told, newest = step.status.update, world.objects[SET]["status"]["updateRevision"]
    revisions = {pod.revision for pod in world.pods.values()}
    event(told.phase)
    if world.update["strategy"] == "Never":
        assert not step.evict
    elif told.phase is UpdatePhase.COMPLETE:
        # A fleet that had no pods when its template changed is as a new one: nobody has shown that another one works.
        assert revisions == {newest} or (not world.pods and world.bad[world.value] == "is refused")
        assert world.value_of(newest) == world.value
    elif told.phase is UpdatePhase.FAILED:
        # Nobody has the failed template, if there was a good one.
        assert revisions == {told.good_revision}, told
        assert world.value_of(told.good_revision) not in world.bad or not world.update["canary"]
    else:
        # Without a canary a bad template stops where its first pods stop; so does one that was good before.
        assert world.bad.get(world.value), told
        assert not world.update["canary"] or told.phase in (UpdatePhase.ROLLING, UpdatePhase.STOPPED)


ABSENCES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, REPLICAS - 1), st.integers(1, 30)), max_size=6)


@given(absences=ABSENCES)
@settings(max_examples=HISTORIES // 4, deadline=None)
@example(absences=[(1, REPLICAS - 1, 30)])
@example(absences=[(6, REPLICAS - 1, 2)])
def test_a_good_template_is_not_blamed_for_kubernetes_nodes(absences: list[tuple[int, int, int]]) -> None:
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {})
    world.value = "v1"
    turns = {(turn, number) for begin, number, time in absences for turn in range(begin, begin + time)}
    for turn in range(CALM):
        for number in range(REPLICAS):
            if world.node_of(number).ready is ((turn, number) in turns):
                world.turn_node(number)
        world.turn()
    assert "Failed" not in world.phases
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v1"}
    assert world.status["update"]["phase"] == "Complete"


@given(
    what=st.sampled_from(["gets no Kubernetes node", "never comes up", "lost its Kubernetes node"]),
    number=st.integers(0, REPLICAS - 1),
    turn=st.integers(0, 40),
    limit=st.integers(2, 3),
    ends=st.integers(0, 80),
)
@settings(max_examples=HISTORIES // 4, deadline=None)
@example(what="gets no Kubernetes node", number=REPLICAS - 1, turn=0, limit=2, ends=0)
@example(what="gets no Kubernetes node", number=REPLICAS - 1, turn=6, limit=2, ends=0)
@example(what="lost its Kubernetes node", number=REPLICAS - 1, turn=0, limit=2, ends=0)
def test_an_update_to_a_good_template_ends_whatever_happens_to_one_pod(
    what: str, number: int, turn: int, limit: int, ends: int
) -> None:
    """It does so between rounds. A pod that cannot end, with its Kubernetes node, keeps what it has."""
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}, {})
    world.begin_round([])
    for now in range(CALM):
        if now == turn:
            strike(world, what, number)
        if now == 5:
            world.value = "v1"
        if now == ends:
            world.end_rounds()
        world.turn()
    assert {world.value_of(pod.revision) for pod in world.pods.values() if not pod.ends} == {"v1"}
    assert all(world.ready(other) for other in world.pods if other != number)


def strike(world: World, what: str, number: int) -> None:
    """Let something happen to one pod that is for good."""
    if what == "gets no Kubernetes node":
        world.cordoned.add(number)
        world.pods.pop(number, None)
    elif what == "lost its Kubernetes node":
        world.turn_node(number)
    elif number in world.pods:
        world.pods[number].hangs = world.fault_of(world.pods[number]) == "" and world.value == "v0"


@given(how=st.sampled_from(["crashes", "computes wrong vectors"]), limit=st.integers(1, 3), ends=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_bad_template_gets_one_pod(how: str, limit: int, ends: bool) -> None:
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}, {"v1": how})
    world.value, most = "v1", 0
    for turn in range(60):
        world.turn()
        most = max(most, sum(world.fault_of(pod) == how for pod in world.pods.values()))
        if ends and turn == 20:
            world.begin_round([])
    assert most == 1
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0"}
    assert world.status["update"]["phase"] == "Failed"
    assert world.phases == {"Complete", "Waiting", "Canary", "Failed"}
    # It is not tried again, and another template is.
    world.value = "v2"
    world.end_rounds()
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2"}


@pytest.mark.parametrize("how", ["crashes", "computes wrong vectors"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_bad_template_fails_also_where_no_pod_was_left(how: str, replicas: int) -> None:
    """As after a drain: Kubernetes makes all pods with the newest template, and none of an old one is ever seen."""
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {"v1": how})
    world.replicas = replicas
    assert any(world.rests(world.turn()) for _ in range(CALM))
    for number in list(world.pods):
        world.end(number)
    world.value = "v1"
    assert any(world.rests(world.turn()) for _ in range(CALM)), world.status["update"]["message"]
    assert "Failed" in world.phases
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0"}


@pytest.mark.parametrize("then", ["works", "is refused", "undo"])
@pytest.mark.parametrize(("replicas", "limit"), [(REPLICAS, 1), (REPLICAS, 2), (1, 1)])
@pytest.mark.parametrize("turns", [2, 22])  # 22: almost until the first one has failed
def test_another_template_follows_one_whose_pod_is_refused(then: str, replicas: int, limit: int, turns: int) -> None:
    """As by a webhook or a quota: the pod that is missing comes with the newest template, or that has failed too."""
    update = {"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}
    world = prepared(update, {"v1": "is refused", **({"v2": then} if then == "is refused" else {})})
    world.replicas, world.value = replicas, "v1"
    while SET in world.objects and len(world.pods) != replicas - 1:
        world.turn()
    for _ in range(turns):
        world.turn()
    assert "Failed" not in world.phases
    world.value = "v0" if then == "undo" else "v2"
    for _ in range(6):
        world.turn()
    assert len(world.pods) >= replicas - 1  # nobody else goes for the second one
    assert any(world.rests(world.turn()) for _ in range(CALM)), world.status["update"]["message"]
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2" if then == "works" else "v0"}
    failed = then == "is refused"
    assert (world.status["update"]["phase"], len(world.pods)) == ("Failed" if failed else "Complete", replicas)
    assert ("Failed" in world.phases) is failed


def set_of(world: World) -> Any:  # noqa: ANN401
    """Return the StatefulSet's container as the API server has it."""
    return world.objects[SET]["spec"]["template"]["spec"]["containers"][0]


def test_a_round_without_another_template_changes_nothing() -> None:
    """The API server stores some fields otherwise, and somebody may edit the StatefulSet: that is no new template."""
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {})
    world.told.clear()
    world.begin_round([])
    for turn in range(12):
        if turn % 3 == 0:
            world.objects[SET] = copy.deepcopy(world.objects[SET])
            set_of(world)["image"] = "somebody/else:1"
        step = world.turn()
        assert step.status.update.phase is UpdatePhase.COMPLETE
        assert step.status.updated_replicas == REPLICAS
        assert set_of(world)["image"] != "somebody/else:1"
    assert world.told == []


def test_no_template_is_complete_before_kubernetes_has_seen_it() -> None:
    world = prepared({"strategy": "BetweenRounds", "maxUnavailable": 1, "canary": True}, {})
    world.value = "v1"
    for _ in range(200):
        step = world.turn()
        newest = {world.value_of(pod.revision) for pod in world.pods.values()} == {"v1"}
        assert (step.status.update.phase is UpdatePhase.COMPLETE) <= newest
        if newest and step.status.update.phase is UpdatePhase.COMPLETE:
            return
    raise AssertionError("the update must end")
