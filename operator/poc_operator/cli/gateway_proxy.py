# SPDX-License-Identifier: Apache-2.0
"""The gateway's API, reached through the API server's proxy of its Service, with the token of people.

The API server takes the header Authorization off what it passes on. So the token goes in a header of its own.
"""

import os
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from poc_operator.cli.cluster import (
    FAILED,
    FORBIDDEN,
    REQUEST_SECONDS,
    Cluster,
    Forbidden,
    NotFound,
    Object,
    Refused,
    UserError,
    core,
)
from poc_operator.credentials import GATEWAY_TOKEN_HEADER

#: Label of what belongs to a gateway of our chart, and the name of the port for people.
SELECTOR = "app.kubernetes.io/name=vllm-poc-operator-gateway"
_PORT = "inside"
#: Instead of the Secret: the token itself.
TOKEN_VARIABLE = "POC_GATEWAY_TOKEN"  # noqa: S105 - the name of a variable
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a gateway is: the namespace and the name of its Service, and of its Deployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Forwarding:
    """What a gateway tells of its disk and of one round.

    ``knows_round`` says whether results of the round were delivered to it. ``backlog`` results are still to be sent to
    ``receiver``. ``last_error`` says why it did not take the last ones; empty while it does.
    ``next_try_seconds`` is when the gateway tries again; 0 if that is not known.
    """

    place: Place
    storage_full: bool = False
    knows_round: bool = False
    receiver: str = ""
    backlog: int = 0
    last_error: str = ""
    next_try_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a gateway tells of itself. ``certificate_expires`` is None without TLS at the network's port."""

    storage_full: bool
    certificate_expires: datetime | None


class Unavailable(UserError):  # noqa: N818 - reads as a state
    """A gateway that cannot answer now; ``why`` is that without the remedy, which `check` itself does not name."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: look with `kubectl poc check`", FAILED)
        self.why = why


class Gateway:
    """The gateway of a cluster. Every method raises UserError with the remedy. ``seconds`` limit each answer."""

    def __init__(self, cluster: Cluster, place: Place, token: str, seconds: float = REQUEST_SECONDS) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self.place = place
        self._headers = {GATEWAY_TOKEN_HEADER: token} if token else {}

    def get(self, path: str, query: Mapping[str, str] = _NOTHING) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON of a route such as ``/rounds``."""
        try:
            return self._cluster.get(self._path(path), query, headers=self._headers, seconds=self._seconds)
        except Refused as error:
            raise self._translated(error) from error

    def health(self) -> Health:
        """Return what it tells of itself."""
        told = self.get("/health")
        expires = told.get("certificate_expires")
        return Health(
            storage_full=told.get("storage") == "full",
            certificate_expires=datetime.fromisoformat(expires) if expires else None,
        )

    def forwarding(self, namespace: str, name: str, uid: str | None = None) -> Forwarding:
        """Return how far a round is forwarded, and what keeps it; without any results of it the disk alone is told.

        Without ``uid`` it is the newest round of that name.
        """
        full = self.health().storage_full
        query = {"uid": uid} if uid is not None else _NOTHING
        try:
            told = self.get(f"/rounds/{namespace}/{name}/forwarding", query)
        except NotFound:
            return Forwarding(place=self.place, storage_full=full)
        return Forwarding(
            place=self.place,
            storage_full=full,
            knows_round=True,
            receiver=str(told["receiver"] or ""),
            backlog=int(told["backlog"]),
            last_error=str(told["last_error"] or ""),
            next_try_seconds=float(told.get("next_try_seconds") or 0),
        )

    def undelivered(self, namespace: str | None, limit: int) -> list[tuple[str, str, str]]:
        """Return namespace, name and uid of the newest rounds with results that their receivers have yet to take."""
        query = {"undelivered": "true", "limit": str(limit), **({"namespace": namespace} if namespace else {})}
        return [(one["namespace"], one["name"], one["uid"]) for one in self.get("/rounds", query)["rounds"]]

    def stream(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        """Return the answer of a route piece by piece."""
        try:
            yield from self._cluster.stream(self._path(path), query, self._headers)
        except Refused as error:
            raise self._translated(error) from error

    def _path(self, path: str) -> str:
        return f"{core('services', self.place.namespace)}/{self.place.name}:{_PORT}/proxy{path}"

    def _translated(self, error: Refused) -> UserError:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return Unavailable(f"the gateway {self.place} cannot answer ({error})")
        if error.status == HTTPStatus.UNAUTHORIZED:
            why = f"the gateway {self.place} does not take the token ({error})"
            return UserError(f"{why}: put the one of its Secret into {TOKEN_VARIABLE}, or unset that", FORBIDDEN)
        return error


def find(cluster: Cluster, option: str | None, seconds: float = REQUEST_SECONDS) -> Gateway:
    """Return the gateway that ``--gateway NAMESPACE/NAME`` names; without it the only one of the cluster.

    Each of its answers may take so many seconds.
    """
    place = parse_place(option) if option else only(places(cluster))
    return Gateway(cluster, place, os.environ.get(TOKEN_VARIABLE) or _token(cluster, place), seconds)


def parse_place(text: str) -> Place:
    """Return the place that ``NAMESPACE/NAME`` names; UserError if it is no such text."""
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise UserError(
            f'--gateway: "{text}" must be NAMESPACE/NAME of the gateway\'s Service, as in poc-system/gateway', 2
        )
    return Place(namespace=namespace, name=name)


def places(cluster: Cluster) -> list[Place]:
    """Return the gateways of the cluster."""
    try:
        found = cluster.items(core("services"), SELECTOR)
    except Forbidden as error:
        why = "you may not list the Services of all namespaces"
        raise Forbidden(f"{why}: name the gateway with --gateway NAMESPACE/NAME") from error
    return [
        Place(namespace=body["metadata"]["namespace"], name=body["metadata"]["name"])
        for body in found
        if any(port.get("name") == _PORT for port in body["spec"].get("ports") or [])
    ]


def only(found: Sequence[Place]) -> Place:
    """Return the one place; UserError if there are none or several."""
    if not found:
        raise NotFound(
            "no gateway was found: install the chart with gateway.enabled, "
            "or name its Service with --gateway NAMESPACE/NAME"
        )
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise UserError(f"there are several gateways ({names}): name one with --gateway NAMESPACE/NAME", 2)
    return found[0]


def token_secret(deployment: Object) -> tuple[str, str] | None:
    """Return name and key of the Secret with the token of people, as the gateway's Deployment has it."""
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        for variable in container.get("env") or []:
            secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
            if variable["name"] == TOKEN_VARIABLE and secret:
                return str(secret["name"]), str(secret["key"])
    return None


def _token(cluster: Cluster, place: Place) -> str:
    """Return the token; empty if the gateway asks for none."""
    try:
        named = token_secret(cluster.get(f"/apis/apps/v1/namespaces/{place.namespace}/deployments/{place.name}"))
        if named is None:
            return ""
        name, key = named
        data = cluster.get(f"{core('secrets', place.namespace)}/{name}").get("data") or {}
    except Forbidden as error:
        why = f"the gateway's token cannot be read ({error})"
        raise UserError(f"{why}; or set {TOKEN_VARIABLE}", FORBIDDEN) from error
    # It may have two values while it is changed: either is right.
    return b64decode(data.get(key, "")).decode().split(",")[0].strip()
