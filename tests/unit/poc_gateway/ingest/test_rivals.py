# SPDX-License-Identifier: Apache-2.0
"""Different results for one nonce: both are kept, none goes out before the honest one is known, and liars are named."""

import asyncio
import logging
import time
from typing import Any

import pytest

from poc_gateway.outbox import ledger, listing
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.states import State
from poc_gateway.store.schema import conflicts
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import GatewayError
from poc_operator.clients.gateway import GatewayClient
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.observing import GatewayObserver
from poc_operator.observed import Decision, Truth
from tests.support.builders.deliveries import JSON, a_round, artifacts, encoded, path
from tests.support.builders.forwarding import Post, Receiver, running, settings, until
from tests.support.builders.secrets import OPERATOR, OPERATOR_TOKEN, PEOPLE, SECRETS, a_grant, pod_headers
from tests.unit.poc_gateway.ingest.conftest import Gateway, Start

RIVALS = "/rounds/ns/round-uid-1/rivals"
LIE = 7_000
LOG = ObjectLogger(logging.getLogger(__name__), PoCRound.KIND, ObjectRef("ns", "round-uid-1", "uid-1"))


def lying(nonce: int) -> bytes:
    """Another nonce's result in the place of this one's."""
    return artifacts([], artifacts=[{"nonce": nonce, "vector_b64": encoded(LIE)}])


