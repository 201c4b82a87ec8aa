# SPDX-License-Identifier: Apache-2.0
"""Rounds that begin, run and end otherwise than in an epoch where all goes well."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from poc_gateway.errors import Refusal
from poc_gateway.node_api.create_pocround import NetworkRounds
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.clients.errors import ObjectInvalid, StoreUnavailable, UnreadableObject
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, INIT, PARAMS, error_of
from vllm_poc.wire.messages import InitGenerateRequest

PREFIXES = ("inference/pow", "pow")


async def test_a_distance_round_by_the_pods_routes(world: World) -> None:
    body = BLOCK | {"r_target": 1.405, "fraud_threshold": 0.01, "callback_url": "http://chain.example/cb"}
    started = await world.post("pow/init/generate", body)
    assert started.json() == {"status": "OK", "pow_status": {"status": "GENERATING"}}
    (spec,) = world.cluster.specs
    assert (spec["rTarget"], spec["callbackURL"]) == ("1.405", "http://chain.example/cb")
    assert spec["model"] == {"name": "tiny", "seqLen": 256, "strongRng": False}
    assert "artifact" not in spec
    status = (await world.get("pow/status")).json()
    assert (status["status"], status["state"], status["r_target"]) == ("GENERATING", "GENERATING", 1.405)
    assert (status["total_checked"], status["total_valid"], status["rate_per_second"]) == (640, 600, 12.5)
    assert (await world.post("pow/stop")).json() == {"status": "OK", "pow_status": {"status": "STOPPED"}}
    assert (await world.get("pow/status")).json()["status"] == "IDLE"


async def test_a_pods_status_tells_the_round(world: World) -> None:
    assert (await world.get("pow/status")).json()["config"] is None
    await world.post("pow/init/generate", INIT | {"batch_size": 8})
    body = (await world.get("pow/status")).json()
    told = {name: body["config"][name] for name in ("block_hash", "block_height", "public_key", "node_id", "k_dim")}
    assert told == {name: BLOCK.get(name, 12) for name in told}
    assert (body["config"]["node_count"], body["config"]["n_groups"], body["config"]["seq_len"]) == (3, 2, 64)
    assert body["config"]["batch_size"] == 8
    assert body["stats"] == {"total_processed": 640, "nonces_per_second": 12.5}


@pytest.mark.parametrize(("running", "word"), [(0, "IDLE"), (1, "MIXED"), (2, "GENERATING")])
async def test_slots_that_wait_are_told(world: World, running: int, word: str) -> None:
    await world.post("inference/pow/init/generate", INIT)
    world.cluster.run(next(iter(world.cluster.rounds)), running)
    assert (await world.get("inference/pow/status")).json()["status"] == word


async def test_without_pods_a_round_waits(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=0) as world:
        answer = await world.post("inference/pow/init/generate", INIT)
        assert (answer.status_code, answer.json()["backends"], answer.json()["results"]) == (200, 0, [])
        assert answer.json()["detail"].endswith("waits: no pod is ready")
        assert (await world.get("inference/pow/status")).json()["status"] == "NO_BACKENDS"
        assert (await world.get("state")).json()["state"] == "STOPPED"
        error_of(await world.post("inference/up", {"model": "tiny"}), 503, "NoBackends")


async def test_an_operator_that_does_not_run_is_told(world: World) -> None:
    world.cluster.operator_runs = False
    world.service.rounds = NetworkRounds(world.cluster, world.ml_node, stop_seconds=0.1)
    fresh = await world.post("inference/pow/init/generate", INIT)
    assert (fresh.status_code, fresh.json().get("detail")) == (200, None)
    (name,) = world.cluster.rounds
    world.cluster.age(name, datetime.now(UTC) - timedelta(seconds=11))
    for answer in (await world.post("inference/pow/init/generate", INIT), await world.get("inference/pow/status")):
        assert answer.status_code == 200
        assert answer.json()["detail"].startswith(f"the operator has not picked up round {name} yet")
    stopped = await world.post("inference/pow/stop")
    assert stopped.status_code == 200
    assert stopped.json()["errors"][0]["error"].startswith(f"round {name} was told to end, but the operator")
    # What is about to end is not what the client asks for: the operator will find both.
    assert (await world.post("inference/pow/init/generate", INIT)).status_code == 200
    assert list(world.cluster.rounds) == [name, f"{name}-2"]


async def test_a_round_that_ends_holds_no_other_up(world: World) -> None:
    """One of its pods is hung, or flushes its results: what it computes is the operator's matter."""
    world.service.rounds = NetworkRounds(world.cluster, world.ml_node, stop_seconds=0.1)
    await world.post("inference/pow/init/generate", INIT)
    (first,) = world.cluster.rounds
    error_of(await world.post("inference/pow/init/generate", INIT | {"block_height": 5000}), 409, "RoundConflict")
    world.cluster.operator_runs = False
    stopped = await world.post("inference/pow/stop")
    assert "was told to end" in stopped.json()["errors"][0]["error"]
    for _ in range(2):  # which the second time is the round that there is
        assert (await world.post("inference/pow/init/generate", INIT | {"block_height": 5000})).status_code == 200
    second = next(name for name in world.cluster.rounds if name != first)
    assert [one.spec.block_height for one in world.cluster.rounds.values()] == [BLOCK["block_height"], 5000]
    assert (await world.service.rounds.active()) == world.cluster.rounds[second]


