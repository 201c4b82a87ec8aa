# SPDX-License-Identifier: Apache-2.0
"""Argo CD's health check, run by the Lua that Argo CD runs, on conditions that the operator writes."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from poc_operator.apis.v1alpha1.conditions import UNSEEN, Condition, ConditionType
from poc_operator.apis.v1alpha1.fleet_update import UpdateStatus
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.conditions import PodCounts, Verdict
from poc_operator.fleets.resolve import Refusal
from poc_operator.observed import PodView
from poc_operator.planning.conditions import conditions_of
from tests.docs.pages import blocks

NOW = datetime(2026, 11, 25, tzinfo=UTC)
FINE = (False, Reason.ALL_SLOTS_WORK, "nothing is lost")
LOST = (True, Reason.SLOTS_FAILED, "1 slot was given up")


def _check() -> str:
    (text,) = [block.text for block in blocks() if block.title == "argocd-cm.yaml"]
    customizations = yaml.safe_load(yaml.safe_load(text)["data"]["resource.customizations"])
    assert list(customizations) == ["poc.gonka.ai/*"]
    return str(customizations["poc.gonka.ai/*"]["health.lua"])


def health(conditions: list[Condition] | None, generation: int = 1) -> tuple[str, str]:
    """Return status and message that Argo CD shows for an object with these conditions."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    found: dict[str, Any] = {"metadata": {"generation": generation}}
    if conditions is not None:
        stored = [one.model_dump(mode="json", by_alias=True) for one in conditions]
        found["status"] = {"conditions": stored}
    lua.globals().obj = lua.table_from(found, recursive=True)
    answer = lua.execute(_check())
    return str(answer["status"]), str(answer["message"])


def work(**changes: tuple[bool, Reason, str]) -> list[Condition]:
    """Return the conditions of a round that runs, with some of them changed."""
    runs = (False, Reason.RUNNING, "the work is not over")
    told: Mapping[ConditionType, tuple[bool, Reason, str]] = {
        ConditionType.ACCEPTED: (True, Reason.ACCEPTED, "the spec is valid"),
        ConditionType.PROGRESSING: (True, Reason.RUNNING, "100/s"),
        ConditionType.DEGRADED: FINE,
        ConditionType.SUSPENDED: (False, Reason.NOT_SUSPENDED, "the work is not suspended"),
        **dict.fromkeys(
            (ConditionType.COMPLETE, ConditionType.FAILED, ConditionType.READY, ConditionType.STALLED), runs
        ),
        **{ConditionType(name): verdict for name, verdict in changes.items()},
    }
    return list(conditions_of(told, NOW, 1))


ENDED = (True, Reason.COMPLETED, "all is done")
FAILED = (True, Reason.DEADLINE_EXCEEDED, "it took too long")
PAUSED = (True, Reason.SUSPENDED, "spec.suspend is true")
CASES = {
    "an object of before the operator": (None, ("Progressing", "waiting for the operator")),
    "an object that no operator has seen": ([UNSEEN], ("Progressing", "waiting for the operator")),
    "a round that runs": (work(), ("Progressing", "100/s")),
    "a round that lost a slot": (work(Degraded=LOST), ("Degraded", LOST[2])),
    "a complete round": (work(Ready=ENDED, Complete=ENDED), ("Healthy", ENDED[2])),
    "a complete round that lost a slot": (work(Ready=ENDED, Degraded=LOST), ("Degraded", LOST[2])),
    "a failed round": (work(Stalled=FAILED, Failed=FAILED), ("Degraded", FAILED[2])),
    "a suspended round": (work(Suspended=PAUSED, Degraded=LOST), ("Suspended", PAUSED[2])),
}


@pytest.mark.parametrize("case", CASES)
def test_a_round(case: str) -> None:
    conditions, shown = CASES[case]
    assert health(conditions) == shown


def test_a_changed_spec_is_not_healthy_before_the_operator_has_seen_it() -> None:
    conditions = work(Ready=ENDED)
    assert health(conditions, generation=1)[0] == "Healthy"
    assert health(conditions, generation=2) == ("Progressing", "waiting for the operator")


def _fleet(replicas: int, *pods: PodView) -> list[Condition]:
    seen = PodCounts(
        replicas=replicas, port=8000, pods=pods, outdated=[], observed=True, replaces=True, nodes={}, now=NOW
    )
    return Verdict.of_pods(seen, UpdateStatus()).conditions(NOW, 1)


def test_a_fleet() -> None:
    assert health(_fleet(replicas=0)) == ("Healthy", "spec.replicas is 0: raise it to have pods")
    assert health(_fleet(replicas=1))[0] == "Progressing"
    pod = PodView(name="demo-0", namespace="poc", uid="u", node="gpu-1", waiting_for="ErrImagePull", created=NOW)
    assert health(_fleet(1, pod)) == ("Degraded", "demo-0 (ErrImagePull) cannot run")
    stuck = _fleet(1, replace(pod, created=NOW - timedelta(hours=1), taken=NOW - timedelta(hours=1)))
    assert {one.type for one in stuck if one.status == "True"} == {"Degraded", "Stalled"}
    assert health(stuck) == ("Degraded", "demo-0 (ErrImagePull) cannot run")
    refused = Verdict.of_refusal(Refusal(Reason.IMAGE_MISSING, "name an image"))
    assert health(refused.conditions(NOW, 1)) == ("Degraded", "name an image")