async def deliver(gateway: Gateway, body: bytes, pod: str) -> None:
    headers = {**JSON, **pod_headers(a_grant(pod=pod))}
    async with gateway.session.post(path(), data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()


async def told(gateway: Gateway, headers: dict[str, str] = OPERATOR) -> list[dict[str, Any]]:
    async with gateway.session.get(RIVALS, headers=headers) as answer:
        assert answer.status == 200
        found: list[dict[str, Any]] = (await answer.json())["rivals"]
        return found


async def decide(gateway: Gateway, headers: dict[str, str] = OPERATOR, **decision: object) -> int:
    body = {"uid": "uid-1", "decisions": [{"nonce": 1, "pod": "c", "up_to": 2**40, **decision}]}
    async with gateway.session.post(RIVALS, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return int((await answer.json())["decided"])


async def progress(gateway: Gateway) -> dict[str, Any]:
    async with gateway.session.get("/rounds/ns/round-uid-1/progress", headers=OPERATOR) as answer:
        found: dict[str, Any] = await answer.json()
        return found


def sent(receiver: Receiver) -> list[tuple[int, str]]:
    return [(one["nonce"], one["vector_b64"]) for post in receiver.accepted for one in post.body["artifacts"]]


async def forwarded(gateway: Gateway, seconds: float = 30) -> None:
    """Forward until nothing is left to send."""

    async def idle() -> bool:
        return not await gateway.database.read(ledger.rounds_with_work)

    async with running(Outbox(gateway.database, settings())):
        await until(idle, seconds)


@pytest.fixture
async def receiver() -> Any:  # noqa: ANN401
    async with Receiver().served() as served:
        yield served


@pytest.mark.parametrize(
    ("first", "truth", "expected", "liars"),
    [
        ("honest", "stored", encoded(1), ["b"]),
        ("lie", "other", encoded(1), ["a"]),
        ("honest", "both", encoded(1), []),
        ("lie", "neither", None, ["a", "b"]),
    ],
)
async def test_nothing_goes_out_before_the_honest_one_is_known(
    start: Start, receiver: Receiver, first: str, truth: str, expected: str | None, liars: list[str]
) -> None:
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        honest, lie = artifacts([1]), lying(1)
        await deliver(gateway, artifacts([0, 2]), "a")
        await deliver(gateway, *((honest, "a") if first == "honest" else (lie, "a")))
        await deliver(gateway, *((lie, "b") if first == "honest" else (honest, "b")))
        await forwarded(gateway)
        assert sent(receiver) == [(0, encoded(0)), (2, encoded(2))]
        (rival,) = await told(gateway)
        (other,) = rival["others"]
        assert (rival["nonce"], rival["stored"]["pod"], other["pod"]) == (1, "a", "b")
        assert {rival["stored"]["vector_b64"], other["vector_b64"]} == {encoded(1), encoded(LIE)}
        held = await gateway.database.read(
            lambda one: listing.entries(one, 1, State.DISPUTED, after=-1, limit=10)  # the first round
        )
        assert [entry["first_nonce"] for entry in held] == [1]
        assert (await progress(gateway))["undecided"] == 1
        chosen: dict[str, Any] = {"conflict": other["conflict"]} if truth == "other" else {}
        alike: dict[str, Any] = {"alike": [other["conflict"]]} if truth == "both" else {}
        assert await decide(gateway, truth="stored" if truth == "both" else truth, **chosen, **alike) == 1
        assert await decide(gateway, truth="neither") == 0  # the first decision stays
        await forwarded(gateway)
        assert sent(receiver)[2:] == ([(1, expected)] if expected is not None else [])
        found = await progress(gateway)
        assert (found["undecided"], sorted(one["pod"] for one in found["forgers"])) == (0, liars)
        assert await told(gateway) == []
        again = "/rounds/ns/round-uid-1/ledger/replay?state=abandoned"
        async with gateway.session.post(again, headers=PEOPLE) as answer:
            assert await answer.json() == {"replayed": 0}  # it is forged
        counts = await gateway.database.read(lambda one: listing.counts(one, 1))
        assert (counts.backlog, counts.abandoned) == (0, int(expected is None))
        assert len(await gateway.rows(conflicts)) == 1


async def test_what_was_sent_stays_as_it_is(start: Start, receiver: Receiver) -> None:
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        await deliver(gateway, lying(1), "a")
        await forwarded(gateway)
        await deliver(gateway, artifacts([1]), "b")
        (rival,) = await told(gateway)
        assert await decide(gateway, truth="other", conflict=rival["others"][0]["conflict"]) == 1
        await forwarded(gateway)
        assert sent(receiver) == [(1, encoded(LIE))]
        found = await progress(gateway)
        assert [one["pod"] for one in found["forgers"]] == ["a"]
        assert (found["stored"], found["forwarded"]) == (1, 1)


async def test_a_rival_that_comes_while_a_result_is_on_its_way_sends_nothing_twice(
    start: Start, receiver: Receiver
) -> None:
    arrived, goes_on = asyncio.Event(), asyncio.Event()

    async def hold(_: object) -> int:
        arrived.set()
        await goes_on.wait()
        return 200

    receiver.answer = hold
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        await deliver(gateway, artifacts([0, 1]), "a")
        async with running(Outbox(gateway.database, settings())):
            await arrived.wait()
            await deliver(gateway, lying(1), "b")
            goes_on.set()
            await until(lambda: len(receiver.accepted) == 1)
        await forwarded(gateway)
        assert await decide(gateway, truth="stored") == 1
        await forwarded(gateway)
        assert sent(receiver) == [(0, encoded(0)), (1, encoded(1))]
        assert (await gateway.database.read(lambda one: listing.counts(one, 1))).backlog == 0


@pytest.mark.parametrize("status", [503, 429])
async def test_what_is_disputed_in_a_pause_does_not_go_out_after_it(
    start: Start, receiver: Receiver, status: int
) -> None:
    statuses = [status]
    receiver.answer = lambda _: statuses.pop() if statuses else 200
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        await deliver(gateway, artifacts([0]), "a")
        await deliver(gateway, lying(1), "a")
        async with running(Outbox(gateway.database, settings(retry_first_seconds=3, retry_limit_seconds=3))):
            await until(lambda: len(receiver.posts) == 1)
            await asyncio.sleep(1)  # of a pause that takes half as long again at least
            await deliver(gateway, artifacts([1]), "b")
            await until(lambda: len(receiver.accepted) > 0)
        await forwarded(gateway)
        assert sent(receiver) == [(0, encoded(0))]
        assert (await progress(gateway))["undecided"] == 1


async def test_what_is_disputed_while_a_refused_payload_is_halved_does_not_go_out(
    start: Start, receiver: Receiver
) -> None:
    goes_on = asyncio.Event()

    async def answer(post: Post) -> int:
        if len(post.body["artifacts"]) == 3:
            return 400
        await goes_on.wait()
        return 200

    receiver.answer = answer
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        items = [{"nonce": nonce, "vector_b64": encoded(LIE if nonce == 1 else nonce)} for nonce in range(3)]
        await deliver(gateway, artifacts([], artifacts=items), "a")
        async with running(Outbox(gateway.database, settings())):
            await until(lambda: len(receiver.posts) == 2)
            await deliver(gateway, artifacts([1]), "b")
            goes_on.set()
            await until(lambda: len(receiver.accepted) > 1)
        await forwarded(gateway)
        assert sent(receiver) == [(0, encoded(0)), (2, encoded(2))]
        assert (await progress(gateway))["undecided"] == 1


async def test_a_liar_uses_up_no_others_conflicts(start: Start, receiver: Receiver) -> None:
    """A pod that contradicts itself without end fills no disk, and what others contradict waits all the same."""
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        await deliver(gateway, lying(1), "a")
        for first in range(0, 1_200, 100):
            values = [0, *range(first + 1, first + 101)]
            items = [{"nonce": 0, "vector_b64": encoded(8_000 + value)} for value in values]
            await deliver(gateway, artifacts([], artifacts=items), "a")
        await deliver(gateway, artifacts([1]), "b")
        for value in (2, 3):
            item = {"nonce": 1, "vector_b64": encoded(value)}
            await deliver(gateway, artifacts([], artifacts=[item]), "b")
        kept = await gateway.rows(conflicts)
        assert [row.nonce for row in kept] == [*[0] * 1_000, 1]
        await forwarded(gateway)
        assert sent(receiver) == []
        assert {rival["nonce"]: rival["others"][0]["pod"] for rival in await told(gateway)} == {0: "a", 1: "b"}
        assert await decide(gateway, truth="other", conflict=kept[-1].id) == 1
        await forwarded(gateway)
        assert sent(receiver) == [(1, encoded(1))]


@pytest.mark.parametrize("away", [1_000, -1])
async def test_an_honest_result_that_is_not_known_releases_nothing(start: Start, receiver: Receiver, away: int) -> None:
    async with start(a_round(callbackURL=receiver.url), **SECRETS) as gateway:
        for nonce, lie in ((0, lying(0)), (1, lying(1))):
            await deliver(gateway, lie, "a")
            await deliver(gateway, artifacts([nonce]), "b")
        of_1 = max(row.id for row in await gateway.rows(conflicts))
        assert await decide(gateway, truth="other", conflict=of_1 + away) == 0
        await forwarded(gateway)
        assert sent(receiver) == []
        assert [rival["nonce"] for rival in await told(gateway)] == [0, 1]


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ({"truth": "other"}, "conflict: name the honest result's"),
        ({"truth": "stored", "conflict": 1}, "conflict: name the honest result's"),
        ({"truth": "other", "conflict": 2, "up_to": 1}, "conflict: 2 is above up_to, 1"),
    ],
)
async def test_a_decision_that_cannot_be_meant_is_refused(start: Start, decision: dict[str, Any], message: str) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        await deliver(gateway, lying(1), "a")
        await deliver(gateway, artifacts([1]), "b")
        body = {"uid": "uid-1", "decisions": [{"nonce": 1, "pod": "c", "up_to": 2**40, **decision}]}
        async with gateway.session.post(RIVALS, json=body, headers=OPERATOR) as answer:
            assert answer.status == 422
            assert message in (await answer.json())["detail"]
        assert len(await told(gateway)) == 1


