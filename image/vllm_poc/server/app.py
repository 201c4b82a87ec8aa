# SPDX-License-Identifier: Apache-2.0
"""The ASGI middleware that puts the PoC routes into vLLM's server.

vllm serve MODEL --middleware vllm_poc.server.app.PocMiddleware
"""

import asyncio
import os
from http import HTTPStatus

from starlette.datastructures import MutableHeaders, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_poc.server import commands, metrics, vllm_routes
from vllm_poc.server.admission import Access, TokenFile, deployment_refusal
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.engine import VllmEngine
from vllm_poc.server.errors import RefusalError, ServerEndsError, refusal, response
from vllm_poc.server.routes import create_app
from vllm_poc.server.service import PocService
from vllm_poc.server.status import set_gauges
from vllm_poc.server.termination import Termination
from vllm_poc.server.vllm_routes import Pauses, Workers, path_of
from vllm_poc.settings import Priority, Settings
from vllm_poc.start_checks import check_start
from vllm_poc.wire.messages import API_PREFIX

check_start()

#: What a server that ends still answers, beside whatever only asks.
STOP_PATH = f"{API_PREFIX}/stop"
_LARGE_BYTES = 2**20


class PocMiddleware:
    """Serves ``/api/v1/pow/*`` itself and passes everything else on untouched, except for poc-first's refusals.

    A server that ends says on vLLM's ``/health`` that it does.
    """

    def __init__(self, app: ASGIApp, clock: Clock = SYSTEM_CLOCK) -> None:
        self._inner = app
        self._clock = clock
        self._settings = Settings.from_environment(os.environ)
        path = self._settings.token_file
        self._token_file = TokenFile(path, clock) if path is not None else None
        self._service: PocService | None = None
        self._poc_app: ASGIApp | None = None
        self._ends = False
        self._pauses = Pauses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and _is_poc(path_of(scope)):
            await self._serve(scope, receive, send)
        elif self._pauses.concerns(scope) and commands.is_served(scope):
            await self._pause(scope, receive, send)
        elif self._refuses_inference(scope):
            await vllm_routes.refuse(scope, receive, send)
        elif self._ends and vllm_routes.asks_for_health(scope):
            await vllm_routes.unhealthy()(scope, receive, send)
        else:
            self._set_gauges(scope)
            await self._inner(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        termination = Termination(self._drain)

        async def close() -> None:
            termination.end()
            if self._service is not None:
                await self._service.close()

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._look_at_model(scope)  # before: the server then takes requests, and says that it is healthy
            if message["type"] == "lifespan.shutdown.complete":
                await close()  # before: the server's event loop may end right after
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                self._access(scope["app"].state).log()
                termination.begin()

        try:
            await self._inner(scope, receive, told)
        finally:
            await close()

    async def _look_at_model(self, scope: Scope) -> None:
        """Find out whether PoC runs on this model, while there is no chat that it could disturb."""
        state: State = scope["app"].state
        if deployment_refusal(getattr(state, "args", None), os.environ) is not None:
            return
        self._app_for(state)
        if self._service is not None:
            await self._service.look_at_model()

    async def _drain(self) -> None:
        self._ends = True
        if self._service is not None:
            await self._service.drain()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            app = self._admitted(scope)
            body = await _read_body(receive, self._settings.body_bytes)
        except RefusalError as error:
            await response(error)(scope, receive, send)
            return
        await app(_for_poc(scope), _replay(body, receive), send)

    def _admitted(self, scope: Scope) -> ASGIApp:
        state: State = scope["app"].state
        self._access(state).check(scope)
        if self._ends and scope["method"] != "GET" and path_of(scope) != STOP_PATH:
            raise ServerEndsError
        unsupported = deployment_refusal(getattr(state, "args", None), os.environ)
        if unsupported is not None:
            raise refusal(HTTPStatus.CONFLICT, "ModelUnsupported", unsupported)
        app = self._app_for(state)
        if app is None:
            detail = "the engine is still starting: try again later"
            raise refusal(HTTPStatus.SERVICE_UNAVAILABLE, "EngineNotReady", detail, {"Retry-After": "5"})
        return app

    async def _pause(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: State = scope["app"].state
        try:
            commands.check_sender(scope, self._access(state))
            named, receive = await commands.named(scope, receive)
        except RefusalError as error:
            await response(error)(scope, receive, send)
            return
        self._app_for(state)
        if self._service is None or vllm_routes.calls_extension(scope, named):
            await self._inner(scope, receive, send)  # which answers that it is not ready, if it is not
        else:
            service = self._service
            workers = Workers(idle=service.rest, sleeps=service.sleeps, forget=service.forget)
            await self._pauses.pass_on(self._inner, scope, receive, send, workers, named)

    def _set_gauges(self, scope: Scope) -> None:
        if scope["type"] == "http" and path_of(scope).startswith("/metrics"):
            state: State = scope["app"].state
            self._app_for(state)
            if self._service is not None:
                set_gauges(self._service.scheduler, self._service.phases, self._service.jobs)
                if deployment_refusal(getattr(state, "args", None), os.environ) is not None:
                    metrics.set_ready("ModelUnsupported")

    def _refuses_inference(self, scope: Scope) -> bool:
        if self._settings.priority is not Priority.POC_FIRST or self._service is None:
            return False
        return vllm_routes.is_inference(scope) and self._service.phases.computes

    def _access(self, state: State) -> Access:
        return Access.decide(self._settings, getattr(state, "args", None), os.environ, self._token_file)

    def _app_for(self, state: State) -> ASGIApp | None:
        # vLLM sets both while it starts; the models last.
        client = getattr(state, "engine_client", None)
        models = getattr(state, "openai_serving_models", None)
        if self._poc_app is None and client is not None and models is not None:
            metrics.begin(models.base_model_paths[0].name)
            names = {name for path in models.base_model_paths for name in (path.name, path.model_path)}
            engine = VllmEngine(client, frozenset(names), call_seconds=self._settings.engine_seconds)
            self._service = PocService(engine, self._settings, self._clock, self._pauses, access=self._access(state))
            self._poc_app = create_app(self._service)
        return self._poc_app


def _is_poc(path: str) -> bool:
    return path == API_PREFIX or path.startswith(API_PREFIX + "/")


async def _read_body(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            detail = f"the request body exceeds {limit} bytes: send less"
            raise refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", detail)
        if not message.get("more_body", False):
            # From a mebibyte on this lets other threads run, such as the event loop's.
            return await asyncio.to_thread(b"".join, pieces) if size > _LARGE_BYTES else b"".join(pieces)


def _for_poc(scope: Scope) -> Scope:
    """Return a copy of the scope, for the PoC app puts itself into it, whose body is JSON unless it says otherwise.

    The network's Go client sends no Content-Type, and whether FastAPI then reads JSON depends on its version.
    """
    scope = dict(scope) | {"path": path_of(scope), "root_path": ""}
    headers = MutableHeaders(scope=scope)
    if not headers.get("content-type", "").strip():
        headers["content-type"] = "application/json"
    return scope


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
