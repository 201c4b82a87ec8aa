# SPDX-License-Identifier: Apache-2.0
"""The objects of fleets in the API server: listed by their label, applied and deleted; and what fleets are resolved by.

Server-side apply sets what the operator cares about, and takes back what others have made of it. What others have set
beside it stays. The objects are plain JSON: there are too many fields for models of them.
"""

import asyncio
import json
import secrets
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from poc_operator.apis.v1alpha1.fleet_pod import PRODUCT_LABEL
from poc_operator.apis.v1alpha1.meta import (
    COMPONENT,
    FLEET_LABEL,
    GROUP,
    GROUP_INDEX_LABEL,
    GROUPS_API_VERSION,
    GROUPS_KIND,
    GROUPS_LABEL,
    GROUPS_REVISION_LABEL,
)
from poc_operator.clients.errors import ObjectInvalid, StaleObject, StoreForbidden, StoreUnavailable
from poc_operator.clients.kube.connection import REQUEST_SECONDS, api_errors, told_by

Object = Mapping[str, Any]

#: Label of ConfigMaps with presets.
PRESETS_SELECTOR = f"{GROUP}/presets=true"
_APPLY = "application/apply-patch+yaml"
#: Without the specs of Kubernetes nodes, which are long.
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE = 500
_INVALID = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)

#: APIs that a cluster need not have: of Prometheus Operator, and of LeaderWorkerSet.
_MONITORING = "/apis/monitoring.coreos.com/v1"
_GROUPS = f"/apis/{GROUPS_API_VERSION}"

