# SPDX-License-Identifier: Apache-2.0
"""When a model is downloaded, what waits for it, and what is said meanwhile."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.download import DownloadSeen, revision_of
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, Key, key_of, plan
from poc_operator.fleets.stages import PATIENCE_SECONDS
from poc_operator.observed import Container, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

CACHE = {"existingClaim": "weights", "download": True}
RUNNING: dict[str, Any] = {"status": {"active": 1}}
DONE: dict[str, Any] = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
FAILED: dict[str, Any] = {
    "status": {"conditions": [{"type": "Failed", "status": "True", "message": "Job has reached the limit"}]}
}


class World:
    """A fleet over several turns: what is applied is there, what is deleted is gone, the status is the last turn's."""

    def __init__(self, **spec: Any) -> None:  # noqa: ANN401
        self.spec: dict[str, Any] = {"cache": CACHE, **spec}
        self.status: Any = None
        self.objects: dict[Key, Any] = {}
        self.pods: list[PodView] = []

    @property
    def fleet(self) -> PoCFleet:
        return a_fleet(status=self.status, **self.spec)

    def turn(self, **seen: Any) -> FleetStep:  # noqa: ANN401
        step = plan(
            FleetSnapshot(fleet=self.fleet, around=AROUND, now=NOW, objects=self.objects, pods=self.pods, **seen)
        )
        for body in step.delete:
            del self.objects[key_of(body)]
        for body in step.apply:
            old = self.objects.get(key_of(body), {})
            told = {"updateRevision": "r1", "observedGeneration": 1} if body["kind"] == "StatefulSet" else {}
            metadata = {**body["metadata"], "resourceVersion": "1", "generation": 1}
            self.objects[key_of(body)] = {"status": old.get("status", told), **body, "metadata": metadata}
        self.status = json.loads(json.dumps(step.status.stored()))
        return step

    def jobs(self) -> list[str]:
        return [name for kind, name in self.objects if kind == "Job"]

    def job(self, state: Mapping[str, Any]) -> None:
        """Let the newest Job be in this state."""
        self.objects["Job", self.jobs()[-1]].update(state)

    def served(self) -> str | None:
        found = self.objects.get(("StatefulSet", "demo"))
        return found["spec"]["template"]["spec"]["containers"][0]["args"][0] if found else None


def status_of(step: FleetStep) -> tuple[str, dict[str, str]]:
    return step.status.reason, {kind: one.status for kind, one in step.status.own_conditions.items()}


def test_pods_come_when_the_model_is_there() -> None:
    world = World()
    step = world.turn()
    assert (len(world.jobs()), world.served()) == (1, None)
    assert status_of(step) == (
        Reason.DOWNLOADING,
        {"Ready": "False", "Progressing": "True", "Degraded": "False", "Stalled": "False"},
    )
    world.job(RUNNING)
    assert world.turn(download=DownloadSeen(percent=43)).status.message == "org/model is downloaded: 43 %"
    begins = PodView(name="d", namespace="ns", uid="d", waiting_for="ContainerCreating", node="node-1")
    told = world.turn(download=DownloadSeen(pods=[begins])).status
    assert (told.reason, told.message) == (Reason.DOWNLOADING, "org/model is downloaded (ContainerCreating)")
    world.job(DONE)
    world.turn()
    assert world.served() == "org/model"
    # The Job is gone after a while, and is not made again.
    del world.objects["Job", world.jobs()[0]]
    assert not world.turn().apply
    assert world.status["download"]["state"] == "Downloaded"


@pytest.mark.parametrize(
    ("pod", "reason", "why"),
    [
        (
            {"waiting_for": 'persistentvolumeclaim "weights" not found'},
            Reason.PODS_UNSCHEDULABLE,
            'no Kubernetes node can take d (persistentvolumeclaim "weights" not found)',
        ),
        ({"waiting_for": "ErrImagePull", "node": "node-1"}, Reason.PODS_FAILING, "d (ErrImagePull) cannot run"),
    ],
)
def test_a_download_whose_pod_does_not_come_up_needs_somebody(pod: dict[str, Any], reason: Reason, why: str) -> None:
    world = World()
    world.turn()
    world.job(RUNNING)
    stuck = PodView(name="d", namespace="ns", uid="d", **pod)
    step = world.turn(download=DownloadSeen(pods=[stuck]))
    assert status_of(step) == (
        reason,
        {"Ready": "False", "Progressing": "True", "Degraded": "True", "Stalled": "False"},
    )
    assert step.status.message == f"org/model is not downloaded: {why}"
    # One that gets no image waits for a person.
    old = replace(stuck, created=NOW - timedelta(seconds=PATIENCE_SECONDS), taken=NOW if stuck.node else None)
    assert status_of(world.turn(download=DownloadSeen(pods=[old])))[1]["Stalled"] == "False"
    old = replace(old, taken=old.created if stuck.node else None)
    found = status_of(world.turn(download=DownloadSeen(pods=[old])))[1]
    assert (found["Stalled"], found["Progressing"]) == (("True", "False") if stuck.node else ("False", "True"))
    # An earlier pod of the Job, which has ended, keeps nobody.
    ended = PodView(name="d", namespace="ns", uid="d", gone=True, **pod)
    assert status_of(world.turn(download=DownloadSeen(pods=[ended])))[0] == Reason.DOWNLOADING


