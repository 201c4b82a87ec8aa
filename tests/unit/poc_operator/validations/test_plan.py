# SPDX-License-Identifier: Apache-2.0
"""Validations: what pods are asked, and what follows from their answers."""

import base64
import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.apis.v1alpha1.validation import PoCValidation, Proof, ValidationStatus
from poc_operator.observed import Answer, PodReport
from poc_operator.planning.snapshot import AskPod
from poc_operator.validations.plan import ValidationSnapshot, ValidationStep, plan
from tests.unit.poc_operator.build import NOW, a_pod, a_validation, says
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.generate import GeneratedResponse, ValidatedResponse
from vllm_poc.wire.messages import Scheme

PROOFS = [Proof(nonce=nonce, vector="AAAA") for nonce in range(250)]


def seen(
    validation: PoCValidation,
    *pods: tuple[str, PodReport],
    proofs: Sequence[Proof] | str = PROOFS,
    after: float = 0,
) -> ValidationSnapshot:
    return ValidationSnapshot(
        work=validation,
        pods=[a_pod(name) for name, _ in pods],
        reports=dict(pods),
        now=NOW + timedelta(seconds=after),
        find_other_rounds=tuple,
        proofs=proofs,
    )


def asks(step: ValidationStep) -> list[AskPod]:
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
    step = plan(seen(a_validation(), ("a", says()), ("b", says()), ("c", busy)))
    assert [(ask.pod.name, ask.request.nonces[0], len(ask.request.nonces)) for ask in asks(step)] == [
        ("a", 0, 125),
        ("b", 125, 125),
    ]
    assert all(ask.request.wait and ask.request.validation is not None for ask in asks(step))


@pytest.mark.parametrize(
    ("number", "counts"),
    [(1, [1]), (200, [200]), (201, [100, 101]), (210, [105, 105]), (401, [133, 134, 134]), (600, [200] * 3)],
)
def test_no_sample_is_tiny(number: int, counts: list[int]) -> None:
    """Of ten proofs, two that a pod cannot compare would fail the whole validation."""
    proofs = [Proof(nonce=nonce, vector="AAAA") for nonce in range(number)]
    samples = plan(seen(a_validation(), ("a", says()), proofs=proofs)).status.samples
    assert [sample.count for sample in samples] == counts
    assert [sample.first for sample in samples] == [sum(counts[:place]) for place in range(len(counts))]


def test_the_verdict_is_about_all_samples() -> None:
    strict = {"pMismatch": "0.001"}
    step = plan(seen(a_validation(statTest=strict), ("a", says()), ("b", says())))
    first, second = asks(step)
    reports = ("a", agreed(first, [1, 2, 3])), ("b", agreed(second, [201], not_computed=[202]))
    over = plan(seen(a_validation(step.status, statTest=strict), *reports)).status
    assert over.verdict is not None
    assert (over.verdict.total, over.verdict.mismatches, over.mismatch_nonces) == (249, 4, [1, 2, 3, 201])
    assert (over.verdict.not_computed, over.verdict.fraud) == (1, True)
    assert (over.state, over.outcome and over.outcome.reason) == (State.COMPLETE, Reason.FRAUD_DETECTED)
    assert (over.nonces, over.checked, over.mismatches, over.not_computed) == (250, 250, 4, 1)
    assert (over.desired, over.running, over.done, over.failed) == (2, 0, 2, 0)
    assert over.degraded == "ResultsRejected"


def test_honest_proofs_are_no_fraud() -> None:
    step = plan(seen(a_validation(), ("a", says()), ("b", says())))
    reports = [(ask.pod.name, agreed(ask, [])) for ask in asks(step)]
    over = plan(seen(a_validation(step.status), *reports)).status
    assert over.outcome is not None
    assert (over.outcome.reason, over.state) == (Reason.NO_FRAUD_DETECTED, State.COMPLETE)
    assert over.outcome.message == "0 of 250 nonces mismatch, p-value 1: no fraud"


def test_without_any_finite_result_there_is_no_verdict() -> None:
    step = plan(seen(a_validation(), ("a", says()), proofs=PROOFS[:2]))
    over = plan(seen(a_validation(step.status), ("a", agreed(asks(step)[0], [], [0, 1])), proofs=PROOFS[:2])).status
    assert over.outcome is not None
    assert (over.outcome.reason, over.state) == (Reason.NOTHING_COMPUTED, State.FAILED)


