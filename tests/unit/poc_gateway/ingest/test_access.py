# SPDX-License-Identifier: Apache-2.0
"""Who may deliver, and what: each pod results of its own slot, as far as it can have come."""

import time
from typing import Any

import aiohttp
import pytest
from yarl import URL

from poc_gateway.ingest.authors import Authors
from poc_gateway.store import schema
from poc_gateway.store.engine import DatabaseFull
from tests.support.builders.deliveries import JSON, a_round, artifacts, distances, encoded, path
from tests.support.builders.secrets import OPERATOR, PEOPLE, SECRETS, a_grant, basic, pod_headers
from tests.unit.poc_gateway.ingest.conftest import Gateway, Start, receipt

PROGRESS = "/rounds/ns/round-uid-1/progress"


async def deliver(
    gateway: Gateway, body: bytes, headers: dict[str, str], end: str = "generated", uid: str = "uid-1"
) -> tuple[int, Any]:
    async with gateway.session.post(path(uid, end), data=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        (pod_headers(), 200, None),
        ({}, 401, "it is not signed with a key of this gateway"),
        (pod_headers(key="another"), 401, "it is not signed with a key of this gateway"),
        (pod_headers(seconds=-1), 401, "it has expired"),
        (pod_headers(a_grant("uid-2")), 403, "the credential of another"),
        (PEOPLE, 401, "it is not signed"),
        (OPERATOR, 401, "it is not signed"),
        (basic("secret"), 401, "it is not signed"),
        ({"Authorization": "Basic !"}, 401, "it is not signed"),
    ],
)
@pytest.mark.parametrize("end", ["generated", "validated"])
async def test_a_pod_delivers_with_the_credential_of_its_round(
    start: Start, headers: dict[str, str], status: int, says: str | None, end: str
) -> None:
    body = artifacts([0]) if end == "generated" else artifacts([])
    async with (
        start(a_round(), **SECRETS) as gateway,
        gateway.session.post(path(end=end), data=body, headers=headers) as answer,
    ):
        told = await answer.json()
        assert answer.status == status
        assert says is None or says in told["detail"]
        challenge = answer.headers.get("WWW-Authenticate")
        assert challenge == ('Basic realm="poc-gateway"' if status == 401 else None)
        assert len(await gateway.rows(schema.rounds)) == (status == 200)


@pytest.mark.parametrize("end", ["generated", "validated"])
async def test_a_round_that_never_existed_or_is_deleted_takes_nothing(start: Start, end: str) -> None:
    body = artifacts([0])
    async with start(a_round(), **SECRETS) as gateway:
        status, told = await deliver(gateway, body, pod_headers(a_grant("never")), end, uid="never")
        assert (status, told["reason"]) == (404, "RoundUnknown")
        assert (await deliver(gateway, body, pod_headers(), end))[0] == 200
        await gateway.database.write(lambda one: one.execute(schema.rounds.delete()))
        gateway.found.clear()
        gateway.forget("uid-1")
        status, told = await deliver(gateway, body, pod_headers(), end)
        assert (status, told["reason"]) == (404, "RoundUnknown")


async def test_people_read_the_operator_asks_and_pods_do_neither(start: Start) -> None:
    sample, replay = "/rounds/ns/round-uid-1/sample", "/rounds/ns/round-uid-1/dead-letters/replay"
    asked = [("GET", PROGRESS), ("GET", sample), ("GET", "/rounds"), ("POST", replay)]
    async with start(a_round(), **SECRETS) as gateway:
        await deliver(gateway, artifacts([0]), pod_headers())
        for headers, allowed in ((PEOPLE, asked), (OPERATOR, asked[:2]), (pod_headers(), []), ({}, [])):
            for method, url in asked:
                async with gateway.session.request(method, url, headers=headers) as answer:
                    assert (answer.status == 200) == ((method, url) in allowed), (method, url, headers)
                    assert answer.status in (200, 401)
        assert (await gateway.get("/readyz"))[0] == 200


async def test_the_credential_in_the_address_suffices(start: Start) -> None:
    async with start(a_round(), **SECRETS) as gateway:
        sent = aiohttp.BasicAuth.decode(pod_headers()["Authorization"])
        url = gateway.url.with_user(sent.login).with_password(sent.password).with_path(path())
        async with aiohttp.ClientSession(headers=JSON) as session, session.post(url, data=artifacts([0])) as answer:
            assert answer.status == 200


async def test_a_result_of_another_slot_is_refused_and_named(start: Start) -> None:
    async with start(a_round(groups=3), **SECRETS) as gateway:
        status, told = await deliver(gateway, artifacts([1, 4, 5, 7]), pod_headers(a_grant(slot=1)))
        assert (status, told["reason"]) == (403, "OtherSlot")
        assert told["detail"].startswith("nonce 5 is of slot 2, and the message is of pod a (a-uid), which has slot 1")
        assert await gateway.rows(schema.artifacts) == []


async def test_a_refusal_that_cannot_be_counted_is_one_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise DatabaseFull("no room")

    monkeypatch.setattr(Authors, "refused", full)
    async with start(a_round(groups=3), **SECRETS) as gateway:
        assert (await deliver(gateway, artifacts([1]), pod_headers(a_grant(slot=1))))[0] == 200
        status, told = await deliver(gateway, artifacts([5]), pod_headers(a_grant(slot=1)))
        assert (status, told["reason"]) == (403, "OtherSlot")


