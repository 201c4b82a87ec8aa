# SPDX-License-Identifier: Apache-2.0
"""What is stored in the API server."""

import json
from pathlib import Path

import pytest
import yaml

from poc_operator.clients.kube.rounds import _merge_patch
from poc_operator.model.base import ApiModel
from poc_operator.model.conditions import Condition, merge_conditions
from poc_operator.model.round import Metadata
from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import Assignment, RoundStatus, SlotState
from poc_operator.rounds.plan import plan
from tests.unit.poc_operator.build import NOW, a_pod, a_round, look, says

CRD = yaml.safe_load(Path("crds/pocrounds.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


def _aliases(model: type[ApiModel]) -> set[str]:
    return {str(field.alias) for field in model.model_fields.values()}


def test_models_and_crd_have_the_same_fields() -> None:
    assert _aliases(RoundSpec) == set(SCHEMA["spec"]["properties"])
    assert _aliases(RoundStatus) == set(SCHEMA["status"]["properties"])
    assert _aliases(Assignment) == set(SCHEMA["status"]["properties"]["assignments"]["items"]["properties"])


@pytest.mark.parametrize(
    "more", [{"start": 2_000_000, "valid_before": 2_000_000}, {"end": 2_000_000}], ids=["given out again", "allowances"]
)
def test_a_thousand_slots_fit(more: dict[str, int]) -> None:
    slots = [
        Assignment(
            node=i,
            group=0,
            pod=f"vllm-poc-worker-5d9c7b6f4d-{i:05d}",
            uid="12345678-1234-1234-1234-123456789012",
            session="0123456789abcdef",
            state=SlotState.RUNNING,
            next=2_000_000,
            delivered=2_000_000,
            valid=2_000_000,
            attempts=9,
            **more,
        )
        for i in range(1000)
    ]
    patch = json.dumps(_merge_patch(RoundStatus(assignments=slots)), separators=(",", ":"))
    assert len(patch) < 256 * 1024


def test_an_unset_field_is_deleted_by_the_patch() -> None:
    patch = _merge_patch(RoundStatus(start_time=NOW))
    assert patch["startTime"] == "2026-01-01T12:00:00Z"
    assert patch["pollFailureTime"] is None


def test_conditions_of_others_survive() -> None:
    foreign = Condition(type="Foreign", status="True", reason="X", last_transition_time=NOW)
    assert merge_conditions([foreign], []) == [foreign]


def test_a_written_status_is_read_back_the_same() -> None:
    status = plan(look(a_round(), (a_pod("a"), says()))).status
    stored = {name: value for name, value in _merge_patch(status).items() if value is not None}
    assert RoundStatus.model_validate(json.loads(json.dumps(stored))) == status


def test_metadata_ignores_what_it_does_not_need() -> None:
    meta = {
        "name": "r",
        "namespace": "ns",
        "uid": "u",
        "generation": 1,
        "resourceVersion": "9",
        "creationTimestamp": "2026-01-01T12:00:00Z",
        "managedFields": [],
    }
    assert Metadata.model_validate(meta).creation_timestamp == NOW
