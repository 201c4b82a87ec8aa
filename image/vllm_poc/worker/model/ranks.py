# SPDX-License-Identifier: Apache-2.0
"""This worker among the ranks that share the model: tensor parallel within a pipeline stage, stages in a row."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed.parallel_state import GraphCaptureContext, Handle, get_pp_group, get_tp_group, get_world_group

from vllm_poc.logs import get_logger

_log = get_logger(__name__)


class OtherRankError(Exception):
    """Another rank cannot run the batch; its own answer says why."""


class Ranks:
    """Where this worker stands, and how a batch passes from stage to stage: as vLLM's own forward pass does."""

    def __init__(self) -> None:
        self._world = get_world_group()
        self._tensor = get_tp_group()
        self._pipeline = get_pp_group()
        self._sent: list[Handle] = []
        self._sent_before: list[Handle] = []

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return bool(self._world.world_size == 1)

    @property
    def stages(self) -> int:
        """Length of the pipeline."""
        return int(self._pipeline.world_size)

    @property
    def stage(self) -> int:
        """Which stage this is, counted from 0."""
        return int(self._pipeline.rank_in_group)

    @property
    def has_first_layer(self) -> bool:
        """Whether this is the stage that takes the inputs."""
        return bool(self._pipeline.is_first_rank)

    @property
    def has_last_layer(self) -> bool:
        """Whether this is the stage that makes the results."""
        return bool(self._pipeline.is_last_rank)

    @property
    def answers(self) -> bool:
        """Whether this is the one rank that returns a batch's result: the first of the last stage."""
        return bool(self._pipeline.is_last_rank and self._tensor.rank_in_group == 0)

    def agree(self, *, ready: bool) -> None:
        """Wait for all ranks; OtherRankError unless all are ready.

        Comes before the first collective of a batch: a rank that failed while it prepared would leave the
        others waiting inside that collective for ever.
        """
        if not self.agreed(ready) and ready:
            raise OtherRankError("another rank could not prepare the batch")

    def agreed(self, ready: bool) -> bool:
        """Wait for all ranks, and say whether all are ready."""
        return self.largest(-float(ready)) < 0

    def in_step(self, succeeded: bool | None) -> bool:
        """Wait for all ranks, and say whether none has failed; None from those that had nothing to do.

        Ends this process if some failed where others did not: those are left within a collective for ever.
        """
        failed, done = self.largest(float(succeeded is False)), self.largest(float(succeeded is True))
        if failed and done:
            _log.error("a rank failed in the middle of PoC's parity check, and others did not: ending this worker")
            os._exit(1)
        return not failed

    def largest(self, value: float) -> float:
        """Wait for all ranks, and return the largest of their values."""
        if self.alone:
            return value
        values = torch.tensor([value])
        all_reduce(values, op=ReduceOp.MAX, group=self._world.cpu_group)
        return float(values)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the collectives of a batch. With other ranks, an error ends this process.

        The others wait inside a collective that this rank has left, and no chat could run any more. A worker's
        death is what vLLM notices at once: it ends the server, which Kubernetes starts anew.
        """
        try:
            yield
        except Exception:
            if self.alone:
                raise
            _log.exception("PoC failed between collectives, which the other ranks cannot know: ending this worker")
            os._exit(1)

    def receive(self) -> dict[str, Tensor]:
        """Return what the stage before sent, by name; nothing on the first."""
        if self.has_first_layer:
            return {}
        received = self._pipeline.recv_tensor_dict(all_gather_group=self._tensor)
        return dict(received or {})

    def send(self, tensors: dict[str, Tensor]) -> None:
        """Let the stage's output go to the next stage, which may take it later. Do not overwrite it."""
        self._sent += self._pipeline.isend_tensor_dict(tensors, all_gather_group=self._tensor)

    def settle(self) -> None:
        """Let the device wait until the next stage has what was sent before the last call of this."""
        for handle in self._sent_before:
            handle.wait()
        self._sent_before, self._sent = self._sent, []

    @contextmanager
    def graph_capture(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Make ``stream`` the current one, and the ranks' collectives fit for a CUDA graph, while the context lasts.

        As vLLM's own `graph_capture`, which takes a new stream each time; PyTorch keeps memory for each for ever.
        """
        context = GraphCaptureContext(stream)
        with self._tensor.graph_capture(context), self._pipeline.graph_capture(context):
            yield
