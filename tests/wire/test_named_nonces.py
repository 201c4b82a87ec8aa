# SPDX-License-Identifier: Apache-2.0
"""Rounds that ask real pods for named nonces: checked proofs, a calibrated target, pods that compare themselves."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest

from poc_operator.apis.v1alpha1.calibration import CalibrationStatus
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import State, WorkStatus
from poc_operator.apis.v1alpha1.validation import ValidationStatus
from poc_operator.clients.pods.client import PodClient
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.engine import distance, vector
from tests.support.servers.fleet import CalibrationFleet, RoundFleet, ValidationFleet
from tests.support.servers.pod import Pod

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
DISTANCE: dict[str, Any] = {"artifact": None, "rTarget": "1.41"}
FleetT = TypeVar("FleetT", RoundFleet, ValidationFleet, CalibrationFleet)


@pytest.fixture
async def client() -> AsyncIterator[PodClient]:
    async with PodClient() as client:
        yield client


@asynccontextmanager
async def started(
    fleet: Callable[..., FleetT],
    receiver: CallbackReceiver,
    client: PodClient,
    **spec: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[FleetT, list[Pod]]]:
    """A fleet of three pods."""
    async with AsyncExitStack() as stack:
        made = fleet(stack, receiver, client, **spec)
        yield made, [await made.start_pod(host) for host in HOSTS]
        await made.operator.close()


def finished(status: WorkStatus) -> bool:
    return status.state.finished


def proofs(count: int, wrong: int = 0) -> str:
    """What an honest prover claims, except for the first ones."""
    return json.dumps([{"nonce": n, "vector": vector(n + (50 if n < wrong else 0), 4)} for n in range(count)])


@pytest.mark.parametrize(("wrong", "reason"), [(0, Reason.NO_FRAUD_DETECTED), (90, Reason.FRAUD_DETECTED)])
async def test_artifacts_are_recomputed_by_all_pods(
    receiver: CallbackReceiver, client: PodClient, wrong: int, reason: Reason
) -> None:
    async with started(ValidationFleet, receiver, client) as (fleet, pods):
        fleet.store.entry = proofs(600, wrong)
        status: ValidationStatus = await fleet.reconcile_until(finished)
    assert status.outcome is not None
    assert (status.state, status.outcome.reason) == (State.COMPLETE, reason)
    assert status.verdict is not None
    assert (status.verdict.total, sorted(status.mismatch_nonces)) == (600, list(range(wrong)))
    assert sorted(nonce for pod in pods for nonce in pod.engine.computed) == list(range(600))
    assert all(pod.engine.computed for pod in pods)


async def test_distances_are_recomputed(receiver: CallbackReceiver, client: PodClient) -> None:
    claims = [{"nonce": n, "distance": "1.391"} for n in range(100)]
    async with started(ValidationFleet, receiver, client, proofs={"inline": claims}, **DISTANCE) as (fleet, _):
        status: ValidationStatus = await fleet.reconcile_until(finished)
    assert status.verdict is not None
    assert status.mismatch_nonces == [n for n in range(100) if distance(n) >= 1.41]
    assert status.verdict.fraud


async def test_a_nonce_without_a_finite_result_leaves_the_sample(receiver: CallbackReceiver, client: PodClient) -> None:
    async with started(ValidationFleet, receiver, client) as (fleet, pods):
        fleet.store.entry = proofs(20)
        for pod in pods:
            pod.engine.sick[7] = 100
        status: ValidationStatus = await fleet.reconcile_until(finished)
    assert status.verdict is not None
    assert (status.verdict.total, status.verdict.not_computed, status.verdict.fraud) == (19, 1, False)
    assert (status.not_computed, status.degraded) == (1, "ResultsRejected")


async def test_an_operator_that_is_replaced_asks_again(receiver: CallbackReceiver, client: PodClient) -> None:
    async with started(ValidationFleet, receiver, client) as (fleet, pods):
        fleet.store.entry = proofs(600)
        for pod in pods:
            pod.engine.seconds_per_batch = 0.05
        await fleet.reconcile_until(lambda status: any(sample.pod for sample in status.samples))
        await fleet.operator.close()
        fleet.operator = fleet.new_operator()
        for pod in pods:
            pod.engine.seconds_per_batch = 0.001
        status: ValidationStatus = await fleet.reconcile_until(finished)
    assert status.verdict is not None
    assert status.verdict.total == 600


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_target_is_found_for_a_wanted_rate(
    receiver: CallbackReceiver, client: PodClient, replaced: bool
) -> None:
    async with started(CalibrationFleet, receiver, client, validRate="0.25") as (fleet, _):
        if replaced:
            await fleet.reconcile_until(lambda status: status.checked >= 500)
            await fleet.operator.close()
            fleet.operator = fleet.new_operator()
            # What another process measured is measured again.
            await fleet.reconcile_until(lambda status: status.checked < 500)
        status: CalibrationStatus = await fleet.reconcile_until(finished)
    assert status.target is not None
    # The fake's distances run evenly from 1.39 to 1.43, which is not what theory expects.
    assert float(status.target.r_target) == pytest.approx(1.4, abs=0.001)
    assert (status.target.nonces, status.target.agrees) == (2000, False)
    assert status.degraded == Reason.THEORY_DISAGREES
    assert status.retries == 0, "no pod has lost anything"


@pytest.mark.parametrize("spec", [{}, DISTANCE], ids=["artifacts", "distances"])
async def test_a_sick_pod_is_found_while_the_round_runs(
    receiver: CallbackReceiver, client: PodClient, spec: dict[str, Any]
) -> None:
    nodes = {"first": 0, "last": 2, "count": 3}
    fields: dict[str, Any] = {"nodes": nodes, "stop": None, "crossCheck": {"intervalSeconds": 10}, **spec}
    async with started(RoundFleet, receiver, client, **fields) as (fleet, pods):
        pods[1].engine.drift = 51
        status: RoundStatus = await fleet.reconcile_until(
            lambda found: bool(found.cross_check and not found.cross_check.pending)
        )
        assert status.cross_check is not None
        assert status.cross_check.compared == 3
        assert [found.pod for found in status.cross_check.deviating] == [f"pod-{HOSTS[1]}"]
        assert status.cross_check.deviating_pods == 1
        assert [event.reason for event in fleet.events].count(Reason.PODS_DISAGREE) == 1
        assert b"poc_operator_pods_deviating 1.0" in fleet.metrics.text()
        before = status.totals.checked
        await fleet.reconcile_until(lambda found: found.totals.checked > before)
