# SPDX-License-Identifier: Apache-2.0
"""The routes under ``/rounds`` that read what is stored."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, NamedTuple, TypeVar

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection

from poc_gateway.errors import Refusal, documented, field_refusal
from poc_gateway.outbox.commands import Sending
from poc_gateway.outbox.listing import counts
from poc_gateway.outbox.pace import public_url
from poc_gateway.query import queries
from poc_gateway.query.cursor import Positions, cursor_of, positions, read_cursor
from poc_gateway.query.export import MEDIA_TYPES, Writer, accepted, chunks, writer
from poc_gateway.query.messages import (
    ArtifactsQuery,
    ConflictPage,
    ConflictsQuery,
    Rates,
    RoundDetail,
    RoundEntry,
    RoundPage,
    RoundQuery,
    RoundsQuery,
    SampleQuery,
    Summary,
)
from poc_gateway.query.summary import draw, rates, summarise
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, find
from poc_operator.apis.v1alpha1.validation import Proof
from poc_operator.observed import CollectedRound
from vllm_poc.wire.messages import MAX_TEXT, Protocol

#: Header of an export: the cursor for what comes after it.
NEXT_SINCE = "X-Next-Since"
_EXPORT = {
    "content": {media: {} for media in MEDIA_TYPES.values()},
    "headers": {NEXT_SINCE: {"description": "`since` of the next export", "schema": {"type": "string"}}},
}


Told = TypeVar("Told", RoundEntry, CollectedRound)


class Results:
    """What is stored, read for one answer after the other. Without ``limits`` no round has reached one."""

    def __init__(self, database: Database, outbox: Sending, *, limits: bool) -> None:
        self._database = database
        self._outbox = outbox
        self._limits = limits

    async def rounds(self, query: Annotated[RoundsQuery, Query()]) -> RoundPage:
        """List the rounds that something was delivered for, newest first."""
        page = await self._database.read(lambda connection: queries.round_page(connection, query))
        return page.model_copy(update={"rounds": [self._told(one) for one in page.rounds]})

    async def round(self, namespace: str, name: str, query: Annotated[RoundQuery, Query()]) -> RoundDetail:
        """Tell a round's terms, sums and slots."""

        def read(connection: Connection) -> RoundDetail:
            known = _find(connection, namespace, name, query)
            slots = queries.slot_entries(connection, known)
            return RoundDetail(round=self._told(queries.round_entry(connection, known)), slots=slots)

        return await self._database.read(read)

    async def progress(self, namespace: str, name: str, query: Annotated[RoundQuery, Query()]) -> CollectedRound:
        """Tell how much of a round is stored and forwarded; with `uid` also before its first delivery."""
        found = await self._database.read(lambda one: queries.progress(one, namespace, name, query.uid))
        if found is None and query.uid is not None:
            # The operator asks about each of its rounds every 2 s, also while it waits: that is no error.
            return queries.nothing(query.uid)
        if found is None:
            raise _unknown(namespace, name, query)
        return self._told(await self._with_trouble(*found))

    async def _with_trouble(self, known: KnownRound, found: CollectedRound) -> CollectedRound:
        """Add why the receiver does not take what waits for it, if it does not, and how much that is."""
        receiver = known.terms.receiver
        if receiver is None or found.stored <= found.forwarded:
            return found
        trouble = await self._outbox.trouble(known)
        if trouble.error is None:
            return found
        waiting = (await self._database.read(lambda connection: counts(connection, known.id))).backlog
        error = f"{public_url(receiver)}: {trouble.error}"
        return found.model_copy(update={"forwarding_error": error[:MAX_TEXT], "waiting": waiting}) if waiting else found

    async def summary(self, namespace: str, name: str, query: Annotated[RoundQuery, Query()]) -> Summary:
        """Tell a round's counts and arrivals, and how its distances, its vectors' norms or its indices are spread."""
        found = await summarise(self._database, await self._known(namespace, name, query))
        return found.model_copy(update={"round": self._told(found.round)})

    async def rates(self, namespace: str, name: str, query: Annotated[RoundQuery, Query()]) -> Rates:
        """Tell how fast a round's results arrived over time; of a large round it is estimated."""
        return await self._database.read(lambda one: rates(one, _find(one, namespace, name, query)))

    async def conflicts(self, namespace: str, name: str, query: Annotated[ConflictsQuery, Query()]) -> ConflictPage:
        """List results that arrived for nonces with another result."""

        def read(connection: Connection) -> ConflictPage:
            return queries.conflict_page(connection, _find(connection, namespace, name, query), query)

        return await self._database.read(read)

    async def sample(self, namespace: str, name: str, query: Annotated[SampleQuery, Query()]) -> list[Proof]:
        """Draw proofs for a PoCValidation; the same seed draws the same while nothing more is stored."""

        def read(connection: Connection) -> list[Proof]:
            known = _find(connection, namespace, name, query)
            drawn = draw(connection, known, query.nonces, query.seed)
            is_chain = known.terms.protocol is Protocol.DECODE
            return [
                Proof(
                    nonce=each.nonce,
                    vector=None if is_chain else queries.base64_of(each.vector),
                    chain=queries.base64_of(each.vector) if is_chain else None,
                    distance=repr(each.distance) if each.distance is not None else None,
                )
                for each in drawn
            ]

        return await self._database.read(read)

    async def artifacts(
        self,
        namespace: str,
        name: str,
        query: Annotated[ArtifactsQuery, Query()],
        accept: Annotated[str, Header()] = "*/*",
    ) -> StreamingResponse:
        """Export what is stored of a round now, in the order of (slot, nonce).

        Without ``format`` the header Accept decides. An export that cannot be finished breaks its connection off. The
        header X-Next-Since is what ``since`` may be next time, for what came after; with ``limit`` there is none.
        """
        format_ = query.format or accepted(accept)
        span = await self._database.read(lambda connection: _span(connection, namespace, name, query))
        file = f"{namespace}-{name}-{span.known.terms.uid[:8]}.{format_}"
        headers = {"Content-Disposition": f'attachment; filename="{file}"', "Vary": "Accept"}
        if span.cursor is not None:
            headers[NEXT_SINCE] = span.cursor
        out = await asyncio.to_thread(writer, format_, span.known.terms)
        body = self._body(span, query, out)
        return StreamingResponse(body, media_type=MEDIA_TYPES[format_], headers=headers)

    def _told(self, found: Told) -> Told:
        # Without limits nobody counts, and what an earlier process has told of one would stay for ever.
        return found if self._limits else found.model_copy(update={"limit_reached": None})

    async def _known(self, namespace: str, name: str, query: RoundQuery) -> KnownRound:
        return await self._database.read(lambda connection: _find(connection, namespace, name, query))

    async def _body(self, span: "_Span", query: ArtifactsQuery, out: Writer) -> AsyncGenerator[bytes]:
        yield out.begin()
        async with aclosing(chunks(self._database, span.known, query, span.begin, span.end)) as tables:
            async for table in tables:
                yield await asyncio.to_thread(out.chunk, table)
        yield await asyncio.to_thread(out.end)


