# SPDX-License-Identifier: Apache-2.0
"""Which work in pods is not needed any more, as tables."""

from collections.abc import Mapping
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State
from poc_operator.observed import PodView
from poc_operator.planning.reaping import Cause, WorkRecord, cause_to_stop, is_ours, proven_over
from tests.unit.poc_operator.build import (
    LABELS,
    UID,
    a_calibration,
    a_config,
    a_pod,
    a_round,
    a_slot,
    a_status,
    a_validation,
    says,
)
from vllm_poc.wire.answers import PowState, StatusResponse

OWNERS = ("cluster", "lease")
OTHER_LABELS = {"app": "moved"}


def body(round_: PoCRound) -> Mapping[str, Any]:
    """The round as the API server has it."""
    told: dict[str, Any] = round_.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {**told, "status": round_.status.stored()}


def record(*slots: Any, **status: Any) -> WorkRecord:  # noqa: ANN401
    """What is known of a round with these slots."""
    return WorkRecord.parse(body(a_round(a_status(*slots, **status))))


@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({"owner": "cluster"}, True),
        ({"owner": "lease"}, True),
        ({"owner": "another"}, False),
        ({}, False),
        ({"owner": "cluster", "round_id": None}, False),
        ({"owner": "cluster", "state": PowState.STOPPED}, False),
        ({"owner": "cluster", "state": PowState.VALIDATING}, False),
        ({"owner": "cluster", "state": PowState.FAILED}, False),
    ],
)
def test_only_what_our_operator_ordered_is_judged(fields: Mapping[str, Any], ours: bool) -> None:
    status = says(**{"state": PowState.GENERATING, "round_id": UID, **fields}).status
    assert status is not None
    assert is_ours(status, OWNERS) is ours


@pytest.mark.parametrize("state", list(SlotState))
@pytest.mark.parametrize("pod", [a_pod("a"), a_pod("a", labels=OTHER_LABELS), a_pod("a", namespace="x")])
@pytest.mark.parametrize("over", [State.RUNNING, State.SUSPENDED, State.STOPPING, State.COMPLETE, State.FAILED])
def test_what_a_round_says_of_a_pod(state: SlotState, pod: PodView, over: State) -> None:
    round_ = record(a_slot("a", state=state), state=over)
    expected = None
    if over.finished:
        expected = Cause.FINISHED
    elif state in (SlotState.WAITING, SlotState.DONE, SlotState.FAILED) and (pod.labels, pod.namespace) != (
        LABELS,
        "ns",
    ):
        expected = Cause.NOT_ASSIGNED
    assert cause_to_stop(round_, pod) is expected


def test_a_round_that_does_not_exist_needs_nobody() -> None:
    assert cause_to_stop(None, a_pod("a")) is Cause.DELETED


def test_a_word_of_another_version_may_mean_that_the_pod_has_the_slot() -> None:
    told = body(a_round(a_status(a_slot("a"))))
    told["status"]["assignments"][0]["state"] = "Dreaming"
    known = WorkRecord.parse(told)
    assert cause_to_stop(known, a_pod("a", labels=OTHER_LABELS)) is None
    told["status"]["state"] = "Baked"
    assert not WorkRecord.parse(told).finished


@pytest.mark.parametrize(
    "junk",
    [
        {"spec": None, "status": None},
        {"spec": "text", "status": "text"},
        {"spec": {"selector": {"matchLabels": 7}, "port": "http"}, "status": {"assignments": 5}},
        {"spec": {"port": 2**16}, "status": {"assignments": ["text", {"uid": None}, {}]}},
        {},
    ],
)
def test_what_of_an_object_cannot_be_read_has_its_default(junk: Mapping[str, object]) -> None:
    found = WorkRecord.parse({"metadata": {"uid": UID, "namespace": "ns", "name": "r"}, **junk})
    assert (found.port, found.finished, found.pods) == (8000, False, frozenset())
    assert found.selects(a_pod("a"))
    assert not found.selects(a_pod("a", labels=OTHER_LABELS))


@pytest.mark.parametrize("work", [a_validation(port=9000), a_calibration(port=9000)])
def test_other_kinds_select_pods_and_hold_none(work: Any) -> None:  # noqa: ANN401
    found = WorkRecord.parse(work.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert (found.port, found.holders, found.running) == (9000, frozenset(), frozenset())
    assert found.selects(a_pod("a"))


def reference(round_id: str | None, node: int = 0, group: int = 0) -> StatusResponse:
    """What a reference pod says, told as one of ours."""
    config = a_config(node_id=node, group_id=group, k_dim=4, protocol="artifact", batch_size=0)
    status = says(PowState.GENERATING, round_id=round_id, config=config).status
    assert status is not None
    return status


def ended(uid: str = UID, state: State = State.COMPLETE, pod: str = "a") -> PoCRound:
    """A round that is over, of which this pod had the only slot."""
    made = a_round(a_status(a_slot(pod, state=SlotState.DONE), state=state))
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"uid": uid})})


NEW = ended("new", State.PENDING).model_copy(update={"status": RoundStatus()})


@pytest.mark.parametrize(
    ("told", "proven"),
    [
        ([], False),
        ([(ended(), reference(None))], False),
        ([(ended(), reference(UID))], True),
        ([(ended(), reference(UID, group=1))], False),
        ([(ended(pod="b"), reference(UID))], False),
        ([(ended(), reference(UID)), (NEW, reference("new"))], False),
        ([(ended(), reference(UID)), (NEW, reference(None))], True),
        ([(ended(state=State.SUSPENDED), reference(UID))], False),
    ],
    ids=["no round", "other work", "its slot", "another slot", "another pod", "the same again", "others", "not over"],
)
def test_a_reference_pod_is_stopped_only_if_the_status_proves_its_work_ours(
    told: list[tuple[PoCRound, StatusResponse]], proven: bool
) -> None:
    assert (proven_over(a_pod("a"), told) is not None) is proven
