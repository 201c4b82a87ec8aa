# SPDX-License-Identifier: Apache-2.0
"""Several gateways on one PostgreSQL, each a process of its own: all of them serve, and one forwards."""

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psycopg
import pytest
from aiohttp import web
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, insert, make_url, select, update

from poc_gateway.node_api.service import NodeApi
from poc_gateway.outbox import ledger
from poc_gateway.outbox.commands import Commands
from poc_gateway.server import owner, standby
from poc_gateway.server.owner import FOREIGN_SECONDS, Owner
from poc_gateway.settings import Settings
from poc_gateway.store import migrations
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.fence import next_epoch
from poc_gateway.store.retention import Clock
from poc_gateway.store.rounds import Rounds
from poc_gateway.store.schema import jobs, slots
from poc_operator.observed import Truth
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.deliveries import JSON, artifacts, path, round_body
from tests.support.builders.forwarding import Post, Receiver, until

PAYLOAD = 100
#: Seconds in which another process must forward after the owner was killed, and after it has hung.
TAKEN_OVER, HUNG = 12, 30

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


class Fleet:
    """Gateways on one database, and the receiver of their round."""

    def __init__(self, database_url: str, folder: Path, receiver: Receiver) -> None:
        self.url, self._folder, self.receiver = database_url, folder, receiver
        self.gateways: list[GatewayProcess] = []
        self.client = httpx.AsyncClient(timeout=30)
        self._rounds = folder / "rounds.json"
        self._rounds.write_text(json.dumps([round_body(callbackURL=receiver.url)]))

    def start(self, stack: ExitStack) -> GatewayProcess:
        log = self._folder / str(len(self.gateways))
        settings = {
            "POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8",
            "POC_GATEWAY_PAYLOAD_ARTIFACTS": str(PAYLOAD),
            "POC_GATEWAY_RETRY_FIRST_SECONDS": "0.2",
            "POC_GATEWAY_RETRY_LIMIT_SECONDS": "0.5",
        }
        self.gateways.append(stack.enter_context(gateway(self.url, self._rounds, log, settings)))
        return self.gateways[-1]

    def log(self, one: GatewayProcess) -> str:
        return (self._folder / str(self.gateways.index(one))).read_text()

    async def owner(self, among: Sequence[GatewayProcess] | None = None, seconds: float = HUNG) -> GatewayProcess:
        """Wait until one of them owns the database."""
        found = list[GatewayProcess]()

        async def owns() -> bool:
            found[:] = [one for one in among or self.gateways if (await self.series(one))["poc_gateway_owner"] == 1]
            return bool(found)

        await until(owns, seconds)
        (one,) = found
        return one

    async def series(self, one: GatewayProcess) -> dict[str, float]:
        text_ = (await self.client.get(one.metrics_url)).text
        return {name: float(value) for name, value in re.findall(r"^(poc_gateway_\w+) (\S+)$", text_, re.MULTILINE)}

    async def deliver(self, one: GatewayProcess, nonces: Sequence[int]) -> None:
        answer = await self.client.post(one.url + path(), content=artifacts(nonces), headers=JSON)
        assert answer.status_code == 200, answer.text
        assert answer.json()["stored"] == len(nonces)

    async def forwarded(self, total: int, seconds: float) -> None:
        await until(lambda: len(self.nonces()) == total, seconds)

    def nonces(self) -> Counter[int]:
        return Counter(nonce for post in self.receiver.accepted for nonce in sent(post))

    def counted(self) -> list[tuple[int, int]]:
        engine = create_engine(make_url(self.url).set(drivername="postgresql+psycopg"))
        with engine.connect() as connection:
            rows = connection.execute(select(slots.c.stored, slots.c.forwarded)).all()
        engine.dispose()
        return [(stored, forwarded) for stored, forwarded in rows]


def sent(post: Post) -> list[int]:
    return [artifact["nonce"] for artifact in post.body["artifacts"]]


