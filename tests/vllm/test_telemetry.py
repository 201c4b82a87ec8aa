# SPDX-License-Identifier: Apache-2.0
"""What an operator of servers sees: series beside vLLM's own, and lines in vLLM's log."""

import re
import time

from tests.support.fakes.receiver import Receiver
from tests.vllm.client import Client

COMPUTED = 'poc_nonces_computed_total{protocol="artifact",work="round"}'
# A round must outlast one pause between progress lines.
PROGRESS_LIMIT = 20


def test_a_round_shows_on_vllms_metrics(qwen3: Client, receiver: Receiver) -> None:
    before = qwen3.metrics()
    assert before['poc_state{state="GENERATING"}'] == 0
    qwen3.start(url=receiver.url)
    assert receiver.wait_for(1)
    during = qwen3.metrics()
    qwen3.stop()
    after = qwen3.metrics()
    assert during['poc_state{state="GENERATING"}'] == 1
    assert during["poc_last_progress_timestamp_seconds"] > time.time() - PROGRESS_LIMIT
    assert after['poc_state{state="STOPPED"}'] == 1
    status = qwen3.status()
    assert after[COMPUTED] - before[COMPUTED] == status["total_checked"] > 0
    delivered = after["poc_results_delivered_total"] - before["poc_results_delivered_total"]
    assert delivered == status["delivered_valid"]
    assert after["poc_slice_seconds_count"] > before["poc_slice_seconds_count"]


def test_a_round_shows_in_vllms_log(qwen3: Client) -> None:
    seen = len(qwen3.log.read_text())
    qwen3.start(round_id="telemetry")
    progress = re.compile(
        r"^\(APIServer pid=\d+\) INFO .*\[generation\.py:\d+\] .*'telemetry'.*Computing.*pending$", re.M
    )
    deadline = time.monotonic() + PROGRESS_LIMIT
    while not (lines := progress.findall(qwen3.log.read_text()[seen:])):
        assert time.monotonic() < deadline, "no progress line"
        time.sleep(0.2)
    qwen3.stop()
    text = qwen3.log.read_text()[seen:]
    assert lines
    assert len(re.findall("'telemetry'.*; starts, callbacks go to nobody$", text, re.M)) == 1
    assert len(re.findall("'telemetry'.*; ended: stopped on request$", text, re.M)) == 1


def test_what_fails_in_a_worker_is_in_vllms_log_with_its_traceback(qwen3: Client) -> None:
    seen = len(qwen3.log.read_text())
    assert "error" in qwen3.worker("poc_compute", {})
    text = qwen3.log.read_text()[seen:]
    assert "PoC failed on this worker" in text
    assert "Traceback (most recent call last)" in text
