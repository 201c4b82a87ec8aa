# SPDX-License-Identifier: Apache-2.0
"""The chain of policies: reading it from top to bottom is reading what the operator does."""

from collections.abc import Callable

from poc_operator.model.spec import Mode
from poc_operator.rounds.allowance import extend_pods, grant
from poc_operator.rounds.conditions import set_conditions
from poc_operator.rounds.cross_check import cross_check
from poc_operator.rounds.end import end, expire, suspend
from poc_operator.rounds.loss import heal_stalls
from poc_operator.rounds.observe import observe
from poc_operator.rounds.partition import bind_pods, fix_slots
from poc_operator.rounds.samples import ask_pods, bind_samples, choose_samples, conclude, end_sampling, observe_samples
from poc_operator.rounds.snapshot import Plan, Snapshot, Step
from poc_operator.rounds.start import catch_up, rewind, start_pods
from poc_operator.rounds.stop import finish, replace_other_work, stop_orphans, stop_pods
from poc_operator.rounds.summary import note_times, summarise

Policy = Callable[[Snapshot, Step], Step]

POLICIES: tuple[Policy, ...] = (
    observe,  # what happened to each slot
    note_times,  # since when it runs, since when nobody answers
    end,  # must it end?
    suspend,  # may it run?
    fix_slots,  # which residue classes, once
    bind_pods,  # which pod for which slot
    catch_up,  # where it begins after a loss
    rewind,  # where it begins on pods that cannot resume
    grant,  # how far it may go
    replace_other_work,  # what a pod must put down first
    stop_orphans,  # which pods compute what is not theirs
    start_pods,
    extend_pods,
    heal_stalls,  # which pods get nothing done
    stop_pods,
    cross_check,  # whether pods agree on the same nonces
    finish,
    summarise,
    set_conditions,
)

#: Of rounds that check or calibrate: pods are asked for named nonces instead of being given a slot.
SAMPLE_POLICIES: tuple[Policy, ...] = (
    observe_samples,  # what pods answered
    note_times,
    conclude,  # what follows from all answers
    end_sampling,
    suspend,
    choose_samples,  # which nonces are asked for together, once
    bind_samples,  # which pod for which sample
    ask_pods,
    finish,
    summarise,
    set_conditions,
)


def plan(snapshot: Snapshot) -> Plan:
    """Return the round's next status, and the actions to take once it is recorded."""
    step = Step(status=snapshot.round.status)
    if step.status.state.finished:
        return expire(snapshot, step)
    for policy in POLICIES if snapshot.round.spec.mode is Mode.GENERATE else SAMPLE_POLICIES:
        step = policy(snapshot, step)
    return step
