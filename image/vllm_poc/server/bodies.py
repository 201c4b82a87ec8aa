# SPDX-License-Identifier: Apache-2.0
"""Bodies are read and written in pieces, and large ones in a thread, so that chat's streams go on meanwhile.

A thread alone would not do: one call into C that takes long, such as that of `json.loads`, holds up all threads. ijson
reads in pieces, but takes 24 s for a text of 16 MiB, and ended the process at an integer of 400 000 digits.
"""

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from functools import partial
from http import HTTPStatus
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from vllm_poc.server.errors import InvalidBodyError
from vllm_poc.wire.generate import MAX_REQUEST_NONCES

T = TypeVar("T")

#: What is smaller takes less time at once than a thread takes to begin.
_LARGE_BYTES, _LARGE_ITEMS = 16_384, 2_000
#: Items that one call into C handles; it takes about a millisecond.
PIECE = 2_000
#: The same where items are long.
_PIECE_BYTES = 262_144
_C_SCANNER = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_SPACES = re.compile(rb"[ \t\n\r]*")
#: Bytes that one call into C reads; it takes less than a millisecond.
_WINDOW = 32_768
_SHORT_TEXT, _LONGEST_TEXT, _LONGEST_NUMBER = 512, 65_536, 5_000
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
#: A request for the most nonces has an object and four values for each. What holds others is looked through by the
#: garbage collector, all at once.
_MOST_VALUES, _MOST_OBJECTS, _MOST_LISTS = 5 * MAX_REQUEST_NONCES, MAX_REQUEST_NONCES + 1_000, 1_000
_MOST_FIELDS, _DEEPEST = 1_000, 50
#: Fields that are a chain of the decode scheme, or an object of one for each nonce. A chain is kept as bytes, which
#: cost less than their text: so nothing but the body's bytes limits them.
_CHAIN, _CHAINS = "k_points_steps", "enforced_k_steps"


