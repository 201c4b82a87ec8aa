# SPDX-License-Identifier: Apache-2.0
"""Bodies as the chain's client sends them, and what is said of those that are refused."""

from typing import Any

import httpx

from tests.support.fakes.engine import vector
from vllm_poc.wire.answers import ErrorResponse

URL = "http://chain.example/v2/poc-batches/org%252Ftiny"
BLOCK: dict[str, Any] = {
    "block_hash": "ab" * 32,
    "block_height": 4711,
    "public_key": "AqBX",
    "node_id": 1,
    "node_count": 3,
}
PARAMS: dict[str, Any] = {"model": "tiny", "seq_len": 64}
INIT: dict[str, Any] = BLOCK | {"params": PARAMS, "url": URL, "poc_stronger_rng": True}
NONCES = list(range(1, 601, 3))


def validation(changed: int = 0, **fields: object) -> dict[str, Any]:
    """A validation of 200 foreign nonces, of which the first are not what they should be."""
    artifacts = [
        {"nonce": nonce, "vector_b64": vector(nonce + (50 if place < changed else 0), 12)}
        for place, nonce in enumerate(NONCES)
    ]
    test = {"dist_threshold": 0.02, "p_mismatch": 0.1, "p_value_threshold": 0.05}
    foreign = BLOCK | {"public_key": "A+foreign/key=", "node_id": 2, "node_count": 5, "params": PARAMS}
    return foreign | {"nonces": NONCES, "validation": {"artifacts": artifacts}, "stat_test": test, "url": URL} | fields


def error_of(answer: httpx.Response, status: int, reason: str) -> ErrorResponse:
    """Return the error, which must be this one."""
    assert answer.status_code == status, answer.text
    error = ErrorResponse.model_validate(answer.json())
    assert error.reason == reason
    return error
