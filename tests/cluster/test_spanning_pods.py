# SPDX-License-Identifier: Apache-2.0
"""A replica that spans two pods of real vLLM, which LeaderWorkerSet's own controller keeps on the cluster."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import FLEET, fleet_spec
from hack.deploy.releases import FLEET_SECONDS, NAMESPACE, OPEN, UNCHANGED, apply_fleet
from hack.toolchain.common import wait_until
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult
from poc_operator.apis.v1alpha1.meta import GROUPS_LABEL
from poc_operator.apis.v1alpha1.validation import StatTest
from poc_operator.fleets.self_check import Vectors, compare, unpacked
from tests.cluster.objects import ARTIFACT, Rounds
from tests.support.fakes.receiver import Receiver
from tests.support.patience import PATIENCE
from tests.support.servers.cluster import diagnosis
from tests.support.servers.leader_worker_set import custom_resources, leader_worker_set, webhooks
from vllm_poc.wire.messages import Protocol

START_SECONDS = 420.0
pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(2000, func_only=True)]

NAME = "span"
NONCES = 64
#: L2 distance between two vectors, whose sums over two pods round otherwise in bfloat16. Other weights are over 1 away.
FARTHEST = 0.03
NAMED = ("--namespace", NAMESPACE)


@pytest.fixture
def groups(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """LeaderWorkerSet beside the cluster, which is without it afterwards."""
    assert kube.kubeconfig is not None
    try:
        with leader_worker_set(tmp_path_factory.mktemp("lws"), kube.kubeconfig, lambda body: create(kube, body)):
            yield
            kube.kubectl(*NAMED, "delete", "pocfleet", NAME, "--ignore-not-found", "--cascade=foreground", limit=120)
    finally:
        for body in [*webhooks(0), *custom_resources()]:
            kube.kubectl("delete", body["kind"], body["metadata"]["name"], "--ignore-not-found")


def create(kube: Kube, body: dict[str, Any]) -> None:
    # What client-side apply remembers of an object may not be as large as these are.
    kube.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))
    if body["kind"] == "CustomResourceDefinition":
        # A CRD whose status is empty yet is an error for `kubectl wait`.
        assert wait_until(lambda: is_established(kube, body["metadata"]["name"]), PATIENCE * 30, pause=0.2)


def is_established(kube: Kube, name: str) -> bool:
    conditions = kube.get("crd", name).get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


@pytest.fixture
def one_demo_pod(kube: Kube) -> Iterator[None]:
    """The demo's fleet with a single pod: memory and cores are for the group's two."""
    kube.kubectl(*NAMED, "scale", "pocfleet", FLEET, "--replicas=1")
    yield
    apply_fleet(kube, {**fleet_spec(replicas=2), **OPEN, **UNCHANGED})


def fleet_of(kube: Kube, name: str) -> PoCFleet:
    return PoCFleet.parse(kube.get(*NAMED, "pocfleet", name))


def until(kube: Kube, name: str, holds: Callable[[PoCFleet], bool], seconds: float = START_SECONDS) -> PoCFleet:
    if not wait_until(lambda: holds(fleet_of(kube, name)), PATIENCE * seconds, pause=1.0):
        logs = kube.kubectl(*NAMED, "logs", "--selector", f"{GROUPS_LABEL}={NAME}", "--tail=40", "--prefix")
        pytest.fail(f"{fleet_of(kube, name).status}\n{logs}\n{diagnosis(kube)}")
    return fleet_of(kube, name)


def is_proven(fleet: PoCFleet) -> bool:
    """Whether the fleet's first pod is ready, and has passed its self-check."""
    return fleet.status.ready_replicas >= 1 and fleet.status.pods[0].result is CheckResult.PASSED


def reference(fleet: PoCFleet) -> Vectors:
    """The vectors that the fleet's pods are compared with."""
    (found,) = fleet.status.self_check_references
    return unpacked(found.vectors, 12)


def members(kube: Kube) -> dict[str, str]:
    """The uids of the group's pods that stay, by name."""
    found = kube.get(*NAMED, "pods", "--selector", f"{GROUPS_LABEL}={NAME}")["items"]
    return {
        one["metadata"]["name"]: one["metadata"]["uid"] for one in found if "deletionTimestamp" not in one["metadata"]
    }


@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
@pytest.mark.usefixtures("groups", "one_demo_pod")
def test_two_pods_compute_what_one_computes(kube: Kube, rounds: Rounds, receiver: Receiver, kind: str) -> None:
    """A round runs on them. When the worker is lost, both are made anew, and pass their self-check again."""
    spec = {**fleet_spec(replicas=1), **OPEN, "parallelism": {kind: 2, "kubernetesNodes": 2}}
    body = {"apiVersion": "poc.gonka.ai/v1alpha1", "kind": "PoCFleet", "spec": spec}
    kube.apply({**body, "metadata": {"name": NAME, "namespace": NAMESPACE}})
    alone = until(kube, FLEET, is_proven, FLEET_SECONDS)
    spread = until(kube, NAME, is_proven)
    assert sorted(members(kube)) == ["span-0", "span-0-1"]
    assert [pod.name for pod in spread.status.pods] == ["span-0"]
    compared = compare(reference(spread), reference(alone), StatTest().thresholds(Protocol.ARTIFACT))
    assert compared.farthest < FARTHEST, str(compared)

    delivering = {"callbackURL": receiver.url, "stop": {"afterNonces": NONCES}, "fleetRef": {"name": NAME}}
    done = rounds.run_to_the_end("spread", **ARTIFACT, **delivering).status
    assert done.totals.delivered >= NONCES
    assert [slot.pod for slot in done.assignments] == ["span-0"]

    before = members(kube)
    kube.kubectl(*NAMED, "delete", "pod", "span-0-1", "--grace-period=1")
    assert wait_until(lambda: len(members(kube).items() - before.items()) == 2, PATIENCE * 120, pause=1.0)
    again = until(kube, NAME, lambda fleet: is_proven(fleet) and fleet.status.pods[0].uid == members(kube)["span-0"])
    assert reference(again) == reference(spread)
