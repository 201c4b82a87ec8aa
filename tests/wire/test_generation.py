# SPDX-License-Identifier: Apache-2.0
"""Rounds from start to end: what is computed, held back, resumed, and how failures show."""

import asyncio
from typing import Any

import pytest

from tests.support.builders.forwarding import until
from tests.support.fakes.engine import distance
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod, running_pod
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.messages import InitGenerateRequest
from vllm_poc.wire.partition import MAX_NONCE, NonceSlot

NEARLY_DONE = {"node_id": 0, "node_count": 1, "start_index": MAX_NONCE - 99}


async def test_before_the_first_round_the_status_is_idle(pod: Pod) -> None:
    status = await pod.status()
    assert (status.status, status.state, status.config) == (PowState.IDLE, PowState.IDLE, None)
    assert status.model.names == ["/models/tiny", "tiny"]
    assert (status.model.max_seq_len, status.model.hidden_size, status.model.scratch_bytes) == (1024, 64, 4096)
    assert (status.model.attention, status.model.experts) == ("FakeAttention", "")
    assert (status.model.flags, status.model.max_batch_tokens, status.model.max_batch_nonces) == (
        ["--enforce-eager"],
        2048,
        16,
    )
    assert (status.model.dtype, status.model.kv_cache_dtype, status.model.quantization) == ("float32", "auto", "")


@pytest.mark.parametrize("body", [ARTIFACT, DISTANCE], ids=["artifact", "distance"])
async def test_a_round_computes_its_slot_in_order(pod: Pod, body: dict[str, Any]) -> None:
    answer = await pod.start(body | SLOT)
    assert answer.status_code == 200
    assert answer.json()["pow_status"]["status"] == "GENERATING"
    status = await pod.reach(lambda s: s.total_checked > 100)
    assert status.state is PowState.GENERATING
    assert status.delivered_index == status.next_index
    await pod.post("stop")
    assert pod.engine.computed == NonceSlot(**SLOT).nonces(0, len(pod.engine.computed))


async def test_a_round_waits_at_its_end_index_until_it_is_extended(pod: Pod) -> None:
    await pod.start(ARTIFACT | SLOT | {"round_id": "r1", "batch_size": 8, "end_index": 20})
    await pod.reach(lambda s: s.next_index == 20 == s.delivered_index)
    await asyncio.sleep(0.05)
    status = await pod.status()
    assert (status.state, status.next_index, status.end_index) == (PowState.GENERATING, 20, 20)
    for lower in (20, 5):
        assert (await pod.post("extend", {"round_id": "r1", "end_index": lower})).status_code == 200
    assert (await pod.status()).end_index == 20
    answer = await pod.post("extend", {"round_id": "r1", "end_index": 33})
    assert answer.json()["pow_status"]["round_id"] == "r1"
    await pod.reach(lambda s: s.next_index == 33 == s.delivered_index)
    await pod.post("stop")
    assert pod.engine.computed == NonceSlot(**SLOT).nonces(0, 33)


async def test_no_end_lies_beyond_the_last_index(pod: Pod) -> None:
    body = DISTANCE | SLOT | {"round_id": "a", "end_index": 16}
    await pod.start(body)
    refused = await pod.post("extend", {"round_id": "a", "end_index": 2**31 + 1})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "end_index")
    assert (await pod.post("extend", {"round_id": "a", "end_index": 2**31})).status_code == 200
    assert (await pod.status()).end_index == 2**31


async def test_only_the_round_that_generates_is_extended(pod: Pod) -> None:
    extension = {"round_id": "r2", "end_index": 9}
    idle = await pod.post("extend", extension)
    assert (idle.status_code, idle.json()["detail"]) == (409, "no round generates: start it first")
    await pod.start(ARTIFACT | SLOT | {"round_id": "r1", "end_index": 1})
    other = await pod.post("extend", extension)
    assert (other.status_code, other.json()["round_id"]) == (409, "r1")
    await pod.post("stop")
    assert (await pod.post("extend", extension | {"round_id": "r1"})).status_code == 409


async def test_a_round_cannot_end_before_it_starts(pod: Pod) -> None:
    answer = await pod.start(ARTIFACT | SLOT | {"start_index": 5, "end_index": 4})
    assert answer.status_code == 422
    assert "end_index 4 must not lie before start_index 5" in answer.text


async def test_the_workers_get_what_the_request_says(pod: Pod) -> None:
    await pod.start(ARTIFACT | SLOT | {"poc_stronger_rng": True, "batch_size": 3})
    await pod.reach(lambda s: s.total_checked > 0)
    batch = pod.engine.batches[0]
    assert batch == {
        "protocol": "artifact",
        "block_hash": "abc123",
        "public_key": "node1",
        "nonces": [4, 10, 16],
        "seq_len": 64,
        "k_dim": 4,
        "strong_rng": True,
        "layer_hooks": True,
        "sign_flips": False,
        "batch": 3,
        "ahead": [],
    }


