# SPDX-License-Identifier: Apache-2.0
"""A pod's view: which container serves a port, and when it has restarted."""

from typing import Any

from poc_operator.observed import PodView


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


def test_a_restart_changes_the_view() -> None:
    assert PodView.parse(body()).server(8000) != PodView.parse(body(restarts=1)).server(8000)
    assert PodView.parse(body()) != PodView.parse(body(restarts=1))


def test_a_pod_without_containers_yet() -> None:
    assert PodView.parse({"metadata": body()["metadata"]}).server(8000) == "u"
    assert PodView.parse(body(containerStatuses=None)).server(8000) == "#0"
