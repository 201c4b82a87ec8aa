# SPDX-License-Identifier: Apache-2.0
"""Random histories of fleets whose replicas are groups: the world follows LeaderWorkerSet 0.9 and its StatefulSets.

LeaderWorkerSet makes a StatefulSet of the leaders, which replaces by itself those from its partition on. It deletes the
leader of a group of which any pod has failed. Both work at their own pace. What the operator writes may be lost, and so
may all that its process remembers.

Whatever happens, no leader goes that was not evicted, except those that fail. No bad template is in two groups at a
time. In the end all groups have the template that is wanted, or the last good one, and all leaders are held again.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import FleetStatus
from poc_operator.apis.v1alpha1.meta import GROUPS_KIND
from poc_operator.fleets.groups import HELD, partition_in
from poc_operator.fleets.history import Known
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.stages import KubernetesNode
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.fleets.build import AROUND
from tests.unit.poc_operator.fleets.world import (
    ASKED,
    BAD,
    CALM,
    MOST,
    REPLICAS,
    SET,
    TURN,
    TURNS,
    UPDATES,
    Pod,
    World,
    ask,
    finish,
)

GROUPS: Key = (GROUPS_KIND, "demo")
KNOWN = replace(AROUND, leader_worker_sets=True)
SPAN = {"parallelism": {"tensor": 8, "pipeline": 2, "kubernetesNodes": 2}, "gpu": {"count": 8}}
#: Seconds from a group's creation until it crashes, if its template does.
CRASH = 10
#: Seconds for which the operator remembers an eviction, and that one was refused.
EVICTED, REFUSED = 30, 3


@dataclass
class Memory:
    """What the operator's process remembers of a fleet."""

    evicted: dict[str, tuple[str, str, datetime]] = field(default_factory=dict)  # by uid: name, revision, until
    busy: dict[str, datetime] = field(default_factory=dict)  # by uid: until
    known: Known | None = None


