# SPDX-License-Identifier: Apache-2.0
"""The schemes of artifacts: what a pod offers, and what it refuses that does not offer the decode scheme."""

from typing import Any

import pytest

from tests.support.fakes.engine import NO_ROOM
from tests.support.servers.pod import ARTIFACT, SLOT, Pod
from tests.wire.test_requests import DECODE_GENERATE, DECODE_PARAMS, error_of
from vllm_poc.wire.messages import API_PREFIX

WITHOUT = "params.decode: asks for the decode scheme, which this server does not offer: "
NO_SETUP = "ask one that does, or start this one with VLLM_POC_DECODE_CODEBOOK and VLLM_POC_DECODE_RESERVE_BYTES"
NO_CODEBOOK = "codebook /codebook.pt cannot be read (No such file or directory): give the path of a file."
NO_MEMORY = f"poc_prepare_decode failed: {NO_ROOM}: set fewer bytes aside, or start vLLM with a lower "
SETUP = {"DECODE_CODEBOOK": "/codebook.pt", "DECODE_RESERVE_BYTES": "1000"}
CHAINS = [{"nonce": nonce, "vector_b64": "", "k_points_steps": [3] * 257} for nonce in DECODE_GENERATE["nonces"]]


async def schemes(pod: Pod) -> tuple[list[str], list[str]]:
    told = (await pod.http.get(f"{API_PREFIX}/versions")).json()
    return told["schemes"], told["protocols"]


@pytest.mark.parametrize(
    ("pod_settings", "why"),
    [({}, NO_SETUP), (SETUP, NO_CODEBOOK), (SETUP, NO_MEMORY)],
    ids=["no setup", "no codebook", "no memory"],
)
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("init/generate", ARTIFACT | SLOT | {"params": DECODE_PARAMS}),
        ("init/generate", ARTIFACT | SLOT | {"params": DECODE_PARAMS | {"decode": False, "scheme": "decode"}}),
        ("generate", DECODE_GENERATE),
        ("generate", DECODE_GENERATE | {"validation": {"artifacts": CHAINS}}),
    ],
    ids=["mining", "by its name", "named nonces", "validation"],
)
async def test_a_pod_without_the_decode_scheme_says_so(
    pod: Pod,
    route: str,
    body: Any,  # noqa: ANN401
    why: str,
) -> None:
    pod.engine.decode_facts["refusal"] = NO_CODEBOOK
    pod.engine.has_room = why != NO_MEMORY
    error = error_of(await pod.post(route, body), 422, "SchemeNotOffered")
    assert error.detail.startswith(WITHOUT + why)
    assert await schemes(pod) == (["prefill"], ["distance", "artifact"])
    assert pod.engine.computed == []
    assert (await pod.status()).config is None


@pytest.mark.parametrize("pod_settings", [SETUP], ids=["no codebook"])
async def test_without_the_decode_scheme_vectors_are_computed_as_ever(
    pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    pod.engine.decode_facts["refusal"] = NO_CODEBOOK
    answer = await pod.post("generate", ARTIFACT | {"nonces": [1], "wait": True})
    assert [artifact["nonce"] for artifact in answer.json()["artifacts"]] == [1]
    assert f"this server does not offer the decode scheme: {NO_CODEBOOK}" in caplog.text


@pytest.mark.parametrize("chain", [None, []], ids=["none", "empty"])
async def test_claims_without_chains_are_named(pod: Pod, chain: list[int] | None) -> None:
    nonces = list(range(10))
    artifacts = [
        {"nonce": nonce, "vector_b64": ""} | ({} if chain is None else {"k_points_steps": chain}) for nonce in nonces
    ]
    body = DECODE_GENERATE | {"nonces": nonces, "validation": {"artifacts": artifacts}}
    error = error_of(await pod.post("generate", body), 400, "InvalidRequest")
    assert "k_points_steps" in error.detail
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 2 more have none" in error.detail


@pytest.mark.parametrize("pod_settings", [SETUP], ids=["setup"])
async def test_a_reserve_that_holds_no_chain_of_the_network_is_refused_before_rounds_start(pod: Pod) -> None:
    pod.engine.decode_facts["reserve_bytes"] = 8_999  # eight blocks, and the empty one
    assert await schemes(pod) == (["prefill"], ["distance", "artifact"])
    error = error_of(await pod.post("generate", DECODE_GENERATE), 422, "SchemeNotOffered")
    assert error.detail == (
        f"{WITHOUT}8999 bytes do not hold one of the network's chains of 512 tokens: set more bytes aside."
    )


async def test_the_status_names_the_scheme(pod: Pod) -> None:
    assert (await pod.start(ARTIFACT | SLOT)).status_code == 200
    config = (await pod.status()).config
    assert config is not None
    assert (config.protocol, config.scheme, config.max_tokens) == ("artifact", "prefill", None)
