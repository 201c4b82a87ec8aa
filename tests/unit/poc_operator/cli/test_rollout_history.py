# SPDX-License-Identifier: Apache-2.0
"""``kubectl poc fleet rollout history`` and ``undo``, as a person runs them."""

import json
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.fleets.history import RECORD, record_of
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

APPS = "/apis/apps/v1/namespaces/poc"
FLEET = f"{seen.FLEETS}/demo"


def record(**spec: Any) -> str:  # noqa: ANN401
    return json.dumps(record_of(PoCFleet.parse(seen.a_fleet(**spec)).spec))


def revision(number: int, **spec: Any) -> dict[str, Any]:  # noqa: ANN401
    metadata = seen.metadata(f"demo-{number}", annotations={RECORD: record(**spec)}, ownerReferences=[{"uid": "set"}])
    return {"metadata": metadata, "revision": number, "data": {}}


@pytest.fixture(autouse=True)
def updated(api: ApiPaths) -> ApiPaths:
    """A fleet that was updated from one image to another one."""
    metadata = seen.metadata("demo", annotations={RECORD: record(image="a:2")}) | {"uid": "set"}
    api.answers[FLEET] = seen.a_fleet(image="a:2", update={"phase": "Complete", "goodRevision": "demo-2"})
    api.answers[f"PUT {FLEET}"] = seen.a_fleet(image="a:1")
    api.answers[f"{APPS}/statefulsets/demo"] = {"metadata": metadata, "status": {"updateRevision": "demo-2"}}
    api.answers[f"{APPS}/controllerrevisions"] = [revision(2, image="a:2"), revision(1, image="a:1")]
    return api


def test_the_history_tells_what_each_revision_changed(run: Run, api: ApiPaths) -> None:
    lines = run("fleet", "rollout", "history", "demo").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "demo-1"], ["2", "demo-2"]]
    assert "present, good" in lines[2]
    assert "image is a:2 instead of a:1" in lines[2]
    first, second = json.loads(run("fleet", "rollout", "history", "demo", "-o", "json").out)
    assert (first["revision"], first["spec"]["image"], second["state"]) == (1, "a:1", "present, good")
    asked = next(one for one in api.asked if one.path.endswith("controllerrevisions"))
    assert asked.query["labelSelector"] == ["poc.gonka.ai/fleet=demo"]


def test_undo_puts_the_spec_back_and_says_how_to_follow(run: Run, api: ApiPaths) -> None:
    done = run("fleet", "rollout", "undo", "demo")
    assert done.out.splitlines() == [
        "pocfleet.poc.gonka.ai/demo goes back to revision 1 (demo-1): image is a:1 instead of a:2",
        "follow it with: kubectl poc -n poc fleet rollout status demo -w",
    ]
    sent = api.asked[-1]
    assert (sent.method, sent.path, sent.query) == ("PUT", FLEET, {})
    assert (sent.body["spec"]["image"], sent.body["spec"]["replicas"]) == ("a:1", 2)
    assert sent.body["metadata"]["resourceVersion"] == "1", "a change in between must not be lost"
    assert json.loads(run("fleet", "rollout", "undo", "demo", "-o", "json").out)["spec"]["image"] == "a:1"


def test_a_dry_run_changes_nothing(run: Run, api: ApiPaths) -> None:
    done = run("fleet", "rollout", "undo", "demo", "--to-revision=1", "--dry-run")
    assert "would go back to revision 1" in done.out
    assert api.asked[-1].query == {"dryRun": ["All"]}


@pytest.mark.parametrize(
    ("spec", "marks", "says"),
    [
        ({"update": {"paused": True}}, {}, "go on with `kubectl poc -n poc fleet rollout resume demo`"),
        ({"update": {"strategy": "Never"}}, {}, "delete the pods yourself"),
        ({}, {"kustomize.toolkit.fluxcd.io/name": "apps"}, "Flux keeps this fleet as it is in Git"),
    ],
)
def test_what_keeps_pods_from_going_back_is_told(
    run: Run, api: ApiPaths, spec: dict[str, Any], marks: dict[str, str], says: str
) -> None:
    fleet = seen.a_fleet(image="a:2")
    fleet["spec"] |= spec
    fleet["metadata"]["labels"] = marks
    api.answers[FLEET] = fleet
    assert says in run("fleet", "rollout", "undo", "demo").out


def test_what_cannot_be_undone_says_why(run: Run, api: ApiPaths) -> None:
    done = run("fleet", "rollout", "undo", "demo", "--to-revision=3")
    assert (done.code, done.err) == (
        1,
        'error: the fleet "demo" cannot go back: there is no revision 3: choose one of those that there are (1, 2)\n',
    )
    api.answers[FLEET] = seen.a_fleet(gpu={"count": 1}, parallelism={"tensor": 2, "kubernetesNodes": 2})
    assert "LeaderWorkerSet keeps no record of specs" in run("fleet", "rollout", "undo", "demo").err
    api.answers[FLEET] = seen.a_fleet()
    del api.answers[f"{APPS}/statefulsets/demo"]
    assert "has no StatefulSet yet" in run("fleet", "rollout", "history", "demo").err
    assert not [one for one in api.asked if one.method == "PUT"]
