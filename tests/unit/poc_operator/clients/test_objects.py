# SPDX-License-Identifier: Apache-2.0
"""Objects in the API server: what is asked, what is written, and what is made of an object that makes no sense."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.fleet import FleetStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import Download
from poc_operator.apis.v1alpha1.meta import LabelSelector, Operator, Requirement
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import (
    EvictionRefused,
    ObjectGone,
    StaleObject,
    StoreError,
    StoreForbidden,
    StoreUnavailable,
    UnreadableObject,
)
from poc_operator.clients.kube.objects import PAGE_OBJECTS, PAGE_PODS, ObjectStore, merge_patch
from poc_operator.rounds.plan import plan
from tests.support.fakes.kube_api import answering
from tests.unit.poc_operator.build import NOW, a_calibration, a_pod, a_round, a_validation, look, says

API = "/apis/poc.gonka.ai/v1alpha1/namespaces/ns"
#: Conditions of other writers: they need not be complete.
FOREIGN: list[dict[str, Any]] = [
    {"type": "Foreign", "status": "True", "reason": "X", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    {"type": "Bare"},
    {"type": "Odd", "status": True, "lastTransitionTime": "yesterday"},
]


class Api:
    """Answers with one object; keeps what it was sent."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = body_of(a_round())
        self.more: list[dict[str, Any]] = []  # objects that are listed after it
        self.pods: list[dict[str, Any]] = []
        self.eviction: tuple[int, dict[str, Any]] = (201, {"kind": "Status", "status": "Success"})
        self.secrets: dict[str, dict[str, Any]] = {}
        self.status = 200
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.seen.append((request.method, request.path, dict(request.query), body))
        if "/pods" in request.path:
            return self._of_pods(request)
        if request.path.endswith("configmaps/none"):
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        if "/secrets/" in request.path:
            secret = self.secrets.get(request.path.rsplit("/", 1)[-1], {"code": 404})
            return web.json_response({"apiVersion": "v1", **secret}, status=secret.get("code", 200))
        if "/configmaps/" in request.path:
            return web.json_response(
                {"kind": "ConfigMap", "metadata": {"resourceVersion": "7"}, "data": {"proofs.json": "[]"}}
            )
        if not self.body:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        listed = request.path.rsplit("/", 1)[-1].startswith("poc")
        return web.json_response(_page(request, [self.body, *self.more]) if listed else self.body)

    def _of_pods(self, request: web.Request) -> web.Response:
        if request.path.endswith("/eviction"):
            return web.json_response(self.eviction[1], status=self.eviction[0])
        return web.json_response({"kind": "PodList", **_page(request, self.pods)}, status=self.status)


def _page(request: web.Request, items: list[dict[str, Any]]) -> dict[str, Any]:
    begin, most = int(request.query.get("continue", "0")), int(request.query["limit"])
    rest = {"continue": str(begin + most)} if begin + most < len(items) else {}
    return {"metadata": rest, "items": items[begin : begin + most]}


def body_of(work: PoCRound | PoCValidation | PoCCalibration) -> dict[str, Any]:
    """The object as the API server has it."""
    body: dict[str, Any] = json.loads(work.model_dump_json(by_alias=True, exclude_none=True))
    return body


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, ObjectStore]]:
    api = Api()
    async with answering(api.answer) as connection:
        store = ObjectStore(connection)
        yield api, store
        await store.close()


@pytest.mark.parametrize("work", [a_round(), a_validation(), a_calibration()], ids=lambda work: work.KIND.kind)
async def test_each_kind_is_read_where_it_is(
    api: tuple[Api, ObjectStore], work: PoCRound | PoCValidation | PoCCalibration
) -> None:
    server, store = api
    server.body = body_of(work)
    assert await store.get(type(work), "ns", "r") == work
    assert await store.list_bodies(type(work), []) == [server.body]
    assert await store.list_bodies(type(work), ["ns"]) == [server.body]
    plural = work.KIND.plural
    paths = [f"{API}/{plural}/r", f"/apis/poc.gonka.ai/v1alpha1/{plural}", f"{API}/{plural}"]
    assert [path for _, path, _, _ in server.seen] == paths


