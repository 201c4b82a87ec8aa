# SPDX-License-Identifier: Apache-2.0
"""Chains of the decode scheme as PoC work: with the same turns, the same chat gate and the same slices as all other.

A batch of chains is one slice of a round or a request. It takes many calls, each of some forward passes, or of parts of
one. Chat runs between them, and so does PoC work of other protocols. The workers keep what a chain needs to go on. They
keep one batch, so batches come one after the other.

A slice that finds no memory is computed in batches of half the size, and so is what follows it. A server that ends
computes the batch that is under way to its end if that comes soon enough, and drops it at once if not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil, inf
from typing import NamedTuple

from vllm_poc.logs import get_logger
from vllm_poc.rpc import ChainWork, DecodeRequest, DecodeResult
from vllm_poc.server.autotune import GaveWayError, SliceSize
from vllm_poc.server.engine import EngineError, NoMemoryError, VllmEngine
from vllm_poc.server.gate import Busy, Turn, nobody
from vllm_poc.server.scheduler import (
    ComputedChain,
    Computer,
    Item,
    Scheduler,
    SliceResult,
    keeps_on,
)
from vllm_poc.settings import Settings
from vllm_poc.wire.artifacts import chain_bytes
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import Protocol, RoundRequest
from vllm_poc.wire.stat_test import compare_chain

_log = get_logger(__name__)

#: A call takes up to this share of the time budget: a chat that comes meanwhile waits for it, and then for its own
#: prefill. Of other work two slices share the budget.
_SHARE = 0.5
#: Into how many parts forward passes are cut before any was timed, and into how many at most.
_FIRST_CUTS: dict[ChainWork, int] = {"prefill": 8, "step": 8, "graph": 1}
_MOST_PARTS = 64
#: Sizes of batches of which the cuts are remembered.
_SIZES = 16
#: Parts may take so many times as long as they should before there are more of them: a step is captured anew for that.
_TOLERATED = 1.2

#: Claimed indices, by nonce.
Claims = Mapping[int, Sequence[int]]


class ChainBatch:
    """The size of a slice: as many chains as fit into memory, since they take each step together."""

    ahead = 0

    def __init__(self, nonces: int, weights: int) -> None:
        self.nonces = nonces
        self.weights = weights

    def batch(self, nonces: int) -> int:
        """Return all of them."""
        return nonces

    def learn(self, nonces: int, seconds: float) -> None:
        """Adapt to nothing: calls follow the time budget, and not batches."""

    def halve(self, nonces: int, error: NoMemoryError) -> None:
        """Adapt to a batch of so many that found no memory. Raises the error if it was a single one."""
        if nonces == 1:
            raise error
        self.nonces = nonces // 2
        _log.warning("%d chains find no memory, so that batches have %d from now on: %s", nonces, self.nonces, error)


class Pace:
    """How much a call does for batches of one size, so that it takes up to ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: Into how many parts a forward pass is cut, by kind.
        self.cuts = _FIRST_CUTS.copy()

    def next_parts(self, result: DecodeResult, seconds: float) -> int:
        """Return how many parts the next call does, when the last took so many seconds, and adapt the cuts."""
        if result["captures"]:
            return 1  # capturing is part of these seconds
        work = result["work"]
        self.cuts[work] = next_cut(result["cut"], seconds / result["parts"], self._seconds)
        if result["next"] != work or self.cuts[work] != result["cut"]:
            return 1
        return next_parts(result["parts"], seconds, self._seconds)


