# SPDX-License-Identifier: Apache-2.0
"""Chains of one size that are computed together: their tensors, their forward passes, and the graphs of their steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.logs import get_logger
from vllm_poc.maths import decode
from vllm_poc.maths.decode import Codebook
from vllm_poc.maths.sampling import fill_inputs, input_seeds, layer_vectors, token_ids, token_seed
from vllm_poc.rpc import ChainWork, DecodeRequest, DecodeResult
from vllm_poc.worker.chain_trial import ONE_BY_ONE
from vllm_poc.worker.graphs import StepGraphs
from vllm_poc.worker.memory import has_room_beside_chat
from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter, StageInputs
from vllm_poc.worker.model.chain_cache import ChainCache, StepPlan, can_be_cut, moves_in_place
from vllm_poc.worker.model.placement import ChainShape, Placement
from vllm_poc.worker.model.scratch import BatchShape
from vllm_poc.worker.passes.pausing import PausingPass, ends
from vllm_poc.worker.passes.plain import Pass, SeededRouters, asked_once

_log = get_logger(__name__)

#: Batches of a size in which steps are tried to be captured, until it succeeds.
_CAPTURE_TRIES = 3
#: How often in a batch a step may be captured anew, to have other segments.
_RECAPTURES = 3
#: What a pass that waits holds at most, in hidden states of all of its tokens: those of several streams, and of hooks.
_HELD = 8
_ENDED = object()


class ChainModel(NamedTuple):
    """What all chains share. ``points`` are the codebook's, on the device."""

    adapter: ModelAdapter
    pass_: Pass
    hidden: int
    routers: SeededRouters
    codebook: Codebook
    points: Tensor


class ChainSize(NamedTuple):
    """How many chains there are, and of how many tokens and steps: what a captured step is for."""

    nonces: int
    seq_len: int
    max_tokens: int

    @classmethod
    def of(cls, request: DecodeRequest) -> ChainSize:
        """Return that of a request."""
        return cls(len(request["nonces"]), request["seq_len"], request["max_tokens"])

    def shape(self, *, together: int) -> ChainShape:
        """Return what the caches have room for."""
        return ChainShape(*self, together)


