# SPDX-License-Identifier: Apache-2.0
"""This worker among the ranks that share the model: tensor parallel within a pipeline stage, stages in a row."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import (
    GraphCaptureContext,
    GroupCoordinator,
    Handle,
    get_pp_group,
    get_tp_group,
    get_world_group,
)

from vllm_poc.logs import get_logger

_log = get_logger(__name__)

#: How a dry run ends; the worst of all ranks counts.
_LACKS_MEMORY, _FAILED = 1, 2


class OtherRankError(Exception):
    """Another rank cannot run the batch; its own answer says why."""


#: What CUDA, Triton and cuBLAS say when they find no room beside torch's.
_NO_ROOM = ("out of memory", "ALLOC_FAILED")


def lacks_memory(error: object) -> bool:
    """Whether it says that the device has no room, which may pass. Not all of CUDA says so by its type."""
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _NO_ROOM)
    return isinstance(error, MemoryError)


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

    def all_fit(self, error: Exception | None) -> bool:
        """Wait for all ranks, and say whether none lacks memory. Raises what else went wrong on one.

        ``error`` is this rank's; OtherRankError where it is another's.
        """
        worst = self.largest(0 if error is None else _LACKS_MEMORY if lacks_memory(error) else _FAILED)
        if worst < _FAILED:
            return worst < _LACKS_MEMORY
        if error is not None and not lacks_memory(error):
            raise error
        raise OtherRankError("another rank could not compute the batch")

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

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Let a forward pass run on this rank alone while the context lasts, as much memory as it would take.

        What other ranks would add is left out, so its results are of no use. A rank that fails here holds nobody up.
        """
        groups = [
            group for group in {self._world, self._tensor, self._pipeline, *_expert_groups()} if _is_shared(group)
        ]
        own = [(group, name, stand_in(group)) for group in groups for name, stand_in in _STAND_INS.items()]
        for group, name, stand_in in own:
            setattr(group, name, stand_in)
        try:
            yield
        finally:
            for group, name, _ in own:
                delattr(group, name)  # the class has its own

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


def _is_shared(group: GroupCoordinator) -> bool:
    return bool(group.world_size > 1)


def _expert_groups() -> list[GroupCoordinator]:
    group = getattr(parallel_state, "_EP", None)  # there is none without experts
    return [group] if group is not None else []


def _copied(_: GroupCoordinator) -> Callable[..., Tensor]:
    return lambda x: x.clone()


def _repeated(group: GroupCoordinator) -> Callable[..., Tensor]:
    return lambda x, dim=-1: torch.cat([x] * group.world_size, dim=dim)


def _repeated_for_one(group: GroupCoordinator) -> Callable[..., Tensor | None]:
    return lambda x, dst=0, dim=-1: torch.cat([x] * group.world_size, dim=dim) if group.rank_in_group == dst else None


def _own_part(group: GroupCoordinator) -> Callable[..., Tensor]:
    return lambda x, dim=-1: x.chunk(group.world_size, dim)[group.rank_in_group].contiguous()


def _unchanged(_: GroupCoordinator) -> Callable[..., Tensor]:
    return lambda x, src=0: x


#: What takes the place of each collective of vLLM's groups that a forward pass calls: as many bytes, and no other rank.
_STAND_INS: dict[str, Callable[[GroupCoordinator], Callable[..., Tensor | None]]] = {
    "all_reduce": _copied,
    "_all_reduce_out_place": _copied,
    "all_gather": _repeated,
    "_all_gather_out_place": _repeated,
    "reduce_scatter": _own_part,
    "_reduce_scatter_out_place": _own_part,
    "gather": _repeated_for_one,
    "broadcast": _unchanged,
}
