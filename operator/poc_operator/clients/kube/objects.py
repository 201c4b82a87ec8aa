# SPDX-License-Identifier: Apache-2.0
"""Reading objects of all kinds, writing their status, deleting them; and evicting pods that cannot be helped otherwise.

The status is written against the resource version that was read. A plan made from an outdated object, as by an
operator that has been replaced, is thus refused instead of overwriting a newer one.
"""

import json
import logging
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from pydantic import TypeAdapter, ValidationError

from poc_operator.apis.v1alpha1.conditions import Condition, StoredCondition, merge_conditions
from poc_operator.apis.v1alpha1.fleet import FleetStatus
from poc_operator.apis.v1alpha1.meta import GROUP, VERSION, LabelSelector, Resource
from poc_operator.apis.v1alpha1.schema import ApiModel, aliases
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import EvictionRefused, ObjectGone, StoreUnavailable, UnreadableObject
from poc_operator.clients.kube.connection import REQUEST_SECONDS, api_errors, told_by
from poc_operator.credentials import secrets_of
from poc_operator.observed import PodView

log = logging.getLogger(__name__)

#: Pods of one page of a list: to read so many takes some ten milliseconds, in which nothing else is done.
PAGE_PODS = 250
#: Objects of one page: a round of many slots has half a megabyte.
PAGE_OBJECTS = 20

ResourceT = TypeVar("ResourceT", bound=Resource)
_CONDITIONS = TypeAdapter(list[StoredCondition])


