# SPDX-License-Identifier: Apache-2.0
"""The operator as an ordinary process of this machine, with the probes that the chart gives it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from hack.cluster.layout import admin_kubeconfig
from tests.simulation.gateway import Gateway
from tests.simulation.kept_process import KeptProcess
from tests.support.builders.secrets import ENVIRONMENT
from tests.support.servers.http_server import free_port

#: The probes, as in charts/vllm-poc-operator/templates/deployment.yaml: a test compares them.
STARTUP = {"periodSeconds": 2, "failureThreshold": 60}
LIVENESS = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3}


class OperatorProcess(KeptProcess):
    """Runs ``python -m poc_operator`` for one namespace."""

    def __init__(self, namespace: str, log: Path, *options: str, gateway: Gateway | None = None) -> None:
        health, metrics = free_port(), free_port()
        ports = (f"--health-port={health}", f"--metrics-port={metrics}")
        scope = (f"--namespace={namespace}", f"--lease-namespace={namespace}", "--log-format=plain")
        variables = {"KUBECONFIG": str(admin_kubeconfig())}
        if gateway is not None:
            options += (f"--gateway-url={gateway.url}",)
            secrets = ("POC_GATEWAY_OPERATOR_TOKEN", "POC_GATEWAY_CALLBACK_KEY")
            variables |= {name: ENVIRONMENT[name] for name in secrets}
        argv = (sys.executable, "-m", "poc_operator", *scope, *ports, *options)
        super().__init__(argv, variables, log)
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self._health_url = f"http://127.0.0.1:{health}/healthz"
        #: Why a probe had it killed, each time.
        self.found_dead: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep it running and probed until the block ends."""
        async with super().running():
            probing = asyncio.create_task(self._probe())
            try:
                yield
            finally:
                probing.cancel()
                await asyncio.wait([probing])

    async def _probe(self) -> None:
        timeout = aiohttp.ClientTimeout(total=LIVENESS["timeoutSeconds"])
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                await self._probe_one(self._alive(), http)

    async def _probe_one(self, process: asyncio.subprocess.Process, http: aiohttp.ClientSession) -> None:
        """Probe this process until there is another one."""
        probe, failures = STARTUP, 0
        while self._alive() is process:
            await asyncio.sleep(probe["periodSeconds"])
            found = await self._ill(http)
            failures = failures + 1 if found else 0
            probe = probe if found else LIVENESS
            if failures == probe["failureThreshold"] and self._alive() is process:
                self.found_dead.append(found)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _ill(self, http: aiohttp.ClientSession) -> str:
        """Return what a probe finds wrong; nothing if the operator answers 200."""
        try:
            async with http.get(self._health_url) as answer:
                return "" if answer.status == 200 else await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
