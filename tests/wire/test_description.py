# SPDX-License-Identifier: Apache-2.0
"""What the model allows is found once, before the server is healthy or when chat lets it; status only looks at it."""

import asyncio
import logging
from time import monotonic

import pytest

from tests.support.checks.metrics import parse_pod
from tests.support.fakes.clock import FakeClock, settle
from tests.support.fakes.engine import FACTS
from tests.support.servers.pod import DISTANCE, SLOT, Pod, lifespan
from vllm_poc.wire.answers import StatusResponse


async def test_polls_do_not_repeat_what_fails_and_tell_why(pod: Pod) -> None:
    pod.engine.fault = RuntimeError("no memory")
    for _ in range(5):
        model = (await pod.status()).model
        assert (model.max_seq_len, model.error) == (0, "poc_describe failed: no memory")
    assert pod.engine.described == 1
    pod.engine.fault = None
    assert (await pod.start(DISTANCE | SLOT)).status_code == 200, "work tries again"
    model = (await pod.status()).model
    assert (model.max_seq_len, model.error) == (1024, None)


async def test_status_waits_for_nothing_that_takes_long(pod: Pod) -> None:
    pod.engine.seconds_to_describe = 3.0
    started = monotonic()
    found = await asyncio.gather(*(pod.status() for _ in range(5)))
    assert monotonic() - started < 2.5
    assert {status.model.max_seq_len for status in found} == {0}
    assert {status.model.error for status in found} == {None}
    await pod.reach(lambda s: s.model.max_seq_len == 1024)
    assert pod.engine.described == 1


async def test_the_first_status_lets_chat_go_first(pod: Pod) -> None:
    pod.engine.output_processor.busy = True
    assert (await pod.status()).model.max_seq_len == 0
    assert pod.engine.described == 0
    pod.engine.output_processor.busy = False
    await pod.reach(lambda s: s.model.max_seq_len == 1024)
    assert pod.engine.described == 1


@pytest.mark.parametrize("pod_settings", [{"MIN_SHARE": "0.25", "SHARE_WINDOW_SECONDS": "2"}], ids=["a quarter"])
@pytest.mark.parametrize("clock", [FakeClock()], ids=["by its share"])
async def test_a_look_beside_chat_is_paid_for_from_pocs_share(pod: Pod, clock: FakeClock) -> None:
    pod.engine.output_processor.busy, pod.engine.seconds_to_describe = True, 1.0
    await clock.passes(pod.start(DISTANCE | SLOT))
    looked = clock.now()
    await pod.reach(lambda s: clock.now() > looked + 1)
    assert pod.engine.batches == []
    await pod.reach(lambda s: s.total_checked > 0)
    assert 1.5 < clock.now() - looked + 1.0 < 3


async def test_why_poc_does_not_run_on_a_model_is_in_the_status(pod: Pod) -> None:
    pod.engine.facts["refusal"] = "layers of an unknown kind: serve another model"
    model = (await pod.status()).model
    assert (model.max_seq_len, model.error) == (1024, "layers of an unknown kind: serve another model")


async def start_of(pod: Pod) -> StatusResponse:
    """What a server says first whose engine is there before it takes requests, as vLLM's is."""
    pod.become_ready()
    async with lifespan(pod.app):
        return await pod.status()


