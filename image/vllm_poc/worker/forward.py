# SPDX-License-Identifier: Apache-2.0
"""PoC batches on the served model, from a request to its result, together with all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_poc.worker.batches import BatchRequest, BatchResult, ModelFacts, Rehearsal
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
        self.memory = Memory(runner.device)
        self._rehearser = Rehearser(self.stage, self._programs, self.memory)
        self._begun: Work | None = None

    @property
    def facts(self) -> ModelFacts:
        """The limits, with what this way of computing makes of them."""
        runner, fused = self.stage.runner, not isinstance(self.stage.pass_, PlainPass)
        facts: ModelFacts = {**self.stage.limits, "scratch_bytes": self.stage.scratch_bytes, "fused": fused}
        return {**facts, "attention": attention_kernels(runner), "experts": expert_kernels(runner)}

    def prepare(self, request: BatchRequest) -> Callable[[], BatchResult | None]:
        """Do what a rank can do alone; what is returned computes the request, together with all other ranks.

        ValueError if a batch exceeds the limits that ``poc_describe`` tells, or if the part before was not asked for.
        The result is None on every rank but one.
        """
        recipe = Recipe.of(request)
        check_shape(BatchShape(min(request["batch"], len(request["nonces"])), recipe.seq_len), self.stage.limits)
        if request["part"] != 0 and not self._has_begun(request):
            raise ValueError(f"part {request['part']} of a forward pass was asked for, but not the one before it")
        return partial(self._compute, request, recipe)

    def prepare_rehearsal(self, request: BatchRequest, part_seconds: float) -> Callable[[], Rehearsal]:
        """Do the same for passes of as many nonces as the request has: what is returned prepares their repetition.

        ValueError as from `prepare`. Where it can, cuts them into parts of up to ``part_seconds``.
        """
        recipe = Recipe.of(request)
        check_shape(BatchShape(len(request["nonces"]), recipe.seq_len), self.stage.limits)
        return partial(self._rehearse, request, recipe, part_seconds)

    def _rehearse(self, request: BatchRequest, recipe: Recipe, part_seconds: float) -> Rehearsal:
        self._begun = None
        seeds = recipe.seeds(request, request["nonces"])
        try:
            with torch.inference_mode(), self._ranks.together():
                self.stage.load(request["block_hash"], recipe)
                return self._rehearser.rehearse(recipe, seeds, part_seconds)
        except torch.OutOfMemoryError:
            return NO_ROOM

    def _compute(self, request: BatchRequest, recipe: Recipe) -> BatchResult | None:
        request = {**request, "batch": self._fitting(request["batch"], recipe)}
        with torch.inference_mode(), self._ranks.together():
            work = self._taken(request) or self._begin(_alone(request), recipe)
            following = _following(request, work.parts)
            if following is not None:
                self._begun = self._begin(following, recipe)
            return work.result() if self._ranks.answers else None

    def _fitting(self, nonces: int, recipe: Recipe) -> int:
        """Return how many of ``nonces`` fit into a forward pass on all ranks. MemoryError if not even one does."""
        if self._program(recipe, nonces) is not None:
            return nonces
        while not self._ranks.agreed(self.memory.has_room_for(nonces * recipe.seq_len)):
            if nonces == 1:
                raise MemoryError(
                    "the GPU has no room for the forward pass of one nonce: start vLLM with a lower "
                    "--gpu-memory-utilization"
                )
            nonces //= 2
        return nonces

    def _has_begun(self, request: BatchRequest) -> bool:
        return self._begun is not None and self._begun.request == _alone(request)

    def _taken(self, request: BatchRequest) -> Work | None:
        """Return the request's work if it has begun. Other work overwrites a forward pass in parts."""
        begun, matches = self._begun, self._has_begun(request)
        if begun is not None and (matches or begun.parts > 1):
            self._begun = None
        return begun if matches else None

    def _begin(self, request: BatchRequest, recipe: Recipe) -> Work:
        self.stage.load(request["block_hash"], recipe)
        values = [self._values(request, recipe, nonces) for nonces in _batched(request)]
        found = [part for part in values if part is not None]
        return Work.of(request, self._parts(request, recipe), found, self.stage.runner.device)

    def _values(self, request: BatchRequest, recipe: Recipe, nonces: Sequence[int]) -> Tensor | None:
        """Enqueue a batch, or a part of one; return its values on the last stage, once they are complete."""
        program = self._program(recipe, len(nonces))
        output: StageOutput | None
        if program is None:
            seeds = self._on_device(recipe.seeds(request, nonces))
            output = self.stage.batch(recipe, seeds, self._ranks.receive())
        else:
            if request["part"] == 0:
                # The CPU hashes while the device computes the batch before.
                program.fill(recipe.seeds(request, nonces), self._ranks.receive())
            output = program.run(request["part"] if self._parts(request, recipe) > 1 else None)
        if isinstance(output, dict):
            self._ranks.send(output)
            return None
        return output[: len(nonces)] if output is not None else None

    def _on_device(self, seeds: Tensor) -> Tensor:
        device = self.stage.runner.device
        return seeds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else seeds

    def _program(self, recipe: Recipe, nonces: int) -> Program | None:
        return self._programs.find(recipe, nonces) if self._programs is not None else None

    def _parts(self, request: BatchRequest, recipe: Recipe) -> int:
        """Return how many requests the request's forward pass takes; several passes at once run whole."""
        program = self._program(recipe, len(request["nonces"]))
        return len(program.parts) if program is not None and len(_batched(request)) == 1 else 1


def _alone(request: BatchRequest) -> BatchRequest:
    return {**request, "ahead": []}


def _following(request: BatchRequest, parts: int) -> BatchRequest | None:
    """Return what is begun before the request is answered."""
    if request["part"] + 1 < parts:
        return {**_alone(request), "part": request["part"] + 1}
    if request["ahead"]:
        return {**_alone(request), "part": 0, "nonces": request["ahead"]}
    return None


def _batched(request: BatchRequest) -> list[Sequence[int]]:
    nonces, size = request["nonces"], request["batch"]
    return [nonces[start : start + size] for start in range(0, len(nonces), size)]
