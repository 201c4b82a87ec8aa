# SPDX-License-Identifier: Apache-2.0
"""Named nonces, given out to the pods that are free, each pod a chunk at a time.

What is about the latest block comes first, since the network judges a block's results for a while only: after an outage
what has waited for long holds up nothing new. Of one block it is first come first served.

Chains of the decode scheme are compared by the pods, and only by those that offer the scheme. The verdict is made here,
from what all of them tell of their nonces.

A pod that fails gives its chunk back, and rests; the next free pod takes it. Pods that generate a round compute
named nonces beside it. A pod that is paused gets nothing, and one that was too busy nothing for a while, as long as
there is another. While no pod answers, or all are paused, work waits.
"""

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from time import monotonic
from typing import Any

from poc_gateway.errors import RETRY_AFTER, Refusal
from poc_gateway.node_api.cluster import ReadyPod, ReadyPods
from poc_operator.clients.errors import NotAPodOfOurs, PodError, PodRefused, StoreError
from poc_operator.observed import PodView
from vllm_poc.logs import bound
from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.chain_verdict import NonceVerdict
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse, Validation
from vllm_poc.wire.messages import Protocol, Scheme

_log = logging.getLogger(__name__)

#: Seconds between two looks at the pods while work waits.
LOOK_SECONDS = 2.0
#: Seconds that a pod gets nothing after it failed.
REST_SECONDS = 5.0
#: Seconds that a pod which was too busy gets nothing, as long as there is another.
DECLINED_SECONDS = 60.0
#: Refusals of a pod that may compute the same later: its vLLM is paused, or has more to do than it gets done.
_NOT_NOW = {"Busy", "EngineNotReady", "Paused", "QueueFull", "ServerEnds"}
#: Chunks of one request that may fail in a row.
FAILURES = 10
#: Refusals that every pod would give, since they are about the request.
_FINAL = {
    "InvalidRequest": HTTPStatus.UNPROCESSABLE_ENTITY,
    "SequenceTooLong": HTTPStatus.UNPROCESSABLE_ENTITY,
    "ModelMismatch": HTTPStatus.CONFLICT,
    "ModelUnsupported": HTTPStatus.CONFLICT,
}
#: Most batches and most nonces of a chunk: a large model computes a few nonces per second, and what a pod that fails
#: had begun is computed again.
_BATCHES = 4
_NONCES = 200
#: Bytes of an answer's vectors, well below what the pods' client accepts.
_ANSWER_BYTES = 512 * 1024

_ASKED: dict[str, Any] = {
    "wait": True,
    "beside_round": True,
    "url": None,
    "callback_url": None,
    "round_id": None,
}
#: What besides differs where results are compared here.
_UNJUDGED: dict[str, Any] = {"validation": None, "stat_test": None}

#: A vector as base64, a distance, or how a chain compares; None where the pod had no finite result.
Value = str | float | NonceVerdict | None


@dataclass(eq=False)
class Work:
    """One request and how far it got. ``begun`` once a pod had a chunk of it."""

    id: str
    request: GenerateRequest
    done: "asyncio.Future[None]"
    waiting: deque[int]
    values: dict[int, Value] = field(default_factory=dict)
    begun: bool = False
    failures: int = 0

    def take(self, pods: int) -> list[int]:
        """Take the next chunk."""
        self.begun = True
        size = _size_of(self.request, len(self.waiting), pods)
        return [self.waiting.popleft() for _ in range(size)]

    def give_back(self, nonces: Sequence[int], error: PodError) -> None:
        """Let another pod compute the chunk; fail if pods keep failing, or the request is at fault."""
        self.waiting.extendleft(reversed(nonces))
        if _is_not_now(error):
            return
        self.failures += 1
        if isinstance(error, PodRefused) and error.reason in _FINAL:
            self._fail(_FINAL[error.reason], error.reason, str(error))
        elif self.failures >= FAILURES:
            detail = f"{FAILURES} pods in a row failed to compute nonces, the last with: {error}"
            self._fail(HTTPStatus.SERVICE_UNAVAILABLE, "PodsFailed", detail)

    def put(self, values: dict[int, Value]) -> None:
        """Take over what a pod computed."""
        self.failures = 0
        self.values.update(values)
        if len(self.values) == len(self.request.nonces) and not self.done.done():
            self.done.set_result(None)

    def give_up(self, why: str) -> None:
        """End the work if it has not ended: nobody asks for it any more."""
        self._fail(HTTPStatus.GONE, "GivenUp", why)

    def _fail(self, status: HTTPStatus, reason: str, detail: str) -> None:
        if not self.done.done():
            headers = RETRY_AFTER if status is HTTPStatus.SERVICE_UNAVAILABLE else None
            self.done.set_exception(Refusal(status, reason, detail, headers=headers))


