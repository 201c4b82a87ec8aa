# SPDX-License-Identifier: Apache-2.0
"""The gateway is killed KILLS (50) times at random moments of a SEED (1) while pods deliver and it forwards.

Nothing acknowledged is lost, and every slot arrives in its order. `benchmarks.day` does the same with 20 million.
"""

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from poc_gateway.store.database import Database
from tests.simulation.kept_process import KeptProcess
from tests.support.builders.deliveries import JSON, artifacts, path, round_body
from tests.support.fakes.callback_receiver import payload_nonces
from tests.support.servers.http_server import free_port

log = logging.getLogger(__name__)
logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

SEED = int(os.environ.get("SEED", "1"))
KILLS = int(os.environ.get("KILLS", "50"))
GROUPS = 4
BATCH = 32
#: Seconds that the gateway works between two kills.
PAUSE_SECONDS = (0.0, 3.0)
FORWARD_SECONDS = 60.0
ROUNDS = {"uid-1": "a1" * 32, "uid-2": "b2" * 32}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]


@dataclass
class Receiver:
    """The payloads that were answered 200, by block hash."""

    payloads: dict[str, list[tuple[int, ...]]] = field(default_factory=lambda: {hash_: [] for hash_ in ROUNDS.values()})

    async def generated(self, request: web.Request) -> web.Response:
        """Take a payload, and say so a moment later, so that some answers come too late."""
        payload = await request.json()
        self.payloads[payload["block_hash"]].append(tuple(payload_nonces(payload)))
        await asyncio.sleep(0.01)
        return web.Response()


@dataclass
class Pod:
    """Delivers batch after batch of one slot, each again until it is accepted."""

    client: aiohttp.ClientSession
    uid: str
    group: int
    acknowledged: set[int] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until told to stop; then the batch under way is still delivered."""
        index = 0
        while not stop.is_set():
            nonces = [self.group + GROUPS * (index + place) for place in range(BATCH)]
            await self._deliver(nonces)
            self.acknowledged.update(nonces)
            index += BATCH

    async def _deliver(self, nonces: list[int]) -> None:
        body = artifacts(nonces, block_hash=ROUNDS[self.uid])
        while True:
            try:
                async with self.client.post(path(self.uid), data=body) as answer:
                    assert answer.status in (200, 503), await answer.text()
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)


def gateway(folder: Path, receiver: str, port: int, database: str = "", log_name: str = "gateway.log") -> KeptProcess:
    rounds = folder / "rounds.json"
    bodies = [
        round_body(uid, groups=GROUPS, blockHash=block_hash, callbackURL=receiver) for uid, block_hash in ROUNDS.items()
    ]
    rounds.write_text(json.dumps(bodies))
    settings = {
        "DATABASE": database or f"sqlite:///{folder / 'gateway.db'}",
        "PORT": port,
        "METRICS_PORT": free_port(),
        "NETWORK_PORT": free_port(),
        "RECEIVER_PRIVATE": "127.0.0.0/8",
        "PEER_REQUESTS": 1_000_000,
    }
    variables = {f"POC_GATEWAY_{name}": str(value) for name, value in settings.items()}
    argv = (sys.executable, "-m", "tests.simulation.gateway_process", str(rounds))
    return KeptProcess(argv, variables, folder / log_name)


async def ready(client: aiohttp.ClientSession) -> None:
    while True:
        try:
            async with client.get("/readyz") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.05)


async def strike(process: KeptProcess, client: aiohttp.ClientSession) -> None:
    random = Random(SEED)  # noqa: S311 - not for secrets
    for number in range(KILLS):
        await ready(client)
        await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
        await process.kill(random.uniform(0, 0.5))
        log.info("kill %d of %d", number + 1, KILLS)


async def wait_until_forwarded(receiver: Receiver, pods: list[Pod]) -> None:
    def missing() -> int:
        got = {
            hash_: {nonce for payload in payloads for nonce in payload} for hash_, payloads in receiver.payloads.items()
        }
        return sum(len(pod.acknowledged - got[ROUNDS[pod.uid]]) for pod in pods)

    async with asyncio.timeout(FORWARD_SECONDS):
        while missing():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(1)


def assert_in_order(payloads: list[tuple[int, ...]]) -> None:
    """Each slot's artifacts arrive in the order of their nonces without a gap; a payload may come again at once."""
    reached, last = list(range(GROUPS)), dict[int, int]()
    for payload in payloads:
        group = payload[0] % GROUPS
        assert payload == tuple(range(payload[0], payload[-1] + 1, GROUPS))
        assert payload[0] == reached[group] or payload[0] == last[group], (payload, reached)
        reached[group], last[group] = max(reached[group], payload[-1] + GROUPS), payload[0]


def stored(url: str) -> dict[str, set[int]]:
    """Return the nonces in the database by the round's uid."""
    database = Database.open(url)
    query = "SELECT uid, nonce FROM artifacts JOIN slots ON slots.id = slot_id JOIN rounds ON rounds.id = round_id"
    try:
        with database.engine.connect() as connection:
            found: dict[str, set[int]] = {uid: set() for uid in ROUNDS}
            for uid, nonce in connection.exec_driver_sql(query):
                found[uid].add(nonce)
            return found
    finally:
        database.close()


async def test_what_is_acknowledged_is_kept_and_reaches_the_receiver(tmp_path: Path) -> None:
    receiver, stop, port = Receiver(), asyncio.Event(), free_port()
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/generated", receiver.generated)
    async with TestServer(app) as server, aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=JSON) as client:
        process = gateway(tmp_path, str(server.make_url("")).rstrip("/"), port)
        pods = [Pod(client, uid, group) for uid in ROUNDS for group in range(GROUPS)]
        async with process.running():
            async with asyncio.TaskGroup() as tasks:
                for pod in pods:
                    tasks.create_task(pod.run(stop))
                await strike(process, client)
                stop.set()
            await wait_until_forwarded(receiver, pods)
    assert_books(stored(f"sqlite:///{tmp_path / 'gateway.db'}"), receiver, pods)
    assert len(process.gaps) == KILLS


def assert_books(found: dict[str, set[int]], receiver: Receiver, pods: Sequence[Pod]) -> None:
    """Check what is stored and what has arrived, after as many faults as `KILLS`."""
    for uid, block_hash in ROUNDS.items():
        acknowledged = set().union(*(pod.acknowledged for pod in pods if pod.uid == uid))
        arrivals = Counter(nonce for payload in receiver.payloads[block_hash] for nonce in payload)
        assert acknowledged <= found[uid] == set(arrivals)
        assert_in_order(receiver.payloads[block_hash])
        # A payload may come again only if its 200 was not written down: one of each round for each kill at most.
        again = sum(any(arrivals[nonce] > 1 for nonce in payload) for payload in set(receiver.payloads[block_hash]))
        twice = sum(count - 1 for count in arrivals.values())
        log.info("%s: %d acknowledged, %d forwarded twice in %d payloads", uid, len(acknowledged), twice, again)
        assert again <= KILLS
