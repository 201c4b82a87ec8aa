# SPDX-License-Identifier: Apache-2.0
"""What keeps pods from being replaced: work under way, the network's validation, and rounds that are near."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet_update import MAX_ROUNDS, FleetRound
from poc_operator.fleets.forecast import (
    EPOCH_BLOCKS,
    VALIDATION_SECONDS,
    WorkOnPods,
    blocker,
    next_round,
    remembered,
    replacement_seconds,
    startup_seconds,
    validated_until,
)
from poc_operator.observed import Container, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import a_fleet

DAY = 86_400


def ago(seconds: float) -> Any:  # noqa: ANN401
    return NOW - timedelta(seconds=seconds)


def a_round(
    start: float, over: float | None = None, *, uid: str = "", network: bool = False, height: int | None = None
) -> FleetRound:
    """A round that began and was over so many seconds ago."""
    name = uid or f"r{start:.0f}"
    over_time = ago(over) if over is not None else None
    return FleetRound(uid=name, name=name, start_time=ago(start), over_time=over_time, network=network, height=height)


def work(
    kind: str = "PoCRound",
    *,
    uid: str = "w",
    state: str = "Running",
    created: float = 10,
    **body: Any,  # noqa: ANN401
) -> WorkOnPods:
    started = {} if state == "Pending" else {"startTime": ago(created).isoformat()}
    status = {"state": state, **started, **body.pop("status", {})}
    metadata = {"uid": uid, "name": uid, "namespace": "ns", "creationTimestamp": ago(created).isoformat()}
    spec = body.pop("spec", {"fleetRef": {"name": "demo"}})
    return WorkOnPods.parse(kind, {"metadata": metadata | body, "spec": spec, "status": status})


OLD_POD = PodView(name="demo-0", namespace="ns", uid="u0")
EVERY_MINUTE = [a_round(40 + 60 * n, 20 + 60 * n) for n in range(5)]
DAILY = [a_round(2000 + DAY * n, 1820 + DAY * n, network=True) for n in range(3)]


@pytest.mark.parametrize(
    ("rounds", "need", "expected"),
    [
        ([], 3600, None),
        ([a_round(40, 20)], 3600, None),  # of one round nothing follows
        (EVERY_MINUTE, 19, None),
        (EVERY_MINUTE, 21, 20),
        # The network's round each day: a cold start fits in, until shortly before the next.
        (DAILY, 3600, None),
        ([a_round(DAY - 3000 + DAY * n, DAY - 3180 + DAY * n, network=True) for n in range(2)], 3600, 3000),
        # Late, and then not to be expected any more.
        ([a_round(70, 60), a_round(130, 120)], 5, -10),
        ([a_round(76, 60), a_round(136, 120)], 5, None),
        # An odd short pause between rounds of each day holds up little.
        ([a_round(3000, 2990), a_round(3060, 3050), a_round(3060 + DAY, 3050 + DAY)], 600, None),
        # Rounds that overlap are one.
        ([a_round(100, 40, uid="a"), a_round(98, 30, uid="b"), a_round(400, 350)], 600, 200),
        # So are those within a validation: the network has told the same round anew.
        ([a_round(2000, 1900, network=True), a_round(1800, 1700, network=True)], 600, None),
    ],
)
def test_the_next_round_is_forecast_from_the_times_between_starts(
    rounds: Sequence[FleetRound], need: int, expected: int | None
) -> None:
    found = next_round(sorted(rounds, key=lambda one: one.start_time), NOW, need)
    assert found == (NOW + timedelta(seconds=expected) if expected is not None else None)


HOUR = 3600
#: Of the network's rounds how many hours before the last regular one each began, and its height.
EPOCHS = {HOUR * 48: 1_000_000, HOUR * 24: 1_000_000 + EPOCH_BLOCKS, 0: 1_000_000 + 2 * EPOCH_BLOCKS}
#: Rounds that confirm: seven hours after each regular one but the last.
CONFIRMING = {HOUR * 41: 1_005_040, HOUR * 17: 1_022_322}


def network(since: float, *more: Mapping[int, int]) -> list[FleetRound]:
    """The network's rounds; the last regular one began so many seconds ago."""
    found = {start: height for rounds in (EPOCHS, *more) for start, height in rounds.items()}
    return [
        a_round(since + start, since + start - 180, network=True, height=height)
        for start, height in sorted(found.items(), reverse=True)
    ]


