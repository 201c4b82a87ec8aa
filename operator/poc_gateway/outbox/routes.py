# SPDX-License-Identifier: Apache-2.0
"""What is to be sent and how it ended, for people: listed by state, replayed and given up.

A name of a round means the newest round of that name.
"""

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Path, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection, RowMapping

from poc_gateway.errors import Refusal, documented
from poc_gateway.outbox import callback_ledger, ledger, listing, rivals
from poc_gateway.outbox.commands import Sending
from poc_gateway.outbox.listing import Counts
from poc_gateway.outbox.pace import public_url
from poc_gateway.outbox.states import Event, State
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, find
from poc_gateway.store.schema import one_line
from poc_operator.observed import Decision, RivalNonce, RivalPage
from vllm_poc.wire.messages import Nonce

_ROUND = "/rounds/{namespace}/{name}"
#: Most nonces of one replay: each is a parameter of one statement.
REPLAY_NONCES = 10_000


class Forwarding(BaseModel):
    """Counts are artifacts. ``backlog`` is what is still to be sent: all that is ``waiting`` or ``disputed``.

    ``late`` is the part of it that waits and is sent by itself, out of order.
    """

    #: Without what may be a secret: user, password and query.
    receiver: str | None
    backlog: int
    forwarded: int
    #: Refused by the receiver for good.
    dead: int
    expired: int
    abandoned: int
    late: int
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


class LedgerEntry(BaseModel):
    """Artifacts of one slot in one state, as many as ``artifacts`` says. ``slot`` is the slot's first nonce.

    ``reason`` and ``since``, in milliseconds since 1970, are null where they are not the same for all.
    """

    slot: int
    first_nonce: int
    last_nonce: int
    artifacts: int
    reason: str | None
    since: int | None


class LedgerPage(BaseModel):
    """One page; ``after`` of the next is ``next``, null at the end."""

    entries: list[LedgerEntry]
    next: int | None


class CallbackEntry(BaseModel):
    """A verdict, or the result of a request for nonces. Moments are milliseconds since 1970.

    ``round`` is the uid of the round that it is of, ``request_id`` the request; one of them is null. ``reason`` says
    why the last try failed, or how it ended.
    """

    id: int
    round: str | None
    request_id: str | None
    #: Where it is sent to, without what may be a secret; null if it has no receiver.
    url: str | None
    state: State
    reason: str | None
    created_at: int
    attempts: int
    next_try_at: int
    ended_at: int | None


class CallbackContent(CallbackEntry):
    """A callback, with what is sent: the text of a JSON document."""

    body: str


class CallbackPage(BaseModel):
    """One page; ``after`` of the next is ``next``, null at the end."""

    callbacks: list[CallbackEntry]
    next: int | None


class Abandoned(BaseModel):
    """How many artifacts and callbacks were given up."""

    abandoned: int


class Replay(BaseModel):
    """Which dead letters to send again; all without ``nonces``."""

    nonces: Annotated[list[Nonce], Field(max_length=REPLAY_NONCES)] | None = None


#: How something ends without being delivered.
Replayable = Literal["refused", "expired", "abandoned"]


class Replayed(BaseModel):
    """How many artifacts or callbacks wait to be sent again."""

    replayed: int


class Decisions(BaseModel):
    """Decisions about the results of the round with this ``uid``."""

    uid: str
    decisions: Annotated[list[Decision], Field(min_length=1, max_length=100)]


class Decided(BaseModel):
    """How many of the decisions were new."""

    decided: int


_Limit = Annotated[int, Query(ge=1, le=1000)]
_AfterNonce = Annotated[int, Query(ge=-1, lt=2**31)]
_AfterId = Annotated[int, Query(ge=0, lt=2**63)]
_Id = Annotated[int, Path(ge=1, lt=2**63)]
#: Why something is given up, for whoever reads the list.
_Reason = Annotated[str, Query(min_length=1, max_length=200)]
_BY_REQUEST = "by request"


def router(database: Database, outbox: Sending) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(responses=documented(401, 404, 422, 503))
    _add_forwarding(routes, database, outbox)
    _add_ledger(routes, database, outbox)
    _add_rivals(routes, database, outbox)
    _add_replays(routes, database, outbox)
    _add_callbacks(routes, database)
    return routes


