# SPDX-License-Identifier: Apache-2.0
"""The routes that pods deliver to, and the one that the operator reads progress from."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import Connection, insert, select

from poc_gateway import metrics
from poc_gateway.collector.bodies import body_of
from poc_gateway.collector.intake import Intake
from poc_gateway.collector.messages import Delivery, read_generated, require_same_round
from poc_gateway.collector.parsing import Fault, parse
from poc_gateway.collector.progress import progress
from poc_gateway.collector.storing import Outcome
from poc_gateway.errors import Refusal, documented
from poc_gateway.rounds.registry import Fits, KnownRound, RoundDeleted, Rounds
from poc_gateway.rounds.terms import RoundTerms
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_operator.observed.gateway import CollectedRound
from vllm_poc.wire.callbacks import Callback, GeneratedArtifacts, GeneratedDistances

_log = logging.getLogger(__name__)
#: Nonces that a line of the log names.
_MOST_LOGGED = 5


class RefusedArtifact(BaseModel):
    """An artifact that was not stored, without a nonce if that could not be read."""

    nonce: int | None
    reason: Fault


class Receipt(BaseModel):
    """What became of a ``/generated`` message; the counts are of artifacts."""

    stored: int
    duplicates: int
    conflicts: int
    refused: list[RefusedArtifact]


def router(database: Database, rounds: Rounds, *, stored: Callable[[], None]) -> APIRouter:
    """Return the routes; ``stored`` is called when there may be something new to forward."""
    callbacks = APIRouter(
        prefix="/callbacks/{namespace}/{name}/{uid}",
        responses=documented(401, 404, 422, 503, 507),
    )
    intake = Intake(database)

    @callbacks.post("/generated", response_model=Receipt, openapi_extra=body_of(GeneratedArtifacts, GeneratedDistances))
    async def generated(namespace: str, name: str, uid: str, request: Request) -> JSONResponse:
        """Store artifacts, each nonce once. The answer is given when they are durable; one bad one costs no other."""
        body = await request.body()
        known = await _find(rounds, namespace, name, uid, lambda candidate: _read(candidate, body))
        delivery = _read(known, body)
        _account_received(delivery)
        outcome = await intake.store(delivery)
        if outcome is None:
            raise _deleted(rounds, uid)
        _account_stored(known.terms, outcome)
        if outcome.stored:
            stored()
        return JSONResponse(_receipt(delivery, outcome))

    @callbacks.post("/validated", openapi_extra=body_of(Callback))
    async def validated(namespace: str, name: str, uid: str, request: Request) -> dict[str, str]:
        """Store a verdict, to be passed on to the round's receiver if it has one."""
        body = await request.body()

        def check(candidate: KnownRound) -> None:
            # The rest is for the receiver to judge; older pods leave out what is new.
            require_same_round(candidate.terms, parse(Callback, body))

        known = await _find(rounds, namespace, name, uid, check)
        check(known)
        await _store_verdict(database, rounds, known, body.decode())
        stored()
        return {"status": "OK"}

    routes = APIRouter()
    routes.include_router(callbacks)

    @routes.get("/rounds/{namespace}/{name}/progress", responses=documented(401, 404, 422, 503))
    async def round_progress(namespace: str, name: str, uid: str | None = None) -> CollectedRound:
        """Tell how much of a round is stored and forwarded; 404 if nothing was delivered yet."""
        found = await database.read(lambda connection: progress(connection, namespace, name, uid))
        if found is None:
            raise _unknown(namespace, name, uid)
        return found

    return routes


async def _find(rounds: Rounds, namespace: str, name: str, uid: str, fits: Fits) -> KnownRound:
    try:
        known = await rounds.find(namespace, name, uid, fits)
    except RoundDeleted as error:
        raise _deleted(rounds, uid) from error
    if known is None:
        raise _unknown(namespace, name, uid)
    return known


def _unknown(namespace: str, name: str, uid: str | None) -> Refusal:
    with_uid = f" with uid {uid}" if uid else ""
    detail = f"nothing is known of a PoCRound {namespace}/{name}{with_uid}: deliver to a round that exists"
    return Refusal(HTTPStatus.NOT_FOUND, "RoundUnknown", detail)


def _deleted(rounds: Rounds, uid: str) -> Refusal:
    # For its age, since it was found or a moment before: a pod that still computes begins it anew.
    rounds.forget(uid)
    detail = f"the round {uid} was deleted a moment ago, or is being deleted: deliver again"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "RoundDeleted", detail, headers={"Retry-After": "1"})


def _read(known: KnownRound, body: bytes) -> Delivery:
    uid = known.terms.uid
    try:
        delivery = read_generated(known, body)
    except Refusal as error:
        metrics.REFUSED.labels(error.body.reason).inc()
        _log.warning("round %s: a delivery is refused: %s", uid, error.detail)
        raise
    if delivery.refused and not delivery.found:
        summary = _account_received(delivery)
        detail = f"none of the artifacts can be one of the round {uid} ({summary}): correct the sender"
        raise Refusal(HTTPStatus.BAD_REQUEST, "ArtifactsRefused", detail)
    return delivery


def _account_received(delivery: Delivery) -> str:
    metrics.RECEIVED.inc(len(delivery.found) + len(delivery.refused))
    faults = Counter(refused.reason for refused in delivery.refused)
    for fault, count in faults.items():
        metrics.REFUSED.labels(fault).inc(count)
    summary = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    if summary:
        _log.warning("round %s: artifacts are refused: %s", delivery.known.terms.uid, summary)
    return summary


def _account_stored(terms: RoundTerms, outcome: Outcome) -> None:
    metrics.STORED.inc(outcome.stored)
    metrics.DUPLICATES.inc(outcome.duplicates)
    if outcome.conflicts:
        metrics.CONFLICTS.inc(len(outcome.conflicts))
        some = ", ".join(f"{nonce} of slot {terms.offset_of(nonce)}" for nonce in outcome.conflicts[:_MOST_LOGGED])
        _log.warning("round %s: %d nonces came again with other content: %s", terms.uid, len(outcome.conflicts), some)


def _receipt(delivery: Delivery, outcome: Outcome) -> dict[str, object]:
    return {
        "stored": outcome.stored,
        "duplicates": outcome.duplicates,
        "conflicts": len(outcome.conflicts),
        "refused": [refused._asdict() for refused in delivery.refused],
    }


async def _store_verdict(database: Database, rounds: Rounds, known: KnownRound, body: str) -> None:
    if not await database.write(lambda connection: _keep(connection, known, body)):
        raise _deleted(rounds, known.terms.uid)


def _keep(connection: Connection, known: KnownRound, body: str) -> bool:
    """Write a verdict down; return whether its round is there."""
    kept = select(schema.rounds.c.id).where(schema.rounds.c.id == known.id, schema.ROUND_IS_KEPT)
    if connection.scalar(kept) is None:
        return False
    receiver = known.terms.receiver
    values = {
        "round_id": known.id,
        "url": None if receiver is None else f"{receiver.rstrip('/')}/validated",
        "body": body,
        "state": "kept" if receiver is None else "waiting",
        "created_at": time.time_ns() // 1_000_000,
    }
    connection.execute(insert(schema.callbacks).values(values))
    return True
