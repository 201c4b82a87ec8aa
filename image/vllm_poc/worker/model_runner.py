# SPDX-License-Identifier: Apache-2.0
"""PoC batches on the served model, from a request to its result, together with all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_poc.logs import get_logger
from vllm_poc.maths.sampling import fill_inputs, token_ids
from vllm_poc.rpc import BatchRequest, BatchResult, ModelFacts, PassSpec, PassTiming
from vllm_poc.worker.batch_queue import AsyncOutput, BatchQueue
from vllm_poc.worker.graphs import CapturedPass, GraphCache
from vllm_poc.worker.memory import Memory
from vllm_poc.worker.model.adapter import ModelAdapter, StageInputs, StageOutput
from vllm_poc.worker.model.layer_subset import only, spans
from vllm_poc.worker.model.scratch import BatchShape, ScratchCache
from vllm_poc.worker.passes.plain import Pass, PlainPass
from vllm_poc.worker.results import RoundTensors, draw, drawn_bytes, input_columns, result_values, seeds_of
from vllm_poc.worker.warm_up import OUT_OF_MEMORY, WarmUp

_log = get_logger(__name__)


class Slower(NamedTuple):
    """The finding that says why a pass is slower than this device allows, and whether another try may fare better."""

    finding: str
    passes: bool
    #: How many looks in a row have ended before the faster one was compared.
    late: int = 0


class PocModelRunner:
    """Computes PoC batches on the served model by the pass that it is given, or by vLLM's own."""

    def __init__(self, adapter: ModelAdapter, limits: ModelFacts, pass_: Pass | None = None) -> None:
        self.stage = Stage(adapter, limits, pass_ or PlainPass(adapter))
        self._ranks = adapter.ranks
        on_gpu = adapter.device.type == "cuda"
        self._graphs = GraphCache(adapter.ranks, adapter.device, self.stage.pass_.workspace) if on_gpu else None
        self.memory = Memory(adapter.device, adapter.chat_peak)
        self._warm_up = WarmUp(self.stage, self._graphs, self.memory)
        self._queue: BatchQueue | None = None
        #: What was found out about this server before it computed for PoC, in sentences.
        self.findings: list[str] = []
        #: Why it is slower than this device allows; None if it is not.
        self.slower: Slower | None = None

    @property
    def facts(self) -> ModelFacts:
        """The limits, and what this pass adds to them."""
        adapter, fused = self.stage.adapter, not isinstance(self.stage.pass_, PlainPass)
        facts: ModelFacts = {**self.stage.limits, "scratch_bytes": self.stage.scratch_bytes, "fused": fused}
        kernels = {"attention": adapter.attention_kernels, "experts": adapter.expert_kernels}
        facts = {**facts, **kernels, "findings": self.findings}  # type: ignore[typeddict-item]
        if self.slower is None:
            return facts
        finding, passes, late = self.slower
        return {**facts, "slower": finding, "passes": passes, "late": passes and late > 0}

    def prepare(self, request: BatchRequest) -> Callable[[], BatchResult | None]:
        """Do what a rank can do alone; what is returned computes the request, together with all other ranks.

        ValueError if a batch exceeds the limits that ``poc_describe`` tells. The result is None on every rank but one.
        """
        spec = PassSpec.of(request)
        check_shape(BatchShape(min(request["batch"], len(request["nonces"])), spec.seq_len), self.stage.limits)
        return partial(self._compute, request, spec)

    def prepare_warm_up(
        self, request: BatchRequest, segment_seconds: float, keep: Collection[PassSpec]
    ) -> Callable[[], PassTiming]:
        """Do the same for passes of as many nonces as the request has: what is returned readies their repetition.

        ValueError as from `prepare`. Where it can, cuts them into segments of up to ``segment_seconds``. Of the passes
        captured before, those of the specifications ``keep`` stay.
        """
        spec = PassSpec.of(request)
        check_shape(BatchShape(len(request["nonces"]), spec.seq_len), self.stage.limits)
        return partial(self._run_warm_up, request, spec, segment_seconds, keep)

    def _run_warm_up(
        self, request: BatchRequest, spec: PassSpec, segment_seconds: float, keep: Collection[PassSpec]
    ) -> PassTiming:
        self._queue = None
        seeds = seeds_of(spec, request, request["nonces"])
        fits = self._ranks.agreed(self._fits(len(seeds), spec))
        if not fits or not self._runs_dry(request, request["nonces"], spec):
            return OUT_OF_MEMORY
        try:
            with torch.inference_mode(), self._ranks.together():
                self.stage.load(request["block_hash"], spec)
                return self._warm_up.run(spec, seeds, segment_seconds, keep)
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY

    def _compute(self, request: BatchRequest, spec: PassSpec) -> BatchResult | None:
        queue, self._queue = self._queue, None  # after a failure nothing is continued
        if queue is None or not queue.continues_with(request):
            queue = self._new_queue(request, spec)
        with torch.inference_mode(), self._ranks.together():
            self.stage.load(request["block_hash"], spec)
            queue.follow(request, lambda following: self._segments(following, queue.batch, spec) == queue.segments)
            for _ in queue.steps():
                queue.begun(self._step(queue, spec))
            result = queue.answer()
            self._queue = queue
            return result if self._ranks.answers else None

    def _new_queue(self, request: BatchRequest, spec: PassSpec) -> BatchQueue:
        wanted = min(request["batch"], len(request["nonces"]))
        fitting = self._fitting(wanted, request, spec)
        batch = request["batch"] if fitting == wanted else fitting
        return BatchQueue(
            request, segments=self._segments(request, batch, spec), batch=batch, stages=self._ranks.stages
        )

    def _fitting(self, nonces: int, request: BatchRequest, spec: PassSpec) -> int:
        """Return how many of ``nonces`` fit into a forward pass on all ranks. MemoryError if not even one does."""
        if self._captured(spec, nonces) is not None:
            return nonces
        while not (
            self._ranks.agreed(self._fits(nonces, spec)) and self._runs_dry(request, request["nonces"][:nonces], spec)
        ):
            if nonces == 1:
                raise MemoryError(
                    "the GPU has no room for the forward pass of one nonce: start vLLM with a lower "
                    "--gpu-memory-utilization"
                )
            nonces //= 2
        return nonces

    def _runs_dry(self, request: BatchRequest, nonces: Sequence[int], spec: PassSpec) -> bool:
        """Whether the forward pass of these nonces fits on all ranks, each of which first runs it alone."""
        if self._ranks.alone:
            return True
        with torch.inference_mode():
            self.stage.load(request["block_hash"], spec)
        seeds = self._on_device(seeds_of(spec, request, nonces))
        return self._ranks.all_fit(self.stage.dry_run(spec, seeds))

    def _fits(self, nonces: int, spec: PassSpec) -> bool:
        return self.memory.fits(nonces * spec.seq_len, self.stage.drawn_bytes(spec, nonces))

    def _step(self, queue: BatchQueue, spec: PassSpec) -> AsyncOutput:
        """Enqueue this stage's share, send what it completes, and receive what the stage before completes."""
        ranks = self._ranks
        ranks.settle()
        mine, coming = queue.request_at(ranks.stage), queue.request_at(ranks.stage - 1)
        values = list(self._values(queue, mine, spec)) if mine is not None else []
        output = AsyncOutput.of(values, self.stage.adapter.device)
        if queue.ends_passes and coming is not None and not ranks.has_first_layer:
            queue.received.extend(ranks.receive() for _ in _batched(coming, queue.batch))
        return output

    def _values(self, queue: BatchQueue, request: BatchRequest, spec: PassSpec) -> Iterator[Tensor]:
        """Enqueue a segment of all batches; yield their values on the last stage, once they are complete."""
        for nonces in _batched(request, queue.batch):
            output = self._output(queue, request, nonces, spec)
            if isinstance(output, dict):
                self._ranks.send(output)
            elif output is not None:
                yield output[: len(nonces)]

    def _output(
        self, queue: BatchQueue, request: BatchRequest, nonces: Sequence[int], spec: PassSpec
    ) -> StageOutput | None:
        captured = self._captured(spec, len(nonces))
        if captured is None:
            return self.stage.batch(spec, self._on_device(seeds_of(spec, request, nonces)), self._received(queue))
        if queue.segment == 0:
            # The CPU hashes while the device computes the step before.
            captured.fill(seeds_of(spec, request, nonces), self._received(queue))
        return captured.run(queue.segment if queue.segments > 1 else None)

    def _received(self, queue: BatchQueue) -> dict[str, Tensor]:
        return {} if self._ranks.has_first_layer else queue.received.popleft()

    def _on_device(self, seeds: Tensor) -> Tensor:
        device = self.stage.adapter.device
        return seeds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else seeds

    def _captured(self, spec: PassSpec, nonces: int) -> CapturedPass | None:
        return self._graphs.find(spec, nonces) if self._graphs is not None else None

    def _segments(self, request: BatchRequest, batch: int, spec: PassSpec) -> int:
        """Return how many steps each stage takes for the request; several passes run whole, one after the other."""
        captured = self._captured(spec, len(request["nonces"]))
        return len(captured.segments) if captured is not None and len(_batched(request, batch)) == 1 else 1


