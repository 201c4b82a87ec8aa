# SPDX-License-Identifier: Apache-2.0
"""What the operator asks and remembers so that a plan can see the world: pods, their reports, the gateway.

`PodCache` has the pods as the watch tells of them, in a plain dictionary: a kopf index over many pods delays every
handler at start. `PodPoller` asks them. `ProgressWatch` measures what no single poll can tell. A new process starts to
count anew, which only delays what is done about such a pod. `GatewayObserver` asks the gateway after the poll of the
pods, whose reports are held against the answer, and never waits for long.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.work import ProtocolSpec
from poc_operator.clients.errors import GatewayError, PodError, PodRefused, PodTimeout
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.pods.client import ClientOf, PodClient, base_url
from poc_operator.clients.pods.reference_pods import ReferenceStatus, as_ours
from poc_operator.controller.event_loop import MOST_POLLS, FewRequests
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.leases import Renewal
from poc_operator.observed import CollectedRound, Decision, GatewayReport, PodReport, PodView, RivalNonce
from poc_operator.planning.snapshot import Work
from vllm_poc.wire.answers import PowState, StatusResponse
from vllm_poc.wire.messages import LeaseRenewal, Protocol, Scheme

#: Seconds for which a deleted pod is remembered that the cluster took away: often it says so and deletes the pod in
#: one breath, and the rounds must learn of both. Less than the time between two checks of the watches.
MEMORY_SECONDS = 30.0


def selects(work: Work, pod: PodView) -> bool:
    """Whether the pod is one of the object's."""
    return pod.namespace == work.metadata.namespace and work.spec.pods.matches(pod.labels)


#: Namespace, key and value; of all pods of a namespace the other two are empty.
_Label = tuple[str, str, str]


def _labels(pod: PodView) -> list[_Label]:
    return [(pod.namespace, "", ""), *((pod.namespace, *label) for label in pod.labels.items())]


class PodCache:
    """Pods by uid, and by their labels. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[str, PodView] = {}
        self._labelled = defaultdict[_Label, dict[str, PodView]](dict)  # a thousand rounds must not each look at all
        self._forget_at: dict[str, float] = {}  # of deleted pods, by uid

    def put(self, pod: PodView) -> bool:
        """Remember the pod; return whether anything that matters to a round changed."""
        if self._pods.get(pod.uid) == pod:
            return False
        self._forget(pod.uid)
        self._pods[pod.uid] = pod
        for label in _labels(pod):
            self._labelled[label][pod.uid] = pod
        return True

    def remove(self, pod: PodView) -> bool:
        """Forget a deleted pod, though not at once if the cluster took it away; return whether it was known."""
        if pod.uid not in self._pods:
            return False
        if pod.disrupted:
            self.put(dataclasses.replace(pod, gone=True))
            self._forget_at[pod.uid] = self._clock() + MEMORY_SECONDS
        else:
            self._forget(pod.uid)
        return True

    def everywhere(self) -> list[PodView]:
        """Return all pods that are known."""
        return list(self._pods.values())

    def holding(self, work: Work) -> list[PodView]:
        """Return the pods that the object's selector does not match and that may compute for it all the same."""
        uids = {share.uid for share in work.status.shares if share.state.active}
        pods = (pod for uid in uids if (pod := self._pods.get(uid or "")) is not None)
        return [pod for pod in pods if not selects(work, pod)]

    def knows(self, uid: str) -> bool:
        """Whether the watch has told of the pod."""
        return uid in self._pods

    def matching(self, work: Work) -> list[PodView]:
        """Return the pods of the object's namespace that its selector matches."""
        return self.selected(work.metadata.namespace, work.spec.pods)

    def selected(self, namespace: str, selector: LabelSelector) -> list[PodView]:
        """Return the pods of the namespace that the selector matches."""
        for uid in [uid for uid, moment in self._forget_at.items() if moment <= self._clock()]:
            self._forget(uid)
        wanted = [(namespace, *label) for label in (selector.match_labels or {}).items()]
        candidates = (self._labelled.get(label, {}) for label in [*wanted, (namespace, "", "")])
        return [pod for pod in min(candidates, key=len).values() if selector.matches(pod.labels)]

    def _forget(self, uid: str) -> None:
        self._forget_at.pop(uid, None)
        pod = self._pods.pop(uid, None)
        for label in _labels(pod) if pod is not None else ():
            del self._labelled[label][uid]
            if not self._labelled[label]:
                del self._labelled[label]