@pytest.mark.parametrize(
    ("rounds", "need", "expected"),
    [
        pytest.param(network(HOUR * 23), HOUR + 1, HOUR, id="regular ones"),
        pytest.param(network(HOUR * 23), HOUR, None, id="there is time"),
        pytest.param(network(HOUR * 7, CONFIRMING), HOUR, None, id="nothing tells when one confirms"),
        pytest.param(network(HOUR * 23, CONFIRMING, {-HOUR * 9: 1_041_211}), HOUR + 1, HOUR, id="one confirmed since"),
        pytest.param(network(HOUR * 47), HOUR + 1, HOUR, id="one was missed"),
        pytest.param(network(HOUR * 29), HOUR, -HOUR * 5, id="late"),
        pytest.param(network(HOUR * 31), HOUR, None, id="missed"),
        pytest.param([*network(HOUR * 9), *EVERY_MINUTE], 21, 20, id="beside rounds of others"),
        # Heights that no epoch explains: the times alone count, as without heights.
        pytest.param(network(HOUR * 7, {48 * HOUR: 7, 24 * HOUR: 8, 17 * HOUR: 9}), HOUR * 20, 0, id="others"),
    ],
)
def test_heights_tell_which_rounds_are_regular(rounds: Sequence[FleetRound], need: int, expected: int | None) -> None:
    found = next_round(sorted(rounds, key=lambda one: one.start_time), NOW, need)
    assert found == (NOW + timedelta(seconds=expected) if expected is not None else None)


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        pytest.param(20 * HOUR, None, id="there is time"),
        pytest.param(23 * HOUR, HOUR, id="an epoch is nearly over"),
        pytest.param(32 * HOUR, -8 * HOUR, id="late"),
        pytest.param(33 * HOUR, None, id="missed"),
    ],
)
def test_an_epoch_after_a_single_round_of_the_network_another_is_expected(since: float, expected: int | None) -> None:
    """A host's first day has one round, and no pod is to be away in the second."""
    found = next_round([a_round(since, since - 180, network=True, height=1_000_000)], NOW, 3 * HOUR)
    assert found == (NOW + timedelta(seconds=expected) if expected is not None else None)
    # Once it was missed, nothing is expected: what an epoch takes is a guess.
    for days in (10, 30, 200):
        assert next_round([a_round(since + days * 24 * HOUR, network=True, height=10**6)], NOW, 3 * HOUR) is None
    # Without a height nothing tells of an epoch.
    assert next_round([a_round(since, since - 180, network=True)], NOW, 3 * HOUR) is None


