# SPDX-License-Identifier: Apache-2.0
"""The API server takes the generated CRDs, and enforces what they say."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hack.generate.__main__ import KINDS
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, PoCRound
from poc_operator.clients.kube.objects import merge_patch
from tests.support.builders.largest_status import largest_status
from tests.support.builders.specs import FULL, edges, specs
from tests.support.checks.admission import admitted, spec_schema
from tests.support.checks.kstatus import kstatus
from tests.support.servers.api_server import ApiServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300, func_only=True)]

_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND.kind)


def judge(api: ApiServer, kind: type[Resource], spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the spec as the API server would store it; None if it refuses it. The offline evaluator must agree."""
    status, answer = api.create(kind.KIND.kind, "trial", spec, dry_run=True)
    assert status in (201, 422), answer
    stored, flaws = admitted(kind, spec)
    assert (status == 201) == (not flaws), (spec, flaws, answer.get("message"))
    assert status == 422 or answer["spec"] == stored
    return stored if status == 201 else None


@_KIND
def test_the_offline_evaluator_agrees_at_every_edge(api: ApiServer, kind: type[Resource]) -> None:
    for _, spec in edges(kind):
        judge(api, kind, spec)


@_KIND
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_offline_evaluator_agrees_on_random_specs(
    api: ApiServer, kind: type[Resource], data: st.DataObject
) -> None:
    spec = data.draw(specs(kind))
    assert judge(api, kind, spec)
    # With a part taken away, or one of another spec put in, rules that couple fields are broken.
    other = data.draw(specs(kind))
    part = data.draw(st.sampled_from(sorted(spec.keys() | other.keys())))
    mixed = {name: value for name, value in spec.items() if name != part}
    judge(api, kind, mixed | ({part: other[part]} if part in other else {}))


@_KIND
def test_an_object_that_no_operator_has_seen_is_not_taken_for_done(api: ApiServer, kind: type[Resource]) -> None:
    status, answer = api.create(kind.KIND.kind, "new", FULL[kind][0])
    assert (status, kstatus(answer)) == (201, "InProgress")


def test_a_status_with_words_of_another_version_is_stored(api: ApiServer) -> None:
    assert api.create("PoCRound", "status", FULL[PoCRound][0])[0] == 201
    status = {"state": "Draining", "assignments": [{"state": "Draining", "node": 0}]}
    code, answer = api.write_status("PoCRound", "status", status)
    assert code == 200
    assert answer["status"].items() >= status.items()


def test_the_largest_status_is_stored(api: ApiServer) -> None:
    assert api.create("PoCRound", "largest", FULL[PoCRound][0])[0] == 201
    status, answer = api.write_status("PoCRound", "largest", merge_patch(largest_status()))
    assert status == 200, answer
    assert len(answer["status"]["assignments"]) == MAX_SLOTS


def test_kubectl_shows_every_column(api: ApiServer) -> None:
    assert api.create("PoCRound", "shown", FULL[PoCRound][0])[0] == 201
    totals = {"checked": 640, "valid": 64, "rate": "12.5", "retries": 1}
    counts = {"desired": 4, "running": 3, "done": 1}
    told = {"state": "Running", "degraded": "SlotsFailed,PodsDisagree", "message": "3 pods compute"}
    assert api.write_status("PoCRound", "shown", {**told, **counts, "totals": totals})[0] == 200
    row = next(row for row in api.rows("PoCRound") if row["Name"] == "shown")
    assert row.keys() == {"Name", *(column.name for column in PoCRound.COLUMNS)}
    assert (
        row.items()
        >= {
            "State": "Running",
            "Desired": 4,
            "Running": 3,
            "Done": 1,
            "Checked": 640,
            "Valid": 64,
            "Rate": "12.5",
            "Degraded": "SlotsFailed,PodsDisagree",
            "Retries": 1,
            "RTarget": "1.405",
            "Message": "3 pods compute",
        }.items()
    )


@_KIND
def test_kubectl_can_explain_every_field_of_a_spec(api: ApiServer, kind: type[Resource]) -> None:
    _, document = api.request("GET", "/openapi/v3/apis/poc.gonka.ai/v1alpha1")
    published = document["components"]["schemas"][f"ai.gonka.poc.v1alpha1.{kind.KIND.kind}"]["properties"]["spec"]
    wanted = spec_schema(kind)
    assert published["properties"].keys() == wanted["properties"].keys()
    for name, field in published["properties"].items():
        assert field["description"] == wanted["properties"][name]["description"]