async def test_the_name_of_who_decides_is_one_line(start: Start) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        await deliver(gateway, lying(1), "a")
        await deliver(gateway, artifacts([1]), "b")
        assert await decide(gateway, truth="stored", pod="c\0\nd") == 1
        assert [row.decided_by for row in await gateway.rows(conflicts)] == ["c d"]


async def test_without_a_receiver_the_honest_one_takes_its_place(start: Start) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        await deliver(gateway, lying(1), "a")
        await deliver(gateway, artifacts([1]), "b")
        (rival,) = await told(gateway, PEOPLE)
        assert await decide(gateway, PEOPLE, truth="other", conflict=rival["others"][0]["conflict"]) == 1
        async with gateway.session.get("/rounds/ns/round-uid-1/sample?nonces=1", headers=OPERATOR) as answer:
            assert (await answer.json())[0]["vector"] == encoded(1)


async def test_who_may_decide(start: Start) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        await deliver(gateway, artifacts([1]), "a")
        body = {"uid": "uid-2", "decisions": [{"nonce": 1, "pod": "c", "truth": "stored", "up_to": 1}]}
        for headers, status in (({}, 401), (pod_headers(), 401), (OPERATOR, 409), (PEOPLE, 409)):
            async with gateway.session.post(RIVALS, json=body, headers=headers) as answer:
                assert answer.status == status
        for method in ("PUT", "DELETE"):
            async with gateway.session.request(method, RIVALS, headers=OPERATOR) as answer:
                assert answer.status == 401


async def test_the_operator_asks_and_tells(start: Start) -> None:
    """Its own client and observer, against the gateway itself."""
    async with start(a_round(), **SECRETS) as gateway, GatewayClient(str(gateway.url), token=OPERATOR_TOKEN) as client:
        ref = ObjectRef(namespace="ns", name="round-uid-1", uid="uid-1")
        await deliver(gateway, lying(1), "a")
        assert (await GatewayObserver(client, ref, LOG, time.monotonic).observe({})).rivals == ()
        await deliver(gateway, artifacts([1]), "b")
        observer = GatewayObserver(client, ref, LOG, time.monotonic)
        (rival,) = (await observer.observe({})).rivals
        (other,) = rival.others
        assert other.conflict is not None
        assert (rival.nonce, rival.stored.vector_b64, other.vector_b64) == (1, encoded(LIE), encoded(1))
        found = Decision(nonce=1, truth=Truth.OTHER, conflict=other.conflict, up_to=other.conflict, pod="c")
        observer.decide([found])
        observer.decide([found])

        async def decided() -> bool:
            return (await gateway.rows(conflicts))[0].truth is not None

        await until(decided)
        seen = await GatewayObserver(client, ref, LOG, time.monotonic).observe({})
        assert seen.collected is not None
        assert (seen.rivals, seen.collected.undecided) == ((), 0)
        assert [one.pod for one in seen.collected.forgers] == ["a"]
        async with gateway.session.get("/rounds/ns/round-uid-1/conflicts", headers=PEOPLE) as answer:
            (conflict,) = (await answer.json())["conflicts"]
        assert (conflict["truth"], conflict["decided_by"]) == ("stored", "c")
        assert (conflict["pod"], conflict["stored_pod"]) == ("a", "b")
        with pytest.raises(GatewayError, match="the newest round"):
            await client.decide("ns", "round-uid-1", "uid-2", [found])
        await observer.cancel()
