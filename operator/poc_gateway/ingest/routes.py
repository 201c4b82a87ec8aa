# SPDX-License-Identifier: Apache-2.0
"""The routes that pods deliver to."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from poc_gateway import metrics
from poc_gateway.errors import Refusal, documented
from poc_gateway.ingest.authors import Authors
from poc_gateway.ingest.deliveries import GRANT, NOT_GRANTED, Delivery, Fault, read_generated
from poc_gateway.ingest.quotas import Quota
from poc_gateway.ingest.storing import Intake, Outcome, StoreResult
from poc_gateway.ingest.validated import UNKNOWN_AUTHOR, add_verdict, read_verdict
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.rounds import Fits, KnownRound, RoundDeleted, Rounds, RoundTerms
from poc_operator.credentials import Grant
from vllm_poc.logs import bound
from vllm_poc.wire.callbacks import GATEWAY_HEADER, ROUND_UNKNOWN, Callback, GeneratedArtifacts, GeneratedDistances

_log = logging.getLogger(__name__)
#: Nonces that a line of the log names.
_MOST_LOGGED = 5
_FROM_GATEWAY = {GATEWAY_HEADER: "1"}


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


def router(database: Database, rounds: Rounds, quota: Quota, *, stored: Callable[[], None]) -> APIRouter:
    """Return the routes; ``stored`` is called when there may be something new to forward."""
    callbacks = APIRouter(
        prefix="/callbacks/{namespace}/{name}/{uid}",
        responses=documented(401, 403, 404, 422, 425, 503, 507),
    )
    intake, authors = Intake(database, quota), Authors(database)

    @callbacks.post(
        "/generated", response_model=Receipt, openapi_extra=_body_of(GeneratedArtifacts, GeneratedDistances)
    )
    async def generated(namespace: str, name: str, uid: str, request: Request) -> JSONResponse:
        """Store artifacts, each nonce once. The answer is given when they are durable; one bad one costs no other."""
        body, grant = await request.body(), _grant(request)
        with bound(round=uid):
            known = await _find(rounds, namespace, name, uid, lambda candidate: _read(candidate, body, grant))
            delivery = await _read_of_author(authors, known, body, grant)
            _account_received(delivery)
            has_author = grant is None or delivery.author is not None or not delivery.checked
            result = _stored(rounds, delivery, await intake.store(delivery) if has_author else None)
        if result.stored:
            stored()
        return JSONResponse(_receipt(delivery, result), headers=_FROM_GATEWAY)

    @callbacks.post("/validated", responses=documented(409), openapi_extra=_body_of(Callback))
    async def validated(namespace: str, name: str, uid: str, request: Request, response: Response) -> dict[str, str]:
        """Store a verdict, to be passed on to the round's receiver if it has one. A repeated one changes nothing."""
        body, grant = await request.body(), _grant(request)
        with bound(round=uid):
            known = await _find(rounds, namespace, name, uid, lambda candidate: read_verdict(candidate.terms, body))
            verdict = read_verdict(known.terms, body)
            author = await authors.find(known, grant) if grant is not None else UNKNOWN_AUTHOR
            if author is None:
                raise _deleted(rounds, uid)
            taken = await database.write(partial(add_verdict, known, author, verdict), grows=True)
            if isinstance(taken, Refusal):
                raise taken
            if not taken:
                raise _deleted(rounds, uid)
        stored()
        response.headers.update(_FROM_GATEWAY)
        return {"status": "OK"}

    return callbacks


def _grant(request: Request) -> Grant | None:
    grant = request.scope.get("state", {}).get(GRANT)
    return grant if isinstance(grant, Grant) else None