@pytest.mark.parametrize(("field", "value"), [("nodes", {"first": 0}), ("port", "http"), ("blockHash", "ab")])
async def test_an_object_that_makes_no_sense_names_its_field(
    api: tuple[Api, ObjectStore], field: str, value: object
) -> None:
    server, store = api
    server.body["spec"][field] = value
    with pytest.raises(UnreadableObject, match=f"spec.{field}") as caught:
        await store.get(PoCRound, "ns", "r")
    assert caught.value.generation == 1


@pytest.mark.parametrize(
    ("served", "unserved"),
    [
        (None, ["pocrounds.poc.gonka.ai", "pocvalidations.poc.gonka.ai"]),
        ([], ["pocrounds.poc.gonka.ai", "pocvalidations.poc.gonka.ai"]),
        (["pocrounds", "pocrounds/status"], ["pocvalidations.poc.gonka.ai"]),
        (["pocrounds", "pocvalidations", "pocfleets"], []),
    ],
)
async def test_kinds_that_are_not_served_are_found(
    api: tuple[Api, ObjectStore], served: list[str] | None, unserved: list[str]
) -> None:
    """Without the CRDs, the API server does not know the group (404)."""
    server, store = api
    kinds = [{"name": name, "singularName": "", "namespaced": True, "kind": "K", "verbs": []} for name in served or []]
    server.body = {"groupVersion": "poc.gonka.ai/v1alpha1", "resources": kinds} if served is not None else {}
    assert await store.unserved([PoCRound, PoCValidation]) == unserved
    assert server.seen[0][:2] == ("GET", "/apis/poc.gonka.ai/v1alpha1")


async def test_many_objects_are_listed_in_pages(api: tuple[Api, ObjectStore]) -> None:
    """The API server's answer is read in one piece, in which nothing else is done."""
    server, store = api
    server.more = [{"number": number} for number in range(2 * PAGE_OBJECTS)]
    assert await store.list_bodies(PoCRound, []) == [server.body, *server.more]
    assert {query["limit"] for _, _, query, _ in server.seen} == {str(PAGE_OBJECTS)}
    assert len(server.seen) == 3