#: Polls in flight at once; a poll is cheap, 1 000 pods take about a second. Up to so many pods that do not answer
#: make a poll no longer than one of them does.
_CONCURRENCY = 500
#: Silent pods that are asked at once: they must leave the client's connections to the others.
_PROBES = 50
#: A silent pod that no turn has asked for since so many seconds is forgotten.
SILENT_SECONDS = 60.0

#: So long a server counts as one without the decode scheme before it is asked again: its engine may have yet to tell.
SCHEMES_SECONDS = 30.0
#: Servers whose schemes are remembered.
MOST_SERVERS = 20_000

PollFailed = Callable[[PodError], None]


@dataclass
class _Silent:
    """A pod that did not answer, with the poll of it that is under way. The poll's result is its error, if any."""

    pod: PodView
    error: PodError
    probe: asyncio.Task[PodError | None]
    asked: float


@dataclass(frozen=True)
class _Offer:
    """The schemes that a server offers, and when it is asked again if the decode scheme is not among them."""

    schemes: frozenset[Scheme]
    due: float


class PodPoller:
    """Asks pods for their status. One per process. ``clock`` returns seconds of any monotonic clock.

    A turn waits for every pod that may answer. One whose last poll had no answer in time is asked beside the turns, and
    no turn waits for it: a hung pod would make every turn as long as its time limit, and a round's end takes several::

        polled by each turn ── no answer in time ──> silent: its last error is its report
             ^                                            │
             └───── it answers or refuses, or changes ────┘
    """

    def __init__(self, clients: ClientOf, clock: Callable[[], float]) -> None:
        self._clients = clients
        self._clock = clock
        self._silent: dict[tuple[str, int], _Silent] = {}  # by uid and port
        self._schemes: dict[str, _Offer] = {}  # by server
        self._probes = asyncio.Semaphore(_PROBES)
        self._few = FewRequests(MOST_POLLS)

    async def poll(
        self, pods: Iterable[PodView], work: Work, failed: PollFailed, renewal: Renewal | None = None
    ) -> dict[str, PodReport]:
        """Ask every pod that has an address for its status, and renew leases. Pods that do not answer yield errors.

        ``failed`` is called for each poll that has failed by now. A poll beside the turns renews nothing, since it may
        be sent much later.
        """
        self._forget()
        port = work.spec.port
        reports: dict[str, PodReport] = {}

        async def ask(pod: PodView, ip: str) -> PodReport:
            silent = self._error_of_silent(pod, ip, port, failed)
            if silent is not None:
                return PodReport(error=str(silent))
            try:
                async with self._few.one():
                    # Not before it is sent: it may have waited.
                    client = await self._clients.of(pod.namespace)
                    answer = await client.status(base_url(ip, port), _renewed(renewal, pod))
                    report, schemes = _report(answer, pod, work), await self._schemes_for(work, pod, client)
                    return report if schemes is None else replace(report, schemes=schemes)
            except PodError as error:
                failed(error)
                if isinstance(error, PodTimeout):
                    self._silence(pod, ip, port, error)
                return PodReport(error=str(error), listens=isinstance(error, PodTimeout | PodRefused))

        async def ask_in_turn() -> None:
            for pod, ip in rest:
                reports[pod.uid] = await ask(pod, ip)

        asked = [(pod, pod.ip) for pod in pods if pod.ip and not pod.gone]
        rest = iter(asked)
        await asyncio.gather(*(ask_in_turn() for _ in range(min(_CONCURRENCY, len(asked)))))
        return reports

    async def _schemes_for(self, work: Work, pod: PodView, client: PodClient) -> frozenset[Scheme] | None:
        """Return what the pod offers; None if the work does not depend on it, or the pod does not tell."""
        if not isinstance(work.spec, ProtocolSpec) or work.spec.protocol is not Protocol.DECODE:
            return None
        server, now = pod.server(work.spec.port), self._clock()
        known = self._schemes.get(server)
        if known is None or (Scheme.DECODE not in known.schemes and now >= known.due):
            try:
                told = await client.versions(base_url(pod.ip or "", work.spec.port))
            except PodError:
                return known.schemes if known is not None else None
            known = _Offer(told.offers, now + SCHEMES_SECONDS)
            self._schemes.pop(server, None)
            self._schemes[server] = known
            if len(self._schemes) > MOST_SERVERS:
                del self._schemes[next(iter(self._schemes))]
        return known.schemes

    async def close(self) -> None:
        """Give up what is under way."""
        probes = [one.probe for one in self._silent.values()]
        self._silent.clear()
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _error_of_silent(self, pod: PodView, ip: str, port: int, failed: PollFailed) -> PodError | None:
        """Return why a silent pod has no report; None if the pod is to be polled."""
        known = self._silent.get((pod.uid, port))
        if known is None:
            return None
        known.asked = self._clock()
        if known.pod == pod and not known.probe.done():
            return known.error
        error = known.probe.result() if known.probe.done() else None
        if known.pod == pod and isinstance(error, PodTimeout):
            failed(error)
            self._silence(pod, ip, port, error)
            return error
        # What it answered may be older than what it was told since: it is asked again.
        known.probe.cancel()
        del self._silent[pod.uid, port]
        return None

    def _silence(self, pod: PodView, ip: str, port: int, error: PodError) -> None:
        probe = asyncio.create_task(self._probe(pod.namespace, base_url(ip, port)))
        self._silent[pod.uid, port] = _Silent(pod, error, probe, self._clock())

    async def _probe(self, namespace: str, base: str) -> PodError | None:
        async with self._probes:
            try:
                client = await self._clients.of(namespace)
                await client.status(base)
            except PodError as error:
                return error
            return None

    def _forget(self) -> None:
        oldest = self._clock() - SILENT_SECONDS
        for key, one in list(self._silent.items()):
            if one.asked < oldest:
                one.probe.cancel()
                del self._silent[key]


