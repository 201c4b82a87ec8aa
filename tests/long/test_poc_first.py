# SPDX-License-Identifier: Apache-2.0
"""With poc-first a round refuses new chats and leaves those alone that run."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.long.chats import Chat, ask, ask_all, chats, different, poc_running, unfinished
from tests.long.conftest import Report
from tests.vllm.client import Client
from tests.vllm.device import BATCH_INVARIANT
from tests.vllm.server import serving

RUNNING = [Chat(1000 + i, tokens=600, stream=True) for i in range(4)]
NEW = [chat for chat in chats(40) if not chat.abandoned]


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("poc-first") / "server.log"
    environment = BATCH_INVARIANT | {"VLLM_POC_PRIORITY": "poc-first"}
    flags = ["--enable-poc", "--enable-prefix-caching"]
    with serving(model_folder / "qwen3-tiny", log, flags, environment) as client:
        ask_all(client, [*RUNNING, *NEW], 1)  # fills the prefix cache
        yield client


def test_running_chats_go_on_and_new_ones_are_refused(server: Client, report: Report) -> None:
    idle, new = ask_all(server, RUNNING, len(RUNNING)), ask_all(server, NEW, 1)
    started = [threading.Event() for _ in RUNNING]
    with ThreadPoolExecutor(len(RUNNING)) as pool:
        tasks = [pool.submit(ask, server, chat, event.set) for chat, event in zip(RUNNING, started, strict=True)]
        assert all(event.wait(60) for event in started)
        with poc_running(server):
            refusals = [refusal(server, chat) for chat in NEW]
            still_running = sum(not task.done() for task in tasks)
            beside = {chat: task.result() for chat, task in zip(RUNNING, tasks, strict=True)}
            made = server.status()["next_index"]
    assert still_running == len(RUNNING), "the running chats must outlast the refusals"
    assert refusals == [(503, "5")] * len(NEW)
    assert (different(idle, beside), unfinished(beside)) == ([], [])
    assert different(new, ask_all(server, NEW, 1)) == []
    report(
        f"{len(NEW)} new chats were refused with Retry-After while {len(RUNNING)} of {RUNNING[0].tokens} tokens "
        f"went on unchanged beside {made} nonces"
    )


def refusal(client: Client, chat: Chat) -> tuple[int, str | None]:
    """Return status and Retry-After of a chat that must be refused."""
    with pytest.raises(HTTPError) as caught:
        ask(client, chat)
    return caught.value.code, caught.value.headers["retry-after"]
