# SPDX-License-Identifier: Apache-2.0
"""The connection to the API server, in a pod or with the user's kubeconfig."""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from poc_operator.clients.errors import StaleObject, StoreForbidden, StoreUnavailable


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


#: Seconds for one request to the API server.
REQUEST_SECONDS = 15.0


def told_by(body: str | bytes | None) -> Mapping[str, Any]:
    """Return the Status that the API server answers errors with; it has a ``message``. Empty if it is none."""
    try:
        status = json.loads(body or "")
    except ValueError:
        return {}
    return status if isinstance(status, dict) and "message" in status else {}


@asynccontextmanager
async def api_errors() -> AsyncIterator[None]:
    """Translate the client's errors; a missing object is no error."""
    try:
        yield
    except ApiException as error:
        if error.status == HTTPStatus.CONFLICT:
            raise StaleObject(error.reason) from error
        if error.status == HTTPStatus.FORBIDDEN:
            raise StoreForbidden(f"HTTP {error.status}: {error.reason}") from error
        if error.status != HTTPStatus.NOT_FOUND:
            raise StoreUnavailable(f"HTTP {error.status}: {error.reason}") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise StoreUnavailable(str(error) or type(error).__name__) from error
