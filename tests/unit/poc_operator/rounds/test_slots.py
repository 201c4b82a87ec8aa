# SPDX-License-Identifier: Apache-2.0
"""Residue classes are fixed once, and pods are bound to them."""

import dataclasses

import pytest

from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.planning.snapshot import StartPod
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status, look, says
from vllm_poc.wire.answers import ModelLimits, PowState
from vllm_poc.wire.messages import Scheme


@pytest.mark.parametrize(
    ("pods", "nodes", "groups", "slots"),
    [
        (1, {"first": 0, "last": 0, "count": 1}, 1, 1),
        (2, {"first": 0, "last": 0, "count": 1}, 2, 2),
        (2, {"first": 0, "last": 1, "count": 2}, 1, 2),
        (3, {"first": 2, "last": 3, "count": 10}, 2, 20),
    ],
)
def test_every_pod_gets_a_slot(pods: int, nodes: dict[str, int], groups: int, slots: int) -> None:
    step = plan(look(a_round(nodes=nodes), *((a_pod(f"p{i}"), says()) for i in range(pods))))
    status = step.status
    assert (status.groups, status.slots) == (groups, slots)
    bound = [slot for slot in status.assignments if slot.pod]
    assert len(bound) == len({(slot.node, slot.group) for slot in bound}) == pods
    assert {slot.node for slot in status.assignments} == set(range(nodes["first"], nodes["last"] + 1))


def test_a_round_of_chains_waits_a_moment_for_what_a_pod_offers() -> None:
    """One lost answer must not leave it without a slot for the whole round."""
    able = dataclasses.replace(says(), schemes=frozenset(Scheme))

    def slots(second: PodReport, age: int) -> int:
        round_ = a_round(age=age, decode={"maxTokens": 4}, rTarget=None)
        return plan(look(round_, (a_pod("a"), able), (a_pod("b"), second))).status.slots

    assert [slots(says(), age) for age in (0, 4, 5)] == [0, 0, 1]
    assert slots(able, 0) == 2
    assert slots(dataclasses.replace(says(), schemes=frozenset([Scheme.PREFILL])), 0) == 1


def test_slots_follow_the_numbers_of_pods() -> None:
    names = [f"{fleet}-{n}" for fleet in ("chat", "demo") for n in range(12)]
    step = plan(look(a_round(), *((a_pod(name), says()) for name in sorted(names))))
    assert [slot.pod for slot in step.status.assignments] == names
    # What is recorded stays, in whatever order it was.
    before = a_status(*(a_slot(group=n, pod=name, state=SlotState.RUNNING) for n, name in enumerate(sorted(names))))
    again = plan(look(a_round(before), *((a_pod(name), says()) for name in names)))
    assert [slot.pod for slot in again.status.assignments] == sorted(names)


def test_a_pod_that_still_loads_has_its_slot_kept() -> None:
    loading = a_pod("b", ready=False, ip=None)
    step = plan(look(a_round(), (a_pod("a"), says()), (loading, None)))
    assert step.status.slots == 2
    assert [slot.state for slot in step.status.assignments] == [SlotState.STARTING, SlotState.WAITING]


def test_the_number_of_groups_can_be_fixed() -> None:
    """Several clusters of one host must agree on it, whatever pods each of them has."""
    step = plan(look(a_round(nodes={"first": 1, "last": 1, "count": 3, "groups": 4}), (a_pod("a"), says())))
    assert (step.status.slots, step.status.groups) == (12, 4)
    assert [slot.state for slot in step.status.assignments] == [SlotState.STARTING, *[SlotState.WAITING] * 3]


def test_pods_without_a_slot_are_told_of() -> None:
    status = a_status(a_slot("a"))
    step = plan(look(a_round(status), (a_pod("a"), says(PowState.GENERATING)), (a_pod("b"), says())))
    assert step.status.message.endswith("; 1 more without a slot (their number is fixed at the start: 1)")


def test_slots_never_change_when_pods_come() -> None:
    status = a_status(a_slot("a"))
    step = plan(look(a_round(status), (a_pod("a"), says(PowState.GENERATING)), (a_pod("b"), says())))
    assert step.status.slots == 1
    assert [slot.pod for slot in step.status.assignments] == ["a"]


