# SPDX-License-Identifier: Apache-2.0
"""What Argo CD and Flux install, as Helm renders it, and what they then show.

Argo CD's health check is run by the Lua that Argo CD runs, on conditions that the operator writes.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from poc_operator.apis.v1alpha1.conditions import UNSEEN, Condition, ConditionType
from poc_operator.apis.v1alpha1.fleet_update import UpdateStatus
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.conditions import PodCounts, Verdict
from poc_operator.fleets.resolve import Refusal
from poc_operator.observed import PodView
from poc_operator.planning.conditions import conditions_of
from tests.docs.pages import ROOT, blocks
from tests.docs.schemas import values_errors

NOW = datetime(2026, 11, 25, tzinfo=UTC)
FINE = (False, Reason.ALL_SLOTS_WORK, "nothing is lost")
LOST = (True, Reason.SLOTS_FAILED, "1 slot was given up")


def _check() -> str:
    (text,) = [block.text for block in blocks() if block.title == "argocd-cm.yaml"]
    customizations = yaml.safe_load(yaml.safe_load(text)["data"]["resource.customizations"])
    assert list(customizations) == ["poc.gonka.ai/*"]
    return str(customizations["poc.gonka.ai/*"]["health.lua"])


def health(conditions: list[Condition] | None, generation: int = 1) -> tuple[str, str]:
    """Return status and message that Argo CD shows for an object with these conditions."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    found: dict[str, Any] = {"metadata": {"generation": generation}}
    if conditions is not None:
        stored = [one.model_dump(mode="json", by_alias=True) for one in conditions]
        found["status"] = {"conditions": stored}
    lua.globals().obj = lua.table_from(found, recursive=True)
    answer = lua.execute(_check())
    return str(answer["status"]), str(answer["message"])


def work(**changes: tuple[bool, Reason, str]) -> list[Condition]:
    """Return the conditions of a round that runs, with some of them changed."""
    runs = (False, Reason.RUNNING, "the work is not over")
    told: Mapping[ConditionType, tuple[bool, Reason, str]] = {
        ConditionType.ACCEPTED: (True, Reason.ACCEPTED, "the spec is valid"),
        ConditionType.PROGRESSING: (True, Reason.RUNNING, "100/s"),
        ConditionType.DEGRADED: FINE,
        ConditionType.SUSPENDED: (False, Reason.NOT_SUSPENDED, "the work is not suspended"),
        **dict.fromkeys(
            (ConditionType.COMPLETE, ConditionType.FAILED, ConditionType.READY, ConditionType.STALLED), runs
        ),
        **{ConditionType(name): verdict for name, verdict in changes.items()},
    }
    return list(conditions_of(told, NOW, 1))


ENDED = (True, Reason.COMPLETED, "all is done")
FAILED = (True, Reason.DEADLINE_EXCEEDED, "it took too long")
PAUSED = (True, Reason.SUSPENDED, "spec.suspend is true")
CASES = {
    "an object of before the operator": (None, ("Progressing", "waiting for the operator")),
    "an object that no operator has seen": ([UNSEEN], ("Progressing", "waiting for the operator")),
    "a round that runs": (work(), ("Progressing", "100/s")),
    "a round that lost a slot": (work(Degraded=LOST), ("Degraded", LOST[2])),
    "a complete round": (work(Ready=ENDED, Complete=ENDED), ("Healthy", ENDED[2])),
    "a complete round that lost a slot": (work(Ready=ENDED, Degraded=LOST), ("Degraded", LOST[2])),
    "a failed round": (work(Stalled=FAILED, Failed=FAILED), ("Degraded", FAILED[2])),
    "a suspended round": (work(Suspended=PAUSED, Degraded=LOST), ("Suspended", PAUSED[2])),
}


@pytest.mark.parametrize("case", CASES)
def test_a_round(case: str) -> None:
    conditions, shown = CASES[case]
    assert health(conditions) == shown


def test_a_changed_spec_is_not_healthy_before_the_operator_has_seen_it() -> None:
    conditions = work(Ready=ENDED)
    assert health(conditions, generation=1)[0] == "Healthy"
    assert health(conditions, generation=2) == ("Progressing", "waiting for the operator")


