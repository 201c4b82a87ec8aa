# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.chat_stub HOST PORT PIECES SECONDS: a server that streams chats, one piece each so often.

It takes the place of vLLM where what stands in front of it is measured.
"""

import asyncio
import sys
from typing import Any

import uvicorn
import uvloop

PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": " the"}, "finish_reason": null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def app(pieces: int, seconds: float) -> Any:  # noqa: ANN401 - an ASGI app
    """Return the ASGI app."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        while (await receive()).get("more_body", False):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place in range(pieces):
            if place:
                await asyncio.sleep(seconds)
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    return answer


def main() -> None:
    """Serve until killed."""
    host, port, pieces, seconds = sys.argv[1:]
    stub = app(int(pieces), float(seconds))
    config = uvicorn.Config(stub, host=host, port=int(port), lifespan="off", log_level="warning", access_log=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
