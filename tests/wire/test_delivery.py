# SPDX-License-Identifier: Apache-2.0
"""Callbacks: every valid nonce exactly once and in order, whatever the receiver does."""

import asyncio
from typing import Any

import pytest

from poc_gateway.settings import Settings as GatewaySettings
from tests.support.fakes.callback_receiver import CallbackReceiver, payload_nonces
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.engine import distance, vector
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from vllm_poc.server.callbacks.delivery import SEARCH_LIMIT
from vllm_poc.settings import Settings
from vllm_poc.wire.answers import PowState, StatusResponse
from vllm_poc.wire.callbacks import GATEWAY_HEADER
from vllm_poc.wire.partition import MAX_NONCE, NonceSlot

#: Seconds of a clock that stands still unless a test waits for the pod to get somewhere.
FLUSH_SECONDS, REFUSED_SECONDS = 0.5, 0.2
NEARLY_DONE = {"node_id": 0, "node_count": 1, "start_index": MAX_NONCE - 99}


@pytest.fixture
def clock() -> FakeClock:
    """What all of the pod goes by."""
    return FakeClock()


pytestmark = pytest.mark.usefixtures("clock")


def expected_nonces(body: dict[str, Any], status: StatusResponse) -> list[int]:
    nonces = NonceSlot(**SLOT).nonces(0, status.delivered_index)
    return [nonce for nonce in nonces if "params" in body or distance(nonce) < body["r_target"]]


@pytest.mark.parametrize("body", [ARTIFACT, DISTANCE], ids=["artifact", "distance"])
@pytest.mark.parametrize("faults", [[], [500, 503, 507], [200, 429, 200, 408, 425, 500, 302]], ids=str)
async def test_every_nonce_arrives_once_and_in_order(
    pod: Pod, receiver: CallbackReceiver, body: dict[str, Any], faults: list[int]
) -> None:
    receiver.faults = faults
    field = "url" if "params" in body else "callback_url"
    await pod.start(body | SLOT | {field: receiver.url})
    await pod.reach(lambda s: len(receiver.payloads) > 5 and s.delivered_index > 50)
    await pod.post("stop")
    status = await pod.status()
    assert status.delivered_index == status.next_index
    assert receiver.nonces == expected_nonces(body, status)
    assert status.delivered_valid == len(receiver.nonces)
    assert status.delivery_error is None


async def test_artifact_payload(pod: Pod, receiver: CallbackReceiver) -> None:
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url + "/"})
    await pod.reach(lambda s: bool(receiver.payloads))
    payload = receiver.payloads[0]
    assert payload["artifacts"][0] == {"nonce": 4, "vector_b64": vector(4, 4)}
    assert payload["encoding"] == {"dtype": "f16", "k_dim": 4, "endian": "le"}
    assert [payload[key] for key in ("public_key", "block_hash", "block_height", "node_id")] == [
        "node1",
        "abc123",
        7,
        1,
    ]


async def test_distance_payload(pod: Pod, receiver: CallbackReceiver) -> None:
    await pod.start(DISTANCE | SLOT | {"callback_url": receiver.url})
    await pod.reach(lambda s: bool(receiver.payloads))
    payload = receiver.payloads[0]
    assert payload["dist"] == [distance(nonce) for nonce in payload["nonces"]]
    assert max(payload["dist"]) < payload["r_target"] == 1.405
    assert payload["node_id"] == 1


async def test_slots_without_valid_nonces_still_count_as_delivered(pod: Pod, receiver: CallbackReceiver) -> None:
    await pod.start(DISTANCE | SLOT | {"r_target": 0.5, "callback_url": receiver.url})
    status = await pod.reach(lambda s: s.delivered_index > 50)
    assert receiver.attempts == 0
    assert (status.total_valid, status.delivered_valid) == (0, 0)


@pytest.mark.parametrize("positions", [{0}, {99}, {3, 4, 50}, set(range(90))], ids=["first", "last", "some", "most"])
async def test_one_bad_nonce_does_not_take_its_batch_with_it(
    pod: Pod, receiver: CallbackReceiver, positions: set[int]
) -> None:
    nonces = range(MAX_NONCE - 99, MAX_NONCE + 1)
    receiver.bad = {nonces[position] for position in positions}
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    # After SEARCH_LIMIT refusals in a row the rest of a batch is not searched.
    lost = set(nonces) - set(receiver.nonces)
    assert receiver.bad <= lost
    assert len(lost) == len(receiver.bad) or len(receiver.bad) > SEARCH_LIMIT
    assert receiver.nonces == sorted(set(nonces) - lost)
    assert status.rejected == status.delivered_rejected == len(lost)
    assert status.delivered_valid == len(receiver.nonces)
    assert status.delivered_index == status.next_index


