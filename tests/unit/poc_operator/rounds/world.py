# SPDX-License-Identifier: Apache-2.0
"""A small model of the world around ``plan()``: pods that compute, a receiver that keeps what they
deliver, and operators that record a plan, act on it, and may die in between."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.observed import GatewayReport, PodReport, PodView
from poc_operator.planning.reaping import WorkRecord, cause_to_stop
from poc_operator.planning.snapshot import DeletePod, StartPod, StopPod
from poc_operator.rounds.leaving import renewal
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import CALLBACK, NOW, UID, a_pod, a_round, has, look
from vllm_poc.server.callbacks.payloads import round_config
from vllm_poc.wire.answers import ModelLimits, PowState, StatusResponse, StopReason
from vllm_poc.wire.messages import InitGenerateRequest

SlotKey = tuple[int, int]  # node, group
PodAction = StartPod | StopPod | DeletePod
Polled = tuple[PodView, PodReport]

#: The operator's leases, and how long it waits for an answer.
LEASE_SECONDS = 600
REQUEST_SECONDS = 30.0


def key(slot: Assignment) -> SlotKey:
    """Which slot a record is of."""
    return slot.node, slot.group


def slot_of(start: StartPod) -> SlotKey:
    """Which slot is to be started."""
    return start.request.node_id, start.request.group_id


def is_valid(index: int) -> bool:
    """Whether a slot's nonce is valid: every third, from the first on."""
    return index % 3 == 0


def valid_below(index: int) -> int:
    """How many of a slot's first ``index`` nonces are valid."""
    return (index + 2) // 3


@dataclass
class SimPod:
    """A pod with the semantics of docs/reference/pod-api.md. A restart makes a new session.

    It ``hears`` what it is asked, and ``answers``, or not. While it is ``terminating``, or not ``selected``, it
    computes on. ``lease_end`` is by the world's clock; a pod that does not know leases has none.
    """

    name: str
    session: int = 0
    state: PowState = PowState.IDLE
    request: InitGenerateRequest | None = None
    next: int = 0
    delivered: int = 0
    answers: bool = True
    hears: bool = True
    selected: bool = True
    terminating: bool = False
    knows_leases: bool = True
    lease_end: float | None = None
    stop_reason: StopReason | None = None
    silent_seconds: float = 0.0
    stalled_seconds: float = 0.0

    @property
    def slot(self) -> SlotKey | None:
        """The slot that it computes now."""
        computes = self.request is not None and self.state is PowState.GENERATING
        return (self.request.node_id, self.request.group_id) if computes and self.request is not None else None

    def start(self, request: InitGenerateRequest, now: float) -> str | None:
        """Return the session that accepted the start; None if another slot is being computed."""
        if self.state is PowState.GENERATING and self.request is not None:
            if not self.request.same_work(request):
                return None
            self.renew(request.round_id, request.lease_seconds, now)
            return self.session_id
        self.request, self.state, self.stalled_seconds, self.stop_reason = request, PowState.GENERATING, 0.0, None
        self.next = self.delivered = request.start_index
        self.renew(request.round_id, request.lease_seconds, now)
        return self.session_id

    def renew(self, round_id: str | None, seconds: int | None, now: float) -> None:
        """Take a lease for what it computes, if that is this round."""
        if self.knows_leases and seconds and self.request is not None and self.request.round_id == round_id:
            self.lease_end = now + seconds

    def expire(self, now: float) -> None:
        """Stop if the lease has run out."""
        if self.state is PowState.GENERATING and self.lease_end is not None and self.lease_end <= now:
            self.state, self.stop_reason = PowState.STOPPED, StopReason.LEASE_EXPIRED

    def restart(self) -> None:
        """Forget everything but the name."""
        self.session += 1
        self.request, self.state, self.next, self.delivered = None, PowState.IDLE, 0, 0
        self.stalled_seconds, self.lease_end, self.stop_reason = 0.0, None, None

    @property
    def session_id(self) -> str:
        """As in the status."""
        return f"{self.name}-{self.session}"

    def report(self, now: float) -> PodReport:
        """Answer a poll."""
        if not (self.hears and self.answers):
            return PodReport(error="no answer within 5 s", silent_seconds=self.silent_seconds)
        start = self.request.start_index if self.request else 0
        status = StatusResponse(
            status=self.state,
            state=self.state,
            session_id=self.session_id,
            round_id=self.request.round_id if self.request else None,
            owner=self.request.owner if self.request else None,
            config=round_config(self.request) if self.request else None,
            start_index=start,
            next_index=self.next,
            delivered_index=self.delivered,
            delivered_valid=self._valid_from(start),
            model=ModelLimits(names=["demo"], max_seq_len=1024, hidden_size=128),
            leases=self.knows_leases,
            lease_remaining_seconds=None if self.lease_end is None else max(0.0, self.lease_end - now),
            stop_reason=self.stop_reason,
            stop_message=self.stop_reason and "the lease ran out",
        )
        return PodReport(status=status, stalled_seconds=self.stalled_seconds)

    def _valid_from(self, start: int) -> int:
        """Return how many of the delivered nonces are valid: every artifact is."""
        if self.request is not None and self.request.params is not None:
            return self.delivered - start
        return valid_below(self.delivered) - valid_below(start)


