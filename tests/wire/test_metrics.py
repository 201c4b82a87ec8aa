# SPDX-License-Identifier: Apache-2.0
"""The ``poc_*`` series on /metrics. Counters live as long as the process, so tests look at differences."""

from collections import defaultdict
from functools import partial
from time import time

import pytest

from tests.support.checks.metrics import parse_pod
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import NO_ROOM
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_phases import VALID, batch
from vllm_poc.server import metrics
from vllm_poc.wire.answers import Activity, PowState, StatusResponse

ROUND_NONCES = 'poc_nonces_computed_total{protocol="distance",work="round"}'
REQUEST_NONCES = 'poc_nonces_computed_total{protocol="artifact",work="request"}'


async def scrape(pod: Pod) -> dict[str, float]:
    answer = await pod.http.get("/metrics/")
    assert answer.status_code == 200
    return parse_pod(answer.text, "tiny")


async def growth(pod: Pod, before: dict[str, float]) -> dict[str, float]:
    found = await scrape(pod)
    return defaultdict(float, {name: value - before.get(name, 0) for name, value in found.items()})


def state(found: dict[str, float]) -> list[str]:
    return [name for name, value in found.items() if name.startswith("poc_state{") and value == 1]


async def test_the_series_are_there_before_the_first_round(pod: Pod) -> None:
    found = await scrape(pod)
    assert state(found) == ['poc_state{state="IDLE"}']
    assert found["poc_results_pending"] == found["poc_queued_jobs"] == found["poc_queued_nonces"] == 0
    assert {f'poc_callbacks_total{{outcome="{outcome}"}}' for outcome in ("accepted", "refused", "failed")} <= set(
        found
    )


def ready(found: dict[str, float]) -> list[str]:
    return [name for name, value in found.items() if name.startswith("poc_ready{") and value == 1]


async def test_whether_poc_runs_is_shown(pod: Pod) -> None:
    assert ready(await scrape(pod)) == ['poc_ready{reason="Starting"}']
    await pod.status()
    assert ready(await scrape(pod)) == ['poc_ready{reason="Ready"}']
    await pod.http.post("/sleep")
    assert ready(await scrape(pod)) == ['poc_ready{reason="Paused"}']


async def test_why_poc_does_not_run_is_shown(pod: Pod) -> None:
    pod.engine.facts["refusal"] = "PoC does not run on this model: serve another one."
    await pod.status()
    assert ready(await scrape(pod)) == ['poc_ready{reason="ModelUnsupported"}']


async def without_memory(pod: Pod) -> StatusResponse:
    """Start a round that finds no memory for a single nonce."""
    pod.engine.facts["fused"], pod.engine.has_room = True, False
    await pod.start(ARTIFACT | SLOT)
    status = await pod.reach(lambda s: s.state is PowState.FAILED)
    assert status.error == status.model.error == f"poc_compute failed: {NO_ROOM}"
    assert ready(await scrape(pod)) == ['poc_ready{reason="NoMemory"}']
    return status


async def test_a_lack_of_memory_fails_the_round_and_is_shown_until_it_is_over(pod: Pod, clock: FakeClock) -> None:
    await without_memory(pod)
    for _ in range(2):
        await one_try(pod, clock)
    assert ready(await scrape(pod)) == ['poc_ready{reason="NoMemory"}']
    pod.engine.has_room = True
    clock.advance(29)
    await settle()
    assert ready(await scrape(pod)) == ['poc_ready{reason="NoMemory"}'], "it is tried now and then only"
    clock.advance(1)
    status = await pod.reach(lambda s: s.model.error is None)
    assert (status.state, len(pod.engine.computed)) == (PowState.FAILED, 1), "of a single nonce"
    assert ready(await scrape(pod)) == ['poc_ready{reason="Ready"}']
    tried = len(pod.engine.calls)
    clock.advance(300)
    await settle()
    assert len(pod.engine.calls) == tried