def test_another_model_is_downloaded_while_pods_serve_the_old_one() -> None:
    world = World(replicas=1)
    world.turn()
    world.job(DONE)
    world.turn()
    labels = {"poc.gonka.ai/fleet": "demo", "controller-revision-hash": "r1"}
    world.pods = [PodView(name="demo-0", namespace="ns", uid="u", labels=labels, ready=True)]
    assert status_of(world.turn())[0] == Reason.ALL_REPLICAS_READY
    world.spec["model"] = {"path": "org/next"}
    step = world.turn()
    assert (len(world.jobs()), world.served()) == (2, "org/model")
    assert status_of(step) == (
        Reason.DOWNLOADING,
        {"Ready": "True", "Progressing": "True", "Degraded": "False", "Stalled": "False"},
    )
    world.job(DONE)
    world.turn()
    assert world.served() == "org/next"


def test_what_never_has_left_begins_with_a_canary_also_while_a_model_is_downloaded() -> None:
    world = World(replicas=4, update={"strategy": "Never"}, selfCheck={"enabled": False})
    world.turn()
    world.job(DONE)
    world.turn()
    labels = {"poc.gonka.ai/fleet": "demo", "controller-revision-hash": "r0"}
    world.pods = [
        PodView(name=f"demo-{n}", namespace="ns", uid=f"u{n}", labels=labels, ready=True, node="n") for n in range(4)
    ]
    assert not world.turn().evict
    world.spec |= {"update": {"maxUnavailable": 3}, "model": {"path": "org/next"}}
    for _ in range(2):
        step = world.turn()
        assert step.status.update.phase == "Canary"
    assert len(step.evict) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": "org/next"}},
        {"engineArgs": ["--revision=v2"]},
        {"cache": {"existingClaim": "another", "download": True}},
    ],
)
def test_a_job_is_for_one_model_revision_and_pvc(change: dict[str, Any]) -> None:
    world = World()
    world.turn()
    (before,) = world.jobs()
    world.spec |= change
    step = world.turn()
    (after,) = world.jobs()
    assert after != before
    assert [key_of(body) for body in step.delete] == [("Job", before)], "it would fill the PVC with what nobody wants"


def downloaded(claim: str | None = "pvc-1") -> World:
    """A fleet whose model is in a PVC, and whose Job is gone."""
    world = World()
    world.turn(download=DownloadSeen(claim=claim))
    world.job(DONE)
    world.turn(download=DownloadSeen(claim=claim))
    del world.objects["Job", world.jobs()[0]]
    assert not world.turn(download=DownloadSeen(claim=claim)).apply
    assert world.status["download"]["state"] == "Downloaded"
    return world


@pytest.mark.parametrize("now", ["pvc-2", ""], ids=["another", "gone"])
def test_another_pvc_of_the_name_has_no_weights(now: str) -> None:
    world = downloaded()
    template = world.objects["StatefulSet", "demo"]["spec"]
    step = world.turn(download=DownloadSeen(claim=now))
    assert (len(world.jobs()), step.status.reason) == (1, Reason.DOWNLOADING)
    world.job(RUNNING)
    assert world.turn(download=DownloadSeen(claim="pvc-2")).status.reason == Reason.DOWNLOADING
    assert world.objects["StatefulSet", "demo"]["spec"] == template
    world.job(DONE)
    world.turn(download=DownloadSeen(claim="pvc-2"))
    assert (world.status["download"]["state"], world.status["download"]["claim"]) == ("Downloaded", "pvc-2")


