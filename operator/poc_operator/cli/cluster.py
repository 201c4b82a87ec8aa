# SPDX-License-Identifier: Apache-2.0
"""The API server, with the user's kubeconfig: objects as JSON, and what stands behind its proxy.

Of the kubeconfig the library checks little, and it goes on without a user who cannot log in.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import urllib3
import yaml
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


#: What the library raises for a file that it cannot use: its own exception, and whatever its code runs into.
_UNUSABLE = (ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError, AttributeError)
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

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


class KindMissing(NotFound):
    """The cluster does not know the kind."""


class NamespaceMissing(NotFound):
    """The cluster has no such namespace."""


class Refused(UserError):  # noqa: N818
    """The API server, or what stands behind its proxy, answered with an error; ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def without_number(message: str) -> str:
    """Return an error of the operating system or of TLS without its numbers, which only a programmer reads."""
    return re.sub(r"\[(Errno -?\d+|SSL[^\]]*)\] | \(_ssl\.c:\d+\)", "", message)


class Cluster:
    """One cluster and one namespace. Every method raises UserError if it cannot do what it is for."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace
        self._existing = set[str]()  # namespaces that are not known to be missing

    def get(
        self,
        path: str,
        query: Mapping[str, str] = _NOTHING,
        *,
        headers: Mapping[str, str] = _NOTHING,
        seconds: float = REQUEST_SECONDS,
    ) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON at a path of the API server, which has so many seconds to answer."""
        return _json(self._request("GET", path, query=query, headers=headers, seconds=seconds).data)

    def text(self, path: str, query: Mapping[str, str] = _NOTHING, *, seconds: float = REQUEST_SECONDS) -> bytes:
        """Return what stands at a path of the API server, which has so many seconds to answer."""
        return bytes(self._request("GET", path, query=query, headers=_NOTHING, seconds=seconds).data)

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
        return _json(answer.data)

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
        except KindMissing:
            raise
        except NotFound as error:
            self.expect_namespace(where)
            raise NotFound(
                f'there is no {kind.KIND.kind} "{name}" in the namespace "{where}": '
                f"look with `kubectl get {kind.KIND.plural} -A`"
            ) from error
        return found

    def expect_namespace(self, namespace: str | None = None) -> None:
        """NamespaceMissing if there is no such namespace, as far as the user may know: its lists are just empty."""
        name = namespace or self.namespace
        if name in self._existing:
            return
        try:
            self.get(core(f"namespaces/{name}"))
        except NotFound as error:
            look = "`kubectl get namespaces` lists those that there are"
            raise NamespaceMissing(f'there is no namespace "{name}": use another --namespace; {look}') from error
        except UserError:  # who may not read it, or cannot now, sees what there is in it
            pass
        self._existing.add(name)

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
            raise unreachable(error, self._api.configuration.host) from error
        raise _refusal(method, path, answer.status, text)


def unreachable(error: Exception, server: str) -> UserError:
    """Return why the API server did not answer, without what only a programmer reads."""
    cause: BaseException = error
    while isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        cause = cause.reason
    kind, _, said = str(cause.reason).partition("\n") if isinstance(cause, ApiException) else ("", "", str(cause))
    if kind == "SSLError":  # the library makes its own exception of it, with no status and both in one text
        what = f"there is no secure connection to the API server ({server}: {without_number(said)})"
        return UserError(f"{what}: check the server and its certificate-authority in the kubeconfig", UNREACHABLE)
    why = without_number(said.rpartition(": ")[2]) or type(cause).__name__
    return UserError(
        f"the API server does not answer ({server}: {why}): check the context and the network", UNREACHABLE
    )


def _json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(data)
    except ValueError as error:  # as of a proxy where somebody has to log in
        what = f"the answer is no JSON ({_message(data)[:100]})"
        raise UserError(f"{what}: check that the context's server is an API server", UNREACHABLE) from error


def _refusal(method: str, path: str, status: int, text: bytes) -> UserError:
    message = _message(text) or f"HTTP {status}"
    if status == HTTPStatus.FORBIDDEN:
        return Forbidden(f"you lack a right ({message}): ask for it, or use another context")
    if status == HTTPStatus.NOT_FOUND:
        return _missing(method, path, text, message)
    if "/proxy/" in path:
        return Refused(f"{method} was refused: {message}", status)
    if status == HTTPStatus.UNAUTHORIZED:
        return UserError(f"the API server does not know you ({message}): log in again", FORBIDDEN)
    return Refused(_refused(method, status, message), status)