@pytest.mark.parametrize(
    ("claimed", "computed", "fraud"), [("1.3", 1.39, False), ("1.3", 1.41, True), ("1.5", 1.3, True)]
)
def test_distances_are_compared_with_the_target(claimed: str, computed: float, fraud: bool) -> None:
    fields: dict[str, Any] = {"rTarget": "1.4", "artifact": None}
    proofs = [Proof(nonce=5, distance=claimed)]
    step = plan(seen(a_validation(**fields), ("a", says()), proofs=proofs))
    (ask,) = asks(step)
    result = GeneratedResponse(request_id="x", nonces=[5], distances=[computed])
    report = dataclasses.replace(says(), answer=Answer(key=ask.key, result=result))
    over = plan(seen(a_validation(step.status, **fields), ("a", report), proofs=proofs)).status
    assert over.verdict is not None
    assert over.verdict.fraud is fraud


def test_a_pod_that_does_not_answer_is_not_told_to_compute() -> None:
    validation = a_validation()
    reports = [("a", says()), ("b", says())]
    for told in (
        "2 pods compute; 0 of 250 nonces are done",
        "1 pod computes; nothing is known of b (refused); 0 of 250 nonces are done",
    ):
        status = plan(seen(validation, *reports)).status
        progressing = next(one for one in status.own_conditions if one.type == "Progressing")
        assert (progressing.reason, progressing.message) == ("Running", told)
        validation = a_validation(status)
        reports[1] = ("b", PodReport(error="refused"))


def test_a_few_of_the_pods_of_which_nothing_is_known_are_named() -> None:
    many = [Proof(nonce=nonce, vector="AAAA") for nonce in range(1_000)]
    silent = [(name, PodReport(error="refused")) for name in "abcde"]
    status = plan(seen(a_validation(), *((name, says()) for name, _ in silent), proofs=many)).status
    status = plan(seen(a_validation(status), *silent, proofs=many)).status
    (told,) = [one.message for one in status.own_conditions if one.type == "Progressing"]
    assert told.startswith("0 pods compute; nothing is known of a (refused), b (refused), c (refused) and 2 more; ")


def test_a_sample_whose_pod_is_gone_goes_to_another() -> None:
    step = plan(seen(a_validation(), ("a", says())))
    again = plan(seen(a_validation(step.status), ("b", says())))
    assert [(ask.pod.name, ask.request.nonces[0]) for ask in asks(again)] == [("b", 0)]
    assert [event.reason for event in again.events] == [Reason.WORK_LOST]
    assert again.status.retries == 1


def test_an_answer_is_not_taken_for_another_attempt() -> None:
    step = plan(seen(a_validation(), ("a", says())))
    old = failed(asks(step)[0])
    again = plan(seen(a_validation(step.status), ("a", old)))
    assert asks(again)[0].key != asks(step)[0].key
    same = plan(seen(a_validation(again.status), ("a", old)))
    assert same.status.samples == again.status.samples
    assert Reason.WORK_LOST not in [event.reason for event in same.events]


def test_a_sample_that_fails_again_and_again_ends_the_validation() -> None:
    status = ValidationStatus()
    for _ in range(2):
        step = plan(seen(a_validation(status, retry={"backoffLimitPerSample": 1}), ("a", says())))
        answer = failed(asks(step)[0])
        status = plan(seen(a_validation(step.status, retry={"backoffLimitPerSample": 1}), ("a", answer))).status
    assert status.outcome is not None
    assert status.outcome.reason == Reason.BACKOFF_LIMIT_EXCEEDED
    assert "no answer within 300 s; spec.retry.backoffLimitPerSample of 1 is used up" in status.outcome.message
    assert status.degraded == Reason.SLOTS_FAILED


def test_a_suspended_validation_asks_nothing_and_goes_on_later() -> None:
    step = plan(seen(a_validation(), ("a", says())))
    pause = plan(seen(a_validation(step.status, suspend=True), ("a", says())))
    paused = plan(seen(a_validation(pause.status, suspend=True), ("a", says())))
    assert asks(pause) == asks(paused) == []
    assert paused.status.state is State.SUSPENDED
    resumed = plan(seen(a_validation(paused.status), ("a", says())))
    assert [ask.request.nonces[0] for ask in asks(resumed)] == [0]


