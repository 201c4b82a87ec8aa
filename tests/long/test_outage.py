# SPDX-License-Identifier: Apache-2.0
"""A receiver that fails in every way: nothing is lost, nothing but the inevitable is repeated, memory is bounded.

A post that the receiver kept but did not answer must be sent again, since the sender cannot know: delivery is
at-least-once. Receivers tell repeats by round and nonce. Every other nonce comes exactly once.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.long.conftest import Report
from tests.long.faulty_receiver import Fault, FaultyReceiver, faulty_receiver
from tests.long.processes import FLAGS, processes, resident_bytes
from tests.vllm.client import K_DIM, Client
from tests.vllm.server import MODEL_NAME, serving

#: How long nobody listens at the receiver's address.
AWAY_SECONDS = float(os.environ.get("AWAY_SECONDS", "600"))
#: Time in which a fault must show, and in which what was held back must arrive after it.
PATIENCE_SECONDS = 180
FAILURES_EACH = 10
BAD = frozenset({3, 100, 101, 1500})
PENDING_RESULTS = 4000
BATCH_SIZE = 16
SETTINGS = {
    "VLLM_POC_PENDING_RESULTS": str(PENDING_RESULTS),
    "VLLM_POC_PAYLOAD_RESULTS": "500",
    "VLLM_POC_CALLBACK_INTERVAL_SECONDS": "0.2",
    "VLLM_POC_CALLBACK_SECONDS": "3",
    "VLLM_POC_RETRY_FIRST_SECONDS": "0.1",
    "VLLM_POC_RETRY_LIMIT_SECONDS": "1",
}
#: A failed attempt leaves a line in the log and small objects until they are collected, no results.
GROWTH_BYTES = 8 * 1024 * 1024


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("outage") / "server.log"
    with serving(model_folder / "qwen3-tiny", log, ["--enforce-eager", *FLAGS], SETTINGS) as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[FaultyReceiver]:
    with faulty_receiver(BAD) as receiver:
        yield receiver


def wait_until(what: str, reached: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < end, f"not in {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.1)


def failed_often(receiver: FaultyReceiver, fault: Fault) -> bool:
    return receiver.failed[fault] >= FAILURES_EACH


def start(server: Client, receiver: FaultyReceiver) -> None:
    params = {"model": MODEL_NAME, "seq_len": 8, "k_dim": K_DIM}
    server.start(url=receiver.url, params=params, batch_size=BATCH_SIZE)
    wait_until("the round delivers beyond the bad nonces", lambda: server.status()["delivered_index"] > max(BAD))


def recover(server: Client) -> None:
    """Wait until what was computed so far has arrived."""
    computed = server.status()["next_index"]
    wait_until("the round delivers again", lambda: bool(server.status()["delivered_index"] >= computed))


def assert_complete(server: Client, receiver: FaultyReceiver) -> None:
    """Stop the round and compare what the receiver kept with what the server computed."""
    stopped = server.stop()["pow_status"]
    status = server.status()
    expected = set(range(stopped["next_index"])) - BAD
    assert stopped["delivered_index"] == stopped["next_index"]
    assert set(receiver.kept) == expected
    assert (status["delivered_valid"], status["delivered_rejected"]) == (len(expected), len(BAD))
    repeats = {nonce: kept - 1 for nonce, kept in receiver.kept.items() if kept > 1}
    assert repeats == {nonce: count for nonce, count in receiver.unanswered.items() if nonce in expected}


def test_nothing_is_lost_whatever_goes_wrong(server: Client, receiver: FaultyReceiver, report: Report) -> None:
    start(server, receiver)
    for fault in Fault:
        receiver.fail(fault)
        wait_until(f"posts fail by {fault.name}", partial(failed_often, receiver, fault))
        assert server.status()["delivery_error"]
        receiver.heal()
        recover(server)
    assert_complete(server, receiver)
    assert receiver.misdirected == 0, "redirects must not be followed"
    faults = ", ".join(f"{fault.name} {count}" for fault, count in receiver.failed.items())
    report(
        f"{len(receiver.kept)} nonces arrived, {len(BAD)} refused ones left out; failed posts: {faults}; "
        f"{receiver.unanswered.total()} nonces kept without an answer and sent again, none besides"
    )


@pytest.mark.timeout(AWAY_SECONDS + 3 * PATIENCE_SECONDS)
def test_a_long_absence_costs_neither_results_nor_memory(
    server: Client, receiver: FaultyReceiver, report: Report
) -> None:
    start(server, receiver)
    folders = processes(server)
    receiver.close()
    end = time.monotonic() + AWAY_SECONDS
    wait_until("generation is held back", lambda: held_back(server))
    held, before = server.status(), resident_bytes(folders)
    while time.monotonic() < end:
        assert server.status()["next_index"] == held["next_index"]
        time.sleep(1)
    grown = resident_bytes(folders) - before
    receiver.open()
    recover(server)
    wait_until("generation goes on", lambda: bool(server.status()["next_index"] > held["next_index"]))
    assert_complete(server, receiver)
    waiting = held["next_index"] - held["delivered_index"]
    report(
        f"away for {AWAY_SECONDS:g} s: {waiting} results waited, memory grew by {grown / 1024:.0f} KiB "
        f"from {before / 2**20:.0f} MiB; {len(receiver.kept)} nonces arrived, none twice"
    )
    assert waiting <= PENDING_RESULTS + 2 * BATCH_SIZE
    assert grown <= GROWTH_BYTES


def held_back(server: Client) -> bool:
    """Whether the round computes no more."""
    before = server.status()["next_index"]
    time.sleep(2)
    after = server.status()
    return bool(after["next_index"] == before and after["state"] == "GENERATING")
