# SPDX-License-Identifier: Apache-2.0
"""Artifacts of others, compared with ours."""

from typing import Any

import pytest

from tests.support.builders.known_answers import ANSWERS
from tests.support.fakes.engine import vector
from tests.support.servers.pod import ARTIFACT, Pod
from tests.wire.test_requests import error_of
from vllm_poc.wire.artifacts import encode_vector

NONCES = list(range(100, 130))


def validation(changed: dict[int, str]) -> dict[str, Any]:
    artifacts = [{"nonce": nonce, "vector_b64": changed.get(nonce, vector(nonce, 4))} for nonce in NONCES]
    return ARTIFACT | {"nonces": NONCES, "wait": True, "validation": {"artifacts": artifacts}}


def shifted(nonce: int, by: float) -> str:
    first, *rest = [(nonce + j) % 100 / 100 for j in range(4)]
    return encode_vector([first + by, *rest])


async def test_honest_artifacts_pass(pod: Pod) -> None:
    body = (await pod.post("generate", validation({105: shifted(105, 0.01)}))).json()
    assert body.pop("request_id")
    assert body == {
        "status": "completed",
        "n_total": 30,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
        "not_computed": [],
    }


@pytest.mark.parametrize(
    "received",
    [
        shifted(105, 0.05),
        "",
        "not base64!",
        encode_vector([0.1] * 3),
        encode_vector([0.1] * 5),
        "AH4AAAAAAAA=",
        "AHwAAAAAAAA=",
        "é" * 12,
        vector(105, 4) + "\n",
    ],
    ids=["far", "empty", "no base64", "short", "long", "NaN", "Inf", "not ASCII", "line end"],
)
async def test_whatever_is_no_near_vector_is_a_mismatch(pod: Pod, received: str) -> None:
    body = (await pod.post("generate", validation({105: received}))).json()
    assert (body["n_total"], body["mismatch_nonces"]) == (30, [105])
    assert body["p_value"] == pytest.approx(1 - 0.999**30)
    assert body["fraud_detected"] is False  # 0.0296 against 0.01


@pytest.mark.parametrize("case", ANSWERS["validation_cases"]["cases"], ids=lambda case: case["case"])
@pytest.mark.parametrize("threshold", ["0.02", "0.2", "0.4"])
async def test_known_answers(pod: Pod, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], threshold: str) -> None:
    cases = ANSWERS["validation_cases"]
    monkeypatch.setattr("tests.support.fakes.engine.vector", lambda nonce, k_dim: cases["computed_b64"])
    params = ARTIFACT["params"] | {"k_dim": cases["k_dim"]}
    artifacts = [{"nonce": 1, "vector_b64": case["received_b64"]}]
    fields = {"params": params, "nonces": [1], "wait": True, "stat_test": {"dist_threshold": float(threshold)}}
    body = (await pod.post("generate", ARTIFACT | fields | {"validation": {"artifacts": artifacts}})).json()
    assert body["n_mismatch"] == int(case[f"mismatch_at_{threshold}"])


@pytest.mark.parametrize(
    ("stat_test", "fraud"),
    [
        ({}, True),
        (None, True),
        ({"p_mismatch": 0.1}, False),
        ({"p_mismatch": 0.03}, False),
        ({"p_mismatch": 0.03, "p_value_threshold": 0.5}, False),  # as the reference, which ignores it
        ({"p_mismatch": 0.03, "fraud_threshold": 0.5}, True),
        ({"p_mismatch": 0.03, "p_value_threshold": 0.5, "fraud_threshold": 0.01}, False),
        ({"fraud_threshold": 0.0}, False),
        ({"dist_threshold": 0.1}, False),
    ],
    ids=str,
)
async def test_the_request_sets_the_test(pod: Pod, stat_test: dict[str, float] | None, fraud: bool) -> None:
    changed = {nonce: shifted(nonce, 0.05) for nonce in (105, 106)}
    body = (await pod.post("generate", validation(changed) | {"stat_test": stat_test})).json()
    assert body["fraud_detected"] is fraud


async def test_what_this_server_cannot_compute_leaves_the_sample(pod: Pod) -> None:
    pod.engine.sick.update({110: 9, 101: 9})
    changed = {110: "wrong", 111: "wrong"}
    body = (await pod.post("generate", validation(changed))).json()
    assert (body["n_total"], body["mismatch_nonces"], body["not_computed"]) == (28, [111], [101, 110])


async def test_a_server_that_computes_nothing_gives_no_verdict(pod: Pod) -> None:
    pod.engine.sick.update(dict.fromkeys(NONCES, 9))
    error = error_of(await pod.post("generate", validation({})), 503, "EngineFailed")
    assert error.detail.startswith("no verdict: every nonce came out NaN")


@pytest.mark.parametrize(
    ("nonces", "message"),
    [
        ([*NONCES, 1, 2], "1, 2 missing, none not in nonces"),
        (NONCES[8:], "none missing, 100, 101, 102, 103, 104 and 3 more not in nonces"),
    ],
    ids=["too few", "too many"],
)
async def test_artifacts_of_other_nonces_are_refused(pod: Pod, nonces: list[int], message: str) -> None:
    error = error_of(await pod.post("generate", validation({}) | {"nonces": nonces}), 400, "InvalidRequest")
    assert error.errors[0].field == "validation.artifacts"
    assert error.detail.endswith(message)
    assert pod.engine.computed == []


async def test_the_same_artifact_twice_is_refused(pod: Pod) -> None:
    body = validation({})
    body["validation"]["artifacts"].append(body["validation"]["artifacts"][0])
    error = error_of(await pod.post("generate", body), 422, "InvalidRequest")
    assert error.detail == "validation: validation.artifacts must be unique, but nonce 100 is there twice"
