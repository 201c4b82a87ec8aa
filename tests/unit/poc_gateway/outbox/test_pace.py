# SPDX-License-Identifier: Apache-2.0
"""Receivers that fail, and what their trouble does to others."""

import asyncio
import itertools
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.pace import CircuitBreaker
from poc_gateway.outbox.post import Answer, Outcome
from poc_gateway.store.database import Database
from poc_gateway.store.schema import backoffs
from tests.support.builders.forwarding import Post, Receiver, add_round, running, settings, store, until


def error_of(outbox: Outbox, round_id: int) -> str:
    forwarder = outbox.forwarder(round_id)
    return (forwarder.error or "") if forwarder is not None else ""


@pytest.mark.parametrize("status", [401, 403, 404, 405, 408, 410, 429, 500, 502, 503, 504])
async def test_what_may_pass_is_tried_until_it_is_accepted(database: Database, receiver: Receiver, status: int) -> None:
    receiver.answer = lambda _: web.Response(status=status, text="not now")
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, range(4))
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: len(receiver.posts) >= 2)
        assert error_of(outbox, round_id) == f"HTTP {status}: not now"
        receiver.answer = lambda _: 200
        await until(lambda: receiver.nonces == [0, 1, 2, 3])


async def test_pauses_double_up_to_the_limit(database: Database, receiver: Receiver) -> None:
    moments: list[float] = []

    def fail(_: Post) -> int:
        moments.append(time.monotonic())
        return 504

    receiver.answer = fail
    await store(database, await add_round(database, receiver.url, node_count=1), range(100))
    async with running(Outbox(database, settings(retry_first_seconds=0.2, retry_limit_seconds=0.8))):
        await until(lambda: len(moments) >= 9, seconds=40)
    pauses = [after - before for before, after in itertools.pairwise(moments)]
    for pause, base in zip(pauses, (0.2, 0.4, *[0.8] * 6), strict=False):
        assert pause >= 0.5 * base - 0.01
    # They do not grow beyond the limit, and the forwarder's own linger of half a second does not add to all of them. A
    # busy machine may make some of them longer.
    assert min(pauses[4:8]) <= 1.5 * 0.8 + 0.3


async def test_posts_that_fail_together_are_one_failure() -> None:
    async def fail() -> Answer:
        await asyncio.sleep(0)
        return Answer(Outcome.UNREACHABLE, "away")

    circuit = CircuitBreaker(settings(retry_first_seconds=10, retry_limit_seconds=600))
    await asyncio.gather(*(circuit.call(fail) for _ in range(5)))
    assert 0 < circuit.backoff.seconds_left <= 15


async def test_what_was_not_sent_says_nothing_of_the_address() -> None:
    async def answer(outcome: Outcome, *, was_sent: bool) -> Answer:
        return Answer(outcome, "why", was_sent=was_sent)

    circuit = CircuitBreaker(settings(retry_first_seconds=0.01, retry_limit_seconds=0.01))
    await circuit.call(lambda: answer(Outcome.UNREACHABLE, was_sent=True))
    await circuit.call(lambda: answer(Outcome.FAILED, was_sent=False))
    assert circuit.is_open
    await circuit.call(lambda: answer(Outcome.FAILED, was_sent=True))
    assert not circuit.is_open


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_obeyed(database: Database, receiver: Receiver, status: int) -> None:
    moments: list[float] = []

    def wait(_: Post) -> web.Response | int:
        moments.append(time.monotonic())
        soon = format_datetime(datetime.now(UTC) + timedelta(seconds=2.9), usegmt=True)
        value = {1: "1", 2: soon}.get(len(moments))
        return web.Response(status=status, headers={"Retry-After": value}) if value else 200

    receiver.answer = wait
    await store(database, await add_round(database, receiver.url), [0])
    async with running(Outbox(database, settings(retry_limit_seconds=3))):
        await until(lambda: len(moments) == 3)
    assert moments[1] - moments[0] >= 1.0
    assert moments[2] - moments[1] >= 1.5


async def test_a_redirect_is_not_followed(database: Database, receiver: Receiver) -> None:
    async with Receiver().served() as other:
        receiver.answer = lambda _: web.Response(status=307, headers={"Location": f"{other.url}/generated"})
        round_id = await add_round(database, receiver.url)
        await store(database, round_id, [0])
        async with running(Outbox(database, settings())) as outbox:
            await until(lambda: "HTTP 307: redirects are not followed" in error_of(outbox, round_id))
        assert not other.posts


async def test_a_receiver_that_is_slow_is_given_up_and_tried_again(database: Database, receiver: Receiver) -> None:
    async def hang(_: Post) -> int:
        await asyncio.sleep(30)
        return 200

    receiver.answer = hang
    round_id = await add_round(database, receiver.url)
    await store(database, round_id, [0])
    async with running(Outbox(database, settings(forward_seconds=0.3))) as outbox:
        await until(lambda: error_of(outbox, round_id) == "no answer within 0.3 s")
        receiver.answer = lambda _: 200
        await until(lambda: receiver.nonces == [0])


