# SPDX-License-Identifier: Apache-2.0
"""Which pods count as hung, and what is done about them. Looks are made of what real servers write."""

import dataclasses
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, FleetPod
from poc_operator.apis.v1alpha1.meta import NETWORK_ORIGIN, ORIGIN_LABEL
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.fleets.forecast import Spares
from poc_operator.fleets.healing import BUDGET_TIME, Healed, Sight, faulty_gpus, heal, restarted
from poc_operator.fleets.plan import FleetSnapshot, FleetStep, plan
from poc_operator.fleets.progress import Watched, hung, parse_look, watched
from poc_operator.fleets.stages import GpuErrors
from poc_operator.fleets.update import UpdateSeen
from poc_operator.observed import REVISION_LABEL, Container, PodView
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_forecast import work
from tests.unit.poc_operator.fleets.test_plan import stored

SERVER = "containerd://1#0"
HUNG_SECONDS = 600


def metrics(
    *,
    running: int = 0,
    waiting: int = 0,
    tokens: int = 0,
    cache: float = 0.0,
    computed: int = 0,
    held: float = 0.0,
    queued: int = 0,
    activity: str = "",
    ready: str = "Ready",
) -> str:
    """What a server with PoC exposes, shortened."""
    labels = 'engine="0",model_name="org/model"'
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {running}.0",
        f"vllm:num_requests_waiting{{{labels}}} {waiting}.0",
        f"vllm:num_requests_waiting_by_reason{{{labels}}} 99.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} {cache}",
        f"vllm:generation_tokens_total{{{labels}}} {tokens}.0",
        f'poc_nonces_computed_total{{model_name="org/model",protocol="artifact",work="round"}} {computed}.0',
        'poc_nonces_computed_total{model_name="org/model",protocol="artifact",work="request"} 1.0',
        f'poc_held_back_seconds_total{{model_name="org/model"}} {held}',
        f'poc_queued_nonces{{model_name="org/model"}} {queued}.0',
        *(f'poc_activity{{model_name="a",activity="{word}"}} {float(word == activity)}' for word in ACTIVITIES),
        *(f'poc_ready{{model_name="a",reason="{word}"}} {float(word == ready)}' for word in ("Ready", "Paused")),
    ]
    return "\n".join(lines)


ACTIVITIES = ("Computing", "HeldByChat", "WaitingForExtension", "ReceiverFull", "Paused", "Delivering")


def after(*texts: str | None, every: float = HUNG_SECONDS) -> Watched | None:
    """What is known after looks at these expositions; None stands for a pod that does not answer."""
    found = None
    for number, text in enumerate(texts):
        look = parse_look(text, at=number * every, server=SERVER) if text is not None else None
        found = watched(found, look)
    return found


HUNG = {
    "requests run and no token comes": [metrics(running=2, waiting=3, tokens=7)] * 2,
    "requests wait and none runs": [metrics(waiting=1)] * 2,
    "chat holds PoC back and gets nothing done": [
        metrics(running=1, activity="HeldByChat", held=1),
        metrics(running=1, activity="HeldByChat", held=601),
    ],
    "a round computes and no nonce comes": [metrics(activity="Computing", computed=5)] * 2,
    "a round computes beside chat that goes on": [
        metrics(running=1, tokens=1, activity="Computing"),
        metrics(running=1, tokens=9, activity="Computing"),
    ],
    "named nonces wait": [metrics(queued=8)] * 2,
    "it does not answer in between": [metrics(running=1), None, metrics(running=1)],
}


@pytest.mark.parametrize("looks", HUNG.values(), ids=HUNG)
def test_work_that_waits_without_progress_is_a_hang(looks: Sequence[str | None]) -> None:
    assert hung(after(*looks), HUNG_SECONDS) is not None
    assert hung(after(*looks, every=HUNG_SECONDS / 4), HUNG_SECONDS) is None


