# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's engine client: it answers the workers' calls by a formula."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

from vllm_poc.rpc import (
    BatchRequest,
    BatchResult,
    ChainWork,
    DecodeFacts,
    DecodeRequest,
    DecodeResult,
    DecodeSetup,
    Failure,
    ModelFacts,
    PassFields,
    PassTiming,
)
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.wire.artifacts import CODEBOOK_POINTS, encode_vector
from vllm_poc.wire.stat_test import OUT_OF_RANGE_MARGIN

FACTS = ModelFacts(
    hidden_size=64,
    num_layers=2,
    max_model_len=1024,
    max_batch_tokens=2048,
    max_batch_nonces=16,
    max_captured_tokens=1024,
    max_captured_nonces=1024,
    scratch_bytes=4096,
    fused=False,
    stages=1,
    attention=["FakeAttention"],
    experts=[],
    dtype="float32",
    kv_cache_dtype="auto",
    quantization="",
    flags=["--enforce-eager"],
    findings=["PoC computes by a formula."],
    refusal=None,
)
#: Of a server that is set up for the decode scheme.
DECODE_FACTS = DecodeFacts(
    refusal=None,
    rebuilt=False,
    reserve_bytes=100_000,
    block_tokens=[64],
    block_bytes=[1_000],
    kept_blocks=[0],
    max_batch_nonces=16,
)

#: What workers find whose kernels took too long to compile.
LATE = "PoC computes slower, since a batch of 4 x 64 tokens was not compared within 60 s; it is tried again."
#: What workers answer whose device has no room.
NO_ROOM = (
    "MemoryError: the GPU has no room for the forward pass of one nonce: "
    "start vLLM with a lower --gpu-memory-utilization"
)


def distance(nonce: int) -> float:
    """The distance that the fake gives a nonce, in 1.39..1.43."""
    return 1.39 + (nonce * 37 % 100) / 2500


def vector(nonce: int, k_dim: int) -> str:
    """The artifact that the fake gives a nonce."""
    return encode_vector([(nonce + j) % 100 / 100 for j in range(k_dim)])


def chain(nonce: int, max_tokens: int, claim: Sequence[int] = ()) -> list[int]:
    """The chain that the fake gives a nonce. Each step goes on from the claim of the step before, if there is one."""
    points: list[int] = []
    previous = 0
    for step in range(max_tokens + 1):
        points.append((5 * previous + 7 * nonce + 3 * step) % CODEBOOK_POINTS)
        previous = claim[step] if step < len(claim) else points[step]
    return points


def margins(points: Sequence[int], claim: Sequence[int]) -> list[float]:
    """The margins that the fake gives claims: a hundredth for each index that they are away."""
    return [
        abs(own - claimed) / 100 if 0 <= claimed < CODEBOOK_POINTS else OUT_OF_RANGE_MARGIN
        for own, claimed in zip(points, claim, strict=False)
    ]


class FakeOutputProcessor:
    """Knows whether chat runs."""

    def __init__(self) -> None:
        self.busy = False

    def has_unfinished_requests(self) -> bool:
        """Whether chat runs."""
        return self.busy


