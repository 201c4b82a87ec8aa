# SPDX-License-Identifier: Apache-2.0
"""Progress, time left, rates between two looks, and how chat holds pods back."""

from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.cli.output import bar, number, period
from poc_operator.cli.overview import Seen, goal, overview
from poc_operator.cli.overview_tables import MOST_OVER, recent
from poc_operator.cli.pod_metrics import Chat, parse_chat
from poc_operator.observed import PodView
from tests.unit.poc_operator.cli import seen


def a_round(stop: dict[str, int] | None, **status: Any) -> PoCRound:  # noqa: ANN401
    body = seen.a_round(**status)
    body["spec"]["stop"] = stop
    if stop and "afterValid" in stop:
        body["spec"] = {**body["spec"], "artifact": None, "rTarget": "1.4"}
    return PoCRound.parse(body)


@pytest.mark.parametrize(
    ("stop", "share", "left"),
    [
        ({"afterNonces": 1000}, 0.4, 6.0),
        ({"afterValid": 80}, 0.5, 4.0),  # a tenth of 100 nonces a second is valid
        ({"afterSeconds": 60}, 1 / 3, 40.0),
        (None, None, None),
    ],
)
def test_the_goal_says_how_far_and_how_long(
    stop: dict[str, int] | None, share: float | None, left: float | None
) -> None:
    found, _, eta = goal(a_round(stop), seen.START + timedelta(seconds=20))
    assert found == (pytest.approx(share) if share is not None else None)
    assert (eta.total_seconds() if eta is not None else None) == left


def test_nothing_that_stands_still_has_a_time_left() -> None:
    assert goal(a_round({"afterNonces": 1000}, totals={"delivered": 400, "rate": "0.0"}), seen.START)[2] is None
    assert goal(a_round({"afterNonces": 1000}, state="Suspended"), seen.START)[2] is None
    assert goal(a_round({"afterSeconds": 60}, startTime=None), seen.START)[::2] == (0.0, None)


def test_two_looks_give_the_rate_and_the_share_of_chat() -> None:
    found, key = a_round(None), ("poc", "demo-0")
    before = Seen(now=seen.START, rounds=[found], chat={key: Chat(seconds=10.0, computed=300)})
    told = {key: Chat(held=True, seconds=13.0, computed=400)}
    after = Seen(now=seen.START + timedelta(seconds=4), rounds=[found], chat=told)
    (row,) = overview(after, before).rounds
    assert [(one.rate, one.held_share) for one in row.slots] == [(25.0, 0.75), (None, None)]
    assert [one.rate for one in overview(after).rounds[0].slots] == [None, None]
    restarted = Seen(now=after.now, rounds=[found], chat={key: Chat()})
    assert [one.rate for one in overview(restarted, before).rounds[0].slots] == [None, None]


def test_pods_stand_in_the_order_of_their_numbers() -> None:
    names = [("a", "demo-0"), ("a", "demo-2"), ("a", "demo-10"), ("b", "chat-1"), ("b", "demo-1")]
    pods = [PodView(name=name, namespace=namespace, uid=name) for namespace, name in sorted(names)]
    assert [(row.namespace, row.name) for row in overview(Seen(now=seen.START, pods=pods)).pods] == names


def test_rounds_that_are_over_come_last() -> None:
    bodies = [seen.a_round("old", state="Complete"), seen.a_round("new")]
    assert [row.name for row in overview(Seen(now=seen.START, rounds=map_rounds(bodies))).rounds] == ["new", "old"]


def test_many_rounds_that_are_over_are_not_all_shown() -> None:
    bodies = [seen.a_round(f"over-{number}", state="Failed") for number in range(MOST_OVER + 5)]
    rows = overview(Seen(now=seen.START, rounds=map_rounds([*bodies, seen.a_round("new")]))).rounds
    assert [row.name for row in recent(rows)] == ["new", *(f"over-{number}" for number in range(MOST_OVER))]


def map_rounds(bodies: list[dict[str, Any]]) -> list[PoCRound]:
    return [PoCRound.parse(body) for body in bodies]


def test_metrics_without_poc_are_an_error() -> None:
    assert parse_chat(seen.METRICS) == Chat(held=True, seconds=12.5, computed=320.0)
    assert parse_chat("vllm:num_requests_running 1\n").error
    assert parse_chat("poc_held_back_seconds_total x\n").error


def test_bars_numbers_and_times_are_short() -> None:
    assert bar(0.5, 4) == "██░░  50 %"
    assert bar(None) == ""
    assert bar(7.0, 2) == "██ 100 %"
    assert (number(1234567), number(12.5)) == ("1 234 567", "12.5")
    assert [period(timedelta(seconds=one)) for one in (59, 150, 7200, 200_000)] == ["59 s", "2 min", "2 h", "2 d"]


def test_states_without_an_operator_are_said_to_be_old() -> None:
    away = "the operator does not run: the Deployment poc-system/vllm-poc-operator is scaled to 0 replicas"
    assert overview(Seen(now=seen.START, operator=away)).notes == [f"{away}: states and rates are those of before"]
    assert overview(Seen(now=seen.START)).notes == []
