# SPDX-License-Identifier: Apache-2.0
"""Fleets, rounds and pods at a glance, made of what was seen: the same data for tables, JSON and YAML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod, Stage
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.schema import ApiModel, number_of
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.cli.loading import LogEnd, Step, loads, step_of
from poc_operator.cli.pod_metrics import Chat, PodKey, held_share, pace
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import in_order
from poc_operator.rounds.counters import settled_nonces

#: Slots of a round that are shown; all are in JSON and YAML.
MOST_SLOTS = 64


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen at one time."""

    now: datetime
    fleets: Sequence[PoCFleet] = ()
    rounds: Sequence[PoCRound] = ()
    pods: Sequence[PodView] = ()
    chat: Mapping[PodKey, Chat] = field(default_factory=dict)
    #: Ends of the logs of pods that load, as far as they were asked for.
    logs: Mapping[PodKey, LogEnd] = field(default_factory=dict)
    #: What is wrong with the operator; empty if it is well, or nobody may look.
    operator: str = ""
    #: What is to be told of objects that could not be read.
    unread: Sequence[str] = ()


class SlotRow(ApiModel):
    """One slot of a round."""

    node: int
    group: int
    pod: str
    state: str
    delivered: int
    #: Computed and not delivered yet.
    backlog: int
    #: Compared with the slot of the round that has most.
    share: float
    #: Nonces per second since the last look.
    rate: float | None = None
    #: Whether chat holds the pod back now, the share of the time since the last look, and all seconds of the server.
    held_by_chat: bool | None = None
    held_share: float | None = None
    held_seconds: float | None = None
    error: str | None = None


class RoundRow(ApiModel):
    """One round."""

    namespace: str
    name: str
    state: str
    #: Why no pod has started, in one word; empty unless the state is Pending, and before an operator has seen it.
    reason: str
    running: int
    desired: int
    checked: int
    valid: int
    delivered: int
    rate: float
    #: How much of its goal is reached, and what that goal is; None without one.
    share: float | None
    goal: str
    eta_seconds: int | None
    #: Pods that chat holds back now, of those that told.
    held_by_chat: int | None
    degraded: str
    message: str
    age_seconds: int
    slots: list[SlotRow]


class FleetRow(ApiModel):
    """One fleet."""

    namespace: str
    name: str
    model: str
    ready: str
    updated: int
    update: str
    reason: str
    message: str
    age_seconds: int


class PodRow(ApiModel):
    """One pod that may compute."""

    namespace: str
    name: str
    fleet: str
    stage: str
    #: What it does while its stage is Loading, as far as its log tells.
    loading: Step | None
    self_check: str
    node: str
    round: str
    age_seconds: int | None


class Overview(ApiModel):
    """Everything at a glance. ``notes`` say what could not be seen."""

    fleets: list[FleetRow]
    rounds: list[RoundRow]
    pods: list[PodRow]
    notes: list[str]


def overview(seen: Seen, before: Seen | None = None) -> Overview:
    """Return what was seen at a glance; with an earlier look, with the rates since then."""
    seconds = (seen.now - before.now).total_seconds() if before else 0.0
    looks = Looks(seen.chat, before.chat if before else {}, seconds)
    rounds = sorted(seen.rounds, key=lambda each: (each.status.state.finished, -_created(each)))
    return Overview(
        fleets=[_fleet(each, seen.now) for each in seen.fleets],
        rounds=[_round(each, looks, seen.now) for each in rounds],
        pods=_pods(seen),
        notes=_notes(seen),
    )


@dataclass(frozen=True)
class Looks:
    """What pods told of chat now and before, so many seconds ago."""

    chat: Mapping[PodKey, Chat]
    before: Mapping[PodKey, Chat]
    seconds: float


def _created(each: PoCRound) -> float:
    return each.metadata.creation_timestamp.timestamp()


def goal(found: PoCRound, now: datetime) -> tuple[float | None, str, timedelta | None]:
    """Return how much of a round's goal is reached, the goal in words, and when it will be at the present rate."""
    status, stop = found.status, found.spec.stop
    rate = rate_of(found)
    if stop is None:
        return None, "until it is finished", None
    if stop.after_seconds is not None:
        end = status.stop_time or now
        passed = (end - status.start_time).total_seconds() if status.start_time else 0.0
        left = timedelta(seconds=max(0.0, stop.after_seconds - passed)) if status.start_time else None
        return _done(found, passed / stop.after_seconds), f"{stop.after_seconds} s", _eta(found, left)
    totals = status.totals
    wanted, got = (stop.after_nonces, totals.delivered) if stop.after_nonces else (stop.after_valid or 1, totals.valid)
    if stop.after_valid:
        rate *= totals.valid / max(1, totals.delivered)
    seconds = timedelta(seconds=max(0, wanted - got) / rate) if rate > 0 else None
    word = "nonces" if stop.after_nonces else "valid nonces"
    return _done(found, got / wanted), f"{wanted} {word}", _eta(found, seconds)


def _done(found: PoCRound, share: float) -> float:
    return 1.0 if found.status.state is State.COMPLETE else min(1.0, max(0.0, share))