async def test_a_stop_waits_for_pods_that_answer_alone(world: World) -> None:
    world.service.rounds = NetworkRounds(world.cluster, world.ml_node, stop_seconds=60)
    await world.post("inference/pow/init/generate", INIT)
    (name,) = world.cluster.rounds
    world.cluster.operator_runs = False
    stopping = asyncio.create_task(world.post("inference/pow/stop"))
    await asyncio.sleep(0.1)
    first, second = world.cluster.rounds[name].status.assignments
    hung = first.model_copy(update={"error": "no answer within 5 s"})
    world.cluster.set_status(name, state=State.STOPPING, observed_generation=2, assignments=[hung, second])
    await asyncio.sleep(0.1)
    assert not stopping.done()
    done = second.model_copy(update={"state": SlotState.DONE})
    world.cluster.set_status(name, assignments=[hung, done])
    answer = await asyncio.wait_for(stopping, 30)
    assert (answer.status_code, len(answer.json()["errors"])) == (200, 1)


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_stop_of_nothing_is_fine(podless: World, prefix: str) -> None:
    assert (await podless.post(f"{prefix}/stop")).status_code == 200


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"node_count": 0}, "node_count", "greater than or equal to 1"),
        ({"node_id": 3}, "", "node_id 3 must be below node_count 3"),
        ({"block_hash": None}, "block_hash", "valid string"),
        ({"url": "chain"}, "url", "must be an http:// or https:// URL"),
        ({"params": PARAMS | {"scheme": "decode"}}, "params.max_tokens", "must be at least 1"),
        ({"params": PARAMS | {"max_tokens": -1}}, "params.max_tokens", "greater than or equal to 0"),
        ({"params": PARAMS | {"max_tokens": 256}}, "params.max_tokens", "asks for decode steps"),
        ({"params": PARAMS | {"other": 1}}, "params.other", "not permitted"),
        ({"n_groups": 2, "group_id": 1}, "", "group_id, n_groups cannot be told to a cluster"),
        ({"params": None, "r_target": 1.4, "use_layer_hooks": True}, "", "use_layer_hooks and use_sign_flips"),
        ({"r_target": 1.4}, "", "either r_target"),
    ],
)
async def test_what_is_wrong_is_named(
    podless: World, prefix: str, change: dict[str, Any], field: str, message: str
) -> None:
    error = error_of(await podless.post(f"{prefix}/init/generate", INIT | change), 422, "InvalidRequest")
    assert error.errors[0].field == field
    assert message in error.detail
    assert podless.cluster.rounds == {}


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"decode": False}, {"scheme": "prefill", "max_tokens": 0}])
async def test_what_names_the_prefill_scheme_changes_nothing(world: World, more: dict[str, Any]) -> None:
    for params in (PARAMS, PARAMS | more):  # the same round
        answer = await world.post("inference/pow/init/generate", INIT | {"params": params})
        assert answer.status_code == 200, answer.text
    assert len(world.cluster.rounds) == 1
    body = BLOCK | {"params": PARAMS | more, "nonces": [7], "wait": True}
    assert (await world.post("inference/pow/generate", body)).status_code == 200


async def test_what_the_api_server_refuses_is_passed_on(podless: World) -> None:
    podless.cluster.refusal = ObjectInvalid(
        "spec.blockHash: must be the block's hash: 64 hexadecimal digits, without 0x"
    )
    error = error_of(await podless.post("pow/init/generate", INIT), 422, "InvalidRequest")
    assert error.detail.startswith("spec.blockHash")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_hash": "xyz"}, "block_hash"),
        ({"public_key": "two words"}, "public_key"),
        ({"node_count": 200_000}, "node_count"),
        ({"node_id": 100_000, "node_count": 200_000}, "node_id,node_count"),
        ({"params": PARAMS | {"seq_len": 10_000_000}}, "params.seq_len"),
        ({"params": PARAMS | {"k_dim": 10_000_000}}, "params.k_dim"),
        ({"params": None, "r_target": 1.4, "seq_len": 10_000_000}, "seq_len"),
    ],
)
async def test_what_the_crd_alone_refuses_is_named_as_in_the_request(
    world: World, change: dict[str, Any], field: str
) -> None:
    error = error_of(await world.post("pow/init/generate", INIT | change), 422, "InvalidRequest")
    fields = field.split(",")
    assert [one.field for one in error.errors] == fields
    assert error.detail.startswith(f"{fields[0]}: ")
    assert world.cluster.rounds == {}


