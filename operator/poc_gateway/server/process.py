# SPDX-License-Identifier: Apache-2.0
"""The process: the server, then the database, the two apps and the tasks beside them, begun and ended in order.

One app is for the inside of the cluster and one for the network, each on a port of its own.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from ssl import SSLContext

import prometheus_client
import uvicorn
from fastapi import APIRouter, FastAPI
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from poc_gateway.errors import install_handlers
from poc_gateway.ingest import routes as ingest_routes
from poc_gateway.ingest.quotas import Quota
from poc_gateway.node_api import routes as node_routes
from poc_gateway.node_api.base_url import CHAT_PREFIX, BaseUrls, Chat, is_chat
from poc_gateway.node_api.chat import ChatPlaces
from poc_gateway.node_api.service import ClusterOf, NodeApi, running_ml_nodes
from poc_gateway.outbox import routes as outbox_routes
from poc_gateway.outbox.commands import Commands, Sending
from poc_gateway.outbox.forward import Outbox
from poc_gateway.query import routes as query_routes
from poc_gateway.query.web import routes as web_routes
from poc_gateway.query.web.feed import Feed, Viewers
from poc_gateway.query.web.seen import ListObjects
from poc_gateway.server import health
from poc_gateway.server.connections import BoundedProtocol, Connections, bounded_by, raise_descriptor_limit
from poc_gateway.server.gauges import DatabaseGauges, JobGauges
from poc_gateway.server.middleware import (
    Access,
    BodyLimit,
    JsonBodies,
    Limits,
    inside_access,
    network_access,
)
from poc_gateway.server.owner import BUCKET_MODULE, Owner, archiving
from poc_gateway.server.standby import Gate, first_of, opened, reached, taken, while_owner
from poc_gateway.server.telemetry import AccessLog, RouteNames, Telemetry, templates_of
from poc_gateway.server.tls import Certificate, TlsListener
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import is_shared
from poc_gateway.store.fence import fence_of
from poc_gateway.store.retention import Clock, Retention
from poc_gateway.store.rounds import ReadRound, Rounds
from poc_operator.clients.kube.callback_secret import ReadSecret

_log = logging.getLogger(__name__)

#: Requests that are under way may take this long to finish at the end.
GRACE_SECONDS = 20
#: Longer than clients keep a connection that they do not use, so that none is closed under a request.
KEEP_ALIVE_SECONDS = 75
#: A fleet of pods may connect at once.
BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class Components:
    """What the routes work on. Without ``ml_nodes`` the network's routes answer that they are not configured.

    Without a ``feed`` there is no web page, and without a ``certificate`` no TLS at the network's port.
    """

    settings: Settings
    database: Database
    rounds: Rounds
    outbox: Sending
    ml_nodes: Sequence[NodeApi] = ()
    feed: Feed | None = None
    certificate: Certificate | None = None


def inside_app(components: Components) -> FastAPI:
    """Return the app for pods, the operator and people."""
    database, settings = components.database, components.settings
    quota = Quota(database.room, results=settings.round_results, percent=settings.round_volume_percent)
    app = _app(
        "Proof-of-Compute gateway",
        health.router(database, components.certificate),
        ingest_routes.router(database, components.rounds, quota, stored=components.outbox.wake),
        outbox_routes.router(database, components.outbox),
        query_routes.router(database, components.outbox, limits=quota.limits),
        *([web_routes.router(components.feed)] if components.feed is not None else []),
    )
    # What is added last is asked first.
    app.add_middleware(JsonBodies)
    app.add_middleware(Access, authorize=inside_access(settings))
    body = BodyLimit("POC_GATEWAY_BODY_BYTES", settings.body_bytes)
    app.add_middleware(Limits, body=body, body_seconds=settings.body_seconds, peer_requests=settings.peer_requests)
    app.add_middleware(RouteNames, templates=templates_of(app))
    return app


def network_app(components: Components, chats: ChatPlaces | None = None) -> FastAPI:
    """Return the app for the network's node: all ML nodes, each below its base URL; chat has no more than ``chats``."""
    settings = components.settings
    app = _app("Proof-of-Compute node", health.ml_node_router(components.database), node_routes.router())
    app.add_middleware(JsonBodies)
    app.add_middleware(Chat, places=chats)
    app.add_middleware(Access, authorize=network_access(settings.network_token))
    app.add_middleware(RouteNames, templates=templates_of(app), proxied=CHAT_PREFIX)
    app.add_middleware(BaseUrls, ml_nodes=components.ml_nodes)
    body = BodyLimit("POC_GATEWAY_NETWORK_BODY_BYTES", settings.network_body_bytes)
    seconds, requests = settings.body_seconds, settings.peer_requests
    app.add_middleware(Limits, body=body, body_seconds=seconds, peer_requests=requests, apart=is_chat)
    return app


