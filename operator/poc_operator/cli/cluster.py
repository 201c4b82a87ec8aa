# SPDX-License-Identifier: Apache-2.0
"""The API server, with the user's kubeconfig: objects as JSON, and what stands behind its proxy."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from pydantic import ValidationError

from poc_operator.apis.v1alpha1.meta import API_VERSION, Resource

Object = Mapping[str, Any]
ResourceT = TypeVar("ResourceT", bound=Resource)

#: Seconds for one request; and for the pieces of an export, of which each may take so long.
REQUEST_SECONDS = 15.0
EXPORT_SECONDS = 120.0
#: Objects of one page of a list.
_PAGE = 500
_NOTHING: Mapping[str, str] = MappingProxyType({})

#: Exit codes, beside 0 and 2, which is for a wrong command line.
FAILED, UNREACHABLE, NOT_FOUND, FORBIDDEN = 1, 3, 4, 5


class UserError(Exception):
    """What the user is told, in one sentence with the remedy; ``code`` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class NotFound(UserError):  # noqa: N818 - reads as a state
    """There is no such object."""

    def __init__(self, message: str) -> None:
        super().__init__(message, NOT_FOUND)


class Forbidden(UserError):  # noqa: N818
    """The user lacks a right."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FORBIDDEN)


class Refused(UserError):  # noqa: N818
    """The API server, or what stands behind its proxy, answered with an error; ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """One cluster and one namespace. Every method raises UserError if it cannot do what it is for."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    def get(
        self,
        path: str,
        query: Mapping[str, str] = _NOTHING,
        *,
        headers: Mapping[str, str] = _NOTHING,
        seconds: float = REQUEST_SECONDS,
    ) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON at a path of the API server, which has so many seconds to answer."""
        return json.loads(self._request("GET", path, query=query, headers=headers, seconds=seconds).data)

    def text(self, path: str, query: Mapping[str, str] = _NOTHING) -> bytes:
        """Return what stands at a path of the API server."""
        return bytes(self._request("GET", path, query=query, headers=_NOTHING).data)

    def stream(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Iterator[bytes]:
        """Return what stands at a path piece by piece; UserError if the answer breaks off."""
        answer = self._request("GET", path, query=query, headers=headers, seconds=EXPORT_SECONDS)
        try:
            yield from answer.stream(2**16)
        except urllib3.exceptions.HTTPError as error:
            raise UserError(f"the answer broke off ({error}): try again", UNREACHABLE) from error
        finally:
            answer.release_conn()

    def send(self, method: str, path: str, body: Object, query: Mapping[str, str] = _NOTHING) -> Any:  # noqa: ANN401 - JSON
        """Create (POST), change (PATCH) or replace (PUT) an object, and return it as it is then."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        answer = self._request(method, path, query=query, headers={"Content-Type": kind}, body=body)
        return json.loads(answer.data)

    def items(self, path: str, selector: str = "", fields: str = "") -> list[Object]:
        """Return all objects of a list."""
        found, token = list[Object](), ""
        while True:
            query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(_PAGE), "continue": token}
            page = self.get(path, {key: value for key, value in query.items() if value})
            found += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return found

    def objects(self, kind: type[ResourceT], namespace: str | None) -> list[ResourceT]:
        """Return the objects of a kind, of all namespaces without ``namespace``."""
        return [parsed(kind, body) for body in self.items(collection(kind, namespace))]

    def object(self, kind: type[ResourceT], name: str, namespace: str | None = None) -> ResourceT:
        """Return an object of a kind; NotFound names what there is instead."""
        return parsed(kind, self.body(kind, name, namespace))

    def body(self, kind: type[Resource], name: str, namespace: str | None = None) -> Object:
        """Return an object of a kind as the API server has it; NotFound names what there is instead."""
        where = namespace or self.namespace
        try:
            found: Object = self.get(f"{collection(kind, where)}/{name}")
        except NotFound as error:
            raise NotFound(
                f'there is no {kind.KIND.kind} "{name}" in the namespace "{where}": '
                f"look with `kubectl get {kind.KIND.plural} -A`"
            ) from error
        return found

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Object | None = None,
        seconds: float = REQUEST_SECONDS,
    ) -> urllib3.BaseHTTPResponse:
        sent = self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=dict(headers),
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer: urllib3.BaseHTTPResponse = self._api.call_api(*sent, _request_timeout=(10.0, seconds)).response
            if answer.status < HTTPStatus.BAD_REQUEST:
                return answer
            text = answer.data
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise UserError(f"{unreachable(error)}: check the context and the network", UNREACHABLE) from error
        raise _refusal(method, path, answer.status, text)


def unreachable(error: Exception) -> str:
    """Return why the API server did not answer, without what only a programmer reads."""
    cause: BaseException = error
    while isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        cause = cause.reason
    return f"the API server does not answer ({str(cause).rpartition(': ')[2] or type(cause).__name__})"


def _refusal(method: str, path: str, status: int, text: bytes) -> UserError:
    message = _message(text) or f"HTTP {status}"
    if status == HTTPStatus.UNAUTHORIZED and "/proxy/" not in path:
        return UserError(f"the API server does not know you ({message}): log in again", FORBIDDEN)
    if status == HTTPStatus.FORBIDDEN:
        return Forbidden(f"you lack a right ({message}): ask for it, or use another context")
    if status == HTTPStatus.NOT_FOUND:
        return NotFound(f"not found: {message}")
    return Refused(f"{method} was refused: {message}", status)


def _message(text: bytes) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return " ".join(text.decode(errors="replace").split())[:300]
    if not isinstance(body, dict):
        return str(body)[:300]
    return str(body.get("message") or body.get("detail") or body)[:1000].strip()


def collection(kind: type[Resource], namespace: str | None) -> str:
    """Return the path of a kind's objects."""
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{API_VERSION}{where}/{kind.KIND.plural}"


def core(resource: str, namespace: str | None = None) -> str:
    """Return the path of objects of the core API, such as pods."""
    return f"/api/v1/namespaces/{namespace}/{resource}" if namespace else f"/api/v1/{resource}"


def parsed(kind: type[ResourceT], body: Object) -> ResourceT:
    """Return an object as this version understands it; UserError names the field that it does not."""
    try:
        return kind.parse(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = body["metadata"]["name"]
        field = ".".join(str(part) for part in first["loc"])
        message = f'{kind.KIND.kind} "{name}" is of another version: {field}: {first["msg"]}'
        raise UserError(f"{message}; install the plugin of the operator's version") from error


def connect(context: str | None, namespace: str | None, kubeconfig: Path | None) -> Cluster:
    """Connect as kubectl would: the option, ``KUBECONFIG``, ``~/.kube/config``, else a pod's service account."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    if kubeconfig is not None and not kubeconfig.is_file():
        raise UserError(f'--kubeconfig: there is no file "{kubeconfig}": name one, or leave the option out')
    file = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        api = config.new_client_from_config(config_file=file, context=context, persist_config=False)  # type: ignore[no-untyped-call]
        contexts, active = config.list_kube_config_contexts(config_file=file)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        if context is None and kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _in_pod(namespace)
        message = " ".join(str(error).split())
        raise UserError(
            f"the kubeconfig cannot be used ({message}): set KUBECONFIG, --kubeconfig or --context"
        ) from error
    chosen = next((one for one in contexts if one["name"] == context), active) if context else active
    api.configuration.retries = False
    api = client.ApiClient(api.configuration)
    return Cluster(api, namespace or str(chosen["context"].get("namespace") or "default"))


def _in_pod(namespace: str | None) -> Cluster:
    config.load_incluster_config()  # type: ignore[no-untyped-call]
    own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
    return Cluster(client.ApiClient(), namespace or own)