class FakeEngineClient:
    """Answers like a tensor-parallel pair of workers, the second of which speaks. Faults are attributes.

    Calls take their seconds by the ``clock``. As with vLLM's engine they go one after the other, and each goes on to
    its end whether or not its caller still waits.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.output_processor = FakeOutputProcessor()
        self.facts = FACTS.copy()
        self.decode_facts = DECODE_FACTS.copy()
        self.setups: list[DecodeSetup] = []
        self.setup_fault: Exception | None = None
        self.decode_calls: list[DecodeRequest] = []
        self._passes = 0  # done of the last request for chains
        self.chain_findings: list[str] = []
        #: Of what its chains are, and into how many parts it says that their passes are cut.
        self.chain_work: ChainWork = "step"
        self.cut = 1
        self.most_chains = 10**6  # for which there is room in the device's memory
        self.batches: list[BatchRequest] = []
        self.answered: list[BatchRequest] = []
        self.decoded: list[DecodeRequest] = []  # and answered
        self.computed: list[int] = []  # every nonce answered so far
        self.warmed_up: list[int] = []
        self.kept: list[list[PassFields]] = []
        self.segments = 1  # of a forward pass that was warmed up: calls for one request
        self.seconds_per_batch = 0.001
        self.fault: Exception | None = None
        self.worker_error: str | None = None
        self.has_room = True  # in the device's memory
        self.sick: Counter[int] = Counter()  # nonce: how often it comes out not finite
        self.calls: list[str] = []
        self.forgotten = 0
        self.rest_fails = False
        self.forget_fault: Exception | None = None
        self.described = 0
        self.seconds_to_describe = 0.0
        self.seconds_to_look = 0.0  # that the server lets the workers have
        self.has_room_to_look = True
        self.looks_with_room = inf  # later ones find none
        self.late_looks = 0  # so many end before the faster pass is compared
        self.seconds_to_warm_up = 0.0
        self.in_flight = 0  # calls that have no answer so far, whoever waits for them
        self._turn = asyncio.Lock()
        self.asleep = False
        self.drift = 0  # a GPU that computes wrongly: each nonce gets the values of another one

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
        """Answer one call. TimeoutError when the engine has waited so many seconds for its workers."""
        assert timeout > 0
        self.calls.append(method)
        self.in_flight += 1
        answering = asyncio.create_task(self._in_turn(method, args, timeout))
        answering.add_done_callback(self._answered)
        return await asyncio.shield(answering)

    async def _in_turn(self, method: str, args: tuple[Any, ...], seconds: float) -> list[Any]:
        async with self._turn, asyncio.timeout(seconds):
            return await self._answer(method, args)

    def _answered(self, answering: asyncio.Task[list[Any]]) -> None:
        self.in_flight -= 1
        if not answering.cancelled():
            answering.exception()  # which nobody looks at whose caller is gone

    async def _answer(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "poc_describe":
            self.described += 1
            (self.seconds_to_look,) = args
            await self._spend(self.seconds_to_describe)
            return [self._seen()] * 2 if self._finds_room else [Failure(error=NO_ROOM)] * 2
        if method in {"poc_rest", "poc_forget"}:
            return [self._obeyed(method)] * 2
        if method in {"poc_warm_up", "poc_prepare_decode"}:
            return [await self._prepare(method, args)] * 2
        assert method in {"poc_compute", "poc_decode"}
        await self._spend(self.seconds_per_batch)
        if self._lacks_memory(method, args[0]):
            return [Failure(error=NO_ROOM)] * 2
        if self.worker_error is not None:
            return [Failure(error=self.worker_error), Failure(error="OtherRankError: another rank failed")]
        return [None, self._compute(args[0]) if method == "poc_compute" else self._decode(args[0])]

    @property
    def _finds_room(self) -> bool:
        return self.has_room_to_look and self.described <= self.looks_with_room

    def _seen(self) -> ModelFacts:
        if self.described > self.late_looks:
            return self.facts
        return {**self.facts, "fused": False, "slower": LATE, "passes": True, "late": True}

    def _obeyed(self, method: str) -> dict[str, bool] | Failure:
        if method == "poc_rest":
            return Failure(error="RuntimeError: CUDA error") if self.rest_fails else {"rests": True}
        if self.forget_fault is not None:
            raise self.forget_fault
        self.forgotten += 1
        return {"forgotten": True}

    def _lacks_memory(self, method: str, request: BatchRequest | DecodeRequest) -> bool:
        return not self.has_room or (method == "poc_decode" and len(request["nonces"]) > self.most_chains)

    async def is_sleeping(self) -> bool:
        """Whether the test let the engine sleep."""
        return self.asleep

    async def _prepare(self, method: str, args: tuple[Any, ...]) -> Any:  # noqa: ANN401 - of either method
        if method == "poc_warm_up":
            found = self._warm_up(args[0], args[2])
            await self._clock.sleep(self.seconds_to_warm_up)
            return found
        if self.setup_fault is not None:
            raise self.setup_fault
        return self._prepare_decode(args[0])

    def _warm_up(self, batch: BatchRequest, keep: list[PassFields]) -> PassTiming | Failure:
        self.warmed_up.append(len(batch["nonces"]))
        self.kept.append(keep)
        if self.worker_error is not None:
            return Failure(error=self.worker_error)
        return PassTiming(seconds=0.001 if self.has_room else None, segments=self.segments)

    def _prepare_decode(self, setup: DecodeSetup) -> DecodeFacts | Failure:
        self.setups.append(setup)
        return self.decode_facts if self.has_room else Failure(error=NO_ROOM)

    async def _spend(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        if self.fault is not None:
            raise self.fault

    def _compute(self, batch: BatchRequest) -> BatchResult:
        self.batches.append(batch.copy())
        if len(self.batches) % self.segments:
            return BatchResult(complete=False, nonces=[], not_finite=[])
        self.answered.append(self.batches[-1])
        self.computed += batch["nonces"]
        not_finite = [nonce for nonce in batch["nonces"] if self.sick[nonce] > 0]
        self.sick.subtract(not_finite)
        nonces = [nonce for nonce in batch["nonces"] if nonce not in not_finite]
        result = BatchResult(complete=True, nonces=nonces, not_finite=not_finite)
        if batch["protocol"] == "distance":
            result["distances"] = [distance(nonce + self.drift) for nonce in nonces]
        else:
            result["vectors"] = [vector(nonce + self.drift, batch["k_dim"]) for nonce in nonces]
        return result

    def _decode(self, request: DecodeRequest) -> DecodeResult:
        how = {"parts": 0, "cuts": {}}
        goes_on = self.decode_calls and {**self.decode_calls[-1], **how} == {**request, **how}
        self.decode_calls.append(request.copy())
        rebuilt, nonces, steps = self.decode_facts["rebuilt"], request["nonces"], request["max_tokens"]
        before = self._passes if goes_on else 0
        self._passes = min(before + request["parts"], steps + 1)  # one for the prefill
        result = DecodeResult(
            complete=False,
            left=steps + 1 - self._passes,
            work=self.chain_work,
            parts=self._passes - before,
            cut=self.cut,
            captures=False,
            next=self.chain_work,
            indices=[],
            margins=[],
            rebuilt=rebuilt,
            findings=[],
        )
        if result["left"]:
            return result
        self._passes = 0
        self.decoded.append(request)
        self.computed += nonces
        claims = request["forced"] or [[] for _ in nonces]
        found = [chain(nonce + self.drift, steps, claim) for nonce, claim in zip(nonces, claims, strict=True)]
        for nonce, points in zip(nonces, found, strict=True):
            if self.sick[nonce] > 0:
                self.sick[nonce] -= 1
                points[-1] = -1
        compared = [margins(*row) for row in zip(found, claims, strict=True)] if request["forced"] else []
        result["complete"], result["indices"], result["margins"] = True, found, compared
        result["findings"] = self.chain_findings
        return result
