# SPDX-License-Identifier: Apache-2.0
"""The operator's client of the gateway, over real HTTP."""

import time
from argparse import ArgumentTypeError
from collections.abc import AsyncIterator

import pytest
from yarl import URL

from poc_operator.__main__ import gateway_url, rate_limit
from poc_operator.clients import gateway as collector
from poc_operator.clients.errors import GatewayError
from poc_operator.clients.gateway import GatewayClient
from poc_operator.credentials import Grant, Verifier
from tests.support.fakes.gateway import TOKEN, Gateway, gateway
from tests.support.servers.http_server import free_port

ROUND = ("ns", "r", "round-uid")


@pytest.fixture
async def stored() -> AsyncIterator[Gateway]:
    async with gateway() as found:
        found.uid, found.stored = "round-uid", {0, 2, 4, 1}
        yield found


@pytest.fixture
async def client(stored: Gateway) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(stored.url, TOKEN) as client:
        yield client


async def test_progress(client: GatewayClient, stored: Gateway) -> None:
    progress = await client.progress(*ROUND)
    assert progress is not None
    assert [(slot.slot, slot.stored, slot.delivered_index) for slot in progress.slots] == [(0, 3, 3), (1, 1, 1)]
    assert stored.questions == [{"namespace": "ns", "name": "r", "what": "progress", "uid": "round-uid"}]


async def test_nothing_stored_yet(client: GatewayClient, stored: Gateway) -> None:
    stored.uid, stored.stored = "", set()
    assert await client.progress(*ROUND) is None
    assert await client.sample("ns", "r", 5, "") is None


async def test_an_earlier_release_of_the_gateway_has_nothing_stored_yet(client: GatewayClient, stored: Gateway) -> None:
    """It runs for a moment beside a new operator, as in an upgrade."""
    stored.answer, stored.body = 404, '{"reason": "RoundUnknown", "detail": "nothing was delivered"}'
    assert await client.progress(*ROUND) is None


async def test_a_sample(client: GatewayClient, stored: Gateway) -> None:
    assert await client.sample("ns", "before", 2, "a&b") is not None
    assert stored.questions == [{"namespace": "ns", "name": "before", "what": "sample", "nonces": "2", "seed": "a&b"}]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, "not json", "not a gateway's answer"),
        (200, "{}", "not a gateway's answer: uid: Field required"),
        (200, "x" * (collector.MAX_ANSWER_BYTES + 1), "the answer exceeds 4194304 bytes"),
        (404, "<html>", "HTTP 404; --gateway-url leads to something that is no gateway"),
        (503, '{"reason": "DatabaseUnavailable", "detail": "the database is away"}', "HTTP 503: the database is away"),
        (302, "", "HTTP 302"),
    ],
)
async def test_strange_answers(client: GatewayClient, stored: Gateway, status: int, body: str, says: str) -> None:
    stored.answer, stored.body = status, body
    with pytest.raises(GatewayError) as error:
        await client.progress(*ROUND)
    assert str(error.value).startswith(f"gateway {stored.url}")
    assert says in str(error.value)


async def test_an_answer_about_another_round_is_not_taken(client: GatewayClient, stored: Gateway) -> None:
    stored.uid = "an older one"
    with pytest.raises(GatewayError, match="about round an older one instead of round-uid"):
        await client.progress(*ROUND)


async def test_another_token(stored: Gateway) -> None:
    async with GatewayClient(stored.url, "wrong") as client:
        with pytest.raises(GatewayError, match="HTTP 401: no token; give operator and gateway the same"):
            await client.progress(*ROUND)


async def test_a_gateway_that_hangs(stored: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ANSWER_SECONDS", 0.05)
    stored.delay = 5
    async with GatewayClient(stored.url, TOKEN) as client:
        with pytest.raises(GatewayError, match=r"no answer within 0\.05 s"):
            await client.progress(*ROUND)


async def test_nobody_listens() -> None:
    async with GatewayClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(GatewayError, match="Cannot connect"):
            await client.progress(*ROUND)


async def test_where_pods_deliver_to() -> None:
    granted = Grant(round="round-uid", slot=1, pod="a", pod_uid="u", start=5, since=7, rate=9)
    async with GatewayClient("http://gateway:8080", TOKEN, "key") as client:
        address = client.callback_url(*ROUND)
        assert address == "http://gateway:8080/callbacks/ns/r/round-uid"
        url = URL(client.signed(address, granted))
        assert str(url.with_user(None)) == address
        assert url.user == "pod"
        assert url.password is not None
        assert Verifier(["key"]).verify(url.password, time.time()) == granted
    async with GatewayClient("http://gateway:8080/") as client:
        assert client.callback_url(*ROUND) == address
        assert client.signed(address, granted) == address


@pytest.mark.parametrize("text", ["http://gateway:8080", "https://gateway", "http://[fd00::1]:80/"])
def test_addresses_of_gateways(text: str) -> None:
    assert gateway_url(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "gateway:8080",
        "ftp://gateway",
        "http://",
        "http://gateway/path",
        "http://a:b@gateway",
        "http://gw?x=y",
        "http://gw:99999",
    ],
)
def test_what_is_no_address_of_a_gateway(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not like http://HOST:PORT"):
        gateway_url(text)


def test_rates_of_pods() -> None:
    assert rate_limit("50000") == 50_000
    for text in ("0", "-1", "1.5", "x", "", "2147483648"):
        with pytest.raises(ArgumentTypeError, match="is no whole number from 1 to 2147483647"):
            rate_limit(text)
