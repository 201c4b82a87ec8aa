# SPDX-License-Identifier: Apache-2.0
"""Pods that no fleet has made, and that objects select by labels of the user's."""

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

MODEL, OTHER = {"model": "qwen3-8b", "tier": "one"}, {"model": "other"}
WORKER = {"poc.gonka.ai/worker": "true"}


def of_pods(body: dict[str, Any], labels: Mapping[str, str] | None, **status: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return an object that selects pods by these labels; without any by the workers' label."""
    spec = {key: value for key, value in body["spec"].items() if key != "fleetRef"}
    selector = {"selector": {"matchLabels": dict(labels)}} if labels else {}
    return {**body, "spec": {**spec, **selector}, "status": {**body["status"], **status}}


def _own(api: ApiPaths) -> None:
    """Lay down pods of a namespace without fleets: two that wait for a round, and one each for the other kinds."""
    waiting = of_pods(seen.a_round(state="Pending"), MODEL, assignments=[])
    same = of_pods(seen.a_round("round-2"), dict(reversed(MODEL.items())), assignments=[])
    labelled = of_pods(seen.a_round("round-3"), {**WORKER, "zone": "a"}, assignments=[])
    pods = [
        seen.an_own_pod("labelled-0", {**WORKER, "zone": "a"}),
        seen.an_own_pod("own-0", MODEL, ready=False),
        seen.an_own_pod("own-1", {**MODEL, **WORKER}),
        seen.an_own_pod("validating-0", OTHER),
        seen.an_own_pod("calibrating-0", {"model": "third"}),
        seen.an_own_pod("chat-0", {"model": "chat"}),
    ]
    api.answers |= {
        seen.FLEETS: [],
        seen.ROUNDS: [waiting, same, labelled, of_pods(seen.a_round("round-4"), None, assignments=[])],
        f"{seen.API}/pocvalidations": [of_pods(seen.a_validation(), OTHER)],
        f"{seen.API}/poccalibrations": [of_pods(seen.a_calibration(), {"model": "third"})],
        seen.PODS: seen.by_selector(*pods),
    }


def _lists(api: ApiPaths, path: str = seen.PODS) -> list[str]:
    return sorted(one.query["labelSelector"][0] for one in api.asked if one.path == path)


def test_status_shows_pods_that_objects_select_by_other_labels(run: Run, api: ApiPaths) -> None:
    _own(api)
    done = run("status", "-o", "json")
    names = [pod["name"] for pod in json.loads(done.out)["pods"]]
    assert names == ["calibrating-0", "labelled-0", "own-0", "own-1", "validating-0"]
    wanted = ["model=other", "model=qwen3-8b,tier=one", "model=third", "poc.gonka.ai/worker=true"]
    assert _lists(api) == wanted, "each selector once, and none of what the label covers"


def test_pods_of_fleets_need_no_list_of_their_own(run: Run, api: ApiPaths) -> None:
    run("status")
    assert _lists(api) == ["poc.gonka.ai/worker=true"]


def test_an_object_selects_no_pods_of_other_namespaces(run: Run, api: ApiPaths) -> None:
    everywhere = "/apis/poc.gonka.ai/v1alpha1"
    stranger = seen.an_own_pod("stranger-0", MODEL)
    stranger["metadata"]["namespace"] = "other"
    api.answers |= {
        f"{everywhere}/pocfleets": [],
        f"{everywhere}/pocrounds": [of_pods(seen.a_round(), MODEL, assignments=[])],
        f"{everywhere}/pocvalidations": [],
        f"{everywhere}/poccalibrations": [],
        "/api/v1/pods": seen.by_selector(seen.an_own_pod("own-0", MODEL), stranger),
    }
    assert [pod["name"] for pod in json.loads(run("status", "-A", "-o", "json").out)["pods"]] == ["own-0"]


def test_status_says_whose_pods_are_missing(run: Run, api: ApiPaths) -> None:
    _own(api)
    api.answers[f"{seen.API}/pocvalidations"] = (403, {"message": "pocvalidations is forbidden"})
    done = run("status")
    assert done.code == 0
    assert "note: pods that only pocvalidations select are missing: you lack a right" in done.out
    assert "own-0" in done.out


@pytest.mark.parametrize("everywhere", [True, False])
def test_pods_of_ones_own_are_as_good_as_a_fleet(run: Run, api: ApiPaths, everywhere: bool) -> None:
    _own(api)
    every, no = "/apis/poc.gonka.ai/v1alpha1", (403, {"message": "no"})
    kinds = {f"{every}/{path.rpartition('/')[2]}": answer for path, answer in api.answers.items() if seen.API in path}
    pods = api.answers[seen.PODS]
    api.answers |= {path: answer if everywhere else no for path, answer in kinds.items()}
    api.answers["/api/v1/pods"] = pods if everywhere else no
    (told,) = [one for one in _checks(run) if one["about"] == "fleets"]
    told_of = "there is none; pods of your own that are labelled or selected"
    assert (told["level"], told["finding"]) == ("ok", f"{told_of}: 5, of which 4 are ready")
    unready = [seen.a_pod("own-9", ready=False)]
    api.answers |= {"/api/v1/pods": unready, seen.PODS: unready}
    (told,) = [one for one in _checks(run) if one["about"] == "fleets"]
    assert (told["level"], told["remedy"]) == ("warning", "kubectl -n poc describe pod own-9")
    api.answers |= {"/api/v1/pods": [], seen.PODS: []}
    (told,) = [one for one in _checks(run) if one["about"] == "fleets"]
    assert (told["level"], told["finding"]) == ("warning", "there is none")


def _checks(run: Run) -> Any:  # noqa: ANN401
    return json.loads(run("check", "-o", "json").out)


def test_a_bundle_has_the_logs_of_selected_pods(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    _own(api)
    names = ["calibrating-0", "labelled-0", "own-0", "own-1", "validating-0"]
    api.answers |= {f"{seen.PODS}/{name}/log": f"the log of {name}\n" for name in names}
    file = tmp_path / "bundle.tar.gz"
    assert run("bundle", "-f", str(file)).code == 0
    with tarfile.open(file) as tar:
        logs = {entry.name.rpartition("/")[2] for entry in tar if "/logs/poc/" in entry.name}
    assert logs == {f"{name}-kserve-container.log" for name in names}
