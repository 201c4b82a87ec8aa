# SPDX-License-Identifier: Apache-2.0
"""The chain of policies of a PoCRound: ``POLICIES``, read from top to bottom, is what the operator does."""

from collections.abc import Callable
from dataclasses import replace

from poc_operator.planning.lifecycle import expire
from poc_operator.planning.snapshot import Step, condensed
from poc_operator.rounds.allowance import extend_pods, grant
from poc_operator.rounds.cross_check import cross_check
from poc_operator.rounds.end import end, finish, suspend
from poc_operator.rounds.leaving import record_leases, stop_leaving_pods
from poc_operator.rounds.loss import heal_stalls
from poc_operator.rounds.observe import observe
from poc_operator.rounds.ownership import attributed
from poc_operator.rounds.rivals import decide_rivals
from poc_operator.rounds.slots import bind_pods, fix_slots, note_waits
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from poc_operator.rounds.start import catch_up, renew_credentials, rewind, start_pods
from poc_operator.rounds.stop import replace_other_work, stop_orphans, stop_pods
from poc_operator.rounds.summary import note_times, summarise, tell

Policy = Callable[[RoundSnapshot, RoundStep], RoundStep]

POLICIES: tuple[Policy, ...] = (
    observe,  # what happened to each slot
    note_times,  # since when it runs, since when nobody answers
    end,  # must it end?
    suspend,  # may it run?
    fix_slots,  # which residue classes, once
    bind_pods,  # which pod for which slot
    note_waits,  # how long slots have none
    catch_up,  # where it begins after a loss
    rewind,  # where it begins on pods that cannot resume
    grant,  # how far it may go
    record_leases,  # how long pods may compute unasked
    replace_other_work,  # what a pod must put down first
    stop_orphans,  # which pods compute what is not theirs
    stop_leaving_pods,  # which pods must give their slots back
    start_pods,
    renew_credentials,  # which pods the gateway does not know any more
    extend_pods,
    heal_stalls,  # which pods get nothing done
    stop_pods,
    decide_rivals,  # which of two results is honest
    cross_check,  # whether pods agree on the same nonces
    finish,
    summarise,
    tell,
)


def plan(snapshot: RoundSnapshot) -> RoundStep:
    """Return the round's next status, and the actions to take once it is recorded."""
    step: RoundStep = Step(status=snapshot.round.status)
    if step.status.state.finished:
        return expire(snapshot, step)
    snapshot = attributed(snapshot)
    for policy in POLICIES:
        step = policy(snapshot, step)
    return replace(step, events=condensed(step.events))
