# SPDX-License-Identifier: Apache-2.0
"""What the operator remembers so that a plan can see the world: pods, how they get on, the gateway's answers.

`PodCache` has the pods as the watch tells of them, in a plain dictionary: a kopf index over many pods delays every
handler at start. `ProgressWatch` measures what no single poll can tell; a new process starts to count anew, which only
delays what is done about such a pod. `GatewayObserver` asks the gateway beside the poll of the pods, which it never
holds up for long.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.clients.errors import GatewayError
from poc_operator.clients.gateway import GatewayClient
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.observed import Decision, GatewayReport, PodReport, PodView
from poc_operator.planning.snapshot import Work
from vllm_poc.wire.answers import PowState, StatusResponse

#: Seconds for which a deleted pod is remembered that the cluster took away: often it says so and deletes the pod in
#: one breath, and the rounds must learn of both. Less than the time between two checks of the watches.
MEMORY_SECONDS = 30.0


def selects(work: Work, pod: PodView) -> bool:
    """Whether the pod is one of the object's."""
    return pod.namespace == work.metadata.namespace and work.spec.selector.matches(pod.labels)


class PodCache:
    """Pods by uid. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[str, PodView] = {}
        self._forget_at: dict[str, float] = {}  # of deleted pods, by uid

    def put(self, pod: PodView) -> bool:
        """Remember the pod; return whether anything that matters to a round changed."""
        changed = self._pods.get(pod.uid) != pod
        self._pods[pod.uid] = pod
        return changed

    def remove(self, pod: PodView) -> bool:
        """Forget a deleted pod, though not at once if the cluster took it away; return whether it was known."""
        known = pod.uid in self._pods
        if known and pod.disrupted:
            self._pods[pod.uid] = dataclasses.replace(pod, gone=True)
            self._forget_at[pod.uid] = self._clock() + MEMORY_SECONDS
        else:
            self._pods.pop(pod.uid, None)
        return known

    def matching(self, work: Work) -> list[PodView]:
        """Return the pods of the object's namespace that its selector matches."""
        return self.selected(work.metadata.namespace, work.spec.selector)

    def selected(self, namespace: str, selector: LabelSelector) -> list[PodView]:
        """Return the pods of the namespace that the selector matches."""
        for uid in [uid for uid, moment in self._forget_at.items() if moment <= self._clock()]:
            del self._pods[uid], self._forget_at[uid]
        return [pod for pod in self._pods.values() if pod.namespace == namespace and selector.matches(pod.labels)]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What changes when a pod gets on: its session and round, how far it is, what held it back."""

    session: str
    round_id: str | None
    computed: int
    held_back: float


class ProgressWatch:
    """Measures the pods of one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._moved: dict[str, tuple[Mark, float]] = {}

    def measured(self, uid: str, report: PodReport) -> PodReport:
        """Return the report with ``stalled_seconds`` and ``silent_seconds``."""
        now = self._clock()
        status = report.status
        if status is None:
            return replace(report, silent_seconds=now - self._answered.setdefault(uid, now))
        self._answered[uid] = now
        mark = _mark(status)
        if self._moved.get(uid, (None, now))[0] != mark or _excused(status):
            self._moved[uid] = (mark, now)
        return replace(report, stalled_seconds=now - self._moved[uid][1])

    def forget_others(self, uids: Iterable[str]) -> None:
        """Forget every pod but these."""
        known = set(uids)
        for memory in (self._answered, self._moved):
            for uid in memory.keys() - known:
                del memory[uid]


def _mark(status: StatusResponse) -> Mark:
    return Mark(
        session=status.session_id,
        round_id=status.round_id,
        computed=status.next_index,
        held_back=status.held_back_seconds,
    )


def _excused(status: StatusResponse) -> bool:
    """Whether the pod has nothing to get on with, or waits for the receiver of its results."""
    if status.end_index is not None and status.next_index >= status.end_index:
        return True
    return status.state is not PowState.GENERATING or status.delivery_error is not None


#: Least seconds between two questions.
ASK_SECONDS = 2.0

#: So long one observation waits for an answer; one that comes later is for the next.
WAIT_SECONDS = 0.5


class GatewayObserver:
    """The answers about one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, client: GatewayClient, ref: ObjectRef, log: ObjectLogger, clock: Callable[[], float]) -> None:
        self._client = client
        self._ref = ref
        self._log = log
        self._clock = clock
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._report = GatewayReport(callback=client.callback_url(*ref))

    async def observe(self) -> GatewayReport:
        """Return what is known, after a question if one is due."""
        if self._asking is None and self._clock() - self._asked >= ASK_SECONDS:
            self._asked = self._clock()
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WAIT_SECONDS)
        return self._report

    def decide(self, decisions: Sequence[Decision]) -> None:
        """Tell the gateway which results are honest, unless it is being told."""
        if self._telling is None:
            self._telling = asyncio.create_task(self._decide(decisions))

    async def cancel(self) -> None:
        """Give up what is under way."""
        for task in (self._asking, self._telling):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def _decide(self, decisions: Sequence[Decision]) -> None:
        try:
            await self._client.decide(*self._ref, decisions)
        except GatewayError as error:  # the plan orders it again
            self._log.warning("decisions about rivals: %s", error)
        finally:
            self._telling = None

    async def _ask(self) -> None:
        # As exact as the times of the plan, so that "later" means the same for both.
        asked = datetime.now(UTC).replace(microsecond=0)
        try:
            collected = await self._client.progress(*self._ref)
            undecided = collected is not None and collected.undecided > 0
            rivals = await self._client.rivals(*self._ref) if undecided else ()
        except GatewayError as error:
            if self._report.error != str(error):
                self._log.warning("%s", error)
            self._report = replace(self._report, error=str(error))
        else:
            self._report = replace(self._report, collected=collected, asked=asked, error=None, rivals=rivals)
        finally:
            self._asking = None
