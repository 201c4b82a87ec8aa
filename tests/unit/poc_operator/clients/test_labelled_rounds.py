# SPDX-License-Identifier: Apache-2.0
"""Requests to the API server about rounds that are created on request, and what is made of its answers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.clients.errors import ObjectInvalid, StaleObject, StoreForbidden, StoreUnavailable, UnreadableObject
from poc_operator.clients.kube.labelled_rounds import LabelledRounds
from tests.support.fakes.kube_api import answering
from tests.unit.poc_operator.build import a_round

ROUNDS = "/apis/poc.gonka.ai/v1alpha1/namespaces/ns/pocrounds"
PODS = "/api/v1/namespaces/ns/pods"
SPEC = a_round().spec.model_dump(mode="json", by_alias=True, exclude_none=True)


class Api:
    """Answers rounds and pods, or with ``fault`` a status and a message, and ``details``; keeps what it was sent."""

    def __init__(self) -> None:
        self.fault: tuple[int, str] | None = None
        self.details: Any = None
        self.round = _made("one")
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.seen.append((request.method, request.path, dict(request.query), body))
        if self.fault is not None:
            status, message = self.fault
            body = {"kind": "Status", "code": status, "message": message, "details": self.details}
            return web.json_response(body, status=status)
        if request.path == PODS:
            pod = {"metadata": {"name": "a", "namespace": "ns", "uid": "u"}, "status": {"podIP": "10.0.0.1"}}
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": [pod]})
        if request.method == "GET":
            return web.json_response({"items": [self.round, _made("two")]})
        return web.json_response(self.round, status=201 if request.method == "POST" else 200)


def _made(name: str) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": "u",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": SPEC}


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, LabelledRounds]]:
    api = Api()
    async with answering(api.answer) as connection:
        yield api, LabelledRounds(connection, "ns", {"poc.gonka.ai/origin": "network"})


async def test_what_is_sent(api: tuple[Api, LabelledRounds]) -> None:
    server, rounds = api
    assert (await rounds.create("one", SPEC)).metadata.name == "one"
    assert [found.metadata.name for found in await rounds.list_rounds()] == ["one", "two"]
    assert [pod.ip for pod in await rounds.list_pods(LabelSelector(match_labels={"a": "b", "c": "d"}))] == ["10.0.0.1"]
    await rounds.finish("one")
    labels = {"poc.gonka.ai/origin": "network"}
    created, listed, pods, finished = server.seen
    assert created[:2] == ("POST", ROUNDS)
    assert created[3]["metadata"] == {"name": "one", "labels": labels}
    assert (created[3]["kind"], created[3]["spec"]) == ("PoCRound", SPEC)
    assert listed[:3] == ("GET", ROUNDS, {"labelSelector": "poc.gonka.ai/origin=network"})
    assert pods[:3] == ("GET", PODS, {"labelSelector": "a=b,c=d"})
    assert (*finished[:2], finished[3]) == ("PATCH", f"{ROUNDS}/one", {"spec": {"finish": True}})


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (422, ObjectInvalid, "spec.blockHash: must be"),
        (400, ObjectInvalid, "spec.blockHash: must be"),
        (409, StaleObject, ""),
        (403, StoreForbidden, "HTTP 403"),
        (500, StoreUnavailable, "HTTP 500"),
        (404, StoreUnavailable, 'no namespace "ns", or no PoCRound'),
    ],
)
async def test_refusals(api: tuple[Api, LabelledRounds], status: int, error: type[Exception], message: str) -> None:
    server, rounds = api
    server.fault = (status, "spec.blockHash: must be the block's hash")
    with pytest.raises(error) as caught:
        await rounds.create("one", SPEC)
    assert type(caught.value) is error
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("details", "fields"),
    [
        (None, ()),
        ({}, ()),
        ({"causes": None}, ()),
        (
            {"causes": [{"reason": "FieldValueInvalid", "message": 'Invalid value: " "', "field": "spec.publicKey"}]},
            (("spec.publicKey", 'Invalid value: " "'),),
        ),
        ({"causes": [{"message": "rounds are forbidden on Fridays"}]}, ()),
        (
            {"causes": [{"message": "Too long", "field": "spec.x"}, {"message": "some rules", "field": "<nil>"}]},
            (("spec.x", "Too long"),),
        ),
    ],
)
async def test_fields_that_the_api_server_names(
    api: tuple[Api, LabelledRounds], details: object, fields: tuple[tuple[str, str], ...]
) -> None:
    server, rounds = api
    server.fault, server.details = (422, "PoCRound is invalid"), details
    with pytest.raises(ObjectInvalid, match="PoCRound is invalid") as caught:
        await rounds.create("one", SPEC)
    assert caught.value.fields == fields


async def test_a_round_that_is_gone_needs_no_end(api: tuple[Api, LabelledRounds]) -> None:
    server, rounds = api
    server.fault = (404, "not found")
    await rounds.finish("one")
    with pytest.raises(StoreUnavailable):
        await rounds.list_rounds()


async def test_a_round_that_cannot_be_read_is_not_overlooked(api: tuple[Api, LabelledRounds]) -> None:
    """Its pods may compute: another round must not be started as if there was none."""
    server, rounds = api
    server.round["spec"] = SPEC | {"nodes": {}}
    with pytest.raises(UnreadableObject, match=r"spec\.nodes") as caught:
        await rounds.list_rounds()
    assert (caught.value.namespace, caught.value.name) == ("ns", "one")
    with pytest.raises(UnreadableObject, match=r"spec\.nodes"):
        await rounds.create("one", SPEC)


async def test_a_finished_round_that_cannot_be_read_harms_nobody(api: tuple[Api, LabelledRounds]) -> None:
    server, rounds = api
    server.round |= {"spec": SPEC | {"nodes": {}}, "status": {"state": "Complete"}}
    assert [found.metadata.name for found in await rounds.list_rounds()] == ["two"]