@pytest.mark.parametrize("pod_settings", [{"PAYLOAD_RESULTS": "100", "CALLBACK_INTERVAL_SECONDS": "60"}])
@pytest.mark.parametrize(("answer", "most"), [(404, 20), (405, 4), (400, 2 * SEARCH_LIMIT + 20)])
async def test_a_receiver_that_refuses_everything_is_not_asked_about_every_nonce(
    pod: Pod, receiver: CallbackReceiver, answer: int, most: int
) -> None:
    receiver.answer = answer
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert status.rejected == status.delivered_rejected == 100
    assert status.delivered_valid == 0
    assert 1 <= receiver.attempts <= most
    assert f"HTTP {answer}" in (status.delivery_error or "")


@pytest.mark.parametrize("pod_settings", [{"REFUSED_SECONDS": "60"}])
@pytest.mark.parametrize("answer", [401, 403, 404])
async def test_what_is_refused_for_a_moment_is_delivered(pod: Pod, receiver: CallbackReceiver, answer: int) -> None:
    """As while a token or an ingress is changed."""
    receiver.faults = [answer] * 3
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert (status.rejected, status.delivered_valid, status.delivery_error) == (0, 100, None)
    assert receiver.nonces == list(range(MAX_NONCE - 99, MAX_NONCE + 1))


GATEWAYS_404 = {"reason": "RoundUnknown", "detail": "nothing is known of a PoCRound: deliver to a round that exists"}


async def test_the_gateways_404_is_waited_out_however_long_it_lasts(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock
) -> None:
    """As while it does not know the round yet, or its copy of what the API server has is old."""
    receiver.answer, receiver.body = 404, GATEWAYS_404
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: receiver.attempts > 40)
    assert clock.now() > REFUSED_SECONDS
    assert (status.state, status.delivered_rejected) == (PowState.GENERATING, 0)
    assert (status.delivery_error or "").endswith("HTTP 404 RoundUnknown")
    receiver.faults, receiver.body = [404], None
    receiver.answer = 200
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert (status.rejected, status.delivered_valid, status.delivery_error) == (0, 100, None)
    assert receiver.nonces == list(range(MAX_NONCE - 99, MAX_NONCE + 1))


@pytest.mark.parametrize("first", ["stored", "RoundUnknown"])
@pytest.mark.parametrize("answer", [401, 403, 404])
async def test_what_a_proxy_answers_for_the_gateway_is_waited_out(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock, answer: int, first: str
) -> None:
    """As while a service mesh or an ingress before it has lost its way to it."""
    receiver.headers = {GATEWAY_HEADER: "1"}
    if first == "RoundUnknown":
        receiver.answer, receiver.body = 404, GATEWAYS_404
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.delivered_index > 0 or s.delivery_error is not None)
    receiver.answer, receiver.body = answer, None
    attempts, since = receiver.attempts, clock.now()
    status = await pod.reach(lambda s: receiver.attempts > attempts + 40)
    assert clock.now() > since + REFUSED_SECONDS
    assert (status.state, status.delivered_rejected) == (PowState.GENERATING, 0)
    receiver.answer = 200
    status = await pod.reach(lambda s: s.delivered_index > status.delivered_index)
    assert status.delivered_rejected == 0


@pytest.mark.parametrize("answer", [401, 403, 404])
async def test_a_proxy_may_answer_before_the_gateway_ever_has(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock, answer: int
) -> None:
    """The address that the operator made for the gateway has its user name."""
    receiver.answer = answer
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url.replace("://", "://pod:credential@")})
    status = await pod.reach(lambda s: receiver.attempts > 40)
    assert clock.now() > REFUSED_SECONDS
    assert (status.state, status.delivered_rejected) == (PowState.GENERATING, 0)
    receiver.answer = 200
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert (status.rejected, status.delivered_valid, status.delivery_error) == (0, 100, None)
    assert receiver.nonces == list(range(MAX_NONCE - 99, MAX_NONCE + 1))


