# SPDX-License-Identifier: Apache-2.0
"""Rounds of the decode scheme: reference pods that offer it, driven by our operator, deliver to our gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, inside_app
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.pods.client import PodClient, base_url
from poc_operator.controller import observing
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.reference_pod import chain, reference_pod
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import SLOT
from tests.wire.test_reference_pods import HOSTS, ReferenceFleet
from tests.wire.test_round import complete
from vllm_poc.wire.messages import InitGenerateRequest

STEPS = 4
DECODE = {"artifact": None, "decode": {"maxTokens": STEPS}, "stop": {"afterNonces": 100}}

Start = Callable[..., AbstractAsyncContextManager[tuple[ReferenceFleet, Database]]]


@pytest.fixture
def start(receiver: CallbackReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(observing, "ASK_SECONDS", 0.05)

    @asynccontextmanager
    async def started(**releases: str) -> AsyncIterator[tuple[ReferenceFleet, Database]]:
        database, port = Database.open(f"sqlite:///{tmp_path / 'gateway.db'}"), free_port()
        async with AsyncExitStack() as stack:
            stack.callback(database.close)
            collector = await stack.enter_async_context(GatewayClient(f"http://127.0.0.1:{port}"))
            client = await stack.enter_async_context(PodClient())
            fleet = ReferenceFleet(stack, receiver, client, gateway=collector, **DECODE)
            fleet.servers, fleet.releases = {}, {HOSTS[0]: releases["first"], HOSTS[1]: releases["second"]}

            async def read_round(namespace: str, name: str) -> PoCRound | None:
                assert (namespace, name) == ("ns", "r")
                return fleet.store.work

            settings = Settings.from_environment({})
            parts = Components(
                settings=settings,
                database=database,
                rounds=Rounds(database, read_round),
                outbox=Outbox(database, settings),
            )
            await stack.enter_async_context(serve(inside_app(parts), "127.0.0.1", port))
            for host in HOSTS:
                await fleet.start_pod(host)
            yield fleet, database
            await fleet.operator.close()

    return started


async def test_reference_pods_that_offer_it_are_mined_end_to_end(start: Start) -> None:
    async with start(first="0.2.0", second="0.2.1") as (fleet, database):
        status = await fleet.reconcile_until(complete)
        rows = await database.read(lambda one: one.execute(select(schema.artifacts)).mappings().all())
        told = (await database.read(lambda one: one.execute(select(schema.rounds)).mappings().all()))[0]
    assert status.totals.delivered == status.totals.valid >= 100
    assert (told["protocol"], told["max_tokens"], told["k_dim"]) == ("decode", STEPS, None)
    assert len(rows) >= 100
    assert {row["nonce"]: row["vector"] for row in rows} == {
        row["nonce"]: bytes(chain(row["nonce"], STEPS)) for row in rows
    }


async def test_a_pod_without_the_scheme_gets_no_slot_and_is_named(start: Start) -> None:
    async with start(first="0.1.7", second="0.2.0") as (fleet, _):
        status = await fleet.reconcile_until(lambda one: any(slot.state == "Running" for slot in one.assignments))
        assert {slot.pod for slot in status.assignments if slot.pod} == {f"pod-{HOSTS[1]}"}
        assert fleet.servers[HOSTS[0]].tried == fleet.servers[HOSTS[0]].starts == 0


async def test_without_any_pod_of_the_scheme_the_round_says_what_to_do(start: Start) -> None:
    async with start(first="0.1.7", second="0.1.6") as (fleet, _):

        def told(one: object) -> bool:
            return any(condition.reason == Reason.SCHEME_NOT_OFFERED for condition in one.own_conditions)  # type: ignore[attr-defined]

        status = await fleet.reconcile_until(told)
        messages = [one.message for one in status.own_conditions if one.reason == Reason.SCHEME_NOT_OFFERED]
        assert "take pods of the network's plugin 0.2 or later" in messages[0]
        assert [server.tried + server.starts for server in fleet.servers.values()] == [0, 0]


async def test_a_start_waits_until_a_stop_is_answered() -> None:
    """A reference pod says that it is idle while its last passes run. The reaper stops by a client of its own."""
    params = {"model": "tiny", "seq_len": 64, "decode": True, "max_tokens": STEPS}
    request = InitGenerateRequest.model_validate(
        SLOT | {"block_hash": "b", "block_height": 1, "public_key": "k", "params": params}
    )
    async with reference_pod("0.2.0") as pod, PodClient() as client, PodClient() as reaper:
        port = free_port()
        async with serve(pod.app, HOSTS[0], port):
            base = base_url(HOSTS[0], port)
            await client.start(base, request)
            pod.drain_seconds = 0.2
            stopping = asyncio.create_task(reaper.stop(base, None))
            async with httpx.AsyncClient() as http:
                while (await http.get(f"{base}/status")).json()["status"] != "IDLE":  # noqa: ASYNC110 - as the operator polls
                    await asyncio.sleep(0.01)
            assert pod.draining
            await client.start(base, request)
            assert not pod.overlapped
            await stopping
