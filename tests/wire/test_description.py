# SPDX-License-Identifier: Apache-2.0
"""What the model allows is found once, when chat lets it, and status only looks at it."""

import asyncio
from time import monotonic

from tests.support.servers.pod import DISTANCE, SLOT, Pod


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
    pod.engine.seconds_to_describe = 1.0
    started = monotonic()
    found = await asyncio.gather(*(pod.status() for _ in range(5)))
    assert monotonic() - started < 0.8
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


async def test_why_poc_does_not_run_on_a_model_is_in_the_status(pod: Pod) -> None:
    pod.engine.facts["refusal"] = "layers of an unknown kind: serve another model"
    model = (await pod.status()).model
    assert (model.max_seq_len, model.error) == (1024, "layers of an unknown kind: serve another model")
