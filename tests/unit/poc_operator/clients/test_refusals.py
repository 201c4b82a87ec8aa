# SPDX-License-Identifier: Apache-2.0
"""Why a pod declines, as vLLM's server and a bare FastAPI put it, without what was sent to it."""

import json

import pytest

from poc_operator.clients.errors import NotAPodOfOurs, PodBusy, PodError, PodRefused
from poc_operator.clients.pods.client import _error

URL = "http://pod:secret@gateway:8080/callbacks/ns/r/uid"


def wrapped(message: str, code: int, kind: str = "Bad Request") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


MISSING = (
    "1 validation error:\n  {'type': 'missing', 'loc': 'body.params', 'msg': 'Field required', "
    f"'input': \"{{'block_hash': 'ab', 'url': '{URL}'}}\"}}"
)


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason", "text"),
    [
        pytest.param(
            409,
            wrapped("Already generating", 409, "Conflict"),
            PodBusy,
            "RoundConflict",
            "Already generating",
            id="busy",
        ),
        pytest.param(
            400, wrapped(MISSING, 400), PodRefused, "InvalidRequest", "'msg': 'Field required'", id="missing parameters"
        ),
        pytest.param(
            400,
            wrapped("expected string or bytes-like object, got 'dict'", 400, "BadRequestError"),
            PodRefused,
            "ModelMismatch",
            "serves another model",
            id="another model",
        ),
        pytest.param(
            503, wrapped("Engine not available", 503), PodRefused, "EngineNotReady", "Engine not available", id="engine"
        ),
        pytest.param(409, b'{"detail": "Already generating"}', PodBusy, "RoundConflict", "Already", id="bare FastAPI"),
        pytest.param(
            409,
            b'{"detail": {"error": "params mismatch"}}',
            PodRefused,
            "ModelMismatch",
            "params mismatch",
            id="bare, params",
        ),
    ],
)
def test_a_refusal_of_a_reference_pod(status: int, body: bytes, kind: type[PodRefused], reason: str, text: str) -> None:
    error = _error(status, body)
    assert type(error) is kind
    assert isinstance(error, PodRefused)
    assert error.reason == reason
    assert text in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize("cut", range(len(MISSING) - 90, len(MISSING), 7))
def test_no_password_is_told_wherever_an_explanation_is_cut(cut: int) -> None:
    assert "secr" not in str(_error(400, wrapped(MISSING[:cut], 400)))


@pytest.mark.parametrize(
    ("body", "text"), [(b"<html>Bad  Gateway</html>", "<html>Bad Gateway"), (b"", "without an expl")]
)
def test_an_answer_that_nobody_expects_is_told(body: bytes, text: str) -> None:
    error: PodError = _error(502, body)
    assert isinstance(error, NotAPodOfOurs)
    assert text in str(error)
