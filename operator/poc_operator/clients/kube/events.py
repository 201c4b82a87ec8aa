# SPDX-License-Identifier: Apache-2.0
"""Events on objects that no handler of kopf is about: pods, and rounds that have no loop."""

import logging
from datetime import UTC, datetime
from uuid import uuid4

from kubernetes.aio import client

from poc_operator.apis.v1alpha1.meta import API_VERSION, COMPONENT, Kind
from poc_operator.apis.v1alpha1.schema import shorten
from poc_operator.clients.errors import StoreError
from poc_operator.clients.kube.connection import REQUEST_SECONDS, api_errors
from poc_operator.observed import PodView

log = logging.getLogger(__name__)


class EventPoster:
    """Posts Events. One that the API server does not take is logged and given up, as every program does."""

    def __init__(self, api: client.ApiClient) -> None:
        self._core = client.CoreV1Api(api)

    async def post_on_pod(self, pod: PodView, reason: str, message: str) -> None:
        """Post a warning on a pod."""
        await self._post(pod.namespace, _reference("v1", "Pod", pod.namespace, pod.name, pod.uid), reason, message)

    async def post_on_object(
        self, kind: Kind, namespace: str, name: str, uid: str, reason: str, message: str, *, warning: bool = True
    ) -> None:
        """Post an Event on an object of ours."""
        about = _reference(API_VERSION, kind.kind, namespace, name, uid)
        await self._post(namespace, about, reason, message, kind="Warning" if warning else "Normal")

    async def _post(
        self, namespace: str, about: client.V1ObjectReference, reason: str, message: str, *, kind: str = "Warning"
    ) -> None:
        now = datetime.now(UTC)
        event = client.CoreV1Event(
            metadata=client.V1ObjectMeta(name=f"{about.name}.{uuid4().hex[:16]}", namespace=namespace),
            involved_object=about,
            type=kind,
            reason=reason,
            message=shorten(message),
            count=1,
            first_timestamp=now,
            last_timestamp=now,
            source=client.V1EventSource(component=COMPONENT),
            reporting_component=COMPONENT,
        )
        try:
            async with api_errors():
                await self._core.create_namespaced_event(namespace, event, _request_timeout=REQUEST_SECONDS)
        except StoreError as error:
            log.warning("Event %s on %s %s/%s: %s", reason, about.kind, about.namespace, about.name, error)


def _reference(api_version: str, kind: str, namespace: str, name: str, uid: str) -> client.V1ObjectReference:
    return client.V1ObjectReference(api_version=api_version, kind=kind, namespace=namespace, name=name, uid=uid)
