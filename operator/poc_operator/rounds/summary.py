# SPDX-License-Identifier: Apache-2.0
"""What a person reads of a round: totals, how it gets on, and what is lost, missing or in doubt."""

from collections.abc import Callable

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, RoundStatus, Totals
from poc_operator.apis.v1alpha1.schema import number_of
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import CollectedSlot, is_container_session
from poc_operator.planning import lifecycle
from poc_operator.planning.conditions import first_few, given_up, set_conditions, tell_pods
from poc_operator.planning.eligibility import Finding, unusable_pods
from poc_operator.planning.lifecycle import tally
from poc_operator.rounds.allowance import waits_for_more
from poc_operator.rounds.counters import is_doubted, settled_nonces
from poc_operator.rounds.cross_check import describe
from poc_operator.rounds.rivals import under_way
from poc_operator.rounds.slots import free_pods
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from poc_operator.rounds.stop import is_left
from vllm_poc.wire.messages import Protocol


def note_times(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Record when the first pod confirmed its start, since when no pod has answered, and since when none works."""
    slots, before = step.status.assignments, snapshot.round.status.assignments
    running = [slot for slot in slots if slot.state is SlotState.RUNNING]
    # A pod that is not believed may compute on without anything to show for it. One that waits for more gets it when
    # nobody works.
    gets_on = sum(slot.delivered for slot in slots) > sum(slot.delivered for slot in before)
    # One that has just begun may have nothing to do yet, and what others were dealt is theirs for a while.
    ran = {(slot.node, slot.group) for slot in before if slot.state is SlotState.RUNNING}
    begins = any((slot.node, slot.group) not in ran for slot in running)
    works = gets_on or begins or not all(is_doubted(slot) or waits_for_more(snapshot, slot) for slot in running)
    others = step.status.slots - len(slots)
    extent = number_of(len(slots), "slot") + (f"; other clusters have {others}" if others > 0 else "")
    return lifecycle.note_times(snapshot, step, started=bool(running), works=works, extent=extent)


def summarise(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Fill in what ``kubectl get`` shows."""
    return tally(snapshot, step.extended(totals=totals(snapshot, step.status)))


def totals(snapshot: RoundSnapshot, status: RoundStatus) -> Totals:
    """Sum up the slots."""
    slots = status.assignments
    settled = [settled_nonces(snapshot.round, slot) for slot in slots]
    checked = sum(map(max, (slot.next for slot in slots), settled))
    return Totals(
        checked=checked,
        valid=sum(slot.valid for slot in slots),
        delivered=sum(settled),
        rejected=sum(slot.rejected for slot in slots),
        retries=sum(max(0, slot.attempts - 1) for slot in slots),
        rate=f"{_rate(snapshot, status, checked):.1f}",
    )


def _rate(snapshot: RoundSnapshot, status: RoundStatus, checked: int) -> float:
    """Return nonces per second: of the pods that compute now, and the mean once the round is over."""
    if status.completion_time is None or status.stop_time is None:
        believed = [slot for slot in status.assignments if slot.state is SlotState.RUNNING and not is_doubted(slot)]
        return sum(snapshot.rate_of(slot) for slot in believed if not _repeats(snapshot, slot))
    # It may have ended before it started again after a suspension.
    last = (status.stop_time - status.start_time).total_seconds() if status.start_time is not None else 0.0
    return checked / max(1.0, status.worked_seconds + last)


def _repeats(snapshot: RoundSnapshot, slot: Assignment) -> bool:
    """Whether the slot's pod computes once more what is known already, as one that began anew."""
    told = snapshot.report_of(slot).status
    return told is not None and told.next_index < slot.next


def tell(snapshot: RoundSnapshot, step: RoundStep) -> RoundStep:
    """Write the conditions."""
    findings = [found for rule in FINDINGS if (found := rule(snapshot, step.status))]
    # A round that has started is not refused any more.
    blocked = snapshot.blocked if step.status.start_time is None else None
    return set_conditions(snapshot, step, pace=_pace(snapshot, step.status), findings=findings, blocked=blocked)


def _pace(snapshot: RoundSnapshot, status: RoundStatus) -> str:
    running = [slot for slot in status.assignments if slot.state is SlotState.RUNNING]
    pace = tell_pods(snapshot, running, f"{status.totals.rate} nonces/s")
    spare = len(free_pods(snapshot, status.assignments))
    return (
        f"{pace}; {spare} more without a slot (their number is fixed at the start: {status.slots})" if spare else pace
    )


#: A receiver that has accepted nothing from a pod for so long is told of. What is shorter passes by itself, such as the
#: restart of a gateway: a pod tries again within 30 s. The alert waits for another minute.
FAILING_SECONDS = 60.0
#: Name of a pod that delivered before the gateway asked for credentials.
UNKNOWN = "(unknown)"


def _failed(_: RoundSnapshot, status: RoundStatus) -> Finding | None:
    return given_up(status, "slot")


def _stalled(_: RoundSnapshot, status: RoundStatus) -> Finding | None:
    stalled = [slot for slot in status.assignments if slot.state is SlotState.STALLED or _is_hung(slot)]
    if not stalled:
        return None
    first = stalled[0]
    why = first.error or f"pod {first.pod} stalled, was told to start again, and has made no progress since"
    return Reason.SLOTS_STALLED, f"{number_of(len(stalled), 'slot gets', 'slots get')} nothing done, the first: {why}"


def _is_hung(slot: Assignment) -> bool:
    """Whether the slot's pod has stalled, and got nothing done since it was told to start again.

    A pod that always hangs is in the state STALLED for moments only, which neither a user nor an alert may meet.
    """
    is_at_work = slot.state in (SlotState.STARTING, SlotState.RUNNING) and slot.end != slot.start
    return is_at_work and slot.stalls > 0 and slot.next <= slot.start


def _paused(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    told = [(slot, snapshot.report_of(slot).status) for slot in status.assignments if slot.state is SlotState.RUNNING]
    paused = [f"{slot.pod} ({found.paused_by})" for slot, found in told if found is not None and found.paused_by]
    return (Reason.SLOTS_PAUSED, f"pods compute nothing meanwhile: {first_few(paused)}") if paused else None


def _leaving(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    leaving = [slot for slot in status.assignments if slot.state is SlotState.LEAVING]
    if not leaving or status.stop_time is not None:
        return None
    first, end = leaving[0], leaving[0].lease_end_time
    ending = any(pod.uid == first.uid and pod.terminating for pod in snapshot.existing_pods)
    when = " when its pod has ended" if ending else ""
    limit = f" by {end:%Y-%m-%dT%H:%M:%SZ} at the latest" if end is not None else ""
    which = f"; the first moves on{when}{',' if when and limit else ''}{limit}" if when or limit else ", the first"
    waiting = number_of(len(leaving), "slot waits for its pod", "slots wait for their pods")
    return Reason.SLOTS_LEAVING, f"{waiting} to stop{which}: {first.error}"


def _pods_left(_: RoundSnapshot, status: RoundStatus) -> Finding | None:
    left = [slot.error or "" for slot in status.assignments if is_left(slot)]
    return (Reason.PODS_LEFT, f"pods have not stopped: {first_few(left)}") if left else None


def _not_believed(_: RoundSnapshot, status: RoundStatus) -> Finding | None:
    doubted = [slot.error or "" for slot in status.assignments if is_doubted(slot)]
    return (Reason.REPORT_CONTRADICTORY, f"pods tell what cannot be true: {first_few(doubted)}") if doubted else None


def _pods_disagree(_: RoundSnapshot, status: RoundStatus) -> Finding | None:
    check = status.cross_check
    return (Reason.PODS_DISAGREE, describe(check)) if check is not None and check.deviating else None


def _conflicts(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    collected = snapshot.gateway.collected if snapshot.gateway is not None else None
    if collected is not None and collected.forgers and not collected.undecided:
        return None  # who lied is known
    if snapshot.round.spec.protocol is Protocol.DECODE:
        return None  # chains of honest pods fork, and a reference pod that starts again computes all of its slot again
    found = [(slot, stored) for slot in status.assignments if (stored := snapshot.collected_of(slot))]
    named = [
        f"node {slot.node} group {slot.group} ({_rivals(slot, stored)})" for slot, stored in found if stored.conflicts
    ]
    if not named:
        return None
    message = f"results came twice and differ: {first_few(named)}; the first ones are kept"
    undecided = collected.undecided if collected is not None else 0
    return Reason.RESULTS_CONFLICT, f"{message}{_undecided(status, undecided)}"


def _undecided(status: RoundStatus, count: int) -> str:
    if not count:
        return ""
    check = status.rivals
    if check is not None and under_way(status):
        return f", and pod {check.pod} computes some of {count} again"
    return f", and {count} are undecided: no pod that delivered none of them could compute them"


def _results_forged(snapshot: RoundSnapshot, _: RoundStatus) -> Finding | None:
    collected = snapshot.gateway.collected if snapshot.gateway is not None else None
    if collected is None or not collected.forgers:
        return None
    named = [f"pod {one.pod} ({one.count})" for one in collected.forgers]
    return Reason.RESULTS_FORGED, f"pods delivered results that others do not confirm: {first_few(named)}"


def _rivals(slot: Assignment, stored: CollectedSlot) -> str:
    pairs = [
        f"{pair.count} from nonce {pair.nonce} on: pod {pair.kept or UNKNOWN}, then pod {pair.other or UNKNOWN}"
        for pair in stored.rivals
    ]
    return first_few(pairs) if pairs else f"pod {slot.pod}: {stored.conflicts}"


def _deliveries_failing(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    gateway = snapshot.gateway
    if gateway is not None and (gateway.error or (gateway.collected and gateway.collected.limit_reached)):
        return None  # another finding says why
    told = [(slot, snapshot.report_of(slot)) for slot in status.assignments if slot.state.active and _lacks(slot)]
    failing = [
        f"{slot.pod} ({report.status.delivery_error})"
        for slot, report in told
        if report.status is not None and report.undelivered_seconds >= FAILING_SECONDS
    ]
    return (Reason.DELIVERIES_FAILING, f"pods cannot deliver: {first_few(failing)}") if failing else None


def _lacks(slot: Assignment) -> bool:
    """Whether the receiver has not all that was computed. What it has refused for good waits no more."""
    return slot.next > slot.delivered or slot.rejected > 0


def _deliveries_refused(snapshot: RoundSnapshot, _: RoundStatus) -> Finding | None:
    collected = snapshot.gateway.collected if snapshot.gateway is not None else None
    if collected is None or not collected.refused:
        return None
    named = [f"pod {one.pod} ({one.count} times, the last: {one.why})" for one in collected.refused]
    return Reason.DELIVERIES_REFUSED, f"the gateway refuses what pods may not deliver: {first_few(named)}"


def _receiver_failing(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    """Of a round that is over nobody looks whether it still lasts: the message of its end tells of it."""
    gateway = snapshot.gateway
    told = gateway.collected if gateway is not None else None
    if gateway is None or told is None or told.forwarding_error is None or status.completion_time is not None:
        return None
    if gateway.error is not None:  # what was told last may be over
        return None
    if snapshot.seconds_since(gateway.failing_since) < FAILING_SECONDS:
        return None
    waiting = f"{told.waiting} results wait at the gateway"
    return Reason.RECEIVER_FAILING, f"the receiver does not take results ({told.forwarding_error}); {waiting}"


def _round_full(snapshot: RoundSnapshot, _: RoundStatus) -> Finding | None:
    collected = snapshot.gateway.collected if snapshot.gateway is not None else None
    if collected is None or collected.limit_reached is None:
        return None
    return (
        Reason.ROUND_FULL,
        f"the gateway has {collected.stored} results and refuses new ones: {collected.limit_reached}",
    )


def _gateway_contradictory(snapshot: RoundSnapshot, _: RoundStatus) -> Finding | None:
    found = [f"slot {slot}: {why}" for slot, why in sorted(snapshot.gateway_contradictions.items())]
    if not found:
        return None
    return Reason.GATEWAY_CONTRADICTORY, f"the gateway's numbers cannot be true and are not counted: {first_few(found)}"


def _gateway_unreachable(snapshot: RoundSnapshot, _: RoundStatus) -> Finding | None:
    gateway = snapshot.gateway
    if gateway is None or gateway.error is None:
        return None
    return (
        Reason.GATEWAY_UNREACHABLE,
        f"{gateway.error}; pods compute on and deliver later, counts come from them alone",
    )


def _callback_secret_unavailable(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    return snapshot.blocked if status.start_time is not None and status.stop_time is None else None


def _undelivered(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    # A pod that cannot resume drops at its stop what it was about to send: that is expected.
    missing = sum(slot.next - slot.delivered for slot in status.assignments if not is_container_session(slot.session))
    is_closing = status.outcome is not None and status.completion_time is None  # the gateway may know more
    if not missing or is_closing or any(slot.state.active for slot in status.assignments):
        return None
    receiver = "spec.callbackURL" if snapshot.gateway is None else "the gateway"
    message = f"{number_of(missing, 'computed nonce was', 'computed nonces were')} not delivered to {receiver}"
    # The last that is heard of it: nobody asks the pods of a round that is over.
    told = [snapshot.report_of(slot).status for slot in status.assignments if slot.next > slot.delivered]
    errors = [one.delivery_error for one in told if one is not None and one.round_id == snapshot.round.id]
    error = next(filter(None, errors), None)
    return Reason.DELIVERY_INCOMPLETE, f"{message} ({error})" if error else message


def _rejected(_: RoundSnapshot, status: RoundStatus) -> Finding | None:
    if not (rejected := status.totals.rejected):
        return None
    return Reason.RESULTS_REJECTED, f"{number_of(rejected, 'nonce')} rejected: without a finite result, or refused"


def _waiting(snapshot: RoundSnapshot, status: RoundStatus) -> Finding | None:
    slots = status.assignments
    waiting = [slot for slot in slots if slot.state is SlotState.WAITING]
    if not waiting or status.start_time is None or status.stop_time is not None or snapshot.blocked:
        return None
    why = unusable_pods(snapshot, beside=frozenset(slot.uid for slot in slots if slot.state.active))
    return Reason.SLOTS_WAITING, f"{len(waiting)} of {len(slots)} slots wait for a free pod{why and f': {why}'}"


FINDINGS: tuple[Callable[[RoundSnapshot, RoundStatus], Finding | None], ...] = (
    _failed,
    _stalled,
    _paused,
    _leaving,
    _pods_left,
    _not_believed,
    _pods_disagree,
    _results_forged,
    _conflicts,
    _deliveries_failing,
    _deliveries_refused,
    _receiver_failing,
    _round_full,
    _gateway_contradictory,
    _gateway_unreachable,
    _callback_secret_unavailable,
    _undelivered,
    _rejected,
    _waiting,
)
