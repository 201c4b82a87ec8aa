# SPDX-License-Identifier: Apache-2.0
"""Pods that load are waited for. A slot leaves a pod that cannot do it, and goes to a spare."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.controller.actions import MOST_REFUSED_SECONDS, Refusals
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.planning.snapshot import DeletePod, StartPod
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from tests.unit.poc_operator.planning.test_eligibility import holding
from vllm_poc.wire.answers import PowState

GENERATING = PowState.GENERATING
REFUSED = PodReport(error="Cannot connect to host", silent_seconds=100_000, listens=False)
RUNNING = a_slot(next=10, delivered=8, valid=3)


def server(**fields: Any) -> Container:  # noqa: ANN401
    """A container whose startup probe allows an hour, and that began now."""
    return Container(**{"id": "c", "running_since": NOW, "startup_seconds": 3600, "started": False, **fields})


def loading(name: str = "a", **fields: Any) -> PodView:  # noqa: ANN401
    """A pod whose server has restarted once and loads its model."""
    return a_pod(name, ready=False, waiting_for="ContainersNotReady", containers=(server(restarts=1, **fields),))


def crashing(name: str = "a", reason: str = "CrashLoopBackOff") -> PodView:
    return a_pod(name, ready=False, waiting_for=reason, containers=(server(ended=reason, running_since=None),))


def condition(status: RoundStatus, kind: str) -> tuple[str, str, str]:
    found = next(found for found in status.own_conditions if found.type == kind)
    return found.status, found.reason, found.message


def lived(round_: PoCRound, *pods: tuple[PodView, PodReport | None], seconds: int, step: int = 60) -> PoCRound:
    """The round after so many seconds in which its pods stay as they are."""
    for after in range(0, seconds + 1, step):
        round_ = round_.model_copy(update={"status": plan(look(round_, *pods, after=after)).status})
    return round_


@pytest.mark.parametrize("probe", [3600, None], ids=["startup probe", "spec.podStartupSeconds"])
@pytest.mark.parametrize("action", ["Retry", "DeletePod"])
def test_a_restart_with_a_model_load_of_an_hour_fails_nothing(probe: int | None, action: str) -> None:
    round_ = a_round(a_status(RUNNING), stop=None, stall={"action": action}, podStartupSeconds=3600)
    pod = loading(startup_seconds=probe, started=probe is None)
    for after in range(0, 3600, 60):
        step = plan(look(round_, (pod, REFUSED), after=after))
        assert not any(isinstance(action, DeletePod) for action in step.actions)
        round_ = round_.model_copy(update={"status": step.status})
    assert round_.status.state is State.RUNNING
    assert condition(round_.status, "Degraded")[1] == "SlotsWaiting"
    assert "a (loading for 3540 s of at most 3600 s)" in condition(round_.status, "Degraded")[2]
    ready = a_pod("a", containers=(server(restarts=1),))
    step = plan(look(round_, (ready, says(session="s2")), after=3600))
    assert [
        (action.pod.name, action.request.start_index) for action in step.actions if isinstance(action, StartPod)
    ] == [("a", 8)]
    assert step.status.totals.retries == 1


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(loading(startup_seconds=600), id="the probe's time is over"),
        pytest.param(crashing(), id="crash loop"),
        pytest.param(a_pod("a", ready=False, containers=(server(started=True),)), id="not ready after it had started"),
    ],
)
def test_the_time_to_load_is_bounded(pod: PodView) -> None:
    round_ = lived(a_round(a_status(RUNNING), stop=None), (pod, REFUSED), seconds=1800)
    assert round_.status.state is State.FAILED


def test_a_loading_pod_whose_restart_is_not_known_is_not_unreachable() -> None:
    """As after an upgrade of the operator: nothing tells how often the server had restarted before."""
    slot = RUNNING.model_copy(update={"restarts": 1})
    round_ = lived(a_round(a_status(slot), stop=None), (loading(), REFUSED), seconds=3500)
    assert (round_.status.state, round_.status.poll_failure_time) == (State.RUNNING, None)
    assert round_.status.assignments[0].state is SlotState.RUNNING


def test_a_round_that_waits_for_its_first_pod_says_that_it_loads() -> None:
    status = plan(look(a_round(), (loading(), None), after=120)).status
    assert condition(status, "Progressing")[1:] == (
        "NoPodReady",
        "waiting for the pod to become ready: a (loading for 120 s of at most 3600 s)",
    )


@pytest.mark.parametrize("begun", [-30, 0, 30], ids=["before the round", "with it", "after it"])
def test_a_first_load_of_fifty_minutes_fails_nothing(begun: int) -> None:
    """A fleet and its round are applied together: the probe allows an hour."""
    since = NOW + timedelta(seconds=begun)
    pod = a_pod("a", ready=False, waiting_for="ContainersNotReady", containers=(server(running_since=since),))
    round_ = lived(a_round(age=0, stop=None), (pod, REFUSED), seconds=3000)
    assert round_.status.state is State.PENDING
    ready = replace(pod, ready=True, ready_since=NOW + timedelta(seconds=3001))
    step = plan(look(round_, (ready, says()), after=3002))
    assert [action.pod.name for action in step.actions if isinstance(action, StartPod)] == ["a"]


def test_a_first_load_has_an_end() -> None:
    round_ = lived(a_round(age=0, stop=None), (loading(startup_seconds=1200), REFUSED), seconds=2100)
    assert round_.status.outcome is not None
    assert round_.status.outcome.reason == "StartDeadlineExceeded"


STARTING = a_slot(state=SlotState.STARTING)
REFUSES = replace(says(), refusal=("CallbackNotAllowed", "url: not allowed"))
HOPELESS = {
    "crash loop": (RUNNING, crashing(), REFUSED),
    "image pull": (STARTING, crashing(reason="ImagePullBackOff"), REFUSED),
    "loads": (RUNNING, loading(), REFUSED),
    "refuses": (STARTING, a_pod("a"), REFUSES),
    "not ready before it was told": (STARTING, a_pod("a", ready=False, waiting_for="ContainersNotReady"), says()),
    "foreign work at the start": (STARTING, a_pod("a"), holding(9, "other")),
    "foreign work later": (RUNNING, a_pod("a"), holding(9, "other")),
    "restarted": (RUNNING, a_pod("a"), says(session="s2")),
    "failed": (RUNNING, a_pod("a"), says(PowState.FAILED, round_id="round-uid", error="the engine died")),
}


@pytest.mark.parametrize(("slot", "pod", "report"), HOPELESS.values(), ids=HOPELESS.keys())
def test_a_slot_moves_from_a_hopeless_pod_to_a_spare(slot: Assignment, pod: PodView, report: PodReport | None) -> None:
    step = plan(look(a_round(a_status(slot), stop=None), (pod, report), (a_pod("b"), says(session="s3"))))
    assert [(slot.state, slot.pod) for slot in step.status.assignments] == [(SlotState.STARTING, "b")]
    assert [action.pod.name for action in step.actions if isinstance(action, StartPod)] == ["b"]
    assert step.status.totals.retries == 1


@pytest.mark.parametrize(
    ("slot", "pod", "report"),
    [found for name, found in HOPELESS.items() if name not in ("restarted", "failed", "not ready before it was told")],
)
def test_without_a_spare_degraded_names_the_pod(slot: Assignment, pod: PodView, report: PodReport | None) -> None:
    world = (pod, report), (a_pod("z"), says(GENERATING, session="s1"))
    other = a_slot("z", node=0, group=1)
    round_ = a_round(a_status(slot, other), stop=None)
    status = plan(look(round_, *world)).status
    is_degraded, reason, message = condition(status, "Degraded")
    assert (is_degraded, reason) == ("True", "SlotsWaiting")
    assert "1 of 2 slots wait for a free pod: a (" in message


def test_a_slot_never_leaves_a_pod_that_may_compute_it() -> None:
    """Only the kubelet's word, or the pod's own, says that nobody computes the slot."""
    silent = a_pod("a", ready=False, containers=(server(started=True),))
    spare = (a_pod("b"), says(session="s3"))
    for pod in (silent, a_pod("a")):
        slot = plan(look(a_round(a_status(RUNNING), stop=None), (pod, REFUSED), spare)).status.assignments[0]
        assert slot.pod == "a"


def test_a_pod_that_does_not_answer_while_it_stops_is_no_loss_when_its_server_ended() -> None:
    status = a_status(RUNNING, stop_time=NOW)
    assert plan(look(a_round(status, suspend=True), (crashing(), REFUSED))).status.state is State.SUSPENDED


@pytest.mark.parametrize(("recorded", "now", "is_lost"), [(None, 2, False), (2, 2, False), (2, 3, True), (0, 1, True)])
def test_restarts_are_compared_with_what_was_recorded_and_never_with_zero(
    recorded: int | None,
    now: int,
    is_lost: bool,
) -> None:
    """A pod that restarted before its slot was recorded, and is silent when a new operator first looks."""
    slot = RUNNING.model_copy(update={"restarts": recorded})
    pod = a_pod("a", containers=(server(restarts=now),))
    unreached = PodReport(error="Cannot connect to host", listens=False)
    (after,) = plan(look(a_round(a_status(slot), stop=None), (pod, unreached))).status.assignments
    assert (after.session is None) is is_lost
    assert is_lost or after.restarts == (now if recorded is None else recorded)


def test_a_restart_that_is_told_late_is_no_loss_while_the_server_may_compute() -> None:
    """The slot was given to the restarted server while the API server was away; now it does not answer in time."""
    pod = a_pod("a", containers=(server(restarts=1, started=True),))
    slow = PodReport(error="no answer within 5 s", silent_seconds=5)
    round_ = a_round(a_status(RUNNING), stop=None)
    (after,) = plan(look(round_, (pod, slow), (a_pod("b"), says(session="s3")))).status.assignments
    assert (after.pod, after.session) == ("a", RUNNING.session)


def test_ten_restarts_of_a_pod_fail_no_slot_while_there_are_spares() -> None:
    """The pod that lost the slot is the last one that gets it again."""
    round_ = a_round(a_status(a_slot()), stop=None, retry={"backoffLimitPerSlot": 2})
    status = plan(look(round_, (a_pod("a"), says(session="s2")), (a_pod("b"), says()))).status
    for number in range(10):
        restarted = (a_pod("a"), says(session=f"t{number}"))
        computes = says(GENERATING, session="s1", next_index=number, delivered_index=number)
        status = plan(look(a_round(status, stop=None), restarted, (a_pod("b"), computes))).status
    slot = status.assignments[0]
    assert (slot.state, slot.pod, slot.attempts) == (SlotState.RUNNING, "b", 2)


def test_what_is_not_begun_counts_against_no_budget() -> None:
    round_ = a_round(a_status(STARTING), stop=None, retry={"backoffLimitPerSlot": 0, "backoffLimit": 0})
    status = plan(look(round_, (a_pod("a"), REFUSES))).status
    slot = status.assignments[0]
    assert (slot.state, slot.attempts, slot.disruptions) == (SlotState.WAITING, 2, 1)
    assert "refused to start: url: not allowed" in (slot.error or "")


@pytest.mark.parametrize("session", ["s1", "containerd://v#0"], ids=["ours", "reference"])
def test_the_event_says_where_the_slot_starts_again(session: str) -> None:
    slot = RUNNING.model_copy(update={"session": session})
    events = plan(look(a_round(a_status(slot), stop=None), (crashing(), REFUSED))).events
    where = "index 8" if session == "s1" else "index 0, since such a pod cannot resume"
    assert [event.message for event in events] == [
        f"node 0 group 0: pod a does not run (CrashLoopBackOff); starts again at {where}"
    ]


def test_the_running_pods_are_those_that_run() -> None:
    status = plan(look(a_round(a_status(RUNNING), stop=None), (crashing(), REFUSED))).status
    assert (status.running, condition(status, "Progressing")[0]) == (0, "False")


def test_a_pod_that_does_not_answer_is_not_told_to_compute() -> None:
    """The kubelet may not know yet that its server has ended."""
    round_ = a_round(a_status(RUNNING, a_slot("b", group=1)), stop=None)
    computes = says(GENERATING, next_index=10, delivered_index=8, delivered_valid=3, rate_per_second=5.0)
    status = plan(look(round_, (a_pod("a"), computes), (a_pod("b"), replace(REFUSED, silent_seconds=8)))).status
    told = "1 pod computes 5.0 nonces/s; nothing is known of b (Cannot connect to host)"
    assert condition(status, "Progressing") == ("True", "Running", told)


def test_no_pod_of_a_started_round_fails_it_after_its_time() -> None:
    status = a_status(RUNNING, start_time=NOW - timedelta(hours=1))
    round_ = lived(a_round(status, stop=None, startDeadlineSeconds=900), seconds=840)
    assert round_.status.state is State.RUNNING
    round_ = lived(a_round(status, stop=None, startDeadlineSeconds=900), seconds=1020)
    assert round_.status.outcome is not None
    assert (round_.status.state, round_.status.outcome.reason) == (State.FAILED, "PodsIdle")


def test_a_slot_goes_to_and_fro_between_pods_that_refuse_ever_more_slowly() -> None:
    seconds, starts = 0, dict.fromkeys("ab", 0)
    refusals = Refusals(lambda: seconds)
    round_ = a_round(a_status(STARTING), stop=None)
    for seconds in range(0, 600, 2):
        reports = {name: replace(says(), refusal=refusals.of(name)) for name in starts}
        step = plan(look(round_, *((a_pod(name), report) for name, report in reports.items()), after=seconds))
        round_ = round_.model_copy(update={"status": step.status})
        for start in (action for action in step.actions if isinstance(action, StartPod)):
            starts[start.pod.name] += 1
            refusals.add(start.pod.name, "ModelUnsupported", "no")
    assert all(2 <= count <= 600 / MOST_REFUSED_SECONDS + 4 for count in starts.values())
    slot = round_.status.assignments[0]
    assert (slot.attempts, slot.attempts - slot.disruptions) == (sum(starts.values()) + 1, 1)


def test_a_refusal_is_told_once_however_often_the_pod_is_asked() -> None:
    round_ = a_round(a_status(STARTING), stop=None)
    told = list[str]()
    for report in (REFUSES, says(), REFUSES, says(), REFUSES):
        step = plan(look(round_, (a_pod("a"), report)))
        told += [event.message for event in step.events]
        round_ = round_.model_copy(update={"status": step.status})
    assert told == ["node 0 group 0: pod a refused to start: url: not allowed"]
