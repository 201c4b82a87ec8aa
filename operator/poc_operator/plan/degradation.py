# SPDX-License-Identifier: Apache-2.0
"""What is lost, missing or in doubt in a round that goes on or is over. The first rule with an answer wins."""

from collections.abc import Callable

from poc_operator.model.conditions import Reason
from poc_operator.model.status import RoundStatus, SlotState
from poc_operator.plan.crosscheck import describe
from poc_operator.plan.snapshot import Snapshot

Verdict = tuple[bool, Reason, str]
Finding = tuple[Reason, str]

#: So many slots are named in a message.
_NAMED = 3


def _failed(_: Snapshot, status: RoundStatus) -> Finding | None:
    failed = [share for share in status.shares if share.state is SlotState.FAILED]
    if not failed:
        return None
    return Reason.SLOTS_FAILED, f"{len(failed)} slots were given up, the first: {failed[0].error}"


def _stalled(_: Snapshot, status: RoundStatus) -> Finding | None:
    stalled = [slot for slot in status.assignments if slot.state is SlotState.STALLED]
    if not stalled:
        return None
    return Reason.SLOTS_STALLED, f"{len(stalled)} slots get nothing done, the first: {stalled[0].error}"


def _pods_disagree(_: Snapshot, status: RoundStatus) -> Finding | None:
    check = status.cross_check
    return (Reason.PODS_DISAGREE, describe(check)) if check is not None and check.deviating else None


def _conflicts(snapshot: Snapshot, status: RoundStatus) -> Finding | None:
    found = [(slot, stored.conflicts) for slot in status.assignments if (stored := snapshot.collected_of(slot))]
    named = [f"node {slot.node} group {slot.group} (pod {slot.pod}: {count})" for slot, count in found if count]
    if not named:
        return None
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    slots = f"{', '.join(named[:_NAMED])}{more}"
    return Reason.RESULTS_CONFLICT, f"results came twice and differ: {slots}; the first ones are kept"


def _gateway_unreachable(snapshot: Snapshot, _: RoundStatus) -> Finding | None:
    gateway = snapshot.gateway
    if gateway is None or gateway.error is None:
        return None
    return (
        Reason.GATEWAY_UNREACHABLE,
        f"{gateway.error}; pods compute on and deliver later, counts come from them alone",
    )


def _undelivered(snapshot: Snapshot, status: RoundStatus) -> Finding | None:
    missing = sum(slot.next - slot.delivered for slot in status.assignments)
    if not missing or any(slot.state.active for slot in status.assignments):
        return None
    receiver = "spec.callbackURL" if snapshot.gateway is None else "the gateway"
    return Reason.DELIVERY_INCOMPLETE, f"{missing} computed nonces were not delivered to {receiver}"


def _rejected(_: Snapshot, status: RoundStatus) -> Finding | None:
    rejected = status.totals.rejected
    return (Reason.RESULTS_REJECTED, f"{rejected} nonces had no finite result or were refused") if rejected else None


def _theory_disagrees(_: Snapshot, status: RoundStatus) -> Finding | None:
    found = status.calibration
    if found is None or found.agrees:
        return None
    theory = f"by theory rTarget {found.r_target} makes {found.theory_rate} valid"
    return Reason.THEORY_DISAGREES, f"{theory}, measured is {found.valid_rate}"


def _waiting(_: Snapshot, status: RoundStatus) -> Finding | None:
    waiting = [slot for slot in status.assignments if slot.state is SlotState.WAITING]
    if not waiting or status.start_time is None:
        return None
    return Reason.SLOTS_WAITING, f"{len(waiting)} of {len(status.assignments)} slots wait for a free, ready pod"


RULES: tuple[Callable[[Snapshot, RoundStatus], Finding | None], ...] = (
    _failed,
    _stalled,
    _pods_disagree,
    _conflicts,
    _gateway_unreachable,
    _undelivered,
    _rejected,
    _theory_disagrees,
    _waiting,
)


def degraded(snapshot: Snapshot, status: RoundStatus) -> Verdict:
    """Return the condition Degraded."""
    finding = next((found for rule in RULES if (found := rule(snapshot, status))), None)
    return (True, *finding) if finding else (False, Reason.ALL_SLOTS_WORK, "no slot is lost")
