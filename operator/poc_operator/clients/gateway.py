# SPDX-License-Identifier: Apache-2.0
"""Typed calls to the gateway, which collects what pods deliver. Each has a time limit, each answer a size limit."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Self

import aiohttp
from pydantic import ValidationError
from yarl import URL

from poc_operator.clients.errors import GatewayError
from poc_operator.clients.http import read_bounded
from poc_operator.credentials import VALID_SECONDS, Grant, sign
from poc_operator.observed import CollectedRound, Decision, RivalNonce, RivalPage
from vllm_poc.wire.answers import ErrorResponse
from vllm_poc.wire.callbacks import GATEWAY_USER
from vllm_poc.wire.messages import MAX_TEXT

#: Seconds for one question.
ANSWER_SECONDS = 5.0

#: A thousand slots take about 150 KiB, ten thousand proofs of 12 numbers about 600 KiB.
MAX_ANSWER_BYTES = 4 * 2**20

#: Nonces with rivals that are asked for at once.
MOST_RIVALS = 100


class GatewayClient:
    """Client of one gateway; one pooled session. Its errors are GatewayError.

    ``token`` is the operator's for its questions, ``key`` signs what pods deliver with; None where the gateway asks for
    nothing.
    """

    def __init__(self, url: str, token: str | None = None, key: str | None = None) -> None:
        self._base = URL(url)
        self.key = key
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def callback_url(self, namespace: str, name: str, uid: str) -> str:
        """Return where the round's pods deliver to, without the credential of any of them."""
        return str(self._base / "callbacks" / namespace / name / uid)

    def signed(self, url: str, grant: Grant) -> str:
        """Return the callback address for one pod: with its credential, if the gateway asks for one."""
        if self.key is None:
            return url
        expires = int(time.time()) + VALID_SECONDS
        return str(URL(url).with_user(GATEWAY_USER).with_password(sign(self.key, grant, expires)))

    async def progress(self, namespace: str, name: str, uid: str) -> CollectedRound | None:
        """Return what is stored of the round; None if nothing is yet."""
        body = await self._get(self._round(namespace, name) / "progress", {"uid": uid})
        if body is None:
            return None
        try:
            collected = CollectedRound.model_validate_json(body)
        except ValidationError as error:
            raise self._not_understood(error) from error
        if collected.uid != uid:
            raise GatewayError(f"gateway {self._base}: the answer is about round {collected.uid} instead of {uid}")
        return collected if collected.slots or collected.limit_reached else None

    async def sample(self, namespace: str, name: str, nonces: int, seed: str) -> bytes | None:
        """Return ``nonces`` results of a round as a JSON list of proofs; None if nothing of it is stored."""
        return await self._get(self._round(namespace, name) / "sample", {"nonces": str(nonces), "seed": seed})

    async def rivals(self, namespace: str, name: str, uid: str) -> Sequence[RivalNonce]:
        """Return the first nonces of a round with several results of which nobody knows which is honest."""
        body = await self._get(self._round(namespace, name) / "rivals", {"uid": uid, "limit": str(MOST_RIVALS)})
        try:
            return RivalPage.model_validate_json(body).rivals if body is not None else ()
        except ValidationError as error:
            raise self._not_understood(error) from error

    async def decide(self, namespace: str, name: str, uid: str, decisions: Sequence[Decision]) -> None:
        """Tell which results are honest; a decision that was made already stays."""
        told = {"uid": uid, "decisions": [one.model_dump(mode="json") for one in decisions]}
        url = self._round(namespace, name) / "rivals"
        await self._read(self._session.post(url, json=told, allow_redirects=False))

    def _round(self, namespace: str, name: str) -> URL:
        return self._base / "rounds" / namespace / name

    async def _get(self, url: URL, query: Mapping[str, str]) -> bytes | None:
        return await self._read(self._session.get(url.with_query(query), allow_redirects=False))

    async def _read(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> bytes | None:
        try:
            async with request as response:
                body = await read_bounded(response, MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise GatewayError(f"gateway {self._base}: no answer within {ANSWER_SECONDS:g} s") from error
        except aiohttp.ClientError as error:
            raise GatewayError(f"gateway {self._base}: {error or type(error).__name__}") from error
        if body is None:
            raise GatewayError(f"gateway {self._base}: the answer exceeds {MAX_ANSWER_BYTES} bytes")
        if response.status == HTTPStatus.NOT_FOUND and _is_error(body):
            return None
        if response.status != HTTPStatus.OK:
            raise self._refused(response.status, body)
        return body

    def _refused(self, status: int, body: bytes) -> GatewayError:
        detail = f": {_detail(body)}" if _is_error(body) else ""
        if status == HTTPStatus.UNAUTHORIZED:
            detail += "; give operator and gateway the same POC_GATEWAY_OPERATOR_TOKEN"
        if status == HTTPStatus.NOT_FOUND:
            detail += "; --gateway-url leads to something that is no gateway"
        return GatewayError(f"gateway {self._base}: HTTP {status}{detail}")

    def _not_understood(self, error: ValidationError) -> GatewayError:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        return GatewayError(f"gateway {self._base}: not a gateway's answer: {field}: {first['msg']}"[:MAX_TEXT])


def _is_error(body: bytes) -> bool:
    return bool(_detail(body))


def _detail(body: bytes) -> str:
    try:
        return ErrorResponse.model_validate_json(body).detail
    except ValidationError:
        return ""
