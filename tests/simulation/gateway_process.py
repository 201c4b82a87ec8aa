# SPDX-License-Identifier: Apache-2.0
"""The gateway as a process of its own, which reads PoCRounds from a JSON file instead of an API server.

python -m tests.simulation.gateway_process ROUNDS.json [HOST …], with the gateway's settings in the environment. Every
ML node has a pod at each of the hosts. The file is read anew when objects are listed; those of the kind PoCFleet are
fleets.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from hack.images.site import ROOT
from poc_gateway.server.process import leave, run
from poc_gateway.settings import Settings
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import LabelSelector, Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import PodView
from tests.support.servers.http_server import free_port
from vllm_poc import logs

START_SECONDS = 30.0


@dataclass(frozen=True)
class GatewayProcess:
    """A gateway that takes requests at ``url``."""

    process: subprocess.Popen[bytes]
    url: str
    metrics_url: str
    network_url: str = ""


class FixedPods:
    """An ML node's cluster with pods at fixed addresses, in which no rounds are started."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._pods = [PodView(name=f"pod-{host}", namespace="ns", uid=host, ip=host, ready=True) for host in hosts]

    async def list_rounds(self) -> list[PoCRound]:
        return []

    async def create(self, name: str, spec: Mapping[str, Any]) -> PoCRound:
        raise NotImplementedError

    async def finish(self, name: str) -> None:
        raise NotImplementedError

    async def list_pods(self, selector: LabelSelector) -> list[PodView]:
        assert str(selector)
        return self._pods


@contextmanager
def gateway(
    database: str,
    rounds: Path,
    log: Path,
    settings: Mapping[str, str] | None = None,
    hosts: Sequence[str] = (),
    *,
    wait: bool = True,
) -> Iterator[GatewayProcess]:
    """Run a gateway until the block ends; then it ends in order. ``wait`` until it is ready."""
    port, metrics, network = free_port(), free_port(), free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("operator", "image", ".")),
        "POC_GATEWAY_DATABASE": database,
        "POC_GATEWAY_PORT": str(port),
        "POC_GATEWAY_METRICS_PORT": str(metrics),
        "POC_GATEWAY_NETWORK_PORT": str(network),
        "POC_GATEWAY_PEER_REQUESTS": "1000000",  # all load comes from one address
        **(settings or {}),
    }
    argv = (sys.executable, "-m", "tests.simulation.gateway_process", str(rounds), *hosts)
    with log.open("ab") as output, subprocess.Popen(argv, env=environment, cwd=ROOT, stderr=output) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            if wait:
                wait_until_ready(process, url)
            yield GatewayProcess(process, url, f"http://127.0.0.1:{metrics}/metrics", f"http://127.0.0.1:{network}")
        finally:
            process.terminate()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the gateway takes requests; RuntimeError if it ends, TimeoutError if it is not ready in time."""
    begin = time.monotonic()
    while time.monotonic() - begin < START_SECONDS:
        if process.poll() is not None:
            raise RuntimeError(f"the gateway ended with status {process.returncode}: see its log")
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()  # noqa: S310 - our own process
            return
        time.sleep(0.05)
    raise TimeoutError(f"the gateway was not ready within {START_SECONDS:.0f} s")


def main() -> None:
    """Run the gateway with the rounds of the file that the command line names."""
    bodies: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    rounds = {
        (body["metadata"]["namespace"], body["metadata"]["name"]): PoCRound.parse(body)
        for body in bodies
        if body.get("kind") != PoCFleet.KIND.kind
    }

    async def read_round(namespace: str, name: str) -> PoCRound | None:
        return rounds.get((namespace, name))

    async def list_objects(kind: type[Resource]) -> Sequence[Mapping[str, Any]]:
        now: list[dict[str, Any]] = json.loads(await asyncio.to_thread(Path(sys.argv[1]).read_text))
        return [body for body in now if (body.get("kind") == PoCFleet.KIND.kind) is (kind is PoCFleet)]

    logs.configure()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pods, settings = FixedPods(sys.argv[2:]), Settings.from_environment(os.environ)
        runner.run(run(settings, read_round, lambda _: pods, list_objects=list_objects))
    leave(settings)


if __name__ == "__main__":
    main()
