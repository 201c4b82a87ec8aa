# SPDX-License-Identifier: Apache-2.0
"""The process: the database, the server and the tasks beside it, begun and ended in order."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIServer

import prometheus_client
import uvicorn
from fastapi import FastAPI

from poc_gateway.app import Parts, create_app
from poc_gateway.metrics import DatabaseGauges
from poc_gateway.rounds.registry import ReadRound, Rounds
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.retention import Retention

#: Requests that are under way may take this long to finish at the end.
GRACE_SECONDS = 20
#: Longer than clients keep a connection that they do not use, so that none is closed under a request.
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """A server that ends at a signal, but leaves it to the process to end after it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop serving at SIGTERM or SIGINT; uvicorn's own way would kill the process before the database is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def run(settings: Settings, read_round: ReadRound) -> None:
    """Serve until SIGTERM. DatabaseError or ValueError if the database cannot be opened."""
    database = Database.open(settings.database.get_secret_value())
    try:
        rounds = Rounds(database, read_round)
        prometheus_client.REGISTRY.register(DatabaseGauges(database))
        metrics_server = _serve_metrics(settings.metrics_port)
        tasks = [asyncio.create_task(Retention(database, settings, rounds.forget).run())]
        await _serve(create_app(Parts(settings=settings, database=database, rounds=rounds)), settings.port)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        metrics_server.shutdown()
    finally:
        database.close()


def _serve_metrics(port: int) -> WSGIServer:
    try:
        server, _ = prometheus_client.start_http_server(port)
    except OSError as error:
        raise ValueError(f"POC_GATEWAY_METRICS_PORT: port {port} cannot be used ({error}): set another") from error
    return server


async def _serve(app: FastAPI, port: int) -> None:
    config = uvicorn.Config(
        app,
        host="0.0.0.0",  # noqa: S104 - pods reach it from other nodes
        port=port,
        http="httptools",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    await Server(config).serve()
