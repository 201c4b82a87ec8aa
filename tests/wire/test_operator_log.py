# SPDX-License-Identifier: Apache-2.0
"""Lines of the operator about what it tells a pod name the object, the slot and the pod."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_operator.clients.pods.client import PodClient
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import RoundFleet
from tests.unit.poc_operator.build import UID
from vllm_poc.logs import BoundFields, bound, fields_of

HOST = "127.0.0.1"


@pytest.fixture
async def client() -> AsyncIterator[PodClient]:
    async with PodClient() as own:
        yield own


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What a handler of the operator's process is given."""
    fields = BoundFields()
    caplog.handler.addFilter(fields)
    yield caplog
    caplog.handler.removeFilter(fields)


def failing_starts(app: ASGIApp) -> ASGIApp:
    """A pod that fails when it is told to start, and answers all else."""

    async def face(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/init/generate"):
            await PlainTextResponse("a defect", status_code=500)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return face


async def test_a_failed_start_names_object_slot_and_pod(
    receiver: CallbackReceiver, client: PodClient, lines: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        fleet = RoundFleet(stack, receiver, client, nodes={"first": 1, "last": 1, "count": 2})
        stack.push_async_callback(fleet.operator.close)
        await fleet.start_pod(HOST, face=failing_starts)
        with bound(round=UID):  # as the handler does
            async with asyncio.timeout(30):
                while not (starts := [one for one in lines.records if one.getMessage().startswith("start: ")]):
                    await fleet.operator.reconcile()
                    await asyncio.sleep(0.01)
    assert fields_of(starts[0]) == {"round": UID, "slot": 1, "pod": f"pod-{HOST}"}