def _app(title: str, *routers: APIRouter) -> FastAPI:
    # Routes as they are: those of an included router are made once more, which takes a tenth of a second.
    routes = [route for router in routers for route in router.routes]
    # A redirect to the path without its slash would lose the ML node's base URL.
    app = FastAPI(title=title, version="1", docs_url=None, redoc_url=None, redirect_slashes=False, routes=routes)
    install_handlers(app)
    return app


class Server(uvicorn.Server):
    """A server that leaves signals to the process, which has two of them and a database to close after them.

    With ``context`` it speaks TLS.
    """

    def __init__(self, config: uvicorn.Config, http: type[BoundedProtocol], context: SSLContext | None) -> None:
        super().__init__(config)
        self._http = http
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets if self._context is None else [])
        if self._context is not None:
            protocol = partial(self._http, self.config, self.server_state, self.lifespan.state)
            listeners = [TlsListener(one, self._context, self._http.table, protocol) for one in sockets or []]
            self.servers += listeners  # type: ignore[arg-type]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none; uvicorn's own way would kill the process before the database is closed."""
        yield


async def run(
    settings: Settings,
    read_round: ReadRound,
    cluster_of: ClusterOf | None = None,
    read_secret: ReadSecret | None = None,
    list_objects: ListObjects | None = None,
) -> None:
    """Serve until SIGTERM, each ML node's routes on what ``cluster_of`` returns for it.

    ``read_secret`` reads the Secrets of receivers, without which results for those that ask for a user wait.
    ``list_objects`` lists fleets and rounds for the web page, which shows what is stored alone without it.

    While another gateway owns the SQLite database, stand by; one on PostgreSQL serves beside it. DatabaseError,
    ValueError or OSError if the database, the file of the ML nodes, the certificate or a port cannot be used.
    """
    connections = Connections(settings, raise_descriptor_limit())
    certificate = Certificate.of(settings.tls_cert, settings.tls_key)
    gates = Gates(
        inside=Gate(),
        network=Gate(),
        chats=connections.chats,
        viewers=Viewers(settings.viewers),
        certificate=certificate,
    )
    servers = Servers(settings, gates, connections)
    outside = Outside(read_round, cluster_of, read_secret, list_objects)
    live = _live_beside_others if is_shared(settings.database.get_secret_value()) else _live_alone
    await first_of(servers.serve(), live(settings, outside, gates), stop=servers.stop)


def leave(settings: Settings, status: int = 0) -> None:
    """End the process at once if S3 hangs: Python, and Arrow after it, would wait for minutes until it is given up.

    To be called when all else has ended, in order or with an error: the process ends with this ``status``.
    """
    if settings.archive_bucket is None or BUCKET_MODULE not in sys.modules:
        return
    from poc_gateway.query.bucket import hangs  # noqa: PLC0415 - a gateway without an archive starts sooner

    if hangs():
        _log.warning("S3 does not answer: the process ends without it, and the round is archived later")
        logging.shutdown()
        os._exit(status)


@dataclass(frozen=True)
class Outside:
    """What the process asks of the API server, as `run` has it."""

    read_round: ReadRound
    cluster_of: ClusterOf | None
    read_secret: ReadSecret | None
    list_objects: ListObjects | None


@dataclass(frozen=True)
class Gates:
    """What stands before the app of each port; with a ``certificate`` the network's speaks TLS."""

    inside: Gate
    network: Gate
    chats: ChatPlaces
    viewers: Viewers
    certificate: Certificate | None

    def tell(self, reason: str) -> None:
        """Answer with this reason at both, until they are opened."""
        self.inside.tell(reason)
        self.network.tell(reason)

    def open(self, components: Components) -> None:
        """Serve the apps from now on."""
        self.inside.open(inside_app(components))
        self.network.open(network_app(components, self.chats))