def _renewed(renewal: Renewal | None, pod: PodView) -> LeaseRenewal | None:
    if renewal is None or not renewal.is_of(pod.uid, datetime.now(UTC)):
        return None
    return LeaseRenewal(renew_lease=renewal.round_id, lease_seconds=renewal.seconds)


def _report(answer: StatusResponse | ReferenceStatus, pod: PodView, work: Work) -> PodReport:
    if isinstance(answer, StatusResponse):
        return PodReport(status=answer)
    round_ = work if isinstance(work, PoCRound) else None
    return PodReport(status=as_ours(answer, pod, work.spec.port, round_), resumes=False)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What changes when a pod gets on: its session and round, how far it is, what held it back."""

    session: str
    round_id: str | None
    computed: int
    held_back: float


class _Accepted(NamedTuple):
    """How many results the receiver of a pod's session and round has accepted."""

    session: str
    round_id: str | None
    results: int


@dataclass(frozen=True)
class _Steps:
    """By how much a pod's index has moved at once. ``computed`` is None if a poll since then had no answer."""

    session: str
    round_id: str | None
    computed: int | None
    since: float
    nonces: int = 0
    seconds: float = 0.0


class ProgressWatch:
    """Measures the pods of one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._moved: dict[str, tuple[Mark, float]] = {}
        self._accepted: dict[str, tuple[_Accepted, float]] = {}
        self._steps: dict[str, _Steps] = {}

    def measured(self, uid: str, report: PodReport) -> PodReport:
        """Return the report with how long the pod gets nothing done or delivered, or is silent, and its batches."""
        now = self._clock()
        status = report.status
        if status is None:
            if (steps := self._steps.get(uid)) is not None:
                self._steps[uid] = replace(steps, computed=None)
            silent = now - self._answered.setdefault(uid, now)
            return replace(report, silent_seconds=silent, heard=uid in self._moved)
        self._answered[uid] = now
        mark = _mark(status)
        if self._moved.get(uid, (None, now))[0] != mark or _excused(status):
            self._moved[uid] = (mark, now)
        steps = self._steps[uid] = _stepped(self._steps.get(uid), status, now)
        return replace(
            report,
            stalled_seconds=now - self._moved[uid][1],
            undelivered_seconds=self._undelivered_seconds(uid, status, now),
            batch_nonces=steps.nonces,
            batch_seconds=steps.seconds,
            heard=True,
        )

    def _undelivered_seconds(self, uid: str, status: StatusResponse, now: float) -> float:
        if status.delivery_error is None:
            self._accepted.pop(uid, None)
            return 0.0
        # delivered_index also moves past what the receiver has refused for good.
        accepted = _Accepted(status.session_id, status.round_id, status.delivered_valid)
        if self._accepted.get(uid, (None, now))[0] != accepted:
            self._accepted[uid] = (accepted, now)
        return now - self._accepted[uid][1]

    def forget_others(self, uids: Iterable[str]) -> None:
        """Forget every pod but these."""
        known = set(uids)
        for memory in (self._answered, self._moved, self._accepted, self._steps):
            for uid in memory.keys() - known:
                del memory[uid]


def _stepped(known: _Steps | None, status: StatusResponse, now: float) -> _Steps:
    """Return what is known of a pod's steps after its answer. Only those count whose begin and end were seen."""
    index = status.next_index
    if known is None or (known.session, known.round_id) != (status.session_id, status.round_id):
        return _Steps(status.session_id, status.round_id, index, now)
    if known.computed == index:
        return replace(known, since=now) if _excused(status) else known
    if known.computed is None or index < known.computed:
        return replace(known, computed=index, since=now)
    nonces, seconds = max(known.nonces, index - known.computed), max(known.seconds, now - known.since)
    return replace(known, computed=index, since=now, nonces=nonces, seconds=seconds)


