# SPDX-License-Identifier: Apache-2.0
"""Pods recompute the same nonces; those that differ from most are named."""

import dataclasses
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.observed import Answer, PodReport
from poc_operator.planning.snapshot import AskPod
from poc_operator.rounds.cross_check import deviations
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import NOW, a_config, a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.generate import GeneratedResponse

NAMES = ("a", "b", "c")


def checking(status: RoundStatus | None = None, **check: Any) -> PoCRound:  # noqa: ANN401
    slots = [a_slot(name, node=i, next=20, session=f"s-{name}") for i, name in enumerate(NAMES)]
    fields: dict[str, Any] = {"nodes": {"first": 0, "last": 2, "count": 3}, "crossCheck": {"nonces": 2, **check}}
    return a_round(status or a_status(*slots, groups=1, slots=3), **fields)


def seen(round_: PoCRound, answers: dict[str, Answer] | None = None, after: float = 0) -> RoundSnapshot:
    return look(round_, *((a_pod(name), report(i, name, answers or {})) for i, name in enumerate(NAMES)), after=after)


def report(node: int, name: str, answers: dict[str, Answer]) -> PodReport:
    config = a_config(node_id=node, node_count=len(NAMES), batch_size=8)
    running = says(PowState.GENERATING, session=f"s-{name}", next_index=20, config=config)
    return dataclasses.replace(running, answer=answers.get(name))


def asks(step: RoundStep) -> list[AskPod]:
    return [action for action in step.actions if isinstance(action, AskPod)]


def answers(step: RoundStep, **distances: float) -> dict[str, Answer]:
    found = {}
    for ask in asks(step):
        if ask.pod.name in distances:
            nonces = ask.request.nonces
            result = GeneratedResponse(request_id="x", nonces=nonces, distances=[distances[ask.pod.name]] * len(nonces))
            found[ask.pod.name] = Answer(key=ask.key, result=result)
    return found


def test_all_pods_are_asked_for_the_last_nonces_of_one_of_them() -> None:
    step = plan(seen(checking()))
    assert [ask.pod.name for ask in asks(step)] == list(NAMES)
    assert {tuple(ask.request.nonces) for ask in asks(step)} == {(18 * 3 + 1, 19 * 3 + 1)}
    assert all(ask.request.beside_round and ask.request.wait for ask in asks(step))


def test_pods_that_agree_are_left_alone_until_the_next_comparison() -> None:
    step = plan(seen(checking(intervalSeconds=60)))
    done = plan(seen(checking(step.status, intervalSeconds=60), answers(step, a=1.4, b=1.4, c=1.4005)))
    assert done.status.cross_check is not None
    assert (done.status.cross_check.pending, done.status.cross_check.deviating) == (False, [])
    assert asks(done) == []
    assert asks(plan(seen(checking(done.status, intervalSeconds=60), after=59))) == []
    assert {ask.key for ask in asks(plan(seen(checking(done.status, intervalSeconds=60), after=60)))} == {"check 2"}


def test_a_pod_that_differs_is_named_once_in_an_event_and_in_degraded() -> None:
    step = plan(seen(checking()))
    done = plan(seen(checking(step.status), answers(step, a=1.4, b=1.41, c=1.4)))
    message = "b (2 nonces) of 3 pods computed something else than most"
    assert [(event.reason, event.message) for event in done.events] == [(Reason.PODS_DISAGREE, message)]
    degraded = next(found for found in done.status.own_conditions if found.type == "Degraded")
    assert (degraded.status, degraded.reason, degraded.message) == ("True", Reason.PODS_DISAGREE, message)
    again = plan(seen(checking(done.status), after=300))
    twice = plan(seen(checking(again.status), answers(again, a=1.4, b=1.41, c=1.4), after=300))
    assert twice.events == []


def test_a_pod_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    step = plan(seen(checking()))
    two = answers(step, a=1.4, b=1.4)
    waits = plan(seen(checking(step.status), two, after=59))
    assert len(asks(waits)) == 3
    done = plan(seen(checking(step.status), two, after=60)).status.cross_check
    assert done is not None
    assert (done.pending, done.compared, done.deviating) == (False, 2, [])


def test_a_round_that_ends_asks_nothing() -> None:
    status = checking().status.model_copy(update={"stop_time": NOW})
    assert asks(plan(seen(checking(status)))) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"a": 1.0, "b": 1.0}, []),
        ({"a": 1.0, "b": 2.0}, ["a", "b"]),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, ["c"]),
        ({"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}, ["a", "b", "c", "d"]),
        ({"a": 1.0, "b": 1.0, "c": None}, ["c"]),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, ["a", "b", "c"]),
        ({"a": 1.0}, []),
    ],
)
def test_who_is_outvoted(values: dict[str, float | None], named: list[str]) -> None:
    vectors = {pod: {7: None if value is None else (value,)} for pod, value in values.items()}
    assert [found.pod for found in deviations(vectors, [7], 0.1)] == named


def test_pods_that_differ_are_named_in_the_order_of_their_numbers() -> None:
    vectors = {f"demo-{n}": {7: (float(n),)} for n in (10, 2, 1)}
    assert [found.pod for found in deviations(vectors, [7], 0.1)] == ["demo-1", "demo-2", "demo-10"]


def test_pods_that_answer_after_their_round_are_not_asked() -> None:
    """A request to a pod that cannot resume would wait until its round ends, and keep chat out then."""
    everybody = seen(checking())
    for deaf, compared in ((NAMES[:1], 2), (NAMES[:2], 0), (NAMES, 0)):
        reports = {
            uid: dataclasses.replace(report, resumes=uid not in deaf) for uid, report in everybody.reports.items()
        }
        asked = asks(plan(dataclasses.replace(everybody, reports=reports)))
        assert (len(asked), {ask.pod.name for ask in asked} & set(deaf)) == (compared, set())
