# SPDX-License-Identifier: Apache-2.0
"""The Secret with the token of a namespace's pods: it is made where there is none, and whoever asks is told so."""

from base64 import b64decode
from typing import Any

import pytest
from aiohttp import web

from poc_operator.clients.errors import StoreForbidden
from poc_operator.clients.kube.fleet_objects import FleetObjects
from tests.support.fakes.kube_api import answering


class Api:
    """Answers a look at the Secret and its creation with these statuses; keeps what was created."""

    def __init__(self, look: int, creation: int = 201) -> None:
        self._statuses = {"GET": look, "POST": creation}
        self.created: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.created.append(await request.json())
        return web.json_response({"kind": "Status"}, status=self._statuses[request.method])


@pytest.mark.parametrize(
    ("api", "made"),
    [(Api(200), False), (Api(404), True), (Api(404, 409), False)],
    ids=["it is there", "there is none", "another makes it meanwhile"],
)
async def test_the_secret_is_made_where_there_is_none(api: Api, made: bool) -> None:
    async with answering(api.answer) as connection:
        assert await FleetObjects(connection, "poc-system").ensure_token("ns", "own") is made
    for body in api.created:
        assert body["metadata"]["name"] == "own"
        assert len(b64decode(body["data"]["token"])) > 30


async def test_without_the_right_to_make_it_that_is_an_error() -> None:
    async with answering(Api(404, 403).answer) as connection:
        with pytest.raises(StoreForbidden):
            await FleetObjects(connection, "poc-system").ensure_token("ns", "own")
