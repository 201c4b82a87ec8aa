# SPDX-License-Identifier: Apache-2.0
"""A namespace with several rounds that share pods: the API server, the gateway, what is on its way, and the time.

The operator that drives it is in `namespace_operator`, and what must hold in `namespace_checks`.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.clients.errors import ObjectGone, ObjectInvalid, StaleObject, StoreUnavailable
from poc_operator.leases import Renewal
from poc_operator.observed import CollectedRound, CollectedSlot, GatewayReport, PodReport, PodView
from poc_operator.planning.reaping import WorkRecord, cause_to_stop
from poc_operator.planning.snapshot import DeletePod, ExtendPod, StartPod, StopPod
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import NOW, a_round
from tests.unit.poc_operator.rounds.namespace_operator import OWNER, Operator, PodOrder, RoundLoop, a_gateway
from tests.unit.poc_operator.rounds.namespace_pods import FOREIGN, GRACE_SECONDS, STARTUP_SECONDS, NamespacePod, Refused
from tests.unit.poc_operator.rounds.world import REQUEST_SECONDS, SlotKey, is_valid
from vllm_poc.wire.answers import StopReason
from vllm_poc.wire.messages import InitGenerateRequest


class Write(StrEnum):
    """What becomes of the next write to the API server."""

    DONE = "done"
    REFUSED = "refused"
    LOST = "done, and its answer is lost"
    INVALID = "refused for good"


@dataclass
class Store:
    """The rounds of the API server. ``checked`` is called with each status before and after a write."""

    checked: Callable[[PoCRound, PoCRound], None]
    rounds: dict[str, PoCRound] = field(default_factory=dict)
    next_write: Write = Write.DONE

    async def write_status(self, work: PoCRound, status: WorkStatus) -> str:
        """As `ObjectStore.write_status`."""
        write, self.next_write = self.next_write, Write.DONE
        stored = self.rounds.get(work.id)
        if write is Write.REFUSED:
            raise StoreUnavailable("no answer")
        if write is Write.INVALID:
            raise ObjectInvalid("the API server's rules have changed")
        if stored is None:
            raise ObjectGone("there is none")
        if stored.metadata.resource_version != work.metadata.resource_version:
            raise StaleObject("it has changed")
        self.put(stored, status=RoundStatus.model_validate(status.stored()))
        if write is Write.LOST:
            raise StoreUnavailable("no answer")
        return self.rounds[work.id].metadata.resource_version

    def put(self, round_: PoCRound, *, generation: int = 0, deleted: datetime | None = None, **fields: Any) -> None:  # noqa: ANN401 - spec or status
        """Store another version of a round."""
        metadata = round_.metadata
        changed = metadata.model_copy(
            update={
                "resource_version": str(int(metadata.resource_version) + 1),
                "generation": metadata.generation + generation,
                "deletion_timestamp": metadata.deletion_timestamp or deleted,
            }
        )
        self.rounds[round_.id] = round_.model_copy(update={"metadata": changed, **fields})
        self.checked(round_, self.rounds[round_.id])


@dataclass(eq=False)
class Order:
    """An order on its way. Its loop, or the whole process, may be gone by the time it arrives."""

    loop: RoundLoop
    action: PodOrder
    sent: float

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.action.pod.uid


class NamespaceWorld:
    """All there is. What `Surroundings` asks for, and what may happen to it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.store = Store(self.recorded)
        self.pods: dict[str, NamespacePod] = {}  # by uid
        self.orders: list[Order] = []
        self.received = defaultdict[tuple[str, SlotKey], set[int]](set)  # by round and slot
        self.has_gateway = True
        self.gateway_answers = True
        self.watch_lags = False
        self.late_seconds = 0.0  # by which polls come late
        self.made = 0
        self.liars: set[str] = set()  # pods that were polled while they lied
        self.operator = Operator(self)

    # What the operator reaches.

    def read(self, uid: str) -> PoCRound | None:
        """Return a round; None if it is gone."""
        return self.store.rounds.get(uid)

    def delete(self, uid: str) -> None:
        """Delete a round, which its finalizer holds."""
        if uid in self.store.rounds:
            self.store.put(self.store.rounds[uid], generation=1, deleted=NOW + timedelta(seconds=self.seconds))
            self.tell_loop(uid)

    def release(self, uid: str) -> None:
        """Take the finalizer off, which ends what is being deleted."""
        self.store.rounds.pop(uid, None)

    def poll(self, pod: PodView, renewal: Renewal | None, now: datetime) -> PodReport:
        """Ask a pod for its status, and renew its lease."""
        asked = self.pods.get(pod.uid)
        if asked is None:
            return PodReport(error="no route to host", listens=False)
        if renewal is not None and asked.hears and asked.serves(self.seconds) and renewal.is_of(pod.uid, now):
            asked.renew(renewal.round_id, renewal.seconds, self.seconds + self.late_seconds)
        self.liars |= {pod.uid} if asked.lie is not None else set()
        # Without the gateway nobody can tell what was delivered.
        return asked.report(self.seconds, may_lie=self.has_gateway and self.gateway_answers)

    def ask_gateway(self, round_: PoCRound, before: GatewayReport | None) -> GatewayReport | None:
        """Ask the gateway, if there is one."""
        if not self.has_gateway:
            return None
        known = before or a_gateway()
        if not self.gateway_answers:
            return replace(known, error="no answer within 5 s")
        return replace(known, collected=self._collected(round_), error=None)

    def _collected(self, round_: PoCRound) -> CollectedRound:
        slots = [self._collected_slot(round_, (slot.node, slot.group)) for slot in round_.status.assignments]
        told = [slot for slot in slots if slot.stored]
        return CollectedRound(
            uid=round_.id, stored=sum(slot.stored for slot in told), duplicates=0, conflicts=0, forwarded=0, slots=told
        )

    def _collected_slot(self, round_: PoCRound, key: SlotKey) -> CollectedSlot:
        stored, count, stride = self.stored(round_, key), round_.spec.nodes.count, round_.status.slots
        last, slot = max(stored, default=-1), key[0] + key[1] * count
        whole = next(index for index in range(len(stored) + 1) if index not in stored)
        return CollectedSlot(
            slot=slot,
            stored=len(stored),
            last_nonce=slot + last * stride if stored else -1,
            delivered_index=whole if round_.spec.artifact is not None else last + 1,
            duplicates=0,
            conflicts=0,
            forwarded=0,
        )

    def stored(self, round_: PoCRound, key: SlotKey) -> set[int]:
        """Return the indices of a slot of which a receiver has results: all, or in a distance round the valid ones."""
        delivered = self.received[round_.id, key]
        return delivered if round_.spec.artifact is not None else {index for index in delivered if is_valid(index)}

    def send(self, loop: RoundLoop, order: PodOrder) -> None:
        """Put an order on its way."""
        self.orders.append(Order(loop, order, self.seconds))

    def planned(self, loop: RoundLoop, snapshot: RoundSnapshot, step: RoundStep) -> None:
        """Hear of a plan."""

    def recorded(self, before: PoCRound, after: PoCRound) -> None:
        """Hear of a write to the API server."""
        named = self.operator.named.setdefault(after.id, set())
        named |= {slot.uid for slot in after.status.assignments if slot.uid is not None}

    # What happens.

    def pass_time(self, seconds: float) -> None:
        """Let time pass: leases run out, pods are killed, requests are given up."""
        self.seconds += seconds
        for pod in list(self.pods.values()):
            pod.expire(self.seconds)
            if pod.grace_end is not None and pod.grace_end <= self.seconds:
                self.remove_pod(pod)
        for order in list(self.orders):
            if self.awaits(order) and self.seconds - order.sent >= REQUEST_SECONDS:
                self.give_up(order)
        self.tell_of_pods()

    def add_pod(self, group: str | None, *, knows_leases: bool = True, loads: float = 0.0, name: str = "") -> None:
        """Add a pod; one with the name of a pod that is gone takes its place."""
        self.made += 1
        pod = NamespacePod(
            name or f"p{self.made}",
            uid=f"p{self.made}",
            group=group,
            knows_leases=knows_leases,
            running_since=self.seconds,
            loaded_at=self.seconds + loads,
            startup_seconds=STARTUP_SECONDS if self.made % 2 else None,
        )
        self.pods[pod.uid] = pod
        self.tell_of_pods()

    def remove_pod(self, pod: NamespacePod) -> None:
        """Let a pod and its object end."""
        del self.pods[pod.uid]
        self.operator.pods.remove(pod.view(self.seconds))

    def tell_of_pods(self) -> None:
        """Let the operator's watch tell of the pods as they are."""
        if not self.watch_lags:
            for pod in self.pods.values():
                self.operator.pods.put(pod.view(self.seconds))

    def add_round(self, **spec: Any) -> None:  # noqa: ANN401 - fields of the spec
        """Create a round."""
        self.made += 1
        name = f"r{self.made}"
        made = a_round(age=0, **spec)
        born = {"name": name, "uid": name, "creation_timestamp": NOW + timedelta(seconds=int(self.seconds))}
        self.store.rounds[name] = made.model_copy(update={"metadata": made.metadata.model_copy(update=born)})
        self.operator.drive(name)

    def change(self, uid: str, **spec: Any) -> None:  # noqa: ANN401 - fields of the spec
        """Let a user change the spec of a round."""
        round_ = self.store.rounds[uid]
        self.store.put(round_, generation=1, spec=round_.spec.model_copy(update=spec))
        self.tell_loop(uid)

    def tell_loop(self, uid: str) -> None:
        """Let the watch tell of a round that somebody has changed, unless it lags."""
        loop = self.operator.loops.get(uid)
        if loop is not None and not self.watch_lags:
            loop.known = None

    def replace_operator(self, skew: float) -> None:
        """Kill the operator. What it sent may still arrive; what it knew beside the record is lost.

        The next one waits until its watch has told of all pods.
        """
        self.operator = Operator(self, skew)
        lags, self.watch_lags = self.watch_lags, False
        self.tell_of_pods()
        self.watch_lags = lags
        for uid, round_ in self.store.rounds.items():
            finished = round_.status.state.finished and round_.metadata.deletion_timestamp is None
            if not finished or round_.spec.ttl_seconds_after_finished is not None:
                self.operator.drive(uid)
            self.operator.named[uid] = {slot.uid for slot in round_.status.assignments if slot.uid is not None}

    def awaits(self, order: Order) -> bool:
        """Whether anybody waits for the answer to an order."""
        loop = order.loop
        return self.operator.loops.get(loop.uid) is loop and loop.in_flight.get(order.uid) is order.action

    def give_up(self, order: Order) -> None:
        """Wait no longer for the answer to an order, which may arrive all the same."""
        order.loop.in_flight.pop(order.uid)
        order.loop.start_errors[order.uid] = "no answer within 30 s"

    def arrive(self, order: Order, *, answered: bool = True) -> None:
        """Let an order arrive at its pod, if that hears it; its answer may be lost."""
        self.orders.remove(order)
        awaited, pod = self.awaits(order), self.pods.get(order.uid)
        if awaited:
            del order.loop.in_flight[order.uid]
        if isinstance(order.action, DeletePod):
            self._evict(pod, awaited=awaited)
        elif pod is not None and pod.hears and pod.serves(self.seconds):
            self._take(order, pod, awaited=awaited, told=awaited and answered and pod.answers)
        elif awaited and isinstance(order.action, StartPod):
            order.loop.start_errors[order.uid] = "no answer"

    def restart(self, pod: NamespacePod, loads: float = 0.0) -> None:
        """Let a pod's server end and another begin. With it end the connections of orders that are on their way."""
        pod.restart(self.seconds, loads)
        for order in [
            order for order in self.orders if order.uid == pod.uid and not isinstance(order.action, DeletePod)
        ]:
            self.orders.remove(order)
            if self.awaits(order):
                del order.loop.in_flight[order.uid]
                if isinstance(order.action, StartPod):
                    order.loop.start_errors[order.uid] = "connection reset"

    def _evict(self, pod: NamespacePod | None, *, awaited: bool) -> None:
        if pod is not None and awaited:
            self.delete_pod(pod, self.seconds + GRACE_SECONDS)

    def _take(self, order: Order, pod: NamespacePod, *, awaited: bool, told: bool) -> None:
        match order.action:
            case StartPod(request=request):
                signed = request.model_copy(update={"owner": OWNER})
                self._start(order, pod, signed, awaited=awaited, told=told)
            case StopPod(round_id=round_id, preempted_by=taker):
                self.stop(pod, round_id, StopReason.REQUESTED if taker is None else StopReason.PREEMPTED)
                order.loop.took |= set() if taker is None else {pod.uid}
            case ExtendPod(request=extension):
                pod.extend(extension)

    def _start(
        self, order: Order, pod: NamespacePod, request: InitGenerateRequest, *, awaited: bool, told: bool
    ) -> None:
        begins = pod.slot is None
        try:
            session = pod.start(request, self.seconds)
        except Refused:
            if told:
                order.loop.refusals.add(pod.uid, "EngineNotReady", "not now", took=pod.uid in order.loop.took)
                order.loop.took.discard(pod.uid)
            return
        if session is None:
            return  # busy: the next poll tells
        pod.astray = (pod.astray and not begins) or (begins and not awaited)
        if told:
            order.loop.started[pod.uid] = session
            order.loop.refusals.forget(pod.uid)
            order.loop.took.discard(pod.uid)

    def stop(self, pod: NamespacePod, round_id: str | None, reason: StopReason = StopReason.REQUESTED) -> None:
        """Stop a pod if it computes this round, or whatever it is; it delivers what it has."""
        if pod.slot is not None and round_id in (None, pod.round_id):
            self.deliver(pod, pod.next)
            pod.idle(reason)

    def deliver(self, pod: NamespacePod, until: int) -> None:
        """Let the receiver accept a pod's results up to ``until``."""
        if pod.slot is not None and pod.round_id is not None:
            self.received[pod.round_id, pod.slot] |= set(range(pod.delivered, until))
            pod.delivered = max(pod.delivered, until)

    def delete_pod(self, pod: NamespacePod, grace_end: float | None, *, drains: bool = False) -> None:
        """Delete a pod: it may drain at once, or compute on until it is killed."""
        pod.terminating, pod.grace_end = True, pod.grace_end or grace_end
        if drains:
            self.stop(pod, None, StopReason.SERVER_ENDS)
        self.tell_of_pods()

    def reap(self) -> None:
        """Stop what nobody needs, as the reaper does."""
        bodies = {uid: found.model_dump(mode="json", by_alias=True) for uid, found in self.store.rounds.items()}
        records = {uid: WorkRecord.parse(body) for uid, body in bodies.items()}
        for pod in self.known_pods():
            answers = pod.hears and pod.answers and pod.serves(self.seconds)
            if not answers or pod.round_id in (None, FOREIGN):
                continue
            if cause_to_stop(records.get(pod.round_id or ""), pod.view(self.seconds)) is not None:
                self.stop(pod, pod.round_id)

    def known_pods(self) -> list[NamespacePod]:
        """Return the pods that the reaper knows: workers, and those that a status has named."""
        named = set[str]().union(*self.operator.named.values())
        return [pod for uid, pod in self.pods.items() if pod.is_worker or uid in named]