def test_a_job_that_has_filled_another_pvc_is_made_anew() -> None:
    world = World()
    world.turn(download=DownloadSeen(claim="pvc-1"))
    (name,) = world.jobs()
    world.job(DONE)
    for _ in range(2):  # until it is gone, nothing is downloaded
        going = world.objects["Job", name]
        step = world.turn(download=DownloadSeen(claim="pvc-2"))
        assert (step.status.reason, world.served()) == (Reason.DOWNLOADING, None)
        world.objects["Job", name] = {**going, "metadata": {**going["metadata"], "deletionTimestamp": "now"}}
    del world.objects["Job", name]
    world.turn(download=DownloadSeen(claim="pvc-2"))
    world.job(DONE)
    world.turn(download=DownloadSeen(claim="pvc-2"))
    assert (world.served(), world.status["download"]["claim"]) == ("org/model", "pvc-2")


@pytest.mark.parametrize("claim", ["pvc-1", "pvc-2", "", None])
def test_nobody_knows_which_pvc_a_job_has_filled_that_ended_while_another_model_was_asked_for(
    claim: str | None,
) -> None:
    world = World()
    world.turn(download=DownloadSeen(claim="pvc-1"))
    (name,) = world.jobs()
    world.job(RUNNING)
    world.spec["model"] = {"path": "org/next"}
    going = {**world.objects["Job", name], **DONE}
    world.turn(download=DownloadSeen(claim="pvc-1"))
    world.objects["Job", name] = going
    world.spec["model"] = {"path": "org/model"}
    step = world.turn(download=DownloadSeen(claim=claim))
    assert ("Job", name) in [key_of(body) for body in step.delete]
    assert (step.status.reason, world.served()) == (Reason.DOWNLOADING, None)
    world.turn(download=DownloadSeen(claim=claim))
    world.job(DONE)
    world.turn(download=DownloadSeen(claim=claim or "pvc-2"))
    assert (world.served(), world.status["download"]["claim"]) == ("org/model", claim or "pvc-2")


@pytest.mark.parametrize("claim", ["pvc-1", "pvc-2"])
def test_a_job_that_ends_while_another_model_is_asked_for_has_downloaded_its_own(claim: str) -> None:
    world = World()
    world.turn(download=DownloadSeen(claim="pvc-1"))
    world.job(DONE)
    world.spec["model"] = {"path": "org/next"}
    world.turn(download=DownloadSeen(claim=claim))
    world.spec["model"] = {"path": "org/model"}
    world.turn(download=DownloadSeen(claim="pvc-1"))
    assert (world.served(), world.status["download"]["claim"]) == {
        "pvc-1": ("org/model", "pvc-1"),
        "pvc-2": (None, "pvc-1"),
    }[claim]


def test_no_job_has_filled_a_pvc_that_is_not_there() -> None:
    world = World()
    for _ in range(2):
        world.turn(download=DownloadSeen(claim=""))
    world.job(DONE)
    for _ in range(2):
        step = world.turn(download=DownloadSeen(claim=""))
        assert (step.status.reason, world.served()) == (Reason.DOWNLOADING, None)
    world.job(DONE)
    world.turn(download=DownloadSeen(claim="pvc-1"))
    assert (world.served(), world.status["download"]["claim"]) == ("org/model", "pvc-1")


def test_what_an_earlier_operator_downloaded_is_believed() -> None:
    """Its status does not say into which PVC; neither is a PVC known that the operator may not read."""
    world = downloaded(None)
    del world.status["download"]["claim"]
    for claim in (None, "pvc-1", None, "pvc-1"):
        assert not world.turn(download=DownloadSeen(claim=claim)).apply
        assert world.status["download"]["state"] == "Downloaded"
    assert world.turn(download=DownloadSeen(claim="pvc-2")).apply


def a_patch(**spec: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"podTemplate": {"spec": spec}}


