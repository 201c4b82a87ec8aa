# SPDX-License-Identifier: Apache-2.0
"""Chains go through the same gate and turns as other work, in calls that follow the time budget."""

import asyncio
from itertools import repeat
from typing import Any, NamedTuple

import pytest

from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import FakeEngineClient, chain, vector
from vllm_poc.rpc import ChainWork, DecodeRequest, DecodeResult
from vllm_poc.server.autotune import GaveWayError
from vllm_poc.server.chains import ChainScheduler, Computers, Pace, next_cut, next_parts
from vllm_poc.server.engine import EngineError, NoMemoryError, VllmEngine, WeightsChangedError
from vllm_poc.server.errors import ServerEndsError
from vllm_poc.server.scheduler import ComputedChain, Scheduler, SliceResult
from vllm_poc.settings import Settings
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.stat_test import ChainComparison

PREFILL: ChainWork = "prefill"
STEP: ChainWork = "step"
GRAPH: ChainWork = "graph"
BUDGET = 0.05
STEPS = 20
ROUND: dict[str, Any] = {"block_hash": "b10c", "block_height": 7, "public_key": "key"}
PARAMS: dict[str, Any] = {"model": "tiny", "seq_len": 4}
#: What the server says of 100 blocks of memory, of which a chain takes 8 and 1 is left empty.
MEMORY = "The decode scheme has memory for 12 chains of 256 tokens and 256 steps at a time."
SETTINGS = {
    "VLLM_POC_SLICE_SECONDS": str(BUDGET),
    "VLLM_POC_DECODE_CODEBOOK": "/codebook.pt",
    "VLLM_POC_DECODE_RESERVE_BYTES": "4000",
}


def asked(nonces: list[int], claims: dict[int, list[int]] | None = None, *, decode: bool = True) -> GenerateRequest:
    params = PARAMS | ({"decode": True, "max_tokens": STEPS} if decode else {"k_dim": 4})
    return GenerateRequest(**ROUND, params=params, nonces=nonces, wait=True, enforced_k_steps=claims)


