# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.day: a round of a day in a gateway that is killed again and again while it stores and forwards.

Pods deliver as fast as the gateway takes it. Kills by SIGKILL come at random moments, the last one when all results are
stored. After each, rivals deliver early nonces again with other bytes. A receiver of its own checks the order of each
slot and every byte. It fails if anything acknowledged is lost, changed or out of order.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import uvloop
from sqlalchemy import func, select

from benchmarks.day_pods import BATCH, SLOTS, UID, Plan, Pods
from benchmarks.day_receiver import auditing, vector_b64
from benchmarks.figures import Figures, report, spread
from hack.images.site import ROOT
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import create_engine
from poc_gateway.store.retention import delete_some
from tests.simulation.kept_process import KeptProcess
from tests.support.builders.deliveries import BLOCK_HEIGHT, JSON, round_body
from tests.support.builders.secrets import ENVIRONMENT, PEOPLE
from tests.support.servers.http_server import free_port
from tests.support.servers.postgres import postgres

_LOOK_SECONDS = 0.02
_TELL_SECONDS = 15.0
#: Nothing new may reach the receiver for so long before it is given up.
_FORWARD_SECONDS = 60.0
#: To count what is stored takes longer than anything that the gateway asks.
_COUNT_SECONDS = 600.0
_MIB = 2**20
#: Routes that people ask, and the operator: none of them may take longer for more artifacts.
_READS = {
    "rounds": "/rounds",
    "round": f"/rounds/ns/round-{UID}",
    "progress": f"/rounds/ns/round-{UID}/progress",
    "summary": f"/rounds/ns/round-{UID}/summary",
    "forwarding": f"/rounds/ns/round-{UID}/forwarding",
    "waiting": f"/rounds/ns/round-{UID}/ledger?state=waiting",
    "dead": f"/rounds/ns/round-{UID}/dead-letters",
    "conflicts": f"/rounds/ns/round-{UID}/conflicts",
    "sample": f"/rounds/ns/round-{UID}/sample?nonces=200",
}


@dataclass
class Watch:
    """What the gateway takes, over all its lives."""

    process: KeptProcess
    folder: Path
    peak_bytes: int = 0
    largest_log: int = 0
    #: Seconds from a kill until the next process is ready, and those of a core that this process took until then.
    restarts: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def look(self) -> None:
        """Note the process's memory, and the size of SQLite's log."""
        with contextlib.suppress(OSError, ValueError):  # between two lives
            self.peak_bytes = max(self.peak_bytes, self.process.peak_rss_bytes)
        with contextlib.suppress(OSError):
            self.largest_log = max(self.largest_log, (self.folder / "gateway.db-wal").stat().st_size)

    async def restart(self, session: aiohttp.ClientSession) -> None:
        """Kill the process, and wait until the next one is ready."""
        self.look()
        await self.process.kill(0)
        await ready(session)
        ended, _ = self.process.gaps[-1]
        self.restarts.append(monotonic() - ended)
        self.cores.append(self.process.cpu_seconds)


