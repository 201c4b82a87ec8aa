# SPDX-License-Identifier: Apache-2.0
"""Random histories of fleets whose models are downloaded: Jobs that fail or are deleted, and PVCs that are lost.

Meanwhile the spec asks for other models, and for earlier ones, and all else happens that keeps an update. Whatever
happens, no template reaches the StatefulSet before its model is there, and once nothing is wrong any more, all pods
serve what the spec asks for.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.plan import FleetStep, key_of
from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.fleets.test_download import DONE, FAILED, RUNNING
from tests.unit.poc_operator.fleets.world import (
    ASKED,
    BAD,
    BROKEN,
    MOST,
    SET,
    TURN,
    TURNS,
    UPDATES,
    World,
    ask,
    finish,
    harm,
)

#: Seconds for which Kubernetes keeps a Job that has ended.
KEPT = 60
IMAGES = ("registry/worker:1", "registry/worker:2")


@dataclass
class Job:
    """A Job in the cluster: the PVC that its pod has, and for how many more turns it downloads."""

    model: str
    left: int
    claim: str = ""
    ends: bool = False
    ended: int = 0  # turns since


@dataclass
class Downloads(World):
    """A fleet with `cache.download`, the PVC that the user has made, and what is in it."""

    claim: str = "pvc-0"  # empty if there is none
    claims: int = 0
    readable: bool = True
    always_readable: bool = True
    hub: bool = True  # whether it answers
    steps: int = 2  # turns of the next download
    image: str = IMAGES[0]
    weights: set[tuple[str, str]] = field(default_factory=set)  # of PVCs, with models
    jobs: dict[str, Job] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        cache = {"existingClaim": "weights", "download": True}
        return {**super().spec, "model": {"path": self.model}, "cache": cache, "image": self.image}

    @property
    def model(self) -> str:
        return f"org/{self.value}"

    @property
    def download(self) -> DownloadSeen:
        return DownloadSeen(claim=self.claim if self.readable else None)

    @property
    def is_there(self) -> bool:
        """Whether the model that the spec asks for is in the PVC, as far as the operator can know."""
        return self.has(self.model)

    def has(self, model: str) -> bool:
        if self.always_readable:
            return (self.claim, model) in self.weights
        return any(one == model for _, one in self.weights)

    def turn(self) -> FleetStep:
        self.run_jobs()
        step = super().turn()
        for body in step.delete:
            self.jobs[key_of(body)[1]].ends = True
            self.objects[key_of(body)]["metadata"]["deletionTimestamp"] = "now"
        return step

    def apply(self, body: Any) -> None:  # noqa: ANN401
        super().apply(body)
        kind, name = key_of(body)
        if kind == "Job":
            self.objects[kind, name]["status"] = {}
            self.jobs[name] = Job(model=served(body), left=self.steps)

    def run_jobs(self) -> None:
        """Let Jobs go on, which need a PVC to begin, and those end that were deleted or have ended long ago."""
        for name, job in list(self.jobs.items()):
            if job.ends or job.ended * TURN > KEPT:
                self.lose_job(name)
            elif job.left > 0:
                job.claim = job.claim or self.claim
                job.left -= bool(job.claim)
                self.objects["Job", name] |= copy.deepcopy(RUNNING if job.left else self.end_job(job))
            else:
                job.ended += 1

    def end_job(self, job: Job) -> dict[str, Any]:
        if self.hub:
            self.weights.add((job.claim, job.model))
        return DONE if self.hub else FAILED

    def lose_job(self, name: str) -> None:
        del self.jobs[name], self.objects["Job", name]

    def make_claim(self) -> None:
        self.claims += 1
        self.claim = f"pvc-{self.claims}"

    def check(self, step: FleetStep) -> None:
        super().check(step)
        body = next((one for one in step.apply if key_of(one) == SET), None)
        if body is None:
            return
        before, told = self.objects.get(SET), step.status.update
        good = f"org/{self.value_of(told.good_revision)}" if told.good_revision else ""
        if served(body) == good and told.phase is UpdatePhase.FAILED:
            return  # on the way back: pods that have failed come anew, and load it by themselves
        if served(body) != self.model:
            assert served(body) == good
        elif before is None or served(before) != self.model or body["spec"]["replicas"] > before["spec"]["replicas"]:
            assert self.is_there, (self.model, self.claim, self.weights)

    def rests(self, step: FleetStep) -> bool:
        told = step.status.download
        return told is not None and told.state == "Downloaded" and super().rests(step)


def served(body: Any) -> str:  # noqa: ANN401
    """Return the model of a StatefulSet or a Job."""
    return str(body["spec"]["template"]["spec"]["containers"][0]["args"][0])


def prepared(update: dict[str, Any], bad: dict[str, str]) -> Downloads:
    """A fleet all of whose pods are ready."""
    world = Downloads({"paused": False, **update}, bad)
    for _ in range(12):
        world.turn()
    assert world.status["update"]["goodRevision"] == "0"
    assert world.is_there
    return world


OF_DOWNLOADS = ("hub", "claim", "another claim", "lose job", "slow", "image", "readable")


def befall(world: Downloads, action: str, number: int) -> None:
    """Let something happen to downloads."""
    if action == "hub":
        world.hub = not world.hub
    elif action in ("claim", "another claim"):
        lose_claim(world, anew=action == "another claim")
    elif action == "lose job" and world.jobs:
        world.lose_job(sorted(world.jobs)[number % len(world.jobs)])
    elif action == "slow":
        world.steps = 1 + 2 * number
    elif action == "image":
        world.image = IMAGES[number % 2]
    elif action == "readable":
        world.readable, world.always_readable = not world.readable, False


def lose_claim(world: Downloads, *, anew: bool) -> None:
    """Let somebody delete the PVC, or make one if there is none, or both."""
    if anew or not world.claim:
        world.make_claim()
    else:
        world.claim = ""


def live(world: Downloads, data: st.DataObject, actions: Sequence[str]) -> None:
    """Let a random history happen."""
    for _ in range(data.draw(st.integers(1, TURNS))):
        action = data.draw(st.sampled_from([*actions, *["change"] * 2, *["nothing"] * 4]))
        if action in ASKED:
            ask(world, action, data)
        elif action in BROKEN:
            harm(world, action, data.draw(st.integers(0, MOST - 1)))
        elif action in OF_DOWNLOADS:
            befall(world, action, data.draw(st.integers(0, MOST - 1)))
        world.turn()


@given(data=st.data(), update=UPDATES, bad=st.lists(BAD, min_size=3, max_size=3), readable=st.booleans())
@settings(max_examples=HISTORIES // 8, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_history_lets_pods_come_before_their_model_or_wait_for_ever(
    data: st.DataObject, update: dict[str, Any], bad: list[str], readable: bool
) -> None:
    world = prepared(update, {f"v{n}": how for n, how in enumerate(bad, start=1) if how})
    told = [one for one in OF_DOWNLOADS if one != "readable" or not readable]
    live(world, data, [*ASKED, *BROKEN, *told * 2])
    world.hub, world.steps = True, 2
    if not world.claim:
        world.make_claim()
    finish(world)
    assert world.status["download"]["state"] == "Downloaded"
    assert world.is_there


@given(data=st.data(), update=UPDATES, image=st.booleans())
@settings(max_examples=HISTORIES // 8, deadline=None, suppress_health_check=list(HealthCheck))
def test_who_goes_back_waits_for_no_download(data: st.DataObject, update: dict[str, Any], image: bool) -> None:
    """Even if the hub never answers again, and whatever the fleet has waited for."""
    world = prepared(update, {})
    live(world, data, [*ASKED, "node", "lose", "hub", "lose job", "slow", *["image"] * image])
    world.hub = False
    world.value = data.draw(st.sampled_from(sorted(model.removeprefix("org/") for _, model in world.weights)))
    jobs = set(world.jobs)
    finish(world)
    assert set(world.jobs) <= jobs
    if update["strategy"] != "Never":
        assert world.status["update"]["phase"] == UpdatePhase.COMPLETE