async def one_try(pod: Pod, clock: FakeClock) -> None:
    """Let the pod try again, and wait until that is over."""
    await settle()
    before = len(pod.engine.calls)
    clock.advance(30)
    await pod.reach(lambda _: len(pod.engine.calls) > before and not pod.engine.in_flight)
    await settle()


async def test_work_that_finds_memory_ends_the_lack_of_it_at_once(pod: Pod, clock: FakeClock) -> None:
    await without_memory(pod)
    pod.engine.has_room = True
    await pod.start(ARTIFACT | SLOT)
    status = await pod.reach(lambda s: s.total_checked > 0)
    assert (status.error, status.model.error) == (None, None)
    assert ready(await scrape(pod)) == ['poc_ready{reason="Ready"}']
    assert clock.now() == 0


async def test_an_engine_that_fails_is_shown(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object, **__: object) -> list[object]:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(pod.engine, "collective_rpc", failing)
    await pod.status()
    assert ready(await scrape(pod)) == ['poc_ready{reason="EngineFailed"}']


@pytest.mark.parametrize("pod_settings", [{"PENDING_RESULTS": "64", "PAYLOAD_RESULTS": "32"}])
async def test_what_a_round_does_is_shown(pod: Pod, receiver: CallbackReceiver) -> None:
    assert (await shown(pod), (await pod.status()).activity) == ([], None)
    receiver.answer = 503
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url, "round_id": "r", "end_index": 10})
    for word in ("WaitingForExtension", "ReceiverFull", "HeldByChat", "Computing", "Paused"):
        if word == "ReceiverFull":
            await pod.post("extend", {"round_id": "r", "end_index": 1_000_000})
        elif word == "HeldByChat":
            pod.engine.output_processor.busy = True
            receiver.answer = 200
        elif word == "Computing":
            pod.engine.output_processor.busy = False
        elif word == "Paused":
            await pod.http.post("/sleep")
        await pod.reach(partial(does, word))
    assert await shown(pod) == ["Paused"]
    await pod.post("stop")
    assert (await shown(pod), (await pod.status()).activity) == ([], None)


def does(word: str, status: StatusResponse) -> bool:
    return status.activity == word


async def shown(pod: Pod) -> list[str]:
    found = await scrape(pod)
    return [word for word in Activity if found[f'poc_activity{{activity="{word}"}}']]


async def test_a_round_is_counted(pod: Pod, receiver: CallbackReceiver) -> None:
    before = await scrape(pod)
    pod.engine.sick.update({4: 9})
    receiver.faults = [503]
    await pod.start(DISTANCE | SLOT | {"callback_url": receiver.url})
    await pod.reach(lambda s: s.delivered_valid > 50)
    assert state(await scrape(pod)) == ['poc_state{state="GENERATING"}']
    await pod.post("stop")
    await pod.reach(lambda _: not pod.engine.in_flight)
    grown, status = await growth(pod, before), await pod.status()
    assert state(await scrape(pod)) == ['poc_state{state="STOPPED"}']
    assert grown[ROUND_NONCES] == status.total_checked
    assert grown['poc_nonces_valid_total{protocol="distance"}'] == status.total_valid
    assert grown['poc_nonces_not_finite_total{protocol="distance",work="round"}'] == 1
    assert grown["poc_results_delivered_total"] == status.delivered_valid == len(receiver.nonces)
    assert grown['poc_callbacks_total{outcome="failed"}'] == 1
    assert grown['poc_callbacks_total{outcome="accepted"}'] == len(receiver.payloads)
    assert grown["poc_slice_seconds_count"] == len(pod.engine.batches)
    assert (await scrape(pod))["poc_last_progress_timestamp_seconds"] == pytest.approx(time(), abs=5)
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    assert (await growth(pod, before))[ROUND_NONCES] > status.total_checked, "counters do not start anew"


