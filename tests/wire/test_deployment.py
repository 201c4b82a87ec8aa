# SPDX-License-Identifier: Apache-2.0
"""A server whose processes PoC cannot run with, and that was started without our command line."""

from types import SimpleNamespace

import pytest

from tests.support.servers.pod import ARTIFACT, SLOT, Pod
from tests.wire.test_requests import error_of
from vllm_poc.wire.messages import API_PREFIX


@pytest.fixture
def several(pod: Pod) -> Pod:
    pod.app.state.args = SimpleNamespace(api_server_count=2, data_parallel_size=1)
    return pod


async def test_every_poc_route_says_what_is_wrong(several: Pod) -> None:
    for answer in (
        await several.start(ARTIFACT | SLOT),
        await several.post("stop"),
        await several.http.get(f"{API_PREFIX}/status"),
    ):
        assert "leave --api-server-count out" in error_of(answer, 409, "ModelUnsupported").detail
    assert several.engine.batches == []


async def test_inference_goes_on(several: Pod) -> None:
    assert (await several.http.post("/v1/chat/completions")).status_code == 200
    assert (await several.http.get("/metrics/")).status_code == 200
