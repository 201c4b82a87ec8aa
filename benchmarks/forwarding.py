# SPDX-License-Identifier: Apache-2.0
"""Forward a backlog to a receiver in a process of its own; print artifacts per second and this process's memory.

PYTHONPATH=operator:image:. python -m benchmarks.forwarding --artifacts 1000000
"""

import argparse
import asyncio
import struct
import tempfile
import time
from pathlib import Path

from sqlalchemy import Connection, func, insert, select

from benchmarks.receiver import accepting
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.ledger import now
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.schema import artifacts, rounds, slots

K_DIM = 12
SLOTS = 8
_INSERT = 20_000


def _fill(connection: Connection, receiver: str, count: int) -> None:
    """Write a round with ``count`` artifacts down."""
    terms = {"uid": "u", "namespace": "default", "name": "bench", "block_hash": "a" * 64, "block_height": 1}
    terms |= {"public_key": "key", "protocol": "artifact", "k_dim": K_DIM, "model": "m", "seq_len": 1024}
    connection.execute(
        insert(rounds).values(**terms, id=1, node_count=SLOTS, n_groups=1, receiver=receiver, created_at=now())
    )
    each = count // SLOTS
    for slot in range(SLOTS):
        last = slot + (each - 1) * SLOTS
        place = {"id": slot + 1, "round_id": 1, "slot": slot, "node_id": slot, "group_id": 0}
        connection.execute(insert(slots).values(**place, stored=each, last_nonce=last))
        for start in range(0, each, _INSERT):
            indices = range(start, min(start + _INSERT, each))
            rows = [
                {"slot_id": slot + 1, "nonce": slot + i * SLOTS, "vector": _vector(i), "received_at": 0}
                for i in indices
            ]
            connection.execute(insert(artifacts), rows)


def _vector(index: int) -> bytes:
    return struct.pack(f"<{K_DIM}e", *([index % 1000 / 1000] * K_DIM))


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def _forwarded(connection: Connection) -> int:
    return int(connection.scalar(select(func.sum(slots.c.forwarded))) or 0)


async def _measure(database: Database, settings: Settings, count: int) -> None:
    outbox = asyncio.create_task(Outbox(database, settings).run())
    begin, done = time.monotonic(), 0
    while done < count:
        await asyncio.sleep(1)
        done = await database.read(_forwarded)
        seconds = time.monotonic() - begin
        print(f"{seconds:6.1f} s  {done:>9} artifacts  {done / seconds:8.0f}/s  {_resident_mib():6.1f} MiB", flush=True)
    outbox.cancel()
    await asyncio.wait([outbox])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=1_000_000)
    parser.add_argument("--payload", type=int, default=1_000, help="artifacts of one payload")
    parser.add_argument("--folder", help="where the database is made; the system's temporary folder without")
    arguments = parser.parse_args()
    count = arguments.artifacts // SLOTS * SLOTS
    values = {"RECEIVER_PRIVATE": "127.0.0.1/32", "PAYLOAD_ARTIFACTS": str(arguments.payload)}
    settings = Settings.from_environment({f"POC_GATEWAY_{name}": value for name, value in values.items()})
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, accepting() as receiver:
        database = Database.open(f"sqlite:///{folder}/gateway.db")
        with database.engine.begin() as connection:
            _fill(connection, receiver, count)
        print(f"{count} artifacts in {SLOTS} slots, payloads of {arguments.payload}", flush=True)
        asyncio.run(_measure(database, settings, count))
        database.close()


if __name__ == "__main__":
    main()
