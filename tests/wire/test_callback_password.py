# SPDX-License-Identifier: Apache-2.0
"""A callback address with a password: the receiver gets it, and nobody else sees it."""

import asyncio
import base64
import logging
from typing import Any

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from vllm_poc.wire.callbacks import GATEWAY_USER
from vllm_poc.wire.messages import API_PREFIX

PASSWORD = "0123456789abcdef"  # noqa: S105 - of this test alone
BASIC = "Basic " + base64.b64encode(f"pod:{PASSWORD}".encode()).decode()


def with_password(url: str, password: str = PASSWORD, user: str = GATEWAY_USER) -> str:
    return url.replace("http://", f"http://{user}:{password}@")


@pytest.mark.parametrize("body", [ARTIFACT, DISTANCE], ids=["artifact", "distance"])
async def test_the_receiver_gets_it_and_status_and_logs_do_not(
    pod: Pod, receiver: CallbackReceiver, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    field = "url" if "params" in body else "callback_url"
    receiver.faults = [500]
    order = body | SLOT | {field: with_password(receiver.url), "round_id": "r1"}
    assert (await pod.start(order)).status_code == 200
    status = await pod.reach(lambda s: s.delivered_index > 0)
    assert receiver.authorizations == {BASIC}
    assert status.config is not None
    assert status.config.url == receiver.url
    assert "callback failed" in caplog.text
    assert PASSWORD not in caplog.text
    assert (await pod.start(order)).status_code == 200, "a repeat is still known as one"
    other = await pod.start(order | {"round_id": "r2"})
    assert (other.status_code, other.json()["running"]["url"]) == (409, receiver.url)


async def test_errors_of_the_delivery_do_not_show_it(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.answer = 503
    await pod.start(ARTIFACT | SLOT | {"url": with_password(receiver.url)})
    status = await pod.reach(lambda s: s.delivery_error is not None)
    assert status.delivery_error == f"{receiver.url}/generated: HTTP 503"


async def test_results_of_queued_work_are_delivered_with_it(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.faults = [500]
    job = (await pod.post("generate", ARTIFACT | {"nonces": [1, 2], "url": with_password(receiver.url)})).json()
    async with asyncio.timeout(30):
        while not receiver.payloads:
            answer = await pod.http.get(f"{API_PREFIX}/generate/{job['request_id']}")
            assert PASSWORD not in answer.text
            await asyncio.sleep(0.01)
    assert receiver.authorizations == {BASIC}


@pytest.mark.parametrize("pod_settings", [{"CALLBACK_ALLOW": "127.0.0.1"}])
async def test_the_allow_list_is_about_the_host_alone(pod: Pod, receiver: CallbackReceiver) -> None:
    assert (await pod.start(ARTIFACT | SLOT | {"url": with_password(receiver.url)})).status_code == 200
    disguised = await pod.start(ARTIFACT | SLOT | {"url": "http://127.0.0.1:secret@evil/x"})
    assert disguised.status_code == 422
    assert "callbacks to evil are not allowed" in disguised.json()["detail"]
    assert "secret" not in disguised.text


@pytest.mark.parametrize("body", [ARTIFACT, DISTANCE], ids=["artifact", "distance"])
async def test_results_wait_while_the_gateway_refuses_the_password_and_a_repeated_start_brings_another(
    pod: Pod, receiver: CallbackReceiver, body: dict[str, Any]
) -> None:
    receiver.password, receiver.challenge = "another", 'Basic realm="poc-gateway"'
    field = "url" if "params" in body else "callback_url"
    order = body | SLOT | {"round_id": "r1"}
    await pod.start(order | {field: with_password(receiver.url)})
    await pod.reach(lambda s: s.callback_unauthorized)
    refused = receiver.attempts
    # For longer than another receiver is waited for.
    status = await pod.reach(lambda s: s.callback_unauthorized and receiver.attempts > refused + 10)
    assert (status.delivered_index, status.delivered_rejected) == (0, 0)
    assert status.delivery_error == f"{receiver.url}/generated: HTTP 401"
    again = await pod.start(order | {field: with_password(receiver.url, "another")})
    assert again.status_code == 200
    status = await pod.reach(lambda s: s.delivered_index > 20)
    assert (status.callback_unauthorized, status.delivered_rejected) == (False, 0)
    await pod.post("stop")
    indices = [(nonce - 4) // 6 for nonce in receiver.nonces]
    if "params" in body:
        assert indices == list(range(len(indices))), "nothing is lost"
    other = await pod.start(order | {"round_id": "r2", field: with_password(receiver.url)})
    assert other.status_code == 200


async def test_another_receivers_401_is_final_after_a_while(pod: Pod, receiver: CallbackReceiver) -> None:
    receiver.password, receiver.challenge = "another", 'Basic realm="elsewhere"'
    await pod.start(ARTIFACT | SLOT | {"url": with_password(receiver.url, user="somebody")})
    status = await pod.reach(lambda s: s.delivered_rejected > 0)
    assert not status.callback_unauthorized


async def test_a_repeated_start_with_another_receiver_is_other_work(pod: Pod, receiver: CallbackReceiver) -> None:
    order = ARTIFACT | SLOT | {"round_id": "r1"}
    await pod.start(order | {"url": with_password(receiver.url)})
    answer = await pod.start(order | {"url": with_password(f"{receiver.url}/else")})
    assert answer.status_code == 409