class ObjectStore:
    """The objects of the cluster. Errors are of ``clients.errors``."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, resource: type[ResourceT], namespace: str, name: str) -> ResourceT | None:
        """Return the object as it is now; None if it does not exist; UnreadableObject if it cannot be understood."""
        async with api_errors():
            body: Any = await self._objects.get_namespaced_custom_object(**_key(resource, namespace, name))
            return parse_object(resource, body)
        return None

    async def unserved(self, resources: Iterable[type[Resource]]) -> list[str]:
        """Return the names of those kinds that the API server does not serve, as before their CRDs are installed."""
        served = set[str]()
        async with api_errors():
            answer: Any = await self._objects.get_api_resources(GROUP, VERSION, _request_timeout=REQUEST_SECONDS)
            served = {one.name for one in answer.resources}
        return [f"{one.KIND.plural}.{GROUP}" for one in resources if one.KIND.plural not in served]

    async def list_bodies(self, resource: type[Resource], namespaces: Collection[str]) -> list[Mapping[str, Any]]:
        """Return the objects of these namespaces as the API server has them; without any, of all."""
        async with api_errors():
            return [body for where in (namespaces or (None,)) async for body in self._bodies(resource, where)]
        raise StoreUnavailable(f"the API server knows no {resource.KIND.kind}: install the CRD")

    def _bodies(self, resource: type[Resource], namespace: str | None) -> AsyncIterator[Mapping[str, Any]]:
        objects = self._objects
        if namespace is None:
            listing = partial(objects.list_cluster_custom_object_without_preload_content, **_kind(resource))
        else:
            every = objects.list_namespaced_custom_object_without_preload_content
            listing = partial(every, namespace=namespace, **_kind(resource))
        return _pages(listing, PAGE_OBJECTS)

    async def patch(self, resource: type[Resource], body: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Change fields of an object as it was read; StaleObject if it changed since. Nothing happens if it is gone."""
        metadata = {"resourceVersion": body["metadata"]["resourceVersion"], **changes.get("metadata", {})}
        async with api_errors():
            await self._objects.patch_namespaced_custom_object(
                **_key(resource, body["metadata"]["namespace"], body["metadata"]["name"]),
                body={**changes, "metadata": metadata},
                _content_type="application/merge-patch+json",
            )

    async def list_pods(self, namespace: str, selector: LabelSelector) -> list[PodView]:
        """Return the pods of the namespace that are selected."""
        return await self._list_pods(namespace, label_selector=str(selector))

    async def _list_pods(self, namespace: str, **selector: str) -> list[PodView]:
        async with api_errors():
            return [PodView.parse(body) async for body in self._pods(namespace, selector)]
        return []

    async def pod(self, namespace: str, name: str) -> PodView | None:
        """Return the pod of this name; None if there is none."""
        # The operator may list pods, and needs no other right to read them.
        found = await self._list_pods(namespace, field_selector=f"metadata.name={name}")
        return next(iter(found), None)

    def _pods(self, namespace: str, selector: Mapping[str, str]) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the pods as JSON: the client's own models take 35 times as long to make."""
        listing = partial(
            self._core.list_namespaced_pod_without_preload_content,
            namespace,
            label_selector=selector.get("label_selector"),
            field_selector=selector.get("field_selector"),
            _request_timeout=REQUEST_SECONDS,
        )
        return _pages(listing, PAGE_PODS)

    async def write_status(self, work: Resource, status: WorkStatus | FleetStatus) -> str | None:
        """Replace the object's status; return the version that it has now, None if the API server does not tell.

        StaleObject if the object changed since it was read, ObjectGone if it does not exist.
        """
        metadata = work.metadata
        async with api_errors():
            written: Any = await self._objects.patch_namespaced_custom_object_status(
                **_key(type(work), metadata.namespace, metadata.name),
                body={"metadata": {"resourceVersion": metadata.resource_version}, "status": merge_patch(status)},
                _content_type="application/merge-patch+json",
            )
            version: str | None = written["metadata"].get("resourceVersion")
            return version
        raise ObjectGone(f"there is no {work.KIND.kind} {metadata.namespace}/{metadata.name}")

    async def write_conditions(
        self,
        resource: type[Resource],
        namespace: str,
        name: str,
        conditions: Iterable[Condition],
        *,
        message: str,
        degraded: str,
    ) -> None:
        """Change these conditions, the message and the ``degraded`` column of an object, whatever else stands in it.

        Nothing happens if it is gone. StaleObject if somebody changed it meanwhile.
        """
        async with api_errors():
            key = _key(resource, namespace, name)
            body: Any = await self._objects.get_namespaced_custom_object(**key)
            known = _CONDITIONS.validate_python((body.get("status") or {}).get("conditions") or [])
            merged = merge_conditions(known, conditions)
            await self._objects.patch_namespaced_custom_object_status(
                **key,
                body={
                    "metadata": {"resourceVersion": body["metadata"]["resourceVersion"]},
                    "status": {
                        "conditions": [found.model_dump(mode="json", by_alias=True) for found in merged],
                        "message": message,
                        "degraded": degraded,
                    },
                },
                _content_type="application/merge-patch+json",
            )

    async def namespace_uid(self, name: str) -> str | None:
        """Return the UID of a namespace; None if it does not exist."""
        async with api_errors():
            found = await self._core.read_namespace(name, _request_timeout=REQUEST_SECONDS)
            return found.metadata.uid if found.metadata is not None else None
        return None

    async def config_map_entry(self, namespace: str, name: str, key: str) -> tuple[str, str | None]:
        """Return the version of a ConfigMap and an entry, None if that does not exist.

        LookupError if the ConfigMap does not exist.
        """
        async with api_errors():
            found = await self._core.read_namespaced_config_map(name, namespace, _request_timeout=REQUEST_SECONDS)
            version = found.metadata.resource_version if found.metadata is not None else None
            return version or "", (found.data or {}).get(key)
        raise LookupError(name)

    async def basic_auth(self, namespace: str, name: str) -> BasicAuth:
        """Return the user and the password of a Secret. LookupError if there is none, ValueError if it is unfit."""
        async with api_errors():
            found = await self._core.read_namespaced_secret(name, namespace, _request_timeout=REQUEST_SECONDS)
            return BasicAuth.of_secret(found.type, found.data)
        raise LookupError(name)

    async def pod_token(self, secret: str, namespace: str) -> str | None:
        """Return the key ``token`` of a Secret, the first if it has two; None if there is no such Secret.

        ValueError if it has no such key, or one that no header can have.
        """
        async with api_errors():
            found = await self._core.read_namespaced_secret(secret, namespace, _request_timeout=REQUEST_SECONDS)
            return _token(secret, found.data or {})
        return None

    async def delete(self, work: Resource) -> None:
        """Delete the object as it is known; nothing happens if it is gone.

        StaleObject if somebody has changed it since, as a user who wants to keep it, or if another has its name.
        """
        known = client.V1Preconditions(uid=work.metadata.uid, resource_version=work.metadata.resource_version)
        async with api_errors():
            await self._objects.delete_namespaced_custom_object(
                **_key(type(work), work.metadata.namespace, work.metadata.name),
                body=client.V1DeleteOptions(preconditions=known),
            )

    async def evict_pod(self, pod: PodView) -> None:
        """Let the API server evict the pod; nothing happens if it is gone.

        StaleObject if it was replaced by another of its name. EvictionRefused while a PodDisruptionBudget protects it,
        or if it has two of them, or if the API server refuses the request for another reason.
        """
        options = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid))
        metadata = client.V1ObjectMeta(name=pod.name, namespace=pod.namespace)
        async with api_errors():
            try:
                await self._core.create_namespaced_pod_eviction(
                    pod.name,
                    pod.namespace,
                    body=client.V1Eviction(metadata=metadata, delete_options=options),
                    _request_timeout=REQUEST_SECONDS,
                )
            except ApiException as error:
                message = str(told_by(error.body).get("message", f"HTTP {error.status}: {error.reason}"))
                if _refuses_eviction(error.status, message):
                    raise EvictionRefused(message) from error
                raise


