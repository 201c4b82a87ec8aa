# SPDX-License-Identifier: Apache-2.0
"""PoC batches on the served model, from a request to its result, together with all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_poc.worker.batches import BatchRequest, BatchResult, ModelFacts, Rehearsal
from vllm_poc.worker.flow import Flow
from vllm_poc.worker.internals import BatchShape, Runner, StageOutput
from vllm_poc.worker.kernel_names import attention_kernels, expert_kernels
from vllm_poc.worker.limits import check_shape
from vllm_poc.worker.memory import Memory
from vllm_poc.worker.passes import Pass, PlainPass
from vllm_poc.worker.programs import Program, Programs
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.rehearsal import NO_ROOM, Rehearser
from vllm_poc.worker.stage import Stage
from vllm_poc.worker.work import Work


class PocModel:
    """Computes PoC batches on the served model by the pass that it is given, or by vLLM's own."""

    def __init__(self, runner: Runner, limits: ModelFacts, pass_: Pass | None = None) -> None:
        self.stage = Stage(runner, limits, pass_ or PlainPass(runner))
        self._ranks = runner.ranks
        self._programs = Programs(runner.device, self.stage.pass_.workspace) if runner.device.type == "cuda" else None
        self.memory = Memory(runner.device, runner.chat_peak)
        self._rehearser = Rehearser(self.stage, self._programs, self.memory)
        self._flow: Flow | None = None

    @property
    def facts(self) -> ModelFacts:
        """The limits, with what this way of computing makes of them."""
        runner, fused = self.stage.runner, not isinstance(self.stage.pass_, PlainPass)
        facts: ModelFacts = {**self.stage.limits, "scratch_bytes": self.stage.scratch_bytes, "fused": fused}
        return {**facts, "attention": attention_kernels(runner), "experts": expert_kernels(runner)}

    def prepare(self, request: BatchRequest) -> Callable[[], BatchResult | None]:
        """Do what a rank can do alone; what is returned computes the request, together with all other ranks.

        ValueError if a batch exceeds the limits that ``poc_describe`` tells. The result is None on every rank but one.
        """
        recipe = Recipe.of(request)
        check_shape(BatchShape(min(request["batch"], len(request["nonces"])), recipe.seq_len), self.stage.limits)
        return partial(self._compute, request, recipe)

    def prepare_rehearsal(self, request: BatchRequest, part_seconds: float) -> Callable[[], Rehearsal]:
        """Do the same for passes of as many nonces as the request has: what is returned prepares their repetition.

        ValueError as from `prepare`. Where it can, cuts them into parts of up to ``part_seconds``.
        """
        recipe = Recipe.of(request)
        check_shape(BatchShape(len(request["nonces"]), recipe.seq_len), self.stage.limits)
        return partial(self._rehearse, request, recipe, part_seconds)

    def _rehearse(self, request: BatchRequest, recipe: Recipe, part_seconds: float) -> Rehearsal:
        self._flow = None
        seeds = recipe.seeds(request, request["nonces"])
        try:
            with torch.inference_mode(), self._ranks.together():
                self.stage.load(request["block_hash"], recipe)
                return self._rehearser.rehearse(recipe, seeds, part_seconds)
        except torch.OutOfMemoryError:
            return NO_ROOM

    def _compute(self, request: BatchRequest, recipe: Recipe) -> BatchResult | None:
        flow, self._flow = self._flow, None  # what fails is not gone on with
        if self._programs is not None:
            self._programs.used(recipe)
        if flow is None or not flow.continues_with(request):
            flow = self._new_flow(request, recipe)
        with torch.inference_mode(), self._ranks.together():
            self.stage.load(request["block_hash"], recipe)
            flow.follow(request, lambda following: self._parts(following, flow.batch, recipe) == flow.parts)
            for _ in flow.steps():
                flow.begun(self._step(flow, recipe))
            result = flow.answer()
            self._flow = flow
            return result if self._ranks.answers else None

    def _new_flow(self, request: BatchRequest, recipe: Recipe) -> Flow:
        wanted = min(request["batch"], len(request["nonces"]))
        fitting = self._fitting(wanted, recipe)
        batch = request["batch"] if fitting == wanted else fitting
        return Flow(request, parts=self._parts(request, batch, recipe), batch=batch, stages=self._ranks.stages)

    def _fitting(self, nonces: int, recipe: Recipe) -> int:
        """Return how many of ``nonces`` fit into a forward pass on all ranks. MemoryError if not even one does."""
        if self._program(recipe, nonces) is not None:
            return nonces
        while not self._ranks.agreed(self._has_room_for(nonces, recipe)):
            if nonces == 1:
                raise MemoryError(
                    "the GPU has no room for the forward pass of one nonce: start vLLM with a lower "
                    "--gpu-memory-utilization"
                )
            nonces //= 2
        return nonces

    def _has_room_for(self, nonces: int, recipe: Recipe) -> bool:
        return self.memory.has_room_for(nonces * recipe.seq_len, self.stage.drawn_bytes(recipe, nonces))

    def _step(self, flow: Flow, recipe: Recipe) -> Work:
        """Enqueue this stage's part, hand on what it completes, and take what the stage before does."""
        ranks = self._ranks
        ranks.settle()
        mine, coming = flow.request_at(ranks.stage), flow.request_at(ranks.stage - 1)
        values = list(self._values(flow, mine, recipe)) if mine is not None else []
        work = Work.of(values, self.stage.runner.device)
        if flow.ends_passes and coming is not None and not ranks.has_first_layer:
            flow.received.extend(ranks.receive() for _ in _batched(coming, flow.batch))
        return work

    def _values(self, flow: Flow, request: BatchRequest, recipe: Recipe) -> Iterator[Tensor]:
        """Enqueue a part of all batches; yield their values on the last stage, once they are complete."""
        for nonces in _batched(request, flow.batch):
            output = self._output(flow, request, nonces, recipe)
            if isinstance(output, dict):
                self._ranks.send(output)
            elif output is not None:
                yield output[: len(nonces)]

    def _output(self, flow: Flow, request: BatchRequest, nonces: Sequence[int], recipe: Recipe) -> StageOutput | None:
        program = self._program(recipe, len(nonces))
        if program is None:
            return self.stage.batch(recipe, self._on_device(recipe.seeds(request, nonces)), self._received(flow))
        if flow.part == 0:
            # The CPU hashes while the device computes the step before.
            program.fill(recipe.seeds(request, nonces), self._received(flow))
        return program.run(flow.part if flow.parts > 1 else None)

    def _received(self, flow: Flow) -> dict[str, Tensor]:
        return {} if self._ranks.has_first_layer else flow.received.popleft()

    def _on_device(self, seeds: Tensor) -> Tensor:
        device = self.stage.runner.device
        return seeds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else seeds

    def _program(self, recipe: Recipe, nonces: int) -> Program | None:
        return self._programs.find(recipe, nonces) if self._programs is not None else None

    def _parts(self, request: BatchRequest, batch: int, recipe: Recipe) -> int:
        """Return how many steps each stage takes for the request; several passes run whole, one after the other."""
        program = self._program(recipe, len(request["nonces"]))
        return len(program.parts) if program is not None and len(_batched(request, batch)) == 1 else 1


def _batched(request: BatchRequest, batch: int) -> list[Sequence[int]]:
    nonces = request["nonces"]
    return [nonces[start : start + batch] for start in range(0, len(nonces), batch)]