@pytest.mark.parametrize(
    "change",
    [
        {"image": "registry/worker:2"},
        {"huggingFace": {"tokenSecret": "another"}},
        {"env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}]},
        {"imagePullSecrets": [{"name": "registry"}]},
        {"gpu": {"product": "NVIDIA-H200", "count": 1}},
        a_patch(tolerations=[{"key": "gpu"}]),
    ],
)
@pytest.mark.parametrize("state", [RUNNING, FAILED], ids=["running", "failed"])
def test_a_job_with_another_template_is_made_anew(state: dict[str, Any], change: dict[str, Any]) -> None:
    world = World()
    world.turn()
    (name,) = world.jobs()
    world.job(state)
    world.turn()
    before = world.objects["Job", name]["spec"]
    world.spec |= change
    step = world.turn(download=DownloadSeen(percent=None))
    assert [key_of(body) for body in step.delete] == [("Job", name)]
    assert (world.jobs(), step.status.reason) == ([], Reason.DOWNLOADING), "nor is what it said told any more"
    world.turn()
    assert world.jobs() == [name]
    assert world.objects["Job", name]["spec"] != before
    world.job(RUNNING)
    assert not world.turn().delete
    # What leaves the template changes it too.
    for field in change:
        del world.spec[field]
    assert world.turn().delete
    world.turn()
    assert world.objects["Job", name]["spec"] == before


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3, "startupSeconds": 99, "selfCheck": {}, "port": 9000},
        {"engineArgs": ["--max-model-len=8"], "servedName": "chat"},
        {"huggingFace": {"offline": True}, "callbackAllow": ["*"], "resources": {"requests": {"cpu": "2"}}},
        a_patch(topologySpreadConstraints=[], containers=[{"name": "vllm", "readinessProbe": {"periodSeconds": 9}}]),
    ],
)
def test_what_does_not_concern_a_download_leaves_it_alone(change: dict[str, Any]) -> None:
    world = World()
    world.turn()
    world.job(RUNNING)
    world.spec |= change
    step = world.turn(download=DownloadSeen(percent=43))
    assert (list(step.delete), step.status.message) == ([], "org/model is downloaded: 43 %")


def test_another_operator_that_wants_the_same_leaves_a_job_alone() -> None:
    world = World()
    world.turn()
    world.job(RUNNING)
    job = world.objects["Job", world.jobs()[0]]
    job["spec"] |= {"backoffLimit": 1, "ttlSecondsAfterFinished": 5}
    job["spec"]["template"]["spec"] |= {"schedulerName": "default-scheduler"}
    assert not world.turn().delete
    # An operator of before left no digest, and the API server stores some fields otherwise.
    del job["metadata"]["annotations"]
    job["spec"]["template"]["spec"]["containers"][0].pop("env", None)
    assert not world.turn().delete


def test_a_job_that_is_on_its_way_out_is_waited_for() -> None:
    world = World()
    world.turn()
    world.job(RUNNING)
    world.objects["Job", world.jobs()[0]]["metadata"]["deletionTimestamp"] = "now"
    world.spec["image"] = "registry/worker:2"
    step = world.turn()
    assert ([body for body in step.apply if body["kind"] == "Job"], list(step.delete)) == ([], [])
    assert step.status.reason == Reason.DOWNLOADING


def test_what_is_downloaded_is_not_downloaded_again_with_another_image() -> None:
    world = World()
    world.turn()
    world.job(DONE)
    world.spec["image"] = "registry/worker:2"
    for _ in range(2):
        assert not world.turn().delete
    assert (len(world.jobs()), world.served()) == (1, "org/model")


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({}, True),
        ({"status": DONE["status"]}, False),
        ({"status": FAILED["status"]}, False),
        ({"spec": {"template": {"metadata": {"labels": {"own": "yes"}}}}}, False),
        ({"metadata": {"deletionTimestamp": "now"}}, False),
        ({"metadata": {"ownerReferences": [{"kind": "CronJob", "name": "c", "uid": "c", "controller": True}]}}, False),
    ],
    ids=["it runs", "it is done", "it has failed", "one of the user's", "on its way out", "of somebody else"],
)
@pytest.mark.parametrize("spec", [{"model": {"path": "org/next"}}, {"cache": {"existingClaim": "weights"}}])
def test_a_download_that_nothing_asks_for_is_ended(spec: dict[str, Any], change: dict[str, Any], gone: bool) -> None:
    world = World()
    world.turn()
    (name,) = world.jobs()
    world.job(RUNNING)
    body = world.objects["Job", name]
    for field, value in change.items():
        body[field] = {**body[field], **value}
    world.spec |= spec
    assert [key_of(one) for one in world.turn().delete] == ([("Job", name)] if gone else [])


def test_a_job_of_somebody_else_is_left_alone_and_told_of() -> None:
    world = World()
    world.turn()
    (name,) = world.jobs()
    owner = {"kind": "PoCFleet", "name": "demo", "uid": "earlier", "controller": True}
    world.objects["Job", name]["metadata"]["ownerReferences"] = [owner]
    world.spec["image"] = "registry/worker:2"
    step = world.turn()
    assert (step.status.reason, list(step.delete)) == (Reason.OBJECT_CONFLICT, [])
    assert f'Job "{name}" belongs to PoCFleet demo' in step.status.message


