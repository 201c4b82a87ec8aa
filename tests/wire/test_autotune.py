# SPDX-License-Identifier: Apache-2.0
"""Rounds on workers that capture forward passes, as they do on a GPU."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.support.servers.pod import ARTIFACT, SLOT, Pod
from vllm_poc.server.autotune import MAX_KINDS
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.partition import NonceSlot


@pytest.fixture
def fused(pod: Pod) -> Pod:
    pod.engine.facts["fused"] = True
    return pod


async def begun(pod: Pod, fields: dict[str, Any]) -> None:
    """Start a round, and wait for the slice behind its search, or for its failure."""
    before = len(pod.engine.answered)
    await pod.start(ARTIFACT | SLOT | fields)
    await pod.reach(lambda s: len(pod.engine.answered) > before + 1 or s.state is PowState.FAILED)


async def test_each_slice_names_the_one_after_it(fused: Pod) -> None:
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 2000)
    await fused.post("stop")
    first, *batches = fused.engine.batches
    assert fused.engine.warmed_up == [8, 16]  # 512 tokens, then the most that can be captured
    assert (first["nonces"], first["ahead"]) == (NonceSlot(**SLOT).nonces(0, 8), [])
    assert {batch["batch"] for batch in batches} == {16}
    assert all(batch["ahead"] == [after["nonces"]] for batch, after in pairwise(batches))
    assert len(set(fused.engine.computed)) == len(fused.engine.computed)


async def test_a_pipeline_knows_a_slice_more_for_each_stage(fused: Pod) -> None:
    fused.engine.facts["stages"], fused.engine.segments = 3, 4
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 200)
    await fused.post("stop")
    asked = fused.engine.answered[1:]  # the first is one before the search
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


async def test_other_work_of_the_same_kind_finds_everything_captured(fused: Pod) -> None:
    for block_hash in ("a", "b"):
        await begun(fused, {"block_hash": block_hash})
        await fused.post("stop")
    assert fused.engine.warmed_up == [8, 16]
    await begun(fused, {"params": ARTIFACT["params"] | {"seq_len": 32}})
    assert fused.engine.warmed_up == [8, 16, 16, 32]


async def test_named_nonces_are_begun_ahead_too(fused: Pod) -> None:
    await fused.post("generate", ARTIFACT | {"nonces": list(range(1500)), "wait": True})
    asked = fused.engine.answered
    assert len(asked) > 2
    assert all(batch["ahead"] == [after["nonces"]] for batch, after in pairwise(asked))
    assert asked[-1]["ahead"] == []
    assert fused.engine.computed == list(range(1500))


async def test_two_works_of_one_kind_share_the_tuning(fused: Pod) -> None:
    named = ARTIFACT | {"nonces": list(range(600)), "wait": True}
    await asyncio.gather(*(fused.post("generate", named) for _ in range(3)))
    assert fused.engine.warmed_up == [8, 16]


async def test_few_nonces_are_not_worth_a_search_until_there_have_been_many(fused: Pod) -> None:
    few = ARTIFACT | {"nonces": list(range(2)), "batch_size": 1, "wait": True}
    for _ in range(31):
        assert (await fused.post("generate", few)).status_code == 200
    assert fused.engine.warmed_up == []
    for _ in range(2):
        assert (await fused.post("generate", few)).status_code == 200
    assert fused.engine.warmed_up == [8, 16]


async def searches(pod: Pod, nonces: int, seq_len: int = 64, *, status: int = 200) -> bool:
    """Compute so many nonces: whether the server searches for a pass first."""
    before, params = len(pod.engine.warmed_up), ARTIFACT["params"] | {"seq_len": seq_len}
    named = ARTIFACT | {"params": params, "nonces": list(range(nonces)), "batch_size": 1, "wait": True}
    assert (await pod.post("generate", named)).status_code == status
    return len(pod.engine.warmed_up) > before


async def test_a_kind_that_made_way_is_worth_a_search_once_there_have_been_many_again(fused: Pod) -> None:
    kinds = range(64, 65 + MAX_KINDS)
    assert [await searches(fused, 64, kind) for kind in kinds] == [True] * len(kinds)
    assert [await searches(fused, 2, kind) for kind in kinds] == [False] * len(kinds)
    assert await searches(fused, 64, kinds[0])


async def test_so_is_one_that_was_searched_for_in_vain_or_forgotten(fused: Pod) -> None:
    fused.engine.has_room = False
    assert await searches(fused, 64, status=503)
    fused.engine.has_room = True
    assert not await searches(fused, 2)
    assert await searches(fused, 62)
    assert (await fused.http.post("/update_weights")).status_code == 200
    assert not await searches(fused, 2)
    assert await searches(fused, 62)


async def test_nothing_is_searched_beside_a_round(fused: Pod) -> None:
    await begun(fused, {})
    other = ARTIFACT["params"] | {"seq_len": 32}
    many = ARTIFACT | {"params": other, "nonces": list(range(500)), "wait": True, "beside_round": True}
    assert (await fused.post("generate", many)).status_code == 200
    assert fused.engine.warmed_up == [8, 16]


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "queued"])
async def test_a_search_of_a_request_is_abandoned_when_a_round_begins(fused: Pod, waits: bool) -> None:
    """The round waits for the pass under way alone, and the request is computed in slices that are not tuned."""
    fused.engine.facts["max_captured_tokens"] = fused.engine.facts["max_captured_nonces"] = 2**16
    fused.engine.seconds_to_warm_up = 0.3
    other = ARTIFACT["params"] | {"seq_len": 32}
    named = ARTIFACT | {"params": other, "nonces": list(range(8_192)), "wait": waits, "beside_round": waits}
    request = asyncio.create_task(fused.post("generate", named))
    while not fused.engine.warmed_up:  # noqa: ASYNC110 - the fake has no event
        await asyncio.sleep(0.01)
    await fused.start(ARTIFACT | SLOT)
    fused.engine.seconds_to_warm_up = 0
    await fused.reach(lambda s: s.total_checked > 0 and len(fused.engine.warmed_up) > 1)
    assert fused.engine.warmed_up[:2] == [16, 8], "the second is the round's own first"
    await fused.post("stop?round_id=none")
    request.cancel()
    await asyncio.wait([request])


async def test_the_first_nonces_do_not_wait_for_the_search(fused: Pod) -> None:
    fused.engine.seconds_to_warm_up = 0.5
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 0)
    assert (fused.engine.computed, fused.engine.warmed_up[1:]) == (NonceSlot(**SLOT).nonces(0, 8), [])
    fused.engine.seconds_to_warm_up = 0
    await fused.reach(lambda s: s.total_checked > 100)
    await fused.post("stop")
    assert len(set(fused.engine.computed)) == len(fused.engine.computed)


@pytest.mark.parametrize("end_index", [0, 3, 8])
async def test_the_first_nonces_go_no_further_than_the_round(fused: Pod, end_index: int) -> None:
    await fused.start(ARTIFACT | SLOT | {"round_id": "r1", "end_index": end_index})
    await fused.reach(lambda s: s.total_checked == end_index and fused.engine.warmed_up == [8, 16])
    assert fused.engine.computed == NonceSlot(**SLOT).nonces(0, end_index)


async def test_a_warm_up_that_fails_fails_the_round(fused: Pod) -> None:
    fused.engine.seconds_to_warm_up = 0.2
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 0)
    fused.engine.worker_error = "CUDA error"
    status = await fused.reach(lambda s: s.state is PowState.FAILED)
    assert status.error == "poc_warm_up failed: CUDA error"


async def test_a_round_whose_pass_made_way_while_it_waited_searches_again(fused: Pod) -> None:
    """Else it would go on in passes of that size which nobody has captured or cut."""
    await fused.start(ARTIFACT | SLOT | {"round_id": "r1", "end_index": 16})
    await fused.reach(lambda s: s.delivered_index == 16)
    for seq_len in range(1, 1 + MAX_KINDS):
        named = {"params": ARTIFACT["params"] | {"seq_len": seq_len}, "nonces": list(range(4 * 1024 // seq_len))}
        answer = await fused.post("generate", ARTIFACT | named | {"wait": True, "beside_round": True})
        assert answer.status_code == 200, answer.text
    before = len(fused.engine.warmed_up)
    answer = await fused.post("extend", {"round_id": "r1", "end_index": 64})
    assert answer.status_code == 200, answer.text
    await fused.reach(lambda s: s.delivered_index == 64)
    assert fused.engine.warmed_up[before:] == [8, 16]


async def test_the_oldest_makes_way_when_another_kind_is_tuned_in_vain(fused: Pod) -> None:
    async def warm_ups(seq_len: int) -> int:
        before = len(fused.engine.warmed_up)
        await begun(fused, {"params": ARTIFACT["params"] | {"seq_len": seq_len}})
        await fused.post("stop")
        return len(fused.engine.warmed_up) - before

    for seq_len in range(1, 1 + MAX_KINDS):
        assert await warm_ups(seq_len) > 0
    fused.engine.worker_error = "CUDA error"
    assert await warm_ups(100) > 0
    fused.engine.worker_error = None
    assert await warm_ups(2) == 0
    assert await warm_ups(1) > 0, "the workers have dropped it"


async def test_the_workers_are_told_which_kinds_to_keep(fused: Pod) -> None:
    """They keep no count of their own, so that both sides agree on what is captured."""

    async def generate(seq_len: int) -> None:
        params = ARTIFACT["params"] | {"seq_len": seq_len}
        enough = list(range(4 * 1024 // seq_len))
        answer = await fused.post("generate", ARTIFACT | {"params": params, "nonces": enough, "wait": True})
        assert answer.status_code == 200, answer.text

    for seq_len in range(1, 1 + MAX_KINDS):
        await generate(seq_len)
    await generate(1)  # now the one used last
    before = len(fused.engine.kept)
    await generate(100)
    told = [{fields["seq_len"] for fields in kept} for kept in fused.engine.kept]
    assert told[0] == set()
    assert all(kept == {3, 4, 1} for kept in told[before:]), "the oldest makes way before the newest is warmed up"
    assert len(told) > before


async def test_a_pass_that_is_cut_is_asked_for_until_it_is_complete(fused: Pod) -> None:
    fused.engine.segments = 3
    await fused.start(ARTIFACT | SLOT)
    await fused.reach(lambda s: s.total_checked > 100)
    await fused.post("stop")
    batches = fused.engine.batches
    for index, (batch, after) in enumerate(pairwise(batches), 1):
        assert (batch == after) == (index % 3 > 0)
    assert len(set(fused.engine.computed)) == len(fused.engine.computed)


async def test_chat_passes_between_the_segments_and_other_work_does_not(fused: Pod) -> None:
    fused.engine.segments, fused.engine.seconds_per_batch = 4, 0.02
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