class Stage:
    """This rank's share of a batch: inputs, its layers of the model, results. Never touches chat's KV cache."""

    def __init__(self, adapter: ModelAdapter, limits: ModelFacts, pass_: Pass) -> None:
        self.adapter = adapter
        self.limits = limits
        self.pass_ = pass_
        self._hidden = limits["hidden_size"]
        self.tensors = RoundTensors(layers=len(adapter.layers), hidden=self._hidden, device=adapter.device)
        self._scratch = _scratch(adapter, limits) if pass_.needs_cache else None
        self._ran_dry: dict[PassSpec, int] = {}  # nonces
        self._side = torch.cuda.Stream(adapter.device) if adapter.device.type == "cuda" else None

    @property
    def scratch_storages(self) -> set[int]:
        """Addresses of the memory of the scratch cache."""
        return self._scratch.storages if self._scratch is not None else set()

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the scratch cache, in bytes; 0 if no layer needs one."""
        return self._scratch.nbytes if self._scratch is not None else 0

    def drawn_bytes(self, spec: PassSpec, nonces: int) -> int:
        """Return how many bytes of a batch depend on the nonces and not on their tokens."""
        return drawn_bytes(spec, nonces, hidden=self._hidden)

    def load(self, block_hash: str, spec: PassSpec) -> None:
        """Make what all nonces of a block hash share."""
        self.tensors.load(block_hash, spec, results=self.adapter.ranks.has_last_layer)

    def batch(
        self, spec: PassSpec, seeds: Tensor, received: dict[str, Tensor], *, in_one_go: bool = True
    ) -> StageOutput:
        """Return the values of the nonces on the last stage, and what the next one goes on with on the others.

        ``seeds`` are on the device, as `seeds_of` has them; ``received`` is the output of the stage before, which
        this overwrites. Work that is not recorded ``in_one_go`` has no room for a second stream.
        """
        side = self._side if in_one_go else None
        drawn = None
        if self.adapter.ranks.has_last_layer:
            with _beside(side):
                drawn = draw(seeds, spec, hidden=self._hidden)
        output = self.forward(spec, self.inputs(spec, seeds), received, len(seeds))
        if drawn is None or isinstance(output, dict):
            return output
        _join(side)
        return result_values(output, drawn, self.tensors)

    def dry_run(self, spec: PassSpec, seeds: Tensor) -> Exception | None:
        """Run the forward pass of these seeds without other ranks, and return what went wrong, or None.

        Without such a dry run, a rank that fails would leave the others within a collective. Nothing if there is no
        other rank, or as large a pass ran before.
        """
        if self.adapter.ranks.alone or len(seeds) <= self._ran_dry.get(spec, 0):
            return None
        try:
            with torch.inference_mode(), self.adapter.ranks.without_collectives():
                for span in spans(self.adapter):  # a few layers of each kind need what all need
                    with only(self.adapter, span):
                        received = self.adapter.received(len(seeds) * spec.seq_len)
                        self.forward(spec, self.inputs(spec, seeds), received, len(seeds))
                if self.adapter.device.type == "cuda":
                    torch.cuda.synchronize(self.adapter.device)
        except Exception as error:
            _log.exception("PoC's forward pass of %d x %d tokens fails on this rank", len(seeds), spec.seq_len)
            if self.adapter.device.type == "cuda":
                torch.cuda.empty_cache()
            return error
        self._ran_dry[spec] = len(seeds)
        return None

    def inputs(self, spec: PassSpec, seeds: Tensor) -> StageInputs:
        """Return what this stage reads of the nonces with these seeds, which are on the device."""
        columns, vocabulary = input_columns(spec), self.adapter.vocabulary
        tokens = token_ids(seeds[:, columns], spec.seq_len, vocabulary) if vocabulary is not None else None
        if not self.adapter.ranks.has_first_layer:
            return StageInputs(None, tokens)
        size = (len(seeds), spec.seq_len, self._hidden)
        embeddings = torch.empty(size, dtype=self.adapter.dtype, device=self.adapter.device)
        fill_inputs(embeddings, seeds[:, :columns])
        return StageInputs(embeddings, tokens)

    def forward(self, spec: PassSpec, inputs: StageInputs, received: dict[str, Tensor], nonces: int) -> StageOutput:
        """Return the final norm's output at the last positions, ``[nonces, hidden]``, or what the next stage needs.

        Overwrites ``inputs`` and ``received``.
        """
        shape = BatchShape(nonces, spec.seq_len)
        with self._bound(shape):  # which refuses a batch without blocks, before a plan tells kernels where to write
            plan = self.pass_.plan(shape)
            with self.pass_.applied(self._vectors(spec), shape):
                output = self.adapter.forward(inputs, received, plan)
        if isinstance(output, dict) or len(output) == shape.nonces:
            return output
        return output.view(*shape, -1)[:, -1]

    def _bound(self, shape: BatchShape) -> AbstractContextManager[None]:
        return self._scratch.bound(shape) if self._scratch is not None else nullcontext()

    def _vectors(self, spec: PassSpec) -> Mapping[nn.Module, Tensor]:
        if not spec.layer_hooks or not self.adapter.reflects:
            return {}
        return dict(zip(self.adapter.layers, self.tensors.vectors, strict=True))


def check_shape(shape: BatchShape, facts: ModelFacts) -> None:
    """Raise ValueError if a batch is empty or too large."""
    seq_len = facts["max_model_len"]
    nonces = facts["max_captured_nonces"] or facts["max_batch_nonces"]
    tokens = facts["max_captured_tokens"] or facts["max_batch_tokens"]
    if not 1 <= shape.nonces <= nonces:
        raise ValueError(f"a batch holds 1..{nonces} nonces (--max-num-seqs), not {shape.nonces}")
    if not 1 <= shape.seq_len <= seq_len:
        raise ValueError(f"seq_len {shape.seq_len} must lie in 1..{seq_len} (--max-model-len)")
    if shape.tokens > tokens:
        raise ValueError(f"a batch holds up to {tokens} tokens, not {shape.tokens} (--max-num-batched-tokens)")


def _batched(request: BatchRequest, batch: int) -> list[Sequence[int]]:
    nonces = request["nonces"]
    return [nonces[start : start + batch] for start in range(0, len(nonces), batch)]


def _scratch(adapter: ModelAdapter, limits: ModelFacts) -> ScratchCache:
    tokens = max(limits["max_batch_tokens"], limits["max_captured_tokens"])
    return ScratchCache(adapter.groups, max_nonces=limits["max_batch_nonces"], max_tokens=tokens)


@contextmanager
def _beside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue what is called here on ``side``, behind all that was enqueued so far.

    What it makes may be read after `_join`, and must be let go before this is entered again.
    """
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def _join(side: torch.cuda.Stream | None) -> None:
    """Let all that is enqueued from here on wait for ``side``."""
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
