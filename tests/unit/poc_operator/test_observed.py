# SPDX-License-Identifier: Apache-2.0
"""A pod's view: which container serves a port, and when it has restarted."""

from datetime import datetime
from typing import Any

import pytest

from poc_operator.observed import Container, Owner, PodView


def body(restarts: int = 0, **status: Any) -> dict[str, Any]:  # noqa: ANN401 - the API server's JSON
    return {
        "metadata": {"name": "a", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [{"name": "proxy"}, {"name": "vllm", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "containerStatuses": [
                {"name": "vllm", "containerID": "containerd://v", "restartCount": restarts},
                {"name": "proxy", "containerID": "containerd://p", "restartCount": 5},
            ],
            **status,
        },
    }


def test_the_container_that_declares_the_port_is_the_server() -> None:
    pod = PodView.parse(body())
    assert pod.server(8000) == "containerd://v#0"
    assert pod.server(9000) == "containerd://p#5"


@pytest.mark.parametrize(
    ("ports", "told", "expected"),
    [
        pytest.param([[8000]], 8000, 8000, id="the one that is told"),
        pytest.param([[8000]], 9000, 8000, id="made before the port changed"),
        pytest.param([[], [9000, 8000]], 8000, 8000, id="not of the first container"),
        pytest.param([[], [9001, 9000], [1]], 8000, 9000, id="the least of the first that declares any"),
        pytest.param([[]], 9000, 9000, id="none declared"),
        pytest.param([], 9000, 9000, id="no container"),
    ],
)
def test_the_servers_port_is_what_is_told_unless_the_pod_declares_others_alone(
    ports: list[list[int]], told: int, expected: int
) -> None:
    containers = tuple(Container(id=str(number), ports=frozenset(own)) for number, own in enumerate(ports))
    assert PodView(name="p", namespace="ns", uid="u", containers=containers).serving_port(told) == expected


def test_of_other_ports_the_one_named_http_is_the_servers() -> None:
    declared = Container(id="c", ports=frozenset({1, 9000}), http_port=9000)
    assert PodView(name="p", namespace="ns", uid="u", containers=(declared,)).serving_port(8000) == 9000


def test_the_port_named_http_is_known() -> None:
    pod = body()
    assert PodView.parse(pod).http_port is None
    pod["spec"]["containers"].append({"name": "more", "ports": [{"containerPort": 1}]})
    pod["spec"]["containers"].append(
        {"name": "most", "ports": [{"containerPort": 2}, {"containerPort": 3, "name": "http"}]}
    )
    assert PodView.parse(pod).http_port == 3


def test_a_restart_changes_the_view() -> None:
    assert PodView.parse(body()).server(8000) != PodView.parse(body(restarts=1)).server(8000)
    assert PodView.parse(body()) != PodView.parse(body(restarts=1))


BORN, TAKEN = "2026-01-01T12:00:00Z", "2026-01-01T12:00:05Z"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param({"startTime": TAKEN}, TAKEN, id="by a kubelet"),
        pytest.param({}, BORN, id="its containers are told of"),
        pytest.param({"containerStatuses": None}, None, id="nobody tells of it"),
    ],
)
def test_it_is_known_when_a_kubelet_took_a_pod(status: dict[str, Any], expected: str | None) -> None:
    pod = body(**status)
    pod["metadata"]["creationTimestamp"] = BORN
    assert PodView.parse(pod).taken == (datetime.fromisoformat(expected) if expected else None)


@pytest.mark.parametrize("word", ["True", "False", "Unknown"])
def test_it_is_known_since_when_a_pod_is_ready_or_not(word: str) -> None:
    found = PodView.parse(body(conditions=[{"type": "Ready", "status": word, "lastTransitionTime": BORN}]))
    ready, since = word == "True", datetime.fromisoformat(BORN)
    assert (found.ready_since, found.not_ready_since) == ((since, None) if ready else (None, since))


def test_a_pod_without_containers_yet() -> None:
    assert PodView.parse({"metadata": body()["metadata"]}).server(8000) == "u"
    assert PodView.parse(body(containerStatuses=None)).server(8000) == "#0"


RUNS: dict[str, Any] = {"name": "vllm", "state": {"running": {}}}
ENDED: dict[str, Any] = {"name": "proxy", "state": {"terminated": {"exitCode": 0}}}


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize(
    ("status", "ended"),
    [
        pytest.param({"phase": "Running", "containerStatuses": [RUNS, ENDED]}, False, id="one container runs"),
        pytest.param({"phase": "Running", "containerStatuses": [ENDED]}, None, id="all containers have ended"),
        pytest.param({"phase": "Running"}, False, id="nothing is known of its containers"),
        pytest.param({"phase": "Failed", "containerStatuses": [RUNS]}, True, id="evicted by the kubelet"),
        pytest.param({"phase": "Succeeded"}, True, id="succeeded"),
    ],
)
def test_a_pod_is_gone_when_nothing_runs_in_it_for_good(
    status: dict[str, Any], ended: bool | None, deleted: bool
) -> None:
    """Containers that have ended start again, unless the pod is being deleted. One that is may run for long."""
    metadata = body()["metadata"] | ({"deletionTimestamp": "2026-01-01T12:00:00Z"} if deleted else {})
    pod = PodView.parse(body() | {"metadata": metadata, "status": status})
    gone = deleted if ended is None else ended
    assert (pod.gone, pod.terminating, pod.stays) == (gone, deleted, not (gone or deleted))


def test_what_keeps_a_pod_is_the_owner_that_is_its_controller() -> None:
    told = body()
    assert PodView.parse(told).owner is None
    told["metadata"]["ownerReferences"] = [{"kind": "Node", "name": "n", "uid": "1"}]
    assert PodView.parse(told).owner is None
    told["metadata"]["ownerReferences"] += [{"kind": "StatefulSet", "name": "s", "uid": "2", "controller": True}]
    assert PodView.parse(told).owner == Owner(kind="StatefulSet", name="s", uid="2")
