# SPDX-License-Identifier: Apache-2.0
"""The gateway as an ordinary process of this machine, with a database in a folder of its own."""

import asyncio
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from hack.cluster.layout import admin_kubeconfig
from tests.simulation.kept_process import KeptProcess
from tests.support.builders.secrets import ENVIRONMENT, PEOPLE
from tests.support.servers.http_server import free_port

REQUEST = aiohttp.ClientTimeout(total=5)


class Gateway(KeptProcess):
    """Runs ``python -m poc_gateway``; what it has stored outlives its process."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        settings = {
            "DATABASE": f"sqlite:///{folder / 'gateway.db'}",
            "PORT": port,
            "METRICS_PORT": free_port(),
            "NETWORK_PORT": free_port(),
            "RECEIVER_PRIVATE": "127.0.0.0/8",
            "RETRY_LIMIT_SECONDS": 2,
            "PEER_REQUESTS": 100_000,  # all pods have one address
        }
        variables = ENVIRONMENT | {f"POC_GATEWAY_{name}": str(value) for name, value in settings.items()}
        argv = (sys.executable, "-m", "poc_gateway")
        super().__init__(argv, {"KUBECONFIG": str(admin_kubeconfig()), **variables}, folder / "gateway.log")
        self.url = f"http://127.0.0.1:{port}"

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return what the gateway answers; an aiohttp.ClientError if it does not."""
        client = aiohttp.ClientSession(self.url, headers=PEOPLE, timeout=REQUEST, raise_for_status=True)
        async with client as session, session.get(path) as answer:
            return await answer.json()

    async def wait_until_forwarded(self, namespace: str, name: str, seconds: float) -> None:
        """Wait until nothing of the round is left to forward; fails after ``seconds``."""
        deadline, state = monotonic() + seconds, None
        while state is None or state["backlog"]:
            assert monotonic() < deadline, f"{name} is not forwarded: {state}"
            await asyncio.sleep(0.2)
            state = await self.get(f"/rounds/{namespace}/{name}/forwarding")
