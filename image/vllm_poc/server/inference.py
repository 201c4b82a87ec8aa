# SPDX-License-Identifier: Apache-2.0
"""vLLM's routes that make the engine compute, and how they are refused while PoC goes first.

A test compares them with the routes of the supported releases, so that none is forgotten.
"""

from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
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