class Dispatcher:
    """Splits all work over the pods; `run` must be running."""

    def __init__(self, ready_pods: ReadyPods, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._ready_pods = ready_pods
        self._look_seconds = look_seconds
        self._works: list[Work] = []
        self._busy: dict[str, asyncio.Task[None]] = {}  # by pod uid
        self._resting: dict[str, float] = {}  # until when, as the next
        self._declined: dict[str, float] = {}
        self._free: Sequence[ReadyPod] = ()
        self._decoding: frozenset[str] = frozenset()  # pods that offer the decode scheme
        self._polled = float("-inf")
        self._wake = asyncio.Event()

    @property
    def nonces(self) -> int:
        """The nonces of all requests that are not done."""
        return sum(len(work.request.nonces) for work in self._works)

    @property
    def works(self) -> Sequence[Work]:
        """The requests that are not done. May be asked by another thread."""
        return tuple(self._works)

    def add(self, id_: str, request: GenerateRequest) -> Work:
        """Queue a request, behind those about the same block and before those about earlier ones."""
        work = Work(id_, request, asyncio.get_running_loop().create_future(), deque(request.nonces))
        insort(self._works, work, key=lambda one: -one.request.block_height)
        self._wake.set()
        return work

    async def finish(self, work: Work) -> dict[int, Value]:
        """Wait for the work's values; dropped if the waiting is cancelled. Refusal if it fails."""
        try:
            await work.done
            return work.values
        finally:
            self.drop(work)

    def drop(self, work: Work) -> None:
        """Forget the work; pods that compute some of it are told so."""
        work.done.cancel()
        self._works.remove(work)

    async def run(self) -> None:
        """Give out work until cancelled; then the pods drop what they compute."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._give_out()
                except Exception:
                    # Work that waits must outlive whatever one look at the pods runs into.
                    _log.exception("work for the pods could not be given out, and is tried again")
                # Without work only new work matters; with work also pods that become free elsewhere.
                limit = self._look_seconds if self._next() is not None else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit):
                        await self._wake.wait()
        finally:
            tasks = list(self._busy.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self, pod: PodView | None = None) -> Work | None:
        """Return the next work that the pod, or any, can compute; None if there is none."""
        waiting = (work for work in self._works if work.waiting and not work.done.done())
        return next((work for work in waiting if pod is None or self._can_compute(pod, work)), None)

    def _can_compute(self, pod: PodView, work: Work) -> bool:
        return work.request.protocol is not Protocol.DECODE or pod.uid in self._decoding

    async def _give_out(self) -> None:
        if self._next() is None:
            return
        await self._poll()
        declined = {found.pod.uid for found in self._free if self._declined.get(found.pod.uid, 0.0) > monotonic()}
        left_out = declined if len(declined) < len(self._free) else set[str]()
        free = [found.pod for found in self._free if found.pod.uid not in left_out and self._may_work(found.pod.uid)]
        for pod in free:
            work = self._next(pod)
            if work is None:
                continue
            nonces = work.take(len(self._free))
            with bound(request=work.id, pod=pod.name):
                self._busy[pod.uid] = asyncio.create_task(self._compute(work, pod, nonces))

    def _may_work(self, uid: str) -> bool:
        return uid not in self._busy and self._resting.get(uid, 0.0) <= monotonic()

    async def _poll(self) -> None:
        """See which pods answer, unless that was seen just now; idle ones come first."""
        if monotonic() - self._polled < self._look_seconds:
            return
        try:
            found = await self._ready_pods.poll()
        except StoreError as error:
            _log.warning("pods cannot be listed, work goes to those that are known: %s", error)
            return
        self._polled = monotonic()
        self._free = sorted((one for one in found if one.computes_named_nonces), key=lambda one: not one.idle)
        if any(work.request.protocol is Protocol.DECODE for work in self._works):
            pods = [one.pod for one in found]
            told = zip(pods, await self._ready_pods.versions(pods), strict=True)
            self._decoding = frozenset(pod.uid for pod, one in told if one is not None and Scheme.DECODE in one.offers)
        for until in (self._resting, self._declined):
            for uid in [uid for uid, over in until.items() if over <= monotonic()]:
                del until[uid]

    async def _compute(self, work: Work, pod: PodView, nonces: list[int]) -> None:
        asked = asyncio.ensure_future(self._ready_pods.generate(pod, _request_of(work.request, nonces)))
        try:
            # Nobody waits for work that is over: its client went away, or another chunk failed for good.
            either: list[asyncio.Future[Any]] = [asked, work.done]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                work.put(_values_of(work.request, nonces, asked.result()))
        except PodError as error:
            self._failed(work, pod, nonces, error)
        except ValueError as error:
            self._failed(work, pod, nonces, NotAPodOfOurs(str(error)))
        finally:
            asked.cancel()
            del self._busy[pod.uid]
            self._wake.set()

    def _failed(self, work: Work, pod: PodView, nonces: list[int], error: PodError) -> None:
        _log.warning("the pod did not compute %d nonces: %s", len(nonces), error)
        self._resting[pod.uid] = monotonic() + REST_SECONDS
        if _is_not_now(error):
            self._declined[pod.uid] = monotonic() + DECLINED_SECONDS
        work.give_back(nonces, error)


def _is_not_now(error: PodError) -> bool:
    return isinstance(error, PodRefused) and error.reason in _NOT_NOW


def _size_of(request: GenerateRequest, waiting: int, pods: int) -> int:
    """Return the nonces of the next chunk: an even share, but no less than a batch and no more than is prudent.

    A batch of chains takes as long as a smaller one. And no chunk of them is tiny: a pod compares none of its chains if
    more than a tenth and more than one are not finite.
    """
    if request.protocol is Protocol.DECODE:
        return -(-waiting // -(-waiting // _NONCES))
    most = min(_BATCHES * request.batch_size, _NONCES)
    if request.params is not None:
        most = min(most, max(1, _ANSWER_BYTES // (3 * request.params.k_dim + 64)))
    share = -(-len(request.nonces) // max(pods, 1))
    return min(max(share, request.batch_size), most, waiting)


def _request_of(request: GenerateRequest, nonces: Sequence[int]) -> GenerateRequest:
    """Return what a pod is asked, also between the slices of a round: results to be compared here, or chains there."""
    asked = _ASKED | {"nonces": list(nonces)}
    if request.protocol is not Protocol.DECODE or request.validation is None:
        return request.model_copy(update=asked | _UNJUDGED)
    claims = {artifact["nonce"]: artifact for artifact in request.validation.artifacts}
    asked["validation"] = Validation(artifacts=[claims[nonce] for nonce in nonces])
    if (enforced := request.enforced_k_steps) is not None:
        asked["enforced_k_steps"] = {nonce: enforced[nonce] for nonce in nonces}
    return request.model_copy(update=asked)


def _values_of(
    request: GenerateRequest, nonces: Sequence[int], answer: GeneratedResponse | ValidatedResponse
) -> dict[int, Value]:
    """Return a pod's results by nonce. ValueError if they are not those of the nonces."""
    values: dict[int, Value] = dict.fromkeys(answer.not_computed)
    if request.protocol is Protocol.DECODE:
        values |= _compared(answer)
    elif isinstance(answer, ValidatedResponse):
        raise ValueError("the pod answered a verdict that it was not asked for")
    elif request.params is not None:
        for artifact in answer.artifacts or []:
            decode_vector(artifact["vector_b64"], request.params.k_dim)
            values[artifact["nonce"]] = artifact["vector_b64"]
    else:
        values.update(zip(answer.nonces or [], answer.distances or [], strict=True))
    if values.keys() != set(nonces):
        raise ValueError(f"the pod answered for {len(values)} nonces, not for the {len(nonces)} that it was asked for")
    return values


def _compared(answer: GeneratedResponse | ValidatedResponse) -> dict[int, Value]:
    """Return how each chain compares; None for one that could not be. ValueError if the answer does not say so."""
    if not isinstance(answer, ValidatedResponse) or answer.per_nonce is None:
        raise ValueError("the pod answered without per_nonce, the comparison of each chain")
    if answer.rebuilt_codebook:
        raise ValueError("the pod's codebook is not the network's: set VLLM_POC_DECODE_CODEBOOK for it")
    # Reference pods name those that they could not compare by the network's word alone.
    return {**dict.fromkeys(answer.excluded_nonces or []), **{one.nonce: one for one in answer.per_nonce}}
