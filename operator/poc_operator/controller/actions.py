# SPDX-License-Identifier: Apache-2.0
"""What a plan orders, and what pods answer. Orders run beside the round's loop, one at a time for each pod: a pod
that is slow to answer holds up no other. Named nonces are asked for beside everything else.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

from pydantic import AnyHttpUrl

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import EvictionRefused, PodBusy, PodError, PodRefused, StoreError, StoreForbidden
from poc_operator.clients.pods.client import ClientOf, PodClient, base_url
from poc_operator.controller.event_loop import FewRequests
from poc_operator.controller.kinds import Sources
from poc_operator.controller.logs import ObjectLogger
from poc_operator.observed import Answer, PodReport, PodView
from poc_operator.planning.snapshot import (
    Action,
    AskPod,
    DecideRivals,
    DeletePod,
    DeleteWork,
    ExtendPod,
    StartPod,
    StopPod,
    WorkEvent,
)
from vllm_poc.logs import bound
from vllm_poc.wire.answers import CommandResponse
from vllm_poc.wire.messages import InitGenerateRequest

Emit = Callable[[WorkEvent], None]

#: A pod that refuses to start is asked again after so many seconds, each time after twice as many.
REFUSED_SECONDS = 5.0
MOST_REFUSED_SECONDS = 60.0
#: The same for pods whose work was stopped for a start that they refused: it would be stopped for each try.
SPARED_SECONDS = 60.0
MOST_SPARED_SECONDS = 3600.0
#: Seconds between two tries to evict a pod that may not be.
EVICTION_SECONDS = 30.0


class LeaseLost(PodError):  # noqa: N818 - reads as a state, like the other errors of pods
    """Nothing was sent: another operator may act by now."""


async def _client_to_order(clients: ClientOf, pod: PodView, may_act: Callable[[], bool]) -> PodClient:
    """Return the client for an order that is sent at once.

    LeaseLost if the Lease has run out since the order was planned, as in a process that stood still: another operator
    may have given the pod other work.
    """
    client = await clients.of(pod.namespace)
    if not may_act():
        raise LeaseLost(f"pod {pod.name} is told nothing: the operator's Lease has run out")
    return client


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """The last one of ``count`` in a row: reason and message, and when it came.

    Other work had been stopped for ``takings`` of them, the last time at ``taken``.
    """

    told: tuple[str, str]
    at: float
    count: int
    taken: float = float("-inf")
    takings: int = 0

    def counts(self, now: float) -> bool:
        """Whether the pod is not to be asked again yet."""
        return now < self.at + _growing(REFUSED_SECONDS, self.count, MOST_REFUSED_SECONDS)

    def spares(self, now: float) -> bool:
        """Whether no work is to be stopped to ask the pod again."""
        return now < self.taken + _growing(SPARED_SECONDS, self.takings, MOST_SPARED_SECONDS)


def _growing(seconds: float, count: int, most: float) -> float:
    return min(seconds * 2.0 ** min(count - 1, 16), most)


class Refusals:
    """Pods that refused to start, by their uids. ``clock`` returns seconds of any monotonic clock.

    A refusal counts for a while, so that slots do not go to and fro between pods that refuse. Then it is forgotten, and
    the pod is asked again: later, and ever later, if work of others would be stopped for that, as it was before.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, _Refusal] = {}

    def add(self, uid: str, reason: str, message: str, *, took: bool = False) -> None:
        """Remember that a pod refused; ``took`` if other work was stopped for that."""
        now, told = self._clock(), (reason, message)
        before = self._found.get(uid) or _Refusal(told, now, 0)
        found = dataclasses.replace(before, told=told, at=now, count=before.count + 1)
        if took:
            takings = found.takings + 1 if now < found.taken + 2 * MOST_SPARED_SECONDS else 1
            found = dataclasses.replace(found, taken=now, takings=takings)
        self._found[uid] = found

    def of(self, uid: str) -> tuple[str, str] | None:
        """Return the pod's refusal, if it counts still."""
        found = self._found.get(uid)
        return found.told if found is not None and found.counts(self._clock()) else None

    def spares(self, uid: str) -> bool:
        """Whether no work is to be stopped to ask the pod again."""
        found = self._found.get(uid)
        return found is not None and found.spares(self._clock())

    def forget(self, uid: str) -> None:
        """Forget a pod: it has accepted a start."""
        self._found.pop(uid, None)

    def keep(self, uids: Container[str]) -> None:
        """Forget all pods but these."""
        self._found = {uid: found for uid, found in self._found.items() if uid in uids}


