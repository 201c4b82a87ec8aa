# SPDX-License-Identifier: Apache-2.0
"""What a round leaves in the log."""

import asyncio
import logging
import re

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_delivery import NEARLY_DONE
from vllm_poc.logs import fields_of
from vllm_poc.wire.answers import PowState

LOGGER = "vllm.vllm_poc.server.generation"
PROGRESS = re.compile(
    r"distance round 'r1' of block 7: Computing, index \d+, (\d+) checked, \d+ valid, [\d.]+ nonces/s, "
    r"held back 0\.0 s, (\d+) delivered up to index \d+, \d+ pending"
)


@pytest.fixture(autouse=True)
def frequent_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_poc.server.generation.PROGRESS_SECONDS", 0.05)
    caplog.set_level(logging.INFO, LOGGER)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


async def test_a_round_logs_its_start_its_progress_and_its_end(
    pod: Pod, receiver: CallbackReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines(caplog) == []
    await pod.start(DISTANCE | SLOT | {"callback_url": receiver.url, "round_id": "r1"})
    await pod.reach(lambda s: len(lines(caplog)) > 3)
    await pod.post("stop")
    await pod.post("stop")
    first, *progress, last = lines(caplog)
    status = await pod.status()
    assert first.endswith(f"; starts, callbacks go to {receiver.url}")
    found = [PROGRESS.fullmatch(line) for line in progress]
    assert all(found)
    checked = [int(match[1]) for match in found if match]
    assert checked == sorted(checked)
    assert f"STOPPED, index {status.next_index}, {status.total_checked} checked" in last
    assert last.endswith("; ended: stopped on request")
    await asyncio.sleep(0.15)
    assert len(lines(caplog)) == len(progress) + 2, "nothing is logged when nothing runs"


async def test_a_slots_end_is_logged(pod: Pod, caplog: pytest.LogCaptureFixture) -> None:
    await pod.start(ARTIFACT | NEARLY_DONE)
    await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert lines(caplog)[-1].endswith("0 pending; ended: the slot's last nonce is delivered")


async def test_a_phases_end_is_logged(pod: Pod, caplog: pytest.LogCaptureFixture) -> None:
    await pod.start(DISTANCE | SLOT)
    await pod.post("phase/validate")
    assert lines(caplog)[-1].endswith("; ended: phase/validate")


async def test_a_failure_is_logged_once_and_as_an_error(pod: Pod, caplog: pytest.LogCaptureFixture) -> None:
    await pod.start(DISTANCE | SLOT)
    pod.engine.fault = RuntimeError("CUDA error")
    await pod.reach(lambda s: s.state is PowState.FAILED)
    await pod.post("stop")
    (failure,) = [record for record in caplog.records if record.name == LOGGER and record.levelno == logging.ERROR]
    assert failure.getMessage().endswith("; ended: poc_compute failed: CUDA error")
    assert failure.exc_info is None
    assert lines(caplog)[-1] == failure.getMessage()


async def test_lines_say_which_round_and_slot_they_are_about(
    pod: Pod, receiver: CallbackReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answer = 503
    await pod.start(DISTANCE | {"node_id": 1, "node_count": 3, "callback_url": receiver.url, "round_id": "r1"})
    await pod.reach(lambda s: s.delivery_error is not None)
    await pod.post("stop")
    of_pod = [record for record in caplog.records if record.name.startswith("vllm.vllm_poc")]
    assert {record.name for record in of_pod} > {LOGGER}
    assert {str(fields_of(record)) for record in of_pod} == {str({"round": "r1", "slot": 1})}


async def test_lines_say_which_queued_request_they_are_about(
    pod: Pod, receiver: CallbackReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answer = 503
    await pod.status()
    job = (await pod.post("generate", ARTIFACT | {"nonces": [1], "url": receiver.url})).json()["request_id"]
    await pod.reach(lambda _: any("callback failed" in record.getMessage() for record in caplog.records))
    assert next(fields_of(record) for record in caplog.records if "callback failed" in record.getMessage()) == {
        "request": job
    }
