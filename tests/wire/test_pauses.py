# SPDX-License-Identifier: Apache-2.0
"""While vLLM sleeps, is paused or gets new weights, PoC computes nothing, and goes on afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.support.checks.metrics import parse_pod
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.clock import FakeClock, settle
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_delivery import expected_nonces
from tests.wire.test_jobs import JOB, ended, look, submit
from tests.wire.test_requests import error_of
from vllm_poc.server.vllm_routes import Pauses, Workers
from vllm_poc.wire.answers import Activity, PowState

PAUSES = [
    (["/sleep"], ["/wake_up"], "vLLM sleeps"),
    (["/release_kv_cache_memory"], ["/wake_up"], "vLLM sleeps"),
    (["/pause"], ["/resume"], "vLLM is paused"),
    (["/start_weight_update", "/update_weights"], ["/finish_weight_update"], "vLLM gets new weights"),
    (["/start_draft_weight_update"], ["/finish_weight_update"], "vLLM gets new weights"),
    (["/pause", "/update_weights"], ["/resume"], "vLLM is paused"),
]


async def call(pod: Pod, paths: list[str]) -> None:
    for path in paths:
        assert (await pod.http.post(path)).status_code == 200


async def stands_still(pod: Pod) -> None:
    before = len(pod.engine.batches)
    await asyncio.sleep(0.1)
    assert len(pod.engine.batches) == before


@pytest.mark.parametrize(("begin", "end", "reason"), PAUSES)
async def test_nothing_is_computed_in_a_pause(
    pod: Pod, receiver: CallbackReceiver, begin: list[str], end: list[str], reason: str
) -> None:
    pod.engine.seconds_per_batch = 0.02
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
    await pod.reach(lambda s: s.total_checked > 0)
    await call(pod, begin)
    await stands_still(pod)
    status = await pod.status()
    assert (status.state, status.paused_by) == (PowState.GENERATING, reason)
    await call(pod, end)
    after = await pod.reach(lambda s: s.total_checked > status.total_checked)
    assert after.paused_by is None
    assert pod.met_in_flight == 0, "slices end before vLLM gets the call"
    await pod.post("stop")
    assert receiver.nonces == expected_nonces(ARTIFACT, await pod.status())


GIVEN_UP: dict[str, Callable[[Pod], Awaitable[object]]] = {
    "a request whose client leaves": lambda pod: left(pod, ARTIFACT | {"nonces": [1], "wait": True}),
    "a round that is stopped": lambda pod: stopped(pod, ARTIFACT | SLOT),
    "an autotune that is stopped": lambda pod: stopped(pod, ARTIFACT | SLOT, fused=True),
    "queued work that is cancelled": lambda pod: stopped(pod, ARTIFACT | {"nonces": [1]}, route="generate"),
}


async def left(pod: Pod, body: dict[str, Any]) -> None:
    asking = asyncio.create_task(pod.post("generate", body))
    await pod.reach(lambda _: pod.engine.calls[-1] == "poc_compute")
    asking.cancel()
    await asyncio.wait([asking])


async def stopped(pod: Pod, body: dict[str, Any], *, route: str = "init/generate", fused: bool = False) -> None:
    pod.engine.facts["fused"] = fused
    await pod.post(route, body)
    await pod.reach(lambda _: pod.engine.calls[-1] != "poc_describe")
    await pod.post("stop")


@pytest.mark.parametrize("name", GIVEN_UP)
@pytest.mark.parametrize("command", ["/sleep", "/pause", "/update_weights"])
async def test_a_pause_waits_for_calls_that_nobody_waits_for_any_more(pod: Pod, name: str, command: str) -> None:
    pod.engine.seconds_per_batch = pod.engine.seconds_to_warm_up = 0.5
    await GIVEN_UP[name](pod)
    assert pod.engine.in_flight == 1, "the workers go on"
    await call(pod, [command])
    assert pod.met_in_flight == 0


async def test_an_engine_that_is_awake_in_part_is_left_alone(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await call(pod, ["/sleep"])
    pod.engine.asleep = True
    await call(pod, ["/wake_up"])
    await stands_still(pod)
    pod.engine.asleep = False
    await call(pod, ["/wake_up"])
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)


async def test_a_pause_that_fails_is_none(pod: Pod) -> None:
    pod.refusing = {"/pause", "/resume"}
    await pod.start(DISTANCE | SLOT)
    assert (await pod.http.post("/pause")).status_code == 500
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)
    pod.refusing = {"/resume"}
    await call(pod, ["/pause"])
    assert (await pod.http.post("/resume")).status_code == 500
    await stands_still(pod)


async def test_pauses_add_up(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await call(pod, ["/pause", "/sleep", "/resume"])
    assert (await pod.status()).paused_by == "vLLM sleeps"
    await call(pod, ["/pause"])
    assert (await pod.status()).paused_by == "vLLM is paused; vLLM sleeps"


async def test_a_model_that_sleeps_is_not_described(pod: Pod) -> None:
    await call(pod, ["/sleep"])
    error = error_of(await pod.start(DISTANCE | SLOT), 503, "Paused")
    assert error.detail == "vLLM sleeps: try again when that is over, or ask another server"
    assert (await pod.status()).model.max_seq_len == 0
    await call(pod, ["/wake_up"])
    assert (await pod.start(DISTANCE | SLOT)).status_code == 200


@pytest.mark.parametrize(
    "commands", [["/update_weights"], ["/start_weight_update", "/finish_weight_update"]], ids=["alone", "in steps"]
)
async def test_new_weights_are_looked_at_anew(pod: Pod, commands: list[str]) -> None:
    pod.engine.facts["fused"] = True
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    assert (pod.engine.warmed_up, pod.engine.forgotten) == ([8, 16], 0)
    await call(pod, commands)
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)
    assert (pod.engine.warmed_up, pod.engine.forgotten) == ([8, 16, 8, 16], 1)
    await pod.post("stop")
    assert len(set(pod.engine.computed)) == len(pod.engine.computed)


async def test_the_round_stops_and_its_lease_runs_out_in_a_pause(pod: Pod, clock: FakeClock) -> None:
    await pod.start(ARTIFACT | SLOT | {"round_id": "a", "lease_seconds": 60})
    await pod.reach(lambda s: s.total_checked > 0)
    await call(pod, ["/pause"])
    assert (await pod.status()).activity == Activity.PAUSED
    async with asyncio.timeout(30):
        assert (await pod.post("stop")).status_code == 200
    await pod.start(ARTIFACT | SLOT | {"round_id": "b", "lease_seconds": 60})
    before = len(pod.engine.batches)
    assert (await pod.status()).activity == Activity.PAUSED
    clock.advance(60)
    assert (await pod.reach(lambda s: s.state is PowState.STOPPED)).stop_reason == "LeaseExpired"
    assert len(pod.engine.batches) == before


@pytest.mark.parametrize("before", ["known", "unknown"])
async def test_status_answers_in_a_pause(pod: Pod, before: str) -> None:
    if before == "known":
        await pod.reach(lambda s: s.model.max_seq_len > 0)
    await call(pod, ["/sleep"])
    seconds = []
    for _ in range(5):
        started = monotonic()
        status = await pod.status()
        seconds.append(monotonic() - started)
        assert status.paused_by == "vLLM sleeps"
        assert (status.model.max_seq_len > 0) is (before == "known")
    assert min(seconds) < 0.15, "nobody waits for what cannot be said now"
    assert status.model.error == (None if before == "known" else "vLLM sleeps")


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("generate", DISTANCE | {"nonces": [1], "wait": True}),
    "beside a round": ("generate", DISTANCE | {"nonces": [1], "wait": True, "beside_round": True}),
    "validate": ("validate", {"public_key": "p", "block_hash": "h", "block_height": 1, "nonces": [1], "dist": [1.4]}),
}


async def nobody_waits(pod: Pod) -> None:
    gauges = parse_pod((await pod.http.get("/metrics/")).text, "tiny")
    assert (gauges["poc_queued_jobs"], gauges["poc_queued_nonces"]) == (0, 0)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("begins", ["before", "meanwhile"])
@pytest.mark.parametrize("round_runs", [True, False], ids=["beside a round", "alone"])
@pytest.mark.parametrize(("begin", "reason"), [("/sleep", "vLLM sleeps"), ("/update_weights", "vLLM gets new weights")])
async def test_who_waits_for_an_answer_is_refused_in_a_pause(
    pod: Pod, name: str, begins: str, round_runs: bool, begin: str, reason: str
) -> None:
    await pod.post("init/generate" if round_runs else "init/validate", DISTANCE | SLOT)
    pod.engine.output_processor.busy = begins == "meanwhile"  # so that the request is not done before
    route, body = REQUESTS[name]
    if begins == "before":
        pod.seconds_per_command = 15
        command = asyncio.create_task(call(pod, [begin]))
        await pod.reach(lambda s: s.paused_by is not None)
        request = asyncio.create_task(pod.post(route, body))
    else:
        request = asyncio.create_task(pod.post(route, body))
        await asyncio.sleep(0.05)
        assert not request.done()
        command = asyncio.create_task(call(pod, [begin]))
    started = monotonic()
    answer = await request
    assert monotonic() - started < 12
    assert error_of(answer, 503, "Paused").detail.startswith(f"{reason}: try again")
    assert int(answer.headers["Retry-After"]) > 0
    await nobody_waits(pod)
    command.cancel()
    await asyncio.wait([command])


async def test_what_is_queued_waits_for_the_end_of_a_pause(pod: Pod) -> None:
    """Also if nothing is known of the model when its turn comes."""
    await pod.start(ARTIFACT | SLOT | {"round_id": "a"})
    job = await submit(pod, JOB)
    await call(pod, ["/pause", "/update_weights"])
    await pod.post("stop?round_id=a")  # which leaves queued work alone
    await stands_still(pod)
    assert (await look(pod, job))["status"] == "running"
    await call(pod, ["/resume"])
    assert (await ended(pod, job))["status"] == "completed"


async def test_no_result_is_of_two_weights(pod: Pod) -> None:
    pod.engine.seconds_per_batch = 0.05
    job = await submit(pod, JOB)
    while not pod.engine.answered:  # noqa: ASYNC110 - the fake has no event
        await asyncio.sleep(0.01)
    await call(pod, ["/update_weights"])
    found = await ended(pod, job)
    error = "vLLM got new weights, or PoC a faster pass, while this was computed: ask again"
    assert (found["status"], found["error"]) == ("failed", error)


@pytest.mark.parametrize("pod_settings", [{"PENDING_RESULTS": "40"}])
@pytest.mark.parametrize("waits", ["at its end", "for its receiver"])
async def test_a_round_that_waits_outlasts_new_weights(pod: Pod, receiver: CallbackReceiver, waits: str) -> None:
    """And what it does next, while vLLM is still paused, is to look at the model anew."""
    receiver.answer = 503 if waits == "for its receiver" else 200
    ends = {"end_index": 16} if waits == "at its end" else {}
    await pod.start(ARTIFACT | SLOT | {"url": receiver.url, "round_id": "a"} | ends)
    activity = Activity.WAITING_FOR_EXTENSION if ends else Activity.RECEIVER_FULL
    before = await pod.reach(lambda s: s.activity == activity)
    await call(pod, ["/pause", "/update_weights"])
    receiver.answer = 200
    await pod.post("extend", {"round_id": "a", "end_index": 1000})
    await stands_still(pod)
    assert ((await pod.status()).state, (await pod.status()).error) == (PowState.GENERATING, None)
    await call(pod, ["/resume"])
    await pod.reach(lambda s: s.total_checked > before.total_checked)


async def test_nothing_is_tuned_in_a_pause(pod: Pod) -> None:
    pod.engine.facts["fused"] = True
    await pod.reach(lambda s: s.model.max_seq_len > 0)
    await call(pod, ["/pause"])
    await pod.start(ARTIFACT | SLOT)
    await stands_still(pod)
    assert pod.engine.warmed_up == []
    await call(pod, ["/resume"])
    await pod.reach(lambda s: s.total_checked > 8)  # the first ones come before the search
    assert pod.engine.warmed_up == [8, 16]


@pytest.mark.parametrize("computes", [False, True], ids=["an idle server", "a round"])
@pytest.mark.parametrize("clock", [FakeClock()], ids=["an hour"])
async def test_new_weights_are_looked_at_when_chat_lets_poc_pass_and_not_before(
    pod: Pod, clock: FakeClock, computes: bool
) -> None:
    """The look computes, and waits for chat as a round does. Until then nothing is computed, and status says so."""
    if computes:
        await pod.start(ARTIFACT | SLOT)
        await pod.reach(lambda s: s.total_checked > 0)
    await pod.status()
    pod.engine.output_processor.busy = True
    await clock.passes(call(pod, ["/update_weights"]))
    calls = len(pod.engine.calls)
    assert pod.engine.calls[-1] == "poc_forget"
    await pod.status()  # which begins the look, where no work does
    for _ in range(3_600):
        clock.advance(1)
        await settle(5)
    assert pod.engine.calls[calls:] == []
    status = await pod.status()
    assert (status.error, status.model.max_seq_len) == (None, 0)
    found = parse_pod((await pod.http.get("/metrics/")).text, "tiny")
    assert found['poc_ready{reason="Starting"}'] == 1
    pod.engine.output_processor.busy = False
    await pod.reach(lambda s: s.model.max_seq_len > 0 and s.total_checked >= status.total_checked + computes)
    assert pod.engine.calls[calls] == "poc_describe"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", ["/sleep", "/pause", "/update_weights", "/collective_rpc", "/weight_checker"])
async def test_devices_rest_before_vllm_does_what_it_is_told(
    pod: Pod, path: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer leaves the next step on a GPU, and vLLM 0.24 gives memory away without waiting for that."""
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    pod.engine.rest_fails = fails
    commanded = asyncio.create_task(pod.http.post(path, json={"method": "sleep", "action": "check"}))
    while not pod.received:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert pod.engine.calls[-1] == "poc_rest"
    assert (await commanded).status_code == 200
    assert fails is any("may still compute for PoC" in record.message for record in caplog.records)