async def test_what_the_receiver_does_not_take_is_counted(pod: Pod, receiver: CallbackReceiver) -> None:
    before = await scrape(pod)
    receiver.answer = 403
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.delivered_rejected > 0)
    await pod.post("stop")
    grown = await growth(pod, before)
    assert grown["poc_results_rejected_total"] == (await pod.status()).delivered_rejected
    assert grown["poc_results_delivered_total"] == 0
    outcomes = [grown[f'poc_callbacks_total{{outcome="{outcome}"}}'] for outcome in ("refused", "failed")]
    assert outcomes[0] > 0 < outcomes[1], "it was tried for a while"
    assert sum(outcomes) == receiver.attempts


async def test_results_that_wait_are_shown(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.total_checked > 100)
    assert (await scrape(pod))["poc_results_pending"] > 100
    await pod.post("stop")
    assert (await scrape(pod))["poc_results_pending"] == 0, "nobody delivers them any more"


async def test_requests_are_counted(pod: Pod) -> None:
    before = await scrape(pod)
    await pod.start(DISTANCE | SLOT)
    job = ARTIFACT | {"nonces": list(range(30)), "url": "http://127.0.0.1:9/x"}
    await pod.post("generate", job)
    await pod.post("generate", job | {"nonces": [1, 2]})
    waiting = await scrape(pod)
    assert (waiting["poc_queued_jobs"], waiting["poc_queued_nonces"]) == (2, 32)
    await pod.post("validate", batch(VALID))
    await pod.post("stop")
    grown = await growth(pod, before)
    assert grown['poc_nonces_computed_total{protocol="distance",work="request"}'] == len(VALID)
    assert grown[REQUEST_NONCES] == 0
    assert (grown["poc_queued_jobs"], grown["poc_queued_nonces"]) == (0, 0)
    await pod.post("generate", job | {"wait": True})
    assert (await growth(pod, before))[REQUEST_NONCES] == 30


@pytest.mark.parametrize("pod_settings", [{"RESULT_SECONDS": "0.05"}])
async def test_a_lost_callback_is_counted(pod: Pod) -> None:
    before = await scrape(pod)
    await pod.post("generate", ARTIFACT | {"nonces": [1], "url": "http://127.0.0.1:9/x"})
    await pod.reach(lambda s: s.callbacks_lost == 1)
    assert (await growth(pod, before))["poc_callbacks_lost_total"] == 1


async def test_time_behind_chat_is_counted(pod: Pod) -> None:
    before = await scrape(pod)
    await pod.status()  # which looks at the model, and would wait for chat
    pod.engine.output_processor.busy = True
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.held_back_seconds > 0.05)
    assert (await growth(pod, before))["poc_held_back_seconds_total"] > 0.05


async def test_long_calls_before_the_second_slice_are_progress(pod: Pod) -> None:
    """A round that autotunes says that it computes, and must not look hung."""
    pod.engine.facts["fused"], pod.engine.seconds_to_warm_up = True, 1.0
    await pod.status()
    pod.engine.output_processor.busy = True
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.held_back_seconds > 0.05)
    for warmed_up in ([8], [8, 16]):
        metrics.PROGRESS.labels().set(0)
        pod.engine.output_processor.busy = False
        await pod.reach(lambda _, wanted=warmed_up: pod.engine.warmed_up == wanted)  # type: ignore[misc]
        assert (await scrape(pod))["poc_last_progress_timestamp_seconds"] == pytest.approx(time(), abs=5)
        assert (await pod.status()).activity == Activity.COMPUTING
    assert len(pod.engine.batches) == 1


@pytest.mark.parametrize("fused", [True, False])
async def test_whether_the_fused_pass_is_ready_is_shown(pod: Pod, fused: bool) -> None:
    pod.engine.facts["fused"] = fused
    assert (await scrape(pod))["poc_fused_pass"] == 0, "nothing is known so far"
    await pod.status()
    assert (await scrape(pod))["poc_fused_pass"] == fused


@pytest.mark.parametrize("pod_settings", [{"TOKEN": "secret"}])
async def test_the_token_does_not_guard_metrics(pod: Pod) -> None:
    assert (await pod.post("stop")).status_code == 401
    assert state(await scrape(pod)) == ['poc_state{state="IDLE"}']
