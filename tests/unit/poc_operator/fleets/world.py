# SPDX-License-Identifier: Apache-2.0
"""A small world for random histories of fleets: pods, Kubernetes nodes, rounds, and what users do meanwhile.

The plan is asked each turn, and each of its steps is checked: whatever happens, an update takes no more than
``maxUnavailable`` pods away, and none that a live round may need.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from hypothesis import event
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.forecast import WorkOnPods
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.stages import KubernetesNode
from poc_operator.observed import REVISION_LABEL, Container, PodView
from tests.unit.poc_operator.build import NOW
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

    def turn_nodes(self, absences: Sequence[tuple[int, int, int]], turn: int) -> None:
        """Let Kubernetes nodes be away for their turns: of each absence the first turn, the node, and how many."""
        away = {number for begin, number, time in absences if begin <= turn < begin + time}
        for number in range(REPLICAS):
            if self.node_of(number).ready is (number in away):
                self.turn_node(number)

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

    def seen(self) -> FleetSnapshot:
        return FleetSnapshot(
            fleet=self.fleet,
            around=AROUND,
            now=self.now,
            objects=self.objects,
            pods=[self.view(number, pod) for number, pod in self.pods.items()],
            work=self.work(),
            good_template=self.good_template,
            nodes={f"node-{number}": self.node_of(number) for number in self.pods},
            download=self.download,
        )

    @property
    def good_template(self) -> Any:  # noqa: ANN401
        good = FleetStatus.model_validate(self.status).update.good_revision
        return self.revisions[int(good)] if good else None

    def turn(self) -> FleetStep:
        self.now += timedelta(seconds=TURN)
        self.check_pods()
        step = plan(self.seen())
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
        ready = [pod for number, pod in self.pods.items() if self.view(number, pod).ready and not pod.ends]
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
