# SPDX-License-Identifier: Apache-2.0
"""Requests on their way through the stages of a pipeline, all stages in step.

A stage computes one segment of a forward pass per step, and is a whole pass behind the stage before it. So all have
work while requests are known ahead, and none waits for another within a step. A single stage is a pipeline of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.rpc import STEPS_IN_FLIGHT, BatchRequest, BatchResult
from vllm_poc.worker.results import batch_result


class AsyncOutput(NamedTuple):
    """Values of nonces on their way to the CPU, valid once ``done`` has happened.

    None on most ranks, and from all segments except the last.
    """

    values: Tensor | None
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Sequence[Tensor], device: torch.device) -> AsyncOutput:
        """Fetch the values of all batches, without waiting for them on a GPU."""
        complete = torch.cat(tuple(values)) if values else None
        if device.type != "cuda":
            return cls(complete, None)
        fetched = None
        if complete is not None:
            fetched = torch.empty(complete.shape, dtype=complete.dtype, pin_memory=True)
            fetched.copy_(complete, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(fetched, done)

    def wait(self) -> None:
        """Wait for the device."""
        if self.done is not None:
            self.done.synchronize()

    def result(self, request: BatchRequest) -> BatchResult:
        """Wait for the device, and return what the request asks for, if it is this rank that has it."""
        self.wait()
        if self.values is None:
            return BatchResult(complete=True, nonces=[], not_finite=[])
        return batch_result(self.values, request)


class BatchQueue:
    """Requests of one kind in the order of their answers, each computed in ``segments`` on each stage.

    All ranks get the same calls, so their queues are equal, except for what they compute. ``received`` holds what the
    stage before made for the next forward passes.
    """

    def __init__(self, request: BatchRequest, *, segments: int, batch: int, stages: int) -> None:
        self.segments = segments
        self.batch = batch
        self.received = deque[dict[str, Tensor]]()
        self.stages = stages
        self._requests = deque([_alone(request)])  # without an answer so far
        self._begun = 0  # steps, counted from the first one of the oldest request
        self._outputs = deque[AsyncOutput]()

    @property
    def segment(self) -> int:
        """The segment that every stage computes in the next step."""
        return self._begun % self.segments

    @property
    def ends_passes(self) -> bool:
        """Whether passes end with the next step."""
        return self.segment + 1 == self.segments

    def continues_with(self, request: BatchRequest) -> bool:
        """Whether the request is the oldest one here, and nothing was begun that is not to follow it."""
        following = [known["nonces"] for known in islice(self._requests, 1, None)]
        expected = all(begun == ahead for begun, ahead in zip(following, request["ahead"], strict=False))
        return bool(self._requests) and self._requests[0] == _alone(request) and expected

    def follow(self, request: BatchRequest, is_alike: Callable[[BatchRequest], bool]) -> None:
        """Take in what comes after the request, up to the first one that does not take as many segments.

        Nothing if the first stage has passed by where that belongs: it is answered after all that is here has left.
        """
        for nonces in request["ahead"][len(self._requests) - 1 :]:
            following: BatchRequest = {**_alone(request), "nonces": nonces}
            if self._begun > len(self._requests) * self.segments or not is_alike(following):
                return
            self._requests.append(following)

    def steps(self) -> Iterator[None]:
        """Yield for each step that is to be begun now; `begun` is called in between."""
        while (
            len(self._outputs) < STEPS_IN_FLIGHT
            and self._begun // self.segments < len(self._requests) + self.stages - 1
        ):
            yield

    def request_at(self, stage: int) -> BatchRequest | None:
        """Return what a stage has in the next step."""
        index = self._begun // self.segments - stage
        return self._requests[index] if 0 <= index < len(self._requests) else None

    def begun(self, output: AsyncOutput) -> None:
        """Take in this rank's output of a step."""
        self._outputs.append(output)
        self._begun += 1

    def answer(self) -> BatchResult:
        """Wait for this rank's oldest step; with its last one, the oldest request leaves and is answered."""
        output = self._outputs.popleft()
        if self._begun - len(self._outputs) < self.segments * self.stages:
            output.wait()
            return BatchResult(complete=False, nonces=[], not_finite=[])
        self._begun -= self.segments
        return output.result(self._requests.popleft())


def _alone(request: BatchRequest) -> BatchRequest:
    """Return the request without what comes after it."""
    return {**request, "ahead": []}