def _refuses_eviction(status: int | None, message: str) -> bool:
    """Whether the API server has understood the request to evict a pod, and does not do it for now."""
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return True
    # A pod with two budgets is no fault of the API server, though it answers so.
    return status == HTTPStatus.INTERNAL_SERVER_ERROR and "PodDisruptionBudget" in message


async def is_gone(store: ObjectStore, pod: PodView) -> bool:
    """Whether a pod of which a watch has told does not exist any more; another may have its name by now."""
    found = await store.pod(pod.namespace, pod.name)
    return found is None or found.uid != pod.uid


def _token(secret: str, data: Mapping[str, str | bytes]) -> str:
    if not data.get("token"):
        raise ValueError(f'Secret "{secret}" has no key "token", or an empty one: set it')
    try:
        first, *_ = secrets_of(b64decode(data["token"], validate=True).decode())
    except (Base64Error, ValueError) as error:
        raise ValueError(f'Secret "{secret}" has a key "token" that holds none: set it') from error
    if not (first.isascii() and first.isprintable()):
        raise ValueError(f'Secret "{secret}" has a key "token" with characters that no header can have: change it')
    return first


async def _pages(listing: Callable[..., Awaitable[Any]], limit: int) -> AsyncIterator[Mapping[str, Any]]:
    """Yield what is listed as JSON, a page of so many after the other."""
    token: str | None = None
    while token != "":
        answer = await listing(limit=limit, _continue=token)
        content = await answer.read()
        if answer.status != HTTPStatus.OK:
            raise ApiException(status=answer.status, reason=answer.reason)
        page = json.loads(content)
        token = page["metadata"].get("continue", "")
        for body in page["items"]:
            yield body


def _kind(resource: type[Resource]) -> dict[str, Any]:
    plural = resource.KIND.plural
    return {"group": GROUP, "version": VERSION, "plural": plural, "_request_timeout": REQUEST_SECONDS}


def _key(resource: type[Resource], namespace: str, name: str) -> dict[str, Any]:
    return {**_kind(resource), "namespace": namespace, "name": name}


def parse_object(resource: type[ResourceT], body: Mapping[str, Any]) -> ResourceT:
    """Build the object from the API server's JSON. UnreadableObject if it cannot be understood."""
    try:
        return resource.parse(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UnreadableObject(f"{field}: {first['msg']}", body) from error


def readable(resource: type[ResourceT], bodies: Iterable[Mapping[str, Any]]) -> Iterator[ResourceT]:
    """Yield the objects that can be understood; the others are logged."""
    for body in bodies:
        try:
            yield parse_object(resource, body)
        except UnreadableObject as error:
            metadata = body["metadata"]
            log.warning("%s %s/%s: %s", resource.KIND.kind, metadata["namespace"], metadata["name"], error)


def merge_patch(status: WorkStatus | FleetStatus) -> dict[str, Any]:
    """Return the status as a JSON merge patch: a field that is unset now becomes null, which deletes it.

    So do fields of objects in it. Lists are replaced.
    """
    return _with_nulls(status, status.stored())


def _with_nulls(model: ApiModel, stored: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {**dict.fromkeys(aliases(type(model)).values()), **stored}
    for name, alias in aliases(type(model)).items():
        value = getattr(model, name)
        if isinstance(value, ApiModel):
            found[alias] = _with_nulls(value, found[alias])
    return found
