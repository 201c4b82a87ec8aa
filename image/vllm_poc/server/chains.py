# SPDX-License-Identifier: Apache-2.0
"""Chains of the decode scheme as PoC work: with the same turns, the same chat gate and the same slices as all other.

A batch of chains takes as many slices as it needs, each of some forward passes. Chat runs between them, and other PoC
work when the batch is done. The workers keep what a chain needs for its next step.

No route orders chains yet: `vllm_poc.server.admission` refuses the scheme. `ChainScheduler.facts` says whether the
workers can compute it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vllm_poc.rpc import DecodeFacts, DecodeRequest, DecodeResult, DecodeSetup, chain_nonces
from vllm_poc.server.engine import EngineError, VllmEngine, WeightsChangedError
from vllm_poc.server.gate import BusyShare
from vllm_poc.server.scheduler import Scheduler

#: Claimed indices, by nonce.
Claims = Mapping[int, Sequence[int]]


class ChainSpec(NamedTuple):
    """What all chains of a round have in common: ``seq_len`` tokens of prefill, and ``max_tokens`` steps."""

    block_hash: str
    public_key: str
    seq_len: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        """How many tokens a chain's keys and values are kept of."""
        return self.seq_len + self.max_tokens


class ChainResult(NamedTuple):
    """``indices`` has max_tokens + 1 own indices, -1 where a step was not finite; ``margins`` one for each claim."""

    nonce: int
    indices: list[int]
    margins: list[float]


class DecodeRefusedError(Exception):
    """One sentence: why this server does not compute the decode scheme, or not this batch of it."""


class ChainScheduler:
    """Runs chains on the engine. ``slice_seconds`` is how long a slice aims to be."""

    def __init__(self, scheduler: Scheduler, engine: VllmEngine, setup: DecodeSetup, slice_seconds: float) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._setup = setup
        self._slice_seconds = slice_seconds
        self._facts: DecodeFacts | None = None
        self._facts_of = -1  # weights

    async def facts(self) -> DecodeFacts:
        """Say whether this server can compute chains, and how many at a time; found once for the model's weights.

        The first call sets memory aside on the workers. EngineError as from the engine.
        """
        while self._facts is None or self._facts_of != self._scheduler.weights:
            async with self._scheduler.turn:
                weights = self._scheduler.weights
                if self._facts is None or self._facts_of != weights:  # nobody found them meanwhile
                    try:
                        self._facts, _ = await self._scheduler.step(
                            partial(self._engine.prepare_decode, self._setup), None, weights
                        )
                    except WeightsChangedError:
                        continue
                    self._facts_of = weights
        return self._facts

    async def most_nonces(self, spec: ChainSpec) -> int:
        """Return how many chains can be computed at a time, at least one.

        DecodeRefusedError if there is no room for a single one, or the server does not compute the scheme at all.
        EngineError as from the engine.
        """
        facts = await self.facts()
        if facts["refusal"] is not None:
            raise DecodeRefusedError(facts["refusal"])
        most = chain_nonces(facts, spec.tokens)
        if not most:
            raise DecodeRefusedError(
                f"A chain of {spec.tokens} tokens does not fit into the {facts['reserve_bytes']} bytes that are set "
                "aside for keys and values: set more aside."
            )
        return most

    async def run(
        self, spec: ChainSpec, nonces: Sequence[int], claims: Claims | None = None, *, busy: BusyShare | None = None
    ) -> list[ChainResult]:
        """Compute a batch of chains, in the order of ``nonces``, which are at most `most_nonces`.

        With ``claims``, each step goes on from the claim of the step before. ``busy`` is told of the time on the
        workers. Errors as from `most_nonces`; WeightsChangedError if the model gets other weights meanwhile;
        ServerEndsError once the gate is closed.
        """
        most = await self.most_nonces(spec)
        if not 1 <= len(nonces) <= most:
            raise DecodeRefusedError(f"A batch holds 1..{most} chains of {spec.tokens} tokens, not {len(nonces)}.")
        forced = [list(claims.get(nonce, ())) for nonce in nonces] if claims is not None else []
        request = _request(spec, nonces, forced)
        result = await self._computed(request, self._facts_of, busy)
        return _chains(request, result)

    async def _computed(self, request: DecodeRequest, weights: int, busy: BusyShare | None) -> DecodeResult:
        # Other work in between would do no harm to chains, but they would hold their memory for longer.
        async with self._scheduler.turn:
            while True:
                result, seconds = await self._scheduler.step(partial(self._engine.decode, request), busy, weights)
                if result["complete"]:
                    return result
                request = {**request, "passes": next_passes(request["passes"], seconds, self._slice_seconds)}


def next_passes(passes: int, seconds: float, budget: float) -> int:
    """Return how many forward passes fit into a slice of ``budget`` seconds, when ``passes`` took so many seconds.

    At most twice as many, since the next ones may be longer.
    """
    fitting = int(passes * budget / seconds) if seconds > 0 else 2 * passes
    return max(1, min(2 * passes, fitting))


def _request(spec: ChainSpec, nonces: Sequence[int], forced: list[list[int]]) -> DecodeRequest:
    """Return the message for a batch; its first slice is a single forward pass."""
    return DecodeRequest(
        block_hash=spec.block_hash,
        public_key=spec.public_key,
        nonces=list(nonces),
        seq_len=spec.seq_len,
        max_tokens=spec.max_tokens,
        forced=forced,
        passes=1,
    )


def _chains(request: DecodeRequest, result: DecodeResult) -> list[ChainResult]:
    """Return the chains of the request. EngineError if some of them, or of their steps, are missing."""
    nonces, steps = request["nonces"], request["max_tokens"] + 1
    margins = result["margins"] or [[] for _ in nonces]
    wanted = [min(len(claim), steps) for claim in request["forced"]] or [0] * len(nonces)
    if [len(chain) for chain in result["indices"]] != [steps] * len(nonces) or [*map(len, margins)] != wanted:
        raise EngineError(f"the workers did not answer {len(nonces)} chains of {steps} steps")
    return [ChainResult(*chain) for chain in zip(nonces, result["indices"], margins, strict=True)]