def _fleet(replicas: int, *pods: PodView) -> list[Condition]:
    seen = PodCounts(
        replicas=replicas, port=8000, pods=pods, outdated=[], observed=True, replaces=True, nodes={}, now=NOW
    )
    return Verdict.of_pods(seen, UpdateStatus()).conditions(NOW, 1)


def test_a_fleet() -> None:
    assert health(_fleet(replicas=0)) == ("Healthy", "spec.replicas is 0: raise it to have pods")
    assert health(_fleet(replicas=1))[0] == "Progressing"
    pod = PodView(name="demo-0", namespace="poc", uid="u", node="gpu-1", waiting_for="ErrImagePull", created=NOW)
    assert health(_fleet(1, pod)) == ("Degraded", "demo-0 (ErrImagePull) cannot run")
    stuck = _fleet(1, replace(pod, created=NOW - timedelta(hours=1), taken=NOW - timedelta(hours=1)))
    assert {one.type for one in stuck if one.status == "True"} == {"Degraded", "Stalled"}
    assert health(stuck) == ("Degraded", "demo-0 (ErrImagePull) cannot run")
    refused = Verdict.of_refusal(Refusal(Reason.IMAGE_MISSING, "name an image"))
    assert health(refused.conditions(NOW, 1)) == ("Degraded", "name an image")


CHART = "charts/vllm-poc-operator"
INSTALLED = ["operator-application.yaml", "operator-helmrelease.yaml"]


def _installed(title: str) -> dict[str, Any]:
    """The spec of the object that installs the chart."""
    (text,) = [block.text for block in blocks() if block.title == title]
    spec: dict[str, Any] = yaml.safe_load(text)["spec"]
    return spec


def _values(title: str) -> dict[str, Any]:
    spec = _installed(title)
    values: dict[str, Any] = spec["values"] if "values" in spec else spec["source"]["helm"]["valuesObject"]
    return values


def _names(part: Any) -> set[tuple[str, str]]:  # noqa: ANN401 - any part of a manifest
    """The Secrets that variables of pods are from, with their keys."""
    if isinstance(part, list):
        return {name for item in part for name in _names(item)}
    if not isinstance(part, dict):
        return set()
    own = part.get("secretKeyRef")
    found = {name for value in part.values() for name in _names(value)}
    return found | ({(own["name"], own["key"])} if isinstance(own, dict) and "key" in own else set())


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize("title", INSTALLED)
def test_the_secrets_of_the_page_are_those_that_its_release_needs(title: str, helm: Path, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(_values(title)))
    command: list[str | Path] = [helm, "template", "--no-hooks", ROOT / CHART, "--values", tmp_path / "values.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    bodies = [body for body in yaml.safe_load_all(done.stdout) if body and body["kind"] != "CustomResourceDefinition"]
    assert [body["metadata"]["name"] for body in bodies if body["kind"] == "Secret"] == []
    page = (ROOT / "docs/operate/gitops.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| that of the release[^|]*\| ([^|]+)\|$", page, re.MULTILINE)
    assert _names(bodies) == {(name, key) for name, keys in rows for key in re.findall(r"`([\w-]+)`", keys)}


@pytest.mark.parametrize("title", INSTALLED)
def test_the_chart_takes_the_values(title: str) -> None:
    assert values_errors("vllm-poc-operator", _values(title)) == []


def test_an_application_has_the_values_for_tools_that_only_render() -> None:
    wanted = yaml.safe_load((ROOT / "docs/examples/values/gitops.yaml").read_text())
    assert _merged(_values("operator-application.yaml"), wanted) == _values("operator-application.yaml")


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """The values with others put over them."""
    return values | {
        key: _merged(values.get(key, {}), value) if isinstance(value, dict) else value for key, value in over.items()
    }


def test_both_name_the_folder_of_the_chart_and_the_release_of_the_pages() -> None:
    application, release = (_installed(title) for title in INSTALLED)
    assert application["source"]["path"] == CHART
    assert release["chart"]["spec"]["chart"] == f"./{CHART}"
    assert release["targetNamespace"] == release["storageNamespace"] == application["destination"]["namespace"]
    names = {yaml.safe_load(block.text)["metadata"]["name"] for block in blocks() if block.title in INSTALLED}
    assert names == {release["releaseName"]} == {"vllm-poc-operator"}
