# SPDX-License-Identifier: Apache-2.0
"""Queued work: its states, results, limits and callbacks."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.checks.metrics import parse_pod
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import distance, vector
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_delivery import NEARLY_DONE
from tests.wire.test_requests import error_of
from vllm_poc.server.jobs import result_bytes
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import API_PREFIX

#: How often something is looked for that a test waits for.
LOOKS = 2_000
JOB: dict[str, Any] = ARTIFACT | {"nonces": list(range(40))}
WRONG: dict[str, Any] = {"validation": {"artifacts": [{"nonce": nonce, "vector_b64": ""} for nonce in range(40)]}}


@pytest.fixture
def clock() -> FakeClock:
    """What all of the pod goes by."""
    return FakeClock()


pytestmark = pytest.mark.usefixtures("clock")


async def submit(pod: Pod, body: dict[str, Any]) -> str:
    answer = await pod.post("generate", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "queued"
    return str(answer.json()["request_id"])


async def look(pod: Pod, job: str) -> dict[str, Any]:
    found: dict[str, Any] = (await pod.http.get(f"{API_PREFIX}/generate/{job}")).json()
    return found


async def ended(pod: Pod, job: str, *, callback: bool = False) -> dict[str, Any]:
    for _ in range(LOOKS):
        found = await look(pod, job)
        if found["status"] not in ("queued", "running") and not (callback and found.get("callback") == "pending"):
            return found
        await pod.pause()
    raise AssertionError(found)


async def until_queued(pod: Pod, nonces: int) -> None:
    for _ in range(LOOKS):
        if parse_pod((await pod.http.get("/metrics/")).text, "tiny")["poc_queued_nonces"] == nonces:
            return
        await pod.pause()
    raise AssertionError(f"{nonces} nonces are not queued")


def batches(pod: Pod, protocol: str) -> int:
    return [batch["protocol"] for batch in pod.engine.batches].count(protocol)


async def test_a_job_ends_with_its_result(pod: Pod) -> None:
    job = await submit(pod, JOB)
    found = await ended(pod, job)
    assert (found["status"], found["request_id"]) == ("completed", job)
    assert found["artifacts"] == [{"nonce": nonce, "vector_b64": vector(nonce, 4)} for nonce in range(40)]
    assert found["encoding"] == {"dtype": "f16", "k_dim": 4, "endian": "le"}
    assert "callback" not in found


async def test_jobs_run_in_the_order_of_their_arrival(pod: Pod) -> None:
    jobs = [await submit(pod, JOB | {"nonces": [first, first + 1]}) for first in (10, 0, 20)]
    assert [(await ended(pod, job))["status"] for job in jobs] == ["completed"] * 3
    assert pod.engine.computed == [10, 11, 0, 1, 20, 21]


async def test_a_request_beside_the_round_is_answered_while_it_runs(pod: Pod, clock: FakeClock) -> None:
    await pod.start(ARTIFACT | SLOT)
    answer = await clock.passes(pod.post("generate", JOB | {"wait": True, "beside_round": True}))
    assert [item["nonce"] for item in answer.json()["artifacts"]] == JOB["nonces"]
    assert (await pod.status()).state is PowState.GENERATING


async def test_queued_work_cannot_run_beside_the_round(pod: Pod) -> None:
    answer = await pod.post("generate", JOB | {"beside_round": True})
    assert answer.status_code == 422
    assert "beside_round needs wait" in str(answer.json())


async def test_jobs_wait_for_the_round(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    job = await submit(pod, JOB)
    await pod.reach(lambda s: s.total_checked > 100)
    assert (await look(pod, job)) == {"status": "queued", "request_id": job}
    assert {batch["protocol"] for batch in pod.engine.batches} == {"distance"}
    assert (await pod.post("stop?round_id=other")).status_code == 409
    assert (await look(pod, job))["status"] == "queued"


async def test_a_round_that_ends_lets_jobs_run_and_one_that_starts_holds_them(pod: Pod) -> None:
    body = DISTANCE | SLOT | {"round_id": "r1"}
    await pod.start(body)
    job = await submit(pod, JOB | {"nonces": list(range(320))})
    await pod.post("stop?round_id=r1")
    await pod.reach(lambda s: batches(pod, "artifact") > 2)
    assert (await look(pod, job))["status"] == "running"
    await pod.start(body)
    began = batches(pod, "distance")
    await pod.reach(lambda s: batches(pod, "distance") > began)
    held = batches(pod, "artifact")
    await pod.reach(lambda s: batches(pod, "distance") > began + 20)
    assert batches(pod, "artifact") == held
    await pod.post("stop?round_id=r1")
    assert len((await ended(pod, job))["artifacts"]) == 320


async def test_jobs_do_not_wait_for_the_rounds_receiver(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    await pod.start(ARTIFACT | NEARLY_DONE | {"url": receiver.url})
    assert (await ended(pod, await submit(pod, JOB)))["status"] == "completed"
    assert (await pod.status()).state is PowState.GENERATING


async def test_stop_cancels_what_waits_and_runs_and_keeps_results(pod: Pod) -> None:
    done = await submit(pod, JOB)
    await ended(pod, done)
    jobs = [await submit(pod, JOB) for _ in range(3)]
    await settle()
    assert (await look(pod, jobs[0]))["status"] == "running"
    await pod.post("stop")
    for job in jobs:
        assert await look(pod, job) == {"status": "cancelled", "request_id": job, "error": "cancelled by stop"}
    assert (await look(pod, done))["status"] == "completed"
    assert (await ended(pod, await submit(pod, JOB)))["status"] == "completed"


async def test_stop_lets_no_job_start_when_the_round_ends(
    pod: Pod, receiver: CallbackReceiver, clock: FakeClock
) -> None:
    receiver.answer = 503
    await pod.start(DISTANCE | SLOT | {"callback_url": receiver.url})
    job = await submit(pod, JOB)
    await pod.reach(lambda s: receiver.attempts > 0)
    await clock.passes(pod.post("stop"))
    assert (await look(pod, job))["status"] == "cancelled"
    assert {batch["protocol"] for batch in pod.engine.batches} == {"distance"}


async def test_a_failing_engine_fails_its_job_alone(pod: Pod) -> None:
    await pod.status()
    pod.engine.fault = RuntimeError("CUDA error")
    job = await submit(pod, JOB)
    found = await ended(pod, job)
    assert found == {"status": "failed", "request_id": job, "error": "poc_compute failed: CUDA error"}
    pod.engine.fault = None
    assert (await ended(pod, await submit(pod, JOB)))["status"] == "completed"


async def test_a_defect_fails_its_job(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("no result")

    monkeypatch.setattr("vllm_poc.server.callbacks.payloads.generated", broken)
    assert (await ended(pod, await submit(pod, JOB)))["error"] == "TypeError: no result"


async def test_results_expire_by_themselves(pod: Pod, clock: FakeClock) -> None:
    job = await submit(pod, JOB)
    await ended(pod, job)
    clock.advance(299)
    assert (await look(pod, job))["status"] == "completed"
    clock.advance(1)
    answer = await pod.http.get(f"{API_PREFIX}/generate/{job}")
    assert "kept for 300 s" in error_of(answer, 404, "JobNotFound").detail


#: What three jobs of 40 vectors of 4 numbers take.
THREE_JOBS = {"RESULT_BYTES": str(3 * (2_048 + 40 * (400 + 12)))}


@pytest.mark.parametrize("pod_settings", [THREE_JOBS])
async def test_results_that_nobody_has_fetched_are_kept_and_bounded(pod: Pod, clock: FakeClock) -> None:
    jobs = [await submit(pod, JOB) for _ in range(3)]
    error_of(await pod.post("generate", JOB), 429, "QueueFull")
    await pod.reach(lambda _: len(pod.engine.computed) == 120)
    answer = await pod.post("generate", JOB)
    assert "bytes of results are kept or to be computed" in error_of(answer, 429, "QueueFull").detail
    assert int(answer.headers["Retry-After"]) > 0
    assert (await clock.passes(pod.post("generate", JOB | {"wait": True}))).status_code == 200
    assert (await ended(pod, jobs[1]))["status"] == "completed"
    another = await submit(pod, JOB)
    error_of(await pod.http.get(f"{API_PREFIX}/generate/{jobs[1]}"), 404, "JobNotFound")
    for job in (jobs[0], jobs[2], another):
        assert (await ended(pod, job))["status"] == "completed"
    clock.advance(300)
    for job in (await submit(pod, JOB), await submit(pod, JOB), await submit(pod, JOB)):
        assert (await ended(pod, job))["status"] == "completed"


@pytest.mark.parametrize(
    ("pod_settings", "nonces", "why"),
    [
        (THREE_JOBS, 86, "bytes of results are kept or to be computed"),
        (THREE_JOBS | {"QUEUED_NONCES": "80"}, 81, "81 nonces would be queued"),
    ],
    ids=["more room than the answered ones have", "more nonces than may wait"],
)
async def test_a_request_that_is_refused_leaves_results_alone(pod: Pod, nonces: int, why: str) -> None:
    jobs = [await submit(pod, JOB) for _ in range(2)]
    for job in jobs:
        await ended(pod, job)  # which fetches it
    kept = await submit(pod, JOB)
    await pod.reach(lambda _: len(pod.engine.computed) == 120)
    error = error_of(await pod.post("generate", JOB | {"nonces": list(range(nonces))}), 429, "QueueFull")
    assert why in error.detail
    for job in (*jobs, kept):
        assert (await look(pod, job))["status"] == "completed"


@pytest.mark.parametrize("pod_settings", [THREE_JOBS])
async def test_what_was_delivered_or_has_no_result_makes_room(pod: Pod, receiver: CallbackReceiver) -> None:
    delivered = await submit(pod, JOB | {"url": receiver.url})
    await pod.reach(lambda s: len(receiver.nonces) == 40 and s.callbacks_pending == 0)
    await pod.start(DISTANCE | SLOT)
    for _ in range(2):
        await submit(pod, JOB)
    await pod.post("stop")
    for _ in range(2):
        await submit(pod, JOB)
    error_of(await pod.http.get(f"{API_PREFIX}/generate/{delivered}"), 404, "JobNotFound")


@pytest.mark.parametrize("pod_settings", [{"RESULT_BYTES": "1"}])
async def test_a_single_result_may_be_larger_than_the_limit(pod: Pod) -> None:
    first = await submit(pod, JOB)
    error_of(await pod.post("generate", JOB), 429, "QueueFull")
    assert (await ended(pod, first))["status"] == "completed"
    second = await submit(pod, JOB)
    error_of(await pod.http.get(f"{API_PREFIX}/generate/{first}"), 404, "JobNotFound")
    assert (await ended(pod, second))["status"] == "completed"


@pytest.mark.parametrize("protocol", ["artifact", "distance", "decode", "validation"])
def test_results_are_about_as_large_as_they_are_taken_to_be(protocol: str) -> None:
    nonces = list(range(1_000))
    bodies: dict[str, dict[str, Any]] = {
        "artifact": ARTIFACT | {"params": ARTIFACT["params"] | {"k_dim": 5_120}},
        "distance": DISTANCE,
        "decode": ARTIFACT | {"params": ARTIFACT["params"] | {"decode": True, "max_tokens": 256}},
        "validation": JOB | {"validation": {"artifacts": [{"nonce": n, "vector_b64": ""} for n in nonces]}},
    }
    least = {"artifact": 5_120 * 2 * 4 / 3, "distance": 64, "decode": 8 * 256, "validation": 8}[protocol]
    found = result_bytes(GenerateRequest.model_validate(bodies[protocol] | {"nonces": nonces}))
    assert least * 1_000 <= found <= 2.5 * least * 1_000 + 500_000


async def test_an_unknown_job_is_not_found(pod: Pod) -> None:
    error_of(await pod.http.get(f"{API_PREFIX}/generate/nothing"), 404, "JobNotFound")


@pytest.mark.parametrize("pod_settings", [{"QUEUED_NONCES": "100"}])
async def test_the_queue_is_bounded(pod: Pod) -> None:
    counts = [(await pod.post("generate", JOB)).json()["queued_count"] for _ in range(2)]
    assert counts == [40, 80]
    error = error_of(await pod.post("generate", JOB), 429, "QueueFull")
    assert error.detail.startswith("Queue full: 120 nonces would be queued, and 100 may")
    assert (await pod.post("generate", JOB | {"nonces": list(range(20))})).json()["queued_count"] == 100
    await pod.post("stop")
    assert (await pod.post("generate", JOB)).json()["queued_count"] == 40


PROOFS = {"public_key": "p", "block_hash": "h", "block_height": 1, "nonces": JOB["nonces"], "dist": [1.4] * 40}
#: What counts together: queued work, clients that wait for a round's end, and those beside a round.
KINDS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "queued": [("generate", JOB)],
    "waiting": [("generate", JOB | {"wait": True})],
    "beside": [("generate", JOB | {"wait": True, "beside_round": True}), ("validate", PROOFS)],
}


@pytest.mark.parametrize("pod_settings", [{"QUEUED_NONCES": "100"}])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_request_has_a_bound_of_its_own(pod: Pod, clock: FakeClock, kind: str) -> None:
    """So work that cannot run before the round's end keeps none out that can."""
    await pod.start(DISTANCE | SLOT | {"round_id": "a"})
    await pod.reach(lambda s: s.total_checked > 0)
    pod.engine.output_processor.busy = True
    (first, *_), others = KINDS[kind], [one for other in KINDS.keys() - {kind} for one in KINDS[other]]
    asking = [asyncio.create_task(pod.post(route, body)) for route, body in [first, first]]
    await until_queued(pod, 80)
    for route, body in KINDS[kind]:
        answer = await pod.post(route, body)
        error = error_of(answer, 429, "QueueFull")
        assert error.detail.startswith("Queue full: 120 nonces would be queued, and 100 may")
        assert int(answer.headers["Retry-After"]) > 0
    asking += [asyncio.create_task(pod.post(route, body)) for route, body in others]
    await until_queued(pod, 40 * len(asking))
    pod.engine.output_processor.busy = False
    await clock.passes(pod.post("stop?round_id=a"))
    assert {answer.status_code for answer in await clock.passes(asyncio.gather(*asking))} == {200}
    await until_queued(pod, 0)


