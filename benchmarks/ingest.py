# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.ingest: how many artifacts the gateway stores in a second, and how long a batch takes.

The gateway and its database run beside the load's one process. Each connection is a pod with a credential of its own. A
batch is acknowledged when it is durable. With ``--replicas`` several gateways serve one PostgreSQL, each the same share
of the pods.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.figures import Figures, quantile, report
from hack.images.site import ROOT
from poc_operator.credentials import RATE_LIMIT
from tests.simulation.gateway_process import gateway
from tests.support.builders.deliveries import JSON, K_DIM, ROUND, encoded, path, round_body
from tests.support.builders.secrets import ENVIRONMENT, a_grant, pod_headers
from tests.support.servers.postgres import postgres

BATCH = 32
CONNECTIONS = 64
TARGETS = {"sqlite": 20_000, "postgresql": 10_000}
_UID = "benchmark"
_HEAD = json.dumps({"node_id": 0, "encoding": {"k_dim": K_DIM}, **ROUND})[:-1]
_VECTOR = encoded(1)
_LOOK_SECONDS = 5.0
_SETTINGS = {**ENVIRONMENT, "POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8"}
_SHARES = {"p50": 0.5, "p99": 0.99}


def batch(index: int) -> bytes:
    """Return the slot's batch number ``index``; the slots of all connections are interleaved."""
    connection, number = index % CONNECTIONS, index // CONNECTIONS
    nonces = range(connection + number * BATCH * CONNECTIONS, 2**31, CONNECTIONS)[:BATCH]
    items = ",".join(f'{{"nonce":{nonce},"vector_b64":"{_VECTOR}"}}' for nonce in nonces)
    return f'{_HEAD},"artifacts":[{items}]}}'.encode()


class Load:
    """Posts batches, each connection its own slot's in order, as pods do."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self._session = session
        self._urls = urls
        self._next = [0] * CONNECTIONS
        grants = [a_grant(_UID, slot, f"pod-{slot}", rate=RATE_LIMIT) for slot in range(CONNECTIONS)]
        self._headers = [pod_headers(grant) for grant in grants]
        self.seconds: list[float] = []

    async def run(self, seconds: float, rate: float | None = None) -> float:
        """Post for so long, ``rate`` batches in a second or as many as are taken; return artifacts per second."""
        self.seconds = []
        begin = time.perf_counter()
        pause = None if rate is None else CONNECTIONS / rate
        await asyncio.gather(*(self._send(one, begin, begin + seconds, pause) for one in range(CONNECTIONS)))
        return len(self.seconds) * BATCH / (time.perf_counter() - begin)

    async def _send(self, connection: int, begin: float, end: float, pause: float | None) -> None:
        due = begin + (pause or 0) * connection / CONNECTIONS
        url = self._urls[connection % len(self._urls)]
        while max(due, time.perf_counter()) < end:
            body = batch(connection + self._next[connection] * CONNECTIONS)
            if pause is not None:
                await asyncio.sleep(due - time.perf_counter())
            # From when it was due: a gateway that falls behind must not look faster for it.
            asked = due if pause is not None else time.perf_counter()
            async with self._session.post(url, data=body, headers=self._headers[connection]) as answer:
                text = await answer.read()
            if answer.status != HTTPStatus.OK or json.loads(text)["stored"] != BATCH:
                raise RuntimeError(f"a batch was not stored: HTTP {answer.status}: {text.decode()}")
            self.seconds.append(time.perf_counter() - asked)
            self._next[connection] += 1
            due += pause or 0


def times(name: str, seconds: list[float]) -> Figures:
    """Return the median and the 99th percentile in milliseconds."""
    return {f"{name}_{word}_ms": round(1e3 * quantile(seconds, share), 1) for word, share in _SHARES.items()}


async def measure(urls: Sequence[str], target: int, seconds: float) -> Figures:
    """Load the gateways fully, then with half the target."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, headers=JSON) as session:
        load = Load(session, [url + path(_UID) for url in urls])
        await load.run(1.0)  # the round is written down, the connections are open
        full = await load.run(seconds)
        figures = {"artifacts_per_second": round(full), **times("full", load.seconds)}
        half = await load.run(seconds, target / BATCH / 2)
        figures |= {"half_artifacts_per_second": round(half), **times("half", load.seconds)}
    return figures


async def pile_up(url: str, artifacts: int, pid: int) -> Figures:
    """Store so many artifacts, none of which can be forwarded, and watch the gateway's memory."""
    connector, sizes = aiohttp.TCPConnector(limit=CONNECTIONS), list[float]()
    async with aiohttp.ClientSession(connector=connector, headers=JSON) as session:
        load, stored = Load(session, [url + path(_UID)]), 0
        while stored < artifacts:
            await load.run(_LOOK_SECONDS)
            stored += len(load.seconds) * BATCH
            sizes.append(resident_mib(pid))
    quarters = {f"rss_mib_at_{share}": sizes[len(sizes) * share // 100 - 1] for share in (25, 50, 75, 100)}
    return {"backlog": stored, **quarters, "rss_mib_largest": max(sizes)}


def resident_mib(pid: int) -> int:
    """Return how much of a process is in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


@contextlib.contextmanager
def _database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/gateway.db"
        return
    with postgres() as server:
        yield server.new_database()


def main() -> None:
    """Measure with the database that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=sorted(TARGETS), help="default: sqlite, postgresql for several gateways")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two loads (default: 20)")
    parser.add_argument("--backlog", type=int, help="store so many artifacts instead, for a receiver that is away")
    parser.add_argument("--replicas", type=int, default=1, help="gateways on one PostgreSQL (default: 1)")
    options = parser.parse_args()
    options.database = options.database or ("sqlite" if options.replicas == 1 else "postgresql")
    if options.replicas < 1 or (options.replicas > 1 and options.database == "sqlite"):
        parser.error("--replicas must be 1, or more with --database postgresql: SQLite has one gateway")
    if options.replicas > 1 and options.backlog is not None:
        parser.error("--backlog watches the memory of one gateway: leave --replicas out")
    # On the repository's disk, since the usual folder may be in memory, where syncing costs nothing.
    with tempfile.TemporaryDirectory(dir=ROOT) as name, _database(options.database, Path(name)) as url:
        rounds = Path(name) / "rounds.json"
        receiver: dict[str, Any] = {} if options.backlog is None else {"callbackURL": "http://127.0.0.1:9/away"}
        rounds.write_text(json.dumps([round_body(_UID, groups=CONNECTIONS, **receiver)]))
        with contextlib.ExitStack() as stack:
            logs = [Path(name) / f"log-{number}" for number in range(options.replicas)]
            running = [stack.enter_context(gateway(url, rounds, log, _SETTINGS)) for log in logs]
            pids, target = [one.process.pid for one in running], TARGETS[options.database]
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                if options.backlog is not None:
                    figures = runner.run(pile_up(running[0].url, options.backlog, pids[0]))
                else:
                    figures = runner.run(measure([one.url for one in running], target, options.seconds))
                    figures = {**figures, "rss_mib": max(map(resident_mib, pids))}
    of = f", {options.replicas} gateways" if options.replicas > 1 else ""
    report(f"Ingest on {options.database}{of}", figures)


if __name__ == "__main__":
    main()
