# SPDX-License-Identifier: Apache-2.0
"""The gateway on the cluster, as people and the network's node use it."""

import base64
from typing import Any

import httpx

from hack.deploy.kube import Kube
from hack.deploy.releases import GATEWAY, NAMESPACE, SYSTEM_NAMESPACE
from hack.toolchain.common import wait_until

REQUEST_SECONDS = 60.0
FORWARD_SECONDS = 30.0
CONNECT_RETRIES = 6
#: Label of the rounds that the network asked for.
NETWORK_LABEL = "poc.gonka.ai/origin=network"


def results_of(kube: Kube) -> httpx.Client:
    """Return a client of what is stored."""
    return _client(kube, GATEWAY, 8080, "token")


def network_of(kube: Kube) -> httpx.Client:
    """Return a client of the network's routes."""
    return _client(kube, f"{GATEWAY}-network", 80, "network-token")


def delete_network_rounds(kube: Kube) -> None:
    """Delete the rounds that the network asked for, and wait until they are gone."""
    kube.kubectl("--namespace", NAMESPACE, "delete", "pocrounds", "--selector", NETWORK_LABEL, limit=150)


def network_rounds(kube: Kube) -> list[dict[str, Any]]:
    """Return the rounds that the network asked for."""
    found: list[dict[str, Any]] = kube.get("--namespace", NAMESPACE, "pocrounds", "--selector", NETWORK_LABEL)["items"]
    return found


def wait_until_forwarded(kube: Kube, name: str) -> None:
    """Wait until the receiver of the round has everything that is stored; fails after a while."""
    with results_of(kube) as client:
        told: dict[str, Any] = {}

        def forwarded() -> bool:
            told.update(client.get(f"/rounds/{NAMESPACE}/{name}/forwarding").json())
            return told.get("backlog") == 0

        assert wait_until(forwarded, FORWARD_SECONDS), f"{name} is not forwarded: {told}"


def _client(kube: Kube, service: str, port: int, token: str) -> httpx.Client:
    address = kube.get("--namespace", SYSTEM_NAMESPACE, "service", service)["spec"]["clusterIP"]
    secret = kube.get("--namespace", SYSTEM_NAMESPACE, "secret", f"{GATEWAY}-tokens")["data"][token]
    headers = {"Authorization": f"Bearer {base64.b64decode(secret).decode()}"}
    # After a rollout the Service refuses connections until kube-proxy knows the new pod. Nothing is sent twice.
    transport = httpx.HTTPTransport(retries=CONNECT_RETRIES, trust_env=False)
    base = f"http://{address}:{port}"
    return httpx.Client(base_url=base, headers=headers, timeout=REQUEST_SECONDS, trust_env=False, transport=transport)
