# SPDX-License-Identifier: Apache-2.0
"""A receiver that records what it is sent, and rounds as the gateway writes them down."""

import asyncio
import itertools
import json
import struct
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from sqlalchemy import Connection, insert, select, update

from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.ledger import now
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.schema import artifacts, callbacks, late_items, rounds, slots

K_DIM = 2
_uids = itertools.count()


def settings(**values: object) -> Settings:
    """Return settings that let this machine receive, with pauses that suit a test."""
    chosen: dict[str, object] = {
        "receiver_private": "127.0.0.0/8",
        "payload_artifacts": 4,
        "retry_first_seconds": 0.05,
        "retry_limit_seconds": 0.2,
        **values,
    }
    return Settings.from_environment({f"POC_GATEWAY_{name.upper()}": value for name, value in chosen.items()})  # type: ignore[misc]


def vector(nonce: int) -> bytes:
    """Return a vector that tells its nonce."""
    return struct.pack(f"<{K_DIM}e", nonce, 0.5)


@dataclass
class Post:
    """One request, as it arrived."""

    path: str
    body: dict[str, Any]
    authorization: str | None = None

    @property
    def nonces(self) -> list[int]:
        """The artifacts' nonces; their vectors must belong to them."""
        for artifact in self.body["artifacts"]:
            assert b64decode(artifact["vector_b64"]) == vector(artifact["nonce"])
        return [artifact["nonce"] for artifact in self.body["artifacts"]]


@dataclass
class Receiver:
    """Answers 200, or what ``answer`` makes of a post."""

    answer: Callable[[Post], Awaitable[web.Response | int] | web.Response | int] = lambda _: 200
    posts: list[Post] = field(default_factory=list)
    accepted: list[Post] = field(default_factory=list)
    url: str = ""

    @property
    def nonces(self) -> list[int]:
        """Everything that was accepted, in its order."""
        return [nonce for post in self.accepted for nonce in post.nonces]

    async def _receive(self, request: web.Request) -> web.Response:
        post = Post(request.raw_path, json.loads(await request.read()), request.headers.get("Authorization"))
        self.posts.append(post)
        answer = self.answer(post)
        if isinstance(answer, Awaitable) and not isinstance(answer, web.Response):
            answer = await answer
        response = web.Response(status=answer) if isinstance(answer, int) else answer
        if response.status == 200:
            self.accepted.append(post)
        return response

    @asynccontextmanager
    async def served(self, port: int | None = None) -> AsyncIterator["Receiver"]:
        """Serve on this machine."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self._receive)
        async with TestServer(app, host="127.0.0.1", port=port) as server:
            self.url = f"http://127.0.0.1:{server.port}"
            yield self


async def add_round(
    database: Database, receiver: str | None, *, name: str = "round", node_count: int = 2, **values: object
) -> int:
    """Write a round of the artifact protocol down, with a slot per node; return its id."""
    row: dict[str, object] = {
        "uid": f"uid-{next(_uids)}",
        "namespace": "default",
        "name": name,
        "block_hash": "a" * 64,
        "block_height": 7,
        "public_key": "key",
        "protocol": "artifact",
        "k_dim": K_DIM,
        "model": "org/model",
        "seq_len": 1024,
        "node_count": node_count,
        "n_groups": 1,
        "receiver": receiver,
        "created_at": now(),
        **values,
    }

    def write(connection: Connection) -> int:
        round_id: int = connection.execute(insert(rounds).values(row).returning(rounds.c.id)).scalar_one()
        nodes = [{"round_id": round_id, "slot": node, "node_id": node, "group_id": 0} for node in range(node_count)]
        connection.execute(insert(slots), nodes)
        return round_id

    return await database.write(write)


async def store(database: Database, round_id: int, nonces: Sequence[int], *, distance: float | None = None) -> None:
    """Store artifacts as a delivery does: those that arrive late become late items."""

    def write(connection: Connection) -> None:
        found = select(slots.c.id, slots.c.slot, slots.c.last_nonce).where(slots.c.round_id == round_id)
        rows = [list(row) for row in connection.execute(found.order_by(slots.c.slot))]
        for nonce in nonces:
            slot_id, _, last = row = rows[nonce % len(rows)]
            result = {"distance": distance} if distance is not None else {"vector": vector(nonce)}
            connection.execute(insert(artifacts).values(slot_id=slot_id, nonce=nonce, received_at=0, **result))
            if nonce < last:
                late = {"slot_id": slot_id, "nonce": nonce, "state": "waiting", "reason": "late", "since": now()}
                connection.execute(insert(late_items).values(late))
            counts = {"stored": slots.c.stored + 1, "last_nonce": max(last, nonce), "heard_at": now()}
            connection.execute(update(slots).where(slots.c.id == slot_id).values(counts))
            row[2] = max(last, nonce)

    await database.write(write)


async def add_callback(database: Database, url: str, body: object, *, round_id: int | None = None) -> int:
    """Write a callback down; return its id."""
    row = {"url": url, "body": json.dumps(body), "state": "waiting", "created_at": now(), "round_id": round_id}
    query = insert(callbacks).values(row).returning(callbacks.c.id)
    return await database.write(lambda connection: connection.execute(query).scalar_one())


@asynccontextmanager
async def running(outbox: Outbox) -> AsyncIterator[Outbox]:
    """Run the outbox meanwhile."""
    task = asyncio.create_task(outbox.run())
    try:
        yield outbox
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 30.0) -> None:
    """Wait until the condition holds; TimeoutError if it does not."""
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.02)
