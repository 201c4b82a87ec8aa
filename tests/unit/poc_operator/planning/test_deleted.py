# SPDX-License-Identifier: Apache-2.0
"""A deletion is an end of every kind of object, whatever it was doing."""

from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.calibration import CalibrationSample, CalibrationStatus
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import Outcome, Result, SlotState, State, WorkStatus
from poc_operator.apis.v1alpha1.validation import Sample, ValidationStatus
from poc_operator.calibrations import plan as calibrations
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import AskPod, Snapshot, StartPod, Step, StopPod, Work
from poc_operator.rounds import plan as rounds
from poc_operator.rounds.snapshot import RoundSnapshot
from poc_operator.validations import plan as validations
from tests.unit.poc_operator.build import NOW, a_calibration, a_pod, a_round, a_slot, a_status, a_validation, says
from vllm_poc.wire.answers import PowState

SINCE = NOW - timedelta(seconds=5)
COMPLETE = Outcome(type=Result.COMPLETE, reason="Completed", message="done")
#: What an object may be doing when it is deleted.
DOING: dict[str, dict[str, Any]] = {
    "nothing yet": {},
    "running": {"start_time": SINCE},
    "suspending": {"start_time": SINCE, "stop_time": SINCE},
    "stopping": {"start_time": SINCE, "stop_time": SINCE, "outcome": COMPLETE},
}


def planned(work: Work, report: PodReport, *, after: float = 0.0) -> Step[Any]:
    """The next step for an object with one pod."""
    now = NOW + timedelta(seconds=after)
    seen = Snapshot(work=work, pods=[a_pod("a")], reports={"a": report}, now=now, find_other_rounds=tuple)
    fields: dict[str, Any] = vars(seen)
    match work.KIND.plural:
        case "pocrounds":
            return rounds.plan(RoundSnapshot(**fields))
        case "pocvalidations":
            return validations.plan(validations.ValidationSnapshot(**fields, proofs="there is no ConfigMap"))
        case _:
            return calibrations.plan(calibrations.CalibrationSnapshot(**fields))


def deleted(work: Any, status: WorkStatus) -> Any:  # noqa: ANN401 - of any kind
    """The object, as it is after its deletion."""
    metadata = work.metadata.model_copy(update={"deletion_timestamp": NOW, "generation": 2})
    return work.model_copy(update={"metadata": metadata, "status": status})


def a_share(kind: str, state: SlotState) -> Any:  # noqa: ANN401 - of any kind
    """A slot or a sample."""
    if kind == "PoCRound":
        return a_slot("a", state=state)
    made: type[Any] = Sample if kind == "PoCValidation" else CalibrationSample
    return made(first=0, count=5, state=state, pod="a", uid="a", attempts=1)


def a_status_of(kind: str, share: Any, **fields: Any) -> WorkStatus:  # noqa: ANN401
    """A status with one slot or sample, or none."""
    shares = [share] if share is not None else []
    if kind == "PoCRound":
        return a_status(*shares, **{"start_time": None, **fields})
    made: type[WorkStatus] = ValidationStatus if kind == "PoCValidation" else CalibrationStatus
    return made(**{made.SHARES: shares, **fields})


WORK: list[Any] = [a_round(stop=None), a_validation(), a_calibration()]


@pytest.mark.parametrize("state", [None, SlotState.WAITING, SlotState.STARTING, SlotState.RUNNING, SlotState.DONE])
@pytest.mark.parametrize("doing", DOING.values(), ids=DOING)
@pytest.mark.parametrize("work", WORK, ids=lambda work: str(work.KIND.kind))
@pytest.mark.parametrize("suspend", [False, True])
def test_a_deleted_object_ends_and_starts_nothing(
    work: Any,  # noqa: ANN401
    doing: dict[str, Any],
    state: SlotState | None,
    suspend: bool,
) -> None:
    kind = work.KIND.kind
    share = a_share(kind, state) if state is not None else None
    work = work.model_copy(update={"spec": work.spec.model_copy(update={"suspend": suspend})})
    work = deleted(work, a_status_of(kind, share, **doing))
    computing = says(PowState.GENERATING, next_index=5, delivered_index=5, delivered_valid=5)
    first = planned(work, computing)
    assert not [action for action in first.actions if isinstance(action, StartPod | AskPod)]
    assert first.status.stop_time == doing.get("stop_time", NOW)
    assert first.status.outcome is not None
    assert first.status.outcome.reason == (COMPLETE.reason if "outcome" in doing else "Deleted")
    if kind == "PoCRound" and state is not None and state.active:
        assert [action.pod.uid for action in first.actions if isinstance(action, StopPod)] == ["a"]
        assert first.status.state is State.STOPPING
    stopped = says(PowState.STOPPED, round_id="round-uid", next_index=5, delivered_index=5, delivered_valid=5)
    step = planned(deleted(work, first.status), stopped, after=10)
    step = planned(deleted(work, step.status), stopped, after=12)
    assert step.status.state.finished
    assert not step.status.shares or not any(share.state.active for share in step.status.shares)
    assert step.status.completion_time is not None


def test_what_is_over_stays_as_it_is() -> None:
    over = RoundStatus(state=State.COMPLETE, outcome=COMPLETE, completion_time=SINCE)
    step = planned(deleted(a_round(), over), says())
    assert (step.status.outcome, step.status.state, [*step.actions]) == (COMPLETE, State.COMPLETE, [])
