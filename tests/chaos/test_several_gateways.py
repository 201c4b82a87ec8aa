# SPDX-License-Identifier: Apache-2.0
"""Several gateways on one PostgreSQL: one of them is killed, or hangs for a while, KILLS (50) times of a SEED (1).

Pods deliver to any of them. What must hold is what holds for one gateway (`tests.chaos.test_gateway_kills`).
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.chaos import test_gateway_kills as one
from tests.chaos.test_gateway_kills import GROUPS, KILLS, ROUNDS, SEED, Pod, Receiver
from tests.simulation.kept_process import KeptProcess
from tests.support.builders.deliveries import JSON, artifacts, path
from tests.support.servers.http_server import free_port
from tests.support.servers.postgres import postgres

log = logging.getLogger(__name__)

GATEWAYS = 3
#: Seconds that one hangs: less, and more, than the others take to notice.
HANG_SECONDS = (0.5, 16.0)
#: Long enough that the owner, or the next one, forwards.
PAUSE_SECONDS = (0.0, 10.0)
TRY_SECONDS = 5.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]


@dataclass
class RoamingPod(Pod):
    """Delivers to any gateway, and to another when that one does not answer."""

    others: Sequence[aiohttp.ClientSession] = ()

    async def _deliver(self, nonces: list[int]) -> None:
        body, random = artifacts(nonces, block_hash=ROUNDS[self.uid]), Random(nonces[0])  # noqa: S311 - no secret
        timeout = aiohttp.ClientTimeout(total=TRY_SECONDS)
        while True:
            client = random.choice([self.client, *self.others])
            try:
                async with client.post(path(self.uid), data=body, timeout=timeout) as answer:
                    assert answer.status in (200, 503), await answer.text()
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.05)


async def strike(processes: Sequence[KeptProcess], clients: Sequence[aiohttp.ClientSession]) -> None:
    random = Random(SEED)  # noqa: S311 - not for secrets
    for number in range(KILLS):
        await asyncio.gather(*map(one.ready, clients))
        await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
        process, kills = random.choice(processes), random.random() < 0.5
        await (process.kill(random.uniform(0, 0.5)) if kills else process.hang(random.uniform(*HANG_SECONDS)))
        log.info("fault %d of %d: %s", number + 1, KILLS, "killed" if kills else "hung")


async def test_what_any_acknowledged_is_kept_and_reaches_the_receiver(tmp_path: Path) -> None:
    receiver, stop = Receiver(), asyncio.Event()
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/generated", receiver.generated)
    with postgres() as server:
        url = server.new_database()
        async with AsyncExitStack() as stack:
            listening = await stack.enter_async_context(TestServer(app))
            address = str(listening.make_url("")).rstrip("/")
            ports = [free_port() for _ in range(GATEWAYS)]
            processes = [one.gateway(tmp_path, address, port, url, f"gateway-{port}.log") for port in ports]
            clients = [
                await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=JSON))
                for port in ports
            ]
            pods = [RoamingPod(clients[0], uid, group, others=clients[1:]) for uid in ROUNDS for group in range(GROUPS)]
            for process in processes:
                await stack.enter_async_context(process.running())
            await asyncio.gather(*map(one.ready, clients))
            async with asyncio.TaskGroup() as tasks:
                for pod in pods:
                    tasks.create_task(pod.run(stop))
                await strike(processes, clients)
                stop.set()
            await one.wait_until_forwarded(receiver, list(pods))
        one.assert_books(one.stored(url), receiver, pods)