@dataclass
class World:
    """The stored round, the pods by name, and what is on its way between operator and pods."""

    round: PoCRound = field(
        default_factory=lambda: a_round(
            nodes={"first": 0, "last": 0, "count": 1, "groups": 2},
            stop={"afterNonces": 300},
            startDeadlineSeconds=31_536_000,
            pollFailureSeconds=31_536_000,
            retry={"policy": "Resume", "backoffLimitPerSlot": 1000, "backoffLimit": 100_000},
        )
    )
    pods: dict[str, SimPod] = field(default_factory=dict)
    in_flight: dict[str, PodAction] = field(default_factory=dict)
    abandoned: list[StartPod] = field(default_factory=list)  # still on their way, though nobody waits for them
    started: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[str, str]] = field(default_factory=dict)
    received: dict[SlotKey, set[int]] = field(default_factory=lambda: defaultdict(set))
    seconds: float = 0.0
    made: int = 0
    gateway: GatewayReport | None = None
    gateway_answers: bool = True
    skew: float = 0.0  # of the operator's clock
    sent: dict[str, float] = field(default_factory=dict)  # when the requests in flight were sent, by pod name
    named: set[str] = field(default_factory=set)  # pods that the status has named since the operator began

    def use_gateway(self) -> None:
        """Let the operator know a gateway, which stores what pods deliver."""
        self.gateway = GatewayReport(callback=CALLBACK)

    def add_pod(self, *, knows_leases: bool = True) -> None:
        """Add a pod that never was there before."""
        self.made += 1
        self.pods[f"p{self.made}"] = SimPod(f"p{self.made}", knows_leases=knows_leases)

    @property
    def now(self) -> float:
        """Seconds by the operator's clock."""
        return self.seconds + self.skew

    def pass_time(self, seconds: float) -> None:
        """Let time pass: leases run out, and requests are given up."""
        self.seconds += seconds
        for pod in self.pods.values():
            pod.expire(self.seconds)
        for name in [name for name, sent in self.sent.items() if self.seconds - sent >= REQUEST_SECONDS]:
            self.give_up(name)

    def give_up(self, name: str) -> None:
        """Wait no longer for the answer to the request to this pod. The request may arrive all the same."""
        action = self.in_flight.pop(name)
        del self.sent[name]
        if isinstance(action, StartPod):
            self.abandoned.append(action)

    def look(self) -> RoundSnapshot:
        """What the operator sees now: it polls its pods, and those that may compute for it."""
        holders = {slot.uid for slot in self.round.status.assignments if slot.state.active}
        renewed, now = renewal(self.round, LEASE_SECONDS), NOW + timedelta(seconds=self.now)
        pods, others = list[Polled](), list[Polled]()
        for name, pod in self.pods.items():
            if pod.hears and renewed is not None and renewed.is_of(name, now):
                pod.renew(renewed.round_id, renewed.seconds, self.seconds)
            polled = (self._view(pod), self._report(name, pod))
            if pod.selected:
                pods.append(polled)
            elif name in holders:
                others.append(polled)
        self._ask_gateway()
        return look(self.round, *pods, after=self.now, gateway=self.gateway, others=others, lease_seconds=LEASE_SECONDS)

    @staticmethod
    def _view(pod: SimPod) -> PodView:
        view = a_pod(pod.name, terminating=pod.terminating)
        return view if pod.selected else replace(view, labels={})

    def reap(self) -> None:
        """Stop what the round does not look at: pods that it named, and that it neither selects nor gives a slot."""
        record = self._record()
        for name in self.named | record.pods:
            pod = self.pods.get(name)
            if pod is not None and pod.hears and pod.answers and cause_to_stop(record, self._view(pod)) is not None:
                self._stop(pod, self.round.id)

    def _record(self) -> WorkRecord:
        return WorkRecord.parse(self.round.model_dump(mode="json", by_alias=True))

    def _ask_gateway(self) -> None:
        if self.gateway is not None and self.gateway_answers:
            stored = [sorted(index for index in self.received[0, group] if is_valid(index)) for group in (0, 1)]
            counts = [(len(valid), valid[-1] + 1 if valid else 0) for valid in stored]
            self.gateway = has(*counts, asked=self.now)
        elif self.gateway is not None:
            self.gateway = replace(self.gateway, error="no answer within 5 s")

    def _report(self, name: str, pod: SimPod) -> PodReport:
        report = pod.report(self.seconds)
        return PodReport(
            status=report.status,
            error=report.error,
            stalled_seconds=report.stalled_seconds,
            silent_seconds=report.silent_seconds,
            started=self.started.pop(name, None),
            refusal=self.refusals.get(name),
            in_flight=name in self.in_flight,
        )

    def reconcile(self, *, dies_before_acting: bool = False, writes: bool = True) -> tuple[RoundSnapshot, RoundStep]:
        """Plan, record, act: as the reconciler does. Without a record nothing follows."""
        snapshot = self.look()
        step = plan(snapshot)
        if not writes:
            return snapshot, step
        self.round = self.round.model_copy(update={"status": step.status})
        self.named |= self._record().pods
        if dies_before_acting:
            self.replace_operator()
            return snapshot, step
        for action in step.actions:
            assert isinstance(action, PodAction)
            if self.in_flight.setdefault(action.pod.uid, action) is action:
                self.sent[action.pod.uid] = self.seconds
                if isinstance(action, StartPod):
                    self.refusals.pop(action.pod.uid, None)
        return snapshot, step

    def replace_operator(self) -> None:
        """Kill the operator. What it sent may still arrive; what it knew beside the record is lost."""
        self.abandoned += [action for action in self.in_flight.values() if isinstance(action, StartPod)]
        self.in_flight, self.sent, self.started, self.refusals, self.named = {}, {}, {}, {}, set()
        self.gateway = GatewayReport(callback=CALLBACK) if self.gateway is not None else None

    def land(self, name: str, *, answered: bool = True) -> None:
        """Let the request to this pod arrive; its answer may be lost."""
        action, pod = self.in_flight.pop(name), self.pods.get(name)
        del self.sent[name]
        if pod is None:
            return
        match action:
            case StartPod(request=request):
                session = pod.start(request, self.seconds)
                if answered and session is not None:
                    self.started[name] = session
                elif answered:
                    self.refusals[name] = ("RoundConflict", "another round runs")
            case StopPod(round_id=round_id):
                self._stop(pod, round_id)
            case DeletePod():
                del self.pods[name]

    def _stop(self, pod: SimPod, round_id: str | None) -> None:
        if pod.request is None or pod.slot is None or round_id not in (None, pod.request.round_id):
            return
        self.deliver(pod, pod.next)
        pod.state, pod.stop_reason = PowState.STOPPED, StopReason.REQUESTED

    def deliver(self, pod: SimPod, until: int) -> None:
        """Let the receiver accept a pod's results up to ``until``."""
        if pod.slot is not None and pod.request is not None and pod.request.round_id == UID:
            self.received[pod.slot] |= set(range(pod.delivered, until))
        pod.delivered = until
