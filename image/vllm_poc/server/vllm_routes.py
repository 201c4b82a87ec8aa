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
              -> /update_weights, /weight_checker,
                 /collective_rpc                  -> paused -> its answer

A pause begins before vLLM gets the call, and only a call that succeeds ends it. It ends before the client gets the
answer. An update that fails may have left some weights as they were, a sleep of level 2 discards them all, and a reset
makes zeros of them: nothing is computed until weights have been loaded again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

#: Chat and completions, in the words of several APIs.
_GENERATIVE = {
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/decisions",
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


def path_of(scope: Scope) -> str:
    """Return the path as the server's routes see it: without ``--root-path``, which a proxy may have left in front."""
    path: str = scope["path"]
    root = str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def is_inference(scope: Scope) -> bool:
    """Whether a request, or a WebSocket, makes the engine compute."""
    if scope["type"] == "websocket":
        return path_of(scope) in INFERENCE_PATHS
    return scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in INFERENCE_PATHS


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
_SERVER_ERRORS = range(500, 600)

SLEEP, PAUSE, UPDATE = "vLLM sleeps", "vLLM is paused", "vLLM gets new weights"
BROKEN = "an update of vLLM's weights failed, and has to be made again, or vLLM restarted"
DISCARDED = "vLLM has discarded its weights, and they have to be loaded again, or vLLM restarted"
COLLECTIVE_RPC, WEIGHT_CHECKER = "/collective_rpc", "/weight_checker"
#: Why nothing may be computed while vLLM does what it is told.
_MEANWHILE = {
    "/sleep": SLEEP,
    "/release_kv_cache_memory": SLEEP,
    "/pause": PAUSE,
    "/start_weight_update": UPDATE,
    "/start_draft_weight_update": UPDATE,
    "/update_weights": UPDATE,
    "/finish_weight_update": UPDATE,
    WEIGHT_CHECKER: UPDATE,
    COLLECTIVE_RPC: UPDATE,
}
#: These last until another command ends them.
_LASTING = frozenset(
    {"/sleep", "/release_kv_cache_memory", "/pause", "/start_weight_update", "/start_draft_weight_update"}
)
#: After these, results may come from other weights, and from half of them if they fail.
_NEW_WEIGHTS = frozenset({"/update_weights", "/finish_weight_update", WEIGHT_CHECKER, COLLECTIVE_RPC})
#: All that begins a pause or ends one.
COMMANDS = _MEANWHILE.keys() | {"/wake_up", "/resume"}
#: Methods of vLLM's workers that load weights, for ``/collective_rpc``.
_LOADING_METHODS = frozenset({"reload_weights", "update_weights", "load_model"})


def calls_extension(scope: Scope, named: str | None) -> bool:
    """Whether ``/collective_rpc`` names a method of PoC's own, which leaves the weights alone."""
    return path_of(scope) == COLLECTIVE_RPC and named is not None and named.startswith("poc_")


def _loads_weights(path: str, named: str | None) -> bool:
    return path == "/update_weights" or (path == COLLECTIVE_RPC and named in _LOADING_METHODS)


def _discards_weights(scope: Scope, named: str | None) -> bool:
    match path_of(scope):
        case "/sleep":
            level = QueryParams(scope.get("query_string", b"")).get("level", "1")
            return level.strip() not in ("0", "1")
        case "/weight_checker":
            return named == "reset"
        case "/collective_rpc":
            return named == "reset_weights"
    return False


@dataclass(frozen=True)
class Workers:
    """What `Pauses` needs of the workers: to wait until they are ``idle``, whether the engine ``sleeps``, and to let
    them ``forget`` what they know of other weights."""

    idle: Callable[[], Awaitable[None]]
    sleeps: Callable[[], Awaitable[bool]]
    forget: Callable[[], Awaitable[None]]


class Pauses:
    """Why PoC must not compute now, as far as the calls that came through here tell."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()
        self._meanwhile = Counter[str]()  # commands without an answer so far
        self._held = asyncio.Event()

    @property
    def reason(self) -> str | None:
        """A sentence without a full stop; None if nothing holds PoC back."""
        return "; ".join(sorted(self._lasting | (+self._meanwhile).keys())) or None

    def concerns(self, scope: Scope) -> bool:
        """Whether a request begins a pause or ends one."""
        return scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in COMMANDS

    async def begun(self) -> None:
        """Wait until there is a pause."""
        await self._held.wait()

    async def pass_on(
        self,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        workers: Workers,
        named: str | None = None,
    ) -> None:
        """Let ``app`` answer such a request: once the workers are idle, if it begins a pause.

        ``named`` is the method or the action in its body.
        """
        path, answered = path_of(scope), False

        async def told(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                # Before the client knows, which may ask for something at once.
                answered = True
                await self._answered(scope, named, message["status"], workers)
                meanwhile.close()
            await send(message)

        with ExitStack() as meanwhile:
            meanwhile.enter_context(self._commanded(path))
            if path in _MEANWHILE:
                await workers.idle()
            try:
                await app(scope, receive, told)
            finally:
                if not answered:
                    await self._answered(scope, named, HTTPStatus.INTERNAL_SERVER_ERROR, workers)

    @contextmanager
    def _commanded(self, path: str) -> Iterator[None]:
        reasons = [_MEANWHILE[path]] if path in _MEANWHILE else []
        self._meanwhile.update(reasons)
        self._held_or_not()
        try:
            yield
        finally:
            self._meanwhile.subtract(reasons)
            self._held_or_not()

    async def _answered(self, scope: Scope, named: str | None, status: int, workers: Workers) -> None:
        if status not in _SUCCESS and status not in _SERVER_ERRORS:
            return
        path = path_of(scope)
        if path in _NEW_WEIGHTS:
            await workers.forget()
        done = status in _SUCCESS
        if done:
            await self._succeeded(path, workers)
        elif _MEANWHILE.get(path) == SLEEP and await workers.sleeps():
            self._lasting.add(SLEEP)
            done = True
        self._note_weights(scope, named, done=done)

    def _note_weights(self, scope: Scope, named: str | None, *, done: bool) -> None:
        path = path_of(scope)
        if _loads_weights(path, named):
            if done:
                self._lasting -= {BROKEN, DISCARDED}
            else:
                self._lasting.add(BROKEN)
        elif _discards_weights(scope, named) and (done or path != "/sleep"):
            self._lasting.add(DISCARDED)

    async def _succeeded(self, path: str, workers: Workers) -> None:
        if path in _LASTING:
            self._lasting.add(_MEANWHILE[path])
        elif path == "/resume":
            self._lasting.discard(PAUSE)
        elif path == "/finish_weight_update":
            self._lasting.discard(UPDATE)
        elif path == "/wake_up" and not await workers.sleeps():
            self._lasting.discard(SLEEP)

    def _held_or_not(self) -> None:
        if self.reason is None:
            self._held.clear()
        else:
            self._held.set()
