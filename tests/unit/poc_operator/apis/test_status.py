# SPDX-License-Identifier: Apache-2.0
"""A status is stored with bounds and read back leniently."""

import json
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType, OtherCondition, merge_conditions
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.schema import ERROR_BYTES, MESSAGE_BYTES, number_of
from poc_operator.apis.v1alpha1.status import MAX_ERRORS, Outcome, Result, SlotState, State
from poc_operator.apis.v1alpha1.validation import Sample, ValidationStatus
from poc_operator.clients.kube.objects import merge_patch
from tests.support.builders.largest_status import LONGEST, NOW, largest_status

#: Largest object that etcd takes by default, and what an object may have beside its status: a spec, and metadata with a
#: copy of the spec and the fields' managers.
ETCD_BYTES, REST_BYTES = 1536 * 1024, 64 * 1024


def a_slot(index: int, **fields: Any) -> Assignment:  # noqa: ANN401
    """A slot whose pod has computed for long."""
    counters = dict.fromkeys(("next", "delivered", "valid"), 2_000_000)
    defaults: dict[str, Any] = {
        "node": index,
        "pod": f"vllm-poc-worker-5d9c7b6f4d-{index:05d}",
        "uid": "12345678-1234-1234-1234-123456789012",
        "session": "0123456789abcdef",
        "state": SlotState.RUNNING,
        "attempts": 9,
    }
    return Assignment(**{**defaults, **counters, **fields})


def read_back(status: RoundStatus) -> RoundStatus:
    return RoundStatus.model_validate(json.loads(json.dumps(status.stored())))


@pytest.mark.parametrize("error", [lambda i: f"{i} {LONGEST}", lambda i: f"{i % 30} {LONGEST}"], ids=["own", "shared"])
@pytest.mark.parametrize(
    "more", [{"start": 2_000_000, "valid_before": 2_000_000}, {"end": 2_000_000}], ids=["given out again", "dealt out"]
)
def test_a_thousand_slots_with_the_longest_errors_fit(more: dict[str, int], error: Any) -> None:  # noqa: ANN401
    conditions = [
        Condition(
            type=kind, status="True", reason=Reason.START_DEADLINE_EXCEEDED, message=LONGEST, last_transition_time=NOW
        )
        for kind in ConditionType
    ]
    status = RoundStatus(
        assignments=[a_slot(index, error=error(index), **more) for index in range(1000)],
        conditions=conditions,
        message=LONGEST,
        outcome=Outcome(type=Result.FAILED, reason=Reason.START_DEADLINE_EXCEEDED, message=LONGEST),
    )
    assert len(json.dumps(status.stored(), separators=(",", ":"))) < 256 * 1024


def test_as_many_slots_as_are_allowed_fit_into_the_api_server() -> None:
    """Else a round would start and never be recorded."""
    patch = {"metadata": {"resourceVersion": "1" * 20}, "status": merge_patch(largest_status())}
    assert len(json.dumps(patch, separators=(",", ":"))) < ETCD_BYTES - REST_BYTES


def test_slots_share_the_text_of_an_error() -> None:
    errors = ["gone", None, "gone", "gone", "refused"]
    status = RoundStatus(assignments=[a_slot(index, error=error) for index, error in enumerate(errors)])
    stored = status.stored()
    assert stored["errors"] == [
        {"message": "gone", "count": 3, "indexes": "0,2-3"},
        {"message": "refused", "count": 1, "indexes": "4"},
    ]
    assert all("error" not in slot for slot in stored["assignments"])
    assert read_back(status) == status


def test_the_commonest_errors_are_kept() -> None:
    slots = [a_slot(index, error=f"own {index}") for index in range(50)]
    slots += [a_slot(index, error="common") for index in range(50, 60)]
    stored = RoundStatus(assignments=slots).stored()["errors"]
    assert len(stored) == MAX_ERRORS
    assert stored[0] == {"message": "common", "count": 10, "indexes": "50-59"}
    assert sum(error["count"] for error in stored) == 60
    assert stored[-1]["count"] == 50 - (MAX_ERRORS - 2)


def test_samples_share_errors_too() -> None:
    status = ValidationStatus(samples=[Sample(state=SlotState.FAILED, first=0, count=200, error="gone")])
    assert ValidationStatus.model_validate(json.loads(json.dumps(status.stored()))) == status


def test_texts_are_cut_when_they_are_stored() -> None:
    long = "ü" * 5_000
    status = RoundStatus(message=long, assignments=[a_slot(0, error=long)])
    stored = status.stored()
    assert len(stored["message"].encode()) <= MESSAGE_BYTES
    assert len(stored["errors"][0]["message"].encode()) <= ERROR_BYTES
    assert stored["message"].endswith("ü…")


def test_words_of_another_version_are_read() -> None:
    stored = {
        "state": "Draining",
        "outcome": {"type": "Cancelled", "reason": "ByUser", "message": "m"},
        "conditions": [
            {
                "type": "New",
                "status": "Maybe",
                "reason": "R",
                "message": "",
                "lastTransitionTime": "2026-01-01T12:00:00Z",
            }
        ],
        "assignments": [{"state": "Draining", "node": 1, "group": 0, "pod": "a", "uid": "u", "novel": 1}],
        "novel": {},
    }
    status = RoundStatus.model_validate(stored)
    assert status.state is State.PENDING
    assert status.outcome is not None
    assert status.outcome.type is Result.FAILED
    # A pod may compute the slot: it is asked, and neither forgotten nor given away.
    assert status.assignments[0].state is SlotState.STARTING


def test_conditions_of_others_survive_and_times_move_with_the_status_only() -> None:
    complete, failed = ConditionType.COMPLETE, ConditionType.FAILED

    def condition(kind: ConditionType, status: str, hour: int) -> Condition:
        return Condition(type=kind, status=status, reason="R", last_transition_time=NOW.replace(hour=hour))

    foreign = OtherCondition.model_validate({"type": "Foreign", "status": "True"})
    # One of ours that is not complete, as a tool may write it, is written anew.
    bare = OtherCondition.model_validate({"type": "Failed", "status": "True"})
    old: list[Condition | OtherCondition] = [foreign, condition(complete, "False", 2), bare]
    merged = merge_conditions(old, [condition(complete, "False", 9), condition(failed, "True", 9)])
    assert merged == [foreign, condition(complete, "False", 2), condition(failed, "True", 9)]


def test_an_object_without_a_status_is_new() -> None:
    metadata = {
        "name": "r",
        "namespace": "ns",
        "uid": "u",
        "generation": 1,
        "resourceVersion": "9",
        "creationTimestamp": "2026-01-01T12:00:00Z",
        "managedFields": [],
    }
    spec = {
        "blockHash": "ab" * 32,
        "blockHeight": 7,
        "publicKey": "key",
        "nodes": {"first": 0, "last": 0, "count": 1},
        "rTarget": "1.4",
        "model": {"name": "demo", "seqLen": 64},
    }
    found = PoCRound.parse({"apiVersion": "poc.gonka.ai/v1alpha1", "metadata": metadata, "spec": spec})
    assert (found.id, found.status) == ("u", RoundStatus())


@pytest.mark.parametrize(
    ("count", "words", "told"),
    [
        (0, ("pod",), "0 pods"),
        (1, ("pod",), "1 pod"),
        (2, ("pod",), "2 pods"),
        (1, ("slot gets", "slots get"), "1 slot gets"),
        (3, ("slot gets", "slots get"), "3 slots get"),
    ],
)
def test_messages_count_as_people_do(count: int, words: tuple[str, ...], told: str) -> None:
    assert number_of(count, *words) == told
