# SPDX-License-Identifier: Apache-2.0
"""Large bodies are read and written in a thread and in pieces, so that chat's streams go on meanwhile.

A thread alone would not do: one call into C that takes long, such as that of `json.loads`, holds up all threads.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from json.decoder import (  # type: ignore[attr-defined] # Python's own, between whose steps other threads run
    JSONArray,
    JSONDecodeError,
    JSONObject,
)
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from vllm_poc.server.errors import InvalidBodyError

T = TypeVar("T")

#: What is smaller takes less time at once than a thread takes to begin.
_LARGE_BYTES, _LARGE_ITEMS = 65_536, 2_000
#: Items that one call into C handles; it takes about a millisecond.
PIECE = 2_000
_C_SCANNER = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_SPACES = " \t\n\r"


class LargeBodyRoute(APIRoute):
    """A route whose body becomes the model off the event loop, if it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:  # noqa: D102 - FastAPI's
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            return handle

        async def handle_large(request: Request) -> Response:
            return await handle(_LargeRequest(request, model))

        return handle_large


class _LargeRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:  # noqa: ANN401 - as it is there
        body = await self.body()
        return await super().json() if len(body) < _LARGE_BYTES else await asyncio.to_thread(parse, self._model, body)


def parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """Return the message. JSONDecodeError if it is no JSON, InvalidBodyError if it is not of this model."""
    data = decode(body.decode(json.detect_encoding(body)))
    try:
        return model.model_validate(data)  # FastAPI takes an instance as it is
    except ValidationError as error:
        raise InvalidBodyError([{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]) from None
    finally:
        _forget(data)


def _forget(data: object) -> None:
    # A hundred thousand objects that end in one call take long, too.
    if isinstance(data, dict):
        for value in data.values():
            _forget(value)
    elif isinstance(data, list):
        while data:
            del data[-PIECE:]


def decode(text: str) -> object:
    """Return what ``json.loads`` would; the elements of an array in the outer objects are read one by one."""
    try:
        found, end = _scan(text, len(text) - len(text.lstrip(_SPACES)))
    except StopIteration as error:
        raise JSONDecodeError("Expecting value", text, error.value) from None
    if rest := text[end:].lstrip(_SPACES):
        raise JSONDecodeError("Extra data", text, len(text) - len(rest))
    return found


def _scan(text: str, index: int) -> tuple[Any, int]:
    first = text[index : index + 1]
    if first == "[":
        return JSONArray((text, index + 1), _C_SCANNER)  # type: ignore[no-any-return]
    if first == "{":
        return JSONObject((text, index + 1), True, _scan, None, None)  # type: ignore[no-any-return]
    return _C_SCANNER(text, index)  # type: ignore[no-any-return]


async def off_loop(items: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, done in a thread if it is about many ``items``."""
    return work() if items < _LARGE_ITEMS else await asyncio.to_thread(work)


async def answer(result: T) -> T | Response:
    """Return ``result`` for FastAPI to write, or, if it is large, what FastAPI would write without None fields."""
    if not isinstance(result, BaseModel) or not _lists(result):
        return result
    return Response(await asyncio.to_thread(write, result), media_type="application/json")


def write(message: BaseModel) -> bytes:
    """Return the message as JSON, without the fields that are None."""
    lists = _lists(message)
    parts = [message.model_dump_json(exclude=set(lists), exclude_none=True).encode()[:-1]]
    for name, items in lists.items():
        pieces = (to_json(items[start : start + PIECE])[1:-1] for start in range(0, len(items), PIECE))
        parts += [f',"{name}":['.encode(), b",".join(pieces), b"]"]
    return b"".join([*parts, b"}"])


def _lists(message: BaseModel) -> dict[str, list[Any]]:
    return {name: value for name, value in message if isinstance(value, list) and len(value) > PIECE}