def test_start_carries_the_slot_and_the_round() -> None:
    step = plan(look(a_round(), (a_pod("a"), says()), (a_pod("b"), says())))
    starts = [action for action in step.actions if isinstance(action, StartPod)]
    assert [(s.pod.name, s.request.group_id, s.request.n_groups) for s in starts] == [
        ("a", 0, 2),
        ("b", 1, 2),
    ]
    assert {s.request.round_id for s in starts} == {"round-uid"}
    assert {s.request.r_target for s in starts} == {1.4}


def test_start_of_the_artifact_protocol() -> None:
    round_ = a_round(rTarget=None, artifact={"kDim": 5}, model={"name": "demo", "seqLen": 9, "strongRng": True})
    action = plan(look(round_, (a_pod("a"), says()))).actions[0]
    assert isinstance(action, StartPod)
    assert action.request.params is not None
    assert (action.request.params.k_dim, action.request.params.seq_len) == (5, 9)
    assert action.request.poc_stronger_rng
    assert action.request.r_target is None


def test_a_busy_pod_is_not_told_to_start() -> None:
    busy = says(PowState.GENERATING, round_id="other")
    step = plan(look(a_round(), (a_pod("a"), says()), (a_pod("b"), busy)))
    assert [action.pod.name for action in step.actions if isinstance(action, StartPod)] == ["a"]


BARRED = {"barred": "self-check failed: why", "failed_check": True}


def test_a_barred_pod_gets_no_slot() -> None:
    step = plan(look(a_round(nodes=ONE_OF_TWO), (a_pod("a", **BARRED), says()), (a_pod("b"), says())))
    assert [slot.pod for slot in step.status.assignments] == ["b", None]


def test_a_barred_pod_keeps_its_slot_but_gets_it_back_no_more() -> None:
    running, pod = says(PowState.GENERATING), a_pod("a", **BARRED)
    step = plan(look(a_round(a_status(a_slot("a"))), (pod, running)))
    assert [(slot.pod, slot.state) for slot in step.status.assignments] == [("a", SlotState.RUNNING)]
    lost = plan(look(a_round(a_status(a_slot("a"))), (pod, says(session="s2"))))
    assert [slot.state for slot in lost.status.assignments] == [SlotState.WAITING]
    degraded = next(c for c in lost.status.own_conditions if c.type == "Degraded")
    assert "1 of 1 slots wait for a free pod: a (self-check failed: why)" in degraded.message


def test_a_lost_slot_moves_to_a_free_pod() -> None:
    gone = a_slot("a", next=10, delivered=8)
    step = plan(look(a_round(a_status(gone)), (a_pod("b"), says())))
    action = step.actions[0]
    assert isinstance(action, StartPod)
    assert (action.pod.name, action.request.start_index) == ("b", 8)
    assert step.status.totals.retries == 1


@pytest.mark.parametrize(("spares", "expected"), [([], "a"), (["b"], "b")])
def test_a_pod_whose_slot_was_given_up_takes_a_slot_that_waits(spares: list[str], expected: str) -> None:
    """Nothing else of the round would go on. A pod that has lost none comes first."""
    status = a_status(a_slot("a", SlotState.FAILED), a_slot(None, SlotState.WAITING, group=1))
    step = plan(look(a_round(status), *((a_pod(name), says()) for name in ["a", *spares])))
    assert [action.pod.name for action in step.actions if isinstance(action, StartPod)] == [expected]
    assert [slot.pod for slot in step.status.assignments] == ["a", expected]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param([], "a", id="no other"),
        pytest.param([(a_pod("b", ready=False), None)], None, id="another restarts"),
        pytest.param([(a_pod("b"), says(model=ModelLimits(names=["other"])))], "a", id="another cannot do it"),
        pytest.param([(a_pod("b"), says())], "b", id="another is free"),
    ],
)
def test_a_pod_whose_slot_was_given_up_does_not_get_the_same_slot_again_while_another_may_come(
    other: list[tuple[PodView, PodReport | None]], expected: str | None
) -> None:
    """It would use up the retries of the slots of good pods, one after the other, while these restart."""
    status = a_status(a_slot("a", SlotState.FAILED), a_slot(None, SlotState.WAITING, group=1, previous="a"))
    step = plan(look(a_round(status), (a_pod("a"), says()), *other))
    assert [slot.pod for slot in step.status.assignments] == ["a", expected]