def _add_forwarding(routes: APIRouter, database: Database, outbox: Sending) -> None:
    @routes.get(f"{_ROUND}/forwarding")
    async def forwarding(namespace: str, name: str, uid: Annotated[str | None, Query()] = None) -> Forwarding:
        """Tell how far the round is forwarded, and what keeps it: without ``uid`` the newest of its name."""

        def read(connection: Connection) -> tuple[KnownRound, Counts]:
            known = _found(connection, namespace, name, uid)
            return known, listing.counts(connection, known.id)

        known, counts = await database.read(read)
        if known.terms.receiver is None:
            counts = counts._replace(backlog=0)  # nothing is to be forwarded
        trouble = await outbox.trouble(known)
        return Forwarding(
            receiver=_public(known.terms.receiver),
            **counts._asdict(),
            last_error=trouble.error,
            next_try_seconds=round(trouble.seconds_left, 3),
        )

    @routes.get(f"{_ROUND}/dead-letters")
    async def dead_letters(
        namespace: str,
        name: str,
        after: _AfterNonce = -1,
        limit: _Limit = 100,
    ) -> DeadLetters:
        """List the artifacts that the receiver refused for good, in the order of their nonces."""

        def read(connection: Connection) -> list[DeadLetter]:
            known = _found(connection, namespace, name)
            found = listing.dead_letters(connection, known.id, after=after, limit=limit)
            return [DeadLetter(**row) for row in found]

        page = await database.read(read)
        return DeadLetters(dead_letters=page, next=page[-1].nonce if len(page) == limit else None)

    @routes.post(f"{_ROUND}/dead-letters/replay", responses=documented(507))
    async def replay(namespace: str, name: str, request: Annotated[Replay | None, Body()] = None) -> Replayed:
        """Send refused artifacts again, those of `nonces` or all."""

        nonces = request.nonces if request is not None else None
        count = await database.write(partial(_replay, namespace=namespace, name=name, nonces=nonces))
        outbox.wake()
        return Replayed(replayed=count)


def _add_ledger(routes: APIRouter, database: Database, outbox: Sending) -> None:
    @routes.get(f"{_ROUND}/ledger")
    async def ledger_of_round(
        namespace: str, name: str, state: State, after: _AfterNonce = -1, limit: _Limit = 100
    ) -> LedgerPage:
        """List the artifacts in a state, as ranges of nonces, in the order of their first nonces."""

        def read(connection: Connection) -> list[LedgerEntry]:
            known = _found(connection, namespace, name)
            found = listing.entries(connection, known.id, state, after=after, limit=limit)
            return [LedgerEntry(**row) for row in found]

        page = await database.read(read)
        return LedgerPage(entries=page, next=page[-1].first_nonce if len(page) == limit else None)

    @routes.delete(f"{_ROUND}/ledger", responses=documented(507))
    async def abandon(namespace: str, name: str, reason: _Reason = _BY_REQUEST) -> Abandoned:
        """Give up what the round's receiver has not accepted: it is kept here, and sent no more."""
        known = await database.read(lambda connection: _found(connection, namespace, name))
        if known.terms.receiver is None:  # nothing is to be forwarded
            return Abandoned(abandoned=0)
        return Abandoned(abandoned=await outbox.abandon(known, one_line(reason)))


def _add_replays(routes: APIRouter, database: Database, outbox: Sending) -> None:
    @routes.post(f"{_ROUND}/ledger/replay", responses=documented(507))
    async def replay_ended(namespace: str, name: str, state: Replayable) -> Replayed:
        """Send everything again that has ended in this state without being delivered."""
        known = await database.read(lambda connection: _found(connection, namespace, name))
        return Replayed(replayed=await outbox.replay(known, State(state)))

    @routes.post("/outbox/{id}/replay", responses=documented(507))
    async def replay_callback(id: _Id) -> Replayed:  # noqa: A002 - the parameter's name for clients
        """Send one again that has ended without being delivered. One that has not stays as it is."""

        replayed = await database.write(partial(callback_ledger.replay_callback, id_=id))
        if replayed is None:
            raise _no_callback(id)
        outbox.wake()
        return Replayed(replayed=int(replayed))


