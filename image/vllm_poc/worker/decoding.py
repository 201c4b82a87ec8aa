# SPDX-License-Identifier: Apache-2.0
"""The decode scheme on the served model: a prefill of all nonces of a batch, then steps of one token each.

    begun -> prefill, some nonces at a time -> step 1 -> ... -> step max_tokens -> answered

All nonces take each step together. Between any two forward passes, and between parts of one, the worker may do other
things, chat above all: what chains need to go on is in memory of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vllm_poc.logs import get_logger
from vllm_poc.maths.decode import open_codebook
from vllm_poc.rpc import DecodeFacts, DecodeRequest, DecodeResult, DecodeSetup, ModelFacts
from vllm_poc.worker.chain_batch import ChainModel, Chains, ChainSize
from vllm_poc.worker.chain_trial import ONE_BY_ONE
from vllm_poc.worker.graphs import StepGraphs
from vllm_poc.worker.model.adapter import ModelAdapter
from vllm_poc.worker.model.capabilities import decode_refusal
from vllm_poc.worker.model.chain_cache import ChainReserve, moves_in_place
from vllm_poc.worker.model.placement import ChainShape
from vllm_poc.worker.model.scratch import UnsupportedModelError
from vllm_poc.worker.passes.plain import Pass, SeededRouters, find_routers

_log = get_logger(__name__)

#: Sizes of batches whose captured steps are kept.
_MAX_SIZES = 4


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
        self._sizes = OrderedDict[ChainSize, Chains]()
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
    def begun(self) -> bool:
        """Whether chains have begun and are not complete."""
        return self._chains is not None

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
            if chains is not None:
                chains.stop()
            check_request(request, self._limits)
            chains = None
        with torch.inference_mode(), self._forgetting_without_memory():
            chains = chains or self._begun(request)
            with self.adapter.ranks.together():
                chains.advance(request)
                if self.adapter.device.type == "cuda":
                    torch.cuda.synchronize(self.adapter.device)  # a slice ends when its work does
            self._chains = None if chains.done else chains
            result = chains.result()
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
        if self._chains is not None:
            self._chains.stop()
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
        size = ChainSize.of(request)
        try:
            shape = size.shape(together=max(1, self._reserve.prefill_tokens // size.seq_len))
            chains = self._chains_of(size, shape)
            if not self.adapter.ranks.alone and not chains.ran_dry:
                chains.dry_run(self._reserve.cache(shape))
            chains.begin(request, self._reserve.cache(shape))  # an empty one
        except Exception as error:
            return None, error
        return chains, None

    def _chains_of(self, size: ChainSize, shape: ChainShape) -> Chains:
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

    def _step_graphs(self) -> StepGraphs | None:
        if self.adapter.device.type != "cuda":
            return None
        if not moves_in_place(self.adapter.groups):
            self.findings.append(f"This attention's metadata cannot change within a CUDA graph: {ONE_BY_ONE}.")
            return None
        return StepGraphs(self.adapter.ranks, self.adapter.device)


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
    for name, parts in (("parts", request["parts"]), *(("cuts", cut) for cut in request["cuts"].values())):
        if parts < 1:
            raise ValueError(f"{name} {parts} must be 1 or more")


def _model(adapter: ModelAdapter, pass_: Pass, hidden: int, setup: DecodeSetup) -> ChainModel:
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
    return ChainModel(adapter, pass_, hidden, seeded, codebook, codebook.points.to(adapter.device))
