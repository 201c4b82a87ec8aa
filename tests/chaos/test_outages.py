# SPDX-License-Identifier: Apache-2.0
"""One fault at a time, at the moment at which it hurts most."""

import asyncio
from collections.abc import Collection
from functools import partial
from time import monotonic

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState, State
from tests.chaos.audit import audit
from tests.chaos.history import ended, runs_of
from tests.simulation.manifests import round_manifest
from tests.simulation.world import World, world

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(400, func_only=True)]

NAME = "fleet"
PODS = 4
OPTIONS = ("--identity=simulation",)
OUTAGE_SECONDS = 60.0
#: Seconds for the operator to note that the API server is back: it may have ended itself without its lease, and the
#: next process starts.
NOTICE_SECONDS = 20.0
ADOPTION_SECONDS = 5.0
#: Seconds until the cluster has removed the pods of a node that is gone, and made others.
GONE_SECONDS = 150.0


def works(round_: PoCRound) -> bool:
    slots = round_.status.assignments
    return bool(slots) and all(slot.state is SlotState.RUNNING for slot in slots)


def works_without(gone: Collection[str], round_: PoCRound) -> bool:
    return works(round_) and not any(slot.pod in gone for slot in round_.status.assignments)


async def create(fleet: World) -> None:
    spec = {"port": fleet.server.port, "callbackURL": fleet.receiver.url}
    await fleet.rounds.create(round_manifest(NAME, 1, **spec))


async def assert_each_slot_was_computed_in_one_go(fleet: World) -> None:
    await fleet.rounds.suspend(NAME, True)
    round_ = await fleet.rounds.wait_until(NAME, lambda r: r.status.state is State.SUSPENDED, 60)
    await ended(round_, fleet.kubelet.sessions)
    assert [len(runs) for runs in runs_of(round_, fleet.kubelet.sessions).values()] == [1] * PODS
    assert audit(fleet, round_).repeated == 0
    assert round_.status.totals.retries == 0


@pytest.mark.parametrize("how", ["freeze", "kill"])
async def test_pods_compute_on_while_the_api_server_is_away_and_nothing_is_started_twice(how: str) -> None:
    async with world({NAME: PODS}, seconds_per_batch=0.1, operator_options=OPTIONS) as fleet, fleet.operator.running():
        await create(fleet)
        before = await fleet.rounds.wait_until(NAME, works, 30)
        outage = asyncio.create_task(getattr(fleet.api_server, how)(OUTAGE_SECONDS))
        await asyncio.sleep(OUTAGE_SECONDS / 2)
        middle = fleet.receiver.arrivals[before.spec.block_hash].total()
        await outage
        arrived = fleet.receiver.arrivals[before.spec.block_hash].total()
        assert arrived > middle > before.status.totals.delivered
        await fleet.rounds.wait_until(NAME, lambda r: r.status.totals.delivered >= arrived, NOTICE_SECONDS)
        await assert_each_slot_was_computed_in_one_go(fleet)


async def test_the_next_operator_adopts_what_was_started_a_moment_ago() -> None:
    async with world({NAME: PODS}, seconds_per_batch=0.1, operator_options=OPTIONS) as fleet, fleet.operator.running():
        await create(fleet)
        while not any(session.work for session in fleet.kubelet.sessions):  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.001)
        await fleet.operator.kill(0)
        began = monotonic()
        assert not works(await fleet.rounds.get(NAME)), "killed too late to leave something to adopt"
        await fleet.rounds.wait_until(NAME, works, ADOPTION_SECONDS - (monotonic() - began))
        await assert_each_slot_was_computed_in_one_go(fleet)


async def test_what_a_lost_node_was_working_on_moves_to_other_pods() -> None:
    simulated = world({NAME: PODS}, nodes=2, seconds_per_batch=0.1, operator_options=OPTIONS)
    async with simulated as fleet, fleet.operator.running():
        await create(fleet)
        before = await fleet.rounds.wait_until(NAME, works, 30)
        await fleet.lose_node(before.status.assignments[0].pod or "")
        gone = {session.pod for session in fleet.kubelet.sessions if session.died is not None}
        assert 0 < len(gone) < PODS
        after = await fleet.rounds.wait_until(NAME, partial(works_without, gone), GONE_SECONDS)
        lost = [slot.pod in gone for slot in before.status.assignments]
        # Nobody's fault: a loss of the cluster's does not use up what a round may lose.
        assert [slot.disruptions for slot in after.status.assignments] == [int(was_lost) for was_lost in lost]
        await fleet.rounds.suspend(NAME, True)
        round_ = await fleet.rounds.wait_until(NAME, lambda r: r.status.state is State.SUSPENDED, 60)
        await ended(round_, fleet.kubelet.sessions)
        assert [len(runs) for runs in runs_of(round_, fleet.kubelet.sessions).values()] == [
            1 + was_lost for was_lost in lost
        ]
        audit(fleet, round_)
