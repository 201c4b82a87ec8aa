# SPDX-License-Identifier: Apache-2.0
"""The last look before an eviction: work that has come meanwhile, pods that compute, evictions that are refused."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.clients.errors import EvictionRefused, PodTimeout, StaleObject, StoreForbidden, StoreUnavailable
from poc_operator.controller.fleet_updates import (
    BUSY_SECONDS,
    EVICTED_SECONDS,
    REFUSED_SECONDS,
    Evictor,
    WorkOnFleets,
    labels_of,
)
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.fleets.forecast import Eviction, Spares
from poc_operator.observed import REVISION_LABEL, Container, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import a_fleet
from vllm_poc.wire.answers import PowState

LABELS: list[Mapping[str, str]] = [{"poc.gonka.ai/fleet": "demo", REVISION_LABEL: "demo-old"}]
POD = PodView(name="demo-1", namespace="ns", uid="u1", ip="10.0.0.1", ready=True, labels=LABELS[0])


def body(
    kind: str = "PoCRound",
    *,
    uid: str = "r1",
    state: str = "Running",
    holder: str = "",
    fleet: str = "demo",
    unfit: Sequence[str] = (),
    started: bool = False,
) -> Any:  # noqa: ANN401
    slots = [{"uid": holder, "state": "Running"}] if holder else []
    return {
        "kind": kind,
        "metadata": {"uid": uid, "name": uid, "namespace": "ns", "creationTimestamp": NOW.isoformat()},
        "spec": {"fleetRef": {"name": fleet}},
        "status": {
            "state": state,
            "assignments": slots,
            "unfitRevisions": list(unfit),
            **({"startTime": NOW.isoformat()} if started else {}),
        },
    }


@dataclass
class Store:
    """Objects by kind, what an eviction raises, of all pods or by their uids, and the pods that were evicted."""

    bodies: dict[str, list[Any]] = field(default_factory=dict)
    fault: Exception | None = None
    faults: dict[str, Exception] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    found: PodView | None = None

    async def list_bodies(self, resource: Any, namespaces: list[str]) -> list[Any]:  # noqa: ANN401
        assert namespaces == ["ns"]
        if isinstance(self.fault, StoreUnavailable) and not isinstance(self.fault, EvictionRefused | StoreForbidden):
            raise self.fault
        return self.bodies.get(resource.KIND.kind, [])

    async def pod(self, namespace: str, name: str) -> PodView | None:
        assert (namespace, name) == (POD.namespace, POD.name)
        return self.found

    async def evict_pod(self, pod: PodView) -> None:
        if (fault := self.faults.get(pod.uid, self.fault)) is not None:
            raise fault
        self.evicted.append(pod.uid)


class Pods:
    """What a pod answers."""

    def __init__(self, state: PowState | None) -> None:
        self.state = state

    async def of(self, namespace: str) -> "Pods":
        assert namespace == "ns"
        return self

    async def status(self, base: str) -> Any:  # noqa: ANN401
        assert base.startswith("http://10.0.0.1:8000/")
        if self.state is None:
            raise PodTimeout("no answer")
        return SimpleNamespace(status=self.state)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def an_evictor(
    store: Store, state: PowState | None = PowState.IDLE, *, gone: list[str] | None = None
) -> tuple[Evictor, Clock]:
    clock = Clock()
    log = ObjectLogger(logging.getLogger("test"), PoCFleet.KIND, ObjectRef("ns", "demo", "uid"))
    told = gone if gone is not None else []
    return Evictor(cast(Any, store), cast(Any, Pods(state)), log, lambda pod: told.append(pod.uid), clock), clock


@pytest.mark.parametrize(
    ("bodies", "spares", "says"),
    [
        ([], Spares.WORK, None),
        ([body()], Spares.WORK, "waiting for the end of PoCRound r1"),
        ([body("PoCValidation", uid="v")], Spares.WORK, "waiting for the end of PoCValidation v"),
        ([body("PoCCalibration", uid="c")], Spares.WORK, "waiting for the end of PoCCalibration c"),
        ([body(state="Complete"), body(fleet="other")], Spares.WORK, None),
        ([body(unfit=["demo-old"])], Spares.WORK, None),
        ([body(unfit=["demo-new"])], Spares.WORK, "waiting for the end of PoCRound r1"),
        ([body(unfit=["demo-old"], holder="u1")], Spares.WORK, "waiting for the end of PoCRound r1"),
        ([body()], Spares.SLOTS, None),
        ([body(holder="u1")], Spares.SLOTS, "waiting for the end of PoCRound r1"),
        ([body(holder="u1")], Spares.NOTHING, None),
    ],
)
async def test_work_that_came_meanwhile_keeps_the_pod(bodies: list[Any], spares: Spares, says: str | None) -> None:
    store = Store()
    for one in bodies:
        store.bodies.setdefault(one["kind"], []).append(one)
    evictor, clock = an_evictor(store)
    await evictor.evict(a_fleet(), [Eviction(POD, spares, "demo-new")], LABELS)
    assert store.evicted == ([] if says else ["u1"])
    assert evictor.evicted_names == ({} if says else {POD.name: "demo-new"})
    assert evictor.busy == ({"u1": says} if says else {})
    assert evictor.evicted == (frozenset() if says else {"u1"})
    clock.now += max(BUSY_SECONDS, EVICTED_SECONDS)
    assert (evictor.busy, evictor.evicted) == ({}, frozenset())


@pytest.mark.parametrize("state", [PowState.GENERATING, PowState.IDLE, None])
@pytest.mark.parametrize("port", [8000, 9000])  # the fleet's, which old pods do not have yet
async def test_a_pod_that_computes_for_others_stays(port: int, state: PowState | None) -> None:
    store = Store()
    evictor, _ = an_evictor(store, state)
    pod = replace(POD, containers=[Container(id="c#0", ports=frozenset({8000}))])
    await evictor.evict(a_fleet(port=port), [Eviction(pod, Spares.WORK)], LABELS)
    computes = state is PowState.GENERATING
    assert store.evicted == ([] if computes else ["u1"])
    assert evictor.busy == ({"u1": "waiting for pod demo-1, which computes work of others"} if computes else {})
    await evictor.evict(a_fleet(), [Eviction(pod, Spares.NOTHING)], LABELS)
    assert store.evicted[-1] == "u1"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (EvictionRefused("it would violate the budget"), "waiting to evict pod demo-1: it would violate the budget"),
        (
            StoreForbidden("HTTP 403"),
            "pod demo-1 cannot be evicted (HTTP 403): install the chart with fleets.enabled=true",
        ),
    ],
)
async def test_an_eviction_that_is_refused_is_told(fault: Exception, says: str) -> None:
    evictor, _ = an_evictor(Store(fault=fault))
    await evictor.evict(a_fleet(), [Eviction(POD, Spares.WORK)], LABELS)
    assert (evictor.busy, evictor.evicted) == ({"u1": says}, frozenset())


async def test_a_refusal_is_told_until_the_pod_is_evicted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A budget may refuse for minutes: it is asked again as soon as the pod is busy no more."""
    store = Store(fault=EvictionRefused("the budget"))
    evictor, clock = an_evictor(store)
    why = "waiting to evict pod demo-1: the budget"
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await evictor.evict(a_fleet(), [Eviction(POD, Spares.NOTHING)], LABELS)
            clock.now += BUSY_SECONDS
            assert (evictor.busy, evictor.refused) == ({}, {"u1": why})
    assert [record.getMessage() for record in caplog.records] == [why]
    store.fault = None
    await evictor.evict(a_fleet(), [Eviction(POD, Spares.NOTHING)], LABELS)
    assert (evictor.refused, evictor.evicted) == ({}, frozenset({"u1"}))