def _add_rivals(routes: APIRouter, database: Database, outbox: Sending) -> None:
    @routes.get(f"{_ROUND}/rivals", response_model_exclude_none=True)
    async def undecided(namespace: str, name: str, limit: _Limit = 100) -> RivalPage:
        """List the first nonces with several results of which nobody knows which is honest."""

        def read(connection: Connection) -> list[RivalNonce]:
            return rivals.undecided(connection, _found(connection, namespace, name), limit)

        return RivalPage(rivals=await database.read(read))

    @routes.post(f"{_ROUND}/rivals", responses=documented(409, 507))
    async def decide(namespace: str, name: str, decisions: Decisions) -> Decided:
        """Say which results are honest, for the operator or a person who had them computed again. The first counts."""
        known = await database.read(lambda connection: _found(connection, namespace, name))
        if decisions.uid != known.terms.uid:
            raise _another(namespace, name, known.terms.uid)
        return Decided(decided=await outbox.decide(known, decisions.decisions))


def _add_callbacks(routes: APIRouter, database: Database) -> None:
    @routes.get("/outbox")
    async def callbacks(
        state: State | None = None, uid: str | None = None, after: _AfterId = 0, limit: _Limit = 100
    ) -> CallbackPage:
        """List verdicts and results of requests, the oldest first; those of one round with its `uid`."""

        def read(connection: Connection) -> list[CallbackEntry]:
            found = listing.callback_page(connection, state=state, uid=uid, after=after, limit=limit)
            return [CallbackEntry(**_without_secrets(row)) for row in found]

        page = await database.read(read)
        return CallbackPage(callbacks=page, next=page[-1].id if len(page) == limit else None)

    @routes.get("/outbox/{id}")
    async def callback(id: _Id) -> CallbackContent:  # noqa: A002 - the parameter's name for clients
        """Return one with what is sent, also if it has no receiver."""
        found = await database.read(lambda connection: listing.callback(connection, id))
        if found is None:
            raise _no_callback(id)
        return CallbackContent(**_without_secrets(found))

    @routes.delete("/outbox/{id}", responses=documented(507))
    async def abandon_callback(id: _Id, reason: _Reason = _BY_REQUEST) -> Abandoned:  # noqa: A002
        """Give one up: it is sent no more. One that has ended otherwise stays as it is."""

        def write(connection: Connection) -> bool:
            if listing.callback(connection, id) is None:
                raise _no_callback(id)
            return callback_ledger.callback_ended(connection, id, Event.ABANDONED, one_line(reason))

        return Abandoned(abandoned=int(await database.write(write)))


def _another(namespace: str, name: str, uid: str) -> Refusal:
    detail = f"uid: the newest round {namespace}/{name} has {uid}: name the round that the decisions are about"
    return Refusal(HTTPStatus.CONFLICT, "WrongRound", detail)


def _no_callback(id_: int) -> Refusal:
    detail = f"there is no callback {id_}: GET /outbox lists those that there are"
    return Refusal(HTTPStatus.NOT_FOUND, "CallbackUnknown", detail)


def _without_secrets(row: RowMapping) -> dict[str, Any]:
    return {**row, "url": _public(row["url"])}


def _found(connection: Connection, namespace: str, name: str, uid: str | None = None) -> KnownRound:
    known = find(connection, namespace, name, uid)
    if known is None:
        raise _no_round(namespace, name)
    return known


def _replay(connection: Connection, namespace: str, name: str, nonces: Sequence[int] | None) -> int:
    count = ledger.replay(connection, _found(connection, namespace, name).id, nonces)
    if count is None:  # it began to be deleted in between
        raise _no_round(namespace, name)
    return count


def _no_round(namespace: str, name: str) -> Refusal:
    detail = f"no round {namespace}/{name} is known: one is from its first delivery on, until it is deleted"
    return Refusal(HTTPStatus.NOT_FOUND, "RoundUnknown", detail)


def _public(receiver: str | None) -> str | None:
    return public_url(receiver) if receiver is not None else None
