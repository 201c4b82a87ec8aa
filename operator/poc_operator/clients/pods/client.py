# SPDX-License-Identifier: Apache-2.0
"""Typed calls to one pod. Every call has a time limit, every answer a size limit."""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Protocol, Self, TypeVar

import aiohttp
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from yarl import URL

from poc_operator.clients.errors import NotAPodOfOurs, PodBusy, PodError, PodRefused, PodTimeout, PodUnreachable
from poc_operator.clients.http import read_bounded
from poc_operator.clients.pods import reference_pods
from poc_operator.clients.pods.reference_pods import Command, PodVersions, Status
from poc_operator.observed import UNAUTHORIZED
from vllm_poc.wire.answers import ErrorResponse, GpusResponse
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse
from vllm_poc.wire.messages import API_PREFIX, MAX_TEXT, ExtendRequest, InitGenerateRequest, LeaseRenewal

#: A status with its lists left out is about 1 KiB; no state or command is near this.
MAX_BODY_BYTES = 64 * 2**10

#: The distances of 1 000 nonces take about 60 KiB; no result is near this.
MAX_RESULT_BYTES = 1024 * 2**10

#: The metrics of a vLLM server take some 100 KiB.
MAX_METRICS_BYTES = 4 * 2**20

#: Connections of a client unless it is told another number.
CONNECTIONS = 600

#: Seconds for a status poll: a pod that needs longer counts as not answering.
STATUS_SECONDS = 5.0

#: Seconds for a start: the pod may have to wait for the forward pass in flight.
START_SECONDS = 30.0

#: Seconds for a stop: the pod flushes its results first, 30 s at most.
STOP_SECONDS = 60.0

#: Seconds for named nonces, which may have to wait for chat. A large model computes a few of them per second.
GENERATE_SECONDS = 300.0

Answer = TypeVar("Answer")


class _DownloadProgress(BaseModel):
    """Bytes of a model that are there, and all of them."""

    done: Annotated[int, Field(ge=0)]
    total: Annotated[int, Field(ge=0)]


_STATUS: TypeAdapter[Status] = TypeAdapter(Status)

_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)

_VERSIONS: TypeAdapter[PodVersions] = TypeAdapter(PodVersions)

_GPUS: TypeAdapter[GpusResponse] = TypeAdapter(GpusResponse)

_PROGRESS: TypeAdapter[_DownloadProgress] = TypeAdapter(_DownloadProgress)

_RESULT: TypeAdapter[GeneratedResponse | ValidatedResponse] = TypeAdapter(GeneratedResponse | ValidatedResponse)


#: Stops that are under way, of all clients of this process, by the pod's address.
_STOPPING: dict[str, asyncio.Event] = {}


class ClientOf(Protocol):
    """Has a client for the pods of each namespace. Errors are of ``clients.errors``."""

    async def of(self, namespace: str) -> "PodClient":
        """Return the client for the pods of a namespace. PodUnreachable while it is not known which token they get."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def new_session(connections: int) -> aiohttp.ClientSession:
    """Return a session for pods with so many connections at most."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections), trust_env=False)


