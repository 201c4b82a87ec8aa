# SPDX-License-Identifier: Apache-2.0
"""What is asked when an object of a fleet is deleted. The rest is in ``tests/cluster/test_fleets.py``."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from poc_operator.clients.errors import StoreForbidden, StoreUnavailable
from poc_operator.clients.kube.fleet_objects import FleetObjects
from tests.support.fakes.kube_api import answering

JOB = {"kind": "Job", "metadata": {"namespace": "ns", "name": "demo-download-1", "uid": "u"}}


class Api:
    """Answers with one status; keeps what it was sent."""

    def __init__(self) -> None:
        self.status = 200
        self.seen: list[tuple[str, str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path, await request.json()))
        return web.json_response({"kind": "Status"}, status=self.status)


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, FleetObjects]]:
    api = Api()
    async with answering(api.answer) as connection:
        yield api, FleetObjects(connection, "poc-system")


async def test_an_object_is_deleted_with_its_pods_and_no_other_of_its_name(api: tuple[Api, FleetObjects]) -> None:
    server, objects = api
    await objects.delete(JOB)
    ((method, path, options),) = server.seen
    assert (method, path) == ("DELETE", "/apis/batch/v1/namespaces/ns/jobs/demo-download-1")
    assert (options["preconditions"], options["propagationPolicy"]) == ({"uid": "u"}, "Background")
    for status in (404, 409):  # it is gone, or another has its name
        server.status = status
        await objects.delete(JOB)


@pytest.mark.parametrize(("status", "error"), [(403, StoreForbidden), (500, StoreUnavailable)])
async def test_what_cannot_be_deleted_is_an_error(
    api: tuple[Api, FleetObjects], status: int, error: type[Exception]
) -> None:
    server, objects = api
    server.status = status
    with pytest.raises(error):
        await objects.delete(JOB)