def _mark(status: StatusResponse) -> Mark:
    return Mark(
        session=status.session_id,
        round_id=status.round_id,
        computed=status.next_index,
        held_back=status.held_back_seconds,
    )


def _excused(status: StatusResponse) -> bool:
    """Whether the pod has nothing to get on with, or waits for the receiver of its results or until vLLM goes on."""
    if status.end_index is not None and status.next_index >= status.end_index:
        return True
    waits = status.delivery_error is not None or status.paused_by is not None
    return status.state is not PowState.GENERATING or waits


#: Least seconds between two questions.
ASK_SECONDS = 2.0

#: So long one observation waits for an answer; one that comes later is for the next.
WAIT_SECONDS = 0.5


def after_answer(
    known: GatewayReport,
    collected: CollectedRound | None,
    asked: datetime,
    heard: Mapping[str, StatusResponse],
    rivals: Sequence[RivalNonce] = (),
) -> GatewayReport:
    """Return what is known after the next answer."""
    return GatewayReport(
        callback=known.callback,
        collected=collected,
        asked=asked,
        rivals=rivals,
        heard=heard,
        fallen=known.fallen | _fallen(known.collected, collected),
        failing_since=_failing_since(known, collected, asked),
    )


def _failing_since(known: GatewayReport, collected: CollectedRound | None, asked: datetime) -> datetime | None:
    """Return since when the round's receiver has taken nothing and the last try failed; None while it takes some."""
    if collected is None or collected.forwarding_error is None:
        return None
    forwarded = known.collected.forwarded if known.collected is not None else 0
    if known.failing_since is None or collected.forwarded > forwarded:
        return asked
    return known.failing_since


def _fallen(before: CollectedRound | None, now: CollectedRound | None) -> frozenset[int]:
    """Return the slots of which the gateway has fewer results now. A round that it does not know tells of none."""
    if before is None or now is None:
        return frozenset()
    stored = {slot.slot: slot.stored for slot in now.slots}
    return frozenset(slot.slot for slot in before.slots if stored.get(slot.slot, 0) < slot.stored)


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

    async def observe(self, heard: Mapping[str, StatusResponse], *, now: bool = False) -> GatewayReport:
        """Return what is known, after a question if one is due or ``now``. ``heard`` is what pods have told, by uid."""
        if self._asking is None and (now or self._clock() - self._asked >= ASK_SECONDS):
            self._asked = self._clock()
            self._asking = asyncio.create_task(self._ask(heard))
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WAIT_SECONDS)
        return self._report

    def planned(self, report: GatewayReport) -> None:
        """Forget the losses that this report told of: a plan that knew it is recorded."""
        self._report = replace(self._report, fallen=_fallen(report.collected, self._report.collected))

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

    async def _ask(self, heard: Mapping[str, StatusResponse]) -> None:
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
            self._report = after_answer(self._report, collected, asked, heard, rivals)
        finally:
            self._asking = None
