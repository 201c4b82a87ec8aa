# SPDX-License-Identifier: Apache-2.0
"""A round that cannot run says why and what to do; it never waits silently."""

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.observed import PodReport, PodView
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import a_pod, a_round, look, says
from vllm_poc.wire.answers import ModelLimits, PowState

World = tuple[tuple[PodView, PodReport | None], ...]


@pytest.mark.parametrize(
    ("world", "reason", "says_what"),
    [
        pytest.param((), Reason.NO_MATCHING_PODS, "create a PoCFleet there, or label your vLLM pods", id="no pod"),
        pytest.param(
            ((a_pod("a", ready=False, waiting_for="ImagePullBackOff"), None),),
            Reason.NO_POD_READY,
            "a (ImagePullBackOff)",
            id="not ready",
        ),
        pytest.param(
            ((a_pod("a"), PodReport(error="connection refused")),),
            Reason.PODS_UNREACHABLE,
            "check spec.port, that vLLM runs with --enable-poc, and that pods have the operator's token",
            id="wrong port",
        ),
        pytest.param(
            ((a_pod("a"), PodReport(error="HTTP 401, Unauthorized: send the token")), (a_pod("b", ready=False), None)),
            Reason.PODS_UNREACHABLE,
            "every ready pod refuses the operator's token: a (HTTP 401, Unauthorized: send the token)",
            id="wrong token",
        ),
        pytest.param(
            ((a_pod("a"), PodReport(error="HTTP 401, Unauthorized: no")), (a_pod("b"), PodReport(error="no answer"))),
            Reason.PODS_UNREACHABLE,
            "no pod answers the operator on port ",
            id="wrong token, and a hung pod",
        ),
        pytest.param(
            ((a_pod("a"), PodReport(error="HTTP 401: <html>")),),
            Reason.PODS_UNREACHABLE,
            "no pod answers the operator on port ",
            id="another server that asks for a password",
        ),
        pytest.param(
            ((a_pod("a"), says(model=ModelLimits(names=["qwen"]))),),
            Reason.MODEL_MISMATCH,
            'serves "qwen"',
            id="wrong model",
        ),
        pytest.param(
            ((a_pod("a"), says(model=ModelLimits(names=["demo"], max_seq_len=32))),),
            Reason.SEQUENCE_TOO_LONG,
            "--max-model-len",
            id="too long",
        ),
        pytest.param(
            ((a_pod("a"), says(PowState.GENERATING, round_id="other")),),
            Reason.PODS_BUSY,
            "round other",
            id="busy",
        ),
        pytest.param(
            ((a_pod("a", barred="self-check failed: why", failed_check=True), says()),),
            Reason.SELF_CHECK_FAILED,
            "no pod may take part yet: a (self-check failed: why)",
            id="failed the self-check",
        ),
        pytest.param(
            (
                (a_pod("a"), says(PowState.GENERATING, round_id="other")),
                (a_pod("b", barred="self-check failed: why", failed_check=True), says()),
            ),
            Reason.PODS_BUSY,
            "round other",
            id="all that may take part are busy",
        ),
        pytest.param(
            (
                (
                    a_pod("a"),
                    PodReport(status=says().status, refusal=("CallbackNotAllowed", "url: not allowed")),
                ),
            ),
            Reason.REQUEST_REFUSED,
            "url: not allowed",
            id="refused",
        ),
    ],
)
def test_progressing_tells_what_is_waited_for(world: World, reason: Reason, says_what: str) -> None:
    status = plan(look(a_round(), *world)).status
    progressing = next(c for c in status.own_conditions if c.type == "Progressing")
    assert (progressing.status, progressing.reason) == ("False", reason)
    assert says_what in progressing.message
    assert status.message == progressing.message


def test_a_self_check_that_is_pending_passes_by_itself() -> None:
    pods = [(a_pod("a", barred="self-check: soon"), says()), (a_pod("b", barred="x", failed_check=True), says())]
    step = plan(look(a_round(), *pods))
    progressing = next(c for c in step.status.own_conditions if c.type == "Progressing")
    assert (progressing.status, progressing.reason) == ("True", Reason.SELF_CHECKS_PENDING)
    assert "a (self-check: soon), b (x)" in progressing.message
    assert (step.status.assignments, step.actions) == ([], [])


def test_a_round_that_no_pod_can_run_is_not_accepted() -> None:
    world = (a_pod("a"), says(model=ModelLimits(names=["qwen"])))
    accepted = next(c for c in plan(look(a_round(), world)).status.own_conditions if c.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("False", Reason.MODEL_MISMATCH)


def test_artifact_longer_than_the_hidden_state() -> None:
    round_ = a_round(rTarget=None, artifact={"kDim": 129})
    status = plan(look(round_, (a_pod("a"), says()))).status
    assert next(c.reason for c in status.own_conditions if c.type == "Accepted") == Reason.K_DIM_TOO_LARGE


def test_conditions_keep_their_transition_time() -> None:
    first = plan(look(a_round())).status
    second = plan(look(a_round(first), after=60)).status
    assert [c.last_transition_time for c in first.own_conditions] == [
        c.last_transition_time for c in second.own_conditions
    ]
