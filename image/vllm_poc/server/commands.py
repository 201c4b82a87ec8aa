# SPDX-License-Identifier: Apache-2.0
"""What the middleware has to know of vLLM's commands before vLLM gets them: whether they count, and what they name.

The middleware stands before vLLM's own check of keys, so that nothing here trusts whoever sends a command.
"""

import json
from collections import deque
from contextlib import suppress
from functools import partial
from http import HTTPStatus

from starlette.routing import Match
from starlette.types import Message, Receive, Scope

from vllm_poc.server.admission import Access
from vllm_poc.server.bodies import read
from vllm_poc.server.errors import refusal
from vllm_poc.server.vllm_routes import COLLECTIVE_RPC, NOTHING_NAMED, WEIGHT_CHECKER, Named, path_of

#: Of a body whose command has to be known. Handles of all weights of a large model are a few MiB.
MOST_BYTES = 64 * 2**20
#: The field of the body that says what is to be done.
_FIELDS = {COLLECTIVE_RPC: "method", WEIGHT_CHECKER: "action"}


def is_served(scope: Scope) -> bool:
    """Whether this server has the route: vLLM has most of them in its development mode alone."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def check_sender(scope: Scope, access: Access) -> None:
    """Refuse with 401 a command of somebody without a key, on a server that has keys.

    vLLM asks for its keys on the routes below ``/v1`` and a few more, and these are not among them.
    """
    if access.vllm_keys and not access.knows(scope, access.vllm_keys + access.keys):
        own = f"the token of {access.token_variable}"
        detail = f"this command holds PoC back: send a key of vLLM's --api-key, or {own}"
        raise refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", detail, {"WWW-Authenticate": "Bearer"})


async def named(scope: Scope, receive: Receive) -> tuple[Named, Receive]:
    """Return what a command's body names, and what receives all of the body.

    Refuses with 413 a body that is too long to be read here: what it asks for would go unnoticed.
    """
    field = _FIELDS.get(path_of(scope))
    if field is None:
        return NOTHING_NAMED, receive
    messages = await _received(receive)

    async def replayed() -> Message:
        return messages.popleft() if messages else await receive()

    body = b"".join(message.get("body", b"") for message in messages)
    return await read(body, partial(_named, field)), replayed


async def _received(receive: Receive) -> deque[Message]:
    messages: deque[Message] = deque()
    size, ended = 0, False
    while not ended:
        messages.append(message := await receive())
        size += len(message.get("body", b""))
        if size > MOST_BYTES:
            detail = f"the body exceeds {MOST_BYTES} bytes, so PoC cannot know what it asks of vLLM: send less of it"
            raise refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", detail)
        ended = not message.get("more_body", False)
    return messages


def _named(field: str, body: bytes) -> Named:
    # Just as vLLM reads it, which answers with an error where this fails, and does nothing.
    with suppress(ValueError, RecursionError):
        found = json.loads(body)
        if isinstance(found, dict) and isinstance(name := found.get(field), str):
            args, kwargs = found.get("args", []), found.get("kwargs", {})
            return Named(name, args if isinstance(args, list) else None, kwargs if isinstance(kwargs, dict) else None)
    return NOTHING_NAMED