async def test_words_of_another_version_in_a_status_are_read(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    slot = {"node": 0, "group": 0, "state": "Dreaming"}
    server.body["status"] = {"state": "Baked", "slots": 1, "groups": 1, "assignments": [slot]}
    round_ = await store.get(PoCRound, "ns", "r")
    assert round_ is not None
    assert plan(look(round_, (a_pod("a"), says()))).status.state == "Pending"


async def test_pods_are_selected_by_the_api_server(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    requirement = Requirement(key="gpu", operator=Operator.NOT_IN, values=["none", "old"])
    await store.list_pods("ns", LabelSelector(match_labels={"a": "b"}, match_expressions=[requirement]))
    method, path, query, _ = server.seen[0]
    assert (method, path, query["labelSelector"]) == ("GET", "/api/v1/namespaces/ns/pods", "a=b,gpu notin (none,old)")


@pytest.mark.parametrize("count", [0, 1, PAGE_PODS - 1, PAGE_PODS, PAGE_PODS + 1, 3 * PAGE_PODS])
async def test_many_pods_are_listed_in_pages(api: tuple[Api, ObjectStore], count: int) -> None:
    server, store = api
    metadata = {"namespace": "ns", "labels": {"a": "b"}}
    server.pods = [{"metadata": {**metadata, "name": f"pod-{i}", "uid": str(i)}} for i in range(count)]
    found = await store.list_pods("ns", LabelSelector(match_labels={"a": "b"}))
    assert [pod.uid for pod in found] == [str(i) for i in range(count)]
    assert len(server.seen) == max(1, -(-count // PAGE_PODS))


async def test_pods_are_listed_without_the_clients_models(
    api: tuple[Api, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would block the event loop for milliseconds, and there are thousands of pods."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a model was made of a pod")

    monkeypatch.setattr(client.V1Pod, "from_dict", made)
    server, store = api
    server.pods = [{"metadata": {"namespace": "ns", "name": "a", "uid": "1", "labels": {"a": "b"}}}]
    assert [pod.uid for pod in await store.list_pods("ns", LabelSelector(match_labels={"a": "b"}))] == ["1"]
    assert await store.pod("ns", "a") is not None


@pytest.mark.parametrize(("status", "error"), [(403, StoreForbidden), (410, StoreUnavailable), (500, StoreUnavailable)])
async def test_a_list_that_fails_is_no_empty_one(
    api: tuple[Api, ObjectStore], status: int, error: type[Exception]
) -> None:
    server, store = api
    server.status = status
    with pytest.raises(error, match=f"HTTP {status}"):
        await store.list_pods("ns", LabelSelector(match_labels={"a": "b"}))


async def test_a_pod_is_found_by_its_name(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    assert await store.pod("ns", "a") is None
    method, path, query, _ = server.seen[0]
    assert (method, path, query["fieldSelector"]) == ("GET", "/api/v1/namespaces/ns/pods", "metadata.name=a")
    server.pods = [{"metadata": {"name": "a", "namespace": "ns", "uid": "u"}}]
    found = await store.pod("ns", "a")
    assert found is not None
    assert found.uid == "u"


async def test_a_status_is_written_against_what_was_read(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    await store.write_status(a_round(), RoundStatus(start_time=NOW))
    method, path, _, body = server.seen[0]
    assert (method, path, body["metadata"]) == ("PATCH", f"{API}/pocrounds/r/status", {"resourceVersion": "1"})


async def test_an_object_is_deleted_as_it_is_known(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    round_ = a_round()
    await store.delete(round_)
    method, path, _, body = server.seen[-1]
    assert (method, path) == ("DELETE", f"{API}/pocrounds/r")
    known = {"uid": round_.metadata.uid, "resourceVersion": round_.metadata.resource_version}
    assert body["preconditions"] == known


async def test_an_object_that_is_gone_takes_no_status(api: tuple[Api, ObjectStore]) -> None:
    """Or its pods would be told what nobody has recorded."""
    server, store = api
    server.body = {}
    with pytest.raises(ObjectGone, match="there is no PoCRound ns/r"):
        await store.write_status(a_round(), RoundStatus(start_time=NOW))


async def test_conditions_are_changed_whatever_else_is_there(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    server.body["spec"] = {"from": "elsewhere"}
    server.body["status"] = {"conditions": [*FOREIGN, {"type": "Degraded"}]}
    condition = Condition(type=ConditionType.DEGRADED, status="True", reason="InternalError", last_transition_time=NOW)
    await store.write_conditions(PoCRound, "ns", "r", [condition], message="why", degraded="InternalError")
    written = server.seen[1][3]
    *others, own = written["status"]["conditions"]
    assert others == FOREIGN
    assert (own["type"], own["reason"]) == ("Degraded", "InternalError")
    assert (written["status"]["message"], written["metadata"]) == ("why", {"resourceVersion": "1"})
    assert written["status"]["degraded"] == "InternalError"


async def test_conditions_of_others_are_kept_as_they_are(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    server.body["status"] = {"conditions": FOREIGN}
    round_ = await store.get(PoCRound, "ns", "r")
    assert round_ is not None
    status = plan(look(round_, (a_pod("a"), says()))).status
    await store.write_status(round_, status)
    assert server.seen[1][3]["status"]["conditions"][: len(FOREIGN)] == FOREIGN
    assert len(status.own_conditions) == len(ConditionType)


async def test_an_entry_of_a_config_map(api: tuple[Api, ObjectStore]) -> None:
    _, store = api
    assert await store.config_map_entry("ns", "claims", "proofs.json") == ("7", "[]")
    assert await store.config_map_entry("ns", "claims", "other") == ("7", None)
    with pytest.raises(LookupError):
        await store.config_map_entry("ns", "none", "proofs.json")


async def test_a_user_and_a_password_of_a_secret(api: tuple[Api, ObjectStore]) -> None:
    server, store = api
    data = {"username": "cG9k", "password": "c2VjcmV0"}
    server.secrets = {
        "fit": {"kind": "Secret", "type": "kubernetes.io/basic-auth", "data": data},
        "other": {"kind": "Secret", "type": "Opaque", "data": data},
        "forbidden": {"kind": "Status", "code": 403},
    }
    assert await store.basic_auth("ns", "fit") == BasicAuth("pod", "secret")
    assert server.seen[0][:2] == ("GET", "/api/v1/namespaces/ns/secrets/fit")
    with pytest.raises(ValueError, match="is of type Opaque"):
        await store.basic_auth("ns", "other")
    with pytest.raises(StoreForbidden):
        await store.basic_auth("ns", "forbidden")
    with pytest.raises(LookupError):
        await store.basic_auth("ns", "none")


async def test_a_pod_is_evicted_by_its_uid(api: tuple[Api, ObjectStore]) -> None:
    """Not deleted: an eviction follows PodDisruptionBudgets."""
    server, store = api
    await store.evict_pod(a_pod("a"))
    method, path, _, body = server.seen[0]
    assert (method, path) == ("POST", "/api/v1/namespaces/ns/pods/a/eviction")
    assert body["deleteOptions"]["preconditions"] == {"uid": "a"}


@pytest.mark.parametrize(
    ("code", "error"),
    [(429, EvictionRefused), (403, StoreForbidden), (409, StaleObject), (404, None), (500, StoreUnavailable)],
)
async def test_an_eviction_that_is_refused(
    api: tuple[Api, ObjectStore], code: int, error: type[StoreError] | None
) -> None:
    server, store = api
    message = "Cannot evict pod as it would violate the pod's disruption budget."
    server.eviction = (code, {"kind": "Status", "status": "Failure", "code": code, "message": message})
    if error is None:
        await store.evict_pod(a_pod("a"))
        return
    with pytest.raises(error) as caught:
        await store.evict_pod(a_pod("a"))
    assert type(caught.value) is error
    assert error is not EvictionRefused or str(caught.value) == message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (500, "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."),
        (400, "name in URL does not match name in Eviction object"),
        (422, "the pod is mirrored"),
    ],
)
async def test_an_eviction_that_is_no_fault_of_the_api_server_is_refused_in_its_words(
    api: tuple[Api, ObjectStore], code: int, message: str
) -> None:
    server, store = api
    server.eviction = (code, {"kind": "Status", "status": "Failure", "code": code, "message": message})
    with pytest.raises(EvictionRefused, match=message):
        await store.evict_pod(a_pod("a"))


def test_what_is_unset_within_an_object_is_deleted_too() -> None:
    """Else the percent of one download would stand beside the next, and differ from what is wanted at every turn."""
    patch = merge_patch(FleetStatus(download=Download(job="download-1", model="org/model")))
    assert (patch["download"]["job"], patch["download"]["percent"]) == ("download-1", None)
    assert merge_patch(FleetStatus())["download"] is None


def test_an_unset_field_is_deleted_by_the_patch() -> None:
    patch = merge_patch(RoundStatus(start_time=NOW))
    assert patch["startTime"] == "2026-01-01T12:00:00Z"
    assert patch["pollFailureTime"] is None


def test_a_written_status_is_read_back_the_same() -> None:
    status = plan(look(a_round(), (a_pod("a"), says()))).status
    stored = {name: value for name, value in merge_patch(status).items() if value is not None}
    assert RoundStatus.model_validate(json.loads(json.dumps(stored))) == status


@pytest.mark.parametrize("text", ["a-token", "new,old", " new , old "])
async def test_the_token_of_a_namespace(api: tuple[Api, ObjectStore], text: str) -> None:
    server, store = api
    server.secrets["poc-token"] = {"kind": "Secret", "data": {"token": b64encode(text.encode()).decode()}}
    assert await store.pod_token("poc-token", "ns") == text.split(",", maxsplit=1)[0].strip()
    assert server.seen[0][:2] == ("GET", "/api/v1/namespaces/ns/secrets/poc-token")
    assert await store.pod_token("other", "ns") is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, 'Secret "poc-token" has no key "token", or an empty one: set it'),
        ({"token": ""}, 'Secret "poc-token" has no key "token", or an empty one: set it'),
        ({"token": b64encode(b" , ").decode()}, "that holds none"),
        ({"token": b64encode(b"\xff").decode()}, "that holds none"),
        ({"token": b64encode("schlüssel".encode()).decode()}, "that no header can have"),
        ({"token": b64encode(b"a\nb").decode()}, "that no header can have"),
    ],
)
async def test_a_secret_without_a_token_is_named(api: tuple[Api, ObjectStore], data: dict[str, str], says: str) -> None:
    server, store = api
    server.secrets["poc-token"] = {"kind": "Secret", "data": data}
    with pytest.raises(ValueError, match=says):
        await store.pod_token("poc-token", "ns")
