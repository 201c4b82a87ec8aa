# SPDX-License-Identifier: Apache-2.0
"""Pods that answer polls with nonsense: the round survives them, its totals stay true, and the poll's time holds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.clients.pods import client as podapi
from poc_operator.clients.pods.client import PodClient
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import AsgiApp, RoundFleet
from tests.wire.test_round import assert_nothing_lost_nothing_twice, complete, computes

HONEST, LIAR = "127.0.0.1", "127.0.0.2"


class Liar:
    """A pod whose status answers can be changed: fields of it, the whole body, its HTTP status, its pace."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self.fields: dict[str, Any] = {}
        self.body: bytes | None = None
        self.code = 200
        self.drips = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        """Serve; change what ``GET status`` answers."""
        lies = self.fields or self.body is not None or self.code != 200 or self.drips
        if scope["type"] != "http" or not scope["path"].endswith("/status") or not lies:
            await self._app(scope, receive, send)
            return
        body = (
            self.body if self.body is not None else json.dumps(await self._true(scope, receive) | self.fields).encode()
        )
        headers = [(b"location", b"http://127.0.0.1:1/")]
        await send({"type": "http.response.start", "status": self.code, "headers": headers})
        while self.drips:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": body})

    async def _true(self, scope: Any, receive: Any) -> dict[str, Any]:  # noqa: ANN401
        parts: list[bytes] = []

        async def keep(message: dict[str, Any]) -> None:
            parts.append(message.get("body", b""))

        await self._app(scope, receive, keep)
        status: dict[str, Any] = json.loads(b"".join(parts))
        return status


@pytest.fixture
async def lies(receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RoundFleet, Liar]]:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    liars: list[Liar] = []

    def face(app: AsgiApp) -> AsgiApp:
        liars.append(Liar(app))
        return liars[-1]

    async with AsyncExitStack() as stack, PodClient() as client:
        fleet = RoundFleet(stack, receiver, client, stop={"afterNonces": 1500})
        await fleet.start_pod(HONEST)
        await fleet.start_pod(LIAR, face)
        yield fleet, liars[0]


async def observe_lie(fleet: RoundFleet, before: RoundStatus) -> RoundStatus:
    """Tick until the lie is noted; nothing that the liar's slot had may change."""
    status: RoundStatus = await fleet.reconcile_until(lambda status: status.assignments[1].error is not None)
    counted = {"next", "delivered", "valid", "rejected", "attempts"}
    assert status.assignments[1].model_dump(include=counted) == before.assignments[1].model_dump(include=counted)
    return status


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        (b"\xff\xfe{", 200, "not an answer of the PoC protocol"),
        (b'{"status": 5}', 200, "not an answer of the PoC protocol: status"),
        (b"[" * 100_000, 200, "exceeds 65536 bytes"),
        (b"[" * 50_000, 200, "not an answer of the PoC protocol"),
        (b" " * 10 * 2**20, 200, "exceeds 65536 bytes"),
        (b"", 302, "HTTP 302"),
        (b"<html>", 502, "HTTP 502"),
    ],
    ids=["bytes", "types", "deep", "less deep", "10 MiB", "redirect", "gateway"],
)
async def test_garbage_is_named_and_changes_nothing(
    lies: tuple[RoundFleet, Liar], body: bytes, code: int, error: str
) -> None:
    fleet, liar = lies
    before = await fleet.reconcile_until(computes)
    liar.body, liar.code = body, code
    status = await observe_lie(fleet, before)
    assert error in (status.assignments[1].error or "")
    liar.body, liar.code = None, 200
    assert_nothing_lost_nothing_twice(fleet, await fleet.reconcile_until(complete))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"next_index": -1}, "next_index: Input should be greater than or equal to 0"),
        ({"next_index": 10**400}, "not an answer of the PoC protocol"),
        ({"next_index": "many"}, "next_index: Input should be a valid integer"),
        ({"rate_per_second": -5}, "rate_per_second"),
        ({"session_id": "s" * 10_000}, "session_id"),
        ({"next_index": 2**31}, "out of order"),
        ({"next_index": 0, "delivered_index": 0, "delivered_valid": 0}, "next_index falls from"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_impossible_numbers_are_not_counted(
    lies: tuple[RoundFleet, Liar], fields: dict[str, Any], error: str
) -> None:
    fleet, liar = lies
    before = await fleet.reconcile_until(computes)
    liar.fields = fields
    status = await observe_lie(fleet, before)
    assert error in (status.assignments[1].error or "")
    liar.fields = {}
    assert_nothing_lost_nothing_twice(fleet, await fleet.reconcile_until(complete))


async def test_long_texts_are_cut(lies: tuple[RoundFleet, Liar]) -> None:
    fleet, liar = lies
    await fleet.reconcile_until(computes)
    liar.fields = {"state": "FAILED", "status": "FAILED", "error": "x" * 50_000}
    status = await fleet.reconcile_until(lambda status: status.totals.retries > 0)
    assert 150 < len((status.assignments[1].error or "").encode()) <= 200


async def test_a_pod_that_drips_holds_up_no_poll(
    lies: tuple[RoundFleet, Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, liar = lies
    await fleet.reconcile_until(computes)
    monkeypatch.setattr(podapi, "STATUS_SECONDS", 0.5)
    liar.drips = True
    began = monotonic()
    await fleet.operator.reconcile()
    assert 0.5 <= monotonic() - began < 10
    assert fleet.store.work is not None
    assert fleet.store.work.status.assignments[1].error == "no answer within 0.5 s"