async def test_devices_that_rest_are_not_asked_again(pod: Pod) -> None:
    await call(pod, ["/pause", "/sleep"])
    assert "poc_rest" not in pod.engine.calls, "they were given nothing"
    await call(pod, ["/wake_up", "/resume"])
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    await call(pod, ["/pause", "/sleep", "/wake_up", "/pause"])
    assert pod.engine.calls.count("poc_rest") == 1


async def test_what_was_tuned_for_other_weights_is_not_used(pod: Pod) -> None:
    """The slice that waited for the end of the pause is of a size that is found anew."""
    pod.engine.facts["fused"] = True
    pod.engine.seconds_per_batch = 0.02
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    await call(pod, ["/update_weights"])
    calls, before = pod.engine.calls, (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)
    anew = calls.index("poc_forget") + 1
    assert calls[anew : anew + 4] == ["poc_describe", "poc_warm_up", "poc_warm_up", "poc_compute"]


async def test_a_search_for_other_weights_begins_with_a_look_at_them(pod: Pod) -> None:
    """Not with the pass that it was about to capture."""
    pod.engine.facts["fused"] = True
    await pod.reach(lambda s: s.model is not None)
    await call(pod, ["/pause"])
    await pod.start(ARTIFACT | SLOT | {"end_index": 0})  # so that it begins with the search
    await stands_still(pod)
    await call(pod, ["/update_weights", "/resume"])
    await pod.reach(lambda s: "poc_warm_up" in pod.engine.calls)
    calls = pod.engine.calls
    assert calls[calls.index("poc_forget") + 1 :][:2] == ["poc_describe", "poc_warm_up"]