class BodyRoute(APIRoute):
    """A route whose body is read in pieces, and off the event loop if it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:  # noqa: D102 - FastAPI's
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            return handle

        async def handle_read(request: Request) -> Response:
            return await handle(_ReadRequest(request, model))

        return handle_read


class _ReadRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:  # noqa: ANN401 - as it is there
        return await read(await self.body(), partial(parse, self._model))


def parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """Return the message. JSONDecodeError if it is no JSON, InvalidBodyError if it is not of this model."""
    data = decode(body)
    try:
        return model.model_validate(data)  # FastAPI takes an instance as it is
    except ValidationError as error:
        entries = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidBodyError([{**entry, "loc": ("body", *entry["loc"])} for entry in entries]) from None
    finally:
        _forget(data)


def _forget(data: object) -> None:
    # A hundred thousand objects that end in one call take long, too.
    if isinstance(data, dict):
        for value in data.values():
            _forget(value)
    elif isinstance(data, list):
        for value in data:
            if isinstance(value, list):
                _forget(value)
        while data:
            del data[-PIECE:]


def decode(body: bytes) -> object:
    """Return what ``json.loads`` would, read in pieces, of a body that has no more of anything than a request may need.

    JSONDecodeError if it is no JSON, HTTPException with 400 if it is not UTF-8, InvalidBodyError beyond the limits.
    """
    if not json.detect_encoding(body).startswith("utf-8"):
        raise _not_utf8()
    return _Reader(body).document()


def _beyond(limit: str) -> InvalidBodyError:
    return InvalidBodyError([{"type": "limit", "loc": ("body",), "msg": f"the body has {limit}: send less of it"}])


def _not_utf8() -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, "the body is not UTF-8: send JSON in UTF-8")


def _packed(value: object) -> bytes | None:
    """Return a chain as bytes; None if the value is none."""
    if not isinstance(value, list) or any(isinstance(step, bool) for step in value):
        return None
    try:
        return bytes(value)
    except (TypeError, ValueError):
        return None


class _Reader:
    """Reads one body; no call into C gets more than a window of it."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = len(BOM_UTF8) if body.startswith(BOM_UTF8) else 0
        self._values = self._lists = self._objects = 0
        self._singly_until = 0  # where several elements were tried at once, in vain

    def document(self) -> object:
        self._skip_spaces()
        found = self._value(0)
        self._skip_spaces()
        if self._at < len(self._body):
            raise self._error("Extra data")
        return found

    def _value(self, depth: int) -> object:
        self._count(values=1)
        match self._next():
            case b"[":
                return self._array(depth + 1)
            case b"{":
                return self._object(depth + 1)
            case b'"':
                return self._text()
        return self._number_or_word()

    def _array(self, depth: int) -> list[object]:
        self._count(lists=1, depth=depth)
        found: list[object] = []
        try:
            self._step()
            if self._next() == b"]":
                self._at += 1
                return found
            while True:
                self._several(found)
                found.append(self._value(depth))
                if self._ends(b"]"):
                    return found
        except Exception:
            _forget(found)
            raise

    def _several(self, found: list[object]) -> None:
        """Read as many whole elements of an array as a window has, by one call, unless they have to be read singly."""
        if self._at < self._singly_until:
            return
        window = self._body[self._at : self._at + _WINDOW]
        inside = window.partition(b"]")[0]
        elements = inside[: inside.rfind(b"},") + 1 if b"{" in inside else max(0, inside.rfind(b","))]
        self._singly_until = self._at + len(window)
        if not elements or b"[" in elements:
            return
        try:
            several, _ = _C_SCANNER(f"[{elements.decode()}]", 0)  # whose end is that of the text: it has no other "]"
        except (ValueError, StopIteration, RecursionError):
            return  # a cut within an element, or an error, whose place is found singly
        self._count(values=elements.count(b",") + 1, objects=elements.count(b"{"))
        found += several
        self._singly_until = 0
        self._at += len(elements)
        self._step()

    def _object(self, depth: int, *, of_chains: bool = False) -> dict[str, object]:
        self._count(objects=1, depth=depth)
        most = MAX_REQUEST_NONCES if of_chains else _MOST_FIELDS
        found: dict[str, object] = {}
        self._step()
        if self._next() == b"}":
            self._at += 1
            return found
        for _ in range(most):
            if self._next() != b'"':
                raise self._error("Expecting property name enclosed in double quotes")
            name = self._text()
            self._skip_spaces()
            if self._next() != b":":
                raise self._error("Expecting ':' delimiter")
            self._step()
            found[name] = self._chain(depth) if of_chains or name == _CHAIN else self._field(name, depth)
            if self._ends(b"}"):
                return found
        raise _beyond(f"an object of more than {most} fields")

    def _field(self, name: str, depth: int) -> object:
        if name != _CHAINS or self._next() != b"{":
            return self._value(depth)
        self._count(values=1)
        return self._object(depth + 1, of_chains=True)

    def _chain(self, depth: int) -> object:
        """Read a value that should be a chain. One that is no list of bytes is refused, or judged, like any other."""
        quick = self._whole_chain()
        if quick is not None:
            return quick
        before = self._values, self._lists
        found = self._value(depth)
        packed = _packed(found)
        if packed is None:
            return found
        assert isinstance(found, list)  # noqa: S101 - else it is not packed
        _forget(found)
        self._values, self._lists = before
        return packed

    def _whole_chain(self) -> bytes | None:
        """Read a chain that lies in a window by one call; None, with nothing read, if it is anything else."""
        end = self._body.find(b"]", self._at, self._at + _WINDOW)
        if end < 0 or self._next() != b"[":
            return None
        try:
            found, _ = _C_SCANNER(self._body[self._at : end + 1].decode(), 0)
        except (ValueError, StopIteration, RecursionError):
            return None
        packed = _packed(found)
        if packed is not None:
            self._at = end + 1
        return packed

    def _text(self) -> str:
        for size in (_SHORT_TEXT, _LONGEST_TEXT):
            window = self._body[self._at : self._at + size]
            text, is_cut = _decoded(window), self._at + size < len(self._body)
            try:
                found, end = scanstring(text, 1, True)
            except JSONDecodeError as error:
                if not is_cut or (error.pos < len(text) - _LONGEST_ESCAPE and not error.msg.startswith("Unterminated")):
                    raise self._error(error.msg, error.pos) from None
                continue
            self._at += end if window.isascii() else len(text[:end].encode())
            return str(found)
        raise _beyond(f"a text of more than {_LONGEST_TEXT} bytes")

    def _number_or_word(self) -> object:
        window = self._body[self._at : self._at + _LONGEST_NUMBER].decode("latin-1")  # all of it is ASCII
        try:
            found, end = _C_SCANNER(window, 0)
        except StopIteration as error:
            raise self._error("Expecting value", error.value) from None
        except ValueError:
            raise _beyond("an integer of too many digits") from None
        if end == _LONGEST_NUMBER:
            raise _beyond("a number of too many digits")
        self._at += end
        return found

    def _ends(self, bracket: bytes) -> bool:
        """Pass over what follows a value: whether that is the ``bracket``, or a comma."""
        self._skip_spaces()
        following = self._next()
        if following == bracket:
            self._at += 1
            return True
        if following != b",":
            raise self._error("Expecting ',' delimiter")
        self._step()
        return False

    def _next(self) -> bytes:
        return self._body[self._at : self._at + 1]

    def _step(self) -> None:
        self._at += 1
        self._skip_spaces()

    def _skip_spaces(self) -> None:
        end = self._at + _WINDOW
        while (found := _SPACES.match(self._body, self._at, end)) is not None and found.end() == end:
            self._at, end = end, end + _WINDOW
        self._at = found.end() if found is not None else self._at

    def _count(self, *, values: int = 0, lists: int = 0, objects: int = 0, depth: int = 0) -> None:
        self._values += values
        self._lists += lists
        self._objects += objects
        if self._values > _MOST_VALUES:
            raise _beyond(f"more than {_MOST_VALUES} values")
        if self._lists > _MOST_LISTS:
            raise _beyond(f"more than {_MOST_LISTS} lists")
        if self._objects > _MOST_OBJECTS:
            raise _beyond(f"more than {_MOST_OBJECTS} objects")
        if depth > _DEEPEST:
            raise _beyond(f"values that are nested more than {_DEEPEST} deep")

    def _error(self, message: str, offset: int = 0) -> JSONDecodeError:
        # Without the text, in which the error would count the lines.
        error = JSONDecodeError(message, "", 0)
        error.pos = self._at + offset
        return error


