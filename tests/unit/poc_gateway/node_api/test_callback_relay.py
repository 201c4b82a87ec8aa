# SPDX-License-Identifier: Apache-2.0
"""Callbacks that are relayed: only to addresses of this ML node, and only what the ledger has from its pods."""

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import Connection, insert

from poc_gateway.ingest import deliveries
from poc_gateway.ingest.deliveries import MOST_VALUES, parse_artifacts, read_generated
from poc_gateway.ingest.storing import store as store_deliveries
from poc_gateway.node_api import callback_relay
from poc_gateway.outbox import endings
from poc_gateway.outbox.ledger import now
from poc_gateway.outbox.states import Event, State
from poc_gateway.store.rounds import KnownRound, load, write_down
from poc_gateway.store.schema import callbacks
from tests.support.fakes.callback_receiver import CallbackReceiver, callback_receiver
from tests.support.fakes.engine import vector
from tests.support.fakes.reference_pod import reference_pod
from tests.support.servers.http_server import free_port, serve
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, INIT, PARAMS, error_of, validation
from tests.unit.poc_gateway.node_api.test_replay import finished
from vllm_poc.wire.artifacts import CODEBOOK_POINTS
from vllm_poc.wire.callbacks import GeneratedArtifacts

PATH = "inference/pow/callback-relay"
PRIVATE: dict[str, Any] = {"POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8"}
#: Of node 1 of 3, whose two pods are groups: its first slot begins at 1, the other at 4.
NONCES = [1, 4, 7, 10, 13]


