# SPDX-License-Identifier: Apache-2.0
"""Ten thousand wrong requests to a real server: each is answered in time, and the engine is none the worse."""

import os
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.long.conftest import Report
from tests.support.fuzz import ANSWER_SECONDS, SETTINGS, check_answer, requests
from tests.vllm.client import Client
from tests.vllm.server import serving
from vllm_poc.wire.base import API_PREFIX

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10000"))
NONCES = range(16)
#: Long enough for a real engine to compute `NONCES` on a busy machine.
REQUEST_SECONDS = "0.5"
PROMPTS = ("What is a license?", "Count: one two three four five six seven.")


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("fuzz") / "server.log"
    environment = {f"VLLM_POC_{name}": value for name, value in SETTINGS.items()}
    environment["VLLM_POC_REQUEST_SECONDS"] = REQUEST_SECONDS
    with serving(model_folder / "qwen3-tiny", log, ["--enforce-eager", "--enable-poc"], environment) as client:
        yield client


def send_all(server: Client) -> Counter[int]:
    """Send the requests over one connection and return how often each HTTP status came."""
    connection = HTTPConnection(urlsplit(server.base).netloc, timeout=ANSWER_SECONDS)
    answers: Counter[int] = Counter()

    # Shrinking would send thousands more, and the state that a failure needs is not in one request.
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request=requests())
    def send(request: tuple[str, str, bytes]) -> None:
        method, route, body = request
        connection.request(method, f"{API_PREFIX}/{route}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        check_answer(method, answer.status, answer.read())
        answers[answer.status] += 1

    send()
    connection.close()
    return answers


def results(server: Client) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Return chat's tokens and PoC's values."""
    return [server.chat(prompt) for prompt in PROMPTS], server.artifacts(NONCES), server.distances(NONCES)


@pytest.mark.timeout(600 + EXAMPLES // 5)
def test_ten_thousand_wrong_requests_leave_the_engine_as_it_was(server: Client, report: Report) -> None:
    before, session = results(server), server.status()["session_id"]
    answers = send_all(server)
    server.stop()
    assert results(server) == before
    assert server.status()["session_id"] == session, "the server must not have restarted"
    assert server.status()["state"] != "FAILED"
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(answers.items()))
    report(f"{answers.total()} requests were answered within {ANSWER_SECONDS:g} s each: {counts}")