@pytest.mark.parametrize(
    "body", [None, [], {"reason": "NotFound"}, {"reason": ["RoundUnknown"]}, "RoundUnknown", {"x": "y" * 100_000}]
)
async def test_another_404_is_final_after_a_while(pod: Pod, receiver: CallbackReceiver, body: object) -> None:
    receiver.answer, receiver.body = 404, body
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert status.delivered_rejected == 100


@pytest.mark.parametrize("other", [503, 0], ids=["fails", "silence"])
async def test_a_receiver_that_is_away_has_not_refused_meanwhile(
    pod: Pod, receiver: CallbackReceiver, other: int
) -> None:
    """As when a receiver's ingress comes before it and goes behind it."""
    away = 12  # of at most 0.05 s each: longer than REFUSED_SECONDS
    receiver.faults = [404, *[other] * away, 404]
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert (status.rejected, status.delivered_valid) == (0, 100)
    assert receiver.nonces == list(range(MAX_NONCE - 99, MAX_NONCE + 1))


async def test_a_refusal_that_lasts_is_final_until_something_is_accepted(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 404
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    first = await pod.reach(lambda s: s.delivered_rejected > 0)
    attempts = receiver.attempts
    second = await pod.reach(lambda s: s.delivered_rejected > first.delivered_rejected)
    assert receiver.attempts <= attempts + 2, "what follows is refused at once"
    receiver.answer = 200
    await pod.reach(lambda s: s.delivered_valid > 0)
    receiver.faults = [404] * 3
    third = await pod.reach(lambda s: not receiver.faults)
    fourth = await pod.reach(lambda s: s.delivered_valid > third.delivered_valid)
    assert second.delivered_rejected <= third.delivered_rejected == fourth.delivered_rejected


async def test_the_round_is_not_over_before_everything_is_delivered(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.total_checked == 100 and receiver.attempts > 3)
    assert status.state is PowState.GENERATING
    assert status.delivered_index == NEARLY_DONE["start_index"]
    assert "HTTP 503" in (status.delivery_error or "")
    receiver.answer = 200
    await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert receiver.nonces == list(range(MAX_NONCE - 99, MAX_NONCE + 1))


@pytest.mark.parametrize("pod_settings", [{"PENDING_RESULTS": "64"}])
async def test_generation_waits_for_a_slow_receiver(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 500
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: receiver.attempts > 10)
    held = await pod.status()
    assert held.next_index <= 64 + 2 * pod.engine.facts["max_batch_nonces"]
    receiver.answer = 200
    await pod.reach(lambda s: s.delivered_index > held.next_index)
    await pod.post("stop")
    assert receiver.nonces == expected_nonces(ARTIFACT, await pod.status())


#: An artifact of the tests has 4 numbers, which are 12 characters of base64: 64 of them are the limit.
@pytest.mark.parametrize(
    "pod_settings", [{"PENDING_BYTES": "768", "CALLBACK_INTERVAL_SECONDS": "1000"}], ids=["in bytes"]
)
async def test_generation_waits_for_a_slow_receiver_by_the_length_of_results(
    pod: Pod, receiver: CallbackReceiver
) -> None:
    """However few results it takes, what is full is sent without a pause."""
    receiver.answer = 500
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: receiver.attempts > 10)
    held = await pod.status()
    assert 64 <= held.next_index <= 64 + 2 * pod.engine.facts["max_batch_nonces"]
    receiver.answer = 200
    await pod.reach(lambda s: s.delivered_index > 3 * held.next_index)
    await pod.post("stop")
    assert receiver.nonces == expected_nonces(ARTIFACT, await pod.status())


@pytest.mark.parametrize("pod_settings", [{"PENDING_RESULTS": "64", "FLUSH_SECONDS": "1000"}], ids=["patient"])
async def test_a_stop_while_the_receiver_holds_poc_up_loses_nothing(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock
) -> None:
    receiver.answer = 500
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    held = await pod.reach(lambda s: s.next_index >= 64)
    attempts = receiver.attempts
    status = await pod.reach(lambda s: receiver.attempts > attempts + 2)
    assert status.next_index <= held.next_index + pod.engine.facts["max_batch_nonces"]
    stopping = asyncio.create_task(pod.post("stop"))
    await pod.reach(lambda s: receiver.attempts > attempts + 5)
    assert not stopping.done()
    receiver.answer = 200
    assert (await clock.passes(stopping)).status_code == 200
    status = await pod.status()
    assert status.delivered_index == status.next_index == status.total_checked
    assert receiver.nonces == expected_nonces(ARTIFACT, status)
    assert len(receiver.nonces) == status.next_index