async def test_status_tells_the_round_and_its_valid_nonces(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT | {"round_id": "r1"})
    await pod.reach(lambda s: s.total_valid > 5)
    await pod.post("stop")
    status = await pod.status()
    computed = NonceSlot(**SLOT).nonces(0, status.next_index)
    valid = [nonce for nonce in computed if distance(nonce) < 1.405]
    assert status.valid_nonces == valid[-1000:]
    assert status.valid_distances == [distance(nonce) for nonce in status.valid_nonces]
    assert (status.total_checked, status.total_valid) == (len(computed), len(valid))
    assert status.config is not None
    assert status.config.model_dump(include=set(SLOT)) == SLOT
    assert (status.round_id, status.r_target) == ("r1", 1.405)


async def test_after_a_stop_each_protocol_reads_its_own_word(pod: Pod) -> None:
    await pod.start(ARTIFACT | SLOT)
    answer = await pod.post("stop")
    assert answer.json()["pow_status"]["status"] == "STOPPED"
    status = await pod.status()
    assert (status.status, status.state) == (PowState.IDLE, PowState.STOPPED)


async def test_stop_without_a_round_and_twice_is_harmless(pod: Pod) -> None:
    assert (await pod.post("stop")).status_code == 200
    await pod.start(ARTIFACT | SLOT)
    assert [(await pod.post("stop")).status_code for _ in range(2)] == [200, 200]


async def test_whoever_gave_the_order_is_told_and_changes_nothing(pod: Pod) -> None:
    order = DISTANCE | SLOT | {"round_id": "r1"}
    assert (await pod.start(order | {"owner": "one"})).status_code == 200
    assert (await pod.start(order | {"owner": "two"})).status_code == 200, "it is the same work"
    assert (await pod.status()).owner == "one"
    await pod.post("stop")
    assert (await pod.start(order)).status_code == 200
    assert (await pod.status()).owner is None


async def test_a_repeat_with_the_same_id_is_answered_with_what_runs(pod: Pod) -> None:
    body = DISTANCE | SLOT | {"round_id": "r1"}
    await pod.start(body)
    await pod.reach(lambda s: s.next_index > 0)
    answer = await pod.start(body | {"start_index": 5})
    assert answer.status_code == 200
    assert answer.json()["pow_status"]["round_id"] == "r1"
    await pod.post("stop")
    assert len(set(pod.engine.computed)) == len(pod.engine.computed), "the repeat must not start anything"


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {}), ({"round_id": "r1"}, {"round_id": "r2"}), ({"round_id": "r1"}, {"round_id": "r1", "node_id": 0})],
    ids=["no id", "other id", "other slot"],
)
async def test_other_work_while_one_runs_is_a_conflict(pod: Pod, first: dict[str, Any], second: dict[str, Any]) -> None:
    await pod.start(DISTANCE | SLOT | first)
    answer = await pod.start(DISTANCE | SLOT | second)
    error = answer.json()
    assert (answer.status_code, error["reason"]) == (409, "RoundConflict")
    assert error["detail"].startswith("Already generating")
    assert error["running"]["node_id"] == SLOT["node_id"]
    assert error["round_id"] == first.get("round_id")


async def test_a_new_start_resumes_where_it_is_told(pod: Pod) -> None:
    body = DISTANCE | SLOT | {"round_id": "r1"}
    await pod.start(body)
    await pod.reach(lambda s: s.next_index > 0)
    await pod.post("stop")
    await pod.reach(lambda _: not pod.engine.in_flight)  # a slice is computed to its end, whoever waits for it
    pod.engine.computed.clear()
    await pod.start(body | {"start_index": 1000})
    status = await pod.reach(lambda s: s.total_checked > 0)
    assert status.start_index == 1000
    assert pod.engine.computed[0] == InitGenerateRequest(**body).slot.nonce(1000)


async def test_the_round_ends_with_the_int32_range(pod: Pod) -> None:
    await pod.start(DISTANCE | NEARLY_DONE)
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert status.total_checked == 100
    assert pod.engine.computed[-1] == MAX_NONCE
    assert status.next_index == status.delivered_index == MAX_NONCE + 1


