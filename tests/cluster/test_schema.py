# SPDX-License-Identifier: Apache-2.0
"""The API server takes the generated CRDs, and enforces what they say."""

from collections.abc import Iterator
from typing import Any

import pytest

from hack.generate.__main__ import KINDS
from hack.generate.crds import crd
from tests.support.servers.api_server import ApiServer, api_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

_BLOCK = {"blockHash": "ab" * 32, "blockHeight": 7, "publicKey": "key", "model": {"name": "demo", "seqLen": 64}}
_ROUND = {**_BLOCK, "nodes": {"first": 0, "last": 0, "count": 1}, "rTarget": "1.4"}


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServer]:
    """An API server of its own, with the CRDs."""
    with api_server() as server:
        for kind in KINDS:
            server.install(crd(kind))
        yield server


def _path(kind: str, name: str = "") -> str:
    return f"/apis/poc.gonka.ai/v1alpha1/namespaces/default/{kind.lower()}s{f'/{name}' if name else ''}"


def create(api: ApiServer, kind: str, name: str, spec: dict[str, Any]) -> tuple[int, Any]:
    body = {"apiVersion": "poc.gonka.ai/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return api.request("POST", _path(kind), body, fieldValidation="Strict")


def test_all_that_is_fixed_is_named_when_it_is_changed(api: ApiServer) -> None:
    assert create(api, "PoCRound", "fixed", _ROUND)[0] == 201
    changes = {"port": 8001, "nodes": {"count": 2}, "stop": {"afterSeconds": 3}, "suspend": True}
    status, answer = api.request("PATCH", _path("PoCRound", "fixed"), {"spec": changes})
    assert status == 422
    assert "port nodes stop cannot be changed: delete the object and create a new one" in answer["message"]


def test_what_is_mutable_may_be_changed(api: ApiServer) -> None:
    assert create(api, "PoCRound", "mutable", _ROUND)[0] == 201
    changes: dict[str, Any] = {"suspend": True, "activeDeadlineSeconds": 9, "ttlSecondsAfterFinished": 0}
    for change in ({**changes, "finish": True}, dict.fromkeys(changes)):
        assert api.request("PATCH", _path("PoCRound", "mutable"), {"spec": change})[0] == 200
    status, answer = api.request("PATCH", _path("PoCRound", "mutable"), {"spec": {"finish": False}})
    assert (status, "spec.finish" in answer["message"]) == (422, True)


def test_a_status_with_words_of_another_version_is_stored(api: ApiServer) -> None:
    assert create(api, "PoCRound", "status", _ROUND)[0] == 201
    status = {"state": "Draining", "assignments": [{"state": "Draining", "node": 0}]}
    code, answer = api.request("PATCH", f"{_path('PoCRound', 'status')}/status", {"status": status})
    assert (code, answer["status"]) == (200, status)
