# SPDX-License-Identifier: Apache-2.0
"""What viewers are told: a snapshot, then changes; one look for all of them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import pytest

from poc_gateway.query.web import feed as feed_module
from poc_gateway.query.web.attention import MOST_ITEMS, items
from poc_gateway.query.web.feed import Feed, Viewers
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseUnavailable
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import StoreForbidden, StoreUnavailable
from tests.support.builders.web_page import a_fleet, a_round, condition, fill, trouble
from tests.unit.poc_gateway.query.web.conftest import Cluster


class Event(NamedTuple):
    id: str
    name: str
    content: Any


def parsed(text: str) -> Event | None:
    fields = dict(line.split(": ", 1) for line in text.strip().splitlines() if not line.startswith(":"))
    return Event(fields["id"], fields["event"], json.loads(fields["data"])) if "data" in fields else None


async def following(stream: AsyncGenerator[str]) -> Event:
    async with asyncio.timeout(30):
        async for text in stream:
            if (event := parsed(text)) is not None:
                return event
    raise AssertionError("the stream has ended")


async def until(stream: AsyncGenerator[str], name: str) -> Any:  # noqa: ANN401 - JSON
    """The next version of a section."""
    while True:
        event = await following(stream)
        if name in event.content["sections"]:
            return event.content["sections"][name]


async def test_a_snapshot_then_changes_alone(database: Database, feed: Feed, cluster: Cluster) -> None:
    body = a_round()
    cluster.bodies = [a_fleet(), body]
    await trouble(database, await fill(database, body, 700))
    stream = feed.stream(None)
    first = await following(stream)
    assert first.name == "snapshot"
    told = first.content["sections"]
    (fleet,), (round_,) = told["fleets"], told["rounds"]
    assert (fleet["ready"], fleet["replicas"], len(fleet["pods"])) == (7, 8, 8)
    assert fleet["pods"][1] == ["glm-1", "Ready", "Passed", "gpu-node-0", "round-41 1/0", ""]
    assert (round_["state"], round_["running"], round_["goal"]) == ("Running", 7, "1800 s")
    assert 0.69 < round_["share"] < 0.72
    results = {name: round_["stored"][name] for name in ("results", "conflicts", "dead", "expired", "undecided")}
    assert results == {"results": 700, "conflicts": 1, "dead": 1, "expired": 1, "undecided": 1}
    assert told["slots/round-41-uid"][0] == [0, 0, "Running", "glm-0", 1000, 100, 40, 1, 1, ""]
    cluster.bodies = [a_fleet(), a_round(delivered=1_200)]
    change = await following(stream)
    assert (change.name, sorted(change.content["sections"])) == ("changes", ["rounds", "slots/round-41-uid"])
    cluster.bodies = [a_fleet(pods=9)]
    assert (await until(stream, "rounds"))[0]["state"] == "NotInCluster"
    await stream.aclose()


async def test_what_needs_attention_comes_with_what_to_do(database: Database, feed: Feed, cluster: Cluster) -> None:
    lost = condition("Degraded", "True", "SlotsFailed", "1 slot was given up")
    body = a_round(conditions=[lost], degraded="SlotsFailed,ResultsConflict")
    cluster.bodies = [a_fleet(), body]
    await trouble(database, await fill(database, body, 70))
    stream = feed.stream(None)
    items = await until(stream, "attention")
    await stream.aclose()
    found = {item["reason"]: item for item in items}
    assert set(found) == {
        "SelfCheckFailed",
        "SlotsFailed",
        "ResultsConflict",
        "ResultsRefused",
        "ResultsExpired",
        "ResultsUndecided",
    }
    assert found["SlotsFailed"]["command"] == "kubectl poc -n poc explain round-41"
    assert found["ResultsExpired"]["command"] == "POST /rounds/poc/round-41/ledger/replay?state=expired"
    assert all(item["remedy"] and "`" not in item["remedy"] for item in items)
    assert [item["act"] for item in items] == sorted((item["act"] for item in items), reverse=True)


async def test_all_viewers_share_one_look(feed: Feed, cluster: Cluster, viewers: Viewers) -> None:
    viewers.most = 100
    streams = [feed.stream(None) for _ in range(50)]
    firsts = await asyncio.gather(*[following(stream) for stream in streams])
    assert len({event.id for event in firsts}) == 1
    # The look that told them, and perhaps one that has begun since: of each, two lists.
    assert cluster.questions <= 6
    for stream in streams:
        await stream.aclose()
    assert viewers.now == 0


async def test_nobody_asks_the_cluster_while_nobody_watches(feed: Feed, cluster: Cluster, viewers: Viewers) -> None:
    await viewers.changed(0.2)
    assert cluster.questions == 0
    stream = feed.stream(None)
    cluster.bodies = [a_fleet()]
    assert len((await following(stream)).content["sections"]["fleets"]) == 1
    await stream.aclose()
    cluster.bodies = []
    async with asyncio.timeout(30):
        while feed.fresh:
            await viewers.changed(0.01)
    again = feed.stream(None)
    # Not what the last viewer was told: a look of now.
    assert (await following(again)).content["sections"]["fleets"] == []
    await again.aclose()


async def test_one_that_comes_back_gets_what_it_missed(feed: Feed, cluster: Cluster) -> None:
    held, stream = feed.stream(None), feed.stream(None)
    first = await following(stream)
    await following(held)
    await stream.aclose()
    cluster.bodies = [a_fleet()]
    missed = await following(held)
    back = feed.stream(first.id)
    assert await following(back) == missed
    await back.aclose()
    for other in ("0badcafe-1", "nonsense", first.id.replace("-", "-9")):
        back = feed.stream(other)
        assert (await following(back)).name == "snapshot", other
        await back.aclose()
    await held.aclose()


async def test_who_was_away_for_long_gets_a_snapshot(feed: Feed, cluster: Cluster) -> None:
    held, stream = feed.stream(None), feed.stream(None)
    first = await following(stream)
    await following(held)
    await stream.aclose()
    for number in range(feed_module.MOST_KEPT + 1):
        cluster.bodies = [a_fleet(pods=2 + number % 2)]
        await until(held, "fleets")
    back = feed.stream(first.id)
    assert (await following(back)).name == "snapshot"
    await back.aclose()
    await held.aclose()


async def test_streams_end_with_the_server_and_beyond_the_limit(feed: Feed, viewers: Viewers) -> None:
    streams = [feed.stream(None) for _ in range(viewers.most)]
    for stream in streams:
        await following(stream)
    assert [text async for text in feed.stream(None)] == []
    viewers.end()
    async with asyncio.timeout(20):
        for stream in streams:
            assert [parsed(text) async for text in stream if parsed(text) is not None] == []
    assert viewers.now == 0


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (StoreUnavailable("connection refused"), "The API server does not answer (connection refused)"),
        (StoreForbidden("pocfleets is forbidden"), "The gateway may not list fleets and rounds"),
    ],
)
async def test_without_the_api_server_results_are_shown(
    database: Database, feed: Feed, cluster: Cluster, error: Exception, sentence: str
) -> None:
    await fill(database, a_round(), 70)
    cluster.error = error
    stream = feed.stream(None)
    told = (await following(stream)).content["sections"]
    assert told["gateway"]["problems"][0].startswith(sentence)
    assert (told["rounds"][0]["state"], told["rounds"][0]["stored"]["results"]) == ("NotInCluster", 70)
    cluster.error = None
    assert (await until(stream, "gateway"))["problems"] == []
    await stream.aclose()


async def test_without_the_database_objects_are_shown(
    database: Database, feed: Feed, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: object) -> None:
        raise DatabaseUnavailable("it is away")

    cluster.bodies = [a_round()]
    monkeypatch.setattr(database, "read", fails)
    stream = feed.stream(None)
    told = (await following(stream)).content["sections"]
    assert "it is away" in told["gateway"]["problems"][0]
    assert (told["rounds"][0]["state"], told["rounds"][0]["stored"]) == ("Running", None)
    await stream.aclose()


def test_what_is_not_shown_is_looked_up_in_all_namespaces() -> None:
    rounds = [
        PoCRound.parse(a_round(f"round-{number}", conditions=[condition("Degraded", "True", "SlotsStalled", "why")]))
        for number in range(MOST_ITEMS + 2)
    ]
    rest = items([], rounds, None, disk_full=False)[-1]
    assert (rest["seen"], rest["command"]) == ("2 more are not shown.", "kubectl poc status -A")
