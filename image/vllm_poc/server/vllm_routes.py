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

By /collective_rpc the workers can be told the same behind the engine's back: with the methods that do what a route
does, it counts as that route. What the engine has not put to sleep, its /wake_up does not wake either:

    computing -> /collective_rpc of sleep or discard -> paused -> /collective_rpc of wake_up, once all is back

A pause begins before vLLM gets the call, and only a call that succeeds ends it. It ends before the client gets the
answer. An update that fails may have left some weights as they were, a sleep of level 2 discards them all, and a reset
makes zeros of them: nothing is computed until weights have been loaded again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import NamedTuple

from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response
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
#: What load balancers ask.
_HEALTH_PATHS = frozenset({"/health", "/ping"})
_POC_FIRST = "a Proof-of-Compute round runs and goes first on this server: try again later, or on another server"


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


def asks_for_health(scope: Scope) -> bool:
    """Whether a request asks if the server takes inference requests."""
    return scope["type"] == "http" and path_of(scope) in _HEALTH_PATHS


def unhealthy() -> Response:
    """Return the answer to that of a server that ends, so that the next requests go elsewhere; those that come run."""
    return _unavailable("the server ends: send new requests to another one", retry_after=30)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503 in the form of vLLM's own API, also to the handshake of a WebSocket where the server can do that."""
    answer = _unavailable(_POC_FIRST, retry_after=5)
    if scope["type"] == "http":
        await answer(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await WebSocket(scope, receive, send).send_denial_response(answer)
    else:
        await WebSocket(scope, receive, send).close()  # becomes 403: this is all that such servers can say


def _unavailable(message: str, *, retry_after: int) -> Response:
    code = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": message, "type": "service_unavailable", "code": code.value}
    return JSONResponse({"error": error}, code, {"Retry-After": str(retry_after)})


_SUCCESS = range(200, 300)
_SERVER_ERRORS = range(500, 600)

SLEEP, PAUSE, UPDATE = "vLLM sleeps", "vLLM is paused", "vLLM gets new weights"
WORKERS_SLEEP = "vLLM's workers sleep by /collective_rpc, which has to wake them, too"
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
#: Those of which vLLM's workers have a method of the same name, for ``/collective_rpc``.
_METHODS = frozenset({"/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"})
#: Methods of vLLM's workers that load weights.
_LOADING_METHODS = frozenset({"reload_weights", "load_model"})
#: What workers give back in their sleep, by vLLM's tags.
_WEIGHTS = "weights"
_MEMORY = frozenset({_WEIGHTS, "kv_cache"})
#: What workers of several GPUs give back for a checkpoint.
_CONNECTIONS = frozenset({"the connections of several GPUs"})


#: An argument of which nobody can know what vLLM makes of it: it is equal to no value.
_UNKNOWN = object()


class Named(NamedTuple):
    """What the body of a command names: a method or an action, and the arguments of the method.

    None stands for arguments that are no list, or no object. vLLM may take them all the same: ``"2"`` as ``["2"]``.
    """

    name: str | None = None
    args: Sequence[object] | None = ()
    kwargs: Mapping[str, object] | None = MappingProxyType({})

    def argument(self, name: str, default: object) -> object:
        """Return the only argument of a method, which may be given by its ``name``."""
        if self.args is None or self.kwargs is None:
            return _UNKNOWN
        return self.kwargs.get(name, self.args[0] if self.args else default)

    @property
    def tags(self) -> frozenset[str] | None:
        """What of the workers' memory is meant; None if nothing is said, and nothing if nobody can know."""
        match self.argument("tags", None):
            case None:
                return None
            case str(tag):
                return frozenset({tag})
            case list(tags):
                return frozenset(tag for tag in tags if isinstance(tag, str))
        return frozenset()


NOTHING_NAMED = Named()


def calls_extension(scope: Scope, named: Named) -> bool:
    """Whether ``/collective_rpc`` names a method of PoC's own, which leaves the weights alone."""
    return path_of(scope) == COLLECTIVE_RPC and named.name is not None and named.name.startswith("poc_")


def _route_of(scope: Scope, named: Named) -> str:
    """Return the route, or the one that does the same as the workers' method."""
    path, same = path_of(scope), f"/{named.name}"
    return same if path == COLLECTIVE_RPC and same in _METHODS else path


def _loads_weights(path: str, named: Named) -> bool:
    return path == "/update_weights" or (path == COLLECTIVE_RPC and named.name in _LOADING_METHODS)


def _discards_weights(scope: Scope, named: Named) -> bool:
    match path_of(scope), named.name:
        case "/sleep", _:
            level = QueryParams(scope.get("query_string", b"")).get("level", "1")
            return level.strip() not in ("0", "1")
        case ("/weight_checker", "reset") | ("/collective_rpc", "reset_weights"):
            return True
        case "/collective_rpc", "sleep":
            return named.argument("level", 1) != 1  # a worker knows no level 0
        case "/collective_rpc", "discard":
            return not named.tags or _WEIGHTS in named.tags
    return False


@dataclass(frozen=True)
class Workers:
    """What `Pauses` needs of the workers: to wait until they are ``idle``, and their devices, whether the engine
    ``sleeps``, and to let them ``forget`` what they know of other weights."""

    idle: Callable[[], Awaitable[None]]
    sleeps: Callable[[], Awaitable[bool]]
    forget: Callable[[], Awaitable[None]]


class Pauses:
    """Why PoC must not compute now, as far as the calls that came through here tell."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()
        self._meanwhile = Counter[str]()  # commands without an answer so far
        self._asleep: frozenset[str] = frozenset()  # of the workers, behind the engine's back
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
        named: Named = NOTHING_NAMED,
    ) -> None:
        """Let ``app`` answer such a request: once the workers are idle, if it begins a pause."""
        path, answered = _route_of(scope, named), False

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

    async def _answered(self, scope: Scope, named: Named, status: int, workers: Workers) -> None:
        if status not in _SUCCESS and status not in _SERVER_ERRORS:
            return
        path = _route_of(scope, named)
        if path in _NEW_WEIGHTS:
            await workers.forget()
        done = status in _SUCCESS
        if path == COLLECTIVE_RPC:
            self._note_sleep(named, done=done)
        if done:
            await self._succeeded(path, workers)
        elif _MEANWHILE.get(path) == SLEEP and await workers.sleeps():
            self._lasting.add(SLEEP)
            done = True
        self._note_weights(scope, named, done=done)

    def _note_sleep(self, named: Named, *, done: bool) -> None:
        match named.name:
            case "sleep":  # a call that fails may have begun
                self._asleep |= _MEMORY
            case "discard":
                self._asleep |= named.tags or _MEMORY
            case "wake_up" if done:
                self._asleep &= _CONNECTIONS if named.tags is None else self._asleep - named.tags
            case "checkpoint_prepare":
                self._asleep |= _CONNECTIONS
            case "checkpoint_restore" if done:
                self._asleep -= _CONNECTIONS
        if self._asleep:
            self._lasting.add(WORKERS_SLEEP)
        else:
            self._lasting.discard(WORKERS_SLEEP)

    def _note_weights(self, scope: Scope, named: Named, *, done: bool) -> None:
        path = _route_of(scope, named)
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