@pytest.mark.parametrize("pod_settings", [{"PAYLOAD_RESULTS": "15"}])
async def test_results_go_to_the_callback(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.faults = [500, 429]
    receiver.bad = {7}
    job = await submit(pod, JOB | {"url": receiver.url, "node_id": 3, "node_count": 9})
    found = await ended(pod, job, callback=True)
    assert found["callback"] == "rejected"
    assert found["callback_error"].endswith("HTTP 400")
    assert receiver.nonces == [nonce for nonce in range(40) if nonce != 7]
    assert {(payload["request_id"], payload["node_id"]) for payload in receiver.payloads} == {(job, 3)}
    assert (await pod.status()).callbacks_lost == 1


@pytest.mark.parametrize("answer", [401, 403, 404])
@pytest.mark.parametrize("body", [JOB, JOB | WRONG], ids=["results", "verdict"])
async def test_a_callback_that_is_refused_for_a_moment_is_delivered(
    pod: Pod, receiver: CallbackReceiver, body: dict[str, Any], answer: int
) -> None:
    """As while a token or an ingress is changed."""
    receiver.faults = [answer] * 3
    job = await submit(pod, body | {"url": receiver.url})
    assert (await ended(pod, job, callback=True))["callback"] == "delivered"
    assert receiver.nonces == ([] if body is not JOB else JOB["nonces"])
    assert len(receiver.verdicts) == (body is not JOB)
    assert (await pod.status()).callbacks_lost == 0


async def test_valid_distances_go_to_the_callback(pod: Pod, receiver: CallbackReceiver) -> None:
    job = await submit(pod, DISTANCE | {"nonces": list(range(40)), "callback_url": receiver.url})
    assert (await ended(pod, job, callback=True))["callback"] == "delivered"
    assert receiver.nonces == [nonce for nonce in range(40) if distance(nonce) < 1.405]
    assert receiver.payloads[0]["r_target"] == 1.405


async def test_a_verdict_goes_to_the_callback(pod: Pod, receiver: CallbackReceiver) -> None:
    pod.engine.sick.update({4: 9})
    job = await submit(pod, JOB | WRONG | {"url": receiver.url, "node_id": 3, "node_count": 9})
    found = await ended(pod, job, callback=True)
    assert (found["callback"], found["fraud_detected"]) == ("delivered", True)
    (verdict,) = receiver.verdicts
    same = {"request_id", "n_total", "n_mismatch", "mismatch_nonces", "p_value", "fraud_detected", "not_computed"}
    assert {key: verdict[key] for key in same} == {key: found[key] for key in same}
    assert (verdict["n_total"], verdict["not_computed"], verdict["node_id"]) == (39, [4], 3)
    assert (verdict["public_key"], verdict["block_hash"], verdict["block_height"]) == ("node1", "abc123", 7)


@pytest.mark.parametrize("pod_settings", [{"RESULT_SECONDS": "1"}])
async def test_a_receiver_that_is_down_holds_up_no_other_and_is_given_up(pod: Pod, receiver: CallbackReceiver) -> None:
    down = await submit(pod, JOB | {"url": "http://127.0.0.1:9/x"})
    up = await submit(pod, JOB | {"url": receiver.url})
    assert (await ended(pod, up, callback=True))["callback"] == "delivered"
    found = await look(pod, down)
    assert found["callback"] == "pending"
    assert found["callback_error"].startswith("http://127.0.0.1:9/x/generated: ")
    status = await pod.reach(lambda s: s.callbacks_lost == 1)
    assert status.callbacks_pending == 0


async def test_a_callback_that_cannot_be_made_is_given_up(
    pod: Pod, receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no payload")

    monkeypatch.setattr("vllm_poc.server.callbacks.payloads.callback", broken)
    request_id = (await pod.post("generate", ARTIFACT | {"nonces": [1], "url": receiver.url})).json()["request_id"]
    status = await pod.reach(lambda s: s.callbacks_lost == 1)
    assert status.callbacks_pending == 0
    answer = (await pod.http.get(f"{API_PREFIX}/generate/{request_id}")).json()
    assert (answer["callback"], answer["callback_error"]) == ("given up", "TypeError: no payload")


@pytest.mark.parametrize("pod_settings", [{"PENDING_RESULTS": "40"}, {"PENDING_BYTES": "480"}], ids=["many", "long"])
async def test_jobs_wait_while_too_many_results_wait_for_delivery(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    first, second = [await submit(pod, JOB | {"url": receiver.url}) for _ in range(2)]
    await ended(pod, first)
    attempts = receiver.attempts
    await pod.reach(lambda s: receiver.attempts > attempts + 2)
    assert len(pod.engine.computed) == 40
    receiver.answer = 200
    assert (await ended(pod, second, callback=True))["callback"] == "delivered"
    assert receiver.nonces == [*range(40), *range(40)]


@pytest.mark.parametrize("pod_settings", [{"CALLBACK_ALLOW": "gateway"}])
async def test_callbacks_of_jobs_go_to_allowed_hosts_only(pod: Pod) -> None:
    error = error_of(await pod.post("generate", JOB | {"url": "http://evil/x"}), 422, "InvalidRequest")
    assert error.detail.startswith("url: callbacks to evil are not allowed")


@pytest.mark.parametrize("pod_settings", [{"QUEUED_NONCES": "40"}])
@pytest.mark.parametrize("behind", ["chat", "a round"])
async def test_a_client_that_goes_away_takes_its_work_along(pod: Pod, clock: FakeClock, behind: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}{API_PREFIX}/generate"
    async with serve(pod.app, "127.0.0.1", port), httpx.AsyncClient(timeout=30) as client:
        if behind == "chat":
            pod.engine.output_processor.busy = True
        else:
            await pod.start(DISTANCE | SLOT)
        asked = asyncio.create_task(client.post(url, json=JOB | {"wait": True}))
        await until_queued(pod, 40)
        asked.cancel()
        await until_queued(pod, 0)
        pod.engine.output_processor.busy = False
        await pod.post("stop")
        for _ in range(20):
            await clock.tick()
        assert not batches(pod, "artifact")
        answer = await clock.passes(client.post(url, json=JOB | {"wait": True}))
    assert len(answer.json()["artifacts"]) == 40, "and leaves its place in the queue"
