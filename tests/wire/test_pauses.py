# SPDX-License-Identifier: Apache-2.0
"""While vLLM sleeps, is paused or gets new weights, PoC computes nothing, and goes on afterwards."""

import asyncio

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_delivery import expected_nonces
from tests.wire.test_requests import error_of
from vllm_poc.wire.answers import PowState

PAUSES = [
    (["/sleep"], ["/wake_up"], "vLLM sleeps"),
    (["/release_kv_cache_memory"], ["/wake_up"], "vLLM sleeps"),
    (["/pause"], ["/resume"], "vLLM is paused"),
    (["/start_weight_update", "/update_weights"], ["/finish_weight_update"], "vLLM gets new weights"),
    (["/start_draft_weight_update"], ["/finish_weight_update"], "vLLM gets new weights"),
    (["/pause", "/update_weights"], ["/resume"], "vLLM is paused"),
]


async def call(pod: Pod, paths: list[str]) -> None:
    for path in paths:
        assert (await pod.http.post(path)).status_code == 200


async def stands_still(pod: Pod) -> None:
    before = len(pod.engine.batches)
    await asyncio.sleep(0.1)
    assert len(pod.engine.batches) == before


@pytest.mark.parametrize(("begin", "end", "reason"), PAUSES)
async def test_nothing_is_computed_in_a_pause(
    pod: Pod, receiver: CallbackReceiver, begin: list[str], end: list[str], reason: str
) -> None:
    pod.engine.seconds_per_batch = 0.02
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.total_checked > 0)
    await call(pod, begin)
    await stands_still(pod)
    status = await pod.status()
    assert (status.state, status.paused_by) == (PowState.GENERATING, reason)
    await call(pod, end)
    after = await pod.reach(lambda s: s.total_checked > status.total_checked)
    assert after.paused_by is None
    assert pod.met_in_flight == 0, "slices end before vLLM gets the call"
    await pod.post("stop")
    assert receiver.nonces == expected_nonces(ARTIFACT, await pod.status())


async def test_an_engine_that_is_awake_in_part_is_left_alone(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await call(pod, ["/sleep"])
    pod.engine.asleep = True
    await call(pod, ["/wake_up"])
    await stands_still(pod)
    pod.engine.asleep = False
    await call(pod, ["/wake_up"])
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)


async def test_a_pause_that_fails_is_none(pod: Pod) -> None:
    pod.refusing = {"/pause", "/resume"}
    await pod.start(DISTANCE | SLOT)
    assert (await pod.http.post("/pause")).status_code == 500
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)
    pod.refusing = {"/resume"}
    await call(pod, ["/pause"])
    assert (await pod.http.post("/resume")).status_code == 500
    await stands_still(pod)


async def test_pauses_add_up(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await call(pod, ["/pause", "/sleep", "/resume"])
    assert (await pod.status()).paused_by == "vLLM sleeps"
    await call(pod, ["/pause"])
    assert (await pod.status()).paused_by == "vLLM is paused; vLLM sleeps"


async def test_a_model_that_sleeps_is_not_described(pod: Pod) -> None:
    await call(pod, ["/sleep"])
    error = error_of(await pod.start(DISTANCE | SLOT), 503, "EngineFailed")
    assert error.detail == "vLLM sleeps: try again when that is over"
    assert (await pod.status()).model.max_seq_len == 0
    await call(pod, ["/wake_up"])
    assert (await pod.start(DISTANCE | SLOT)).status_code == 200


@pytest.mark.parametrize(
    "commands", [["/update_weights"], ["/start_weight_update", "/finish_weight_update"]], ids=["alone", "in steps"]
)
async def test_new_weights_are_looked_at_anew(pod: Pod, commands: list[str]) -> None:
    pod.engine.facts["fused"] = True
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    assert (pod.engine.warmed_up, pod.engine.forgotten) == ([8, 16], 0)
    await call(pod, commands)
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)
    assert (pod.engine.warmed_up, pod.engine.forgotten) == ([8, 16, 8, 16], 1)
    await pod.post("stop")
    assert len(set(pod.engine.computed)) == len(pod.engine.computed)