async def slowly(_: Post) -> int:
    await asyncio.sleep(0.1)
    return 200


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Receiver().served() as receiver:
        fleet = Fleet(database_url, tmp_path, receiver)
        yield fleet
        await fleet.client.aclose()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def test_all_serve_and_one_forwards(fleet: Fleet, stack: ExitStack) -> None:
    for _ in range(3):
        await asyncio.to_thread(fleet.start, stack)
    for start in range(0, 900, 100):
        # The largest nonces first: what comes below them by another process is late, and must not be passed over.
        await fleet.deliver(fleet.gateways[start // 100 % 3], range(800 - start, 900 - start))
    await fleet.forwarded(900, 20)
    await asyncio.sleep(1.5)
    assert set(fleet.nonces().values()) == {1}
    await until(lambda: fleet.counted() == [(900, 900)])
    owner = await fleet.owner()
    for one in fleet.gateways:
        assert (await fleet.client.get(one.url + "/readyz")).status_code == 200
        series, is_owner = await fleet.series(one), one is owner
        assert series["poc_gateway_owner"] == is_owner
        assert ("poc_gateway_backlog_artifacts" in series) == is_owner
        page = (await fleet.client.get(f"{one.url}/rounds/ns/round-uid-1/forwarding")).json()
        assert (page["forwarded"], page["backlog"], page["last_error"]) == (900, 0, None)


async def test_another_takes_over_from_an_owner_that_is_killed(fleet: Fleet, stack: ExitStack) -> None:
    fleet.receiver.answer = slowly
    for _ in range(2):
        await asyncio.to_thread(fleet.start, stack)
    owner = await fleet.owner()
    (other,) = [one for one in fleet.gateways if one is not owner]
    for start in range(0, 3_000, 500):
        await fleet.deliver(other, range(start, start + 500))
    await until(lambda: len(fleet.receiver.posts) > 5)
    owner.process.kill()
    killed, posts = monotonic(), len(fleet.receiver.posts)
    await fleet.deliver(other, range(3_000, 3_100))  # at once, since nothing of the owner is needed for it
    await until(lambda: len(fleet.receiver.posts) > posts + 1, TAKEN_OVER)
    assert monotonic() - killed < TAKEN_OVER
    await fleet.forwarded(3_100, 30)
    assert sum(fleet.nonces().values()) <= 3_100 + PAYLOAD, "the payload that was on its way"
    assert in_order(fleet.receiver.accepted)
    await until(lambda: fleet.counted() == [(3_100, 3_100)])


def in_order(posts: Sequence[Post]) -> bool:
    """Whether no nonce comes after a larger one, but for a payload that is repeated as a whole."""
    firsts = list(dict.fromkeys(tuple(sent(post)) for post in posts))
    return [nonce for nonces in firsts for nonce in nonces] == sorted(nonce for nonces in firsts for nonce in nonces)


async def test_an_owner_that_hung_sends_and_marks_nothing_more(fleet: Fleet, stack: ExitStack) -> None:
    fleet.receiver.answer = slowly
    first = await asyncio.to_thread(fleet.start, stack)
    await fleet.owner()
    second = await asyncio.to_thread(fleet.start, stack)
    for start in range(0, 6_000, 500):
        await fleet.deliver(second, range(start, start + 500))
    await until(lambda: len(fleet.receiver.posts) > 5)
    first.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(1.0)  # what was on its way has arrived
        stopped = sum(fleet.nonces().values())
        await fleet.deliver(second, range(6_000, 6_100))
        await fleet.owner([second])
        await until(lambda: sum(fleet.nonces().values()) > stopped, HUNG)
    finally:
        first.process.send_signal(signal.SIGCONT)
    await fleet.forwarded(6_100, 40)
    await asyncio.sleep(3.0)  # in which the first one might send
    assert sum(fleet.nonces().values()) <= 6_100 + PAYLOAD, "the payload that was on its way when it hung"
    assert in_order(fleet.receiver.accepted)
    assert fleet.counted() == [(6_100, 6_100)]
    # It serves again, and is told of the database as any other.
    await fleet.deliver(first, range(6_100, 6_200))
    await fleet.forwarded(6_200, 20)
    assert (await fleet.series(first))["poc_gateway_owner"] == 0
    second.process.kill()
    await fleet.deliver(first, range(6_200, 6_300))
    await fleet.forwarded(6_300, TAKEN_OVER)


@pytest.mark.long
async def test_an_owner_that_hung_between_two_posts_does_not_go_on_with_the_next(
    fleet: Fleet, stack: ExitStack
) -> None:
    """Its pause is over when it continues, and the next owner has the same payload on its way."""
    fleet.receiver.answer = lambda _: 503
    first = await asyncio.to_thread(fleet.start, stack)
    await fleet.owner()
    second = await asyncio.to_thread(fleet.start, stack)
    await fleet.deliver(second, range(500))
    await until(lambda: len(fleet.receiver.posts) > 2)
    first.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(1.0)
        taken = asyncio.Event()

        async def held(_: Post) -> int:
            taken.set()
            await asyncio.sleep(2.0)
            return 200

        fleet.receiver.answer = held
        await asyncio.wait_for(taken.wait(), HUNG)
    finally:
        first.process.send_signal(signal.SIGCONT)
    await fleet.forwarded(500, 40)
    await until(lambda: fleet.counted() == [(500, 500)])  # the receiver knows of a payload before it has answered
    assert set(fleet.nonces().values()) == {1}


async def test_an_owner_that_ends_in_order_repeats_nothing(fleet: Fleet, stack: ExitStack) -> None:
    fleet.receiver.answer = slowly
    for _ in range(2):
        await asyncio.to_thread(fleet.start, stack)
    owner = await fleet.owner()
    (other,) = [one for one in fleet.gateways if one is not owner]
    for start in range(0, 3_000, 500):
        await fleet.deliver(owner, range(start, start + 500))
    await until(lambda: len(fleet.receiver.posts) > 5)
    owner.process.terminate()
    await fleet.forwarded(3_000, 30)
    assert set(fleet.nonces().values()) == {1}
    assert await asyncio.to_thread(owner.process.wait, 30) == 0
    assert (await fleet.series(other))["poc_gateway_owner"] == 1


async def test_what_only_the_owner_can_do_is_asked_of_any(fleet: Fleet, stack: ExitStack) -> None:
    fleet.receiver.answer = lambda _: 503
    for _ in range(2):
        await asyncio.to_thread(fleet.start, stack)
    owner = await fleet.owner()
    (other,) = [one for one in fleet.gateways if one is not owner]
    await fleet.deliver(owner, range(300))
    ledger = f"{other.url}/rounds/ns/round-uid-1"

    async def forwarding() -> dict[str, Any]:
        found: dict[str, Any] = (await fleet.client.get(f"{ledger}/forwarding")).json()
        return found

    async def failed() -> bool:
        return "503" in str((await forwarding())["last_error"])

    await until(failed)
    abandoned = await fleet.client.delete(f"{ledger}/ledger", params={"reason": "too late"})
    assert (abandoned.status_code, abandoned.json()) == (200, {"abandoned": 300})
    assert (await forwarding())["abandoned"] == 300
    fleet.receiver.answer = lambda _: 200
    replayed = await fleet.client.post(f"{ledger}/ledger/replay", params={"state": "abandoned"})
    assert (replayed.status_code, replayed.json()) == (200, {"replayed": 300})
    await fleet.forwarded(300, 20)
    # A dead letter, which the other one lets wait again itself.
    fleet.receiver.answer = lambda post: 400 if 333 in sent(post) else 200
    await fleet.deliver(other, range(300, 400))

    async def dead() -> bool:
        return bool((await forwarding())["dead"] == 1)

    await until(dead)
    fleet.receiver.answer = lambda _: 200
    replayed = await fleet.client.post(f"{ledger}/dead-letters/replay")
    assert replayed.json() == {"replayed": 1}
    await fleet.forwarded(400, 20)
    assert set(fleet.nonces().values()) == {1}


async def test_a_rival_is_decided_by_way_of_any(fleet: Fleet, stack: ExitStack) -> None:
    fleet.receiver.answer = lambda _: 503  # so that the nonce is not sent before its rival comes
    for _ in range(2):
        await asyncio.to_thread(fleet.start, stack)
    owner = await fleet.owner()
    (other,) = [one for one in fleet.gateways if one is not owner]
    await fleet.deliver(owner, [0, 1])
    lie = json.loads(artifacts([7]))["artifacts"][0]["vector_b64"]
    body = artifacts([], artifacts=[{"nonce": 1, "vector_b64": lie}])
    told = (await fleet.client.post(other.url + path(), content=body, headers=JSON)).json()
    assert told["conflicts"] == 1
    fleet.receiver.answer = lambda _: 200
    await fleet.forwarded(1, 20)
    decision = {"nonce": 1, "truth": Truth.STORED, "up_to": 2**40, "pod": "c"}
    decided = await fleet.client.post(
        f"{other.url}/rounds/ns/round-uid-1/rivals", json={"uid": "uid-1", "decisions": [decision]}
    )
    assert (decided.status_code, decided.json()) == (200, {"decided": 1}), decided.text
    await fleet.forwarded(2, 20)


@asynccontextmanager
async def locked(url: str) -> AsyncIterator[None]:
    """Hold the owner's lock, as a gateway does that can do nothing else."""
    connection = await psycopg.AsyncConnection.connect(
        make_url(url).set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
    )
    await connection.execute("SELECT pg_advisory_lock(%s)", (0x706F_635F_6777,))
    try:
        yield
    finally:
        await connection.close()


async def test_without_an_owner_all_serve_and_nothing_is_lost(fleet: Fleet, stack: ExitStack) -> None:
    async with locked(fleet.url):
        one = await asyncio.to_thread(fleet.start, stack)
        await fleet.deliver(one, range(200))
        assert (await fleet.series(one))["poc_gateway_owner"] == 0
        assert "another gateway owns the database" in fleet.log(one)
        assert not fleet.receiver.posts
    await fleet.forwarded(200, TAKEN_OVER)


async def test_a_gateway_of_before_several_is_fenced_out(database_url: str) -> None:
    """One that has the database for itself stops to write when a gateway of this release has migrated it."""
    before = Database.open(database_url, fenced=True)
    await before.write(lambda _: None)
    config = Config()
    config.set_main_option("script_location", str(migrations._SCRIPTS))
    with before.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0008")
    await before.write(lambda _: None)
    Database.open(database_url).close()
    with pytest.raises(FenceLost):
        await before.write(lambda _: None)
    before.close()


@pytest.mark.long
async def test_a_receiver_that_hangs_holds_no_takeover_up(fleet: Fleet, stack: ExitStack) -> None:
    async def never(_: Post) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    fleet.receiver.answer = never
    for _ in range(2):
        await asyncio.to_thread(fleet.start, stack)
    owner = await fleet.owner()
    (other,) = [one for one in fleet.gateways if one is not owner]
    await fleet.deliver(other, range(100))
    await until(lambda: len(fleet.receiver.posts) == 1)
    owner.process.kill()
    fleet.receiver.answer = lambda _: 200
    await fleet.forwarded(100, TAKEN_OVER)


async def test_a_request_for_an_ml_node_that_is_not_listed_fails_when_it_has_waited_for_long(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "FOREIGN_LOOK_SECONDS", 0.05)
    now = ledger.now()
    ages = {"5001:a.old": FOREIGN_SECONDS + 1, "5001:b.old": FOREIGN_SECONDS + 1, "5001:b.new": 0}
    rows = [
        {"id": id_, "request": "{}", "state": "queued", "created_at": now - int(age * 1_000)}
        for id_, age in ages.items()
    ]
    await database.write(lambda one: one.execute(insert(jobs), rows) and None)

    async def failed() -> list[str]:
        return await database.read(lambda one: list(one.scalars(select(jobs.c.id).where(jobs.c.state == "failed"))))

    async def has_failed(ids: list[str]) -> bool:
        return sorted(await failed()) == ids

    task = asyncio.create_task(owner._fail_foreign_jobs(database, ["a"]))
    try:
        await until(lambda: has_failed(["5001:b.old"]))
        await asyncio.sleep(0.2)
        assert await failed() == ["5001:b.old"], "gateways of another release may know its ML node"
        await database.write(lambda one: one.execute(update(jobs).values(created_at=1)) and None)
        await until(lambda: has_failed(["5001:b.new", "5001:b.old"]))
    finally:
        task.cancel()
        await asyncio.wait([task])


class _IdleJobs:
    async def run_queued(self, _: Clock) -> None:
        await asyncio.Event().wait()


async def test_a_fence_that_any_of_its_works_finds_lost_makes_the_owner_stand_by(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a process hung for a minute: the look for foreign jobs is the first that writes."""
    monkeypatch.setattr(owner, "FOREIGN_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(standby, "LOOK_SECONDS", 5.0)  # so that no other work finds it first

    async def no_round(*_: str) -> None:
        return None

    node = cast("NodeApi", SimpleNamespace(ml_node=SimpleNamespace(name="a"), jobs=_IdleJobs()))
    settings = Settings.from_environment({"POC_GATEWAY_DATABASE": database_url})
    one = Owner(settings, commands=Commands(database), rounds=Rounds(database, no_round), ml_nodes=[node])
    task = asyncio.create_task(one.run())
    try:
        for _ in range(2):
            await until(lambda: one.owns or task.done(), 20)
            await database.write(lambda connection: next_epoch(connection) and None)  # another process owns it
            await until(lambda: not one.owns, 20)
            assert not task.done(), task.exception()
        await until(lambda: one.owns, 20)
    finally:
        task.cancel()
        await asyncio.wait([task])