def _refused(method: str, status: int, message: str) -> str:
    if status == HTTPStatus.CONFLICT and method == "POST":
        return f"{message}: use another name, or delete that one first"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
        return f"the API server cannot answer ({message}): try again in a while"
    return f"the API server refused it ({message}): correct what it names"


def _missing(method: str, path: str, text: bytes, message: str) -> NotFound:
    ours = f"/apis/{API_VERSION}/"
    # Of objects it answers with JSON. It has no such path if it does not know the kind.
    if path.startswith(ours) and not text.lstrip().startswith(b"{"):
        plural = path.removeprefix(ours).split("/")[2 if path.startswith(f"{ours}namespaces/") else 0]
        return KindMissing(f"the cluster has no {plural}: install the operator's chart, or use another context")
    if method == "POST":  # what is missing is where the object should be
        return NotFound(f"{message}: create it, or use another --namespace")
    return NotFound(f"not found ({message}): check the name, the namespace and the context")


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
    """Connect as kubectl would: the option, ``KUBECONFIG``, ``~/.kube/config``, else a pod's service account.

    UserError if the file cannot be used, or its user cannot log in.
    """
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    if kubeconfig is not None and not kubeconfig.is_file():
        raise UserError(f'--kubeconfig: there is no file "{kubeconfig}": name one, or leave the option out')
    file = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        with _no_failed_login():
            api, own = _read(file, context)
    except _UNUSABLE as error:
        asked = context is not None or kubeconfig is not None
        if isinstance(error, ConfigException) and not asked and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _in_pod(namespace)
        remedy = "correct it, or set KUBECONFIG, --kubeconfig or --context"
        raise UserError(f'the kubeconfig "{file}" cannot be used ({_why(error)}): {remedy}') from error
    _check_server(api.configuration.host)
    return Cluster(api, namespace or own)


def _read(file: str, context: str | None) -> tuple[client.ApiClient, str]:
    """Return a client of the API server, and the namespace of the context."""
    api = config.new_client_from_config(config_file=file, context=context, persist_config=False)  # type: ignore[no-untyped-call]
    contexts, active = config.list_kube_config_contexts(config_file=file)  # type: ignore[no-untyped-call]
    chosen = next((one for one in contexts if one["name"] == context), active) if context else active
    api.configuration.retries = False
    return client.ApiClient(api.configuration), str(chosen["context"].get("namespace") or "default")


def _why(error: Exception) -> str:
    if isinstance(error, ConfigException | yaml.YAMLError):
        # Behind a brace the library writes the user's whole entry, with what is secret in it.
        text = " ".join(str(error).partition("{")[0].split())
        return text.removeprefix("Invalid kube-config file. ").removeprefix("Invalid kube-config. ")
    if isinstance(error, OSError):
        return without_number(str(error))
    return "it has something that the plugin does not understand"


@contextmanager
def _no_failed_login() -> Iterator[None]:
    """UserError if the library logs that a login helper failed: it would go on as nobody."""
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(kept)
    if kept.messages:
        what = f"the kubeconfig's user cannot log in ({without_number(kept.messages[0])})"
        raise UserError(
            f"{what}: look whether `kubectl auth whoami` can, and install the helper that it names", FORBIDDEN
        )


class _Kept(logging.Handler):
    """Keeps errors that are logged, instead of writing them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _check_server(server: str) -> None:
    """UserError if the server is no URL: requests would fail in ways that name no cause."""
    try:
        parts = urllib3.util.parse_url(server)
    except urllib3.exceptions.LocationParseError:
        parts = urllib3.util.Url()
    if parts.scheme not in {"http", "https"} or not parts.host:
        what = f'the server "{server}" of the kubeconfig is no URL'
        raise UserError(f"{what}: write it as in https://HOST:PORT, or use another --context")


def _in_pod(namespace: str | None) -> Cluster:
    config.load_incluster_config()  # type: ignore[no-untyped-call]
    return Cluster(client.ApiClient(), namespace or _OWN_NAMESPACE.read_text().strip())
