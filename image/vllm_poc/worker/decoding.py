# SPDX-License-Identifier: Apache-2.0
"""The decode scheme on the served model: a prefill of all nonces of a batch, then steps of one token each.

    begun -> prefill, some nonces at a time -> step 1 -> ... -> step max_tokens -> answered

All nonces take each step together. Between any two forward passes the worker may do other things, chat above all: what
chains need for their next step is in memory of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.logs import get_logger
from vllm_poc.maths import decode
from vllm_poc.maths.decode import Codebook, open_codebook
from vllm_poc.maths.sampling import fill_inputs, input_seeds, layer_vectors, token_ids, token_seed
from vllm_poc.rpc import DecodeFacts, DecodeRequest, DecodeResult, DecodeSetup, ModelFacts
from vllm_poc.worker.chain_trial import ONE_BY_ONE
from vllm_poc.worker.graphs import StepGraphs
from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter, StageInputs
from vllm_poc.worker.model.capabilities import decode_refusal
from vllm_poc.worker.model.chain_cache import ChainCache, ChainReserve, StepPlan, moves_in_place
from vllm_poc.worker.model.placement import ChainShape, Placement
from vllm_poc.worker.model.scratch import BatchShape, UnsupportedModelError
from vllm_poc.worker.passes.plain import Pass, SeededRouters, find_routers

_log = get_logger(__name__)

#: Sizes of batches whose captured steps are kept.
_MAX_SIZES = 4
#: Batches of a size in which steps are tried to be captured, until it succeeds.
_CAPTURE_TRIES = 3


class Decoder:
    """Computes chains on the served model by the given pass. UnsupportedModelError if it cannot.

    A server that is not ``proven`` is refused, except in tests and benchmarks. Before all other chains come those of
    `vllm_poc.worker.chain_trial`.
    """

    def __init__(
        self, adapter: ModelAdapter, limits: ModelFacts, setup: DecodeSetup, pass_: Pass, *, proven: bool = True
    ) -> None:
        reason = decode_refusal(adapter, limits, setup, proven=proven)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.adapter = adapter
        #: What was found out about this server before it computed chains, in sentences.
        self.findings: list[str] = []
        self._limits = limits
        self._model = _model(adapter, pass_, limits["hidden_size"], setup)
        self._reserve = ChainReserve(
            adapter.groups, setup["reserve_bytes"], adapter.device, max_tokens=limits["max_batch_tokens"]
        )
        self._graphs = self._step_graphs()
        self._sizes = OrderedDict[_Size, Chains]()
        self._chains: Chains | None = None

    @property
    def facts(self) -> DecodeFacts:
        """What can be computed at a time."""
        return DecodeFacts(
            refusal=None,
            rebuilt=self._model.codebook.rebuilt,
            reserve_bytes=self._reserve.chain_bytes,
            block_tokens=self._reserve.block_tokens,
            block_bytes=self._reserve.block_bytes,
            kept_blocks=self._reserve.kept_blocks,
            max_batch_nonces=self._limits["max_batch_nonces"],
            findings=self.findings,
        )

    @property
    def pass_(self) -> Pass:
        """How chains are computed."""
        return self._model.pass_

    @property
    def storages(self) -> set[int]:
        """Addresses of the memory that chains may change."""
        return self._reserve.storages

    @property
    def captures(self) -> bool:
        """Whether steps become CUDA graphs."""
        return self._graphs is not None

    def run(self, request: DecodeRequest) -> DecodeResult | None:
        """Do the next forward passes of these chains. ValueError if the request exceeds the limits.

        MemoryError, or PyTorch's, if a rank has no room for them. The result is None on every rank but one.
        """
        chains, self._chains = self._chains, None  # after a failure nothing is continued
        if chains is None or not chains.continues_with(request):
            check_request(request, self._limits)
            chains = None
        with torch.inference_mode(), self._forgetting_without_memory():
            chains = chains or self._begun(request)
            with self.adapter.ranks.together():
                for _ in range(request["passes"]):
                    if not chains.done:
                        chains.advance()
                if self.adapter.device.type == "cuda":
                    torch.cuda.synchronize(self.adapter.device)  # a slice ends when its work does
            self._chains = None if chains.done else chains
            result = chains.result() if chains.done else self._nothing_yet(chains)
        return result if self.adapter.ranks.answers else None

    def use(self, pass_: Pass) -> None:
        """Compute all chains by this pass from now on."""
        self._model = self._model._replace(pass_=pass_)
        self.forget()

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Start the operations of steps one by one while the context lasts."""
        graphs, self._graphs = self._graphs, None
        self.forget()
        try:
            yield
        finally:
            self._graphs = graphs
            self.forget()

    def start_steps_one_by_one(self) -> None:
        """Capture no more steps, and drop those that were."""
        self._graphs = None
        self.forget()

    def forget(self) -> None:
        """Drop the chains that have begun, and what was captured."""
        self._chains = None
        self._sizes.clear()

    def _begun(self, request: DecodeRequest) -> Chains:
        """Return the chains, begun on all ranks. MemoryError if one has no room for them, and so all."""
        chains, error = self._begun_here(request)
        if self.adapter.ranks.all_fit(error) and chains is not None:
            return chains
        raise MemoryError(
            f"the GPU has no room for {len(request['nonces'])} chains at a time: "
            "start vLLM with a lower --gpu-memory-utilization"
        ) from error

    def _begun_here(self, request: DecodeRequest) -> tuple[Chains | None, Exception | None]:
        """Do what this rank can do alone; what goes wrong in that must end before the others are in a collective."""
        size = _Size.of(request)
        try:
            shape = size.shape(together=max(1, self._reserve.prefill_tokens // size.seq_len))
            chains = self._chains_of(size, shape)
            if not self.adapter.ranks.alone and not chains.ran_dry:
                chains.dry_run(self._reserve.cache(shape))
            chains.begin(request, self._reserve.cache(shape))  # an empty one
        except Exception as error:
            return None, error
        return chains, None

    def _chains_of(self, size: _Size, shape: ChainShape) -> Chains:
        if size not in self._sizes:
            self._sizes[size] = Chains(self._model, shape, self._graphs)
            if len(self._sizes) > _MAX_SIZES:
                self._sizes.popitem(last=False)
        self._sizes.move_to_end(size)
        return self._sizes[size]

    @contextmanager
    def _forgetting_without_memory(self) -> Iterator[None]:
        """Give memory back where there is none: smaller batches need other graphs, too."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            self.forget()
            if self.adapter.device.type == "cuda":
                torch.cuda.empty_cache()
            raise

    def _nothing_yet(self, chains: Chains) -> DecodeResult:
        rebuilt = self._model.codebook.rebuilt
        return DecodeResult(complete=False, left=chains.left, indices=[], margins=[], rebuilt=rebuilt)

    def _step_graphs(self) -> StepGraphs | None:
        if self.adapter.device.type != "cuda":
            return None
        if not moves_in_place(self.adapter.groups):
            self.findings.append(f"This attention's metadata cannot change within a CUDA graph: {ONE_BY_ONE}.")
            return None
        return StepGraphs(self.adapter.ranks, self.adapter.device)


class _Model(NamedTuple):
    """What all chains share. ``points`` are the codebook's, on the device."""

    adapter: ModelAdapter
    pass_: Pass
    hidden: int
    routers: SeededRouters
    codebook: Codebook
    points: Tensor


class _Size(NamedTuple):
    """How many chains there are, and of how many tokens and steps: what a captured step is for."""

    nonces: int
    seq_len: int
    max_tokens: int

    @classmethod
    def of(cls, request: DecodeRequest) -> _Size:
        """Return that of a request."""
        return cls(len(request["nonces"]), request["seq_len"], request["max_tokens"])

    def shape(self, *, together: int) -> ChainShape:
        """Return what the caches have room for."""
        return ChainShape(*self, together)


class Chains:
    """Chains of one size, between their forward passes: first of some nonces, then of others in the same memory.

    With ``graphs``, steps are captured once, and the CPU then only starts them: what differs from step to step, and
    from nonces to nonces, is in tensors that stay where they are.
    """

    def __init__(self, model: _Model, shape: ChainShape, graphs: StepGraphs | None) -> None:
        self._model = model
        self._shape = shape
        self._graphs = graphs
        #: Whether chains of this size are known to run on this rank alone.
        self.ran_dry = False
        self._captured: torch.cuda.CUDAGraph | None = None
        self._capture_tries = _CAPTURE_TRIES
        self._may_capture = False
        self._workspace: object = None
        self._plan: StepPlan | None = None
        nonces, steps, together = shape.nonces, 1 + shape.max_tokens, shape.together
        device, routers = model.adapter.device, model.routers.routers
        self._prefills = [range(first, min(first + together, nonces)) for first in range(0, nonces, together)]
        seeds = (torch.zeros(nonces, dtype=torch.int64, device=device) for _ in range(3))
        self._bases, self._first_picks, self._tokens = seeds
        self._routes = torch.zeros(len(routers), nonces, dtype=torch.int64, device=device)
        self._claims = torch.zeros(nonces, steps, dtype=torch.int64, device=device)
        self._claimed = torch.zeros_like(self._claims, dtype=torch.bool)
        self._points = torch.zeros_like(self._claims)
        self._margins = torch.zeros(nonces, steps, device=device)
        self._vectors = torch.zeros(len(model.adapter.layers), model.hidden, device=device)
        self._step_taken = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, request: DecodeRequest, cache: ChainCache) -> None:
        """Begin the chains of the request. The ``cache`` must be nobody else's until all is done."""
        model = self._model
        self._request = request
        self._cache = cache
        self._passes = 0
        self._may_capture = self._graphs is not None and self._capture_tries > 0
        seeded = (self._bases, self._first_picks, self._tokens, self._routes)
        for tensor, values in zip(seeded, self._seeds(), strict=True):
            tensor.copy_(torch.tensor(values, dtype=torch.int64).view_as(tensor))
        self._load_claims()
        self._points.fill_(decode.NO_POINT)
        self._margins.zero_()
        self._step_taken.zero_()
        layers, device = len(model.adapter.layers), model.adapter.device
        self._vectors.copy_(
            layer_vectors(block_hash=request["block_hash"], num_layers=layers, hidden=model.hidden, device=device)
        )

    def dry_run(self, cache: ChainCache) -> None:
        """Do one prefill and one step without other ranks, before the chains begin. Errors are those of the model.

        Without it, a rank that fails would leave the others within a collective. The ``cache`` holds what is of no use
        then.
        """
        self._cache, self._passes = cache, len(self._prefills)
        with self._model.adapter.ranks.without_collectives():
            self._prefill(self._prefills[0])
            with cache.bound():
                self._step()
            if self._model.adapter.device.type == "cuda":
                torch.cuda.synchronize(self._model.adapter.device)
        self.ran_dry = True

    @property
    def done(self) -> bool:
        """Whether all steps were taken."""
        return not self.left

    @property
    def left(self) -> int:
        """How many forward passes are left."""
        return len(self._prefills) + self._shape.max_tokens - self._passes

    def continues_with(self, request: DecodeRequest) -> bool:
        """Whether these are the chains of the request."""
        return {**request, "passes": 0} == {**self._request, "passes": 0}

    def advance(self) -> None:
        """Do one forward pass: the prefill of some nonces, or a step of all."""
        if self._passes < len(self._prefills):
            self._prefill(self._prefills[self._passes])
        elif self._captured is not None:
            self._captured.replay()
        else:
            with self._cache.bound():
                self._step()
            if self._may_capture:
                self._capture()
        self._passes += 1

    def result(self) -> DecodeResult:
        """Return all indices, and the margins of the claims."""
        claims, margins = self._request["forced"], self._margins.tolist()
        slow = [f"Steps of {self._shape.nonces} chains could not be captured: {ONE_BY_ONE}."]
        return DecodeResult(
            complete=True,
            left=0,
            indices=self._points.tolist(),
            margins=[row[: min(len(claim), len(row))] for row, claim in zip(margins, claims, strict=False)],
            rebuilt=self._model.codebook.rebuilt,
            findings=slow if self._graphs is not None and self._captured is None else [],
        )

    def _prefill(self, rows: range) -> None:
        adapter, hidden = self._model.adapter, self._model.hidden
        shape = BatchShape(len(rows), self._shape.seq_len)
        part = slice(rows.start, rows.stop)
        inputs = torch.empty(*shape, hidden, dtype=adapter.dtype, device=adapter.device)
        fill_inputs(inputs, self._bases[part, None])
        vocabulary = adapter.vocabulary
        tokens = token_ids(self._tokens[part], shape.seq_len, vocabulary) if vocabulary is not None else None
        with self._cache.bound():  # before the plan, which may tell kernels where to write
            plan = adapter.plan(shape, Placement(self._shape, first=rows.start))
            last = self._forward(StageInputs(inputs, tokens), plan, part).view(*shape, -1)[:, -1]
        self._snap(part, last, decode.picks(self._first_picks[part], hidden=hidden))

    def _step(self) -> None:
        """Enqueue the next step of all chains, whose number is on the device. The layers have the chains' caches."""
        adapter, hidden, nonces = self._model.adapter, self._model.hidden, self._shape.nonces
        previous = torch.where(self._claimed, self._claims, self._points).index_select(1, self._step_taken).squeeze(1)
        self._step_taken.add_(1)
        inputs = torch.empty(nonces, 1, hidden, dtype=adapter.dtype, device=adapter.device)
        decode.fill_step_inputs(inputs[:, 0], self._bases, previous, step=self._step_taken)
        tokens = self._step_tokens(previous)
        last = self._forward(StageInputs(inputs, tokens), self._step_plan(), slice(None))
        picks = decode.step_picks(self._bases, previous, step=self._step_taken, hidden=hidden)
        self._snap(slice(None), last, picks)

    def _step_tokens(self, previous: Tensor) -> Tensor | None:
        vocabulary = self._model.adapter.vocabulary
        if vocabulary is None:
            return None
        tokens = decode.step_token_ids(self._bases, previous, step=self._step_taken, vocabulary=vocabulary)
        return tokens.unsqueeze(1)

    def _step_plan(self) -> AttentionPlan:
        adapter, shape = self._model.adapter, self._shape
        if adapter.device.type != "cuda" or not moves_in_place(adapter.groups):
            before = shape.seq_len + self._passes - len(self._prefills)
            return adapter.plan(BatchShape(shape.nonces, 1), Placement(shape, before=before))
        if self._plan is None:
            self._plan = StepPlan(adapter, shape)
        self._plan.move(self._step_taken + (shape.seq_len - 1))
        return self._plan.plan

    def _capture(self) -> None:
        """Make what `_step` does a CUDA graph, once a step has run. If it fails, a later batch may try again."""
        assert self._graphs is not None  # noqa: S101 - by `begin`
        self._may_capture = False
        try:
            with self._cache.bound():
                captured = self._graphs.capture(self._step)
        except RuntimeError:
            _log.exception("a step of %d chains cannot be made a CUDA graph: %s", self._shape.nonces, ONE_BY_ONE)
            captured = None
        if not self._model.adapter.ranks.agreed(captured is not None):
            self._capture_tries -= 1
            return
        self._captured, self._capture_tries = captured, 0
        self._workspace = self._model.pass_.workspace()

    def _forward(self, inputs: StageInputs, plan: AttentionPlan, rows: slice) -> Tensor:
        """Return the final norm's output of all tokens."""
        model, steps = self._model, self._step_taken.expand(self._shape.nonces)
        routers = model.routers
        reflected = dict(zip(model.adapter.layers, self._vectors, strict=True))
        logits = decode.seeded_logits(self._routes[:, rows], steps[rows], experts=routers.experts, top_k=routers.top_k)
        with model.pass_.continuing(reflected, plan.shape), routers.choosing(logits, plan.shape.seq_len):
            output = model.adapter.forward(inputs, {}, plan)
        assert isinstance(output, Tensor)  # noqa: S101 - there is a single stage
        return output

    def _snap(self, rows: slice, last: Tensor, picks: Tensor) -> None:
        points, scores = decode.snap(last, picks, self._model.points)
        step = self._step_taken
        claims = self._claims[rows].index_select(1, step).squeeze(1)
        self._points[rows].index_copy_(1, step, points.unsqueeze(1))
        self._margins[rows].index_copy_(1, step, decode.claimed_margins(scores, claims).unsqueeze(1))

    def _seeds(self) -> tuple[list[int], list[int], list[int], list[list[int]]]:
        """Return the seeds of inputs, first picks and token ids ``[nonces]``, and those of ``[routers, nonces]``."""
        block_hash, public_key = self._request["block_hash"], self._request["public_key"]
        nonces = self._request["nonces"]
        routers = range(len(self._model.routers.routers))
        return (
            [input_seeds(block_hash, public_key, nonce, strong_rng=False)[0] for nonce in nonces],
            [decode.prefill_pick_seed(block_hash, public_key, nonce) for nonce in nonces],
            [token_seed(block_hash, public_key, nonce) for nonce in nonces],
            [[decode.route_seed(block_hash, nonce, router) for nonce in nonces] for router in routers],
        )

    def _load_claims(self) -> None:
        """Load the claims, and where there is one."""
        claims = torch.zeros(self._claims.shape, dtype=torch.int64)
        claimed = torch.zeros_like(claims, dtype=torch.bool)
        for row, chain in enumerate(self._request["forced"]):
            known = min(len(chain), 1 + self._shape.max_tokens)
            claims[row, :known] = torch.tensor(chain[:known], dtype=torch.int64)
            claimed[row, :known] = True
        self._claims.copy_(claims)
        self._claimed.copy_(claimed)


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


def _model(adapter: ModelAdapter, pass_: Pass, hidden: int, setup: DecodeSetup) -> _Model:
    path = Path(setup["codebook"]) if setup["codebook"] is not None else None
    try:
        codebook = open_codebook(path, rebuild=setup["rebuild"])
    except ValueError as error:
        raise UnsupportedModelError(f"The decode scheme cannot run here: {error}.") from error
    experts, top_k = adapter.experts, adapter.experts_per_token
    routers = find_routers(adapter.layers)
    if bool(experts) != bool(routers) or (routers and not 1 <= top_k <= experts):
        raise UnsupportedModelError("The decode scheme does not find this model's routers: serve another model.")
    seeded = SeededRouters(routers, experts, top_k)
    return _Model(adapter, pass_, hidden, seeded, codebook, codebook.points.to(adapter.device))
