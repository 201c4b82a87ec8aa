# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.export: how fast a gateway exports a round as Parquet, and how much memory it takes for that.

A SQLite database is filled directly; a process of its own serves the routes of the results over HTTP.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.parquet as pq
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Connection

from benchmarks.figures import Figures, report
from poc_gateway.errors import install_handlers
from poc_gateway.outbox.commands import Commands
from poc_gateway.query.routes import router
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import create_engine
from poc_gateway.store.migrations import migrate
from poc_gateway.store.rounds import KnownRound, write_down
from tests.support.builders.deliveries import K_DIM, a_round
from tests.support.servers.http_server import free_port

SLOTS = 8
SPAN = 100_000  # artifacts of one transaction
START_SECONDS = 30
_INSERT = "INSERT INTO artifacts (slot_id, nonce, vector, received_at) VALUES (?, ?, ?, ?)"


def fill(url: str, count: int) -> str:
    """Store a round of ``count`` artifacts; return its name."""
    engine = create_engine(url)
    migrate(engine)
    round_ = a_round(f"of-{count}", nodes=SLOTS)
    with engine.begin() as connection:
        known = write_down(connection, round_)
    for slot, slot_id in known.slots.items():
        indexes = range(count // SLOTS)
        for first in range(0, len(indexes), SPAN):
            with engine.begin() as connection:
                _insert(connection, known, slot, indexes[first : first + SPAN])
        with engine.begin() as connection:
            counts = {"stored": len(indexes), "last_nonce": slot + (len(indexes) - 1) * SLOTS}
            connection.execute(schema.slots.update().where(schema.slots.c.id == slot_id).values(**counts))
    engine.dispose()
    return known.terms.name


def _insert(connection: Connection, known: KnownRound, slot: int, indexes: range) -> None:
    width, began = 2 * K_DIM, time.time_ns() // 1_000_000
    # Every other byte is an exponent, which must not be that of an infinity.
    data = os.urandom(width * len(indexes)).translate(bytes(byte & 0xBB for byte in range(256)))
    rows = [
        (known.slots[slot], slot + index * SLOTS, data[place * width : (place + 1) * width], began + index)
        for place, index in enumerate(indexes)
    ]
    connection.exec_driver_sql(_INSERT, rows)


def serve(url: str, port: int) -> None:
    """Serve the database at ``url``."""
    database = Database.open(url)
    app = FastAPI(routes=router(database, Commands(database), limits=False).routes)
    install_handlers(app)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


@contextmanager
def server(url: str, port: int) -> Iterator[BaseProcess]:
    """Serve from a process of its own until the block ends."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(url, port))
    process.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not answer within {START_SECONDS} s")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.join()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/rounds", timeout=5):
            return True
    except OSError:
        return False


def peak_mib(process: BaseProcess) -> float:
    """Return the most memory that the process has held."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return round(int(peak.split()[1]) / 1024, 1)


def measure(folder: Path, count: int, format_: str) -> Figures:
    """Export a round of ``count`` artifacts from a server that has done nothing else."""
    url, port, file = f"sqlite:///{folder}/{count}.db", free_port(), folder / "export"
    name = fill(url, count)
    with server(url, port) as process:
        idle, began = peak_mib(process), time.monotonic()
        address = f"http://127.0.0.1:{port}/rounds/ns/{name}/artifacts?format={format_}"
        with urllib.request.urlopen(address, timeout=60) as answer, file.open("wb") as out:
            while piece := answer.read(1 << 20):
                out.write(piece)
        seconds, peak = time.monotonic() - began, peak_mib(process)
    rows = pq.read_metadata(file).num_rows if format_ == "parquet" else count // SLOTS * SLOTS
    return {
        "rows": rows,
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "bytes_per_row": round(file.stat().st_size / rows, 1),
        "size_mib": round(file.stat().st_size / 2**20, 1),
        "idle_rss_mib": idle,
        "peak_rss_mib": peak,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.export", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--format", choices=["parquet", "csv", "jsonl"], default="parquet")
    options = parser.parse_args()
    for count in options.counts:
        with tempfile.TemporaryDirectory() as folder:
            report(f"{options.format} of {count} artifacts", measure(Path(folder), count, options.format))


if __name__ == "__main__":
    main()
