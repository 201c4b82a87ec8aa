# SPDX-License-Identifier: Apache-2.0
"""A pod that fails after the canary has passed: the update stops, says so by a condition, and goes on when it works."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.fleets.plan import FleetSnapshot, FleetStep, plan
from poc_operator.fleets.stages import KubernetesNode
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND
from tests.unit.poc_operator.fleets.test_update import (
    FOUR,
    NEW,
    OLD,
    WRONG,
    a_pod,
    after,
    check,
    evicted,
    fleet_of,
    in_phase,
    look,
    objects_of,
    reasons,
)

GOES_ON = "; it goes on when the pod works, and kubectl poc fleet rollout undo goes back"


def rolling(pods: Sequence[PodView], status: Any = None, *, failed_check: bool = False, **seen: Any) -> FleetStep:  # noqa: ANN401
    """Look at an update that may take three pods away; the canary, demo-3, has passed."""
    checked = [check(pods[3], "Passed"), *([check(pods[2], "Failed", "9 of 32 differ")] if failed_check else [])]
    status = {**(status or in_phase("Rolling")), "pods": checked if failed_check else []}
    checks = {"enabled": failed_check}
    return look(fleet_of(status, update={"maxUnavailable": 3}, selfCheck=checks), pods, **seen)


@pytest.mark.parametrize(("fields", "says"), WRONG.values(), ids=WRONG)
def test_a_later_pod_that_fails_stops_the_update(fields: dict[str, Any], says: str) -> None:
    wrong, canary = a_pod(2, NEW, **fields), a_pod(3, NEW)
    step = rolling([*FOUR[:2], wrong, canary], failed_check=not fields)
    assert not step.evict
    told = step.status.update
    assert told.phase == "Stopped"
    assert told.message.startswith("2 of 4 pods are updated; stopped, since pod demo-2 ")
    assert says in told.message
    assert told.message.endswith(GOES_ON)
    # The template is tried on: the canary has shown that it can work.
    assert not told.failed
    found = {kind: (one.status, one.reason) for kind, one in step.status.own_conditions.items()}
    assert found["Ready"] == ("False", "UpdateStopped")
    assert found["Degraded"] == found["Stalled"] == ("True", "UpdateStopped")
    assert step.status.message == told.message


def test_the_update_goes_on_when_the_pod_works() -> None:
    crashing = a_pod(2, NEW, ready=False, waiting_for="CrashLoopBackOff")
    stopped = after(rolling([*FOUR[:2], crashing, a_pod(3, NEW)]))
    step = rolling([*FOUR[:2], a_pod(2, NEW), a_pod(3, NEW)], stopped)
    assert (evicted(step), step.status.update.phase, reasons(step)) == (["demo-1", "demo-0"], "Rolling", [])
    assert step.status.reason == "PodsOutdated"


def blinks(number: int, *, since: float, started: float, restarts: int = 0, age: float = 9000) -> PodView:
    """A pod that has not been ready for so many seconds, whose container started so many seconds ago."""
    pod = a_pod(number, NEW, ready=False, age=age, not_ready_since=NOW - timedelta(seconds=since))
    running = replace(pod.containers[0], restarts=restarts, running_since=NOW - timedelta(seconds=started))
    return replace(pod, containers=[running])


#: Pods that served, and do not for a moment.
BLINKS = {
    "since a moment ago": blinks(2, since=20, started=8990),
    "after a restart from which it recovered": blinks(2, since=20, started=500, restarts=1),
    "for as long as a start may take": blinks(2, since=3600, started=8990),
}


@pytest.mark.parametrize("pod", BLINKS.values(), ids=BLINKS)
def test_a_pod_that_is_not_ready_for_a_moment_stops_nothing(pod: PodView) -> None:
    step = rolling([*FOUR[:2], pod, a_pod(3, NEW)])
    assert (evicted(step), step.status.update.phase) == (["demo-1", "demo-0"], "Rolling")


#: Pods that do not come back: what the message says of each.
STAYS_AWAY = {
    "not ready for too long": (blinks(2, since=3601, started=8990), "was not ready within 3600 s"),
    "restarted since it was ready": (blinks(2, since=20, started=15, restarts=1), "cannot run"),
    "restarted as it stopped being ready": (blinks(2, since=20, started=20, restarts=1), "cannot run"),
    "has never been ready": (blinks(2, since=3601, started=3600, age=3602), "was not ready within 3600 s"),
    "restarted before it was ever ready": (blinks(2, since=500, started=20, restarts=1, age=501), "cannot run"),
}


@pytest.mark.parametrize(("pod", "says"), STAYS_AWAY.values(), ids=STAYS_AWAY)
def test_a_pod_that_does_not_come_back_stops_the_update(pod: PodView, says: str) -> None:
    step = rolling([*FOUR[:2], pod, a_pod(3, NEW)])
    assert step.status.update.phase == "Stopped"
    assert says in step.status.update.message


@pytest.mark.parametrize("name", ["has never been ready", "restarted before it was ever ready"])
def test_a_canary_that_has_never_been_ready_fails_all_the_same(name: str) -> None:
    pod, says = STAYS_AWAY[name]
    step = look(fleet_of(in_phase("Canary", canary="demo-2")), [*FOUR[:2], pod, FOUR[3]])
    assert reasons(step) == ["UpdateFailed"]
    assert says in step.status.update.message


def test_one_whose_kubernetes_node_is_away_stops_nothing() -> None:
    away = a_pod(2, NEW, ready=False, age=9000)
    nodes = {"node-1": KubernetesNode(ready=False, since=NOW - timedelta(seconds=9))}
    step = rolling([*FOUR[:2], away, a_pod(3, NEW)], nodes=nodes)
    assert (evicted(step), step.status.update.phase) == (["demo-1", "demo-0"], "Rolling")


def test_pods_with_a_template_that_was_good_do_not_keep_others_from_it() -> None:
    crashing = a_pod(3, OLD, ready=False, waiting_for="CrashLoopBackOff")
    back = [a_pod(0, NEW, ready=False, waiting_for="CrashLoopBackOff"), *FOUR[1:3], crashing]
    step = rolling(back, revision=OLD)
    assert (evicted(step), step.status.update.phase) == (["demo-0"], "Rolling")


def test_without_old_pods_there_is_nothing_to_stop() -> None:
    crashing = a_pod(0, NEW, ready=False, waiting_for="CrashLoopBackOff")
    step = rolling([crashing, *(a_pod(n, NEW) for n in (1, 2, 3))], in_phase("Stopped"))
    assert (step.status.update.phase, step.status.reason) == ("Rolling", "PodsFailing")


def test_another_template_begins_anew() -> None:
    crashing = a_pod(2, NEW, ready=False, waiting_for="CrashLoopBackOff")
    stopped = after(rolling([*FOUR[:2], crashing, a_pod(3, NEW)]))
    fleet = fleet_of(stopped, engineArgs=["--better"])
    step = look(fleet, [*FOUR[:2], crashing, a_pod(3, NEW)], revision="demo-3rd")
    assert (step.status.update.phase, evicted(step), reasons(step)) == ("Canary", ["demo-2"], ["UpdateStarted"])


@pytest.mark.parametrize("phase", ["Failed", "Stopped"])
def test_a_corrected_spec_is_not_stalled_before_kubernetes_has_seen_it(phase: str) -> None:
    """Who waits for the generation of the correction would take the old failure for that of the new one."""
    status = in_phase(phase)
    failure = {"digest": status["update"]["digest"], "revision": NEW, "message": "it crashes", "time": NOW.isoformat()}
    status["update"] |= {"failed": [failure] if phase == "Failed" else []}
    fleet = fleet_of(status)
    corrected = fleet.model_copy(update={"spec": fleet_of(env=[{"name": "A", "value": "b"}]).spec})
    seen = FleetSnapshot(fleet=corrected, around=AROUND, now=NOW, objects=objects_of(fleet), pods=FOUR)
    step = plan(seen)
    assert step.status.update.message == "the new template is being applied"
    assert step.status.own_conditions["Stalled"].status == "False"
