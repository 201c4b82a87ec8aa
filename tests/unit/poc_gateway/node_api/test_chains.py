# SPDX-License-Identifier: Apache-2.0
"""Verdicts on chains of the decode scheme: compared by several pods, and put together."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from poc_gateway.store import schema
from poc_operator.clients.errors import StoreUnavailable
from tests.support.fakes.engine import chain
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, PARAMS, URL, error_of
from tests.unit.poc_gateway.node_api.test_replay import finished

PATH = "inference/pow/generate"
STEPS = 12
SETUP = {"VLLM_POC_DECODE_CODEBOOK": "/sphere_codebook.pt", "VLLM_POC_DECODE_RESERVE_BYTES": "100000"}
#: Two chunks of a pod, or one of each of two pods.
NONCES = list(range(300, 0, -1))
TEST = {"dist_threshold": 0.025, "p_mismatch": 0.001, "p_value_threshold": 0.05}


@pytest.fixture
async def decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A gateway in front of two pods that offer the decode scheme."""
    for name, value in SETUP.items():
        monkeypatch.setenv(name, value)
    async with running_world(tmp_path, pods=2) as world:
        yield world


def claimed(nonce: int, *, forged: bool) -> list[int]:
    """A chain; a forged one has another index at step 3, which is far off."""
    steps = chain(nonce, STEPS)
    if forged:
        steps[3] = (steps[3] + 4) % 16
    return steps


def claims(*forged: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    artifacts = [
        {"nonce": nonce, "vector_b64": "", "k_points_steps": claimed(nonce, forged=nonce in forged)} for nonce in NONCES
    ]
    params = PARAMS | {"decode": True, "max_tokens": STEPS}
    body = BLOCK | {"params": params, "nonces": NONCES, "validation": {"artifacts": artifacts}, "stat_test": TEST}
    return body | {"wait": True} | fields


async def test_the_comparisons_of_several_pods_make_one_verdict(decoding: World) -> None:
    first, second = decoding.pods.values()
    first.engine.sick[7] = second.engine.sick[7] = 10
    answer = await decoding.post(PATH, claims(299, 2, 150))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["n_total"], body["n_mismatch"], body["mismatch_nonces"]) == (299, 3, [299, 150, 2])
    assert (body["fraud_detected"], body["n_excluded"], body["excluded_nonces"]) == (True, 1, [7])
    assert [one["nonce"] for one in body["per_nonce"]] == [nonce for nonce in NONCES if nonce != 7]
    assert {one["nonce"] for one in body["per_nonce"] if one["mismatch"]} == {299, 150, 2}
    assert all(pod.engine.computed for pod in decoding.pods.values())


async def test_what_is_queued_is_called_back(decoding: World) -> None:
    queued = (await decoding.post(PATH, claims(wait=False, url=URL))).json()
    assert (await finished(decoding, queued["request_id"]))["fraud_detected"] is False
    (row,) = decoding.rows(select(schema.callbacks))
    told = json.loads(row["body"])
    assert (row["url"], told["n_total"], told["n_excluded"]) == (f"{URL}/validated", 300, 0)
    assert "per_nonce" not in told


async def test_what_is_queued_waits_for_the_api_server(decoding: World) -> None:
    decoding.cluster.fault = StoreUnavailable("no route to host")
    queued = await decoding.post(PATH, claims(4, wait=False))
    assert queued.status_code == 200, queued.text
    decoding.cluster.fault = None
    assert (await finished(decoding, queued.json()["request_id"]))["mismatch_nonces"] == [4]


async def test_given_chains_go_to_the_pod_that_has_their_nonces(decoding: World) -> None:
    forced = {str(nonce): claimed(nonce, forged=nonce == 5) for nonce in NONCES}
    body = (await decoding.post(PATH, claims(enforced_k_steps=forced))).json()
    assert body["mismatch_nonces"] == [5]


async def test_only_pods_that_offer_the_scheme_compare(decoding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETUP:
        monkeypatch.delenv(name)
    other = await decoding.add_pod("127.0.0.3")
    assert (await decoding.get("pow/versions")).json()["schemes"] == ["prefill"]
    assert (await decoding.post(PATH, claims())).json()["n_total"] == 300
    assert (other.engine.computed, other.engine.decode_calls) == ([], [])


async def test_pods_with_a_rebuilt_codebook_compare_nothing(decoding: World) -> None:
    for pod in decoding.pods.values():
        pod.engine.decode_facts["rebuilt"] = True
    error = error_of(await decoding.post(PATH, claims()), 422, "InvalidRequest")
    assert "set VLLM_POC_DECODE_CODEBOOK of pods with a rebuilt codebook to the network's file" in error.detail


async def test_what_cannot_be_compared_is_refused(decoding: World) -> None:
    error = error_of(await decoding.post(PATH, claims(validation=None)), 422, "InvalidRequest")
    assert "params.decode: chains of named nonces are compared here, and not told" in error.detail
    artifacts = [{"nonce": nonce, "vector_b64": ""} for nonce in NONCES]
    error = error_of(await decoding.post(PATH, claims(validation={"artifacts": artifacts})), 400, "InvalidRequest")
    assert "k_points_steps in the decode scheme: 300 have none" in error.detail