class PodClient:
    """REST client for pods that get the same token, if any. Errors are of ``clients.errors``.

    A ``session`` is used together with other clients, and closed by who made it.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        connections: int = CONNECTIONS,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._owns_session = session is None
        self._session = session or new_session(connections)

    async def of(self, namespace: str) -> Self:
        """Return this client: it sends the pods of all namespaces the same."""
        assert namespace  # noqa: S101 - as every pod has one
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, unless they are used together with other clients."""
        if self._owns_session:
            await self._session.close()

    async def status(self, base: str, renewal: LeaseRenewal | None = None) -> Status:
        """Return the pod's state and counters, without the lists of valid nonces, and renew a lease if told to."""
        query = renewal.model_dump(exclude_none=True) if renewal is not None else {}
        url = URL(f"{base}/status").with_query({"lists": "false", **query})
        return await self._call("GET", url, STATUS_SECONDS, _STATUS)

    async def versions(self, base: str) -> PodVersions:
        """Return what runs in the pod."""
        return await self._call("GET", URL(f"{base}/versions"), STATUS_SECONDS, _VERSIONS)

    async def gpus(self, base: str) -> GpusResponse:
        """Return the pod's GPUs. NotAPodOfOurs from pods that do not tell of them."""
        return await self._call("GET", URL(f"{base}/gpus"), STATUS_SECONDS, _GPUS)

    async def metrics(self, base: str, names: Sequence[str] = ()) -> str:
        """Return the exposition of vLLM's own metrics; with ``names`` of these series at least."""
        # Servers that do not know the parameter tell all.
        url = URL(base.removesuffix(API_PREFIX) + "/metrics").with_query([("name[]", name) for name in names])
        status, body = await self._exchange("GET", url, STATUS_SECONDS, None, MAX_METRICS_BYTES)
        if status != HTTPStatus.OK:
            raise NotAPodOfOurs(f"HTTP {status} to a request for metrics")
        return body.decode(errors="replace")

    async def download_percent(self, host: str, port: int) -> int:
        """Return how much of a model a download's container has, in percent: 100 only when it has ended."""
        url = URL.build(scheme="http", host=host, port=port, path="/")
        told = await self._call("GET", url, STATUS_SECONDS, _PROGRESS)
        return min(99, 100 * told.done // told.total) if told.total else 0

    async def start(self, base: str, request: InitGenerateRequest) -> Command:
        """Start a slot; safe to repeat, since the request carries the round's id.

        A stop of the pod that is under way comes first: a reference pod says that it is idle while its last passes
        still run, and what begins beside them comes out wrong.
        """
        if (stopping := _STOPPING.get(base)) is not None:
            await stopping.wait()
        body = request.model_dump(mode="json", exclude_none=True)
        return await self._call("POST", URL(f"{base}/init/generate"), START_SECONDS, _COMMAND, body)

    async def extend(self, base: str, request: ExtendRequest) -> Command:
        """Let a round compute on; PodBusy if the pod does not generate it."""
        return await self._call("POST", URL(f"{base}/extend"), START_SECONDS, _COMMAND, request.model_dump())

    async def stop(self, base: str, round_id: str | None, *, preempted_by: str | None = None) -> Command:
        """Stop the round, unless the pod computes another one by now; without an id, whatever it computes.

        Results are flushed first. ``preempted_by`` names the round that the pod is for; reference pods do not tell it.
        """
        told = {"round_id": round_id, "preempted_by": preempted_by}
        url = URL(f"{base}/stop").with_query({name: text for name, text in told.items() if text is not None})
        stopped = _STOPPING[base] = asyncio.Event()
        try:
            return await self._call("POST", url, STOP_SECONDS, _COMMAND)
        finally:
            stopped.set()
            if _STOPPING.get(base) is stopped:
                del _STOPPING[base]

    async def generate(self, base: str, request: GenerateRequest) -> GeneratedResponse | ValidatedResponse:
        """Compute named nonces. The pod drops the work when this call is cancelled."""
        body = request.model_dump(mode="json", exclude_none=True)
        url = URL(f"{base}/generate")
        return await self._call("POST", url, GENERATE_SECONDS, _RESULT, body, limit=MAX_RESULT_BYTES)

    async def _call(
        self,
        method: str,
        url: URL,
        seconds: float,
        answer: TypeAdapter[Answer],
        body: object | None = None,
        *,
        limit: int = MAX_BODY_BYTES,
    ) -> Answer:
        return _parse(*await self._exchange(method, url, seconds, body, limit), answer)

    async def _exchange(
        self, method: str, url: URL, seconds: float, body: object | None, limit: int
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        call = self._session.request(
            method, url, json=body, headers=self._headers, timeout=timeout, allow_redirects=False
        )
        try:
            async with call as response:
                return response.status, await _read(response, limit)
        except TimeoutError as error:
            raise PodTimeout(f"no answer within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise PodUnreachable(str(error) or type(error).__name__) from error


def base_url(host: str, port: int) -> str:
    """Return the address of a pod's PoC routes."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{API_PREFIX}"


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = await read_bounded(response, limit)
    if body is None:
        raise NotAPodOfOurs(f"the answer exceeds {limit} bytes")
    return body


def _parse(status: int, body: bytes, answer: TypeAdapter[Answer]) -> Answer:
    if status != HTTPStatus.OK:
        raise _error(status, body)
    try:
        return answer.validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])  # the first says whose answer it was taken for
        raise NotAPodOfOurs(f"not an answer of the PoC protocol: {field}: {first['msg']}"[:MAX_TEXT]) from error


def _error(status: int, body: bytes) -> PodError:
    try:
        answer = ErrorResponse.model_validate_json(body)
    except ValidationError:
        if status == HTTPStatus.NOT_FOUND:
            return NotAPodOfOurs("HTTP 404: the server has no PoC routes; start vLLM with --enable-poc")
        return reference_pods.refusal(status, body) or NotAPodOfOurs(f"HTTP {status}{_excerpt(body)}")
    if answer.reason == "RoundConflict":
        return PodBusy(answer.reason, answer.detail)
    prefix = f"{UNAUTHORIZED}: " if status == HTTPStatus.UNAUTHORIZED else ""
    return PodRefused(answer.reason, f"{prefix}{answer.detail}")


#: So many characters of an answer that nobody expected are told.
_EXCERPT = 120


def _excerpt(body: bytes) -> str:
    text = reference_pods.without_addresses(body.decode(errors="replace"))
    return f": {text[:_EXCERPT]}" if text else " without an explanation"
