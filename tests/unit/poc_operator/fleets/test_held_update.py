# SPDX-License-Identifier: Apache-2.0
"""Updates while another model is downloaded: what the spec does not ask for any more reaches no further pod."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.plan import FleetStep
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.test_download import DONE, FAILED, RUNNING, World

SET = ("StatefulSet", "demo")
REVISIONS = {"org/v1": "r1", "org/v2": "r2", "org/v3": "r3"}


class Fleet(World):
    """Four pods, which all have v1, and a StatefulSet whose revisions follow its model."""

    def __init__(self, **spec: Any) -> None:  # noqa: ANN401
        super().__init__(replicas=4, selfCheck={"enabled": False}, model={"path": "org/v1"}, **spec)
        self.templates: dict[str, Any] = {}
        self.turn()
        self.job(DONE)
        self.turn()
        self.run(["r1"] * 4)
        self.turn()
        assert self.status["update"]["goodRevision"] == "r1"

    def turn(self, **seen: Any) -> FleetStep:  # noqa: ANN401
        good = ((self.status or {}).get("update") or {}).get("goodRevision", "")
        known = {"good_template": self.templates.get(good), "download": DownloadSeen(claim="pvc")}
        step = super().turn(**{**known, **seen})
        if SET in self.objects:
            revision = REVISIONS[str(self.served())]
            self.templates[revision] = self.objects[SET]["spec"]["template"]
            self.objects[SET]["status"] = {"updateRevision": revision, "observedGeneration": 1}
        return step

    def run(self, revisions: list[str], *, crashes: tuple[int, ...] = ()) -> None:
        self.pods = [
            PodView(
                name=f"demo-{number}",
                namespace="ns",
                uid=f"{number}-{revision}",
                labels={"poc.gonka.ai/fleet": "demo", "controller-revision-hash": revision},
                ready=number not in crashes,
                waiting_for="CrashLoopBackOff" if number in crashes else "",
                node="n",
                taken=NOW,
            )
            for number, revision in enumerate(revisions)
        ]

    def ask(self, model: str) -> None:
        self.spec["model"] = {"path": model}
        self.turn()

    def forget_jobs(self) -> None:
        """Let Kubernetes delete Jobs that have ended."""
        self.objects = {key: body for key, body in self.objects.items() if key[0] != "Job"}

    def roll(self) -> None:
        """Let v2 be on two pods, which work."""
        self.ask("org/v2")
        self.job(DONE)
        self.turn()
        self.run(["r1", "r1", "r1", "r2"])
        self.turn()
        self.run(["r1", "r1", "r2", "r2"])
        assert self.turn().status.update.phase == "Rolling"


def names(step: FleetStep) -> list[str]:
    return [one.pod.name for one in step.evict]


def test_who_goes_back_to_a_model_waits_for_no_download() -> None:
    fleet = Fleet()
    fleet.forget_jobs()
    fleet.roll()
    fleet.forget_jobs()
    fleet.ask("org/v1")
    assert (fleet.jobs(), fleet.served()) == ([], "org/v1")
    step = fleet.turn()
    assert names(step)[0] in ("demo-2", "demo-3"), "a pod with v2"
    # Both are there, whichever the spec asks for.
    fleet.ask("org/v2")
    assert (fleet.jobs(), fleet.served()) == ([], "org/v2")


def test_a_download_that_fails_keeps_nobody_from_going_back_and_growing() -> None:
    fleet = Fleet()
    fleet.forget_jobs()
    fleet.ask("org/v2")
    fleet.job(FAILED)
    assert fleet.turn().status.reason == "DownloadFailed"
    fleet.spec["replicas"] = 5
    fleet.ask("org/v1")
    assert fleet.status["download"]["state"] == "Downloaded"
    assert (fleet.served(), fleet.objects[SET]["spec"]["replicas"]) == ("org/v1", 5)


@pytest.mark.parametrize("claim", ["another", ""])
def test_an_earlier_model_whose_pvc_is_gone_is_downloaded_again(claim: str) -> None:
    fleet = Fleet()
    fleet.forget_jobs()
    fleet.roll()
    fleet.forget_jobs()
    fleet.spec["model"] = {"path": "org/v1"}
    fleet.turn(download=DownloadSeen(claim=claim))
    assert (len(fleet.jobs()), fleet.served()) == (1, "org/v2")


@pytest.mark.parametrize("at_once", [False, True], ids=["before", "at once"])
@pytest.mark.parametrize("gone", [["another"], ["", "another"], [""]], ids=["another", "anew", "gone"])
def test_an_earlier_model_of_which_no_pvc_is_known_went_with_the_one_that_is_gone(
    gone: list[str], at_once: bool
) -> None:
    """The operator may not have been allowed to read the PVC when the model was downloaded."""
    fleet = Fleet()
    fleet.forget_jobs()
    fleet.roll()
    fleet.forget_jobs()
    fleet.status["download"]["earlier"][0]["claim"] = ""
    if at_once:
        fleet.spec["model"] = {"path": "org/v1"}
    for claim in gone:
        fleet.turn(download=DownloadSeen(claim=claim))
    fleet.forget_jobs()
    fleet.spec["model"] = {"path": "org/v1"}
    for claim in gone[-1:] * 2:
        step = fleet.turn(download=DownloadSeen(claim=claim))
        assert (len(fleet.jobs()), fleet.served(), step.status.reason) == (1, "org/v2", "Downloading")
    fleet.job(DONE)
    fleet.turn(download=DownloadSeen(claim="another"))
    assert (fleet.served(), fleet.status["download"]["claim"]) == ("org/v1", "another")


def test_an_earlier_model_of_which_no_pvc_is_known_is_believed_while_none_is_gone() -> None:
    fleet = Fleet()
    fleet.forget_jobs()
    fleet.roll()
    fleet.forget_jobs()
    fleet.status["download"]["earlier"][0]["claim"] = ""
    for claim in (None, "pvc"):
        fleet.turn(download=DownloadSeen(claim=claim))
    fleet.ask("org/v1")
    assert (fleet.jobs(), fleet.served()) == ([], "org/v1")


def test_no_more_models_are_remembered_than_may_be() -> None:
    fleet = Fleet()
    for number in range(9):
        fleet.spec["engineArgs"] = [f"--revision={number}"]
        fleet.turn()
        fleet.job(DONE)
        fleet.turn()
        fleet.forget_jobs()
    assert len(fleet.status["download"]["earlier"]) == 4


DOWNLOADING = (RUNNING, "downloading org/v3: 43 %")
FAILING = (FAILED, "the download of org/v3 has failed: Job has reached the limit")
SAID = [pytest.param(*DOWNLOADING, id="running"), pytest.param(*FAILING, id="failed")]


@pytest.mark.parametrize(("state", "says"), SAID)
def test_nobody_is_evicted_for_a_template_that_the_spec_does_not_ask_for_any_more(
    state: dict[str, Any], says: str
) -> None:
    fleet = Fleet()
    fleet.roll()
    fleet.ask("org/v3")
    fleet.job(state)
    for _ in range(3):
        step = fleet.turn(download=DownloadSeen(claim="pvc", percent=43))
        assert (names(step), fleet.served()) == ([], "org/v2")
        assert step.status.update.message == says
    fleet.job(DONE)
    fleet.turn()
    assert fleet.served() == "org/v3"
    assert len(names(fleet.turn())) == 1


@pytest.mark.parametrize(("state", "says"), SAID)
@pytest.mark.parametrize("begun", ["not", "canary", "rolling"])
def test_an_update_says_what_download_it_waits_for(begun: str, state: dict[str, Any], says: str) -> None:
    """Also while pods of the template before load, for which it waits no more."""
    fleet = Fleet()
    if begun != "not":
        fleet.roll()
        fleet.run(["r1", "r1", "r1", "r2"] if begun == "canary" else ["r1", "r1", "r2", "r2"])
        fleet.pods[3] = replace(fleet.pods[3], ready=False, waiting_for="ContainersNotReady")
        fleet.status["update"]["phase"] = begun.title()
    fleet.ask("org/v3")
    assert fleet.status["update"]["message"] == "downloading org/v3"
    fleet.job(state)
    step = fleet.turn(download=DownloadSeen(claim="pvc", percent=43))
    assert (step.status.update.message, names(step)) == (says, [])
    assert step.status.update.phase == ("Waiting" if begun == "not" else begun.title())


@pytest.mark.parametrize("state", [RUNNING, FAILED], ids=["running", "failed"])
def test_a_canary_that_fails_while_a_model_is_downloaded_goes_back(state: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.ask("org/v2")
    fleet.job(DONE)
    fleet.turn()
    assert names(fleet.turn()) == ["demo-3"]
    fleet.run(["r1", "r1", "r1", "r2"], crashes=(3,))
    fleet.ask("org/v3")
    fleet.job(state)
    assert fleet.status["update"]["phase"] == "Failed"
    fleet.turn()
    assert fleet.served() == "org/v1"
    step = fleet.turn()
    assert (names(step), step.status.update.phase) == (["demo-3"], "Failed")
    fleet.run(["r1"] * 4)
    step = fleet.turn()
    assert (names(step), fleet.served(), step.apply) == ([], "org/v1", [])
    assert "back at revision r1" in step.status.update.message
    # The next template has its turn, and its canary, all the same.
    fleet.job(DONE)
    fleet.turn()
    assert fleet.served() == "org/v3"
    step = fleet.turn()
    assert (names(step), step.status.update.phase) == (["demo-3"], "Canary")


def test_a_good_template_that_is_gone_leaves_the_workload_as_it_is_during_a_download() -> None:
    fleet = Fleet()
    fleet.ask("org/v2")
    fleet.job(DONE)
    fleet.turn()
    fleet.run(["r1", "r1", "r1", "r2"], crashes=(3,))
    fleet.ask("org/v3")
    assert fleet.status["update"]["phase"] == "Failed"
    for _ in range(2):
        step = fleet.turn(good_template=None)
        assert (names(step), fleet.served()) == ([], "org/v2")


def test_a_canary_keeps_its_kubernetes_node_while_another_model_is_downloaded() -> None:
    """And takes none of a pod that would be another canary: nobody leaves meanwhile."""
    fleet = Fleet(update={"maxUnavailable": 2})
    fleet.ask("org/v2")
    fleet.job(DONE)
    fleet.turn()
    fleet.turn()
    assert fleet.status["update"]["canaryNode"] == "n"
    fleet.run(["r1", "r1", "r1", "r2"])
    waits: dict[str, Any] = {"ready": False, "node": "", "taken": None, "waiting_for": "Unschedulable"}
    fleet.pods[3] = replace(fleet.pods[3], **waits, created=NOW - timedelta(hours=9))
    fleet.status["update"]["canaryNode"] = ""
    fleet.ask("org/v3")
    fleet.job(RUNNING)
    step = fleet.turn()
    assert (names(step), step.status.update.canary, step.status.update.canary_node) == ([], "demo-3", "")
