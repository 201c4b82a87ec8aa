# SPDX-License-Identifier: Apache-2.0
"""Greedy chats of all kinds, and what came back from the server."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from tests.support.fakes.receiver import Receiver, receiving
from tests.vllm.client import K_DIM, Client
from tests.vllm.server import MODEL_NAME

#: Longest silence of the server.
ANSWER_SECONDS = 120
#: Fills whole blocks of the KV cache, which all chats then share.
PREFIX = "You may obtain a copy of the License at the usual place, and use it as the License says. " * 8


class Choice(NamedTuple):
    """One answer of a chat; ``finish`` is vLLM's reason, None if the stream ended without one."""

    tokens: tuple[int, ...]
    finish: str | None


Answers = dict["Chat", list[Choice]]


@dataclass(frozen=True)
class Chat:
    """One request. ``abandoned``: the client goes away after the first token."""

    number: int
    tokens: int
    stream: bool
    count: int = 1
    abandoned: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """What is posted."""
        question = f"{PREFIX}Question {self.number}: {'why ' * (self.number % 5)}is {self.number * self.number} so?"
        # vLLM refuses n above 1 at temperature 0. With one candidate sampling is greedy, too, and where several
        # have the same logit, as happens in bfloat16, the seed decides.
        sampled = {"temperature": 1, "top_k": 1, "n": self.count, "seed": self.number}
        greedy = {"temperature": 0} if self.count == 1 else sampled
        return {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
            **greedy,
        }


def chats(count: int) -> list[Chat]:
    """Return ``count`` chats to compare: every other one streamed, some with two answers; and one in ten abandoned."""
    kept = [Chat(i, tokens=16 + i % 9, stream=i % 2 == 0, count=2 if i % 7 == 0 else 1) for i in range(count)]
    abandoned = [Chat(i, tokens=400, stream=True, abandoned=True) for i in range(5, count, 10)]
    return sorted(kept + abandoned, key=lambda chat: (chat.number, chat.abandoned))


def ask(client: Client, chat: Chat, started: Callable[[], object] = lambda: None) -> list[Choice]:
    """Return the answers of one chat; HTTPError if it is refused. Calls ``started`` at a stream's beginning."""
    with _post(client, chat) as answer:
        parts = _streamed(answer, started) if chat.stream else iter(json.load(answer)["choices"])
        if chat.abandoned:
            next(part for part in parts if part.get("token_ids"))
            return []
        return _choices(parts, chat.count)


def cached_tokens(client: Client, chat: Chat) -> int:
    """Return how many tokens of the prompt vLLM found in its prefix cache."""
    with _post(client, replace(chat, stream=False)) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def ask_all(client: Client, asked: Sequence[Chat], at_once: int) -> Answers:
    """Return the answers of all chats but the abandoned ones, ``at_once`` of them at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda chat: ask(client, chat), asked)
        return {chat: found for chat, found in zip(asked, answers, strict=True) if not chat.abandoned}


@contextmanager
def poc_running(client: Client) -> Iterator[Receiver]:
    """Run a round of short slices while the context lasts."""
    params = {"model": MODEL_NAME, "seq_len": 16, "k_dim": K_DIM}
    with receiving() as receiver:
        client.start(url=receiver.url, batch_size=2, params=params)
        try:
            assert receiver.wait_for(1), "PoC delivers nothing"
            yield receiver
        finally:
            client.stop()


def different(left: Answers, right: Answers) -> list[int]:
    """Return the numbers of the chats that were answered differently."""
    assert left.keys() == right.keys()
    return [chat.number for chat in left if left[chat] != right[chat]]


def unfinished(answers: Answers) -> list[Chat]:
    """Return the chats that did not come to their full length."""
    return [
        chat
        for chat, choices in answers.items()
        if [(len(choice.tokens), choice.finish) for choice in choices] != [(chat.tokens, "length")] * chat.count
    ]


def progress_delay(client: Client, since: float) -> float:
    """Return how many seconds after ``since`` (`time.monotonic`) the first slice seen from now on was done."""
    start = client.status()["next_index"]
    while (status := client.status())["next_index"] == start:
        assert time.monotonic() < since + 30, f"no progress in 30 s: {status}"
    return time.monotonic() - float(status["last_progress_seconds"]) - since


def _post(client: Client, chat: Chat) -> Any:  # noqa: ANN401
    headers = {"content-type": "application/json"}
    request = Request(client.base + "/v1/chat/completions", json.dumps(chat.body).encode(), headers)  # noqa: S310
    return urlopen(request, timeout=ANSWER_SECONDS)  # noqa: S310


def _streamed(lines: Iterable[bytes], started: Callable[[], object]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            assert "error" not in event, event
            if any(part.get("token_ids") for part in event["choices"]):
                started()
            yield from event["choices"]


def _choices(parts: Iterable[dict[str, Any]], count: int) -> list[Choice]:
    tokens: list[list[int]] = [[] for _ in range(count)]
    finish: list[str | None] = [None] * count
    for part in parts:
        tokens[part["index"]] += part.get("token_ids") or []
        finish[part["index"]] = part.get("finish_reason") or finish[part["index"]]
    return [Choice(tuple(ids), reason) for ids, reason in zip(tokens, finish, strict=True)]