async def test_a_refusal_is_forgotten_when_the_pod_is_not_to_leave_any_more() -> None:
    evictor, clock = an_evictor(Store(fault=EvictionRefused("the budget")))
    await evictor.evict(a_fleet(), [Eviction(POD, Spares.NOTHING)], LABELS)
    clock.now += REFUSED_SECONDS
    assert evictor.refused == {}


@pytest.mark.parametrize(("found", "gone"), [(None, ["u1"]), ("u2", ["u1"]), ("u1", [])])
async def test_a_pod_that_the_watch_still_has_is_forgotten_once_its_eviction_shows_its_end(
    found: str | None, gone: list[str]
) -> None:
    told = list[str]()
    store = Store(fault=StaleObject("another uid"))
    store.found = replace(POD, uid=found) if found is not None else None
    evictor, _ = an_evictor(store, gone=told)
    await evictor.evict(a_fleet(), [Eviction(POD, Spares.WORK)], LABELS)
    assert (told, evictor.evicted) == (gone, frozenset())
    assert evictor.busy == ({} if gone else {"u1": "waiting to evict pod demo-1: another uid"})


async def test_an_absent_api_server_is_told() -> None:
    evictor, _ = an_evictor(Store(fault=StoreUnavailable("away")))
    with pytest.raises(StoreUnavailable):
        await evictor.evict(a_fleet(), [Eviction(POD, Spares.WORK)], LABELS)


