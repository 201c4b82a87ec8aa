# SPDX-License-Identifier: Apache-2.0
"""Every round ends: whatever states its slots have and whatever its pods answer, within times that its spec names."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.planning.snapshot import Action, ExtendPod, StopPod
from poc_operator.rounds.end import DECISION_PATIENCE
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import HISTORIES, NOW, a_pod, a_round, a_slot, a_status, look, says
from tests.unit.poc_operator.planning.test_eligibility import holding
from vllm_poc.wire.answers import PowState

Answer = Callable[[str, float], tuple[PodView, PodReport | None] | None]

START, ACTIVE, POLL, UNREACHABLE, STARTUP, STOP = 900, 1200, 240, 200, 600, 150
SPEC: dict[str, Any] = {
    "stop": None,
    "startDeadlineSeconds": START,
    "pollFailureSeconds": POLL,
    "podStartupSeconds": STARTUP,
    "stopDeadlineSeconds": STOP,
    "stall": {"unreachableSeconds": UNREACHABLE},
}
#: Seconds between two plans.
TURN = 30
OURS: dict[str, Any] = {"round_id": "round-uid", "next_index": 10, "delivered_index": 8}


def _generating(session: str = "s1", **fields: Any) -> Answer:  # noqa: ANN401
    def answer(name: str, after: float) -> tuple[PodView, PodReport]:
        return a_pod(name), replace(says(PowState.GENERATING, session=session, **OURS, **fields), stalled_seconds=after)

    return answer


def _in(state: PowState, **fields: Any) -> Answer:  # noqa: ANN401
    return lambda name, _: (a_pod(name), says(state, **OURS, **fields))


def _silent(**pod: Any) -> Answer:  # noqa: ANN401
    return lambda name, after: (a_pod(name, **pod), PodReport(error="no answer within 5 s", silent_seconds=after))


LOADS = Container(id="c", restarts=1, running_since=NOW, startup_seconds=STARTUP, started=False)
#: What a pod answers for ever. None of it is progress.
ANSWERS: dict[str, Answer] = {
    "gone": lambda name, _: None,
    "terminating": _silent(gone=True),
    "disrupted": lambda name, _: (a_pod(name, gone=True, disrupted=True), None),
    "silent": _silent(),
    "silent and in flight": lambda name, after: (
        a_pod(name),
        PodReport(error="?", silent_seconds=after, in_flight=True),
    ),
    "not ready": _silent(ready=False),
    "loads": _silent(ready=False, containers=(LOADS,)),
    "crash loop": _silent(ready=False, containers=(Container(id="c", ended="CrashLoopBackOff"),)),
    "idle": lambda name, _: (a_pod(name), says(session="s1")),
    "restarted": lambda name, _: (a_pod(name), says(session="s2")),
    "computes and gets nowhere": _generating(),
    "computes in another session": _generating("s2"),
    "computes another slot": _generating(start_index=5),
    "tells nonsense": _generating(delivered_valid=9),
    "computes other work": lambda name, _: (a_pod(name), holding(9, "other")),
    "stopped": _in(PowState.STOPPED),
    "failed": _in(PowState.FAILED, error="the engine died"),
    "refuses": lambda name, _: (a_pod(name), replace(says(), refusal=("ModelUnsupported", "no"))),
    "serves another model": lambda name, _: (a_pod(name), says(model={"names": ["other"]})),
    "cannot resume": lambda name, after: (
        a_pod(name),
        replace(says(PowState.GENERATING, **OURS), resumes=False, stalled_seconds=after),
    ),
    "tells ever more nonsense": lambda name, after: (
        a_pod(name),
        says(PowState.GENERATING, **OURS | {"next_index": 10 + int(after), "delivered_valid": 9}),
    ),
}


def slots_of(*states: SlotState) -> list[Assignment]:
    """Slots in these states, each of which has a pod if it can."""
    return [
        a_slot(
            None if state is SlotState.WAITING else f"p{group}", state, group=group, session="s1", next=10, delivered=8
        )
        for group, state in enumerate(states)
    ]


def seconds_to_end(round_: PoCRound, answers: tuple[str, ...], limit: int) -> int | None:
    """Return after how many seconds the round is over; None if it is not within the limit."""
    for after in range(0, limit + TURN, TURN):
        seen = [ANSWERS[answer](f"p{number}", after) for number, answer in enumerate(answers)]
        status = plan(look(round_, *(pod for pod in seen if pod is not None), after=after)).status
        if status.state.finished:
            return after
        round_ = round_.model_copy(update={"status": status})
    return None


def a_started_round(states: tuple[SlotState, ...], **spec: Any) -> PoCRound:  # noqa: ANN401
    return a_round(a_status(*slots_of(*states)), **SPEC, **spec)


#: After its outcome is known, a round waits for its pods, and for decisions about rivals.
AT_THE_END = STOP + int(DECISION_PATIENCE.total_seconds())
#: Each slot may be silent before it counts as idle; then nobody works, and a pod may have to load.
WITHOUT_PROGRESS = max(UNREACHABLE, POLL) + START + STARTUP
COMBINATIONS = list(itertools.product(SlotState, ANSWERS))


@pytest.mark.parametrize(("state", "answer"), COMBINATIONS)
def test_a_round_that_is_to_end_ends(state: SlotState, answer: str) -> None:
    assert seconds_to_end(a_started_round((state,), finish=True), (answer,), AT_THE_END) is not None


@pytest.mark.parametrize(("state", "answer"), COMBINATIONS)
def test_a_round_that_is_suspended_is_so_in_time(state: SlotState, answer: str) -> None:
    round_ = a_started_round((state,), suspend=True)
    for after in range(0, STOP + TURN, TURN):
        seen = ANSWERS[answer]("p0", after)
        status = plan(look(round_, *([seen] if seen is not None else []), after=after)).status
        round_ = round_.model_copy(update={"status": status})
    whole = state in (SlotState.DONE, SlotState.FAILED)  # over, whatever the user wants
    assert round_.status.state.finished if whole else round_.status.state is State.SUSPENDED


@pytest.mark.parametrize(("state", "answer"), COMBINATIONS)
def test_a_round_in_which_nothing_gets_on_ends(state: SlotState, answer: str) -> None:
    round_ = a_started_round((state,))
    assert seconds_to_end(round_, (answer,), WITHOUT_PROGRESS + AT_THE_END) is not None


class DiligentPod:
    """A pod that has computed and delivered all it may, whenever it is asked, and does what it is told."""

    def __init__(self, slot: Assignment) -> None:
        self.view = a_pod(slot.pod or "", uid=slot.uid)
        self._told: dict[str, Any] = {"session": slot.session, "start_index": slot.start}
        self._state, self._end = PowState.GENERATING, slot.end

    def report(self) -> PodReport:
        done: dict[str, Any] = dict.fromkeys(("next_index", "delivered_index", "end_index"), self._end)
        return says(self._state, round_id="round-uid", **done, **self._told)

    def obey(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, StopPod) and action.pod.uid == self.view.uid:
                self._state = PowState.STOPPED
            elif isinstance(action, ExtendPod) and action.pod.uid == self.view.uid:
                self._end = action.request.end_index


@pytest.mark.parametrize(("state", "answer"), COMBINATIONS)
def test_what_one_pod_does_not_do_another_does_in_time(state: SlotState, answer: str) -> None:
    """Whatever becomes of a slot, the other one gets its share, and so ``stop.afterNonces`` is reached."""
    diligent = a_slot("q", group=1, session="s-q", next=100, delivered=100, end=100)
    status = a_status(*slots_of(state), diligent, slots=2, groups=2)
    round_ = a_round(status, **SPEC | {"stop": {"afterNonces": 1000}})
    other = DiligentPod(diligent)
    for after in range(0, UNREACHABLE + START + STARTUP + AT_THE_END, TURN):
        seen = ANSWERS[answer]("p0", after)
        step = plan(look(round_, *([seen] if seen is not None else []), (other.view, other.report()), after=after))
        other.obey(step.actions)
        if step.status.state.finished:
            break
        round_ = round_.model_copy(update={"status": step.status})
    assert step.status.state is State.COMPLETE
    assert step.status.outcome is not None
    assert step.status.outcome.message.startswith("spec.stop.afterNonces of 1000 reached")


_states = st.lists(st.sampled_from(list(SlotState)), min_size=1, max_size=3)


@settings(max_examples=HISTORIES, deadline=None)
@given(states=_states, data=st.data(), spec=st.sampled_from([{}, {"finish": True}, {"activeDeadlineSeconds": ACTIVE}]))
def test_every_combination_ends(states: list[SlotState], data: st.DataObject, spec: dict[str, Any]) -> None:
    """One pod more or fewer than slots: spares do not keep a round alive either."""
    pods = data.draw(st.lists(st.sampled_from(sorted(ANSWERS)), max_size=len(states) + 1))
    limit = {"finish": AT_THE_END, "activeDeadlineSeconds": ACTIVE + AT_THE_END}.get(
        next(iter(spec), ""), WITHOUT_PROGRESS + AT_THE_END
    )
    assert seconds_to_end(a_started_round(tuple(states), **spec), tuple(pods), limit) is not None


def test_a_pod_that_does_not_stop_is_named_and_keeps_no_round_open() -> None:
    round_ = a_started_round((SlotState.RUNNING,), finish=True)
    for after in (0, STOP - 1, STOP):
        status = plan(look(round_, (a_pod("p0"), says(PowState.GENERATING, **OURS)), after=after)).status
        round_ = round_.model_copy(update={"status": status})
        assert status.state is (State.COMPLETE if after == STOP else State.STOPPING)
    degraded = next(found for found in status.own_conditions if found.type == "Degraded")
    assert (degraded.reason, f"pod p0 computes on after {STOP} s" in degraded.message) == ("PodsLeft", True)
    assert "PodsLeft" in status.degraded


def test_a_round_that_ends_waits_for_a_start_that_is_on_its_way() -> None:
    """The pod is idle still, and computes once the start has come."""
    round_ = a_started_round((SlotState.STARTING,), finish=True)
    for in_flight, state in ((True, State.STOPPING), (True, State.STOPPING), (False, State.COMPLETE)):
        status = plan(look(round_, (a_pod("p0"), replace(says(), in_flight=in_flight)))).status
        round_ = round_.model_copy(update={"status": status})
        assert (status.stop_time, status.state) == (NOW, state)
        assert [slot.state for slot in status.assignments] == [SlotState.STARTING if in_flight else SlotState.DONE]


def test_only_what_is_settled_counts_towards_the_stop() -> None:
    """Computed nonces that nobody has got are not enough."""
    computed = says(PowState.GENERATING, round_id="round-uid", next_index=100, delivered_index=0)
    round_ = a_round(a_status(a_slot()), stop={"afterNonces": 100})
    assert plan(look(round_, (a_pod("a"), computed))).status.outcome is None
    delivered = says(PowState.GENERATING, round_id="round-uid", next_index=100, delivered_index=100)
    assert plan(look(round_, (a_pod("a"), delivered))).status.outcome is not None


@pytest.mark.parametrize("after", [timedelta(0), timedelta(seconds=START - 1)])
def test_a_round_with_a_pod_that_gets_on_is_never_idle(after: timedelta) -> None:
    step = plan(
        look(
            a_started_round((SlotState.RUNNING,)),
            (a_pod("p0"), says(PowState.GENERATING, round_id="round-uid", next_index=20, delivered_index=18)),
            after=after.total_seconds(),
        )
    )
    assert (step.status.idle_time, step.status.state) == (None, State.RUNNING)
