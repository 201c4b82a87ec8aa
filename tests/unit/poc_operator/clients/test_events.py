# SPDX-License-Identifier: Apache-2.0
"""Events on pods and rounds, as the API server gets them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.kube.events import EventPoster
from tests.unit.poc_operator.build import a_pod


@pytest.fixture
async def posted() -> AsyncIterator[tuple[list[Any], EventPoster]]:
    """What was posted, and a poster; the API server refuses Events of the namespace "full"."""
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.match_info["namespace"] == "full":
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        seen.append(await request.json())
        return web.json_response(seen[-1], status=201)

    app = web.Application()
    app.router.add_post("/api/v1/namespaces/{namespace}/events", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    yield seen, EventPoster(api)
    await api.close()  # type: ignore[no-untyped-call]
    await runner.cleanup()


async def test_an_event_names_its_object(posted: tuple[list[Any], EventPoster]) -> None:
    seen, poster = posted
    await poster.post_on_pod(a_pod("a"), "OrphanStopped", "why")
    await poster.post_on_object(PoCRound.KIND, "ns", "r", "uid", "OrphanStopped", "x" * 5000)
    assert [event["involvedObject"] for event in seen] == [
        {"apiVersion": "v1", "kind": "Pod", "namespace": "ns", "name": "a", "uid": "a"},
        {"apiVersion": "poc.gonka.ai/v1alpha1", "kind": "PoCRound", "namespace": "ns", "name": "r", "uid": "uid"},
    ]
    assert {(event["type"], event["reason"]) for event in seen} == {("Warning", "OrphanStopped")}
    assert len({event["metadata"]["name"] for event in seen}) == 2
    assert len(seen[1]["message"].encode()) <= 1024, "as the API server wants it"


async def test_an_event_that_is_refused_is_no_matter(posted: tuple[list[Any], EventPoster]) -> None:
    seen, poster = posted
    await poster.post_on_pod(a_pod("a", namespace="full"), "OrphanStopped", "why")
    assert seen == []
