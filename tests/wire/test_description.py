# SPDX-License-Identifier: Apache-2.0
"""What the model allows is found once, before the server is healthy or when chat lets it; status only looks at it."""

import asyncio
import logging
from time import monotonic

import pytest

from tests.support.fakes.clock import FakeClock
from tests.support.servers.pod import DISTANCE, SLOT, Pod, lifespan
from vllm_poc.server import scheduler
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


@pytest.mark.parametrize("refusal", [None, "no memory"])
async def test_why_poc_does_not_run_is_logged_once(
    pod: Pod, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refusal: str | None
) -> None:
    monkeypatch.setattr(scheduler, "_DESCRIBED_AGAIN_SECONDS", 0)
    pod.engine.facts["refusal"] = refusal
    pod.engine.fault = RuntimeError("no memory") if refusal is None else None
    errors = {(await pod.status()).model.error for _ in range(3)}
    assert pod.engine.described == (3 if refusal is None else 1)
    (error,) = errors
    assert len([record for record in caplog.records if record.message.endswith(str(error))]) == 1
