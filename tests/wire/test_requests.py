# SPDX-License-Identifier: Apache-2.0
"""What is refused and how; direct generation; the middleware's own answers."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.fakes.engine import distance, vector
from tests.support.servers.pod import ARTIFACT, DISTANCE, ROUND, SLOT, Pod
from vllm_poc.settings import SettingsError
from vllm_poc.wire.answers import ErrorResponse
from vllm_poc.wire.messages import API_PREFIX

START = DISTANCE | SLOT
GENERATE = DISTANCE | {"nonces": [5, 3, 9], "wait": True}
PARAMS = ARTIFACT["params"]
DECODE_PARAMS = PARAMS | {"decode": True, "max_tokens": 256}
DECODE_GENERATE = ROUND | {"params": DECODE_PARAMS, "nonces": [5, 3, 9], "wait": True}


def without(body: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != field}


BAD_STARTS: list[tuple[dict[str, Any], str]] = [
    (without(START, "block_hash"), "block_hash: Field required"),
    (without(START, "node_id"), "node_id: Field required"),
    (START | {"block_hash": ""}, "block_hash"),
    (START | {"block_height": -1}, "block_height"),
    (START | {"block_height": 2**63}, "block_height"),
    (START | {"public_key": 5}, "public_key"),
    (START | {"batch_size": 0}, "batch_size: must be at least 1: only the decode scheme has 0"),
    (ARTIFACT | SLOT | {"batch_size": 0}, "batch_size: must be at least 1: only the decode scheme has 0"),
    (START | {"batch_size": -1}, "batch_size"),
    (START | {"node_id": -1}, "node_id"),
    (START | {"node_id": 3}, "node_id 3 must be below node_count 3"),
    (START | {"node_count": 0}, "node_count"),
    (START | {"group_id": 2}, "group_id 2 must be below n_groups 2"),
    (START | {"n_groups": 0}, "n_groups"),
    (START | {"r_target": "NaN"}, "r_target"),
    (START | {"r_target": 2.5}, "r_target"),
    (ROUND | SLOT, "set either r_target (distance protocol) or params"),
    (START | {"params": PARAMS}, "set either r_target (distance protocol) or params"),
    (START | {"seq_len": 0}, "seq_len"),
    (START | {"seq_len": 1025}, "seq_len: 1025 exceeds the server's max_model_len of 1024"),
    (START | {"start_index": -1}, "start_index"),
    (START | {"start_index": 2**31}, "start_index 2147483648 lies beyond the int32 range"),
    (START | {"end_index": 2**31 + 1}, "end_index"),
    (START | {"callback_url": "ftp://host/x"}, "callback_url"),
    (START | {"callback_url": "http://host/x#y"}, "callback_url: has a fragment (#y)"),
    (START | {"callback_url": "http://host/x?y=z"}, "callback_url: has a query (?y=z)"),
    (START | {"callback_url": "http://host/x?"}, "callback_url: has a query (?)"),
    (START | {"callback_url": "http://a..b/"}, "callback_url: a..b is no host name"),
    (START | {"callback_url": f"http://{'a' * 64}.b/"}, f"callback_url: {'a' * 64}.b is no host name"),
    (START | {"callback_url": f"http://{'a.' * 130}b/"}, "callback_url: the host name has 261 characters"),
    (START | {"callback_url": "http://b\u00fccher/"}, "callback_url: b\u00fccher is an internationalised host name"),
    (START | {"callback_url": "http://h:0/"}, "callback_url: must be an http:// or https:// URL"),
    (START | {"callback_url": "http://[fe80::1%25eth0]/"}, "callback_url: [fe80::1%25eth0] has a zone"),
    (START | {"callback_url": "http://a@b@h/"}, "callback_url: must be an http:// or https:// URL"),
    (START | {"url": "http://a/", "callback_url": "http://b/"}, "set url or callback_url, not both"),
    (START | {"round_id": ""}, "round_id"),
    (ARTIFACT | SLOT | {"params": PARAMS | {"k_dim": 0}}, "params.k_dim"),
    (ARTIFACT | SLOT | {"params": PARAMS | {"k_dim": 65}}, "params.k_dim: 65 exceeds the hidden size of 64"),
    (ARTIFACT | SLOT | {"params": PARAMS | {"seq_len": 4096}}, "params.seq_len: 4096 exceeds"),
    (ARTIFACT | SLOT | {"params": PARAMS | {"decode": True}}, "params.max_tokens: must be at least 1 in the decode"),
    (
        ARTIFACT | SLOT | {"params": PARAMS | {"scheme": "decode", "max_tokens": 0}},
        "params.max_tokens: must be at least 1 in the decode",
    ),
    (ARTIFACT | SLOT | {"params": PARAMS | {"decode": True, "max_tokens": 4097}}, "params.max_tokens: Input should be"),
    (ARTIFACT | SLOT | {"params": PARAMS | {"scheme": "both"}}, "params.scheme: Input should be 'prefill' or 'decode'"),
    (ARTIFACT | SLOT | {"params": PARAMS | {"max_tokens": 256}}, "params.max_tokens: 256 asks for decode steps"),
]
BAD_GENERATES: list[tuple[dict[str, Any], str]] = [
    (GENERATE | {"per_nonce_reflection": True}, "per_nonce_reflection: is not supported"),
    (GENERATE | {"enforced_k_steps": {"0": [1, 2]}}, "enforced_k_steps belongs to the decode scheme"),
    (DECODE_GENERATE | {"enforced_k_steps": {"5": [1, 2]}}, "enforced_k_steps must have a chain for each of nonces"),
    (DECODE_GENERATE | {"enforced_k_steps": {"5": [2**63]}}, "enforced_k_steps.5"),
    (DECODE_GENERATE | {"enforced_k_steps": {"5": [1], "3": [], "9": [1]}}, "enforced_k_steps has an empty chain"),
    (GENERATE | {"callback_url": "http://a..b/"}, "callback_url: a..b is no host name"),
    (without(GENERATE, "nonces"), "nonces: Field required"),
    (GENERATE | {"nonces": []}, "nonces"),
    (GENERATE | {"nonces": [1, 1]}, "nonces must be unique"),
    (GENERATE | {"nonces": [2**31]}, "nonces.0"),
    (GENERATE | {"nonces": [0, -1]}, "nonces.1"),
    (GENERATE | {"nonces": [True]}, "nonces.0: must be an integer, not a boolean"),
    (GENERATE | {"validation": {"artifacts": []}}, "validation.artifacts: List should have at least 1 item"),
    (
        GENERATE | {"validation": {"artifacts": [{"nonce": 5, "vector_b64": ""}]}},
        "validation compares artifacts and needs params; distances are compared by POST validate",
    ),
    (GENERATE | {"stat_test": {"p_mismatch": 1.5}}, "stat_test.p_mismatch"),
    (GENERATE | {"stat_test": {"dist_threshold": "NaN"}}, "stat_test.dist_threshold"),
    (GENERATE | {"stat_test": {"p_value_threshold": -1}}, "stat_test.p_value_threshold"),
    (GENERATE | {"callback_url": "ftp://host/x"}, "callback_url"),
    (GENERATE | {"callback_url": "http://host/x#y"}, "callback_url: has a fragment (#y)"),
    (GENERATE | {"url": "http://host/x?y=z"}, "url: has a query (?y=z)"),
]


def error_of(answer: httpx.Response, status: int, reason: str) -> ErrorResponse:
    assert answer.status_code == status, answer.text
    error = ErrorResponse.model_validate(answer.json())
    assert error.reason == reason
    return error


@pytest.mark.parametrize(("body", "message"), BAD_STARTS, ids=[message for _, message in BAD_STARTS])
async def test_bad_starts_are_refused_by_the_name_of_the_field(pod: Pod, body: dict[str, Any], message: str) -> None:
    reason = "SequenceTooLong" if "seq_len" in message and "exceeds" in message else "InvalidRequest"
    error = error_of(await pod.start(body), 422, reason)
    assert error.detail.startswith(message)
    assert error.errors
    assert (await pod.status()).config is None


@pytest.mark.parametrize(("body", "message"), BAD_GENERATES, ids=[message for _, message in BAD_GENERATES])
async def test_bad_generates_are_refused_by_the_name_of_the_field(pod: Pod, body: dict[str, Any], message: str) -> None:
    error = error_of(await pod.post("generate", body), 422, "InvalidRequest")
    assert error.detail.startswith(message)
    assert pod.engine.computed == []


@pytest.mark.parametrize("route", ["init/generate", "generate"])
@pytest.mark.parametrize(("content", "field"), [("{", "body"), ("", ""), ("[]", "")])
async def test_a_body_that_is_no_object_is_refused(pod: Pod, route: str, content: str, field: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await pod.http.post(f"{API_PREFIX}/{route}", content=content, headers=headers)
    assert error_of(answer, 422, "InvalidRequest").errors[0].field == field


async def test_another_model_is_a_conflict(pod: Pod) -> None:
    params = PARAMS | {"model": "other"}
    error = error_of(await pod.start(ARTIFACT | SLOT | {"params": params}), 409, "ModelMismatch")
    assert error.detail == ("params.model: other was requested, but this server serves /models/tiny, tiny")


async def test_the_model_may_be_named_by_its_path(pod: Pod) -> None:
    params = PARAMS | {"model": "/models/tiny"}
    assert (await pod.start(ARTIFACT | SLOT | {"params": params})).status_code == 200


async def test_a_model_that_poc_cannot_use_is_a_conflict(pod: Pod) -> None:
    pod.engine.facts["refusal"] = "LoRA is on: remove --enable-lora"
    assert error_of(await pod.start(START), 409, "ModelUnsupported").detail.startswith("LoRA")


async def test_a_sequence_that_no_forward_can_hold_is_refused(pod: Pod) -> None:
    pod.engine.facts["max_batch_tokens"] = 32
    error = error_of(await pod.start(START), 422, "SequenceTooLong")
    assert error.detail == "seq_len: 64 exceeds the server's max_batch_tokens of 32"


@pytest.mark.parametrize("pod_settings", [{"CALLBACK_ALLOW": "*.poc.svc, gateway"}])
async def test_callbacks_go_to_allowed_hosts_only(pod: Pod) -> None:
    error = error_of(await pod.start(START | {"callback_url": "http://evil/x"}), 422, "InvalidRequest")
    assert error.detail.startswith("callback_url: callbacks to evil are not allowed")
    assert (await pod.start(START | {"callback_url": "http://A.poc.svc:8080/x"})).status_code == 200


async def test_generate_distances_in_the_order_of_the_nonces(pod: Pod) -> None:
    nonces = list(range(50, 0, -1))
    answer = await pod.post("generate", GENERATE | {"nonces": nonces})
    body = answer.json()
    assert answer.status_code == 200
    assert body["nonces"] == nonces
    assert body["distances"] == [distance(nonce) for nonce in nonces]
    valid = [nonce for nonce in nonces if distance(nonce) < 1.405]
    assert body["valid_nonces"] == valid
    assert (body["total_checked"], body["total_valid"]) == (50, len(valid))
    assert "artifacts" not in body
    assert max(len(batch["nonces"]) for batch in pod.engine.batches) == 16


async def test_a_distance_at_the_target_is_not_valid(pod: Pod) -> None:
    answer = await pod.post("generate", GENERATE | {"r_target": distance(5)})
    assert 5 in answer.json()["nonces"]
    assert 5 not in answer.json()["valid_nonces"]


async def test_generate_artifacts(pod: Pod) -> None:
    answer = await pod.post("generate", ARTIFACT | {"nonces": [7, 2], "wait": True, "node_id": 0, "node_count": 1})
    body = answer.json()
    assert body["artifacts"] == [{"nonce": n, "vector_b64": vector(n, 4)} for n in (7, 2)]
    assert body["encoding"] == {"dtype": "f16", "k_dim": 4, "endian": "le"}
    assert "distances" not in body


async def test_generate_leaves_out_what_stays_not_finite(pod: Pod) -> None:
    pod.engine.sick.update({3: 1, 9: 2})
    answer = await pod.post("generate", GENERATE)
    assert answer.json()["nonces"] == [5, 3]
    assert answer.json()["not_computed"] == [9]


async def test_generate_waits_for_the_end_of_a_round(pod: Pod) -> None:
    await pod.start(START)
    answer = asyncio.create_task(pod.post("generate", GENERATE))
    await pod.reach(lambda s: s.total_checked > 100)
    assert not answer.done()
    await pod.post("stop")
    assert (await answer).json()["nonces"] == [5, 3, 9]


@pytest.mark.parametrize("pod_settings", [{"REQUEST_SECONDS": "0.1"}])
async def test_generate_does_not_wait_for_a_round_for_ever(pod: Pod) -> None:
    await pod.start(START)
    assert "a round runs" in error_of(await pod.post("generate", GENERATE), 503, "Busy").detail


@pytest.mark.parametrize("pod_settings", [{"REQUEST_SECONDS": "0.1"}])
async def test_generate_does_not_wait_for_chat_for_ever(pod: Pod) -> None:
    pod.engine.output_processor.busy = True
    error = error_of(await pod.post("generate", GENERATE), 503, "Busy")
    assert "not done within 0.1 s" in error.detail


async def test_generate_reports_a_failing_engine(pod: Pod) -> None:
    await pod.status()
    pod.engine.fault = RuntimeError("CUDA error")
    error = error_of(await pod.post("generate", GENERATE), 503, "EngineFailed")
    assert error.detail == "poc_compute failed: CUDA error"


async def test_an_engine_that_cannot_describe_itself_starts_nothing(pod: Pod) -> None:
    pod.engine.fault = AttributeError("no poc_describe")
    error_of(await pod.start(START), 503, "EngineFailed")
    assert (await pod.status()).model.max_seq_len == 0
    pod.engine.fault = None
    assert (await pod.start(START)).status_code == 200


async def test_small_requests_take_no_thread(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would wait for its turn among all threads of a busy server, for each poll."""

    async def refused(function: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{function} takes a thread")

    monkeypatch.setattr("anyio.to_thread.run_sync", refused)
    monkeypatch.setattr(asyncio, "to_thread", refused)
    assert (await pod.start(START)).status_code == 200
    await pod.status()
    assert (await pod.post("stop")).status_code == 200
    assert (await pod.post("generate", GENERATE)).status_code == 200
    assert (await pod.http.get(f"{API_PREFIX}/versions")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [("GET", "/nothing", 404, "NotFound"), ("GET", "/stop", 405, "MethodNotAllowed"), ("GET", "", 404, "NotFound")],
)
async def test_unknown_routes_are_json_errors(pod: Pod, method: str, path: str, status: int, reason: str) -> None:
    error_of(await pod.http.request(method, API_PREFIX + path), status, reason)


async def test_other_routes_pass_through_untouched(pod: Pod) -> None:
    assert (await pod.http.get("/v1/models")).json() == {"data": ["tiny"]}
    assert (await pod.http.get("/api/v1/power")).json() == {"detail": "Not Found"}


async def test_before_the_engine_runs_the_answer_is_503() -> None:
    pod = Pod()
    answer = await pod.http.get(f"{API_PREFIX}/status")
    error_of(answer, 503, "EngineNotReady")
    assert answer.headers["Retry-After"]
    assert (await pod.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("pod_settings", [{"TOKEN": "s3cret"}])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cr\u00e9t"])
async def test_the_token_guards_the_poc_routes_alone(pod: Pod, header: str | None) -> None:
    headers = {b"Authorization": header.encode()} if header else {}
    answer = await pod.http.get(f"{API_PREFIX}/status", headers=headers)
    assert "VLLM_POC_TOKEN" in error_of(answer, 401, "Unauthorized").detail
    assert (await pod.http.get("/v1/models")).status_code == 200
    good = {"Authorization": "Bearer s3cret"}
    assert (await pod.http.get(f"{API_PREFIX}/status", headers=good)).status_code == 200


@pytest.mark.parametrize("way", ["flag", "environment"])
async def test_vllms_own_keys_guard_the_poc_routes_where_they_have_no_token(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "flag":
        pod.app.state.args.api_key = ["one", "two"]
    monkeypatch.setenv("VLLM_API_KEY", "two" if way == "environment" else "unused")
    for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Bearer unused"}):
        error = error_of(await pod.http.get(f"{API_PREFIX}/status", headers=header), 401, "Unauthorized")
        assert error.detail.startswith("send a key of vLLM's --api-key as 'Authorization: Bearer <key>', or set ")
    good = {"Authorization": "Bearer two"}
    assert (await pod.http.get(f"{API_PREFIX}/status", headers=good)).status_code == 200


@pytest.mark.parametrize("pod_settings", [{"TOKEN": "s3cret"}])
async def test_vllms_own_keys_are_for_chat_where_poc_has_a_token(pod: Pod) -> None:
    pod.app.state.args.api_key = ["one"]
    chat, poc = ({"Authorization": f"Bearer {token}"} for token in ("one", "s3cret"))
    error_of(await pod.http.get(f"{API_PREFIX}/status", headers=chat), 401, "Unauthorized")
    assert (await pod.http.get(f"{API_PREFIX}/status", headers=poc)).status_code == 200


async def test_a_misspelt_setting_leaves_no_server_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the middleware was added by hand, past the command line's check."""
    monkeypatch.setenv("VLLM_POC_TOKENS", "s3cret")
    for path in (f"{API_PREFIX}/status", "/v1/models"):
        with pytest.raises(SettingsError, match="did you mean VLLM_POC_TOKEN"):
            await Pod().http.get(path)


@pytest.mark.parametrize("pod_settings", [{"BODY_BYTES": "1024"}])
async def test_large_bodies_are_refused(pod: Pod) -> None:
    answer = await pod.post("generate", GENERATE | {"nonces": list(range(1000))})
    assert "1024 bytes" in error_of(answer, 413, "BodyTooLarge").detail
