# SPDX-License-Identifier: Apache-2.0
"""Rounds that check proofs or calibrate: what pods are asked, and what follows from their answers."""

import dataclasses
from typing import Any

import pytest

from poc_operator.model.checks import Proof
from poc_operator.model.conditions import Reason
from poc_operator.model.round import Round
from poc_operator.model.status import RoundState, RoundStatus, SlotState
from poc_operator.observed.pods import Answer, PodReport
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import AskPod, Snapshot, Step
from tests.unit.poc_operator.build import a_pod, a_round, look, says
from vllm_poc.wire.generate import GeneratedResponse, ValidatedResponse
from vllm_poc.wire.messages import PowState

PROOFS = [Proof(nonce=nonce, vector="AAAA") for nonce in range(250)]
VALIDATE: dict[str, Any] = {
    "mode": "Validate",
    "rTarget": None,
    "artifact": {"kDim": 4},
    "nodes": None,
    "stop": None,
    "proofs": {"configMap": {"name": "claims"}},
}


def validating(status: RoundStatus | None = None, **spec: Any) -> Round:  # noqa: ANN401
    return a_round(status, **VALIDATE | spec)


def seen(round_: Round, *pods: tuple[str, PodReport], proofs: Any = PROOFS, after: float = 0) -> Snapshot:  # noqa: ANN401
    snapshot = look(round_, *((a_pod(name), report) for name, report in pods), after=after)
    return dataclasses.replace(snapshot, proofs=proofs)


def asks(step: Step) -> list[AskPod]:
    return [action for action in step.actions if isinstance(action, AskPod)]


def agreed(ask: AskPod, mismatches: list[int], not_computed: list[int] | None = None) -> PodReport:
    total = len(ask.request.nonces) - len(not_computed or [])
    verdict = ValidatedResponse(
        request_id="x",
        n_total=total,
        n_mismatch=len(mismatches),
        mismatch_nonces=mismatches,
        p_value=1.0,
        fraud_detected=False,
        not_computed=not_computed or [],
    )
    return dataclasses.replace(says(), answer=Answer(key=ask.key, result=verdict))


def failed(ask: AskPod) -> PodReport:
    return dataclasses.replace(says(), answer=Answer(key=ask.key, error="no answer within 300 s"))


def test_each_idle_pod_is_asked_for_other_proofs() -> None:
    busy = says(PowState.GENERATING, round_id="another")
    step = plan(seen(validating(), ("a", says()), ("b", says()), ("c", busy)))
    assert [(ask.pod.name, ask.request.nonces[0], len(ask.request.nonces)) for ask in asks(step)] == [
        ("a", 0, 200),
        ("b", 200, 50),
    ]
    assert all(ask.request.wait and ask.request.validation is not None for ask in asks(step))


def test_the_verdict_is_about_all_samples() -> None:
    step = plan(seen(validating(), ("a", says()), ("b", says())))
    first, second = asks(step)
    reports = ("a", agreed(first, [1, 2, 3])), ("b", agreed(second, [201], not_computed=[202]))
    over = plan(seen(validating(step.status), *reports)).status
    assert over.verdict is not None
    assert (over.verdict.total, over.verdict.mismatches, over.verdict.mismatch_nonces) == (249, 4, [1, 2, 3, 201])
    assert (over.verdict.not_computed, over.verdict.fraud) == (1, True)
    assert (over.state, over.outcome and over.outcome.reason) == (RoundState.COMPLETE, Reason.FRAUD_DETECTED)
    assert (over.totals.checked, over.totals.valid, over.pods) == (250, 245, "2/2")


def test_honest_proofs_are_no_fraud() -> None:
    step = plan(seen(validating(), ("a", says()), ("b", says())))
    reports = [(ask.pod.name, agreed(ask, [])) for ask in asks(step)]
    over = plan(seen(validating(step.status), *reports)).status
    assert over.outcome is not None
    assert (over.outcome.reason, over.state) == (Reason.NO_FRAUD_DETECTED, RoundState.COMPLETE)
    assert over.outcome.message == "0 of 250 nonces mismatch, p-value 1: no fraud"


def test_without_any_finite_result_there_is_no_verdict() -> None:
    step = plan(seen(validating(), ("a", says()), proofs=PROOFS[:2]))
    over = plan(seen(validating(step.status), ("a", agreed(asks(step)[0], [], [0, 1])), proofs=PROOFS[:2])).status
    assert over.outcome is not None
    assert (over.outcome.reason, over.state) == (Reason.NOTHING_COMPUTED, RoundState.FAILED)


