# SPDX-License-Identifier: Apache-2.0
"""Refusals, and how every error becomes a `vllm_poc.wire.answers.ErrorResponse`."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from poc_gateway import metrics
from poc_gateway.store.engine import DatabaseError, DatabaseFull
from poc_operator.clients.errors import StoreUnavailable, UnreadableObject
from vllm_poc.wire.answers import ErrorResponse, FieldError
from vllm_poc.wire.messages import MAX_TEXT

_log = logging.getLogger(__name__)
_VALUE_ERROR = "Value error, "  # pydantic's prefix of messages that our validators raise
#: Seconds after which a client may try again what failed for want of a database or an API server.
RETRY_SECONDS = 5
RETRY_AFTER = {"Retry-After": str(RETRY_SECONDS)}
_MEANINGS = {
    400: "The address or the body cannot be read, or is of something else",
    401: "The token is missing or wrong",
    403: "The credential is not for this",
    404: "There is nothing of that name",
    406: "None of our formats is accepted",
    408: "The body took too long to arrive",
    409: "Something else runs, or is stored",
    410: "What the cursor was made of is not stored any more",
    413: "The body is too large",
    415: "The body is not JSON, by its Content-Type",
    422: "A parameter or a field is wrong; `errors` names it",
    425: "A result came sooner than its pod can have computed it",
    429: "Too much is asked for at once",
    501: "A cluster does not have this",
    502: "The receiver cannot be reached",
    503: "What this needs does not answer; try again",
    507: "The database is full or the round has reached a limit, and nothing was stored",
}


class Refusal(HTTPException):
    """A request that is answered with an error: a CamelCase ``reason`` for programs and a sentence for people."""

    def __init__(
        self,
        status: HTTPStatus,
        reason: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, headers)
        self.body = ErrorResponse(reason=reason, detail=_shortened(detail), errors=list(errors))

    def response(self) -> JSONResponse:
        """Return the HTTP answer, and count it."""
        metrics.HTTP_REFUSALS.labels(self.body.reason).inc()
        return JSONResponse(self.body.model_dump(mode="json", exclude_none=True), self.status_code, self.headers)


def invalid(status: HTTPStatus, entries: Sequence[Mapping[str, Any]], *, skip: int = 0) -> Refusal:
    """Return the refusal for pydantic's ``entries``, leaving out the first ``skip`` parts of their locations."""
    return fields_refusal([_field_error(entry, skip) for entry in entries], status)


def fields_refusal(fields: Sequence[FieldError], status: HTTPStatus = HTTPStatus.UNPROCESSABLE_ENTITY) -> Refusal:
    """Return a refusal that names each of the ``fields``, the first of them in its sentence, too."""
    detail = "; ".join(f"{error.field}: {error.message}" if error.field else error.message for error in fields[:3])
    return Refusal(status, "InvalidRequest", detail, errors=fields)


def field_refusal(field: str, message: str, status: HTTPStatus = HTTPStatus.UNPROCESSABLE_ENTITY) -> Refusal:
    """Return a refusal about one field of the request."""
    return fields_refusal([FieldError(field=field, message=message)], status)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route that may answer with these errors, besides what any route may.

    A route with parameters must name 422: else FastAPI describes a body that is not ours.
    """
    return {
        status: {"model": ErrorResponse, "description": _MEANINGS[status]}
        for status in sorted({400, 408, 413, 415, 429, *statuses})
    }


def install_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` an ErrorResponse."""
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_not_valid)
    app.exception_handler(DatabaseError)(_database_failed)
    app.exception_handler(StoreUnavailable)(_api_server_failed)
    app.exception_handler(UnreadableObject)(_round_unreadable)
    app.exception_handler(Exception)(_crashed)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    if isinstance(error, Refusal):
        return error.response()
    # What the frameworks raise: their details are a word or two.
    match HTTPStatus(error.status_code):
        case HTTPStatus.BAD_REQUEST:
            message = "cannot be read as JSON: send UTF-8, less deeply nested and without huge numbers"
            fields = [FieldError(field="body", message=message)]
            return Refusal(HTTPStatus.BAD_REQUEST, "InvalidRequest", f"body: {message}", errors=fields).response()
        case HTTPStatus.NOT_FOUND as status:
            detail = "there is no route of this path: GET /openapi.json lists those that there are"
        case HTTPStatus.METHOD_NOT_ALLOWED as status:
            allowed = (error.headers or {}).get("Allow")
            detail = f"{request.method} is no method of this route: send {allowed}"
        case status:
            detail = error.detail
    return Refusal(status, status.phrase.title().replace(" ", ""), detail, headers=error.headers).response()


async def _not_valid(_: Request, error: RequestValidationError) -> JSONResponse:
    return invalid(HTTPStatus.UNPROCESSABLE_ENTITY, error.errors(), skip=1).response()


async def _database_failed(_: Request, error: DatabaseError) -> JSONResponse:
    _log.warning("the database failed: %s", error)
    if isinstance(error, DatabaseFull):
        return Refusal(HTTPStatus.INSUFFICIENT_STORAGE, "StorageFull", str(error), headers=RETRY_AFTER).response()
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "DatabaseUnavailable", str(error), headers=RETRY_AFTER).response()


async def _api_server_failed(_: Request, error: StoreUnavailable) -> JSONResponse:
    _log.warning("the API server cannot be asked: %s", error)
    detail = f"the Kubernetes API server cannot be asked ({error}): try again later"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "ApiServerUnavailable", detail, headers=RETRY_AFTER).response()


async def _round_unreadable(_: Request, error: UnreadableObject) -> JSONResponse:
    # A 503, so that pods keep their results: with matching CRDs, or another spec, the round can be read again.
    where = f"PoCRound {error.namespace}/{error.name}"
    _log.warning("%s cannot be read: %s", where, error)
    detail = f"{where} cannot be read ({error}): install the CRDs of this release, or delete the round"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "RoundUnreadable", detail, headers=RETRY_AFTER).response()


async def _crashed(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = f"the gateway failed ({type(error).__name__}): its log has more"
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError", detail).response()


def _shortened(text: str) -> str:
    # What was sent stands in the middle, and may be long; how the sentence ends is what to do.
    half = (MAX_TEXT - 3) // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} … {text[-half:]}"


def _field_error(entry: Mapping[str, Any], skip: int) -> FieldError:
    where = ".".join(str(part) for part in entry["loc"][skip:])
    # A place in the text is no field. Without a place it is the body, but for rules between fields, which name them.
    is_body = entry["type"] == "json_invalid" or not (where or entry["type"] == "value_error")
    field = "body" if is_body else where
    return FieldError(field=field, message=entry["msg"].removeprefix(_VALUE_ERROR))