class Chains:
    """Chains of one size, between their forward passes: first of some nonces, then of others in the same memory.

    With ``graphs``, steps are captured once, and the CPU then only starts them: what differs from step to step, and
    from nonces to nonces, is in tensors that stay where they are.

    Passes are cut into parts behind layers. Each part tells attention anew what it is to do, since chat may have
    used the same memory of vLLM's meanwhile.
    """

    def __init__(self, model: ChainModel, shape: ChainShape, graphs: StepGraphs | None) -> None:
        self._model = model
        self._shape = shape
        self._graphs = graphs
        #: Whether chains of this size are known to run on this rank alone.
        self.ran_dry = False
        self._captured: list[torch.cuda.CUDAGraph] = []
        self._capture_tries = _CAPTURE_TRIES
        #: Into how many parts a pass may be cut.
        self._most_parts = len(model.adapter.own_layers) if can_be_cut(model.adapter) else 1
        self._under_way: Generator[None, None, None] | None = None
        #: Of the pass that is under way, or was last.
        self._parts, self._parts_done = 1, 0
        self._may_capture = False
        self._recaptures = 0
        #: What the last call did, whether it captured a step, and whether a pass could not pause for lack of memory.
        self._work: ChainWork = "prefill"
        self._did, self._captures, self._crowded = 0, False, False
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
        self.stop()
        model = self._model
        self._request = request
        self._cache = cache
        self._passes = 0
        self._parts_done = 0
        self._crowded = False
        self._recaptures = _RECAPTURES
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
        self._cache, self._passes, self._parts = cache, len(self._prefills), 1
        with self._model.adapter.ranks.without_collectives():
            _finish(self._prefill(self._prefills[0]))
            _finish(self._step())
            if self._model.adapter.device.type == "cuda":
                torch.cuda.synchronize(self._model.adapter.device)
        self.ran_dry = True

    @property
    def done(self) -> bool:
        """Whether all steps were taken."""
        return self._passes == len(self._prefills) + self._shape.max_tokens

    @property
    def coming(self) -> ChainWork:
        """Of what the next part is."""
        if self._passes < len(self._prefills):
            return "prefill"
        return "graph" if self._captured and self._under_way is None else "step"

    @property
    def left(self) -> int:
        """How many parts of forward passes are left, as these are cut now."""
        begun = self._passes + (self._under_way is not None)
        prefills = max(0, len(self._prefills) - begun)
        steps = len(self._prefills) + self._shape.max_tokens - begun - prefills
        each = len(self._captured) or (1 if self._may_capture else self._wanted("step"))
        under_way = self._parts if self._under_way is not None else 0
        return prefills * self._wanted("prefill") + steps * each + under_way - self._parts_done

    def continues_with(self, request: DecodeRequest) -> bool:
        """Whether these are the chains of the request."""
        return _what(request) == _what(self._request)

    def advance(self, request: DecodeRequest) -> None:
        """Do up to as many parts as the request says: of the prefill of some nonces, or of steps of all."""
        self._request = request  # whose cuts count from now on
        self._work, self._did, self._captures = self.coming, 0, False
        while not self.done and self._did < request["parts"] and self.coming == self._work and not self._captures:
            if self._work == "graph":
                self._replay()
            else:
                self._run()
            self._did += 1

    def stop(self) -> None:
        """Drop a forward pass that is under way."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def result(self) -> DecodeResult:
        """Return all indices, and the margins of the claims, if all steps were taken; else what is left."""
        result = DecodeResult(
            complete=self.done,
            left=self.left,
            work=self._work,
            parts=self._did,
            cut=len(self._captured) if self._work == "graph" else self._parts,
            captures=self._captures,
            next=self.coming,
            indices=[],
            margins=[],
            rebuilt=self._model.codebook.rebuilt,
        )
        if not self.done:
            return result
        claims, margins = self._request["forced"], self._margins.tolist()
        result["indices"] = self._points.tolist()
        result["margins"] = [row[: min(len(claim), len(row))] for row, claim in zip(margins, claims, strict=False)]
        result["findings"] = self._findings()
        return result

    def _findings(self) -> list[str]:
        found = []
        if self._graphs is not None and not self._captured:
            found.append(f"Steps of {self._shape.nonces} chains could not be captured: {ONE_BY_ONE}.")
        if self._crowded:
            found.append(
                "Chat waits for whole forward passes of chains, since the GPU has no memory for it beside a part of "
                "one: start vLLM with a lower --gpu-memory-utilization."
            )
        return found

    def _wanted(self, work: ChainWork) -> int:
        """Return into how many parts a pass is cut that begins now."""
        most = 1 if work == "graph" and self._model.adapter.counts_experts else self._most_parts
        return max(1, min(self._request["cuts"][work], most))

    def _run(self) -> None:
        """Enqueue the next part of a pass whose operations the CPU starts one by one."""
        if self._under_way is None:
            prefills, parts = self.coming == "prefill", self._wanted(self.coming)
            tokens = len(self._prefills[0]) * self._shape.seq_len if prefills else self._shape.nonces
            self._parts = parts if parts == 1 or self._may_pause(tokens) else 1
            self._under_way = self._prefill(self._prefills[self._passes]) if prefills else self._step()
        self._parts_done += 1
        if _goes_on(self._under_way):
            return
        self._under_way, self._parts_done = None, 0
        self._passes += 1
        if self._passes > len(self._prefills) and self._may_capture:
            self._may_capture, self._captures = False, True
            self._capture(self._wanted("graph"))

    def _may_pause(self, tokens: int) -> bool:
        """Whether chat would find its memory on all ranks while a pass of so many tokens waits."""
        adapter = self._model.adapter
        held = _HELD * tokens * self._model.hidden * adapter.dtype.itemsize
        found = adapter.ranks.agreed(has_room_beside_chat(adapter.device, adapter.chat_peak, held))
        self._crowded = self._crowded or not found
        return found

    def _replay(self) -> None:
        """Enqueue the next graph of a step. One that is to have other segments is captured anew before it begins."""
        segments = self._wanted("graph")
        if not self._parts_done and segments != len(self._captured) and self._recaptures:
            self._recaptures, self._captures = self._recaptures - 1, True
            self._capture(segments)
        self._captured[self._parts_done].replay()
        self._parts_done += 1
        if self._parts_done == len(self._captured):
            self._parts_done = 0
            self._passes += 1

    def _prefill(self, rows: range) -> Generator[None, None, None]:
        adapter, hidden = self._model.adapter, self._model.hidden
        shape = BatchShape(len(rows), self._shape.seq_len)
        part = slice(rows.start, rows.stop)
        inputs = torch.empty(*shape, hidden, dtype=adapter.dtype, device=adapter.device)
        fill_inputs(inputs, self._bases[part, None])
        vocabulary = adapter.vocabulary
        tokens = token_ids(self._tokens[part], shape.seq_len, vocabulary) if vocabulary is not None else None
        place = Placement(self._shape, first=rows.start)
        output = yield from self._forward(StageInputs(inputs, tokens), lambda: adapter.plan(shape, place), part)
        last = output.view(*shape, -1)[:, -1]
        self._snap(part, last, decode.picks(self._first_picks[part], hidden=hidden))

    def _step(self) -> Generator[None, None, None]:
        """Enqueue the next step of all chains, whose number is on the device."""
        adapter, hidden, nonces = self._model.adapter, self._model.hidden, self._shape.nonces
        previous = torch.where(self._claimed, self._claims, self._points).index_select(1, self._step_taken).squeeze(1)
        self._step_taken.add_(1)
        inputs = torch.empty(nonces, 1, hidden, dtype=adapter.dtype, device=adapter.device)
        decode.fill_step_inputs(inputs[:, 0], self._bases, previous, step=self._step_taken)
        tokens = self._step_tokens(previous)
        last = yield from self._forward(StageInputs(inputs, tokens), self._step_plan, slice(None))
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

    def _capture(self, segments: int) -> None:
        """Make a step so many CUDA graphs, once one has run. If the first try fails, a later batch may try again."""
        assert self._graphs is not None  # noqa: S101 - by `begin`
        self._parts = 1
        cuts = [layer for layer in ends(self._model.adapter.own_layers, segments) if layer is not None]
        try:
            captured = self._graphs.capture(lambda: _finish(self._step()), cuts, self._step_plan)
        except RuntimeError:
            _log.exception("a step of %d chains cannot be made %d CUDA graphs", self._shape.nonces, segments)
            captured = []
        if self._model.adapter.ranks.agreed(bool(captured)):
            self._captured, self._capture_tries = captured, 0
            self._workspace = self._model.pass_.workspace()
        elif self._captured:
            self._recaptures = 0
        else:
            self._capture_tries -= 1

    def _forward(
        self, inputs: StageInputs, plan: Callable[[], AttentionPlan], rows: slice
    ) -> Generator[None, None, Tensor]:
        """Return the final norm's output of all tokens; pauses behind each part but the last."""
        model, steps = self._model, self._step_taken.expand(self._shape.nonces)
        routers = model.routers
        reflected = dict(zip(model.adapter.layers, self._vectors, strict=True))
        logits = decode.seeded_logits(self._routes[:, rows], steps[rows], experts=routers.experts, top_k=routers.top_k)
        forward, asked, output = PausingPass(model.adapter, inputs), routers.unasked(), None
        try:
            for end in ends(model.adapter.own_layers, self._parts):
                with self._cache.bound():  # before the plan, which may tell kernels where to write
                    told = plan()
                    with (
                        model.pass_.continuing(reflected, told.shape),
                        routers.choosing_in_part(logits, told.shape.seq_len, asked),
                    ):
                        output = forward.run(told, end)
                if end is not None:
                    yield
        finally:
            forward.stop()
        asked_once(asked)
        assert output is not None  # noqa: S101 - of the last part
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


def _what(request: DecodeRequest) -> DecodeRequest:
    """Return the request without how it is computed."""
    return {**request, "parts": 0, "cuts": {}}


def _goes_on(under_way: Generator[None, None, None]) -> bool:
    """Do the next part of a pass, and say whether others follow."""
    return next(under_way, _ENDED) is not _ENDED


def _finish(under_way: Generator[None, None, None]) -> None:
    """Do a pass to its end."""
    while _goes_on(under_way):
        pass
