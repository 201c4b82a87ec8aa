# SPDX-License-Identifier: Apache-2.0
"""The decode scheme of a pod that offers it: rounds, named nonces, verdicts, and what it refuses."""

import asyncio
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import chain, vector
from tests.support.servers.pod import ARTIFACT, ROUND, SLOT, Pod
from tests.wire.test_jobs import ended, submit
from tests.wire.test_requests import error_of
from vllm_poc.server import generation
from vllm_poc.server.app import PocMiddleware
from vllm_poc.server.callbacks import payloads
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.messages import API_PREFIX
from vllm_poc.wire.partition import NonceSlot

STEPS = 12
DECODES = {"DECODE_CODEBOOK": "/sphere_codebook.pt", "DECODE_RESERVE_BYTES": "100000"}
REBUILDS = {"DECODE_REBUILD_CODEBOOK": "1", "DECODE_RESERVE_BYTES": "100000"}
#: As the network's node sends it.
PARAMS: dict[str, Any] = {"model": "tiny", "seq_len": 64, "decode": True, "max_tokens": STEPS}
DECODE: dict[str, Any] = ROUND | {"params": PARAMS}
NONCES = list(range(100, 120))
ENCODING = {"dtype": "f16", "k_dim": 12, "endian": "le"}
#: What the pod's memory for chains and its largest batch hold at a time.
MOST = 16


@pytest.fixture
def pod_settings() -> dict[str, str]:
    return DECODES


@pytest.fixture
def clock() -> FakeClock:
    """What all of the pod goes by."""
    return FakeClock()


pytestmark = pytest.mark.usefixtures("clock")


def claims(changed: dict[int, list[int]] | None = None) -> dict[str, Any]:
    chains = {nonce: chain(nonce, STEPS) for nonce in NONCES} | (changed or {})
    artifacts = [{"nonce": nonce, "vector_b64": "", "k_points_steps": steps} for nonce, steps in chains.items()]
    return DECODE | {"nonces": NONCES, "validation": {"artifacts": artifacts}}


def forged(nonce: int) -> list[int]:
    """A chain whose step 3 is another one, so that the claims of steps 3 and 4 disagree."""
    steps = chain(nonce, STEPS)
    steps[3] = (steps[3] + 4) % 16
    return steps


async def generated(pod: Pod, clock: FakeClock, body: dict[str, Any]) -> Any:  # noqa: ANN401
    answer = await clock.passes(pod.post("generate", body | {"wait": True}))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found.pop("request_id")
    return found


async def test_a_pod_that_is_set_up_for_it_says_so(pod: Pod) -> None:
    told = (await pod.http.get(f"{API_PREFIX}/versions")).json()
    assert (told["schemes"], told["protocols"]) == (["prefill", "decode"], ["distance", "artifact", "decode"])
    assert told["rebuilt_codebook"] is False
    assert pod.engine.setups == [{"codebook": "/sphere_codebook.pt", "rebuild": False, "reserve_bytes": 100_000}]
    model = (await pod.status()).model
    assert model.findings[-1] == ("The decode scheme has memory for 12 chains of 256 tokens and 256 steps at a time.")
    assert not model.rebuilt_codebook