@dataclass
class Groups(World):
    """A fleet of groups. Its pods are their leaders, and each group has a worker on a Kubernetes node of its own."""

    grace: int = 0  # turns that a pod takes to end
    lag: dict[str, int] = field(default_factory=dict)  # turns for which a controller does nothing, by its object's kind
    lost: int = 0  # writes of the operator from now on that fail
    budget: bool = True  # whether evictions are allowed
    eager: bool = True  # whether Kubernetes does its part between two turns of the operator
    memory: Memory = field(default_factory=Memory)
    ending: dict[str, int] = field(default_factory=dict)  # turns until a pod is gone, by uid
    kept: set[str] = field(default_factory=set)  # LeaderWorkerSet's own revisions, by the names of its StatefulSet's
    evictions: list[tuple[str, datetime]] = field(default_factory=list)  # of the last seconds, by the pods' names
    scaled: bool = False  # since the last template was applied

    @property
    def spec(self) -> dict[str, Any]:
        return {**super().spec, **SPAN}

    def value_of(self, revision: str) -> str:
        env = self.revisions[int(revision)]["leaderTemplate"]["spec"]["containers"][0]["env"]
        return str(next(item["value"] for item in env if item["name"] == "VALUE"))

    @property
    def good_template(self) -> Any:  # noqa: ANN401
        update = FleetStatus.model_validate(self.status).update
        if not update.failed or not update.good_revision:
            return None
        both = self.revisions[int(update.good_revision)]
        return both if update.good_revision in self.kept else self.leader_template(update.good_revision)

    def leader_template(self, revision: str) -> Any:  # noqa: ANN401
        """Return a template as the StatefulSet of leaders has it."""
        wanted = self.revisions[int(revision)]["leaderTemplate"]
        labels = {**wanted["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/template-revision-hash": revision}
        return {**wanted, "metadata": {**wanted["metadata"], "labels": labels, "creationTimestamp": None}}

    def worker_node(self, number: int) -> KubernetesNode:
        return self.node_of(MOST + number)

    def ready(self, number: int) -> bool:
        return super().ready(number) and self.worker_node(number).ready and not self.pods[number].ends

    def view(self, number: int, pod: Pod) -> PodView:
        found = super().view(number, pod)
        crashed = found.waiting_for == "CrashLoopBackOff"  # LeaderWorkerSet is faster
        return replace(found, waiting_for="ContainersNotReady") if crashed else found

    def seen(self) -> FleetSnapshot:
        memory, now = self.memory, self.now
        memory.evicted = {uid: one for uid, one in memory.evicted.items() if now < one[2]}
        memory.busy = {uid: until for uid, until in memory.busy.items() if now < until}
        return replace(
            super().seen(),
            around=KNOWN,
            busy=dict.fromkeys(memory.busy, "waiting to evict it"),
            evicted=frozenset(memory.evicted),
            evicted_names={name: revision for name, revision, _ in memory.evicted.values()},
            known=memory.known,
        )

    # What the operator's loop does with a plan.

    def turn(self) -> FleetStep:
        self.now += timedelta(seconds=TURN)
        self.kubernetes()
        self.check_pods()
        step = self.operate()
        if step.evict:
            if self.eager:
                self.kubernetes()
            self.now += timedelta(seconds=1)
            step = self.operate()
        return step

    def operate(self) -> FleetStep:
        """Apply what the plan wants, plan once more, record that, and evict."""
        first = step = plan(self.seen())
        for body in first.apply:
            if self.is_lost():
                return first
            self.apply(body)
        if first.apply:
            step = plan(self.seen())
        if step.status.stored() != self.status and self.is_lost():
            return step
        self.status, self.memory.known = step.status.stored(), step.known
        self.phases.add(step.status.update.phase)
        self.told += [event.reason for event in step.events]
        self.check(step)
        for eviction in step.evict:
            pod, until = eviction.pod, self.now + timedelta(seconds=EVICTED)
            if not self.budget:
                self.memory.busy[pod.uid] = self.now + timedelta(seconds=REFUSED)
                break
            self.memory.evicted[pod.uid] = (pod.name, eviction.revision, until)
            self.evictions.append((pod.name, until))
            self.end(int(pod.name.rpartition("-")[2]))
        return replace(step, moves=step.moves or bool(first.apply))

    def rests(self, step: FleetStep) -> bool:
        return super().rests(step) and len(self.pods) == self.replicas

    def is_lost(self) -> bool:
        self.lost -= self.lost > 0
        return self.lost > 0

    def apply(self, body: Any) -> None:  # noqa: ANN401
        before, stored = self.objects.get(key_of(body)), copy.deepcopy(body)
        known = before or {"metadata": {"generation": 0}}
        generation = known["metadata"]["generation"] + (before is None or before["spec"] != stored["spec"])
        stored["metadata"] |= {"resourceVersion": "1", "generation": generation, "uid": f"{body['kind']}-uid"}
        if "status" in known:
            stored["status"] = known["status"]
        self.objects[key_of(body)] = stored

    # What Kubernetes and LeaderWorkerSet do.

    def kubernetes(self) -> None:
        for kind, control in ((GROUPS_KIND, self.keep_groups), ("StatefulSet", self.keep_leaders)):
            self.lag[kind] = max(0, self.lag.get(kind, 0) - 1)
            if not self.lag[kind]:
                control()
        for number, pod in list(self.pods.items()):
            self.run_pod(number, pod)

    def run_pod(self, number: int, pod: Pod) -> None:
        """Let a group go on: one of which a container has ended is made anew as a whole."""
        if pod.homeless and number not in self.cordoned:
            pod.homeless, pod.taken, pod.started = False, self.now, self.now
        crashes = self.fault_of(pod) == "crashes" and self.now - pod.started >= timedelta(seconds=CRASH)
        if not pod.ends and pod.taken is not None and (pod.broken or crashes or pod.restarts):
            self.end(number)
        elif pod.ends and self.node_of(number).ready:
            self.ending[pod.uid] = self.ending.get(pod.uid, self.grace) - 1
            if self.ending[pod.uid] <= 0:
                del self.pods[number]

    def end(self, number: int) -> None:
        if self.node_of(number).ready and not self.grace:
            del self.pods[number]
        else:
            self.pods[number].ends = True

    def turn_node(self, number: int) -> None:
        """Let a Kubernetes node of a leader, or of a worker, go away or come back. Their containers start anew then."""
        if number < MOST:
            super().turn_node(number)
            return
        self.broke = True  # the operator knows nothing of workers
        self.nodes[number] = KubernetesNode(ready=not self.node_of(number).ready, since=self.now)
        if self.nodes[number].ready and number - MOST in self.pods:
            self.pods[number - MOST].restarts += 1

    def keep_groups(self) -> None:
        """Bring the StatefulSet of leaders to what the LeaderWorkerSet says, and note that it was seen."""
        groups = self.objects.get(GROUPS)
        if groups is None:
            return
        template, replicas = groups["spec"]["leaderWorkerTemplate"], groups["spec"]["replicas"]
        if template not in self.revisions:
            self.revisions.append(copy.deepcopy(template))
        revision, leaders = str(self.revisions.index(template)), self.objects.get(SET)
        self.kept.add(revision)
        partition = max(partition_in(groups), _own_partition(leaders, revision, replicas))
        self.apply_leaders({"revision": revision, "replicas": replicas, "partition": partition})
        groups["status"] = {"observedGeneration": groups["metadata"]["generation"]}
        ready = [number for number in range(replicas) if number in self.pods and self.ready(number)]
        if not partition_in(groups) and all(self.pods[number].revision == revision for number in ready):
            self.kept = {revision} if len(ready) == replicas else self.kept

    def apply_leaders(self, spec: dict[str, Any]) -> None:
        owner = {"kind": GROUPS_KIND, "name": "demo", "uid": f"{GROUPS_KIND}-uid", "controller": True}
        metadata = {"name": "demo", "namespace": "ns", "uid": "leaders", "resourceVersion": "1", "generation": 0}
        created = {"kind": "StatefulSet", "metadata": {**metadata, "ownerReferences": [owner]}, "spec": {}}
        leaders = self.objects.setdefault(SET, created)
        if {**leaders["spec"], **spec} != leaders["spec"]:
            leaders["metadata"]["generation"] += 1
            leaders["spec"] = {"template": self.leader_template(spec["revision"]), **spec}

    def keep_leaders(self) -> None:
        """Do what the StatefulSet's controller does in a turn: create, delete, replace one, and note what it saw."""
        leaders = self.objects.get(SET)
        if leaders is None:
            return
        spec, newest = leaders["spec"], leaders["spec"]["revision"]
        current = (leaders.get("status") or {}).get("currentRevision", newest)
        for number in [number for number in self.pods if number >= spec["replicas"] and not self.pods[number].ends]:
            self.end(number)
        for number in range(spec["replicas"]):
            revision = current if number < spec["partition"] else newest
            if number not in self.pods and self.bad.get(self.value_of(revision)) != "is refused":
                self.make_leader(number, revision)
        self.replace_leader(spec, newest)
        stays = [number for number, pod in self.pods.items() if pod.revision == newest and self.ready(number)]
        if len(stays) == len(self.pods) == spec["replicas"]:
            current = newest
        observed = leaders["metadata"]["generation"]
        leaders["status"] = {"observedGeneration": observed, "updateRevision": newest, "currentRevision": current}
        self.check_groups(newest)

    def make_leader(self, number: int, revision: str) -> None:
        self.made += 1
        homeless = number in self.cordoned
        taken = self.now if self.node_of(number).ready and not homeless else None
        self.pods[number] = Pod(f"u{self.made}", revision, self.now, self.now, taken, homeless=homeless)

    def replace_leader(self, spec: Mapping[str, Any], newest: str) -> None:
        """Delete the leader with the highest number that is not updated, once those with higher ones are ready."""
        for number in range(spec["replicas"] - 1, spec["partition"] - 1, -1):
            pod = self.pods.get(number)
            if pod is not None and pod.revision != newest and not pod.ends:
                self.check_replaced(number, pod)
                self.end(number)
                return
            if pod is None or not self.ready(number):
                return

    # What must hold.

    def check_replaced(self, number: int, pod: Pod) -> None:
        """The StatefulSet replaces nobody who serves, except one that came back as its eviction was to be the last."""
        holders = {uid for one in self.work() if one.live for uid in one.record.holders}
        evicted = {name for name, until in self.evictions if self.now < until}
        assert pod.uid not in holders, f"demo-{number} has a slot"
        assert not self.ready(number) or f"demo-{number}" in evicted, f"demo-{number} was not evicted"

    def check_groups(self, newest: str) -> None:
        """A template that has yet to pass is in one group."""
        good = self.status.get("update", {}).get("goodRevision", "")
        guarded = self.update["canary"] and self.update["strategy"] != "Never" and good not in ("", newest)
        if guarded and self.value_of(newest) in self.bad and not self.scaled:
            having = [number for number, pod in self.pods.items() if pod.revision == newest and not pod.ends]
            assert len(having) <= 1, f"{having} have a template that is bad"


def _own_partition(leaders: Any, revision: str, replicas: int) -> int:  # noqa: ANN401
    """Return the partition that LeaderWorkerSet would choose, with ``maxUnavailable`` 100%."""
    if leaders is None:
        return 0
    spec = leaders["spec"]
    if spec["revision"] != revision:
        return min(replicas, int(spec["replicas"]))
    return int(spec["partition"]) if spec["replicas"] < replicas else 0


def prepared(update: dict[str, Any], bad: dict[str, str], **how: Any) -> Groups:  # noqa: ANN401
    """A fleet all of whose groups are ready."""
    world = Groups({"paused": False, **update}, bad, **how)
    for _ in range(10):
        world.turn()
    assert world.status["update"]["goodRevision"] == "0"
    assert partition_in(world.objects[GROUPS]) == HELD
    return world


@pytest.mark.parametrize("how", ["crashes", "computes wrong vectors", "is refused"])
@pytest.mark.parametrize("replicas", [1, REPLICAS])
@pytest.mark.parametrize("eager", [True, False])
def test_a_bad_template_gets_one_group(how: str, replicas: int, eager: bool) -> None:
    world = prepared(update_of(2), {"v1": how}, replicas=replicas, eager=eager)
    world.value = "v1"
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0"}
    assert world.phases == {"Complete", "Waiting", "Canary", "Failed"}
    message = world.status["update"]["message"]
    assert message.endswith("; spec.containers[vllm].env[VALUE].value is v1 instead of v0")
    assert world.objects[SET]["spec"]["partition"] == HELD
    # It is not tried again, and another template is.
    world.value = "v2"
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2"}


@pytest.mark.parametrize("grace", [0, 2])
def test_a_bad_template_fails_where_all_groups_have_it_and_end_together(grace: int) -> None:
    """As after a fleet was scaled to nothing: there is no old group, and now and then none at all."""
    world = prepared(update_of(1), {"v1": "crashes"}, grace=grace)
    world.replicas = 0
    for _ in range(8):
        world.turn()
    world.value = "v1"
    for _ in range(4):
        world.turn()
    world.replicas, world.scaled = 2, True
    assert any(world.rests(world.turn()) for _ in range(CALM)), world.status["update"]
    assert world.status["update"]["phase"] == "Failed"
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0"}


ABSENCES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, REPLICAS - 1), st.integers(1, 30)), max_size=4)


