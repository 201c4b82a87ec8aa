# SPDX-License-Identifier: Apache-2.0
"""A round says itself that its receiver does not take results from the gateway."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import Outcome, Result, SlotState, State
from poc_operator.controller.observing import after_answer
from poc_operator.observed import CollectedRound, GatewayReport
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundStep
from tests.unit.poc_operator.build import CALLBACK, NOW, UID, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState

ERROR = "https://network:1/x: HTTP 502: Bad Gateway"
OUTCOME = Outcome(type=Result.COMPLETE, reason=Reason.COMPLETED, message="spec.stop.afterNonces of 8 reached")
OVER = a_slot(state=SlotState.DONE, next=8, delivered=8, valid=8)


def stored(forwarded: int, error: str | None = ERROR) -> CollectedRound:
    """What a gateway tells that has 8 results, of which the receiver took so many."""
    slot = {"slot": 0, "last_nonce": 7, "delivered_index": 8}
    sums = {"stored": 8, "duplicates": 0, "conflicts": 0, "forwarded": forwarded}
    waiting = 8 - forwarded if error else 0
    fields: dict[str, Any] = {"forwarding_error": error, "waiting": waiting}
    return CollectedRound.model_validate({"uid": UID, **sums, **fields, "slots": [{**slot, **sums}]})


def report(forwarded: int = 3, error: str | None = ERROR, *, since: float = 0) -> GatewayReport:
    """The same after a question; its receiver takes nothing since so many seconds after now."""
    failing = NOW + timedelta(seconds=since) if error else None
    return GatewayReport(callback=CALLBACK, collected=stored(forwarded, error), asked=NOW, failing_since=failing)


def planned(status: RoundStatus, seen: GatewayReport, after: float) -> RoundStep:
    told = says(PowState.GENERATING, next_index=12, delivered_index=8, delivered_valid=8)
    if status.stop_time is not None:
        told = says(PowState.STOPPED)
    return plan(look(a_round(status, callbackURL="https://network:1/x"), (a_pod("a"), told), after=after, gateway=seen))


def degraded(step: RoundStep) -> tuple[str, str, str]:
    condition = next(found for found in step.status.own_conditions if found.type == "Degraded")
    return condition.status, condition.reason, condition.message


RUNNING = a_status(a_slot(next=8, delivered=8, valid=8))
TOLD = ("True", Reason.RECEIVER_FAILING, f"the receiver does not take results ({ERROR}); 5 results wait at the gateway")


def test_a_running_round_says_so_after_a_minute() -> None:
    assert degraded(planned(RUNNING, report(), 59))[0] == "False", "it may pass"
    step = planned(RUNNING, report(), 60)
    assert degraded(step) == TOLD
    assert (step.status.degraded, step.events) == (Reason.RECEIVER_FAILING, []), "it may come and go"
    assert degraded(planned(step.status, report(error=None), 62))[0] == "False"


def ended(after: float = 5) -> RoundStep:
    """A round that ends while its receiver takes nothing, for a moment only."""
    return planned(a_status(OVER, stop_time=NOW, outcome=OUTCOME), report(), after)


def test_a_round_that_ends_says_what_waited() -> None:
    """Nobody looks at it any more, so it says what was, and not what is."""
    step = ended()
    assert step.status.state is State.COMPLETE
    assert (
        step.status.message
        == f"{OUTCOME.message}; at its end 5 results waited at the gateway for the receiver ({ERROR})"
    )
    assert degraded(step)[:2] == ("False", Reason.ALL_SLOTS_WORK)
    later = planned(step.status, report(8, None), 70)
    assert later.status == step.status


def test_what_a_silent_gateway_told_before_is_not_told() -> None:
    silent = replace(report(), error="no answer within 5 s")
    assert degraded(planned(RUNNING, silent, 60))[1] != Reason.RECEIVER_FAILING
    step = planned(a_status(OVER, stop_time=NOW, outcome=OUTCOME), silent, 5)
    assert step.status.message == OUTCOME.message


def test_a_round_whose_receiver_has_everything_says_nothing() -> None:
    step = planned(a_status(OVER, stop_time=NOW, outcome=OUTCOME), report(8, None), 5)
    assert step.status.message == OUTCOME.message


def test_it_fails_since_the_receiver_took_something_last() -> None:
    def asked(known: GatewayReport, seconds: float, told: CollectedRound | None) -> GatewayReport:
        return after_answer(known, told, NOW + timedelta(seconds=seconds), {})

    def since(known: GatewayReport) -> float | None:
        found: datetime | None = known.failing_since
        return (found - NOW).total_seconds() if found is not None else None

    first = asked(GatewayReport(callback=CALLBACK), 0, stored(3))
    again = asked(first, 10, stored(3))
    some = asked(again, 20, stored(4))
    assert (since(first), since(again), since(some)) == (0, 0, 20)
    assert since(asked(some, 30, stored(8, None))) is None
    assert since(asked(some, 30, None)) is None
