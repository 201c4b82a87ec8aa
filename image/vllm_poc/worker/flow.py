# SPDX-License-Identifier: Apache-2.0
"""Requests on their way through the stages of a pipeline, all stages in step.

A stage computes one part of a forward pass per step, and is a whole pass behind the stage before it. So all have work
while requests are known ahead, and none waits for another within a step. A single stage is a pipeline of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor

from vllm_poc.worker.batches import UNDER_WAY, BatchRequest, BatchResult
from vllm_poc.worker.work import Work


class Flow:
    """Requests of one kind, in the order in which they are to be answered, each in ``parts`` on each stage.

    It is the same on all ranks, which get the same calls, but for what they compute: ``received`` is what the stage
    before made for the forward passes that come next.
    """

    def __init__(self, request: BatchRequest, *, parts: int, batch: int, stages: int) -> None:
        self.parts = parts
        self.batch = batch
        self.received = deque[dict[str, Tensor]]()
        self.stages = stages
        self._requests = deque([_alone(request)])  # without an answer so far
        self._begun = 0  # steps, counted from the first one of the oldest request
        self._works = deque[Work]()

    @property
    def part(self) -> int:
        """The part that every stage computes in the next step."""
        return self._begun % self.parts

    @property
    def ends_passes(self) -> bool:
        """Whether passes end with the next step."""
        return self.part + 1 == self.parts

    def continues_with(self, request: BatchRequest) -> bool:
        """Whether the request is the oldest one here, and nothing was begun that is not to follow it."""
        following = [known["nonces"] for known in islice(self._requests, 1, None)]
        expected = all(begun == ahead for begun, ahead in zip(following, request["ahead"], strict=False))
        return bool(self._requests) and self._requests[0] == _alone(request) and expected

    def follow(self, request: BatchRequest, is_alike: Callable[[BatchRequest], bool]) -> None:
        """Take in what comes after the request, up to the first one that does not take as many parts.

        Nothing if the first stage has passed by where that belongs: it is answered after all that is here has left.
        """
        for nonces in request["ahead"][len(self._requests) - 1 :]:
            following: BatchRequest = {**_alone(request), "nonces": nonces}
            if self._begun > len(self._requests) * self.parts or not is_alike(following):
                return
            self._requests.append(following)

    def steps(self) -> Iterator[None]:
        """Yield for each step that is to be begun now; `begun` is called in between."""
        while len(self._works) < UNDER_WAY and self._begun // self.parts < len(self._requests) + self.stages - 1:
            yield

    def request_at(self, stage: int) -> BatchRequest | None:
        """Return what a stage has in the next step."""
        index = self._begun // self.parts - stage
        return self._requests[index] if 0 <= index < len(self._requests) else None

    def begun(self, work: Work) -> None:
        """Take in this rank's work of a step."""
        self._works.append(work)
        self._begun += 1

    def answer(self) -> BatchResult:
        """Wait for this rank's oldest step; with its last one, the oldest request leaves and is answered."""
        work = self._works.popleft()
        if self._begun - len(self._works) < self.parts * self.stages:
            work.wait()
            return BatchResult(complete=False, nonces=[], not_finite=[])
        self._begun -= self.parts
        return work.result(self._requests.popleft())


def _alone(request: BatchRequest) -> BatchRequest:
    """Return the request without what comes after it."""
    return {**request, "ahead": []}
