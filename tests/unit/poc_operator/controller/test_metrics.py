# SPDX-License-Identifier: Apache-2.0
"""Metrics: bounded labels, counters that never fall and count nothing twice."""

from dataclasses import replace
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.fleet import FleetStatus
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus, Totals
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.errors import PodTimeout, StaleObject
from poc_operator.controller.metrics import Metrics
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.planning.conditions import conditions_of
from poc_operator.planning.snapshot import Loss, WorkEvent
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import NOW, UID, a_pod, a_round, a_slot, a_status, look, says
from tests.unit.poc_operator.planning.test_start_deadline import COMPUTES_FIRST, FIRST


def value(metrics: Metrics, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(metrics.text().decode())
    return next(s.value for family in families for s in family.samples if (s.name, s.labels) == (name, labels))


def planned(metrics: Metrics, before: int, after: int, *events: WorkEvent) -> None:
    status = a_status(a_slot(), totals=Totals(checked=before))
    silent = PodReport(error="no answer", silent_seconds=40)
    step: RoundStatus = status.model_copy(update={"totals": Totals(checked=after)})
    metrics.planned(look(a_round(status), (a_pod("a"), silent)), step, events)


def test_nonces_count_beyond_what_was_reached_before() -> None:
    metrics = Metrics()
    for before, after, total in ((1000, 1010, 10), (1010, 1000, 10), (1000, 1008, 10), (1008, 1015, 15)):
        planned(metrics, before, after)
        assert value(metrics, "poc_operator_nonces_checked_total") == total
    assert value(metrics, "poc_operator_nonces_valid_total") == 0


def test_rounds_and_slots_by_state() -> None:
    metrics = Metrics()
    planned(metrics, 0, 1)
    assert value(metrics, "poc_operator_slots", state=SlotState.RUNNING) == 1
    assert value(metrics, "poc_operator_slots", state=SlotState.STALLED) == 0
    assert value(metrics, "poc_operator_rounds", state="Pending") == 1
    assert 40 <= value(metrics, "poc_operator_oldest_report_seconds") < 100
    metrics.forget(UID)
    assert value(metrics, "poc_operator_rounds", state="Pending") == 0
    assert value(metrics, "poc_operator_oldest_report_seconds") == 0


def idle(metrics: Metrics) -> dict[str, float]:
    """Return the number of idle rounds by each reason that has any."""
    families = text_string_to_metric_families(metrics.text().decode())
    (found,) = (family for family in families if family.name == "poc_operator_idle_rounds")
    return {one.labels["reason"]: one.value for one in found.samples if one.value}


def server(since: float) -> Container:
    """One that may load its model for a minute, and has begun ``since`` seconds ago."""
    return Container(id="c", running_since=NOW - timedelta(seconds=since), startup_seconds=60, started=False)


def waiting(name: str, since: float) -> PodView:
    return a_pod(name, ready=False, waiting_for="ContainersNotReady", containers=(server(since),))


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ([], Reason.NO_MATCHING_PODS),
        ([waiting("a", since=90)], Reason.NO_POD_READY),
        ([waiting("a", since=90), waiting("b", since=5)], Reason.NO_POD_READY),
        ([waiting("a", since=5), waiting("b", since=5)], None),
    ],
    ids=["no pods", "pods that had their time", "one that loads beside one that had its time", "pods that load"],
)
def test_a_round_is_idle_beside_one_that_computes(pods: list[PodView], reason: Reason | None) -> None:
    metrics = Metrics()
    planned(metrics, 0, 1)
    assert idle(metrics) == {}
    round_ = a_round()
    round_ = round_.model_copy(update={"metadata": round_.metadata.model_copy(update={"uid": "other"})})
    seen = look(round_, *((pod, None) for pod in pods))
    metrics.planned(seen, plan(seen).status, [])
    assert idle(metrics) == ({str(reason): 1} if reason else {})


def test_a_round_that_waits_for_others_is_not_idle() -> None:
    metrics = Metrics()
    seen = replace(look(a_round(), (a_pod("a"), COMPUTES_FIRST)), find_other_rounds=lambda: (FIRST,))
    metrics.planned(seen, plan(seen).status, [])
    assert idle(metrics) == {}