class PodActions:
    """The actions of one object that are under way, and what pods answered to them.

    ``wake`` is set by news, and ``clock`` returns seconds of any monotonic clock. ``few`` is shared by all objects.
    """

    def __init__(
        self,
        *,
        sources: Sources,
        clients: ClientOf,
        few: FewRequests,
        emit: Emit,
        wake: asyncio.Event,
        log: ObjectLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = sources.store
        self._gateway = sources.gateway
        self._owner = sources.owner
        self._may_act = sources.may_act
        self._clients = clients
        self._few = few
        self._emit = emit
        self._wake = wake
        self._log = log
        # Answers to the starts of the last turn: what the pods' next reports cannot tell.
        self._started: dict[str, str] = {}
        self._refusals = Refusals(clock)
        self._took: set[str] = set()  # uids of pods whose work was stopped for a start that is to follow
        self._start_errors: dict[str, str] = {}
        self._told: dict[str, BasicAuth | None] = {}  # what pods took for the receiver, by uid
        self._clock = clock
        self._evict_after: dict[str, float] = {}  # pods that could not be evicted, by uid, and when to try again
        self._in_flight: dict[str, asyncio.Task[None]] = {}  # by pod uid

    def begin(self, port: int, actions: Sequence[Action]) -> None:
        """Take these actions, but none on a pod that has one under way."""
        for action in actions:
            if not isinstance(action, DeleteWork | AskPod | DecideRivals) and action.pod.uid not in self._in_flight:
                slot = action.request.slot.offset if isinstance(action, StartPod) else None
                with bound(pod=action.pod.name, slot=slot):
                    task = asyncio.create_task(self._take(port, action))
                    self._in_flight[action.pod.uid] = task
                    task.add_done_callback(partial(self._done, action.pod.uid))

    async def finish(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)

    async def cancel(self) -> None:
        """Give up what is under way; the next process finds out what became of it."""
        for task in self._in_flight.values():
            task.cancel()
        await self.finish()

    def with_answer(self, uid: str, report: PodReport) -> PodReport:
        """Return the report with what the pod answered to its last start."""
        started, start_error = self._started.pop(uid, None), self._start_errors.pop(uid, None)
        refusal, told_auth, in_flight = self._refusals.of(uid), self._told.get(uid), uid in self._in_flight
        spared = self._refusals.spares(uid)
        if not (started or start_error or refusal or spared or told_auth or in_flight):
            return report  # as for most pods: a copy takes long
        return dataclasses.replace(
            report,
            started=started,
            refusal=refusal,
            start_error=start_error,
            in_flight=in_flight,
            spared=spared,
            told_auth=told_auth,
        )

    def forget_refusals(self) -> None:
        """Forget what pods refused: nothing is started any more, and what comes next is another try."""
        self._refusals.keep(())
        self._took.clear()

    def forget_others(self, uids: Container[str]) -> None:
        """Forget what every pod but these was told for the receiver, and what it refused."""
        self._refusals.keep(uids)
        self._took = {uid for uid in self._took if uid in uids}
        self._told = {uid: auth for uid, auth in self._told.items() if uid in uids}

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._in_flight[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("an action failed", exc_info=error)

    async def _take(self, port: int, action: StartPod | ExtendPod | StopPod | DeletePod) -> None:
        if isinstance(action, DeletePod):
            await self._evict(action.pod)
            return
        async with self._few.one():
            match action:
                case StartPod():
                    await self._start(port, action)
                case ExtendPod():
                    await self._extend(port, action)
                case StopPod():
                    await self._stop(port, action)

    async def _start(self, port: int, start: StartPod) -> None:
        pod = start.pod
        try:
            client = await _client_to_order(self._clients, pod, self._may_act)
            answer = await client.start(base_url(pod.ip or "", port), self._signed(start))
            self._started[pod.uid] = (
                answer.pow_status.session_id if isinstance(answer, CommandResponse) else pod.server(port)
            )
            self._told[pod.uid] = start.auth
            self._refusals.forget(pod.uid)
            self._took.discard(pod.uid)
            self._wake.set()
        except PodBusy as error:
            # What it computes is this slot, as after an answer that was lost, or other work: the next poll tells.
            self._log.info("start: %s", error)
        except PodRefused as error:
            self._refusals.add(pod.uid, error.reason, str(error), took=pod.uid in self._took)
            self._took.discard(pod.uid)
            self._wake.set()
        except PodError as error:
            # The outcome is unknown; the next poll tells, and a repeated start is harmless.
            self._start_errors[pod.uid] = str(error)
            self._log.warning("start: %s", error)

    def _signed(self, start: StartPod) -> InitGenerateRequest:
        """Return the order with our name, and a user and a password in its callback address.

        Plans, events and logs have none of these.
        """
        request = start.request.model_copy(update={"owner": self._owner})
        if request.url is None:
            return request
        if self._gateway is not None and start.grant is not None:
            return _addressed(request, self._gateway.signed(str(request.url), start.grant))
        return request if start.auth is None else _addressed(request, start.auth.in_url(str(request.url)))

    async def _extend(self, port: int, extend: ExtendPod) -> None:
        try:
            client = await _client_to_order(self._clients, extend.pod, self._may_act)
            await client.extend(base_url(extend.pod.ip or "", port), extend.request)
        except PodError as error:
            # What became of its round, or of the limit, the next poll tells.
            self._log.info("extend: %s", error)

    async def _stop(self, port: int, stop: StopPod) -> None:
        try:
            client = await _client_to_order(self._clients, stop.pod, self._may_act)
            await client.stop(base_url(stop.pod.ip or "", port), stop.round_id, preempted_by=stop.preempted_by)
            if stop.preempted_by is not None:
                self._took.add(stop.pod.uid)
            self._wake.set()
        except PodBusy:
            self._log.info("stop: the pod computes another round by now")
        except PodError as error:
            self._log.warning("stop: %s", error)

    async def _evict(self, pod: PodView) -> None:
        if self._clock() < self._evict_after.get(pod.uid, 0.0) or not self._may_act():
            return
        try:
            await self._store.evict_pod(pod)
        except StoreForbidden as error:
            self._tell_once(pod, f"cannot be evicted ({error}): install the chart with rbac.deletePods=true")
        except EvictionRefused as error:
            self._tell_once(pod, f"is not evicted yet ({error}): it is tried again every {EVICTION_SECONDS:.0f} s")
        except StoreError as error:
            self._log.warning("eviction: %s", error)

    def _tell_once(self, pod: PodView, why: str) -> None:
        """Tell the user why a pod stays, and leave it alone for a while."""
        if pod.uid not in self._evict_after:
            self._emit(WorkEvent(reason=Reason.STALLED, message=f"pod {pod.name} {why}", warning=True))
        self._evict_after[pod.uid] = self._clock() + EVICTION_SECONDS


def _addressed(request: InitGenerateRequest, url: str) -> InitGenerateRequest:
    return request.model_copy(update={"url": AnyHttpUrl(url)})


_Key = tuple[str, str]  # pod uid, key of the ask


class PodAsks:
    """What one object asks its pods. ``wake`` is set when one has a result.

    ``may_act`` says whether this process may give orders.
    """

    def __init__(self, *, clients: ClientOf, wake: asyncio.Event, may_act: Callable[[], bool]) -> None:
        self._clients = clients
        self._may_act = may_act
        self._wake = wake
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._answers: dict[str, Answer] = {}  # the last one of each pod, by uid

    def keep(self, port: int, asks: Iterable[AskPod]) -> None:
        """Ask these, once each, and cancel all others."""
        wanted = {(ask.pod.uid, ask.key): ask for ask in asks}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        for key in wanted.keys() - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._ask(port, wanted[key]))

    async def cancel(self) -> None:
        """Cancel all; the pods drop the work."""
        tasks = list(self._tasks.values())
        self.keep(0, ())
        await asyncio.gather(*tasks, return_exceptions=True)

    def answer_of(self, uid: str) -> Answer | None:
        """Return the pod's last answer."""
        return self._answers.get(uid)

    async def _ask(self, port: int, ask: AskPod) -> None:
        try:
            client = await _client_to_order(self._clients, ask.pod, self._may_act)
            result = await client.generate(base_url(ask.pod.ip or "", port), ask.request)
        except PodError as error:
            # No news: the next turn is early enough, so that tries have a pause between them.
            self._answers[ask.pod.uid] = Answer(key=ask.key, error=str(error))
        else:
            self._answers[ask.pod.uid] = Answer(key=ask.key, result=result)
            self._wake.set()