async def test_a_server_has_looked_at_its_model_before_it_is_healthy() -> None:
    pod = Pod()
    pod.engine.seconds_to_describe = 1.0
    pod.become_ready()
    async with lifespan(pod.app):
        assert (pod.engine.in_flight, pod.engine.described) == (0, 1)
        model = (await pod.status()).model
    assert (model.max_seq_len, model.error, pod.engine.described) == (1024, None, 1)


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_model_that_cannot_be_looked_at_does_not_keep_chat_from_its_server(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_POC_ENGINE_SECONDS", "0.5")
    pod = Pod()
    if fault == "fails":
        pod.engine.fault = RuntimeError("no memory")
    else:
        pod.engine.seconds_to_describe = 60.0
    error = (await start_of(pod)).model.error
    assert error in {"poc_describe failed: no memory", "poc_describe did not answer within 0.5 s"}


async def test_a_deployment_that_poc_cannot_run_in_is_not_looked_at() -> None:
    pod = Pod()
    pod.become_ready()
    pod.app.state.args.data_parallel_size = 2
    async with lifespan(pod.app):
        assert pod.engine.described == 0


async def test_a_server_says_at_its_start_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pod, findings = Pod(), ["PoC computes by a formula.", "PoC has left chat alone."]
    pod.engine.facts["findings"] = findings
    pod.become_ready()
    async with asyncio.timeout(20), lifespan(pod.app), pod.http:
        while not pod.engine.described:  # and nobody asks  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert (await pod.reach(lambda s: s.model.max_seq_len > 0)).model.findings == findings
    assert [record.message for record in caplog.records if record.message in findings] == findings
    assert pod.engine.described == 1


async def test_a_server_whose_engine_is_not_there_yet_starts_all_the_same() -> None:
    pod = Pod()
    async with lifespan(pod.app), pod.http:
        pod.become_ready()
        assert (await pod.reach(lambda s: s.model.max_seq_len > 0)).model.error is None


async def lasts(clock: FakeClock, seconds: int) -> None:
    """Let so much time pass, and nobody ask."""
    for _ in range(seconds):
        clock.advance(1)
        await settle(20)


async def readiness(pod: Pod) -> str:
    found = parse_pod((await pod.http.get("/metrics/")).text, "tiny")
    (ready,) = [name for name, value in found.items() if name.startswith("poc_ready") and value]
    return ready.removeprefix('poc_ready{reason="').removesuffix('"}')


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
@pytest.mark.parametrize("refusal", [None, "no memory"])
async def test_why_poc_does_not_run_is_logged_once(
    pod: Pod, clock: FakeClock, caplog: pytest.LogCaptureFixture, refusal: str | None
) -> None:
    pod.engine.facts["refusal"] = refusal
    pod.engine.fault = RuntimeError("no memory") if refusal is None else None
    errors = set()
    for _ in range(3):
        errors.add((await clock.passes(pod.status())).model.error)
        await lasts(clock, 30)
    assert pod.engine.described >= (3 if refusal is None else 1)
    (error,) = errors
    assert len([record for record in caplog.records if record.message.endswith(str(error))]) == 1


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
async def test_what_fails_is_tried_again_by_the_clock_and_no_more_often(pod: Pod, clock: FakeClock) -> None:
    pod.engine.fault = RuntimeError("the engine is busy")
    await clock.passes(pod.status())
    await lasts(clock, 95)
    assert pod.engine.described == 4, "every 30 s"
    assert await readiness(pod) == "EngineFailed"
    pod.engine.fault = None
    await lasts(clock, 30)
    assert await readiness(pod) == "Ready"
    await lasts(clock, 3_600)
    assert pod.engine.described == 5


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
async def test_a_lack_of_memory_at_the_start_passes(pod: Pod, clock: FakeClock) -> None:
    pod.engine.has_room_to_look = False
    status = await clock.passes(pod.status())
    assert "MemoryError: the GPU has no room" in (status.model.error or "")
    assert await readiness(pod) == "NoMemory"
    pod.engine.has_room_to_look = True
    await lasts(clock, 31)
    assert await readiness(pod) == "Ready"
    assert (await pod.status()).model.error is None


async def test_a_look_ends_before_its_call_is_given_up(pod: Pod) -> None:
    await pod.reach(lambda s: s.model.max_seq_len > 0)
    assert 0 < pod.engine.seconds_to_look <= 10, "the call has 20, and a batch that has begun is computed"


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
@pytest.mark.parametrize("paused", [(), ("/pause",)], ids=["at once", "paused"])
async def test_other_weights_are_looked_at_though_nobody_asks(
    pod: Pod, clock: FakeClock, paused: tuple[str, ...]
) -> None:
    pod.seconds_per_command = 0.0
    await clock.passes(pod.status())
    for path in (*paused, "/update_weights", "/update_weights", "/update_weights"):
        await clock.passes(pod.http.post(path))
    if paused:
        await lasts(clock, 60)
        assert (pod.engine.described, await readiness(pod)) == (1, "Paused")
        await clock.passes(pod.http.post("/resume"))
    await lasts(clock, 1)
    assert await readiness(pod) == "Ready"
    assert pod.engine.described <= (2 if paused else 4), "once, however many updates a pause has"


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
async def test_other_weights_are_looked_at_between_chats(pod: Pod, clock: FakeClock) -> None:
    await clock.passes(pod.status())
    pod.engine.output_processor.busy = True
    await clock.passes(pod.http.post("/update_weights"))
    await lasts(clock, 60)
    assert (pod.engine.described, await readiness(pod)) == (1, "Starting")
    pod.engine.output_processor.busy = False
    await lasts(clock, 5)
    assert (pod.engine.described, await readiness(pod)) == (2, "Ready")


SLOWER = "PoC computes slower, since fused operations find no room; it is tried again."


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
async def test_a_faster_pass_that_found_no_room_is_tried_again_ever_less_often(
    pod: Pod, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    pod.engine.facts |= {"findings": [SLOWER], "slower": SLOWER, "passes": True}
    await clock.passes(pod.status())
    await lasts(clock, 29)
    seen = [pod.engine.described]
    for seconds in (2, 60, 120, 240):
        await lasts(clock, seconds)
        seen.append(pod.engine.described)
    assert seen == [1, 2, 3, 4, 5]
    assert [record.levelname for record in caplog.records if record.message == SLOWER] == ["WARNING"]
    assert await readiness(pod) == "Ready", "it computes meanwhile"


async def test_a_look_that_kernels_took_too_long_for_is_repeated_before_anything_else(pod: Pod) -> None:
    """Later each would hold back chat."""
    pod.engine.late_looks, pod.engine.facts = 3, {**FACTS, "fused": True}
    assert (await pod.status()).model.fused
    assert pod.engine.described == 4


async def test_chat_gets_in_between_repeated_looks(pod: Pod) -> None:
    pod.engine.late_looks, pod.engine.seconds_to_describe = 2, 0.5
    looking = asyncio.create_task(pod.status())
    while not pod.engine.in_flight:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    pod.engine.output_processor.busy = True
    await asyncio.sleep(1.0)
    assert (pod.engine.described, pod.engine.in_flight) == (1, 0)
    pod.engine.output_processor.busy = False
    await looking
    await pod.reach(lambda s: s.model.max_seq_len == 1024)
    assert pod.engine.described == 3


async def test_a_repeated_look_that_finds_no_memory_keeps_the_pass_that_works(pod: Pod) -> None:
    pod.engine.late_looks, pod.engine.looks_with_room = 2, 1
    model = (await pod.status()).model
    assert (model.max_seq_len, model.fused, model.error) == (1024, False, None)


@pytest.mark.parametrize("clock", [FakeClock()], ids=["by the clock"])
async def test_work_goes_on_with_a_faster_pass_once_it_is_found(pod: Pod, clock: FakeClock) -> None:
    pod.engine.facts |= {"findings": [SLOWER], "slower": SLOWER, "passes": True}
    await clock.passes(pod.start(DISTANCE | SLOT))
    await pod.reach(lambda s: s.total_checked > 0)
    warmed_up = len(pod.engine.warmed_up)
    pod.engine.facts = {**FACTS, "fused": True}
    await lasts(clock, 31)
    status = await pod.status()
    assert status.model.fused
    await pod.reach(lambda s: s.total_checked > status.total_checked)
    assert len(pod.engine.warmed_up) > warmed_up, "it is tuned anew"
    assert pod.engine.forgotten == 0
