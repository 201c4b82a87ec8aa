# SPDX-License-Identifier: Apache-2.0
"""Requests to the pod's routes, most of them wrong in some way, and what every answer must look like."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT

#: An answer that takes longer counts as none. The server's own limits are far below (``SETTINGS``); a busy machine may
#: hold a process up for some seconds.
ANSWER_SECONDS = 30.0
#: Short times, so that ten thousand requests do not pile up work that nobody awaits.
SETTINGS = {"REQUEST_SECONDS": "0.2", "FLUSH_SECONDS": "0.1", "RESULT_SECONDS": "1", "QUEUED_NONCES": "500"}
#: The 503s that the routes document.
DOCUMENTED_503 = {"Busy", "EngineFailed"}
JOB: dict[str, Any] = {"nonces": [1, 2, 3], "node_id": 0, "node_count": 1}
VALIDATION = {"artifacts": [{"nonce": nonce, "vector_b64": "AAAAAAAAAAA="} for nonce in JOB["nonces"]]}
PROOF = {
    "public_key": "prover",
    "block_hash": "other",
    "block_height": 1,
    "nonces": [1, 2, 3],
    "dist": [1.39, 1.4, 1.41],
}
URL = "http://127.0.0.1:9/x"
REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "init", DISTANCE | SLOT),
    ("POST", "init/generate", DISTANCE | SLOT | {"callback_url": URL, "round_id": "r1", "start_index": 3}),
    ("POST", "init/generate", ARTIFACT | SLOT | {"url": URL, "poc_stronger_rng": True, "batch_size": 4}),
    ("POST", "init/validate", DISTANCE | {"fraud_threshold": 0.1, "p_mismatch": 0.1, "callback_url": URL}),
    ("POST", "phase/generate", None),
    ("POST", "phase/validate", None),
    ("POST", "validate", PROOF),
    ("POST", "generate", DISTANCE | JOB | {"wait": True}),
    ("POST", "generate", ARTIFACT | JOB | {"url": URL}),
    ("POST", "generate", ARTIFACT | JOB | {"wait": True, "validation": VALIDATION, "stat_test": {"p_mismatch": 0.1}}),
    ("GET", "generate/some-id", None),
    ("GET", "status?lists=false", None),
    ("POST", "stop?round_id=r1", None),
    ("POST", "stop", None),
    ("GET", "versions", None),
    ("GET", "openapi.json", None),
]
ODD_NUMBERS = [-1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**64, 10**400, -0.0, 1e308, 0.5, float("nan"), float("inf")]
ODD_TEXTS = ["", "\0", "\ud800", "é" * 300, "x" * 5000, "http://", "http://[", "http://a b/", "NaN", "%00", "/../", "="]
ODD_VALUES: list[Any] = [*ODD_NUMBERS, *ODD_TEXTS, None, True, [], {}, [[]], {"": None}, [1] * 1000]
ODD_BODIES = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b"1" * 5000, b'{"nonces": NaN}', b'"' + b"x" * 100]


def places(value: object) -> list[tuple[Any, Any]]:
    """Every (container, key) inside ``value``."""
    if not isinstance(value, dict | list):
        return []
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@st.composite
def bodies(draw: st.DrawFn, valid: object) -> bytes:
    """A valid body with up to three changes, or none at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(ODD_BODIES) | st.binary(max_size=50))
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        mutate(draw, body)
    return json.dumps(body).encode()


def mutate(draw: st.DrawFn, body: object) -> None:
    """Replace, remove or add something in ``body``."""
    if not (found := places(body)):
        return
    container, key = draw(st.sampled_from(found))
    change = draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "remove":
        del container[key]
    elif change == "replace" or isinstance(container, list):
        container[key] = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
    else:
        container[draw(st.sampled_from(["url", "params", "r_target", "extra", "\ud800", ""]))] = 1


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """Method, route and body."""
    method, route, valid = draw(st.sampled_from(REQUESTS))
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]))
    if draw(st.integers(0, 19)) == 0:
        route += draw(st.sampled_from(["/", "/x", "?lists=7", "?round_id=", "%00", "//", "?" + "a" * 2000]))
    return method, route, draw(bodies(valid))


def check_answer(method: str, status: int, body: bytes) -> None:
    """Fail unless an answer is a success, or an error as documented."""
    if status >= 500:
        assert status == 503, body
        assert json.loads(body)["reason"] in DOCUMENTED_503
    elif status >= 400 and method != "HEAD":
        answer = json.loads(body)
        assert answer["detail"]
        assert answer["reason"]