async def _live_alone(settings: Settings, outside: Outside, gates: Gates) -> None:
    """Own the database, and do everything beside the requests."""
    url = settings.database.get_secret_value()
    async with AsyncExitStack() as stack:
        fence = fence_of(url)
        stack.callback(fence.close)
        await taken(fence, gates.tell)
        gates.tell("the database is being opened, and its schema brought up to date")
        database = await opened(partial(Database.open, url, reserve_bytes=settings.reserve_bytes, fenced=True))
        stack.push_async_callback(asyncio.to_thread, database.close)
        clock = Clock(database)
        rounds, outbox = Rounds(database, outside.read_round), Outbox(database, settings, clock, outside.read_secret)
        ml_nodes = await stack.enter_async_context(running_ml_nodes(settings, database, outside.cluster_of))
        stack.callback(_serve_metrics(settings, DatabaseGauges(database), JobGauges(ml_nodes)))
        parts = Components(settings=settings, database=database, rounds=rounds, outbox=outbox, ml_nodes=ml_nodes)
        await _open(stack, outside, gates, parts)
        retention = Retention(database, settings, rounds.forget, clock)
        _freeze()
        await while_owner(fence, database, outbox.run, retention.run, *archiving(database, settings))


async def _live_beside_others(settings: Settings, outside: Outside, gates: Gates) -> None:
    """Serve beside the other gateways on the database, and stand for its owner."""
    url = settings.database.get_secret_value()
    async with AsyncExitStack() as stack:
        gates.tell("the database is being opened, and its schema brought up to date")
        database = await reached(partial(Database.open, url), gates.tell)
        stack.push_async_callback(asyncio.to_thread, database.close)
        rounds, commands = Rounds(database, outside.read_round), Commands(database)
        running = running_ml_nodes(settings, database, outside.cluster_of, shared=True)
        ml_nodes = await stack.enter_async_context(running)
        owner = Owner(settings, commands=commands, rounds=rounds, ml_nodes=ml_nodes, read_secret=outside.read_secret)
        gauges = DatabaseGauges(database, lambda: owner.owns)
        stack.callback(_serve_metrics(settings, gauges, JobGauges(ml_nodes)))
        parts = Components(settings=settings, database=database, rounds=rounds, outbox=commands, ml_nodes=ml_nodes)
        await _open(stack, outside, gates, parts)
        _freeze()
        await owner.run()


async def _open(stack: AsyncExitStack, outside: Outside, gates: Gates, parts: Components) -> None:
    """Serve these, with the web page and the certificate, until the stack ends."""
    feed = Feed(parts.database, gates.viewers, outside.list_objects)
    await stack.enter_async_context(feed.running())
    gates.open(replace(parts, feed=feed, certificate=gates.certificate))


def _serve_metrics(settings: Settings, *gauges: Collector) -> Callable[[], object]:
    """Serve the metrics with these gauges; return what ends that."""
    for one in gauges:
        prometheus_client.REGISTRY.register(one)
    server, _ = prometheus_client.start_http_server(settings.metrics_port, registry=prometheus_client.REGISTRY)
    return server.shutdown


def _freeze() -> None:
    # What is there for good need not be looked through again and again: that takes 0.1 s, and chat stands still.
    gc.collect()
    gc.freeze()


class Servers:
    """The servers of both ports; the network's speaks TLS if there is a certificate."""

    def __init__(self, settings: Settings, gates: Gates, connections: Connections) -> None:
        self._viewers = gates.viewers
        self._certificate = gates.certificate
        self._access_log = AccessLog(settings.access_log, settings.log_format)
        ports = (
            ("inside", settings.port, gates.inside, None),
            ("network", settings.network_port, gates.network, self._certificate),
        )
        self._servers = [
            (_server(Telemetry(gate, port=name, access_log=self._access_log), tls, connections), _listen(port))
            for name, port, gate, tls in ports
        ]

    async def serve(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        watching = asyncio.create_task(self._certificate.watch()) if self._certificate is not None else None
        await asyncio.gather(*[server.serve(sockets=[listener]) for server, listener in self._servers])
        self._access_log.flush()
        if watching is not None:
            watching.cancel()

    def stop(self) -> None:
        """End in order."""
        self._viewers.end()
        for server, _ in self._servers:
            server.should_exit = True

    def _end(self, number: int) -> None:
        self._viewers.end()
        for server, _ in self._servers:
            server.handle_exit(number, None)


def _server(app: ASGIApp, certificate: Certificate | None, connections: Connections) -> Server:
    http = bounded_by(connections)
    config = uvicorn.Config(
        app,
        http=http,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return Server(config, http, certificate.context if certificate is not None else None)


def _listen(port: int) -> socket.socket:
    # Pods reach it from other nodes, by whichever protocol the cluster has.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=BACKLOG)  # noqa: S104
