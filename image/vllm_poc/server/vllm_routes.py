# SPDX-License-Identifier: Apache-2.0
"""vLLM's own routes that concern PoC: those that make the engine compute, and those after which it must not.

Where PoC goes first, the former are refused while a round computes. A test compares them with the routes of the
supported releases, so that none is forgotten.

PoC computes nothing while vLLM sleeps, is paused, or gets new weights. vLLM tells nobody of this, and asking the engine
before each slice would take as long as a small slice. But all of it comes through the routes of this server, which the
middleware sees:

    computing -> /sleep, /release_kv_cache_memory -> paused -> /wake_up, once the engine is fully awake
              -> /pause                           -> paused -> /resume
              -> /start_weight_update             -> paused -> /finish_weight_update
              -> /update_weights                  -> paused -> its answer

A pause begins before vLLM gets the call, and only a call that succeeds ends it.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

#: Chat and completions, in the words of several APIs.
_GENERATIVE = {
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/generative_scoring",
    "/invocations",
}
#: Models of other kinds; a server has them if its model can do that.
_POOLING = {
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
}
_SPEECH = {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"}
INFERENCE_PATHS = frozenset(_GENERATIVE | _POOLING | _SPEECH)
_MESSAGE = "a Proof-of-Compute round runs and goes first on this server: try again later, or on another server"


def is_inference(scope: Scope) -> bool:
    """Whether a request, or a WebSocket, makes the engine compute."""
    if scope["type"] == "websocket":
        return scope["path"] in INFERENCE_PATHS
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in INFERENCE_PATHS


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503 in the form of vLLM's own API, also to the handshake of a WebSocket where the server can do that."""
    code = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": _MESSAGE, "type": "service_unavailable", "code": code.value}
    answer = JSONResponse({"error": error}, code, {"Retry-After": "5"})
    if scope["type"] == "http":
        await answer(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await WebSocket(scope, receive, send).send_denial_response(answer)
    else:
        await WebSocket(scope, receive, send).close()  # becomes 403: this is all that such servers can say


_SUCCESS = range(200, 300)

SLEEP, PAUSE, UPDATE = "vLLM sleeps", "vLLM is paused", "vLLM gets new weights"
_BEGIN = {
    "/sleep": SLEEP,
    "/release_kv_cache_memory": SLEEP,
    "/pause": PAUSE,
    "/start_weight_update": UPDATE,
    "/start_draft_weight_update": UPDATE,
    "/update_weights": UPDATE,
}
_END = {"/wake_up": SLEEP, "/resume": PAUSE, "/finish_weight_update": UPDATE}
#: After these, results come from other weights.
_NEW_WEIGHTS = frozenset({"/update_weights", "/finish_weight_update"})


class Pauses:
    """Why PoC must not compute now, as far as the calls that came through here tell."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._within_update = False  # which is begun and finished by calls of its own

    @property
    def reason(self) -> str | None:
        """A sentence without a full stop; None if nothing holds PoC back."""
        return "; ".join(sorted(self._reasons)) or None

    def concerns(self, scope: Scope) -> bool:
        """Whether a request begins a pause or ends one."""
        return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _BEGIN.keys() | _END.keys()

    async def pass_on(
        self,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        idle: Callable[[], Awaitable[None]],
        sleeps: Callable[[], Awaitable[bool]],
        forget: Callable[[], Awaitable[None]],
    ) -> None:
        """Let ``app`` answer such a request.

        Before a pause, awaits that the workers are ``idle``. After it, asks whether the engine still ``sleeps``, and
        lets the workers ``forget`` what they know of other weights.
        """
        path, before, status = scope["path"], set(self._reasons), 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        if path in _BEGIN:
            self._reasons.add(_BEGIN[path])
            await idle()
        try:
            await app(scope, receive, told)
        finally:
            if status not in _SUCCESS:
                self._reasons &= before
            elif path in _NEW_WEIGHTS:
                await forget()
        if status in _SUCCESS:
            await self._succeeded(path, sleeps)

    async def _succeeded(self, path: str, sleeps: Callable[[], Awaitable[bool]]) -> None:
        if path in {"/start_weight_update", "/start_draft_weight_update"}:
            self._within_update = True
        elif path == "/finish_weight_update":
            self._within_update = False
        if path == "/update_weights" and not self._within_update:
            self._reasons.discard(UPDATE)
        elif path in _END and not (path == "/wake_up" and await sleeps()):
            self._reasons.discard(_END[path])
