# SPDX-License-Identifier: Apache-2.0
"""How the forwarding of a round stands, and what its receiver refused. A name means the newest round of that name."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection
from yarl import URL

from poc_gateway.errors import Refusal, documented
from poc_gateway.outbox import ledger
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.ledger import Counts
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, newest
from vllm_poc.wire.messages import Nonce

_ROUND = "/rounds/{namespace}/{name}"
#: Most nonces of one replay: each is a parameter of one statement.
REPLAY_NONCES = 10_000


class Forwarding(BaseModel):
    """Counts are artifacts. ``backlog`` is what is still to be sent, ``waiting`` the part of it out of order."""

    #: Without what may be a secret: user, password and query.
    receiver: str | None
    backlog: int
    forwarded: int
    dead: int
    waiting: int
    #: Why the last payload was not accepted; null while payloads are.
    last_error: str | None
    next_try_seconds: float


class DeadLetter(BaseModel):
    """``slot`` is the slot's first nonce, ``since`` milliseconds since 1970."""

    nonce: int
    slot: int
    reason: str
    since: int


class DeadLetters(BaseModel):
    """One page; ``after`` of the next is ``next``, null at the end."""

    dead_letters: list[DeadLetter]
    next: int | None


class Replay(BaseModel):
    """Which dead letters to send again; all without ``nonces``."""

    nonces: Annotated[list[Nonce], Field(max_length=REPLAY_NONCES)] | None = None


class Replayed(BaseModel):
    """How many dead letters wait to be sent again."""

    replayed: int


def router(database: Database, outbox: Outbox) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(responses=documented(401, 404, 422, 503))

    @routes.get(f"{_ROUND}/forwarding")
    async def forwarding(namespace: str, name: str) -> Forwarding:
        """Tell how far the round is forwarded, and what keeps it."""

        def read(connection: Connection) -> tuple[KnownRound, Counts]:
            known = _found(connection, namespace, name)
            return known, ledger.counts(connection, known.id)

        known, counts = await database.read(read)
        if known.terms.receiver is None:
            counts = counts._replace(backlog=0)  # nothing is to be forwarded
        forwarder = outbox.forwarder(known.id)
        return Forwarding(
            receiver=_public(known.terms.receiver),
            **counts._asdict(),
            last_error=forwarder.error if forwarder is not None else None,
            next_try_seconds=round(forwarder.seconds_left, 3) if forwarder is not None else 0.0,
        )

    @routes.get(f"{_ROUND}/dead-letters")
    async def dead_letters(
        namespace: str,
        name: str,
        after: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> DeadLetters:
        """List the artifacts that the receiver refused for good, in the order of their nonces."""

        def read(connection: Connection) -> list[DeadLetter]:
            known = _found(connection, namespace, name)
            found = ledger.dead_letters(connection, known.id, after=after, limit=limit)
            return [DeadLetter(**row) for row in found]

        page = await database.read(read)
        return DeadLetters(dead_letters=page, next=page[-1].nonce if len(page) == limit else None)

    @routes.post(f"{_ROUND}/dead-letters/replay", responses=documented(507))
    async def replay(namespace: str, name: str, request: Annotated[Replay | None, Body()] = None) -> Replayed:
        """Send refused artifacts again, those of `nonces` or all."""

        def write(connection: Connection) -> int:
            known = _found(connection, namespace, name)
            return ledger.replay(connection, known.id, request.nonces if request is not None else None)

        count = await database.write(write)
        outbox.wake()
        return Replayed(replayed=count)

    return routes


def _found(connection: Connection, namespace: str, name: str) -> KnownRound:
    known = newest(connection, namespace, name)
    if known is None:
        detail = f"no round {namespace}/{name} is known: one is from its first delivery on, until it is deleted"
        raise Refusal(HTTPStatus.NOT_FOUND, "RoundUnknown", detail)
    return known


def _public(receiver: str | None) -> str | None:
    if receiver is None:
        return None
    try:
        return str(URL(receiver, encoded=True).with_user(None).with_query(None))
    except ValueError:
        return "not a URL"