def test_a_failure_is_told_in_the_containers_words_and_tried_again() -> None:
    world = World()
    world.turn()
    ended = PodView(
        name="d", namespace="ns", uid="d", gone=True, containers=[Container(id="c", last_end="Error, exit code 1: 401")]
    )
    world.job(FAILED)
    assert world.turn().status.message.endswith("has failed: Job has reached the limit")
    step = world.turn(download=DownloadSeen(pods=[ended]))
    assert step.status.message == "the download of org/model has failed: Error, exit code 1: 401"
    assert status_of(step) == (
        Reason.DOWNLOAD_FAILED,
        {"Ready": "False", "Progressing": "True", "Degraded": "True", "Stalled": "False"},
    )
    assert world.served() is None
    del world.objects["Job", world.jobs()[0]]
    again = world.turn()
    assert (len(world.jobs()), status_of(again)[0]) == (1, Reason.DOWNLOAD_FAILED)
    world.job(RUNNING)
    assert status_of(world.turn())[0] == Reason.DOWNLOADING


def test_the_job_runs_where_pods_run_with_their_image_and_asks_the_hub() -> None:
    source = [{"secretRef": {"name": "hub"}}]
    patch = {
        "tolerations": [{"key": "gpu"}],
        "containers": [{"name": "vllm", "env": [{"name": "OWN", "value": "1"}], "envFrom": source}],
    }
    world = World(
        gpu={"product": "NVIDIA-H200", "count": 2},
        image="registry/own:1",
        engineArgs=["--revision=v1", "--revision=v2"],
        huggingFace={"tokenSecret": "hf", "offline": True},
        podTemplate={"spec": patch},
    )
    world.turn()
    body = world.objects["Job", world.jobs()[0]]
    assert body["metadata"]["labels"]["poc.gonka.ai/fleet"] == "demo"
    template = body["spec"]["template"]
    # It is none of the fleet's pods, which Services and rounds select.
    assert template["metadata"]["labels"] == {"poc.gonka.ai/download": body["metadata"]["name"]}
    pod, container = template["spec"], template["spec"]["containers"][0]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"nvidia.com/gpu.product": "NVIDIA-H200"}, [{"key": "gpu"}])
    assert pod["automountServiceAccountToken"] is False
    assert container["image"] == "registry/own:1"
    assert container["args"] == ["org/model", "--revision=v2", "--port=8000"]
    names = {one["name"] for one in container["env"]}
    assert {"HF_HOME", "HF_TOKEN", "OWN"} <= names
    assert container["envFrom"] == source, "which may have the hub's token"
    assert not names & {"HF_HUB_OFFLINE", "VLLM_POC_TOKEN", "VLLM_POC_TOKEN_FILE"}
    assert [one["name"] for one in pod["volumes"]] == ["shm", "cache"]
    assert [one["name"] for one in container["volumeMounts"]] == ["shm", "cache"]
    assert "resources" not in container
    world.job(DONE)
    world.turn()
    served = world.objects["StatefulSet", "demo"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in served["env"]


def test_a_template_without_vllm_is_refused() -> None:
    world = World(podTemplate={"spec": {"containers": [{"name": "vllm", "$patch": "delete"}]}})
    step = world.turn()
    assert step.status.reason == Reason.POD_TEMPLATE_INVALID
    assert "must keep vllm" in step.status.message


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"containers": None}, "spec.podTemplate.spec.containers must be a list: it cannot be removed"),
        (
            {"containers": [{"name": "vllm", "$patch": "replace", "env": "x"}]},
            "spec.podTemplate.spec.containers[0].env must be a list of objects with names",
        ),
    ],
)
def test_a_template_that_cannot_be_imitated_names_its_field(patch: dict[str, Any], says: str) -> None:
    step = World(podTemplate={"spec": patch}).turn()
    assert (step.status.reason, step.status.message) == (Reason.POD_TEMPLATE_INVALID, says)


def test_without_download_there_is_no_job() -> None:
    world = World(cache={"existingClaim": "weights"})
    world.turn()
    assert (world.jobs(), world.served(), world.status.get("download")) == ([], "org/model", None)


def test_the_last_revision_wins() -> None:
    assert revision_of(["--revision=a", "--max-model-len=8", "--revision=b"]) == "b"
    assert revision_of(["--revision", "a", "--revision", "b", "--enforce-eager"]) == "b"
    assert revision_of(["--tokenizer-revision=a"]) is None
    assert revision_of(["--revision"]) is None