@pytest.mark.parametrize(
    ("claimed", "computed", "fraud"), [("1.3", 1.39, False), ("1.3", 1.41, True), ("1.5", 1.3, True)]
)
def test_distances_are_compared_with_the_target(claimed: str, computed: float, fraud: bool) -> None:
    fields: dict[str, Any] = {"rTarget": "1.4", "artifact": None}
    proofs = [Proof(nonce=5, distance=claimed)]
    step = plan(seen(validating(**fields), ("a", says()), proofs=proofs))
    (ask,) = asks(step)
    result = GeneratedResponse(request_id="x", nonces=[5], distances=[computed])
    report = dataclasses.replace(says(), answer=Answer(key=ask.key, result=result))
    over = plan(seen(validating(step.status, **fields), ("a", report), proofs=proofs)).status
    assert over.verdict is not None
    assert over.verdict.fraud is fraud


def test_a_sample_whose_pod_is_gone_goes_to_another() -> None:
    step = plan(seen(validating(), ("a", says())))
    again = plan(seen(validating(step.status), ("b", says())))
    assert [(ask.pod.name, ask.request.nonces[0]) for ask in asks(again)] == [("b", 0)]
    assert [event.reason for event in again.events] == [Reason.WORK_LOST]
    assert again.status.totals.reissues == 1


def test_an_answer_is_not_taken_for_another_attempt() -> None:
    step = plan(seen(validating(), ("a", says())))
    old = failed(asks(step)[0])
    again = plan(seen(validating(step.status), ("a", old)))
    assert asks(again)[0].key != asks(step)[0].key
    same = plan(seen(validating(again.status), ("a", old)))
    assert same.status.samples == again.status.samples
    assert Reason.WORK_LOST not in [event.reason for event in same.events]


def test_a_sample_that_fails_again_and_again_ends_the_round() -> None:
    status = RoundStatus()
    for _ in range(2):
        step = plan(seen(validating(status, reissue={"limitPerPod": 1}), ("a", says())))
        answer = failed(asks(step)[0])
        status = plan(seen(validating(step.status, reissue={"limitPerPod": 1}), ("a", answer))).status
    assert status.outcome is not None
    assert status.outcome.reason is Reason.REISSUE_LIMIT_EXCEEDED
    assert "no answer within 300 s; spec.reissue.limitPerPod of 1 is used up" in status.outcome.message


def test_a_suspended_round_asks_nothing_and_goes_on_later() -> None:
    step = plan(seen(validating(), ("a", says())))
    pause = plan(seen(validating(step.status, suspend=True), ("a", says())))
    paused = plan(seen(validating(pause.status, suspend=True), ("a", says())))
    assert asks(pause) == asks(paused) == []
    assert paused.status.state is RoundState.SUSPENDED
    resumed = plan(seen(validating(paused.status), ("a", says())))
    assert [ask.request.nonces[0] for ask in asks(resumed)] == [0]


def test_changed_proofs_end_the_round() -> None:
    step = plan(seen(validating(), ("a", says())))
    over = plan(seen(validating(step.status), ("a", says()), proofs=PROOFS[1:])).status
    assert over.outcome is not None
    assert over.outcome.reason is Reason.PROOFS_CHANGED


def test_proofs_that_cannot_be_had_are_waited_for() -> None:
    step = plan(seen(validating(), ("a", says()), proofs='there is no ConfigMap "claims"'))
    reasons = {condition.type: condition.reason for condition in step.status.conditions}
    assert reasons["Accepted"] == reasons["Progressing"] == Reason.PROOFS_UNAVAILABLE
    assert step.status.message == 'there is no ConfigMap "claims"'
    assert asks(plan(seen(validating(step.status), ("a", says())))) != []


def test_proofs_that_go_missing_meanwhile_are_waited_for() -> None:
    step = plan(seen(validating(), ("a", says()), proofs=PROOFS[:5]))
    answered = agreed(asks(step)[0], [])
    gone = plan(seen(validating(step.status), ("a", answered), proofs='there is no ConfigMap "claims"'))
    assert asks(gone) == []
    assert gone.status.outcome is None
    over = plan(seen(validating(gone.status), ("a", answered), proofs=PROOFS[:5])).status
    assert over.outcome is not None
    assert over.outcome.reason is Reason.NO_FRAUD_DETECTED


def test_nothing_is_asked_of_a_pod_that_cannot_run_it() -> None:
    step = plan(seen(validating(model={"name": "other", "seqLen": 64}), ("a", says())))
    assert asks(step) == []
    assert all(sample.state is SlotState.WAITING for sample in step.status.samples)
