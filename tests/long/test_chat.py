# SPDX-License-Identifier: Apache-2.0
"""Two hundred chats beside a round that runs all the time: same tokens, none aborted, and PoC goes on at once."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.long.chats import Answers, ask_all, cached_tokens, chats, different, poc_running, progress_delay, unfinished
from tests.long.conftest import Report
from tests.long.processes import FLAGS, processes, waited_seconds
from tests.vllm.client import Client
from tests.vllm.device import BATCH_INVARIANT, ON_GPU
from tests.vllm.server import serving

CHATS = chats(200)
AT_ONCE = 32
BURST = 33
#: How often PoC's progress after a burst is measured.
MEASUREMENTS = 20
#: A measurement says nothing of the server if the kernel let its threads wait longer for a CPU.
STARVED_SECONDS = 0.1
STARVED_LIMIT = 100
#: After the last chat PoC must have gone on within so many seconds.
PROGRESS_SECONDS = 0.2


@pytest.fixture(scope="module", params=["0", "0.3"], ids=["PoC between chats", "PoC between chat's steps"])
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Compiled, as users start it. The parameter is the share of time that PoC gets while chat runs."""
    log = tmp_path_factory.mktemp("chat") / "server.log"
    environment = BATCH_INVARIANT | {"VLLM_POC_MIN_SHARE": request.param}
    # Blocks for all chats at once: a chat that is preempted computes anew, by other kernels.
    flags = [*FLAGS, "--enable-prefix-caching", "--enable-prompt-tokens-details", "--num-gpu-blocks-override", "4096"]
    with serving(model_folder / "qwen3-tiny", log, flags, environment) as client:
        answers(client, 1)  # fills the prefix cache
        yield client


def answers(client: Client, at_once: int) -> Answers:
    """Ask in bursts, between which the server rests."""
    return {
        chat: choices
        for first in range(0, len(CHATS), BURST)
        for chat, choices in ask_all(client, CHATS[first : first + BURST], at_once).items()
    }


def beside_poc(client: Client, at_once: int) -> tuple[Answers, int]:
    """Return the answers, and the nonces computed meanwhile."""
    with poc_running(client):
        start = client.status()["next_index"]
        found = answers(client, at_once)
        return found, client.status()["next_index"] - start


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
def test_chat_is_the_same_beside_poc(server: Client, at_once: int, report: Report) -> None:
    before, again = answers(server, at_once), answers(server, at_once)
    beside, made = beside_poc(server, at_once)
    between_idle, beside_idle = different(before, again), different(again, beside)
    report(
        f"{len(before)} chats, {at_once} at once: {len(between_idle)} differ between two idle runs {between_idle}, "
        f"{len(beside_idle)} between idle and PoC {beside_idle}, {len(unfinished(beside))} cut short; {made} nonces"
    )
    assert unfinished(beside) == []
    assert cached_tokens(server, CHATS[0]) > 0, "chats must share their beginning in the cache"
    assert made > 0, "PoC must have run beside the chats"
    assert len(beside_idle) <= len(between_idle)
    if at_once == 1 or ON_GPU:
        assert (between_idle, beside_idle) == ([], [])


def test_poc_goes_on_after_the_last_chat(server: Client, report: Report) -> None:
    burst = [chat for chat in CHATS if not chat.abandoned][:AT_ONCE]
    folders = processes(server)
    delays: list[float] = []
    starved: list[float] = []
    with poc_running(server):
        while len(delays) < MEASUREMENTS and len(starved) < STARVED_LIMIT:
            ask_all(server, burst, AT_ONCE)
            ended, waited = time.monotonic(), waited_seconds(folders)
            delay = progress_delay(server, ended)
            kept_waiting = waited_seconds(folders) - waited > STARVED_SECONDS
            (starved if kept_waiting else delays).append(delay)
    report(f"PoC went on after {spread(delays)}; left out, since the machine was busy: {spread(starved)}")
    assert len(delays) == MEASUREMENTS, f"the machine is too busy to measure {PROGRESS_SECONDS} s: end other programs"
    assert max(delays) <= PROGRESS_SECONDS


def spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{median(seconds):.3f} s in the middle, {max(seconds):.3f} s at most, of {len(seconds)}"
