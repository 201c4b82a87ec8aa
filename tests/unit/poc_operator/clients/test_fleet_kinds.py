# SPDX-License-Identifier: Apache-2.0
"""Which objects of fleets are listed: kinds that a cluster need not have are those that it was last known to have."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from poc_operator.apis.v1alpha1.meta import GROUPS_API_VERSION, GROUPS_KIND
from poc_operator.clients.errors import StoreUnavailable
from poc_operator.clients.kube.fleet_objects import FleetObjects
from tests.support.fakes.kube_api import answering

DISCOVERY = f"/apis/{GROUPS_API_VERSION}"


class Api:
    """Has one LeaderWorkerSet, and tells of its kind when a test lets it: with this HTTP status."""

    def __init__(self) -> None:
        self.status = 200
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == DISCOVERY:
            self.asked.set()
            await self.answers.wait()
            return web.json_response({"resources": [{"kind": GROUPS_KIND}]}, status=self.status)
        found = [{"metadata": {"name": "large"}}] if request.path.endswith("/leaderworkersets") else []
        return web.json_response({"items": found})


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
async def objects(api: Api) -> AsyncIterator[FleetObjects]:
    async with answering(api.answer) as connection:
        yield FleetObjects(connection, "ns")
        api.answers.set()


async def listed(objects: FleetObjects) -> list[str]:
    return [str(body["kind"]) for body in await objects.list_all(())]


async def test_what_is_known_is_listed_while_the_cluster_is_asked_again(objects: FleetObjects, api: Api) -> None:
    """Each fleet asks now and then. To another one its LeaderWorkerSet would seem gone, and it would be made anew."""
    assert await listed(objects) == []
    assert await objects.leader_worker_sets()
    api.answers.clear()
    api.asked.clear()
    asks = asyncio.create_task(objects.leader_worker_sets())
    await api.asked.wait()
    assert await listed(objects) == [GROUPS_KIND]
    api.answers.set()
    assert await asks
    assert await listed(objects) == [GROUPS_KIND]


async def test_only_an_answer_says_that_a_kind_is_gone(objects: FleetObjects, api: Api) -> None:
    assert await objects.leader_worker_sets()
    api.status = 500
    with pytest.raises(StoreUnavailable):
        await objects.leader_worker_sets()
    assert await listed(objects) == [GROUPS_KIND]
    api.status = 404
    assert not await objects.leader_worker_sets()
    assert await listed(objects) == []