def _eta(found: PoCRound, left: timedelta | None) -> timedelta | None:
    return left if found.status.state is State.RUNNING else None


def rate_of(found: PoCRound) -> float:
    """Return a round's nonces per second as its status has them."""
    try:
        return float(found.status.totals.rate)
    except ValueError:
        return 0.0


def _round(found: PoCRound, looks: Looks, now: datetime) -> RoundRow:
    status, meta = found.status, found.metadata
    share, words, left = goal(found, now)
    settled = [settled_nonces(found, slot) for slot in status.assignments]
    most = max(settled, default=0)
    slots = [_slot(meta.namespace, *pair, looks, most) for pair in zip(status.assignments, settled, strict=True)]
    told = [slot.held_by_chat for slot in slots if slot.held_by_chat is not None]
    return RoundRow(
        namespace=meta.namespace,
        name=meta.name,
        state=str(status.state) if meta.deletion_timestamp is None else "Deleting",
        reason=_why_pending(found),
        running=status.running,
        desired=status.desired,
        checked=status.totals.checked,
        valid=status.totals.valid,
        delivered=status.totals.delivered,
        rate=rate_of(found),
        share=share,
        goal=words,
        eta_seconds=int(left.total_seconds()) if left is not None else None,
        held_by_chat=sum(told) if told else None,
        degraded=status.degraded,
        message=status.message,
        age_seconds=int((now - meta.creation_timestamp).total_seconds()),
        slots=slots,
    )


def _why_pending(found: PoCRound) -> str:
    if found.status.state is not State.PENDING or found.metadata.deletion_timestamp is not None:
        return ""
    return next((one.reason for one in found.status.own_conditions if one.type is ConditionType.PROGRESSING), "")


def _slot(namespace: str, slot: Assignment, settled: int, looks: Looks, most: int) -> SlotRow:
    key = (namespace, slot.pod or "")
    chat = looks.chat.get(key)
    known = chat if chat is not None and not chat.error and slot.state is SlotState.RUNNING else None
    return SlotRow(
        node=slot.node,
        group=slot.group,
        pod=slot.pod or "",
        state=str(slot.state),
        delivered=settled,
        backlog=max(0, slot.next - settled),
        share=settled / most if most else 0.0,
        rate=pace(looks.before.get(key), known, looks.seconds) if known else None,
        held_by_chat=known.held if known else None,
        held_share=held_share(looks.before.get(key), known, looks.seconds) if known else None,
        held_seconds=known.seconds if known else None,
        error=slot.error,
    )


def _fleet(found: PoCFleet, now: datetime) -> FleetRow:
    status, meta = found.status, found.metadata
    return FleetRow(
        namespace=meta.namespace,
        name=meta.name,
        model=status.model or found.spec.model.path or found.spec.model.preset or "",
        ready=status.ready or f"0/{found.spec.replicas}",
        updated=status.updated_replicas,
        update="Paused" if found.spec.update.paused else str(status.update.phase),
        reason=status.reason or "Pending",
        message=status.message,
        age_seconds=int((now - meta.creation_timestamp).total_seconds()),
    )


def _pods(seen: Seen) -> list[PodRow]:
    told = {(each.metadata.namespace, pod.uid): pod for each in seen.fleets for pod in each.status.pods}
    work = {
        (each.metadata.namespace, slot.uid): f"{each.metadata.name} {slot.node}/{slot.group}"
        for each in seen.rounds
        for slot in each.status.assignments
        if slot.state.active
    }
    pods = sorted(seen.pods, key=lambda pod: (pod.namespace, in_order(pod)))
    return [_pod(pod, told.get((pod.namespace, pod.uid)), work, seen) for pod in pods]


def _pod(pod: PodView, told: FleetPod | None, work: Mapping[tuple[str, str | None], str], seen: Seen) -> PodRow:
    own = Stage.LOADING if loads(pod, seen.now) else pod.waiting_for or "NotReady"
    stage = str(told.stage) if told is not None else ("Ready" if pod.ready else str(own))
    return PodRow(
        namespace=pod.namespace,
        name=pod.name,
        fleet=pod.labels.get(FLEET_LABEL, ""),
        stage="Terminating" if pod.terminating else stage,
        loading=step_of(seen.logs.get((pod.namespace, pod.name), LogEnd()).text),
        self_check=str(told.result) if told is not None else "",
        node=pod.node,
        round=work.get((pod.namespace, pod.uid), ""),
        age_seconds=int((seen.now - pod.created).total_seconds()) if pod.created else None,
    )


def _notes(seen: Seen) -> list[str]:
    silent = [(name, chat.error) for (_, name), chat in seen.chat.items() if chat.error]
    unread = [(name, log.error) for (_, name), log in seen.logs.items() if log.error]
    logs = number_of(len(unread), "log of a pod that loads", "logs of pods that load")
    texts = {f"{number_of(len(silent), 'pod')} did not tell of chat": silent, f"{logs} could not be read": unread}
    away = [f"{seen.operator}: states and rates are those of before"] if seen.operator else []
    away += seen.unread
    return away + [f"{text}, the first: {': '.join(one[0])}" for text, one in texts.items() if one]
