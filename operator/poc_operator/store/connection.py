# SPDX-License-Identifier: Apache-2.0
"""The connection to the API server, in a pod or with the user's kubeconfig."""

import os
from pathlib import Path

from kubernetes.aio import client, config


def _own_namespace() -> str:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()


async def connect() -> tuple[client.ApiClient, str]:
    """Connect as the pod's service account, or with the user's kubeconfig outside a cluster.

    Return the client, and the namespace that is ours: the pod's, or the kubeconfig's.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
        return client.ApiClient(), _own_namespace()
    await config.load_kube_config()  # type: ignore[no-untyped-call]
    _, active = config.list_kube_config_contexts()  # type: ignore[no-untyped-call]
    return client.ApiClient(), str(active["context"].get("namespace") or "default")