class Work:
    """Schedulers over fake workers, at so many seconds for a forward pass."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.client = FakeEngineClient(self.clock)
        settings = Settings.from_environment(SETTINGS)
        client: Any = self.client  # whose parts are fakes, too
        engine = VllmEngine(client, frozenset(), call_seconds=1)
        self.scheduler = Scheduler(engine, settings, clock=self.clock)
        self.computers = Computers(self.scheduler, ChainScheduler(self.scheduler, engine, settings))

    def begun(self, request: GenerateRequest) -> asyncio.Task[SliceResult]:
        computer = self.computers.of(request)
        size = computer.slice_size(request, 8)
        return asyncio.create_task(computer.run(request, request.nonces, size))

    async def run(self, nonces: list[int], claims: dict[int, list[int]] | None = None) -> SliceResult:
        return await self.clock.passes(self.begun(asked(nonces, claims)))


async def test_memory_is_set_aside_once_for_the_same_weights_and_anew_for_others() -> None:
    work = Work()
    await work.run([1])
    await work.run([2])
    assert work.client.setups == [{"codebook": "/codebook.pt", "rebuild": False, "reserve_bytes": 4000}]
    await work.scheduler.forget()
    await work.run([3])
    assert len(work.client.setups) == 2


async def test_a_batch_takes_calls_that_grow_up_to_the_budget() -> None:
    work = Work()
    found = await work.run([3, 15])
    assert found == SliceResult([(nonce, ComputedChain(bytes(chain(nonce, STEPS)), None)) for nonce in (3, 15)], 0)
    assert [call["parts"] for call in work.client.decode_calls] == [1, 2, 4, 8, 16]
    assert {call["seq_len"] for call in work.client.decode_calls} == {4}


async def test_steps_go_on_from_claims_which_are_compared() -> None:
    honest, other = chain(3, STEPS), chain(15, STEPS)
    other[4] = (other[4] + 2) % 16
    found = dict((await Work().run([3, 15, 4], {3: honest, 15: other, 4: [200]})).items)
    assert found[3] == ComputedChain(bytes(honest), ChainComparison(STEPS + 1, 0, 0.0))
    assert found[15] == ComputedChain(bytes(chain(15, STEPS, other)), ChainComparison(STEPS + 1, 2, 0.06))
    assert found[4] == ComputedChain(bytes(chain(4, STEPS, [200])), ChainComparison(1, 1, 2.0))


async def test_chains_that_are_not_finite_hold_up_no_others() -> None:
    work = Work()
    work.client.sick.update({2: 1, 3: 2})
    found = await work.run([1, 2, 3])
    assert ([nonce for nonce, _ in found.items], found.rejected) == ([1], 2)
    assert work.client.computed == [1, 2, 3]


async def test_chat_holds_back_the_next_call() -> None:
    work = Work()
    work.client.seconds_per_batch = BUDGET
    running = work.begun(asked([1]))
    await settle()
    work.client.output_processor.busy = True
    for _ in range(200):
        await work.clock.tick()
        await settle()
    assert len(work.client.decode_calls) == 1
    assert not running.done()
    work.client.output_processor.busy = False
    assert (await work.clock.passes(running)).rejected == 0


async def test_vectors_are_computed_between_the_steps_of_chains_and_other_chains_after_them() -> None:
    work = Work()
    work.client.seconds_per_batch = BUDGET
    running = [work.begun(request) for request in (asked([1]), asked([2]), asked([3], decode=False))]
    found = [await work.clock.passes(task) for task in running]
    assert found[2].items == [(3, vector(3, 4))]
    assert work.client.computed == [3, 1, 2], "chains of another batch would make the workers begin anew"
    assert len(work.client.decode_calls) == 2 * (STEPS + 1)


async def test_a_batch_gives_way_before_its_next_call() -> None:
    work, request, told = Work(), asked([1]), list[bool]()
    size = work.computers.of(request).slice_size(request, 8)
    running = work.computers.of(request).run(request, [1], size, gives_way=lambda: bool(told))
    task = asyncio.create_task(running)
    while not work.client.decode_calls:
        await work.clock.tick()
    told.append(True)
    with pytest.raises(GaveWayError):
        await work.clock.passes(task)
    assert len(work.client.decode_calls) == 2, "the one that was under way is answered"
    assert (await work.run([2])).rejected == 0, "the turn is free"


async def test_other_weights_end_a_batch_that_was_begun() -> None:
    work = Work()
    running = work.begun(asked([1]))
    await settle()
    await work.clock.passes(work.scheduler.forget())
    with pytest.raises(WeightsChangedError):
        await work.clock.passes(running)


async def test_workers_that_no_longer_decode_are_an_error() -> None:
    work = Work()
    work.client.decode_facts["refusal"] = "No codebook."
    with pytest.raises(EngineError, match="does not run here any more: No codebook"):
        await work.run([1])
    assert work.client.decode_calls == []


async def test_without_memory_a_single_chain_is_tried_until_there_is_room() -> None:
    work = Work()
    await work.run([1])
    work.client.has_room = False
    with pytest.raises(NoMemoryError):
        await work.run([1, 2])
    assert work.scheduler.shortage.error is not None
    work.client.has_room = True
    work.clock.advance(31)
    await work.clock.passes(asyncio.create_task(settle(500)))
    assert work.scheduler.shortage.error is None
    assert work.client.computed == [1, 1]


async def test_a_batch_without_memory_is_halved_and_so_are_those_that_follow() -> None:
    work, request = Work(), asked(list(range(7)))
    work.client.most_chains = 3
    computer = work.computers.of(request)
    size = computer.slice_size(request, 7)
    found = await work.clock.passes(computer.run(request, request.nonces, size))
    assert found.items == [(nonce, ComputedChain(bytes(chain(nonce, STEPS)), None)) for nonce in range(7)]
    assert [len(done["nonces"]) for done in work.client.decoded] == [3, 3, 1]
    assert size.nonces == 3
    assert work.scheduler.shortage.error is None, "one chain finds room"


async def test_what_workers_say_of_the_last_chains_is_a_finding_until_others_come() -> None:
    work = Work()
    work.client.chain_findings = ["Steps are slow."]
    await work.run([1])
    assert work.scheduler.model.findings == ["PoC computes by a formula.", MEMORY, "Steps are slow."]
    work.client.chain_findings = []
    await work.run([2])
    assert work.scheduler.model.findings == ["PoC computes by a formula.", MEMORY]


async def test_what_workers_find_out_before_they_compute_chains_is_a_finding() -> None:
    work = Work()
    work.client.decode_facts["findings"] = ["Chains are computed by a formula."]
    assert (await work.clock.passes(work.scheduler.model.facts()))["findings"][1:] == [
        MEMORY,
        "Chains are computed by a formula.",
    ]


async def at_its_end(*, within: float) -> tuple[Work, asyncio.Task[SliceResult]]:
    """Close the gate, but for work that ends within so many seconds, once a batch has done two passes of 50 ms."""
    work = Work()
    work.client.seconds_per_batch = BUDGET
    running = work.begun(asked([1]))
    while len(work.client.decode_calls) < 2:
        await work.clock.tick()
    work.scheduler.gate.close(within)
    return work, running


async def test_a_server_that_ends_computes_a_batch_to_its_end_if_there_is_time() -> None:
    work, running = await at_its_end(within=(STEPS + 1) * BUDGET + 0.1)
    assert (await work.clock.passes(running)).items == [(1, ComputedChain(bytes(chain(1, STEPS)), None))]
    with pytest.raises(ServerEndsError):
        await work.run([2])
    assert [call["nonces"] for call in work.client.decode_calls[STEPS + 1 :]] == [], "no other batch begins"


async def test_a_server_that_ends_drops_a_batch_at_once_that_takes_too_long() -> None:
    work, running = await at_its_end(within=(STEPS - 4) * BUDGET)
    with pytest.raises(ServerEndsError):
        await work.clock.passes(running)
    assert len(work.client.decode_calls) == 3, "the one that was under way is answered"


async def test_a_batch_that_chat_holds_up_for_too_long_is_dropped_before_the_time_is_over() -> None:
    work, running = await at_its_end(within=(STEPS + 1) * BUDGET + 0.1)
    work.client.output_processor.busy = True
    with pytest.raises(ServerEndsError):
        await work.clock.passes(running)
    assert work.clock.now() < 10 * BUDGET


@pytest.mark.parametrize("wrong", [{"indices": []}, {"indices": [[16] * (STEPS + 1)]}, {"margins": [[0.5]]}], ids=str)
async def test_an_answer_that_is_not_the_chains_is_an_error(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:  # noqa: ANN401
    work, told = Work(), FakeEngineClient._decode

    def answer(client: FakeEngineClient, request: DecodeRequest) -> DecodeResult:
        found = told(client, request)
        return {**found, **wrong} if found["complete"] else found

    monkeypatch.setattr(FakeEngineClient, "_decode", answer)
    with pytest.raises(EngineError, match=r"the workers (did not answer 1 chains of 21 steps|answered no chain)"):
        await work.run([1])


@pytest.mark.parametrize("work_of", ["prefill", "step", "graph"])
async def test_forward_passes_are_cut_into_parts_that_take_half_of_the_budget(work_of: ChainWork) -> None:
    work = Work()
    work.client.seconds_per_batch, work.client.chain_work, work.client.cut = 0.07, work_of, 4
    await work.run([1])
    first, *others = work.client.decode_calls
    assert first["cuts"] == {"prefill": 8, "step": 8, "graph": 1}, "chat waits for the very first ones, too"
    assert all(call["cuts"] == {**first["cuts"], work_of: 12} and call["parts"] == 1 for call in others)
    await work.run([2])
    assert work.client.decode_calls[-1]["cuts"] == others[0]["cuts"], "the next batch begins with what is known"
    await work.run([3, 4])
    assert work.client.decode_calls[-21]["cuts"] == first["cuts"], "batches of another size take another time"


class Worker(NamedTuple):
    """Times of a worker, in seconds: of passes, of a call, and of a capture. Kernels are compiled in the first pass."""

    prefill: float
    eager: float
    step: float
    capture: float
    compiles: float = 20.0
    call: float = 0.002
    layers: int = 60

    def batch(self, pace: Pace, *, first: bool) -> tuple[list[tuple[ChainWork, float]], int]:
        """Compute 4 prefills and 200 steps as the workers do; return the calls, and how often a step was captured."""
        calls, captures, graphs = list[tuple[ChainWork, float]](), 0, 0 if first else pace.cuts["graph"]
        todo: list[ChainWork] = [*repeat(PREFILL, 4), *repeat(STEP, int(first)), *repeat(GRAPH, 200 - first)]
        parts, cut, done = 1, 0, 0
        while todo:
            work, seconds, did, captured = todo[0], self.call, 0, False
            while todo and todo[0] == work and did < parts and not captured:
                if done == 0:
                    cut = min(pace.cuts[work], self.layers)
                    captured = work == "graph" and cut != graphs
                whole = {"prefill": self.prefill, "step": self.eager, "graph": self.step}[work]
                seconds += whole / cut + self.compiles * (first and not calls)
                did, done = did + 1, done + 1
                if done == cut:
                    del todo[0]
                    done, captured = 0, captured or (work == "step")
                if captured:
                    seconds, captures, graphs = seconds + self.capture, captures + 1, pace.cuts["graph"]
            calls.append((work, seconds))
            result: Any = {"work": work, "parts": did, "cut": cut, "captures": captured, "next": (todo or [work])[0]}
            parts = pace.next_parts(result, seconds)
        return calls, captures


@pytest.mark.parametrize("prefill", [0.005, 0.1, 0.8])
@pytest.mark.parametrize("eager", [0.03, 0.15])
@pytest.mark.parametrize("step", [0.002, 0.01, 0.02, 0.05, 0.08])
@pytest.mark.parametrize("capture", [0.1, 0.3, 1.0])
def test_calls_soon_take_half_of_the_budget_and_a_step_is_captured_seldom(
    prefill: float, eager: float, step: float, capture: float
) -> None:
    pace, worker = Pace(BUDGET / 2), Worker(prefill, eager, step, capture)
    _, captures = worker.batch(pace, first=True)
    assert captures <= 3
    assert pace.cuts["step"] <= 16, "the time of the capture counts"
    worker.batch(pace, first=False)
    calls, captures = worker.batch(pace, first=False)
    assert captures == 0
    assert max(seconds for _, seconds in calls) <= 1.5 * BUDGET / 2
    assert sum(seconds for _, seconds in calls) <= 1.3 * (4 * prefill + 200 * step) + 0.1, "calls are too short"


@pytest.mark.parametrize(
    ("cut", "seconds", "expected"),
    [
        (1, 0.025, 1),
        (1, 0.029, 1),
        (1, 0.031, 2),
        (1, 0.1, 4),
        (2, 0.1, 8),
        (8, 0.025, 8),
        (8, 0.012, 8),
        (8, 0.01, 4),
        (8, 0.001, 1),
        (8, 0.0, 1),
        (2, 0.011, 2),
        (4, 30.0, 64),
        (64, 0.001, 4),
    ],
)
def test_cuts_follow_the_time_that_parts_take(cut: int, seconds: float, expected: int) -> None:
    assert next_cut(cut, seconds, BUDGET / 2) == expected


@pytest.mark.parametrize(
    ("parts", "seconds", "expected"),
    [(1, 0.2, 1), (4, 0.05, 4), (4, 0.1, 2), (4, 0.02, 8), (4, 0.03, 6), (4, 0.0, 8)],
)
def test_parts_follow_the_time_that_they_take(parts: int, seconds: float, expected: int) -> None:
    assert next_parts(parts, seconds, BUDGET) == expected
