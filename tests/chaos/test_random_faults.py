# SPDX-License-Identifier: Apache-2.0
"""Random faults for MINUTES (10), of a SEED (1): nothing is lost or mixed, or computed twice without need."""

import asyncio
import logging
import os
from functools import partial
from time import monotonic
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState, State
from tests.chaos.audit import audit, check_orphans
from tests.chaos.faults import schedule
from tests.chaos.history import slots_of
from tests.chaos.inflict import Chaos
from tests.simulation.gateway import Gateway
from tests.simulation.manifests import LABEL, Manifest, round_manifest
from tests.simulation.world import World, world

log = logging.getLogger(__name__)

SEED = int(os.environ.get("SEED", "1"))
SECONDS = 60 * float(os.environ.get("MINUTES", "10"))
#: Seconds after the last fault within which every slot computes again and has caught up. After an outage of the API
#: server its controllers, whose connections are broken, need up to a minute to make a new pod.
CALM_SECONDS = 170.0
#: Seconds until the gateway has forwarded what it stored last.
FORWARD_SECONDS = 30.0
#: Seconds after the end of all rounds within which the last pod has stopped, and for how long that is watched.
ORPHAN_SECONDS = 60.0
WATCHED_SECONDS = 5.0
#: The round that is never suspended; it runs until some time after the last fault.
TIMED = "timed"
#: Both are of the second fleet: the chains replace the vectors, which go on whenever the chains are suspended.
CHAINS, VECTORS = "chains", "second"
SUSPENDABLE = ("first", CHAINS)
FLEETS = {TIMED: 3, "first": 3, VECTORS: 2}
ROUNDS = (*FLEETS, CHAINS)
DECODES: Manifest = {
    "selector": {"matchLabels": {LABEL: VECTORS}},
    "decode": {"maxTokens": 12},
    "priority": 1,
    "concurrencyPolicy": "Replace",
}

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(SECONDS + 900, func_only=True)]


def works(round_: PoCRound) -> bool:
    slots = round_.status.assignments
    return not round_.status.stop_time and bool(slots) and all(slot.state is SlotState.RUNNING for slot in slots)


def newest_arrivals(fleet: World, round_: PoCRound) -> dict[int, int]:
    """Return the largest index of each slot (by offset) that has arrived."""
    slots, newest = slots_of(round_), dict[int, int]()
    for nonce in fleet.receiver.arrivals[round_.spec.block_hash]:
        offset = nonce % round_.status.slots
        newest[offset] = max(newest.get(offset, 0), slots[offset].index(nonce))
    return newest


def has_caught_up(arrived: dict[int, int], round_: PoCRound) -> bool:
    """Whether the round knows of everything that had arrived: what a lost session had delivered comes again first."""
    delivered = dict(zip(slots_of(round_), (slot.delivered for slot in round_.status.assignments), strict=True))
    return all(delivered[offset] > index for offset, index in arrived.items())


async def begin_rounds(fleet: World) -> None:
    specs: dict[str, Manifest] = {TIMED: {"stop": {"afterSeconds": int(SECONDS + CALM_SECONDS)}}, CHAINS: DECODES}
    for number, name in enumerate(ROUNDS, start=1):
        spec = {"port": fleet.server.port, "callbackURL": fleet.receiver.url, **specs.get(name, {})}
        if name == CHAINS:  # the vectors have begun by then
            await fleet.rounds.wait_until(VECTORS, works, 60)
        await fleet.rounds.create(round_manifest(name, number, **spec))
    for name, pods in {TIMED: FLEETS[TIMED], "first": FLEETS["first"], CHAINS: FLEETS[VECTORS]}.items():
        round_ = await fleet.rounds.wait_until(name, works, 60)
        assert round_.status.slots == pods, round_.status


async def end_rounds(fleet: World) -> None:
    for name in (*SUSPENDABLE, VECTORS):
        round_ = await fleet.rounds.wait_until(name, works, CALM_SECONDS)
        arrived = newest_arrivals(fleet, round_)
        await fleet.rounds.wait_until(name, partial(has_caught_up, arrived), CALM_SECONDS)
        await fleet.rounds.suspend(name, True)
        await fleet.rounds.wait_until(name, lambda r: r.status.state is State.SUSPENDED, 120)
    await fleet.rounds.wait_until(TIMED, lambda r: r.status.state is State.COMPLETE, CALM_SECONDS + 120)


async def store_of(fleet: World, gateway: Gateway, name: str) -> dict[str, Any]:
    """Return what the gateway says of a round once it has forwarded everything."""
    await gateway.wait_until_forwarded(fleet.namespace, name, FORWARD_SECONDS)
    found = await gateway.get(f"/rounds/{fleet.namespace}/{name}/progress")
    assert isinstance(found, dict)
    return found


def check_store(stored: dict[str, Any], round_: PoCRound) -> None:
    """What the gateway has is what the round says, and no two pods disagreed about a nonce."""
    name, totals = round_.metadata.name, round_.status.totals
    assert [slot["conflicts"] for slot in stored["slots"]] == [0] * round_.status.slots
    assert (stored["stored"], stored["forwarded"]) == (totals.delivered, totals.delivered)
    log.info("%s: %d stored again", name, sum(slot["duplicates"] for slot in stored["slots"]))


async def test_nothing_is_lost_whatever_happens() -> None:
    faults = schedule(SEED, SECONDS)
    log.info("seed %d: %d faults in %.0f s", SEED, len(faults), SECONDS)
    options = ("--identity=simulation",)
    simulated = world(FLEETS, seconds_per_batch=0.1, operator_options=options, with_gateway=True)
    async with simulated as fleet:
        assert fleet.gateway is not None
        async with fleet.gateway.running(), fleet.operator.running():
            await begin_rounds(fleet)
            await Chaos(fleet, SUSPENDABLE).run(faults)
            await end_rounds(fleet)
            await asyncio.sleep(ORPHAN_SECONDS)
            quiet_since = monotonic()
            stored = {name: await store_of(fleet, fleet.gateway, name) for name in ROUNDS}
            await asyncio.sleep(WATCHED_SECONDS)
        assert not fleet.operator.found_dead, "the liveness probe had the operator killed"
        await fleet.kubelet.end()
        for name in ROUNDS:
            round_ = await fleet.rounds.get(name)
            log.info("%s: %s, %s, %s", name, round_.status.state, round_.status.totals, audit(fleet, round_))
            check_store(stored[name], round_)
        check_orphans(fleet, quiet_since)
        kept = (len(fleet.operator.gaps) + 1, len(fleet.gateway.gaps) + 1, len(fleet.kubelet.sessions))
        log.info("%d operators, %d gateways, %d sessions", *kept)