async def test_an_answer_without_end_is_an_answer(database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.Response(body=b"x" * 20_000_000)
    round_id = await add_round(database, receiver.url, node_count=1)
    await store(database, round_id, range(12))
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: len(receiver.accepted) >= 3 and outbox.forwarder(round_id) is None)
    assert receiver.nonces == list(range(12))


async def test_one_post_at_a_time_tries_a_host_that_is_away(database: Database) -> None:
    async with Receiver().served() as down:
        url = down.url
    round_ids = [await add_round(database, url, name=f"r{number}") for number in range(5)]
    for round_id in round_ids:
        await store(database, round_id, range(6))
    async with running(Outbox(database, settings(retry_first_seconds=0.3, retry_limit_seconds=0.3))) as outbox:
        await until(lambda: all(error_of(outbox, round_id) for round_id in round_ids))
        assert REGISTRY.get_sample_value("poc_gateway_open_circuits") == 1
        before = failures()
        await asyncio.sleep(1.5)
        # One round alone would make about five tries, five rounds by themselves 25.
        assert failures() - before <= 11
        async with Receiver().served(port=int(url.rsplit(":", 1)[1])) as up:
            await until(lambda: len(up.nonces) == 30)
            assert REGISTRY.get_sample_value("poc_gateway_open_circuits") == 0


def failures() -> float:
    return REGISTRY.get_sample_value("poc_gateway_forward_failures_total", {"kind": "connection"}) or 0.0


async def test_rounds_whose_receiver_is_away_hold_up_no_other(database: Database, receiver: Receiver) -> None:
    async def hang(_: Post) -> int:
        await asyncio.sleep(30)
        return 200

    async with Receiver(answer=hang).served() as stuck:
        for number in range(5):
            await store(database, await add_round(database, stuck.url, name=f"stuck{number}"), range(40))
        await store(database, await add_round(database, receiver.url), range(40))
        async with running(Outbox(database, settings(forward_seconds=5, retry_first_seconds=60))):
            await until(lambda: len(receiver.nonces) == 40, seconds=9)
        assert stuck.posts


async def test_a_round_that_is_too_late_does_not_hold_up_one_for_the_same_receiver(
    database: Database, receiver: Receiver
) -> None:
    receiver.answer = lambda post: 503 if post.body["block_height"] == 1 else 200
    late = await add_round(database, receiver.url, name="late", block_height=1)
    await store(database, late, range(40))
    await store(database, await add_round(database, receiver.url), range(400))
    async with running(Outbox(database, settings())) as outbox:
        await until(lambda: len(receiver.nonces) == 400, seconds=15)
        assert error_of(outbox, late) == "HTTP 503"


async def test_a_long_retry_after_stops_neither_other_addresses_nor_this_one_for_good(
    database: Database, receiver: Receiver
) -> None:
    def wait(post: Post) -> web.Response | int:
        first = post.path.startswith("/a/") and sum(one.path == post.path for one in receiver.posts) == 1
        return web.Response(status=429, headers={"Retry-After": "3600"}) if first else 200

    receiver.answer = wait
    await store(database, await add_round(database, f"{receiver.url}/a"), range(40))
    async with running(Outbox(database, settings(retry_first_seconds=0.1, retry_limit_seconds=8))):
        await until(lambda: bool(receiver.posts))
        await store(database, await add_round(database, f"{receiver.url}/b"), range(400))
        await until(lambda: len(receiver.nonces) == 400, seconds=7.5)
        await until(lambda: len(receiver.nonces) == 440, seconds=25)


async def test_a_pause_outlives_a_restart_and_no_pause_is_longer_than_the_limit(
    database: Database, receiver: Receiver
) -> None:
    receiver.answer = lambda _: web.Response(status=429, headers={"Retry-After": "3600"})
    await store(database, await add_round(database, receiver.url, node_count=1), range(4))
    chosen = settings(retry_first_seconds=2, retry_limit_seconds=3)

    async def is_written() -> bool:
        rows = await database.read(lambda c: c.exec_driver_sql("SELECT scope, failures FROM backoffs").all())
        return [tuple(row) for row in rows] == [(f"{receiver.url}/generated", 1)]

    async with running(Outbox(database, chosen)):
        await until(is_written)
    began, receiver.answer = time.monotonic(), lambda _: 200
    async with running(Outbox(database, chosen)):
        await until(lambda: len(receiver.nonces) == 4, seconds=20)
        assert time.monotonic() - began > 1.5
        await until(lambda: _no_backoffs(database))
    # The clock was set back since.
    row = {"scope": f"{receiver.url}/generated", "failures": 9, "retry_at": 9_999_999_999_999, "reason": "HTTP 429"}
    await database.write(lambda c: c.execute(backoffs.insert().values(row)) and None)
    await store(database, await add_round(database, receiver.url, node_count=1), range(4))
    async with running(Outbox(database, chosen)):
        await until(lambda: len(receiver.nonces) == 8, seconds=20)


async def _no_backoffs(database: Database) -> bool:
    return not await database.read(lambda c: c.exec_driver_sql("SELECT scope FROM backoffs").all())
