# SPDX-License-Identifier: Apache-2.0
"""A worker extension by which the tests find a worker's process and break its model."""

import os
from functools import partial

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group, get_tp_group

from tests.vllm.replay import replay_passes
from tests.vllm.worker_checks import CheckingExtension
from vllm_poc.worker.model_runner import Stage
from vllm_poc.worker.passes.parity_check import hidden_states


class FaultExtension(CheckingExtension):
    """PoC's extension with the methods that the tests of faults need."""

    rank: int  # of vLLM's worker

    def poc_test_process(self) -> int:
        """Return the worker's process id."""
        return os.getpid()

    def poc_test_break_scratch(self, rank: int | None) -> None:
        """Let the worker of this rank, and no other, fail before its batches meet the other ranks."""
        vars(self).pop("_poc", None)
        if self.rank == rank:
            self._poc = _out_of_memory  # type: ignore[assignment,method-assign]

    def poc_test_break_layer(self, rank: int) -> None:
        """Let the model of this rank fail in the middle of a forward pass."""
        self._poc_model_runner = None  # on all ranks: what was recorded before would not meet the hook
        self._poc()  # whose checks must not meet it
        if self.rank == rank:
            self.model_runner.get_model().model.layers[-1].register_forward_hook(_fail_among_others)

    def poc_test_lack_memory(self, rank: int | None, tokens: int = 0) -> None:
        """Let this rank, and no other, run out of memory in the middle of passes of more tokens, from now on."""
        self._poc_test_hooks = getattr(self, "_poc_test_hooks", [])
        while self._poc_test_hooks:
            self._poc_test_hooks.pop().remove()
        if self.rank == rank:
            model = self.model_runner.get_model().model
            layer = model.layers[model.end_layer - 1]  # the last one of its stage
            self._poc_test_hooks.append(layer.register_forward_hook(partial(_lack_memory, tokens)))

    def poc_test_replay(self) -> None:
        """Ready passes for repetition on a CPU too, until the model is made anew."""
        replay_passes(self._poc())

    def poc_test_anew(self) -> None:
        """Forget the model, and what was captured."""
        self._poc_model_runner = None

    def poc_test_memory_fits(self, fits: bool) -> None:
        """Let this worker find that a batch fits into its memory, or that none does."""
        self._poc().memory.fits = lambda tokens, drawn=0: fits  # type: ignore[method-assign]

    def poc_test_parity(self, failing: int | None) -> list[list[int]] | None:
        """Compute what the parity check compares, with one rank that fails; return the shapes of what comes out."""
        stage = self._poc().stage
        if self.rank == failing:
            stage = Stage(stage.adapter, stage.limits, stage.pass_)
            stage.forward = _fail  # type: ignore[assignment,method-assign]
        found = hidden_states(stage)
        return [list(hidden.shape) for hidden in found] if found is not None else None


def _out_of_memory(*_: object) -> None:
    raise MemoryError("no memory on this rank")


def _fail(*_: object) -> None:
    raise RuntimeError("this rank fails")


def _lack_memory(most: int, _module: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
    if len(inputs[0]) > most:
        raise torch.OutOfMemoryError("no memory in the middle of a pass")


def _fail_among_others(_module: nn.Module, _inputs: object, _output: Tensor) -> None:
    """Fail where no dry run shows it: with the other ranks' collectives."""
    if not any("all_reduce" in vars(group) for group in (get_tp_group(), get_pp_group())):
        raise RuntimeError("this layer fails")