def test_causes_reasons_and_kinds() -> None:
    metrics = Metrics()
    planned(metrics, 0, 1, WorkEvent(reason=Reason.WORK_LOST, message="", loss=Loss.RESTARTED))
    metrics.poll_failed(PodTimeout("no answer within 5 s"))
    metrics.api_server_failed(StaleObject("changed"))
    assert value(metrics, "poc_operator_retries_total", cause="Restarted") == 1
    assert value(metrics, "poc_operator_events_total", reason="WorkLost") == 1
    assert value(metrics, "poc_operator_poll_errors_total", kind="PodTimeout") == 1
    assert value(metrics, "poc_operator_api_server_errors_total", kind="StaleObject") == 1


def test_a_round_that_fails_is_counted_once() -> None:
    """Its reason is there with 0 before, or Prometheus would see no increase."""
    metrics = Metrics()
    name, reason = "poc_operator_failed_rounds_total", str(Reason.BACKOFF_LIMIT_EXCEEDED)
    assert value(metrics, name, reason=reason) == 0
    assert f'{name}{{reason="{Reason.DELETED}"}}'.encode() not in metrics.text()
    gone = a_slot(None, SlotState.FAILED, error="pod a died")
    seen = look(a_round(a_status(gone)), (a_pod("a"), says()))
    failed = plan(seen).status
    assert failed.state is State.FAILED
    metrics.planned(seen, failed, [])
    metrics.planned(replace(seen, work=a_round(failed)), failed, [])
    assert value(metrics, name, reason=reason) == 1


def test_a_slot_that_was_given_up_is_no_reissue() -> None:
    metrics = Metrics()
    planned(metrics, 0, 1, WorkEvent(reason=Reason.WORK_LOST, message=""))
    assert b"poc_operator_retries_total{" not in metrics.text()


def test_one_event_of_many_slots_counts_all_their_retries() -> None:
    metrics = Metrics()
    planned(metrics, 0, 1, WorkEvent(reason=Reason.WORK_LOST, message="", loss=Loss.POD_GONE, count=1000))
    assert value(metrics, "poc_operator_retries_total", cause="PodGone") == 1000
    assert value(metrics, "poc_operator_events_total", reason="WorkLost") == 1


def test_every_reason_of_a_degraded_object_is_counted() -> None:
    metrics = Metrics()
    status = a_status(a_slot(), degraded="SlotsWaiting,ResultsRejected")
    metrics.planned(look(a_round(status), (a_pod("a"), None)), status, [])
    found = {
        reason: value(metrics, "poc_operator_degraded", reason=reason) for reason in ("SlotsWaiting", "ResultsRejected")
    }
    assert found == {"SlotsWaiting": 1, "ResultsRejected": 1}
    assert value(metrics, "poc_operator_degraded", reason="SlotsFailed") == 0


def test_the_leader_is_told() -> None:
    assert value(Metrics(), "poc_operator_leader") == 0
    assert value(Metrics(leads=lambda: True), "poc_operator_leader") == 1


def test_fleets_in_trouble_are_counted_until_they_are_gone() -> None:
    metrics = Metrics()
    told = (True, Reason.UPDATE_FAILED, "the canary failed")
    verdicts = {ConditionType.DEGRADED: told, ConditionType.STALLED: told, ConditionType.READY: (False, *told[1:])}
    status = FleetStatus(conditions=list(conditions_of(verdicts, NOW, 1)))
    metrics.fleet_planned("f", status)
    assert value(metrics, "poc_operator_fleets_degraded", reason=Reason.UPDATE_FAILED) == 1
    assert value(metrics, "poc_operator_fleets_degraded", reason=Reason.GPU_FAULTY) == 0
    metrics.forget("f")
    assert value(metrics, "poc_operator_fleets_degraded", reason=Reason.UPDATE_FAILED) == 0


def test_reasons_of_fleets_alone_are_not_among_those_of_work() -> None:
    text = Metrics().text().decode()
    assert 'poc_operator_degraded{reason="GpuFaulty"}' not in text
    assert 'poc_operator_degraded{reason="SelfCheckFailed"}' in text
