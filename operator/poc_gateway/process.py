# SPDX-License-Identifier: Apache-2.0
"""The process: the database, the server and the tasks beside it, begun and ended in order."""

import asyncio
import signal
import socket
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import prometheus_client
import uvicorn

from poc_gateway.app import Parts, Ports, inside_app, network_app
from poc_gateway.metrics import DatabaseGauges
from poc_gateway.network.cluster import Cluster
from poc_gateway.network.service import Network
from poc_gateway.network.template import RoundTemplate
from poc_gateway.outbox.outbox import Outbox
from poc_gateway.rounds.registry import ReadRound, Rounds
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.retention import Retention
from poc_operator.clients.pods.client import PodClient

#: Requests that are under way may take this long to finish at the end.
GRACE_SECONDS = 20
#: Longer than clients keep a connection that they do not use, so that none is closed under a request.
KEEP_ALIVE_SECONDS = 75
#: A fleet of pods may connect at once.
BACKLOG = 2048


class Server(uvicorn.Server):
    """A server that ends at a signal, but leaves it to the process to end after it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop serving at SIGTERM or SIGINT; uvicorn's own way would kill the process before the database is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def run(settings: Settings, read_round: ReadRound, cluster: Cluster | None = None) -> None:
    """Serve until SIGTERM, the network's routes on ``cluster``.

    DatabaseError, ValueError or OSError if the database, the round template or a port cannot be used.
    """
    async with AsyncExitStack() as stack:
        database = Database.open(settings.database.get_secret_value())
        stack.callback(database.close)
        rounds, outbox = Rounds(database, read_round), Outbox(database, settings)
        network = await _network(stack, settings, database, cluster)
        registry = prometheus_client.REGISTRY
        registry.register(DatabaseGauges(database))
        metrics_server, _ = prometheus_client.start_http_server(settings.metrics_port, registry=registry)
        stack.callback(metrics_server.shutdown)
        parts = Parts(settings=settings, database=database, rounds=rounds, outbox=outbox, network=network)
        await _beside(_serve(parts), Retention(database, settings, rounds.forget).run(), outbox.run())


async def _network(
    stack: AsyncExitStack, settings: Settings, database: Database, cluster: Cluster | None
) -> Network | None:
    if cluster is None or settings.round_template is None:
        return None
    token = settings.pod_token.get_secret_value() if settings.pod_token is not None else None
    client = await stack.enter_async_context(PodClient(token))
    template = RoundTemplate.load(settings.round_template)
    network = Network(cluster=cluster, template=template, client=client, database=database, settings=settings)
    await network.start()
    stack.push_async_callback(network.close)
    return network


async def _beside(serving: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
    """Run others until the server ends. If one of them fails, all end: a gateway that forwards nothing looks well."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(other) for other in others]
        await serving
        for task in tasks:
            task.cancel()


async def _serve(parts: Parts) -> None:
    settings = parts.settings
    config = uvicorn.Config(
        Ports(inside_app(parts), network_app(parts), settings.network_port),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    await Server(config).serve(sockets=[_listen(settings.port), _listen(settings.network_port)])


def _listen(port: int) -> socket.socket:
    # Pods reach it from other nodes, by whichever protocol the cluster has.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=BACKLOG)  # noqa: S104