class ChainScheduler:
    """Runs batches of chains on the engine, in the calls of a `Scheduler`."""

    def __init__(self, scheduler: Scheduler, engine: VllmEngine, settings: Settings) -> None:
        #: Whether chains are of a codebook that is not the network's.
        self.rebuilt = settings.decode_rebuild_codebook
        self._scheduler = scheduler
        self._engine = engine
        self._call_seconds = _SHARE * settings.slice_seconds
        self._paces = OrderedDict[int, Pace]()
        self._turn = Turn()  # of the batch that the workers keep

    async def autotune(
        self, request: RoundRequest, nonces: int | None = None, gives_way: Callable[[], bool] = keeps_on
    ) -> None:
        """Let the workers set memory aside, if they have not. EngineError as from the engine, or if they refuse."""
        facts = await self._scheduler.model.facts()
        if "decode" not in facts or facts["decode"]["refusal"] is not None:
            # It was offered when the work was admitted.
            reason = facts["decode"]["refusal"] if "decode" in facts else facts["refusal"]
            raise EngineError(f"the decode scheme does not run here any more: {reason}")

    async def first_size(self, request: RoundRequest, limit: int) -> SliceSize | None:
        """Return None: batches are of one size from the first on."""
        return None

    def slice_size(self, request: RoundRequest, limit: int) -> SliceSize:
        """Return the size for batches of ``limit`` chains."""
        return ChainBatch(limit, self._scheduler.weights)

    def is_current(self, request: RoundRequest, size: SliceSize) -> bool:
        """Whether the weights are the same."""
        return size.weights == self._scheduler.weights

    async def run(
        self,
        request: RoundRequest,
        nonces: Sequence[int],
        size: SliceSize,
        ahead: Iterable[list[int]] = (),
        *,
        busy: Busy | None = None,
        gives_way: Callable[[], bool] = keeps_on,
    ) -> SliceResult:
        """Compute a batch of chains; those with a step that is not finite get no second try, since it costs a batch.

        Each step goes on from the claim of the step before, where the request has claims. Errors as of `Scheduler.run`,
        and GaveWayError before a call to the workers if the batch ``gives_way``.
        """
        assert isinstance(size, ChainBatch)  # noqa: S101 - of `slice_size`
        attempt = partial(self._attempted, self._message(request, nonces[:1], {}))
        found: dict[int, ComputedChain] = {}
        left = list(nonces)
        with self._scheduler.shortage.noticed(attempt):
            while left:
                batch = left[: size.nonces]
                try:
                    found |= await self._compute(request, batch, size.weights, busy, gives_way)
                except NoMemoryError as error:
                    size.halve(len(batch), error)
                else:
                    del left[: len(batch)]
        items: list[Item] = [(nonce, found[nonce]) for nonce in nonces if nonce in found]
        return SliceResult(items, rejected=len(nonces) - len(items))

    async def _compute(
        self,
        request: RoundRequest,
        nonces: Sequence[int],
        weights: int,
        busy: Busy | None,
        gives_way: Callable[[], bool],
    ) -> dict[int, ComputedChain]:
        """Return the chains whose steps are all finite."""
        message = self._message(request, nonces, request.claims if isinstance(request, GenerateRequest) else {})
        # Each call of the batch before, which may take minutes, is progress for whoever waits.
        async with self._turn.taken(busy.progress if busy is not None else nobody):
            await self.autotune(request)
            result = await self._completed(message, weights, busy, gives_way)
        self._scheduler.model.note(result.get("findings", []))
        return _chains(message, result)

    async def _completed(
        self,
        message: DecodeRequest,
        weights: int,
        busy: Busy | None = None,
        gives_way: Callable[[], bool] = keeps_on,
    ) -> DecodeResult:
        needed, pace = inf, self._pace(len(message["nonces"]))  # seconds, as far as is known
        while True:
            async with self._scheduler.turn:
                if gives_way():
                    raise GaveWayError
                call = partial(self._engine.decode, message)
                result, seconds = await self._scheduler.step(call, busy, weights, needed=needed)
            self._turn.progress()
            if result["complete"]:
                return result
            needed = result["left"] * seconds / result["parts"]
            message = {**message, "parts": pace.next_parts(result, seconds), "cuts": pace.cuts.copy()}

    def _pace(self, nonces: int) -> Pace:
        """Return what is known of batches of so many chains."""
        pace = self._paces.pop(nonces, None) or Pace(self._call_seconds)
        self._paces[nonces] = pace
        if len(self._paces) > _SIZES:
            self._paces.popitem(last=False)
        return pace

    def _message(self, request: RoundRequest, nonces: Sequence[int], claims: Claims) -> DecodeRequest:
        """Return the message for a batch; its first call is a single part."""
        return DecodeRequest(
            block_hash=request.block_hash,
            public_key=request.public_key,
            nonces=list(nonces),
            seq_len=request.effective_seq_len,
            max_tokens=request.max_tokens,
            forced=[list(claims[nonce]) for nonce in nonces] if claims else [],
            parts=1,
            cuts=self._pace(len(nonces)).cuts.copy(),
        )

    async def _attempted(self, message: DecodeRequest) -> None:
        async with self._turn:
            await self._completed(message, self._scheduler.weights)


class Computers(NamedTuple):
    """Who computes work: vectors and distances are the scheduler's own."""

    scheduler: Scheduler
    chains: ChainScheduler

    def of(self, request: RoundRequest) -> Computer:
        """Return who computes the request's work."""
        return self.chains if request.protocol is Protocol.DECODE else self.scheduler

    def rebuilt(self, request: RoundRequest) -> bool:
        """Whether results of the request depend on a codebook that is not the network's."""
        return request.protocol is Protocol.DECODE and self.chains.rebuilt


def next_parts(parts: int, seconds: float, budget: float) -> int:
    """Return how many parts fit into a call of ``budget`` seconds, when so many took ``seconds``.

    At most twice as many, since the next ones may be longer.
    """
    fitting = int(parts * budget / seconds) if seconds > 0 else 2 * parts
    return max(1, min(2 * parts, fitting))


def next_cut(cut: int, seconds: float, budget: float) -> int:
    """Return into how many parts to cut a forward pass, when each of ``cut`` took so many seconds.

    Fewer only if half as many would do.
    """
    late = seconds > _TOLERATED * budget
    wanted = max(1, min(ceil(cut * seconds / budget * (1 if late else _TOLERATED)), _MOST_PARTS))
    return wanted if late or 2 * wanted <= cut else cut


def _chains(message: DecodeRequest, result: DecodeResult) -> dict[int, ComputedChain]:
    """Return the chains whose steps are all finite. EngineError if the answer is not one chain for each nonce."""
    nonces, steps = message["nonces"], message["max_tokens"] + 1
    claims = message["forced"] or [[] for _ in nonces]
    margins = result["margins"] or [[] for _ in nonces]
    wanted = [min(len(claim), steps) for claim in claims]
    if [len(chain) for chain in result["indices"]] != [steps] * len(nonces) or [*map(len, margins)] != wanted:
        raise EngineError(f"the workers did not answer {len(nonces)} chains of {steps} steps")
    rows = zip(nonces, result["indices"], margins, claims, strict=True)
    return {nonce: _chain(indices, row, claim) for nonce, indices, row, claim in rows if min(indices) >= 0}


def _chain(indices: Sequence[int], margins: Sequence[float], claim: Sequence[int]) -> ComputedChain:
    try:
        leaf = chain_bytes(indices, len(indices) - 1)
    except ValueError as error:
        raise EngineError(f"the workers answered no chain: {error}") from error
    return ComputedChain(leaf, compare_chain(indices, margins, claim) if claim else None)