async def test_what_is_wrong_in_the_template_is_not_blamed_on_the_request(podless: World) -> None:
    podless.cluster.refusal = ObjectInvalid(
        "invalid", [("spec.batchSize", "spec.batchSize in body should be greater than or equal to 1"), ("spec", "no")]
    )
    error = error_of(await podless.post("pow/init/generate", INIT), 422, "InvalidRequest")
    assert [(one.field, one.message) for one in error.errors] == [
        ("spec.batchSize", "should be greater than or equal to 1"),
        ("spec", "no"),
    ]


async def test_without_the_api_server_the_client_is_told_to_wait(podless: World) -> None:
    podless.cluster.fault = StoreUnavailable("HTTP 500: down")
    for answer in (
        await podless.post("pow/init/generate", INIT),
        await podless.post("stop"),
        await podless.get("state"),
    ):
        error_of(answer, 503, "ApiServerUnavailable")
        assert int(answer.headers["Retry-After"]) > 0


async def test_a_round_that_cannot_be_read_is_named(podless: World) -> None:
    body = {"metadata": {"namespace": "ns", "name": "bad", "generation": 1}}
    podless.cluster.fault = UnreadableObject("spec.nodes: Field required", body)
    for answer in (await podless.post("pow/init/generate", INIT), await podless.post("stop")):
        error = error_of(answer, 503, "RoundUnreadable")
        assert "PoCRound ns/bad cannot be read (spec.nodes: Field required)" in error.detail
        assert error.detail.endswith("or delete the round")


@pytest.mark.parametrize("path", ["init", "init/validate", "phase/generate", "phase/validate", "validate"])
async def test_phases_are_not_served(podless: World, path: str) -> None:
    assert "init/generate" in error_of(await podless.post(f"pow/{path}", {}), 501, "NotSupported").detail


async def test_receivers_outside_the_allow_list_are_refused(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=1, POC_GATEWAY_RECEIVER_ALLOW="*.example.org") as world:
        error = error_of(await world.post("pow/init/generate", INIT), 422, "InvalidRequest")
        assert error.errors[0].field == "url"


@pytest.mark.parametrize("field", ["url", "callback_url"])
@pytest.mark.parametrize(
    "url", ["http://user:password@chain.example/cb", "http://user@chain.example", "http://:p@chain"]
)
async def test_receivers_with_a_password_are_refused(podless: World, field: str, url: str) -> None:
    start = {name: value for name, value in INIT.items() if name != "url"} | {field: url}
    queued = BLOCK | {"params": PARAMS, "nonces": [1], field: url}
    for path, body in (("init/generate", start), ("generate", queued)):
        error = error_of(await podless.post(f"pow/{path}", body), 422, "InvalidRequest")
        assert error.errors[0].field == field
        assert "take them out" in error.detail
    assert podless.cluster.rounds == {}


Listing = Callable[[], Coroutine[Any, Any, list[PoCRound]]]


def an_init(**changes: Any) -> InitGenerateRequest:  # noqa: ANN401
    return InitGenerateRequest.model_validate(INIT | changes)


async def test_two_processes_begin_one_round(world: World) -> None:
    one, other = (NetworkRounds(world.cluster, world.ml_node, shared=True) for _ in range(2))
    found = await asyncio.gather(one.start(an_init(), "tiny"), other.start(an_init(), "tiny"))
    assert found[0].id == found[1].id
    assert len(world.cluster.rounds) == 1


async def test_of_two_processes_that_begin_different_rounds_at_most_one_does(world: World) -> None:
    world.cluster.list_rounds = slow_first(world.cluster.list_rounds)  # type: ignore[method-assign]
    one, other = (NetworkRounds(world.cluster, world.ml_node, shared=True) for _ in range(2))
    starting = [one.start(an_init(), "tiny"), other.start(an_init(block_height=8), "tiny")]
    found = await asyncio.gather(*starting, return_exceptions=True)
    refused = [answer for answer in found if isinstance(answer, Refusal)]
    assert [answer.status_code for answer in refused] == [409] * len(refused)
    assert refused
    assert len(world.cluster.rounds) == 2
    running = [name for name, round_ in world.cluster.rounds.items() if not round_.spec.finish]
    assert len(running) == len(found) - len(refused) <= 1


def slow_first(list_rounds: Listing) -> Listing:
    """Both see what there was before either begins."""

    async def listed() -> list[PoCRound]:
        found = await list_rounds()
        await asyncio.sleep(0.05)
        return found

    return listed
