# SPDX-License-Identifier: Apache-2.0
"""Objects as the API server has them, for tests of ``kubectl poc``."""

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from poc_operator.apis.v1alpha1.meta import API_VERSION

API = f"/apis/{API_VERSION}/namespaces/poc"
ROUNDS, FLEETS = f"{API}/pocrounds", f"{API}/pocfleets"
PODS, EVENTS = "/api/v1/namespaces/poc/pods", "/api/v1/namespaces/poc/events"
DEPLOYMENTS = "/apis/apps/v1/deployments"
GATEWAY = "/api/v1/namespaces/poc-system/services/gateway:inside/proxy"
START = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=30)
BLOCK, KEY = "5f" * 32, "02a1b2c3d4e5f60718293a4b5c6d7e8f90"
METRICS = """
poc_activity{activity="Computing",model_name="m"} 0.0
poc_activity{activity="HeldByChat",model_name="m"} 1.0
poc_held_back_seconds_total{model_name="m"} 12.5
poc_nonces_computed_total{model_name="m",protocol="artifact",work="round"} 320.0
poc_nonces_computed_total{model_name="m",protocol="artifact",work="request"} 7.0
"""


def metadata(name: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the metadata of an object."""
    return {
        "name": name,
        "namespace": "poc",
        "uid": f"{name}-uid",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": START.isoformat(),
        **more,
    }


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    """Return a condition."""
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": START.isoformat(),
    }


def a_round(name: str = "round-1", *, state: str = "Running", conditions: Any = (), **status: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a round of two slots, which has 400 of 1 000 nonces at 100/s."""
    slot = {"group": 0, "state": "Running", "session": "s"}
    slots = [
        {**slot, "node": 0, "pod": "demo-0", "uid": "demo-0-uid", "delivered": 300, "next": 320},
        {**slot, "node": 1, "pod": "demo-1", "uid": "demo-1-uid", "delivered": 100, "next": 100},
    ]
    told = {
        "observedGeneration": 1,
        "state": state,
        "desired": 2,
        "running": 2,
        "startTime": START.isoformat(),
        "totals": {"checked": 420, "delivered": 400, "valid": 40, "rate": "100.0"},
        "assignments": slots,
        "conditions": list(conditions),
    }
    spec = {
        "fleetRef": {"name": "demo"},
        "blockHash": BLOCK,
        "blockHeight": 7,
        "publicKey": KEY,
        "nodes": {"first": 0, "last": 1, "count": 2},
        "artifact": {"kDim": 12},
        "model": {"name": "demo", "seqLen": 64},
        "stop": {"afterNonces": 1000},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "PoCRound",
        "metadata": metadata(name),
        "spec": spec,
        "status": {**told, **status},
    }


def a_validation(name: str = "validation-1", **status: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a validation of results of the round."""
    wanted = ("fleetRef", "blockHash", "blockHeight", "publicKey", "artifact", "model")
    spec = {field: value for field, value in a_round()["spec"].items() if field in wanted}
    return {
        "apiVersion": API_VERSION,
        "kind": "PoCValidation",
        "metadata": metadata(name),
        "spec": {**spec, "proofs": {"round": {"name": "round-1"}}},
        "status": {"observedGeneration": 1, "state": "Running", **status},
    }


def a_calibration(name: str = "calibration-1", **status: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a calibration for a tenth of valid nonces."""
    wanted = ("fleetRef", "blockHash", "blockHeight", "publicKey", "model")
    spec = {field: value for field, value in a_round()["spec"].items() if field in wanted}
    return {
        "apiVersion": API_VERSION,
        "kind": "PoCCalibration",
        "metadata": metadata(name),
        "spec": {**spec, "validRate": "0.1"},
        "status": {"observedGeneration": 1, "state": "Running", **status},
    }


def a_fleet(name: str = "demo", *, conditions: Any = (), update: Any = None, **spec: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a fleet of two pods."""
    status = {"observedGeneration": 1, "ready": "2/2", "reason": "AllReplicasReady", "updatedReplicas": 2, "model": "m"}
    return {
        "apiVersion": API_VERSION,
        "kind": "PoCFleet",
        "metadata": metadata(name),
        "spec": {"model": {"path": "org/model"}, "replicas": 2, **spec},
        "status": {**status, "conditions": list(conditions), "update": update or {"phase": "Complete"}},
    }


def a_pod(name: str, *, ready: bool = True, waiting: str = "", says: str = "") -> dict[str, Any]:
    """Return a pod of the fleet; ``says`` is the message beside what it is waiting for."""
    labels = {"poc.gonka.ai/worker": "true", "poc.gonka.ai/fleet": "demo"}
    state = (
        {"waiting": {"reason": waiting, "message": says}} if waiting else {"running": {"startedAt": START.isoformat()}}
    )
    container = {"name": "vllm", "ready": ready, "restartCount": 0, "state": state, "containerID": "containerd://1"}
    return {
        "metadata": metadata(name, labels=labels),
        "spec": {"nodeName": "node-1", "containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": START.isoformat()}
            ],
            "containerStatuses": [container],
        },
    }


def an_own_pod(name: str, labels: dict[str, str], *, ready: bool = True) -> dict[str, Any]:
    """Return a pod that no fleet has made, with these labels and a container of another name."""
    pod = a_pod(name, ready=ready)
    pod["metadata"]["labels"] = labels
    pod["spec"]["containers"][0]["name"] = pod["status"]["containerStatuses"][0]["name"] = "kserve-container"
    return pod


def by_selector(*pods: dict[str, Any]) -> Callable[[Mapping[str, list[str]]], list[dict[str, Any]]]:
    """Return what answers with those of these pods that have the labels that are asked for."""

    def answer(query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        wanted = dict(part.partition("=")[::2] for part in query.get("labelSelector", [""])[0].split(",") if part)
        return [pod for pod in pods if all(_has(pod, key, value) for key, value in wanted.items())]

    return answer


def _has(pod: dict[str, Any], key: str, value: str) -> bool:
    found = pod["metadata"]["labels"].get(key)
    return found == value if value else found is not None


def that_loads(name: str, *more: str) -> dict[str, Any]:
    """Return the answers of a cluster whose fleet has these pods, all of which load."""
    names = [name, *more]
    fleet = a_fleet()
    fleet["status"] |= {"pods": [{"name": one, "uid": f"{one}-uid", "stage": "Loading"} for one in names]}
    pods = [a_pod(one, ready=False) for one in names]
    return {FLEETS: [fleet], f"{FLEETS}/demo": fleet, PODS: pods, ROUNDS: []}


def a_deployment(name: str, *, available: int = 1, namespace: str = "poc-system", spec: Any = None) -> dict[str, Any]:  # noqa: ANN401
    """Return a Deployment of the operator's or the gateway's."""
    pod_spec = spec or {"containers": [{"name": "operator", "args": ["--lease-namespace=kube-system"]}]}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {}},
        "spec": {"template": {"spec": pod_spec}},
        "status": {"availableReplicas": available},
    }


def a_service() -> dict[str, Any]:
    """Return the gateway's Service for people."""
    return {
        "metadata": {"name": "gateway", "namespace": "poc-system"},
        "spec": {"ports": [{"name": "inside", "port": 8080}]},
    }


def a_gateway() -> dict[str, Any]:
    """Return the answers of a cluster with a gateway, whose token of people is ``people``."""
    secret = {"valueFrom": {"secretKeyRef": {"name": "tokens", "key": "token"}}}
    spec = {"containers": [{"name": "gateway", "env": [{"name": "POC_GATEWAY_TOKEN", **secret}]}]}
    encoded = base64.b64encode(b"people,older").decode()
    return {
        "/api/v1/services": [a_service()],
        "/apis/apps/v1/namespaces/poc-system/deployments/gateway": a_deployment("gateway", spec=spec),
        "/api/v1/namespaces/poc-system/secrets/tokens": {"data": {"token": encoded}},
    }


def stored_results(
    counts: Sequence[int] = (0, 400), rates: Sequence[float] = (10.0, 30.0, 0.0, 20.0), seconds: float = 5.0
) -> dict[str, Any]:
    """Return the answers of the gateway about results of the round: their histogram, and their rate in each span."""
    stored, route = sum(counts), f"{GATEWAY}/rounds/poc/round-1"
    known = {"namespace": "poc", "name": "round-1", "stored": stored, "slots": 2, "duplicates": 0, "conflicts": 1}
    edges = [float(place) for place in range(len(counts) + 1)]
    histogram = {"quantity": "vector norm", "edges": edges, "counts": list(counts), "above": 0, "counted": stored}
    arrivals = {"first_arrival": "2026-01-01T08:00:00Z", "last_arrival": "2026-01-01T08:00:20.500000Z"}
    return {
        f"{route}/summary": {
            "round": {**known, "dead": 0, "forwarded": 300, "limit_reached": None},
            **arrivals,
            "rate": 99.5,
            "histogram": {**histogram, "sampled": True},
        },
        f"{route}/rates": {
            **arrivals,
            "seconds": seconds,
            "rates": list(rates),
            "counted": stored,
            "sampled": False,
        },
        f"{route}/forwarding": {"backlog": 100, "last_error": "HTTP 503"},
        f"{route}/conflicts": {"conflicts": [{"nonce": 5, "pod": "a", "stored_pod": "b"}]},
    }


def an_event(reason: str, message: str) -> dict[str, Any]:
    """Return a warning about the round."""
    return {"type": "Warning", "reason": reason, "message": message, "lastTimestamp": START.isoformat(), "count": 2}


def a_cluster() -> dict[str, Any]:
    """Return the answers of a cluster with a fleet of two pods, of which chat holds one back, and a round."""
    return {
        "/api/v1/namespaces/poc": {"metadata": {"name": "poc"}},
        ROUNDS: [a_round()],
        f"{ROUNDS}/round-1": a_round(),
        FLEETS: [a_fleet()],
        f"{FLEETS}/demo": a_fleet(),
        f"{API}/pocvalidations": [],
        f"{API}/poccalibrations": [],
        PODS: [a_pod("demo-0"), a_pod("demo-1")],
        EVENTS: [an_event("WorkLost", "node 0 group 0: pod demo-0 is gone")],
        DEPLOYMENTS: [a_deployment("operator")],
        f"{PODS}/demo-0:8000/proxy/metrics": METRICS,
        f"{PODS}/demo-1:8000/proxy/metrics": METRICS.replace("1.0", "0.0"),
    }