@pytest.mark.parametrize("pod_settings", [{"PAYLOAD_RESULTS": "40"}])
async def test_payloads_are_bounded(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.faults = [500] * 5
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: len(receiver.payloads) > 8)
    sizes = [len(payload_nonces(payload)) for payload in receiver.payloads]
    assert max(sizes) <= 40


@pytest.mark.parametrize("pod_settings", [{"CALLBACK_INTERVAL_SECONDS": "60"}], ids=["at once"])
async def test_payloads_of_long_results_stay_within_what_the_gateway_takes(
    pod: Pod, receiver: CallbackReceiver
) -> None:
    limit = GatewaySettings.model_fields["body_bytes"].default
    pod.engine.facts["hidden_size"] = 8_192
    receiver.most_bytes = limit
    body = {"params": {"model": "tiny", "seq_len": 64, "k_dim": 8_192}, "start_index": MAX_NONCE - 899}
    await pod.start(ARTIFACT | NEARLY_DONE | body | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED, seconds=60)
    assert (status.rejected, status.delivered_valid) == (0, 900)
    assert receiver.nonces == list(range(MAX_NONCE - 899, MAX_NONCE + 1))
    assert sum(receiver.sizes) > limit
    assert max(receiver.sizes) <= Settings.model_fields["payload_bytes"].default < limit


@pytest.mark.parametrize("pod_settings", [{"PAYLOAD_BYTES": "1024", "CALLBACK_INTERVAL_SECONDS": "60"}], ids=["1 KiB"])
@pytest.mark.parametrize("body", [ARTIFACT, DISTANCE], ids=["artifact", "distance"])
async def test_payloads_are_bounded_in_bytes(pod: Pod, receiver: CallbackReceiver, body: dict[str, Any]) -> None:
    field = "url" if "params" in body else "callback_url"
    await pod.start(body | NEARLY_DONE | {field: receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert max(receiver.sizes) <= 1024
    assert status.delivered_valid == len(set(receiver.nonces)) == len(receiver.nonces) > 0
    assert status.rejected == 0


@pytest.mark.parametrize("pod_settings", [{"PAYLOAD_BYTES": "1024"}], ids=["1 KiB"])
async def test_a_result_that_is_longer_alone_is_posted_alone(pod: Pod, receiver: CallbackReceiver) -> None:
    pod.engine.facts["hidden_size"] = 1_024
    body = {"params": {"model": "tiny", "seq_len": 64, "k_dim": 1_024}, "start_index": MAX_NONCE - 9}
    await pod.start(ARTIFACT | NEARLY_DONE | body | {"url": receiver.url})
    await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert [len(payload_nonces(payload)) for payload in receiver.payloads] == [1] * 10


@pytest.mark.parametrize(
    "pod_settings", [{"CALLBACK_INTERVAL_SECONDS": "60", "PAYLOAD_RESULTS": "40"}], ids=["at once"]
)
async def test_what_a_receiver_finds_too_large_makes_the_next_payloads_smaller(
    pod: Pod, receiver: CallbackReceiver
) -> None:
    receiver.most_bytes = 1_000
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.STOPPED)
    assert (status.rejected, status.delivered_valid) == (0, 100)
    assert receiver.nonces == list(range(MAX_NONCE - 99, MAX_NONCE + 1))
    too_large = [size for size in receiver.sizes if size > receiver.most_bytes]
    assert len(too_large) <= 2, "and only the first ones are too large"


async def test_stop_is_bounded_while_the_receiver_is_down(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock
) -> None:
    receiver.answer = 500
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.next_index > 0 and receiver.attempts > 0)
    started = clock.now()
    answer = await clock.passes(pod.post("stop"))
    assert FLUSH_SECONDS <= clock.now() - started < FLUSH_SECONDS + 1
    assert answer.json()["pow_status"]["delivered_index"] == 0
    status = await pod.status()
    assert (status.state, status.delivered_index, status.delivered_valid) == (PowState.STOPPED, 0, 0)
    assert status.next_index > 0


@pytest.mark.parametrize("pod_settings", [{"CALLBACK_SECONDS": "0.5"}], ids=["half a second"])
async def test_a_receiver_that_hangs_is_given_up_and_tried_again(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.delay = 60
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.delivery_error is not None)
    receiver.delay = 0
    await pod.reach(lambda s: s.delivered_index > 0)