async def ready(session: aiohttp.ClientSession) -> None:
    """Wait until the gateway takes requests."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get("/readyz") as answer:
                if answer.status == HTTPStatus.OK:
                    return
        await asyncio.sleep(_LOOK_SECONDS)


async def _strike(pods: Pods, watch: Watch, plan: Plan) -> None:
    for number, moment in enumerate(plan.moments(), 1):
        while pods.stored < moment:
            watch.look()
            await asyncio.sleep(_LOOK_SECONDS)
        await watch.restart(pods.session)
        slot = number % SLOTS
        if pods.acknowledged[slot]:
            # Earlier, the rival would hold back what it contradicts.
            await _first_batch_sent(pods.session, slot)
            await pods.rival(slot, number)


async def _first_batch_sent(session: aiohttp.ClientSession, slot: int) -> None:
    """Wait until the receiver has accepted the first batch of a slot, and the gateway knows."""
    while True:
        async with session.get(_READS["round"], headers=PEOPLE) as answer:
            found = await answer.json()
        if next(one for one in found["slots"] if one["slot"] == slot)["forwarded_nonce"] >= slot + (BATCH - 1) * SLOTS:
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _tell(pods: Pods, watch: Watch, receiver: str) -> None:
    begin = monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            watch.look()
            audit = await _audit(session, receiver)
            line = (
                f"{monotonic() - begin:7.0f} s  {pods.stored:>9} stored  {_arrived(audit):>9} forwarded  "
                f"{watch.peak_bytes / _MIB:4.0f} MiB at most  {len(watch.restarts):>3} kills"
            )
            print(line, file=sys.stderr, flush=True)
            await asyncio.sleep(_TELL_SECONDS)


async def _audit(session: aiohttp.ClientSession, receiver: str) -> dict[str, Any]:
    async with session.get(f"{receiver}/audit") as answer:
        found: dict[str, Any] = await answer.json()
    if found["faults"]:
        raise RuntimeError("; ".join(found["faults"]))
    return found


def _arrived(audit: dict[str, Any]) -> int:
    return sum((nonce - slot) // SLOTS for slot, nonce in enumerate(audit["next"]))


async def _all_forwarded(receiver: str, plan: Plan) -> dict[str, Any]:
    """Wait until everything has arrived; TimeoutError names what lacks."""
    async with aiohttp.ClientSession() as session:
        audit, seen, since = await _audit(session, receiver), 0, monotonic()
        while (arrived := _arrived(audit)) < plan.total:
            if arrived > seen:
                seen, since = arrived, monotonic()
            if monotonic() - since > _FORWARD_SECONDS:
                raise TimeoutError(f"{plan.total - arrived} artifacts were not forwarded")
            await asyncio.sleep(0.2)
            audit = await _audit(session, receiver)
    return audit


async def _reads(session: aiohttp.ClientSession) -> Figures:
    figures = dict[str, float]()
    for name, route in _READS.items():
        begin = monotonic()
        async with session.get(route, headers=PEOPLE) as answer:
            text = await answer.text()
            if answer.status != HTTPStatus.OK:
                raise RuntimeError(f"GET {route}: HTTP {answer.status}: {text}")
        figures[f"read_{name}_ms"] = round(1e3 * (monotonic() - begin), 1)
    return figures


async def run(database: str, folder: Path, plan: Plan) -> Figures:
    """Live through the day; RuntimeError if the gateway's answers or the receiver's order are wrong."""
    with auditing(SLOTS, BLOCK_HEIGHT) as receiver:
        process, url = _gateway(database, folder, receiver)
        watch, begin = Watch(process, folder), monotonic()
        connector, limit = aiohttp.TCPConnector(limit=SLOTS + 4), aiohttp.ClientTimeout(total=60)
        async with (
            process.running(),
            aiohttp.ClientSession(url, connector=connector, headers=JSON, timeout=limit) as session,
        ):
            await ready(session)
            pods = Pods(session, plan)
            telling = asyncio.create_task(_tell(pods, watch, receiver))
            async with asyncio.TaskGroup() as tasks:
                delivering = tasks.create_task(pods.run())
                tasks.create_task(_strike(pods, watch, plan))
                await delivering
                stored_seconds = monotonic() - begin
            reads = await _reads(session)
            audit = await _all_forwarded(receiver, plan)
            watch.look()
            telling.cancel()
            if await asyncio.wait([telling]) and not telling.cancelled():
                telling.result()
    return {
        "artifacts": plan.total,
        "kills": len(watch.restarts),
        "stored_per_second": round(plan.total / stored_seconds),
        "seconds": round(monotonic() - begin),
        "duplicates": pods.duplicates,
        "conflicts": pods.conflicts,
        "forwarded_twice": audit["repeated"],
        "rss_mib_largest": round(watch.peak_bytes / _MIB),
        **spread("restart_seconds", watch.restarts),
        "restart_seconds_full": round(watch.restarts[-1], 2),
        "restart_cpu_seconds_first": round(watch.cores[0], 2),
        "restart_cpu_seconds_full": round(watch.cores[-1], 2),
        "wal_mib_largest": round(watch.largest_log / _MIB),
        **reads,
    }


def _gateway(database: str, folder: Path, receiver: str) -> tuple[KeptProcess, str]:
    rounds, port = folder / "rounds.json", free_port()
    rounds.write_text(json.dumps([round_body(UID, groups=SLOTS, callbackURL=receiver)]))
    settings = {
        "DATABASE": database,
        "PORT": port,
        "METRICS_PORT": free_port(),
        "NETWORK_PORT": free_port(),
        "RECEIVER_PRIVATE": "127.0.0.0/8",
        "PEER_REQUESTS": 1_000_000,  # all pods have one address
    }
    variables = ENVIRONMENT | {f"POC_GATEWAY_{name}": str(value) for name, value in settings.items()}
    argv = (sys.executable, "-m", "tests.simulation.gateway_process", str(rounds))
    return KeptProcess(argv, variables, folder / "gateway.log"), f"http://127.0.0.1:{port}"


def check(url: str, plan: Plan) -> None:
    """Look at what is stored; RuntimeError if something lacks, is too much, or is not what came first."""
    each, table, engine = plan.batches * BATCH, schema.artifacts.c, create_engine(url, statement_seconds=_COUNT_SECONDS)
    counted = select(schema.slots.c.slot, func.count(), func.max(table.nonce)).join(schema.artifacts)
    with engine.connect() as connection:
        found = {slot: (count, last) for slot, count, last in connection.execute(counted.group_by(schema.slots.c.slot))}
        if found != {slot: (each, slot + (each - 1) * SLOTS) for slot in range(SLOTS)}:
            raise RuntimeError(f"not every slot has {each} artifacts: {found}")
        first = select(table.nonce, table.vector).where(table.nonce < SLOTS * BATCH)
        rows = connection.execute(first).all()
    engine.dispose()
    changed = [nonce for nonce, vector in rows if b64encode(vector or b"").decode() != vector_b64(nonce)]
    if changed:
        raise RuntimeError(f"{len(changed)} early leaves have other bytes, the first {changed[0]}")


async def delete(database: Database) -> Figures:
    """Delete the round as the retention does; return how long that takes, and the longest of its transactions."""
    round_id = await database.read(lambda connection: connection.scalar(select(schema.rounds.c.id)))
    assert round_id is not None  # noqa: S101 - it was filled
    begin, longest, left = monotonic(), 0.0, True
    while left:
        chunk = monotonic()
        left = await database.write(lambda connection: delete_some(connection, round_id))
        longest = max(longest, monotonic() - chunk)
    return {"delete_seconds": round(monotonic() - begin, 1), "delete_ms_longest": round(1e3 * longest)}


@contextlib.contextmanager
def database_of(kind: str, folder: Path) -> Iterator[str]:
    """Return the URL of an empty database of a kind."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/gateway.db"
        return
    with postgres() as server:
        yield server.new_database()


def main() -> None:
    """Measure with the database that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--artifacts", type=int, default=20_000_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    plan = Plan(options.artifacts, options.kills, options.seed)
    with ExitStack() as stack:
        # On the repository's disk, since the usual folder may be in memory, where syncing costs nothing.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT)))
        url = stack.enter_context(database_of(options.database, folder))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = dict(runner.run(run(url, folder, plan)))
            check(url, plan)
            database = Database.open(url)
            figures |= runner.run(delete(database))
            database.close()
    report(f"A day on {options.database}", figures)


if __name__ == "__main__":
    main()
