# SPDX-License-Identifier: Apache-2.0
"""What the server tells about itself."""

from typing import Any

import pytest

from tests.support.servers.pod import Pod
from tests.wire.conftest import VLLM_VERSION
from vllm_poc.wire.messages import API_PREFIX

ROUTES = {
    "init": {"post"},
    "init/generate": {"post"},
    "init/validate": {"post"},
    "extend": {"post"},
    "phase/generate": {"post"},
    "phase/validate": {"post"},
    "validate": {"post"},
    "generate": {"post"},
    "generate/{request_id}": {"get"},
    "status": {"get"},
    "stop": {"post"},
    "versions": {"get"},
    "gpus": {"get"},
}


@pytest.fixture
async def document(pod: Pod) -> dict[str, Any]:
    document: dict[str, Any] = (await pod.http.get(f"{API_PREFIX}/openapi.json")).json()
    return document


async def test_versions(pod: Pod) -> None:
    answer = await pod.http.get(f"{API_PREFIX}/versions")
    assert answer.json() == {
        "vllm_version": VLLM_VERSION,
        "poc_validation_inference": True,
        "protocols": ["distance", "artifact"],
        "schemes": ["prefill"],
        "rebuilt_codebook": False,
    }


def test_the_document_has_every_route(document: dict[str, Any]) -> None:
    assert {path.removeprefix(API_PREFIX + "/"): set(item) for path, item in document["paths"].items()} == ROUTES


def test_every_call_says_what_it_does_and_how_it_fails(document: dict[str, Any]) -> None:
    for item in document["paths"].values():
        for call in item.values():
            assert call["description"]
            assert {"200", "400", "401", "404", "409", "413", "422", "429", "503"} <= set(call["responses"])
            error = call["responses"]["422"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorResponse"}


@pytest.mark.parametrize("pod_settings", [{"TOKEN": "s3cret"}])
async def test_the_document_is_guarded_like_the_rest(pod: Pod) -> None:
    assert (await pod.http.get(f"{API_PREFIX}/openapi.json")).status_code == 401
    headers = {"Authorization": "Bearer s3cret"}
    answer = await pod.http.get(f"{API_PREFIX}/openapi.json", headers=headers)
    assert answer.json()["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