@pytest.mark.parametrize("protocol", ["artifact", "distance"])
async def test_a_result_that_the_pod_cannot_have_reached_is_refused_and_named(start: Start, protocol: str) -> None:
    began = int(time.time()) - 10
    granted = a_grant(slot=1, start=500, since=began, rate=100)
    # 10 s and the margin of 60 s, at 100 nonces/s from index 500 on; one second may pass during the test.
    reached, beyond = 500 + 70 * 100 - 1, 500 + 75 * 100
    spec = {} if protocol == "artifact" else {"rTarget": "1.4"}

    def body(*indexes: int) -> bytes:
        nonces = [1 + 2 * index for index in indexes]
        return artifacts(nonces) if protocol == "artifact" else distances([(nonce, 0.5) for nonce in nonces])

    async with start(a_round(groups=2, **spec), **SECRETS) as gateway:
        assert (await deliver(gateway, body(0, reached), pod_headers(granted)))[1]["stored"] == 2
        status, told = await deliver(gateway, body(1, 2, beyond), pod_headers(granted))
        assert (status, told["reason"]) == (425, "BeyondReach")
        assert told["detail"].startswith(f"nonce {1 + 2 * beyond} is further than the slot can be")
        assert "pod a (a-uid), which has slot 1" in told["detail"]
        assert len(await gateway.rows(schema.artifacts)) == 2


async def test_every_result_has_its_author(start: Start) -> None:
    async with start(a_round(groups=2), **SECRETS) as gateway:
        for pod, slot, nonces in (("a", 0, [0, 2]), ("b", 1, [1]), ("c", 0, [4, 2]), ("a", 0, [6])):
            await deliver(gateway, artifacts(nonces), pod_headers(a_grant(slot=slot, pod=pod)))
        authors = {row.id: row.pod_uid for row in await gateway.rows(schema.authors)}
        found = {row.nonce: authors[row.author] for row in await gateway.rows(schema.artifacts)}
        assert found == {0: "a-uid", 2: "a-uid", 1: "b-uid", 4: "c-uid", 6: "a-uid"}
        assert len(authors) == 3


async def test_rivals_are_both_kept_and_named(start: Start) -> None:
    async with start(a_round(callbackURL="http://receiver.example/"), **SECRETS) as gateway:
        await deliver(gateway, artifacts([0, 1, 2]), pod_headers())
        lies = artifacts([0, 1, 3]).replace(encoded(1).encode(), encoded(2).encode())
        _, told = await deliver(gateway, lies, pod_headers(a_grant(pod="b")))
        assert told == receipt(stored=1, duplicates=1, conflicts=1)
        async with gateway.session.get(PROGRESS, headers=OPERATOR) as answer:
            (slot,) = (await answer.json())["slots"]
        assert slot["rivals"] == [{"kept": "a", "other": "b", "nonce": 1, "count": 1}]
        async with gateway.session.get("/rounds/ns/round-uid-1/conflicts", headers=PEOPLE) as answer:
            (conflict,) = (await answer.json())["conflicts"]
        assert (conflict["nonce"], conflict["stored_pod"], conflict["pod"]) == (1, "a", "b")


async def test_refused_deliveries_are_counted_by_pod(start: Start) -> None:
    async with start(a_round(groups=2), **SECRETS) as gateway:
        await deliver(gateway, artifacts([0]), pod_headers())
        for _ in range(5):
            await deliver(gateway, artifacts([2, 1]), pod_headers(a_grant(pod="liar")))
        deadline, refused = time.monotonic() + 10, list[Any]()
        while not refused and time.monotonic() < deadline:
            async with gateway.session.get(PROGRESS, headers=OPERATOR) as answer:
                refused = (await answer.json())["refused"]
        (one,) = refused
        assert (one["slot"], one["pod"], one["count"]) == (0, "liar", 5)
        assert one["why"].startswith("nonce 1 is of slot 1")


async def test_old_and_new_secrets_are_good_at_the_same_time(start: Start) -> None:
    both = {name: f"new-{value},{value}" for name, value in SECRETS.items()}
    news = {name: f"new-{value}" for name, value in SECRETS.items()}
    new_key, old = pod_headers(key=news["callback_key"]), pod_headers()
    rows = [(SECRETS, 401, 200), (both, 200, 200), (news, 200, 401)]
    for number, (settings, new_status, old_status) in enumerate(rows):
        async with start(a_round(), **settings) as gateway:
            assert (await deliver(gateway, artifacts([2 * number]), new_key))[0] == new_status
            assert (await deliver(gateway, artifacts([2 * number + 1]), old))[0] == old_status
            for name, url in (("token", "/rounds"), ("operator_token", PROGRESS)):
                for secret, expected in ((news[name], new_status), (SECRETS[name], old_status)):
                    bearer = {"Authorization": f"Bearer {secret}"}
                    async with gateway.session.get(url, headers=bearer) as answer:
                        assert answer.status == expected, (name, secret)


async def test_without_secrets_all_is_open_and_has_no_author(start: Start) -> None:
    async with start(a_round(groups=2)) as gateway:
        assert (await gateway.deliver(artifacts([0, 1, 2])))[0] == 200
        assert {row.author for row in await gateway.rows(schema.artifacts)} == {None}
        assert (await gateway.get("/rounds"))[0] == 200


def test_an_address_has_room_for_a_credential() -> None:
    grant = a_grant("0" * 36, 2**31 - 1, pod="p" * 253, pod_uid="u" * 36, start=2**31)
    sent = aiohttp.BasicAuth.decode(pod_headers(grant)["Authorization"])
    url = URL("http://gateway.poc-system.svc:8080").with_user("pod").with_password(sent.password)
    assert len(str(url)) < 1_000, "pods accept addresses of 2 083 characters"
