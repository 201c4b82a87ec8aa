# SPDX-License-Identifier: Apache-2.0
"""Different results for one nonce: a third pod computes it, the gateway is told, and the liars are named."""

import dataclasses
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import Answer, CollectedSlot, Forger, PodReport, RivalNonce, RivalResult, Rivals, Truth
from poc_operator.planning.snapshot import AskPod, DecideRivals
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot, RoundStep
from tests.unit.poc_operator.build import NOW, a_config, a_pod, a_round, a_slot, a_status, has, look, says
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.generate import GeneratedResponse

NAMES = ("a", "b", "c")
HONEST, LIE = 1.3, 0.2
#: Of the slot of pod a, which has taken it over from a pod that is gone.
NONCE = 3


def rival(stored: float = LIE, other: float = HONEST, **fields: Any) -> RivalNonce:  # noqa: ANN401
    first, second = fields.pop("pods", ("gone", "a"))
    return RivalNonce(
        nonce=fields.pop("nonce", NONCE),
        stored=RivalResult(pod=first, distance=stored),
        others=[RivalResult(conflict=7, pod=second, distance=other)],
    )


def round_of(status: RoundStatus | None = None, **fields: Any) -> PoCRound:  # noqa: ANN401
    slots = [a_slot(name, node=i, next=20, session=f"s-{name}") for i, name in enumerate(NAMES)]
    nodes = {"first": 0, "last": 2, "count": 3}
    return a_round(status or a_status(*slots, groups=1, slots=3), **{"nodes": nodes, **fields})


def report(node: int, name: str, answer: Answer | None) -> PodReport:
    config = a_config(node_id=node, node_count=len(NAMES), batch_size=8)
    running = says(PowState.GENERATING, session=f"s-{name}", next_index=20, config=config, round_id="round-uid")
    return dataclasses.replace(running, answer=answer)


def seen(
    round_: PoCRound,
    *rivals: RivalNonce,
    answers: dict[str, Answer] | None = None,
    after: float = 0,
    forgers: tuple[str, ...] = (),
    names: tuple[str, ...] = NAMES,
) -> RoundSnapshot:
    gateway = has((0, 0), (0, 0), (0, 0))
    assert gateway.collected is not None
    slot = gateway.collected.slots[0].model_copy(
        update={"conflicts": 1, "rivals": [Rivals(kept="gone", other="a", nonce=NONCE, count=1)]}
    )
    told: list[CollectedSlot] = [slot, *gateway.collected.slots[1:]]
    found = {"undecided": len(rivals), "slots": told, "forgers": [Forger(pod=pod, count=1) for pod in forgers]}
    gateway = dataclasses.replace(gateway, rivals=rivals, collected=gateway.collected.model_copy(update=found))
    pods = [(a_pod(name), report(i, name, (answers or {}).get(name))) for i, name in enumerate(NAMES) if name in names]
    return look(round_, *pods, after=after, gateway=gateway)


def asks(step: RoundStep) -> list[AskPod]:
    return [action for action in step.actions if isinstance(action, AskPod)]


def decided(step: RoundStep) -> list[DecideRivals]:
    return [action for action in step.actions if isinstance(action, DecideRivals)]


def answered(ask: AskPod, distance: float) -> dict[str, Answer]:
    nonces = ask.request.nonces
    result = GeneratedResponse(request_id="x", nonces=nonces, distances=[distance] * len(nonces))
    return {ask.pod.name: Answer(key=ask.key, result=result)}


def degraded(step: RoundStep) -> str:
    (found,) = [one.model_dump() for one in step.status.conditions if one.type == "Degraded"]
    return str(found["message"])


def test_a_pod_is_asked_that_has_delivered_none_of_the_results_and_does_not_compute_the_slot() -> None:
    step = plan(seen(round_of(), rival(pods=("gone", "b"))))
    (ask,) = asks(step)
    assert (ask.pod.name, ask.request.nonces) == ("c", [NONCE])
    assert ask.request.beside_round
    assert ask.request.wait
    assert decided(step) == []
    assert step.status.rivals is not None  # recorded before the pod is asked
    assert (step.status.rivals.pod, step.status.rivals.nonces) == ("c", [NONCE])


def test_a_pod_that_may_not_take_part_decides_nothing() -> None:
    """One that fails its self-check would find others' honest results forged."""
    world = seen(round_of(), rival(pods=("gone", "b")))
    pods = [dataclasses.replace(pod, barred="self-check failed" if pod.name == "c" else "") for pod in world.pods]
    assert asks(plan(dataclasses.replace(world, pods=pods))) == []


