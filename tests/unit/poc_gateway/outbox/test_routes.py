# SPDX-License-Identifier: Apache-2.0
"""What people are told of a round's forwarding, and the replay."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from fastapi import FastAPI

from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.routes import router
from poc_gateway.query import routes as query_routes
from poc_gateway.store.database import Database
from tests.support.builders.forwarding import Receiver, add_round, running, settings, store, until

ROUND = "/rounds/default/round"


@pytest.fixture
def outbox(database: Database) -> Outbox:
    return Outbox(database, settings(retry_limit_seconds=60, retry_first_seconds=60))


@pytest.fixture
async def client(database: Database, outbox: Outbox) -> AsyncIterator[httpx.AsyncClient]:
    routes = [*router(database, outbox).routes, *query_routes.router(database, outbox, limits=False).routes]
    app = FastAPI(routes=routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


async def failing(database: Database, outbox: Outbox, receiver: Receiver, path: str) -> None:
    """Wait until the receiver has refused one of five results for good, and fails to take another."""
    receiver.answer = lambda post: 400 if 1 in post.nonces else 500 if 3 in post.nonces else 200
    round_id = await add_round(database, f"{receiver.url}{path}", node_count=1)
    await store(database, round_id, range(5))
    await until(lambda: (forwarder := outbox.forwarder(round_id)) is not None and forwarder.error is not None)


async def test_forwarding_while_the_receiver_fails(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    async with running(outbox):
        await failing(database, outbox, receiver, "/a%252Fb")
        answer = (await client.get(f"{ROUND}/forwarding")).json()
    assert answer.pop("next_try_seconds") == pytest.approx(60, abs=31)
    assert answer == {
        "receiver": f"{receiver.url}/a%252Fb",
        "backlog": 3,
        "forwarded": 1,
        "dead": 1,
        "expired": 0,
        "abandoned": 0,
        "late": 0,
        "last_error": "HTTP 500",
    }


async def test_the_operator_is_told_why_the_receiver_does_not_take_results(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    async with running(outbox):
        await failing(database, outbox, receiver, "/a?token=secret")
        answer = (await client.get(f"{ROUND}/progress")).json()
        (listed,) = (await client.get("/rounds", params={"undelivered": "true"})).json()["rounds"]
    assert (answer["forwarding_error"], answer["waiting"]) == (f"{receiver.url}/a: HTTP 500", 3)
    assert (listed["namespace"], listed["name"]) == ("default", "round")


async def test_a_receiver_that_takes_results_is_not_in_trouble(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    await store(database, await add_round(database, receiver.url, node_count=1), range(5))
    await store(database, await add_round(database, None, name="kept", node_count=1), range(5))
    untold = (await client.get("/rounds", params={"undelivered": "true"})).json()["rounds"]
    assert [one["name"] for one in untold] == ["round"], "without a receiver nothing is to be sent"
    async with running(outbox):
        await until(lambda: len(receiver.nonces) == 5)
        await until(lambda: not outbox._forwarders)
        assert (await client.get("/rounds", params={"undelivered": "true"})).json()["rounds"] == []
    for name in ("round", "kept"):
        answer = (await client.get(f"/rounds/default/{name}/progress")).json()
        assert (answer["stored"], answer["forwarding_error"], answer["waiting"]) == (5, None, 0)


async def test_the_newest_trouble_is_told(database: Database) -> None:
    """A receiver that answers 500 and then goes away is not mended in its log; so, too, for a gateway that restarts."""
    quick = settings(retry_first_seconds=0.01, retry_limit_seconds=0.05)
    receiver, outbox = Receiver(answer=lambda _: 500), Outbox(database, quick)
    async with AsyncExitStack() as server:
        await server.enter_async_context(receiver.served())
        round_id = await add_round(database, receiver.url, node_count=1)
        await store(database, round_id, range(5))

        def says(words: str, outbox: Outbox = outbox) -> bool:
            forwarder = outbox.forwarder(round_id)
            return forwarder is not None and words in str(forwarder.error)

        async with running(outbox):
            await until(lambda: says("HTTP 500"))
            await server.aclose()
            await until(lambda: says("Cannot connect"))
        again = Outbox(database, quick)
        async with running(again):
            await until(lambda: says("Cannot connect", again))


async def test_the_name_means_the_newest_round(database: Database, client: httpx.AsyncClient) -> None:
    await store(database, await add_round(database, None, uid="before"), range(5))
    unsent = (await client.get(f"{ROUND}/forwarding")).json()
    assert (unsent["receiver"], unsent["backlog"]) == (None, 0)
    await add_round(database, "http://user:secret@host/path?token=secret")
    answer = (await client.get(f"{ROUND}/forwarding")).json()
    assert (answer["receiver"], answer["backlog"]) == ("http://host/path", 0)
    assert (answer["last_error"], answer["next_try_seconds"]) == (None, 0)
    assert (await client.get(f"{ROUND}/forwarding?uid=before")).json() == unsent
    for path in (f"{ROUND}/forwarding?uid=none", f"{ROUND}-2/forwarding?uid=before"):
        assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "forwarding"),
        ("GET", "dead-letters"),
        ("POST", "dead-letters/replay"),
        ("GET", "ledger?state=waiting"),
        ("DELETE", "ledger"),
    ],
)
async def test_a_round_that_is_not_known(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request(method, f"{ROUND}/{path}")
    assert answer.status_code == 404
    assert "no round default/round is known" in answer.json()["detail"]


async def test_dead_letters_in_pages_and_their_replay(
    database: Database, outbox: Outbox, receiver: Receiver, client: httpx.AsyncClient
) -> None:
    receiver.answer = lambda post: 400 if any(nonce < 5 for nonce in post.nonces) else 200
    await store(database, await add_round(database, receiver.url), range(12))
    async with running(outbox):
        await until(lambda: len(receiver.nonces) == 7)
        first = (await client.get(f"{ROUND}/dead-letters", params={"limit": 3})).json()
        assert [letter["nonce"] for letter in first["dead_letters"]] == [0, 1, 2]
        assert first["dead_letters"][1].items() >= {"slot": 1, "reason": "HTTP 400"}.items()
        rest = (await client.get(f"{ROUND}/dead-letters", params={"limit": 3, "after": first["next"]})).json()
        assert [letter["nonce"] for letter in rest["dead_letters"]] == [3, 4]
        assert rest["next"] is None

        receiver.answer = lambda _: 200
        some = await client.post(f"{ROUND}/dead-letters/replay", json={"nonces": [2, 4, 11]})
        assert some.json() == {"replayed": 2}
        await until(lambda: {2, 4} <= set(receiver.nonces))
        assert (await client.post(f"{ROUND}/dead-letters/replay")).json() == {"replayed": 3}
        await until(lambda: sorted(receiver.nonces) == list(range(12)))


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": 1001}, {"after": -2}, {"after": 2**31}, {"after": "x"}])
async def test_limits_of_a_page(client: httpx.AsyncClient, params: dict[str, str | int]) -> None:
    assert (await client.get(f"{ROUND}/dead-letters", params=params)).status_code == 422
