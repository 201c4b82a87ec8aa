# SPDX-License-Identifier: Apache-2.0
"""When vLLM itself must not compute, PoC does not either: while it sleeps, is paused, or gets new weights.

vLLM tells nobody of this, and asking the engine before each slice would take as long as a small slice. But all of it
comes through the routes of this server, which the middleware sees:

    computing -> /sleep, /release_kv_cache_memory -> paused -> /wake_up, once the engine is fully awake
              -> /pause                           -> paused -> /resume
              -> /start_weight_update             -> paused -> /finish_weight_update
              -> /update_weights                  -> paused -> its answer

A pause begins before vLLM gets the call, and only a call that succeeds ends it.
"""

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