@pytest.mark.parametrize("why", ["failed", "did not answer", "no room"])
async def test_a_decode_scheme_that_cannot_be_prepared_holds_up_nothing_else_and_is_tried_again(
    pod: Pod, clock: FakeClock, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    faults = {"failed": RuntimeError("CUDA error"), "did not answer": TimeoutError(), "no room": None}
    pod.engine.setup_fault = faults[why]
    pod.engine.has_room = why != "no room"
    error = error_of(await pod.post("generate", DECODE | {"nonces": [1]}), 422, "SchemeNotOffered")
    assert "poc_prepare_decode " in error.detail
    pod.engine.has_room = True
    vectors = await generated(pod, clock, ARTIFACT | {"nonces": [1]})
    assert [artifact["nonce"] for artifact in vectors["artifacts"]] == [1]
    if why == "no room":
        pod.engine.setup_fault = RuntimeError("it is tried once more")
    for _ in range(2):
        clock.advance(61)
        await settle(100)
        pod.engine.setup_fault = None
    assert (await pod.http.get(f"{API_PREFIX}/versions")).json()["schemes"] == ["prefill", "decode"]
    assert len((await generated(pod, clock, DECODE | {"nonces": [1]}))["artifacts"]) == 1
    assert caplog.text.count("does not offer the decode scheme: ") == (2 if why == "no room" else 1)


async def test_a_round_delivers_each_chain_once_and_in_order(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.faults = [200, 500, 200, 503]
    assert (await pod.start(DECODE | SLOT | {"url": receiver.url, "round_id": "a"})).status_code == 200
    status = await pod.reach(lambda s: s.delivered_index > 5 * MOST)
    assert status.config is not None
    assert (status.config.protocol, status.config.scheme, status.config.max_tokens) == ("decode", "decode", STEPS)
    await pod.post("stop")
    status = await pod.status()
    assert (status.state, status.delivered_index) == (PowState.STOPPED, status.next_index)
    assert status.delivered_valid == status.total_checked == len(receiver.nonces)
    assert receiver.nonces == NonceSlot(**SLOT).nonces(0, status.next_index)
    payload = receiver.payloads[0]
    assert payload == ROUND | {"node_id": 1, "artifacts": payload["artifacts"], "encoding": ENCODING}
    found = [artifact for payload in receiver.payloads for artifact in payload["artifacts"]]
    assert found == [
        {"nonce": nonce, "vector_b64": "", "k_points_steps": chain(nonce, STEPS)} for nonce in receiver.nonces
    ]
    assert {len(call["nonces"]) for call in pod.engine.decode_calls} == {MOST}
    assert {(call["seq_len"], call["max_tokens"]) for call in pod.engine.decode_calls} == {(64, STEPS)}


@pytest.mark.parametrize(
    ("pod_settings", "delivered"),
    [(DECODES | {"DRAIN_SECONDS": "2"}, MOST), (DECODES | {"DRAIN_SECONDS": "1"}, 0)],
    ids=["time enough", "too little time"],
)
async def test_a_server_that_ends_delivers_the_batch_under_way_if_half_of_its_time_is_enough(
    pod: Pod, clock: FakeClock, receiver: CallbackReceiver, delivered: int
) -> None:
    pod.engine.seconds_per_batch = 0.0625  # one pass in each call
    await pod.start(DECODE | SLOT | {"url": receiver.url})
    while len(pod.engine.decode_calls) < 2:
        await clock.tick()
    middleware: Any = pod.app.middleware_stack
    while not isinstance(middleware, PocMiddleware):
        middleware = middleware.app
    await clock.passes(middleware._drain())
    assert len(receiver.nonces) == delivered
    assert len(pod.engine.decode_calls) == (STEPS + 1 if delivered else 3)


@pytest.mark.parametrize("pod_settings", [DECODES | {"SICK_NONCES": "4"}])
@pytest.mark.parametrize("sick", [1, 2], ids=["a tenth at most", "more"])
async def test_a_round_fails_by_the_share_of_chains_that_are_not_finite(
    pod: Pod, receiver: CallbackReceiver, sick: int
) -> None:
    nonces = NonceSlot(**SLOT).nonces(0, 10 * MOST)
    lost = {nonce for place, nonce in enumerate(nonces) if place % MOST < sick}
    pod.engine.sick.update(dict.fromkeys(lost, 9))
    await pod.start(DECODE | SLOT | {"url": receiver.url, "end_index": len(nonces)})
    if sick == 1:
        status = await pod.reach(lambda s: s.delivered_index == len(nonces))
        assert (status.state, status.rejected) == (PowState.GENERATING, len(lost))
        assert receiver.nonces == [nonce for nonce in nonces if nonce not in lost]
    else:
        status = await pod.reach(lambda s: s.state is PowState.FAILED)
        assert status.next_index == 2 * MOST
        assert "4 nonces came out NaN or infinite" in (status.error or "")


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 50), (8, 50), (32, 50), (None, 50), (33, 33), (40, 40), (64, 50)], ids=str
)
async def test_only_a_batch_size_beyond_the_usual_one_caps_a_batch(
    pod: Pod, clock: FakeClock, size: int | None, expected: int
) -> None:
    pod.engine.decode_facts |= {"max_batch_nonces": 50, "reserve_bytes": 10**6}
    body = DECODE | ({} if size is None else {"batch_size": size})
    await pod.start(body | SLOT | {"end_index": 100})
    await pod.reach(lambda s: s.next_index == 100)
    await pod.post("stop")
    await generated(pod, clock, body | {"nonces": list(range(100))})
    batches = [len(batch["nonces"]) for batch in pod.engine.decoded]
    assert batches == 2 * [*[expected] * (100 // expected), *([100 % expected] if 100 % expected else [])]


@pytest.mark.parametrize("mines", [True, False], ids=["a round", "named nonces"])
async def test_messages_of_many_chains_are_made_beside_others(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, mines: bool
) -> None:
    module, name = (generation, "callback") if mines else (payloads, "generated")
    make, threads = getattr(module, name), list[Thread]()

    def made(*args: Any, **fields: Any) -> Any:  # noqa: ANN401
        threads.append(current_thread())
        return make(*args, **fields)

    monkeypatch.setattr(module, name, made)
    body = DECODE | {"params": PARAMS | {"max_tokens": 256}}
    if mines:
        await pod.start(body | SLOT | {"url": receiver.url, "end_index": MOST})
        await pod.reach(lambda s: s.delivered_index == MOST)
    else:
        await generated(pod, clock, body | {"nonces": NONCES})
    assert threads
    assert main_thread() not in threads


async def test_a_round_resumes_at_the_first_undelivered_nonce(pod: Pod, receiver: CallbackReceiver) -> None:
    body = DECODE | SLOT | {"url": receiver.url, "round_id": "a"}
    await pod.start(body)
    await pod.reach(lambda s: s.next_index > MOST)
    await pod.post("stop")
    first = (await pod.status()).delivered_index
    await pod.start(body | {"start_index": first, "end_index": first + 20})
    status = await pod.reach(lambda s: s.delivered_index == first + 20)
    assert status.activity == "WaitingForExtension"
    await pod.post("extend", {"round_id": "a", "end_index": first + 23})
    await pod.reach(lambda s: s.delivered_index == first + 23)
    assert receiver.nonces == NonceSlot(**SLOT).nonces(0, first + 23)
    assert [len(batch["nonces"]) for batch in pod.engine.decoded[-3:]] == [MOST, 4, 3]


async def test_a_round_goes_on_after_other_weights(pod: Pod, clock: FakeClock) -> None:
    await pod.start(DECODE | SLOT)
    before = await pod.reach(lambda s: s.next_index > 0)
    pod.engine.seconds_per_batch = 0.05
    for command in ("/start_weight_update", "/finish_weight_update"):
        await clock.passes(pod.http.post(command))
    await pod.reach(lambda s: s.next_index > before.next_index + MOST)
    await pod.post("stop")
    assert len(pod.engine.setups) == 1 + pod.engine.forgotten > 1, "forgotten workers are set up again"
    assert pod.engine.computed == NonceSlot(**SLOT).nonces(0, len(pod.engine.computed))


async def test_chat_holds_a_round_back_between_steps(pod: Pod) -> None:
    pod.engine.seconds_per_batch = 0.05
    await pod.start(DECODE | SLOT)
    await pod.reach(lambda s: len(pod.engine.decode_calls) > 3)
    pod.engine.output_processor.busy = True
    held = await pod.reach(lambda s: s.activity == "HeldByChat")
    calls = len(pod.engine.decode_calls)
    later = await pod.reach(lambda s: s.held_back_seconds > held.held_back_seconds + 0.2)
    assert (len(pod.engine.decode_calls), later.next_index) == (calls, held.next_index)
    pod.engine.output_processor.busy = False
    await pod.reach(lambda s: s.next_index > held.next_index)


async def test_vectors_beside_a_round_of_chains_are_computed_between_its_steps(pod: Pod, clock: FakeClock) -> None:
    pod.engine.seconds_per_batch = 0.05
    await pod.start(DECODE | SLOT)
    await pod.reach(lambda s: len(pod.engine.decode_calls) > 3)
    found = await generated(pod, clock, ARTIFACT | {"nonces": [5], "beside_round": True})
    assert found["artifacts"] == [{"nonce": 5, "vector_b64": vector(5, 4)}]
    assert pod.engine.computed == [5], "the batch of chains goes on"
    await pod.reach(lambda s: s.next_index == MOST)
    assert len(pod.engine.decode_calls) >= STEPS + 1


@pytest.mark.parametrize("round_", [DECODE, ARTIFACT], ids=["chains", "vectors"])
async def test_a_round_that_starts_holds_up_chains_in_the_middle_of_their_batch(
    pod: Pod, clock: FakeClock, round_: dict[str, Any]
) -> None:
    pod.engine.seconds_per_batch = 0.05
    wanted = list(range(1, 6 * MOST, 6))  # of another slot
    asking = asyncio.create_task(pod.post("generate", DECODE | {"nonces": wanted, "wait": True}))
    while len(pod.engine.decode_calls) < 3:
        await clock.tick()
    await pod.start(round_ | SLOT | {"round_id": "a"})
    await pod.reach(lambda s: s.next_index > MOST)
    assert sum(call["nonces"] == wanted for call in pod.engine.decode_calls) <= 4
    await pod.post("stop", None)
    answer = await clock.passes(asking)
    assert [one["k_points_steps"] for one in answer.json()["artifacts"]] == [chain(one, STEPS) for one in wanted]


@pytest.mark.parametrize("pod_settings", [DECODES | {"REQUEST_SHARE": "0.25", "SHARE_WINDOW_SECONDS": "0.25"}])
async def test_chains_beside_a_round_take_no_more_than_their_share(pod: Pod, clock: FakeClock) -> None:
    pod.engine.seconds_per_batch = 0.05
    await pod.start(DECODE | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    wanted = list(range(1, 6 * 6 * MOST, 6))  # of another slot
    await generated(pod, clock, DECODE | {"nonces": wanted, "beside_round": True})
    mined = [batch["nonces"] for batch in pod.engine.decoded if not set(batch["nonces"]) & set(wanted)]
    assert len(mined) >= 3 * 5, "six batches for the request, and three for the round between two of them"


@pytest.mark.parametrize("pod_settings", [DECODES | {"SHARE_WINDOW_SECONDS": "0.25"}])
async def test_chains_owe_a_round_no_rest_for_the_time_before_it(pod: Pod, clock: FakeClock) -> None:
    pod.engine.seconds_per_batch = 0.05
    await generated(pod, clock, DECODE | {"nonces": list(range(1, 6 * MOST, 6))})
    await pod.start(ARTIFACT | SLOT)
    began = clock.now()
    await generated(pod, clock, ARTIFACT | {"nonces": [5], "beside_round": True})
    assert clock.now() - began < 0.3


@pytest.mark.parametrize("pod_settings", [DECODES | {"REQUEST_SHARE": "0.25", "SHARE_WINDOW_SECONDS": "0.25"}])
async def test_vectors_beside_a_round_do_not_wait_until_chains_have_rested(pod: Pod, clock: FakeClock) -> None:
    pod.engine.seconds_per_batch = 0.05
    await pod.start(DECODE | SLOT)
    await pod.reach(lambda s: s.next_index > 0)
    await generated(pod, clock, DECODE | {"nonces": [1, 7], "beside_round": True})
    began = clock.now()
    await generated(pod, clock, ARTIFACT | {"nonces": [5], "beside_round": True})
    assert clock.now() - began < 0.3
    await generated(pod, clock, DECODE | {"nonces": [13], "beside_round": True})
    assert clock.now() - began > 3 * 13 * 0.05, "chains have"


async def test_vectors_do_not_wait_for_the_batches_of_chains(pod: Pod, clock: FakeClock) -> None:
    pod.engine.seconds_per_batch = 0.05
    asking = asyncio.create_task(pod.post("generate", DECODE | {"nonces": [1, 7], "wait": True}))
    while not pod.engine.decode_calls:
        await clock.tick()
    await generated(pod, clock, ARTIFACT | {"nonces": [5]})
    assert pod.engine.computed == [5]
    assert (await clock.passes(asking)).status_code == 200


async def test_named_nonces_are_answered_with_their_chains(pod: Pod, clock: FakeClock) -> None:
    pod.engine.sick.update({103: 1, 104: 9})
    assert await generated(pod, clock, DECODE | {"nonces": NONCES}) == {
        "status": "completed",
        "not_computed": [103, 104],
        "artifacts": [
            {
                "nonce": nonce,
                "vector_b64": "",
                "k_points_steps": chain(nonce, STEPS),
                "n_sphere_mismatches": -1,
                "n_nan_steps": 0,
                "mismatch_margin_max": 0.0,
            }
            for nonce in NONCES
            if nonce not in {103, 104}
        ],
        "encoding": ENCODING,
    }


async def test_enforced_steps_are_repeated_and_compared(pod: Pod, clock: FakeClock) -> None:
    enforced = {"101": chain(101, STEPS), "102": forged(102)}
    found = await generated(pod, clock, DECODE | {"nonces": [102, 101], "enforced_k_steps": enforced})
    assert [artifact["n_sphere_mismatches"] for artifact in found["artifacts"]] == [2, 0]
    assert found["artifacts"][0]["mismatch_margin_max"] > found["artifacts"][1]["mismatch_margin_max"] == 0
    assert found["artifacts"][0]["k_points_steps"] == chain(102, STEPS, forged(102))


async def test_queued_chains_are_kept_and_delivered(pod: Pod, receiver: CallbackReceiver) -> None:
    job = await submit(pod, DECODE | {"nonces": NONCES, "url": receiver.url, "node_id": 3})
    found = await ended(pod, job, callback=True)
    assert (found["status"], found["callback"], len(found["artifacts"])) == ("completed", "delivered", len(NONCES))
    artifacts = [{"nonce": nonce, "vector_b64": "", "k_points_steps": chain(nonce, STEPS)} for nonce in NONCES]
    sent = {"node_id": 3, "request_id": job, "artifacts": artifacts, "encoding": ENCODING}
    assert receiver.payloads == [ROUND | sent]


async def test_honest_chains_pass(pod: Pod, clock: FakeClock) -> None:
    compared = {"n_sphere_mismatches": 0, "n_steps": STEPS + 1, "mismatch_margin_max": 0.0, "mismatch": False}
    assert await generated(pod, clock, claims()) == {
        "status": "completed",
        "not_computed": [],
        "n_total": len(NONCES),
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
        "n_excluded": 0,
        "excluded_nonces": [],
        "per_nonce": [{"nonce": nonce} | compared for nonce in NONCES],
    }
    assert {tuple(call["nonces"]) for call in pod.engine.decode_calls} == {tuple(NONCES[:MOST]), tuple(NONCES[MOST:])}


@pytest.mark.parametrize(
    ("stat_test", "mismatches", "fraud"),
    [
        (None, 2, True),
        ({"dist_threshold": 0.1}, 2, True),
        ({"dist_threshold": 0.2}, 0, False),
        ({"dist_threshold": 0.1, "p_mismatch": 0.1}, 2, False),
    ],
    ids=str,
)
async def test_the_verdict_goes_by_tau(
    pod: Pod, clock: FakeClock, stat_test: dict[str, float] | None, mismatches: int, fraud: bool
) -> None:
    body = claims({104: forged(104), 117: forged(117)}) | {"stat_test": stat_test}
    found = await generated(pod, clock, body)
    assert (found["n_mismatch"], found["fraud_detected"]) == (mismatches, fraud)
    assert found["mismatch_nonces"] == [104, 117][:mismatches]
    told = {one["nonce"]: one for one in found["per_nonce"]}
    assert told[104] == {
        "nonce": 104,
        "n_sphere_mismatches": 2,
        "n_steps": STEPS + 1,
        "mismatch_margin_max": told[104]["mismatch_margin_max"],
        "mismatch": bool(mismatches),
    }
    assert 0.1 < told[104]["mismatch_margin_max"] < 0.2


async def test_claims_of_another_length_or_of_no_index_are_judged(pod: Pod, clock: FakeClock) -> None:
    changed = {105: [*chain(105, STEPS)[:4], 200, *chain(105, STEPS)[5:]], 106: chain(106, STEPS)[:6]}
    found = await generated(pod, clock, claims(changed) | {"stat_test": {"dist_threshold": 0.4}})
    assert found["mismatch_nonces"] == [105]
    assert "looks like the default of vectors" in found["warning"]
    told = {one["nonce"]: one for one in found["per_nonce"]}
    assert (told[105]["mismatch_margin_max"], told[106]["n_steps"]) == (2.0, 6)


async def test_more_chains_than_a_body_may_have_other_lists_are_judged(pod: Pod, clock: FakeClock) -> None:
    pod.engine.decode_facts |= {"max_batch_nonces": 2_000, "reserve_bytes": 10**9}
    body, nonces = claims(), list(range(1_500))
    artifacts = [{"nonce": one, "vector_b64": "", "k_points_steps": chain(one, STEPS)} for one in nonces]
    artifacts[7]["k_points_steps"] = [*chain(7, STEPS)[:-1], 300]
    found = await generated(pod, clock, body | {"nonces": nonces, "validation": {"artifacts": artifacts}})
    assert (found["n_total"], found["mismatch_nonces"]) == (1_500, [7])
    enforced = {str(one): chain(one, STEPS) for one in nonces}
    found = await generated(pod, clock, DECODE | {"nonces": nonces, "enforced_k_steps": enforced})
    assert [artifact["n_sphere_mismatches"] for artifact in found["artifacts"]] == [0] * len(nonces)


@pytest.mark.parametrize("sick", [2, 3], ids=["few", "more than a tenth"])
async def test_chains_that_cannot_be_compared_leave_the_sample_or_there_is_no_verdict(
    pod: Pod, receiver: CallbackReceiver, sick: int
) -> None:
    pod.engine.sick.update(dict.fromkeys(NONCES[:sick], 9))
    job = await submit(pod, claims() | {"url": receiver.url})
    found = await ended(pod, job, callback=True)
    if sick == 2:
        assert (found["n_total"], found["n_excluded"], found["excluded_nonces"]) == (18, 2, NONCES[:2])
        assert [one["nonce"] for one in found["per_nonce"]] == NONCES[2:]
        (verdict,) = receiver.verdicts
        assert (verdict["request_id"], verdict["excluded_nonces"]) == (job, NONCES[:2])
        assert "per_nonce" not in verdict
    else:
        assert found["status"] == "failed"
        assert found["error"].startswith("validation aborted: 3 of 20 nonces could not be compared")
        assert receiver.verdicts == []


async def test_without_a_verdict_a_client_that_waits_gets_an_error(pod: Pod, clock: FakeClock) -> None:
    pod.engine.sick.update(dict.fromkeys(NONCES[:3], 9))
    error = error_of(await clock.passes(pod.post("generate", claims() | {"wait": True})), 503, "EngineFailed")
    assert error.detail.startswith("validation aborted: ")


@pytest.mark.parametrize("route", ["init/generate", "generate"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 1025}, "params.seq_len: 1025 exceeds the server's max_model_len of 1024"),
        ({"max_tokens": 961}, "params.max_tokens: 961 and seq_len exceed the server's max_model_len of 1024 together"),
        ({"max_tokens": 900}, "params.max_tokens: a chain of 964 tokens does not fit into the server's memory for"),
    ],
    ids=str,
)
async def test_chains_that_are_too_long_are_refused(pod: Pod, route: str, change: Any, message: str) -> None:  # noqa: ANN401
    pod.engine.decode_facts["reserve_bytes"] = 15_000
    body = DECODE | SLOT | {"params": PARAMS | change, "nonces": [1]}
    assert error_of(await pod.post(route, body), 422, "SequenceTooLong").detail.startswith(message)


@pytest.mark.parametrize("pod_settings", [REBUILDS])
async def test_every_answer_about_a_rebuilt_codebook_says_so(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock
) -> None:
    pod.engine.decode_facts["rebuilt"] = True
    assert (await pod.http.get(f"{API_PREFIX}/versions")).json()["rebuilt_codebook"] is True
    model = (await pod.status()).model
    assert model.rebuilt_codebook
    assert "for experiments alone" in model.findings[-1]
    answers = [await generated(pod, clock, body) for body in (DECODE | {"nonces": [1]}, claims())]
    queued = [DECODE | {"nonces": [1], "url": receiver.url}, claims() | {"url": receiver.url}]
    answers += [await ended(pod, await submit(pod, body), callback=True) for body in queued]
    await pod.start(DECODE | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.delivered_index > 0)
    assert len(receiver.payloads) > 1
    assert len(receiver.verdicts) == 1
    told = [*answers, *receiver.payloads, *receiver.verdicts]
    assert {one.get("rebuilt_codebook") for one in told} == {True}
    await pod.post("stop")
    vectors = await generated(pod, clock, ARTIFACT | {"nonces": [1]})
    assert "rebuilt_codebook" not in vectors, "vectors need no codebook"