async def test_chat_holds_generation_back(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    pod.engine.output_processor.busy = True
    await asyncio.sleep(0.05)
    held = await pod.status()
    await asyncio.sleep(0.1)
    later = await pod.status()
    assert later.next_index == held.next_index
    assert later.held_back_seconds > held.held_back_seconds > 0
    assert later.last_progress_seconds is not None
    assert later.last_progress_seconds > 0.1
    pod.engine.output_processor.busy = False
    await pod.reach(lambda s: s.next_index > later.next_index)


async def test_what_chat_holds_back_after_a_round_does_not_count_for_it(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    await pod.post("stop")
    ended = (await pod.status()).held_back_seconds
    pod.engine.output_processor.busy = True
    asking = asyncio.create_task(pod.post("generate", DISTANCE | {"nonces": [1], "wait": True}))
    await asyncio.sleep(0.1)
    assert (await pod.status()).held_back_seconds == ended
    pod.engine.output_processor.busy = False
    assert (await asking).status_code == 200


async def test_slow_slices_get_shorter_and_no_nonce_is_lost(pod: Pod) -> None:
    pod.engine.seconds_per_batch = 0.06
    await pod.start(DISTANCE | SLOT | {"batch_size": 8})
    await pod.reach(lambda s: s.next_index > 24)
    await pod.post("stop")
    sizes = [len(batch["nonces"]) for batch in pod.engine.batches]
    assert sizes[:5] == [8, 8, 4, 4, 2]
    assert pod.engine.computed == NonceSlot(**SLOT).nonces(0, len(pod.engine.computed))


@pytest.mark.parametrize(
    ("fault", "message"),
    [(RuntimeError("CUDA error"), "poc_compute failed: CUDA error"), (None, "did not answer within 2 s")],
    ids=["error", "hang"],
)
@pytest.mark.parametrize("pod_settings", [{"ENGINE_SECONDS": "2"}])
async def test_a_failing_engine_fails_the_round(pod: Pod, fault: Exception | None, message: str) -> None:
    await pod.start(DISTANCE | SLOT | {"round_id": "r1"})
    before = await pod.reach(lambda s: s.next_index > 0)
    pod.engine.fault, pod.engine.seconds_per_batch = fault, 0 if fault else 60
    status = await pod.reach(lambda s: s.state is PowState.FAILED)
    assert status.status is PowState.FAILED
    assert message in (status.error or "")
    assert status.next_index >= before.next_index
    pod.engine.fault, pod.engine.seconds_per_batch = None, 0.001
    await pod.reach(lambda _: not pod.engine.in_flight)  # the engine gives up later than PoC does
    assert (await pod.start(DISTANCE | SLOT)).status_code == 200
    assert (await pod.reach(lambda s: s.next_index > 0)).error is None


async def test_what_the_workers_say_went_wrong_fails_the_round(pod: Pod) -> None:
    pod.engine.worker_error = "OutOfMemoryError: CUDA out of memory"
    await pod.start(DISTANCE | SLOT)
    status = await pod.reach(lambda s: s.state is PowState.FAILED)
    assert status.error == (
        "poc_compute failed: OutOfMemoryError: CUDA out of memory; OtherRankError: another rank failed"
    )


async def test_nonces_that_stay_not_finite_are_counted_and_left_out(pod: Pod) -> None:
    slot = NonceSlot(**SLOT)
    pod.engine.sick.update({slot.nonce(1): 1, slot.nonce(2): 9})
    await pod.start(ARTIFACT | SLOT)
    status = await pod.reach(lambda s: s.total_checked > 20)
    assert status.rejected == status.delivered_rejected == 1
    assert status.total_valid == status.total_checked - 1
    assert pod.engine.batches[1]["nonces"] == [slot.nonce(1), slot.nonce(2)]
    assert pod.engine.computed.count(slot.nonce(2)) == 2


@pytest.mark.parametrize("pod_settings", [{"SICK_NONCES": "30"}])
@pytest.mark.parametrize("every", [1, 8], ids=["all", "some of each slice"])
async def test_a_sick_engine_fails_the_round(pod: Pod, every: int) -> None:
    pod.engine.sick.update(dict.fromkeys(NonceSlot(**SLOT).nonces(40, 2000)[::every], 9))
    await pod.start(ARTIFACT | SLOT)
    status = await pod.reach(lambda s: s.state is PowState.FAILED)
    assert 30 <= status.rejected <= 48
    assert status.error is not None
    assert "came out NaN or infinite" in status.error
    assert status.delivered_index == status.next_index


@pytest.mark.parametrize("pod_settings", [{"SICK_NONCES": "30"}])
async def test_a_rare_nonce_that_is_not_finite_fails_no_round(pod: Pod) -> None:
    pod.engine.sick.update(dict.fromkeys(NonceSlot(**SLOT).nonces(0, 4000)[::40], 9))
    await pod.start(ARTIFACT | SLOT)
    status = await pod.reach(lambda s: s.rejected > 40)
    assert status.state is PowState.GENERATING


async def test_the_server_takes_its_round_with_it() -> None:
    before = asyncio.all_tasks()
    async with running_pod() as pod:
        await pod.start(DISTANCE | SLOT)
        await pod.reach(lambda s: s.next_index > 0)
    # What the workers were computing then is awaited until they answer.
    await until(lambda: asyncio.all_tasks() == before, seconds=5.0)
