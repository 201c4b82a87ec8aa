# SPDX-License-Identifier: Apache-2.0
"""Every way in which a post can fail is an answer."""

import asyncio
import os
import ssl
import sys
from math import inf
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from poc_gateway.outbox.post import Outcome, Poster
from poc_gateway.store.database import FenceLost
from tests.support.builders.certificates import issue
from tests.support.builders.forwarding import Receiver, settings, until


def failures(kind: str) -> float:
    return REGISTRY.get_sample_value("poc_gateway_forward_failures_total", {"kind": kind}) or 0.0


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, f"a.{'b' * 64}.example"])
async def test_a_host_that_is_no_name_is_a_failure(host: str) -> None:
    before = failures("address")
    async with Poster(settings()) as poster:
        answer = await poster.post(f"http://{host}/x", "{}")
    assert answer.outcome is Outcome.FAILED
    assert answer.reason.endswith("correct the address")
    assert failures("address") == before + 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("Fri, 31 Dec 99999999999999999999 00:00:00 GMT", 0),
        ("Fri, 31 Dec 2026 00:00:00 +99999999999", 0),
        ("Mon, 01 Jan 0001 00:00:00 +2300", 0),
        ("Mon, 01 Jan 0001 00:00:00 -0000", 0),
        ("soon", 0),
        ("1" * 400, inf),
        ("3600", 3600),
    ],
)
async def test_no_retry_after_is_too_odd(receiver: Receiver, value: str, seconds: float) -> None:
    receiver.answer = lambda _: web.Response(status=503, headers={"Retry-After": value})
    async with Poster(settings()) as poster:
        answer = await poster.post(receiver.url, "{}")
    assert (answer.outcome, answer.reason, answer.retry_after) == (Outcome.FAILED, "HTTP 503", seconds)


async def test_nothing_is_posted_while_another_may(receiver: Receiver) -> None:
    may = [False]
    async with Poster(settings(), lambda: may[0]) as poster:
        posting = asyncio.create_task(poster.post(receiver.url, "{}"))
        await asyncio.sleep(0.5)
        assert not receiver.posts
        may[0] = True
        assert (await posting).outcome is Outcome.ACCEPTED
    assert len(receiver.posts) == 1


async def test_a_right_that_is_lost_while_the_connection_is_made_is_looked_for_again(receiver: Receiver) -> None:
    answers = iter([True, False, False])
    async with Poster(settings(), lambda: next(answers, True)) as poster:
        assert (await poster.post(receiver.url, "{}")).outcome is Outcome.ACCEPTED
    await until(lambda: len(receiver.posts) == 1)
    await asyncio.sleep(0.2)
    assert len(receiver.posts) == 1, "of the first try nothing arrived that could be taken"


async def test_a_right_that_is_lost_for_good_ends_the_post(receiver: Receiver) -> None:
    def may_post() -> bool:
        raise FenceLost("the database's lock is lost")

    async with Poster(settings(), may_post) as poster:
        with pytest.raises(FenceLost):
            await poster.post(receiver.url, "{}")
    assert not receiver.posts


_POSTS = """
import asyncio, sys
from poc_gateway.outbox.post import Poster
from tests.support.builders.forwarding import settings

async def main() -> None:
    async with Poster(settings()) as poster:
        print((await poster.post(sys.argv[1], "{}")).outcome)

asyncio.run(main())
"""


@pytest.mark.parametrize(("trusted", "outcome"), [(True, Outcome.ACCEPTED), (False, Outcome.UNREACHABLE)])
async def test_a_ca_of_ones_own_is_trusted_by_a_variable(tmp_path: Path, outcome: Outcome, *, trusted: bool) -> None:
    """As docs/operate/gateway.md says. In a process of its own: the CAs are read once."""
    issue(tmp_path, "receiver")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def take(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/x", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    environment = os.environ | ({"SSL_CERT_FILE": str(tmp_path / "tls.crt")} if trusted else {})
    argv = [sys.executable, "-c", _POSTS, f"https://127.0.0.1:{port}/x"]
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment | {"PYTHONPATH": ":".join(sys.path)}, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    await runner.cleanup()
    assert told.decode().strip() == str(outcome)
