# SPDX-License-Identifier: Apache-2.0
"""What `helm uninstall` runs first: with few rights of its own, for a limited time, and not if it is switched off."""

import json
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import NAMESPACE, OPERATOR, SYSTEM_NAMESPACE
from tests.chart.helm import ALL_VALUES, RELEASE, Values, objects

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

NAME = f"{RELEASE}-{OPERATOR}-uninstall"
KINDS = ["pocrounds", "pocvalidations", "poccalibrations"]
VALUES: list[Values] = [{}, {"watchNamespaces": [NAMESPACE, "default"]}]


def hooks(kube: Kube, values: Values) -> list[dict[str, Any]]:
    """Return what is made for `helm uninstall`, in its order."""
    found = [body for body in objects(kube, OPERATOR_CHART, values) if body["metadata"]["name"].split(":")[0] == NAME]
    return sorted(found, key=lambda body: int(body["metadata"]["annotations"]["helm.sh/hook-weight"]))


@pytest.mark.parametrize("values", VALUES, ids=["cluster", "roles"])
def test_its_rights_are_its_own_and_few(kube: Kube, values: Values) -> None:
    *rights, job = hooks(kube, values)
    assert {body["metadata"]["annotations"]["helm.sh/hook"] for body in [*rights, job]} == {"pre-delete"}
    roles = [body for body in rights if "rules" in body]
    rule = {"apiGroups": ["poc.gonka.ai"], "resources": KINDS, "verbs": ["list", "patch"]}
    assert [role["rules"] for role in roles] == [[rule]] * len(roles)
    watched = values.get("watchNamespaces", [None])
    assert [role["metadata"].get("namespace") for role in roles] == watched
    assert {body["kind"] for body in roles} == ({"Role"} if watched != [None] else {"ClusterRole"})
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": SYSTEM_NAMESPACE}
    bindings = [body for body in rights if "subjects" in body]
    assert [body["subjects"] for body in bindings] == [[account]] * len(roles)
    assert job["kind"] == "Job"
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == NAME


@pytest.mark.parametrize("values", VALUES, ids=["cluster", "roles"])
def test_it_may_read_whose_operator_acts(kube: Kube, values: Values) -> None:
    bodies = objects(kube, OPERATOR_CHART, values)
    rights = {
        (body["metadata"]["name"], body["metadata"]["namespace"]): body["rules"]
        for body in bodies
        if body["kind"] == "Role" and body["metadata"]["name"].startswith(f"{NAME}-")
    }
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [OPERATOR]}
    own = "kube-system" if not values else SYSTEM_NAMESPACE
    assert rights == {
        (f"{NAME}-lease:{SYSTEM_NAMESPACE}", own): [{**lease, "verbs": ["get"]}],
        (f"{NAME}-pods:{SYSTEM_NAMESPACE}", SYSTEM_NAMESPACE): [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
        ],
    }
    args = hooks(kube, values)[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {f"--lease-namespace={own}", f"--release={RELEASE}"} <= set(args)


def test_it_has_an_end(kube: Kube) -> None:
    job = hooks(kube, {"uninstall": {"waitSeconds": 30}})[-1]
    assert job["spec"]["activeDeadlineSeconds"] == 90
    assert "--wait-seconds=30" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_it_can_be_switched_off(kube: Kube) -> None:
    assert hooks(kube, {"uninstall": {"suspendWork": False}}) == []


@pytest.mark.parametrize("values", [*VALUES, ALL_VALUES[OPERATOR_CHART]], ids=["cluster", "roles", "all values"])
def test_the_api_server_takes_it(kube: Kube, values: Values) -> None:
    """Its pod too, at the strictest level."""
    for body in hooks(kube, values):
        answer = kube.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))
        assert "Warning" not in answer
    template = hooks(kube, values)[-1]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hook"}, "spec": template["spec"]}
    pod["spec"] = {
        key: value for key, value in pod["spec"].items() if key not in ("serviceAccountName", "priorityClassName")
    }
    kube.kubectl("--namespace", SYSTEM_NAMESPACE, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
