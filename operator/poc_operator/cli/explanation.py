# SPDX-License-Identifier: Apache-2.0
"""Why an object is where it is, in sentences: what it does, what is wrong, what that means, and what to do next."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from shlex import quote
from typing import Any

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.schema import ApiModel
from poc_operator.apis.v1alpha1.status import State
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.cli.gateway_proxy import Forwarding
from poc_operator.cli.loading import LogEnd, last_line, server_name, step_of
from poc_operator.cli.next_steps import Names, command, receiver_remedy, results_command, special_remedy
from poc_operator.cli.output import age, number, period
from poc_operator.cli.overview import goal
from poc_operator.cli.pod_metrics import Chat, PodKey
from poc_operator.cli.redaction import Redactor
from poc_operator.observed import PodView
from poc_operator.planning.conditions import SILENT
from poc_operator.planning.eligibility import why_waiting
from poc_operator.rounds.end import has_begun, long_waits, tell_waits

Work = PoCRound | PoCValidation | PoCCalibration
Subject = Work | PoCFleet

#: Reasons of conditions that nobody asks about: all is as it should be.
#: Reason of a complete round without results, which no condition has.
NO_RESULTS = "NoResults"
#: Waits of a slot for a pod that were shorter are not told of.
_LEAST_WAIT = 5
_FINE = frozenset(
    {
        Reason.ACCEPTED,
        Reason.ALL_REPLICAS_READY,
        Reason.ALL_SLOTS_WORK,
        Reason.COMPLETED,
        Reason.NOT_SUSPENDED,
        Reason.NO_FRAUD_DETECTED,
        Reason.RUNNING,
    }
)
_MOST_PODS, _MOST_EVENTS = 5, 5
#: So much of a log's last line is told.
_LINE = 200
#: Placeholders for names that are not known.
_POD, _FLEET = "POD", "FLEET"


@dataclass(frozen=True, kw_only=True)
class Event:
    """An Event about an object."""

    type: str
    reason: str
    message: str
    time: datetime | None
    count: int = 1

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "Event":
        """Return an Event of the API server's JSON."""
        told = body.get("lastTimestamp") or body.get("eventTime") or body.get("firstTimestamp")
        return cls(
            type=str(body.get("type") or ""),
            reason=str(body.get("reason") or ""),
            message=str(body.get("message") or ""),
            time=datetime.fromisoformat(told) if told else None,
            count=int(body.get("count") or 1),
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was seen of an object and around it. ``operator`` says what is wrong with the operator's process.

    ``gateway`` is the one that the user has named, as NAMESPACE/NAME.
    """

    subject: Subject
    now: datetime
    fleet: PoCFleet | None = None
    pods: Sequence[PodView] = ()
    events: Sequence[Event] = ()
    chat: Mapping[PodKey, Chat] = field(default_factory=dict)
    #: Ends of the logs of pods that load.
    logs: Mapping[PodKey, LogEnd] = field(default_factory=dict)
    operator: str = ""
    forwarding: Forwarding | None = None
    gateway: str | None = None


class Finding(ApiModel):
    """Something that explains where the object is: what was seen, what it means, the remedy, and the next command."""

    reason: str
    seen: str
    meaning: str = ""
    remedy: str = ""
    command: str = ""


class Account(ApiModel):
    """The whole explanation. ``next`` are the commands of the findings, each once, or one that only looks on."""

    subject: str
    summary: str
    findings: list[Finding]
    events: list[str]
    next: list[str]


def account(found: Evidence) -> Account:
    """Explain an object."""
    findings = [*_around(found), *_of_conditions(found), *lost(found)]
    findings += [*_of_fleet(found), *_of_pods(found), *_of_chat(found)]
    now = list(_of_gateway(found))  # newer than what the conditions have of the same
    findings = [one for one in findings if one.reason not in {each.reason for each in now}] + now
    commands = list(dict.fromkeys(finding.command for finding in findings if finding.command))
    meta, kind = found.subject.metadata, found.subject.KIND
    return Account(
        subject=f"{kind.kind} {meta.namespace}/{meta.name}",
        summary=_summary(found),
        findings=findings,
        events=[_event(event, found.now) for event in _warnings(found.events)],
        next=commands or [_looks_on(found)],
    )


def _looks_on(found: Evidence) -> str:
    subject = found.subject
    where, name = subject.metadata.namespace, subject.metadata.name
    if isinstance(subject, PoCFleet):
        return f"kubectl poc -n {where} status"
    if not isinstance(subject, PoCRound):
        return f"kubectl -n {where} get {subject.KIND.singular} {name} -o wide"
    if subject.status.state.finished:
        return results_command(_names(found))
    return f"kubectl poc -n {where} round watch {name}"


def _summary(found: Evidence) -> str:
    subject = found.subject
    if isinstance(subject, PoCFleet):
        fleet = subject.status
        return f"It is {fleet.reason or 'Pending'}: {fleet.ready or 'no'} pods are ready. {_sentence(fleet.message)}"
    status, old = subject.status, age(subject.metadata.creation_timestamp, found.now)
    parts = "slots" if isinstance(subject, PoCRound) else "samples"
    compute = f"{status.running} of {status.desired} {parts} compute" if status.desired else f"it has no {parts} yet"
    begun = f"It is {status.state} and {old} old; {compute}"
    progress = _progress(subject, found.now) if isinstance(subject, PoCRound) else ""
    return " ".join(text for text in (f"{begun}{progress}.", _sentence(status.message)) if text)


def _progress(found: PoCRound, now: datetime) -> str:
    share, words, left = goal(found, now)
    totals = found.status.totals
    done = f"; pods have delivered {number(totals.delivered)} nonces at {totals.rate}/s"
    if share is None:
        return done
    rest = f", {period(left)} left" if left is not None else ""
    return f"{done}, {100 * share:.0f} % of {words}{rest}"


def _sentence(text: str) -> str:
    """Return a message as a sentence. A name at its beginning stays as it is."""
    first = text.split(" ", 1)[0]
    return f"{text[0].upper() if first.isalpha() else text[0]}{text[1:].rstrip('.')}." if text else ""


def _around(found: Evidence) -> Iterable[Finding]:
    """What concerns the object as a whole: it is being deleted, no operator acts, or its last change is not seen."""
    meta, status = found.subject.metadata, found.subject.status
    if meta.deletion_timestamp is not None:
        since = age(meta.deletion_timestamp, found.now)
        yield Finding(
            reason=Reason.DELETED,
            seen=f"It is being deleted since {since}.",
            meaning=EXPLANATIONS[Reason.DELETED].meaning,
            command=_command(found, Reason.PENDING) if found.operator else "",
        )
    over = isinstance(found.subject, Work) and found.subject.status.state.finished
    if found.operator and not over:
        yield Finding(
            reason="OperatorAway",
            seen=_sentence(found.operator),
            meaning="Nothing is decided without the operator. Pods compute on until their lease has run out.",
            remedy="Bring the operator back.",
            command=_command(found, Reason.PENDING),
        )
    if not over and SILENT in status.message:
        yield Finding(
            reason="PodsSilent",
            seen=f"{SILENT[0].upper()}{SILENT[1:]}{_sentence(status.message).partition(SILENT)[2]}",
            meaning="They may compute on: the operator waits for their answers. After a change of the token they "
            "refuse it for up to two minutes, until both sides have the new one.",
            remedy="If it lasts, see that the pods run, and that they have the operator's token.",
            command=_command(found, Reason.PODS_UNREACHABLE),
        )
    if status.observed_generation < meta.generation and status.observed_generation:
        yield Finding(
            reason="ChangeNotSeen",
            seen="The operator has not acted on the last change of the spec yet.",
            meaning="It does so within seconds, if it runs and is well.",
            command=_command(found, Reason.PENDING),
        )


def _of_conditions(found: Evidence) -> Iterable[Finding]:
    told: set[str] = set()
    for condition in telling(found.subject):
        for reason in _reasons(found.subject, condition):
            if reason not in told and reason not in _FINE:
                told.add(reason)
                yield explained(reason, condition.message, found)


def telling(subject: Subject) -> Sequence[Condition]:
    """Return the conditions that say where the object is: those that are not as one wishes."""
    own = subject.status.own_conditions
    conditions = list(own.values()) if isinstance(own, Mapping) else list(own)
    over = isinstance(subject, Work) and subject.status.state.finished
    wanted = {
        ConditionType.ACCEPTED: {"False"},
        ConditionType.PROGRESSING: {"True"} if isinstance(subject, PoCFleet) else set() if over else {"False", "True"},
        ConditionType.DEGRADED: {"True"},
        ConditionType.SUSPENDED: {"True"},
        ConditionType.FAILED: {"True"},
        ConditionType.COMPLETE: {"True"},
        ConditionType.READY: {"False", "Unknown"} if isinstance(subject, PoCFleet) else {"Unknown"},
        ConditionType.STALLED: {"True"} if isinstance(subject, PoCFleet) else set(),
    }
    return [each for each in conditions if each.status in wanted.get(each.type, set())]


def _reasons(subject: Subject, condition: Condition) -> list[str]:
    """Return the reasons of a condition: all of those that the status lists, where it is degraded."""
    if condition.type is ConditionType.DEGRADED and isinstance(subject, Work) and subject.status.degraded:
        return subject.status.degraded.split(",")
    return [condition.reason]


def explained(reason: str, message: str, found: Evidence) -> Finding:
    """Return what a reason means; one of another version is told as it is."""
    try:
        known = Reason(reason)
    except ValueError:
        return Finding(
            reason=reason,
            seen=_sentence(message),
            meaning="This version of the plugin does not know the reason.",
            remedy="Install the plugin of the operator's version.",
        )
    texts = EXPLANATIONS[known]
    return Finding(
        reason=reason,
        seen=_sentence(message),
        meaning=texts.meaning,
        remedy=special_remedy(known, message) or texts.remedy or "",
        command=_command(found, known, message),
    )


def _command(found: Evidence, reason: Reason, message: str = "") -> str:
    return command(reason, _names(found, message)) or ""


def _names(found: Evidence, message: str = "") -> Names:
    subject = found.subject
    return Names(
        namespace=subject.metadata.namespace,
        kind=subject.KIND.singular,
        name=subject.metadata.name,
        fleet=_fleet_name(subject) or _FLEET,
        pod=_pod_name(found, message),
        gateway=f" --gateway {found.gateway}" if found.gateway else "",
        selector="" if _fleet_name(subject) or isinstance(subject, PoCFleet) else quote(str(subject.spec.pods)),
    )


def _fleet_name(subject: Subject) -> str:
    if isinstance(subject, PoCFleet):
        return subject.metadata.name
    return subject.spec.fleet_ref.name if subject.spec.fleet_ref is not None else ""


def _pod_name(found: Evidence, message: str) -> str:
    """Return the pod that a message names, else the first that is not ready, else the first."""
    names = sorted((pod.name for pod in found.pods), key=lambda name: -len(name))
    named = [name for name in names if name in message]
    unready = [pod.name for pod in found.pods if not pod.ready]
    return next(iter([*named, *unready, *(pod.name for pod in found.pods)]), _POD)


def lost(found: Evidence) -> Iterable[Finding]:
    """What a round lacks although it is complete: any result, or pods for a tenth of its time and more."""
    subject = found.subject
    if not isinstance(subject, PoCRound) or subject.status.state is not State.COMPLETE:
        return
    status = subject.status
    if not has_begun(status):  # its author has ended it before
        return
    if not status.totals.delivered:
        yield Finding(
            reason=NO_RESULTS,
            seen="No result was delivered.",
            meaning="A round is complete at its `stop`, or when it is finished, whatever its pods have computed.",
            remedy="Look at the last warnings and at the pods' logs, and create another round.",
            command=_command(found, Reason.PODS_UNREACHABLE),
        )
    if waits := long_waits(status, _LEAST_WAIT):
        yield Finding(
            reason=Reason.SLOTS_WAITING,
            seen=f"Slots had no pod for a part of the {tell_waits(status, waits)}.",
            meaning="Nothing of a slot is computed meanwhile.",
            remedy="Replace pods between rounds, as a PoCFleet does by itself, and ask for no more groups than pods.",
        )


def _of_fleet(found: Evidence) -> Iterable[Finding]:
    """What is wrong with the fleet whose pods do the work, while they are to."""
    subject, fleet = found.subject, found.fleet
    if fleet is None or isinstance(subject, PoCFleet) or subject.status.state.finished:
        return
    around = Evidence(subject=fleet, now=found.now, pods=found.pods)
    for finding in _of_conditions(around):
        seen = f'Its fleet "{fleet.metadata.name}": {finding.seen}'
        yield finding.model_copy(update={"seen": seen})


def _of_pods(found: Evidence) -> Iterable[Finding]:
    subject = found.subject
    if isinstance(subject, Work) and subject.status.state.finished:
        return
    unready = [pod for pod in found.pods if not pod.ready or pod.terminating]
    for pod in unready[:_MOST_PODS]:
        yield _of_pod(pod, found.logs.get((pod.namespace, pod.name)))
    if len(unready) > _MOST_PODS:
        yield Finding(reason="PodNotReady", seen=f"{len(unready) - _MOST_PODS} more pods are not ready.")


def _of_pod(pod: PodView, log: LogEnd | None) -> Finding:
    where = f"kubectl -n {pod.namespace}"
    ended = next((one.last_end for one in pod.containers if one.last_end), "")
    why = "is being deleted" if pod.terminating else f"is not ready ({why_waiting(pod) or 'it starts'})"
    step = step_of(log.text) if log is not None else None
    if log is not None:
        why = f"is Loading: {step}" if step else "is Loading"
    looks = f"{where} logs {pod.name} --previous --tail=50" if ended else f"{where} describe pod {pod.name}"
    if log is not None and (log.error or not ended):
        looks = f"{where} logs {pod.name} -c {server_name(pod)} --tail=50"
    return Finding(
        reason="PodNotReady",
        seen=f"Pod {pod.name} {why}{f'; it last ended with {ended}' if ended else ''}.",
        meaning=_of_log(log) if log is not None and step is None else "",
        command=looks,
    )


def _of_log(log: LogEnd) -> str:
    """Return what is to be told of a log that names no step."""
    if log.error:
        return f"Its log could not be read: {log.error}."
    line = Redactor().text(last_line(log.text))
    return f"Its log ends with: {line[:_LINE]}{'…' if len(line) > _LINE else ''}" if line else "Its log is empty."


def _of_chat(found: Evidence) -> Iterable[Finding]:
    held = [name for (_, name), chat in found.chat.items() if chat.held]
    if held and isinstance(found.subject, PoCRound) and found.subject.status.state is State.RUNNING:
        yield Finding(
            reason="HeldByChat",
            seen=f"Chat holds PoC back on {len(held)} of {len(found.chat)} pods: {', '.join(held[:3])}.",
            meaning="Chat goes before PoC on these pods. The round goes on when chat leaves the GPUs time.",
            remedy="Nothing, unless it lasts: then send less chat to these pods, or add pods.",
            command=f"kubectl poc -n {found.subject.metadata.namespace} round watch {found.subject.metadata.name}",
        )


def _of_gateway(found: Evidence) -> Iterable[Finding]:
    """What keeps results in the gateway, or out of it. The operator does not know: it asks what is stored."""
    told = found.forwarding
    if told is None:
        return
    if told.storage_full and told.knows_round and not _has_delivered(found.subject):
        yield Finding(
            reason="StorageFull",
            seen=f"The disk of the gateway {told.place} is full.",
            meaning="It stores nothing new. Pods keep their results, and send them when there is room.",
            remedy="Enlarge its volume, or keep rounds for a shorter time (gateway.retention).",
            command=f"kubectl -n {told.place.namespace} get pvc",
        )
    yield from undelivered(found)


def undelivered(found: Evidence) -> Iterable[Finding]:
    """What the gateway has and the receiver does not take."""
    if found.forwarding is not None:
        yield from waiting_results(found.forwarding, _names(found))


def waiting_results(told: Forwarding, names: Names) -> Iterable[Finding]:
    """What a gateway tells of results that wait for a receiver, if it does not take them."""
    soon = f" in {max(1, round(told.next_try_seconds))} s" if told.next_try_seconds else ""
    if told.backlog and told.last_error:
        yield Finding(
            reason=Reason.RECEIVER_FAILING,
            seen=f"The receiver {told.receiver} does not take results: {told.last_error.rstrip('.')}.",
            meaning=f"{number(told.backlog)} results wait at the gateway, which tries again by itself{soon}.",
            remedy=receiver_remedy(told.last_error),
            command=results_command(names),
        )


def _has_delivered(subject: Subject) -> bool:
    """Whether it is a round that is over, and whose results have all left its pods."""
    if not isinstance(subject, PoCRound):
        return False
    status = subject.status
    return status.state.finished and status.totals.delivered >= status.totals.checked


def _warnings(events: Sequence[Event]) -> list[Event]:
    first = datetime.min.replace(tzinfo=None)
    ordered = sorted(events, key=lambda event: event.time.replace(tzinfo=None) if event.time else first)
    return [event for event in ordered if event.type == "Warning"][-_MOST_EVENTS:]


def _event(event: Event, now: datetime) -> str:
    since = age(event.time, now)
    times = f" ({event.count} times)" if event.count > 1 else ""
    return f"{since} ago: {event.reason}: {event.message}{times}"


def sentences(told: Account) -> list[str]:
    """Return the explanation as lines of text for people."""
    lines = [f"{told.subject}", told.summary]
    for finding in told.findings:
        lines += ["", f"{finding.reason}: {finding.seen}"]
        lines += [f"  {text}" for text in (finding.meaning, finding.remedy and f"What to do: {finding.remedy}") if text]
    if not told.findings:
        lines += ["", "Nothing is wrong."]
    if told.events:
        lines += ["", "Last warnings:", *(f"  {event}" for event in told.events)]
    return [*lines, "", "Next:", *(f"  {one}" for one in told.next)]