WELL = {
    "idle": [metrics()] * 3,
    "tokens come": [metrics(running=1, tokens=1), metrics(running=1, tokens=2)],
    "a long prefill fills the cache": [metrics(running=1, cache=0.1), metrics(running=1, cache=0.2)],
    "requests come and go": [metrics(running=1), metrics(running=2)],
    "work came only now": [metrics(), metrics(running=1)],
    "PoC first: chat waits for nonces": [metrics(waiting=4, computed=1), metrics(waiting=4, computed=9)],
    "chat holds PoC back": [
        metrics(running=1, tokens=1, activity="HeldByChat", held=1),
        metrics(running=1, tokens=5, activity="HeldByChat", held=601),
    ],
    "chat held PoC back between the looks": [
        metrics(activity="Computing", held=1),
        metrics(activity="Computing", held=2),
    ],
    "the engine is paused or sleeps": [metrics(running=3, activity="Paused", ready="Paused")] * 3,
    "it was paused in between": [metrics(running=3), metrics(running=3, ready="Paused"), metrics(running=3)],
    "its receiver is full": [metrics(activity="ReceiverFull")] * 3,
    "it waits for an extension": [metrics(activity="WaitingForExtension")] * 3,
    "it delivers": [metrics(activity="Delivering")] * 3,
    "vLLM keeps its counters to itself": ['poc_ready{reason="Ready"} 1.0\npoc_activity{activity="HeldByChat"} 1.0'] * 3,
    "a server without PoC": ["vllm:num_requests_running 1.0\nvllm:generation_tokens_total 1.0"] * 3,
    "no metrics": [""] * 3,
    "nonsense": ['vllm:num_requests_running{} x\npoc_ready{reason="Ready"} 1'] * 3,
    "it does not answer now": [metrics(running=1), metrics(running=1), None],
}


@pytest.mark.parametrize("looks", WELL.values(), ids=WELL)
def test_load_alone_is_no_hang(looks: Sequence[str | None]) -> None:
    assert hung(after(*looks), HUNG_SECONDS) is None


def test_another_container_begins_anew() -> None:
    first = watched(None, parse_look(metrics(running=1), at=0, server="a"))
    assert hung(watched(first, parse_look(metrics(running=1), at=HUNG_SECONDS, server="b")), 60) is None


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 300), st.booleans(), st.sampled_from(["Ready", "Paused"]), st.booleans()), max_size=40
    )
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_hung_that_got_on_within_the_time(steps: list[tuple[int, bool, str, bool]]) -> None:
    """However looks come, and whether or not they are answered: a verdict needs so long a time without progress."""
    at, tokens, moved, found = 0, 0, 0, None
    for seconds, gets_on, ready, answers in steps:
        at += seconds
        tokens += gets_on
        if gets_on or (ready == "Paused" and answers):
            moved = at
        text = metrics(running=1, tokens=tokens, ready=ready)
        found = watched(found, parse_look(text, at=at, server=SERVER) if answers else None)
        assert hung(found, HUNG_SECONDS) is None or at - moved >= HUNG_SECONDS


def a_pod(number: int, **fields: Any) -> PodView:  # noqa: ANN401
    given_fields = {"ready": True, "containers": [Container(id=SERVER)], **fields}
    labels = {REVISION_LABEL: "demo-1"}
    return PodView(name=f"demo-{number}", namespace="ns", uid=f"u{number}", labels=labels, node="gpu-1", **given_fields)


def stuck_pod() -> Watched:
    found = after(*[metrics(running=1)] * 2)
    assert found is not None
    return found


STUCK = stuck_pod()


def healed(
    *pods: PodView,
    restarts: Sequence[Any] = (),
    refused: Any = None,  # noqa: ANN401
    stuck: Sequence[str] | None = None,
    status: Any = None,  # noqa: ANN401
    about: Any = None,  # noqa: ANN401
    **spec: Any,  # noqa: ANN401
) -> Healed:
    """What is done about these pods, all of which are stuck unless ``stuck`` has the uids of those that are.

    ``about`` is what an update sees otherwise than that all is well.
    """
    fleet = a_fleet(status={"restarts": list(restarts), **(status or {})}, replicas=len(pods), healing=spec)
    hang = {pod.uid: STUCK for pod in pods if stuck is None or pod.uid in stuck}
    return heal(fleet, pods, Sight(hang, refused or {}, update_of(fleet, pods, **(about or {}))), NOW)


