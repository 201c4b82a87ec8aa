# SPDX-License-Identifier: Apache-2.0
"""Ten thousand wrong requests to a real server: each is answered in time, and the engine is none the worse."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.long.conftest import Report
from tests.support.builders.fuzz import ANSWER_SECONDS, SETTINGS, check_answer, requests
from tests.vllm.client import Client
from tests.vllm.server import serving
from vllm_poc.wire.messages import API_PREFIX

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


def examples() -> list[tuple[str, str, bytes]]:
    """Return the requests: drawn before they are sent, since hypothesis would repeat one that fails."""
    drawn: list[tuple[str, str, bytes]] = []

    @settings(
        max_examples=EXAMPLES, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
    )
    @given(request=requests())
    def draw(request: tuple[str, str, bytes]) -> None:
        drawn.append(request)

    draw()
    return drawn


def send_all(server: Client) -> tuple[Counter[int], float]:
    """Send all over one connection; return how often each HTTP status came, and the longest wait in seconds."""
    connection = HTTPConnection(urlsplit(server.base).netloc, timeout=ANSWER_SECONDS)
    answers: Counter[int] = Counter()
    longest = 0.0
    for method, route, body in examples():
        started = time.monotonic()
        try:
            connection.request(method, f"{API_PREFIX}/{route}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            check_answer(method, answer.status, answer.read())
        except (OSError, HTTPException) as error:
            waited = time.monotonic() - started
            pytest.fail(f"{error!r} after {waited:.1f} s and {answers.total()} answers: {method} {route} {body!r}")
        answers[answer.status] += 1
        longest = max(longest, time.monotonic() - started)
    connection.close()
    return answers, longest


def results(server: Client) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Return chat's tokens and PoC's values."""
    return [server.chat(prompt) for prompt in PROMPTS], server.artifacts(NONCES), server.distances(NONCES)


@pytest.mark.timeout(600 + EXAMPLES // 5)
def test_ten_thousand_wrong_requests_leave_the_engine_as_it_was(server: Client, report: Report) -> None:
    before, session = results(server), server.status()["session_id"]
    answers, longest = send_all(server)
    server.stop()
    assert results(server) == before
    assert server.status()["session_id"] == session, "the server must not have restarted"
    assert server.status()["state"] != "FAILED"
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(answers.items()))
    report(f"{answers.total()} requests were answered, each within {longest:.1f} s: {counts}")