async def test_nobody_listening_is_an_error_in_the_status(pod: Pod) -> None:
    await pod.start(ARTIFACT | SLOT | {"url": "http://127.0.0.1:9/callback"})
    status = await pod.reach(lambda s: s.delivery_error is not None)
    assert status.delivery_error is not None
    assert status.delivery_error.startswith("http://127.0.0.1:9/callback/generated: ")
    assert status.state is PowState.GENERATING


async def test_what_was_computed_before_a_failure_is_delivered(pod: Pod, receiver: CallbackReceiver) -> None:
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.next_index > 0)
    pod.engine.fault = RuntimeError("gone")
    status = await pod.reach(lambda s: s.state is PowState.FAILED and s.delivered_index == s.next_index)
    assert receiver.nonces == expected_nonces(ARTIFACT, status)


async def test_a_defect_in_the_sender_fails_the_round(
    pod: Pod, receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no payload")

    monkeypatch.setattr("vllm_poc.server.generation.callback", broken)
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    status = await pod.reach(lambda s: s.state is PowState.FAILED)
    assert status.error == "no payload"
    assert (await pod.post("stop")).status_code == 200


#: What comes after a round has failed, with the round that runs then, if any.
AFTERWARDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "start": ("init/generate", DISTANCE | SLOT | {"round_id": "b"}),
    "start of the same": ("init/generate", DISTANCE | SLOT | {"round_id": "a", "start_index": 10_000}),
    "init": ("init", DISTANCE | SLOT),
    "init/validate": ("init/validate", DISTANCE | SLOT),
    "phase/generate": ("phase/generate", None),
    "phase/validate": ("phase/validate", None),
    "stop": ("stop", None),
}


@pytest.mark.parametrize("pod_settings", [{"FLUSH_SECONDS": "1000"}], ids=["patient"])
@pytest.mark.parametrize("name", AFTERWARDS)
async def test_a_round_that_failed_delivers_on_whatever_comes_next(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock, name: str
) -> None:
    """And holds up no round that comes next, unless that goes on where it had got to."""
    receiver.answer = 503
    await pod.start(DISTANCE | SLOT | {"round_id": "a", "callback_url": receiver.url})
    await pod.reach(lambda s: s.total_valid > 50 and s.delivery_error is not None)
    pod.engine.fault = RuntimeError("gone")
    failed = await pod.reach(lambda s: s.state is PowState.FAILED)
    pod.engine.fault = None
    route, body = AFTERWARDS[name]
    next_call = asyncio.create_task(pod.post(route, body))
    if route.startswith("init"):
        assert (await next_call).status_code == 200
        await pod.reach(lambda s: s.state is not PowState.GENERATING or s.total_checked > 0)
    if name == "start":
        await clock.passes(pod.post("stop"))
        await pod.start(DISTANCE | SLOT | {"round_id": "c"})
    attempts = receiver.attempts
    await pod.reach(lambda _: receiver.attempts > attempts + 2)
    assert receiver.nonces == []
    receiver.answer = 200
    assert (await clock.passes(next_call)).status_code == 200
    wanted = NonceSlot(**SLOT).nonces(0, failed.next_index)
    valid = [nonce for nonce in wanted if distance(nonce) < DISTANCE["r_target"]]
    await pod.reach(lambda _: len(receiver.nonces) >= len(valid))
    assert receiver.nonces[: len(valid)] == valid


@pytest.mark.parametrize("pod_settings", [{"FLUSH_SECONDS": "1000"}], ids=["patient"])
async def test_rounds_that_fail_one_after_the_other_do_not_pile_up(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock
) -> None:
    receiver.answer = 503
    starts = []
    for name in ("a", "b", "c"):
        pod.engine.fault = None
        body = ARTIFACT | SLOT | {"round_id": name, "public_key": name, "url": receiver.url}
        starts.append(asyncio.create_task(pod.start(body)))
        if name == "c":
            break
        await pod.reach(lambda s, name=name: s.round_id == name and s.delivery_error is not None)  # type: ignore[misc]
        pod.engine.fault = RuntimeError("gone")
        await pod.reach(lambda s: s.state is PowState.FAILED)
    attempts = receiver.attempts
    await pod.reach(lambda _: receiver.attempts > attempts + 4)
    assert not starts[-1].done(), "two rounds deliver already"
    receiver.answer = 200
    await clock.passes(starts[-1])
    await pod.reach(lambda _: {payload["public_key"] for payload in receiver.payloads} == {"a", "b", "c"})
