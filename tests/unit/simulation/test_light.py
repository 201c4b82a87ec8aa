# SPDX-License-Identifier: Apache-2.0
"""The operator understands the pods that only answer, and they get on by the clock."""

import asyncio

from poc_operator.clients.pods.client import PodClient, base_url
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import StartPod
from poc_operator.rounds.plan import plan
from tests.simulation.light import LightSession
from tests.simulation.server import FleetServer
from tests.unit.poc_operator.build import a_pod, a_round, look
from vllm_poc.wire.answers import PowState, StatusResponse


async def test_the_operator_starts_polls_and_stops_it() -> None:
    server, session, host = FleetServer(), LightSession("a", 0.01), "127.0.0.1"
    async with server.serving(), PodClient() as client:
        await server.open(host, session)
        base = base_url(host, server.port)
        idle = await client.status(base)
        assert isinstance(idle, StatusResponse)
        round_ = a_round(model={"name": "tiny", "seqLen": 64})
        step = plan(look(round_, (a_pod("a"), PodReport(status=idle))))
        (start,) = [action for action in step.actions if isinstance(action, StartPod)]
        await client.start(base, start.request)
        await asyncio.sleep(0.05)
        told = await client.status(base)
        assert isinstance(told, StatusResponse)
        assert (told.state, told.round_id) == (PowState.GENERATING, round_.id)
        assert 0 < told.next_index == told.delivered_index == session.polls[-1].next
        assert len(session.work) == 1
        running = plan(look(round_.model_copy(update={"status": step.status}), (a_pod("a"), PodReport(status=told))))
        assert running.status.running == 1
        await client.stop(base, round_.id)
        stopped = await client.status(base)
        assert isinstance(stopped, StatusResponse)
        assert stopped.state is PowState.STOPPED
