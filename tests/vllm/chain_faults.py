# SPDX-License-Identifier: Apache-2.0
"""A worker extension by which tests break the decode scheme, or let it do on a CPU what only a GPU does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, cast

from tests.vllm.faults import FaultExtension
from vllm_poc.worker.passes.plain import PlainPass

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_poc.worker.graphs import StepGraphs
    from vllm_poc.worker.model.adapter import AttentionPlan
    from vllm_poc.worker.model.scratch import BatchShape


class ChainFaultExtension(FaultExtension):
    """PoC's extension with the methods that tests of chains need."""

    def poc_test_capture_steps(self, failures: int) -> None:
        """Capture decode steps from now on, after so many tries that fail."""
        assert self._poc_decoder is not None
        self._poc_test_steps = _ReplayedSteps(failures)
        self._poc_decoder._graphs = cast("StepGraphs", self._poc_test_steps)
        self._poc_decoder.forget()

    def poc_test_capture_tries(self) -> int:
        """Return how often it was tried."""
        return self._poc_test_steps.tries

    def poc_test_waiting_passes(self) -> int:
        """Return how many forward passes wait between layers."""
        return sum(thread.name == "poc-forward-pass" for thread in threading.enumerate())

    def poc_test_other_pass(self, reflects: bool) -> None:
        """Let the model have another pass than vLLM's own, which may leave out the reflections of chains."""
        stage = self._poc().stage
        stage.pass_ = _OtherPass(PlainPass(stage.adapter), reflects)


class _ReplayedSteps:
    """Stands in for `StepGraphs` on a CPU: a step that is repeated is computed anew, by the last of its graphs."""

    def __init__(self, failures: int) -> None:
        self.tries = 0
        self._failures = failures

    def capture(
        self, step: Callable[[], None], cuts: Sequence[nn.Module], _resumed: Callable[[], None]
    ) -> list[_ReplayedStep]:
        self.tries += 1
        if self.tries <= self._failures:
            raise RuntimeError("this device has no graphs")
        return [*(_ReplayedStep(lambda: None) for _ in cuts), _ReplayedStep(step)]


class _ReplayedStep(NamedTuple):
    replay: Callable[[], None]


class _OtherPass:
    needs_cache = True

    def __init__(self, own: PlainPass, reflects: bool) -> None:
        self._own = own
        self._reflects = reflects

    def plan(self, shape: BatchShape) -> AttentionPlan:
        return self._own.plan(shape)

    def workspace(self) -> object:
        return self._own.workspace()

    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        return self._own.applied(vectors, shape)

    def continuing(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        return self._own.continuing(vectors if self._reflects else {}, shape)
