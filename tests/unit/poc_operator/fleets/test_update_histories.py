# SPDX-License-Identifier: Apache-2.0
"""Random histories of an update: pods that start, break and leave, rounds that come and go, templates that fail.

Whatever happens, an update takes no more than ``maxUnavailable`` pods away, takes none while a round is live, never
spreads a template whose canary failed, and ends when nothing holds it up.
"""

import copy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.fleets.forecast import WorkOnPods
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.observed import REVISION_LABEL, Container, PodView
from tests.unit.poc_operator.build import HISTORIES, NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

SET: Key = ("StatefulSet", "demo")
#: Seconds of one turn, and turns of a history before it is let go its way, and after.
TURN = 5
TURNS = 40
CALM = 300
#: Seconds from a pod's creation until it is ready, if it ever is.
STARTUP = 15
REPLICAS = 4


@dataclass
class Pod:
    """A pod of the StatefulSet."""

    uid: str
    revision: str
    created: datetime
    broken: bool = False  # by its Kubernetes node; a new one works
    checked: bool = False


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
    made: int = 0
    phases: set[str] = field(default_factory=set)

    @property
    def fleet(self) -> PoCFleet:
        env = [{"name": "VALUE", "value": self.value}]
        checks = {"enabled": True}
        return a_fleet(replicas=REPLICAS, update=self.update, status=self.status, selfCheck=checks, env=env)

    def value_of(self, revision: str) -> str:
        env = self.revisions[int(revision)]["spec"]["containers"][0]["env"]
        return str(next(item["value"] for item in env if item["name"] == "VALUE"))

    def fault_of(self, pod: Pod) -> str:
        return self.bad.get(self.value_of(pod.revision), "")

    def ready(self, pod: Pod) -> bool:
        old = self.now - pod.created >= timedelta(seconds=STARTUP)
        return old and not pod.broken and self.fault_of(pod) != "crashes"

    def view(self, number: int, pod: Pod) -> PodView:
        ready = self.ready(pod)
        crashes = pod.broken or self.fault_of(pod) == "crashes"
        return PodView(
            name=f"demo-{number}",
            namespace="ns",
            uid=pod.uid,
            labels={FLEET_LABEL: "demo", REVISION_LABEL: pod.revision},
            ready=ready,
            waiting_for="" if ready else "CrashLoopBackOff" if crashes else "ContainersNotReady",
            containers=[Container(id=pod.uid)],
            created=pod.created,
            ready_since=pod.created + timedelta(seconds=STARTUP) if ready else None,
        )

    def work(self) -> list[WorkOnPods]:
        return [WorkOnPods.parse("PoCRound", body) for body in self.rounds.values()]

    def live(self) -> bool:
        return any(one.live for one in self.work())

    def check_pods(self) -> None:
        """Record what self-checks would find: the plan keeps it, since it hears no answer of pods."""
        pods = {pod.uid: pod for pod in self.pods.values() if self.ready(pod)}
        for entry in self.status.get("pods", []):
            if entry["uid"] in pods:
                failed = self.fault_of(pods[entry["uid"]]) == "computes wrong vectors"
                entry["result"] = "Failed" if failed else "Passed"

    def kubernetes(self) -> None:
        """Make missing pods, with the newest revision."""
        if SET not in self.objects:
            return
        newest = self.objects[SET]["status"]["updateRevision"]
        for number in range(REPLICAS):
            if number not in self.pods:
                self.made += 1
                self.pods[number] = Pod(f"u{self.made}", newest, self.now)

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
            )
        )
        self.status = step.status.stored()
        self.phases.add(step.status.update.phase)
        self.check(step)
        for body in step.apply:
            self.apply(body)
        for eviction in step.evict:
            del self.pods[int(eviction.pod.name.rpartition("-")[2])]
        self.kubernetes()
        return step

    def rests(self, step: FleetStep) -> bool:
        """Whether the update is over and all pods work."""
        over = step.status.update.phase in (UpdatePhase.COMPLETE, UpdatePhase.FAILED)
        return over and not step.apply and not step.moves and all(map(self.ready, self.pods.values()))

    def check(self, step: FleetStep) -> None:
        """What must hold of every step."""
        evicted = [eviction.pod for eviction in step.evict]
        ready = [pod for number, pod in self.pods.items() if self.view(number, pod).ready]
        taken = [pod for pod in evicted if pod.ready]
        limit = self.update["maxUnavailable"]
        assert not taken or REPLICAS - len(ready) + len(taken) <= limit, (taken, len(ready))
        if self.live() and self.update["strategy"] == "BetweenRounds":
            holders = {uid for one in self.work() if one.live for uid in one.record.holders}
            for pod in evicted:
                lost = self.fault_of(next(one for one in self.pods.values() if one.uid == pod.uid))
                assert pod.uid not in holders
                assert not pod.ready or lost == "computes wrong vectors", f"{pod.name} leaves during a round"
        if self.update["strategy"] == "Never":
            assert not evicted
        if step.status.update.phase is UpdatePhase.CANARY:
            assert len(evicted) <= 1
        if step.status.update.phase is UpdatePhase.FAILED and self.update["canary"]:
            for pod in evicted:
                assert pod.labels[REVISION_LABEL] != step.status.update.good_revision

    def begin_round(self, holders: list[str]) -> None:
        uid = f"r{len(self.rounds)}"
        metadata = {"uid": uid, "name": uid, "namespace": "ns", "creationTimestamp": self.now.isoformat()}
        slots = [{"uid": one, "state": "Running"} for one in holders]
        status = {"state": "Running", "assignments": slots}
        self.rounds[uid] = {"metadata": metadata, "spec": {"fleetRef": {"name": "demo"}}, "status": status}

    def end_rounds(self) -> None:
        for body in self.rounds.values():
            if body["status"]["state"] == "Running":
                body["status"] = {"state": "Complete", "completionTime": self.now.isoformat()}