class Relay(NamedTuple):
    """A gateway, and the receiver of its round, of which these results are stored."""

    world: World
    receiver: CallbackReceiver
    known: KnownRound

    async def send(self, suffix: str, body: object, *, token: str | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = token_of(self.receiver.url) if token is None else token
        return await self.world.http.post(f"/api/v1/{PATH}/{token}/{suffix}", content=content)


def token_of(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def generated(nonces: list[int], **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """What a pod delivers."""
    about = {name: BLOCK[name] for name in ("public_key", "block_hash", "block_height", "node_id")}
    artifacts = [{"nonce": nonce, "vector_b64": vector(nonce, 12)} for nonce in nonces]
    return about | {"artifacts": artifacts, "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"}} | fields


async def stored(world: World, body: dict[str, Any]) -> KnownRound:
    """Write the newest round down with what a pod delivered."""
    *_, round_ = world.cluster.rounds.values()
    known = await world.database.write(partial(write_down, round_=round_))
    delivery = read_generated(known, json.dumps(body).encode())
    assert not delivery.refused
    await world.database.write(partial(store_deliveries, deliveries=[delivery], now=now()))
    return known


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    async with running_world(tmp_path, pods=2, also={"other": {}}, **PRIVATE) as world, callback_receiver() as receiver:
        world.http.base_url = httpx.URL("http://gateway/nodes/one")
        started = await world.post("inference/pow/init/generate", INIT | {"url": receiver.url})
        assert started.status_code == 200, started.text
        yield Relay(world, receiver, await stored(world, generated(NONCES)))


@pytest.mark.parametrize("status", [200, 202, 400, 404, 503])
async def test_what_pods_delivered_is_sent_and_the_receivers_status_returned(relay: Relay, status: int) -> None:
    relay.receiver.answer = status
    for body in (generated(NONCES), generated([7])):
        answer = await relay.send("generated", body)
        assert answer.status_code == status
        if status >= HTTPStatus.BAD_REQUEST:
            assert f"HTTP {status}" in error_of(answer, status, "ReceiverRefused").detail
    assert relay.receiver.attempts == 2
    assert relay.receiver.payloads == ([generated(NONCES), generated([7])] if status < 300 else [])


async def test_what_is_not_compared_with_the_ledger_is_not_sent(relay: Relay) -> None:
    """A receiver that reads steps beside a vector would take a round of vectors for one of chains."""
    beside = {"k_points_steps": [1, 2], "n_sphere_mismatches": 0, "mismatch_margin_max": 0.0}
    body = generated(NONCES)
    body["artifacts"] = [artifact | beside for artifact in body["artifacts"]]
    assert (await relay.send("generated", body)).status_code == 200
    assert relay.receiver.payloads == [generated(NONCES)]


@pytest.mark.parametrize("written", ["{}", "{}/"], ids=["as it is", "with a slash"])
async def test_the_token_is_of_the_address_as_the_network_wrote_it(relay: Relay, written: str) -> None:
    token = token_of(written.format(relay.receiver.url))
    for spelt in (token, token.upper()):
        assert (await relay.send("generated", generated(NONCES), token=spelt)).status_code == 200


async def test_other_addresses_and_callbacks_are_not_found(relay: Relay) -> None:
    foreign = token_of("http://elsewhere.example/callback")
    for token in (foreign, token_of(relay.receiver.url)[:31], "x" * 600):
        error_of(await relay.send("generated", generated(NONCES), token=token), 404, "CallbackUnknown")
    for suffix in ("stop", "Generated", "generated%20"):
        error_of(await relay.send(suffix, generated(NONCES)), 404, "CallbackUnknown")
    error_of(await relay.send("generated%2F..%2Fstop", generated(NONCES)), 404, "NotFound")
    # An ML node tells nothing of the rounds of another.
    relay.world.http.base_url = httpx.URL("http://gateway/nodes/other")
    error_of(await relay.send("generated", generated(NONCES)), 404, "CallbackUnknown")
    assert relay.receiver.attempts == 0


FORGED = {
    "another vector": generated(NONCES, artifacts=[{"nonce": 1, "vector_b64": vector(2, 12)}]),
    "a nonce that no pod delivered": generated([1, 16]),
    "a nonce of another node": generated([1, 2]),
    "no nonce": generated([]),
    "another node": generated(NONCES, node_id=2),
    "another block": generated(NONCES, block_height=4712),
    "another key": generated(NONCES, public_key="other"),
    "a nonce many times": generated([1] * 1000),
    "another length": generated(NONCES, encoding={"dtype": "f16", "k_dim": 4, "endian": "le"}),
    "distances": {**generated([]), "nonces": [1], "dist": [0.5], "r_target": 1.4},
}


@pytest.mark.parametrize("forged", FORGED)
async def test_what_no_pod_delivered_is_not_relayed(relay: Relay, forged: str) -> None:
    answer = await relay.send("generated", FORGED[forged])
    assert "with their credential" in error_of(answer, 403, "NotDelivered").detail
    assert (relay.receiver.attempts, relay.receiver.payloads) == (0, [])


async def test_a_verdict_that_no_pod_told_is_not_relayed(relay: Relay) -> None:
    about = {name: BLOCK[name] for name in ("public_key", "block_hash", "block_height", "node_id")}
    verdict = {"n_total": 1, "n_mismatch": 1, "mismatch_nonces": [1], "p_value": 0.0, "fraud_detected": True}
    error_of(await relay.send("validated", about | verdict | {"request_id": "5001:x"}), 403, "NotDelivered")
    assert relay.receiver.verdicts == []


async def test_keys_that_another_parser_would_take_are_not_passed_on(relay: Relay) -> None:
    other = {"nonce": 1, "vector_b64": vector(2, 12)}
    answer = await relay.send("generated", generated(NONCES) | {"Artifacts": [other], "BLOCK_HEIGHT": 1, "more": 1})
    assert answer.status_code == 200
    assert relay.receiver.payloads == [generated(NONCES)]


async def test_what_the_ledger_does_not_send_is_not_passed_on(relay: Relay) -> None:
    answer = await relay.send("generated", generated(NONCES, request_id="made up"))
    assert answer.status_code == 200
    assert relay.receiver.payloads == [generated(NONCES)]


async def test_distances_are_sent_with_the_target_of_their_round(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=2, **PRIVATE) as world, callback_receiver() as receiver:
        asked = BLOCK | {"r_target": 1.405, "fraud_threshold": 0.01, "callback_url": receiver.url}
        started = await world.post("pow/init/generate", asked)
        assert started.status_code == 200, started.text
        about = {name: BLOCK[name] for name in ("public_key", "block_hash", "block_height", "node_id")}
        body = about | {"nonces": [1, 4], "dist": [0.5, 0.25], "r_target": 1.405}
        relay = Relay(world, receiver, await stored(world, body))
        assert (await relay.send("generated", body | {"r_target": 99.0, "request_id": "x"})).status_code == 200
        assert receiver.payloads == [body]
        twice = body | {"nonces": [1, 1], "dist": [0.5, 0.5]}
        error_of(await relay.send("generated", twice), 403, "NotDelivered")


STEPS = 256


def generated_chains(nonces: Sequence[int]) -> dict[str, Any]:
    """What a pod delivers in the decode scheme."""
    chain = [step % CODEBOOK_POINTS for step in range(STEPS + 1)]
    artifacts = [{"nonce": nonce, "vector_b64": "", "k_points_steps": chain} for nonce in nonces]
    return generated([]) | {"artifacts": artifacts}


async def test_values_are_counted_as_the_scheme_of_the_round_has_them(tmp_path: Path) -> None:
    """A message of chains may have three times the values of one of vectors."""
    params = PARAMS | {"decode": True, "max_tokens": STEPS}
    async with (
        running_world(tmp_path, pods=0, **PRIVATE) as world,
        callback_receiver() as receiver,
        reference_pod("0.2.0") as pod,
        serve(pod.app, "127.0.0.1", world.port),
    ):
        world.announce("127.0.0.1")
        started = await world.post("inference/pow/init/generate", INIT | {"url": receiver.url, "params": params})
        assert started.status_code == 200, started.text
        body = generated_chains(range(1, 3 * (MOST_VALUES // STEPS + 1), 3))
        relay = Relay(world, receiver, await stored(world, body))
        text = json.dumps(body, separators=(",", ":")).encode()
        assert text.count(b",") > MOST_VALUES
        assert (await relay.send("generated", text)).status_code == 200
        assert receiver.payloads == [body]
        # A verdict has as few as ever, and so has what is of no round.
        for suffix, sent in (("validated", text), ("generated", text.replace(b'"AqBX"', b'"other"'))):
            error_of(await relay.send(suffix, sent), 413, "BodyTooLarge")


async def test_many_values_are_too_many_where_no_round_has_chains(relay: Relay) -> None:
    text = json.dumps(generated(NONCES) | {"more": [0] * MOST_VALUES}, separators=(",", ":")).encode()
    error_of(await relay.send("generated", text), 413, "BodyTooLarge")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"public_key": 1}', b"\xff\xfe{\x00}\x00", b"\x00"])
async def test_what_is_no_callback_is_refused(relay: Relay, body: bytes) -> None:
    answer = await relay.send("generated", body)
    assert answer.status_code in {400, 422}, answer.text
    assert answer.json()["errors"]
    assert relay.receiver.attempts == 0


async def test_a_receiver_that_cannot_be_reached_is_a_bad_gateway(relay: Relay) -> None:
    relay.receiver.answer = 302
    answer = await relay.send("generated", generated(NONCES))
    assert "redirects are not followed" in error_of(answer, 502, "ReceiverUnreachable").detail
    url = f"http://127.0.0.1:{free_port()}"
    name = next(iter(relay.world.cluster.rounds))
    found = relay.world.cluster.rounds[name]
    spec = found.spec.model_copy(update={"callback_url": url})
    relay.world.cluster.rounds[name] = found.model_copy(update={"spec": spec})
    answer = await relay.send("generated", generated(NONCES), token=token_of(url))
    error_of(answer, 502, "ReceiverUnreachable")


async def test_only_a_few_callbacks_are_relayed_at_once(relay: Relay) -> None:
    relay.receiver.delay = 2.0
    posts = [asyncio.create_task(relay.send("generated", generated([7]))) for _ in range(callback_relay.MOST_AT_ONCE)]
    async with asyncio.timeout(30):
        while relay.receiver.attempts < len(posts):  # noqa: ASYNC110 - the count is no event
            await asyncio.sleep(0.01)
    answer = await relay.send("generated", generated([7]))
    assert "send it again" in error_of(answer, 429, "TooManyRelays").detail
    assert answer.headers["Retry-After"] == "10"
    assert [one.status_code for one in await asyncio.gather(*posts)] == [200] * len(posts)
    # Those that are done, and those that fail, leave their places.
    relay.receiver.delay = 0.0
    for _ in posts:
        error_of(await relay.send("generated", generated([16])), 403, "NotDelivered")
    assert (await relay.send("generated", generated([7]))).status_code == 200


async def test_addresses_that_the_settings_forbid_are_not_asked(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=2) as world, callback_receiver() as receiver:
        await world.post("inference/pow/init/generate", INIT | {"url": receiver.url})
        relay = Relay(world, receiver, await stored(world, generated(NONCES)))
        answer = await relay.send("generated", generated(NONCES))
        assert "POC_GATEWAY_RECEIVER_PRIVATE" in error_of(answer, 502, "ReceiverUnreachable").detail
        assert receiver.attempts == 0


async def abandon(world: World, known: KnownRound) -> None:
    ended = partial(endings.end_some, round_id=known.id, event=Event.ABANDONED, reason="test", since=None)
    while await world.database.write(ended):
        pass


async def test_what_was_given_up_is_not_relayed(relay: Relay) -> None:
    await abandon(relay.world, relay.known)
    answer = await relay.send("generated", generated([7]))
    assert "abandoned" in error_of(answer, 409, "HeldBack").detail
    assert relay.receiver.attempts == 0


async def test_a_round_that_was_asked_for_anew_is_sent_though_the_first_was_given_up(relay: Relay) -> None:
    await abandon(relay.world, relay.known)
    await relay.world.post("inference/pow/stop")
    started = await relay.world.post("inference/pow/init/generate", INIT | {"url": relay.receiver.url})
    assert started.status_code == 200, started.text
    error_of(await relay.send("generated", generated([7])), 409, "HeldBack")
    again = await stored(relay.world, generated([7, 10]))
    assert again.id != relay.known.id
    assert (await relay.send("generated", generated([7]))).status_code == 200
    error_of(await relay.send("generated", generated([1])), 409, "HeldBack")
    await abandon(relay.world, again)
    error_of(await relay.send("generated", generated([7])), 409, "HeldBack")
    assert relay.receiver.payloads == [generated([7])]


async def test_a_message_is_read_once_however_many_rounds_have_its_address(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await relay.world.post("inference/pow/stop")
        fields = {"url": relay.receiver.url, "block_height": BLOCK["block_height"] + number % 2}
        started = await relay.world.post("inference/pow/init/generate", INIT | fields)
        assert started.status_code == 200, started.text
    read, looked = list[str](), list[str]()

    def parsed(body: bytes, most_values: int) -> tuple[GeneratedArtifacts, list[deliveries.Refused]]:
        read.append(threading.current_thread().name)
        return parse_artifacts(body, most_values)

    def loaded(connection: Connection, uid: str) -> KnownRound | None:
        looked.append(uid)
        return load(connection, uid)

    monkeypatch.setattr(deliveries, "parse_artifacts", parsed)
    monkeypatch.setattr(callback_relay, "load", loaded)
    error_of(await relay.send("generated", generated([1, 16])), 403, "NotDelivered")
    assert read == [threading.current_thread().name]
    rounds = relay.world.cluster.rounds.values()
    assert looked == [one.id for one in rounds if one.spec.block_height == BLOCK["block_height"]]
    assert (len(looked), len(rounds)) == (3, 4)


async def test_what_is_disputed_is_not_relayed(relay: Relay) -> None:
    rival = generated([7], artifacts=[{"nonce": 7, "vector_b64": vector(8, 12)}])
    delivery = read_generated(relay.known, json.dumps(rival).encode())
    await relay.world.database.write(partial(store_deliveries, deliveries=[delivery], now=now()))
    answer = await relay.send("generated", generated([1, 7]))
    assert "disputed" in error_of(answer, 409, "HeldBack").detail
    error_of(await relay.send("generated", rival), 403, "NotDelivered")
    assert (await relay.send("generated", generated([1, 4]))).status_code == 200


async def test_the_result_of_a_request_is_sent_as_the_gateway_told_it(relay: Relay) -> None:
    queued = (await relay.world.post("inference/pow/generate", validation(40, url=relay.receiver.url))).json()
    await finished(relay.world, queued["request_id"])
    (row,) = relay.world.rows(callbacks.select())
    answer = await relay.send("validated", row["body"].encode())
    assert answer.status_code == 200
    assert relay.receiver.verdicts == [json.loads(row["body"])]
    honest = json.loads(row["body"]) | {"fraud_detected": False}
    error_of(await relay.send("validated", honest), 403, "NotDelivered")
    # The same address without a round: the request alone names it.
    relay.world.cluster.rounds.clear()
    assert (await relay.send("validated", row["body"].encode())).status_code == 200


async def test_a_verdict_of_another_ml_nodes_request_is_not_relayed(relay: Relay) -> None:
    about = {name: BLOCK[name] for name in ("public_key", "block_hash", "block_height", "node_id")}
    text = json.dumps(about)
    values = {"url": f"{relay.receiver.url}/validated", "body": text, "state": State.WAITING, "created_at": now()}
    await relay.world.database.write(lambda connection: connection.execute(insert(callbacks).values(values)))
    error_of(await relay.send("validated", text.encode()), 403, "NotDelivered")
