# SPDX-License-Identifier: Apache-2.0
"""Whether the gateway works, which the kubelet asks, and whether an ML node is well, which the network asks.

The gateway is ready without pods: a round may wait for them. An ML node is ill if pods are ready and none answers. A
full disk is no reason to take the gateway out of service: it forwards, tells and deletes, and refuses new deliveries.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, text
from starlette.types import Scope

from poc_gateway.errors import RETRY_AFTER, Refusal, documented
from poc_gateway.node_api.base_url import resolved
from poc_gateway.node_api.node import state_fields
from poc_gateway.node_api.service import NodeApi
from poc_gateway.server.tls import Certificate
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError, DatabaseFull
from poc_operator.clients.errors import StoreError, UnreadableObject

_log = logging.getLogger(__name__)

#: A write that changes nothing may take this long, behind those that wait.
WRITE_SECONDS = 2.0
#: An answer is given again for this long, so that many probes cost one write.
CACHE_SECONDS = 1.0
#: What an ML node's pods told is given again for this long.
ML_NODE_CACHE_SECONDS = 5.0
#: The schema's revision, which is always there: a full disk or a database that may only be read shows in the commit.
_WRITE = text("UPDATE alembic_version SET version_num = version_num")
#: The same where several processes ask, none of which must wait for another's row.
_WRITE_BESIDE_OTHERS = (
    text("UPDATE alembic_version SET version_num = version_num WHERE false"),
    text("SELECT pg_current_xact_id()"),  # with which the transaction has something to commit
)


class Health:
    """Asks the database whether it takes writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = asyncio.Lock()
        self._problem: str | None = None
        self._asked = float("-inf")

    async def problem(self) -> str | None:
        """Return why nothing can be written; None if all is well."""
        async with self._lock:
            if time.monotonic() - self._asked > CACHE_SECONDS:
                self._problem = await self._ask()
                self._asked = time.monotonic()
        return self._problem

    async def _ask(self) -> str | None:
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._database.write(_write)
        except TimeoutError:
            return f"the database took no write within {WRITE_SECONDS:.0f} s: look at the volume, or at PostgreSQL"
        except DatabaseError as error:
            # Anybody may ask, and the driver's text has the database's address and its user's name.
            _log.warning("nothing can be stored: %s", error)
            what = "is full" if isinstance(error, DatabaseFull) else "cannot be used"
            return f"the database {what}: the gateway's log says more"
        return None


def _write(connection: Connection) -> None:
    for query in _WRITE_BESIDE_OTHERS if connection.dialect.name == "postgresql" else (_WRITE,):
        connection.execute(query)


def router(database: Database, certificate: Certificate | None = None) -> APIRouter:
    """Return the routes of the inside's port, which need no token. ``certificate`` is that of the network's port."""
    routes, health = APIRouter(responses=documented(503)), Health(database)

    @routes.get("/livez")
    async def live() -> dict[str, str]:
        """Answer 200 while the process answers at all."""
        return {"status": "OK"}

    @routes.get("/health")
    @routes.get("/readyz")
    async def ready() -> dict[str, str]:
        """Answer 200 if the database takes writes; with `storage` if that is full, and takes nothing new.

        With TLS at the network's port, `certificate_expires` is a time.
        """
        problem = await health.problem()
        if problem is not None:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotReady", problem, headers={"Retry-After": "1"})
        found = {"status": "OK"}
        if database.room.full:
            found["storage"] = "full"
        if certificate is not None and certificate.expires is not None:
            found["certificate_expires"] = certificate.expires.isoformat()
        return found

    return routes


class MlNodeHealth:
    """Whether ML nodes are well; what one tells is given again for `ML_NODE_CACHE_SECONDS`."""

    def __init__(self, database: Database) -> None:
        self._storage = Health(database)
        self._told: dict[str, tuple[float, dict[str, Any]]] = {}
        # Of each ML node: those who ask meanwhile wait for the one answer.
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def tell(self, node: NodeApi) -> dict[str, Any]:
        """Return what ``GET health`` answers. ``problem`` is null if all is well."""
        name = node.ml_node.name
        async with self._locks[name]:
            asked, told = self._told.get(name, (float("-inf"), {}))
            if time.monotonic() - asked > ML_NODE_CACHE_SECONDS:
                told = await self._ask(node)
                self._told[name] = (time.monotonic(), told)
        return told

    async def _ask(self, node: NodeApi) -> dict[str, Any]:
        problem = await self._storage.problem()
        try:
            round_, found = await node.observe()
            gpus = [gpu.name or "unknown" for pod in await node.pods.gpus() if pod is not None for gpu in pod.devices]
        except (StoreError, UnreadableObject) as error:
            return {
                "problem": problem or f"the ML node's rounds and pods cannot be read: {error}",
                "service_state": None,
            }
        state = state_fields(round_, found)
        running, healthy = bool(found), bool(state["inference_healthy"])
        if running and not healthy:
            problem = problem or f"{len(found)} pods are ready, and none of them answers: look at their logs"
        return {
            "problem": problem,
            "service_state": state["state"],
            "gpu": {"available": bool(gpus), "count": len(gpus), "devices": gpus},
            "managers": {
                "pow": {"running": state["state"] == "POW", "healthy": healthy},
                "inference": {"running": running, "healthy": healthy},
                "train": {"running": False, "healthy": False},
            },
        }


def ml_node_router(database: Database) -> APIRouter:
    """Return the routes of the network's port, which need no token. Without an ML node they tell of the gateway."""
    routes, storage, health = APIRouter(responses=documented(404, 503)), Health(database), MlNodeHealth(database)

    async def told(scope: Scope) -> dict[str, Any]:
        found = resolved(scope)
        if found.node is not None:
            return await health.tell(found.node)
        if found.named and found.refusal is not None:
            raise found.refusal
        return {"problem": await storage.problem(), "service_state": None}

    @routes.get("/health", response_model=None)
    @routes.get("/livez", response_model=None)
    async def node_health(request: Request) -> JSONResponse:
        """Tell of the ML node's parts; 503 if the gateway cannot store, or pods are ready and none answers."""
        fields = await told(request.scope)
        return _answer(fields["problem"], {key: value for key, value in fields.items() if key != "problem"})

    @routes.get("/readyz", response_model=None)
    async def node_ready(request: Request) -> JSONResponse:
        """Tell whether the ML node takes calls; 503 as for `health`."""
        problem = (await told(request.scope))["problem"]
        return _answer(problem, {"ready": problem is None})

    return routes


def _answer(problem: str | None, fields: Mapping[str, Any]) -> JSONResponse:
    if problem is None:
        return JSONResponse({"status": "healthy", **fields})
    error = {"reason": "NotReady", "detail": problem}
    return JSONResponse({"status": "unhealthy", **fields, **error}, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER)