@pytest.mark.parametrize(
    ("stored", "other", "truth", "conflict", "alike", "liars"),
    [
        (HONEST, LIE, Truth.STORED, None, [], "pod a (1 nonce)"),
        (LIE, HONEST, Truth.OTHER, 7, [], "pod gone (1 nonce)"),
        (0.3, LIE, Truth.NEITHER, None, [], "pod a (1 nonce), pod gone (1 nonce)"),
        (HONEST, HONEST + 0.001, Truth.STORED, None, [7], None),
    ],
)
def test_what_a_third_pod_computes_decides(
    stored: float, other: float, truth: Truth, conflict: int | None, alike: list[int], liars: str | None
) -> None:
    pair = rival(stored, other)
    begun = plan(seen(round_of(), pair))
    (ask,) = asks(begun)
    step = plan(seen(round_of(begun.status), pair, answers=answered(ask, HONEST)))
    ((decision,),) = [action.decisions for action in decided(step)]
    assert (decision.nonce, decision.truth, decision.conflict, decision.alike) == (NONCE, truth, conflict, alike)
    assert (decision.pod, decision.up_to) == (ask.pod.name, 7)
    named = [event.message for event in step.events if event.reason == Reason.RESULTS_FORGED]
    assert named == ([f"{liars} delivered what pod {ask.pod.name} computes otherwise"] if liars else [])
    # The gateway is told until it has taken note, also by the next operator; nobody is asked anew, or named again.
    again = plan(seen(round_of(step.status), pair))
    assert (decided(again), asks(again), again.events) == (decided(step), [], [])
    done = plan(seen(round_of(step.status), forgers=("a",)))
    assert done.status.rivals is not None
    assert (decided(done), done.status.rivals.decisions) == ([], [])
    assert "pods delivered results that others do not confirm: pod a (1)" in degraded(done)
    assert "results came twice" not in degraded(done)


def test_without_a_third_pod_it_stays_undecided_and_the_round_says_so() -> None:
    step = plan(seen(round_of(), rival(), names=("a",)))
    assert (asks(step), decided(step), step.status.rivals) == ([], [], None)
    assert "and 1 are undecided: no pod that delivered none of them could compute them" in degraded(step)


@pytest.mark.parametrize("answer", ["error", "none", "not computed"])
def test_another_pod_is_asked_when_one_has_no_answer(answer: str) -> None:
    begun = plan(seen(round_of(), rival()))
    (ask,) = asks(begun)
    result = GeneratedResponse(request_id="x", nonces=[], distances=[], not_computed=[NONCE])
    none = {"error": Answer(key=ask.key, error="busy"), "not computed": Answer(key=ask.key, result=result)}
    answers = {ask.pod.name: none[answer]} if answer in none else {}
    after = 61 if answer == "none" else 1
    ended = plan(seen(round_of(begun.status), rival(), answers=answers, after=after))
    assert (decided(ended), asks(ended)) == ([], [])
    if answer != "none":
        assert asks(plan(seen(round_of(ended.status), rival(), after=29))) == []
    (next_ask,) = asks(plan(seen(round_of(ended.status), rival(), after=92)))
    assert {ask.pod.name, next_ask.pod.name} == {"b", "c"}


def test_a_comparison_and_a_decision_do_not_ask_at_once() -> None:
    check: dict[str, Any] = {"crossCheck": {"nonces": 2}}
    comparing = plan(seen(round_of(**check)))
    assert len(asks(comparing)) == 3
    assert len(asks(plan(seen(round_of(comparing.status, **check), rival())))) == 3
    deciding = plan(seen(round_of(), rival()))
    assert len(asks(plan(seen(round_of(deciding.status, **check), rival())))) == 1


def test_a_round_that_ends_waits_a_while_for_the_decision() -> None:
    begun = plan(seen(round_of(finish=True), rival()))
    slots = [slot.model_copy(update={"state": SlotState.DONE, "next": 0}) for slot in begun.status.assignments]
    stopped = begun.status.model_copy(update={"assignments": slots, "stop_time": NOW})
    assert stopped.rivals is not None
    assert not plan(seen(round_of(stopped, finish=True), rival(), after=10)).status.state.finished
    assert plan(seen(round_of(stopped, finish=True), rival(), after=31)).status.state.finished
