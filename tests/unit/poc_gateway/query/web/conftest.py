# SPDX-License-Identifier: Apache-2.0
"""The inside's app with its web page, as the process puts it together."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from fastapi import FastAPI

from poc_gateway.outbox.forward import Outbox
from poc_gateway.query.web import feed as feed_module
from poc_gateway.query.web.feed import Feed, Viewers
from poc_gateway.server.process import Components, inside_app
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.apis.v1alpha1.meta import Resource
from tests.support.builders.secrets import ENVIRONMENT


class Cluster:
    """Objects as the API server has them, and how often it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.questions = 0
        self.error: Exception | None = None

    async def list_objects(self, kind: type[Resource]) -> Sequence[Mapping[str, Any]]:
        self.questions += 1
        if self.error is not None:
            raise self.error
        return [body for body in self.bodies if body["kind"] == kind.KIND.kind]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def viewers() -> Viewers:
    return Viewers(2)


@pytest.fixture
async def feed(
    database: Database, viewers: Viewers, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Feed]:
    """A feed that looks often."""
    monkeypatch.setattr(feed_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(feed_module, "REST_FACTOR", 1.0)
    feed = Feed(database, viewers, cluster.list_objects)
    async with feed.running():
        yield feed


@pytest.fixture
def app(database: Database, feed: Feed) -> FastAPI:
    async def no_round(_: str, __: str) -> None:
        return None

    settings = Settings.from_environment(ENVIRONMENT)
    rounds, outbox = Rounds(database, no_round), Outbox(database, settings)
    return inside_app(Components(settings=settings, database=database, rounds=rounds, outbox=outbox, feed=feed))