def router(database: Database, outbox: Sending, *, limits: bool) -> APIRouter:
    """Return the routes; ``limits`` if there is any that a round may reach. ``outbox`` tells of its receivers."""
    routes = APIRouter(prefix="/rounds", responses=documented(401, 422, 503))
    results, one = Results(database, outbox, limits=limits), "/{namespace}/{name}"
    routes.get("")(results.rounds)
    of_round = documented(404)
    exports = documented(404, 406, 410) | {200: _EXPORT}
    routes.get(one, responses=of_round)(results.round)
    routes.get(f"{one}/progress", responses=of_round)(results.progress)
    routes.get(f"{one}/summary", responses=of_round)(results.summary)
    routes.get(f"{one}/rates", responses=of_round)(results.rates)
    routes.get(f"{one}/conflicts", responses=of_round, response_model_exclude_none=True)(results.conflicts)
    routes.get(f"{one}/sample", responses=of_round, response_model_exclude_none=True)(results.sample)
    routes.get(f"{one}/artifacts", responses=exports, response_class=StreamingResponse)(results.artifacts)
    return routes


class _Span(NamedTuple):
    """What one export has: a round between two positions, and the cursor for the next."""

    known: KnownRound
    begin: Positions
    end: Positions
    cursor: str | None


def _span(connection: Connection, namespace: str, name: str, query: ArtifactsQuery) -> _Span:
    known = _find(connection, namespace, name, query)
    _refuse_foreign_filters(known, query)
    begin = read_cursor(connection, known, query.since) if query.since is not None else {}
    end = positions(connection, known)
    return _Span(known, begin, end, cursor_of(connection, known, end) if query.limit is None else None)


def _find(connection: Connection, namespace: str, name: str, query: RoundQuery) -> KnownRound:
    known = find(connection, namespace, name, query.uid)
    if known is None:
        raise _unknown(namespace, name, query)
    return known


def _unknown(namespace: str, name: str, query: RoundQuery) -> Refusal:
    which = f"{namespace}/{name}" + (f" with uid {query.uid}" if query.uid is not None else "")
    detail = f"nothing was delivered for a round {which}: GET /rounds lists those that are stored"
    return Refusal(HTTPStatus.NOT_FOUND, "RoundUnknown", detail)


def _refuse_foreign_filters(known: KnownRound, query: ArtifactsQuery) -> None:
    if query.slot is not None and query.slot not in known.slots:
        raise field_refusal("slot", f"{query.slot} is no slot of this round: GET the round to see them")
    if query.below is not None and known.terms.protocol is not Protocol.DISTANCE:
        raise field_refusal("below", "the round has artifacts and no distances: leave it out")
