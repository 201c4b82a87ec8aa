# SPDX-License-Identifier: Apache-2.0
"""Bodies are JSON whether the client says so or not: the network's Go client sends no Content-Type."""

import json
from typing import Any

import pytest

from tests.support.builders.fuzz import PROOF
from tests.support.servers.pod import DISTANCE, SLOT, Pod
from vllm_poc.wire.answers import ErrorResponse
from vllm_poc.wire.messages import API_PREFIX

START = DISTANCE | SLOT | {"round_id": "r"}
#: A body for each route that takes one, and the call before which it would not be accepted.
BODIES: dict[str, tuple[Any, tuple[str, Any] | None]] = {
    "init": (DISTANCE | SLOT, None),
    "init/generate": (START, None),
    "init/validate": (DISTANCE, None),
    "extend": ({"round_id": "r", "end_index": 9}, ("init/generate", START | {"end_index": 5})),
    "validate": (PROOF, ("init/validate", DISTANCE)),
    "generate": (DISTANCE | {"nonces": [1, 2], "wait": True}, None),
}


async def post(pod: Pod, route: str, content: str, content_type: str | None) -> Any:  # noqa: ANN401
    headers = {} if content_type is None else {"Content-Type": content_type}
    return await pod.http.post(f"{API_PREFIX}/{route}", content=content, headers=headers)


async def test_every_route_with_a_body_is_tested(pod: Pod) -> None:
    paths = (await pod.http.get(f"{API_PREFIX}/openapi.json")).json()["paths"]
    with_body = {path.removeprefix(f"{API_PREFIX}/") for path, item in paths.items() if "requestBody" in str(item)}
    assert with_body == set(BODIES)


@pytest.mark.parametrize("content_type", [None, "", "application/json", "Application/JSON; charset=utf-8"])
@pytest.mark.parametrize("route", BODIES)
async def test_json_is_read_with_and_without_a_content_type(pod: Pod, route: str, content_type: str | None) -> None:
    body, before = BODIES[route]
    if before is not None:
        assert (await pod.post(*before)).status_code == 200
    answer = await post(pod, route, json.dumps(body), content_type)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "json", "application/xml", "application/x/y+json"],
)
@pytest.mark.parametrize("route", BODIES)
async def test_another_content_type_is_refused_with_the_remedy(pod: Pod, route: str, content_type: str) -> None:
    answer = await post(pod, route, json.dumps(BODIES[route][0]), content_type)
    assert answer.status_code == 415, answer.text
    error = ErrorResponse.model_validate(answer.json())
    assert error.reason == "UnsupportedMediaType"
    assert error.detail == f"the body is {content_type}: send JSON, with Content-Type: application/json or without any"


@pytest.mark.parametrize("route", BODIES)
async def test_what_is_wrong_with_json_is_said_as_such(pod: Pod, route: str) -> None:
    for content_type in (None, "application/json"):
        for content in ("[]", "{", ""):
            answer = await post(pod, route, content, content_type)
            assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidRequest")


@pytest.mark.parametrize("content_type", [None, "text/plain"])
@pytest.mark.parametrize("route", ["stop", "phase/validate"])
async def test_routes_without_a_body_do_not_care(pod: Pod, route: str, content_type: str | None) -> None:
    await pod.post("init", DISTANCE | SLOT)
    assert (await post(pod, route, "{}", content_type)).status_code == 200
