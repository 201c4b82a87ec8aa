# SPDX-License-Identifier: Apache-2.0
"""Receivers that ask for a user: what they are sent, and what waits while they do not take it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import generate_latest
from sqlalchemy import func, select

from poc_gateway.outbox.forward import Outbox
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import RoundTerms
from poc_gateway.store.schema import callbacks, late_items
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import StoreForbidden, StoreUnavailable
from poc_operator.clients.kube import callback_secret
from tests.support.builders.deliveries import a_round
from tests.support.builders.forwarding import (
    Post,
    Receiver,
    add_callback,
    add_round,
    running,
    settings,
    store,
    until,
)

OLD, NEW = BasicAuth("gateway", "old-secret-word"), BasicAuth("gateway", "new-secret-word")
URL = "http://collector.example.org/poc"


@dataclass
class Secrets:
    """The Secret "collector" of the namespace "default": what it has, or why it cannot be read."""

    content: BasicAuth | Exception = OLD
    reads: list[tuple[str, str]] = field(default_factory=list)

    async def read(self, namespace: str, name: str) -> BasicAuth:
        self.reads.append((namespace, name))
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


def asks_for(auth: BasicAuth) -> Callable[[Post], int]:
    return lambda post: 200 if post.authorization == auth.header else 401


def outbox(database: Database, secrets: Secrets | None) -> Outbox:
    return Outbox(database, settings(), read_secret=secrets.read if secrets is not None else None)


@pytest.fixture
def secrets() -> Secrets:
    return Secrets()


async def with_secret(database: Database, receiver: Receiver, nonces: int = 8) -> int:
    round_id = await add_round(database, receiver.url, receiver_secret="collector")  # noqa: S106 - its name
    await store(database, round_id, range(nonces))
    return round_id


async def refused(database: Database) -> int:
    letters = select(func.count()).select_from(late_items)
    dead = select(func.count()).select_from(callbacks).where(callbacks.c.state == "refused")
    return await database.read(
        lambda connection: sum(connection.execute(query).scalar_one() for query in (letters, dead))
    )


def test_a_rounds_terms_name_its_secret() -> None:
    assert RoundTerms.of(a_round()).receiver_secret is None
    named = a_round(callbackURL=URL, callbackSecretRef={"name": "collector"})
    assert RoundTerms.of(named).receiver_secret == "collector"  # noqa: S105 - its name


async def test_results_and_verdicts_of_a_round_are_sent_with_its_secret_and_others_without(
    database: Database, receiver: Receiver, secrets: Secrets
) -> None:
    round_id = await with_secret(database, receiver)
    other = await add_round(database, f"{receiver.url}/other")
    await store(database, other, [0])
    await add_callback(database, f"{receiver.url}/validated", {"id": 1}, round_id=round_id)
    await add_callback(database, f"{receiver.url}/validated", {"id": 2}, round_id=other)
    await add_callback(database, f"{receiver.url}/result", {"id": 3})
    async with running(outbox(database, secrets)):
        await until(lambda: len(receiver.accepted) == 6)
    sent = {(post.path, post.body.get("id"), post.authorization) for post in receiver.posts}
    assert sent == {
        ("/generated", None, OLD.header),
        ("/validated", 1, OLD.header),
        ("/other/generated", None, None),
        ("/validated", 2, None),
        ("/result", 3, None),
    }
    assert secrets.reads == [("default", "collector")], "it is read once a minute, however much is sent"


async def test_a_secret_that_changed_is_read_again_when_the_receiver_asks_for_it(
    database: Database, receiver: Receiver, secrets: Secrets
) -> None:
    round_id = await with_secret(database, receiver)
    receiver.answer = asks_for(OLD)
    async with running(outbox(database, secrets)):
        await until(lambda: len(receiver.nonces) == 8)
        receiver.answer, secrets.content = asks_for(NEW), NEW
        await store(database, round_id, range(8, 16))
        await until(lambda: len(receiver.nonces) == 16)
    assert len(secrets.reads) == 2
    assert [post.authorization for post in receiver.posts].count(OLD.header) == 3, "one post was in vain"
    assert await refused(database) == 0


async def test_what_the_receiver_does_not_take_waits_and_is_no_refusal(
    database: Database, receiver: Receiver, secrets: Secrets
) -> None:
    round_id = await with_secret(database, receiver)
    await add_callback(database, f"{receiver.url}/validated", {"id": 1}, round_id=round_id)
    receiver.answer = asks_for(NEW)
    reason = 'HTTP 401: the receiver does not take the user and the password of Secret "collector": correct the Secret'
    async with running(outbox(database, secrets)) as own:
        await until(lambda: (found := own.forwarder(round_id)) is not None and found.error == reason)
        posted = len(receiver.posts)
        await until(lambda: len(receiver.posts) >= posted + 2)
        assert receiver.accepted == []
        assert await refused(database) == 0
        await until(lambda: callback_waits_for(database, reason))
        secrets.content = NEW
        await until(lambda: len(receiver.accepted) == 3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LookupError(), 'Secret "collector" (spec.callbackSecretRef) does not exist in namespace "default": create it'),
        (StoreForbidden("HTTP 403: Forbidden"), "install the chart with rbac.readSecrets=true"),
        (StoreUnavailable("HTTP 503"), "cannot be read yet: HTTP 503"),
    ],
)
async def test_a_round_waits_for_its_secret_and_others_go_on(
    database: Database,
    receiver: Receiver,
    secrets: Secrets,
    fault: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callback_secret, "RETRY_SECONDS", 0.05)
    secrets.content = fault
    round_id = await with_secret(database, receiver)
    other = await add_round(database, receiver.url)
    await store(database, other, [0])
    async with running(outbox(database, secrets)) as own:
        await until(lambda: (found := own.forwarder(round_id)) is not None and message in (found.error or ""))
        await until(lambda: len(receiver.accepted) == 1)
        assert receiver.posts[0].authorization is None
        secrets.content = OLD
        await until(lambda: len(receiver.nonces) == 9)
    assert await refused(database) == 0


async def test_a_secret_that_is_deleted_stops_what_is_sent_after_the_receivers_401(
    database: Database, receiver: Receiver, secrets: Secrets
) -> None:
    round_id = await with_secret(database, receiver)
    async with running(outbox(database, secrets)) as own:
        await until(lambda: len(receiver.nonces) == 8)
        receiver.answer, secrets.content = asks_for(NEW), LookupError()
        await store(database, round_id, range(8, 16))
        await until(lambda: "does not exist" in str(getattr(own.forwarder(round_id), "error", None)))
    assert await refused(database) == 0


async def test_without_an_api_server_such_a_round_waits(database: Database, receiver: Receiver) -> None:
    round_id = await with_secret(database, receiver)
    async with running(outbox(database, None)) as own:
        await until(lambda: "has no API server" in str(getattr(own.forwarder(round_id), "error", None)))
    assert receiver.posts == []


async def test_the_password_is_in_no_table_log_or_metric(
    database: Database, receiver: Receiver, secrets: Secrets, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    round_id = await with_secret(database, receiver)
    await add_callback(database, f"{receiver.url}/validated", {"id": 1}, round_id=round_id)

    def repeat(post: Post) -> web.Response:
        # As a receiver that reports what it was sent.
        return web.Response(status=400, text=f"{post.authorization} {OLD.password} is not good enough")

    receiver.answer = repeat
    async with running(outbox(database, secrets)):
        await until(lambda: len(receiver.posts) > 8)
        receiver.answer = lambda _: 200
        await until(lambda: refused_all(database))
    database.close()
    stored = _bytes_below(tmp_path)
    assert b"Basic *** *** is not good enough" in stored
    for text in (stored, caplog.text.encode(), generate_latest()):
        for secret in (OLD.password, OLD.header.removeprefix("Basic ")):
            assert secret.encode() not in text


async def callback_waits_for(database: Database, reason: str) -> bool:
    row = await database.read(
        lambda connection: connection.execute(select(callbacks.c.state, callbacks.c.reason)).one()
    )
    return tuple(row) == ("waiting", reason)


def _bytes_below(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir() if file.is_file())


async def refused_all(database: Database) -> bool:
    return await refused(database) > 0