def prepared(update: dict[str, Any], bad: dict[str, str]) -> World:
    """A fleet all of whose pods are ready."""
    world = World(update, bad)
    for _ in range(8):
        world.turn()
    assert world.status["update"]["goodRevision"] == "0"
    return world


UPDATES = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["BetweenRounds", "BetweenRounds", "Immediate", "Never"]),
        "maxUnavailable": st.integers(1, 3),
        "canary": st.booleans(),
        "paused": st.just(False),
    }
)
BAD = st.sampled_from(["", "", "crashes", "computes wrong vectors"])
ACTIONS = ["change", "round", "end", "break", "lose", "nothing", "nothing", "nothing"]


@given(data=st.data(), update=UPDATES, bad=st.lists(BAD, min_size=3, max_size=3))
@settings(max_examples=HISTORIES // 2, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_history_takes_more_than_it_may(data: st.DataObject, update: dict[str, Any], bad: list[str]) -> None:
    world = prepared(update, {f"v{n}": how for n, how in enumerate(bad, start=1) if how})
    for _ in range(data.draw(st.integers(1, TURNS))):
        action = data.draw(st.sampled_from(ACTIONS))
        number = data.draw(st.integers(0, REPLICAS - 1))
        if action == "change":
            world.value = data.draw(st.sampled_from([f"v{n}" for n in range(4)]))
        elif action == "round":
            ready = [pod.uid for pod in world.pods.values() if world.ready(pod)]
            world.begin_round(ready if data.draw(st.booleans()) else ready[:1])
        elif action == "end":
            world.end_rounds()
        elif action == "break":
            world.pods[number].broken = True
        elif action == "lose":
            del world.pods[number]
            world.kubernetes()
        world.turn()
    finish(world)


def finish(world: World) -> None:
    """Let all rounds end, and mend what is broken: the update ends, and says so."""
    world.end_rounds()
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
        assert revisions == {newest}
        assert world.value_of(newest) == world.value
    elif told.phase is UpdatePhase.FAILED:
        # Nobody has the failed template, if there was a good one.
        assert revisions == {told.good_revision}, told
        assert world.value_of(told.good_revision) not in world.bad or not world.update["canary"]
    else:
        # Without a canary a bad template stops where its first pods stop; so does one that was good before.
        assert world.bad.get(world.value), told
        assert not world.update["canary"] or told.phase is UpdatePhase.ROLLING


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
    assert world.phases == {"Complete", "Canary", "Failed"}
    # It is not tried again, and another template is.
    world.value = "v2"
    world.end_rounds()
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2"}
