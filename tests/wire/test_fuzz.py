# SPDX-License-Identifier: Apache-2.0
"""Whatever is sent to the routes is answered in time, and never by a crash.

FUZZ_EXAMPLES=10000 pytest tests/wire/test_fuzz.py
"""

import asyncio
import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.builders.fuzz import ANSWER_SECONDS, SETTINGS, check_answer, requests
from tests.support.servers.pod import Pod
from vllm_poc.wire.messages import API_PREFIX

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "400"))


@pytest.mark.timeout(120 + EXAMPLES // 10)
@pytest.mark.parametrize("pod_settings", [SETTINGS])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(request=requests())
async def test_no_request_crashes_or_hangs_the_server(pod: Pod, request: tuple[str, str, bytes]) -> None:
    method, route, body = request
    headers = {"Content-Type": "application/json"}
    async with asyncio.timeout(ANSWER_SECONDS):
        answer = await pod.http.request(method, f"{API_PREFIX}/{route}", content=body, headers=headers)
    check_answer(method, answer.status_code, answer.content)
