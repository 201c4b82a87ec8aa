# SPDX-License-Identifier: Apache-2.0
"""Two hundred chats beside a round that runs all the time: same tokens, none aborted, and PoC goes on at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.long.chats import Answers, ask_all, chats, different, poc_running, progress_delay, unfinished
from tests.long.conftest import Report
from tests.vllm.client import Client
from tests.vllm.device import BATCH_INVARIANT, ON_GPU
from tests.vllm.server import serving

CHATS = chats(200)
AT_ONCE = 32
#: PoC's progress is measured after each burst of so many chats.
BURST = 33
#: After the last chat PoC must have gone on within so many seconds.
PROGRESS_SECONDS = 0.2


@pytest.fixture(scope="module", params=["0", "0.3"], ids=["PoC between chats", "PoC between chat's steps"])
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """As users start it; compiled. The parameter is the share of time that PoC gets while chat runs."""
    log = tmp_path_factory.mktemp("chat") / "server.log"
    environment = BATCH_INVARIANT | {"VLLM_POC_MIN_SHARE": request.param}
    flags = ["--enable-poc", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    with serving(model_folder / "qwen3-tiny", log, flags, environment) as client:
        idle(client, 1)  # fills the prefix cache
        yield client


def idle(client: Client, at_once: int) -> Answers:
    return {
        chat: choices
        for first in range(0, len(CHATS), BURST)
        for chat, choices in ask_all(client, CHATS[first : first + BURST], at_once).items()
    }


def beside_poc(client: Client, at_once: int) -> tuple[Answers, list[float], int]:
    """Return the answers, how long PoC took to go on after each burst, and the nonces computed meanwhile."""
    answers: Answers = {}
    delays = []
    with poc_running(client):
        start = client.status()["next_index"]
        for first in range(0, len(CHATS), BURST):
            answers |= ask_all(client, CHATS[first : first + BURST], at_once)
            delays.append(progress_delay(client))
        made = client.status()["next_index"] - start
    return answers, delays, made


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
def test_chat_is_the_same_beside_poc(server: Client, at_once: int, report: Report) -> None:
    before, again = idle(server, at_once), idle(server, at_once)
    beside, delays, made = beside_poc(server, at_once)
    between_idle, beside_idle = different(before, again), different(again, beside)
    report(
        f"{len(before)} chats, {at_once} at once: {between_idle} differ between two idle runs, {beside_idle} between "
        f"idle and PoC, {len(unfinished(beside))} cut short; {made} nonces beside them; PoC went on after "
        f"{max(delays):.3f} s at most of {len(delays)} times"
    )
    assert unfinished(beside) == []
    assert made > 0, "PoC must have run beside the chats"
    assert beside_idle <= between_idle
    if at_once == 1 or ON_GPU:
        assert (between_idle, beside_idle) == (0, 0)
    assert max(delays) <= PROGRESS_SECONDS