#: Kind of each object of a fleet: the path of its API, and its plural.
KINDS: Mapping[str, tuple[str, str]] = {
    "PodMonitor": (_MONITORING, "podmonitors"),
    GROUPS_KIND: (_GROUPS, "leaderworkersets"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Service": ("/api/v1", "services"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Job": ("/apis/batch/v1", "jobs"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
}


_OPTIONAL = frozenset({"PodMonitor", GROUPS_KIND})
#: Selects the StatefulSets of leaders, which LeaderWorkerSets make.
_LEADERS = f"{GROUPS_LABEL},!{GROUP_INDEX_LABEL}"


class FleetObjects:
    """Reads and writes the objects of fleets. Errors are of ``clients.errors``."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        """``namespace`` is the operator's own, where ConfigMaps with presets are."""
        self._api = api
        self._namespace = namespace
        self._known = set[str]()  # those kinds of _OPTIONAL that the cluster knows

    async def list_all(self, namespaces: Collection[str]) -> list[Object]:
        """Return all objects with a fleet's label in these namespaces; without any, in all."""
        kinds = self.kinds
        lists = await asyncio.gather(
            *(self._list(kind, namespace) for kind in kinds for namespace in (namespaces or (None,)))
        )
        if GROUPS_KIND in kinds:
            # After the LeaderWorkerSets: what one of them tells to have seen to is to be seen here.
            lists += [await self._list("StatefulSet", one, _LEADERS) for one in (namespaces or (None,))]
        return [body for found in lists for body in found]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that are listed: those that every cluster has, and those that this one is known to have."""
        return frozenset(KINDS.keys() - _OPTIONAL | self._known)

    async def pod_monitors(self) -> bool:
        """Return whether the cluster knows PodMonitors. They are listed from then on."""
        return await self._knows("PodMonitor")

    async def leader_worker_sets(self) -> bool:
        """Return whether the cluster knows LeaderWorkerSets. They and their leaders' are listed from then on."""
        return await self._knows(GROUPS_KIND)

    async def _knows(self, kind: str) -> bool:
        """Return whether the cluster knows a kind. Until it answers the kind is listed as before: what other fleets
        have of it is not gone."""
        try:
            found = await self._request("GET", KINDS[kind][0])
        except (LookupError, StoreForbidden):
            found = {}
        knows = any(one["kind"] == kind for one in found.get("resources") or [])
        (self._known.add if knows else self._known.discard)(kind)
        return knows

    async def _list(self, kind: str, namespace: str | None, selector: str = FLEET_LABEL) -> list[Object]:
        api, plural = KINDS[kind]
        where = f"/namespaces/{namespace}" if namespace is not None else ""
        try:
            found = await self._list_pages(f"{api}{where}/{plural}", selector)
        except LookupError:
            if kind not in _OPTIONAL:
                raise
            return []  # its CRD was deleted meanwhile
        return [_typed(kind, body) for body in found]

    async def _list_pages(self, path: str, selector: str, accept: str = "application/json") -> list[Object]:
        found, token = list[Object](), ""
        while True:
            query = {"labelSelector": selector, "limit": str(_PAGE), "continue": token}
            page = await self._request("GET", path, accept=accept, query=query)
            found += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return found

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object; None if it does not exist."""
        try:
            return _typed(kind, await self._request("GET", _path(kind, namespace, name)))
        except LookupError:
            return None

    async def apply(self, body: Object) -> Object:
        """Set the object's fields as they are wanted, and return the object as it is then.

        ObjectInvalid if the API server refuses it, which says why.
        """
        kind, metadata = body["kind"], body["metadata"]
        path = _path(kind, metadata["namespace"], metadata["name"])
        query = {"fieldManager": COMPONENT, "force": "true"}
        try:
            return _typed(kind, await self._request("PATCH", path, body=body, content=_APPLY, query=query))
        except LookupError as error:
            raise StoreUnavailable(f'namespace "{metadata["namespace"]}" does not exist any more') from error

    async def delete(self, body: Object) -> None:
        """Delete an object that was read, and afterwards what it owns. Another one of its name stays."""
        kind, metadata = body["kind"], body["metadata"]
        path = _path(kind, metadata["namespace"], metadata["name"])
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": metadata["uid"]},
            # Jobs of batch/v1 would leave their pods behind.
            "propagationPolicy": "Background",
        }
        with suppress(LookupError, StaleObject):
            await self._request("DELETE", path, body=options, content="application/json")

    async def template(self, namespace: str, revision: str) -> Object | None:
        """Return the pods' template of a StatefulSet's revision; None if there is no such revision any more.

        Of a StatefulSet of leaders it is the field of the LeaderWorkerSet that has both templates, for as long as that
        keeps its own revision.
        """
        try:
            found = await self._request("GET", f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions/{revision}")
        except LookupError:
            return None
        template: Object = found["data"]["spec"]["template"]
        key = (template["metadata"].get("labels") or {}).get(GROUPS_REVISION_LABEL)
        both = await self._group_template(namespace, key) if key is not None else None
        return both or template

    async def _group_template(self, namespace: str, key: str) -> Object | None:
        """Return the templates of a LeaderWorkerSet's revision, as the field of its spec that has both."""
        path = f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"
        found = await self._list_pages(path, f"{GROUPS_REVISION_LABEL}={key}")
        of_sets = [body["data"]["spec"] for body in found if "leaderWorkerTemplate" in (body["data"].get("spec") or {})]
        return of_sets[-1]["leaderWorkerTemplate"] if of_sets else None

    async def ensure_token(self, namespace: str, name: str) -> bool:
        """Make the Secret with the token of the namespace's pods, unless there is one: it is never changed.

        Return whether it was made.
        """
        path = f"/api/v1/namespaces/{namespace}/secrets"
        try:
            await self._request("GET", f"{path}/{name}")
        except LookupError:
            token = b64encode(secrets.token_urlsafe(32).encode()).decode()
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": COMPONENT}},
                "data": {"token": token},
            }
            try:
                await self._request("POST", path, body=body, content="application/json")
            except StaleObject:  # another has made it meanwhile
                return False
            return True
        return False

    async def products(self) -> Sequence[str] | None:
        """Return the GPU products of the cluster's Kubernetes nodes; None if the operator may not read them."""
        try:
            nodes = await self._list_pages("/api/v1/nodes", PRODUCT_LABEL, _METADATA_ONLY)
        except StoreForbidden:
            return None
        return sorted({node["metadata"]["labels"][PRODUCT_LABEL] for node in nodes})

    async def node(self, name: str) -> Object | None:
        """Return a Kubernetes node; None if there is none. StoreForbidden if the operator may not read it.

        It may list nodes, and this is a list of one.
        """
        page = await self._request("GET", "/api/v1/nodes", query={"fieldSelector": f"metadata.name={name}"})
        return next(iter(page.get("items") or ()), None)

    async def presets(self) -> list[tuple[str, str, str]]:
        """Return the entries of ConfigMaps with presets, as (ConfigMap, key, text). StoreForbidden if it may not."""
        path = f"/api/v1/namespaces/{self._namespace}/configmaps"
        found = await self._list_pages(path, PRESETS_SELECTOR)
        return [
            (body["metadata"]["name"], key, text) for body in found for key, text in (body.get("data") or {}).items()
        ]

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        content: str | None = None,
        accept: str = "application/json",
        query: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:  # noqa: ANN401 - JSON
        """Return the answer's JSON. LookupError if there is no such object."""
        headers = {"Accept": accept} | ({"Content-Type": content} if content is not None else {})
        async with api_errors():
            told = await self._api.param_serialize(
                method,
                path,
                query_params=[(name, value) for name, value in query.items() if value],
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            answer: Any = await self._api.call_api(*told, _request_timeout=REQUEST_SECONDS, _preload_content=False)
            text = await answer.read()
            if answer.status in _INVALID:
                raise ObjectInvalid(_message(text, answer.reason))
            if answer.status == HTTPStatus.NOT_FOUND:
                raise LookupError(path)
            if answer.status >= HTTPStatus.BAD_REQUEST:
                raise ApiException(status=answer.status, reason=_message(text, answer.reason))
            return json.loads(text)


def _path(kind: str, namespace: str, name: str) -> str:
    api, plural = KINDS[kind]
    return f"{api}/namespaces/{namespace}/{plural}/{name}"


def _typed(kind: str, body: Object) -> Object:
    """Return the object with its type, which the items of a list do not have."""
    api, _ = KINDS[kind]
    return {**body, "kind": kind, "apiVersion": api.removeprefix("/apis/").removeprefix("/api/")}


def _message(text: bytes, reason: str) -> str:
    return str(told_by(text).get("message", reason))
