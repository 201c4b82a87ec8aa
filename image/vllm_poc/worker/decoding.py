# SPDX-License-Identifier: Apache-2.0
"""The decode scheme on the served model: a prefill of all nonces of a batch, then steps of one token each.

    begun -> prefill, some nonces at a time -> step 1 -> ... -> step max_tokens -> answered

All nonces take each step together. Between any two forward passes the worker may do other things, chat above all: what
chains need for their next step is in memory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths import decode
from vllm_poc.maths.decode import Codebook, open_codebook
from vllm_poc.maths.sampling import fill_inputs, input_seeds, layer_vectors
from vllm_poc.rpc import DecodeFacts, DecodeRequest, DecodeResult, DecodeSetup, ModelFacts, chain_nonces
from vllm_poc.worker.model.adapter import ModelAdapter, StageInputs
from vllm_poc.worker.model.capabilities import decode_refusal
from vllm_poc.worker.model.chain_cache import ChainCache, ChainReserve
from vllm_poc.worker.model.scratch import BatchShape, Placement, UnsupportedModelError
from vllm_poc.worker.passes.plain import Router, find_routers, reflected_layers, seeded_routers

#: Nonces, tokens and steps of the chains that are computed once before any others.
_TRIED_NONCES, _TRIED_TOKENS, _TRIED_STEPS = 2, 3, 2


class Decoder:
    """Computes chains on the served model by vLLM's own forward pass. UnsupportedModelError if it cannot.

    The first chains are computed here, to see whether chat's caches stay as they are.
    """

    def __init__(self, adapter: ModelAdapter, limits: ModelFacts, setup: DecodeSetup) -> None:
        reason = decode_refusal(adapter, limits, setup)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self._adapter = adapter
        self._limits = limits
        self._model = _model(adapter, limits["hidden_size"], setup)
        self._reserve = ChainReserve(adapter.groups, setup["reserve_bytes"], adapter.device)
        self._chains: Chains | None = None
        self._require_harmless()

    @property
    def facts(self) -> DecodeFacts:
        """What can be computed at a time."""
        return DecodeFacts(
            refusal=None,
            rebuilt=self._model.codebook.rebuilt,
            reserve_bytes=self._reserve.nbytes,
            block_tokens=self._reserve.block_tokens,
            block_bytes=self._reserve.block_bytes,
            max_batch_nonces=self._limits["max_batch_nonces"],
        )

    def run(self, request: DecodeRequest) -> DecodeResult:
        """Do the next forward passes of these chains. ValueError if the request exceeds the limits."""
        chains, self._chains = self._chains, None  # after a failure nothing is continued
        with torch.inference_mode():
            if chains is None or not chains.continues_with(request):
                chains = self._begun(request)
            for _ in range(request["passes"]):
                if not chains.done:
                    chains.advance()
            if self._adapter.device.type == "cuda":
                torch.cuda.synchronize(self._adapter.device)  # a slice ends when its work does
            if chains.done:
                return chains.result()
        self._chains = chains
        return DecodeResult(complete=False, indices=[], margins=[], rebuilt=self._model.codebook.rebuilt)

    def _begun(self, request: DecodeRequest) -> Chains:
        check_request(request, self._limits)
        shape = BatchShape(len(request["nonces"]), request["seq_len"] + request["max_tokens"])
        together = max(1, self._limits["max_batch_tokens"] // request["seq_len"])
        return Chains(self._model, request, self._reserve.cache(shape), together)

    def _require_harmless(self) -> None:
        nonces = min(_TRIED_NONCES, self._limits["max_batch_nonces"])
        if chain_nonces(self.facts, _TRIED_TOKENS + _TRIED_STEPS) < nonces:
            raise UnsupportedModelError(
                f"The decode scheme has {self._reserve.nbytes} bytes for keys and values, which is too little: "
                "set more aside."
            )
        chat = self._adapter.chat_memory
        before = chat.held()
        tried = DecodeRequest(
            block_hash="",
            public_key="",
            nonces=list(range(nonces)),
            seq_len=_TRIED_TOKENS,
            max_tokens=_TRIED_STEPS,
            forced=[],
            passes=nonces + _TRIED_STEPS,
        )
        self.run(tried)
        changed = chat.changes(before, self._reserve.storages)
        if changed:
            raise UnsupportedModelError(
                f"The decode scheme changes what chat's attention holds here ({changed[0]}): "
                "restart vLLM with another --attention-backend."
            )


class _Model(NamedTuple):
    """What all chains share. ``points`` are the codebook's, on the device."""

    adapter: ModelAdapter
    hidden: int
    routers: list[Router]
    codebook: Codebook
    points: Tensor


