# SPDX-License-Identifier: Apache-2.0
"""The measuring client, against a server that answers by the clock."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from benchmarks.chat_load import Lengths, Load, Streamed, seconds_without

FIRST_TOKEN_SECONDS = 0.1


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 10),
        ([(2, 3), (5, 8)], 6),
        ([(5, 8), (2, 6)], 4),
        ([(2, 8), (3, 4)], 4),
        ([(-1, 1), (9, 12)], 8),
        ([(-1, 12)], 0),
    ],
)
def test_time_without_chats_is_what_no_chat_covers(spans: list[tuple[float, float]], idle: float) -> None:
    assert seconds_without([Streamed(sent, sent, sent, last) for sent, last in spans], 0, 10) == idle


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    words = body["messages"][0]["content"].split()
    if not body.get("stream"):
        return web.json_response({"usage": {"prompt_tokens": 7 + len(words)}})
    answer = web.StreamResponse()
    await answer.prepare(request)
    await _send(answer, [{"delta": {"role": "assistant", "content": ""}}])
    await asyncio.sleep(FIRST_TOKEN_SECONDS)
    left = body["max_tokens"]
    while left:
        ids = list(range(min(2, left)))
        left -= len(ids)
        await _send(answer, [{"delta": {"content": "a b"}, "token_ids": ids}])
    await _send(answer, [])
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def _send(answer: web.StreamResponse, choices: list[object]) -> None:
    await answer.write(b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n")


@asynccontextmanager
async def loading(lengths: Lengths) -> AsyncIterator[Load]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield Load(session, "tiny", lengths)
    finally:
        await runner.cleanup()


async def test_a_chat_does_not_wait_for_those_before() -> None:
    async with loading(Lengths(prompt=32, least=3, most=9)) as load:
        await load.fit_prompt()
        chats = await load.regularly(10, 0.02, "seed")
    assert load.prompt_tokens == 32
    assert all(chat.first - chat.sent >= FIRST_TOKEN_SECONDS for chat in chats), "a role is no token"
    assert all(chat.last >= chat.first for chat in chats)
    assert [round(chat.due - chats[0].due, 3) for chat in chats] == [round(0.02 * i, 3) for i in range(10)]
    assert chats[4].sent < chats[0].first


async def test_all_tokens_of_clients_without_pause_count() -> None:
    async with loading(Lengths(prompt=32, least=5, most=5)) as load:
        rate = await load.without_pause(4, 3.0, "seed")
    assert 0 < rate < 1.5 * 4 * 5 / FIRST_TOKEN_SECONDS
    assert load.tokens % 5 == 0