def update_of(fleet: PoCFleet, pods: Sequence[PodView], **fields: Any) -> UpdateSeen:  # noqa: ANN401
    """What an update sees of pods that all have the newest revision and have passed their self-check."""
    passed = CheckResult.PASSED
    well: dict[str, Any] = {
        "spec": fleet.spec.update,
        "checks_pods": True,
        "name": "demo",
        "replicas": len(pods),
        "by_number": False,
        "port": 8000,
        "old": fleet.status.update,
        "now": NOW,
        "pods": pods,
        "newest": "demo-1",
        "settled": True,
        "digest": "",
        "startup_limit": 600,
        "grace": 60,
        "checks": {pod.uid: FleetPod(name=pod.name, uid=pod.uid, result=passed) for pod in pods},
    }
    return UpdateSeen(**(well | fields))


def of_failing_gpus(*errors: int, phase: str = "Complete") -> dict[str, Any]:
    """The status of pods whose GPUs have had so many errors, from the first pod on."""
    pods = [{"name": f"demo-{n}", "uid": f"u{n}", "xidErrors": count} for n, count in enumerate(errors)]
    return {"pods": pods, "update": {"phase": phase}}


def a_restart(uid: str, minutes: int = 1) -> dict[str, str]:
    return {"name": f"pod-{uid}", "uid": uid, "time": (NOW - timedelta(minutes=minutes)).isoformat()}


def test_a_hung_pod_is_recorded_and_then_evicted() -> None:
    first = healed(a_pod(0))
    assert ([one.uid for one in first.restarts], list(first.evict)) == (["u0"], [])
    assert first.findings[0] == (
        Reason.POD_HUNG,
        "demo-0 is hung: 1 requests run and 0 wait, and nothing was done for 600 s; it is evicted",
    )
    second = healed(a_pod(0), restarts=[a_restart("u0")])
    assert ([one.uid for one in second.restarts], [one.pod.uid for one in second.evict]) == (["u0"], ["u0"])


@pytest.mark.parametrize(
    ("pod", "spec"),
    [
        (a_pod(0, ready=False), {}),
        (a_pod(0, terminating=True), {}),
        (a_pod(0, containers=[Container(id="another")]), {}),
        (a_pod(0), {"hungSeconds": 601}),
    ],
)
def test_pods_that_are_left_alone(pod: PodView, spec: dict[str, Any]) -> None:
    found = healed(pod, restarts=[a_restart("u0")], **spec)
    assert not found.evict
    assert not found.findings


def test_one_pod_goes_at_a_time_and_the_hour_has_a_budget() -> None:
    found = healed(a_pod(0), a_pod(1))
    assert [one.uid for one in found.restarts] == ["u0"]
    assert found.findings[1][1].endswith("it is evicted after the other one")
    waits = healed(a_pod(0), a_pod(1), restarts=[a_restart("u0")])
    assert ([one.uid for one in waits.restarts], [one.pod.uid for one in waits.evict]) == (["u0"], ["u0"])
    spent = healed(a_pod(3), restarts=[a_restart("a"), a_restart("b")])
    assert len(spent.restarts) == 2
    assert "healing.restartsPerHour of 2 is used up" in spent.findings[0][1]
    again = healed(a_pod(3), restarts=[a_restart("a", 60), a_restart("b")])
    assert [one.uid for one in again.restarts] == ["b", "u3"]


def test_what_keeps_a_hung_pod_is_told() -> None:
    off = healed(a_pod(0), enabled=False)
    assert not off.restarts
    assert off.findings[0][1].endswith("healing.enabled is false")
    kept = healed(a_pod(0), restarts=[a_restart("u0")], refused={"u0": "waiting to evict pod demo-0"})
    assert kept.findings[0][1].endswith("; waiting to evict pod demo-0")