@given(absences=ABSENCES, grace=st.integers(0, 1))
@settings(max_examples=HISTORIES // 10, deadline=None)
@example(absences=[(1, REPLICAS - 1, 30)], grace=0)
@example(absences=[(6, REPLICAS - 1, 2)], grace=0)
@example(absences=[(6, REPLICAS - 1, 28)], grace=1)
def test_a_good_template_is_not_blamed_for_nodes_of_leaders(absences: list[tuple[int, int, int]], grace: int) -> None:
    world = prepared(update_of(1), {}, grace=grace)
    world.value = "v1"
    for turn in range(CALM):
        world.turn_nodes(absences, turn)
        if world.rests(world.turn()) and turn > 60:
            break
    assert "Failed" not in world.phases
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v1"}
    assert world.status["update"]["phase"] == "Complete"


@pytest.mark.parametrize("lag", [0, 3, 5])
def test_a_third_template_replaces_nobody_before_the_stateful_set_knows_of_it(lag: int) -> None:
    """Until then its status is about the second one, which some leaders have."""
    world = prepared(update_of(1), {})
    world.value = "v1"
    while world.status["update"]["phase"] != "Rolling":
        world.turn()
    world.begin_round([pod.uid for number, pod in world.pods.items() if world.ready(number)])
    while len([number for number in world.pods if world.ready(number)]) < REPLICAS:
        world.turn()
    before = {number: pod.uid for number, pod in world.pods.items()}
    world.value, world.lag["StatefulSet"] = "v2", lag
    for _ in range(20):
        world.turn()
        assert {number: pod.uid for number, pod in world.pods.items()} == before
    world.end_rounds()
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v2"}


@pytest.mark.parametrize("turns", [3, 6])
def test_a_group_that_fails_beside_the_canary_keeps_its_template(turns: int) -> None:
    world = prepared(update_of(2), {"v1": "crashes"}, grace=2)
    world.value = "v1"
    for turn in range(40):
        if turn == turns:
            world.end(REPLICAS - 2)
        world.turn()
    assert world.status["update"]["phase"] == "Failed"


@pytest.mark.parametrize("turns", [30, 60])
@pytest.mark.parametrize("bad", [False, True])
def test_a_canary_that_waits_for_a_node_has_its_time_from_then_on(turns: int, bad: bool) -> None:
    world = prepared(update_of(1), {"v1": "crashes"} if bad else {})
    world.value = "v1"
    world.cordoned.add(REPLICAS - 1)
    for _ in range(turns):
        world.turn()
    assert "Failed" not in world.phases
    world.cordoned.clear()
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert ("Failed" in world.phases) is bad
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v0" if bad else "v1"}


def test_a_group_that_came_back_too_early_keeps_its_slot() -> None:
    """It has the former template, and the StatefulSet would replace it once those with higher numbers are ready."""
    world = prepared(update_of(2), {})
    world.value = "v1"
    while world.status["update"]["phase"] != "Rolling":
        world.turn()
    world.begin_round([])
    while not world.ready(1):
        world.turn()
    assert world.value_of(world.pods[1].revision) == "v0"
    world.begin_round([world.pods[1].uid])
    for _ in range(20):
        world.turn()
    assert world.value_of(world.pods[1].revision) == "v0"
    world.end_rounds()
    assert any(world.rests(world.turn()) for _ in range(CALM))
    assert {world.value_of(pod.revision) for pod in world.pods.values()} == {"v1"}


def update_of(limit: int) -> dict[str, Any]:
    return {"strategy": "BetweenRounds", "maxUnavailable": limit, "canary": True}


OF_GROUPS = ("node", "fail", "hang", "lag", "lost", "budget", "restart", "strategy", "grace")


def befall(world: Groups, action: str, data: st.DataObject) -> None:
    """Let something happen to groups, to controllers, or to the operator."""
    number = data.draw(st.integers(0, MOST - 1))
    if action == "node":
        world.turn_node(number + MOST * data.draw(st.booleans()))
    elif action in ("fail", "hang") and number in world.pods:
        break_group(world, action, number)
    elif action == "lag":
        world.lag[data.draw(st.sampled_from([GROUPS_KIND, "StatefulSet"]))] = 1 + number
    elif action == "strategy":
        world.update["strategy"] = data.draw(st.sampled_from(["BetweenRounds", "Immediate", "Never"]))
    else:
        befall_operator(world, action, number)


def break_group(world: Groups, action: str, number: int) -> None:
    """Let a pod of a group fail, or its leader hang while it loads."""
    world.broke = True
    if action == "fail":
        world.end(number)
    else:
        world.pods[number].hangs = not world.ready(number)


def befall_operator(world: Groups, action: str, number: int) -> None:
    """Let the operator begin anew, lose what it writes, or be refused evictions, or let these take their time."""
    if action == "lost":
        world.lost = 1 + number
    elif action == "budget":
        world.budget = not world.budget
    elif action == "restart":
        world.memory = Memory()
    elif action == "grace":
        world.grace = number // 2


@given(data=st.data(), update=UPDATES, bad=st.lists(BAD, min_size=3, max_size=3), eager=st.booleans())
@settings(max_examples=HISTORIES // 5, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_history_of_groups_takes_more_than_it_may(
    data: st.DataObject, update: dict[str, Any], bad: list[str], eager: bool
) -> None:
    faults = {f"v{n}": how for n, how in enumerate(bad, start=1) if how}
    world = prepared(update, faults, eager=eager, grace=data.draw(st.integers(0, 2)))
    for _ in range(data.draw(st.integers(1, TURNS))):
        action = data.draw(st.sampled_from([*ASKED, *OF_GROUPS, *["nothing"] * 4]))
        if action in ASKED:
            ask(world, action, data)
            world.scaled |= action == "scale"
        elif action in OF_GROUPS:
            befall(world, action, data)
        world.turn()
    settle(world)


def settle(world: Groups) -> None:
    """Let nothing else happen: all groups have what is wanted in the end, and all leaders are held."""
    world.lag, world.lost, world.budget, world.broke = {}, 0, True, True
    for pod in world.pods.values():
        pod.hangs = False
    finish(world)
    status = world.objects[SET]["status"]
    if status["currentRevision"] == status["updateRevision"]:
        for _ in range(3):
            world.turn()
        assert world.objects[SET]["spec"]["partition"] == partition_in(world.objects[GROUPS]) == HELD
