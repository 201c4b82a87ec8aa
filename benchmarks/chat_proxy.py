# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.chat_proxy: what the gateway adds to a chat's first token, and how many pieces it streams.

The gateway is one process in front of a server that streams pieces at a fixed pace; clients and server have processes
of their own. First-token times are those of clients that chat at that pace, once straight with the server and once
through the gateway. The rate is that of a faster server, divided by the processor time that the gateway took. That
server pauses after each piece, too, since pieces that come together are passed on together, and cost little. Run it on
a machine that does nothing else.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, perf_counter, sleep

import aiohttp
import uvloop

from benchmarks.figures import quantile, report
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.servers.http_server import free_port

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
#: The bars: milliseconds that the 99th percentile of the first token may grow by, and pieces per second of a core.
MOST_ADDED_MS, LEAST_PIECES = 5.0, 2_000
_PIECES, _PACE_SECONDS, _FAST_SECONDS = 100, 0.05, 0.02
_BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "the " * 200}]}
_TICKS = 100  # of /proc/PID/stat in a second
_START_SECONDS = 20.0


@contextlib.contextmanager
def stub(pieces: int, seconds: float) -> Iterator[int]:
    """Run a server that streams; its port."""
    port = free_port()
    argv = [sys.executable, "-m", "benchmarks.chat_stub", HOST, str(port), str(pieces), str(seconds)]
    with subprocess.Popen(argv) as process:
        try:
            _wait_for(port)
            yield port
        finally:
            process.terminate()


@contextlib.contextmanager
def proxied(folder: Path, port: int) -> Iterator[GatewayProcess]:
    """Run the gateway with one ML node, whose pod is the server at ``port``."""
    (folder / "rounds.json").write_text("[]")
    spec = {"selector": {"matchLabels": {"a": "b"}}, "port": port}
    (folder / "ml-nodes.json").write_text(json.dumps([{"name": "a", "template": {"namespace": "ns", "spec": spec}}]))
    settings = {"POC_GATEWAY_ML_NODES": str(folder / "ml-nodes.json")}
    database = f"sqlite:///{folder}/gateway.db"
    with gateway(database, folder / "rounds.json", folder / "log", settings, [HOST]) as running:
        yield running


async def chats(url: str, clients: int, seconds: float) -> tuple[list[float], float]:
    """Chat with so many clients for so long; return the times to the first piece, and the pieces per second."""
    firsts: list[float] = []
    count = 0
    end = monotonic() + seconds

    async def client(session: aiohttp.ClientSession, place: int) -> None:
        nonlocal count
        await asyncio.sleep(place * _PIECES * _PACE_SECONDS / clients)  # chats begin evenly over the time of one
        while monotonic() < end:
            begin, first = perf_counter(), True
            async with session.post(url + PATH, json=_BODY) as answer:
                answer.raise_for_status()
                async for piece in answer.content.iter_any():
                    if first:
                        firsts.append(perf_counter() - begin)
                        first = False
                    count += piece.count(b"data: {")

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        begin = monotonic()
        await asyncio.gather(*[client(session, place) for place in range(clients)])
        return firsts, count / (monotonic() - begin)


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> None:
    """Measure, and fail if a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        straight, through = _latency(runner, Path(name), options.clients, options.seconds)
        rate, cores = _rate(runner, Path(name), options.clients, options.seconds)
    added = through[1] - straight[1]
    figures = {
        "clients": options.clients,
        "first_token_p99_ms": round(through[1], 2),
        "added_p50_ms": round(through[0] - straight[0], 2),
        "added_p99_ms": round(added, 2),
        "pieces_per_second": round(rate),
        "gateway_cores": round(cores, 2),
        "pieces_per_second_of_a_core": round(rate / max(cores, 0.01)),
    }
    report("chat through the gateway", figures)
    if added > MOST_ADDED_MS or rate / max(cores, 0.01) < LEAST_PIECES:
        sys.exit(f"a bar is not met: at most {MOST_ADDED_MS} ms more, at least {LEAST_PIECES} pieces/s of a core")


def _latency(runner: asyncio.Runner, folder: Path, clients: int, seconds: float) -> list[tuple[float, float]]:
    """Return median and 99th percentile of the first token in ms: straight, and through the gateway."""
    with stub(_PIECES, _PACE_SECONDS) as port, proxied(folder, port) as running:
        times: list[tuple[float, float]] = []
        for url in (f"http://{HOST}:{port}", running.network_url):
            firsts, _ = runner.run(chats(url, clients, seconds))
            times.append((quantile(firsts, 0.5) * 1000, quantile(firsts, 0.99) * 1000))
    return times


def _rate(runner: asyncio.Runner, folder: Path, clients: int, seconds: float) -> tuple[float, float]:
    with stub(_PIECES, _FAST_SECONDS) as port, proxied(folder, port) as running:
        runner.run(chats(running.network_url, clients, 1.0))
        before, begin = processor_seconds(running.process.pid), monotonic()
        _, rate = runner.run(chats(running.network_url, clients, seconds))
        return rate, (processor_seconds(running.process.pid) - before) / (monotonic() - begin)


def _wait_for(port: int) -> None:
    end = monotonic() + _START_SECONDS
    while subprocess.run(["bash", "-c", f": </dev/tcp/{HOST}/{port}"], check=False, capture_output=True).returncode:
        if monotonic() > end:
            raise TimeoutError(f"nothing listens at {HOST}:{port}")
        sleep(0.1)


if __name__ == "__main__":
    main()