def _decoded(window: bytes) -> str:
    """Return the text of a window, whose last character may be cut off."""
    try:
        return window.decode()
    except UnicodeDecodeError as error:
        if error.start < len(window) - 3 or error.reason != "unexpected end of data":
            raise _not_utf8() from None
        return window[: error.start].decode()


async def read(body: bytes, work: Callable[[bytes], T]) -> T:
    """Return what ``work`` makes of a body, done in a thread if it is long."""
    return work(body) if len(body) < _LARGE_BYTES else await asyncio.to_thread(work, body)


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
        at_once = _piece(items)
        pieces = (to_json(items[start : start + at_once])[1:-1] for start in range(0, len(items), at_once))
        parts += [f',"{name}":['.encode(), b",".join(pieces), b"]"]
    return b"".join([*parts, b"}"])


async def written(message: BaseModel) -> bytes:
    """Return the message as JSON, written off the event loop if it is large."""
    return await asyncio.to_thread(write, message) if _lists(message) else write(message)


def _lists(message: BaseModel) -> dict[str, list[Any]]:
    return {name: value for name, value in message if isinstance(value, list) and len(value) > _piece(value)}


def _piece(items: list[Any]) -> int:
    """Return how many items one call writes; all of a list are about as long as the first one."""
    return max(1, min(PIECE, _PIECE_BYTES // len(to_json(items[0])))) if items else PIECE