@pytest.mark.parametrize(("spares", "kept"), [([], True), (["c"], False)])
def test_a_slot_is_not_taken_from_a_good_pod_for_one_that_was_given_up(spares: list[str], kept: bool) -> None:
    status = a_status(a_slot("a", SlotState.FAILED), a_slot("b", SlotState.STARTING, group=1))
    pods = [(a_pod("a"), says()), (a_pod("b", ready=False, waiting_for="ContainersNotReady"), says())]
    step = plan(look(a_round(status), *pods, *((a_pod(name), says()) for name in spares)))
    assert (step.status.assignments[1].pod == "b") is kept


ONE_OF_TWO = {"first": 0, "last": 0, "count": 1, "groups": 2}
WEB = (Container(id="web", ports=frozenset({80})),)
VLLM = (Container(id="vllm", ports=frozenset({8000})), Container(id="proxy", ports=frozenset({80})))


UNCONNECTED = PodReport(error="Cannot connect to host", listens=False, silent_seconds=100)


@pytest.mark.parametrize(
    ("pod", "report", "counts"),
    [
        pytest.param(a_pod("b"), UNCONNECTED, False, id="no PoC server"),
        pytest.param(a_pod("b"), says(model=ModelLimits(names=["other"])), False, id="another model"),
        pytest.param(a_pod("b", ready=False, containers=WEB), None, False, id="not ready, another port"),
        pytest.param(a_pod("b", ready=False, containers=VLLM), None, True, id="not ready, the port"),
        pytest.param(a_pod("b", ready=False), None, True, id="not ready, declares no port"),
        pytest.param(a_pod("b"), PodReport(error="no answer within 5 s"), True, id="slow"),
        pytest.param(a_pod("b"), says(PowState.GENERATING, round_id="other"), True, id="busy"),
        pytest.param(a_pod("b"), None, True, id="not polled"),
        pytest.param(a_pod("b", barred="x"), says(), True, id="has yet to pass its self-check"),
        pytest.param(a_pod("b", barred="x", failed_check=True), says(), False, id="fails its self-check"),
        pytest.param(a_pod("b"), dataclasses.replace(UNCONNECTED, heard=True), True, id="answered a moment ago"),
    ],
)
def test_a_selector_that_is_too_wide_makes_no_empty_slots(pod: PodView, report: PodReport | None, counts: bool) -> None:
    """Slots without a pod leave gaps, and validators reject a host with too many."""
    others = [(dataclasses.replace(pod, name=f"b{i}", uid=f"b{i}"), report) for i in range(119)]
    assert plan(look(a_round(), (a_pod("a"), says()), *others)).status.slots == (120 if counts else 1)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_ready_pod_that_cannot_be_reached_is_waited_for_a_moment(groups: int | None) -> None:
    """One lost connection must not leave a pod without a slot for the whole round."""
    nodes = {"first": 0, "last": 0, "count": 1} | ({"groups": groups} if groups else {})
    lost = dataclasses.replace(UNCONNECTED, silent_seconds=2)
    step = plan(look(a_round(nodes=nodes), (a_pod("a"), says()), (a_pod("b"), lost)))
    assert step.status.slots == (groups or 0)
    later = plan(look(a_round(step.status, nodes=nodes), (a_pod("a"), says()), (a_pod("b"), says())))
    assert [action.pod.name for action in later.actions if isinstance(action, StartPod)] == ["a", "b"]


def test_a_pod_of_another_server_is_not_waited_for() -> None:
    web = dataclasses.replace(a_pod("b"), containers=WEB)
    lost = dataclasses.replace(UNCONNECTED, silent_seconds=0)
    assert plan(look(a_round(), (a_pod("a"), says()), (web, lost))).status.slots == 1


def test_a_pod_whose_vllm_sleeps_gets_a_slot_last_and_is_named() -> None:
    asleep = (a_pod("a"), says(paused_by="vLLM sleeps"))
    one_slot = {"first": 0, "last": 0, "count": 1, "groups": 1}
    step = plan(look(a_round(nodes=one_slot), asleep, (a_pod("b"), says())))
    assert [action.pod.name for action in step.actions if isinstance(action, StartPod)] == ["b"]
    sleeping = says(PowState.GENERATING, round_id="round-uid", paused_by="vLLM sleeps")
    status = plan(look(a_round(a_status(a_slot("a"))), (a_pod("a"), sleeping))).status
    assert status.degraded == "SlotsPaused"
    degraded = next(found for found in status.own_conditions if found.type == "Degraded")
    assert degraded.message == "pods compute nothing meanwhile: a (vLLM sleeps)"