def test_a_validation_that_is_resumed_has_not_started_by_what_was_done_before() -> None:
    step = plan(seen(a_validation(), ("a", says())))
    step = plan(seen(a_validation(step.status), ("a", agreed(asks(step)[0], []))))
    assert [sample.state for sample in step.status.samples] == [SlotState.DONE, SlotState.RUNNING]
    pause = plan(seen(a_validation(step.status, suspend=True)))
    paused = plan(seen(a_validation(pause.status, suspend=True)))
    assert paused.status.state is State.SUSPENDED
    resumed = plan(seen(a_validation(paused.status)))
    again = plan(seen(a_validation(resumed.status)))
    assert (again.status.start_time, again.status.state) == (None, State.PENDING)
    late = plan(seen(a_validation(again.status, startDeadlineSeconds=60), after=10_000)).status
    assert late.outcome is not None
    assert late.outcome.reason == Reason.START_DEADLINE_EXCEEDED


def test_changed_proofs_end_the_validation() -> None:
    step = plan(seen(a_validation(), ("a", says())))
    over = plan(seen(a_validation(step.status), ("a", says()), proofs=PROOFS[1:])).status
    assert over.outcome is not None
    assert over.outcome.reason == Reason.PROOFS_CHANGED


def test_proofs_that_cannot_be_had_are_waited_for() -> None:
    step = plan(seen(a_validation(), ("a", says()), proofs='there is no ConfigMap "claims"'))
    reasons = {str(condition.type): condition.reason for condition in step.status.own_conditions}
    assert reasons["Accepted"] == reasons["Progressing"] == Reason.PROOFS_UNAVAILABLE
    assert step.status.message == 'there is no ConfigMap "claims"'
    assert asks(plan(seen(a_validation(step.status), ("a", says())))) != []


def test_proofs_that_go_missing_meanwhile_are_waited_for() -> None:
    step = plan(seen(a_validation(), ("a", says()), proofs=PROOFS[:5]))
    answered = agreed(asks(step)[0], [])
    gone = plan(seen(a_validation(step.status), ("a", answered), proofs='there is no ConfigMap "claims"'))
    assert asks(gone) == []
    assert gone.status.outcome is None
    over = plan(seen(a_validation(gone.status), ("a", answered), proofs=PROOFS[:5])).status
    assert over.outcome is not None
    assert over.outcome.reason == Reason.NO_FRAUD_DETECTED


def test_nothing_is_asked_of_a_pod_that_cannot_run_it() -> None:
    step = plan(seen(a_validation(model={"name": "other", "seqLen": 64}), ("a", says())))
    assert asks(step) == []
    assert all(sample.state is SlotState.WAITING for sample in step.status.samples)


def test_missing_proofs_hold_up_neither_suspension_nor_the_end() -> None:
    step = plan(seen(a_validation(), ("a", says())))
    missing = 'there is no ConfigMap "claims"'
    pause = plan(seen(a_validation(step.status, suspend=True), ("a", says()), proofs=missing))
    paused = plan(seen(a_validation(pause.status, suspend=True), ("a", says()), proofs=missing))
    assert paused.status.state is State.SUSPENDED
    limit = {"activeDeadlineSeconds": 5}
    for after in (0, 10, 12):
        step = plan(seen(a_validation(step.status, **limit), ("a", says()), proofs=missing, after=after))
    assert step.status.state is State.FAILED


def test_the_networks_thresholds_judge_unless_told_otherwise() -> None:
    """Ten of 100 mismatches are what the chain expects of an honest prover of artifacts."""
    for told, fraud in (({}, False), ({"pMismatch": "0.001"}, True)):
        step = plan(seen(a_validation(statTest=told), ("a", says()), proofs=PROOFS[:100]))
        report = agreed(asks(step)[0], list(range(10)))
        over = plan(seen(a_validation(step.status, statTest=told), ("a", report), proofs=PROOFS[:100])).status
        assert over.verdict is not None
        assert over.verdict.fraud is fraud


