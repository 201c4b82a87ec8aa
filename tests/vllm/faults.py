# SPDX-License-Identifier: Apache-2.0
"""A worker extension by which the tests find a worker's process and break its model."""

import os

from torch import Tensor, nn

from tests.vllm.worker_checks import CheckingExtension


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
        if self.rank == rank:
            self.model_runner.get_model().model.layers[-1].register_forward_hook(_fail)


def _out_of_memory() -> None:
    raise MemoryError("no memory on this rank")


def _fail(_module: nn.Module, _inputs: object, _output: Tensor) -> None:
    raise RuntimeError("this layer fails")