async def test_a_pod_whose_eviction_fails_keeps_no_other() -> None:
    store = Store(faults={"u1": StoreUnavailable("HTTP 500")})
    evictor, _ = an_evictor(store)
    both = [Eviction(POD, Spares.NOTHING), Eviction(replace(POD, name="demo-2", uid="u2"), Spares.NOTHING)]
    with pytest.raises(StoreUnavailable, match="HTTP 500"):
        await evictor.evict(a_fleet(), both, LABELS)
    assert (store.evicted, evictor.evicted) == (["u2"], frozenset({"u2"}))


@pytest.mark.parametrize("fault", [StoreUnavailable("HTTP 500"), EvictionRefused("two budgets")])
async def test_no_group_is_evicted_before_one_of_a_higher_number(fault: Exception) -> None:
    """It would come back with the old template, and be evicted again."""
    store = Store(faults={"u1": fault})
    evictor, _ = an_evictor(store)
    both = [Eviction(POD, Spares.NOTHING), Eviction(replace(POD, name="demo-0", uid="u0"), Spares.NOTHING)]
    with suppress(StoreUnavailable):
        await evictor.evict(a_fleet(parallelism={"kubernetesNodes": 2}), both, LABELS)
    assert store.evicted == []


def test_work_is_known_until_it_is_gone() -> None:
    work = WorkOnFleets()
    assert work.put("PoCRound", body())
    assert not work.put("PoCRound", body())
    assert work.put("PoCRound", body(unfit=["demo-old"]))
    assert work.put("PoCRound", body(state="Complete"))
    work.put("PoCRound", body(uid="r2", fleet="other"))
    assert [one.record.uid for one in work.on(a_fleet(), LABELS)] == ["r1"]
    assert work.forget("r1") == "ns"
    assert work.forget("r1") is None
    assert not work.on(a_fleet(), LABELS)


def test_the_fleet_hears_that_a_pod_has_begun_the_work() -> None:
    """A short round may be gone before the fleet's next turn, and would be forgotten."""
    work = WorkOnFleets()
    assert work.put("PoCRound", body())
    assert work.put("PoCRound", body(started=True))
    assert not work.put("PoCRound", body(started=True))


def test_work_may_select_pods_that_are_yet_to_come() -> None:
    stateful_set = {"spec": {"template": {"metadata": {"labels": {"own": "yes"}}}}}
    assert labels_of(a_fleet(), stateful_set, [POD]) == [{"own": "yes"}, POD.labels]
    assert labels_of(a_fleet(), None, []) == [{"poc.gonka.ai/fleet": "demo"}]