def test_what_is_answered_between_two_polls_has_started_all_the_same() -> None:
    step = plan(seen(a_validation(), ("a", says()), proofs=PROOFS[:5]))
    over = plan(seen(a_validation(step.status), ("a", agreed(asks(step)[0], [])), proofs=PROOFS[:5]))
    assert (over.status.state, over.status.start_time) == (State.COMPLETE, NOW)
    assert [event.reason for event in over.events] == [Reason.STARTED, Reason.NO_FRAUD_DETECTED]


def test_a_sample_whose_pod_was_taken_by_a_round_is_withdrawn_and_asked_of_another() -> None:
    """The pod would answer when that round is over, which may be never."""
    step = plan(seen(a_validation(), ("a", says())))
    taken = says(PowState.GENERATING, round_id="another")
    held_up = plan(seen(a_validation(step.status), ("a", taken)))
    assert [sample.state for sample in held_up.status.samples] == [SlotState.WAITING] * 2
    assert (asks(held_up), held_up.status.retries) == ([], 0)
    assert "a (round another)" in held_up.status.message
    moved = plan(seen(a_validation(step.status), ("a", taken), ("b", says())))
    assert [ask.pod.name for ask in asks(moved)] == ["b"]


BOTH = dataclasses.replace(says(), schemes=frozenset({Scheme.PREFILL, Scheme.DECODE}))
CHAINS: dict[str, Any] = {"artifact": None, "decode": {"maxTokens": 3}}


def chain(nonce: int, *steps: int) -> Proof:
    return Proof(nonce=nonce, chain=base64.b64encode(bytes(steps)).decode())


def test_a_chain_that_is_not_whole_claims_no_index() -> None:
    """Pods compare the steps that a claim has: who claims the first one alone would pass for an honest prover."""
    proofs = [chain(0, 1, 2, 3, 4), chain(1, 1), chain(2, 1, 2, 3, 4, 5), Proof(nonce=3, chain="no base64")]
    (ask,) = asks(plan(seen(a_validation(**CHAINS), ("a", BOTH), proofs=proofs)))
    assert ask.request.validation is not None
    claimed = [artifact.get("k_points_steps") for artifact in ask.request.validation.artifacts]
    assert claimed == [[1, 2, 3, 4], [255], [255], [255]]


def left_out(*nonces: int, rebuilt: Literal[True] | None = None) -> ValidatedResponse:
    """A pod's verdict on 20 chains, of which it could not compare some."""
    return ValidatedResponse(
        request_id="x",
        n_total=20 - len(nonces),
        n_mismatch=0,
        mismatch_nonces=[],
        p_value=1.0,
        fraud_detected=False,
        n_excluded=len(nonces),
        excluded_nonces=list(nonces),
        rebuilt_codebook=rebuilt,
    )


def test_a_verdict_by_another_codebook_does_not_count() -> None:
    proofs = [chain(nonce, 1, 2, 3, 4) for nonce in range(20)]
    step = plan(seen(a_validation(**CHAINS), ("a", BOTH), proofs=proofs))
    told = dataclasses.replace(BOTH, answer=Answer(key=asks(step)[0].key, result=left_out(rebuilt=True)))
    after = plan(seen(a_validation(step.status, **CHAINS), ("a", told), proofs=proofs))
    assert after.status.verdict is None
    assert "set VLLM_POC_DECODE_CODEBOOK" in after.events[0].message


def test_chains_that_a_reference_pod_leaves_out_are_not_counted() -> None:
    validation = a_validation(**CHAINS)
    step = plan(seen(validation, ("a", BOTH), proofs=[chain(nonce, 1, 2, 3, 4) for nonce in range(20)]))
    (ask,) = asks(step)
    verdict = left_out(7)
    told = dataclasses.replace(BOTH, answer=Answer(key=ask.key, result=verdict))
    work = a_validation(step.status, **CHAINS)
    over = plan(seen(work, ("a", told), proofs=[chain(nonce, 1, 2, 3, 4) for nonce in range(20)])).status
    assert over.verdict is not None
    assert (over.verdict.total, over.verdict.not_computed, over.verdict.fraud) == (19, 1, False)
