# SPDX-License-Identifier: Apache-2.0
"""The operator's Lease on a real API server: held, handed over, and fatal when it is lost."""

import json
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.releases import OPERATOR, SYSTEM_NAMESPACE
from hack.toolchain.common import wait_until
from tests.support.servers.cluster import ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240, func_only=True)]

#: Where all operators of all namespaces keep it, with its name.
LEASE = ("--namespace", "kube-system", "lease", "vllm-poc-operator")
ADOPTION_SECONDS = 60.0


def lease(kube: Kube) -> dict[str, Any]:
    spec: dict[str, Any] = kube.get(*LEASE)["spec"]
    return spec


def operator_pod(kube: Kube) -> dict[str, Any]:
    pods = kube.get("--namespace", SYSTEM_NAMESPACE, "pods")["items"]
    found: dict[str, Any] = next(pod for pod in pods if pod["metadata"]["name"].startswith(OPERATOR))
    return found


def holds(kube: Kube) -> bool:
    return str(lease(kube).get("holderIdentity", "")).startswith(operator_pod(kube)["metadata"]["name"])


def restarts(kube: Kube) -> int:
    return int(operator_pod(kube)["status"]["containerStatuses"][0]["restartCount"])


def test_the_operator_holds_and_renews_it(kube: Kube) -> None:
    assert wait_until(lambda: holds(kube), ADOPTION_SECONDS)
    renewed = lease(kube)["renewTime"]
    assert wait_until(lambda: lease(kube)["renewTime"] != renewed, 10)


def test_a_stolen_lease_ends_the_process_and_the_next_one_takes_it_after_its_duration(kube: Kube) -> None:
    assert wait_until(lambda: holds(kube), ADOPTION_SECONDS)
    before = restarts(kube)
    theft = json.dumps({"spec": {"holderIdentity": "thief"}})
    kube.kubectl("patch", *LEASE, "--type=merge", "--patch", theft)
    assert wait_until(lambda: restarts(kube) == before + 1, 30)
    assert wait_until(lambda: holds(kube), ADOPTION_SECONDS)
    ready(kube)


def test_an_operator_that_ends_in_order_hands_it_over(kube: Kube) -> None:
    assert wait_until(lambda: holds(kube), ADOPTION_SECONDS)
    before = lease(kube)
    name = operator_pod(kube)["metadata"]["name"]
    kube.kubectl("--namespace", SYSTEM_NAMESPACE, "delete", "pod", name)
    assert wait_until(lambda: lease(kube).get("holderIdentity") != before["holderIdentity"], ADOPTION_SECONDS)
    assert wait_until(lambda: holds(kube), ADOPTION_SECONDS)
    ready(kube)
