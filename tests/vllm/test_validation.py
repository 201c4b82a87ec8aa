# SPDX-License-Identifier: Apache-2.0
"""Fraud is found and honesty is not called fraud, on real results."""

import time
from typing import Any

import pytest

from tests.vllm.client import K_DIM, ROUND, Client

NONCES = list(range(32))
PARAMS = {"model": "tiny", "seq_len": 64, "k_dim": K_DIM}
#: About half of all nonces are valid.
R_TARGET = 1.414
#: Wide enough for two honest runs in bfloat16, far below the distance of unrelated vectors.
STAT_TEST = {"dist_threshold": 0.2, "p_mismatch": 0.001, "fraud_threshold": 0.01}


def claim(client: Client, **fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """The artifacts that a prover sends."""
    artifacts: list[dict[str, Any]] = client.generate(nonces=NONCES, params=PARAMS, **fields)["artifacts"]
    return artifacts


def verdict(client: Client, artifacts: list[dict[str, Any]], **fields: Any) -> Any:  # noqa: ANN401
    validation = {"validation": {"artifacts": artifacts}, "stat_test": STAT_TEST}
    return client.generate(nonces=NONCES, params=PARAMS, **validation, **fields)


def test_an_honest_prover_passes(qwen3: Client) -> None:
    found = verdict(qwen3, claim(qwen3))
    assert (found["n_total"], found["n_mismatch"], found["fraud_detected"]) == (32, 0, False)


@pytest.mark.parametrize("changed", [{"block_hash": "other"}, {"public_key": "other"}, {"poc_stronger_rng": True}])
def test_results_of_another_round_are_fraud(qwen3: Client, changed: dict[str, Any]) -> None:
    found = verdict(qwen3, claim(qwen3, **changed))
    assert found["n_mismatch"] > 28
    assert found["fraud_detected"] is True


def test_results_of_another_length_are_fraud(qwen3: Client) -> None:
    artifacts = qwen3.generate(nonces=NONCES, params={**PARAMS, "seq_len": 65})["artifacts"]
    assert verdict(qwen3, artifacts)["fraud_detected"] is True


def test_queued_work_is_done_and_kept(qwen3: Client) -> None:
    queued = qwen3.generate(nonces=NONCES, params=PARAMS, wait=False)
    assert queued["status"] == "queued"
    end = time.monotonic() + 30
    while (found := qwen3.job(queued["request_id"]))["status"] in ("queued", "running"):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    assert found["artifacts"] == claim(qwen3)


@pytest.mark.parametrize(
    ("changed", "fraud"),
    [({}, False), ({"public_key": "other"}, True), ({"block_hash": "other"}, True), ({"seq_len": 65}, True)],
    ids=str,
)
def test_distances_of_another_round_are_fraud(qwen3: Client, changed: dict[str, Any], fraud: bool) -> None:
    qwen3.poc("init/validate", {**ROUND, "r_target": R_TARGET, "seq_len": 64})
    found = qwen3.poc("validate", proof(qwen3, **changed))
    qwen3.stop()
    assert found["fraud_detected"] is fraud


def proof(client: Client, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """The nonces that are valid with these fields, claimed for the round itself."""
    found = zip(NONCES, client.distances(NONCES, **fields), strict=True)
    valid = {nonce: distance for nonce, distance in found if distance < R_TARGET}
    assert len(valid) > 4, "a few valid nonces are needed to tell fraud"
    return {**ROUND, "nonces": list(valid), "dist": list(valid.values())}
