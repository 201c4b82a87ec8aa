# SPDX-License-Identifier: Apache-2.0
"""A round with a lease stops, and delivers what is left, when its owner does not renew it any more."""

from typing import Any

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.clock import FakeClock, settle
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from vllm_poc.wire.answers import PowState, StatusResponse
from vllm_poc.wire.messages import API_PREFIX
from vllm_poc.wire.partition import MAX_NONCE

LEASED = ARTIFACT | SLOT | {"round_id": "r1", "lease_seconds": 60}


async def asked(pod: Pod, **query: str) -> StatusResponse:
    answer = await pod.http.get(f"{API_PREFIX}/status", params=query)
    return StatusResponse.model_validate(answer.json())


def stopped(status: StatusResponse) -> bool:
    return status.state is PowState.STOPPED


@pytest.mark.parametrize("pod_settings", [{"FLUSH_SECONDS": "10"}], ids=["patient"])
@pytest.mark.parametrize("body", [ARTIFACT, DISTANCE], ids=["artifact", "distance"])
async def test_the_round_stops_and_delivers_when_its_lease_runs_out(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock, body: dict[str, Any]
) -> None:
    field = "url" if "params" in body else "callback_url"
    await pod.start(LEASED | {"params": None} | body | {field: receiver.url})
    await pod.reach(lambda s: s.next_index > 50)
    clock.advance(60)
    status = await pod.reach(stopped)
    assert (status.stop_reason, status.stop_message) == (
        "LeaseExpired",
        "the lease of 60 s ran out: nobody renewed it",
    )
    assert status.delivered_index == status.next_index > 50
    assert status.delivered_valid == len(receiver.nonces) > 0
    assert (status.lease_seconds, status.lease_remaining_seconds) == (None, None)
    await pod.reach(lambda _: not pod.engine.in_flight)
    computed = len(pod.engine.computed)
    await settle()
    assert len(pod.engine.computed) == computed


async def test_status_tells_how_long_the_lease_lasts(pod: Pod, clock: FakeClock) -> None:
    await pod.start(LEASED)
    clock.advance(20)
    status = await asked(pod)
    assert (status.lease_seconds, status.lease_remaining_seconds) == (60, 40)


@pytest.mark.parametrize(
    ("query", "remaining"),
    [
        pytest.param({}, 1, id="a person's look"),
        pytest.param({"lists": "false"}, 1, id="a poll of another client"),
        pytest.param({"renew_lease": "r2"}, 1, id="the owner of another round"),
        pytest.param({"renew_lease": "r1"}, 60, id="the owner"),
    ],
)
async def test_only_the_owner_renews_the_lease(
    pod: Pod, clock: FakeClock, query: dict[str, str], remaining: float
) -> None:
    await pod.start(LEASED)
    clock.advance(59)
    assert (await asked(pod, **query)).lease_remaining_seconds == remaining
    clock.advance(1)
    await settle()
    if remaining == 1:
        await pod.reach(stopped)
    else:
        assert (await asked(pod)).state is PowState.GENERATING


@pytest.mark.parametrize("before", [60, 600, None])
async def test_a_renewal_may_say_for_how_long(pod: Pod, clock: FakeClock, before: int | None) -> None:
    """As an operator whose setting has changed, or that adopts a round of one that knew no leases."""
    await pod.start(LEASED | {"lease_seconds": before})
    status = await asked(pod, renew_lease="r1", lease_seconds="120")
    assert (status.lease_seconds, status.lease_remaining_seconds) == (120, 120)
    clock.advance(119)
    assert (await asked(pod, renew_lease="r1")).lease_remaining_seconds == 120
    clock.advance(119)
    await settle()
    assert (await asked(pod)).state is PowState.GENERATING
    clock.advance(1)
    await pod.reach(stopped)