def test_rounds_at_several_places_of_an_epoch_are_forecast_by_the_times_between_them() -> None:
    # A test network's epochs, of which two fit into one of the network's.
    rounds = [
        a_round(HOUR * (11 + 12 * n), HOUR * (11 + 12 * n) - 180, network=True, height=-n * EPOCH_BLOCKS // 2 + 10**6)
        for n in reversed(range(5))
    ]
    assert next_round(rounds, NOW, HOUR + 1) == NOW + timedelta(hours=1)


def test_the_fastest_epoch_tells_from_when_on_and_the_slowest_for_how_long() -> None:
    starts = [49 * HOUR, 24 * HOUR, HOUR]  # epochs of 25 and of 23 hours
    for since, expected in ((21 * HOUR, 2 * HOUR), (30 * HOUR, -7 * HOUR), (33 * HOUR, None)):
        rounds = [
            a_round(start - HOUR + since, network=True, height=n * EPOCH_BLOCKS) for n, start in enumerate(starts)
        ]
        found = next_round(rounds, NOW, 3 * HOUR)
        assert found == (NOW + timedelta(seconds=expected) if expected is not None else None)


def test_a_network_that_is_gone_for_a_week_holds_no_update_up() -> None:
    starts = [49 * HOUR, 24 * HOUR, HOUR]  # epochs of 25 and of 23 hours
    found = [
        next_round(
            [a_round(s + day * 24 * HOUR, network=True, height=n * EPOCH_BLOCKS) for n, s in enumerate(starts)], NOW, 60
        )
        for day in range(8, 60)
    ]
    assert found == [None] * len(found)


def test_the_height_of_a_round_is_remembered() -> None:
    (found,) = remembered([], [work(spec={"fleetRef": {"name": "demo"}, "blockHeight": 7})], NOW)
    assert found.height == 7
    assert remembered([found], [], NOW)[0].height == 7


def test_what_is_under_way_is_waited_for_by_name() -> None:
    assert blocker([], [work(uid="r1")], [OLD_POD], NOW, 1) == "the end of PoCRound r1"
    many = [work("PoCValidation", uid=f"v{n}") for n in range(5)]
    assert (
        blocker([], many, [OLD_POD], NOW, 1)
        == "the end of PoCValidation v0, PoCValidation v1, PoCValidation v2 and 2 more"
    )
    for state in ("Complete", "Failed", "Suspended"):
        assert blocker([], [work(state=state)], [OLD_POD], NOW, 1) is None
    for state in ("Pending", "Stopping", "Suspending", "a new word"):
        assert blocker([], [work(state=state)], [OLD_POD], NOW, 1) is not None


#: What waits for the update: no old pod can do it.
MISTYPED: dict[str, Any] = {"uid": "typo", "created": 0, "state": "Pending", "status": {"unfitRevisions": [""]}}
NETWORK: dict[str, Any] = {"labels": {"poc.gonka.ai/origin": "network"}}
#: The network's daily rounds, the next one in ten minutes.
BY_TIMES = [a_round(DAY * n - 600, DAY * n - 780, network=True) for n in (2, 1)]
BY_HEIGHTS = [a_round(DAY * n - 600, DAY * n - 780, network=True, height=1_000_000 - n * EPOCH_BLOCKS) for n in (2, 1)]


@pytest.mark.parametrize("rounds", [BY_TIMES, BY_HEIGHTS], ids=["by times", "by heights"])
def test_the_networks_rounds_are_expected_beside_one_that_no_pod_can_do(rounds: Sequence[FleetRound]) -> None:
    waits = [work(**MISTYPED)]
    found = blocker(remembered(rounds, waits, NOW), waits, [OLD_POD], NOW, 3600)
    assert found is not None
    assert found.startswith("a round, which is expected from 2026-01-01 12:10:00 UTC on")


def test_what_waits_for_the_update_comes_before_rounds_of_its_kind() -> None:
    daily = [a_round(DAY * n - 600, DAY * n - 780) for n in (2, 1)]
    assert blocker(daily, [], [OLD_POD], NOW, 3600) is not None
    waits = [work(**MISTYPED)]
    assert blocker(remembered(daily, waits, NOW), waits, [OLD_POD], NOW, 3600) is None


@pytest.mark.parametrize("height", [None, 1_000_000], ids=["by times", "by heights"])
def test_a_round_of_the_network_that_needs_the_update_is_the_one_that_was_expected(height: int | None) -> None:
    known = BY_TIMES if height is None else BY_HEIGHTS
    waits = [work(**MISTYPED, **NETWORK, spec={"fleetRef": {"name": "demo"}, "blockHeight": height})]
    assert blocker(remembered(known, waits, NOW), waits, [OLD_POD], NOW, 3600) is None


def test_finished_work_is_not_compared_with_pods() -> None:
    class Pods(list[PodView]):
        looks = 0

        def __iter__(self) -> Iterator[PodView]:
            self.looks += 1
            return super().__iter__()

    pods = Pods([OLD_POD])
    over = [work(uid=f"w{n}", state="Complete") for n in range(9)]
    assert blocker([], over, pods, NOW, 1) is None
    assert pods.looks == 0
    assert blocker([], [*over, work()], pods, NOW, 1) is not None
    assert pods.looks == 1


def test_the_network_has_time_to_validate() -> None:
    over = VALIDATION_SECONDS - 5
    found = blocker([a_round(over + 180, over, uid="n1", network=True)], [], [OLD_POD], NOW, 1)
    assert found == "the network, which may validate round n1 until 2026-01-01 12:00:05 UTC"
    assert blocker([a_round(over + 180, over)], [], [OLD_POD], NOW, 1) is None
    assert blocker([a_round(over + 190, over + 5, network=True)], [], [OLD_POD], NOW, 1) is None


def test_a_round_that_is_near_is_named_with_the_time_that_a_pod_needs() -> None:
    assert blocker(EVERY_MINUTE, [], [OLD_POD], NOW, 21) == (
        "a round, which is expected from 2026-01-01 12:00:20 UTC on, since a pod needs 21 s to be replaced"
    )


@pytest.mark.parametrize(
    ("spec", "concerned"),
    [
        ({"fleetRef": {"name": "demo"}}, True),
        ({"fleetRef": {"name": "other"}}, False),
        ({}, True),  # the worker's label
        ({"selector": {"matchLabels": {"own": "yes"}}}, True),
        ({"selector": {"matchLabels": {"own": "no"}}}, False),
        ({"selector": {"matchLabels": 7}}, True),  # what makes no sense may select them
    ],
)
def test_work_concerns_a_fleet_if_it_selects_its_pods(spec: dict[str, Any], concerned: bool) -> None:
    labels = [{"poc.gonka.ai/fleet": "demo", "poc.gonka.ai/worker": "true"}, {"own": "yes"}]
    assert work(spec=spec).concerns(a_fleet(), labels) is concerned
    assert not work(spec=spec, namespace="elsewhere").concerns(a_fleet(), labels)


def test_rounds_are_remembered_with_their_ends() -> None:
    labels: dict[str, Any] = {"labels": {"poc.gonka.ai/origin": "network"}}
    first = remembered([], [work(uid="r1", **labels), work("PoCValidation", uid="v1")], ago(5))
    assert [(one.uid, one.over_time, one.network) for one in first] == [("r1", None, True)]
    # Gone, finished at a known time, suspended, and going on again.
    assert remembered(first, [], NOW)[0].over_time == NOW
    over = work(uid="r1", state="Complete", status={"completionTime": ago(3).isoformat()})
    assert remembered(first, [over], NOW)[0].over_time == ago(3)
    paused = remembered(first, [work(uid="r1", state="Suspended")], ago(2))
    assert paused[0].over_time == ago(2)
    assert remembered(paused, [work(uid="r1", state="Suspended")], NOW)[0].over_time == ago(2)
    assert remembered(paused, [work(uid="r1")], NOW)[0].over_time is None
    assert remembered(remembered(first, [], ago(1)), [], NOW)[0].over_time == ago(1)


@pytest.mark.parametrize("ends", ["gone", "failed", "suspended"])
def test_what_no_pod_has_begun_tells_nothing_of_the_next_round(ends: str) -> None:
    """A mistyped round: as the last start it would let pods go shortly before the network's next round."""
    pending = remembered(BY_TIMES, [work(**MISTYPED)], ago(5))
    states = {"gone": None, "failed": "Failed", "suspended": "Suspended"}
    never: dict[str, Any] = MISTYPED | {"state": states[ends], "status": {"startTime": None}}
    left = [work(**never)] if ends != "gone" else []
    after = remembered(pending, left, NOW)
    assert [one.uid for one in after] == [one.uid for one in BY_TIMES]
    found = blocker(after, left, [OLD_POD], NOW, 3600)
    assert found is not None
    assert found.startswith("a round, which is expected from 2026-01-01 12:10:00 UTC on")


@pytest.mark.parametrize("ends", ["gone", "failed", "suspended"])
@pytest.mark.parametrize("height", [None, 1_000_000], ids=["by times", "by heights"])
def test_a_round_of_the_network_that_no_pod_has_begun_tells_when_the_next_one_comes(
    height: int | None, ends: str
) -> None:
    """Day 1's round was begun, day 2's was missed, and day 3's comes in ten minutes."""
    first = a_round(2 * DAY - 600, 2 * DAY - 780, network=True, height=height and height - EPOCH_BLOCKS)
    missed: dict[str, Any] = {**NETWORK, "uid": "missed", "created": DAY - 600}
    spec = {"fleetRef": {"name": "demo"}, "blockHeight": height}
    pending = remembered([first], [work(**missed, state="Pending", spec=spec)], ago(DAY - 610))
    state = {"failed": "Failed", "suspended": "Suspended"}.get(ends)
    never = {"startTime": None, "completionTime": ago(DAY - 1500).isoformat()}
    left = [work(**missed, state=state, spec=spec, status=never)] if state else []
    found = blocker(remembered(pending, left, ago(DAY - 1500)), left, [OLD_POD], NOW, 3600)
    assert found is not None
    assert found.startswith("a round, which is expected from 2026-01-01 12:10:00 UTC on")


def test_the_network_has_nothing_to_validate_of_a_round_that_no_pod_has_begun() -> None:
    never = work(**NETWORK, uid="n1", state="Failed", status={"startTime": None, "completionTime": ago(5).isoformat()})
    known = remembered([], [never], NOW)
    assert [one.uid for one in known] == ["n1"]
    assert blocker(known, [never], [OLD_POD], NOW, 1) is None


@pytest.mark.parametrize("told", [{}, {"started": True}, {"started": False}], ids=["untold", "begun", "not begun"])
@pytest.mark.parametrize("state", ["Pending", "Running"])
def test_an_object_itself_says_whether_it_was_begun_unless_the_status_told_so(
    told: dict[str, bool], state: str
) -> None:
    """Operators of before did not write it down."""
    known = FleetRound.model_validate({"uid": "r1", "name": "r1", "startTime": ago(9).isoformat(), **told})
    found = remembered([known], [work(uid="r1", state=state)], NOW)
    assert [one.started for one in found] == [state == "Running" or told.get("started", False)]
    # What is written down then is told, and what is gone counts as it was told.
    stored = FleetRound.model_validate(found[0].model_dump(mode="json", by_alias=True, exclude_none=True))
    assert len(remembered([stored], [], NOW)) == found[0].started


def test_a_round_of_which_nobody_told_whether_it_was_begun_counts_once_it_is_gone() -> None:
    known = FleetRound.model_validate({"uid": "r1", "name": "r1", "startTime": ago(9).isoformat()})
    assert [one.uid for one in remembered([known], [], NOW)] == ["r1"]


def test_a_round_that_was_begun_counts_whatever_becomes_of_it() -> None:
    """Resumed, it starts anew; deleted, it has begun all the same."""
    begun = remembered([], [work(uid="r1")], ago(5))
    resumed = remembered(begun, [work(uid="r1", state="Pending")], ago(3))
    assert [one.uid for one in remembered(resumed, [], NOW)] == ["r1"]


def test_of_many_rounds_the_last_are_remembered() -> None:
    found = remembered([a_round(100 + n) for n in range(30)], [work(uid="new", created=1)], NOW)
    assert len(found) == MAX_ROUNDS
    assert found[-1].uid == "new"
    assert found[0].start_time == ago(100 + MAX_ROUNDS - 2)


def test_rounds_of_users_push_out_none_of_the_network_nor_these_them() -> None:
    """Else sixteen rounds of a test would hide when the network's next one comes, and that it validates the last."""
    network = [a_round(DAY * n - 120, DAY * n - 300, network=True, height=(4 - n) * 17_280) for n in (3, 2, 1)]
    users = [a_round(700 - 30 * n, 690 - 30 * n) for n in range(20)]
    found = remembered([*network, *users], [], NOW)
    assert len(found) == MAX_ROUNDS
    assert [one.height for one in found if one.network] == [17_280, 2 * 17_280, 3 * 17_280]
    assert next_round(found, NOW, HOUR) == NOW + timedelta(seconds=120)
    many = [a_round(900 + 50 * n, 880 + 50 * n, network=True) for n in range(40)]
    found = remembered([*many, *users], [], NOW)
    assert [sum(one.network for one in found), len(found)] == [MAX_ROUNDS // 2, MAX_ROUNDS]
    assert validated_until(found) == validated_until(many)


def pod(seconds: float | None, *, restarts: int = 0) -> PodView:
    ready = ago(1000 - seconds) if seconds is not None else None
    server = Container(id="a#0", restarts=restarts)
    return PodView(
        name="p", namespace="ns", uid="u", ready=True, created=ago(1000), ready_since=ready, containers=[server]
    )


def test_the_time_to_start_is_the_median_of_the_pods() -> None:
    assert startup_seconds([], 7, 950) == 7
    assert startup_seconds([pod(None), pod(900, restarts=1)], 7, 950) == 7
    assert startup_seconds([pod(10), pod(20.2), pod(900), pod(0)], 7, 950) == 21
    assert startup_seconds([pod(0)], 7, 950) == 1


def test_a_probe_that_timed_out_for_a_moment_tells_nothing_of_a_start() -> None:
    assert startup_seconds([pod(100), pod(990), pod(995)], 7, 600) == 100
    assert startup_seconds([pod(990), pod(995)], 7, 600) == 7
    # One that waited for a Kubernetes node, or for its image, became ready soon after it ran.
    late = pod(990)
    server = replace(late.containers[0], running_since=ago(500))
    assert startup_seconds([replace(late, containers=[server])], 7, 600) == 990


def test_a_replacement_takes_longer_than_a_start() -> None:
    assert replacement_seconds(0, limit=3600, grace=60) == 3660
    assert replacement_seconds(100, limit=3600, grace=60) == 210
    assert replacement_seconds(3000, limit=3600, grace=0) == 3600
    assert replacement_seconds(5000, limit=3600, grace=0) == 5000  # it waited for a Kubernetes node, say