async def _read_of_author(authors: Authors, known: KnownRound, body: bytes, grant: Grant | None) -> Delivery:
    """Return the delivery with its author, who is counted up if it is refused as none of the pod's."""
    try:
        delivery = _read(known, body, grant)
    except Refusal as error:
        if grant is not None and error.body.reason in NOT_GRANTED:
            # A count that cannot be kept is no reason to answer that the delivery may be sent again.
            with suppress(DatabaseError):
                await authors.refused(known, grant, error.detail)
        raise
    if grant is not None and delivery.checked:
        delivery.author = await authors.find(known, grant)
    return delivery


async def _find(rounds: Rounds, namespace: str, name: str, uid: str, fits: Fits) -> KnownRound:
    try:
        known = await rounds.find(namespace, name, uid, fits)
    except RoundDeleted as error:
        raise _deleted(rounds, uid) from error
    if known is None:
        raise _unknown(namespace, name, uid)
    return known


def _unknown(namespace: str, name: str, uid: str) -> Refusal:
    detail = f"nothing is known of a PoCRound {namespace}/{name} with uid {uid}: deliver to a round that exists"
    return Refusal(HTTPStatus.NOT_FOUND, ROUND_UNKNOWN, detail)


def _deleted(rounds: Rounds, uid: str) -> Refusal:
    # For its age, since it was found or a moment before: a pod that still computes begins it anew.
    rounds.forget(uid)
    detail = f"the round {uid} was deleted a moment ago, or is being deleted: deliver again"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "RoundDeleted", detail, headers={"Retry-After": "1"})


def _read(known: KnownRound, body: bytes, grant: Grant | None) -> Delivery:
    uid = known.terms.uid
    try:
        delivery = read_generated(known, body, grant)
    except Refusal as error:
        metrics.REFUSED.labels(error.body.reason).inc()
        _log.warning("a delivery is refused: %s", error.detail)
        raise
    if delivery.refused and not delivery.checked:
        summary = _account_received(delivery)
        detail = f"none of the artifacts can be one of the round {uid} ({summary}): correct the sender"
        raise Refusal(HTTPStatus.BAD_REQUEST, "ArtifactsRefused", detail)
    return delivery


def _account_received(delivery: Delivery) -> str:
    metrics.RECEIVED.inc(len(delivery.checked) + len(delivery.refused))
    faults = Counter(refused.reason for refused in delivery.refused)
    for fault, count in faults.items():
        metrics.REFUSED.labels(fault).inc(count)
    summary = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    if summary:
        _log.warning("artifacts are refused: %s", summary)
    return summary


def _stored(rounds: Rounds, delivery: Delivery, outcome: Outcome) -> StoreResult:
    """Return what was stored; raise the Refusal if that is nothing."""
    terms = delivery.known.terms
    if outcome is None:
        raise _deleted(rounds, terms.uid)
    if isinstance(outcome, Refusal):
        metrics.REFUSED.labels(outcome.body.reason).inc(len(delivery.checked))
        raise outcome
    _account_stored(terms, outcome)
    return outcome


def _account_stored(terms: RoundTerms, result: StoreResult) -> None:
    metrics.STORED.inc(result.stored)
    metrics.DUPLICATES.inc(result.duplicates)
    if result.conflicts:
        metrics.CONFLICTS.inc(len(result.conflicts))
        some = ", ".join(f"{nonce} of slot {terms.offset_of(nonce)}" for nonce in result.conflicts[:_MOST_LOGGED])
        _log.warning("%d nonces came again with other content: %s", len(result.conflicts), some)


def _receipt(delivery: Delivery, result: StoreResult) -> dict[str, object]:
    return {
        "stored": result.stored,
        "duplicates": result.duplicates,
        "conflicts": len(result.conflicts),
        "refused": [refused._asdict() for refused in delivery.refused],
    }


def _body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return FastAPI's ``openapi_extra`` for a route whose body is one of ``models`` as JSON."""
    schemas = [_inlined(schema, schema.get("$defs", {})) for schema in (model.model_json_schema() for model in models)]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"anyOf": schemas}}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    # References are to the schema itself, which is not where the document ends up with it.
    if isinstance(schema, list):
        return [_inlined(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items() if name != "$defs"}