@given(
    minutes=st.lists(st.tuples(st.integers(0, 40), st.sets(st.integers(0, 5))), max_size=30),
    budget=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_no_hour_has_more_restarts_than_its_budget(minutes: list[tuple[int, set[int]]], budget: int) -> None:
    """Whatever hangs and when: only pods whose restart is recorded are evicted, and few of them."""
    now, restarts, times = NOW, list[Any](), dict[Any, Any]()
    for step, stuck in minutes:
        now += timedelta(minutes=step)
        pods = [a_pod(number) for number in stuck]
        fleet = a_fleet(status={"restarts": restarts}, healing={"restartsPerHour": budget})
        found = heal(fleet, pods, Sight(health={pod.uid: STUCK for pod in pods}), now)
        assert {one.pod.uid for one in found.evict} <= {one["uid"] for one in restarts}
        restarts = [one.model_dump(mode="json", by_alias=True) for one in found.restarts]
        times |= {(one.uid, one.time): one.time for one in found.restarts}
        assert sum(now - time < BUDGET_TIME for time in times.values()) <= budget


def test_a_fleet_tells_of_a_hung_pod_and_records_it() -> None:
    fleet, pod = a_fleet(), a_pod(0)
    seen = FleetSnapshot(fleet=fleet, around=AROUND, now=NOW, objects=stored(fleet), pods=[pod], health={"u0": STUCK})
    step = plan(seen)
    degraded = step.status.own_conditions["Degraded"]
    assert (degraded.status, degraded.reason) == ("True", Reason.POD_HUNG)
    ready = step.status.own_conditions["Ready"]
    assert (ready.status, ready.reason) == ("True", Reason.ALL_REPLICAS_READY)
    # `kubectl get` shows what is wrong, not that all is well.
    assert (step.status.reason, step.status.message) == (Reason.POD_HUNG, f"{degraded.message}; {ready.message}")
    told = a_fleet(status=json.loads(json.dumps(step.status.stored())))
    assert not step.evict
    second = plan(
        FleetSnapshot(fleet=told, around=AROUND, now=NOW, objects=stored(fleet), pods=[pod], health={"u0": STUCK})
    )
    assert [one.pod.uid for one in second.evict] == ["u0"]


def test_errors_of_gpus_that_grow_name_the_kubernetes_node() -> None:
    fleet, pod = a_fleet(), a_pod(0)

    def look(status: Any, errors: dict[str, GpuErrors]) -> Any:  # noqa: ANN401
        seen = a_fleet(status=status)
        return plan(
            FleetSnapshot(fleet=seen, around=AROUND, now=NOW, objects=stored(fleet), pods=[pod], gpu_errors=errors)
        ).status

    first = look(None, {"u0": GpuErrors(memory=3, xids=0)})
    assert (first.pods[0].memory_errors_before, first.own_conditions["Degraded"].status) == (3, "False")
    assert (first.reason, first.message) == (Reason.ALL_REPLICAS_READY, "the replica is ready")
    assert look(first.stored(), {}).pods[0].memory_errors == 3
    second = look(first.stored(), {"u0": GpuErrors(memory=5)})
    assert second.own_conditions["Degraded"].reason == Reason.GPU_FAULTY
    assert "demo-0 have had 2 double-bit memory errors since" in second.own_conditions["Degraded"].message
    assert "kubectl cordon gpu-1" in second.own_conditions["Degraded"].message
    assert (second.ready, second.reason) == ("1/1", Reason.GPU_FAULTY)
    assert second.message.endswith("then delete the pod; the replica is ready")
    third = look(second.stored(), {"u0": GpuErrors(memory=5, xids=1, last_xid=79)})
    errors = "2 double-bit memory errors and 1 Xid errors (the last is Xid 79)"
    assert errors in third.own_conditions["Degraded"].message
    well = FleetPod(name="a", uid="b", memory_errors=9, memory_errors_before=9, xid_errors=0)
    assert not faulty_gpus([well], Healed(restarts=[]))


def test_a_pod_whose_gpus_fail_again_and_again_is_recorded_and_then_evicted() -> None:
    pods, status = [a_pod(0), a_pod(1), a_pod(2)], of_failing_gpus(2, 3, 4)
    first = healed(*pods, stuck=(), status=status)
    (restart,) = first.restarts
    assert (restart.uid, restart.reason, restart.node) == ("u1", Reason.GPU_FAULTY, "gpu-1")
    assert (restart.message, list(first.evict), first.moves) == ("its GPUs have had 3 errors", [], True)
    assert first.failing == {"u1": "it is evicted", "u2": "it is evicted after the other one"}
    second = healed(*pods, stuck=(), status=status, restarts=[a_restart("u1")])
    assert [(one.pod.uid, one.spares) for one in second.evict] == [("u1", Spares.WORK)]
    assert not second.moves
    assert not healed(*pods, stuck=(), status=status, gpuErrors=5).failing


ROUND = work(uid="r", status={RoundStatus.SHARES: [{"index": 0, "pod": "demo-0", "uid": "u0", "state": "Running"}]})
KEEPS: dict[str, tuple[dict[str, Any], str]] = {
    "a round has given it a slot": ({"work": [ROUND]}, "it stays, waiting for the end of PoCRound r"),
    "a round may give it one": ({"work": [work(state="Pending")]}, "it stays, waiting for the end of PoCRound w"),
    "the network may validate": (
        {
            "work": [
                work(
                    state="Complete",
                    created=200,
                    labels={ORIGIN_LABEL: NETWORK_ORIGIN},
                    status={"completionTime": (NOW - timedelta(seconds=60)).isoformat()},
                )
            ]
        },
        "it stays, waiting for the network, which may validate round w until",
    ),
    "an update is under way": (
        {"old": UpdateStatus(phase=UpdatePhase.ROLLING)},
        "it stays while pods may get another template",
    ),
    "Kubernetes has yet to see the template": ({"settled": False}, "it stays while pods may get another template"),
    "it would get another template": ({"newest": "demo-2"}, "it stays while pods may get another template"),
    "a pod is missing": ({"replicas": 9}, "it stays until all other pods are ready"),
    "another pod has failed its self-check": (
        {"checks": {}},
        "it stays until all other pods have passed their self-check",
    ),
}


@pytest.mark.parametrize(("about", "says"), KEEPS.values(), ids=KEEPS)
def test_a_pod_that_computes_goes_as_for_an_update(about: dict[str, Any], says: str) -> None:
    """Nor does it hold a hung pod up, or use its budget."""
    pods, status = [a_pod(0), a_pod(1)], of_failing_gpus(3)
    assert healed(*pods, stuck=(), status=status).restarts
    for restarts in ([], [a_restart("u0")]):
        found = healed(*pods, stuck=(), status=status, restarts=restarts, about=about)
        assert (len(found.restarts), list(found.evict)) == (len(restarts), [])
        assert found.failing["u0"].startswith(says)
        found = healed(*pods, stuck=["u1"], status=status, restarts=restarts, about=about, restartsPerHour=1)
        assert [one.uid for one in found.restarts][len(restarts) :] == ["u1"]


def test_a_pod_that_computes_stays_beside_one_that_does_not() -> None:
    status = of_failing_gpus(3)
    for other in (a_pod(1, ready=False), a_pod(1, containers=[Container(id=SERVER)])):
        found = healed(a_pod(0), other, stuck=["u1"], status=status, restarts=[a_restart("u0"), a_restart("u1")])
        assert found.failing["u0"] == "it stays until all other pods are ready"
        assert "u0" not in [one.pod.uid for one in found.evict]
    kept = healed(a_pod(0), a_pod(1), stuck=(), status=status, refused={"u0": "waiting for pod demo-0"})
    assert (kept.restarts, kept.failing) == ([], {"u0": "waiting for pod demo-0"})
    refused = heal(a_fleet(status=status), [a_pod(0)], Sight(), NOW)
    assert (refused.restarts, refused.failing["u0"]) == ([], "it stays while pods may get another template")


def test_a_hung_pod_whose_gpus_fail_goes_at_once_and_its_kubernetes_node_is_told() -> None:
    status = of_failing_gpus(3)
    about = {"work": [ROUND]}
    first = healed(a_pod(0), status=status, about=about)
    (restart,) = first.restarts
    assert (restart.reason, restart.node) == (Reason.GPU_FAULTY, "gpu-1")
    event = restarted(restart)
    assert event.reason == Reason.GPU_FAULTY
    assert event.message == (
        "demo-0 is to be replaced: 1 requests run and 0 wait, and nothing was done for 600 s; its GPUs have had 3 "
        "errors; `kubectl cordon gpu-1` keeps the next one away from these GPUs"
    )
    second = healed(a_pod(0), status=status, about=about, restarts=[a_restart("u0")])
    assert [(one.pod.uid, one.spares) for one in second.evict] == [("u0", Spares.NOTHING)]
    assert (second.failing, second.findings[0][1].split("; ")[-1]) == ({"u0": "it is evicted"}, "it is evicted")


def test_a_fleet_replaces_a_pod_whose_gpus_fail() -> None:
    fleet, pod = a_fleet(), a_pod(0)
    (stored_set,) = [body for body in stored(fleet).values() if body["kind"] == "StatefulSet"]
    stored_set["status"] |= {"updateRevision": "demo-1", "currentRevision": "demo-1"}
    objects = stored(fleet) | {("StatefulSet", "demo"): stored_set}

    def look(status: Any, **seen: Any) -> FleetStep:  # noqa: ANN401
        errors = {"u0": GpuErrors(xids=3, last_xid=94)}
        return plan(
            FleetSnapshot(
                fleet=a_fleet(status=status, **seen.pop("spec", {})),
                around=AROUND,
                now=NOW,
                objects=objects,
                pods=[pod],
                gpu_errors=errors,
                **seen,
            )
        )

    told = look(None).status
    assert "first asked: `kubectl cordon gpu-1`, then delete the pod" in told.message
    off = look(told.stored(), spec={"healing": {"enabled": False}})
    assert "healing.enabled is false; `kubectl cordon gpu-1`, then delete the pod" in off.status.message
    first = look(told.stored())
    assert (first.moves, list(first.evict)) == (True, [])
    second = look(first.status.stored())
    assert [one.pod.uid for one in second.evict] == ["u0"]
    assert not look(first.status.stored(), busy={"u0": "waiting for pod demo-0, which computes work of others"}).evict


def test_what_cannot_work_goes_although_kubernetes_keeps_a_hung_pod() -> None:
    """A budget may keep that one since others are not ready. Those that work stay: it is away as well."""
    spec: dict[str, Any] = {"update": {"strategy": "Immediate", "maxUnavailable": 2}, "replicas": 3}
    objects = stored(a_fleet(**spec))
    objects["StatefulSet", "demo"]["status"] |= {"updateRevision": "demo-2", "currentRevision": "demo-1"}
    told = a_fleet(status={"restarts": [a_restart("u0")], "update": {"goodRevision": "demo-1"}}, **spec)
    pods = [a_pod(0), a_pod(1), a_pod(2, ready=False, waiting_for="CrashLoopBackOff", taken=NOW)]
    seen = FleetSnapshot(fleet=told, around=AROUND, now=NOW, objects=objects, pods=pods, health={"u0": STUCK})
    assert [one.pod.uid for one in plan(seen).evict] == ["u0"]
    kept = dataclasses.replace(seen, unevicted={"u0": "waiting to evict pod demo-0: a budget"})
    assert [one.pod.uid for one in plan(kept).evict] == ["u2", "u0"]