async def test_workers_that_did_not_forget_are_told_before_they_compute(pod: Pod) -> None:
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    pod.engine.forget_fault = RuntimeError("the worker is busy")
    before = len(pod.engine.batches)
    await call(pod, ["/update_weights"])
    pod.engine.forget_fault = None
    await pod.reach(lambda s: s.state is not PowState.GENERATING or len(pod.engine.batches) > before)
    assert pod.engine.forgotten == 1


async def test_half_an_update_is_computed_with_by_nobody(pod: Pod) -> None:
    await pod.start(ARTIFACT | SLOT)
    pod.refusing = {"/update_weights"}
    assert (await pod.http.post("/update_weights")).status_code == 500
    await stands_still(pod)
    assert "an update of vLLM's weights failed" in ((await pod.status()).paused_by or "")
    pod.refusing = set()
    await call(pod, ["/update_weights"])
    before = (await pod.status()).total_checked
    await pod.reach(lambda s: s.total_checked > before)


@pytest.mark.parametrize("command", ["/collective_rpc", "/weight_checker"])
async def test_commands_that_may_change_weights_are_followed_by_a_new_look(pod: Pod, command: str) -> None:
    await pod.start(ARTIFACT | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    await call(pod, [command])
    assert pod.engine.forgotten == 1
    before = (await pod.status()).total_checked
    assert (await pod.reach(lambda s: s.total_checked > before)).paused_by is None


async def test_a_method_of_the_extension_changes_no_weights(pod: Pod) -> None:
    for body, forgotten in [({"method": "poc_describe"}, 0), ({"method": "load"}, 1), ([], 2), ({"method": None}, 3)]:
        assert (await pod.http.post("/collective_rpc", json=body)).status_code == 200
        assert pod.engine.forgotten == forgotten


async def test_a_sleep_that_fails_half_way_is_one(pod: Pod) -> None:
    pod.refusing, pod.engine.asleep = {"/sleep"}, True
    await pod.start(DISTANCE | SLOT)
    assert (await pod.http.post("/sleep")).status_code == 500
    await stands_still(pod)
    assert (await pod.status()).paused_by == "vLLM sleeps"


async def test_one_command_that_fails_ends_no_other_pause(pod: Pod) -> None:
    pod.refusing = {"/sleep"}
    sleeping = asyncio.create_task(pod.http.post("/sleep"))
    await asyncio.sleep(0.02)
    pausing = asyncio.create_task(pod.http.post("/pause"))
    assert [(await task).status_code for task in (sleeping, pausing)] == [500, 200]
    assert (await pod.status()).paused_by == "vLLM is paused"


async def test_a_command_that_is_given_up_pauses_nothing(pod: Pod) -> None:
    pod.engine.seconds_per_batch = 1
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda _: pod.engine.in_flight > 0)
    command = asyncio.create_task(pod.http.post("/pause"))
    await pod.reach(lambda s: s.paused_by is not None)
    command.cancel()
    await asyncio.wait([command])
    assert (await pod.status()).paused_by is None


@pytest.mark.parametrize("commands", [["/pause", "/resume"], ["/sleep", "/wake_up"], ["/update_weights"]])
async def test_the_pause_is_over_when_the_client_is_told(commands: list[str]) -> None:
    pauses, found = Pauses(), []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def told(_: Message) -> None:
        found.append(pauses.reason)

    async def nothing() -> None:
        pass

    async def awake() -> bool:
        return False

    for path in commands:
        scope = {"type": "http", "method": "POST", "path": path}
        assert pauses.concerns(scope)
        await pauses.pass_on(app, scope, MagicMock(), told, Workers(idle=nothing, sleeps=awake, forget=nothing))
    assert found[-2:] == [None, None]


@pytest.mark.parametrize("pod_settings", [{"PRIORITY": "poc-first"}])
async def test_poc_first_refuses_no_inference_in_a_pause(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await call(pod, ["/pause"])
    assert (await pod.http.post("/v1/completions")).status_code == 200