async def test_a_lease_that_is_renewed_in_time_never_runs_out(pod: Pod, clock: FakeClock) -> None:
    await pod.start(LEASED)
    for _ in range(10):
        clock.advance(59)
        await settle()
        assert (await asked(pod, renew_lease="r1")).state is PowState.GENERATING
    clock.advance(60)
    await pod.reach(stopped)


@pytest.mark.parametrize(("seconds", "left"), [(60, 60), (300, 300), (None, None)])
async def test_a_repeated_start_brings_a_new_lease(
    pod: Pod, clock: FakeClock, seconds: int | None, left: float | None
) -> None:
    """Whoever repeats it without a lease, as after a downgrade, renews none."""
    await pod.start(LEASED)
    clock.advance(59)
    assert (await pod.start(LEASED | {"lease_seconds": seconds})).status_code == 200
    assert (await asked(pod)).lease_remaining_seconds == left
    clock.advance(59)
    await settle()
    assert (await asked(pod)).state is PowState.GENERATING


async def test_a_round_without_a_lease_runs_however_long_nobody_asks(pod: Pod, clock: FakeClock) -> None:
    await pod.start(ARTIFACT | SLOT | {"round_id": "r1"})
    clock.advance(10**6)
    await settle()
    status = await asked(pod, renew_lease="r1")
    assert (status.state, status.lease_seconds, status.lease_remaining_seconds) == (PowState.GENERATING, None, None)


async def test_a_stopped_round_has_no_lease_and_its_end_stays_told(pod: Pod, clock: FakeClock) -> None:
    await pod.start(LEASED)
    await pod.post("stop")
    clock.advance(60)
    await settle()
    status = await asked(pod, renew_lease="r1")
    assert (status.stop_reason, status.stop_message, status.lease_remaining_seconds) == (
        "Requested",
        "stopped on request",
        None,
    )


async def test_the_lease_of_a_round_does_not_stop_the_next_one(pod: Pod, clock: FakeClock) -> None:
    await pod.start(LEASED)
    await pod.post("stop")
    await pod.start(LEASED | {"round_id": "r2", "lease_seconds": 90})
    clock.advance(60)
    await settle()
    assert (await asked(pod)).lease_remaining_seconds == 30


async def test_a_distance_round_that_goes_on_after_validating_has_its_lease_again(pod: Pod, clock: FakeClock) -> None:
    await pod.start(DISTANCE | SLOT | {"round_id": "r1", "lease_seconds": 60})
    await pod.reach(lambda s: s.total_checked > 0)
    await pod.post("phase/validate")
    clock.advance(60)
    await settle()
    assert (await asked(pod)).state is PowState.VALIDATING
    await pod.post("phase/generate")
    assert (await asked(pod)).lease_remaining_seconds == 60


async def test_a_round_that_stops_for_another_says_for_which(pod: Pod) -> None:
    await pod.start(LEASED)
    assert (await pod.post("stop?round_id=r2&preempted_by=ns/first")).status_code == 409
    assert (await pod.post("stop?round_id=r1&preempted_by=ns/first")).status_code == 200
    status = await asked(pod)
    assert (status.stop_reason, status.stop_message) == (
        "Preempted",
        "the pod is for round ns/first, which goes first",
    )


async def test_a_slot_at_its_end_says_so(pod: Pod) -> None:
    await pod.start(
        LEASED | {"node_id": 0, "node_count": 1, "group_id": 0, "n_groups": 1, "start_index": MAX_NONCE - 9}
    )
    assert (await pod.reach(stopped)).stop_reason == "SlotDone"


@pytest.mark.parametrize("seconds", [0, -1, 604_801, "soon"])
async def test_a_lease_has_bounds(pod: Pod, seconds: int | str) -> None:
    start = await pod.start(LEASED | {"lease_seconds": seconds})
    renewal = await pod.http.get(f"{API_PREFIX}/status", params={"renew_lease": "r1", "lease_seconds": seconds})
    for answer in (start, renewal):
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "lease_seconds"
