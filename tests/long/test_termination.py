# SPDX-License-Identifier: Apache-2.0
"""A real server that gets SIGTERM delivers all that it has computed, and chat ends as vLLM's own flag says."""

import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.long.chats import Chat, ask
from tests.long.conftest import Report
from tests.long.faulty_receiver import Fault, FaultyReceiver, faulty_receiver
from tests.long.processes import FLAGS
from tests.vllm.client import Client
from tests.vllm.server import serving

TRIES = int(os.environ.get("TERMINATION_TRIES", "3"))
#: Kubernetes' grace period.
GRACE_SECONDS = 30
SETTINGS = {"VLLM_POC_DRAIN_SECONDS": "20"}
CHAT = Chat(1, tokens=400, stream=True)
_ENDED = re.compile(r"STOPPED, index (\d+), .* delivered up to index (\d+), (\d+) pending; ended: the server ends")


@pytest.mark.parametrize("number", range(TRIES))
def test_full_flight(model_folder: Path, tmp_path: Path, report: Report, number: int) -> None:
    """The receiver has failed until the signal comes, so that nothing was delivered before it."""
    flags = ["--enforce-eager", *FLAGS, "--shutdown-timeout", str(GRACE_SECONDS)]
    log = tmp_path / "server.log"
    with faulty_receiver(frozenset()) as receiver, serving(model_folder / "qwen3-tiny", log, flags, SETTINGS) as client:
        server = os.getpgid(int(client.worker("poc_test_process")))
        begin(client, receiver)
        before = client.status()
        started = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            chat = pool.submit(ask, client, CHAT, started.set)
            assert started.wait(60)
            receiver.heal()
            os.kill(server, signal.SIGTERM)
            seconds = ended(server)
            ((tokens, finish),) = chat.result()
    index, delivered, pending = map(int, last_line(log))
    assert (delivered, pending) == (index, 0)
    assert receiver.kept == Counter(range(index))
    assert before["delivered_index"] == 0 < before["next_index"] <= index
    assert (len(tokens), finish) == (CHAT.tokens, "length")
    assert seconds < GRACE_SECONDS
    report(f"try {number + 1}: {index} results delivered, 0 lost; ended {seconds:.1f} s after SIGTERM beside a chat")


def begin(client: Client, receiver: FaultyReceiver) -> None:
    """Start a round, and let it compute while its receiver fails."""
    receiver.fail(Fault.SERVER_ERROR)
    client.start(url=receiver.url, batch_size=2)
    end = time.monotonic() + 60
    while (status := client.status())["next_index"] < 500 or status["delivery_error"] is None:
        assert time.monotonic() < end, status
        time.sleep(0.05)


def ended(server: int) -> float:
    """Wait until the server's process has ended; return how many seconds that took."""
    started = time.monotonic()
    while alive(server):
        assert time.monotonic() < started + 2 * GRACE_SECONDS, "the server does not end"
        time.sleep(0.05)
    return time.monotonic() - started


def alive(server: int) -> bool:
    """Whether the server's process runs; its parent, this process, has not yet asked for its exit status."""
    try:
        return "Z (zombie)" not in Path(f"/proc/{server}/status").read_text()
    except FileNotFoundError:
        return False


def last_line(log: Path) -> tuple[str, str, str]:
    """Return how far the round had computed and delivered at its end, and what was left."""
    found = _ENDED.findall(log.read_text(errors="replace"))
    assert len(found) == 1, log.read_text(errors="replace")[-4000:]
    index, delivered, pending = found[0]
    return index, delivered, pending
