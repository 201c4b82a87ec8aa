# SPDX-License-Identifier: Apache-2.0
"""vLLM's commands that hold PoC back count only where vLLM has them, from those who may, and whatever their body is."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.pod import DISTANCE, PAUSING, SLOT, Pod, running_pod
from tests.wire.test_pauses import call, stands_still
from vllm_poc.server import commands
from vllm_poc.server.vllm_routes import BROKEN, DISCARDED, SLEEP, UPDATE, WORKERS_SLEEP

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NESTED = b"[" * 200_000
BODIES = (NESTED, b"", b"\xff", b"[]", b'{"method": 7}', b" " * 2**21)
KEY, TOKEN = "sesame", "token"
RESET = {"method": "reset_weights", "action": "reset"}
#: The same with more of everything than a request of PoC's own may have.
RESETS = {
    "a long text": json.dumps(RESET | {"args": ["x" * 100_000]}).encode(),
    "a long body": json.dumps(RESET | {"kwargs": {"handles": "x" * 2**21}}).encode(),
    "many values": json.dumps(RESET | {"args": [0] * 600_000}).encode(),
    "deep lists": json.dumps(RESET)[:-1].encode() + b',"args":' + b"[" * 60 + b"]" * 60 + b"}",
    "UTF-16": json.dumps(RESET).encode("utf-16"),
    "NaN": json.dumps(RESET | {"timeout": float("nan")}).encode(),
}


async def computes(pod: Pod) -> bool:
    before = (await pod.status()).total_checked
    return (await pod.reach(lambda s: s.total_checked > before)).paused_by is None


async def rpc(pod: Pod, method: str, *args: object, **kwargs: object) -> int:
    body = {"method": method, "args": args, "kwargs": kwargs}
    return (await pod.http.post("/collective_rpc", json=body)).status_code


@pytest.mark.parametrize("path", PAUSING)
async def test_a_command_that_vllm_does_not_have_holds_nobody_back(pod: Pod, path: str) -> None:
    """Many of them at once, too: without its development mode vLLM has hardly any."""
    pod.app.router.routes[:] = [route for route in pod.app.routes if getattr(route, "path", "") not in PAUSING]
    pod.engine.seconds_per_batch = 0.5
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda _: pod.engine.in_flight > 0)
    answers = [asyncio.create_task(pod.http.post(path, content=NESTED)) for _ in range(20)]
    await asyncio.sleep(0.02)
    assert (await pod.status()).paused_by is None
    assert [(await answer).status_code for answer in answers] == [404] * 20
    assert pod.engine.forgotten == 0
    assert await computes(pod)


@pytest.mark.parametrize("path", ["/collective_rpc", "/weight_checker"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: f"{body[:9]!r}")
async def test_any_body_of_a_command_reaches_vllm(pod: Pod, path: str, body: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    pod.received.clear()
    assert (await pod.http.post(path, content=pieces())).status_code == 200
    assert pod.received == [body]
    assert pod.engine.forgotten == 1


@pytest.mark.parametrize("path", ["/collective_rpc", "/weight_checker"])
@pytest.mark.parametrize("body", RESETS.values(), ids=RESETS)
async def test_whatever_vllm_can_read_counts(pod: Pod, path: str, body: bytes) -> None:
    assert (await pod.http.post(path, content=body)).status_code == 200
    assert pod.received == [body]
    assert (await pod.status()).paused_by == DISCARDED


@pytest.mark.parametrize("path", ["/collective_rpc", "/weight_checker"])
async def test_a_command_that_is_too_long_to_be_read_is_refused(
    pod: Pod, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = RESETS["a long body"]
    monkeypatch.setattr(commands, "MOST_BYTES", len(body) - 1)
    answer = await pod.http.post(path, content=body)
    assert (answer.status_code, answer.json()["reason"]) == (413, "BodyTooLarge")
    assert f"exceeds {len(body) - 1} bytes" in answer.json()["detail"]
    assert pod.received == []
    assert (await pod.http.post("/update_weights", content=body)).status_code == 200, "its route tells what it is"
    monkeypatch.setattr(commands, "MOST_BYTES", len(body))
    assert (await pod.http.post(path, content=body)).status_code == 200


@pytest.fixture
async def locked(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pod]:
    monkeypatch.setenv("VLLM_POC_TOKEN", TOKEN)
    async with running_pod(api_key=[KEY]) as other:
        yield other


@pytest.mark.parametrize("path", PAUSING)
async def test_a_server_with_keys_takes_commands_of_those_who_have_one(locked: Pod, path: str) -> None:
    for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {KEY}"}):
        answer = await locked.http.post(path, headers=header)
        assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")
        assert "--api-key" in answer.json()["detail"]
    assert locked.received == []
    for key in (KEY, TOKEN):
        assert (await locked.http.post(path, headers={"Authorization": f"Bearer {key}"})).status_code == 200


@pytest.mark.parametrize("load", ["/update_weights", "reload_weights", "load_model"])
@pytest.mark.parametrize("level", ["2", "%2B2", "02", "1&level=2"])
async def test_after_a_deep_sleep_the_weights_have_to_be_loaded(pod: Pod, level: str, load: str) -> None:
    """vLLM is awake before, with memory for weights that holds anything."""
    await pod.start(DISTANCE | SLOT)
    assert (await pod.http.post(f"/sleep?level={level}")).status_code == 200
    assert (await pod.status()).paused_by == f"{DISCARDED}; {SLEEP}"
    await call(pod, ["/wake_up"])
    await stands_still(pod)
    assert (await pod.status()).paused_by == DISCARDED
    await (call(pod, [load]) if load.startswith("/") else rpc(pod, load))
    assert await computes(pod)


async def test_a_deep_sleep_that_fails_half_way_is_one(pod: Pod) -> None:
    pod.refusing, pod.engine.asleep = {"/sleep"}, True
    assert (await pod.http.post("/sleep?level=2")).status_code == 500
    assert (await pod.status()).paused_by == f"{DISCARDED}; {SLEEP}"


@pytest.mark.parametrize("level", ["", "?level=0", "?level=1"])
async def test_after_another_sleep_they_need_not(pod: Pod, level: str) -> None:
    await pod.start(DISTANCE | SLOT)
    await call(pod, [f"/sleep{level}", "/wake_up"])
    assert await computes(pod)


async def answered(pod: Pod, status: int, method: str, *args: object) -> None:
    """Give the workers a command that vLLM answers so."""
    pod.refusing = {"/collective_rpc"} if status == 500 else set()
    assert await rpc(pod, method, *args) == status
    pod.refusing = set()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("slept", [("sleep", 1), ("sleep",), ("discard", ["kv_cache"]), ("discard", "kv_cache")])
async def test_workers_that_sleep_behind_the_engines_back_compute_when_they_were_woken_there(
    pod: Pod, slept: tuple[str, ...], status: int
) -> None:
    """The engine knows of no sleep, and its own command wakes nobody."""
    await pod.start(DISTANCE | SLOT)
    await answered(pod, status, *slept)
    await stands_still(pod)
    assert (await pod.status()).paused_by == WORKERS_SLEEP
    await call(pod, ["/wake_up"])
    assert (await pod.status()).paused_by == WORKERS_SLEEP
    pod.refusing = {"/collective_rpc"}
    assert await rpc(pod, "wake_up") == 500
    assert (await pod.status()).paused_by == WORKERS_SLEEP
    pod.refusing = set()
    await rpc(pod, "wake_up")
    assert await computes(pod)


async def test_workers_are_awake_when_all_of_their_memory_is_back(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    await rpc(pod, "sleep", level=1)
    for tags in (["weights"], [], "other", 7, None):
        assert (await pod.status()).paused_by == WORKERS_SLEEP
        await rpc(pod, "wake_up", tags=tags)
    assert await computes(pod)


async def test_connections_that_were_given_back_for_a_checkpoint_are_no_memory(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    for method in ("checkpoint_prepare", "sleep", "wake_up"):
        await rpc(pod, method)
        assert (await pod.status()).paused_by == WORKERS_SLEEP
    await rpc(pod, "checkpoint_restore")
    assert await computes(pod)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    "slept", [("sleep", 2), ("sleep", 0), ("sleep", "1"), ("discard", ["weights"]), ("discard", 7), ("discard",)]
)
async def test_workers_that_gave_their_weights_away_get_them_back_by_a_load_alone(
    pod: Pod, slept: tuple[str, ...], status: int
) -> None:
    await pod.start(DISTANCE | SLOT)
    await answered(pod, status, *slept)
    await rpc(pod, "wake_up")
    await stands_still(pod)
    assert (await pod.status()).paused_by == DISCARDED
    await rpc(pod, "reload_weights")
    assert await computes(pod)


@pytest.mark.parametrize("method", ["sleep", "discard"])
@pytest.mark.parametrize(
    "arguments", [{"args": "2"}, {"args": {"2": 0}}, {"args": 7}, {"kwargs": [["tags", "kv_cache"]]}, {"kwargs": "1"}]
)
async def test_arguments_in_another_form_may_be_those_by_which_weights_are_lost(
    pod: Pod, method: str, arguments: dict[str, object]
) -> None:
    """vLLM makes a tuple of whatever ``args`` are."""
    body = {"method": method} | arguments
    assert (await pod.http.post("/collective_rpc", json=body)).status_code == 200
    assert (await pod.status()).paused_by == f"{DISCARDED}; {WORKERS_SLEEP}"
    assert (await pod.http.post("/collective_rpc", json=body | {"method": "wake_up"})).status_code == 200
    assert (await pod.status()).paused_by == f"{DISCARDED}; {WORKERS_SLEEP}"
    for healing in ("wake_up", "reload_weights"):
        await rpc(pod, healing)
    assert (await pod.status()).paused_by is None


@pytest.mark.parametrize("begin", ["start_weight_update", "start_draft_weight_update"])
async def test_an_update_of_the_workers_weights_lasts_until_it_is_finished(pod: Pod, begin: str) -> None:
    await pod.start(DISTANCE | SLOT)
    await pod.reach(lambda s: s.total_checked > 0)
    assert await rpc(pod, begin) == 200
    await stands_still(pod)
    assert (await pod.status()).paused_by == UPDATE
    pod.refusing = {"/collective_rpc"}
    assert await rpc(pod, "update_weights", {}) == 500
    assert (await pod.status()).paused_by == f"{BROKEN}; {UPDATE}"
    pod.refusing = set()
    await rpc(pod, "update_weights", {})
    assert (await pod.status()).paused_by == UPDATE
    forgotten = pod.engine.forgotten
    await rpc(pod, "finish_weight_update")
    assert pod.engine.forgotten == forgotten + 1, "the parity check is made anew"
    assert await computes(pod)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    ("path", "body"), [("/weight_checker", {"action": "reset"}), ("/collective_rpc", {"method": "reset_weights"})]
)
async def test_weights_that_were_reset_are_computed_with_by_nobody(
    pod: Pod, path: str, body: dict[str, str], status: int
) -> None:
    pod.refusing = {path} if status == 500 else set()
    assert (await pod.http.post(path, json=body)).status_code == status
    pod.refusing = set()
    assert (await pod.status()).paused_by == DISCARDED
    assert (await pod.http.post("/weight_checker", json={"action": "checksum"})).status_code == 200
    assert (await pod.status()).paused_by == DISCARDED
    await rpc(pod, "reload_weights")
    assert (await pod.status()).paused_by is None


async def test_a_reload_that_fails_is_a_broken_update(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    pod.refusing = {"/collective_rpc"}
    assert await rpc(pod, "check_health") == 500
    assert await computes(pod)
    assert await rpc(pod, "reload_weights") == 500
    await stands_still(pod)
    assert (await pod.status()).paused_by == BROKEN
    pod.refusing = set()
    await rpc(pod, "check_health")
    assert (await pod.status()).paused_by == BROKEN
    await rpc(pod, "reload_weights")
    assert await computes(pod)
