# SPDX-License-Identifier: Apache-2.0
"""Rounds that need an update: old pods cannot do them, so the update does not wait for their end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.fleets.forecast import WorkOnPods
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import NOW, a_round, says
from tests.unit.poc_operator.build import look as look_at_round
from tests.unit.poc_operator.fleets.test_update import FOUR, NEW, OLD, a_pod, evicted, fleet_of, in_phase, look
from vllm_poc.wire.answers import ModelLimits
from vllm_poc.wire.messages import Scheme

SELECTOR = {"matchLabels": {"poc.gonka.ai/worker": "true"}}
DECODE: dict[str, Any] = {"rTarget": None, "decode": {"maxTokens": 512}}
#: What the pods of the old template say, by what it lacks, and the spec of a round that needs it.
LACKS: dict[str, tuple[PodReport, Mapping[str, Any]]] = {
    "model": (says(model=ModelLimits(names=["old"])), {}),
    "length": (says(model=ModelLimits(names=["demo"], max_seq_len=32)), {}),
    "scheme": (replace(says(), schemes=frozenset({Scheme.PREFILL})), DECODE),
    "support of the model": (replace(says(), refusal=("ModelUnsupported", "hybrid layers")), {}),
}
LACK = LACKS["model"][0]


def told(round_status: RoundStatus) -> WorkOnPods:
    """The round as the fleet sees it, once its status is stored."""
    metadata = {"uid": "r", "name": "r", "namespace": "ns", "creationTimestamp": NOW.isoformat()}
    spec = {"fleetRef": {"name": "demo"}}
    return WorkOnPods.parse("PoCRound", {"metadata": metadata, "spec": spec, "status": round_status.stored()})


def round_on(*pods: tuple[PodView, PodReport | None], **spec: Any) -> RoundStatus:  # noqa: ANN401
    nodes = {"first": 0, "last": 0, "count": 1, "groups": 4}
    return plan(look_at_round(a_round(selector=SELECTOR, nodes=nodes, **spec), *pods)).status


@pytest.mark.parametrize(("report", "spec"), LACKS.values(), ids=LACKS)
def test_an_update_does_not_wait_for_a_round_that_needs_it(report: PodReport, spec: Mapping[str, Any]) -> None:
    status = round_on(*((pod, report) for pod in FOUR), **spec)
    assert status.unfit_revisions == [OLD]
    assert evicted(look(fleet_of(), FOUR, work=[told(status)])) == ["demo-3"]


#: What passes without an update.
PASSING: dict[str, tuple[PodReport, Mapping[str, Any]]] = {
    **{
        why: (replace(says(), refusal=(why, "not now")), {})
        for why in ("Paused", "EngineNotReady", "Busy", "ServerEnds")
    },
    "versions not told": (says(), DECODE),
}


@pytest.mark.parametrize(("report", "spec"), PASSING.values(), ids=PASSING)
def test_pods_that_cannot_do_it_just_now_are_spared(report: PodReport, spec: Mapping[str, Any]) -> None:
    status = round_on(*((pod, report) for pod in FOUR), **spec)
    assert status.unfit_revisions == []
    assert not look(fleet_of(), FOUR, work=[told(status)]).evict


@pytest.mark.parametrize("answers", [False, True])
def test_what_cannot_do_it_is_known_while_it_does_not_answer(answers: bool) -> None:
    """Or the update would wait for the round again, for one lost answer."""
    before = round_on(*((pod, LACK) for pod in FOUR))
    report = says() if answers else PodReport(error="timed out")
    nodes = {"first": 0, "last": 0, "count": 1, "groups": 4}
    after = plan(
        look_at_round(a_round(before, selector=SELECTOR, nodes=nodes), *((pod, report) for pod in FOUR))
    ).status
    assert after.unfit_revisions == ([] if answers else [OLD])


HOLDING: dict[str, Sequence[PodReport | None]] = {
    "one pod can do it": [LACK, LACK, LACK, says()],
    "nobody answers": [None, PodReport(error="timed out"), None, None],
}


@pytest.mark.parametrize("reports", HOLDING.values(), ids=HOLDING)
def test_old_pods_that_may_be_of_use_are_spared(reports: Sequence[PodReport | None]) -> None:
    status = round_on(*zip(FOUR, reports, strict=True))
    assert status.unfit_revisions == []
    assert not look(fleet_of(), FOUR, work=[told(status)]).evict


def test_the_update_goes_on_while_the_round_runs_on_new_pods() -> None:
    pods = [*FOUR[:3], a_pod(3, NEW)]
    status = round_on(*((pod, LACK) for pod in FOUR[:3]), (pods[3], says()))
    assert [slot.pod for slot in status.assignments if slot.pod] == ["demo-3"]
    assert evicted(look(fleet_of(in_phase("Rolling")), pods, work=[told(status)])) == ["demo-2"]


def test_what_other_work_needs_is_spared_all_the_same() -> None:
    waits = told(round_on(*((pod, LACK) for pod in FOUR)))
    other = told(round_on(*((pod, says()) for pod in FOUR)))
    step = look(fleet_of(), FOUR, work=[waits, other])
    assert not step.evict
    assert step.status.update.message.endswith("waiting for the end of PoCRound r")


def test_a_round_that_waits_comes_before_those_that_may_follow() -> None:
    waits = told(round_on(*((pod, LACK) for pod in FOUR)))
    before = [{"uid": f"b{n}", "name": f"b{n}", "startTime": a_minute(n), "overTime": a_minute(n)} for n in (2, 1)]
    fleet = fleet_of({"update": {"goodRevision": OLD, "startupSeconds": 60, "rounds": before}})
    assert not look(fleet, FOUR).evict
    assert evicted(look(fleet, FOUR, work=[waits])) == ["demo-3"]
    # The network's questions about the last round need the old pods.
    before[-1]["network"] = True
    fleet = fleet_of({"update": {"goodRevision": OLD, "startupSeconds": 60, "rounds": before}})
    assert "may validate round b1" in look(fleet, FOUR, work=[waits]).status.update.message


def a_minute(number: int) -> Any:  # noqa: ANN401
    return (NOW - timedelta(seconds=60 * number)).isoformat()


def test_the_round_waits_for_the_new_pod_as_for_any_that_loads() -> None:
    server = Container(id="c", running_since=NOW, startup_seconds=600, started=False)
    loading = a_pod(3, NEW, ready=False, containers=[server])
    round_ = a_round(selector=SELECTOR, startDeadlineSeconds=60, age=0)
    world = [*((pod, LACK) for pod in FOUR[:3]), (loading, None)]
    assert plan(look_at_round(round_, *world, after=100)).status.outcome is None
    assert plan(look_at_round(round_, *world[:3], after=100)).status.outcome is not None
