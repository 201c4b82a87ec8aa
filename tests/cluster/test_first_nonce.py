# SPDX-License-Identifier: Apache-2.0
"""How soon a new fleet's first nonce is delivered: pods prove themselves first, and the round is there before them."""

import time
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import fleet_spec
from hack.deploy.releases import NAMESPACE, OPEN
from hack.toolchain.common import wait_until
from tests.cluster.objects import ARTIFACT, Rounds
from tests.support.fakes.receiver import Receiver
from tests.support.patience import PATIENCE
from tests.support.servers.cluster import diagnosis

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600, func_only=True)]

NAME = "fresh"
NAMED = ("--namespace", NAMESPACE)
#: From the moment at which Kubernetes sees the pod ready.
SECONDS = 5.0


def is_ready(kube: Kube) -> bool:
    found = kube.get(*NAMED, "pods", "--selector", f"poc.gonka.ai/fleet={NAME}")["items"]
    conditions: list[Any] = [one for pod in found for one in pod.get("status", {}).get("conditions") or []]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def test_a_new_fleet_delivers_within_seconds(kube: Kube, rounds: Rounds, receiver: Receiver) -> None:
    """As with ``kubectl apply -f fleet.yaml -f round.yaml``: the round waits for the pods, which check themselves."""
    fleet = {"apiVersion": "poc.gonka.ai/v1alpha1", "kind": "PoCFleet", "spec": {**fleet_spec(replicas=1), **OPEN}}
    try:
        kube.apply({**fleet, "metadata": {"name": NAME, "namespace": NAMESPACE}})
        rounds.apply(NAME, **ARTIFACT, callbackURL=receiver.url, fleetRef={"name": NAME}, stop={"afterNonces": 1000})
        assert wait_until(lambda: is_ready(kube), PATIENCE * 300, pause=0.1), diagnosis(kube)
        ready = time.monotonic()
        assert wait_until(lambda: bool(receiver.bodies), PATIENCE * 60, pause=0.05), diagnosis(kube)
        took = time.monotonic() - ready
        print(f"the first nonce was delivered {took:.1f} s after the pod was ready")  # noqa: T201
        assert took <= PATIENCE * SECONDS
    finally:
        kube.kubectl(*NAMED, "delete", "pocfleet", NAME, "--ignore-not-found", "--cascade=foreground", limit=120)
