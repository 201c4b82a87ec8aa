# SPDX-License-Identifier: Apache-2.0
"""All pods of the chart keep to the level "restricted" of the Pod Security Standards.

On a cluster the API server judges the operator's and the gateway's pods as well (test_security.py, test_gateway.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hack.deploy.local import OPERATOR_CHART
from tests.chart.helm import ALL_VALUES
from tests.chart.rendered import Values, ensure, objects, pods

pytestmark = pytest.mark.timeout(60, func_only=True)

#: Volumes that the level allows.
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
VALUES = pytest.mark.parametrize("values", [{}, ALL_VALUES[OPERATOR_CHART]], ids=["defaults", "all values"])


def violations(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the level forbids in the spec of a pod, by the table of the Kubernetes docs."""
    pod = spec.get("securityContext", {})
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if spec.get(name))
    yield from (f"volume {one['name']}" for one in spec.get("volumes", []) if not one.keys() - {"name"} <= VOLUMES)
    for container in [*spec["containers"], *spec.get("initContainers", []), *spec.get("ephemeralContainers", [])]:
        own = container.get("securityContext", {})
        capabilities = own.get("capabilities", {})
        both = {**pod, **own}
        wrong = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities.drop": capabilities.get("drop") != ["ALL"],
            "capabilities.add": not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"},
            "procMount": own.get("procMount", "Default") != "Default",
            "seLinuxOptions": "seLinuxOptions" in both,
            "sysctls": bool(pod.get("sysctls")),
            "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
        }
        yield from (f"{container['name']}: {name}" for name, is_wrong in wrong.items() if is_wrong)


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    ensure()


@VALUES
def test_all_pods_keep_to_the_restricted_level(values: Values) -> None:
    found = pods(objects(values))
    assert {name.split("/")[0] for name in found} == {"Deployment", "Job", "Pod"}
    assert {name: list(violations(spec)) for name, spec in found.items()} == {name: [] for name in found}


@VALUES
def test_all_pods_write_to_their_volumes_alone_and_have_limits(values: Values) -> None:
    for spec in pods(objects(values)).values():
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "volume a"),
        ({"securityContext": {"runAsNonRoot": True}}, "operator: seccompProfile"),
    ],
)
def test_more_would_be_found(change: Values, found: str) -> None:
    spec = next(one for name, one in pods(objects({})).items() if name.endswith("/fresh-vllm-poc-operator"))
    assert found in list(violations({**spec, **change}))
