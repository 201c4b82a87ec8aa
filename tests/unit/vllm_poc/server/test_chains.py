# SPDX-License-Identifier: Apache-2.0
"""Chains go through the same gate and turns as other work, in slices that follow the time budget."""

import asyncio
from typing import Any

import pytest

from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import FakeEngineClient
from vllm_poc.rpc import DecodeFacts, DecodeRequest, DecodeResult
from vllm_poc.server.chains import ChainResult, ChainScheduler, ChainSpec, DecodeRefusedError, next_passes
from vllm_poc.server.engine import EngineError, VllmEngine, WeightsChangedError
from vllm_poc.server.scheduler import Scheduler
from vllm_poc.server.settings import Settings

BUDGET = 0.05
SPEC = ChainSpec("b10c", "key", seq_len=4, max_tokens=20)
#: One prefill, and the steps.
PASSES = 1 + SPEC.max_tokens
FACTS = DecodeFacts(
    refusal=None, rebuilt=False, reserve_bytes=4000, block_tokens=[8], block_bytes=[100], max_batch_nonces=16
)
REFUSED: DecodeFacts = {**FACTS, "refusal": "No codebook."}


class Client(FakeEngineClient):
    """Workers whose chains go up by one from the nonce, modulo 16, at so many seconds for a forward pass."""

    def __init__(self, clock: FakeClock, facts: DecodeFacts = FACTS) -> None:
        super().__init__(clock)
        self.decode_facts = facts
        self.prepared = 0
        self.requests: list[DecodeRequest] = []
        self.missing = 0  # nonces in an answer

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
        """Answer one call."""
        if method == "poc_prepare_decode":
            self.prepared += 1
            return [self.decode_facts]
        if method != "poc_decode":
            return await super().collective_rpc(method, timeout, args)
        (request,) = args
        self.requests.append(request)
        await self._spend(self.seconds_per_batch * request["passes"])
        if sum(asked["passes"] for asked in self.requests) < PASSES:
            return [DecodeResult(complete=False, indices=[], margins=[], rebuilt=False)]
        steps = range(SPEC.max_tokens + 1)
        indices = [[(nonce + step) % 16 for step in steps] for nonce in request["nonces"][self.missing :]]
        margins = [[0.5] * min(len(claim), len(steps)) for claim in request["forced"]]
        return [DecodeResult(complete=True, indices=indices, margins=margins, rebuilt=False)]


class Work:
    """A scheduler over such workers."""

    def __init__(self, facts: DecodeFacts = FACTS) -> None:
        self.clock = FakeClock()
        self.client = Client(self.clock, facts)
        settings = Settings.from_environment({"VLLM_POC_SLICE_SECONDS": str(BUDGET)})
        client: Any = self.client  # whose parts are fakes, too
        engine = VllmEngine(client, frozenset(), call_seconds=1)
        self.scheduler = Scheduler(engine, settings, clock=self.clock)
        setup: Any = {"codebook": "file", "rebuild": False, "reserve_bytes": 4000}
        self.chains = ChainScheduler(self.scheduler, engine, setup, BUDGET)

    async def run(self, *args: Any) -> list[ChainResult]:  # noqa: ANN401 - those of `ChainScheduler.run`
        return await self.clock.passes(self.chains.run(SPEC, *args))


async def test_memory_is_set_aside_once_for_the_same_weights_and_anew_for_others() -> None:
    work = Work()
    await asyncio.gather(*(work.chains.facts() for _ in range(3)))
    assert work.client.prepared == 1
    await work.scheduler.forget()
    await work.chains.facts()
    assert work.client.prepared == 2


async def test_a_batch_takes_slices_that_grow_up_to_the_budget() -> None:
    work = Work()
    work.client.seconds_per_batch = 0.0078125
    found = await work.run([3, 15], {3: [1, 2], 15: [4]})
    assert found[1] == ChainResult(15, [(15 + step) % 16 for step in range(21)], [0.5])
    assert [request["passes"] for request in work.client.requests] == [1, 2, 4, 6, 6, 6]
    assert [request["forced"] for request in work.client.requests] == [[[1, 2], [4]]] * 6


async def test_chains_without_claims_have_no_margins() -> None:
    assert [chain.margins for chain in await Work().run([1, 2])] == [[], []]


async def test_chat_holds_back_the_next_slice() -> None:
    work = Work()
    work.client.seconds_per_batch = BUDGET
    running = asyncio.create_task(work.chains.run(SPEC, [1]))
    await settle()
    work.client.output_processor.busy = True
    for _ in range(200):
        await work.clock.tick()
        await settle()
    assert len(work.client.requests) == 1
    assert not running.done()
    work.client.output_processor.busy = False
    assert (await work.clock.passes(running))[0].nonce == 1


async def test_other_weights_end_a_batch_that_was_begun() -> None:
    work = Work()
    running = asyncio.create_task(work.chains.run(SPEC, [1]))
    await settle()
    await work.scheduler.forget()
    with pytest.raises(WeightsChangedError):
        await work.clock.passes(running)


@pytest.mark.parametrize(
    ("facts", "nonces", "reason"),
    [
        (REFUSED, [1], "No codebook"),
        (FACTS, [], r"A batch holds 1\.\.13 chains of 24 tokens, not 0"),
        (FACTS, list(range(14)), r"A batch holds 1\.\.13 chains of 24 tokens, not 14"),
        ({**FACTS, "reserve_bytes": 399}, [1], "set more aside"),
    ],
)
async def test_what_cannot_be_computed_is_refused_before_it_begins(
    facts: DecodeFacts, nonces: list[int], reason: str
) -> None:
    work = Work(facts)
    with pytest.raises(DecodeRefusedError, match=reason):
        await work.run(nonces)
    assert work.client.requests == []


async def test_an_answer_without_all_chains_is_an_error() -> None:
    work = Work()
    work.client.missing = 1
    with pytest.raises(EngineError, match="did not answer 2 chains of 21 steps"):
        await work.run([1, 2])


@pytest.mark.parametrize(
    ("passes", "seconds", "expected"),
    [(1, 0.2, 1), (4, 0.05, 4), (4, 0.1, 2), (4, 0.02, 8), (4, 0.03, 6), (4, 0.0, 8)],
)
def test_passes_follow_the_time_that_they_take(passes: int, seconds: float, expected: int) -> None:
    assert next_passes(passes, seconds, BUDGET) == expected
