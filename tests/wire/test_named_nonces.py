# SPDX-License-Identifier: Apache-2.0
"""Rounds that ask real pods for named nonces: checked proofs, a calibrated target, pods that compare themselves."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from poc_operator.clients.pods.client import PodClient
from poc_operator.model.conditions import Reason
from poc_operator.model.status import RoundState, RoundStatus
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.engine import distance, vector
from tests.support.servers.fleet import Fleet
from tests.support.servers.pod import Pod

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NAMED: dict[str, Any] = {"nodes": None, "stop": None, "callbackURL": None}
DISTANCE: dict[str, Any] = {"artifact": None, "rTarget": "1.41"}

Start = Callable[..., Awaitable[tuple[Fleet, list[Pod]]]]


@pytest.fixture
async def start(receiver: CallbackReceiver) -> AsyncIterator[Start]:
    """Starts a fleet of three pods for a round."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(PodClient())

        async def begin(**spec: Any) -> tuple[Fleet, list[Pod]]:  # noqa: ANN401
            fleet = Fleet(stack, receiver, client, **spec)
            stack.push_async_callback(fleet.operator.close)
            return fleet, [await fleet.start_pod(host) for host in HOSTS]

        yield begin


def finished(status: RoundStatus) -> bool:
    return status.state.finished


def proofs(count: int, wrong: int = 0) -> dict[str, Any]:
    """What an honest prover claims, but for the first ones."""
    inline = [{"nonce": n, "vector": vector(n + (50 if n < wrong else 0), 4)} for n in range(count)]
    return {"inline": inline}


@pytest.mark.parametrize(("wrong", "reason"), [(0, Reason.NO_FRAUD_DETECTED), (6, Reason.FRAUD_DETECTED)])
async def test_artifacts_are_recomputed_by_all_pods(start: Start, wrong: int, reason: Reason) -> None:
    fleet, pods = await start(mode="Validate", proofs=proofs(600, wrong), **NAMED)
    status = await fleet.reconcile_until(finished)
    assert status.outcome is not None
    assert (status.state, status.outcome.reason) == (RoundState.COMPLETE, reason)
    assert status.verdict is not None
    assert (status.verdict.total, status.verdict.mismatch_nonces) == (600, list(range(wrong)))
    assert sorted(nonce for pod in pods for nonce in pod.engine.computed) == list(range(600))
    assert all(pod.engine.computed for pod in pods)


async def test_distances_are_recomputed(start: Start) -> None:
    claims = [{"nonce": n, "distance": "1.391"} for n in range(100)]
    fleet, _ = await start(mode="Validate", proofs={"inline": claims}, **NAMED, **DISTANCE)
    status = await fleet.reconcile_until(finished)
    assert status.verdict is not None
    assert status.verdict.mismatch_nonces == [n for n in range(100) if distance(n) >= 1.41]
    assert status.verdict.fraud


async def test_a_nonce_without_a_finite_result_leaves_the_sample(start: Start) -> None:
    fleet, pods = await start(mode="Validate", proofs=proofs(20), **NAMED)
    for pod in pods:
        pod.engine.sick[7] = 100
    status = await fleet.reconcile_until(finished)
    assert status.verdict is not None
    assert (status.verdict.total, status.verdict.not_computed, status.verdict.fraud) == (19, 1, False)
    assert status.totals.rejected == 1


async def test_an_operator_that_is_replaced_asks_again(start: Start) -> None:
    fleet, pods = await start(mode="Validate", proofs=proofs(600), **NAMED)
    for pod in pods:
        pod.engine.seconds_per_batch = 0.05
    await fleet.reconcile_until(lambda status: any(sample.pod for sample in status.samples))
    await fleet.operator.close()
    fleet.operator = fleet.new_operator()
    for pod in pods:
        pod.engine.seconds_per_batch = 0.001
    status = await fleet.reconcile_until(finished)
    assert status.verdict is not None
    assert status.verdict.total == 600


async def test_a_target_is_found_for_a_wanted_rate(start: Start) -> None:
    fleet, _ = await start(mode="Calibrate", calibrate={"validRate": "0.25"}, **NAMED, artifact=None)
    status = await fleet.reconcile_until(finished)
    assert status.calibration is not None
    # The fake's distances run evenly from 1.39 to 1.43, which is not what theory expects.
    assert float(status.calibration.r_target) == pytest.approx(1.4, abs=0.001)
    assert (status.calibration.nonces, status.calibration.agrees) == (2000, False)
    degraded = next(found for found in status.conditions if found.type == "Degraded")
    assert degraded.reason == Reason.THEORY_DISAGREES


@pytest.mark.parametrize("spec", [{}, DISTANCE], ids=["artifacts", "distances"])
async def test_a_sick_pod_is_found_while_the_round_runs(start: Start, spec: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "nodes": {"first": 0, "last": 2, "count": 3},
        "stop": None,
        "crossCheck": {"sampleEvery": 10},
        **spec,
    }
    fleet, pods = await start(**fields)
    pods[1].engine.drift = 51
    status = await fleet.reconcile_until(lambda found: bool(found.cross_check and not found.cross_check.pending))
    assert status.cross_check is not None
    assert status.cross_check.compared == 3
    assert [found.pod for found in status.cross_check.deviating] == [f"pod-{HOSTS[1]}"]
    assert [event.reason for event in fleet.events].count(Reason.PODS_DISAGREE) == 1
    assert b"poc_pods_deviating 1.0" in fleet.metrics.text()
    before = status.totals.checked
    await fleet.reconcile_until(lambda found: found.totals.checked > before)
