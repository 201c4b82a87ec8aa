# SPDX-License-Identifier: Apache-2.0
"""What the pod API's page shows of requests and answers has the fields that a pod really answers with."""

import json
import re
from typing import Any, NamedTuple

import pytest

from tests.docs.pages import TRANSCRIPT, Block, blocks
from tests.support.servers.pod import Pod, running_pod

BLOCKS = [b for b in blocks() if b.language == TRANSCRIPT and "http://POD:8000" in b.text]


class Exchange(NamedTuple):
    """A curl command of a page, and the answer that it shows."""

    path: str
    body: Any
    answer: Any


def exchange(block: Block) -> Exchange:
    command, _, answer = block.text.partition("\n{")
    path = re.search(r"http://POD:8000(\S+)", command)
    body = re.search(r"-d '(.*)'", command, re.DOTALL)
    assert path
    # The pods of these tests serve another model.
    sent = json.loads(body[1].replace('"demo"', '"tiny"')) if body else None
    return Exchange(path[1], sent, json.loads("{" + answer))


def shape(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the names of all fields, and the first entry of lists."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return type(value)


async def ask(pod: Pod, asked: Exchange) -> Any:  # noqa: ANN401 - any JSON
    return (await pod.http.post(asked.path, json=asked.body)).json()


async def test_a_pod_answers_as_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_POC_FLUSH_SECONDS", "0.1")
    assert BLOCKS
    async with running_pod() as pod:
        for block in BLOCKS:
            shown = exchange(block)
            assert shape(await ask(pod, shown)) == shape(shown.answer), block.where
            if shown.path.endswith("/init/generate"):
                # The next request of the page is to a pod without a round.
                await pod.post("stop")
