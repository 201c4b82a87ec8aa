# SPDX-License-Identifier: Apache-2.0
"""A server with ``--root-path`` knows its routes, whether or not a proxy has taken the prefix away."""

import pytest

from tests.support.servers.pod import ARTIFACT, SLOT, Pod
from vllm_poc.wire.messages import API_PREFIX


@pytest.fixture
def pod(pod: Pod) -> Pod:
    pod.app.root_path = "/chat"
    return pod


@pytest.mark.parametrize("prefix", ["", "/chat"])
@pytest.mark.parametrize("pod_settings", [{"PRIORITY": "poc-first"}])
async def test_the_prefix_changes_nothing(pod: Pod, prefix: str) -> None:
    answer = await pod.http.post(f"{prefix}{API_PREFIX}/init/generate", json=ARTIFACT | SLOT)
    assert answer.status_code == 200, answer.text
    assert (await pod.http.post(f"{prefix}/v1/completions")).status_code == 503
    assert (await pod.http.post(f"{prefix}/sleep")).status_code == 200
    assert (await pod.status()).paused_by == "vLLM sleeps"
    assert (await pod.http.post(f"{prefix}{API_PREFIX}/stop")).status_code == 200
    assert 'poc_state{model_name="tiny",state="STOPPED"} 1.0' in (await pod.http.get(f"{prefix}/metrics")).text


@pytest.mark.parametrize("path", ["/chatter/v1/completions", "/chat/chat/v1/completions"])
async def test_another_prefix_is_none(pod: Pod, path: str) -> None:
    assert (await pod.http.post(path)).status_code == 404
