# SPDX-License-Identifier: Apache-2.0
"""Rounds on workers that prepare forward passes for repetition, as they do on a GPU."""

import asyncio
from itertools import pairwise

import pytest

from tests.support.servers.pod import ARTIFACT, SLOT, Pod
from vllm_poc.wire.messages import PowState
from vllm_poc.worker.batches import MOST_PREPARED


@pytest.fixture
def fused(pod: Pod) -> Pod:
    pod.engine.facts["fused"] = True
    return pod


async def test_each_slice_names_the_one_after_it(fused: Pod) -> None:
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 2000)
    await fused.post("stop")
    batches = fused.engine.batches
    assert fused.engine.rehearsed == [8, 16]  # 512 tokens, then the most that can be prepared
    assert {batch["batch"] for batch in batches} == {16}
    assert all(batch["ahead"] == [after["nonces"]] for batch, after in pairwise(batches))
    assert len(set(fused.engine.computed)) == len(fused.engine.computed)


async def test_a_pipeline_knows_a_slice_more_for_each_stage(fused: Pod) -> None:
    fused.engine.facts["stages"], fused.engine.parts = 3, 4
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 200)
    await fused.post("stop")
    asked = fused.engine.answered
    for first, *ahead in zip(asked, asked[1:], asked[2:], asked[3:], strict=False):
        assert first["ahead"] == [after["nonces"] for after in ahead]
    assert len(set(fused.engine.computed)) == len(fused.engine.computed)


async def test_nothing_is_begun_beyond_the_end(fused: Pod) -> None:
    await fused.start(ARTIFACT | SLOT | {"round_id": "r1", "end_index": 700})
    await fused.reach(lambda s: s.total_checked == 700)
    assert fused.engine.batches[-1]["ahead"] == []
    await fused.post("extend", {"round_id": "r1", "end_index": 701})
    await fused.reach(lambda s: s.total_checked == 701)
    assert len(fused.engine.computed) == 701


async def test_other_work_of_the_same_kind_finds_everything_prepared(fused: Pod) -> None:
    for block_hash in ("a", "b"):
        await fused.start(ARTIFACT | SLOT | {"block_hash": block_hash})
        await fused.reach(lambda s: s.total_checked > 0)
        await fused.post("stop")
    assert fused.engine.rehearsed == [8, 16]
    await fused.start(ARTIFACT | SLOT | {"params": ARTIFACT["params"] | {"seq_len": 32}})
    await fused.reach(lambda s: s.total_checked > 0)
    assert fused.engine.rehearsed == [8, 16, 16, 32]


async def test_named_nonces_are_begun_ahead_too(fused: Pod) -> None:
    await fused.post("generate", ARTIFACT | {"nonces": list(range(1500)), "wait": True})
    asked = fused.engine.answered
    assert len(asked) > 2
    assert all(batch["ahead"] == [after["nonces"]] for batch, after in pairwise(asked))
    assert asked[-1]["ahead"] == []
    assert fused.engine.computed == list(range(1500))


async def test_two_works_of_one_kind_share_a_rehearsal(fused: Pod) -> None:
    named = ARTIFACT | {"nonces": list(range(600)), "wait": True}
    await asyncio.gather(*(fused.post("generate", named) for _ in range(3)))
    assert fused.engine.rehearsed == [8, 16]


async def test_a_rehearsal_that_fails_fails_the_round(fused: Pod) -> None:
    fused.engine.worker_error = "CUDA error"
    await fused.start(ARTIFACT | SLOT)
    status = await fused.reach(lambda s: s.state is PowState.FAILED)
    assert status.error == "poc_rehearse failed: CUDA error"


async def test_the_oldest_is_forgotten_when_another_kind_is_rehearsed_in_vain(fused: Pod) -> None:
    async def rehearsals(seq_len: int) -> int:
        before = len(fused.engine.rehearsed)
        await fused.start(ARTIFACT | SLOT | {"params": ARTIFACT["params"] | {"seq_len": seq_len}})
        await fused.reach(lambda s: s.total_checked > 0 or s.state is PowState.FAILED)
        await fused.post("stop")
        return len(fused.engine.rehearsed) - before

    for seq_len in range(1, 1 + MOST_PREPARED):
        assert await rehearsals(seq_len) > 0
    fused.engine.worker_error = "CUDA error"
    assert await rehearsals(100) > 0
    fused.engine.worker_error = None
    assert await rehearsals(2) == 0
    assert await rehearsals(1) > 0, "the workers have forgotten it"


async def test_a_pass_that_is_cut_is_asked_for_until_it_is_complete(fused: Pod) -> None:
    fused.engine.parts = 3
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 100)
    await fused.post("stop")
    batches = fused.engine.batches
    for index, (batch, after) in enumerate(pairwise(batches), 1):
        assert (batch == after) == (index % 3 > 0)
    assert len(set(fused.engine.computed)) == len(fused.engine.computed)


async def test_chat_passes_between_the_parts_and_other_work_does_not(fused: Pod) -> None:
    fused.engine.parts, fused.engine.seconds_per_batch = 4, 0.02
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda _: len(fused.engine.batches) % 4 == 2)
    fused.engine.output_processor.busy = True
    before = len(fused.engine.batches)
    beside = ARTIFACT | {"nonces": [10**6], "wait": True, "beside_round": True}
    named = asyncio.create_task(fused.post("generate", beside))
    await asyncio.sleep(0.2)
    assert len(fused.engine.batches) <= before + 1, "PoC must wait for chat"
    fused.engine.output_processor.busy = False
    await named
    assert 10**6 in fused.engine.computed
    for index, (batch, after) in enumerate(pairwise(fused.engine.batches), 1):
        assert (batch == after) == (index % 4 > 0)