class Chains:
    """Chains of some nonces, between their forward passes.

    ``together`` nonces are prefilled at a time. ``cache`` must be nobody else's until all is done.
    """

    def __init__(self, model: _Model, request: DecodeRequest, cache: ChainCache, together: int) -> None:
        self._model = model
        self._request = request
        self._cache = cache
        nonces, steps = request["nonces"], request["max_tokens"] + 1
        self._prefills = [range(first, min(first + together, len(nonces))) for first in range(0, len(nonces), together)]
        self._passes = 0
        self._bases, self._first_picks, self._routes = self._seeds()
        self._claims, self._claimed = self._forced(steps)
        self._points = torch.full((len(nonces), steps), decode.NO_POINT, device=model.adapter.device)
        self._margins = torch.zeros(len(nonces), steps, device=model.adapter.device)
        self._vectors = layer_vectors(
            block_hash=request["block_hash"],
            num_layers=len(model.adapter.layers),
            hidden=model.hidden,
            device=model.adapter.device,
        )

    @property
    def done(self) -> bool:
        """Whether all steps were taken."""
        return self._passes == len(self._prefills) + self._request["max_tokens"]

    def continues_with(self, request: DecodeRequest) -> bool:
        """Whether these are the chains of the request."""
        return {**request, "passes": 0} == {**self._request, "passes": 0}

    def advance(self) -> None:
        """Do one forward pass: the prefill of some nonces, or a step of all."""
        if self._passes < len(self._prefills):
            self._prefill(self._prefills[self._passes])
        else:
            self._step(self._passes - len(self._prefills) + 1)
        self._passes += 1

    def result(self) -> DecodeResult:
        """Return all indices, and the margins of the claims."""
        claims, margins = self._request["forced"], self._margins.tolist()
        steps = self._points.shape[1]
        return DecodeResult(
            complete=True,
            indices=self._points.tolist(),
            margins=[row[: min(len(claim), steps)] for row, claim in zip(margins, claims, strict=False)],
            rebuilt=self._model.codebook.rebuilt,
        )

    def _prefill(self, rows: range) -> None:
        request, (adapter, hidden) = self._request, self._model[:2]
        shape = BatchShape(len(rows), request["seq_len"])
        part = slice(rows.start, rows.stop)
        inputs = torch.empty(*shape, hidden, dtype=adapter.dtype, device=adapter.device)
        fill_inputs(inputs, self._bases[part, None])
        place = Placement(self._capacity, first=rows.start)
        last = self._forward(inputs, shape, place, self._starts(part, step=0)).view(*shape, -1)[:, -1]
        self._snap(0, part, last, decode.picks(self._first_picks[part], hidden=hidden))

    def _step(self, step: int) -> None:
        adapter, hidden = self._model[:2]
        nonces, everyone = len(self._points), slice(None)
        previous = torch.where(self._claimed, self._claims, self._points)[:, step - 1]
        inputs = torch.empty(nonces, 1, hidden, dtype=adapter.dtype, device=adapter.device)
        decode.fill_step_inputs(inputs[:, 0], self._bases, previous, step=step)
        place = Placement(self._capacity, before=self._request["seq_len"] + step - 1)
        last = self._forward(inputs, BatchShape(nonces, 1), place, self._starts(everyone, step))
        self._snap(step, everyone, last, decode.step_picks(self._bases, previous, step=step, hidden=hidden))

    def _forward(self, inputs: Tensor, shape: BatchShape, place: Placement, starts: Sequence[Tensor]) -> Tensor:
        """Return the final norm's output of all tokens."""
        adapter = self._model.adapter
        reflected = dict(zip(adapter.layers, self._vectors, strict=True))
        with self._cache.bound():  # before the plan, which may tell kernels where to write
            plan = adapter.plan(shape, place)
            with reflected_layers(reflected), seeded_routers(self._model.routers, starts, shape.seq_len):
                output = adapter.forward(StageInputs(inputs, None), {}, plan)
        assert isinstance(output, Tensor)  # noqa: S101 - there is a single stage
        return output

    def _snap(self, step: int, rows: slice, last: Tensor, picks: Tensor) -> None:
        points, scores = decode.snap(last, picks, self._model.points)
        self._points[rows, step] = points
        self._margins[rows, step] = decode.claimed_margins(scores, self._claims[rows, step])

    def _starts(self, rows: slice, step: int) -> list[Tensor]:
        """Return the first expert of each nonce, for each router."""
        steps = torch.full_like(self._bases[rows], step)
        return [
            decode.route_starts(seeds[rows], steps, experts=router.experts)
            for seeds, router in zip(self._routes, self._model.routers, strict=True)
        ]

    @property
    def _capacity(self) -> int:
        return self._request["seq_len"] + self._request["max_tokens"]

    def _seeds(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the seeds of inputs and of the first picks ``[nonces]``, and those of ``[routers, nonces]``."""
        block_hash, public_key = self._request["block_hash"], self._request["public_key"]
        nonces = self._request["nonces"]
        bases = [input_seeds(block_hash, public_key, nonce, strong_rng=False)[0] for nonce in nonces]
        picks = [decode.prefill_pick_seed(block_hash, public_key, nonce) for nonce in nonces]
        routes = [
            [decode.route_seed(block_hash, nonce, router) for nonce in nonces]
            for router in range(len(self._model.routers))
        ]
        device = self._model.adapter.device
        return (
            torch.tensor(bases, device=device),
            torch.tensor(picks, device=device),
            torch.tensor(routes, device=device),
        )

    def _forced(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return the claims int64 ``[nonces, steps]``, and where there is one."""
        claims = torch.zeros(len(self._request["nonces"]), steps, dtype=torch.int64)
        claimed = torch.zeros_like(claims, dtype=torch.bool)
        for row, chain in enumerate(self._request["forced"]):
            known = min(len(chain), steps)
            claims[row, :known] = torch.tensor(chain[:known], dtype=torch.int64)
            claimed[row, :known] = True
        device = self._model.adapter.device
        return claims.to(device), claimed.to(device)


def check_request(request: DecodeRequest, limits: ModelFacts) -> None:
    """Raise ValueError if chains are empty or too long, or claims are not one for each nonce."""
    nonces, most, seq_len = len(request["nonces"]), limits["max_batch_nonces"], request["seq_len"]
    tokens, longest = limits["max_batch_tokens"], limits["max_model_len"]
    if not 1 <= nonces <= most:
        raise ValueError(f"a batch holds 1..{most} nonces (--max-num-seqs), not {nonces}")
    if not 1 <= seq_len <= tokens:
        raise ValueError(f"seq_len {seq_len} must lie in 1..{tokens} (--max-num-batched-tokens)")
    if request["max_tokens"] < 1:
        raise ValueError(f"max_tokens {request['max_tokens']} must be 1 or more")
    if seq_len + request["max_tokens"] > longest:
        raise ValueError(
            f"seq_len {seq_len} and max_tokens {request['max_tokens']} must together be at most {longest} "
            "(--max-model-len)"
        )
    if len(request["forced"]) not in {0, nonces}:
        raise ValueError(f"forced has {len(request['forced'])} claims for {nonces} nonces: give one for each, or none")
    if request["passes"] < 1:
        raise ValueError(f"passes {request['passes']} must be 1 or more")


def _model(adapter: ModelAdapter, hidden: int, setup: DecodeSetup) -> _Model:
    path = Path(setup["codebook"]) if setup["codebook"] is not None else None
    try:
        codebook = open_codebook(path, rebuild=setup["rebuild"])
    except ValueError as error:
        raise UnsupportedModelError(f"The decode scheme cannot run here: {error}.") from error
    experts, top_k = adapter.experts, adapter.experts_per_token
    routers = find_routers(adapter.layers, experts, top_k)
    if bool(experts) != bool(routers) or (routers and not 1 <= top_k <= experts):
        raise UnsupportedModelError("The decode scheme does not find this model's routers: serve another model.")
    return _Model(adapter, hidden, routers, codebook, codebook.points.to(adapter.device))
