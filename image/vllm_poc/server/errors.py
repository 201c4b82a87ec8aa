# SPDX-License-Identifier: Apache-2.0
"""Refusals, and how every error becomes a `vllm_poc.wire.answers.ErrorResponse`."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vllm_poc.logs import get_logger
from vllm_poc.server.engine import EngineError
from vllm_poc.wire.answers import ErrorResponse, FieldError
from vllm_poc.wire.messages import MAX_TEXT, is_json

_log = get_logger(__name__)
_VALUE_ERROR = "Value error, "  # pydantic's prefix of messages that our validators raise
#: Most fields that an answer names.
MAX_ERRORS = 20


class RefusalError(Exception):
    """A request that is answered with an error: HTTP status, body and further headers."""

    def __init__(self, status: HTTPStatus, body: ErrorResponse, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(body.detail)
        self.status = status
        self.body = body
        self.headers = headers


class InvalidBodyError(HTTPException):
    """A body that is not the message it should be; ``errors`` are pydantic's, as FastAPI locates them.

    FastAPI takes nothing but its own exceptions from whoever reads a body.
    """

    def __init__(self, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY)
        self.errors = errors


class ServerEndsError(RefusalError):
    """The server was told to end: it computes nothing more, and takes no new work."""

    def __init__(self) -> None:
        detail = "the server ends and takes no more PoC work: ask another one, or ask again when it is back"
        body = ErrorResponse(reason="ServerEnds", detail=detail)
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, body, {"Retry-After": "30"})


class PausedError(RefusalError):
    """vLLM sleeps, is paused, or gets new weights: nothing can be computed now."""

    def __init__(self, reason: str) -> None:
        body = ErrorResponse(reason="Paused", detail=f"{reason}: try again when that is over, or ask another server")
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, body, {"Retry-After": "5"})


def refusal(status: HTTPStatus, reason: str, detail: str, headers: Mapping[str, str] | None = None) -> RefusalError:
    """Return a refusal with a CamelCase ``reason`` for programs and a sentence for people."""
    return RefusalError(status, ErrorResponse(reason=reason, detail=detail), headers)


def field_refusal(
    field: str,
    message: str,
    *,
    reason: str = "InvalidRequest",
    status: HTTPStatus = HTTPStatus.UNPROCESSABLE_ENTITY,
) -> RefusalError:
    """Return a refusal, 422 by default, about one field of the request."""
    return RefusalError(status, _invalid([FieldError(field=field, message=message)], reason))


def response(error: RefusalError) -> JSONResponse:
    """Return the HTTP answer of a refusal."""
    return JSONResponse(error.body.model_dump(mode="json"), error.status, error.headers)


def install_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` an ErrorResponse."""
    app.exception_handler(RefusalError)(_refused)
    app.exception_handler(EngineError)(_engine_failed)
    app.exception_handler(RequestValidationError)(_not_valid)
    app.exception_handler(InvalidBodyError)(_not_the_message)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Exception)(_crashed)


async def _refused(_: Request, error: RefusalError) -> JSONResponse:
    return response(error)


async def _engine_failed(_: Request, error: EngineError) -> JSONResponse:
    return response(refusal(HTTPStatus.SERVICE_UNAVAILABLE, "EngineFailed", str(error)))


async def _not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
    content_type = request.headers.get("content-type", "").strip()
    if not is_json(content_type) and any(_is_body(entry) for entry in error.errors()):
        detail = f"the body is {content_type}: send JSON, with Content-Type: application/json or without any"
        return response(refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", detail))
    return _wrong_fields(error.errors())


async def _not_the_message(_: Request, error: InvalidBodyError) -> JSONResponse:
    return _wrong_fields(error.errors)


def _wrong_fields(entries: Sequence[Mapping[str, Any]]) -> JSONResponse:
    fields = [FieldError(field=_field(entry), message=_message(entry)) for entry in entries[:MAX_ERRORS]]
    return response(RefusalError(HTTPStatus.UNPROCESSABLE_ENTITY, _invalid(fields, "InvalidRequest")))


async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
    status = HTTPStatus(error.status_code)
    reason = status.phrase.title().replace(" ", "")
    return response(refusal(status, reason, error.detail, error.headers))


async def _crashed(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = f"{type(error).__name__}: {error}; the server's log has more"
    return response(refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError", detail))


def _is_body(entry: Mapping[str, Any]) -> bool:
    # FastAPI reads nothing but JSON into an object. A missing body is missing whatever its type.
    return bool(entry["loc"] == ("body",) and entry["type"] != "missing")


def _invalid(fields: Sequence[FieldError], reason: str) -> ErrorResponse:
    first = fields[0]
    detail = f"{first.field}: {first.message}" if first.field else first.message
    return ErrorResponse(reason=reason, detail=detail, errors=list(fields))


def _field(entry: Mapping[str, Any]) -> str:
    # An empty name stands for rules between fields, whose message names them.
    location = entry["loc"][1:]
    return "body" if entry["type"] == "json_invalid" else ".".join(str(part) for part in location)[:MAX_TEXT]


def _message(entry: Mapping[str, Any]) -> str:
    if entry["type"] == "json_invalid":
        return f"is no JSON: {entry['ctx']['error']} at byte {entry['loc'][-1]}"
    return str(entry["msg"]).removeprefix(_VALUE_ERROR)[:MAX_TEXT]
