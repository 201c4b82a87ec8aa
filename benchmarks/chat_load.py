# SPDX-License-Identifier: Apache-2.0
"""Streamed chats: one every so often, whatever becomes of those before, or clients that chat without pause."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from time import monotonic, process_time
from typing import Any, NamedTuple

import aiohttp

from tests.vllm.client import chat_body

#: Clients that chat without pause are not counted until they have come out of step.
RAMP_SECONDS = 0.5
_DATA = b"data: {"


class Lengths(NamedTuple):
    """Tokens of a prompt, and the least and the most of an answer."""

    prompt: int
    least: int
    most: int


class Streamed(NamedTuple):
    """When a chat was due, sent, began to be answered, and got its last token (`time.monotonic`)."""

    due: float
    sent: float
    first: float
    last: float


class Load:
    """Chats with one server, each of which has a prompt of its own. Enter it first."""

    def __init__(self, session: aiohttp.ClientSession, model: str, lengths: Lengths, number: int = 0) -> None:
        self.tokens = 0  # that came so far, in all chats
        self.prompt_tokens = 0
        self.share_of_a_core = 0.0  # that this process took for the last clients without pause
        self._session = session
        self._model = model
        self._lengths = lengths
        self._words = 0
        self._number = number  # of the last prompt; loads of several processes begin with numbers of their own
        self._draw = random.Random()  # noqa: S311 - no secret

    async def fit_prompt(self) -> None:
        """Find how many words make a prompt of the wanted length."""
        self._words = max(0, self._lengths.prompt - await self._counted())
        self.prompt_tokens = await self._counted()

    async def regularly(self, count: int, interval: float, seed: str) -> list[Streamed]:
        """Chat ``count`` times, every ``interval`` seconds; the time of all of them is over when it returns."""
        self._draw.seed(seed)
        begin = monotonic()
        chats: list[asyncio.Task[Streamed]] = []
        for due in (begin + number * interval for number in range(1, count + 1)):
            await _sleep_until(due)
            chats.append(asyncio.create_task(self._chat(due)))
        await _sleep_until(begin + (count + 1) * interval)
        return await asyncio.gather(*chats)

    async def without_pause(self, clients: int, seconds: float, seed: str) -> float:
        """Return the tokens per second of so many clients that go on as soon as they are answered."""
        self._draw.seed(seed)
        ended = asyncio.Event()

        async def client() -> None:
            while not ended.is_set():
                await self._chat(monotonic())

        running = [asyncio.create_task(client()) for _ in range(clients)]
        await asyncio.sleep(RAMP_SECONDS)
        before, used, begin = self.tokens, process_time(), monotonic()
        await asyncio.sleep(seconds)  # whole seconds are measured, also when the ramp took longer
        elapsed = monotonic() - begin
        ended.set()
        self.share_of_a_core = (process_time() - used) / elapsed
        rate = (self.tokens - before) / elapsed
        await asyncio.gather(*running)
        return rate

    async def _chat(self, due: float) -> Streamed:
        length = self._draw.randint(self._lengths.least, self._lengths.most)
        body = self._body(length) | {"stream": True}
        first = last = 0.0
        came, sent = 0, monotonic()
        async with self._session.post("/v1/chat/completions", json=body) as answer:
            async for tokens in _tokens(answer):
                last = monotonic()
                first = first or last
                came += tokens
                self.tokens += tokens
        if came != length:
            raise RuntimeError(f"a chat got {came} tokens of {length}")
        return Streamed(due, sent, first, last)

    async def _counted(self) -> int:
        async with self._session.post("/v1/chat/completions", json=self._body(1)) as answer:
            return int((await answer.json())["usage"]["prompt_tokens"])

    def _body(self, tokens: int) -> dict[str, Any]:
        self._number += 1
        # The number stands in front, so that no chat finds another's beginning in the prefix cache.
        prompt = f"{self._number:06}" + " the" * self._words
        return chat_body(self._model, prompt, tokens)  # with token ids, since a chunk may bring several


def seconds_without(chats: Iterable[Streamed], begin: float, end: float) -> float:
    """Return how much of the time from ``begin`` to ``end`` no chat ran: from its sending to its last token."""
    idle, until = 0.0, begin
    for chat in sorted(chats, key=lambda chat: chat.sent):
        idle += max(0.0, min(chat.sent, end) - until)
        until = max(until, chat.last)
    return idle + max(0.0, end - until)


async def _tokens(answer: aiohttp.ClientResponse) -> AsyncIterator[int]:
    answer.raise_for_status()
    async for line in answer.content:
        if line.startswith(_DATA):
            event = json.loads(line[len(_DATA) - 1 :])
            if "error" in event:
                raise RuntimeError(f"a chat failed: {event['error']}")
            # The first event only names the role; the last may hold no choice.
            tokens = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if tokens:
                yield tokens


async def _sleep_until(time: float) -> None:
    await asyncio.sleep(max(0.0, time - monotonic()))
